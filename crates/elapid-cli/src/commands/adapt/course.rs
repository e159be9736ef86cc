//! The course of an adaptation: measured before, trained, guarded, measured after, certified.
//!
//! Time is divided so that all of it ends within the minutes: what is measured before training
//! takes a bounded share and is cut to it; afterwards the same takes as long, so the end of
//! training is known.

use super::lessons::{Lesson, REPLAY, TREE};
use super::{Adapt, Base, Earlier};
use crate::base;
use crate::hub;
use crate::machine;
use crate::proof::certificate::{self, *};
use crate::proof::guard::{Guarded, On, Outcome};
use crate::proof::measure::{self, Completed, Hit, Place, Subject, Time};
use crate::proof::measure::{bits_per_byte, by_file};
use crate::proof::memory::{self, Memory, N_PROBES, Probe};
use crate::proof::neutral;
use crate::proof::ngram::Ngram;
use crate::report::live::Live;
use crate::report::text::duration_exact;
use crate::report::{Done, line};
use crate::run::config::RunConfig;
use crate::run::{self, Lessons, TRAINED, export_name};
use crate::source::entry::Entry;
use crate::source::history::{self, New};
use crate::source::walk::Walk;
use elapid::{Comparison, DocScore, Document, Method, Verdict, compare};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Shares of the time that measuring before training may take, and the same after it.
const SCORE_SHARE: f64 = 0.08;
const COMPLETE_SHARE: f64 = 0.03;
const NEUTRAL_SHARE: f64 = 0.01;
const ASIDE_SHARE: f64 = 0.01;
/// What is left for everything else after training, and how much longer the same may take then.
const REST_SHARE: f64 = 0.02;
const SLOWER: f64 = 1.25;
/// And for the certificate.
const WRITE_SHARE: f64 = 0.01;
/// Share of the time in which an n-gram model may read the project, and bytes a second.
const NGRAM_SHARE: f64 = 0.01;
const NGRAM_RATE: f64 = 1e6;
/// Share of the training text that the shipped model wrote itself: against forgetting.
const REPLAY_SHARE: f64 = 0.25;

/// Scales that the guard tries, about.
const N_SCALES: f64 = 3.0;

pub struct Task<'a> {
    pub args: &'a Adapt,
    pub base: Base,
    pub dir: PathBuf,
    pub earlier: Option<Earlier>,
    pub minutes: f64,
    pub begin: Instant,
    pub live: Live,
}

/// What is measured.
struct Measured {
    documents: Vec<Document>,
    /// The file of each.
    files: Vec<String>,
    places: Vec<Place>,
    probes: Vec<Probe>,
    neutral: Vec<Document>,
    aside: Vec<Document>,
}

/// How the base measured.
struct Before {
    scores: Vec<DocScore>,
    hits: Vec<Hit>,
    memory: Memory,
    neutral: Option<f64>,
    aside: Option<f64>,
    /// Documents that there was no time for.
    n_not_measured: usize,
    /// Seconds that the same takes after training, and one scale of the guard.
    again_s: f64,
    scale_s: f64,
}

/// How the result measured.
struct After {
    guarded: Guarded,
    scores: Vec<DocScore>,
    hits: Vec<Hit>,
    memory: Memory,
}

