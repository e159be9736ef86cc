//! Causal attention with grouped heads, a sliding window, documents and a key-value cache.
//!
//! For query i and key j of one sequence, head by head, and only where `i - window < j <= i`:
//!
//!     s[i,j] = scale q[i] . k[j]      p[i,j] = exp(s[i,j] - l[i])      l[i] = ln sum_j exp s[i,j]
//!     y[i]   = sum_j p[i,j] v[j]
//!
//! Query head h reads key-value head `h / (n_head / n_kv_head)`. The score matrix never exists:
//! keys come in blocks, and a running maximum and sum correct what was added so far. Inside, s and
//! l are kept times log2(e), so that exp is a power of two, which is cheaper.
//!
//! Backward keeps q, k, v, y and l, and recomputes p block by block:
//!
//!     e[i]    = dy[i] . y[i]                 ds[i,j] = p[i,j] (dy[i] . v[j] - e[i])
//!     dv[j]   = sum_i p[i,j] dy[i]
//!     dq[i]   = scale sum_j ds[i,j] k[j]     dk[j] = scale sum_i ds[i,j] q[i]
//!
//! | name      | shape                       |                                               |
//! |-----------|-----------------------------|-----------------------------------------------|
//! | `q`, `y`  | (n_tok, n_head * d_head)    |                                               |
//! | `k`, `v`  | (n_tok, n_kv_head * d_head) |                                               |
//! | `s`, `p`  | (n_key, n_query), one block | a row per key: lanes are queries, which makes |
//! |           |                             | maximum, sum and mask free of lane shuffles   |
//! | `log_sum` | (n_tok, n_head)             | l, in the order of the blocks (see `Block`)   |
//!
//! With caches (generation) one sequence's keys and values so far stand before the new ones. A
//! sequence with few new tokens takes another way, `step`, which is bound by reading the cache:
//! dot products and no matrix products, ranges of keys side by side, partial softmaxes merged in
//! the order of the keys.
//!
//! Not here: projections, rotary embedding, norms of q and k.

use crate::cpu::{Cpu, F32s, Mat, MatMut, Scope};
use crate::device::Device;
use crate::segment::{Segment, Segments};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use pulp::{Simd, WithSimd};
use std::f32::consts::LOG2_E;
use std::ops::Range;

/// The sizes of an attention.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Query heads.
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
/// Keys whose softmax is taken in one go by `step`.
const N_RANGE: usize = 128;
/// Keys, then values, that `step` takes up at a time: their rows stay in the first level of cache.
const N_ROW: usize = 16;
/// Numbers of keys that a task of `step` reads, about: enough to hide its start.
const STEP_PIECE: usize = 1 << 15;
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

/// Keys and values of one sequence so far; clones share them until one of them grows.
#[derive(Clone)]
pub struct KvCache {
    /// (capacity, n_kv_head * d_head), the first `n_tok` rows in use.
    keys: Tensor,
    values: Tensor,
    n_tok: usize,
}

impl KvCache {
    /// Nothing yet.
    pub fn new(device: &Device, n_kv_head: usize, d_head: usize) -> KvCache {
        let empty = Tensor::uninit(device, &[0, n_kv_head * d_head]);
        KvCache { keys: empty.clone(), values: empty, n_tok: 0 }
    }

    /// Tokens so far.
    pub fn n_tok(&self) -> usize {
        self.n_tok
    }

    /// Bytes held; what clones share is counted for each of them.
    pub fn n_bytes(&self) -> usize {
        self.keys.n_bytes() + self.values.n_bytes()
    }

    /// The keys so far: (n_tok, n_kv_head * d_head).
    pub fn keys(&self) -> &[f32] {
        &self.keys.f32()[..self.n_tok * self.width()]
    }

    /// The values so far: (n_tok, n_kv_head * d_head).
    pub fn values(&self) -> &[f32] {
        &self.values.f32()[..self.n_tok * self.width()]
    }

    /// Forgets all tokens but the first `n_tok`.
    pub fn truncate(&mut self, n_tok: usize) {
        assert!(n_tok <= self.n_tok, "cache: truncated to {n_tok} of {} tokens", self.n_tok);
        self.n_tok = n_tok;
    }

    /// Adds rows of keys and of values.
    pub fn append(&mut self, keys: &[f32], values: &[f32]) {
        let width = self.width();
        assert!(keys.len() == values.len() && keys.len().is_multiple_of(width));
        let n_tok = self.n_tok + keys.len() / width;
        self.reserve(n_tok);
        let new = self.n_tok * width..n_tok * width;
        self.keys.f32_mut()[new.clone()].copy_from_slice(keys);
        self.values.f32_mut()[new].copy_from_slice(values);
        self.n_tok = n_tok;
    }

    fn width(&self) -> usize {
        self.keys.shape()[1]
    }

    /// Makes room for `n_tok` tokens in storage of its own; a doubled room costs each row one copy.
    fn reserve(&mut self, n_tok: usize) {
        let (capacity, width) = (self.keys.shape()[0], self.width());
        if n_tok <= capacity && self.keys.is_unique() && self.values.is_unique() {
            return;
        }
        let capacity = if n_tok <= capacity { capacity } else { n_tok.max(2 * capacity).max(16) };
        for rows in [&mut self.keys, &mut self.values] {
            let mut room = Tensor::uninit(rows.device(), &[capacity, width]);
            let used = self.n_tok * width;
            room.f32_mut()[..used].copy_from_slice(&rows.f32()[..used]);
            *rows = room;
        }
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
        return Var::constant(forward_cached([q, k, v].map(Var::value), config, segments, caches));
    }
    let (q_value, k_value, v_value) = (q.value().clone(), k.value().clone(), v.value().clone());
    let (y, log_sum) = forward(&q_value, config, &sequences(&k_value, &v_value, segments));
    let saved_y = y.clone();
    let (config, segments) = (config.clone(), segments.clone());
    let wanted = [q, k, v].map(Var::needs_grad);
    tape.record("attention", &[q, k, v], y, move |dy| {
        let saved = Saved { q: &q_value, y: &saved_y, log_sum: &log_sum };
        backward(&saved, &config, &sequences(&k_value, &v_value, &segments), &dy, wanted).into()
    })
}

/// One sequence: the rows of its new tokens, and all its keys and values up to the last of them.
#[derive(Clone, Copy)]
struct Sequence<'a> {
    segment: Segment,
    keys: &'a [f32],
    values: &'a [f32],
    /// Tokens before the first new one.
    n_past: usize,
}

