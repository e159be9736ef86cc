//! A run: prepared, planned, driven, finished. The engine makes the steps; here are files, the
//! clock, and what a person sees.
//!
//! The directory of a run:
//!
//!     config.json              everything that decides its numbers, and what the clock decided
//!     data.elapid  tokens.bin  the documents, as they were: index and tokens
//!     plan.json  before.json   the estimate; how the model measured before
//!     tokenizer.json           of a new model
//!     teacher.jsonl            what a teacher of another vocabulary wrote
//!     checkpoints/             to resume from
//!     metrics.jsonl  events.*  every step; the same for TensorBoard
//!     samples.jsonl            what the model wrote
//!     model/ or adapter/       what came of it, for other tools too
//!     report.html              to read

pub mod checkpoints;
pub mod config;
mod data;
mod drive;
mod finish;
mod interrupt;
mod log;
mod outside;
pub mod pace;
pub mod plan;
mod prepare;
mod record;
mod sample;
pub mod shared;
mod teacher;

use crate::compute::Compute;
use crate::files;
use crate::ranks;
use crate::report::live::{Live, Output};
use crate::report::reading::waiting;
use crate::report::{Done, Failure, beyond_trained, count, line};
use crate::source::entry::Entry;
use crate::source::left_out;
use crate::source::walk::{self, Collected, Secrets, Walk};
pub use finish::TRAINED;
pub use outside::{export_name, look, usable};

use config::{Budget, Origin, RunConfig, TeacherConfig};
use data::{Data, Facts, Gathered};
use drive::Purpose;
use elapid::Device;
use elapid::Model;
use elapid::Size;
use plan::Plan;
use prepare::{Opened, Prepared, Texts};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

/// Whether activations are recomputed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Checkpointing {
    /// Only if memory is short
    Auto,
    /// Recompute
    On,
    /// Store
    Off,
}

/// What a person asked for that is not in the configuration: it is decided by the plan, or does
/// not change the numbers.
#[derive(Clone, Debug)]
pub struct Wishes {
    /// How long, where somebody said.
    pub budget: Option<Budget>,
    /// Tokens in a row.
    pub context: Option<usize>,
    /// Tokens that rows are cut to before the rate falls; 0 for none.
    pub short_rows: Option<usize>,
    /// Rows in a step.
    pub n_rows: Option<usize>,
    /// Passes in a step.
    pub n_accumulate: Option<usize>,
    /// Whether activations are kept.
    pub checkpointing: Checkpointing,
    /// Steps between two measurements.
    pub eval_every: Option<u64>,
    /// Steps between two checkpoints.
    pub save_every: Option<u64>,
    /// Steps over which the rate rises.
    pub n_warmup: Option<u64>,
    /// Passes over the text at most.
    pub n_epochs: Option<f64>,
    /// Bytes to stay within.
    pub memory: Option<u64>,
    /// Device and threads.
    pub compute: Compute,
    /// List every file that is left out.
    pub verbose: bool,
    /// JSON lines.
    pub json: bool,
}

impl Wishes {
    fn device(&self) -> Done<Device> {
        self.compute.open()
    }

    /// Of several ranks the first is seen.
    pub fn live(&self) -> Live {
        let ranks = ranks::here();
        let live = Live::new(match ranks.is_first() {
            false => Output::Plain(Box::new(std::io::sink())),
            true if self.json => Output::json(),
            true => Output::for_people(),
        });
        if ranks.is_alone() { live } else { live.of_rank(ranks.rank) }
    }
}

/// `elapid train PATH`.
pub fn begin(config: RunConfig, out: Option<&Path>, wishes: &Wishes) -> Done<ExitCode> {
    let begin = Instant::now();
    let dir = ranks::here().tell(|| claim(out, Path::new("runs")))?;
    let gather =
        |config: &mut RunConfig, live: &mut Live| collect(config, Some(&dir), wishes, live);
    match prepare_run(&dir, config, wishes, begin, gather) {
        Ok(run) => run.start(),
        Err(failure) => {
            if ranks::here().is_first() {
                give_back(&dir);
            }
            Err(failure)
        }
    }
}

/// What a run is given to learn from.
pub struct Lessons {
    pub training: Vec<Entry>,
    pub left_out: Value,
    pub walk: Walk,
}

