//! Kernels: their text, compilation by NVRTC, and the functions it gives.
//!
//! A kernel is compiled once for its constants, its threads and the dtypes of its arguments. The
//! text is, in this order: THREADS and the kernel's name, the prelude, the constants and the types
//! T0, T1, ... of the arguments, and the op's own file.
//!
//! Not here: a store of compiled kernels on disk. The engine sees no files.

use super::context::{Context, driver_has, words};
use super::lock;
use crate::tensor::DType;
use crate::tensor::gpu::{Const, Launch};
use cudarc::driver::{CudaFunction, result, sys};
use cudarc::nvrtc;
use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::sync::{Arc, Mutex};

const PRELUDE: &str = include_str!("../prelude.cu");
/// Bytes of dynamic shared memory that need no permission.
const SHARED_PLAIN: u32 = 48 << 10;

/// Most bytes of parameters, as with wgpu.
pub(super) const PARAMS_MAX: usize = 256;

pub(super) struct Functions {
    known: Mutex<Known>,
    /// What kernels are compiled for: machine code, as `sm_90a`, or an intermediate text for the
    /// driver, as `compute_80`, where NVRTC is older than the device.
    target: String,
    /// Whether the driver tells what a function takes.
    knows_params: bool,
    context: Arc<Context>,
}

#[derive(Default)]
struct Known {
    functions: HashMap<Key, CudaFunction>,
    /// The kernel that was started last, for messages.
    last: &'static str,
}

#[derive(PartialEq, Eq, Hash)]
struct Key {
    kernel: usize,
    threads: u32,
    consts: Vec<Const>,
    types: Vec<&'static str>,
}

/// The type of an argument in a kernel.
fn type_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::BF16 => "bf16",
        DType::F16 => "f16",
        DType::U32 => "u32",
        DType::Block(_) => "unsigned char",
    }
}

/// What this NVRTC compiles for this device.
fn target(wanted: i32) -> String {
    let mut n_known = 0;
    // SAFETY: writes one number.
    let _ = unsafe { nvrtc::sys::nvrtcGetNumSupportedArchs(&mut n_known) };
    let mut known = vec![0i32; n_known.max(0) as usize];
    // SAFETY: writes as many numbers as it just said.
    let _ = unsafe { nvrtc::sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) };
    if known.contains(&wanted) {
        // Hopper's own instructions are behind an `a`.
        let suffix = if wanted == 90 { "a" } else { "" };
        return format!("sm_{wanted}{suffix}");
    }
    let below = known.into_iter().filter(|&one| one <= wanted).max().unwrap_or(80);
    format!("compute_{below}")
}

impl Functions {
    pub(super) fn new(context: Arc<Context>) -> Functions {
        let target = target(context.architecture);
        let knows_params = driver_has("cuFuncGetParamInfo");
        Functions { known: Mutex::default(), target, knows_params, context }
    }

