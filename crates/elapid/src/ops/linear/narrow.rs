//! Maps with narrow outputs, and of a single row, on graphics processors.

use super::Linear;
use super::gpu::{BIAS, Way, all};
use crate::tape::Var;
use crate::tensor::Tensor;
use crate::tensor::gpu::{Arg, Gpu, Kernel, Work};
use std::ops::Range;

static TAKE: Kernel = Kernel { entry: "linear_take", wgsl: "", ..BIAS };
static PUT: Kernel = Kernel { entry: "linear_put", wgsl: "", ..BIAS };

/// A map with two or three narrow outputs, which CUDA computes as one: products with few columns
/// take as long as those with many.
pub(super) struct Narrow {
    widths: [usize; 3],
    pub width: usize,
}

/// Columns up to which a map is narrow.
const N_NARROW: usize = 256;

impl Narrow {
    pub fn of(gpu: &Gpu, pieces: &[Range<usize>], n_tok: usize) -> Option<Narrow> {
        let width = pieces.last()?.end;
        let can = gpu.as_cuda().is_some() && Way::of(n_tok) == Way::Many && width <= N_NARROW;
        let widths = match pieces {
            [a, b] => [a.len(), b.len(), 0],
            [a, b, c] => [a.len(), b.len(), c.len()],
            _ => return None,
        };
        let is_whole = widths.iter().sum::<usize>() == width;
        let has_all = pieces.iter().all(|piece| !piece.is_empty());
        (can && is_whole && has_all).then_some(Narrow { widths, width })
    }

    fn n_pieces(&self) -> usize {
        self.widths.iter().filter(|width| **width > 0).count()
    }

    /// Moves the numbers of `n_tok` rows.
    fn launch(&self, gpu: &Gpu, kernel: &'static Kernel, n_tok: usize, args: &mut [Arg]) {
        let [a, b, c] = self.widths;
        let wide = if self.widths.iter().all(|width| width.is_multiple_of(4)) { 4 } else { 1 };
        let consts = [("D", self.width), ("A", a), ("B", b), ("C", c), ("WIDE", wide)];
        let n = n_tok * self.width;
        gpu.launch(kernel, Work::each(n / wide), &consts, args, &[n.into()]);
    }

    /// The pieces of a result.
    pub fn take(&self, gpu: &Gpu, all: &Tensor) -> Vec<Tensor> {
        let n_tok = all.dims2().0;
        let piece = |width: usize| Tensor::uninit_as(all, &[n_tok, width.max(1)]);
        let [mut a, mut b, mut c] = self.widths.map(piece);
        let outs = [&mut a, &mut b, &mut c].map(Arg::Out);
        let mut args: Vec<Arg> = std::iter::once(Arg::In(all)).chain(outs).collect();
        self.launch(gpu, &TAKE, n_tok, &mut args);
        let mut list = vec![a, b, c];
        list.truncate(self.n_pieces());
        list
    }

    /// The gradient of the whole from those of its pieces, if there are any.
    pub fn put(
        &self,
        gpu: &Gpu,
        dys: impl Iterator<Item = Option<Tensor>>,
        n_tok: usize,
    ) -> Option<Tensor> {
        let mut dys: Vec<Option<Tensor>> = dys.take(self.n_pieces()).collect();
        dys.resize(3, None);
        let first = dys.iter().flatten().next()?;
        let mut all = Tensor::uninit_as(first, &[n_tok, self.width]);
        let zeros = |width: usize| Tensor::zeros(first.device(), &[n_tok, width.max(1)]);
        let pairs = dys.iter().zip(self.widths);
        let pieces: Vec<Tensor> =
            pairs.map(|(dy, width)| dy.clone().unwrap_or_else(|| zeros(width))).collect();
        let ins = pieces.iter().map(Arg::In);
        let mut args: Vec<Arg> = ins.chain([Arg::Out(&mut all)]).collect();
        self.launch(gpu, &PUT, n_tok, &mut args);
        Some(all)
    }
}

/// The map of a single row: parts of its result follow each other in memory.
pub(super) fn one_row(gpu: &Gpu, x: &Tensor, linear: &Linear, pieces: &[Range<usize>]) -> Vec<Var> {
    let (operands, d_out) = (linear.operands(), linear.d_out());
    let input = operands.input_gpu(gpu, x, 0);
    let mut y = Tensor::activation(x.device(), &[1, d_out]);
    operands.forward_gpu(gpu, 0..d_out, &input, all(&mut y), Way::Few);
    let column = y.reshape(&[d_out, 1]);
    let part = |rows: &Range<usize>| column.rows(rows.clone()).reshape(&[1, rows.len()]);
    pieces.iter().map(|rows| Var::constant(part(rows))).collect()
}
