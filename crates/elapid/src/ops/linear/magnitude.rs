//! Magnitudes of an adapted weight (DoRA, Liu et al., 2024): each row of `w + scale b @ a` is
//! brought to a trained length, so that the rest of the adapter learns directions.
//!
//!     v = w + scale b @ a        n = |v|, row by row        y = (m / n) (x @ v^T) + bias
//!
//! As in the paper and in PEFT, `n` follows the adapter but is a constant to the gradient. It is
//! found without forming `v`, from the squares of the rows of the frozen `w`:
//!
//!     n^2 = |w|^2 + 2 scale b . (w @ a^T) + scale^2 b . (b @ (a @ a^T))
//!
//! | name      | shape   |                                |
//! |-----------|---------|--------------------------------|
//! | `m`       | (d_out) | trained; begins at `|w|`       |
//! | `squares` | (d_out) | `|w|^2`                        |

use super::operands::AdapterValues;
use crate::tape::Var;
use crate::tensor::Tensor;
use crate::tensor::cpu::{Cpu, F32s, Mat, MatMut, Scope};
use crate::tensor::device::Device;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Trained lengths of the rows of an adapted weight.
#[derive(Clone)]
pub struct Magnitude {
    /// (d_out).
    pub m: Var,
    /// What they are divided by.
    pub norms: Norms,
}

/// Lengths of the rows before they are brought to others.
#[derive(Clone)]
pub enum Norms {
    /// Found at each call, from these squares of the rows of the weight: (d_out).
    Followed(Tensor),
    /// Known, since the adapter does not change: (d_out).
    Fixed(Tensor),
}

/// A square below this is taken for this: a row that the adapter has cancelled has no direction.
const SQUARE_MIN: f64 = 1e-24;
/// Rows of a task.
const N_ROWS: usize = 64;

/// The square of each row of a matrix in any dtype: (d_out).
pub fn row_squares(weight: &Tensor) -> Tensor {
    let cpu = match weight.device() {
        Device::Cpu(cpu) => cpu,
        // Once for a weight that is frozen: by the host.
        Device::Gpu(_) => {
            return row_squares(&weight.to(&weight.device().host_device())).to(weight.device());
        }
    };
    let (d_out, d_in) = weight.dims2();
    let mut squares = Tensor::uninit(weight.device(), &[d_out]);
    cpu.each_piece(squares.f32_mut(), N_ROWS, |idx, squares| {
        let mut row = vec![0.0; d_in];
        for (at, square) in squares.iter_mut().enumerate() {
            weight.read_f32((idx * N_ROWS + at) * d_in, &mut row);
            *square = row.iter().map(|&w| w as f64 * w as f64).sum::<f64>() as f32;
        }
    });
    squares
}

/// `w + scale b @ a` in f32, its rows brought to the lengths `m` where there are any.
pub fn merge(weight: &Tensor, a: &Tensor, b: &Tensor, scale: f32, m: Option<&Tensor>) -> Tensor {
    let cpu = match weight.device() {
        Device::Cpu(cpu) => cpu,
        // For a file that is written: by the host.
        Device::Gpu(gpu) => {
            let host = Device::Cpu(gpu.host().clone());
            let [weight_here, a, b] = [weight, a, b].map(|tensor| tensor.to(&host));
            let m = m.map(|m| m.to(&host));
            return merge(&weight_here, &a, &b, scale, m.as_ref()).to(weight.device());
        }
    };
    let ((d_out, d_in), rank) = (weight.dims2(), a.shape()[0]);
    a.expect_shape("merge: a", &[rank, d_in]);
    b.expect_shape("merge: b", &[d_out, rank]);
    let mut v = weight.to_f32();
    let out = MatMut::new(v.f32_mut(), d_out, d_in);
    let (a, b) = (Mat::new(a.f32(), rank, d_in), Mat::new(b.f32(), d_out, rank));
    cpu.gemm(out, 1.0, scale, b, a, Scope::Machine);
    if let Some(m) = m {
        let squares = row_squares(&v);
        for (row, v) in v.f32_mut().chunks_exact_mut(d_in.max(1)).enumerate() {
            let factor = m.f32()[row] / norm(squares.f32()[row] as f64);
            v.iter_mut().for_each(|v| *v *= factor);
        }
    }
    v
}

fn norm(square: f64) -> f32 {
    square.max(SQUARE_MIN).sqrt() as f32
}

/// Lengths of `rows` of the adapted weight; `wa` is `w @ a^T` for them.
pub(super) fn norms(
    cpu: &Cpu,
    adapter: &AdapterValues,
    squares: &Tensor,
    rows: Range<usize>,
    wa: &[f32],
) -> Vec<f32> {
    let (rank, d_in) = adapter.a.dims2();
    let b = &adapter.b.f32()[rows.start * rank..rows.end * rank];
    let a = Mat::new(adapter.a.f32(), rank, d_in);
    let (mut aa, mut baa) = (vec![0.0; rank * rank], vec![0.0; b.len()]);
    cpu.gemm(MatMut::new(&mut aa, rank, rank), 0.0, 1.0, a, a.t(), Scope::Machine);
    let (b_mat, aa) = (Mat::new(b, rows.len(), rank), Mat::new(&aa, rank, rank));
    cpu.gemm(MatMut::new(&mut baa, rows.len(), rank), 0.0, 1.0, b_mat, aa, Scope::Machine);
    let scale = adapter.scale as f64;
    let row = |(idx, row): (usize, usize)| {
        let at = idx * rank..(idx + 1) * rank;
        let terms = b[at.clone()].iter().zip(&wa[at.clone()]).zip(&baa[at]);
        let more = terms.map(|((&b, &wa), &baa)| b as f64 * (2.0 * wa as f64 + scale * baa as f64));
        norm(squares.f32()[row] as f64 + scale * more.sum::<f64>())
    };
    rows.enumerate().map(row).collect()
}

/// `y = beta y + factor x`, with a factor for each column; with `beta` zero y is not read.
pub(super) struct Scale<'a> {
    pub factors: &'a [f32],
    pub x: &'a [f32],
    pub y: &'a mut [f32],
    pub beta: f32,
}

impl WithSimd for Scale<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Scale { factors, x, y, beta } = self;
        let d = factors.len().max(1);
        for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
            for at in (0..d).step_by(F32s::<S>::LANES) {
                let (x, factor) = (F32s::load(simd, &x[at..]), F32s::load(simd, &factors[at..]));
                let scaled = match beta == 0.0 {
                    true => x * factor,
                    false => x.mul_add(factor, F32s::load(simd, &y[at..]) * x.same(beta)),
                };
                scaled.store(&mut y[at..]);
            }
        }
    }
}
