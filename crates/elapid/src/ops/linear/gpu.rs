//! Linear maps on a graphics processor: the twin of `operands.rs`, whose formulas it follows, with
//! whole tensors, rows and columns of them in place of slices.
//!
//! A weight in f32 is multiplied as it is, or in the dtype of activations, cast once for as long as
//! it stays the same. A weight in any other dtype is decoded a panel of rows at a time, unless
//! products read it as it is stored, as all do in a call with few tokens. All experts of a call go
//! the same way, so that bits of a row do not depend on how many rows its expert has.
//!
//! Results are activations; gradients of operands are f32.

use super::bias::add_sums;
use super::dropout::Dropout;
use super::magnitude::Norms;
use super::narrow::{Narrow, one_row};
use super::operands::{AdapterValues, Grads, Input, Operands};
use super::{Linear, N_ROWS};
use crate::tape::{Tape, Var};
use crate::tensor::add::add_into;
use crate::tensor::gpu::product::{Block, Rows, Side, in_format};
use crate::tensor::gpu::vector::N_FEW;
use crate::tensor::gpu::{Arg, Const, Gpu, Kernel, Word, Work};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

/// Bytes of a panel of decoded weight rows, at most.
const PANEL_BYTES: usize = 64 << 20;

pub(super) static BIAS: Kernel = Kernel {
    entry: "linear_bias",
    wgsl: include_str!("linear.wgsl"),
    cuda: include_str!("linear.cu"),
};
static SCALE: Kernel = Kernel { entry: "linear_scale", ..BIAS };
static SUBTRACT: Kernel = Kernel { entry: "linear_subtract", ..BIAS };
static NORMS: Kernel = Kernel { entry: "linear_norms", ..BIAS };
static DROPOUT: Kernel = Kernel { entry: "linear_dropout", ..BIAS };

