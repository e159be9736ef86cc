//! `elapid train` and `elapid plan`: the flags of a run.

mod groups;
mod names;
mod plan_generate;

use crate::compute::Compute;
use crate::report::{Done, Failure, between, size};
use crate::run::config::{Budget, Origin, RunConfig, TeacherConfig};
use crate::run::{self, Checkpointing, Wishes, pace::DECAY};
use crate::talk::flags::cache_type;
use clap::{Args, FromArgMatches, ValueEnum};
use elapid::{Arch, CacheType, LoraForm as Form, LoraSettings, Method, OptimizerKind, Scaling};
use elapid::{Schedule, Settings, Size};
pub use names::positive;
use names::{ArchName, MethodName, OptimizerName, QuantName, ScheduleName, SizeName};
use names::{DEFAULT_FIM, DEFAULT_PROJECT, amount, named, read_config, weighted};
use plan_generate::Asked;
use std::path::PathBuf;
use std::process::ExitCode;

/// Train a model on the files under PATH, or fine-tune one, and measure what it learned.
///
/// Without --model a small model is trained from scratch, with its own vocabulary. With --model
/// that model is fine-tuned: a LoRA adapter unless --method says otherwise. Of each
/// language a tenth of the text or more is held out for evaluation: the newest files by commit date
/// if PATH is in a git repository. Memory and time are estimated first. Ctrl-C saves and stops;
/// `--resume RUN` continues, with the same weights as an uninterrupted run. Everything is written
/// to the run directory; its report.html shows the result.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  elapid train .\n  elapid train src --minutes 30 --preset small\n  \
    elapid train . --model SmolLM2-135M.gguf --rank 8\n  \
    elapid train . --model mamba-130m --method bc\n  \
    elapid train chats.jsonl --model SmolLM2-135M --method qlora --quant nf4\n  \
    elapid train . --teacher SmolLM2-135M.gguf\n  \
    elapid train . --init runs/1 --context 4096 --eval rust=../other/src\n  \
    elapid train --resume runs/1 --minutes 20\n  mpirun -n 4 elapid train src"
)]
pub struct Train {
    #[command(flatten)]
    flags: Flags,
    /// Resume this run, on the device and in the precision it started with unless others are given;
    /// with --steps, --tokens or --minutes for longer or shorter than planned
    #[arg(long, value_name = "RUN", conflicts_with_all = groups::decided())]
    resume: Option<PathBuf>,
    /// Run directory to create [default: runs/N]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Estimate a training run without starting it: parameters, memory by kind, time.
///
/// Takes the flags of `elapid train`. Batch size, gradient accumulation and checkpointing are
/// chosen to fit --memory; a run that cannot fit is refused with a hint on what to change.
///
/// With --generate it says instead which memory the model of --model takes to answer prompts, by
/// context size. Nothing is computed, and no weight is read.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid plan .\n  \
    elapid plan . --preset medium --memory 4G\n  elapid plan . --model SmolLM2-135M.gguf --json\n  \
    elapid plan --model SmolLM2-135M.gguf --generate -c 4096 --device cpu")]
pub struct Plan {
    #[command(flatten)]
    flags: Flags,
    /// Estimate the memory of generation, not of training
    #[arg(long, requires = "model")]
    generate: bool,
    /// With --generate, the data type of the KV cache: f32, f16 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "f32", requires = "generate",
        value_parser = cache_type)]
    cache_type: CacheType,
}

/// Flags of a new model, and of one that is fine-tuned.
const NEW_OR_TUNED: [&str; 7] = ["model", "method", "preset", "arch", "config", "vocab", "donor"];

