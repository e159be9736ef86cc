//! Tokens that are found in text before it is cut into words: special and added ones.
//!
//! Two rules, because two worlds must get their ids:
//!
//! - tokenizer.json: the leftmost, of those the longest. A token may take the white space beside
//!   it (`lstrip`, `rstrip`) and is looked for before or after normalisation. Special tokens that
//!   are to stay text are stepped over.
//! - GGUF, after llama.cpp: the longest token first, everywhere, then the next. Control tokens are
//!   looked for only on request, those a user defined always.
//!
//! Not here: `single_word` tokens, which no model we know has; `foreign.rs` takes such files.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use aho_corasick::{AhoCorasick, AhoCorasickKind, Match, MatchKind};
use serde::Deserialize;

use super::Special;
use crate::error::{Error, Result};

/// Longer tokens are not looked for.
pub(super) const LEN_MAX: usize = 4096;
/// Bytes of all tokens up to which their automaton may be large.
const LEN_FAST_MAX: usize = 1 << 14;

/// A token to look for, as tokenizer.json describes it.
#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct AddedToken {
    pub(super) id: u32,
    #[serde(rename = "content")]
    pub(super) text: String,
    #[serde(rename = "special")]
    pub(super) is_special: bool,
    pub(super) single_word: bool,
    pub(super) normalized: bool,
    pub(super) lstrip: bool,
    pub(super) rstrip: bool,
}

/// Which of several tokens that could stand at a place does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// The leftmost, of those the longest.
    Leftmost,
    /// The longest of the whole text.
    Longest,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Part {
    Text(usize, usize),
    Token(u32),
}

pub(super) struct Finder {
    search: AhoCorasick,
    tokens: Vec<AddedToken>,
    order: Order,
}

impl Finder {
    /// Nothing to look for is no finder; `file` is for errors.
    pub(super) fn new(
        file: &str,
        order: Order,
        mut tokens: Vec<AddedToken>,
    ) -> Result<Option<Finder>> {
        tokens.retain(|token| (1..=LEN_MAX).contains(&token.text.len()));
        if tokens.is_empty() {
            return Ok(None);
        }
        let kind = match order {
            Order::Leftmost => MatchKind::LeftmostLongest,
            Order::Longest => MatchKind::Standard,
        };
        let texts = tokens.iter().map(|token| token.text.as_bytes());
        let len_all: usize = texts.clone().map(<[u8]>::len).sum();
        // The fast automaton takes a row of a table per byte of the tokens.
        let automaton = match len_all {
            0..LEN_FAST_MAX => AhoCorasickKind::DFA,
            _ => AhoCorasickKind::ContiguousNFA,
        };
        let builder = AhoCorasick::builder().match_kind(kind).kind(Some(automaton)).build(texts);
        let search = builder.map_err(|error| {
            let problem = format!("{} special tokens cannot be indexed: {error}", tokens.len());
            Error::format(file, problem, "the file is damaged, or its special tokens are too long")
        })?;
        Ok(Some(Finder { search, tokens, order }))
    }

    /// Cuts `text` into tokens and what is between them.
    pub(super) fn parts(&self, text: &str, special: Special) -> Vec<Part> {
        match self.order {
            Order::Leftmost => self.leftmost(text, special),
            Order::Longest => self.longest(text, special),
        }
    }

    fn is_text(&self, token: &AddedToken, special: Special) -> bool {
        token.is_special && special == Special::Plain
    }

    fn leftmost(&self, text: &str, special: Special) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut done = 0;
        for found in self.search.find_iter(text) {
            let token = &self.tokens[found.pattern()];
            if self.is_text(token, special) {
                continue;
            }
            let (mut start, mut end) = (found.start(), found.end());
            if token.lstrip {
                start = text[..start].trim_end().len().max(done);
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if done < start {
                parts.push(Part::Text(done, start));
            }
            parts.push(Part::Token(token.id));
            done = end;
        }
        if done < text.len() {
            parts.push(Part::Text(done, text.len()));
        }
        parts
    }

