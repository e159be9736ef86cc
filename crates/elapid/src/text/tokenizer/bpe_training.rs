//! Trains a byte-level byte-pair encoding: text to a vocabulary and an ordered list of merges.
//!
//! The text is cut into words by a pre-tokenizer, and equal words are counted once. Every word
//! begins as its bytes. Then, until the vocabulary is full, the pair of neighbours that occurs
//! most often becomes one token:
//!
//! ```text
//! count(a, b) = sum over words w of count(w) * occurrences of a b in w
//! ```
//!
//! After a merge only words that held the pair change, so counts are kept up to date from those
//! words, and a heap holds the candidates with counts that are corrected when they come up.
//!
//! Ids: special tokens from 0 in their order, then the 256 bytes in the order of their
//! characters (see `byte_char`), then merges. Of pairs with equal counts the one with the
//! smaller ids comes first. All this is the order of HF `tokenizers`, so that merges can be
//! compared with its trainer. A pair whose token already exists by another way is a merge without
//! a new token; a pair that would spell a special token is never merged.
//!
//! The same text gives the same result on any number of threads: words are counted in batches cut
//! by size, and sorted before ids are given out.

use super::tokens::{Kind, byte_char, char_byte};
use super::{Codec, Tokenizer, gguf, merges, names, pre};
use crate::error::{Error, Result};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// Pieces one thread counts at a time.
const PIECE_BYTE: usize = 1 << 18;

/// Text counted before counts are put together.
const BATCH_BYTE: usize = 1 << 24;

/// Longest word; longer ones (encoded data, mostly) are cut.
const WORD_BYTE_MAX: usize = 256;

/// Distinct words kept. Above it the rarest are dropped, which bounds memory on any text.
const WORD_MAX: usize = 1 << 22;

/// What a trained encoding is to be like.
#[derive(Debug, Clone)]
pub struct BpeTrainer {
    /// Tokens in all: special ones, 256 bytes, merges.
    pub n_vocab: usize,
    /// Pairs that occur less often are not merged.
    pub min_count: u64,
    /// Tokens with the first ids, which text never makes.
    pub specials: Vec<String>,
}

#[derive(Debug, PartialEq)]
struct TrainedBpe {
    /// Tokens by id: special ones as they are, others with each byte as `byte_char` spells it.
    vocab: Vec<String>,
    /// Pairs in the order they are to be applied, spelled alike.
    merges: Vec<(String, String)>,
}

impl Tokenizer {
    /// Trains on `texts`, cut by the pre-tokenizer that GGUF files call `pre`; `progress` hears of
    /// tokens made and wanted. The same texts give the same tokenizer on any number of threads.
    pub fn train(
        trainer: &BpeTrainer,
        pre: &str,
        texts: &mut dyn Iterator<Item = &str>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Tokenizer> {
        const FILE: &str = "the new tokenizer";
        let stages = names::find(FILE, pre)?.stages(FILE)?;
        let cut = |text: &str, emit: &mut dyn FnMut(&str)| {
            let done = pre::split(&stages, text, &mut |word| {
                emit(word);
                Ok(())
            });
            // A pattern that gives up on a piece leaves it whole: one long word.
            if done.is_err() {
                emit(text);
            }
        };
        let TrainedBpe { vocab, merges: joins } = trainer.train(texts, &cut, progress)?;
        let ids = vocab.into_iter().zip(0..).collect();
        let joins: Vec<(&str, &str)> =
            joins.iter().map(|(left, right)| (left.as_str(), right.as_str())).collect();
        let mut tokenizer = merges::build([FILE, FILE], &ids, &joins, pre)?;
        for id in 0..trainer.specials.len() as u32 {
            tokenizer.tokens.set_kind(id, Kind::Control);
        }
        if let Codec::Own(encoder) = &mut tokenizer.codec {
            encoder.raw = gguf::finder(FILE, &tokenizer.tokens)?;
        }
        Ok(tokenizer)
    }
}

/// A function that cuts text into words, handing each to the function it is given.
type PreTokenizer<'a> = &'a (dyn Fn(&str, &mut dyn FnMut(&str)) + Sync);

impl BpeTrainer {
    /// Trains on `texts`, cut into words by `pre`; `progress` hears of tokens made and wanted.
    ///
    /// No word crosses from one text to the next. A long text is counted in pieces, cut at a
    /// space between two letters or digits, where no pre-tokenizer known to us has a word across.
    fn train(
        &self,
        texts: &mut dyn Iterator<Item = &str>,
        pre: PreTokenizer<'_>,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<TrainedBpe> {
        self.check()?;
        let words = count_words(texts, pre);
        let mut trainer = Merger::new(self, words);
        while trainer.vocab.len() < self.n_vocab && trainer.merge_next(self.min_count) {
            if trainer.vocab.len().is_multiple_of(64) {
                progress(trainer.vocab.len(), self.n_vocab);
            }
        }
        progress(trainer.vocab.len(), self.n_vocab);
        Ok(TrainedBpe { vocab: trainer.vocab, merges: trainer.merges })
    }

