//! A vector of f32 as wide as the machine has, and the functions kernels need on it.
//!
//! A kernel is a struct with its arguments that implements `pulp::WithSimd`; `Cpu::simd` runs it
//! with the widest instruction set found at run time (AVX-512, AVX2 + FMA, NEON, simd128, scalar).
//! Inside, `F32s<S>` reads like a number: `decay * h + delta * x`. Everything is `inline(always)`:
//! a call that is not inlined would be compiled without the instruction set.
//!
//! `exp` is good to 2 units in the last place, `ln` to 3, for all finite arguments.

use pulp::Simd;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A machine vector of f32.
#[derive(Clone, Copy)]
pub struct F32s<S: Simd> {
    simd: S,
    v: S::f32s,
}

impl<S: Simd> F32s<S> {
    /// Numbers in one vector.
    pub const LANES: usize = S::F32_LANES;

    /// Every lane holds `x`.
    #[inline(always)]
    pub fn splat(simd: S, x: f32) -> Self {
        Self { simd, v: simd.splat_f32s(x) }
    }

    /// Every lane holds zero.
    #[inline(always)]
    pub fn zero(simd: S) -> Self {
        Self::splat(simd, 0.0)
    }

    /// The first `LANES` numbers of `x`; where `x` is shorter the remaining lanes are zero.
    #[inline(always)]
    pub fn load(simd: S, x: &[f32]) -> Self {
        let v = if x.len() >= Self::LANES {
            S::as_simd_f32s(x).0[0]
        } else {
            simd.partial_load_f32s(x)
        };
        Self { simd, v }
    }

    /// Writes the lanes to the front of `y`; where `y` is shorter only as many as it holds.
    #[inline(always)]
    pub fn store(self, y: &mut [f32]) {
        if y.len() >= Self::LANES {
            S::as_mut_simd_f32s(y).0[0] = self.v;
        } else {
            self.simd.partial_store_f32s(y, self.v);
        }
    }

    #[inline(always)]
    fn with(self, v: S::f32s) -> Self {
        Self { simd: self.simd, v }
    }

    /// The same number in every lane, of the same width as `self`.
    #[inline(always)]
    pub fn same(self, x: f32) -> Self {
        Self::splat(self.simd, x)
    }

    /// `self * b + c`, rounded once where the machine can.
    #[inline(always)]
    pub fn mul_add(self, b: Self, c: Self) -> Self {
        self.with(self.simd.mul_add_e_f32s(self.v, b.v, c.v))
    }

    /// The sum of the lanes, always in the same order.
    #[inline(always)]
    pub fn sum(self) -> f32 {
        self.simd.reduce_sum_f32s(self.v)
    }

    #[inline(always)]
    pub fn max_lane(self) -> f32 {
        self.simd.reduce_max_f32s(self.v)
    }

    /// Lane by lane, the larger.
    #[inline(always)]
    pub fn max(self, other: Self) -> Self {
        self.with(self.simd.max_f32s(self.v, other.v))
    }

    /// Lane by lane, the smaller.
    #[inline(always)]
    pub fn min(self, other: Self) -> Self {
        self.with(self.simd.min_f32s(self.v, other.v))
    }

    #[inline(always)]
    pub fn abs(self) -> Self {
        self.with(self.simd.abs_f32s(self.v))
    }

    /// Square root, correctly rounded.
    #[inline(always)]
    pub fn sqrt(self) -> Self {
        self.with(self.simd.sqrt_f32s(self.v))
    }

    /// Where `self < bound`, `yes`, else `no`.
    #[inline(always)]
    pub fn select_less(self, bound: Self, yes: Self, no: Self) -> Self {
        let mask = self.simd.less_than_f32s(self.v, bound.v);
        self.with(self.simd.select_f32s(mask, yes.v, no.v))
    }

    /// `e^self`: 0 below -87.3, infinity above 88.7.
    ///
    /// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; `e^r` by a polynomial, then n goes to the exponent.
    #[inline(always)]
    pub fn exp(self) -> Self {
        // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the mantissa.
        let magic = self.same(12_582_912.0);
        // In this order a NaN stays one.
        let x = self.same(88.722_84).min(self.same(-87.336_54).max(self));
        let shifted = x.mul_add(self.same(std::f32::consts::LOG2_E), magic);
        let n = shifted - magic;
        let r = n.mul_add(self.same(-0.693_145_75), x);
        let r = n.mul_add(self.same(-1.428_606_8e-6), r);
        let p = self.same(1.987_569_1e-4);
        let p = p.mul_add(r, self.same(1.398_199_9e-3));
        let p = p.mul_add(r, self.same(8.333_452e-3));
        let p = p.mul_add(r, self.same(4.166_579_6e-2));
        let p = p.mul_add(r, self.same(1.666_666_5e-1));
        let p = p.mul_add(r, self.same(0.5));
        let p = (p * r).mul_add(r, r + self.same(1.0));
        // Adding n to the exponent of e^r reaches 2^128 (1 - small), which 2^n by itself cannot.
        let s = self.simd;
        let n_bits = s.wrapping_dyn_shl_u32s(s.transmute_u32s_f32s(shifted.v), s.splat_u32s(23));
        let y = s.add_u32s(s.transmute_u32s_f32s(p.v), n_bits);
        let y = self.with(s.transmute_f32s_u32s(y));
        let y = self.select_less(self.same(-87.336_54), self.same(0.0), y);
        self.same(88.722_84).select_less(self, self.same(f32::INFINITY), y)
    }

