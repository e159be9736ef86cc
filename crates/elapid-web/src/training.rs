//! A model that learns, step by step; checkpoints; the plan.
//!
//! A step that diverges changes nothing: its batch is left out and the rate is halved, as often in
//! a row as `N_RETREATS`; then the run fails. What the clock decides, in JavaScript, comes in by
//! `turn` and is part of a checkpoint.

use crate::failure::{Done, Failure, options};
use crate::machine;
use crate::measure::{self, documents};
use crate::model::{WebModel, folder};
use elapid::{
    Batches, Corpus, Device, Document, Encoded, EvalSettings, Extent, LoraForm, LoraSettings,
    Method, OptimizerKind, Outcome, Saved, Scaling, Schedule, Settings, Training, Turn, foretell,
    name_hash, take_files,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use wasm_bindgen::prelude::*;

/// Steps in a row that may diverge.
const N_RETREATS: u32 = 3;

/// A run: the training, what it is measured on, and what it must be resumed with.
pub struct Run {
    training: Training,
    batches: Batches,
    held_out: Vec<Encoded>,
    eval: EvalSettings,
    /// Of model, texts and options.
    fingerprint: String,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct TrainerOptions {
    method: Option<MethodName>,
    lr: Option<f64>,
    batch: Option<usize>,
    context: Option<usize>,
    accumulate: Option<usize>,
    optimizer: Option<OptimizerKind>,
    weight_decay: Option<f64>,
    beta1: Option<f64>,
    beta2: Option<f64>,
    clip: Option<f64>,
    warmup: Option<f64>,
    schedule: Option<ScheduleName>,
    fim: Option<f64>,
    rank: Option<usize>,
    alpha: Option<f64>,
    dropout: Option<f32>,
    targets: Option<Vec<String>>,
    quant: Option<String>,
    seed: Option<u64>,
    /// None where a turn will say.
    steps: Option<u64>,
    epochs: Option<f64>,
}

#[derive(Clone, Copy, Deserialize, Serialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum MethodName {
    Full,
    Lora,
    Dora,
    Bc,
    Embeddings,
}

#[derive(Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum ScheduleName {
    Cosine,
    Constant,
    Wsd,
}

/// What a checkpoint holds besides the run itself.
#[derive(Deserialize, Serialize)]
struct Extra {
    fingerprint: String,
    turns: Vec<Turn>,
    /// Seconds that the run took so far.
    elapsed: f64,
}

impl TrainerOptions {
    fn method(&self, is_new: bool) -> Done<Method> {
        let default = if is_new { MethodName::Full } else { MethodName::Lora };
        let form = match self.method.unwrap_or(default) {
            MethodName::Full => return Ok(Method::Full),
            MethodName::Bc => return Ok(Method::Bc),
            MethodName::Embeddings => return Ok(Method::Embeddings),
            MethodName::Lora => LoraForm::Lora,
            MethodName::Dora => LoraForm::Dora,
        };
        let default = LoraSettings::default();
        let rank = self.rank.unwrap_or(default.rank);
        let dropout = self.dropout.unwrap_or(0.0);
        if rank == 0 || !(0.0..1.0).contains(&dropout) {
            let problem = format!("a rank of {rank} and a dropout of {dropout}");
            return Err(Failure::input(problem, "a rank is above zero, a dropout below one"));
        }
        Ok(Method::Lora(LoraSettings {
            targets: self.targets.clone().unwrap_or_default(),
            rank,
            alpha: self.alpha.unwrap_or(2.0 * rank as f64),
            dropout,
            scaling: Scaling::Plain,
            form,
        }))
    }

    fn batches(&self) -> Done<Batches> {
        let default = Batches::default();
        let context = self.context.unwrap_or(default.context);
        let n_rows = self.batch.unwrap_or(default.n_rows);
        if context == 0 || n_rows == 0 || context.saturating_mul(n_rows) > 1 << 24 {
            let problem = format!("{n_rows} rows of {context} tokens");
            return Err(Failure::input(problem, "give at least one, and 16 M tokens at most"));
        }
        let fim = self.fim.unwrap_or(0.0);
        if !(0.0..=1.0).contains(&fim) {
            return Err(Failure::input(format!("`fim` is {fim}"), "it is a share, from 0 to 1"));
        }
        Ok(Batches { context, n_rows, fim, seed: self.seed.unwrap_or(0), ..default })
    }

