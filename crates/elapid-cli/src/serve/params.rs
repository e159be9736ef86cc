//! How an answer is to be made: the fields that all routes share, under the names that OpenAI and
//! llama.cpp give them.
//!
//! Fields that are not known are passed over, as both do.

use super::App;
use super::error::{Answered, ApiError};
use super::fields::{Fields, kind};
use elapid::Sampling;
use elapid::Special;
use elapid::{Constraint, Request};
use serde_json::{Map, Value, json};
use std::hash::{BuildHasher, Hasher, RandomState};

/// Bytes of all texts that end an answer.
const STOP_BYTES_MAX: usize = 4096;
/// Texts that end an answer.
const N_STOPS_MAX: usize = 16;
/// Tokens whose logits are moved.
const N_BIAS_MAX: usize = 1024;
/// Likeliest tokens reported with each token.
pub const N_TOP_MAX: i64 = 20;

/// Sampling where a request does not say.
pub struct Defaults {
    /// Zero is greedy.
    pub temperature: f64,
    /// llama.cpp takes anything below zero for greedy, OpenAI refuses it.
    pub temperature_min: f64,
    /// Zero is all.
    pub top_k: i64,
    /// One is all.
    pub top_p: f64,
    /// Zero is all.
    pub min_p: f64,
}

/// The model's own distribution, as OpenAI has it.
pub const OPENAI: Defaults =
    Defaults { temperature: 1.0, temperature_min: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

/// As llama.cpp has it.
pub const LLAMA: Defaults =
    Defaults { temperature: 0.8, temperature_min: -1.0, top_k: 40, top_p: 0.95, min_p: 0.05 };

/// Whoever completes code wants the likeliest text, and the same each time.
pub const INFILL: Defaults =
    Defaults { temperature: 0.0, temperature_min: -1.0, top_k: 40, top_p: 0.95, min_p: 0.0 };

/// Whether an answer is given whole or as it grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// One object.
    Whole,
    /// Events.
    Stream,
}

/// What all routes share.
#[derive(Clone)]
pub struct Params {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that end the answer.
    pub stop_tokens: Vec<u32>,
    /// Texts that end it.
    pub stop_texts: Vec<String>,
    /// What it must look like.
    pub constraint: Option<Constraint>,
    /// By number, with scales.
    pub adapters: Vec<(usize, f32)>,
    /// Likeliest tokens reported with each token; zero reports its own probability at most.
    pub n_top: usize,
    /// Tokens guessed ahead.
    pub n_lookup: usize,
    /// Whole or as it grows.
    pub mode: Mode,
}

impl Params {
    /// Reads what a request says; `adapters` are those it chose by its model.
    pub fn read(
        app: &App,
        fields: &Fields,
        defaults: &Defaults,
        adapters: Vec<(usize, f32)>,
    ) -> Answered<Params> {
        let stop_texts = stops(fields)?;
        let mut logit_bias = bias(app, fields)?;
        let mut stop_tokens = app.tokenizer.eog().to_vec();
        if fields.flag("ignore_eos")? == Some(true) {
            logit_bias.extend(stop_tokens.drain(..).map(|id| (id, f32::NEG_INFINITY)));
        }
        let stream = fields.flag("stream")?.unwrap_or(false);
        let n_lookup = fields.whole("n_lookup", 0..=64)?.unwrap_or(app.n_lookup as i64);
        Ok(Params {
            sampling: sampling(app, fields, defaults)?,
            logit_bias,
            stop_tokens,
            stop_texts,
            constraint: constraint(fields)?,
            adapters: loras(app, fields)?.unwrap_or(adapters),
            n_top: 0,
            n_lookup: n_lookup as usize,
            mode: if stream { Mode::Stream } else { Mode::Whole },
        })
    }

    /// The request for this prompt; several of one prompt draw differently.
    pub fn request(&self, prompt: Vec<u32>, n_max: usize, choice: usize) -> Request {
        let seed = self.sampling.seed.wrapping_add(choice as u64);
        Request {
            prompt,
            n_max,
            sampling: Sampling { seed, ..self.sampling },
            logit_bias: self.logit_bias.clone(),
            stop_tokens: self.stop_tokens.clone(),
            stop_texts: self.stop_texts.clone(),
            constraint: self.constraint.clone(),
            adapters: self.adapters.clone(),
            n_top: self.n_top,
            n_lookup: self.n_lookup,
            special: Special::Plain,
        }
    }

