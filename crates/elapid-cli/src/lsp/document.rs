//! Texts that are open in an editor, and places in them.
//!
//! The protocol counts lines from 0 and columns in the units of an encoding, which client and
//! server agree on. Lines end with `\n`, `\r\n` or `\r`. A place behind the end of a line or of the
//! text is that end; one within a character is its start.

use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;

/// What columns count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    Utf8,
    Utf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Position {
    pub line: u32,
    pub character: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Span {
    pub start: Position,
    pub end: Position,
}

/// A piece of the text that is replaced; the whole text where there is no range.
#[derive(Deserialize)]
pub struct Change {
    range: Option<Span>,
    text: String,
}

impl Encoding {
    /// Units of a text.
    pub fn length(self, text: &str) -> u32 {
        let n_units = match self {
            Encoding::Utf8 => text.len(),
            Encoding::Utf16 => text.chars().map(char::len_utf16).sum(),
        };
        u32::try_from(n_units).unwrap_or(u32::MAX)
    }

    /// The byte of a text that a place is at.
    pub fn offset(self, text: &str, place: Position) -> usize {
        let (bytes, mut start) = (text.as_bytes(), 0);
        for _ in 0..place.line {
            let Some(at) = text[start..].find(['\n', '\r']) else { return text.len() };
            let is_pair = bytes[start + at..].starts_with(b"\r\n");
            start += at + if is_pair { 2 } else { 1 };
        }
        let line = &text[start..];
        let line = &line[..line.find(['\n', '\r']).unwrap_or(line.len())];
        let mut n_left = place.character;
        for (at, ch) in line.char_indices() {
            let n_units = self.length(ch.encode_utf8(&mut [0; 4]));
            if n_left < n_units {
                return start + at;
            }
            n_left -= n_units;
        }
        start + line.len()
    }

    pub fn range(self, text: &str, span: Span) -> Range<usize> {
        let (start, end) = (self.offset(text, span.start), self.offset(text, span.end));
        start.min(end)..end
    }

    pub fn apply(self, text: &mut String, change: &Change) {
        match change.range {
            Some(span) => text.replace_range(self.range(text, span), &change.text),
            None => text.clone_from(&change.text),
        }
    }
}

/// The word that ends at the end of a text.
pub fn last_word(text: &str) -> &str {
    let is_part = |ch: char| ch.is_alphanumeric() || ch == '_';
    &text[text.trim_end_matches(is_part).len()..]
}

/// The path of a `file` URI.
pub fn path(uri: &str) -> Option<PathBuf> {
    let rest = uri.strip_prefix("file://")?;
    let rest = rest.strip_prefix("localhost").unwrap_or(rest);
    let mut bytes = Vec::with_capacity(rest.len());
    let mut left = rest.split(['?', '#']).next()?.as_bytes();
    while let Some((first, others)) = left.split_first() {
        let hex = others.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        let decoded = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        let (byte, next) = match decoded.filter(|_| *first == b'%') {
            Some(byte) => (byte, &others[2..]),
            None => (*first, others),
        };
        bytes.push(byte);
        left = next;
    }
    let path = String::from_utf8(bytes).ok()?;
    // `/c:/x` is a path of Windows.
    let has_drive = path.as_bytes().get(2) == Some(&b':');
    let path = if has_drive { path.trim_start_matches('/') } else { &path };
    let is_local = path.starts_with('/') || has_drive;
    is_local.then(|| PathBuf::from(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use Encoding::{Utf8, Utf16};

    fn at(line: u32, character: u32) -> Position {
        Position { line, character }
    }

    #[test]
    fn columns_count_units_of_the_encoding_and_stay_within_lines_and_characters() {
        let text = "a🦀b\r\nä\rc\n";
        let after = |encoding: Encoding, place| &text[encoding.offset(text, place)..];
        assert_eq!(after(Utf16, at(0, 3)), "b\r\nä\rc\n");
        assert_eq!(after(Utf16, at(0, 2)), "🦀b\r\nä\rc\n", "within a pair");
        assert_eq!(after(Utf8, at(0, 5)), "b\r\nä\rc\n");
        assert_eq!(after(Utf8, at(0, 4)), "🦀b\r\nä\rc\n");
        assert_eq!(after(Utf16, at(0, 99)), "\r\nä\rc\n");
        assert_eq!(after(Utf16, at(1, 1)), "\rc\n");
        assert_eq!(after(Utf8, at(1, 2)), "\rc\n");
        assert_eq!(after(Utf16, at(2, 0)), "c\n");
        assert_eq!(after(Utf16, at(3, 0)), "");
        assert_eq!(after(Utf16, at(u32::MAX, u32::MAX)), "");
        assert_eq!(Utf16.offset("", at(0, 1)), 0);
        assert_eq!((Utf16.length("a🦀"), Utf8.length("a🦀")), (3, 5));
    }

    #[test]
    fn changes_are_applied_one_after_the_other_also_where_a_range_is_reversed() {
        let change = |from: [u32; 4], text: &str| {
            let [a, b, c, d] = from;
            let range = Some(Span { start: at(a, b), end: at(c, d) });
            Change { range, text: text.into() }
        };
        let mut text = "one 🦀\ntwo\n".to_string();
        Utf16.apply(&mut text, &change([0, 4, 0, 6], "crab"));
        assert_eq!(text, "one crab\ntwo\n");
        Utf16.apply(&mut text, &change([0, 8, 1, 0], " "));
        assert_eq!(text, "one crab two\n");
        Utf16.apply(&mut text, &change([0, 3, 0, 0], "!"));
        assert_eq!(text, "!one crab two\n");
        Utf16.apply(&mut text, &change([9, 9, 9, 9], "end"));
        assert_eq!(text, "!one crab two\nend");
        Utf16.apply(&mut text, &Change { range: None, text: "new".into() });
        assert_eq!(text, "new");
    }

    #[test]
    fn a_uri_of_a_file_is_a_path() {
        let of = |uri: &str| path(uri).map(|path| path.display().to_string());
        assert_eq!(of("file:///a/b%20c/%C3%A4.rs").as_deref(), Some("/a/b c/ä.rs"));
        assert_eq!(of("file://localhost/a%").as_deref(), Some("/a%"));
        assert_eq!(of("file:///c%3A/x.rs").as_deref(), Some("c:/x.rs"));
        assert_eq!(of("file://host/a"), None);
        assert_eq!(of("untitled:Untitled-1"), None);
        assert_eq!(of("file:///%FF"), None);
    }

    #[test]
    fn the_last_word_is_letters_digits_and_underscores() {
        assert_eq!([last_word("let größe_1"), last_word("a."), last_word("")], ["größe_1", "", ""]);
    }
}
