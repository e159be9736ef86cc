//! Formats with 256 numbers in groups of 16 or 32: a small integer scale (and minimum) for each
//! group, under f16 scales for the block.
//!
//! | format | bytes of a block, in order                                           |
//! |--------|----------------------------------------------------------------------|
//! | Q2K    | scales: 16 (s low, t high), q: 64, d: 2, m: 2                        |
//! | Q3K    | third bits: 32, q: 64, scales: 12, d: 2                              |
//! | Q4K    | d: 2, m: 2, scales: 12, q: 128                                       |
//! | Q5K    | d: 2, m: 2, scales: 12, fifth bits: 32, q: 128                       |
//! | Q6K    | q: 128, upper two bits: 64, scales: 16, d: 2                         |
//!
//! Small q are kept in planes: with 2 bits, byte i of a run of 32 holds numbers i, i + 32, i + 64
//! and i + 96 of 128, lowest bits first; with 4 bits, numbers i and i + 32 of 64 (Q6K: 64 bytes,
//! numbers i and i + 64 of 128). Single bits: bit j of byte i belongs to number `i + 32 j` of 256.
//!
//! Not here: encoding, which is in `k_encode.rs`.

use super::f16_at;

pub(super) const N_ELEM: usize = 256;
/// Numbers in a plane: those that sit at the same bits of successive bytes.
pub(super) const PLANE: usize = 32;
/// Bytes of packed 6-bit scales.
pub(super) const SCALES: usize = 12;

pub(super) const Q2K_BYTES: usize = 16 + 64 + 4;
pub(super) const Q3K_BYTES: usize = 32 + 64 + SCALES + 2;
pub(super) const Q4K_BYTES: usize = 4 + SCALES + 128;
pub(super) const Q5K_BYTES: usize = 4 + SCALES + 32 + 128;
pub(super) const Q6K_BYTES: usize = 128 + 64 + 16 + 2;

#[inline(always)]
pub(super) fn decode_q2k(block: &[u8; Q2K_BYTES], out: &mut [f32; N_ELEM]) {
    let (scales, rest) = block.split_at(16);
    let (q, _) = rest.split_at(64);
    let (d, m) = (f16_at::<80>(block), f16_at::<82>(block));
    for (plane_idx, out) in out.as_chunks_mut::<PLANE>().0.iter_mut().enumerate() {
        let q = &q[plane_idx / 4 * PLANE..][..PLANE];
        let shift = plane_idx % 4 * 2;
        let group = |half: usize| {
            let scale = scales[plane_idx * 2 + half] as i32;
            (d * (scale & 15) as f32, m * (scale >> 4) as f32)
        };
        let groups = [group(0), group(1)];
        for i in 0..PLANE {
            let (ds, mt) = groups[i / 16];
            out[i] = ds * ((q[i] as i32 >> shift) & 3) as f32 - mt;
        }
    }
}

#[inline(always)]
pub(super) fn decode_q3k(block: &[u8; Q3K_BYTES], out: &mut [f32; N_ELEM]) {
    let (third, rest) = block.split_at(32);
    let (q, rest) = rest.split_at(64);
    let d = f16_at::<108>(block);
    for (plane_idx, out) in out.as_chunks_mut::<PLANE>().0.iter_mut().enumerate() {
        let q = &q[plane_idx / 4 * PLANE..][..PLANE];
        let shift = plane_idx % 4 * 2;
        for (half, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let ds = d * (scale_q3k(&rest[..SCALES], plane_idx * 2 + half) - 32) as f32;
            for i in 0..16 {
                let at = half * 16 + i;
                let third = (third[at] as i32 >> plane_idx) & 1;
                let q = (q[at] as i32 >> shift) & 3 | third << 2;
                out[i] = ds * (q - 4) as f32;
            }
        }
    }
}

/// The 6-bit scale of group `idx` of 16: its low four bits in the first eight bytes, groups 8 to 15
/// in the high halves; its upper two in the last four bytes, four groups to a byte.
#[inline(always)]
pub(super) fn scale_q3k(scales: &[u8], idx: usize) -> i32 {
    let low = (scales[idx % 8] >> (idx / 8 * 4)) & 15;
    let high = (scales[8 + idx % 4] >> (idx / 4 * 2)) & 3;
    (low | high << 4) as i32
}

/// Q4K, and Q5K with fifth bits.
#[inline(always)]
pub(super) fn decode_q4k_or_q5k<const BYTES: usize>(block: &[u8; BYTES], out: &mut [f32; N_ELEM]) {
    let (d, m) = (f16_at::<0>(block), f16_at::<2>(block));
    let (scales, rest) = block[4..].split_first_chunk().expect("a block has scales");
    let (s, t) = scales_and_mins(scales);
    let (s, t) = (s.to_le_bytes(), t.to_le_bytes());
    let (fifth, q) = rest.split_at(BYTES - Q4K_BYTES);
    for (plane_idx, out) in out.as_chunks_mut::<PLANE>().0.iter_mut().enumerate() {
        let (ds, mt) = (d * s[plane_idx] as f32, m * t[plane_idx] as f32);
        let q = &q[plane_idx / 2 * PLANE..][..PLANE];
        let shift = plane_idx % 2 * 4;
        for i in 0..PLANE {
            let has_fifth = BYTES == Q5K_BYTES;
            let fifth = if has_fifth { (fifth[i] as i32 >> plane_idx) & 1 } else { 0 };
            let q = (q[i] as i32 >> shift) & 15 | fifth << 4;
            out[i] = ds * q as f32 - mt;
        }
    }
}

#[inline(always)]
pub(super) fn decode_q6k(block: &[u8; Q6K_BYTES], out: &mut [f32; N_ELEM]) {
    let (low, rest) = block.split_at(128);
    let (high, scales) = rest.split_at(64);
    let d = f16_at::<208>(block);
    for (plane_idx, out) in out.as_chunks_mut::<PLANE>().0.iter_mut().enumerate() {
        // Planes 0 to 3 are the first 128 numbers: 0 and 1 in the low halves of their bytes.
        let (half, plane) = (plane_idx / 4, plane_idx % 4);
        let low = &low[half * 64 + plane % 2 * PLANE..][..PLANE];
        let high = &high[half * PLANE..][..PLANE];
        for (part, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
            let ds = d * (scales[plane_idx * 2 + part] as i8) as f32;
            for i in 0..16 {
                let at = part * 16 + i;
                let low = (low[at] as i32 >> (plane / 2 * 4)) & 15;
                let high = (high[at] as i32 >> (plane * 2)) & 3;
                out[i] = ds * ((low | high << 4) - 32) as f32;
            }
        }
    }
}

/// All eight 6-bit scales and all eight minima of Q4K and Q5K, a byte each.
///
/// Groups 0 to 3 have theirs in the low six bits of bytes 0 to 3 and 4 to 7; groups 4 to 7 have
/// the upper two bits there and the low four in bytes 8 to 11, scale low, minimum high.
#[inline(always)]
pub(super) fn scales_and_mins(scales: &[u8; SCALES]) -> (u64, u64) {
    let word = |from: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| scales[from + i]));
    let (low_s, low_t, rest) = (word(0), word(4), word(8));
    let six = 0x3f3f_3f3f;
    let upper = |x: u32| (x >> 6 & 0x0303_0303) << 4;
    let s = [low_s & six, rest & 0x0f0f_0f0f | upper(low_s)];
    let t = [low_t & six, rest >> 4 & 0x0f0f_0f0f | upper(low_t)];
    let both = |x: [u32; 2]| x[0] as u64 | (x[1] as u64) << 32;
    (both(s), both(t))
}
