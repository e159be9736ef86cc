//! The routes of OpenAI, `/v1/...`, as its clients call them.
//!
//! Besides OpenAI's fields the sampling fields of llama.cpp are taken (`top_k`, `min_p`,
//! `repeat_penalty`, `grammar`, `json_schema`, `lora`, ...), and answers carry its `timings`.
//!
//! Not here: assistants, files, images, audio; `best_of` (ask for `n`); calls of tools, which a
//! model writes as its template taught it and which are given out as text.

mod chat;
mod completions;
mod embeddings;
mod logprobs;

pub use chat::{chat, messages, render};
pub use completions::completions;
pub use embeddings::embeddings;

use super::App;
use super::error::{Answered, ApiError};
use super::feed::End;
use super::fields::Fields;
use super::limits::N_CHOICES_MAX;
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /v1/models`: the model, and each adapter as a model of its own.
pub async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let list: Vec<Value> = app.models().map(|name| entry(&app, name)).collect();
    Json(json!({"object": "list", "data": list}))
}

/// `GET /v1/models/NAME`.
pub async fn model(
    State(app): State<Arc<App>>,
    path: Result<Path<String>, PathRejection>,
) -> Answered<Json<Value>> {
    let Path(name) = path.map_err(|error| ApiError::bad(format!("the path: {error}")))?;
    app.choose(Some(&name))?;
    Ok(Json(entry(&app, &name)))
}

fn entry(app: &App, name: &str) -> Value {
    let mut entry = json!({
        "id": name, "object": "model", "created": app.created_s, "owned_by": "elapid",
        "meta": {
            "n_vocab": app.n_vocab, "n_ctx": app.context, "n_embd": app.d_model,
            "n_params": app.n_params,
        },
    });
    if name != app.name {
        entry["parent"] = json!(app.name);
    }
    entry
}

/// What the answers took. Answers to one prompt share its tokens.
fn usage(ends: &[&End], n_choices: usize) -> Value {
    let first_of_each = || ends.iter().step_by(n_choices);
    let n_prompt: usize = first_of_each().map(|end| end.n_prompt).sum();
    let n_cached: usize = first_of_each().map(|end| end.n_cached).sum();
    let n_tok: usize = ends.iter().map(|end| end.n_tok).sum();
    json!({
        "prompt_tokens": n_prompt, "completion_tokens": n_tok, "total_tokens": n_prompt + n_tok,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    })
}

/// How many answers to each prompt.
fn n_choices(fields: &Fields) -> Answered<usize> {
    let n = fields.whole("n", 1..=N_CHOICES_MAX)?.unwrap_or(1);
    if fields.whole("best_of", 1..=N_CHOICES_MAX)?.is_some_and(|best_of| best_of != n) {
        let words = "is not `n`; every answer that is made is given out: ask for `n` of them";
        return Err(ApiError::field("best_of", words));
    }
    Ok(n as usize)
}

/// `stream_options.include_usage`.
fn wants_usage(fields: &Fields) -> Answered<bool> {
    let Some(options) = fields.object("stream_options")? else { return Ok(false) };
    Ok(Fields::new(options.clone()).flag("include_usage")?.unwrap_or(false))
}
