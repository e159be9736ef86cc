//! GPUs: buffers, kernels and launches, the same for wgpu and CUDA.
//!
//! An op describes its work once and has its kernels in both languages beside it:
//!
//! ```text
//! static FORWARD: Kernel =
//!     Kernel::new("scale_forward", include_str!("scale.wgsl"), include_str!("scale.cu"));
//! gpu.launch(&FORWARD, Work::each(n), &[("D", d)], &mut bind([x], [&mut y]), &[n.into()]);
//! ```
//!
//! | part               | in WGSL                                 | in CUDA                       |
//! |--------------------|-----------------------------------------|-------------------------------|
//! | arguments in order | `@group(0) @binding(0)`, `(1)`, ...     | pointers, in order            |
//! | their types        | `array<f32>`; `array<u32>` for anything | `T0*`, `T1*`, ... by dtype,   |
//! |                    | that is not f32; f16 that comes first   | by `load` and `store`         |
//! |                    | by `stored` and `four_stored`           |                               |
//! | parameters         | the binding behind them, `var<uniform>` | a struct by value, last       |
//! | constants          | `const D: u32 = 64u;` before the text   | `#define D 64`                |
//! | threads of a group | `THREADS`, also in `@workgroup_size`    | `THREADS`                     |
//! | several kernels in | variables of other names at the same    | each between                  |
//! | one file           | bindings                                | `#ifdef ENTRY_name`, `#endif` |
//!
//! Work runs in the order of launches. An op has no error to return, as with CUDA itself: after a
//! failure all work is skipped until `check` reports it to whoever ends a step with it. From then
//! on the device works again, unless it is lost. What was to be written in between is spoiled:
//! using it is a failure, and caches make it anew (`Tensor::is_spoiled`).
//!
//! Matrix products (`product.rs`, for few rows `vector.rs`), and the decoding of stored matrices
//! and casts (`decode.rs`), are here and not among the ops: tensors themselves and most ops need
//! them.
//!
//! Not here: all other ops, and anything about models.

mod buffer;
#[cfg_attr(target_arch = "wasm32", path = "no_cuda.rs")]
pub mod cuda;
mod decode;
mod failure;
pub mod graph;
pub(crate) mod later;
mod many;
mod opaque;
pub mod product;
pub mod profile;
#[cfg(test)]
mod tests;
pub mod vector;
mod wgpu;
mod work;

use crate::error::{Error, Result};
use crate::tensor::cpu::Cpu;
use crate::tensor::shelf::{MemoryUse, Shelf, class};
use crate::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use self::buffer::Buffer;
pub(crate) use self::failure::{Failure, Fault};
pub(crate) use self::many::Row;
use self::opaque::Opaque;
pub use self::wgpu::list as list_wgpu;
pub use self::work::{Const, N_ROUNDS_MAX, Word, Work, bind};
use later::block_on;

/// A kernel of an op, in both languages.
pub struct Kernel {
    /// Name of the function.
    pub entry: &'static str,
    pub wgsl: &'static str,
    pub cuda: &'static str,
}

impl Kernel {
    pub const fn new(entry: &'static str, wgsl: &'static str, cuda: &'static str) -> Kernel {
        Kernel { entry, wgsl, cuda }
    }

