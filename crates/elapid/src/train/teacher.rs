//! A teacher: a frozen model whose distribution the trained one, the student, learns to follow.
//!
//! Its forward pass runs on every batch of the student, just before the student's, and keeps
//! nothing but its last hidden rows; what the loss makes of them is in `ops/head_loss/teacher.rs`.
//! Models do not know of it. The teacher's weights stay as they are stored, quantized or not.

use crate::data::pack::Loader;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::weights::Weights;
use crate::ops::head_loss;
use crate::tensor::batch::Batch;
use crate::text::tokenizer::Tokenizer;
use crate::train::Settings;
use crate::train::plan::flops_per_token;

/// A model to learn from.
pub struct Teacher {
    pub model: Model,
    pub weights: Weights,
    temperature: f32,
    share: f32,
}

impl Teacher {
    /// By the temperature and share of the settings; fails where ids mean other tokens.
    pub fn new(
        (model, weights): (Model, Weights),
        tokenizer: &Tokenizer,
        loader: &Loader,
        settings: &Settings,
    ) -> Result<Teacher> {
        if tokenizer != loader.tokenizer() {
            let (theirs, ours) = (tokenizer.n_vocab(), loader.tokenizer().n_vocab());
            let problem = format!(
                "the teacher has another vocabulary: of {theirs} tokens, the student's of {ours}"
            );
            let hint = "a teacher of another vocabulary can only write texts to learn from";
            return Err(Error::input(problem, hint));
        }
        let [temperature, share] =
            [settings.teacher_temperature, settings.teacher_share].map(|x| x as f32);
        Ok(Teacher { model, weights, temperature, share })
    }

    /// What it makes of a batch; nothing where it has no share in the loss.
    pub fn teach(&self, batch: &Batch) -> Result<Option<head_loss::Teacher>> {
        if self.share == 0.0 {
            return Ok(None);
        }
        let how = (self.temperature, self.share);
        self.model.teach(&self.weights, batch, how).map(Some)
    }

    /// Flops of its products for one token: a forward pass.
    pub fn flops_per_token(&self) -> f64 {
        match self.share {
            0.0 => 0.0,
            // Of what is frozen they are those of two passes.
            _ => flops_per_token(&self.model, &self.weights) / 2.0,
        }
    }

    /// Bytes of its weights.
    pub fn n_bytes(&self) -> usize {
        self.weights.ids().map(|id| self.weights.tensor(id).n_bytes()).sum()
    }
}
