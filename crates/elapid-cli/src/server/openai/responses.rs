//! `POST /v1/responses`: items in, items out.
//!
//! Requests become those of `/v1/chat/completions` (`translated`). Nothing is stored: a
//! conversation is sent whole, and `previous_response_id` is refused.

use crate::server::answer::{End, Piece, Shape, Wire};
use crate::server::body::Body;
use crate::server::chat::Ready;
use crate::server::error::{Answered, ApiError};
use crate::server::models::Models;
use crate::server::params::Defaults;
use crate::server::tools::{Call, Parser, Part};
use crate::server::{App, now_s};
use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// What a response repeats of its request.
const REPEATED: [&str; 8] = [
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "temperature",
    "tool_choice",
    "tools",
    "top_p",
];

pub async fn responses(State(models): State<Arc<Models>>, body: Body) -> Answered<Response> {
    let app = models.open(body.model()).await?;
    let map: Map<String, Value> = body.read()?;
    let mut head = json!({
        "id": app.answer_id("resp"), "object": "response", "created_at": now_s(),
        "status": "in_progress", "error": null, "incomplete_details": null, "output": [],
        "previous_response_id": null, "store": false, "truncation": "disabled", "usage": null,
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": null, "summary": null},
        "instructions": null, "max_output_tokens": null, "metadata": {}, "temperature": 1.0,
        "top_p": 1.0, "parallel_tool_calls": true, "tool_choice": "auto", "tools": [],
    });
    for (name, value) in map.iter().filter(|(name, _)| REPEATED.contains(&&name[..])) {
        head[name] = value.clone();
    }
    let ready = Ready::chat(&app, &translated(map)?, Defaults::Openai, &[]).await?;
    head["model"] = json!(ready.model);
    let (parser, text) = (ready.parser.clone(), String::new());
    let answers = Answers { app: app.clone(), head, parser, items: Vec::new(), text, n_events: 0 };
    ready.respond(&app, answers).await
}

/// A request in the words of `/v1/chat/completions`.
fn translated(mut map: Map<String, Value>) -> Answered<Body> {
    let mut turns = Vec::new();
    if let Some(Value::String(text)) = map.remove("instructions") {
        turns.push(json!({"role": "system", "content": text}));
    }
    match map.remove("input") {
        Some(Value::String(text)) => turns.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for (idx, item) in items.iter().enumerate() {
                add(&mut turns, item).ok_or_else(|| {
                    let words = format!(
                        "item {idx} is none of message, function_call and \
                                         function_call_output"
                    );
                    ApiError::field("input", words)
                })?;
            }
        }
        _ => return Err(ApiError::field("input", "is neither a text nor a list of items")),
    }
    map.insert("messages".into(), json!(turns));
    if let Some(n_max) = map.remove("max_output_tokens") {
        map.insert("max_tokens".into(), n_max);
    }
    if let Some(text) = map.remove("text") {
        let mut format = text.get("format").cloned().unwrap_or(json!({"type": "text"}));
        if format["type"] == "json_schema" {
            format = json!({"type": "json_schema", "json_schema": format});
        }
        map.insert("response_format".into(), format);
    }
    if let Some(Value::Array(tools)) = map.remove("tools") {
        let tool = |tool: Value| match tool["type"] == "function" {
            true => json!({"type": "function", "function": tool}),
            false => tool,
        };
        map.insert("tools".into(), tools.into_iter().map(tool).collect());
    }
    Ok(Body::of(map))
}

/// Adds an item to the turns of a chat.
fn add(turns: &mut Vec<Value>, item: &Value) -> Option<()> {
    match item["type"].as_str().unwrap_or("message") {
        "message" => {
            let role = item["role"].as_str()?;
            // What OpenAI calls the system now.
            let role = if role == "developer" { "system" } else { role };
            turns.push(json!({"role": role, "content": item["content"]}));
        }
        "function_call" => {
            let function = json!({"name": item["name"], "arguments": item["arguments"]});
            let call = json!({"id": item["call_id"], "type": "function", "function": function});
            // Calls of one turn are items of their own here.
            match turns.last_mut().filter(|turn| turn["role"] == "assistant") {
                Some(turn) => match turn["tool_calls"].as_array_mut() {
                    Some(calls) => calls.push(call),
                    None => turn["tool_calls"] = json!([call]),
                },
                None => turns.push(json!({
                    "role": "assistant", "content": null, "tool_calls": [call],
                })),
            }
        }
        "function_call_output" => turns.push(json!({
            "role": "tool", "tool_call_id": item["call_id"], "content": item["output"],
        })),
        _ => return None,
    }
    Some(())
}

struct Answers {
    app: Arc<App>,
    head: Value,
    parser: Parser,
    /// Items that are complete.
    items: Vec<Value>,
    /// The text of a message that is not.
    text: String,
    n_events: usize,
}

impl Answers {
    fn message(&self, text: &str, status: &str) -> Value {
        let part = json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
        let content = if status == "completed" { json!([part]) } else { json!([]) };
        let id = format!("{}-{}", self.head["id"].as_str().unwrap_or_default(), self.items.len());
        json!({
            "id": format!("msg_{id}"), "type": "message", "status": status, "role": "assistant",
            "content": content,
        })
    }