    /// Of each static another: what is compiled is kept under it, and not under the entry, which
    /// several texts may share.
    fn id(&'static self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// An argument of a kernel.
pub enum Arg<'a> {
    In(&'a Tensor),
    /// Written, every number of it, or read and written.
    Out(&'a mut Tensor),
    /// Some bytes of a tensor, written or read and written: for what is larger than a binding. The
    /// first is at a multiple of `Gpu::offset_align`.
    Window(&'a mut Tensor, Range<usize>),
}

/// What products and activations are computed in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// f32 throughout.
    #[default]
    F32,
    /// f32, but products round their inputs to 10 bits; CUDA alone.
    Tf32,
    /// Activations and products in bf16, sums and masters in f32; CUDA alone.
    Bf16,
}

impl Precision {
    /// As people type it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Tf32 => "tf32",
            Precision::Bf16 => "bf16",
        }
    }
}

/// A GPU; clones share it.
#[derive(Clone)]
pub struct Gpu(Arc<Inner>);

struct Inner {
    backend: Backend,
    /// Threads for what only the host can do.
    host: Arc<Cpu>,
    shelf: Mutex<Shelf<Memory>>,
    /// Where buffers come from while a graph is recorded.
    recording: Mutex<Option<Arc<graph::Reserve>>>,
    failure: Failure,
    precision: Precision,
    caps: Caps,
}

/// What a GPU can do: ops ask for this and not for the kind of device.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// Whether a thread reads and writes eight numbers at a time.
    pub wide_loads: bool,
    /// Whether the 32 threads of a warp exchange numbers, and have registers to share a task.
    pub warps: bool,
    /// Whether kernels multiply matrices in bf16 by tensor cores.
    pub tensor_cores: bool,
    /// Whether work can be recorded and started again as one (`Graph`).
    pub graphs: bool,
    /// Whether a kernel may follow addresses, so that one launch serves many tensors (`many.rs`).
    pub addresses: bool,
    /// Most bytes of shared memory for a group of threads.
    pub shared_bytes_max: usize,
    /// Parts that run groups of threads at once; 1 where it is not known.
    pub n_multiprocessors: usize,
    /// Most bytes of one argument of a kernel.
    pub binding_bytes_max: usize,
    /// What the first byte of an argument is a multiple of.
    pub offset_align: usize,
    /// Most rounds of loops in a thread: software Vulkan ends them without a word.
    pub n_rounds_max: usize,
}

enum Backend {
    Wgpu(Opaque<wgpu::Wgpu>),
    Cuda(Box<cuda::Cuda>),
}

/// Memory of one buffer.
pub(crate) enum Memory {
    Wgpu(Opaque<::wgpu::Buffer>),
    Cuda(cuda::Memory),
}

/// Buffers are whole lines of this many bytes.
const LINE: usize = 256;

/// A launch with its arguments resolved.
pub(crate) struct Launch<'a> {
    pub kernel: &'static Kernel,
    pub work: Work,
    pub consts: &'a [Const],
    pub args: &'a [Resolved<'a>],
    pub params: &'a [Word],
}

/// An argument as a backend needs it.
pub(crate) struct Resolved<'a> {
    pub memory: &'a Memory,
    pub offset: usize,
    pub n_bytes: usize,
    pub dtype: DType,
    pub writes: bool,
}

impl Gpu {
    /// The `index`-th adapter that wgpu finds, best first.
    pub async fn wgpu(index: usize, host: Arc<Cpu>) -> Result<Gpu> {
        Gpu::wgpu_with(index, host, usize::MAX, &wgpu::FEATURE_NAMES).await
    }

    /// The same with bindings of at most so many bytes, and of what not every adapter has with
    /// these features alone: for tests of what is split, and of kernels that have a twin.
    #[cfg(test)]
    pub fn wgpu_plain(
        index: usize,
        host: Arc<Cpu>,
        bytes_max: usize,
        features: &[&str],
    ) -> Result<Gpu> {
        block_on(Gpu::wgpu_with(index, host, bytes_max, features)).expect("tests wait")
    }

    /// As if the driver had lost it.
    #[cfg(test)]
    pub fn lose(&self) {
        if let Backend::Wgpu(wgpu) = &self.0.backend {
            wgpu.lose();
        }
    }

    async fn wgpu_with(
        index: usize,
        host: Arc<Cpu>,
        bytes_max: usize,
        features: &[&str],
    ) -> Result<Gpu> {
        let failure = Failure::default();
        let backend = wgpu::Wgpu::new(index, failure.clone(), bytes_max, features).await?;
        Ok(Gpu::with(Backend::Wgpu(Opaque::new(backend)), host, failure, Precision::F32))
    }

