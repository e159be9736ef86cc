//! `POST /v1/completions`: what follows a prompt, or stands between it and a suffix.

use super::logprobs::of_completion;
use super::{n_choices, usage, wants_usage};
use crate::serve::error::{Answered, ApiError};
use crate::serve::feed::{Answer, End, Piece};
use crate::serve::fields::{Fields, kind};
use crate::serve::limits::N_PROMPTS_MAX;
use crate::serve::params::{N_TOP_MAX, OPENAI, Params};
use crate::serve::respond::{Shape, respond};
use crate::serve::{App, now_s, tabby};
use axum::extract::State;
use axum::response::Response;
use elapid::Special;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Tokens of an answer when nobody says, as OpenAI has it.
const N_TOK: usize = 16;

/// A prompt as it was given.
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

pub async fn completions(State(app): State<Arc<App>>, fields: Fields) -> Answered<Response> {
    // Tabby's editors ask here too.
    if fields.get("segments").is_some() {
        return tabby::complete(&app, &fields).await;
    }
    let (model, adapters) = app.choose(fields.text("model")?)?;
    let mut params = Params::read(&app, &fields, &OPENAI, adapters)?;
    let n_choices = n_choices(&fields)?;
    let wanted = fields.whole("max_tokens", 0..=i64::from(u32::MAX))?.map(|n| n as usize);
    let logprobs = fields.whole("logprobs", 0..=N_TOP_MAX)?;
    params.n_top = logprobs.unwrap_or(0) as usize;
    let echo = fields.flag("echo")?.unwrap_or(false);
    if echo && logprobs.is_some() {
        let words = "cannot be had with `logprobs`: those of a prompt are not kept; leave one out";
        return Err(ApiError::field("echo", words));
    }
    let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
    let prepared = app.prepare(|| {
        let prompts = prompts(&app, &fields)?;
        let ids = prompts.iter().map(|prompt| match suffix {
            Some(suffix) => between(&app, prompt, suffix),
            None => alone(&app, prompt),
        });
        Ok((ids.collect::<Answered<Vec<_>>>()?, prompts))
    });
    let (ids, prompts) = prepared.await?;
    if suffix.is_some() {
        params.stop_tokens.extend(app.fim.iter().flat_map(|fim| fim.stops()));
    }
    let n_max = |ids: Vec<u32>| Ok((app.n_max(ids.len(), wanted.or(Some(N_TOK)))?, ids));
    let requests = ids.into_iter().map(n_max).collect::<Answered<Vec<_>>>()?;
    let requests: Vec<_> = requests.into_iter().map(|(n_max, ids)| (ids, n_max)).collect();
    let feeds = app.submit(&params, &requests, n_choices).await?;
    let text = |prompt: &Prompt| match prompt {
        Prompt::Text(text) => text.clone(),
        Prompt::Ids(ids) => app.tokenizer.decode(ids, Special::Parse),
    };
    let echoes: Vec<String> = match echo {
        true => prompts.iter().map(text).collect(),
        false => Vec::new(),
    };
    let shape = Completions {
        id: app.answer_id("cmpl"),
        created_s: now_s(),
        model,
        n_choices,
        with_logprobs: logprobs.is_some(),
        with_usage: wants_usage(&fields)?,
        offsets: feeds.iter().map(|_| AtomicUsize::new(0)).collect(),
        echoes,
        app: app.clone(),
    };
    respond(params.mode, feeds, shape).await
}

/// A text, a list of texts, a list of tokens, or a list of such lists.
fn prompts(app: &App, fields: &Fields) -> Answered<Vec<Prompt>> {
    const NAME: &str = "prompt";
    let ids = |list: &[Value]| -> Answered<Prompt> {
        let ids = list.iter().map(|value| app.token_id(NAME, value));
        Ok(Prompt::Ids(ids.collect::<Answered<Vec<_>>>()?))
    };
    let list = match fields.get(NAME) {
        None => return Err(ApiError::field(NAME, "is missing")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text.clone())]),
        Some(Value::Array(list)) => list,
        Some(other) => {
            let words = format!("is {}, not a text, a list of texts or of tokens", kind(other));
            return Err(ApiError::field(NAME, words));
        }
    };
    match list.first() {
        None => return Err(ApiError::field(NAME, "is an empty list")),
        Some(Value::Number(_)) => return Ok(vec![ids(list)?]),
        _ => {}
    }
    if list.len() > N_PROMPTS_MAX {
        let words = format!("has {} prompts, at most {N_PROMPTS_MAX} are taken", list.len());
        return Err(ApiError::field(NAME, words));
    }
    let one = |value: &Value| match value {
        Value::String(text) => Ok(Prompt::Text(text.clone())),
        Value::Array(list) => ids(list),
        other => Err(ApiError::field(NAME, format!("holds {} among prompts", kind(other)))),
    };
    list.iter().map(one).collect()
}

