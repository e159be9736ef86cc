//! The next token from its logits.
//!
//! Penalties come first, as llama.cpp defines them. For each token that came `c` times among the
//! last `n_penalized`:
//!
//! ```text
//! l = l / repeat where l > 0, l * repeat elsewhere
//! l = l - c * frequency - presence
//! ```
//!
//! Then, with logits `l` and a temperature `T`, in this order (as transformers and vLLM do it):
//!
//! ```text
//! w[v]   = exp((l[v] - max l) / T)
//! top-k    keeps the k largest w
//! top-p    keeps the largest w, as few as reach the share p of the sum of what is left
//! min-p    keeps every w of at least min-p times the largest
//! v        with probability w[v] / sum of what is left
//! ```
//!
//! Where the temperature is last in `sequence`, the cuts are made at a temperature of one, and `T`
//! acts on what they leave. Other sequences, DRY and XTC are in `chain.rs`.
//!
//! The limit of a temperature of zero is greedy: the largest logit. Among equals the smallest id
//! goes first, everywhere.
//!
//! The draw is a function of the seed and of a counter, so that a text can be made again from any
//! point. A logit of minus infinity forbids a token; one that is not a number, or plus infinity, is
//! an error: the model is broken, and a guess would hide it.
//!
//! A vocabulary is large and this runs for every token: nothing sorts all of it, and lists are
//! made of what is kept alone.

use super::chain::{self, Breakers, dry};
use crate::error::{Error, Result};
use crate::ops::largest::K_MAX;
use crate::tensor::cpu::F32s;
use crate::tensor::rng::Rng;
use pulp::{Simd, WithSimd};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Below one prefers what is likely; zero is greedy.
    pub temperature: f32,
    /// Only this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together have this share; one leaves all.
    pub top_p: f32,
    /// Only tokens at least this likely, as a share of the likeliest; zero leaves all.
    pub min_p: f32,
    /// Logits of tokens that came before are divided by this (multiplied where negative); one
    /// leaves them.
    pub repeat_penalty: f32,
    /// Taken from the logit of a token for each time that it came before.
    pub frequency_penalty: f32,
    /// Taken from the logit of a token that came before.
    pub presence_penalty: f32,
    /// How many of the last tokens the penalties look at.
    pub n_penalized: usize,
    /// Seed of the draws.
    pub seed: u64,
    /// DRY: what is taken from a token that continues a repetition of `dry_allowed_length`, and
    /// the factor for each token that it is longer; a multiplier of zero is off.
    pub dry_multiplier: f32,
    /// At least one.
    pub dry_base: f32,
    /// Repetitions of fewer tokens are left alone.
    pub dry_allowed_length: usize,
    /// How many of the last tokens DRY looks at.
    pub dry_last_n: usize,
    /// XTC: how often likely tokens are removed but for the least likely of them; zero is off.
    pub xtc_probability: f32,
    /// The probability from which a token is likely; above a half is off.
    pub xtc_threshold: f32,
    /// Samplers in the order in which they act, by llama.cpp's letters: e for penalties, d for
    /// DRY, t for the temperature, k, p and m for top-k, top-p and min-p, x for XTC. Those that
    /// are not there are off.
    pub sequence: [u8; 8],
}

impl Default for Sampling {
    /// What llama.cpp does where nobody says: a temperature of 0.8 among the likeliest tokens.
    fn default() -> Sampling {
        Sampling {
            temperature: 0.8,
            top_k: Some(40),
            top_p: 0.95,
            min_p: 0.05,
            ..Sampling::greedy()
        }
    }
}

/// The stream of draws, apart from what else a seed is used for.
const STREAM: u64 = 0x7361_6d70_6c65;

