//! Matrix products on a GPU: `out = alpha a @ b + beta out`.
//!
//! | name  | shape  |                                              |
//! |-------|--------|----------------------------------------------|
//! | `a`   | (m, k) | stored (k, m) where transposed               |
//! | `b`   | (k, n) | stored (n, k) where transposed               |
//! | `out` | (m, n) | rows and columns of a tensor that may have more |
//!
//! With `beta` zero `out` is not read. Sides in another dtype than the one products are computed in
//! are cast first: who multiplies with a weight again and again keeps the cast (`Tensor::derived`).
//!
//! wgpu: tiles in shared memory, f32; a right side in f16 is read as it is stored. CUDA: cuBLASLt,
//! which may do a little more on the way (`Epilogue`). It is many times slower where rows do not
//! begin at multiples of 16 bytes or a size is odd, as of a feed-forward of 5461: such matrices are
//! copied to larger ones and back; those of the head and between the maps of a feed-forward are
//! made larger at once (`filled`). What does not fit into a binding is split along its stored rows.
//!
//! Not here: products of few rows with a stored matrix, in `vector.rs`.

use super::{Arg, Gpu, Kernel, N_ROUNDS_MAX, Word, Work};
use crate::tensor::{DType, Derivation, Tensor};
use std::ops::Range;

static PRODUCT: Kernel = Kernel {
    entry: "product",
    wgsl: concat!(include_str!("product_f32.wgsl"), include_str!("product.wgsl")),
    cuda: "",
};

/// The right side in f16.
static PRODUCT_F16: Kernel =
    Kernel { entry: "product", wgsl: include_str!("product.wgsl"), cuda: "" };

/// Rows to rows of another length; CUDA alone.
static PITCH: Kernel = Kernel { entry: "pitch", wgsl: "", cuda: include_str!("pitch.cu") };

/// A matrix on the left or right of a product.
#[derive(Clone, Copy)]
pub enum Side<'a> {
    /// As it is stored.
    Plain(&'a Tensor),
    /// The other way round.
    Transposed(&'a Tensor),
    /// Some columns of it as it is stored: the first, and how many.
    Columns(&'a Tensor, usize, usize),
}

/// Rows of a tensor that a product writes.
pub struct Rows<'a> {
    pub tensor: &'a mut Tensor,
    pub rows: Range<usize>,
}

/// Rows and columns of a tensor that a product writes.
pub struct Block<'a> {
    pub tensor: &'a mut Tensor,
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

impl<'a> From<&'a mut Tensor> for Block<'a> {
    fn from(tensor: &'a mut Tensor) -> Block<'a> {
        let (n_rows, n_cols) = tensor.dims2();
        Block { tensor, rows: 0..n_rows, cols: 0..n_cols }
    }
}

impl<'a> From<Rows<'a>> for Block<'a> {
    fn from(Rows { tensor, rows }: Rows<'a>) -> Block<'a> {
        let cols = 0..tensor.dims2().1;
        Block { tensor, rows, cols }
    }
}

/// What a product does on the way, on CUDA alone: with numbers of a tensor from one on, which has
/// the dtype of the result.
pub enum Epilogue<'a> {
    /// Adds one to each column.
    Bias(&'a Tensor, usize),
    /// Writes the sums of the rows of the left side, one for each row: sums over what is stored as
    /// rows where it is transposed.
    Sums(&'a mut Tensor, usize),
}

/// A product as a backend computes it.
pub(super) struct Product<'a> {
    pub out: &'a mut Tensor,
    /// First number of the result in `out`, and how many lie between two rows.
    pub out_first: usize,
    pub out_stride: usize,
    pub a: Operand,
    pub b: Operand,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub alpha: f32,
    pub beta: f32,
}

/// A side as a backend reads it.
#[derive(Clone)]
pub(super) struct Operand {
    pub tensor: Tensor,
    /// First number of the side in the tensor, and how many lie between two stored rows.
    pub first: usize,
    pub stride: usize,
    pub is_transposed: bool,
}

impl<'a> Side<'a> {
    pub(in crate::tensor) fn tensor(&self) -> &'a Tensor {
        match self {
            Side::Plain(tensor) | Side::Transposed(tensor) | Side::Columns(tensor, ..) => tensor,
        }
    }

    /// As the product sees it.
    pub(in crate::tensor) fn dims(&self) -> (usize, usize) {
        let tensor = self.tensor();
        // A matrix without columns has rows all the same.
        let (rows, cols) = match tensor.shape() {
            [rows, cols] => (*rows, *cols),
            _ => tensor.dims2(),
        };
        match self {
            Side::Plain(_) => (rows, cols),
            Side::Transposed(_) => (cols, rows),
            Side::Columns(_, first, n) => {
                assert!(first + n <= cols, "product: columns {first} and {n} of {cols}");
                (rows, *n)
            }
        }
    }

    /// With the tensor in a format that the backend reads.
    fn operand(&self, tensor: Tensor) -> Operand {
        let first = match self {
            Side::Columns(_, first, _) => *first,
            Side::Plain(_) | Side::Transposed(_) => 0,
        };
        Operand {
            first,
            stride: tensor.dims2().1,
            is_transposed: matches!(self, Side::Transposed(_)),
            tensor,
        }
    }
}

