//! Changes bytes as damage and malice do, and the same way again: the n-th change of a target is a
//! function of its name, n and the seeds.
//!
//! | change                                 | where                                            |
//! |----------------------------------------|--------------------------------------------------|
//! | a bit, a byte, u16, u32, u64           | anywhere, mostly in the header                   |
//! | cut, insert, delete, double a block    | anywhere                                         |
//! | the start of one seed, end of another  |                                                  |
//! | words and values by others             | text and JSON                                    |
//! | keys deleted, doubled                  | JSON, also in a container: its lengths then fit   |
//!
//! Up to four changes are made at once. Not here: what is done with the result (`targets.rs`).

use crate::tensor::rng::Rng;
use std::ops::Range;

/// What the bytes of a target are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A header of numbers and names.
    Gguf,
    /// A length, a JSON header, data.
    SafeTensors,
    /// Files, a JSON manifest, a trailer with its place.
    Package,
    /// JSON; behind a zero byte something else may follow.
    Json,
    /// Words.
    Text,
}

/// A seed and the number of its first bytes that decide most.
pub struct Seed {
    /// File name.
    pub name: String,
    /// Content.
    pub data: Vec<u8>,
    n_head: usize,
}

impl Seed {
    /// Of a kind.
    pub fn new(kind: Kind, name: String, data: Vec<u8>) -> Seed {
        let n_head = match kind {
            Kind::SafeTensors => json_range(kind, &data).map(|range| range.end),
            // Tensors are the larger part of our seeds; 3 KiB hold all else but vocabularies.
            Kind::Gguf => Some(3 << 10),
            _ => None,
        };
        let n_head = n_head.unwrap_or(data.len()).min(data.len());
        Seed { name, data, n_head }
    }
}

