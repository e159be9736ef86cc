//! Encoding of the formats of `k.rs`, to the bytes of ggml without an importance matrix.
//!
//! Each group of a block is searched for its own scale (and minimum) in f32. The largest of them
//! makes the f16 of the block; the others become integers under it. Then every number is rounded
//! again, with the scale that decoding will see. A group whose scale became zero keeps the q of the
//! search: decoding does not look at them, but the bytes are ggml's.

use super::k::{N_ELEM, PLANE, Q2K_BYTES, Q3K_BYTES, Q4K_BYTES, Q5K_BYTES, Q6K_BYTES, SCALES};
use super::search::{Found, Grid, Groups, TINY, affine, descent, in_lanes, nearest, symmetric};
use super::{f16_at, put_f16};

#[inline(always)]
pub(super) fn encode_q2k(x: &[f32; N_ELEM], block: &mut [u8; Q2K_BYTES]) {
    let lanes: Groups<16, 16> = in_lanes(x);
    let weights = lanes.map(|row| row.map(f32::abs));
    let grid = Grid { q_max: 3, first: -0.5, n_steps: 15 };
    let Found { scale, min, mut q } = affine(&lanes, &weights, grid, f32::abs);
    let (max_scale, max_min) = (largest(&scale), largest(&min));
    put_f16::<80>(block, max_scale / 15.0);
    put_f16::<82>(block, max_min / 15.0);
    let per_scale = if max_scale > 0.0 { 15.0 / max_scale } else { 0.0 };
    let per_min = if max_min > 0.0 { 15.0 / max_min } else { 0.0 };
    let (d, m) = (f16_at::<80>(block), f16_at::<82>(block));
    for group in 0..16 {
        let both = nearest(per_scale * scale[group]) | nearest(per_min * min[group]) << 4;
        block[group] = both as u8;
        let (s, t) = (block[group] & 15, block[group] >> 4);
        let (ds, mt) = (d * s as f32, m * t as f32);
        requantise::<16>(group, x, &mut q, |x| nearest((x + mt) / ds).clamp(0, 3), ds);
    }
    put_two_bits(&q, &mut block[16..80]);
}

#[inline(always)]
pub(super) fn encode_q3k(x: &[f32; N_ELEM], block: &mut [u8; Q3K_BYTES]) {
    let lanes: Groups<16, 16> = in_lanes(x);
    let Found { scale, mut q, .. } = descent::<4, 16, 16>(&lanes);
    let farthest = farthest(&scale);
    let per_scale = -32.0 / farthest;
    put_f16::<108>(block, if farthest == 0.0 { 0.0 } else { 1.0 / per_scale });
    let d = f16_at::<108>(block);
    let mut scales = [0; SCALES];
    for group in 0..16 {
        let s = nearest(per_scale * scale[group]) as i8;
        // Where there is no scale at all, the bits are clear rather than those of zero.
        let s = if farthest == 0.0 { 0 } else { s.clamp(-32, 31) + 32 } as u8;
        scales[group % 8] |= (s & 15) << (group / 8 * 4);
        scales[8 + group % 4] |= s >> 4 << (group / 4 * 2);
        let ds = d * (s as i32 - 32) as f32;
        requantise::<16>(group, x, &mut q, |x| nearest(x / ds).clamp(-4, 3) + 4, ds);
    }
    block[96..108].copy_from_slice(&scales);
    put_upper_bits::<2>(&q, &mut block[..32]);
    put_two_bits(&q, &mut block[32..96]);
}

#[inline(always)]
pub(super) fn encode_q4k(x: &[f32; N_ELEM], block: &mut [u8; Q4K_BYTES]) {
    let grid = Grid { q_max: 15, first: -1.0, n_steps: 20 };
    let (head, q) = affine_block(x, grid);
    block[..16].copy_from_slice(&head);
    put_four_bits(&q, &mut block[16..]);
}

#[inline(always)]
pub(super) fn encode_q5k(x: &[f32; N_ELEM], block: &mut [u8; Q5K_BYTES]) {
    let grid = Grid { q_max: 31, first: -0.5, n_steps: 15 };
    let (head, q) = affine_block(x, grid);
    block[..16].copy_from_slice(&head);
    put_upper_bits::<4>(&q, &mut block[16..48]);
    put_four_bits(&q, &mut block[48..]);
}

