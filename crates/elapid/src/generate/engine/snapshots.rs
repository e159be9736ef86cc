//! States kept along prompts, found again by what was read.
//!
//! Prompts are read in pieces that begin and end at multiples of `PIECE` tokens. The state behind
//! piece k is kept under a key that says everything it depends on:
//!
//! ```text
//! key[0] = BLAKE3("adapters" and their scales)
//! key[k] = BLAKE3(key[k-1], tokens of piece k)
//! ```
//!
//! A prompt that begins as one before continues from the last state they share, and computes from
//! there exactly the pieces that it would have computed from the start: the answer has the same
//! bits, for attention, recurrences and mixtures of them alike. An edit in the middle of a file
//! costs what is behind the edit and, at most, one piece before it.
//!
//! A budget bounds the bytes; what states share counts once. What was not used for the longest
//! time goes first. Where one prompt is too long for the budget its states are thinned, the more
//! the farther they are from its end, which is where people write.
//!
//! Not here: states that answers went through. They were advanced token by token, and would give
//! other bits than a piece.

use crate::model::state::{PAGE, State};
use std::collections::HashMap;

/// Tokens of a piece: a page of a key-value cache, so that snapshots share whole pages.
pub const PIECE: usize = PAGE;

/// What a state depends on.
pub(super) type Key = [u8; 32];

/// States by key, within a budget.
pub(super) struct Snapshots {
    bytes_max: usize,
    entries: HashMap<Key, Entry>,
    /// What the states are made of, by `State::parts`: how many hold it.
    parts: HashMap<usize, usize>,
    n_bytes: usize,
    /// Counts uses; the larger, the later.
    clock: u64,
}

struct Entry {
    state: State,
    n_pieces: usize,
    used: u64,
}

/// The keys of a prompt behind each whole piece, for this combination of adapters: (number, bits of
/// the scale), in order.
pub(super) fn keys(adapters: &[(usize, u32)], prompt: &[u32]) -> Vec<Key> {
    let mut hasher = blake3::Hasher::new();
    for (number, scale) in adapters {
        hasher.update(&number.to_le_bytes()).update(&scale.to_le_bytes());
    }
    let mut key: Key = hasher.finalize().into();
    let pieces = prompt.chunks_exact(PIECE).map(|piece| {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&key);
        piece.iter().for_each(|id| _ = hasher.update(&id.to_le_bytes()));
        key = hasher.finalize().into();
        key
    });
    pieces.collect()
}

impl Snapshots {
    /// None yet, and never more than these bytes.
    pub(super) fn new(bytes_max: usize) -> Snapshots {
        let (entries, parts) = (HashMap::new(), HashMap::new());
        Snapshots { bytes_max, entries, parts, n_bytes: 0, clock: 0 }
    }

    pub(super) fn clear(&mut self) {
        *self = Snapshots::new(self.bytes_max);
    }

    pub(super) fn usage(&self) -> (usize, usize) {
        (self.entries.len(), self.n_bytes)
    }

    /// Bytes counted anew from what is there.
    #[cfg(test)]
    pub(super) fn recount(&self) -> usize {
        let all = self.entries.values().flat_map(|entry| entry.state.parts());
        all.collect::<HashMap<usize, usize>>().values().sum()
    }

    /// The state behind the last piece of `keys` that is kept, and how many pieces that is. All
    /// before it count as used too.
    pub(super) fn find(&mut self, keys: &[Key]) -> Option<(usize, State)> {
        let at = keys.iter().rposition(|key| self.entries.contains_key(key))?;
        self.touch(&keys[..=at]);
        Some((at + 1, self.entries[&keys[at]].state.clone()))
    }

    /// Keeps a state behind the last piece of `keys`, if it fits; what was not used for the longest
    /// time makes room.
    pub(super) fn keep(&mut self, keys: &[Key], state: &State) {
        self.touch(keys);
        let Some(key) = keys.last().filter(|key| !self.entries.contains_key(*key)) else { return };
        let state = state.clone();
        let of_state = state.parts();
        if of_state.iter().map(|part| part.1).sum::<usize>() > self.bytes_max {
            return;
        }
        // What goes may have been shared with what comes: it is counted again each time.
        while self.n_bytes + n_new(&self.parts, &of_state) > self.bytes_max {
            self.drop_one();
        }
        self.n_bytes += n_new(&self.parts, &of_state);
        of_state.iter().for_each(|part| *self.parts.entry(part.0).or_default() += 1);
        self.entries.insert(*key, Entry { state, n_pieces: keys.len(), used: self.clock });
    }

    /// All of one prompt were used together.
    fn touch(&mut self, keys: &[Key]) {
        self.clock += 1;
        for key in keys {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.used = self.clock;
            }
        }
    }

    /// Drops the one that is missed least of those that were used least recently.
    fn drop_one(&mut self) {
        let oldest = self.entries.values().map(|entry| entry.used).min();
        let group = self.entries.iter().filter(|(_, entry)| Some(entry.used) == oldest);
        let mut group: Vec<(usize, Key)> =
            group.map(|(key, entry)| (entry.n_pieces, *key)).collect();
        group.sort_unstable();
        let Some((_, key)) = group.get(least_missed(&group)) else { return };
        let Some(entry) = self.entries.remove(key) else { return };
        for (number, n_bytes) in entry.state.parts() {
            let Some(n_holders) = self.parts.get_mut(&number) else { continue };
            *n_holders -= 1;
            if *n_holders == 0 {
                self.parts.remove(&number);
                self.n_bytes -= n_bytes;
            }
        }
    }
}

/// Bytes of a state that no other holds.
fn n_new(parts: &HashMap<usize, usize>, of_state: &[(usize, usize)]) -> usize {
    of_state.iter().filter(|part| !parts.contains_key(&part.0)).map(|part| part.1).sum()
}

/// Of snapshots along one prompt, in order: that whose absence leaves the smallest gap, measured
/// by how far it is from the end. Never the last, unless it is the only one.
fn least_missed(group: &[(usize, Key)]) -> usize {
    let n_pieces = |idx: usize| group[idx].0;
    let Some(last) = group.len().checked_sub(1) else { return 0 };
    let gap = |idx: usize| {
        let before = if idx == 0 { 0 } else { n_pieces(idx - 1) };
        let distance = (n_pieces(last) - n_pieces(idx)).max(1);
        (n_pieces(idx + 1) - before) as f64 / distance as f64
    };
    (0..last).min_by(|&a, &b| gap(a).total_cmp(&gap(b))).unwrap_or(last)
}
