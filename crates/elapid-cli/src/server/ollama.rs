//! The routes of Ollama, `/api/...`, as Zed, Continue, Open WebUI and its own clients call them.
//!
//! Requests become those of OpenAI (`translated`): `options` go one level up, `num_predict` is
//! `max_tokens`, `format` is `response_format`. Answers are streamed unless `stream` is false, one
//! object a line. A prompt of `/api/generate` is a message of a chat, unless it is `raw`, has a
//! `suffix`, or the model has no template.
//!
//! Not here: pulling, copying and deleting models; `template` and `context`.

use super::answer::{End, Piece, Shape, Wire};
use super::body::{Body, Limit, Prompt, Size};
use super::chat::Ready;
use super::error::{Answered, ApiError, Dialect};
use super::fields::names;
use super::llama::Hole;
use super::models::{Entry, Models};
use super::openai::embed;
use super::params::{Common, Defaults, Params};
use super::tools::{Parser, Part, Syntax};
use super::{App, now_s};
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use elapid::{ModelInfo, Reason};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The version of Ollama whose routes these are: clients ask for a newest one at least.
const VERSION: &str = "0.12.6";

/// Options about memory and speed, which are flags of the server here.
const RESOURCES: [&str; 14] = [
    "f16_kv",
    "low_vram",
    "main_gpu",
    "num_batch",
    "num_ctx",
    "num_gpu",
    "num_keep",
    "num_thread",
    "numa",
    "penalize_newline",
    "use_mlock",
    "use_mmap",
    "vocab_only",
    "logits_all",
];

pub async fn version() -> Json<Value> {
    Json(json!({"version": VERSION}))
}

/// A time as clients read it.
fn time(seconds: u64) -> String {
    jiff::Timestamp::from_second(seconds as i64).unwrap_or_default().to_string()
}

fn entry(models: &Models, it: &Entry, name: &str) -> Value {
    let size: usize = it.info.dtype_bytes.values().sum();
    let digest = blake3::hash(format!("{name}\n{}", it.path.display()).as_bytes()).to_hex();
    json!({
        "name": name, "model": name, "modified_at": time(models.shared.created_s),
        "size": size, "digest": digest.as_str(), "details": details(&it.info),
    })
}

fn details(info: &ModelInfo) -> Value {
    let level = info.dtype_bytes.iter().max_by_key(|pair| pair.1);
    let level = level.map_or(String::new(), |pair| pair.0.to_ascii_uppercase());
    let format = if info.architecture.is_some() { "gguf" } else { "safetensors" };
    let millions = info.n_params as f64 / 1e6;
    let size = match millions {
        m if m >= 1000.0 => format!("{:.1}B", m / 1e3),
        m => format!("{m:.2}M"),
    };
    json!({
        "parent_model": "", "format": format, "family": info.family,
        "families": [info.family], "parameter_size": size, "quantization_level": level,
    })
}

pub async fn tags(State(models): State<Arc<Models>>) -> Json<Value> {
    let of_model = |it: Arc<Entry>| -> Vec<Value> {
        it.names().iter().map(|name| entry(&models, &it, name)).collect()
    };
    Json(json!({"models": models.list().into_iter().flat_map(of_model).collect::<Vec<_>>()}))
}

/// What is loaded, and until when if nobody asks.
pub async fn running(State(models): State<Arc<Models>>) -> Json<Value> {
    let idle = models.shared.settings.idle;
    let of_model = |it: Arc<Entry>| {
        let device = it.loaded()?.device.kind();
        let left = idle.map_or(24 * 3600, |idle| idle.saturating_sub(it.idle_time()).as_secs());
        let running = |name: &String| {
            let mut entry = entry(&models, &it, name);
            entry["expires_at"] = json!(time(now_s() + left));
            entry["size_vram"] = if device == "cpu" { json!(0) } else { entry["size"].clone() };
            entry["context_length"] = json!(it.context);
            entry
        };
        Some(it.names().iter().map(running).collect::<Vec<_>>())
    };
    let list: Vec<Value> = models.list().into_iter().filter_map(of_model).flatten().collect();
    Json(json!({"models": list}))
}

pub async fn show(State(models): State<Arc<Models>>, body: Body) -> Answered<Json<Value>> {
    let app = models.open(body.model()).await?;
    let info = &app.info;
    let arch = info.architecture.as_deref().unwrap_or(&info.family);
    let template = app.chat_source.as_deref().unwrap_or_default();
    let can = [
        ("completion", true),
        ("tools", Syntax::of(template).is_some()),
        ("insert", app.fim.is_some()),
    ];
    let can: Vec<&str> = can.into_iter().filter(|pair| pair.1).map(|pair| pair.0).collect();
    let mut facts = Map::new();
    facts.insert("general.architecture".into(), json!(arch));
    facts.insert("general.parameter_count".into(), json!(info.n_params));
    for (key, value) in [
        ("context_length", app.context),
        ("embedding_length", info.d_model),
        ("block_count", info.n_layer),
    ] {
        facts.insert(format!("{arch}.{key}"), json!(value));
    }
    Ok(Json(json!({
        "modelfile": format!("FROM {}\n", app.path), "parameters": "", "template": template,
        "details": details(&app.info), "model_info": facts, "capabilities": can,
        "modified_at": time(app.created_s),
    })))
}

