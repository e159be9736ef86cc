//! The plan of a run, before it: how many rows go through at once so that memory suffices, what
//! memory is for, how long a step takes and how many there are.
//!
//! Rows are first divided over more passes, which costs next to nothing; then activations are
//! computed again, which costs a third; then the run is refused. What a pass needs is predicted
//! from two small ones; the pass that is chosen is then made once, for its time and its true peak.

use super::config::{Origin, RunConfig};
use super::prepare::Prepared;
use super::{Budget, Checkpointing, Wishes};
use crate::machine;
use crate::report::{Done, Failure, count, mebibytes};
use elapid::Device;
use elapid::EvalSettings;
use elapid::Size;
use elapid::{Fixed, Probe, foretell};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// What a run takes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Numbers of the model.
    pub n_params: usize,
    /// Numbers that are trained.
    pub n_trained: usize,
    /// Bytes that do not depend on the batch.
    pub fixed: Fixed,
    /// Bytes kept for the backward pass.
    pub activations: usize,
    /// Bytes of other buffers of a pass.
    pub buffers: usize,
    /// Bytes of the process besides: program, documents, tables.
    pub process: u64,
    /// The most bytes at once.
    pub peak: u64,
    /// Bytes to stay within.
    pub limit: u64,
    /// Rows in a pass.
    pub n_rows: usize,
    /// Passes in a step.
    pub n_accumulate: usize,
    /// Whether activations are computed again.
    pub checkpointing: bool,
    /// Tokens in a step.
    pub n_tok: usize,
    /// Seconds of a step.
    pub step_s: f64,
    /// Tokens a second at which products alone would take all the time.
    pub limit_tok_s: f64,
    /// Steps.
    pub n_steps: u64,
    /// Seconds of steps and measurements.
    pub total_s: f64,
}

/// Tokens in a step when nobody says.
fn default_tokens(config: &RunConfig) -> usize {
    match config.origin {
        Origin::Scratch { size: Size::Tiny, .. } => 2048,
        Origin::Scratch { size: Size::Small, .. } => 4096,
        Origin::Scratch { .. } => 8192,
        Origin::Base { .. } => 2048,
    }
}

/// How many bytes the run may hold at once.
pub fn limit(wishes: &Wishes) -> u64 {
    let held = machine::held_bytes().unwrap_or(0);
    // A tenth is left to everybody else. Where the system does not tell, all is allowed.
    let free = machine::free_bytes().map_or(u64::MAX / 2, |free| free / 10 * 9);
    wishes.memory.unwrap_or(held.saturating_add(free))
}

/// Passes that the rows of a step may be divided into.
fn divisions(n_rows: usize, wished: Option<usize>) -> Done<Vec<usize>> {
    if let Some(n) = wished {
        if !n_rows.is_multiple_of(n) {
            let problem = format!("a batch of {n_rows} cannot be split into {n} equal parts");
            return Err(Failure::new(problem, "--accumulate must divide --batch"));
        }
        return Ok(vec![n]);
    }
    Ok((1..=n_rows).filter(|n| n_rows.is_multiple_of(*n)).collect())
}

/// Buffers of a pass, foretold, with and without keeping activations.
struct Foretold {
    /// Bytes of the process without any pass.
    base: u64,
    small: Probe,
    large: Probe,
}

impl Foretold {
    fn measure(prepared: &mut Prepared, context: usize) -> Done<Foretold> {
        let small = prepared.training.probe(1, context)?;
        let large = prepared.training.probe(2, context)?;
        let base = machine::held_bytes().unwrap_or(0);
        Ok(Foretold { base, small, large })
    }

    fn peak(&self, n_tok: usize) -> u64 {
        self.base + foretell(&self.small, &self.large, n_tok) as u64
    }
}

