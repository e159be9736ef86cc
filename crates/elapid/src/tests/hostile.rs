//! Hostile files: every seed of `lab/fuzz/corpus`, and thousands of changes of them, through the
//! same functions that the fuzz targets run.
//!
//! A panic, memory out of proportion, an error without a hint and a broken promise are failures;
//! each is reported with target, seed and number of the change. To see one again, or to search
//! longer than a test may:
//!
//! ```text
//! HOSTILE_FIRST=4711 HOSTILE_COUNT=1 cargo test -p elapid --test hostile -- chat
//! ```
//!
//! `HOSTILE_WRITE=1` writes the corpus anew. Not here: larger files, and those made by hand
//! (`malformed.rs`).

// tidy: allow unsafe (an allocator that counts can only be written so)

use super::seeds;
use crate::fuzz_targets as targets;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::{Duration, Instant};

use super::mutate::{Kind, Seed, mutate};
use crate::error::Result;

/// Counts the bytes that this thread holds.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    /// Where the last panic of this thread was, while it is one of ours.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

fn count(n_bytes: isize) {
    // A thread that ends has no counters any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + n_bytes);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is handed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, n_bytes: usize) -> *mut u8 {
        // Old and new may be there at once.
        count(n_bytes as isize);
        count(-(layout.size() as isize));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.realloc(place, layout, n_bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Distinct failures after which there is no point in going on.
const N_FAILURES_MAX: usize = 10;
/// Longest message: it may show a value, not a file.
const MESSAGE_BYTES_MAX: usize = 4 << 10;

struct Target {
    name: &'static str,
    kind: Kind,
    run: fn(&[u8]) -> Result<()>,
    /// Changes in a test, so that all tests together take under a minute on two cores.
    n_changes: u64,
    /// Bytes that may be held at once: so many, and so many per byte of the file.
    bytes_max: (usize, usize),
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn corpus(target: &Target) -> Vec<Seed> {
    let dir = root().join("lab/fuzz/corpus").join(target.name);
    let mut paths: Vec<_> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let seed = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        Seed::new(target.kind, name, std::fs::read(path).unwrap())
    };
    paths.iter().map(seed).collect()
}

/// A panic inside a target is kept, not printed: there may be thousands.
fn keep_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !IS_QUIET.get() {
                return usual(info);
            }
            PANIC.set(Some(info.to_string()));
        }));
    });
}

/// What came of one file.
struct Outcome {
    result: std::result::Result<Result<()>, String>,
    /// A panic that did not come out: the engine caught one of a crate it uses.
    caught: Option<String>,
    n_bytes_peak: usize,
    time: Duration,
}

fn run(target: &Target, data: &[u8]) -> Outcome {
    keep_panics();
    PANIC.take();
    IS_QUIET.set(true);
    let held = HELD.get();
    PEAK.set(held);
    let begin = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(|| (target.run)(data)));
    let time = begin.elapsed();
    let n_bytes_peak = (PEAK.get() - held).unsigned_abs();
    IS_QUIET.set(false);
    let panic = PANIC.take();
    let (result, caught) = match result {
        Ok(result) => (Ok(result), panic),
        Err(_) => (Err(panic.unwrap_or_default()), None),
    };
    Outcome { result, caught, n_bytes_peak, time }
}

/// What is wrong with an outcome, in a line that is the same for the same bug.
fn problem(target: &Target, data: &[u8], outcome: &Outcome) -> Option<String> {
    let (fixed, per_byte) = target.bytes_max;
    let n_bytes_max = fixed + per_byte * data.len();
    match &outcome.result {
        Err(panic) => return Some(panic.replace('\n', " ")),
        Ok(Err(error)) => {
            let text = error.report();
            let (head, hint) = text.split_once("\n\nhint: ").unwrap_or_default();
            if head.is_empty() || hint.is_empty() {
                return Some(format!("an error without a hint: {text}"));
            }
            if text.len() > MESSAGE_BYTES_MAX {
                let head: String = text.chars().take(100).collect();
                return Some(format!("an error of {} bytes: {head}", text.len()));
            }
        }
        Ok(Ok(())) => {}
    }
    let n = outcome.n_bytes_peak;
    (n > n_bytes_max).then(|| format!("{n} bytes held for a file of {}", data.len()))
}

