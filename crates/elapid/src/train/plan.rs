//! What a step of training takes: memory by kind, and the products it cannot do without.
//!
//! What is fixed is counted: weights, what the optimizer remembers, gradients. What a pass holds is
//! measured on a pass, because it depends on every op and on how buffers are shared; it grows in
//! proportion to the tokens, so that two small passes foretell a large one.
//!
//! The products of a step, per token, in flops:
//!
//! ```text
//! forward 2 n, gradient of the input 2 n, gradient of the weight 2 n where it is trained
//! ```
//!
//! summed over all matrices of n numbers, the head among them; of experts those that are taken. A
//! teacher's forward is 2 n.

use crate::data::pack::PackedBatch;
use crate::error::Result;
use crate::model::Model;
use crate::model::config::FeedForwardConfig;
use crate::model::weights::{ParamId, Role, Weights};
use crate::ops::adamw::AdamW;
use crate::tensor::batch::Batch;
use crate::tensor::rng::Rng;
use crate::train::teacher::Teacher;
use crate::train::{StepSettings, Trainer, Training};
use serde::{Deserialize, Serialize};

/// Bytes of a model in training that do not depend on the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fixed {
    /// Parameters as they are held, adapters among them.
    pub weights: usize,
    /// What the optimizer remembers, where the parameters are.
    pub moments: usize,
    /// What it remembers in the memory of the CPU while a GPU computes.
    #[serde(default)]
    pub moments_on_host: usize,
    /// Gradients that are held after a step of one pass: those of what is trained; of several ranks
    /// each holds its own.
    pub gradients: usize,
    /// All that is trained.
    #[serde(default)]
    pub trained: usize,
    /// What the optimizers of all ranks remember.
    #[serde(default)]
    pub moments_of_all: usize,
    /// Weights of a teacher.
    #[serde(default)]
    pub teacher: usize,
}

impl Fixed {
    /// Of a model in training.
    pub(crate) fn of(trainer: &Trainer) -> Fixed {
        let weights = &trainer.weights;
        let n_bytes = |id: ParamId| weights.tensor(id).n_bytes();
        let (mut moments, mut moments_on_host) = (0, 0);
        for (_, tensor) in trainer.optimizer.state() {
            match tensor.device().is_same(weights.device()) {
                true => moments += tensor.n_bytes(),
                false => moments_on_host += tensor.n_bytes(),
            }
        }
        let trained = weights.trained();
        let is_mine = |id: &&ParamId| trainer.team.as_ref().is_none_or(|team| team.is_mine(**id));
        let moments_of_all = trainer.optimizer.names().into_iter();
        Fixed {
            weights: weights.ids().map(n_bytes).sum(),
            moments,
            moments_on_host,
            gradients: trained.iter().filter(is_mine).map(|id| n_bytes(*id)).sum(),
            trained: trained.iter().map(|id| n_bytes(*id)).sum(),
            moments_of_all: moments_of_all.map(|(_, _, shape)| 4 * n_elem(&shape)).sum(),
            teacher: trainer.teacher.as_ref().map_or(0, Teacher::n_bytes),
        }
    }
}

fn n_elem(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// What a step took.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probe {
    /// Tokens in it.
    pub n_tok: usize,
    /// Bytes that the tape held at the end of the forward pass.
    pub activations: usize,
    /// Bytes of buffers that the step took from the system.
    pub buffers: usize,
    /// Seconds of the forward and backward pass.
    pub pass_s: f64,
    /// Seconds of the optimizer.
    pub update_s: f64,
}

impl Training {
    /// Bytes that do not depend on the batch.
    pub fn fixed(&self) -> Fixed {
        Fixed::of(&self.trainer)
    }

    /// Flops of the matrix products of one token of a step.
    pub fn flops_per_token(&self) -> f64 {
        let Trainer { model, weights, teacher, .. } = &self.trainer;
        let of_teacher = teacher.as_ref().map_or(0.0, |it| it.flops_per_token());
        flops_per_token(model, weights) + of_teacher
    }

