//! The routes of llama.cpp's server, as llama.vim and llama.vscode call them.
//!
//! | file            | routes                                                                 |
//! |-----------------|------------------------------------------------------------------------|
//! | `completion.rs` | `/completion`                                                          |
//! | `infill.rs`     | `/infill`; `window.rs`: how much of a file is shown                    |
//! | `shape.rs`      | what their answers look like                                           |
//! | `info.rs`       | `/health`, `/props`, `/slots`                                          |
//! | `metrics.rs`    | `/metrics`                                                             |
//! | `text.rs`       | `/tokenize`, `/detokenize`, `/apply-template`                          |
//! | `adapters.rs`   | `/lora-adapters`                                                       |
//!
//! `id_slot` and `cache_prompt` are passed over: what was read of a prompt is kept by its content,
//! whatever slot it was in.

mod adapters;
mod completion;
mod infill;
mod info;
mod metrics;
mod shape;
mod text;
mod window;

pub use adapters::{adapters, set_adapters};
pub use completion::completion;
pub use infill::{Hole, infill};
pub use info::{health, props, slots};
pub use metrics::metrics;
pub use text::{apply_template, detokenize, tokenize};
