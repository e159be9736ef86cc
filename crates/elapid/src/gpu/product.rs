//! Matrix products on a graphics processor: `out = alpha op(a) @ op(b) + beta out`.
//!
//! | name  | shape  |                                              |
//! |-------|--------|----------------------------------------------|
//! | `a`   | (m, k) | stored (k, m) where transposed               |
//! | `b`   | (k, n) | stored (n, k) where transposed               |
//! | `out` | (m, n) | rows of a tensor that may have more          |
//!
//! wgpu: tiles of 64 by 64 in shared memory, 4 by 4 numbers to a thread, f32. CUDA: cuBLASLt.

use super::{Arg, Gpu, Kernel, Work};
use crate::tensor::{DType, Tensor};
use std::ops::Range;

static PRODUCT: Kernel = Kernel { entry: "product", wgsl: include_str!("product.wgsl"), cuda: "" };

/// A matrix on the left or right of a product.
#[derive(Clone, Copy)]
pub enum Side<'a> {
    /// As it is stored.
    Plain(&'a Tensor),
    /// The other way round.
    Transposed(&'a Tensor),
}

impl Side<'_> {
    fn tensor(&self) -> &Tensor {
        match self {
            Side::Plain(tensor) | Side::Transposed(tensor) => tensor,
        }
    }

    /// As the product sees it.
    fn dims(&self) -> (usize, usize) {
        match self {
            Side::Plain(tensor) => tensor.dims2(),
            Side::Transposed(tensor) => {
                let (rows, cols) = tensor.dims2();
                (cols, rows)
            }
        }
    }

    fn is_transposed(&self) -> usize {
        usize::from(matches!(self, Side::Transposed(_)))
    }
}

/// Rows of a tensor that a product writes.
pub struct Rows<'a> {
    /// All of it.
    pub tensor: &'a mut Tensor,
    /// Its rows.
    pub rows: Range<usize>,
}

impl<'a> From<&'a mut Tensor> for Rows<'a> {
    fn from(tensor: &'a mut Tensor) -> Rows<'a> {
        let rows = 0..tensor.dims2().0;
        Rows { tensor, rows }
    }
}

/// Side of a tile.
const TILE: usize = 64;

impl Gpu {
    /// `out = alpha a @ b + beta out`.
    pub fn product<'a>(&self, out: impl Into<Rows<'a>>, beta: f32, alpha: f32, a: Side, b: Side) {
        let out = out.into();
        let ((m, k), (k_b, n)) = (a.dims(), b.dims());
        assert_eq!(k, k_b, "product: {:?} by {:?}", a.tensor(), b.tensor());
        assert_eq!((out.rows.len(), out.tensor.dims2().1), (m, n), "product: result");
        if m == 0 || n == 0 {
            return;
        }
        let first = out.rows.start;
        assert_eq!(a.tensor().dtype(), DType::F32, "product: a");
        assert_eq!(b.tensor().dtype(), DType::F32, "product: b");
        let consts = [("A_TRANSPOSED", a.is_transposed()), ("B_TRANSPOSED", b.is_transposed())];
        let work = Work::grid([n.div_ceil(TILE), m.div_ceil(TILE), 1], 256);
        let mut args = [Arg::In(a.tensor()), Arg::In(b.tensor()), Arg::Out(out.tensor)];
        let sizes = [m.into(), n.into(), k.into(), first.into(), alpha.into(), beta.into()];
        self.launch(&PRODUCT, work, &consts, &mut args, &sizes);
    }
}
