//! What commands tell people: lines, numbers, failures, and what a training run leaves behind.
//!
//! Not here: the loop that calls these, checkpoints, and what is measured.

mod chart;
pub mod data;
pub mod events;
pub mod live;
pub mod metrics;
pub mod page;
pub mod reading;
pub mod samples;
pub mod text;

pub use text::{beyond_trained, count, mebibytes};

use elapid::Error;
use std::fmt::Display;
use std::path::Path;

/// A failure in words, with what to do next.
#[derive(Debug)]
pub struct Failure {
    pub problem: String,
    pub hint: String,
}

pub type Done<T> = Result<T, Failure>;

impl Failure {
    pub fn new(problem: impl Display, hint: &str) -> Failure {
        Failure { problem: problem.to_string(), hint: hint.into() }
    }

    /// The path of an argument that is to be `what`, if there is anything at it.
    pub fn unless_there(path: &Path, what: &str) -> Done<()> {
        match path.exists() {
            true => Ok(()),
            false => {
                let problem = format!("there is nothing at {}", path.display());
                Err(Failure::new(problem, &format!("give {what}")))
            }
        }
    }

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

pub fn line(text: impl Display) {
    print(format!("{text}\n"));
}

/// Text to stdout, at once. A reader that has gone away (`| head`) ends the program quietly.
pub fn print(text: impl AsRef<str>) {
    use std::io::{ErrorKind, Write};
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(text.as_ref().as_bytes()).and_then(|()| out.flush()) {
        std::process::exit(i32::from(error.kind() != ErrorKind::BrokenPipe));
    }
}

/// A whole number in this range, for a flag.
pub fn between(low: u64, high: u64) -> clap::builder::RangedU64ValueParser<usize> {
    clap::builder::RangedU64ValueParser::new().range(low..=high)
}

/// A number and its unit, by the factors that units have.
pub fn scaled(text: &str, factor_of: fn(&str) -> Option<f64>) -> Result<u64, String> {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let number = number.parse::<f64>().ok().zip(factor_of(&unit.trim().to_ascii_lowercase()));
    let number = number.map(|(number, factor)| number * factor).filter(|x| *x >= 1.0);
    number.map(|x| x as u64).ok_or_else(|| format!("{text} is no amount: write 800M or 1.5G"))
}

/// Bytes with a unit: 800M, 4G, 1.5GiB.
pub fn size(text: &str) -> Result<u64, String> {
    scaled(text, |unit| {
        let unit = unit.trim_end_matches("ib").trim_end_matches('b');
        let place = ["", "k", "m", "g"].iter().position(|name| *name == unit);
        place.map(|n| 1024f64.powi(n as i32))
    })
}

/// Threads to use when none are asked for.
pub fn n_threads_default() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

fn cannot_write(path: &Path, source: std::io::Error) -> Failure {
    Error::Write { path: path.into(), source }.into()
}

/// An empty directory of its own for a test.
#[cfg(test)]
pub fn scratch(name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("elapid-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).expect("the directory for temporary files takes one more");
    dir
}
