//! Linear map: `y = x @ w^T + bias + scale (x @ a^T) @ b^T`.
//!
//! The weight may be stored in f16, bf16 or a block format; it is then decoded a panel of rows at
//! a time, and is frozen. The last term is a low-rank adapter, absent for most. Its input may go
//! through dropout, and the rows of the adapted weight may be brought to trained lengths.
//!
//! ```text
//! dx = dy @ w + du @ a           u = x @ a^T,   du = scale dy @ b
//! dw = dy^T @ x                  da = du^T @ x
//! dbias = sum over rows of dy    db = scale dy^T @ u
//! ```
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
//! One path for all devices: `operands.rs` composes a map of products (`tensor/product.rs`), the
//! mask (`dropout.rs`), the lengths (`magnitude.rs`) and what works on rows (`columns.rs`).

mod columns;
mod dropout;
mod magnitude;
mod narrow;
mod operands;
mod quick;

pub use self::dropout::Dropout;
pub use self::magnitude::merge;
pub use self::magnitude::{Magnitude, Norms, row_squares};

pub(super) use self::operands::{Operands, Way};

use self::narrow::Narrow;
use self::operands::{Input, Pass};
use super::remade;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::add::add_into;
use crate::tensor::product::Rows;
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
    pub adapter: Option<Adapter>,
    /// How the product is computed where nothing is recorded.
    pub arithmetic: Arithmetic,
    /// Size of the weight with rows and columns of zeros, for which products are faster.
    pub filled: Option<[usize; 2]>,
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

/// What of a weight is filled up with zeros.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    Rows,
    Columns,
}

/// Fills up the width between maps, for `n_tok` tokens, where all of them can be. What stands
/// between must make zeros of zeros.
pub fn fill_between(n_tok: usize, first: &mut [Linear], last: &mut Linear) {
    if Way::of(n_tok) == Way::Few {
        return;
    }
    let filled: Option<Vec<Linear>> = first.iter().map(|map| map.filled(Fill::Rows)).collect();
    if let (Some(filled), Some(end)) = (filled, last.filled(Fill::Columns)) {
        first.clone_from_slice(&filled);
        *last = end;
    }
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

impl From<Var> for Linear {
    fn from(weight: Var) -> Linear {
        let (order, bias, adapter) = (None, None, None);
        Linear { weight, order, bias, adapter, arithmetic: Arithmetic::Exact, filled: None }
    }
}

impl Linear {
    /// Width of the result.
    pub fn d_out(&self) -> usize {
        self.filled.map_or(self.weight.value().shape()[0], |[n_row, _]| n_row)
    }

    /// With zeros in more rows or in more columns, where it is a weight alone and products are
    /// faster so. Gradients are of the weight without them.
    pub fn filled(&self, side: Fill) -> Option<Linear> {
        let weight = self.weight.value();
        let is_plain = self.order.is_none() && self.bias.is_none() && self.adapter.is_none();
        let size = weight.device().gpu()?.even_size(weight, side == Fill::Rows)?;
        is_plain.then(|| Linear { filled: Some(size), ..self.clone() })
    }

    /// Everything a gradient may go to, in the order of `Grads::into_list`.
    pub(super) fn inputs(&self) -> Vec<&Var> {
        let adapter = self.adapter.iter().flat_map(|adapter| {
            let m = adapter.magnitude.as_ref().map(|magnitude| &magnitude.m);
            [&adapter.a, &adapter.b].into_iter().chain(m)
        });
        std::iter::once(&self.weight).chain(&self.bias).chain(adapter).collect()
    }

    /// Whether it is computed by `quick`.
    fn is_quick(&self, tape: &Tape) -> bool {
        let is_here = self.weight.value().device().gpu().is_none();
        self.arithmetic == Arithmetic::Quick && !tape.is_recording() && is_here && quick::can(self)
    }

    /// All of its rows as one output.
    fn whole(&self) -> Pieces<'_> {
        (self, cut(&[self.d_out()]))
    }
}

/// `x @ w^T + ...`.
pub fn linear(tape: &Tape, x: &Var, linear: &Linear) -> Var {
    linear_split(tape, x, linear, &[linear.d_out()]).pop().expect("one output")
}

/// Several maps of the same input.
pub fn linear_each(tape: &Tape, x: &Var, linears: &[Linear]) -> Vec<Var> {
    let maps: Vec<Pieces> = linears.iter().map(Linear::whole).collect();
    if x.value().device().gpu().is_some() {
        record(tape, x, &maps)
    } else if linears.iter().all(|linear| linear.is_quick(tape)) {
        quickly(x, &maps)
    } else {
        linears.iter().map(|it| linear(tape, x, it)).collect()
    }
}

/// The same, its columns cut into outputs of these widths.
pub fn linear_split(tape: &Tape, x: &Var, linear: &Linear, widths: &[usize]) -> Vec<Var> {
    assert_eq!(widths.iter().sum::<usize>(), linear.d_out(), "linear: widths {widths:?}");
    let maps = [(linear, cut(widths))];
    // Pieces of a matrix whose rows are in another order are always exact.
    match linear.is_quick(tape) && (linear.order.is_none() || widths.len() == 1) {
        true => quickly(x, &maps),
        false => record(tape, x, &maps),
    }
}

