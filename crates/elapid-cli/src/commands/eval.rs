//! `elapid eval`: how well a model foresees a text.

use crate::files;
use crate::report::{Done, Failure, between, line, n_threads_default};
use elapid::batch::{Batch, Targets};
use elapid::device::Device;
use elapid::formats::checkpoint::Checkpoint;
use elapid::model::ForwardOptions;
use elapid::tape::Tape;
use elapid::tokenizer::Special;
use elapid::weights::Weights;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Measure how well a model foresees a text: loss, perplexity, bits per byte.
///
/// The text is cut into windows of tokens; in each, every token but the first is foreseen from
/// those before it.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid eval model.gguf notes.txt\n  \
    elapid eval SmolLM2-135M src/main.rs --context 256 --json")]
pub struct Eval {
    /// Directory, .gguf or .elapid file
    model: PathBuf,
    /// A file of text
    text: PathBuf,
    /// Tokens in a window
    #[arg(long, default_value_t = 512, value_parser = between(2, 1 << 20))]
    context: usize,
    /// Threads [default: all]
    #[arg(long, value_parser = between(1, 1024))]
    threads: Option<usize>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Eval {
    pub fn run(&self) -> Done<ExitCode> {
        let device = Device::cpu(self.threads.unwrap_or_else(n_threads_default))?;
        let checkpoint = files::open(&self.model)?;
        let weights = checkpoint.weights(&device)?;
        let text = files::read_text(&self.text)?;
        let tokenizer = checkpoint.tokenizer()?.ok_or_else(|| {
            let problem = format!("{} holds no tokenizer", self.model.display());
            Failure::new(problem, "put its tokenizer.json into the directory")
        })?;
        let ids = tokenizer.encode(&text, Special::Plain)?;
        let (mut nll, mut n_tok, mut n_top1, mut n_bytes) = (0.0, 0, 0, 0);
        for window in ids.chunks(self.context) {
            if window.len() < 2 {
                continue;
            }
            let (sum, top1) = device.run(|| foresee(&checkpoint, &weights, window))?;
            nll += sum;
            n_top1 += top1;
            n_tok += window.len() - 1;
            let bytes = |id: &u32| tokenizer.bytes(*id).map_or(0, |bytes| bytes.len());
            n_bytes += window[1..].iter().map(bytes).sum::<usize>();
        }
        if n_tok == 0 {
            let problem = format!("{} has {} tokens", self.text.display(), ids.len());
            return Err(Failure::new(problem, "give a text of at least two tokens"));
        }
        let loss = nll / n_tok as f64;
        let (perplexity, top1) = (loss.exp(), n_top1 as f64 / n_tok as f64);
        let bits_per_byte = nll / std::f64::consts::LN_2 / n_bytes.max(1) as f64;
        match self.json {
            true => line(json!({
                "n_tok": n_tok, "n_bytes": n_bytes, "loss": loss, "perplexity": perplexity,
                "bits_per_byte": bits_per_byte, "top1": top1,
            })),
            false => line(format!(
                "eval    {n_tok} tokens  loss {loss:.5}  perplexity {perplexity:.4}  \
                 {bits_per_byte:.4} bits per byte  top-1 {:.1}%",
                100.0 * top1
            )),
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// The sum of the negative log-likelihoods of a window, and how often the best guess was right.
fn foresee(checkpoint: &Checkpoint, weights: &Weights, ids: &[u32]) -> Done<(f64, usize)> {
    let (inputs, targets) = (&ids[..ids.len() - 1], &ids[1..]);
    let batch = Batch::from_sequences(&[inputs]);
    let ones = vec![1.0; targets.len()];
    let targets = Targets { ids: targets, weights: &ones, norm: targets.len() as f32 };
    let (tape, options) = (Tape::off(), ForwardOptions::default());
    let out = checkpoint.model().loss(&tape, weights, &batch, &targets, options)?;
    Ok((out.nll.iter().map(|&x| f64::from(x)).sum(), out.n_top1))
}
