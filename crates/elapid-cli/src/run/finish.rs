//! The end of a run: what came of it is measured, written for other tools, and told.

use super::config::Budget;
use super::data::{Set, name_in_set};
use super::drive::{Purpose, Run};
use super::outside::export_name;
use super::record::Spent;
use super::shared::Kept;
use super::write_json;
use crate::files;
use crate::machine;
use crate::ranks;
use crate::report::data::{Fact, HeldOut, LanguageRow, PlanRow, ReportData, Summary, Unit};
use crate::report::metrics;
use crate::report::page;
use crate::report::samples::{self, Sample};
use crate::report::{Done, Failure, mebibytes};
use elapid::Special;
use elapid::{Comparison, DocScore, Extent, compare};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

const BEFORE: &str = "before.json";

/// Written when a run is finished.
pub const SUMMARY: &str = "summary.json";

/// What a run took.
#[derive(Clone, Copy)]
struct Taken {
    seconds: f64,
    /// Bytes in the memory of the device that computes.
    peak: u64,
    spent: Spent,
}

/// Keeps how the model measured before the first step.
pub fn keep_scores(dir: &Path, scores: &[DocScore]) -> Done<()> {
    match ranks::here().is_first() {
        true => write_json(&dir.join(BEFORE), &scores.iter().map(Kept::from).collect::<Vec<_>>()),
        false => Ok(()),
    }
}

fn kept_scores(dir: &Path) -> Done<Vec<DocScore>> {
    let list: Vec<Kept> = super::read_json(&dir.join(BEFORE))?;
    Ok(list.into_iter().map(|kept| kept.score(None)).collect())
}

const N_SAMPLES: usize = 3;
const N_PROMPT_TOK: usize = 64;
const N_SAMPLE_TOK: usize = 48;

/// What the model writes after the beginnings of some held-out documents, for the first rank.
pub fn write_samples(run: &Run, step: u64) -> Done<()> {
    if !ranks::here().is_first() {
        return Ok(());
    }
    let prepared = &run.prepared;
    let n_prompt = N_PROMPT_TOK.min(run.config.context / 2).max(2);
    let long = prepared.held_out.iter().filter(|document| document.ids.len() > 2 * n_prompt);
    let chosen: Vec<_> = long.take(N_SAMPLES).collect();
    // From the middle: beginnings of files are often the same words.
    let begin = |n: usize| (n / 2).saturating_sub(n_prompt);
    let prompts: Vec<&[u32]> = chosen
        .iter()
        .map(|document| &document.ids[begin(document.ids.len())..][..n_prompt])
        .collect();
    if prompts.is_empty() {
        return Ok(());
    }
    run.device.trim();
    let texts = prepared.training.continuations(&prompts, N_SAMPLE_TOK)?;
    run.device.trim();
    let text = |ids: &[u32]| prepared.session.tokenizer().decode(ids, Special::Plain);
    let mut list = samples::read(&run.dir)?;
    list.retain(|sample| sample.step != step);
    for ((document, prompt), ids) in chosen.iter().zip(&prompts).zip(&texts) {
        let behind = begin(document.ids.len()) + n_prompt;
        let end = (behind + N_SAMPLE_TOK).min(document.ids.len());
        list.push(Sample {
            step,
            name: document.name.clone(),
            prompt: text(prompt),
            text: text(ids),
            truth: text(&document.ids[behind..end]),
        });
    }
    samples::write(&run.dir, &list)
}