    /// `generation_settings` of llama.cpp.
    pub fn settings(&self, n_max: usize) -> Value {
        let s = &self.sampling;
        let adapter = |&(id, scale): &(usize, f32)| json!({"id": id, "scale": scale});
        json!({
            "seed": s.seed, "temperature": s.temperature, "top_k": s.top_k.unwrap_or(0),
            "top_p": s.top_p, "min_p": s.min_p, "repeat_last_n": s.n_penalized,
            "repeat_penalty": s.repeat_penalty, "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty, "stop": self.stop_texts,
            "max_tokens": n_max, "n_predict": n_max, "n_probs": self.n_top,
            "stream": self.mode == Mode::Stream, "n_lookup": self.n_lookup,
            "lora": self.adapters.iter().map(adapter).collect::<Vec<_>>(),
        })
    }
}

fn sampling(app: &App, fields: &Fields, defaults: &Defaults) -> Answered<Sampling> {
    let number = |name: &str, low: f64, high: f64, default: f64| -> Answered<f32> {
        Ok(fields.number(name, low..=high)?.unwrap_or(default) as f32)
    };
    let low = defaults.temperature_min;
    let temperature = number("temperature", low, 100.0, defaults.temperature)?.max(0.0);
    let top_k = fields.whole("top_k", -1..=i64::from(i32::MAX))?.unwrap_or(defaults.top_k);
    // A share of nothing leaves the likeliest token.
    let top_p = number("top_p", 0.0, 1.0, defaults.top_p)?.max(f32::MIN_POSITIVE);
    let context = app.context as i64;
    let n_penalized = match fields.whole("repeat_last_n", -1..=i64::from(i32::MAX))?.unwrap_or(64) {
        -1 => context,
        n => n.min(context),
    };
    let repeat = match fields.get("repetition_penalty").is_some() {
        true => "repetition_penalty",
        false => "repeat_penalty",
    };
    Ok(Sampling {
        temperature,
        top_k: usize::try_from(top_k).ok().filter(|k| *k > 0),
        top_p,
        min_p: number("min_p", 0.0, 1.0, defaults.min_p)?,
        repeat_penalty: number(repeat, 0.01, 100.0, 1.0)?,
        frequency_penalty: number("frequency_penalty", -100.0, 100.0, 0.0)?,
        presence_penalty: number("presence_penalty", -100.0, 100.0, 0.0)?,
        n_penalized: n_penalized as usize,
        seed: seed(fields)?,
    })
}

/// The seed that was given, or another each time.
fn seed(fields: &Fields) -> Answered<u64> {
    let large = fields.get("seed").and_then(Value::as_u64);
    // llama.cpp writes -1 as a number of 32 bits too.
    let is_any = |seed: &u64| *seed != u64::from(u32::MAX);
    let given = match large {
        Some(seed) => Some(seed).filter(is_any),
        None => fields.whole("seed", i64::MIN..=i64::MAX)?.filter(|n| *n != -1).map(|n| n as u64),
    };
    // Each of these is made with keys of its own.
    Ok(given.unwrap_or_else(|| RandomState::new().build_hasher().finish()))
}

fn stops(fields: &Fields) -> Answered<Vec<String>> {
    let mut texts = fields.texts("stop", N_STOPS_MAX)?;
    texts.retain(|text| !text.is_empty());
    let n_bytes: usize = texts.iter().map(String::len).sum();
    if n_bytes > STOP_BYTES_MAX {
        let words = format!("has {n_bytes} bytes, at most {STOP_BYTES_MAX} are taken");
        return Err(ApiError::field("stop", words));
    }
    Ok(texts)
}

/// `{"15043": -100}` of OpenAI; `[[15043, 1.5], ["text", false]]` of llama.cpp.
fn bias(app: &App, fields: &Fields) -> Answered<Vec<(u32, f32)>> {
    const NAME: &str = "logit_bias";
    let pairs: Vec<(Value, Value)> = match fields.get(NAME) {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => {
            let number = |key: &String| key.parse::<u64>().map_or(json!(key), |id| json!(id));
            map.iter().map(|(key, value)| (number(key), value.clone())).collect()
        }
        Some(Value::Array(list)) => {
            let pair = |item: &Value| match item.as_array().map(Vec::as_slice) {
                Some([token, value]) => Ok((token.clone(), value.clone())),
                _ => Err(ApiError::field(NAME, "is a list of pairs: [[15043, 1.5]]")),
            };
            list.iter().map(pair).collect::<Answered<_>>()?
        }
        Some(other) => {
            let words = format!("is {}, not an object or a list of pairs", kind(other));
            return Err(ApiError::field(NAME, words));
        }
    };
    if pairs.len() > N_BIAS_MAX {
        let words = format!("moves {} tokens, at most {N_BIAS_MAX} are taken", pairs.len());
        return Err(ApiError::field(NAME, words));
    }
    let mut list = Vec::new();
    for (token, value) in pairs {
        let amount = match &value {
            Value::Bool(false) => f32::NEG_INFINITY,
            Value::Number(number) => number.as_f64().unwrap_or(0.0).clamp(-1e4, 1e4) as f32,
            other => {
                return Err(ApiError::field(NAME, format!("moves by {}", kind(other))));
            }
        };
        let ids = match &token {
            Value::String(text) => app.tokenizer.encode(text, Special::Parse)?,
            other => vec![app.token_id(NAME, other)?],
        };
        list.extend(ids.into_iter().map(|id| (id, amount)));
        if list.len() > N_BIAS_MAX {
            return Err(ApiError::field(NAME, format!("moves more than {N_BIAS_MAX} tokens")));
        }
    }
    Ok(list)
}

