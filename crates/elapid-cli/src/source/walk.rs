//! A path to documents, and documents to training and held-out ones.
//!
//! | path              | documents                                                            |
//! |-------------------|----------------------------------------------------------------------|
//! | a directory       | its files, walked as ripgrep does                                    |
//! | a `.jsonl` file   | its records                                                          |
//! | any other file    | itself, whatever its size                                            |
//!
//! A walk honours .gitignore (also outside of a repository: an unpacked archive has one too),
//! .ignore and .aiignore, leaves hidden files out and follows no links. Files are taken in the
//! order of their names with `/` between folders, so the outcome does not depend on the file
//! system. Copies and near copies of an earlier file are left out. Of records only exact copies
//! are: prompts that share their instructions look alike and differ in what matters; near ones stay
//! on one side of the split, unless all records are alike.
//!
//! Not here: why a file is unwanted, what a near copy is, how the split is drawn (the engine).

use super::git;
use super::left_out::{LeftOut, Why};
use crate::report::{Done, Failure};
use elapid::ChatStyle;
use elapid::CopyOf;
use elapid::Document;
use elapid::Model;
use elapid::Unwanted as Reason;
use elapid::{ChatOptions, ChatTemplate};
use elapid::{Split, SplitItem};
use ignore::{DirEntry, WalkBuilder};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// How a path is read.
pub struct Walk<'a> {
    /// Largest file of a directory, in bytes.
    pub n_bytes_max: u64,
    /// The directory this run writes to, if it exists or is about to.
    pub out: Option<PathBuf>,
    /// Renders the conversations of JSONL, if the model has one.
    pub template: Option<&'a ChatTemplate>,
    /// What the template is given besides.
    pub options: ChatOptions,
}

impl Default for Walk<'_> {
    fn default() -> Self {
        let options = ChatOptions::default();
        Walk { n_bytes_max: elapid::BYTE_MAX, out: None, template: None, options }
    }
}

impl Walk<'_> {
    fn chat(&self) -> ChatStyle<'_> {
        ChatStyle { template: self.template, options: &self.options }
    }
}

/// What was found.
pub struct Collected {
    /// To learn from, by name; records in the order of the file.
    pub documents: Vec<Document>,
    /// When each document, or the oldest of its copies, was last committed.
    pub dates: Vec<Option<i64>>,
    /// Documents with equal numbers are near copies.
    pub clusters: Vec<usize>,
    /// What is not to be learned, by name.
    pub left_out: Vec<LeftOut>,
}

/// A run directory of ours has these files, and is nothing to learn from.
const RUN_FILES: [&str; 2] = ["metrics.jsonl", "config.json"];

/// Documents under `path`.
pub fn collect(path: &Path, walk: &Walk<'_>) -> Done<Collected> {
    let hint = "give a directory, a text file or a .jsonl file";
    let cannot = |error| Failure::new(format!("cannot read {}: {error}", path.display()), hint);
    let root = path.canonicalize().map_err(cannot)?;
    let facts = root.metadata().map_err(cannot)?;
    if facts.is_dir() {
        return collect_directory(path, &root, walk);
    }
    if !facts.is_file() {
        return Err(Failure::new(format!("{} is not a plain file", path.display()), hint));
    }
    let bytes = std::fs::read(&root).map_err(cannot)?;
    let name = root.file_name().map_or("text".into(), |name| name.to_string_lossy());
    if is_records(&name) {
        let documents = elapid::documents_of_jsonl(&name, &bytes, walk.chat())?;
        return Ok(without_copies(documents));
    }
    // Whoever names a file wants it: neither its size nor what it is for counts.
    match elapid::unwanted_content(&name, &bytes) {
        Some(reason @ (Reason::Binary | Reason::NotUtf8 | Reason::Empty | Reason::Secret)) => {
            let problem = format!("no text to train on: {}: {}", path.display(), reason.describe());
            Err(Failure::new(problem, hint))
        }
        _ => {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            Ok(Collected {
                documents: vec![Document::whole(name, text)],
                dates: vec![None],
                clusters: vec![0],
                left_out: Vec::new(),
            })
        }
    }
}

fn is_records(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.ends_with(".jsonl") || name.ends_with(".ndjson")
}