fn alone(app: &App, prompt: &Prompt) -> Answered<Vec<u32>> {
    match prompt {
        Prompt::Text(text) => app.encode_prompt(text),
        Prompt::Ids(ids) if ids.is_empty() => app.begin(),
        Prompt::Ids(ids) => Ok(ids.clone()),
    }
}

/// The prompt of a hole between two texts.
fn between(app: &App, prompt: &Prompt, suffix: &str) -> Answered<Vec<u32>> {
    let Some(fim) = &app.fim else {
        let words = "this model has no tokens for filling in the middle; leave `suffix` out";
        return Err(ApiError::field("suffix", words).with_code("no_fim"));
    };
    // Marks of the middle in a file are text of this file.
    let encode = |text: &str| app.tokenizer.encode(text, Special::Plain);
    let prefix = match prompt {
        Prompt::Text(text) => encode(text)?,
        Prompt::Ids(ids) => ids.clone(),
    };
    let laid_out = fim.layout(fim.style, &prefix, &encode(suffix)?);
    Ok([app.tokenizer.begin(), &laid_out].concat())
}

struct Completions {
    app: Arc<App>,
    id: String,
    created_s: u64,
    model: String,
    n_choices: usize,
    with_logprobs: bool,
    with_usage: bool,
    /// Prompts that are given back, by number; empty where they are not.
    echoes: Vec<String>,
    /// Characters of each answer that were streamed.
    offsets: Vec<AtomicUsize>,
}

impl Completions {
    fn echo(&self, idx: usize) -> &str {
        self.echoes.get(idx / self.n_choices).map_or("", String::as_str)
    }

    fn object(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created_s,
            "model": self.model, "choices": choices,
        })
    }

    /// A piece of a stream.
    fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.object(vec![choice]);
        if self.with_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Shape for Completions {
    fn whole(&self, answers: &[Answer]) -> Value {
        let choice = |(idx, answer): (usize, &Answer)| {
            let logprobs =
                self.with_logprobs.then(|| of_completion(&self.app.tokenizer, &answer.tokens, 0));
            json!({
                "text": format!("{}{}", self.echo(idx), answer.text), "index": idx,
                "logprobs": logprobs, "finish_reason": answer.end.stop.finish_reason(),
            })
        };
        let mut object = self.object(answers.iter().enumerate().map(choice).collect());
        let ends: Vec<&End> = answers.iter().map(|answer| &answer.end).collect();
        object["usage"] = usage(&ends, self.n_choices);
        if let [end] = &ends[..] {
            object["timings"] = end.timings();
        }
        object
    }

    fn first(&self, idx: usize) -> Option<Value> {
        let text = Some(self.echo(idx)).filter(|text| !text.is_empty())?;
        let choice = json!({"text": text, "index": idx, "logprobs": null, "finish_reason": null});
        Some(self.chunk(choice))
    }

    fn piece(&self, idx: usize, piece: &Piece) -> Value {
        let n_chars = piece.text.chars().count();
        let offset = self.offsets[idx].fetch_add(n_chars, Ordering::Relaxed);
        let logprobs =
            self.with_logprobs.then(|| of_completion(&self.app.tokenizer, &piece.tokens, offset));
        self.chunk(json!({
            "text": piece.text, "index": idx, "logprobs": logprobs, "finish_reason": null,
        }))
    }

    fn last(&self, idx: usize, end: &End) -> Value {
        let reason = end.stop.finish_reason();
        let choice = json!({"text": "", "index": idx, "logprobs": null, "finish_reason": reason});
        let mut chunk = self.chunk(choice);
        chunk["timings"] = end.timings();
        chunk
    }

    fn after(&self, ends: &[End]) -> Option<Value> {
        self.with_usage.then(|| {
            let mut object = self.object(Vec::new());
            object["usage"] = usage(&ends.iter().collect::<Vec<_>>(), self.n_choices);
            object
        })
    }

    fn done(&self) -> Option<&'static str> {
        Some("data: [DONE]\n\n")
    }

    fn shows_tokens(&self) -> bool {
        self.with_logprobs
    }
}
