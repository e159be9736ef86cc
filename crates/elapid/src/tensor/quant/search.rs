//! The searches that give the groups of a block their scales, as ggml does them.
//!
//! A scale taken from the extremes of a group is seldom the best. Each search tries a few and keeps
//! the one with the least weighted error:
//!
//! | search      | a number is   | tries                                                        |
//! |-------------|---------------|--------------------------------------------------------------|
//! | `affine`    | `s q - m`     | a grid of scales; for the q of each, s and m by least squares|
//! | `symmetric` | `s q`         | a grid of scales; for the q of each, s by least squares      |
//! | `descent`   | `s q`         | from the extremes, one q at a time, five rounds              |
//!
//! All groups of a block are searched at once, one to a lane: row i of `Groups` holds number i of
//! every group. Within a lane each sum runs in ggml's order, so the result has the same bits, while
//! the compiler makes vectors across the lanes. Lanes differ in what they keep, never in what they
//! do: a branch there is a choice between two numbers here.
//!
//! Not here: importance matrices; the rounding of scales to integers under the scale of the block.

use super::k::N_ELEM;

/// Number i of each group, for each i.
pub(super) type Groups<const LANES: usize, const GROUP: usize> = [[f32; LANES]; GROUP];

/// Groups whose numbers are all smaller have scale zero.
pub(super) const TINY: f32 = 1e-15;

/// What is found for each group.
pub(super) struct Found<const LANES: usize> {
    pub(super) scale: [f32; LANES],
    /// What is taken away from `s q`; zero for the searches without it.
    pub(super) min: [f32; LANES],
    /// In the order of the block.
    pub(super) q: [i32; N_ELEM],
}

/// Which scales `affine` tries: those that would spread the group over `q_max + first`,
/// `q_max + first + 0.1`, ... steps.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) q_max: i32,
    pub(super) first: f32,
    pub(super) n_steps: usize,
}

/// Rounds to nearest, ties to even, through the digits that a large summand pushes out.
///
/// What is too large, infinite or NaN becomes some integer; callers clamp.
#[inline(always)]
pub(super) fn nearest(x: f32) -> i32 {
    ((x + 12_582_912.0).to_bits() & 0x7f_ffff) as i32 - 0x40_0000
}

/// The numbers of a block with its groups in lanes.
#[inline(always)]
pub(super) fn in_lanes<const LANES: usize, const GROUP: usize>(
    x: &[f32; N_ELEM],
) -> Groups<LANES, GROUP> {
    let mut out = [[0.0; LANES]; GROUP];
    for lane in 0..LANES {
        for i in 0..GROUP {
            out[i][lane] = x[lane * GROUP + i];
        }
    }
    out
}

/// Back from lanes, `zero` added, but 0 in the lanes where `is_void`.
#[inline(always)]
fn in_order<const LANES: usize, const GROUP: usize>(
    q: &Groups<LANES, GROUP>,
    zero: i32,
    is_void: impl Fn(usize) -> bool,
) -> [i32; N_ELEM] {
    let mut out = [0; N_ELEM];
    for lane in (0..LANES).filter(|lane| !is_void(*lane)) {
        for i in 0..GROUP {
            out[lane * GROUP + i] = q[i][lane] as i32 + zero;
        }
    }
    out
}

/// Scale and minimum; `penalty` of a difference, times its weight, is what an error costs.
#[inline(always)]
pub(super) fn affine<const LANES: usize, const GROUP: usize>(
    x: &Groups<LANES, GROUP>,
    weights: &Groups<LANES, GROUP>,
    grid: Grid,
    penalty: impl Fn(f32) -> f32 + Copy,
) -> Found<LANES> {
    let (mut least, mut largest) = (x[0], x[0]);
    let (mut sum_w, mut sum_x) = ([0.0; LANES], [0.0; LANES]);
    for (x, w) in x.iter().zip(weights) {
        for l in 0..LANES {
            least[l] = if x[l] < least[l] { x[l] } else { least[l] };
            largest[l] = if x[l] > largest[l] { x[l] } else { largest[l] };
            sum_w[l] += w[l];
            sum_x[l] += w[l] * x[l];
        }
    }
    for l in 0..LANES {
        least[l] = if least[l] > 0.0 { 0.0 } else { least[l] };
    }
    let mut min = least;
    let mut per_x: [f32; LANES] =
        std::array::from_fn(|l| grid.q_max as f32 / (largest[l] - min[l]));
    let mut scale = per_x.map(|per_x| 1.0 / per_x);
    let mut q = [[0.0; LANES]; GROUP];
    round(x, &min, &per_x, grid.q_max, &mut q);
    let mut error = total_error((x, weights), &scale, &min, &q, penalty);
    let mut tried = [[0.0; LANES]; GROUP];
    for step in 0..=grid.n_steps {
        for l in 0..LANES {
            let spread = grid.first + 0.1 * step as f32 + grid.q_max as f32;
            // From the minimum found so far, not from the least number: ggml does so.
            per_x[l] = spread / (largest[l] - min[l]);
        }
        round(x, &min, &per_x, grid.q_max, &mut tried);
        let (new_scale, new_min, valid) = least_squares(x, weights, (&sum_w, &sum_x), &tried);
        let mut new_error = total_error((x, weights), &new_scale, &new_min, &tried, penalty);
        for l in 0..LANES {
            new_error[l] = if valid[l] > 0.0 { new_error[l] } else { f32::INFINITY };
        }
        for (q, tried) in q.iter_mut().zip(&tried) {
            for l in 0..LANES {
                q[l] = if new_error[l] < error[l] { tried[l] } else { q[l] };
            }
        }
        for l in 0..LANES {
            scale[l] = if new_error[l] < error[l] { new_scale[l] } else { scale[l] };
            min[l] = if new_error[l] < error[l] { new_min[l] } else { min[l] };
            error[l] = if new_error[l] < error[l] { new_error[l] } else { error[l] };
        }
    }
    let is_flat = |l: usize| largest[l] == least[l];
    Found {
        scale: std::array::from_fn(|l| if is_flat(l) { 0.0 } else { scale[l] }),
        min: min.map(|min| -min),
        q: in_order(&q, 0, is_flat),
    }
}