/// A run in `dir`, which was claimed, on documents that were gathered; `begin` is when its time
/// began. Measures nothing and says nothing of its result: the caller does. Returns how many steps
/// it made; none if it was interrupted.
pub fn learn(
    config: RunConfig,
    dir: &Path,
    wishes: &Wishes,
    begin: Instant,
    lessons: Lessons,
) -> Done<Option<u64>> {
    let Lessons { training, left_out, walk } = lessons;
    let run = prepare_run(dir, config, wishes, begin, |_, _| {
        let facts = Facts {
            split: "in this run".into(),
            left_out,
            n_training: training.len(),
            n_bytes: training.iter().map(Entry::n_bytes).sum(),
            ..Facts::default()
        };
        Ok(Gathered { training, facts, walk, ..Gathered::default() })
    })?;
    drive::Run { purpose: Purpose::Adapt, ..run }.start()?;
    let summary = dir.join(finish::SUMMARY);
    let end = || RunConfig::read(dir).map(|config| config.settings.end());
    summary.exists().then(end).transpose()
}

/// Takes back what a run that did not come to its first step has written; a directory with anything
/// else in it stays.
pub fn give_back(dir: &Path) {
    Data::remove(dir);
    let _ = std::fs::remove_file(dir.join(".gitignore"));
    let _ = std::fs::remove_dir(dir);
}

/// Everything before the first step.
fn prepare_run(
    dir: &Path,
    mut config: RunConfig,
    wishes: &Wishes,
    begin: Instant,
    gather: impl FnOnce(&mut RunConfig, &mut Live) -> Done<Gathered>,
) -> Done<drive::Run> {
    let mut live = wishes.live();
    let first = ranks::here().is_first();
    let gathered = first.then(|| gather(&mut config, &mut live)).transpose()?;
    let device = wishes.device()?;
    config.place = Some(wishes.compute.place(&device));
    let (data, mut prepared, plan) =
        set_up(&mut config, gathered, (&device, dir), wishes, &mut live)?;
    if first {
        prepare::keep_texts(prepared.session.model(), &config, dir)?;
        write_json(&dir.join("plan.json"), &plan)?;
    }
    prepared.follow(&config);
    shared::expect_same(&config, &data, &prepared)?;
    // Last: a directory with a configuration can be resumed.
    config.write(dir)?;
    let (dir, purpose) = (dir.to_path_buf(), Purpose::Train);
    Ok(drive::Run { dir, config, data, plan, prepared, device, live, begin, purpose })
}

/// `elapid train --resume RUN`.
pub fn resume(dir: &Path, wishes: &Wishes) -> Done<ExitCode> {
    let begin = Instant::now();
    let live = wishes.live();
    let mut config = RunConfig::read(dir)?;
    plan::divide_again(&mut config)?;
    let data = Data::read(dir)?;
    let plan: Plan = read_json(&dir.join("plan.json"))?;
    let device = wishes.compute.open_again(config.place.as_ref())?;
    let opened = prepare::open(&config, Texts::Run(dir))?;
    let prepared = prepare::prepare(&config, &data, opened, &device)?;
    shared::expect_same(&config, &data, &prepared)?;
    let (dir, purpose) = (dir.into(), Purpose::Train);
    drive::Run { dir, config, data, plan, prepared, device, live, begin, purpose }
        .resume(wishes.budget)
}

/// `elapid plan PATH`.
pub fn plan_only(mut config: RunConfig, wishes: &Wishes) -> Done<ExitCode> {
    let mut live = wishes.live();
    let gathered = Some(collect(&mut config, None, wishes, &mut live)?);
    let device = wishes.device()?;
    let place = (&device, Path::new("."));
    let (_, _, plan) = set_up(&mut config, gathered, place, wishes, &mut live)?;
    if wishes.json && ranks::here().is_first() {
        line(json!({ "kind": "plan", "plan": plan, "config": config }));
    }
    Ok(ExitCode::SUCCESS)
}

/// How the documents of a run are read.
fn walk_of(config: &RunConfig, out: Option<&Path>) -> Done<Walk> {
    let chat = match &config.origin {
        Origin::Base { model, .. } => Some(walk::chat_of(&Model::open(model)?)?),
        Origin::Scratch { .. } => None,
    };
    let (template, options) = chat.unwrap_or_default();
    let out = out.map(Path::to_path_buf);
    let secrets = if config.keep_secrets { Secrets::Keep } else { Secrets::Replace };
    Ok(Walk { out, template, options, secrets, ..Walk::default() })
}

