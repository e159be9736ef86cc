//! What a claim that a model got better is held against.
//!
//! | file         | is                                                                       |
//! |--------------|--------------------------------------------------------------------------|
//! | `ngram.rs`   | what a plain n-gram model with a cache of the project gets               |
//! | `memory.rs`  | how many rare strings of the training files a model repeats verbatim     |
//! | `neutral.rs` | a fixed set of code from no project: the guard of general ability        |

pub mod memory;
mod neutral;
pub mod ngram;

pub use neutral::neutral;
