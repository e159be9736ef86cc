//! Buffers of the CPU that return to a free list (`shelf.rs`) when dropped. Contents of a buffer
//! from the list are whatever was there before.
//!
//! Large buffers are maps of their own: what is given back leaves the process at once and whole. A
//! heap keeps holes, and how many is a matter of luck; a plan of memory could not be kept.

use crate::tensor::shelf::{MemoryUse, Shelf, class};
use bytemuck::{Pod, Zeroable};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// 64 bytes: buffers are aligned to a cache line and to the widest vector.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Memory of one buffer.
enum Memory {
    Heap(Vec<Line>),
    Map(memmap2::MmapMut),
}

/// Bytes from which a buffer is a map of its own.
const MAP_BYTES: usize = 1 << 16;

impl Memory {
    fn new(n_bytes: usize) -> Memory {
        if n_bytes >= MAP_BYTES {
            // Where the system has no more maps to give, the heap may still have room.
            if let Ok(map) = memmap2::MmapMut::map_anon(n_bytes) {
                return Memory::Map(map);
            }
        }
        Memory::Heap(bytemuck::zeroed_vec(n_bytes / size_of::<Line>()))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Memory::Heap(lines) => bytemuck::cast_slice(lines),
            Memory::Map(map) => map,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Heap(lines) => bytemuck::cast_slice_mut(lines),
            Memory::Map(map) => map,
        }
    }
}

/// A pool of buffers; clones share it.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Shelf<Memory>>>);

/// A buffer that returns to its pool.
pub struct Buffer {
    memory: Memory,
    n_bytes: usize,
    pool: Pool,
}

impl Pool {
    fn shelf(&self) -> MutexGuard<'_, Shelf<Memory>> {
        // A thread that panicked while holding the lock left consistent accounts: each change
        // is a single statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer with unspecified (but initialised) contents.
    pub fn take(&self, n_bytes: usize) -> Buffer {
        let class = class(n_bytes, size_of::<Line>());
        let mut shelf = self.shelf();
        let found = shelf.take(class);
        shelf.count(class, if found.is_none() { class } else { 0 });
        drop(shelf);
        let mut memory = found.unwrap_or_else(|| Memory::new(class));
        if cfg!(debug_assertions) {
            // Not a number in every format: who reads before writing is found out in tests.
            memory.bytes_mut().fill(0xff);
        }
        Buffer { memory, n_bytes, pool: self.clone() }
    }

    pub fn usage(&self) -> MemoryUse {
        self.shelf().usage
    }

    /// Gives the free buffers back to the system.
    pub fn trim(&self) {
        drop(self.shelf().drain());
    }
}

impl Buffer {
    pub fn bytes(&self) -> &[u8] {
        &self.memory.bytes()[..self.n_bytes]
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory.bytes_mut()[..self.n_bytes]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, Memory::Heap(Vec::new()));
        self.pool.shelf().give(memory.bytes().len(), memory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_used_again() {
        let pool = Pool::default();
        drop(pool.take(1000));
        let again = pool.take(990);
        assert_eq!(pool.usage().n_alloc, 1);
        assert_eq!(again.bytes().len(), 990);
        assert_eq!(pool.usage().live, 1024);
    }
}
