//! What goes into a pass: tokens, which of them belong together, and what should follow each.

use crate::segment::Segments;
use std::sync::Arc;

/// Tokens, flat, and which of them belong together.
#[derive(Clone, Debug)]
pub struct Batch {
    /// One id per row.
    pub tokens: Arc<[u32]>,
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
        let tokens: Vec<u32> = parts.iter().flat_map(|part| part.0).copied().collect();
        let lengths: Vec<_> = parts.iter().map(|part| (part.0.len(), part.1)).collect();
        Batch { tokens: tokens.into(), segments: Segments::continuing(&lengths) }
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
