//! What watches and helps: `GET /health`, `/props`, `/slots`, `/metrics`; `POST /embedding`,
//! `/tokenize`, `/detokenize`, `/apply-template`.

use crate::machine;
use crate::server::App;
use crate::server::body::{Body, Prompt};
use crate::server::chat::Template;
use crate::server::error::{Answered, ApiError};
use crate::server::fields::names;
use crate::server::models::{Entry, Models};
use crate::server::openai::embed;
use crate::server::params::{Common, Defaults, Params};
use crate::server::worker::Board;
use axum::Json;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use elapid::Special;
use serde::Deserialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::Arc;

/// `?model=NAME` of a route without a body.
#[derive(Deserialize)]
pub struct Which {
    pub model: Option<String>,
}

/// 200 while requests are answered; 503 with the reason once none will be.
pub async fn health(State(models): State<Arc<Models>>) -> Answered<Json<Value>> {
    if let Some(why) = models.shared.broken.borrow().clone() {
        return Err(why);
    }
    let list = models.list();
    let n_busy = |app: Arc<App>| app.worker.board().stats.running.len();
    let n_busy: usize = list.iter().filter_map(|entry| entry.loaded().map(n_busy)).sum();
    let n_loaded = list.iter().filter(|entry| entry.is_loaded()).count().max(1);
    let n_idle = (n_loaded * models.shared.settings.n_slots).saturating_sub(n_busy);
    let told = |entry: &Arc<Entry>| json!({"id": entry.name, "loaded": entry.is_loaded()});
    Ok(Json(json!({
        "status": "ok", "slots_idle": n_idle, "slots_processing": n_busy,
        "models": list.iter().map(told).collect::<Vec<_>>(),
    })))
}

pub async fn props(
    State(models): State<Arc<Models>>,
    Query(which): Query<Which>,
) -> Answered<Json<Value>> {
    let app = models.open(which.model.as_deref()).await?;
    let text = |id: Option<u32>| id.and_then(|id| app.tokenizer.token(id)).unwrap_or_default();
    let (_, adapters) = app.choose(which.model.as_deref());
    let params = Params::new(&app, Common::default(), Defaults::Llama, adapters)?;
    let mut settings = params.settings(app.settings.n_tok_max.min(app.context));
    settings["seed"] = json!(u32::MAX);
    settings["n_predict"] = json!(-1);
    Ok(Json(json!({
        "default_generation_settings": {
            "id": 0, "n_ctx": app.context, "is_processing": false, "params": settings,
        },
        "total_slots": app.settings.n_slots, "model_alias": app.name, "model_path": app.path,
        "modalities": {"vision": false, "audio": false}, "is_sleeping": false,
        "chat_template": app.chat_source.as_deref().unwrap_or(""),
        "bos_token": text(app.tokenizer.bos()), "eos_token": text(app.tokenizer.eos()),
        "build_info": concat!("elapid ", env!("CARGO_PKG_VERSION")), "infill": app.fim.is_some(),
        "n_vocab": app.info.n_vocab, "n_params": app.info.n_params,
        "device": app.device.describe(),
    })))
}

pub async fn slots(
    State(models): State<Arc<Models>>,
    Query(which): Query<Which>,
) -> Answered<Json<Value>> {
    let (entry, settings) = (models.find(which.model.as_deref())?, &models.shared.settings);
    let running = entry.loaded().map(|app| app.worker.board().stats.running).unwrap_or_default();
    let slot = |idx: usize| {
        let mut value = json!({
            "id": idx, "n_ctx": entry.context, "speculative": settings.n_lookup > 0,
            "is_processing": idx < running.len(),
        });
        if let Some(slot) = running.get(idx) {
            value["id_task"] = json!(slot.id.0);
            value["n_prompt_tokens"] = json!(slot.n_prompt);
            value["n_prompt_tokens_processed"] = json!(slot.n_read);
            value["next_token"] = json!({
                "has_next_token": true, "n_decoded": slot.n_tok,
                "n_remain": slot.n_max.saturating_sub(slot.n_tok),
            });
        }
        value
    };
    Ok(Json((0..settings.n_slots).map(slot).collect()))
}

