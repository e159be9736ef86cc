//! `POST /v1/embeddings`: a vector of length one for each text.

use crate::server::App;
use crate::server::body::{Body, Prompt, Size};
use crate::server::error::{Answered, ApiError};
use crate::server::fields::names;
use crate::server::models::Models;
use axum::Json;
use axum::extract::State;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

const N_INPUTS_MAX: usize = 256;

#[derive(Deserialize)]
struct Fields {
    model: Option<String>,
    input: Option<Prompt>,
    encoding_format: Option<String>,
    dimensions: Option<Size>,
}

pub async fn embeddings(State(models): State<Arc<Models>>, body: Body) -> Answered<Json<Value>> {
    let app = models.open(body.model()).await?;
    let fields: Fields = body.read()?;
    body.refuse_others(&[names::<Fields>()])?;
    let (model, _) = app.choose(fields.model.as_deref());
    let is_base64 = match fields.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let words = format!("is `{other}`; known: float, base64");
            return Err(ApiError::field("encoding_format", words));
        }
    };
    let (vectors, n_tok) = embed(&app, fields.input, fields.dimensions).await?;
    let entry = |(idx, vector): (usize, Vec<f32>)| {
        let vector = if is_base64 { json!(base64(&vector)) } else { json!(vector) };
        json!({"object": "embedding", "index": idx, "embedding": vector})
    };
    let data: Vec<Value> = vectors.into_iter().enumerate().map(entry).collect();
    let usage = json!({"prompt_tokens": n_tok, "total_tokens": n_tok});
    Ok(Json(json!({"object": "list", "data": data, "model": model, "usage": usage})))
}

/// The vectors of these texts, and how many tokens they have.
pub async fn embed(
    app: &App,
    input: Option<Prompt>,
    dimensions: Option<Size>,
) -> Answered<(Vec<Vec<f32>>, usize)> {
    let d_model = app.info.d_model;
    if dimensions.is_some_and(|d| d.size() != d_model) {
        let words = format!("must be {d_model}, the width of this model; omit it");
        return Err(ApiError::field("dimensions", words));
    }
    let input = input.ok_or_else(|| ApiError::missing("input"))?;
    let inputs = app.prepare(|| inputs(app, input)).await?;
    let n_tok = inputs.iter().map(Vec::len).sum();
    let deadline = tokio::time::Instant::now() + app.settings.time_max;
    let mut vectors = Vec::with_capacity(inputs.len());
    for ids in inputs {
        let vector = tokio::time::timeout_at(deadline, app.worker.embed(ids)).await;
        vectors.push(vector.map_err(|_| ApiError::late())??);
    }
    Ok((vectors, n_tok))
}

fn inputs(app: &App, input: Prompt) -> Answered<Vec<Vec<u32>>> {
    const NAME: &str = "input";
    let ids = |prompt: Prompt| {
        prompt.check(NAME)?;
        let (ids, context) = (prompt.ids(app, NAME)?, app.context);
        if ids.len() > context {
            let n = ids.len();
            let words = format!("has {n} tokens, and the context of this server holds {context}");
            return Err(ApiError::field(NAME, words).with_code("context_length_exceeded"));
        }
        Ok(ids)
    };
    input.split(NAME, N_INPUTS_MAX)?.0.into_iter().map(ids).collect()
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
