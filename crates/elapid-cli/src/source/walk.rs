//! Paths to documents, and documents to training and held-out ones.
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
//! Texts are read by all cores, looked at and dropped: what stays is a list of entries and, until
//! copies are found, a signature of each text.
//!
//! Not here: why a file is unwanted, what a near copy is, how the split is drawn (the engine).

use super::entry::{Entry, Exposed, Form, Met, each};
use super::git;
use super::left_out::{LeftOut, Why};
use super::secrets::SecretKind;
use crate::report::reading::{Reading, waiting};
use crate::report::{Done, Failure};
use elapid::ChatStyle;
use elapid::Model;
use elapid::Signature;
use elapid::Unwanted as Reason;
use elapid::{ChatOptions, ChatTemplate};
use elapid::{SplitBy, SplitItem};
use ignore::{DirEntry, WalkBuilder};
use std::collections::{BTreeMap, HashSet};
use std::fs::Metadata;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// How a path is read.
pub struct Walk {
    /// Largest file of a directory, in bytes.
    pub n_bytes_max: u64,
    /// The directory this run writes to, if it exists or is about to.
    pub out: Option<PathBuf>,
    /// Renders the conversations of JSONL, if the model has one.
    pub template: Option<ChatTemplate>,
    /// What the template is given besides.
    pub options: ChatOptions,
    /// What becomes of keys, passwords and addresses in the text.
    pub secrets: Secrets,
}

/// What becomes of secrets in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Secrets {
    /// They are replaced before anything looks at the text.
    Replace,
    /// The text is read as it is.
    Keep,
}

impl Default for Walk {
    fn default() -> Self {
        let options = ChatOptions::default();
        let (n_bytes_max, secrets) = (elapid::BYTE_MAX, Secrets::Replace);
        Walk { n_bytes_max, out: None, template: None, options, secrets }
    }
}

impl Walk {
    pub fn chat(&self) -> ChatStyle<'_> {
        ChatStyle { template: self.template.as_ref(), options: &self.options }
    }
}

/// What was found.
pub struct Collected {
    /// To learn from, by name; records in the order of the file.
    pub documents: Vec<Entry>,
    /// When each document, or the oldest of its copies, was last committed.
    pub dates: Vec<Option<i64>>,
    /// Documents with equal numbers are near copies.
    pub clusters: Vec<usize>,
    /// What is not to be learned, by name.
    pub left_out: Vec<LeftOut>,
    /// Secrets that were replaced in the documents: keys before addresses, then by place.
    pub exposed: Vec<Exposed>,
}

const HINT: &str = "give a directory, a text file or a .jsonl file";

/// A run directory of ours has these files, and is nothing to learn from.
const RUN_FILES: [&str; 2] = ["metrics.jsonl", "config.json"];

/// Documents under `path`.
pub fn collect(path: &Path, walk: &Walk) -> Done<Collected> {
    list(&[(path.to_path_buf(), 1.0)], walk)?.read(walk)
}

/// Files under several paths; none is read yet.
pub struct Listing(Vec<Listed>);

/// Files under one path.
struct Listed {
    path: PathBuf,
    /// The same, without links.
    root: PathBuf,
    /// How often its documents are drawn in an epoch.
    weight: f64,
    files: Files,
}

enum Files {
    Directory(Tree),
    /// A file of so many bytes.
    One(u64),
}

/// Lists the files under several paths, each with its weight.
pub fn list(sources: &[(PathBuf, f64)], walk: &Walk) -> Done<Listing> {
    let one = |(path, weight): &(PathBuf, f64)| {
        let cannot = |error| Failure::new(format!("cannot read {}: {error}", path.display()), HINT);
        let root = path.canonicalize().map_err(cannot)?;
        let facts = root.metadata().map_err(cannot)?;
        let files = match facts.is_dir() {
            true => Files::Directory(Tree::visit(&root, walk)),
            false if facts.is_file() => Files::One(facts.len()),
            false => {
                return Err(Failure::new(format!("{} is not a plain file", path.display()), HINT));
            }
        };
        Ok(Listed { path: path.clone(), root, weight: *weight, files })
    };
    Ok(Listing(sources.iter().map(one).collect::<Done<_>>()?))
}

