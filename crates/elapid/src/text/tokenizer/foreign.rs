//! Every other tokenizer.json, through the `tokenizers` crate: Unigram, WordPiece, WordLevel, odd
//! normalizers, and the verdict on files that are wrong.
//!
//! The crate panics on some inputs; what reaches it from outside is caught and becomes an error.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use super::gguf;
use super::tokens::{Alphabet, Kind, Tokens};
use super::{Codec, Special, Tokenizer};
use crate::error::{Error, Result};

pub(super) struct Foreign {
    parse: tokenizers::Tokenizer,
    /// The same, with special tokens as text; made when first asked for.
    plain: OnceLock<Box<tokenizers::Tokenizer>>,
}

/// Runs `work`, and makes words of a panic.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the tokenizer panicked".into()),
    }
}

impl Foreign {
    /// Ids of a text, without what the file's post-processor adds.
    pub(super) fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        let tokenizer = match special {
            Special::Parse => &self.parse,
            Special::Plain => self.plain.get_or_init(|| {
                let mut plain = self.parse.clone();
                plain.set_encode_special_tokens(true);
                Box::new(plain)
            }),
        };
        let encoding = guarded(|| tokenizer.encode_fast(text, false)).map_err(|problem| {
            let hint = "look at the tokenizer.json: it may lack a token for what is unknown";
            Error::input(format!("the text cannot be encoded: {problem}"), hint)
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of ids; what cannot be decoded is nothing.
    pub(super) fn decode(&self, ids: &[u32], special: Special) -> String {
        guarded(|| self.parse.decode(ids, special == Special::Plain)).unwrap_or_default()
    }

    /// What the post-processor puts before and after a text.
    fn ends(&self) -> [Vec<u32>; 2] {
        let both = || {
            let whole = guarded(|| self.parse.encode_fast("a", true)).ok()?.get_ids().to_vec();
            let text = self.encode("a", Special::Parse).ok()?;
            let at = (0..=whole.len().checked_sub(text.len())?)
                .find(|at| whole[*at..].starts_with(&text) && !text.is_empty())?;
            Some([whole[..at].to_vec(), whole[at + text.len()..].to_vec()])
        };
        both().unwrap_or_default()
    }
}

pub(super) fn read(file: &str, json: &str) -> Result<Tokenizer> {
    let parse = guarded(|| tokenizers::Tokenizer::from_bytes(json.as_bytes()));
    let mut parse = parse.map_err(|problem| {
        let hint = "the file may be cut or from another tool; download it again";
        Error::format(file, format!("is not a tokenizer.json: {problem}"), hint)
    })?;
    // Neither belongs to the ids of a text.
    let _ = parse.with_truncation(None);
    parse.with_padding(None);
    let vocab = parse.get_vocab(true);
    let added = parse.get_added_tokens_decoder();
    let mut pairs: Vec<(u32, &str, Kind)> =
        vocab.iter().map(|(text, id)| (*id, text.as_str(), Kind::Normal)).collect();
    for (id, token) in &added {
        let kind = if token.special { Kind::Control } else { Kind::UserDefined };
        pairs.push((*id, token.content.as_str(), kind));
    }
    let mut tokens = Tokens::from_pairs(file, Alphabet::Plain, &pairs)?;
    let mut ids = BTreeMap::new();
    let eog = gguf::roles(&mut tokens, &mut ids, gguf::Names::Added);
    let foreign = Foreign { parse, plain: OnceLock::new() };
    let [begin, end] = foreign.ends();
    if let Some(id) = begin.iter().chain(&end).find(|id| **id as usize >= tokens.len()) {
        let problem = format!("adds token {id} to a text, but has {} tokens", tokens.len());
        return Err(Error::format(file, problem, "the file was changed; download it again"));
    }
    let tokenizer = Tokenizer::new(tokens, Codec::Foreign(Box::new(foreign)), ids, eog);
    Ok(Tokenizer { begin, end, original: Some(json.into()), ..tokenizer })
}
