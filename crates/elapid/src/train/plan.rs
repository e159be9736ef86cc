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
//! summed over all matrices of n numbers, the head among them; of experts those that are taken.

use crate::data::pack::PackedBatch;
use crate::error::Result;
use crate::model::Model;
use crate::model::config::FeedForwardConfig;
use crate::model::weights::{ParamId, Role, Weights};
use crate::ops::adamw::AdamW;
use crate::tape::Gradients;
use crate::tensor::batch::Batch;
use crate::tensor::rng::Rng;
use crate::train::{StepReport, StepSettings, Trainer, Training};
use serde::{Deserialize, Serialize};

/// Bytes of a model in training that do not depend on the batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fixed {
    /// Parameters as they are held, adapters among them.
    pub weights: usize,
    /// What the optimizer remembers.
    pub moments: usize,
    /// Gradients of what is trained.
    pub gradients: usize,
}

impl Fixed {
    /// Of a model in training.
    pub(crate) fn of(trainer: &Trainer) -> Fixed {
        let weights = &trainer.weights;
        let n_bytes = |id: ParamId| weights.tensor(id).n_bytes();
        let moments = trainer.optimizer.state();
        Fixed {
            weights: weights.ids().map(n_bytes).sum(),
            moments: moments.iter().map(|(_, tensor)| tensor.n_bytes()).sum(),
            gradients: weights.trained().into_iter().map(n_bytes).sum(),
        }
    }
}

/// What a pass took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Tokens in it.
    pub n_tok: usize,
    /// Bytes that the tape held at the end of the forward pass.
    pub activations: usize,
    /// Bytes of buffers that the pass and its gradients took from the system.
    pub buffers: usize,
}

impl Training {
    /// Bytes that do not depend on the batch.
    pub fn fixed(&self) -> Fixed {
        Fixed::of(&self.trainer)
    }

    /// Flops of the matrix products of one token of a step.
    pub fn flops_per_token(&self) -> f64 {
        flops_per_token(&self.trainer.model, &self.trainer.weights)
    }

    /// Makes a pass over random tokens with gradients, and changes nothing; what it took.
    pub fn probe(&mut self, n_rows: usize, context: usize) -> Result<Probe> {
        let device = self.trainer.weights.device().clone();
        device.run(|| probe(&mut self.trainer, n_rows, context))
    }

    /// Steps over random tokens that take their time and change no parameter.
    pub fn trial(&mut self, n_rows: usize, context: usize) -> Trial<'_> {
        let part = random_batch(self.trainer.model.config().n_vocab, n_rows, context);
        Trial { training: self, part, found: None }
    }
}

/// Steps that change nothing, for their time and memory.
pub struct Trial<'a> {
    training: &'a mut Training,
    part: PackedBatch,
    found: Option<(StepReport, Gradients)>,
}

impl Trial<'_> {
    /// Forward and backward; the bytes that the tape held in between.
    pub fn pass(&mut self) -> Result<usize> {
        let (trainer, parts) = (&mut self.training.trainer, std::slice::from_ref(&self.part));
        let device = trainer.weights.device().clone();
        let found = device.run(|| trainer.gradients_of(parts, None, || ()))?;
        let n_bytes = found.0.tape_bytes;
        self.found = Some(found);
        Ok(n_bytes)
    }

    /// The optimizer, with a learning rate of zero.
    pub fn update(&mut self) {
        if let Some((report, grads)) = self.found.take() {
            let adamw = AdamW { lr: 0.0, weight_decay: 0.0, ..AdamW::default() };
            let settings = StepSettings { adamw, clip_norm: None };
            let trainer = &mut self.training.trainer;
            let device = trainer.weights.device().clone();
            device.run(|| trainer.update(&grads, report.grad_norm, &settings));
        }
    }
}

impl Drop for Trial<'_> {
    fn drop(&mut self) {
        self.training.trainer.optimizer.reset();
    }
}

/// Makes a pass over random tokens, `n_rows` of `context`, with gradients, and changes nothing.
///
/// Buffers are given back to the system before and after: what is measured is this pass alone.
pub fn probe(trainer: &mut Trainer, n_rows: usize, context: usize) -> Result<Probe> {
    let device = trainer.weights.device().clone();
    device.trim();
    let before = device.memory().reserved;
    let part = random_batch(trainer.model.config().n_vocab, n_rows, context);
    let (report, grads) = trainer.gradients_of(&[part], None, || ())?;
    drop(grads);
    let buffers = device.memory().reserved - before;
    device.trim();
    Ok(Probe { n_tok: n_rows * context, activations: report.tape_bytes, buffers })
}

/// Random rows, every token to be foreseen.
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
