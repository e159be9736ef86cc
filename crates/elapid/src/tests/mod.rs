//! Tests of whole models: golden values, training, devices, conversion, malformed files.

#![allow(clippy::unwrap_used)] // a test may panic

mod config;
mod convert;
mod devices;
mod eval;
mod failures;
mod group;
mod hostile;
mod malformed;
mod model;
#[path = "../../../../lab/fuzz/mutate.rs"]
mod mutate;
mod pages;
#[path = "../../../../lab/fuzz/seeds.rs"]
mod seeds;
mod teacher;
mod train;
