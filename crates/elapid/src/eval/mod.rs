//! How well a model predicts documents.
//!
//! A document of tokens `id[0..n]` is cut into windows of `context` tokens. Window `w` reads
//!
//! ```text
//! id[s .. s + context]        with s = w (context - overlap)
//! ```
//!
//! and is asked for the token behind each. The first window is scored on all of them, every other
//! on its last `context - overlap`: the rest it shares with the window before and reads only. So
//! every learned token is scored exactly once, and but for the beginning of a document with at
//! least `overlap + 1` tokens before it.
//!
//! ```text
//! loss          = sum of -ln p(token)  /  tokens                   nats per token
//! perplexity    = exp(loss)
//! bits per byte = sum of -ln p(token)  /  (bytes of text  ln 2)
//! top-1         = tokens that the model thought likeliest  /  tokens
//! ```
//!
//! Only bits per byte can be compared between models of different tokenizers. The end of a document
//! is a token that is predicted and stands for no bytes.
//!
//! Several windows are packed into one batch, in constant order: the result has the same bits on
//! any number of threads.

#[cfg(feature = "fs")]
pub mod bench;
#[cfg(feature = "fs")]
pub mod convert;
mod fim_score;
#[cfg(feature = "fs")]
pub mod golden;
mod interval;
pub mod parity;

pub use fim_score::{FimDoc, FimReport, FimSettings, Subject, fim_exact_match};
pub use interval::{Comparison, Interval, Resampled, Verdict, compare};

use crate::data::Encoded;
use crate::data::split::BLOCK_BYTES;
use crate::error::{Error, Result};
use crate::model::weights::Weights;
use crate::model::{ForwardOptions, Model};
use crate::ops::head_loss::TokenLoss;
use crate::tape::Tape;
use crate::tensor::batch::{Batch, Targets};
use std::collections::BTreeMap;
use std::ops::Range;

/// How to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvalSettings {
    /// Tokens of a window.
    pub context: usize,
    /// Tokens of a window that the one before has scored and that are read again; below `context`.
    pub overlap: usize,
    /// Tokens of a batch, about.
    pub n_tok_batch: usize,
}

impl EvalSettings {
    /// Windows of this size, each half a window behind the last.
    pub fn new(context: usize) -> EvalSettings {
        EvalSettings { context, overlap: context / 2, n_tok_batch: 4096 }
    }
}

/// What a model made of one document.
#[derive(Clone, Debug, PartialEq)]
pub struct DocScore {
    /// The document.
    pub name: String,
    /// Its language.
    pub language: &'static str,
    /// Tokens predicted.
    pub n_tok: usize,
    /// Bytes that they stand for.
    pub n_bytes: usize,
    /// Sum of the negative log-likelihoods, in nats.
    pub nll: f64,
    /// Tokens that the model thought likeliest.
    pub n_top1: usize,
    /// `nll` by parts of the document, each with an equal share of its tokens. Their number depends
    /// on the bytes alone, so that models of different tokenizers have as many.
    pub blocks: Vec<f64>,
}

impl DocScore {
    fn new(doc: &Encoded) -> DocScore {
        let n_blocks = doc.n_bytes.div_ceil(BLOCK_BYTES).max(1);
        DocScore {
            name: doc.name.clone(),
            language: doc.language,
            n_tok: 0,
            n_bytes: doc.n_bytes,
            nll: 0.0,
            n_top1: 0,
            blocks: vec![0.0; n_blocks],
        }
    }

    /// Adds the next token of `n_learned`.
    fn add(&mut self, n_learned: usize, nll: f64, top1: bool) {
        let block = self.n_tok * self.blocks.len() / n_learned;
        self.blocks[block] += nll;
        self.nll += nll;
        self.n_top1 += top1 as usize;
        self.n_tok += 1;
    }
}

/// A run of tokens to read, and which of the tokens behind them are scored.
#[derive(Clone, Debug, PartialEq)]
struct Window {
    doc_idx: usize,
    /// Tokens read; each is asked for the one behind it.
    read: Range<usize>,
    /// Tokens scored, by their place in the document.
    scored: Range<usize>,
}

