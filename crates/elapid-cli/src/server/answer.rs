//! Answers as they grow, and the HTTP response that they become: one JSON object, or a stream.
//!
//! A stream is `text/event-stream`, with a comment while nothing happens, so that nobody in between
//! thinks the connection dead. An error after the first byte can only be said in the stream.
//!
//! A client that stops reading drops `Growing`, which ends its requests.

use super::error::{Answered, ApiError};
use super::params::Mode;
use axum::Json;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use elapid::Token;
use serde_json::{Value, json};
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::mpsc::{self, Sender, UnboundedReceiver};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

/// Silence after which a comment is sent.
const SILENCE: Duration = Duration::from_secs(5);

/// Some of an answer.
#[derive(Default)]
pub struct Piece {
    /// Text that is certain.
    pub text: String,
    pub tokens: Vec<Token>,
    /// How it ended, with the last piece.
    pub end: Option<End>,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Stop {
    /// The model was done.
    End,
    /// This text was to end it.
    Word(String),
    /// Tokens, time or context.
    Limit,
}

impl Stop {
    /// As OpenAI says it.
    pub fn finish_reason(&self) -> &'static str {
        match self {
            Stop::End | Stop::Word(_) => "stop",
            Stop::Limit => "length",
        }
    }

    /// As llama.cpp says it, with the text that ended it.
    pub fn stop_type(&self) -> (&'static str, &str) {
        match self {
            Stop::End => ("eos", ""),
            Stop::Word(word) => ("word", word),
            Stop::Limit => ("limit", ""),
        }
    }
}

/// How an answer ended, and what it took.
#[derive(Clone, Debug)]
pub struct End {
    pub stop: Stop,
    pub n_prompt: usize,
    /// Prompt tokens from a snapshot.
    pub n_cached: usize,
    pub n_tok: usize,
    /// Tokens that were guessed, and how many were right.
    pub n_guessed: usize,
    pub n_accepted: usize,
    pub prompt_time: Duration,
    pub answer_time: Duration,
}

impl End {
    /// As llama.cpp tells it.
    pub fn timings(&self) -> Value {
        let rate = |n: usize, time: Duration| {
            let ms = 1e3 * time.as_secs_f64();
            let per_token = if n > 0 { ms / n as f64 } else { 0.0 };
            let per_second = if ms > 0.0 { 1e3 * n as f64 / ms } else { 0.0 };
            (ms, per_token, per_second)
        };
        let n_read = self.n_prompt.saturating_sub(self.n_cached);
        let (prompt_ms, prompt_per_token_ms, prompt_per_second) = rate(n_read, self.prompt_time);
        let (ms, per_token_ms, per_second) = rate(self.n_tok, self.answer_time);
        let mut timings = json!({
            "cache_n": self.n_cached, "prompt_n": n_read, "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_per_token_ms, "prompt_per_second": prompt_per_second,
            "predicted_n": self.n_tok, "predicted_ms": ms,
            "predicted_per_token_ms": per_token_ms, "predicted_per_second": per_second,
        });
        if self.n_guessed > 0 {
            timings["draft_n"] = json!(self.n_guessed);
            timings["draft_n_accepted"] = json!(self.n_accepted);
        }
        timings
    }
}

/// A whole answer.
pub struct Answer {
    pub text: String,
    pub tokens: Vec<Token>,
    pub end: End,
}

/// The answers to one HTTP request while they grow.
pub struct Growing {
    pub pieces: UnboundedReceiver<(usize, Answered<Piece>)>,
    pub n_answers: usize,
    pub n_ended: usize,
}

impl Growing {
    /// The next piece, and the number of its answer; nothing once all have ended.
    async fn next(&mut self) -> Answered<Option<(usize, Piece)>> {
        if self.n_ended == self.n_answers {
            return Ok(None);
        }
        let next = self.pieces.recv().await;
        let (idx, piece) = next.ok_or_else(|| ApiError::unavailable("the engine has ended"))?;
        let piece = piece?;
        self.n_ended += usize::from(piece.end.is_some());
        Ok(Some((idx, piece)))
    }

