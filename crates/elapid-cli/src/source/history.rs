//! The tree of a repository as it was at a commit, and what was written since: text to learn from,
//! and later text to measure on.
//!
//! The commit is one of the line of first parents, chosen so that about a tenth of the text is new
//! since it. Every commit after it that is no merge gives documents: a file as it was after that
//! commit, in which the added lines are scored and all else is context. Files that are not
//! committed are the newest of all.
//!
//! ```text
//! line of a file after a commit          scored
//! was in the file before                 no
//! stands somewhere in an earlier tree    no: moved, or copied; unless it is short
//! short (`}`)                            if the long line above it is
//! otherwise                              yes
//! ```
//!
//! Lines are told apart by what is before and behind all changes of a file, and by being in between
//! or not: where a commit adds a line that its file had there already, that one is not scored.
//!
//! Not here: which files are wanted (`walk.rs`), near copies of whole files (the engine).

use super::entry::{Entry, each};
use super::git::{Records, blobs, head};
use super::left_out::Why;
use super::walk::{Collected, Walk, text_of};
use crate::report::Done;
use crate::report::reading::waiting;
use elapid::{Document, Part, Signature};
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Share of the text that is to be new, files that it is to be in, and the most of it.
const SHARE: f64 = 0.1;
const N_FILES: usize = 20;
const SHARE_MAX: f64 = 0.25;
/// Less than this says nothing of what comes next.
const SHARE_MIN: f64 = 0.01;
/// Commits of the line of first parents: fewer are no history, more are not looked at.
const N_COMMITS_MIN: usize = 3;
const N_COMMITS_MAX: usize = 20_000;

/// Letters of a line that may be recognised elsewhere.
const LINE_LETTERS: usize = 8;
/// Bytes of context before added lines, and behind the last.
const BEFORE_BYTES: usize = 4096;
const BEHIND_BYTES: usize = 1024;
/// Bytes of a document: a long one says little that its beginning does not.
const DOCUMENT_BYTES: usize = 8 << 10;

/// A repository before and after a commit.
pub struct History {
    /// The commit, and the newest one.
    pub commit: String,
    pub head: String,
    /// Names and texts of the tree at the commit.
    pub before: Vec<(String, String)>,
    /// What was written since, oldest first.
    pub since: Vec<New>,
}

/// Text that is new in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct New {
    /// The file, relative to the source.
    pub file: String,
    /// Added lines are `learned`, what was there is not.
    pub document: Document,
}

/// The history of the directory `root`, whose files as they are now were `collected`. None where
/// there is none, or too little of it.
pub fn history(root: &Path, collected: &Collected, walk: &Walk) -> Done<Option<History>> {
    let repository = Repository { root, walk, wanted: Wanted::new(collected) };
    let Some((commit, head)) = repository.choose() else { return Ok(None) };
    let Some(before) = repository.tree(&commit) else { return Ok(None) };
    let Some(changes) = repository.changes(&commit) else { return Ok(None) };
    let Some(now) = repository.tree(&head) else { return Ok(None) };
    let uncommitted = uncommitted(collected, now, walk)?;
    let mut seen: HashSet<&str> = before.iter().flat_map(|file| long_lines(&file.1)).collect();
    let mut since = Vec::new();
    for change in changes.iter().chain(&uncommitted) {
        since.extend(change.documents(&seen));
        seen.extend(long_lines(&change.new));
    }
    drop(seen);
    let has_both = !before.is_empty() && !since.is_empty();
    Ok(has_both.then_some(History { commit, head, before, since }))
}

/// Whether the tree of the commit `old` was there before that of `new`.
pub fn is_before(root: &Path, old: &str, new: &str) -> bool {
    let git = |args: &[&str]| Records::of_git(root, args).map(|records| records.count());
    let is_known = git(&["rev-parse", "--verify", "--quiet", &format!("{old}^{{commit}}")]);
    let n_others = git(&["rev-list", "--max-count=1", &format!("{new}..{old}")]);
    is_known == Some(1) && n_others == Some(0)
}

