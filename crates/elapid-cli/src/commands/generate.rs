//! `elapid generate`: continues a text.

use super::{Chosen, here};
use crate::files;
use crate::report::{Done, Failure, between, line};
use crate::talk::answer::{self, Answer, INTERRUPTED, Out, answer};
use crate::talk::conversation::Conversation;
use crate::talk::flags::{ModelFlags, SamplingFlags, chat_prompt};
use elapid::{Generator, Reason, Request, Special, Token};
use serde_json::{Value, json};
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Continue a text.
///
/// The answer is printed to stdout as it is generated, without the prompt; speeds go to stderr at
/// the end. The BOS token is prepended unless --raw is given. An empty prompt means BOS alone.
/// Special tokens in the prompt are read as plain text unless --special is given.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid generate model.gguf -p 'Once upon a time'\n  \
    elapid generate runs/a1 -f src/main.rs -n 64 --temperature 0\n  \
    elapid generate coder.gguf -p 'fn add(' --suffix ' }' --stop $'\\n\\n'\n  \
    elapid generate SmolLM2-135M-Instruct --chat -p 'Name three rivers.'\n  \
    git diff | elapid generate model --json\n\n\
    Ctrl-C stops the answer and keeps what was written; the exit code is then 130.")]
pub struct Generate {
    /// Model: directory, .gguf or .elapid file, a run of `elapid train`, or elapid-code
    /// [default: the newest adapter of the project with its base, or elapid-code]
    model: Option<PathBuf>,
    /// Prompt; `-`, or none where stdin is a pipe, reads it from stdin
    #[arg(long, short = 'p', value_name = "TEXT", conflicts_with = "file")]
    prompt: Option<String>,
    /// Read the prompt from this file
    #[arg(long, short = 'f', value_name = "FILE")]
    file: Option<PathBuf>,
    /// Text after the answer (fill-in-the-middle, if the model supports it)
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["chat", "raw", "special"])]
    suffix: Option<String>,
    /// Apply the model's chat template to the prompt
    #[arg(long, conflicts_with = "raw")]
    chat: bool,
    /// System message
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Do not prepend the BOS token
    #[arg(long)]
    raw: bool,
    /// Parse special tokens in the prompt, and print those of the answer
    #[arg(long)]
    special: bool,
    /// Maximum tokens to generate
    #[arg(long, short = 'n', value_name = "N", default_value_t = 256,
        value_parser = between(0, 1 << 24))]
    max_tokens: usize,
    /// Print one JSON object: text, ids, finish reason, timings
    #[arg(long)]
    json: bool,
    /// With --json: one object per token as it is generated, then the final one
    #[arg(long, requires = "json")]
    stream: bool,
    /// Do not print speeds
    #[arg(long, short = 'q')]
    quiet: bool,
    #[command(flatten)]
    sampling: SamplingFlags,
    #[command(flatten)]
    source: ModelFlags,
}

/// Whether somebody writes to stdin: a pipe or a file, no terminal and not /dev/null.
fn is_piped() -> bool {
    #[cfg(unix)]
    {
        use std::os::fd::AsFd;
        use std::os::unix::fs::FileTypeExt;
        let file = std::io::stdin().as_fd().try_clone_to_owned().map(std::fs::File::from);
        let kind = file.and_then(|file| file.metadata()).map(|facts| facts.file_type());
        kind.is_ok_and(|kind| kind.is_fifo() || kind.is_file() || kind.is_socket())
    }
    #[cfg(not(unix))]
    !std::io::IsTerminal::is_terminal(&std::io::stdin())
}

