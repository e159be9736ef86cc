//! Our own package: the files of a model in one file or in one directory, each with its hash, so
//! that any changed byte is found and named.
//!
//! One file, `NAME.elapid`. Every part begins at a multiple of 64 and is filled up with zeros:
//!
//! ```text
//! head      "ELAPID\r\n", u32 version
//! files     one after the other, in the order of the manifest
//! manifest  JSON, see below
//! trailer   u64 offset and u64 length of the manifest, 32 bytes BLAKE3 of it, 8 zeros,
//!           "\r\nELAPID"
//! ```
//!
//! Numbers are little-endian. The line end in both marks shows a copy made in text mode. The
//! manifest stands behind the files so that weights of any size are hashed while they are
//! written, once, without knowing their length before; a reader begins with the last 64 bytes.
//!
//! ```text
//! {"format":"elapid","version":1,"name":"...","created_by":"elapid ...",
//!  "files":[{"name":"config.json","n_bytes":763,"blake3":"64 hexadecimal digits"}]}
//! ```
//!
//! Places follow from lengths and order; they are not written, so they cannot contradict.
//!
//! A file may have units: parts that are loaded by themselves, each with its own hash, and one hash
//! of the rest. Experts are units. A unit is verified when it is loaded, and then no other byte of
//! the file needs to be read:
//!
//! ```text
//! {"name":"model.safetensors","n_bytes":...,"blake3":"...",
//!  "units":[{"name":"model.layers.0.mlp.experts.0","ranges":[[4096,8192]],"blake3":"..."}],
//!  "rest":"BLAKE3 of all other bytes of the file"}
//! ```
//!
//! Ranges are bytes of the file, first and behind the last, in ascending order.
//!
//! A directory holds the same files, the same manifest as `manifest.json`, and its hash in
//! `manifest.json.blake3`, a line as `b3sum` writes and checks it.
//!
//! The hashes find damage, not malice: who can change a file can change its hash. Not here:
//! signatures, compression, what the files mean.

use crate::error::{Error, Result};
use crate::files::foreign::{self, Wanted};
use crate::files::{Sink, place_in};
use crate::tensor::SharedBytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

const MAGIC: &[u8; 8] = b"ELAPID\r\n";
const END_MAGIC: &[u8; 8] = b"\r\nELAPID";
const VERSION: u32 = 1;
const FORMAT: &str = "elapid";
/// Parts lie at multiples of this; head and trailer have this length.
const ALIGNMENT: usize = 64;
/// Files up to this are hashed when the package is opened.
const SMALL_BYTES: usize = 1 << 20;
/// Below this, sharing the work costs more than it saves.
const PARALLEL_BYTES_MIN: usize = 1 << 17;
const NAME_BYTES_MAX: usize = 255;

/// The list of files, in a directory.
pub const MANIFEST: &str = "manifest.json";
/// The hash of the list, in a directory.
pub const MANIFEST_HASH: &str = "manifest.json.blake3";

pub(crate) const HINT: &str = "the package is damaged: copy or download it again, or make it anew";
const HINT_NAMES: &str =
    "names are letters, digits, `.`, `_` and `-`, and differ in more than case";

/// Makes the bytes of a file, in pieces of any size. Called once.
pub type OutFile<'a> = Box<dyn Fn(&mut Sink<'_>) -> Result<()> + 'a>;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    format: String,
    version: u32,
    name: String,
    created_by: String,
    files: Vec<Listed>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    name: String,
    n_bytes: u64,
    blake3: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    units: Vec<Unit>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rest: Option<String>,
}

/// A part of a file with a hash of its own.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unit {
    name: String,
    ranges: Vec<[u64; 2]>,
    blake3: String,
}

/// Parts of a file to be hashed by themselves: name and bytes, in ascending order.
pub(crate) type Parts = Vec<(String, Vec<Range<u64>>)>;

