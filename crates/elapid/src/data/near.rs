//! Copies and near copies among texts.
//!
//! Exact copies have equal BLAKE3 hashes. Near copies share most of their shingles: runs of
//! `N_WORD` words, where a word is a name, a number or a single other sign, so that space and
//! line breaks do not count. For sets of shingles S and T
//!
//! ```text
//! J(S, T) = |S and T| / |S or T|        near copies: J >= JACCARD_MIN
//! ```
//!
//! Not every pair is compared. A signature holds, for each of `N_HASH` hash functions, the least
//! hash of a text's shingles; two texts agree in each place with probability J (Broder, 1997).
//! Signatures are cut into `N_BAND` bands of `N_ROW`; texts that agree in a whole band are
//! candidates, with probability
//!
//! ```text
//! 1 - (1 - J^N_ROW)^N_BAND
//! ```
//!
//! which is above 0.99 at `JACCARD_MIN`, a half near J = 0.56 and below 0.02 at J = 0.3. Candidates
//! whose signatures agree enough are then compared shingle by shingle, so nothing is taken for a
//! copy by chance.
//!
//! Clusters are what near copies connect, also at second hand: the split needs them whole. A copy
//! is what resembles an earlier text that is kept: a chain of small changes is not thrown away
//! down to its first link.
//!
//! The result is a function of the texts and their order. Time is linear in the text: a bucket
//! that is full takes no more, so that a thousand texts with one licence header cannot make a
//! million pairs. Memory is that of the signatures: texts may stay on disk.

use rayon::prelude::*;
use std::collections::{HashMap, HashSet};

const N_WORD: usize = 5;
const N_BAND: usize = 21;
const N_ROW: usize = 6;
const N_HASH: usize = N_BAND * N_ROW;

/// Near copies share at least this much.
const JACCARD_MIN: f64 = 0.8;

/// Agreement of signatures below which the shingles are not compared: about three standard
/// deviations under `JACCARD_MIN`.
const AGREE_MIN: usize = N_HASH * 7 / 10;

/// Texts with fewer shingles are only compared as a whole.
const N_SHINGLE_MIN: usize = 5;

/// Texts in a bucket.
const N_BUCKET_MAX: usize = 32;

/// What is kept of a text to find its copies: about half a kilobyte, whatever its length.
pub struct Signature {
    hash: [u8; 32],
    /// Absent where there are too few shingles.
    least: Option<Box<[u32; N_HASH]>>,
}

/// Finds copies and clusters among the texts of these signatures: for each the first text of its
/// cluster, and the earlier text that it is a copy or near copy of, which is kept. `text` reads a
/// text again where the signatures of two are so alike that the texts must decide.
pub fn compare<E>(
    signatures: &[Signature],
    text: &dyn Fn(usize) -> Result<String, E>,
) -> Result<Vec<(usize, Option<usize>)>, E> {
    let mut search = Search {
        text,
        by_hash: HashMap::new(),
        parents: (0..signatures.len()).collect(),
        copies: Vec::with_capacity(signatures.len()),
    };
    let mut pairs = candidates(signatures).into_iter().peekable();
    for (idx, signature) in signatures.iter().enumerate() {
        let others: Vec<usize> =
            std::iter::from_fn(|| pairs.next_if(|pair| pair.0 == idx)).map(|pair| pair.1).collect();
        let copy = search.find(idx, signature, &others)?;
        search.copies.push(copy);
    }
    let copies = std::mem::take(&mut search.copies);
    Ok(copies.into_iter().enumerate().map(|(idx, copy)| (search.root(idx), copy)).collect())
}

impl Signature {
    /// Takes time in proportion to the text.
    pub fn new(text: &str) -> Signature {
        let hash = *blake3::hash(text.as_bytes()).as_bytes();
        let words = words(text);
        if words.len() < N_WORD + N_SHINGLE_MIN - 1 {
            return Signature { hash, least: None };
        }
        let mut least = Box::new([u32::MAX; N_HASH]);
        pulp::Arch::new().dispatch(Least { words: &words, least: &mut least });
        Signature { hash, least: Some(least) }
    }

