//! What a plain n-gram model with a cache of the project gets: the mark that an adapted model has
//! to beat.
//!
//! Bytes are predicted bit by bit, highest first, so the probabilities of the 256 bytes sum to one
//! whatever the parts say. For each bit there are predictions from
//!
//! | part   | what is counted                                                            |
//! |--------|----------------------------------------------------------------------------|
//! | orders | the bit after the last 1 to 6 bytes and the bits of this byte so far       |
//! | word   | the same after the letters of the word so far                              |
//! | match  | what followed the last place where the same six bytes stood                |
//!
//! Each is a probability `p` seen `n` times; a small table learns what such a pair is worth. The
//! logits of all are added with learned weights:
//!
//!     p = sigmoid(sum_i w[i] * logit(p[i]))    w[i] += rate * (bit - p) * logit(p[i])
//!
//! While a document is scored it is learned from too (the cache); after it everything is as before,
//! so no document profits from another one that is held out. Counts lie in a table of bounded size
//! under hashes; a rare context gives way to a new one.
//!
//! Not here: words longer than a line, tokens, anything that generalises.

use std::ops::Range;

/// Lengths of the contexts, in bytes.
const ORDERS: [usize; 5] = [1, 2, 3, 4, 6];
/// Contexts that are counted: the orders, and that of words.
const N_COUNTED: usize = ORDERS.len() + 1;
/// Predictions that are mixed: of each context, of the match, and a constant.
const N_INPUT: usize = N_COUNTED + 2;
/// Weights are chosen by the bits of the byte so far and by the length of the match.
const N_SETS: usize = 256 * N_MATCHED;
const N_MATCHED: usize = 4;

/// Bytes that must be equal before what followed them is looked at.
const MATCH_MIN: usize = 6;
const MATCH_MAX: usize = 32;

/// A count of a context saturates here: newer text weighs more.
const COUNT_MAX: u16 = 15;
/// How a pair of probability and count is put into a table.
const N_LEVELS: usize = 32;
const N_COUNTS: usize = 8;

/// Training text at most whose predictions are mixed: weights need less of it than counts.
const MIXED_BYTES: usize = 1 << 19;
/// Buckets of counts, at most: 32 MiB.
const BUCKETS_MAX: usize = 1 << 20;

/// The counts of half a byte in one context: a check, and a tree of 15 bits. Each has its
/// probability in the upper 12 bits and how often it was seen in the lower 4. Two buckets, of which
/// a context has its choice, lie in one line of the CPU's cache.
type Bucket = [u16; 16];

const NEW: u16 = 1 << 15;

/// A model of bytes; see the header.
pub struct Ngram {
    table: Vec<Bucket>,
    /// What followed, by hash of the bytes before: a place in `text`, plus one.
    heads: Vec<u32>,
    /// Everything that was read.
    text: Vec<u8>,
    mixer: Mixer,
    logits: Vec<f32>,
    /// What scoring changes, to take it back.
    journal: Option<Journal>,
}

#[derive(Clone)]
struct Mixer {
    /// (N_SETS, N_INPUT)
    weights: Vec<[f32; N_INPUT]>,
    /// What a probability that was seen so often is worth: (N_COUNTED, N_COUNTS, N_LEVELS).
    worth: Vec<f32>,
    /// How often the expected bit came, by length of the match.
    trust: [f32; MATCH_MAX + 1],
}

#[derive(Default)]
struct Journal {
    /// One bit for each bucket that was kept.
    kept: Vec<u64>,
    buckets: Vec<(usize, Bucket)>,
    heads: Vec<(usize, u32)>,
}

/// Where a document is being read.
struct Cursor {
    hashes: [u32; N_COUNTED],
    word: u32,
    /// The last eight bytes, the newest lowest.
    last: u64,
    /// Place in the text that is expected to continue here, and bytes before it that are equal.
    expected: usize,
    n_match: usize,
}

