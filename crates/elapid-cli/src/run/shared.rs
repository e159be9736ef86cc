//! What ranks share out besides steps: the encoding of documents and their measurement. And what
//! must be the same on all before the first step.

use super::config::RunConfig;
use super::data::Data;
use super::prepare::Prepared;
use crate::files;
use crate::ranks;
use crate::report::live::Live;
use crate::report::{Done, Failure, mebibytes};
use crate::source::entry::{Entry, Told};
use crate::source::walk::Walk;
use elapid::{Corpus, DocScore, Document, Error, Sink, Tokenizer, Training};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// A score as it is kept in a file and told to other ranks.
#[derive(Serialize, Deserialize)]
pub struct Kept {
    name: String,
    n_tok: usize,
    n_bytes: usize,
    nll: f64,
    n_top1: usize,
    blocks: Vec<f64>,
}

impl From<&DocScore> for Kept {
    fn from(score: &DocScore) -> Kept {
        Kept {
            name: score.name.clone(),
            n_tok: score.n_tok,
            n_bytes: score.n_bytes,
            nll: score.nll,
            n_top1: score.n_top1,
            blocks: score.blocks.clone(),
        }
    }
}

impl Kept {
    /// The score; its language is that of the name unless it is known.
    pub fn score(self, language: Option<&'static str>) -> DocScore {
        DocScore {
            language: language.unwrap_or_else(|| elapid::language_of_path(&self.name)),
            name: self.name,
            n_tok: self.n_tok,
            n_bytes: self.n_bytes,
            nll: self.nll,
            n_top1: self.n_top1,
            blocks: self.blocks,
        }
    }
}

/// The scores of all documents in their order; `score` measures those of this rank, which are dealt
/// out by their sizes.
pub fn scores<T: Clone>(
    documents: &[T],
    size: impl Fn(&T) -> usize,
    language: impl Fn(&T) -> &'static str,
    score: impl FnOnce(&[T]) -> Done<Vec<DocScore>>,
) -> Done<Vec<DocScore>> {
    let ranks = ranks::here();
    if ranks.is_alone() {
        return score(documents);
    }
    let own = ranks.deal(&documents.iter().map(size).collect::<Vec<_>>());
    let list: Vec<T> = own.iter().map(|idx| documents[*idx].clone()).collect();
    let found = if list.is_empty() { Vec::new() } else { score(&list)? };
    let found: Vec<(usize, Kept)> = own.into_iter().zip(found.iter().map(Kept::from)).collect();
    let mut all: Vec<(usize, Kept)> = ranks.gather(&found)?.into_iter().flatten().collect();
    all.sort_by_key(|it| it.0);
    Ok(all.into_iter().map(|(idx, kept)| kept.score(Some(language(&documents[idx])))).collect())
}

/// Documents that are to be encoded: to learn from, then to measure on.
#[derive(Serialize, Deserialize)]
struct Work {
    entries: Vec<Told>,
    n_training: usize,
}

/// Bytes of each document, and how often it is drawn; none where it is held out.
pub fn items(entries: &[Entry], n_training: usize) -> Vec<(usize, Option<f64>)> {
    let item = |(idx, entry): (usize, &Entry)| {
        (entry.n_bytes(), (idx < n_training).then_some(entry.weight))
    };
    entries.iter().enumerate().map(item).collect()
}

/// The documents of a rank, one after the other: about as many bytes for each.
fn own_range(items: &[(usize, Option<f64>)], rank: usize) -> std::ops::Range<usize> {
    let (n_all, n_ranks) = (items.iter().map(|it| it.0).sum::<usize>(), ranks::here().n_ranks);
    let mut n_before = 0;
    let taker = items.iter().map(|(n_bytes, _)| {
        n_before += n_bytes;
        ((n_before - n_bytes) * n_ranks / n_all.max(1)).min(n_ranks - 1)
    });
    let takers: Vec<usize> = taker.collect();
    takers.partition_point(|it| *it < rank)..takers.partition_point(|it| *it <= rank)
}

/// Where a rank leaves its tokens and its part of the index.
fn part_paths(dir: &Path, rank: usize) -> [PathBuf; 2] {
    ["tokens", "index"].map(|name| dir.join(format!("{name}.rank-{rank}")))
}

