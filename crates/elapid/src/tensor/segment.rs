//! Which tokens belong together.
//!
//! Tokens of a batch lie flat, one row each. A segment is a run of rows that form one sequence:
//! a document of a packed row, a row of a rectangular batch, or the new tokens of one sequence in
//! generation. Mixers never look past a segment, so documents cannot see each other and batches
//! need no masks and no padding.

use crate::tensor::Tensor;
use crate::tensor::device::Device;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What kernels are told of segments, made once for all layers of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Table {
    /// The position of every row in its sequence.
    Positions,
    /// Runs of at most so many rows, as attention takes them.
    Blocks(usize),
    /// Runs of at most so many rows, as convolutions take them.
    Pieces(usize),
}

/// One run of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub start: usize,
    pub n_tok: usize,
    /// Position of its first token in its sequence: above zero when a state precedes it.
    pub offset: usize,
}

impl Segment {
    pub fn rows(&self) -> std::ops::Range<usize> {
        self.start..self.start + self.n_tok
    }
}

/// All segments of a batch, in order and without gaps; clones share them.
#[derive(Clone)]
pub struct Segments(Arc<Inner>);

struct Inner {
    list: Vec<Segment>,
    n_ahead: usize,
    /// What kernels were told of them.
    tables: Mutex<Vec<(Table, Tensor)>>,
}

impl Segments {
    /// Segments of these lengths, each from the beginning of its sequence. Lengths of zero vanish.
    pub fn from_lengths(lengths: &[usize]) -> Segments {
        let with_offsets: Vec<_> = lengths.iter().map(|&n_tok| (n_tok, 0)).collect();
        Segments::continuing(&with_offsets)
    }

    /// Segments of (length, offset).
    pub fn continuing(parts: &[(usize, usize)]) -> Segments {
        Segments::repeated(parts, 0)
    }

    /// The same for work that is recorded and then done again up to `n_ahead` times, each sequence
    /// one token further every time: `step_on` tells where they are.
    pub(crate) fn repeated(parts: &[(usize, usize)], n_ahead: usize) -> Segments {
        let mut start = 0;
        let mut list = Vec::with_capacity(parts.len());
        for &(n_tok, offset) in parts.iter().filter(|part| part.0 > 0) {
            list.push(Segment { start, n_tok, offset });
            start += n_tok;
        }
        Segments(Arc::new(Inner { list, n_ahead, tables: Mutex::default() }))
    }

    /// The same rows in segments of at most so many, each the beginning of a sequence.
    pub(crate) fn cut(&self, most: usize) -> Segments {
        let pieces = |segment: &Segment| {
            let (n, rest) = (segment.n_tok / most, segment.n_tok % most);
            std::iter::repeat_n(most, n).chain([rest])
        };
        Segments::from_lengths(&self.0.list.iter().flat_map(pieces).collect::<Vec<_>>())
    }

    pub fn n_tok(&self) -> usize {
        self.last().map_or(0, |last| last.start + last.n_tok)
    }

    /// How many tokens further the sequences may be when the same work is done again.
    pub(crate) fn n_ahead(&self) -> usize {
        self.0.n_ahead
    }

    /// The position of every row in its sequence, on a GPU. Kernels of single tokens
    /// take positions from here, so that they can be recorded.
    pub(crate) fn positions(&self, device: &Device) -> Tensor {
        self.table(Table::Positions, device, |segments| {
            let rows = segments.iter().flat_map(|s| s.offset..s.offset + s.n_tok);
            rows.map(|pos| pos as u32).collect()
        })
    }

    /// Tells recorded work where its sequences are: a position for every row.
    pub(crate) fn step_on(&self, positions: &[u32]) {
        for (_, tensor) in self.tables().iter().filter(|it| it.0 == Table::Positions) {
            tensor.rewrite(bytemuck::cast_slice(positions));
        }
    }

    fn tables(&self) -> MutexGuard<'_, Vec<(Table, Tensor)>> {
        self.0.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A table on a GPU; `make` makes it the first time.
    pub(crate) fn table(
        &self,
        table: Table,
        device: &Device,
        make: impl FnOnce(&[Segment]) -> Vec<u32>,
    ) -> Tensor {
        let mut tables = self.tables();
        let is_it = |it: &&(Table, Tensor)| it.0 == table && it.1.device().is_same(device);
        if let Some((_, found)) = tables.iter().find(is_it) {
            return found.clone();
        }
        let made = Tensor::from_u32(device, &make(&self.0.list));
        tables.push((table, made.clone()));
        made
    }
}

impl PartialEq for Segments {
    fn eq(&self, other: &Segments) -> bool {
        self[..] == other[..]
    }
}

impl Eq for Segments {}

impl std::fmt::Debug for Segments {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl std::ops::Deref for Segments {
    type Target = [Segment];
    fn deref(&self) -> &[Segment] {
        &self.0.list
    }
}
