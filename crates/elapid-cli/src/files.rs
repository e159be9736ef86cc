//! Models on disk: finds the files, maps them into memory, hands bytes to the engine; and writes
//! files so that a crash leaves either the old one or the new one.

use crate::failpoint;
use crate::report::{Done, Failure};
use elapid::error::Error;
use elapid::files::Sink;
use elapid::files::package::{self, Package};
use elapid::files::safetensors::SafeTensors;
use elapid::model::checkpoint::Checkpoint;
use elapid::tensor::SharedBytes;
use elapid::text::tokenizer::Tokenizer;
use elapid::text::vocab;
use memmap2::{Mmap, UncheckedAdvice};
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
#[cfg(all(target_os = "linux", target_env = "gnu"))]
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

/// A whole text file.
pub fn read_text(path: &Path) -> Done<String> {
    Ok(std::fs::read_to_string(path).map_err(|error| cannot_read(path, &error))?)
}

fn cannot_read(path: &Path, error: &std::io::Error) -> Error {
    let hint = "a model is a .gguf or .elapid file, or a directory with config.json and \
        model.safetensors";
    Error::input(format!("cannot read {}: {error}", path.display()), hint)
}

/// A file mapped into memory.
pub fn map(path: &Path) -> Result<SharedBytes, Error> {
    let file = File::open(path).map_err(|error| cannot_read(path, &error))?;
    let facts = file.metadata().map_err(|error| cannot_read(path, &error))?;
    // A device or a pipe has no end that could be mapped.
    if !facts.is_file() {
        let problem = format!("{} is not a plain file", path.display());
        return Err(Error::input(problem, "give the path of a file"));
    }
    if facts.len() == 0 {
        return Ok(Arc::new(Vec::new()));
    }
    // SAFETY: the map is read-only and private. If another program shortens the file while it is
    // in use, reading past its new end stops the process: the price every memory-mapped reader
    // pays; nothing is written through it.
    let map = unsafe { Mmap::map(&file) };
    let map = Arc::new(map.map_err(|error| cannot_read(path, &error))?);
    if let Ok(mut maps) = MAPS.lock() {
        maps.retain(|map| map.strong_count() > 0);
        maps.push(Arc::downgrade(&map));
    }
    Ok(map)
}

/// The maps there are.
static MAPS: Mutex<Vec<Weak<Mmap>>> = Mutex::new(Vec::new());

/// Lets go of what only loading needed, so that the process holds what it works with: pages of the
/// model's files (what was copied would be held twice), pages of the program that ran once, and
/// what the heap has free. Pages of files that are used again come back from the system's cache.
pub fn release_pages() {
    if let Ok(maps) = MAPS.lock() {
        for map in maps.iter().filter_map(Weak::upgrade) {
            // SAFETY: the map is of a file, read-only: pages that are dropped come back as they
            // were. That it fails costs memory and nothing else.
            let _ = unsafe { map.unchecked_advise(UncheckedAdvice::DontNeed) };
        }
    }
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        // SAFETY: it takes the locks of the heap and gives back whole pages that nobody uses.
        unsafe { libc::malloc_trim(0) };
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        for range in program_pages(&maps) {
            let address = std::ptr::with_exposed_provenance_mut(range.start);
            // SAFETY: the range is mapped from a file and no page of it was ever written: it comes
            // back from the file as it was, at the next access.
            unsafe { libc::madvise(address, range.len(), libc::MADV_DONTNEED) };
        }
    }
}

/// The addresses of code and constants in `/proc/self/smaps`.
///
/// The loader writes to some constants before it closes them. Such pages are the process's own,
/// counted as anonymous or swapped out, and would be lost: parts that have any are left alone.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn program_pages(smaps: &str) -> Vec<Range<usize>> {
    let (mut list, mut part) = (Vec::new(), None);
    for line in smaps.lines() {
        let Some((first, rest)) = line.split_once(' ') else { continue };
        match first.strip_suffix(':') {
            None => {
                list.extend(part.take());
                part = file_pages(first, rest);
            }
            Some("Anonymous" | "Swap") if rest.trim() != "0 kB" => part = None,
            Some(_) => {}
        }
    }
    list.extend(part);
    list
}

