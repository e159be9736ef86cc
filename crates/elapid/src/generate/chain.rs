//! Samplers of llama.cpp in any order, and two that only it has.
//!
//! DRY lowers tokens that would continue a repetition. Where the newest `len` tokens, at least as
//! many as allowed, came before as well, the logit of the token that followed there becomes
//!
//! ```text
//! l = l - multiplier * base^(len - allowed)
//! ```
//!
//! A repetition ends at a breaker: `len` counts tokens behind the last one alone.
//!
//! XTC removes, with a probability, all tokens of at least a threshold but the least likely of
//! them.
//!
//! Not here: the two usual orders, which need no list of all tokens (`sample.rs`).

use super::sample::{Sampling, log_sum, penalties};
use crate::tensor::rng::Rng;
use crate::text::tokenizer::{Special, Tokenizer};
use std::collections::HashMap;

/// Draws of XTC, apart from those of tokens.
const XTC_STREAM: u64 = 0x7874_6300;
/// Tokens of a breaker behind its first, at most, and what `exp` of f32 can hold.
const N_TAIL_MAX: usize = 20;
const LOG_MAX: f32 = 88.722_83;

/// Texts that end a repetition, as tokens: by the first of them, what must follow.
#[derive(Clone, Debug, Default)]
pub(crate) struct Breakers(HashMap<u32, Vec<Vec<u32>>>);

impl Breakers {
    /// A token that holds the text is a breaker; one that ends with its beginning is where the
    /// tokens of the rest follow.
    pub(crate) fn new(tokenizer: &Tokenizer, texts: &[String]) -> Breakers {
        let mut found: HashMap<u32, Vec<Vec<u32>>> = HashMap::new();
        for text in texts.iter().filter(|text| !text.is_empty()) {
            let text_bytes = text.as_bytes();
            for id in 0..tokenizer.n_vocab() as u32 {
                let word = tokenizer.bytes(id).unwrap_or_default();
                if word.windows(text_bytes.len()).any(|part| part == text_bytes) {
                    found.entry(id).or_default().push(Vec::new());
                    continue;
                }
                let begun = (1..text.len()).filter(|n| word.ends_with(&text_bytes[..*n]));
                for n in begun.filter(|n| text.is_char_boundary(*n)) {
                    let tail = tokenizer.encode(&text[n..], Special::Plain).unwrap_or_default();
                    let tail = tail.into_iter().take(N_TAIL_MAX).collect();
                    found.entry(id).or_default().push(tail);
                }
            }
        }
        Breakers(found)
    }

    /// Of tokens, newest first, how many stand behind the last breaker.
    fn n_behind(&self, newest: &[u32]) -> usize {
        for (at, token) in newest.iter().enumerate() {
            let follows = |tail: &&Vec<u32>| {
                tail.len() <= at && tail.iter().zip(newest[..at].iter().rev()).all(|(a, b)| a == b)
            };
            let tails = self.0.get(token).into_iter().flatten();
            if let Some(tail) = tails.filter(follows).max_by_key(|tail| tail.len()) {
                return at - tail.len();
            }
        }
        newest.len()
    }
}

/// What DRY takes from the logits of tokens that would continue a repetition.
pub(crate) fn dry(tokens: &[u32], sampling: &Sampling, breakers: &Breakers) -> Vec<(u32, f32)> {
    let allowed = sampling.dry_allowed_length;
    let newest: Vec<u32> = tokens.iter().rev().take(sampling.dry_last_n).copied().collect();
    let n_behind = breakers.n_behind(&newest);
    if newest.len() <= allowed || n_behind < allowed {
        return Vec::new();
    }
    let mut longest: HashMap<u32, usize> = HashMap::new();
    let lengths = prefix_lengths(&newest);
    for (at, length) in lengths.into_iter().enumerate().skip(1) {
        let length = length.min(n_behind);
        if length >= allowed {
            let kept = longest.entry(newest[at - 1]).or_default();
            *kept = length.max(*kept);
        }
    }
    let base = sampling.dry_base;
    let most = if base > 1.000_001 { (LOG_MAX / base.ln()) as usize } else { usize::MAX };
    let penalty = |length: usize| {
        let exponent = (length - allowed).min(most);
        sampling.dry_multiplier * base.powi(i32::try_from(exponent).unwrap_or(i32::MAX))
    };
    let mut list: Vec<_> = longest.into_iter().map(|(id, len)| (id, penalty(len))).collect();
    list.sort_unstable_by_key(|pair| pair.0);
    list
}