impl Generate {
    pub fn run(&self) -> Done<ExitCode> {
        let begin = Instant::now();
        let text = self.text()?;
        let chosen = Chosen::new(self.model.as_deref(), &self.source.adapter, &here())?;
        if !self.quiet {
            chosen.say();
        }
        let mut loaded = self.source.load(&chosen.model, &chosen.adapters)?;
        let request = self.request(&loaded, &text)?;
        let load_ms = 1e3 * begin.elapsed().as_secs_f64();
        let (prompt, seed) = (request.prompt.clone(), request.sampling.seed);
        answer::listen();
        let mut out = Out::new();
        let mut on_token = |token: &Token| match (self.json, self.stream) {
            (false, _) => out.write(&token.text),
            (true, false) => {}
            (true, true) => line(json!({"id": token.id, "text": token.text})),
        };
        let answer = answer(&mut loaded.engine, request, &mut on_token)?;
        match self.json {
            true => {
                let mut json = self.to_json(&answer, &prompt, seed, load_ms);
                let model = self.model.as_ref().unwrap_or(&chosen.model);
                json["model"] = json!(model.display().to_string());
                json["experts"] = answer::experts_json(&loaded.engine);
                line(json);
            }
            false => {
                out.write(&answer.finish.text);
                out.end_line_on_terminal();
            }
        }
        if !self.quiet && !self.json {
            self.print_speed(&answer, &answer::experts(&loaded.engine), seed);
        }
        let is_interrupted = answer.finish.reason == Reason::Cancelled;
        Ok(if is_interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
    }

    fn text(&self) -> Done<String> {
        if let Some(path) = &self.file {
            return Ok(files::read_text(path)?);
        }
        match &self.prompt {
            Some(text) if text != "-" => return Ok(text.clone()),
            None if !is_piped() => return Ok(String::new()),
            _ => {}
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).map_err(|error| {
            Failure::new(format!("cannot read stdin: {error}"), "the prompt must be UTF-8")
        })?;
        Ok(text)
    }

    fn request(&self, loaded: &Generator, text: &str) -> Done<Request> {
        let special = if self.special { Special::Parse } else { Special::Plain };
        let tokenizer = loaded.engine.tokenizer();
        let mut stop_tokens = loaded.stops();
        let prompt = if let Some(suffix) = &self.suffix {
            let (prompt, stops) = loaded.infill(text, suffix)?;
            stop_tokens = stops;
            prompt
        } else if self.chat {
            let mut conversation = Conversation::new(self.system.clone());
            conversation.push(text.to_string());
            chat_prompt(loaded, &conversation.messages())?
        } else if self.raw && !text.is_empty() {
            tokenizer.encode(text, special)?
        } else {
            loaded.prompt(text, special)?
        };
        let request = self.sampling.request(loaded, prompt, self.max_tokens)?;
        Ok(Request { stop_tokens, special, ..request })
    }

    fn print_speed(&self, answer: &Answer, experts: &str, seed: u64) {
        let drawn = match self.sampling.temperature {
            Some(0.0) => String::new(),
            _ => format!("; seed {seed}"),
        };
        let guessed = match answer.finish.n_guessed {
            0 => String::new(),
            n => format!("; {} of {n} guesses accepted", answer.finish.n_accepted),
        };
        eprintln!("speed   {}{guessed}{experts}{drawn}", answer.timings());
    }

    fn to_json(&self, answer: &Answer, prompt: &[u32], seed: u64, load_ms: f64) -> Value {
        let Answer { text, ids, finish, .. } = answer;
        let (word, stop) = match &finish.reason {
            Reason::End => ("end", None),
            Reason::StopText(text) => ("stop", Some(text)),
            Reason::Length => ("length", None),
            Reason::Cancelled => ("interrupted", None),
            Reason::Failed(_) => ("failed", None),
        };
        let mut timings = answer.timings_json();
        timings["load_ms"] = json!(load_ms);
        json!({
            "model": null, "text": text, "ids": ids,
            "finish": word, "stop": stop, "seed": seed, "prompt_ids": prompt,
            "n_guessed": finish.n_guessed, "n_accepted": finish.n_accepted, "timings": timings,
        })
    }
}
