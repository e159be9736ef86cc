//! The same work many times over: recorded once, then started as one.
//!
//! ```text
//! let mut step = Graph::new(&gpu);
//! loop {
//!     token.rewrite(..);
//!     let logits = step.run(|| model_step(&token, &mut state));
//! }
//! ```
//!
//! The first run does the work plainly: kernels are compiled, buffers are left in the pool. The
//! second records it on CUDA and starts what was recorded; later ones only start it, and the
//! closure is not called. So it must do the same every time, on the same tensors: what changes from
//! run to run is written into tensors before, and state is updated where it lies. On wgpu every run
//! calls the closure. While it is recorded other threads wait with their work on the device.
//!
//! Buffers that the work takes stay with the graph: nobody else may lie where it writes. So do
//! tensors that it only reads; they are shared from then on, so that `Tensor::rewrite` alone can
//! change them. What it writes belongs to the caller, who has to see that it is still there, and
//! still nobody else's, before each run.

use super::cuda::Recorded;
use super::{Arg, Gpu, Memory};
use crate::tensor::Tensor;
use crate::tensor::shelf::Free;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

/// Work on a GPU that is done again and again, and what it returned.
pub struct Graph<R> {
    /// Dropped first: what it started is waited for before memory goes.
    recorded: Option<Recorded>,
    result: Option<R>,
    reserve: Option<Arc<Reserve>>,
    n_runs: usize,
    gpu: Gpu,
}

impl<R> Graph<R> {
    pub fn new(gpu: &Gpu) -> Graph<R> {
        Graph { recorded: None, result: None, reserve: None, n_runs: 0, gpu: gpu.clone() }
    }

    /// Does the work; see above. What it returned stays the same from the second run on: tensors in
    /// it have new numbers.
    pub fn run(&mut self, work: impl FnOnce() -> R) -> &R {
        match (self.gpu.as_cuda(), &self.recorded) {
            (Some(cuda), Some(recorded)) => cuda.replay(recorded),
            (Some(_), None) if self.n_runs == 1 => self.record(work),
            _ => {
                self.result = None;
                self.result = Some(work());
            }
        }
        self.n_runs += 1;
        self.result.as_ref().expect("a result of the run before")
    }

    /// Whether it is recorded, so that the next run starts only that.
    pub fn is_recorded(&self) -> bool {
        self.recorded.is_some()
    }

    /// What the last run returned.
    #[cfg(test)]
    pub fn result(&self) -> Option<&R> {
        self.result.as_ref()
    }

    fn record(&mut self, work: impl FnOnce() -> R) {
        // What the first run left goes back to the pool.
        self.result = None;
        let gpu = self.gpu.clone();
        let Some(cuda) = gpu.as_cuda() else { return };
        let Some(recording) = cuda.record() else {
            self.result = Some(work());
            return;
        };
        let reserve = Reserve::begin(&gpu);
        let until = EndsReserve(&reserve);
        self.result = Some(work());
        drop(until);
        self.reserve = Some(reserve);
        self.recorded = cuda.recorded(recording);
        if let Some(recorded) = &self.recorded {
            cuda.replay(recorded);
        }
    }
}

/// Keeps what a launch reads where one is recorded, unless the work made it or has written it.
pub(super) fn note(gpu: &Gpu, args: &[Arg]) {
    let reserve = gpu.recording().clone();
    let Some(reserve) = reserve.filter(|reserve| reserve.is_mine()) else { return };
    let mut lists = reserve.lists();
    for arg in args {
        let (tensor, id) = (arg.tensor(), arg.tensor().memory_id());
        let is_inside = tensor.gpu_buffer().0.reserve.is_some();
        if arg.writes() {
            lists.written.insert(id);
        } else if !is_inside && !lists.written.contains(&id) {
            lists.read.push(tensor.clone());
        }
    }
}

/// Buffers of a graph.
pub(super) struct Reserve {
    lists: Mutex<Lists>,
    /// Who records: buffers of others come from where they always do.
    thread: ThreadId,
    gpu: Gpu,
}

#[derive(Default)]
struct Lists {
    /// Given back by the work, for its later needs.
    free: Free<Memory>,
    /// From the pool of all, not yet taken.
    spare: Free<Memory>,
    /// From outside, and read.
    read: Vec<Tensor>,
    /// Storage that was written.
    written: HashSet<usize>,
}

impl Reserve {
    /// From here on buffers come from the reserve, which first gets all that lies free.
    fn begin(gpu: &Gpu) -> Arc<Reserve> {
        let lists = Lists { spare: std::mem::take(&mut gpu.shelf().free), ..Lists::default() };
        let thread = std::thread::current().id();
        let reserve = Arc::new(Reserve { lists: Mutex::new(lists), thread, gpu: gpu.clone() });
        *gpu.recording() = Some(reserve.clone());
        reserve
    }

    /// What was not taken goes back.
    fn end(&self) {
        let spare = std::mem::take(&mut self.lists().spare);
        *self.gpu.recording() = None;
        put(&mut self.gpu.shelf().free, spare);
    }

    fn lists(&self) -> std::sync::MutexGuard<'_, Lists> {
        self.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this thread records.
    pub(super) fn is_mine(&self) -> bool {
        self.thread == std::thread::current().id()
    }

    pub(super) fn take(&self, class: usize) -> Option<Memory> {
        let mut lists = self.lists();
        let own = lists.free.get_mut(&class).and_then(Vec::pop);
        own.or_else(|| lists.spare.get_mut(&class).and_then(Vec::pop))
    }

    pub(super) fn give(&self, class: usize, memory: Memory) {
        self.lists().free.entry(class).or_default().push(memory);
    }
}

/// Ends the reserve when it goes, also by a panic.
struct EndsReserve<'a>(&'a Reserve);

impl Drop for EndsReserve<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        let free = std::mem::take(&mut self.lists().free);
        put(&mut self.gpu.shelf().free, free);
    }
}

fn put(to: &mut Free<Memory>, from: Free<Memory>) {
    for (class, list) in from {
        to.entry(class).or_default().extend(list);
    }
}
