//! The calls of JavaScript, made from Rust: on a machine with a disk, and on the CPU, where every
//! future is ready at once.
