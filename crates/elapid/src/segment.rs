//! Which tokens belong together.
//!
//! Tokens of a batch lie flat, one row each. A segment is a run of rows that form one sequence:
//! a document of a packed row, a row of a rectangular batch, or the new tokens of one sequence in
//! generation. Mixers never look past a segment, so documents cannot see each other and batches
//! need no masks and no padding.

use std::sync::Arc;

/// One run of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First row.
    pub start: usize,
    /// Rows.
    pub n_tok: usize,
    /// Position of its first token in its sequence: above zero when a state precedes it.
    pub offset: usize,
}

impl Segment {
    /// Its rows.
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.n_tok
    }
}

/// All segments of a batch, in order and without gaps; clones share them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segments(Arc<[Segment]>);

impl Segments {
    /// Segments of these lengths, each from the beginning of its sequence. Lengths of zero vanish.
    pub fn from_lengths(lengths: &[usize]) -> Segments {
        let with_offsets: Vec<_> = lengths.iter().map(|&n_tok| (n_tok, 0)).collect();
        Segments::continuing(&with_offsets)
    }

    /// Segments of (length, offset).
    pub fn continuing(parts: &[(usize, usize)]) -> Segments {
        let mut start = 0;
        let mut list = Vec::with_capacity(parts.len());
        for &(n_tok, offset) in parts.iter().filter(|part| part.0 > 0) {
            list.push(Segment { start, n_tok, offset });
            start += n_tok;
        }
        Segments(list.into())
    }

    /// Rows in all.
    pub fn n_tok(&self) -> usize {
        self.0.last().map_or(0, |last| last.start + last.n_tok)
    }
}

impl std::ops::Deref for Segments {
    type Target = [Segment];
    fn deref(&self) -> &[Segment] {
        &self.0
    }
}
