//! Files of the hub into its cache: resumed where they broke off, checked against their hashes.

use super::cache::{Cache, N_COMMIT, which_file};
use super::client::{Client, Facts, Trouble};
use super::{Name, Parts, is_hex};
use crate::report::live::progress;
use crate::report::text::bytes;
use crate::report::{Done, Failure};
use crate::{files, machine};
use elapid::Error;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use std::cell::{Cell, RefCell};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

/// What a download did.
pub struct Fetched {
    pub path: PathBuf,
    pub commit: String,
    pub n_files: usize,
    /// Downloaded now, without what was there.
    pub n_bytes: u64,
}

/// Downloads what is missing of a model. The revision leads to it when all is there, so that an
/// older one stays in use until then.
pub fn fetch(cache: &Cache, name: &Name) -> Done<Fetched> {
    let meter = Meter::default();
    let note = |text: &str| meter.note(text);
    let client = Client::new(&note)?;
    let (commit, names) = client.files(name)?;
    let wanted = choose(name, names)?;
    let folder = cache.folder(&name.repo);
    files::make_directory(&folder.join("blobs"))?;
    let mut missing = Vec::new();
    for file in &wanted {
        let pointer = cache.snapshot(&name.repo, &commit).join(file);
        if !pointer.exists() {
            let facts = client.facts(name, [&commit, file])?;
            let blob = folder.join("blobs").join(&facts.etag);
            let part = folder.join("blobs").join(format!("{}.incomplete", facts.etag));
            missing.push(Piece { file, pointer, facts, blob, part });
        }
    }
    let is_new = |piece: &&Piece| !piece.blob.exists();
    let n_bytes = missing.iter().filter(is_new).map(|piece| piece.facts.n_bytes);
    let n_bytes = n_bytes.fold(0, u64::saturating_add);
    let n_there = missing.iter().filter(is_new).map(|piece| length(&piece.part)).sum();
    let n_bytes_left = n_bytes.saturating_sub(n_there);
    check_room(cache, n_bytes_left)?;
    meter.n_bytes.set(n_bytes);
    let (n_files, size) = (wanted.len(), bytes(n_bytes_left as f64));
    eprintln!("pull    {name} at {}: {size} to download, {n_files} files in all", &commit[..8]);
    for piece in &missing {
        let _lock = lock(&cache.lock(&name.repo, &piece.facts.etag))?;
        if !piece.blob.exists() {
            piece.download(&client, name, [&commit, piece.file], &meter)?;
        }
        link(piece)?;
    }
    if !is_hex(name.revision(), N_COMMIT) {
        let place = folder.join("refs").join(name.revision());
        files::make_directory(place.parent().unwrap_or(&folder))?;
        files::write_bytes(&place, commit.as_bytes())?;
    }
    let path = cache.find(name)?.ok_or_else(|| {
        let problem = format!("{name} has weights in parts, and not all of them");
        Failure::new(problem, "try another revision, or ask its author")
    })?;
    Ok(Fetched { path, commit, n_files, n_bytes: meter.n_new.get() })
}

/// The files that a name means, of all that there are.
fn choose(name: &Name, names: Vec<String>) -> Done<Vec<String>> {
    if let Some(file) = &name.file {
        return match names.contains(file) {
            true => Ok(vec![file.clone()]),
            false => {
                let problem =
                    format!("{} has no file {file}; it has {}", name.repo, names.join(", "));
                Err(Failure::new(problem, "name one of its files, or none for the whole model"))
            }
        };
    }
    match Parts::of(&names) {
        Parts::Directory(files) => Ok(files),
        Parts::Gguf(files) if files.len() == 1 => Ok(files),
        Parts::Gguf(files) if files.is_empty() => {
            let problem =
                format!("{name} holds no model: no safetensors, pytorch_model.bin or GGUF");
            Err(Failure::new(problem, "look for a version of it in one of these formats"))
        }
        Parts::Gguf(files) => Err(which_file(name, &files)),
    }
}

