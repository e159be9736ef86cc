//! From a configuration and documents to a run that can make its first step: tokenizer, model,
//! what of it is trained, and rows of tokens.

use super::config::{Origin, RunConfig};
use super::data::Data;
use crate::files;
use crate::report::{Done, Failure, mebibytes};
use elapid::data::Encoded;
use elapid::model::checkpoint::Checkpoint;
use elapid::session::{Batches, Session};
use elapid::tensor::device::Device;
use elapid::train::Training;
use elapid::train::method::{Coverage, Method};
use elapid::train::scratch::{self, Shape, Texts};
use std::path::Path;

/// A run before its first step.
pub struct Prepared {
    /// The model as it was found or made, for export.
    pub session: Session,
    /// Model, data and settings.
    pub training: Training,
    /// Held-out documents.
    pub held_out: Vec<Encoded>,
    /// What is trained.
    pub coverage: Coverage,
    /// A hash of everything that is frozen.
    pub frozen_hash: String,
}

impl Prepared {
    /// Rows, passes and steps as the plan decided.
    pub fn follow(&mut self, config: &RunConfig) {
        self.training.set_rows(config.n_rows);
        self.training.settings = config.settings.clone();
        self.training.set_checkpointing(config.checkpointing);
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

/// The model of a run; weights are not made yet.
pub struct Opened {
    /// The model as it was found or made.
    pub model: Checkpoint,
    donor: Option<Checkpoint>,
}

/// Opens or makes the model.
pub fn open(config: &RunConfig, data: &Data, dir: Option<&Path>) -> Done<Opened> {
    let (size, arch, donor) = match &config.origin {
        Origin::Base { model, .. } => {
            return Ok(Opened { model: Checkpoint::open(model)?, donor: None });
        }
        Origin::Scratch { size, arch, donor, .. } => (*size, *arch, donor),
    };
    let donor = donor.as_deref().map(Checkpoint::open).transpose()?;
    let texts = scratch_texts(config, data, dir, donor.as_ref())?;
    let n_vocab = donor.as_ref().map(|donor| donor.model().config().n_vocab);
    let shape = Shape { size, arch, context: config.context };
    Ok(Opened { model: scratch::checkpoint(shape, texts, n_vocab)?, donor })
}

/// Makes everything of a run but its plan.
pub fn prepare(config: &RunConfig, data: &Data, opened: Opened, device: &Device) -> Done<Prepared> {
    let mut session = Session::new(opened.model, device)?;
    let quant = match &config.origin {
        Origin::Base { quant, .. } => quant.as_deref(),
        Origin::Scratch { .. } => None,
    };
    let coverage = session.adapt(&config.method, quant, config.seed)?;
    if let Some(donor) = opened.donor {
        session.borrow_embedding(&donor, config.seed)?;
    }
    let batches = Batches {
        context: config.context,
        n_rows: config.n_rows,
        fim: config.fim,
        spm: config.spm,
        seed: config.seed,
    };
    let mut training = session.begin(&data.training, &batches, &config.settings)?;
    training.set_checkpointing(config.checkpointing);
    let frozen_hash = training.frozen_hash();
    let held_out = data.held_out.iter().map(|document| session.encode(document));
    let held_out = held_out.collect::<Result<Vec<_>, _>>()?;
    Ok(Prepared { session, training, held_out, coverage, frozen_hash })
}

/// Refuses a run that cannot fit, before anything large is taken.
pub fn check_least(config: &RunConfig, opened: &Opened, limit: u64) -> Done<()> {
    let n = opened.model.n_params() as u64;
    let least = match config.method {
        // Weights, gradients and at least one moment.
        Method::Full => 12 * n,
        Method::Lora(_) | Method::Bc | Method::Embeddings => n / 2,
    };
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
