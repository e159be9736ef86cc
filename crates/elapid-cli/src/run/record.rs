//! What a checkpoint keeps of a run besides the engine's progress.

use crate::report::{Done, Failure};
use elapid::Saved;
use serde::{Deserialize, Serialize};

/// Where the time of a run went, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spent {
    /// Reading and encoding data, opening the model, planning.
    pub prepare_s: f64,
    /// Steps.
    pub steps_s: f64,
    /// Measuring on held-out files.
    pub eval_s: f64,
    /// Copying for checkpoints and waiting for them to be written.
    pub save_s: f64,
}

/// What a checkpoint keeps besides the engine's progress.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Watch {
    /// Seconds of training so far.
    pub elapsed_s: f64,
    /// The best measurement so far.
    pub best: Option<Best>,
    /// Measurements since then.
    pub n_worse: u32,
    /// The step of the best one when the run was last saved.
    pub best_saved: u64,
    /// The most memory that the run held, in bytes.
    pub peak: u64,
    /// How often the run went back.
    pub n_rollbacks: u32,
    /// Where its time went.
    pub spent: Spent,
    /// Seconds that measuring and saving took before the first step: afterwards it is as much.
    pub around_s: f64,
    /// A hash of what is frozen.
    pub frozen_hash: String,
}

/// A measurement on held-out files.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Nats per token.
    pub loss: f64,
    /// After this step.
    pub step: u64,
    /// How often the run had gone back before: a step may come more than once.
    pub n_rollbacks: u32,
}

/// Of a checkpoint.
pub fn watch_of(saved: &Saved) -> Done<Watch> {
    serde_json::from_value(saved.extra.clone()).map_err(|error| {
        let hint = "the run may come from another version of Elapid";
        Failure::new(format!("the checkpoint of step {}: {error}", saved.step), hint)
    })
}
