//! The commands, one file each: its flags, its help, what it does.

pub mod adapt;
pub mod bench;
pub mod chat;
pub mod check;
pub mod convert;
pub mod eval;
pub mod generate;
pub mod info;
pub mod kernels;
pub mod limbic;
pub mod serve;
pub mod tokenize;
pub mod train;
pub mod train_tokenizer;
pub mod verify;
pub mod watch;
