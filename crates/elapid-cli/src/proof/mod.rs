//! The proof that an adapted model is better: measured, written down, measured again by anyone.
//!
//! | file             | is                                                                     |
//! |------------------|------------------------------------------------------------------------|
//! | `measure.rs`     | a model on held-out text: bits per byte, lines that it completes       |
//! | `ngram.rs`       | what a plain n-gram model with a cache of the project gets             |
//! | `memory.rs`      | how many rare strings of the training files a model repeats verbatim   |
//! | `neutral.rs`     | a fixed set of code from no project                                    |
//! | `guard.rs`       | what a model lost there, and how far it is taken back for that         |
//! | `certificate.rs` | everything that was measured, with hashes of what it was measured on   |
//! | `verify.rs`      | a certificate against files, and its figures measured again            |
//!
//! Not here: what is held out (`source/history.rs`), training (`run/`).

pub mod certificate;
pub mod guard;
pub mod measure;
pub mod memory;
mod neutral;
pub mod ngram;
pub mod verify;

pub use neutral::neutral;
