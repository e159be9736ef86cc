//! Files on disk: mapped to read, written so that a crash leaves the old one or the new.

use crate::error::{Error, Result};
use crate::files::{Apart, Sink};
use crate::tensor::{SharedBytes, failpoint};
use memmap2::MmapOptions;
use std::fs::File;
use std::io::{BufReader, BufWriter, ErrorKind, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// A whole text file.
pub fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|error| Error::read(path, error))
}

/// A file mapped into memory.
pub fn map(path: &Path) -> Result<SharedBytes> {
    Ok(open(path)?.whole)
}

/// A file mapped into memory that stays open: parts of it can be mapped by themselves.
pub fn open(path: &Path) -> Result<Apart> {
    let file = File::open(path).map_err(|error| Error::read(path, error))?;
    let facts = file.metadata().map_err(|error| Error::read(path, error))?;
    // A device or a pipe has no end that could be mapped.
    if !facts.is_file() {
        let problem = format!("{} is not a plain file", path.display());
        return Err(Error::input(problem, "give the path of a file"));
    }
    let path = path.to_path_buf();
    let fail = move |error| Error::read(&path, error);
    let n_bytes = usize::try_from(facts.len()).map_err(|_| fail(ErrorKind::FileTooLarge.into()))?;
    let whole = map_range(&file, &MmapOptions::new(), 0..n_bytes).map_err(&fail)?;
    let take = move |range| map_range(&file, MmapOptions::new().populate(), range).map_err(&fail);
    Ok(Apart { whole, take: Box::new(take) })
}

fn map_range(
    file: &File,
    options: &MmapOptions,
    range: Range<usize>,
) -> std::io::Result<SharedBytes> {
    if range.is_empty() {
        return Ok(Arc::new(Vec::new()));
    }
    let mut options = options.clone();
    options.offset(range.start as u64).len(range.len());
    // SAFETY: the map is read-only and private. If another program shortens the file while it is
    // in use, reading past its new end stops the process: the price every memory-mapped reader
    // pays; nothing is written through it.
    let map = unsafe { options.map(file) };
    Ok(Arc::new(map?))
}

/// A file that is read piece by piece, because it may be larger than memory.
pub struct Parts {
    path: PathBuf,
    n_bytes: u64,
    /// With the position it is at.
    file: Mutex<(u64, BufReader<File>)>,
}

/// Read at once where parts lie side by side; more would be read in vain where they do not.
const PARTS_BUFFER: usize = 1 << 14;

impl Parts {
    pub fn open(path: &Path) -> Result<Parts> {
        let file = File::open(path).map_err(|error| Error::read(path, error))?;
        let n_bytes = file.metadata().map_err(|error| Error::read(path, error))?.len();
        let file = Mutex::new((0, BufReader::with_capacity(PARTS_BUFFER, file)));
        Ok(Parts { path: path.into(), n_bytes, file })
    }

    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    pub fn read(&self, range: Range<u64>) -> Result<Vec<u8>> {
        let mut file = self.file.lock().expect("no reader panics");
        let (at, file) = &mut *file;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.seek_relative(range.start as i64 - *at as i64)
            .and_then(|()| file.read_exact(&mut bytes))
            .map_err(|error| Error::read(&self.path, error))?;
        *at = range.end;
        Ok(bytes)
    }
}

/// A file of a directory, if it is there.
pub fn find(dir: &Path, name: &str) -> Result<Option<Apart>> {
    let path = dir.join(name);
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        _ => open(&path).map(Some),
    }
}

pub fn is_file(path: &Path) -> bool {
    path.is_file()
}

pub fn is_directory(path: &Path) -> bool {
    path.is_dir()
}

pub fn exists(path: &Path) -> bool {
    path.exists()
}

/// Paths of what lies in a directory.
pub fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    let fail = |error| Error::read(dir, error);
    let entries = std::fs::read_dir(dir).map_err(fail)?;
    entries.map(|entry| Ok(entry.map_err(fail)?.path())).collect()
}

pub fn remove(path: &Path) -> Result<()> {
    std::fs::remove_file(path).map_err(|error| Error::write(path, error))
}

/// Writes a file beside its place, syncs it, and moves it there; the bytes written.
pub fn write(path: &Path, make: impl FnOnce(&mut Sink) -> Result<()>) -> Result<u64> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.part", std::process::id()));
    let beside = PathBuf::from(beside);
    let done = write_through(&beside, make).and_then(|n_bytes| {
        failpoint::hit("file.rename")?;
        std::fs::rename(&beside, path).map_err(|error| Error::write(path, error))?;
        failpoint::hit("file.moved")?;
        sync_directory(path);
        Ok(n_bytes)
    });
    if done.is_err() {
        // A partial file is of no use; failing to remove it would only hide the first error.
        let _ = std::fs::remove_file(&beside);
    }
    done
}

fn write_through(path: &Path, make: impl FnOnce(&mut Sink) -> Result<()>) -> Result<u64> {
    let fail = |error: std::io::Error| Error::write(path, error);
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path).map_err(fail)?);
    let mut n_bytes = 0;
    make(&mut |bytes: &[u8]| {
        n_bytes += bytes.len() as u64;
        file.write_all(bytes).map_err(fail)
    })?;
    failpoint::hit("file.part")?;
    let file = file.into_inner().map_err(|error| fail(error.into_error()))?;
    file.sync_all().map_err(fail)?;
    Ok(n_bytes)
}

/// Makes a rename last. Not every system can sync a directory; then the rename is as safe as the
/// system makes it.
fn sync_directory(path: &Path) {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    if let Ok(dir) = File::open(dir.unwrap_or(Path::new("."))) {
        let _ = dir.sync_all();
    }
}

/// Makes a directory and those above it.
pub fn make_directory(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|error| Error::write(path, error))
}
