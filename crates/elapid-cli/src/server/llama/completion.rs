//! `POST /completion`: what follows a prompt.
//!
//! A prompt is a text, a list of tokens, or texts and tokens mixed; a list of prompts is answered
//! by a list.

use super::shape::{Answers, Fields};
use crate::server::answer::respond;
use crate::server::body::Body;
use crate::server::ending::Ending;
use crate::server::error::{Answered, ApiError};
use crate::server::params::{LLAMA, Params};
use crate::server::prompt::Prompt;
use crate::server::{App, N_PROMPTS_MAX};
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use std::sync::Arc;

#[derive(Deserialize)]
struct PromptField {
    prompt: Option<Prompt>,
}

pub async fn completion(State(app): State<Arc<App>>, body: Body) -> Answered<Response> {
    let params = Params::new(&app, body.read()?, &LLAMA, app.default_adapters())?;
    let mut fields: Fields = body.read()?;
    let prompt = body.read::<PromptField>()?.prompt.ok_or_else(|| ApiError::missing("prompt"))?;
    let (prompts, is_list) = prompt.split("prompt", N_PROMPTS_MAX)?;
    let ids = app.prepare(|| prompts.iter().map(|prompt| prompt.ids(&app, "prompt")).collect());
    let ids: Vec<Vec<u32>> = ids.await?;
    let mut answers = Answers::new(&app, params, &mut fields, ids)?;
    answers.is_list = is_list;
    let growing = answers.submit(|| fields.ending(Ending::default())).await?;
    respond(answers.params.mode, growing, answers).await
}
