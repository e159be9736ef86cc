//! Causal attention with grouped heads, a sliding window, documents and a key-value cache.
//!
//! For query i and key j of one sequence, head by head, and only where `i - window < j <= i`:
//!
//! ```text
//! s[i,j] = scale q[i] . k[j]      p[i,j] = exp(s[i,j] - l[i])      l[i] = ln sum_j exp s[i,j]
//! y[i]   = sum_j p[i,j] v[j]
//! ```
//!
//! Query head h reads key-value head `h / (n_head / n_kv_head)`. The score matrix never exists:
//! keys come in blocks, and a running maximum and sum correct what was added so far. Inside, s and
//! l are kept times log2(e), so that exp is a power of two, which is cheaper.
//!
//! Backward keeps q, k, v, y and l, and recomputes p block by block:
//!
//! ```text
//! e[i]    = dy[i] . y[i]                 ds[i,j] = p[i,j] (dy[i] . v[j] - e[i])
//! dv[j]   = sum_i p[i,j] dy[i]
//! dq[i]   = scale sum_j ds[i,j] k[j]     dk[j] = scale sum_i ds[i,j] q[i]
//! ```
//!
//! | name      | shape                       |                                               |
//! |-----------|-----------------------------|-----------------------------------------------|
//! | `q`, `y`  | (n_tok, n_head * d_head)    |                                               |
//! | `k`, `v`  | (n_tok, n_kv_head * d_head) |                                               |
//! | `s`, `p`  | (n_key, n_query), one block | a row per key: lanes are queries, which makes |
//! |           |                             | maximum, sum and mask free of lane shuffles   |
//! | `log_sum` | (n_tok, n_head)             | l, in the order of the blocks (see `Block`)   |
//!
//! With caches (generation) one sequence's keys and values so far stand before the new ones, in
//! pages: a block of keys is one run of rows without a cache, and cut where pages end with one. A
//! sequence with few new tokens takes another way, `step`, which is bound by reading the cache:
//! dot products and no matrix products, pages side by side, partial softmaxes merged in the order
//! of the keys.
//!
//! GPUs have kernels of their own, see `gpu.rs`; the mathematics is the same.
//!
//! Not here: projections, rotary embedding, norms of q and k.

mod backward;
mod cache;
mod gpu;
mod rows;
mod step;
#[cfg(test)]
mod tests;

use super::{columns, split};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::cpu::{Cpu, Dot, F32s, Mat, MatMut, Scope};
use crate::tensor::device::Device;
use crate::tensor::segment::{Segment, Segments};
use pulp::{Simd, WithSimd};
use std::f32::consts::LOG2_E;
use std::ops::Range;

use backward::{Saved, backward};
pub use cache::{CacheType, KvCache, PAGE, Side};
use cache::{runs, scratch_width};
use step::step;

/// The sizes of an attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    pub n_head: usize,
    /// Key-value heads; divides `n_head`.
    pub n_kv_head: usize,
    /// Width of a head.
    pub d_head: usize,
    /// What scores are multiplied with, usually `1 / sqrt(d_head)`.
    pub scale: f32,
    /// Keys a query sees, itself included; all before it when absent.
    pub window: Option<usize>,
}

/// Queries of one block: a cache line of scores or two per key.
const N_QUERY: usize = 32;
/// Keys of one block: its scores stay in the first or second level of cache.
const N_KEY: usize = 256;
/// In backward a long sequence is cut into at most this many chunks of keys, side by side.
const N_CHUNK_MAX: usize = 8;
/// Sequences with at most this many new tokens take the way of `step`.
const N_STEP_MAX: usize = 4;
/// Keys, then values, that `step` takes up at a time: their rows stay in the first level of cache.
const N_ROW: usize = 16;
/// Keys of a reading of `step`, what its tasks are made of.
const N_READ: usize = 32;
/// Numbers of keys that a task of `step` reads, about: enough to hide its start.
const STEP_PIECE: usize = 1 << 12;
/// Below every score, and finite, so that differences to it are numbers.
const SCORE_MIN: f32 = -1e30;