/// Without caches the keys of a sequence are those of its own rows.
fn sequences<'a>(k: &'a Tensor, v: &'a Tensor, segments: &Segments) -> Vec<Sequence<'a>> {
    let width = k.shape()[1];
    let sequence = |&segment: &Segment| {
        let rows = segment.start * width..(segment.start + segment.n_tok) * width;
        Sequence { segment, keys: &k.f32()[rows.clone()], values: &v.f32()[rows], n_past: 0 }
    };
    segments.iter().map(sequence).collect()
}

fn forward(q: &Tensor, config: &Attention, sequences: &[Sequence]) -> (Tensor, Tensor) {
    let mut y = Tensor::uninit(q.device(), q.shape());
    let mut log_sum = Tensor::uninit(q.device(), &[q.shape()[0], config.n_head]);
    let parts = parts(config, sequences, y.f32_mut(), log_sum.f32_mut());
    forward_blocks(q, config, parts);
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
    let mut sequences = Vec::new();
    for (&segment, cache) in segments.iter().zip(caches) {
        let n_past = cache.n_tok();
        let rows = segment.start * width..(segment.start + segment.n_tok) * width;
        cache.append(&k.f32()[rows.clone()], &v.f32()[rows]);
        let (keys, values) = (cache.keys(), cache.values());
        sequences.push(Sequence { segment, keys, values, n_past });
    }
    let mut y = Tensor::uninit(q.device(), q.shape());
    let mut log_sum = Tensor::uninit(q.device(), &[q.shape()[0], config.n_head]);
    let parts = parts(config, &sequences, y.f32_mut(), log_sum.f32_mut());
    let (few, many): (Vec<_>, Vec<_>) =
        parts.into_iter().partition(|part| part.sequence.segment.n_tok <= N_STEP_MAX);
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

fn parts<'a>(
    config: &Attention,
    sequences: &[Sequence<'a>],
    mut y: &'a mut [f32],
    mut log_sum: &'a mut [f32],
) -> Vec<Part<'a>> {
    let part = |&sequence: &Sequence<'a>| Part {
        sequence,
        y: y.split_off_mut(..sequence.segment.n_tok * config.q_width()).expect("rows of y"),
        log_sum: log_sum.split_off_mut(..sequence.segment.n_tok * config.n_head).expect("sums"),
    };
    sequences.iter().map(part).collect()
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

    /// The rows of `keys` in keys or values, for the head they look at.
    fn kv_rows(&self, kv: &'a [f32], keys: &Range<usize>) -> Mat<'a> {
        let Attention { d_head, .. } = *self.config;
        let width = self.config.kv_width();
        let kv_head = self.head / self.config.n_group();
        Mat::strided(&kv[keys.start * width + kv_head * d_head..], keys.len(), d_head, width)
    }

    /// Scores times log2(e), a row of `N_QUERY` for each key; minus infinity where a query may not
    /// look.
    fn scores(&self, cpu: &Cpu, q: Mat, keys: &Range<usize>, scores: &mut [f32]) {
        let k = self.kv_rows(self.sequence.keys, keys);
        let out = MatMut::strided(scores, keys.len(), self.n_query, N_QUERY);
        cpu.gemm(out, 0.0, self.config.scale * LOG2_E, k, q.t(), Scope::Thread);
        let positions = self.positions();
        let row = |key: usize| (key - keys.start) * N_QUERY..(key - keys.start + 1) * N_QUERY;
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
    let Device::Cpu(cpu) = q.device();
    let n_group = config.n_group();
    let mut blocks = Vec::new();
    for part in parts {
        let ys = part.y.chunks_mut(N_QUERY * config.q_width());
        let log_sums = part.log_sum.chunks_mut(N_QUERY * config.n_head);
        for (idx, (y, log_sum)) in ys.zip(log_sums).enumerate() {
            let n_query = log_sum.len() / config.n_head;
            let log_sums = log_sum.chunks_mut(n_group * n_query);
            for (kv_head, (y, log_sum)) in
                by_kv_head(config, y, config.q_width()).zip(log_sums).enumerate()
            {
                let (first, head) = (idx * N_QUERY, kv_head * n_group);
                let queries = Queries { config, sequence: part.sequence, first, n_query, head };
                blocks.push(Block { queries, y, log_sum });
            }
        }
    }
    cpu.map(blocks, |block| forward_block(q, block));
}

/// Cuts rows of heads into the runs of each key-value head.
fn by_kv_head<'a>(
    config: &Attention,
    rows: &'a mut [f32],
    width: usize,
) -> impl Iterator<Item = Vec<&'a mut [f32]>> {
    let n_row = rows.len() / width;
    let mut runs: Vec<Vec<&mut [f32]>> = Vec::new();
    runs.resize_with(config.n_kv_head, || Vec::with_capacity(n_row));
    for (idx, run) in rows.chunks_mut(width / config.n_kv_head).enumerate() {
        runs[idx % config.n_kv_head].push(run);
    }
    runs.into_iter()
}

