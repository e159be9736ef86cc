//! A cheap index of a project's text: which pieces of other files belong beside a cursor.
//!
//! Files are walked as `walk.rs` walks them and cut into pieces of 20 to 40 lines (`terms.rs`).
//! A piece is scored by BM25 over the identifiers around the cursor and their parts, those near it
//! counting more:
//!
//!     score = sum of weight * idf * tf * (k1 + 1) / (tf + k1 * (1 - b + b * n / n_mean))
//!
//! then raised if its file is in the same folder or is imported, and most if it defines something
//! that is named near the cursor. No text is kept: pieces that are picked are read again.
//!
//! A change of a file is seen by its time of change and its length. The pieces of its old text stay
//! as dead ones, which no query returns, until they are as many as the living.
//!
//! Not here: how much of it a prompt takes, and for how long (`talk/hole.rs`, `server/nearby.rs`).

use super::entry::each;
use super::terms::{self, Term, definition, identifiers, pieces};
use super::walk;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

const K1: f32 = 1.2;
const B: f32 = 0.6;

/// Files beyond these are not known: they would take memory that a model needs.
const N_FILES_MAX: usize = 20_000;

/// Lines before and after the cursor that say what is wanted.
const N_LINES: [usize; 2] = [30, 10];
/// Of these, lines whose definitions are looked for.
const N_LINES_NEAR: usize = 12;
/// Bytes of a file before the cursor that are looked through for imports and definitions.
const OWN_BYTES: usize = 1 << 17;

/// Factors of a piece whose file is in the same folder, or imported.
const SAME_FOLDER: f32 = 1.15;
const IMPORTED: f32 = 1.4;
/// What a definition adds, as a share of the best score without.
const DEFINES: f32 = 0.8;
/// A name that is defined more often than this says nothing.
const N_DEFINITIONS_MAX: usize = 8;

/// Pieces below this share of the best score are not worth reading.
const SCORE_MIN: f32 = 0.3;
const N_PIECES_PER_FILE: usize = 3;
/// Best pieces that are looked at until the budget is used up.
const N_CANDIDATES: usize = 48;

/// Bits of a posting that hold how often the term occurs.
const TF_BITS: u32 = 6;
const TF_MAX: u32 = (1 << TF_BITS) - 1;

/// The mark of a piece whose file is gone or has changed.
const DEAD: u32 = u32::MAX;

/// A file of the project that is shown: its path and some of its text.
pub type Shown = (String, String);

pub struct Index {
    root: PathBuf,
    /// Slots; a changed file gets a new one.
    files: Vec<File>,
    by_path: HashMap<String, u32>,
    pieces: Vec<Piece>,
    /// Pieces by term, each with how often it occurs there in its low bits.
    postings: HashMap<Term, Vec<u32>>,
    definitions: HashMap<Term, Vec<u32>>,
    n_dead: usize,
    /// Terms of all pieces.
    n_terms: u64,
    checked: Option<Instant>,
}

struct File {
    path: String,
    facts: Facts,
    stem: Term,
    pieces: Range<u32>,
}

/// Length and time of change.
type Facts = (u64, Option<SystemTime>);

struct Piece {
    file: u32,
    range: Range<u32>,
    n_terms: u16,
}

/// A piece of a file that was just read.
struct Read {
    range: Range<usize>,
    terms: Vec<(Term, u32)>,
    n_terms: usize,
    definitions: Vec<Term>,
}

