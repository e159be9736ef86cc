//! The one loop: batches in order, a rate for every step, and what to do when the loss runs away.
//!
//! Everything that decides a step is a function of the settings and of `Progress`, which a
//! checkpoint holds: a run that is resumed from one continues as if nothing had happened, to the
//! bit. What a caller decides on the way, such as how long the run is, becomes a `Turn` in the
//! settings: it changes the steps after it and none before.
//!
//! A step diverges when loss or gradients are not finite, or when the loss jumps:
//!
//! ```text
//! loss > mean + ln(spike) + 6 deviation
//! ```
//!
//! with mean and mean deviation of the last steps (each new one counts a twentieth), once twenty
//! have been seen; before, when it is twice the mean of at least three. Such a step changes
//! nothing. The caller goes back to the last good state and calls `retreat`: half the rate, and
//! the batch is left out, which would only diverge again.
//!
//! Not here: the clock, files, evaluation (`eval.rs`); the caller decides when to save and measure.

use super::{StepReport, StepSettings, Trainer};
use crate::data::pack::{Cursor, Loader, PackedBatch};
use crate::error::{Error, Result};
use crate::model::weights::Noise;
use crate::ops::adamw::AdamW;
use crate::train::optim::OptimizerKind;
use crate::train::schedule::Schedule;
use serde::{Deserialize, Serialize};

/// Settings of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// Steps in all; [`Settings::OPEN`] where a turn will say.
    pub n_steps: u64,
    /// Batches whose gradients are added in one step.
    pub n_accumulate: usize,
    /// The highest learning rate.
    pub lr: f64,
    /// The lowest, as a share of the highest.
    pub lr_min: f64,
    /// Steps over which the rate rises.
    pub n_warmup: u64,
    /// What it does afterwards.
    pub schedule: Schedule,
    /// Where the run was given another end, by step.
    #[serde(default)]
    pub turns: Vec<Turn>,
    /// Rows are cut into pieces of at most so many tokens, which do not see each other, until a
    /// turn, or for the first four fifths of the steps.
    #[serde(default)]
    pub short_rows: Option<usize>,
    /// What changes matrices.
    pub optimizer: OptimizerKind,
    /// Memory of the first moment.
    pub beta1: f64,
    /// Memory of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay of matrices.
    pub weight_decay: f64,
    /// Gradients are scaled down to this norm.
    pub clip_norm: Option<f64>,
    /// Largest change of a parameter in one step, as a share of its size.
    pub trust: Option<f64>,
    /// A step whose perplexity is this many times the usual has diverged.
    pub spike: Option<f64>,
    /// Of dropout.
    pub seed: u64,
    /// Where a GPU computes: what the optimizer remembers of experts is in the memory of the CPU,
    /// and so many bytes of it are on the GPU at once. Steps have the same bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_bytes_max: Option<usize>,
    /// With a teacher: what both models' logits are divided by before they are compared.
    #[serde(default = "default_temperature")]
    pub teacher_temperature: f64,
    /// With a teacher: its share of the loss, from 0 to 1.
    #[serde(default = "default_share")]
    pub teacher_share: f64,
}

/// Settings of runs that are older than teachers.
fn default_temperature() -> f64 {
    Settings::default().teacher_temperature
}

fn default_share() -> f64 {
    Settings::default().teacher_share
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            n_steps: 1000,
            n_accumulate: 1,
            lr: 1e-3,
            lr_min: 0.1,
            n_warmup: 20,
            schedule: Schedule::Cosine,
            turns: Vec::new(),
            short_rows: None,
            optimizer: OptimizerKind::AdamW,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            clip_norm: Some(1.0),
            trust: None,
            spike: Some(1.25),
            seed: 0,
            expert_bytes_max: None,
            teacher_temperature: 2.0,
            teacher_share: 0.5,
        }
    }
}

/// A new end of a run: from `step` on the learning rate falls in a line from `rate`, a share of the
/// highest, to its minimum at `n_steps`; a constant rate stays.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// The first step (from 0) that it changes.
    pub step: u64,
    /// Steps in all.
    pub n_steps: u64,
    /// Share of the highest rate at `step`.
    pub rate: f64,
}

impl Settings {
    /// `n_steps` of a run whose end a [`Turn`] decides.
    pub const OPEN: u64 = u64::MAX;

    /// Steps in all, as far as it is decided.
    pub fn end(&self) -> u64 {
        self.turns.last().map_or(self.n_steps, |turn| turn.n_steps)
    }

