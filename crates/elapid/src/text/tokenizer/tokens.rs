//! The list of tokens: text and kind by id, id by text.
//!
//! All texts lie in one buffer; the index is a table of ids that compares against it. A vocabulary
//! of 150,000 tokens then takes three allocations and not as many as it has tokens.

use super::bpe::hash;
use crate::error::{Error, Result};

/// What a token is, numbered as in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// No token has this id.
    Absent = 0,
    Normal = 1,
    /// Stands for what the vocabulary cannot say.
    Unknown = 2,
    /// Begins, ends, separates; never text.
    Control = 3,
    /// Found in text before it is cut into words.
    UserDefined = 4,
    Unused = 5,
    /// One byte, written `<0x0A>`.
    Byte = 6,
}

/// How texts of tokens stand for bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Alphabet {
    /// A printable character for every byte, as in GPT-2.
    Bytes,
    /// Plain text with U+2581 for spaces, as in SentencePiece.
    Spaces,
    Plain,
}

/// U+2581, which stands for a space.
pub(super) const SPACE_MARK: char = '\u{2581}';

pub(super) struct Tokens {
    pub(super) alphabet: Alphabet,
    text: Vec<u8>,
    /// Where the text of each id ends.
    ends: Vec<usize>,
    kinds: Vec<Kind>,
    /// Ids by hash, `NONE` where free; a power of two.
    slots: Vec<u32>,
}

const NONE: u32 = u32::MAX;
/// Ids that may be missing for each one that is there, before we think the file is wrong.
const GAP_MAX: u64 = 16;

impl Tokens {
    /// Tokens in order of their ids; of equal texts the last is found.
    pub(super) fn new(alphabet: Alphabet, list: &[(&[u8], Kind)]) -> Tokens {
        let n_slots = (list.len() * 2).next_power_of_two();
        let mut tokens = Tokens {
            alphabet,
            text: Vec::with_capacity(list.iter().map(|token| token.0.len()).sum()),
            ends: Vec::with_capacity(list.len()),
            kinds: list.iter().map(|token| token.1).collect(),
            slots: vec![NONE; n_slots],
        };
        for (id, (text, kind)) in list.iter().enumerate() {
            tokens.text.extend_from_slice(text);
            tokens.ends.push(tokens.text.len());
            if *kind != Kind::Absent {
                let slot = tokens.slot(text);
                tokens.slots[slot] = id as u32;
            }
        }
        tokens
    }

    /// Tokens with ids in any order; `file` is for errors.
    pub(super) fn from_pairs(
        file: &str,
        alphabet: Alphabet,
        pairs: &[(u32, &str, Kind)],
    ) -> Result<Tokens> {
        let n = pairs.iter().map(|pair| u64::from(pair.0) + 1).max().unwrap_or(0);
        if n > (pairs.len() as u64 + 1024) * GAP_MAX {
            let problem =
                format!("a token has the id {}, but there are {} tokens", n - 1, pairs.len());
            return Err(Error::format(file, problem, "number the tokens without large gaps"));
        }
        let mut list = vec![(&b""[..], Kind::Absent); n as usize];
        for (id, text, kind) in pairs {
            list[*id as usize] = (text.as_bytes(), *kind);
        }
        Ok(Tokens::new(alphabet, &list))
    }