/// The hashes of a file, made while its bytes pass.
struct Hashes {
    whole: blake3::Hasher,
    rest: blake3::Hasher,
    units: Vec<blake3::Hasher>,
    /// Ranges of units that are still to come, in order, the next last.
    ranges: Vec<(Range<u64>, usize)>,
}

impl Hashes {
    fn new(parts: &Parts) -> Hashes {
        let of_unit = |(idx, unit): (usize, &(_, Vec<Range<u64>>))| {
            unit.1.iter().map(|range| (range.clone(), idx)).collect::<Vec<_>>()
        };
        let mut ranges: Vec<_> = parts.iter().enumerate().flat_map(of_unit).collect();
        ranges.sort_by_key(|(range, _)| std::cmp::Reverse(range.start));
        let new = blake3::Hasher::new;
        Hashes { whole: new(), rest: new(), units: vec![new(); parts.len()], ranges }
    }

    fn add(&mut self, mut bytes: &[u8]) {
        let mut at = self.whole.count();
        add(&mut self.whole, bytes);
        while !self.units.is_empty() && !bytes.is_empty() {
            let (n, hasher) = match self.ranges.last() {
                Some((range, _)) if range.end <= at => {
                    self.ranges.pop();
                    continue;
                }
                Some((range, idx)) if range.start <= at => (range.end - at, &mut self.units[*idx]),
                Some((range, _)) => (range.start - at, &mut self.rest),
                None => (u64::MAX, &mut self.rest),
            };
            let (now, later) = bytes.split_at(n.min(bytes.len() as u64) as usize);
            add(hasher, now);
            (bytes, at) = (later, at + now.len() as u64);
        }
    }

    fn listed(&self, name: &str, parts: &Parts) -> Listed {
        let unit = |((name, ranges), hasher): (&(String, Vec<Range<u64>>), &blake3::Hasher)| Unit {
            name: name.clone(),
            ranges: ranges.iter().map(|range| [range.start, range.end]).collect(),
            blake3: hasher.finalize().to_string(),
        };
        Listed {
            name: name.into(),
            n_bytes: self.whole.count(),
            blake3: self.whole.finalize().to_string(),
            units: parts.iter().zip(&self.units).map(unit).collect(),
            rest: (!parts.is_empty()).then(|| self.rest.finalize().to_string()),
        }
    }
}

impl Listed {
    /// Fails unless these are the bytes that were listed.
    fn check(&self, file: &str, bytes: &[u8]) -> Result<()> {
        self.check_length(file, bytes)?;
        self.compare(file, &hash(bytes), &self.blake3)
    }

    /// The same without reading units.
    fn check_rest(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let Some(rest) = &self.rest else { return self.check(file, bytes) };
        self.check_length(file, bytes)?;
        let mut ranges: Vec<[u64; 2]> =
            self.units.iter().flat_map(|it| &it.ranges).copied().collect();
        ranges.sort_unstable();
        let (mut hasher, mut at) = (blake3::Hasher::new(), 0);
        for [begin, end] in ranges {
            let (begin, end) = (begin as usize, end as usize);
            let Some(between) = bytes.get(at..begin).filter(|_| end <= bytes.len()) else {
                let problem = format!("manifest: bytes {begin}..{end} of `{}`", self.name);
                return Err(Error::format(file, problem, HINT));
            };
            add(&mut hasher, between);
            at = end;
        }
        add(&mut hasher, &bytes[at..]);
        self.compare(file, &hasher.finalize().to_hex(), rest)
    }

    fn check_length(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let (name, got, want) = (&self.name, bytes.len(), self.n_bytes);
        if got as u64 == want {
            return Ok(());
        }
        let problem = format!("`{name}` has {got} bytes, the manifest says {want}");
        Err(Error::format(file, problem, HINT))
    }

    fn compare(&self, file: &str, got: &str, want: &str) -> Result<()> {
        if got == want {
            return Ok(());
        }
        let problem = format!("`{}` was changed: its hash is {got}, it was {want}", self.name);
        Err(Error::format(file, problem, HINT))
    }
}