impl Sampling {
    /// Always the likeliest token.
    pub fn greedy() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            n_penalized: 64,
            seed: 0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_last_n: usize::MAX,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            sequence: *b"edtkpmx\0",
        }
    }

    /// The model's own distribution.
    #[cfg(test)]
    pub(crate) fn plain(seed: u64) -> Sampling {
        Sampling { temperature: 1.0, seed, ..Sampling::greedy() }
    }

    /// The samplers of the sequence that change anything.
    fn acting(&self) -> Vec<u8> {
        let acts = |letter: &u8| match letter {
            b'e' => self.penalizes(),
            b'd' => self.dry_multiplier != 0.0 && self.dry_last_n > 0,
            b't' => self.temperature != 1.0,
            b'k' => self.top_k.is_some(),
            b'p' => self.top_p < 1.0,
            b'm' => self.min_p > 0.0,
            b'x' => self.xtc_probability > 0.0 && self.xtc_threshold <= 0.5,
            _ => false,
        };
        self.sequence.iter().copied().filter(acts).collect()
    }

    /// The acting samplers that lower single tokens and come first, and the others.
    pub(crate) fn split(&self) -> (Vec<u8>, Vec<u8>) {
        let mut first = self.acting();
        let n_first = first.iter().take_while(|letter| b"ed".contains(letter)).count();
        let others = first.split_off(n_first);
        (first, others)
    }

    /// The same with what the sequence leaves out off.
    fn reduced(&self, acting: &[u8]) -> Sampling {
        let has = |letter: u8| acting.contains(&letter);
        Sampling {
            temperature: if has(b't') { self.temperature } else { 1.0 },
            top_k: self.top_k.filter(|_| has(b'k')),
            top_p: if has(b'p') { self.top_p } else { 1.0 },
            min_p: if has(b'm') { self.min_p } else { 0.0 },
            ..*self
        }
    }

    pub(crate) fn penalizes(&self) -> bool {
        let is_any = self.repeat_penalty != 1.0
            || self.frequency_penalty != 0.0
            || self.presence_penalty != 0.0;
        is_any && self.n_penalized > 0
    }

    /// Whether every setting means something.
    pub(crate) fn check(&self) -> Result<()> {
        const TEMPERATURE: &str =
            "give a number from 0 (greedy) on; 1 is the model's own distribution";
        let Sampling { temperature, top_k, top_p, min_p, repeat_penalty: repeat, .. } = *self;
        let (frequency, presence) = (self.frequency_penalty, self.presence_penalty);
        let (least, most) = (f32::from_bits(1), f32::MAX);
        let k = top_k.map_or(1.0, |k| k as f32);
        let ranges = [
            ("the temperature", temperature, 0.0..=most, TEMPERATURE),
            ("top-k", k, 1.0..=most, "keep at least 1"),
            ("top-p", top_p, least..=1.0, "give a share above 0, at most 1"),
            ("min-p", min_p, 0.0..=1.0, "give a share from 0 to 1"),
            (
                "the repeat penalty",
                repeat,
                least..=most,
                "give a number above 0; 1 changes nothing",
            ),
            ("the frequency penalty", frequency, -most..=most, "give a number; 0 changes nothing"),
            ("the presence penalty", presence, -most..=most, "give a number; 0 changes nothing"),
            ("the DRY multiplier", self.dry_multiplier, -most..=most, "give a number; 0 is off"),
            ("the DRY base", self.dry_base, 1.0..=most, "give a number from 1 on"),
            ("the XTC probability", self.xtc_probability, 0.0..=1.0, "give a share from 0 to 1"),
            ("the XTC threshold", self.xtc_threshold, 0.0..=1.0, "give a share from 0 to 1"),
        ];
        match ranges.into_iter().find(|(_, value, range, _)| !range.contains(value)) {
            None => Ok(()),
            Some((name, value, _, hint)) => Err(Error::input(format!("{name} is {value}"), hint)),
        }
    }
}

impl Sampling {
    /// Lowers the logit of a token that came so many times.
    pub(crate) fn penalize_one(&self, logit: &mut f32, count: usize) {
        let factor = self.repeat_penalty;
        *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
        *logit -= count as f32 * self.frequency_penalty + self.presence_penalty;
    }
}

/// How often the last tokens of `tokens`, prompt and answer, came, if that is penalized.
pub(crate) fn penalties(tokens: &[u32], sampling: &Sampling) -> Vec<(u32, usize)> {
    if !sampling.penalizes() {
        return Vec::new();
    }
    let mut recent = tokens[tokens.len().saturating_sub(sampling.n_penalized)..].to_vec();
    recent.sort_unstable();
    recent.chunk_by(|a, b| a == b).map(|same| (same[0], same.len())).collect()
}

/// Lowers the logits of the last tokens of `tokens`, prompt and answer.
pub fn penalize(logits: &mut [f32], tokens: &[u32], sampling: &Sampling) {
    for (id, count) in penalties(tokens, sampling) {
        logits.get_mut(id as usize).into_iter().for_each(|it| sampling.penalize_one(it, count));
    }
}

/// Lowers logits by the samplers that come first.
pub(crate) fn lower(logits: &mut [f32], sampling: &Sampling, past: (&[u32], &Breakers)) {
    for letter in sampling.split().0 {
        match letter {
            b'e' => penalize(logits, past.0, sampling),
            _ => {
                for (id, amount) in dry(past.0, sampling, past.1) {
                    logits.get_mut(id as usize).into_iter().for_each(|logit| *logit -= amount);
                }
            }
        }
    }
}