/// Counters for Prometheus, under llama.cpp's names and some of our own; with a label where there
/// are several models. A model that is unloaded begins anew with its next load.
pub async fn metrics(State(models): State<Arc<Models>>) -> Response {
    let list = models.list();
    let board =
        |entry: &Arc<Entry>| entry.loaded().map(|app| app.worker.board()).unwrap_or_default();
    let label = |entry: &Entry| format!("{{model={:?}}}", entry.name);
    type Values = Vec<(String, f64)>;
    let mut groups: Vec<(&str, &str, Values)> = Vec::new();
    for entry in &list {
        let label = if list.len() > 1 { label(entry) } else { String::new() };
        for (idx, (name, help, value)) in counters(&board(entry)).into_iter().enumerate() {
            if groups.len() == idx {
                groups.push((name, help, Vec::new()));
            }
            groups[idx].2.push((label.clone(), value));
        }
    }
    let held = machine::held_bytes().unwrap_or(0) as f64;
    let healthy = f64::from(u8::from(models.shared.broken.borrow().is_none()));
    let uptime = models.shared.started.elapsed().as_secs_f64();
    let one = |value: f64| vec![(String::new(), value)];
    let loaded = |entry: &Arc<Entry>| (label(entry), f64::from(u8::from(entry.is_loaded())));
    let loaded = list.iter().map(loaded).collect();
    groups.extend([
        ("elapid_model_loaded", "1 for models that are loaded.", loaded),
        ("elapid_resident_bytes", "Bytes that the process holds.", one(held)),
        ("elapid_healthy", "0 once nothing is answered any more.", one(healthy)),
        ("elapid_uptime_seconds", "Time since the start.", one(uptime)),
    ]);
    let mut text = String::new();
    for (name, help, values) in groups {
        // Prometheus' rule for names, but for one of llama.cpp's.
        let is_counter = name.ends_with("_total") || name.ends_with(":n_tokens_max");
        let kind = if is_counter { "counter" } else { "gauge" };
        // Writing to a string does not fail.
        let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        values.iter().for_each(|(label, value)| _ = writeln!(text, "{name}{label} {value}"));
    }
    let version = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, version)], text).into_response()
}

fn counters(board: &Board) -> [(&'static str, &'static str, f64); 26] {
    let (stats, totals) = (&board.stats, &board.totals);
    let (prompt_s, answer_s) = (totals.prompt_time.as_secs_f64(), totals.answer_time.as_secs_f64());
    let (n_prompt, n_answer) = (stats.n_prompt_tok as f64, stats.n_answer_tok as f64);
    let (n_steps, n_busy) = (totals.n_steps as f64, totals.n_busy as f64);
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    let (n_cached, n_full) = (stats.n_cached_tok as f64, totals.n_full as f64);
    let per_step = ratio(n_busy, n_steps);
    let (read_rate, answer_rate) = (ratio(n_prompt, prompt_s), ratio(n_answer, answer_s));
    let (n_hits, n_loads) = (stats.n_expert_hits as f64, stats.n_expert_loads as f64);
    let expert_read = stats.expert_bytes_read as f64;
    let (n_running, n_waiting) = (stats.running.len() as f64, stats.n_waiting as f64);
    [
        ("llamacpp:prompt_tokens_total", "Prompt tokens computed.", n_prompt),
        ("llamacpp:prompt_seconds_total", "Time spent on prompts.", prompt_s),
        ("llamacpp:tokens_predicted_total", "Answer tokens.", n_answer),
        ("llamacpp:tokens_predicted_seconds_total", "Time spent on answers.", answer_s),
        ("llamacpp:n_decode_total", "Steps of the engine.", n_steps),
        ("llamacpp:n_tokens_max", "Most tokens of a sequence.", totals.n_tok_max as f64),
        ("llamacpp:n_busy_slots_per_decode", "Slots in use per step, on average.", per_step),
        ("llamacpp:prompt_tokens_seconds", "Prompt tokens per second, on average.", read_rate),
        ("llamacpp:predicted_tokens_seconds", "Answer tokens per second, on average.", answer_rate),
        ("llamacpp:requests_processing", "Requests running.", n_running),
        ("llamacpp:requests_deferred", "Requests waiting.", n_waiting),
        ("elapid_cached_tokens_total", "Prompt tokens from snapshots.", n_cached),
        ("elapid_snapshots", "Snapshots held.", stats.n_snapshots as f64),
        ("elapid_snapshot_bytes", "Bytes of snapshots.", stats.snapshot_bytes as f64),
        ("elapid_state_bytes", "Bytes of running sequences.", stats.state_bytes as f64),
        ("elapid_expert_hits_total", "Chosen experts that were resident.", n_hits),
        ("elapid_expert_loads_total", "Chosen experts that were loaded.", n_loads),
        ("elapid_expert_read_bytes_total", "Bytes of experts loaded.", expert_read),
        ("elapid_expert_bytes", "Bytes of resident experts.", stats.expert_bytes as f64),
        ("elapid_requests_total", "Requests taken.", totals.n_taken as f64),
        ("elapid_requests_refused_total", "Requests with the queue full.", n_full),
        ("elapid_requests_gone_total", "Requests whose client left.", totals.n_gone as f64),
        ("elapid_requests_late_total", "Requests that timed out.", totals.n_late as f64),
        ("elapid_requests_failed_total", "Requests that failed.", totals.n_failed as f64),
        ("elapid_out_of_memory_total", "Of them, out of memory.", totals.n_out_of_memory as f64),
        ("elapid_embeddings_total", "Texts embedded.", totals.n_embedded as f64),
    ]
}