/// A file of a package whose units nobody has verified yet.
pub struct Unchecked {
    package: String,
    listed: Listed,
    bytes: SharedBytes,
}

impl Unchecked {
    /// Reads every byte of it.
    pub fn check(&self) -> Result<()> {
        self.listed.check(&self.package, (*self.bytes).as_ref())
    }

    /// Whether these bytes are some of its own.
    pub fn holds(&self, part: &[u8]) -> bool {
        place_in((*self.bytes).as_ref(), part).is_some()
    }

    /// What the bytes of a unit must hash to, in their order.
    pub fn hash_of(&self, unit: &str) -> Result<&str> {
        let found = self.listed.units.iter().find(|it| it.name == unit);
        found.map(|unit| unit.blake3.as_str()).ok_or_else(|| {
            let problem = format!("manifest: there is no hash of `{unit}`");
            Error::format(&self.package, problem, HINT)
        })
    }
}

fn hash(bytes: &[u8]) -> String {
    let mut hasher = blake3::Hasher::new();
    add(&mut hasher, bytes);
    hasher.finalize().to_hex().to_string()
}

/// On all threads of the pool we are in, where that pays.
fn add(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    if bytes.len() < PARALLEL_BYTES_MIN {
        hasher.update(bytes);
    } else {
        hasher.update_rayon(bytes);
    }
}

impl Manifest {
    fn json(name: &str, files: Vec<Listed>) -> Vec<u8> {
        let created_by = format!("elapid {}", env!("CARGO_PKG_VERSION"));
        let (format, name) = (FORMAT.into(), name.into());
        let manifest = Manifest { format, version: VERSION, name, created_by, files };
        serde_json::to_vec(&manifest).expect("strings and numbers are JSON")
    }

    fn parse(file: &str, json: &[u8]) -> Result<Manifest> {
        let fail = |problem: String| Error::format(file, problem, HINT);
        let manifest: Manifest =
            serde_json::from_slice(json).map_err(|error| fail(format!("manifest: {error}")))?;
        let Manifest { format, version, .. } = &manifest;
        if format != FORMAT {
            return Err(fail(format!("manifest: `format` is {format:?}, not {FORMAT:?}")));
        }
        check_version(file, *version)?;
        let names = manifest.files.iter().map(|listed| listed.name.as_str());
        check_names(names).map_err(|problem| fail(format!("manifest: {problem}")))?;
        Ok(manifest)
    }
}

fn check_version(file: &str, version: u32) -> Result<()> {
    if version == VERSION {
        return Ok(());
    }
    let problem = format!("package version {version}; version {VERSION} is read");
    Err(Error::format(file, problem, "a newer Elapid may read it"))
}

/// Plain names, safe on every file system: no paths, and no two that differ in case only.
fn check_names<'a>(names: impl Iterator<Item = &'a str>) -> std::result::Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let mut seen = BTreeSet::new();
    for name in names {
        let lower = name.to_ascii_lowercase();
        let is_good = !name.is_empty()
            && name.len() <= NAME_BYTES_MAX
            && name.chars().all(is_plain)
            && !name.starts_with('.')
            && !name.ends_with('.');
        if !is_good {
            return Err(format!("`{}` is no plain file name", name.escape_debug()));
        }
        if lower == MANIFEST || lower == MANIFEST_HASH {
            return Err(format!("the name `{name}` is taken by the package itself"));
        }
        if !seen.insert(lower) {
            return Err(format!("file `{name}` comes twice"));
        }
    }
    Ok(())
}

/// An open one-file package.
pub struct Package {
    file: String,
    bytes: SharedBytes,
    manifest: Manifest,
    /// Of each file of the manifest.
    ranges: Vec<Range<usize>>,
}

struct Part {
    whole: SharedBytes,
    range: Range<usize>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &(*self.whole).as_ref()[self.range.clone()]
    }
}

