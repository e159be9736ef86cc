//! `elapid adapt`: a model learns a project and proves that it predicts what was written later.

mod course;
mod lessons;

use crate::base;
use crate::commands::train::{positive, run_of};
use crate::compute::Compute;
use crate::files;
use crate::project::Project;
use crate::proof::certificate::{self, Certificate, Sealed};
use crate::report::live::Live;
use crate::report::{Done, Failure, between};
use crate::run::config::{Origin, RunConfig};
use crate::run::{self, Wishes};
use crate::source::walk::{Secrets, Walk, chat_of};
use elapid::{Adapter, Method, Model, Schedule};
use lessons::Told;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// What is trained when nobody says: of models with fewer parameters than this.
const METHOD_BY_SIZE: [(usize, MethodName); 2] =
    [(60_000_000, MethodName::Full), (usize::MAX, MethodName::Lora)];

/// How, as flags of `elapid train`.
const FLAGS: [(MethodName, &str); 3] = [
    (MethodName::Full, "--optimizer adamw --lr 2e-4"),
    (MethodName::Lora, "--optimizer adamw --lr 4e-4 --rank 16"),
    (MethodName::Bc, "--optimizer adamw --lr 1e-3"),
];

/// Share of the text that is rearranged for fill-in-the-middle, where the model can do it.
const FIM: f64 = 0.25;

/// Share of the text that is shown after other files of the project, where the model knows how.
const PROJECT: f64 = 0.5;

/// Tokens of a step: one row, where the model reads so many at once. Short rows cost general
/// ability (decision 0039).
const CONTEXT: usize = 2048;

/// Passes over the text at most.
const EPOCHS: f64 = 3.0;

/// Share of the steps in which the rate falls: while it is high, general ability is lost.
const DECAY: f64 = 0.8;

/// How often documents are drawn that an earlier run has learned, beside changed ones.
const OLD_WEIGHT: f64 = 0.1;
/// Minutes at least of a run that continues another.
const MINUTES_MIN: f64 = 1.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum MethodName {
    /// Low-rank adapters beside frozen matrices
    Lora,
    /// Every parameter
    Full,
    /// Only the projections that produce B and C of Mamba layers
    Bc,
}

/// Adapt a model to the project under PATH, and prove that it got better.
///
/// The model learns the project as it was some commits ago and is measured on what was written
/// since: new files, and lines added to old ones, each in a context that holds only what was there
/// before. Without enough history in git a part of the files is held out instead. The result lies
/// in .elapid/adapt/N of the project, with a certificate that `elapid verify` checks. A second time
/// it continues with what changed, which is much shorter.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid adapt\n  \
    elapid adapt src --minutes 3\n  \
    elapid adapt . --model SmolLM2-135M.gguf --method lora --rank 8\n\n\
    The exit code is 0 when the model is better or there is too little text to tell, 3 when it is \
    not better.")]
