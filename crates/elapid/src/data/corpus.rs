//! Encoded documents that may be larger than memory: tokens in one file, an index beside it.
//!
//! ```text
//! tokens   the ids of all documents, one after the other: u16 where no id needs more, else u32,
//!          little-endian
//! index    a line of JSON for each document, in the same order:
//!          {"name":"a.rs","language":"Rust","n_bytes":812,"n_tok":240,"turns":[1],"weight":1.0}
//! ```
//!
//! `turns` are the tokens from which on learned and not learned take turns; the first token is not
//! learned. `weight` is how often training draws the document in an epoch; null where it is held
//! out.
//!
//! Documents are encoded in blocks of bounded size, each by all cores, and written in their order:
//! the outcome does not depend on the number of threads.
//!
//! Not here: where documents come from, what an epoch is (`pack.rs`).

use super::{Document, Encoded, Ends, encode, language};
use crate::error::{Error, Result};
use crate::files::Sink;
use crate::text::tokenizer::Tokenizer;
use rayon::prelude::*;
use serde::{Deserialize, Deserializer, Serialize};

/// Text that is encoded at once, in bytes.
const BLOCK_BYTES: usize = 32 << 20;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Entry {
    name: String,
    #[serde(deserialize_with = "known_language")]
    language: Language,
    n_bytes: usize,
    pub(super) n_tok: usize,
    turns: Vec<u32>,
    pub(super) weight: Option<f64>,
    /// Tokens of all documents before it.
    #[serde(skip)]
    start: u64,
}

/// Under this name serde does not try to borrow it.
type Language = &'static str;

fn known_language<'de, D: Deserializer<'de>>(from: D) -> std::result::Result<Language, D::Error> {
    String::deserialize(from).map(|name| language::by_name(&name))
}

enum Store {
    Memory(Vec<u8>),
    #[cfg(feature = "fs")]
    File(crate::files::disk::Parts),
}

/// Encoded documents.
pub struct Corpus {
    entries: Vec<Entry>,
    /// Bytes of an id.
    n_id: usize,
    store: Store,
}

impl Entry {
    fn new(document: &Encoded, weight: Option<f64>) -> Entry {
        let mut is_learned = false;
        let turns = document.learned.iter().enumerate().filter(|(_, learned)| {
            let is_turn = **learned != is_learned;
            is_learned = **learned;
            is_turn
        });
        Entry {
            name: document.name.clone(),
            language: document.language,
            n_bytes: document.n_bytes,
            n_tok: document.ids.len(),
            turns: turns.map(|(at, _)| at as u32).collect(),
            weight,
            start: 0,
        }
    }

    /// Whether training can use it.
    pub(super) fn teaches(&self) -> bool {
        self.weight.is_some() && self.n_tok > 1
    }

    /// Whether it is text that is learned as a whole.
    pub(super) fn is_whole(&self) -> bool {
        self.turns == [1]
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn has_learned(&self) -> bool {
        !self.turns.is_empty()
    }

    fn encoded(&self, ids: Vec<u32>) -> Encoded {
        let mut learned = vec![false; self.n_tok];
        for turn in self.turns.chunks(2) {
            let end = turn.get(1).map_or(self.n_tok, |end| *end as usize);
            learned[turn[0] as usize..end].fill(true);
        }
        let Entry { name, language, n_bytes, .. } = self;
        Encoded { name: name.clone(), language, n_bytes: *n_bytes, ids, learned }
    }
}

/// Bytes that an id of this vocabulary needs.
fn n_id(n_vocab: usize) -> usize {
    if n_vocab <= 1 << 16 { 2 } else { 4 }
}

fn to_bytes(ids: &[u32], n_id: usize) -> Vec<u8> {
    match n_id {
        2 => ids.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect(),
        _ => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
    }
}

impl Corpus {
    /// Encodes documents and gives their tokens to `sink`; returns the index. `items` are about the
    /// bytes of each, and how often training draws it in an epoch, or none where it is held out.
    /// A document is asked for by its number when its turn has come, by many threads at once.
    pub fn write(
        items: &[(usize, Option<f64>)],
        document: &(dyn Fn(usize) -> Result<Document> + Sync),
        tokenizer: &Tokenizer,
        sink: &mut Sink,
    ) -> Result<Vec<u8>> {
        let mut index = Vec::new();
        Corpus::encode(items, document, tokenizer, &mut |entry, bytes| {
            serde_json::to_writer(&mut index, &entry).expect("numbers and text are JSON");
            index.push(b'\n');
            sink(&bytes)
        })?;
        Ok(index)
    }

