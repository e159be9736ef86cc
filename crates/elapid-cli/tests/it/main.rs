//! Tests of the binary, as one program: each program of its own would hold the whole engine again,
//! 60 MB to link and to keep.

#![allow(clippy::unwrap_used)] // a test may panic

mod adapt;
mod adapters;
mod book;
mod check;
mod common;
mod convert;
mod eval;
mod experts;
mod generate;
mod hostile;
mod limbic;
mod load;
mod lsp;
mod manual;
mod offline;
mod project;
mod pull;
mod ranks;
mod replay;
mod secrets;
mod serve;
mod serve_clients;
mod serve_failures;
mod serve_fuzz;
mod serve_life;
mod serve_models;
mod serve_page;
mod serve_studio;
mod train;
mod train_devices;
mod train_teacher;
mod train_use;
mod words;