fn hash(a: u32, b: u32) -> u32 {
    let x = (a ^ b.wrapping_mul(0x9e37_79b1)).wrapping_mul(0x85eb_ca6b);
    x ^ (x >> 15)
}

/// Logit of a probability in 4096ths.
fn logit_of(n: usize) -> f32 {
    let p = (n as f64 + 0.5) / 4096.0;
    (p / (1.0 - p)).ln() as f32
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

impl Ngram {
    /// Learns from texts, in their order.
    pub fn train<'a>(texts: impl Iterator<Item = &'a str>) -> Ngram {
        let texts: Vec<&str> = texts.collect();
        let n_bytes: usize = texts.iter().map(|text| text.len()).sum();
        let n_buckets = (8 * n_bytes).next_power_of_two().clamp(1 << 14, BUCKETS_MAX);
        let n_heads = n_bytes.next_power_of_two().clamp(1 << 12, 1 << 20);
        let mut worth = Vec::new();
        for level in (0..N_COUNTED * N_COUNTS).flat_map(|_| 0..N_LEVELS) {
            worth.push((level as f32 + 0.5) / N_LEVELS as f32);
        }
        let mixer = Mixer {
            weights: vec![[0.3; N_INPUT]; N_SETS],
            worth,
            trust: std::array::from_fn(|n| 1.0 - 0.5 / (n as f32 + 1.0)),
        };
        let mut model = Ngram {
            table: vec![[0; 16]; n_buckets],
            heads: vec![0; n_heads],
            text: Vec::with_capacity(n_bytes),
            mixer,
            logits: (0..4096).map(logit_of).collect(),
            journal: None,
        };
        let mut n_left = n_bytes;
        for text in texts {
            let is_mixed = n_left <= MIXED_BYTES;
            n_left -= text.len();
            let mut cursor = Cursor::new();
            for byte in text.bytes() {
                match is_mixed {
                    true => drop(model.score(&mut cursor, byte)),
                    false => model.count(&mut cursor, byte),
                }
                model.advance(&mut cursor, byte);
            }
        }
        model
    }

    #[cfg(test)]
    /// Bits that a text costs; what it reads of the text is forgotten afterwards.
    fn bits(&mut self, text: &str) -> f64 {
        self.bits_in(text.as_bytes(), std::slice::from_ref(&(0..text.len())))
    }

    /// Bits that parts of a text cost, each after all that stands before it; the rest is only read.
    /// Ranges ascend and do not overlap.
    pub fn bits_in(&mut self, text: &[u8], ranges: &[Range<usize>]) -> f64 {
        let (n_text, mixer) = (self.text.len(), self.mixer.clone());
        let kept = vec![0; self.table.len() / 64];
        self.journal = Some(Journal { kept, ..Journal::default() });
        let (mut cursor, mut bits, mut ranges) = (Cursor::new(), 0.0, ranges.iter().peekable());
        for (at, byte) in text.iter().copied().enumerate() {
            let cost = self.score(&mut cursor, byte);
            self.advance(&mut cursor, byte);
            while ranges.next_if(|range| range.end <= at).is_some() {}
            if ranges.peek().is_some_and(|range| range.contains(&at)) {
                bits += cost;
            }
        }
        self.text.truncate(n_text);
        self.mixer = mixer;
        let journal = self.journal.take().unwrap_or_default();
        journal.buckets.into_iter().for_each(|(idx, bucket)| self.table[idx] = bucket);
        journal.heads.into_iter().rev().for_each(|(idx, head)| self.heads[idx] = head);
        bits
    }

    /// The buckets of all contexts after the first half of a byte (0 before that is known).
    fn find(&mut self, cursor: &Cursor, half: u32) -> [usize; N_COUNTED] {
        let key = |order: usize| hash(cursor.hashes[order], 32 * order as u32 + half + 1);
        let keys: [u32; N_COUNTED] = std::array::from_fn(key);
        let mask = self.table.len() - 1;
        let firsts = keys.map(|key| hash(key, 0x5bd1) as usize & mask);
        // All at once: none of these waits for the memory of another.
        let checks = firsts.map(|idx| self.table[idx][0]);
        std::array::from_fn(|order| {
            let (first, check) = (firsts[order], (keys[order] >> 16) as u16 | 1);
            if checks[order] == check && self.table[first][0] == check {
                self.keep(first);
                return first;
            }
            self.make(first, check)
        })
    }

    /// The same bucket or the one beside it, whichever has the check or gives way.
    fn make(&mut self, first: usize, check: u16) -> usize {
        let second = first ^ 1;
        let [one, two] = [first, second].map(|idx| self.table[idx]);
        let seen = |bucket: Bucket| bucket[1] & COUNT_MAX;
        let is_second = one[0] != check && (two[0] == check || seen(two) < seen(one));
        let idx = if is_second { second } else { first };
        self.keep(idx);
        if self.table[idx][0] != check {
            self.table[idx] = [NEW; 16];
            self.table[idx][0] = check;
        }
        idx
    }

    /// Remembers a bucket before scoring changes it.
    fn keep(&mut self, idx: usize) {
        if let Some(journal) = &mut self.journal
            && journal.kept[idx / 64] & (1 << (idx % 64)) == 0
        {
            journal.kept[idx / 64] |= 1 << (idx % 64);
            journal.buckets.push((idx, self.table[idx]));
        }
    }

    /// Counts a byte without predicting it.
    fn count(&mut self, cursor: &mut Cursor, byte: u8) {
        for half in 0..2 {
            let (high, bits) = halves(byte, half);
            for idx in self.find(cursor, high) {
                let mut node = 1;
                for at in (0..4).rev() {
                    let bit = (bits >> at) & 1;
                    update(&mut self.table[idx][node], bit);
                    node = 2 * node + bit as usize;
                }
            }
        }
    }

    /// Predicts a byte, then learns it: what it costs, in bits.
    fn score(&mut self, cursor: &mut Cursor, byte: u8) -> f64 {
        let mut cost = 0.0;
        let mut so_far = 1;
        for half in 0..2 {
            let (high, bits) = halves(byte, half);
            let idxs = self.find(cursor, high);
            let mut node = 1;
            for at in (0..4).rev() {
                let bit = (bits >> at) & 1;
                let p = self.bit(cursor, (&idxs, node), so_far, bit);
                cost -= f64::from(if bit == 1 { p } else { 1.0 - p }).log2();
                idxs.iter().for_each(|idx| update(&mut self.table[*idx][node], bit));
                node = 2 * node + bit as usize;
                so_far = 2 * so_far + bit as usize;
            }
        }
        cost
    }

    /// The probability that the next bit is one; learns how good each prediction was.
    fn bit(
        &mut self,
        cursor: &Cursor,
        (idxs, node): (&[usize; N_COUNTED], usize),
        so_far: usize,
        bit: u32,
    ) -> f32 {
        let mut inputs = [0.0; N_INPUT];
        let mut places = [0; N_COUNTED];
        for order in 0..N_COUNTED {
            let count = self.table[idxs[order]][node];
            let (level, n) = (usize::from(count >> 11), usize::from(count & COUNT_MAX));
            let n = n.min(N_COUNTS - 1);
            places[order] = (order * N_COUNTS + n) * N_LEVELS + level;
            let p = self.mixer.worth[places[order]];
            inputs[order] = if n == 0 { 0.0 } else { self.logits[(p * 4095.0) as usize] };
        }
        let (expected, n_match) = self.expected(cursor, so_far);
        if let Some(expected) = expected {
            let logit = self.logits[(self.mixer.trust[n_match] * 4095.0) as usize];
            inputs[N_COUNTED] = if expected == 1 { logit } else { -logit };
        }
        inputs[N_COUNTED + 1] = 0.3;
        let matched = if expected.is_none() { 0 } else { 1 + (n_match / 12).min(N_MATCHED - 2) };
        let weights = &mut self.mixer.weights[matched * 256 + so_far];
        let sum: f32 = weights.iter().zip(&inputs).map(|(weight, input)| weight * input).sum();
        let p = sigmoid(sum.clamp(-11.0, 11.0));
        let error = bit as f32 - p;
        for (weight, input) in weights.iter_mut().zip(&inputs) {
            *weight += RATE * error * input;
        }
        for place in places {
            self.mixer.worth[place] += (bit as f32 - self.mixer.worth[place]) * WORTH_RATE;
        }
        if let Some(expected) = expected {
            let trust = &mut self.mixer.trust[n_match];
            *trust += (f32::from(u8::from(expected == bit)) - *trust) * TRUST_RATE;
        }
        p
    }

    /// The bit that the match expects, unless it was wrong in this byte already, and its length.
    fn expected(&self, cursor: &Cursor, so_far: usize) -> (Option<u32>, usize) {
        if cursor.n_match == 0 {
            return (None, 0);
        }
        let byte = usize::from(self.text[cursor.expected]) | 256;
        let n_known = so_far.ilog2();
        let holds = byte >> (8 - n_known) == so_far;
        let bit = (byte >> (7 - n_known)) & 1;
        (holds.then_some(bit as u32), cursor.n_match)
    }

    /// Advances to the next byte.
    fn advance(&mut self, cursor: &mut Cursor, byte: u8) {
        let is_hit = cursor.n_match > 0 && self.text[cursor.expected] == byte;
        self.text.push(byte);
        cursor.n_match = if is_hit { (cursor.n_match + 1).min(MATCH_MAX) } else { 0 };
        cursor.expected += 1;
        let end = self.text.len();
        cursor.read(byte);
        let idx = cursor.key(MATCH_MIN) as usize & (self.heads.len() - 1);
        let head = self.heads[idx] as usize;
        if cursor.n_match == 0 && head > 0 {
            let equal = |n: &usize| *n < head && self.text[head - 1 - n] == self.text[end - 1 - n];
            let n_equal = (0..MATCH_MAX).take_while(equal).count();
            if n_equal >= MATCH_MIN {
                (cursor.expected, cursor.n_match) = (head, n_equal);
            }
        }
        if let Some(journal) = &mut self.journal {
            journal.heads.push((idx, self.heads[idx]));
        }
        self.heads[idx] = end as u32;
    }
}