/// Constants of all entries: the width of rows, and what is there.
pub(super) fn consts(d: usize, has: &[&'static str]) -> [Const; 6] {
    let flag = |name: &'static str| (name, usize::from(has.contains(&name)));
    let [z, norms, fixed, adds] = ["HAS_Z", "HAS_NORMS", "FIXED", "ADDS"].map(flag);
    [("D", d), ("N_ROWS", N_ROWS), z, norms, fixed, adds]
}

/// One forward pass of some rows, as backward needs it.
pub(in crate::ops) struct GpuPass {
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

/// `linear_each` and `linear_split` there: maps of one input, each with rows of the weight that
/// are an output of their own.
pub(super) fn linear_maps(
    tape: &Tape,
    gpu: &Gpu,
    x: &Var,
    maps: &[(&Linear, Vec<Range<usize>>)],
) -> Vec<Var> {
    let (device, n_tok) = (x.value().device(), x.value().dims2().0);
    if n_tok == 1 && !tape.is_recording() {
        return maps
            .iter()
            .flat_map(|(linear, pieces)| one_row(gpu, x.value(), linear, pieces))
            .collect();
    }
    let (mut outputs, mut kept, mut wide) = (Vec::new(), Vec::new(), Vec::new());
    for (linear, pieces) in maps {
        let operands = linear.operands();
        if tape.is_recording() && is_wide(linear) && pieces.len() == 1 {
            wide.push((outputs.len(), *linear));
        }
        let mut input = operands.input_gpu(gpu, x.value(), 0);
        let way = Way::of(n_tok);
        let forward = |rows: &Range<usize>| {
            let mut y = Tensor::activation(device, &[n_tok, rows.len()]);
            let pass = operands.forward_gpu(gpu, rows.clone(), &input, all(&mut y), way);
            (y, pass)
        };
        let narrow = Narrow::of(gpu, pieces, n_tok);
        let passes = match &narrow {
            Some(narrow) => {
                let (y, pass) = forward(&(0..narrow.width));
                outputs.extend(narrow.take(gpu, &y));
                vec![pass]
            }
            None => {
                let (ys, passes): (Vec<Tensor>, Vec<GpuPass>) = pieces.iter().map(forward).unzip();
                outputs.extend(ys);
                passes
            }
        };
        kept.push((operands, passes, input.u.take(), narrow));
    }
    let inputs = maps.iter().flat_map(|(linear, _)| linear.inputs());
    let inputs: Vec<&Var> = std::iter::once(x).chain(inputs).collect();
    let again = |y: &mut Var, linear: &Linear| {
        let (operands, x, gpu) = (linear.operands(), x.kept(), gpu.clone());
        *y = y.clone().remade_by(move || {
            let input = operands.input_gpu(&gpu, &x.get(), 0);
            let rows = 0..operands.weight.dims2().0;
            let mut y = Tensor::activation(input.x.device(), &[n_tok, rows.len()]);
            operands.forward_gpu(&gpu, rows, &input, all(&mut y), Way::of(n_tok));
            y
        });
    };
    let (x_kept, wants_dx, gpu_back) = (x.kept(), x.needs_grad(), gpu.clone());
    let mut outputs = tape.record_adding("linear", &inputs, outputs, move |dys, so_far| {
        let (x, gpu) = (x_kept.get(), gpu_back);
        let can_add = |sum: &mut Tensor| sum.dtype() == x.dtype() && sum.is_unique();
        let (mut dx, mut beta, other) = match so_far.map(|mut sum| (can_add(&mut sum), sum)) {
            Some((true, sum)) => (Some(sum), 1.0, None),
            other => {
                let dx = wants_dx.then(|| Tensor::uninit_as(&x, x.shape()));
                (dx, 0.0, other.map(|(_, sum)| sum))
            }
        };
        let (mut list, mut dys) = (vec![None], dys.into_iter());
        for (operands, passes, u, narrow) in kept {
            let mut grads = operands.grads();
            let mut input = Input { x: x.clone(), dropped: None, u, first_row: 0 };
            operands.recall_gpu(&gpu, &mut input);
            let dys: Vec<Option<Tensor>> = match narrow {
                Some(narrow) => vec![narrow.put(&gpu, dys.by_ref(), x.dims2().0)],
                None => dys.by_ref().take(passes.len()).collect(),
            };
            for (pass, dy) in passes.iter().zip(dys) {
                if let Some(dy) = dy {
                    let dx = dx.as_mut().map(|dx| (all(dx), beta));
                    operands.backward_gpu(&gpu, &input, pass, &dy, dx, &mut grads);
                    beta = 1.0;
                }
            }
            list.extend(grads.into_list(&operands));
        }
        list[0] = match other {
            Some(other) => dx.map(|dx| add_into(other, &dx)),
            None => dx,
        };
        list
    });
    wide.into_iter().for_each(|(idx, linear)| again(&mut outputs[idx], linear));
    outputs
}

/// Whether its output is much wider than its input, and so cheaper to make again than to hold.
fn is_wide(linear: &Linear) -> bool {
    let (d_out, d_in) = linear.weight.value().dims2();
    16 * d_in <= d_out && linear.adapter.is_none()
}

/// `linear_grouped` there: experts are rows of x, y and dx.
pub(super) fn linear_grouped(
    tape: &Tape,
    gpu: &Gpu,
    x: &Var,
    runs: Vec<Range<usize>>,
    experts: &[Linear],
) -> Var {
    let (n_tok, d_out) = (x.value().dims2().0, experts.first().map_or(0, Linear::d_out));
    let mut y = Tensor::activation(x.value().device(), &[n_tok, d_out]);
    let operands: Vec<Operands> = experts.iter().map(Linear::operands).collect();
    let run = |(rows, operands): (&Range<usize>, &Operands)| -> Option<(Input, GpuPass)> {
        if rows.is_empty() {
            return None;
        }
        let mut input = operands.input_gpu(gpu, &x.value().rows(rows.clone()), 0);
        let out = Rows { tensor: &mut y, rows: rows.clone() };
        let pass = operands.forward_gpu(gpu, 0..d_out, &input, out, Way::of(n_tok));
        input.forget();
        Some((input, pass))
    };
    let kept: Vec<Option<(Input, GpuPass)>> = runs.iter().zip(&operands).map(run).collect();
    let inputs: Vec<&Var> =
        std::iter::once(x).chain(experts.iter().flat_map(Linear::inputs)).collect();
    let (x_value, wants_dx, gpu) = (x.value().clone(), x.needs_grad(), gpu.clone());
    tape.record("grouped linear", &inputs, y, move |dy| {
        let mut dx = wants_dx.then(|| Tensor::uninit_as(&x_value, x_value.shape()));
        let mut list = vec![None];
        for ((rows, operands), kept) in runs.iter().zip(&operands).zip(kept) {
            let mut grads = operands.grads();
            if let Some((mut input, pass)) = kept {
                operands.recall_gpu(&gpu, &mut input);
                let dx = dx.as_mut().map(|dx| (Rows { tensor: dx, rows: rows.clone() }, 0.0));
                let dy = dy.rows(rows.clone());
                operands.backward_gpu(&gpu, &input, &pass, &dy, dx, &mut grads);
            }
            list.extend(grads.into_list(operands));
        }
        list[0] = dx;
        list
    })
}

/// How a product with the weight is computed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::ops) enum Way {
    /// As it is stored, a row of it at a time.
    Few,
    /// In tiles, decoded.
    Many,
}

impl Way {
    /// For a call with this many tokens.
    pub(in crate::ops) fn of(n_tok: usize) -> Way {
        if n_tok <= N_FEW { Way::Few } else { Way::Many }
    }
}

/// All rows of a tensor.
pub(in crate::ops) fn all(tensor: &mut Tensor) -> Rows<'_> {
    let rows = 0..tensor.dims2().0;
    Rows { tensor, rows }
}