/// What the answer must look like, under any of its names.
fn constraint(fields: &Fields) -> Answered<Option<Constraint>> {
    let mut found = Vec::new();
    if let Some(schema) = fields.object("json_schema")? {
        found.push(Constraint::JsonSchema(Value::Object(schema.clone())));
    }
    if let Some(regex) = fields.text("regex")? {
        found.push(Constraint::Regex(regex.to_string()));
    }
    if let Some(grammar) = fields.text("grammar")?.filter(|text| !text.is_empty()) {
        found.push(grammar_of(grammar)?);
    }
    if let Some(format) = fields.object("response_format")? {
        found.extend(response_format(format)?);
    }
    if found.len() > 1 {
        let words = "more than one of `json_schema`, `grammar`, `regex` and `response_format`";
        return Err(ApiError::bad(format!("the request has {words}; give one")));
    }
    Ok(found.pop())
}

fn grammar_of(grammar: &str) -> Answered<Constraint> {
    if grammar.trim_start().starts_with("%llguidance") {
        return Ok(Constraint::Lark(grammar.to_string()));
    }
    let words = "GBNF is not read here; give `json_schema`, `regex`, or a grammar in the dialect \
                 of Lark that begins with `%llguidance {}`";
    Err(ApiError::field("grammar", words))
}

fn response_format(format: &Map<String, Value>) -> Answered<Option<Constraint>> {
    const NAME: &str = "response_format";
    let of_type = format.get("type").and_then(Value::as_str).unwrap_or("");
    let schema = match of_type {
        "text" => return Ok(None),
        "json_object" => format.get("schema").cloned().unwrap_or(json!({"type": "object"})),
        "json_schema" => {
            // llama.cpp's own form has the schema one level up.
            let inner = format.get("json_schema").and_then(|inner| inner.get("schema"));
            let found = inner.or(format.get("schema")).cloned();
            found.ok_or_else(|| ApiError::field(NAME, "has no `json_schema.schema`"))?
        }
        other => {
            let words = format!("has the type `{other}`; known: text, json_object, json_schema");
            return Err(ApiError::field(NAME, words));
        }
    };
    match schema.is_object() {
        true => Ok(Some(Constraint::JsonSchema(schema))),
        false => Err(ApiError::field(NAME, format!("the schema is {}", kind(&schema)))),
    }
}

/// `[{"id": 0, "scale": 0.5}]`: those that are not named are off.
pub fn scales(app: &App, name: &str, list: &[Value]) -> Answered<Vec<(usize, f32)>> {
    let mut found: Vec<(usize, f32)> = Vec::new();
    for item in list {
        let Value::Object(map) = item else {
            return Err(ApiError::field(name, r#"is a list like [{"id": 0, "scale": 1.0}]"#));
        };
        let item = Fields::new(map.clone());
        let n = app.adapters.len();
        let Some(id) = item.whole("id", 0..=i64::MAX)? else {
            return Err(ApiError::field(name, "has an item without `id`"));
        };
        let id = usize::try_from(id).unwrap_or(usize::MAX);
        if id >= n {
            let words = format!("names adapter {id}; this server has {n}");
            return Err(ApiError::field(name, words));
        }
        let scale = item.number("scale", -1e4..=1e4)?.unwrap_or(1.0) as f32;
        found.retain(|adapter| adapter.0 != id);
        found.push((id, scale));
    }
    found.sort_unstable_by_key(|adapter| adapter.0);
    found.retain(|adapter| adapter.1 != 0.0);
    Ok(found)
}

fn loras(app: &App, fields: &Fields) -> Answered<Option<Vec<(usize, f32)>>> {
    match fields.list("lora")? {
        Some(list) => scales(app, "lora", list).map(Some),
        None => Ok(None),
    }
}