#[derive(clap::Args)]
#[command(mut_args = groups::grouped)]
struct Flags {
    /// Directory, text file, or .jsonl file with `text`, `prompt` and `completion`, or `messages`
    path: Option<PathBuf>,
    /// Another PATH, drawn WEIGHT times per epoch [default weight: 1]; can be repeated
    #[arg(long, value_name = "PATH[=WEIGHT]", value_parser = weighted)]
    data: Vec<(PathBuf, f64)>,
    /// Measure on the text under PATH too, as NAME; can be repeated
    #[arg(long, value_name = "NAME=PATH", value_parser = named)]
    eval: Vec<(String, PathBuf)>,
    /// Model to fine-tune: directory, .gguf or .elapid file
    #[arg(long, value_name = "M")]
    model: Option<PathBuf>,
    /// Continue training this model: its weights, a new optimizer, settings as from scratch with a
    /// quarter of the learning rate
    #[arg(long, value_name = "M", conflicts_with_all = NEW_OR_TUNED)]
    init: Option<PathBuf>,
    /// What to train [default: scratch, or lora with --model]
    #[arg(long, value_enum, value_name = "M")]
    method: Option<MethodName>,
    /// Size of a new model [default: tiny]
    #[arg(long, value_enum, value_name = "P")]
    preset: Option<SizeName>,
    /// Architecture of a new model [default: hybrid]
    #[arg(long, value_enum, value_name = "A")]
    arch: Option<ArchName>,
    /// config.json of a new model, instead of --preset and --arch; vocabulary and context are set
    #[arg(long, value_name = "FILE", conflicts_with_all = ["preset", "arch"])]
    config: Option<PathBuf>,
    /// Vocabulary size of a new model [default: by the amount of text]
    #[arg(long, value_name = "N", value_parser = between(300, 1 << 20), conflicts_with = "donor")]
    vocab: Option<usize>,
    /// Model whose tokenizer and embedding a new model uses, through a projection (lens)
    #[arg(long, value_name = "M")]
    donor: Option<PathBuf>,
    /// Model to learn from (distillation): its token probabilities, or texts that it writes if its
    /// vocabulary is another. A new model has its vocabulary unless --vocab or --donor is given
    #[arg(long, value_name = "M")]
    teacher: Option<PathBuf>,
    /// Temperature at which the probabilities of teacher and student are compared
    #[arg(long, value_name = "X", default_value_t = 2.0, requires = "teacher",
        value_parser = positive)]
    teacher_temperature: f64,
    /// Fraction of the loss that follows the teacher's probabilities; the rest follows the text
    #[arg(long, value_name = "X", default_value_t = 0.5, requires = "teacher")]
    teacher_share: f64,
    /// Learn from N tokens that the teacher writes before training, or what a quarter of --minutes
    /// allows, instead of its probabilities [default with another vocabulary: 32k]
    #[arg(long, value_name = "N", requires = "teacher", value_parser = amount)]
    teacher_tokens: Option<u64>,
    /// Optimizer steps [default: from --minutes]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Time budget in minutes, from start to finish [default: 4]
    #[arg(long, value_name = "N", conflicts_with = "steps", value_parser = positive)]
    minutes: Option<f64>,
    /// Tokens to train on, instead of --steps
    #[arg(long, value_name = "N", conflicts_with_all = ["steps", "minutes"], value_parser = amount)]
    tokens: Option<u64>,
    /// End after N passes over the text, if that is sooner
    #[arg(long, value_name = "N", value_parser = positive)]
    epochs: Option<f64>,
    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Batch size: sequences per optimizer step [default: 2048 to 8192 tokens]
    #[arg(long, value_name = "N", value_parser = between(1, 1 << 16))]
    batch: Option<usize>,
    /// Gradient accumulation: split each batch into N equal parts [default: as --memory requires]
    #[arg(long, value_name = "N", value_parser = between(1, 1 << 16))]
    accumulate: Option<usize>,
    /// Tokens per sequence [default: 1024; from scratch on a GPU 2048; with --model 512 on a CPU]
    #[arg(long, short = 'c', value_name = "N", value_parser = between(8, 1 << 20))]
    context: Option<usize>,
    /// Cut sequences to N tokens until the learning rate falls, in the last fifth (0: never)
    /// [default: 256 for a new model where a step is faster so, else 0]
    #[arg(long, value_name = "N")]
    short_rows: Option<usize>,
    /// Peak learning rate [default: 4e-3 from scratch, 4e-4 with lora, 1e-4 with full, else 1e-3]
    #[arg(long, value_name = "X")]
    lr: Option<f64>,
    /// Minimum learning rate, as a fraction of the peak [default: 0.1]
    #[arg(long, value_name = "X")]
    lr_min: Option<f64>,
    /// Warmup steps [default: 20, at most a fifth of all]
    #[arg(long, value_name = "N")]
    warmup: Option<u64>,
    /// Learning rate schedule after warmup [default: wsd where time is the budget, else cosine]
    #[arg(long, value_enum)]
    schedule: Option<ScheduleName>,
    /// Optimizer for matrices; everything else uses AdamW [default: muon from scratch, else adamw]
    #[arg(long, value_enum)]
    optimizer: Option<OptimizerName>,
    /// AdamW beta1: decay rate of the first moment [default: 0.9]
    #[arg(long, value_name = "X")]
    beta1: Option<f64>,
    /// AdamW beta2: decay rate of the second moment [default: 0.95 from scratch, else 0.99]
    #[arg(long, value_name = "X")]
    beta2: Option<f64>,
    /// AdamW epsilon, added to the square root of the second moment [default: 1e-8]
    #[arg(long, value_name = "X")]
    eps: Option<f64>,
    /// Weight decay, applied to matrices only [default: 0.1 from scratch, else 0.01]
    #[arg(long, value_name = "X")]
    weight_decay: Option<f64>,
    /// Clip the global gradient norm to X (0: never) [default: 1]
    #[arg(long, value_name = "X")]
    clip: Option<f64>,
    /// Limit the RMS change of a parameter per step to X times its RMS [default: 0.05, from scratch
    /// 0: no limit]
    #[arg(long, value_name = "X")]
    trust: Option<f64>,
    /// Roll back a step whose perplexity exceeds X times the running average (0: never) [default:
    /// 1.25]
    #[arg(long, value_name = "X")]
    spike: Option<f64>,
    /// LoRA rank [default: 16]
    #[arg(long, value_name = "N", value_parser = between(1, 4096))]
    rank: Option<usize>,
    /// LoRA alpha: adapters are scaled by alpha / rank [default: twice the rank]
    #[arg(long, value_name = "X")]
    alpha: Option<f64>,
    /// LoRA dropout on the inputs of adapters [default: 0]
    #[arg(long, value_name = "X")]
    dropout: Option<f64>,
    /// Scale adapters by alpha / sqrt(rank) instead (rsLoRA)
    #[arg(long)]
    rslora: bool,
    /// Train magnitude and direction apart (DoRA)
    #[arg(long)]
    dora: bool,
    /// Modules to adapt, by name or with `*` [default: all linear layers]
    #[arg(long, value_name = "P", value_delimiter = ',')]
    targets: Vec<String>,
    /// Block format of the frozen base with qlora [default: as stored, or q8_0 if not quantized]
    #[arg(long, value_enum, value_name = "Q")]
    quant: Option<QuantName>,
    /// Fraction of the text rearranged for fill-in-the-middle [default: 0.25 with a new
    /// vocabulary, else 0]
    #[arg(long, value_name = "X")]
    fim: Option<f64>,
    /// Fraction of that in the order suffix, prefix, middle
    #[arg(long, value_name = "X", default_value_t = 0.5)]
    spm: f64,
    /// Fraction of the text shown after other files of its project, each under its path, as /infill
    /// lays them out [default: 0.5 with a new vocabulary, else 0]
    #[arg(long, value_name = "X")]
    project: Option<f64>,
    /// Each folder directly under PATH is a project of its own
    #[arg(long)]
    projects: bool,
    /// Fraction of the text held out for evaluation
    #[arg(long, value_name = "X", default_value_t = 0.1)]
    held_out: f64,
    /// Learn keys, tokens, passwords and e-mail addresses too; by default they are replaced
    #[arg(long)]
    keep_secrets: bool,
    /// Steps between evaluations [default: a twentieth of all, or what the time allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    eval_every: Option<u64>,
    /// Steps between checkpoints [default: as often as 2% of the time allows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    save_every: Option<u64>,
    /// Stop after N evaluations without improvement (0: never) [default: 5]
    #[arg(long, value_name = "N")]
    patience: Option<u32>,
    /// Memory limit, such as 4G or 800M [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// On a GPU: keep optimizer state of experts in CPU memory, and move this much at a time, such
    /// as 500M, to the GPU for the update (same weights)
    #[arg(long, value_name = "SIZE", value_parser = size)]
    expert_memory: Option<u64>,
    /// Gradient checkpointing: recompute activations in the backward pass instead of storing them
    #[arg(long, value_enum, default_value_t = Checkpointing::Auto)]
    checkpointing: Checkpointing,
    #[command(flatten)]
    compute: Compute,
    /// List every file that is skipped and every secret that is replaced
    #[arg(long)]
    verbose: bool,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

