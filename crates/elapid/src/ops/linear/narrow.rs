//! Maps with narrow outputs, on CUDA.

use super::columns::BIAS;
use super::operands::Way;
use crate::tensor::Tensor;
use crate::tensor::gpu::{Arg, Gpu, Kernel, Work};
use std::ops::Range;

static TAKE: Kernel = Kernel { entry: "linear_take", wgsl: "", ..BIAS };
static PUT: Kernel = Kernel { entry: "linear_put", wgsl: "", ..BIAS };

/// A map with two or three narrow outputs, which CUDA computes as one: products with few columns
/// take as long as those with many.
pub(super) struct Narrow {
    gpu: Gpu,
    widths: [usize; 3],
    pub width: usize,
}

/// Columns up to which a map is narrow.
const N_NARROW: usize = 256;

impl Narrow {
    /// Of a map of x, where it is worth it.
    pub fn of(x: &Tensor, pieces: &[Range<usize>]) -> Option<Narrow> {
        let (gpu, width) = (x.device().gpu()?, pieces.last()?.end);
        let is_many = Way::of(x.dims2().0) == Way::Many;
        let can = gpu.caps().tensor_cores && is_many && width <= N_NARROW;
        let widths = match pieces {
            [a, b] => [a.len(), b.len(), 0],
            [a, b, c] => [a.len(), b.len(), c.len()],
            _ => return None,
        };
        let is_whole = widths.iter().sum::<usize>() == width;
        let has_all = pieces.iter().all(|piece| !piece.is_empty());
        (can && is_whole && has_all).then(|| Narrow { gpu: gpu.clone(), widths, width })
    }

    /// Outputs that it has.
    pub fn n_pieces(&self) -> usize {
        self.widths.iter().filter(|width| **width > 0).count()
    }

    /// Moves the numbers of `n_tok` rows.
    fn launch(&self, kernel: &'static Kernel, n_tok: usize, args: &mut [Arg]) {
        let [a, b, c] = self.widths;
        let wide = if self.widths.iter().all(|width| width.is_multiple_of(4)) { 4 } else { 1 };
        let consts = [("D", self.width), ("A", a), ("B", b), ("C", c), ("WIDE", wide)];
        let n = n_tok * self.width;
        self.gpu.launch(kernel, Work::each(n / wide), &consts, args, &[n.into()]);
    }

    /// The pieces of a result.
    pub fn take(&self, all: &Tensor) -> Vec<Tensor> {
        let n_tok = all.dims2().0;
        let piece = |width: usize| Tensor::uninit_as(all, &[n_tok, width.max(1)]);
        let [mut a, mut b, mut c] = self.widths.map(piece);
        let outs = [&mut a, &mut b, &mut c].map(Arg::Out);
        let mut args: Vec<Arg> = std::iter::once(Arg::In(all)).chain(outs).collect();
        self.launch(&TAKE, n_tok, &mut args);
        let mut list = vec![a, b, c];
        list.truncate(self.n_pieces());
        list
    }

    /// The gradient of the whole from those of its pieces, if there are any.
    pub fn put(&self, dys: Vec<Option<Tensor>>) -> Option<Tensor> {
        let first = dys.iter().flatten().next()?;
        let n_tok = first.dims2().0;
        let mut all = Tensor::uninit_as(first, &[n_tok, self.width]);
        let zeros = |width: usize| Tensor::zeros(first.device(), &[n_tok, width.max(1)]);
        let pairs = dys.iter().chain(std::iter::repeat(&None)).zip(self.widths);
        let pieces: Vec<Tensor> =
            pairs.map(|(dy, width)| dy.clone().unwrap_or_else(|| zeros(width))).collect();
        let ins = pieces.iter().map(Arg::In);
        let mut args: Vec<Arg> = ins.chain([Arg::Out(&mut all)]).collect();
        self.launch(&PUT, n_tok, &mut args);
        Some(all)
    }
}
