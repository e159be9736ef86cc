//! The commands, one file each: its flags, its help, what it does.

pub mod adapter;
pub mod bench;
pub mod check;
pub mod convert;
pub mod eval;
pub mod info;
pub mod tokenize;
pub mod train;
pub mod train_tokenizer;
