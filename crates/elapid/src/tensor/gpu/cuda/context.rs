//! The libraries of CUDA, its devices, the context of one of them, and memory of the host.

use crate::error::{Error, Result};
use cudarc::driver::{result, sys};
use cudarc::{cublaslt, nvrtc};
use std::sync::Arc;

use result::DriverError;

/// The oldest driver that has all that is called: CUDA 12.0.
const DRIVER_MIN: i32 = 12_000;
/// The least compute capability: numbers in bf16.
const ARCHITECTURE_MIN: i32 = 80;

/// What `elapid info --devices` says of a device.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    pub name: String,
    pub memory: u64,
    /// Bytes of memory that nobody had taken when it was asked.
    pub memory_free: u64,
    /// Compute capability, as in `9.0`.
    pub capability: String,
    pub n_multiprocessors: u32,
    /// Most bytes of shared memory for a group of threads.
    pub shared_bytes_max: u32,
    /// Version of CUDA that the driver knows, as in `13.0`.
    pub driver: String,
}

/// A device, its primary context and a stream.
pub(super) struct Context {
    pub(super) device: CudaDevice,
    /// Compute capability as one number: 90 for 9.0.
    pub(super) architecture: i32,
    index: sys::CUdevice,
    context: sys::CUcontext,
    pub(super) stream: sys::CUstream,
}

// SAFETY: handles of the driver may be used from any thread; `enter` makes the context current.
unsafe impl Send for Context {}
// SAFETY: as above; the driver has its own locks.
unsafe impl Sync for Context {}

/// An error of the driver in words.
pub(super) fn words(error: &DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| format!("{:?}", error.0))
}

/// A device that cannot be used, and what to do.
pub(super) fn absent(problem: impl Into<String>, hint: &str) -> Error {
    Error::Device { problem: problem.into(), hint: hint.into() }
}

const LIST: &str = "`elapid info --devices` lists what is there; `--device wgpu` may work too";
const TOOLKIT: &str = "install CUDA's toolkit, version 12 or later, or put the folder of the \
                       library into LD_LIBRARY_PATH; `--device wgpu` needs only a driver";

/// Whether NVRTC can be opened: what follows would panic where it cannot.
pub(super) fn expect_nvrtc() -> Result<()> {
    // SAFETY: opens a library and closes it; those of CUDA do nothing at that.
    match unsafe { nvrtc::sys::is_culib_present() } {
        true => Ok(()),
        false => Err(absent("CUDA's compiler of kernels (libnvrtc) is not there", TOOLKIT)),
    }
}

pub(super) fn expect_blas() -> Result<()> {
    // SAFETY: as above.
    match unsafe { cublaslt::sys::is_culib_present() } {
        true => Ok(()),
        false => Err(absent("CUDA's matrix products (libcublasLt) are not there", TOOLKIT)),
    }
}

/// Whether the driver has a function that is younger than `DRIVER_MIN`.
pub(super) fn driver_has(symbol: &str) -> bool {
    // SAFETY: the pointer is not used.
    unsafe { sys::culib().get::<*const ()>(symbol.as_bytes()).is_ok() }
}

/// The driver, started; its version.
fn start() -> Result<i32> {
    // SAFETY: opens a library and closes it; the driver does nothing at that.
    if !unsafe { sys::is_culib_present() } {
        return Err(absent("there is no driver of CUDA (libcuda)", LIST));
    }
    result::init().map_err(|error| absent(format!("CUDA: {}", words(&error)), LIST))?;
    let mut version = 0;
    // SAFETY: writes one number.
    let got = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
    got.map_err(|error| absent(format!("CUDA: {}", words(&error)), LIST))?;
    if version < DRIVER_MIN {
        let problem = format!("the driver is of CUDA {}, 12.0 is needed", version_text(version));
        return Err(absent(problem, "install a newer driver, or use `--device wgpu`"));
    }
    Ok(version)
}

fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// What CUDA finds; nothing where there is no CUDA.
pub fn list() -> Vec<CudaDevice> {
    let Ok(version) = start() else { return Vec::new() };
    let n_devices = result::device::get_count().unwrap_or(0);
    (0..n_devices).filter_map(|index| describe(index, version).ok()).collect()
}

