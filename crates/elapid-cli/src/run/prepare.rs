//! From a configuration and documents to a run that can make its first step: tokenizer, model,
//! what of it is trained, and rows of tokens.

use super::config::{Origin, RunConfig};
use super::data::Data;
use crate::files;
use crate::report::{Done, Failure, mebibytes};
use elapid::data::fim_training::FimTraining;
use elapid::data::pack::{LoadSettings, Loader, Order};
use elapid::data::{Encoded, Ends, encode};
use elapid::model::Model;
use elapid::model::checkpoint::Checkpoint;
use elapid::model::weights::Weights;
use elapid::tensor::device::Device;
use elapid::text::tokenizer::Tokenizer;
use elapid::train::lens::Lens;
use elapid::train::method::{self, Coverage, Method};
use elapid::train::scratch::{self, Shape, Texts, tokenizer_of};
use elapid::train::{Trainer, Training};
use std::path::Path;
use std::sync::Arc;

/// A run before its first step.
pub struct Prepared {
    /// The model as it was found or made, for export.
    pub checkpoint: Checkpoint,
    /// Text to ids.
    pub tokenizer: Arc<Tokenizer>,
    /// Model, data and settings.
    pub training: Training,
    /// Held-out documents, without the token that ends them: no text stands behind it.
    pub held_out: Vec<Encoded>,
    /// What is trained.
    pub coverage: Coverage,
    /// A hash of everything that is frozen.
    pub frozen_hash: String,
}

impl Prepared {
    /// Rows, passes and steps as the plan decided.
    pub fn follow(&mut self, config: &RunConfig) {
        self.training.loader.set_rows(config.n_rows);
        self.training.settings = config.settings.clone();
        self.training.trainer.options.checkpoint = config.checkpointing;
    }
}

/// The small files of a new model: from the run directory if they are there, else made.
fn scratch_texts(
    config: &RunConfig,
    data: &Data,
    dir: Option<&Path>,
    donor: Option<&Checkpoint>,
) -> Done<Texts> {
    const NAMES: [&str; 2] = ["tokenizer.json", "tokenizer_config.json"];
    let Origin::Scratch { n_vocab, .. } = &config.origin else { return Ok(Vec::new()) };
    if let Some(dir) = dir.filter(|dir| dir.join(NAMES[0]).exists()) {
        let read = |name: &'static str| Ok((name, files::read_text(&dir.join(name))?.into_bytes()));
        return NAMES.into_iter().map(read).collect();
    }
    if let Some(donor) = donor {
        return Ok(scratch::vocabulary_of(donor)?);
    }
    let texts: Vec<_> = data.training.iter().map(|document| document.text()).collect();
    let mut texts = texts.iter().map(|text| text.as_ref());
    Ok(scratch::vocabulary(*n_vocab, config.context, &mut texts)?)
}

/// Keeps the small files of a new model in the run directory.
pub fn keep_texts(checkpoint: &Checkpoint, config: &RunConfig, dir: &Path) -> Done<()> {
    if matches!(config.origin, Origin::Scratch { .. }) {
        for (name, bytes) in checkpoint.texts() {
            files::write_bytes(&dir.join(name), bytes)?;
        }
    }
    Ok(())
}

/// The model of a run, with its tokenizer; weights are not made yet.
pub struct Opened {
    /// The model as it was found or made.
    pub checkpoint: Checkpoint,
    /// Text to ids.
    pub tokenizer: Arc<Tokenizer>,
    donor: Option<Checkpoint>,
}

/// Opens or makes the model.
pub fn open(config: &RunConfig, data: &Data, dir: Option<&Path>) -> Done<Opened> {
    let (size, arch, donor) = match &config.origin {
        Origin::Base { model, .. } => {
            let checkpoint = files::open(model)?;
            let tokenizer = Arc::new(tokenizer_of(&checkpoint)?);
            return Ok(Opened { checkpoint, tokenizer, donor: None });
        }
        Origin::Scratch { size, arch, donor, .. } => (*size, *arch, donor),
    };
    let donor = donor.as_deref().map(files::open).transpose()?;
    let texts = scratch_texts(config, data, dir, donor.as_ref())?;
    let n_vocab = donor.as_ref().map(|donor| donor.model().config().n_vocab);
    let shape = Shape { size, arch, context: config.context };
    let checkpoint = scratch::checkpoint(shape, texts, n_vocab)?;
    let tokenizer = Arc::new(tokenizer_of(&checkpoint)?);
    Ok(Opened { checkpoint, tokenizer, donor })
}

