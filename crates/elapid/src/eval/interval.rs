//! How sure a figure is, and whether one model is better than another.
//!
//! Documents differ far more than tokens of one document do, so that documents are what is drawn:
//! a resample takes as many as there are, with replacement, and its figure is
//!
//! ```text
//! r* = sum of x  /  (sum of bytes  ln 2)        over the documents drawn
//! ```
//!
//! with x the negative log-likelihood of a document, or for two models the difference of theirs on
//! the same document (a paired comparison: what makes a document hard for both falls out). The
//! interval is from the 2.5th to the 97.5th percentile of r*, its arms stretched by
//!
//! ```text
//! k = t(n - 1) / 1.96  sqrt(n / (n - 1))        n = (sum of bytes)^2 / sum of bytes^2
//! ```
//!
//! because a bootstrap of few units is too sure of itself: t is Student's 97.5% quantile, and n is
//! how many documents of equal size would weigh as much. k is 1.04 for 50 documents, 1.4 for 6,
//! 9 for 2. The interval then holds the figure of documents like these, drawn from the same place,
//! in about 95 of 100 cases.
//!
//! | n             | what is drawn                                                           |
//! |---------------|-------------------------------------------------------------------------|
//! | 8 and more    | documents                                                               |
//! | fewer         | documents, and in each its blocks of about 512 bytes: a little wider    |
//! | one document  | its blocks: the interval then speaks of text like this one document     |
//! | one block     | nothing: the interval is infinite                                       |
//!
//! Neighbouring blocks are alike, so that the third kind is somewhat too narrow. A caller shows
//! `n_docs`, and says so where `resampled` is not `Docs`.
//!
//! The first model is better when the whole interval of the difference lies on its side.
//!
//! Not here: many comparisons at once, which would ask for a stricter level.

use super::{DocScore, Score};
use crate::error::{Error, Result};
use crate::tensor::rng::Rng;
use std::f64::consts::LN_2;

const N_RESAMPLE: usize = 2000;

/// Fewer documents than this, by weight, are not drawn alone.
const N_FEW: f64 = 8.0;

/// The draws of a bootstrap are always the same.
const SEED: u64 = 0;
/// Streams of documents and blocks.
const STREAMS: [u64; 2] = [0x626f_6f74_646f_6373, 0x626f_6f74_626c_6f63];

/// What was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resampled {
    /// Documents.
    Docs,
    /// Documents, and blocks of each: there are few documents.
    DocsAndBlocks,
    /// Blocks of the one document.
    Blocks,
    /// Nothing: there is too little text for an interval.
    Nothing,
}

/// A 95% interval, in bits per byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Documents it rests on.
    pub n_docs: usize,
    /// Documents of equal size that would weigh as much.
    pub n_equal: f64,
    /// What was drawn.
    pub resampled: Resampled,
}

impl Interval {
    /// Of the bits per byte of these documents.
    pub(super) fn of(docs: &[DocScore]) -> Interval {
        let units: Vec<Unit> =
            docs.iter().filter(|doc| doc.n_bytes > 0).map(|doc| Unit::new(doc, None)).collect();
        bootstrap(&units, SEED)
    }
}

/// Whether the first model is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The first model needs fewer bits, and chance alone would not show it.
    Better,
    /// It needs more, and chance alone would not show it.
    Worse,
    /// Neither.
    NoDifference,
}

impl Verdict {
    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::NoDifference => "no difference",
        }
    }
}

/// One model against another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Bits per byte of the other, less those of the model: positive where the model is better.
    pub gain: f64,
    /// Of the gain.
    pub interval: Interval,
    /// What follows from it.
    pub verdict: Verdict,
}

/// Compares a model with another on the same documents, in the same order. Their tokenizers may
/// differ.
pub fn compare(model: &[DocScore], other: &[DocScore]) -> Result<Comparison> {
    check(model, other)?;
    let pairs = model.iter().zip(other).filter(|(doc, _)| doc.n_bytes > 0);
    let units: Vec<Unit> = pairs.map(|(doc, other)| Unit::new(doc, Some(other))).collect();
    if units.is_empty() {
        let hint = "give a text of at least two tokens";
        return Err(Error::input("there is nothing to foresee in the documents", hint));
    }
    let interval = bootstrap(&units, SEED);
    let verdict = match (interval.low > 0.0, interval.high < 0.0) {
        (true, _) => Verdict::Better,
        (_, true) => Verdict::Worse,
        _ => Verdict::NoDifference,
    };
    let [model, other] = [model, other].map(|docs| Score::of(&docs.iter().collect::<Vec<_>>()));
    let gain = other.bits_per_byte() - model.bits_per_byte();
    Ok(Comparison { gain, interval, verdict })
}