/// A file that is not there yet.
struct Piece<'a> {
    file: &'a str,
    pointer: PathBuf,
    facts: Facts,
    blob: PathBuf,
    part: PathBuf,
}

impl Piece<'_> {
    /// Downloads it and moves it to its place, if its hash is right.
    fn download(&self, client: &Client, name: &Name, at: [&str; 2], meter: &Meter) -> Done<()> {
        let n_bytes = self.facts.n_bytes;
        let mut sink = Sink::open(&self.part, &self.facts).map_err(|error| self.cannot(error))?;
        meter.count(sink.n_bytes);
        // Attempts are counted anew after each one that brought something.
        while sink.n_bytes < n_bytes {
            client.patiently(&mut || {
                let before = sink.n_bytes;
                match self.attempt(client, name, at, (&mut sink, meter)) {
                    Err(Trouble::Again(problem, _)) if sink.n_bytes > before => {
                        meter.note(&format!("{problem}; continuing"));
                        Ok(())
                    }
                    other => other,
                }
            })?;
        }
        sink.file.sync_all().map_err(|error| self.cannot(error))?;
        if sink.hash.is_some_and(|hash| hex(hash.finish().as_ref()) != self.facts.etag) {
            std::fs::remove_file(&self.part).map_err(|error| self.cannot(error))?;
            let problem = format!("{} came with another hash than the hub says", self.file);
            let hint = "it was removed; run the same command to download it again";
            return Err(Failure::new(problem, hint));
        }
        std::fs::rename(&self.part, &self.blob).map_err(|error| self.cannot(error))
    }

    /// One request, read to its end.
    fn attempt(
        &self,
        client: &Client,
        name: &Name,
        at: [&str; 2],
        (sink, meter): (&mut Sink, &Meter),
    ) -> Result<(), Trouble> {
        let n_bytes = self.facts.n_bytes;
        let (begin, mut body) = client.contents(name, at, sink.n_bytes)?;
        if begin != sink.n_bytes {
            meter.uncount(sink.n_bytes);
            sink.clear(&self.facts).map_err(|error| self.cannot(error))?;
        }
        let mut buffer = vec![0; 1 << 16];
        while sink.n_bytes < n_bytes {
            let broken = |why: &str| {
                let [done, all] = [sink.n_bytes, n_bytes].map(|n| bytes(n as f64));
                Trouble::Again(format!("{} broke off at {done} of {all}{why}", self.file), None)
            };
            let n = match body.read(&mut buffer) {
                Ok(0) => return Err(broken("")),
                Ok(n) => n,
                Err(error) => return Err(broken(&format!(": {error}"))),
            };
            if sink.n_bytes + n as u64 > n_bytes {
                return Err(client
                    .strange(&format!("{} is longer than it said", self.file))
                    .into());
            }
            sink.write(&buffer[..n]).map_err(|error| self.cannot(error))?;
            meter.count_new(n as u64);
        }
        Ok(())
    }

    fn cannot(&self, source: std::io::Error) -> Failure {
        cannot_write(&self.part, source)
    }
}

fn cannot_write(path: &Path, source: std::io::Error) -> Failure {
    let failure = Failure::from(Error::Write { path: path.into(), source });
    failure.with_more("HF_HUB_CACHE names another folder; what was downloaded is kept")
}

/// A file that grows, and the hash of what it holds.
struct Sink {
    file: File,
    /// None where the hub tells no hash.
    hash: Option<Context>,
    n_bytes: u64,
}

impl Sink {
    /// With what an earlier download left.
    fn open(path: &Path, facts: &Facts) -> std::io::Result<Sink> {
        let mut options = OpenOptions::new();
        let file = options.create(true).truncate(false).read(true).write(true).open(path)?;
        let mut sink = Sink { file, hash: hash_of(facts), n_bytes: 0 };
        if length(path) > facts.n_bytes {
            sink.clear(facts)?;
        }
        let mut buffer = vec![0; 1 << 20];
        loop {
            match sink.file.read(&mut buffer)? {
                0 => return Ok(sink),
                n => sink.add(&buffer[..n]),
            }
        }
    }

