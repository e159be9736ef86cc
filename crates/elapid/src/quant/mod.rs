//! Block formats of ggml: how many numbers share a block, and how to read them.

/// A block format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockType {
    /// 32 signed bytes and one f16 scale.
    Q8_0,
}

impl BlockType {
    /// Numbers in a block.
    pub fn n_elem(self) -> usize {
        32
    }

    /// Bytes of a block.
    pub fn n_bytes(self) -> usize {
        34
    }

    /// Decodes whole blocks.
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        for (block, out) in bytes.chunks_exact(34).zip(out.chunks_exact_mut(32)) {
            let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32();
            for (y, &q) in out.iter_mut().zip(&block[2..]) {
                *y = scale * (q as i8) as f32;
            }
        }
    }
}
