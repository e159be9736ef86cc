//! What answers of `/v1/completions` and `/v1/chat/completions` look like.

use crate::server::answer::{Answer, End, Piece, Shape, event};
use crate::server::body::Int;
use crate::server::error::{Answered, ApiError};
use crate::server::{App, now_s};
use axum::response::sse::Event;
use elapid::Token;
use elapid::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// JSON has no minus infinity; OpenAI writes this.
const NEVER: f32 = -9999.0;

/// Which of the two routes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Completion,
    Chat,
}

/// Fields of a body about the form of its answers.
#[derive(Deserialize)]
pub struct Form {
    n: Option<Int<1, 8>>,
    best_of: Option<Int<1, 8>>,
    stream_options: Option<StreamOptions>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// The answers of one request.
pub struct Answers {
    app: Arc<App>,
    kind: Kind,
    id: String,
    created_s: u64,
    pub model: String,
    /// Answers to each prompt.
    pub n_choices: usize,
    pub with_logprobs: bool,
    with_usage: bool,
    /// Prompts that are given back, by number; empty where they are not.
    pub echoes: Vec<String>,
    /// Characters of each answer that were streamed.
    offsets: Vec<AtomicUsize>,
}

impl Answers {
    /// Reads what a request says about the form of its answers to so many prompts.
    pub fn new(app: &Arc<App>, kind: Kind, form: &Form, n_prompts: usize) -> Answered<Answers> {
        let n = form.n.map_or(1, |n| n.0);
        if form.best_of.is_some_and(|best_of| best_of.0 != n) {
            let words = "is not `n`; every answer that is made is given out: ask for `n` of them";
            return Err(ApiError::field("best_of", words));
        }
        let usage = form.stream_options.as_ref().and_then(|options| options.include_usage);
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        Ok(Answers {
            app: app.clone(),
            kind,
            id: app.answer_id(prefix),
            created_s: now_s(),
            model: String::new(),
            n_choices: n as usize,
            with_logprobs: false,
            with_usage: usage == Some(true),
            echoes: Vec::new(),
            offsets: (0..n_prompts * n as usize).map(|_| AtomicUsize::new(0)).collect(),
        })
    }

    fn echo(&self, idx: usize) -> &str {
        self.echoes.get(idx / self.n_choices).map_or("", String::as_str)
    }

    fn object(&self, suffix: &str, choices: Vec<Value>) -> Value {
        let object = match self.kind {
            Kind::Completion => "text_completion".to_string(),
            Kind::Chat => format!("chat.completion{suffix}"),
        };
        json!({
            "id": self.id, "object": object, "created": self.created_s, "model": self.model,
            "choices": choices,
        })
    }

    /// Of tokens of which the first begins at `offset`, where they are asked for.
    fn logprobs(&self, tokens: &[Token], offset: usize) -> Option<Value> {
        let tokenizer = &self.app.tokenizer;
        self.with_logprobs.then(|| match self.kind {
            Kind::Completion => of_completion(tokenizer, tokens, offset),
            Kind::Chat => of_chat(tokenizer, tokens),
        })
    }

    /// A piece of a stream.
    fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.object(".chunk", vec![choice]);
        if self.with_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// What the answers took. Answers to one prompt share its tokens.
    fn usage(&self, ends: &[&End]) -> Value {
        let first_of_each = || ends.iter().step_by(self.n_choices);
        let n_prompt: usize = first_of_each().map(|end| end.n_prompt).sum();
        let n_cached: usize = first_of_each().map(|end| end.n_cached).sum();
        let n_tok: usize = ends.iter().map(|end| end.n_tok).sum();
        json!({
            "prompt_tokens": n_prompt, "completion_tokens": n_tok,
            "total_tokens": n_prompt + n_tok, "prompt_tokens_details": {"cached_tokens": n_cached},
        })
    }
}

impl Shape for Answers {
    fn whole(&self, answers: &[Answer]) -> Value {
        let of_answer = |(idx, answer): (usize, &Answer)| {
            let content = match self.kind {
                Kind::Completion => ("text", json!(format!("{}{}", self.echo(idx), answer.text))),
                Kind::Chat => {
                    let content = &answer.text;
                    ("message", json!({"role": "assistant", "content": content, "refusal": null}))
                }
            };
            choice(
                idx,
                content,
                self.logprobs(&answer.tokens, 0),
                Some(answer.end.stop.finish_reason()),
            )
        };
        let mut object = self.object("", answers.iter().enumerate().map(of_answer).collect());
        let ends: Vec<&End> = answers.iter().map(|answer| &answer.end).collect();
        object["usage"] = self.usage(&ends);
        if let [end] = &ends[..] {
            object["timings"] = end.timings();
        }
        object
    }

