//! A few new tokens against a long cache: each cached row is read once, in memory order.

use super::*;

/// One new token and a range of the keys it sees.
pub(super) struct Reading<'a> {
    /// (n_head, d_head)
    pub q: &'a [f32],
    /// (n_key, n_kv_head * d_head)
    pub keys: &'a [f32],
    pub values: &'a [f32],
}

/// Attention of a few new tokens to long caches: what counts is to read each key and value once,
/// in the order in which they lie.
pub(super) fn step(q: &Tensor, config: &Attention, parts: Vec<Part>) {
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
pub(super) fn merge(results: &[f32], y: &mut [f32], config: &Attention) {
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
pub(super) struct Read<'a> {
    pub reading: &'a Reading<'a>,
    pub config: &'a Attention,
    /// (n_head, N_RANGE)
    pub scores: &'a mut [f32],
    /// (n_head, d_head + 2)
    pub result: &'a mut [f32],
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
pub(super) fn add_weighted<S: Simd>(simd: S, p: &[f32], v: &[f32], width: usize, y: &mut [f32]) {
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
