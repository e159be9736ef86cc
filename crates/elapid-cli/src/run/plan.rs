//! The plan of a run, before it: how many rows go through at once so that memory suffices, what
//! memory and disk are for, how long a step takes and how many there are.
//!
//! Rows are first divided over more passes, which costs next to nothing; then activations are
//! computed again, which costs a third; then the run is refused. Memory and time of a pass are
//! predicted from short ones, which is said: on a CPU over a few hundred tokens, so that a plan
//! takes seconds; on a GPU, where short passes say nothing of long ones, of the size chosen. For a
//! new model it is also measured whether rows that are cut are faster.

use super::config::{Budget, Origin, RunConfig};
use super::prepare::Prepared;
use super::{Checkpointing, Wishes};
use crate::machine;
use crate::ranks;
use crate::report::live::Live;
use crate::report::{Done, Failure, count, mebibytes};
use elapid::Device;
use elapid::{Fixed, Probe, Settings, Size, foretell};
use serde::{Deserialize, Serialize};
use std::path::Path;
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
    /// The most bytes at once in the memory of the device that computes.
    pub peak: u64,
    /// Bytes of that memory to stay within.
    pub limit: u64,
    /// The most bytes of the process in the memory of the CPU, where a GPU computes.
    pub host_peak: Option<u64>,
    /// Bytes on disk at most: checkpoints, best weights, the model.
    pub disk: u64,
    /// Rows in a pass.
    pub n_rows: usize,
    /// Passes in a step.
    pub n_accumulate: usize,
    /// Whether activations are computed again.
    pub checkpointing: bool,
    /// Tokens that rows are cut to before the rate falls.
    #[serde(default)]
    pub short_rows: Option<usize>,
    /// Tokens in a step.
    pub n_tok: usize,
    /// Seconds of a step.
    pub step_s: f64,
    /// Tokens a second at which products alone would take all the time.
    pub limit_tok_s: f64,
    /// Steps, or an estimate of them where time is the budget.
    pub n_steps: u64,
    /// Seconds of steps and measurements.
    pub total_s: f64,
    /// Of each rank, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<RankPlan>,
}

/// What one of several ranks holds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankPlan {
    pub fixed: Fixed,
    /// As of the plan.
    pub peak: u64,
}

/// Tokens in a step when nobody says.
fn default_tokens(config: &RunConfig, device: &Device) -> usize {
    let n_tok = match config.origin {
        Origin::Scratch { size: Size::Tiny, .. } => 2048,
        Origin::Scratch { size: Size::Small, .. } => 4096,
        Origin::Scratch { .. } => 8192,
        Origin::Base { .. } => 2048,
    };
    // Small batches leave a GPU idle.
    if is_gpu(device) { 4 * n_tok } else { n_tok }
}

fn is_gpu(device: &Device) -> bool {
    device.kind() != "cpu"
}

/// How many bytes the process may hold at once.
pub fn host_limit(wishes: &Wishes) -> u64 {
    let held = machine::held_bytes().unwrap_or(0);
    // A tenth is left to everybody else. Where the system does not tell, all is allowed. Ranks on
    // one machine divide it.
    let free = machine::free_bytes().map_or(u64::MAX / 2, |free| free / 10 * 9);
    wishes.memory.unwrap_or(held.saturating_add(free / ranks::here().n_local as u64))
}

/// How many bytes the device may hold at once.
fn limit(device: &Device, wishes: &Wishes) -> u64 {
    if !is_gpu(device) {
        return host_limit(wishes);
    }
    let held = device.memory().reserved as u64;
    let free = device.free_bytes().map_or(u64::MAX / 2, |free| free / 20 * 19);
    wishes.memory.unwrap_or(held.saturating_add(free))
}

/// Bytes that are held now where the device computes.
fn held(device: &Device) -> u64 {
    match is_gpu(device) {
        true => device.memory().reserved as u64,
        false => machine::held_bytes().unwrap_or(0),
    }
}

/// Rows of a step that were asked for, or the default; every rank takes as many passes.
fn rows_of_step(wished: Option<usize>, default: usize) -> Done<usize> {
    let n_ranks = ranks::here().n_ranks;
    match wished {
        Some(n) if !n.is_multiple_of(n_ranks) => {
            let problem = format!("a batch of {n} cannot be divided among {n_ranks} ranks");
            Err(Failure::new(problem, "--batch is of a whole step: give a multiple of the ranks"))
        }
        Some(n) => Ok(n),
        None => Ok(default.max(1).next_multiple_of(n_ranks)),
    }
}

