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
pub mod largest;
pub mod leaky;
pub mod linear;
pub mod mamba3;
pub mod muon;
pub mod norm;
pub mod rank_gate;
pub mod rope;
pub mod router;
pub mod row_gate;
pub mod scale;
pub mod scan;
mod softmax;
pub mod sources;
pub mod square_error;
pub mod ssd;

use crate::tape::Var;
use crate::tensor::Tensor;

/// On a GPU `y` is computed again where the backward pass needs it, and not held.
fn remade(y: Var, make: impl Fn() -> Tensor + Send + Sync + 'static) -> Var {
    if y.needs_grad() && y.value().device().gpu().is_some() { y.remade_by(make) } else { y }
}

/// Makes each the only handle of its numbers: other handles keep the old ones.
fn own(states: &mut [&mut Tensor]) {
    for state in states {
        if !state.is_unique() {
            **state = state.copied();
        }
    }
}

/// Pieces of `len` numbers of a tensor that may be absent, then `None` without end.
fn pieces_of(x: Option<&mut Tensor>, len: usize) -> impl Iterator<Item = Option<&mut [f32]>> {
    let pieces = x.map_or_else(Default::default, Tensor::f32_mut).chunks_mut(len.max(1));
    pieces.map(Some).chain(std::iter::repeat_with(|| None))
}

/// Cuts the front of `data` into pieces of these lengths.
fn split<const N: usize>(mut data: &mut [f32], lengths: [usize; N]) -> [&mut [f32]; N] {
    lengths.map(|length| data.split_off_mut(..length).expect("the buffer holds every piece"))
}

/// Cuts the first `width` columns of rows of `stride` numbers into pieces of `len`: for each piece,
/// its part of every row.
fn columns(rows: &mut [f32], (stride, width): (usize, usize), len: usize) -> Vec<Vec<&mut [f32]>> {
    let mut pieces: Vec<Vec<&mut [f32]>> = Vec::new();
    pieces.resize_with(width.div_ceil(len), || Vec::with_capacity(rows.len() / stride));
    for row in rows.chunks_mut(stride) {
        let parts = row[..width].chunks_mut(len);
        pieces.iter_mut().zip(parts).for_each(|(piece, part)| piece.push(part));
    }
    pieces
}

/// `to[col][row] = from[row][col]`, for rows of `n_cols` numbers.
fn transpose(from: &[f32], n_cols: usize, to: &mut [f32]) {
    let n_rows = from.len() / n_cols.max(1);
    for (col, to) in to.chunks_exact_mut(n_rows.max(1)).enumerate() {
        for (to, row) in to.iter_mut().zip(from.chunks_exact(n_cols)) {
            *to = row[col];
        }
    }
}