impl Index {
    /// An index of nothing yet.
    pub fn new(root: &Path) -> Index {
        Index {
            root: root.into(),
            files: Vec::new(),
            by_path: HashMap::new(),
            pieces: Vec::new(),
            postings: HashMap::new(),
            definitions: HashMap::new(),
            n_dead: 0,
            n_terms: 0,
            checked: None,
        }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Files with text.
    #[cfg(test)]
    fn n_files(&self) -> usize {
        self.by_path.values().filter(|&&file| !self.files[file as usize].pieces.is_empty()).count()
    }

    /// Looks for files that are new, changed or gone, unless it did so less than `age_max` ago.
    pub fn refresh(&mut self, age_max: Duration) {
        if self.checked.is_some_and(|checked| checked.elapsed() < age_max) {
            return;
        }
        if self.n_dead > self.pieces.len() / 2 {
            *self = Index::new(&self.root);
        }
        let mut gone: HashSet<String> = self.by_path.keys().cloned().collect();
        let mut changed = Vec::new();
        for (path, facts) in walk::plain_files(&self.root).take(N_FILES_MAX) {
            let facts: Facts = (facts.len(), facts.modified().ok());
            gone.remove(&path);
            let known = self.by_path.get(&path).map(|&file| &self.files[file as usize].facts);
            if known != Some(&facts) {
                changed.push((path, facts));
            }
        }
        gone.iter().for_each(|path| self.forget(path));
        let root = &self.root;
        let read = each(changed.len(), |idx| {
            let (path, facts) = &changed[idx];
            let text = walk::text(path, &root.join(path), facts.0, elapid::BYTE_MAX);
            text.map_or(Vec::new(), |text| read(&text))
        });
        for ((path, facts), read) in changed.into_iter().zip(read) {
            self.add(path, facts, read);
        }
        self.checked = Some(Instant::now());
    }

    fn forget(&mut self, path: &str) {
        let Some(file) = self.by_path.remove(path) else { return };
        let range = self.files[file as usize].pieces.clone();
        self.n_dead += range.len();
        for piece in &mut self.pieces[range.start as usize..range.end as usize] {
            self.n_terms -= u64::from(piece.n_terms);
            piece.file = DEAD;
        }
    }

    fn add(&mut self, path: String, facts: Facts, read: Vec<Read>) {
        self.forget(&path);
        let (file, first) = (self.files.len() as u32, self.pieces.len() as u32);
        for piece in read {
            let number = self.pieces.len() as u32;
            for (term, tf) in piece.terms {
                let posting = (number << TF_BITS) | tf.min(TF_MAX);
                self.postings.entry(term).or_default().push(posting);
            }
            for term in piece.definitions {
                self.definitions.entry(term).or_default().push(number);
            }
            let n_terms = piece.n_terms.min(u16::MAX.into()) as u16;
            self.n_terms += u64::from(n_terms);
            let range = piece.range.start as u32..piece.range.end as u32;
            self.pieces.push(Piece { file, range, n_terms });
        }
        let pieces = first..self.pieces.len() as u32;
        self.by_path.insert(path.clone(), file);
        self.files.push(File { stem: terms::stem(&path), path, facts, pieces });
    }

    /// What to show of other files to somebody who writes between `prefix` and `suffix` in the file
    /// at `path` (relative, with `/`; empty where it is not known), in at most `n_bytes` with the
    /// paths. The most relevant is last.
    pub fn context(&self, path: &str, prefix: &str, suffix: &str, n_bytes: usize) -> Vec<Shown> {
        let query = Query::new(prefix, suffix);
        let own = self.by_path.get(path).copied().unwrap_or(DEAD);
        let mut scores = self.bm25(&query);
        let best = scores.iter().copied().fold(0.0, f32::max);
        for (term, near) in &query.wanted {
            let places = self.definitions.get(term).map_or(&[][..], Vec::as_slice);
            let places: Vec<u32> = places.iter().copied().filter(|&n| self.is_alive(n)).collect();
            if places.len() <= N_DEFINITIONS_MAX {
                let bonus = DEFINES * best * near / places.len() as f32;
                places.iter().for_each(|&n| scores[n as usize] += bonus);
            }
        }
        let folder = path.rsplit_once('/').map_or("", |pair| pair.0);
        let raise = |(number, score): (usize, &f32)| {
            let piece = &self.pieces[number];
            if *score <= 0.0 || piece.file == DEAD || piece.file == own {
                return None;
            }
            let file = &self.files[piece.file as usize];
            let is_near = file.path.rsplit_once('/').map_or("", |pair| pair.0) == folder;
            let is_imported = query.imported.contains(&file.stem);
            let by_folder = if is_near && !path.is_empty() { SAME_FOLDER } else { 1.0 };
            let by_import = if is_imported { IMPORTED } else { 1.0 };
            Some((score * by_folder * by_import, number as u32))
        };
        let scored = scores.iter().enumerate().filter_map(raise).collect();
        self.pick(self.best(scored), n_bytes)
    }

    fn is_alive(&self, piece: u32) -> bool {
        self.pieces[piece as usize].file != DEAD
    }

    /// The best pieces, with their scores; of equal ones the first by path.
    fn best(&self, mut scored: Vec<(f32, u32)>) -> Vec<(f32, u32)> {
        let place = |piece: u32| {
            let piece = &self.pieces[piece as usize];
            (&self.files[piece.file as usize].path, piece.range.start)
        };
        let order = |left: &(f32, u32), right: &(f32, u32)| {
            right.0.total_cmp(&left.0).then_with(|| place(left.1).cmp(&place(right.1)))
        };
        if scored.len() > N_CANDIDATES {
            scored.select_nth_unstable_by(N_CANDIDATES, order);
            scored.truncate(N_CANDIDATES);
        }
        scored.sort_by(order);
        scored
    }

    /// The score of every piece by its terms alone.
    fn bm25(&self, query: &Query) -> Vec<f32> {
        let mut scores = vec![0.0; self.pieces.len()];
        let n_pieces = (self.pieces.len() - self.n_dead).max(1) as f32;
        let n_mean = (self.n_terms as f32 / n_pieces).max(1.0);
        for (term, weight) in &query.terms {
            let Some(postings) = self.postings.get(term) else { continue };
            // What is everywhere costs most and says least.
            if n_pieces > 500.0 && postings.len() as f32 > n_pieces / 4.0 {
                continue;
            }
            let is_alive = |posting: &&u32| self.is_alive(**posting >> TF_BITS);
            let n_with = match self.n_dead {
                0 => postings.len() as f32,
                _ => postings.iter().filter(is_alive).count() as f32,
            };
            let idf = (1.0 + (n_pieces - n_with + 0.5).max(0.0) / (n_with + 0.5)).ln();
            for posting in postings {
                let (number, tf) = ((posting >> TF_BITS) as usize, (posting & TF_MAX) as f32);
                let length = f32::from(self.pieces[number].n_terms) / n_mean;
                let norm = K1 * (1.0 - B + B * length);
                scores[number] += weight * idf * tf * (K1 + 1.0) / (tf + norm);
            }
        }
        scores
    }

    /// Reads pieces from the best on until the budget is used up; one entry for each file.
    fn pick(&self, best: Vec<(f32, u32)>, n_bytes: usize) -> Vec<Shown> {
        let score_min = best.first().map_or(0.0, |best| SCORE_MIN * best.0);
        let best: Vec<u32> =
            best.into_iter().take_while(|best| best.0 >= score_min).map(|best| best.1).collect();
        let of_piece = |number: &u32| self.pieces[*number as usize].file;
        let files: BTreeSet<u32> = best.iter().map(of_piece).collect();
        let texts: HashMap<u32, Option<String>> =
            files.into_iter().map(|file| (file, self.text(file))).collect();
        let mut left = n_bytes;
        // By file: the rank of its best piece, and its pieces by place.
        let mut picked: BTreeMap<u32, (usize, BTreeMap<u32, &str>)> = BTreeMap::new();
        let mut seen = HashSet::new();
        for (rank, number) in best.into_iter().enumerate() {
            let piece = &self.pieces[number as usize];
            let text = texts.get(&piece.file).and_then(Option::as_deref);
            let range = piece.range.start as usize..piece.range.end as usize;
            let Some(text) = text.and_then(|text| text.get(range)) else { continue };
            let of_file = picked.get(&piece.file);
            let n_path = self.files[piece.file as usize].path.len() + 2;
            let cost = text.len() + if of_file.is_none() { n_path } else { 1 };
            let is_full = of_file.is_some_and(|found| found.1.len() >= N_PIECES_PER_FILE);
            if cost > left || is_full || text.trim().is_empty() || !seen.insert(text.trim()) {
                continue;
            }
            left -= cost;
            let of_file = picked.entry(piece.file).or_insert_with(|| (rank, BTreeMap::new()));
            of_file.1.insert(piece.range.start, text);
        }
        let mut files: Vec<_> = picked.into_iter().collect();
        files.sort_by_key(|(_, (rank, _))| Reverse(*rank));
        let shown = |(file, (_, pieces)): (u32, (usize, BTreeMap<u32, &str>))| {
            (self.files[file as usize].path.clone(), joined(&pieces))
        };
        files.into_iter().map(shown).collect()
    }

    /// The text of a file, if it is still the one that is known.
    fn text(&self, file: u32) -> Option<String> {
        let File { path, facts, .. } = &self.files[file as usize];
        let path = self.root.join(path);
        let now = path.metadata().ok()?;
        let is_same = (now.len(), now.modified().ok()) == *facts;
        is_same.then(|| std::fs::read_to_string(path).ok()).flatten()
    }

    /// The file that a prefix and a suffix are of: the one that has most of the lines around the
    /// cursor, and at least half of them. What was typed since it was saved is not in it.
    pub fn file_of(&self, prefix: &str, suffix: &str) -> Option<&str> {
        let lines: Vec<&str> = around(prefix, suffix).map(|(_, line)| line.trim()).collect();
        let lines: Vec<&str> = lines.into_iter().filter(|line| line.len() > 2).collect();
        let scores = self.bm25(&Query::new(prefix, suffix));
        let scored = scores.iter().enumerate();
        let scored = scored.filter(|(n, score)| **score > 0.0 && self.is_alive(*n as u32));
        let best = self.best(scored.map(|(n, score)| (*score, n as u32)).collect());
        let mut files: Vec<u32> = Vec::new();
        for (_, number) in best {
            let file = self.pieces[number as usize].file;
            if !files.contains(&file) {
                files.push(file);
            }
        }
        let n_shared = |file: &u32| {
            let text = self.text(*file).unwrap_or_default();
            let own: HashSet<&str> = text.lines().map(str::trim).collect();
            lines.iter().filter(|line| own.contains(*line)).count()
        };
        let counted = files.into_iter().take(N_FILES_COMPARED).map(|file| (n_shared(&file), file));
        let found = counted.min_by_key(|(n, _)| Reverse(*n))?;
        let is_sure = found.0 >= 2 && 2 * found.0 >= lines.len();
        is_sure.then(|| self.files[found.1 as usize].path.as_str())
    }
}

/// Files whose lines are compared with those around the cursor.
const N_FILES_COMPARED: usize = 8;

/// Pieces of a file by place; those that follow each other are one text.
fn joined(pieces: &BTreeMap<u32, &str>) -> String {
    let (mut all, mut end) = (String::new(), None);
    for (start, text) in pieces {
        if end.is_some_and(|end| end != *start) {
            all.push('\n');
        }
        all.push_str(text);
        end = Some(start + text.len() as u32);
    }
    all
}

fn read(text: &str) -> Vec<Read> {
    let of_piece = |range: Range<usize>| {
        let (mut all, mut counts) = (Vec::new(), Vec::new());
        for identifier in identifiers(&text[range.clone()]) {
            terms::terms(identifier, &mut |term| all.push(term));
        }
        let n_terms = all.len();
        all.sort_unstable();
        for same in all.chunk_by(Term::eq) {
            counts.push((same[0], same.len() as u32));
        }
        let definitions = text[range.clone()].lines().filter_map(definition).map(terms::term);
        let definitions = definitions.collect();
        Read { range, terms: counts, n_terms, definitions }
    };
    pieces(text).into_iter().map(of_piece).collect()
}

/// Lines around the cursor with their distance from it, the nearest first.
fn around<'a>(prefix: &'a str, suffix: &'a str) -> impl Iterator<Item = (usize, &'a str)> {
    let before = prefix.rsplit('\n').take(N_LINES[0]).enumerate();
    let after = suffix.split('\n').take(N_LINES[1]).enumerate();
    before.chain(after)
}

