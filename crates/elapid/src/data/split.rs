//! Which documents are held out.
//!
//! | when                     | held out                                                       |
//! |--------------------------|----------------------------------------------------------------|
//! | fewer than 8 documents   | the last lines of each long one                                |
//! | at least half have dates | of each language the newest; without a date is newest of all   |
//! | otherwise                | of each language those with the lowest hash of the name        |
//!
//! Newest first asks what training is for: does the model know what was written next? A hash asks
//! less, but its order is fixed: where files are added the border moves, and others may join those
//! that are held out or leave them, but never both.
//!
//! Each language gives `fraction` of its bytes or a little more, for the newest files may all be
//! notes, which say nothing of the code. It then gives its part of 20 documents, as long as that is
//! less than a third of its documents and bytes. A cluster with more than two fifths of the bytes
//! trains, so that of a tenth no more than half becomes. Languages of one or two documents count as
//! one language together.
//!
//! A cluster (near copies, see `near.rs`) goes to one side as a whole, and to training as soon as
//! one member belongs there: a new copy of an old text is not new. Where all are one cluster, as
//! records under one instruction, likeness says nothing and each stands alone.
//!
//! Of few documents none can be spared, and few say little. Their ends are as new as any of their
//! text; in all 6 KiB at least, where a third of the text is that much. A near copy of another is
//! not cut: its end would be learned from the other.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// Documents that are held out, where there are three times as many.
const N_DOCS: f64 = 20.0;
/// Most of a language that is held out for the sake of that number.
const SHARE_MAX: f64 = 1.0 / 3.0;
/// Share of the bytes of a language above which a cluster trains.
const HEAVY: f64 = 0.4;
/// Fewer documents than this are cut.
const N_DOCS_CUT: usize = 8;
/// Documents of fewer bytes are not cut, unless there is no other.
const CUT_BYTES: usize = 2048;
/// Bytes of all ends together, where that is no more than `SHARE_MAX`.
const ENDS_BYTES: f64 = 6144.0;

/// Bytes of a block: what is drawn where there are few documents (`eval/interval.rs`).
pub(crate) const BLOCK_BYTES: usize = 512;
/// Fewer blocks prove nothing: if all of five favour one model, chance does as much in one case of
/// sixteen (2 / 2^5).
pub(crate) const N_BLOCKS_MIN: usize = 6;

/// What decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitBy {
    /// The date of the last change.
    Date,
    /// A hash of the name.
    Hash,
    /// A hash of the name, though all resemble each other.
    Alike,
    /// The ends of the documents.
    End,
}

impl std::fmt::Display for SplitBy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SplitBy::Date => "by commit date, in each language",
            SplitBy::Hash => "by a hash of the name, in each language",
            SplitBy::Alike => "by a hash of the name; all are near copies of each other",
            SplitBy::End => "at the end of each long file",
        })
    }
}

/// A document as the split sees it.
#[derive(Clone, Copy, Debug)]
pub struct SplitItem<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its language.
    pub language: &'static str,
    /// Its size.
    pub n_bytes: usize,
    /// Whether it is one text, whose end can be held out.
    pub is_text: bool,
    /// Which of the documents are near copies of each other: equal numbers.
    pub cluster: usize,
    /// When it was last changed, in seconds since any fixed moment.
    pub date: Option<i64>,
}

/// What is held out; neither side is empty.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// What decided.
    pub by: SplitBy,
    /// Indices of the documents, ascending: of the whole ones, or with [`SplitBy::End`] of those
    /// whose ends are held out.
    pub held_out: Vec<usize>,
    /// With [`SplitBy::End`], how much of each; see [`cut`].
    pub share: f64,
}

/// Says so where no comparison on held-out documents of these sizes can have a verdict.
pub fn too_little(sizes: &[usize]) -> Option<String> {
    let n_blocks: usize = sizes.iter().map(|n_bytes| n_bytes.div_ceil(BLOCK_BYTES)).sum();
    let (n_docs, n_bytes) = (sizes.len(), sizes.iter().sum::<usize>());
    let noun = if n_docs == 1 { "document of" } else { "documents, together" };
    (n_blocks < N_BLOCKS_MIN).then(|| {
        format!("{n_docs} held-out {noun} {n_bytes} bytes: too little to prove a difference")
    })
}