/// The logarithm of the sum of `e^l` over finite logits: `l - log_sum` is the logarithm of a
/// token's probability.
pub fn log_sum(logits: &[f32]) -> f32 {
    let max = scan(logits).0;
    let sum: f64 = sums(logits, max, 1.0).iter().sum();
    (f64::from(max) + sum.ln()) as f32
}

/// The `n` tokens of the largest logits, largest first.
pub fn largest(logits: &[f32], n: usize) -> Vec<u32> {
    let n = n.min(logits.len());
    if n == 0 {
        return Vec::new();
    }
    let mut list: Vec<Reverse<u64>> = if n > logits.len() / 16 {
        // Most would go through the heap; a list of all is cheaper.
        let all = logits.iter().zip(0..).map(|(&logit, id)| Reverse(rank(logit, id)));
        let mut list: Vec<_> = all.collect();
        list.select_nth_unstable(n - 1);
        list.truncate(n);
        list
    } else {
        let mut heap = BinaryHeap::with_capacity(n + 1);
        let mut least = f32::NEG_INFINITY;
        for (&logit, id) in logits.iter().zip(0..) {
            // Of equals the smallest id is there already.
            if heap.len() == n && logit <= least {
                continue;
            }
            heap.push(Reverse(rank(logit, id)));
            if heap.len() > n {
                heap.pop();
            }
            least = heap.peek().map_or(least, |it: &Reverse<u64>| logits[token(it.0) as usize]);
        }
        heap.into_vec()
    };
    list.sort_unstable();
    list.into_iter().map(|it| token(it.0)).collect()
}

/// A number that orders tokens by their logits as `total_cmp` does; of equals the smallest id is
/// the largest.
fn rank(logit: f32, id: u32) -> u64 {
    let bits = logit.to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!id)
}

fn token(rank: u64) -> u32 {
    !(rank as u32)
}

/// Logits whose weights are summed together.
const BLOCK: usize = 512;

/// The sum of `e^((l - max) * over)` in each block of logits; none may be above `max`.
fn sums(logits: &[f32], max: f32, over: f32) -> Vec<f64> {
    let mut sums = vec![0.0; logits.len().div_ceil(BLOCK)];
    pulp::Arch::new().dispatch(Sums { logits, max, over, sums: &mut sums });
    sums
}

struct Sums<'a> {
    logits: &'a [f32],
    max: f32,
    over: f32,
    sums: &'a mut [f64],
}

impl WithSimd for Sums<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let lanes = F32s::<S>::LANES;
        let (max, over) = (F32s::splat(simd, self.max), F32s::splat(simd, self.over));
        for (block, out) in self.logits.chunks(BLOCK).zip(self.sums) {
            let (whole, tail) = block.split_at(block.len() / lanes * lanes);
            let mut sum = F32s::zero(simd);
            for at in (0..whole.len()).step_by(lanes) {
                sum = sum + ((F32s::load(simd, &whole[at..]) - max) * over).exp();
            }
            // A short load would put zeros among the logits.
            let rest: f64 = tail.iter().map(|&logit| weight(logit, self.max, self.over)).sum();
            *out = f64::from(sum.sum()) + rest;
        }
    }
}

fn weight(logit: f32, max: f32, over: f32) -> f64 {
    f64::from(((logit - max) * over).exp())
}

/// The token chosen from `logits`, by the draw of counter `n`.
pub fn pick(logits: &[f32], sampling: &Sampling, n: u64) -> Result<u32> {
    pick_after(logits, sampling, (&[], &Breakers::default()), n)
}

/// The same behind these tokens, whose logits were lowered by the samplers that come first.
pub(crate) fn pick_after(
    logits: &[f32],
    sampling: &Sampling,
    past: (&[u32], &Breakers),
    n: u64,
) -> Result<u32> {
    sampling.check()?;
    let best = greedy(logits)?;
    let letters = sampling.split().1;
    let sampling = &sampling.reduced(&letters);
    let draw = Rng::new(sampling.seed, STREAM).uniform(n);
    if is_greedy(sampling, &letters) {
        return Ok(best as u32);
    }
    let Some(is_last) = usual_order(&letters) else {
        let kept = chain::kept(logits, sampling, &letters, past, n);
        let max = kept.iter().map(|it| it.1).fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<_> = kept.into_iter().map(|it| (it.0, weight(it.1, max, 1.0))).collect();
        let sum: f64 = weights.iter().map(|it| it.1).sum();
        return Ok(draw_of(weights.into_iter(), draw * sum).unwrap_or(best as u32));
    };
    // The smallest temperatures have no inverse.
    let (max, over) = (logits[best], (1.0 / sampling.temperature).min(f32::MAX));
    if let Sampling { top_k: None, top_p: 1.0, min_p: 0.0, .. } = sampling {
        return Ok(draw_of_all(logits, (max, over), draw).unwrap_or(best as u32));
    }
    let mut kept = candidates(logits, sampling, (max, if is_last { 1.0 } else { over }));
    if is_last {
        kept.iter_mut().for_each(|token| token.1 = weight(logits[token.0 as usize], max, over));
    }
    let sum: f64 = kept.iter().map(|token| token.1).sum();
    Ok(draw_of(kept.into_iter(), draw * sum).unwrap_or(best as u32))
}

