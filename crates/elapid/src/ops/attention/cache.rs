//! The key-value cache of one sequence, in pages.
//!
//! A page holds the keys and values of `PAGE` tokens, a row of `n_kv_head * d_head` numbers each:
//! as f32, as f16, or in blocks of 8 bits as ggml's Q8_0. Full pages never change and are shared
//! between clones; the last page is copied when a clone that shares it grows. It begins small and
//! doubles, so that short sequences stay small.
//!
//! | bytes of a row of n numbers | f32 | f16 | q8_0      |
//! |-----------------------------|-----|-----|-----------|
//! |                             | 4 n | 2 n | 34 n / 32 |
//!
//! Arithmetic is in f32: what is stored otherwise is decoded into scratch where it is read. What
//! is larger than f16 can hold becomes the largest it can. A block of Q8_0 with a number that is
//! not finite has no meaning.
//!
//! On a GPU there are no pages, see `rows.rs`: keys and values are kept in what activations are
//! stored in, and are read as f32.

use super::gpu::New;
use super::rows::GpuRows;
use super::*;
use crate::error::{Error, Result};
use crate::tensor::DType;
use crate::tensor::cpu::Buffer;
use crate::tensor::quant::BlockType;
use half::slice::HalfFloatSliceExt;
use std::sync::Arc;

/// Tokens of a page.
pub const PAGE: usize = 128;

/// Rows of the smallest page.
const N_ROW_MIN: usize = 16;
/// Numbers of a block of Q8_0.
const N_BLOCK: usize = 32;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CacheType {
    /// IEEE single.
    #[default]
    F32,
    /// IEEE half: half the memory, three digits.
    F16,
    /// 8 bits with a scale for 32 numbers: about a quarter of the memory, two digits.
    Q8_0,
}

impl std::fmt::Display for CacheType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for CacheType {
    type Err = Error;

    fn from_str(name: &str) -> Result<CacheType> {
        CacheType::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| {
            let hint = format!("give one of {}", CacheType::ALL.map(CacheType::name).join(", "));
            Error::input(format!("there is no cache type {name:?}"), &hint)
        })
    }
}

impl CacheType {
    /// Every type.
    pub(crate) const ALL: [CacheType; 3] = [CacheType::F32, CacheType::F16, CacheType::Q8_0];

