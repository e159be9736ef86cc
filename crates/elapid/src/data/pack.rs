//! Documents laid end to end and cut into rows: what a step of training is given.
//!
//! A document of n tokens gives n - 1 pairs of a token and the one that follows. All pairs of an
//! epoch lie on a circle, document after document, and rows are cut from it: exactly `context`
//! pairs each, from a point that differs with every epoch. What does not fill a row at the end is
//! left out in that epoch, less than `context` pairs, and others in the next. A corpus that is
//! smaller than a row goes around more than once.
//!
//! ```text
//! pairs     a1 a2 a3 | b1 b2 b3 b4 b5 | c1 c2
//! rows         [a2 a3   b1 b2] [b3 b4 b5 c1]        left out: c2 a1
//! ```
//!
//! In a row each document is a segment of its own and sees no other. A document that continues in
//! the next row begins there as a fresh segment, from the token before: no target is lost.
//!
//! Order and cuts are a function of (seed, epoch), fill in the middle of (seed, epoch, document):
//! a cursor of two numbers is all that resuming needs. Rows in which nothing is learned are left
//! out.
//!
//! An epoch is held in memory. One time through a corpus of more than `N_TOK_EPOCH` tokens is
//! therefore several epochs: the documents are shuffled as a whole and dealt out to them.
//!
//! A document of weight 2 is drawn twice, one of weight 0.3 in three of ten times through the
//! corpus.
//!
//! Files of a project may stand in one sequence: then they are drawn in groups (`project.rs`).
//!
//! Not here: how documents are encoded (`mod.rs`) and changed (`fim_training.rs`).

use super::corpus::Corpus;
use super::fim_training::{self, FimTraining, Run, Sequence, Transform};
use super::project::{Layout, N_ROWS_GROUP, ProjectTraining};
use super::{Encoded, Ends};
use crate::error::{Error, Result};
use crate::tensor::batch::Batch;
use crate::tensor::rng::Rng;
use crate::tensor::segment::Segments;
use crate::text::tokenizer::Tokenizer;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;

/// Tokens of an epoch at most, about: 5 bytes each, and as much again for a moment when the next
/// is laid out.
const N_TOK_EPOCH: f64 = (1 << 24) as f64;

/// The order of documents and rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By the seed, anew in each epoch.
    Shuffled,
    /// As given, cut from the first token on.
    AsGiven,
}

/// How batches are made.
#[derive(Clone, Debug)]
pub struct LoadSettings {
    /// Tokens of a row.
    pub context: usize,
    /// Rows of a batch.
    pub n_rows: usize,
    /// What order, cuts and holes depend on.
    pub seed: u64,
    /// Fill in the middle, or none.
    pub fim: Option<FimTraining>,
    /// Files together with others of their project, or each alone.
    pub project: Option<ProjectTraining>,
    /// What the documents begin and end with.
    pub ends: Ends,
    /// The order of documents and rows.
    pub shuffle: Order,
}

/// The place of the next row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cursor {
    /// Epochs before this one.
    pub epoch: u64,
    /// Rows taken in this epoch.
    pub row: u64,
}

/// Rows for one step, flat.
#[derive(Clone, Debug)]
pub struct PackedBatch {
    /// Tokens and segments; (n_rows * context) tokens.
    pub batch: Batch,
    /// The token that follows each.
    pub targets: Vec<u32>,
    /// 1 where it is to be predicted, else 0; never all 0.
    pub weights: Vec<f32>,
}

impl PackedBatch {
    /// The weight of all targets.
    pub fn weight(&self) -> f64 {
        self.weights.iter().map(|&x| f64::from(x)).sum()
    }
}

/// Gives out batches without end.
pub struct Loader {
    corpus: Arc<Corpus>,
    /// Documents of the corpus to learn from.
    taught: Vec<usize>,
    /// Epochs of one time through the corpus.
    n_parts: u64,
    settings: LoadSettings,
    tokenizer: Arc<Tokenizer>,
    epoch: Epoch,
    /// Rows of the epoch that have been taken.
    row: usize,
}

