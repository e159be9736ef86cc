//! Values that were computed by hand from llama.cpp's definitions.

use super::*;
use crate::generate::sample::{pick, pick_after};

fn dry_of(tokens: &[u32], breakers: &Breakers) -> Vec<(u32, f32)> {
    let sampling = Sampling { dry_multiplier: 0.5, dry_base: 2.0, ..Sampling::greedy() };
    dry(tokens, &sampling, breakers)
}

#[test]
fn dry_lowers_what_would_continue_a_repetition_by_its_length() {
    let none = Breakers::default();
    // After 1 2 3 came 4; the newest three are 1 2 3 again: length 3, allowed 2, 0.5 * 2^1.
    assert_eq!(dry_of(&[1, 2, 3, 4, 9, 1, 2, 3], &none), [(4, 1.0)]);
    // Length 2 is as long as allowed: 0.5 * 2^0. One token alone is no repetition.
    assert_eq!(dry_of(&[2, 3, 4, 9, 2, 3], &none), [(4, 0.5)]);
    assert_eq!(dry_of(&[3, 4, 9, 3], &none), []);
    // 5 follows once after two tokens, once after four: the longer counts.
    assert_eq!(dry_of(&[1, 2, 3, 4, 5, 8, 3, 4, 5, 1, 2, 3, 4], &none), [(5, 2.0)]);
    // Of seven sevens before the newest, the first behind one overlaps six: 0.5 * 2^4.
    assert_eq!(dry_of(&[7; 7], &none), [(7, 8.0)]);
    let near = Sampling { dry_multiplier: 0.5, dry_last_n: 5, ..Sampling::greedy() };
    assert_eq!(dry(&[1, 2, 3, 4, 9, 1, 2, 3], &near, &none), []);
    let long = Sampling { dry_multiplier: 1.0, dry_base: 4.0, ..Sampling::greedy() };
    assert!(dry(&[7; 900], &long, &none)[0].1.is_finite());
}

#[test]
fn a_breaker_ends_a_repetition() {
    let breakers = |head: u32, tail: &[u32]| Breakers([(head, vec![tail.to_vec()])].into());
    let tokens = [1, 2, 3, 4, 9, 1, 2, 3];
    // Behind the 1 there are two tokens: 0.5 * 2^0; behind the 2 one, which is too few.
    assert_eq!(dry_of(&tokens, &breakers(1, &[])), [(4, 0.5)]);
    assert_eq!(dry_of(&tokens, &breakers(2, &[])), []);
    // A breaker of two tokens ends behind the second.
    assert_eq!(dry_of(&tokens, &breakers(9, &[1])), [(4, 0.5)]);
    assert_eq!(dry_of(&tokens, &breakers(9, &[2])), [(4, 1.0)]);
}

#[test]
fn the_lengths_are_those_of_a_plain_comparison() {
    let rng = Rng::new(3, 0);
    for n in [0, 1, 2, 5, 40, 200] {
        let tokens: Vec<u32> = (0..n).map(|at| (rng.uniform(at) * 2.2) as u32).collect();
        let want = |at: usize| {
            let same = tokens.iter().zip(&tokens[at..]).take_while(|(a, b)| a == b);
            if at == 0 { 0 } else { same.count() }
        };
        let want: Vec<usize> = (0..tokens.len()).map(want).collect();
        assert_eq!(prefix_lengths(&tokens), want);
    }
}

/// Probabilities 0.1, 0.4, 0.2, 0.3 as logits.
fn logits() -> Vec<f32> {
    [0.1f32, 0.4, 0.2, 0.3].iter().map(|p| p.ln() + 3.0).collect()
}

fn ids(sampling: &Sampling, letters: &[u8]) -> Vec<u32> {
    let kept = kept(&logits(), sampling, letters, (&[1, 1], &Breakers::default()), 0);
    kept.into_iter().map(|token| token.0).collect()
}

#[test]
fn xtc_removes_likely_tokens_but_the_least_likely_of_them() {
    let xtc = |probability, threshold| Sampling {
        xtc_probability: probability,
        xtc_threshold: threshold,
        ..Sampling::plain(1)
    };
    // 0.4, 0.3 and 0.2 are likely: the last of them stays, with all that is below.
    assert_eq!(ids(&xtc(1.0, 0.15), b"x"), [2, 0]);
    assert_eq!(ids(&xtc(1.0, 0.35), b"x"), [1, 3, 2, 0]);
    assert_eq!(
        pick(&logits(), &xtc(1.0, 0.6), 0).unwrap(),
        pick(&logits(), &xtc(0.0, 0.1), 0).unwrap()
    );
    // As llama.cpp has it: the temperature after it. The other way round one token is left.
    let half = Sampling { temperature: 0.0, sequence: *b"xt\0\0\0\0\0\0", ..xtc(0.5, 0.15) };
    let n_best = (0..4000).filter(|n| pick(&logits(), &half, *n).unwrap() == 1).count();
    assert!((1880..2120).contains(&n_best), "{n_best} of 4000");
}

#[test]
fn samplers_act_in_the_order_of_the_sequence() {
    let all = Sampling {
        temperature: 0.5,
        top_k: Some(3),
        top_p: 0.5,
        min_p: 0.6,
        presence_penalty: 9.0,
        ..Sampling::plain(1)
    };
    // Of 0.4 and 0.3 the share is 0.7; squared, 16/29 of the first three is more than a half.
    assert_eq!(ids(&all, b"kp"), [1, 3]);
    assert_eq!(ids(&all, b"tkp"), [1]);
    // 0.3 is three quarters of 0.4, and 9/16 after the temperature.
    assert_eq!(ids(&all, b"m"), [1, 3]);
    assert_eq!(ids(&all, b"tm"), [1]);
    // The penalty takes the likeliest token out of the cut, or acts on what the cut has left.
    assert_eq!(ids(&all, b"ek"), [3, 2, 0]);
    assert_eq!(ids(&all, b"kep"), [3]);
    let sequence = |letters: &[u8]| {
        let mut sequence = [0; 8];
        sequence[..letters.len()].copy_from_slice(letters);
        Sampling { sequence, ..all }
    };
    // Through the front door, too: what is not in the sequence is off.
    let past = (&[1u32, 1][..], &Breakers::default());
    for n in 0..200 {
        let of = |letters: &[u8]| pick_after(&logits(), &sequence(letters), past, n).unwrap();
        assert!([1, 3].contains(&of(b"pk")));
        assert_eq!(of(b"kep"), 3);
        assert_eq!(of(b"mt"), of(b"pmt"));
    }
    let n_rare = (0..2000).filter(|n| pick(&logits(), &sequence(b"e"), *n).unwrap() == 0).count();
    assert!((140..260).contains(&n_rare), "{n_rare} of 2000");
}