/// The q of each number, by `(x - min) per_x`.
#[inline(always)]
fn round<const LANES: usize, const GROUP: usize>(
    x: &Groups<LANES, GROUP>,
    min: &[f32; LANES],
    per_x: &[f32; LANES],
    q_max: i32,
    q: &mut Groups<LANES, GROUP>,
) {
    for (x, q) in x.iter().zip(q) {
        for l in 0..LANES {
            q[l] = nearest(per_x[l] * (x[l] - min[l])).clamp(0, q_max) as f32;
        }
    }
}

/// Scale and minimum that fit these q best, the minimum not above zero; and the determinant, which
/// is positive where there is a fit.
#[inline(always)]
fn least_squares<const LANES: usize, const GROUP: usize>(
    x: &Groups<LANES, GROUP>,
    weights: &Groups<LANES, GROUP>,
    (sum_w, sum_x): (&[f32; LANES], &[f32; LANES]),
    q: &Groups<LANES, GROUP>,
) -> ([f32; LANES], [f32; LANES], [f32; LANES]) {
    let [mut sum_q, mut sum_qq, mut sum_xq] = [[0.0; LANES]; 3];
    for i in 0..GROUP {
        for l in 0..LANES {
            let wq = weights[i][l] * q[i][l];
            sum_q[l] += wq;
            sum_qq[l] += wq * q[i][l];
            sum_xq[l] += wq * x[i][l];
        }
    }
    let [mut scale, mut min, mut det] = [[0.0; LANES]; 3];
    for l in 0..LANES {
        det[l] = sum_w[l] * sum_qq[l] - sum_q[l] * sum_q[l];
        let free_scale = (sum_w[l] * sum_xq[l] - sum_x[l] * sum_q[l]) / det[l];
        let free_min = (sum_qq[l] * sum_x[l] - sum_q[l] * sum_xq[l]) / det[l];
        scale[l] = if free_min > 0.0 { sum_xq[l] / sum_qq[l] } else { free_scale };
        min[l] = if free_min > 0.0 { 0.0 } else { free_min };
    }
    (scale, min, det)
}

/// What the errors of all numbers cost.
#[inline(always)]
fn total_error<const LANES: usize, const GROUP: usize>(
    (x, weights): (&Groups<LANES, GROUP>, &Groups<LANES, GROUP>),
    scale: &[f32; LANES],
    min: &[f32; LANES],
    q: &Groups<LANES, GROUP>,
    penalty: impl Fn(f32) -> f32,
) -> [f32; LANES] {
    let mut sum = [0.0; LANES];
    for i in 0..GROUP {
        for l in 0..LANES {
            sum[l] += weights[i][l] * penalty(scale[l] * q[i][l] + min[l] - x[i][l]);
        }
    }
    sum
}

/// The number farthest from zero of each group, the first if several, and its magnitude.
#[inline(always)]
fn farthest<const LANES: usize, const GROUP: usize>(
    x: &Groups<LANES, GROUP>,
) -> ([f32; LANES], [f32; LANES]) {
    let [mut at, mut size] = [[0.0; LANES]; 2];
    for x in x {
        for l in 0..LANES {
            at[l] = if x[l].abs() > size[l] { x[l] } else { at[l] };
            size[l] = if x[l].abs() > size[l] { x[l].abs() } else { size[l] };
        }
    }
    (at, size)
}

