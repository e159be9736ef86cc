//! Free buffers by size class, and the accounts: what the pools of the CPU and of GPUs share.
//!
//! Sizes are rounded up to eight classes per power of two (at most 1/8 wasted), and memory goes
//! back to the list of its class. A step that repeats the last one therefore finds every buffer it
//! needs, and a training step after the first asks the system for nothing large.

use std::collections::HashMap;

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

/// Free memory by class, in bytes.
pub(super) type Free<M> = HashMap<usize, Vec<M>>;

/// Free memory, and the accounts.
pub(super) struct Shelf<M> {
    pub free: Free<M>,
    pub usage: MemoryUse,
}

impl<M> Default for Shelf<M> {
    fn default() -> Shelf<M> {
        Shelf { free: HashMap::new(), usage: MemoryUse::default() }
    }
}

/// Bytes in the class that holds `n_bytes`, in whole lines of `line` bytes.
pub(super) fn class(n_bytes: usize, line: usize) -> usize {
    let n_lines = n_bytes.div_ceil(line).max(1);
    n_lines.next_multiple_of((n_lines.next_power_of_two() / 16).max(1)) * line
}

impl<M> Shelf<M> {
    /// Free memory of a class.
    pub fn take(&mut self, class: usize) -> Option<M> {
        self.free.get_mut(&class).and_then(Vec::pop)
    }

    /// Counts memory that is in use from now on, of which `n_new` bytes are new from the system.
    pub fn count(&mut self, class: usize, n_new: usize) {
        let usage = &mut self.usage;
        usage.live += class;
        usage.live_max = usage.live_max.max(usage.live);
        usage.reserved += n_new;
        usage.n_alloc += usize::from(n_new > 0);
    }

    /// Takes memory back.
    pub fn give(&mut self, class: usize, memory: M) {
        self.usage.live -= class;
        self.free.entry(class).or_default().push(memory);
    }

    /// All that is free, to be given back to the system.
    pub fn drain(&mut self) -> Free<M> {
        self.usage.reserved = self.usage.live;
        std::mem::take(&mut self.free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_waste_at_most_an_eighth() {
        for n_bytes in (64..2_000_000).step_by(997) {
            let got = class(n_bytes, 64);
            assert!(got >= n_bytes && got <= n_bytes + n_bytes / 8 + 64, "{n_bytes}: {got}");
        }
    }
}