pub struct Adapt {
    /// Directory of the project, or of a part of it
    #[arg(default_value = ".", hide_default_value = true)]
    path: PathBuf,
    /// Model to adapt: directory, .gguf or .elapid file [default: elapid-code, which is built in]
    #[arg(long, value_name = "M")]
    model: Option<PathBuf>,
    /// Time in all, the proof included
    #[arg(long, value_name = "N", default_value_t = 10.0, value_parser = positive)]
    minutes: f64,
    /// Optimizer steps, whatever time they take [default: from --minutes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// What to train [default: full below 60 M parameters, else lora]
    #[arg(long, value_enum, value_name = "M")]
    method: Option<MethodName>,
    /// LoRA rank [default: 16]
    #[arg(long, value_name = "N", value_parser = between(1, 4096))]
    rank: Option<usize>,
    /// Peak learning rate [default: by --method]
    #[arg(long, value_name = "X")]
    lr: Option<f64>,
    /// Start at the model, not at what an earlier run made of it
    #[arg(long)]
    fresh: bool,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Learn keys, tokens, passwords and e-mail addresses as they are
    #[arg(long)]
    keep_secrets: bool,
    #[command(flatten)]
    compute: Compute,
    /// List every file that is skipped and every secret that is replaced
    #[arg(long)]
    verbose: bool,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// The base model.
struct Base {
    path: PathBuf,
    hash: String,
    model: Model,
}

/// An earlier run on the same base that is finished.
struct Earlier {
    dir: PathBuf,
    certificate: Certificate,
}

impl Adapt {
    pub fn run(&self) -> Done<ExitCode> {
        let begin = Instant::now();
        let cannot = |path: &Path| {
            let path = path.to_path_buf();
            |source| Failure::from(elapid::Error::Read { path, source })
        };
        Failure::unless_there(&self.path, "the directory of a project, or a file in it")?;
        let path = self.path.canonicalize().map_err(cannot(&self.path))?;
        let root = Project::of(&path).root;
        let base = self.base()?;
        let (template, options) = chat_of(&base.model)?;
        let secrets = if self.keep_secrets { Secrets::Keep } else { Secrets::Replace };
        let walk = Walk { template, options, secrets, ..Walk::default() };
        // Flags that do not fit are told before anything is read.
        let (_, wishes) = run_of(&self.flags(&base, (self.minutes, 1.0))?)?;
        let live = Wishes { json: self.json, ..wishes }.live();
        files::make_directory(&root.join(".elapid"))?;
        files::write_bytes(&root.join(".elapid/.gitignore"), b"*\n")?;
        let dir = run::claim(None, &root.join(".elapid/adapt"))?;
        let place = Place { path, root, dir: dir.clone() };
        let done = self.run_in(place, base, walk, live, begin);
        for name in [lessons::TREE, lessons::REPLAY] {
            let _ = std::fs::remove_file(dir.join(name));
        }
        if !dir.join("config.json").exists() {
            let _ = std::fs::remove_file(dir.join(certificate::HELD_OUT));
            run::give_back(&dir);
        }
        done
    }

    fn run_in(
        &self,
        place: Place,
        base: Base,
        walk: Walk,
        mut live: Live,
        begin: Instant,
    ) -> Done<ExitCode> {
        let Place { path, root, dir } = place;
        let told = if self.verbose { Told::All } else { Told::Table };
        let mut lesson = lessons::find(&path, &dir, &walk, told, &mut live)?;
        let earlier = match self.fresh {
            true => None,
            false => self.earlier(&root, &base).filter(|it| lesson.continues(&path, it)),
        };
        if let Some(earlier) = &earlier {
            lesson = lesson.after(&earlier.certificate);
            let (percent, of) = (100.0 * lesson.changed, earlier.dir.display());
            if lesson.changed == 0.0 {
                live.line("adapt", &format!("nothing to learn is new since {of}"));
                return Ok(ExitCode::SUCCESS);
            }
            live.line("adapt", &format!("continues {of}: {percent:.1}% of the text is new to it"));
        }
        let minutes = match &earlier {
            None => self.minutes,
            Some(_) => self.minutes.min((self.minutes * lesson.changed).max(MINUTES_MIN)),
        };
        course::Task { args: self, base, dir, earlier, minutes, begin, live }.run(lesson, walk)
    }

    fn base(&self) -> Done<Base> {
        let path = match &self.model {
            Some(model) => run::usable(model)?,
            None => base::path()?,
        };
        let model = Model::open(&path)?;
        let path = std::path::absolute(&path).unwrap_or(path);
        Ok(Base { hash: certificate::hash(&path)?, path, model })
    }

    /// The newest finished run in the project that began with the same base and did no harm.
    fn earlier(&self, root: &Path, base: &Base) -> Option<Earlier> {
        let entries = std::fs::read_dir(root.join(".elapid/adapt")).into_iter().flatten().flatten();
        let number = |entry: std::fs::DirEntry| {
            let number = entry.file_name().to_str()?.parse::<u64>().ok()?;
            Some((number, entry.path()))
        };
        let mut runs: Vec<(u64, PathBuf)> = entries.filter_map(number).collect();
        runs.sort();
        for (_, dir) in runs.into_iter().rev() {
            let Ok((certificate, Sealed::Intact, _)) = Certificate::read(&dir) else { continue };
            let is_same = certificate.base.hash == base.hash
                && certificate.adapter.method == self.method(base).to_string()
                && self.method(base) != MethodName::Bc
                && certificate::hash(&dir.join(&certificate.model))
                    .is_ok_and(|hash| hash == certificate.adapter.hash);
            if is_same && certificate.verdict != "worse" {
                return Some(Earlier { dir, certificate });
            }
        }
        None
    }

