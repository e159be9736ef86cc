//! A linear map, forward and backward, for a run of its rows at a time, on any device.
//!
//! With `xd = drop(x)` (which is `x` without dropout) and `f = m / n` (one without magnitudes):
//!
//! ```text
//! u = xd @ a^T                 z = xd @ w^T + scale u @ b^T
//! y = (x - xd) @ w^T + f z + bias
//!
//! e = f dy                     du = scale e @ b            dm = sum over rows of dy z / n
//! da = du^T @ xd               db = scale e^T @ u
//! dx = dy @ w + drop((e - dy) @ w + du @ a)
//! ```
//!
//! Without magnitudes dropout reaches the adapter alone, as in PEFT: `y = x @ w^T + scale u @ b^T`.
//! Terms that vanish are not computed.
//!
//! Products and the primitives of `columns.rs` and `dropout.rs` choose the device. On CUDA the
//! product that makes y adds the bias, in f32 before it rounds, and the product that makes dw sums
//! dy. Results are activations; gradients of operands are f32.

use super::columns::{Put, add_column_sums, fill_rows, scale_columns, subtract};
use super::dropout::Dropout;
use super::magnitude::norms;
use super::{Adapter, Linear, Norms};
use crate::tape::Var;
use crate::tensor::device::Device;
use crate::tensor::gpu::vector::N_FEW;
use crate::tensor::product::{Block, Epilogue, Rows, Side, for_products, product, product_with};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// Decoded weight rows held at a time on the CPU, in numbers. For few tokens a panel stays in the
/// second-level cache; for many the product packs its left side anew for every panel, and large
/// ones are faster.
const PANEL_FEW: usize = 1 << 17;
const PANEL_MANY: usize = 1 << 21;
/// Tokens from which there are many.
const N_MANY: usize = 64;
/// Weight rows that one task decodes.
const N_DECODED: usize = 16;
/// Bytes of a panel of decoded weight rows on a GPU, at most.
const PANEL_BYTES: usize = 64 << 20;

/// How a GPU multiplies with the weight; the CPU knows one way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum Way {
    /// As it is stored, a row of it at a time.
    Few,
    Many,
}

impl Way {
    /// For a call with this many tokens. All experts of a call go the same way, so that bits of a
    /// row do not depend on how many rows its expert has.
    pub(in crate::ops) fn of(n_tok: usize) -> Way {
        if n_tok <= N_FEW { Way::Few } else { Way::Many }
    }
}

/// The values on the right.
pub(in crate::ops) struct Operands {
    linear: Linear,
    /// Its rows in their places.
    weight: Tensor,
}

/// The left side, and what the adapter makes of it.
pub(in crate::ops) struct Input {
    pub(super) x: Tensor,
    /// `drop(x)`, where there is dropout and it is not put away.
    dropped: Option<Tensor>,
    /// (n_tok, rank).
    pub(super) u: Option<Tensor>,
    /// What the first row of x is to the mask.
    first_row: usize,
}

impl Input {
    /// What the adapter sees.
    fn seen(&self) -> &Tensor {
        self.dropped.as_ref().unwrap_or(&self.x)
    }
}

/// One forward pass of some rows, as backward needs it.
pub(in crate::ops) struct Pass {
    rows: Range<usize>,
    scaled: Option<Scaled>,
}

/// What a magnitude is made of.
struct Scaled {
    /// (n_tok, rows); `None` where the magnitude's gradient is not wanted.
    z: Option<Tensor>,
    /// (rows).
    norms: Tensor,
    /// m / n: (rows).
    factors: Tensor,
}

/// Gradients of the operands, summed over calls of `backward`.
pub(in crate::ops) struct Grads {
    /// In the order of `Linear::inputs`; `None` where none is wanted.
    list: Vec<Option<Tensor>>,
    /// Rows of the weight that have been written at least once.
    written: Vec<Range<usize>>,
    /// The weight's shape without what it was filled up with.
    shape: Vec<usize>,
}

impl Grads {
    /// In the order of `Linear::inputs`; rows that no gradient reached are zero.
    pub(in crate::ops) fn into_list(mut self) -> Vec<Option<Tensor>> {
        if let Some(dw) = &mut self.list[0] {
            let (d_out, mut at) = (dw.shape()[0], 0);
            self.written.sort_by_key(|rows| rows.start);
            for rows in self.written.iter().chain([&(d_out..d_out)]) {
                if rows.start > at {
                    dw.zero_rows(at..rows.start);
                }
                at = at.max(rows.end);
            }
            // Without what the weight was filled up with.
            *dw = match (dw.device(), self.shape[1] < dw.dims2().1) {
                (Device::Gpu(gpu), true) => gpu.first_columns(dw, self.shape[1]),
                _ => dw.rows(0..self.shape[0]),
            };
        }
        self.list
    }
}