impl Task<'_> {
    pub fn run(mut self, lesson: Lesson, walk: Walk) -> Done<ExitCode> {
        let Lesson { training, held_out, split, facts, left_out, changed, .. } = lesson;
        let seed = self.args.seed;
        let (held_out, aside) = measure::set_aside(measure::shuffled(held_out, seed), seed);
        let texts = self.texts(&training, &walk)?;
        let (mut measured, mut before) = self.before(held_out, aside, &texts)?;
        let proof_s = before.again_s + N_SCALES * before.scale_s;
        let total_s = 60.0 * self.minutes;
        let end_s = (total_s * (1.0 - REST_SHARE) - SLOWER * proof_s).max(0.1 * total_s);
        let end = (end_s / 60.0, changed);
        let (config, wishes) = self.args.config(&self.base, self.earlier.as_ref(), end)?;
        let mut training = training;
        let file = self.base.path.file_name();
        if file.is_some_and(|name| *name == *base::file_name()) {
            training.extend(self.replay(&training, &walk)?);
        }
        let walk = Walk { out: Some(self.dir.clone()), ..walk };
        let lessons = Lessons { training, left_out, walk };
        let method = config.method.clone();
        let training_from = self.begin.elapsed();
        let Some(n_steps) = run::learn(config, &self.dir, &wishes, self.begin, lessons)? else {
            return Ok(ExitCode::from(130));
        };
        let training_s = (self.begin.elapsed() - training_from).as_secs_f64();
        let After { guarded, scores, hits, memory } = self.after(&measured, &before, &method)?;
        self.cut(&mut measured, &mut before, scores.len())?;
        let [old, new] = [&before.scores, &scores].map(|one| by_file(&measured.files, one));
        let found = compare(&new, &old)?;
        let total_s = self.begin.elapsed().as_secs_f64();
        let times = Times { n_steps, training_s, proof_s: total_s - training_s, total_s };
        let mut held_out = HeldOutFacts::of(&old, &new, &found);
        held_out.hash = certificate::hash(&self.dir.join(HELD_OUT))?;
        held_out.n_documents = measured.documents.len();
        held_out.n_not_measured = before.n_not_measured;
        held_out.ngram = Some(ngram(&texts, &measured.documents));
        let result = Found { found, guarded, method, times, n_neutral: measured.neutral.len() };
        let certificate = Certificate {
            split,
            training: facts,
            held_out,
            completion: completion(&before.hits, &hits),
            memory: Some(Pair { before: before.memory, after: memory }),
            ..self.certificate(&result, before.neutral)?
        };
        certificate.write(&self.dir)?;
        self.clean();
        self.say(&certificate);
        let is_fine = matches!(result.found.verdict, Verdict::Better | Verdict::TooLittle);
        Ok(if is_fine { ExitCode::SUCCESS } else { ExitCode::from(3) })
    }

    /// Texts that are learned, as many as an n-gram model can read in its share of the time.
    fn texts(&self, training: &[Entry], walk: &Walk) -> Done<Vec<Document>> {
        let mut n_left = 60.0 * self.minutes * NGRAM_SHARE * NGRAM_RATE;
        let mut texts = Vec::new();
        for entry in training {
            n_left -= entry.n_bytes() as f64;
            if n_left < 0.0 && !texts.is_empty() {
                break;
            }
            texts.push(entry.load(walk)?);
        }
        Ok(texts)
    }

    /// Texts of the shipped model's own, a share of all that is read.
    fn replay(&self, training: &[Entry], walk: &Walk) -> Done<Vec<Entry>> {
        let texts = base::replay();
        let entries = history::store(&texts, &self.dir.join(REPLAY), walk)?;
        let n_bytes = |entry: &Entry| entry.n_bytes() as f64;
        let n_own: f64 = training.iter().map(|entry| entry.weight * n_bytes(entry)).sum();
        let n: f64 = entries.iter().map(|pair| n_bytes(&pair.0)).sum();
        let weight = REPLAY_SHARE / (1.0 - REPLAY_SHARE) * n_own / n.max(1.0);
        let mut entries: Vec<Entry> = entries.into_iter().map(|pair| pair.0).collect();
        entries.iter_mut().for_each(|entry| entry.weight = weight);
        Ok(entries)
    }

    fn time(&self, share: f64) -> Time {
        match self.args.steps {
            Some(_) => Time::Any,
            None => Time::Within(Duration::from_secs_f64(60.0 * self.minutes * share)),
        }
    }

    /// Measures the base, and decides by the clock what is measured at all.
    fn before(
        &mut self,
        held_out: Vec<New>,
        aside: Vec<New>,
        texts: &[Document],
    ) -> Done<(Measured, Before)> {
        self.live.line("measure", "the model before training, on held-out text");
        let mut subject = Subject::open(&self.base.path, None, self.n_threads())?;
        let begin = Instant::now();
        let all: Vec<Document> = held_out.iter().map(|new| new.document.clone()).collect();
        let scores = subject.score(&all, self.time(SCORE_SHARE))?;
        let (n, n_all) = (scores.len(), all.len());
        certificate::store(&self.dir, &held_out[..n])?;
        let documents: Vec<Document> = all.into_iter().take(n).collect();
        let files = held_out.into_iter().take(n).map(|new| new.file).collect();
        let mut places = measure::places(&documents, self.args.seed);
        let hits = subject.complete(&places, self.time(COMPLETE_SHARE))?;
        places.truncate(hits.len());
        let probes = memory::choose(texts, N_PROBES, self.args.seed);
        let memory = subject.memory(&probes)?;
        let again_s = begin.elapsed().as_secs_f64();
        let mut neutral = neutral();
        let on_neutral = subject.score(&neutral, self.time(NEUTRAL_SHARE))?;
        neutral.truncate(on_neutral.len());
        let mut aside: Vec<Document> = aside.into_iter().map(|new| new.document).collect();
        let on_aside = subject.score(&aside, self.time(ASIDE_SHARE))?;
        aside.truncate(on_aside.len());
        let bits = |scores: &[DocScore]| (!scores.is_empty()).then(|| bits_per_byte(scores));
        let before = Before {
            neutral: bits(&on_neutral),
            aside: bits(&on_aside),
            scores,
            hits,
            memory,
            n_not_measured: n_all - n,
            again_s,
            scale_s: begin.elapsed().as_secs_f64() - again_s,
        };
        if before.n_not_measured > 0 {
            let text = format!("{n} of {n_all} held-out documents, to stay within the time");
            self.live.line("measure", &text);
        }
        Ok((Measured { documents, files, places, probes, neutral, aside }, before))
    }

    /// Takes the result back where it lost too much elsewhere, and measures it.
    fn after(&mut self, measured: &Measured, before: &Before, method: &Method) -> Done<After> {
        let (base, run, n_threads) = (&self.base.path, &self.dir, self.n_threads());
        let context = RunConfig::read(run)?.context;
        let outcome = Outcome { base, run, method, context, n_threads };
        let on = |documents, before| On { documents, before };
        let neutral = before.neutral.map(|bits| on(&measured.neutral, bits));
        let aside = before.aside.map(|bits| on(&measured.aside, bits));
        let guarded = outcome.guard(neutral, aside)?;
        if let Some(why) = &guarded.why {
            self.live.line("guard", &format!("scaled by {:.2}: {why}", guarded.scale));
        }
        self.live.line("measure", "the model after training, on the same text");
        let mut subject = outcome.open()?;
        let scores = subject.score(&measured.documents, self.left())?;
        let places = match scores.len() == measured.documents.len() {
            true => &measured.places[..],
            false => &[],
        };
        let hits = subject.complete(places, self.left())?;
        let memory = subject.memory(&measured.probes)?;
        Ok(After { guarded, scores, hits, memory })
    }

    /// What is left of the time, but for writing.
    fn left(&self) -> Time {
        let end = Duration::from_secs_f64(60.0 * self.minutes * (1.0 - WRITE_SHARE));
        match self.args.steps {
            Some(_) => Time::Any,
            None => Time::Within(end.saturating_sub(self.begin.elapsed())),
        }
    }

    /// Leaves of what was measured before as much as there was time for after.
    fn cut(&self, measured: &mut Measured, before: &mut Before, n: usize) -> Done<()> {
        if n == measured.documents.len() {
            return Ok(());
        }
        before.n_not_measured += measured.documents.len() - n;
        before.scores.truncate(n);
        measured.documents.truncate(n);
        measured.files.truncate(n);
        let pairs = measured.files.iter().zip(&measured.documents);
        let new = |(file, document): (&String, &Document)| {
            let (file, document) = (file.clone(), document.clone());
            New { file, document }
        };
        certificate::store(&self.dir, &pairs.map(new).collect::<Vec<_>>())
    }

    fn n_threads(&self) -> usize {
        self.args.compute.n_threads()
    }

    /// All that is not counted.
    fn certificate(&self, result: &Found, neutral: Option<f64>) -> Done<Certificate> {
        let Found { found, guarded, method, times, n_neutral } = result;
        let model = export_name(method);
        let path = &self.base.path;
        let name = match (&self.args.model, path.is_dir()) {
            (None, _) => Some(base::NAME.as_ref()),
            (_, true) => path.file_name(),
            (_, false) => path.file_stem(),
        };
        let name = name.map(|name| name.to_string_lossy().into_owned());
        let name = hub::cache::name_of(path).or(name);
        let program = std::env::current_exe().ok().and_then(|path| certificate::hash(&path).ok());
        let neutral = neutral.zip(guarded.neutral).map(|(before, after)| Neutral {
            n_documents: *n_neutral,
            bits_per_byte: Pair { before, after },
        });
        Ok(Certificate {
            format: FORMAT,
            created: jiff::Timestamp::now().to_string(),
            verdict: found.verdict.to_string(),
            verdict_text: found.describe("before"),
            program: Program {
                version: env!("CARGO_PKG_VERSION").into(),
                hash: program.unwrap_or_default(),
            },
            machine: Machine { cpu: machine::cpu().unwrap_or_default(), threads: self.n_threads() },
            seed: self.args.seed,
            base: crate::proof::certificate::Base {
                name: name.unwrap_or_default(),
                path: self.base.path.clone(),
                hash: self.base.hash.clone(),
            },
            adapter: AdapterFacts {
                kind: if model == "model" { "full" } else { "lora" }.into(),
                method: method.to_string(),
                hash: certificate::hash(&self.dir.join(model))?,
                scaled_by: guarded.scale,
                continues: self.earlier.as_ref().map(|earlier| earlier.dir.clone()),
            },
            model: model.into(),
            split: SplitFacts::default(),
            training: TrainingFacts::default(),
            held_out: HeldOutFacts::default(),
            completion: None,
            neutral,
            memory: None,
            times: *times,
        })
    }

    /// Removes what only training needed. The empty folder of checkpoints marks a run.
    fn clean(&self) {
        for name in [TRAINED, TREE, REPLAY, "tokens.bin", "data.elapid"] {
            let _ = std::fs::remove_file(self.dir.join(name));
        }
        let entries = std::fs::read_dir(self.dir.join("checkpoints")).into_iter().flatten();
        for entry in entries.flatten() {
            let _ = std::fs::remove_file(entry.path());
        }
    }

    fn say(&mut self, certificate: &Certificate) {
        let dir = shown(&self.dir);
        let next = "`elapid serve`, `elapid complete FILE:LINE`, `elapid list`";
        let files = format!("{dir}/certificate.html; check it with `elapid verify {dir}`");
        let mut lines = results(certificate);
        lines.push(("model", format!("{dir}/{}", certificate.model)));
        lines.push(("proof", files));
        lines.push(("next", next.into()));
        for (kind, text) in lines {
            match self.args.json {
                true => self.live.line(kind, &text),
                false => line(format!("{kind:<8}{text}")),
            }
        }
        if self.args.json {
            let Certificate { verdict, held_out, created, .. } = certificate;
            line(json!({
                "kind": "certificate", "path": self.dir.join(FILE), "verdict": verdict,
                "bits_per_byte": held_out.bits_per_byte, "interval": held_out.interval,
                "created": created,
            }));
        }
    }
}

