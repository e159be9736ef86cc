//! When each file under a directory was last committed.
//!
//! The date of a path is that of the newest commit, going back from HEAD, in which it differs from
//! every parent: what `git log -1 --format=%ct -- PATH` prints. It is found for all paths at once.
//! Each commit holds a set of paths still without a date, HEAD all of them; a path that is the same
//! in a parent is handed to the first such parent, the others get the date of the commit. Sets are
//! moved, and only trees that differ are read, so the cost is that of the changes, not of commits
//! times files. The outcome does not depend on the order in which commits are looked at.
//!
//! Not here: renames (a renamed file is new), the index, files changed since the last commit.

use gix::objs::tree::EntryMode;
use gix::{ObjectId, Repository};
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::path::Path;

/// Most that is read: a commit counts one, a tree one and another for each `N_ENTRY` entries. What
/// has no date by then is older than what was seen, and gets the oldest date seen. It bounds the
/// time in very large repositories to seconds, and the harm of trees made to be endless.
const N_READ_MAX: usize = 200_000;

/// Entries of a tree that cost as much as reading one more object.
const N_ENTRY: usize = 64;

/// Bytes of decoded objects kept: a tree is read as the newer side and again as the older.
const CACHE_BYTES: usize = 32 << 20;

/// Deepest nesting of folders that is followed: trees come from outside and recursion has a stack.
const DEPTH_MAX: usize = 256;

/// Dates of committed files, in seconds since 1970, by path relative to the directory asked for.
pub struct Dates {
    files: HashMap<Vec<u8>, i64>,
    /// Folders that are repositories of their own, as of the commit that moved them last.
    submodules: BTreeMap<Vec<u8>, i64>,
}

impl Dates {
    /// Date of the file at this path, with `/` between its parts; none when it is not committed.
    pub fn get(&self, path: &str) -> Option<i64> {
        let bytes = path.as_bytes();
        let in_submodule = || {
            let folders = (0..bytes.len()).filter(|&end| bytes[end] == b'/');
            folders.into_iter().find_map(|end| self.submodules.get(&bytes[..end]))
        };
        self.files.get(bytes).or_else(in_submodule).copied()
    }

    /// Number of dated files.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.files.len()
    }
}

/// Dates of the files under `directory` at HEAD. None where there is no work tree of git, no
/// commit, nothing committed under `directory`, or a repository that cannot be read.
pub fn dates(directory: &Path) -> Option<Dates> {
    dates_within(directory, N_READ_MAX)
}

pub(super) fn dates_within(directory: &Path, n_read_max: usize) -> Option<Dates> {
    let directory = directory.canonicalize().ok()?;
    let mut repo = discover(&directory)?;
    repo.object_cache_size(CACHE_BYTES);
    let top = repo.workdir()?.canonicalize().ok()?;
    let prefix = directory.strip_prefix(&top).ok()?;
    let prefix = prefix.iter().map(|part| part.to_str()).collect::<Option<Vec<_>>>()?;
    let head = repo.head_commit().ok()?;
    let mut history = History { repo: &repo, prefix: &prefix, n_read: 0, n_read_max };
    let entry = history.read(head.id)?;
    let mut files = Vec::new();
    history.changed(entry.folder?, None, &mut Vec::new(), &mut files)?;
    (!files.is_empty()).then(|| history.walk(entry, files))
}

/// The repository that `directory` lies in, without the settings of the person or the machine.
fn discover(directory: &Path) -> Option<Repository> {
    let options = gix::open::Options::isolated();
    let options = gix::sec::trust::Mapping { full: options.clone(), reduced: options };
    let found = gix::ThreadSafeRepository::discover_opts(directory, Default::default(), options);
    Some(found.ok()?.to_thread_local())
}

/// What is needed of a commit.
struct Entry {
    id: ObjectId,
    date: i64,
    parents: Vec<ObjectId>,
    /// The tree of the directory asked for.
    folder: Option<ObjectId>,
}

/// A committed path: a file, or a submodule.
struct File {
    path: Vec<u8>,
    mode: EntryMode,
}

struct History<'a> {
    repo: &'a Repository,
    /// Folders from the top of the work tree to the directory asked for.
    prefix: &'a [&'a str],
    n_read: usize,
    n_read_max: usize,
}

impl<'a> History<'a> {
    /// None when the commit cannot be read: cut off by a shallow clone, or damaged.
    fn read(&mut self, id: ObjectId) -> Option<Entry> {
        self.n_read += 1;
        let commit = self.repo.find_commit(id).ok()?;
        let date = commit.time().ok()?.seconds;
        let parents = commit.parent_ids().map(|id| id.detach()).collect();
        let mut folder = Some(commit.tree_id().ok()?.detach());
        for part in self.prefix {
            let tree = self.tree(folder?)?;
            let entry = tree.find_entry(*part).filter(|entry| entry.mode().is_tree());
            folder = entry.map(|entry| entry.object_id());
            if folder.is_none() {
                break;
            }
        }
        Some(Entry { id, date, parents, folder })
    }

