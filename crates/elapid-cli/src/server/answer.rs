//! Answers as they grow, and the HTTP response that they become: one JSON object, or a stream.
//!
//! A stream is `text/event-stream`, with a comment while nothing happens, so that nobody in between
//! thinks the connection dead; Ollama's is a line for each object. An error after the first byte
//! can only be said in the stream.
//!
//! A client that stops reading drops `Growing`, which ends its requests.

use super::error::{Answered, ApiError, Dialect};
use super::params::Mode;
use axum::Json;
use axum::body::Body;
use axum::http::header;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use elapid::{Finish, Reason, Token, Tokenizer};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc::{self, Sender, UnboundedReceiver};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// Silence after which a comment is sent.
const SILENCE: Duration = Duration::from_secs(5);

/// Some of an answer, or all of it.
#[derive(Default)]
pub struct Piece {
    /// Text that is certain.
    pub text: String,
    pub tokens: Vec<Token>,
}

impl Piece {
    fn extend(&mut self, more: Piece) {
        self.text.push_str(&more.text);
        self.tokens.extend(more.tokens);
    }
}

/// How an answer ended, and what it took.
#[derive(Clone, Debug)]
pub struct End {
    pub finish: Finish,
    pub prompt_time: Duration,
    pub answer_time: Duration,
}

impl End {
    /// As OpenAI says it of an answer with so many calls.
    pub fn finish_reason(&self, n_calls: usize) -> &'static str {
        match self.finish.reason {
            Reason::End | Reason::StopText(_) if n_calls > 0 => "tool_calls",
            Reason::End | Reason::StopText(_) => "stop",
            _ => "length",
        }
    }

    /// As llama.cpp tells it.
    pub fn timings(&self) -> Value {
        let rate = |n: usize, time: Duration| {
            let ms = 1e3 * time.as_secs_f64();
            let per_token = if n > 0 { ms / n as f64 } else { 0.0 };
            let per_second = if ms > 0.0 { 1e3 * n as f64 / ms } else { 0.0 };
            (ms, per_token, per_second)
        };
        let Finish { n_prompt, n_cached, n_tok, n_guessed, n_accepted, .. } = self.finish;
        let n_read = n_prompt.saturating_sub(n_cached);
        let (prompt_ms, prompt_per_token_ms, prompt_per_second) = rate(n_read, self.prompt_time);
        let (ms, per_token_ms, per_second) = rate(n_tok, self.answer_time);
        let mut timings = json!({
            "cache_n": n_cached, "prompt_n": n_read, "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_per_token_ms, "prompt_per_second": prompt_per_second,
            "predicted_n": n_tok, "predicted_ms": ms,
            "predicted_per_token_ms": per_token_ms, "predicted_per_second": per_second,
        });
        if n_guessed > 0 {
            timings["draft_n"] = json!(n_guessed);
            timings["draft_n_accepted"] = json!(n_accepted);
        }
        timings
    }
}

/// What comes of an answer: text and tokens, with the last of them how it ended.
pub type Grown = Answered<(Piece, Option<End>)>;

/// The answers to one HTTP request while they grow.
pub struct Growing {
    pub pieces: UnboundedReceiver<(usize, Grown)>,
    pub n_answers: usize,
    pub n_ended: usize,
}

impl Growing {
    /// The next piece, and the number of its answer; nothing once all have ended.
    async fn next(&mut self) -> Answered<Option<(usize, Piece, Option<End>)>> {
        if self.n_ended == self.n_answers {
            return Ok(None);
        }
        let next = self.pieces.recv().await;
        let (idx, grown) = next.ok_or_else(|| ApiError::unavailable("the engine has ended"))?;
        let (piece, end) = grown?;
        self.n_ended += usize::from(end.is_some());
        Ok(Some((idx, piece, end)))
    }

    pub async fn whole(mut self) -> Answered<Vec<(Piece, End)>> {
        let mut all: Vec<(Piece, Option<End>)> = Vec::new();
        all.resize_with(self.n_answers, Default::default);
        while let Some((idx, piece, end)) = self.next().await? {
            all[idx].0.extend(piece);
            all[idx].1 = end;
        }
        let ended = all.into_iter().map(|(piece, end)| Some((piece, end?)));
        ended.collect::<Option<_>>().ok_or_else(|| ApiError::internal("an answer has no end"))
    }
}

/// How objects of a stream are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    /// `data: {...}`.
    Events,
    /// The same with `event:` and the object's `type`.
    Named,
    /// A line each.
    Lines,
}