    fn agrees(&self, other: &Signature) -> bool {
        let (Some(left), Some(right)) = (&self.least, &other.least) else { return false };
        left.iter().zip(right.iter()).filter(|pair| pair.0 == pair.1).count() >= AGREE_MIN
    }
}

/// Pairs (text, earlier text) that agree in a whole band and then in enough places, ascending.
///
/// Band by band: the table of one band holds 16 bytes a text, where tables of all would be larger
/// than the signatures. Of exact copies only the first is looked at.
fn candidates(signatures: &[Signature]) -> Vec<(usize, usize)> {
    let mut seen = HashSet::new();
    let first: Vec<usize> =
        (0..signatures.len()).filter(|idx| seen.insert(signatures[*idx].hash)).collect();
    let mut pairs: Vec<(usize, usize)> = Vec::new();
    for band in 0..N_BAND {
        let key = |idx: &usize| {
            let least = signatures[*idx].least.as_ref()?;
            let part = &least[band * N_ROW..(band + 1) * N_ROW];
            Some((part.iter().fold(0, |hash, least| mix(hash ^ u64::from(*least))), *idx))
        };
        let mut keys: Vec<(u64, usize)> = first.par_iter().filter_map(key).collect();
        keys.par_sort_unstable();
        let of_bucket = |bucket: &[(u64, usize)]| {
            let mut list = Vec::new();
            for (n, (_, idx)) in bucket.iter().enumerate() {
                let earlier = bucket[..n.min(N_BUCKET_MAX)].iter().map(|entry| entry.1);
                let agree = |other: &usize| signatures[*idx].agrees(&signatures[*other]);
                list.extend(earlier.filter(agree).map(|other| (*idx, other)));
            }
            list
        };
        pairs.par_extend(keys.par_chunk_by(|a, b| a.0 == b.0).flat_map_iter(of_bucket));
        pairs.par_sort_unstable();
        pairs.dedup();
    }
    pairs
}

/// The least of each hash over the shingles of a text: multiply-shift with a factor and a summand
/// of its own (Dietzfelbinger, 1997). A shingle that repeats itself changes nothing.
struct Least<'a> {
    words: &'a [u64],
    least: &'a mut [u32; N_HASH],
}

impl pulp::WithSimd for Least<'_> {
    type Output = ();

    // Compiled for each set of instructions: with AVX-512 it is seven times as fast as without.
    #[inline(always)]
    fn with_simd<S: pulp::Simd>(self, _: S) {
        // In registers where there are so many of them.
        let mut least = *self.least;
        for run in self.words.windows(N_WORD) {
            let shingle = shingle(run);
            for n in 0..N_HASH {
                let hash = shingle.wrapping_mul(FACTORS[n]).wrapping_add(SUMMANDS[n]);
                least[n] = least[n].min((hash >> 32) as u32);
            }
        }
        *self.least = least;
    }
}

/// Odd.
const FACTORS: [u64; N_HASH] = numbers(0, 1);
const SUMMANDS: [u64; N_HASH] = numbers(1, 0);

const fn numbers(first: u64, bits: u64) -> [u64; N_HASH] {
    let mut list = [0; N_HASH];
    let mut n = 0;
    while n < N_HASH {
        list[n] = mix(2 * n as u64 + first) | bits;
        n += 1;
    }
    list
}

/// The last steps of SplitMix64: every bit of the input changes half of the output.
#[inline(always)]
const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The hash of a shingle.
#[inline(always)]
fn shingle(words: &[u64]) -> u64 {
    words.iter().fold(0, |hash, word| mix(hash ^ word))
}

/// Hashes of the distinct shingles of a text, sorted.
fn shingles(text: &str) -> Vec<u64> {
    let mut list: Vec<u64> = words(text).windows(N_WORD).map(shingle).collect();
    list.sort_unstable();
    list.dedup();
    list
}

