//! The commands, one file each: its flags, its help, what it does.

pub mod bench;
pub mod check;
pub mod info;
