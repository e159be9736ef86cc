//! How a launch is laid out, and the tensors and numbers it is given.

use super::Arg;
use crate::tensor::Tensor;

/// The arguments of a kernel that reads some tensors and, behind them, writes others.
pub fn bind<'a, const N: usize, const M: usize>(
    ins: [&'a Tensor; N],
    outs: [&'a mut Tensor; M],
) -> Vec<Arg<'a>> {
    ins.into_iter().map(Arg::In).chain(outs.into_iter().map(Arg::Out)).collect()
}

/// How many groups of how many threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Groups along each axis.
    pub groups: [u32; 3],
    /// Threads of a group, at most 256 for wgpu.
    pub threads: u32,
    /// Bytes of dynamic shared memory; CUDA alone.
    pub shared: u32,
    /// Whether groups may start while the kernel before is not done, in recorded work.
    pub is_early: bool,
}

/// Rounds of loops that a thread may go through, all loops together: Mesa's software Vulkan ends
/// them after 65,535 and says nothing.
pub const N_ROUNDS_MAX: usize = 60_000;

/// Most groups along an axis, by WebGPU.
const N_GROUPS_MAX: usize = 65_535;

impl Work {
    /// One thread for each of `n` numbers, in groups of 256; kernels stride where groups run out:
    /// `for (i = thread(); i < n; i += n_threads())`.
    pub fn each(n: usize) -> Work {
        Work::groups(n.div_ceil(256).clamp(1, N_GROUPS_MAX), 256)
    }

    /// `n` groups; past 65,535 they are laid in a plane, kernels take `group()` and leave where it
    /// is not below their own bound.
    pub fn groups(n: usize, threads: usize) -> Work {
        let y = n.div_ceil(N_GROUPS_MAX).max(1);
        let groups = [n.div_ceil(y).max(1) as u32, y as u32, 1];
        Work { groups, threads: threads as u32, shared: 0, is_early: false }
    }

    /// The same for a kernel that calls `await_input`; see there (prelude.cu).
    pub fn early(self) -> Work {
        Work { is_early: true, ..self }
    }

    /// Groups along three axes, none of them past 65,535.
    pub fn grid(groups: [usize; 3], threads: usize) -> Work {
        assert!(groups.iter().all(|&n| n <= N_GROUPS_MAX), "a grid of {groups:?} groups");
        Work { groups: groups.map(|n| n.max(1) as u32), ..Work::groups(1, threads) }
    }
}

/// A number given to a kernel: the bits of a u32 or an f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(pub u32);

impl From<usize> for Word {
    fn from(n: usize) -> Word {
        Word(u32::try_from(n).expect("a count below 2^32"))
    }
}

impl From<u32> for Word {
    fn from(n: u32) -> Word {
        Word(n)
    }
}

impl From<f32> for Word {
    fn from(x: f32) -> Word {
        Word(x.to_bits())
    }
}

/// A constant of a kernel.
pub type Const = (&'static str, usize);