    /// Walks back until every file has its date.
    fn walk(&mut self, head: Entry, files: Vec<File>) -> Dates {
        let idx_of: HashMap<&[u8], usize> =
            files.iter().enumerate().map(|(idx, file)| (file.path.as_slice(), idx)).collect();
        let mut dates: Vec<Option<i64>> = vec![None; files.len()];
        let mut date_min = head.date;
        let mut queue = BinaryHeap::from([(head.date, head.id)]);
        let all: HashSet<usize> = (0..files.len()).collect();
        let mut waiting = HashMap::from([(head.id, (head, all))]);
        while let Some((date, id)) = queue.pop() {
            let Some((entry, mut undated)) = waiting.remove(&id) else { continue };
            date_min = date_min.min(date);
            if self.n_read > self.n_read_max {
                break;
            }
            for &parent in &entry.parents {
                if undated.is_empty() {
                    break;
                }
                let known = waiting.remove(&parent);
                let known = known.or_else(|| Some((self.read(parent)?, HashSet::new())));
                let Some((parent, mut theirs)) = known else { continue };
                let same = self.same(&entry, &parent, &mut undated, &idx_of);
                // The larger set takes the smaller in.
                let (small, mut large) =
                    if same.len() < theirs.len() { (same, theirs) } else { (theirs, same) };
                large.extend(small);
                theirs = large;
                queue.push((parent.date, parent.id));
                waiting.insert(parent.id, (parent, theirs));
            }
            undated.into_iter().for_each(|idx| dates[idx] = Some(entry.date));
        }
        let mut found = Dates { files: HashMap::new(), submodules: BTreeMap::new() };
        for (file, date) in files.into_iter().zip(dates) {
            let date = date.unwrap_or(date_min);
            if file.mode.is_commit() {
                found.submodules.insert(file.path, date);
            } else {
                found.files.insert(file.path, date);
            }
        }
        found
    }

    /// Takes the files out of `undated` that are the same in `parent`. A tree that cannot be read
    /// counts as different: its files were last seen here.
    fn same(
        &mut self,
        entry: &Entry,
        parent: &Entry,
        undated: &mut HashSet<usize>,
        idx_of: &HashMap<&[u8], usize>,
    ) -> HashSet<usize> {
        let Some(new) = entry.folder else { return HashSet::new() };
        if entry.folder == parent.folder {
            return std::mem::take(undated);
        }
        let mut changed = Vec::new();
        let Some(()) = self.changed(new, parent.folder, &mut Vec::new(), &mut changed) else {
            return HashSet::new();
        };
        let idxs = changed.iter().filter_map(|file| idx_of.get(file.path.as_slice()));
        let left = idxs.copied().filter(|idx| undated.remove(idx)).collect();
        std::mem::replace(undated, left)
    }

    /// Files of the tree `new` that are not, or not the same, in the tree `old`. None when a tree
    /// cannot be read.
    fn changed(
        &mut self,
        new: ObjectId,
        old: Option<ObjectId>,
        path: &mut Vec<u8>,
        files: &mut Vec<File>,
    ) -> Option<()> {
        if path.iter().filter(|byte| **byte == b'/').count() > DEPTH_MAX {
            return None;
        }
        let (new, old) = (self.tree(new)?, old.map(|old| self.tree(old)));
        // A tree that was there and cannot be read is not a tree that was not there.
        let old = old.map_or(Some(None), |old| old.map(Some))?;
        let mut before = HashMap::new();
        if let Some(old) = &old {
            let entries = old.decode().ok()?.entries.into_iter();
            before.extend(entries.map(|entry| (entry.filename, (entry.mode, entry.oid))));
        }
        let entries = new.decode().ok()?.entries;
        self.n_read += (entries.len() + before.len()) / N_ENTRY;
        for entry in entries {
            let was = before.get(entry.filename);
            if was == Some(&(entry.mode, entry.oid)) {
                continue;
            }
            let n_byte = path.len();
            path.extend_from_slice(if n_byte > 0 { b"/" } else { b"" });
            path.extend_from_slice(entry.filename);
            if entry.mode.is_tree() {
                let was = was.filter(|was| was.0.is_tree()).map(|was| was.1.to_owned());
                self.changed(entry.oid.to_owned(), was, path, files)?;
            } else {
                files.push(File { path: path.clone(), mode: entry.mode });
            }
            path.truncate(n_byte);
        }
        Some(())
    }

    fn tree(&mut self, id: ObjectId) -> Option<gix::Tree<'a>> {
        self.n_read += 1;
        (self.n_read <= self.n_read_max).then(|| self.repo.find_tree(id).ok()).flatten()
    }
}