    /// Makes steps over random tokens, `n_rows` of `context`, that change no parameter; what one
    /// took, the fastest of `n_reps`; `clock` tells seconds.
    ///
    /// Buffers are given back to the system before and after: what is measured is this alone.
    pub fn probe(
        &mut self,
        n_rows: usize,
        context: usize,
        n_reps: usize,
        clock: &dyn Fn() -> f64,
    ) -> Result<Probe> {
        let trainer = &mut self.trainer;
        let device = trainer.weights.device().clone();
        device.trim();
        let before = device.memory().reserved;
        let part = [random_batch(trainer.model.config().n_vocab, n_rows, context)];
        let adamw = AdamW { lr: 0.0, weight_decay: 0.0, ..AdamW::default() };
        let settings = StepSettings { adamw, clip_norm: None };
        let (mut activations, mut pass_s, mut update_s) = (0, f64::INFINITY, f64::INFINITY);
        let probe = |trainer: &mut Trainer, on| {
            if let Some(team) = &mut trainer.team {
                team.is_probe = on;
            }
        };
        probe(trainer, true);
        for _ in 0..n_reps.max(1) {
            let begin = clock();
            let (report, grads) = device.run(|| trainer.gradients_of(&part, None, || ()))?;
            pass_s = pass_s.min(clock() - begin);
            activations = report.tape_bytes;
            let begin = clock();
            device.run(|| trainer.update(&grads, report.grad_norm, &settings))?;
            device.wait()?;
            update_s = update_s.min(clock() - begin);
        }
        probe(trainer, false);
        trainer.optimizer.reset();
        let buffers = device.memory().reserved.saturating_sub(before);
        device.trim();
        Ok(Probe { n_tok: n_rows * context, activations, buffers, pass_s, update_s })
    }
}

/// Random rows, every token to be predicted.
pub fn random_batch(n_vocab: usize, n_rows: usize, context: usize) -> PackedBatch {
    let rng = Rng::new(0, 0);
    let id = |n: usize| rng.below(n as u64, n_vocab as u64) as u32;
    let n_tok = n_rows * context;
    let tokens: Vec<u32> = (0..n_tok).map(id).collect();
    let rows: Vec<&[u32]> = tokens.chunks(context).collect();
    let targets = (n_tok..2 * n_tok).map(id).collect();
    PackedBatch { batch: Batch::from_sequences(&rows), targets, weights: vec![1.0; n_tok] }
}

/// Buffers of a pass over `n_tok` tokens, foretold from two smaller ones.
pub fn foretell(small: &Probe, large: &Probe, n_tok: usize) -> usize {
    let d_tok = (large.n_tok - small.n_tok).max(1) as f64;
    let slope = (large.buffers as f64 - small.buffers as f64).max(0.0) / d_tok;
    let more = n_tok as f64 - large.n_tok as f64;
    (large.buffers as f64 + slope * more).max(0.0) as usize
}

/// Flops of the products of one token of a training step.
pub fn flops_per_token(model: &Model, weights: &Weights) -> f64 {
    let mut sum = 0.0;
    for (idx, spec) in model.specs().iter().enumerate() {
        let is_head = spec.role == Role::Embedding && model.config().tied;
        if spec.role != Role::Matrix && !is_head {
            continue;
        }
        let id = ParamId(idx);
        let n = weights.tensor(id).n_elem() as f64;
        let passes = if weights.is_trained(id) { 6.0 } else { 4.0 };
        sum += passes * n * taken(model, &spec.name);
    }
    let is_adapter = |id: &ParamId| id.0 >= model.specs().len() && weights.is_trained(*id);
    let adapters = weights.ids().filter(is_adapter);
    sum + 6.0 * adapters.map(|id| weights.tensor(id).n_elem() as f64).sum::<f64>()
}

/// The share of tokens that a matrix sees: below one for experts.
fn taken(model: &Model, name: &str) -> f64 {
    for layer in &model.config().layers {
        if let FeedForwardConfig::Experts(c) = &layer.feed_forward
            && name.starts_with(&format!("{}.experts", c.prefix))
        {
            return c.router.n_used as f64 / c.n_expert as f64;
        }
    }
    1.0
}
