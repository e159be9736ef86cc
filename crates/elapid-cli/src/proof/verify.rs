//! A certificate against the files that it names, and its figures measured again.

use super::certificate::{self, Certificate, HELD_OUT, HeldOutFacts, Pair, Sealed};
use super::measure::{Completed, Subject, Time, bits_per_byte, by_file, places};
use crate::report::Done;
use elapid::{DocScore, Document, compare};
use std::path::{Path, PathBuf};

/// How far a figure may be off on another machine.
const TOLERANCE: f64 = 1e-4;

/// What was found.
pub struct Verified {
    pub certificate: Certificate,
    /// In words, each naming what differs; none where all holds.
    pub differences: Vec<String>,
    /// Whether every figure that was measured again has the same bits.
    pub is_exact: bool,
}

/// Checks hashes, and measures again where they hold.
pub fn verify(path: &Path, base: Option<&Path>, n_threads: usize) -> Done<Verified> {
    let (certificate, sealed, run) = Certificate::read(path)?;
    let base = base.unwrap_or(&certificate.base.path).to_path_buf();
    let mut check = Check { certificate: &certificate, differences: Vec::new(), is_exact: true };
    if sealed == Sealed::Broken {
        check.differences.push("certificate.json: its hash is not that of its contents".into());
    }
    if check.hashes(&run, &base)? {
        check.figures(&run, &base, n_threads)?;
    }
    let Check { differences, is_exact, .. } = check;
    Ok(Verified { certificate, differences, is_exact })
}

struct Check<'a> {
    certificate: &'a Certificate,
    differences: Vec<String>,
    is_exact: bool,
}

impl Check<'_> {
    /// Whether the files are those that were measured.
    fn hashes(&mut self, run: &Path, base: &Path) -> Done<bool> {
        let Certificate { base: named, adapter, model, training, held_out, .. } = self.certificate;
        let list = certificate::list_hash(&training.documents);
        if list != training.hash {
            self.differences.push("training.documents: the list is not that of its hash".into());
        }
        let files: [(&str, PathBuf, &String); 3] = [
            ("base", base.to_path_buf(), &named.hash),
            ("adapter", run.join(model), &adapter.hash),
            ("held_out", run.join(HELD_OUT), &held_out.hash),
        ];
        let mut are_same = true;
        for (name, path, want) in files {
            if certificate::hash(&path)? != *want {
                let shown = path.display();
                let text = format!("{name}: {shown} is not what was measured: it has another hash");
                self.differences.push(text);
                are_same = false;
            }
        }
        Ok(are_same)
    }

    fn figures(&mut self, run: &Path, base: &Path, n_threads: usize) -> Done<()> {
        let held_out = certificate::stored(run)?;
        let files: Vec<String> = held_out.iter().map(|new| new.file.clone()).collect();
        let documents: Vec<Document> = held_out.into_iter().map(|new| new.document).collect();
        let result = run.join(&self.certificate.model);
        let (model, adapter) = match self.certificate.adapter.kind.as_str() {
            "full" => (result.as_path(), None),
            _ => (base, Some(result.as_path())),
        };
        let before = self.measure(Subject::open(base, None, n_threads)?, &documents)?;
        let after = self.measure(Subject::open(model, adapter, n_threads)?, &documents)?;
        let [old, new] = [&before, &after].map(|one| by_file(&files, &one.scores));
        let found = compare(&new, &old)?;
        self.held_out(&HeldOutFacts::of(&old, &new, &found));
        self.same("verdict", &self.certificate.verdict, &found.verdict.to_string());
        if let Some(Pair { before: old, after: new }) = self.certificate.completion {
            self.completed("completion.before", old, before.completed);
            self.completed("completion.after", new, after.completed);
        }
        if let Some(neutral) = self.certificate.neutral {
            let Pair { before: old, after: new } = neutral.bits_per_byte;
            self.figure("neutral.bits_per_byte.before", old, before.neutral.unwrap_or(f64::NAN));
            self.figure("neutral.bits_per_byte.after", new, after.neutral.unwrap_or(f64::NAN));
        }
        Ok(())
    }

    fn measure(&self, mut subject: Subject, documents: &[Document]) -> Done<Measured> {
        let scores = subject.score(documents, Time::Any)?;
        let completed = match self.certificate.completion {
            None => Completed::default(),
            Some(Pair { after, .. }) => {
                let places = places(documents, self.certificate.seed);
                let n = after.n_places.min(places.len());
                Completed::of(&subject.complete(&places[..n], Time::Any)?)
            }
        };
        let neutral = match self.certificate.neutral {
            None => None,
            Some(neutral) => {
                let documents = super::neutral();
                let n = neutral.n_documents.min(documents.len());
                Some(bits_per_byte(&subject.score(&documents[..n], Time::Any)?))
            }
        };
        Ok(Measured { scores, completed, neutral })
    }

    fn held_out(&mut self, now: &HeldOutFacts) {
        let then = &self.certificate.held_out;
        self.same("held_out.n_bytes", &then.n_bytes, &now.n_bytes);
        let names = |facts: &HeldOutFacts| -> Vec<(String, usize)> {
            facts.files.iter().map(|file| (file.name.clone(), file.n_bytes)).collect()
        };
        if names(then) != names(now) {
            self.differences.push("held_out.files: other names or bytes".into());
            return;
        }
        for (then, now) in then.files.iter().zip(&now.files) {
            let name = &then.name;
            self.figure(
                &format!("held_out.files, {name}, before"),
                then.cost.before,
                now.cost.before,
            );
            self.figure(&format!("held_out.files, {name}, after"), then.cost.after, now.cost.after);
        }
        let (old, new) = (then.bits_per_byte, now.bits_per_byte);
        self.figure("held_out.bits_per_byte.before", old.before, new.before);
        self.figure("held_out.bits_per_byte.after", old.after, new.after);
        self.figure("held_out.gain", then.gain, now.gain);
        match (then.interval, now.interval) {
            (Some(then), Some(now)) => {
                self.figure("held_out.interval, low", then.0, now.0);
                self.figure("held_out.interval, high", then.1, now.1);
            }
            (then, now) => self.same("held_out.interval", &then, &now),
        }
    }

    fn figure(&mut self, name: &str, then: f64, now: f64) {
        // Reading a number may change its last digit.
        self.is_exact &= (then - now).abs() <= 4.0 * f64::EPSILON * then.abs();
        // A gain is a difference of figures of about one.
        let is_close = (then - now).abs() <= TOLERANCE * then.abs().max(now.abs()).max(1e-2);
        if !is_close {
            self.differences.push(format!("{name}: {then} in the certificate, {now} measured"));
        }
    }

    fn same<T: PartialEq + std::fmt::Debug>(&mut self, name: &str, then: &T, now: &T) {
        if then != now {
            self.differences.push(format!("{name}: {then:?} in the certificate, {now:?} measured"));
        }
    }

    /// On another machine one place may turn out otherwise.
    fn completed(&mut self, name: &str, then: Completed, now: Completed) {
        let counts = |one: Completed| [one.line, one.two_lines, one.fim.unwrap_or(0)];
        let is_close =
            counts(then).into_iter().zip(counts(now)).all(|(then, now)| then.abs_diff(now) <= 1);
        self.is_exact &= then == now;
        let own = &self.certificate.machine.cpu;
        let is_here = crate::machine::cpu().is_some_and(|cpu| cpu == *own);
        if then.n_places != now.n_places || !is_close || is_here && then != now {
            self.same(name, &then, &now);
        }
    }
}

struct Measured {
    scores: Vec<DocScore>,
    completed: Completed,
    neutral: Option<f64>,
}
