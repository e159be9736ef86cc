//! What goes into a pass: tokens, which of them belong together, and what should follow each.

use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::segment::Segments;
use std::sync::{Arc, OnceLock};

/// Ids of tokens; clones share them.
#[derive(Clone)]
pub struct Tokens(Arc<Inner>);

struct Inner {
    list: Vec<u32>,
    /// On the GPU that first wanted them.
    there: OnceLock<Tensor>,
}

impl Tokens {
    /// The same on a GPU.
    pub(crate) fn on(&self, device: &Device) -> Tensor {
        let make = || Tensor::from_u32(device, &self.0.list);
        let there = self.0.there.get_or_init(make);
        if there.device().is_same(device) { there.clone() } else { make() }
    }

    /// Gives recorded work other tokens.
    pub(crate) fn step_on(&self, ids: &[u32]) {
        let there = self.0.there.get().expect("recorded work has read its tokens");
        there.rewrite(bytemuck::cast_slice(ids));
    }
}

impl From<Vec<u32>> for Tokens {
    fn from(list: Vec<u32>) -> Tokens {
        Tokens(Arc::new(Inner { list, there: OnceLock::new() }))
    }
}

impl FromIterator<u32> for Tokens {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Tokens {
        ids.into_iter().collect::<Vec<u32>>().into()
    }
}

impl std::ops::Deref for Tokens {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        &self.0.list
    }
}

impl std::fmt::Debug for Tokens {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Tokens, flat, and which of them belong together.
#[derive(Clone, Debug)]
pub struct Batch {
    /// One id per row.
    pub tokens: Tokens,
    /// Runs of rows that form sequences.
    pub segments: Segments,
}

impl Batch {
    /// Whole sequences, one after the other.
    pub fn from_sequences(sequences: &[&[u32]]) -> Batch {
        let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.len()).collect();
        Batch { tokens: sequences.concat().into(), segments: Segments::from_lengths(&lengths) }
    }

    /// The next tokens of sequences that have seen `offset` tokens already: (tokens, offset).
    pub fn continuing(parts: &[(&[u32], usize)]) -> Batch {
        Batch::repeated(parts, 0)
    }

    /// The same for work that is done again up to `n_ahead` times, see `Segments::repeated`.
    pub(crate) fn repeated(parts: &[(&[u32], usize)], n_ahead: usize) -> Batch {
        let tokens: Vec<u32> = parts.iter().flat_map(|part| part.0).copied().collect();
        let lengths: Vec<_> = parts.iter().map(|part| (part.0.len(), part.1)).collect();
        Batch { tokens: tokens.into(), segments: Segments::repeated(&lengths, n_ahead) }
    }
}

/// What the loss is about, aligned with the rows of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// The token wanted after each token.
    pub ids: &'a [u32],
    /// Weight of each; zero leaves it out.
    pub weights: &'a [f32],
    /// What the weighted sum is divided by: usually the sum of the weights of the whole batch.
    pub norm: f32,
}
