//! Linear map: `y = x @ w^T + bias + scale (x @ a^T) @ b^T`.
//!
//! The weight may be stored in f16, bf16 or a block format; it is then decoded a panel of rows at
//! a time, and is frozen. The last term is a low-rank adapter, absent for most. Its input may go
//! through dropout, and the rows of the adapted weight may be brought to trained lengths.
//!
//!     dx = dy @ w + du @ a           u = x @ a^T,   du = scale dy @ b
//!     dw = dy^T @ x                  da = du^T @ x
//!     dbias = sum over rows of dy    db = scale dy^T @ u
//!
//! | name   | shape            |          | name | shape            |
//! |--------|------------------|----------|------|------------------|
//! | `x`    | (n_tok, d_in)    |          | `a`  | (rank, d_in)     |
//! | `w`    | (d_out, d_in)    |          | `b`  | (d_out, rank)    |
//! | `bias` | (d_out)          |          | `m`  | (d_out)          |
//! | `y`    | (n_tok, d_out)   |          |      |                  |
//!
//! Three forms: `linear`; `linear_split`, whose columns go to several outputs without a copy; and
//! `linear_grouped`, where runs of rows have weights of their own: experts, multiplied in blocks.
//! Gradients are made only for operands that want them. Kept: `x` and `u`, and with magnitudes the
//! result before they scale it.
//!
//! A fourth, `linear_each`, is several maps of one input. In generation all of them may be quick
//! instead of exact (`quick.rs`).
//!
//! The products are in `operands.rs`, `gpu.rs`, `bias.rs` and `narrow.rs`, the mask is in
//! `dropout.rs`, the lengths are in `magnitude.rs`.

mod bias;
mod dropout;
pub(super) mod gpu;
mod magnitude;
mod narrow;
mod operands;
mod quick;

pub use self::dropout::Dropout;
pub use self::magnitude::{Magnitude, Norms, merge, row_squares};

use self::operands::{Input, Operands, Pass};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use std::ops::Range;
use std::sync::Arc;

/// The operands on the right.
#[derive(Clone)]
pub struct Linear {
    /// (d_out, d_in), in any dtype.
    pub weight: Var,
    /// Output `i` is that of row `order[i]`, where rows are not in their places.
    pub order: Option<Arc<[usize]>>,
    /// (d_out).
    pub bias: Option<Var>,
    /// Low-rank addition.
    pub adapter: Option<Adapter>,
    /// How the product is computed where nothing is recorded.
    pub arithmetic: Arithmetic,
}

/// How a product with a stored matrix is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arithmetic {
    /// In f32, whatever the matrix is stored in.
    #[default]
    Exact,
    /// Without decoding it: matrices in blocks take inputs rounded to 8 bits, as in ggml.
    Quick,
}

/// Some rows of a map for some tokens.
struct Part<'a> {
    linear: &'a Linear,
    rows: Range<usize>,
    tokens: Range<usize>,
}

/// A low-rank addition to a weight: `scale * b @ a`.
#[derive(Clone)]
pub struct Adapter {
    /// (rank, d_in).
    pub a: Var,
    /// (d_out, rank).
    pub b: Var,
    /// Factor of the product.
    pub scale: f32,
    /// What of the input the adapter does not see, in training.
    pub dropout: Option<Dropout>,
    /// Lengths of the rows of the adapted weight.
    pub magnitude: Option<Magnitude>,
}

/// Rows of a task that works row by row.
const N_ROWS: usize = 64;

impl From<Var> for Linear {
    fn from(weight: Var) -> Linear {
        let (order, bias, adapter) = (None, None, None);
        Linear { weight, order, bias, adapter, arithmetic: Arithmetic::Exact }
    }
}

impl Linear {
    /// Width of the result.
    pub fn d_out(&self) -> usize {
        self.weight.value().shape()[0]
    }

    /// Everything a gradient may go to, in the order of `Grads::into_list`.
    pub(super) fn inputs(&self) -> Vec<&Var> {
        let adapter = self.adapter.iter().flat_map(|adapter| {
            let m = adapter.magnitude.as_ref().map(|magnitude| &magnitude.m);
            [&adapter.a, &adapter.b].into_iter().chain(m)
        });
        std::iter::once(&self.weight).chain(&self.bias).chain(adapter).collect()
    }

    /// Whether it goes the way of `quick`.
    fn is_quick(&self, tape: &Tape) -> bool {
        let is_here = self.weight.value().device().gpu().is_none();
        self.arithmetic == Arithmetic::Quick && !tape.is_recording() && is_here && quick::can(self)
    }

    pub(super) fn operands(&self) -> Operands {
        Operands::new(self)
    }
}

/// `x @ w^T + ...`.
pub fn linear(tape: &Tape, x: &Var, linear: &Linear) -> Var {
    linear_split(tape, x, linear, &[linear.d_out()]).pop().expect("one output")
}

/// Several maps of the same input.
pub fn linear_each(tape: &Tape, x: &Var, linears: &[Linear]) -> Vec<Var> {
    if let Device::Gpu(gpu) = x.value().device() {
        let maps: Vec<_> = linears.iter().map(|it| (it, cut(&[it.d_out()]))).collect();
        return gpu::linear_maps(tape, gpu, x, &maps);
    }
    if !linears.iter().all(|linear| linear.is_quick(tape)) {
        return linears.iter().map(|it| linear(tape, x, it)).collect();
    }
    let tokens = 0..x.value().dims2().0;
    let part = |linear| Part { linear, rows: 0..linear.d_out(), tokens: tokens.clone() };
    let parts: Vec<Part> = linears.iter().map(part).collect();
    quick::quick(x.value(), &parts).into_iter().map(Var::constant).collect()
}

