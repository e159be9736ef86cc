//! From text to ids, by our own hands: special tokens, normalisation, words, joins.
//!
//! | words    | a word's symbols                                                            |
//! |----------|-----------------------------------------------------------------------------|
//! | `Bytes`  | cut by patterns (`pre.rs`); a symbol per byte (GPT-2 and all after it)        |
//! | `Spaces` | spaces become U+2581; a symbol per character, unknown ones as bytes           |
//! |          | (SentencePiece: Llama 2, Mistral)                                           |
//!
//! SentencePiece joins over the whole text. Where no token has a U+2581 after another character,
//! nothing joins there, and cutting there changes nothing; texts are then lists of short words
//! that repeat themselves.

use std::borrow::Cow;
use unicode_normalization::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::Special;
use super::bpe::{FoldMap, Memory, Merges, Scratch, hash};
use super::pre::{self, Stage};
use super::special::{Finder, Part};
use super::tokens::SPACE_MARK;
use crate::error::{Error, Result};

/// No symbol: the byte is left out.
pub(super) const SKIPPED: u32 = u32::MAX;

/// When a space is put before a piece of text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Prefix {
    Never,
    /// Before every piece between special tokens.
    Each,
    /// Before every piece that does not begin with one.
    EachWithout,
    /// Before the text, if it does not begin with one.
    FirstWithout,
}

pub(super) struct Spaces {
    pub(super) prefix: Prefix,
    /// The symbol of each character that can be joined or is a token.
    pub(super) symbols: FoldMap<u64, u32>,
    /// The tokens of bytes, for all other characters.
    pub(super) bytes: Vec<Option<u32>>,
    /// What stands for a byte that has no token.
    pub(super) unknown: Option<u32>,
    /// Characters that some token has before a U+2581.
    pub(super) glue: Vec<char>,
}

pub(super) enum Words {
    Bytes {
        stages: Vec<Stage>,
        /// The symbol of each byte, or `SKIPPED`.
        symbols: Box<[u32; 256]>,
    },
    Spaces(Spaces),
}

pub(super) struct Encoder {
    /// Looked for before normalisation.
    pub(super) raw: Option<Finder>,
    /// Looked for after it.
    pub(super) normalized: Option<Finder>,
    /// Whether text is brought to Unicode's form C.
    pub(super) nfc: bool,
    pub(super) words: Words,
    pub(super) merges: Merges,
    /// Words that are tokens whatever the joins say.
    pub(super) whole: Option<FoldMap<Vec<u8>, u32>>,
    /// The first virtual symbol, and what each stands for.
    pub(super) n_vocab: u32,
    pub(super) virtuals: Vec<Vec<u32>>,
}

struct Work {
    memory: Memory,
    scratch: Scratch,
    symbols: Vec<u32>,
    out: Vec<u32>,
}

