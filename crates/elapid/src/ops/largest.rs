//! The largest logits of each row and the logarithm of its sum: what sampling needs, so that a few
//! numbers come back from a GPU and not a vocabulary. There is no backward.
//! (tidy: allow unchecked)
//!
//! ```text
//! out[row] = log sum e^l, how many l are NaN or plus infinity, id, l, id, l, ...
//! ```
//!
//! in the order of logits, among equals the smallest id first. Where fewer than `k` are above minus
//! infinity the ids behind them are -1. An id is exact in f32 up to `N_VOCAB_MAX`.
//!
//! | name     | shape            |
//! |----------|------------------|
//! | `logits` | (n_row, n_vocab) |
//! | `out`    | (n_row, 2 + 2 k) |
//!
//! A thread knows the best of its own tokens; of these the group takes the best `k` times, and who
//! had it looks for its next.

use crate::tensor::Tensor;
use crate::tensor::gpu::{Gpu, Kernel, Work, bind};

/// Most tokens of a row that are asked for.
pub const K_MAX: usize = 64;
const N_VOCAB_MAX: usize = 1 << 24;
const THREADS: usize = 256;

static LARGEST: Kernel =
    Kernel::new("largest", include_str!("largest.wgsl"), include_str!("largest.cu"));

/// Whether a device looks for the `k` largest itself; else the host reads all logits.
pub fn can_find(gpu: &Gpu, n_vocab: usize, k: usize) -> bool {
    let n_rounds = (k + 3) * n_vocab.div_ceil(THREADS) + 10 * k;
    k <= K_MAX && n_vocab < N_VOCAB_MAX && n_rounds <= gpu.caps().n_rounds_max
}

/// The `k` largest of each row, on the GPU where the logits are.
pub fn largest(gpu: &Gpu, logits: &Tensor, k: usize) -> Tensor {
    let (n_row, n_vocab) = logits.dims2();
    assert!(can_find(gpu, n_vocab, k), "the {k} largest of {n_vocab} logits");
    let mut out = Tensor::uninit(logits.device(), &[n_row, 2 + 2 * k]);
    let params = [n_row.into(), n_vocab.into(), k.into()];
    let work = Work::groups(n_row, THREADS);
    gpu.launch(&LARGEST, work, &[], &mut bind([logits], [&mut out]), &params);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::devices;
    use crate::tensor::rng::Rng;

    /// The plain twin.
    fn twin(logits: &[f32], k: usize) -> Vec<f32> {
        let is_bad = |x: &f32| x.is_nan() || *x == f32::INFINITY;
        let good = |id: &usize| !is_bad(&logits[*id]) && logits[*id] > f32::NEG_INFINITY;
        let mut ids: Vec<usize> = (0..logits.len()).filter(good).collect();
        ids.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let n_bad = logits.iter().filter(|x| is_bad(x)).count();
        let first = ids.first().map_or(f32::MIN, |id| logits[*id]);
        let sum: f64 = logits.iter().map(|x| f64::from(x - first).exp()).sum();
        let mut out = vec![first + sum.ln() as f32, n_bad as f32];
        for n in 0..k {
            out.extend(ids.get(n).map_or([-1.0, f32::MIN], |id| [*id as f32, logits[*id]]));
        }
        out
    }

    fn check(rows: &[Vec<f32>], k: usize) {
        for (device, _) in devices() {
            let gpu = device.gpu().unwrap();
            let n_vocab = rows[0].len();
            let logits = Tensor::from_f32(device, &[rows.len(), n_vocab], &rows.concat());
            let got = largest(gpu, &logits, k).to_vec();
            device.check().unwrap();
            for (row, got) in rows.iter().zip(got.chunks_exact(2 + 2 * k)) {
                let want = twin(row, k);
                assert_eq!(got[1..], want[1..], "{k} of {n_vocab} on {device:?}");
                let is_near = (got[0] - want[0]).abs() < 1e-4 || want[1] > 0.0;
                assert!(is_near, "log of the sum: {} for {}", got[0], want[0]);
            }
        }
    }

    #[test]
    fn the_largest_come_in_order_and_of_equals_the_smallest_id_first() {
        let rng = Rng::new(3, 9);
        let numbers = |seed: u64, n: usize| -> Vec<f32> {
            (0..n as u64).map(|at| 4.0 * rng.normal(seed * 100_000 + at) as f32).collect()
        };
        check(&[numbers(0, 1)], 1);
        check(&[numbers(1, 700), numbers(2, 700), numbers(3, 700)], 40);
        check(&[numbers(4, 49_152)], K_MAX);
        // Few different numbers: most are equal.
        let coarse: Vec<f32> = numbers(5, 1000).iter().map(|x| x.round()).collect();
        check(&[coarse], 64);
    }

    #[test]
    fn forbidden_tokens_are_never_among_them_and_broken_ones_are_counted() {
        let mut row = vec![f32::NEG_INFINITY; 300];
        (row[7], row[299]) = (-1.5, 2.5);
        check(std::slice::from_ref(&row), 4);
        (row[3], row[280]) = (f32::NAN, f32::INFINITY);
        check(&[row], 4);
    }
}