/// At a temperature of zero cuts leave the likeliest token, and what raises another is unusual.
fn is_greedy(reduced: &Sampling, letters: &[u8]) -> bool {
    reduced.temperature == 0.0 && !letters.iter().any(|it| b"xed".contains(it))
}

/// Whether the temperature comes last or first; none where the order is neither of the usual two.
fn usual_order(letters: &[u8]) -> Option<bool> {
    let is_last = letters.len() > 1 && letters.last() == Some(&b't');
    let place = |letter: &u8| b"tkpm".iter().position(|it| it == letter);
    let cuts = &letters[..letters.len() - usize::from(is_last)];
    let is_usual = cuts.is_sorted_by_key(place) && cuts.iter().all(|it| place(it).is_some());
    is_usual.then_some(is_last)
}

/// What is known of a row of logits.
pub enum Row<'a> {
    /// All of it.
    Whole(&'a [f32]),
    /// The logarithm of the sum of `e^l`, how many logits are broken, then ids and logits, the
    /// largest first, as `ops/largest.rs` gives them.
    Top(&'a [f32]),
}

/// How many of the largest logits are enough for a choice; none where it needs all of them, or as
/// many as a GPU does not look for.
pub fn n_enough(sampling: &Sampling) -> Option<usize> {
    let (lowering, letters) = sampling.split();
    let reduced = sampling.reduced(&letters);
    match lowering.is_empty() {
        true if is_greedy(&reduced, &letters) => Some(1),
        true => reduced.top_k.filter(|k| *k <= K_MAX && usual_order(&letters).is_some()),
        false => None,
    }
}

/// The same token as `pick` chooses, from the largest logits.
pub fn pick_top(top: &[f32], sampling: &Sampling, n: u64) -> Result<u32> {
    sampling.check()?;
    let hint = "the weights may be damaged, or the training diverged";
    if top[1] > 0.0 {
        return Err(Error::input(format!("{} logits are not finite", top[1]), hint));
    }
    let pairs = top[2..].as_chunks::<2>().0.iter().filter(|pair| pair[0] >= 0.0);
    let list: Vec<(u32, f32)> = pairs.map(|pair| (pair[0] as u32, pair[1])).collect();
    let Some(&(best, max)) = list.first() else {
        return Err(Error::input("all tokens are forbidden", hint));
    };
    let letters = sampling.split().1;
    let sampling = &sampling.reduced(&letters);
    if sampling.temperature == 0.0 {
        return Ok(best);
    }
    let is_last = usual_order(&letters) == Some(true);
    let over = (1.0 / sampling.temperature).min(f32::MAX);
    let first = if is_last { 1.0 } else { over };
    let k = sampling.top_k.unwrap_or(list.len());
    let weighed = list.iter().take(k).map(|&(id, logit)| (id, weight(logit, max, first)));
    // What is cut is cut from the end, or has a weight below a bound: the rest is in order.
    let mut kept = cut(weighed.collect(), sampling);
    if is_last {
        let again = |id: u32| list.iter().find(|it| it.0 == id).map_or(max, |it| it.1);
        kept.iter_mut().for_each(|token| token.1 = weight(again(token.0), max, over));
    }
    let draw = Rng::new(sampling.seed, STREAM).uniform(n);
    let sum: f64 = kept.iter().map(|token| token.1).sum();
    Ok(draw_of(kept.into_iter(), draw * sum).unwrap_or(best))
}

/// The token at which the weights so far are more than `left`; where rounding leaves a rest behind
/// the last, the last that weighs anything.
fn draw_of(weights: impl Iterator<Item = (u32, f64)>, mut left: f64) -> Option<u32> {
    let mut last = None;
    for (id, weight) in weights.filter(|token| token.1 > 0.0) {
        left -= weight;
        last = Some(id);
        if left < 0.0 {
            break;
        }
    }
    last
}

/// A draw from all tokens, by id: blocks first, then inside one.
fn draw_of_all(logits: &[f32], (max, over): (f32, f32), draw: f64) -> Option<u32> {
    let sums = sums(logits, max, over);
    let mut left = draw * sums.iter().sum::<f64>();
    let mut block = sums.iter().rposition(|sum| *sum > 0.0)?;
    for (idx, sum) in sums[..block].iter().enumerate() {
        if left < *sum {
            block = idx;
            break;
        }
        left -= sum;
    }
    let first = block * BLOCK;
    let inside = logits[first..].iter().take(BLOCK).enumerate();
    let inside = inside.map(|(idx, &logit)| ((first + idx) as u32, weight(logit, max, over)));
    draw_of(inside, left)
}

/// The smallest id of the largest logit.
fn greedy(logits: &[f32]) -> Result<usize> {
    let hint = "the weights may be damaged, or the training diverged";
    let (mut best, mut largest) = (0, f32::NEG_INFINITY);
    for (idx, block) in logits.chunks(BLOCK).enumerate() {
        let (max, is_good) = scan(block);
        if !is_good {
            let (at, logit) = (block.iter().enumerate())
                .find(|(_, logit)| logit.is_nan() || **logit == f32::INFINITY)
                .expect("one that is not good");
            let problem = format!("the logit of token {} is {logit}", idx * BLOCK + at);
            return Err(Error::input(problem, hint));
        }
        if max > largest {
            (best, largest) = (idx, max);
        }
    }
    let inside = logits.iter().skip(best * BLOCK).position(|&logit| logit == largest);
    match inside {
        Some(at) if largest > f32::NEG_INFINITY => Ok(best * BLOCK + at),
        _ => Err(Error::input(format!("all of {} tokens are forbidden", logits.len()), hint)),
    }
}

/// The largest number, and whether none is NaN or plus infinity.
fn scan(block: &[f32]) -> (f32, bool) {
    // In lanes: one running maximum would wait for itself at every number.
    const N: usize = 16;
    let (mut max, mut n_bad) = ([f32::NEG_INFINITY; N], [0u32; N]);
    let (chunks, tail) = block.as_chunks::<N>();
    for chunk in chunks {
        for lane in 0..N {
            let x = chunk[lane];
            max[lane] = if x > max[lane] { x } else { max[lane] };
            n_bad[lane] += u32::from(x.is_nan() || x > f32::MAX);
        }
    }
    let max = max.iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max);
    let is_good = tail.iter().all(|&x| x <= f32::MAX) && n_bad.iter().all(|&n| n == 0);
    (max, is_good)
}

