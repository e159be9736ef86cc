//! Tests of the engine from outside, as one program: each program of its own would hold the whole
//! engine again, 60 MB to link and to keep.
//!
//! `hostile.rs` stands beside it because it counts what its process allocates.

#![allow(clippy::unwrap_used)] // a test may panic

mod config;
mod convert;
mod devices;
mod eval;
mod failures;
mod malformed;
mod model;
mod train;
