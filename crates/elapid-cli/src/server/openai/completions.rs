//! `POST /v1/completions`: what follows a prompt, or stands between it and a suffix.

use super::shape::{Answers, Form, Kind};
use crate::server::answer::respond;
use crate::server::body::{Body, Size};
use crate::server::ending::Ending;
use crate::server::error::{Answered, ApiError};
use crate::server::params::{OPENAI, Params, Top};
use crate::server::prompt::Prompt;
use crate::server::{App, N_PROMPTS_MAX, tabby};
use axum::extract::State;
use axum::response::Response;
use elapid::Special;
use serde::Deserialize;
use std::sync::Arc;

/// Tokens of an answer when nobody says, as OpenAI has it.
const N_TOK: usize = 16;

#[derive(Deserialize)]
struct Fields {
    model: Option<String>,
    prompt: Option<Prompt>,
    suffix: Option<String>,
    max_tokens: Option<Size>,
    logprobs: Option<Top>,
    echo: Option<bool>,
}

pub async fn completions(State(app): State<Arc<App>>, body: Body) -> Answered<Response> {
    // Tabby's editors ask here too.
    if body.has("segments") {
        return tabby::complete(&app, &body).await;
    }
    let fields: Fields = body.read()?;
    let (model, adapters) = app.choose(fields.model.as_deref())?;
    let mut params = Params::new(&app, body.read()?, &OPENAI, adapters)?;
    let form: Form = body.read()?;
    let echo = fields.echo == Some(true);
    if echo && fields.logprobs.is_some() {
        let words = "cannot be had with `logprobs`: those of a prompt are not kept; omit one";
        return Err(ApiError::field("echo", words));
    }
    params = params.with_top(fields.logprobs.map_or(0, Top::size));
    let prompt = fields.prompt.ok_or_else(|| ApiError::missing("prompt"))?;
    let (prompts, _) = prompt.split("prompt", N_PROMPTS_MAX)?;
    let suffix = fields.suffix.filter(|suffix| !suffix.is_empty());
    let wanted = fields.max_tokens.map_or(N_TOK, Size::size);
    let prepared = app.prepare(|| {
        let ids = prompts.iter().map(|prompt| {
            prompt.check("prompt")?;
            let ids = match &suffix {
                Some(suffix) => between(&app, prompt, suffix)?,
                None => prompt.ids(&app, "prompt")?,
            };
            Ok((app.n_max(ids.len(), Some(wanted))?, ids))
        });
        ids.collect::<Answered<Vec<_>>>()
    });
    let prepared = prepared.await?;
    if suffix.is_some() {
        params = params.with_fim_stops(&app);
    }
    let mut answers = Answers::new(&app, Kind::Completion, &form, prompts.len())?;
    (answers.model, answers.with_logprobs) = (model, fields.logprobs.is_some());
    if echo {
        let text = |prompt: Prompt| match prompt {
            Prompt::Text(text) => Ok(text),
            ids => Ok(app.tokenizer.decode(&ids.ids(&app, "prompt")?, Special::Parse)),
        };
        answers.echoes = prompts.into_iter().map(text).collect::<Answered<_>>()?;
    }
    let requests = prepared.iter().flat_map(|(n_max, ids)| {
        let choice = |choice| (params.request(ids.clone(), *n_max, choice), Ending::default());
        (0..answers.n_choices).map(choice)
    });
    let growing = app.submit(requests.collect()).await?;
    respond(params.mode, growing, answers).await
}

/// The prompt of a hole between two texts.
fn between(app: &App, prompt: &Prompt, suffix: &str) -> Answered<Vec<u32>> {
    let Some(fim) = &app.fim else {
        let words = "this model has no tokens for filling in the middle; omit `suffix`";
        return Err(ApiError::field("suffix", words).with_code("no_fim"));
    };
    // Marks of the middle in a file are text of this file.
    let encode = |text: &str| app.tokenizer.encode(text, Special::Plain);
    let prefix = match prompt {
        Prompt::Text(text) => encode(text)?,
        ids => ids.ids(app, "prompt")?,
    };
    let laid_out = fim.layout(fim.style, &prefix, &encode(suffix)?);
    Ok([app.tokenizer.begin(), &laid_out].concat())
}
