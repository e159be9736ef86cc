//! Block formats: numbers stored in blocks of small integers with shared scales.
//!
//! Those of ggml, and NF4, which lives in memory only:
//!
//! | format | numbers | bytes | a number is                 |                                     |
//! |--------|---------|-------|-----------------------------|-------------------------------------|
//! | Q4_0   | 32      | 18    | `d (q - 8)`                 | q of 4 bits                         |
//! | Q4_1   | 32      | 20    | `d q + m`                   | q of 4 bits                         |
//! | Q5_0   | 32      | 22    | `d (q - 16)`                | q of 5 bits, the fifth kept apart   |
//! | Q5_1   | 32      | 24    | `d q + m`                   | q of 5 bits, the fifth kept apart   |
//! | Q8_0   | 32      | 34    | `d q`                       | q a signed byte                     |
//! | Q2K    | 256     | 84    | `(d s) q - (m t)`           | 16 groups; q 2 bits, s and t 4      |
//! | Q3K    | 256     | 110   | `(d (s - 32)) (q - 4)`      | 16 groups; q 3 bits, s 6            |
//! | Q4K    | 256     | 144   | `(d s) q - (m t)`           | 8 groups; q 4 bits, s and t 6       |
//! | Q5K    | 256     | 176   | `(d s) q - (m t)`           | 8 groups; q 5 bits, s and t 6       |
//! | Q6K    | 256     | 210   | `(d s) (q - 32)`            | 16 groups; q 6 bits, s a signed byte|
//! | Nf4    | 64      | 36    | `table[q] d`                | q of 4 bits; d is f32               |
//!
//! d and m are f16, one each per block; s and t are small integers, one each per group. Products
//! and sums are rounded to f32 one by one, in the order of the brackets, as ggml does: decoded
//! numbers have the same bits as there. Everything is little-endian.
//!
//! Encoding gives ggml's bytes too, without an importance matrix: its sums run in ggml's order, and
//! no product is fused with a sum. `mix` says which format each tensor of a model gets.
//!
//! `dot` multiplies matrices in blocks without decoding them.
//!
//! Not here: the importance-matrix formats (IQ), ternary and MX formats.

pub mod dot;
mod k;
mod k_encode;
mod legacy;
pub mod mix;
mod nf4;
mod search;

use pulp::{Simd, WithSimd};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockType {
    /// 4 bits, one scale for 32.
    Q4_0,
    /// 4 bits, scale and minimum for 32.
    Q4_1,
    /// 5 bits, one scale for 32.
    Q5_0,
    /// 5 bits, scale and minimum for 32.
    Q5_1,
    /// 8 bits, one scale for 32.
    Q8_0,
    /// 2 bits, scales and minima for 16 under scales for 256.
    Q2K,
    /// 3 bits, scales for 16 under a scale for 256.
    Q3K,
    /// 4 bits, scales and minima for 32 under scales for 256.
    Q4K,
    /// 5 bits, scales and minima for 32 under scales for 256.
    Q5K,
    /// 6 bits, scales for 16 under a scale for 256.
    Q6K,
    /// 4 bits into a table of normal quantiles, one scale for 64. In memory only.
    Nf4,
}

/// What is fixed about a format.
struct Facts {
    n_elem: usize,
    n_bytes: usize,
    name: &'static str,
    /// `None`: no GGUF file holds it.
    ggml_id: Option<u32>,
}

impl BlockType {
    /// Every format of ggml that is here.
    pub const ALL: [BlockType; 10] = [
        BlockType::Q4_0,
        BlockType::Q4_1,
        BlockType::Q5_0,
        BlockType::Q5_1,
        BlockType::Q8_0,
        BlockType::Q2K,
        BlockType::Q3K,
        BlockType::Q4K,
        BlockType::Q5K,
        BlockType::Q6K,
    ];

    fn facts(self) -> Facts {
        let (n_elem, n_bytes, name, ggml_id) = match self {
            BlockType::Q4_0 => (legacy::N_ELEM, legacy::Q4_0_BYTES, "q4_0", Some(2)),
            BlockType::Q4_1 => (legacy::N_ELEM, legacy::Q4_1_BYTES, "q4_1", Some(3)),
            BlockType::Q5_0 => (legacy::N_ELEM, legacy::Q5_0_BYTES, "q5_0", Some(6)),
            BlockType::Q5_1 => (legacy::N_ELEM, legacy::Q5_1_BYTES, "q5_1", Some(7)),
            BlockType::Q8_0 => (legacy::N_ELEM, legacy::Q8_0_BYTES, "q8_0", Some(8)),
            BlockType::Q2K => (k::N_ELEM, k::Q2K_BYTES, "q2_k", Some(10)),
            BlockType::Q3K => (k::N_ELEM, k::Q3K_BYTES, "q3_k", Some(11)),
            BlockType::Q4K => (k::N_ELEM, k::Q4K_BYTES, "q4_k", Some(12)),
            BlockType::Q5K => (k::N_ELEM, k::Q5K_BYTES, "q5_k", Some(13)),
            BlockType::Q6K => (k::N_ELEM, k::Q6K_BYTES, "q6_k", Some(14)),
            BlockType::Nf4 => (nf4::N_ELEM, nf4::N_BYTES, "nf4", None),
        };
        Facts { n_elem, n_bytes, name, ggml_id }
    }