/// Where the manifest lies, as the trailer says; everything else about the ends is checked here.
fn read_ends(file: &str, data: &[u8]) -> Result<(Range<usize>, [u8; 32])> {
    let fail = |problem: &str| Error::format(file, problem, HINT);
    let Some(rest) = data.strip_prefix(MAGIC) else {
        if data.starts_with(b"ELAPID") {
            return Err(fail("a package whose line ends were changed: it was copied as text"));
        }
        let other = || fail("does not begin with the mark of a package");
        return Err(foreign::explain(file, data, Wanted::Package).unwrap_or_else(other));
    };
    let cut = || fail("does not end with the mark of a package: cut short, or something was added");
    let (Some((version, rest)), Some((body, trailer))) =
        (rest.split_first_chunk::<4>(), data.split_last_chunk::<ALIGNMENT>())
    else {
        return Err(cut());
    };
    check_version(file, u32::from_le_bytes(*version))?;
    let zeros = &rest[..rest.len().min(ALIGNMENT - 12)];
    let is_whole = data.len().is_multiple_of(ALIGNMENT) && body.len() >= ALIGNMENT;
    if !is_whole || trailer[56..] != *END_MAGIC {
        return Err(cut());
    }
    if zeros.iter().chain(&trailer[48..56]).any(|&byte| byte != 0) {
        return Err(fail("the zeros in head or trailer were changed"));
    }
    let number = |at: usize| {
        let bytes = trailer[at..at + 8].try_into().expect("eight bytes");
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    let (begin, n_bytes) = (number(0), number(8));
    let end = begin.and_then(|begin| begin.checked_add(n_bytes?));
    match (begin, end) {
        (Some(begin), Some(end))
            if end.checked_next_multiple_of(ALIGNMENT) == Some(body.len())
                && begin.is_multiple_of(ALIGNMENT)
                && begin >= ALIGNMENT =>
        {
            let hash = trailer[16..48].try_into().expect("32 bytes");
            Ok((begin..end, hash))
        }
        _ => Err(fail("the trailer was changed: the manifest would not lie before it")),
    }
}

impl Package {
    /// Reads the manifest, checks the structure and the hashes of small files. `file` is the name
    /// for messages.
    pub fn parse(file: &str, bytes: SharedBytes) -> Result<Package> {
        let data = (*bytes).as_ref();
        let fail = |problem: String| Error::format(file, problem, HINT);
        let (place, want) = read_ends(file, data)?;
        let json = &data[place.clone()];
        if *blake3::hash(json).as_bytes() != want {
            return Err(fail("the manifest was changed: its hash is another".into()));
        }
        let manifest = Manifest::parse(file, json)?;
        let (mut ranges, mut at) = (Vec::new(), ALIGNMENT);
        for Listed { name, n_bytes, .. } in &manifest.files {
            let end = usize::try_from(*n_bytes).ok().and_then(|n| at.checked_add(n));
            let next = end.and_then(|end| end.checked_next_multiple_of(ALIGNMENT));
            let (Some(end), Some(next)) = (end, next.filter(|&next| next <= place.start)) else {
                let room = place.start - at;
                return Err(fail(format!(
                    "`{name}` has {n_bytes} bytes, there is room for {room}"
                )));
            };
            if data[end..next].iter().any(|&byte| byte != 0) {
                return Err(fail(format!("the zeros behind `{name}` were changed")));
            }
            ranges.push(at..end);
            at = next;
        }
        if at != place.start {
            let begin = place.start;
            return Err(fail(format!("files end at byte {at}, the manifest begins at {begin}")));
        }
        if data[place.end..data.len() - ALIGNMENT].iter().any(|&byte| byte != 0) {
            return Err(fail("the zeros behind the manifest were changed".into()));
        }
        let this = Package { file: file.into(), bytes: bytes.clone(), manifest, ranges };
        this.check_up_to(SMALL_BYTES)?;
        Ok(this)
    }

    fn check_up_to(&self, n_bytes_max: usize) -> Result<()> {
        let data = (*self.bytes).as_ref();
        let pairs = self.manifest.files.iter().zip(&self.ranges);
        for (listed, range) in pairs.filter(|(_, range)| range.len() <= n_bytes_max) {
            listed.check_rest(&self.file, &data[range.clone()])?;
        }
        Ok(())
    }

    /// Reads every byte but those of units.
    pub(crate) fn verify_rest(&self) -> Result<()> {
        self.check_up_to(usize::MAX)
    }

    /// The files that have units.
    pub(crate) fn unchecked(self) -> Vec<Unchecked> {
        let bytes: Vec<_> = self.names().map(|name| self.get(name).expect("listed")).collect();
        unchecked(&self.file, self.manifest.files.into_iter().zip(bytes))
    }

    /// Reads every byte; names the first file that differs from what was packed.
    pub fn verify(&self) -> Result<()> {
        let data = (*self.bytes).as_ref();
        let mut pairs = self.manifest.files.iter().zip(&self.ranges);
        pairs.try_for_each(|(listed, range)| listed.check(&self.file, &data[range.clone()]))
    }

    /// The name of what is packed.
    #[cfg(test)]
    pub(crate) fn name(&self) -> &str {
        &self.manifest.name
    }

    /// The files, in order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.manifest.files.iter().map(|listed| listed.name.as_str())
    }

    /// The bytes of a file, sharing those of the package.
    pub fn get(&self, name: &str) -> Option<SharedBytes> {
        let idx = self.names().position(|listed| listed == name)?;
        Some(Arc::new(Part { whole: self.bytes.clone(), range: self.ranges[idx].clone() }))
    }
}