    fn check(&self) -> Result<()> {
        let n_least = self.specials.len() + 256;
        if self.n_vocab < n_least {
            let (n_vocab, n_special) = (self.n_vocab, self.specials.len());
            let problem = format!(
                "a vocabulary of {n_vocab} has no room for {n_special} special tokens and 256 bytes"
            );
            return Err(Error::input(problem, &format!("ask for at least {n_least} tokens")));
        }
        if u32::try_from(self.n_vocab).is_err() {
            let problem = format!("a vocabulary of {} tokens", self.n_vocab);
            return Err(Error::input(problem, "token ids have 32 bits: ask for fewer"));
        }
        let mut seen = std::collections::HashSet::new();
        for special in &self.specials {
            let mut chars = special.chars();
            let is_byte =
                chars.next().is_none_or(|ch| char_byte(ch).is_some()) && chars.next().is_none();
            if is_byte || !seen.insert(special) {
                let problem =
                    format!("the special token {special:?} is empty, a single byte or a duplicate");
                return Err(Error::input(problem, "give every special token a name of its own"));
            }
        }
        Ok(())
    }
}

type Counts = HashMap<Box<[u8]>, u64>;

/// Distinct words with their counts, sorted.
fn count_words(
    texts: &mut dyn Iterator<Item = &str>,
    pre: PreTokenizer<'_>,
) -> Vec<(Box<[u8]>, u64)> {
    let mut counts = Counts::new();
    let mut batch: Vec<&str> = Vec::new();
    let mut n_byte = 0;
    for mut text in texts {
        while !text.is_empty() {
            let (piece, rest) = text.split_at(piece_end(text));
            batch.push(piece);
            n_byte += piece.len();
            text = rest;
            if n_byte >= BATCH_BYTE {
                count_batch(&mut counts, &batch, pre);
                batch.clear();
                n_byte = 0;
            }
        }
    }
    count_batch(&mut counts, &batch, pre);
    let mut words: Vec<_> = counts.into_iter().collect();
    words.par_sort_unstable();
    words
}

fn piece_end(text: &str) -> usize {
    if text.len() <= PIECE_BYTE * 2 {
        return text.len();
    }
    let bytes = text.as_bytes();
    let is_seam = |at: &usize| {
        bytes[*at] == b' '
            && bytes[at - 1].is_ascii_alphanumeric()
            && bytes[at + 1].is_ascii_alphanumeric()
    };
    let seam = (PIECE_BYTE..PIECE_BYTE * 2 - 1).find(is_seam);
    seam.unwrap_or_else(|| text.floor_char_boundary(PIECE_BYTE))
}

fn count_batch(counts: &mut Counts, batch: &[&str], pre: PreTokenizer<'_>) {
    let parts: Vec<Counts> = batch
        .par_iter()
        .map(|piece| {
            let mut counts = Counts::new();
            pre(piece, &mut |word| {
                for word in word.as_bytes().chunks(WORD_BYTE_MAX) {
                    match counts.get_mut(word) {
                        Some(count) => *count += 1,
                        None => drop(counts.insert(word.into(), 1)),
                    }
                }
            });
            counts
        })
        .collect();
    for (word, count) in parts.into_iter().flatten() {
        *counts.entry(word).or_default() += count;
    }
    let mut count_min = 1;
    while counts.len() > WORD_MAX {
        count_min += 1;
        counts.retain(|_, count| *count >= count_min);
    }
}

type Pair = (u32, u32);

/// How often a pair occurs, and the words that may hold it.
#[derive(Default)]
struct Place {
    count: u64,
    words: Vec<u32>,
}

/// A word: how often it occurs, and its tokens from `start` on in the list of all.
struct Word {
    count: u64,
    start: usize,
    len: usize,
}

#[derive(Default)]
struct Merger {
    vocab: Vec<String>,
    ids: HashMap<String, u32>,
    n_special: usize,
    merges: Vec<(String, String)>,
    /// Tokens of all words, one after the other.
    symbols: Vec<u32>,
    words: Vec<Word>,
    places: HashMap<Pair, Place>,
    /// Largest count first, then smallest pair. Counts are upper bounds.
    heap: BinaryHeap<(u64, Reverse<Pair>)>,
}

impl Merger {
    fn new(trainer: &BpeTrainer, words: Vec<(Box<[u8]>, u64)>) -> Merger {
        let mut vocab = trainer.specials.clone();
        let mut chars: Vec<(char, u8)> = (0..=255).map(|byte| (byte_char(byte), byte)).collect();
        chars.sort_unstable();
        let mut byte_ids = [0; 256];
        for (ch, byte) in chars {
            byte_ids[usize::from(byte)] = vocab.len() as u32;
            vocab.push(ch.to_string());
        }
        let ids = vocab.iter().cloned().zip(0..).collect();
        let n_special = trainer.specials.len();
        let mut merger = Merger { n_special, vocab, ids, ..Merger::default() };
        for ((word, count), word_idx) in words.into_iter().zip(0..) {
            let start = merger.symbols.len();
            merger.words.push(Word { count, start, len: word.len() });
            merger.symbols.extend(word.iter().map(|byte| byte_ids[usize::from(*byte)]));
            for pair in merger.symbols[start..].windows(2) {
                add(&mut merger.places, (pair[0], pair[1]), count, word_idx);
            }
        }
        let pairs = merger.places.iter().map(|(pair, place)| (place.count, Reverse(*pair)));
        merger.heap = pairs.collect();
        merger
    }