/// What came of it.
struct Found {
    found: Comparison,
    guarded: Guarded,
    method: Method,
    times: Times,
    n_neutral: usize,
}

/// What an n-gram model of the project gets on the text that is to be predicted: bits per byte.
fn ngram(texts: &[Document], measured: &[Document]) -> f64 {
    let texts: Vec<_> = texts.iter().map(Document::text).collect();
    let mut model = Ngram::train(texts.iter().map(|text| &**text));
    let (mut bits, mut n_bytes) = (0.0, 0);
    for document in measured {
        let (mut ranges, mut at) = (Vec::new(), 0);
        for part in &document.parts {
            let range = at..at + part.text.len();
            at = range.end;
            if part.learned {
                n_bytes += range.len();
                ranges.push(range);
            }
        }
        bits += model.bits_in(document.text().as_bytes(), &ranges);
    }
    bits / n_bytes.max(1) as f64
}

/// Of the places that were asked both times.
fn completion(before: &[Hit], after: &[Hit]) -> Option<Pair<Completed>> {
    let n = before.len().min(after.len());
    let [before, after] = [before, after].map(|hits| Completed::of(&hits[..n]));
    (n > 0).then_some(Pair { before, after })
}

/// A path as short as it can be told from here.
fn shown(path: &Path) -> String {
    let here = std::env::current_dir().and_then(|here| here.canonicalize()).ok();
    let own = path.canonicalize().ok();
    let short =
        own.as_deref().zip(here.as_deref()).and_then(|(own, here)| own.strip_prefix(here).ok());
    short.unwrap_or(path).display().to_string()
}

