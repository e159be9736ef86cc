//! CUDA where there is none to be had, as in a browser: nothing is found, so no value of these
//! types exists and no body is ever reached.

use super::product::{Epilogue, Product};
use super::profile::KernelTime;
use super::{Caps, Failure, Gpu, Launch};
use crate::error::{Error, Result};
use crate::tensor::devices::DeviceInfo;

pub enum Cuda {}
pub(crate) enum Memory {}
pub(super) enum Recorded {}
pub(super) enum Recording {}
pub(super) enum Never {}

pub fn list() -> Vec<DeviceInfo> {
    Vec::new()
}

impl Memory {
    pub(super) fn at(&self, _: usize) -> u64 {
        match *self {}
    }
}

impl Cuda {
    pub(super) fn new(_: usize, _: Failure) -> Result<Cuda> {
        let problem = "this build has no CUDA".into();
        Err(Error::Device { problem, hint: "use `wgpu` or `cpu`".into() })
    }

    pub(super) fn name(&self) -> String {
        match *self {}
    }

    pub(super) fn caps(&self) -> Caps {
        match *self {}
    }

    pub(super) fn find_loss(&self) {
        match *self {}
    }

    pub(super) fn free_bytes(&self) -> Option<u64> {
        match *self {}
    }

    pub(super) fn allocate(&self, _: usize) -> std::result::Result<Memory, String> {
        match *self {}
    }

    pub(super) fn free(&self, _: Memory) {
        match *self {}
    }

    pub(super) fn upload(&self, _: &Memory, _: usize, _: &[u8]) {
        match *self {}
    }

    pub(super) fn download(&self, _: &Memory, _: usize, _: &mut [u8]) {
        match *self {}
    }

    pub(super) fn copy(&self, _: (&Memory, usize), _: (&Memory, usize), _: usize) {
        match *self {}
    }

    pub(super) fn fill(&self, _: &Memory, _: usize, _: usize, _: u32) {
        match *self {}
    }

    pub(super) fn launch(&self, _: &Launch) {
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

    pub(super) fn recorded(&self, _: Recording) -> Option<Recorded> {
        match *self {}
    }

    pub(super) fn replay(&self, _: &Recorded) {
        match *self {}
    }

    pub(super) fn product_with(&self, _: &Gpu, _: Product, _: Epilogue) -> bool {
        match *self {}
    }

    pub(super) fn product(&self, _: &Gpu, _: Product, _: Option<Never>, _: usize) -> bool {
        match *self {}
    }

    pub(crate) fn join_ranks(
        &self,
        _: [u8; nccl::ID_BYTES],
        _: usize,
        _: usize,
    ) -> std::result::Result<nccl::Nccl, String> {
        match *self {}
    }
}

pub(crate) mod nccl {
    use crate::tensor::Tensor;

    pub(crate) const ID_BYTES: usize = 128;
    pub(crate) enum Nccl {}

    pub(crate) fn is_there() -> bool {
        false
    }

    pub(crate) fn new_id() -> Option<[u8; ID_BYTES]> {
        None
    }

    impl Nccl {
        pub(crate) fn exchange(
            &self,
            _: &[(usize, &Tensor)],
            _: &mut [(usize, &mut Tensor)],
        ) -> Result<(), String> {
            match *self {}
        }

        pub(crate) fn join(&self) -> Result<(), String> {
            match *self {}
        }
    }
}
