//! What a model learns from: documents, which of them are worth it, and rows of tokens.
//!
//! ```text
//! texts -> filter -> near -> split -> encode -> corpus -> pack -> batches
//! ```
//!
//! | file          | is                                                                    |
//! |---------------|-----------------------------------------------------------------------|
//! | `language.rs` | the language of a path                                                |
//! | `filter.rs`   | what is left out, and why                                             |
//! | `near.rs`     | copies and near copies                                                |
//! | `split.rs`    | what is held out                                                      |
//! | `records.rs`  | JSONL: texts, prompts with completions, conversations                 |
//! | `fim_training.rs` | documents turned into fill in the middle                          |
//! | `project.rs`  | files of one project in one sequence, with their paths                |
//! | `corpus.rs`   | encoded documents in a file, and its index                            |
//! | `pack.rs`     | documents laid end to end and cut into rows; the resumable loader     |
//!
//! Not here: directories, files and dates of commits (the commands walk them), the loss.

pub mod corpus;
pub mod filter;
pub mod fim_training;
pub mod language;
pub mod near;
pub mod pack;
pub mod project;
pub mod records;
pub mod split;

use crate::error::Result;
use crate::text::tokenizer::{Special, Tokenizer};
use std::borrow::Cow;

/// A text to learn from or to measure on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// Path relative to the source, or `file.jsonl:12`.
    pub name: String,
    /// Language by its name for people: "Rust", "Python", "Markdown", "text" ...
    pub language: &'static str,
    /// The text, in pieces.
    pub parts: Vec<Part>,
}

/// A piece of a document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The text.
    pub text: String,
    /// Whether the model is to predict it; prompts and other people's messages are only read.
    pub learned: bool,
    /// Whether special tokens in the text are taken as such (a rendered chat template).
    pub special: bool,
}

/// A document as tokens: what begins it, the text, what ends it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// As the document's.
    pub name: String,
    /// As the document's.
    pub language: &'static str,
    /// Bytes of text that the learned tokens stand for (begin and end tokens stand for none).
    pub n_bytes: usize,
    /// The tokens.
    pub ids: Vec<u32>,
    /// Whether each token is to be predicted, same length as ids; the first never is.
    pub learned: Vec<bool>,
}

/// What stands before and after a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// Before it: what the first token is predicted from.
    pub begin: Option<u32>,
    /// After it, so that the model learns to stop.
    pub end: Option<u32>,
}

impl Document {
    /// A text that is learned as a whole; its language is that of the name.
    pub fn whole(name: impl Into<String>, text: impl Into<String>) -> Document {
        let name = name.into();
        let language = language::of_path(&name);
        let part = Part { text: text.into(), learned: true, special: false };
        Document { name, language, parts: vec![part] }
    }

    /// Bytes of all its text, learned or not.
    pub fn n_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.text.len()).sum()
    }

    /// All parts joined.
    pub fn text(&self) -> Cow<'_, str> {
        match self.parts.as_slice() {
            [part] => Cow::Borrowed(&part.text),
            parts => Cow::Owned(parts.iter().map(|part| part.text.as_str()).collect()),
        }
    }
}

impl Ends {
    /// What a tokenizer's model expects.
    ///
    /// Where nothing begins a text, the token that ends one does: packed training of GPT-2 and
    /// all after it has an end of text before every document.
    pub fn of(tokenizer: &Tokenizer) -> Ends {
        let end = tokenizer.eos().or_else(|| tokenizer.id("<|endoftext|>"));
        Ends { begin: tokenizer.begin().first().copied().or(end), end }
    }
}