impl Operands {
    pub(in crate::ops) fn new(linear: &Linear) -> Operands {
        let mut operands = Operands::as_stored(linear);
        if let Some(order) = &linear.order {
            operands.weight = operands.weight.gather(order);
        }
        if let (Some(size), Device::Gpu(gpu)) = (linear.filled, operands.weight.device().clone()) {
            operands.weight = gpu.filled(&operands.weight, size);
        }
        operands
    }

    /// Rows of the weight in the order in which they are stored.
    pub(super) fn as_stored(linear: &Linear) -> Operands {
        let weight = linear.weight.value().clone();
        assert_eq!(weight.shape().len(), 2, "linear: weight of shape {:?}", weight.shape());
        let has_magnitude = linear.adapter.as_ref().is_some_and(|it| it.magnitude.is_some());
        assert!(
            weight.dtype() == DType::F32 && !has_magnitude || !linear.weight.needs_grad(),
            "linear: a weight in {:?}, or under a magnitude, cannot be trained",
            weight.dtype()
        );
        Operands { linear: linear.clone(), weight }
    }

    pub(in crate::ops) fn d_out(&self) -> usize {
        self.weight.shape()[0]
    }

    /// Empty gradients for what wants them.
    pub(in crate::ops) fn grads(&self) -> Grads {
        let grad = |(idx, var): (usize, &Var)| {
            let (device, shape) = (var.value().device(), var.value().shape());
            // The weight's gradient is large and written whole; the others start from zero.
            var.needs_grad().then(|| match idx {
                0 => Tensor::uninit(device, self.weight.shape()),
                _ => Tensor::zeros(device, shape),
            })
        };
        let list = self.linear.inputs().into_iter().enumerate().map(grad).collect();
        let shape = self.linear.weight.value().shape().to_vec();
        Grads { list, written: Vec::new(), shape }
    }

    /// Where the gradients of a, b and m are in the list.
    fn at_adapter(&self) -> usize {
        1 + self.linear.bias.is_some() as usize
    }

    fn dropout(&self) -> Option<Dropout> {
        self.linear.adapter.as_ref()?.dropout.filter(|dropout| dropout.rate > 0.0)
    }

    /// Prepares the left side. Rows of one batch differ in `first_row`: no two share a mask.
    pub(in crate::ops) fn input(&self, x: &Tensor, first_row: usize) -> Input {
        assert_eq!(x.dims2().1, self.weight.shape()[1], "linear: width of x");
        let mut input = self.recall(x, None, first_row);
        if let Some(Adapter { a, .. }) = &self.linear.adapter {
            let mut u = Tensor::activation(x.device(), &[x.dims2().0, a.value().shape()[0]]);
            let (seen, a) = (Side::Plain(input.seen()), Side::Transposed(a.value()));
            product(&mut u, 0.0, 1.0, seen, a);
            input.u = Some(u);
        }
        input
    }

    /// The left side for backward, where x and u were kept: the mask is made again.
    pub(super) fn recall(&self, x: &Tensor, u: Option<Tensor>, first_row: usize) -> Input {
        let dropped = self.dropout().map(|dropout| {
            let mut dropped = Tensor::uninit_as(x, x.shape());
            dropout.run(first_row, x, (&mut dropped).into(), Put::Set);
            dropped
        });
        Input { x: x.clone(), dropped, u, first_row }
    }

    /// Columns `rows` of the result (rows of the weight).
    pub(in crate::ops) fn forward(
        &self,
        rows: Range<usize>,
        input: &Input,
        mut y: Rows,
        way: Way,
    ) -> Pass {
        let scaled = match &self.linear.adapter {
            Some(adapter) if adapter.magnitude.is_some() => {
                Some(self.forward_scaled(adapter, rows.clone(), input, y))
            }
            _ => {
                let has_all = way == Way::Many && self.product_bias(&rows, &input.x, &mut y);
                if !has_all {
                    let beta = self.put_bias(&rows, &mut y);
                    self.product(rows.clone(), &input.x, beta, y.again(), way);
                }
                self.add_adapter(&rows, input, y);
                None
            }
        };
        Pass { rows, scaled }
    }