impl Attention {
    /// Query heads of one key-value head.
    fn n_group(&self) -> usize {
        self.n_head / self.n_kv_head
    }

    /// Numbers in a row of queries.
    fn q_width(&self) -> usize {
        self.n_head * self.d_head
    }

    /// Numbers in a row of keys or values.
    fn kv_width(&self) -> usize {
        self.n_kv_head * self.d_head
    }

    /// The keys that some query of `positions` sees.
    fn seen(&self, positions: &Range<usize>) -> Range<usize> {
        let first = self.window.map_or(0, |window| (positions.start + 1).saturating_sub(window));
        first..positions.end
    }
}

/// Attention of every token to the tokens before it in its segment, and in its cache if given.
///
/// With `caches`, one per segment, `k` and `v` are appended to them; gradients then are not.
pub fn attention(
    tape: &Tape,
    q: &Var,
    k: &Var,
    v: &Var,
    config: &Attention,
    segments: &Segments,
    caches: Option<&mut [&mut KvCache]>,
) -> Var {
    let (n_head, n_kv_head) = (config.n_head, config.n_kv_head);
    assert!(n_head.is_multiple_of(n_kv_head), "attention: {n_head} heads, {n_kv_head} for keys");
    assert!(config.window != Some(0), "attention: a window of 0 keys");
    let n_tok = segments.n_tok();
    q.value().expect_shape("attention: q", &[n_tok, config.q_width()]);
    k.value().expect_shape("attention: k", &[n_tok, config.kv_width()]);
    v.value().expect_shape("attention: v", &[n_tok, config.kv_width()]);
    if let Some(caches) = caches {
        assert_eq!(caches.len(), segments.len(), "attention: caches and segments");
        assert!(![q, k, v].iter().any(|x| x.needs_grad()), "attention: gradients with a cache");
        let values = [q, k, v].map(Var::value);
        return Var::constant(match q.value().device() {
            Device::Cpu(_) => forward_cached(values, config, segments, caches),
            Device::Gpu(gpu) => gpu::forward_cached(gpu, values, config, segments, caches),
        });
    }
    let [q_value, k_value, v_value] = [q, k, v].map(|x| x.value().clone());
    let (y, log_sum) = match q_value.device() {
        Device::Cpu(_) => forward(&q_value, config, &sequences(&k_value, &v_value, segments)),
        Device::Gpu(gpu) => gpu::forward(gpu, [&q_value, &k_value, &v_value], config, segments),
    };
    let saved = Saved { q: q_value, k: k_value, v: v_value, y: y.clone(), log_sum };
    let (config, segments) = (config.clone(), segments.clone());
    let wanted = [q, k, v].map(Var::needs_grad);
    tape.record("attention", &[q, k, v], y, move |dy| {
        backward(&saved, &config, &segments, (&dy, wanted)).into()
    })
}

/// One sequence: the rows of its new tokens, and all its keys and values up to the last of them.
#[derive(Clone, Copy)]
struct Sequence<'a> {
    segment: Segment,
    rows: Rows<'a>,
    /// Tokens before the first new one.
    n_past: usize,
}