/// Divides the passes of a run among other ranks than it was planned for: the same rows in the same
/// order. Where a rank would have none, passes become smaller.
pub fn divide_again(config: &mut RunConfig) -> Done<()> {
    let (n_ranks, n_accumulate) = (ranks::here().n_ranks, config.settings.n_accumulate);
    if n_accumulate >= n_ranks {
        return Ok(());
    }
    let n_rows = config.n_rows * n_accumulate;
    if !n_rows.is_multiple_of(n_ranks) {
        let problem =
            format!("a step of {n_rows} sequences cannot be divided among {n_ranks} ranks");
        return Err(Failure::new(problem, "resume with another number of ranks"));
    }
    config.n_rows = n_rows / n_ranks;
    config.settings.n_accumulate = n_ranks;
    Ok(())
}

/// Passes that the rows of a step may be divided into: as many for every rank.
fn divisions(n_rows: usize, wished: Option<usize>) -> Done<Vec<usize>> {
    let n_ranks = ranks::here().n_ranks;
    if let Some(n) = wished {
        if !n_rows.is_multiple_of(n) {
            let problem = format!("a batch of {n_rows} cannot be split into {n} equal parts");
            return Err(Failure::new(problem, "--accumulate must divide --batch"));
        }
        if !n.is_multiple_of(n_ranks) {
            let problem = format!("{n} parts cannot be divided among {n_ranks} ranks");
            return Err(Failure::new(problem, "--accumulate is of all ranks: give a multiple"));
        }
        return Ok(vec![n]);
    }
    let is_even = |n: &usize| n_rows.is_multiple_of(*n) && n.is_multiple_of(n_ranks);
    Ok((1..=n_rows).filter(is_even).collect())
}

/// Seconds since now.
fn clock() -> impl Fn() -> f64 {
    let begin = Instant::now();
    move || begin.elapsed().as_secs_f64()
}

/// Tokens of a short pass: its memory and time speak for longer ones.
const N_PROBE_TOK: usize = 256;

/// Tokens of short rows, and the share of the time of long ones from which they are worth it.
const SHORT: usize = 256;
const SHORT_SHARE: f64 = 0.95;

/// Whether all numbers of the model are yet to be learned.
fn is_new(config: &RunConfig) -> bool {
    matches!(config.origin, Origin::Scratch { .. })
}

/// What passes take, predicted from two short ones.
struct Foretold {
    /// Bytes without any pass.
    base: u64,
    small: Probe,
    large: Probe,
}

impl Foretold {
    fn measure(prepared: &mut Prepared, context: usize, device: &Device) -> Done<Foretold> {
        let context = context.min(N_PROBE_TOK);
        let small = prepared.training.probe(1, context, 1, &clock())?;
        let large = prepared.training.probe(2, context, 1, &clock())?;
        Ok(Foretold { base: held(device), small, large })
    }

    fn buffers(&self, n_tok: usize) -> usize {
        foretell(&self.small, &self.large, n_tok)
    }

    /// A step of one pass over so many tokens.
    fn probe(&self, n_tok: usize) -> Probe {
        let share = n_tok as f64 / self.large.n_tok as f64;
        Probe {
            n_tok,
            activations: (self.large.activations as f64 * share) as usize,
            buffers: self.buffers(n_tok),
            pass_s: self.large.pass_s * share,
            ..self.large
        }
    }
}