/// The fields of a request under OpenAI's names.
fn translated(mut map: Map<String, Value>) -> Answered<Map<String, Value>> {
    match map.remove("options") {
        None | Some(Value::Null) => {}
        Some(Value::Object(options)) => {
            for (key, value) in options {
                match &key[..] {
                    "num_predict" => _ = map.insert("max_tokens".into(), value),
                    key if RESOURCES.contains(&key) => {}
                    key => _ = map.insert(key.into(), value),
                }
            }
        }
        Some(_) => return Err(ApiError::field("options", "is not an object")),
    }
    let format = match map.remove("format") {
        None | Some(Value::Null) => None,
        Some(Value::String(word)) if word.is_empty() => None,
        Some(Value::String(word)) if word == "json" => Some(json!({"type": "json_object"})),
        Some(Value::Object(schema)) => Some(json!({"type": "json_object", "schema": schema})),
        Some(_) => return Err(ApiError::field("format", "is neither \"json\" nor a schema")),
    };
    map.extend(format.map(|format| ("response_format".into(), format)));
    if map.get("stream").is_none_or(Value::is_null) {
        map.insert("stream".into(), json!(true));
    }
    Ok(map)
}

pub async fn chat(State(models): State<Arc<Models>>, body: Body) -> Answered<Response> {
    let app = models.open(body.model()).await?;
    let map: Map<String, Value> = body.read()?;
    let shows_image =
        |message: &Value| message["images"].as_array().is_some_and(|it| !it.is_empty());
    if map.get("messages").and_then(Value::as_array).is_some_and(|it| it.iter().any(shows_image)) {
        return Err(ApiError::field("messages", "have images; this model reads only text"));
    }
    let body = Body::of(translated(map)?);
    let ready = Ready::chat(&app, &body, Defaults::Ollama, &[]).await?;
    let answers = Answers::new(&ready, Kind::Chat);
    ready.respond(&app, answers).await
}

#[derive(Deserialize)]
struct Generate {
    model: Option<String>,
    prompt: Option<String>,
    suffix: Option<String>,
    system: Option<String>,
    raw: Option<bool>,
    max_tokens: Option<Limit>,
}

pub async fn generate(State(models): State<Arc<Models>>, body: Body) -> Answered<Response> {
    let app = models.open(body.model()).await?;
    let mut map = translated(body.read()?)?;
    let body = Body::of(map.clone());
    let fields: Generate = body.read()?;
    let (prompt, suffix) = (fields.prompt.unwrap_or_default(), fields.suffix.unwrap_or_default());
    let is_plain = fields.raw == Some(true) || !suffix.is_empty() || app.chat.is_none();
    if prompt.is_empty() && suffix.is_empty() {
        // How clients have a model loaded: it is.
        let (model, _) = app.choose(fields.model.as_deref());
        let mut answer = json!({"model": model, "created_at": time(now_s()), "response": ""});
        (answer["done"], answer["done_reason"]) = (json!(true), json!("load"));
        return Ok(Json(answer).into_response());
    }
    let ready = if is_plain {
        if fields.system.is_some_and(|system| !system.is_empty()) {
            return Err(ApiError::field("system", "needs a chat template; omit it"));
        }
        body.refuse_others(&[names::<Generate>(), names::<Common>()])?;
        let (model, adapters) = app.choose(fields.model.as_deref());
        let wanted = fields.max_tokens.and_then(Limit::limit);
        plain(&app, &body, (&prompt, &suffix), (model, adapters, wanted)).await?
    } else {
        ["prompt", "suffix", "system", "raw"].iter().for_each(|name| _ = map.remove(*name));
        let system = fields.system.filter(|system| !system.is_empty());
        let system = system.map(|text| json!({"role": "system", "content": text}));
        let turns = system.into_iter().chain([json!({"role": "user", "content": prompt})]);
        map.insert("messages".into(), turns.collect());
        Ready::chat(&app, &Body::of(map), Defaults::Ollama, &[]).await?
    };
    let answers = Answers::new(&ready, Kind::Generate);
    ready.respond(&app, answers).await
}

/// A text to continue, or a hole between two.
async fn plain(
    app: &App,
    body: &Body,
    (prompt, suffix): (&str, &str),
    (model, adapters, wanted): (String, Vec<(usize, f32)>, Option<usize>),
) -> Answered<Ready> {
    let mut params = Params::new(app, body.read()?, Defaults::Ollama, adapters)?;
    let hole = Hole::between(prompt, suffix);
    let ending = if suffix.is_empty() { Default::default() } else { hole.ending() };
    let ids = app.prepare(|| match suffix.is_empty() {
        true => app.encode_prompt(prompt),
        false => Ok(hole.prompt(app)?.0),
    });
    let ids = ids.await?;
    if !suffix.is_empty() {
        params = params.with_fim_stops(app);
    }
    let n_max = app.n_max(ids.len(), wanted)?;
    Ok(Ready { model, params, prompt: ids, n_max, parser: Parser::new(None, 0), ending })
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Chat,
    Generate,
}

