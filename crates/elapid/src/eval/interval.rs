//! How sure a figure is, and whether one model is better than another.
//!
//! A figure is a sum over text per byte of it,
//!
//! ```text
//! r = sum of x  /  (sum of bytes  ln 2)
//! ```
//!
//! with x the negative log-likelihood, or for two models the difference of theirs on the same text
//! (a paired comparison: what makes a text hard for both falls out). A bootstrap draws text with
//! replacement, as much as there is, and its figure is r*.
//!
//! | documents, by weight | what is drawn                          | the interval speaks of       |
//! |----------------------|----------------------------------------|------------------------------|
//! | 8 and more           | documents, with all their blocks       | documents like these         |
//! | fewer                | runs of blocks of about 512 bytes      | text like these documents    |
//! | less than 3 runs     | nothing: there is no interval          |                              |
//!
//! Documents differ more than blocks of one document do, so that documents are drawn where there
//! are enough. What differs between their blocks is in their sums already; to draw blocks of each
//! once more would count it twice (Davison and Hinkley, Bootstrap Methods, 3.8). Of three documents
//! nobody learns how documents differ, but there may be much text in them.
//!
//! Neighbouring blocks are alike, so that runs of them are drawn (the circular block bootstrap:
//! behind the last block of a document comes its first), of
//!
//! ```text
//! run = max(n^(1/3), deff)                          n blocks
//! deff = sum over documents of e^2  /  sum over blocks of e^2  /  (1 - 1 / n_equal)
//! ```
//!
//! blocks, with e = x - r bytes. deff is 1 where a block is no more like those of its document than
//! like any, and the size of a document where all of its blocks say the same; then the runs are few
//! and the interval is wide.
//!
//! The interval is from the 2.5th to the 97.5th percentile of r*, its arms stretched by
//!
//! ```text
//! k = t(n - 1) / 1.96  sqrt(n / (n - 1))
//! ```
//!
//! because a bootstrap of few units is too sure of itself: t is Student's 97.5% quantile, n is the
//! number of runs, or `n_equal` = (sum of bytes)^2 / sum of bytes^2: documents of equal size that
//! would weigh as much. k is 1.04 for 50 units, 1.3 for 8, 2.7 for 3. A difference is stretched by
//! adding, a cost, which is never below zero, by multiplying: r (r* / r)^k.
//!
//! The first model is better when the whole interval of the difference lies on its side. Where zero
//! lies inside, there is no difference if both ends are small, and otherwise too little to tell.
//!
//! Not here: many comparisons at once, which would ask for a stricter level.

use super::{DocScore, Score};
use crate::error::{Error, Result};
use crate::tensor::rng::Rng;
use std::f64::consts::LN_2;
use std::fmt;
use std::ops::Range;

const N_RESAMPLE: u64 = 2000;

/// Fewer documents than this, by weight, are not drawn.
const N_FEW: f64 = 8.0;

/// There is no interval of fewer units. With runs of two blocks at least, these are six blocks.
const N_UNITS_MIN: f64 = 3.0;

/// A difference below this share of the other model's bits per byte is none.
const SMALL: f64 = 0.02;

/// The draws of a bootstrap are always the same.
const SEED: u64 = 0;
const STREAM: u64 = 0x626f_6f74_646f_6373;

/// What was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resampled {
    /// Documents: the interval speaks of documents like these.
    Docs,
    /// Runs of blocks, for there are few documents: it speaks of text like theirs.
    Blocks,
}

/// A 95% interval, in bits per byte; both ends are finite.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Documents it rests on.
    pub n_docs: usize,
    /// What was drawn.
    pub resampled: Resampled,
}

impl Interval {
    /// Of the bits per byte of these documents, unless there is too little text.
    pub(super) fn of(docs: &[DocScore]) -> Option<Interval> {
        let by_blocks =
            |doc: &DocScore| Doc { n_bytes: doc.n_bytes as f64, blocks: doc.blocks.clone() };
        let docs: Vec<Doc> = docs.iter().filter(|doc| doc.n_bytes > 0).map(by_blocks).collect();
        bootstrap(&docs, |middle, drawn, k| middle * (drawn / middle).powf(k))
    }
}