fn check(model: &[DocScore], other: &[DocScore]) -> Result<()> {
    let hint = "measure both models on the same files";
    if model.len() != other.len() {
        let problem = format!("{} documents against {}", model.len(), other.len());
        return Err(Error::input(problem, hint));
    }
    for (a, b) in model.iter().zip(other) {
        let name = &a.name;
        if *name != b.name {
            return Err(Error::input(format!("{name} is compared with {}", b.name), hint));
        }
        if (a.n_bytes, a.blocks.len()) != (b.n_bytes, b.blocks.len()) {
            let (of_a, of_b) = (a.n_bytes, b.n_bytes);
            let problem = format!("{name}: one model was asked for {of_a} bytes, one for {of_b}");
            return Err(Error::input(problem, hint));
        }
        if let Some(nll) = [a.nll, b.nll].into_iter().find(|nll| !nll.is_finite()) {
            let hint = "the weights of one model may be damaged, or its training have diverged";
            return Err(Error::input(format!("{name}: a loss is {nll}"), hint));
        }
    }
    Ok(())
}

/// A document that can be drawn.
struct Unit {
    n_bytes: f64,
    sum: f64,
    blocks: Vec<f64>,
}

impl Unit {
    /// A document, or how much more the other model needed for it.
    fn new(doc: &DocScore, other: Option<&DocScore>) -> Unit {
        let n_bytes = doc.n_bytes as f64;
        match other {
            None => Unit { n_bytes, sum: doc.nll, blocks: doc.blocks.clone() },
            Some(other) => {
                let blocks = doc.blocks.iter().zip(&other.blocks).map(|(a, b)| b - a);
                Unit { n_bytes, sum: other.nll - doc.nll, blocks: blocks.collect() }
            }
        }
    }

    /// The sum of blocks drawn as often as there are blocks; `first` is the counter of the draws.
    fn drawn(&self, rng: &Rng, first: u64) -> f64 {
        let n = self.blocks.len() as u64;
        (0..n).map(|k| self.blocks[rng.below(first + k, n) as usize]).sum()
    }
}

/// The interval of the sum over units per byte, in bits.
fn bootstrap(units: &[Unit], seed: u64) -> Interval {
    let (n_docs, n_blocks) = (units.len(), units.iter().map(|unit| unit.blocks.len()).sum());
    let n_bytes: f64 = units.iter().map(|unit| unit.n_bytes).sum();
    let squares: f64 = units.iter().map(|unit| unit.n_bytes * unit.n_bytes).sum();
    let n_equal = if n_docs == 0 { 0.0 } else { n_bytes * n_bytes / squares };
    let resampled = match (n_docs, n_blocks) {
        (_, 0 | 1) => Resampled::Nothing,
        (1, _) => Resampled::Blocks,
        _ if n_equal < N_FEW => Resampled::DocsAndBlocks,
        _ => Resampled::Docs,
    };
    let n_drawn = match resampled {
        Resampled::Nothing => {
            let (low, high) = (f64::NEG_INFINITY, f64::INFINITY);
            return Interval { low, high, n_docs, n_equal, resampled };
        }
        Resampled::Blocks => n_blocks as f64,
        _ => n_equal,
    };
    let mut figures: Vec<f64> =
        (0..N_RESAMPLE as u64).map(|idx| figure(units, resampled, seed, idx)).collect();
    figures.sort_unstable_by(f64::total_cmp);
    let middle = units.iter().map(|unit| unit.sum).sum::<f64>() / n_bytes / LN_2;
    let arm = |share: f64| (percentile(&figures, share) - middle) * stretch(n_drawn);
    let (low, high) = (middle + arm(0.025), middle + arm(0.975));
    Interval { low, high, n_docs, n_equal, resampled }
}

/// The figure of one resample.
fn figure(units: &[Unit], resampled: Resampled, seed: u64, idx: u64) -> f64 {
    let [docs, blocks] = STREAMS.map(|stream| Rng::new(seed, stream));
    let n_docs = units.len() as u64;
    let (mut sum, mut n_bytes, mut n_drawn) = (0.0, 0.0, 0);
    for k in 0..n_docs {
        let unit = &units[docs.below(idx * n_docs + k, n_docs) as usize];
        n_bytes += unit.n_bytes;
        sum += match resampled {
            Resampled::Docs | Resampled::Nothing => unit.sum,
            Resampled::DocsAndBlocks | Resampled::Blocks => {
                let first = idx << 32 | n_drawn;
                n_drawn += unit.blocks.len() as u64;
                unit.drawn(&blocks, first)
            }
        };
    }
    sum / n_bytes / LN_2
}

