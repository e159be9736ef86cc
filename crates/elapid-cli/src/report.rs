//! What commands share: how they fail, threads, and how numbers are written for people.

use elapid::Error;
use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// A failure in words, with what to do next.
#[derive(Debug)]
pub struct Failure {
    /// What is wrong.
    pub problem: String,
    /// What to do.
    pub hint: String,
}

/// The result of a command.
pub type Done<T> = Result<T, Failure>;

impl Failure {
    pub fn new(problem: impl Display, hint: &str) -> Failure {
        Failure { problem: problem.to_string(), hint: hint.into() }
    }

    /// With more to its hint.
    pub fn with_more(&self, hint: &str) -> Failure {
        Failure::new(&self.problem, &format!("{}; {hint}", self.hint))
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}\n\nhint: {}", self.problem, self.hint)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::new(&error, &error.hint())
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
    is_terminal: bool,
    begin: Instant,
    last: Option<Instant>,
}

impl Progress {
    pub fn new(kind: &'static str) -> Progress {
        let is_terminal = std::io::stderr().is_terminal();
        Progress { kind, is_terminal, begin: Instant::now(), last: None }
    }

    /// Bytes done, of all.
    pub fn update(&mut self, done: u64, total: u64) {
        let now = Instant::now();
        let is_soon = now - self.last.unwrap_or(self.begin) < Duration::from_millis(200);
        if !self.is_terminal || is_soon {
            return;
        }
        self.last = Some(now);
        let (done, total) = (done as f64, total as f64);
        let left = (total - done) * (now - self.begin).as_secs_f64() / done.max(1.0);
        let (n_done, n_total, percent) = (mebibytes(done), mebibytes(total), 100.0 * done / total);
        let text = format!("{:<8}{n_done} of {n_total}  {percent:.0}%  eta {left:.0} s", self.kind);
        let _ = write!(std::io::stderr(), "\r{text}\x1b[K");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.last.is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}
