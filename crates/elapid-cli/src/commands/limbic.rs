//! `elapid limbic`: train, run and evaluate a tiny recurrent head over a state of eight numbers.

use crate::compute::Compute;
use crate::files;
use crate::report::live::progress;
use crate::report::{Done, Failure, between, line};
use elapid::{Device, Limbic as Head, LimbicSample, LimbicScore, LimbicSettings, LimbicState};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::io::BufRead;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Train and run a tiny recurrent head over a state of eight numbers.
///
/// The state: valence from -1 to 1; arousal, curiosity, caution, effort, social, attention and
/// exploration from 0 to 1. At each step the head sees some inputs and the state, and says how the
/// state changes and which reward it expects. It remembers earlier steps.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid limbic train samples.jsonl --out head.safetensors\n  \
    elapid limbic eval head.safetensors more.jsonl\n  \
    elapid limbic step head.safetensors --input 0.5,-1,0 --personality openness=80,risk=20")]
pub struct Limbic {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    Train(Train),
    Step(Step),
    Eval(Eval),
}

impl Limbic {
    pub fn run(&self) -> Done<ExitCode> {
        match &self.what {
            What::Train(args) => args.run(),
            What::Step(args) => args.run(),
            What::Eval(args) => args.run(),
        }
    }
}

const USUAL: fn() -> LimbicSettings = LimbicSettings::default;

/// Where to compute, in f32: a head is too small for anything else.
#[derive(clap::Args)]
struct Place {
    /// Device: auto, cpu, gpu, wgpu, cuda, or one of several such as cuda:1 [default: cpu]
    #[arg(long, value_name = "D")]
    device: Option<String>,
    /// CPU threads [default: all]
    #[arg(long, short = 't', value_name = "N", value_parser = between(1, 1024))]
    threads: Option<usize>,
}

impl Place {
    fn open(&self) -> Done<Device> {
        let device = Some(self.device.clone().unwrap_or("cpu".into()));
        Compute { device, precision: None, threads: self.threads }.open_exact()
    }
}

/// Train a head on samples in time.
///
/// SAMPLES is JSONL, one sample a line, all with as many inputs:
///
///   {"input": [0.5, -1], "state": {"valence": 0.1, "arousal": 0.3},
///    "target": {"valence": 0.2}, "reward": 1, "sequence": "monday"}
///
/// "state" is where the state was; what it does not name is neutral. "target" is how it should
/// change, each number from -1 to 1; what it does not name is 0. Both may be lists of eight.
/// Samples of the same "sequence" follow each other; those without one form a sequence together.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid limbic train samples.jsonl --out head.safetensors\n  \
    elapid limbic train samples.jsonl --out head.safetensors --length 32 --epochs 100 --json")]
struct Train {
    /// Samples: a JSONL file
    samples: PathBuf,
    /// File to write
    #[arg(long)]
    out: PathBuf,
    /// Overwrite OUT if it exists
    #[arg(long)]
    force: bool,
    /// Hidden numbers
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = between(1, 64))]
    hidden_size: usize,
    /// Passes over the samples
    #[arg(long, value_name = "N", default_value_t = USUAL().n_epochs,
        value_parser = between(0, 1 << 20))]
    epochs: usize,
    /// Samples that gradients flow back through
    #[arg(long, value_name = "N", default_value_t = USUAL().length,
        value_parser = between(1, 1024))]
    length: usize,
    /// Sequences that are trained together
    #[arg(long, value_name = "N", default_value_t = USUAL().n_batch,
        value_parser = between(1, 4096))]
    batch: usize,
    /// Learning rate of AdamW
    #[arg(long, value_name = "X", default_value_t = USUAL().lr)]
    lr: f64,
    /// Clip the gradient norm at this
    #[arg(long, value_name = "X", default_value_t = USUAL().clip_norm)]
    clip: f64,
    /// Weight of the reward in the loss
    #[arg(long, value_name = "X", default_value_t = USUAL().reward_weight)]
    reward_weight: f32,
    /// Share of the sequences to hold out, or of the samples at the end of a single one
    #[arg(long, value_name = "X", default_value_t = USUAL().held_out)]
    held_out: f64,
    /// Seed of the weights, of what is held out and of the order
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    place: Place,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Train {
    fn run(&self) -> Done<ExitCode> {
        super::convert::check_output(&self.out, self.force)?;
        let samples = read_samples(&self.samples)?;
        let device = self.place.open()?;
        let mut head = Head::new(samples[0].input.len(), self.hidden_size, self.seed, &device)?;
        let settings = LimbicSettings {
            n_epochs: self.epochs,
            length: self.length,
            n_batch: self.batch,
            lr: self.lr,
            clip_norm: self.clip,
            reward_weight: self.reward_weight,
            held_out: self.held_out,
            seed: self.seed,
        };
        let mut told = progress("train", "{human_pos} of {human_len} epochs");
        let mut last = None;
        let scores = head.train(&samples, &settings, |epoch, loss| {
            told(epoch, self.epochs);
            last = Some(loss);
            ControlFlow::Continue(())
        })?;
        drop(told);
        files::write_bytes(&self.out, &head.to_bytes()?)?;
        let names: BTreeSet<&str> = samples.iter().map(|it| it.sequence.as_str()).collect();
        let (n_samples, n_sequences, out) = (samples.len(), names.len(), self.out.display());
        if self.json {
            let held_out = scores.map(|[before, after]| {
                let mut fields = fields(&after);
                fields.insert("loss_before".into(), json!(before.loss));
                fields
            });
            line(json!({
                "head": head.to_string(), "n_samples": n_samples, "n_sequences": n_sequences,
                "epochs": self.epochs, "train_loss": last, "held_out": held_out,
                "out": out.to_string(),
            }));
            return Ok(ExitCode::SUCCESS);
        }
        line(format!("head    {head}"));
        line(format!("data    {n_samples} samples, {n_sequences} sequences"));
        if let Some(loss) = last {
            line(format!("train   loss {loss:.6} in the last of {} epochs", self.epochs));
        }
        match scores {
            Some([before, after]) => {
                let LimbicScore { n_samples, loss, loss_still, .. } = after;
                let before = before.loss;
                line(format!(
                    "result  loss {loss:.6} on {n_samples} held-out samples, before {before:.6}; \
                     without any change of the state {loss_still:.6}"
                ));
            }
            None => line("result  nothing was held out"),
        }
        line(format!("save    {out}"));
        Ok(ExitCode::SUCCESS)
    }
}