/// Which paths of a tree are read.
struct Wanted {
    /// Excluded by ignore files, as the walk of the work tree said; a folder ends in `/`.
    ignored: HashSet<String>,
}

impl Wanted {
    fn new(collected: &Collected) -> Wanted {
        let ignored = collected.left_out.iter().filter(|left| left.why == Why::Ignored);
        Wanted { ignored: ignored.map(|left| left.name.clone()).collect() }
    }

    fn has(&self, path: &str) -> bool {
        let folders = path.match_indices('/').map(|(at, _)| &path[..at + 1]);
        let is_hidden = path.split('/').any(|part| part.starts_with('.'));
        !is_hidden
            && elapid::unwanted_path(path).is_none()
            && !self.ignored.contains(path)
            && !folders.into_iter().any(|folder| self.ignored.contains(folder))
    }
}

struct Repository<'a> {
    root: &'a Path,
    walk: &'a Walk,
    wanted: Wanted,
}

/// A file before and after a commit.
struct Change {
    file: String,
    /// Seven letters of the commit.
    commit: String,
    old: String,
    new: String,
}

impl Repository<'_> {
    fn git(&self, args: &[&str]) -> Option<Vec<Vec<u8>>> {
        Some(Records::of_git(self.root, args)?.collect())
    }

    /// The commit to learn at, and the newest.
    fn choose(&self) -> Option<(String, String)> {
        let head = head(self.root)?;
        let limit = format!("--max-count={N_COMMITS_MAX}");
        let list = self.git(&["rev-list", "--first-parent", &limit, "HEAD"])?.concat();
        let list = String::from_utf8(list).ok()?;
        let chain: Vec<&str> = list.lines().collect();
        if chain.len() < N_COMMITS_MIN {
            return None;
        }
        let empty = self.git(&["hash-object", "-t", "tree", "--stdin"])?.concat();
        let (n_all, _) = self.added(std::str::from_utf8(&empty).ok()?.trim())?;
        let new = |at: usize| {
            let (n, n_files) = self.added(chain[at]).unwrap_or((0, 0));
            (n as f64 / n_all.max(1) as f64, n_files)
        };
        // Both grow with the distance from the newest, but for text that was taken out again.
        let places: Vec<usize> = (0..chain.len()).collect();
        let enough = places.partition_point(|at| {
            let (share, n_files) = new(*at);
            share < SHARE || n_files < N_FILES
        });
        let most = places.partition_point(|at| new(*at).0 <= SHARE_MAX);
        let at = enough.min(most.saturating_sub(1)).min(chain.len() - 1);
        (new(at).0 >= SHARE_MIN).then(|| (chain[at].to_string(), head))
    }

    /// Lines added to wanted files since a commit or tree, and the number of these files.
    fn added(&self, since: &str) -> Option<(usize, usize)> {
        let what = ["diff", "--numstat", "-z", "-M", "--relative", "--no-ext-diff"];
        let args = [&what[..], &["--no-textconv", since, "HEAD", "--", "."]].concat();
        let mut records = self.git(&args)?.into_iter();
        let (mut n_lines, mut n_files) = (0, 0);
        while let Some(record) = records.next() {
            let text = String::from_utf8_lossy(&record);
            let mut fields = text.splitn(3, '\t');
            let n = fields.next().and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
            let path = match fields.nth(1) {
                // A renamed file has both names behind.
                Some("") => records.nth(1).map(|path| String::from_utf8_lossy(&path).into_owned()),
                path => path.map(str::to_string),
            };
            if n > 0 && path.is_some_and(|path| self.wanted.has(&path)) {
                n_lines += n;
                n_files += 1;
            }
        }
        Some((n_lines, n_files))
    }

    /// Wanted texts of a tree, by name.
    fn tree(&self, commit: &str) -> Option<Vec<(String, String)>> {
        let (mut paths, mut ids) = (Vec::new(), Vec::new());
        for line in self.git(&["ls-tree", "-r", "-z", commit, "."])? {
            // MODE blob ID<tab>PATH
            let line = String::from_utf8_lossy(&line).into_owned();
            let Some((facts, path)) = line.split_once('\t') else { continue };
            if facts.starts_with("100") && self.wanted.has(path) {
                paths.push(path.to_string());
                ids.extend(facts.split(' ').nth(2).map(str::to_string));
            }
        }
        let texts = blobs(self.root, &ids)?.into_iter();
        let pairs = paths.into_iter().zip(texts);
        let mut list: Vec<(String, String)> = pairs
            .filter_map(|(path, bytes)| {
                text_of(&path, bytes, self.walk).ok().map(|text| (path, text))
            })
            .collect();
        list.sort();
        Some(list)
    }

    /// Changes of wanted files by commits since this one that are no merges, oldest first.
    fn changes(&self, since: &str) -> Option<Vec<Change>> {
        let what = ["log", "--raw", "--no-abbrev", "-z", "-M", "--no-merges", "--reverse"];
        let plain = ["--topo-order", "--relative", "--no-show-signature", "--format=/%H"];
        let range = format!("{since}..HEAD");
        let args = [&what[..], &plain, &[&range, "--", "."]].concat();
        let mut records = self.git(&args)?.into_iter();
        let (mut commit, mut list, mut ids) = (String::new(), Vec::new(), Vec::new());
        while let Some(record) = records.next() {
            let text = String::from_utf8_lossy(&record).into_owned();
            if let Some(id) = text.strip_prefix('/') {
                commit = id.chars().take(7).collect();
                continue;
            }
            // :MODE MODE OLD NEW STATUS, then one path, or two of a renamed file.
            let text = text.trim_start_matches('\n');
            let fields: Vec<&str> = text.split(' ').collect();
            let [_, mode, old, new, status] = fields[..] else { continue };
            let n_paths = if status.starts_with(['R', 'C']) { 2 } else { 1 };
            let path = records.nth(n_paths - 1)?;
            let file = String::from_utf8_lossy(&path).into_owned();
            if mode.starts_with("100") && self.wanted.has(&file) {
                ids.extend([old.to_string(), new.to_string()]);
                list.push((file, commit.clone()));
            }
        }
        let mut texts = blobs(self.root, &ids)?.into_iter();
        let change = |(file, commit): (String, String)| {
            let (old, new) = (texts.next()?, texts.next()?);
            let old = String::from_utf8(old).unwrap_or_default();
            Some(Change { new: text_of(&file, new, self.walk).ok()?, old, file, commit })
        };
        Some(list.into_iter().filter_map(change).collect())
    }
}