    /// `2^self` for `self <= 0`, at two thirds the cost of `exp`: 1 at 0, and 0 below -127.
    ///
    /// Good to 2 units in the last place down to -126; from there to zero it is some number
    /// below 1.2e-38.
    #[inline(always)]
    #[allow(clippy::approx_constant)] // fitted, and a little below ln 2
    pub fn exp2_of_negative(self) -> Self {
        let s = self.simd;
        let magic = self.same(12_582_912.0);
        // In this order a NaN stays one.
        let x = self.same(-127.0).max(self);
        let shifted = x + magic;
        let r = x - (shifted - magic);
        let p = self.same(1.326_502_2e-3);
        let p = p.mul_add(r, self.same(9.671_539e-3));
        let p = p.mul_add(r, self.same(5.550_718_7e-2));
        let p = p.mul_add(r, self.same(2.402_224_1e-1));
        let p = p.mul_add(r, self.same(6.931_47e-1));
        let p = p.mul_add(r, self.same(1.0));
        // At -127 the polynomial is 1 and its exponent plus n is that of zero.
        let n_bits = s.wrapping_dyn_shl_u32s(s.transmute_u32s_f32s(shifted.v), s.splat_u32s(23));
        self.with(s.transmute_f32s_u32s(s.add_u32s(s.transmute_u32s_f32s(p.v), n_bits)))
    }

    /// Natural logarithm of a positive, normal number.
    ///
    /// `x = 2^e m` with m in [sqrt 1/2, sqrt 2); `ln m` by a polynomial in `m - 1`.
    #[inline(always)]
    #[cfg(test)]
    pub fn ln(self) -> Self {
        let s = self.simd;
        let bits = s.transmute_u32s_f32s(self.v);
        // Subtracting the bits of sqrt(1/2) leaves e in the upper nine bits, rounded as wanted.
        let offset = s.sub_u32s(bits, s.splat_u32s(0x3f35_04f3));
        let e_biased = s
            .wrapping_dyn_shr_u32s(s.add_u32s(offset, s.splat_u32s(0x4000_0000)), s.splat_u32s(23));
        // e + 128 as a float, through the mantissa of 2^23.
        let e_float = s.transmute_f32s_u32s(s.or_u32s(e_biased, s.splat_u32s(0x4b00_0000)));
        let e = self.with(e_float) - self.same(8_388_608.0 + 128.0);
        let m_bits =
            s.add_u32s(s.and_u32s(offset, s.splat_u32s(0x007f_ffff)), s.splat_u32s(0x3f35_04f3));
        let f = self.with(s.transmute_f32s_u32s(m_bits)) - self.same(1.0);
        let p = self.same(7.037_683_6e-2);
        let p = p.mul_add(f, self.same(-1.151_461e-1));
        let p = p.mul_add(f, self.same(1.167_699_9e-1));
        let p = p.mul_add(f, self.same(-1.242_014_1e-1));
        let p = p.mul_add(f, self.same(1.424_932_3e-1));
        let p = p.mul_add(f, self.same(-1.666_805_8e-1));
        let p = p.mul_add(f, self.same(2.000_071_5e-1));
        let p = p.mul_add(f, self.same(-2.499_999_4e-1));
        let p = p.mul_add(f, self.same(3.333_333e-1));
        let f2 = f * f;
        let y = (p * f) * f2;
        let y = e.mul_add(self.same(-2.121_944_4e-4), y);
        let y = f2.mul_add(self.same(-0.5), y);
        e.mul_add(self.same(0.693_359_4), f + y)
    }

    /// `1 / (1 + e^-self)`, without overflow at either end.
    #[inline(always)]
    pub fn sigmoid(self) -> Self {
        let one = self.same(1.0);
        one / (one + (-self).exp())
    }

    /// `ln(1 + e^self)`, without overflow, exact to rounding for very negative arguments.
    #[inline(always)]
    pub fn softplus(self) -> Self {
        self.softplus_and_slope().0
    }