/// The copy of a master.
pub(crate) const IN_BF16: Derivation = Derivation::Bf16;

/// A side in the format of products. Of a master in f32 the copy in bf16 is kept until it is
/// written: one cast a step.
pub(crate) fn in_format(gpu: &Gpu, tensor: &Tensor) -> Tensor {
    match (tensor.dtype(), gpu.activation_dtype()) {
        (DType::F32, DType::BF16) => tensor.derived(IN_BF16, |it| gpu.cast(it, DType::BF16)),
        (_, dtype) => gpu.cast(tensor, dtype),
    }
}

/// Rows and columns of a tile, or half of them.
const TILE: usize = 64;
/// Longest sum of one launch, in which every term is a round of a loop.
const DEPTH_MAX: usize = N_ROUNDS_MAX / 2;
/// Groups that keep a machine busy.
const N_GROUPS_BUSY: usize = 128;
/// What sizes are multiples of, and bytes that rows begin at multiples of, for cuBLASLt to be fast.
const EVEN: usize = 8;
const ALIGN: usize = 16;
/// Smaller sizes are not worth a copy.
const N_COPIED_MIN: usize = 64;
/// Rows that are copied at once.
const N_PITCH_ROWS: usize = 1 << 15;

/// Whether rows begin at multiples of `per` numbers.
fn is_even(first: usize, stride: usize, per: usize) -> bool {
    first.is_multiple_of(per) && stride.is_multiple_of(per)
}

impl Gpu {
    /// Whether products read a right side in this dtype as it is stored.
    pub fn reads_right(&self, dtype: DType) -> bool {
        dtype == self.activation_dtype() || (dtype == DType::F16 && self.as_cuda().is_none())
    }

