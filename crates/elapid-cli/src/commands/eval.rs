//! `elapid eval`: how well a model predicts text, and whether it is better than another.

use crate::compute::Compute;
use crate::ranks;
use crate::report::live::progress;
use crate::report::{Done, between, beyond_trained, count, line};
use crate::run;
use crate::source::entry::Entry;
use crate::source::walk::{Secrets, Walk, chat_of, collect, divide};
use elapid::{
    Adapter, Comparison, Device, DocScore, Document, Ends, EvalSettings, FimDoc, FimReport,
    FimSettings, Interval, Model, Resampled, Score, Session, SplitBy, Summary, Verdict, compare,
};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;

/// Evaluate a model on text: loss, perplexity, bits per byte, top-1 accuracy.
///
/// Each file is cut into overlapping windows; each token is scored once. Prints a 95% confidence
/// interval, bootstrapped over files, or over runs of text where there are fewer than 8.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid eval model.gguf notes.txt\n  \
    elapid eval SmolLM2-135M src --context 256 --files\n  \
    elapid eval runs/a1 . --held-out --compare runs/a0\n  \
    elapid eval base src --adapter runs/lora --compare base --fim 4\n  \
    elapid eval .elapid/adapt/1 .elapid/adapt/1/held-out.jsonl --compare SmolLM2-135M.gguf\n\n\
    With --compare the exit code is 0 when MODEL is better than OTHER, 3 when it is not or when \
    there is too little text to tell.")]
pub struct Eval {
    /// Model: directory, .gguf or .elapid file
    model: PathBuf,
    /// Text file, .jsonl file, or directory
    path: PathBuf,
    /// PEFT adapter to apply to MODEL
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Compare with another model, or with an adapter on MODEL: is MODEL better?
    #[arg(long, value_name = "OTHER")]
    compare: Option<PathBuf>,
    /// Use only the files that `elapid train PATH` would hold out
    #[arg(long)]
    held_out: bool,
    /// Fill-in-the-middle: cut N holes into each file and count exact matches
    #[arg(long, value_name = "N", value_parser = between(1, 1000))]
    fim: Option<usize>,
    /// List every file, worst first
    #[arg(long)]
    files: bool,
    /// Tokens per window [default: 512, or the model's context if smaller]
    #[arg(long, value_parser = between(2, 1 << 20))]
    context: Option<usize>,
    /// Tokens that consecutive windows share [default: half a window]
    #[arg(long, value_parser = between(0, 1 << 20))]
    overlap: Option<usize>,
    #[command(flatten)]
    compute: Compute,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Default tokens per window.
const CONTEXT: usize = 512;

/// Share of the text that `elapid train` holds out.
const HELD_OUT: f64 = 0.1;

/// What to measure on.
struct Source {
    documents: Vec<Document>,
    /// "file" or "record".
    noun: &'static str,
    /// How they were held out.
    held_out: Option<SplitBy>,
}

impl Source {
    /// "41 files".
    fn n(&self, n: usize) -> String {
        format!("{n} {}{}", self.noun, if n == 1 { "" } else { "s" })
    }
}

struct Measured {
    name: String,
    n_params: usize,
    settings: EvalSettings,
    ends: Ends,
    scores: Vec<DocScore>,
    summary: Summary,
    fim: Option<FimReport>,
}

impl Eval {
    pub fn run(&self) -> Done<ExitCode> {
        let device = self.compute.open_exact()?;
        let checkpoint = Model::open(run::usable(&self.model)?)?;
        let source = self.source(&checkpoint)?;
        let name = self.model.display().to_string();
        let (name, model) = match &self.adapter {
            Some(adapter) => {
                (format!("{name} + {}", adapter.display()), checkpoint.with_adapter(adapter))
            }
            None => (name, checkpoint),
        };
        let model = self.measure(name, model, &source, &device)?;
        let other = match self.other(&source, &device)? {
            Some(other) => Some((compare(&model.scores, &other.scores)?, other)),
            None => None,
        };
        match (ranks::here().is_first(), self.json) {
            (false, _) => {}
            (true, true) => line(self.to_json(&model, other.as_ref())),
            (true, false) => self.print(&source, &model, other.as_ref()),
        }
        let is_fine = other.is_none_or(|(found, _)| found.verdict == Verdict::Better);
        Ok(if is_fine { ExitCode::SUCCESS } else { ExitCode::from(3) })
    }