fn collect_directory(path: &Path, root: &Path, walk: &Walk<'_>) -> Done<Collected> {
    let mut tree = Tree::visit(root, walk);
    let mut documents = Vec::new();
    for (name, entry) in std::mem::take(&mut tree.files) {
        match read(&name, &entry, walk) {
            Ok(text) => documents.push(Document::whole(name, text)),
            Err(why) => {
                let facts = entry.metadata().ok().filter(|facts| facts.is_file());
                let n_bytes = facts.map(|facts| facts.len());
                tree.left_out.push(LeftOut { name, why, n_bytes });
            }
        }
    }
    let texts: Vec<_> = documents.iter().map(Document::text).collect();
    let alike = elapid::near_copies(&texts.iter().map(|text| &**text).collect::<Vec<_>>());
    drop(texts);
    let names: Vec<String> = documents.iter().map(|document| document.name.clone()).collect();
    let dates = git::dates(root);
    let mut oldest = BTreeMap::new();
    for (name, alike) in names.iter().zip(&alike) {
        let date = dates.as_ref().and_then(|dates| dates.get(name));
        let oldest = oldest.entry(alike.cluster).or_insert(date);
        // None is newer than any date.
        *oldest = [*oldest, date].into_iter().flatten().min();
    }
    let mut collected = Collected {
        documents: Vec::new(),
        dates: Vec::new(),
        clusters: Vec::new(),
        left_out: tree.left_out,
    };
    for (document, alike) in documents.into_iter().zip(alike) {
        let reason = match alike.copy_of {
            Some(CopyOf::Exact(idx)) => Reason::Duplicate { of: names[idx].clone() },
            Some(CopyOf::Near(idx)) => Reason::NearDuplicate { of: names[idx].clone() },
            None => {
                collected.documents.push(document);
                collected.dates.push(oldest[&alike.cluster]);
                collected.clusters.push(alike.cluster);
                continue;
            }
        };
        let n_bytes = Some(document.n_bytes() as u64);
        collected.left_out.push(LeftOut {
            name: document.name,
            why: Why::Unwanted(reason),
            n_bytes,
        });
    }
    collected.left_out.sort_by(|left, right| left.name.cmp(&right.name));
    if collected.documents.is_empty() {
        return Err(nothing(path, &collected.left_out));
    }
    Ok(collected)
}

fn nothing(path: &Path, left_out: &[LeftOut]) -> Failure {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    left_out.iter().for_each(|left| *counts.entry(left.why.kind()).or_default() += 1);
    let counts: Vec<String> = counts.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
    let seen = if counts.is_empty() { "it is empty".into() } else { counts.join(", ") };
    let problem = format!("no text to train on under {}: {seen}", path.display());
    Failure::new(problem, "give a directory with text, or the path of one text or .jsonl file")
}

/// Records without exact copies.
fn without_copies(documents: Vec<Document>) -> Collected {
    let texts: Vec<_> = documents.iter().map(Document::text).collect();
    let alike = elapid::near_copies(&texts.iter().map(|text| &**text).collect::<Vec<_>>());
    drop(texts);
    let mut collected = Collected {
        documents: Vec::new(),
        dates: Vec::new(),
        clusters: Vec::new(),
        left_out: Vec::new(),
    };
    let names: Vec<String> = documents.iter().map(|document| document.name.clone()).collect();
    for (document, alike) in documents.into_iter().zip(alike) {
        if let Some(CopyOf::Exact(idx)) = alike.copy_of {
            let why = Why::Unwanted(Reason::Duplicate { of: names[idx].clone() });
            let n_bytes = Some(document.n_bytes() as u64);
            collected.left_out.push(LeftOut { name: document.name, why, n_bytes });
            continue;
        }
        collected.documents.push(document);
        collected.dates.push(None);
        collected.clusters.push(alike.cluster);
    }
    collected
}

/// What a walk meets.
struct Tree {
    /// By relative name.
    files: BTreeMap<String, DirEntry>,
    left_out: Vec<LeftOut>,
}

