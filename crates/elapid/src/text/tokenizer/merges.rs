//! vocab.json and merges.txt, the pair of files of GPT-2.
//!
//! vocab.json maps texts to ids. merges.txt has a join per line, the first the strongest: two
//! texts and one ASCII space between them. Only a first line that begins with `#version` is a
//! comment, since a join may begin with `#`.
//!
//! Not here: the pre-tokenizer, which these files leave to the code that reads them.

use std::collections::{BTreeMap, HashMap};

use super::gguf::{self, Symbols};
use super::names;
use super::tokens::{Alphabet, Kind, Tokens};
use super::{Codec, DAMAGED, Tokenizer, utf8};
use crate::error::{Error, Result};

/// The joins of a merges.txt, as pairs.
fn pairs<'t>(file: &str, text: &'t str) -> Result<Vec<(&'t str, &'t str)>> {
    let mut list = Vec::new();
    for (idx, line) in text.split('\n').enumerate() {
        let line = line.strip_suffix('\r').unwrap_or(line);
        if line.is_empty() || idx == 0 && line.starts_with("#version") {
            continue;
        }
        let is_pair = |(left, right): &(&str, &str)| {
            !left.is_empty() && !right.is_empty() && !right.contains(' ')
        };
        list.push(line.split_once(' ').filter(is_pair).ok_or_else(|| {
            let n = idx + 1;
            let problem = format!("line {n}: {line:?} is not two tokens with a space between");
            let hint = "the file is damaged, or not the merges of a byte-level tokenizer";
            Error::format(file, problem, hint)
        })?);
    }
    Ok(list)
}

impl Tokenizer {
    /// Reads vocab.json and merges.txt, whose names are `files`. `pre` names a pre-tokenizer as
    /// GGUF files do; `gpt-2` is the one such files usually mean.
    pub(crate) fn from_vocab_merges(
        files: [&str; 2],
        vocab_json: &[u8],
        merges_txt: &[u8],
        pre: &str,
    ) -> Result<Tokenizer> {
        let vocab: HashMap<String, u32> = serde_json::from_slice(vocab_json).map_err(|error| {
            let problem = format!("is not a map from tokens to ids: {error}");
            Error::format(files[0], problem, DAMAGED)
        })?;
        build(files, &vocab, &pairs(files[1], utf8(files[1], merges_txt)?)?, pre)
    }
}

/// A tokenizer of tokens with their ids and joins, the strongest first; `files` are for errors.
pub(super) fn build(
    files: [&str; 2],
    vocab: &HashMap<String, u32>,
    joins: &[(&str, &str)],
    pre: &str,
) -> Result<Tokenizer> {
    let list: Vec<(u32, &str, Kind)> =
        vocab.iter().map(|(text, id)| (*id, text.as_str(), Kind::Normal)).collect();
    let mut tokens = Tokens::from_pairs(files[0], Alphabet::Bytes, &list)?;
    let mut ids = BTreeMap::new();
    let eog = gguf::roles(&mut tokens, &mut ids, gguf::Names::Any);
    let named = names::find(files[1], pre)?;
    let mut known = Symbols::new(&tokens, joins.len());
    for (rank, (left, right)) in joins.iter().enumerate() {
        let id = |text: &str| {
            tokens.find(text.as_bytes()).ok_or_else(|| {
                let problem =
                    format!("joins {left:?} and {right:?}, but {text:?} is not in the vocabulary");
                let hint = format!("{} and {} may belong to different models", files[0], files[1]);
                Error::format(files[1], problem, &hint)
            })
        };
        let joined = id(&[*left, *right].concat())?;
        // Of a join told twice the last counts, as in the reference.
        known.merges.insert_last(id(left)?, id(right)?, rank as u32, joined);
    }
    let encoder = known.encoder(files[0], named)?;
    let tokenizer = Tokenizer::new(tokens, Codec::Own(Box::new(encoder)), ids, eog);
    Ok(Tokenizer { pre: Some(pre.into()), ..tokenizer })
}