/// Measure a head on samples.
///
/// SAMPLES is a JSONL file as for `elapid limbic train`. Every sequence starts without memory.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid limbic eval head.safetensors samples.jsonl --json")]
struct Eval {
    /// Trained head
    head: PathBuf,
    /// Samples: a JSONL file
    samples: PathBuf,
    #[command(flatten)]
    place: Place,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Eval {
    fn run(&self) -> Done<ExitCode> {
        let head = open(&self.head, &self.place)?;
        let score = head.score(&read_samples(&self.samples)?)?;
        if self.json {
            line(Value::Object(fields(&score)));
            return Ok(ExitCode::SUCCESS);
        }
        let LimbicScore { n_sequences, n_samples, loss, delta, reward, loss_still } = score;
        line(format!("head    {head}"));
        line(format!("data    {n_samples} samples, {n_sequences} sequences"));
        line(format!(
            "result  loss {loss:.6}: change {delta:.6}, reward {reward:.6}; without any change of \
             the state {loss_still:.6}"
        ));
        Ok(ExitCode::SUCCESS)
    }
}

/// Move a state by one input, or by one input after the other.
///
/// With --input one step is made. Without it lines of JSON are read from standard input, and each
/// is answered by one line, at once; the head remembers from line to line:
///
/// - {"input": [0.5, -1]} continues from the last state;
///
/// - {"input": [0.5, -1], "state": {..}} continues from this state;
///
/// - {"input": [0.5, -1], "reset": true} starts from the first state, without memory.
///
/// An answer is {"state": {..}, "reward": .., "hidden": [..]}, or {"error": .., "hint": ..} for a
/// line that is wrong, which changes nothing.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
    elapid limbic step head.safetensors --input 0.5,-1 --state valence=0.2,arousal=0.5\n  \
    elapid limbic step head.safetensors --personality openness=80 < inputs.jsonl")]
struct Step {
    /// Trained head
    head: PathBuf,
    /// Inputs, separated by commas
    #[arg(long, value_name = "X,..", value_delimiter = ',', allow_hyphen_values = true)]
    input: Option<Vec<f32>>,
    /// First state: name=number,..; what is left out is neutral [default: neutral, or the set-point
    /// of --personality]
    #[arg(long, value_name = "NAME=X,..", value_parser = pairs)]
    state: Option<Pairs>,
    /// Traits from 0 to 100, whose set-point is the first state: openness, conscientiousness,
    /// extraversion, emotionality, stimulation, risk, regulation, grit
    #[arg(long, value_name = "NAME=X,..", conflicts_with = "state", value_parser = pairs)]
    personality: Option<Pairs>,
    /// What the head remembers: the `hidden` of its last answer
    #[arg(long, value_name = "X,..", value_delimiter = ',', allow_hyphen_values = true)]
    hidden: Vec<f32>,
    #[command(flatten)]
    place: Place,
    /// Print one JSON object; lines from standard input are always answered so
    #[arg(long)]
    json: bool,
}

/// A line of standard input.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    input: Vec<f32>,
    state: Option<LimbicState>,
    #[serde(default)]
    reset: bool,
}

