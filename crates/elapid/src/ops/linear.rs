//! Linear map: `y = x @ w^T + bias + scale (x @ a^T) @ b^T`.
//!
//! The weight may be stored in f16, bf16 or a block format; it is then decoded a panel of rows at
//! a time, and is frozen. The last term is a low-rank adapter, absent for most.
//!
//!     dx = dy @ w + du @ a           u = x @ a^T,   du = scale dy @ b
//!     dw = dy^T @ x                  da = du^T @ x
//!     dbias = sum over rows of dy    db = scale dy^T @ u
//!
//! | name   | shape            |          | name | shape            |
//! |--------|------------------|----------|------|------------------|
//! | `x`    | (n_tok, d_in)    |          | `a`  | (rank, d_in)     |
//! | `w`    | (d_out, d_in)    |          | `b`  | (d_out, rank)    |
//! | `bias` | (d_out)          |          | `y`  | (n_tok, d_out)   |
//!
//! Three forms: `linear`; `linear_split`, whose columns go to several outputs without a copy; and
//! `linear_grouped`, where runs of rows have weights of their own: experts, multiplied in blocks.
//! Gradients are made only for operands that want them. Kept: `x` and `u`.

use super::norm::sum_rows;
use crate::cpu::{Mat, MatMut, Scope};
use crate::device::Device;
use crate::tape::{Tape, Var};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// The operands on the right.
#[derive(Clone)]
pub struct Linear {
    /// (d_out, d_in), in any dtype.
    pub weight: Var,
    /// (d_out).
    pub bias: Option<Var>,
    /// Low-rank addition.
    pub adapter: Option<Adapter>,
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
}

/// Decoded weight rows held at a time, in numbers: a panel stays in the second-level cache.
const PANEL: usize = 1 << 17;
/// Rows of dy that one task sums for the bias.
const N_ROWS: usize = 64;

impl From<Var> for Linear {
    fn from(weight: Var) -> Linear {
        Linear { weight, bias: None, adapter: None }
    }
}

impl Linear {
    /// Width of the result.
    pub fn d_out(&self) -> usize {
        self.weight.value().shape()[0]
    }

    /// Everything a gradient may go to, in the order of `Grads::into_list`.
    pub(super) fn inputs(&self) -> Vec<&Var> {
        let adapter = self.adapter.iter().flat_map(|adapter| [&adapter.a, &adapter.b]);
        std::iter::once(&self.weight).chain(&self.bias).chain(adapter).collect()
    }

    pub(super) fn operands(&self) -> Operands {
        let weight = self.weight.value().clone();
        assert_eq!(weight.shape().len(), 2, "linear: weight of shape {:?}", weight.shape());
        assert!(
            weight.dtype() == DType::F32 || !self.weight.needs_grad(),
            "linear: a weight in {:?} cannot be trained",
            weight.dtype()
        );
        Operands {
            weight,
            bias: self.bias.as_ref().map(|bias| bias.value().clone()),
            adapter: self.adapter.as_ref().map(|adapter| {
                (adapter.a.value().clone(), adapter.b.value().clone(), adapter.scale)
            }),
            wants: self.inputs().iter().map(|var| var.needs_grad()).collect(),
        }
    }
}

/// `x @ w^T + ...`.
pub fn linear(tape: &Tape, x: &Var, linear: &Linear) -> Var {
    linear_split(tape, x, linear, &[linear.d_out()]).pop().expect("one output")
}

