//! A teacher of another vocabulary: its probabilities are of other tokens, so it writes texts, and
//! they are learned from like all others.
//!
//! Each text begins as a document to learn from does, never as a held-out one, and the teacher
//! continues it. The texts lie in the run directory before the first step: a run that is resumed
//! needs this teacher no more.

use super::config::{Budget, RunConfig, TeacherConfig};
use super::data::Gathered;
use super::plan::minutes;
use crate::files;
use crate::report::live::Live;
use crate::report::reading::Reading;
use crate::report::{Done, Failure, count};
use crate::source::entry::Entry;
use crate::source::walk::{self, Walk};
use elapid::{Device, Event, Generator, GeneratorSettings, Model, Reason, Refusal, Special};
use elapid::{RequestId, Tokenizer};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What it wrote, in a run directory.
pub const FILE: &str = "teacher.jsonl";

/// Tokens that a teacher writes when nobody says, and the share of the time that it may take.
const N_TOK: usize = 32_000;
const TIME_SHARE: f64 = 0.25;
/// Bytes of a document that a text begins with, about; tokens that are added.
const PROMPT_BYTES: usize = 160;
const N_ANSWER: usize = 224;
/// Texts that are written side by side.
const N_SLOTS: usize = 8;
/// Tokens of each, to measure how fast it writes.
const N_TRIAL: usize = 8;

/// Decides what is learned from the teacher: texts where ids of the student mean other tokens.
pub fn decide(config: &mut RunConfig, tokenizer: &Tokenizer) -> Done<()> {
    let Some(TeacherConfig { model, n_tok, .. }) = &mut config.teacher else { return Ok(()) };
    if n_tok.is_none() && Model::open(&*model)?.tokenizer()?.as_ref() != Some(tokenizer) {
        *n_tok = Some(N_TOK);
    }
    Ok(())
}

/// Lets the teacher write where it is to, and adds its texts to what is learned from. Without a run
/// directory it is only measured how long that takes.
pub fn write_texts(
    config: &RunConfig,
    gathered: &mut Gathered,
    device: &Device,
    live: &mut Live,
) -> Done<()> {
    let Some(TeacherConfig { model, n_tok: Some(n_tok), .. }) = &config.teacher else {
        return Ok(());
    };
    let name = model.display();
    let model = Arc::new(Model::open(model)?);
    let settings = GeneratorSettings {
        n_slots: N_SLOTS,
        n_waiting_max: N_SLOTS,
        snapshot_bytes_max: 0,
        ..GeneratorSettings::default()
    };
    let generator = Generator::new(model, device, &settings)?;
    let Gathered { training, walk, .. } = &*gathered;
    let mut writer = Writer { generator, training, walk, seed: config.seed };
    let begin = Instant::now();
    let Some(dir) = walk.out.clone() else {
        let limits = Limits { n_tok: N_SLOTS * N_TRIAL, n_each: N_TRIAL, until: None };
        let (_, n) = writer.write(&limits)?;
        let all_s = begin.elapsed().as_secs_f64() * *n_tok as f64 / n.max(1) as f64;
        let n_tok = count(*n_tok as f64);
        let text = format!("{name} writes {n_tok} tokens before training, in {}", minutes(all_s));
        live.line("teacher", &text);
        return Ok(());
    };
    let until = match config.budget {
        Budget::Minutes(n) => Some(begin + Duration::from_secs_f64(60.0 * n * TIME_SHARE)),
        Budget::Steps(_) | Budget::Tokens(_) => None,
    };
    let n_most = count(*n_tok as f64);
    let text = format!("{name} writes up to {n_most} tokens; temperature and share do not apply");
    live.line("teacher", &text);
    let (texts, n) = writer.write(&Limits { n_tok: *n_tok, n_each: N_ANSWER, until })?;
    let entries = keep(&dir, &texts)?;
    let (n, took) = (count(n as f64), minutes(begin.elapsed().as_secs_f64()));
    live.line("teacher", &format!("{} texts, {n} tokens, in {took}", texts.len()));
    gathered.facts.n_training += entries.len();
    gathered.facts.n_bytes += entries.iter().map(Entry::n_bytes).sum::<usize>();
    gathered.training.extend(entries);
    Ok(())
}

