//! `elapid tokenize`: text to ids and back.

use crate::report::{Done, Failure, line};
use elapid::{Special, Tokenizer};
use serde_json::json;
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Turn text into token ids, or ids into text.
///
/// Text comes from stdin or from a file, byte for byte; ids are printed on one line with spaces
/// between. Nothing is put before the text. With `--decode` ids come in, with any white space
/// between, and the text goes out as it is.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  echo -n 'fn main() {' | elapid tokenize model.gguf\n  \
    elapid tokenize tokenizer.json --file src/main.rs\n  \
    echo 504 2274 | elapid tokenize SmolLM2-135M --decode")]
pub struct Tokenize {
    /// Model (directory, .gguf, .elapid), tokenizer.json, or a directory that holds one
    tokenizer: PathBuf,
    /// Read this file instead of stdin
    #[arg(long)]
    file: Option<PathBuf>,
    /// From ids to text
    #[arg(long)]
    decode: bool,
    /// Take special tokens in the text for what they are, not for plain text
    #[arg(long)]
    special: bool,
    /// Print one JSON object with the ids and the text of each
    #[arg(long, conflicts_with = "decode")]
    json: bool,
}

impl Tokenize {
    pub fn run(&self) -> Done<ExitCode> {
        let tokenizer = Tokenizer::open(&self.tokenizer)?;
        let input = self.read()?;
        if self.decode {
            return self.print_text(&tokenizer, &input);
        }
        let special = if self.special { Special::Parse } else { Special::Plain };
        let ids = tokenizer.encode(&input, special)?;
        if self.json {
            let text = |id: &u32| {
                let bytes = tokenizer.bytes(*id).unwrap_or_default();
                String::from_utf8_lossy(&bytes).into_owned()
            };
            let tokens: Vec<String> = ids.iter().map(text).collect();
            line(json!({"n_tok": ids.len(), "ids": ids, "tokens": tokens}));
        } else {
            line(ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
        }
        Ok(ExitCode::SUCCESS)
    }

    fn read(&self) -> Done<String> {
        let (name, bytes) = match &self.file {
            Some(path) => (path.display().to_string(), std::fs::read(path)),
            None => {
                let mut bytes = Vec::new();
                let read = std::io::stdin().read_to_end(&mut bytes);
                ("stdin".into(), read.map(|_| bytes))
            }
        };
        let bytes = bytes.map_err(|error| {
            Failure::new(format!("cannot read {name}: {error}"), "give a file of text")
        })?;
        String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            let problem = format!("{name} is not UTF-8: byte {at} begins no character");
            Failure::new(problem, "convert the text first, for example with iconv")
        })
    }

    fn print_text(&self, tokenizer: &Tokenizer, input: &str) -> Done<ExitCode> {
        let parse = |word: &str| {
            let id = word.parse::<u32>().ok();
            id.filter(|&id| tokenizer.token(id).is_some()).ok_or_else(|| {
                let n_vocab = tokenizer.n_vocab();
                let problem = format!("{word:?} is no token of this vocabulary of {n_vocab}");
                Failure::new(problem, "ids are whole numbers with white space between")
            })
        };
        let ids = input.split_whitespace().map(parse).collect::<Done<Vec<u32>>>()?;
        let text = tokenizer.decode(&ids, Special::Parse);
        let mut out = std::io::stdout();
        let done = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        done.map_err(|error| Failure::new(format!("cannot write: {error}"), "look at the pipe"))?;
        Ok(ExitCode::SUCCESS)
    }
}