/// How many of the likeliest tokens are looked at first for top-p.
const N_LIKELY: usize = 64;

/// Tokens that may be drawn, with their weights; `max` is the largest logit, `over` the inverse of
/// the temperature.
fn candidates(logits: &[f32], sampling: &Sampling, (max, over): (f32, f32)) -> Vec<(u32, f64)> {
    let weigh = |id: u32| (id, weight(logits[id as usize], max, over));
    let list: Vec<(u32, f64)> = match (sampling.top_k, sampling.top_p < 1.0) {
        (Some(k), _) => largest(logits, k).into_iter().map(weigh).collect(),
        (None, true) => {
            let share = sums(logits, max, over).iter().sum::<f64>() * f64::from(sampling.top_p);
            let mut n = N_LIKELY;
            loop {
                let list: Vec<(u32, f64)> = largest(logits, n).into_iter().map(weigh).collect();
                let sum: f64 = list.iter().map(|token| token.1).sum();
                if sum >= share || n >= logits.len() {
                    return after_top_p(list, share, sampling.min_p);
                }
                n *= 8;
            }
        }
        (None, false) => {
            // By logit first: exponentials of all would cost more than all the rest.
            let floor = max + (sampling.min_p.ln() - 0.01) / over;
            let near = (0..logits.len() as u32).filter(|id| logits[*id as usize] >= floor);
            near.map(weigh).filter(|token| token.1 >= f64::from(sampling.min_p)).collect()
        }
    };
    cut(list, sampling)
}

/// What top-p and min-p leave of the likeliest tokens, which are in order.
fn cut(mut list: Vec<(u32, f64)>, sampling: &Sampling) -> Vec<(u32, f64)> {
    if sampling.top_p < 1.0 {
        let share: f64 = list.iter().map(|token| token.1).sum::<f64>() * f64::from(sampling.top_p);
        return after_top_p(list, share, sampling.min_p);
    }
    list.retain(|token| token.1 >= f64::from(sampling.min_p));
    list
}

