//! Keys and values of one sequence on a GPU: a run of rows each, with room for more.
//!
//! Clones share the run. Each of them sees the rows up to its own length, so that the one that has
//! all of them grows where it is, and snapshots of one growing sequence cost nothing; the others
//! take a copy when they grow. Numbers are stored as activations are.

use super::gpu::{New, append};
use super::*;
use crate::tensor::gpu::Gpu;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Rows that a run grows by, at least.
const N_ROW_MORE: usize = 64;

/// Keys and values; none before the first token.
#[derive(Clone, Default)]
pub(super) struct GpuRows(Option<Arc<Mutex<Held>>>);

struct Held {
    /// By `Side`: (room, n_kv_head * d_head).
    sides: [Tensor; 2],
    /// Rows that somebody has written.
    n_written: usize,
}

impl GpuRows {
    fn held(&self) -> Option<MutexGuard<'_, Held>> {
        self.0.as_ref().map(|held| held.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Adds rows behind the first `n_tok`, and makes room for `n_ahead` more.
    pub fn append(&mut self, gpu: &Gpu, new: &New, n_tok: usize, n_ahead: usize) {
        let n_after = n_tok + new.rows.len();
        self.open(gpu, new.k, n_tok, n_after + n_ahead);
        if let Some(mut held) = self.held() {
            held.n_written = n_after;
            append(gpu, new, held.sides.each_mut());
        }
    }

    /// Whether the next row goes where recorded work writes it: behind the first `n_tok`, in a
    /// place that is nobody else's.
    pub fn can_step(&self, n_tok: usize) -> bool {
        let is_alone = self.0.as_ref().is_some_and(|held| Arc::strong_count(held) == 1);
        let is_open = |held: MutexGuard<Held>| {
            n_tok < held.sides[0].shape()[0] && (is_alone || held.n_written == n_tok)
        };
        self.held().is_some_and(is_open)
    }

    /// Notes a row that recorded work has written behind the first `n_tok`.
    pub fn step_on(&mut self, n_tok: usize) {
        if let Some(mut held) = self.held() {
            held.n_written = n_tok + 1;
        }
    }

    /// Where keys and values are.
    pub fn places(&self) -> Option<[u64; 2]> {
        self.held().map(|held| held.sides.each_ref().map(Tensor::cuda_address))
    }

    /// Makes room for `n_after` rows where nobody else's are.
    fn open(&mut self, gpu: &Gpu, k: &Tensor, n_tok: usize, n_after: usize) {
        let is_alone = self.0.as_ref().is_some_and(|held| Arc::strong_count(held) == 1);
        let before = self.held();
        let room = before.as_ref().map_or(0, |held| held.sides[0].shape()[0]);
        let is_last = before.as_ref().is_some_and(|held| held.n_written == n_tok);
        if n_after <= room && (is_alone || is_last) {
            return;
        }
        let (device, width) = (k.device(), k.shape()[1]);
        let row_bytes = device.activation_dtype().n_bytes(width).expect("plain numbers");
        let n_row_max = gpu.binding_bytes_max() / row_bytes.max(1);
        if n_after > n_row_max {
            let mib = |n_bytes: usize| n_bytes >> 20;
            let (needs, has) = (mib(n_after * row_bytes), mib(gpu.binding_bytes_max()));
            gpu.fail(format!(
                "the key-value cache needs a buffer of {needs} MiB, this GPU allows {has} MiB"
            ));
        }
        let more = n_after.max(room + room / 2).next_multiple_of(N_ROW_MORE);
        let shape = [more.min(n_row_max).max(n_after), width];
        let sides = [(); 2].map(|()| Tensor::activation(device, &shape));
        let held = Held { sides, n_written: n_tok };
        if let Some(before) = before.filter(|_| n_tok > 0) {
            for (old, new) in before.sides.iter().zip(&held.sides) {
                let (old, new) = (old.gpu_buffer().0, new.gpu_buffer().0);
                gpu.copy((old, 0), (new, 0), n_tok * row_bytes);
            }
        }
        self.0 = Some(Arc::new(Mutex::new(held)));
    }

    /// The first `n_tok` keys and values.
    pub fn tensors(&self, n_tok: usize) -> Option<[Tensor; 2]> {
        self.held().map(|held| held.sides.each_ref().map(|side| side.rows(0..n_tok)))
    }

    /// Some of them, brought over.
    #[cfg(test)]
    pub fn read(&self, side: Side, rows: Range<usize>) -> Vec<f32> {
        let Some(held) = self.held() else { return Vec::new() };
        held.sides[side as usize].rows(rows).to_vec()
    }

    /// A number of its own, and the bytes.
    pub fn part(&self) -> Option<(usize, usize)> {
        let number = Arc::as_ptr(self.0.as_ref()?) as usize;
        self.held().map(|held| (number, held.sides.iter().map(Tensor::n_bytes).sum()))
    }
}