const RATE: f32 = 0.003;
const WORTH_RATE: f32 = 0.01;
const TRUST_RATE: f32 = 0.005;

/// Half a byte, and what is known before it: 0, or 16 and the first half.
fn halves(byte: u8, half: u32) -> (u32, u32) {
    let (high, low) = (u32::from(byte >> 4), u32::from(byte & 15));
    if half == 0 { (0, high) } else { (16 + high, low) }
}

/// Steps of a count by how often it was seen, 1 / (n + 1.5), in 65536ths.
const STEPS: [i32; COUNT_MAX as usize + 1] = {
    let mut steps = [0; COUNT_MAX as usize + 1];
    let mut n = 0;
    while n < steps.len() {
        steps[n] = (65536 * 2) / (2 * n as i32 + 3);
        n += 1;
    }
    steps
};

fn update(count: &mut u16, bit: u32) {
    let n = *count & COUNT_MAX;
    let p = i32::from(*count >> 4);
    let target = (bit as i32) * 4095;
    let p = p + (((target - p) * STEPS[usize::from(n)]) >> 16);
    *count = ((p as u16) << 4) | (n + 1).min(COUNT_MAX);
}

impl Cursor {
    fn new() -> Cursor {
        Cursor { hashes: [0; N_COUNTED], word: 0, last: 0, expected: 0, n_match: 0 }
    }