impl Listing {
    /// A hash of names, sizes, times of change and weights, and of the commit that dates are of:
    /// another one as soon as one of them is.
    pub fn key(&self) -> String {
        let facts = |facts: std::io::Result<Metadata>| {
            let facts = facts.ok()?;
            let time = facts.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
            Some((facts.len(), time.as_nanos()))
        };
        let mut hasher = blake3::Hasher::new();
        for Listed { root, weight, files, .. } in &self.0 {
            let head = git::head(root);
            hasher.update(format!("{root:?} {weight} {head:?}\n").as_bytes());
            let lines: Vec<String> = match files {
                Files::One(_) => vec![format!("{:?}", facts(root.metadata()))],
                Files::Directory(tree) => each(tree.files.len(), |idx| {
                    let (name, entry) = &tree.files[idx];
                    let facts = facts(entry.metadata().map_err(std::io::Error::other));
                    format!("{name:?} {facts:?}\n")
                }),
            };
            lines.iter().for_each(|line| {
                hasher.update(line.as_bytes());
            });
        }
        hasher.finalize().to_string()
    }

    /// Reads the files and leaves out what is not to be learned.
    pub fn read(self, walk: &Walk) -> Done<Collected> {
        let mut found = Found::default();
        let n_sources = self.0.len();
        for listed in self.0 {
            let (first, left) = (found.entries.len(), found.left_out.len());
            let told = found.exposed.len();
            let (path, weight) = (listed.path.clone(), listed.weight);
            let has_prefix = n_sources > 1 && matches!(listed.files, Files::Directory(_));
            found.scan(listed, walk)?;
            if found.entries.len() == first {
                return Err(nothing(&path, &found.left_out[left..]));
            }
            let prefix = title(&path);
            // Names of two sources may be the same.
            let name = |name: &str| match has_prefix {
                true => format!("{prefix}/{name}"),
                false => name.to_string(),
            };
            for (entry, _) in &mut found.entries[first..] {
                (entry.weight, entry.name) = (weight, name(&entry.name));
            }
            found.left_out[left..].iter_mut().for_each(|left| left.name = name(&left.name));
            found.exposed[told..].iter_mut().for_each(|one| one.name = name(&one.name));
        }
        found.without_copies(walk)
    }
}

/// The last part of a path.
fn title(path: &Path) -> String {
    let path = path.canonicalize().unwrap_or(path.into());
    path.file_name().map_or("text".into(), |name| name.to_string_lossy().into_owned())
}

fn is_records(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.ends_with(".jsonl") || name.ends_with(".ndjson")
}

/// What was read, before copies are taken out.
#[derive(Default)]
struct Found {
    entries: Vec<(Entry, Signature)>,
    dates: Vec<Option<i64>>,
    left_out: Vec<LeftOut>,
    exposed: Vec<Exposed>,
}

/// Lines of a file that are read at once, in bytes.
const LINES_BYTES: usize = 32 << 20;

impl Found {
    fn scan(&mut self, listed: Listed, walk: &Walk) -> Done<()> {
        let Listed { path, root, files, .. } = listed;
        let name = title(&root);
        match files {
            Files::Directory(tree) => self.scan_directory(&root, tree, walk),
            Files::One(_) if is_records(&name) => self.scan_records(&name, &root.into(), walk)?,
            Files::One(n) => self.scan_text(&path, Entry::of_file(name, &root, n), walk)?,
        }
        self.dates.resize(self.entries.len(), None);
        Ok(())
    }