    /// The share of the highest rate that a step (from 0) gets.
    pub(crate) fn rate(&self, step: u64) -> f64 {
        let turn = self.turns.iter().rfind(|turn| turn.step <= step);
        let Some(turn) = turn.filter(|_| self.schedule != Schedule::Constant) else {
            return self.schedule.rate(step, self.n_steps, self.n_warmup, self.lr_min);
        };
        let n_fall = turn.n_steps.saturating_sub(turn.step).max(1) as f64;
        let height = 1.0 - ((step - turn.step) as f64 / n_fall).min(1.0);
        self.lr_min + (turn.rate - self.lr_min) * height
    }

    /// The length that a step (from 0) cuts rows to.
    fn row_length(&self, step: u64) -> Option<usize> {
        let until = self.turns.first().map_or(u64::MAX, |turn| turn.step);
        self.short_rows.filter(|_| step < until.min(self.n_steps - self.n_steps / 5))
    }

    /// Ends the run at `n_steps`, with the rate falling from what it is at `step`, or from
    /// `at_least`.
    pub fn turn(&mut self, step: u64, n_steps: u64, at_least: f64) {
        let rate = self.rate(step).max(at_least);
        self.turns.retain(|turn| turn.step < step);
        self.turns.push(Turn { step, n_steps, rate });
    }
}

/// Where a run is: what a checkpoint must hold besides weights and moments.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps made.
    pub step: u64,
    /// Tokens seen.
    pub n_tok: u64,
    /// What comes next of the data.
    pub cursor: Cursor,
    /// How often the rate was halved.
    pub n_halved: u32,
    /// Of the losses so far.
    pub mean: f64,
    /// Mean distance from the mean.
    pub deviation: f64,
    /// Losses in the means, up to what they remember.
    pub n_seen: u32,
    /// Places of batches that a step diverged on: they are left out.
    pub skipped: Vec<Cursor>,
}

/// Share of a new loss in the means.
const SHARE: f64 = 0.05;
/// Losses before a jump is believed, and before one to twice the mean is.
const N_SEEN_MIN: u32 = 20;
const N_SEEN_FEW: u32 = 3;
/// Deviations that a loss may be off without being a jump.
const N_DEVIATIONS: f64 = 6.0;

impl Progress {
    fn is_spike(&self, loss: f64, spike: f64) -> bool {
        match self.n_seen {
            0..N_SEEN_FEW => false,
            N_SEEN_FEW..N_SEEN_MIN => loss > 2.0 * self.mean + spike.ln(),
            _ => loss > self.mean + spike.ln() + N_DEVIATIONS * self.deviation,
        }
    }

    fn see(&mut self, loss: f64) {
        self.n_seen = self.n_seen.saturating_add(1);
        let share = SHARE.max(1.0 / f64::from(self.n_seen));
        if self.n_seen > 1 {
            self.deviation += share * ((loss - self.mean).abs() - self.deviation);
        }
        self.mean += share * (loss - self.mean);
    }
}

/// What came of a step.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// It was made.
    Made {
        /// What it found.
        report: StepReport,
        /// The rate it was made with.
        lr: f64,
        /// Tokens in it.
        n_tok: usize,
    },
    /// It diverged and nothing was changed; why, in words.
    Diverged(String),
}

/// A model, data and settings: a run.
pub struct Training {
    /// The model and its optimizer.
    pub trainer: Trainer,
    /// The data.
    pub loader: Loader,
    /// The settings, which do not change.
    pub settings: Settings,
    progress: Progress,
    /// The batches of the next step, made while the device was busy with the last one.
    ready: Option<Result<Ready>>,
}

/// The batches of a step, and where the data stands before and after them.
struct Ready {
    place: Cursor,
    parts: Vec<PackedBatch>,
    after: Cursor,
}

impl Training {
    /// A run before its first step.
    pub(crate) fn new(trainer: Trainer, loader: Loader, settings: Settings) -> Result<Training> {
        check(&settings)?;
        let progress = Progress { cursor: loader.cursor(), ..Progress::default() };
        Ok(Training { trainer, loader, settings, progress, ready: None })
    }

    /// Rows of a batch from now on.
    pub fn set_rows(&mut self, n_rows: usize) {
        self.ready = None;
        self.loader.set_rows(n_rows);
    }

    /// Whether activations are computed again in the backward pass, which takes less memory.
    pub fn set_checkpointing(&mut self, on: bool) {
        self.trainer.options.checkpoint = on;
    }

    /// Tokens of one time through the documents, each as often as its weight says.
    pub fn n_tok_epoch(&self) -> usize {
        self.loader.n_tok_epoch()
    }

