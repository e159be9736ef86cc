//! Documents that stay where they are: a place in a file, and what is known of the text there.
//!
//! A corpus is larger than memory, its list of entries is not. Each text is read twice: once for
//! the list (`walk.rs`) and once to be encoded; if it has changed in between, that is an error.
//! Secrets are replaced both times, unless the walk keeps them: no text leaves here with one.
//!
//! Not here: which files are read (`walk.rs`).

use super::secrets::{self, SecretKind};
use super::walk::{Secrets, Walk};
use crate::report::n_threads_default;
use elapid::{Document, Error, Result, Signature};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A document in a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Path relative to the source, or `file.jsonl:12`.
    pub name: String,
    /// As of a [`Document`].
    pub language: &'static str,
    /// How often training draws it in an epoch.
    pub weight: f64,
    path: Arc<Path>,
    /// Where it lies, in bytes.
    range: Range<u64>,
    pub(super) form: Form,
    /// Of its text, learned or not.
    n_bytes: usize,
    /// BLAKE3 of the text; that of a long one is not known.
    hash: Option<[u8; 32]>,
}

/// A secret in a document, by place; the value itself is nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// As of the [`Entry`].
    pub name: String,
    /// Line and column, from 1; of a record, which is a line itself, there are none.
    pub at: Option<(usize, usize)>,
    pub kind: SecretKind,
}

/// An entry as one rank tells it to another.
#[derive(Serialize, Deserialize)]
pub struct Told {
    name: String,
    weight: f64,
    path: PathBuf,
    range: Range<u64>,
    form: Form,
    n_bytes: usize,
    hash: Option<[u8; 32]>,
}

impl From<&Entry> for Told {
    fn from(entry: &Entry) -> Told {
        let Entry { name, weight, path, range, form, n_bytes, hash, .. } = entry.clone();
        // Another rank may have been started elsewhere.
        let path = std::path::absolute(&path).unwrap_or_else(|_| path.to_path_buf());
        Told { name, weight, path, range, form, n_bytes, hash }
    }
}

impl From<Told> for Entry {
    fn from(told: Told) -> Entry {
        let Told { name, weight, path, range, form, n_bytes, hash } = told;
        let language = elapid::language_of_path(&name);
        Entry { name, language, weight, path: path.into(), range, form, n_bytes, hash }
    }
}

/// What lies there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// Text.
    Text,
    /// A line of JSON.
    Record,
}

/// A longer text is several documents, one after the other.
const TEXT_BYTES_MAX: u64 = 4 << 20;

/// Where an end of line is looked for before a cut.
const LINE_BYTES_MAX: u64 = 1 << 16;

