//! `elapid train-tokenizer`: a new vocabulary from text.

use crate::files;
use crate::report::live::progress;
use crate::report::{Done, between, line};
use elapid::{BpeTrainer, Tokenizer};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Train a byte-level BPE tokenizer on text files and write it as tokenizer.json.
///
/// The same files give the same tokenizer on any number of threads.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid train-tokenizer src/*.rs --out tokenizer.json\n  \
    elapid train-tokenizer corpus.txt --vocab 16384 --out tokenizer.json \\\n    \
    --special '<|endoftext|>' --special '<|fim_prefix|>'")]
pub struct TrainTokenizer {
    /// Text files in UTF-8
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Vocabulary size: special tokens, 256 bytes and merges
    #[arg(long, default_value_t = 16384, value_parser = between(257, 1 << 20))]
    vocab: usize,
    /// Special token, never produced from plain text; may be repeated
    #[arg(long, value_name = "TOKEN", default_value = "<|endoftext|>")]
    special: Vec<String>,
    /// Pre-tokenizer, by its name in GGUF
    #[arg(long, default_value = "gpt-2")]
    pre: String,
    /// File to write
    #[arg(long)]
    out: PathBuf,
    /// Overwrite OUT if it exists
    #[arg(long)]
    force: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl TrainTokenizer {
    pub fn run(&self) -> Done<ExitCode> {
        super::convert::check_output(&self.out, self.force)?;
        let begin = Instant::now();
        let texts = self.files.iter().map(|path| files::read_text(path));
        let texts = texts.collect::<Result<Vec<String>, _>>()?;
        let n_bytes: usize = texts.iter().map(String::len).sum();
        let specials = self.special.clone();
        let trainer = BpeTrainer { n_vocab: self.vocab, min_count: 2, specials };
        let mut told = progress("train", "{human_pos} of {human_len} tokens");
        let mut list = texts.iter().map(String::as_str);
        let tokenizer = Tokenizer::train(&trainer, &self.pre, &mut list, &mut told)?;
        drop(told);
        files::write_bytes(&self.out, tokenizer.to_json()?.as_bytes())?;
        let (n_vocab, seconds) = (tokenizer.n_vocab(), begin.elapsed().as_secs_f64());
        if n_vocab < self.vocab {
            let wanted = self.vocab;
            eprintln!("note    {n_vocab} tokens, not {wanted}: no pair occurs twice any more");
        }
        match self.json {
            true => line(json!({
                "out": self.out.display().to_string(), "n_vocab": n_vocab, "n_bytes": n_bytes,
                "seconds": seconds,
            })),
            false => line(format!(
                "write   {}  {n_vocab} tokens from {:.1} MB of text in {seconds:.1} s",
                self.out.display(),
                n_bytes as f64 / 1e6
            )),
        }
        Ok(ExitCode::SUCCESS)
    }
}
