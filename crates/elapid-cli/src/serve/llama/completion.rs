//! `POST /completion`: what follows a prompt.
//!
//! A prompt is a text, a list of tokens, or texts and tokens mixed; a list of prompts is answered
//! by a list.

use super::shape::{Answers, n_indent, n_predict, time_max};
use crate::serve::App;
use crate::serve::ending::Ending;
use crate::serve::error::{Answered, ApiError};
use crate::serve::fields::{Fields, kind};
use crate::serve::limits::N_PROMPTS_MAX;
use crate::serve::params::{LLAMA, Params};
use crate::serve::respond::respond;
use axum::extract::State;
use axum::response::Response;
use elapid::Special;
use serde_json::Value;
use std::sync::Arc;

const NAME: &str = "prompt";

pub async fn completion(State(app): State<Arc<App>>, fields: Fields) -> Answered<Response> {
    let mut params = Params::read(&app, &fields, &LLAMA, app.default_adapters())?;
    let mut shape = Answers::new(&app, &fields, &mut params)?;
    let (wanted, time_max, n_indent) =
        (n_predict(&fields)?, time_max(&fields)?, n_indent(&fields)?);
    let (prompts, is_list) = app.prepare(|| prompts(&app, &fields)).await?;
    let with_n_max = |ids: Vec<u32>| app.n_max(ids.len(), wanted).map(|n_max| (ids, n_max));
    shape.prompts = prompts.into_iter().map(with_n_max).collect::<Answered<_>>()?;
    shape.is_list = is_list;
    let feeds = app.submit(&params, &shape.prompts, 1).await?;
    let ending = || Ending::default().with_indent(n_indent).with_time(time_max);
    let feeds = feeds.into_iter().map(|feed| feed.ending(ending())).collect();
    respond(params.mode, feeds, shape).await
}

/// All prompts, and whether they came as a list.
fn prompts(app: &App, fields: &Fields) -> Answered<(Vec<Vec<u32>>, bool)> {
    let list = match fields.get(NAME) {
        None => return Err(ApiError::field(NAME, "is missing")),
        Some(Value::String(text)) => return Ok((vec![app.encode_prompt(text)?], false)),
        Some(Value::Array(list)) => list,
        Some(other) => {
            return Err(ApiError::field(NAME, format!("is {}, not a text or a list", kind(other))));
        }
    };
    // Numbers, or texts with numbers among them, are one prompt.
    let is_one = list.iter().any(Value::is_number);
    if is_one || list.is_empty() {
        return Ok((vec![mixed(app, list)?], false));
    }
    if list.len() > N_PROMPTS_MAX {
        let words = format!("has {} prompts, at most {N_PROMPTS_MAX} are taken", list.len());
        return Err(ApiError::field(NAME, words));
    }
    let one = |value: &Value| match value {
        Value::String(text) => app.encode_prompt(text),
        Value::Array(list) => mixed(app, list),
        other => Err(ApiError::field(NAME, format!("holds {} among prompts", kind(other)))),
    };
    Ok((list.iter().map(one).collect::<Answered<_>>()?, true))
}

/// Texts and tokens in one prompt; one that begins with a text begins as a text does.
fn mixed(app: &App, list: &[Value]) -> Answered<Vec<u32>> {
    let mut ids = match list.first() {
        None => return app.begin(),
        Some(Value::String(_)) => app.tokenizer.begin().to_vec(),
        Some(_) => Vec::new(),
    };
    for value in list {
        match value {
            Value::String(text) => ids.extend(app.tokenizer.encode(text, Special::Parse)?),
            other => ids.push(app.token_id(NAME, other)?),
        }
    }
    if ids.is_empty() { app.begin() } else { Ok(ids) }
}