    /// `y = bias` in each row; returns what of y counts.
    fn put_bias(&self, rows: &Range<usize>, y: &mut Rows) -> f32 {
        let Some(bias) = &self.linear.bias else { return 0.0 };
        fill_rows(bias.value(), rows.start, y);
        1.0
    }

    /// `y = x @ w^T + bias` by products that add it; returns whether the device has them.
    fn product_bias(&self, rows: &Range<usize>, x: &Tensor, y: &mut Rows) -> bool {
        let Some(bias) = &self.linear.bias else { return false };
        if x.device().gpu().is_none_or(|gpu| !gpu.caps().tensor_cores) {
            return false;
        }
        let bias = bias.value();
        let is_same = bias.dtype() == y.tensor.dtype();
        let bias = if is_same { bias.clone() } else { for_products(bias) };
        let mut has_all = true;
        self.each_panel(rows.clone(), x.dims2().0, |cols, w| {
            let epilogue = Epilogue::Bias(&bias, rows.start + cols.start);
            let out = Block { tensor: y.tensor, rows: y.rows.clone(), cols };
            has_all = has_all && product_with(epilogue, out, Side::Plain(x), Side::Transposed(w));
        });
        has_all
    }

    /// `y = beta y + x @ w^T`.
    pub(super) fn product(&self, rows: Range<usize>, x: &Tensor, beta: f32, y: Rows, way: Way) {
        if let (Way::Few, Device::Gpu(gpu)) = (way, x.device()) {
            // The weight as it is stored, unless a shorter cast is at hand.
            let w = match self.weight.dtype() {
                DType::F32 => for_products(&self.weight).rows(rows),
                _ => self.weight.rows(rows),
            };
            return gpu.few(y, beta, 1.0, x, &w);
        }
        self.each_panel(rows, x.dims2().0, |cols, w| {
            let out = Block { tensor: y.tensor, rows: y.rows.clone(), cols };
            product(out, beta, 1.0, Side::Plain(x), Side::Transposed(w));
        });
    }

    /// `y += scale u @ b^T`.
    fn add_adapter(&self, rows: &Range<usize>, input: &Input, y: Rows) {
        if let (Some(adapter), Some(u)) = (&self.linear.adapter, &input.u) {
            let b = for_products(adapter.b.value()).rows(rows.clone());
            product(y, 1.0, adapter.scale, Side::Plain(u), Side::Transposed(&b));
        }
    }

    /// `forward` where there are magnitudes.
    fn forward_scaled(
        &self,
        adapter: &Adapter,
        rows: Range<usize>,
        input: &Input,
        mut y: Rows,
    ) -> Scaled {
        let magnitude = adapter.magnitude.as_ref().expect("asked for by the caller");
        let is_followed = matches!(magnitude.norms, Norms::Followed(_));
        let (n_tok, d_out, a) = (input.x.dims2().0, rows.len(), adapter.a.value());
        let mut z = Tensor::uninit_as(y.tensor, &[n_tok, d_out]);
        // Of the decoded rows; a kernel that does not read them wants something to bind.
        let n_wa = if is_followed { d_out } else { 1 };
        let mut wa = Tensor::uninit(a.device(), &[n_wa, a.shape()[0]]);
        self.each_panel(rows.clone(), n_tok, |cols, w| {
            let out = Block { tensor: &mut z, rows: 0..n_tok, cols: cols.clone() };
            product(out, 0.0, 1.0, Side::Plain(input.seen()), Side::Transposed(w));
            if is_followed {
                let out = Rows { tensor: &mut wa, rows: cols };
                product(out, 0.0, 1.0, Side::Plain(w), Side::Transposed(a));
            }
        });
        self.add_adapter(&rows, input, (&mut z).into());
        let (norms, factors) = norms(adapter, magnitude, &rows, &wa);
        let mut beta = self.put_bias(&rows, &mut y);
        if let Some(dropped) = &input.dropped {
            let left = subtract(&input.x, dropped);
            self.product(rows, &left, beta, y.again(), Way::Many);
            beta = 1.0;
        }
        scale_columns(&factors, &z, y, if beta == 0.0 { Put::Set } else { Put::Add });
        Scaled { z: magnitude.m.needs_grad().then_some(z), norms, factors }
    }

