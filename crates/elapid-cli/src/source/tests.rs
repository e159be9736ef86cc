//! Walks over folders and histories made for the purpose. Histories are written and read back by
//! the `git` command; without one those tests say that they were skipped.

use super::compress::{gzip_bits_per_byte, zstd_bits_per_byte};
use super::entry::{Entry, sample};
use super::git;
use super::left_out::{LeftOut, Why, left_out_json, left_out_list, left_out_table};
use super::walk::{Collected, Walk, collect, divide, list};
use elapid::{Document, SplitBy};
#[path = "../../tests/it/common/rng.rs"]
mod rng;

use elapid::Unwanted as Reason;
use rng::Rng;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A folder that goes away with its test.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("elapid-{}-{test}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    fn collect(&self) -> Collected {
        collect(&self.0, &Walk::default()).unwrap()
    }

    /// What a git command prints; none when there is no git.
    fn git(&self, args: &[&str], input: &[u8]) -> Option<String> {
        self.git_at("1000", args, input)
    }

    /// The same, with the date of a commit that it makes.
    fn git_at(&self, date: &str, args: &[&str], input: &[u8]) -> Option<String> {
        let child = Command::new("git")
            .args(args)
            .current_dir(&self.0)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_SYSTEM", "/dev/null")
            .env("GIT_AUTHOR_NAME", "a")
            .env("GIT_AUTHOR_EMAIL", "a@example.org")
            .env("GIT_COMMITTER_NAME", "a")
            .env("GIT_COMMITTER_EMAIL", "a@example.org")
            .env("GIT_AUTHOR_DATE", format!("@{date} +0000"))
            .env("GIT_COMMITTER_DATE", format!("@{date} +0000"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            eprintln!("skipped: there is no git command");
            return None;
        };
        child.stdin.take().unwrap().write_all(input).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "git {args:?}");
        Some(String::from_utf8(output.stdout).unwrap())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn names(documents: &[Entry]) -> Vec<&str> {
    documents.iter().map(|document| document.name.as_str()).collect()
}

/// Path to mode and content.
type Files = BTreeMap<String, (&'static str, u64)>;

/// A commit of a history made up: number of its parents, date, files.
struct Commit {
    parents: Vec<usize>,
    date: i64,
    files: Files,
}

/// For `git fast-import`; the last commit is HEAD.
fn stream(history: &[Commit]) -> Vec<u8> {
    let mut text = String::new();
    for (idx, commit) in history.iter().enumerate() {
        text += &format!("commit refs/heads/main\nmark :{}\n", idx + 1);
        text += &format!("committer a <a@example.org> {} +0000\ndata 1\nc\n", commit.date);
        for (n, parent) in commit.parents.iter().enumerate() {
            let word = if n == 0 { "from" } else { "merge" };
            text += &format!("{word} :{}\n", parent + 1);
        }
        text += "deleteall\n";
        for (path, (mode, content)) in &commit.files {
            match *mode {
                "160000" => text += &format!("M 160000 {content:040x} {path}\n"),
                mode => text += &format!("M {mode} inline {path}\ndata 20\n{content:020}\n"),
            }
        }
    }
    text.into_bytes()
}

/// Makes a repository; none without git.
fn repository(test: &str, history: &[Commit]) -> Option<Folder> {
    let folder = Folder::new(test);
    folder.git(&["init", "-q", "-b", "main"], b"")?;
    folder.git(&["fast-import", "--quiet", "--force"], &stream(history))?;
    folder.git(&["reset", "-q", "--hard"], b"")?;
    Some(folder)
}

#[derive(Clone, Copy, PartialEq)]
enum Clocks {
    /// A commit is newer than its parents.
    Right,
    Wrong,
}

/// Branches, merges of every kind, files that turn into folders.
fn wild_history(seed: u64, n_commit: usize, clocks: Clocks) -> Vec<Commit> {
    let rng = Rng::new(seed, 0);
    let mut n = 0;
    let mut below = |bound: u64| {
        n += 1;
        rng.below(n, bound)
    };
    let mut history: Vec<Commit> = Vec::new();
    for idx in 0..n_commit {
        let recent = |back: u64| idx - 1 - (back as usize).min(idx - 1);
        let mut parents = Vec::new();
        if idx > 0 {
            let n_parent = if below(3) == 0 { 2 + below(2) } else { 1 };
            let last = idx + 1 == n_commit;
            for which in 0..n_parent {
                let parent = recent(if last && which == 0 { 0 } else { below(4) });
                if !parents.contains(&parent) {
                    parents.push(parent);
                }
            }
        }
        // Each path as one of the parents has it.
        let mut files = Files::new();
        let paths: Vec<&String> = parents.iter().flat_map(|p| history[*p].files.keys()).collect();
        for path in paths {
            let parent = parents[below(parents.len() as u64) as usize];
            if let Some(file) = history[parent].files.get(path) {
                files.entry(path.clone()).or_insert(*file);
            }
        }
        for _ in 0..below(4) {
            let path = match below(6) {
                0 => format!("f{}", below(4)),
                1 => "d".to_string(),
                2 => format!("d/f{}", below(4)),
                _ => format!("s/e{}/f{}", below(3), below(4)),
            };
            let mode = ["100644", "100644", "100755", "120000"][below(4) as usize];
            // Contents come back, so that a parent is like its grandparent.
            files.insert(path, (mode, below(5)));
            if below(4) == 0 {
                files.pop_first();
            }
        }
        // A path is a file or a folder.
        if files.contains_key("d") {
            files.retain(|path, _| !path.starts_with("d/"));
        }
        files.insert("always".into(), ("100644", 0));
        let off = below(if clocks == Clocks::Right { 1000 } else { 3000 });
        let date = 1_600_000_000 + 1000 * idx as i64 - off as i64;
        history.push(Commit { parents, date, files });
    }
    history
}

/// Commits that `git log -- BELOW` goes through from the last one: where the folder is the same as
/// in a parent, only the first such parent is followed.
fn reached(history: &[Commit], below: &str) -> Vec<usize> {
    let folder = |idx: usize| {
        let files = history[idx].files.iter().filter(|(path, _)| path.starts_with(below));
        files.collect::<Vec<_>>()
    };
    let mut stack = vec![history.len() - 1];
    let mut seen = Vec::new();
    while let Some(idx) = stack.pop() {
        if seen.contains(&idx) {
            continue;
        }
        seen.push(idx);
        let parents = &history[idx].parents;
        let same = parents.iter().position(|parent| folder(*parent) == folder(idx));
        stack.extend(same.map_or(&parents[..], |at| &parents[at..=at]));
    }
    seen
}

/// Compares with the history itself, path by path; how many there were. A path has the date of a
/// commit in which it differs from every parent, and if clocks are right of the newest of them.
fn assert_as_history(folder: &Folder, history: &[Commit], below: &str, clocks: Clocks) -> usize {
    let dates = git::dates(&folder.0.join(below)).expect("dates");
    let reached = reached(history, below);
    let files = history.last().unwrap().files.iter();
    let paths: Vec<&String> =
        files.filter(|(path, _)| path.starts_with(below)).map(|(path, _)| path).collect();
    for path in &paths {
        let file = |idx: usize| history[idx].files.get(*path);
        let changed = reached.iter().map(|&idx| (&history[idx], file(idx)));
        let changed = changed.filter(|(commit, new)| {
            new.is_some() && commit.parents.iter().all(|parent| file(*parent) != *new)
        });
        let wanted: Vec<i64> = changed.map(|(commit, _)| commit.date).collect();
        let got = dates.get(path.strip_prefix(below).unwrap()).unwrap();
        assert!(wanted.contains(&got), "{path} in {}: {got}", folder.0.display());
        if clocks == Clocks::Right {
            assert_eq!(Some(&got), wanted.iter().max(), "{path} in {}", folder.0.display());
        }
    }
    assert_eq!(dates.len(), paths.len());
    paths.len()
}

#[test]
fn dates_are_those_of_the_newest_change_in_wild_histories() {
    let mut n_path = 0;
    for seed in 0..12 {
        let clocks = if seed % 3 == 0 { Clocks::Wrong } else { Clocks::Right };
        let history = wild_history(seed, 40, clocks);
        let Some(folder) = repository(&format!("wild-{seed}"), &history) else { return };
        if seed % 2 == 1 {
            folder.git(&["repack", "-adq"], b"").unwrap();
        }
        n_path += assert_as_history(&folder, &history, "", clocks);
        if folder.0.join("s/e1").is_dir() {
            n_path += assert_as_history(&folder, &history, "s/", clocks);
            n_path += assert_as_history(&folder, &history, "s/e1/", clocks);
        }
    }
    assert!(n_path > 150, "{n_path}");
}

/// Without merges: path by path what `git log -1` prints.
#[test]
fn dates_along_one_line_are_those_of_git_log() {
    for seed in 0..3 {
        let mut history = wild_history(seed, 40, Clocks::Wrong);
        for (idx, commit) in history.iter_mut().enumerate() {
            commit.parents = (0..idx).rev().take(1).collect();
        }
        let Some(folder) = repository(&format!("line-{seed}"), &history) else { return };
        let dates = git::dates(&folder.0).unwrap();
        for path in history[39].files.keys() {
            let log = folder.git(&["log", "-1", "--format=%ct", "--", path], b"").unwrap();
            assert_eq!(dates.get(path), Some(log.trim().parse().unwrap()), "{path} of {seed}");
        }
    }
}

/// Names that a list in lines, or one that is quoted, gets wrong; in a merge too.
#[test]
fn odd_names_have_their_dates() {
    let Some(folder) = repository("odd", &plain_history(2)) else { return };
    let commit = |names: &[&str], date: &str| {
        names.iter().for_each(|name| folder.write(name, date));
        folder.git(&["add", "."], b"").unwrap();
        let tree = folder.git(&["write-tree"], b"").unwrap();
        let mut parents = vec!["-p", "HEAD"];
        if date == "3000" {
            parents.extend(["-p", "HEAD~1"]);
        }
        let args = [&["commit-tree", "-m", "c"], &parents[..], &[tree.trim()]].concat();
        let id = folder.git_at(date, &args, b"").unwrap();
        folder.git(&["reset", "-q", "--hard", id.trim()], b"").unwrap();
    };
    let names = ["\n", "\nline\nbreak", "\ttab\t", "caf\u{e9} \"quoted\"", "-n1", "1234", " /a"];
    let names = if cfg!(windows) { &names[4..6] } else { &names[..] };
    commit(names, "2000");
    commit(&names[..2], "3000");
    let dates = git::dates(&folder.0).unwrap();
    for (idx, name) in names.iter().enumerate() {
        assert_eq!(dates.get(name), Some(if idx < 2 { 3000 } else { 2000 }), "{name:?}");
    }
}

/// Files of one line of commits: each commit changes `f` of its own number.
fn plain_history(n_commit: usize) -> Vec<Commit> {
    let mut files: Files = (0..n_commit).map(|n| (format!("f{n}.rs"), ("100644", 0))).collect();
    let mut history = Vec::new();
    for idx in 0..n_commit {
        files.insert(format!("f{idx}.rs"), ("100644", idx as u64));
        let parents = if idx == 0 { vec![] } else { vec![idx - 1] };
        history.push(Commit { parents, date: 1000 + idx as i64, files: files.clone() });
    }
    history
}

#[test]
fn a_shallow_clone_dates_what_it_cannot_see_at_its_edge() {
    let Some(folder) = repository("deep", &plain_history(9)) else { return };
    let url = format!("file://{}", folder.0.display());
    folder.git(&["clone", "-q", "--depth", "3", &url, "shallow"], b"").unwrap();
    let dates = git::dates(&folder.0.join("shallow")).unwrap();
    let found: Vec<_> = [0, 5, 6, 7, 8].map(|n| dates.get(&format!("f{n}.rs")).unwrap()).into();
    assert_eq!(found, [1006, 1006, 1006, 1007, 1008]);
}

#[test]
fn a_walk_cut_short_dates_the_rest_as_the_oldest_seen() {
    let Some(folder) = repository("short", &plain_history(30)) else { return };
    let dates = git::dates_within(&folder.0, 20).unwrap();
    let found: Vec<_> = [29, 11, 10, 9, 0].map(|n| dates.get(&format!("f{n}.rs")).unwrap()).into();
    assert_eq!(found, [1029, 1011, 1010, 1010, 1010]);
    let history = wild_history(3, 40, Clocks::Wrong);
    let Some(folder) = repository("short-wild", &history) else { return };
    for n_commit_max in 1..40 {
        let dates = git::dates_within(&folder.0, n_commit_max).unwrap();
        for path in history[39].files.keys() {
            let date = dates.get(path).unwrap();
            let is_known = history.iter().any(|commit| commit.date == date);
            assert!(is_known, "{n_commit_max} {path} {date}");
        }
    }
}

#[test]
fn files_of_a_submodule_have_the_date_it_was_moved() {
    let mut history = plain_history(3);
    history[1].files.insert("sub/module".into(), ("160000", 7));
    history[2].files.insert("sub/module".into(), ("160000", 7));
    let Some(folder) = repository("submodule", &history) else { return };
    let dates = git::dates(&folder.0).unwrap();
    assert_eq!(dates.get("sub/module/src/a.rs"), Some(1001));
    assert_eq!(dates.get("sub/modules"), None);
    assert_eq!(dates.get("f9.rs"), None);
}

#[test]
fn without_a_history_that_can_be_read_there_are_no_dates() {
    let none = |path: &Path| git::dates(path).is_none();
    let Some(folder) = repository("none", &plain_history(4)) else { return };
    folder.git(&["clone", "-q", "--bare", ".", "bare.git"], b"").unwrap();
    folder.git(&["init", "-q", "unborn"], b"").unwrap();
    folder.write("new/a.rs", "fn new() {}");
    folder.write("odd/.git", "gitdir: /nowhere");
    folder.write("broken/.git/HEAD", "\0\0\0");
    for name in ["bare.git", "unborn", "new", "odd", "nowhere"] {
        assert!(none(&folder.0.join(name)), "{name}");
    }
    // What is no repository at all is passed by: the one above counts, and knows no such folder.
    assert!(none(&folder.0.join("broken")));
    assert!(!none(&folder.0));
    // Every object cut in half.
    let mut stack = vec![folder.0.join(".git/objects")];
    while let Some(path) = stack.pop() {
        if path.is_dir() {
            stack.extend(std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            let bytes = std::fs::read(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
        }
    }
    assert!(none(&folder.0));
}

fn left<'a>(collected: &'a Collected, name: &str) -> &'a Why {
    let found = collected.left_out.iter().find(|left| left.name == name);
    &found.unwrap_or_else(|| panic!("{name} is not among {:?}", collected.left_out)).why
}

/// Text of its own for each number.
fn prose(n: u64, n_line: u64) -> String {
    let rng = Rng::new(n, 1);
    let word = |at: u64| format!("w{}", rng.below(at, 5000));
    let line = |line: u64| (0..8).map(|at| word(8 * line + at) + " ").collect::<String>() + "\n";
    (0..n_line).map(line).collect()
}

#[test]
fn every_kind_of_file_that_is_left_out_has_its_reason() {
    let folder = Folder::new("kinds");
    folder.write("a.rs", prose(0, 40));
    folder.write("b/copy.rs", prose(0, 40));
    folder.write("b/near.rs", prose(0, 40) + "one more line of words\n");
    folder.write("b/other.rs", prose(1, 40));
    folder.write("Cargo.lock", "version = 4\n");
    folder.write("bytes.txt", b"ab\0cd");
    folder.write("empty.rs", "");
    folder.write("generated.rs", "// Code generated by protoc. DO NOT EDIT.\nfn f() {}\n");
    folder.write("key.pem", "x");
    folder.write("large.txt", prose(2, 30_000));
    folder.write("latin.txt", b"gr\xfc\xdfe\n");
    folder.write("logo.png", "x");
    folder.write("node_modules/x/index.js", "f()\n");
    folder.write("rows.jsonl", "{\"text\": \"a\"}\n");
    folder.write(".hidden/a.rs", prose(3, 40));
    folder.write(".env", "KEY=1");
    folder.write("old/metrics.jsonl", "{}");
    folder.write("old/config.json", "{}");
    folder.write("old/report.html", prose(4, 40));
    folder.write("out/report.html", prose(5, 40));
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("a.rs", folder.0.join("link.rs")).unwrap();
        std::os::unix::fs::symlink("b", folder.0.join("link")).unwrap();
    }
    let walk = Walk { out: Some(folder.0.join("out")), ..Walk::default() };
    let collected = collect(&folder.0, &walk).unwrap();
    assert_eq!(names(&collected.documents), ["a.rs", "b/other.rs"]);
    assert_eq!(collected.documents[0].language, "Rust");
    let unwanted = |name: &str| match left(&collected, name) {
        Why::Unwanted(reason) => reason.clone(),
        why => panic!("{name}: {why:?}"),
    };
    assert_eq!(unwanted("b/copy.rs"), Reason::Duplicate { of: "a.rs".into() });
    assert_eq!(unwanted("b/near.rs"), Reason::NearDuplicate { of: "a.rs".into() });
    assert_eq!(unwanted("Cargo.lock"), Reason::LockFile);
    assert_eq!(unwanted("bytes.txt"), Reason::Binary);
    assert_eq!(unwanted("empty.rs"), Reason::Empty);
    assert_eq!(unwanted("generated.rs"), Reason::Generated);
    assert_eq!(unwanted("key.pem"), Reason::Secret);
    assert_eq!(unwanted("large.txt"), Reason::TooLarge);
    assert_eq!(unwanted("latin.txt"), Reason::NotUtf8);
    assert_eq!(unwanted("logo.png"), Reason::Binary);
    assert_eq!(unwanted("node_modules/x/index.js"), Reason::Vendored);
    assert_eq!(left(&collected, "rows.jsonl"), &Why::Records);
    assert_eq!(left(&collected, ".hidden/"), &Why::Hidden);
    assert_eq!(left(&collected, ".env"), &Why::Hidden);
    assert_eq!(left(&collected, "old/"), &Why::Run);
    assert_eq!(left(&collected, "out/"), &Why::Run);
    if cfg!(unix) {
        assert_eq!(left(&collected, "link.rs"), &Why::Link);
        assert_eq!(left(&collected, "link"), &Why::Link);
    }
    // Nothing is silent, nothing is told twice.
    let mut told: Vec<&str> = collected.left_out.iter().map(|left| left.name.as_str()).collect();
    assert!(told.is_sorted());
    told.dedup();
    assert_eq!(told.len(), collected.left_out.len());
    assert_eq!(told.len(), if cfg!(unix) { 18 } else { 16 });
    let sizes: Vec<_> = collected.left_out.iter().map(|left| (&*left.name, left.n_bytes)).collect();
    assert!(sizes.contains(&("bytes.txt", Some(5))) && sizes.contains(&("old/", None)));
    // A larger limit lets the large one in.
    let walk = Walk { n_bytes_max: 1 << 30, ..Walk::default() };
    let documents = collect(&folder.0, &walk).unwrap().documents;
    assert!(names(&documents).contains(&"large.txt"));
}

#[test]
fn ignore_files_are_honoured_in_and_out_of_repositories_and_what_they_hide_is_told() {
    let folder = Folder::new("ignored");
    folder.write(".gitignore", "/made\n*.log\n!keep.log\n");
    folder.write("sub/.ignore", "one.txt\n");
    folder.write("sub/.aiignore", "two.txt\n");
    for (n, name) in ["made/a.txt", "b.log", "keep.log", "c.txt"].into_iter().enumerate() {
        folder.write(name, prose(n as u64, 20));
    }
    for (n, name) in ["one", "two", "three"].into_iter().enumerate() {
        folder.write(&format!("sub/{name}.txt"), prose(10 + n as u64, 20));
    }
    for _ in 0..2 {
        let collected = folder.collect();
        assert_eq!(names(&collected.documents), ["c.txt", "keep.log", "sub/three.txt"]);
        for name in ["made/", "b.log", "sub/one.txt", "sub/two.txt"] {
            assert_eq!(left(&collected, name), &Why::Ignored, "{name}");
        }
        // The rules of a folder hold for what is asked for below it.
        folder.write("sub/deep/d.log", prose(20, 20));
        folder.write("sub/deep/d.txt", prose(21, 20));
        let collected = collect(&folder.0.join("sub/deep"), &Walk::default()).unwrap();
        assert_eq!(names(&collected.documents), ["d.txt"]);
        std::fs::remove_dir_all(folder.0.join("sub/deep")).unwrap();
        if folder.git(&["init", "-q"], b"").is_none() {
            return;
        }
    }
}

#[test]
fn files_come_in_the_order_of_their_names_whatever_the_order_they_were_made_in() {
    let list = ["Z.txt", "a-b.txt", "a.txt", "a/b.txt", "a/b/c.txt", "a0.txt", "\u{e4}.txt"];
    assert!(list.is_sorted());
    for turn in 0..list.len() {
        let folder = Folder::new(&format!("order-{turn}"));
        for at in 0..list.len() {
            let n = (at + turn) % list.len();
            folder.write(list[n], prose(n as u64, 20));
        }
        assert_eq!(names(&folder.collect().documents), list);
    }
}

#[test]
fn one_file_is_read_whatever_its_size_and_its_end_is_held_out() {
    let folder = Folder::new("single");
    folder.write("book.txt", prose(1, 30_000));
    let collected = collect(&folder.0.join("book.txt"), &Walk::default()).unwrap();
    assert_eq!(names(&collected.documents), ["book.txt"]);
    assert!(collected.documents[0].n_bytes() > 1 << 20);
    let text = |entry: &Entry| entry.load(&Walk::default()).unwrap().text().into_owned();
    let whole = text(&collected.documents[0]);
    let divided = divide(collected, 0.1).unwrap();
    assert_eq!(divided.by, SplitBy::End);
    let sides = [text(&divided.train[0]), text(&divided.held_out[0])];
    assert_eq!(sides.concat(), whole);
    let share = sides[1].len() as f64 / whole.len() as f64;
    assert!((0.1..0.1001).contains(&share), "{share}");
    // The same for a directory with one file.
    let folder = Folder::new("single-directory");
    folder.write("a.txt", prose(1, 100));
    assert_eq!(divide(folder.collect(), 0.1).unwrap().by, SplitBy::End);
}

#[test]
fn a_long_text_is_several_documents_cut_at_ends_of_lines() {
    let folder = Folder::new("long");
    let whole = prose(1, 220_000);
    assert!(whole.len() > 9 << 20);
    folder.write("long.txt", &whole);
    let walk = Walk::default();
    let collected = collect(&folder.0.join("long.txt"), &walk).unwrap();
    assert_eq!(names(&collected.documents), ["long.txt"]);
    assert_eq!(collected.documents[0].n_bytes(), whole.len());
    let divided = divide(collected, 0.1).unwrap();
    assert_eq!(divided.by, SplitBy::End);
    let share = divided.held_out[0].n_bytes() as f64 / whole.len() as f64;
    assert!((share - 0.1).abs() < 0.001, "{share}");
    let blocks = [&divided.train[0], &divided.held_out[0]];
    let blocks = blocks.map(|entry| entry.clone().blocks().unwrap());
    assert_eq!(names(&blocks[0])[..2], ["long.txt (part 1)", "long.txt (part 2)"]);
    assert_eq!(names(&blocks[1]), ["long.txt (its end)"]);
    let texts = blocks.concat().into_iter().map(|block| {
        let text = block.load(&walk).unwrap().text().into_owned();
        assert!(text.ends_with('\n') && text.len() <= 4 << 20);
        text
    });
    assert_eq!(texts.collect::<String>(), whole);
    // What is no text is seen wherever it stands.
    folder.write("long.txt", [whole.as_bytes(), b"\xff\n", whole.as_bytes()].concat());
    assert!(collect(&folder.0.join("long.txt"), &walk).is_err());
}

#[test]
fn several_sources_have_names_and_weights_of_their_own_and_copies_are_found_between_them() {
    let folder = Folder::new("sources");
    folder.write("one/a.txt", prose(0, 20));
    folder.write("two/a.txt", prose(1, 20));
    folder.write("two/b.txt", prose(0, 20));
    folder.write("three.jsonl", "{\"text\": \"a\"}\n\n{\"text\": \"b\"}\n");
    let sources = ["one", "two", "three.jsonl"].map(|name| folder.0.join(name));
    let sources: Vec<(PathBuf, f64)> = sources.into_iter().zip([1.0, 0.5, 3.0]).collect();
    let walk = Walk::default();
    let collected = list(&sources, &walk).unwrap().read(&walk).unwrap();
    let want = ["one/a.txt", "two/a.txt", "three.jsonl:1", "three.jsonl:3"];
    assert_eq!(names(&collected.documents), want);
    let weights: Vec<f64> = collected.documents.iter().map(|entry| entry.weight).collect();
    assert_eq!(weights, [1.0, 0.5, 3.0, 3.0]);
    let of = Reason::Duplicate { of: "one/a.txt".into() };
    assert_eq!(left(&collected, "two/b.txt"), &Why::Unwanted(of));
    let text = |n: usize| collected.documents[n].load(&walk).unwrap().text().into_owned();
    assert_eq!((text(0), text(3)), (prose(0, 20), "b".into()));
}

#[test]
fn the_key_of_a_listing_changes_with_every_file_and_weight() {
    let folder = Folder::new("key");
    folder.write("a.txt", prose(0, 20));
    folder.write("b.txt", prose(1, 20));
    let key = |weight| list(&[(folder.0.clone(), weight)], &Walk::default()).unwrap().key();
    let before = key(1.0);
    assert_eq!(key(1.0), before);
    assert_ne!(key(2.0), before);
    folder.write("b.txt", prose(2, 20) + "x");
    let changed = key(1.0);
    assert_ne!(changed, before);
    std::fs::rename(folder.0.join("b.txt"), folder.0.join("c.txt")).unwrap();
    assert_ne!(key(1.0), changed);
}

#[test]
fn a_sample_is_a_part_of_all_documents_in_their_order_and_a_changed_file_is_an_error() {
    let folder = Folder::new("sample");
    (0..40).for_each(|n| folder.write(&format!("{n:02}.txt"), prose(n, 20)));
    let (walk, entries) = (Walk::default(), folder.collect().documents);
    let all = sample(&entries, usize::MAX, &walk).unwrap();
    assert_eq!(all.len(), 40);
    let n_bytes: usize = entries.iter().map(Entry::n_bytes).sum();
    let some = sample(&entries, n_bytes / 4, &walk).unwrap();
    assert!((8..=10).contains(&some.len()), "{}", some.len());
    assert!(some.is_sorted_by_key(|document| document.name.clone()));
    // Not the first of the alphabet.
    assert!(some.iter().any(|document| *document.name > *"20"));
    folder.write("07.txt", prose(7, 19) + &"x".repeat(200));
    assert!(sample(&entries, usize::MAX, &walk).unwrap_err().to_string().contains("07.txt"));
}

#[test]
fn what_cannot_be_learned_is_an_error_that_says_what_to_do() {
    let folder = Folder::new("errors");
    let problem = |name: &str| match collect(&folder.0.join(name), &Walk::default()) {
        Ok(_) => panic!("{name} was read"),
        Err(failure) => failure.to_string(),
    };
    std::fs::create_dir(folder.0.join("bare")).unwrap();
    folder.write("images/a.png", "x");
    folder.write("images/b.png", "x");
    folder.write("images/c.lock", "");
    folder.write("zero.bin", b"\0\0");
    folder.write("zero.txt", "");
    folder.write("bad.jsonl", "{\"text\": \"a\"}\n{\"txt\": 1}\n");
    for (name, words) in [
        ("nowhere", "cannot read"),
        ("bare", "it is empty"),
        ("images", "2 binary"),
        ("zero.bin", "not text"),
        ("zero.txt", "empty"),
        ("bad.jsonl", "bad.jsonl:2"),
    ] {
        let problem = problem(name);
        assert!(problem.contains(words) && problem.contains("hint: "), "{name}: {problem}");
    }
    folder.write("one/a.txt", "x");
    let collected = collect(&folder.0.join("one"), &Walk::default()).unwrap();
    assert!(divide(collected, 0.1).unwrap_err().to_string().contains("too little text"));
}

#[test]
fn records_lose_exact_copies_only_and_near_ones_stay_on_one_side() {
    let folder = Folder::new("records");
    let line = |text: &str| serde_json::json!({ "text": text }).to_string() + "\n";
    let near = |n: u64| prose(n, 40) + "and a little more";
    let mut text = line(&prose(0, 40)) + &line(&prose(0, 40)) + &line(&near(0));
    (1..40).for_each(|n| text += &(line(&prose(n, 40)) + &line(&near(n))));
    folder.write("r.jsonl", text);
    let collected = collect(&folder.0.join("r.jsonl"), &Walk::default()).unwrap();
    assert_eq!(collected.documents.len(), 80);
    assert_eq!(names(&collected.documents)[..2], ["r.jsonl:1", "r.jsonl:3"]);
    let of = Reason::Duplicate { of: "r.jsonl:1".into() };
    assert_eq!(left(&collected, "r.jsonl:2"), &Why::Unwanted(of));
    let pairs: Vec<_> = collected.documents.chunks(2).map(<[Entry]>::to_vec).collect();
    let divided = divide(collected, 0.5).unwrap();
    assert_eq!(divided.by, SplitBy::Hash);
    assert_eq!(divided.train.len() + divided.held_out.len(), 80);
    assert!(divided.held_out.len() > 4);
    for pair in pairs {
        let [first, second] = [0, 1].map(|n| divided.train.contains(&pair[n]));
        assert_eq!(first, second, "{} {}", pair[0].name, pair[1].name);
    }
    // Where all look alike, that is no reason to hold nothing out.
    let ask = prose(0, 60);
    let text: String = (0..20).map(|n| line(&format!("{ask} {n}"))).collect();
    folder.write("alike.jsonl", text);
    let collected = collect(&folder.0.join("alike.jsonl"), &Walk::default()).unwrap();
    let divided = divide(collected, 0.1).unwrap();
    assert!(!divided.held_out.is_empty() && divided.train.len() > 9);
}

#[test]
fn the_newest_files_are_held_out_and_those_not_committed_are_the_newest() {
    let mut history = plain_history(40);
    for commit in &mut history {
        commit.files.insert("z/copy.rs".into(), ("100644", 999));
    }
    history[39].files.insert("b-copy.rs".into(), ("100644", 999));
    let Some(folder) = repository("newest", &history) else { return };
    let held = || {
        let divided = divide(folder.collect(), 0.1).unwrap();
        assert!(divided.by == SplitBy::Date, "{:?}", divided.by);
        divided.held_out.into_iter().map(|document| document.name).collect::<Vec<_>>()
    };
    // Twenty are wanted, a third is the most; the names sort as the dates do.
    let newest = |n: usize| (40 - n..40).map(|n| format!("f{n}.rs")).collect::<Vec<_>>();
    assert_eq!(held(), newest(13));
    // A copy of an old file is not new, even where its name comes first.
    let collected = folder.collect();
    assert_eq!(names(&collected.documents)[0], "b-copy.rs");
    assert_eq!(collected.dates[0], Some(1000));
    assert!(collected.left_out.iter().all(|left| !left.name.contains(".git")));
    folder.write("new.rs", "fn new() {}\n");
    let with_new = [newest(13), vec!["new.rs".into()]].concat();
    assert_eq!(held(), with_new);
    std::fs::copy(folder.0.join("z/copy.rs"), folder.0.join("a-copy.rs")).unwrap();
    let collected = folder.collect();
    assert_eq!(names(&collected.documents)[0], "a-copy.rs");
    assert_eq!(collected.dates[0], Some(1000));
    assert_eq!(held(), with_new);
    // With most files not committed the dates say little.
    (0..60).for_each(|n| folder.write(&format!("more/{n}.rs"), format!("fn more_{n}() {{}}\n")));
    assert_eq!(divide(folder.collect(), 0.1).unwrap().by, SplitBy::Hash);
}

#[test]
fn the_table_has_a_line_for_each_reason_and_prints_no_control_characters() {
    let entry = |name: &str, why: Why, n_bytes| LeftOut { name: name.into(), why, n_bytes };
    let binary = Why::Unwanted(Reason::Binary);
    let list = [
        entry("a.png", binary.clone(), Some(3 << 20)),
        entry("b\x1b[2J.png", binary.clone(), Some(1 << 19)),
        entry("c.png", binary, Some(0)),
        entry("copy.rs", Why::Unwanted(Reason::NearDuplicate { of: "x".into() }), Some(2048)),
        entry("rows.jsonl", Why::Unreadable("no\nmore".into()), Some(7)),
        entry("target/", Why::Ignored, None),
    ];
    let want = "3 binary            3.5 MiB  a.png, b\\u{1b}[2J.png, ...\n\
                1 ignored                 -  target/\n\
                1 near duplicate    2.0 KiB  copy.rs\n\
                1 unreadable            7 B  rows.jsonl\n";
    assert_eq!(left_out_table(&list), want);
    let lines = left_out_list(&list);
    assert_eq!(lines.lines().count(), 6);
    assert!(lines.contains("  2.0 KiB  copy.rs: nearly the same as x\n"), "{lines}");
    assert!(lines.contains("rows.jsonl: cannot be read: no\\nmore\n"), "{lines}");
    let table = left_out_json(&list);
    assert_eq!(table[0]["n_bytes"], 3_670_016);
    assert_eq!(table[1]["n_bytes"], 0);
    assert_eq!(left_out_table(&[]), "");
}

#[test]
fn gzip_counts_as_the_command_does() {
    let documents: Vec<Document> =
        [include_str!("walk.rs"), include_str!("git.rs"), include_str!("tests.rs")]
            .map(|text| Document::whole("a.rs", text))
            .into();
    let ours = gzip_bits_per_byte(&documents).unwrap();
    let (mut n_in, mut n_out) = (0, 0);
    for document in &documents {
        let child = Command::new("gzip")
            .args(["-9", "-c"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut child) = child else {
            eprintln!("skipped: there is no gzip command");
            return;
        };
        let (mut stdin, text) = (child.stdin.take().unwrap(), document.text().into_owned());
        let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
        n_out += child.wait_with_output().unwrap().stdout.len();
        writer.join().unwrap().unwrap();
        n_in += document.n_bytes();
    }
    let theirs = 8.0 * n_out as f64 / n_in as f64;
    assert!((ours / theirs - 1.0).abs() < 0.003, "{ours} {theirs}");
}

#[test]
fn compressors_are_measured_on_what_is_learned_and_a_dictionary_helps() {
    assert_eq!(gzip_bits_per_byte(&[]), None);
    assert!(zstd_bits_per_byte(&[], &[Document::whole("a", "")]).is_none());
    // Without training text there is no dictionary.
    let held = [Document::whole("a", prose(0, 50))];
    let (alone, dictionary) = zstd_bits_per_byte(&[], &held).unwrap();
    assert_eq!(dictionary, "no dictionary");
    // A file that holds the same lines makes it nearly free.
    let train = [Document::whole("b", prose(1, 50) + &prose(0, 50))];
    let (known, dictionary) = zstd_bits_per_byte(&train, &held).unwrap();
    assert_eq!(dictionary, "training files as dictionary");
    assert!(known < 0.2 * alone, "{known} {alone}");
    // What is only read costs nothing and counts for nothing.
    let mut with_prompt = held.clone();
    let mut prompt = with_prompt[0].parts[0].clone();
    (prompt.text, prompt.learned) = (prose(9, 90), false);
    with_prompt[0].parts.insert(0, prompt);
    assert_eq!(gzip_bits_per_byte(&with_prompt), gzip_bits_per_byte(&held));
}