/// Scale alone, q from `-ZERO` to `ZERO - 1`, weights `x^2`; the q returned have `ZERO` added.
#[inline(always)]
pub(super) fn symmetric<const ZERO: i32, const LANES: usize, const GROUP: usize>(
    x: &Groups<LANES, GROUP>,
) -> Found<LANES> {
    let (at, size) = farthest(x);
    let [mut scale, mut gain] = [[0.0; LANES]; 2];
    let mut q = [[0.0; LANES]; GROUP];
    let mut tried = [[0.0; LANES]; GROUP];
    // The extreme alone first: with it come values to beat.
    for step in [0, -9, -8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7, 8, 9] {
        let per_x = at.map(|at| -(ZERO as f32 + 0.1 * step as f32) / at);
        let (sum_xq, sum_qq) = project::<ZERO, LANES, GROUP>(x, &per_x, &mut tried);
        let mut wins = [0.0f32; LANES];
        for l in 0..LANES {
            let is_better = sum_qq[l] > 0.0 && sum_xq[l] * sum_xq[l] > gain[l] * sum_qq[l];
            wins[l] = if is_better || step == 0 { 1.0 } else { 0.0 };
        }
        for (q, tried) in q.iter_mut().zip(&tried) {
            for l in 0..LANES {
                q[l] = if wins[l] > 0.0 { tried[l] } else { q[l] };
            }
        }
        for l in 0..LANES {
            let new_scale = if sum_qq[l] != 0.0 { sum_xq[l] / sum_qq[l] } else { 0.0 };
            scale[l] = if wins[l] > 0.0 { new_scale } else { scale[l] };
            gain[l] = if wins[l] > 0.0 { new_scale * sum_xq[l] } else { gain[l] };
        }
    }
    found(scale, &size, &q, ZERO)
}

/// The q of each number by `x per_x`, and the sums `x^2 x q` and `x^2 q^2` with them.
#[inline(always)]
fn project<const ZERO: i32, const LANES: usize, const GROUP: usize>(
    x: &Groups<LANES, GROUP>,
    per_x: &[f32; LANES],
    q: &mut Groups<LANES, GROUP>,
) -> ([f32; LANES], [f32; LANES]) {
    let [mut sum_xq, mut sum_qq] = [[0.0; LANES]; 2];
    for (x, q) in x.iter().zip(q) {
        for l in 0..LANES {
            q[l] = nearest(per_x[l] * x[l]).clamp(-ZERO, ZERO - 1) as f32;
            let w = x[l] * x[l];
            sum_xq[l] += w * x[l] * q[l];
            sum_qq[l] += w * q[l] * q[l];
        }
    }
    (sum_xq, sum_qq)
}

/// As `symmetric`, but each q in turn is moved to where the others want it, while that helps.
#[inline(always)]
pub(super) fn descent<const ZERO: i32, const LANES: usize, const GROUP: usize>(
    x: &Groups<LANES, GROUP>,
) -> Found<LANES> {
    let (at, size) = farthest(x);
    let per_x = at.map(|at| -(ZERO as f32) / at);
    let mut q = [[0.0; LANES]; GROUP];
    let (mut sum_xq, mut sum_qq) = project::<ZERO, LANES, GROUP>(x, &per_x, &mut q);
    // A lane that has come to rest stays there, so the lanes need no counts of their own.
    for _ in 0..5 {
        let before = q;
        for (x, q) in x.iter().zip(&mut q) {
            for l in 0..LANES {
                let w = x[l] * x[l];
                let rest_xq = sum_xq[l] - w * x[l] * q[l];
                let rest_qq = sum_qq[l] - w * q[l] * q[l];
                let new_q = nearest(x[l] * rest_qq / rest_xq).clamp(-ZERO, ZERO - 1) as f32;
                let new_xq = rest_xq + w * x[l] * new_q;
                let new_qq = rest_qq + w * new_q * new_q;
                let is_better = new_xq * new_xq * sum_qq[l] > sum_xq[l] * sum_xq[l] * new_qq;
                let moves = is_better & (rest_xq > 0.0) & (new_q != q[l]) & (new_qq > 0.0);
                q[l] = if moves { new_q } else { q[l] };
                sum_xq[l] = if moves { new_xq } else { sum_xq[l] };
                sum_qq[l] = if moves { new_qq } else { sum_qq[l] };
            }
        }
        if q == before {
            break;
        }
    }
    let ratio = |l: usize| if sum_qq[l] > 0.0 { sum_xq[l] / sum_qq[l] } else { 0.0 };
    found(std::array::from_fn(ratio), &size, &q, ZERO)
}

/// What a search without minimum found; groups of tiny numbers have scale 0 and q 0.
#[inline(always)]
fn found<const LANES: usize, const GROUP: usize>(
    scale: [f32; LANES],
    size: &[f32; LANES],
    q: &Groups<LANES, GROUP>,
    zero: i32,
) -> Found<LANES> {
    let is_tiny = |l: usize| size[l] < TINY;
    Found {
        scale: std::array::from_fn(|l| if is_tiny(l) { 0.0 } else { scale[l] }),
        min: [0.0; LANES],
        q: in_order(q, zero, is_tiny),
    }
}