/// Where keys and values are.
#[derive(Clone, Copy)]
enum Rows<'a> {
    /// By `Side`, one row after the other: (n_tok, n_kv_head * d_head) each.
    Flat([&'a [f32]; 2]),
    /// In the pages of a cache.
    Pages(&'a KvCache),
}

impl<'a> Sequence<'a> {
    /// Cuts a block of keys into runs of rows that lie together.
    fn runs(&self, keys: &Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let len = match self.rows {
            Rows::Flat(_) => usize::MAX,
            Rows::Pages(_) => PAGE,
        };
        runs(keys.clone(), len)
    }

    /// Numbers of scratch that `kv_rows` needs for rows of one head.
    fn n_scratch(&self, d_head: usize) -> usize {
        match self.rows {
            Rows::Pages(cache) if cache.kind() != CacheType::F32 => PAGE * scratch_width(d_head),
            _ => 0,
        }
    }
}

/// Without caches the keys of a sequence are those of its own rows.
fn sequences<'a>(k: &'a Tensor, v: &'a Tensor, segments: &Segments) -> Vec<Sequence<'a>> {
    let width = k.shape()[1];
    let sequence = |&segment: &Segment| {
        let rows = segment.start * width..(segment.start + segment.n_tok) * width;
        let rows = Rows::Flat([k, v].map(|side| &side.f32()[rows.clone()]));
        Sequence { segment, rows, n_past: 0 }
    };
    segments.iter().map(sequence).collect()
}

fn forward(q: &Tensor, config: &Attention, sequences: &[Sequence]) -> (Tensor, Tensor) {
    let mut y = Tensor::uninit(q.device(), q.shape());
    let mut log_sum = Tensor::uninit(q.device(), &[q.shape()[0], config.n_head]);
    let (mut ys, mut log_sums) = (y.f32_mut(), log_sum.f32_mut());
    let parts =
        sequences.iter().map(|&sequence| Part::cut(config, sequence, &mut ys, &mut log_sums));
    forward_blocks(q, config, parts.collect());
    (y, log_sum)
}

/// `forward` after the new keys and values have gone to the caches.
fn forward_cached(
    [q, k, v]: [&Tensor; 3],
    config: &Attention,
    segments: &Segments,
    caches: &mut [&mut KvCache],
) -> Tensor {
    let width = config.kv_width();
    let mut y = Tensor::uninit(q.device(), q.shape());
    let mut log_sum = Tensor::uninit(q.device(), &[q.shape()[0], config.n_head]);
    let (mut ys, mut log_sums) = (y.f32_mut(), log_sum.f32_mut());
    let (mut few, mut many) = (Vec::new(), Vec::new());
    for (&segment, cache) in segments.iter().zip(caches) {
        let n_past = cache.n_tok();
        let rows = segment.start * width..(segment.start + segment.n_tok) * width;
        cache.append(&k.f32()[rows.clone()], &v.f32()[rows]);
        let cache: &KvCache = cache;
        if segment.n_tok <= N_STEP_MAX {
            let y = ys.split_off_mut(..segment.n_tok * config.q_width()).expect("rows of y");
            few.push((segment, cache, n_past, y));
        } else {
            let sequence = Sequence { segment, rows: Rows::Pages(cache), n_past };
            many.push(Part::cut(config, sequence, &mut ys, &mut log_sums));
        }
    }
    forward_blocks(q, config, many);
    step(q, config, few);
    y
}

/// What one sequence gives: its rows of `y` and of `log_sum`.
struct Part<'a> {
    sequence: Sequence<'a>,
    y: &'a mut [f32],
    log_sum: &'a mut [f32],
}

impl<'a> Part<'a> {
    /// Takes the rows of a sequence from the front of what is left.
    fn cut(
        config: &Attention,
        sequence: Sequence<'a>,
        y: &mut &'a mut [f32],
        log_sum: &mut &'a mut [f32],
    ) -> Part<'a> {
        let n_tok = sequence.segment.n_tok;
        let y = y.split_off_mut(..n_tok * config.q_width()).expect("rows of y");
        let log_sum = log_sum.split_off_mut(..n_tok * config.n_head).expect("sums");
        Part { sequence, y, log_sum }
    }
}

/// The tokens of one block of queries, and one head of them.
#[derive(Clone, Copy)]
struct Queries<'a> {
    config: &'a Attention,
    sequence: Sequence<'a>,
    /// Its first token within the segment.
    first: usize,
    n_query: usize,
    head: usize,
}

impl<'a> Queries<'a> {
    /// Where they begin in a tensor of `n_head * d_head` columns.
    fn at(&self) -> usize {
        let row = self.sequence.segment.start + self.first;
        row * self.config.q_width() + self.head * self.config.d_head
    }

