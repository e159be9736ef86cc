//! Everything the report shows, as plain numbers and words.
//!
//! `Summary` is what is known once, at the beginning or the end of a run. Curves, notes and samples
//! are read from the run directory.
//!
//! Not here: how any of it looks.

use crate::report::Done;
use crate::report::metrics::{self, EvalRecord, NoteRecord, Record, StepRecord};
use crate::report::samples::{self, Sample};
use serde::Serialize;
use std::path::Path;

#[derive(Default)]
pub struct ReportData {
    pub summary: Summary,
    pub records: Vec<Record>,
    /// What the model wrote, at several steps.
    pub samples: Vec<Sample>,
}

/// What is known once about a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// What it learned, in a few words: the name of a directory or file.
    pub title: String,
    /// How it went, in a sentence: "2000 steps in 4 m 51 s".
    pub outcome: String,
    /// What was trained on what: model, method, data, device, one line each.
    pub facts: Vec<Fact>,
    pub held_out: HeldOut,
    pub languages: Vec<LanguageRow>,
    /// Sets that were asked for besides, by name.
    pub sets: Vec<LanguageRow>,
    /// Files that were not learned from, by reason, as `left_out_json` makes it.
    pub left_out: serde_json::Value,
    /// What was predicted before the run against what was measured.
    pub plan: Vec<PlanRow>,
    pub config: serde_json::Value,
    /// Machine, versions, seed: what it takes to do it again.
    pub machine: Vec<Fact>,
}

/// "device": "cpu, 2 threads, f32".
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fact {
    pub name: String,
    pub value: String,
}

/// Held-out text in bits per byte.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct HeldOut {
    pub n_files: u64,
    pub n_bytes: u64,
    /// How they were chosen: "newest tenth by commit date".
    pub split: String,
    /// Before the first step; where `None`, the evaluation of step 0 is taken.
    pub before: Option<f64>,
    /// At the end; where `None`, the last evaluation is taken.
    pub after: Option<f64>,
    /// Bootstrap interval of `after`.
    pub after_interval: Option<(f64, f64)>,
    /// After against before, as it was printed.
    pub verdict: String,
    /// `gzip -9` on the files one by one.
    pub gzip: Option<f64>,
    /// `zstd -19` with a dictionary of the training files.
    pub zstd: Option<f64>,
}

/// Held-out files of one language, in bits per byte.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LanguageRow {
    pub language: String,
    pub n_files: u64,
    pub n_bytes: u64,
    pub before: Option<f64>,
    pub after: Option<f64>,
    /// Share of tokens whose likeliest guess was right, after, 1 is all.
    pub top1: Option<f64>,
}

/// One line of the plan, such as "activations".
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanRow {
    pub name: String,
    pub unit: Unit,
    pub planned: Option<f64>,
    pub measured: Option<f64>,
}

/// What a number of the plan counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    Count,
    Bytes,
    Seconds,
}

/// A completion before and after training.
#[derive(Serialize)]
pub(super) struct Completion<'a> {
    pub first: &'a Sample,
    pub last: &'a Sample,
}

impl ReportData {
    /// A summary with what a run directory holds of the rest.
    pub fn gather(dir: &Path, summary: Summary) -> Done<ReportData> {
        let (records, samples) = (metrics::read(dir)?, samples::read(dir)?);
        Ok(ReportData { summary, records, samples })
    }

    /// Records of a kind by step, without those undone by a rollback.
    fn kept<T>(&self, of_kind: impl Fn(&Record) -> Option<T>) -> Vec<T> {
        let mut list: Vec<(u64, T)> = Vec::new();
        let found =
            self.records.iter().filter_map(|record| Some((record.step(), of_kind(record)?)));
        for (step, record) in found {
            list.truncate(list.partition_point(|old| old.0 < step));
            list.push((step, record));
        }
        list.into_iter().map(|(_, record)| record).collect()
    }