fn unchecked(package: &str, files: impl Iterator<Item = (Listed, SharedBytes)>) -> Vec<Unchecked> {
    let of = |(listed, bytes)| Unchecked { package: package.into(), listed, bytes };
    files.filter(|(listed, _)| !listed.units.is_empty()).map(of).collect()
}

/// Writes a one-file package. Files go through `sink` as they are made; nothing is kept of them.
pub fn write(name: &str, files: &[(String, OutFile)], sink: &mut Sink) -> Result<()> {
    write_parts(name, files, &vec![Parts::new(); files.len()], sink)
}

/// The same with units, `parts` of each file.
pub(crate) fn write_parts(
    name: &str,
    files: &[(String, OutFile)],
    parts: &[Parts],
    sink: &mut Sink,
) -> Result<()> {
    check_names(files.iter().map(|(name, _)| name.as_str()))
        .map_err(|problem| Error::input(format!("writing a package: {problem}"), HINT_NAMES))?;
    let mut head = MAGIC.to_vec();
    head.extend(VERSION.to_le_bytes());
    head.resize(ALIGNMENT, 0);
    sink(&head)?;
    let mut at = ALIGNMENT as u64;
    let mut list = Vec::new();
    for ((name, make), parts) in files.iter().zip(parts) {
        let mut hashes = Hashes::new(parts);
        make(&mut |bytes: &[u8]| {
            hashes.add(bytes);
            sink(bytes)
        })?;
        at += hashes.whole.count() + pad(hashes.whole.count(), sink)?;
        list.push(hashes.listed(name, parts));
    }
    let json = Manifest::json(name, list);
    sink(&json)?;
    pad(json.len() as u64, sink)?;
    let mut trailer = at.to_le_bytes().to_vec();
    trailer.extend((json.len() as u64).to_le_bytes());
    trailer.extend(blake3::hash(&json).as_bytes());
    trailer.extend([0; 8]);
    trailer.extend(END_MAGIC);
    sink(&trailer)
}

/// Zeros up to the next part; returns how many.
fn pad(n_bytes: u64, sink: &mut Sink) -> Result<u64> {
    let n = n_bytes.next_multiple_of(ALIGNMENT as u64) - n_bytes;
    sink(&[0; ALIGNMENT][..n as usize])?;
    Ok(n)
}

fn manifest_line(json: &[u8]) -> Vec<u8> {
    format!("{}  {MANIFEST}\n", hash(json)).into_bytes()
}