/// Walks the source and says what was found.
fn collect(
    config: &mut RunConfig,
    out: Option<&Path>,
    wishes: &Wishes,
    live: &mut Live,
) -> Done<Gathered> {
    let walk = walk_of(config, out)?;
    let listing = walk::list(&config.sources(), &walk)?;
    let set = |(name, path): &(String, PathBuf)| {
        Ok((name.clone(), walk::list(&[(path.clone(), 1.0)], &walk)?))
    };
    let sets = config.evals.iter().map(set).collect::<Done<Vec<_>>>()?;
    let key = prepare::key(config, &listing, &sets)?;
    if let Some(gathered) = key.as_ref().and_then(|key| Gathered::again(key, &walk)) {
        choose_vocab(config, &gathered);
        return Ok(gathered);
    }
    let collected = listing.read(&walk)?;
    let Collected { left_out, exposed, .. } = &collected;
    let (skipped, exposed) = match wishes.verbose {
        true => (left_out::left_out_list(left_out), left_out::exposed_list(exposed)),
        false => (left_out::left_out_table(left_out), left_out::exposed_table(exposed)),
    };
    skipped.lines().for_each(|text| live.line("skip", text));
    exposed.lines().for_each(|text| live.line("secret", text));
    let n_exposed = collected.exposed.len();
    let left_out = left_out::left_out_json(&collected.left_out);
    let divided = walk::divide(collected, config.held_out)?;
    if let Some(note) = &divided.note {
        live.line("note", note);
    }
    let mut gathered = Gathered::new(divided, left_out, key, walk)?;
    gathered.facts.n_exposed = n_exposed;
    choose_vocab(config, &gathered);
    // Before anything else is held: at level 19 it takes more memory than a small model.
    waiting("measure", "gzip and zstd on held-out text, to compare with", || {
        gathered.compress(plan::host_limit(wishes))
    })?;
    for (name, listing) in sets {
        for mut entry in listing.read(&gathered.walk)?.documents {
            entry.name = data::name_in_set(&name, &entry.name);
            gathered.sets.extend(entry.blocks()?);
        }
    }
    Ok(gathered)
}

fn choose_vocab(config: &mut RunConfig, gathered: &Gathered) {
    if let Origin::Scratch { size, n_vocab, .. } = &mut config.origin
        && *n_vocab == 0
        && config.teacher.is_none()
    {
        *n_vocab = default_vocab(*size, gathered.facts.n_bytes);
    }
}

/// An editor's request wants about a thousand tokens of the model that was trained.
fn default_context(origin: &Origin, device: &Device) -> usize {
    match (origin, device.kind()) {
        (Origin::Scratch { .. }, "cpu") => 1024,
        (Origin::Scratch { .. }, _) => 2048,
        (Origin::Base { .. }, "cpu") => 512,
        (Origin::Base { .. }, _) => 1024,
    }
}

/// Fewer tokens than the preset has where there is little text: each wants to be seen often.
fn default_vocab(size: Size, n_bytes: usize) -> usize {
    (n_bytes / 256).next_power_of_two().clamp(512, size.n_vocab())
}

/// Model, method and plan, each said. Ranks that gathered nothing take what the first has written.
fn set_up(
    config: &mut RunConfig,
    gathered: Option<Gathered>,
    (device, dir): (&Device, &Path),
    wishes: &Wishes,
    live: &mut Live,
) -> Done<(Data, Prepared, Plan)> {
    let (opened, data) = match gathered {
        Some(gathered) => learn_from(config, gathered, (device, dir), wishes, live)?,
        None => {
            *config = ranks::here().tell(|| Ok(config.clone()))?;
            let opened = prepare::open(config, Texts::Run(dir))?;
            shared::help_encode(&opened.tokenizer()?, &walk_of(config, Some(dir))?, dir)?;
            (opened, Data::read(dir)?)
        }
    };
    let mut prepared = prepare::prepare(config, &data, opened, device)?;
    prepare::keep_teacher(config, &prepared)?;
    say_model(config, &data, &prepared, device, live)?;
    let plan = plan::plan(config, &mut prepared, (device, dir), wishes, live)?;
    for (kind, text) in plan.lines(config.budget) {
        live.line(kind, &text);
    }
    Ok((data, prepared, plan))
}

/// The model, and documents as tokens.
fn learn_from(
    config: &mut RunConfig,
    mut gathered: Gathered,
    (device, dir): (&Device, &Path),
    wishes: &Wishes,
    live: &mut Live,
) -> Done<(Opened, Data)> {
    config.context = wishes.context.unwrap_or_else(|| default_context(&config.origin, device));
    let from = match &gathered.same {
        Some(run) => {
            live.line("data", &format!("the same files as in {}: taken from there", run.display()));
            if gathered.facts.n_exposed > 0 {
                live.line(
                    "secret",
                    &format!("{} replaced, as told then", gathered.facts.n_exposed),
                );
            }
            Texts::Run(run)
        }
        None => Texts::Sources(&gathered),
    };
    let opened =
        waiting("open", "the model, or make a vocabulary", || prepare::open(config, from))?;
    let tokenizer = opened.tokenizer()?;
    teacher::decide(config, &tokenizer)?;
    prepare::check_least(config, &opened, plan::host_limit(wishes))?;
    teacher::write_texts(config, &mut gathered, device, live)?;
    let ranks = ranks::here();
    // A plan alone is made of nothing that others could read: each rank gathers for itself.
    if !ranks.is_alone() && gathered.walk.out.is_some() {
        prepare::keep_texts(&opened.model, config, dir)?;
        ranks.tell(|| Ok(config.clone()))?;
    }
    let data = gathered.encode(&tokenizer)?;
    Ok((opened, data))
}