#[derive(Deserialize)]
struct Embedding {
    #[serde(alias = "input")]
    content: Option<Prompt>,
}

/// `[{"index", "embedding": [[...]]}]`: llama.cpp may have several vectors of one text.
pub async fn embedding(State(models): State<Arc<Models>>, body: Body) -> Answered<Json<Value>> {
    let app = models.open(body.model()).await?;
    let fields: Embedding = body.read()?;
    body.refuse_others(&[names::<Embedding>()])?;
    let content = fields.content.ok_or_else(|| ApiError::missing("content"))?;
    let (vectors, _) = embed(&app, Some(content), None).await?;
    let entry = |(idx, vector)| json!({"index": idx, "embedding": [vector]});
    Ok(Json(vectors.into_iter().enumerate().map(entry).collect()))
}

#[derive(Deserialize)]
struct Tokenize {
    content: Option<String>,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
}

pub async fn tokenize(State(models): State<Arc<Models>>, body: Body) -> Answered<Json<Value>> {
    let app = models.open(body.model()).await?;
    let fields: Tokenize = body.read()?;
    let text = fields.content.unwrap_or_default();
    let special = match fields.parse_special {
        Some(false) => Special::Plain,
        _ => Special::Parse,
    };
    let ids = app.prepare(|| {
        Ok(match fields.add_special {
            Some(true) => app.tokenizer.encode_with_begin(&text, special)?,
            _ => app.tokenizer.encode(&text, special)?,
        })
    });
    let ids = ids.await?;
    let tokens = match fields.with_pieces {
        Some(true) => ids.iter().map(|id| json!({"id": id, "piece": piece(&app, *id)})).collect(),
        _ => json!(ids),
    };
    Ok(Json(json!({"tokens": tokens})))
}

/// A token as text, or as bytes where it is none.
fn piece(app: &App, id: u32) -> Value {
    match String::from_utf8(app.tokenizer.bytes(id).unwrap_or_default()) {
        Ok(text) => json!(text),
        Err(error) => json!(error.into_bytes()),
    }
}

#[derive(Deserialize)]
struct Detokenize {
    tokens: Option<Vec<u32>>,
}

pub async fn detokenize(State(models): State<Arc<Models>>, body: Body) -> Answered<Json<Value>> {
    let app = models.open(body.model()).await?;
    let ids = body.read::<Detokenize>()?.tokens.ok_or_else(|| ApiError::missing("tokens"))?;
    ids.iter().try_for_each(|id| app.token_id("tokens", *id).map(|_| ()))?;
    Ok(Json(json!({"content": app.tokenizer.decode(&ids, Special::Parse)})))
}

pub async fn apply_template(
    State(models): State<Arc<Models>>,
    body: Body,
) -> Answered<Json<Value>> {
    let app = models.open(body.model()).await?;
    let template: Template = body.read()?;
    let text = app.prepare(|| template.render(&app)).await?;
    Ok(Json(json!({"prompt": text})))
}