/// The two files that make a directory of these files a package: `MANIFEST`, `MANIFEST_HASH`.
pub fn manifest_of_directory(
    name: &str,
    files: &[(&str, &[u8])],
    parts: &[Parts],
) -> Result<[Vec<u8>; 2]> {
    check_names(files.iter().map(|(name, _)| *name))
        .map_err(|problem| Error::input(format!("writing a package: {problem}"), HINT_NAMES))?;
    let list = files.iter().zip(parts).map(|((name, bytes), parts)| {
        let mut hashes = Hashes::new(parts);
        hashes.add(bytes);
        hashes.listed(name, parts)
    });
    let json = Manifest::json(name, list.collect());
    let line = manifest_line(&json);
    Ok([json, line])
}

/// Checks every byte of a directory but those of units: all of its files, those of the manifest
/// too. Returns the files that have units.
///
/// A file that the manifest does not list is an error: nothing vouches for it. `dir` is the name
/// for messages.
pub fn check_directory(dir: &str, files: &[(String, SharedBytes)]) -> Result<Vec<Unchecked>> {
    let find = |want: &str| {
        let found = files.iter().find(|(name, _)| name == want).map(|(_, bytes)| bytes);
        found.ok_or_else(|| Error::format(dir, format!("`{want}` is missing"), HINT))
    };
    let json = (**find(MANIFEST)?).as_ref();
    if (**find(MANIFEST_HASH)?).as_ref() != manifest_line(json) {
        let problem = format!("`{MANIFEST}` was changed, or its hash in `{MANIFEST_HASH}`");
        return Err(Error::format(dir, problem, HINT));
    }
    let manifest = Manifest::parse(dir, json)?;
    for listed in &manifest.files {
        listed.check_rest(dir, (**find(&listed.name)?).as_ref())?;
    }
    let mut listed: BTreeSet<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    listed.extend([MANIFEST, MANIFEST_HASH]);
    if let Some((name, _)) = files.iter().find(|(name, _)| !listed.contains(name.as_str())) {
        let problem = format!("`{name}` is not in the manifest");
        return Err(Error::format(dir, problem, "take it out, or make the package anew"));
    }
    let mut with_bytes = Vec::new();
    for listed in manifest.files {
        let bytes = find(&listed.name)?.clone();
        with_bytes.push((listed, bytes));
    }
    Ok(unchecked(dir, with_bytes.into_iter()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of<'a>(bytes: &'a [u8]) -> OutFile<'a> {
        // In pieces, as writers of weights make them.
        Box::new(move |sink| bytes.chunks(100).try_for_each(&mut *sink))
    }

    fn packed(files: &[(&str, &[u8])]) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        let files: Vec<_> =
            files.iter().map(|(name, bytes)| (name.to_string(), of(bytes))).collect();
        write("tiny", &files, &mut |bytes| {
            out.extend(bytes);
            Ok(())
        })?;
        Ok(out)
    }

    fn open(bytes: Vec<u8>) -> Result<Package> {
        Package::parse("m.elapid", Arc::new(bytes))
    }

    fn sample() -> Vec<(&'static str, Vec<u8>)> {
        vec![
            ("config.json", b"{}".to_vec()),
            ("empty", vec![]),
            ("weights.safetensors", (0..1000).map(|i| i as u8).collect()),
            ("whole", vec![7; 128]),
        ]
    }

    fn borrowed<'a>(files: &'a [(&'static str, Vec<u8>)]) -> Vec<(&'a str, &'a [u8])> {
        files.iter().map(|(name, bytes)| (*name, bytes.as_slice())).collect()
    }

    fn shared(files: &[(&'static str, Vec<u8>)]) -> Vec<(String, SharedBytes)> {
        files.iter().map(|(name, bytes)| (name.to_string(), Arc::new(bytes.clone()) as _)).collect()
    }

    fn manifest(files: &[(&'static str, Vec<u8>)]) -> [Vec<u8>; 2] {
        let parts = vec![Parts::new(); files.len()];
        manifest_of_directory("tiny", &borrowed(files), &parts).unwrap()
    }

    fn problem<T>(result: Result<T>) -> String {
        result.err().expect("refused").to_string()
    }

    #[test]
    fn what_is_packed_comes_back_aligned() {
        let files = sample();
        let package = open(packed(&borrowed(&files)).unwrap()).unwrap();
        package.verify().unwrap();
        assert_eq!(package.name(), "tiny");
        assert_eq!(
            package.names().collect::<Vec<_>>(),
            files.iter().map(|f| f.0).collect::<Vec<_>>()
        );
        for (name, want) in &files {
            assert_eq!((*package.get(name).unwrap()).as_ref(), want, "{name}");
        }
        assert!(package.get("other").is_none());
        assert!(package.ranges.iter().all(|range| range.start.is_multiple_of(ALIGNMENT)));
        open(packed(&[]).unwrap()).unwrap().verify().unwrap();
    }

    #[test]
    fn any_changed_byte_is_found() {
        let good = packed(&borrowed(&sample())).unwrap();
        for at in 0..good.len() {
            for flip in [1, 0x20, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] ^= flip;
                let found = open(bad).and_then(|package| package.verify());
                assert!(found.is_err(), "byte {at} of {} changed by {flip:#x}", good.len());
            }
        }
    }

    #[test]
    fn any_other_length_is_found() {
        let good = packed(&borrowed(&sample())).unwrap();
        for n in 0..good.len() {
            assert!(open(good[..n].to_vec()).is_err(), "cut to {n} of {}", good.len());
        }
        for n in [1, 63, 64, 1000] {
            let longer = [good.clone(), vec![0; n]].concat();
            assert!(problem(open(longer)).contains("something was added"), "{n} more");
        }
    }

    #[test]
    fn a_large_file_is_judged_by_verify_and_named() {
        let large = vec![1; SMALL_BYTES + 1];
        let mut bytes = packed(&[("a", b"x"), ("large.bin", &large)]).unwrap();
        bytes[ALIGNMENT * 2 + 77] ^= 1;
        let package = open(bytes).unwrap();
        assert!(problem(package.verify()).contains("`large.bin` was changed"));
    }

    #[test]
    fn the_part_that_changed_is_named() {
        let good = packed(&borrowed(&sample())).unwrap();
        let changed = |at: usize| {
            let mut bad = good.clone();
            bad[at] ^= 1;
            problem(open(bad))
        };
        let n = good.len();
        assert!(changed(64).contains("`config.json` was changed"));
        assert!(changed(66).contains("the zeros behind `config.json`"));
        assert!(changed(128 + 999).contains("`weights.safetensors` was changed"));
        assert!(changed(20).contains("the zeros in head"));
        assert!(changed(n - 64).contains("the trailer was changed"));
        assert!(changed(n - 20).contains("the manifest was changed"));
        assert!(changed(n - 65).contains("the zeros behind the manifest"));
        assert!(changed(8).contains("package version 0; version 1 is read"));
        let text = [b"ELAPID\n", &good[8..]].concat();
        assert!(problem(open(text)).contains("copied as text"));
        assert!(problem(open(b"PK\x03\x04".to_vec())).contains("a zip archive"));
    }

    #[test]
    fn a_manifest_that_lies_is_refused_though_its_hash_fits() {
        let forge = |json: &str| {
            let mut bytes = packed(&[]).unwrap()[..ALIGNMENT].to_vec();
            bytes.extend([0; ALIGNMENT]); // room for one file
            let at = bytes.len();
            bytes.extend(json.as_bytes());
            bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
            bytes.extend((at as u64).to_le_bytes());
            bytes.extend((json.len() as u64).to_le_bytes());
            bytes.extend(blake3::hash(json.as_bytes()).as_bytes());
            bytes.extend([0; 8]);
            bytes.extend(END_MAGIC);
            problem(open(bytes))
        };
        let manifest = |files: &str| {
            format!(
                r#"{{"format":"elapid","version":1,"name":"n","created_by":"c","files":[{files}]}}"#
            )
        };
        let file = |name: &str, n_bytes: u64| {
            format!(r#"{{"name":"{name}","n_bytes":{n_bytes},"blake3":"{}"}}"#, "0".repeat(64))
        };
        let max = u64::MAX;
        assert!(forge(&manifest(&file("a", max))).contains("`a` has 18446744073709551615 bytes"));
        assert!(forge(&manifest(&file("a", 65))).contains("there is room for 64"));
        assert!(forge(&manifest(&file("a", 64))).contains("`a` was changed"));
        assert!(forge(&manifest("")).contains("files end at byte 64, the manifest begins at 128"));
        assert!(forge(&manifest(&file("../a", 1))).contains("no plain file name"));
        let twice = format!("{},{}", file("a", 0), file("A", 1));
        assert!(forge(&manifest(&twice)).contains("`A` comes twice"));
        assert!(
            forge(&manifest("").replace("\"version\":1", "\"version\":2")).contains("version 2")
        );
        assert!(forge(&manifest("").replace("\"elapid\"", "\"zip\"")).contains("`format`"));
        assert!(forge("{}").contains("manifest: missing field"));
        assert!(forge(&"[".repeat(9000)).contains("manifest:"));
    }

    #[test]
    fn names_that_are_no_plain_file_names_are_refused() {
        let long = "x".repeat(256);
        for name in ["", ".", "..", ".git", "a.", "a/b", "a\\b", "C:", "a b", "ä", "a\0", &long] {
            assert!(problem(packed(&[(name, b"")])).contains("no plain file name"), "{name:?}");
        }
        assert!(problem(packed(&[("Manifest.json", b"")])).contains("taken by the package"));
        assert!(problem(packed(&[("a", b""), ("a", b"")])).contains("`a` comes twice"));
        let directory = manifest_of_directory("tiny", &[("a/b", b"")], &[Parts::new()]);
        assert!(problem(directory).contains("no plain file name"));
    }

    #[test]
    fn a_failing_file_or_sink_stops_the_writing() {
        let fail = || Err(Error::input("disk full", "make room"));
        let broken: OutFile = Box::new(move |_| fail());
        assert!(
            problem(write("n", &[("a".into(), broken)], &mut |_| Ok(()))).contains("disk full")
        );
        let files = [("a".to_string(), of(b"12"))];
        assert!(problem(write("n", &files, &mut |_| fail())).contains("disk full"));
    }

    #[test]
    fn any_changed_byte_of_a_directory_is_found_and_named() {
        let mut files = sample();
        let [json, line] = manifest(&files);
        files.push((MANIFEST, json));
        files.push((MANIFEST_HASH, line));
        check_directory("m", &shared(&files)).unwrap();
        for idx in 0..files.len() {
            for at in 0..files[idx].1.len() {
                files[idx].1[at] ^= 4;
                let text = problem(check_directory("m", &shared(&files)));
                assert!(text.contains(files[idx].0), "byte {at} of {}: {text}", files[idx].0);
                files[idx].1[at] ^= 4;
            }
            let removed = files.remove(idx);
            let text = problem(check_directory("m", &shared(&files)));
            assert!(text.contains(&format!("`{}` is missing", removed.0)), "{text}");
            files.insert(idx, removed);
        }
        files.push(("notes.txt", vec![]));
        let text = problem(check_directory("m", &shared(&files)));
        assert!(text.contains("`notes.txt` is not in the manifest"), "{text}");
    }

    #[test]
    fn both_forms_have_the_same_manifest() {
        let files = sample();
        let one = packed(&borrowed(&files)).unwrap();
        let [json, line] = manifest(&files);
        assert!(one.windows(json.len()).any(|window| window == json));
        assert!(line.ends_with(b"  manifest.json\n"));
    }
}
