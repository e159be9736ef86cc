//! Which documents are held out.
//!
//! | when                               | held out                                           |
//! |------------------------------------|----------------------------------------------------|
//! | at least half have a date          | the newest, by number of documents                 |
//! | otherwise                          | those whose hash of the name is below the fraction |
//! | there is one document              | its last lines (`split_single`)                    |
//!
//! Newest first asks what training is for: does the model know what was written next? A hash asks
//! less, but adding a file never moves another. A document without a date trains.
//!
//! A cluster (near copies, see `near.rs`) goes to one side as a whole, and to training as soon as
//! one member belongs there: a new copy of an old text is not new. Members that were left out as
//! copies count when they are among the items.
//!
//! With two clusters or more no side is empty: then the likeliest one is moved. A cluster with
//! more than half of all bytes trains, else a small corpus with one large file would mostly be
//! held out.

use super::{Document, Part};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// What decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitBy {
    /// The date of the last change.
    Date,
    /// A hash of the name.
    Hash,
}

/// What the split looks at.
#[derive(Clone, Copy, Debug)]
pub struct SplitItem<'a> {
    /// The document's name.
    pub name: &'a str,
    /// Its size.
    pub n_bytes: usize,
    /// Which of the items are copies of each other: equal numbers.
    pub cluster: usize,
    /// When it was last changed, in seconds since any fixed moment.
    pub date: Option<i64>,
}

/// Two sides, as indices into the items, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// What decided.
    pub by: SplitBy,
    /// To learn from.
    pub training: Vec<usize>,
    /// To measure on.
    pub held_out: Vec<usize>,
}

/// A cluster and what speaks for holding it out.
struct Cluster {
    members: Vec<usize>,
    n_bytes: usize,
    /// The oldest date; without one as old as can be.
    date: i64,
    /// The largest hash of a name: below the fraction only if all are.
    hash: u64,
}