    /// One text of any size. Whoever names a file wants it: neither its size nor what it is for
    /// counts.
    fn scan_text(&mut self, path: &Path, whole: Entry, walk: &Walk) -> Done<()> {
        let blocks = whole.clone().blocks()?;
        let reading = Reading::new("read", Some(blocks.len()));
        let check = |idx: usize| {
            let reason = elapid::unwanted_content(&whole.name, &blocks[idx].bytes()?);
            reading.add(blocks[idx].n_bytes());
            match reason {
                Some(
                    reason @ (Reason::Binary | Reason::NotUtf8 | Reason::Empty | Reason::Secret),
                ) => {
                    let shown = path.display();
                    let problem = format!("no text to train on: {shown}: {reason}");
                    Err(Failure::new(problem, HINT))
                }
                _ => Ok(blocks[idx].load_and_tell(walk)?.1),
            }
        };
        let exposed = each(blocks.len(), check).into_iter().collect::<Done<Vec<_>>>()?;
        self.exposed.extend(exposed.into_iter().flatten());
        let signature = match blocks.len() {
            1 => Signature::new(&whole.load(walk)?.text()),
            // Not compared with others.
            _ => Signature::new(&path.to_string_lossy()),
        };
        self.entries.push((whole, signature));
        Ok(())
    }

    fn scan_records(&mut self, name: &str, path: &Arc<Path>, walk: &Walk) -> Done<()> {
        let fail = |source| elapid::Error::Read { path: path.to_path_buf(), source };
        let mut file = BufReader::new(std::fs::File::open(path).map_err(fail)?);
        let (mut start, mut n_lines) = (0, 0);
        let reading = Reading::new("read", None);
        loop {
            let (mut lines, mut n_bytes) = (Vec::new(), 0);
            while n_bytes < LINES_BYTES {
                let mut line = Vec::new();
                if file.read_until(b'\n', &mut line).map_err(fail)? == 0 {
                    break;
                }
                n_lines += 1;
                n_bytes += line.len();
                lines.push((n_lines, start, line));
                start += lines[lines.len() - 1].2.len() as u64;
            }
            if lines.is_empty() {
                return Ok(());
            }
            let read = |idx: usize| {
                let (number, start, line) = &lines[idx];
                reading.add(line.len());
                Entry::of_line(&format!("{name}:{number}"), path, *start, line, walk)
            };
            for met in each(lines.len(), read) {
                self.extend(met?);
            }
        }
    }

    fn scan_directory(&mut self, root: &Path, tree: Tree, walk: &Walk) {
        let Tree { files, left_out } = tree;
        self.left_out.extend(left_out);
        let reading = Reading::new("read", Some(files.len()));
        let read = |idx: usize| {
            let (name, entry) = &files[idx];
            let text = read(name, entry, walk);
            reading.add(text.as_ref().map_or(0, String::len));
            text.map(|text| Entry::of_text(name.clone(), entry.path(), text, walk)).map_err(|why| {
                let facts = entry.metadata().ok().filter(|facts| facts.is_file());
                LeftOut { name: name.clone(), why, n_bytes: facts.map(|facts| facts.len()) }
            })
        };
        let read = each(files.len(), read);
        drop(files);
        let dates = waiting("dates", "of the last commits of files", || git::dates(root));
        for found in read {
            match found {
                Ok(met) => {
                    let date = dates.as_ref().and_then(|dates| dates.get(&met.0.name));
                    self.dates.push(date);
                    self.extend(Some(met));
                }
                Err(left) => self.left_out.push(left),
            }
        }
    }

    fn extend(&mut self, met: Option<Met>) {
        let Some((entry, signature, exposed)) = met else { return };
        self.entries.push((entry, signature));
        self.exposed.extend(exposed);
    }

