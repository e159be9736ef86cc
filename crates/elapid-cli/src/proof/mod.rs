//! What a claim that a model got better is held against.
//!
//! | file         | is                                                                       |
//! |--------------|--------------------------------------------------------------------------|
//! | `ngram.rs`   | what a plain n-gram model with a cache of the project gets               |

pub mod ngram;
