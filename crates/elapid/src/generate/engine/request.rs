//! What is asked of an engine, and what it answers.

use crate::error::Error;
use crate::generate::sample::Sampling;
use crate::text::tokenizer::Special;
use std::sync::Arc;

/// How an engine works.
#[derive(Clone, Debug)]
pub struct EngineSettings {
    /// Sequences that advance side by side.
    pub n_slots: usize,
    /// Requests that may wait for a slot; past them `submit` refuses with `Refusal::Full`.
    pub n_waiting_max: usize,
    /// Tokens of prompt and answer together, at most.
    pub context: usize,
    /// Bytes that snapshots of prompts may take.
    pub snapshot_bytes_max: usize,
}

/// What is asked of a model.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt; at least one token.
    pub prompt: Vec<u32>,
    /// Tokens at most; zero reads the prompt, keeps its snapshots and ends.
    pub n_max: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Added to the logits of these tokens; minus infinity forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that end the answer and are not part of it.
    pub stop_tokens: Vec<u32>,
    /// Texts that end a repetition for DRY.
    pub dry_breakers: Vec<String>,
    /// Texts that end the answer; no part of them is ever given out.
    pub stop_texts: Vec<String>,
    /// What the answer must look like.
    pub constraint: Option<Constraint>,
    /// Adapters by their number, each with the factor of its scale.
    pub adapters: Vec<(usize, f32)>,
    /// How many of the likeliest tokens are reported with each token.
    pub n_top: usize,
    /// Tokens that are guessed from the prompt and checked in one pass; zero for none.
    pub n_lookup: usize,
    /// Whether special tokens show in the text.
    pub special: Special,
    /// Whether the tokens of the prompt are scored (`Event::Prompt`); then it is read whole, even
    /// where a snapshot is there.
    pub scores_prompt: bool,
}

impl Default for Request {
    /// An empty prompt, 256 tokens, the default sampling.
    fn default() -> Request {
        Request {
            prompt: Vec::new(),
            n_max: 256,
            sampling: Sampling::default(),
            logit_bias: Vec::new(),
            stop_tokens: Vec::new(),
            dry_breakers: ["\n", ":", "\"", "*"].map(String::from).to_vec(),
            stop_texts: Vec::new(),
            constraint: None,
            adapters: Vec::new(),
            n_top: 0,
            n_lookup: 0,
            special: Special::Plain,
            scores_prompt: false,
        }
    }
}

impl Request {
    /// At most this many tokens.
    pub fn max_tokens(self, n_max: usize) -> Request {
        Request { n_max, ..self }
    }

    /// Zero always takes the likeliest token.
    pub fn temperature(mut self, temperature: f32) -> Request {
        self.sampling.temperature = temperature;
        self
    }

    /// The same seed gives the same answer.
    pub fn seed(mut self, seed: u64) -> Request {
        self.sampling.seed = seed;
        self
    }

    /// Ends the answer before this text.
    pub fn stop(mut self, text: impl Into<String>) -> Request {
        self.stop_texts.push(text.into());
        self
    }

    /// What the answer must look like.
    pub fn constraint(self, constraint: Constraint) -> Request {
        Request { constraint: Some(constraint), ..self }
    }
}

/// What an answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// JSON that this schema allows.
    JsonSchema(serde_json::Value),
    /// A text that this regular expression matches whole.
    Regex(String),
    /// A text of this grammar, in the dialect of Lark that llguidance reads.
    Lark(String),
}

/// A request that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Why a request was not taken.
#[derive(Debug)]
pub enum Refusal {
    /// Too many are waiting: come again later.
    Full,
    /// It can never be answered.
    Bad(Error),
}

/// What happened to a request.
#[derive(Clone, Debug)]
pub enum Event {
    /// Some of the prompt was read.
    Prompt {
        /// Tokens of the prompt so far.
        n_done: usize,
        /// Of which came from a snapshot.
        n_cached: usize,
        /// The tokens that were read, without text, if they are scored. The first of a prompt has
        /// a logarithm that is not a number.
        scored: Vec<Token>,
    },
    /// A token came.
    Token(Token),
    /// It is over; nothing more will come.
    Done(Finish),
}

/// One token of an answer.
#[derive(Clone, Debug)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Text that is certain now; may be empty, and belong to tokens before.
    pub text: String,
    /// Logarithm of its probability before temperature and cuts.
    pub logprob: f32,
    /// The likeliest tokens and theirs, if asked for.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Debug)]
pub enum Reason {
    /// A token that ends a text, or the end of what a constraint allows.
    End,
    /// This text of `stop_texts`.
    StopText(String),
    /// As many tokens as were asked for, or as the context holds.
    Length,
    /// `cancel`.
    Cancelled,
    /// Something failed: for this request alone, unless it is `Error::DeviceLost`.
    Failed(Arc<Error>),
}

impl PartialEq for Reason {
    fn eq(&self, other: &Reason) -> bool {
        match (self, other) {
            (Reason::StopText(a), Reason::StopText(b)) => a == b,
            (Reason::Failed(a), Reason::Failed(b)) => a.to_string() == b.to_string(),
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }
}

/// How a request ended.
#[derive(Clone, Debug)]
pub struct Finish {
    /// Why.
    pub reason: Reason,
    /// Text that was held back and turned out to be part of the answer.
    pub text: String,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Of which came from a snapshot.
    pub n_cached: usize,
    /// Tokens of the answer.
    pub n_tok: usize,
    /// Tokens that were guessed, and how many were right.
    pub n_guessed: usize,
    /// Guesses that were right.
    pub n_accepted: usize,
}

/// How far a request is.
#[derive(Clone, Debug)]
pub struct Running {
    pub id: RequestId,
    /// Tokens of its prompt.
    pub n_prompt: usize,
    pub n_read: usize,
    /// Tokens of its answer so far.
    pub n_tok: usize,
    /// Tokens that its answer may have.
    pub n_max: usize,
}

/// What an engine holds, for people who watch it.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Requests that run.
    pub running: Vec<Running>,
    /// Requests that wait.
    pub n_waiting: usize,
    /// Prompt tokens that were computed since the start.
    pub n_prompt_tok: u64,
    /// Prompt tokens that came from snapshots.
    pub n_cached_tok: u64,
    /// Answer tokens.
    pub n_answer_tok: u64,
    /// Snapshots held.
    pub n_snapshots: usize,
    /// Bytes they take.
    pub snapshot_bytes: usize,
    /// Bytes of the states of running sequences.
    pub state_bytes: usize,
    /// Experts that were resident when the router chose them; this and the next three are zero
    /// where all are loaded from the start.
    pub n_expert_hits: u64,
    /// Experts that were loaded.
    pub n_expert_loads: u64,
    /// Bytes of them.
    pub expert_bytes_read: u64,
    /// Bytes of experts that are resident.
    pub expert_bytes: usize,
}