/// The range of a part, if it is read from a file into this process alone and not written to.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn file_pages(range: &str, rest: &str) -> Option<Range<usize>> {
    let mut words = rest.split_ascii_whitespace();
    let is_read = matches!(words.next()?, "r--p" | "r-xp");
    let is_file = words.nth(3)?.starts_with('/');
    let (start, end) = range.split_once('-')?;
    let number = |hex: &str| usize::from_str_radix(hex, 16).ok();
    (is_read && is_file).then_some(number(start)?..number(end)?)
}

/// An open safetensors file.
pub fn open_safetensors(path: &Path) -> Done<SafeTensors> {
    Ok(SafeTensors::parse(&path.display().to_string(), map(path)?)?)
}

/// The bytes of a package's magic.
pub fn is_package(bytes: &SharedBytes) -> bool {
    (**bytes).as_ref().starts_with(b"ELAPID")
}

/// A model: a directory, a package, or a GGUF file.
pub fn open(path: &Path) -> Done<Checkpoint> {
    let name = path.display().to_string();
    if path.is_dir() {
        // The directory of a run holds what came of it.
        if path.join("checkpoints").is_dir() && path.join("model").is_dir() {
            return open(&path.join("model"));
        }
        if path.join(package::MANIFEST).exists() {
            check_directory(path)?;
        }
        let lookup = |file: &str| find(path, file);
        return Ok(Checkpoint::from_files(&name, &lookup)?);
    }
    let bytes = map(path)?;
    let extension = path.extension().and_then(|extension| extension.to_str());
    if is_package(&bytes) || extension == Some("elapid") {
        let package = Package::parse(&name, bytes)?;
        package.verify()?;
        let lookup = |file: &str| Ok(package.get(file));
        return Ok(Checkpoint::from_files(&name, &lookup)?);
    }
    if extension == Some("safetensors") {
        let problem = format!("{name} holds weights alone");
        return Err(Failure::new(problem, "give the directory with its config.json"));
    }
    Ok(Checkpoint::from_gguf(&name, bytes)?)
}

/// A tokenizer: of a model, or by itself.
pub fn open_tokenizer(path: &Path) -> Done<Tokenizer> {
    let name = path.display().to_string();
    let none = || {
        let hint = "a tokenizer is a tokenizer.json, vocab.json with merges.txt, or inside a .gguf";
        Failure::new(format!("{name} holds no tokenizer"), hint)
    };
    let extension = path.extension().and_then(|extension| extension.to_str());
    let found = if path.is_dir() {
        vocab::from_files(&name, "tokenizer.json", &|file| find(path, file))?
    } else if extension == Some("json") {
        map(path)?;
        let dir = path.parent().unwrap_or(Path::new(""));
        let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let main = if file == "vocab.json" { "tokenizer.json" } else { file };
        // Beside it may lie what names its special tokens.
        vocab::from_files(&dir.display().to_string(), main, &|name| find(dir, name))?
    } else {
        let bytes = map(path)?;
        match is_package(&bytes) {
            true => open(path)?.tokenizer()?,
            false => vocab::from_gguf_file(&name, bytes)?,
        }
    };
    found.ok_or_else(none)
}

/// A file of a directory, if it is there.
pub fn find(dir: &Path, name: &str) -> Result<Option<SharedBytes>, Error> {
    let path = dir.join(name);
    match path.symlink_metadata() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        _ => map(&path).map(Some),
    }
}

/// Every file of a package directory against its manifest.
pub fn check_directory(dir: &Path) -> Done<()> {
    let mut files = Vec::new();
    let entries = std::fs::read_dir(dir).map_err(|error| cannot_read(dir, &error))?;
    for entry in entries {
        let path = entry.map_err(|error| cannot_read(dir, &error))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some(name) = name.filter(|_| path.is_file()) {
            files.push((name.to_string(), map(&path)?));
        }
    }
    let list: Vec<(&str, &[u8])> =
        files.iter().map(|(name, bytes)| (name.as_str(), (**bytes).as_ref())).collect();
    Ok(package::check_directory(&dir.display().to_string(), &list)?)
}