    fn first(&self, idx: usize) -> Option<Value> {
        let content = match (self.kind, self.echo(idx)) {
            (Kind::Chat, _) => ("delta", json!({"role": "assistant", "content": ""})),
            (Kind::Completion, "") => return None,
            (Kind::Completion, text) => ("text", json!(text)),
        };
        Some(self.chunk(choice(idx, content, None, None)))
    }

    fn piece(&self, idx: usize, piece: &Piece) -> Value {
        let n_chars = piece.text.chars().count();
        let offset = self.offsets[idx].fetch_add(n_chars, Ordering::Relaxed);
        let content = match self.kind {
            Kind::Completion => ("text", json!(piece.text)),
            Kind::Chat => ("delta", json!({"content": piece.text})),
        };
        self.chunk(choice(idx, content, self.logprobs(&piece.tokens, offset), None))
    }

    fn last(&self, idx: usize, end: &End) -> Value {
        let content = match self.kind {
            Kind::Completion => ("text", json!("")),
            Kind::Chat => ("delta", json!({})),
        };
        let reason = Some(end.stop.finish_reason());
        let mut chunk = self.chunk(choice(idx, content, None, reason));
        chunk["timings"] = end.timings();
        chunk
    }

    fn after(&self, ends: Vec<End>) -> Vec<Event> {
        let mut events = Vec::new();
        if self.with_usage {
            let mut object = self.object(".chunk", Vec::new());
            object["usage"] = self.usage(&ends.iter().collect::<Vec<_>>());
            events.push(event(object));
        }
        events.push(Event::default().data("[DONE]"));
        events
    }

    fn shows_tokens(&self) -> bool {
        self.with_logprobs
    }
}

/// One choice; `key` is what holds its content.
fn choice(
    idx: usize,
    (key, content): (&str, Value),
    logprobs: Option<Value>,
    reason: Option<&str>,
) -> Value {
    json!({key: content, "index": idx, "logprobs": logprobs, "finish_reason": reason})
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { NEVER }
}

/// The bytes of a token, and as text.
fn spelled(tokenizer: &Tokenizer, id: u32) -> (Vec<u8>, String) {
    let bytes = tokenizer.bytes(id).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    (bytes, text)
}

/// `logprobs` of a completion; `offset` is where its first token begins, in characters.
fn of_completion(tokenizer: &Tokenizer, tokens: &[Token], mut offset: usize) -> Value {
    let (mut texts, mut own, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in tokens {
        let (_, text) = spelled(tokenizer, token.id);
        offsets.push(offset);
        offset += text.chars().count();
        texts.push(text);
        own.push(finite(token.logprob));
        let top = token.top.iter();
        let top = top.map(|&(id, logprob)| (spelled(tokenizer, id).1, json!(finite(logprob))));
        tops.push(top.collect::<Map<_, _>>());
    }
    json!({
        "tokens": texts, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets,
    })
}

/// `logprobs` of a chat.
fn of_chat(tokenizer: &Tokenizer, tokens: &[Token]) -> Value {
    let entry = |id: u32, logprob: f32| {
        let (bytes, text) = spelled(tokenizer, id);
        json!({"token": text, "logprob": finite(logprob), "bytes": bytes})
    };
    let content = tokens.iter().map(|token| {
        let mut item = entry(token.id, token.logprob);
        let top = token.top.iter().map(|&(id, logprob)| entry(id, logprob));
        item["top_logprobs"] = top.collect();
        item
    });
    json!({"content": content.collect::<Vec<_>>(), "refusal": null})
}