    pub(super) fn steps(&self) -> Vec<StepRecord> {
        self.kept(|record| if let Record::Step(step) = record { Some(*step) } else { None })
    }

    pub(super) fn evals(&self) -> Vec<EvalRecord> {
        self.kept(|record| match record {
            Record::Eval(eval) if eval.set.is_none() => Some(eval.clone()),
            _ => None,
        })
    }

    pub(super) fn notes(&self) -> Vec<&NoteRecord> {
        self.records
            .iter()
            .filter_map(|record| if let Record::Note(note) = record { Some(note) } else { None })
            .collect()
    }

    pub(super) fn before_after(&self) -> (Option<f64>, Option<f64>) {
        let (evals, held_out) = (self.evals(), &self.summary.held_out);
        let first = evals.first().filter(|eval| eval.step == 0).map(|eval| eval.bits_per_byte);
        let last = evals.last().filter(|eval| eval.step > 0).map(|eval| eval.bits_per_byte);
        let finite = |value: &f64| value.is_finite();
        (held_out.before.or(first).filter(finite), held_out.after.or(last).filter(finite))
    }

    /// Each prompt with its earliest and its latest completion, in the order of first meeting.
    pub(super) fn completions(&self) -> Vec<Completion<'_>> {
        let mut list: Vec<Completion> = Vec::new();
        for sample in &self.samples {
            let known = list.iter_mut().find(|known| {
                known.first.name == sample.name && known.first.prompt == sample.prompt
            });
            match known {
                None => list.push(Completion { first: sample, last: sample }),
                Some(known) if sample.step < known.first.step => known.first = sample,
                Some(known) if sample.step >= known.last.step => known.last = sample,
                Some(_) => {}
            }
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64, loss: f32) -> Record {
        let (lr, grad_norm, ms, tok_per_s) = (1e-3, 1.0, 10.0, 100.0);
        let (n_tok, elapsed_s) = (step, step as f64);
        let divergence = None;
        Record::Step(StepRecord {
            step,
            loss,
            divergence,
            lr,
            grad_norm,
            ms,
            tok_per_s,
            n_tok,
            elapsed_s,
        })
    }

    fn eval(step: u64, bits_per_byte: f64) -> Record {
        Record::Eval(EvalRecord {
            set: None,
            step,
            loss: 1.0,
            bits_per_byte,
            elapsed_s: step as f64,
        })
    }

    #[test]
    fn what_a_rollback_undid_is_not_on_the_curves() {
        let records = vec![
            eval(0, 8.0),
            step(1, 5.0),
            step(2, 4.0),
            eval(2, 6.0),
            step(3, 99.0),
            step(2, 4.5),
            eval(2, 5.0),
            step(3, 3.5),
        ];
        let data = ReportData { records, ..ReportData::default() };
        let losses: Vec<f32> = data.steps().iter().map(|step| step.loss).collect();
        assert_eq!(losses, [5.0, 4.5, 3.5]);
        let bits: Vec<f64> = data.evals().iter().map(|eval| eval.bits_per_byte).collect();
        assert_eq!(bits, [8.0, 5.0]);
        assert_eq!(data.before_after(), (Some(8.0), Some(5.0)));
    }

    #[test]
    fn a_prompt_is_shown_with_its_earliest_and_latest_completion() {
        let sample = |step, prompt: &str| Sample {
            step,
            name: "a.rs".to_string(),
            prompt: prompt.to_string(),
            text: format!("at {step}"),
            truth: String::new(),
        };
        let samples = vec![sample(50, "x"), sample(0, "x"), sample(0, "y"), sample(100, "x")];
        let data = ReportData { samples, ..ReportData::default() };
        let shown: Vec<(&str, u64, u64)> = data
            .completions()
            .iter()
            .map(|c| (c.first.prompt.as_str(), c.first.step, c.last.step))
            .collect();
        assert_eq!(shown, [("x", 0, 100), ("y", 0, 0)]);
    }
}
