//! CUDA: opened at run time, kernels compiled by NVRTC, products by cuBLASLt.
//!
//! One device, its primary context and one stream, on which everything happens in order. Nothing of
//! CUDA is linked: a machine without its libraries gets an error with words.
//!
//! | file         |                                                                  |
//! |--------------|------------------------------------------------------------------|
//! | `context.rs` | the libraries, devices, the context                              |
//! | `module.rs`  | kernels: their text, compilation, and the functions it gives     |
//! | `product.rs` | matrix products of tensors: formats, places and strides          |
//! | `blas.rs`    | matrix products of what lies somewhere, by cuBLASLt              |
//! | `profile.rs` | time of kernels                                                  |
//! | `nccl.rs`    | messages to the GPUs of other processes                          |
//!
//! Failures of calls end in `Failure`, as with wgpu. A context that has failed for good says so at
//! every call: `find_loss` asks it.

mod blas;
mod context;
mod module;
pub(crate) mod nccl;
mod product;
mod profile;

use self::blas::Blas;
use self::context::{Context, Pinned, cannot_open, expect_libraries, words};
use self::module::{Functions, PARAMS_MAX};
use self::profile::Profile;
use super::profile::KernelTime;
use super::{Caps, Failure, Fault, Launch, Resolved};
use crate::error::Result;
use cudarc::driver::{CudaGraph, result, sys};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread::ThreadId;

pub use self::context::list;

/// A device of CUDA.
pub struct Cuda {
    functions: Functions,
    /// Opened by the first product.
    blas: Mutex<Option<Blas>>,
    profile: Mutex<Option<Profile>>,
    /// Small reads of the host go through it.
    staging: Mutex<Pinned>,
    /// What a graph being recorded must keep; nothing where none is.
    recording: Mutex<Option<Vec<Pinned>>>,
    /// Held for writing by the thread that records: the work of others would be recorded too.
    turns: RwLock<()>,
    recorder: Mutex<Option<ThreadId>>,
    failure: Failure,
    context: Arc<Context>,
}

/// Memory of one buffer.
pub(crate) struct Memory(sys::CUdeviceptr);

impl Memory {
    /// Address of a byte.
    pub(super) fn at(&self, offset: usize) -> sys::CUdeviceptr {
        self.0 + offset as sys::CUdeviceptr
    }
}

/// While it is there this thread records, and others wait with their work.
pub(super) struct Recording<'a> {
    cuda: &'a Cuda,
    _turn: RwLockWriteGuard<'a, ()>,
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        // Still recording: a panic came through here.
        if lock(&self.cuda.recording).take().is_some() {
            let _ = self.cuda.context.stream.end_capture(PLAIN);
        }
        *lock(&self.cuda.recorder) = None;
    }
}