fn forward_block(q: &Tensor, mut block: Block) {
    let Device::Cpu(cpu) = q.device();
    let Attention { d_head, .. } = *block.queries.config;
    let n_query = block.queries.n_query;
    let mut scratch = Tensor::uninit(q.device(), &[N_KEY * N_QUERY + N_QUERY * d_head]);
    let (scores, sums) = scratch.f32_mut().split_at_mut(N_KEY * N_QUERY);
    for h in 0..block.queries.config.n_group() {
        let queries = Queries { head: block.queries.head + h, ..block.queries };
        let mut softmax = Softmax::default();
        let seen = queries.config.seen(&queries.positions());
        for keys in key_blocks(seen.clone()) {
            queries.scores(cpu, queries.rows(q), &keys, scores);
            let scores = &mut scores[..keys.len() * N_QUERY];
            cpu.simd(Weigh { scores, n_query, softmax: &mut softmax });
            let is_first = keys.start == seen.start;
            if !is_first {
                for (row, fix) in sums.chunks_mut(d_head).zip(softmax.fix) {
                    row.iter_mut().for_each(|x| *x *= fix);
                }
            }
            let p = Mat::strided(scores, keys.len(), n_query, N_QUERY).t();
            let v = queries.kv_rows(queries.sequence.values, &keys);
            let beta = if is_first { 0.0 } else { 1.0 };
            cpu.gemm(MatMut::new(sums, n_query, d_head), beta, 1.0, p, v, Scope::Thread);
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

/// What forward leaves for backward, next to keys and values.
struct Saved<'a> {
    q: &'a Tensor,
    y: &'a Tensor,
    log_sum: &'a Tensor,
}

/// Inverts `forward`.
///
/// Tasks own keys, so `dk` and `dv` are summed in one place. What the tasks add to `dq` is kept
/// apart and summed last, in the order of the keys.
fn backward(
    saved: &Saved,
    config: &Attention,
    sequences: &[Sequence],
    dy: &Tensor,
    wanted: [bool; 3],
) -> [Option<Tensor>; 3] {
    let device = dy.device();
    let Device::Cpu(cpu) = device;
    let n_tok = dy.shape()[0];
    let mut dk = Tensor::uninit(device, &[n_tok, config.kv_width()]);
    let mut dv = Tensor::uninit(device, &[n_tok, config.kv_width()]);
    let mut n_part = 0;
    let plan: Vec<Vec<Chunk>> = sequences
        .iter()
        .map(|sequence| chunks(config, sequence.segment.n_tok, &mut n_part))
        .collect();
    let mut dq_parts = Tensor::uninit(device, &[n_part, config.q_width()]);
    let mut left = [dq_parts.f32_mut(), dk.f32_mut(), dv.f32_mut()];
    let mut shares = Vec::new();
    for (&sequence, chunks) in sequences.iter().zip(&plan) {
        for chunk in chunks {
            let mut take = |idx: usize, n| left[idx].split_off_mut(..n).expect("rows left");
            let n_kv = chunk.keys.len() * config.kv_width();
            let n_dq = chunk.queries.len() * config.q_width();
            let dq = take(0, n_dq).chunks_mut(n_dq / config.n_kv_head);
            let dk = by_kv_head(config, take(1, n_kv), config.kv_width());
            let dv = by_kv_head(config, take(2, n_kv), config.kv_width());
            for (kv_head, ((dq, dk), dv)) in dq.zip(dk).zip(dv).enumerate() {
                shares.push(Share { config, sequence, chunk, kv_head, wanted, dq, dk, dv });
            }
        }
    }
    cpu.map(shares, |share| backward_share(saved, dy, share));
    let dq = wanted[0].then(|| gather_dq(config, sequences, &plan, &dq_parts));
    [dq, wanted[1].then_some(dk), wanted[2].then_some(dv)]
}

/// A range of keys of a sequence in backward, and the queries that may see it.
struct Chunk {
    keys: Range<usize>,
    queries: Range<usize>,
    /// The first of its rows in the tensor that keeps the parts of `dq`.
    at: usize,
}

/// Cuts a sequence into chunks: by its length, whatever else is in the batch.
fn chunks(config: &Attention, n_tok: usize, at: &mut usize) -> Vec<Chunk> {
    let reach = config.window.map_or(n_tok, |window| window.min(n_tok));
    let n_key = N_KEY * reach.div_ceil(N_KEY * N_CHUNK_MAX);
    let chunk = |start: usize| {
        let end = n_tok.min(start + n_key);
        let last_reader = (end + reach - 1).next_multiple_of(N_QUERY);
        let chunk = Chunk { keys: start..end, queries: start..n_tok.min(last_reader), at: *at };
        *at += chunk.queries.len();
        chunk
    };
    (0..n_tok).step_by(n_key).map(chunk).collect()
}

/// One task of backward: the keys of a chunk, for one key-value head.
struct Share<'a> {
    config: &'a Attention,
    sequence: Sequence<'a>,
    chunk: &'a Chunk,
    kv_head: usize,
    /// Which of dq, dk and dv somebody wants.
    wanted: [bool; 3],
    /// (queries, n_group * d_head)
    dq: &'a mut [f32],
    /// One run of `d_head` for each key.
    dk: Vec<&'a mut [f32]>,
    dv: Vec<&'a mut [f32]>,
}

fn backward_share(saved: &Saved, dy: &Tensor, share: Share) {
    let Share { config, sequence, chunk, kv_head, wanted, dq, dk, dv } = share;
    let Device::Cpu(cpu) = dy.device();
    let (d_head, n_group) = (config.d_head, config.n_group());
    let n_sum = chunk.keys.len() * d_head;
    let mut scratch = Tensor::uninit(dy.device(), &[2 * N_KEY * N_QUERY + 2 * n_sum]);
    let (scores, sums) = scratch.f32_mut().split_at_mut(2 * N_KEY * N_QUERY);
    let (p, ds) = scores.split_at_mut(N_KEY * N_QUERY);
    let (dk_sum, dv_sum) = sums.split_at_mut(n_sum);
    dq.fill(0.0);
    dk_sum.fill(0.0);
    dv_sum.fill(0.0);
    for first in chunk.queries.clone().step_by(N_QUERY) {
        let n_query = N_QUERY.min(sequence.segment.n_tok - first);
        for h in 0..n_group {
            let head = kv_head * n_group + h;
            let queries = Queries { config, sequence, first, n_query, head };
            let tile = Tile::new(cpu, queries, saved, dy);
            let dq = &mut dq[((first - chunk.queries.start) * n_group + h) * d_head..];
            let seen = config.seen(&queries.positions());
            let seen = seen.start.max(chunk.keys.start)..seen.end.min(chunk.keys.end);
            for keys in key_blocks(seen) {
                let at = (keys.start - chunk.keys.start) * d_head;
                let (dk, dv) = (&mut dk_sum[at..], &mut dv_sum[at..]);
                tile.backward(cpu, &keys, wanted, Sums { p, ds, dq, dk, dv });
            }
        }
    }
    for (idx, (dk, dv)) in dk.into_iter().zip(dv).enumerate() {
        dk.copy_from_slice(&dk_sum[idx * d_head..][..d_head]);
        dv.copy_from_slice(&dv_sum[idx * d_head..][..d_head]);
    }
}

/// A block of queries of one head in backward.
struct Tile<'a> {
    queries: Queries<'a>,
    q: Mat<'a>,
    dy: Mat<'a>,
    log_sum: [f32; N_QUERY],
    /// `dy . y`
    e: [f32; N_QUERY],
}

/// Where a tile works and what it adds to.
struct Sums<'a> {
    p: &'a mut [f32],
    ds: &'a mut [f32],
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dv: &'a mut [f32],
}

