//! tokenizer.json, where it says what our own encoder can do: byte-level BPE, or BPE in the manner
//! of SentencePiece.
//!
//! Reading is strict and never fails: whatever is not understood, or not plainly right, is left to
//! the `tokenizers` crate (`foreign.rs`), whose verdict on a file is the one that counts.
//!
//! | part           | understood                                                          |
//! |----------------|---------------------------------------------------------------------|
//! | normalizer     | none, NFC; Prepend and Replace of spaces                             |
//! | pre_tokenizer  | ByteLevel, Digits, Split by expression; Metaspace without splitting  |
//! | model          | BPE without dropout, prefix or suffix                               |
//! | post_processor | ByteLevel, TemplateProcessing                                       |
//! | decoder        | ByteLevel; Replace, ByteFallback, Fuse, Strip                        |

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use serde_json::Value;
use unicode_normalization::UnicodeNormalization;

use super::bpe::Merges;
use super::encoder::{Encoder, Prefix, SKIPPED, Spaces, Words};
use super::export::{space_decoders, space_normalizers};
use super::gguf;
use super::pre::{DIGIT, GPT2, Stage};
use super::special::{AddedToken, Finder, LEN_MAX, Order};
use super::spm;
use super::tokens::{Alphabet, Kind, SPACE_MARK, Tokens, byte_char, byte_of};
use super::{Codec, Tokenizer};

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: Model,
    /// `normalizer`, `pre_tokenizer` and so on.
    #[serde(flatten)]
    parts: Value,
}

#[derive(Deserialize)]
struct Model {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f32>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
}

/// The prefixes that `export.rs` writes.
const WRITTEN: [Prefix; 2] = [Prefix::Never, Prefix::Each];

/// `"a b"` or `["a", "b"]`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Line(String),
    Pair((String, String)),
}

impl Merge {
    fn pair(&self) -> Option<(&str, &str)> {
        match self {
            Merge::Line(line) => line.split_once(' ').filter(|pair| !pair.1.contains(' ')),
            Merge::Pair((left, right)) => Some((left, right)),
        }
    }
}

fn kind(part: &Value) -> &str {
    part["type"].as_str().unwrap_or("")
}

/// The parts of a Sequence, or the one part there is.
fn sequence<'v>(part: &'v Value, key: &str) -> Option<&'v [Value]> {
    match part {
        Value::Null => Some(&[]),
        _ if kind(part) == "Sequence" => part[key].as_array().map(Vec::as_slice),
        _ => Some(std::slice::from_ref(part)),
    }
}

/// The patterns of a byte-level pre-tokenizer.
fn stages(name: &str, part: &Value) -> Option<Vec<Stage>> {
    let (last, parts) = sequence(part, "pretokenizers")?.split_last()?;
    let mut patterns = Vec::new();
    for part in parts {
        match kind(part) {
            "Digits" if part["individual_digits"] == true => patterns.push(DIGIT),
            "Split" if part["invert"] == false && part["behavior"] == "Isolated" => {
                patterns.push(part["pattern"]["Regex"].as_str()?);
            }
            _ => return None,
        }
    }
    if kind(last) != "ByteLevel" || last["add_prefix_space"] != false {
        return None;
    }
    // Files older than the option have no such key and use the expression.
    if last["use_regex"] != false {
        patterns.push(GPT2);
    }
    patterns.into_iter().map(|pattern| Stage::new(name, pattern).ok()).collect()
}

/// The prefix of a normalizer or pre-tokenizer of SentencePiece that marks spaces.
fn prefix(normalizer: &Value, pre_tokenizer: &Value) -> Option<Prefix> {
    if pre_tokenizer.is_null() {
        let parts = sequence(normalizer, "normalizers")?;
        return WRITTEN.into_iter().find(|prefix| parts == space_normalizers(*prefix));
    }
    let is_metaspace = normalizer.is_null()
        && kind(pre_tokenizer) == "Metaspace"
        && pre_tokenizer["replacement"] == SPACE_MARK.to_string()
        && pre_tokenizer["split"] == false;
    match pre_tokenizer["prepend_scheme"].as_str()? {
        _ if !is_metaspace => None,
        "always" => Some(Prefix::EachWithout),
        "first" => Some(Prefix::FirstWithout),
        "never" => Some(Prefix::Never),
        _ => None,
    }
}

