//! Buffers that are used again: a training step after the first asks the system for nothing large.
//!
//! Sizes are rounded up to eight classes per power of two (at most 1/8 wasted), and a buffer goes
//! back to the free list of its class when dropped. A step that repeats the last one therefore
//! finds every buffer it needs. Contents of a buffer from the list are whatever was there before.
//!
//! Large buffers are maps of their own: what is given back leaves the process at once and whole. A
//! heap keeps holes, and how many is a matter of luck; a plan of memory could not be kept.

use bytemuck::{Pod, Zeroable};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// 64 bytes: buffers are aligned to a cache line and to the widest vector.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Memory of one buffer.
enum Memory {
    Heap(Vec<Line>),
    #[cfg(not(target_family = "wasm"))]
    Map(memmap2::MmapMut),
}

/// Bytes from which a buffer is a map of its own.
#[cfg(not(target_family = "wasm"))]
const MAP_BYTES: usize = 1 << 16;

impl Memory {
    /// Zeros.
    fn new(n_lines: usize) -> Memory {
        #[cfg(not(target_family = "wasm"))]
        if n_lines * 64 >= MAP_BYTES {
            // Where the system has no more maps to give, the heap may still have room.
            if let Ok(map) = memmap2::MmapMut::map_anon(n_lines * 64) {
                return Memory::Map(map);
            }
        }
        Memory::Heap(bytemuck::zeroed_vec(n_lines))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Memory::Heap(lines) => bytemuck::cast_slice(lines),
            #[cfg(not(target_family = "wasm"))]
            Memory::Map(map) => map,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Memory::Heap(lines) => bytemuck::cast_slice_mut(lines),
            #[cfg(not(target_family = "wasm"))]
            Memory::Map(map) => map,
        }
    }
}

/// Free buffers by class, in lines, and the accounts.
#[derive(Default)]
struct Shelf {
    free: HashMap<usize, Vec<Memory>>,
    usage: MemoryUse,
}

/// Bytes handed out and kept, in rounded sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in use now.
    pub live: usize,
    /// The most that was ever in use.
    pub live_max: usize,
    /// Bytes taken from the system, in use or on a free list.
    pub reserved: usize,
    /// How often the system was asked for memory.
    pub n_alloc: usize,
}

/// A pool of buffers; clones share it.
#[derive(Clone, Default)]
pub struct Pool(Arc<Mutex<Shelf>>);

/// A buffer that returns to its pool.
pub struct Buffer {
    /// There until the buffer is dropped.
    memory: Option<Memory>,
    n_bytes: usize,
    pool: Pool,
}

/// Lines in the class that holds `n_bytes`.
fn class(n_bytes: usize) -> usize {
    let n_lines = n_bytes.div_ceil(64).max(1);
    let step = (n_lines.next_power_of_two() / 16).max(1);
    n_lines.next_multiple_of(step)
}

impl Pool {
    fn shelf(&self) -> MutexGuard<'_, Shelf> {
        // A thread that panicked while holding the lock left consistent accounts: each change
        // is a single statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer with unspecified (but initialised) contents.
    pub fn take(&self, n_bytes: usize) -> Buffer {
        let n_lines = class(n_bytes);
        let mut shelf = self.shelf();
        let found = shelf.free.get_mut(&n_lines).and_then(Vec::pop);
        let usage = &mut shelf.usage;
        usage.live += n_lines * 64;
        usage.live_max = usage.live_max.max(usage.live);
        if found.is_none() {
            usage.reserved += n_lines * 64;
            usage.n_alloc += 1;
        }
        drop(shelf);
        let mut memory = found.unwrap_or_else(|| Memory::new(n_lines));
        if cfg!(debug_assertions) {
            // Not a number in every format: who reads before writing is found out in tests.
            memory.bytes_mut().fill(0xff);
        }
        Buffer { memory: Some(memory), n_bytes, pool: self.clone() }
    }

    /// The accounts.
    pub fn usage(&self) -> MemoryUse {
        self.shelf().usage
    }

    /// Gives the free buffers back to the system.
    pub fn trim(&self) {
        let mut shelf = self.shelf();
        shelf.free.clear();
        shelf.usage.reserved = shelf.usage.live;
    }
}

impl Buffer {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        let memory = self.memory.as_ref().expect("memory is there until the drop");
        &memory.bytes()[..self.n_bytes]
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let memory = self.memory.as_mut().expect("memory is there until the drop");
        &mut memory.bytes_mut()[..self.n_bytes]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else { return };
        let n_bytes = memory.bytes().len();
        let mut shelf = self.pool.shelf();
        shelf.usage.live -= n_bytes;
        shelf.free.entry(n_bytes / 64).or_default().push(memory);
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

    #[test]
    fn classes_waste_at_most_an_eighth() {
        for n_bytes in (64..2_000_000).step_by(997) {
            let got = class(n_bytes) * 64;
            assert!(got >= n_bytes && got <= n_bytes + n_bytes / 8 + 64, "{n_bytes}: {got}");
        }
    }
}