/// For each place, how many tokens from there are as those at the start (the Z-function).
fn prefix_lengths(tokens: &[u32]) -> Vec<usize> {
    let n = tokens.len();
    let mut lengths = vec![0; n];
    let (mut left, mut right) = (0, 0);
    for at in 1..n {
        let known = if at < right { lengths[at - left].min(right - at) } else { 0 };
        let more = (known..n - at).take_while(|k| tokens[*k] == tokens[at + k]).count();
        lengths[at] = known + more;
        if at + lengths[at] > right {
            (left, right) = (at, at + lengths[at]);
        }
    }
    lengths
}

/// What is left after these samplers, letters of llama.cpp: tokens with their logits.
pub(crate) fn kept(
    logits: &[f32],
    sampling: &Sampling,
    letters: &[u8],
    (tokens, breakers): (&[u32], &Breakers),
    n: u64,
) -> Vec<(u32, f32)> {
    let mut list: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
    list.retain(|token| token.1 > f32::NEG_INFINITY);
    for letter in letters {
        match letter {
            b'e' => {
                let lowered: HashMap<u32, usize> =
                    penalties(tokens, sampling).into_iter().collect();
                for (id, logit) in &mut list {
                    lowered.get(id).into_iter().for_each(|n| sampling.penalize_one(logit, *n));
                }
            }
            b'd' => {
                let lowered: HashMap<u32, f32> =
                    dry(tokens, sampling, breakers).into_iter().collect();
                list.iter_mut().for_each(|it| it.1 -= lowered.get(&it.0).copied().unwrap_or(0.0));
            }
            b't' if sampling.temperature < f32::MIN_POSITIVE => {
                sort(&mut list);
                list.truncate(1);
            }
            b't' => list.iter_mut().for_each(|it| it.1 /= sampling.temperature),
            b'k' => {
                sort(&mut list);
                list.truncate(sampling.top_k.unwrap_or(usize::MAX));
            }
            b'p' => top_p(&mut list, sampling.top_p),
            b'm' => {
                let max = list.iter().map(|it| it.1).fold(f32::NEG_INFINITY, f32::max);
                list.retain(|it| it.1 >= max + sampling.min_p.ln());
            }
            b'x' => xtc(&mut list, sampling, n),
            _ => {}
        }
    }
    list
}

/// Largest first, of equals the smallest id.
fn sort(list: &mut [(u32, f32)]) {
    list.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
}

/// The probabilities of tokens, in their order.
fn shares(list: &[(u32, f32)]) -> Vec<f32> {
    let logits: Vec<f32> = list.iter().map(|it| it.1).collect();
    let sum = log_sum(&logits);
    logits.into_iter().map(|logit| (logit - sum).exp()).collect()
}

fn top_p(list: &mut Vec<(u32, f32)>, share: f32) {
    sort(list);
    let mut sum = 0.0;
    let n_below = shares(list).into_iter().take_while(|p| {
        sum += p;
        sum < share
    });
    let n_kept = n_below.count() + 1;
    list.truncate(n_kept);
}

fn xtc(list: &mut Vec<(u32, f32)>, sampling: &Sampling, n: u64) {
    let draw = Rng::new(sampling.seed, XTC_STREAM).uniform(n);
    if list.len() < 2 || draw > f64::from(sampling.xtc_probability) {
        return;
    }
    sort(list);
    let n_likely = shares(list).into_iter().take_while(|p| *p >= sampling.xtc_threshold).count();
    list.drain(..n_likely.saturating_sub(1));
}

#[cfg(test)]
mod tests;
