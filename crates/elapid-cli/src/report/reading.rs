//! How far work on many files is: on a terminal a line that moves, elsewhere one in five seconds.

use super::live::bar;
use super::text::{count, duration};
use indicatif::{ProgressBar, ProgressDrawTarget};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Counts documents and bytes, of many threads at once.
pub struct Reading {
    kind: &'static str,
    /// What is counted.
    unit: &'static str,
    n_all: Option<u64>,
    n_done: AtomicU64,
    n_bytes: AtomicU64,
    begin: Instant,
    shown: Mutex<Instant>,
    bar: ProgressBar,
}

const LINE_EVERY: Duration = Duration::from_secs(5);
const DRAW_EVERY: Duration = Duration::from_millis(200);

impl Reading {
    /// Before the first of `n` documents, if that is known; `kind` is what is done with them.
    pub fn new(kind: &'static str, n: Option<usize>) -> Reading {
        let begin = Instant::now();
        Reading {
            kind,
            unit: "documents",
            n_all: n.map(|n| n as u64),
            n_done: AtomicU64::new(0),
            n_bytes: AtomicU64::new(0),
            begin,
            shown: Mutex::new(begin),
            bar: bar(ProgressDrawTarget::stderr(), "{wide_msg}"),
        }
    }

    /// Before work on what is no document and is not known to be how much.
    pub fn of(kind: &'static str, unit: &'static str) -> Reading {
        Reading { unit, ..Reading::new(kind, None) }
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
        let (kind, unit, elapsed) = (self.kind, self.unit, self.begin.elapsed().as_secs_f64());
        let [bytes, rate] = [1.0, elapsed].map(|time| count(n_bytes as f64 / time));
        let mut text = format!("{kind:<8}{n_done} {unit}");
        if n_bytes > 0 {
            text += &format!(", {bytes}B, {rate}B/s");
        }
        if let Some(n_all) = self.n_all {
            let left = duration(elapsed * n_all.saturating_sub(n_done) as f64 / n_done as f64);
            text += &format!("; {n_all} in all, {left} left");
        }
        match self.bar.is_hidden() {
            true => eprintln!("{text}"),
            false => self.bar.set_message(text),
        }
    }
}

/// Does something that cannot say how far it is: after a while a line says that it is under way.
pub fn waiting<T>(kind: &str, what: &str, work: impl FnOnce() -> T) -> T {
    std::thread::scope(|scope| {
        let (done, is_done) = channel::<()>();
        scope.spawn(move || {
            let begin = Instant::now();
            while is_done.recv_timeout(LINE_EVERY) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{kind:<8}{what}: {}", duration(begin.elapsed().as_secs_f64()));
            }
        });
        let found = work();
        drop(done);
        found
    })
}
