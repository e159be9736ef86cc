//! What a run is, resolved: everything that decides its numbers, as `config.json` of the run.

use crate::compute::Place;
use crate::files;
use crate::ranks;
use crate::report::{Done, Failure};
use elapid::Method;
use elapid::Settings;
use elapid::{Arch, Size};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Version of Elapid that started it.
    pub version: String,
    /// What is learned from.
    pub source: PathBuf,
    /// The same with weights, where there are several or their weight is not 1.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<(PathBuf, f64)>,
    /// Share of the files that is held out.
    pub held_out: f64,
    /// Whether keys, passwords and addresses in the text are learned.
    #[serde(default)]
    pub keep_secrets: bool,
    /// What else is measured on: names and paths.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evals: Vec<(String, PathBuf)>,
    /// What is trained.
    pub origin: Origin,
    /// How.
    pub method: Method,
    /// Share of the text that is rearranged for fill-in-the-middle.
    pub fim: f64,
    /// Share of that in the order suffix, prefix, middle.
    pub spm: f64,
    /// Share of the text that is shown after other files of its project, with their paths.
    #[serde(default)]
    pub project: f64,
    /// Whether each folder directly under a source is a project, or all of it is one.
    #[serde(default)]
    pub projects: bool,
    /// Tokens in a row.
    pub context: usize,
    /// Rows in a batch.
    pub n_rows: usize,
    /// Whether activations are computed again in backward instead of kept.
    pub checkpointing: bool,
    /// Steps between two measurements on held-out files.
    pub eval_every: u64,
    /// Tokens of held-out files that are measured in between, about.
    pub n_eval_tok: usize,
    /// Tokens of held-out files that are measured before and after, about.
    pub n_final_tok: usize,
    /// Steps between two checkpoints, once the first was written.
    pub save_every: Option<u64>,
    /// How long it is; `Steps` once that is decided.
    pub budget: Budget,
    /// Measurements without improvement before the run ends.
    pub patience: Option<u32>,
    /// Of everything that is drawn.
    pub seed: u64,
    /// Rate, schedule, optimizer, temperature and share of a teacher.
    pub settings: Settings,
    /// Whom it learns from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherConfig>,
    /// Where it started. Older runs lack it.
    #[serde(default)]
    pub place: Option<Place>,
}

/// A model that another one learns from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TeacherConfig {
    /// Its path.
    pub model: PathBuf,
    /// Of its weights, where its probabilities are learned.
    pub hash: Option<String>,
    /// Tokens that it writes, where these are learned instead.
    pub n_tok: Option<usize>,
    /// Rows of the embedding of a new model that has its vocabulary.
    pub n_vocab: Option<usize>,
}

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Budget {
    /// So many steps.
    Steps(u64),
    /// So many tokens.
    Tokens(u64),
    /// So many minutes, from the start of the command to its end.
    Minutes(f64),
}

/// Where the model comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum Origin {
    /// Fresh numbers in the shape of a preset.
    Scratch {
        /// Its size.
        size: Size,
        /// Its architecture.
        arch: Arch,
        /// Tokens of the new vocabulary, at most.
        n_vocab: usize,
        /// A model whose tokenizer and embedding are used.
        donor: Option<PathBuf>,
        /// A config.json to use instead of that of the preset.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        config: Option<serde_json::Value>,
    },
    /// A model that is there.
    Base {
        /// Its path.
        model: PathBuf,
        /// The blocks its matrices are held in, other than as stored.
        quant: Option<String>,
        /// An adapter of it that is continued.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        adapter: Option<PathBuf>,
    },
}

const FILE: &str = "config.json";

impl RunConfig {
    /// What is learned from, and how often in an epoch.
    pub fn sources(&self) -> Vec<(PathBuf, f64)> {
        match self.sources.is_empty() {
            true => vec![(self.source.clone(), 1.0)],
            false => self.sources.clone(),
        }
    }

    /// What a project is called: the folder that is learned from.
    pub fn project_name(&self) -> Option<String> {
        let path = self.source.canonicalize().unwrap_or_else(|_| self.source.clone());
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        (!self.projects).then_some(name)
    }

    /// Of the run in `dir`.
    pub fn read(dir: &Path) -> Done<RunConfig> {
        let path = dir.join(FILE);
        if !path.exists() {
            let problem = format!("{} is not a run: it has no {FILE}", dir.display());
            return Err(Failure::new(problem, "give a directory that `elapid train` created"));
        }
        serde_json::from_str(&files::read_text(&path)?).map_err(|error| {
            let hint = "the run may come from another version of Elapid";
            Failure::new(format!("{}: {error}", path.display()), hint)
        })
    }

    /// Into `dir`, by the first rank.
    pub fn write(&self, dir: &Path) -> Done<()> {
        if !ranks::here().is_first() {
            return Ok(());
        }
        let json = serde_json::to_vec_pretty(self)
            .map_err(|error| Failure::new(error, "this is a bug in Elapid"))?;
        Ok(files::write_bytes(&dir.join(FILE), &json)?)
    }
}
