//! A few new tokens against a long cache: each cached row is read once, in memory order.
//!
//! The heads that share a key-value head are taken up together, a few rows at a time: a row is
//! loaded once for all of them. Every dot product and every sum over keys has its own accumulator
//! and its own fixed order, whatever is taken up beside it.

use super::*;

/// New tokens of one sequence, whose keys and values are in the cache already, the tokens before
/// them, and their rows of the result.
pub(super) type Few<'a> = (Segment, &'a KvCache, usize, &'a mut [f32]);

/// One new token and some of the keys it sees, of one page.
struct Reading<'a> {
    /// (n_head, d_head)
    q: &'a [f32],
    cache: &'a KvCache,
    keys: Range<usize>,
}

/// Attention of a few new tokens to long caches: what counts is to read each key and value once,
/// in the order in which they lie.
pub(super) fn step(q: &Tensor, config: &Attention, parts: Vec<Few>) {
    let cpu = q.device().expect_cpu();
    let q_width = config.q_width();
    let mut readings = Vec::new();
    let mut rows = Vec::new();
    for (segment, cache, n_past, y) in parts {
        for (tok, y) in y.chunks_mut(q_width).enumerate() {
            let q = &q.f32()[(segment.start + tok) * q_width..][..q_width];
            let n_before = readings.len();
            let seen = config.seen(&(n_past + tok..n_past + tok + 1));
            readings.extend(runs(seen, N_READ).map(|keys| Reading { q, cache, keys }));
            rows.push((n_before..readings.len(), y));
        }
    }
    // How readings are dealt out does not change what each of them gives.
    let n_key: usize = readings.iter().map(|reading| reading.keys.len()).sum();
    let n_task = (n_key * config.kv_width() / STEP_PIECE).max(1);
    let per_task = readings.len().div_ceil(n_task).max(1);
    let d_result = config.n_head * (config.d_head + 2);
    let n_scratch = config.n_head * N_READ + N_ROW * config.kv_width();
    let mut results = Tensor::uninit(q.device(), &[readings.len(), d_result]);
    let tasks = results.f32_mut().chunks_mut(per_task * d_result).enumerate().collect();
    cpu.share_out(tasks, |(idx, results): (usize, &mut [f32])| {
        let mut scratch = Tensor::uninit(q.device(), &[n_scratch]);
        let (scores, decoded) = scratch.f32_mut().split_at_mut(config.n_head * N_READ);
        let readings = readings[idx * per_task..].iter();
        for (reading, result) in readings.zip(results.chunks_mut(d_result)) {
            cpu.simd(Read { reading, config, scores, decoded, result });
        }
    });
    for (range, y) in rows {
        let results = &results.f32()[range.start * d_result..range.end * d_result];
        cpu.simd(Merge { results, y, config });
    }
}

/// Merges what the readings gave to a token, in the order of the keys.
struct Merge<'a> {
    results: &'a [f32],
    y: &'a mut [f32],
    config: &'a Attention,
}

impl WithSimd for Merge<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Merge { results, y, config } = self;
        let d_head = config.d_head;
        let d_result = config.n_head * (d_head + 2);
        for (head, y) in y.chunks_exact_mut(d_head).enumerate() {
            // Calls would be compiled without the instruction set: no closures on vectors here.
            let results = &results[head * (d_head + 2)..];
            let mut max = SCORE_MIN;
            for result in results.chunks(d_result) {
                max = max.max(result[d_head]);
            }
            let mut sum = F32s::zero(simd);
            y.fill(0.0);
            for result in results.chunks(d_result) {
                let fix = F32s::splat(simd, result[d_head] - max).exp2_of_negative();
                sum = fix.mul_add(F32s::splat(simd, result[d_head + 1]), sum);
                for at in (0..d_head).step_by(F32s::<S>::LANES) {
                    let x = F32s::load(simd, &result[at..d_head]);
                    fix.mul_add(x, F32s::load(simd, &y[at..])).store(&mut y[at..]);
                }
            }
            let inverse = F32s::splat(simd, 1.0) / sum;
            for at in (0..d_head).step_by(F32s::<S>::LANES) {
                (F32s::load(simd, &y[at..]) * inverse).store(&mut y[at..]);
            }
        }
    }
}

