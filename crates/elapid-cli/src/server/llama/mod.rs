//! The routes of llama.cpp's server, as llama.vim and llama.vscode call them.
//!
//! | file            | routes                                                                 |
//! |-----------------|------------------------------------------------------------------------|
//! | `completion.rs` | `/completion`                                                          |
//! | `infill.rs`     | `/infill`                                                              |
//! | `info.rs`       | all others: what watches and helps                                     |
//!
//! `id_slot` and `cache_prompt` are passed over: what was read of a prompt is kept by its content,
//! whatever slot it was in.

mod completion;
mod infill;
mod info;

pub use completion::completion;
pub use infill::{Hole, infill};
pub use info::{
    adapters, apply_template, detokenize, embedding, health, metrics, props, set_adapters, slots,
    tokenize,
};