/// What is in files now and not in the newest commit.
fn uncommitted(
    collected: &Collected,
    committed: Vec<(String, String)>,
    walk: &Walk,
) -> Done<Vec<Change>> {
    let mut committed: HashMap<String, String> = committed.into_iter().collect();
    let mut list = Vec::new();
    for entry in &collected.documents {
        let old = committed.remove(&entry.name).unwrap_or_default();
        let new = entry.load(walk)?.text().into_owned();
        // Git may have other line ends than the work tree.
        if old.lines().ne(new.lines()) {
            let (file, commit) = (entry.name.clone(), "work tree".to_string());
            list.push(Change { file, commit, old, new });
        }
    }
    Ok(list)
}

fn long_line(line: &str) -> Option<&str> {
    Some(line.trim()).filter(|line| line.len() > LINE_LETTERS)
}

fn long_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(long_line)
}

/// Lines of `new` with their ends, and whether each was added.
fn added<'a>(old: &str, new: &'a str) -> Vec<(&'a str, bool)> {
    let old: Vec<&str> = old.lines().collect();
    let lines: Vec<&str> = new.split_inclusive('\n').collect();
    let same = |pair: &(&&str, &&str)| *pair.0 == pair.1.trim_end_matches(['\n', '\r']);
    let n_first = old.iter().zip(&lines).take_while(same).count();
    let n_both = old.len().min(lines.len()) - n_first;
    let n_last = old.iter().rev().zip(lines.iter().rev()).take(n_both).take_while(same).count();
    let middle: HashSet<&str> = old[n_first..old.len() - n_last].iter().copied().collect();
    let is_added = |(at, line): (usize, &&'a str)| {
        let is_inside = (n_first..lines.len() - n_last).contains(&at);
        (*line, is_inside && !middle.contains(line.trim_end_matches(['\n', '\r'])))
    };
    lines.iter().enumerate().map(is_added).collect()
}

