//! The routes of llama.cpp's server, as llama.vim and llama.vscode call them.
//!
//! | file            | routes                                                                 |
//! |-----------------|------------------------------------------------------------------------|
//! | `completion.rs` | `/completion`                                                          |
//! | `infill.rs`     | `/infill`                                                              |
//! | `adapters.rs`   | `/lora-adapters`                                                       |
//! | `info.rs`       | all others: what watches and helps                                     |
//!
//! `id_slot` and `cache_prompt` are passed over: what was read of a prompt is kept by its content,
//! whatever slot it was in.

mod adapters;
mod completion;
mod infill;
mod info;

pub use adapters::{adapters, set_adapters};
pub use completion::completion;
pub use infill::{Hole, infill};
pub use info::{apply_template, detokenize, embedding, health, metrics, props, slots, tokenize};
