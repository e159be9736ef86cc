//! `POST /v1/chat/completions`: messages in, a message out, through the model's own template.

use super::logprobs::of_chat;
use super::{n_choices, usage, wants_usage};
use crate::serve::error::{Answered, ApiError};
use crate::serve::feed::{Answer, End, Piece};
use crate::serve::fields::{Fields, kind};
use crate::serve::params::{N_TOP_MAX, OPENAI, Params};
use crate::serve::respond::{Shape, respond};
use crate::serve::{App, now_s};
use crate::talk::load::now;
use axum::extract::State;
use axum::response::Response;
use elapid::Special;
use elapid::{ChatOptions, Message};
use serde_json::{Value, json};
use std::sync::Arc;

/// Messages in one request.
const N_MESSAGES_MAX: usize = 4096;

pub async fn chat(State(app): State<Arc<App>>, fields: Fields) -> Answered<Response> {
    let (model, adapters) = app.choose(fields.text("model")?)?;
    let mut params = Params::read(&app, &fields, &OPENAI, adapters)?;
    let n_choices = n_choices(&fields)?;
    let whole = |name: &str| fields.whole(name, 0..=i64::from(u32::MAX));
    let wanted = whole("max_completion_tokens")?.or(whole("max_tokens")?).map(|n| n as usize);
    let with_logprobs = fields.flag("logprobs")?.unwrap_or(false);
    let n_top = fields.whole("top_logprobs", 0..=N_TOP_MAX)?;
    if n_top.is_some() && !with_logprobs {
        return Err(ApiError::field("top_logprobs", "needs `logprobs: true`"));
    }
    params.n_top = n_top.unwrap_or(0) as usize;
    let with_usage = wants_usage(&fields)?;
    let prompt = app.prepare(|| {
        let text = render(&app, &fields, messages(&fields)?)?;
        // The template says itself what goes first.
        Ok(app.tokenizer.encode(&text, Special::Parse)?)
    });
    let prompt = prompt.await?;
    if prompt.is_empty() {
        return Err(ApiError::field("messages", "the template makes an empty prompt of them"));
    }
    let n_max = app.n_max(prompt.len(), wanted)?;
    let feeds = app.submit(&params, &[(prompt, n_max)], n_choices).await?;
    let shape = Chats {
        id: app.answer_id("chatcmpl"),
        created_s: now_s(),
        model,
        n_choices,
        with_logprobs,
        with_usage,
        app: app.clone(),
    };
    respond(params.mode, feeds, shape).await
}

/// The messages of a request; text in parts is put together.
pub fn messages(fields: &Fields) -> Answered<Vec<Message>> {
    const NAME: &str = "messages";
    let Some(list) = fields.list(NAME)? else {
        return Err(ApiError::field(NAME, "is missing"));
    };
    if list.is_empty() || list.len() > N_MESSAGES_MAX {
        let words = format!("has {} messages; give 1 to {N_MESSAGES_MAX}", list.len());
        return Err(ApiError::field(NAME, words));
    }
    let one = |(idx, value): (usize, &Value)| {
        let wrong = |words: String| ApiError::field(NAME, format!("message {idx} {words}"));
        let Value::Object(message) = value else {
            return Err(wrong(format!("is {}, not an object", kind(value))));
        };
        if !message.get("role").is_some_and(Value::is_string) {
            return Err(wrong("has no `role`".into()));
        }
        let mut message = message.clone();
        let content = match message.get("content") {
            Some(Value::Array(parts)) => Some(joined(parts).map_err(wrong)?),
            Some(Value::String(_) | Value::Null) => None,
            Some(other) => return Err(wrong(format!("has {} as `content`", kind(other)))),
            None if message.contains_key("tool_calls") => None,
            None => return Err(wrong("has no `content`".into())),
        };
        if let Some(content) = content {
            message.insert("content".into(), Value::String(content));
        }
        Ok(message)
    };
    list.iter().enumerate().map(one).collect()
}