    /// `out = alpha a @ b + beta out`.
    pub fn product<'a>(&self, out: impl Into<Block<'a>>, beta: f32, alpha: f32, a: Side, b: Side) {
        let Some(product) = self.described(out.into(), beta, alpha, a, b) else { return };
        match self.as_cuda() {
            Some(cuda) => _ = self.aligned(product, |it| cuda.product(self, it, None, 1)),
            None => self.split(product),
        }
    }

    /// The same for `n` matrices that lie behind each other in each tensor; false where the device
    /// does not take them at once, and then nothing is done.
    pub fn product_stacked(
        &self,
        n: usize,
        out: &mut Tensor,
        (beta, alpha): (f32, f32),
        a: Side,
        b: Side,
    ) -> bool {
        let Some(cuda) = self.as_cuda() else { return false };
        let [(a_rows, a_cols), (b_rows, b_cols), (rows, cols)] =
            [a.tensor(), b.tensor(), &*out].map(|it| (it.dims2().0 / n, it.dims2().1));
        let one = |side: &Side, rows, cols| match side {
            Side::Transposed(_) => (cols, rows),
            Side::Plain(_) | Side::Columns(..) => (rows, cols),
        };
        let ((m, k), (k_b, n_cols)) = (one(&a, a_rows, a_cols), one(&b, b_rows, b_cols));
        assert_eq!((k, m, n_cols), (k_b, rows, cols), "product of stacked matrices");
        if [a_cols, b_cols, cols, m, n_cols, k].iter().any(|size| !size.is_multiple_of(EVEN)) {
            return false;
        }
        let [a, b] = [&a, &b].map(|side| side.operand(in_format(self, side.tensor())));
        let (out_first, out_stride) = (0, cols);
        let product = Product { out, out_first, out_stride, a, b, m, n: n_cols, k, alpha, beta };
        cuda.product(self, product, None, n)
    }

    /// `out = a @ b` with an epilogue; false where the device has none, and then nothing is done.
    pub fn product_with(&self, epilogue: Epilogue, out: Block, a: Side, b: Side) -> bool {
        let Some(cuda) = self.as_cuda() else { return false };
        let product = self.described(out, 0.0, 1.0, a, b);
        product.is_some_and(|product| {
            // Of a size that is filled up an epilogue would read or write too much.
            let is_small = product.m.min(product.n).min(product.k) < N_COPIED_MIN;
            let n = if matches!(epilogue, Epilogue::Bias(..)) { product.n } else { product.m };
            (is_small || n.is_multiple_of(EVEN))
                && self.aligned(product, |it| cuda.product_with(self, it, epilogue))
        })
    }

    /// Computes a product whose sizes are multiples of 8 and whose rows begin at multiples of 16
    /// bytes: copies of sides are filled up with zeros, a copy of the result is cut. False where it
    /// was not computed.
    fn aligned(&self, product: Product, compute: impl FnOnce(Product) -> bool) -> bool {
        let Product { m, n, k, out_first, out_stride, .. } = product;
        let per = ALIGN / product.out.dtype().block().1;
        // What lies in rows: the other sizes may be odd.
        let (a_turned, b_turned) = (product.a.is_transposed, product.b.is_transposed);
        let even = |n: usize, in_rows: bool| if in_rows { n.next_multiple_of(EVEN) } else { n };
        let sizes = [even(m, a_turned), even(n, true), even(k, !a_turned || b_turned)];
        let rows_are_even = is_even(out_first, out_stride, per);
        let sides_are_even = product.a.is_even() && product.b.is_even();
        let is_even = sizes == [m, n, k] && rows_are_even && sides_are_even;
        let is_far = out_first.max(product.a.first).max(product.b.first) > u32::MAX as usize;
        if is_even || is_far || m.min(n).min(k) < N_COPIED_MIN {
            return compute(product);
        }
        let Product { out, a, b, alpha, beta, .. } = product;
        let [m_even, n_even, k_even] = sizes;
        let a = self.aligned_side(a, (m, k), (m_even, k_even));
        let b = self.aligned_side(b, (k, n), (k_even, n_even));
        if (m, n) == (m_even, n_even) && rows_are_even {
            let [m, n, k] = sizes;
            return compute(Product { out, out_first, out_stride, a, b, m, n, k, alpha, beta });
        }
        let mut even = Tensor::raw(out.device(), &[m_even, n_even], out.dtype());
        let [m_all, n_all, k] = sizes;
        let is_done = compute(Product {
            out: &mut even,
            out_first: 0,
            out_stride: n_even,
            a,
            b,
            m: m_all,
            n: n_all,
            k,
            alpha,
            beta: 0.0,
        });
        if is_done {
            self.pitch((&even, 0, n_even), (out, out_first, out_stride), [m, n, m, n], beta);
        }
        is_done
    }

    /// The size of a matrix with more rows, or else columns, for which products are fast; none
    /// where it is so already.
    pub fn even_size(&self, x: &Tensor, in_rows: bool) -> Option<[usize; 2]> {
        let (rows, cols) = x.dims2();
        let n = if in_rows { rows } else { cols };
        let is_plain = matches!(x.dtype(), DType::F32 | DType::BF16);
        let is_fast = !self.caps().tensor_cores || n.is_multiple_of(EVEN);
        let even = n.next_multiple_of(EVEN);
        (is_plain && !is_fast && n >= N_COPIED_MIN).then_some(if in_rows {
            [even, cols]
        } else {
            [rows, even]
        })
    }

    /// A matrix in the dtype of products, with zeros up to a size.
    pub fn filled(&self, x: &Tensor, [n_rows, n_cols]: [usize; 2]) -> Tensor {
        let (rows, cols) = x.dims2();
        let mut filled = Tensor::raw(x.device(), &[n_rows, n_cols], self.activation_dtype());
        self.pitch((x, 0, cols), (&mut filled, 0, n_cols), [n_rows, n_cols, rows, cols], 0.0);
        filled
    }

    /// The first columns of a matrix.
    pub fn first_columns(&self, x: &Tensor, n_cols: usize) -> Tensor {
        let (rows, cols) = x.dims2();
        let mut cut = Tensor::raw(x.device(), &[rows, n_cols], x.dtype());
        self.pitch((x, 0, cols), (&mut cut, 0, n_cols), [rows, n_cols, rows, n_cols], 0.0);
        cut
    }

    /// A side of (`rows`, `cols`) as one of `all`, with zeros in what is more.
    fn aligned_side(&self, side: Operand, size: (usize, usize), all: (usize, usize)) -> Operand {
        if size == all && side.is_even() {
            return side;
        }
        let turned = |(rows, cols)| if side.is_transposed { (cols, rows) } else { (rows, cols) };
        let ((rows, cols), (n_rows, n_cols)) = (turned(size), turned(all));
        let mut even = Tensor::raw(side.tensor.device(), &[n_rows, n_cols], side.tensor.dtype());
        let from = (&side.tensor, side.first, side.stride);
        self.pitch(from, (&mut even, 0, n_cols), [n_rows, n_cols, rows, cols], 0.0);
        Operand { tensor: even, first: 0, stride: n_cols, ..side }
    }

    /// `y = x + beta y` over `n_rows` by `n_cols` numbers, of which x has `rows` by `cols` and else
    /// zeros: tensor, first number, numbers from row to row.
    fn pitch(
        &self,
        (x, x_first, x_row): (&Tensor, usize, usize),
        (y, y_first, y_row): (&mut Tensor, usize, usize),
        [n_rows, n_cols, rows, cols]: [usize; 4],
        beta: f32,
    ) {
        let sizes = [n_rows, n_cols, rows, cols, x_first, x_row, y_first, y_row].map(Word::from);
        let params: Vec<Word> = sizes.into_iter().chain([beta.into()]).collect();
        let work = Work::grid([n_rows.min(N_PITCH_ROWS), n_cols.div_ceil(256), 1], 256);
        self.launch(&PITCH, work, &[], &mut [Arg::In(x), Arg::Out(y)], &params);
    }

    /// A product of whole tensors, unless it is empty.
    fn described<'a>(
        &self,
        Block { tensor, rows, cols }: Block<'a>,
        beta: f32,
        alpha: f32,
        a: Side,
        b: Side,
    ) -> Option<Product<'a>> {
        let ((m, k), (k_b, n)) = (a.dims(), b.dims());
        assert_eq!(k, k_b, "product: {:?} by {:?}", a.tensor().shape(), b.tensor().shape());
        assert_eq!((rows.len(), cols.len()), (m, n), "product: result");
        let (n_rows, stride) = tensor.dims2();
        assert!(rows.end <= n_rows && cols.end <= stride, "product: {rows:?}, {cols:?}");
        if m == 0 || n == 0 {
            return None;
        }
        // The right side is cast only if it must be.
        let right = match self.reads_right(b.tensor().dtype()) {
            true => b.tensor().clone(),
            false => in_format(self, b.tensor()),
        };
        Some(Product {
            out_first: rows.start * stride + cols.start,
            out_stride: stride,
            a: a.operand(in_format(self, a.tensor())),
            b: b.operand(right),
            out: tensor,
            m,
            n,
            k,
            alpha,
            beta,
        })
    }

    /// Halves a product until everything fits into a binding and a loop.
    fn split(&self, mut product: Product) {
        let too_long = product.too_long(self.binding_bytes_max() - 2 * self.offset_align());
        let too_deep = (product.k > DEPTH_MAX).then_some(Axis::K);
        let Some(axis) = too_long.or(too_deep) else {
            return self.launch_product(product);
        };
        let [m, n, k] = [(Axis::M, product.m), (Axis::N, product.n), (Axis::K, product.k)]
            .map(|(of, n)| if of == axis { n / 2 } else { n });
        self.split(Product {
            out: &mut *product.out,
            a: product.a.clone(),
            b: product.b.clone(),
            m,
            n,
            k,
            ..product
        });
        match axis {
            Axis::M => {
                product.a.first += m * product.a.row_step();
                product.out_first += m * product.out_stride;
                product.m -= m;
            }
            Axis::N => {
                product.b.first += n * product.b.col_step();
                product.out_first += n;
                product.n -= n;
            }
            Axis::K => {
                product.a.first += k * product.a.col_step();
                product.b.first += k * product.b.row_step();
                (product.k, product.beta) = (product.k - k, 1.0);
            }
        }
        self.split(product);
    }

    fn launch_product(&self, product: Product) {
        let Product { out, out_first, out_stride, a, b, m, n, k, alpha, beta } = product;
        let (a_tensor, a_first) = a.window(self, (m, k));
        let (b_tensor, b_first) = b.window(self, (k, n));
        let end = out_first + (m - 1) * out_stride + n;
        let lead = out_first * 4 % self.offset_align() / 4;
        let out_bytes = (out_first - lead) * 4..end * 4;
        let tile = tile_of(m, n);
        let consts = [
            ("BM", tile),
            ("A_TRANSPOSED", usize::from(a.is_transposed)),
            ("B_TRANSPOSED", usize::from(b.is_transposed)),
            ("A_WIDE", a.is_wide(a_first, if a.is_transposed { m } else { k })),
            ("B_WIDE", b.is_wide(b_first, if b.is_transposed { k } else { n })),
        ];
        let kernel = if b.tensor.dtype() == DType::F16 { &PRODUCT_F16 } else { &PRODUCT };
        let mut args = [
            Arg::In(&b_tensor),
            Arg::In(&a_tensor),
            Arg::In(&b_tensor),
            Arg::In(&a_tensor),
            Arg::Window(out, out_bytes),
        ];
        let sizes = [m, n, k, a_first, a.stride, b_first, b.stride, lead, out_stride];
        let params = sizes.into_iter().map(Word::from).chain([alpha.into(), beta.into()]);
        let params: Vec<Word> = params.collect();
        let work = Work::grid([n.div_ceil(tile), m.div_ceil(tile), 1], 256);
        self.launch(kernel, work, &consts, &mut args, &params);
    }
}

