//! `POST /v1/completions`: what follows a prompt, or stands between it and a suffix.
//! `POST /v1/chat/completions`: messages in, a message out, through the model's own template.

use super::shape::{Answers, Kind};
use crate::server::body::{Body, Size};
use crate::server::error::{Answered, ApiError};
use crate::server::params::{Defaults, Params, Top};
use crate::server::prompt::Prompt;
use crate::server::{App, N_PROMPTS_MAX, tabby};
use crate::talk::load::now;
use axum::extract::State;
use axum::response::Response;
use elapid::{ChatOptions, Message, Special};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Tokens of a completion when nobody says, as OpenAI has it.
const N_TOK: usize = 16;

const N_MESSAGES_MAX: usize = 4096;

#[derive(Deserialize)]
struct CompletionFields {
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
    let fields: CompletionFields = body.read()?;
    let (model, adapters) = app.choose(fields.model.as_deref())?;
    let mut params = Params::new(&app, body.read()?, Defaults::Openai, adapters)?;
    let echo = fields.echo == Some(true);
    if echo && fields.logprobs.is_some() {
        let words = "does not work with `logprobs`: those of a prompt are not kept; omit one";
        return Err(ApiError::field("echo", words));
    }
    params.request.n_top = fields.logprobs.map_or(0, Top::size);
    let prompt = fields.prompt.ok_or_else(|| ApiError::missing("prompt"))?;
    let (prompts, _) = prompt.split("prompt", N_PROMPTS_MAX)?;
    let mut answers = Answers::new(&app, Kind::Completion, &body, prompts.len())?;
    (answers.model, answers.with_logprobs) = (model, fields.logprobs.is_some());
    let suffix = fields.suffix.filter(|suffix| !suffix.is_empty());
    let wanted = fields.max_tokens.map_or(N_TOK, Size::size);
    let prepared = app.prepare(|| {
        let ids = prompts.iter().map(|prompt| {
            prompt.check("prompt")?;
            let ids = match &suffix {
                Some(suffix) => between(&app, prompt, suffix)?,
                None => prompt.ids(&app, "prompt")?,
            };
            let n_max = app.n_max(ids.len(), Some(wanted))?;
            Ok((ids, n_max))
        });
        ids.collect::<Answered<Vec<_>>>()
    });
    let prepared = prepared.await?;
    if suffix.is_some() {
        params = params.with_fim_stops(&app);
    }
    if echo {
        let text = |prompt: Prompt| match prompt {
            Prompt::Text(text) => Ok(text),
            ids => Ok(app.tokenizer.decode(&ids.ids(&app, "prompt")?, Special::Parse)),
        };
        answers.echoes = prompts.into_iter().map(text).collect::<Answered<_>>()?;
    }
    answers.respond(&params, &prepared).await
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

#[derive(Deserialize)]
struct ChatFields {
    model: Option<String>,
    max_completion_tokens: Option<Size>,
    max_tokens: Option<Size>,
    logprobs: Option<bool>,
    top_logprobs: Option<Top>,
}

pub async fn chat(State(app): State<Arc<App>>, body: Body) -> Answered<Response> {
    let fields: ChatFields = body.read()?;
    let (model, adapters) = app.choose(fields.model.as_deref())?;
    let mut params = Params::new(&app, body.read()?, Defaults::Openai, adapters)?;
    let mut answers = Answers::new(&app, Kind::Chat, &body, 1)?;
    (answers.model, answers.with_logprobs) = (model, fields.logprobs == Some(true));
    if fields.top_logprobs.is_some() && !answers.with_logprobs {
        return Err(ApiError::field("top_logprobs", "needs `logprobs: true`"));
    }
    params.request.n_top = fields.top_logprobs.map_or(0, Top::size);
    let template: Template = body.read()?;
    let prompt = app.prepare(|| {
        // The template says itself what goes first.
        Ok(app.tokenizer.encode(&template.render(&app)?, Special::Parse)?)
    });
    let prompt = prompt.await?;
    if prompt.is_empty() {
        return Err(ApiError::field("messages", "the template makes an empty prompt of them"));
    }
    let wanted = fields.max_completion_tokens.or(fields.max_tokens).map(Size::size);
    let n_max = app.n_max(prompt.len(), wanted)?;
    answers.respond(&params, &[(prompt, n_max)]).await
}

/// Messages, and what else a template is given.
#[derive(Deserialize)]
pub struct Template {
    messages: Option<Vec<Map<String, Value>>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    add_generation_prompt: Option<bool>,
}

impl Template {
    /// The text that the template makes of messages.
    pub fn render(self, app: &App) -> Answered<String> {
        let Some(chat) = &app.chat else {
            let words = "this model has no chat template; use /v1/completions";
            return Err(ApiError::bad(words).with_code("no_chat_template"));
        };
        let list = self.messages.ok_or_else(|| ApiError::missing("messages"))?;
        if list.is_empty() || list.len() > N_MESSAGES_MAX {
            let words = format!("has {} messages; give 1 to {N_MESSAGES_MAX}", list.len());
            return Err(ApiError::field("messages", words));
        }
        let messages = list.into_iter().enumerate().map(|(idx, it)| message(idx, it));
        let messages = messages.collect::<Answered<Vec<Message>>>()?;
        let is_off = self.tool_choice.is_some_and(|choice| choice == "none");
        let tools = self.tools.filter(|list| !list.is_empty() && !is_off);
        let mut extra = chat.options.extra.clone();
        extra.extend(self.chat_template_kwargs.unwrap_or_default());
        let options = ChatOptions {
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            tools: tools.map(Value::Array),
            extra,
            now: Some(now()),
            ..chat.options.clone()
        };
        Ok(chat.template.render(&messages, &options)?)
    }
}

/// A message; text in parts is put together.
fn message(idx: usize, mut message: Map<String, Value>) -> Answered<Message> {
    let wrong = |words: &str| ApiError::field("messages", format!("message {idx} {words}"));
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(wrong("has no `role`"));
    }
    match message.get("content") {
        Some(Value::String(_) | Value::Null) => {}
        Some(Value::Array(parts)) => {
            let text: Option<String> = parts.iter().map(text_of).collect();
            let words = "has a part that is not text; this model reads only text";
            let text = text.ok_or_else(|| wrong(words))?;
            message.insert("content".into(), Value::String(text));
        }
        Some(_) => return Err(wrong("has a `content` that is not text")),
        None if message.contains_key("tool_calls") => {}
        None => return Err(wrong("has no `content`")),
    }
    Ok(message)
}

/// The text of `{"type": "text", "text": ...}`.
fn text_of(part: &Value) -> Option<&str> {
    match part.get("type").and_then(Value::as_str) {
        Some("text") => part.get("text").and_then(Value::as_str),
        Some(_) => None,
        None => part.as_str(),
    }
}
