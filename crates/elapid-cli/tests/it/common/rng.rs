//! Random numbers that are a function of seed, stream and counter.

/// SplitMix64 of seed, stream and counter.
#[derive(Clone, Copy)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64, stream: u64) -> Rng {
        Rng(mix(seed ^ mix(stream)))
    }

    /// Number `n` below `bound`.
    pub fn below(&self, n: u64, bound: u64) -> u64 {
        mix(self.0 ^ mix(n)) % bound
    }
}

fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
