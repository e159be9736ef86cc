//! Pre-tokenizers: where text is cut into words before pairs are joined.
//!
//! A pre-tokenizer is a list of stages. Each stage is a pattern; it cuts every piece the stage
//! before left into matches and the gaps between them. The patterns of the common families are
//! scanned by hand, about fifty times faster than a backtracking engine:
//!
//! | scanner | pattern, without the common end `\s+(?!\S)`, `\s+`                        |
//! |---------|---------------------------------------------------------------------------|
//! | `Gpt2`  | `'s 't 're ...`, ` ?\p{L}+`, ` ?\p{N}+`, ` ?[^\s\p{L}\p{N}]+`               |
//! | `Words` | `'s ...` in any case, `[^\r\n\p{L}\p{N}]?\p{L}+`, `\p{N}{1,n}`,              |
//! |         | ` ?[^\s\p{L}\p{N}]+[\r\n]*`, `\s*[\r\n]+`                                   |
//! | `Each`  | one character of a class                                                  |
//!
//! Everything else runs as a regular expression. `\s+(?!\S)|\s+` at the end of one is replaced by
//! `\s+` and a step back, which frees most patterns from backtracking: white space before a word
//! leaves its last character to the word.

use std::sync::OnceLock;

use fancy_regex::{Regex, RegexBuilder};

use crate::error::{Error, Result};

/// Classes of characters, as bits.
pub(super) const LETTER: u8 = 1;
pub(super) const NUMBER: u8 = 2;
pub(super) const SPACE: u8 = 4;
pub(super) const MARK: u8 = 8;

pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// One digit at a time.
pub(super) const DIGIT: &str = r"\p{N}";
/// What ends most patterns.
const SPACES: &str = r"\s+(?!\S)|\s+";
/// Steps a backtracking match may take at one place.
const N_BACKTRACK_MAX: usize = 100_000;

/// Bits of every character, a byte each.
fn classes() -> &'static [u8] {
    static TABLE: OnceLock<Vec<u8>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = vec![0_u8; 0x11_0000];
        let classes = [(r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE), (r"\p{M}", MARK)];
        for (pattern, bit) in classes {
            let hir = regex_syntax::parse(pattern).expect("a class of Unicode");
            let regex_syntax::hir::HirKind::Class(regex_syntax::hir::Class::Unicode(class)) =
                hir.kind()
            else {
                panic!("{pattern} is a class");
            };
            for range in class.ranges() {
                let range = range.start() as usize..=range.end() as usize;
                table[range].iter_mut().for_each(|bits| *bits |= bit);
            }
        }
        table
    })
}

struct Scan<'t> {
    bytes: &'t [u8],
    classes: &'static [u8],
}

