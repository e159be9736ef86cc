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

use super::error::{Answered, ApiError};
use super::models::{Entry, Models};
use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /v1/models`: the models, and each adapter as a model of its own.
pub async fn models(State(models): State<Arc<Models>>) -> Json<Value> {
    Json(json!({"object": "list", "data": entries(&models)}))
}

/// `GET /v1/models/NAME`.
pub async fn model(
    State(models): State<Arc<Models>>,
    path: Result<Path<String>, PathRejection>,
) -> Answered<Json<Value>> {
    let Path(name) = path.map_err(|error| ApiError::bad(format!("the path: {error}")))?;
    let found = entries(&models).into_iter().find(|entry| entry["id"] == name[..]);
    found.map(Json).ok_or_else(|| models.unknown(&name))
}

fn entries(models: &Models) -> Vec<Value> {
    let created_s = models.shared.created_s;
    let of_model = |entry: Arc<Entry>| {
        let value = |name: String| {
            let status = if entry.is_loaded() { "loaded" } else { "unloaded" };
            let mut value = json!({
                "id": name, "object": "model", "created": created_s, "owned_by": "elapid",
                "status": {"value": status},
                "meta": {
                    "n_vocab": entry.info.n_vocab, "n_ctx": entry.context,
                    "n_embd": entry.info.d_model, "n_params": entry.info.n_params,
                },
            });
            if name != entry.name {
                value["parent"] = json!(entry.name);
            }
            value
        };
        entry.names().into_iter().map(value).collect::<Vec<_>>()
    };
    models.list().into_iter().flat_map(of_model).collect()
}
