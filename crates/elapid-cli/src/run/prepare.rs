//! From a configuration and documents to a run that can make its first step: tokenizer, model,
//! what of it is trained, and rows of tokens.

use super::config::{Origin, RunConfig, TeacherConfig};
use super::data::{Data, Gathered, Set};
use crate::files;
use crate::ranks;
use crate::report::{Done, Failure, mebibytes};
use crate::source::walk::Listing;
use elapid::Device;
use elapid::Model;
use elapid::Tokenizer;
use elapid::Training;
use elapid::{Batches, Session};
use elapid::{Coverage, Method};
use elapid::{Encoded, Ends};
use elapid::{Shape, Vocabulary};
use serde_json::Value;
use std::path::Path;

/// A run before its first step.
pub struct Prepared {
    /// The model as it was found or made, for export.
    pub session: Session,
    /// Model, data and settings.
    pub training: Training,
    /// Held-out documents.
    pub held_out: Vec<Encoded>,
    /// What is measured on besides.
    pub sets: Vec<Set>,
    /// What is trained.
    pub coverage: Coverage,
    /// A hash of everything that is frozen.
    pub frozen_hash: String,
    /// The same of a teacher whose probabilities are learned.
    pub teacher_hash: Option<String>,
}

impl Prepared {
    /// Everything that is measured on.
    pub fn measured(&self) -> impl Iterator<Item = &Encoded> {
        self.held_out.iter().chain(self.sets.iter().flat_map(|set| &set.documents))
    }

    /// Rows, passes and steps as the plan decided.
    pub fn follow(&mut self, config: &RunConfig) {
        self.training.set_rows(config.n_rows);
        self.training.settings = config.settings.clone();
        self.training.set_checkpointing(config.checkpointing);
    }
}

