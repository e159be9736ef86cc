//! The vocabulary between files and tokenizer: GGUF metadata, and the small files of a directory.

use crate::error::{Error, Result};
use crate::files::Lookup;
use crate::files::TensorFile;
use crate::files::gguf::{Gguf, Item};
use crate::tensor::SharedBytes;
use crate::text::tokenizer::{GgufVocab, Tokenizer};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

const PREFIX: &str = "tokenizer.ggml.";
/// The tokenizer of a model that has none.
const NONE: &str = "none";

/// The vocabulary of a GGUF file; none where the file says it has none.
pub fn from_gguf(gguf: &Gguf) -> Result<Option<GgufVocab>> {
    let key = |name: &str| format!("{PREFIX}{name}");
    let model = match gguf.str(&key("model"))? {
        None | Some(NONE) => return Ok(None),
        Some(model) => model.to_string(),
    };
    let owned = |list: Vec<&[u8]>| list.into_iter().map(<[u8]>::to_vec).collect::<Vec<_>>();
    let tokens = gguf.strings(&key("tokens"))?.ok_or_else(|| {
        let hint = "convert the original again";
        Error::config(gguf.file(), &key("tokens"), "is missing", hint)
    })?;
    let token_types = gguf.ints(&key("token_type"))?;
    let narrow = |n: i64| i32::try_from(n).unwrap_or(i32::MAX);
    let (mut ids, mut flags) = (BTreeMap::new(), BTreeMap::new());
    for full in gguf.keys() {
        let Some(name) = full.strip_prefix(PREFIX) else { continue };
        if let Some(name) = name.strip_suffix("_token_id")
            && let Some(id) = gguf.size(full)?
        {
            // What does not fit is beyond every vocabulary.
            ids.insert(name.to_string(), u32::try_from(id).unwrap_or(u32::MAX));
        } else if matches!(
            name,
            "add_bos_token" | "add_eos_token" | "add_space_prefix" | "remove_extra_whitespaces"
        ) && let Some(flag) = gguf.bool(full)?
        {
            flags.insert(name.to_string(), flag);
        }
    }
    let n_tokens = tokens.len();
    let mut scores = gguf.floats(&key("scores"))?;
    scores.iter_mut().for_each(|scores| scores.truncate(n_tokens));
    Ok(Some(GgufVocab {
        model,
        pre: gguf.str(&key("pre"))?.map(str::to_string),
        tokens: owned(tokens),
        token_types: token_types.map(|list| list.into_iter().take(n_tokens).map(narrow).collect()),
        scores,
        merges: gguf.strings(&key("merges"))?.map(owned),
        ids,
        flags,
    }))
}

/// The metadata of a vocabulary for a model of `n_vocab` rows: filled up with unused tokens.
pub fn to_gguf(tokenizer: Option<&Tokenizer>, n_vocab: usize) -> Result<Vec<(String, Item)>> {
    let key = |name: &str| format!("{PREFIX}{name}");
    let Some(tokenizer) = tokenizer else {
        return Ok(vec![(key("model"), Item::Str(NONE.into()))]);
    };
    let GgufVocab { model, pre, mut tokens, token_types, mut scores, merges, ids, flags } =
        tokenizer.to_gguf()?;
    if tokens.len() > n_vocab {
        let problem = format!("the tokenizer has {} tokens, the model {n_vocab}", tokens.len());
        return Err(Error::input(problem, "the tokenizer may belong to another model"));
    }
    const UNUSED: i32 = 5;
    tokens.extend((tokens.len()..n_vocab).map(|id| format!("[PAD{id}]").into_bytes()));
    let mut types = token_types.unwrap_or_default();
    types.resize(n_vocab, UNUSED);
    scores.iter_mut().for_each(|scores| scores.resize(n_vocab, -1e4));
    let mut list = vec![(key("model"), Item::Str(model))];
    list.extend(pre.map(|pre| (key("pre"), Item::Str(pre))));
    list.push((key("tokens"), Item::Strings(tokens)));
    list.push((key("token_type"), Item::I32s(types)));
    list.extend(scores.map(|scores| (key("scores"), Item::F32s(scores))));
    list.extend(merges.map(|merges| (key("merges"), Item::Strings(merges))));
    list.extend(ids.iter().map(|(name, id)| (key(&format!("{name}_token_id")), Item::U32(*id))));
    list.extend(flags.iter().map(|(name, flag)| (key(name), Item::Bool(*flag))));
    Ok(list)
}

