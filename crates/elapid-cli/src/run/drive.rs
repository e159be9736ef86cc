//! The loop of a run: steps, measurements, checkpoints, and what is done when it goes wrong.
//!
//! What happens after step k depends on the checkpoint of step k and on nothing else: not on the
//! clock, and not on whether the run was stopped in between.

use super::checkpoints::Checkpoints;
use super::config::RunConfig;
use super::data::Data;
use super::finish;
use super::plan::Plan;
use super::prepare::Prepared;
use crate::failpoint;
use crate::machine;
use crate::report::events::Events;
use crate::report::live::{Live, Moment};
use crate::report::metrics::{EvalRecord, Metrics, NoteRecord, Record, SaveRecord, StepRecord};
use crate::report::{Done, Failure};
use elapid::Device;
use elapid::Encoded;
use elapid::Outcome;
use elapid::Saved;
use elapid::Tokenizer;
use elapid::{DocScore, EvalSettings, Score};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A run that is ready to go.
pub struct Run {
    /// Its directory.
    pub dir: PathBuf,
    /// What it is.
    pub config: RunConfig,
    /// What it learns from.
    pub data: Data,
    /// The estimate.
    pub plan: Plan,
    /// Model, data, tokenizer.
    pub prepared: Prepared,
    /// Where it computes.
    pub device: Device,
    /// What a person sees.
    pub live: Live,
}

/// What a checkpoint keeps besides the engine's progress.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Watch {
    /// Seconds of training so far.
    pub elapsed_s: f64,
    /// The best measurement so far.
    pub best: Option<Best>,
    /// Measurements since then.
    pub n_worse: u32,
    /// The step of the best one when the run was last saved.
    pub best_saved: u64,
    /// The most memory that the run held, in bytes.
    pub peak: u64,
    /// How often the run went back.
    pub n_rollbacks: u32,
    /// A hash of what is frozen.
    pub frozen_hash: String,
}

/// A measurement on held-out files.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Nats per token.
    pub loss: f64,
    /// After this step.
    pub step: u64,
    /// How often the run had gone back before: a step may come more than once.
    pub n_rollbacks: u32,
}

/// Times that a run may go back before it gives up.
const N_ROLLBACKS_MAX: u32 = 8;

/// What made a run go back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// A step diverged.
    Step,
    /// Held-out files measured worse: the newest checkpoint may be bad already.
    HeldOut,
}

/// How often Ctrl-C was pressed.
static N_INTERRUPTS: AtomicU32 = AtomicU32::new(0);

/// The first Ctrl-C asks the run to save and end, the second ends the process.
fn listen() {
    // A handler may be there already; then it is ours.
    let _ = ctrlc::set_handler(|| {
        if N_INTERRUPTS.fetch_add(1, Ordering::SeqCst) > 0 {
            std::process::exit(130);
        }
        eprintln!("\nstopping  finishing this step and saving; press Ctrl-C again to stop at once");
    });
}

fn is_interrupted() -> bool {
    N_INTERRUPTS.load(Ordering::SeqCst) > 0
}

/// Why the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All steps are made.
    Done,
    /// The loss on held-out files no longer fell.
    Early,
    /// Ctrl-C.
    Interrupted,
    /// It diverged again and again.
    GaveUp,
}

/// The loop's own state.
struct Loop {
    checkpoints: Checkpoints,
    metrics: Metrics,
    events: Events,
    watch: Watch,
    /// When this part of the run began, and what had elapsed before.
    begin: Instant,
    before: f64,
    /// Held-out documents that are measured in between.
    sample: Vec<Encoded>,
}

impl Loop {
    fn elapsed(&self) -> f64 {
        self.before + self.begin.elapsed().as_secs_f64()
    }

    fn extra(&self) -> serde_json::Value {
        let peak = machine::peak_bytes().unwrap_or(0).max(self.watch.peak);
        let watch = Watch { elapsed_s: self.elapsed(), peak, ..self.watch.clone() };
        serde_json::to_value(watch).expect("numbers and text are JSON")
    }
}

