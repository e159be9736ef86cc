//! What editors made for Tabby ask: completions by segments, health, events.
//!
//! A completion is `{"language", "segments": {"prefix", "suffix", "filepath", ...}}` at
//! `/v1/completions` and answers `{"id", "choices": [{"index", "text"}]}`. Events (what was shown,
//! what was taken) are accepted and forgotten: nothing about a person's work is kept.

use super::App;
use super::error::{Answered, ApiError};
use super::fields::Fields;
use super::llama::Hole;
use super::params::{INFILL, Params};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Tokens of an answer, as Tabby has it.
const N_TOK: usize = 64;

/// After this an answer ends with its line.
const TIME_MAX: Duration = Duration::from_secs(2);

pub async fn complete(app: &Arc<App>, fields: &Fields) -> Answered<Response> {
    let mut params = Params::read(app, fields, &INFILL, app.default_adapters())?;
    let Some(segments) = fields.object("segments")? else {
        return Err(ApiError::field("segments", "is missing"));
    };
    let segments = Fields::new(segments.clone());
    let text = |name: &str| -> Answered<&str> { Ok(segments.text(name)?.unwrap_or("")) };
    let mut hole = Hole::new(text("prefix")?, text("suffix")?);
    if let Some(path) = segments.text("filepath")? {
        hole.path = path.into();
    }
    let prepared = app.prepare(|| match app.fim.is_some() {
        true => Ok(hole.prompt(app)?.0),
        // An editor without a suffix is better than none.
        false => app.encode_prompt(&hole.prefix),
    });
    let prompt = prepared.await?;
    params.stop_tokens.extend(app.fim.iter().flat_map(|fim| fim.stops()));
    let n_max = app.n_max(prompt.len(), Some(N_TOK))?;
    let mut feeds = app.submit(&params, &[(prompt, n_max)], 1).await?;
    let feed = feeds.pop().ok_or_else(|| ApiError::internal("no answer was begun"))?;
    let answer = feed.ending(hole.ending().with_time(Some(TIME_MAX))).whole().await?;
    let id = app.answer_id("cmpl");
    let choices = json!([{"index": 0, "text": answer.text}]);
    Ok(Json(json!({"id": id, "choices": choices})).into_response())
}

pub async fn health(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({
        "model": app.name, "chat_model": app.chat.is_some().then_some(&app.name),
        "device": "cpu", "arch": std::env::consts::ARCH, "cpu_info": app.device,
        "cpu_count": std::thread::available_parallelism().map_or(1, usize::from),
        "cuda_devices": [], "family": app.family,
        "version": {"git_describe": concat!("elapid ", env!("CARGO_PKG_VERSION"))},
    }))
}

pub async fn events() -> StatusCode {
    StatusCode::NO_CONTENT
}
