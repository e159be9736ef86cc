//! The routes of Anthropic, `/v1/messages` and `/v1/messages/count_tokens`.
//!
//! Requests become those of OpenAI (`translated`): `system` is the first message, blocks of text
//! are joined, `tool_use` and `tool_result` are calls and messages of the role `tool`. A last
//! message of the assistant's is continued.
//!
//! Not here: images and documents, thinking, tools that Anthropic runs itself; `cache_control` is
//! passed over, as what was read is cached anyway.

use super::App;
use super::answer::{End, Piece, Shape, Wire};
use super::body::Body;
use super::chat::Ready;
use super::error::{Answered, ApiError, Dialect};
use super::models::Models;
use super::params::Defaults;
use super::tools::{Parser, Part};
use axum::Json;
use axum::extract::State;
use axum::response::Response;
use elapid::Reason;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub async fn messages(State(models): State<Arc<Models>>, body: Body) -> Answered<Response> {
    let app = models.open(body.model()).await?;
    let map: Map<String, Value> = body.read()?;
    if !map.contains_key("max_tokens") {
        return Err(ApiError::missing("max_tokens"));
    }
    let ready = Ready::chat(&app, &translated(map)?, Defaults::Openai, &[]).await?;
    let answers = Answers {
        app: app.clone(),
        id: app.answer_id("msg"),
        model: ready.model.clone(),
        n_prompt: ready.prompt.len(),
        parser: ready.parser.clone(),
        n_blocks: 0,
        is_open: false,
    };
    ready.respond(&app, answers).await
}

pub async fn count_tokens(State(models): State<Arc<Models>>, body: Body) -> Answered<Json<Value>> {
    let app = models.open(body.model()).await?;
    let ready = Ready::chat(&app, &translated(body.read()?)?, Defaults::Openai, &[]).await?;
    Ok(Json(json!({"input_tokens": ready.prompt.len()})))
}

/// A request in OpenAI's words.
fn translated(mut map: Map<String, Value>) -> Answered<Body> {
    let mut turns = Vec::new();
    match map.remove("system") {
        None | Some(Value::Null) => {}
        Some(system) => turns.push(json!({"role": "system", "content": text("system", &system)?})),
    }
    let messages = map.remove("messages").ok_or_else(|| ApiError::missing("messages"))?;
    let wrong = || ApiError::field("messages", "is not a list of messages");
    for message in messages.as_array().ok_or_else(wrong)? {
        let role = message["role"].as_str().filter(|role| ["user", "assistant"].contains(role));
        let role = role.ok_or_else(|| {
            ApiError::field("messages", "have the roles user and assistant; use `system`")
        })?;
        turns.extend(turn(role, &message["content"])?);
    }
    let is_begun = turns
        .last()
        .is_some_and(|turn| turn["role"] == "assistant" && turn.get("tool_calls").is_none());
    map.insert("continue_final_message".into(), json!(is_begun));
    map.insert("messages".into(), json!(turns));
    if let Some(stops) = map.remove("stop_sequences") {
        map.insert("stop".into(), stops);
    }
    if map.get("thinking").is_some_and(|it| it["type"] == "disabled") {
        map.remove("thinking");
    }
    if let Some(tools) = map.remove("tools") {
        let list = tools.as_array().ok_or_else(|| ApiError::field("tools", "is not a list"))?;
        map.insert("tools".into(), list.iter().map(tool).collect());
    }
    if let Some(choice) = map.remove("tool_choice") {
        if choice["disable_parallel_tool_use"] == true {
            map.insert("parallel_tool_calls".into(), json!(false));
        }
        let choice = match choice["type"].as_str() {
            Some("any") => json!("required"),
            Some("tool") => json!({"function": {"name": choice["name"]}}),
            _ => choice["type"].clone(),
        };
        map.insert("tool_choice".into(), choice);
    }
    Ok(Body::of(map))
}

fn tool(tool: &Value) -> Value {
    match tool["type"].as_str() {
        None | Some("custom") => json!({"type": "function", "function": {
            "name": tool["name"], "description": tool["description"],
            "parameters": tool["input_schema"],
        }}),
        // Refused by its name.
        Some(_) => tool.clone(),
    }
}

/// A text, or blocks of text.
fn text(name: &str, content: &Value) -> Answered<String> {
    let block = |block: &Value| match block["type"].as_str() {
        Some("text") => Ok(block["text"].as_str().unwrap_or_default().to_string()),
        Some(other) => {
            let words = format!("has a block of the type `{other}`; this model reads only text");
            Err(ApiError::field(name, words))
        }
        None => Err(ApiError::field(name, "has a block without `type`")),
    };
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(blocks) => blocks.iter().map(block).collect(),
        _ => Err(ApiError::field(name, "is neither a text nor a list of blocks")),
    }
}