/// For each head: the weighted sum of the values, the largest score, the sum of the weights.
struct Read<'a> {
    reading: &'a Reading<'a>,
    config: &'a Attention,
    /// (n_head, N_READ)
    scores: &'a mut [f32],
    /// (N_ROW, n_kv_head * d_head), for what is not stored as f32.
    decoded: &'a mut [f32],
    /// (n_head, d_head + 2)
    result: &'a mut [f32],
}

impl WithSimd for Read<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Read { reading, config, scores, decoded, result } = self;
        let Reading { q, cache, keys } = reading;
        let d_head = config.d_head;
        let all = 0..config.kv_width();
        let rows = |at: usize| keys.start + at..keys.end.min(keys.start + at + N_ROW);
        for at in (0..keys.len()).step_by(N_ROW) {
            let rows = rows(at);
            let (n_row, view) = (rows.len(), cache.view(Side::Keys, rows, all.clone(), decoded));
            for heads in shared(config) {
                let k = &view.data[heads.start / config.n_group() * d_head..];
                let q = &q[heads.start * d_head..heads.end * d_head];
                let block = Dots { q, k, stride: view.stride, n_row, d_head };
                let scores = &mut scores[heads.start * N_READ + at..];
                match heads.len() {
                    1 => block.run::<S, 1>(simd, scores),
                    2 => block.run::<S, 2>(simd, scores),
                    _ => block.run::<S, 3>(simd, scores),
                }
            }
        }
        let scale = config.scale * LOG2_E;
        let results = result.chunks_exact_mut(d_head + 2);
        for (scores, result) in scores.chunks_exact_mut(N_READ).zip(results) {
            result[..d_head].fill(0.0);
            (result[d_head], result[d_head + 1]) = soften(simd, scores, keys.len(), scale);
        }
        for at in (0..keys.len()).step_by(N_ROW) {
            let rows = rows(at);
            let (n_row, view) = (rows.len(), cache.view(Side::Values, rows, all.clone(), decoded));
            for heads in shared(config) {
                let v = &view.data[heads.start / config.n_group() * d_head..];
                let p = &scores[heads.start * N_READ + at..];
                let y = &mut result[heads.start * (d_head + 2)..];
                let block = Sums { p, v, stride: view.stride, n_row, d_head };
                match heads.len() {
                    1 => block.run::<S, 1>(simd, y),
                    2 => block.run::<S, 2>(simd, y),
                    _ => block.run::<S, 3>(simd, y),
                }
            }
        }
    }
}

/// Runs of one to three heads that share a key-value head.
#[inline(always)]
fn shared(config: &Attention) -> impl Iterator<Item = Range<usize>> {
    let (n_head, n_group) = (config.n_head, config.n_group());
    let mut next = 0;
    std::iter::from_fn(move || {
        let left = n_group - next % n_group;
        // Four are two and two: a run of one would load a row for itself alone.
        let n = if left == 4 { 2 } else { left.min(3) };
        next += n;
        (next <= n_head).then(|| next - n..next)
    })
}

/// Scores to weights in place, over the first `n_key`; their maximum, and the sum of the weights.
#[inline(always)]
fn soften<S: Simd>(simd: S, scores: &mut [f32], n_key: usize, scale: f32) -> (f32, f32) {
    let lanes = F32s::<S>::LANES;
    // Lanes past the last key weigh nothing.
    let scores = &mut scores[..n_key.next_multiple_of(lanes)];
    scores[n_key..].fill(f32::NEG_INFINITY);
    let scale = F32s::splat(simd, scale);
    let mut max = F32s::splat(simd, SCORE_MIN);
    for score in scores.chunks_exact_mut(lanes) {
        let scaled = F32s::load(simd, score) * scale;
        max = max.max(scaled);
        scaled.store(score);
    }
    let max = max.max_lane();
    let mut sum = F32s::zero(simd);
    for score in scores.chunks_exact_mut(lanes) {
        let p = (F32s::load(simd, score) - F32s::splat(simd, max)).exp2_of_negative();
        sum = sum + p;
        p.store(score);
    }
    (max, sum.sum())
}

/// Rows that dot products take up at a time.
const N_DOT: usize = 4;

/// `scores[h][row] = q[h] . k[row]`
struct Dots<'a> {
    /// Heads one after the other.
    q: &'a [f32],
    /// Rows `stride` numbers apart.
    k: &'a [f32],
    stride: usize,
    n_row: usize,
    d_head: usize,
}