    /// A hash of everything that training must not change.
    pub fn frozen_hash(&self) -> String {
        self.trainer.weights.device().run(|| self.trainer.frozen_hash())
    }

    /// Where it is.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Continues from elsewhere. Weights and moments are restored by `state::restore`.
    pub(crate) fn set_progress(&mut self, progress: Progress) -> Result<()> {
        self.ready = None;
        self.loader.seek(progress.cursor)?;
        self.progress = progress;
        Ok(())
    }

    /// Whether all steps are made.
    pub fn is_done(&self) -> bool {
        self.progress.step >= self.settings.end()
    }

    /// The rate of the next step.
    pub fn lr(&self) -> f64 {
        let rate = self.settings.rate(self.progress.step);
        self.settings.lr * rate * 0.5f64.powi(self.progress.n_halved as i32)
    }

    /// After going back from `later`, where a step diverged: half the rate that was used there, and
    /// without the batch that came next there.
    pub fn retreat(&mut self, later: &Progress) {
        self.progress.n_halved = later.n_halved + 1;
        self.progress.skipped = later.skipped.clone();
        self.progress.skipped.push(later.cursor);
    }

    /// The batches of the step to come, without those that one diverged on.
    fn next_batches(loader: &mut Loader, settings: &Settings, skipped: &[Cursor]) -> Result<Ready> {
        loop {
            let place = loader.cursor();
            let parts = (0..settings.n_accumulate).map(|_| loader.next_batch());
            let parts = parts.collect::<Result<_>>()?;
            if !skipped.contains(&place) {
                return Ok(Ready { place, parts, after: loader.cursor() });
            }
        }
    }

    /// The next step; awaited in a browser.
    #[cfg(not(target_family = "wasm"))]
    pub fn step(&mut self) -> Result<Outcome> {
        let device = self.trainer.weights.device().clone();
        device.run(|| crate::tensor::gpu::later::wait(self.step_later()))
    }

    pub(crate) async fn step_later(&mut self) -> Result<Outcome> {
        let lr = self.lr();
        let Training { trainer, loader, settings, progress, ready } = self;
        let mut next = || Training::next_batches(loader, settings, &progress.skipped);
        let made = ready.take().unwrap_or_else(&mut next)?;
        // What was made before a retreat may be what is left out now.
        let is_left_out = progress.skipped.contains(&made.place);
        let Ready { place, mut parts, after } = if is_left_out { next()? } else { made };
        if let Some(most) = settings.row_length(progress.step) {
            for PackedBatch { batch, .. } in &mut parts {
                batch.segments = batch.segments.cut(most);
            }
        }
        let n_tok = parts.iter().map(|part| part.batch.tokens.len()).sum();
        let noise = Noise { seed: settings.seed, counter: progress.step };
        let meanwhile = || *ready = Some(next());
        let (report, grads) = trainer.gradients_later(&parts, Some(noise), meanwhile).await?;
        if let Some(why) = self.diverged(&report) {
            self.ready = None;
            self.progress.cursor = place;
            self.loader.seek(place)?;
            return Ok(Outcome::Diverged(why));
        }
        self.trainer.update(&grads, report.grad_norm, &self.step_settings(lr));
        self.progress.see(f64::from(report.loss));
        self.progress.step += 1;
        self.progress.n_tok += n_tok as u64;
        self.progress.cursor = after;
        Ok(Outcome::Made { report, lr, n_tok })
    }

    fn diverged(&self, report: &StepReport) -> Option<String> {
        let StepReport { loss, grad_norm, .. } = *report;
        if report.check().is_err() {
            return Some(format!("loss {loss}, gradient norm {grad_norm}"));
        }
        let spike = self.settings.spike?;
        let mean = self.progress.mean;
        let is_spike = self.progress.is_spike(f64::from(loss), spike);
        is_spike.then(|| format!("loss {loss:.4} where {mean:.4} was usual"))
    }

    fn step_settings(&self, lr: f64) -> StepSettings {
        let s = &self.settings;
        let adamw = AdamW {
            lr,
            beta1: s.beta1,
            beta2: s.beta2,
            eps: s.eps,
            weight_decay: s.weight_decay,
            trust: s.trust,
            ..AdamW::default()
        };
        StepSettings { adamw, clip_norm: s.clip_norm }
    }
}

