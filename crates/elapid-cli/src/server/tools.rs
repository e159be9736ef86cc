//! Calls of tools: what a model writes as its template taught it, as objects.
//!
//! | syntax  | a call is                                                  | ends                |
//! |---------|------------------------------------------------------------|---------------------|
//! | Hermes  | `<tool_call>{"name", "arguments"}</tool_call>` (Qwen too)  | with its mark       |
//! | Llama   | `{"name", "parameters"}`, maybe after `<|python_tag|>`     | with the answer     |
//! | Mistral | `[TOOL_CALLS][{"name", "arguments"}]`                      | with the answer     |
//! | Harmony | `to=functions.NAME ...<|message|>{...}` (gpt-oss)          | with the message    |
//!
//! In Harmony an answer is messages of channels: what is thought (`analysis`) is left out.
//!
//! The source of the template says which one it is. Text that turns out to be no call is given out
//! as the text it is. A call that must come is asked for by a grammar: the name of a tool, then
//! arguments that its schema allows.

use super::error::{Answered, ApiError};
use elapid::Constraint;
use serde_json::{Value, json};
use std::fmt::Write;

const N_TOOLS_MAX: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syntax {
    Hermes,
    Llama,
    Mistral,
    Harmony,
}

impl Syntax {
    /// That of a chat template, if it knows tools in a way that can be read here.
    pub fn of(template: &str) -> Option<Syntax> {
        let has = |text: &str| template.contains(text);
        match has("tools") {
            true if has("<|channel|>") && has("<|message|>") => Some(Syntax::Harmony),
            true if has("<tool_call>") => Some(Syntax::Hermes),
            true if has("[TOOL_CALLS]") && !has("[ARGS]") => Some(Syntax::Mistral),
            true if has("<|python_tag|>") || has("Environment: ipython") => Some(Syntax::Llama),
            _ => None,
        }
    }

    /// What a call, or a list of them, begins and ends with.
    fn marks(self) -> (&'static str, &'static str) {
        match self {
            Syntax::Hermes => ("<tool_call>", "</tool_call>"),
            Syntax::Llama => ("<|python_tag|>", ""),
            Syntax::Mistral => ("[TOOL_CALLS]", ""),
            Syntax::Harmony => ("<|message|>", ""),
        }
    }
}

/// What ends a message of Harmony.
const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", "<|start|>"];

/// What a message of Harmony is.
#[derive(Clone, Debug, PartialEq)]
enum Channel {
    Text,
    Thought,
    Call(String),
}

impl Channel {
    /// By what stands before the message.
    fn of(header: &str) -> Channel {
        let name = header.split_once("to=functions.").map(|pair| pair.1);
        let name = name.and_then(|rest| rest.split([' ', '<', '\n']).next());
        match name {
            Some(name) if !name.is_empty() => Channel::Call(name.into()),
            _ if header.contains("analysis") => Channel::Thought,
            _ => Channel::Text,
        }
    }
}

/// Whether and what a model is to call.
#[derive(Clone, Debug, PartialEq)]
pub enum Choice {
    Auto,
    None,
    Required,
    Named(String),
}

impl Choice {
    /// `tool_choice` of OpenAI.
    pub fn read(value: Option<&Value>) -> Answered<Choice> {
        let name = |value: &Value| {
            let name = value.pointer("/function/name").or(value.get("name"))?;
            Some(Choice::Named(name.as_str()?.to_string()))
        };
        let known = match value {
            None | Some(Value::Null) => Some(Choice::Auto),
            Some(Value::String(word)) => match &word[..] {
                "auto" => Some(Choice::Auto),
                "none" => Some(Choice::None),
                "required" => Some(Choice::Required),
                _ => None,
            },
            Some(value) => name(value),
        };
        known.ok_or_else(|| {
            let words = "is not auto, none, required or {\"type\": \"function\", \"function\": \
                         {\"name\": ...}}";
            ApiError::field("tool_choice", words)
        })
    }
}

/// The function of each tool: `{"name", "description", "parameters"}`.
pub fn functions<'a>(tools: &'a [Value]) -> Answered<Vec<&'a Value>> {
    let wrong = |words: String| ApiError::field("tools", words);
    if tools.len() > N_TOOLS_MAX {
        return Err(wrong(format!("has {} items, at most {N_TOOLS_MAX}", tools.len())));
    }
    let function = |(idx, tool): (usize, &'a Value)| {
        let kind = tool.get("type").and_then(Value::as_str).unwrap_or("function");
        if kind != "function" {
            return Err(wrong(format!("item {idx} is a `{kind}`; known: function")));
        }
        let function = tool.get("function").filter(|it| it["name"].is_string());
        function.ok_or_else(|| wrong(format!("item {idx} has no `function.name`")))
    };
    tools.iter().enumerate().map(function).collect()
}