/// Measures, exports, reports.
///
/// `peak` is what the run had held before it was resumed, in bytes.
pub fn finish(
    run: &mut Run,
    peak: u64,
    mut spent: Spent,
    elapsed: &dyn Fn() -> f64,
) -> Done<ExitCode> {
    let step = run.prepared.training.progress().step;
    write_samples(run, step)?;
    let mut before = kept_scores(&run.dir)?;
    let begin = elapsed();
    let measured: Vec<_> = run.prepared.measured().cloned().collect();
    let mut after = run.measure(&measured)?;
    spent.eval_s += elapsed() - begin;
    if !ranks::here().is_first() {
        return Ok(ExitCode::SUCCESS);
    }
    // Held-out documents come first.
    let n_held_out = run.prepared.held_out.len();
    let sets = (before.split_off(n_held_out.min(before.len())), after.split_off(n_held_out));
    let comparison = match after.is_empty() {
        true => None,
        false => Some(compare(&after, &before)?),
    };
    let frozen = run.prepared.training.frozen_hash();
    if frozen != run.prepared.frozen_hash {
        let problem = "frozen weights have changed";
        return Err(Failure::new(problem, "this is a bug in Elapid; the checkpoints are intact"));
    }
    let place = export(run)?;
    let peak = match run.plan.host_peak {
        Some(_) => run.device.memory().live_max.max(run.device.memory().reserved) as u64,
        None => machine::peak_bytes().unwrap_or(0).max(peak),
    };
    let taken = Taken { seconds: elapsed(), peak, spent };
    let mut summary = summarise(run, (&before, &after), comparison.as_ref(), taken)?;
    summary.sets = rows(&sets.0, &sets.1, |score| {
        let name = |set: &&Set| score.name.starts_with(&name_in_set(&set.name, ""));
        run.prepared.sets.iter().find(name).map_or("", |set| &set.name)
    });
    write_json(&run.dir.join(SUMMARY), &summary)?;
    let report = ReportData::gather(&run.dir, summary.clone())?;
    files::write_bytes(&run.dir.join(page::FILE), page::html(&report)?.as_bytes())?;
    match run.purpose {
        Purpose::Train => say(run, &summary, taken),
        Purpose::Adapt => keep_weights(run)?,
    }
    // From here on the record alone says how long it was.
    run.config.budget = Budget::Steps(run.config.settings.end());
    run.config.write(&run.dir)?;
    if run.purpose == Purpose::Train {
        run.live.line("model", &format!("{}", place.display()));
        run.live.line("report", &format!("{}", run.dir.join(page::FILE).display()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the model or the adapter for other tools; returns where.
pub fn export(run: &Run) -> Done<std::path::PathBuf> {
    let prepared = &run.prepared;
    let dir = run.dir.join(export_name(&run.config.method));
    prepared.session.save_from(&prepared.training, &dir)?;
    Ok(dir)
}

/// The trained weights of a whole model, which may have to be brought nearer to those before.
pub const TRAINED: &str = "trained.elapid";

fn keep_weights(run: &Run) -> Done<()> {
    if export_name(&run.config.method) == "model" {
        let capture = run.prepared.training.capture(Extent::Weights, &json!({}))?;
        capture.save(run.dir.join(TRAINED))?;
    }
    Ok(())
}

fn fact(name: &str, value: impl ToString) -> Fact {
    Fact { name: name.into(), value: value.to_string() }
}

/// Scores in groups of one name.
fn rows<'a>(
    before: &'a [DocScore],
    after: &'a [DocScore],
    name: impl Fn(&'a DocScore) -> &'a str,
) -> Vec<LanguageRow> {
    let mut by_language: BTreeMap<&str, (Vec<&DocScore>, Vec<&DocScore>)> = BTreeMap::new();
    for (before, after) in before.iter().zip(after) {
        let entry = by_language.entry(name(after)).or_default();
        entry.0.push(before);
        entry.1.push(after);
    }
    let mut rows: Vec<LanguageRow> = by_language
        .into_iter()
        .map(|(language, (before, after))| {
            let (old, new) = (elapid::Score::of(&before), elapid::Score::of(&after));
            LanguageRow {
                language: language.into(),
                n_files: after.len() as u64,
                n_bytes: after.iter().map(|score| score.n_bytes as u64).sum(),
                before: Some(old.bits_per_byte()),
                after: Some(new.bits_per_byte()),
                top1: Some(new.top1()),
            }
        })
        .collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.n_bytes));
    rows
}

/// The plan beside what was measured.
fn plan_rows(run: &Run, taken: Taken) -> Done<Vec<PlanRow>> {
    let plan = &run.plan;
    let mut times: Vec<f64> = metrics::read(&run.dir)?
        .iter()
        .filter_map(|record| match record {
            metrics::Record::Step(step) => Some(step.ms / 1e3),
            _ => None,
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let median = times.get(times.len() / 2).copied();
    let row = |name: &str, unit: Unit, planned: f64, measured: Option<f64>| PlanRow {
        name: name.into(),
        unit,
        planned: Some(planned),
        measured,
    };
    let bytes = |name: &str, n: usize| row(name, Unit::Bytes, n as f64, None);
    let n_steps = run.prepared.training.progress().step;
    Ok(vec![
        row("parameters", Unit::Count, plan.n_params as f64, None),
        row("trained parameters", Unit::Count, plan.n_trained as f64, None),
        bytes("weights", plan.fixed.weights),
        bytes("moments", plan.fixed.moments),
        bytes("gradients", plan.fixed.gradients),
        bytes("activations", plan.activations),
        bytes("buffers", plan.buffers),
        row("peak memory", Unit::Bytes, plan.peak as f64, Some(taken.peak as f64)),
        row("steps", Unit::Count, plan.n_steps as f64, Some(n_steps as f64)),
        row("one step", Unit::Seconds, plan.step_s, median),
        row("steps and evaluations", Unit::Seconds, plan.total_s, Some(taken.seconds)),
    ])
}

fn summarise(
    run: &Run,
    scores: (&[DocScore], &[DocScore]),
    comparison: Option<&Comparison>,
    taken: Taken,
) -> Done<Summary> {
    let (before, after) = scores;
    let config = &run.config;
    let step = run.prepared.training.progress().step;
    let time = super::plan::minutes(taken.seconds);
    let interval = match after.is_empty() {
        true => None,
        false => elapid::Summary::of(after)?.interval,
    };
    let bits = |scores: &[DocScore]| {
        let all: Vec<&DocScore> = scores.iter().collect();
        (!all.is_empty()).then(|| elapid::Score::of(&all).bits_per_byte())
    };
    let held_out = HeldOut {
        n_files: after.len() as u64,
        n_bytes: after.iter().map(|score| score.n_bytes as u64).sum(),
        split: run.data.facts.split.clone(),
        before: bits(before),
        after: bits(after),
        after_interval: interval.map(|interval| (interval.low, interval.high)),
        verdict: comparison.map_or_else(String::new, |found| found.describe("before")),
        gzip: run.data.facts.gzip,
        zstd: run.data.facts.zstd,
    };
    let model = run.prepared.session.model().info()?;
    let mut facts = vec![
        fact("model", format!("{}, {} layers", model.family, model.n_layer)),
        fact("method", format!("{}, {}", config.method, run.prepared.coverage)),
        fact("data", format!("{} documents", run.data.facts.n_training)),
        fact("held out", &run.data.facts.split),
        fact("device", run.device.describe()),
        fact("time", time_in_words(taken)),
        fact("zstd", &run.data.facts.zstd_dictionary),
    ];
    facts.extend(config.teacher.iter().map(|it| fact("teacher", it.model.display())));
    let name = config.source.canonicalize().ok();
    let name = name.as_deref().unwrap_or(&config.source);
    let title = name.file_name().map_or_else(|| ".".into(), |name| name.to_string_lossy());
    Ok(Summary {
        title: title.into_owned(),
        outcome: format!("{step} steps in {time}"),
        facts,
        held_out,
        languages: rows(before, after, |score| score.language),
        sets: Vec::new(),
        left_out: serde_json::from_value(run.data.facts.left_out.clone()).unwrap_or_default(),
        plan: plan_rows(run, taken)?,
        config: json!(config),
        machine: vec![
            fact("CPU", machine::cpu().unwrap_or_default()),
            fact("elapid", env!("CARGO_PKG_VERSION")),
            fact("seed", config.seed),
            fact("frozen weights", &run.prepared.frozen_hash),
        ],
    })
}

/// Where the time went.
fn time_in_words(taken: Taken) -> String {
    let Spent { prepare_s, steps_s, eval_s, save_s } = taken.spent;
    let other_s = (taken.seconds - prepare_s - steps_s - eval_s - save_s).max(0.0);
    let parts = [
        ("preparing", prepare_s),
        ("steps", steps_s),
        ("measuring", eval_s),
        ("saving", save_s),
        ("other", other_s),
    ];
    let parts = parts.map(|(name, s)| format!("{name} {}", super::plan::minutes(s)));
    format!("{}: {}", super::plan::minutes(taken.seconds), parts.join(", "))
}

fn say(run: &mut Run, summary: &Summary, taken: Taken) {
    let HeldOut { before, after, gzip, zstd, verdict, .. } = &summary.held_out;
    let number = |x: &Option<f64>| x.map_or("none".into(), |x| format!("{x:.3}"));
    let text = format!(
        "held-out {} bits per byte, before {}; gzip -9 {}, zstd -19 with a dictionary {}",
        number(after),
        number(before),
        number(gzip),
        number(zstd)
    );
    run.live.line("result", &text);
    for row in &summary.sets {
        let (after, before) = (number(&row.after), number(&row.before));
        let text = format!("{} {after} bits per byte, before {before}", row.language);
        run.live.line("result", &text);
    }
    if !verdict.is_empty() {
        run.live.line("verdict", verdict);
    }
    let off = 100.0 * (taken.peak as f64 / run.plan.peak.max(1) as f64 - 1.0);
    let whose = if run.plan.host_peak.is_some() { "GPU peak" } else { "peak" };
    let text = format!("{whose} {}, {off:+.1}% against the plan", mebibytes(taken.peak as f64));
    run.live.line("memory", &text);
    run.live.line("time", &time_in_words(taken));
}
