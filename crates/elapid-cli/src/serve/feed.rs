//! The answer to one request as it grows.
//!
//! A `Feed` takes what the worker says of a request and gives out text that is certain. It adds
//! the endings that only a server has (`ending.rs`): a line indented too little, time that is
//! over, the beginning of what follows the hole anyway. It measures how long things took.

use super::ending::Ending;
use super::error::{Answered, ApiError};
use elapid::{Event, Finish, Reason, Request, Token};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedReceiver;

/// Something that happened to a request, and when.
pub struct Note {
    /// When it was known.
    pub at: Instant,
    /// What it was.
    pub what: What,
}

/// What happened.
pub enum What {
    /// The engine turned to it.
    Begun,
    /// The engine says so.
    Event(Event),
    /// Its time is over.
    Late,
    /// The engine broke, in words.
    Broken(String),
}

/// Some of an answer.
#[derive(Default)]
pub struct Piece {
    /// Text that is certain.
    pub text: String,
    /// Tokens that came.
    pub tokens: Vec<Token>,
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
    /// Why.
    pub stop: Stop,
    /// Tokens of the prompt, and those of them that came from a snapshot.
    pub n_prompt: usize,
    /// Prompt tokens from a snapshot.
    pub n_cached: usize,
    /// Tokens of the answer.
    pub n_tok: usize,
    /// Tokens that were guessed, and how many were right.
    pub n_guessed: usize,
    /// Guesses that were right.
    pub n_accepted: usize,
    /// For the prompt.
    pub prompt_time: Duration,
    /// For the answer.
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
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<Token>,
    /// How it ended.
    pub end: End,
}

/// An answer that grows.
pub struct Feed {
    notes: UnboundedReceiver<Note>,
    ending: Ending,
    end: Option<End>,
    n_prompt: usize,
    n_cached: usize,
    n_tok: usize,
    begun: Option<Instant>,
    /// When the prompt was read.
    read: Option<Instant>,
    last: Option<Instant>,
}

impl Feed {
    /// The feed of a request that is handed in.
    pub fn new(notes: UnboundedReceiver<Note>, request: &Request) -> Feed {
        Feed {
            notes,
            ending: Ending::default(),
            end: None,
            n_prompt: request.prompt.len(),
            n_cached: 0,
            n_tok: 0,
            begun: None,
            read: None,
            last: None,
        }
    }

    /// The same with endings of the server's own.
    pub fn ending(self, ending: Ending) -> Feed {
        Feed { ending, ..self }
    }

    /// How it ended, once it has.
    pub fn end(&self) -> Option<&End> {
        self.end.as_ref()
    }

    /// The next of it; nothing once it has ended.
    pub async fn next(&mut self) -> Answered<Option<Piece>> {
        while self.end.is_none() {
            let note = self.notes.recv().await;
            let note = note.ok_or_else(|| ApiError::internal("the engine has ended"))?;
            self.last = Some(note.at);
            match note.what {
                What::Begun => self.begun = Some(note.at),
                What::Late => return Err(ApiError::late()),
                What::Broken(words) => return Err(ApiError::internal(words)),
                What::Event(Event::Prompt { n_cached, .. }) => {
                    self.n_cached = n_cached;
                    self.read = Some(note.at);
                }
                What::Event(Event::Token(token)) => return Ok(Some(self.token(token, note.at))),
                What::Event(Event::Done(finish)) => return self.done(finish).map(Some),
            }
        }
        Ok(None)
    }

    fn token(&mut self, token: Token, at: Instant) -> Piece {
        self.n_tok += 1;
        let time = at - self.read.unwrap_or(at);
        let given = self.ending.push(&token.text, time);
        if let Some(stop) = given.stop {
            self.notes.close();
            self.end = Some(self.ended(stop));
        }
        Piece { text: given.text, tokens: vec![token] }
    }

    fn done(&mut self, finish: Finish) -> Answered<Piece> {
        let stop = match finish.reason {
            Reason::End => Stop::End,
            Reason::StopText(word) => Stop::Word(word),
            Reason::Length | Reason::Cancelled => Stop::Limit,
            Reason::Failed(words) => {
                return Err(ApiError::internal(words.replace("\n\nhint: ", "; ")));
            }
        };
        let given = self.ending.finish(&finish.text);
        self.n_cached = finish.n_cached;
        let end = self.ended(given.stop.unwrap_or(stop));
        let (n_guessed, n_accepted) = (finish.n_guessed, finish.n_accepted);
        self.end = Some(End { n_guessed, n_accepted, ..end });
        Ok(Piece { text: given.text, tokens: Vec::new() })
    }

    fn ended(&self, stop: Stop) -> End {
        let last = self.last.unwrap_or_else(Instant::now);
        let begun = self.begun.unwrap_or(last);
        let read = self.read.unwrap_or(begun);
        End {
            stop,
            n_prompt: self.n_prompt,
            n_cached: self.n_cached,
            n_tok: self.n_tok,
            n_guessed: 0,
            n_accepted: 0,
            prompt_time: read - begun,
            answer_time: last - read,
        }
    }

    /// All of it.
    pub async fn whole(mut self) -> Answered<Answer> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        while let Some(piece) = self.next().await? {
            text.push_str(&piece.text);
            tokens.extend(piece.tokens);
        }
        let end = self.end.expect("a feed that gives no more has ended");
        Ok(Answer { text, tokens, end })
    }
}