/// Whether the decoder is the one that belongs to `alphabet`, and whether it drops a first space.
fn strips_space(decoder: &Value, alphabet: Alphabet) -> Option<bool> {
    let parts = sequence(decoder, "decoders")?;
    if alphabet == Alphabet::Bytes {
        return matches!(parts, [part] if kind(part) == "ByteLevel").then_some(false);
    }
    let written = WRITTEN.into_iter().find(|prefix| parts == space_decoders(*prefix));
    written.map(|prefix| prefix != Prefix::Never)
}

/// What a post-processor puts before and after a text.
fn template(part: &Value) -> Option<[Vec<u32>; 2]> {
    let mut ends = [Vec::new(), Vec::new()];
    for part in sequence(part, "processors")? {
        match kind(part) {
            "ByteLevel" => continue,
            "TemplateProcessing" => {}
            _ => return None,
        }
        let mut n_texts = 0;
        for piece in part["single"].as_array()? {
            if piece.get("Sequence").is_some() {
                n_texts += 1;
                continue;
            }
            let name = piece["SpecialToken"]["id"].as_str()?;
            for id in part["special_tokens"][name]["ids"].as_array()? {
                ends[n_texts.min(1)].push(u32::try_from(id.as_u64()?).ok()?);
            }
        }
        if n_texts != 1 {
            return None;
        }
    }
    Some(ends)
}

/// The tokens: those of the model, and those added if their ids are the ones the crate gives.
fn tokens(name: &str, file: &File, alphabet: Alphabet) -> Option<Tokens> {
    let vocab = &file.model.vocab;
    let mut pairs: Vec<(u32, &str, Kind)> = Vec::with_capacity(vocab.len());
    for (text, id) in vocab {
        let is_byte = alphabet == Alphabet::Spaces && byte_of(text.as_bytes()).is_some();
        pairs.push((*id, text, if is_byte { Kind::Byte } else { Kind::Normal }));
    }
    let mut ids: Vec<u32> = pairs.iter().map(|pair| pair.0).collect();
    ids.sort_unstable();
    if ids.iter().zip(0..).any(|(id, want)| *id != want) {
        return None;
    }
    let mut next = vocab.len() as u32;
    for added in &file.added_tokens {
        let kind = if added.is_special { Kind::Control } else { Kind::UserDefined };
        match vocab.get(&added.text) {
            Some(id) if *id == added.id => {}
            None if added.id == next => next += 1,
            _ => return None,
        }
        pairs.push((added.id, &added.text, kind));
    }
    Tokens::from_pairs(name, alphabet, &pairs).ok()
}

/// The finders for tokens before and after normalisation.
fn finders(name: &str, file: &File, is_nfc: bool) -> Option<[Option<Finder>; 2]> {
    let mut lists = [Vec::new(), Vec::new()];
    for added in &file.added_tokens {
        if added.single_word || !(1..=LEN_MAX).contains(&added.text.len()) {
            return None;
        }
        let mut added = added.clone();
        if added.normalized && is_nfc {
            added.text = added.text.nfc().collect();
        }
        lists[usize::from(added.normalized)].push(added);
    }
    let [raw, normalized] = lists.map(|list| Finder::new(name, Order::Leftmost, list));
    Some([raw.ok()?, normalized.ok()?])
}

/// The joins by ids; every part and result must be a token.
fn merges(model: &Model) -> Option<Merges> {
    let mut merges = Merges::with_capacity(model.merges.len());
    for (rank, merge) in model.merges.iter().enumerate() {
        let (left, right) = merge.pair()?;
        let id = |text: &str| model.vocab.get(text).copied();
        let result = id(&[left, right].concat())?;
        merges.insert_last(id(left)?, id(right)?, u32::try_from(rank).ok()?, result);
    }
    Some(merges)
}

