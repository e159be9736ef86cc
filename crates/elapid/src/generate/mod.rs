//! Text from a model: a prompt in one pass, then one token at a time.
//!
//! Each sequence has a `State`. Several sequences advance together, one row each, so that a matrix
//! is read once for all of them; those that are done leave the batch.
//!
//! A sequence ends with a token of `stops` (which is not part of the result), after `n_max` tokens,
//! or when the caller breaks. The draw of token `t` of sequence `s` has the counter `s << 32 | t`:
//! what a sequence becomes depends on its place in the list, not on when the others end.
//!
//! Not here: text and tokens (`tokenizer/`), the choice itself (`sample.rs`). Nothing counts how
//! much context a model was made for; that is the caller's.

pub mod decoder;
pub mod engine;
pub mod generator;
pub mod sample;

use crate::error::{Error, Result};
use crate::generate::decoder::Decoder;
use crate::generate::sample::{Sampling, pick};
use crate::model::Model;
use crate::model::state::State;
use crate::model::weights::Weights;
use std::ops::ControlFlow;

impl crate::train::Training {
    /// The likeliest continuations of several prompts, of at most `n_max` tokens.
    pub fn continuations(&self, prompts: &[&[u32]], n_max: usize) -> Result<Vec<Vec<u32>>> {
        let stops = self.loader.tokenizer().eog().to_vec();
        let settings = GenerateSettings { n_max, sampling: Sampling::greedy(), stops };
        let (model, weights) = (&self.trainer.model, &self.trainer.weights);
        let on_token = |_, _| ControlFlow::Continue(());
        weights.device().run(|| generate_many(model, weights, prompts, &settings, on_token))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct GenerateSettings {
    pub n_max: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end a sequence.
    pub stops: Vec<u32>,
}

/// What follows `prompt`. `on_token` hears of each token as it comes and may break.
#[cfg(test)]
pub fn generate(
    model: &Model,
    weights: &Weights,
    prompt: &[u32],
    settings: &GenerateSettings,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Vec<u32>> {
    let mut out = generate_many(model, weights, &[prompt], settings, |_, id| on_token(id))?;
    Ok(out.pop().expect("one prompt, one answer"))
}

/// What follows each prompt. `on_token` hears of (prompt, token) and may end that sequence.
///
/// All prompts go through in one pass and all states live at once: the caller chooses how many.
pub fn generate_many(
    model: &Model,
    weights: &Weights,
    prompts: &[&[u32]],
    settings: &GenerateSettings,
    mut on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<Vec<Vec<u32>>> {
    if let Some(idx) = prompts.iter().position(|prompt| prompt.is_empty()) {
        let hint = "start with the BOS token";
        return Err(Error::input(format!("prompt {idx} has no tokens"), hint));
    }
    let mut out: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
    let device = weights.device();
    let n_running = if settings.n_max > 0 { prompts.len() } else { 0 };
    let mut running: Vec<usize> = (0..n_running).collect();
    let mut states: Vec<State> = running.iter().map(|_| model.state(device)).collect();
    let mut next: Vec<Vec<u32>> = running.iter().map(|&idx| prompts[idx].to_vec()).collect();
    let mut decoder = Decoder::new();
    while !running.is_empty() {
        let parts: Vec<&[u32]> = next.iter().map(|ids| &ids[..]).collect();
        let n_wanted = vec![1; parts.len()];
        let work = || decoder.advance_now(model, weights, &parts, &mut states, &n_wanted);
        let logits = device.run(work)?;
        let mut left = Vec::with_capacity(running.len());
        let (mut left_states, mut left_next) = (Vec::new(), Vec::new());
        let rows = logits.chunks_exact(logits.len() / running.len());
        for ((idx, state), row) in running.into_iter().zip(states).zip(rows) {
            let counter = (idx as u64) << 32 | out[idx].len() as u64;
            let id = pick(row, &settings.sampling, counter)?;
            if settings.stops.contains(&id) {
                continue;
            }
            out[idx].push(id);
            if on_token(idx, id).is_continue() && out[idx].len() < settings.n_max {
                left.push(idx);
                left_states.push(state);
                left_next.push(vec![id]);
            }
        }
        (running, states, next) = (left, left_states, left_next);
    }
    Ok(out)
}