/// The error of a write that failed.
pub fn cannot_write(path: &Path, error: &std::io::Error) -> Error {
    let hint = "look at the space on the disk and at the rights of the directory";
    Error::format(&path.display().to_string(), format!("cannot write: {error}"), hint)
}

/// Writes a file beside its place, syncs it, and moves it there.
pub fn write(path: &Path, make: impl FnOnce(&mut Sink) -> Result<(), Error>) -> Done<u64> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.part", std::process::id()));
    let beside = PathBuf::from(beside);
    let done = write_through(&beside, make).and_then(|n_bytes| {
        failpoint::hit("file.rename")?;
        std::fs::rename(&beside, path).map_err(|error| cannot_write(path, &error))?;
        failpoint::hit("file.moved")?;
        sync_directory(path);
        Ok(n_bytes)
    });
    if done.is_err() {
        // What was begun is of no use; that it cannot be removed would be a second error.
        let _ = std::fs::remove_file(&beside);
    }
    Ok(done?)
}

fn write_through(
    path: &Path,
    make: impl FnOnce(&mut Sink) -> Result<(), Error>,
) -> Result<u64, Error> {
    let fail = |error: std::io::Error| cannot_write(path, &error);
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

/// Makes a rename last. Not every system can sync a directory; then the rename is as safe as it
/// makes it.
fn sync_directory(path: &Path) {
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
    if let Ok(dir) = File::open(dir.unwrap_or(Path::new("."))) {
        let _ = dir.sync_all();
    }
}

/// Makes a directory and those above it.
pub fn make_directory(path: &Path) -> Done<()> {
    Ok(std::fs::create_dir_all(path).map_err(|error| cannot_write(path, &error))?)
}

/// Writes a small file beside its place, syncs it, and moves it there.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Done<()> {
    write(path, |sink| sink(bytes))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    fn only_pages_that_nobody_wrote_are_let_go() {
        let part = |range: &str, about: &str, anonymous: usize, swap: usize| {
            let numbers = format!("Anonymous:{anonymous:>15} kB\nSwap:{swap:>20} kB\n");
            format!("{range} {about}\nSize:                  4 kB\n{numbers}VmFlags: rd mr me\n")
        };
        // The constants of a small library begin at the head of its file, as its code does.
        let small = [
            part("1000-2000", "r-xp 00000000 08:01 77      /lib/small.so", 0, 0),
            part("3000-4000", "r--p 00000000 08:01 77      /lib/small.so", 4, 0),
            part("4000-5000", "rw-p 00001000 08:01 77      /lib/small.so", 0, 0),
        ];
        let others = [
            part("5000-6000", "r--p 00000000 08:01 78      /lib/two words.so", 0, 0),
            part("6000-7000", "r--p 00002000 08:01 78      /lib/two words.so", 0, 8),
            part("7000-8000", "r--s 00000000 08:01 79      /model.gguf", 0, 0),
            part("8000-9000", "r-xp 00000000 00:00 0       [vdso]", 0, 0),
            part("9000-a000", "r--p 00000000 00:00 0 ", 0, 0),
            part("a000-b000", "r-xp 00003000 08:01 78      /lib/two words.so", 0, 0),
        ];
        let pages = super::program_pages(&[small.concat(), others.concat()].concat());
        assert_eq!(pages, [0x1000..0x2000, 0x5000..0x6000, 0xa000..0xb000]);
    }

    #[test]
    fn what_was_let_go_comes_back() {
        let before = super::read_text(std::path::Path::new("Cargo.toml")).unwrap();
        super::release_pages();
        assert_eq!(super::read_text(std::path::Path::new("Cargo.toml")).unwrap(), before);
    }
}