/// Where a new model finds its vocabulary, unless a donor has one.
#[derive(Clone, Copy)]
pub enum Texts<'a> {
    /// It is made from the documents.
    Sources(&'a Gathered),
    /// In this run directory.
    Run(&'a Path),
}

const TEXTS: [&str; 2] = ["tokenizer.json", "tokenizer_config.json"];

/// The new model of a run: with the vocabulary that the run directory holds, that of a donor or of
/// a teacher, or one made from the documents.
fn scratch(config: &RunConfig, from: Texts<'_>) -> Done<Opened> {
    let Origin::Scratch { size, arch, n_vocab, donor, config: own } = &config.origin else {
        return Err(Failure::new("the run has a base model", "this is a bug in Elapid"));
    };
    let donor = donor.as_deref().map(Model::open).transpose()?;
    let shape = Shape { size: *size, arch: *arch, context: config.context };
    let dir = match from {
        Texts::Run(dir) if dir.join(TEXTS[0]).exists() => Some(dir),
        _ => None,
    };
    let model = if let Some(dir) = dir {
        let read = |name: &'static str| Ok((name, files::read_text(&dir.join(name))?.into_bytes()));
        let texts = TEXTS.into_iter().map(read).collect::<Done<Vec<_>>>()?;
        let n_vocab = donor.as_ref().map(|donor| donor.info().map(|info| info.n_vocab));
        let of_teacher = config.teacher.as_ref().and_then(|teacher| teacher.n_vocab);
        Model::scratch(shape, Vocabulary::Files(texts, n_vocab.transpose()?.or(of_teacher)))?
    } else if let Some(donor) = &donor {
        Model::scratch(shape, Vocabulary::Of(donor))?
    } else if let (Some(teacher), 0) = (&config.teacher, *n_vocab) {
        Model::scratch(shape, Vocabulary::Of(&Model::open(&teacher.model)?))?
    } else {
        let Texts::Sources(gathered) = from else {
            let problem = format!("the run has no {}", TEXTS[0]);
            return Err(Failure::new(problem, "start a new run"));
        };
        let texts = gathered.texts()?;
        let mut texts = texts.iter().map(String::as_str);
        Model::scratch(shape, Vocabulary::New(*n_vocab, &mut texts))?
    };
    let model = match own {
        Some(own) => with_config(&model, own, config.context)?,
        None => model,
    };
    Ok(Opened { model, donor })
}

/// A new model with the vocabulary of `preset` and a configuration of one's own.
fn with_config(preset: &Model, own: &Value, context: usize) -> Done<Model> {
    let ends = Ends::of(&tokenizer_of(preset)?);
    let mut config = own.clone();
    config["vocab_size"] = preset.info()?.n_vocab.into();
    config["bos_token_id"] = ends.begin.into();
    config["eos_token_id"] = ends.end.into();
    for key in ["max_position_embeddings", "n_ctx"] {
        if config.get(key).is_some() {
            config[key] = context.into();
        }
    }
    let texts = preset.texts().map(|(name, bytes)| (name, bytes.to_vec())).collect();
    Ok(Model::fresh("new", format!("{config:#}\n"), texts)?)
}

/// Changes with what is left out, with the split, and with how texts are encoded.
const DATA_VERSION: u32 = 2;

/// What the tokens of a run depend on, as a hash; none where it cannot be told before reading.
pub fn key(
    config: &RunConfig,
    listing: &Listing,
    sets: &[(String, Listing)],
) -> Done<Option<String>> {
    let vocabulary = match &config.origin {
        _ if config.teacher.is_some() => return Ok(None),
        Origin::Scratch { donor: Some(_), .. } => return Ok(None),
        Origin::Scratch { size, n_vocab, .. } => format!("{size:?} {n_vocab}"),
        Origin::Base { model, .. } => {
            let model = Model::open(model)?;
            let tokenizer = tokenizer_of(&model)?;
            let special = [tokenizer.bos(), tokenizer.eos(), tokenizer.begin().first().copied()];
            format!("{} {special:?} {:?}", tokenizer.to_json()?, model.chat_template()?)
        }
    };
    let (files, held_out, keep) = (listing.key(), config.held_out, config.keep_secrets);
    let sets: Vec<_> = sets.iter().map(|(name, listing)| (name, listing.key())).collect();
    let text = format!("{DATA_VERSION} {files} {held_out} {keep} {sets:?} {vocabulary}");
    Ok(Some(blake3::hash(text.as_bytes()).to_string()))
}

fn tokenizer_of(model: &Model) -> Done<Tokenizer> {
    model.tokenizer()?.ok_or_else(|| {
        let problem = format!("{} holds no tokenizer", model.name());
        Failure::new(problem, "put its tokenizer.json beside the weights")
    })
}

/// Keeps the small files of a new model in the run directory.
pub fn keep_texts(checkpoint: &Model, config: &RunConfig, dir: &Path) -> Done<()> {
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
    pub model: Model,
    donor: Option<Model>,
}

impl Opened {
    /// What the documents are encoded with.
    pub fn tokenizer(&self) -> Done<Tokenizer> {
        tokenizer_of(&self.model)
    }
}

/// Opens or makes the model.
pub fn open(config: &RunConfig, from: Texts<'_>) -> Done<Opened> {
    match &config.origin {
        Origin::Base { model, adapter, .. } => {
            let mut model = Model::open(model)?;
            if let Some(adapter) = adapter {
                model = model.with_adapter(adapter);
            }
            if config.method == Method::Full {
                model = model.with_context(config.context)?;
            }
            Ok(Opened { model, donor: None })
        }
        Origin::Scratch { .. } => scratch(config, from),
    }
}

/// The model of a run with what is trained of it, and how much that is.
pub fn session(config: &RunConfig, opened: Opened, device: &Device) -> Done<(Session, Coverage)> {
    let mut session = Session::new(opened.model, device)?;
    let quant = match &config.origin {
        Origin::Base { quant, .. } => quant.as_deref(),
        Origin::Scratch { .. } => None,
    };
    let coverage = session.adapt(&config.method, quant, config.seed)?;
    if let Some(donor) = opened.donor {
        session.borrow_embedding(&donor, config.seed)?;
    }
    Ok((session, coverage))
}

/// Makes everything of a run but its plan.
pub fn prepare(config: &RunConfig, data: &Data, opened: Opened, device: &Device) -> Done<Prepared> {
    let (mut session, coverage) = session(config, opened, device)?;
    let batches = Batches {
        context: config.context,
        n_rows: config.n_rows,
        fim: config.fim,
        spm: config.spm,
        project: config.project,
        project_name: config.project_name(),
        seed: config.seed,
    };
    let mut training = session.begin_on(data.corpus.clone(), &batches, &config.settings)?;
    if let Some(group) = ranks::here().group() {
        training.join(group)?;
    }
    training.set_checkpointing(config.checkpointing);
    let frozen_hash = training.frozen_hash();
    let teacher_hash = set_teacher(config, &mut training)?;
    let (held_out, sets) = data.measured(config)?;
    Ok(Prepared { session, training, held_out, sets, coverage, frozen_hash, teacher_hash })
}

/// Gives a run its teacher, where its probabilities are learned; a hash of it.
fn set_teacher(config: &RunConfig, training: &mut Training) -> Done<Option<String>> {
    let Some(TeacherConfig { model, hash, n_tok: None, .. }) = &config.teacher else {
        return Ok(None);
    };
    let found = training.set_teacher(&Model::open(model)?)?;
    if hash.as_ref().is_some_and(|hash| *hash != found) {
        let shown = model.display();
        let problem = format!("the teacher {shown} is not the one this run started with");
        return Err(Failure::new(problem, "restore the old one, or start a new run"));
    }
    Ok(Some(found))
}

/// Puts down which teacher it is, and the size of a vocabulary that is taken from it.
pub fn keep_teacher(config: &mut RunConfig, prepared: &Prepared) -> Done<()> {
    let Some(teacher) = &mut config.teacher else { return Ok(()) };
    teacher.hash = prepared.teacher_hash.clone();
    if let Origin::Scratch { n_vocab: 0, donor: None, .. } = config.origin {
        teacher.n_vocab = Some(prepared.session.model().info()?.n_vocab);
    }
    Ok(())
}

/// Refuses a run that cannot fit, before anything large is taken.
pub fn check_least(config: &RunConfig, opened: &Opened, limit: u64) -> Done<()> {
    let n = opened.model.n_params() as u64;
    let least = match config.method {
        // Weights, gradients and at least one moment.
        Method::Full => 12 * n,
        Method::Lora(_) | Method::Bc | Method::Embeddings => n / 2,
    };
    let least = match &config.teacher {
        Some(TeacherConfig { model, n_tok: None, .. }) => {
            least + Model::open(model)?.n_params() as u64 / 2
        }
        _ => least,
    };
    if least <= limit {
        return Ok(());
    }
    let problem = format!(
        "not enough memory: weights, gradients and moments alone need {}, the limit is {}",
        mebibytes(least as f64),
        mebibytes(limit as f64)
    );
    let hint = match config.origin {
        Origin::Scratch { .. } => "choose a smaller --preset or --vocab, or raise --memory",
        Origin::Base { .. } => "use `--method lora` or `qlora`, or raise --memory",
    };
    Err(Failure::new(problem, hint))
}