impl Scan<'_> {
    /// Bits and length of the character at `pos`; none at the end.
    #[inline]
    fn at(&self, pos: usize) -> (u8, usize) {
        let Some(&first) = self.bytes.get(pos) else { return (0, 0) };
        if first < 0x80 {
            return (self.classes[usize::from(first)], 1);
        }
        let tail = |idx: usize| u32::from(self.bytes[pos + idx] & 0x3f);
        // The text is a `str`: the bytes that the first one promises are there.
        let (code, len) = match first {
            ..0xe0 => (u32::from(first & 0x1f) << 6 | tail(1), 2),
            0xe0..0xf0 => (u32::from(first & 0x0f) << 12 | tail(1) << 6 | tail(2), 3),
            _ => (u32::from(first & 0x07) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3), 4),
        };
        (self.classes[code as usize], len)
    }

    /// The end of the run of characters with one of `bits` from `pos`.
    #[inline]
    fn run(&self, mut pos: usize, bits: u8) -> usize {
        loop {
            let (class, len) = self.at(pos);
            if class & bits == 0 {
                return pos;
            }
            pos += len;
        }
    }

    /// The end of the run of characters with none of `bits` from `pos`.
    #[inline]
    fn run_without(&self, mut pos: usize, bits: u8) -> usize {
        loop {
            let (class, len) = self.at(pos);
            if class & bits != 0 || len == 0 {
                return pos;
            }
            pos += len;
        }
    }

    /// The end of `\s+(?!\S)|\s+` from `pos`, where `end` ends the run of white space.
    #[inline]
    fn spaces(&self, pos: usize, end: usize) -> usize {
        if end == self.bytes.len() {
            return end;
        }
        let mut last = end - 1;
        while self.bytes[last] & 0xc0 == 0x80 {
            last -= 1;
        }
        if last > pos { last } else { end }
    }

    /// The length of `'s`, `'re` and the like at `pos`, or zero.
    #[inline]
    fn contraction(&self, pos: usize, case: Case) -> usize {
        if self.bytes[pos] != b'\'' {
            return 0;
        }
        let lower = |idx: usize| {
            let byte = self.bytes.get(pos + idx).copied().unwrap_or(0);
            if case == Case::Exact { byte } else { byte.to_ascii_lowercase() }
        };
        match (lower(1), lower(2)) {
            (b's' | b't' | b'm' | b'd', _) => 2,
            (b'r' | b'v', b'e') | (b'l', b'l') => 3,
            // The long s folds to s.
            (0xc5, 0xbf) if case == Case::Folded => 3,
            _ => 0,
        }
    }

    fn gpt2(&self, pos: usize) -> usize {
        let contraction = self.contraction(pos, Case::Exact);
        if contraction > 0 {
            return pos + contraction;
        }
        let start = pos + usize::from(self.bytes[pos] == b' ');
        let (class, len) = self.at(start);
        if class & LETTER != 0 {
            return self.run(start + len, LETTER);
        }
        if class & NUMBER != 0 {
            return self.run(start + len, NUMBER);
        }
        if class & SPACE == 0 && len > 0 {
            return self.run_without(start + len, LETTER | NUMBER | SPACE);
        }
        self.spaces(pos, self.run(pos, SPACE))
    }

    fn words(&self, pos: usize, rules: Rules) -> usize {
        if let Some(case) = rules.contractions {
            let contraction = self.contraction(pos, case);
            if contraction > 0 {
                return pos + contraction;
            }
        }
        let (class, len) = self.at(pos);
        let byte = self.bytes[pos];
        if class & rules.letters != 0 {
            return self.run(pos + len, rules.letters);
        }
        let is_newline = |byte: &u8| matches!(byte, b'\r' | b'\n');
        if class & (LETTER | NUMBER) == 0 && !is_newline(&byte) {
            let (next, next_len) = self.at(pos + len);
            if next & rules.letters != 0 {
                return self.run(pos + len + next_len, rules.letters);
            }
        }
        if class & NUMBER != 0 {
            return self.numbers(pos, rules.n_digits);
        }
        let start = pos + usize::from(byte == b' ');
        let (class, len) = self.at(start);
        let words = rules.letters | LETTER | NUMBER | SPACE;
        if class & words == 0 && len > 0 {
            let mut end = self.run_without(start + len, words);
            while self.bytes.get(end).is_some_and(|byte| rules.tail.contains(byte)) {
                end += 1;
            }
            return end;
        }
        let end = self.run(pos, SPACE);
        match self.bytes[pos..end].iter().rposition(is_newline) {
            Some(last) => pos + last + 1,
            None => self.spaces(pos, end),
        }
    }

    fn numbers(&self, mut pos: usize, n_max: usize) -> usize {
        for _ in 0..n_max {
            let (class, len) = self.at(pos);
            if class & NUMBER == 0 {
                break;
            }
            pos += len;
        }
        pos
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Case {
    Exact,
    /// ASCII letters in any case.
    Any,
    /// As Unicode folds them.
    Folded,
}

/// The members of the family of Llama 3.
#[derive(Clone, Copy, Debug)]
struct Rules {
    contractions: Option<Case>,
    /// What a word is made of.
    letters: u8,
    /// Digits of one word.
    n_digits: usize,
    /// What may follow punctuation.
    tail: &'static [u8],
}

enum Scanner {
    Gpt2,
    Words(Rules),
    Each(u8),
    /// An expression without its last alternatives, which are put back by a step.
    Stepping(Regex),
    Plain(Regex),
}

pub(super) struct Stage {
    /// As tokenizer.json spells it.
    pub(super) pattern: String,
    scanner: Scanner,
}

/// Reads a pattern as one of the family of Llama 3.
fn rules(pattern: &str) -> Option<Rules> {
    let folded = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|";
    let any = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|";
    let (contractions, rest) = match (pattern.strip_prefix(folded), pattern.strip_prefix(any)) {
        (Some(rest), _) => (Some(Case::Folded), rest),
        (_, Some(rest)) => (Some(Case::Any), rest),
        _ => (None, pattern),
    };
    let rest = rest.strip_prefix(r"[^\r\n\p{L}\p{N}]?")?;
    let (letters, rest) = match rest.strip_prefix(r"\p{L}+|\p{N}") {
        Some(rest) => (LETTER, rest),
        None => (LETTER | MARK, rest.strip_prefix(r"[\p{L}\p{M}]+|\p{N}")?),
    };
    let (digits, rest) = rest.split_once("| ?")?;
    let n_digits = match digits {
        "" | "{1}" => 1,
        "{1,3}" => 3,
        "+" => usize::MAX,
        _ => return None,
    };
    let others = if letters == LETTER { r"[^\s\p{L}\p{N}]+" } else { r"[^\s\p{L}\p{M}\p{N}]+" };
    let (tail, rest) = rest.strip_prefix(others)?.split_once(r"|\s*[\r\n]+|")?;
    let tail: &[u8] = match tail {
        r"[\r\n]*" => b"\r\n",
        r"[\r\n/]*" => b"\r\n/",
        _ => return None,
    };
    (rest == SPACES).then_some(Rules { contractions, letters, n_digits, tail })
}

impl Stage {
    /// Prepares a pattern; `file` is where it stands.
    pub(super) fn new(file: &str, pattern: &str) -> Result<Stage> {
        let scanner = if pattern == GPT2 || pattern == GPT2.trim_end_matches(r"|\s+") {
            Scanner::Gpt2
        } else if pattern == DIGIT {
            Scanner::Each(NUMBER)
        } else if let Some(rules) = rules(pattern) {
            Scanner::Words(rules)
        } else if let Some(start) = pattern.strip_suffix(SPACES)
            && start.ends_with(r"[\r\n]+|")
        {
            // Lookahead at one character is an intersection of classes.
            let start = start
                .replace(r"((?=[\p{L}])([^a-z]))", r"[\p{L}&&[^a-z]]")
                .replace(r"((?=[\p{L}])([^A-Z]))", r"[\p{L}&&[^A-Z]]");
            Scanner::Stepping(compile(file, &format!(r"{start}\s+"))?)
        } else {
            Scanner::Plain(compile(file, pattern)?)
        };
        Ok(Stage { pattern: pattern.into(), scanner })
    }

    fn split(&self, text: &str, emit: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        let scan = Scan { bytes: text.as_bytes(), classes: classes() };
        let mut pos = 0;
        match &self.scanner {
            Scanner::Gpt2 => return each_word(text, emit, |pos| scan.gpt2(pos)),
            Scanner::Words(rules) => return each_word(text, emit, |pos| scan.words(pos, *rules)),
            Scanner::Each(bits) => {
                return each_word(text, emit, |pos| match scan.at(pos) {
                    (class, len) if class & bits != 0 => pos + len,
                    _ => scan.run_without(pos, *bits),
                });
            }
            Scanner::Stepping(regex) => {
                let find = |pos| regex.find_from_pos(text, pos).map_err(|error| too_hard(&error));
                while let Some(found) = find(pos)?.filter(|found| !found.as_str().is_empty()) {
                    let (start, end) = (found.start(), found.end());
                    if start > pos {
                        emit(&text[pos..start])?;
                    }
                    let is_spaces = scan.run(start, SPACE) >= end;
                    let ends_line = matches!(text.as_bytes()[end - 1], b'\r' | b'\n');
                    let end = if is_spaces && !ends_line { scan.spaces(start, end) } else { end };
                    emit(&text[start..end])?;
                    pos = end;
                }
            }
            Scanner::Plain(regex) => {
                for found in regex.find_iter(text) {
                    let found = found.map_err(|error| too_hard(&error))?;
                    if found.start() > pos {
                        emit(&text[pos..found.start()])?;
                    }
                    if !found.as_str().is_empty() {
                        emit(found.as_str())?;
                    }
                    pos = found.end();
                }
            }
        }
        if pos < text.len() { emit(&text[pos..]) } else { Ok(()) }
    }
}

/// Emits words one after the other; `end` gives the end of the one at a place.
#[inline]
fn each_word(
    text: &str,
    emit: &mut dyn FnMut(&str) -> Result<()>,
    end: impl Fn(usize) -> usize,
) -> Result<()> {
    let mut pos = 0;
    while pos < text.len() {
        let end = end(pos);
        emit(&text[pos..end])?;
        pos = end;
    }
    Ok(())
}

fn too_hard(error: &fancy_regex::Error) -> Error {
    let problem = format!("the pre-tokenizer's expression gave up on this text: {error}");
    Error::input(problem, "the expression backtracks without end; use another tokenizer")
}

fn compile(file: &str, pattern: &str) -> Result<Regex> {
    RegexBuilder::new(pattern).backtrack_limit(N_BACKTRACK_MAX).build().map_err(|error| {
        let problem = format!("the pre-tokenizer's expression {pattern:?} is invalid: {error}");
        let hint = "the file is damaged, or its expression uses unsupported syntax";
        Error::format(file, problem, hint)
    })
}

/// Cuts `text` by all stages in turn.
pub(super) fn split(
    stages: &[Stage],
    text: &str,
    emit: &mut dyn FnMut(&str) -> Result<()>,
) -> Result<()> {
    match stages {
        [] => emit(text),
        [last] => last.split(text, emit),
        [first, rest @ ..] => first.split(text, &mut |piece| split(rest, piece, emit)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Characters that end runs, begin contractions, fold, combine or are numbers of odd kinds.
    const ODD: [char; 40] = [
        'a', 'b', 'S', 's', 'T', 'r', 'e', 'l', 'L', 'd', '\'', ' ', ' ', ' ', '\n', '\r', '\t',
        '1', '2', '½', '٣', 'é', 'ſ', 'ß', '中', '가', '\u{301}', '\u{a0}', '\u{3000}', '\u{85}',
        '/', '.', '!', '_', '🚀', '\u{200d}', 'Ǆ', 'ʰ', 'Ⅷ', '\u{e000}',
    ];

    fn draw(seed: &mut u64, n: usize) -> usize {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (*seed >> 33) as usize % n
    }

    fn cut(stage: &Stage, text: &str) -> Vec<String> {
        let mut list = Vec::new();
        stage
            .split(text, &mut |piece| {
                list.push(piece.to_string());
                Ok(())
            })
            .unwrap();
        list
    }

    #[test]
    fn scanners_cut_where_the_expressions_do() {
        let mut patterns: Vec<&str> = super::super::names::patterns();
        let start = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?";
        let folded = [
            r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*",
            r"[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n/]*",
        ];
        let folded = folded.map(|middle| format!(r"{start}{middle}|\s*[\r\n]+|{SPACES}"));
        patterns.extend(folded.iter().map(String::as_str));
        patterns.push(GPT2);
        let mut n_by_hand = 0;
        for pattern in patterns {
            let stage = Stage::new("a test", pattern).unwrap();
            if matches!(stage.scanner, Scanner::Plain(_)) {
                continue;
            }
            n_by_hand += 1;
            let plain = Stage {
                pattern: String::new(),
                scanner: Scanner::Plain(compile("a test", pattern).unwrap()),
            };
            let mut seed = 7;
            for _ in 0..4000 {
                let n = draw(&mut seed, 14);
                let text: String = (0..n).map(|_| ODD[draw(&mut seed, ODD.len())]).collect();
                assert_eq!(cut(&stage, &text), cut(&plain, &text), "{pattern} on {text:?}");
            }
        }
        assert!(n_by_hand >= 8, "only {n_by_hand} patterns are scanned by hand");
    }

    #[test]
    fn empty_matches_cut_and_leave_nothing_out() {
        let stage = Stage::new("a test", r"(?=(\d{3})+(?!\d))").unwrap();
        assert_eq!(cut(&stage, "1234567"), ["1", "234", "567"]);
    }

    #[test]
    fn an_expression_without_end_is_an_error_and_not_a_wait() {
        let stage = Stage::new("a test", r"(?:(a+)+(?!a))+$").unwrap();
        let text = "a".repeat(5000) + "b";
        assert!(stage.split(&text, &mut |_| Ok(())).is_err());
        assert!(Stage::new("a test", "(").is_err());
    }
}
