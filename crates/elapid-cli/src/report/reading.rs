//! How far work on many files is: on a terminal a line that moves, elsewhere one every ten seconds.

use super::live::bar;
use super::text::{count, duration};
use indicatif::{ProgressBar, ProgressDrawTarget};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Counts documents and bytes, of many threads at once.
pub struct Reading {
    kind: &'static str,
    n_all: u64,
    n_done: AtomicU64,
    n_bytes: AtomicU64,
    begin: Instant,
    shown: Mutex<Instant>,
    bar: ProgressBar,
}

const LINE_EVERY: Duration = Duration::from_secs(10);
const DRAW_EVERY: Duration = Duration::from_millis(200);

impl Reading {
    /// Before the first of `n` documents; `kind` is what is done with them.
    pub fn new(kind: &'static str, n: usize) -> Reading {
        let begin = Instant::now();
        Reading {
            kind,
            n_all: n as u64,
            n_done: AtomicU64::new(0),
            n_bytes: AtomicU64::new(0),
            begin,
            shown: Mutex::new(begin),
            bar: bar(ProgressDrawTarget::stderr(), "{wide_msg}"),
        }
    }

    /// One more document of so many bytes.
    pub fn add(&self, n_bytes: usize) {
        let n_done = self.n_done.fetch_add(1, Ordering::Relaxed) + 1;
        let n_bytes = self.n_bytes.fetch_add(n_bytes as u64, Ordering::Relaxed) + n_bytes as u64;
        let Ok(mut shown) = self.shown.try_lock() else { return };
        let every = if self.bar.is_hidden() { LINE_EVERY } else { DRAW_EVERY };
        if shown.elapsed() < every {
            return;
        }
        *shown = Instant::now();
        let (kind, n_all) = (self.kind, self.n_all);
        let elapsed = self.begin.elapsed();
        let rate = n_bytes as f64 / elapsed.as_secs_f64();
        let left = elapsed.mul_f64(n_all.saturating_sub(n_done) as f64 / n_done as f64);
        let text = format!(
            "{kind:<8}{n_done} of {n_all} documents, {}B, {}B/s, {} left",
            count(n_bytes as f64),
            count(rate),
            duration(left.as_secs_f64())
        );
        match self.bar.is_hidden() {
            true => eprintln!("{text}"),
            false => self.bar.set_message(text),
        }
    }
}