    /// All of them.
    pub async fn whole(mut self) -> Answered<Vec<Answer>> {
        let mut all: Vec<Piece> = (0..self.n_answers).map(|_| Piece::default()).collect();
        while let Some((idx, piece)) = self.next().await? {
            all[idx].text.push_str(&piece.text);
            all[idx].tokens.extend(piece.tokens);
            all[idx].end = piece.end;
        }
        let answer = |Piece { text, tokens, end }| {
            let end = end.ok_or_else(|| ApiError::internal("an answer has no end"))?;
            Ok(Answer { text, tokens, end })
        };
        all.into_iter().map(answer).collect()
    }
}

/// What answers look like on a route.
pub trait Shape: Send + Sync + 'static {
    /// All answers as one object.
    fn whole(&self, answers: &[Answer]) -> Value;
    /// What goes before the first piece of an answer.
    fn first(&self, _idx: usize) -> Option<Value> {
        None
    }
    /// A piece of an answer.
    fn piece(&self, idx: usize, piece: &Piece) -> Value;
    /// The end of an answer.
    fn last(&self, idx: usize, end: &End) -> Value;
    /// What goes after all answers: objects, or a word.
    fn after(&self, _ends: Vec<End>) -> Vec<Event> {
        Vec::new()
    }
    /// Whether tokens are reported, and not their text alone.
    fn shows_tokens(&self) -> bool;
}

/// The response made of these answers.
pub async fn respond(mode: Mode, growing: Growing, shape: impl Shape) -> Answered<Response> {
    if mode == Mode::Whole {
        return Ok(Json(shape.whole(&growing.whole().await?)).into_response());
    }
    let (sender, receiver) = mpsc::channel(32);
    tokio::spawn(async move {
        if let Err(error) = drive(growing, shape, &sender).await {
            // A client that has gone away need not be told.
            let _ = sender.send(event(error.json())).await;
        }
    });
    let events = ReceiverStream::new(receiver).map(Ok::<_, Infallible>);
    let alive = KeepAlive::new().interval(SILENCE).text("still here");
    Ok(Sse::new(events).keep_alive(alive).into_response())
}

/// Sends all pieces, those of each answer in their order.
async fn drive(mut growing: Growing, shape: impl Shape, sender: &Sender<Event>) -> Answered<()> {
    // Where nobody listens any more there is no use in going further.
    let send = async |value: Value| {
        sender.send(event(value)).await.map_err(|_| ApiError::internal("the client has gone"))
    };
    // Text that is not certain yet comes with a later token.
    let mut pending: Vec<Piece> = (0..growing.n_answers).map(|_| Piece::default()).collect();
    for first in (0..growing.n_answers).filter_map(|idx| shape.first(idx)) {
        send(first).await?;
    }
    let mut ends = vec![None; growing.n_answers];
    loop {
        let next = tokio::select! {
            () = sender.closed() => return Ok(()),
            next = growing.next() => next?,
        };
        let Some((idx, piece)) = next else { break };
        let pending = &mut pending[idx];
        pending.text.push_str(&piece.text);
        pending.tokens.extend(piece.tokens);
        if !pending.text.is_empty() || shape.shows_tokens() && !pending.tokens.is_empty() {
            send(shape.piece(idx, &std::mem::take(pending))).await?;
        }
        if let Some(end) = piece.end {
            send(shape.last(idx, &end)).await?;
            ends[idx] = Some(end);
        }
    }
    for event in shape.after(ends.into_iter().flatten().collect()) {
        // As above.
        let _ = sender.send(event).await;
    }
    Ok(())
}

/// An event of a stream.
pub fn event(value: Value) -> Event {
    Event::default().data(value.to_string())
}
