//! What commands share: how they fail, threads, and how numbers are written for people.

use std::fmt::Display;

/// A failure in words, with what to do next.
#[derive(Debug)]
pub struct Failure(String);

/// The result of a command.
pub type Done<T> = Result<T, Failure>;

impl Failure {
    pub fn new(problem: impl Display, hint: &str) -> Failure {
        Failure(format!("{problem}\n\nhint: {hint}"))
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
