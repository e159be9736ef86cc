//! Requests to a model, several at once: what a server, a chat and a command line have in common.
//!
//! An `Engine` belongs to one thread. `submit` takes a request, `step` advances everything that
//! runs by a little and says what happened, `cancel` ends a request early. There is no clock and
//! no channel here: whoever owns the engine decides when to step and where events go.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::formats::lora::Lora;
use crate::model::Model;
use crate::sample::Sampling;
use crate::tokenizer::Tokenizer;
use crate::weights::Weights;
use std::collections::VecDeque;
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
    /// What it goes on from; at least one token.
    pub prompt: Vec<u32>,
    /// Tokens at most; zero reads the prompt, keeps its snapshots and ends.
    pub n_max: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Added to the logits of these tokens; minus infinity forbids one.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that end the answer and are not part of it.
    pub stop_tokens: Vec<u32>,
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
    pub special: crate::tokenizer::Special,
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
    /// Some of the prompt was read: (tokens so far, of which came from a snapshot).
    Prompt { n_done: usize, n_cached: usize },
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
#[derive(Clone, Debug, PartialEq)]
pub enum Reason {
    /// A token that ends a text, or the end of what a constraint allows.
    End,
    /// This text of `stop_texts`.
    StopText(String),
    /// As many tokens as were asked for, or as the context holds.
    Length,
    /// `cancel`.
    Cancelled,
    /// Something failed, in words.
    Failed(String),
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

/// What an engine holds, for people who watch it.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Requests that run: (request, tokens of prompt, prompt tokens read, tokens of answer).
    pub running: Vec<(RequestId, usize, usize, usize)>,
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
}

/// A model that answers requests.
pub struct Engine {
    model: Arc<Model>,
    weights: Weights,
    tokenizer: Arc<Tokenizer>,
    settings: EngineSettings,
    waiting: VecDeque<(RequestId, Request)>,
    n_taken: u64,
}

impl Engine {
    /// An engine for a model whose weights are loaded.
    pub fn new(
        model: Model,
        weights: Weights,
        tokenizer: Arc<Tokenizer>,
        settings: EngineSettings,
    ) -> Result<Engine> {
        let model = Arc::new(model);
        let waiting = VecDeque::new();
        Ok(Engine { model, weights, tokenizer, settings, waiting, n_taken: 0 })
    }

    /// The shape of its model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Text to ids.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// How it works.
    pub fn settings(&self) -> &EngineSettings {
        &self.settings
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        self.weights.device()
    }

    /// Loads an adapter; returns its number.
    pub fn add_adapter(&mut self, _name: &str, _lora: Lora) -> Result<usize> {
        Err(Error::input("adapters are not here yet", "merge the adapter into the model"))
    }

    /// Takes a request.
    pub fn submit(&mut self, request: Request) -> std::result::Result<RequestId, Refusal> {
        if self.waiting.len() >= self.settings.n_slots + self.settings.n_waiting_max {
            return Err(Refusal::Full);
        }
        let id = RequestId(self.n_taken);
        self.n_taken += 1;
        self.waiting.push_back((id, request));
        Ok(id)
    }

    /// Ends a request, wherever it is; there is no event for it any more.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|waiting| waiting.0 != id);
    }

    /// Whether nothing runs or waits.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Advances everything that runs by a little.
    ///
    /// What fails belongs to a request and ends it with `Reason::Failed`; the engine goes on.
    pub fn step(&mut self) -> Vec<(RequestId, Event)> {
        let Some((id, request)) = self.waiting.pop_front() else { return Vec::new() };
        let (n_prompt, mut list) = (request.prompt.len(), Vec::new());
        let settings = crate::generate::GenerateSettings {
            n_max: request.n_max,
            sampling: request.sampling,
            stops: request.stop_tokens.clone(),
        };
        let mut stream = self.tokenizer.stream().showing(request.special);
        let mut tokens = Vec::new();
        let on_token = |id| {
            let text = stream.push(id);
            tokens.push(Token { id, text, logprob: 0.0, top: Vec::new() });
            std::ops::ControlFlow::Continue(())
        };
        let prompt = &request.prompt;
        let done =
            crate::generate::generate(&self.model, &self.weights, prompt, &settings, on_token);
        let n_tok = tokens.len();
        list.push((id, Event::Prompt { n_done: n_prompt, n_cached: 0 }));
        list.extend(tokens.into_iter().map(|token| (id, Event::Token(token))));
        let reason = match done {
            Err(error) => Reason::Failed(error.to_string()),
            Ok(_) if n_tok == request.n_max => Reason::Length,
            Ok(_) => Reason::End,
        };
        let (n_cached, n_guessed, n_accepted) = (0, 0, 0);
        let text = stream.finish();
        let finish = Finish { reason, text, n_prompt, n_cached, n_tok, n_guessed, n_accepted };
        list.push((id, Event::Done(finish)));
        list
    }

    /// One vector of length one for a text: the mean of the hidden rows behind its tokens.
    pub fn embed(&self, _ids: &[u32]) -> Result<Vec<f32>> {
        Err(Error::input("embeddings are not here yet", "ask for completions"))
    }

    /// What it holds.
    pub fn stats(&self) -> Stats {
        Stats { n_waiting: self.waiting.len(), ..Stats::default() }
    }
}
