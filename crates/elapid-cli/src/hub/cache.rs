//! The cache directory of the hub, laid out as Python's `huggingface_hub` does it.
//!
//! ```text
//! models--owner--repo/
//!   blobs/ETAG                 contents, by the hash that the hub tells
//!   blobs/ETAG.incomplete      so far
//!   refs/main                  the commit that a revision was at
//!   snapshots/COMMIT/FILE      a link to ../../blobs/ETAG
//! ```

use super::{MAIN, Name, Parts, is_hex};
use crate::files;
use crate::report::{Done, Failure};
use elapid::Error;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Digits of a commit.
pub const N_COMMIT: usize = 40;

pub struct Cache {
    pub root: PathBuf,
}

/// A model that can be loaded by its name.
#[derive(Debug, PartialEq)]
pub struct Pulled {
    pub name: String,
    pub path: PathBuf,
    pub n_bytes: u64,
}

/// The folder that Python's tools keep their files in, tokens too.
pub fn home() -> Option<PathBuf> {
    let user = || variable(if cfg!(windows) { "USERPROFILE" } else { "HOME" });
    let caches = || variable("XDG_CACHE_HOME").or_else(|| Some(user()?.join(".cache")));
    variable("HF_HOME").or_else(|| Some(caches()?.join("huggingface")))
}

/// An environment variable that is not empty.
pub fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

impl Cache {
    /// The one that the environment names; a failure where not even a home is known.
    pub fn of_user() -> Done<Cache> {
        let root = variable("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")));
        let hint = "set HF_HUB_CACHE to a directory";
        Ok(Cache { root: root.ok_or_else(|| Failure::new("there is no home directory", hint))? })
    }

    fn folder_name(repo: &str) -> String {
        format!("models--{}", repo.replace('/', "--"))
    }

    pub fn folder(&self, repo: &str) -> PathBuf {
        self.root.join(Cache::folder_name(repo))
    }

    #[cfg(feature = "pull")]
    pub fn lock(&self, repo: &str, etag: &str) -> PathBuf {
        self.root.join(".locks").join(Cache::folder_name(repo)).join(format!("{etag}.lock"))
    }

    pub fn snapshot(&self, repo: &str, commit: &str) -> PathBuf {
        self.folder(repo).join("snapshots").join(commit)
    }

    /// The commit that a revision was at when it was pulled.
    fn commit(&self, name: &Name) -> Option<String> {
        let revision = name.revision();
        if is_hex(revision, N_COMMIT) {
            return Some(revision.into());
        }
        let text = files::read_text(&self.folder(&name.repo).join("refs").join(revision)).ok()?;
        Some(text.trim().to_string()).filter(|commit| is_hex(commit, N_COMMIT))
    }

    /// What `Model::open` takes for a name; None where it is not there, or not all of it.
    pub fn find(&self, name: &Name) -> Done<Option<PathBuf>> {
        let Some(commit) = self.commit(name) else { return Ok(None) };
        let snapshot = self.snapshot(&name.repo, &commit);
        if let Some(file) = &name.file {
            return Ok(Some(snapshot.join(file)).filter(|path| path.is_file()));
        }
        match Parts::of(&names_in(&snapshot)) {
            Parts::Directory(parts) => Ok(is_whole(&parts).then_some(snapshot)),
            Parts::Gguf(files) if files.len() < 2 => Ok(files.first().map(|it| snapshot.join(it))),
            Parts::Gguf(files) => Err(which_file(name, &files)),
        }
    }

    /// All models, by name.
    pub fn list(&self) -> Vec<Pulled> {
        let mut list = Vec::new();
        for folder in names_of(&self.root) {
            let repo = folder.strip_prefix("models--").map(|rest| rest.replacen("--", "/", 1));
            let Some(name) = repo.and_then(|repo| repo.parse::<Name>().ok()) else { continue };
            let refs = names_in(&self.root.join(&folder).join("refs"));
            let revisions = refs.into_iter().map(|it| Some(it).filter(|it| it != MAIN));
            let mut named = BTreeSet::new();
            for revision in revisions {
                let name = Name { revision, ..name.clone() };
                named.extend(self.commit(&name));
                list.extend(self.models(&name));
            }
            for commit in names_of(&self.root.join(&folder).join("snapshots")) {
                if !named.contains(&commit) {
                    list.extend(self.models(&Name { revision: Some(commit), ..name.clone() }));
                }
            }
        }
        list.sort_by(|a, b| a.name.cmp(&b.name));
        list
    }

    /// The models of one revision: a directory, or any number of GGUF files.
    fn models(&self, name: &Name) -> Vec<Pulled> {
        let Some(commit) = self.commit(name) else { return Vec::new() };
        let path = self.snapshot(&name.repo, &commit);
        let size = |file: &String| path.join(file).metadata().map_or(0, |facts| facts.len());
        match Parts::of(&names_in(&path)) {
            Parts::Directory(parts) if !is_whole(&parts) => Vec::new(),
            Parts::Directory(parts) => {
                let n_bytes = parts.iter().map(size).sum();
                vec![Pulled { name: name.to_string(), path, n_bytes }]
            }
            Parts::Gguf(files) => {
                let of = |file: String| Pulled {
                    n_bytes: size(&file),
                    path: path.join(&file),
                    name: Name { file: Some(file), ..name.clone() }.to_string(),
                };
                files.into_iter().map(of).collect()
            }
        }
    }

    /// Removes what a name means: all of a repository, a revision of it, or a file. Returns the
    /// bytes that are free now; contents that other revisions share stay.
    pub fn remove(&self, name: &Name) -> Done<u64> {
        let folder = self.folder(&name.repo);
        let commit = self.commit(name);
        let snapshot = commit.as_ref().map(|commit| self.snapshot(&name.repo, commit));
        let target = match (&name.file, &name.revision, snapshot) {
            (None, None, _) => Some(folder.clone()),
            (Some(file), _, snapshot) => snapshot.map(|snapshot| snapshot.join(file)),
            (None, Some(_), snapshot) => snapshot,
        };
        let Some(target) = target.filter(|target| target.exists()) else {
            let problem = format!("{name} is not in {}", self.root.display());
            return Err(Failure::new(problem, "`elapid list` shows what is there, by name"));
        };
        let before = files::n_bytes_in(&folder);
        let gone = if target == folder { BTreeSet::new() } else { contents(&target) };
        remove(&target)?;
        if name.file.is_none() && name.revision.is_some() {
            for revision in names_in(&folder.join("refs")) {
                let one = Name { revision: Some(revision.clone()), ..name.clone() };
                if self.commit(&one) == commit {
                    remove(&folder.join("refs").join(revision))?;
                }
            }
        }
        let kept = contents(&folder.join("snapshots"));
        let unused = gone.difference(&kept).map(|blob| folder.join("blobs").join(blob));
        unused.filter(|blob| blob.exists()).try_for_each(|blob| remove(&blob))?;
        if folder.exists() && names_in(&folder.join("snapshots")).is_empty() {
            remove(&folder)?;
        }
        let locks = self.root.join(".locks").join(Cache::folder_name(&name.repo));
        if !folder.exists() && locks.exists() {
            remove(&locks)?;
        }
        Ok(before - files::n_bytes_in(&folder))
    }
}

