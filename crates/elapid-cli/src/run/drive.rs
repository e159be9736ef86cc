//! The loop of a run: steps, measurements, checkpoints, and what is done when it goes wrong.
//!
//! What happens after step k depends on the checkpoint of step k and on the configuration, and on
//! nothing else: not on whether the run was stopped in between, and on the clock only by decisions
//! that the configuration keeps (`pace.rs`).
//!
//! A held-out loss that no longer falls is an end, not an error: the best weights are kept. A run
//! goes back only when a step diverges, to the checkpoint before it.

use super::checkpoints::Checkpoints;
use super::config::{Budget, RunConfig};
use super::data::Data;
use super::finish;
use super::interrupt::{is_interrupted, listen};
use super::log::Log;
use super::pace::{self, Pace};
use super::plan::Plan;
use super::prepare::Prepared;
use super::record::{Best, Watch, watch_of};
use super::sample::sample;
use super::shared;
use crate::failpoint;
use crate::machine;
use crate::ranks::{self, Ranks};
use crate::report::live::{Live, Moment};
use crate::report::metrics::{EvalRecord, NoteRecord, Record, SaveRecord, StepRecord};
use crate::report::{Done, Failure};
use elapid::Device;
use elapid::Encoded;
use elapid::Outcome;
use elapid::Saved;
use elapid::{DocScore, EvalSettings, Score};
use elapid::{Schedule, Settings};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

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
    /// When the command was started.
    pub begin: Instant,
    pub purpose: Purpose,
}

/// What comes after the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Nothing: it says how it went.
    Train,
    /// A proof: that will say it. The trained weights are kept for it.
    Adapt,
}

/// The least share of the highest rate that a run given another end starts its rest with.
const RESUMED_RATE: f64 = 0.5;

/// Times that a run may go back before it gives up.
const N_ROLLBACKS_MAX: u32 = 8;

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
    log: Log,
    watch: Watch,
    /// When this part of the run began, and what had elapsed before.
    begin: Instant,
    before: f64,
    /// Where time is the budget.
    pace: Option<Pace>,
    /// Whether a rank was interrupted, as all of them know.
    is_stopped: bool,
    /// Bytes that this rank sent in the steps of this process, and how many these were.
    sent: (u64, u64),
    /// What is measured in between: held-out documents, then those of other sets with their names.
    samples: Vec<(Option<String>, Vec<Encoded>)>,
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

/// Adds the seconds that `work` takes to `sum`.
fn timed<T>(sum: &mut f64, work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let done = work();
    *sum += begin.elapsed().as_secs_f64();
    done
}

/// The seconds that `work` takes, where it succeeds.
fn timed_result<T>(work: impl FnOnce() -> Done<T>) -> Done<f64> {
    let mut sum = 0.0;
    timed(&mut sum, work)?;
    Ok(sum)
}

/// Share of the time that checkpoints may take.
const SAVE_SHARE: f64 = 0.02;
/// Seconds between two checkpoints: not more often, and not more rarely, whatever they cost.
const SAVE_EVERY_S: (f64, f64) = (10.0, 180.0);

impl Run {
    /// From the beginning.
    pub fn start(mut self) -> Done<ExitCode> {
        listen();
        self.choose_measured();
        let log = Log::open(&self.dir, None)?;
        let mut state = self.open_loop(log, Watch::default())?;
        state.watch.frozen_hash = self.prepared.frozen_hash.clone();
        state.watch.spent.prepare_s = state.elapsed();
        let measured: Vec<Encoded> = self.prepared.measured().cloned().collect();
        let scores = timed(&mut state.watch.spent.eval_s, || self.measure(&measured));
        finish::keep_scores(&self.dir, &scores?)?;
        finish::write_samples(&self, 0)?;
        ranks::here().wait()?;
        state.watch.around_s = state.elapsed() - state.watch.spent.prepare_s;
        if !state.samples[0].1.is_empty() {
            // What is there already is the first to be beaten.
            let loss = self.eval(&mut state)?;
            self.judge(&mut state, loss)?;
        }
        self.save(&mut state)?;
        let save_s = state.checkpoints.wait()?.unwrap_or(0.0);
        state.watch.around_s += 2.0 * save_s;
        if self.config.save_every.is_none() {
            let (least, most) = SAVE_EVERY_S;
            let every_s = (save_s / SAVE_SHARE).clamp(least, most);
            let every = (every_s / self.plan.step_s) as u64;
            let every = every.clamp(1, self.config.settings.end().max(1));
            let every = ranks::here().tell(|| Ok(every))?;
            self.config.save_every = Some(every);
            self.config.write(&self.dir)?;
            state.checkpoints.set_every(every);
        }
        self.run(state)
    }

