//! Writing: a tokenizer.json for a vocabulary that came without one, and a GGUF vocabulary for
//! any that llama.cpp can have.
//!
//! SentencePiece has scores where tokenizer.json has a list of joins. Scores become the list of
//! all ways to cut a token in two, by descending score, as transformers' converter makes it; a
//! list becomes the score `-rank` of the first join that makes a token.
//!
//! Not here: tokenizers that only the `tokenizers` crate can run. They have their own file, and
//! no place in a GGUF.

use std::cmp::Reverse;

use serde_json::{Map, Value, json};

use super::encoder::{Encoder, Prefix, Spaces, Words};
use super::gguf::ALIASES;
use super::names;
use super::spm;
use super::tokens::{Alphabet, Kind, SPACE_MARK, Tokens};
use super::{Codec, GgufVocab, Tokenizer};
use crate::error::{Error, Result};

/// Our encoder, or the reason why there is nothing to write.
fn own(tokenizer: &Tokenizer) -> Result<&Encoder> {
    match &tokenizer.codec {
        Codec::Own(encoder) => Ok(encoder),
        Codec::Foreign(_) => Err(Error::input(
            "this tokenizer is neither byte-level BPE nor SentencePiece BPE",
            "GGUF files are written for these two; keep the tokenizer.json beside the weights",
        )),
    }
}

/// The text of a token, which JSON needs as text.
fn text(tokens: &Tokens, id: u32) -> Result<&str> {
    std::str::from_utf8(tokens.text(id)).map_err(|_| {
        let text = String::from_utf8_lossy(tokens.text(id));
        let problem = format!("token {id} is not UTF-8 ({text:?})");
        Error::input(problem, "a tokenizer.json cannot hold it; keep the GGUF")
    })
}

/// The ids that are tokens and are found by their text: of equal texts only the last.
fn ids(tokens: &Tokens) -> impl Iterator<Item = u32> {
    (0..tokens.len() as u32)
        .filter(|id| tokens.kind(*id) != Kind::Absent && tokens.find(tokens.text(*id)) == Some(*id))
}

/// Joins as pairs of ids, strongest first.
fn joins(tokenizer: &Tokenizer, encoder: &Encoder) -> Vec<(u32, u32)> {
    let tokens = &tokenizer.tokens;
    let is_token = |id: u32| (id as usize) < tokens.len();
    let Some(scores) = tokenizer.scores.as_ref().filter(|_| tokens.alphabet == Alphabet::Spaces)
    else {
        let list = encoder.merges.list().into_iter();
        let list = list.filter(|join| is_token(join.1) && is_token(join.2) && is_token(join.3));
        return list.map(|join| (join.1, join.2)).collect();
    };
    let mut cuts =
        spm::cuts(tokens, |letter| tokens.find(letter.encode_utf8(&mut [0; 4]).as_bytes()));
    let n_letters = |id: u32| String::from_utf8_lossy(tokens.text(id)).chars().count();
    cuts.sort_by_key(|cut| (cut.2, cut.0, cut.1));
    cuts.sort_by(|a, b| {
        let score = scores[b.2 as usize].total_cmp(&scores[a.2 as usize]);
        let lens = |cut: &(u32, u32, u32)| Reverse((n_letters(cut.0), n_letters(cut.1)));
        score.then_with(|| lens(a).cmp(&lens(b)))
    });
    cuts.into_iter().map(|cut| (cut.0, cut.1)).collect()
}

fn added_tokens(tokens: &Tokens) -> Result<Vec<Value>> {
    let mut list = Vec::new();
    for id in ids(tokens) {
        let special = matches!(tokens.kind(id), Kind::Control | Kind::Unknown);
        if special || tokens.kind(id) == Kind::UserDefined {
            list.push(json!({
                "id": id, "content": text(tokens, id)?, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": special,
            }));
        }
    }
    Ok(list)
}

/// What stands before and after a text.
fn post_processor(tokenizer: &Tokenizer) -> Result<Value> {
    if tokenizer.begin.is_empty() && tokenizer.end.is_empty() {
        return Ok(Value::Null);
    }
    let mut special = Map::new();
    let mut pieces = |list: &[u32], type_id: u32| -> Result<Vec<Value>> {
        let mut pieces = Vec::new();
        for id in list {
            let name = text(&tokenizer.tokens, *id)?;
            special.insert(name.into(), json!({"id": name, "ids": [id], "tokens": [name]}));
            pieces.push(json!({"SpecialToken": {"id": name, "type_id": type_id}}));
        }
        Ok(pieces)
    };
    let mut both = Vec::new();
    for (name, type_id) in [("A", 0), ("B", 1)] {
        let mut single = pieces(&tokenizer.begin, type_id)?;
        single.push(json!({"Sequence": {"id": name, "type_id": type_id}}));
        single.extend(pieces(&tokenizer.end, type_id)?);
        both.push(single);
    }
    Ok(json!({
        "type": "TemplateProcessing", "single": both[0], "pair": both.concat(),
        "special_tokens": special,
    }))
}

fn byte_level() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
        "use_regex": false})
}

/// What marks the spaces of SentencePiece, after a prefix if there is one.
pub(super) fn space_normalizers(prefix: Prefix) -> Vec<Value> {
    let prepend = json!({"type": "Prepend", "prepend": SPACE_MARK});
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK});
    if prefix == Prefix::Never { vec![replace] } else { vec![prepend, replace] }
}

