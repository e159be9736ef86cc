//! The documents of a run: first a list of what lies in files, then tokens in the run directory.
//! What a run learned from stays what it was, whatever happens to the files meanwhile.
//!
//!     tokens.bin    the documents as tokens
//!     data.elapid   their index, and what is said about them, with the hash of tokens.bin
//!
//! A run on the same files with the same vocabulary as one beside it takes both from there.

use super::config::RunConfig;
use super::{shared, teacher};
use crate::files;
use crate::ranks;
use crate::report::reading::Reading;
use crate::report::{Done, Failure};
use crate::source::compress;
use crate::source::entry::{Entry, sample, some};
use crate::source::walk::{Divided, Walk};
use elapid::{Corpus, Encoded, Tokenizer};
use elapid::{Package, PackageFile as OutFile, SharedBytes};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a run is to learn from and to be measured on, still in its files.
#[derive(Default)]
pub struct Gathered {
    pub training: Vec<Entry>,
    pub held_out: Vec<Entry>,
    /// Documents of sets that are measured on besides, named by `name_in_set`.
    pub sets: Vec<Entry>,
    pub facts: Facts,
    /// How they are read.
    pub walk: Walk,
    /// A run that learned from the same: then nothing is read, and the lists are empty.
    pub same: Option<PathBuf>,
}

/// Documents that are measured on because somebody asked for it.
pub struct Set {
    pub name: String,
    pub documents: Vec<Encoded>,
}

/// The name of a document of a set: no held-out one is called so.
pub fn name_in_set(set: &str, name: &str) -> String {
    format!("eval:{set}/{name}")
}

/// What a run learns from and is measured on.
pub struct Data {
    pub corpus: Arc<Corpus>,
    pub facts: Facts,
}

/// What is said about the documents of a run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Facts {
    /// How the held-out ones were chosen, in words.
    pub split: String,
    /// What was left out, by reason.
    pub left_out: Value,
    /// Secrets and e-mail addresses that were replaced in the documents.
    #[serde(default)]
    pub n_exposed: usize,
    /// Bits per byte that `gzip -9` makes of held-out documents, one by one.
    pub gzip: Option<f64>,
    /// Bits per byte that `zstd -19` makes of them, with training ones as a dictionary.
    pub zstd: Option<f64>,
    /// What that dictionary is.
    pub zstd_dictionary: String,
    /// Documents to learn from, and their bytes.
    pub n_training: usize,
    pub n_bytes: usize,
    /// Documents to measure on.
    pub n_held_out: usize,
    /// Share of the bytes that were encoded: all, but of a large corpus that is only planned for.
    pub share: f64,
    /// BLAKE3 of the tokens.
    pub tokens: String,
    /// What they depend on: files, vocabulary, split.
    pub key: Option<String>,
}

/// What `zstd -19` may take with a large dictionary.
const ZSTD_BYTES: u64 = 1 << 30;

/// Text at most that a vocabulary is made from, and that is encoded for a plan.
const SAMPLE_BYTES: usize = 64 << 20;

/// Text at most that compressors are measured on, and that they are given before.
const COMPRESSED_BYTES: usize = 1 << 20;
const DICTIONARY_BYTES: usize = 16 << 20;

/// Held-out tokens at most that are kept in memory.
const HELD_OUT_TOKENS: usize = 1 << 24;

const FILE: &str = "data.elapid";
const TOKENS: &str = "tokens.bin";
const PARTS: [&str; 2] = ["index.jsonl", "facts.json"];

impl Gathered {
    /// Documents as they were divided.
    pub fn new(
        divided: Divided,
        left_out: Value,
        key: Option<String>,
        walk: Walk,
    ) -> Done<Gathered> {
        let blocks = |entries: Vec<Entry>| -> Done<Vec<Entry>> {
            let blocks = entries.into_iter().map(Entry::blocks);
            Ok(blocks.collect::<elapid::Result<Vec<_>>>()?.into_iter().flatten().collect())
        };
        let (training, held_out) = (blocks(divided.train)?, blocks(divided.held_out)?);
        let facts = Facts {
            split: divided.by.to_string(),
            left_out,
            n_training: training.len(),
            n_bytes: training.iter().map(Entry::n_bytes).sum(),
            n_held_out: held_out.len(),
            key,
            ..Facts::default()
        };
        Ok(Gathered { training, held_out, facts, walk, ..Gathered::default() })
    }