impl Change {
    /// Its added lines that are new, each among what was there.
    fn documents(&self, seen: &HashSet<&str>) -> Vec<New> {
        let (mut runs, mut is_new): (Vec<(String, bool)>, bool) = (Vec::new(), false);
        for (line, is_added) in added(&self.old, &self.new) {
            is_new = is_added && long_line(line).map_or(is_new, |line| !seen.contains(line));
            match runs.last_mut().filter(|run| run.1 == is_new) {
                Some(run) => run.0.push_str(line),
                None => runs.push((line.to_string(), is_new)),
            }
        }
        let documents = around(runs).into_iter().enumerate();
        let new = |(n, parts): (usize, Vec<Part>)| {
            let part = if n > 0 { format!(", part {}", n + 1) } else { String::new() };
            let name = format!("{} ({}{part})", self.file, self.commit);
            let language = elapid::language_of_path(&self.file);
            New { file: self.file.clone(), document: Document { name, language, parts } }
        };
        documents.map(new).collect()
    }
}

/// Documents of runs of text, new or not by turns: what is far from anything new is left out.
fn around(runs: Vec<(String, bool)>) -> Vec<Vec<Part>> {
    let part = |text: &str, learned| Part { text: text.into(), learned, special: false };
    let (mut list, mut parts): (Vec<Vec<Part>>, Vec<Part>) = (Vec::new(), Vec::new());
    let n_runs = runs.len();
    for (at, (text, is_new)) in runs.into_iter().enumerate() {
        let is_between = at > 0 && at + 1 < n_runs;
        if is_new || is_between && text.len() <= BEFORE_BYTES + BEHIND_BYTES {
            parts.push(part(&text, is_new));
            continue;
        }
        if at > 0 {
            let n = text.floor_char_boundary(BEHIND_BYTES);
            let end = text[..n].rfind('\n').map_or(n, |end| end + 1);
            parts.push(part(&text[..end], false));
            list.push(std::mem::take(&mut parts));
        }
        let from = text.ceil_char_boundary(text.len().saturating_sub(BEFORE_BYTES));
        let start = match from {
            0 => 0,
            from => text[from..].find('\n').map_or(from, |at| from + at + 1),
        };
        parts.push(part(&text[start..], false));
    }
    list.push(parts);
    list.iter_mut().for_each(bound);
    list.retain(|parts| parts.iter().any(|part| part.learned && !part.text.trim().is_empty()));
    list
}

/// Leaves the first bytes of a long document, to the end of a line.
pub fn bound(parts: &mut Vec<Part>) {
    let mut n_left = DOCUMENT_BYTES;
    parts.retain_mut(|part| {
        if part.text.len() > n_left {
            let n = part.text.floor_char_boundary(n_left);
            let end = part.text[..n].rfind('\n').map_or(n, |end| end + 1);
            part.text.truncate(end);
            n_left = 0;
        }
        n_left = n_left.saturating_sub(part.text.len());
        !part.text.is_empty()
    });
}