/// Rows and columns of a tile: more where there are groups enough to keep the machine busy.
fn tile_of(m: usize, n: usize) -> usize {
    let n_groups = m.div_ceil(2 * TILE) * n.div_ceil(2 * TILE);
    if m.min(n) > TILE && n_groups >= N_GROUPS_BUSY { 2 * TILE } else { TILE }
}

/// An axis of a product.
#[derive(Clone, Copy, PartialEq)]
enum Axis {
    M,
    N,
    K,
}

impl Product<'_> {
    /// The axis along which a matrix is to be cut, if one has more bytes than this.
    fn too_long(&self, bytes_max: usize) -> Option<Axis> {
        let a_axes = if self.a.is_transposed { (Axis::K, Axis::M) } else { (Axis::M, Axis::K) };
        let b_axes = if self.b.is_transposed { (Axis::N, Axis::K) } else { (Axis::K, Axis::N) };
        let out_axes = (Axis::M, Axis::N);
        let stored = [
            (a_axes, self.a.stride, self.a.size()),
            (b_axes, self.b.stride, self.b.size()),
            (out_axes, self.out_stride, 4),
        ];
        let size = |axis: Axis| match axis {
            Axis::M => self.m,
            Axis::N => self.n,
            Axis::K => self.k,
        };
        stored.into_iter().find_map(|((rows, cols), stride, bytes)| {
            let n_elem = size(rows).saturating_sub(1) * stride + size(cols);
            (bytes * n_elem > bytes_max).then_some(if size(rows) > 1 { rows } else { cols })
        })
    }
}