    fn settings(&self, method: &Method, is_new: bool) -> Settings {
        let default = Settings::default();
        let lr = match method {
            Method::Full if is_new => 1e-3,
            Method::Full => 1e-4,
            Method::Lora(_) => 4e-4,
            Method::Bc | Method::Embeddings => 1e-3,
        };
        let schedule = match (self.schedule, self.steps.is_some() || self.epochs.is_some()) {
            (Some(ScheduleName::Constant), _) => Schedule::Constant,
            (Some(ScheduleName::Cosine), _) | (None, true) => Schedule::Cosine,
            // One that can be ended at any time.
            (Some(ScheduleName::Wsd), _) | (None, false) => Schedule::Wsd { decay: 0.2 },
        };
        let clip = self.clip.or(default.clip_norm).filter(|norm| *norm != 0.0);
        Settings {
            n_steps: self.steps.unwrap_or(Settings::OPEN),
            n_accumulate: self.accumulate.unwrap_or(1),
            lr: self.lr.unwrap_or(lr),
            schedule,
            optimizer: self.optimizer.unwrap_or_default(),
            beta1: self.beta1.unwrap_or(default.beta1),
            beta2: self.beta2.unwrap_or(if is_new { 0.95 } else { 0.99 }),
            weight_decay: self.weight_decay.unwrap_or(if is_new { 0.1 } else { 0.01 }),
            clip_norm: clip,
            trust: if is_new { None } else { Some(0.05) },
            seed: self.seed.unwrap_or(0),
            ..default
        }
    }

    /// Steps of the warmup: a share of all, or as many as are usual.
    fn n_warmup(&self, n_steps: u64) -> u64 {
        let share = self.warmup.unwrap_or(0.05).clamp(0.0, 1.0);
        match n_steps {
            Settings::OPEN => Settings::default().n_warmup,
            n => ((n as f64 * share).round() as u64).min(n),
        }
    }
}

#[wasm_bindgen]
impl WebModel {
    /// Begins a run; what is trained, as JSON. The weights are the run's until `endRun`.
    #[wasm_bindgen(js_name = beginRun)]
    pub async fn begin_run(
        &mut self,
        json: String,
        names: Vec<String>,
        texts: Vec<String>,
        held_names: Vec<String>,
        held_texts: Vec<String>,
    ) -> Done<String> {
        self.idle()?;
        let options: TrainerOptions = options(&json)?;
        let is_new = self.source.is_none();
        let method = options.method(is_new)?;
        let batches = options.batches()?;
        let learned = documents(names, texts)?;
        let coverage = self.choose(&method, &options)?;
        let mut settings = options.settings(&method, is_new);
        let mut training = self.session.begin(&learned, &batches, &settings)?;
        if let Some(epochs) = options.epochs {
            let n_tok = batches.context * batches.n_rows * settings.n_accumulate;
            let n_steps = epochs * training.n_tok_epoch() as f64 / n_tok as f64;
            settings.n_steps = (n_steps.ceil() as u64).max(1);
        }
        settings.n_warmup = options.n_warmup(settings.n_steps);
        training.settings = settings;
        let n_frozen = training.frozen_hash();
        let fingerprint = fingerprint(&json, &n_frozen, &learned);
        let held_out = self.encode(&documents(held_names, held_texts)?)?;
        let eval = EvalSettings::new(batches.context.max(2));
        self.drop_answers();
        self.run = Some(Run { training, batches, held_out, eval, fingerprint });
        Ok(coverage)
    }

