//! What CPU kernels share: threads, SIMD dispatch at run time, the buffer pool, matrix products.
//!
//! Work is cut by the shape of the problem, never by the number of threads, and partial sums are
//! added in a fixed order: results have the same bits on one thread and on sixty-four.

mod gemm;
mod pool;
mod simd;
mod vectors;

pub use self::gemm::{Mat, MatMut, Scope};
pub use self::pool::{Buffer, MemoryUse, Pool};
pub use self::simd::F32s;
pub use self::vectors::{AddInto, Dot, dot};

use rayon::prelude::*;
use std::sync::atomic::{AtomicBool, Ordering};

/// Threads, instruction set and buffers of the processor.
pub struct Cpu {
    threads: rayon::ThreadPool,
    arch: pulp::Arch,
    pool: Pool,
}

impl Cpu {
    /// Starts `n_threads` threads.
    pub fn new(n_threads: usize) -> Result<Cpu, rayon::ThreadPoolBuildError> {
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads.max(1))
            .thread_name(|idx| format!("elapid-{idx}"))
            .build()?;
        Ok(Cpu { threads, arch: pulp::Arch::new(), pool: Pool::default() })
    }

    /// Threads in use.
    pub fn n_threads(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// The instruction set kernels run with.
    pub fn instruction_set(&self) -> String {
        format!("{:?}", self.arch).split('(').next().unwrap_or_default().to_lowercase()
    }

    /// The buffer pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Runs `f` on the pool: the kernels inside then start without crossing threads.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        self.threads.install(f)
    }

    /// Runs `f` on the pool while its other threads look for work without going to sleep: for many
    /// short tasks with short pauses, where waking up would take longer than the work.
    pub fn run_awake<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        /// Lets the others go, also when `f` panics.
        struct Done<'a>(&'a AtomicBool);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Release);
            }
        }
        let is_done = AtomicBool::new(false);
        let look_for_work = || {
            while !is_done.load(Ordering::Acquire) {
                if rayon::yield_now() != Some(rayon::Yield::Executed) {
                    std::hint::spin_loop();
                }
            }
        };
        let n_others = self.n_threads() - 1;
        self.run(|| {
            rayon::scope(|scope| {
                (0..n_others).for_each(|_| scope.spawn(|_| look_for_work()));
                let _done = Done(&is_done);
                f()
            })
        })
    }

    /// Runs a kernel with the widest instruction set of this machine.
    pub fn simd<K: pulp::WithSimd>(&self, kernel: K) -> K::Output {
        self.arch.dispatch(kernel)
    }

    /// Runs `f(0)`, `f(1)`, ... `f(n_tasks - 1)`, in any order and side by side.
    pub fn each(&self, n_tasks: usize, f: impl Fn(usize) + Send + Sync) {
        if n_tasks <= 1 || self.n_threads() == 1 {
            (0..n_tasks).for_each(f);
        } else {
            self.run(|| (0..n_tasks).into_par_iter().with_max_len(1).for_each(f));
        }
    }

    /// Cuts `y` into pieces of `len` (the last may be shorter) and runs `f(piece_idx, piece)`.
    pub fn each_piece(
        &self,
        y: &mut [f32],
        len: usize,
        f: impl Fn(usize, &mut [f32]) + Send + Sync,
    ) {
        let len = len.max(1);
        if y.len() <= len || self.n_threads() == 1 {
            y.chunks_mut(len).enumerate().for_each(|(idx, piece)| f(idx, piece));
        } else {
            let pieces = y.par_chunks_mut(len).enumerate().with_max_len(1);
            self.run(|| pieces.for_each(|(idx, piece)| f(idx, piece)));
        }
    }

    /// Runs `f` on each item, side by side, and returns the results in order.
    pub fn map<T: Send, R: Send>(&self, items: Vec<T>, f: impl Fn(T) -> R + Send + Sync) -> Vec<R> {
        if items.len() <= 1 || self.n_threads() == 1 {
            items.into_iter().map(f).collect()
        } else {
            self.run(|| items.into_par_iter().with_max_len(1).map(f).collect())
        }
    }
}