    /// Softplus and its slope, the sigmoid.
    ///
    /// With `e = exp(-|x|)`, at most 1: softplus is `max(x, 0) + ln(1 + e)`. The logarithm is a
    /// polynomial without constant term, so that tiny step sizes of trained models keep their
    /// digits.
    #[inline(always)]
    pub fn softplus_and_slope(self) -> (Self, Self) {
        let (zero, one) = (self.same(0.0), self.same(1.0));
        let e = (-self.abs()).exp();
        let p = self.same(5.364_829_7e-3);
        let p = p.mul_add(e, self.same(-3.006_581_4e-2));
        let p = p.mul_add(e, self.same(7.920_457e-2));
        let p = p.mul_add(e, self.same(-1.375_380_5e-1));
        let p = p.mul_add(e, self.same(1.915_365_6e-1));
        let p = p.mul_add(e, self.same(-2.485_716_3e-1));
        let p = p.mul_add(e, self.same(3.332_132_4e-1));
        let p = p.mul_add(e, self.same(-4.999_964_8e-1));
        let log1p = (p * e).mul_add(e, e);
        (self.max(zero) + log1p, self.select_less(zero, e, one) / (one + e))
    }

    #[inline(always)]
    pub fn tanh(self) -> Self {
        let two = self.same(2.0);
        two * (two * self).sigmoid() - self.same(1.0)
    }
}

impl<S: Simd> Add for F32s<S> {
    type Output = Self;
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.with(self.simd.add_f32s(self.v, other.v))
    }
}

impl<S: Simd> Sub for F32s<S> {
    type Output = Self;
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.with(self.simd.sub_f32s(self.v, other.v))
    }
}

impl<S: Simd> Mul for F32s<S> {
    type Output = Self;
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.with(self.simd.mul_f32s(self.v, other.v))
    }
}

impl<S: Simd> Div for F32s<S> {
    type Output = Self;
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.with(self.simd.div_f32s(self.v, other.v))
    }
}

impl<S: Simd> Neg for F32s<S> {
    type Output = Self;
    #[inline(always)]
    fn neg(self) -> Self {
        self.with(self.simd.neg_f32s(self.v))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::WithSimd;

    type Unary = (&'static str, fn(f64) -> f64);

    /// Runs one function over a slice.
    struct Apply<'a>(&'a str, &'a [f32], &'a mut [f32]);

    impl WithSimd for Apply<'_> {
        type Output = ();
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) {
            let Apply(name, x, y) = self;
            for at in (0..x.len()).step_by(F32s::<S>::LANES) {
                let v = F32s::load(simd, &x[at..]);
                let out = match name {
                    "exp" => v.exp(),
                    "ln" => v.ln(),
                    "sigmoid" => v.sigmoid(),
                    "softplus" => v.softplus(),
                    _ => v.tanh(),
                };
                out.store(&mut y[at..]);
            }
        }
    }

    fn worst(function: Unary, x: &[f32]) -> f64 {
        let mut y = vec![0.0; x.len()];
        pulp::Arch::new().dispatch(Apply(function.0, x, &mut y));
        let mut scalar = vec![0.0; x.len()];
        Apply(function.0, x, &mut scalar).with_simd(pulp::Scalar::new());
        let mut worst = 0.0f64;
        for i in 0..x.len() {
            let want = function.1(x[i] as f64);
            for got in [y[i], scalar[i]] {
                let error = (got as f64 - want).abs() / want.abs().max(1e-30);
                // A maximum would drop what is not a number.
                worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
            }
        }
        worst
    }

    #[test]
    fn functions_agree_with_f64() {
        let ramp: Vec<f32> = (0..20_011).map(|i| (i as f32 - 10_005.0) * 0.0085).collect();
        assert!(worst(("exp", f64::exp), &ramp) < 2.5e-7);
        assert!(worst(("sigmoid", |x| 1.0 / (1.0 + (-x).exp())), &ramp) < 4e-7);
        assert!(worst(("softplus", |x| x.max(0.0) + (-x.abs()).exp().ln_1p()), &ramp) < 4e-7);
        let positive: Vec<f32> =
            (0..20_011).map(|i| ((i as f32 - 10_005.0) * 0.0085).exp()).collect();
        let away: Vec<f32> = positive.into_iter().filter(|x| (x - 1.0).abs() > 0.01).collect();
        assert!(worst(("ln", f64::ln), &away) < 4e-7);
    }

    #[test]
    fn exp_reaches_zero_and_infinity_and_stays_there() {
        let x = [-1e30f32, -88.0, -87.0, 0.0, 88.5, 89.0, 1e30];
        let mut y = [0.0; 7];
        pulp::Arch::new().dispatch(Apply("exp", &x, &mut y));
        assert_eq!((y[0], y[1], y[3]), (0.0, 0.0, 1.0));
        assert!(y[2] > 0.0 && y[4].is_finite());
        assert_eq!((y[5], y[6]), (f32::INFINITY, f32::INFINITY));
    }
}
