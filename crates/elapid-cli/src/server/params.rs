//! How an answer is to be made: the fields that all routes share, under the names that OpenAI and
//! llama.cpp give them.

use super::App;
use super::body::{Int, Num, Texts, whole};
use super::error::{Answered, ApiError};
use super::gbnf;
use elapid::{Constraint, Request, Sampling, Special};
use serde::Deserialize;
use serde_json::{Map, Number, Value, json};
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher, RandomState};

const STOP_BYTES_MAX: usize = 4096;
const N_STOPS_MAX: usize = 16;
const N_BIAS_MAX: usize = 1024;
/// Likeliest tokens reported with each token.
pub type Top = Int<0, 20>;

/// Whose sampling holds where a request does not say.
#[derive(Clone, Copy, PartialEq)]
pub enum Defaults {
    Openai,
    Llama,
    Ollama,
    Infill,
}

/// The fields of a body that all routes share.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Common {
    temperature: Option<Num<-1, 100>>,
    top_k: Option<Int<-1, { i32::MAX as i64 }>>,
    top_p: Option<Num<0, 1>>,
    min_p: Option<Num<0, 1>>,
    repeat_last_n: Option<Int<-1, { i32::MAX as i64 }>>,
    repeat_penalty: Option<Num<0, 100>>,
    repetition_penalty: Option<Num<0, 100>>,
    frequency_penalty: Option<Num<-100, 100>>,
    presence_penalty: Option<Num<-100, 100>>,
    seed: Option<Number>,
    stop: Option<Texts>,
    logit_bias: Option<Bias>,
    ignore_eos: Option<bool>,
    stream: Option<bool>,
    n_lookup: Option<Int<0, 64>>,
    lora: Option<Vec<Scale>>,
    json_schema: Option<Map<String, Value>>,
    regex: Option<String>,
    grammar: Option<String>,
    response_format: Option<ResponseFormat>,
    samplers: Option<Texts>,
    dry_multiplier: Option<Num<0, 100>>,
    dry_base: Option<Num<1, 100>>,
    dry_allowed_length: Option<Int<0, 4096>>,
    dry_penalty_last_n: Option<Int<-1, { i32::MAX as i64 }>>,
    dry_sequence_breakers: Option<Texts>,
    xtc_probability: Option<Num<0, 1>>,
    xtc_threshold: Option<Num<0, 1>>,
}