/// Entries of the texts of a tree, in one file at `path` that this writes.
pub fn store(
    before: &[(String, String)],
    path: &Path,
    walk: &Walk,
) -> Done<Vec<(Entry, Signature)>> {
    let (place, mut start) = (path.into(), 0);
    let entry = |(name, text): &(String, String)| {
        let entry = Entry::within(name.clone(), &place, start, text, walk);
        start += text.len() as u64;
        entry
    };
    let entries = before.iter().map(entry).collect();
    crate::files::write(path, |sink| before.iter().try_for_each(|file| sink(file.1.as_bytes())))?;
    Ok(entries)
}

/// Entries without near copies of these texts.
pub fn without_near(entries: Vec<Entry>, texts: &[String], walk: &Walk) -> Done<Vec<Entry>> {
    let n = texts.len();
    let text = |idx: usize| match texts.get(idx) {
        Some(text) => Ok::<_, elapid::Error>(text.clone()),
        None => Ok(entries[idx - n].load(walk)?.text().into_owned()),
    };
    let signatures = each(n + entries.len(), |idx| Ok(Signature::new(&text(idx)?)));
    let signatures = signatures.into_iter().collect::<Done<Vec<_>>>()?;
    let what = format!("{} documents with {n} held-out texts, for copies", entries.len());
    let alike = waiting("compare", &what, || elapid::near_copies(&signatures, &text))?;
    // The first of a cluster is a held-out text, if one is in it.
    let pairs = entries.into_iter().zip(alike.into_iter().skip(n));
    Ok(pairs.filter(|(_, (cluster, _))| *cluster >= n).map(|(entry, _)| entry).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(old: &str, new: &str, before: &[&str]) -> Vec<String> {
        let (file, commit) = ("a.rs".to_string(), "0000000".to_string());
        let change = Change { file, commit, old: old.into(), new: new.into() };
        let seen = before.iter().flat_map(|text| long_lines(text)).collect();
        let documents = change.documents(&seen).into_iter();
        let learned = documents.flat_map(|new| new.document.parts).filter(|part| part.learned);
        learned.map(|part| part.text).collect()
    }

    #[test]
    fn added_lines_are_scored_and_moved_ones_are_not() {
        let old = "fn one() {\n    first(1)\n}\n";
        let new = "fn one() {\n    second(2);\n    first(1)\n}\nfn three() {\n}\n";
        // Of two equal lines either may be the new one.
        assert_eq!(scored(old, new, &[old]), ["    second(2);\n", "fn three() {\n"]);
        // The same lines were somewhere else before; a short one goes with the line above it.
        assert_eq!(scored(old, new, &[old, "  fn three() {"]), ["    second(2);\n"]);
        assert!(scored(old, old, &[]).is_empty());
        assert!(scored(old, "fn one() {\n}\n", &[old]).is_empty());
        assert_eq!(scored("", new, &[]), [new]);
        // Other line ends are no other lines.
        assert!(scored(old, &old.replace('\n', "\r\n"), &[]).is_empty());
    }

    #[test]
    fn a_document_holds_what_is_around_new_lines_and_no_more() {
        let far: String = (0..2000).map(|n| format!("old line number {n}\n")).collect();
        let new = format!("{far}new line one\n{far}new line two\n{far}");
        let change = Change {
            file: "a.rs".into(),
            commit: "0000000".into(),
            old: format!("{far}{far}{far}"),
            new,
        };
        let seen = long_lines(&far).collect();
        let documents = change.documents(&seen);
        assert_eq!(documents.len(), 2);
        for New { document, .. } in &documents {
            let parts: Vec<(usize, bool)> =
                document.parts.iter().map(|part| (part.text.len(), part.learned)).collect();
            let [(n_before, false), (13, true), (n_behind, false)] = parts[..] else {
                panic!("{parts:?}")
            };
            assert!((3000..=BEFORE_BYTES).contains(&n_before), "{n_before}");
            assert!((900..=BEHIND_BYTES).contains(&n_behind), "{n_behind}");
        }
        assert_eq!(documents[0].document.name, "a.rs (0000000)");
        assert_eq!(documents[1].document.name, "a.rs (0000000, part 2)");
    }
}