    fn clear(&mut self, facts: &Facts) -> std::io::Result<()> {
        (self.hash, self.n_bytes) = (hash_of(facts), 0);
        self.file.set_len(0)?;
        self.file.rewind()
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.file.write_all(bytes)?;
        self.add(bytes);
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) {
        self.hash.iter_mut().for_each(|hash| hash.update(bytes));
        self.n_bytes += bytes.len() as u64;
    }
}

/// SHA-256 for large files, and for others that of git, which begins with their length.
fn hash_of(facts: &Facts) -> Option<Context> {
    if is_hex(&facts.etag, 64) {
        return Some(Context::new(&SHA256));
    }
    let mut hash = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
    hash.update(format!("blob {}\0", facts.n_bytes).as_bytes());
    is_hex(&facts.etag, 40).then_some(hash)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn length(path: &Path) -> u64 {
    path.metadata().map_or(0, |facts| facts.len())
}

/// Fails before the first byte where the disk has too little room.
fn check_room(cache: &Cache, n_bytes: u64) -> Done<()> {
    let Some(free) = machine::free_disk(&cache.root).filter(|free| *free < n_bytes) else {
        return Ok(());
    };
    let [wanted, free] = [n_bytes, free].map(|n| bytes(n as f64));
    let problem =
        format!("{wanted} are to be downloaded, {free} are free in {}", cache.root.display());
    let hint = "`elapid rm NAME` makes room; HF_HUB_CACHE names a folder on another disk";
    Err(Failure::new(problem, hint))
}

/// Keeps other programs from downloading the same file, Python's tools too, until it is dropped.
fn lock(path: &Path) -> Done<File> {
    files::make_directory(path.parent().unwrap_or(path))?;
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(|source| cannot_write(path, source))?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        eprintln!("note    another program downloads the same file; waiting for it");
        // A file system without locks has nobody to wait for.
        let _ = file.lock();
    }
    Ok(file)
}

/// Puts contents into a snapshot: a link, or a copy where there are none.
fn link(piece: &Piece) -> Done<()> {
    let Piece { file, pointer, blob, .. } = piece;
    files::make_directory(pointer.parent().unwrap_or(pointer))?;
    let up = "../".repeat(2 + file.matches('/').count());
    let target = Path::new(&up).join("blobs").join(&piece.facts.etag);
    // One that leads nowhere is in the way.
    let _ = std::fs::remove_file(pointer);
    #[cfg(unix)]
    let linked = std::os::unix::fs::symlink(&target, pointer);
    #[cfg(windows)]
    let linked = std::os::windows::fs::symlink_file(&target, pointer);
    let linked = linked.or_else(|_| std::fs::copy(blob, pointer).map(|_| ()));
    linked.map_err(|source| cannot_write(pointer, source))
}

/// Told how many bytes of how many are done.
type Bar = Box<dyn FnMut(u64, u64)>;

/// How far a download is.
#[derive(Default)]
struct Meter {
    bar: RefCell<Option<Bar>>,
    n_bytes: Cell<u64>,
    n_done: Cell<u64>,
    /// Of those the ones that came now.
    n_new: Cell<u64>,
}

impl Meter {
    fn count(&self, n: u64) {
        self.n_done.update(|done| done + n);
        let amounts = "{binary_bytes} of {binary_total_bytes}  {binary_bytes_per_sec}";
        let mut bar = self.bar.borrow_mut();
        let bar = bar.get_or_insert_with(|| Box::new(progress("pull", amounts)));
        bar(self.n_done.get(), self.n_bytes.get());
    }

    fn count_new(&self, n: u64) {
        self.n_new.update(|new| new + n);
        self.count(n);
    }

    fn uncount(&self, n: u64) {
        self.n_done.update(|done| done - n);
    }

    /// A line above the bar.
    fn note(&self, text: &str) {
        self.bar.take();
        eprintln!("note    {text}");
    }
}