    /// Their rows of a tensor like `q`.
    fn rows<'b>(&self, x: &'b Tensor) -> Mat<'b> {
        let Attention { d_head, .. } = *self.config;
        Mat::strided(&x.f32()[self.at()..], self.n_query, d_head, self.config.q_width())
    }

    /// Their place in the sequence.
    fn positions(&self) -> Range<usize> {
        let start = self.sequence.n_past + self.first;
        start..start + self.n_query
    }

    /// A run of rows in keys or values, for the head they look at; `scratch` as `n_scratch` says.
    fn kv_rows<'b>(&self, side: Side, run: &Range<usize>, scratch: &'b mut [f32]) -> Mat<'b>
    where
        'a: 'b,
    {
        let Attention { d_head, .. } = *self.config;
        let width = self.config.kv_width();
        let first = self.head / self.config.n_group() * d_head;
        let (data, stride) = match self.sequence.rows {
            Rows::Flat(sides) => (&sides[side as usize][run.start * width + first..], width),
            Rows::Pages(cache) => {
                let view = cache.view(side, run.clone(), first..first + d_head, scratch);
                (view.data, view.stride)
            }
        };
        Mat::strided(data, run.len(), d_head, stride)
    }

    /// Scores times log2(e), a row of `N_QUERY` for each key; minus infinity where a query may not
    /// look.
    fn scores(
        &self,
        cpu: &Cpu,
        q: Mat,
        keys: &Range<usize>,
        (scores, scratch): (&mut [f32], &mut [f32]),
    ) {
        let row = |key: usize| (key - keys.start) * N_QUERY..(key - keys.start + 1) * N_QUERY;
        for run in self.sequence.runs(keys) {
            let k = self.kv_rows(Side::Keys, &run, scratch);
            let out = &mut scores[row(run.start).start..];
            let out = MatMut::strided(out, run.len(), self.n_query, N_QUERY);
            cpu.gemm(out, 0.0, self.config.scale * LOG2_E, k, q.t(), Scope::Thread);
        }
        let positions = self.positions();
        for key in keys.start.max(positions.start + 1)..keys.end {
            scores[row(key)][..key - positions.start].fill(f32::NEG_INFINITY);
        }
        if let Some(window) = self.config.window {
            for key in keys.start..keys.end.min(positions.end.saturating_sub(window)) {
                let gone = (key + window).saturating_sub(positions.start);
                scores[row(key)][gone..].fill(f32::NEG_INFINITY);
            }
        }
    }
}

fn key_blocks(keys: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = keys.end;
    keys.step_by(N_KEY).map(move |start| start..end.min(start + N_KEY))
}

/// What one task of forward writes: a block of tokens, the heads that share a key-value head.
struct Block<'a> {
    /// With the first of the heads.
    queries: Queries<'a>,
    /// One run of `n_group * d_head` for each token.
    y: Vec<&'a mut [f32]>,
    /// (n_group, n_query); the whole `log_sum` lies in the order of the tasks.
    log_sum: &'a mut [f32],
}

fn forward_blocks(q: &Tensor, config: &Attention, parts: Vec<Part>) {
    let cpu = q.device().expect_cpu();
    let n_group = config.n_group();
    let mut blocks = Vec::new();
    for part in parts {
        let ys = part.y.chunks_mut(N_QUERY * config.q_width());
        let log_sums = part.log_sum.chunks_mut(N_QUERY * config.n_head);
        for (idx, (y, log_sum)) in ys.zip(log_sums).enumerate() {
            let n_query = log_sum.len() / config.n_head;
            let log_sums = log_sum.chunks_mut(n_group * n_query);
            for (kv_head, (y, log_sum)) in
                by_kv_head(config, y, config.q_width()).into_iter().zip(log_sums).enumerate()
            {
                let (first, head) = (idx * N_QUERY, kv_head * n_group);
                let queries = Queries { config, sequence: part.sequence, first, n_query, head };
                blocks.push(Block { queries, y, log_sum });
            }
        }
    }
    cpu.map(blocks, |block| forward_block(q, block));
}

