//! Tokenizers: text to ids and back, as the tool that made the vocabulary does it.
//!
//! | from                      | through                                                      |
//! |---------------------------|--------------------------------------------------------------|
//! | tokenizer.json            | our encoder where the file is plain BPE, else the             |
//! |                           | `tokenizers` crate; ids as Hugging Face gives them            |
//! | vocab.json and merges.txt | our encoder                                                  |
//! | the vocabulary in a GGUF  | our encoder; ids as llama.cpp gives them                      |
//!
//! Two things may differ between the worlds on the same model: NFC (only tokenizer.json asks for
//! it) and which of two overlapping special tokens wins.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::text::fim::FimTokens;

mod bpe;
mod bpe_training;
mod encoder;
mod export;
mod foreign;
mod gguf;
mod json;
mod merges;
mod names;
mod pre;
mod special;
mod spm;
mod stream;
#[cfg(test)]
mod tests;
mod tokens;

pub use bpe_training::BpeTrainer;
pub use gguf::GgufVocab;
pub use stream::Stream;

use encoder::Encoder;
use foreign::Foreign;
use tokens::{Kind, Tokens};

/// What happens to special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// Their texts are found when encoding, shown when decoding.
    Parse,
    /// Their texts are text like any other when encoding; they are dropped when decoding.
    Plain,
}

enum Codec {
    Own(Box<Encoder>),
    Foreign(Box<Foreign>),
}

/// A vocabulary and how text is cut into it.
pub struct Tokenizer {
    tokens: Tokens,
    codec: Codec,
    /// Whether decoded text loses a first space, which encoding put there.
    strips_space: bool,
    begin: Vec<u32>,
    end: Vec<u32>,
    /// Special ids by role: `bos`, `eos`, `unk`, `fim_pre`, ...
    ids: BTreeMap<String, u32>,
    eog: Vec<u32>,
    scores: Option<Vec<f32>>,
    pre: Option<String>,
    /// The tokenizer.json it was read from.
    original: Option<Box<str>>,
}

impl Tokenizer {
    fn new(tokens: Tokens, codec: Codec, ids: BTreeMap<String, u32>, eog: Vec<u32>) -> Tokenizer {
        Tokenizer {
            tokens,
            codec,
            ids,
            eog,
            strips_space: false,
            begin: Vec::new(),
            end: Vec::new(),
            scores: None,
            pre: None,
            original: None,
        }
    }

    /// Reads a tokenizer.json; `file` is its name, for errors.
    pub(crate) fn from_json(file: &str, json: &[u8]) -> Result<Tokenizer> {
        let json = json.strip_prefix(b"\xef\xbb\xbf").unwrap_or(json);
        let text = utf8(file, json)?;
        match json::read(file, text) {
            Some(tokenizer) => Ok(tokenizer),
            None => foreign::read(file, text),
        }
    }