    fn method(&self, base: &Base) -> MethodName {
        let n_params = base.model.n_params();
        let by_size = METHOD_BY_SIZE.iter().find(|(below, _)| n_params < *below);
        self.method.or(by_size.map(|pair| pair.1)).unwrap_or(MethodName::Lora)
    }

    /// The flags of `elapid train` that this is: so many minutes until the end of training, or a
    /// share of the steps that were asked for.
    fn flags(&self, base: &Base, (minutes, share): (f64, f64)) -> Done<Vec<String>> {
        let name = self.method(base);
        let mut flags: Vec<String> = vec![self.path.display().to_string()];
        let mut add = |name: &str, value: String| flags.extend([format!("--{name}"), value]);
        add("model", base.path.display().to_string());
        add("method", name.to_string());
        let chosen = FLAGS.iter().find(|pair| pair.0 == name).map_or("", |pair| pair.1);
        let mut words = chosen.split(' ');
        while let (Some(flag), Some(value)) = (words.next(), words.next()) {
            let own = match flag {
                "--lr" => self.lr.map(|lr| lr.to_string()),
                "--rank" => self.rank.map(|rank| rank.to_string()),
                _ => None,
            };
            add(flag.trim_start_matches('-'), own.unwrap_or(value.to_string()));
        }
        if self.rank.is_some() && name != MethodName::Lora {
            let problem = format!("`--rank` has no effect with `--method {name}`");
            return Err(Failure::new(problem, "remove it, or use `--method lora`"));
        }
        let fim = base.model.tokenizer()?.and_then(|tokenizer| tokenizer.fim());
        add("fim", if fim.is_some() { FIM } else { 0.0 }.to_string());
        let has_sep = fim.is_some_and(|fim| fim.sep.is_some());
        add("project", if has_sep { PROJECT } else { 0.0 }.to_string());
        let n_ctx = base.model.info()?.n_ctx.unwrap_or(CONTEXT).min(CONTEXT);
        add("context", n_ctx.to_string());
        add("batch", (CONTEXT / n_ctx.max(1)).to_string());
        add("seed", self.seed.to_string());
        match self.steps {
            Some(n) => add("steps", ((n as f64 * share).ceil() as u64).max(1).to_string()),
            None => {
                add("minutes", format!("{minutes:.3}"));
                add("epochs", EPOCHS.to_string());
            }
        }
        if self.keep_secrets {
            flags.push("--keep-secrets".into());
        }
        Ok(flags)
    }

    /// The run that this trains by.
    fn config(
        &self,
        base: &Base,
        earlier: Option<&Earlier>,
        end: (f64, f64),
    ) -> Done<(RunConfig, Wishes)> {
        let (mut config, mut wishes) = run_of(&self.flags(base, end)?)?;
        wishes.compute = self.compute.clone();
        (wishes.verbose, wishes.json) = (self.verbose, self.json);
        config.settings.schedule = Schedule::Wsd { decay: DECAY };
        if let Some(Earlier { dir, certificate }) = earlier {
            let place = dir.join(&certificate.model);
            let Origin::Base { model, adapter, .. } = &mut config.origin else {
                return Err(Failure::new("there is no base model", "this is a bug in Elapid"));
            };
            match &mut config.method {
                Method::Lora(settings) => {
                    let info = Adapter::open(&place)?.info()?;
                    settings.rank = info.modules.first().map_or(settings.rank, |one| one.1);
                    settings.alpha = info.alphas.first().copied().unwrap_or(settings.alpha);
                    *adapter = Some(place);
                }
                _ => *model = place,
            }
        }
        Ok((config, wishes))
    }
}

/// Where it happens.
struct Place {
    path: PathBuf,
    /// Of the project.
    root: PathBuf,
    /// Of the run.
    dir: PathBuf,
}

impl std::fmt::Display for MethodName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            MethodName::Lora => "lora",
            MethodName::Full => "full",
            MethodName::Bc => "bc",
        })
    }
}