/// What Q4K and Q5K share: d, m and the packed scales; and q.
#[inline(always)]
fn affine_block(x: &[f32; N_ELEM], grid: Grid) -> ([u8; 4 + SCALES], [i32; N_ELEM]) {
    let lanes: Groups<8, PLANE> = in_lanes(x);
    let mut sum_xx = [0.0; 8];
    for row in &lanes {
        for l in 0..8 {
            sum_xx[l] += row[l] * row[l];
        }
    }
    // Large numbers weigh more, small ones not nothing.
    let rms = sum_xx.map(|sum: f32| (sum / PLANE as f32).sqrt());
    let weights = lanes.map(|row| std::array::from_fn(|l| rms[l] + row[l].abs()));
    let Found { scale, min, mut q } = affine(&lanes, &weights, grid, |x| x * x);
    let (max_scale, max_min) = (largest(&scale), largest(&min));
    let mut head = [0; 4 + SCALES];
    put_f16::<0>(&mut head, max_scale / 63.0);
    put_f16::<2>(&mut head, max_min / 63.0);
    let (d, m) = (f16_at::<0>(&head), f16_at::<2>(&head));
    let per_scale = if max_scale > 0.0 { 63.0 / max_scale } else { 0.0 };
    let per_min = if max_min > 0.0 { 63.0 / max_min } else { 0.0 };
    for group in 0..8 {
        let s = (nearest(per_scale * scale[group]) as u8).min(63);
        let t = (nearest(per_min * min[group]) as u8).min(63);
        put_scale_and_min(&mut head[4..], group, s, t);
        let (ds, mt) = (d * s as f32, m * t as f32);
        let round = |x| nearest((x + mt) / ds).clamp(0, grid.q_max);
        requantise::<PLANE>(group, x, &mut q, round, ds);
    }
    (head, q)
}

#[inline(always)]
pub(super) fn encode_q6k(x: &[f32; N_ELEM], block: &mut [u8; Q6K_BYTES]) {
    let lanes: Groups<16, 16> = in_lanes(x);
    let Found { scale, mut q, .. } = symmetric::<32, 16, 16>(&lanes);
    let farthest = farthest(&scale);
    *block = [0; Q6K_BYTES];
    if farthest.abs() < TINY {
        return;
    }
    let per_scale = -128.0 / farthest;
    put_f16::<208>(block, 1.0 / per_scale);
    let d = f16_at::<208>(block);
    for group in 0..16 {
        let s = nearest(per_scale * scale[group]).min(127) as i8;
        block[192 + group] = s as u8;
        let ds = d * s as f32;
        requantise::<16>(group, x, &mut q, |x| nearest(x / ds).clamp(-32, 31) + 32, ds);
    }
    let (low, rest) = block.split_at_mut(128);
    put_two_bits(&q.map(|q| q >> 4), &mut rest[..64]);
    for half in 0..2 {
        let q = &q[half * 128..][..128];
        for i in 0..64 {
            low[half * 64 + i] = (q[i] & 15 | (q[i + 64] & 15) << 4) as u8;
        }
    }
}

/// The largest number, zero if none is positive.
#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |largest, x| if *x > largest { *x } else { largest })
}

/// The number farthest from zero, the first if several.
#[inline(always)]
fn farthest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |farthest: f32, x| if x.abs() > farthest.abs() { *x } else { farthest })
}

/// Rounds the numbers of a group anew, unless its scale is zero.
#[inline(always)]
fn requantise<const GROUP: usize>(
    group: usize,
    x: &[f32; N_ELEM],
    q: &mut [i32; N_ELEM],
    round: impl Fn(f32) -> i32,
    scale: f32,
) {
    if scale == 0.0 {
        return;
    }
    let at = group * GROUP;
    for i in at..at + GROUP {
        q[i] = round(x[i]);
    }
}

/// The inverse of `scales_and_mins` of `k.rs`, for groups in ascending order.
#[inline(always)]
fn put_scale_and_min(scales: &mut [u8], idx: usize, s: u8, t: u8) {
    if idx < 4 {
        scales[idx] = s;
        scales[idx + 4] = t;
    } else {
        scales[idx + 4] = s & 15 | t << 4;
        scales[idx - 4] |= s >> 4 << 6;
        scales[idx] |= t >> 4 << 6;
    }
}

/// The low two bits of each number, in planes.
#[inline(always)]
fn put_two_bits(q: &[i32; N_ELEM], out: &mut [u8]) {
    for (q, out) in q.as_chunks::<128>().0.iter().zip(out.as_chunks_mut::<PLANE>().0) {
        for i in 0..PLANE {
            let bits = |plane: usize| (q[i + plane * PLANE] & 3) << (plane * 2);
            out[i] = (bits(0) | bits(1) | bits(2) | bits(3)) as u8;
        }
    }
}

/// The low four bits of each number, in planes.
#[inline(always)]
fn put_four_bits(q: &[i32; N_ELEM], out: &mut [u8]) {
    for (q, out) in q.as_chunks::<64>().0.iter().zip(out.as_chunks_mut::<PLANE>().0) {
        for i in 0..PLANE {
            out[i] = (q[i] & 15 | (q[i + PLANE] & 15) << 4) as u8;
        }
    }
}

/// Bit `BIT` of each number, in planes.
#[inline(always)]
fn put_upper_bits<const BIT: usize>(q: &[i32; N_ELEM], out: &mut [u8]) {
    out.fill(0);
    for (plane, q) in q.as_chunks::<PLANE>().0.iter().enumerate() {
        for i in 0..PLANE {
            out[i] |= ((q[i] >> BIT & 1) << plane) as u8;
        }
    }
}