    /// `forward` for the rows of one expert.
    ///
    /// Each row has bits that do not depend on how many there are, so that a token cannot be felt
    /// by those before it through the routing. The CPU's product takes another order of summation
    /// for one row, and for results of at most 256 numbers: smaller runs are filled up with rows of
    /// zeros.
    pub(super) fn forward_run(&self, x: &Tensor, mut y: Rows, way: Way) -> (Input, Pass) {
        let ((n_tok, d_in), d_out) = (x.dims2(), self.weight.shape()[0]);
        let rank = self.linear.adapter.as_ref().map(|adapter| adapter.a.value().shape()[0]);
        let n_rows = (256 / rank.map_or(d_out, |rank| d_out.min(rank)).max(1) + 1).max(2);
        let is_whole = x.device().gpu().is_some() || n_tok >= n_rows;
        let (mut input, mut pass) = match is_whole {
            true => {
                let input = self.input(x, 0);
                let pass = self.forward(0..d_out, &input, y, way);
                (input, pass)
            }
            false => {
                let mut filled = Tensor::zeros(x.device(), &[n_rows, d_in]);
                filled.f32_mut()[..n_tok * d_in].copy_from_slice(x.f32());
                let input = self.input(&filled, 0);
                let mut out = Tensor::uninit(x.device(), &[n_rows, d_out]);
                let pass = self.forward(0..d_out, &input, (&mut out).into(), way);
                y.f32_mut().copy_from_slice(&out.f32()[..n_tok * d_out]);
                (input, pass)
            }
        };
        let first = |kept: &Tensor| kept.rows(0..n_tok);
        input = Input { x: x.clone(), dropped: None, u: input.u.as_ref().map(first), ..input };
        if let Some(scaled) = &mut pass.scaled {
            scaled.z = scaled.z.as_ref().map(first);
        }
        (input, pass)
    }

    /// Inverts `forward`; `dx` is (where, factor of what is there).
    pub(in crate::ops) fn backward(
        &self,
        input: &Input,
        pass: &Pass,
        dy: &Tensor,
        mut dx: Option<(Rows, f32)>,
        grads: &mut Grads,
    ) {
        let rows = &pass.rows;
        self.backward_weight(input, rows, dy, grads);
        let e = pass.scaled.as_ref().map(|scaled| {
            let at = self.at_adapter() + 2;
            if let (Some(z), Some(dm)) = (&scaled.z, &mut grads.list[at]) {
                add_column_sums(dy, Some((z, &scaled.norms)), (dm, rows.start));
            }
            let mut e = Tensor::uninit_as(dy, dy.shape());
            scale_columns(&scaled.factors, dy, (&mut e).into(), Put::Set);
            e
        });
        if let Some((dx, beta)) = &mut dx {
            // Without dropout the magnitudes scale all of the product.
            let left = if input.dropped.is_some() { dy } else { e.as_ref().unwrap_or(dy) };
            self.product_back(rows, left, *beta, dx.again());
        }
        let dx = dx.map(|(dx, _)| dx);
        self.backward_adapter(input, rows, (dy, e.as_ref()), dx, grads);
    }

    /// The gradients of some rows of the weight and of the bias, where they are wanted.
    fn backward_weight(&self, input: &Input, rows: &Range<usize>, dy: &Tensor, grads: &mut Grads) {
        let (dw, others) = grads.list.split_first_mut().expect("the weight's");
        let mut dbias = self.linear.bias.as_ref().and_then(|_| others[0].as_mut());
        if let Some(dw) = dw {
            let beta = if grads.written.contains(rows) { 1.0 } else { 0.0 };
            let mut out = Rows { tensor: dw, rows: rows.clone() };
            let sides = (Side::Transposed(dy), Side::Plain(&input.x));
            // The product writes the sums, so that nothing may be there, and it sums what it reads.
            let can_sum = beta == 0.0 && dy.dtype() == dy.device().activation_dtype();
            let has_sums = can_sum
                && dbias.as_mut().is_some_and(|dbias| {
                    let epilogue = Epilogue::Sums(dbias, rows.start);
                    product_with(epilogue, out.again(), sides.0, sides.1)
                });
            match has_sums {
                true => dbias = None,
                false => product(out, beta, 1.0, sides.0, sides.1),
            }
            grads.written.push(rows.clone());
        }
        if let Some(dbias) = dbias {
            add_column_sums(dy, None, (dbias, rows.start));
        }
    }

