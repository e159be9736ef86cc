//! Bits per byte, intervals, comparisons, golden sets.

use crate::failure::{Done, Failure, options};
use crate::machine;
use crate::model::{WebModel, folder, given, put};
use elapid::{
    DocScore, Document, EvalSettings, Interval, Resampled, Summary, Verdict, check_golden,
    language_of_path, take_files,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::f64::consts::LN_2;
use wasm_bindgen::prelude::*;

/// Texts with their names.
pub fn documents(names: Vec<String>, texts: Vec<String>) -> Done<Vec<Document>> {
    if names.len() != texts.len() {
        let problem = format!("{} names of {} texts", names.len(), texts.len());
        return Err(Failure::input(problem, "give each text a name"));
    }
    let pairs = names.into_iter().zip(texts);
    Ok(pairs.map(|(name, text)| Document::whole(name, text)).collect())
}

fn score(doc: &DocScore) -> Value {
    let (n_tok, n_bytes) = (doc.n_tok.max(1) as f64, doc.n_bytes.max(1) as f64);
    json!({
        "name": doc.name, "language": doc.language, "tokens": doc.n_tok, "bytes": doc.n_bytes,
        "nll": doc.nll, "bitsPerByte": doc.nll / n_bytes / LN_2,
        "perplexity": (doc.nll / n_tok).exp(), "top1": doc.n_top1 as f64 / n_tok,
        "blocks": doc.blocks,
    })
}

fn interval(interval: Option<Interval>) -> Option<Value> {
    let interval = interval?;
    let of = match interval.resampled {
        Resampled::Docs => "documents",
        Resampled::Blocks => "text",
    };
    Some(json!({ "low": interval.low, "high": interval.high, "of": of }))
}

/// What is said of documents, as JSON.
pub fn evaluation(scores: &[DocScore]) -> Done<String> {
    let Summary { total, interval: of_total, .. } = Summary::of(scores)?;
    let json = json!({
        "tokens": total.n_tok, "bytes": total.n_bytes, "loss": total.loss(),
        "bitsPerByte": total.bits_per_byte(), "perplexity": total.perplexity(),
        "top1": total.top1(), "interval": interval(of_total),
        "texts": scores.iter().map(score).collect::<Vec<_>>(),
    });
    Ok(json.to_string())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EvaluateOptions {
    context: Option<usize>,
    overlap: Option<usize>,
}

#[wasm_bindgen]
impl WebModel {
    /// Measures texts; an evaluation as JSON. `on_progress` hears of tokens read and of all.
    pub async fn evaluate(
        &mut self,
        names: Vec<String>,
        texts: Vec<String>,
        json: String,
        on_progress: Option<js_sys::Function>,
    ) -> Done<String> {
        self.idle()?;
        let options: EvaluateOptions = options(&json)?;
        let n_ctx = self.session.model().info()?.n_ctx.unwrap_or(512);
        let context = options.context.unwrap_or(512.min(n_ctx)).max(1);
        let mut settings = EvalSettings::new(context);
        settings.overlap = options.overlap.unwrap_or(settings.overlap);
        let mut tell = |done: usize, all: usize| {
            if let Some(hears) = &on_progress {
                // What a listener throws is its own affair.
                let _ = hears.call2(&JsValue::NULL, &done.into(), &all.into());
            }
        };
        let documents = documents(names, texts)?;
        let scores = self.session.score(&documents, &settings, &mut tell).await?;
        evaluation(&scores)
    }
}

#[derive(Deserialize)]
struct GivenScore {
    name: String,
    tokens: usize,
    bytes: usize,
    nll: f64,
    blocks: Vec<f64>,
}

impl From<GivenScore> for DocScore {
    fn from(given: GivenScore) -> DocScore {
        let GivenScore { name, tokens: n_tok, bytes: n_bytes, nll, blocks } = given;
        let language = language_of_path(&name);
        DocScore { name, language, n_tok, n_bytes, nll, n_top1: 0, blocks }
    }
}

fn scores(json: &str) -> Done<Vec<DocScore>> {
    let given: Vec<GivenScore> = options(json)?;
    if let Some(bad) = given.iter().find(|it| it.blocks.is_empty()) {
        let problem = format!("{} was not measured here", bad.name);
        return Err(Failure::input(problem, "give what `evaluate` returned"));
    }
    Ok(given.into_iter().map(DocScore::from).collect())
}

/// Compares two measurements: JSON of their texts.
#[wasm_bindgen]
pub fn compare(first: &str, second: &str) -> Done<String> {
    let found = elapid::compare(&scores(first)?, &scores(second)?)?;
    let verdict = match found.verdict {
        Verdict::Better => "better",
        Verdict::Worse => "worse",
        Verdict::NoDifference => "same",
        Verdict::TooLittle => "unknown",
    };
    let more = if found.gain < 0.0 { "more" } else { "fewer" };
    let sure = found.interval.map_or("too little text for an interval".into(), |it| it.to_string());
    let sentence =
        format!("{}: {:.3} {more} bits per byte ({sure})", found.verdict, found.gain.abs());
    let json = json!({
        "verdict": verdict, "sentence": sentence, "gain": found.gain,
        "interval": interval(found.interval),
    });
    Ok(json.to_string())
}

/// Compares the model of a golden set that was given with its reference values; JSON.
#[wasm_bindgen(js_name = checkGolden)]
pub async fn check_golden_set(device: String) -> Done<String> {
    let device = machine::device(&device).await?;
    let dir = folder();
    put(&dir, &given())?;
    let found = check_golden(&dir, None, &device).await;
    take_files(&dir);
    let list = found?.0.into_iter().map(|it| {
        json!({
            "quantity": it.quantity, "error": it.error, "tolerance": it.tolerance,
            "holds": it.holds(), "note": it.note,
        })
    });
    Ok(Value::from(list.collect::<Vec<_>>()).to_string())
}
