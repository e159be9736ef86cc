//! Training: `Trainer` makes one step of one model, `Training` (`run.rs`) is the loop around it.
//!
//! A step: loss and gradients of one batch or of several whose gradients are added, norm, clipping,
//! the optimizer. Gradients of parts are those of the whole: every part divides by the weight of
//! all targets of the step.
//!
//! `limbic/` is a head of another kind, with samples and steps of its own.

pub mod lens;
pub mod limbic;
pub mod method;
pub mod optim;
pub mod pca;
pub mod plan;
mod run;
pub mod schedule;
pub mod scratch;
pub mod state;
pub mod teacher;

use crate::data::pack::PackedBatch;
use crate::error::{Error, Result};
use crate::model::weights::{Noise, ParamId, Role, Weights};
use crate::model::{ForwardOptions, Model};
use crate::ops::adamw::AdamW;
use crate::ops::grad_norm::{Squares, norm_of};
use crate::tape::{Gradients, Tape};
use crate::tensor::Tensor;
use crate::tensor::batch::{Batch, Targets};
use crate::tensor::gpu::later::wait;
use crate::train::optim::{Optimizer, OptimizerKind, global_squares};
use lens::Lens;
pub use run::{Outcome, Progress, Settings, Training, Turn, check};
use teacher::Teacher;

/// A model in training.
pub struct Trainer {
    pub model: Model,
    pub weights: Weights,
    /// Moments and step count.
    pub optimizer: Optimizer,
    /// How forward passes are made.
    pub options: ForwardOptions<'static>,
    /// Where the embedding is made of another model's.
    pub lens: Option<Lens>,
    /// Whose distribution is learned beside the targets.
    pub teacher: Option<Teacher>,
}

/// Settings of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepSettings {
    /// Rate, moments and decay; what is no matrix does not decay.
    pub adamw: AdamW,
    /// Gradients are scaled down to this norm.
    pub clip_norm: Option<f64>,
}

impl Default for StepSettings {
    fn default() -> StepSettings {
        StepSettings { adamw: AdamW::default(), clip_norm: Some(1.0) }
    }
}

/// What a step found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// The loss of the targets before the step.
    pub loss: f32,
    /// With a teacher: the mean KL divergence of the student from it, at its temperature, in nats
    /// per token.
    pub divergence: Option<f32>,
    /// Norm of all gradients before clipping.
    pub grad_norm: f64,
    /// Bytes the tape held at the end of the forward pass.
    pub tape_bytes: usize,
}

impl StepReport {
    /// Fails where the numbers are not finite.
    fn check(self) -> Result<StepReport> {
        let StepReport { loss, grad_norm, .. } = self;
        match loss.is_finite() && grad_norm.is_finite() {
            true => Ok(self),
            false => Err(Error::Diverged { loss, grad_norm }),
        }
    }
}

/// What the pass of one batch found, still on the device.
struct Found {
    /// Of the targets.
    loss: Tensor,
    divergence: Option<Tensor>,
    /// What the tape held.
    tape_bytes: usize,
}

impl Trainer {
    /// All parameters trained, by AdamW.
    pub fn new(model: Model, mut weights: Weights) -> Trainer {
        weights.train(|_, _| true);
        Trainer::with(model, weights, OptimizerKind::AdamW)
    }

    /// What the weights say is trained, by this optimizer.
    pub fn with(model: Model, weights: Weights, kind: OptimizerKind) -> Trainer {
        let optimizer = Optimizer::new(&weights, kind);
        let options = ForwardOptions::default();
        Trainer { model, weights, optimizer, options, lens: None, teacher: None }
    }

    /// Loss, gradients and what the tape held, of one batch; nothing is changed.
    pub fn gradients(&self, batch: &Batch, targets: &Targets) -> Result<(StepReport, Gradients)> {
        let mut grads = Gradients::default();
        let found = self.add_gradients(batch, targets, self.options, &mut grads)?;
        wait(self.report(&[found], grads))
    }

    /// What was found, read from the device at last: nothing before waits for it.
    async fn report(&self, parts: &[Found], grads: Gradients) -> Result<(StepReport, Gradients)> {
        let grads = self.through_lens(grads);
        let squares = global_squares(&grads);
        // All in one piece: a browser takes as long for four bytes as for four thousand.
        let mut wanted: Vec<&Tensor> = parts.iter().map(|part| &part.loss).collect();
        wanted.extend(parts.iter().filter_map(|part| part.divergence.as_ref()));
        let n_numbers = wanted.len();
        if let Squares::Parts(parts) = &squares {
            wanted.push(parts);
        }
        let flat: Vec<Tensor> = wanted.iter().map(|it| it.reshape(&[it.n_elem(), 1])).collect();
        let read = Tensor::stack(&flat).read().await;
        let (numbers, sums) = read.split_at(n_numbers);
        let grad_norm = match squares {
            Squares::Sum(sum) => sum.sqrt(),
            Squares::Parts(_) => norm_of(sums),
        };
        let sum_of = |list: &[f32]| list.iter().map(|&x| f64::from(x)).sum::<f64>() as f32;
        let (losses, divergences) = numbers.split_at(parts.len());
        let loss = sum_of(losses);
        let divergence = (divergences.len() == parts.len()).then(|| sum_of(divergences));
        let tape_bytes = parts.iter().map(|part| part.tape_bytes).max().unwrap_or(0);
        self.weights.device().check()?;
        Ok((StepReport { loss, divergence, grad_norm, tape_bytes }, grads))
    }

