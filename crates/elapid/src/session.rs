//! The short way for programs: a model, text to learn, text to go on with.
//!
//! Everything here is a few calls of the modules below it, which take over where more is wanted:
//! `method` for adapters, `train` for the loop, `eval` for proof, `formats` for files.

use crate::data::pack::{LoadSettings, Loader, Order};
use crate::data::{Document, Ends, encode};
use crate::error::{Error, Result};
use crate::eval::{DocScore, EvalSettings, measure};
use crate::generate::sample::Sampling;
use crate::generate::{GenerateSettings, generate};
use crate::model::Model;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::preset::{Arch, Size};
use crate::model::weights::Weights;
use crate::tensor::device::Device;
use crate::text::tokenizer::{Special, Tokenizer};
use crate::train::method::{self, Coverage, Method};
use crate::train::optim::OptimizerKind;
use crate::train::scratch::{self, Shape};
use crate::train::{Outcome, Settings, Trainer, Training};
use std::ops::ControlFlow;
use std::sync::Arc;

/// A model that learns and writes.
pub struct Session {
    /// The model as it was found or made: what an export needs besides the weights.
    pub checkpoint: Checkpoint,
    /// Text to ids.
    pub tokenizer: Arc<Tokenizer>,
    /// There but while it trains.
    trainer: Option<Trainer>,
    method: Method,
    context: usize,
}

impl Session {
    /// A new model with a vocabulary made from `text`.
    pub fn scratch(device: &Device, size: Size, arch: Arch, text: &str) -> Result<Session> {
        let context = 128;
        let n_vocab = (text.len() / 64).clamp(512, size.n_vocab());
        let texts = scratch::vocabulary(n_vocab, context, &mut [text].into_iter())?;
        let checkpoint = scratch::checkpoint(Shape { size, arch, context }, texts, None)?;
        let weights = Weights::init(device, checkpoint.model().specs(), 0);
        Session::new(checkpoint, weights, Method::Full, context)
    }

    /// A model that is there, adapted by `method`; `context` is the tokens of a row in training.
    pub fn open(
        device: &Device,
        checkpoint: Checkpoint,
        method: Method,
        context: usize,
    ) -> Result<Session> {
        let weights = checkpoint.weights(device)?;
        Session::new(checkpoint, weights, method, context)
    }

    fn new(
        checkpoint: Checkpoint,
        mut weights: Weights,
        method: Method,
        context: usize,
    ) -> Result<Session> {
        let model = Model::new(checkpoint.model().config().clone());
        method::apply(&method, &model, &mut weights, 0)?;
        let tokenizer = Arc::new(scratch::tokenizer_of(&checkpoint)?);
        let trainer = Some(Trainer::with(model, weights, OptimizerKind::AdamW));
        Ok(Session { checkpoint, tokenizer, trainer, method, context })
    }

    fn trainer(&self) -> &Trainer {
        self.trainer.as_ref().expect("a session has its model but while it trains")
    }

    /// The numbers of the model.
    pub fn weights(&self) -> &Weights {
        &self.trainer().weights
    }

    /// What is trained.
    pub fn coverage(&self) -> Coverage {
        method::coverage_of(&self.trainer().model, self.weights())
    }

    /// Learns from `text`, `n_rows` rows in a step; `on_step` hears of (step, loss) and may break.
    ///
    /// A step that diverges ends it with an error; the model is as after the step before.
    pub fn train(
        &mut self,
        text: &str,
        n_rows: usize,
        settings: &Settings,
        mut on_step: impl FnMut(u64, f32) -> ControlFlow<()>,
    ) -> Result<()> {
        let ends = Ends::of(&self.tokenizer);
        let document = encode(&Document::whole("text", text), &self.tokenizer, ends)?;
        let load = LoadSettings {
            context: self.context,
            n_rows,
            seed: settings.seed,
            fim: None,
            ends,
            shuffle: Order::Shuffled,
        };
        let loader = Loader::new(vec![document], load, self.tokenizer.clone())?;
        settings.check()?;
        let Trainer { model, weights, .. } =
            self.trainer.take().expect("a session has its model but while it trains");
        let trainer = Trainer::with(model, weights, settings.optimizer);
        let mut training = Training::new(trainer, loader, settings.clone())?;
        let done = steps(&mut training, &mut on_step);
        self.trainer = Some(training.trainer);
        done
    }

    /// What follows `prompt`, at most `n_max` tokens.
    pub fn complete(&self, prompt: &str, n_max: usize, sampling: Sampling) -> Result<String> {
        let mut ids: Vec<u32> = Ends::of(&self.tokenizer).begin.into_iter().collect();
        ids.extend(self.tokenizer.encode(prompt, Special::Plain)?);
        let stops = self.tokenizer.eog().to_vec();
        let settings = GenerateSettings { n_max, sampling, stops };
        let go_on = |_| ControlFlow::Continue(());
        let ids = generate(&self.trainer().model, self.weights(), &ids, &settings, go_on)?;
        Ok(self.tokenizer.decode(&ids, Special::Plain))
    }

    /// How well the model foresees a text.
    pub fn measure(&self, text: &str) -> Result<DocScore> {
        let ends = Ends { end: None, ..Ends::of(&self.tokenizer) };
        let document = encode(&Document::whole("text", text), &self.tokenizer, ends)?;
        let (model, settings) = (&self.trainer().model, EvalSettings::new(self.context));
        let scores = measure(model, self.weights(), &[document], &settings, &mut |_, _| {})?;
        scores.into_iter().next().ok_or_else(|| Error::input("no text", "give some text"))
    }

    /// How it is trained.
    pub fn method(&self) -> &Method {
        &self.method
    }
}

fn steps(
    training: &mut Training,
    on_step: &mut dyn FnMut(u64, f32) -> ControlFlow<()>,
) -> Result<()> {
    while !training.is_done() {
        match training.step()? {
            Outcome::Made { report, .. } => {
                if on_step(training.progress().step, report.loss).is_break() {
                    break;
                }
            }
            Outcome::Diverged(why) => {
                return Err(Error::input(why, "use a smaller rate, or no `spike`"));
            }
        }
    }
    Ok(())
}
