//! The products behind a linear map, forward and backward, for a run of its rows at a time.
//!
//! With `xd = drop(x)` (which is `x` without dropout) and `f = m / n` (one without magnitudes):
//!
//!     u = xd @ a^T                 z = xd @ w^T + scale u @ b^T
//!     y = (x - xd) @ w^T + f z + bias
//!
//!     e = f dy                     du = scale e @ b            dm = sum over rows of dy z / n
//!     da = du^T @ xd               db = scale e^T @ u
//!     dx = dy @ w + drop((e - dy) @ w + du @ a)
//!
//! Without magnitudes dropout reaches the adapter alone, as in PEFT: `y = x @ w^T + scale u @ b^T`.
//! Terms that vanish are not computed.

use super::dropout::Dropout;
use super::magnitude::{Norms, Scale, norms};
use super::{Linear, N_ROWS};
use crate::ops::norm::sum_rows;
use crate::tensor::cpu::{Cpu, Mat, MatMut, Scope};
use crate::tensor::device::Device;
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// Decoded weight rows held at a time, in numbers. For few tokens a panel stays in the second-level
/// cache; for many the product packs its left side anew for every panel, and large ones are faster.
const PANEL_FEW: usize = 1 << 17;
const PANEL_MANY: usize = 1 << 21;
/// Tokens from which there are many.
const N_MANY: usize = 64;
/// Weight rows that one task decodes.
const N_DECODED: usize = 16;
/// Numbers of an element-wise task.
const PIECE: usize = 1 << 14;

/// The values on the right, and which of them want gradients (in the order of `Linear::inputs`).
pub(in crate::ops) struct Operands {
    pub(super) weight: Tensor,
    pub(super) bias: Option<Tensor>,
    pub(super) adapter: Option<AdapterValues>,
    pub(super) wants: Vec<bool>,
}

pub(super) struct AdapterValues {
    pub a: Tensor,
    pub b: Tensor,
    pub scale: f32,
    pub dropout: Option<Dropout>,
    /// m and what it is divided by.
    pub magnitude: Option<(Tensor, Norms)>,
}

/// The left side, and what the adapter makes of it.
pub(in crate::ops) struct Input {
    pub(super) x: Tensor,
    /// `drop(x)`, where there is dropout and it is not put away.
    pub(super) dropped: Option<Tensor>,
    /// (n_tok, rank).
    pub(super) u: Option<Tensor>,
    /// What the first row of x is to the mask.
    pub(super) first_row: usize,
}

impl Input {
    /// Puts away what `Operands::recall` can make again.
    pub(super) fn forget(&mut self) {
        self.dropped = None;
    }

    /// What the adapter sees.
    pub(super) fn seen(&self) -> &Tensor {
        self.dropped.as_ref().unwrap_or(&self.x)
    }