/// A token as tokenizer_config.json names it: a string, or an object with its `content`.
fn token(map: &Map<String, Value>, key: &str) -> Option<String> {
    match map.get(key)? {
        Value::String(text) => Some(text.clone()),
        Value::Object(object) => object.get("content")?.as_str().map(str::to_string),
        _ => None,
    }
}

/// The tokenizer of a directory or package: tokenizer.json, or vocab.json and merges.txt; beside
/// them, what names the tokens that begin and end a text.
///
/// `dir` is the name of the directory, for messages; `main` that of the tokenizer.json, which a
/// person may have called otherwise.
pub fn from_files(dir: &str, main: &str, lookup: &Lookup) -> Result<Option<Tokenizer>> {
    let at = |name: &str| match dir {
        "" => name.to_string(),
        _ => format!("{dir}/{name}"),
    };
    let object = |name: &str| -> Result<Map<String, Value>> {
        match lookup(name)? {
            Some(bytes) => object(&at(name), (*bytes).as_ref()),
            None => Ok(Map::new()),
        }
    };
    // The config may hold a bare Infinity, which is not JSON; it is only asked for ids.
    let model = object("config.json").unwrap_or_default();
    let [json, vocab, merges] = [main, "vocab.json", "merges.txt"].map(lookup);
    let mut tokenizer = match (json?, vocab?, merges?) {
        (Some(json), _, _) => Tokenizer::from_json(&at(main), (*json).as_ref())?,
        (None, Some(vocab), Some(merges)) => {
            let pre = pre_tokenizer(model.get("model_type").and_then(Value::as_str));
            let (vocab, merges) = ((*vocab).as_ref(), (*merges).as_ref());
            let files = ["vocab.json", "merges.txt"].map(at);
            Tokenizer::from_vocab_merges([&files[0], &files[1]], vocab, merges, pre)?
        }
        _ => return Ok(None),
    };
    let (config, map) = (object("tokenizer_config.json")?, object("special_tokens_map.json")?);
    let generation = object("generation_config.json")?;
    let by_id = |key: &str| {
        let id = generation.get(key).or(model.get(key))?;
        let id = id.as_u64().or_else(|| id.as_array()?.first()?.as_u64())?;
        tokenizer.token(u32::try_from(id).ok()?)
    };
    let name = |key: &str| token(&config, key).or_else(|| token(&map, key));
    let bos = name("bos_token").or_else(|| by_id("bos_token_id"));
    let eos = name("eos_token").or_else(|| by_id("eos_token_id"));
    tokenizer.set_specials(bos.as_deref(), eos.as_deref());
    Ok(Some(tokenizer))
}

/// The tokenizer of a GGUF file, which need not hold a model.
pub fn from_gguf_file(file: &str, bytes: SharedBytes) -> Result<Option<Tokenizer>> {
    let gguf = Gguf::parse(file, bytes)?;
    from_gguf(&gguf)?.map(|vocab| Tokenizer::from_gguf(file, vocab)).transpose()
}

pub(crate) fn object(name: &str, bytes: &[u8]) -> Result<Map<String, Value>> {
    let hint = "convert or download the model again";
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(Error::format(name, "is not a JSON object", hint)),
        Err(error) => Err(Error::format(name, format!("not JSON: {error}"), hint)),
    }
}

/// How text is cut before byte-pair encoding where no file of the model says it.
fn pre_tokenizer(family: Option<&str>) -> &'static str {
    match family {
        Some("qwen2" | "qwen3" | "qwen2_moe") => "qwen2",
        _ => "gpt-2",
    }
}