/// "95% interval 1.250 to 1.360 for documents like these 32".
impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (digits, n) = (f.precision().unwrap_or(3), self.n_docs);
        write!(f, "95% interval {:.digits$} to {:.digits$} for ", self.low, self.high)?;
        match (self.resampled, n) {
            (Resampled::Docs, _) => write!(f, "documents like these {n}"),
            (Resampled::Blocks, 1) => write!(f, "text like this document"),
            (Resampled::Blocks, _) => write!(f, "text like these {n} documents"),
        }
    }
}

/// Whether the first model is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The first model needs fewer bits, and chance alone would not show it.
    Better,
    /// It needs more, and chance alone would not show it.
    Worse,
    /// The difference is zero or small.
    NoDifference,
    /// It may be large, to either side.
    TooLittle,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Verdict::Better => "better",
            Verdict::Worse => "worse",
            Verdict::NoDifference => "no difference",
            Verdict::TooLittle => "too little to tell",
        })
    }
}

/// One model against another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Bits per byte of the other, less those of the model: positive where the model is better.
    pub gain: f64,
    /// Of the gain; `None` where there is too little text.
    pub interval: Option<Interval>,
    /// What follows from it.
    pub verdict: Verdict,
}

impl Comparison {
    /// As in "better: 0.930 fewer bits per byte than before (95% interval ...)".
    pub fn describe(&self, other: &str) -> String {
        let turned = |of: Interval| Interval { low: 0.0 - of.high, high: 0.0 - of.low, ..of };
        let (amount, word, interval) = match self.gain >= 0.0 {
            true => (self.gain, "fewer", self.interval),
            false => (-self.gain, "more", self.interval.map(turned)),
        };
        let interval = interval.map(|interval| interval.to_string());
        let interval = interval.unwrap_or("too little for an interval".into());
        let name = self.verdict;
        format!("{name}: {amount:.3} {word} bits per byte than {other} ({interval})")
    }
}