impl Step {
    fn run(&self) -> Done<ExitCode> {
        let head = open(&self.head, &self.place)?;
        let (first, mut hidden) = (self.first()?, self.hidden.clone());
        let mut state = first;
        if let Some(input) = &self.input {
            let reward = head.step(&mut state, &mut hidden, input)?;
            match self.json {
                true => line(answer(&state, reward, &hidden)),
                false => {
                    line(format!("state   {state}"));
                    line(format!("reward  {reward:.4}"));
                }
            }
            return Ok(ExitCode::SUCCESS);
        }
        let (mut code, mut n_lines) = (ExitCode::SUCCESS, 0);
        for asked in std::io::stdin().lock().lines() {
            n_lines += 1;
            let told = asked.map_err(|error| Failure::new(error, "lines are UTF-8"));
            let told = told.and_then(|asked| match asked.trim() {
                "" => Ok(None),
                asked => {
                    let asked: Asked = serde_json::from_str(asked).map_err(|error| {
                        let words = error.to_string().replace(" at line 1 column", ", at column");
                        Failure::new(words, "a line is {\"input\": [..], \"state\": {..}}")
                    })?;
                    let (mut next, mut memory) = match asked.reset {
                        true => (first, Vec::new()),
                        false => (state, hidden.clone()),
                    };
                    next = asked.state.unwrap_or(next);
                    let reward = head.step(&mut next, &mut memory, &asked.input)?;
                    (state, hidden) = (next, memory);
                    Ok(Some(answer(&state, reward, &hidden)))
                }
            });
            match told {
                Ok(told) => told.into_iter().for_each(line),
                Err(Failure { problem, hint }) => {
                    code = ExitCode::from(1);
                    line(json!({"error": format!("line {n_lines}: {problem}"), "hint": hint}));
                }
            }
        }
        Ok(code)
    }

    /// The state before the first input.
    fn first(&self) -> Done<LimbicState> {
        if let Some(Pairs(traits)) = &self.personality {
            let traits = traits.iter().map(|(name, value)| (name.as_str(), *value));
            return Ok(LimbicState::set_point(traits)?);
        }
        let named = self.state.iter().flat_map(|pairs| &pairs.0);
        let named: Map<String, Value> =
            named.map(|(name, value)| (name.clone(), json!(value))).collect();
        serde_json::from_value(Value::Object(named)).map_err(|error| {
            Failure::new(format!("--state: {error}"), "for example --state valence=0.2,arousal=0.5")
        })
    }
}

fn answer(state: &LimbicState, reward: f32, hidden: &[f32]) -> Value {
    json!({"state": state, "reward": reward, "hidden": hidden})
}

/// Names with numbers.
#[derive(Clone, Debug)]
struct Pairs(Vec<(String, f32)>);

fn pairs(text: &str) -> Result<Pairs, String> {
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=')?;
        Some((name.trim().to_string(), value.trim().parse().ok()?))
    };
    let list =
        text.split(',').map(|it| pair(it).ok_or_else(|| format!("{it:?} is no name=number")));
    list.collect::<Result<_, _>>().map(Pairs)
}

fn open(path: &Path, place: &Place) -> Done<Head> {
    let bytes = std::fs::read(path).map_err(|error| {
        let problem = format!("cannot read {}: {error}", path.display());
        Failure::new(problem, "give a file that `elapid limbic train` wrote")
    })?;
    Ok(Head::from_bytes(&path.display().to_string(), &bytes, &place.open()?)?)
}

/// The samples of a file, all with as many inputs; every error names its line.
fn read_samples(path: &Path) -> Done<Vec<LimbicSample>> {
    let (text, mut samples) = (files::read_text(path)?, Vec::<LimbicSample>::new());
    for (idx, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
        let at = format!("{}:{}", path.display(), idx + 1);
        let sample = text.parse::<LimbicSample>();
        let sample =
            sample.map_err(|error| Failure::new(format!("{at}: {error}"), &error.hint()))?;
        let (got, want) =
            (sample.input.len(), samples.first().map_or(sample.input.len(), |it| it.input.len()));
        if got != want {
            let problem = format!("{at}: {got} inputs, the first sample has {want}");
            return Err(Failure::new(problem, "all samples have as many inputs"));
        }
        samples.push(sample);
    }
    match samples.is_empty() {
        true => {
            let problem = format!("{} holds no samples", path.display());
            Err(Failure::new(
                problem,
                "give one JSON object a line; see `elapid limbic train --help`",
            ))
        }
        false => Ok(samples),
    }
}

fn fields(score: &LimbicScore) -> Map<String, Value> {
    let LimbicScore { n_sequences, n_samples, loss, delta, reward, loss_still } = score;
    let fields = json!({
        "n_samples": n_samples, "n_sequences": n_sequences, "loss": loss, "delta": delta,
        "reward": reward, "loss_still": loss_still,
    });
    fields.as_object().cloned().unwrap_or_default()
}