    /// Makes a step; what it found, as JSON.
    #[wasm_bindgen(js_name = stepRun)]
    pub async fn step_run(&mut self) -> Done<String> {
        let device = self.device().clone();
        let training = &mut self.run()?.training;
        for _ in 0..=N_RETREATS {
            match training.step().await? {
                Outcome::Made { report, lr, n_tok } => {
                    let progress = training.progress();
                    let epoch = progress.n_tok as f64 / training.n_tok_epoch().max(1) as f64;
                    let end = training.settings.end();
                    let json = json!({
                        "step": progress.step, "loss": report.loss, "gradNorm": report.grad_norm,
                        "lr": lr, "stepTokens": n_tok, "tokens": progress.n_tok, "epoch": epoch,
                        "steps": (end != Settings::OPEN).then_some(end),
                        "isDone": training.is_done(), "memory": machine::memory(&device),
                    });
                    return Ok(json.to_string());
                }
                Outcome::Diverged(_) => {
                    let here = training.progress().clone();
                    training.retreat(&here);
                }
            }
        }
        let message = format!("{} steps in a row diverged: nothing was changed", N_RETREATS + 1);
        Err(Failure { code: "diverged", message, hint: "use a smaller learning rate".into() })
    }

    /// Ends the run at this step, with the rate falling until then.
    pub fn turn(&mut self, n_steps: f64) -> Done<()> {
        let training = &mut self.run()?.training;
        let step = training.progress().step;
        training.settings.turn(step, (n_steps as u64).max(step), 0.0);
        Ok(())
    }

    /// Whether all steps are made, and how many were: `[step, isDone]` as JSON.
    pub fn progress(&mut self) -> Done<String> {
        let training = &self.run()?.training;
        Ok(json!([training.progress().step, training.is_done()]).to_string())
    }

    /// Measures the held-out texts of the run; an evaluation as JSON.
    #[wasm_bindgen(js_name = measureRun)]
    pub async fn measure_run(&mut self) -> Done<String> {
        let run = self.run()?;
        let scores = run.training.score(&run.held_out, &run.eval).await?;
        measure::evaluation(&scores)
    }

    /// A checkpoint of this moment.
    pub async fn checkpoint(&mut self, elapsed: f64) -> Done<Vec<u8>> {
        let Run { training, fingerprint, .. } = self.run()?;
        let turns = training.settings.turns.clone();
        let extra = Extra { fingerprint: fingerprint.clone(), turns, elapsed };
        let extra = serde_json::to_value(extra).unwrap_or_default();
        captured(training, &extra).await
    }

    /// Continues from a checkpoint; seconds that the run took until then.
    pub async fn resume(&mut self, bytes: Vec<u8>) -> Done<f64> {
        let Run { training, fingerprint, .. } = self.run()?;
        let saved = saved(&bytes)?;
        drop(bytes);
        let other = |problem: &str| {
            let hint = "give the model, texts and options of that run, or choose another name";
            Failure { code: "format", message: problem.into(), hint: hint.into() }
        };
        let extra: Extra = serde_json::from_value(saved.extra.clone())
            .map_err(|_| other("the checkpoint was not written here"))?;
        if extra.fingerprint != *fingerprint {
            return Err(other("the checkpoint belongs to another model, other texts or options"));
        }
        saved.restore(training)?;
        training.settings.turns = extra.turns;
        Ok(extra.elapsed)
    }

    /// Ends the run: the model has its weights back.
    #[wasm_bindgen(js_name = endRun)]
    pub fn end_run(&mut self) {
        if let Some(run) = self.run.take() {
            self.session.end(run.training);
        }
    }