impl<'a> Tile<'a> {
    fn new(cpu: &Cpu, queries: Queries<'a>, saved: &Saved<'a>, dy: &'a Tensor) -> Tile<'a> {
        let Queries { config, n_query, head, .. } = queries;
        let row = queries.sequence.segment.start + queries.first;
        let from = row * config.n_head + head * n_query;
        let mut log_sum = [0.0; N_QUERY];
        log_sum[..n_query].copy_from_slice(&saved.log_sum.f32()[from..][..n_query]);
        let mut e = [0.0; N_QUERY];
        for i in 0..n_query {
            let at = queries.at() + i * config.q_width();
            let (dy, y) = (&dy.f32()[at..][..config.d_head], &saved.y.f32()[at..]);
            e[i] = cpu.simd(Dot { a: dy, b: y });
        }
        Tile { queries, q: queries.rows(saved.q), dy: queries.rows(dy), log_sum, e }
    }

    /// Adds what the weights of `keys` pass on.
    fn backward(&self, cpu: &Cpu, keys: &Range<usize>, wanted: [bool; 3], sums: Sums) {
        let Sums { p, ds, dq, dk, dv } = sums;
        let Queries { config, sequence, n_query, .. } = self.queries;
        let Attention { d_head, scale, .. } = *config;
        let n_key = keys.len();
        let [wants_dq, wants_dk, wants_dv] = wanted;
        self.queries.scores(cpu, self.q, keys, p);
        let v = self.queries.kv_rows(sequence.values, keys);
        let dp = MatMut::strided(ds, n_key, n_query, N_QUERY);
        cpu.gemm(dp, 0.0, 1.0, v, self.dy.t(), Scope::Thread);
        let n_score = n_key * N_QUERY;
        cpu.simd(Unweigh { tile: self, p: &mut p[..n_score], ds: &mut ds[..n_score] });
        let (p, ds) =
            (Mat::strided(p, n_key, n_query, N_QUERY), Mat::strided(ds, n_key, n_query, N_QUERY));
        if wants_dv {
            cpu.gemm(MatMut::new(dv, n_key, d_head), 1.0, 1.0, p, self.dy, Scope::Thread);
        }
        if wants_dk {
            cpu.gemm(MatMut::new(dk, n_key, d_head), 1.0, scale, ds, self.q, Scope::Thread);
        }
        if wants_dq {
            let k = self.queries.kv_rows(sequence.keys, keys);
            let dq = MatMut::strided(dq, n_query, d_head, config.n_group() * d_head);
            cpu.gemm(dq, 1.0, scale, ds.t(), k, Scope::Thread);
        }
    }
}

/// Scores to weights, and gradients of weights to gradients of unscaled scores, in place.
struct Unweigh<'a> {
    tile: &'a Tile<'a>,
    p: &'a mut [f32],
    ds: &'a mut [f32],
}

impl WithSimd for Unweigh<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Unweigh { tile, p, ds } = self;
        for at in (0..tile.queries.n_query).step_by(F32s::<S>::LANES) {
            let log_sum = F32s::load(simd, &tile.log_sum[at..]);
            let e = F32s::load(simd, &tile.e[at..]);
            for (p, ds) in p.chunks_exact_mut(N_QUERY).zip(ds.chunks_exact_mut(N_QUERY)) {
                let weight = (F32s::load(simd, &p[at..]) - log_sum).exp2_of_negative();
                weight.store(&mut p[at..]);
                (weight * (F32s::load(simd, &ds[at..]) - e)).store(&mut ds[at..]);
            }
        }
    }
}

/// `a . b`, over the length of `a`.
struct Dot<'a> {
    a: &'a [f32],
    b: &'a [f32],
}

impl WithSimd for Dot<'_> {
    type Output = f32;
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        dot(simd, self.a, self.b)
    }
}

#[inline(always)]
fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let lanes = F32s::<S>::LANES;
    let (whole, rest) = a.split_at(a.len() - a.len() % lanes);
    let mut sum = F32s::load(simd, rest) * F32s::load(simd, &b[whole.len()..a.len()]);
    for (a, b) in whole.chunks_exact(lanes).zip(b.chunks_exact(lanes)) {
        sum = F32s::load(simd, a).mul_add(F32s::load(simd, b), sum);
    }
    sum.sum()
}

/// Sums what the chunks of each sequence added to `dq`.
fn gather_dq(
    config: &Attention,
    sequences: &[Sequence],
    plan: &[Vec<Chunk>],
    dq_parts: &Tensor,
) -> Tensor {
    let Device::Cpu(cpu) = dq_parts.device();
    let n_tok = sequences.iter().map(|sequence| sequence.segment.n_tok).sum();
    let mut dq = Tensor::uninit(dq_parts.device(), &[n_tok, config.q_width()]);
    let mut left = dq.f32_mut();
    let mut tasks = Vec::new();
    for (sequence, chunks) in sequences.iter().zip(plan) {
        let n_dq = sequence.segment.n_tok * config.q_width();
        let rows = left.split_off_mut(..n_dq).expect("rows left");
        for (idx, rows) in rows.chunks_mut(N_QUERY * config.q_width()).enumerate() {
            tasks.push((chunks, idx * N_QUERY, rows));
        }
    }
    let d_run = config.n_group() * config.d_head;
    cpu.map(tasks, |(chunks, first, rows)| {
        rows.fill(0.0);
        for Chunk { queries, at, .. } in chunks.iter().filter(|c| c.queries.contains(&first)) {
            let share = &dq_parts.f32()[at * config.q_width()..];
            for (idx, run) in rows.chunks_mut(d_run).enumerate() {
                let (tok, kv_head) = (idx / config.n_kv_head, idx % config.n_kv_head);
                let from = kv_head * queries.len() + first - queries.start + tok;
                for (dq, part) in run.iter_mut().zip(&share[from * d_run..]) {
                    *dq += part;
                }
            }
        }
    });
    dq
}

/// One new token and a range of the keys it sees.
struct Reading<'a> {
    /// (n_head, d_head)
    q: &'a [f32],
    /// (n_key, n_kv_head * d_head)
    keys: &'a [f32],
    values: &'a [f32],
}

/// Attention of a few new tokens to long caches: what counts is to read each key and value once,
/// in the order in which they lie.
fn step(q: &Tensor, config: &Attention, parts: Vec<Part>) {
    let Device::Cpu(cpu) = q.device();
    let (q_width, kv_width) = (config.q_width(), config.kv_width());
    let mut readings = Vec::new();
    let mut rows = Vec::new();
    for part in parts {
        let Sequence { segment, keys, values, n_past } = part.sequence;
        for (tok, y) in part.y.chunks_mut(q_width).enumerate() {
            let q = &q.f32()[(segment.start + tok) * q_width..][..q_width];
            let n_before = readings.len();
            let seen = config.seen(&(n_past + tok..n_past + tok + 1));
            for start in seen.clone().step_by(N_RANGE) {
                let range = start * kv_width..seen.end.min(start + N_RANGE) * kv_width;
                let (keys, values) = (&keys[range.clone()], &values[range]);
                readings.push(Reading { q, keys, values });
            }
            rows.push((n_before..readings.len(), y));
        }
    }
    // How readings are dealt out does not change what each of them gives.
    let n_number: usize = readings.iter().map(|reading| reading.keys.len()).sum();
    let per_task = readings.len().div_ceil((n_number / STEP_PIECE).max(1));
    let d_result = config.n_head * (config.d_head + 2);
    let mut results = Tensor::uninit(q.device(), &[readings.len(), d_result]);
    cpu.each_piece(results.f32_mut(), per_task * d_result, |idx, results| {
        let mut scores = Tensor::uninit(q.device(), &[config.n_head, N_RANGE]);
        let readings = readings[idx * per_task..].iter();
        for (reading, result) in readings.zip(results.chunks_mut(d_result)) {
            cpu.simd(Read { reading, config, scores: scores.f32_mut(), result });
        }
    });
    for (range, y) in rows {
        merge(&results.f32()[range.start * d_result..range.end * d_result], y, config);
    }
}