    fn longest(&self, text: &str, special: Special) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut done = 0;
        let mut batch: Vec<Match> = Vec::new();
        let mut batch_end = 0;
        for found in self.search.find_overlapping_iter(text) {
            if self.is_text(&self.tokens[found.pattern()], special) {
                continue;
            }
            // Matches come by their ends: from here on none begins before the batch's end.
            if found.end() >= batch_end + self.search.max_pattern_len() {
                self.settle(&mut batch, &mut done, &mut parts);
            }
            batch.push(found);
            batch_end = found.end();
        }
        self.settle(&mut batch, &mut done, &mut parts);
        if done < text.len() {
            parts.push(Part::Text(done, text.len()));
        }
        parts
    }

    /// Takes the longest of a batch first, and of equals the one with the lower id.
    fn settle(&self, batch: &mut Vec<Match>, done: &mut usize, parts: &mut Vec<Part>) {
        batch.sort_by_key(|found| (Reverse(found.len()), found.pattern(), found.start()));
        let mut taken: BTreeMap<usize, Match> = Default::default();
        for found in batch.drain(..) {
            let before = taken.range(..found.end()).next_back();
            if before.is_none_or(|(_, before)| before.end() <= found.start()) {
                taken.insert(found.start(), found);
            }
        }
        for found in taken.into_values() {
            if *done < found.start() {
                parts.push(Part::Text(*done, found.start()));
            }
            parts.push(Part::Token(self.tokens[found.pattern()].id));
            *done = found.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, text: &str) -> AddedToken {
        AddedToken { id, text: text.into(), ..AddedToken::default() }
    }

    fn finder(order: Order, tokens: Vec<AddedToken>) -> Finder {
        Finder::new("a test", order, tokens).unwrap().unwrap()
    }

    #[test]
    fn the_leftmost_or_the_longest_token_is_taken() {
        let tokens = || vec![token(1, "ab"), token(2, "bcd"), token(3, "a")];
        let parts = finder(Order::Leftmost, tokens()).parts("abcd", Special::Parse);
        assert_eq!(parts, [Part::Token(1), Part::Text(2, 4)]);
        let parts = finder(Order::Longest, tokens()).parts("abcdab", Special::Parse);
        assert_eq!(parts, [Part::Token(3), Part::Token(2), Part::Token(1)]);
    }

    /// One token after the other, each wherever there is still text: what llama.cpp does.
    fn slow(tokens: &[AddedToken], text: &str) -> Vec<Part> {
        let mut order: Vec<&AddedToken> = tokens.iter().collect();
        order.sort_by_key(|token| Reverse(token.text.len()));
        let mut parts = vec![Part::Text(0, text.len())];
        for token in order {
            let mut next = Vec::new();
            for part in parts {
                let Part::Text(mut from, to) = part else {
                    next.push(part);
                    continue;
                };
                while let Some(at) = text[from..to].find(&token.text) {
                    if at > 0 {
                        next.push(Part::Text(from, from + at));
                    }
                    next.push(Part::Token(token.id));
                    from += at + token.text.len();
                }
                if from < to {
                    next.push(Part::Text(from, to));
                }
            }
            parts = next;
        }
        parts
    }

    #[test]
    fn longest_first_is_one_token_after_the_other() {
        let texts = ["aa", "aaa", "aba", "b", "cab", "abcab"];
        let tokens: Vec<_> = texts.iter().zip(1..).map(|(text, id)| token(id, text)).collect();
        let finder = finder(Order::Longest, tokens.clone());
        let mut seed = 3_u64;
        for _ in 0..3000 {
            let mut text = String::new();
            for _ in 0..(seed >> 40) % 40 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text.push(char::from(b'a' + (seed >> 33) as u8 % 4));
            }
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            assert_eq!(finder.parts(&text, Special::Parse), slow(&tokens, &text), "{text}");
        }
    }

    #[test]
    fn special_tokens_stay_text_on_request_and_others_do_not() {
        let special = AddedToken { is_special: true, ..token(1, "<s>") };
        for order in [Order::Leftmost, Order::Longest] {
            let finder = finder(order, vec![special.clone(), token(2, "<t>")]);
            let parts = finder.parts("<s><t>", Special::Plain);
            assert_eq!(parts, [Part::Text(0, 3), Part::Token(2)]);
        }
    }

    #[test]
    fn a_token_takes_the_white_space_it_asks_for() {
        let strips = AddedToken { lstrip: true, rstrip: true, ..token(1, "<m>") };
        let parts =
            finder(Order::Leftmost, vec![strips]).parts("a  <m>\n b <m><m>", Special::Parse);
        let want = [Part::Text(0, 1), Part::Token(1), Part::Text(8, 9), Part::Token(1)];
        assert_eq!(parts[..4], want);
        assert_eq!(parts[4..], [Part::Token(1)]);
    }
}