struct Answers {
    model: String,
    kind: Kind,
    parser: Parser,
    started: Instant,
}

impl Answers {
    fn new(ready: &Ready, kind: Kind) -> Answers {
        let (model, parser) = (ready.model.clone(), ready.parser.clone());
        Answers { model, kind, parser, started: Instant::now() }
    }

    fn object(&self, parts: Vec<Part>) -> Value {
        let (mut text, mut calls) = (String::new(), Vec::new());
        for part in parts {
            match part {
                Part::Text(more) => text += &more,
                Part::Call(call) => calls.push(json!({"function": {
                    "name": call.name, "arguments": call.arguments,
                }})),
            }
        }
        let mut object = json!({"model": self.model, "created_at": time(now_s())});
        match self.kind {
            Kind::Generate => object["response"] = json!(text),
            Kind::Chat => object["message"] = json!({"role": "assistant", "content": text}),
        }
        if !calls.is_empty() {
            object["message"]["tool_calls"] = json!(calls);
        }
        object["done"] = json!(false);
        object
    }

    fn end(&self, object: &mut Value, end: &End) {
        let ns = |time: Duration| json!(time.as_nanos() as u64);
        let reason = match end.finish.reason {
            Reason::End | Reason::StopText(_) => "stop",
            _ => "length",
        };
        let facts = [
            ("done", json!(true)),
            ("done_reason", json!(reason)),
            ("total_duration", ns(self.started.elapsed())),
            ("load_duration", json!(0)),
            ("prompt_eval_count", json!(end.finish.n_prompt)),
            ("prompt_eval_duration", ns(end.prompt_time)),
            ("eval_count", json!(end.finish.n_tok)),
            ("eval_duration", ns(end.answer_time)),
        ];
        facts.into_iter().for_each(|(key, value)| object[key] = value);
    }
}

impl Shape for Answers {
    fn whole(&mut self, answers: &[(Piece, End)]) -> Value {
        let parts = answers.iter().flat_map(|(piece, _)| self.parser.clone().all(&piece.text));
        let mut object = self.object(parts.collect());
        answers.iter().for_each(|(_, end)| self.end(&mut object, end));
        object
    }

    fn piece(&mut self, _idx: usize, piece: &Piece) -> Vec<Value> {
        let parts = self.parser.push(&piece.text);
        if parts.is_empty() { Vec::new() } else { vec![self.object(parts)] }
    }

    fn last(&mut self, _idx: usize, end: &End) -> Vec<Value> {
        let parts = self.parser.finish();
        let rest = (!parts.is_empty()).then(|| self.object(parts));
        let mut last = self.object(Vec::new());
        self.end(&mut last, end);
        rest.into_iter().chain([last]).collect()
    }

    fn wire(&self) -> Wire {
        Wire::Lines
    }

    fn error(&self, error: &ApiError) -> Value {
        error.json(Dialect::Ollama)
    }
}

#[derive(Deserialize)]
struct Embed {
    model: Option<String>,
    #[serde(alias = "prompt")]
    input: Option<Prompt>,
    dimensions: Option<Size>,
    /// A text that is too long is refused all the same.
    #[serde(rename = "truncate")]
    _truncate: Option<bool>,
}

async fn vectors(models: &Arc<Models>, body: &Body) -> Answered<(String, Vec<Vec<f32>>, usize)> {
    let app = models.open(body.model()).await?;
    let mut map: Map<String, Value> = body.read()?;
    map.remove("options");
    Body::of(map).refuse_others(&[names::<Embed>()])?;
    let fields: Embed = body.read()?;
    let (model, _) = app.choose(fields.model.as_deref());
    let (vectors, n_tok) = embed(&app, fields.input, fields.dimensions).await?;
    Ok((model, vectors, n_tok))
}

pub async fn embed_many(State(models): State<Arc<Models>>, body: Body) -> Answered<Json<Value>> {
    let started = Instant::now();
    let (model, vectors, n_tok) = vectors(&models, &body).await?;
    Ok(Json(json!({
        "model": model, "embeddings": vectors, "load_duration": 0, "prompt_eval_count": n_tok,
        "total_duration": started.elapsed().as_nanos() as u64,
    })))
}

/// The older route, of one text.
pub async fn embed_one(State(models): State<Arc<Models>>, body: Body) -> Answered<Json<Value>> {
    let (_, vectors, _) = vectors(&models, &body).await?;
    Ok(Json(json!({"embedding": vectors.into_iter().next()})))
}