/// Work that was recorded once and is started as one.
pub(crate) struct Recorded {
    graph: CudaGraph,
    /// Bytes from the host that are uploaded again at every start.
    _kept: Vec<Pinned>,
    context: Arc<Context>,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Recorded {}

impl Drop for Recorded {
    fn drop(&mut self) {
        self.context.enter();
        // What runs of it reads the memory that is freed next.
        let _ = self.context.stream.synchronize();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The least compute capability with early starts.
const EARLY_MIN: i32 = 90;
/// Bytes of the staging memory.
const STAGING: usize = 1 << 19;
/// Graphs without options.
const PLAIN: sys::CUgraphInstantiate_flags = sys::CUgraphInstantiate_flags(0);

impl Cuda {
    pub(super) fn new(index: usize, failure: Failure) -> Result<Cuda> {
        let context = Arc::new(Context::new(index)?);
        expect_libraries()?;
        let staging = context.pinned(STAGING).map_err(cannot_open)?;
        Ok(Cuda {
            functions: Functions::new(context.clone()),
            blas: Mutex::default(),
            profile: Mutex::default(),
            staging: Mutex::new(staging),
            recording: Mutex::default(),
            turns: RwLock::default(),
            recorder: Mutex::default(),
            failure,
            context,
        })
    }

    pub(super) fn name(&self) -> String {
        format!("{}, CUDA", self.context.name)
    }

    pub(super) fn caps(&self) -> Caps {
        Caps {
            wide_loads: true,
            warps: true,
            tensor_cores: true,
            graphs: true,
            addresses: true,
            shared_bytes_max: self.context.shared_bytes_max as usize,
            n_multiprocessors: self.context.n_multiprocessors as usize,
            binding_bytes_max: usize::MAX,
            // Four numbers in one read.
            offset_align: 16,
            n_rounds_max: usize::MAX,
        }
    }

    /// Joins the GPUs of other processes.
    pub(crate) fn join_ranks(
        &self,
        id: [u8; nccl::ID_BYTES],
        rank: usize,
        n_ranks: usize,
    ) -> std::result::Result<nccl::Nccl, String> {
        nccl::Nccl::open(&self.context, id, rank, n_ranks)
    }

    /// Waits while another thread records; then none does as long as the guard is there, and the
    /// context is current.
    fn turn(&self) -> Option<RwLockReadGuard<'_, ()>> {
        self.context.enter();
        let is_recorder = *lock(&self.recorder) == Some(std::thread::current().id());
        (!is_recorder).then(|| self.turns.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Keeps an error of the driver.
    fn tell<T>(&self, what: &str, got: std::result::Result<T, result::DriverError>) -> Option<T> {
        got.map_err(|error| {
            let last = self.functions.last();
            let after = if last.is_empty() { String::new() } else { format!(", after `{last}`") };
            let is_memory = error.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            let fault = if is_memory { Fault::Memory } else { Fault::Refused };
            self.failure.set_as(fault, format!("{what}{after}: {}", words(&error)));
        })
        .ok()
    }

    /// Asks whether anything can be done after a failure.
    pub(super) fn find_loss(&self) {
        let _turn = self.turn();
        if let Err(error) = self.context.stream.synchronize() {
            self.failure.set_as(Fault::Lost, words(&error));
        }
    }

    pub(super) fn free_bytes(&self) -> Option<u64> {
        self.context.enter();
        result::mem_get_info().ok().map(|(free, _)| free as u64)
    }

    pub(super) fn allocate(&self, n_bytes: usize) -> std::result::Result<Memory, String> {
        self.context.enter();
        // SAFETY: the context is current; the memory is freed once, by `free`.
        match unsafe { result::malloc_sync(n_bytes) } {
            Ok(at) => Ok(Memory(at)),
            Err(error) => {
                let (free, total) = result::mem_get_info().unwrap_or_default();
                let [asked, free, total] = [n_bytes, free, total].map(|n| n >> 20);
                let problem = words(&error);
                Err(format!("{asked} MiB were asked for, {free} of {total} are free: {problem}"))
            }
        }
    }

    pub(super) fn free(&self, memory: Memory) {
        let _turn = self.turn();
        // SAFETY: it comes from `allocate`, is given back once, and the driver waits for its users.
        let freed = unsafe { result::free_sync(memory.0) };
        self.tell("cannot free memory", freed);
    }

    /// In the order of launches; the bytes are taken over before it returns.
    pub(super) fn upload(&self, to: &Memory, offset: usize, bytes: &[u8]) {
        let _turn = self.turn();
        let at = to.at(offset);
        let stream = self.context.cu_stream();
        let mut recording = lock(&self.recording);
        let copied = match &mut *recording {
            // SAFETY: the range is inside of the buffer (checked above us), and the driver takes
            // bytes from pageable memory over before it returns.
            None => unsafe { result::memcpy_htod_async(at, bytes, stream) },
            // The graph reads them at every start, so that they must stay where they are.
            Some(kept) => self.context.pinned(bytes.len()).and_then(|mut pinned| {
                pinned.as_mut_slice()?.copy_from_slice(bytes);
                // SAFETY: as above; the graph keeps the source.
                let copied = unsafe { result::memcpy_htod_async(at, pinned.as_slice()?, stream) };
                kept.push(pinned);
                copied
            }),
        };
        self.tell("cannot upload", copied);
    }

    /// Waits for all work before it.
    pub(super) fn download(&self, from: &Memory, offset: usize, bytes: &mut [u8]) {
        let _turn = self.turn();
        if lock(&self.recording).is_some() {
            return self.failure.set("the host reads in the middle of a recorded graph".into());
        }
        let at = from.at(offset);
        let is_small = bytes.len() <= STAGING;
        let copied = lock(&self.staging).as_mut_slice().and_then(|staging| {
            let to = if is_small { &mut staging[..bytes.len()] } else { &mut *bytes };
            // SAFETY: the range is inside of the buffer (checked above us), and `to` outlives the
            // copy, because the stream is waited for.
            unsafe { result::memcpy_dtoh_async(to, at, self.context.cu_stream()) }?;
            self.context.stream.synchronize()?;
            if is_small {
                bytes.copy_from_slice(&staging[..bytes.len()]);
            }
            Ok(())
        });
        if self.tell("cannot read", copied).is_none() {
            bytes.fill(0xff);
        }
    }

    pub(super) fn copy(
        &self,
        (from, from_offset): (&Memory, usize),
        (to, to_offset): (&Memory, usize),
        n_bytes: usize,
    ) {
        let _turn = self.turn();
        let (from, to) = (from.at(from_offset), to.at(to_offset));
        // SAFETY: both ranges are inside of their buffers (checked above us).
        let copied =
            unsafe { result::memcpy_dtod_async(to, from, n_bytes, self.context.cu_stream()) };
        self.tell("cannot copy", copied);
    }

    pub(super) fn fill(&self, buffer: &Memory, offset: usize, n_bytes: usize, word: u32) {
        let _turn = self.turn();
        let (at, n_words) = (buffer.at(offset), n_bytes.div_ceil(4));
        // SAFETY: the range is inside of the buffer, whose length is whole words.
        let filled =
            unsafe { sys::cuMemsetD32Async(at, word, n_words, self.context.cu_stream()) }.result();
        self.tell("cannot fill", filled);
    }

    pub(super) fn launch(&self, launch: &Launch) {
        let _turn = self.turn();
        let entry = launch.kernel.entry;
        let function = match self.functions.get(launch) {
            Ok(function) => function,
            Err(problem) => return self.failure.set(problem),
        };
        let place = |arg: &Resolved| match arg.memory {
            super::Memory::Cuda(memory) => memory.at(arg.offset),
            super::Memory::Wgpu(_) => unreachable!("a buffer of another device"),
        };
        let mut places: Vec<sys::CUdeviceptr> = launch.args.iter().map(place).collect();
        // Kernels may declare more than is given: zeros behind it.
        let mut params = [0u32; PARAMS_MAX / 4];
        params.iter_mut().zip(launch.params).for_each(|(to, word)| *to = word.0);
        let places = places.iter_mut().map(|place| std::ptr::from_mut(place).cast::<c_void>());
        let mut pointers: Vec<*mut c_void> =
            places.chain([params.as_mut_ptr().cast::<c_void>()]).collect();
        let [x, y, z] = launch.work.groups;
        let can_be_early = self.context.architecture >= EARLY_MIN;
        let is_early = launch.work.is_early && can_be_early && lock(&self.recording).is_some();
        let mut early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.work.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.work.shared,
            hStream: self.context.cu_stream(),
            attrs: &mut early,
            numAttrs: u32::from(is_early),
        };
        let start = || {
            // SAFETY: the function was checked to take these arguments and parameters; buffers stay
            // until the stream has passed, because a pool reuses them in its order; who starts
            // early awaits its input.
            let started = unsafe {
                let (params, extra) = (pointers.as_mut_ptr(), std::ptr::null_mut());
                sys::cuLaunchKernelEx(&config, function.cu_function(), params, extra)
            };
            self.tell(&format!("cannot start `{entry}`"), started.result());
        };
        self.timed(|| entry.into(), start);
    }

    /// Starts something and, where somebody asked for it, takes its time.
    fn timed(&self, name: impl Fn() -> String, start: impl FnOnce()) {
        let mut profile = lock(&self.profile);
        let Some(profile) = &mut *profile else {
            drop(profile);
            return start();
        };
        if lock(&self.recording).is_some() {
            return start();
        }
        let measured = profile.measure(name(), start);
        self.tell("cannot take the time", measured);
    }

    pub(super) fn profile_start(&self) {
        *lock(&self.profile) = Some(Profile::new(self.context.clone()));
    }

    pub(super) fn profile_stop(&self) -> Vec<KernelTime> {
        let Some(profile) = lock(&self.profile).take() else { return Vec::new() };
        self.tell("cannot take the time", profile.finish()).unwrap_or_default()
    }

    pub(super) fn wait(&self) {
        let _turn = self.turn();
        if lock(&self.recording).is_some() {
            return self.failure.set("the host waits in the middle of a recorded graph".into());
        }
        self.tell("a kernel failed", self.context.stream.synchronize());
    }

    /// From here on the work of this thread is recorded and not done.
    pub(super) fn record(&self) -> Option<Recording<'_>> {
        let turn = self.turns.write().unwrap_or_else(PoisonError::into_inner);
        // Relaxed: memory that no pool has may still be asked for.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        self.tell("cannot record a graph", self.context.stream.begin_capture(mode))?;
        *lock(&self.recording) = Some(Vec::new());
        *lock(&self.recorder) = Some(std::thread::current().id());
        Some(Recording { cuda: self, _turn: turn })
    }

    /// What was recorded since `record`.
    pub(super) fn recorded(&self, _recording: Recording) -> Option<Recorded> {
        let kept = lock(&self.recording).take().unwrap_or_default();
        let made = self.context.stream.end_capture(PLAIN);
        let graph = self.tell("cannot record a graph", made)??;
        Some(Recorded { graph, _kept: kept, context: self.context.clone() })
    }

    /// Does what was recorded.
    pub(super) fn replay(&self, recorded: &Recorded) {
        let _turn = self.turn();
        let start = || {
            self.tell("cannot start a graph", recorded.graph.launch());
        };
        self.timed(|| "graph".into(), start);
    }
}