impl Tree {
    fn visit(root: &Path, walk: &Walk<'_>) -> Tree {
        let out = walk.out.as_ref().map(|out| out.canonicalize().unwrap_or(out.clone()));
        let is_run = move |path: &Path| {
            let holds = |file| path.join(file).is_file();
            Some(path) == out.as_deref() || RUN_FILES.into_iter().all(holds)
        };
        let may_enter = is_run.clone();
        let entries = WalkBuilder::new(root)
            .require_git(false)
            .add_custom_ignore_filename(".aiignore")
            .filter_entry(move |entry| entry.depth() == 0 || !may_enter(entry.path()))
            .build();
        let mut tree = Tree { files: BTreeMap::new(), left_out: Vec::new() };
        let (mut folders, mut visited) = (Vec::new(), HashSet::new());
        for entry in entries.flatten() {
            visited.insert(entry.path().to_path_buf());
            match entry.file_type().is_some_and(|kind| kind.is_dir()) {
                true => folders.push(entry.into_path()),
                false => {
                    tree.files.insert(relative(root, entry.path()), entry);
                }
            }
        }
        for folder in folders {
            tree.list_unvisited(root, &folder, &visited, &is_run);
        }
        tree
    }

    /// The walk does not say what it passes by; a second look at each folder does.
    fn list_unvisited(
        &mut self,
        root: &Path,
        folder: &Path,
        visited: &HashSet<PathBuf>,
        is_run: &dyn Fn(&Path) -> bool,
    ) {
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries.flatten(),
            Err(error) => {
                let (name, why) = (relative(root, folder), Why::Unreadable(error.to_string()));
                self.left_out.push(LeftOut { name: name + "/", why, n_bytes: None });
                return;
            }
        };
        for entry in entries {
            let (path, own_name) = (entry.path(), entry.file_name());
            if visited.contains(&path) || own_name == ".git" {
                continue;
            }
            let why = match own_name.to_string_lossy().starts_with('.') {
                _ if is_run(&path) => Why::Run,
                true => Why::Hidden,
                false => Why::Ignored,
            };
            let mut name = relative(root, &path);
            let facts = entry.metadata().ok();
            if facts.as_ref().is_some_and(|facts| facts.is_dir()) {
                name.push('/');
            }
            let n_bytes = facts.filter(|facts| facts.is_file()).map(|facts| facts.len());
            self.left_out.push(LeftOut { name, why, n_bytes });
        }
    }
}

/// The path below `root`, with `/`.
fn relative(root: &Path, path: &Path) -> String {
    let path = path.strip_prefix(root).unwrap_or(path);
    let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy()).collect();
    parts.join("/")
}

/// The text of a file that is to be learned, or why it is not.
fn read(name: &str, entry: &DirEntry, walk: &Walk<'_>) -> Result<String, Why> {
    let unreadable = |error: String| Why::Unreadable(error);
    if entry.path_is_symlink() {
        return Err(Why::Link);
    }
    let facts = entry.metadata().map_err(|error| unreadable(error.to_string()))?;
    if !facts.is_file() {
        return Err(Why::NotPlain);
    }
    if let Some(reason) = elapid::unwanted_path(name) {
        return Err(Why::Unwanted(reason));
    }
    if is_records(name) {
        return Err(Why::Records);
    }
    if facts.len() > walk.n_bytes_max {
        return Err(Why::Unwanted(Reason::TooLarge));
    }
    let bytes = std::fs::read(entry.path()).map_err(|error| unreadable(error.to_string()))?;
    if let Some(reason) = elapid::unwanted_content(name, &bytes) {
        return Err(Why::Unwanted(reason));
    }
    String::from_utf8(bytes).map_err(|_| Why::Unwanted(Reason::NotUtf8))
}

/// How a model's conversations are written: its template, and the tokens that it may name.
pub fn chat_of(checkpoint: &Model) -> Done<(Option<ChatTemplate>, ChatOptions)> {
    let template: Option<String> = checkpoint.chat_template()?;
    let template =
        template.map(|text| ChatTemplate::new("the chat template", &text)).transpose()?;
    let Some(tokenizer) = checkpoint.tokenizer()? else {
        return Ok((template, Default::default()));
    };
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.token(id));
    let (bos_token, eos_token) = (text(tokenizer.bos()), text(tokenizer.eos()));
    Ok((template, ChatOptions { bos_token, eos_token, ..ChatOptions::default() }))
}

/// Holds out at least `fraction` of the text. Files that are not committed are the newest of all.
pub fn divide(collected: Collected, fraction: f64) -> Done<Split> {
    let facts = collected.clusters.into_iter().zip(collected.dates);
    let items: Vec<SplitItem> = facts.map(|(cluster, date)| SplitItem { cluster, date }).collect();
    elapid::split(collected.documents, &items, fraction).ok_or_else(|| {
        let hint = "give more text: one document to train on and one to evaluate on";
        Failure::new("too little text to hold some of it out", hint)
    })
}