impl Train {
    pub fn run(&self) -> Done<ExitCode> {
        match &self.resume {
            Some(dir) => run::resume(dir, &self.flags.wishes()?),
            None => run::begin(self.flags.config()?, self.out.as_deref(), &self.flags.wishes()?),
        }
    }
}

/// What `elapid train` with these flags is, for a command that builds on it.
pub fn run_of(flags: &[String]) -> Done<(RunConfig, Wishes)> {
    let bug = |error: clap::Error| Failure::new(error.to_string().trim(), "see --help");
    let command = Flags::augment_args(clap::Command::new("train").no_binary_name(true));
    let matches = command.try_get_matches_from(flags).map_err(bug)?;
    let flags = Flags::from_arg_matches(&matches).map_err(bug)?;
    Ok((flags.config()?, flags.wishes()?))
}

impl Plan {
    pub fn run(&self) -> Done<ExitCode> {
        let Flags { model, context, compute, memory, json, .. } = &self.flags;
        if let (true, Some(model)) = (self.generate, model) {
            let asked = Asked { context: *context, memory: *memory, cache: self.cache_type };
            return plan_generate::plan(model, asked, compute, *json);
        }
        run::plan_only(self.flags.config()?, &self.flags.wishes()?)
    }
}

impl Flags {
    /// What does not change the numbers of a run, or is decided by a plan.
    fn wishes(&self) -> Done<Wishes> {
        Ok(Wishes {
            budget: self.budget(),
            context: self.context,
            short_rows: self.short_rows,
            n_rows: self.batch,
            n_accumulate: self.accumulate,
            checkpointing: self.checkpointing,
            eval_every: self.eval_every,
            save_every: self.save_every,
            n_warmup: self.warmup,
            n_epochs: self.epochs,
            memory: self.memory,
            compute: self.compute.clone(),
            verbose: self.verbose,
            json: self.json,
        })
    }