/// Windows of a document of `n_tok` tokens.
fn windows(doc_idx: usize, n_tok: usize, settings: &EvalSettings) -> Vec<Window> {
    let EvalSettings { context, overlap, .. } = *settings;
    let mut list = Vec::new();
    let (mut start, mut next) = (0, 1);
    while next < n_tok {
        let end = (start + context).min(n_tok - 1);
        list.push(Window { doc_idx, read: start..end, scored: next..end + 1 });
        (start, next) = (start + context - overlap, end + 1);
    }
    list
}

fn check(docs: &[Encoded], settings: &EvalSettings) -> Result<()> {
    let EvalSettings { context, overlap, .. } = *settings;
    if overlap >= context {
        let problem = format!("windows of {context} tokens overlap by {overlap}");
        return Err(Error::input(problem, "let windows overlap by less than they are long"));
    }
    if let Some(doc) = docs.iter().find(|doc| doc.ids.len() != doc.learned.len()) {
        let (n_ids, n_learned) = (doc.ids.len(), doc.learned.len());
        let problem = format!("{}: {n_ids} tokens and {n_learned} marks", doc.name);
        return Err(Error::input(problem, "say of each token whether it is learned"));
    }
    Ok(())
}

/// Measures a model on documents; `on_progress` hears of tokens read and to be read.
pub async fn measure(
    model: &Model,
    weights: &Weights,
    docs: &[Encoded],
    settings: &EvalSettings,
    on_progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<DocScore>> {
    check(docs, settings)?;
    let mut scores: Vec<DocScore> = docs.iter().map(DocScore::new).collect();
    let n_learned: Vec<usize> = docs.iter().map(n_learned).collect();
    let all = docs.iter().enumerate();
    let all = all.flat_map(|(idx, doc)| windows(idx, doc.ids.len(), settings));
    // Whole windows of a prompt cost nothing.
    let is_asked =
        |window: &Window| docs[window.doc_idx].learned[window.scored.clone()].contains(&true);
    let list: Vec<Window> = all.filter(is_asked).collect();
    let total = list.iter().map(|window| window.read.len()).sum();
    let (mut done, mut rest) = (0, &list[..]);
    while !rest.is_empty() {
        let lens = rest.iter().map(|window| window.read.len());
        let (batch, after) = rest.split_at(n_together(lens, settings.n_tok_batch));
        let predicted = weights.device().run(|| predict(model, weights, docs, batch))?;
        let found = predicted.read().await;
        weights.device().check()?;
        for (doc_idx, nll, top1) in found {
            scores[doc_idx].add(n_learned[doc_idx], nll, top1);
        }
        done += batch.iter().map(|window| window.read.len()).sum::<usize>();
        on_progress(done, total);
        rest = after;
    }
    Ok(scores)
}

impl crate::train::Training {
    /// How well the model of a training predicts these documents; awaited in a browser.
    #[cfg(not(target_family = "wasm"))]
    pub fn score(&self, docs: &[Encoded], settings: &EvalSettings) -> Result<Vec<DocScore>> {
        crate::tensor::gpu::later::wait(self.score_later(docs, settings))
    }

    pub(crate) async fn score_later(
        &self,
        docs: &[Encoded],
        settings: &EvalSettings,
    ) -> Result<Vec<DocScore>> {
        let (model, weights) = (&self.trainer.model, &self.trainer.weights);
        measure(model, weights, docs, settings, &mut |_, _| {}).await
    }
}

/// Tokens of a document that are scored: learned ones, but for the first.
fn n_learned(doc: &Encoded) -> usize {
    doc.learned.iter().skip(1).filter(|learned| **learned).count()
}

/// How many of the first of these lengths fit into a batch of `n_tok`; one at least.
fn n_together(lens: impl Iterator<Item = usize>, n_tok: usize) -> usize {
    let mut sum = 0;
    let fits = lens.take_while(|len| {
        sum += len;
        sum <= n_tok
    });
    fits.count().max(1)
}

/// What was predicted, still on the device, and of which rows it counts.
struct Predicted {
    tokens: TokenLoss,
    /// Row and document.
    scored: Vec<(usize, usize)>,
}

impl Predicted {
    /// The scored tokens in order: document, negative log-likelihood, whether it was thought
    /// likeliest.
    async fn read(self) -> Vec<(usize, f64, bool)> {
        let (nll, top1) = self.tokens.read().await;
        let scored = self.scored.into_iter();
        scored.map(|(row, doc)| (doc, f64::from(nll[row]), top1[row])).collect()
    }
}

/// Predicts the tokens of some windows.
fn predict(
    model: &Model,
    weights: &Weights,
    docs: &[Encoded],
    list: &[Window],
) -> Result<Predicted> {
    let reads: Vec<&[u32]> =
        list.iter().map(|window| &docs[window.doc_idx].ids[window.read.clone()]).collect();
    let batch = Batch::from_sequences(&reads);
    let (mut ids, mut factors, mut owners) = (Vec::new(), Vec::new(), Vec::new());
    for window in list {
        let doc = &docs[window.doc_idx];
        for target in window.read.start + 1..window.read.end + 1 {
            let is_scored = window.scored.contains(&target) && doc.learned[target];
            ids.push(doc.ids[target]);
            factors.push(if is_scored { 1.0 } else { 0.0 });
            owners.push(window.doc_idx);
        }
    }
    let norm = factors.iter().sum();
    let targets = Targets { ids: &ids, weights: &factors, norm };
    let (tape, options) = (Tape::off(), ForwardOptions::default());
    let out = model.loss(&tape, weights, &batch, &targets, options)?;
    let scored = (0..ids.len()).filter(|&row| factors[row] != 0.0);
    Ok(Predicted { tokens: out.tokens, scored: scored.map(|row| (row, owners[row])).collect() })
}

/// Several documents together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Score {
    /// Documents with at least one token predicted.
    pub n_docs: usize,
    /// Tokens predicted.
    pub n_tok: usize,
    /// Bytes that they stand for.
    pub n_bytes: usize,
    /// Sum of the negative log-likelihoods, in nats.
    pub nll: f64,
    /// Tokens that the model thought likeliest.
    pub n_top1: usize,
}