impl Dots<'_> {
    /// For `N` heads; scores of a head are `N_READ` numbers apart.
    #[inline(always)]
    fn run<S: Simd, const N: usize>(&self, simd: S, scores: &mut [f32]) {
        let n_whole = self.n_row - self.n_row % N_DOT;
        for row in (0..n_whole).step_by(N_DOT) {
            self.block::<S, N, N_DOT>(simd, row, scores);
        }
        for row in n_whole..self.n_row {
            self.block::<S, N, 1>(simd, row, scores);
        }
    }

    #[inline(always)]
    fn block<S: Simd, const N: usize, const R: usize>(
        &self,
        simd: S,
        row: usize,
        scores: &mut [f32],
    ) {
        let (lanes, d_head) = (F32s::<S>::LANES, self.d_head);
        let q: [&[f32]; N] = std::array::from_fn(|h| &self.q[h * d_head..][..d_head]);
        let k: [&[f32]; R] = std::array::from_fn(|r| &self.k[(row + r) * self.stride..][..d_head]);
        let mut sums = [[F32s::zero(simd); R]; N];
        let n_whole = d_head - d_head % lanes;
        for at in (0..n_whole).step_by(lanes) {
            let k: [F32s<S>; R] = std::array::from_fn(|r| F32s::load(simd, &k[r][at..at + lanes]));
            for h in 0..N {
                let q = F32s::load(simd, &q[h][at..at + lanes]);
                for r in 0..R {
                    sums[h][r] = q.mul_add(k[r], sums[h][r]);
                }
            }
        }
        if n_whole < d_head {
            for h in 0..N {
                let q = F32s::load(simd, &q[h][n_whole..]);
                for r in 0..R {
                    sums[h][r] = q.mul_add(F32s::load(simd, &k[r][n_whole..]), sums[h][r]);
                }
            }
        }
        for h in 0..N {
            for r in 0..R {
                scores[h * N_READ + row + r] = sums[h][r].sum();
            }
        }
    }
}

/// `y[h] += sum_row p[h][row] v[row]`
struct Sums<'a> {
    /// Weights of a head are `N_READ` numbers apart.
    p: &'a [f32],
    /// Rows `stride` numbers apart.
    v: &'a [f32],
    stride: usize,
    n_row: usize,
    d_head: usize,
}

impl Sums<'_> {
    /// For `N` heads; those of `y` are `d_head + 2` numbers apart.
    #[inline(always)]
    fn run<S: Simd, const N: usize>(&self, simd: S, y: &mut [f32]) {
        let lanes = F32s::<S>::LANES;
        let n_wide = self.d_head - self.d_head % (4 * lanes);
        for at in (0..n_wide).step_by(4 * lanes) {
            self.block::<S, N, 4>(simd, at, lanes, y);
        }
        for at in (n_wide..self.d_head).step_by(lanes) {
            self.block::<S, N, 1>(simd, at, lanes.min(self.d_head - at), y);
        }
    }

    /// `C` runs of `len` columns, each at most a vector.
    #[inline(always)]
    fn block<S: Simd, const N: usize, const C: usize>(
        &self,
        simd: S,
        at: usize,
        len: usize,
        y: &mut [f32],
    ) {
        let d_head = self.d_head;
        let mut sums = [[F32s::zero(simd); C]; N];
        for h in 0..N {
            let y = &y[h * (d_head + 2) + at..][..C * len];
            sums[h] = std::array::from_fn(|c| F32s::load(simd, &y[c * len..][..len]));
        }
        for row in 0..self.n_row {
            let v = &self.v[row * self.stride + at..][..C * len];
            let v: [F32s<S>; C] = std::array::from_fn(|c| F32s::load(simd, &v[c * len..][..len]));
            for h in 0..N {
                let p = F32s::splat(simd, self.p[h * N_READ + row]);
                for c in 0..C {
                    sums[h][c] = p.mul_add(v[c], sums[h][c]);
                }
            }
        }
        for h in 0..N {
            let y = &mut y[h * (d_head + 2) + at..][..C * len];
            for c in 0..C {
                sums[h][c].store(&mut y[c * len..][..len]);
            }
        }
    }
}