    fn source(&self, checkpoint: &Model) -> Done<Source> {
        let (template, options) = chat_of(checkpoint)?;
        // What is only measured is measured as it is.
        let walk = Walk { template, options, secrets: Secrets::Keep, ..Walk::default() };
        let collected = collect(&self.path, &walk)?;
        let is_records = collected.documents.iter().all(|doc| doc.name.contains(".jsonl:"));
        let noun = if is_records { "record" } else { "file" };
        let load = |entries: Vec<Entry>| -> elapid::Result<Vec<Document>> {
            entries.iter().map(|entry| entry.load(&walk)).collect()
        };
        if !self.held_out {
            return Ok(Source { documents: load(collected.documents)?, noun, held_out: None });
        }
        let divided = divide(collected, HELD_OUT)?;
        if let Some(note) = &divided.note {
            eprintln!("note    {note}");
        }
        let held_out = Some(divided.by);
        Ok(Source { documents: load(divided.held_out)?, noun, held_out })
    }

    /// What `--compare` names: an adapter on MODEL, or a model.
    fn other(&self, source: &Source, device: &Device) -> Done<Option<Measured>> {
        let Some(path) = &self.compare else { return Ok(None) };
        let name = path.display().to_string();
        let other = match Adapter::detect(path)? {
            Some(_) => Model::open(run::usable(&self.model)?)?.with_adapter(path),
            None => Model::open(run::usable(path)?)?,
        };
        self.measure(name, other, source, device).map(Some)
    }

    fn measure(
        &self,
        name: String,
        model: Model,
        source: &Source,
        device: &Device,
    ) -> Done<Measured> {
        let settings = self.settings(&model)?;
        let mut session = Session::new(model, device)?;
        let mut told = progress("eval", "{human_pos} of {human_len} tokens");
        let scores = run::shared::scores(
            &source.documents,
            Document::n_bytes,
            |it| it.language,
            |own| Ok(session.score(own, &settings, &mut told)?),
        )?;
        drop(told);
        let summary = Summary::of(&scores)?;
        let fim = match self.fim {
            None => None,
            Some(n_holes) => {
                let settings = FimSettings::new(n_holes, settings.context);
                let mut told = progress("fim", "{human_pos} of {human_len} holes");
                Some(session.score_infill(&source.documents, &settings, &mut told)?)
            }
        };
        let n_params = session.model().n_params();
        let ends = Ends { end: None, ..Ends::of(session.tokenizer()) };
        Ok(Measured { name, n_params, settings, ends, scores, summary, fim })
    }

    /// Windows are no longer than what the model was made for.
    fn settings(&self, checkpoint: &Model) -> Done<EvalSettings> {
        let n_ctx = checkpoint.info()?.n_ctx.unwrap_or(CONTEXT);
        let settings = EvalSettings::new(self.context.unwrap_or(CONTEXT.min(n_ctx).max(2)));
        if let Some(note) = beyond_trained(settings.context, checkpoint.info()?.n_ctx) {
            eprintln!("note    {note}");
        }
        Ok(EvalSettings { overlap: self.overlap.unwrap_or(settings.overlap), ..settings })
    }

    fn print(&self, source: &Source, model: &Measured, other: Option<&(Comparison, Measured)>) {
        line(format!("model   {}  {} parameters", model.name, count(model.n_params as f64)));
        let Summary { total, interval, languages } = &model.summary;
        let held_out = source.held_out.map_or(String::new(), |by| format!(", held out {by}"));
        let size = count(total.n_bytes as f64);
        line(format!("data    {}, {size} bytes{held_out}", source.n(total.n_docs)));
        if self.files {
            let mut list: Vec<&DocScore> =
                model.scores.iter().filter(|doc| doc.n_tok > 0).collect();
            let bits = |doc| Score::of(&[doc]).bits_per_byte();
            list.sort_by(|a, b| bits(*b).total_cmp(&bits(*a)));
            for doc in list {
                line(format!("file    {}  {}", figures(&Score::of(&[doc]), None), doc.name));
            }
        }
        let row = |label: &str, score: &Score, interval: Option<&Interval>| {
            let (n_docs, figures) = (source.n(score.n_docs), figures(score, interval));
            line(format!("eval    {label:<12}{n_docs:<12}  {figures}"));
        };
        let label = match &languages[..] {
            // The total would say it again.
            [(language, _)] => language,
            _ => {
                languages.iter().for_each(|(language, score)| row(language, score, None));
                "all"
            }
        };
        row(label, total, interval.as_ref());
        if let Some(fim) = &model.fim {
            print_fim(fim, "");
        }
        if interval.is_none() {
            eprintln!("note    too little for an interval");
        }
        let Some((found, other)) = other else { return };
        let bits = other.summary.total.bits_per_byte();
        line(format!("other   {}  {bits:.4} bits per byte", other.name));
        if let Some(fim) = &other.fim {
            print_fim(fim, " by the other");
        }
        line(format!("compare {}", found.describe(&other.name)));
    }

