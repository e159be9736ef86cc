//! What there is to learn from: files under a path, when they were committed, what was left out,
//! and how far compressors get.
//!
//! | file          | is                                                                      |
//! |---------------|-------------------------------------------------------------------------|
//! | `walk.rs`     | paths to documents, and documents to training and held-out ones         |
//! | `entry.rs`    | a document that stays in its file until it is needed                    |
//! | `left_out.rs` | what was left out and why, for people and for machines                  |
//! | `secrets.rs`  | keys, passwords and addresses in a text, and the text without them      |
//! | `git.rs`      | the last commit of every file                                           |
//! | `index.rs`    | which pieces of a project belong beside a cursor; `terms.rs`: what it   |
//! |               | knows of code                                                           |
//! | `history.rs`  | the tree as it was, and what was written since                          |
//! | `compress.rs` | gzip and zstd, the marks to pass                                        |
//!
//! Not here: what makes a file unwanted, what a near copy is, how the split is drawn: the engine's
//! `data` knows.

pub mod compress;
pub mod entry;
pub mod git;
pub mod history;
pub mod index;
pub mod left_out;
pub mod secrets;
mod terms;
#[cfg(test)]
mod tests;
pub mod walk;