/// Hashes of the words of a text, by FNV-1a.
fn words(text: &str) -> Vec<u64> {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    let mut list = Vec::with_capacity(text.len() / 4);
    let mut word = BASIS;
    for byte in text.bytes() {
        // Bytes above 127 belong to letters more often than not.
        let is_name = byte.is_ascii_alphanumeric() || byte == b'_' || byte > 127;
        if is_name {
            word = (word ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            continue;
        }
        if word != BASIS {
            list.push(word);
            word = BASIS;
        }
        if !byte.is_ascii_whitespace() {
            list.push(u64::from(byte));
        }
    }
    if word != BASIS {
        list.push(word);
    }
    list
}

fn jaccard(left: &[u64], right: &[u64]) -> f64 {
    let (mut at, mut n_both) = (0, 0);
    for shingle in left {
        while right.get(at).is_some_and(|other| other < shingle) {
            at += 1;
        }
        n_both += usize::from(right.get(at) == Some(shingle));
    }
    n_both as f64 / (left.len() + right.len() - n_both).max(1) as f64
}

struct Search<'a, E> {
    text: &'a dyn Fn(usize) -> Result<String, E>,
    by_hash: HashMap<[u8; 32], usize>,
    /// Each text's way to the first of its cluster.
    parents: Vec<usize>,
    /// The text that each is a copy of.
    copies: Vec<Option<usize>>,
}

