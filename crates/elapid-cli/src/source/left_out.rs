//! What was left out and why, for people and for machines.
//!
//! Files that ignore files exclude and hidden ones are never visited: a folder among them is one
//! entry, with nothing known of its size.

use super::entry::Exposed;
use super::secrets::SecretKind;
use crate::report::text::bytes;
use elapid::Unwanted as Reason;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Something under the path that is not learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Path relative to the source; a folder ends in `/`.
    pub name: String,
    /// Why.
    pub why: Why,
    /// Its size; not known of folders and links.
    pub n_bytes: Option<u64>,
}

/// Why something is left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// By its path, size or text.
    Unwanted(Reason),
    /// JSONL inside of a folder: data, not a file to read.
    Records,
    /// A symbolic link.
    Link,
    /// A pipe, a socket, a device.
    NotPlain,
    /// Could not be read.
    Unreadable(String),
    /// Its name begins with a dot.
    Hidden,
    /// Excluded by .gitignore, .ignore or .aiignore.
    Ignored,
    /// What an earlier run, or this one, writes.
    Run,
}

impl Why {
    /// In a word or two, the same for all of a kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Why::Unwanted(reason) => reason.kind(),
            Why::Records => "records",
            Why::Link => "link",
            Why::NotPlain => "not a file",
            Why::Unreadable(_) => "unreadable",
            Why::Hidden => "hidden",
            Why::Ignored => "ignored",
            Why::Run => "run",
        }
    }

    /// In words.
    pub fn describe(&self) -> String {
        match self {
            Why::Unwanted(reason) => reason.to_string(),
            Why::Records => "JSONL in a directory; give its own path to train on it".into(),
            Why::Link => "a symbolic link".into(),
            Why::NotPlain => "not a plain file".into(),
            Why::Unreadable(problem) => format!("cannot be read: {problem}"),
            Why::Hidden => "hidden".into(),
            Why::Ignored => "excluded by .gitignore, .ignore or .aiignore".into(),
            Why::Run => "a run of `elapid train`".into(),
        }
    }
}

/// What was left out for one reason.
#[derive(Default)]
struct Kind<'a> {
    n: usize,
    /// Of those whose size is known.
    n_bytes: Option<u64>,
    /// The first few.
    examples: Vec<&'a str>,
}

const N_EXAMPLE: usize = 2;

/// By reason, the most frequent first.
fn kinds(list: &[LeftOut]) -> Vec<(&'static str, Kind<'_>)> {
    let mut map: BTreeMap<&'static str, Kind<'_>> = BTreeMap::new();
    for left in list {
        let kind = map.entry(left.why.kind()).or_default();
        kind.n += 1;
        kind.n_bytes = [kind.n_bytes, left.n_bytes].into_iter().flatten().reduce(|a, b| a + b);
        if kind.examples.len() < N_EXAMPLE {
            kind.examples.push(&left.name);
        }
    }
    let mut kinds: Vec<_> = map.into_iter().collect();
    kinds.sort_by_key(|(_, kind)| std::cmp::Reverse(kind.n));
    kinds
}

/// One line per reason: how many, why, how large, examples. Empty when nothing was left out.
pub fn left_out_table(list: &[LeftOut]) -> String {
    let kinds = kinds(list);
    let n_digit = kinds.first().map_or(1, |(_, kind)| kind.n.to_string().len());
    let n_letter = kinds.iter().map(|(reason, _)| reason.len()).max().unwrap_or(0);
    let mut table = String::new();
    for (reason, Kind { n, n_bytes, examples }) in kinds {
        let size = size(n_bytes);
        let examples: Vec<String> = examples.into_iter().map(printable).collect();
        let more = if n > examples.len() { ", ..." } else { "" };
        let examples = examples.join(", ");
        table += &format!("{n:>n_digit$} {reason:<n_letter$}  {size:>9}  {examples}{more}\n");
    }
    table
}

/// One line for each, with the reason in words.
pub fn left_out_list(list: &[LeftOut]) -> String {
    let line = |left: &LeftOut| {
        let size = size(left.n_bytes);
        let (name, why) = (printable(&left.name), printable(&left.why.describe()));
        format!("{size:>9}  {name}: {why}\n")
    };
    list.iter().map(line).collect()
}

/// How many secrets are listed where nobody asks for all.
const N_EXPOSED: usize = 10;

/// Secrets that were replaced, one line each: where and what, never the value itself.
pub fn exposed_list(list: &[Exposed]) -> String {
    let line = |one: &Exposed| {
        let place = one.at.map_or(String::new(), |(line, column)| format!(":{line}:{column}"));
        format!("{}{place}  {}\n", printable(&one.name), one.kind.describe())
    };
    list.iter().map(line).collect()
}

/// The first of them, and how many more.
pub fn exposed_table(list: &[Exposed]) -> String {
    let (first, rest) = list.split_at(N_EXPOSED.min(list.len()));
    let mut text = exposed_list(first);
    if !rest.is_empty() {
        let n_emails = rest.iter().filter(|one| one.kind == SecretKind::Email).count();
        let n = rest.len();
        text +=
            &format!("and {n} more, {n_emails} of them e-mail addresses; --verbose lists all\n");
    }
    text
}

/// The table for machines: `[{"reason", "n_files", "n_bytes", "examples"}]`.
pub fn left_out_json(list: &[LeftOut]) -> Value {
    let object = |(reason, kind): (&str, Kind<'_>)| {
        json!({
            "reason": reason,
            "n_files": kind.n,
            "n_bytes": kind.n_bytes.unwrap_or(0),
            "examples": kind.examples,
        })
    };
    kinds(list).into_iter().map(object).collect()
}

/// Names of files may hold anything, also what moves the cursor of a terminal.
fn printable(name: &str) -> String {
    let shown = |letter: char| match letter.is_control() {
        true => letter.escape_default().to_string(),
        false => letter.to_string(),
    };
    name.chars().map(shown).collect()
}

/// A size where it is known.
fn size(n_bytes: Option<u64>) -> String {
    n_bytes.map_or("-".to_string(), |n_bytes| bytes(n_bytes as f64))
}
