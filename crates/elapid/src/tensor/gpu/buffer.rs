//! Memory of a GPU that returns to the free list when it is dropped.

use super::{Gpu, Memory, cuda, graph};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A buffer on a GPU that returns to its pool.
pub(crate) struct Buffer {
    /// There until the buffer is dropped, unless none could be had.
    pub(super) memory: Option<Memory>,
    pub(super) class: usize,
    /// Whether it should have been written and was not, because something had failed.
    pub(super) spoiled: AtomicBool,
    pub(super) gpu: Gpu,
    /// The graph it was taken for: it returns there.
    pub(super) reserve: Option<Arc<graph::Reserve>>,
}

impl Buffer {
    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Whether a failure kept it from being written.
    pub(crate) fn is_spoiled(&self) -> bool {
        self.spoiled.load(Ordering::Relaxed)
    }

    pub(super) fn wgpu(&self) -> &::wgpu::Buffer {
        let Some(Memory::Wgpu(memory)) = &self.memory else { panic!("no buffer of wgpu") };
        memory
    }

    pub(super) fn cuda(&self) -> &cuda::Memory {
        let Some(Memory::Cuda(memory)) = &self.memory else { panic!("no buffer of CUDA") };
        memory
    }

    /// Where it lies, if CUDA has it.
    pub(crate) fn cuda_address(&self) -> Option<u64> {
        match &self.memory {
            Some(Memory::Cuda(memory)) => Some(memory.at(0)),
            _ => None,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let mut shelf = self.gpu.shelf();
        match &self.reserve {
            Some(reserve) => {
                shelf.usage.live -= self.class;
                reserve.give(self.class, memory);
            }
            None => shelf.give(self.class, memory),
        }
    }
}