    /// The same in memory.
    pub fn hold(
        items: &[(usize, Option<f64>)],
        document: &(dyn Fn(usize) -> Result<Document> + Sync),
        tokenizer: &Tokenizer,
    ) -> Result<Corpus> {
        let (mut entries, mut all) = (Vec::new(), Vec::new());
        Corpus::encode(items, document, tokenizer, &mut |entry, bytes| {
            entries.push(entry);
            all.extend(bytes);
            Ok(())
        })?;
        Ok(Corpus::new(entries, n_id(tokenizer.n_vocab()), Store::Memory(all)))
    }

    fn encode(
        items: &[(usize, Option<f64>)],
        document: &(dyn Fn(usize) -> Result<Document> + Sync),
        tokenizer: &Tokenizer,
        take: &mut dyn FnMut(Entry, Vec<u8>) -> Result<()>,
    ) -> Result<()> {
        let ends = Ends::of(tokenizer);
        let one = |idx: usize| {
            let weight = items[idx].1;
            // Nothing follows the end of a text: it is not measured.
            let ends = Ends { end: ends.end.filter(|_| weight.is_some()), ..ends };
            let encoded = encode(&document(idx)?, tokenizer, ends)?;
            let bytes = to_bytes(&encoded.ids, n_id(tokenizer.n_vocab()));
            Ok((Entry::new(&encoded, weight), bytes))
        };
        let mut first = 0;
        while first < items.len() {
            let mut n_left = BLOCK_BYTES;
            let fits = |item: &&(usize, Option<f64>)| {
                let goes = n_left > 0;
                n_left = n_left.saturating_sub(item.0);
                goes
            };
            let end = first + items[first..].iter().take_while(fits).count();
            let block: Vec<_> =
                (first..end).into_par_iter().with_max_len(1).map(one).collect::<Result<_>>()?;
            block.into_iter().try_for_each(|(entry, bytes)| take(entry, bytes))?;
            first = end;
        }
        Ok(())
    }

    /// Opens what [`Corpus::write`] wrote: the index, and the file of the tokens.
    #[cfg(feature = "fs")]
    pub fn open(index: &[u8], tokens: &std::path::Path) -> Result<Corpus> {
        let file = tokens.display().to_string();
        let fail = |problem: String| {
            Error::format(&file, problem, "the run may come from another version of Elapid")
        };
        let entries: Vec<Entry> = serde_json::Deserializer::from_slice(index)
            .into_iter()
            .collect::<std::result::Result<_, _>>()
            .map_err(|error| fail(format!("its index cannot be read: {error}")))?;
        let parts = crate::files::disk::Parts::open(tokens)?;
        let n_tok = entries.iter().try_fold(0u64, |sum, entry: &Entry| {
            let is_good = entry.turns.is_sorted()
                && entry.turns.last().is_none_or(|turn| (*turn as usize) < entry.n_tok)
                && entry.weight.is_none_or(f64::is_finite);
            sum.checked_add(entry.n_tok as u64).filter(|_| is_good)
        });
        let n_id = [2, 4]
            .into_iter()
            .find(|n_id| n_tok.and_then(|n_tok| n_tok.checked_mul(*n_id)) == Some(parts.n_bytes()));
        let n_id = n_id.ok_or_else(|| fail("the tokens are not those of the index".into()))?;
        Ok(Corpus::new(entries, n_id as usize, Store::File(parts)))
    }

    /// Documents that are encoded already, to learn from.
    #[cfg(test)]
    pub(crate) fn of(documents: &[Encoded]) -> Corpus {
        Corpus::of_weighted(documents, &vec![Some(1.0); documents.len()])
    }

    #[cfg(test)]
    pub(super) fn of_weighted(documents: &[Encoded], weights: &[Option<f64>]) -> Corpus {
        let entries = documents.iter().zip(weights).map(|pair| Entry::new(pair.0, *pair.1));
        let bytes = documents.iter().flat_map(|document| to_bytes(&document.ids, 4)).collect();
        Corpus::new(entries.collect(), 4, Store::Memory(bytes))
    }