    /// Memory and time of the run that was begun, from short passes; JSON.
    pub async fn plan(&mut self) -> Done<String> {
        let device = self.device().clone();
        let Run { training, batches, .. } = self.run()?;
        let (n_rows, context) = (batches.n_rows, batches.context);
        let fixed = training.fixed();
        let n_tok = n_rows * context;
        let (step_s, activations) = match device.kind() != "cpu" {
            true => step_of(training, &device).await?,
            false => {
                let short = training.probe(1, (context / 2).max(1), 1, &machine::now_s)?;
                let long = training.probe(1, context, 1, &machine::now_s)?;
                let pass_s = long.pass_s * (n_rows * training.settings.n_accumulate) as f64;
                (pass_s + long.update_s, foretell(&short, &long, n_tok))
            }
        };
        let sum = fixed.weights + fixed.moments + fixed.gradients + activations;
        let per_step = n_tok * training.settings.n_accumulate;
        let n_epoch = training.n_tok_epoch().div_ceil(per_step.max(1));
        let end = training.settings.end();
        let seconds = (end != Settings::OPEN).then_some(end as f64 * step_s);
        let json = json!({
            "tokens": training.n_tok_epoch(), "stepsPerEpoch": n_epoch, "stepSeconds": step_s,
            "seconds": seconds, "checkpointBytes": fixed.gradients + fixed.moments,
            "memory": {
                "weights": fixed.weights, "moments": fixed.moments,
                "gradients": fixed.gradients, "activations": activations, "sum": sum,
            },
        });
        Ok(json.to_string())
    }
}

impl WebModel {
    fn run(&mut self) -> Done<&mut Run> {
        let none = || Failure::input("no run is under way", "start one with a Trainer");
        self.run.as_mut().ok_or_else(none)
    }

    /// Chooses what is trained, unless it was; what that is, as JSON.
    fn choose(&mut self, method: &Method, options: &TrainerOptions) -> Done<String> {
        let wanted = Some((method.clone(), options.quant.clone()));
        let n_all = self.session.model().n_params();
        if self.method == wanted {
            let words = format!("continues the method {method}");
            return Ok(json!({ "coverage": words, "parameters": n_all }).to_string());
        }
        let seed = options.seed.unwrap_or(0);
        let coverage = self.session.adapt(method, options.quant.as_deref(), seed)?;
        self.method = wanted;
        let json = json!({
            "coverage": coverage.to_string(), "trainedParameters": coverage.n_trained,
            "parameters": coverage.n_all,
        });
        Ok(json.to_string())
    }

    /// Documents as they are measured.
    fn encode(&self, documents: &[Document]) -> Done<Vec<Encoded>> {
        let items: Vec<_> = documents.iter().map(|it| (it.n_bytes(), None)).collect();
        let document = |idx: usize| Ok(documents[idx].clone());
        let corpus = Corpus::hold(&items, &document, self.session.tokenizer())?;
        Ok(corpus.held_out(usize::MAX)?)
    }
}

/// The bytes of a checkpoint.
async fn captured(training: &Training, extra: &Value) -> Done<Vec<u8>> {
    let path = folder().join("checkpoint");
    training.capture(Extent::Run, extra).await?.save(&path)?;
    Ok(take_files(&path).pop().map(|file| file.1).unwrap_or_default())
}

/// A checkpoint of these bytes.
fn saved(bytes: &[u8]) -> Done<Saved> {
    let path = folder().join("checkpoint");
    elapid::write(&path, |sink| sink(bytes))?;
    let found = Saved::open(&path);
    take_files(&path);
    Ok(found?)
}

/// Seconds and bytes of a step on a GPU: nobody can wait for a pass of it, so that whole steps are
/// made and taken back. The first compiles kernels.
async fn step_of(training: &mut Training, device: &Device) -> Done<(f64, usize)> {
    let before = captured(training, &Value::Null).await?;
    let n_before = device.memory().reserved;
    let mut step_s = 0.0;
    for _ in 0..2 {
        let begin = machine::now_s();
        training.step().await?;
        step_s = machine::now_s() - begin;
    }
    let n_bytes = device.memory().reserved.saturating_sub(n_before);
    saved(&before)?.restore(training)?;
    Ok((step_s, n_bytes))
}

/// A hash of everything that decides the steps of a run.
fn fingerprint(options: &str, frozen: &str, documents: &[Document]) -> String {
    let options: Value = serde_json::from_str(options).unwrap_or_default();
    let mut hash = name_hash(&format!("{options} {frozen}"));
    for document in documents {
        hash = name_hash(&format!("{hash:x} {} {}", document.name, document.text()));
    }
    format!("{hash:016x}")
}
