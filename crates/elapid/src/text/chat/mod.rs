//! Chat templates: messages to the text a model was trained on.
//!
//! A template is a program in Jinja, written for transformers, which runs it in jinja2 with
//! `trim_blocks`, `lstrip_blocks`, loop controls, `raise_exception`, `strftime_now`, and a
//! `tojson` that writes as `json.dumps`. Here minijinja runs it; `python` and `text` make it give
//! the bytes that jinja2 gives, checked on the families of templates in `golden/chat.json`.
//!
//! A template comes with the model, from strangers. Instructions, bytes read and written, size
//! of the source, nesting of source, calls and values are limited (see `guard`), so that a
//! hostile one ends in an error.
//!
//! Not here: a template for models that have none (that is an error), a clock (the time comes
//! in with the options), tokens (special tokens are text until the tokenizer reads them).

mod guard;
mod python;
mod text;

use crate::error::{Error, Result};
pub use jiff::civil::DateTime;
use jiff::fmt::strtime::{BrokenDownTime, Config, PosixCustom};
use minijinja::machinery::{Vm, make_string_output};
use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value};
use serde_json::Map;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A message: `role`, `content` (a string or a list of parts), `tool_calls` and whatever else
/// the template reads. Keys keep their order where serde_json is built to keep it.
pub type Message = Map<String, serde_json::Value>;

/// Longest template read. Real ones stay below 32 KiB.
const SOURCE_BYTE_MAX: usize = 1 << 18;

/// Instructions of a rendering; `guard` makes about two of one.
const FUEL_MAX: u64 = 8_000_000;

/// Bytes a rendering may read and write, and how many more for each byte of the messages.
const BYTE_MAX: usize = 1 << 26;
const BYTE_PER_INPUT: usize = 256;

/// What a template is given besides the messages.
#[derive(Debug, Clone, Default)]
pub struct ChatOptions {
    /// Whether the text ends where the assistant is to begin.
    pub add_generation_prompt: bool,
    /// Text of the token that begins a sequence.
    pub bos_token: Option<String>,
    /// Text of the token that ends one.
    pub eos_token: Option<String>,
    /// Tools as JSON schemas, a list.
    pub tools: Option<serde_json::Value>,
    /// Further variables, such as `enable_thinking`.
    pub extra: Map<String, serde_json::Value>,
    /// The local time for `strftime_now`; a template that calls it without one fails.
    pub now: Option<DateTime>,
}

/// A chat template, known to parse.
#[derive(Debug)]
pub struct ChatTemplate {
    file: String,
    /// As `guard` wants it.
    source: String,
}

/// The words of `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

impl ChatTemplate {
    /// Parses the template `source`, which came from `file`.
    pub fn new(file: &str, source: &str) -> Result<ChatTemplate> {
        if source.len() > SOURCE_BYTE_MAX {
            let n_byte = source.len();
            let problem =
                format!("the chat template has {n_byte} bytes, at most {SOURCE_BYTE_MAX} are read");
            return Err(Error::format(file, problem, HINT));
        }
        // As jinja2 does, every end of line is one `\n`.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let mut template = ChatTemplate { file: file.to_string(), source: String::new() };
        template.source = template.caught(|| {
            let source = guard::checked_source(&source)?;
            guard::compiled(&source)?;
            Ok(source)
        })?;
        Ok(template)
    }

    /// Renders `messages`.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String> {
        let context = context(messages, options);
        let n_byte = guard::size(&context).saturating_mul(BYTE_PER_INPUT).saturating_add(BYTE_MAX);
        let env = environment(options.now);
        self.caught(|| {
            guard::with_budget(n_byte, || {
                let (code, mut text) = (guard::compiled(&self.source)?, String::new());
                let mut out = make_string_output(&mut text);
                let blocks = BTreeMap::new();
                Vm::new(&env).eval(&code, context, &blocks, &mut out, AutoEscape::None)?;
                drop(out);
                Ok(text)
            })
        })
    }

    /// What `f` gives, with errors and panics of minijinja as ours.
    fn caught<T>(&self, f: impl FnOnce() -> std::result::Result<T, minijinja::Error>) -> Result<T> {
        let Ok(result) = catch_unwind(AssertUnwindSafe(f)) else {
            return Err(Error::format(&self.file, "the chat template cannot be run", HINT));
        };
        result.map_err(|error| {
            let mut causes = std::iter::successors(error.source(), |cause| (*cause).source());
            if let Some(Refusal(words)) = causes.find_map(|cause| cause.downcast_ref()) {
                let hint = "the chat template refuses these messages; change roles or order";
                return Error::input(words.clone(), hint);
            }
            let line = error.line().map_or(String::new(), |line| format!(", line {line}"));
            let words = match (error.kind(), error.detail()) {
                (_, Some(words)) => words.to_string(),
                (ErrorKind::OutOfFuel, None) => "the template takes too many steps".to_string(),
                (kind, None) => kind.to_string(),
            };
            Error::format(&self.file, format!("chat template{line}: {words}"), HINT)
        })
    }
}

const HINT: &str = "the chat template may be cut off, or use what only jinja2 has; \
                    give a template of your own";

fn context(messages: &[Message], options: &ChatOptions) -> Value {
    let mut map = Map::new();
    map.insert("messages".into(), messages.to_vec().into());
    map.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
    map.insert("tools".into(), options.tools.clone().unwrap_or_default());
    map.insert("documents".into(), serde_json::Value::Null);
    for (name, token) in [("bos_token", &options.bos_token), ("eos_token", &options.eos_token)] {
        map.extend(token.iter().map(|token| (name.into(), token.clone().into())));
    }
    map.extend(options.extra.clone());
    Value::from_serialize(map)
}

fn environment(now: Option<DateTime>) -> Environment<'static> {
    let mut env = Environment::new();
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_fuel(Some(FUEL_MAX));
    env.set_recursion_limit(200);
    python::install(&mut env);
    env.add_function("strftime_now", move |format: &str| {
        let Some(now) = now else {
            return Err(python::fail("the template asks for the time, and none is given"));
        };
        // The longest of what a directive of two bytes becomes: `%c`.
        guard::charge(format.len().saturating_mul(16))?;
        let config = Config::new().custom(PosixCustom::new()).lenient(true);
        let text = BrokenDownTime::from(now).to_string_with_config(&config, format);
        text.map_err(|error| python::fail(error.to_string()))
    });
    env.add_function("raise_exception", |words: &Value| -> python::Outcome<Value> {
        Err(python::fail("refused").with_source(Refusal(text::text(words)?)))
    });
    env
}

#[cfg(test)]
mod tests;