/// What answers look like on a route.
pub trait Shape: Send + 'static {
    fn whole(&mut self, answers: &[(Piece, End)]) -> Value;
    /// What goes before the first piece of an answer.
    fn first(&mut self, _idx: usize) -> Vec<Value> {
        Vec::new()
    }
    fn piece(&mut self, idx: usize, piece: &Piece) -> Vec<Value>;
    fn last(&mut self, idx: usize, end: &End) -> Vec<Value>;
    /// What goes after all answers: objects, or a word.
    fn after(&mut self, _ends: &[End]) -> Vec<Value> {
        Vec::new()
    }
    /// Whether tokens are reported, and not their text alone.
    fn shows_tokens(&self) -> bool {
        false
    }
    fn wire(&self) -> Wire {
        Wire::Events
    }
    fn error(&self, error: &ApiError) -> Value {
        error.json(Dialect::Openai)
    }
}

pub async fn respond(mode: Mode, growing: Growing, mut shape: impl Shape) -> Answered<Response> {
    if mode == Mode::Whole {
        return Ok(Json(shape.whole(&growing.whole().await?)).into_response());
    }
    let (sender, receiver) = mpsc::channel(32);
    let wire = shape.wire();
    tokio::spawn(async move {
        if let Err(error) = drive(growing, &mut shape, &sender).await {
            // A client that has gone away need not be told.
            let _ = sender.send(shape.error(&error)).await;
        }
    });
    let values = ReceiverStream::new(receiver);
    if wire == Wire::Lines {
        let lines = values.map(|value| Ok::<_, Infallible>(format!("{value}\n")));
        let kind = [(header::CONTENT_TYPE, "application/x-ndjson")];
        return Ok((kind, Body::from_stream(lines)).into_response());
    }
    let events = values.map(move |value| Ok::<_, Infallible>(event(&value, wire)));
    let alive = KeepAlive::new().interval(SILENCE).text("still here");
    Ok(Sse::new(events).keep_alive(alive).into_response())
}

/// Sends all pieces, those of each answer in their order.
async fn drive(
    mut growing: Growing,
    shape: &mut impl Shape,
    sender: &Sender<Value>,
) -> Answered<()> {
    // Where nobody listens any more there is no use in going further.
    let send = async |values: Vec<Value>| {
        for value in values {
            let sent = sender.send(value).await;
            sent.map_err(|_| ApiError::internal("the client has gone"))?;
        }
        Ok(())
    };
    // Text that is not certain yet comes with a later token.
    let mut pending: Vec<Piece> = Vec::new();
    pending.resize_with(growing.n_answers, Piece::default);
    for idx in 0..growing.n_answers {
        send(shape.first(idx)).await?;
    }
    let mut ends = vec![None; growing.n_answers];
    loop {
        let next = tokio::select! {
            () = sender.closed() => return Ok(()),
            next = growing.next() => next?,
        };
        let Some((idx, piece, end)) = next else { break };
        let pending = &mut pending[idx];
        pending.extend(piece);
        if !pending.text.is_empty() || shape.shows_tokens() && !pending.tokens.is_empty() {
            send(shape.piece(idx, &std::mem::take(pending))).await?;
        }
        if let Some(end) = end {
            send(shape.last(idx, &end)).await?;
            ends[idx] = Some(end);
        }
    }
    send(shape.after(&ends.into_iter().flatten().collect::<Vec<_>>())).await
}

/// Tokens with their log probabilities and those of the likeliest, as llama.cpp and chats of OpenAI
/// have them. JSON has no minus infinity: `never` stands for it.
pub fn probabilities(tokenizer: &Tokenizer, tokens: &[Token], never: f32) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.bytes(id).unwrap_or_default();
        let logprob = if logprob.is_finite() { logprob } else { never };
        let text = String::from_utf8_lossy(&bytes);
        json!({"id": id, "token": text, "bytes": bytes, "logprob": logprob})
    };
    let item = |token: &Token| {
        let mut item = entry(token.id, token.logprob);
        item["top_logprobs"] = token.top.iter().map(|&(id, logprob)| entry(id, logprob)).collect();
        item
    };
    tokens.iter().map(item).collect()
}

fn event(value: &Value, wire: Wire) -> Event {
    let event = match wire {
        Wire::Named => Event::default().event(value["type"].as_str().unwrap_or("message")),
        _ => Event::default(),
    };
    // A word stands as it is: `[DONE]`.
    event.data(value.as_str().map_or_else(|| value.to_string(), str::to_string))
}