/// Merges what the ranges of keys gave to a token, in the order of the keys.
fn merge(results: &[f32], y: &mut [f32], config: &Attention) {
    let d_head = config.d_head;
    for (head, y) in y.chunks_mut(d_head).enumerate() {
        let of_head = || results.chunks(d_head + 2).skip(head).step_by(config.n_head);
        let max = of_head().fold(SCORE_MIN, |max, result| max.max(result[d_head]));
        let mut sum = 0.0;
        y.fill(0.0);
        for result in of_head() {
            let fix = (result[d_head] - max).exp2();
            sum += fix * result[d_head + 1];
            for (y, x) in y.iter_mut().zip(&result[..d_head]) {
                *y += fix * x;
            }
        }
        y.iter_mut().for_each(|y| *y /= sum);
    }
}

/// For each head: the weighted sum of the values, the largest score, the sum of the weights.
struct Read<'a> {
    reading: &'a Reading<'a>,
    config: &'a Attention,
    /// (n_head, N_RANGE)
    scores: &'a mut [f32],
    /// (n_head, d_head + 2)
    result: &'a mut [f32],
}

impl WithSimd for Read<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Read { reading, config, scores, result } = self;
        let Reading { q, keys, values } = *reading;
        let (d_head, width, n_group) = (config.d_head, config.kv_width(), config.n_group());
        let scale = config.scale * LOG2_E;
        let lanes = F32s::<S>::LANES;
        let n_key = keys.len() / width;
        // A few rows at a time, all heads of them: memory is read from front to back.
        for (idx, rows) in keys.chunks(N_ROW * width).enumerate() {
            for (head, q) in q.chunks_exact(d_head).enumerate() {
                let scores = &mut scores[head * N_RANGE + idx * N_ROW..];
                for (score, row) in scores.iter_mut().zip(rows.chunks_exact(width)) {
                    *score = scale * dot(simd, q, &row[head / n_group * d_head..]);
                }
            }
        }
        let results = result.chunks_exact_mut(d_head + 2);
        for (scores, result) in scores.chunks_exact_mut(N_RANGE).zip(results) {
            let max = scores[..n_key].iter().fold(SCORE_MIN, |max, score| max.max(*score));
            // Lanes past the last key weigh nothing.
            let scores = &mut scores[..n_key.next_multiple_of(lanes)];
            scores[n_key..].fill(f32::NEG_INFINITY);
            let mut sum = F32s::zero(simd);
            for score in scores.chunks_exact_mut(lanes) {
                let p = (F32s::load(simd, score) - F32s::splat(simd, max)).exp2_of_negative();
                sum = sum + p;
                p.store(score);
            }
            result[..d_head].fill(0.0);
            result[d_head] = max;
            result[d_head + 1] = sum.sum();
        }
        for (idx, rows) in values.chunks(N_ROW * width).enumerate() {
            for (head, result) in result.chunks_exact_mut(d_head + 2).enumerate() {
                let p = &scores[head * N_RANGE + idx * N_ROW..][..rows.len() / width];
                let v = &rows[head / n_group * d_head..];
                add_weighted(simd, p, v, width, &mut result[..d_head]);
            }
        }
    }
}