/// A grammar of one call, of any of these functions.
pub fn forced(syntax: Syntax, functions: &[&Value], choice: &Choice) -> Answered<Constraint> {
    let is_meant = |function: &&&Value| match choice {
        Choice::Named(name) => function["name"] == name[..],
        _ => true,
    };
    let meant: Vec<&&Value> = functions.iter().filter(is_meant).collect();
    if meant.is_empty() {
        return Err(ApiError::field("tool_choice", "names no function of `tools`"));
    }
    let (before, after, key) = match syntax {
        Syntax::Hermes => ("<tool_call>\n", "\n</tool_call>", "arguments"),
        Syntax::Llama => ("", "", "parameters"),
        Syntax::Mistral => ("[TOOL_CALLS][", "]", "arguments"),
        Syntax::Harmony => ("<|channel|>commentary to=functions.", "", ""),
    };
    let names: Vec<String> = (0..meant.len()).map(|idx| format!("f{idx}")).collect();
    let mut grammar = format!("%llguidance {{}}\nstart: {}\n", names.join(" | "));
    for (idx, function) in meant.into_iter().enumerate() {
        let name = &function["name"];
        let (mut start, mut end) =
            (format!("{before}{{\"name\": {name}, \"{key}\": "), format!("}}{after}"));
        if syntax == Syntax::Harmony {
            let name = name.as_str().unwrap_or_default();
            (start, end) = (format!("{before}{name} <|constrain|>json<|message|>"), String::new());
        }
        let (start, end) = (json!(start), json!(end));
        let schema = function.get("parameters").filter(|schema| schema.is_object());
        let mut schema = schema.cloned().unwrap_or(json!({"type": "object"}));
        // As Python writes it: a small model would fill its answer with white space.
        schema["x-guidance"] = json!({
            "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": ",
        });
        // Each schema is a root of its own: what it refers to inside stays right.
        let _ = writeln!(grammar, "f{idx}: {start} a{idx} {end}\na{idx}: %json {schema}");
    }
    Ok(Constraint::Lark(grammar))
}

#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    pub name: String,
    /// An object.
    pub arguments: Value,
}

/// What an answer consists of.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    Text(String),
    Call(Call),
}

/// Finds calls in an answer while it grows.
#[derive(Clone)]
pub struct Parser {
    /// None where no tools were given: then all is text.
    syntax: Option<Syntax>,
    n_calls_max: usize,
    pub n_calls: usize,
    /// Text that may be or become a call.
    held: String,
    is_inside: bool,
    /// The message of Harmony that `held` is the rest of.
    channel: Option<Channel>,
    /// Whether anything but white space was given out.
    is_begun: bool,
}

impl Parser {
    pub fn new(syntax: Option<Syntax>, n_calls_max: usize) -> Parser {
        let (held, is_inside, is_begun) = (String::new(), false, false);
        Parser { syntax, n_calls_max, n_calls: 0, held, is_inside, channel: None, is_begun }
    }

    /// All parts of a whole answer.
    pub fn all(mut self, text: &str) -> Vec<Part> {
        let mut parts = self.push(text);
        parts.extend(self.finish());
        let mut joined: Vec<Part> = Vec::new();
        for part in parts {
            match (joined.last_mut(), part) {
                (Some(Part::Text(before)), Part::Text(text)) => before.push_str(&text),
                (_, part) => joined.push(part),
            }
        }
        joined
    }