/// On the first rank: encodes its part, and puts that of the others behind it. What comes out does
/// not depend on how many there are. Returns the index.
pub fn encode(
    items: &[(usize, Option<f64>)],
    document: &(dyn Fn(usize) -> elapid::Result<Document> + Sync),
    tokenizer: &Tokenizer,
    (dir, sink): (&Path, &mut Sink),
) -> elapid::Result<Vec<u8>> {
    let ranks = ranks::here();
    let own = own_range(items, 0);
    let mut index = Corpus::write(&items[own], document, tokenizer, sink)?;
    ranks.wait().map_err(|failure| Error::input(failure.problem, &failure.hint))?;
    for rank in 1..ranks.n_ranks {
        let [tokens, lines] = part_paths(dir, rank);
        for (path, is_index) in [(&lines, true), (&tokens, false)] {
            let fail = |source| Error::Read { path: path.clone(), source };
            let mut file = std::fs::File::open(path).map_err(fail)?;
            let mut bytes = vec![0; 1 << 20];
            loop {
                let n = std::io::Read::read(&mut file, &mut bytes).map_err(fail)?;
                match (n, is_index) {
                    (0, _) => break,
                    (n, true) => index.extend_from_slice(&bytes[..n]),
                    (n, false) => sink(&bytes[..n])?,
                }
            }
            let _ = std::fs::remove_file(path);
        }
    }
    Ok(index)
}

/// On the first rank, before `encode`: what the others help with; nothing where that is none.
pub fn ask_for_help(work: Option<(&[Entry], usize)>) -> Done<()> {
    let work = work.map(|(entries, n_training)| Work {
        entries: entries.iter().map(Told::from).collect(),
        n_training,
    });
    ranks::here().tell(|| Ok(work)).map(drop)
}

/// On another rank: encodes its part of what the first one asks for; returns when all is written.
pub fn help_encode(tokenizer: &Tokenizer, walk: &Walk, dir: &Path) -> Done<()> {
    let ranks = ranks::here();
    if let Some(Work { entries, n_training }) = ranks.tell(|| Ok(None::<Work>))? {
        let entries: Vec<Entry> = entries.into_iter().map(Entry::from).collect();
        let items = items(&entries, n_training);
        let own = own_range(&items, ranks.rank);
        let document = |idx: usize| entries[own.start + idx].load(walk);
        let [tokens, lines] = part_paths(dir, ranks.rank);
        let mut index = Vec::new();
        files::write(&tokens, |sink| {
            index = Corpus::write(&items[own.clone()], &document, tokenizer, sink)?;
            Ok(())
        })?;
        files::write_bytes(&lines, &index)?;
        ranks.wait()?;
    }
    ranks.wait()
}

/// Refuses ranks that would not make the same steps.
pub fn expect_same(config: &RunConfig, data: &Data, prepared: &Prepared) -> Done<()> {
    let ranks = ranks::here();
    if ranks.is_alone() {
        return Ok(());
    }
    let mut settings = config.clone();
    let place = settings.place.take().map(|place| format!("{:?}", place.precision));
    let own = [
        ("settings", format!("{settings:?}")),
        ("precision", place.unwrap_or_default()),
        ("tokens", data.facts.tokens.clone()),
        ("frozen weights", prepared.frozen_hash.clone()),
        ("teacher", prepared.teacher_hash.clone().unwrap_or_default()),
    ];
    let own: Vec<(String, String)> =
        own.into_iter().map(|(what, text)| (what.into(), text)).collect();
    let all = ranks.gather(&own)?;
    for (rank, other) in all.iter().enumerate() {
        let pairs = other.iter().zip(&all[0]);
        let different: Vec<&str> =
            pairs.filter(|(one, first)| one != first).map(|(one, _)| &*one.0).collect();
        if !different.is_empty() {
            let list = different.join(", ");
            let problem = format!("rank {rank} has other {list} than rank 0");
            let hint = "all ranks must see the same run directory, data and models: use a file \
                        system that they share, and the same --precision";
            return Err(Failure::new(problem, hint));
        }
    }
    Ok(())
}

/// What ranks sent in so many steps beside what they must: a rank that holds 1/n of all sums gets
/// it from n - 1 others and gives it to as many. What went by NCCL is not counted.
pub fn say_sent((n_bytes, n_steps): (u64, u64), training: &Training, live: &mut Live) -> Done<()> {
    let ranks = ranks::here();
    if ranks.is_alone() {
        return Ok(());
    }
    let n = ranks.n_ranks as f64;
    let all: u64 = ranks.gather(&n_bytes)?.iter().sum();
    let least = 2.0 * (n - 1.0) / n * training.fixed().trained as f64;
    let sent = all as f64 / n / n_steps.max(1) as f64;
    let text = match sent > least / 2.0 {
        true => format!("{} sent by each in a step on the average", mebibytes(sent)),
        false => "NCCL carried the gradients".into(),
    };
    let least = mebibytes(least);
    live.line("ranks", &format!("{n} ranks, {text}, the least possible is {least}"));
    Ok(())
}