/// Rows, passes and checkpointing that fit, and what they take.
fn choose(
    config: &mut RunConfig,
    prepared: &mut Prepared,
    device: &Device,
    wishes: &Wishes,
) -> Done<Foretold> {
    let n_tok = default_tokens(config, device);
    let n_rows = rows_of_step(wishes.n_rows, n_tok / config.context)?;
    let divisions = divisions(n_rows, wishes.n_accumulate)?;
    let limit = limit(device, wishes);
    let ways: &[bool] = match wishes.checkpointing {
        Checkpointing::Auto => &[false, true],
        Checkpointing::On => &[true],
        Checkpointing::Off => &[false],
    };
    let mut least = u64::MAX;
    for &checkpointing in ways {
        prepared.training.set_checkpointing(checkpointing);
        let foretold = Foretold::measure(prepared, config.context, device)?;
        for &n_accumulate in &divisions {
            let n_tok = n_rows / n_accumulate * config.context;
            let fixed = prepared.training.fixed();
            // Gradients of others are held until a rank has made all of its passes.
            let is_once = n_accumulate == ranks::here().n_ranks;
            let held = if is_once { 0 } else { fixed.trained - fixed.gradients };
            let peak =
                foretold.base + (foretold.buffers(n_tok) + held) as u64 + copies(prepared, device);
            least = least.min(peak);
            if ranks::here().all(peak <= limit)? {
                config.n_rows = n_rows / n_accumulate;
                config.checkpointing = checkpointing;
                config.settings.n_accumulate = n_accumulate;
                return Ok(foretold);
            }
        }
    }
    Err(refusal(config, least, limit))
}

/// Bytes of a checkpoint: trained parameters and moments.
fn checkpoint_bytes(prepared: &Prepared) -> u64 {
    let fixed = prepared.training.fixed();
    (fixed.trained + fixed.moments_of_all) as u64
}

/// Bytes of copies that are held while a checkpoint is written, in the memory of the device.
fn copies(prepared: &Prepared, device: &Device) -> u64 {
    match is_gpu(device) {
        true => 0,
        false if !ranks::here().is_first() => 0,
        false => checkpoint_bytes(prepared) + prepared.training.fixed().trained as u64,
    }
}

fn refusal(config: &RunConfig, needed: u64, limit: u64) -> Failure {
    let [needed, limit] = [needed, limit].map(|n| mebibytes(n as f64));
    let hint = match config.origin {
        Origin::Scratch { .. } => "use a shorter --context, a smaller --preset, or raise --memory",
        Origin::Base { .. } => "use a shorter --context, `--method qlora`, or raise --memory",
    };
    Failure::new(format!("not enough memory: the run needs {needed}, the limit is {limit}"), hint)
}

/// The product rate of the device in flops a second: the best of a few, so large that starting one
/// takes no time beside it.
fn product_rate(device: &Device) -> f64 {
    let mut n = 1024usize;
    loop {
        let mut product = device.product_probe(n, n, n);
        let seconds = |_| {
            let begin = Instant::now();
            product();
            begin.elapsed().as_secs_f64()
        };
        let best = (0..5).map(seconds).fold(f64::INFINITY, f64::min);
        if best > 2e-3 || n >= 8192 {
            return 2.0 * (n as f64).powi(3) / best;
        }
        n *= 2;
    }
}

