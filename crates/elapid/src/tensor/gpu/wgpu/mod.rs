//! wgpu: Vulkan, Metal, DirectX 12, later the browser.
//!
//! Launches and copies are recorded into one command buffer and handed over together when the host
//! reads something. Parameters of launches go into slots of uniform buffers that are written just
//! before. Pipelines are made once for each kernel, its constants and its kinds of arguments.
//!
//! Sums over a group go by subgroups where the adapter has them and a first kernel has shown that
//! they hold threads in order; else through shared memory alone. Arguments in f16 are read as such
//! where the adapter has these numbers and a first kernel has shown that each comes out right; else
//! they are made of words.
//!
//! Times of kernels are taken by the adapter's own queries, each kernel in a pass of its own.
//!
//! Errors that nobody asked for end in `Failure`. Commands that were recorded are lost with them,
//! so that they count as the loss of the device; memory that could not be had does not.

// tidy: allow unsafe (wgpu's own checks of loops are left out)
mod probe;
mod profile;

use super::later::{Later, block_on};
use super::{Caps, Const, Failure, Fault, Kernel, Launch, Memory, N_ROUNDS_MAX, Resolved, Work};
use crate::error::{Error, Result};
use crate::tensor::DType;
use crate::tensor::devices::DeviceInfo;
use profile::Profile;
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};

/// Text before every kernel.
const PRELUDE: &str = include_str!("../prelude.wgsl");
/// Sums over a group: with what is there everywhere, and with subgroups.
const PLAIN_SUMS: &str = include_str!("../sums.wgsl");
const SUBGROUP_SUMS: &str = include_str!("../subgroups.wgsl");
/// Numbers of an argument in f16: made of words, and read as what they are.
const PLAIN_HALVES: &str = include_str!("../halves.wgsl");
const F16_HALVES: &str = include_str!("../f16.wgsl");
/// What kernels can use and not every adapter has.
const FEATURES: [(wgpu::Features, &str); 2] =
    [(wgpu::Features::SHADER_F16, "f16"), (wgpu::Features::SUBGROUP, "subgroups")];
pub(super) const FEATURE_NAMES: [&str; 2] = [FEATURES[0].1, FEATURES[1].1];
/// Bytes between the parameters of two launches: the alignment of uniform bindings.
const SLOT: usize = 256;
/// Launches whose parameters share a uniform buffer.
const N_SLOTS: usize = 256;
/// Launches after which work is handed over in any case.
const N_LAUNCHES_MAX: usize = 4096;

/// A device of wgpu.
pub struct Wgpu {
    device: wgpu::Device,
    queue: wgpu::Queue,
    info: wgpu::AdapterInfo,
    limits: wgpu::Limits,
    /// The text of sums over a group.
    sums: &'static str,
    /// The text of numbers in f16, for kernels with such an argument.
    halves: &'static str,
    pipelines: Mutex<HashMap<Key, Arc<Pipeline>>>,
    pending: Mutex<Pending>,
    failure: Failure,
}

#[derive(PartialEq, Eq, Hash)]
struct Key {
    kernel: usize,
    threads: u32,
    consts: Vec<Const>,
    writes: Vec<bool>,
}

struct Pipeline {
    pipeline: wgpu::ComputePipeline,
    layout: wgpu::BindGroupLayout,
}

/// What has been recorded and not handed over.
#[derive(Default)]
struct Pending {
    /// Before the encoder, so that it is dropped before it.
    pass: Option<wgpu::ComputePass<'static>>,
    encoder: Option<wgpu::CommandEncoder>,
    uniforms: Vec<Uniforms>,
    n_launches: usize,
    profile: Option<Profile>,
}

/// A uniform buffer and what is to be in it.
struct Uniforms {
    buffer: wgpu::Buffer,
    bytes: Vec<u8>,
}

async fn adapters() -> Vec<wgpu::Adapter> {
    use wgpu::DeviceType::{Cpu, DiscreteGpu, IntegratedGpu, Other, VirtualGpu};
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.backends = wgpu::Backends::PRIMARY;
    let instance = wgpu::Instance::new(descriptor);
    let mut list = instance.enumerate_adapters(wgpu::Backends::PRIMARY).await;
    let best_first = [DiscreteGpu, IntegratedGpu, VirtualGpu, Other, Cpu];
    list.sort_by_key(|it| best_first.iter().position(|kind| *kind == it.get_info().device_type));
    list
}