    /// A hash of the last `n` bytes.
    fn key(&self, n: usize) -> u32 {
        let bytes = self.last & (u64::MAX >> (64 - 8 * n));
        (bytes.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32
    }

    /// The contexts after a byte.
    fn read(&mut self, byte: u8) {
        let is_letter = byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 128;
        self.word = if is_letter { hash(self.word, u32::from(byte) + 1) } else { 0 };
        self.last = (self.last << 8) | u64::from(byte);
        for (order, n) in ORDERS.into_iter().enumerate() {
            self.hashes[order] = self.key(n);
        }
        self.hashes[ORDERS.len()] = hash(self.word, byte.into());
    }
}

#[cfg(test)]
mod tests {
    use super::Ngram;
    use crate::source::compress::zstd_bits_per_byte;
    use elapid::Document;
    use std::path::Path;

    /// Sources of ours below a folder of the command crate, by name.
    fn sources(folder: &str) -> Vec<String> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(folder);
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut files: Vec<_> = files.filter(|path| path.is_file()).collect();
        files.sort();
        files.iter().map(|path| std::fs::read_to_string(path).unwrap()).collect()
    }

    fn trained(texts: &[String]) -> Ngram {
        Ngram::train(texts.iter().map(String::as_str))
    }

    #[test]
    fn probabilities_of_all_bytes_sum_to_one_after_any_context() {
        let mut model = trained(&sources("talk")[..2]);
        let contexts =
            ["", "fn ", "    let mut ", "\u{ff}\u{0}", "pub fn new(", "use crate::report"];
        for context in contexts {
            let mut text = context.as_bytes().to_vec();
            let n = text.len();
            text.push(0);
            let mut probability = |byte: u8| {
                text[n] = byte;
                (-model.bits_in(&text, std::slice::from_ref(&(n..n + 1)))).exp2()
            };
            let sum: f64 = (0..=255).map(&mut probability).sum();
            assert!((sum - 1.0).abs() < 1e-5, "{context:?}: {sum}");
            assert!((0..=255).map(probability).all(|p| p > 0.0));
        }
    }

