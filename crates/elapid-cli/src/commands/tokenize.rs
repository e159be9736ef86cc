//! `elapid tokenize`: text to ids and back.

use crate::base;
use crate::report::{Done, Failure, line, print};
use elapid::{Special, Tokenizer};
use serde_json::json;
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

/// Convert text to token ids, or ids to text.
///
/// Text is read from stdin or a file, byte for byte; ids are printed on one line, separated by
/// spaces. No BOS token is added. With `--decode` ids are read, separated by white space, and their
/// text is printed.
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
    /// Convert ids to text
    #[arg(long)]
    decode: bool,
    /// Parse special tokens in the text instead of reading them as plain text
    #[arg(long)]
    special: bool,
    /// Print one JSON object with the ids and the text of each token
    #[arg(long, conflicts_with = "decode")]
    json: bool,
}

impl Tokenize {
    pub fn run(&self) -> Done<ExitCode> {
        let tokenizer = Tokenizer::open(base::resolve(&self.tokenizer)?)?;
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
            Failure::new(format!("cannot read {name}: {error}"), "give a text file")
        })?;
        String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            let problem = format!("{name} is not UTF-8: invalid byte at offset {at}");
            Failure::new(problem, "convert the text first, for example with iconv")
        })
    }

    fn print_text(&self, tokenizer: &Tokenizer, input: &str) -> Done<ExitCode> {
        let parse = |word: &str| {
            let id = word.parse::<u32>().ok();
            id.filter(|&id| tokenizer.token(id).is_some()).ok_or_else(|| {
                let n_vocab = tokenizer.n_vocab();
                let problem = format!("{word:?} is not a token id below {n_vocab}");
                Failure::new(problem, "give whole numbers separated by white space")
            })
        };
        let ids = input.split_whitespace().map(parse).collect::<Done<Vec<u32>>>()?;
        print(tokenizer.decode(&ids, Special::Parse));
        Ok(ExitCode::SUCCESS)
    }
}
