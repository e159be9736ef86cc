//! `POST /tokenize`, `/detokenize`, `/apply-template`: text to tokens and back, messages to text.

use crate::server::App;
use crate::server::body::Body;
use crate::server::error::{Answered, ApiError};
use crate::server::openai::Template;
use axum::Json;
use axum::extract::State;
use elapid::Special;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

#[derive(Deserialize)]
struct Tokenize {
    content: Option<String>,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
}

pub async fn tokenize(State(app): State<Arc<App>>, body: Body) -> Answered<Json<Value>> {
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

pub async fn detokenize(State(app): State<Arc<App>>, body: Body) -> Answered<Json<Value>> {
    let ids = body.read::<Detokenize>()?.tokens.ok_or_else(|| ApiError::missing("tokens"))?;
    ids.iter().try_for_each(|id| app.token_id("tokens", *id).map(|_| ()))?;
    Ok(Json(json!({"content": app.tokenizer.decode(&ids, Special::Parse)})))
}

pub async fn apply_template(State(app): State<Arc<App>>, body: Body) -> Answered<Json<Value>> {
    let template: Template = body.read()?;
    let text = app.prepare(|| template.render(&app)).await?;
    Ok(Json(json!({"prompt": text})))
}