    /// Takes more text: what is certain of it.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        let Some(syntax) = self.syntax else { return texts(text.to_string()) };
        self.held.push_str(text);
        if syntax == Syntax::Harmony {
            return self.messages();
        }
        let ((open, close), mut parts) = (syntax.marks(), Vec::new());
        loop {
            if !self.is_inside {
                let is_bare = syntax == Syntax::Llama
                    && !self.is_begun
                    && self.held.trim_start().starts_with('{');
                let at = if is_bare { Some(0) } else { self.held.find(open) };
                let n_certain = at.unwrap_or_else(|| self.held.len() - n_begun(&self.held, open));
                // White space before a call is part of no text.
                let n_given = self.held[..n_certain].trim_end().len();
                let rest = self.held.split_off(n_given);
                let given = std::mem::replace(&mut self.held, rest);
                self.is_begun |= !given.is_empty();
                parts.extend(texts(given));
                let Some(at) = at else { return parts };
                self.held.drain(..at - n_given);
                self.is_inside = true;
            }
            let end = Some(close).filter(|close| !close.is_empty());
            let Some(at) = end.and_then(|close| self.held.find(close)) else { return parts };
            let rest = self.held.split_off(at + close.len());
            let inside = std::mem::replace(&mut self.held, rest);
            self.is_inside = false;
            parts.extend(self.close(&inside, (open, close)));
        }
    }

    /// The messages of Harmony, as far as they are certain.
    fn messages(&mut self) -> Vec<Part> {
        const HEADER_END: &str = "<|message|>";
        let mut parts = Vec::new();
        loop {
            let Some(channel) = &self.channel else {
                let Some(at) = self.held.find(HEADER_END) else { return parts };
                self.channel = Some(Channel::of(&self.held[..at]));
                self.held.drain(..at + HEADER_END.len());
                continue;
            };
            let found = ENDS.iter().filter_map(|mark| Some((self.held.find(mark)?, mark.len())));
            let end = found.min();
            let n_begun = ENDS.iter().map(|mark| n_begun(&self.held, mark)).max().unwrap_or(0);
            let n_certain = end.map_or(self.held.len() - n_begun, |(at, _)| at);
            if end.is_some() || !matches!(channel, Channel::Call(_)) {
                let channel = channel.clone();
                let given: String = self.held.drain(..n_certain).collect();
                parts.extend(self.message(&channel, given));
            }
            let Some((_, n_mark)) = end else { return parts };
            self.held.drain(..n_mark);
            self.channel = None;
        }
    }

    /// The parts of a message of Harmony.
    fn message(&mut self, channel: &Channel, text: String) -> Vec<Part> {
        match channel {
            Channel::Thought => Vec::new(),
            Channel::Text => texts(text),
            Channel::Call(name) => match serde_json::from_str::<Value>(text.trim()) {
                Ok(arguments) if arguments.is_object() && self.n_calls < self.n_calls_max => {
                    self.n_calls += 1;
                    vec![Part::Call(Call { name: name.clone(), arguments })]
                }
                Ok(arguments) if arguments.is_object() => Vec::new(),
                _ => texts(text),
            },
        }
    }

    /// What is left at the end.
    pub fn finish(&mut self) -> Vec<Part> {
        let held = std::mem::take(&mut self.held);
        if let Some(channel) = self.channel.take() {
            return self.message(&channel, held);
        }
        match self.syntax {
            Some(syntax) if self.is_inside => self.close(&held, syntax.marks()),
            _ if self.n_calls > 0 && held.trim().is_empty() => Vec::new(),
            _ => texts(held),
        }
    }

    fn close(&mut self, text: &str, (open, close): (&str, &str)) -> Vec<Part> {
        let inside = text.strip_prefix(open).unwrap_or(text);
        let Some(calls) = calls(inside.strip_suffix(close).unwrap_or(inside)) else {
            return texts(text.to_string());
        };
        let n_left = self.n_calls_max.saturating_sub(self.n_calls);
        let calls: Vec<Part> = calls.into_iter().take(n_left).map(Part::Call).collect();
        self.n_calls += calls.len();
        calls
    }
}

fn texts(text: String) -> Vec<Part> {
    if text.is_empty() { Vec::new() } else { vec![Part::Text(text)] }
}

/// Bytes at the end of `text` that `mark` begins with.
fn n_begun(text: &str, mark: &str) -> usize {
    (1..mark.len()).rev().find(|n| text.ends_with(&mark[..*n])).unwrap_or(0)
}

/// Objects and lists of them, one after the other.
fn calls(text: &str) -> Option<Vec<Call>> {
    let (mut calls, mut rest) = (Vec::new(), text.trim());
    while !rest.is_empty() {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next()?.ok()? {
            Value::Array(list) => {
                calls.extend(list.iter().map(call).collect::<Option<Vec<Call>>>()?)
            }
            value => calls.push(call(&value)?),
        }
        rest = rest[values.byte_offset()..].trim_start_matches([';', ',', ' ', '\n', '\t', '\r']);
    }
    Some(calls).filter(|calls| !calls.is_empty())
}

fn call(value: &Value) -> Option<Call> {
    let value = value.get("function").filter(|it| it.is_object()).unwrap_or(value);
    let arguments = value.get("arguments").or(value.get("parameters"));
    let arguments = match arguments {
        None | Some(Value::Null) => json!({}),
        Some(Value::String(text)) => serde_json::from_str(text).ok()?,
        Some(value) => value.clone(),
    };
    let name = value.get("name")?.as_str()?.to_string();
    arguments.is_object().then_some(Call { name, arguments })
}

#[cfg(test)]
mod tests;