/// A cluster and what speaks for holding it out.
struct Cluster {
    members: Vec<usize>,
    n_bytes: usize,
    /// Of the first member.
    language: &'static str,
    /// The oldest date; without one as new as can be.
    date: i64,
    /// The largest hash of a name: it is early in the order only if all are.
    hash: u64,
}

/// Holds out at least `fraction` of the text, as the table says. `None` where there is too little
/// text for two sides.
pub fn split(items: &[SplitItem<'_>], fraction: f64) -> Option<Split> {
    if items.len() < N_DOCS_CUT
        && let Some(split) = ends(items, fraction)
    {
        return Some(split);
    }
    let (first, n_dated) =
        (items.first()?, items.iter().filter(|item| item.date.is_some()).count());
    let by = match items.iter().all(|item| item.cluster == first.cluster) {
        true => SplitBy::Alike,
        false if 2 * n_dated >= items.len() => SplitBy::Date,
        false => SplitBy::Hash,
    };
    let mut clusters = clusters(items, by);
    // The likeliest to be held out come first.
    clusters.sort_by_key(|cluster| match by {
        SplitBy::Date => (Reverse(cluster.date), cluster.hash),
        _ => (Reverse(0), cluster.hash),
    });
    let held_out = choose(&clusters, fraction)?.into_iter().collect();
    Some(Split { by, held_out, share: 1.0 })
}

fn clusters(items: &[SplitItem<'_>], by: SplitBy) -> Vec<Cluster> {
    let mut map: BTreeMap<usize, Cluster> = BTreeMap::new();
    for (idx, item) in items.iter().enumerate() {
        let number = if by == SplitBy::Alike { idx } else { item.cluster };
        let cluster = map.entry(number).or_insert_with(|| Cluster {
            members: Vec::new(),
            n_bytes: 0,
            language: item.language,
            date: i64::MAX,
            hash: 0,
        });
        cluster.members.push(idx);
        cluster.n_bytes += item.n_bytes;
        cluster.date = cluster.date.min(item.date.unwrap_or(i64::MAX));
        cluster.hash = cluster.hash.max(hash(item.name));
    }
    map.into_values().collect()
}

/// The documents that are held out, of clusters in the order in which they are to be.
fn choose(clusters: &[Cluster], fraction: f64) -> Option<BTreeSet<usize>> {
    let (first, last) = (clusters.first()?, clusters.last()?);
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for cluster in clusters {
        *counts.entry(cluster.language).or_default() += cluster.members.len();
    }
    let mut strata: BTreeMap<&str, Vec<&Cluster>> = BTreeMap::new();
    for cluster in clusters {
        let language = if counts[cluster.language] < 3 { "" } else { cluster.language };
        strata.entry(language).or_default().push(cluster);
    }
    let n_docs: usize = counts.values().sum();
    let docs_share = N_DOCS / n_docs as f64;
    let taken = strata.values().flat_map(|stratum| of_language(stratum, fraction, docs_share));
    let mut held: BTreeSet<usize> = taken.flat_map(|cluster| &cluster.members).copied().collect();
    if held.is_empty() {
        let n_bytes: usize = clusters.iter().map(|cluster| cluster.n_bytes).sum();
        let is_light = |cluster: &&Cluster| 2 * cluster.n_bytes <= n_bytes;
        held.extend(&clusters.iter().find(is_light).unwrap_or(first).members);
    }
    if held.len() == n_docs {
        last.members.iter().for_each(|idx| _ = held.remove(idx));
    }
    (!held.is_empty()).then_some(held)
}

/// The first of a language's clusters, but for heavy ones, until both shares are reached.
fn of_language<'a>(list: &[&'a Cluster], fraction: f64, docs_share: f64) -> Vec<&'a Cluster> {
    let sizes = list.iter().map(|cluster| [cluster.members.len(), cluster.n_bytes]);
    let all = sizes.fold([0, 0], |sum, one| [sum[0] + one[0], sum[1] + one[1]]);
    let [n_docs, n_bytes] = all.map(|n| n as f64);
    let (mut held, mut taken) = ([0.0, 0.0], Vec::new());
    for cluster in list.iter().filter(|one| one.n_bytes as f64 <= HEAVY * n_bytes) {
        let next = [held[0] + cluster.members.len() as f64, held[1] + cluster.n_bytes as f64];
        let are_many = next[0] > SHARE_MAX * n_docs || next[1] > SHARE_MAX * n_bytes;
        if held[1] >= fraction * n_bytes && (held[0] >= docs_share * n_docs || are_many) {
            break;
        }
        held = next;
        taken.push(*cluster);
    }
    taken
}