    fn budget(&self) -> Option<Budget> {
        let steps = self.steps.map(Budget::Steps);
        let tokens = self.tokens.map(Budget::Tokens);
        steps.or(tokens).or(self.minutes.map(Budget::Minutes))
    }

    fn share(&self, name: &str, value: f64) -> Done<f64> {
        let problem = || format!("`--{name} {value}` is out of range");
        let is_share = (0.0..=1.0).contains(&value);
        is_share
            .then_some(value)
            .ok_or_else(|| Failure::new(problem(), "give a fraction from 0 to 1"))
    }

    fn held_out_share(&self) -> Done<f64> {
        if self.held_out > 0.0 && self.held_out < 1.0 {
            return Ok(self.held_out);
        }
        let problem = format!("`--held-out {}` is out of range", self.held_out);
        let hint = "give a fraction above 0 and below 1: the result is measured on held-out files";
        Err(Failure::new(problem, hint))
    }

    fn method_name(&self) -> MethodName {
        self.method.unwrap_or(match (&self.model, &self.init) {
            (Some(_), _) => MethodName::Lora,
            (None, Some(_)) => MethodName::Full,
            (None, None) => MethodName::Scratch,
        })
    }

    /// The model that is there.
    fn base(&self) -> Option<&PathBuf> {
        self.model.as_ref().or(self.init.as_ref())
    }