/// A map, and rows of its weight that are an output of their own.
type Pieces<'a> = (&'a Linear, Vec<Range<usize>>);

fn quickly(x: &Var, maps: &[Pieces]) -> Vec<Var> {
    let tokens = 0..x.value().dims2().0;
    let each = maps.iter().flat_map(|(linear, pieces)| pieces.iter().map(|rows| (*linear, rows)));
    let part = |(linear, rows): (_, &Range<usize>)| Part {
        linear,
        rows: rows.clone(),
        tokens: tokens.clone(),
    };
    let parts: Vec<Part> = each.map(part).collect();
    let way = quick::way(parts.iter().map(|part| (part.linear, part.tokens.len())));
    quick::quick(x.value(), &parts, way).into_iter().map(Var::constant).collect()
}

/// Maps of one input as one op.
fn record(tape: &Tape, x: &Var, maps: &[Pieces]) -> Vec<Var> {
    let is_gpu = x.value().device().gpu().is_some();
    if is_gpu && x.value().dims2().0 == 1 && !tape.is_recording() {
        return maps.iter().flat_map(|map| one_row(x.value(), map)).collect();
    }
    let (outputs, kept): (Vec<_>, Vec<_>) =
        maps.iter().map(|map| Computed::new(x.value(), map)).unzip();
    let inputs = maps.iter().flat_map(|(linear, _)| linear.inputs());
    let inputs: Vec<&Var> = std::iter::once(x).chain(inputs).collect();
    let (x_kept, wants_dx) = (x.kept(), x.needs_grad());
    let outputs = outputs.into_iter().flatten().collect();
    let mut outputs = tape.record_adding("linear", &inputs, outputs, move |dys, so_far| {
        backward(kept, &x_kept.get(), wants_dx, dys, so_far)
    });
    let mut at = 0;
    for (linear, pieces) in maps {
        if is_wide(linear) && pieces.len() == 1 {
            let (linear, x) = ((*linear).clone(), x.kept());
            let make = move || Computed::new(&x.get(), &linear.whole()).0.remove(0);
            outputs[at] = remade(outputs[at].clone(), make);
        }
        at += pieces.len();
    }
    outputs
}

/// Inverts the maps of `record`: the gradient of x, then those of all operands. What x has so far
/// is added to by the products themselves on GPUs; on the CPU the order of sums would be another.
fn backward(
    maps: Vec<Computed>,
    x: &Tensor,
    wants_dx: bool,
    dys: Vec<Option<Tensor>>,
    so_far: Option<Tensor>,
) -> Vec<Option<Tensor>> {
    let is_gpu = x.device().gpu().is_some();
    let can_add = |sum: &mut Tensor| is_gpu && sum.dtype() == x.dtype() && sum.is_unique();
    let (mut dx, mut beta, other) = match so_far.map(|mut sum| (can_add(&mut sum), sum)) {
        Some((true, sum)) => (Some(sum), 1.0, None),
        other => {
            let dx = wants_dx.then(|| Tensor::uninit_as(x, x.shape()));
            (dx, 0.0, other.map(|(_, sum)| sum))
        }
    };
    let (mut list, mut dys) = (vec![None], dys.into_iter());
    for Computed { operands, passes, u, narrow } in maps {
        let mut grads = operands.grads();
        let input = operands.recall(x, u, 0);
        let dys: Vec<Option<Tensor>> = match narrow {
            Some(narrow) => vec![narrow.put(dys.by_ref().take(narrow.n_pieces()).collect())],
            None => dys.by_ref().take(passes.len()).collect(),
        };
        for (pass, dy) in passes.iter().zip(dys) {
            if let Some(dy) = dy {
                let dx = dx.as_mut().map(|dx| (dx.into(), beta));
                operands.backward(&input, pass, &dy, dx, &mut grads);
                beta = 1.0;
            }
        }
        list.extend(grads.into_list());
    }
    list[0] = match other {
        Some(other) => dx.map(|dx| add_into(other, &dx)),
        None => dx,
    };
    list
}

/// A map that was computed, as backward needs it.
struct Computed {
    operands: Operands,
    passes: Vec<Pass>,
    /// See `Input`.
    u: Option<Tensor>,
    narrow: Option<Narrow>,
}

impl Computed {
    /// The outputs of a map, and the rest.
    fn new(x: &Tensor, (linear, pieces): &Pieces) -> (Vec<Tensor>, Computed) {
        let (operands, n_tok) = (Operands::new(linear), x.dims2().0);
        let mut input = operands.input(x, 0);
        let forward = |rows: &Range<usize>| {
            let mut y = Tensor::activation(x.device(), &[n_tok, rows.len()]);
            let pass = operands.forward(rows.clone(), &input, (&mut y).into(), Way::of(n_tok));
            (y, pass)
        };
        let narrow = Narrow::of(x, pieces);
        let (outputs, passes) = match &narrow {
            Some(narrow) => {
                let (y, pass) = forward(&(0..narrow.width));
                (narrow.take(&y), vec![pass])
            }
            None => pieces.iter().map(forward).unzip(),
        };
        let u = input.u.take();
        (outputs, Computed { operands, passes, u, narrow })
    }
}