    #[test]
    fn scoring_leaves_no_trace_and_parts_add_up() {
        let texts = sources("talk");
        let mut model = trained(&texts[..3]);
        let [one, two] = [&texts[3], &texts[4]];
        let first = model.bits(one);
        let other = model.bits(two);
        assert_eq!(model.bits(one), first);
        assert_eq!(model.bits(two), other);
        let parts = [0..100, 300..301, 301..900];
        let rest = [100..300, 900..one.len()];
        let sum = [&parts[..], &rest].map(|list| model.bits_in(one.as_bytes(), list));
        assert!((sum[0] + sum[1] - first).abs() < 1e-6, "{sum:?} {first}");
        assert_eq!(model.bits(""), 0.0);
        assert_eq!(model.bits_in(one.as_bytes(), &[]), 0.0);
    }

    #[test]
    fn a_document_is_learned_while_it_is_read() {
        let mut model = Ngram::train([].into_iter());
        let line = "let quantity = warehouse.remaining(section, 17)?;\n";
        let [once, twice] = [1, 2].map(|n| model.bits(&line.repeat(n)));
        assert!(twice - once < 0.2 * once, "{once} {twice}");
        assert!(once < 8.5 * line.len() as f64, "{once}");
    }

    #[test]
    fn it_beats_zstd_with_a_dictionary_on_our_own_sources() {
        let train: Vec<String> = ["run", "talk"].into_iter().flat_map(sources).collect();
        let held_out = sources("source");
        let mut model = trained(&train);
        let bits: f64 = held_out.iter().map(|text| model.bits(text)).sum();
        let ngram = bits / held_out.iter().map(String::len).sum::<usize>() as f64;
        let documents = |texts: &[String]| -> Vec<Document> {
            texts.iter().map(|text| Document::whole("a.rs", text.as_str())).collect()
        };
        let (zstd, _) = zstd_bits_per_byte(&documents(&train), &documents(&held_out)).unwrap();
        println!("n-gram {ngram:.3}, zstd {zstd:.3} bits per byte");
        assert!(ngram < 0.85 * zstd, "n-gram {ngram}, zstd {zstd}");
    }
}