fn describe(index: i32, version: i32) -> std::result::Result<CudaDevice, DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
    };
    let device = result::device::get(index)?;
    // SAFETY: the device exists.
    let number = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    let architecture = architecture(device)?;
    Ok(CudaDevice {
        name: result::device::get_name(device)?,
        // SAFETY: the device exists.
        memory: unsafe { result::device::total_mem(device) }? as u64,
        memory_free: memory_free(device)? as u64,
        capability: format!("{}.{}", architecture / 10, architecture % 10),
        n_multiprocessors: number(MULTIPROCESSORS)? as u32,
        shared_bytes_max: number(SHARED)? as u32,
        driver: version_text(version),
    })
}

fn architecture(device: sys::CUdevice) -> std::result::Result<i32, DriverError> {
    use sys::CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
    };
    // SAFETY: the device exists.
    let number = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    Ok(number(MAJOR)? * 10 + number(MINOR)?)
}

/// Asked in the primary context, which is left as it was.
fn memory_free(device: sys::CUdevice) -> std::result::Result<usize, DriverError> {
    let before = result::ctx::get_current()?.unwrap_or(std::ptr::null_mut());
    // SAFETY: what is retained is released, and the context from before is current again.
    unsafe {
        let context = result::primary_ctx::retain(device)?;
        let free = result::ctx::set_current(context).and_then(|()| result::mem_get_info());
        let _ = result::ctx::set_current(before);
        result::primary_ctx::release(device)?;
        Ok(free?.0)
    }
}

impl Context {
    pub(super) fn new(index: usize) -> Result<Context> {
        let version = start()?;
        let told = |error: DriverError| absent(format!("CUDA: {}", words(&error)), LIST);
        let n_devices = result::device::get_count().map_err(told)?;
        if index >= n_devices as usize {
            let problem = format!("there is no CUDA device {index}: {n_devices} found");
            return Err(absent(problem, LIST));
        }
        let device = describe(index as i32, version).map_err(told)?;
        let index = result::device::get(index as i32).map_err(told)?;
        let architecture = architecture(index).map_err(told)?;
        if architecture < ARCHITECTURE_MIN {
            let (name, has) = (&device.name, &device.capability);
            let problem = format!("{name} has compute capability {has}, 8.0 is needed");
            return Err(absent(problem, "use `--device wgpu`"));
        }
        // SAFETY: the device exists; the context is released in `drop`.
        let context = unsafe { result::primary_ctx::retain(index) }.map_err(told)?;
        // SAFETY: it is retained.
        unsafe { result::ctx::set_current(context) }.map_err(told)?;
        let kind = result::stream::StreamKind::NonBlocking;
        let stream = result::stream::create(kind).map_err(told)?;
        Ok(Context { device, architecture, index, context, stream })
    }

    /// Makes the context current in this thread.
    pub(super) fn enter(&self) {
        // SAFETY: the context is retained as long as `self`. Where it is broken, what follows
        // fails, and that is told.
        let _ = unsafe { result::ctx::set_current(self.context) };
    }

    /// An error of the driver while a device is opened.
    pub(super) fn error(&self, error: &DriverError) -> Error {
        absent(format!("{}: {}", self.device.name, words(error)), LIST)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.enter();
        // SAFETY: both are ours and given back once; nothing that uses them is left.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.index);
        }
    }
}

/// Memory of the host that the device reaches.
pub(super) struct Pinned {
    at: *mut u8,
    n_bytes: usize,
    context: Arc<Context>,
}

// SAFETY: nobody else has the address.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(super) fn new(
        context: &Arc<Context>,
        n_bytes: usize,
    ) -> std::result::Result<Pinned, DriverError> {
        context.enter();
        // SAFETY: the context is current; the memory is freed in `drop`. It is set before it is
        // read.
        unsafe {
            let at = result::malloc_host(n_bytes.max(1), 0)?.cast::<u8>();
            at.write_bytes(0, n_bytes);
            Ok(Pinned { at, n_bytes, context: context.clone() })
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: that many bytes are there and set.
        unsafe { std::slice::from_raw_parts(self.at, self.n_bytes) }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has the address.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.n_bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.enter();
        // SAFETY: it is ours and freed once; copies from and to it were waited for.
        let _ = unsafe { result::free_host(self.at.cast()) };
    }
}