/// The same rows for a shorter time.
pub(super) fn again<'a>(out: &'a mut Rows) -> Rows<'a> {
    Rows { tensor: out.tensor, rows: out.rows.clone() }
}

/// Runs `kernel` over the numbers of `out`, in windows that fit into a binding: `launch` gets the
/// rows among those of `out`, and the bytes and the place of the first number in them.
pub(super) fn each_window(
    gpu: &Gpu,
    out: &mut Rows,
    mut launch: impl FnMut(&mut Tensor, Range<usize>, Range<usize>, usize),
) {
    let (_, d) = out.tensor.dims2();
    let row_bytes = out.tensor.dtype().n_bytes(d).expect("whole numbers");
    let size = row_bytes.checked_div(d).unwrap_or(4).max(1);
    let align = gpu.offset_align();
    let n = (gpu.binding_bytes_max() - align) / row_bytes.max(1);
    for start in out.rows.clone().step_by(n.max(1)) {
        let rows = start..out.rows.end.min(start.saturating_add(n.max(1)));
        let begin = rows.start * row_bytes;
        let lead = begin % align;
        let bytes = begin - lead..rows.end * row_bytes;
        let own = rows.start - out.rows.start..rows.end - out.rows.start;
        launch(out.tensor, own, bytes, lead / size);
    }
}

impl Dropout {
    /// `y = drop(x)`, or `y += drop(x)` with `ADDS`; the first row of x is `first_row` to the mask.
    pub(super) fn run_gpu(
        &self,
        gpu: &Gpu,
        first_row: usize,
        x: &Tensor,
        mut y: Rows,
        has: &[&'static str],
    ) {
        let (_, d) = x.dims2();
        let consts = consts(d, has);
        let (key, stream, dropped, factor) = self.mask();
        each_window(gpu, &mut y, |y, rows, bytes, lead| {
            let x = x.rows(rows.clone());
            let [low, high] = [|n: u64| Word(n as u32), |n: u64| Word((n >> 32) as u32)];
            let params = [
                low(key),
                high(key),
                low(stream),
                high(stream),
                rows.len().into(),
                (first_row + rows.start).into(),
                lead.into(),
                dropped.into(),
                factor.into(),
            ];
            let work = Work::each(rows.len() * d.div_ceil(128) * 16);
            let mut args = [Arg::In(&x), Arg::Window(y, bytes)];
            gpu.launch(&DROPOUT, work, &consts, &mut args, &params);
        });
    }
}

impl Operands {
    /// Prepares the left side. Rows of one batch differ in `first_row`: no two share a mask.
    pub(in crate::ops) fn input_gpu(&self, gpu: &Gpu, x: &Tensor, first_row: usize) -> Input {
        assert_eq!(x.dims2().1, self.weight.shape()[1], "linear: width of x");
        let mut input = Input { x: x.clone(), dropped: None, u: None, first_row };
        self.recall_gpu(gpu, &mut input);
        if let Some(AdapterValues { a, .. }) = &self.adapter {
            let mut u = Tensor::activation(x.device(), &[x.dims2().0, a.shape()[0]]);
            let a = in_format(gpu, a);
            gpu.product(&mut u, 0.0, 1.0, Side::Plain(input.seen()), Side::Transposed(&a));
            input.u = Some(u);
        }
        input
    }