    /// Leaves out copies and near copies of earlier files, and exact copies of earlier records.
    fn without_copies(self, walk: &Walk) -> Done<Collected> {
        let Found { entries, dates, left_out, mut exposed } = self;
        let (entries, signatures): (Vec<Entry>, Vec<Signature>) = entries.into_iter().unzip();
        let text =
            |idx: usize| Ok::<_, elapid::Error>(entries[idx].load(walk)?.text().into_owned());
        let what = format!("{} documents with each other, for copies", entries.len());
        let alike = waiting("compare", &what, || elapid::near_copies(&signatures, &text))?;
        drop(signatures);
        let mut oldest = BTreeMap::new();
        for (date, (cluster, _)) in dates.into_iter().zip(&alike) {
            let oldest = oldest.entry(*cluster).or_insert(date);
            // None is newer than any date.
            *oldest = [*oldest, date].into_iter().flatten().min();
        }
        let reason = |(entry, (_, copy_of)): (&Entry, &(usize, Option<usize>))| {
            let of = &entries[(*copy_of)?];
            let name = of.name.clone();
            match (entry.is_same(of), entry.form) {
                (true, _) => Some(Reason::Duplicate { of: name }),
                (false, Form::Text) => Some(Reason::NearDuplicate { of: name }),
                (false, Form::Record) => None,
            }
        };
        let reasons: Vec<_> = entries.iter().zip(&alike).map(reason).collect();
        let (mut documents, mut dates) = (Vec::new(), Vec::new());
        let (mut clusters, mut left_out) = (Vec::new(), left_out);
        for ((entry, (cluster, _)), reason) in entries.into_iter().zip(alike).zip(reasons) {
            if let Some(reason) = reason {
                let (why, n_bytes) = (Why::Unwanted(reason), Some(entry.n_bytes() as u64));
                left_out.push(LeftOut { name: entry.name, why, n_bytes });
                continue;
            }
            documents.push(entry);
            dates.push(oldest[&cluster]);
            clusters.push(cluster);
        }
        left_out.sort_by(|left, right| left.name.cmp(&right.name));
        let kept: HashSet<&str> = documents.iter().map(|entry| entry.name.as_str()).collect();
        // Parts of a long text have its name and a number.
        exposed.retain(|one| {
            let whole = one.name.split(" (part ").next().unwrap_or_default();
            kept.contains(one.name.as_str()) || kept.contains(whole)
        });
        exposed.sort_by_key(|one| one.kind == SecretKind::Email);
        Ok(Collected { documents, dates, clusters, left_out, exposed })
    }
}

fn nothing(path: &Path, left_out: &[LeftOut]) -> Failure {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    left_out.iter().for_each(|left| *counts.entry(left.why.kind()).or_default() += 1);
    let counts: Vec<String> = counts.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
    let seen = if counts.is_empty() { "it is empty".into() } else { counts.join(", ") };
    let problem = format!("no text to train on under {}: {seen}", path.display());
    Failure::new(problem, "give a directory with text, or the path of one text or .jsonl file")
}

/// Walks a directory, but not into runs.
fn entries(root: &Path, is_run: impl Fn(&Path) -> bool + Send + Sync + 'static) -> ignore::Walk {
    WalkBuilder::new(root)
        .require_git(false)
        .add_custom_ignore_filename(".aiignore")
        .filter_entry(move |entry| entry.depth() == 0 || !is_run(entry.path()))
        .build()
}

/// Plain files under a directory with their relative names, as [`collect`] meets them; what they
/// hold is not looked at.
pub fn plain_files(root: &Path) -> impl Iterator<Item = (String, Metadata)> {
    let is_run = |path: &Path| RUN_FILES.into_iter().all(|file| path.join(file).is_file());
    entries(root, is_run).flatten().filter_map(move |entry| {
        let facts = entry.metadata().ok().filter(Metadata::is_file)?;
        Some((relative(root, entry.path()), facts))
    })
}

/// What a walk meets.
struct Tree {
    /// With relative names, by name.
    files: Vec<(String, DirEntry)>,
    left_out: Vec<LeftOut>,
}