/// What makes text of its tokens, without the prefix if there is one.
pub(super) fn space_decoders(prefix: Prefix) -> Vec<Value> {
    let mut list = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix != Prefix::Never {
        list.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    list
}

fn parts(encoder: &Encoder) -> [Value; 3] {
    match &encoder.words {
        Words::Bytes { stages, .. } => {
            let split = |pattern: &str| {
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                    "invert": false})
            };
            let mut list: Vec<Value> = stages.iter().map(|stage| split(&stage.pattern)).collect();
            list.push(byte_level());
            let normalizer = if encoder.nfc { json!({"type": "NFC"}) } else { Value::Null };
            [normalizer, json!({"type": "Sequence", "pretokenizers": list}), byte_level()]
        }
        Words::Spaces(Spaces { prefix, .. }) => [
            json!({"type": "Sequence", "normalizers": space_normalizers(*prefix)}),
            Value::Null,
            json!({"type": "Sequence", "decoders": space_decoders(*prefix)}),
        ],
    }
}

fn new_json(tokenizer: &Tokenizer) -> Result<String> {
    let encoder = own(tokenizer)?;
    let tokens = &tokenizer.tokens;
    let mut vocab = Map::new();
    for id in ids(tokens) {
        vocab.insert(text(tokens, id)?.into(), id.into());
    }
    let mut merges = Vec::new();
    for (left, right) in joins(tokenizer, encoder) {
        merges.push(json!([text(tokens, left)?, text(tokens, right)?]));
    }
    let is_spaces = tokens.alphabet == Alphabet::Spaces;
    let unknown = tokenizer.role("unk").filter(|_| is_spaces);
    let unknown = unknown.map(|id| text(tokens, id)).transpose()?;
    let [normalizer, pre_tokenizer, decoder] = parts(encoder);
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added_tokens(tokens)?,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor(tokenizer)?,
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown,
            "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": is_spaces, "byte_fallback": is_spaces,
            "ignore_merges": encoder.whole.is_some(), "vocab": vocab, "merges": merges,
        },
    });
    Ok(file.to_string())
}

/// Scores of a list of joins: the first that makes a token counts.
fn scores(tokens: &Tokens, encoder: &Encoder) -> Vec<f32> {
    let list = encoder.merges.list();
    // What no join makes comes after all that one does.
    let mut scores = vec![-(list.len() as f32); tokens.len()];
    for (rank, _, _, result) in list.into_iter().rev() {
        if let Some(score) = scores.get_mut(result as usize) {
            *score = -(rank as f32);
        }
    }
    scores
}

/// Model, pre-tokenizer, scores and joins of a GGUF.
fn gguf_model(tokenizer: &Tokenizer, encoder: &Encoder, vocab: &mut GgufVocab) -> Result<()> {
    let tokens = &tokenizer.tokens;
    match &encoder.words {
        Words::Bytes { stages, .. } => {
            let name = || names::name(stages, encoder.whole.is_some()).map(str::to_string);
            let Some(pre) = tokenizer.pre.clone().or_else(name) else {
                let patterns: Vec<&str> = stages.iter().map(|stage| &*stage.pattern).collect();
                let problem = format!("GGUF has no name for the pre-tokenizer {patterns:?}");
                let hint = "llama.cpp cannot run this tokenizer; keep the tokenizer.json";
                return Err(Error::input(problem, hint));
            };
            vocab.model = "gpt2".into();
            vocab.pre = Some(pre);
            let join = |(left, right)| [tokens.text(left), b" ", tokens.text(right)].concat();
            vocab.merges = Some(joins(tokenizer, encoder).into_iter().map(join).collect());
        }
        Words::Spaces(Spaces { prefix, .. }) => {
            vocab.model = "llama".into();
            vocab.pre = Some("default".into());
            let given = tokenizer.scores.clone();
            vocab.scores = Some(given.unwrap_or_else(|| scores(tokens, encoder)));
            vocab.flags.insert("add_space_prefix".into(), *prefix != Prefix::Never);
        }
    }
    Ok(())
}

impl Tokenizer {
    /// A tokenizer.json with the same ids: the one it was read from, or a new one.
    pub fn to_json(&self) -> Result<String> {
        match &self.original {
            Some(json) => Ok(json.to_string()),
            None => new_json(self),
        }
    }

    /// What a GGUF file needs for llama.cpp to give the same ids.
    pub(crate) fn to_gguf(&self) -> Result<GgufVocab> {
        let encoder = own(self)?;
        let tokens = &self.tokens;
        let mut vocab = GgufVocab { ids: self.ids.clone(), ..GgufVocab::default() };
        for (theirs, ours) in &ALIASES[..3] {
            if let Some(id) = vocab.ids.remove(*ours) {
                vocab.ids.insert((*theirs).into(), id);
            }
        }
        gguf_model(self, encoder, &mut vocab)?;
        let mut types = Vec::with_capacity(tokens.len());
        for id in 0..tokens.len() as u32 {
            let kind = match tokens.kind(id) {
                Kind::Control if self.role("unk") == Some(id) => Kind::Unknown,
                Kind::Absent => Kind::Unused,
                kind => kind,
            };
            types.push(kind as i32);
            vocab.tokens.push(match tokens.kind(id) {
                Kind::Absent => format!("[PAD{id}]").into_bytes(),
                _ => tokens.text(id).to_vec(),
            });
        }
        vocab.token_types = Some(types);
        let ends = [("bos", "add_bos_token", &self.begin), ("eos", "add_eos_token", &self.end)];
        for (role, flag, list) in ends {
            if let Some(id) = list.first() {
                vocab.ids.entry(role.into()).or_insert(*id);
            }
            vocab.flags.insert(flag.into(), !list.is_empty());
        }
        Ok(vocab)
    }
}