/// What wgpu finds, best first. No feature is in use yet.
pub async fn list() -> Vec<DeviceInfo> {
    let describe = |(idx, adapter): (usize, wgpu::Adapter)| {
        let (info, limits, has) = (adapter.get_info(), adapter.limits(), adapter.features());
        let features = FEATURES.iter().filter(|(feature, _)| has.contains(*feature));
        let kind = match info.device_type {
            wgpu::DeviceType::DiscreteGpu => "discrete",
            wgpu::DeviceType::IntegratedGpu => "integrated",
            wgpu::DeviceType::Cpu => "software",
            _ => "other",
        };
        DeviceInfo {
            id: format!("wgpu:{idx}"),
            name: info.name,
            kind: Some(kind.into()),
            backend: Some(format!("{:?}", info.backend)),
            buffer_bytes_max: Some(limits.max_buffer_size),
            binding_bytes_max: Some(limits.max_storage_buffer_binding_size),
            features: features.map(|it| (it.1, false)).collect(),
            ..DeviceInfo::default()
        }
    };
    adapters().await.into_iter().enumerate().map(describe).collect()
}

/// A buffer of this many bytes.
fn buffer(device: &wgpu::Device, n_bytes: usize, usage: wgpu::BufferUsages) -> wgpu::Buffer {
    let size = n_bytes as u64;
    let made = wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false };
    device.create_buffer(&made)
}

/// WebGPU's own limits, with the sizes of buffers and bindings that the adapter allows; where
/// bindings are to have at most so many bytes, with its own for buffers too.
fn limits(adapter: &wgpu::Adapter, bytes_max: usize) -> wgpu::Limits {
    let (has, plain) = (adapter.limits(), wgpu::Limits::default());
    let is_bounded = bytes_max < usize::MAX;
    wgpu::Limits {
        max_buffer_size: if is_bounded { plain.max_buffer_size } else { has.max_buffer_size },
        max_storage_buffer_binding_size: has.max_storage_buffer_binding_size.min(bytes_max as u64),
        max_storage_buffers_per_shader_stage: has.max_storage_buffers_per_shader_stage.min(8),
        ..wgpu::Limits::default()
    }
}