    fn to_json(&self, model: &Measured, other: Option<&(Comparison, Measured)>) -> Value {
        let Measured { settings, ends, summary, .. } = model;
        let languages = summary.languages.iter();
        let languages = languages.map(|(name, score)| fields(score, json!({"language": name})));
        let files = model.scores.iter().filter(|doc| doc.n_tok > 0).map(|doc| {
            let names = json!({"name": doc.name, "language": doc.language});
            fields(&Score::of(&[doc]), names)
        });
        let more = json!({
            "model": model.name, "interval": ends_of(summary.interval),
            "resampled": drawn(summary.interval), "context": settings.context,
            "overlap": settings.overlap, "begin": ends.begin, "end": ends.end,
            "languages": languages.collect::<Value>(), "files": files.collect::<Value>(),
        });
        let mut out = fields(&summary.total, more);
        if let Some(fim) = &model.fim {
            out["fim"] = fim_json(fim);
        }
        if let Some((found, other)) = other {
            out["compare"] = json!({
                "other": other.name, "bits_per_byte": other.summary.total.bits_per_byte(),
                "gain": found.gain, "interval": ends_of(found.interval),
                "resampled": drawn(found.interval), "verdict": found.verdict.to_string(),
                "fim": other.fim.as_ref().map(fim_json),
            });
        }
        out
    }
}

/// The figures of a line.
fn figures(score: &Score, interval: Option<&Interval>) -> String {
    let interval = interval.map_or(String::new(), |interval| format!(" ({interval:.4})"));
    let (n_tok, loss, perplexity) = (score.n_tok, score.loss(), score.perplexity());
    let (bits, percent) = (score.bits_per_byte(), 100.0 * score.top1());
    format!(
        "{n_tok:>8} tokens  loss {loss:.5}  perplexity {perplexity:.4}  {bits:.4} bits per \
         byte{interval}  top-1 {percent:.1}%"
    )
}

fn print_fim(fim: &FimReport, whose: &str) {
    let (n_exact, n_holes) = totals(fim);
    if n_holes > 0 {
        let percent = 100.0 * n_exact as f64 / n_holes as f64;
        line(format!("fim     {n_exact} of {n_holes} holes filled exactly{whose}  {percent:.1}%"));
    }
    if let Some((name, why)) = fim.skipped.first() {
        let n = fim.skipped.len();
        let and = if n == 1 { String::new() } else { format!(" and {} more", n - 1) };
        eprintln!("note    no holes{whose} in {name}{and}: {why}");
    }
}

fn fields(score: &Score, more: Value) -> Value {
    let mut fields = json!({
        "n_files": score.n_docs, "n_tok": score.n_tok, "n_bytes": score.n_bytes,
        "loss": score.loss(), "perplexity": score.perplexity(),
        "bits_per_byte": score.bits_per_byte(), "top1": score.top1(),
    });
    if let (Value::Object(fields), Value::Object(more)) = (&mut fields, more) {
        fields.extend(more);
    }
    fields
}

fn ends_of(interval: Option<Interval>) -> Value {
    json!(interval.map(|interval| [interval.low, interval.high]))
}

fn drawn(interval: Option<Interval>) -> Value {
    json!(interval.map(|interval| match interval.resampled {
        Resampled::Docs => "files",
        Resampled::Blocks => "blocks",
    }))
}

/// Holes filled with the very text, and holes in all.
fn totals(fim: &FimReport) -> (usize, usize) {
    fim.docs.iter().fold((0, 0), |sum, doc| (sum.0 + doc.n_exact, sum.1 + doc.n_holes))
}

fn fim_json(fim: &FimReport) -> Value {
    let (n_exact, n_holes) = totals(fim);
    let files = fim.docs.iter().map(|FimDoc { name, language, n_holes, n_exact }| {
        json!({"name": name, "language": language, "n_holes": n_holes, "n_exact": n_exact})
    });
    let skipped = fim.skipped.iter().map(|(name, why)| json!({"name": name, "reason": why}));
    json!({
        "n_holes": n_holes, "n_exact": n_exact,
        "files": files.collect::<Value>(), "skipped": skipped.collect::<Value>(),
    })
}