/// Turns a document into tokens.
///
/// Parts are encoded one by one, as when a model answers: the prompt is encoded, then the answer
/// comes token by token. A rendered conversation has its own beginning and end: it is given a
/// begin token only if the tokenizer wants one before any text and the template wrote none, and
/// no end token.
///
/// Bytes are those of the learned text itself, so that they do not depend on the tokenizer; in a
/// rendered conversation, where special tokens stand for none, those of the other tokens.
pub fn encode(document: &Document, tokenizer: &Tokenizer, ends: Ends) -> Result<Encoded> {
    let (mut ids, mut learned, mut n_bytes) = (Vec::new(), Vec::new(), 0);
    for part in &document.parts {
        let special = if part.special { Special::Parse } else { Special::Plain };
        let part_ids = match ids.is_empty() {
            true => tokenizer.encode(&part.text, special)?,
            false => encode_after(tokenizer, &part.text, special)?,
        };
        if part.learned {
            n_bytes += match special {
                Special::Plain => part.text.len(),
                Special::Parse => spelled_bytes(tokenizer, &part_ids),
            };
        }
        learned.resize(learned.len() + part_ids.len(), part.learned);
        ids.extend(part_ids);
    }
    let is_chat = document.parts.iter().any(|part| part.special);
    let begin = match is_chat {
        false => ends.begin,
        true => tokenizer.begin().first().copied().filter(|begin| ids.first() != Some(begin)),
    };
    if let Some(begin) = begin {
        ids.insert(0, begin);
        learned.insert(0, false);
    } else if learned.first() == Some(&true) {
        learned[0] = false;
        n_bytes = n_bytes.saturating_sub(spelled_bytes(tokenizer, &ids[..1]));
    }
    if let Some(end) = ends.end.filter(|_| !is_chat) {
        // The only token of a document has nothing before it to be predicted from.
        learned.push(!ids.is_empty() && document.parts.last().is_none_or(|part| part.learned));
        ids.push(end);
    }
    let Document { name, language, .. } = document;
    Ok(Encoded { name: name.clone(), language, n_bytes, ids, learned })
}

impl Encoded {
    /// Its first tokens.
    pub fn cut(&self, n_tok: usize, tokenizer: &Tokenizer) -> Encoded {
        if n_tok >= self.ids.len() {
            return self.clone();
        }
        let (ids, learned) = (self.ids[..n_tok].to_vec(), self.learned[..n_tok].to_vec());
        let predicted: Vec<u32> =
            ids.iter().zip(&learned).filter(|pair| *pair.1).map(|pair| *pair.0).collect();
        let n_bytes = spelled_bytes(tokenizer, &predicted);
        Encoded { name: self.name.clone(), language: self.language, n_bytes, ids, learned }
    }
}

/// Bytes of text that tokens stand for.
fn spelled_bytes(tokenizer: &Tokenizer, ids: &[u32]) -> usize {
    let text = ids.iter().filter(|id| !tokenizer.is_special(**id));
    text.map(|id| tokenizer.bytes(*id).map_or(0, |bytes| bytes.len())).sum()
}

/// Whether encoding puts a space before a text, as SentencePiece does.
fn adds_space(tokenizer: &Tokenizer) -> Result<bool> {
    let first = tokenizer.encode("a", Special::Plain)?.first().copied();
    let bytes = first.and_then(|id| tokenizer.bytes(id)).unwrap_or_default();
    Ok(bytes.first() == Some(&b' '))
}

/// The ids of a text that continues another: without the space that some tokenizers put
/// before every text.
///
/// Such a tokenizer is given something else to put the space before, whose ids are then cut off.
pub(crate) fn encode_after(
    tokenizer: &Tokenizer,
    text: &str,
    special: Special,
) -> Result<Vec<u32>> {
    if adds_space(tokenizer)? {
        // A control character is hardly ever joined with what follows; if it is, others may not be.
        for before in ["\u{1}", "\n", "."] {
            let before_ids = tokenizer.encode(before, special)?;
            let ids = tokenizer.encode(&[before, text].concat(), special)?;
            if ids.starts_with(&before_ids) {
                return Ok(ids[before_ids.len()..].to_vec());
            }
        }
    }
    tokenizer.encode(text, special)
}

#[cfg(test)]
mod tests;
