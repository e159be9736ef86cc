//! What is typed in a chat: messages of one line or several, from a terminal or a pipe.
//!
//! A line that ends in a backslash continues in the next. A message that starts with `"""` extends
//! to the next `"""` at the end of a line. History is kept in
//! `$XDG_STATE_HOME/elapid/chat_history`, or under `~/.local/state`.

use crate::report::{Done, Failure};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Context, Editor, Helper};
use std::io::{BufRead, IsTerminal};
use std::path::PathBuf;

const QUOTES: &str = "\"\"\"";

const N_HISTORY: usize = 1000;

pub struct Input {
    /// Where a person types; else each line of stdin is a message.
    editor: Option<Editor<Typing, DefaultHistory>>,
}

#[derive(Debug, PartialEq)]
pub enum Typed {
    /// A message, or a command.
    Text(String),
    /// A message between quotes, never a command.
    Quoted(String),
    /// Ctrl-C on the line: it is forgotten.
    Nothing,
    /// Ctrl-D, or the end of the pipe.
    End,
}

impl Input {
    /// The terminal if stdin is one; commands that start a line of `help` are completed.
    pub fn open(help: &'static str) -> Done<Input> {
        if !std::io::stdin().is_terminal() {
            return Ok(Input { editor: None });
        }
        let config = || Config::builder().max_history_size(N_HISTORY)?.history_ignore_dups(true);
        let config = config().map_err(failed)?.history_ignore_space(true).build();
        let mut editor = Editor::with_config(config).map_err(failed)?;
        editor.set_helper(Some(Typing { help }));
        if let Some(path) = history_path() {
            // There is none the first time.
            let _ = editor.load_history(&path);
        }
        Ok(Input { editor: Some(editor) })
    }

    /// Whether a person types.
    pub fn is_terminal(&self) -> bool {
        self.editor.is_some()
    }

    pub fn next(&mut self) -> Done<Typed> {
        let Some(editor) = &mut self.editor else {
            return next_of(&mut std::io::stdin().lock());
        };
        match editor.readline("> ") {
            Ok(text) => {
                let _ = editor.add_history_entry(text.as_str());
                // After each message: a chat may end in any way. A failure stops nobody.
                if let Some(path) = history_path() {
                    let _ = path.parent().map(std::fs::create_dir_all);
                    let _ = editor.save_history(&path);
                }
                Ok(unfold(&text))
            }
            Err(ReadlineError::Interrupted) => Ok(Typed::Nothing),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(error) => Err(failed(error)),
        }
    }
}

fn failed(error: ReadlineError) -> Failure {
    let hint = "send messages through a pipe, one per line, if the terminal cannot be used";
    Failure::new(format!("cannot read from the terminal: {error}"), hint)
}

fn history_path() -> Option<PathBuf> {
    let variable =
        |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = variable("XDG_STATE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".local/state")))
        .or_else(|| variable("LOCALAPPDATA"));
    state.map(|dir| dir.join("elapid").join("chat_history"))
}

fn next_of(input: &mut dyn BufRead) -> Done<Typed> {
    let mut text = String::new();
    loop {
        let mut line = String::new();
        let n_bytes = input.read_line(&mut line).map_err(|error| {
            Failure::new(format!("cannot read stdin: {error}"), "messages must be UTF-8")
        })?;
        let is_end = n_bytes == 0;
        if is_end && text.is_empty() {
            return Ok(Typed::End);
        }
        text.push_str(line.trim_end_matches(['\n', '\r']));
        if is_end || is_complete(&text) {
            return Ok(unfold(&text));
        }
        text.push('\n');
    }
}

/// Whether nothing is left open.
fn is_complete(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(inside) => inside.trim_end().ends_with(QUOTES),
        None => !text.ends_with('\\'),
    }
}

/// The message without the marks that held its lines together.
fn unfold(text: &str) -> Typed {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(inside) => {
            let inside = inside.trim_end();
            let inside = inside.strip_suffix(QUOTES).unwrap_or(inside);
            Typed::Quoted(inside.trim_matches('\n').to_string())
        }
        None => {
            let text = text.strip_suffix('\\').unwrap_or(text);
            Typed::Text(text.replace("\\\n", "\n").trim().to_string())
        }
    }
}

/// What the editor asks while somebody types.
struct Typing {
    help: &'static str,
}

impl Helper for Typing {}

impl Hinter for Typing {
    type Hint = String;
}

impl Highlighter for Typing {}

impl Validator for Typing {
    fn validate(&self, context: &mut ValidationContext) -> rustyline::Result<ValidationResult> {
        Ok(match is_complete(context.input()) {
            true => ValidationResult::Valid(None),
            false => ValidationResult::Incomplete,
        })
    }
}

impl Completer for Typing {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        pos: usize,
        _context: &Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let typed = line.get(..pos).unwrap_or("");
        let first = |line: &'static str| line.split_whitespace().next();
        let fits = |command: &&str| typed.starts_with('/') && command.starts_with(typed);
        let list = self.help.lines().filter_map(first).filter(fits).map(str::to_string);
        Ok((0, list.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<String> {
        let mut input = text.as_bytes();
        let mut list = Vec::new();
        loop {
            match next_of(&mut input).unwrap() {
                Typed::Text(text) | Typed::Quoted(text) => list.push(text),
                Typed::Nothing | Typed::End => return list,
            }
        }
    }

    #[test]
    fn a_message_is_a_line_unless_it_is_held_open() {
        assert_eq!(all("one\r\ntwo\n\nlast"), ["one", "two", "", "last"]);
        assert_eq!(all("a\\\nb\\\nc\nd\n"), ["a\nb\nc", "d"]);
        assert_eq!(all("\"\"\"\n  a\n\nb\\\n\"\"\"\nc\n"), ["  a\n\nb\\", "c"]);
        assert_eq!(all("\"\"\"one\"\"\"\ntwo\n"), ["one", "two"]);
        // What the end of the pipe left open is a message too.
        assert_eq!(all("\"\"\"a\nb"), ["a\nb"]);
        assert_eq!(all("a\\\n"), ["a"]);
        assert_eq!(unfold("\"\"\"/quit\"\"\""), Typed::Quoted("/quit".into()));
    }

    #[test]
    fn what_is_no_text_is_an_error() {
        let error = next_of(&mut &b"\xff\xfe\n"[..]).unwrap_err().to_string();
        assert!(error.contains("cannot read stdin"), "{error}");
    }
}