    /// The `index`-th GPU that CUDA finds.
    pub fn cuda(index: usize, host: Arc<Cpu>, precision: Precision) -> Result<Gpu> {
        let failure = Failure::default();
        let backend = cuda::Cuda::new(index, failure.clone())?;
        Ok(Gpu::with(Backend::Cuda(Box::new(backend)), host, failure, precision))
    }

    fn with(backend: Backend, host: Arc<Cpu>, failure: Failure, precision: Precision) -> Gpu {
        let caps = match &backend {
            Backend::Wgpu(wgpu) => wgpu.caps(),
            Backend::Cuda(cuda) => cuda.caps(),
        };
        let (shelf, recording) = (Mutex::default(), Mutex::default());
        Gpu(Arc::new(Inner { backend, host, shelf, recording, failure, precision, caps }))
    }

    fn shelf(&self) -> MutexGuard<'_, Shelf<Memory>> {
        self.0.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recording(&self) -> MutexGuard<'_, Option<Arc<graph::Reserve>>> {
        self.0.recording.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn caps(&self) -> &Caps {
        &self.0.caps
    }

    /// As `Device::by_name` takes it.
    pub(crate) fn kind(&self) -> &'static str {
        match &self.0.backend {
            Backend::Wgpu(_) => "wgpu",
            Backend::Cuda(_) => "cuda",
        }
    }

    /// Whether both are handles of one device.
    pub fn is_same(&self, other: &Gpu) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Keeps what an op found wrong, as if the device had said it.
    pub(crate) fn fail(&self, problem: String) {
        self.0.failure.set(problem);
    }

    pub fn host(&self) -> &Arc<Cpu> {
        &self.0.host
    }

    /// What activations are stored in.
    pub fn activation_dtype(&self) -> DType {
        match self.0.precision {
            Precision::Bf16 => DType::BF16,
            Precision::F32 | Precision::Tf32 => DType::F32,
        }
    }

    /// What products are computed in.
    pub fn precision(&self) -> Precision {
        self.0.precision
    }

    /// The CUDA side, where it is one. Ops ask `caps`.
    pub(crate) fn as_cuda(&self) -> Option<&cuda::Cuda> {
        match &self.0.backend {
            Backend::Cuda(cuda) => Some(cuda),
            Backend::Wgpu(_) => None,
        }
    }

    /// Most bytes of one argument of a kernel.
    pub fn binding_bytes_max(&self) -> usize {
        self.0.caps.binding_bytes_max
    }

    /// Work for kernels that take eight numbers at a time where they can.
    pub fn each_eight(&self, n: usize) -> Work {
        Work::each(if self.0.caps.wide_loads { n.div_ceil(8) } else { n })
    }

    /// Ranges of numbers, none of which takes more bytes than a binding may have.
    pub fn parts(&self, tensor: &Tensor) -> impl Iterator<Item = Range<usize>> + use<> {
        let n_elem = tensor.n_elem();
        let (per_block, bytes) = tensor.dtype().block();
        // Whole blocks, and a multiple of every alignment.
        let most = (self.binding_bytes_max() / bytes / 256).max(1) * 256 * per_block;
        (0..n_elem).step_by(most.min(n_elem.max(1))).map(move |at| at..n_elem.min(at + most))
    }

    /// What the first byte of an argument is a multiple of.
    pub fn offset_align(&self) -> usize {
        self.0.caps.offset_align
    }

    /// Runs of rows that fit into a binding, for kernels that go row by row: each begins where an
    /// argument may, whatever the rows are (of whole numbers).
    pub fn windows(&self, n_rows: usize, row_bytes: usize) -> Vec<Range<usize>> {
        let max = self.binding_bytes_max() / row_bytes.max(1);
        // The largest power of two in a row's bytes: so many rows begin at a multiple of `align`.
        let align = self.offset_align();
        let step = align >> row_bytes.trailing_zeros().min(align.trailing_zeros());
        let n = if max >= n_rows { n_rows } else { max / step * step };
        assert!(n > 0 || n_rows == 0, "{n_rows} rows of {row_bytes} bytes");
        (0..n_rows).step_by(n.max(1)).map(|at| at..n_rows.min(at + n)).collect()
    }

    /// Says that a kernel goes through so many rounds of loops: a failure where the driver would
    /// end them before.
    pub fn expect_rounds(&self, kernel: &Kernel, n_rounds: usize) {
        let n_max = self.0.caps.n_rounds_max;
        if n_rounds > n_max {
            self.0.failure.set(format!(
                "kernel `{}` needs {n_rounds} loop iterations; software Vulkan stops after {n_max}",
                kernel.entry
            ));
        }
    }

    /// Reports what went wrong since the last call, if anything did; waits only if so. The device
    /// works again afterwards, unless it is lost.
    pub fn check(&self) -> Result<()> {
        if !self.is_broken() {
            return Ok(());
        }
        if let Backend::Cuda(cuda) = &self.0.backend {
            cuda.find_loss();
        }
        let Some((fault, problem)) = self.0.failure.take() else { return Ok(()) };
        let device = self.name();
        Err(match fault {
            Fault::Memory => Error::OutOfMemory { device, problem },
            Fault::Lost => Error::DeviceLost { device, problem },
            Fault::Refused => Error::Device {
                problem: format!("{device}: {problem}"),
                hint: "use a smaller batch or a shorter context, or the CPU".into(),
            },
        })
    }

    /// Whether work is skipped because something went wrong.
    fn is_broken(&self) -> bool {
        self.0.failure.is_set()
    }

    /// Does work on these buffers, unless something has failed or one of them is spoiled. What it
    /// was to write is spoiled then, and also if it fails.
    fn attempt<'a>(
        &self,
        all: impl IntoIterator<Item = &'a Buffer>,
        written: impl IntoIterator<Item = &'a Buffer>,
        work: impl FnOnce(),
    ) {
        if !self.is_broken() {
            match all.into_iter().any(Buffer::is_spoiled) {
                true => self.fail("a tensor is used that an earlier failure left unwritten".into()),
                false => work(),
            }
        }
        if self.is_broken() {
            written.into_iter().for_each(|buffer| buffer.spoiled.store(true, Ordering::Relaxed));
        }
    }

    pub fn name(&self) -> String {
        match &self.0.backend {
            Backend::Wgpu(wgpu) => wgpu.name(),
            Backend::Cuda(cuda) => format!("{}, {}", cuda.name(), self.0.precision.name()),
        }
    }

    /// Names of the optional features that it uses.
    pub fn features(&self) -> Vec<&'static str> {
        match &self.0.backend {
            Backend::Wgpu(wgpu) => wgpu.features(),
            Backend::Cuda(_) => Vec::new(),
        }
    }

    /// Accounts of the pool.
    pub fn memory(&self) -> MemoryUse {
        self.shelf().usage
    }

    /// Gives buffers that nobody uses back to the system.
    pub fn trim(&self) {
        let free = self.shelf().drain();
        free.into_values().flatten().for_each(|memory| self.release(memory));
    }

    fn release(&self, memory: Memory) {
        match (&self.0.backend, memory) {
            (Backend::Cuda(cuda), Memory::Cuda(memory)) => cuda.free(memory),
            (_, memory) => drop(memory),
        }
    }

    /// A buffer with unspecified contents.
    pub(crate) fn take(&self, n_bytes: usize) -> Buffer {
        let class = class(n_bytes, LINE);
        let reserve = self.recording().clone().filter(|reserve| reserve.is_mine());
        let found = match &reserve {
            Some(reserve) => reserve.take(class),
            None => self.shelf().take(class),
        };
        let n_new = if found.is_none() { class } else { 0 };
        let memory = found.or_else(|| self.allocate(class));
        if memory.is_some() {
            self.shelf().count(class, n_new);
        }
        let spoiled = AtomicBool::new(memory.is_none());
        let buffer = Buffer { memory, class, spoiled, gpu: self.clone(), reserve };
        if cfg!(debug_assertions) {
            // Not a number in every format: who reads before writing is found out in tests.
            self.fill(&buffer, 0, n_bytes.next_multiple_of(4), u32::MAX);
        }
        buffer
    }

    /// Memory from the system; what lies free in other classes is given back first if need be.
    fn allocate(&self, n_bytes: usize) -> Option<Memory> {
        if self.is_broken() {
            return None;
        }
        let once = || match &self.0.backend {
            Backend::Wgpu(wgpu) => wgpu.allocate(n_bytes).map(|it| Memory::Wgpu(Opaque::new(it))),
            Backend::Cuda(cuda) => cuda.allocate(n_bytes).map(Memory::Cuda),
        };
        let got = once().or_else(|_| {
            self.trim();
            once()
        });
        got.map_err(|problem| self.0.failure.set_as(Fault::Memory, problem)).ok()
    }

    /// Bytes from the host.
    pub(crate) fn upload(&self, to: &Buffer, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= to.class, "upload past a buffer");
        if bytes.is_empty() {
            return;
        }
        self.attempt([to], [to], || match &self.0.backend {
            Backend::Wgpu(wgpu) => wgpu.upload(to.wgpu(), offset, bytes),
            Backend::Cuda(cuda) => cuda.upload(to.cuda(), offset, bytes),
        });
    }

    /// Bytes to the host, after all work before. Where something went wrong they are all ones.
    pub(crate) async fn read(&self, from: &Buffer, offset: usize, n_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0xff; n_bytes];
        assert!(offset + n_bytes <= from.class, "read past a buffer");
        let mut is_good = false;
        self.attempt([from], [], || is_good = n_bytes > 0);
        match &self.0.backend {
            _ if !is_good => bytes,
            Backend::Wgpu(wgpu) => wgpu.read(from.wgpu(), offset, n_bytes).await,
            Backend::Cuda(cuda) => {
                cuda.download(from.cuda(), offset, &mut bytes);
                bytes
            }
        }
    }

    /// The same, waited for; a failure in a browser, where nobody can.
    pub(crate) fn read_now(&self, from: &Buffer, offset: usize, n_bytes: usize) -> Vec<u8> {
        block_on(self.read(from, offset, n_bytes)).unwrap_or_else(|| {
            self.fail(
                "this needs numbers of the GPU at once, which a browser cannot wait for".into(),
            );
            vec![0xff; n_bytes]
        })
    }

    /// Copies between two buffers; offsets and length in whole words of four bytes.
    pub(crate) fn copy(&self, from: (&Buffer, usize), to: (&Buffer, usize), n_bytes: usize) {
        assert!(from.1 + n_bytes <= from.0.class && to.1 + n_bytes <= to.0.class, "copy past end");
        if n_bytes == 0 {
            return;
        }
        self.attempt([from.0, to.0], [to.0], || match &self.0.backend {
            Backend::Wgpu(it) => it.copy((from.0.wgpu(), from.1), (to.0.wgpu(), to.1), n_bytes),
            Backend::Cuda(it) => it.copy((from.0.cuda(), from.1), (to.0.cuda(), to.1), n_bytes),
        });
    }

    /// Sets words of four bytes.
    pub(crate) fn fill(&self, buffer: &Buffer, offset: usize, n_bytes: usize, word: u32) {
        if n_bytes == 0 {
            return;
        }
        self.attempt([buffer], [buffer], || match &self.0.backend {
            Backend::Wgpu(wgpu) => wgpu.fill(buffer.wgpu(), offset, n_bytes, word),
            Backend::Cuda(cuda) => cuda.fill(buffer.cuda(), offset, n_bytes, word),
        });
    }

    /// Starts a kernel. Nothing in `args` may be both read and written by different arguments.
    pub fn launch(
        &self,
        kernel: &'static Kernel,
        work: Work,
        consts: &[Const],
        args: &mut [Arg],
        params: &[Word],
    ) {
        for arg in args.iter_mut() {
            if let Arg::Out(tensor) | Arg::Window(tensor, _) = arg {
                tensor.expect_unique();
            }
        }
        // What begins off the alignment of a binding is copied: a row of a stacked tensor.
        let align = self.offset_align();
        let copies: Vec<Option<Tensor>> = args.iter().map(|arg| arg.aligned(align)).collect();
        let all = args.iter().map(|arg| arg.tensor().gpu_buffer().0);
        let written = args.iter().filter(|arg| arg.writes()).map(|arg| arg.tensor().gpu_buffer().0);
        self.attempt(all, written, || {
            let mut resolved = Vec::with_capacity(args.len());
            for (arg, copy) in args.iter().zip(&copies) {
                let (tensor, writes) = (copy.as_ref().unwrap_or(arg.tensor()), arg.writes());
                let (buffer, mut offset) = tensor.gpu_buffer();
                let Some(memory) = &buffer.memory else { return };
                let (mut n_bytes, dtype) = (tensor.n_bytes(), tensor.dtype());
                if let Arg::Window(_, bytes) = arg {
                    assert!(bytes.end <= n_bytes && bytes.start.is_multiple_of(align), "{bytes:?}");
                    (offset, n_bytes) = (bytes.start, bytes.len());
                }
                resolved.push(Resolved { memory, offset, n_bytes, dtype, writes });
            }
            graph::note(self, args);
            let launch = Launch { kernel, work, consts, args: &resolved, params };
            match &self.0.backend {
                Backend::Wgpu(wgpu) => wgpu.launch(&launch),
                Backend::Cuda(cuda) => cuda.launch(&launch),
            }
        });
    }

    /// Whether a driver computes for it on the CPU.
    pub fn is_software(&self) -> bool {
        matches!(&self.0.backend, Backend::Wgpu(wgpu) if wgpu.is_software())
    }

    /// Bytes of its memory that nobody uses, where the driver tells.
    pub fn free_bytes(&self) -> Option<u64> {
        match &self.0.backend {
            Backend::Wgpu(_) => None,
            Backend::Cuda(cuda) => cuda.free_bytes(),
        }
    }

    /// Waits for all work.
    pub fn wait(&self) {
        match &self.0.backend {
            Backend::Wgpu(wgpu) => wgpu.wait(),
            Backend::Cuda(cuda) => cuda.wait(),
        }
    }
}

impl Arg<'_> {
    fn tensor(&self) -> &Tensor {
        match self {
            Arg::In(tensor) => tensor,
            Arg::Out(tensor) | Arg::Window(tensor, _) => tensor,
        }
    }

    fn writes(&self) -> bool {
        !matches!(self, Arg::In(_))
    }

    /// A copy of an input whose first byte is off the alignment.
    fn aligned(&self, align: usize) -> Option<Tensor> {
        let first = self.tensor().gpu_buffer().1;
        assert!(first == 0 || !self.writes(), "a kernel writes whole tensors");
        (!first.is_multiple_of(align)).then(|| self.tensor().copied())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let shelf = self.shelf.get_mut().unwrap_or_else(PoisonError::into_inner);
        for memory in shelf.drain().into_values().flatten() {
            if let (Backend::Cuda(cuda), Memory::Cuda(memory)) = (&self.backend, memory) {
                cuda.free(memory);
            }
        }
    }
}