/// The same, its columns cut into outputs of these widths.
pub fn linear_split(tape: &Tape, x: &Var, linear: &Linear, widths: &[usize]) -> Vec<Var> {
    assert_eq!(widths.iter().sum::<usize>(), linear.d_out(), "linear: widths {widths:?}");
    let operands = linear.operands();
    let x_value = x.value().clone();
    let pieces = cut(widths);
    let u = operands.low_rank(&x_value);
    let outputs = pieces.iter().map(|rows| operands.forward(rows.clone(), &x_value, u.as_ref()));
    let outputs = outputs.collect();
    let mut inputs = linear.inputs();
    inputs.insert(0, x);
    let wants_dx = x.needs_grad();
    tape.record_many("linear", &inputs, outputs, move |dys| {
        let mut dx = wants_dx.then(|| Tensor::uninit(x_value.device(), x_value.shape()));
        let mut grads = operands.grads();
        let mut beta = 0.0;
        for (rows, dy) in pieces.iter().zip(&dys) {
            if let Some(dy) = dy {
                let dx = dx.as_mut().map(|dx| (dx.f32_mut(), beta));
                operands.backward(rows.clone(), &x_value, u.as_ref(), dy.f32(), dx, &mut grads);
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
    let mut y = Tensor::uninit(device, &[n_tok, d_out]);
    let runs: Vec<Range<usize>> = offsets.windows(2).map(|pair| pair[0]..pair[1]).collect();
    let operands: Vec<Operands> = experts.iter().map(Linear::operands).collect();
    let mut kept = Vec::with_capacity(experts.len());
    for (rows, operands) in runs.iter().zip(&operands) {
        let x_rows = x.value().rows(rows.clone());
        let u = if rows.is_empty() { None } else { operands.low_rank(&x_rows) };
        if !rows.is_empty() {
            let y_rows = &mut y.f32_mut()[rows.start * d_out..rows.end * d_out];
            operands.forward_run(&x_rows, u.as_ref(), y_rows);
        }
        kept.push(u);
    }
    let inputs: Vec<&Var> =
        std::iter::once(x).chain(experts.iter().flat_map(Linear::inputs)).collect();
    let (x_value, wants_dx) = (x.value().clone(), x.needs_grad());
    tape.record("grouped linear", &inputs, y, move |dy| {
        let mut dx = wants_dx.then(|| Tensor::uninit(x_value.device(), x_value.shape()));
        let mut list = vec![None];
        for ((rows, operands), u) in runs.iter().zip(&operands).zip(&kept) {
            let mut grads = operands.grads();
            if !rows.is_empty() {
                let dy = &dy.f32()[rows.start * d_out..rows.end * d_out];
                let dx = dx.as_mut();
                let dx = dx.map(|dx| (&mut dx.f32_mut()[rows.start * d_in..rows.end * d_in], 0.0));
                let x_rows = x_value.rows(rows.clone());
                operands.backward(0..d_out, &x_rows, u.as_ref(), dy, dx, &mut grads);
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

/// The values on the right, and which of them want gradients (in the order of `Linear::inputs`).
pub(super) struct Operands {
    weight: Tensor,
    bias: Option<Tensor>,
    adapter: Option<(Tensor, Tensor, f32)>,
    wants: Vec<bool>,
}

/// Gradients of the operands, summed over calls of `backward`.
pub(super) struct Grads {
    /// In the order of `Linear::inputs`; `None` where none is wanted.
    list: Vec<Option<Tensor>>,
    /// Rows of the weight that have been written at least once.
    written: Vec<Range<usize>>,
}

impl Grads {
    /// In the order of `Linear::inputs`; rows that no gradient reached are zero.
    pub(super) fn into_list(mut self, operands: &Operands) -> Vec<Option<Tensor>> {
        if let Some(dw) = &mut self.list[0] {
            let (d_out, d_in) = operands.weight.dims2();
            let mut at = 0;
            self.written.sort_by_key(|rows| rows.start);
            for rows in self.written.iter().chain([&(d_out..d_out)]) {
                if rows.start > at {
                    dw.f32_mut()[at * d_in..rows.start * d_in].fill(0.0);
                }
                at = at.max(rows.end);
            }
        }
        self.list
    }
}

impl Operands {
    /// Empty gradients for what wants them.
    pub(super) fn grads(&self) -> Grads {
        let tensors = std::iter::once(&self.weight)
            .chain(&self.bias)
            .chain(self.adapter.iter().flat_map(|(a, b, _)| [a, b]));
        let list = tensors.zip(&self.wants).enumerate().map(|(idx, (tensor, &wanted))| {
            // The weight's gradient is large and written whole; the others start from zero.
            wanted.then(|| match idx {
                0 => Tensor::uninit(tensor.device(), tensor.shape()),
                _ => Tensor::zeros(tensor.device(), tensor.shape()),
            })
        });
        Grads { list: list.collect(), written: Vec::new() }
    }

    /// `u = x @ a^T`.
    pub(super) fn low_rank(&self, x: &Tensor) -> Option<Tensor> {
        let (a, _, _) = self.adapter.as_ref()?;
        let Device::Cpu(cpu) = x.device();
        let ((n_tok, d_in), rank) = (x.dims2(), a.shape()[0]);
        let mut u = Tensor::uninit(x.device(), &[n_tok, rank]);
        let out = MatMut::new(u.f32_mut(), n_tok, rank);
        let (x, a) = (Mat::new(x.f32(), n_tok, d_in), Mat::new(a.f32(), rank, d_in));
        cpu.gemm(out, 0.0, 1.0, x, a.t(), Scope::Machine);
        Some(u)
    }

    /// Columns `rows` of the result (rows of the weight).
    fn forward(&self, rows: Range<usize>, x: &Tensor, u: Option<&Tensor>) -> Tensor {
        let mut y = Tensor::uninit(x.device(), &[x.dims2().0, rows.len()]);
        self.forward_into(rows, x, u, y.f32_mut());
        y
    }

    pub(super) fn forward_into(
        &self,
        rows: Range<usize>,
        x: &Tensor,
        u: Option<&Tensor>,
        y: &mut [f32],
    ) {
        let Device::Cpu(cpu) = x.device();
        let ((n_tok, d_in), d_out) = (x.dims2(), rows.len());
        assert_eq!(d_in, self.weight.shape()[1], "linear: width of x");
        let mut beta = 0.0;
        if let Some(bias) = &self.bias {
            y.chunks_exact_mut(d_out).for_each(|y| y.copy_from_slice(&bias.f32()[rows.clone()]));
            beta = 1.0;
        }
        let x = Mat::new(x.f32(), n_tok, d_in);
        self.each_panel(rows.clone(), |panel, w| {
            let at = panel.start - rows.start;
            let out = MatMut::strided(&mut y[at..], n_tok, panel.len(), d_out);
            cpu.gemm(out, beta, 1.0, x, Mat::new(w, panel.len(), d_in).t(), Scope::Machine);
        });
        if let (Some((_, b, scale)), Some(u)) = (&self.adapter, u) {
            let rank = b.shape()[1];
            let b = Mat::new(&b.f32()[rows.start * rank..], d_out, rank);
            let u = Mat::new(u.f32(), n_tok, rank);
            cpu.gemm(MatMut::new(y, n_tok, d_out), 1.0, *scale, u, b.t(), Scope::Machine);
        }
    }

    /// `forward_into` for the rows of one expert: each row has bits that do not depend on how many
    /// there are, so that a token cannot be felt by those before it through the routing.
    ///
    /// The product takes another order of summation for one row, and for results of at most 256
    /// numbers. Smaller runs are filled up with rows of zeros.
    fn forward_run(&self, x: &Tensor, u: Option<&Tensor>, y: &mut [f32]) {
        let ((n_tok, d_in), d_out) = (x.dims2(), self.weight.shape()[0]);
        let narrowest = self.adapter.as_ref().map_or(d_out, |(a, _, _)| d_out.min(a.shape()[0]));
        let n_rows = (256 / narrowest.max(1) + 1).max(2);
        if n_tok >= n_rows {
            return self.forward_into(0..d_out, x, u, y);
        }
        let device = x.device();
        let mut filled = Tensor::zeros(device, &[n_rows, d_in]);
        filled.f32_mut()[..n_tok * d_in].copy_from_slice(x.f32());
        let u = self.low_rank(&filled);
        let mut out = Tensor::uninit(device, &[n_rows, d_out]);
        self.forward_into(0..d_out, &filled, u.as_ref(), out.f32_mut());
        y.copy_from_slice(&out.f32()[..n_tok * d_out]);
    }

    /// Inverts `forward_into` for the same rows; `dx` is (where, factor of what is there).
    pub(super) fn backward(
        &self,
        rows: Range<usize>,
        x: &Tensor,
        u: Option<&Tensor>,
        dy: &[f32],
        mut dx: Option<(&mut [f32], f32)>,
        grads: &mut Grads,
    ) {
        let device = x.device();
        let Device::Cpu(cpu) = device;
        let ((n_tok, d_in), d_out) = (x.dims2(), rows.len());
        let (x_mat, dy_mat) = (Mat::new(x.f32(), n_tok, d_in), Mat::new(dy, n_tok, d_out));
        if let Some((dx, beta)) = &mut dx {
            self.each_panel(rows.clone(), |panel, w| {
                let at = panel.start - rows.start;
                let dy = Mat::strided(&dy[at..], n_tok, panel.len(), d_out);
                let out = MatMut::new(dx, n_tok, d_in);
                cpu.gemm(out, *beta, 1.0, dy, Mat::new(w, panel.len(), d_in), Scope::Machine);
                *beta = 1.0;
            });
        }
        if let Some(dw) = &mut grads.list[0] {
            let beta = if grads.written.contains(&rows) { 1.0 } else { 0.0 };
            let out = &mut dw.f32_mut()[rows.start * d_in..rows.end * d_in];
            let out = MatMut::new(out, d_out, d_in);
            cpu.gemm(out, beta, 1.0, dy_mat.t(), x_mat, Scope::Machine);
            grads.written.push(rows.clone());
        }
        if self.bias.is_some()
            && let Some(dbias) = &mut grads.list[1]
        {
            let sums = sum_pieces(device, dy, d_out);
            for (dbias, sum) in dbias.f32_mut()[rows.clone()].iter_mut().zip(sums.f32()) {
                *dbias += sum;
            }
        }
        if let (Some((a, b, scale)), Some(u)) = (&self.adapter, u) {
            let at = 1 + self.bias.is_some() as usize;
            let rank = a.shape()[0];
            let b = Mat::new(&b.f32()[rows.start * rank..], d_out, rank);
            let mut du = Tensor::uninit(device, &[n_tok, rank]);
            let out = MatMut::new(du.f32_mut(), n_tok, rank);
            cpu.gemm(out, 0.0, *scale, dy_mat, b, Scope::Machine);
            let du = Mat::new(du.f32(), n_tok, rank);
            if let Some(da) = &mut grads.list[at] {
                let out = MatMut::new(da.f32_mut(), rank, d_in);
                cpu.gemm(out, 1.0, 1.0, du.t(), x_mat, Scope::Machine);
            }
            if let Some(db) = &mut grads.list[at + 1] {
                let out = &mut db.f32_mut()[rows.start * rank..rows.end * rank];
                let u = Mat::new(u.f32(), n_tok, rank);
                let out = MatMut::new(out, d_out, rank);
                cpu.gemm(out, 1.0, *scale, dy_mat.t(), u, Scope::Machine);
            }
            if let Some((dx, _)) = dx {
                let out = MatMut::new(dx, n_tok, d_in);
                cpu.gemm(out, 1.0, 1.0, du, Mat::new(a.f32(), rank, d_in), Scope::Machine);
            }
        }
    }

    /// Calls `f` with runs of weight rows in f32: all at once if they are stored so.
    fn each_panel(&self, rows: Range<usize>, mut f: impl FnMut(Range<usize>, &[f32])) {
        let d_in = self.weight.shape()[1];
        if self.weight.dtype() == DType::F32 {
            return f(rows.clone(), &self.weight.f32()[rows.start * d_in..rows.end * d_in]);
        }
        let device = self.weight.device();
        let Device::Cpu(cpu) = device;
        let n_rows = (PANEL / d_in.max(1)).max(16);
        let mut scratch = Tensor::uninit(device, &[n_rows.min(rows.len()), d_in]);
        for start in rows.clone().step_by(n_rows) {
            let panel = start..rows.end.min(start + n_rows);
            let w = &mut scratch.f32_mut()[..panel.len() * d_in];
            cpu.each_piece(w, 16 * d_in, |idx, w| {
                self.weight.read_f32((panel.start + idx * 16) * d_in, w);
            });
            f(panel, w);
        }
    }
}

/// Column sums of (n, d), per piece of rows, then over the pieces in order.
fn sum_pieces(device: &Device, dy: &[f32], d: usize) -> Tensor {
    let Device::Cpu(cpu) = device;
    let n_pieces = (dy.len() / d).div_ceil(N_ROWS);
    let mut parts = Tensor::zeros(device, &[n_pieces, d]);
    cpu.each_piece(parts.f32_mut(), d, |idx, part| {
        let rows = &dy[idx * N_ROWS * d..dy.len().min((idx + 1) * N_ROWS * d)];
        for row in rows.chunks_exact(d) {
            for (part, dy) in part.iter_mut().zip(row) {
                *part += dy;
            }
        }
    });
    sum_rows(&parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Input, check_gradients};
    use crate::quant::BlockType;
    use crate::rng::Rng;
    use crate::tape::Gradients;
    use half::{bf16, f16};
    use std::sync::Arc;

    fn with_adapter(v: &[Var]) -> Linear {
        let adapter = Adapter { a: v[3].clone(), b: v[4].clone(), scale: 1.5 };
        Linear { weight: v[1].clone(), bias: Some(v[2].clone()), adapter: Some(adapter) }
    }

    fn operands(n_tok: usize, d_in: usize, d_out: usize) -> Vec<Input> {
        vec![
            Input::normal(1, &[n_tok, d_in], 1.0),
            Input::normal(2, &[d_out, d_in], 0.5),
            Input::normal(3, &[d_out], 0.5),
            Input::normal(4, &[2, d_in], 0.5),
            Input::normal(5, &[d_out, 2], 0.5),
        ]
    }

    #[test]
    fn gradients() {
        for (n_tok, d_in, d_out) in [(1, 1, 3), (5, 7, 9), (130, 33, 20)] {
            let inputs = operands(n_tok, d_in, d_out);
            check_gradients(&inputs[..2], |tape, v| {
                vec![linear(tape, &v[0], &v[1].clone().into())]
            });
            check_gradients(&inputs, |tape, v| vec![linear(tape, &v[0], &with_adapter(v))]);
            check_gradients(&inputs, |tape, v| {
                linear_split(tape, &v[0], &with_adapter(v), &[d_out - 2, 2])
            });
            // An output that nobody uses.
            check_gradients(&inputs, |tape, v| {
                linear_split(tape, &v[0], &with_adapter(v), &[d_out - 2, 2]).split_off(1)
            });
        }
    }

    #[test]
    fn gradients_of_groups() {
        let mut inputs = operands(9, 5, 4);
        inputs.extend(operands(1, 5, 4).split_off(1));
        inputs.extend(operands(1, 5, 4).split_off(1));
        check_gradients(&inputs, |tape, v| {
            let expert = |at: usize| {
                let mut list = vec![v[0].clone()];
                list.extend_from_slice(&v[at..at + 4]);
                with_adapter(&list)
            };
            let experts = [expert(1), expert(5), expert(9)];
            vec![linear_grouped(tape, &v[0], &[0, 3, 3, 9], &experts)]
        });
    }

    #[test]
    fn a_row_of_a_group_has_the_same_bits_however_many_rows_it_has() {
        let device = Device::cpu(2).unwrap();
        for (d_in, d_out) in [(16, 20), (24, 7), (300, 64), (770, 300)] {
            let inputs = operands(80, d_in, d_out);
            let vars: Vec<Var> =
                inputs.iter().map(|input| Var::constant(input.tensor(&device))).collect();
            let row = |n_tok: usize| {
                let x = Var::constant(vars[0].value().rows(0..n_tok));
                let experts = [with_adapter(&vars)];
                let y = linear_grouped(&Tape::off(), &x, &[0, n_tok], &experts);
                y.value().f32()[..d_out].to_vec()
            };
            let want = row(80);
            for n_tok in [1, 2, 3, 11, 40] {
                assert!(row(n_tok) == want, "{n_tok} rows, {d_in} to {d_out}");
            }
        }
    }

    #[test]
    fn a_frozen_weight_gets_no_gradient_and_passes_one_on() {
        let device = Device::cpu(2).unwrap();
        let inputs = operands(3, 4, 5);
        let [x, w] = [&inputs[0], &inputs[1]].map(|input| input.tensor(&device));
        let dy = Input::normal(9, &[3, 5], 1.0).tensor(&device);
        let tape = Tape::new();
        let y = linear(&tape, &tape.leaf(0, &x), &Var::constant(w.clone()).into());
        let mut grads = Gradients::default();
        tape.walk(vec![(y, dy.clone())], &mut grads);
        assert_eq!(grads.iter().map(|(key, _)| key).collect::<Vec<_>>(), [0]);
        let (w, dy) = (w.f32(), dy.f32());
        let product = |tok: usize, idx: usize| -> f32 {
            (0..5).map(|out| dy[tok * 5 + out] * w[out * 4 + idx]).sum()
        };
        let want: Vec<f32> = (0..12).map(|at| product(at / 4, at % 4)).collect();
        assert!(largest_difference(grads.get(0).unwrap().f32(), &want) < 1e-5);
    }

    /// Where one is not a number they are infinitely far apart.
    fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len());
        let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
        differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
    }

    /// Bytes of this format: of `values` where we can encode it, else arbitrary ones under scales
    /// that make numbers of about the same size.
    fn encoded(dtype: DType, values: &[f32]) -> Vec<u8> {
        // (first byte of each f16, its size)
        let (scales, size): (&[usize], f32) = match dtype {
            DType::F16 => {
                return values.iter().flat_map(|&w| f16::from_f32(w).to_le_bytes()).collect();
            }
            DType::BF16 => {
                return values.iter().flat_map(|&w| bf16::from_f32(w).to_le_bytes()).collect();
            }
            DType::Block(BlockType::Q8_0) => {
                let mut bytes = vec![0; dtype.n_bytes(values.len()).unwrap()];
                BlockType::Q8_0.encode(values, &mut bytes);
                return bytes;
            }
            DType::Block(BlockType::Q4_0) => (&[0], 0.05),
            DType::Block(BlockType::Q4K) => (&[0, 2], 1e-3),
            DType::Block(BlockType::Q6K) => (&[208], 2e-4),
            _ => panic!("{dtype:?} is not met here"),
        };
        let rng = Rng::new(3, 0);
        let n_bytes = dtype.n_bytes(values.len()).unwrap() as u64;
        let mut bytes: Vec<u8> = (0..n_bytes).map(|n| rng.below(n, 256) as u8).collect();
        for (idx, block) in bytes.chunks_exact_mut(dtype.block().1).enumerate() {
            for &at in scales {
                let scale = f16::from_f32(size * (1.0 + (idx % 5) as f32 / 4.0));
                block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        bytes
    }

    /// What the bytes mean, not by way of `Tensor`.
    fn decoded(dtype: DType, bytes: &[u8], n_elem: usize) -> Vec<f32> {
        let pairs = bytes.as_chunks::<2>().0.iter();
        match dtype {
            DType::F16 => pairs.map(|x| f16::from_le_bytes(*x).to_f32()).collect(),
            DType::BF16 => pairs.map(|x| bf16::from_le_bytes(*x).to_f32()).collect(),
            DType::Block(block) => {
                let mut values = vec![0.0; n_elem];
                block.decode(bytes, &mut values);
                values
            }
            DType::F32 => panic!("nothing to decode"),
        }
    }

    #[test]
    fn a_weight_in_any_format_gives_what_its_decoded_values_give() {
        let device = Device::cpu(2).unwrap();
        // Two panels, the second of which does not fill its last piece.
        let (n_tok, d_in, d_out) = (3, 256, 700);
        let inputs = operands(n_tok, d_in, d_out);
        let (x, exact) = (inputs[0].tensor(&device), inputs[1].tensor(&device));
        let dy = Input::normal(9, &[n_tok, d_out], 1.0).tensor(&device);
        let run = |weight: Tensor| {
            let tape = Tape::new();
            let y = linear(&tape, &tape.leaf(0, &x), &Var::constant(weight).into());
            let mut out = y.value().f32().to_vec();
            let mut grads = Gradients::default();
            tape.walk(vec![(y, dy.clone())], &mut grads);
            out.extend_from_slice(grads.get(0).unwrap().f32());
            out
        };
        let blocks = [BlockType::Q8_0, BlockType::Q4_0, BlockType::Q4K, BlockType::Q6K];
        for dtype in [DType::F16, DType::BF16].into_iter().chain(blocks.map(DType::Block)) {
            let bytes = encoded(dtype, exact.f32());
            let values = decoded(dtype, &bytes, d_out * d_in);
            let stored = Tensor::from_shared(&device, &[d_out, d_in], dtype, Arc::new(bytes), 0);
            let want = run(Tensor::from_f32(&device, &[d_out, d_in], &values));
            let size = want.iter().fold(0.0, |size: f32, y| size.max(y.abs()));
            assert!(size > 10.0, "{dtype:?}: {size} is too small to tell");
            let worst = largest_difference(&run(stored), &want);
            assert!(worst < 3e-6 * size, "{dtype:?}: {worst} of {size}");
        }
    }
}