fn read(path: &Path, range: &Range<u64>) -> Result<Vec<u8>> {
    let read = || {
        let mut file = File::open(path)?;
        if range.start > 0 {
            file.seek(SeekFrom::Start(range.start))?;
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact(&mut bytes)?;
        Ok(bytes)
    };
    read().map_err(|source| Error::Read { path: path.into(), source })
}

/// A document that was read for the first time.
pub type Met = (Entry, Signature, Vec<Exposed>);

/// Replaces the secrets of a document that may not be learned; where they were.
pub fn clean(document: &mut Document, form: Form, walk: &Walk) -> Vec<Exposed> {
    let mut list = Vec::new();
    if walk.secrets == Secrets::Keep {
        return list;
    }
    for part in &mut document.parts {
        let (text, found) = secrets::redact(&part.text);
        list.extend(found.into_iter().map(|secret| Exposed {
            name: document.name.clone(),
            at: (form == Form::Text).then_some((secret.line, secret.column)),
            kind: secret.kind,
        }));
        if let Cow::Owned(text) = text {
            part.text = text;
        }
    }
    list
}

impl Entry {
    /// A text that was just read.
    pub fn of_text(name: String, path: &Path, text: String, walk: &Walk) -> Met {
        let range = 0..text.len() as u64;
        Entry::new(Document::whole(name, text), Form::Text, (path.into(), range), walk)
    }

    /// A text that lies in the middle of a file, which is to be written.
    pub fn within(
        name: String,
        path: &Arc<Path>,
        start: u64,
        text: &str,
        walk: &Walk,
    ) -> (Entry, Signature) {
        let range = start..start + text.len() as u64;
        let document = Document::whole(name, text);
        let (entry, signature, _) = Entry::new(document, Form::Text, (path.clone(), range), walk);
        (entry, signature)
    }

    /// BLAKE3 of the text, read where it is not known.
    pub fn hash(&self, walk: &Walk) -> Result<String> {
        let hash = match self.hash {
            Some(hash) => blake3::Hash::from_bytes(hash),
            None => blake3::hash(self.load(walk)?.text().as_bytes()),
        };
        Ok(hash.to_string())
    }

    /// The record of a line; none where that is blank.
    pub fn of_line(
        name: &str,
        path: &Arc<Path>,
        start: u64,
        line: &[u8],
        walk: &Walk,
    ) -> Result<Option<Met>> {
        let range = start..start + line.len() as u64;
        let document = elapid::document_of_record(name, line, walk.chat())?;
        let place = (path.clone(), range);
        Ok(document.map(|document| Entry::new(document, Form::Record, place, walk)))
    }

    fn new(
        mut document: Document,
        form: Form,
        (path, range): (Arc<Path>, Range<u64>),
        walk: &Walk,
    ) -> Met {
        let exposed = clean(&mut document, form, walk);
        let text = document.text();
        let signature = Signature::new(&text);
        let (n_bytes, hash) = (text.len(), Some(*blake3::hash(text.as_bytes()).as_bytes()));
        drop(text);
        let Document { name, language, .. } = document;
        let entry = Entry { name, language, weight: 1.0, path, range, form, n_bytes, hash };
        (entry, signature, exposed)
    }

    /// A text of any length, which is not read yet.
    pub fn of_file(name: String, path: &Path, n_bytes: u64) -> Entry {
        let language = elapid::language_of_path(&name);
        let (path, range, form) = (path.into(), 0..n_bytes, Form::Text);
        let n_bytes = n_bytes as usize;
        Entry { name, language, weight: 1.0, path, range, form, n_bytes, hash: None }
    }

    /// Bytes of its text, learned or not.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Whether both have the same text.
    pub fn is_same(&self, other: &Entry) -> bool {
        self.hash.is_some() && self.hash == other.hash
    }

    /// The bytes of the file that it is made of.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        read(&self.path, &self.range)
    }

    /// Reads it.
    pub fn load(&self, walk: &Walk) -> Result<Document> {
        Ok(self.load_and_tell(walk)?.0)
    }

    /// Reads it, and says which secrets were replaced.
    pub fn load_and_tell(&self, walk: &Walk) -> Result<(Document, Vec<Exposed>)> {
        let changed = || {
            let problem = format!("{} has changed since it was first read", self.name);
            Error::Input { problem, hint: "start again when nothing writes there".into() }
        };
        let bytes = self.bytes()?;
        let document = match self.form {
            Form::Record => elapid::document_of_record(&self.name, &bytes, walk.chat())?,
            Form::Text => {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                let document = Document::whole(self.name.clone(), text);
                Some(Document { language: self.language, ..document })
            }
        };
        let mut document = document.ok_or_else(changed)?;
        let exposed = clean(&mut document, self.form, walk);
        match self.hash {
            Some(hash) if hash != *blake3::hash(document.text().as_bytes()).as_bytes() => {
                Err(changed())
            }
            _ => Ok((document, exposed)),
        }
    }

    /// With the last `fraction` of its lines held out: (training, held out). None where there is
    /// nothing to cut.
    pub fn cut(&self, fraction: f64) -> Result<Option<(Entry, Entry)>> {
        if self.form == Form::Record {
            return Ok(None);
        }
        let n_all = self.range.end - self.range.start;
        let at = match n_all > TEXT_BYTES_MAX {
            true => self.cut_before(self.range.start + ((1.0 - fraction) * n_all as f64) as u64)?,
            // A place in the file, not in the text that is learned.
            false => match elapid::cut_end(&String::from_utf8_lossy(&self.bytes()?), fraction) {
                Some(at) => self.range.start + at as u64,
                None => return Ok(None),
            },
        };
        let end = format!("{} (its end)", self.name);
        let sides = (
            self.part(self.name.clone(), self.range.start..at),
            self.part(end, at..self.range.end),
        );
        Ok(Some(sides))
    }

    fn part(&self, name: String, range: Range<u64>) -> Entry {
        let n_bytes = (range.end - range.start) as usize;
        Entry { name, range, n_bytes, hash: None, ..self.clone() }
    }

    /// The last end of a line before `at`, or of a character.
    fn cut_before(&self, at: u64) -> Result<u64> {
        let start = at.saturating_sub(LINE_BYTES_MAX).max(self.range.start);
        let bytes = read(&self.path, &(start..at))?;
        let line = bytes.iter().rposition(|byte| *byte == b'\n').map(|line| line + 1);
        let letter = || bytes.iter().rposition(|byte| byte & 0xc0 != 0x80);
        Ok(line.or_else(letter).filter(|n| *n > 0).map_or(at, |n| start + n as u64))
    }

    /// Itself, or the documents that a long text is made into.
    pub fn blocks(self) -> Result<Vec<Entry>> {
        let mut starts = vec![self.range.start];
        while self.form == Form::Text && self.range.end - starts[starts.len() - 1] > TEXT_BYTES_MAX
        {
            starts.push(self.cut_before(starts[starts.len() - 1] + TEXT_BYTES_MAX)?);
        }
        if starts.len() == 1 {
            return Ok(vec![self]);
        }
        let ends = starts.iter().skip(1).copied().chain([self.range.end]);
        let part = |(n, (start, end)): (usize, (&u64, u64))| {
            self.part(format!("{} (part {})", self.name, n + 1), *start..end)
        };
        Ok(starts.iter().zip(ends).enumerate().map(part).collect())
    }
}

