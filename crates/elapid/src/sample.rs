//! The next token from its logits.
//!
//! With logits `l` and a temperature `T`, in this order (as transformers and vLLM do it):
//!
//!     w[v]   = exp((l[v] - max l) / T)
//!     top-k    keeps the k largest w
//!     top-p    keeps the largest w, as few as reach the share p of the sum of what is left
//!     min-p    keeps every w of at least min-p times the largest
//!     v        with probability w[v] / sum of what is left
//!
//! The limit of a temperature of zero is greedy: the largest logit. Among equals the smallest id
//! goes first, everywhere.
//!
//! The draw is a function of the seed and of a counter, so that a text can be made again from any
//! point. A logit of minus infinity forbids a token; one that is not a number, or plus infinity, is
//! an error: the model is broken, and a guess would hide it.
//!
//! Not here: penalties, grammars; stops (`generate.rs`).

use crate::error::{Error, Result};
use crate::rng::Rng;
use std::cmp::Ordering;

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
        }
    }

    /// The model's own distribution.
    pub fn plain(seed: u64) -> Sampling {
        Sampling { temperature: 1.0, seed, ..Sampling::greedy() }
    }

    /// Whether every setting means something.
    pub fn check(&self) -> Result<()> {
        let Sampling { temperature, top_k, top_p, min_p, .. } = *self;
        let wrong = |problem: String, hint: &str| Err(Error::input(problem, hint));
        if !(temperature >= 0.0 && temperature.is_finite()) {
            let hint = "give a number from 0 (greedy) on; 1 is the model's own distribution";
            return wrong(format!("the temperature is {temperature}"), hint);
        }
        if top_k == Some(0) {
            return wrong("top-k keeps 0 tokens".into(), "keep at least 1");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return wrong(format!("top-p is {top_p}"), "give a share above 0, at most 1");
        }
        if !(0.0..=1.0).contains(&min_p) {
            return wrong(format!("min-p is {min_p}"), "give a share from 0 to 1");
        }
        Ok(())
    }
}

/// The token chosen from `logits`, by the draw of counter `n`.
pub fn pick(logits: &[f32], sampling: &Sampling, n: u64) -> Result<u32> {
    sampling.check()?;
    let best = greedy(logits)?;
    if sampling.temperature == 0.0 {
        return Ok(best as u32);
    }
    let kept = candidates(logits, sampling, logits[best]);
    let sum: f64 = kept.iter().map(|token| token.1).sum();
    let mut left = Rng::new(sampling.seed, STREAM).uniform(n) * sum;
    for (id, weight) in &kept {
        left -= weight;
        if left < 0.0 {
            return Ok(*id);
        }
    }
    // Rounding may leave a rest behind the last one.
    let last = kept.iter().rev().find(|token| token.1 > 0.0);
    Ok(last.map_or(best as u32, |token| token.0))
}

/// The smallest id of the largest logit.
fn greedy(logits: &[f32]) -> Result<usize> {
    let hint = "the weights may be damaged, or the training have diverged";
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(Error::input(format!("the logit of token {id} is {logit}"), hint));
        }
        if logit > logits[best] {
            best = id;
        }
    }
    match logits.get(best) {
        Some(&logit) if logit > f32::NEG_INFINITY => Ok(best),
        _ => Err(Error::input(format!("all of {} tokens are forbidden", logits.len()), hint)),
    }
}

/// Tokens that may be drawn, with their weights; `max` is the largest logit.
fn candidates(logits: &[f32], sampling: &Sampling, max: f32) -> Vec<(u32, f64)> {
    let over = 1.0 / f64::from(sampling.temperature);
    let weight = |logit: f32| ((f64::from(logit) - f64::from(max)) * over).exp();
    let weighed = logits.iter().enumerate().map(|(id, &logit)| (id as u32, weight(logit)));
    let mut list: Vec<(u32, f64)> = weighed.collect();
    // By logit and not by weight: at a low temperature many weights are zero alike.
    let order = |a: &(u32, f64), b: &(u32, f64)| -> Ordering {
        logits[b.0 as usize].total_cmp(&logits[a.0 as usize]).then(a.0.cmp(&b.0))
    };
    if let Some(k) = sampling.top_k.filter(|&k| k < list.len()) {
        // A vocabulary is large and k is small: only what is kept is sorted.
        list.select_nth_unstable_by(k, order);
        list.truncate(k);
        list.sort_unstable_by(order);
    }
    if sampling.top_p < 1.0 {
        list.sort_unstable_by(order);
        let share: f64 = list.iter().map(|token| token.1).sum::<f64>() * f64::from(sampling.top_p);
        let mut sum = 0.0;
        let n_below = list.iter().take_while(|token| {
            sum += token.1;
            sum < share
        });
        let n_kept = n_below.count() + 1;
        list.truncate(n_kept);
    }
    if sampling.min_p > 0.0 {
        list.retain(|token| token.1 >= f64::from(sampling.min_p));
    }
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
                let error = pick(&[0.0, bad], &sampling, 0).unwrap_err().to_string();
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
        ];
        for sampling in wrong {
            assert!(pick(&[0.0, 1.0], &sampling, 0).is_err(), "{sampling:?}");
        }
    }
}
