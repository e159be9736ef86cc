//! Byte-pair encoding: joins neighbouring symbols by rank until no pair is left.
//!
//! A word is a list of symbols (ids). Among all neighbouring pairs that may be joined the one of
//! the lowest rank is joined, the leftmost of equals, and so on:
//!
//! ```text
//! t h e r e   --(h e -> he)-->   t he r e   --(t he -> the)-->   the r e   --> there
//! ```
//!
//! Short words keep a rank per pair in an array and look for the smallest; long ones keep a heap,
//! so that a line of a million letters takes n log n steps and not n².
//!
//! Symbols are ids of the vocabulary or, where a vocabulary lacks one (a character that only
//! exists joined, a result nobody listed), virtual ids after its end.

use foldhash::fast::FixedState;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasher, Hasher};

/// Words up to this many symbols are joined in an array.
const N_ARRAY_MAX: usize = 40;
const NEVER: u64 = u64::MAX;

/// A map by a fast hash: pairs of ids are looked up in the inner loop.
pub(super) type FoldMap<K, V> = HashMap<K, V, FixedState>;

/// What joins with what, at which rank, into which symbol.
#[derive(Default)]
pub(super) struct Merges {
    /// (left, right) to (rank, result), each packed into one word.
    pairs: FoldMap<u64, u64>,
}

/// Buffers of [`Merges::join`], kept between words.
#[derive(Default)]
pub(super) struct Scratch {
    ranks: Vec<u64>,
    heap: BinaryHeap<Reverse<u64>>,
    next: Vec<u32>,
    previous: Vec<u32>,
}

