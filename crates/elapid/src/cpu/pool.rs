//! Buffers that are used again: a training step after the first asks the system for nothing large.
//!
//! Sizes are rounded up to eight classes per power of two (at most 1/8 wasted), and a buffer goes
//! back to the free list of its class when dropped. A step that repeats the last one therefore
//! finds every buffer it needs. Contents of a buffer from the list are whatever was there before.

use bytemuck::{Pod, Zeroable};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// 64 bytes: buffers are aligned to a cache line and to the widest vector.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// Free buffers by class, and the accounts.
#[derive(Default)]
struct Shelf {
    free: HashMap<usize, Vec<Vec<Line>>>,
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
    lines: Vec<Line>,
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
        let mut lines = found.unwrap_or_else(|| bytemuck::zeroed_vec(n_lines));
        if cfg!(debug_assertions) {
            // Not a number in every format: who reads before writing is found out in tests.
            lines.fill(Line([0xff; 64]));
        }
        Buffer { lines, n_bytes, pool: self.clone() }
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
        &bytemuck::cast_slice(&self.lines)[..self.n_bytes]
    }

    /// The bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..self.n_bytes]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        let mut shelf = self.pool.shelf();
        shelf.usage.live -= lines.len() * 64;
        shelf.free.entry(lines.len()).or_default().push(lines);
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