/// Writes the texts into the run directory, as a source.
fn keep(dir: &Path, texts: &[String]) -> Done<Vec<Entry>> {
    let lines: String = texts.iter().map(|text| format!("{}\n", json!({ "text": text }))).collect();
    let path = dir.join(FILE);
    files::write_bytes(&path, lines.as_bytes())?;
    let walk = Walk::default();
    let documents = walk::list(&[(path, 1.0)], &walk)?.read(&walk)?.documents;
    let blocks = documents.into_iter().map(Entry::blocks);
    Ok(blocks.collect::<elapid::Result<Vec<_>>>()?.into_iter().flatten().collect())
}

struct Writer<'a> {
    generator: Generator,
    training: &'a [Entry],
    walk: &'a Walk,
    seed: u64,
}

struct Limits {
    /// Tokens in all, and of a text.
    n_tok: usize,
    n_each: usize,
    /// No text is begun after it.
    until: Option<Instant>,
}

impl Writer<'_> {
    /// The texts, and how many tokens were written.
    fn write(&mut self, limits: &Limits) -> Done<(Vec<String>, usize)> {
        let Limits { n_tok, n_each, until } = *limits;
        if self.training.is_empty() {
            return Ok((Vec::new(), 0));
        }
        let mut order: Vec<usize> = (0..self.training.len()).collect();
        order
            .sort_by_key(|idx| *blake3::hash(format!("{} {idx}", self.seed).as_bytes()).as_bytes());
        let reading = Reading::new("teacher", Some(n_tok.div_ceil(n_each)));
        let (mut texts, mut n_written): (Vec<String>, usize) = (Vec::new(), 0);
        let mut running: BTreeMap<RequestId, usize> = BTreeMap::new();
        // A model that ends at once is not asked for ever.
        let n_texts_max = 4 * n_tok.div_ceil(n_each) + N_SLOTS;
        loop {
            while running.len() < N_SLOTS
                && n_written + running.len() * n_each < n_tok
                && texts.len() < n_texts_max
                && until.is_none_or(|until| Instant::now() < until)
            {
                let at = texts.len();
                let text = beginning(&self.training[order[at % order.len()]], self.walk)?;
                let (id, text) = self.ask(text, at, n_each)?;
                running.insert(id, at);
                texts.push(text);
            }
            if running.is_empty() {
                return Ok((texts, n_written));
            }
            for (id, event) in self.generator.engine.step() {
                let Some(&at) = running.get(&id) else { continue };
                match event {
                    Event::Prompt { .. } => {}
                    Event::Token(token) => {
                        n_written += 1;
                        texts[at].push_str(&token.text);
                    }
                    Event::Done(finish) => {
                        if let Reason::Failed(error) = finish.reason {
                            return Err(Failure::new(&error, &error.hint()));
                        }
                        texts[at].push_str(&finish.text);
                        running.remove(&id);
                        reading.add(texts[at].len());
                    }
                }
            }
        }
    }

    /// Asks for what follows a text; less of the text where it fills the context of the teacher.
    fn ask(&mut self, mut text: String, at: usize, n_each: usize) -> Done<(RequestId, String)> {
        let context = self.generator.engine.settings().context;
        let mut prompt = self.generator.prompt(&text, Special::Plain)?;
        while prompt.len() > (context / 2).max(1) && !text.is_empty() {
            text = cut(&text, text.len() / 2).to_string();
            prompt = self.generator.prompt(&text, Special::Plain)?;
        }
        let n_each = n_each.min(context.saturating_sub(prompt.len()));
        let request = self.generator.request(prompt).max_tokens(n_each);
        let request = request.seed(self.seed.wrapping_add(at as u64));
        let id = self.generator.engine.submit(request).map_err(|refusal| match refusal {
            Refusal::Bad(error) => error.into(),
            Refusal::Full => Failure::new("the teacher is busy", "this is a bug in Elapid"),
        })?;
        Ok((id, text))
    }
}

/// At most so many bytes of a text.
fn cut(text: &str, n_bytes: usize) -> &str {
    let end = (0..=n_bytes.min(text.len())).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}

/// How a document begins: whole lines, where the first is not too long.
fn beginning(entry: &Entry, walk: &Walk) -> Done<String> {
    let document = entry.load(walk)?;
    let text = document.text();
    let text = cut(&text, PROMPT_BYTES);
    let line = text.rfind('\n').map(|at| at + 1).filter(|at| 4 * at >= text.len());
    Ok(text[..line.unwrap_or(text.len())].to_string())
}
