//! What commands share: how they fail, threads, and how numbers are written for people.

use elapid::error::Error;
use std::cell::RefCell;
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::Instant;

/// A failure in words, with what to do next.
#[derive(Debug)]
pub struct Failure(String);

/// The result of a command.
pub type Done<T> = Result<T, Failure>;

impl Failure {
    pub fn new(problem: impl Display, hint: &str) -> Failure {
        Failure(format!("{problem}\n\nhint: {hint}"))
    }

    /// With more to its hint.
    pub fn with_more(&self, hint: &str) -> Failure {
        Failure(format!("{self}; {hint}"))
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<elapid::error::Error> for Failure {
    fn from(error: elapid::error::Error) -> Failure {
        Failure(error.to_string())
    }
}

/// One line to stdout. A reader that has gone away (`| head`) ends the program quietly.
pub fn line(text: impl Display) {
    use std::io::{ErrorKind, Write};
    if let Err(error) = writeln!(std::io::stdout(), "{text}") {
        let code = if error.kind() == ErrorKind::BrokenPipe { 0 } else { 1 };
        std::process::exit(code);
    }
}

/// A whole number in this range, for a flag.
pub fn between(low: u64, high: u64) -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(low..=high)
}

/// Threads to use when none are asked for.
pub fn n_threads_default() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// 21.4 M, 3.1 k, 12.
pub fn count(n: f64) -> String {
    match n {
        n if n >= 1e9 => format!("{:.2} G", n / 1e9),
        n if n >= 1e6 => format!("{:.1} M", n / 1e6),
        n if n >= 1e4 => format!("{:.1} k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

/// Bytes in MiB.
pub fn mebibytes(n: f64) -> String {
    format!("{:.1} MiB", n / (1 << 20) as f64)
}

/// How far long work is, on a terminal: one line on stderr that is written again and again.
pub struct Progress {
    kind: &'static str,
    n_bytes: u64,
    shown: Option<RefCell<Shown>>,
}

struct Shown {
    n_done: u64,
    begin: Instant,
    last: Instant,
    any: bool,
}

impl Progress {
    /// `n_bytes` in all, nearly.
    pub fn new(kind: &'static str, n_bytes: u64) -> Progress {
        let now = Instant::now();
        let shown = Shown { n_done: 0, begin: now, last: now, any: false };
        let is_terminal = std::io::stderr().is_terminal();
        Progress { kind, n_bytes, shown: is_terminal.then(|| RefCell::new(shown)) }
    }

    /// Counts what goes through to `sink`.
    pub fn through<'a>(
        &'a self,
        sink: &'a mut (dyn FnMut(&[u8]) -> Result<(), Error> + 'a),
    ) -> impl FnMut(&[u8]) -> Result<(), Error> + 'a {
        move |bytes| {
            self.add(bytes.len() as u64);
            sink(bytes)
        }
    }

    fn add(&self, n_bytes: u64) {
        let Some(shown) = &self.shown else { return };
        let mut shown = shown.borrow_mut();
        shown.n_done += n_bytes;
        let now = Instant::now();
        if (now - shown.last).as_millis() < 200 {
            return;
        }
        (shown.last, shown.any) = (now, true);
        let (n_done, total) = (shown.n_done as f64, self.n_bytes.max(shown.n_done) as f64);
        let seconds = (now - shown.begin).as_secs_f64();
        let left = (total - n_done) * seconds / n_done.max(1.0);
        let (done, of, percent) = (mebibytes(n_done), mebibytes(total), 100.0 * n_done / total);
        let text = format!("{:<8}{done} of {of}  {percent:.0}%  eta {left:.0} s", self.kind);
        let _ = write!(std::io::stderr(), "\r{text}\x1b[K");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.as_ref().is_some_and(|shown| shown.borrow().any) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