/// Rows, passes and checkpointing that fit.
fn choose(config: &mut RunConfig, prepared: &mut Prepared, wishes: &Wishes) -> Done<()> {
    let n_rows = wishes.n_rows.unwrap_or_else(|| (default_tokens(config) / config.context).max(1));
    let divisions = divisions(n_rows, wishes.n_accumulate)?;
    let limit = limit(wishes);
    let ways: &[bool] = match wishes.checkpointing {
        Checkpointing::Auto => &[false, true],
        Checkpointing::On => &[true],
        Checkpointing::Off => &[false],
    };
    let mut least = u64::MAX;
    for &checkpointing in ways {
        prepared.training.set_checkpointing(checkpointing);
        let foretold = Foretold::measure(prepared, config.context)?;
        for &n_accumulate in &divisions {
            let peak = foretold.peak(n_rows / n_accumulate * config.context);
            least = least.min(peak);
            if peak <= limit {
                config.n_rows = n_rows / n_accumulate;
                config.checkpointing = checkpointing;
                config.settings.n_accumulate = n_accumulate;
                return Ok(());
            }
        }
    }
    Err(refusal(config, least, limit))
}

fn refusal(config: &RunConfig, needed: u64, limit: u64) -> Failure {
    let [needed, limit] = [needed, limit].map(|n| mebibytes(n as f64));
    let hint = match config.origin {
        Origin::Scratch { .. } => "use a shorter --context, a smaller --preset, or raise --memory",
        Origin::Base { .. } => "use a shorter --context, `--method qlora`, or raise --memory",
    };
    Failure::new(format!("not enough memory: the run needs {needed}, the limit is {limit}"), hint)
}

/// Held-out documents that are measured for the plan.
const N_MEASURED: usize = 8;