    pub(super) fn n_tok(&self) -> usize {
        self.x.dims2().0
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
    norms: Vec<f32>,
    /// m / n.
    factors: Vec<f32>,
}

/// Gradients of the operands, summed over calls of `backward`.
pub(in crate::ops) struct Grads {
    /// In the order of `Linear::inputs`; `None` where none is wanted.
    pub(super) list: Vec<Option<Tensor>>,
    /// Rows of the weight that have been written at least once.
    pub(super) written: Vec<Range<usize>>,
}

impl Grads {
    /// In the order of `Linear::inputs`; rows that no gradient reached are zero.
    pub(in crate::ops) fn into_list(mut self, operands: &Operands) -> Vec<Option<Tensor>> {
        if let Some(dw) = &mut self.list[0] {
            let (d_out, _) = operands.weight.dims2();
            let mut at = 0;
            self.written.sort_by_key(|rows| rows.start);
            for rows in self.written.iter().chain([&(d_out..d_out)]) {
                if rows.start > at {
                    dw.zero_rows(at..rows.start);
                }
                at = at.max(rows.end);
            }
        }
        self.list
    }
}

impl Operands {
    pub(super) fn new(linear: &Linear) -> Operands {
        let mut operands = Operands::as_stored(linear);
        if let Some(order) = &linear.order {
            operands.weight = operands.weight.gather(order);
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
        let adapter = linear.adapter.as_ref().map(|adapter| AdapterValues {
            a: adapter.a.value().clone(),
            b: adapter.b.value().clone(),
            scale: adapter.scale,
            dropout: adapter.dropout.filter(|dropout| dropout.rate > 0.0),
            magnitude: adapter
                .magnitude
                .as_ref()
                .map(|it| (it.m.value().clone(), it.norms.clone())),
        });
        Operands {
            weight,
            bias: linear.bias.as_ref().map(|bias| bias.value().clone()),
            adapter,
            wants: linear.inputs().iter().map(|var| var.needs_grad()).collect(),
        }
    }

    /// Empty gradients for what wants them.
    pub(in crate::ops) fn grads(&self) -> Grads {
        let of_adapter = self.adapter.iter().flat_map(|adapter| {
            let m = adapter.magnitude.as_ref().map(|(m, _)| m);
            [&adapter.a, &adapter.b].into_iter().chain(m)
        });
        let tensors = std::iter::once(&self.weight).chain(&self.bias).chain(of_adapter);
        let list = tensors.zip(&self.wants).enumerate().map(|(idx, (tensor, &wanted))| {
            // The weight's gradient is large and written whole; the others start from zero.
            wanted.then(|| match idx {
                0 => Tensor::uninit(tensor.device(), tensor.shape()),
                _ => Tensor::zeros(tensor.device(), tensor.shape()),
            })
        });
        Grads { list: list.collect(), written: Vec::new() }
    }

    /// Where the gradients of a, b and m are in the list.
    pub(super) fn at_adapter(&self) -> usize {
        1 + self.bias.is_some() as usize
    }

    /// The least width of a product with x on the left.
    pub(super) fn narrowest(&self) -> usize {
        let d_out = self.weight.shape()[0];
        self.adapter.as_ref().map_or(d_out, |adapter| d_out.min(adapter.a.shape()[0]))
    }

    /// Prepares the left side. Rows of one batch differ in `first_row`: no two share a mask.
    pub(in crate::ops) fn input(&self, x: &Tensor, first_row: usize) -> Input {
        assert_eq!(x.dims2().1, self.weight.shape()[1], "linear: width of x");
        let mut input = Input { x: x.clone(), dropped: None, u: None, first_row };
        self.recall(&mut input);
        if let Some(AdapterValues { a, .. }) = &self.adapter {
            let cpu = x.device().expect_cpu();
            let ((n_tok, d_in), rank) = (x.dims2(), a.shape()[0]);
            let mut u = Tensor::uninit(x.device(), &[n_tok, rank]);
            let out = MatMut::new(u.f32_mut(), n_tok, rank);
            let (x, a) = (Mat::new(input.seen().f32(), n_tok, d_in), Mat::new(a.f32(), rank, d_in));
            cpu.gemm(out, 0.0, 1.0, x, a.t(), Scope::Machine);
            input.u = Some(u);
        }
        input
    }

    /// Makes again what was put away.
    pub(super) fn recall(&self, input: &mut Input) {
        if let Some(AdapterValues { dropout: Some(dropout), .. }) = &self.adapter {
            let cpu = input.x.device().expect_cpu();
            let (_, d_in) = input.x.dims2();
            let mut dropped = Tensor::uninit(input.x.device(), input.x.shape());
            dropout.copy(cpu, input.first_row, d_in, input.x.f32(), dropped.f32_mut());
            input.dropped = Some(dropped);
        }
    }

    /// Columns `rows` of the result (rows of the weight).
    pub(super) fn forward(&self, rows: Range<usize>, input: &Input) -> (Tensor, Pass) {
        let mut y = Tensor::uninit(input.x.device(), &[input.n_tok(), rows.len()]);
        let pass = self.forward_into(rows, input, y.f32_mut());
        (y, pass)
    }

    pub(in crate::ops) fn forward_into(
        &self,
        rows: Range<usize>,
        input: &Input,
        y: &mut [f32],
    ) -> Pass {
        let scaled = match &self.adapter {
            Some(adapter) if adapter.magnitude.is_some() => {
                Some(self.forward_scaled(adapter, rows.clone(), input, y))
            }
            _ => {
                let beta = self.put_bias(&rows, y);
                self.product(rows.clone(), &input.x, beta, y, None);
                self.add_adapter(&rows, input, y);
                None
            }
        };
        Pass { rows, scaled }
    }

    /// `y = bias` in each row; returns what of y counts.
    fn put_bias(&self, rows: &Range<usize>, y: &mut [f32]) -> f32 {
        let Some(bias) = &self.bias else { return 0.0 };
        let cpu = bias.device().expect_cpu();
        let bias = &bias.f32()[rows.clone()];
        cpu.each_piece(y, N_ROWS * bias.len(), |_, y| {
            y.chunks_exact_mut(bias.len().max(1)).for_each(|y| y.copy_from_slice(bias));
        });
        1.0
    }

    /// `y = beta y + x @ w^T`; where `wa` is given it becomes `w @ a^T`, of the same decoded rows.
    pub(super) fn product(
        &self,
        rows: Range<usize>,
        x: &Tensor,
        beta: f32,
        y: &mut [f32],
        mut wa: Option<&mut [f32]>,
    ) {
        let cpu = x.device().expect_cpu();
        let ((n_tok, d_in), d_out) = (x.dims2(), rows.len());
        let x = Mat::new(x.f32(), n_tok, d_in);
        self.each_panel(rows.clone(), n_tok, |panel, w| {
            let at = panel.start - rows.start;
            let w = Mat::new(w, panel.len(), d_in);
            let out = MatMut::strided(&mut y[at..], n_tok, panel.len(), d_out);
            cpu.gemm(out, beta, 1.0, x, w.t(), Scope::Machine);
            if let (Some(wa), Some(adapter)) = (&mut wa, &self.adapter) {
                let rank = adapter.a.shape()[0];
                let a = Mat::new(adapter.a.f32(), rank, d_in);
                let out = MatMut::new(&mut wa[at * rank..], panel.len(), rank);
                cpu.gemm(out, 0.0, 1.0, w, a.t(), Scope::Machine);
            }
        });
    }

    /// `y += scale u @ b^T`.
    fn add_adapter(&self, rows: &Range<usize>, input: &Input, y: &mut [f32]) {
        if let (Some(adapter), Some(u)) = (&self.adapter, &input.u) {
            let cpu = u.device().expect_cpu();
            let ((n_tok, rank), d_out) = (u.dims2(), rows.len());
            let b = Mat::new(&adapter.b.f32()[rows.start * rank..], d_out, rank);
            let u = Mat::new(u.f32(), n_tok, rank);
            let out = MatMut::new(y, n_tok, d_out);
            cpu.gemm(out, 1.0, adapter.scale, u, b.t(), Scope::Machine);
        }
    }

    /// `forward_into` where there are magnitudes.
    fn forward_scaled(
        &self,
        adapter: &AdapterValues,
        rows: Range<usize>,
        input: &Input,
        y: &mut [f32],
    ) -> Scaled {
        let device = input.x.device();
        let cpu = device.expect_cpu();
        let (n_tok, d_out) = (input.n_tok(), rows.len());
        let (m, norms_of) = adapter.magnitude.as_ref().expect("asked for by the caller");
        let mut wa = match norms_of {
            Norms::Followed(_) => vec![0.0; d_out * adapter.a.shape()[0]],
            Norms::Fixed(_) => Vec::new(),
        };
        let wanted = matches!(norms_of, Norms::Followed(_)).then_some(wa.as_mut_slice());
        let mut z = Tensor::uninit(device, &[n_tok, d_out]);
        self.product(rows.clone(), input.seen(), 0.0, z.f32_mut(), wanted);
        self.add_adapter(&rows, input, z.f32_mut());
        let norms = match norms_of {
            Norms::Followed(squares) => norms(cpu, adapter, squares, rows.clone(), &wa),
            Norms::Fixed(norms) => norms.f32()[rows.clone()].to_vec(),
        };
        let m = &m.f32()[rows.clone()];
        let factors: Vec<f32> = m.iter().zip(&norms).map(|(m, n)| m / n).collect();
        let mut beta = self.put_bias(&rows, y);
        if let Some(dropped) = &input.dropped {
            let mut left = Tensor::uninit(device, input.x.shape());
            subtract(cpu, input.x.f32(), dropped.f32(), left.f32_mut());
            self.product(rows, &left, beta, y, None);
            beta = 1.0;
        }
        cpu.each_piece(y, N_ROWS * d_out, |idx, y| {
            let x = &z.f32()[idx * N_ROWS * d_out..][..y.len()];
            cpu.simd(Scale { factors: &factors, x, y, beta });
        });
        let keeps = self.wants[self.at_adapter() + 2];
        Scaled { z: keeps.then_some(z), norms, factors }
    }

    /// `forward` for the rows of one expert: each row has bits that do not depend on how many
    /// there are, so that a token cannot be felt by those before it through the routing.
    ///
    /// The product takes another order of summation for one row, and for results of at most 256
    /// numbers. Smaller runs are filled up with rows of zeros.
    pub(super) fn forward_run(&self, x: &Tensor, y: &mut [f32]) -> (Input, Pass) {
        let ((n_tok, d_in), d_out) = (x.dims2(), self.weight.shape()[0]);
        let n_rows = (256 / self.narrowest().max(1) + 1).max(2);
        if n_tok >= n_rows {
            let input = self.input(x, 0);
            let pass = self.forward_into(0..d_out, &input, y);
            return (input, pass);
        }
        let mut filled = Tensor::zeros(x.device(), &[n_rows, d_in]);
        filled.f32_mut()[..n_tok * d_in].copy_from_slice(x.f32());
        let mut input = self.input(&filled, 0);
        let (out, mut pass) = self.forward(0..d_out, &input);
        y.copy_from_slice(&out.f32()[..n_tok * d_out]);
        let first = |x: &Tensor| x.rows(0..n_tok);
        input.x = x.clone();
        input.dropped = input.dropped.as_ref().map(first);
        input.u = input.u.as_ref().map(first);
        if let Some(scaled) = &mut pass.scaled {
            scaled.z = scaled.z.as_ref().map(first);
        }
        (input, pass)
    }

    /// Inverts `forward_into`; `dx` is (where, factor of what is there).
    pub(in crate::ops) fn backward(
        &self,
        input: &Input,
        pass: &Pass,
        dy: &[f32],
        mut dx: Option<(&mut [f32], f32)>,
        grads: &mut Grads,
    ) {
        let device = input.x.device();
        let cpu = device.expect_cpu();
        let rows = &pass.rows;
        let ((n_tok, d_in), d_out) = (input.x.dims2(), rows.len());
        if let Some(dw) = &mut grads.list[0] {
            let beta = if grads.written.contains(rows) { 1.0 } else { 0.0 };
            let out = &mut dw.f32_mut()[rows.start * d_in..rows.end * d_in];
            let out = MatMut::new(out, d_out, d_in);
            let (dy, x) = (Mat::new(dy, n_tok, d_out), Mat::new(input.x.f32(), n_tok, d_in));
            cpu.gemm(out, beta, 1.0, dy.t(), x, Scope::Machine);
            grads.written.push(rows.clone());
        }
        if self.bias.is_some()
            && let Some(dbias) = &mut grads.list[1]
        {
            let sums = sum_pieces(device, dy, d_out, |sum, at| *sum += dy[at]);
            add(&mut dbias.f32_mut()[rows.clone()], sums.f32());
        }
        let e = pass.scaled.as_ref().map(|scaled| {
            self.backward_magnitude(scaled, rows, dy, grads);
            let mut e = Tensor::uninit(device, &[n_tok, d_out]);
            cpu.each_piece(e.f32_mut(), N_ROWS * d_out, |idx, y| {
                let x = &dy[idx * N_ROWS * d_out..][..y.len()];
                cpu.simd(Scale { factors: &scaled.factors, x, y, beta: 0.0 });
            });
            e
        });
        let e_or_dy = e.as_ref().map_or(dy, |e| e.f32());
        if let Some((dx, beta)) = &mut dx {
            // Without dropout the magnitudes scale all of the product.
            let left = if input.dropped.is_some() { dy } else { e_or_dy };
            self.product_back(rows, left, *beta, dx);
        }
        let dx = dx.map(|(dx, _)| dx);
        self.backward_adapter(input, rows, (dy, e.as_ref()), dx, grads);
    }

    /// The gradient of the magnitudes.
    fn backward_magnitude(
        &self,
        scaled: &Scaled,
        rows: &Range<usize>,
        dy: &[f32],
        grads: &mut Grads,
    ) {
        let at = self.at_adapter() + 2;
        if let (Some(z), Some(dm)) = (&scaled.z, &mut grads.list[at]) {
            let z_numbers = z.f32();
            let sums =
                sum_pieces(z.device(), dy, rows.len(), |sum, at| *sum += dy[at] * z_numbers[at]);
            let dm = dm.f32_mut()[rows.clone()].iter_mut();
            for ((dm, sum), norm) in dm.zip(sums.f32()).zip(&scaled.norms) {
                *dm += sum / norm;
            }
        }
    }

    /// `dx = beta dx + dy @ w`.
    fn product_back(&self, rows: &Range<usize>, dy: &[f32], mut beta: f32, dx: &mut [f32]) {
        let cpu = self.weight.device().expect_cpu();
        let (d_in, d_out) = (self.weight.shape()[1], rows.len());
        let n_tok = dx.len() / d_in.max(1);
        self.each_panel(rows.clone(), n_tok, |panel, w| {
            let dy = Mat::strided(&dy[panel.start - rows.start..], n_tok, panel.len(), d_out);
            let w = Mat::new(w, panel.len(), d_in);
            cpu.gemm(MatMut::new(dx, n_tok, d_in), beta, 1.0, dy, w, Scope::Machine);
            beta = 1.0;
        });
    }

    /// The adapter's part of `backward`; `dy` comes with e, where that is another.
    fn backward_adapter(
        &self,
        input: &Input,
        rows: &Range<usize>,
        (dy, e): (&[f32], Option<&Tensor>),
        dx: Option<&mut [f32]>,
        grads: &mut Grads,
    ) {
        let (Some(adapter), Some(u)) = (&self.adapter, &input.u) else { return };
        let AdapterValues { a, b, scale, .. } = adapter;
        let device = input.x.device();
        let cpu = device.expect_cpu();
        let ((n_tok, d_in), rank, d_out) = (input.x.dims2(), a.shape()[0], rows.len());
        let e_mat = Mat::new(e.map_or(dy, |e| e.f32()), n_tok, d_out);
        let b = Mat::new(&b.f32()[rows.start * rank..], d_out, rank);
        let mut du = Tensor::uninit(device, &[n_tok, rank]);
        let out = MatMut::new(du.f32_mut(), n_tok, rank);
        cpu.gemm(out, 0.0, *scale, e_mat, b, Scope::Machine);
        let du = Mat::new(du.f32(), n_tok, rank);
        let at = self.at_adapter();
        if let Some(da) = &mut grads.list[at] {
            let seen = Mat::new(input.seen().f32(), n_tok, d_in);
            let out = MatMut::new(da.f32_mut(), rank, d_in);
            cpu.gemm(out, 1.0, 1.0, du.t(), seen, Scope::Machine);
        }
        if let Some(db) = &mut grads.list[at + 1] {
            let out = &mut db.f32_mut()[rows.start * rank..rows.end * rank];
            let u = Mat::new(u.f32(), n_tok, rank);
            let out = MatMut::new(out, d_out, rank);
            cpu.gemm(out, 1.0, *scale, e_mat.t(), u, Scope::Machine);
        }
        let Some(dx) = dx else { return };
        let a = Mat::new(a.f32(), rank, d_in);
        let Some(dropout) = adapter.dropout else {
            return cpu.gemm(MatMut::new(dx, n_tok, d_in), 1.0, 1.0, du, a, Scope::Machine);
        };
        let mut seen = Tensor::uninit(device, &[n_tok, d_in]);
        cpu.gemm(MatMut::new(seen.f32_mut(), n_tok, d_in), 0.0, 1.0, du, a, Scope::Machine);
        if let Some(e) = e {
            let mut more = Tensor::uninit(device, &[n_tok, d_out]);
            subtract(cpu, e.f32(), dy, more.f32_mut());
            self.product_back(rows, more.f32(), 1.0, seen.f32_mut());
        }
        dropout.add(cpu, input.first_row, d_in, seen.f32(), dx);
    }

    /// Calls `f` with runs of weight rows in f32, for `n_tok` tokens: all at once if stored so.
    fn each_panel(
        &self,
        rows: Range<usize>,
        n_tok: usize,
        mut f: impl FnMut(Range<usize>, &[f32]),
    ) {
        let d_in = self.weight.shape()[1];
        if self.weight.dtype() == DType::F32 {
            return f(rows.clone(), &self.weight.f32()[rows.start * d_in..rows.end * d_in]);
        }
        let device = self.weight.device();
        let cpu = device.expect_cpu();
        let panel = if n_tok < N_MANY { PANEL_FEW } else { PANEL_MANY };
        let n_rows = (panel / d_in.max(1)).max(N_DECODED);
        let mut scratch = Tensor::uninit(device, &[n_rows.min(rows.len()), d_in]);
        for start in rows.clone().step_by(n_rows) {
            let panel = start..rows.end.min(start + n_rows);
            let w = &mut scratch.f32_mut()[..panel.len() * d_in];
            cpu.each_piece(w, N_DECODED * d_in, |idx, w| {
                self.weight.read_f32((panel.start + idx * N_DECODED) * d_in, w);
            });
            f(panel, w);
        }
    }
}

/// `y = a - b`.
fn subtract(cpu: &Cpu, a: &[f32], b: &[f32], y: &mut [f32]) {
    cpu.each_piece(y, PIECE, |idx, y| {
        let (a, b) = (&a[idx * PIECE..], &b[idx * PIECE..]);
        y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = a - b);
    });
}

/// `y += x`.
fn add(y: &mut [f32], x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
}

/// Sums over the rows of (n, d), per piece of rows, then over the pieces in order: `f` adds the
/// number at an index of `dy` to the sum of its column.
fn sum_pieces(
    device: &Device,
    dy: &[f32],
    d: usize,
    f: impl Fn(&mut f32, usize) + Send + Sync,
) -> Tensor {
    let cpu = device.expect_cpu();
    let n_rows = dy.len() / d.max(1);
    let mut parts = Tensor::zeros(device, &[n_rows.div_ceil(N_ROWS), d]);
    cpu.each_piece(parts.f32_mut(), d, |idx, part| {
        for row in idx * N_ROWS..n_rows.min((idx + 1) * N_ROWS) {
            part.iter_mut().enumerate().for_each(|(col, sum)| f(sum, row * d + col));
        }
    });
    sum_rows(&parts)
}
