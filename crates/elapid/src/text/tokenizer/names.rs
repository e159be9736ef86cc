//! The pre-tokenizers that GGUF files name, with their patterns and habits.
//!
//! `tokenizer.ggml.pre` is an agreement with llama.cpp, so the patterns of its table are taken as
//! they are (`names.txt`), also where they simplify those of the tokenizer.json a model came with.
//!
//! Not here, because llama.cpp cuts them by code and not by patterns: `kimi-k2`, `afmoe`,
//! `tiny_aya`, and what its models `gemma4` and `whitespace` use.

use std::sync::OnceLock;

use super::pre::{GPT2, Stage};
use crate::error::{Error, Result};

pub(super) struct Named {
    names: Vec<&'static str>,
    habits: Vec<&'static str>,
    patterns: Vec<&'static str>,
}

fn table() -> &'static [Named] {
    static TABLE: OnceLock<Vec<Named>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table: Vec<Named> = Vec::new();
        for line in include_str!("names.txt").lines() {
            match (line.split_once(' '), table.last_mut()) {
                (Some(("names", names)), _) => table.push(Named {
                    names: names.split(' ').collect(),
                    habits: Vec::new(),
                    patterns: Vec::new(),
                }),
                (Some(("habits", habits)), Some(row)) => row.habits.extend(habits.split(' ')),
                (Some(("pattern", pattern)), Some(row)) => row.patterns.push(pattern),
                _ => {}
            }
        }
        table
    })
}

impl Named {
    /// Whether a word that is a token is taken whole.
    pub(super) fn ignores_merges(&self) -> bool {
        self.habits.contains(&"ignore_merges")
    }

    /// Whether text begins with a token of its own unless the file says otherwise.
    pub(super) fn adds_bos(&self) -> bool {
        self.habits.contains(&"add_bos")
    }

    /// The stages, ready to cut; `file` is for errors.
    pub(super) fn stages(&self, file: &str) -> Result<Vec<Stage>> {
        self.patterns.iter().map(|pattern| Stage::new(file, pattern)).collect()
    }
}

/// The row of a name that stands in `file`.
pub(super) fn find(file: &str, name: &str) -> Result<&'static Named> {
    table().iter().find(|row| row.names.contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = table().iter().flat_map(|row| row.names.iter().copied()).collect();
        Error::config(
            file,
            "tokenizer.ggml.pre",
            format!("the pre-tokenizer {name:?} is not known"),
            &format!("use the model's tokenizer.json, or one of these: {}", known.join(", ")),
        )
    })
}

/// One spelling for patterns that mean the same.
fn spelling(pattern: &str) -> String {
    if pattern == GPT2 {
        return GPT2.trim_end_matches(r"|\s+").into();
    }
    pattern
        .replace(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
        )
        .replace(
            r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            r"((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+",
        )
        .replace(
            r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            r"((?=[\p{L}])([^a-z]))+((?=[\p{L}])([^A-Z]))*",
        )
        .replace('\r', r"\r")
        .replace('\n', r"\n")
}

/// The name of these stages, if they have one.
pub(super) fn name(stages: &[Stage], ignores_merges: bool) -> Option<&'static str> {
    let want: Vec<String> = stages.iter().map(|stage| spelling(&stage.pattern)).collect();
    let is_same = |row: &&Named| {
        row.ignores_merges() == ignores_merges
            && row.patterns.iter().map(|pattern| spelling(pattern)).eq(want.iter().cloned())
    };
    table().iter().find(is_same).map(|row| row.names[0])
}

/// Every pattern of the table.
#[cfg(test)]
pub(super) fn patterns() -> Vec<&'static str> {
    table().iter().flat_map(|row| row.patterns.iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_compiles_and_finds_its_name_again() {
        for row in table() {
            assert!(!row.patterns.is_empty(), "{:?} has no pattern", row.names);
            let stages = row.stages("a test").unwrap();
            let name = name(&stages, row.ignores_merges()).unwrap();
            let again = find("a test", name).unwrap();
            assert_eq!(row.patterns, again.patterns, "{:?}", row.names);
        }
    }

    #[test]
    fn an_unknown_name_is_named_and_the_known_are_listed() {
        let error = find("m.gguf", "zork").err().unwrap().report();
        assert!(error.contains("zork") && error.contains("llama-bpe"), "{error}");
    }
}