/// A hash of the name that stays the same for ever.
pub fn hash(name: &str) -> u64 {
    let bytes = *blake3::hash(name.as_bytes()).as_bytes();
    let first = [bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7]];
    u64::from_le_bytes(first)
}

/// Holds out the ends of the long documents, or of the only one, that are like no other.
fn ends(items: &[SplitItem<'_>], fraction: f64) -> Option<Split> {
    let is_long = |idx: &usize| {
        let one = &items[*idx];
        let n_alike = items.iter().filter(|item| item.cluster == one.cluster).count();
        one.is_text && n_alike == 1 && (items.len() == 1 || one.n_bytes >= CUT_BYTES)
    };
    let held_out: Vec<usize> = (0..items.len()).filter(is_long).collect();
    let n_bytes: usize = items.iter().map(|item| item.n_bytes).sum();
    let n_bytes_long: usize = held_out.iter().map(|idx| items[*idx].n_bytes).sum();
    let wanted = (fraction * n_bytes as f64).max(ENDS_BYTES) / n_bytes_long as f64;
    let share = if wanted <= SHARE_MAX { wanted } else { fraction };
    (!held_out.is_empty()).then_some(Split { by: SplitBy::End, held_out, share })
}

/// Where the last lines of a text begin that are at least `fraction` of its bytes: never at either
/// end. Where there are no lines it is cut between words, or between characters. `None` for less
/// than two characters.
pub fn cut(text: &str, fraction: f64) -> Option<usize> {
    // Beginnings of lines; else of words; else any character.
    let after = |find: fn(char) -> bool| -> Vec<usize> {
        let found = text.char_indices().filter(|pair| find(pair.1));
        found.map(|(at, letter)| at + letter.len_utf8()).filter(|at| *at < text.len()).collect()
    };
    let lines = after(|letter| letter == '\n');
    let cuts = if lines.is_empty() { after(char::is_whitespace) } else { lines };
    let cuts = if cuts.is_empty() { after(|_| true) } else { cuts };
    let n_held = fraction * text.len() as f64;
    let n_enough = cuts.partition_point(|at| (text.len() - at) as f64 >= n_held);
    cuts.get(n_enough.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Document, Part};

    #[derive(Clone, Copy, Default)]
    struct Item {
        cluster: usize,
        date: Option<i64>,
    }

    #[derive(Debug, PartialEq)]
    struct Sides {
        by: SplitBy,
        train: Vec<Document>,
        held_out: Vec<Document>,
    }

    impl Sides {
        fn note(&self) -> Option<String> {
            too_little(&self.held_out.iter().map(Document::n_bytes).collect::<Vec<_>>())
        }
    }

    /// Both sides of a document.
    fn cut_document(document: &Document, fraction: f64) -> Option<(Document, Document)> {
        let [part] = document.parts.as_slice() else { return None };
        let (first, last) = part.text.split_at(cut(&part.text, fraction)?);
        let side = |name: &str, text: &str| Document {
            name: name.into(),
            language: document.language,
            parts: vec![Part { text: text.into(), ..*part }],
        };
        let end = format!("{} (its end)", document.name);
        Some((side(&document.name, first), side(&end, last)))
    }

    fn divide(documents: Vec<Document>, items: &[Item], fraction: f64) -> Option<Sides> {
        let item = |(document, item): (&'_ Document, &Item)| (document.n_bytes(), *item);
        let known: Vec<_> = documents.iter().zip(items).map(item).collect();
        let all: Vec<SplitItem<'_>> = documents
            .iter()
            .zip(&known)
            .map(|(document, (n_bytes, Item { cluster, date }))| SplitItem {
                name: &document.name,
                language: document.language,
                n_bytes: *n_bytes,
                is_text: true,
                cluster: *cluster,
                date: *date,
            })
            .collect();
        let Split { by, held_out: chosen, share } = split(&all, fraction)?;
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for (idx, document) in documents.iter().enumerate() {
            match (chosen.contains(&idx), by) {
                (false, _) => train.push(document.clone()),
                (true, SplitBy::End) => {
                    let (first, last) = cut_document(document, share)?;
                    train.push(first);
                    held_out.push(last);
                }
                (true, _) => held_out.push(document.clone()),
            }
        }
        Some(Sides { by, train, held_out })
    }

    const TENTH: f64 = 0.1;

    /// `n` documents of one language and 100 to 200 bytes, each like no other.
    fn documents(n: usize) -> (Vec<Document>, Vec<Item>) {
        let one = |n: usize| {
            let text = "let it be;\n".repeat(9 + n * 7 % 10);
            Document::whole(format!("src/file-{n}.rs"), text)
        };
        let item = |cluster: usize| Item { cluster, date: None };
        ((0..n).map(one).collect(), (0..n).map(item).collect())
    }

    fn tenth(documents: &[Document], items: &[Item]) -> Sides {
        divide(documents.to_vec(), items, TENTH).unwrap()
    }

    fn names(documents: &[Document]) -> Vec<&str> {
        documents.iter().map(|document| document.name.as_str()).collect()
    }

    /// Numbers of the held-out documents.
    fn held(split: &Sides) -> Vec<usize> {
        let number = |name: &str| name[9..name.len() - 3].parse().unwrap();
        names(&split.held_out).into_iter().map(number).collect()
    }

    fn bytes(documents: &[Document]) -> usize {
        documents.iter().map(Document::n_bytes).sum()
    }

    #[test]
    fn files_that_are_added_move_the_border_of_a_hash_and_nothing_else() {
        let (all, items) = documents(1200);
        let mut before: Option<(usize, Vec<usize>)> = None;
        for n in (30..60).chain([600, 601, 1199, 1200]) {
            let split = tenth(&all[..n], &items[..n]);
            assert_eq!(split.by, SplitBy::Hash);
            let after = held(&split);
            if let Some((n_old, before)) = before {
                let n_lost = before.iter().filter(|idx| !after.contains(idx)).count();
                let won = after.iter().filter(|idx| **idx < n_old && !before.contains(idx));
                assert!(n_lost == 0 || won.count() == 0, "{n}");
            }
            before = Some((n, after));
        }
        // The order of the files does not matter either.
        let backward: Vec<Document> = all.iter().rev().cloned().collect();
        let mut of_backward = held(&tenth(&backward, &items));
        of_backward.reverse();
        let (_, first) = before.unwrap();
        assert_eq!(of_backward, first);
        // Known for ever: a change of the hash would mix old held-out files into training.
        assert_eq!(first[..3], [28, 33, 41]);
    }

    #[test]
    fn both_sides_have_something_and_together_everything() {
        for n in 2..60 {
            let (all, mut items) = documents(n);
            for fraction in [0.0, TENTH, 0.5, 1.0, f64::NAN] {
                for date in [None, Some(7)] {
                    items.iter_mut().for_each(|item| item.date = date);
                    let split = divide(all.clone(), &items, fraction).unwrap();
                    assert!(!split.train.is_empty(), "{n} {fraction} {date:?}");
                    assert!(!split.held_out.is_empty(), "{n} {fraction} {date:?}");
                    let mut both = [names(&split.train), names(&split.held_out)].concat();
                    let mut want = names(&all);
                    both.sort_unstable();
                    want.sort_unstable();
                    assert_eq!(both, want);
                }
            }
        }
        assert_eq!(divide(Vec::new(), &[], TENTH), None);
        let empty = vec![Document::whole("a", "")];
        assert_eq!(divide(empty, &[Item::default()], TENTH), None);
    }

    #[test]
    fn a_tenth_of_the_bytes_and_twenty_documents_are_held_out_but_no_more_than_a_third() {
        // Of nine the third would make it more than a third of the bytes.
        for (n, n_held) in [(9, 2), (30, 10), (59, 19), (63, 20), (150, 20), (1000, 100)] {
            let (all, items) = documents(n);
            let split = tenth(&all, &items);
            let n_found = split.held_out.len();
            assert!(n_found.abs_diff(n_held) <= n_held / 8, "{n}: {n_found}");
            let share = bytes(&split.held_out) as f64 / bytes(&all) as f64;
            assert!((TENTH..=SHARE_MAX).contains(&share), "{n}: {share}");
        }
        // A larger fraction is what was asked for.
        let (all, items) = documents(100);
        let half = divide(all.clone(), &items, 0.5).unwrap();
        let share = bytes(&half.held_out) as f64 / bytes(&all) as f64;
        assert!((0.5..0.52).contains(&share), "{share}");
    }

    #[test]
    fn each_language_gives_its_share_whatever_is_newest() {
        let (mut all, mut items) = documents(90);
        for (idx, (document, item)) in all.iter_mut().zip(&mut items).enumerate() {
            // The notes are the newest; two files are of languages of their own.
            item.date = Some(idx as i64);
            document.language = match idx {
                0..60 => "Rust",
                60..88 => "Markdown",
                88 => "TOML",
                _ => "Shell",
            };
        }
        let split = tenth(&all, &items);
        assert_eq!(split.by, SplitBy::Date);
        for (language, range) in [("Rust", 0..60), ("Markdown", 60..88)] {
            let of = |list: &[Document]| -> Vec<Document> {
                list.iter().filter(|document| document.language == language).cloned().collect()
            };
            let of_held = of(&split.held_out);
            let share = bytes(&of_held) as f64 / bytes(&of(&all)) as f64;
            assert!((TENTH..=SHARE_MAX).contains(&share), "{language}: {share}");
            assert!(of_held.len() as f64 >= N_DOCS * range.len() as f64 / 90.0);
            // The newest of the language.
            assert_eq!(names(&of_held), names(&all[range.end - of_held.len()..range.end]));
        }
        assert_eq!(names(&all[88..]), names(&split.train[split.train.len() - 2..]));
        // Small languages together are like one.
        for (idx, document) in all.iter_mut().enumerate() {
            document.language = ["C", "Go", "Lua", "Perl", "Ruby"][idx / 2 % 5];
        }
        assert!((3..=4).contains(&tenth(&all[..10], &items[..10]).held_out.len()));
    }

    #[test]
    fn the_newest_are_held_out_when_half_have_a_date_and_none_is_newest_of_all() {
        let (all, mut items) = documents(40);
        for idx in 0..20 {
            items[idx].date = Some((idx as i64 * 7) % 20);
        }
        items[20..].iter_mut().for_each(|item| item.date = Some(-1));
        items[25].date = None;
        let newest = tenth(&all, &items);
        assert_eq!(newest.by, SplitBy::Date);
        let mut dates: Vec<_> = held(&newest).iter().map(|idx| items[*idx].date).collect();
        dates.sort();
        assert!((11..=13).contains(&dates.len()), "{dates:?}");
        let want = std::iter::once(None).chain((21 - dates.len() as i64..20).map(Some));
        assert_eq!(dates, want.collect::<Vec<_>>());
        items[..21].iter_mut().for_each(|item| item.date = None);
        assert_eq!(tenth(&all, &items).by, SplitBy::Hash);
    }

    #[test]
    fn no_cluster_straddles_and_one_old_member_makes_it_train() {
        let (all, mut items) = documents(300);
        for dated in [false, true] {
            for (idx, item) in items.iter_mut().enumerate() {
                *item = Item { cluster: idx % 97, date: dated.then_some(idx as i64) };
            }
            let split = tenth(&all, &items);
            let of_held: Vec<usize> = held(&split).iter().map(|idx| idx % 97).collect();
            assert!(bytes(&split.held_out) as f64 >= TENTH * bytes(&all) as f64);
            let n_members: usize = (0..300).filter(|idx| of_held.contains(&(idx % 97))).count();
            assert_eq!(n_members, split.held_out.len());
            if dated {
                // Clusters 9..97 have three members, the oldest of number 96 is the newest.
                assert!(of_held.contains(&96) && !of_held.contains(&8), "{of_held:?}");
            }
        }
        // The new copy of an old text is not new; where all are alike that says nothing.
        items.iter_mut().enumerate().for_each(|(idx, item)| item.cluster = idx);
        items[299].cluster = 0;
        assert!(!held(&tenth(&all, &items)).contains(&299));
        items.iter_mut().for_each(|item| item.cluster = 0);
        assert_eq!(tenth(&all, &items).by, SplitBy::Alike);
    }

    #[test]
    fn a_file_with_most_of_the_bytes_trains_and_is_cut_only_among_few() {
        for n in [2, 7, 8, 9, 20] {
            for large in 0..n {
                let (mut all, mut items) = documents(n);
                all[large] = Document::whole(all[large].name.as_str(), "one line\n".repeat(9000));
                for date in [None, Some(1)] {
                    items.iter_mut().for_each(|item| item.date = date);
                    items[large].date = date.and(Some(9));
                    let split = tenth(&all, &items);
                    assert!(names(&split.train).contains(&all[large].name.as_str()));
                    assert_eq!(split.by == SplitBy::End, n < 8);
                }
            }
        }
    }

    #[test]
    fn of_few_documents_the_ends_of_long_ones_are_held_out() {
        let lines = |n: usize| (0..n).map(|n| format!("line {n}\n")).collect::<String>();
        let long = |name: &str, n: usize| Document::whole(name, lines(n));
        let all = vec![long("a.py", 900), long("b.py", 1200), long("c.py", 20), long("d.py", 700)];
        let items: Vec<_> = (0..4).map(|cluster| Item { cluster, date: None }).collect();
        let split = tenth(&all, &items);
        assert_eq!((split.by, split.train.len()), (SplitBy::End, 4));
        assert_eq!(names(&split.held_out), ["a.py (its end)", "b.py (its end)", "d.py (its end)"]);
        assert!((6144..6200).contains(&bytes(&split.held_out)), "{}", bytes(&split.held_out));
        let whole =
            |idx: usize, end: usize| [split.train[idx].text(), split.held_out[end].text()].concat();
        assert_eq!([whole(0, 0), whole(1, 1)], [lines(900), lines(1200)]);
        assert_eq!(split.note(), None);
        // A near copy of another file is not cut.
        let mut alike = items.clone();
        alike[3].cluster = 0;
        assert_eq!(names(&tenth(&all, &alike).held_out), ["b.py (its end)"]);
        // Too little for a proof is said.
        let short = tenth(&all[2..3], &items[2..3]);
        assert_eq!(short.by, SplitBy::End);
        let note = short.note().unwrap();
        assert_eq!(note, "1 held-out document of 16 bytes: too little to prove a difference");
    }

    #[test]
    fn one_document_is_cut_by_lines_then_words_then_characters() {
        let lines: String = (0..50).map(|n| format!("line {n}\n")).collect();
        let document = Document::whole("a.rs", lines.clone());
        let (training, held_out) = cut_document(&document, TENTH).unwrap();
        assert_eq!(held_out.text().lines().count(), 5);
        assert_eq!([training.text(), held_out.text()].concat(), lines);
        assert_eq!((training.language, held_out.language), ("Rust", "Rust"));
        let cut = |text: &str| {
            let sides = cut_document(&Document::whole("a", text), TENTH)?;
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