    /// One more than the largest id.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    fn slot(&self, text: &[u8]) -> usize {
        let mask = self.slots.len() - 1;
        let mut slot = hash(text) as usize & mask;
        while self.slots[slot] != NONE && self.text(self.slots[slot]) != text {
            slot = (slot + 1) & mask;
        }
        slot
    }

    pub(super) fn find(&self, text: &[u8]) -> Option<u32> {
        Some(self.slots[self.slot(text)]).filter(|id| *id != NONE)
    }

    /// The text of an id, empty if it has none.
    pub(super) fn text(&self, id: u32) -> &[u8] {
        let idx = id as usize;
        let Some(&end) = self.ends.get(idx) else { return &[] };
        &self.text[if idx == 0 { 0 } else { self.ends[idx - 1] }..end]
    }

    pub(super) fn kind(&self, id: u32) -> Kind {
        self.kinds.get(id as usize).copied().unwrap_or(Kind::Absent)
    }

    pub(super) fn set_kind(&mut self, id: u32, kind: Kind) {
        self.kinds[id as usize] = kind;
    }

    /// Appends the bytes that a token stands for.
    pub(super) fn push_bytes(&self, id: u32, out: &mut Vec<u8>) {
        let text = self.text(id);
        match self.kind(id) {
            Kind::Absent | Kind::Unused => {}
            Kind::Unknown | Kind::Control | Kind::UserDefined => out.extend_from_slice(text),
            Kind::Byte => match byte_of(text) {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(text),
            },
            Kind::Normal => match self.alphabet {
                Alphabet::Plain => out.extend_from_slice(text),
                // What is not in GPT-2's alphabet stays as it is.
                Alphabet::Bytes => match alphabet_bytes(text) {
                    Some(bytes) => out.extend(bytes),
                    None => out.extend_from_slice(text),
                },
                Alphabet::Spaces => {
                    for chunk in text.utf8_chunks() {
                        out.extend_from_slice(chunk.valid().replace(SPACE_MARK, " ").as_bytes());
                        out.extend_from_slice(chunk.invalid());
                    }
                }
            },
        }
    }
}

/// The byte of `<0x0A>`.
pub(super) fn byte_of(text: &[u8]) -> Option<u8> {
    let hex = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    let hex = std::str::from_utf8(hex).ok().filter(|hex| hex.len() == 2 && !hex.contains('+'))?;
    u8::from_str_radix(hex, 16).ok()
}

/// The character that stands for a byte: itself where it is printable, else from U+0100 on.
pub(crate) fn byte_char(byte: u8) -> char {
    let is_printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if is_printable(byte) {
        return char::from(byte);
    }
    let n_before = (0..byte).filter(|byte| !is_printable(*byte)).count() as u32;
    char::from_u32(0x100 + n_before).expect("a letter of Latin Extended-A")
}

pub(crate) fn char_byte(letter: char) -> Option<u8> {
    let code = u32::from(letter);
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    Some(byte as u8)
}

/// The bytes of a text in GPT-2's alphabet.
pub(super) fn alphabet_bytes(text: &[u8]) -> Option<Vec<u8>> {
    std::str::from_utf8(text).ok()?.chars().map(char_byte).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        let letters: Vec<char> = (0..=255).map(byte_char).collect();
        assert_eq!((letters[32], letters[10], letters[0xad]), ('Ġ', 'Ċ', '\u{143}'));
        for byte in 0..=255 {
            assert_eq!(char_byte(letters[usize::from(byte)]), Some(byte));
        }
        assert_eq!(char_byte(' '), None);
        assert_eq!(char_byte('\u{144}'), None);
    }

    #[test]
    fn only_two_hex_digits_are_a_byte() {
        assert_eq!(byte_of(b"<0x0A>"), Some(10));
        for text in ["<0x+A>", "<0xA>", "<0x0AB>", "0x0A", "<0xZZ>", "<0x", ""] {
            assert_eq!(byte_of(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn tokens_are_found_by_text_and_the_last_of_equals_wins() {
        let list: Vec<Vec<u8>> = (0..5000).map(|n| format!("t{}", n % 4000).into_bytes()).collect();
        let list: Vec<(&[u8], Kind)> = list.iter().map(|text| (&text[..], Kind::Normal)).collect();
        let tokens = Tokens::new(Alphabet::Plain, &list);
        assert_eq!(tokens.find(b"t7"), Some(4007));
        assert_eq!(tokens.find(b"t3999"), Some(3999));
        assert_eq!(tokens.find(b"x"), None);
        assert_eq!(tokens.text(4007), b"t7");
        assert_eq!(tokens.text(5000), b"");
    }

    #[test]
    fn an_id_far_away_is_an_error_and_not_a_table() {
        let pairs = [(0, "a", Kind::Normal), (1_000_000_000, "b", Kind::Normal)];
        assert!(Tokens::from_pairs("a test", Alphabet::Plain, &pairs).is_err());
    }
}
