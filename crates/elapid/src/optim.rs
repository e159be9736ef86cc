//! The optimizer: moments of every trained parameter, and one step of all of them.
//!
//! Not here yet: schedules and other optimizers; they come with the training loop.

use crate::ops::adamw::adamw;
use crate::ops::grad_norm::grad_norm;
use crate::tape::Gradients;
use crate::tensor::Tensor;
use crate::weights::{ParamId, Weights};
use std::collections::BTreeMap;

/// The settings of one AdamW step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Memory of the first moment.
    pub beta1: f64,
    /// Memory of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Factor of the gradient: below one when it is clipped.
    pub grad_scale: f64,
}

impl Default for AdamW {
    fn default() -> AdamW {
        AdamW { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01, grad_scale: 1.0 }
    }
}

/// AdamW with its moments.
pub struct Optimizer {
    moments: BTreeMap<ParamId, [Tensor; 2]>,
    n_steps: u64,
}

impl Optimizer {
    /// Before the first step, with moments for all that is trained.
    ///
    /// They are made now and not when first needed: then they would take buffers that the next
    /// step's activations look for.
    pub fn new(weights: &Weights) -> Optimizer {
        let zeros = |id: ParamId| {
            let tensor = weights.tensor(id);
            [0, 1].map(|_| Tensor::zeros(tensor.device(), tensor.shape()))
        };
        let moments = weights.trained().into_iter().map(|id| (id, zeros(id))).collect();
        Optimizer { moments, n_steps: 0 }
    }

    /// Steps made.
    pub fn n_steps(&self) -> u64 {
        self.n_steps
    }

    /// Changes every trained parameter that has a gradient, with the settings `settings` gives it.
    /// What is trained is what was when the optimizer was made, or less.
    pub fn step(
        &mut self,
        weights: &mut Weights,
        grads: &Gradients,
        settings: impl Fn(&Weights, ParamId) -> AdamW,
    ) {
        self.n_steps += 1;
        for id in weights.trained() {
            let Some(grad) = grads.get(id.0) else { continue };
            let config = settings(weights, id);
            let [m, v] = self.moments.get_mut(&id).expect("moments of what is trained");
            adamw(weights.tensor_mut(id), grad, m, v, self.n_steps, &config);
        }
    }
}

/// Norm of all gradients together.
pub fn global_norm(grads: &Gradients) -> f64 {
    grad_norm(grads.iter().map(|(_, grad)| grad))
}