    /// Makes again what was put away.
    fn recall_gpu(&self, gpu: &Gpu, input: &mut Input) {
        if let Some(AdapterValues { dropout: Some(dropout), .. }) = &self.adapter {
            let mut dropped = Tensor::uninit_as(&input.x, input.x.shape());
            dropout.run_gpu(gpu, input.first_row, &input.x, all(&mut dropped), &[]);
            input.dropped = Some(dropped);
        }
    }

    /// Columns `rows` of the result (rows of the weight).
    pub(in crate::ops) fn forward_gpu(
        &self,
        gpu: &Gpu,
        rows: Range<usize>,
        input: &Input,
        mut y: Rows,
        way: Way,
    ) -> GpuPass {
        let scaled = match &self.adapter {
            Some(adapter) if adapter.magnitude.is_some() => {
                Some(self.forward_scaled_gpu(gpu, adapter, rows.clone(), input, y))
            }
            _ => {
                let has_all =
                    way == Way::Many && self.product_bias_gpu(gpu, &rows, &input.x, &mut y);
                if !has_all {
                    let beta = self.put_bias_gpu(gpu, &rows, &mut y);
                    let (rows, y) = (rows.clone(), again(&mut y));
                    match way {
                        Way::Few => self.product_few(gpu, rows, &input.x, beta, y),
                        Way::Many => self.product_gpu(gpu, rows, &input.x, beta, y),
                    }
                }
                self.add_adapter_gpu(gpu, &rows, input, y);
                None
            }
        };
        GpuPass { rows, scaled }
    }

    /// `y = beta y + x @ w^T`.
    fn product_gpu(&self, gpu: &Gpu, rows: Range<usize>, x: &Tensor, beta: f32, y: Rows) {
        self.each_panel_gpu(gpu, rows.clone(), |panel, w| {
            let cols = panel.start - rows.start..panel.end - rows.start;
            let out = Block { tensor: y.tensor, rows: y.rows.clone(), cols };
            gpu.product(out, beta, 1.0, Side::Plain(x), Side::Transposed(w));
        });
    }

    /// The same for few tokens: the weight as it is stored, unless a shorter cast is at hand.
    fn product_few(&self, gpu: &Gpu, rows: Range<usize>, x: &Tensor, beta: f32, y: Rows) {
        let w = match self.weight.dtype() {
            DType::F32 => in_format(gpu, &self.weight).rows(rows),
            _ => self.weight.rows(rows),
        };
        gpu.few(y, beta, 1.0, x, &w);
    }

    /// `y += scale u @ b^T`.
    fn add_adapter_gpu(&self, gpu: &Gpu, rows: &Range<usize>, input: &Input, y: Rows) {
        if let (Some(adapter), Some(u)) = (&self.adapter, &input.u) {
            let b = in_format(gpu, &adapter.b).rows(rows.clone());
            gpu.product(y, 1.0, adapter.scale, Side::Plain(u), Side::Transposed(&b));
        }
    }

    /// `forward_gpu` where there are magnitudes.
    fn forward_scaled_gpu(
        &self,
        gpu: &Gpu,
        adapter: &AdapterValues,
        rows: Range<usize>,
        input: &Input,
        mut y: Rows,
    ) -> Scaled {
        let d_out = rows.len();
        let mut z = Tensor::uninit_as(y.tensor, &[input.n_tok(), d_out]);
        self.product_gpu(gpu, rows.clone(), input.seen(), 0.0, all(&mut z));
        self.add_adapter_gpu(gpu, &rows, input, all(&mut z));
        let (norms, factors) = self.norms_gpu(gpu, adapter, &rows);
        let mut beta = self.put_bias_gpu(gpu, &rows, &mut y);
        if let Some(dropped) = &input.dropped {
            let left = subtract(gpu, &input.x, dropped);
            self.product_gpu(gpu, rows, &left, beta, again(&mut y));
            beta = 1.0;
        }
        scale(gpu, &factors, &z, y, if beta == 0.0 { &[] } else { &["ADDS"] });
        let keeps = self.wants[self.at_adapter() + 2];
        Scaled { z: keeps.then_some(z), norms, factors }
    }