    /// Merges the most frequent pair; false when none is frequent enough.
    fn merge_next(&mut self, count_min: u64) -> bool {
        while let Some((count, Reverse(pair))) = self.heap.pop() {
            let now = self.places.get(&pair).map_or(0, |place| place.count);
            if now != count {
                if now > 0 {
                    self.heap.push((now, Reverse(pair)));
                }
                continue;
            }
            if count < count_min.max(1) {
                return false;
            }
            let (left, right) = (&self.vocab[pair.0 as usize], &self.vocab[pair.1 as usize]);
            let token = [left.as_str(), right].concat();
            let known = self.ids.get(&token).copied();
            if known.is_some_and(|id| (id as usize) < self.n_special) {
                continue;
            }
            let place = self.places.remove(&pair).unwrap_or_default();
            self.merges.push((left.clone(), right.clone()));
            let id = known.unwrap_or(self.vocab.len() as u32);
            if known.is_none() {
                self.ids.insert(token.clone(), id);
                self.vocab.push(token);
            }
            self.replace(pair, id, place.words);
            return true;
        }
        false
    }

    /// Puts `id` for `pair` in `words`, and keeps counts and heap up to date.
    fn replace(&mut self, pair: Pair, id: u32, mut words: Vec<u32>) {
        words.sort_unstable();
        words.dedup();
        let mut grown: Vec<Pair> = Vec::new();
        for word_idx in words {
            let Word { count, start, len } = &mut self.words[word_idx as usize];
            let (count, symbols) = (*count, &mut self.symbols[*start..*start + *len]);
            let (mut read, mut write) = (0, 0);
            while read < symbols.len() {
                let found = read + 1 < symbols.len() && (symbols[read], symbols[read + 1]) == pair;
                if !found {
                    symbols[write] = symbols[read];
                    (read, write) = (read + 1, write + 1);
                    continue;
                }
                // The neighbour before may itself be a merge of this pass.
                if write > 0 {
                    let before = symbols[write - 1];
                    subtract(&mut self.places, (before, pair.0), count);
                    add(&mut self.places, (before, id), count, word_idx);
                    grown.push((before, id));
                }
                if let Some(&after) = symbols.get(read + 2) {
                    subtract(&mut self.places, (pair.1, after), count);
                    add(&mut self.places, (id, after), count, word_idx);
                    grown.push((id, after));
                }
                symbols[write] = id;
                (read, write) = (read + 2, write + 1);
            }
            *len = write;
        }
        grown.sort_unstable();
        grown.dedup();
        for pair in grown {
            if let Some(place) = self.places.get(&pair).filter(|place| place.count > 0) {
                self.heap.push((place.count, Reverse(pair)));
            }
        }
    }
}

fn add(places: &mut HashMap<Pair, Place>, pair: Pair, count: u64, word: u32) {
    let place = places.entry(pair).or_default();
    place.count += count;
    if place.words.last() != Some(&word) {
        place.words.push(word);
    }
}

/// Takes away from a pair; the one being merged is already gone from `places`.
fn subtract(places: &mut HashMap<Pair, Place>, pair: Pair, count: u64) {
    if let Some(place) = places.get_mut(&pair) {
        place.count -= count;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Special;
    use super::*;
    use std::collections::BTreeMap;

    /// Words are runs without a space, with the space before them.
    fn at_spaces(text: &str, word: &mut dyn FnMut(&str)) {
        let mut start = 0;
        for (at, _) in text.match_indices(' ').filter(|(at, _)| *at > 0) {
            word(&text[start..at]);
            start = at;
        }
        word(&text[start..]);
    }

    fn trainer(n_vocab: usize) -> BpeTrainer {
        BpeTrainer { n_vocab, min_count: 2, specials: vec!["<|end|>".into()] }
    }

    fn train(trainer: &BpeTrainer, texts: &[&str]) -> TrainedBpe {
        trainer.train(&mut texts.iter().copied(), &at_spaces, &mut |_, _| {}).unwrap()
    }

    /// The slow twin: counts every pair of every word again for every merge.
    fn train_slowly(trainer: &BpeTrainer, texts: &[&str]) -> TrainedBpe {
        let mut vocab = trainer.specials.clone();
        let mut bytes: Vec<char> = (0..=255).map(byte_char).collect();
        bytes.sort_unstable();
        vocab.extend(bytes.iter().map(char::to_string));
        let mut words: Vec<Vec<usize>> = Vec::new();
        for text in texts {
            at_spaces(text, &mut |word| {
                let id = |byte: u8| vocab.iter().position(|t| *t == byte_char(byte).to_string());
                words.push(word.bytes().map(|byte| id(byte).unwrap()).collect());
            });
        }
        let mut merges = Vec::new();
        while vocab.len() < trainer.n_vocab {
            let mut counts: BTreeMap<(usize, usize), u64> = BTreeMap::new();
            for word in &words {
                for pair in word.windows(2) {
                    *counts.entry((pair[0], pair[1])).or_default() += 1;
                }
            }
            let spelled = |pair: &(usize, usize)| vocab[pair.0].clone() + &vocab[pair.1];
            counts.retain(|pair, _| !trainer.specials.contains(&spelled(pair)));
            // The first of the largest, in the order of pairs.
            let best = counts.iter().rev().max_by_key(|(_, count)| **count);
            let Some((pair, _)) = best.filter(|(_, count)| **count >= trainer.min_count) else {
                break;
            };
            let (pair, token) = (*pair, spelled(pair));
            merges.push((vocab[pair.0].clone(), vocab[pair.1].clone()));
            let id = vocab.iter().position(|known| *known == token).unwrap_or_else(|| {
                vocab.push(token);
                vocab.len() - 1
            });
            for word in &mut words {
                let mut at = 0;
                while at + 1 < word.len() {
                    if (word[at], word[at + 1]) == pair {
                        word.splice(at..at + 2, [id]);
                    }
                    at += 1;
                }
            }
        }
        TrainedBpe { vocab, merges }
    }

    /// Text of few letters, so that pairs repeat, overlap and tie.
    fn babble(seed: u64, n_word: usize) -> String {
        let mut state = seed;
        let mut draw = |n: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % n
        };
        let mut text = String::new();
        for _ in 0..n_word {
            for _ in 0..=draw(7) {
                text.push(['a', 'a', 'b', 'c', 'ä', '\n'][draw(6) as usize]);
            }
            text.push(' ');
        }
        text
    }

    #[test]
    fn merges_are_those_of_a_full_recount() {
        for seed in 0..40 {
            let (a, b) = (babble(seed, 30 + seed as usize * 9), babble(seed + 99, 17));
            for n_vocab in [257, 258, 270, 340] {
                let trainer = BpeTrainer { min_count: 1 + seed % 3, ..trainer(n_vocab) };
                let (fast, slow) = (train(&trainer, &[&a, &b]), train_slowly(&trainer, &[&a, &b]));
                assert_eq!(fast, slow, "seed {seed}, n_vocab {n_vocab}");
            }
        }
    }

    #[test]
    fn a_token_that_would_spell_a_special_one_is_not_made() {
        let specials = vec!["ab".to_string(), "Ġa".to_string()];
        let trainer = BpeTrainer { n_vocab: 300, min_count: 1, specials };
        let text = "ab abab aab xab abx ab a a a";
        let trained = train(&trainer, &[text]);
        assert_eq!(trained, train_slowly(&trainer, &[text]));
        assert!(trained.vocab[2..].iter().all(|token| token != "ab" && token != "Ġa"));
    }

    #[test]
    fn the_result_does_not_depend_on_threads() {
        // Many pieces, some cut without a seam.
        let long = babble(5, 200_000) + &"b".repeat(PIECE_BYTE * 3);
        let short: Vec<String> = (0..50).map(|seed| babble(seed, 100)).collect();
        let mut texts: Vec<&str> = short.iter().map(String::as_str).collect();
        texts.push(&long);
        let on = |n_thread| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n_thread).build().unwrap();
            pool.install(|| train(&trainer(500), &texts))
        };
        let one = on(1);
        assert_eq!(one.vocab.len(), 500);
        assert_eq!(one, on(2));
        assert_eq!(one, on(3));
    }

    #[test]
    fn every_token_spells_bytes_and_is_there_once() {
        let trained = train(&trainer(400), &[&babble(1, 5000)]);
        let mut seen = std::collections::HashSet::new();
        for (id, token) in trained.vocab.iter().enumerate() {
            assert!(seen.insert(token), "{token:?} twice");
            assert!(id == 0 || token.chars().all(|ch| char_byte(ch).is_some()), "{token:?}");
        }
        let all: Vec<u8> = trained.vocab[1..257]
            .iter()
            .filter_map(|token| char_byte(token.chars().next()?))
            .collect();
        let mut sorted = all.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..=255).collect::<Vec<u8>>());
        for (left, right) in &trained.merges {
            let token = [left.as_str(), right].concat();
            for part in [left, right, &token] {
                assert!(seen.contains(part), "{part:?} of a merge is no token");
            }
        }
    }

    #[test]
    fn bytes_are_spelled_as_gpt2_spells_them() {
        let pairs = [(b' ', 'Ġ'), (b'\n', 'Ċ'), (b'a', 'a'), (0, 'Ā'), (0x7f, 'ġ'), (0xad, 'Ń')];
        for (byte, ch) in pairs {
            assert_eq!((byte_char(byte), char_byte(ch)), (ch, Some(byte)));
        }
        assert_eq!(char_byte(' '), None);
        assert_eq!(char_byte('\u{144}'), None);
    }

    #[test]
    fn empty_and_hostile_texts_train() {
        for texts in [&[][..], &[""], &["", "", " "], &["a"], &["\0\0\0\0"], &["é"]] {
            let trained = train(&trainer(400), texts);
            assert!(trained.vocab.len() >= 257 && trained.vocab.len() < 262);
        }
        // One word far past the limit of a word, without a place to cut.
        let trained = train(&trainer(300), &[&"ä".repeat(400_000)]);
        assert_eq!(trained.vocab.len(), 257 + 8, "doubling up to the 256 bytes of a word");
    }

    #[test]
    fn a_vocabulary_without_room_or_with_bad_specials_is_refused() {
        let message = |n_vocab, specials: &[&str]| {
            let specials = specials.iter().map(|special| special.to_string()).collect();
            let trainer = BpeTrainer { n_vocab, min_count: 1, specials };
            let result = trainer.train(&mut ["a"].into_iter(), &at_spaces, &mut |_, _| {});
            result.unwrap_err().report()
        };
        assert!(message(257, &["<a>", "<b>"]).contains("ask for at least 258 tokens"));
        assert!(message(0, &[]).contains("a vocabulary of 0"));
        for specials in [&["<a>", "<a>"][..], &[""], &["a"], &["Ġ"]] {
            assert!(message(400, specials).contains("name of its own"), "{specials:?}");
        }
    }

    #[test]
    fn progress_ends_at_what_was_made() {
        let mut last = (0, 0);
        let text = babble(3, 100);
        let texts = &mut [text.as_str()].into_iter();
        let trained = trainer(280).train(texts, &at_spaces, &mut |done, all| last = (done, all));
        assert_eq!(last, (trained.unwrap().vocab.len(), 280));
    }

    #[test]
    fn a_trained_tokenizer_gives_text_back_and_knows_its_special_tokens() {
        let trainer = BpeTrainer {
            n_vocab: 300,
            min_count: 2,
            specials: vec!["<|end|>".into(), "<|fim_prefix|>".into()],
        };
        let text = "fn main() { let x = 1; }\nfn main() { let y = 2; }\n".repeat(20);
        let train = || {
            let mut texts = [text.as_str()].into_iter();
            Tokenizer::train(&trainer, "gpt-2", &mut texts, &mut |_, _| {})
        };
        let tokenizer = train().unwrap();
        let ids = tokenizer.encode("fn main() {é", Special::Plain).unwrap();
        assert!(ids.len() < 8, "{ids:?}");
        assert_eq!(tokenizer.decode(&ids, Special::Parse), "fn main() {é");
        assert_eq!(tokenizer.encode("a<|end|>", Special::Parse).unwrap().last(), Some(&0));
        assert!(!tokenizer.encode("a<|end|>", Special::Plain).unwrap().contains(&0));
        assert_eq!(tokenizer.id("<|fim_prefix|>"), Some(1));
        // Through tokenizer.json and GGUF it stays the same.
        let json = tokenizer.to_json().unwrap();
        assert_eq!(train().unwrap().to_json().unwrap(), json);
        let again = Tokenizer::from_json("tokenizer.json", json.as_bytes()).unwrap();
        let through = Tokenizer::from_gguf("m.gguf", tokenizer.to_gguf().unwrap()).unwrap();
        for other in [again, through] {
            for special in [Special::Plain, Special::Parse] {
                let text = "let main = x<|end|> + <|fim_prefix|>";
                let want = tokenizer.encode(text, special).unwrap();
                assert_eq!(other.encode(text, special).unwrap(), want);
            }
        }
    }
}