/// Time as TensorBoard counts it.
fn wall() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl Run {
    /// From the beginning.
    pub fn start(mut self) -> Done<ExitCode> {
        listen();
        self.choose_measured();
        let metrics = Metrics::open(&self.dir, None)?;
        let mut state = self.open_loop(metrics, Watch::default(), 0)?;
        state.watch.frozen_hash = self.prepared.frozen_hash.clone();
        let scores = self.measure(&self.prepared.held_out)?;
        finish::keep_scores(&self.dir, &scores)?;
        finish::write_samples(&self, 0)?;
        if !state.sample.is_empty() {
            // What is there already is the first to be beaten.
            let loss = self.eval(&mut state)?;
            self.judge(&mut state, loss)?;
        }
        state.checkpoints.save(&self.prepared.training, &state.extra())?;
        self.run(state)
    }

    /// From the newest checkpoint.
    pub fn go_on(mut self) -> Done<ExitCode> {
        let checkpoints = self.checkpoints()?;
        if checkpoints.is_empty() {
            // It was stopped before its first step.
            return self.start();
        }
        listen();
        self.choose_measured();
        let live = &mut self.live;
        let saved = checkpoints.newest(&mut |problem| live.line("note", &problem))?;
        saved.restore(&mut self.prepared.training)?;
        let watch = watch_of(&saved)?;
        if watch.frozen_hash != self.prepared.frozen_hash {
            let problem = "the base model is not the one this run started with";
            return Err(Failure::new(problem, "restore the old one, or start a new run"));
        }
        let step = saved.step();
        let metrics = Metrics::open(&self.dir, Some(step))?;
        let (dir, device) = (self.dir.display(), self.device.describe());
        self.live.line("resume", &format!("{dir} at step {step} on {device}"));
        let state = self.open_loop(metrics, watch, step)?;
        self.run(state)
    }

    fn checkpoints(&self) -> Done<Checkpoints> {
        Checkpoints::open(&self.dir.join("checkpoints"), self.config.save_every)
    }

    /// Leaves of the held-out documents as many as there is time to measure.
    fn choose_measured(&mut self) {
        let all = std::mem::take(&mut self.prepared.held_out);
        let n_all = all.len();
        let n_tok = |list: &[Encoded]| list.iter().map(|one| one.ids.len()).sum::<usize>();
        let tokenizer = self.prepared.session.tokenizer();
        self.prepared.held_out = sample(&all, self.config.n_final_tok, tokenizer);
        let n = self.prepared.held_out.len();
        let (some, whole) = (n_tok(&self.prepared.held_out), n_tok(&all));
        if some < whole {
            let text = format!(
                "{n} of {n_all} held-out documents, {some} of {whole} tokens, to stay within \
                 the time budget"
            );
            self.live.line("measure", &text);
        }
    }

    fn open_loop(&self, metrics: Metrics, watch: Watch, step: u64) -> Done<Loop> {
        Ok(Loop {
            checkpoints: self.checkpoints()?,
            metrics,
            events: Events::create(&self.dir, wall(), step + 1)?,
            begin: Instant::now(),
            before: watch.elapsed_s,
            watch,
            sample: sample(
                &self.prepared.held_out,
                self.config.n_eval_tok,
                self.prepared.session.tokenizer(),
            ),
        })
    }

    fn run(mut self, mut state: Loop) -> Done<ExitCode> {
        let end = self.steps(&mut state)?;
        self.live.finish();
        let step = self.prepared.training.progress().step;
        if end == End::Interrupted {
            self.save(&mut state)?;
            let dir = self.dir.display();
            self.live.line(
                "stopped",
                &format!("at step {step}; resume with `elapid train --resume {dir}`"),
            );
            return Ok(ExitCode::from(130));
        }
        // A run that was finished before is only measured again.
        let is_new = !self.dir.join(finish::SUMMARY).exists();
        if end == End::Early && is_new {
            let n_worse = state.watch.n_worse;
            let text = format!("stopped early: {n_worse} evaluations without improvement");
            self.note(&mut state, &text)?;
        }
        let gave_up = match end {
            End::GaveUp => Some(format!("gave up after {N_ROLLBACKS_MAX} rollbacks")),
            _ => None,
        };
        if let Some(text) = gave_up.as_ref().filter(|_| is_new) {
            self.note(&mut state, text)?;
        }
        if !state.checkpoints.is_due(step) {
            self.save(&mut state)?;
        }
        self.take_best(&mut state, is_new)?;
        let code = finish::finish(&mut self, state.watch.peak, &|| state.elapsed())?;
        match gave_up {
            None => Ok(code),
            Some(text) => Err(Failure::new(text, "start a new run with a smaller --lr")),
        }
    }

    /// Makes steps until something ends them.
    fn steps(&mut self, state: &mut Loop) -> Done<End> {
        loop {
            let step = self.prepared.training.progress().step;
            // What is due after step k is done before step k + 1, also when k was the last thing
            // before a checkpoint: then it was done already.
            if self.prepared.training.is_done() {
                return Ok(End::Done);
            }
            if is_interrupted() {
                return Ok(End::Interrupted);
            }
            if state.watch.n_rollbacks > N_ROLLBACKS_MAX {
                return Ok(End::GaveUp);
            }
            if state.watch.n_worse >= self.config.patience.unwrap_or(u32::MAX) {
                return Ok(End::Early);
            }
            failpoint::hit("train.step")?;
            let begin = Instant::now();
            let training = &mut self.prepared.training;
            match training.step()? {
                Outcome::Diverged(why) => {
                    let text = format!("step {}: {why}", step + 1);
                    self.go_back(state, Cause::Step, &text)?;
                    continue;
                }
                Outcome::Made { report, lr, n_tok } => {
                    let ms = begin.elapsed().as_secs_f64() * 1e3;
                    let record = StepRecord {
                        step: step + 1,
                        loss: report.loss,
                        lr,
                        grad_norm: report.grad_norm,
                        ms,
                        tok_per_s: n_tok as f64 / ms * 1e3,
                        n_tok: self.prepared.training.progress().n_tok,
                        elapsed_s: state.elapsed(),
                    };
                    self.made(state, &record)?;
                }
            }
            self.after_step(state)?;
        }
    }

    fn made(&mut self, state: &mut Loop, record: &StepRecord) -> Done<()> {
        state.metrics.append(&Record::Step(*record))?;
        failpoint::hit("train.made")?;
        state.events.step(wall(), record)?;
        let moment = Moment {
            now: Duration::from_secs_f64(state.elapsed()),
            step: record,
            n_steps: self.config.settings.n_steps,
            limit_share: Some(record.tok_per_s / self.plan.limit_tok_s),
        };
        self.live.step(&moment);
        Ok(())
    }

    /// Measures and saves where that is due.
    fn after_step(&mut self, state: &mut Loop) -> Done<()> {
        let step = self.prepared.training.progress().step;
        let is_last = self.prepared.training.is_done();
        if (step.is_multiple_of(self.config.eval_every) || is_last) && !state.sample.is_empty() {
            let loss = self.eval(state)?;
            if self.went_bad(state, loss) {
                let was = state.watch.best.map_or(0.0, |best| best.loss);
                let text = format!("held-out loss {loss:.4}, it was {was:.4}");
                return self.go_back(state, Cause::HeldOut, &text);
            }
            self.judge(state, loss)?;
        }
        if state.checkpoints.is_due(step) {
            self.save(state)?;
        }
        Ok(())
    }

    fn eval(&mut self, state: &mut Loop) -> Done<f64> {
        let scores = self.measure(&state.sample)?;
        let score = Score::of(&scores.iter().collect::<Vec<_>>());
        let record = EvalRecord {
            step: self.prepared.training.progress().step,
            loss: score.loss(),
            bits_per_byte: score.bits_per_byte(),
            elapsed_s: state.elapsed(),
        };
        state.metrics.append(&Record::Eval(record))?;
        state.events.eval(wall(), &record)?;
        self.live.eval(&record, self.config.settings.n_steps);
        Ok(record.loss)
    }

    /// Whether held-out perplexity has risen so far that continuing makes no sense.
    fn went_bad(&self, state: &Loop, loss: f64) -> bool {
        match (self.config.settings.spike, state.watch.best) {
            (Some(spike), Some(best)) => !loss.is_finite() || loss > best.loss + spike.ln(),
            _ => false,
        }
    }

    fn judge(&mut self, state: &mut Loop, loss: f64) -> Done<()> {
        let step = self.prepared.training.progress().step;
        let is_better = state.watch.best.is_none_or(|best| loss < best.loss);
        if is_better && loss.is_finite() {
            state.watch.best = Some(Best { loss, step, n_rollbacks: state.watch.n_rollbacks });
            state.watch.n_worse = 0;
            state.checkpoints.save_best(&self.prepared.training, &state.extra())?;
        } else {
            state.watch.n_worse += 1;
        }
        Ok(())
    }

    /// All of these documents.
    pub fn measure(&self, documents: &[Encoded]) -> Done<Vec<DocScore>> {
        let mut settings = EvalSettings::new(self.config.context);
        settings.n_tok_batch = self.config.n_rows * self.config.context;
        // Its batches have other sizes than those of training: buffers would lie beside buffers.
        self.device.trim();
        let scores = self.prepared.training.score(documents, &settings);
        self.device.trim();
        Ok(scores?)
    }

    fn save(&mut self, state: &mut Loop) -> Done<()> {
        let step = self.prepared.training.progress().step;
        let path = state.checkpoints.path(step);
        let path = path.strip_prefix(&self.dir).unwrap_or(&path).display().to_string();
        let record = SaveRecord { step, path };
        // The line stands before the checkpoint is valid: a run resumed from it finds its mark.
        state.metrics.append(&Record::Save(record.clone()))?;
        state.metrics.sync()?;
        state.checkpoints.save(&self.prepared.training, &state.extra())?;
        if state.checkpoints.is_due(step) {
            // The checkpoint before this one may still be resumed from.
            state.checkpoints.prune_best(state.watch.best_saved);
            state.watch.best_saved = state.watch.best.map_or(0, |best| best.step);
        }
        self.live.save(&record);
        Ok(())
    }

    fn note(&mut self, state: &mut Loop, text: &str) -> Done<()> {
        let step = self.prepared.training.progress().step;
        let record = NoteRecord { step, text: text.into() };
        state.metrics.append(&Record::Note(record.clone()))?;
        self.live.note(&record, self.config.settings.n_steps);
        Ok(())
    }

    /// Back to the last good state, with half the rate: the newest regular checkpoint, unless
    /// measurements say that it is bad already; then the best one measured.
    fn go_back(&mut self, state: &mut Loop, cause: Cause, why: &str) -> Done<()> {
        let live = &mut self.live;
        let mut note = |text: String| live.line("note", &text);
        let regular = state.checkpoints.newest_regular(&mut note)?;
        let is_bad = state.watch.n_worse > 0 || cause == Cause::HeldOut;
        let best = state.watch.best.filter(|best| is_bad && best.step < regular.step());
        let saved = best.and_then(|best| state.checkpoints.best(best.step)).unwrap_or(regular);
        self.restore(state, &saved, why)
    }

    fn restore(&mut self, state: &mut Loop, saved: &Saved, why: &str) -> Done<()> {
        let later = self.prepared.training.progress().clone();
        saved.restore(&mut self.prepared.training)?;
        self.prepared.training.retreat(&later);
        state.watch.n_rollbacks += 1;
        let step = saved.step();
        let lr = self.prepared.training.lr();
        state.checkpoints.forget_after(step);
        state.metrics = Metrics::open(&self.dir, Some(step))?;
        state.events.restart(wall(), step + 1)?;
        self.note(state, &format!("{why}: back to step {step}, learning rate halved to {lr:.2e}"))?;
        // Whoever resumes must know of it.
        self.save(state)
    }

    /// Ends with the weights that measured best.
    fn take_best(&mut self, state: &mut Loop, is_new: bool) -> Done<()> {
        let now = (self.prepared.training.progress().step, state.watch.n_rollbacks);
        let best = state.watch.best.filter(|best| (best.step, best.n_rollbacks) != now);
        let Some(Best { step, .. }) = best else { return Ok(()) };
        let text = match state.checkpoints.best(step) {
            Some(saved) => {
                saved.restore_weights(&mut self.prepared.training)?;
                format!("the weights of step {step} had the lowest held-out loss and are kept")
            }
            None => {
                format!("the best checkpoint (step {step}) cannot be read: the last is kept")
            }
        };
        if is_new { self.note(state, &text) } else { Ok(()) }
    }
}

fn watch_of(saved: &Saved) -> Done<Watch> {
    serde_json::from_value(saved.extra().clone()).map_err(|error| {
        let hint = "the run may come from another version of Elapid";
        Failure::new(format!("the checkpoint of step {}: {error}", saved.step()), hint)
    })
}

/// Documents of about so many tokens: those of the smallest hashes of names, so that the choice is
/// stable and has nothing to do with the alphabet. The last may be cut.
fn sample(documents: &[Encoded], n_tok_max: usize, tokenizer: &Tokenizer) -> Vec<Encoded> {
    let n_all: usize = documents.iter().map(|document| document.ids.len()).sum();
    if n_all <= n_tok_max {
        return documents.to_vec();
    }
    let mut order: Vec<&Encoded> = documents.iter().collect();
    order.sort_by_key(|document| elapid::name_hash(&document.name));
    let mut list = Vec::new();
    let mut n_left = n_tok_max;
    for document in order {
        let n = document.ids.len().min(n_left);
        // A few tokens of a document say little of it.
        if n < document.ids.len().min(64) {
            break;
        }
        list.push(document.cut(n, tokenizer));
        n_left -= n;
    }
    list
}