    /// Flags without effect under this method are errors, not silence.
    fn check(&self, name: MethodName) -> Done<()> {
        let is_scratch = name == MethodName::Scratch;
        let is_lora = matches!(name, MethodName::Lora | MethodName::Qlora);
        let for_scratch = [
            ("preset", self.preset.is_some()),
            ("arch", self.arch.is_some()),
            ("config", self.config.is_some()),
            ("vocab", self.vocab.is_some()),
            ("donor", self.donor.is_some()),
        ];
        let for_lora = [
            ("rank", self.rank.is_some()),
            ("alpha", self.alpha.is_some()),
            ("dropout", self.dropout.is_some()),
            ("rslora", self.rslora),
            ("dora", self.dora),
            ("targets", !self.targets.is_empty()),
        ];
        let idle = |list: &[(&'static str, bool)], is_used: bool| {
            list.iter().find(|flag| flag.1 && !is_used).map(|flag| flag.0)
        };
        let quant = [("quant", self.quant.is_some())];
        let found = idle(&for_scratch, is_scratch)
            .or(idle(&for_lora, is_lora))
            .or(idle(&quant, name == MethodName::Qlora));
        if let Some(flag) = found {
            let method = name.to_possible_value();
            let method = method.as_ref().map_or("", |value| value.get_name());
            let problem = format!("`--{flag}` has no effect with `--method {method}`");
            return Err(Failure::new(problem, "remove it, or choose another --method"));
        }
        match (is_scratch, self.base()) {
            (true, Some(_)) => {
                let problem =
                    "`--method scratch` trains a new model, but --model names an existing one";
                Err(Failure::new(problem, "use `--method full`, or remove --model"))
            }
            (false, None) => {
                let problem = "this method fine-tunes a model, and no --model is given";
                Err(Failure::new(problem, "add --model MODEL"))
            }
            _ => Ok(()),
        }
    }

    fn config(&self) -> Done<RunConfig> {
        let name = self.method_name();
        self.check(name)?;
        let is_twice = |at: usize| self.eval[..at].iter().any(|(name, _)| *name == self.eval[at].0);
        if let Some(at) = (0..self.eval.len()).find(|at| is_twice(*at)) {
            let problem = format!("`--eval {}` is given twice", self.eval[at].0);
            return Err(Failure::new(problem, "give each set a name of its own"));
        }
        let path = self.path.iter().map(|path| (path.clone(), 1.0));
        let mut sources: Vec<(PathBuf, f64)> = path.chain(self.data.iter().cloned()).collect();
        let Some((source, weight)) = sources.first().cloned() else {
            let hint = "add a PATH, as in `elapid train .`";
            return Err(Failure::new("no training data given", hint));
        };
        if sources.len() == 1 && weight == 1.0 {
            sources.clear();
        }
        let is_scratch = name == MethodName::Scratch;
        // The rest of the defaults of a new model follows from its size, once that is known.
        let size = self.preset.map_or(Size::Tiny, Size::from);
        let origin = match self.base() {
            None => Origin::Scratch {
                size,
                arch: self.arch.map_or(Arch::Hybrid, Arch::from),
                n_vocab: self.vocab.unwrap_or(0),
                donor: self.donor.as_deref().map(run::usable).transpose()?,
                config: self.config.as_deref().map(read_config).transpose()?,
            },
            Some(model) => Origin::Base {
                model: run::usable(model)?,
                quant: (name == MethodName::Qlora)
                    .then(|| self.quant.map_or("auto", QuantName::name).to_string()),
                adapter: None,
            },
        };
        let fim = self.fim.map(|fim| self.share("fim", fim)).transpose()?;
        let project = self.project.map(|share| self.share("project", share)).transpose()?;
        let has_own_vocab =
            is_scratch && self.donor.is_none() && (self.teacher.is_none() || self.vocab.is_some());
        Ok(RunConfig {
            version: env!("CARGO_PKG_VERSION").into(),
            source,
            sources,
            held_out: self.held_out_share()?,
            keep_secrets: self.keep_secrets,
            evals: self.eval.clone(),
            origin,
            method: self.method_settings(name)?,
            fim: fim.unwrap_or(if has_own_vocab { DEFAULT_FIM } else { 0.0 }),
            spm: self.share("spm", self.spm)?,
            project: project.unwrap_or(if has_own_vocab { DEFAULT_PROJECT } else { 0.0 }),
            projects: self.projects,
            context: 0,
            n_rows: 0,
            checkpointing: false,
            eval_every: 0,
            n_eval_tok: 0,
            n_final_tok: 0,
            save_every: None,
            budget: self.budget().unwrap_or(Budget::Minutes(4.0)),
            patience: Some(self.patience.unwrap_or(5)).filter(|n| *n > 0),
            seed: self.seed,
            settings: Settings {
                teacher_temperature: self.teacher_temperature,
                teacher_share: self.share("teacher-share", self.teacher_share)?,
                ..self.settings(name)
            },
            teacher: self.teacher_config()?,
            place: None,
        })
    }

    fn teacher_config(&self) -> Done<Option<TeacherConfig>> {
        let Some(model) = &self.teacher else { return Ok(None) };
        let (model, n_tok) = (run::usable(model)?, self.teacher_tokens.map(|n| n as usize));
        Ok(Some(TeacherConfig { model, hash: None, n_tok, n_vocab: None }))
    }

    fn method_settings(&self, name: MethodName) -> Done<Method> {
        Ok(match name {
            MethodName::Scratch | MethodName::Full => Method::Full,
            MethodName::Bc => Method::Bc,
            MethodName::Embeddings => Method::Embeddings,
            MethodName::Lora | MethodName::Qlora => {
                let rank = self.rank.unwrap_or(LoraSettings::default().rank);
                let dropout = self.dropout.unwrap_or(0.0);
                if !(0.0..1.0).contains(&dropout) {
                    let problem = format!("`--dropout {dropout}` is out of range");
                    return Err(Failure::new(problem, "give a number from 0 to below 1"));
                }
                Method::Lora(LoraSettings {
                    targets: self.targets.clone(),
                    rank,
                    alpha: self.alpha.unwrap_or(2.0 * rank as f64),
                    dropout: dropout as f32,
                    scaling: if self.rslora { Scaling::RsLora } else { Scaling::Plain },
                    form: if self.dora { Form::Dora } else { Form::Lora },
                })
            }
        })
    }

    fn settings(&self, name: MethodName) -> Settings {
        let is_scratch = name == MethodName::Scratch || self.init.is_some();
        let default = Settings::default();
        let lr = match name {
            _ if self.init.is_some() => 1e-3,
            MethodName::Scratch => 4e-3,
            MethodName::Full => 1e-4,
            MethodName::Lora | MethodName::Qlora => 4e-4,
            MethodName::Bc | MethodName::Embeddings => 1e-3,
        };
        let unless_zero = |flag: Option<f64>, default: Option<f64>| match flag {
            Some(0.0) => None,
            Some(x) => Some(x),
            None => default,
        };
        let optimizer = match self.optimizer {
            Some(OptimizerName::Muon) => OptimizerKind::Muon,
            Some(OptimizerName::Adamw) => OptimizerKind::AdamW,
            None if is_scratch => OptimizerKind::Muon,
            None => OptimizerKind::AdamW,
        };
        Settings {
            n_steps: 0,
            n_accumulate: 1,
            expert_bytes_max: self.expert_memory.map(|n_bytes| n_bytes as usize),
            lr: self.lr.unwrap_or(lr),
            lr_min: self.lr_min.unwrap_or(default.lr_min),
            n_warmup: self.warmup.unwrap_or(default.n_warmup),
            schedule: match self.schedule {
                Some(ScheduleName::Constant) => Schedule::Constant,
                Some(ScheduleName::Cosine) => Schedule::Cosine,
                None if self.steps.or(self.tokens).is_some() => Schedule::Cosine,
                // One that can be ended at any time.
                _ => Schedule::Wsd { decay: DECAY },
            },
            turns: Vec::new(),
            short_rows: None,
            optimizer,
            beta1: self.beta1.unwrap_or(default.beta1),
            beta2: self.beta2.unwrap_or(if is_scratch { 0.95 } else { 0.99 }),
            eps: self.eps.unwrap_or(default.eps),
            weight_decay: self.weight_decay.unwrap_or(if is_scratch { 0.1 } else { 0.01 }),
            clip_norm: unless_zero(self.clip, default.clip_norm),
            trust: unless_zero(self.trust, if is_scratch { None } else { Some(0.05) }),
            spike: unless_zero(self.spike, default.spike),
            seed: self.seed,
            ..default
        }
    }
}