    /// The ids of a text, with nothing before or after.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        match &self.codec {
            Codec::Own(encoder) => encoder.encode(text, special),
            Codec::Foreign(foreign) => foreign.encode(text, special),
        }
    }

    /// The ids of a text after what the model wants at the beginning.
    pub fn encode_with_begin(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        Ok([self.begin.clone(), self.encode(text, special)?].concat())
    }

    /// What the model wants before a text.
    pub fn begin(&self) -> &[u32] {
        &self.begin
    }

    /// What the file puts after a complete text; a text to be continued must not have it.
    #[cfg(test)]
    pub(crate) fn end(&self) -> &[u32] {
        &self.end
    }

    /// The text of ids. Bytes that are no text become U+FFFD, ids that are no token nothing.
    pub fn decode(&self, ids: &[u32], special: Special) -> String {
        if let Codec::Foreign(foreign) = &self.codec {
            return foreign.decode(ids, special);
        }
        let mut bytes = Vec::new();
        for id in ids {
            if special == Special::Parse || !self.is_special(*id) {
                self.tokens.push_bytes(*id, &mut bytes);
            }
        }
        let first = usize::from(self.strips_space && bytes.first() == Some(&b' '));
        String::from_utf8_lossy(&bytes[first..]).into_owned()
    }

    /// The bytes of one token.
    pub fn bytes(&self, id: u32) -> Option<Vec<u8>> {
        if self.tokens.kind(id) == Kind::Absent {
            return None;
        }
        if let Codec::Foreign(foreign) = &self.codec {
            return Some(foreign.decode(&[id], Special::Parse).into_bytes());
        }
        let mut bytes = Vec::new();
        self.tokens.push_bytes(id, &mut bytes);
        Some(bytes)
    }

    /// Decodes ids as they come, from the beginning of a text and without special tokens.
    #[cfg(test)]
    pub(crate) fn stream(&self) -> Stream<&Tokenizer> {
        Stream::new(self)
    }

    /// In words: what kind of vocabulary it is.
    pub fn kind(&self) -> &'static str {
        match &self.codec {
            Codec::Own(encoder) => encoder.kind(),
            Codec::Foreign(_) => "of another kind",
        }
    }

    /// One more than the largest id.
    pub fn n_vocab(&self) -> usize {
        self.tokens.len()
    }

    /// The id of a token, spelled as in the file.
    pub(crate) fn id(&self, token: &str) -> Option<u32> {
        self.tokens.find(token.as_bytes())
    }

    /// A token, spelled as in the file.
    pub fn token(&self, id: u32) -> Option<String> {
        let is_there = self.tokens.kind(id) != Kind::Absent;
        is_there.then(|| String::from_utf8_lossy(self.tokens.text(id)).into_owned())
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.role("bos")
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.role("eos")
    }

    /// The token of a role, named as in GGUF: `unk`, `pad`, `eot`, `fim_pre`, `fim_suf`, ...
    pub(crate) fn role(&self, name: &str) -> Option<u32> {
        self.ids.get(name).copied()
    }

    /// Tokens of fill in the middle: those that the file states, then by their spelling.
    pub fn fim(&self) -> Option<FimTokens> {
        FimTokens::detect(&|token| self.id(token), &|role| self.role(role))
    }

    /// Every id that ends a generation, ascending.
    pub fn eog(&self) -> &[u32] {
        &self.eog
    }

    /// Adds an id that ends a generation; one that is no token is left out.
    pub(crate) fn add_eog(&mut self, id: u32) {
        if self.tokens.kind(id) != Kind::Absent && !self.eog.contains(&id) {
            self.eog.push(id);
            self.eog.sort_unstable();
        }
    }

    /// Whether an id is a special token: it marks something and is no text.
    pub(crate) fn is_special(&self, id: u32) -> bool {
        matches!(self.tokens.kind(id), Kind::Control | Kind::Unknown)
    }

    /// Says which tokens begin and end a text, where a file beside tokenizer.json knows. The end
    /// of a text ends a generation too. Tokens that are not there are left out.
    pub(crate) fn set_specials(&mut self, bos: Option<&str>, eos: Option<&str>) {
        for (role, token) in [("bos", bos), ("eos", eos)] {
            if let Some(id) = token.and_then(|token| self.id(token)) {
                self.ids.insert(role.into(), id);
                if role == "eos" {
                    self.add_eog(id);
                }
            }
        }
    }
}

/// Whether ids stand for the same tokens.
impl PartialEq for Tokenizer {
    fn eq(&self, other: &Tokenizer) -> bool {
        let n = self.n_vocab();
        n == other.n_vocab() && (0..n as u32).all(|id| self.token(id) == other.token(id))
    }
}

const DAMAGED: &str = "the file is damaged; download it again";

/// The bytes of `file` as text.
fn utf8<'b>(file: &str, bytes: &'b [u8]) -> Result<&'b str> {
    std::str::from_utf8(bytes).map_err(|error| {
        let at = error.valid_up_to();
        Error::format(file, format!("is not text: byte {at} is not UTF-8"), DAMAGED)
    })
}