/// The turns of OpenAI that a message is: what tools gave first, then the rest.
fn turn(role: &str, content: &Value) -> Answered<Vec<Value>> {
    const NAME: &str = "messages";
    let blocks = match content {
        Value::Array(blocks) => blocks.clone(),
        content => vec![json!({"type": "text", "text": text(NAME, content)?})],
    };
    let (mut turns, mut calls, mut rest) = (Vec::new(), Vec::new(), Vec::new());
    for block in blocks {
        match block["type"].as_str() {
            Some("tool_result") => {
                let given = match &block["content"] {
                    Value::Null => String::new(),
                    content => text(NAME, content)?,
                };
                let id = &block["tool_use_id"];
                turns.push(json!({"role": "tool", "tool_call_id": id, "content": given}));
            }
            Some("tool_use") => calls.push(json!({
                "id": block["id"], "type": "function",
                "function": {"name": block["name"], "arguments": block["input"]},
            })),
            // What a model thought is no part of what it said.
            Some("thinking" | "redacted_thinking") => {}
            _ => rest.push(block),
        }
    }
    if !rest.is_empty() || !calls.is_empty() {
        let mut turn = json!({"role": role, "content": text(NAME, &Value::Array(rest))?});
        if !calls.is_empty() {
            turn["tool_calls"] = json!(calls);
        }
        turns.push(turn);
    }
    Ok(turns)
}

struct Answers {
    app: Arc<App>,
    id: String,
    model: String,
    n_prompt: usize,
    parser: Parser,
    /// Blocks that were streamed, and whether the last is of text that may continue.
    n_blocks: usize,
    is_open: bool,
}

impl Answers {
    fn message(&self, content: Vec<Value>, end: Option<(&End, usize)>) -> Value {
        let (reason, stop) = end.map_or((Value::Null, Value::Null), |end| reason(end.0, end.1));
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": reason, "stop_sequence": stop,
            "usage": self.usage(end.map(|pair| pair.0)),
        })
    }

    fn usage(&self, end: Option<&End>) -> Value {
        let (n_cached, n_tok) = end.map_or((0, 0), |end| (end.finish.n_cached, end.finish.n_tok));
        json!({
            "input_tokens": self.n_prompt - n_cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": n_cached, "output_tokens": n_tok,
        })
    }

    fn block(&self, part: &Part) -> Value {
        match part {
            Part::Text(text) => json!({"type": "text", "text": text}),
            Part::Call(call) => json!({
                "type": "tool_use", "id": self.app.call_id(), "name": call.name,
                "input": call.arguments,
            }),
        }
    }

    fn close(&mut self) -> Option<Value> {
        let idx = self.n_blocks.checked_sub(1)?;
        let was_open = std::mem::take(&mut self.is_open);
        was_open.then(|| json!({"type": "content_block_stop", "index": idx}))
    }

    fn events(&mut self, parts: Vec<Part>) -> Vec<Value> {
        let mut events = Vec::new();
        for part in parts {
            let is_text = matches!(part, Part::Text(_));
            if !(is_text && self.is_open) {
                events.extend(self.close());
                let mut block = self.block(&part);
                match is_text {
                    true => block["text"] = json!(""),
                    false => block["input"] = json!({}),
                }
                let idx = self.n_blocks;
                events.push(json!({
                    "type": "content_block_start", "index": idx, "content_block": block,
                }));
                (self.n_blocks, self.is_open) = (idx + 1, true);
            }
            let delta = match &part {
                Part::Text(text) => json!({"type": "text_delta", "text": text}),
                Part::Call(call) => {
                    json!({"type": "input_json_delta", "partial_json": call.arguments.to_string()})
                }
            };
            let idx = self.n_blocks - 1;
            events.push(json!({"type": "content_block_delta", "index": idx, "delta": delta}));
            if !is_text {
                events.extend(self.close());
            }
        }
        events
    }
}

/// Why an answer with so many calls ended, and the text that ended it.
fn reason(end: &End, n_calls: usize) -> (Value, Value) {
    match &end.finish.reason {
        Reason::StopText(text) => (json!("stop_sequence"), json!(text)),
        Reason::End if n_calls > 0 => (json!("tool_use"), Value::Null),
        Reason::End => (json!("end_turn"), Value::Null),
        _ => (json!("max_tokens"), Value::Null),
    }
}

impl Shape for Answers {
    fn whole(&mut self, answers: &[(Piece, End)]) -> Value {
        let Some((piece, end)) = answers.first() else { return Value::Null };
        let parts = self.parser.clone().all(&piece.text);
        let n_calls = parts.iter().filter(|part| matches!(part, Part::Call(_))).count();
        let content = parts.iter().map(|part| self.block(part)).collect();
        self.message(content, Some((end, n_calls)))
    }

    fn first(&mut self, _idx: usize) -> Vec<Value> {
        vec![json!({"type": "message_start", "message": self.message(Vec::new(), None)})]
    }

    fn piece(&mut self, _idx: usize, piece: &Piece) -> Vec<Value> {
        let parts = self.parser.push(&piece.text);
        self.events(parts)
    }

    fn last(&mut self, _idx: usize, end: &End) -> Vec<Value> {
        let parts = self.parser.finish();
        let mut events = self.events(parts);
        events.extend(self.close());
        let (reason, stop) = reason(end, self.parser.n_calls);
        let delta = json!({"stop_reason": reason, "stop_sequence": stop});
        let usage = self.usage(Some(end));
        events.push(json!({"type": "message_delta", "delta": delta, "usage": usage}));
        events.push(json!({"type": "message_stop"}));
        events
    }

    fn wire(&self) -> Wire {
        Wire::Named
    }

    fn error(&self, error: &ApiError) -> Value {
        error.json(Dialect::Anthropic)
    }
}