    /// Those of a run beside this one that has the same key.
    pub fn again(key: &str, walk: &Walk) -> Option<Gathered> {
        let own = walk.out.clone().unwrap_or("runs/1".into());
        let names = std::fs::read_dir(own.parent()?.join(".")).ok()?.flatten();
        let mut runs = names.map(|entry| own.with_file_name(entry.file_name()));
        runs.find_map(|dir| {
            let facts = facts(&package(&dir).ok()?, &dir).ok()?;
            // A configuration is written last: all else is there.
            let is_same = facts.key.as_deref() == Some(key) && dir.join("config.json").exists();
            let walk = Walk { out: walk.out.clone(), ..Walk::default() };
            let gathered = Gathered { facts, walk, same: Some(dir), ..Gathered::default() };
            is_same.then_some(gathered)
        })
    }

    /// Measures what compressors make of held-out documents, where memory allows it.
    pub fn compress(&mut self, limit: u64) -> Done<()> {
        let held_out = sample(&self.held_out, COMPRESSED_BYTES, &self.walk)?;
        self.facts.gzip = compress::gzip_bits_per_byte(&held_out);
        if limit < ZSTD_BYTES {
            self.facts.zstd_dictionary = "zstd was not measured: it needs too much memory".into();
            return Ok(());
        }
        let training = sample(&self.training, DICTIONARY_BYTES, &self.walk)?;
        if let Some((zstd, dictionary)) = compress::zstd_bits_per_byte(&training, &held_out) {
            self.facts.zstd = Some(zstd);
            self.facts.zstd_dictionary = dictionary.into();
        }
        Ok(())
    }

    /// Text to make a vocabulary from.
    pub fn texts(&self) -> Done<Vec<String>> {
        let documents = sample(&self.training, SAMPLE_BYTES, &self.walk)?;
        Ok(documents.iter().map(|document| document.text().into_owned()).collect())
    }

    /// Encodes the documents: into the run directory, or a sample of them into memory where there
    /// is none.
    pub fn encode(mut self, tokenizer: &Tokenizer) -> Done<Data> {
        if let Some(same) = &self.same {
            let taken = self.take(same)?;
            shared::ask_for_help(None)?;
            ranks::here().wait()?;
            return Ok(taken);
        }
        let lists = [&mut self.training, &mut self.held_out, &mut self.sets];
        let mut entries = lists.map(std::mem::take);
        if self.walk.out.is_none() {
            let few = |list: &mut Vec<Entry>| {
                *list = some(list, SAMPLE_BYTES).into_iter().map(|idx| list[idx].clone()).collect();
            };
            entries.iter_mut().for_each(few);
        }
        let n_bytes: usize = entries[0].iter().map(Entry::n_bytes).sum();
        self.facts.share = n_bytes as f64 / self.facts.n_bytes.max(1) as f64;
        let n_training = entries[0].len();
        let entries: Vec<Entry> = entries.into_iter().flatten().collect();
        let items = shared::items(&entries, n_training);
        let reading = Reading::new("encode", Some(items.len()));
        let document = |idx: usize| {
            let document = entries[idx].load(&self.walk)?;
            reading.add(items[idx].0);
            Ok(document)
        };
        let Some(dir) = &self.walk.out else {
            let corpus = Arc::new(Corpus::hold(&items, &document, tokenizer)?);
            return Ok(Data { corpus, facts: self.facts });
        };
        shared::ask_for_help(Some((&entries, n_training)))?;
        let (mut index, mut hasher) = (Vec::new(), blake3::Hasher::new());
        files::write(&dir.join(TOKENS), |sink| {
            let mut sink = |bytes: &[u8]| {
                hasher.update(bytes);
                sink(bytes)
            };
            index = shared::encode(&items, &document, tokenizer, (dir, &mut sink))?;
            Ok(())
        })?;
        self.facts.tokens = hasher.finalize().to_string();
        write_package(dir, &index, &self.facts)?;
        ranks::here().wait()?;
        let corpus = Arc::new(Corpus::open(&index, &dir.join(TOKENS))?);
        Ok(Data { corpus, facts: self.facts })
    }