    /// From the newest checkpoint, for longer or shorter than was planned where `budget` says so.
    pub fn resume(mut self, budget: Option<Budget>) -> Done<ExitCode> {
        let checkpoints = self.checkpoints()?;
        if checkpoints.is_empty() || self.config.save_every.is_none() {
            // It was stopped before its first step.
            return self.start();
        }
        listen();
        self.choose_measured();
        let live = &mut self.live;
        let saved = checkpoints.newest(&mut |problem| live.line("note", &problem))?;
        saved.restore(&mut self.prepared.training)?;
        let mut watch = watch_of(&saved)?;
        if watch.frozen_hash != self.prepared.frozen_hash {
            let problem = "the base model is not the one this run started with";
            return Err(Failure::new(problem, "restore the old one, or start a new run"));
        }
        let step = saved.step;
        ranks::here().wait()?;
        let log = Log::open(&self.dir, Some(step))?;
        let (dir, device) = (self.dir.display(), self.device.describe());
        let on = match ranks::here() {
            Ranks { n_ranks: 1, .. } => String::new(),
            Ranks { n_ranks, .. } => format!(" in {n_ranks} ranks"),
        };
        self.live.line("resume", &format!("{dir} at step {step} on {device}{on}"));
        if let Some(budget) = budget {
            self.set_budget(budget, step)?;
        }
        watch.spent.prepare_s += self.begin.elapsed().as_secs_f64();
        let state = self.open_loop(log, watch)?;
        self.run(state)
    }

    fn checkpoints(&self) -> Done<Checkpoints> {
        let every = self.config.save_every.unwrap_or(u64::MAX);
        Checkpoints::open(&self.dir.join("checkpoints"), every)
    }

    /// Leaves of the held-out documents as many as there is time to measure.
    fn choose_measured(&mut self) {
        let sum = |prepared: &Prepared| {
            let lengths = prepared.measured().map(|one| one.ids.len());
            (prepared.measured().count(), lengths.sum::<usize>())
        };
        let (n_all, whole) = sum(&self.prepared);
        let (n_tok, tokenizer) = (self.config.n_final_tok, self.prepared.session.tokenizer());
        self.prepared.held_out = sample(&self.prepared.held_out, n_tok, tokenizer);
        let n_sets = self.prepared.sets.len();
        for set in &mut self.prepared.sets {
            set.documents = sample(&set.documents, n_tok / n_sets, tokenizer);
        }
        let (n, some) = sum(&self.prepared);
        if some < whole {
            let text = format!(
                "{n} of {n_all} held-out documents, {some} of {whole} tokens, to stay within \
                 the time budget"
            );
            self.live.line("measure", &text);
        }
    }

    fn open_loop(&self, log: Log, watch: Watch) -> Done<Loop> {
        let (n_tok, tokenizer) = (self.config.n_eval_tok, self.prepared.session.tokenizer());
        let Prepared { held_out, sets, .. } = &self.prepared;
        let few = |documents: &[Encoded], n_tok| sample(documents, n_tok, tokenizer);
        // Other sets take together as long as the held-out documents, whose choice they leave.
        let n_each = n_tok / sets.len().max(1);
        let sets = sets.iter().map(|set| (Some(set.name.clone()), few(&set.documents, n_each)));
        let held_out = (None, few(held_out, n_tok));
        Ok(Loop {
            checkpoints: self.checkpoints()?,
            log,
            begin: self.begin,
            before: watch.elapsed_s,
            watch,
            pace: None,
            is_stopped: false,
            sent: (0, 0),
            samples: std::iter::once(held_out).chain(sets).collect(),
        })
    }

