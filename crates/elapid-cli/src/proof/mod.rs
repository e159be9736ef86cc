//! The proof that an adapted model is better: measured, written down, measured again by anyone.
//!
//! | file             | is                                                                     |
//! |------------------|------------------------------------------------------------------------|
//! | `measure.rs`     | a model on held-out text: bits per byte, lines that it completes       |
//! | `guard.rs`       | what it lost elsewhere, and how far it is taken back for that          |
//! | `certificate.rs` | everything that was measured, with hashes of what it was measured on   |
//! | `verify.rs`      | a certificate against files, and its figures measured again            |
//!
//! Not here: what is held out (`source/history.rs`), training (`run/`).

use elapid::Document;

pub mod certificate;
pub mod guard;
pub mod measure;
pub mod verify;

/// The fixed neutral set. While there is none, general ability is not measured, and certificates
/// say nothing of it.
pub fn neutral() -> Vec<Document> {
    Vec::new()
}
