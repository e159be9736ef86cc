//! Biases and their gradients on a graphics processor.
//!
//! On CUDA the product that makes y adds the bias, in f32 before it rounds, and the product that
//! makes dw sums dy; kernels do it elsewhere, for few tokens and under magnitudes.

use super::N_ROWS;
use super::gpu::{BIAS, again, consts, each_window};
use super::operands::{Grads, Input, Operands};
use crate::tensor::Tensor;
use crate::tensor::gpu::product::{Block, Epilogue, Rows, Side, in_format};
use crate::tensor::gpu::{Arg, Gpu, Kernel, Work};
use std::ops::Range;

static SUM: Kernel = Kernel { entry: "linear_sum", ..BIAS };
static SUM_INTO: Kernel = Kernel { entry: "linear_sum_into", ..BIAS };

impl Operands {
    /// `y = bias` in each row; returns what of y counts.
    pub(super) fn put_bias_gpu(&self, gpu: &Gpu, rows: &Range<usize>, y: &mut Rows) -> f32 {
        let Some(bias) = &self.bias else { return 0.0 };
        let d = rows.len();
        each_window(gpu, y, |y, window, bytes, lead| {
            let n = window.len() * d;
            let mut args = [Arg::In(bias), Arg::Window(y, bytes)];
            let params = [n.into(), rows.start.into(), lead.into()];
            gpu.launch(&BIAS, Work::each(n), &consts(d, &[]), &mut args, &params);
        });
        1.0
    }

    /// `y = x @ w^T + bias` by products that add it, where CUDA has them; returns whether it has.
    pub(super) fn product_bias_gpu(
        &self,
        gpu: &Gpu,
        rows: &Range<usize>,
        x: &Tensor,
        y: &mut Rows,
    ) -> bool {
        let (Some(bias), Some(_)) = (&self.bias, gpu.as_cuda()) else { return false };
        let is_same = bias.dtype() == y.tensor.dtype();
        let bias = if is_same { bias.clone() } else { in_format(gpu, bias) };
        let mut has_all = true;
        self.each_panel_gpu(gpu, rows.clone(), |panel, w| {
            let cols = panel.start - rows.start..panel.end - rows.start;
            let out = Block { tensor: y.tensor, rows: y.rows.clone(), cols };
            let epilogue = Epilogue::Bias(&bias, panel.start);
            let (x, w) = (Side::Plain(x), Side::Transposed(w));
            has_all = has_all && gpu.product_with(epilogue, out, 0.0, x, w);
        });
        has_all
    }

    /// The gradients of some rows of the weight and of the bias, where they are wanted.
    pub(super) fn backward_weight_gpu(
        &self,
        gpu: &Gpu,
        input: &Input,
        rows: &Range<usize>,
        dy: &Tensor,
        grads: &mut Grads,
    ) {
        let (dw, others) = grads.list.split_first_mut().expect("the weight's");
        let mut dbias = self.bias.as_ref().and_then(|_| others[0].as_mut());
        if let Some(dw) = dw {
            let beta = if grads.written.contains(rows) { 1.0 } else { 0.0 };
            let mut out = Rows { tensor: dw, rows: rows.clone() };
            let sides = (Side::Transposed(dy), Side::Plain(&input.x));
            // The product writes the sums, so that nothing may be there, and it sums what it reads.
            let can_sum = beta == 0.0 && dy.dtype() == gpu.activation_dtype();
            let has_sums = can_sum
                && dbias.as_mut().is_some_and(|dbias| {
                    let epilogue = Epilogue::Sums(dbias, rows.start);
                    gpu.product_with(epilogue, again(&mut out), beta, sides.0, sides.1)
                });
            match has_sums {
                true => dbias = None,
                false => gpu.product(out, beta, 1.0, sides.0, sides.1),
            }
            grads.written.push(rows.clone());
        }
        if let Some(dbias) = dbias {
            add_sums(gpu, dy, None, (dbias, rows.start));
        }
    }
}

/// Adds the sums over the rows of dy to `out` from a number on; with z and norms the sums of dy z,
/// divided by the norms. Per piece of rows, then over the pieces in order.
pub(super) fn add_sums(
    gpu: &Gpu,
    dy: &Tensor,
    scaled: Option<(&Tensor, &Tensor)>,
    (out, first): (&mut Tensor, usize),
) {
    let (n_rows, d) = dy.dims2();
    let has: &[&'static str] = if scaled.is_some() { &["HAS_Z", "HAS_NORMS"] } else { &[] };
    let consts = consts(d, has);
    for rows in gpu.windows(n_rows, 4 * d) {
        let part = dy.rows(rows.clone());
        let z = scaled.map_or_else(|| part.clone(), |(z, _)| z.rows(rows.clone()));
        let n_parts = rows.len().div_ceil(N_ROWS);
        let mut parts = Tensor::uninit(dy.device(), &[n_parts, d]);
        let work = Work::grid([d.div_ceil(256), n_parts, 1], 256);
        let mut args = [Arg::In(&part), Arg::In(&z), Arg::Out(&mut parts)];
        gpu.launch(&SUM, work, &consts, &mut args, &[rows.len().into()]);
        let norms = scaled.map_or(&parts, |(_, norms)| norms);
        let mut args = [Arg::In(&parts), Arg::In(norms), Arg::Out(out)];
        let work = Work::groups(d.div_ceil(256), 256);
        gpu.launch(&SUM_INTO, work, &consts, &mut args, &[n_parts.into(), first.into()]);
    }
}