impl Score {
    /// The sum over documents.
    pub fn of(docs: &[&DocScore]) -> Score {
        let mut sum = Score::default();
        for doc in docs.iter().filter(|doc| doc.n_tok > 0) {
            sum.n_docs += 1;
            sum.n_tok += doc.n_tok;
            sum.n_bytes += doc.n_bytes;
            sum.nll += doc.nll;
            sum.n_top1 += doc.n_top1;
        }
        sum
    }

    /// Nats per token.
    pub fn loss(&self) -> f64 {
        self.nll / self.n_tok as f64
    }

    /// How many tokens are as good as equally likely, on the mean.
    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Bits per byte.
    pub fn bits_per_byte(&self) -> f64 {
        self.nll / self.n_bytes as f64 / std::f64::consts::LN_2
    }

    /// Share of the tokens that the model thought likeliest.
    pub fn top1(&self) -> f64 {
        self.n_top1 as f64 / self.n_tok as f64
    }
}

/// What is said of all documents.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// All of them.
    pub total: Score,
    /// 95% interval of the bits per byte of all, unless there is too little text.
    pub interval: Option<Interval>,
    /// By language, that of the most bytes first.
    pub languages: Vec<(&'static str, Score)>,
}

impl Summary {
    /// Sums up; there must be a token that was predicted and a byte that it stands for.
    pub fn of(docs: &[DocScore]) -> Result<Summary> {
        let total = Score::of(&docs.iter().collect::<Vec<_>>());
        if total.n_tok == 0 || total.n_bytes == 0 {
            let problem = format!("there is nothing to predict in {} documents", docs.len());
            return Err(Error::input(problem, "give a text of at least two tokens"));
        }
        let mut by_language: BTreeMap<&'static str, Vec<&DocScore>> = BTreeMap::new();
        for doc in docs.iter().filter(|doc| doc.n_tok > 0) {
            by_language.entry(doc.language).or_default().push(doc);
        }
        let scores = by_language.into_iter().map(|(language, docs)| (language, Score::of(&docs)));
        let mut languages: Vec<(&'static str, Score)> = scores.collect();
        // Stable: of equals the first by name stays first.
        languages.sort_by_key(|(_, score)| std::cmp::Reverse(score.n_bytes));
        Ok(Summary { total, interval: Interval::of(docs), languages })
    }
}