/// Random numbers, one after the other.
struct Draw {
    rng: Rng,
    n: u64,
}

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        self.n += 1;
        self.rng.below(self.n, bound.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// The n-th change of a target: the seed it came from, and the bytes.
pub fn mutate(target: &str, kind: Kind, seeds: &[Seed], n: u64) -> (usize, Vec<u8>) {
    let stream = target.bytes().fold(0u64, |sum, byte| sum * 31 + u64::from(byte));
    let mut draw = Draw { rng: Rng::new(stream, n), n: 0 };
    let idx = draw.below(seeds.len());
    let mut data = seeds[idx].data.clone();
    let n_changes = [1, 1, 1, 1, 2, 2, 3, 4][draw.below(8)];
    for _ in 0..n_changes {
        let other = draw.pick(seeds);
        let is_text = matches!(kind, Kind::Json | Kind::Text);
        match draw.below(if is_text { 4 } else { 8 }) {
            0 => change_bytes(&mut draw, &mut data, seeds[idx].n_head),
            1 => change_blocks(&mut draw, &mut data, other),
            2 if kind == Kind::Text => change_words(&mut draw, &mut data, &other.data),
            2 | 3 if kind != Kind::Gguf => change_inside(&mut draw, kind, &mut data),
            _ => change_number(&mut draw, &mut data, seeds[idx].n_head),
        }
    }
    (idx, data)
}

/// A place, seven times out of eight in the header.
fn place(draw: &mut Draw, n_bytes: usize, n_head: usize) -> usize {
    let n = if draw.below(8) > 0 { n_head.min(n_bytes) } else { n_bytes };
    draw.below(n)
}

fn change_bytes(draw: &mut Draw, data: &mut [u8], n_head: usize) {
    if data.is_empty() {
        return;
    }
    const MARKS: &[u8] = b"\"\\{}[](),:;-+.eE \n\t\0%|0919\xff\x80\xc3";
    let at = place(draw, data.len(), n_head);
    data[at] = match draw.below(3) {
        0 => data[at] ^ (1 << draw.below(8)),
        1 => draw.below(256) as u8,
        _ => *draw.pick(MARKS),
    };
}

/// A little-endian number in place of the bytes that are there.
fn change_number(draw: &mut Draw, data: &mut [u8], n_head: usize) {
    let n_file = data.len() as u64;
    let n_bytes = *draw.pick(&[2, 4, 4, 8, 8, 8]);
    if data.len() < n_bytes {
        return;
    }
    let at = place(draw, data.len() - n_bytes + 1, n_head);
    let place = &mut data[at..at + n_bytes];
    let old = place.iter().rev().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
    let numbers = [
        0,
        1,
        2,
        1 << 31,
        u64::from(u32::MAX),
        1 << 32,
        i64::MAX as u64,
        1 << 63,
        u64::MAX,
        n_file,
        n_file + 1,
        old.wrapping_add(1),
        old.wrapping_sub(1),
        old << 1,
        draw.below(40) as u64,
        1 << draw.below(64),
    ];
    let number = draw.pick(&numbers).to_le_bytes();
    place.copy_from_slice(&number[..n_bytes]);
}

fn change_blocks(draw: &mut Draw, data: &mut Vec<u8>, other: &Seed) {
    let at = draw.below(data.len() + 1);
    let n = (1usize << draw.below(10)).min(data.len() - at);
    match draw.below(5) {
        0 => data.truncate(at),
        1 => {
            let byte = draw.below(256) as u8;
            data.splice(at..at, std::iter::repeat_n(byte, n.min(64)));
        }
        2 => drop(data.drain(at..at + n)),
        3 => {
            let block = data[at..at + n].to_vec();
            let to = draw.below(data.len() + 1);
            data.splice(to..to, block);
        }
        _ => {
            let from = draw.below(other.data.len() + 1);
            data.truncate(at);
            data.extend(&other.data[from..]);
        }
    }
}

/// Runs of letters and digits, and what stands in quotes.
fn words(data: &[u8]) -> Vec<Range<usize>> {
    let (mut list, mut at) = (Vec::new(), 0);
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    while at < data.len() {
        let begin = at;
        if data[at] == b'"' {
            at = value_end(data, at);
        } else if is_word(data[at]) {
            at += data[at..].iter().take_while(|&&byte| is_word(byte)).count();
        } else {
            at += 1;
            continue;
        }
        list.push(begin..at);
    }
    list
}

/// Puts a word of another text, or one of ours, in the place of a word.
fn change_words(draw: &mut Draw, data: &mut Vec<u8>, other: &[u8]) {
    const WORDS: &[&str] = &[
        "loop",
        "messages",
        "-1",
        "1e308",
        "9223372036854775807",
        "99999999",
        "none",
        "range",
        "()",
        "[0]",
        "{}",
        "[::-1]",
        "|tojson",
        "|length",
        "*",
        "**",
        "%",
        "//",
        "~",
        "not",
        "in",
        "is",
        "namespace",
        "endif",
        "endfor",
        "for",
        "if",
        "else",
        "set",
        "macro",
        "call",
        "-%}",
        "{%-",
        "{{",
        "}}",
        "{#",
        "'",
        "strftime_now",
        "raise_exception",
        "x",
        "self",
        "caller",
        "break",
    ];
    let list = words(data);
    if list.is_empty() {
        return;
    }
    let at = draw.pick(&list).clone();
    let theirs = words(other);
    let new = match draw.below(3) {
        0 if !theirs.is_empty() => &other[draw.pick(&theirs).clone()],
        _ => draw.pick(WORDS).as_bytes(),
    };
    let new = new.to_vec();
    data.splice(at, new);
}

/// Where the value that begins at `at` ends.
fn value_end(data: &[u8], at: usize) -> usize {
    let (mut depth, mut in_string, mut is_escaped) = (0, false, false);
    for (idx, &byte) in data.iter().enumerate().skip(at) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => {
                in_string = !in_string;
                if !in_string && depth == 0 {
                    return idx + 1;
                }
            }
            _ if in_string => {}
            b'[' | b'{' => depth += 1,
            b']' | b'}' if depth == 0 => return idx,
            b']' | b'}' => {
                depth -= 1;
                if depth == 0 {
                    return idx + 1;
                }
            }
            b',' if depth == 0 => return idx,
            _ => {}
        }
    }
    data.len()
}

