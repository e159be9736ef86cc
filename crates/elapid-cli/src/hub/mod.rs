//! Models of the Hugging Face hub: their names, and the cache that `elapid pull` shares with
//! Python's tools.
//!
//! Commands that load a model use what is in the cache. Only `client` opens a connection, and only
//! `elapid pull` uses it.

pub mod cache;
#[cfg(feature = "pull")]
pub mod client;
#[cfg(feature = "pull")]
pub mod download;

use crate::report::{Done, Failure};
use cache::Cache;
use std::fmt::{Display, Formatter};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The revision of a name without one.
const MAIN: &str = "main";

/// `owner/repo`, `owner/repo:file.gguf`, either with `@revision`.
#[derive(Clone, Debug, PartialEq)]
pub struct Name {
    pub repo: String,
    pub file: Option<String>,
    /// A branch, a tag or a commit.
    pub revision: Option<String>,
}

impl Name {
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(MAIN)
    }
}

impl FromStr for Name {
    type Err = String;

    fn from_str(text: &str) -> Result<Name, String> {
        let (rest, revision) = split(text.rsplit_once('@'), text);
        let (repo, file) = split(rest.split_once(':'), rest);
        let is_word = |word: &str| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            word.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
                && word.chars().all(is_plain)
                && !word.contains("--")
                && !word.contains("..")
        };
        let is_repo = repo.split_once('/').is_some_and(|(a, b)| is_word(a) && is_word(b));
        if is_repo && file.is_none_or(is_inside) && revision.is_none_or(is_inside) {
            let [file, revision] = [file, revision].map(|part| part.map(str::to_string));
            return Ok(Name { repo: repo.into(), file, revision });
        }
        Err("write owner/repo, owner/repo:file.gguf or owner/repo@revision".into())
    }
}

/// Both parts, or the whole.
fn split<'a>(parts: Option<(&'a str, &'a str)>, whole: &'a str) -> (&'a str, Option<&'a str>) {
    parts.map_or((whole, None), |(first, second)| (first, Some(second)))
}

/// Whether a path from outside stays inside of the folder it is joined to, on every system.
fn is_inside(path: &str) -> bool {
    let is_part = |part: &str| !part.is_empty() && part != "." && part != "..";
    path.split('/').all(is_part) && !path.contains(|c: char| c.is_control() || "\\:".contains(c))
}

/// Whether this is so many hexadecimal digits.
fn is_hex(text: &str, n_digits: usize) -> bool {
    text.len() == n_digits && text.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
}

impl Display for Name {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.repo)?;
        self.file.iter().try_for_each(|file| write!(f, ":{file}"))?;
        self.revision.iter().try_for_each(|revision| write!(f, "@{revision}"))
    }
}

/// The files of a repository that make a model, small ones before weights.
#[derive(Debug, PartialEq)]
pub enum Parts {
    Directory(Vec<String>),
    /// All GGUF files, each a model of its own.
    Gguf(Vec<String>),
}

/// Files beside the weights that a model directory may have.
const TEXTS: &str = "README.md LICENSE config.json generation_config.json tokenizer.json \
    tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json \
    merges.txt chat_template.jinja chat_template.json adapter_config.json \
    model.safetensors.index.json pytorch_model.bin.index.json";

/// The start and the end of the names of weights, the best first.
const WEIGHTS: [(&str, &str); 6] = [
    ("model", ".safetensors"),
    ("model-", ".safetensors"),
    ("adapter_model", ".safetensors"),
    ("pytorch_model", ".bin"),
    ("pytorch_model-", ".bin"),
    ("adapter_model", ".bin"),
];

impl Parts {
    /// Chooses among the names of files.
    pub fn of(files: &[String]) -> Parts {
        let weights = WEIGHTS.iter().map(|(start, end)| weights(files, start, end));
        let Some(weights) = weights.into_iter().find(|weights| !weights.is_empty()) else {
            let is_gguf = |file: &&String| file.to_ascii_lowercase().ends_with(".gguf");
            return Parts::Gguf(files.iter().filter(is_gguf).cloned().collect());
        };
        // The index of the other kind of weights would name files that are not there.
        let other = if weights[0].ends_with(".bin") { "model.safe" } else { "pytorch_model.bin" };
        let is_text = |text: &str| TEXTS.split(' ').any(|it| it == text && !it.starts_with(other));
        let texts = files.iter().filter(|file| is_text(file));
        Parts::Directory(texts.cloned().chain(weights).collect())
    }
}

