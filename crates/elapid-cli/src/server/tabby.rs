//! What editors made for Tabby ask: completions by segments, health, events.
//!
//! A completion is `{"language", "segments": {"prefix", "suffix", "filepath", ...}}` at
//! `/v1/completions` and answers `{"id", "choices": [{"index", "text"}]}`. Events (what was shown,
//! what was taken) are accepted and forgotten: nothing about a person's work is kept (`mod.rs`).

use super::App;
use super::body::Body;
use super::error::Answered;
use super::fields::names;
use super::llama::Hole;
use super::models::Models;
use super::params::{Common, Defaults, Params};
use crate::report::n_threads_default;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Tokens of an answer, as Tabby has it.
const N_TOK: usize = 64;

/// After this an answer ends with its line.
const TIME_MAX: Duration = Duration::from_secs(2);

#[derive(Deserialize)]
struct Fields {
    segments: Hole,
}

pub async fn complete(app: &Arc<App>, body: &Body) -> Answered<Response> {
    let params = Params::new(app, body.read()?, Defaults::Infill, app.choose(None).1)?;
    let hole = body.read::<Fields>()?.segments;
    body.refuse_others(&[names::<Common>(), names::<Fields>()])?;
    let prepared = app.prepare(|| match app.fim.is_some() {
        true => Ok(hole.prompt(app)?.0),
        // An editor without a suffix is better than none.
        false => app.encode_prompt(&hole.prefix()),
    });
    let prompt = prepared.await?;
    let n_max = app.n_max(prompt.len(), Some(N_TOK))?;
    let request = params.with_fim_stops(app).request(prompt, n_max, 0);
    let mut ending = hole.ending();
    ending.time_max = Some(TIME_MAX);
    let answers = app.worker.submit(vec![(request, ending)]).await?.whole().await?;
    let text: String = answers.into_iter().map(|(answer, _)| answer.text).collect();
    let choices = json!([{"index": 0, "text": text}]);
    Ok(Json(json!({"id": app.answer_id("cmpl"), "choices": choices})).into_response())
}

pub async fn health(State(models): State<Arc<Models>>) -> Answered<Json<Value>> {
    let app = models.open(None).await?;
    let (kind, cpu) = (app.device.kind(), app.device.host_device().describe());
    let cuda: Vec<String> = (kind == "cuda").then(|| app.device.describe()).into_iter().collect();
    Ok(Json(json!({
        "model": app.name, "chat_model": app.chat.is_some().then_some(&app.name),
        "device": kind, "arch": std::env::consts::ARCH, "cpu_info": cpu,
        "cpu_count": n_threads_default(),
        "cuda_devices": cuda, "family": app.info.family,
        "version": {"git_describe": concat!("elapid ", env!("CARGO_PKG_VERSION"))},
    })))
}
