//! `POST /v1/embeddings`: a vector of length one for each text.

use crate::serve::App;
use crate::serve::error::{Answered, ApiError};
use crate::serve::fields::{Fields, kind};
use crate::serve::limits::N_INPUTS_MAX;
use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};
use std::sync::Arc;

pub async fn embeddings(State(app): State<Arc<App>>, fields: Fields) -> Answered<Json<Value>> {
    let (model, _) = app.choose(fields.text("model")?)?;
    let is_base64 = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let words = format!("is `{other}`; known: float, base64");
            return Err(ApiError::field("encoding_format", words));
        }
    };
    let d_model = app.d_model as i64;
    if fields.whole("dimensions", 1..=i64::MAX)?.is_some_and(|d| d != d_model) {
        let words = format!("is not {d_model}, which is what this model gives; leave it out");
        return Err(ApiError::field("dimensions", words));
    }
    let inputs = app.prepare(|| inputs(&app, &fields)).await?;
    let n_tok: usize = inputs.iter().map(Vec::len).sum();
    let deadline = tokio::time::Instant::now() + app.limits.time_max;
    let mut data = Vec::with_capacity(inputs.len());
    for (idx, ids) in inputs.into_iter().enumerate() {
        let vector = tokio::time::timeout_at(deadline, app.worker.embed(ids)).await;
        let vector = vector.map_err(|_| ApiError::late())??;
        let vector = match is_base64 {
            true => json!(base64(&vector)),
            false => json!(vector),
        };
        data.push(json!({"object": "embedding", "index": idx, "embedding": vector}));
    }
    let usage = json!({"prompt_tokens": n_tok, "total_tokens": n_tok});
    Ok(Json(json!({"object": "list", "data": data, "model": model, "usage": usage})))
}

/// A text, a list of texts, a list of tokens, or a list of such lists.
fn inputs(app: &App, fields: &Fields) -> Answered<Vec<Vec<u32>>> {
    const NAME: &str = "input";
    let ids = |list: &[Value]| -> Answered<Vec<u32>> {
        list.iter().map(|value| app.token_id(NAME, value)).collect()
    };
    let one = |value: &Value| match value {
        Value::String(text) => app.encode_prompt(text),
        Value::Array(list) => ids(list),
        other => Err(ApiError::field(NAME, format!("holds {}, not a text", kind(other)))),
    };
    let all = match fields.get(NAME) {
        None => return Err(ApiError::field(NAME, "is missing")),
        Some(Value::Array(list)) if matches!(list.first(), Some(Value::Number(_))) => {
            vec![ids(list)?]
        }
        Some(Value::Array(list)) if list.len() > N_INPUTS_MAX => {
            let words = format!("has {} texts, at most {N_INPUTS_MAX} are taken", list.len());
            return Err(ApiError::field(NAME, words));
        }
        Some(Value::Array(list)) => list.iter().map(one).collect::<Answered<Vec<_>>>()?,
        Some(other) => vec![one(other)?],
    };
    if all.is_empty() || all.iter().any(Vec::is_empty) {
        return Err(ApiError::field(NAME, "is empty"));
    }
    if let Some(ids) = all.iter().find(|ids| ids.len() > app.context) {
        let (n, context) = (ids.len(), app.context);
        let words = format!("has {n} tokens, and the context of this server holds {context}");
        return Err(ApiError::field(NAME, words).with_code("context_length_exceeded"));
    }
    Ok(all)
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The bytes of the numbers, least significant first, in base 64.
fn base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let is_there = digit <= group.len();
            let value = (bits >> (18 - 6 * digit)) as usize & 63;
            text.push(if is_there { char::from(DIGITS[value]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_base_64_are_as_others_write_them() {
        // base64.b64encode(struct.pack("<ff", 1.0, -2.5)) in Python.
        assert_eq!(base64(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(base64(&[0.5]), "AAAAPw==");
        assert_eq!(base64(&[]), "");
        assert_eq!(base64(&[1.0, 2.0, 3.0]), "AACAPwAAAEAAAEBA");
    }
}