/// The text of `[{"type": "text", "text": ...}]`.
fn joined(parts: &[Value]) -> Result<String, String> {
    let text = |part: &Value| match (part.get("type").and_then(Value::as_str), part) {
        (Some("text"), _) => part.get("text").and_then(Value::as_str).map(str::to_string),
        (None, Value::String(text)) => Some(text.clone()),
        _ => None,
    };
    let texts: Option<Vec<String>> = parts.iter().map(text).collect();
    texts
        .map(|texts| texts.concat())
        .ok_or_else(|| "has a part that is no text; this model reads text alone".to_string())
}

/// The text that the template makes of messages.
pub fn render(app: &App, fields: &Fields, messages: Vec<Message>) -> Answered<String> {
    let Some(chat) = &app.chat else {
        let words = "this model has no chat template; use /v1/completions";
        return Err(ApiError::bad(words).with_code("no_chat_template"));
    };
    let tools = fields.list("tools")?;
    let is_off = fields.get("tool_choice").and_then(Value::as_str) == Some("none");
    let tools = tools.filter(|list| !list.is_empty() && !is_off);
    let mut extra = chat.options.extra.clone();
    if let Some(more) = fields.object("chat_template_kwargs")? {
        extra.extend(more.clone());
    }
    let add = fields.flag("add_generation_prompt")?.unwrap_or(true);
    let options = ChatOptions {
        add_generation_prompt: add,
        tools: tools.map(|list| Value::Array(list.clone())),
        extra,
        now: Some(now()),
        ..chat.options.clone()
    };
    Ok(chat.template.render(&messages, &options)?)
}

struct Chats {
    app: Arc<App>,
    id: String,
    created_s: u64,
    model: String,
    n_choices: usize,
    with_logprobs: bool,
    with_usage: bool,
}

impl Chats {
    fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created_s, "model": self.model,
            "choices": choices,
        })
    }

    fn logprobs(&self, tokens: &[elapid::Token]) -> Option<Value> {
        self.with_logprobs.then(|| of_chat(&self.app.tokenizer, tokens))
    }

    /// A piece of a stream.
    fn chunk(&self, idx: usize, delta: Value, reason: Option<&str>) -> Value {
        let choice =
            json!({"index": idx, "delta": delta, "logprobs": null, "finish_reason": reason});
        let mut chunk = self.object("chat.completion.chunk", vec![choice]);
        if self.with_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Shape for Chats {
    fn whole(&self, answers: &[Answer]) -> Value {
        let choice = |(idx, answer): (usize, &Answer)| {
            json!({
                "index": idx,
                "message": {"role": "assistant", "content": answer.text, "refusal": null},
                "logprobs": self.logprobs(&answer.tokens),
                "finish_reason": answer.end.stop.finish_reason(),
            })
        };
        let choices = answers.iter().enumerate().map(choice).collect();
        let mut object = self.object("chat.completion", choices);
        let ends: Vec<&End> = answers.iter().map(|answer| &answer.end).collect();
        object["usage"] = usage(&ends, self.n_choices);
        if let [end] = &ends[..] {
            object["timings"] = end.timings();
        }
        object
    }

    fn first(&self, idx: usize) -> Option<Value> {
        Some(self.chunk(idx, json!({"role": "assistant", "content": ""}), None))
    }

    fn piece(&self, idx: usize, piece: &Piece) -> Value {
        let mut chunk = self.chunk(idx, json!({"content": piece.text}), None);
        if let Some(logprobs) = self.logprobs(&piece.tokens) {
            chunk["choices"][0]["logprobs"] = logprobs;
        }
        chunk
    }

    fn last(&self, idx: usize, end: &End) -> Value {
        let mut chunk = self.chunk(idx, json!({}), Some(end.stop.finish_reason()));
        chunk["timings"] = end.timings();
        chunk
    }

    fn after(&self, ends: &[End]) -> Option<Value> {
        self.with_usage.then(|| {
            let mut object = self.object("chat.completion.chunk", Vec::new());
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
