//! The operations. One file each: mathematics, forward, backward, kernels, test.
//!
//! A public function is an op: it computes, records itself on the tape and returns. `forward` and
//! `backward` are private and pure. Work is cut by shape and never by the number of threads.

pub mod activation;
pub mod add;
pub mod scale;