    fn new(mut entries: Vec<Entry>, n_id: usize, store: Store) -> Corpus {
        let mut start = 0;
        for entry in &mut entries {
            entry.start = start;
            start += entry.n_tok as u64;
        }
        Corpus { entries, n_id, store }
    }

    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// What is measured on: all of it, or documents of about so many tokens, those of the smallest
    /// hashes of names.
    pub fn held_out(&self, n_tok_max: usize) -> Result<Vec<Encoded>> {
        let held = |idx: &usize| self.entries[*idx].weight.is_none();
        let mut list: Vec<usize> = (0..self.entries.len()).filter(held).collect();
        let n_tok: usize = list.iter().map(|idx| self.entries[*idx].n_tok).sum();
        if n_tok > n_tok_max {
            list.sort_by_cached_key(|idx| super::split::hash(&self.entries[*idx].name));
            let mut n_tok = 0;
            list.retain(|idx| {
                n_tok += self.entries[*idx].n_tok;
                n_tok <= n_tok_max
            });
            list.sort_unstable();
        }
        self.load(&list)
    }

    /// These documents, by their number, ascending.
    pub(super) fn load(&self, list: &[usize]) -> Result<Vec<Encoded>> {
        let one = |idx: &usize| {
            let entry = &self.entries[*idx];
            let start = entry.start * self.n_id as u64;
            let range = start..start + (entry.n_tok * self.n_id) as u64;
            let bytes = match &self.store {
                Store::Memory(all) => all[range.start as usize..range.end as usize].to_vec(),
                #[cfg(feature = "fs")]
                Store::File(parts) => parts.read(range)?,
            };
            let id = |id: &[u8]| id.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
            Ok(entry.encoded(bytes.chunks_exact(self.n_id).map(id).collect()))
        };
        list.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Part;
    use super::super::tests::{TEXT, tokenizer};
    use super::*;

    fn documents() -> Vec<Document> {
        let part = |text: &str, learned| Part { text: text.into(), learned, special: false };
        let parts = vec![part("ask ", false), part("say", true), part(" more", false)];
        let mut list: Vec<Document> =
            (0..9).map(|n| Document::whole(format!("{n}.rs"), TEXT.repeat(n))).collect();
        list.push(Document { name: "r.jsonl:1".into(), language: "chat", parts });
        list
    }

    fn items(documents: &[Document]) -> Vec<(usize, Option<f64>)> {
        let weight = |n: usize| (n % 3 != 1).then_some(0.5 * n as f64);
        let item = |(n, document): (usize, &Document)| (document.n_bytes(), weight(n));
        documents.iter().enumerate().map(item).collect()
    }

    #[test]
    fn what_is_written_is_read_as_it_was_encoded() {
        let (documents, tokenizer) = (documents(), tokenizer());
        let items = items(&documents);
        let document = |idx: usize| Ok(documents[idx].clone());
        let path = std::env::temp_dir().join(format!("elapid-corpus-{}", std::process::id()));
        let mut index = Vec::new();
        crate::files::disk::write(&path, |sink| {
            index = Corpus::write(&items, &document, &tokenizer, sink)?;
            Ok(())
        })
        .unwrap();
        let opened = Corpus::open(&index, &path).unwrap();
        let held = Corpus::hold(&items, &document, &tokenizer).unwrap();
        let ends = Ends::of(&tokenizer);
        for (idx, item) in items.iter().enumerate() {
            let ends = if item.1.is_none() { Ends { end: None, ..ends } } else { ends };
            let want = encode(&documents[idx], &tokenizer, ends).unwrap();
            for corpus in [&opened, &held] {
                assert_eq!(corpus.load(&[idx]).unwrap(), std::slice::from_ref(&want));
                assert_eq!(corpus.entries()[idx].weight, item.1);
            }
        }
        let names = |n_tok_max| {
            let list = opened.held_out(n_tok_max).unwrap().into_iter();
            list.map(|document| document.name).collect::<Vec<_>>()
        };
        assert_eq!(names(usize::MAX), ["1.rs", "4.rs", "7.rs"]);
        assert!(names(usize::MAX).len() > names(opened.entries()[7].n_tok).len());
        // Cut short, or beside another index.
        let lines: Vec<&[u8]> = index.split_inclusive(|byte| *byte == b'\n').collect();
        assert!(Corpus::open(&lines[1..].concat(), &path).is_err());
        assert!(Corpus::open(b"{}", &path).is_err());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn any_number_of_threads_writes_the_same() {
        let (documents, tokenizer) = (documents(), tokenizer());
        let on = |n: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
            let mut bytes = Vec::new();
            let mut sink = |piece: &[u8]| {
                bytes.extend_from_slice(piece);
                Ok(())
            };
            let document = |idx: usize| Ok(documents[idx].clone());
            let write = || Corpus::write(&items(&documents), &document, &tokenizer, &mut sink);
            let index = pool.install(write).unwrap();
            (index, bytes)
        };
        assert_eq!(on(1), on(2));
    }
}