/// The map of a single row: parts of its result follow each other in memory.
fn one_row(x: &Tensor, (linear, pieces): &Pieces) -> Vec<Var> {
    let column = Computed::new(x, &linear.whole()).0.remove(0).reshape(&[linear.d_out(), 1]);
    let part = |rows: &Range<usize>| column.rows(rows.clone()).reshape(&[1, rows.len()]);
    pieces.iter().map(|rows| Var::constant(part(rows))).collect()
}

/// Whether its output is much wider than its input, and so cheaper to compute again than to hold.
fn is_wide(linear: &Linear) -> bool {
    let (d_out, d_in) = linear.weight.value().dims2();
    16 * d_in <= d_out && linear.adapter.is_none()
}

/// `y[i..j] = x[i..j] @ w_e^T + ...` for each expert e and its rows `offsets[e]..offsets[e + 1]`.
///
/// Experts without rows are skipped: at 8 of 128, nine in ten are empty in a batch of one.
#[cfg(test)]
pub fn linear_grouped(tape: &Tape, x: &Var, offsets: &[usize], experts: &[Linear]) -> Var {
    linear_grouped_some(tape, x, offsets, experts, 0..experts.len())
}

/// The same for the experts of `some`, whose rows are those of `x`. Each row has the bits that it
/// has among all: the other experts say how it is computed, and their numbers are not read.
pub fn linear_grouped_some(
    tape: &Tape,
    x: &Var,
    offsets: &[usize],
    experts: &[Linear],
    some: Range<usize>,
) -> Var {
    assert_eq!(offsets.len(), experts.len() + 1, "linear: one offset more than experts");
    let (n_tok, first) = (offsets[experts.len()], offsets[some.start]);
    let n_rows = x.value().dims2().0;
    assert_eq!(offsets[some.end] - first, n_rows, "linear: offsets {offsets:?}, experts {some:?}");
    let d_out = experts.first().map_or(0, Linear::d_out);
    let device = x.value().device();
    let mut y = Tensor::activation(device, &[n_rows, d_out]);
    let runs = offsets[some.start..=some.end].windows(2);
    let runs: Vec<Range<usize>> = runs.map(|pair| pair[0] - first..pair[1] - first).collect();
    let all = experts;
    let experts = &experts[some];
    if device.gpu().is_none() && all.iter().all(|expert| expert.is_quick(tape)) {
        let sizes = offsets.windows(2).map(|pair| pair[1] - pair[0]);
        let way = quick::way(all.iter().zip(sizes).filter(|(_, n_tok)| *n_tok > 0));
        let busy = || runs.iter().zip(experts).filter(|(tokens, _)| !tokens.is_empty());
        let part = |(tokens, linear): (&Range<usize>, _)| Part {
            linear,
            rows: 0..d_out,
            tokens: tokens.clone(),
        };
        let parts: Vec<Part> = busy().map(part).collect();
        for (out, (tokens, _)) in quick::quick(x.value(), &parts, way).iter().zip(busy()) {
            let rows = tokens.start * d_out..tokens.end * d_out;
            y.f32_mut()[rows].copy_from_slice(out.f32());
        }
        return Var::constant(y);
    }
    let operands: Vec<Operands> = experts.iter().map(Operands::new).collect();
    let run = |(rows, operands): (&Range<usize>, &Operands)| -> Option<(Input, Pass)> {
        if rows.is_empty() {
            return None;
        }
        let out = Rows { tensor: &mut y, rows: rows.clone() };
        Some(operands.forward_run(&x.value().rows(rows.clone()), out, Way::of(n_tok)))
    };
    let kept: Vec<Option<(Input, Pass)>> = runs.iter().zip(&operands).map(run).collect();
    let inputs: Vec<&Var> =
        std::iter::once(x).chain(experts.iter().flat_map(Linear::inputs)).collect();
    let (x_value, wants_dx) = (x.value().clone(), x.needs_grad());
    tape.record("grouped linear", &inputs, y, move |dy| {
        let mut dx = wants_dx.then(|| Tensor::uninit_as(&x_value, x_value.shape()));
        let mut list = vec![None];
        for ((rows, operands), kept) in runs.iter().zip(&operands).zip(kept) {
            let mut grads = operands.grads();
            if let Some((input, pass)) = kept {
                let input = operands.recall(&input.x, input.u, 0);
                let dx = dx.as_mut().map(|dx| (Rows { tensor: dx, rows: rows.clone() }, 0.0));
                operands.backward(&input, &pass, &dy.rows(rows.clone()), dx, &mut grads);
            }
            list.extend(grads.into_list());
        }
        list[0] = dx;
        list
    })
}

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