/// Cuts rows of `width` numbers into the runs of each key-value head.
fn by_kv_head<'a>(
    config: &Attention,
    rows: &'a mut [f32],
    width: usize,
) -> Vec<Vec<&'a mut [f32]>> {
    columns(rows, (width, width), width / config.n_kv_head)
}

fn forward_block(q: &Tensor, mut block: Block) {
    let cpu = q.device().expect_cpu();
    let Attention { d_head, .. } = *block.queries.config;
    let n_query = block.queries.n_query;
    let sequence = block.queries.sequence;
    let lengths = [N_KEY * N_QUERY, N_QUERY * d_head, sequence.n_scratch(d_head)];
    let mut scratch = Tensor::uninit(q.device(), &[lengths.iter().sum()]);
    let [scores, sums, decoded] = split(scratch.f32_mut(), lengths);
    for h in 0..block.queries.config.n_group() {
        let queries = Queries { head: block.queries.head + h, ..block.queries };
        let mut softmax = Softmax::default();
        let seen = queries.config.seen(&queries.positions());
        for keys in key_blocks(seen.clone()) {
            queries.scores(cpu, queries.rows(q), &keys, (scores, decoded));
            let scores = &mut scores[..keys.len() * N_QUERY];
            cpu.simd(Weigh { scores, n_query, softmax: &mut softmax });
            if keys.start > seen.start {
                for (row, fix) in sums.chunks_mut(d_head).zip(softmax.fix) {
                    row.iter_mut().for_each(|x| *x *= fix);
                }
            }
            for run in sequence.runs(&keys) {
                let p = &scores[(run.start - keys.start) * N_QUERY..];
                let p = Mat::strided(p, run.len(), n_query, N_QUERY).t();
                let v = queries.kv_rows(Side::Values, &run, decoded);
                let beta = if run.start == seen.start { 0.0 } else { 1.0 };
                cpu.gemm(MatMut::new(sums, n_query, d_head), beta, 1.0, p, v, Scope::Thread);
            }
        }
        for i in 0..n_query {
            let inverse = 1.0 / softmax.sum[i];
            let y = &mut block.y[i][h * d_head..][..d_head];
            for (y, sum) in y.iter_mut().zip(&sums[i * d_head..]) {
                *y = sum * inverse;
            }
            block.log_sum[h * n_query + i] = softmax.max[i] + softmax.sum[i].log2();
        }
    }
}

/// The running softmax of a block of queries.
struct Softmax {
    max: [f32; N_QUERY],
    sum: [f32; N_QUERY],
    /// What was summed before the last keys is to be multiplied with this.
    fix: [f32; N_QUERY],
}

impl Default for Softmax {
    fn default() -> Softmax {
        Softmax { max: [SCORE_MIN; N_QUERY], sum: [0.0; N_QUERY], fix: [0.0; N_QUERY] }
    }
}

/// Scores to weights, `2^(score - max)`, in place.
struct Weigh<'a> {
    scores: &'a mut [f32],
    n_query: usize,
    softmax: &'a mut Softmax,
}

impl WithSimd for Weigh<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Weigh { scores, n_query, softmax } = self;
        for at in (0..n_query).step_by(F32s::<S>::LANES) {
            let max_before = F32s::load(simd, &softmax.max[at..]);
            let mut max = max_before;
            for row in scores.chunks_exact(N_QUERY) {
                max = max.max(F32s::load(simd, &row[at..]));
            }
            let mut sum = F32s::zero(simd);
            for row in scores.chunks_exact_mut(N_QUERY) {
                let p = (F32s::load(simd, &row[at..]) - max).exp2_of_negative();
                sum = sum + p;
                p.store(&mut row[at..]);
            }
            let fix = (max_before - max).exp2_of_negative();
            let sum = fix.mul_add(F32s::load(simd, &softmax.sum[at..]), sum);
            max.store(&mut softmax.max[at..]);
            sum.store(&mut softmax.sum[at..]);
            fix.store(&mut softmax.fix[at..]);
        }
    }
}
