//! Models as GGUF files describe them: architecture, metadata, tensor names.
//!
//! `arch.rs` finds the architecture of llama.cpp that computes what a config says, or says why
//! there is none; `names.rs` gives each parameter its place among the file's tensors; `export.rs`
//! writes the metadata and `import.rs` reads it, both by the rows of `config/family.rs`. A file of
//! our own also keeps its config.json (`CONFIG_KEY`), so that a round trip loses nothing. Models
//! with Mamba-3, which llama.cpp does not have, are written as an architecture of our own,
//! `elapid`, and read by that key alone.
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

pub use super::family::Arch;
pub(crate) use super::family::Trait;
pub use export::describe;
pub use import::{CONFIG_KEY, read};
pub(crate) use names::LayerNames;
pub use names::{FREQUENCIES, names};
