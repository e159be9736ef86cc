//! What a claim that a model got better is held against.
//!
//! | file         | is                                                                       |
//! |--------------|--------------------------------------------------------------------------|
//! | `ngram.rs`   | what a plain n-gram model with a cache of the project gets               |
//! | `neutral.rs` | a fixed set of code from no project: the guard of general ability        |

mod neutral;
pub mod ngram;

pub use neutral::neutral;