impl<E> Search<'_, E> {
    /// What `idx` is a copy of; all before it have been found.
    fn find(
        &mut self,
        idx: usize,
        signature: &Signature,
        candidates: &[usize],
    ) -> Result<Option<usize>, E> {
        if let Some(&first) = self.by_hash.get(&signature.hash) {
            self.join(first, idx);
            // The first may be a near copy itself: then what it was kept for stands for both.
            return Ok(self.copies[first].or(Some(first)));
        }
        self.by_hash.insert(signature.hash, idx);
        self.choose(idx, candidates)
    }

    /// Joins `idx` with every candidate it resembles and returns the first that is kept.
    fn choose(&mut self, idx: usize, candidates: &[usize]) -> Result<Option<usize>, E> {
        let mut copy = None;
        let mut own = None;
        for &other in candidates {
            let may_be_origin = copy.is_none() && self.copies[other].is_none();
            if self.root(other) == self.root(idx) && !may_be_origin {
                continue;
            }
            let own = match &own {
                Some(own) => own,
                None => own.insert(shingles(&(self.text)(idx)?)),
            };
            if jaccard(own, &shingles(&(self.text)(other)?)) >= JACCARD_MIN {
                self.join(other, idx);
                copy = copy.or(may_be_origin.then_some(other));
            }
        }
        Ok(copy)
    }

    /// The first text of the cluster, with the way to it made shorter.
    fn root(&mut self, mut idx: usize) -> usize {
        while self.parents[idx] != idx {
            self.parents[idx] = self.parents[self.parents[idx]];
            idx = self.parents[idx];
        }
        idx
    }

    fn join(&mut self, left: usize, right: usize) {
        let (left, right) = (self.root(left), self.root(right));
        self.parents[left.max(right)] = left.min(right);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::rng::Rng;

    fn compare(texts: &[&str]) -> Vec<(usize, Option<usize>)> {
        let signatures: Vec<Signature> = texts.iter().map(|text| Signature::new(text)).collect();
        let text = |idx: usize| Ok::<_, std::convert::Infallible>(texts[idx].to_string());
        super::compare(&signatures, &text).unwrap()
    }

    /// For each text the first text of its cluster.
    fn clusters(texts: &[&str]) -> Vec<usize> {
        compare(texts).into_iter().map(|found| found.0).collect()
    }

    /// `n` lines like code, different for every seed.
    fn code(seed: u64, n: u64) -> String {
        let rng = Rng::new(seed, 0);
        let line = |line: u64| {
            let name = |k: u64| format!("name{}", rng.below(4 * line + k, 400));
            format!("    let {} = {}({}, {});\n", name(0), name(1), name(2), name(3))
        };
        (0..n).map(line).collect()
    }

    /// With every `step`-th line changed.
    fn changed(text: &str, step: usize) -> String {
        let line = |(n, line): (usize, &str)| match (n + 1) % step {
            0 => format!("    other{n}();\n"),
            _ => format!("{line}\n"),
        };
        text.lines().enumerate().map(line).collect()
    }

    #[test]
    fn copies_and_near_copies_are_found_and_unrelated_texts_are_not() {
        let texts: Vec<String> = (0..40).map(|seed| code(seed, 60)).collect();
        let mut list: Vec<&str> = texts.iter().map(String::as_str).collect();
        assert_eq!(clusters(&list), (0..40).collect::<Vec<usize>>());
        let near = changed(&texts[3], 20);
        let far = changed(&texts[4], 3);
        // Another indentation is no change.
        let moved = texts[5].replace("    ", "\t").replace('\n', "\r\n");
        list.extend([texts[7].as_str(), &near, &far, &moved]);
        let found = compare(&list);
        assert_eq!(found[40], (7, Some(7)));
        assert_eq!(found[41], (3, Some(3)));
        assert_eq!(found[42], (42, None));
        assert_eq!(found[43], (5, Some(5)));
        assert!(found[..40].iter().all(|found| found.1.is_none()));
    }

    #[test]
    fn the_verdict_is_that_of_all_pairs_at_any_likeness() {
        // One text with more and more of it changed: from J near 1 down to a third.
        let texts: Vec<String> = (0..12)
            .flat_map(|seed| {
                let text = code(seed, 80);
                let others: Vec<String> =
                    (2..30).step_by(3).map(|step| changed(&text, step)).collect();
                std::iter::once(text).chain(others)
            })
            .collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let sets: Vec<Vec<u64>> = texts.iter().map(|text| shingles(text)).collect();
        let found = compare(&texts);
        let (mut n_near, mut n_far) = (0, 0);
        for right in 0..texts.len() {
            // What comparing with every earlier text that is kept would say.
            let alike = |left: &usize| jaccard(&sets[*left], &sets[right]) >= JACCARD_MIN;
            let kept = (0..right).filter(|left| found[*left].1.is_none());
            let want = kept.clone().find(alike);
            assert_eq!(found[right].1, want, "text {right}");
            *(if want.is_some() { &mut n_near } else { &mut n_far }) += 1;
        }
        assert!(n_near > 20 && n_far > 40, "{n_near} {n_far}");
    }

    #[test]
    fn a_chain_is_one_cluster_but_its_far_end_is_kept() {
        // Each drops a twentieth of the one before: two steps are near, three are not.
        let link = |n: u64| (n..n + 20).map(|k| code(k, 5)).collect::<String>();
        let texts: Vec<String> = (0..6).map(link).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        assert_eq!(clusters(&texts), [0; 6]);
        let copies: Vec<Option<usize>> = compare(&texts).iter().map(|found| found.1).collect();
        assert_eq!(copies, [None, Some(0), Some(0), None, Some(3), Some(3)]);
    }

    #[test]
    fn short_texts_are_copies_only_when_they_are_the_same() {
        let texts = ["mod a;", "mod b;", "mod a;", "", "", "a b c d e f g", "a b c d e f g\n"];
        assert_eq!(clusters(&texts), [0, 1, 0, 3, 3, 5, 6]);
        assert_eq!(compare(&texts)[4].1, Some(3));
        assert_eq!(compare(&[]), []);
    }

    #[test]
    fn a_header_that_all_share_makes_no_copies() {
        let header = code(99, 12);
        let texts: Vec<String> = (0..200).map(|seed| header.clone() + &code(seed, 30)).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        assert_eq!(clusters(&texts), (0..200).collect::<Vec<usize>>());
    }

    #[test]
    fn any_number_of_threads_finds_the_same() {
        let texts: Vec<String> =
            (0..30).map(|n| changed(&code(n / 3, 50), 9 + n as usize)).collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let on = |n: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
            pool.install(|| compare(&texts))
        };
        assert_eq!(on(1), on(2));
    }
}
