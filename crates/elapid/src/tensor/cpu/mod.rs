//! What CPU kernels share: threads, SIMD dispatch at run time, the buffer pool, matrix products.
//!
//! Work is cut by the shape of the problem, never by the number of threads, and partial sums are
//! added in a fixed order: results have the same bits on one thread and on sixty-four.

mod gemm;
mod pool;
mod simd;
mod vectors;

pub use self::gemm::{Mat, MatMut, Scope};
pub use self::pool::{Buffer, Pool};
pub use self::simd::F32s;
pub use self::vectors::{AddInto, Dot};

use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Looks at the last items of others before a thread that has none may go to sleep.
const N_SPIN: usize = 1 << 12;

/// Threads, instruction set and buffers of the CPU.
pub struct Cpu {
    /// None where the system has no threads, as in a browser: whoever asks does the work.
    threads: Option<rayon::ThreadPool>,
    arch: pulp::Arch,
    pool: Pool,
}

impl Cpu {
    /// Starts `n_threads` threads.
    pub fn new(n_threads: usize) -> Result<Cpu, rayon::ThreadPoolBuildError> {
        let threads = rayon::ThreadPoolBuilder::new()
            .num_threads(n_threads.max(1))
            .thread_name(|idx| format!("elapid-{idx}"));
        let has_threads = !cfg!(target_family = "wasm");
        let threads = has_threads.then(|| threads.build()).transpose()?;
        Ok(Cpu { threads, arch: pulp::Arch::new(), pool: Pool::default() })
    }

    pub fn n_threads(&self) -> usize {
        self.threads.as_ref().map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// The instruction set kernels run with.
    pub fn instruction_set(&self) -> String {
        format!("{:?}", self.arch).split('(').next().unwrap_or_default().to_lowercase()
    }

    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Runs `f` on the pool: the kernels inside then start without crossing threads.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> R {
        match &self.threads {
            Some(threads) => threads.install(f),
            None => f(),
        }
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
        if n_others == 0 {
            return self.run(f);
        }
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

    /// Runs `f` on each item, side by side. Each thread begins with a run of neighbours, which lie
    /// together in memory; who is done with its own takes the next of another's.
    ///
    /// For short work: the others are asked once for all items together, and who asked waits for
    /// them without going to sleep.
    pub fn share_out<T: Send>(&self, mut items: Vec<T>, f: impl Fn(T) + Send + Sync) {
        let (n_item, n_thread) = (items.len(), self.n_threads().min(items.len()));
        if n_thread <= 1 {
            return items.into_iter().for_each(f);
        }
        let run = |idx: usize| items.split_off(idx * n_item / n_thread).into_iter();
        let runs: Vec<_> = (0..n_thread).rev().map(run).map(Mutex::new).collect();
        let n_done = AtomicUsize::new(0);
        let work = |thread: usize| {
            for run in runs.iter().cycle().skip(thread).take(n_thread) {
                let next = || run.lock().unwrap_or_else(PoisonError::into_inner).next();
                while let Some(item) = next() {
                    f(item);
                    n_done.fetch_add(1, Ordering::Release);
                }
            }
        };
        let wait = || {
            let is_done = |_: &usize| n_done.load(Ordering::Acquire) == n_item;
            let _ = (0..N_SPIN).inspect(|_| std::hint::spin_loop()).find(is_done);
        };
        let half = n_thread / 2;
        self.run(|| {
            let here = || (fan_out(0..half, &work), wait());
            rayon::join(here, || fan_out(half..n_thread, &work))
        });
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

/// Runs `work` with each number, on as many threads at once as there are.
fn fan_out(threads: Range<usize>, work: &(impl Fn(usize) + Sync)) {
    match threads.len() {
        0 => {}
        1 => work(threads.start),
        n => {
            let half = threads.start + n / 2;
            let there = || fan_out(half..threads.end, work);
            rayon::join(|| fan_out(threads.start..half, work), there);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_that_is_shared_out_is_worked_on_once() {
        for n_threads in [1, 2, 3, 5] {
            let cpu = Cpu::new(n_threads).unwrap();
            for n_item in [0, 1, 2, 7, 100] {
                let mut y = vec![0; n_item];
                let items: Vec<(usize, &mut usize)> = y.iter_mut().enumerate().collect();
                cpu.run_awake(|| cpu.share_out(items, |(idx, y)| *y += idx + 1));
                assert!(y.into_iter().eq(1..=n_item), "{n_item} on {n_threads}");
            }
        }
    }

    #[test]
    fn a_panic_in_an_item_comes_back_to_who_shared_out() {
        let cpu = Cpu::new(2).unwrap();
        let work = || cpu.share_out(vec![1, 2, 3, 4], |item| assert_ne!(item, 3, "planted"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err());
        cpu.share_out(vec![1, 2], |_| {});
    }
}