/// Decides everything that is still open in the configuration, and says what the run takes. `dir`
/// is where it will write.
pub fn plan(
    config: &mut RunConfig,
    prepared: &mut Prepared,
    (device, dir): (&Device, &Path),
    wishes: &Wishes,
    live: &mut Live,
) -> Done<Plan> {
    let passes = if is_gpu(device) { "a few short and whole" } else { "a few short" };
    live.line("measure", &format!("memory and time of {passes} passes, for the plan"));
    let foretold = choose(config, prepared, device, wishes)?;
    let (context, n_rows) = (config.context, config.n_rows);
    let n_accumulate = config.settings.n_accumulate;
    let (n_pass_tok, base) = (n_rows * context, foretold.base);
    let fixed = prepared.training.fixed();
    let Probe { activations, buffers, mut pass_s, update_s, .. } = match is_gpu(device) {
        true => prepared.training.probe(n_rows, context, 3, &clock())?,
        false => foretold.probe(n_pass_tok),
    };
    config.settings.short_rows = match wishes.short_rows {
        Some(n) => Some(n).filter(|n| *n > 0),
        None if is_new(config) && context >= 4 * SHORT => {
            let n_short = n_pass_tok / SHORT;
            // Passes over as many tokens: the short ones of a CPU are foretold already.
            let [long_s, short_s] = match is_gpu(device) {
                true => [pass_s, prepared.training.probe(n_short, SHORT, 3, &clock())?.pass_s],
                false => {
                    // Of a longer row not all, so that a plan takes seconds.
                    let long = prepared.training.probe(1, 4 * SHORT, 1, &clock())?;
                    [long.pass_s * n_pass_tok as f64 / long.n_tok as f64, pass_s]
                }
            };
            let is_faster = short_s < SHORT_SHARE * long_s;
            pass_s = if is_faster { 0.8 * short_s + 0.2 * long_s } else { long_s };
            is_faster.then_some(SHORT)
        }
        None => None,
    };
    let peak = base + buffers as u64 + copies(prepared, device);
    let host_peak = is_gpu(device).then(|| {
        let checkpoint = checkpoint_bytes(prepared) + fixed.trained as u64;
        machine::held_bytes().unwrap_or(0) + checkpoint
    });
    let flops = prepared.training.flops_per_token();
    let mut plan = Plan {
        n_params: prepared.coverage.n_all,
        n_trained: prepared.coverage.n_trained,
        fixed,
        activations,
        buffers: buffers.saturating_sub(activations + fixed.gradients),
        peak,
        limit: limit(device, wishes),
        host_peak,
        // Two checkpoints, the one being written, best weights twice, the model.
        disk: 3 * checkpoint_bytes(prepared) + 3 * fixed.trained as u64,
        n_rows,
        n_accumulate,
        checkpointing: config.checkpointing,
        short_rows: config.settings.short_rows,
        n_tok: n_pass_tok * n_accumulate,
        step_s: pass_s * n_accumulate.div_ceil(ranks::here().n_ranks) as f64 + update_s,
        limit_tok_s: product_rate(device) / flops * ranks::here().n_ranks as f64,
        n_steps: 0,
        total_s: 0.0,
        ranks: Vec::new(),
    };
    let ranks = ranks::here();
    plan.ranks = match ranks.is_alone() {
        true => Vec::new(),
        false => ranks.gather(&RankPlan { fixed, peak: plan.peak })?,
    };
    schedule(config, prepared, wishes, &mut plan);
    // The first one's clock and memory have decided for all.
    (*config, plan) = ranks.tell(|| Ok((config.clone(), plan)))?;
    if wishes.memory.is_some_and(|limit| plan.peak > limit) {
        return Err(refusal(config, plan.peak, plan.limit));
    }
    match machine::free_disk(dir) {
        Some(free) if free < plan.disk => {
            let [disk, free] = [plan.disk, free].map(|n| mebibytes(n as f64));
            let problem = format!("not enough disk: the run needs {disk}, {free} are free");
            Err(Failure::new(problem, "make room, or choose an --out on another disk"))
        }
        _ => Ok(plan),
    }
}

/// Measurements in a run.
const N_EVALS: u64 = 20;
/// The share of the time that they may take.
const EVAL_SHARE: f64 = 0.06;
/// The share that the measurement before and the one after may take, each.
const FINAL_SHARE: f64 = 0.06;

/// Steps, and how often to measure.
fn schedule(config: &mut RunConfig, prepared: &Prepared, wishes: &Wishes, plan: &mut Plan) {
    // A pass without gradients takes about a third of a step; windows overlap by half.
    let step_tok = plan.n_tok as f64;
    let tok_s = step_tok / plan.step_s;
    let eval_s = |n_tok: usize| n_tok as f64 / (1.5 * tok_s);
    let n_held: usize = prepared.measured().map(|document| document.ids.len()).sum();
    // Other sets take together as long as the held-out documents.
    let n_lists = 1 + usize::from(!prepared.sets.is_empty());
    let measured = |n_tok: usize| (n_lists * n_tok).min(n_held);
    let share = |share: f64, n_tok: f64| ((share * 1.5 * n_tok) as usize).clamp(1024, 1 << 24);
    let n_epoch = prepared.training.n_tok_epoch() as f64 / step_tok;
    let n_most = wishes.n_epochs.map_or(u64::MAX, |n| ((n * n_epoch).ceil() as u64).max(1));
    let (n_steps, is_open) = match config.budget {
        Budget::Steps(n) => (n.min(n_most), false),
        Budget::Tokens(n) => (n.div_ceil(plan.n_tok as u64).min(n_most), false),
        Budget::Minutes(minutes) => {
            let steps_s = 60.0 * minutes * (1.0 - EVAL_SHARE - 2.0 * FINAL_SHARE);
            let n_fitting = ((steps_s / plan.step_s) as u64).max(1);
            (n_fitting.min(n_most), n_fitting <= n_most)
        }
    };
    // From here on by counts alone: what is measured when must not depend on how fast the machine
    // was today.
    let all_tok = n_steps as f64 * step_tok;
    config.n_final_tok = share(FINAL_SHARE, all_tok);
    config.n_eval_tok = share(EVAL_SHARE / N_EVALS as f64, all_tok).min(1 << 20);
    // Where little is learned between measurements of the least size, they come more rarely.
    let least = (measured(config.n_eval_tok) as f64 / (EVAL_SHARE * 1.5 * step_tok)).ceil() as u64;
    config.eval_every = wishes.eval_every.unwrap_or(n_steps.div_ceil(N_EVALS).max(least).max(1));
    config.save_every = wishes.save_every;
    let n_warmup = config.settings.n_warmup.min(n_steps / 5);
    config.settings.n_warmup = wishes.n_warmup.unwrap_or(n_warmup);
    config.settings.n_steps = if is_open { Settings::OPEN } else { n_steps };
    if !is_open {
        config.budget = Budget::Steps(n_steps);
    }
    let n_evals = n_steps.div_ceil(config.eval_every) as f64;
    let around_s = 2.0 * eval_s(measured(config.n_final_tok));
    plan.n_steps = n_steps;
    plan.total_s =
        n_steps as f64 * plan.step_s + n_evals * eval_s(measured(config.n_eval_tok)) + around_s;
}