/// The name of the model whose files lie here, where that is in a cache of the hub.
pub fn name_of(path: &Path) -> Option<String> {
    let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
    let at = parts.iter().rposition(|part| *part == "snapshots")?;
    let repo = parts.get(at.checked_sub(1)?)?.strip_prefix("models--")?.replacen("--", "/", 1);
    let file = Some(parts.get(at + 2..)?.join("/")).filter(|file| !file.is_empty());
    Some(Name { repo, file, revision: None }.to_string())
}

/// Asks which of many GGUF files is meant.
pub fn which_file(name: &Name, files: &[String]) -> Failure {
    let of = |file: &String| Name { file: Some(file.clone()), ..name.clone() }.to_string();
    let list: Vec<String> = files.iter().map(of).collect();
    let problem = format!("{name} has {} GGUF files:\n  {}", files.len(), list.join("\n  "));
    Failure::new(problem, &format!("name one of them, like {}", list[0]))
}

/// Whether weights in parts (`-00001-of-00005`) are all there.
fn is_whole(files: &[String]) -> bool {
    let n_parts = |file: &String| -> Option<usize> {
        file.split_once("-of-")?.1.split('.').next()?.parse().ok()
    };
    let wanted: Vec<usize> = files.iter().filter_map(n_parts).collect();
    wanted.iter().all(|n| *n == wanted.len())
}

/// Names in a directory, sorted; none where there is none.
fn names_of(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Files under a directory that are there, by their paths in it; links that lead nowhere are not.
fn names_in(dir: &Path) -> Vec<String> {
    let below = |name: String| match dir.join(&name) {
        path if path.is_dir() => {
            names_in(&path).into_iter().map(|file| format!("{name}/{file}")).collect()
        }
        path if path.is_file() => vec![name],
        _ => Vec::new(),
    };
    names_of(dir).into_iter().flat_map(below).collect()
}

/// Names of the contents that a file, or the files under a directory, link to.
fn contents(path: &Path) -> BTreeSet<OsString> {
    let of = |path: PathBuf| Some(std::fs::read_link(path).ok()?.file_name()?.to_os_string());
    match path.is_dir() {
        true => names_in(path).iter().filter_map(|file| of(path.join(file))).collect(),
        false => of(path.into()).into_iter().collect(),
    }
}

fn remove(path: &Path) -> Done<()> {
    let is_dir = path.symlink_metadata().is_ok_and(|facts| facts.is_dir());
    let done = if is_dir { std::fs::remove_dir_all(path) } else { std::fs::remove_file(path) };
    done.map_err(|source| Error::Write { path: path.into(), source }.into())
}