/// Documents of at most about so many bytes, evenly from all, by number: those of the smallest
/// hashes of names, ascending; at least one. All of them where they are no more.
pub fn some(entries: &[Entry], n_bytes_max: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..entries.len()).collect();
    if entries.iter().map(Entry::n_bytes).sum::<usize>() > n_bytes_max {
        order.sort_by_cached_key(|idx| elapid::name_hash(&entries[*idx].name));
        let mut n_bytes = 0;
        order.retain(|idx| {
            let fits = n_bytes == 0 || n_bytes + entries[*idx].n_bytes <= n_bytes_max;
            n_bytes += if fits { entries[*idx].n_bytes } else { 0 };
            fits
        });
        order.sort_unstable();
    }
    order
}

/// The same, read.
pub fn sample(entries: &[Entry], n_bytes_max: usize, walk: &Walk) -> Result<Vec<Document>> {
    let list = some(entries, n_bytes_max);
    each(list.len(), |n| entries[list[n]].load(walk)).into_iter().collect()
}

/// What `f` makes of 0, 1, ... `n` - 1, by all cores.
pub(super) fn each<T: Send>(n: usize, f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let work = || {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Ordering::Relaxed));
        numbers.take_while(|idx| *idx < n).map(|idx| (idx, f(idx))).collect::<Vec<_>>()
    };
    let mut list: Vec<(usize, T)> = std::thread::scope(|scope| {
        let n_threads = n_threads_default().min(n);
        let threads: Vec<_> = (0..n_threads).map(|_| scope.spawn(work)).collect();
        let done = threads.into_iter().map(|thread| thread.join());
        done.flat_map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    list.sort_unstable_by_key(|pair| pair.0);
    list.into_iter().map(|pair| pair.1).collect()
}