fn results(certificate: &Certificate) -> Vec<(&'static str, String)> {
    let Certificate { held_out, completion, neutral, memory, times, .. } = certificate;
    let Pair { before, after } = held_out.bits_per_byte;
    let ngram = held_out.ngram.map_or(String::new(), |bits| format!("; n-gram model {bits:.3}"));
    let text = format!("held-out {after:.3} bits per byte, before {before:.3}{ngram}");
    let mut list = vec![("result", text)];
    if let Some(Pair { before, after }) = completion {
        let fim = match (before.fim, after.fim) {
            (Some(before), Some(after)) => format!("; filled in {after}, before {before}"),
            _ => String::new(),
        };
        let text = format!(
            "of {} lines {} completed exactly, before {}; with the next line {}, before {}{fim}",
            after.n_places, after.line, before.line, after.two_lines, before.two_lines
        );
        list.push(("lines", text));
    }
    list.push(match neutral {
        Some(Neutral { bits_per_byte: Pair { before, after }, .. }) => {
            ("neutral", format!("{after:.3} bits per byte, before {before:.3}"))
        }
        None => ("note", "there is no neutral text: general ability was not measured".into()),
    });
    if let Some(Pair { before, after }) = memory {
        let text = format!(
            "{} of {} rare strings of the training files are completed word for word, before {}",
            after.n_verbatim, after.n_probed, before.n_verbatim
        );
        list.push(("memory", text));
    }
    list.push(("verdict", certificate.verdict_text.clone()));
    let [total, training, proof] =
        [times.total_s, times.training_s, times.proof_s].map(duration_exact);
    list.push(("time", format!("{total}: training {training}, all else {proof}")));
    list
}