impl Wgpu {
    /// Bindings are at most so large; of what not every adapter has, these features are used.
    pub(super) async fn new(
        index: usize,
        failure: Failure,
        bytes_max: usize,
        features: &[&str],
    ) -> Result<Wgpu> {
        let list = adapters().await;
        let n_found = list.len();
        let Some(adapter) = list.into_iter().nth(index) else {
            return Err(Error::Device {
                problem: format!("there is no wgpu adapter {index}: {n_found} found"),
                hint: "list the devices to see what is there; on Linux a Vulkan driver is needed \
                       (Debian: mesa-vulkan-drivers)"
                    .into(),
            });
        };
        let info = adapter.get_info();
        let limits = limits(&adapter, bytes_max);
        let wanted = FEATURES.iter().filter(|(_, name)| features.contains(name));
        let wanted = wanted.fold(wgpu::Features::TIMESTAMP_QUERY, |all, it| all | it.0);
        let features = wanted & adapter.features();
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("elapid"),
            required_features: features,
            required_limits: limits.clone(),
            ..Default::default()
        };
        let opened = adapter.request_device(&descriptor).await;
        let (device, queue) = opened.map_err(|error| Error::Device {
            problem: format!("cannot open {}: {error}", info.name),
            hint: "use the CPU".into(),
        })?;
        let told = failure.clone();
        device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            let is_memory = matches!(error, wgpu::Error::OutOfMemory { .. });
            let fault = if is_memory { Fault::Memory } else { Fault::Lost };
            told.set_as(fault, error.to_string());
        }));
        let told = failure.clone();
        device.set_device_lost_callback(move |reason, message| {
            if reason != wgpu::DeviceLostReason::Destroyed {
                told.set_as(Fault::Lost, message.to_string());
            }
        });
        let (pipelines, pending) = (Mutex::default(), Mutex::default());
        let (sums, halves) = (PLAIN_SUMS, PLAIN_HALVES);
        let mut made =
            Wgpu { device, queue, info, limits, sums, halves, pipelines, pending, failure };
        if features.contains(wgpu::Features::SUBGROUP) {
            made.sums = SUBGROUP_SUMS;
            if !made.sums_hold().await {
                made.sums = PLAIN_SUMS;
                made.failure.clear();
            }
        }
        if features.contains(wgpu::Features::SHADER_F16) {
            made.halves = F16_HALVES;
            if !made.halves_hold().await {
                made.halves = PLAIN_HALVES;
                made.failure.clear();
            }
        }
        Ok(made)
    }

    /// Names of the features that kernels use.
    pub(super) fn features(&self) -> Vec<&'static str> {
        let uses = [self.halves == F16_HALVES, self.sums == SUBGROUP_SUMS];
        FEATURE_NAMES.into_iter().zip(uses).filter(|it| it.1).map(|it| it.0).collect()
    }

    pub(super) fn name(&self) -> String {
        format!("{} ({:?})", self.info.name, self.info.backend)
    }

    pub(super) fn is_software(&self) -> bool {
        self.info.device_type == wgpu::DeviceType::Cpu
    }

    pub(super) fn caps(&self) -> Caps {
        let is_software = self.is_software();
        Caps {
            wide_loads: false,
            warps: false,
            tensor_cores: false,
            graphs: false,
            addresses: false,
            shared_bytes_max: self.limits.max_compute_workgroup_storage_size as usize,
            n_multiprocessors: 1,
            binding_bytes_max: self.limits.max_storage_buffer_binding_size as usize,
            offset_align: self.limits.min_storage_buffer_offset_alignment as usize,
            n_rounds_max: if is_software { N_ROUNDS_MAX } else { usize::MAX },
        }
    }

    pub(super) fn allocate(&self, n_bytes: usize) -> std::result::Result<wgpu::Buffer, String> {
        let max = self.limits.max_buffer_size;
        if n_bytes as u64 > max {
            let mib = |n: u64| n >> 20;
            let asked = mib(n_bytes as u64);
            return Err(format!("a buffer of {asked} MiB was asked for, {} MiB allowed", mib(max)));
        }
        let usage = wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_SRC
            | wgpu::BufferUsages::COPY_DST;
        self.made(n_bytes, || buffer(&self.device, n_bytes, usage))
    }

    /// A buffer, unless there is no memory for it.
    fn made(
        &self,
        n_bytes: usize,
        make: impl FnOnce() -> wgpu::Buffer,
    ) -> std::result::Result<wgpu::Buffer, String> {
        // A browser tells later, as an error that nobody asked for.
        if cfg!(target_family = "wasm") {
            return Ok(make());
        }
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let buffer = make();
        match block_on(scope.pop()).flatten() {
            None => Ok(buffer),
            Some(error) => Err(format!("{} MiB were asked for: {error}", n_bytes >> 20)),
        }
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Through a buffer of its own, in the order of launches.
    pub(super) fn upload(&self, to: &wgpu::Buffer, offset: usize, bytes: &[u8]) {
        // Zeros behind the bytes make whole words.
        let made = self.made(bytes.len(), || {
            let from = self.device.create_buffer(&wgpu::BufferDescriptor {
                label: None,
                size: bytes.len().next_multiple_of(4) as u64,
                usage: wgpu::BufferUsages::COPY_SRC,
                mapped_at_creation: true,
            });
            // A lost device has nothing to write to; what is read from it says so.
            if let Ok(mut mapped) = from.get_mapped_range_mut(..) {
                mapped.slice(..bytes.len()).copy_from_slice(bytes);
            }
            from.unmap();
            from
        });
        match made {
            Ok(from) => self.copy((&from, 0), (to, offset), bytes.len()),
            Err(problem) => self.failure.set_as(Fault::Memory, problem),
        }
    }

    pub(super) fn copy(
        &self,
        (from, from_offset): (&wgpu::Buffer, usize),
        (to, to_offset): (&wgpu::Buffer, usize),
        n_bytes: usize,
    ) {
        let mut pending = self.pending();
        let n_bytes = n_bytes.next_multiple_of(4) as u64;
        let encoder = pending.encoder(&self.device);
        encoder.copy_buffer_to_buffer(from, from_offset as u64, to, to_offset as u64, n_bytes);
    }

    pub(super) fn fill(&self, buffer: &wgpu::Buffer, offset: usize, n_bytes: usize, word: u32) {
        if word == 0 {
            let mut pending = self.pending();
            let encoder = pending.encoder(&self.device);
            return encoder.clear_buffer(buffer, offset as u64, Some(n_bytes as u64));
        }
        let bytes = bytemuck::cast_slice(&vec![word; n_bytes.div_ceil(4)]).to_vec();
        self.upload(buffer, offset, &bytes);
    }

    /// Bytes for the host: all work is handed over, and in a browser the event loop brings them.
    /// Where something went wrong they are all ones.
    pub(super) async fn read(&self, from: &wgpu::Buffer, at: usize, n_bytes: usize) -> Vec<u8> {
        // Whole words around what is wanted.
        let begin = at / 4 * 4;
        let n_staged = (at + n_bytes - begin).next_multiple_of(4);
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let staging = match self.made(n_staged, || buffer(&self.device, n_staged, usage)) {
            Ok(staging) => staging,
            Err(problem) => {
                self.failure.set_as(Fault::Memory, problem);
                return vec![0xff; n_bytes];
            }
        };
        self.copy((from, begin), (&staging, 0), n_staged);
        self.flush();
        let (slice, mapped) = (staging.slice(..), Later::new());
        let told = mapped.clone();
        slice.map_async(wgpu::MapMode::Read, move |result| told.set(result));
        self.wait();
        if let Err(error) = mapped.await {
            self.failure.set(format!("cannot read a buffer: {error}"));
        } else if !self.failure.is_set() {
            match slice.get_mapped_range() {
                Ok(view) => return view[at - begin..][..n_bytes].to_vec(),
                Err(error) => self.failure.set(format!("cannot read a buffer: {error}")),
            }
        }
        vec![0xff; n_bytes]
    }

    pub(super) fn launch(&self, launch: &Launch) {
        let pipeline = self.pipeline(launch);
        let mut guard = self.pending();
        let pending = &mut *guard;
        let (uniforms, at) = pending.slot(&self.device, launch);
        let buffers = launch.args.iter().map(|arg| {
            let super::Memory::Wgpu(buffer) = arg.memory else {
                unreachable!("a buffer of another device")
            };
            let size = NonZeroU64::new(arg.n_bytes.next_multiple_of(4).max(4) as u64);
            wgpu::BufferBinding { buffer, offset: arg.offset as u64, size }
        });
        let size = NonZeroU64::new(SLOT as u64);
        let params = wgpu::BufferBinding { buffer: uniforms, offset: at as u64, size };
        let entries: Vec<wgpu::BindGroupEntry> = buffers
            .chain([params])
            .enumerate()
            .map(|(binding, buffer)| wgpu::BindGroupEntry {
                binding: binding as u32,
                resource: wgpu::BindingResource::Buffer(buffer),
            })
            .collect();
        let bind_group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: Some(launch.kernel.entry),
            layout: &pipeline.layout,
            entries: &entries,
        });
        drop(entries);
        if let Some(profile) = &mut pending.profile {
            pending.pass = None;
            profile.names.push(profile::name_of(launch));
        }
        let pass = pending.pass(&self.device);
        pass.set_pipeline(&pipeline.pipeline);
        pass.set_bind_group(0, &bind_group, &[]);
        let [x, y, z] = launch.work.groups;
        pass.dispatch_workgroups(x, y, z);
        pending.n_launches += 1;
        if pending.profile.as_ref().is_some_and(Profile::is_full) {
            drop(guard);
            return self.profile_collect();
        }
        if pending.n_launches >= N_LAUNCHES_MAX {
            drop(guard);
            self.flush();
        }
    }

    /// Made once for each kernel and its constants.
    fn pipeline(&self, launch: &Launch) -> Arc<Pipeline> {
        let key = Key {
            kernel: launch.kernel.id(),
            threads: launch.work.threads,
            consts: launch.consts.to_vec(),
            writes: launch.args.iter().map(|arg| arg.writes).collect(),
        };
        let mut pipelines = self.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = pipelines.get(&key) {
            return found.clone();
        }
        let made = Arc::new(self.make(launch));
        pipelines.insert(key, made.clone());
        made
    }

    fn make(&self, launch: &Launch) -> Pipeline {
        let has_halves = launch.args.iter().any(|arg| arg.dtype == DType::F16);
        let halves = if has_halves { self.halves } else { "" };
        let mut source = String::from(if halves == F16_HALVES { "enable f16;\n" } else { "" });
        if cfg!(target_family = "wasm") && self.sums == SUBGROUP_SUMS {
            source.push_str("enable subgroups;\n");
        }
        let own = [
            ("THREADS", launch.work.threads as usize),
            ("SUBGROUP_MIN", self.info.subgroup_min_size as usize),
        ];
        for (name, value) in own.iter().chain(launch.consts) {
            source.push_str(&format!("const {name}: u32 = {value}u;\n"));
        }
        source.extend([PRELUDE, self.sums, halves, launch.kernel.wgsl]);
        let entry = launch.kernel.entry;
        let descriptor = wgpu::ShaderModuleDescriptor {
            label: Some(entry),
            source: wgpu::ShaderSource::Wgsl(source.into()),
        };
        // Counters that would end an endless loop keep drivers from unrolling the others.
        let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..Default::default() };
        // SAFETY: kernels are part of this program, and every loop of theirs counts to a bound.
        let module = unsafe { self.device.create_shader_module_trusted(descriptor, checks) };
        let buffers = launch
            .args
            .iter()
            .map(|arg| wgpu::BufferBindingType::Storage { read_only: !arg.writes })
            .chain([wgpu::BufferBindingType::Uniform]);
        let entries: Vec<wgpu::BindGroupLayoutEntry> = buffers
            .enumerate()
            .map(|(binding, ty)| wgpu::BindGroupLayoutEntry {
                binding: binding as u32,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty,
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let layout = self.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(entry),
            entries: &entries,
        });
        let pipeline_layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(entry),
            bind_group_layouts: &[Some(&layout)],
            ..Default::default()
        });
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(entry),
            layout: Some(&pipeline_layout),
            module: &module,
            entry_point: Some(entry),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        Pipeline { pipeline, layout }
    }

    /// As if the driver had lost it.
    #[cfg(test)]
    pub(super) fn lose(&self) {
        self.flush();
        self.device.destroy();
    }

    pub(super) fn flush(&self) {
        let mut pending = self.pending();
        pending.pass = None;
        let Some(encoder) = pending.encoder.take() else { return };
        for uniforms in &mut pending.uniforms {
            if !uniforms.bytes.is_empty() {
                self.queue.write_buffer(&uniforms.buffer, 0, &uniforms.bytes);
                uniforms.bytes.clear();
            }
        }
        pending.n_launches = 0;
        self.queue.submit([encoder.finish()]);
    }

    pub(super) fn wait(&self) {
        self.flush();
        if let Err(error) = self.device.poll(wgpu::PollType::wait_indefinitely()) {
            self.failure.set(format!("waiting failed: {error}"));
        }
    }
}