fn say_model(
    config: &RunConfig,
    data: &Data,
    prepared: &Prepared,
    device: &Device,
    live: &mut Live,
) -> Done<()> {
    let n_tok = prepared.training.n_tok_epoch() as f64 / data.facts.share;
    live.line(
        "data",
        &format!(
            "{} documents, {} bytes, {} tokens; {} held out {}",
            data.facts.n_training,
            count(data.facts.n_bytes as f64),
            count(n_tok),
            data.facts.n_held_out,
            data.facts.split,
        ),
    );
    let model = prepared.session.model().info()?;
    if let Some(note) = beyond_trained(config.context, model.n_ctx) {
        live.line("note", &note);
    }
    if config.settings.expert_bytes_max.is_some() && device.kind() == "cpu" {
        live.line("note", "--expert-memory has no effect on the CPU");
    }
    let coverage = &prepared.coverage;
    live.line(
        "model",
        &format!(
            "{}, {} layers, d_model {}, vocabulary {}, {} parameters",
            model.family,
            model.n_layer,
            model.d_model,
            model.n_vocab,
            count(coverage.n_all as f64),
        ),
    );
    let method = match &config.origin {
        Origin::Scratch { .. } => "scratch".into(),
        Origin::Base { quant: Some(_), .. } => "qlora".into(),
        Origin::Base { .. } => config.method.to_string(),
    };
    live.line("method", &format!("{method}, {coverage}"));
    if let Some(TeacherConfig { model, n_tok: None, .. }) = &config.teacher {
        let teacher = Model::open(model)?;
        let (name, n) = (model.display(), count(teacher.n_params() as f64));
        let (temperature, share) =
            (config.settings.teacher_temperature, config.settings.teacher_share);
        let text = format!("{name}, {n} parameters, temperature {temperature}, share {share}");
        live.line("teacher", &text);
        if let Some(note) = beyond_trained(config.context, teacher.info()?.n_ctx) {
            live.line("note", &format!("teacher: {note}"));
        }
    }
    let precision = if device.kind() == "cuda" { "" } else { ", f32" }; // CUDA says its own
    live.line("device", &format!("{}{precision}", device.describe()));
    Ok(())
}

/// A directory of its own: the one asked for, new or empty, or the first of PARENT/1, PARENT/2, ...
/// It is made at once, so that no two runs take the same.
pub fn claim(out: Option<&Path>, parent: &Path) -> Done<PathBuf> {
    let dir = match out {
        Some(dir) => {
            files::make_directory(dir)?;
            let is_empty = std::fs::read_dir(dir).is_ok_and(|mut list| list.next().is_none());
            if !is_empty {
                let shown = dir.display();
                let hint = match dir.join("config.json").exists() {
                    true => format!("use `elapid train --resume {shown}`, or another --out"),
                    false => "choose an --out that is new or empty".into(),
                };
                return Err(Failure::new(format!("{shown} is not empty"), &hint));
            }
            dir.to_path_buf()
        }
        None => {
            files::make_directory(parent)?;
            let mut names = (1u32..).map(|n| parent.join(n.to_string()));
            let fresh = names.find_map(|path| match std::fs::create_dir(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => None,
                Err(error) => Some(Err(Failure::new(
                    format!("cannot write {}: {error}", path.display()),
                    "check the free disk space and the permissions",
                ))),
                Ok(()) => Some(Ok(path)),
            });
            fresh.expect("numbers do not end")?
        }
    };
    // A run is nobody's source: neither git nor the next run looks into it.
    files::write_bytes(&dir.join(".gitignore"), b"*\n")?;
    Ok(dir)
}

pub fn write_json(path: &Path, value: &impl serde::Serialize) -> Done<()> {
    let json = serde_json::to_vec_pretty(value)
        .map_err(|error| Failure::new(error, "this is a bug in Elapid"))?;
    Ok(files::write_bytes(path, &json)?)
}

pub fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Done<T> {
    serde_json::from_str(&files::read_text(path)?).map_err(|error| {
        let hint = "the run may come from another version of Elapid";
        Failure::new(format!("{}: {error}", path.display()), hint)
    })
}
