//! What answers of `/v1/completions` and `/v1/chat/completions` look like.

use crate::server::answer::{End, Piece, Shape, event, probabilities, respond};
use crate::server::body::{Body, Int};
use crate::server::ending::Ending;
use crate::server::error::{Answered, ApiError};
use crate::server::params::Params;
use crate::server::{App, now_s};
use axum::response::Response;
use axum::response::sse::Event;
use elapid::{Token, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// JSON has no minus infinity; OpenAI writes this.
const NEVER: f32 = -9999.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Completion,
    Chat,
}

/// Fields of a body about the form of its answers.
#[derive(Deserialize)]
struct Form {
    n: Option<Int<1, 8>>,
    best_of: Option<Int<1, 8>>,
    stream_options: Option<StreamOptions>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

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
    pub fn new(app: &Arc<App>, kind: Kind, body: &Body, n_prompts: usize) -> Answered<Answers> {
        let form: Form = body.read()?;
        let n = form.n.map_or(1, |n| n.0);
        if form.best_of.is_some_and(|best_of| best_of.0 != n) {
            let words = "is not `n`; every answer that is made is given out: ask for `n` of them";
            return Err(ApiError::field("best_of", words));
        }
        let usage = form.stream_options.and_then(|options| options.include_usage);
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
            Kind::Chat => {
                json!({"content": probabilities(tokenizer, tokens, NEVER), "refusal": null})
            }
        })
    }

    /// One choice: the text of a completion, or a message of a chat under its key.
    fn choice(
        &self,
        idx: usize,
        text: &str,
        (key, message): (&str, Value),
        (logprobs, reason): (Option<Value>, Option<&str>),
    ) -> Value {
        let (key, content) = match self.kind {
            Kind::Completion => ("text", json!(text)),
            Kind::Chat => (key, message),
        };
        json!({key: content, "index": idx, "logprobs": logprobs, "finish_reason": reason})
    }

    fn chunk(
        &self,
        idx: usize,
        text: &str,
        delta: Value,
        facts: (Option<Value>, Option<&str>),
    ) -> Value {
        let choice = self.choice(idx, text, ("delta", delta), facts);
        let mut chunk = self.object(".chunk", vec![choice]);
        if self.with_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// What the answers took. Answers to one prompt share its tokens.
    fn usage<'a>(&self, ends: impl Iterator<Item = &'a End> + Clone) -> Value {
        let first_of_each = || ends.clone().step_by(self.n_choices);
        let n_prompt: usize = first_of_each().map(|end| end.finish.n_prompt).sum();
        let n_cached: usize = first_of_each().map(|end| end.finish.n_cached).sum();
        let n_tok: usize = ends.clone().map(|end| end.finish.n_tok).sum();
        json!({
            "prompt_tokens": n_prompt, "completion_tokens": n_tok,
            "total_tokens": n_prompt + n_tok, "prompt_tokens_details": {"cached_tokens": n_cached},
        })
    }

    /// Hands in as many requests for each prompt as choices are asked for, and responds.
    pub async fn respond(
        self,
        params: &Params,
        prompts: &[(Vec<u32>, usize)],
    ) -> Answered<Response> {
        let requests = prompts.iter().flat_map(|(ids, n_max)| {
            let choice = |choice| (params.request(ids.clone(), *n_max, choice), Ending::default());
            (0..self.n_choices).map(choice)
        });
        let growing = self.app.worker.submit(requests.collect()).await?;
        respond(params.mode, growing, self).await
    }
}

impl Shape for Answers {
    fn whole(&self, answers: &[(Piece, End)]) -> Value {
        let of_answer = |(idx, (answer, end)): (usize, &(Piece, End))| {
            let text = format!("{}{}", self.echo(idx), answer.text);
            let message = json!({"role": "assistant", "content": answer.text, "refusal": null});
            let facts = (self.logprobs(&answer.tokens, 0), Some(end.finish_reason()));
            self.choice(idx, &text, ("message", message), facts)
        };
        let mut object = self.object("", answers.iter().enumerate().map(of_answer).collect());
        object["usage"] = self.usage(answers.iter().map(|(_, end)| end));
        if let [(_, end)] = answers {
            object["timings"] = end.timings();
        }
        object
    }

    fn first(&self, idx: usize) -> Option<Value> {
        let text = self.echo(idx);
        let delta = json!({"role": "assistant", "content": ""});
        let is_empty = self.kind == Kind::Completion && text.is_empty();
        (!is_empty).then(|| self.chunk(idx, text, delta, (None, None)))
    }

    fn piece(&self, idx: usize, piece: &Piece) -> Value {
        let n_chars = piece.text.chars().count();
        let offset = self.offsets[idx].fetch_add(n_chars, Ordering::Relaxed);
        let facts = (self.logprobs(&piece.tokens, offset), None);
        self.chunk(idx, &piece.text, json!({"content": piece.text}), facts)
    }

    fn last(&self, idx: usize, end: &End) -> Value {
        let mut chunk = self.chunk(idx, "", json!({}), (None, Some(end.finish_reason())));
        chunk["timings"] = end.timings();
        chunk
    }

    fn after(&self, ends: &[End]) -> Vec<Event> {
        let mut events = Vec::new();
        if self.with_usage {
            let mut object = self.object(".chunk", Vec::new());
            object["usage"] = self.usage(ends.iter());
            events.push(event(object));
        }
        events.push(Event::default().data("[DONE]"));
        events
    }

    fn shows_tokens(&self) -> bool {
        self.with_logprobs
    }
}

/// `logprobs` of a completion; `offset` is where its first token begins, in characters.
fn of_completion(tokenizer: &Tokenizer, tokens: &[Token], mut offset: usize) -> Value {
    let spelled =
        |id: u32| String::from_utf8_lossy(&tokenizer.bytes(id).unwrap_or_default()).into_owned();
    let finite = |logprob: f32| if logprob.is_finite() { logprob } else { NEVER };
    let (mut texts, mut own, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in tokens {
        let text = spelled(token.id);
        offsets.push(offset);
        offset += text.chars().count();
        texts.push(text);
        own.push(finite(token.logprob));
        let top = token.top.iter();
        let top = top.map(|&(id, logprob)| (spelled(id), json!(finite(logprob))));
        tops.push(top.collect::<Map<_, _>>());
    }
    json!({
        "tokens": texts, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets,
    })
}
