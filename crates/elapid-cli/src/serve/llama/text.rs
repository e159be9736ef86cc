//! `POST /tokenize`, `/detokenize`, `/apply-template`: text to tokens and back, messages to text.

use crate::serve::App;
use crate::serve::error::{Answered, ApiError};
use crate::serve::fields::Fields;
use crate::serve::openai;
use axum::Json;
use axum::extract::State;
use elapid::Special;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn tokenize(State(app): State<Arc<App>>, fields: Fields) -> Answered<Json<Value>> {
    let text = fields.text("content")?.unwrap_or("");
    let with_begin = fields.flag("add_special")?.unwrap_or(false);
    let special = match fields.flag("parse_special")?.unwrap_or(true) {
        true => Special::Parse,
        false => Special::Plain,
    };
    let with_pieces = fields.flag("with_pieces")?.unwrap_or(false);
    let ids = app.prepare(|| {
        Ok(match with_begin {
            true => app.tokenizer.encode_with_begin(text, special)?,
            false => app.tokenizer.encode(text, special)?,
        })
    });
    let ids = ids.await?;
    let tokens = match with_pieces {
        false => json!(ids),
        true => ids.iter().map(|id| json!({"id": id, "piece": piece(&app, *id)})).collect(),
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

pub async fn detokenize(State(app): State<Arc<App>>, fields: Fields) -> Answered<Json<Value>> {
    let Some(list) = fields.list("tokens")? else {
        return Err(ApiError::field("tokens", "is missing"));
    };
    let ids = list.iter().map(|value| app.token_id("tokens", value));
    let ids = ids.collect::<Answered<Vec<u32>>>()?;
    Ok(Json(json!({"content": app.tokenizer.decode(&ids, Special::Parse)})))
}

pub async fn apply_template(State(app): State<Arc<App>>, fields: Fields) -> Answered<Json<Value>> {
    let text = app.prepare(|| openai::render(&app, &fields, openai::messages(&fields)?)).await?;
    Ok(Json(json!({"prompt": text})))
}
