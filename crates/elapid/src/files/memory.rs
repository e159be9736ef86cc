//! The files of a program that has no disk: a browser's. In its place `disk.rs` is this file.
//!
//! Paths lead to bytes that are held here. A directory is there as soon as a file lies in it.
//! Everything that opens or saves a model by a path then works in a page as it does elsewhere: who
//! calls puts bytes in with `write` and takes them out with `take_files`.

use crate::error::{Error, Result};
use crate::files::{Apart, Sink};
use crate::tensor::SharedBytes;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// Bytes of a file; readers share them.
type Bytes = Arc<Vec<u8>>;

static FILES: Mutex<BTreeMap<PathBuf, Bytes>> = Mutex::new(BTreeMap::new());

fn files() -> MutexGuard<'static, BTreeMap<PathBuf, Bytes>> {
    FILES.lock().expect("nobody panics with the list in hand")
}

/// The path without `.` and `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                plain.pop();
            }
            Component::Normal(name) => plain.push(name),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    plain
}

fn bytes(path: &Path) -> Result<Bytes> {
    let found = files().get(&plain(path)).cloned();
    found.ok_or_else(|| Error::read(path, ErrorKind::NotFound.into()))
}

/// A whole text file.
pub fn read_text(path: &Path) -> Result<String> {
    let text = String::from_utf8(bytes(path)?.to_vec());
    text.map_err(|_| Error::read(path, ErrorKind::InvalidData.into()))
}

/// The bytes of a file.
pub fn map(path: &Path) -> Result<SharedBytes> {
    Ok(bytes(path)?)
}

/// A file of which parts can be had by themselves.
pub fn open(path: &Path) -> Result<Apart> {
    let whole = bytes(path)?;
    let parts = whole.clone();
    let take = move |range: Range<usize>| Ok(Arc::new(parts[range].to_vec()) as SharedBytes);
    Ok(Apart { whole, take: Box::new(take) })
}

/// A file that is read piece by piece.
pub struct Parts {
    path: PathBuf,
    bytes: Bytes,
}

impl Parts {
    pub fn open(path: &Path) -> Result<Parts> {
        Ok(Parts { path: path.into(), bytes: bytes(path)? })
    }

    pub fn n_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    pub fn read(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let found = self.bytes.get(range.start as usize..range.end as usize);
        let short = || Error::read(&self.path, ErrorKind::UnexpectedEof.into());
        found.map(<[u8]>::to_vec).ok_or_else(short)
    }
}

/// A file of a directory, if it is there.
pub fn find(dir: &Path, name: &str) -> Result<Option<Apart>> {
    let path = dir.join(name);
    if is_file(&path) { open(&path).map(Some) } else { Ok(None) }
}

pub fn is_file(path: &Path) -> bool {
    files().contains_key(&plain(path))
}

pub fn is_directory(path: &Path) -> bool {
    let path = plain(path);
    files().keys().any(|file| file.starts_with(&path) && *file != path)
}

pub fn exists(path: &Path) -> bool {
    is_file(path) || is_directory(path)
}

/// Paths of the files of a directory.
pub fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let dir = plain(dir);
    Ok(files().keys().filter(|file| file.parent() == Some(&dir)).cloned().collect())
}

pub fn remove(path: &Path) -> Result<()> {
    files().remove(&plain(path));
    Ok(())
}

/// Writes a file; the bytes written. Who reads the one that was there before keeps it.
pub fn write(path: &Path, make: impl FnOnce(&mut Sink) -> Result<()>) -> Result<u64> {
    let mut bytes = Vec::new();
    make(&mut |more: &[u8]| {
        let too_large = |_| Error::write(path, ErrorKind::OutOfMemory.into());
        bytes.try_reserve(more.len()).map_err(too_large)?;
        bytes.extend_from_slice(more);
        Ok(())
    })?;
    let n_bytes = bytes.len() as u64;
    files().insert(plain(path), Arc::new(bytes));
    Ok(n_bytes)
}

/// A directory needs no making.
#[cfg(not(test))]
pub fn make_directory(_path: &Path) -> Result<()> {
    Ok(())
}

/// Takes everything that lies at a path out: the file itself, with an empty name, or the files
/// below it by their names from there.
pub fn take_files(path: &Path) -> Vec<(String, Vec<u8>)> {
    let (path, mut files) = (plain(path), files());
    let inside: Vec<PathBuf> = files.keys().filter(|it| it.starts_with(&path)).cloned().collect();
    let mut taken = Vec::new();
    for file in inside {
        let name = file.strip_prefix(&path).map(|it| it.display().to_string()).unwrap_or_default();
        let bytes = files.remove(&file).expect("it was just listed");
        taken.push((name, Arc::unwrap_or_clone(bytes)));
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_found_by_any_way_to_them_and_taken_once() {
        let put = |name: &str| write(Path::new(name), |sink| sink(name.as_bytes())).unwrap();
        put("memory-test/a/one.json");
        put("memory-test/a/two.bin");
        put("memory-test/b");
        let a = Path::new("memory-test/b/../a/.");
        assert!(is_directory(a) && exists(a) && !is_file(a));
        assert_eq!(list(a).unwrap().len(), 2);
        assert_eq!(read_text(&a.join("one.json")).unwrap(), "memory-test/a/one.json");
        assert!(find(a, "three").unwrap().is_none());
        let parts = Parts::open(Path::new("memory-test/b")).unwrap();
        assert_eq!(parts.read(0..3).unwrap(), b"mem");
        assert!(parts.read(0..99).is_err());
        let whole = map(Path::new("memory-test/b")).unwrap();
        assert_eq!((*whole).as_ref().len() as u64, parts.n_bytes());
        remove(&a.join("two.bin")).unwrap();
        let names = |path: &str| -> Vec<String> {
            take_files(Path::new(path)).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names("memory-test/b"), [""]);
        assert_eq!(names("memory-test"), ["a/one.json"]);
        assert!(!exists(Path::new("memory-test")));
        let cut_short = write(Path::new("memory-test/c"), |_| Err(Error::input("no", "")));
        assert!(cut_short.is_err() && !exists(Path::new("memory-test/c")));
    }
}