/// Between the two nearest of a sorted list.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let at = share * (sorted.len() - 1) as f64;
    let (below, part) = (at as usize, at.fract());
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (sorted[above] - sorted[below]) * part
}

/// How much too narrow a percentile interval of `n` units is.
fn stretch(n: f64) -> f64 {
    let n = n.max(2.0);
    student(n - 1.0) / student(f64::INFINITY) * (n / (n - 1.0)).sqrt()
}

/// The 97.5% quantile of Student's distribution for at least one degree of freedom; between the
/// entries it is nearly linear in one over them.
fn student(freedom: f64) -> f64 {
    const TABLE: [(f64, f64); 12] = [
        (1.0, 12.7062),
        (2.0, 4.3027),
        (3.0, 3.1824),
        (4.0, 2.7764),
        (5.0, 2.5706),
        (6.0, 2.4469),
        (8.0, 2.3060),
        (10.0, 2.2281),
        (15.0, 2.1314),
        (30.0, 2.0423),
        (60.0, 2.0003),
        (f64::INFINITY, 1.9600),
    ];
    let idx = TABLE.iter().position(|entry| freedom <= entry.0).unwrap_or(TABLE.len() - 1);
    let (upper, at_upper) = TABLE[idx];
    let (lower, at_lower) = TABLE[idx.saturating_sub(1)];
    if freedom == upper || idx == 0 {
        return at_upper;
    }
    let part = (1.0 / freedom - 1.0 / upper) / (1.0 / lower - 1.0 / upper);
    at_upper + (at_lower - at_upper) * part
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A document whose blocks have these sums.
    fn doc(name: usize, n_bytes: usize, blocks: Vec<f64>) -> DocScore {
        DocScore {
            name: format!("{name}.rs"),
            language: "Rust",
            n_tok: n_bytes / 4,
            n_bytes,
            nll: blocks.iter().sum(),
            n_top1: 0,
            blocks,
        }
    }

    /// `n` documents of sizes that differ up to `spread` times, whose nats per byte are normal
    /// around `mean`: a part by the document, a part by the block.
    fn docs(n: usize, spread: f64, mean: f64, seed: u64) -> Vec<DocScore> {
        let (of_docs, of_blocks) = (Rng::new(seed, 0), Rng::new(seed, 1));
        let one = |idx: usize| {
            let n_blocks = (4.0 * spread.powf(of_docs.uniform(2 * idx as u64))) as usize;
            let level = mean + 0.1 * of_docs.normal(2 * idx as u64 + 1);
            let block = |k: usize| (level + 0.2 * of_blocks.normal((idx << 20 | k) as u64)) * 512.0;
            doc(idx, 512 * n_blocks, (0..n_blocks).map(block).collect())
        };
        (0..n).map(one).collect()
    }

    /// Share of seeds whose interval holds the truth of one bit per byte.
    fn coverage(n_docs: usize, spread: f64) -> f64 {
        let n_seeds = 300;
        let holds = |seed: &u64| {
            let Interval { low, high, .. } = Interval::of(&docs(n_docs, spread, LN_2, *seed));
            low <= 1.0 && 1.0 <= high
        };
        (0..n_seeds).filter(holds).count() as f64 / n_seeds as f64
    }

    #[test]
    fn the_interval_holds_the_truth_in_about_95_of_100_cases() {
        for (n_docs, spread) in [(2, 1.0), (3, 4.0), (5, 4.0), (10, 1.0), (16, 30.0), (60, 30.0)] {
            let share = coverage(n_docs, spread);
            // Three deviations of 300 trials are 0.04; few documents may be on the safe side.
            let most = if n_docs < 8 { 1.0 } else { 0.98 };
            assert!((0.91..=most).contains(&share), "{n_docs} x{spread}: {share}");
        }
    }

    #[test]
    fn equal_models_are_rarely_told_apart() {
        for n_docs in [3, 6, 12, 40] {
            let n_seeds = 200;
            let is_told = |seed: &u64| {
                let (a, b) = (docs(n_docs, 8.0, 1.0, *seed), docs(n_docs, 8.0, 1.0, *seed));
                // The same documents, with a difference of its own in each.
                let noise = Rng::new(*seed, 7);
                let changed = a.into_iter().enumerate().map(|(idx, a)| {
                    let factor = 1.0 + 0.01 * noise.normal(idx as u64);
                    doc(idx, a.n_bytes, a.blocks.iter().map(|x| x * factor).collect())
                });
                let found = compare(&changed.collect::<Vec<_>>(), &b).unwrap();
                found.verdict != Verdict::NoDifference
            };
            let n_told = (0..n_seeds).filter(is_told).count();
            assert!(n_told <= 20, "{n_docs}: {n_told} of {n_seeds}");
        }
    }

    #[test]
    fn a_known_difference_is_found_with_its_sign() {
        let old = docs(20, 8.0, 1.0, 3);
        let less = |factor: f64| -> Vec<DocScore> {
            let one = |(idx, old): (usize, &DocScore)| {
                doc(idx, old.n_bytes, old.blocks.iter().map(|x| x - factor * 512.0).collect())
            };
            old.iter().enumerate().map(one).collect()
        };
        // A tenth of a nat per byte less, in every document and block.
        let found = compare(&less(0.1), &old).unwrap();
        assert!((found.gain - 0.1 / LN_2).abs() < 1e-9, "{found:?}");
        assert_eq!(found.verdict, Verdict::Better);
        assert!(
            (found.interval.high - found.interval.low).abs() < 1e-9,
            "paired: no noise is left"
        );
        let back = compare(&old, &less(0.1)).unwrap();
        assert_eq!((back.gain, back.verdict), (-found.gain, Verdict::Worse));
        let same = compare(&old, &old).unwrap();
        assert_eq!((same.gain, same.verdict), (0.0, Verdict::NoDifference));
        assert_eq!((same.interval.low, same.interval.high), (0.0, 0.0));
    }

    #[test]
    fn few_documents_are_drawn_with_their_blocks_and_say_so() {
        let kind = |docs: &[DocScore]| Interval::of(docs).resampled;
        assert_eq!(kind(&docs(20, 1.0, 1.0, 0)), Resampled::Docs);
        assert_eq!(kind(&docs(7, 1.0, 1.0, 0)), Resampled::DocsAndBlocks);
        assert_eq!(kind(&docs(1, 1.0, 1.0, 0)), Resampled::Blocks);
        // One that outweighs all others is as good as alone.
        let mut heavy = docs(20, 1.0, 1.0, 0);
        heavy.push(doc(20, 1 << 20, vec![1e6; 2048]));
        assert_eq!(kind(&heavy), Resampled::DocsAndBlocks);
        assert!(Interval::of(&heavy).n_equal < 2.0);
        let short = [doc(0, 100, vec![50.0])];
        let interval = Interval::of(&short);
        assert_eq!(interval.resampled, Resampled::Nothing);
        assert_eq!((interval.low, interval.high), (f64::NEG_INFINITY, f64::INFINITY));
        let better = [doc(0, 100, vec![10.0])];
        assert_eq!(compare(&better, &short).unwrap().verdict, Verdict::NoDifference);
    }

    #[test]
    fn the_interval_of_one_document_is_that_of_the_mean_of_its_blocks() {
        let noise = Rng::new(4, 0);
        let blocks: Vec<f64> = (0..100).map(|n| (1.0 + 0.2 * noise.normal(n)) * 512.0).collect();
        let Interval { low, high, .. } = Interval::of(&[doc(0, 512 * 100, blocks)]);
        // Twice two deviations of a mean of a hundred, in bits.
        let want = 2.0 * 1.984 * 0.2 / 10.0 / LN_2;
        assert!(((high - low) / want - 1.0).abs() < 0.2, "{} for {want}", high - low);
    }

    #[test]
    fn other_documents_or_broken_losses_are_not_compared() {
        let a = docs(4, 1.0, 1.0, 0);
        let mut named = a.clone();
        named[2].name = "else.rs".into();
        let mut longer = a.clone();
        longer[1].n_bytes += 1;
        let mut broken = a.clone();
        broken[3].nll = f64::NAN;
        for other in [&a[..3], &named, &longer, &broken] {
            assert!(compare(&a, other).is_err());
            assert!(compare(other, &a).is_err());
        }
        assert!(compare(&[], &[]).is_err());
    }

    #[test]
    fn students_quantile_is_met_between_the_entries() {
        for (freedom, want) in [(1.0, 12.706), (7.0, 2.3646), (12.0, 2.1788), (40.0, 2.0211)] {
            assert!((student(freedom) - want).abs() < 2e-3, "{freedom}: {}", student(freedom));
        }
        assert!((student(1e12) - 1.96).abs() < 1e-4 && student(f64::INFINITY) == 1.96);
    }
}