/// Of tokens in order, as few as reach `share`, and of these the likely ones.
fn after_top_p(mut list: Vec<(u32, f64)>, share: f64, min_p: f32) -> Vec<(u32, f64)> {
    let mut sum = 0.0;
    let n_below = list.iter().take_while(|token| {
        sum += token.1;
        sum < share
    });
    let n_kept = n_below.count() + 1;
    list.truncate(n_kept);
    list.retain(|token| token.1 >= f64::from(min_p));
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Probabilities 0.1, 0.4, 0.2, 0.3 as logits.
    fn logits() -> Vec<f32> {
        [0.1f32, 0.4, 0.2, 0.3].iter().map(|p| p.ln() + 3.0).collect()
    }

    /// Each token's share of many draws.
    fn shares(logits: &[f32], sampling: Sampling) -> Vec<f64> {
        let n_draws = 40_000;
        let mut counts = vec![0.0; logits.len()];
        for n in 0..n_draws {
            counts[pick(logits, &sampling, n).unwrap() as usize] += 1.0 / n_draws as f64;
        }
        counts
    }

    /// Forty thousand draws are within 0.01 of the truth, four deviations.
    fn assert_shares(sampling: Sampling, want: [f64; 4]) {
        let got = shares(&logits(), sampling);
        for (got, want) in got.iter().zip(want) {
            let is_near = if want == 0.0 { *got == 0.0 } else { (got - want).abs() < 0.01 };
            assert!(is_near, "{sampling:?}: {got} for {want}");
        }
    }

    #[test]
    fn draws_follow_the_distribution_that_the_settings_leave() {
        let plain = Sampling::plain(5);
        assert_shares(plain, [0.1, 0.4, 0.2, 0.3]);
        // Temperature 0.5 squares the probabilities: 0.01, 0.16, 0.04, 0.09 of 0.30.
        let cold = Sampling { temperature: 0.5, ..plain };
        assert_shares(cold, [1.0 / 30.0, 16.0 / 30.0, 4.0 / 30.0, 9.0 / 30.0]);
        let top_k = |k| Sampling { top_k: Some(k), ..plain };
        // Of the model's own 0.4, 0.3 reach a half, of the squares 0.16 alone does.
        let half = Sampling { top_p: 0.5, ..cold };
        assert_shares(half, [0.0, 1.0, 0.0, 0.0]);
        let last = Sampling { sequence: *b"edkpmxt\0", ..half };
        assert_shares(last, [0.0, 16.0 / 25.0, 0.0, 9.0 / 25.0]);
        assert_shares(top_k(2), [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        assert_shares(top_k(9), [0.1, 0.4, 0.2, 0.3]);
        let top_p = |p| Sampling { top_p: p, ..plain };
        assert_shares(top_p(0.35), [0.0, 1.0, 0.0, 0.0]);
        assert_shares(top_p(0.69), [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        assert_shares(top_p(0.71), [0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
        // 0.2 is half of 0.4; rounding decides at exactly half.
        assert_shares(Sampling { min_p: 0.51, ..plain }, [0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0]);
        assert_shares(Sampling { min_p: 0.49, ..plain }, [0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0]);
        // Top-p counts what top-k left: of 4/7 and 3/7 the first is enough for a half.
        assert_shares(Sampling { top_k: Some(2), ..top_p(0.5) }, [0.0, 1.0, 0.0, 0.0]);
        // Temperature comes first: squared, 16/30 is already more than a half.
        assert_shares(Sampling { top_p: 0.5, ..cold }, [0.0, 1.0, 0.0, 0.0]);
    }

    #[test]
    fn the_smallest_id_among_equals_goes_first() {
        assert_eq!(pick(&[1.0, 7.0, 7.0, -1.0], &Sampling::greedy(), 3).unwrap(), 1);
        assert_eq!(pick(&[-3.0; 5], &Sampling::greedy(), 0).unwrap(), 0);
        let two = Sampling { top_k: Some(2), ..Sampling::plain(1) };
        let got = shares(&[0.0, 2.0, 2.0, 2.0], two);
        assert!(got[1] > 0.4 && got[2] > 0.4 && got[3] == 0.0, "{got:?}");
        let half = Sampling { top_p: 0.49, ..Sampling::plain(1) };
        assert_eq!(shares(&[2.0, 2.0], half), shares(&[2.0, f32::NEG_INFINITY], half));
    }

    #[test]
    fn a_draw_is_a_function_of_seed_and_counter() {
        let draws = |seed| -> Vec<u32> {
            (0..64).map(|n| pick(&logits(), &Sampling::plain(seed), n).unwrap()).collect()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
        let backwards = (0..64).rev().map(|n| pick(&logits(), &Sampling::plain(1), n).unwrap());
        let mut backwards: Vec<u32> = backwards.collect();
        backwards.reverse();
        assert_eq!(draws(1), backwards);
    }

    #[test]
    fn extreme_logits_and_temperatures_draw_something_possible() {
        let far = [0.0, 3e38, -3e38, f32::NEG_INFINITY];
        for temperature in [1e-30, 1e-3, 1.0, 1e30] {
            for top_p in [1.0, 1e-9, 0.999] {
                let sampling = Sampling { temperature, top_p, ..Sampling::plain(0) };
                for n in 0..50 {
                    let id = pick(&far, &sampling, n).unwrap();
                    assert!(id != 3 && (id == 1 || temperature > 1.0), "{sampling:?}: {id}");
                }
            }
        }
    }

    #[test]
    fn broken_logits_and_senseless_settings_are_errors() {
        let plain = Sampling::plain(0);
        for sampling in [Sampling::greedy(), plain] {
            for bad in [f32::NAN, f32::INFINITY] {
                let error = pick(&[0.0, bad], &sampling, 0).unwrap_err().report();
                assert!(error.contains("token 1 is"), "{error}");
            }
            assert!(pick(&[], &sampling, 0).is_err());
            assert!(pick(&[f32::NEG_INFINITY; 2], &sampling, 0).is_err());
        }
        let wrong = [
            Sampling { temperature: -1.0, ..plain },
            Sampling { temperature: f32::NAN, ..plain },
            Sampling { top_k: Some(0), ..plain },
            Sampling { top_p: 0.0, ..plain },
            Sampling { top_p: 1.5, ..plain },
            Sampling { min_p: -0.1, ..plain },
            Sampling { min_p: f32::NAN, ..plain },
            Sampling { repeat_penalty: 0.0, ..plain },
            Sampling { repeat_penalty: f32::INFINITY, ..plain },
            Sampling { frequency_penalty: f32::NAN, ..plain },
            Sampling { presence_penalty: f32::NEG_INFINITY, ..plain },
        ];
        for sampling in wrong {
            assert!(pick(&[0.0, 1.0], &sampling, 0).is_err(), "{sampling:?}");
        }
    }

    /// Logits of a vocabulary that is no multiple of any block or vector, with equals among them.
    fn many(n: u64, seed: u64) -> Vec<f32> {
        let rng = Rng::new(seed, 1);
        (0..n).map(|n| (rng.normal(n) * 30.0).round() as f32 / 10.0).collect()
    }

    /// What may be drawn, and with which probability, by sorting everything in f64.
    fn naive(logits: &[f32], sampling: &Sampling) -> Vec<(u32, f64)> {
        let weight = |logit: f32| (f64::from(logit) / f64::from(sampling.temperature)).exp();
        let all = logits.iter().enumerate();
        let mut list: Vec<(u32, f64)> = all.map(|(id, &l)| (id as u32, weight(l))).collect();
        list.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        list.truncate(sampling.top_k.unwrap_or(usize::MAX));
        let sum: f64 = list.iter().map(|token| token.1).sum();
        let mut before = 0.0;
        list.retain(|token| {
            before += token.1;
            before - token.1 < f64::from(sampling.top_p) * sum
        });
        let largest = list[0].1;
        list.retain(|token| token.1 >= f64::from(sampling.min_p) * largest);
        let sum: f64 = list.iter().map(|token| token.1).sum();
        list.into_iter().map(|(id, weight)| (id, weight / sum)).collect()
    }

    /// What `ops/largest.rs` gives for one row.
    fn top(logits: &[f32], k: usize) -> Vec<f32> {
        let pairs = largest(logits, k).into_iter();
        let pairs = pairs.flat_map(|id| [id as f32, logits[id as usize]]);
        [log_sum(logits), 0.0].into_iter().chain(pairs).collect()
    }

    #[test]
    fn the_largest_logits_give_the_token_that_all_of_them_give() {
        let rng = Rng::new(8, 1);
        let logits: Vec<f32> = (0..5000).map(|n| 3.0 * rng.normal(n) as f32).collect();
        let warm = Sampling { temperature: 0.8, top_k: Some(40), ..Sampling::greedy() };
        let list = [
            Sampling::greedy(),
            warm,
            Sampling { top_p: 0.7, ..warm },
            Sampling { min_p: 0.2, ..warm },
            Sampling { top_p: 0.9, min_p: 0.05, sequence: *b"edkpmxt\0", ..warm },
            Sampling { temperature: 1.7, top_k: Some(K_MAX), seed: 5, ..warm },
        ];
        for sampling in list {
            let row = top(&logits, n_enough(&sampling).unwrap());
            // A GPU that serves several requests at once may give more than one asks for.
            let more = top(&logits, K_MAX);
            for n in 0..300 {
                let want = pick(&logits, &sampling, n).unwrap();
                assert_eq!(pick_top(&row, &sampling, n).unwrap(), want, "{sampling:?}");
                assert_eq!(pick_top(&more, &sampling, n).unwrap(), want, "{sampling:?}");
            }
        }
        assert_eq!(n_enough(&Sampling::plain(1)), None);
        assert_eq!(n_enough(&Sampling { top_k: Some(K_MAX + 1), ..warm }), None);
        let broken = [0.0, 1.0, 3.0, 2.5];
        assert!(pick_top(&broken, &warm, 0).is_err());
        assert!(pick_top(&[0.0, 0.0, -1.0, f32::MIN], &warm, 0).is_err());
    }

    #[test]
    fn a_large_vocabulary_is_cut_as_if_it_were_sorted() {
        let plain = Sampling::plain(9);
        for (n, temperature) in [(1, 1.0), (511, 1.0), (513, 0.7), (3001, 1.0), (3001, 40.0)] {
            let logits = many(n, n);
            let warm = Sampling { temperature, ..plain };
            for sampling in [
                warm,
                Sampling { top_k: Some(7), ..warm },
                Sampling { top_k: Some(2900), ..warm },
                Sampling { top_p: 0.83, ..warm },
                Sampling { top_p: 0.9999, ..warm },
                Sampling { min_p: 0.3, ..warm },
                Sampling { top_k: Some(200), top_p: 0.9, min_p: 0.01, ..warm },
            ] {
                let want = naive(&logits, &sampling);
                let mut likely = 0.0;
                let n_draws = 400;
                for n in 0..n_draws {
                    let id = pick(&logits, &sampling, n).unwrap();
                    let at = want.iter().position(|token| token.0 == id);
                    let at = at.unwrap_or_else(|| panic!("{sampling:?}: {id}"));
                    likely += f64::from(u8::from(at < want.len().div_ceil(4)));
                }
                let share: f64 = want[..want.len().div_ceil(4)].iter().map(|token| token.1).sum();
                let (got, bound) = (likely / n_draws as f64, 0.1);
                assert!((got - share).abs() < bound, "{sampling:?}: {got} for {share}");
            }
        }
    }

    #[test]
    fn the_largest_are_those_of_a_sorted_list_and_sums_those_of_a_plain_loop() {
        for n in [1, 15, 512, 700, 1037] {
            let mut logits = many(n, 3);
            logits[n as usize / 2] = f32::NEG_INFINITY;
            let mut sorted: Vec<u32> = (0..n as u32).collect();
            let logit = |id: &u32| logits[*id as usize];
            sorted.sort_by(|a, b| logit(b).total_cmp(&logit(a)).then(a.cmp(b)));
            for k in [0, 1, 5, 64, 5000] {
                assert_eq!(largest(&logits, k), sorted[..sorted.len().min(k)], "{k} of {n}");
            }
            if n > 1 {
                let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
                let got = f64::from(log_sum(&logits));
                assert!((got - sum.ln()).abs() < 1e-5, "{got} {}", sum.ln());
                assert_eq!(pick(&logits, &Sampling::greedy(), 0).unwrap(), sorted[0]);
            }
        }
    }

    #[test]
    fn penalties_are_those_of_llama_cpp_and_look_at_the_last_tokens_alone() {
        let sampling = Sampling {
            repeat_penalty: 2.0,
            frequency_penalty: 0.5,
            presence_penalty: 0.25,
            n_penalized: 4,
            ..Sampling::greedy()
        };
        let mut logits = vec![3.0, -1.0, 8.0, 5.0, f32::NEG_INFINITY];
        // Token 3 came too long ago; 99 is none of the vocabulary.
        penalize(&mut logits, &[3, 3, 1, 2, 2, 99], &sampling);
        let want = [3.0, -2.0 - 0.75, 4.0 - 1.25, 5.0, f32::NEG_INFINITY];
        assert_eq!(logits, want);
        penalize(&mut logits, &[4], &sampling);
        assert_eq!(logits, want);
        let none = Sampling { n_penalized: 0, ..sampling };
        penalize(&mut logits, &[0, 1], &none);
        penalize(&mut logits, &[0, 1], &Sampling::greedy());
        assert_eq!(logits, want);
        assert!(!none.penalizes() && !Sampling::plain(0).penalizes());
        penalize(&mut logits, &[0], &Sampling { presence_penalty: -1.0, ..Sampling::greedy() });
        assert_eq!(logits[0], 4.0);
    }
}
