//! One training step: loss, gradients, norm, clipping, AdamW. The loop around it comes later.

use crate::batch::{Batch, Targets};
use crate::error::{Error, Result};
use crate::model::{ForwardOptions, Model};
use crate::optim::{AdamW, Optimizer, global_norm};
use crate::tape::{Gradients, Tape};
use crate::weights::{ParamId, Role, Weights};

/// A model in training.
pub struct Trainer {
    /// Its shape.
    pub model: Model,
    /// Its numbers.
    pub weights: Weights,
    /// Moments and step count.
    pub optimizer: Optimizer,
    /// How forward passes are made.
    pub options: ForwardOptions,
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
    /// The loss before the step.
    pub loss: f32,
    /// Norm of all gradients before clipping.
    pub grad_norm: f64,
    /// Bytes the tape held at the end of the forward pass.
    pub tape_bytes: usize,
}

impl Trainer {
    /// All parameters trained.
    pub fn new(model: Model, mut weights: Weights) -> Trainer {
        weights.train(|_, _| true);
        let optimizer = Optimizer::new(&weights);
        Trainer { model, weights, optimizer, options: ForwardOptions::default() }
    }

    /// Loss, gradients and what the tape held, of one batch; nothing is changed.
    pub fn gradients(&self, batch: &Batch, targets: &Targets) -> Result<(StepReport, Gradients)> {
        let tape = Tape::new();
        let loss = self.model.loss(&tape, &self.weights, batch, targets, self.options)?.loss;
        let value = loss.value().f32()[0];
        let tape_bytes = tape.bytes_held();
        let mut grads = Gradients::default();
        tape.backward(&loss, 1.0, &mut grads);
        let grad_norm = global_norm(&grads);
        Ok((StepReport { loss: value, grad_norm, tape_bytes }, grads))
    }

    /// One step on one batch. Where loss or gradients are not finite nothing is changed.
    pub fn step(
        &mut self,
        batch: &Batch,
        targets: &Targets,
        settings: &StepSettings,
    ) -> Result<StepReport> {
        let (report, grads) = self.gradients(batch, targets)?;
        if !report.loss.is_finite() || !report.grad_norm.is_finite() {
            let StepReport { loss, grad_norm, .. } = report;
            return Err(Error::Diverged { loss, grad_norm });
        }
        let mut adamw = settings.adamw;
        if let Some(limit) = settings.clip_norm {
            // As torch clips: the small addend keeps a zero norm from dividing.
            adamw.grad_scale = (limit / (report.grad_norm + 1e-6)).min(1.0);
        }
        self.optimizer.step(&mut self.weights, &grads, |weights, id: ParamId| {
            let decays = weights.role(id) == Role::Matrix;
            AdamW { weight_decay: if decays { adamw.weight_decay } else { 0.0 }, ..adamw }
        });
        Ok(report)
    }
}