    /// Numbers in a block.
    pub fn n_elem(self) -> usize {
        self.facts().n_elem
    }

    /// Bytes of a block.
    pub fn n_bytes(self) -> usize {
        self.facts().n_bytes
    }

    /// As people write it: `q4_k`.
    pub fn name(self) -> &'static str {
        self.facts().name
    }

    /// The format of this name, NF4 included.
    pub fn from_name(name: &str) -> Option<BlockType> {
        BlockType::ALL.into_iter().chain([BlockType::Nf4]).find(|block| block.name() == name)
    }

    /// Its number in GGUF files, if they can hold it.
    pub fn ggml_id(self) -> Option<u32> {
        self.facts().ggml_id
    }

    /// The format with this number in GGUF files, if it is one of these.
    pub fn from_ggml_id(id: u32) -> Option<BlockType> {
        BlockType::ALL.into_iter().find(|block| block.ggml_id() == Some(id))
    }

    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        self.expect_whole(out.len(), bytes.len());
        pulp::Arch::new().dispatch(Code { block: self, job: Job::Decode(bytes, out) });
    }

    /// Encodes whole blocks, to the bytes that ggml gives without an importance matrix, and those
    /// that bitsandbytes gives for NF4.
    ///
    /// Numbers that are not finite make blocks without meaning.
    pub fn encode(self, x: &[f32], bytes: &mut [u8]) {
        self.expect_whole(x.len(), bytes.len());
        pulp::Arch::new().dispatch(Code { block: self, job: Job::Encode(x, bytes) });
    }

    fn expect_whole(self, n: usize, n_in_bytes: usize) {
        let Facts { n_elem, n_bytes, name, .. } = self.facts();
        let is_whole = n.is_multiple_of(n_elem) && n / n_elem * n_bytes == n_in_bytes;
        assert!(is_whole, "{name}: {n} numbers in {n_in_bytes} bytes");
    }
}

/// Decodes or encodes with the widest instruction set: the loops are plain, the compiler makes the
/// vectors.
///
/// The closures below look idle, but a function handed over by its name is not inlined and would
/// be compiled without the instruction set.
struct Code<'a> {
    block: BlockType,
    job: Job<'a>,
}

enum Job<'a> {
    Decode(&'a [u8], &'a mut [f32]),
    Encode(&'a [f32], &'a mut [u8]),
}

impl WithSimd for Code<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        use BlockType::{Nf4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
        use {k_encode as e, legacy as l};
        let job = self.job;
        match self.block {
            Q4_0 => job.run(l::Q4_0::decode, l::Q4_0::encode),
            Q4_1 => job.run(l::Q4_1::decode, l::Q4_1::encode),
            Q5_0 => job.run(l::Q5_0::decode, l::Q5_0::encode),
            Q5_1 => job.run(l::Q5_1::decode, l::Q5_1::encode),
            Q8_0 => job.run(l::decode_q8_0, l::encode_q8_0),
            Q2K => job.run(k::decode_q2k, e::encode_q2k),
            Q3K => job.run(k::decode_q3k, e::encode_q3k),
            Q4K => job.run(k::decode_q4k_or_q5k, e::encode_q4k),
            Q5K => job.run(k::decode_q4k_or_q5k, e::encode_q5k),
            Q6K => job.run(k::decode_q6k, e::encode_q6k),
            Nf4 => job.run(nf4::decode, nf4::encode),
        }
    }
}

impl Job<'_> {
    /// For blocks of `N` numbers in `M` bytes.
    #[inline(always)]
    fn run<const N: usize, const M: usize>(
        self,
        decode: impl Fn(&[u8; M], &mut [f32; N]),
        encode: impl Fn(&[f32; N], &mut [u8; M]),
    ) {
        match self {
            Job::Decode(bytes, out) => {
                let blocks = bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0);
                blocks.for_each(|(bytes, out)| decode(bytes, out));
            }
            Job::Encode(x, bytes) => {
                let blocks = x.as_chunks().0.iter().zip(bytes.as_chunks_mut().0);
                blocks.for_each(|(x, bytes)| encode(x, bytes));
            }
        }
    }
}

/// The f16 at byte `AT` of a block.
#[inline(always)]
fn f16_at<const AT: usize>(block: &[u8]) -> f32 {
    half::f16::from_le_bytes([block[AT], block[AT + 1]]).to_f32()
}

/// Puts the f16 nearest to `x` at byte `AT` of a block.
#[inline(always)]
fn put_f16<const AT: usize>(block: &mut [u8], x: f32) {
    block[AT..AT + 2].copy_from_slice(&half::f16::from_f32(x).to_le_bytes());
}

#[cfg(test)]
mod tests;
