//! Vectors of 32 bytes, 8 integers and 8 floats: what products on blocks are written with.
//!
//! One implementation per instruction set; `Plain` is the twin that the others are checked
//! against. A value of an implementing type stands for the fact that the machine has the set.
//! Everything is `inline(always)`: what is not inlined is compiled without the set.

pub(super) trait Isa: Copy + Send + Sync {
    /// 32 bytes.
    type Bytes: Copy;
    /// 8 signed integers of 32 bits.
    type Ints: Copy;
    /// 8 floats.
    type Floats: Copy;

    /// Asks for memory that will soon be read.
    fn prefetch(self, _: *const u8) {}
    fn bytes(self, x: &[u8; 32]) -> Self::Bytes;
    /// The low halves of 16 bytes, then their high halves.
    fn nibbles(self, x: &[u8; 16]) -> Self::Bytes;
    /// `(x >> SHIFT) & mask`, byte by byte.
    fn field<const SHIFT: i32>(self, x: Self::Bytes, mask: u8) -> Self::Bytes;
    /// `a | b << SHIFT`; no bit of b leaves its byte.
    fn put<const SHIFT: i32>(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// 16 where bit i is set, else 0.
    fn sixteens(self, bits: u32) -> Self::Bytes;

    /// `start + u . x`, four products to a lane. u is at most 127.
    fn dot(self, u: Self::Bytes, x: &[i8; 32], start: Self::Ints) -> Self::Ints;
    /// `q . x` of signed bytes, x above -128; `negated` holds minus the sums of x, four to a lane.
    fn dot_signed(self, q: Self::Bytes, x: &[i8; 32], negated: &[i32; 8]) -> Self::Ints;
    /// `x << SHIFT`.
    fn shifted<const SHIFT: i32>(self, x: &[i32; 8]) -> Self::Ints;
    fn to_floats(self, x: Self::Ints) -> Self::Floats;

    fn floats(self, x: &[f32; 8]) -> Self::Floats;
    /// The same in every lane.
    fn splat(self, x: f32) -> Self::Floats;
    /// a in the lower four lanes, b in the upper.
    #[inline(always)]
    fn halves(self, a: f32, b: f32) -> Self::Floats {
        self.floats(&[a, a, a, a, b, b, b, b])
    }
    /// An f16 in every lane.
    fn splat_f16(self, x: [u8; 2]) -> Self::Floats;
    /// 8 f16.
    fn f16s(self, x: &[u8; 16]) -> Self::Floats;
    /// 8 bf16.
    fn bf16s(self, x: &[u8; 16]) -> Self::Floats;
    /// 8 unsigned bytes.
    fn small_ints(self, x: [u8; 8]) -> Self::Floats;
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`.
    fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    fn to_array(self, x: Self::Floats) -> [f32; 8];

    /// The sum of the lanes, in the order of all sets: by halves.
    #[inline(always)]
    fn sum(self, x: Self::Floats) -> f32 {
        let x = self.to_array(x);
        let four = [x[0] + x[4], x[1] + x[5], x[2] + x[6], x[3] + x[7]];
        (four[0] + four[2]) + (four[1] + four[3])
    }
}

/// No vectors but what the compiler makes of loops.
#[derive(Clone, Copy)]
pub(super) struct Plain;

impl Isa for Plain {
    type Bytes = [u8; 32];
    type Ints = [i32; 8];
    type Floats = [f32; 8];

    #[inline(always)]
    fn bytes(self, x: &[u8; 32]) -> [u8; 32] {
        *x
    }

    #[inline(always)]
    fn nibbles(self, x: &[u8; 16]) -> [u8; 32] {
        std::array::from_fn(|i| if i < 16 { x[i] & 15 } else { x[i - 16] >> 4 })
    }

    #[inline(always)]
    fn field<const SHIFT: i32>(self, x: [u8; 32], mask: u8) -> [u8; 32] {
        x.map(|x| (x >> SHIFT) & mask)
    }

    #[inline(always)]
    fn put<const SHIFT: i32>(self, a: [u8; 32], b: [u8; 32]) -> [u8; 32] {
        std::array::from_fn(|i| a[i] | b[i] << SHIFT)
    }

    #[inline(always)]
    fn sixteens(self, bits: u32) -> [u8; 32] {
        std::array::from_fn(|i| ((bits >> i & 1) as u8) << 4)
    }

    #[inline(always)]
    fn dot(self, u: [u8; 32], x: &[i8; 32], start: [i32; 8]) -> [i32; 8] {
        let product = |i: usize| u[i] as i32 * x[i] as i32;
        std::array::from_fn(|lane| start[lane] + (4 * lane..4 * lane + 4).map(product).sum::<i32>())
    }

    #[inline(always)]
    fn dot_signed(self, q: [u8; 32], x: &[i8; 32], _: &[i32; 8]) -> [i32; 8] {
        let product = |i: usize| q[i] as i8 as i32 * x[i] as i32;
        std::array::from_fn(|lane| (4 * lane..4 * lane + 4).map(product).sum())
    }

    #[inline(always)]
    fn shifted<const SHIFT: i32>(self, x: &[i32; 8]) -> [i32; 8] {
        x.map(|x| x << SHIFT)
    }

    #[inline(always)]
    fn to_floats(self, x: [i32; 8]) -> [f32; 8] {
        x.map(|x| x as f32)
    }

    #[inline(always)]
    fn floats(self, x: &[f32; 8]) -> [f32; 8] {
        *x
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 8] {
        [x; 8]
    }

    #[inline(always)]
    fn splat_f16(self, x: [u8; 2]) -> [f32; 8] {
        [half::f16::from_le_bytes(x).to_f32(); 8]
    }

    #[inline(always)]
    fn f16s(self, x: &[u8; 16]) -> [f32; 8] {
        let pairs = x.as_chunks::<2>().0;
        std::array::from_fn(|i| half::f16::from_le_bytes(pairs[i]).to_f32())
    }

    #[inline(always)]
    fn bf16s(self, x: &[u8; 16]) -> [f32; 8] {
        let pairs = x.as_chunks::<2>().0;
        std::array::from_fn(|i| half::bf16::from_le_bytes(pairs[i]).to_f32())
    }

    #[inline(always)]
    fn small_ints(self, x: [u8; 8]) -> [f32; 8] {
        x.map(f32::from)
    }

    #[inline(always)]
    fn mul(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn add(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn to_array(self, x: [f32; 8]) -> [f32; 8] {
        x
    }
}
