//! What an adaptation learns from, and what it is measured on.

use super::{Earlier, OLD_WEIGHT};
use crate::proof::certificate::{Certificate, Learned, SplitFacts, TrainingFacts, list_hash};
use crate::report::Done;
use crate::report::live::Live;
use crate::report::reading::waiting;
use crate::source::entry::{self, Entry, Form};
use crate::source::history::{self, History, New, bound};
use crate::source::left_out;
use crate::source::walk::{self, Collected, Walk};
use elapid::{Document, SplitBy};
use serde_json::Value;
use std::collections::HashSet;
use std::path::Path;

/// Share of the text that is held out where there is no history.
const HELD_OUT: f64 = 0.1;

/// The texts of an older tree, until they are encoded.
pub const TREE: &str = "tree.txt";
/// Texts that are read again, until they are encoded.
pub const REPLAY: &str = "replay.txt";

pub struct Lesson {
    pub training: Vec<Entry>,
    pub held_out: Vec<New>,
    pub split: SplitFacts,
    pub facts: TrainingFacts,
    pub left_out: Value,
    /// Share of the training bytes that no earlier run has learned.
    pub changed: f64,
    /// Whether the ends of files are held out, which move when these grow.
    by_end: bool,
}

/// Reads what is under `path`; `dir` is the directory of the run.
pub fn find(path: &Path, dir: &Path, walk: &Walk, told: Told, live: &mut Live) -> Done<Lesson> {
    let collected = walk::list(&[(path.to_path_buf(), 1.0)], walk)?.read(walk)?;
    let past = match path.is_dir() {
        true => waiting("history", "of the project", || history::history(path, &collected, walk))?,
        false => None,
    };
    let table = match told {
        Told::All => left_out::left_out_list(&collected.left_out),
        Told::Table => left_out::left_out_table(&collected.left_out),
    };
    table.lines().for_each(|text| live.line("skip", text));
    let exposed = match told {
        Told::All => left_out::exposed_list(&collected.exposed),
        Told::Table => left_out::exposed_table(&collected.exposed),
    };
    exposed.lines().for_each(|text| live.line("secret", text));
    let left_out = left_out::left_out_json(&collected.left_out);
    let mut lesson = match past {
        Some(past) => by_history(past, dir, walk, left_out)?,
        None => at_random(collected, walk, left_out, live)?,
    };
    for new in &mut lesson.held_out {
        entry::clean(&mut new.document, Form::Text, walk);
    }
    live.line("split", &lesson.split.text);
    Ok(lesson)
}

/// How much is said of files that are left out.
#[derive(Clone, Copy)]
pub enum Told {
    All,
    Table,
}

/// Text that is to be predicted.
fn new_text(document: &Document) -> String {
    let parts = document.parts.iter().filter(|part| part.learned);
    parts.map(|part| part.text.as_str()).collect()
}

fn by_history(past: History, dir: &Path, walk: &Walk, left_out: Value) -> Done<Lesson> {
    let History { commit, head, before, since } = past;
    let training = history::store(&before, &dir.join(TREE), walk)?;
    drop(before);
    let training = walk::without_copies(training, walk)?;
    let n_all = training.len();
    let texts: Vec<String> = since.iter().map(|new| new_text(&new.document)).collect();
    let training = history::without_near(training, &texts, walk)?;
    let n_near_copies = n_all - training.len();
    let files: HashSet<&str> = since.iter().map(|new| &*new.file).collect();
    let n_bytes: usize = texts.iter().map(String::len).sum();
    let short = &commit[..commit.len().min(10)];
    let text = format!(
        "by time: text written after commit {short}, {} bytes in {} files; training sees the tree \
         as it was there ({n_near_copies} near copies left out)",
        crate::report::count(n_bytes as f64),
        files.len(),
    );
    let split = SplitFacts { text, commit: Some(commit), head: Some(head) };
    Lesson::new(training, since, split, (n_near_copies, left_out), walk)
}

fn at_random(collected: Collected, walk: &Walk, left_out: Value, live: &mut Live) -> Done<Lesson> {
    let divided = walk::divide(collected, HELD_OUT)?;
    if let Some(note) = &divided.note {
        live.line("note", note);
    }
    let held_out = divided.held_out.iter().map(|entry| {
        let mut document = entry.load(walk)?;
        bound(&mut document.parts);
        Ok(New { file: entry.name.clone(), document })
    });
    let held_out = held_out.collect::<elapid::Result<Vec<_>>>()?;
    let text = format!("{}: there is too little history in git to hold out by time", divided.by);
    let split = SplitFacts { text, ..SplitFacts::default() };
    let lesson = Lesson::new(divided.train, held_out, split, (0, left_out), walk)?;
    Ok(Lesson { by_end: divided.by == SplitBy::End, ..lesson })
}

impl Lesson {
    fn new(
        training: Vec<Entry>,
        held_out: Vec<New>,
        split: SplitFacts,
        (n_near_copies, left_out): (usize, Value),
        walk: &Walk,
    ) -> Done<Lesson> {
        let blocks = training.into_iter().map(Entry::blocks);
        let training: Vec<Entry> =
            blocks.collect::<elapid::Result<Vec<_>>>()?.into_iter().flatten().collect();
        let learned =
            |entry: &Entry| Ok(Learned { name: entry.name.clone(), hash: entry.hash(walk)? });
        let documents = training.iter().map(learned).collect::<elapid::Result<Vec<_>>>()?;
        let facts = TrainingFacts {
            n_documents: training.len(),
            n_bytes: training.iter().map(Entry::n_bytes).sum(),
            n_near_copies,
            hash: list_hash(&documents),
            documents,
        };
        Ok(Lesson { training, held_out, split, facts, left_out, changed: 1.0, by_end: false })
    }

    /// Whether an earlier run may be continued: nothing that it learned may be measured on now.
    pub fn continues(&self, path: &Path, earlier: &Earlier) -> bool {
        match (&earlier.certificate.split.commit, &self.split.commit) {
            (Some(old), Some(new)) => history::is_before(path, old, new),
            (None, None) if !self.by_end => {
                let learned = names(&earlier.certificate);
                self.held_out.iter().any(|new| !learned.contains(&*new.file))
            }
            _ => false,
        }
    }

    /// What is left to learn after an earlier run: what changed, and a little of the rest.
    pub fn after(mut self, certificate: &Certificate) -> Lesson {
        if self.split.commit.is_none() {
            let learned = names(certificate);
            self.held_out.retain(|new| !learned.contains(&*new.file));
        }
        let known: HashSet<&str> =
            certificate.training.documents.iter().map(|it| &*it.hash).collect();
        let mut n_changed = 0;
        for (entry, learned) in self.training.iter_mut().zip(&self.facts.documents) {
            match known.contains(&*learned.hash) {
                true => entry.weight = OLD_WEIGHT,
                false => n_changed += entry.n_bytes(),
            }
        }
        self.changed = n_changed as f64 / self.facts.n_bytes.max(1) as f64;
        self
    }
}

fn names(certificate: &Certificate) -> HashSet<&str> {
    certificate.training.documents.iter().map(|learned| &*learned.name).collect()
}