    /// The same of several parts of one batch, one after the other; what is dropped is drawn from
    /// `noise`, for each part anew. `meanwhile` is called once the device has all of its work.
    pub async fn gradients_later(
        &mut self,
        parts: &[PackedBatch],
        noise: Option<Noise>,
        meanwhile: impl FnOnce(),
    ) -> Result<(StepReport, Gradients)> {
        let all: f64 = parts.iter().map(PackedBatch::weight).sum();
        let mut grads = Gradients::default();
        let mut of_parts = Vec::new();
        for (idx, part) in parts.iter().enumerate() {
            let of_part = |noise: Noise| {
                let counter = noise.counter * parts.len() as u64 + idx as u64;
                Noise { counter, ..noise }
            };
            self.weights.set_noise(noise.map(of_part));
            let targets = Targets { ids: &part.targets, weights: &part.weights, norm: all as f32 };
            let balance_share = (part.weight() / all) as f32;
            let options = ForwardOptions { balance_share, ..self.options };
            let found = self.add_gradients(&part.batch, &targets, options, &mut grads);
            self.weights.set_noise(None);
            of_parts.push(found?);
        }
        meanwhile();
        self.report(&of_parts, grads).await
    }

    /// The same, waited for.
    pub fn gradients_of(
        &mut self,
        parts: &[PackedBatch],
        noise: Option<Noise>,
        meanwhile: impl FnOnce(),
    ) -> Result<(StepReport, Gradients)> {
        wait(self.gradients_later(parts, noise, meanwhile))
    }

    /// Adds the gradients of one batch.
    fn add_gradients(
        &self,
        batch: &Batch,
        targets: &Targets,
        options: ForwardOptions,
        grads: &mut Gradients,
    ) -> Result<Found> {
        let lesson = self.teacher.as_ref().map(|teacher| teacher.teach(batch)).transpose()?;
        let lesson = lesson.flatten();
        let options = ForwardOptions { teacher: lesson.as_ref(), ..options };
        let tape = Tape::new();
        let out = self.model.loss(&tape, &self.weights, batch, targets, options)?;
        drop(lesson);
        let tape_bytes = tape.bytes_held();
        tape.backward(&out.loss, 1.0, grads);
        let (loss, divergence) = match out.parts {
            Some([loss, divergence]) => (loss, Some(divergence)),
            None => (out.loss.value().clone(), None),
        };
        Ok(Found { loss, divergence, tape_bytes })
    }

    fn through_lens(&self, grads: Gradients) -> Gradients {
        match &self.lens {
            Some(lens) => lens.backward(&self.weights, grads),
            None => grads,
        }
    }

    /// One step on one batch. Where loss or gradients are not finite nothing is changed.
    pub fn step(
        &mut self,
        batch: &Batch,
        targets: &Targets,
        settings: &StepSettings,
    ) -> Result<StepReport> {
        let (report, grads) = self.gradients(batch, targets)?;
        let report = report.check()?;
        self.update(&grads, report.grad_norm, settings);
        Ok(report)
    }

    /// Changes the trained parameters by these gradients, whose norm is `grad_norm`.
    pub fn update(&mut self, grads: &Gradients, grad_norm: f64, settings: &StepSettings) {
        let mut adamw = settings.adamw;
        if let Some(limit) = settings.clip_norm {
            // As torch clips: the small addend keeps a zero norm from dividing.
            adamw.grad_scale = (limit / (grad_norm + 1e-6)).min(1.0);
        }
        self.optimizer.step(&mut self.weights, grads, |weights, id: ParamId| {
            let decays = weights.role(id) == Role::Matrix;
            AdamW { weight_decay: if decays { adamw.weight_decay } else { 0.0 }, ..adamw }
        });
        self.refresh();
    }

    /// A hash of everything that training must not change.
    pub fn frozen_hash(&self) -> String {
        let of_lens = self.lens.as_ref().map(Lens::hash).unwrap_or_default();
        self.weights.frozen_hash() + &of_lens
    }

    /// Makes anew what is made of other parameters.
    pub(crate) fn refresh(&mut self) {
        if let Some(lens) = &self.lens {
            lens.forward(&mut self.weights);
        }
    }
}
