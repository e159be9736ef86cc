//! Backward of `attention`: inverts `forward` of `mod.rs`, whose header has the mathematics.

use super::*;

/// What forward leaves for backward.
pub(super) struct Saved {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub y: Tensor,
    pub log_sum: Tensor,
}

/// Inverts `forward`.
///
/// Tasks own keys, so `dk` and `dv` are summed in one place. What the tasks add to `dq` is kept
/// apart and summed last, in the order of the keys.
pub(super) fn backward(
    saved: &Saved,
    config: &Attention,
    segments: &Segments,
    (dy, wanted): (&Tensor, [bool; 3]),
) -> [Option<Tensor>; 3] {
    let device = dy.device();
    let cpu = match device {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => return gpu::backward(gpu, saved, config, segments, (dy, wanted)),
    };
    let sequences = sequences(&saved.k, &saved.v, segments);
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
    let dq = wanted[0].then(|| gather_dq(config, &sequences, &plan, &dq_parts));
    [dq, wanted[1].then_some(dk), wanted[2].then_some(dv)]
}

/// A range of keys of a sequence in backward, and the queries that may see it.
pub(super) struct Chunk {
    pub keys: Range<usize>,
    pub queries: Range<usize>,
    /// The first of its rows in the tensor that keeps the parts of `dq`.
    pub at: usize,
}

/// Cuts a sequence into chunks: by its length, whatever else is in the batch.
pub(super) fn chunks(config: &Attention, n_tok: usize, at: &mut usize) -> Vec<Chunk> {
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
pub(super) struct Share<'a> {
    pub config: &'a Attention,
    pub sequence: Sequence<'a>,
    pub chunk: &'a Chunk,
    pub kv_head: usize,
    /// Which of dq, dk and dv somebody wants.
    pub wanted: [bool; 3],
    /// (queries, n_group * d_head)
    pub dq: &'a mut [f32],
    /// One run of `d_head` for each key.
    pub dk: Vec<&'a mut [f32]>,
    pub dv: Vec<&'a mut [f32]>,
}

pub(super) fn backward_share(saved: &Saved, dy: &Tensor, share: Share) {
    let Share { config, sequence, chunk, kv_head, wanted, dq, dk, dv } = share;
    let cpu = dy.device().expect_cpu();
    let (d_head, n_group) = (config.d_head, config.n_group());
    let n_sum = chunk.keys.len() * d_head;
    let lengths = [N_KEY * N_QUERY, N_KEY * N_QUERY, n_sum, n_sum];
    let mut scratch = Tensor::uninit(dy.device(), &[lengths.iter().sum()]);
    let [p, ds, dk_sum, dv_sum] = split(scratch.f32_mut(), lengths);
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
pub(super) struct Tile<'a> {
    pub queries: Queries<'a>,
    pub q: Mat<'a>,
    pub dy: Mat<'a>,
    pub log_sum: [f32; N_QUERY],
    /// `dy . y`
    pub e: [f32; N_QUERY],
}

/// Where a tile works and what it adds to.
pub(super) struct Sums<'a> {
    pub p: &'a mut [f32],
    pub ds: &'a mut [f32],
    pub dq: &'a mut [f32],
    pub dk: &'a mut [f32],
    pub dv: &'a mut [f32],
}

impl<'a> Tile<'a> {
    fn new(cpu: &Cpu, queries: Queries<'a>, saved: &'a Saved, dy: &'a Tensor) -> Tile<'a> {
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
        Tile { queries, q: queries.rows(&saved.q), dy: queries.rows(dy), log_sum, e }
    }

    /// Adds what the weights of `keys` pass on.
    fn backward(&self, cpu: &Cpu, keys: &Range<usize>, wanted: [bool; 3], sums: Sums) {
        let Sums { p, ds, dq, dk, dv } = sums;
        let Queries { config, n_query, .. } = self.queries;
        let Attention { d_head, scale, .. } = *config;
        let n_key = keys.len();
        let [wants_dq, wants_dk, wants_dv] = wanted;
        self.queries.scores(cpu, self.q, keys, (&mut *p, &mut []));
        let v = self.queries.kv_rows(Side::Values, keys, &mut []);
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
            let k = self.queries.kv_rows(Side::Keys, keys, &mut []);
            let dq = MatMut::strided(dq, n_query, d_head, config.n_group() * d_head);
            cpu.gemm(dq, 1.0, scale, ds.t(), k, Scope::Thread);
        }
    }
}

/// Scores to weights, and gradients of weights to gradients of unscaled scores, in place.
pub(super) struct Unweigh<'a> {
    pub tile: &'a Tile<'a>,
    pub p: &'a mut [f32],
    pub ds: &'a mut [f32],
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

/// Sums what the chunks of each sequence added to `dq`.
pub(super) fn gather_dq(
    config: &Attention,
    sequences: &[Sequence],
    plan: &[Vec<Chunk>],
    dq_parts: &Tensor,
) -> Tensor {
    let cpu = dq_parts.device().expect_cpu();
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