    /// The kernel that was started last.
    pub(super) fn last(&self) -> &'static str {
        lock(&self.known).last
    }

    /// The function of a launch, allowed the shared memory it asks for.
    pub(super) fn get(&self, launch: &Launch) -> Result<CudaFunction, String> {
        let key = Key {
            kernel: launch.kernel.id(),
            threads: launch.work.threads,
            consts: launch.consts.to_vec(),
            types: launch.args.iter().map(|arg| type_of(arg.dtype)).collect(),
        };
        let mut known = lock(&self.known);
        known.last = launch.kernel.entry;
        let function = match known.functions.get(&key) {
            Some(found) => found.clone(),
            None => {
                let made = self.make(launch, &key)?;
                known.functions.insert(key, made.clone());
                made
            }
        };
        drop(known);
        let shared = launch.work.shared;
        if shared > SHARED_PLAIN {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, shared as i32).map_err(|error| {
                let entry = launch.kernel.entry;
                format!("`{entry}` asks for {shared} bytes of shared memory: {}", words(&error))
            })?;
        }
        Ok(function)
    }

    fn make(&self, launch: &Launch, key: &Key) -> Result<CudaFunction, String> {
        let entry = launch.kernel.entry;
        let image = self.compile(entry, source(launch, key))?;
        let told = |error: result::DriverError| format!("cannot load `{entry}`: {}", words(&error));
        let context = self.context.stream.context();
        let module = context.load_module(image).map_err(told)?;
        let function = module.load_function(entry).map_err(told)?;
        self.expect_params(&function, launch)?;
        Ok(function)
    }

    /// A kernel reads what it declares, whatever is given: it must be the same.
    fn expect_params(&self, function: &CudaFunction, launch: &Launch) -> Result<(), String> {
        if !self.knows_params {
            return Ok(());
        }
        let (mut sizes, mut offset, mut size) = (Vec::new(), 0, 0);
        // SAFETY: writes two numbers, and fails past the last parameter.
        while unsafe {
            sys::cuFuncGetParamInfo(function.cu_function(), sizes.len(), &mut offset, &mut size)
        } == sys::CUresult::CUDA_SUCCESS
        {
            sizes.push(size);
        }
        // Entries of one file share the struct of parameters: it may have more than are given.
        let (n_args, n_bytes) = (launch.args.len(), 4 * launch.params.len());
        let args = vec![size_of::<sys::CUdeviceptr>(); n_args];
        let declared = sizes.get(n_args).copied().unwrap_or(0);
        if sizes.starts_with(&args)
            && sizes.len() <= n_args + 1
            && (n_bytes..=PARAMS_MAX).contains(&declared)
        {
            return Ok(());
        }
        let entry = launch.kernel.entry;
        Err(format!("`{entry}` takes {sizes:?} bytes, given are {args:?} and {n_bytes}"))
    }

    fn compile(&self, entry: &str, source: String) -> Result<nvrtc::Ptx, String> {
        let has_zero = |_| format!("`{entry}` has a zero in its text");
        let source = CString::new(source).map_err(has_zero)?;
        let name = CString::new(format!("{entry}.cu")).map_err(has_zero)?;
        let options = [
            format!("--gpu-architecture={}", self.target),
            "-default-device".into(),
            "--fmad=true".into(),
        ];
        let told =
            |error: nvrtc::result::NvrtcError| format!("cannot compile `{entry}`: {error:?}");
        let program = nvrtc::result::create_program(&source, Some(&name)).map_err(told)?;
        // SAFETY: the program lives until it is destroyed at the end; `source` outlives it.
        unsafe {
            let compiled = nvrtc::result::compile_program(program, &options);
            let image = match compiled {
                Ok(()) if self.target.starts_with("sm_") => machine_code(program).map_err(told),
                Ok(()) => {
                    nvrtc::result::get_ptx(program).map(|text| text_of(&text).into()).map_err(told)
                }
                Err(error) => {
                    let log = nvrtc::result::get_program_log(program).unwrap_or_default();
                    Err(format!("{}\n{}", told(error), text_of(&log)))
                }
            };
            let _ = nvrtc::result::destroy_program(program);
            image
        }
    }
}

/// # Safety
/// The program lives and was compiled for a machine.
unsafe fn machine_code(
    program: nvrtc::sys::nvrtcProgram,
) -> Result<nvrtc::Ptx, nvrtc::result::NvrtcError> {
    let mut n_bytes = 0;
    // SAFETY: writes one number.
    unsafe { nvrtc::sys::nvrtcGetCUBINSize(program, &mut n_bytes) }.result()?;
    let mut code = vec![0u8; n_bytes];
    // SAFETY: writes as many bytes as it just said.
    unsafe { nvrtc::sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) }.result()?;
    Ok(nvrtc::Ptx::from_binary(code))
}

/// What stands before the first zero.
fn text_of(text: &[c_char]) -> String {
    let bytes: Vec<u8> = text.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The whole text of a kernel.
fn source(launch: &Launch, key: &Key) -> String {
    let (entry, threads) = (launch.kernel.entry, key.threads);
    let mut text = format!("#define THREADS {threads}\n#define ENTRY_{entry}\n{PRELUDE}\n");
    for (name, value) in &key.consts {
        text.push_str(&format!("#define {name} {value}\n"));
    }
    for (idx, name) in key.types.iter().enumerate() {
        text.push_str(&format!("typedef {name} T{idx};\n"));
    }
    // Lines of messages are those of the op's file.
    text.push_str(&format!("#line 1 \"{entry}\"\n{}", launch.kernel.cuda));
    text
}