/// `y += sum_j p[j] v[j]`, rows `width` apart, four vectors of columns at a time.
#[inline(always)]
fn add_weighted<S: Simd>(simd: S, p: &[f32], v: &[f32], width: usize, y: &mut [f32]) {
    let lanes = F32s::<S>::LANES;
    let (wide, narrow) = y.split_at_mut(y.len() - y.len() % (4 * lanes));
    let n_wide = wide.len();
    for (idx, y) in wide.chunks_exact_mut(4 * lanes).enumerate() {
        let mut sums = [0, 1, 2, 3].map(|c| F32s::load(simd, &y[c * lanes..]));
        for (row, &p) in p.iter().enumerate() {
            let v = &v[row * width + idx * 4 * lanes..][..4 * lanes];
            for (c, sum) in sums.iter_mut().enumerate() {
                *sum = F32s::splat(simd, p).mul_add(F32s::load(simd, &v[c * lanes..]), *sum);
            }
        }
        for (c, sum) in sums.into_iter().enumerate() {
            sum.store(&mut y[c * lanes..]);
        }
    }
    for (idx, y) in narrow.chunks_mut(lanes).enumerate() {
        let mut sum = F32s::load(simd, y);
        for (row, &p) in p.iter().enumerate() {
            let v = F32s::load(simd, &v[row * width + n_wide + idx * lanes..][..y.len()]);
            sum = F32s::splat(simd, p).mul_add(v, sum);
        }
        sum.store(y);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Input, check_gradients};
    use crate::tape::Gradients;

    fn sizes(n_head: usize, n_kv_head: usize, d_head: usize, window: Option<usize>) -> Attention {
        let scale = 1.0 / (d_head as f32).sqrt();
        Attention { n_head, n_kv_head, d_head, scale, window }
    }

    /// Queries, keys and values.
    fn inputs(config: &Attention, n_tok: usize, deviation: f32) -> [Input; 3] {
        [
            Input::normal(1, &[n_tok, config.q_width()], deviation),
            Input::normal(2, &[n_tok, config.kv_width()], deviation),
            Input::normal(3, &[n_tok, config.kv_width()], 1.0),
        ]
    }

    /// The output, and the gradients that are wanted of queries, keys and values.
    fn run_both(
        qkv: &[Tensor; 3],
        config: &Attention,
        segments: &Segments,
        wanted: [bool; 3],
        dy: &Tensor,
    ) -> (Tensor, [Option<Tensor>; 3]) {
        let tape = Tape::new();
        let [q, k, v] = [0, 1, 2].map(|key| match wanted[key] {
            true => tape.leaf(key, &qkv[key]),
            false => Var::constant(qkv[key].clone()),
        });
        let y = attention(&tape, &q, &k, &v, config, segments, None);
        let y_value = y.value().clone();
        let mut grads = Gradients::default();
        tape.walk(vec![(y, dy.clone())], &mut grads);
        (y_value, [0, 1, 2].map(|key| grads.get(key).cloned()))
    }

    fn run(qkv: &[Tensor; 3], config: &Attention, segments: &Segments) -> Tensor {
        let [q, k, v] = qkv.clone().map(Var::constant);
        attention(&Tape::off(), &q, &k, &v, config, segments, None).value().clone()
    }

    fn run_cached(qkv: &[Tensor; 3], config: &Attention, caches: &mut [&mut KvCache]) -> Tensor {
        assert_eq!(caches.len(), 1);
        let segments = Segments::continuing(&[(qkv[0].shape()[0], caches[0].n_tok())]);
        let [q, k, v] = qkv.clone().map(Var::constant);
        attention(&Tape::off(), &q, &k, &v, config, &segments, Some(caches)).value().clone()
    }

    fn rows(qkv: &[Tensor; 3], range: Range<usize>) -> [Tensor; 3] {
        qkv.clone().map(|x| x.rows(range.clone()))
    }

    /// The formula in f64, one score at a time.
    fn slow(qkv: &[Tensor; 3], config: &Attention, segments: &Segments) -> Vec<f64> {
        let [q, k, v] = qkv.clone().map(|x| x.f32().iter().map(|x| *x as f64).collect::<Vec<_>>());
        let Attention { n_head, d_head, .. } = *config;
        let mut y = vec![0.0; q.len()];
        for segment in segments.iter() {
            for (i, head) in segment.rows().flat_map(|i| (0..n_head).map(move |h| (i, h))) {
                let kv_head = head / (n_head / config.n_kv_head);
                let first = config.window.map_or(0, |window| (i + 1).saturating_sub(window));
                let keys = first.max(segment.start)..i + 1;
                let q = &q[i * config.q_width() + head * d_head..][..d_head];
                let at = |j: usize| j * config.kv_width() + kv_head * d_head;
                let dot = |j: usize| (0..d_head).map(|c| q[c] * k[at(j) + c]).sum::<f64>();
                let scores: Vec<f64> = keys.clone().map(|j| config.scale as f64 * dot(j)).collect();
                let max = scores.iter().fold(f64::MIN, |max, s| max.max(*s));
                let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                for (j, score) in keys.zip(scores) {
                    for c in 0..d_head {
                        let weight = (score - max).exp() / sum;
                        y[i * config.q_width() + head * d_head + c] += weight * v[at(j) + c];
                    }
                }
            }
        }
        y
    }

    fn expect_close(got: &[f32], want: &[f64], tolerance: f64, what: &str) {
        assert_eq!(got.len(), want.len());
        for (at, (&got, &want)) in got.iter().zip(want).enumerate() {
            assert!(
                (got as f64 - want).abs() < tolerance,
                "{what}, element {at}: {got}, not {want}"
            );
        }
    }

    #[test]
    fn gradients() {
        // (config, lengths of the segments)
        let cases = [
            (sizes(1, 1, 1, None), vec![1]),
            (sizes(2, 1, 3, None), vec![7]),
            (sizes(4, 2, 5, None), vec![N_QUERY - 1, 1, N_QUERY + 1]),
            (sizes(6, 2, 19, Some(4)), vec![33, 2, 40]),
            (sizes(2, 2, 16, None), vec![N_KEY + N_QUERY + 3]),
            (sizes(1, 1, 8, Some(N_KEY)), vec![2 * N_KEY + 70]),
        ];
        for (config, lengths) in cases {
            let segments = Segments::from_lengths(&lengths);
            check_gradients(&inputs(&config, segments.n_tok(), 1.0), |tape, vars| {
                vec![attention(tape, &vars[0], &vars[1], &vars[2], &config, &segments, None)]
            });
        }
    }

    #[test]
    fn forward_agrees_with_the_formula() {
        let device = Device::cpu(2).unwrap();
        let cases = [
            (sizes(1, 1, 1, None), vec![1]),
            (sizes(6, 2, 19, None), vec![33, 1, 64, 5]),
            (sizes(4, 1, 64, Some(7)), vec![3, 100]),
            (sizes(2, 2, 8, None), vec![2 * N_KEY + 1]),
            (sizes(2, 2, 8, Some(N_KEY - 5)), vec![3 * N_KEY]),
        ];
        for (config, lengths) in cases {
            let segments = Segments::from_lengths(&lengths);
            let qkv = inputs(&config, segments.n_tok(), 1.0).map(|x| x.tensor(&device));
            let want = slow(&qkv, &config, &segments);
            expect_close(run(&qkv, &config, &segments).f32(), &want, 3e-6, &format!("{config:?}"));
        }
    }

    #[test]
    fn large_scores_do_not_overflow() {
        let device = Device::cpu(1).unwrap();
        let config = sizes(2, 1, 64, None);
        let n_tok = N_KEY + 40;
        // Scores of thousands, of both signs.
        let thirty = |x: f32| 30.0 * x.signum();
        let qkv = [
            Input::map(1, &[n_tok, 128], thirty),
            Input::map(2, &[n_tok, 64], thirty),
            Input::normal(3, &[n_tok, 64], 1.0),
        ]
        .map(|x| x.tensor(&device));
        let want = slow(&qkv, &config, &Segments::from_lengths(&[n_tok]));
        let got = run(&qkv, &config, &Segments::from_lengths(&[n_tok]));
        expect_close(got.f32(), &want, 1e-3, "whole");
        let mut cache = KvCache::new(&device, 1, 64);
        for tok in 0..n_tok {
            let y = run_cached(&rows(&qkv, tok..tok + 1), &config, &mut [&mut cache]);
            expect_close(y.f32(), &want[tok * 128..][..128], 1e-3, "step");
        }
    }

    #[test]
    fn gradients_of_large_scores_are_finite() {
        let device = Device::cpu(1).unwrap();
        let config = sizes(1, 1, 64, None);
        let qkv = inputs(&config, 40, 30.0).map(|x| x.tensor(&device));
        let dy = Input::normal(4, &[40, 64], 1.0).tensor(&device);
        let (_, grads) = run_both(&qkv, &config, &Segments::from_lengths(&[40]), [true; 3], &dy);
        for (idx, grad) in grads.iter().flatten().enumerate() {
            assert!(grad.f32().iter().all(|dx| dx.is_finite()), "input {idx}");
        }
    }

    #[test]
    fn a_gradient_nobody_wants_is_not_computed_and_changes_no_other() {
        let device = Device::cpu(1).unwrap();
        let config = sizes(2, 1, 5, None);
        let segments = Segments::from_lengths(&[40]);
        let qkv = inputs(&config, 40, 1.0).map(|x| x.tensor(&device));
        let dy = Input::normal(4, &[40, 10], 1.0).tensor(&device);
        let numbers = |grad: &Option<Tensor>| grad.as_ref().map(|grad| grad.f32().to_vec());
        let (_, all) = run_both(&qkv, &config, &segments, [true; 3], &dy);
        for idx in 0..3 {
            let mut wanted = [false; 3];
            wanted[idx] = true;
            let (_, one) = run_both(&qkv, &config, &segments, wanted, &dy);
            assert_eq!(numbers(&one[idx]), numbers(&all[idx]), "input {idx}");
            assert_eq!(one.iter().flatten().count(), 1);
        }
    }

    /// The gradients in f64 for one head and one sequence, one score at a time.
    fn slow_backward(qkv: &[Tensor; 3], config: &Attention, dy: &Tensor) -> [Vec<f64>; 3] {
        let f64s = |x: &Tensor| x.f32().iter().map(|x| *x as f64).collect::<Vec<_>>();
        let [q, k, v] = qkv.clone().map(|x| f64s(&x));
        let (dy, d, scale) = (f64s(dy), config.d_head, config.scale as f64);
        let dot = |a: &[f64], i: usize, b: &[f64], j: usize| {
            (0..d).map(|c| a[i * d + c] * b[j * d + c]).sum::<f64>()
        };
        let mut grads = [vec![0.0; q.len()], vec![0.0; q.len()], vec![0.0; q.len()]];
        for i in 0..q.len() / d {
            let first = config.window.map_or(0, |window| (i + 1).saturating_sub(window));
            let mut p: Vec<f64> = (first..=i).map(|j| (scale * dot(&q, i, &k, j)).exp()).collect();
            let sum: f64 = p.iter().sum();
            p.iter_mut().for_each(|p| *p /= sum);
            let dp: Vec<f64> = (first..=i).map(|j| dot(&dy, i, &v, j)).collect();
            let e: f64 = p.iter().zip(&dp).map(|(p, dp)| p * dp).sum();
            for (j, (p, dp)) in (first..=i).zip(p.iter().zip(dp)) {
                for c in 0..d {
                    grads[0][i * d + c] += scale * p * (dp - e) * k[j * d + c];
                    grads[1][j * d + c] += scale * p * (dp - e) * q[i * d + c];
                    grads[2][j * d + c] += p * dy[i * d + c];
                }
            }
        }
        grads
    }

    #[test]
    fn gradients_of_a_long_sequence_agree_with_the_formula() {
        let device = Device::cpu(2).unwrap();
        // Chunks of several blocks of keys, the last one cut short.
        let n_tok = N_CHUNK_MAX * N_KEY + 3 * N_QUERY + 1;
        for window in [None, Some(N_CHUNK_MAX * N_KEY + 1), Some(3)] {
            let config = sizes(1, 1, 2, window);
            let qkv = inputs(&config, n_tok, 1.0).map(|x| x.tensor(&device));
            let dy = Input::normal(4, &[n_tok, 2], 1.0).tensor(&device);
            let segments = Segments::from_lengths(&[n_tok]);
            let (_, got) = run_both(&qkv, &config, &segments, [true; 3], &dy);
            let want = slow_backward(&qkv, &config, &dy);
            for (idx, (got, want)) in got.iter().flatten().zip(want).enumerate() {
                expect_close(got.f32(), &want, 2e-5, &format!("window {window:?}, input {idx}"));
            }
        }
    }

    #[test]
    fn a_token_changes_nothing_before_it() {
        let device = Device::cpu(1).unwrap();
        let config = sizes(2, 1, 4, None);
        let n_tok = N_KEY + 50;
        let segments = Segments::from_lengths(&[n_tok]);
        let qkv = inputs(&config, n_tok, 1.0).map(|x| x.tensor(&device));
        let before = run(&qkv, &config, &segments);
        for tok in [1, N_QUERY - 1, N_QUERY, N_KEY - 1, N_KEY, n_tok - 1] {
            let changed = qkv.clone().map(|x| {
                let mut x = x.to_f32();
                let width = x.shape()[1];
                x.f32_mut()[tok * width..][..width].fill(3.0);
                x
            });
            let after = run(&changed, &config, &segments);
            let n = tok * config.q_width();
            assert!(before.f32()[..n] == after.f32()[..n], "token {tok} reached back");
            assert!(before.f32()[n..] != after.f32()[n..], "token {tok} changed nothing");
        }
    }

    #[test]
    fn a_window_of_w_sees_exactly_w_keys() {
        let device = Device::cpu(1).unwrap();
        for window in [1, 5, N_QUERY, N_KEY, N_KEY + 3] {
            let n_tok = 2 * N_KEY + 20;
            let config = sizes(1, 1, 4, Some(window));
            // Equal scores: the output is the mean of the values seen.
            let ones = Tensor::from_f32(&device, &[n_tok, 4], &vec![1.0; n_tok * 4]);
            let ramp: Vec<f32> = (0..n_tok * 4).map(|at| (at / 4) as f32).collect();
            let v = Tensor::from_f32(&device, &[n_tok, 4], &ramp);
            let qkv = [ones.clone(), ones, v];
            let y = run(&qkv, &config, &Segments::from_lengths(&[n_tok]));
            let mut cache = KvCache::new(&device, 1, 4);
            for tok in 0..n_tok {
                let first = (tok + 1).saturating_sub(window);
                let mean = (first + tok) as f32 / 2.0;
                let step = run_cached(&rows(&qkv, tok..tok + 1), &config, &mut [&mut cache]);
                for got in [y.f32()[tok * 4], step.f32()[0]] {
                    assert!((got - mean).abs() < 1e-3, "window {window}: {got}, not {mean}");
                }
            }
        }
    }

    #[test]
    fn packed_segments_give_the_same_bits_as_each_alone() {
        let device = Device::cpu(2).unwrap();
        let config = sizes(4, 2, 8, None);
        let lengths = [70, 1, N_KEY + 45];
        let segments = Segments::from_lengths(&lengths);
        let packed = inputs(&config, segments.n_tok(), 1.0).map(|x| x.tensor(&device));
        // The queries serve as the gradient of the output: any numbers will do.
        let both = |qkv: &[Tensor; 3], segments: &Segments| {
            let (y, grads) = run_both(qkv, &config, segments, [true; 3], &qkv[0]);
            [vec![y], grads.into_iter().flatten().collect()].concat()
        };
        let together = both(&packed, &segments);
        for segment in segments.iter() {
            let alone = Segments::from_lengths(&[segment.n_tok]);
            let alone = both(&rows(&packed, segment.rows()), &alone);
            for (alone, together) in alone.iter().zip(&together) {
                assert!(alone.f32() == together.rows(segment.rows()).f32(), "{segment:?}");
            }
        }
    }

    #[test]
    fn with_a_cache_any_pieces_equal_the_whole_sequence() {
        let device = Device::cpu(2).unwrap();
        for (n_head, n_kv_head, d_head, window) in
            [(4, 2, 64, None), (3, 1, 19, None), (2, 2, 80, Some(40)), (1, 1, 4, Some(N_RANGE + 9))]
        {
            let config = sizes(n_head, n_kv_head, d_head, window);
            let n_tok = 2 * N_RANGE + 30;
            let qkv = inputs(&config, n_tok, 1.0).map(|x| x.tensor(&device));
            let want: Vec<f64> = run(&qkv, &config, &Segments::from_lengths(&[n_tok]))
                .f32()
                .iter()
                .map(|y| *y as f64)
                .collect();
            for lengths in [vec![1], vec![n_tok], vec![300, 1, 2, 5, N_STEP_MAX, 90]] {
                let mut cache = KvCache::new(&device, n_kv_head, d_head);
                let mut got: Vec<f32> = Vec::new();
                for length in lengths.iter().cycle() {
                    let next = cache.n_tok()..n_tok.min(cache.n_tok() + length);
                    if next.is_empty() {
                        break;
                    }
                    let y = run_cached(&rows(&qkv, next), &config, &mut [&mut cache]);
                    got.extend(y.f32());
                }
                expect_close(&got, &want, 3e-6, &format!("{config:?} by {lengths:?}"));
            }
        }
    }

    #[test]
    fn a_batch_of_steps_and_prompts_gives_the_same_bits_as_each_alone() {
        let device = Device::cpu(2).unwrap();
        let config = sizes(4, 2, 16, None);
        let qkv = inputs(&config, 1500, 1.0).map(|x| x.tensor(&device));
        // (tokens in the cache, new tokens)
        let cases = [(700, 1), (0, 1), (10, 40), (3, 2)];
        let cache_of = |n_past: usize| {
            let mut cache = KvCache::new(&device, 2, 16);
            cache.append(&qkv[1].f32()[..n_past * 32], &qkv[2].f32()[..n_past * 32]);
            cache
        };
        let mut caches: Vec<KvCache> = cases.iter().map(|case| cache_of(case.0)).collect();
        let mut caches: Vec<&mut KvCache> = caches.iter_mut().collect();
        let parts: Vec<_> = cases.iter().map(|&(n_past, n_new)| (n_new, n_past)).collect();
        let segments = Segments::continuing(&parts);
        let new = rows(&qkv, 1000..1000 + segments.n_tok());
        let [q, k, v] = new.clone().map(Var::constant);
        let y = attention(&Tape::off(), &q, &k, &v, &config, &segments, Some(&mut caches));
        for (segment, (n_past, _)) in segments.iter().zip(cases) {
            let mut cache = cache_of(n_past);
            let alone = run_cached(&rows(&new, segment.rows()), &config, &mut [&mut cache]);
            assert!(alone.f32() == y.value().rows(segment.rows()).f32(), "{segment:?}");
        }
    }

    #[test]
    fn steps_have_the_same_bits_on_any_number_of_threads() {
        let config = sizes(4, 2, 64, None);
        let step = |n_threads: usize| {
            let device = Device::cpu(n_threads).unwrap();
            let qkv = inputs(&config, 3 * N_RANGE, 1.0).map(|x| x.tensor(&device));
            let mut cache = KvCache::new(&device, 2, 64);
            run_cached(&rows(&qkv, 0..3 * N_RANGE - 1), &config, &mut [&mut cache]);
            let last = rows(&qkv, 3 * N_RANGE - 1..3 * N_RANGE);
            run_cached(&last, &config, &mut [&mut cache]).f32().to_vec()
        };
        let one = step(1);
        assert!(one == step(2) && one == step(3));
    }

    #[test]
    fn forked_caches_do_not_influence_each_other() {
        let device = Device::cpu(1).unwrap();
        let config = sizes(2, 1, 8, None);
        let qkv = inputs(&config, 60, 1.0).map(|x| x.tensor(&device));
        let mut trunk = KvCache::new(&device, 1, 8);
        run_cached(&rows(&qkv, 0..20), &config, &mut [&mut trunk]);
        let snapshot = trunk.clone();
        let mut fork = trunk.clone();
        let by_fork = run_cached(&rows(&qkv, 20..25), &config, &mut [&mut fork]);
        let by_trunk = run_cached(&rows(&qkv, 40..60), &config, &mut [&mut trunk]);
        assert_eq!((snapshot.n_tok(), fork.n_tok(), trunk.n_tok()), (20, 25, 40));
        for (range, want) in [(20..25, by_fork), (40..60, by_trunk)] {
            let mut cache = KvCache::new(&device, 1, 8);
            run_cached(&rows(&qkv, 0..20), &config, &mut [&mut cache]);
            let y = run_cached(&rows(&qkv, range), &config, &mut [&mut cache]);
            assert_eq!(y.f32(), want.f32());
        }
        assert_eq!(snapshot.keys(), &qkv[1].f32()[..20 * 8]);
        assert_eq!(snapshot.values(), &qkv[2].f32()[..20 * 8]);
    }

    #[test]
    fn a_truncated_cache_continues_as_if_the_rest_had_never_been() {
        let device = Device::cpu(1).unwrap();
        let config = sizes(2, 1, 8, None);
        let qkv = inputs(&config, 60, 1.0).map(|x| x.tensor(&device));
        let mut cache = KvCache::new(&device, 1, 8);
        assert_eq!(cache.n_bytes(), 0);
        run_cached(&rows(&qkv, 0..20), &config, &mut [&mut cache]);
        let want = run_cached(&rows(&qkv, 20..60), &config, &mut [&mut cache.clone()]);
        run_cached(&rows(&qkv, 30..60), &config, &mut [&mut cache]);
        cache.truncate(20);
        let again = run_cached(&rows(&qkv, 20..60), &config, &mut [&mut cache]);
        assert_eq!(again.f32(), want.f32());
        assert!(cache.n_bytes() >= 2 * 60 * 8 * 4 && cache.n_bytes() <= 4 * 60 * 8 * 4);
    }

    #[test]
    #[should_panic(expected = "attention: gradients with a cache")]
    fn a_cache_and_a_gradient_exclude_each_other() {
        let device = Device::cpu(1).unwrap();
        let config = sizes(1, 1, 2, None);
        let tape = Tape::new();
        let x = tape.leaf(0, &Tensor::zeros(&device, &[1, 2]));
        let mut cache = KvCache::new(&device, 1, 2);
        let segments = Segments::from_lengths(&[1]);
        attention(&tape, &x, &x, &x, &config, &segments, Some(&mut [&mut cache]));
    }
}
