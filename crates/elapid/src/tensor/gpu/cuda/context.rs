//! The libraries of CUDA, its devices, and the context of one of them.

use crate::error::{Error, Result};
use crate::tensor::devices::DeviceInfo;
use cudarc::driver::{CudaContext, CudaStream, PinnedHostSlice, result, sys};
use cudarc::{cublaslt, nvrtc};
use std::sync::Arc;

use result::DriverError;
use sys::CUdevice_attribute::{
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
};

/// The oldest driver that has all that is called: CUDA 12.0.
const DRIVER_MIN: i32 = 12_000;
/// The least compute capability: numbers in bf16.
const ARCHITECTURE_MIN: i32 = 80;

/// A device, its primary context and a stream.
pub(crate) struct Context {
    pub(super) name: String,
    /// Compute capability as one number: 90 for 9.0.
    pub(super) architecture: i32,
    pub(crate) n_multiprocessors: u32,
    /// Most bytes of shared memory for a group of threads.
    pub(crate) shared_bytes_max: u32,
    pub(super) stream: Arc<CudaStream>,
}

pub(super) type Pinned = PinnedHostSlice<u8>;

/// An error of the driver in words.
pub(super) fn words(error: &DriverError) -> String {
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    text.unwrap_or_else(|_| format!("{:?}", error.0))
}

/// A device that cannot be used, and what to do.
fn absent(problem: impl Into<String>, hint: &str) -> Error {
    Error::Device { problem: problem.into(), hint: hint.into() }
}

const LIST: &str = "list the devices to see what is there; `wgpu` may work too";
const TOOLKIT: &str = "install CUDA's toolkit, version 12 or later, or put the folder of the \
                       library into LD_LIBRARY_PATH; `wgpu` needs only a driver";

/// Whether the libraries can be opened: what follows would panic where they cannot.
pub(super) fn expect_libraries() -> Result<()> {
    // SAFETY: opens a library and closes it; those of CUDA do nothing at that.
    if !unsafe { nvrtc::sys::is_culib_present() } {
        return Err(absent("CUDA's compiler of kernels (libnvrtc) is not there", TOOLKIT));
    }
    // SAFETY: as above.
    if !unsafe { cublaslt::sys::is_culib_present() } {
        return Err(absent("CUDA's matrix products (libcublasLt) are not there", TOOLKIT));
    }
    Ok(())
}

/// Whether the driver has a function that is younger than `DRIVER_MIN`.
pub(super) fn driver_has(symbol: &str) -> bool {
    // SAFETY: the pointer is not used.
    unsafe { sys::culib().get::<*const ()>(symbol.as_bytes()).is_ok() }
}

/// An error of the driver while a device is opened.
pub(super) fn cannot_open(error: DriverError) -> Error {
    absent(format!("CUDA: {}", words(&error)), LIST)
}

/// The driver, started; its version.
fn start() -> Result<i32> {
    // SAFETY: opens a library and closes it; the driver does nothing at that.
    if !unsafe { sys::is_culib_present() } {
        return Err(absent("there is no CUDA driver (libcuda)", LIST));
    }
    result::init().map_err(cannot_open)?;
    let mut version = 0;
    // SAFETY: writes one number.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(cannot_open)?;
    if version < DRIVER_MIN {
        let problem = format!("the driver is of CUDA {}, 12.0 is needed", version_text(version));
        return Err(absent(problem, "install a newer driver, or use `wgpu`"));
    }
    Ok(version)
}

fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// What CUDA finds; nothing where there is no CUDA.
pub fn list() -> Vec<DeviceInfo> {
    let Ok(version) = start() else { return Vec::new() };
    let n_devices = CudaContext::device_count().unwrap_or(0) as usize;
    (0..n_devices).filter_map(|index| describe(index, version).ok()).collect()
}

fn describe(index: usize, version: i32) -> std::result::Result<DeviceInfo, DriverError> {
    let context = CudaContext::new(index)?;
    let (major, minor) = context.compute_capability()?;
    Ok(DeviceInfo {
        id: format!("cuda:{index}"),
        name: context.name()?,
        memory: Some(context.total_mem()? as u64),
        memory_free: Some(context.mem_get_info()?.0 as u64),
        compute_capability: Some(format!("{major}.{minor}")),
        driver: Some(version_text(version)),
        n_multiprocessors: Some(context.attribute(MULTIPROCESSORS)? as u32),
        ..DeviceInfo::default()
    })
}

impl Context {
    pub(super) fn new(index: usize) -> Result<Context> {
        start()?;
        let n_devices = CudaContext::device_count().map_err(cannot_open)?;
        if index >= n_devices as usize {
            let problem = format!("there is no CUDA device {index}: {n_devices} found");
            return Err(absent(problem, LIST));
        }
        let context = Context::open(index).map_err(cannot_open)?;
        let Context { name, architecture, .. } = &context;
        if *architecture < ARCHITECTURE_MIN {
            let (major, minor) = (architecture / 10, architecture % 10);
            let problem = format!("{name} has compute capability {major}.{minor}, 8.0 is needed");
            return Err(absent(problem, "use `wgpu`"));
        }
        Ok(context)
    }

    fn open(index: usize) -> std::result::Result<Context, DriverError> {
        let context = CudaContext::new(index)?;
        let (major, minor) = context.compute_capability()?;
        Ok(Context {
            name: context.name()?,
            architecture: 10 * major + minor,
            n_multiprocessors: context.attribute(MULTIPROCESSORS)? as u32,
            shared_bytes_max: context.attribute(SHARED)? as u32,
            stream: context.new_stream()?,
        })
    }

    /// Makes the context current in this thread.
    pub(super) fn enter(&self) {
        // SAFETY: the context is retained as long as `self`. Where it is broken, what follows
        // fails, and that is told.
        let _ = unsafe { result::ctx::set_current(self.stream.context().cu_ctx()) };
    }

    pub(super) fn cu_stream(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    /// Memory of the host that the device reaches.
    pub(super) fn pinned(&self, n_bytes: usize) -> std::result::Result<Pinned, DriverError> {
        // SAFETY: bytes of any value are valid, and all are written before they are read.
        unsafe { self.stream.context().alloc_pinned_with_flags(n_bytes, 0) }
    }
}