    /// `dx = beta dx + dy @ w`.
    fn product_back(&self, rows: &Range<usize>, dy: &Tensor, mut beta: f32, mut dx: Rows) {
        self.each_panel(rows.clone(), dy.dims2().0, |cols, w| {
            let dy = Side::Columns(dy, cols.start, cols.len());
            product(dx.again(), beta, 1.0, dy, Side::Plain(w));
            beta = 1.0;
        });
    }

    /// The adapter's part of `backward`; `dy` comes with e, where that is another.
    fn backward_adapter(
        &self,
        input: &Input,
        rows: &Range<usize>,
        (dy, e): (&Tensor, Option<&Tensor>),
        dx: Option<Rows>,
        grads: &mut Grads,
    ) {
        let (Some(adapter), Some(u)) = (&self.linear.adapter, &input.u) else { return };
        let (a, b, scale) = (adapter.a.value(), adapter.b.value(), adapter.scale);
        let e_or_dy = e.unwrap_or(dy);
        let b = for_products(b).rows(rows.clone());
        let mut du = Tensor::uninit_as(u, u.shape());
        product(&mut du, 0.0, scale, Side::Plain(e_or_dy), Side::Plain(&b));
        let at = self.at_adapter();
        if let Some(da) = &mut grads.list[at] {
            product(da, 1.0, 1.0, Side::Transposed(&du), Side::Plain(input.seen()));
        }
        if let Some(db) = &mut grads.list[at + 1] {
            let out = Rows { tensor: db, rows: rows.clone() };
            product(out, 1.0, scale, Side::Transposed(e_or_dy), Side::Plain(u));
        }
        let Some(dx) = dx else { return };
        let Some(dropout) = self.dropout() else {
            return product(dx, 1.0, 1.0, Side::Plain(&du), Side::Plain(a));
        };
        let mut seen = Tensor::uninit_as(&input.x, input.x.shape());
        product(&mut seen, 0.0, 1.0, Side::Plain(&du), Side::Plain(a));
        if let Some(e) = e {
            let more = subtract(e, dy);
            self.product_back(rows, &more, 1.0, (&mut seen).into());
        }
        dropout.run(input.first_row, &seen, dx, Put::Add);
    }

    /// Calls `f` with runs of weight rows as products take them on the right, for `n_tok` tokens,
    /// and their places among `rows`: all at once if stored so, or if the cast of an f32 weight is
    /// kept.
    fn each_panel(
        &self,
        rows: Range<usize>,
        n_tok: usize,
        mut f: impl FnMut(Range<usize>, &Tensor),
    ) {
        let (device, stored, d_in) =
            (self.weight.device(), self.weight.dtype(), self.weight.shape()[1]);
        if stored == device.activation_dtype() || stored == DType::F32 {
            return f(0..rows.len(), &for_products(&self.weight).rows(rows));
        }
        let n_rows = match device {
            Device::Cpu(_) => {
                let panel = if n_tok < N_MANY { PANEL_FEW } else { PANEL_MANY };
                (panel / d_in.max(1)).max(N_DECODED)
            }
            Device::Gpu(gpu) => {
                let max = PANEL_BYTES.min(gpu.binding_bytes_max() - gpu.offset_align());
                (max / (4 * d_in).max(1)).max(1)
            }
        };
        let mut scratch = None;
        for start in rows.clone().step_by(n_rows) {
            let panel = start..rows.end.min(start + n_rows);
            let cols = panel.start - rows.start..panel.end - rows.start;
            f(cols, &self.decoded(panel, &mut scratch));
        }
    }

    /// Weight rows in what products read, on the CPU in the memory of `scratch`.
    fn decoded(&self, rows: Range<usize>, scratch: &mut Option<Tensor>) -> Tensor {
        let (device, stored, d_in) =
            (self.weight.device(), self.weight.dtype(), self.weight.shape()[1]);
        let cpu = match device {
            Device::Cpu(cpu) => cpu,
            Device::Gpu(gpu) => {
                let dtype = if gpu.reads_right(stored) { stored } else { gpu.activation_dtype() };
                return gpu.decode_rows(&self.weight, rows, dtype);
            }
        };
        let scratch = scratch.get_or_insert_with(|| Tensor::uninit(device, &[rows.len(), d_in]));
        let w = &mut scratch.f32_mut()[..rows.len() * d_in];
        cpu.each_piece(w, N_DECODED * d_in, |idx, w| {
            self.weight.read_f32((rows.start + idx * N_DECODED) * d_in, w);
        });
        scratch.rows(0..rows.len())
    }
}
