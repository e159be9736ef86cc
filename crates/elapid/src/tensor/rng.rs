//! Random numbers by counter: the n-th number of a stream is a function of (seed, stream, n).
//!
//! Nothing depends on the order in which numbers are drawn, so initialisation and sampling do not
//! depend on threads, and a run is resumed by its counters. The function is Philox4x32-10
//! (Salmon et al., 2011).

/// A stream of random numbers.
#[derive(Clone, Copy, Debug)]
pub struct Rng {
    key: [u32; 2],
    stream: u64,
}

impl Rng {
    /// The stream `stream` of `seed`. Every seed is good, 0 included.
    pub fn new(seed: u64, stream: u64) -> Rng {
        Rng { key: [seed as u32, (seed >> 32) as u32], stream }
    }

    /// Four independent words for counter `n`.
    fn block(&self, n: u64) -> [u32; 4] {
        self.blocks::<1>(n).map(|word| word[0])
    }

    /// Four independent words for each of the counters `first`, `first + 1`, ...: word by word, so
    /// that a kernel with vectors makes `N` blocks at once.
    #[inline(always)]
    pub fn blocks<const N: usize>(&self, first: u64) -> [[u32; N]; 4] {
        let mut x = [[0; N], [0; N], [self.stream as u32; N], [(self.stream >> 32) as u32; N]];
        for i in 0..N {
            let n = first.wrapping_add(i as u64);
            (x[0][i], x[1][i]) = (n as u32, (n >> 32) as u32);
        }
        let mut key = self.key;
        for _ in 0..10 {
            for i in 0..N {
                let a = 0xD251_1F53u64 * x[0][i] as u64;
                let b = 0xCD9E_8D57u64 * x[2][i] as u64;
                x[0][i] = (b >> 32) as u32 ^ x[1][i] ^ key[0];
                x[1][i] = b as u32;
                x[2][i] = (a >> 32) as u32 ^ x[3][i] ^ key[1];
                x[3][i] = a as u32;
            }
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        x
    }

    /// 64 random bits.
    pub fn bits(&self, n: u64) -> u64 {
        let x = self.block(n);
        (x[0] as u64) << 32 | x[1] as u64
    }

    /// Uniform in [0, 1).
    pub fn uniform(&self, n: u64) -> f64 {
        (self.bits(n) >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..bound; the bias is below bound / 2^64.
    pub fn below(&self, n: u64, bound: u64) -> u64 {
        ((self.bits(n) as u128 * bound as u128) >> 64) as u64
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&self, n: u64) -> f64 {
        let x = self.block(n);
        // In (0, 1]: the logarithm is finite.
        let u = ((x[0] as u64) << 21 | (x[1] as u64) >> 11) as f64;
        let u = (u + 1.0) / (1u64 << 53) as f64;
        let angle = x[2] as f64 / (1u64 << 32) as f64 * std::f64::consts::TAU;
        (-2.0 * u.ln()).sqrt() * angle.cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_matches_its_published_vector() {
        let ones = Rng { key: [u32::MAX; 2], stream: u64::MAX };
        assert_eq!(ones.block(u64::MAX), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(Rng::new(0, 0).block(0), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
    }

    #[test]
    fn many_blocks_at_once_are_those_one_by_one() {
        let rng = Rng::new(7, 1 << 40);
        let first = u32::MAX as u64 - 2;
        let many = rng.blocks::<5>(first);
        for i in 0..5 {
            assert_eq!(rng.block(first + i as u64), many.map(|word| word[i]));
        }
    }

    #[test]
    fn normal_numbers_have_mean_zero_and_variance_one() {
        let rng = Rng::new(0, 3);
        let x: Vec<f64> = (0..40_000).map(|n| rng.normal(n)).collect();
        let mean = x.iter().sum::<f64>() / x.len() as f64;
        let variance = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }
}
