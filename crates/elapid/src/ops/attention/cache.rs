//! The key-value cache of one sequence.

use super::*;

/// Keys and values of one sequence so far; clones share them until one of them grows.
#[derive(Clone)]
pub struct KvCache {
    /// (capacity, n_kv_head * d_head), the first `n_tok` rows in use.
    keys: Tensor,
    values: Tensor,
    n_tok: usize,
}

impl KvCache {
    /// Nothing yet.
    pub fn new(device: &Device, n_kv_head: usize, d_head: usize) -> KvCache {
        let empty = Tensor::uninit(device, &[0, n_kv_head * d_head]);
        KvCache { keys: empty.clone(), values: empty, n_tok: 0 }
    }

    /// Tokens so far.
    pub fn n_tok(&self) -> usize {
        self.n_tok
    }

    /// Bytes held; what clones share is counted for each of them.
    pub fn n_bytes(&self) -> usize {
        self.keys.n_bytes() + self.values.n_bytes()
    }

    /// The keys so far: (n_tok, n_kv_head * d_head).
    pub fn keys(&self) -> &[f32] {
        &self.keys.f32()[..self.n_tok * self.width()]
    }

    /// The values so far: (n_tok, n_kv_head * d_head).
    pub fn values(&self) -> &[f32] {
        &self.values.f32()[..self.n_tok * self.width()]
    }

    /// Forgets all tokens but the first `n_tok`.
    pub fn truncate(&mut self, n_tok: usize) {
        assert!(n_tok <= self.n_tok, "cache: truncated to {n_tok} of {} tokens", self.n_tok);
        self.n_tok = n_tok;
    }

    /// Adds rows of keys and of values.
    pub fn append(&mut self, keys: &[f32], values: &[f32]) {
        let width = self.width();
        assert!(keys.len() == values.len() && keys.len().is_multiple_of(width));
        let n_tok = self.n_tok + keys.len() / width;
        self.reserve(n_tok);
        let new = self.n_tok * width..n_tok * width;
        self.keys.f32_mut()[new.clone()].copy_from_slice(keys);
        self.values.f32_mut()[new].copy_from_slice(values);
        self.n_tok = n_tok;
    }

    fn width(&self) -> usize {
        self.keys.shape()[1]
    }

    /// Makes room for `n_tok` tokens in storage of its own; a doubled room costs each row one copy.
    fn reserve(&mut self, n_tok: usize) {
        let (capacity, width) = (self.keys.shape()[0], self.width());
        if n_tok <= capacity && self.keys.is_unique() && self.values.is_unique() {
            return;
        }
        let capacity = if n_tok <= capacity { capacity } else { n_tok.max(2 * capacity).max(16) };
        for rows in [&mut self.keys, &mut self.values] {
            let mut room = Tensor::uninit(rows.device(), &[capacity, width]);
            let used = self.n_tok * width;
            room.f32_mut()[..used].copy_from_slice(&rows.f32()[..used]);
            *rows = room;
        }
    }
}