    /// As people write it: `q8_0`.
    pub(crate) fn name(self) -> &'static str {
        self.dtype().name()
    }

    fn dtype(self) -> DType {
        match self {
            CacheType::F32 => DType::F32,
            CacheType::F16 => DType::F16,
            CacheType::Q8_0 => DType::Block(BlockType::Q8_0),
        }
    }

    /// Bytes of `n_elem` numbers in whole blocks.
    fn n_bytes(self, n_elem: usize) -> usize {
        self.dtype().n_bytes(n_elem).expect("rows of whole blocks")
    }

    fn encode(self, x: &[f32], out: &mut [u8]) {
        if self != CacheType::F16 {
            return self.dtype().encode(x, out);
        }
        const RUN: usize = 64;
        let largest = half::f16::MAX.to_f32();
        let (mut held, mut halves) = ([0.0f32; RUN], [half::f16::ZERO; RUN]);
        for (x, out) in x.chunks(RUN).zip(out.chunks_mut(2 * RUN)) {
            // NaN stays NaN.
            held.iter_mut().zip(x).for_each(|(y, x)| *y = x.clamp(-largest, largest));
            halves[..x.len()].convert_from_f32_slice(&held[..x.len()]);
            out.copy_from_slice(bytemuck::cast_slice(&halves[..x.len()]));
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// What queries are compared with.
    Keys,
    /// What is summed up.
    Values,
}

/// Keys and values of up to `PAGE` tokens, by `Side`.
struct Page([Buffer; 2]);

impl Page {
    fn new(device: &Device, n_bytes: usize) -> Page {
        Page([(); 2].map(|()| device.expect_cpu().pool().take(n_bytes)))
    }

    fn n_bytes(&self) -> usize {
        self.0.iter().map(|side| side.bytes().len()).sum()
    }
}

/// Keys and values of one sequence so far; clones share full pages, and all until one of them
/// grows.
#[derive(Clone)]
pub struct KvCache {
    device: Device,
    kind: CacheType,
    /// Numbers of a row.
    width: usize,
    /// As many as `n_tok` tokens need, all but the last of them full; none on a GPU.
    pages: Vec<Arc<Page>>,
    /// What a GPU has instead.
    on_gpu: GpuRows,
    n_tok: usize,
}

impl KvCache {
    /// Nothing yet; to be kept in f32.
    #[cfg(test)]
    pub fn new(device: &Device, n_kv_head: usize, d_head: usize) -> KvCache {
        KvCache::with_type(device, n_kv_head, d_head, CacheType::F32)
            .expect("any row is kept in f32")
    }

    /// Nothing yet; to be kept as `kind`, if rows of this width can be.
    pub fn with_type(
        device: &Device,
        n_kv_head: usize,
        d_head: usize,
        kind: CacheType,
    ) -> Result<KvCache> {
        if kind != CacheType::F32 && device.gpu().is_some() {
            let problem = format!("the cache type {} is only supported on the CPU", kind.name());
            return Err(Error::input(problem, "leave out the cache type, or use the CPU"));
        }
        if kind == CacheType::Q8_0 && !(n_kv_head * d_head).is_multiple_of(N_BLOCK) {
            let problem = format!(
                "a key-value cache of type q8_0 stores {N_BLOCK} numbers at a time; {n_kv_head} \
                 heads of {d_head} make {}",
                n_kv_head * d_head
            );
            return Err(Error::input(problem, "use the cache type `f16` for this model"));
        }
        let (device, width) = (device.clone(), n_kv_head * d_head);
        Ok(KvCache { device, kind, width, pages: Vec::new(), on_gpu: GpuRows::default(), n_tok: 0 })
    }

    /// How it is stored.
    pub fn kind(&self) -> CacheType {
        self.kind
    }

    pub fn n_tok(&self) -> usize {
        self.n_tok
    }

    /// Its pages: a number that two pages have in common only if they are one, and the bytes.
    pub fn pages(&self) -> impl Iterator<Item = (usize, usize)> {
        let pages = self.pages.iter().map(|page| (Arc::as_ptr(page) as usize, page.n_bytes()));
        pages.chain(self.on_gpu.part())
    }

    /// Forgets all tokens but the first `n_tok`.
    pub fn truncate(&mut self, n_tok: usize) {
        assert!(n_tok <= self.n_tok, "cache: truncated to {n_tok} of {} tokens", self.n_tok);
        self.n_tok = n_tok;
        self.pages.truncate(n_tok.div_ceil(PAGE));
        if n_tok == 0 {
            self.on_gpu = GpuRows::default();
        }
    }

    /// Adds rows of keys and of values, on the CPU.
    pub fn append(&mut self, keys: &[f32], values: &[f32]) {
        assert!(keys.len() == values.len() && keys.len().is_multiple_of(self.width));
        let (kind, row) = (self.kind, self.row_bytes());
        let mut rows = 0..keys.len() / self.width;
        while !rows.is_empty() {
            let used = self.n_tok % PAGE;
            let n_row = rows.len().min(PAGE - used);
            let numbers = rows.start * self.width..(rows.start + n_row) * self.width;
            let page = self.open(used + n_row);
            let bytes = used * row..(used + n_row) * row;
            for (side, rows) in page.0.iter_mut().zip([keys, values]) {
                kind.encode(&rows[numbers.clone()], &mut side.bytes_mut()[bytes.clone()]);
            }
            self.n_tok += n_row;
            rows.start += n_row;
        }
    }

    /// Adds rows that are on the same GPU, and makes room for `n_ahead` more.
    pub(super) fn append_rows(&mut self, new: &New, n_ahead: usize) {
        let Device::Gpu(gpu) = &self.device else { panic!("rows of a GPU") };
        if !new.rows.is_empty() {
            self.on_gpu.append(gpu, new, self.n_tok, n_ahead);
            self.n_tok += new.rows.len();
        }
    }

    /// Whether recorded work may write the next token.
    pub(crate) fn can_step(&self) -> bool {
        self.on_gpu.can_step(self.n_tok)
    }

    /// Notes a token that recorded work has written.
    pub(crate) fn step_on(&mut self) {
        self.on_gpu.step_on(self.n_tok);
        self.n_tok += 1;
    }

    /// Where keys and values are on a GPU.
    pub(crate) fn places(&self) -> Option<[u64; 2]> {
        self.on_gpu.places()
    }

    /// All keys and values on a GPU.
    pub(super) fn on_gpu(&self) -> Option<[Tensor; 2]> {
        self.on_gpu.tensors(self.n_tok)
    }

    /// The keys or values of some tokens, decoded: (rows, n_kv_head * d_head).
    #[cfg(test)]
    pub fn read(&self, side: Side, rows: Range<usize>) -> Vec<f32> {
        if self.device.gpu().is_some() {
            return self.on_gpu.read(side, rows);
        }
        let mut out = Vec::with_capacity(rows.len() * self.width);
        let mut scratch = vec![0.0; PAGE * self.width];
        for run in runs(rows, PAGE) {
            let n = run.len() * self.width;
            out.extend_from_slice(&self.view(side, run, 0..self.width, &mut scratch).data[..n]);
        }
        out
    }

    fn row_bytes(&self) -> usize {
        self.kind.n_bytes(self.width)
    }

    /// The page of the next token: nobody else's, and with room for `n_row` rows.
    fn open(&mut self, n_row: usize) -> &mut Page {
        let (row, used) = (self.row_bytes(), self.n_tok % PAGE);
        let fresh =
            || Page::new(&self.device, n_row.next_power_of_two().clamp(N_ROW_MIN, PAGE) * row);
        if used == 0 {
            self.pages.push(Arc::new(fresh()));
        }
        let last = self.pages.last_mut().expect("a page for the next token");
        if Arc::get_mut(last).is_none_or(|page| page.0[0].bytes().len() < n_row * row) {
            let mut page = fresh();
            for (new, old) in page.0.iter_mut().zip(&last.0) {
                new.bytes_mut()[..used * row].copy_from_slice(&old.bytes()[..used * row]);
            }
            *last = Arc::new(page);
        }
        Arc::get_mut(last).expect("the page was just made or looked at")
    }

    /// Some rows of one page and some of their columns, as f32. What is not stored as f32 is
    /// decoded into `scratch`: as many rows of `scratch_width` numbers.
    pub(super) fn view<'a>(
        &'a self,
        side: Side,
        rows: Range<usize>,
        columns: Range<usize>,
        scratch: &'a mut [f32],
    ) -> View<'a> {
        let (page, first, n_row) = (&self.pages[rows.start / PAGE], rows.start % PAGE, rows.len());
        assert!(first + n_row <= PAGE, "cache: rows {rows:?} of one page");
        let bytes = page.0[side as usize].bytes();
        if self.kind == CacheType::F32 {
            let data: &[f32] = bytemuck::cast_slice(bytes);
            return View { data: &data[first * self.width + columns.start..], stride: self.width };
        }
        let block = if self.kind == CacheType::Q8_0 { N_BLOCK } else { 1 };
        let from = columns.start - columns.start % block;
        let stride = columns.end.next_multiple_of(block) - from;
        let (skip, run) = (self.kind.n_bytes(from), self.kind.n_bytes(stride));
        let row = self.row_bytes();
        for (row_idx, out) in scratch.chunks_exact_mut(stride).take(n_row).enumerate() {
            let at = (first + row_idx) * row + skip;
            self.decode(&bytes[at..at + run], out);
        }
        View { data: &scratch[columns.start - from..], stride }
    }

    fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        let cpu = self.device.expect_cpu();
        match self.kind {
            CacheType::F32 => panic!("cache: f32 is read where it lies"),
            CacheType::F16 => cpu.simd(DecodeHalves { bytes, out }),
            CacheType::Q8_0 => BlockType::Q8_0.decode(bytes, out),
        }
    }
}