/// Keys of JSON with their values, and these values.
pub fn pairs(json: &[u8]) -> Vec<(Range<usize>, Range<usize>)> {
    let mut list = Vec::new();
    for word in words(json).into_iter().filter(|word| json[word.start] == b'"') {
        let rest = &json[word.end..];
        let n_blank = rest.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
        if rest.get(n_blank) == Some(&b':') {
            let from = word.end + n_blank + 1;
            let blank = json[from..].iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            let value = from + blank..value_end(json, from + blank);
            list.push((word.start..value.end, value));
        }
    }
    list
}

fn change_json(draw: &mut Draw, json: &mut Vec<u8>) {
    const VALUES: &[&str] = &[
        "null",
        "true",
        "false",
        "-1",
        "0",
        "1",
        "2",
        "1.5",
        "1e308",
        "1e-40",
        "\"x\"",
        "\"\"",
        "[]",
        "{}",
        "[0]",
        "[null]",
        "{\"type\":\"x\"}",
        "4294967296",
        "18446744073709551615",
        "9007199254740993",
        "65537",
        "\"\\ud83d\\ude00\"",
        "Infinity",
        "3",
        "7",
        "1024",
    ];
    let list = pairs(json);
    if list.is_empty() {
        return;
    }
    let (pair, value) = draw.pick(&list).clone();
    match draw.below(8) {
        0 => {
            // The comma after it goes too, or the object would be broken every time.
            let comma = json.get(pair.end) == Some(&b',');
            drop(json.drain(pair.start..pair.end + usize::from(comma)));
        }
        1 => {
            let mut copy = json[pair.clone()].to_vec();
            copy.push(b',');
            json.splice(pair.start..pair.start, copy);
        }
        2 => {
            let (_, other) = draw.pick(&list).clone();
            let other = json[other].to_vec();
            json.splice(value, other);
        }
        3 => {
            // A value inside the value: an element of a list, a word.
            let inner = words(&json[value.clone()]);
            if !inner.is_empty() {
                let inner = draw.pick(&inner).clone();
                let range = value.start + inner.start..value.start + inner.end;
                json.splice(range, draw.pick(VALUES).bytes());
            }
        }
        _ => drop(json.splice(value, draw.pick(VALUES).bytes())),
    }
}

/// Where JSON lies in bytes of a kind.
fn json_range(kind: Kind, data: &[u8]) -> Option<Range<usize>> {
    let number = |at: usize| {
        let bytes = data.get(at..at.checked_add(8)?)?.try_into().ok()?;
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    let range = match kind {
        Kind::SafeTensors => 8..number(0)?.checked_add(8)?,
        Kind::Package => {
            let trailer = data.len().checked_sub(64)?;
            number(trailer)?..number(trailer)?.checked_add(number(trailer + 8)?)?
        }
        Kind::Json => 0..data.iter().position(|&byte| byte == 0).unwrap_or(data.len()),
        Kind::Gguf | Kind::Text => return None,
    };
    (range.start <= range.end && range.end <= data.len()).then_some(range)
}

/// Changes the JSON of a container and makes its lengths fit.
fn change_inside(draw: &mut Draw, kind: Kind, data: &mut Vec<u8>) {
    let Some(range) = json_range(kind, data) else { return };
    let mut json = data[range.clone()].to_vec();
    change_json(draw, &mut json);
    let n_json = (json.len() as u64).to_le_bytes();
    match kind {
        Kind::SafeTensors => {
            data.splice(range, json);
            data[..8].copy_from_slice(&n_json);
        }
        Kind::Package => {
            json.resize(json.len().next_multiple_of(64), 0);
            let trailer = data.len() - 64;
            data.splice(range.start..trailer, json);
            let trailer = data.len() - 64;
            data[trailer + 8..trailer + 16].copy_from_slice(&n_json);
        }
        _ => drop(data.splice(range, json)),
    }
}
