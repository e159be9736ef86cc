//! The routes of OpenAI, `/v1/...`, as its clients call them.
//!
//! Besides OpenAI's fields the sampling fields of llama.cpp are taken (`top_k`, `min_p`,
//! `repeat_penalty`, `grammar`, `json_schema`, `lora`, ...), and answers carry its `timings`.
//!
//! Not here: assistants, files, images, audio; `best_of` (ask for `n`).

mod completions;
mod embeddings;
mod responses;

pub use completions::{chat, completions};
pub use embeddings::{embed, embeddings};
pub use responses::responses;

use super::App;
use super::error::{Answered, ApiError};
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
    match app.models().any(|known| known == name) {
        true => Ok(Json(entry(&app, &name))),
        false => Err(app.unknown_model(&name)),
    }
}

fn entry(app: &App, name: &str) -> Value {
    let mut entry = json!({
        "id": name, "object": "model", "created": app.created_s, "owned_by": "elapid",
        "meta": {
            "n_vocab": app.info.n_vocab, "n_ctx": app.context, "n_embd": app.info.d_model,
            "n_params": app.info.n_params,
        },
    });
    if name != app.name {
        entry["parent"] = json!(app.name);
    }
    entry
}