/// Refuses settings that no run can have.
pub fn check(s: &Settings) -> Result<()> {
    let positive = |x: f64| x.is_finite() && x > 0.0;
    let share = |x: f64| (0.0..1.0).contains(&x);
    let (temperature, of_teacher) = (s.teacher_temperature, s.teacher_share);
    let checks: [(&str, f64, bool, &str); 11] = [
        ("lr", s.lr, positive(s.lr), "above zero"),
        ("lr_min", s.lr_min, (0.0..=1.0).contains(&s.lr_min), "from 0 to 1, a share of the rate"),
        ("beta1", s.beta1, share(s.beta1), "from 0 to below 1"),
        ("beta2", s.beta2, share(s.beta2), "from 0 to below 1"),
        ("eps", s.eps, s.eps.is_finite() && s.eps >= 0.0, "zero or above"),
        (
            "weight_decay",
            s.weight_decay,
            s.weight_decay.is_finite() && s.weight_decay >= 0.0,
            "zero or above",
        ),
        ("clip", s.clip_norm.unwrap_or(1.0), s.clip_norm.is_none_or(positive), "above zero"),
        ("trust", s.trust.unwrap_or(1.0), s.trust.is_none_or(positive), "above zero"),
        ("spike", s.spike.unwrap_or(2.0), s.spike.is_none_or(|x| x > 1.0), "above one"),
        ("teacher_temperature", temperature, positive(temperature), "above zero"),
        ("teacher_share", of_teacher, (0.0..=1.0).contains(&of_teacher), "from 0 to 1"),
    ];
    for (name, value, is_good, want) in checks {
        if !is_good {
            let problem = format!("the setting `{name}` is {value}");
            return Err(Error::input(problem, &format!("it must be {want}")));
        }
    }
    if s.short_rows == Some(0) {
        return Err(Error::input("rows of no tokens", "give at least one"));
    }
    if s.n_accumulate == 0 {
        return Err(Error::input("a step of no batches", "accumulate at least one"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_changes_the_steps_after_it_and_none_before() {
        let open = Settings {
            n_steps: Settings::OPEN,
            n_warmup: 2,
            schedule: Schedule::Wsd { decay: 0.2 },
            ..Settings::default()
        };
        let rates = |s: &Settings| (0..20).map(|step| s.rate(step)).collect::<Vec<f64>>();
        assert_eq!(rates(&open)[2..], [1.0; 18]);
        let mut turned = open.clone();
        turned.turn(10, 14, 0.0);
        assert_eq!(turned.end(), 14);
        assert_eq!(rates(&turned)[..11], rates(&open)[..11]);
        assert_eq!(turned.rate(12), 0.1 + 0.9 * 0.5);
        assert!((turned.rate(14) - 0.1).abs() < 1e-12);
        // Moved on the way: what was there before stays, and the rate falls on from where it was.
        let mut moved = turned.clone();
        moved.turn(12, 20, 0.0);
        assert_eq!(moved.end(), 20);
        assert_eq!(rates(&moved)[..13], rates(&turned)[..13]);
        assert!(moved.rate(13) < turned.rate(12) && moved.rate(13) > turned.rate(13));
        // Decided again for the same step: the later word counts.
        moved.turn(12, 13, 0.0);
        assert_eq!((moved.turns.len(), moved.end()), (2, 13));
        let text = serde_json::to_string(&moved).unwrap();
        assert_eq!(serde_json::from_str::<Settings>(&text).unwrap(), moved);
    }

    #[test]
    fn rows_are_short_until_the_rate_falls() {
        let short = Settings { n_steps: 10, short_rows: Some(4), ..Settings::default() };
        let lengths = |s: &Settings| (0..12).map(|n| s.row_length(n).is_some()).collect::<Vec<_>>();
        let until = |n: usize| (0..12).map(|step| step < n).collect::<Vec<_>>();
        assert_eq!(lengths(&short), until(8));
        let mut open = Settings { n_steps: Settings::OPEN, ..short.clone() };
        assert_eq!(lengths(&open), until(12));
        open.turn(5, 9, 0.0);
        open.turn(7, 11, 0.0);
        assert_eq!(lengths(&open), until(5));
        // Given another end later: what was made before is made again as it was.
        let mut longer = short.clone();
        longer.turn(9, 30, 0.0);
        assert_eq!(lengths(&longer), until(8));
        assert_eq!(lengths(&Settings::default()), until(0));
    }

    #[test]
    fn a_constant_rate_stays_whatever_the_end() {
        let mut settings = Settings { schedule: Schedule::Constant, ..Settings::default() };
        settings.turn(30, 40, 0.0);
        assert_eq!((settings.rate(35), settings.end()), (1.0, 40));
    }
}