impl Tree {
    fn visit(root: &Path, walk: &Walk) -> Tree {
        let out = walk.out.as_ref().map(|out| out.canonicalize().unwrap_or(out.clone()));
        let is_run = move |path: &Path| {
            let holds = |file| path.join(file).is_file();
            Some(path) == out.as_deref() || RUN_FILES.into_iter().all(holds)
        };
        let entries = entries(root, is_run.clone());
        let mut tree = Tree { files: Vec::new(), left_out: Vec::new() };
        let (mut folders, mut visited) = (Vec::new(), HashSet::new());
        let reading = Reading::of("list", "files");
        for entry in entries.flatten() {
            reading.add(0);
            visited.insert(entry.path().to_path_buf());
            match entry.file_type().is_some_and(|kind| kind.is_dir()) {
                true => folders.push(entry.into_path()),
                false => tree.files.push((relative(root, entry.path()), entry)),
            }
        }
        tree.files.sort_by(|left, right| left.0.cmp(&right.0));
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
fn read(name: &str, entry: &DirEntry, walk: &Walk) -> Result<String, Why> {
    let unreadable = |error: String| Why::Unreadable(error);
    if entry.path_is_symlink() {
        return Err(Why::Link);
    }
    let facts = entry.metadata().map_err(|error| unreadable(error.to_string()))?;
    if !facts.is_file() {
        return Err(Why::NotPlain);
    }
    text(name, entry.path(), facts.len(), walk.n_bytes_max)
}

/// The text of a plain file of so many bytes, or why it is not wanted.
pub fn text(name: &str, path: &Path, n_bytes: u64, n_bytes_max: u64) -> Result<String, Why> {
    if let Some(reason) = elapid::unwanted_path(name) {
        return Err(Why::Unwanted(reason));
    }
    // Neither is read for nothing.
    if is_records(name) {
        return Err(Why::Records);
    }
    if n_bytes > n_bytes_max {
        return Err(Why::Unwanted(Reason::TooLarge));
    }
    let bytes = std::fs::read(path).map_err(|error| Why::Unreadable(error.to_string()))?;
    content(name, bytes)
}

/// The text of a file of a directory that is to be learned, or why it is not.
pub(super) fn text_of(name: &str, bytes: Vec<u8>, walk: &Walk) -> Result<String, Why> {
    if is_records(name) {
        return Err(Why::Records);
    }
    if bytes.len() as u64 > walk.n_bytes_max {
        return Err(Why::Unwanted(Reason::TooLarge));
    }
    content(name, bytes)
}

fn content(name: &str, bytes: Vec<u8>) -> Result<String, Why> {
    if let Some(reason) = elapid::unwanted_content(name, &bytes) {
        return Err(Why::Unwanted(reason));
    }
    String::from_utf8(bytes).map_err(|_| Why::Unwanted(Reason::NotUtf8))
}

/// Entries without copies and near copies of earlier ones.
pub fn without_copies(entries: Vec<(Entry, Signature)>, walk: &Walk) -> Done<Vec<Entry>> {
    let dates = vec![None; entries.len()];
    let found = Found { entries, dates, left_out: Vec::new(), exposed: Vec::new() };
    Ok(found.without_copies(walk)?.documents)
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

/// Two sides of what was collected.
#[derive(Debug)]
pub struct Divided {
    /// To learn from.
    pub train: Vec<Entry>,
    /// To measure on.
    pub held_out: Vec<Entry>,
    /// What decided.
    pub by: SplitBy,
    /// What is to be known of it.
    pub note: Option<String>,
}

/// Holds out at least `fraction` of the text. Files that are not committed are the newest of all.
pub fn divide(collected: Collected, fraction: f64) -> Done<Divided> {
    let Collected { documents, dates, clusters, .. } = collected;
    let item = |idx: usize| SplitItem {
        name: &documents[idx].name,
        language: documents[idx].language,
        n_bytes: documents[idx].n_bytes(),
        is_text: documents[idx].form == Form::Text,
        cluster: clusters[idx],
        date: dates[idx],
    };
    let items: Vec<SplitItem<'_>> = (0..documents.len()).map(item).collect();
    let split = elapid::split(&items, fraction);
    let (mut train, mut held_out) = (Vec::new(), Vec::new());
    for (idx, entry) in documents.into_iter().enumerate() {
        let Some(split) = split.as_ref().filter(|split| split.held_out.binary_search(&idx).is_ok())
        else {
            train.push(entry);
            continue;
        };
        match split.by {
            SplitBy::End => match entry.cut(split.share)? {
                Some((first, last)) => {
                    train.push(first);
                    held_out.push(last);
                }
                None => train.push(entry),
            },
            _ => held_out.push(entry),
        }
    }
    let Some(split) = split.filter(|_| !held_out.is_empty()) else {
        let hint = "give more text: one document to train on and one to evaluate on";
        return Err(Failure::new("too little text to hold some of it out", hint));
    };
    let sizes: Vec<usize> = held_out.iter().map(Entry::n_bytes).collect();
    Ok(Divided { train, held_out, by: split.by, note: elapid::too_little(&sizes) })
}
