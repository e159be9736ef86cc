//! First kernels, which show that what not every adapter has comes out right.

use super::*;
use crate::tensor::gpu::opaque::Opaque;

impl Wgpu {
    /// Whether every number in f16 comes out right: not those alone that a driver may round to
    /// zero.
    pub(super) async fn halves_hold(&self) -> bool {
        static PROBE: Kernel =
            Kernel { entry: "f16_probe", wgsl: include_str!("../f16_probe.wgsl"), cuda: "" };
        // So many at once that they fit into any binding.
        let (n, n_threads) = (1 << 13, 256);
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let n_got = 2 * all.len();
        let (Ok(from), Ok(to)) = (self.allocate(n_got), self.allocate(4 * n_got)) else {
            return false;
        };
        self.upload(&from, 0, bytemuck::cast_slice(&all));
        let (from, to) = (Memory::Wgpu(Opaque::new(from)), Memory::Wgpu(Opaque::new(to)));
        for first in (0..all.len()).step_by(n) {
            let (input, output) = ((&from, DType::F16, false), (&to, DType::F32, true));
            let args = &[(input, 2), (output, 8)].map(|((memory, dtype, writes), bytes)| {
                Resolved { memory, offset: bytes * first, n_bytes: bytes * n, dtype, writes }
            });
            let work = Work::groups(n / 4 / n_threads, n_threads);
            let (consts, params) = (&[("N", n)], &[1.0f32.into()]);
            self.launch(&Launch { kernel: &PROBE, work, consts, args, params });
        }
        let Memory::Wgpu(to) = &to else { unreachable!("it was made above") };
        let got = self.read_floats(to, n_got).await;
        // Each run of numbers is there twice.
        let is_right = |(at, got): (usize, &f32)| {
            let want = half::f16::from_bits(all[at / (2 * n) * n + at % n]).to_f32();
            got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan())
        };
        !self.failure.is_set() && got.iter().enumerate().all(is_right)
    }

    async fn read_floats(&self, from: &wgpu::Buffer, n: usize) -> Vec<f32> {
        bytemuck::pod_collect_to_vec(&self.read(from, 0, 4 * n).await)
    }

    /// Whether sums over a group come out right.
    pub(super) async fn sums_hold(&self) -> bool {
        static PROBE: Kernel = Kernel {
            entry: "subgroups_probe",
            wgsl: include_str!("../subgroups_probe.wgsl"),
            cuda: "",
        };
        let n = 256;
        let n_bytes = 3 * n * size_of::<f32>();
        let Ok(buffer) = self.allocate(n_bytes) else { return false };
        let memory = Memory::Wgpu(Opaque::new(buffer));
        let out = Resolved { memory: &memory, offset: 0, n_bytes, dtype: DType::F32, writes: true };
        let (work, args) = (Work::groups(1, n), &[out]);
        self.launch(&Launch { kernel: &PROBE, work, consts: &[], args, params: &[] });
        let Memory::Wgpu(buffer) = &memory else { unreachable!("it was made above") };
        let got = self.read_floats(buffer, 3 * n).await;
        let sum = (n * (n + 1) / 2) as f32;
        let lanes = |thread: usize| thread / 32 * 32..thread / 32 * 32 + 32;
        let lanes_sum = |thread| lanes(thread).map(|at| (at * at) as f32).sum::<f32>();
        let is_right = |thread: usize| {
            let [group_sum, group_max, got_lanes] = [0, 1, 2].map(|it| got[it * n + thread]);
            group_sum == sum && group_max == (n - 1) as f32 && got_lanes == lanes_sum(thread)
        };
        !self.failure.is_set() && (0..n).all(is_right)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether numbers in f16 are found right, made of words with this in place of `f16_to_f32`.
    fn hold(function: &str) -> Option<bool> {
        let made = Wgpu::new(0, Failure::default(), usize::MAX, &[]);
        let mut made = block_on(made)?.ok()?;
        let text = PLAIN_HALVES.replace("f16_to_f32(", "read_half(") + function;
        made.halves = Box::leak(text.into_boxed_str());
        block_on(made.halves_hold())
    }

    #[test]
    fn numbers_in_f16_that_come_out_wrong_are_seen() {
        let Some(exact) = hold("fn read_half(bits: u32) -> f32 { return f16_to_f32(bits); }")
        else {
            return;
        };
        assert!(exact);
        let wrong = [
            // What is small becomes zero; infinities the largest number; not a WGSL text at all.
            "fn read_half(bits: u32) -> f32 {
                return select(f16_to_f32(bits), 0.0, (bits & 31744u) == 0u);
            }",
            "fn read_half(bits: u32) -> f32 {
                return select(f16_to_f32(bits), 65504.0, (bits & 32767u) == 31744u);
            }",
            "fn read_half(bits: u32) -> f32 { return nothing_of_the_kind; }",
        ];
        wrong.iter().for_each(|function| assert_eq!(hold(function), Some(false), "{function}"));
    }
}