/// Streams of random numbers.
#[derive(Clone, Copy)]
enum Draw {
    // Far from streams that others may take of the same seed.
    Documents = 0x6461_0001,
    Rows = 0x6461_0002,
    Offset = 0x6461_0003,
    Middle = 0x6461_0004,
    Weights = 0x6461_0005,
    Projects = 0x6461_0006,
}

/// A document of an epoch.
#[derive(Clone, Copy)]
struct Drawn {
    /// Place among those that are taught.
    idx: usize,
    /// Times it was drawn before.
    copy: usize,
}

/// A run of pairs: (document or filled sequence, tokens of it).
#[derive(Clone)]
enum Source {
    Document(usize, Range<usize>),
    Filled(Sequence),
}

/// One time through the documents, or a part of them.
#[derive(Default)]
struct Epoch {
    number: u64,
    documents: Arc<Vec<Encoded>>,
    sources: Vec<Source>,
    /// Pairs before each source, and in all.
    starts: Vec<usize>,
    /// The pair that the first row begins with.
    offset: usize,
    /// Rows in the order they are given out, each by its first pair counted from `offset`.
    rows: Vec<usize>,
}

impl Loader {
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// A loader at the beginning of the first epoch.
    pub fn new(
        corpus: Arc<Corpus>,
        settings: LoadSettings,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<Loader> {
        for (name, n) in [("context", settings.context), ("rows of a batch", settings.n_rows)] {
            if n == 0 {
                return Err(Error::input(format!("{name}: 0"), "give at least 1"));
            }
        }
        let entries = corpus.entries();
        let taught: Vec<usize> = (0..entries.len()).filter(|idx| entries[*idx].teaches()).collect();
        if !taught.iter().any(|idx| entries[*idx].has_learned()) {
            let problem = "there is nothing to learn from: no document has a token to predict";
            return Err(Error::input(problem, "give files with text, or answers to learn"));
        }
        if let Some(fim) = &settings.fim {
            fim_training::check(fim, &tokenizer)?;
        }
        let epoch = Epoch::default();
        let mut loader = Loader { corpus, taught, n_parts: 1, settings, tokenizer, epoch, row: 0 };
        loader.n_parts = (loader.n_pairs() / N_TOK_EPOCH).ceil().max(1.0) as u64;
        loader.epoch = loader.plan(0)?;
        Ok(loader)
    }

    /// The next rows; a new epoch begins within a batch where it must.
    pub fn next_batch(&mut self) -> Result<PackedBatch> {
        let LoadSettings { context, n_rows, .. } = self.settings;
        let n_tok = context * n_rows;
        let (mut tokens, mut targets) = (Vec::with_capacity(n_tok), Vec::with_capacity(n_tok));
        let (mut weights, mut lengths) = (Vec::with_capacity(n_tok), Vec::new());
        for _ in 0..n_rows {
            if self.row == self.epoch.rows.len() {
                self.epoch = self.plan(self.epoch.number + 1)?;
                self.row = 0;
            }
            for span in self.epoch.spans(self.epoch.rows[self.row], context) {
                let (ids, learned) = self.epoch.sequence(span.source);
                let (inputs, after) =
                    (span.pairs.clone(), span.pairs.start + 1..span.pairs.end + 1);
                tokens.extend_from_slice(&ids[inputs]);
                targets.extend_from_slice(&ids[after.clone()]);
                weights.extend(learned[after].iter().map(|learned| f32::from(*learned)));
                lengths.push(span.pairs.len());
            }
            self.row += 1;
        }
        let segments = Segments::from_lengths(&lengths);
        Ok(PackedBatch { batch: Batch { tokens: tokens.into(), segments }, targets, weights })
    }

    /// From now on batches have so many rows.
    pub fn set_rows(&mut self, n_rows: usize) {
        assert!(n_rows > 0, "a batch of no rows");
        self.settings.n_rows = n_rows;
    }

    /// Where the next batch begins.
    pub fn cursor(&self) -> Cursor {
        Cursor { epoch: self.epoch.number, row: self.row as u64 }
    }

    /// Goes to a place that [`Loader::cursor`] gave, of the same documents and settings: what
    /// follows is the same to the bit.
    pub fn seek(&mut self, cursor: Cursor) -> Result<()> {
        let epoch = match cursor.epoch == self.epoch.number {
            true => None,
            false => Some(self.plan(cursor.epoch)?),
        };
        let n_rows = epoch.as_ref().unwrap_or(&self.epoch).rows.len();
        if cursor.row > n_rows as u64 {
            let problem = format!(
                "the run stopped at row {} of epoch {}, which now has {n_rows} rows",
                cursor.row, cursor.epoch
            );
            return Err(Error::input(problem, "resume with the same files, seed and context"));
        }
        self.epoch = epoch.unwrap_or_else(|| std::mem::take(&mut self.epoch));
        self.row = cursor.row as usize;
        Ok(())
    }

    /// Tokens to predict in one time through the corpus, before the end is left out; with fill in
    /// the middle the number differs a little from time to time.
    pub fn n_tok_epoch(&self) -> usize {
        match self.n_parts {
            1 => self.epoch.n_pairs(),
            _ => self.n_pairs() as usize,
        }
    }

    /// The same as it is expected, without fill in the middle.
    fn n_pairs(&self) -> f64 {
        let entries = self.taught.iter().map(|idx| &self.corpus.entries()[*idx]);
        entries.map(|entry| entry.weight.unwrap_or(0.0) * (entry.n_tok - 1) as f64).sum()
    }

    /// Rows of this epoch.
    pub fn n_rows_epoch(&self) -> usize {
        self.epoch.rows.len()
    }

    /// A number for each epoch that everything random in it is drawn from.
    fn seed(&self, draw: Draw, epoch: u64) -> u64 {
        Rng::new(self.settings.seed, draw as u64).bits(epoch)
    }

    fn shuffle<T>(&self, list: &mut [T], draw: Draw, epoch: u64) {
        if self.settings.shuffle == Order::AsGiven {
            return;
        }
        let rng = Rng::new(self.seed(draw, epoch), 0);
        for n in (1..list.len()).rev() {
            list.swap(n, rng.below(n as u64, n as u64 + 1) as usize);
        }
    }

    /// The documents of an epoch in their order, in groups that are one sequence or none.
    fn draw(&self, number: u64) -> Vec<Vec<Drawn>> {
        let (time, part) = (number / self.n_parts, number % self.n_parts);
        let entry = |idx: usize| &self.corpus.entries()[self.taught[idx]];
        let rng = Rng::new(self.seed(Draw::Weights, time), 0);
        let mut drawn = Vec::with_capacity(self.taught.len());
        for idx in 0..self.taught.len() {
            let weight = entry(idx).weight.unwrap_or(0.0);
            let is_once_more = weight.fract() > 0.0 && rng.uniform(idx as u64) < weight.fract();
            let n = weight as usize + usize::from(is_once_more);
            drawn.extend((0..n).map(|copy| Drawn { idx, copy }));
        }
        if drawn.is_empty() {
            drawn.extend((0..self.taught.len()).map(|idx| Drawn { idx, copy: 0 }));
        }
        let mut groups = self.groups(drawn);
        self.shuffle(&mut groups, Draw::Documents, time);
        let n_tok = |group: &[Drawn]| group.iter().map(|it| entry(it.idx).n_tok).sum::<usize>();
        let n_all: usize = groups.iter().map(|group| n_tok(group)).sum();
        let mut n_before = 0;
        groups.retain(|group| {
            let is_here = n_before as u64 * self.n_parts / n_all as u64 == part;
            n_before += n_tok(group);
            is_here
        });
        groups
    }

    /// Neighbours of one project together, or each document alone.
    fn groups(&self, mut drawn: Vec<Drawn>) -> Vec<Vec<Drawn>> {
        let Some(settings) = &self.settings.project else {
            return drawn.into_iter().map(|it| vec![it]).collect();
        };
        drawn.sort_by_key(|it| it.copy);
        let n_tok_max = N_ROWS_GROUP * self.settings.context;
        let (mut groups, mut project, mut n_left) = (Vec::<Vec<Drawn>>::new(), None, 0);
        for it in drawn {
            let entry = &self.corpus.entries()[self.taught[it.idx]];
            let found = entry.is_whole().then(|| settings.place(entry.name()).0);
            match groups.last_mut() {
                Some(group) if found.is_some() && found == project && entry.n_tok <= n_left => {
                    group.push(it);
                }
                _ => {
                    groups.push(vec![it]);
                    (project, n_left) = (found, n_tok_max);
                }
            }
            n_left = n_left.saturating_sub(entry.n_tok);
        }
        groups
    }

    /// Lays out an epoch.
    fn plan(&self, number: u64) -> Result<Epoch> {
        let context = self.settings.context;
        let groups = self.draw(number);
        // Where each of them lies among those that are loaded.
        let mut loaded: Vec<usize> = (0..self.taught.len()).collect();
        let documents = match self.n_parts {
            1 if !self.epoch.documents.is_empty() => self.epoch.documents.clone(),
            n_parts => {
                if n_parts > 1 {
                    loaded = groups.iter().flatten().map(|drawn| drawn.idx).collect();
                    loaded.sort_unstable();
                    loaded.dedup();
                }
                let list: Vec<usize> = loaded.iter().map(|idx| self.taught[*idx]).collect();
                Arc::new(self.corpus.load(&list)?)
            }
        };
        let place = |idx: usize| loaded.binary_search(&idx).expect("it was loaded");
        let of_group = |group: &Vec<Drawn>| {
            let runs = |drawn: &Drawn| {
                let place = place(drawn.idx);
                (place, self.runs(drawn, &documents[place], number))
            };
            self.sources(group.iter().map(runs).collect(), group[0], &documents, number)
        };
        let sources = groups.par_iter().map(of_group).collect::<Result<Vec<_>>>()?;
        let sources: Vec<Source> = sources.into_iter().flatten().collect();
        let mut epoch = Epoch { number, documents, sources, ..Epoch::default() };
        epoch.starts.push(0);
        for source in 0..epoch.sources.len() {
            let n_pairs = epoch.sequence(source).0.len() - 1;
            epoch.starts.push(epoch.n_pairs() + n_pairs);
        }
        let n_pairs = epoch.n_pairs();
        if self.settings.shuffle == Order::Shuffled && n_pairs > context {
            let rng = Rng::new(self.seed(Draw::Offset, number), 0);
            epoch.offset = rng.below(0, n_pairs as u64) as usize;
        }
        let n_rows = (n_pairs / context).max(1);
        let learns = |first: &usize| {
            epoch.spans(*first, context).any(|span| {
                let learned = epoch.sequence(span.source).1;
                learned[span.pairs.start + 1..span.pairs.end + 1].contains(&true)
            })
        };
        let mut rows: Vec<usize> = (0..n_rows).map(|n| n * context).filter(learns).collect();
        if rows.is_empty() {
            // All there is to learn lies in the end that would be left out.
            rows.push(n_rows * context);
        }
        self.shuffle(&mut rows, Draw::Rows, number);
        epoch.rows = rows;
        Ok(epoch)
    }

    /// A document with its holes.
    fn runs(&self, drawn: &Drawn, document: &Encoded, epoch: u64) -> Vec<Run> {
        let Some(settings) = &self.settings.fim else {
            return vec![Run::Plain(0..document.ids.len())];
        };
        let (tokenizer, ends) = (&*self.tokenizer, self.settings.ends);
        let n_tok_piece = self.settings.context.div_ceil(2);
        let pieces = fim_training::pieces(document, tokenizer, ends, n_tok_piece);
        let stream = drawn.idx + drawn.copy * self.taught.len();
        let rng = Rng::new(self.seed(Draw::Middle, epoch), stream as u64);
        Transform { settings, tokenizer, ends }.runs(document, &pieces, &rng)
    }

    /// What a group is learned as: one sequence, or its documents one by one.
    fn sources(
        &self,
        mut group: Vec<(usize, Vec<Run>)>,
        first: Drawn,
        documents: &[Encoded],
        epoch: u64,
    ) -> Result<Vec<Source>> {
        let is_whole = self.corpus.entries()[self.taught[first.idx]].is_whole();
        let stream = first.idx + first.copy * self.taught.len();
        let rng = Rng::new(self.seed(Draw::Projects, epoch), stream as u64);
        if self.settings.project.is_some() && self.settings.shuffle == Order::Shuffled {
            for n in (1..group.len()).rev() {
                group.swap(n, rng.below(n as u64, n as u64 + 1) as usize);
            }
        }
        if let Some(settings) = &self.settings.project
            && is_whole
            && rng.uniform(0) < settings.rate
        {
            let group: Vec<(&Encoded, Vec<Run>)> =
                group.into_iter().map(|(place, runs)| (&documents[place], runs)).collect();
            let (tokenizer, ends) = (&*self.tokenizer, self.settings.ends);
            let sequence = Layout { settings, tokenizer, ends }.sequence(&group)?;
            return Ok(vec![Source::Filled(sequence)]);
        }
        let source = |place: usize, run| match run {
            Run::Plain(range) => Source::Document(place, range),
            Run::Filled(sequence) => Source::Filled(sequence),
        };
        let sources = group
            .into_iter()
            .flat_map(|(place, runs)| runs.into_iter().map(move |run| source(place, run)));
        Ok(sources.collect())
    }
}

/// Pairs of one source in a row: a segment.
struct Span {
    source: usize,
    pairs: Range<usize>,
}

impl Epoch {
    fn n_pairs(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    fn sequence(&self, source: usize) -> (&[u32], &[bool]) {
        match &self.sources[source] {
            Source::Document(place, range) => {
                let document = &self.documents[*place];
                (&document.ids[range.clone()], &document.learned[range.clone()])
            }
            Source::Filled(sequence) => (&sequence.ids, &sequence.learned),
        }
    }

    /// The segments of the row that begins `first` pairs after the offset.
    fn spans(&self, first: usize, context: usize) -> impl Iterator<Item = Span> {
        let mut at = (self.offset + first) % self.n_pairs();
        let mut n_left = context;
        let mut source = self.starts.partition_point(|start| *start <= at) - 1;
        std::iter::from_fn(move || {
            if n_left == 0 {
                return None;
            }
            let start = self.starts[source];
            let n = (self.starts[source + 1] - at).min(n_left);
            let span = Span { source, pairs: at - start..at - start + n };
            (at, n_left, source) = (at + n, n_left - n, source + 1);
            if at == self.n_pairs() {
                (at, source) = (0, 0);
            }
            Some(span)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{TEXT, tokenizer};
    use super::super::{Document, encode};
    use super::*;
    use crate::text::fim::{FimStyle, FimTokens};

    /// Documents of these lengths whose ids count up and occur once: any two neighbours in one
    /// document differ by 1, and no others.
    fn counted(lengths: &[usize]) -> Vec<Encoded> {
        let document = |(idx, n): (usize, &usize)| Encoded {
            name: format!("{idx}"),
            language: "text",
            n_bytes: *n,
            ids: (0..*n as u32).map(|at| (idx as u32 + 1) * 100_000 + at).collect(),
            learned: (0..*n).map(|at| at > 0).collect(),
        };
        lengths.iter().enumerate().map(document).collect()
    }

    fn settings(context: usize, n_rows: usize) -> LoadSettings {
        let ends = Ends { begin: Some(0), end: Some(0) };
        LoadSettings {
            context,
            n_rows,
            seed: 7,
            fim: None,
            project: None,
            ends,
            shuffle: Order::Shuffled,
        }
    }

    fn loader(documents: &[Encoded], settings: &LoadSettings) -> Loader {
        let corpus = Arc::new(Corpus::of(documents));
        Loader::new(corpus, settings.clone(), Arc::new(tokenizer())).unwrap()
    }

    fn texts() -> Vec<Encoded> {
        let tokenizer = tokenizer();
        let ends = Ends { begin: Some(0), end: Some(0) };
        let text =
            |n: usize| Document::whole(format!("{n}"), TEXT.repeat(1 + n % 4) + &"x".repeat(n));
        (0..7).map(|n| encode(&text(n), &tokenizer, ends).unwrap()).collect()
    }

    fn with_fim(mut settings: LoadSettings) -> LoadSettings {
        let tokens = FimTokens {
            prefix: 1,
            suffix: 2,
            middle: Some(3),
            pad: None,
            repo: None,
            sep: None,
            end: None,
            style: FimStyle::Psm,
        };
        settings.fim = Some(FimTraining { rate: 0.5, spm: 0.5, tokens });
        settings
    }

    type Flat = (Vec<u32>, Segments, Vec<u32>, Vec<f32>);

    fn flat(batch: PackedBatch) -> Flat {
        let PackedBatch { batch, targets, weights } = batch;
        (batch.tokens.to_vec(), batch.segments, targets, weights)
    }

    #[test]
    fn every_token_is_predicted_once_an_epoch_from_the_one_before_it() {
        for lengths in [vec![2, 3, 50, 7, 2, 120, 33], vec![500], vec![2; 90], vec![11, 6]] {
            let documents = counted(&lengths);
            let settings = settings(10, 1);
            let mut loader = loader(&documents, &settings);
            let n_all: usize = lengths.iter().map(|n| n - 1).sum();
            assert_eq!(loader.n_tok_epoch(), n_all);
            assert_eq!(loader.n_rows_epoch(), n_all / 10);
            let mut left_out = Vec::new();
            for epoch in 0..4 {
                let mut seen = std::collections::BTreeSet::new();
                while loader.cursor().epoch == epoch && loader.row < loader.n_rows_epoch() {
                    let (tokens, segments, targets, weights) = flat(loader.next_batch().unwrap());
                    assert_eq!((tokens.len(), segments.n_tok()), (10, 10));
                    assert_eq!(weights, [1.0; 10]);
                    for (token, target) in tokens.iter().zip(&targets) {
                        assert_eq!(token + 1, *target);
                        assert!(seen.insert(*target), "{target} twice");
                    }
                    for segment in segments.iter() {
                        let ids = &tokens[segment.rows()];
                        assert!(ids.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{ids:?}");
                    }
                }
                assert_eq!(seen.len(), n_all - n_all % 10);
                let all = documents.iter().flat_map(|document| &document.ids[1..]);
                let missing: Vec<u32> = all.copied().filter(|id| !seen.contains(id)).collect();
                left_out.push(missing);
                loader.seek(Cursor { epoch: epoch + 1, row: 0 }).unwrap();
            }
            if !n_all.is_multiple_of(10) {
                assert!(left_out.iter().any(|list| *list != left_out[0]), "always the same");
            }
        }
    }

    #[test]
    fn documents_are_segments_also_where_one_is_split_between_rows() {
        let mut settings = settings(8, 2);
        settings.shuffle = Order::AsGiven;
        let mut loader = loader(&counted(&[5, 13]), &settings);
        let (tokens, segments, targets, _) = flat(loader.next_batch().unwrap());
        let lengths: Vec<usize> = segments.iter().map(|segment| segment.n_tok).collect();
        assert_eq!(lengths, [4, 4, 8]);
        assert_eq!(tokens[..5], [100_000, 100_001, 100_002, 100_003, 200_000]);
        // The second row continues from the token before.
        assert_eq!((targets[7], tokens[8]), (200_004, 200_004));
        assert!(segments.iter().all(|segment| segment.offset == 0));
    }

    #[test]
    fn a_small_corpus_is_repeated_until_a_row_is_full() {
        let mut loader = loader(&counted(&[4, 3]), &settings(16, 1));
        assert_eq!((loader.n_tok_epoch(), loader.n_rows_epoch()), (5, 1));
        let (tokens, segments, _, _) = flat(loader.next_batch().unwrap());
        let lengths: Vec<usize> = segments.iter().map(|segment| segment.n_tok).collect();
        assert!(
            lengths == [3, 2, 3, 2, 3, 2, 1] || lengths == [2, 3, 2, 3, 2, 3, 1],
            "{lengths:?}"
        );
        assert!(segments.iter().all(|segment| tokens[segment.start] % 100_000 == 0));
        assert_eq!(loader.cursor(), Cursor { epoch: 0, row: 1 });
        loader.next_batch().unwrap();
        assert_eq!(loader.cursor(), Cursor { epoch: 1, row: 1 });
    }

    #[test]
    fn after_a_seek_everything_goes_on_as_if_nothing_had_happened() {
        for settings in [settings(24, 3), with_fim(settings(24, 3)), with_fim(settings(24, 40))] {
            let documents = texts();
            let mut straight = loader(&documents, &settings);
            let mut cursors = Vec::new();
            let mut batches = Vec::new();
            for _ in 0..30 {
                cursors.push(straight.cursor());
                batches.push(flat(straight.next_batch().unwrap()));
            }
            assert!(straight.cursor().epoch > 1, "{:?}", straight.cursor());
            let mut other = loader(&documents, &settings);
            for at in (0..28).rev() {
                let json = serde_json::to_string(&cursors[at]).unwrap();
                other.seek(serde_json::from_str(&json).unwrap()).unwrap();
                assert_eq!(other.cursor(), cursors[at]);
                for want in &batches[at..(at + 3).min(30)] {
                    assert_eq!(flat(other.next_batch().unwrap()), *want, "from batch {at}");
                }
            }
        }
    }

    #[test]
    fn seed_epoch_and_holes_each_make_a_difference() {
        let documents = texts();
        let all = |settings: &LoadSettings, epoch: u64| {
            let mut loader = loader(&documents, settings);
            loader.seek(Cursor { epoch, row: 0 }).unwrap();
            flat(loader.next_batch().unwrap())
        };
        let plain = settings(24, 9);
        let other = LoadSettings { seed: 8, ..plain.clone() };
        assert_eq!(all(&plain, 0), all(&plain, 0));
        assert_ne!(all(&plain, 0), all(&other, 0));
        assert_ne!(all(&plain, 0), all(&plain, 1));
        let as_given = LoadSettings { shuffle: Order::AsGiven, ..plain.clone() };
        assert_eq!(all(&as_given, 0), all(&as_given, 1));
        // With the order fixed, holes differ from epoch to epoch and from seed to seed.
        let holes = with_fim(as_given.clone());
        assert_ne!(all(&holes, 0), all(&as_given, 0));
        assert_ne!(all(&holes, 0), all(&holes, 1));
        assert_ne!(all(&holes, 0), all(&LoadSettings { seed: 8, ..holes.clone() }, 0));
    }

    #[test]
    fn any_number_of_threads_gives_the_same_batches() {
        let documents = texts();
        let on = |n: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
            pool.install(|| {
                let mut loader = loader(&documents, &with_fim(settings(24, 5)));
                (0..12).map(|_| flat(loader.next_batch().unwrap())).collect::<Vec<Flat>>()
            })
        };
        assert_eq!(on(1), on(2));
    }

    /// A loader of a corpus that is too large for one epoch.
    fn in_parts(documents: &[Encoded], settings: &LoadSettings, n_parts: u64) -> Loader {
        let mut loader = loader(documents, settings);
        loader.n_parts = n_parts;
        loader.epoch = loader.plan(0).unwrap();
        loader
    }

    #[test]
    fn epochs_of_a_large_corpus_are_parts_that_together_have_every_document() {
        let lengths: Vec<usize> = (0..60).map(|n| 12 + n % 7).collect();
        let documents = counted(&lengths);
        let mut loader = in_parts(&documents, &settings(10, 1), 4);
        let n_all: usize = lengths.iter().map(|n| n - 1).sum();
        assert_eq!(loader.n_tok_epoch(), n_all);
        let mut orders = Vec::new();
        for time in 0..3 {
            let mut seen = Vec::new();
            for part in 0..4 {
                loader.seek(Cursor { epoch: 4 * time + part, row: 0 }).unwrap();
                let names = loader.epoch.documents.iter().map(|document| document.name.clone());
                let n_pairs = loader.epoch.n_pairs();
                assert!(n_pairs.abs_diff(n_all / 4) < 30, "{n_pairs}");
                seen.extend(names);
            }
            orders.push(seen.clone());
            seen.sort_by_key(|name| name.parse::<usize>().unwrap());
            assert_eq!(seen, documents.iter().map(|it| it.name.clone()).collect::<Vec<_>>());
        }
        assert!(orders[0] != orders[1] && orders[1] != orders[2]);
        // Steps go from part to part, and any place is found again.
        let mut straight = in_parts(&documents, &settings(10, 3), 4);
        let mut list = Vec::new();
        while straight.cursor().epoch < 6 {
            list.push((straight.cursor(), flat(straight.next_batch().unwrap())));
        }
        for (cursor, want) in list.iter().rev().step_by(5) {
            straight.seek(*cursor).unwrap();
            assert_eq!(flat(straight.next_batch().unwrap()), *want);
        }
    }

    #[test]
    fn a_document_is_drawn_as_often_as_its_weight_says() {
        let documents = counted(&[40, 40, 40, 40]);
        let weights = [1.0, 2.0, 0.3, 0.0];
        let items: Vec<_> = weights.iter().map(|weight| Some(*weight)).collect();
        let corpus = Arc::new(Corpus::of_weighted(&documents, &items));
        let on = |n_parts| {
            let tokenizer = Arc::new(tokenizer());
            let mut loader = Loader::new(corpus.clone(), settings(10, 1), tokenizer).unwrap();
            loader.n_parts = n_parts;
            let mut counts = [0; 4];
            for epoch in 0..200 * n_parts {
                for drawn in loader.draw(epoch).into_iter().flatten() {
                    counts[drawn.idx] += 1;
                }
            }
            counts
        };
        let counts = on(1);
        assert_eq!((counts[0], counts[1], counts[3]), (200, 400, 0));
        assert!((40..80).contains(&counts[2]), "{counts:?}");
        assert_eq!(on(2), counts);
    }

    #[test]
    fn marks_of_holes_are_read_but_never_predicted() {
        let mut loader = loader(&texts(), &with_fim(settings(24, 4)));
        let mut n_marks = 0;
        for _ in 0..20 {
            let (tokens, _, targets, weights) = flat(loader.next_batch().unwrap());
            n_marks += tokens.iter().filter(|id| (1..=3).contains(*id)).count();
            for (target, weight) in targets.iter().zip(&weights) {
                assert_eq!(*weight == 0.0, (1..=3).contains(target));
            }
        }
        assert!(n_marks > 30, "{n_marks}");
    }

    #[test]
    fn no_batch_is_without_something_to_learn() {
        // Long prompts with one learned token, at any place against the cuts.
        for at in [1, 9, 10, 11, 55, 94] {
            let mut documents = counted(&[95, 3]);
            documents[0].learned = (0..95).map(|n| n == at).collect();
            documents[1].learned = vec![false; 3];
            for shuffle in [Order::Shuffled, Order::AsGiven] {
                let mut settings = settings(10, 1);
                settings.shuffle = shuffle;
                let mut loader = loader(&documents, &settings);
                for _ in 0..20 {
                    let (_, _, targets, weights) = flat(loader.next_batch().unwrap());
                    let learned = targets.iter().zip(&weights).filter(|pair| *pair.1 > 0.0);
                    let learned: Vec<u32> = learned.map(|pair| *pair.0).collect();
                    assert_eq!(learned, [100_000 + at as u32]);
                }
            }
        }
    }

    #[test]
    fn what_cannot_be_loaded_is_refused_in_words() {
        let fail = |documents: Vec<Encoded>, settings: &LoadSettings| {
            let corpus = Arc::new(Corpus::of(&documents));
            let loader = Loader::new(corpus, settings.clone(), Arc::new(tokenizer()));
            loader.err().expect("an error").to_string()
        };
        assert!(fail(counted(&[9]), &settings(0, 1)).contains("context: 0"));
        assert!(fail(counted(&[9]), &settings(4, 0)).contains("rows of a batch: 0"));
        assert!(fail(Vec::new(), &settings(4, 1)).contains("nothing to learn"));
        assert!(fail(counted(&[1, 0]), &settings(4, 1)).contains("nothing to learn"));
        let mut read = counted(&[9]);
        read[0].learned = vec![false; 9];
        assert!(fail(read, &settings(4, 1)).contains("nothing to learn"));
        let mut loader = loader(&counted(&[9]), &settings(4, 1));
        let before = loader.cursor();
        let error = loader.seek(Cursor { epoch: 3, row: 9 }).unwrap_err().report();
        assert!(error.contains("row 9 of epoch 3, which now has 2 rows"), "{error}");
        assert_eq!(loader.cursor(), before);
    }
}
