//! Models as GGUF files describe them: architecture, metadata, tensor names.
//!
//! `arch.rs` finds the architecture of llama.cpp that computes what a config says, or says why
//! there is none; `names.rs` gives each parameter its place among the file's tensors; `export.rs`
//! writes the metadata; `import.rs` turns the metadata of a file into the config.json that
//! `Config::from_json` reads. A file of our own also keeps its config.json (`CONFIG_KEY`), so that
//! nothing is lost on the way there and back.
//!
//! What the conversions do to numbers, all of it in `names.rs` and in the files of the mixers:
//!
//! - decays are stored as `-exp(a_log)`;
//! - rows of queries and keys are paired where llama.cpp turns neighbours (llama, granitehybrid);
//! - matrices of experts are stacked, a fused gate and up are cut in two;
//! - the factors of Falcon-H1 are multiplied into its matrices.

mod arch;
mod export;
mod import;
mod names;

pub use arch::Arch;
pub use export::{Description, describe};
pub use import::{CONFIG_KEY, config_json};
pub(crate) use names::LayerNames;
pub use names::{FREQUENCIES, Names, names};
