//! The engine for JavaScript: what the npm package in `web/` calls.
//!
//! Objects stay here and are known to JavaScript as handles; bytes and texts come in, bytes, texts
//! and JSON go out. Whatever JavaScript gives is checked: it ends in a `Failure` and never in a
//! panic. There is one thread, and calls come one after the other.
//!
//! | file           | is                                                                |
//! |----------------|-------------------------------------------------------------------|
//! | `model.rs`     | a model: opened, made, asked, saved                                |
//! | `training.rs`  | a model that learns, step by step; checkpoints; the plan           |
//! | `measure.rs`   | bits per byte, intervals, comparisons, golden sets                 |
//! | `vocabulary.rs`| tokenizers                                                         |
//! | `folder.rs`    | which files of a folder are learned                                |
//! | `limbic.rs`    | the recurrent head                                                 |
//! | `machine.rs`   | devices, kernels, memory                                           |
//! | `host.rs`      | where the files of a call lie                                      |
//! | `failure.rs`   | errors                                                             |

mod failure;
mod folder;
mod host;
mod limbic;
mod machine;
mod measure;
mod model;
#[cfg(test)]
mod tests;
mod training;
mod vocabulary;

pub use failure::Failure;