/// Compares a model with another on the same documents, in the same order. Their tokenizers may
/// differ.
pub fn compare(model: &[DocScore], other: &[DocScore]) -> Result<Comparison> {
    check(model, other)?;
    let pairs = model.iter().zip(other).filter(|(doc, _)| doc.n_bytes > 0);
    let difference = |(doc, other): (&DocScore, &DocScore)| {
        let blocks = doc.blocks.iter().zip(&other.blocks).map(|(a, b)| b - a);
        Doc { n_bytes: doc.n_bytes as f64, blocks: blocks.collect() }
    };
    let docs: Vec<Doc> = pairs.map(difference).collect();
    if docs.is_empty() {
        let hint = "give a text of at least two tokens";
        return Err(Error::input("there is nothing to predict in the documents", hint));
    }
    let [cost, of_other] =
        [model, other].map(|docs| Score::of(&docs.iter().collect::<Vec<_>>()).bits_per_byte());
    let interval = bootstrap(&docs, |middle, drawn, k| middle + (drawn - middle) * k);
    let verdict = match interval {
        Some(interval) if interval.low > 0.0 => Verdict::Better,
        Some(interval) if interval.high < 0.0 => Verdict::Worse,
        Some(Interval { low, high, .. }) if high.max(-low) <= SMALL * of_other => {
            Verdict::NoDifference
        }
        _ => Verdict::TooLittle,
    };
    Ok(Comparison { gain: of_other - cost, interval, verdict })
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

/// A document by its blocks: how much each costs, or how much more it costs the other model.
struct Doc {
    n_bytes: f64,
    blocks: Vec<f64>,
}

impl Doc {
    fn cost(&self) -> f64 {
        self.blocks.iter().sum()
    }

    /// As one block.
    fn whole(&self) -> Doc {
        Doc { n_bytes: self.n_bytes, blocks: vec![self.cost()] }
    }

    /// Bytes and cost of each block.
    fn each(&self) -> impl Iterator<Item = (f64, f64)> + Clone {
        let n_bytes = self.n_bytes / self.blocks.len() as f64;
        self.blocks.iter().map(move |cost| (n_bytes, *cost))
    }
}

/// The interval of the sum over documents per byte, in bits. `stretch_to` says where an end lies:
/// from the figure, the percentile and the factor.
fn bootstrap(docs: &[Doc], stretch_to: fn(f64, f64, f64) -> f64) -> Option<Interval> {
    let n_bytes: f64 = docs.iter().map(|doc| doc.n_bytes).sum();
    let squares: f64 = docs.iter().map(|doc| doc.n_bytes * doc.n_bytes).sum();
    let n_equal = n_bytes * n_bytes / squares;
    let rate = docs.iter().map(Doc::cost).sum::<f64>() / n_bytes;
    let (urn, n_units, resampled) = match n_equal >= N_FEW {
        true => {
            let docs: Vec<Doc> = docs.iter().map(Doc::whole).collect();
            (Urn::new(&docs, 1), n_equal, Resampled::Docs)
        }
        false => {
            let urn = Urn::new(docs, run_length(docs, rate, n_equal));
            let n_units = urn.units.len() as f64 / urn.run as f64;
            (urn, n_units, Resampled::Blocks)
        }
    };
    if n_units < N_UNITS_MIN {
        return None;
    }
    let mut figures: Vec<f64> = (0..N_RESAMPLE).map(|idx| urn.draw(idx)).collect();
    figures.sort_unstable_by(f64::total_cmp);
    let (middle, k) = (rate / LN_2, stretch(n_units));
    let [low, high] =
        [0.025, 0.975].map(|share| stretch_to(middle, percentile(&figures, share), k));
    let is_finite = low.is_finite() && high.is_finite();
    is_finite.then_some(Interval { low, high, n_docs: docs.len(), resampled })
}

/// Blocks of a run, for a cost of `rate` per byte.
fn run_length(docs: &[Doc], rate: f64, n_equal: f64) -> usize {
    let (mut of_docs, mut of_blocks, mut n_blocks) = (0.0, 0.0, 0);
    for doc in docs {
        let residuals = doc.each().map(|(n_bytes, cost)| cost - rate * n_bytes);
        of_docs += residuals.clone().sum::<f64>().powi(2);
        of_blocks += residuals.map(|e| e * e).sum::<f64>();
        n_blocks += doc.blocks.len();
    }
    let deff = match docs.len() > 1 && of_blocks > 0.0 {
        true => of_docs / of_blocks / (1.0 - 1.0 / n_equal),
        false => 1.0,
    };
    (n_blocks as f64).cbrt().max(deff).ceil() as usize
}

/// What can be drawn, and how many neighbours at once.
struct Urn {
    /// Bytes and cost of each.
    units: Vec<(f64, f64)>,
    /// The units among which those behind each are: a run stays in its document.
    ranges: Vec<Range<usize>>,
    run: usize,
}

impl Urn {
    fn new(docs: &[Doc], run: usize) -> Urn {
        let mut urn = Urn { units: Vec::new(), ranges: Vec::new(), run };
        for doc in docs {
            let begin = urn.units.len();
            urn.units.extend(doc.each());
            urn.ranges.resize(urn.units.len(), begin..urn.units.len());
        }
        urn
    }

    /// The figure of one resample.
    fn draw(&self, idx: u64) -> f64 {
        let (rng, n) = (Rng::new(SEED, STREAM), self.units.len());
        let n_runs = n.div_ceil(self.run);
        let (mut n_bytes, mut cost) = (0.0, 0.0);
        for k in 0..n_runs {
            let mut at = rng.below(idx * n_runs as u64 + k as u64, n as u64) as usize;
            let Range { start, end } = self.ranges[at];
            // The last run is as long as is missing.
            for _ in 0..self.run.min(n - k * self.run) {
                n_bytes += self.units[at].0;
                cost += self.units[at].1;
                at = if at + 1 < end { at + 1 } else { start };
            }
        }
        cost / n_bytes / LN_2
    }
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
    use crate::data::split::N_BLOCKS_MIN;

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
    /// around `mean`: a part by the document, a part by the block, which keeps `likeness` of its
    /// neighbour's. With them the mean of all possible blocks of these documents.
    fn drawn(n: usize, spread: f64, likeness: f64, mean: f64, seed: u64) -> (Vec<DocScore>, f64) {
        let (of_docs, of_blocks) = (Rng::new(seed, 0), Rng::new(seed, 1));
        let (mut sum, mut n_bytes) = (0.0, 0);
        let mut one = |idx: usize| {
            let n_blocks = (4.0 * spread.powf(of_docs.uniform(2 * idx as u64))) as usize;
            let level = mean + 0.1 * of_docs.normal(2 * idx as u64 + 1);
            let mut state = of_blocks.normal((idx << 20 | 1 << 19) as u64);
            let block = |k: usize| {
                let fresh = of_blocks.normal((idx << 20 | k) as u64);
                state = likeness * state + (1.0 - likeness * likeness).sqrt() * fresh;
                (level + 0.2 * state) * 512.0
            };
            sum += level * 512.0 * n_blocks as f64;
            n_bytes += 512 * n_blocks;
            doc(idx, 512 * n_blocks, (0..n_blocks).map(block).collect())
        };
        let list = (0..n).map(&mut one).collect();
        (list, sum / n_bytes as f64)
    }

    fn docs(n: usize, spread: f64, mean: f64, seed: u64) -> Vec<DocScore> {
        drawn(n, spread, 0.0, mean, seed).0
    }

    /// Share of the intervals that hold what they speak of: one bit per byte, or where blocks are
    /// drawn the level of these documents.
    fn coverage(n_docs: usize, spread: f64, likeness: f64) -> f64 {
        let holds = |seed: u64| {
            let (docs, level) = drawn(n_docs, spread, likeness, LN_2, seed);
            let found = Interval::of(&docs)?;
            let truth = match found.resampled {
                Resampled::Docs => 1.0,
                Resampled::Blocks => level / LN_2,
            };
            Some(found.low <= truth && truth <= found.high)
        };
        let found: Vec<bool> = (0..300).filter_map(holds).collect();
        assert!(found.len() >= 150, "{n_docs} x{spread}: only {} intervals", found.len());
        found.iter().filter(|holds| **holds).count() as f64 / found.len() as f64
    }

    #[test]
    fn the_interval_holds_the_truth_in_about_95_of_100_cases() {
        for (n_docs, spread) in [(2, 1.0), (3, 4.0), (5, 4.0), (10, 1.0), (16, 30.0), (60, 30.0)] {
            let share = coverage(n_docs, spread, 0.0);
            // Three deviations of 300 trials are 0.04; few documents may be on the safe side.
            let most = if n_docs < 8 { 1.0 } else { 0.98 };
            assert!((0.91..=most).contains(&share), "{n_docs} x{spread}: {share}");
        }
    }

    #[test]
    fn equal_models_are_rarely_told_apart() {
        for n_docs in [2, 3, 6, 12, 40] {
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
                matches!(found.verdict, Verdict::Better | Verdict::Worse)
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
        let interval = found.interval.unwrap();
        assert!((interval.high - interval.low).abs() < 1e-9, "paired: no noise is left");
        let back = compare(&old, &less(0.1)).unwrap();
        assert_eq!((back.gain, back.verdict), (-found.gain, Verdict::Worse));
        let same = compare(&old, &old).unwrap();
        assert_eq!((same.gain, same.verdict), (0.0, Verdict::NoDifference));
        assert_eq!(same.interval.map(|found| (found.low, found.high)), Some((0.0, 0.0)));
    }

    #[test]
    fn few_documents_are_drawn_by_blocks_and_say_so() {
        let of = |docs: &[DocScore]| Interval::of(docs).unwrap();
        let twenty = of(&docs(20, 1.0, 1.0, 0));
        assert_eq!(twenty.resampled, Resampled::Docs);
        assert!(twenty.to_string().ends_with(" for documents like these 20"), "{twenty}");
        let seven = of(&docs(7, 1.0, 1.0, 0));
        assert_eq!(seven.resampled, Resampled::Blocks);
        assert!(seven.to_string().ends_with(" for text like these 7 documents"), "{seven}");
        let one = of(&docs(1, 30.0, 1.0, 0));
        assert_eq!(one.resampled, Resampled::Blocks);
        assert!(one.to_string().ends_with(" for text like this document"), "{one}");
        // One that outweighs all others is as good as alone.
        let mut heavy = docs(20, 1.0, 1.0, 0);
        heavy.push(doc(20, 1 << 20, vec![500.0; 2048]));
        assert_eq!(of(&heavy).resampled, Resampled::Blocks);
    }

    #[test]
    fn too_little_text_has_no_interval_and_no_verdict_but_its_gain_is_told() {
        let alone = |n_blocks: usize, cost: f64| [doc(0, 512 * n_blocks, vec![cost; n_blocks])];
        for n_blocks in 0..20 {
            let found = compare(&alone(n_blocks, 300.0), &alone(n_blocks, 400.0));
            let Ok(found) = found else { continue };
            let is_enough = n_blocks >= N_BLOCKS_MIN;
            assert_eq!(found.interval.is_some(), is_enough, "{n_blocks}");
            let want = if is_enough { Verdict::Better } else { Verdict::TooLittle };
            assert_eq!(found.verdict, want, "{n_blocks}");
        }
        let found = compare(&alone(3, 300.0), &alone(3, 400.0)).unwrap();
        let want = "too little to tell: 0.282 fewer bits per byte than before \
                    (too little for an interval)";
        assert_eq!(found.describe("before"), want);
        // Zero inside of a wide interval is not the same as no difference.
        let mixed: Vec<f64> = (0..20).map(|n| 400.0 + 90.0 * f64::from(n % 4) - 100.0).collect();
        let found = compare(&[doc(0, 512 * 20, mixed)], &alone(20, 400.0)).unwrap();
        assert_eq!(found.verdict, Verdict::TooLittle, "{found:?}");
        assert!(found.interval.is_some_and(|found| found.low < 0.0 && found.high > 0.0));
        // A cost that is not finite has no interval either.
        assert_eq!(Interval::of(&alone(20, f64::INFINITY)), None);
        assert_eq!(Interval::of(&alone(20, f64::NAN)), None);
    }

    #[test]
    fn two_files_that_gain_everywhere_are_better() {
        // 2.94 and 2.01 bits per byte on two files of 4 and 8 KiB: blocks differ, all gain.
        let noise = Rng::new(9, 0);
        let sides = |bits: f64, spread: f64| -> Vec<DocScore> {
            let block = |n: u64| (bits + spread * noise.normal(n)) * LN_2 * 512.0;
            let file = |(idx, range): (usize, std::ops::Range<u64>)| {
                doc(idx, 512 * range.clone().count(), range.map(block).collect())
            };
            [0..8, 8..24].into_iter().enumerate().map(file).collect()
        };
        let found = compare(&sides(2.01, 0.5), &sides(2.94, 0.7)).unwrap();
        assert_eq!(found.verdict, Verdict::Better, "{found:?}");
        let Interval { low, high, .. } = found.interval.unwrap();
        assert!(0.6 < low && low < found.gain && found.gain < high && high < 1.3, "{found:?}");
        let back = compare(&sides(2.94, 0.7), &sides(2.01, 0.5)).unwrap().describe("it");
        assert!(
            back.starts_with("worse: 0.9") && back.contains(" more bits per byte than it (95%")
        );
    }

    #[test]
    fn a_cost_is_never_below_zero() {
        for n_docs in [1, 3, 12] {
            for seed in 0..50 {
                // A few blocks cost nearly all.
                let noise = Rng::new(seed, 3);
                let block = |n: u64| (2.0 * noise.normal(n)).exp() * 100.0;
                let one = |idx: usize| {
                    let blocks = (0..8).map(|n| block(idx as u64 * 8 + n)).collect();
                    doc(idx, 512 * 8, blocks)
                };
                let list: Vec<DocScore> = (0..n_docs).map(one).collect();
                let Some(found) = Interval::of(&list) else { continue };
                let bits = Score::of(&list.iter().collect::<Vec<_>>()).bits_per_byte();
                assert!(0.0 < found.low && found.low < bits && bits < found.high, "{found:?}");
            }
        }
    }

    #[test]
    fn blocks_like_their_neighbours_widen_the_interval() {
        let width = |likeness: f64| -> f64 {
            let of = |seed| Interval::of(&drawn(1, 100.0, likeness, 1.0, seed).0);
            (0..40).filter_map(of).map(|found| found.high - found.low).sum()
        };
        assert!(width(0.5) > 1.2 * width(0.0), "{} {}", width(0.5), width(0.0));
        let share = coverage(3, 60.0, 0.3);
        assert!((0.91..=1.0).contains(&share), "{share}");
        // Where all blocks of a file say the same, files are what counts.
        let flat = |idx: usize| doc(idx, 512 * 50, vec![100.0 * idx as f64 + 300.0; 50]);
        assert_eq!(Interval::of(&[flat(0), flat(1)]), None);
    }

    #[test]
    fn the_interval_of_one_document_is_that_of_the_mean_of_its_blocks() {
        let noise = Rng::new(4, 0);
        let blocks: Vec<f64> = (0..100).map(|n| (1.0 + 0.2 * noise.normal(n)) * 512.0).collect();
        let Interval { low, high, .. } = Interval::of(&[doc(0, 512 * 100, blocks)]).unwrap();
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
