//! The operations. One file each: mathematics, forward, backward, kernels, test.
//!
//! A public function is an op: it computes, records itself on the tape and returns. `forward` and
//! `backward` are private and pure. Work is cut by shape and never by the number of threads.

pub mod activation;
pub mod adamw;
pub mod add;
pub mod attention;
pub mod balance;
#[cfg(test)]
pub(crate) mod check;
pub mod clamp;
pub mod conv;
pub mod dispatch;
pub mod embedding;
pub mod gated_norm;
pub mod grad_norm;
pub mod head_loss;
pub mod linear;
pub mod muon;
pub mod norm;
pub mod rope;
pub mod router;
pub mod row_gate;
pub mod scale;
pub mod scan;
mod softmax;
pub mod ssd;
