//! In place of CUDA where there can be none: in a browser.

use super::product::{Epilogue, Product};
use super::profile::KernelTime;
use super::{Failure, Gpu, Launch};
use crate::error::{Error, Result};

/// A device of CUDA; there is none.
pub enum Cuda {}

/// Memory of one buffer; there is none.
pub(crate) enum Memory {}

impl Memory {
    pub(super) fn address(&self) -> u64 {
        match *self {}
    }
}

/// Recorded work; there is none.
pub(crate) enum Recorded {}

/// A recording; there is none.
pub(super) type Recording = Recorded;

/// What ops ask of a device.
#[derive(Clone, Debug)]
pub struct CudaDevice {
    /// Multiprocessors.
    pub n_multiprocessors: u32,
    /// Most bytes of shared memory for a group of threads.
    pub shared_bytes_max: u32,
}

/// What CUDA finds: nothing.
pub fn list() -> Vec<CudaDevice> {
    Vec::new()
}

impl Cuda {
    pub(super) fn new(_index: usize, _failure: Failure) -> Result<Cuda> {
        let (problem, hint) = ("there is no CUDA in a browser".into(), "use `wgpu`".into());
        Err(Error::Device { problem, hint })
    }

    pub(super) fn name(&self) -> String {
        match *self {}
    }

    /// What it is.
    pub fn device(&self) -> &CudaDevice {
        match *self {}
    }

    pub(super) fn allocate(&self, _n_bytes: usize) -> std::result::Result<Memory, String> {
        match *self {}
    }

    pub(super) fn free(&self, _memory: Memory) {
        match *self {}
    }

    pub(super) fn upload(&self, _to: &Memory, _offset: usize, _bytes: &[u8]) {
        match *self {}
    }

    pub(super) fn download(&self, _from: &Memory, _offset: usize, _bytes: &mut [u8]) {
        match *self {}
    }

    pub(super) fn copy(&self, _from: (&Memory, usize), _to: (&Memory, usize), _n_bytes: usize) {
        match *self {}
    }

    pub(super) fn fill(&self, _buffer: &Memory, _offset: usize, _n_bytes: usize, _word: u32) {
        match *self {}
    }

    pub(super) fn launch(&self, _launch: &Launch) {
        match *self {}
    }

    pub(super) fn n_launches(&self) -> u64 {
        match *self {}
    }

    pub(super) fn profile_start(&self) {
        match *self {}
    }

    pub(super) fn profile_stop(&self) -> Vec<KernelTime> {
        match *self {}
    }

    pub(super) fn wait(&self) {
        match *self {}
    }

    pub(super) fn record(&self) -> Option<Recording> {
        match *self {}
    }

    pub(super) fn recorded(&self, _recording: Recording) -> Option<Recorded> {
        match *self {}
    }

    pub(super) fn replay(&self, _recorded: &Recorded) {
        match *self {}
    }

    pub(super) fn product(&self, _gpu: &Gpu, _product: Product) {
        match *self {}
    }

    pub(super) fn product_with(&self, _gpu: &Gpu, _: Product, _: Epilogue) -> bool {
        match *self {}
    }
}