impl Operand {
    /// Whether its rows begin at multiples of 16 bytes.
    fn is_even(&self) -> bool {
        is_even(self.first, self.stride, ALIGN / self.size())
    }

    /// Bytes of a number.
    fn size(&self) -> usize {
        self.tensor.dtype().block().1
    }

    /// Numbers between two rows of the side, as the product sees it.
    fn row_step(&self) -> usize {
        if self.is_transposed { 1 } else { self.stride }
    }

    fn col_step(&self) -> usize {
        if self.is_transposed { self.stride } else { 1 }
    }

    /// One where four numbers along a stored row can be read at once: rows of `n` numbers, the
    /// first of them at `first`.
    fn is_wide(&self, first: usize, n: usize) -> usize {
        usize::from([first, n, self.stride].iter().all(|it| it.is_multiple_of(4)))
    }

    /// What of the tensor is read, and the first number of it there.
    fn window(&self, gpu: &Gpu, (n_rows, n_cols): (usize, usize)) -> (Tensor, usize) {
        let (n_rows, n_cols) = if self.is_transposed { (n_cols, n_rows) } else { (n_rows, n_cols) };
        let end = self.first + n_rows.saturating_sub(1) * self.stride + n_cols;
        let (bytes, align) = (self.first * self.size()..end * self.size(), gpu.offset_align());
        let (read, lead) = self.tensor.view(self.tensor.dtype(), bytes, align);
        (read, lead / self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, compare_devices, devices, small_bindings};
    use crate::tensor::device::Device;

    /// Compares with sums in f64, for all four ways to store the sides.
    fn check(device: &Device, tolerance: f32, [m, n, k]: [usize; 3]) {
        let (cpu, gpu) = (Device::cpu(1).unwrap(), device.gpu().unwrap());
        for (a_transposed, b_transposed) in
            [(false, true), (false, false), (true, false), (true, true)]
        {
            let a = Input::normal(1, &if a_transposed { [k, m] } else { [m, k] }, 1.0);
            let b = Input::normal(2, &if b_transposed { [n, k] } else { [k, n] }, 1.0);
            let (a_here, b_here) = (a.tensor(&cpu), b.tensor(&cpu));
            let (a_here, b_here) = (a_here.f32(), b_here.f32());
            let one = |row: usize, col: usize| -> f64 {
                let term = |at: usize| {
                    let a = a_here[if a_transposed { at * m + row } else { row * k + at }];
                    let b = b_here[if b_transposed { col * k + at } else { at * n + col }];
                    f64::from(a) * f64::from(b)
                };
                (0..k).map(term).sum()
            };
            let want: Vec<f32> =
                (0..m * n).map(|at| 0.5 * one(at / n, at % n) as f32 + 2.0).collect();
            let (a, b) = (a.tensor(device), b.tensor(device));
            let side = |tensor, is_transposed| match is_transposed {
                true => Side::Transposed(tensor),
                false => Side::Plain(tensor),
            };
            // The last rows of something larger, over ones.
            let mut out = Tensor::from_f32(device, &[m + 1, n], &vec![1.0; (m + 1) * n]);
            let rows = Rows { tensor: &mut out, rows: 1..m + 1 };
            gpu.product(rows, 2.0, 0.5, side(&a, a_transposed), side(&b, b_transposed));
            let got = out.to_vec();
            let what = format!("{device:?}, {m} {n} {k}, {a_transposed} {b_transposed}");
            compare_devices(&what, &want, &got[n..], tolerance);
            assert!(got[..n].iter().all(|&y| y == 1.0), "{what}");
            device.check().unwrap();
        }
    }

    #[test]
    fn tiles_of_both_sizes_on_and_off_their_edges() {
        for (device, tolerance) in devices() {
            // Small tiles, by fours and not; large tiles, by fours and not; nothing to sum.
            for size in [[64, 64, 16], [65, 66, 17], [68, 132, 36], [3, 5, 2], [67, 129, 71]] {
                check(device, *tolerance, size);
            }
            for size in [[1028, 1860, 8], [1027, 1859, 5], [1, 2, 70_001]] {
                check(device, *tolerance, size);
            }
        }
    }

    #[test]
    fn what_is_larger_than_a_binding_is_split() {
        let Some(device) = small_bindings() else { return };
        // 64 KiB: the left side, the right side, the result, everything.
        for size in [[300, 20, 70], [20, 300, 70], [200, 201, 3], [132, 133, 140], [3, 2, 20_000]] {
            check(device, 1e-4, size);
        }
    }
}