/// The file `start` + `end`, or where `start` ends with a dash its parts, `00001-of-00005` between.
fn weights(files: &[String], start: &str, end: &str) -> Vec<String> {
    let is_one = |file: &&String| {
        let middle = file.strip_prefix(start).and_then(|rest| rest.strip_suffix(end));
        middle.is_some_and(|text| match start.ends_with('-') {
            true => text.contains("-of-") && !text.contains('/'),
            false => text.is_empty(),
        })
    };
    files.iter().filter(is_one).cloned().collect()
}

/// The path of a model that is named as on the hub and lies in the cache. None for what is no such
/// name; a failure for a name that is not there.
pub fn resolve(path: &Path) -> Done<Option<PathBuf>> {
    let Some(name) = path.to_str().and_then(|text| text.parse::<Name>().ok()) else {
        return Ok(None);
    };
    let found = Cache::of_user().map_or(Ok(None), |cache| cache.find(&name))?;
    // `dir/model.gguf` is a wrong path much rather than a repository.
    let ends = [".gguf", ".safetensors", ".bin", ".json", ".elapid"];
    let is_file = name.file.is_none() && ends.iter().any(|end| name.to_string().ends_with(end));
    if found.is_some() || is_file {
        return Ok(found);
    }
    let problem = format!("there is no file or directory {name}, and no pulled model of that name");
    Err(Failure::new(problem, &hint_to_pull(&name)))
}

/// What to type for a model that is not there.
fn hint_to_pull(name: &Name) -> String {
    match cfg!(feature = "pull") {
        true => format!("check the path, or download it from the hub: elapid pull {name}"),
        false => "check the path; this elapid was built without `pull`".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Option<(String, Option<String>, Option<String>)> {
        let name = text.parse::<Name>().ok()?;
        assert_eq!(name.to_string(), text);
        Some((name.repo, name.file, name.revision))
    }

    #[test]
    fn a_name_has_an_owner_a_repository_and_perhaps_a_file_and_a_revision() {
        let some = |text: &str| Some(text.to_string());
        assert_eq!(name("a/b.c-d_1"), Some(("a/b.c-d_1".into(), None, None)));
        assert_eq!(name("a/b:q/m.gguf"), Some(("a/b".into(), some("q/m.gguf"), None)));
        assert_eq!(name("a/b@refs/pr/1"), Some(("a/b".into(), None, some("refs/pr/1"))));
        let all = Some(("a/b".into(), some("m.gguf"), some("v1.0")));
        assert_eq!(name("a/b:m.gguf@v1.0"), all);
        for wrong in [
            "",
            "a",
            "a/",
            "/b",
            "a/b/c",
            "./b",
            "../b",
            "a/..",
            "a/b--c",
            "~/b",
            "a b/c",
            "a/b:",
            "a/b@",
            "a/b:/etc/x",
            "a/b:../x",
            "a/b:x/../../y",
            "a/b:x\\y",
            "a/b@v1:m.gguf",
            "a/b@../x",
            "C:\\a/b",
            "a/b:\n",
        ] {
            assert_eq!(name(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn of_a_repository_one_kind_of_weights_is_taken_with_its_texts() {
        let of =
            |list: &[&str]| Parts::of(&list.iter().map(|it| it.to_string()).collect::<Vec<_>>());
        let dir = |list: &[&str]| Parts::Directory(list.iter().map(|it| it.to_string()).collect());
        let gguf = |list: &[&str]| Parts::Gguf(list.iter().map(|it| it.to_string()).collect());
        let many = [
            "model.safetensors",
            "config.json",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "consolidated.safetensors",
            "model.fp16.safetensors",
            "x.gguf",
            "tokenizer.json",
        ];
        assert_eq!(of(&many), dir(&["config.json", "tokenizer.json", "model.safetensors"]));
        let index = "model.safetensors.index.json";
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
        let all = [index, shards[0], shards[1]];
        assert_eq!(of(&[shards[0], shards[1], index, "pytorch_model.bin.index.json"]), dir(&all));
        assert_eq!(of(&["pytorch_model.bin", index]), dir(&["pytorch_model.bin"]));
        let adapter = ["adapter_config.json", "adapter_model.safetensors"];
        assert_eq!(of(&adapter), dir(&adapter));
        assert_eq!(of(&["config.json", "a.gguf", "q/b.GGUF"]), gguf(&["a.gguf", "q/b.GGUF"]));
        assert_eq!(of(&["config.json", "deep/model.safetensors"]), gguf(&[]));
    }
}