/// The same for every case of one bug, in which only numbers and values differ.
fn kind_of(problem: &str) -> String {
    problem.chars().filter(|c| !c.is_ascii_digit()).take(120).collect()
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn expect_survival(target: &Target) {
    let seeds = corpus(target);
    let mut failures: BTreeMap<String, String> = BTreeMap::new();
    for seed in &seeds {
        let outcome = run(target, &seed.data);
        let is_bad = seed.name.starts_with("bad-");
        match &outcome.result {
            Ok(Ok(())) => assert!(!is_bad, "{}: {} is accepted", target.name, seed.name),
            Ok(Err(error)) => assert!(is_bad, "{}: {}: {error}", target.name, seed.name),
            Err(_) => {}
        }
        if let Some(problem) = problem(target, &seed.data, &outcome) {
            failures.insert(problem, seed.name.clone());
        }
    }
    let (first, n) = (setting("HOSTILE_FIRST", 0), setting("HOSTILE_COUNT", target.n_changes));
    let (mut n_accepted, mut slowest, mut largest) = (0, (Duration::ZERO, 0), (0, 0, 0));
    let mut caught: BTreeMap<String, u64> = BTreeMap::new();
    for number in first..first + n {
        let (idx, data) = mutate(target.name, target.kind, &seeds, number);
        let outcome = run(target, &data);
        n_accepted += u64::from(matches!(outcome.result, Ok(Ok(()))));
        slowest = slowest.max((outcome.time, number));
        if let Some(panic) = &outcome.caught {
            caught.entry(kind_of(panic)).or_insert(number);
        }
        largest = largest.max((outcome.n_bytes_peak, data.len(), number));
        if let Some(problem) = problem(target, &data, &outcome) {
            let (name, seed) = (target.name, &seeds[idx].name);
            let place = format!("target {name}, seed {seed}, change {number}");
            failures.entry(kind_of(&problem)).or_insert(format!("{place}: {problem}"));
        }
        if failures.len() >= N_FAILURES_MAX {
            break;
        }
    }
    let (time, number) = slowest;
    println!("{}: {n} changes, {n_accepted} accepted", target.name);
    println!("{}: slowest {time:?}, change {number}", target.name);
    let (n_bytes, n_file, number) = largest;
    println!("{}: {n_bytes} bytes held for {n_file}, change {number}", target.name);
    for (panic, number) in caught {
        println!("{}: caught inside, change {number}: {panic:?}", target.name);
    }
    let list: Vec<String> = failures.into_values().collect();
    assert!(list.is_empty(), "{} failures:\n{}", list.len(), list.join("\n"));
    // Changes that are all refused at the door, or all harmless, test nothing.
    let is_telling = n < target.n_changes || (n / 200..n * 199 / 200).contains(&n_accepted);
    assert!(is_telling, "{}: {n_accepted} of {n} changes accepted", target.name);
}

#[test]
fn no_gguf_file_brings_it_down() {
    expect_survival(&Target {
        name: "gguf",
        kind: Kind::Gguf,
        run: targets::gguf,
        n_changes: 100_000,
        // A config may list as many layers as `config/check.rs` allows before they are
        // compared with the tensors that are there.
        bytes_max: (32 << 20, 32),
    });
}

#[test]
fn no_safetensors_file_brings_it_down() {
    expect_survival(&Target {
        name: "safetensors",
        kind: Kind::SafeTensors,
        run: targets::safetensors,
        n_changes: 200_000,
        bytes_max: (32 << 10, 16),
    });
}

#[test]
fn no_torch_file_brings_it_down() {
    expect_survival(&Target {
        name: "torch",
        kind: Kind::Gguf,
        run: targets::torch,
        n_changes: 200_000,
        // An instruction of one byte may make a dict.
        bytes_max: (32 << 10, 128),
    });
}

#[test]
fn no_config_brings_it_down() {
    expect_survival(&Target {
        name: "config",
        kind: Kind::Json,
        run: targets::config,
        n_changes: 40_000,
        bytes_max: (4 << 20, 32),
    });
}

#[test]
fn no_tokenizer_brings_it_down() {
    expect_survival(&Target {
        name: "tokenizer",
        kind: Kind::Json,
        run: targets::tokenizer,
        n_changes: 30_000,
        // Compiled expressions are large.
        bytes_max: (16 << 20, 32),
    });
}

#[test]
fn no_adapter_brings_it_down() {
    expect_survival(&Target {
        name: "adapter",
        kind: Kind::Json,
        run: targets::adapter,
        n_changes: 100_000,
        bytes_max: (64 << 10, 16),
    });
}

#[test]
fn no_package_brings_it_down() {
    expect_survival(&Target {
        name: "package",
        kind: Kind::Package,
        run: targets::package,
        n_changes: 100_000,
        bytes_max: (128 << 10, 16),
    });
}

#[test]
fn no_chat_template_brings_it_down() {
    expect_survival(&Target {
        name: "chat",
        kind: Kind::Text,
        run: targets::chat,
        n_changes: 200_000,
        // What a template may write is limited by itself, not by its length.
        bytes_max: (64 << 20, 32),
    });
}

#[test]
fn the_corpus_holds_what_its_maker_makes() {
    let files = seeds::all(&root().join("golden/sets"));
    let corpus = root().join("lab/fuzz/corpus");
    for (target, name, data) in &files {
        let dir = corpus.join(target);
        if setting("HOSTILE_WRITE", 0) == 1 {
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join(name), data).unwrap();
        }
        assert!(dir.join(name).exists(), "{target}/{name} is missing: run with HOSTILE_WRITE=1");
    }
    let n_bytes: usize = files.iter().map(|file| file.2.len()).sum();
    println!("{} files, {n_bytes} bytes", files.len());
}
