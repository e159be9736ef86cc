//! How well a model predicts texts, and whether that is better than another.

use crate::raise;
use elapid::{DocScore, EvalSettings, Interval, Summary, compare};
use pyo3::prelude::*;

/// Windows of this many tokens.
pub fn settings(context: usize) -> elapid::Result<EvalSettings> {
    match context {
        0 | 1 => {
            Err(elapid::Error::input("windows have no tokens", "use a `context` of 2 or more"))
        }
        _ => Ok(EvalSettings::new(context)),
    }
}

/// Scores of documents.
#[pyclass(module = "elapid._native", frozen)]
pub struct Scores {
    docs: Vec<DocScore>,
}

impl Scores {
    pub fn new(docs: Vec<DocScore>) -> Scores {
        Scores { docs }
    }
}

/// Name, tokens, bytes, nats, tokens that were thought likeliest.
type Row<'a> = (&'a str, usize, usize, f64, usize);
type Ends = Option<(f64, f64)>;

fn ends(interval: Option<Interval>) -> Ends {
    interval.map(|interval| (interval.low, interval.high))
}

#[pymethods]
impl Scores {
    fn rows(&self) -> Vec<Row<'_>> {
        let row = |doc: &'_ DocScore| (doc.n_tok, doc.n_bytes, doc.nll, doc.n_top1);
        let rows = self.docs.iter().map(|doc| {
            let (n_tok, n_bytes, nll, n_top1) = row(doc);
            (doc.name.as_str(), n_tok, n_bytes, nll, n_top1)
        });
        rows.collect()
    }

    /// Bits per byte, its 95% interval, perplexity, share of tokens that were thought likeliest.
    fn summary(&self) -> PyResult<(f64, Ends, f64, f64)> {
        let Summary { total, interval, .. } = Summary::of(&self.docs).map_err(raise)?;
        Ok((total.bits_per_byte(), ends(interval), total.perplexity(), total.top1()))
    }

    /// Bits per byte fewer than `other`, its 95% interval, the verdict, and a sentence.
    fn compare(&self, other: &Scores) -> PyResult<(f64, Ends, String, String)> {
        let found = compare(&self.docs, &other.docs).map_err(raise)?;
        let sentence = found.describe("the other");
        Ok((found.gain, ends(found.interval), found.verdict.to_string(), sentence))
    }
}