/// Numbers of scratch that a row of `n_column` columns may take in `KvCache::view`.
pub(super) fn scratch_width(n_column: usize) -> usize {
    n_column.next_multiple_of(N_BLOCK) + N_BLOCK
}

/// Cuts rows at the multiples of `len`.
pub(super) fn runs(rows: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let idxs = rows.start / len..rows.end.div_ceil(len);
    idxs.map(move |idx| rows.start.max(idx * len)..rows.end.min((idx + 1) * len))
}

/// Rows of a cache as f32.
#[derive(Clone, Copy)]
pub(super) struct View<'a> {
    pub data: &'a [f32],
    /// Numbers from one row to the next.
    pub stride: usize,
}

/// f16 to f32 in whole vectors: the loop is plain, the compiler makes them.
struct DecodeHalves<'a> {
    bytes: &'a [u8],
    out: &'a mut [f32],
}

impl WithSimd for DecodeHalves<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        // Exponent and mantissa where an f32 has them are the number times 2^-112; the product
        // is exact, also for what is subnormal in f16.
        let up = f32::from_bits((127 + 112) << 23);
        for (y, x) in self.out.iter_mut().zip(self.bytes.as_chunks::<2>().0) {
            let x = u16::from_le_bytes(*x) as u32;
            let magnitude = (f32::from_bits((x & 0x7fff) << 13) * up).to_bits();
            let special = if x & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
            *y = f32::from_bits(magnitude | special | (x & 0x8000) << 16);
        }
    }
}