/// Bytes that a run needs whatever its batch is, before any of them are taken.
pub fn least_bytes(config: &RunConfig, opened: &Opened) -> u64 {
    let model = opened.checkpoint.model();
    let n_elem = |shape: &[usize]| shape.iter().product::<usize>() as u64;
    let n: u64 = model.specs().iter().map(|spec| n_elem(&spec.shape)).sum();
    match config.method {
        // Weights, gradients and at least one moment.
        Method::Full => 12 * n,
        Method::Lora(_) | Method::Bc | Method::Embeddings => n / 2,
    }
}

/// Makes everything of a run but its plan.
pub fn prepare(config: &RunConfig, data: &Data, opened: Opened, device: &Device) -> Done<Prepared> {
    let Opened { checkpoint, tokenizer, donor } = opened;
    let model = Model::new(checkpoint.model().config().clone());
    let mut weights = match &config.origin {
        Origin::Scratch { .. } => Weights::init(device, model.specs(), config.seed),
        Origin::Base { .. } => checkpoint.weights(device)?,
    };
    if let Origin::Base { quant: Some(quant), .. } = &config.origin {
        method::quantize(&mut weights, quant)?;
    }
    let coverage = method::apply(&config.method, &model, &mut weights, config.seed)?;
    let lens = donor.map(|donor| {
        let donated = donor.weights(device)?;
        let name = &donor.model().config().embed_name;
        let id = donated.find(name).expect("a model has an embedding");
        Lens::attach(&model, &mut weights, donated.tensor(id), config.seed)
    });
    let lens = lens.transpose()?;
    let mut trainer = Trainer::with(model, weights, config.settings.optimizer);
    trainer.lens = lens;
    let frozen_hash = device.run(|| trainer.frozen_hash());
    trainer.options.checkpoint = config.checkpointing;
    let ends = Ends::of(&tokenizer);
    let fim = fim_settings(config, &tokenizer)?;
    let settings = LoadSettings {
        context: config.context,
        n_rows: config.n_rows.max(1),
        seed: config.seed,
        fim,
        ends,
        shuffle: Order::Shuffled,
    };
    let encoded = data.training.iter().map(|document| encode(document, &tokenizer, ends));
    let encoded = encoded.collect::<Result<Vec<_>, _>>()?;
    let loader = Loader::new(encoded, settings, tokenizer.clone())?;
    let training = Training::new(trainer, loader, config.settings.clone())?;
    let read = Ends { end: None, ..ends };
    let held_out = data.held_out.iter().map(|document| encode(document, &tokenizer, read));
    let held_out = held_out.collect::<Result<Vec<_>, _>>()?;
    Ok(Prepared { checkpoint, tokenizer, training, held_out, coverage, frozen_hash })
}

fn fim_settings(config: &RunConfig, tokenizer: &Tokenizer) -> Done<Option<FimTraining>> {
    if config.fim == 0.0 {
        return Ok(None);
    }
    let tokens = tokenizer.fim().ok_or_else(|| {
        let problem = "the vocabulary has no tokens for filling in the middle";
        Failure::new(problem, "use `--fim 0`, or a model for code")
    })?;
    Ok(Some(FimTraining { rate: config.fim, spm: config.spm, tokens }))
}

/// Refuses a run that cannot fit, before anything large is taken.
pub fn check_least(config: &RunConfig, opened: &Opened, limit: u64) -> Done<()> {
    let least = least_bytes(config, opened);
    if least <= limit {
        return Ok(());
    }
    let problem = format!(
        "weights, gradients and moments alone take {}, there are {}",
        mebibytes(least as f64),
        mebibytes(limit as f64)
    );
    let hint = match config.origin {
        Origin::Scratch { .. } => "choose a smaller --preset or --vocab, or raise --memory",
        Origin::Base { .. } => "use `--method lora` or `qlora`, or raise --memory",
    };
    Err(Failure::new(problem, hint))
}