    /// Lengths of rows of the adapted weight, and the magnitudes over them.
    fn norms_gpu(
        &self,
        gpu: &Gpu,
        adapter: &AdapterValues,
        rows: &Range<usize>,
    ) -> (Tensor, Tensor) {
        let (m, norms_of) = adapter.magnitude.as_ref().expect("asked for by the caller");
        let AdapterValues { a, b, scale, .. } = adapter;
        let (device, rank) = (a.device(), a.shape()[0]);
        let (known, has, n): (&Tensor, &[&'static str], usize) = match norms_of {
            Norms::Followed(squares) => (squares, &[], rows.len()),
            Norms::Fixed(norms) => (norms, &["FIXED"], 1),
        };
        let (mut wa, mut baa) =
            (Tensor::uninit(device, &[n, rank]), Tensor::uninit(device, &[n, rank]));
        if let Norms::Followed(_) = norms_of {
            let cast = in_format(gpu, a);
            self.each_panel_gpu(gpu, rows.clone(), |panel, w| {
                let at = panel.start - rows.start..panel.end - rows.start;
                let out = Rows { tensor: &mut wa, rows: at };
                gpu.product(out, 0.0, 1.0, Side::Plain(w), Side::Transposed(&cast));
            });
            let mut aa = Tensor::uninit(device, &[rank, rank]);
            gpu.product(&mut aa, 0.0, 1.0, Side::Plain(&cast), Side::Transposed(&cast));
            let b = in_format(gpu, b).rows(rows.clone());
            gpu.product(&mut baa, 0.0, 1.0, Side::Plain(&b), Side::Plain(&aa));
        }
        let mut norms = Tensor::uninit(device, &[rows.len()]);
        let mut factors = Tensor::uninit(device, &[rows.len()]);
        let mut args = [
            Arg::In(known),
            Arg::In(m),
            Arg::In(b),
            Arg::In(&wa),
            Arg::In(&baa),
            Arg::Out(&mut norms),
            Arg::Out(&mut factors),
        ];
        let params = [rows.len().into(), rows.start.into(), (*scale).into()];
        let work = Work::each(rows.len());
        gpu.launch(&NORMS, work, &consts(rank, has), &mut args, &params);
        (norms, factors)
    }

    /// Inverts `forward_gpu`; `dx` is (where, factor of what is there).
    pub(in crate::ops) fn backward_gpu(
        &self,
        gpu: &Gpu,
        input: &Input,
        pass: &GpuPass,
        dy: &Tensor,
        mut dx: Option<(Rows, f32)>,
        grads: &mut Grads,
    ) {
        let rows = &pass.rows;
        self.backward_weight_gpu(gpu, input, rows, dy, grads);
        let e = pass.scaled.as_ref().map(|scaled| {
            let at = self.at_adapter() + 2;
            if let (Some(z), Some(dm)) = (&scaled.z, &mut grads.list[at]) {
                add_sums(gpu, dy, Some((z, &scaled.norms)), (dm, rows.start));
            }
            let mut e = Tensor::uninit_as(dy, dy.shape());
            scale(gpu, &scaled.factors, dy, all(&mut e), &[]);
            e
        });
        if let Some((dx, beta)) = &mut dx {
            // Without dropout the magnitudes scale all of the product.
            let left = if input.dropped.is_some() { dy } else { e.as_ref().unwrap_or(dy) };
            self.product_back_gpu(gpu, rows, left, *beta, again(dx));
        }
        let dx = dx.map(|(dx, _)| dx);
        self.backward_adapter_gpu(gpu, input, rows, (dy, e.as_ref()), dx, grads);
    }

    /// `dx = beta dx + dy @ w`.
    fn product_back_gpu(
        &self,
        gpu: &Gpu,
        rows: &Range<usize>,
        dy: &Tensor,
        mut beta: f32,
        mut dx: Rows,
    ) {
        self.each_panel_gpu(gpu, rows.clone(), |panel, w| {
            let dy = Side::Columns(dy, panel.start - rows.start, panel.len());
            gpu.product(again(&mut dx), beta, 1.0, dy, Side::Plain(w));
            beta = 1.0;
        });
    }

    /// The adapter's part of `backward_gpu`; `dy` comes with e, where that is another.
    fn backward_adapter_gpu(
        &self,
        gpu: &Gpu,
        input: &Input,
        rows: &Range<usize>,
        (dy, e): (&Tensor, Option<&Tensor>),
        dx: Option<Rows>,
        grads: &mut Grads,
    ) {
        let (Some(adapter), Some(u)) = (&self.adapter, &input.u) else { return };
        let AdapterValues { a, b, scale, .. } = adapter;
        let e_or_dy = e.unwrap_or(dy);
        let b = in_format(gpu, b).rows(rows.clone());
        let mut du = Tensor::uninit_as(u, u.shape());
        gpu.product(&mut du, 0.0, *scale, Side::Plain(e_or_dy), Side::Plain(&b));
        let at = self.at_adapter();
        if let Some(da) = &mut grads.list[at] {
            gpu.product(da, 1.0, 1.0, Side::Transposed(&du), Side::Plain(input.seen()));
        }
        if let Some(db) = &mut grads.list[at + 1] {
            let out = Rows { tensor: db, rows: rows.clone() };
            gpu.product(out, 1.0, *scale, Side::Transposed(e_or_dy), Side::Plain(u));
        }
        let Some(dx) = dx else { return };
        let a = in_format(gpu, a);
        let Some(dropout) = adapter.dropout else {
            return gpu.product(dx, 1.0, 1.0, Side::Plain(&du), Side::Plain(&a));
        };
        let mut seen = Tensor::uninit_as(&input.x, input.x.shape());
        gpu.product(&mut seen, 0.0, 1.0, Side::Plain(&du), Side::Plain(&a));
        if let Some(e) = e {
            let more = subtract(gpu, e, dy);
            self.product_back_gpu(gpu, rows, &more, 1.0, all(&mut seen));
        }
        dropout.run_gpu(gpu, input.first_row, &seen, dx, &["ADDS"]);
    }

    /// Calls `f` with runs of weight rows as products take them on the right: all at once if stored
    /// so, or if the cast of an f32 weight is kept.
    pub(super) fn each_panel_gpu(
        &self,
        gpu: &Gpu,
        rows: Range<usize>,
        mut f: impl FnMut(Range<usize>, &Tensor),
    ) {
        let (stored, dtype) = (self.weight.dtype(), gpu.activation_dtype());
        if stored == dtype || stored == DType::F32 {
            return f(rows.clone(), &in_format(gpu, &self.weight).rows(rows));
        }
        let dtype = if gpu.reads_right(stored) { stored } else { dtype };
        let row_bytes = 4 * self.weight.shape()[1];
        let max = PANEL_BYTES.min(gpu.binding_bytes_max() - gpu.offset_align());
        let n_rows = (max / row_bytes.max(1)).max(1);
        for start in rows.clone().step_by(n_rows) {
            let panel = start..rows.end.min(start + n_rows);
            f(panel.clone(), &gpu.decode_rows(&self.weight, panel, dtype));
        }
    }
}

/// `a - b`.
fn subtract(gpu: &Gpu, a: &Tensor, b: &Tensor) -> Tensor {
    let mut y = Tensor::uninit_as(a, a.shape());
    let d = a.dims2().1;
    each_window(gpu, &mut all(&mut y), |y, rows, bytes, lead| {
        let n = rows.len() * d;
        let (a, b) = (a.rows(rows.clone()), b.rows(rows));
        let mut args = [Arg::In(&a), Arg::In(&b), Arg::Window(y, bytes)];
        let params = [n.into(), lead.into()];
        gpu.launch(&SUBTRACT, Work::each(n), &consts(d, &[]), &mut args, &params);
    });
    y
}

/// `y = factor x`, or `y += factor x` with `ADDS`, with a factor for each column.
fn scale(gpu: &Gpu, factors: &Tensor, x: &Tensor, mut y: Rows, has: &[&'static str]) {
    let d = x.dims2().1;
    each_window(gpu, &mut y, |y, rows, bytes, lead| {
        let n = rows.len() * d;
        let x = x.rows(rows);
        let mut args = [Arg::In(factors), Arg::In(&x), Arg::Window(y, bytes)];
        gpu.launch(&SCALE, Work::each(n), &consts(d, has), &mut args, &[n.into(), lead.into()]);
    });
}