/// The product rate of the device in flops a second: the median of a few.
fn product_rate(device: &Device) -> f64 {
    let n = 1024usize;
    let mut product = device.product_probe(n, n, n);
    let mut rates: Vec<f64> = (0..7)
        .map(|_| {
            let begin = Instant::now();
            product();
            2.0 * (n as f64).powi(3) / begin.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// Decides everything that is still open in the configuration, and says what the run takes.
pub fn plan(
    config: &mut RunConfig,
    prepared: &mut Prepared,
    device: &Device,
    wishes: &Wishes,
) -> Done<Plan> {
    // What was held before, by the compressors above all, is not the run's.
    machine::reset_peak();
    choose(config, prepared, wishes)?;
    let rate = product_rate(device);
    let (context, n_rows) = (config.context, config.n_rows);
    let n_accumulate = config.settings.n_accumulate;
    // The documents are laid out anew in each epoch, some of them changed: that takes its room too.
    let training = &mut prepared.training;
    training.lay_out_next_epoch()?;
    training.set_checkpointing(config.checkpointing);
    let fixed = training.fixed();
    let before = device.memory().reserved;
    let mut times = Vec::new();
    let mut activations = 0;
    // A run measures between steps, with batches of other sizes: what that leaves of the heap is
    // part of the peak.
    let mut settings = EvalSettings::new(context);
    settings.n_tok_batch = n_rows * context;
    let some = &prepared.held_out[..prepared.held_out.len().min(N_MEASURED)];
    training.score(some, &settings)?;
    device.trim();
    // The first pass takes its buffers from the system; the others are what a run is made of.
    let mut trial = training.trial(n_rows, context);
    for rep in 0..4 {
        let begin = Instant::now();
        activations = trial.pass()?;
        let pass_s = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        trial.update();
        if rep > 0 {
            times.push(pass_s * n_accumulate as f64 + begin.elapsed().as_secs_f64());
        }
    }
    drop(trial);
    times.sort_by(f64::total_cmp);
    let buffers = device.memory().reserved.saturating_sub(before);
    let peak = machine::peak_bytes().unwrap_or(device.memory().reserved as u64);
    let counted = (fixed.weights + fixed.moments + buffers) as u64;
    let flops = training.flops_per_token();
    let mut plan = Plan {
        n_params: prepared.coverage.n_all,
        n_trained: prepared.coverage.n_trained,
        fixed,
        activations,
        buffers: buffers.saturating_sub(activations + fixed.gradients),
        process: peak.saturating_sub(counted),
        peak,
        limit: limit(wishes),
        n_rows,
        n_accumulate,
        checkpointing: config.checkpointing,
        n_tok: n_rows * n_accumulate * context,
        step_s: times[times.len() / 2],
        limit_tok_s: rate / flops,
        n_steps: 0,
        total_s: 0.0,
    };
    schedule(config, prepared, wishes, &mut plan);
    match wishes.memory {
        Some(limit) if plan.peak > limit => Err(refusal(config, plan.peak, limit)),
        _ => Ok(plan),
    }
}

/// Flops a second that steps are counted by where the clock must not decide.
const NOMINAL_RATE: f64 = 1e11;

/// Measurements in a run.
const N_EVALS: u64 = 20;
/// The share of the time that they may take.
const EVAL_SHARE: f64 = 0.06;
/// The share that the measurement before and the one after may take, each.
const FINAL_SHARE: f64 = 0.12;

/// Steps, and how often to measure and to save.
fn schedule(config: &mut RunConfig, prepared: &Prepared, wishes: &Wishes, plan: &mut Plan) {
    // A pass without gradients takes about a third of a step; windows overlap by half.
    let step_tok = plan.n_tok as f64;
    let tok_s = step_tok / plan.step_s;
    let eval_s = |n_tok: usize| n_tok as f64 / (1.5 * tok_s);
    let n_held: usize = prepared.held_out.iter().map(|document| document.ids.len()).sum();
    let final_tok = |n_tok: f64| ((FINAL_SHARE * 1.5 * n_tok) as usize).clamp(16384, 1 << 24);
    let (n_steps, n_final_tok) = match wishes.budget {
        Budget::Steps(n) => (n, final_tok(n as f64 * step_tok)),
        Budget::Minutes(minutes) => {
            let total_s = 60.0 * minutes;
            let n_final_tok = final_tok(total_s * tok_s);
            let around_s = 2.0 * eval_s(n_final_tok.min(n_held));
            let left_s = (total_s * (1.0 - EVAL_SHARE) - around_s).max(0.1 * total_s);
            (((left_s / plan.step_s) as u64).max(1), n_final_tok)
        }
    };
    // From here on by counts alone: what is measured and saved when must not depend on how fast
    // the machine was today.
    let all_tok = n_steps as f64 * step_tok;
    config.n_final_tok = n_final_tok;
    config.n_eval_tok =
        ((EVAL_SHARE * 1.5 * all_tok / N_EVALS as f64) as usize).clamp(4096, 1 << 20);
    config.eval_every = wishes.eval_every.unwrap_or(n_steps.div_ceil(N_EVALS).max(1));
    let flops = step_tok * prepared.training.flops_per_token();
    let per_minute = (60.0 * NOMINAL_RATE / flops) as u64;
    config.save_every = wishes.save_every.unwrap_or(per_minute.clamp(1, n_steps));
    config.settings.n_steps = n_steps;
    config.settings.n_warmup = wishes.n_warmup.unwrap_or(config.settings.n_warmup.min(n_steps / 5));
    let n_evals = n_steps.div_ceil(config.eval_every) as f64;
    let around_s = 2.0 * eval_s(n_final_tok.min(n_held));
    plan.n_steps = n_steps;
    plan.total_s =
        n_steps as f64 * plan.step_s + n_evals * eval_s(config.n_eval_tok.min(n_held)) + around_s;
}

impl Plan {
    /// The lines that say it, each with its kind.
    pub fn lines(&self) -> Vec<(&'static str, String)> {
        let size = |n: usize| mebibytes(n as f64);
        let Plan { n_rows, n_accumulate, n_tok, n_steps, .. } = self;
        let passes = match n_accumulate {
            1 => String::new(),
            n => format!(" in {n} passes"),
        };
        let again = if self.checkpointing { ", with gradient checkpointing" } else { "" };
        let rows = n_rows * n_accumulate;
        vec![
            (
                "memory",
                format!(
                    "weights {}, moments {}, gradients {}, activations {}, buffers {}",
                    size(self.fixed.weights),
                    size(self.fixed.moments),
                    size(self.fixed.gradients),
                    size(self.activations),
                    size(self.buffers),
                ),
            ),
            (
                "memory",
                format!(
                    "peak {} including program and data, limit {}",
                    mebibytes(self.peak as f64),
                    mebibytes(self.limit as f64),
                ),
            ),
            (
                "plan",
                format!(
                    "{n_steps} steps of {rows} x {} tokens{passes}{again}, {:.0} ms each, \
                     {} tok/s, about {}",
                    n_tok / rows.max(1),
                    1e3 * self.step_s,
                    count(*n_tok as f64 / self.step_s),
                    minutes(self.total_s),
                ),
            ),
        ]
    }
}

/// Seconds as people say them.
pub fn minutes(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.1} minutes", s / 60.0),
        s => format!("{:.1} hours", s / 3600.0),
    }
}