    /// What another run has.
    fn take(&self, same: &Path) -> Done<Data> {
        let Some(dir) = &self.walk.out else { return Data::read(same) };
        for name in [TOKENS, FILE] {
            let (from, to) = (same.join(name), dir.join(name));
            // On another file system there is no link.
            let done =
                std::fs::hard_link(&from, &to).or_else(|_| std::fs::copy(&from, &to).map(drop));
            done.map_err(|source| elapid::Error::Write { path: to, source })?;
        }
        Data::read(dir)
    }
}

fn write_package(dir: &Path, index: &[u8], facts: &Facts) -> Done<()> {
    let facts = serde_json::to_vec(facts)
        .map_err(|error| Failure::new(error, "this is a bug in Elapid"))?;
    let parts: Vec<(String, OutFile)> = vec![
        (PARTS[0].into(), Box::new(|sink| sink(index))),
        (PARTS[1].into(), Box::new(|sink| sink(&facts))),
    ];
    files::write(&dir.join(FILE), |sink| elapid::write_package("documents", &parts, sink))?;
    Ok(())
}

fn package(dir: &Path) -> Done<Package> {
    let path = dir.join(FILE);
    let bytes = std::fs::read(&path)
        .map_err(|source| elapid::Error::Read { path: path.clone(), source })?;
    Ok(Package::parse(&path.display().to_string(), Arc::new(bytes))?)
}

const OTHER_VERSION: &str = "the run may come from another version of Elapid";

fn part(package: &Package, name: &str, dir: &Path) -> Done<SharedBytes> {
    package.get(name).ok_or_else(|| {
        Failure::new(format!("{} has no {name}", dir.join(FILE).display()), OTHER_VERSION)
    })
}

fn facts(package: &Package, dir: &Path) -> Done<Facts> {
    serde_json::from_slice((*part(package, PARTS[1], dir)?).as_ref()).map_err(|error| {
        Failure::new(format!("{}: {error}", dir.join(FILE).display()), OTHER_VERSION)
    })
}

impl Data {
    /// Those of a run directory.
    pub fn read(dir: &Path) -> Done<Data> {
        let package = package(dir)?;
        package.verify()?;
        let facts = facts(&package, dir)?;
        let tokens = dir.join(TOKENS);
        let corpus = Corpus::open((*part(&package, PARTS[0], dir)?).as_ref(), &tokens)?;
        let fail = |source| elapid::Error::Read { path: tokens.clone(), source };
        let mut hasher = blake3::Hasher::new();
        let read = std::fs::File::open(&tokens).and_then(|file| {
            hasher.update_reader(file)?;
            Ok(())
        });
        read.map_err(fail)?;
        if hasher.finalize().to_string() != facts.tokens {
            let problem = format!("{} was changed since the run started", tokens.display());
            return Err(Failure::new(problem, "restore it, or start a new run"));
        }
        Ok(Data { corpus: Arc::new(corpus), facts })
    }

    /// Takes back what [`Gathered::encode`] wrote, and a teacher before it.
    pub fn remove(dir: &Path) {
        for name in [FILE, TOKENS, teacher::FILE] {
            let _ = std::fs::remove_file(dir.join(name));
        }
    }

    /// What is measured on, as tokens: the held-out documents, and those of each set.
    pub fn measured(&self, config: &RunConfig) -> Done<(Vec<Encoded>, Vec<Set>)> {
        let mut held_out = self.corpus.held_out(HELD_OUT_TOKENS)?;
        let mut sets = Vec::new();
        for (name, path) in &config.evals {
            let prefix = name_in_set(name, "");
            let (documents, others) =
                held_out.into_iter().partition(|it: &Encoded| it.name.starts_with(&prefix));
            held_out = others;
            let set = Set { name: name.clone(), documents };
            if set.documents.is_empty() {
                let problem = format!("nothing to measure of {name} under {}", path.display());
                return Err(Failure::new(problem, "give a directory or file with text"));
            }
            sets.push(set);
        }
        Ok((held_out, sets))
    }
}