/// What is known of the place of the cursor.
struct Query {
    terms: BTreeMap<Term, f32>,
    /// Names near the cursor that this file does not define, with how near they are, 0 to 1.
    wanted: BTreeMap<Term, f32>,
    imported: HashSet<Term>,
}

impl Query {
    fn new(prefix: &str, suffix: &str) -> Query {
        let (mut all, mut wanted) = (BTreeMap::new(), BTreeMap::new());
        for (distance, line) in around(prefix, suffix) {
            let near = 1.0 / (1.0 + distance as f32 / 6.0);
            for identifier in identifiers(line) {
                terms::terms(identifier, &mut |term| {
                    let weight: &mut f32 = all.entry(term).or_default();
                    *weight = (*weight + near).min(2.0);
                });
                if distance < N_LINES_NEAR {
                    let nearest: &mut f32 = wanted.entry(terms::term(identifier)).or_default();
                    *nearest = nearest.max(near);
                }
            }
        }
        let mut start = prefix.len().saturating_sub(OWN_BYTES);
        while !prefix.is_char_boundary(start) {
            start += 1;
        }
        let own = &prefix[start..];
        for name in own.lines().chain(suffix.lines().take(2000)).filter_map(definition) {
            wanted.remove(&terms::term(name));
        }
        Query { terms: all, wanted, imported: terms::imported(own).into_iter().collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::scratch;

    /// A small project about orders.
    fn project(name: &str) -> (PathBuf, Index) {
        let root = scratch(name);
        for (path, text) in [
            ("src/price.py", PRICE),
            ("src/orders.py", ORDERS),
            ("src/store.py", "class Store:\n    def load(self, order_id):\n        return None\n"),
            ("docs/guide.md", "How an order gets its price and its total.\n"),
            ("ignored/secret.py", "def compute_discount(order): pass\n"),
            (".gitignore", "ignored/\n"),
        ] {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let mut index = Index::new(&root);
        index.refresh(Duration::ZERO);
        (root, index)
    }

    const PRICE: &str = "RATE = 0.2\n\n\ndef compute_discount(order, percent):\n    \
        \"\"\"What is taken off.\"\"\"\n    return order.total * percent / 100\n";
    const ORDERS: &str = "from .price import compute_discount\nfrom .store import Store\n\n\n\
        def total_of(order):\n    store = Store()\n    discount = compute_discount(";

    #[test]
    fn the_definition_of_a_called_function_comes_last_and_the_own_file_not_at_all() {
        let (root, index) = project("index-definition");
        let shown = index.context("src/orders.py", ORDERS, ")\n    return order.total\n", 4000);
        let paths: Vec<&str> = shown.iter().map(|shown| shown.0.as_str()).collect();
        assert_eq!(paths.last(), Some(&"src/price.py"), "{paths:?}");
        assert!(paths.contains(&"src/store.py"), "{paths:?}");
        assert!(!paths.contains(&"src/orders.py") && !paths.contains(&"ignored/secret.py"));
        assert_eq!(shown.last().unwrap().1, PRICE);
        let n_bytes: usize = shown.iter().map(|(path, text)| path.len() + 2 + text.len()).sum();
        assert!(n_bytes <= 4000);
        let small = index.context("src/orders.py", ORDERS, "", PRICE.len() + 20);
        assert_eq!(small.len(), 1);
        assert_eq!(small[0].0, "src/price.py");
        assert!(index.context("src/orders.py", ORDERS, "", 10).is_empty());
        assert!(index.context("", "", "", 4000).is_empty());
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_file_that_changes_or_goes_away_is_seen_at_the_next_look() {
        let (root, mut index) = project("index-changed");
        let prefix = "def report(order):\n    return render_invoice(";
        let last = |index: &Index| index.context("src/new.py", prefix, "", 4000).pop();
        assert!(last(&index).is_none_or(|shown| !shown.1.contains("render_invoice")));
        let text = "def render_invoice(order, currency):\n    return currency\n";
        std::fs::write(root.join("src/store.py"), text).unwrap();
        index.refresh(Duration::from_secs(60));
        assert!(last(&index).is_none_or(|shown| shown.0 != "src/store.py"), "looked at too early");
        index.refresh(Duration::ZERO);
        assert_eq!(last(&index), Some(("src/store.py".into(), text.into())));
        std::fs::remove_file(root.join("src/store.py")).unwrap();
        assert!(last(&index).is_none_or(|shown| shown.0 != "src/store.py"), "it is not there");
        index.refresh(Duration::ZERO);
        assert_eq!(index.n_files(), 3);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_definition_goes_before_places_that_only_use_a_name() {
        let (root, mut index) = project("index-uses");
        let uses = "    discount = compute_discount(order, percent)\n    store = Store()\n";
        std::fs::write(root.join("src/uses.py"), uses.repeat(5)).unwrap();
        index.refresh(Duration::ZERO);
        let shown = index.context("src/orders.py", ORDERS, "", 4000);
        let paths: Vec<&str> = shown.iter().map(|shown| shown.0.as_str()).collect();
        let place = |path: &str| paths.iter().position(|it| *it == path);
        assert!(place("src/uses.py").is_some(), "{paths:?}");
        assert!(place("src/price.py") > place("src/uses.py"), "{paths:?}");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn of_equal_files_the_imported_one_is_nearest_and_then_that_of_the_same_folder() {
        let root = scratch("index-equal");
        for name in ["alpha/one.py", "beta/two.py", "gamma/three.py"] {
            std::fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            let text = format!("# {}\n\njob = Job(task)\njob.start(worker)\n", name.len());
            std::fs::write(root.join(name), text).unwrap();
        }
        let mut index = Index::new(&root);
        index.refresh(Duration::ZERO);
        let order = |path: &str, prefix: &str| -> Vec<String> {
            index.context(path, prefix, "", 4000).into_iter().map(|shown| shown.0).collect()
        };
        let prefix = "other = Job(task)\nother.st";
        assert_eq!(order("x.py", prefix), ["gamma/three.py", "beta/two.py", "alpha/one.py"]);
        let here = order("gamma/new.py", prefix);
        assert_eq!(here, ["beta/two.py", "alpha/one.py", "gamma/three.py"]);
        let imported = format!("from beta.two import x\n\n{prefix}");
        let imported = order("gamma/new.py", &imported);
        assert_eq!(imported, ["alpha/one.py", "gamma/three.py", "beta/two.py"]);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_file_that_changed_since_it_was_read_is_not_shown_by_its_old_places() {
        let (root, index) = project("index-stale");
        std::fs::write(root.join("src/price.py"), format!("# first\n{PRICE}")).unwrap();
        let shown = index.context("src/orders.py", ORDERS, "", 4000);
        assert!(shown.iter().all(|shown| shown.0 != "src/price.py"), "{shown:?}");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn an_index_that_is_mostly_dead_is_made_again() {
        let (root, mut index) = project("index-dead");
        let path = root.join("src/price.py");
        for n in 0..40 {
            std::fs::write(&path, PRICE.replace("RATE", &"R".repeat(n + 1))).unwrap();
            index.refresh(Duration::ZERO);
        }
        assert!(index.pieces.len() < 20, "{} pieces", index.pieces.len());
        let shown = index.context("src/orders.py", ORDERS, "", 4000);
        assert_eq!(shown.last().unwrap().0, "src/price.py");
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_file_is_known_by_its_lines_also_while_something_is_typed_into_it() {
        let (root, index) = project("index-file-of");
        let (prefix, suffix) = PRICE.split_at(PRICE.find("    return").unwrap());
        assert_eq!(index.file_of(prefix, suffix), Some("src/price.py"));
        let typed = format!("{prefix}    percent = min(percent, 100)\n    if perc");
        assert_eq!(index.file_of(&typed, suffix), Some("src/price.py"));
        assert_eq!(index.file_of("def compute_discount(x):\n    y = 1\n    z", ""), None);
        assert_eq!(index.file_of("", ""), None);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_large_project_is_indexed_in_seconds_and_asked_in_milliseconds() {
        let root = scratch("index-large");
        let words = ["order", "price", "store", "parse", "token", "buffer", "index", "cursor"];
        let word = |n: usize| words[n % words.len()];
        let function = |file: usize, n: usize| {
            let (a, b, c) = (word(file + n), word(file / 8 + 3 * n), word(n / 2));
            format!(
                "def {a}_{b}_{file}_{n}({c}):\n    {a}_value = read_{b}({c}, {n})\n    \
                 return {a}_value.{c}_of_{}\n\n\n",
                file % 97
            )
        };
        // A tenth of 10,000 files of 10 KB.
        for file in 0..1000 {
            let folder = root.join(format!("part{}", file % 20));
            std::fs::create_dir_all(&folder).unwrap();
            let text: String = (0..100).map(|n| function(file, n)).collect();
            std::fs::write(folder.join(format!("f{file}.py")), text).unwrap();
        }
        let (mut index, begin) = (Index::new(&root), Instant::now());
        index.refresh(Duration::ZERO);
        let build_s = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        let prefix = format!("{}    x = price_token_901_5(", function(3, 4).repeat(10));
        let shown = index.context("part3/f3.py", &prefix, "", 3000);
        let ask_s = begin.elapsed().as_secs_f64();
        eprintln!("{} pieces, {build_s:.2} s, {:.1} ms", index.pieces.len(), 1e3 * ask_s);
        assert!(!shown.is_empty());
        // Generous: the machine may be busy with other tests.
        assert!(build_s < 20.0 && ask_s < 0.2, "{build_s} s to build, {ask_s} s to ask");
        std::fs::remove_dir_all(root).unwrap();
    }
}
