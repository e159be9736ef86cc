//! Requests by parts: defaults, and a builder.

use super::engine::{Constraint, Request};
use super::sample::Sampling;
use crate::text::tokenizer::Special;

impl Default for Sampling {
    /// What llama.cpp does where nobody says: a temperature of 0.8 among the likeliest tokens.
    fn default() -> Sampling {
        Sampling {
            temperature: 0.8,
            top_k: Some(40),
            top_p: 0.95,
            min_p: 0.05,
            ..Sampling::greedy()
        }
    }
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
            stop_texts: Vec::new(),
            constraint: None,
            adapters: Vec::new(),
            n_top: 0,
            n_lookup: 0,
            special: Special::Plain,
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
