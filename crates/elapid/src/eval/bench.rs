//! What `elapid bench` times: training steps, prompts and tokens. Clocks are the caller's.

use crate::data::pack::PackedBatch;
use crate::error::Result;
use crate::generate::decoder::Decoder;
use crate::generate::engine::PIECE;
use crate::generate::sample::{Sampling, pick};
use crate::model::Model;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::Config;
use crate::model::state::State;
use crate::model::weights::{Arithmetic, Role, Weights};
use crate::ops::adamw::AdamW;
use crate::tensor::batch::Targets;
use crate::tensor::device::Device;
use crate::tensor::gpu::profile::KernelTime;
use crate::tensor::rng::Rng;
use crate::train::plan::random_batch;
use crate::train::{StepSettings, Trainer};

/// Training steps of a model with random weights, on random tokens.
pub struct TrainBench {
    trainer: Trainer,
    part: PackedBatch,
}

impl TrainBench {
    /// A model of this config.json; `n_rows` sequences of `context` tokens in a step.
    pub fn new(json: &str, n_rows: usize, context: usize, device: &Device) -> Result<TrainBench> {
        let model = Model::new(Config::from_json("bench", json)?);
        let part = random_batch(model.config().n_vocab, n_rows, context);
        let weights = Weights::init(device, model.specs(), 0);
        Ok(TrainBench { trainer: Trainer::new(model, weights), part })
    }

    /// Parameters of the model.
    pub fn n_params(&self) -> usize {
        self.trainer.weights.n_elem()
    }

    /// Forward, backward and AdamW; the bytes that the tape held.
    pub fn step(&mut self) -> Result<usize> {
        let device = self.trainer.weights.device().clone();
        let PackedBatch { batch, targets, weights } = &self.part;
        let targets = Targets { ids: targets, weights, norm: targets.len() as f32 };
        let adamw = AdamW { weight_decay: 0.1, ..AdamW::default() };
        let settings = StepSettings { adamw, clip_norm: Some(1.0) };
        let report = device.run(|| self.trainer.step(batch, &targets, &settings))?;
        // The update of the weights belongs to the step.
        device.gpu().inspect(|gpu| gpu.wait());
        Ok(report.tape_bytes)
    }

    /// One more step with the time of each kernel, on a GPU.
    pub fn profile(&mut self) -> Result<Vec<KernelTime>> {
        let device = self.trainer.weights.device().clone();
        let Some(gpu) = device.gpu() else { return Ok(Vec::new()) };
        gpu.profile_start();
        self.step()?;
        Ok(gpu.profile_stop())
    }
}

/// One sequence of a model, read and continued greedily.
pub struct GenerateBench {
    model: Checkpoint,
    weights: Weights,
    decoder: Decoder,
    state: State,
}

impl GenerateBench {
    /// With its weights as they are stored.
    pub fn new(model: Checkpoint, device: &Device) -> Result<GenerateBench> {
        let mut weights = model.weights_as_stored(device)?;
        weights.set_arithmetic(Arithmetic::Quick);
        let state = model.model().state(device);
        Ok(GenerateBench { model, weights, decoder: Decoder::new(), state })
    }

    /// Forgets what was read.
    pub fn restart(&mut self) {
        self.state = self.model.model().state(self.weights.device());
    }

    /// A prompt of random tokens.
    pub fn random_prompt(&self, n_tok: usize) -> Vec<u32> {
        let (rng, n_vocab) = (Rng::new(0, 0), self.model.model().config().n_vocab as u64);
        (0..n_tok as u64).map(|n| rng.below(n, n_vocab) as u32).collect()
    }

    /// Reads tokens; the likeliest one behind them.
    pub fn read(&mut self, ids: &[u32]) -> Result<u32> {
        let GenerateBench { model, weights, decoder, state } = self;
        let device = weights.device();
        let work = || -> Result<u32> {
            let (states, mut logits) = (std::slice::from_mut(state), Vec::new());
            let n_pieces = ids.len().div_ceil(PIECE);
            for (idx, ids) in ids.chunks(PIECE).enumerate() {
                let n_wanted = usize::from(idx + 1 == n_pieces);
                logits =
                    decoder.advance_now(model.model(), weights, &[ids], states, &[n_wanted])?;
            }
            pick(&logits, &Sampling::greedy(), 0)
        };
        if ids.len() == 1 { device.run_awake(work) } else { device.run(work) }
    }

    /// Bytes of weights and state that a token reads now, and numbers in the matrices that a prompt
    /// is multiplied with (all but the head, which only its last token meets).
    pub fn read_per_token(&self) -> (usize, usize) {
        let (weights, config) = (&self.weights, self.model.model().config());
        let is_head =
            |id| weights.role(id) == Role::Embedding || weights.name(id).contains("lm_head");
        let (mut n_bytes, mut n_multiplied) = (self.state.n_bytes(), 0);
        for id in weights.ids() {
            let tensor = weights.tensor(id);
            // An embedding that is not the head as well gives one row.
            let is_table = weights.role(id) == Role::Embedding && !config.tied;
            n_bytes += tensor.n_bytes() / if is_table { config.n_vocab } else { 1 };
            if weights.role(id) == Role::Matrix && !is_head(id) {
                n_multiplied += tensor.n_elem();
            }
        }
        (n_bytes, n_multiplied)
    }
}