/// The same, its columns cut into outputs of these widths.
pub fn linear_split(tape: &Tape, x: &Var, linear: &Linear, widths: &[usize]) -> Vec<Var> {
    assert_eq!(widths.iter().sum::<usize>(), linear.d_out(), "linear: widths {widths:?}");
    // Pieces of a matrix whose rows are in another order are the exact way's.
    if linear.is_quick(tape) && (linear.order.is_none() || widths.len() == 1) {
        let tokens = 0..x.value().dims2().0;
        let part = |rows| Part { linear, rows, tokens: tokens.clone() };
        let parts: Vec<Part> = cut(widths).into_iter().map(part).collect();
        return quick::quick(x.value(), &parts).into_iter().map(Var::constant).collect();
    }
    if let Device::Gpu(gpu) = x.value().device() {
        return gpu::linear_maps(tape, gpu, x, &[(linear, cut(widths))]);
    }
    let operands = linear.operands();
    let mut input = operands.input(x.value(), 0);
    let pieces = cut(widths).into_iter().map(|rows| operands.forward(rows, &input));
    let (outputs, passes): (Vec<Tensor>, Vec<Pass>) = pieces.unzip();
    input.forget();
    let mut inputs = linear.inputs();
    inputs.insert(0, x);
    let (x_value, wants_dx) = (x.value().clone(), x.needs_grad());
    tape.record_many("linear", &inputs, outputs, move |dys| {
        let mut dx = wants_dx.then(|| Tensor::uninit(x_value.device(), x_value.shape()));
        let mut grads = operands.grads();
        let mut beta = 0.0;
        operands.recall(&mut input);
        for (pass, dy) in passes.iter().zip(&dys) {
            if let Some(dy) = dy {
                let dx = dx.as_mut().map(|dx| (dx.f32_mut(), beta));
                operands.backward(&input, pass, dy.f32(), dx, &mut grads);
                beta = 1.0;
            }
        }
        let mut list = grads.into_list(&operands);
        list.insert(0, dx);
        list
    })
}

/// `y[i..j] = x[i..j] @ w_e^T + ...` for each expert e and its rows `offsets[e]..offsets[e + 1]`.
///
/// Experts without rows are skipped: at 8 of 128, nine in ten are empty in a batch of one.
pub fn linear_grouped(tape: &Tape, x: &Var, offsets: &[usize], experts: &[Linear]) -> Var {
    let (n_tok, d_in) = x.value().dims2();
    assert_eq!(offsets.len(), experts.len() + 1, "linear: one offset more than experts");
    assert_eq!((offsets[0], offsets[experts.len()]), (0, n_tok), "linear: offsets {offsets:?}");
    let d_out = experts.first().map_or(0, Linear::d_out);
    let device = x.value().device();
    let runs: Vec<Range<usize>> = offsets.windows(2).map(|pair| pair[0]..pair[1]).collect();
    if let Device::Gpu(gpu) = device {
        return gpu::linear_grouped(tape, gpu, x, runs, experts);
    }
    let mut y = Tensor::uninit(device, &[n_tok, d_out]);
    if experts.iter().all(|expert| expert.is_quick(tape)) {
        let busy = || runs.iter().zip(experts).filter(|(tokens, _)| !tokens.is_empty());
        let part = |(tokens, linear): (&Range<usize>, _)| Part {
            linear,
            rows: 0..d_out,
            tokens: tokens.clone(),
        };
        let parts: Vec<Part> = busy().map(part).collect();
        for (out, (tokens, _)) in quick::quick(x.value(), &parts).iter().zip(busy()) {
            let rows = tokens.start * d_out..tokens.end * d_out;
            y.f32_mut()[rows].copy_from_slice(out.f32());
        }
        return Var::constant(y);
    }
    let operands: Vec<Operands> = experts.iter().map(Linear::operands).collect();
    let run = |(rows, operands): (&Range<usize>, &Operands)| -> Option<(Input, Pass)> {
        if rows.is_empty() {
            return None;
        }
        let y_rows = &mut y.f32_mut()[rows.start * d_out..rows.end * d_out];
        let (mut input, pass) = operands.forward_run(&x.value().rows(rows.clone()), y_rows);
        input.forget();
        Some((input, pass))
    };
    let kept: Vec<Option<(Input, Pass)>> = runs.iter().zip(&operands).map(run).collect();
    let inputs: Vec<&Var> =
        std::iter::once(x).chain(experts.iter().flat_map(Linear::inputs)).collect();
    let (x_value, wants_dx) = (x.value().clone(), x.needs_grad());
    tape.record("grouped linear", &inputs, y, move |dy| {
        let mut dx = wants_dx.then(|| Tensor::uninit(x_value.device(), x_value.shape()));
        let mut list = vec![None];
        for ((rows, operands), kept) in runs.iter().zip(&operands).zip(kept) {
            let mut grads = operands.grads();
            if let Some((mut input, pass)) = kept {
                operands.recall(&mut input);
                let dy = &dy.f32()[rows.start * d_out..rows.end * d_out];
                let dx = dx.as_mut();
                let dx = dx.map(|dx| (&mut dx.f32_mut()[rows.start * d_in..rows.end * d_in], 0.0));
                operands.backward(&input, &pass, dy, dx, &mut grads);
            }
            list.extend(grads.into_list(operands));
        }
        list[0] = dx;
        list
    })
}

/// Widths to ranges.
fn cut(widths: &[usize]) -> Vec<Range<usize>> {
    let mut end = 0;
    let mut range = |&width: &usize| {
        end += width;
        end - width..end
    };
    widths.iter().map(&mut range).collect()
}

#[cfg(test)]
mod tests;
