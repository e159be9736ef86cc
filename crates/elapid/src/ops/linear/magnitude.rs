//! Magnitudes of an adapted weight (DoRA, Liu et al., 2024): each row of `w + scale b @ a` is
//! brought to a trained length, so that the rest of the adapter learns directions.
//!
//! ```text
//! v = w + scale b @ a        n = |v|, row by row        y = (m / n) (x @ v^T) + bias
//! ```
//!
//! As in the paper and in PEFT, `n` follows the adapter but is a constant to the gradient. It is
//! found without forming `v`, from the squares of the rows of the frozen `w`:
//!
//! ```text
//! n^2 = |w|^2 + 2 scale b . (w @ a^T) + scale^2 b . (b @ (a @ a^T))
//! ```
//!
//! | name      | shape   |                                |
//! |-----------|---------|--------------------------------|
//! | `m`       | (d_out) | trained; starts at `|w|`       |
//! | `squares` | (d_out) | `|w|^2`                        |

use super::Adapter;
use super::columns::{BIAS, consts};
use crate::tape::Var;
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Kernel, Work, bind};
use crate::tensor::product::{Side, for_products, product};
use std::ops::Range;

static NORMS: Kernel = Kernel { entry: "linear_norms", ..BIAS };

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
    if weight.device().gpu().is_some() {
        // For a file that is written: by the host.
        let host = weight.device().host_device();
        let [weight_here, a, b] = [weight, a, b].map(|tensor| tensor.to(&host));
        let m = m.map(|m| m.to(&host));
        return merge(&weight_here, &a, &b, scale, m.as_ref()).to(weight.device());
    }
    let ((d_out, d_in), rank) = (weight.dims2(), a.shape()[0]);
    a.expect_shape("merge: a", &[rank, d_in]);
    b.expect_shape("merge: b", &[d_out, rank]);
    let mut v = weight.to_f32();
    product(&mut v, 1.0, scale, Side::Plain(b), Side::Plain(a));
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

/// Lengths of `rows` of the adapted weight, and the magnitudes over them; `wa` is `w @ a^T` for
/// these rows, read where norms are followed.
pub(super) fn norms(
    adapter: &Adapter,
    Magnitude { m, norms: known }: &Magnitude,
    rows: &Range<usize>,
    wa: &Tensor,
) -> (Tensor, Tensor) {
    let (a, b, m) = (adapter.a.value(), adapter.b.value(), m.value());
    let (device, rank) = (a.device(), a.shape()[0]);
    let mut baa = Tensor::uninit(device, wa.shape());
    if let Norms::Followed(_) = known {
        let mut aa = Tensor::uninit(device, &[rank, rank]);
        product(&mut aa, 0.0, 1.0, Side::Plain(a), Side::Transposed(a));
        let b = for_products(b).rows(rows.clone());
        product(&mut baa, 0.0, 1.0, Side::Plain(&b), Side::Plain(&aa));
    }
    let [mut norms, mut factors] = [(); 2].map(|()| Tensor::uninit(device, &[rows.len()]));
    let Device::Gpu(gpu) = device else {
        let lengths = norms.f32_mut().iter_mut().zip(factors.f32_mut());
        for ((idx, row), (length, factor)) in rows.clone().enumerate().zip(lengths) {
            *length = match known {
                Norms::Fixed(norms) => norms.f32()[row],
                Norms::Followed(squares) => {
                    let at = idx * rank..(idx + 1) * rank;
                    let b = &b.f32()[row * rank..(row + 1) * rank];
                    let more = correction(b, &wa.f32()[at.clone()], &baa.f32()[at], adapter.scale);
                    norm(squares.f32()[row] as f64 + more)
                }
            };
            *factor = m.f32()[row] / *length;
        }
        return (norms, factors);
    };
    let (known, has): (&Tensor, &[&'static str]) = match known {
        Norms::Followed(squares) => (squares, &[]),
        Norms::Fixed(norms) => (norms, &["FIXED"]),
    };
    let mut args = bind([known, m, b, wa, &baa], [&mut norms, &mut factors]);
    let params = [rows.len().into(), rows.start.into(), adapter.scale.into()];
    gpu.launch(&NORMS, Work::each(rows.len()), &consts(rank, has), &mut args, &params);
    (norms, factors)
}

/// `2 scale b . wa + scale^2 b . baa`, of one row.
fn correction(b: &[f32], wa: &[f32], baa: &[f32], scale: f32) -> f64 {
    let scale = scale as f64;
    let terms = b.iter().zip(wa).zip(baa);
    let more = terms.map(|((&b, &wa), &baa)| b as f64 * (2.0 * wa as f64 + scale * baa as f64));
    scale * more.sum::<f64>()
}