impl Plan {
    /// The lines that say it, each with its kind.
    pub fn lines(&self, budget: Budget) -> Vec<(&'static str, String)> {
        let size = |n: usize| mebibytes(n as f64);
        let bytes = |n: u64| mebibytes(n as f64);
        let Plan { n_rows, n_accumulate, n_tok, n_steps, .. } = self;
        let passes = match (n_accumulate, self.ranks.len()) {
            (1, _) => String::new(),
            (n, 0) => format!(" in {n} passes"),
            (n, n_ranks) => format!(" in {n} passes of {n_ranks} ranks"),
        };
        let short = self
            .short_rows
            .map_or(String::new(), |n| format!(" (cut to {n} until the learning rate falls)"));
        let on_host = match self.fixed.moments_on_host {
            0 => String::new(),
            n => format!(" and {} in CPU memory", size(n)),
        };
        let again = if self.checkpointing { ", with gradient checkpointing" } else { "" };
        let teacher = match self.fixed.teacher {
            0 => String::new(),
            n => format!(", teacher {}", size(n)),
        };
        let rows = n_rows * n_accumulate;
        let (peak, limit) = (bytes(self.peak), bytes(self.limit));
        let total = match self.host_peak {
            Some(host) => {
                format!("GPU peak {peak}, limit {limit}; CPU memory peak {}", bytes(host))
            }
            None => format!("peak {peak} including program and data, limit {limit}"),
        };
        let (about, time) = match budget {
            Budget::Minutes(n) => ("about ", format!("{n} minutes in all")),
            _ => ("", format!("about {}", minutes(self.total_s))),
        };
        let each = self.ranks.iter().enumerate().map(|(rank, RankPlan { fixed, peak })| {
            let [moments, gradients] = [fixed.moments, fixed.gradients].map(size);
            let peak = bytes(*peak);
            (
                "memory",
                format!("rank {rank}: moments {moments}, gradients {gradients}, peak {peak}"),
            )
        });
        let mut lines = vec![
            (
                "memory",
                format!(
                    "weights {}{teacher}, moments {}{on_host}, gradients {}, activations {}, \
                     buffers {}",
                    size(self.fixed.weights),
                    size(self.fixed.moments),
                    size(self.fixed.gradients),
                    size(self.activations),
                    size(self.buffers),
                ),
            ),
            ("memory", total),
            ("disk", format!("up to {} for checkpoints and the model", bytes(self.disk))),
            (
                "plan",
                format!(
                    "{about}{n_steps} steps of {rows} x {} tokens{short}{passes}{again}, {:.0} ms \
                     each, {} tok/s, {time}",
                    n_tok / rows.max(1),
                    1e3 * self.step_s,
                    count(*n_tok as f64 / self.step_s),
                ),
            ),
        ];
        lines.splice(2..2, each);
        lines
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