    fn run(mut self, mut state: Loop) -> Done<ExitCode> {
        if let Budget::Minutes(minutes) = self.config.budget {
            let decay = match self.config.settings.schedule {
                Schedule::Wsd { decay } => decay,
                _ => pace::DECAY,
            };
            let mut pace = Pace::new(60.0 * minutes, state.watch.around_s, decay);
            pace.hear(state.elapsed(), self.prepared.training.progress().step);
            state.pace = Some(pace);
        }
        ranks::here().expect_answers();
        let end = self.steps(&mut state)?;
        self.live.finish();
        shared::say_sent(state.sent, &self.prepared.training, &mut self.live)?;
        let step = self.prepared.training.progress().step;
        if end == End::Interrupted {
            self.save(&mut state)?;
            state.checkpoints.wait()?;
            if !ranks::here().is_first() {
                return Ok(ExitCode::from(130));
            }
            let (dir, place) = (self.dir.display(), finish::export(&self)?);
            let text = format!(
                "at step {step}; resume with `elapid train --resume {dir}`; the model so far is {}",
                place.display()
            );
            self.live.line("stopped", &text);
            return Ok(ExitCode::from(130));
        }
        // A run that was finished before is only measured again.
        let is_new = !self.dir.join(finish::SUMMARY).exists();
        if end == End::Early && is_new {
            let n_worse = state.watch.n_worse;
            let text =
                format!("the held-out loss did not fall in {n_worse} evaluations: training ends");
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
        let Watch { peak, mut spent, .. } = state.watch.clone();
        spent.save_s += timed_result(|| state.checkpoints.wait())?;
        let code = finish::finish(&mut self, peak, spent, &|| state.elapsed())?;
        state.checkpoints.finish(state.watch.best.map(|best| best.step))?;
        match gave_up {
            None => Ok(code),
            Some(text) => Err(Failure::new(text, "start a new run with a smaller --lr")),
        }
    }

    /// Gives the run another end, in the middle of it or after it.
    fn set_budget(&mut self, budget: Budget, step: u64) -> Done<()> {
        let Plan { n_tok, .. } = self.plan;
        let settings = &mut self.config.settings;
        let n_steps = match budget {
            Budget::Steps(n) => n,
            Budget::Tokens(n) => n.div_ceil(n_tok as u64),
            Budget::Minutes(_) => Settings::OPEN,
        };
        // A rate that has fallen to nearly nothing would teach nothing more.
        settings.turn(step, n_steps, RESUMED_RATE);
        self.config.budget = match budget {
            Budget::Minutes(_) => budget,
            _ => Budget::Steps(n_steps),
        };
        self.config.write(&self.dir)?;
        self.prepared.training.settings = self.config.settings.clone();
        // What a run that was finished says of itself is no longer so.
        let _ = std::fs::remove_file(self.dir.join(finish::SUMMARY));
        Ok(())
    }

    /// Where the clock or a person decides something, all ranks hear of it: the end of the run that
    /// the first one's clock asks for, and whether anybody was interrupted.
    fn agree(&mut self, state: &mut Loop) -> Done<()> {
        let own = (is_interrupted(), self.end_by_clock(state));
        let all = match ranks::here().is_alone() {
            true => vec![own],
            false => ranks::here().gather(&own)?,
        };
        state.is_stopped |= all.iter().any(|it| it.0);
        if let Some(n_steps) = all.first().and_then(|it| it.1) {
            let step = self.prepared.training.progress().step;
            self.config.settings.turn(step, n_steps, 0.0);
            self.config.write(&self.dir)?;
            self.prepared.training.settings = self.config.settings.clone();
        }
        Ok(())
    }

    /// How many steps there are by the clock, where it is time to decide that.
    fn end_by_clock(&self, state: &mut Loop) -> Option<u64> {
        let (now_s, settings) = (state.elapsed(), &self.config.settings);
        let step = self.prepared.training.progress().step;
        let pace = state.pace.as_mut()?;
        pace.hear(now_s, step);
        // Steps that are made again follow what was decided when they were made first.
        if settings.turns.last().is_some_and(|turn| step < turn.step) {
            return None;
        }
        pace.decide(Some(settings.end()).filter(|end| *end != Settings::OPEN))
    }

    /// Where the rate has not begun to fall, a loss that no longer falls is a reason to: over a
    /// tenth as many steps as were made, from the next one on. False where it has.
    fn begin_fall(&mut self, step: u64) -> Done<bool> {
        let settings = &mut self.config.settings;
        let falls = settings.turns.iter().any(|turn| turn.step <= step);
        if settings.n_steps != Settings::OPEN || falls {
            return Ok(false);
        }
        // Steps that are made again find it written down.
        if settings.turns.is_empty() {
            settings.turn(step + 1, step + 1 + (step / 10).max(1), 0.0);
            self.config.write(&self.dir)?;
            self.prepared.training.settings = self.config.settings.clone();
        }
        Ok(true)
    }

    /// Steps in all, as far as is known.
    fn n_steps(&self, state: &Loop) -> u64 {
        match self.config.settings.end() {
            Settings::OPEN => {
                let step = self.prepared.training.progress().step;
                let guess = state.pace.as_ref().and_then(Pace::n_fitting);
                guess.unwrap_or(self.plan.n_steps).max(step + 1)
            }
            end => end,
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
            if state.is_stopped || ranks::here().is_alone() && is_interrupted() {
                return Ok(End::Interrupted);
            }
            if state.watch.n_rollbacks > N_ROLLBACKS_MAX {
                return Ok(End::GaveUp);
            }
            if state.watch.n_worse >= self.config.patience.unwrap_or(u32::MAX) {
                if !self.begin_fall(step)? {
                    return Ok(End::Early);
                }
                state.watch.n_worse = 0;
            }
            failpoint::hit("train.step")?;
            let mut step_s = 0.0;
            let before = ranks::here().n_sent();
            match timed(&mut step_s, || self.prepared.training.step())? {
                Outcome::Diverged(why) => {
                    let text = format!("step {}: {why}", step + 1);
                    self.go_back(state, &text)?;
                    continue;
                }
                Outcome::Made { report, lr, n_tok } => {
                    state.watch.spent.steps_s += step_s;
                    state.sent.0 += ranks::here().n_sent() - before;
                    state.sent.1 += 1;
                    let record = StepRecord {
                        step: step + 1,
                        loss: report.loss,
                        divergence: report.divergence,
                        lr,
                        grad_norm: report.grad_norm,
                        ms: step_s * 1e3,
                        tok_per_s: n_tok as f64 / step_s,
                        n_tok: self.prepared.training.progress().n_tok,
                        elapsed_s: state.elapsed(),
                    };
                    self.made(state, &record)?;
                }
            }
            self.agree(state)?;
            self.after_step(state)?;
        }
    }

    fn made(&mut self, state: &mut Loop, record: &StepRecord) -> Done<()> {
        state.log.append(&Record::Step(*record))?;
        let moment = Moment {
            now: Duration::from_secs_f64(state.elapsed()),
            step: record,
            n_steps: self.n_steps(state),
            limit_share: Some(record.tok_per_s / self.plan.limit_tok_s),
        };
        self.live.step(&moment);
        Ok(())
    }

    /// Measures and saves where that is due.
    fn after_step(&mut self, state: &mut Loop) -> Done<()> {
        let step = self.prepared.training.progress().step;
        let is_last = self.prepared.training.is_done();
        if (step.is_multiple_of(self.config.eval_every) || is_last)
            && !state.samples[0].1.is_empty()
        {
            let loss = self.eval(state)?;
            self.judge(state, loss)?;
        }
        if state.checkpoints.is_due(step) {
            self.save(state)?;
        }
        Ok(())
    }

    /// Measures on every set; returns the loss on the held-out documents, which are the first.
    fn eval(&mut self, state: &mut Loop) -> Done<f64> {
        let mut losses = Vec::new();
        for at in 0..state.samples.len() {
            let mut eval_s = 0.0;
            let scores = timed(&mut eval_s, || self.measure(&state.samples[at].1))?;
            state.watch.spent.eval_s += eval_s;
            let score = Score::of(&scores.iter().collect::<Vec<_>>());
            let record = EvalRecord {
                set: state.samples[at].0.clone(),
                step: self.prepared.training.progress().step,
                loss: score.loss(),
                bits_per_byte: score.bits_per_byte(),
                elapsed_s: state.elapsed(),
            };
            state.log.append(&Record::Eval(record.clone()))?;
            self.live.eval(&record, self.n_steps(state));
            losses.push(record.loss);
        }
        Ok(losses[0])
    }

    fn judge(&mut self, state: &mut Loop, loss: f64) -> Done<()> {
        let step = self.prepared.training.progress().step;
        let is_better = state.watch.best.is_none_or(|best| loss < best.loss);
        if is_better && loss.is_finite() {
            state.watch.best = Some(Best { loss, step, n_rollbacks: state.watch.n_rollbacks });
            state.watch.n_worse = 0;
            let extra = state.extra();
            state.checkpoints.keep_best(&self.prepared.training, &extra)?;
        } else {
            state.watch.n_worse += 1;
        }
        Ok(())
    }

    /// All of these documents, shared out among the ranks.
    pub fn measure(&self, documents: &[Encoded]) -> Done<Vec<DocScore>> {
        let mut settings = EvalSettings::new(self.config.context);
        settings.n_tok_batch = self.config.n_rows * self.config.context;
        // Its batches have other sizes than those of training: buffers would lie beside buffers.
        self.device.trim();
        let scores = shared::scores(
            documents,
            |it| it.ids.len(),
            |it| it.language,
            |own| Ok(self.prepared.training.score(own, &settings)?),
        );
        self.device.trim();
        scores
    }

    fn save(&mut self, state: &mut Loop) -> Done<()> {
        let step = self.prepared.training.progress().step;
        let path = state.checkpoints.path(step);
        let path = path.strip_prefix(&self.dir).unwrap_or(&path).display().to_string();
        let record = SaveRecord { step, path };
        state.log.append(&Record::Save(record.clone()))?;
        // The checkpoint before this one may still be resumed from: so may its best weights.
        let best_since = state.watch.best_saved;
        let extra = state.extra();
        let save_s =
            timed_result(|| state.checkpoints.save(&self.prepared.training, &extra, best_since))?;
        state.watch.spent.save_s += save_s;
        if state.checkpoints.is_due(step) {
            state.watch.best_saved = state.watch.best.map_or(0, |best| best.step);
        }
        self.live.save(&record);
        Ok(())
    }

    fn note(&mut self, state: &mut Loop, text: &str) -> Done<()> {
        let step = self.prepared.training.progress().step;
        let record = NoteRecord { step, text: text.into() };
        state.log.append(&Record::Note(record.clone()))?;
        self.live.note(&record, self.n_steps(state));
        Ok(())
    }

    /// Back to the newest regular checkpoint, with half the rate.
    fn go_back(&mut self, state: &mut Loop, why: &str) -> Done<()> {
        let live = &mut self.live;
        let saved =
            state.checkpoints.newest_regular(&mut |text: String| live.line("note", &text))?;
        self.restore(state, &saved, why)
    }

    fn restore(&mut self, state: &mut Loop, saved: &Saved, why: &str) -> Done<()> {
        let later = self.prepared.training.progress().clone();
        saved.restore(&mut self.prepared.training)?;
        self.prepared.training.retreat(&later);
        state.watch.n_rollbacks += 1;
        let step = saved.step;
        let lr = self.prepared.training.lr();
        state.checkpoints.forget_after(step)?;
        state.log.restart(&self.dir, step)?;
        self.note(state, &format!("{why}: back to step {step}, learning rate halved to {lr:.2e}"))?;
        // Whoever resumes must know of it.
        self.save(state)
    }

    /// Ends with the weights that measured best.
    fn take_best(&mut self, state: &mut Loop, is_new: bool) -> Done<()> {
        let now = (self.prepared.training.progress().step, state.watch.n_rollbacks);
        let best = state.watch.best.filter(|best| (best.step, best.n_rollbacks) != now);
        let Some(Best { step, .. }) = best else { return Ok(()) };
        let text = match state.checkpoints.best(step)? {
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
