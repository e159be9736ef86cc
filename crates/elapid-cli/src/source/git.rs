//! When each file under a directory was last committed, asked of the `git` program.
//!
//! The date of a path is that of the first commit in `git log -- DIRECTORY`, newest first, in which
//! it differs from every parent. Along one line of commits that is what `git log -1 -- PATH` finds;
//! where branches were merged, a change that the merge did not keep may count too.
//!
//! Not here: renames (a renamed file is new), the index, files changed since the last commit.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Take, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

/// Most commits and most bytes that are read. What has no date by then is older than what was seen,
/// and gets the oldest date seen.
const N_COMMIT_MAX: usize = 50_000;
const N_BYTE_MAX: u64 = 256 << 20;

/// Variables that point git at another repository than the one the directory lies in.
const ELSEWHERE: [&str; 6] = [
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_WORK_TREE",
];

/// A committed path.
struct Entry {
    /// A repository of its own: the files below have the date of the commit that moved it last.
    is_submodule: bool,
    date: Option<i64>,
}

/// Dates of committed files, in seconds since 1970, by path relative to the directory asked for.
pub struct Dates(HashMap<Vec<u8>, Entry>);

impl Dates {
    /// Date of the file at this path, with `/` between its parts; none when it is not committed.
    pub fn get(&self, path: &str) -> Option<i64> {
        let bytes = path.as_bytes();
        let in_submodule = || {
            let mut folders = (0..bytes.len()).filter(|&end| bytes[end] == b'/');
            folders.find_map(|end| self.0.get(&bytes[..end]).filter(|entry| entry.is_submodule))
        };
        self.0.get(bytes).or_else(in_submodule)?.date
    }

    /// Number of dated paths.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// The commit that [`dates`] are of.
pub fn head(directory: &Path) -> Option<String> {
    let line = Records::of_git(directory, &["rev-parse", "HEAD"])?.next()?;
    String::from_utf8(line).ok().map(|line| line.trim().to_string())
}

/// Dates of the files under `directory` at HEAD. None where there is no git program, no work tree,
/// no commit, nothing committed under `directory`, or a repository that git does not read.
pub fn dates(directory: &Path) -> Option<Dates> {
    dates_within(directory, N_COMMIT_MAX)
}

pub(super) fn dates_within(directory: &Path, n_commit_max: usize) -> Option<Dates> {
    let args = ["rev-parse", "--is-inside-work-tree", "--show-prefix"];
    let place = Records::of_git(directory, &args)?.next()?;
    let prefix = place.strip_prefix(b"true\n")?.strip_suffix(b"\n")?;
    let mut entries = HashMap::new();
    for line in Records::of_git(directory, &["ls-tree", "-r", "-z", "HEAD", "."])? {
        let tab = line.iter().position(|&byte| byte == b'\t')?;
        let is_submodule = line.starts_with(b"160000 ");
        entries.insert(line[tab + 1..].to_vec(), Entry { is_submodule, date: None });
    }
    if entries.is_empty() {
        return None;
    }
    let limit = format!("--max-count={n_commit_max}");
    // A date is told from a path by the slash, with which no path in a repository begins.
    let what = ["log", &limit, "--format=/%ct", "-z", "-c", "--name-only", "--diff-filter=d"];
    // Whatever a person has set for their own logs.
    let plain = ["--root", "--no-follow", "--no-renames", "--no-relative"];
    let plain = [&plain[..], &["--no-show-signature", "--ignore-submodules=none"]].concat();
    let log = Records::of_git(directory, &[&what, &plain[..], &["HEAD", "--", "."]].concat())?;
    let oldest = read_log(log, prefix, &mut entries)?;
    entries.values_mut().for_each(|entry| entry.date = entry.date.or(Some(oldest)));
    Some(Dates(entries))
}

/// Gives each entry the date of the first commit that names it, behind the `prefix` that leads to
/// the directory; stops when all have one. Returns the oldest date seen.
fn read_log(log: Records, prefix: &[u8], entries: &mut HashMap<Vec<u8>, Entry>) -> Option<i64> {
    let (mut n_left, mut oldest) = (entries.len(), None);
    let (mut date, mut is_first) = (None, false);
    for record in log {
        if let Some(text) = record.strip_prefix(b"/") {
            date = str::from_utf8(text).ok().and_then(|text| text.parse::<i64>().ok());
            oldest = [oldest, date].into_iter().flatten().min();
            is_first = true;
            continue;
        }
        // Between a date and its paths is a line break, or for a merge an empty record.
        let path = record.strip_prefix(b"\n").filter(|_| is_first).unwrap_or(&record);
        is_first = false;
        let entry = path.strip_prefix(prefix).and_then(|path| entries.get_mut(path));
        if let Some(entry) = entry.filter(|entry| entry.date.is_none()) {
            entry.date = date;
            n_left -= usize::from(date.is_some());
            if n_left == 0 {
                break;
            }
        }
    }
    oldest
}

/// Git in `directory`: it fetches nothing, runs nothing that the settings of the repository name,
/// and writes nothing.
fn command(directory: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.args(["--no-pager", "-c", "core.fsmonitor=false", "-C"]).arg(directory).args(args);
    ELSEWHERE.iter().for_each(|name| {
        command.env_remove(name);
    });
    command.envs([("GIT_OPTIONAL_LOCKS", "0"), ("GIT_NO_LAZY_FETCH", "1")]);
    command.env("GIT_ALLOW_PROTOCOL", "");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// The contents of blobs, in this order; an empty one where git has it not. None where git fails.
pub(super) fn blobs(directory: &Path, ids: &[String]) -> Option<Vec<Vec<u8>>> {
    let mut child =
        command(directory, &["cat-file", "--batch"]).stdin(Stdio::piped()).spawn().ok()?;
    let (mut input, output) = (child.stdin.take()?, child.stdout.take()?);
    let lines: String = ids.iter().map(|id| format!("{id}\n")).collect();
    // Both ends at once: git answers while it is asked, and a full pipe would stop it.
    let asking = std::thread::spawn(move || input.write_all(lines.as_bytes()));
    let read = || {
        let mut output = BufReader::new(output.take(N_BYTE_MAX));
        let mut read_one = |_| {
            // `ID blob SIZE`, the content and a line break; or `ID missing`.
            let mut head = String::new();
            output.read_line(&mut head).ok().filter(|n| *n > 0)?;
            let Some(size) = head.split_whitespace().nth(2) else { return Some(Vec::new()) };
            let (size, mut bytes) = (size.parse::<u64>().ok()?, Vec::new());
            output.by_ref().take(size + 1).read_to_end(&mut bytes).ok()?;
            (bytes.pop() == Some(b'\n') && bytes.len() as u64 == size).then_some(bytes)
        };
        ids.iter().map(&mut read_one).collect()
    };
    let found = read();
    let _ = child.kill();
    let _ = child.wait();
    let _ = asking.join();
    found
}

/// What a git command prints, in pieces that end with a zero byte.
pub(super) struct Records {
    child: Child,
    output: BufReader<Take<ChildStdout>>,
}

impl Records {
    pub(super) fn of_git(directory: &Path, args: &[&str]) -> Option<Records> {
        let mut child = command(directory, args).spawn().ok()?;
        let output = BufReader::new(child.stdout.take()?.take(N_BYTE_MAX));
        Some(Records { child, output })
    }
}

impl Iterator for Records {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let mut record = Vec::new();
        self.output.read_until(0, &mut record).ok().filter(|&n_byte| n_byte > 0)?;
        record.pop_if(|byte| *byte == 0);
        Some(record)
    }
}

impl Drop for Records {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