#[inline]
fn pack(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

impl Merges {
    pub(super) fn with_capacity(n: usize) -> Merges {
        Merges { pairs: FoldMap::with_capacity_and_hasher(n, Default::default()) }
    }

    /// Lets `left` and `right` join into `result`; a pair told twice keeps what it has.
    pub(super) fn insert_first(&mut self, left: u32, right: u32, rank: u32, result: u32) {
        self.pairs.entry(pack(left, right)).or_insert(pack(rank, result));
    }

    /// Lets `left` and `right` join into `result`; a pair told twice takes the new rank.
    pub(super) fn insert_last(&mut self, left: u32, right: u32, rank: u32, result: u32) {
        self.pairs.insert(pack(left, right), pack(rank, result));
    }

    /// Every pair as (rank, left, right, result), by rank.
    pub(super) fn list(&self) -> Vec<(u32, u32, u32, u32)> {
        let unpack = |(&pair, &join): (&u64, &u64)| {
            ((join >> 32) as u32, (pair >> 32) as u32, pair as u32, join as u32)
        };
        let mut list: Vec<_> = self.pairs.iter().map(unpack).collect();
        list.sort_unstable();
        list
    }

    #[inline]
    fn find(&self, left: u32, right: u32) -> u64 {
        self.pairs.get(&pack(left, right)).copied().unwrap_or(NEVER)
    }

    /// Joins the symbols of one word in place.
    pub(super) fn join(&self, symbols: &mut Vec<u32>, scratch: &mut Scratch) {
        match symbols.len() {
            0 | 1 => {}
            n if n <= N_ARRAY_MAX => self.join_short(symbols, &mut scratch.ranks),
            _ => self.join_long(symbols, scratch),
        }
    }

    fn join_short(&self, symbols: &mut Vec<u32>, ranks: &mut Vec<u64>) {
        ranks.clear();
        ranks.extend(symbols.windows(2).map(|pair| self.find(pair[0], pair[1])));
        loop {
            let mut best = (u64::MAX >> 32, 0);
            for (idx, join) in ranks.iter().enumerate() {
                // Ranks alone decide, then the place: results of equal rank may differ.
                if join >> 32 < best.0 {
                    best = (join >> 32, idx);
                }
            }
            let idx = best.1;
            if ranks.get(idx).is_none_or(|join| *join == NEVER) {
                return;
            }
            symbols[idx] = ranks[idx] as u32;
            symbols.remove(idx + 1);
            ranks.remove(idx);
            if idx < ranks.len() {
                ranks[idx] = self.find(symbols[idx], symbols[idx + 1]);
            }
            if idx > 0 {
                ranks[idx - 1] = self.find(symbols[idx - 1], symbols[idx]);
            }
        }
    }

    /// A linked list of symbols and a heap of (rank, place). An entry is stale when the pair at
    /// its place has another rank by now; the list is walked once at the end.
    fn join_long(&self, symbols: &mut Vec<u32>, scratch: &mut Scratch) {
        let n = symbols.len();
        let end = n as u32;
        let Scratch { heap, next, previous, .. } = scratch;
        next.clear();
        next.extend(1..=end);
        previous.clear();
        previous.extend((0..end).map(|place| place.wrapping_sub(1)));
        let mut entries = std::mem::take(heap).into_vec();
        entries.clear();
        for place in 0..n - 1 {
            let join = self.find(symbols[place], symbols[place + 1]);
            if join != NEVER {
                entries.push(Reverse(pack((join >> 32) as u32, place as u32)));
            }
        }
        *heap = BinaryHeap::from(entries);
        while let Some(Reverse(entry)) = heap.pop() {
            let place = entry as u32 as usize;
            let right = next[place];
            // A joined symbol points to itself and finds nothing.
            if right == end || right as usize == place {
                continue;
            }
            let join = self.find(symbols[place], symbols[right as usize]);
            if join == NEVER || join >> 32 != entry >> 32 {
                continue;
            }
            symbols[place] = join as u32;
            let after = next[right as usize];
            next[right as usize] = right;
            next[place] = after;
            if after != end {
                previous[after as usize] = place as u32;
                let join = self.find(symbols[place], symbols[after as usize]);
                if join != NEVER {
                    heap.push(Reverse(pack((join >> 32) as u32, place as u32)));
                }
            }
            if place > 0 {
                let before = previous[place];
                let join = self.find(symbols[before as usize], symbols[place]);
                if join != NEVER {
                    heap.push(Reverse(pack((join >> 32) as u32, before)));
                }
            }
        }
        let mut n_kept = 0;
        let mut place = 0;
        while place != end {
            symbols[n_kept] = symbols[place as usize];
            n_kept += 1;
            place = next[place as usize];
        }
        symbols.truncate(n_kept);
    }
}

/// Words seen before in this text and what became of them: text repeats itself.
///
/// One place per hash, overwritten by the next word that falls on it.
pub(super) struct Memory {
    slots: Vec<Slot>,
    bytes: Vec<u8>,
    ids: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct Slot {
    hash: u32,
    start: u32,
    ids_start: u32,
    len: u16,
    n_ids: u16,
}

/// Longer words are not kept.
const LEN_KEPT_MAX: usize = 48;
/// Bytes of words kept before all are forgotten.
const BYTES_KEPT_MAX: usize = 1 << 21;

#[inline]
pub(super) fn hash(word: &[u8]) -> u64 {
    let mut hasher = FixedState::default().build_hasher();
    hasher.write(word);
    hasher.finish()
}

impl Memory {
    /// For a text of `len` bytes: short texts do not pay for a large table.
    pub(super) fn for_text(len: usize) -> Memory {
        let n_slots = (len / 8).next_power_of_two().clamp(16, 1 << 15);
        Memory { slots: vec![Slot::default(); n_slots], bytes: Vec::new(), ids: Vec::new() }
    }

    fn slot_idx(&self, hash: u64) -> usize {
        hash as usize & (self.slots.len() - 1)
    }

    #[inline]
    pub(super) fn find(&self, word: &[u8], hash: u64) -> Option<&[u32]> {
        let slot = &self.slots[self.slot_idx(hash)];
        if slot.hash != (hash >> 32) as u32 || usize::from(slot.len) != word.len() {
            return None;
        }
        let start = slot.start as usize;
        if self.bytes[start..start + word.len()] != *word {
            return None;
        }
        let start = slot.ids_start as usize;
        Some(&self.ids[start..start + usize::from(slot.n_ids)])
    }

    pub(super) fn keep(&mut self, word: &[u8], hash: u64, ids: &[u32]) {
        if word.is_empty() || word.len() > LEN_KEPT_MAX || ids.len() > LEN_KEPT_MAX {
            return;
        }
        if self.bytes.len() > BYTES_KEPT_MAX {
            self.slots.fill(Slot::default());
            self.bytes.clear();
            self.ids.clear();
        }
        let slot = Slot {
            hash: (hash >> 32) as u32,
            start: self.bytes.len() as u32,
            ids_start: self.ids.len() as u32,
            len: word.len() as u16,
            n_ids: ids.len() as u16,
        };
        let idx = self.slot_idx(hash);
        self.slots[idx] = slot;
        self.bytes.extend_from_slice(word);
        self.ids.extend_from_slice(ids);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The definition, word for word.
    fn slow(merges: &Merges, symbols: &[u32]) -> Vec<u32> {
        let mut symbols = symbols.to_vec();
        loop {
            let best = (0..symbols.len().saturating_sub(1))
                .map(|idx| (merges.find(symbols[idx], symbols[idx + 1]), idx))
                .filter(|pair| pair.0 != NEVER)
                .min_by_key(|pair| (pair.0 >> 32, pair.1));
            let Some((join, idx)) = best else { return symbols };
            symbols[idx] = join as u32;
            symbols.remove(idx + 1);
        }
    }

    #[test]
    fn array_and_heap_do_what_the_definition_says() {
        let mut seed = 1_u64;
        let mut draw = |n: u32| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as u32 % n
        };
        for round in 0..300 {
            let mut merges = Merges::default();
            for rank in 0..60 {
                let (left, right) = (draw(9), draw(9));
                // Every third round has equal ranks, as equal scores make them.
                let rank = if round % 3 == 0 { rank / 4 } else { rank };
                merges.insert_first(left, right, rank, 3 + draw(6));
            }
            let word: Vec<u32> = (0..draw(90)).map(|_| draw(4)).collect();
            let want = slow(&merges, &word);
            let mut scratch = Scratch::default();
            let mut got = word.clone();
            merges.join(&mut got, &mut scratch);
            assert_eq!(got, want, "round {round}, word {word:?}");
            if word.len() > 1 {
                let mut got = word.clone();
                merges.join_long(&mut got, &mut scratch);
                assert_eq!(got, want, "round {round}, long, word {word:?}");
            }
        }
    }

    #[test]
    fn words_with_the_same_hash_are_told_apart() {
        let mut memory = Memory::for_text(1 << 10);
        memory.keep(b"abc", 5, &[1]);
        assert_eq!(memory.find(b"abc", 5), Some(&[1][..]));
        assert_eq!(memory.find(b"abd", 5), None);
        assert_eq!(memory.find(b"ab", 5), None);
    }

    #[test]
    fn memory_returns_what_was_kept_or_nothing() {
        let mut memory = Memory::for_text(1 << 10);
        let words: Vec<String> = (0..50_000).map(|n| format!("word{}", n % 7001)).collect();
        for (n, word) in words.iter().enumerate() {
            let n = (n % 7001) as u32;
            let hash = hash(word.as_bytes());
            match memory.find(word.as_bytes(), hash) {
                Some(ids) => assert_eq!(ids, [n, n + 1]),
                None => memory.keep(word.as_bytes(), hash, &[n, n + 1]),
            }
        }
    }
}
