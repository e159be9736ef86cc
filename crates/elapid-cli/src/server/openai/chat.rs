//! `POST /v1/chat/completions`: messages in, a message out, through the model's own template.

use super::shape::{Answers, Form, Kind};
use crate::server::App;
use crate::server::answer::respond;
use crate::server::body::{Body, Size};
use crate::server::ending::Ending;
use crate::server::error::{Answered, ApiError};
use crate::server::params::{OPENAI, Params, Top};
use crate::talk::load::now;
use axum::extract::State;
use axum::response::Response;
use elapid::Special;
use elapid::{ChatOptions, Message};
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::Arc;

/// Messages in one request.
const N_MESSAGES_MAX: usize = 4096;

#[derive(Deserialize)]
struct Fields {
    model: Option<String>,
    max_completion_tokens: Option<Size>,
    max_tokens: Option<Size>,
    logprobs: Option<bool>,
    top_logprobs: Option<Top>,
}

pub async fn chat(State(app): State<Arc<App>>, body: Body) -> Answered<Response> {
    let fields: Fields = body.read()?;
    let (model, adapters) = app.choose(fields.model.as_deref())?;
    let params = Params::new(&app, body.read()?, &OPENAI, adapters)?;
    let mut answers = Answers::new(&app, Kind::Chat, &body.read::<Form>()?, 1)?;
    (answers.model, answers.with_logprobs) = (model, fields.logprobs == Some(true));
    if fields.top_logprobs.is_some() && !answers.with_logprobs {
        return Err(ApiError::field("top_logprobs", "needs `logprobs: true`"));
    }
    let params = params.with_top(fields.top_logprobs.map_or(0, Top::size));
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
    let request = |choice| (params.request(prompt.clone(), n_max, choice), Ending::default());
    let growing = app.submit((0..answers.n_choices).map(request).collect()).await?;
    respond(params.mode, growing, answers).await
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
            let words = "has a part that is no text; this model reads text alone";
            let text = text.ok_or_else(|| wrong(words))?;
            message.insert("content".into(), Value::String(text));
        }
        Some(_) => return Err(wrong("has a `content` that is no text")),
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
