//! The certificate of an adapted model: what was measured, on what, with what, and all hashes.
//!
//! ```text
//! certificate.json   the figures; its last line is a hash of all before it
//! certificate.html   the same to read
//! held-out.jsonl     the texts that were measured, one document a line
//! ```
//!
//! Hashes are BLAKE3: of a file its bytes, of a directory the names and hashes of its files. What a
//! certificate certifies is the model that lies beside it, trained on the tree as it was before the
//! held-out text was written.

use crate::files;
use crate::proof::measure::Completed;
use crate::proof::memory::Memory;
use crate::report::{Done, Failure};
use crate::source::history::New;
use elapid::{Comparison, DocScore, Document, Part};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

pub const FILE: &str = "certificate.json";
const PAGE: &str = "certificate.html";
pub const HELD_OUT: &str = "held-out.jsonl";

/// The first version of what follows.
pub const FORMAT: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Certificate {
    pub format: u32,
    /// RFC 3339.
    pub created: String,
    /// "better", "worse", "no difference" or "too little to tell".
    pub verdict: String,
    pub verdict_text: String,
    pub program: Program,
    pub machine: Machine,
    pub seed: u64,
    pub base: Base,
    pub adapter: AdapterFacts,
    /// The result, relative to the run: "adapter" or "model".
    pub model: String,
    pub split: SplitFacts,
    pub training: TrainingFacts,
    pub held_out: HeldOutFacts,
    pub completion: Option<Pair<Completed>>,
    pub neutral: Option<Neutral>,
    /// What a probe for memorised text found, where there was one.
    pub memory: Option<Pair<Memory>>,
    pub times: Times,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    pub version: String,
    pub hash: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub cpu: String,
    pub threads: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Base {
    pub name: String,
    pub path: PathBuf,
    pub hash: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdapterFacts {
    /// "lora" or "full".
    pub kind: String,
    pub method: String,
    pub hash: String,
    /// How far it was taken back toward the base; what lies in the files has it already.
    pub scaled_by: f64,
    /// The run whose result it continued.
    pub continues: Option<PathBuf>,
}

/// How held-out text was chosen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SplitFacts {
    pub text: String,
    /// The commit whose tree was learned, and the newest one.
    pub commit: Option<String>,
    pub head: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainingFacts {
    pub n_documents: usize,
    pub n_bytes: usize,
    /// Documents that were left out because held-out text is nearly the same.
    pub n_near_copies: usize,
    /// Of the list below.
    pub hash: String,
    pub documents: Vec<Learned>,
}

/// A document that was learned from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Learned {
    pub name: String,
    pub hash: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pair<T> {
    pub before: T,
    pub after: T,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HeldOutFacts {
    pub file: String,
    pub hash: String,
    pub n_documents: usize,
    /// Documents that there was no time for.
    pub n_not_measured: usize,
    pub n_bytes: usize,
    pub bits_per_byte: Pair<f64>,
    /// Fewer bits per byte than before, and its 95% interval over files.
    pub gain: f64,
    pub interval: Option<(f64, f64)>,
    /// What an n-gram model of the training documents gets on the same bytes.
    pub ngram: Option<f64>,
    pub files: Vec<FileFacts>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileFacts {
    pub name: String,
    pub n_bytes: usize,
    /// In bits.
    pub cost: Pair<f64>,
}

/// Bits per byte of the fixed neutral set.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Neutral {
    pub n_documents: usize,
    pub bits_per_byte: Pair<f64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    pub n_steps: u64,
    pub training_s: f64,
    pub proof_s: f64,
    pub total_s: f64,
}

/// A held-out document as it is stored.
#[derive(Serialize, Deserialize)]
struct Stored {
    file: String,
    name: String,
    parts: Vec<StoredPart>,
}

#[derive(Serialize, Deserialize)]
struct StoredPart {
    text: String,
    scored: bool,
}

/// Writes held-out documents into a run.
pub fn store(run: &Path, held_out: &[New]) -> Done<()> {
    files::write(&run.join(HELD_OUT), |sink| {
        held_out.iter().try_for_each(|New { file, document }| {
            let part = |part: &Part| StoredPart { text: part.text.clone(), scored: part.learned };
            let parts = document.parts.iter().map(part).collect();
            let stored = Stored { file: file.clone(), name: document.name.clone(), parts };
            sink(serde_json::json!(stored).to_string().as_bytes())?;
            sink(b"\n")
        })
    })?;
    Ok(())
}

/// Reads them again.
pub fn stored(run: &Path) -> Done<Vec<New>> {
    let path = run.join(HELD_OUT);
    let text = files::read_text(&path)?;
    let read = |line: &str| {
        let Stored { file, name, parts } = serde_json::from_str(line).map_err(|error| {
            let hint = "restore the file, or make a new certificate with `elapid adapt`";
            Failure::new(format!("{}: {error}", path.display()), hint)
        })?;
        let part = |StoredPart { text, scored }| Part { text, learned: scored, special: false };
        let parts = parts.into_iter().map(part).collect();
        let language = elapid::language_of_path(&file);
        Ok(New { document: Document { name, language, parts }, file })
    };
    text.lines().map(read).collect()
}

impl HeldOutFacts {
    /// Of the scores of files before and after.
    pub fn of(before: &[DocScore], after: &[DocScore], found: &Comparison) -> HeldOutFacts {
        let bits = |score: &DocScore| score.nll / std::f64::consts::LN_2;
        let file = |(before, after): (&DocScore, &DocScore)| FileFacts {
            name: after.name.clone(),
            n_bytes: after.n_bytes,
            cost: Pair { before: bits(before), after: bits(after) },
        };
        HeldOutFacts {
            file: HELD_OUT.into(),
            n_bytes: after.iter().map(|score| score.n_bytes).sum(),
            bits_per_byte: Pair {
                before: super::measure::bits_per_byte(before),
                after: super::measure::bits_per_byte(after),
            },
            gain: found.gain,
            interval: found.interval.map(|interval| (interval.low, interval.high)),
            files: before.iter().zip(after).map(file).collect(),
            ..HeldOutFacts::default()
        }
    }
}

/// The hash of a list of documents.
pub fn list_hash(list: &[Learned]) -> String {
    let mut hasher = blake3::Hasher::new();
    for Learned { name, hash } in list {
        hasher.update(format!("{hash} {name}\n").as_bytes());
    }
    hasher.finalize().to_string()
}

/// The hash of a file, or of the names and hashes of the files under a directory.
pub fn hash(path: &Path) -> Done<String> {
    let fail = |source| elapid::Error::Read { path: path.into(), source };
    if !path.is_dir() {
        let mut hasher = blake3::Hasher::new();
        let file = std::fs::File::open(path).map_err(fail)?;
        hasher.update_reader(file).map_err(fail)?;
        return Ok(hasher.finalize().to_string());
    }
    let entries = std::fs::read_dir(path).map_err(fail)?;
    let mut names = entries
        .map(|entry| entry.map(|entry| entry.file_name().to_string_lossy().into_owned()))
        .collect::<Result<Vec<_>, _>>()
        .map_err(fail)?;
    names.sort();
    let one = |name: String| Ok(Learned { hash: hash(&path.join(&name))?, name });
    Ok(list_hash(&names.into_iter().map(one).collect::<Done<Vec<_>>>()?))
}

/// What begins the last line.
const SEAL: &str = ",\n  \"hash\": \"";
const END: &str = "\n}";

impl Certificate {
    /// Writes it into a run, and its page.
    pub fn write(&self, run: &Path) -> Done<()> {
        let bug = |error: &dyn std::fmt::Display| Failure::new(error, "this is a bug in Elapid");
        let text = serde_json::to_string_pretty(self).map_err(|error| bug(&error))?;
        let seal = blake3::hash(text.as_bytes());
        let body = text.strip_suffix(END).ok_or_else(|| bug(&"no object"))?;
        files::write_bytes(&run.join(PAGE), self.html().map_err(|error| bug(&error))?.as_bytes())?;
        // Last: a run with a certificate is finished.
        let text = format!("{body}{SEAL}{seal}\"{END}\n");
        Ok(files::write_bytes(&run.join(FILE), text.as_bytes())?)
    }

    /// That of a run, by the directory or the file, with the directory.
    pub fn read(path: &Path) -> Done<(Certificate, Sealed, PathBuf)> {
        let file = if path.is_dir() { path.join(FILE) } else { path.into() };
        let text = files::read_text(&file)?;
        let certificate = serde_json::from_str(&text).map_err(|error| {
            let hint = "give a certificate.json, or the run directory that holds it";
            Failure::new(format!("{}: {error}", file.display()), hint)
        })?;
        let is_intact = text.rsplit_once(SEAL).is_some_and(|(body, rest)| {
            let seal = blake3::hash(format!("{body}{END}").as_bytes());
            rest == format!("{seal}\"{END}\n")
        });
        let sealed = if is_intact { Sealed::Intact } else { Sealed::Broken };
        let run = file.parent().map(Path::to_path_buf).unwrap_or_default();
        Ok((certificate, sealed, run))
    }

    fn html(&self) -> Result<String, minijinja::Error> {
        let mut environment = minijinja::Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.add_filter("fixed", |value: f64, digits: usize| format!("{value:.digits$}"));
        environment.add_template(PAGE, include_str!("certificate.html"))?;
        environment.get_template(PAGE)?.render(self)
    }
}

/// Whether the certificate is as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sealed {
    Intact,
    Broken,
}