/// `{"15043": -100}` of OpenAI; `[[15043, 1.5], ["text", false]]` of llama.cpp.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected an object or a list of pairs: [[15043, 1.5]]")]
enum Bias {
    Map(BTreeMap<String, Amount>),
    List(Vec<(Biased, Amount)>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Biased {
    Id(u32),
    Text(String),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Amount {
    By(f64),
    /// `false` forbids a token.
    Allowed(bool),
}

#[derive(Deserialize)]
pub struct Scale {
    id: usize,
    scale: Option<Num<-10_000, 10_000>>,
}

#[derive(Deserialize)]
struct ResponseFormat {
    r#type: String,
    json_schema: Option<Value>,
    schema: Option<Value>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Whole,
    Stream,
}

/// What all routes share, checked.
#[derive(Clone)]
pub struct Params {
    /// The request but for its prompt and length.
    pub request: Request,
    pub mode: Mode,
}

impl Params {
    /// Checks what a request says; `adapters` are those it chose by its model.
    pub fn new(
        app: &App,
        common: Common,
        defaults: Defaults,
        adapters: Vec<(usize, f32)>,
    ) -> Answered<Params> {
        let sampling = sampling(app, &common, defaults)?;
        let mut logit_bias = bias(app, common.logit_bias)?;
        let mut stop_tokens = app.tokenizer.eog().to_vec();
        if common.ignore_eos == Some(true) {
            logit_bias.extend(stop_tokens.drain(..).map(|id| (id, f32::NEG_INFINITY)));
        }
        let forms = [
            common.json_schema.map(|schema| Ok(Constraint::JsonSchema(Value::Object(schema)))),
            common.regex.map(|regex| Ok(Constraint::Regex(regex))),
            common.grammar.filter(|text| !text.is_empty()).map(grammar),
            common.response_format.and_then(|format| response_format(format).transpose()),
        ];
        let mut forms = forms.into_iter().flatten().collect::<Answered<Vec<_>>>()?;
        if forms.len() > 1 {
            let words = "more than one of `json_schema`, `grammar`, `regex` and `response_format`";
            return Err(ApiError::bad(format!("the request has {words}; give one")));
        }
        let request = Request {
            sampling,
            logit_bias,
            stop_tokens,
            stop_texts: stops(common.stop)?,
            dry_breakers: match common.dry_sequence_breakers {
                None => Request::default().dry_breakers,
                given => Texts::list(given, "dry_sequence_breakers", N_STOPS_MAX)?,
            },
            constraint: forms.pop(),
            adapters: match common.lora {
                Some(list) => scales(app, "lora", &list)?,
                None => adapters,
            },
            n_lookup: common.n_lookup.map_or(app.settings.n_lookup, Int::size),
            ..Request::default()
        };
        let mode = if common.stream == Some(true) { Mode::Stream } else { Mode::Whole };
        Ok(Params { request, mode })
    }

    /// The same for what ends where the middle of a file ends.
    pub fn with_fim_stops(mut self, app: &App) -> Params {
        self.request.stop_tokens.extend(app.fim.iter().flat_map(|fim| fim.stops()));
        self
    }

    /// The request for this prompt; several of one prompt draw differently.
    pub fn request(&self, prompt: Vec<u32>, n_max: usize, choice: usize) -> Request {
        let seed = self.request.sampling.seed.wrapping_add(choice as u64);
        let sampling = Sampling { seed, ..self.request.sampling };
        Request { prompt, n_max, sampling, ..self.request.clone() }
    }

    /// `generation_settings` of llama.cpp.
    pub fn settings(&self, n_max: usize) -> Value {
        let (r, s) = (&self.request, &self.request.sampling);
        let adapter = |&(id, scale): &(usize, f32)| json!({"id": id, "scale": scale});
        json!({
            "seed": s.seed, "temperature": s.temperature, "top_k": s.top_k.unwrap_or(0),
            "top_p": s.top_p, "min_p": s.min_p, "repeat_last_n": s.n_penalized,
            "repeat_penalty": s.repeat_penalty, "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty, "stop": r.stop_texts,
            "max_tokens": n_max, "n_predict": n_max, "n_probs": r.n_top,
            "stream": self.mode == Mode::Stream, "n_lookup": r.n_lookup,
            "dry_multiplier": s.dry_multiplier, "dry_base": s.dry_base,
            "dry_allowed_length": s.dry_allowed_length, "dry_penalty_last_n": s.dry_last_n,
            "dry_sequence_breakers": r.dry_breakers, "xtc_probability": s.xtc_probability,
            "xtc_threshold": s.xtc_threshold,
            "samplers": SAMPLERS.iter().filter_map(|(letter, name)| {
                Some((s.sequence.iter().position(|it| *it == *letter as u8)?, name))
            }).collect::<BTreeMap<_, _>>().into_values().collect::<Vec<_>>(),
            "lora": r.adapters.iter().map(adapter).collect::<Vec<_>>(),
        })
    }
}

fn sampling(app: &App, common: &Common, defaults: Defaults) -> Answered<Sampling> {
    let default = match defaults {
        // The model's own distribution.
        Defaults::Openai => Sampling { temperature: 1.0, ..Sampling::greedy() },
        Defaults::Llama => Sampling::default(),
        Defaults::Ollama => {
            Sampling { top_p: 0.9, min_p: 0.0, repeat_penalty: 1.1, ..Sampling::default() }
        }
        // Whoever completes code wants the likeliest text, and the same each time.
        Defaults::Infill => Sampling { temperature: 0.0, min_p: 0.0, ..Sampling::default() },
    };
    let temperature = common.temperature.map_or(default.temperature, |it| it.0 as f32);
    // llama.cpp takes anything below zero for greedy.
    if temperature < 0.0 && defaults == Defaults::Openai {
        let words = format!("{temperature} is not a number from 0 to 100");
        return Err(ApiError::field("temperature", words));
    }
    let n_last = |n: i64| if n < 0 { app.context } else { app.context.min(n as usize) };
    let repeat_penalty = common.repetition_penalty.or(common.repeat_penalty);
    Ok(Sampling {
        temperature: temperature.max(0.0),
        top_k: common.top_k.map_or(default.top_k, |k| Some(k.size())).filter(|k| *k > 0),
        // A share of nothing leaves the likeliest token.
        top_p: common.top_p.map_or(default.top_p, |p| p.0 as f32).max(f32::MIN_POSITIVE),
        min_p: common.min_p.map_or(default.min_p, |p| p.0 as f32),
        repeat_penalty: repeat_penalty.map_or(default.repeat_penalty, |it| it.0 as f32),
        frequency_penalty: common.frequency_penalty.map_or(0.0, |it| it.0 as f32),
        presence_penalty: common.presence_penalty.map_or(0.0, |it| it.0 as f32),
        n_penalized: n_last(common.repeat_last_n.map_or(64, |n| n.0)),
        dry_multiplier: common.dry_multiplier.map_or(0.0, |it| it.0 as f32),
        dry_base: common.dry_base.map_or(default.dry_base, |it| it.0 as f32),
        dry_allowed_length: common.dry_allowed_length.map_or(2, Int::size),
        dry_last_n: n_last(common.dry_penalty_last_n.map_or(-1, |n| n.0)),
        xtc_probability: common.xtc_probability.map_or(0.0, |it| it.0 as f32),
        xtc_threshold: common.xtc_threshold.map_or(0.1, |it| it.0 as f32),
        sequence: match &common.samplers {
            Some(names) if temperature > 0.0 => sequence(names)?,
            // The likeliest token stays the likeliest.
            _ => default.sequence,
        },
        seed: seed(common.seed.as_ref())?,
    })
}

/// Samplers, by llama.cpp's letter and name. The last two have fields of their own, which must be
/// off.
const SAMPLERS: [(char, &str); 9] = [
    ('e', "penalties"),
    ('d', "dry"),
    ('k', "top_k"),
    ('p', "top_p"),
    ('m', "min_p"),
    ('x', "xtc"),
    ('t', "temperature"),
    ('s', "top_n_sigma"),
    ('y', "typ_p"),
];

/// The letters of this list of llama.cpp's, each once.
fn sequence(names: &Texts) -> Answered<[u8; 8]> {
    const NAME: &str = "samplers";
    let letter = |is_it: &dyn Fn(&(char, &str)) -> bool, name: &dyn std::fmt::Display| {
        let known = SAMPLERS[..7].iter().map(|pair| pair.1).collect::<Vec<_>>().join(", ");
        let words = || ApiError::field(NAME, format!("`{name}` is not known; known: {known}"));
        SAMPLERS.iter().find(|pair| is_it(pair)).map(|pair| pair.0 as u8).ok_or_else(words)
    };
    let letters: Answered<Vec<u8>> = match names {
        Texts::One(letters) => letters.chars().map(|ch| letter(&|it| it.0 == ch, &ch)).collect(),
        Texts::Many(list) => list.iter().map(|name| letter(&|it| it.1 == name, name)).collect(),
    };
    let (mut sequence, mut n) = ([0; 8], 0);
    for letter in letters?.into_iter().filter(|letter| !b"sy".contains(letter)) {
        if sequence.contains(&letter) {
            return Err(ApiError::field(NAME, "names a sampler twice"));
        }
        sequence[n] = letter;
        n += 1;
    }
    Ok(sequence)
}

/// The seed that was given, or another each time.
fn seed(seed: Option<&Number>) -> Answered<u64> {
    let bits = |number: &Number| {
        let words = || ApiError::field("seed", format!("{number} is not a whole number"));
        number.as_u64().or(whole(number).map(|n| n as u64)).ok_or_else(words)
    };
    let given = seed.map(bits).transpose()?;
    // llama.cpp writes -1, also as a number of 32 bits, for any.
    let given = given.filter(|seed| ![u64::MAX, u64::from(u32::MAX)].contains(seed));
    // Each of these is made with keys of its own.
    Ok(given.unwrap_or_else(|| RandomState::new().build_hasher().finish()))
}

fn stops(texts: Option<Texts>) -> Answered<Vec<String>> {
    let mut texts = Texts::list(texts, "stop", N_STOPS_MAX)?;
    texts.retain(|text| !text.is_empty());
    let n_bytes: usize = texts.iter().map(String::len).sum();
    if n_bytes > STOP_BYTES_MAX {
        let words = format!("has {n_bytes} bytes, at most {STOP_BYTES_MAX} are taken");
        return Err(ApiError::field("stop", words));
    }
    Ok(texts)
}

fn bias(app: &App, bias: Option<Bias>) -> Answered<Vec<(u32, f32)>> {
    const NAME: &str = "logit_bias";
    let pairs = match bias {
        None => return Ok(Vec::new()),
        Some(Bias::List(list)) => list,
        Some(Bias::Map(map)) => {
            let token = |key: String| key.parse().map_or(Biased::Text(key), Biased::Id);
            map.into_iter().map(|(key, amount)| (token(key), amount)).collect()
        }
    };
    let mut list = Vec::new();
    for (token, amount) in pairs {
        let amount = match amount {
            Amount::By(amount) => amount.clamp(-1e4, 1e4) as f32,
            Amount::Allowed(false) => f32::NEG_INFINITY,
            Amount::Allowed(true) => return Err(ApiError::field(NAME, "moves a token by `true`")),
        };
        let ids = match token {
            Biased::Text(text) => app.tokenizer.encode(&text, Special::Parse)?,
            Biased::Id(id) => vec![app.token_id(NAME, id)?],
        };
        list.extend(ids.into_iter().map(|id| (id, amount)));
        if list.len() > N_BIAS_MAX {
            return Err(ApiError::field(NAME, format!("moves more than {N_BIAS_MAX} tokens")));
        }
    }
    Ok(list)
}

/// Lark of llguidance by its first word, else GBNF of llama.cpp.
fn grammar(grammar: String) -> Answered<Constraint> {
    match grammar.trim_start().starts_with("%llguidance") {
        true => Ok(Constraint::Lark(grammar)),
        false => Ok(Constraint::Lark(gbnf::to_lark(&grammar)?)),
    }
}

fn response_format(format: ResponseFormat) -> Answered<Option<Constraint>> {
    const NAME: &str = "response_format";
    let ResponseFormat { r#type, json_schema, schema } = format;
    let schema = match &r#type[..] {
        "text" => return Ok(None),
        "json_object" => schema.unwrap_or(json!({"type": "object"})),
        "json_schema" => {
            // llama.cpp's own form has the schema one level up.
            let inner = json_schema.and_then(|inner| inner.get("schema").cloned());
            inner.or(schema).ok_or_else(|| ApiError::field(NAME, "has no `json_schema.schema`"))?
        }
        other => {
            let words = format!("has the type `{other}`; known: text, json_object, json_schema");
            return Err(ApiError::field(NAME, words));
        }
    };
    match schema.is_object() {
        true => Ok(Some(Constraint::JsonSchema(schema))),
        false => Err(ApiError::field(NAME, "has a schema that is not an object")),
    }
}

/// `[{"id": 0, "scale": 0.5}]`: those that are not named are off.
pub fn scales(app: &App, name: &str, list: &[Scale]) -> Answered<Vec<(usize, f32)>> {
    let mut found = BTreeMap::new();
    let adapters = app.entry.adapters();
    for Scale { id, scale } in list {
        if !adapters.get(*id).is_some_and(Option::is_some) {
            let n = adapters.iter().flatten().count();
            let words = format!("names adapter {id}; this server has {n}");
            return Err(ApiError::field(name, words));
        }
        found.insert(*id, scale.map_or(1.0, |scale| scale.0 as f32));
    }
    Ok(found.into_iter().filter(|(_, scale)| *scale != 0.0).collect())
}