/// Holds out about `fraction` of the items.
pub fn split(items: &[SplitItem<'_>], fraction: f64) -> Split {
    let n_dated = items.iter().filter(|item| item.date.is_some()).count();
    let by = match !items.is_empty() && 2 * n_dated >= items.len() {
        true => SplitBy::Date,
        false => SplitBy::Hash,
    };
    let mut clusters = clusters(items);
    // The likeliest to be held out come first.
    clusters.sort_by_key(|cluster| match by {
        SplitBy::Date => (Reverse(cluster.date), cluster.hash),
        SplitBy::Hash => (Reverse(0), cluster.hash),
    });
    let n_bytes: usize = items.iter().map(|item| item.n_bytes).sum();
    let may_be_held: Vec<bool> =
        clusters.iter().map(|cluster| cluster.n_bytes <= n_bytes - cluster.n_bytes).collect();
    let n_want = ((fraction * items.len() as f64).round() as usize).max(1);
    let mut held_out = Vec::new();
    for (cluster, _) in clusters.iter().zip(&may_be_held).filter(|pair| *pair.1) {
        let goes = match by {
            SplitBy::Date => {
                cluster.date > i64::MIN && held_out.len() + cluster.members.len() <= n_want
            }
            SplitBy::Hash => (cluster.hash as f64) < fraction * 2f64.powi(64),
        };
        if goes {
            held_out.extend(&cluster.members);
        }
    }
    if held_out.is_empty() && clusters.len() > 1 {
        let first = may_be_held.iter().position(|may| *may).unwrap_or(0);
        held_out.extend(&clusters[first].members);
    }
    if held_out.len() == items.len()
        && let Some(last) = clusters.last()
    {
        held_out.retain(|idx| !last.members.contains(idx));
    }
    held_out.sort_unstable();
    let is_held = |idx: &usize| held_out.binary_search(idx).is_ok();
    let training = (0..items.len()).filter(|idx| !is_held(idx)).collect();
    Split { by, training, held_out }
}

fn clusters(items: &[SplitItem<'_>]) -> Vec<Cluster> {
    let mut map: BTreeMap<usize, Cluster> = BTreeMap::new();
    for (idx, item) in items.iter().enumerate() {
        let empty = Cluster { members: Vec::new(), n_bytes: 0, date: i64::MAX, hash: 0 };
        let cluster = map.entry(item.cluster).or_insert(empty);
        cluster.members.push(idx);
        cluster.n_bytes += item.n_bytes;
        cluster.date = cluster.date.min(item.date.unwrap_or(i64::MIN));
        cluster.hash = cluster.hash.max(hash(item.name));
    }
    map.into_values().collect()
}

/// A hash of the name that stays the same for ever.
pub fn hash(name: &str) -> u64 {
    let bytes = *blake3::hash(name.as_bytes()).as_bytes();
    let first = [bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]];
    u64::from_le_bytes(first)
}

/// Holds out the last `fraction` of the lines of a document, or of its characters where there
/// are no lines: (training, held out).
///
/// `None` where there is nothing to cut: less than two characters, or a text in parts.
pub fn split_single(document: &Document, fraction: f64) -> Option<(Document, Document)> {
    let [part] = document.parts.as_slice() else { return None };
    let at = cut_at(&part.text, fraction)?;
    let side = |name: String, text: &str| Document {
        name,
        language: document.language,
        parts: vec![Part { text: text.to_string(), ..*part }],
    };
    let (training, held_out) = part.text.split_at(at);
    let end = format!("{} (its end)", document.name);
    Some((side(document.name.clone(), training), side(end, held_out)))
}

/// Where the last `fraction` begins: never at either end.
fn cut_at(text: &str, fraction: f64) -> Option<usize> {
    // Beginnings of lines; else of words; else any character.
    let after = |find: fn(char) -> bool| -> Vec<usize> {
        let found = text.char_indices().filter(|pair| find(pair.1));
        found.map(|(at, letter)| at + letter.len_utf8()).filter(|at| *at < text.len()).collect()
    };
    let lines = after(|letter| letter == '\n');
    let cuts = if lines.is_empty() { after(char::is_whitespace) } else { lines };
    let cuts = if cuts.is_empty() { after(|_| true) } else { cuts };
    // n cuts make n + 1 pieces.
    let n_held = ((fraction * (cuts.len() + 1) as f64).round() as usize).max(1);
    cuts.get(cuts.len().saturating_sub(n_held)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENTH: f64 = 0.1;

    fn items(names: &[String]) -> Vec<SplitItem<'_>> {
        let item = |(idx, name): (usize, &'_ String)| (idx, name.len());
        let list = names.iter().enumerate();
        list.map(|pair| {
            let (cluster, n_bytes) = item(pair);
            SplitItem { name: pair.1, n_bytes, cluster, date: None }
        })
        .collect()
    }

    fn names(n: usize) -> Vec<String> {
        (0..n).map(|idx| format!("src/file-{idx}.rs")).collect()
    }

    fn held_names<'a>(items: &[SplitItem<'a>], split: &Split) -> Vec<&'a str> {
        split.held_out.iter().map(|idx| items[*idx].name).collect()
    }

    #[test]
    fn the_hash_holds_out_about_the_fraction_and_adding_files_moves_none() {
        let names = names(2000);
        let all = items(&names);
        let few = split(&all[..1000], TENTH);
        let more = split(&all, TENTH);
        assert_eq!(few.by, SplitBy::Hash);
        assert!((70..130).contains(&few.held_out.len()), "{}", few.held_out.len());
        let more_of_few: Vec<usize> =
            more.held_out.iter().copied().filter(|idx| *idx < 1000).collect();
        assert_eq!(more_of_few, few.held_out);
        // The order of the files does not matter either.
        let backward: Vec<SplitItem<'_>> = all.iter().rev().copied().collect();
        let mut held = held_names(&backward, &split(&backward, TENTH));
        held.reverse();
        assert_eq!(held, held_names(&all, &more));
        // Known for ever: a change of the hash would mix old held-out files into training.
        assert_eq!(more.held_out[..3], [28, 33, 41]);
    }

    #[test]
    fn both_sides_have_something_and_together_everything() {
        for n in 2..60 {
            let names = names(n);
            let mut list = items(&names);
            for fraction in [0.0, TENTH, 0.5, 1.0, f64::NAN] {
                for dated in [None, Some(7)] {
                    list.iter_mut().for_each(|item| item.date = dated);
                    let split = split(&list, fraction);
                    assert!(!split.training.is_empty(), "{n} {fraction} {dated:?}");
                    assert!(!split.held_out.is_empty(), "{n} {fraction} {dated:?}");
                    let mut both = [split.training, split.held_out].concat();
                    both.sort_unstable();
                    assert_eq!(both, (0..n).collect::<Vec<usize>>());
                }
            }
        }
        assert_eq!(split(&[], TENTH).training, [0usize; 0]);
        let one = names(1);
        assert_eq!(split(&items(&one), TENTH).training, [0]);
    }

    #[test]
    fn the_newest_are_held_out_when_half_have_a_date() {
        let names = names(40);
        let mut list = items(&names);
        for idx in 0..20 {
            list[idx].date = Some((idx as i64 * 7) % 20);
        }
        let newest = split(&list, TENTH);
        assert_eq!(newest.by, SplitBy::Date);
        let mut dates: Vec<_> = newest.held_out.iter().map(|idx| list[*idx].date).collect();
        dates.sort();
        assert_eq!(dates, [Some(16), Some(17), Some(18), Some(19)]);
        list[0].date = None;
        assert_eq!(split(&list, TENTH).by, SplitBy::Hash);
    }

    #[test]
    fn no_cluster_straddles_and_one_old_member_makes_it_train() {
        let names = names(300);
        let mut list = items(&names);
        for (idx, item) in list.iter_mut().enumerate() {
            item.cluster = idx % 97;
        }
        for dated in [false, true] {
            for (idx, item) in list.iter_mut().enumerate() {
                item.date = dated.then_some(idx as i64);
            }
            let split = split(&list, TENTH);
            let held: Vec<usize> = split.held_out.iter().map(|idx| list[*idx].cluster).collect();
            assert!(!held.is_empty());
            assert!(split.training.iter().all(|idx| !held.contains(&list[*idx].cluster)));
            if dated {
                // Clusters 9..97 have three members, the oldest of number 96 is the newest.
                assert!(held.contains(&96) && !held.contains(&8), "{held:?}");
            }
        }
    }

    #[test]
    fn a_hash_holds_out_a_cluster_only_if_it_holds_out_each_member() {
        let names = names(100);
        let alone = items(&names);
        let held = split(&alone, TENTH).held_out;
        // One that would train, before and after one that would not.
        for other in [held[0] - 1, held[0] + 1] {
            let mut list = alone.clone();
            list[other].cluster = held[0];
            let training = split(&list, TENTH).training;
            assert!(training.contains(&held[0]) && training.contains(&other), "{other}");
        }
        let mut list = alone;
        list[held[1]].cluster = held[0];
        assert_eq!(split(&list, TENTH).held_out, held);
    }

    #[test]
    fn a_file_with_most_of_the_bytes_trains() {
        for n in 2..20 {
            let names = names(n);
            for large in 0..n {
                let mut list = items(&names);
                list[large].n_bytes = 1_000_000;
                assert!(split(&list, TENTH).training.contains(&large));
                list[large].date = Some(9);
                list.iter_mut().for_each(|item| item.date = item.date.or(Some(1)));
                assert!(split(&list, TENTH).training.contains(&large));
            }
        }
    }

    #[test]
    fn one_document_is_cut_by_lines_then_words_then_characters() {
        let lines: String = (0..50).map(|n| format!("line {n}\n")).collect();
        let document = Document::whole("a.rs", lines.clone());
        let (training, held_out) = split_single(&document, TENTH).unwrap();
        assert_eq!(held_out.text().lines().count(), 5);
        assert_eq!([training.text(), held_out.text()].concat(), lines);
        assert_eq!((training.language, held_out.language), ("Rust", "Rust"));
        let cut = |text: &str| {
            let sides = split_single(&Document::whole("a", text), TENTH)?;
            Some((sides.0.text().into_owned(), sides.1.text().into_owned()))
        };
        assert_eq!(cut("a b c"), Some(("a b ".into(), "c".into())));
        assert_eq!(cut("äöü\n"), Some(("äöü".into(), "\n".into())));
        assert_eq!(cut("one\n\n"), Some(("one\n".into(), "\n".into())));
        assert_eq!(cut("äö"), Some(("ä".into(), "ö".into())));
        assert_eq!(cut("ä"), None);
        assert_eq!(cut(""), None);
    }
}