/// Bytes as symbols. Vocabularies may lack some that UTF-8 never has; the crate leaves out a byte
/// that is no token unless there is a token for what is unknown.
fn byte_words(name: &str, file: &File) -> Option<Words> {
    let mut symbols = Box::new([0; 256]);
    for byte in 0..=255 {
        let letter = byte_char(byte).to_string();
        let id = file.model.vocab.get(&letter).copied();
        symbols[usize::from(byte)] = match file.model.unk_token {
            None => id.unwrap_or(SKIPPED),
            Some(_) => id?,
        };
    }
    Some(Words::Bytes { stages: stages(name, &file.parts["pre_tokenizer"])?, symbols })
}

/// Characters as symbols; each byte must be a token that joins with nothing.
fn space_words(file: &File, tokens: &Tokens, merges: &Merges) -> Option<Words> {
    let prefix = prefix(&file.parts["normalizer"], &file.parts["pre_tokenizer"])?;
    let bytes: Vec<Option<u32>> = (0..=255)
        .map(|byte: u8| file.model.vocab.get(&format!("<0x{byte:02X}>")).copied())
        .collect();
    if bytes.contains(&None) || !file.model.byte_fallback {
        return None;
    }
    let is_byte = |id: u32| tokens.kind(id) == Kind::Byte;
    if merges.list().iter().any(|join| is_byte(join.1) || is_byte(join.2)) {
        return None;
    }
    // Only tokens of the model are symbols, not those added to it.
    let mut symbols = spm::char_symbols(tokens);
    symbols.retain(|_, id| (*id as usize) < file.model.vocab.len());
    let glue = spm::glue(tokens);
    Some(Words::Spaces(Spaces { prefix, symbols, bytes, unknown: None, glue }))
}

/// Reads a tokenizer.json that our own encoder can do.
pub(super) fn read(name: &str, json: &str) -> Option<Tokenizer> {
    let file: File = serde_json::from_str(json).ok()?;
    let model = &file.model;
    let is_blank = |text: &Option<String>| text.as_deref().unwrap_or("").is_empty();
    let is_plain = model.kind.as_deref().unwrap_or("BPE") == "BPE"
        && model.dropout.is_none_or(|dropout| dropout == 0.0)
        && is_blank(&model.continuing_subword_prefix)
        && is_blank(&model.end_of_word_suffix)
        && model.unk_token.as_ref().is_none_or(|unk| model.vocab.contains_key(unk))
        && file.parts["truncation"].is_null()
        && file.parts["padding"].is_null();
    if !is_plain {
        return None;
    }
    let normalizer = &file.parts["normalizer"];
    let is_nfc = kind(normalizer) == "NFC";
    let is_bytes = is_nfc || normalizer.is_null();
    let alphabet =
        if is_bytes && !model.byte_fallback { Alphabet::Bytes } else { Alphabet::Spaces };
    let strips_space = strips_space(&file.parts["decoder"], alphabet)?;
    let mut tokens = tokens(name, &file, alphabet)?;
    let [raw, normalized] = finders(name, &file, is_nfc)?;
    let merges = merges(model)?;
    let words = match alphabet {
        Alphabet::Bytes => byte_words(name, &file)?,
        // After such a normalizer an added token would have to be looked for with its prefix.
        _ if normalized.is_some() || model.ignore_merges => return None,
        _ => space_words(&file, &tokens, &merges)?,
    };
    let whole = (model.ignore_merges).then(|| {
        let mut whole = gguf::whole(&tokens);
        whole.retain(|_, id| (*id as usize) < model.vocab.len());
        whole
    });
    let [begin, end] = template(&file.parts["post_processor"])?;
    let mut ids = BTreeMap::new();
    if let Some(id) = model.unk_token.as_ref().and_then(|unk| model.vocab.get(unk)) {
        ids.insert("unk".to_string(), *id);
    }
    let eog = gguf::roles(&mut tokens, &mut ids, gguf::Names::Added);
    let n_vocab = tokens.len() as u32;
    let is_in = |list: &[u32]| list.iter().all(|id| *id < n_vocab);
    (is_in(&begin) && is_in(&end)).then_some(())?;
    let virtuals = Vec::new();
    let encoder = Encoder { raw, normalized, nfc: is_nfc, words, merges, whole, n_vocab, virtuals };
    let tokenizer = Tokenizer::new(tokens, Codec::Own(Box::new(encoder)), ids, eog);
    Some(Tokenizer { strips_space, begin, end, original: Some(json.into()), ..tokenizer })
}