impl Pending {
    /// The encoder, outside a pass.
    fn encoder(&mut self, device: &wgpu::Device) -> &mut wgpu::CommandEncoder {
        self.pass = None;
        self.encoder.get_or_insert_with(|| device.create_command_encoder(&Default::default()))
    }

    fn pass(&mut self, device: &wgpu::Device) -> &mut wgpu::ComputePass<'static> {
        let encoder =
            self.encoder.get_or_insert_with(|| device.create_command_encoder(&Default::default()));
        let timestamp_writes = self.profile.as_ref().map(Profile::writes);
        let descriptor = wgpu::ComputePassDescriptor { label: None, timestamp_writes };
        self.pass.get_or_insert_with(|| encoder.begin_compute_pass(&descriptor).forget_lifetime())
    }

    /// The next slot of a uniform buffer, with the parameters of a launch in it.
    fn slot(&mut self, device: &wgpu::Device, launch: &Launch) -> (&wgpu::Buffer, usize) {
        let idx = self.n_launches / N_SLOTS;
        if self.uniforms.len() <= idx {
            let usage = wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::COPY_DST;
            let buffer = buffer(device, SLOT * N_SLOTS, usage);
            self.uniforms.push(Uniforms { buffer, bytes: Vec::new() });
        }
        let uniforms = &mut self.uniforms[idx];
        let at = uniforms.bytes.len();
        for word in launch.params {
            uniforms.bytes.extend(word.0.to_le_bytes());
        }
        assert!(uniforms.bytes.len() <= at + SLOT, "{}: parameters", launch.kernel.entry);
        uniforms.bytes.resize(at + SLOT, 0);
        (&uniforms.buffer, at)
    }
}