    fn call(&self, call: &Call) -> Value {
        let id = self.app.call_id();
        json!({
            "id": format!("fc_{id}"), "type": "function_call", "status": "completed", "call_id": id,
            "name": call.name, "arguments": call.arguments.to_string(),
        })
    }

    /// The whole response once it has ended.
    fn ended(&self, end: &End) -> Value {
        let mut object = self.head.clone();
        let is_whole = end.finish_reason(0) == "stop";
        object["status"] = json!(if is_whole { "completed" } else { "incomplete" });
        if !is_whole {
            object["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        let (n_prompt, n_tok) = (end.finish.n_prompt, end.finish.n_tok);
        object["output"] = json!(self.items);
        object["usage"] = json!({
            "input_tokens": n_prompt, "output_tokens": n_tok, "total_tokens": n_prompt + n_tok,
            "input_tokens_details": {"cached_tokens": end.finish.n_cached},
            "output_tokens_details": {"reasoning_tokens": 0},
        });
        object
    }

    fn event(&mut self, kind: &str, mut more: Value) -> Value {
        more["type"] = json!(format!("response.{kind}"));
        more["sequence_number"] = json!(self.n_events);
        self.n_events += 1;
        more
    }

    /// An event about the item that grows, or a part of it.
    fn of_item(&mut self, kind: &str, mut more: Value) -> Value {
        more["output_index"] = json!(self.items.len());
        self.event(kind, more)
    }

    fn of_text(&mut self, kind: &str, mut more: Value) -> Value {
        more["item_id"] = self.message("", "in_progress")["id"].clone();
        more["content_index"] = json!(0);
        self.of_item(kind, more)
    }

    fn close(&mut self) -> Vec<Value> {
        if self.text.is_empty() {
            return Vec::new();
        }
        let text = std::mem::take(&mut self.text);
        let item = self.message(&text, "completed");
        let part = item["content"][0].clone();
        let events = vec![
            self.of_text("output_text.done", json!({"text": text, "logprobs": []})),
            self.of_text("content_part.done", json!({"part": part})),
            self.of_item("output_item.done", json!({"item": item})),
        ];
        self.items.push(item);
        events
    }

    fn events(&mut self, parts: Vec<Part>) -> Vec<Value> {
        let mut events = Vec::new();
        for part in parts {
            match part {
                Part::Text(text) => {
                    if self.text.is_empty() {
                        let item = self.message("", "in_progress");
                        events.push(self.of_item("output_item.added", json!({"item": item})));
                        let part = self.message("", "completed")["content"][0].clone();
                        events.push(self.of_text("content_part.added", json!({"part": part})));
                    }
                    let delta = json!({"delta": text, "logprobs": []});
                    events.push(self.of_text("output_text.delta", delta));
                    self.text += &text;
                }
                Part::Call(call) => {
                    events.extend(self.close());
                    let item = self.call(&call);
                    let (id, text) = (item["id"].clone(), item["arguments"].clone());
                    let mut empty = item.clone();
                    (empty["arguments"], empty["status"]) = (json!(""), json!("in_progress"));
                    let kind = "function_call_arguments";
                    let delta = json!({"item_id": id, "delta": text});
                    let done = json!({"item_id": id, "arguments": text, "name": call.name});
                    events.push(self.of_item("output_item.added", json!({"item": empty})));
                    events.push(self.of_item(&format!("{kind}.delta"), delta));
                    events.push(self.of_item(&format!("{kind}.done"), done));
                    events.push(self.of_item("output_item.done", json!({"item": item})));
                    self.items.push(item);
                }
            }
        }
        events
    }
}

impl Shape for Answers {
    fn whole(&mut self, answers: &[(Piece, End)]) -> Value {
        let Some((piece, end)) = answers.first() else { return Value::Null };
        let parts = self.parser.clone().all(&piece.text);
        self.events(parts);
        self.close();
        self.ended(end)
    }

    fn first(&mut self, _idx: usize) -> Vec<Value> {
        let head = json!({"response": self.head});
        ["created", "in_progress"].iter().map(|kind| self.event(kind, head.clone())).collect()
    }

    fn piece(&mut self, _idx: usize, piece: &Piece) -> Vec<Value> {
        let parts = self.parser.push(&piece.text);
        self.events(parts)
    }

    fn last(&mut self, _idx: usize, end: &End) -> Vec<Value> {
        let parts = self.parser.finish();
        let mut events = self.events(parts);
        events.extend(self.close());
        let response = self.ended(end);
        let kind = response["status"].as_str().unwrap_or_default().to_string();
        events.push(self.event(&kind, json!({"response": response})));
        events
    }

    fn wire(&self) -> Wire {
        Wire::Named
    }

    fn error(&self, error: &ApiError) -> Value {
        let mut event = json!({"type": "error", "sequence_number": self.n_events});
        (event["message"], event["code"]) = (json!(error.message), json!(error.code));
        event["param"] = json!(error.param);
        event
    }
}
