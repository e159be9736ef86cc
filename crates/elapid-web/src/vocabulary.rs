//! Tokenizers.

use crate::failure::{Done, Failure, options};
use crate::model::{folder, given, put};
use elapid::{BpeTrainer, Special, Texts, Tokenizer, take_files};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use wasm_bindgen::prelude::*;

/// A tokenizer. (The name that JavaScript knows is taken by the engine's.)
#[wasm_bindgen]
pub struct Vocabulary(Arc<Tokenizer>);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TrainingOptions {
    size: Option<usize>,
    min_count: Option<u64>,
    specials: Option<Vec<String>>,
}

/// Special tokens of a new vocabulary: the end of a text, those of fill-in-the-middle, of projects.
const SPECIALS: [&str; 7] = [
    "<|endoftext|>",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

#[wasm_bindgen]
impl Vocabulary {
    /// Opens the tokenizer that was given: one file, or those of a directory.
    pub fn open() -> Done<Vocabulary> {
        let mut files = given();
        // Bytes may come without a name.
        if let (1, Some(only)) = (files.len(), files.first_entry())
            && only.get().trim_ascii_start().starts_with(b"{")
        {
            let bytes = only.remove();
            files.insert("tokenizer.json".into(), bytes);
        }
        let dir = folder();
        put(&dir, &files)?;
        let only = files.keys().next().filter(|_| files.len() == 1);
        let path = only.map_or(dir.clone(), |name| dir.join(name));
        let found = Tokenizer::open(path);
        take_files(&dir);
        Ok(Vocabulary(Arc::new(found?)))
    }

    /// Makes a vocabulary of texts.
    pub fn train(texts: Vec<String>, json: &str) -> Done<Vocabulary> {
        let options: TrainingOptions = options(json)?;
        let specials = options.specials.unwrap_or_else(|| SPECIALS.map(String::from).to_vec());
        let (n_vocab, min_count) = (options.size.unwrap_or(4096), options.min_count.unwrap_or(2));
        let n_least = 256 + specials.len();
        if !(n_least..=1 << 20).contains(&n_vocab) {
            let hint = format!("it must be from {n_least} to {}", 1 << 20);
            return Err(Failure::input(format!("a vocabulary of {n_vocab} tokens"), &hint));
        }
        let trainer = BpeTrainer { n_vocab, min_count, specials };
        let mut each = texts.iter().map(String::as_str);
        let made = Tokenizer::train(&trainer, "gpt-2", &mut each, &mut |_, _| {})?;
        Ok(Vocabulary(Arc::new(made)))
    }

    /// Tokens.
    pub fn size(&self) -> usize {
        self.0.n_vocab()
    }

    /// The ids of a text.
    pub fn encode(&self, text: &str, special: bool) -> Done<Vec<u32>> {
        let special = if special { Special::Parse } else { Special::Plain };
        Ok(self.0.encode(text, special)?)
    }

    /// The text of ids, special tokens among it; ids that are no tokens stand for nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        let known: Vec<u32> =
            ids.iter().copied().filter(|id| self.0.token(*id).is_some()).collect();
        self.0.decode(&known, Special::Parse)
    }

    /// As `tokenizer.json`.
    #[wasm_bindgen(js_name = toJson)]
    pub fn to_json(&self) -> Done<String> {
        Ok(self.0.to_json()?)
    }
}

impl Vocabulary {
    pub(crate) fn of(tokenizer: Arc<Tokenizer>) -> Vocabulary {
        Vocabulary(tokenizer)
    }

    /// The files of a new model with this vocabulary.
    pub(crate) fn files(&self) -> Done<Texts> {
        let token = |id: Option<u32>| id.and_then(|id| self.0.token(id));
        let end = self.0.eos().or_else(|| self.0.encode(SPECIALS[0], Special::Parse).ok()?.pop());
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
            "bos_token": token(self.0.bos()), "eos_token": token(end),
        });
        let config = format!("{config:#}\n").into_bytes();
        let json = self.0.to_json()?.into_bytes();
        Ok(vec![("tokenizer.json", json), ("tokenizer_config.json", config)])
    }
}