impl Encoder {
    pub(super) fn kind(&self) -> &'static str {
        match self.words {
            Words::Bytes { .. } => "byte-level BPE",
            Words::Spaces(_) => "SentencePiece BPE",
        }
    }

    pub(super) fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        if text.len() > (u32::MAX / 4) as usize {
            let problem = format!("a text of {} bytes is too long to encode at once", text.len());
            return Err(Error::input(problem, "encode it in pieces"));
        }
        let mut work = Work {
            memory: Memory::for_text(text.len()),
            scratch: Scratch::default(),
            symbols: Vec::new(),
            out: Vec::new(),
        };
        for part in parts(self.raw.as_ref(), text, special) {
            match part {
                Part::Token(id) => work.out.push(id),
                Part::Text(from, to) => {
                    let mut piece = Cow::Borrowed(&text[from..to]);
                    if self.nfc && is_nfc_quick(piece.chars()) != IsNormalized::Yes {
                        piece = piece.nfc().collect();
                    }
                    self.normalized(&piece, from, special, &mut work)?;
                }
            }
        }
        Ok(work.out)
    }

    /// A piece in its normal form that begins at `offset` of the text.
    fn normalized(
        &self,
        piece: &str,
        offset: usize,
        special: Special,
        work: &mut Work,
    ) -> Result<()> {
        for part in parts(self.normalized.as_ref(), piece, special) {
            match part {
                Part::Token(id) => work.out.push(id),
                Part::Text(from, to) => match &self.words {
                    Words::Bytes { stages, symbols } => {
                        pre::split(stages, &piece[from..to], &mut |word| {
                            let word = word.as_bytes();
                            self.word(word, work, |work| self.bytes_word(word, symbols, work));
                            Ok(())
                        })?;
                    }
                    Words::Spaces(spaces) => {
                        self.spaces_piece(&piece[from..to], offset + from, spaces, work);
                    }
                },
            }
        }
        Ok(())
    }

    /// The ids of a word: those it had before, or what `make` appends.
    #[inline]
    fn word(&self, word: &[u8], work: &mut Work, make: impl FnOnce(&mut Work)) {
        let hash = hash(word);
        if let Some(ids) = work.memory.find(word, hash) {
            work.out.extend_from_slice(ids);
            return;
        }
        let start = work.out.len();
        work.symbols.clear();
        make(work);
        work.memory.keep(word, hash, &work.out[start..]);
    }

    #[inline]
    fn bytes_word(&self, word: &[u8], symbols: &[u32; 256], work: &mut Work) {
        if let Some(id) = self.whole.as_ref().and_then(|whole| whole.get(word)) {
            work.out.push(*id);
            return;
        }
        let of_bytes = word.iter().map(|byte| symbols[usize::from(*byte)]);
        work.symbols.extend(of_bytes.filter(|symbol| *symbol != SKIPPED));
        self.finish(work);
    }

    fn finish(&self, work: &mut Work) {
        self.merges.join(&mut work.symbols, &mut work.scratch);
        for symbol in &work.symbols {
            match symbol.checked_sub(self.n_vocab) {
                None => work.out.push(*symbol),
                Some(idx) => work.out.extend_from_slice(&self.virtuals[idx as usize]),
            }
        }
    }

    /// A piece between special tokens that begins at `offset` of the text.
    fn spaces_piece(&self, piece: &str, offset: usize, spaces: &Spaces, work: &mut Work) {
        let mut escaped = piece.replace(' ', SPACE_MARK.encode_utf8(&mut [0; 4]));
        let begins = piece.starts_with([' ', SPACE_MARK]);
        let prefixed = match spaces.prefix {
            Prefix::Never => false,
            Prefix::Each => true,
            Prefix::EachWithout => !begins,
            Prefix::FirstWithout => !begins && offset == 0,
        };
        if prefixed {
            escaped.insert(0, SPACE_MARK);
        }
        let spaces_word = |word: &str, work: &mut Work| {
            self.word(word.as_bytes(), work, |work| self.spaces_word(word, spaces, work));
        };
        let (mut from, mut last) = (0, SPACE_MARK);
        for (at, letter) in escaped.char_indices() {
            if letter == SPACE_MARK && last != SPACE_MARK && !spaces.glue.contains(&last) {
                spaces_word(&escaped[from..at], work);
                from = at;
            }
            last = letter;
        }
        spaces_word(&escaped[from..], work);
    }

    fn spaces_word(&self, word: &str, spaces: &Spaces, work: &mut Work) {
        for letter in word.chars() {
            if let Some(symbol) = spaces.symbols.get(&u64::from(letter)) {
                work.symbols.push(*symbol);
                continue;
            }
            // Bytes join with nothing: what stands before them is complete.
            self.finish(work);
            work.symbols.clear();
            for byte in letter.encode_utf8(&mut [0; 4]).bytes() {
                work.out.extend(spaces.bytes[usize::from(byte)].or(spaces.unknown));
            }
        }
        self.finish(work);
    }
}

/// All of `text` if there is nothing to look for.
fn parts(finder: Option<&Finder>, text: &str, special: Special) -> Vec<Part> {
    match finder {
        Some(finder) => finder.parts(text, special),
        None if text.is_empty() => Vec::new(),
        None => vec![Part::Text(0, text.len())],
    }
}
