//! A model on held-out text: bits per byte, and lines that it completes exactly. The same before
//! training, after it, and when a certificate is verified: always on the CPU in f32, from files.
//!
//! A place to complete is inside of a new line of a held-out document. The model reads what is
//! before it and writes greedily; a place counts when the rest of that line is there byte by byte,
//! and once more when the next line is too. With fill-in-the-middle tokens it is then asked for the
//! rest of the line with the lines behind it in sight. Places are chosen by a seed.

use crate::proof::memory::{self, Memory, Probe};
use crate::report::Done;
use crate::report::live::progress;
use crate::source::history::New;
use elapid::{Device, DocScore, Document, EvalSettings, Model, Request, Session};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Tokens of a window.
const CONTEXT: usize = 1024;

/// Documents that are measured whatever time it takes, and how many at once.
const N_DOCUMENTS_MIN: usize = 8;
const N_TOGETHER: usize = 4;

/// Places to complete, and of one document.
const N_PLACES: usize = 60;
const N_PLACES_EACH: usize = 4;
/// Letters of a line that is worth a place, and its bytes at most.
const N_LETTERS_MIN: usize = 8;
const LINE_BYTES_MAX: usize = 160;
/// Bytes that are read before a place and behind it, about.
const PREFIX_BYTES: usize = 1536;
const SUFFIX_BYTES: usize = 512;
/// Tokens that are written at most.
const N_ANSWER: usize = 96;

/// A model that is measured.
pub struct Subject {
    session: Session,
    settings: EvalSettings,
}

/// How long something may take; where it takes longer, less of it is measured.
#[derive(Clone, Copy)]
pub enum Time {
    Any,
    Within(Duration),
}

impl Time {
    fn is_over(self, begin: Instant) -> bool {
        match self {
            Time::Any => false,
            Time::Within(limit) => begin.elapsed() >= limit,
        }
    }
}

impl Subject {
    pub fn open(model: &Path, adapter: Option<&Path>, n_threads: usize) -> Done<Subject> {
        let mut model = Model::open(model)?;
        if let Some(adapter) = adapter {
            model = model.with_adapter(adapter);
        }
        let n_ctx = model.info()?.n_ctx.unwrap_or(CONTEXT);
        let settings = EvalSettings::new(CONTEXT.min(n_ctx).max(2));
        Ok(Subject { session: Session::new(model, &Device::cpu(n_threads)?)?, settings })
    }

    /// The first of these documents, as many as there is time for.
    pub fn score(&mut self, documents: &[Document], time: Time) -> Done<Vec<DocScore>> {
        let (begin, mut scores) = (Instant::now(), Vec::new());
        let mut told = progress("measure", "{human_pos} of {human_len} documents");
        for some in documents.chunks(N_TOGETHER) {
            if scores.len() >= N_DOCUMENTS_MIN && time.is_over(begin) {
                break;
            }
            let some: Vec<Document> = some.iter().map(to_last_new).collect();
            scores.extend(self.session.score(&some, &self.settings, &mut |_, _| {})?);
            told(scores.len(), documents.len());
        }
        Ok(scores)
    }

    /// How many of these rare strings of the training files it completes.
    pub fn memory(&mut self, probes: &[Probe]) -> Done<Memory> {
        Ok(memory::probe(self.session.generator()?, probes)?)
    }

    /// What it makes of the first of these places, as many as there is time for.
    pub fn complete(&mut self, places: &[Place], time: Time) -> Done<Vec<Hit>> {
        let (begin, mut hits) = (Instant::now(), Vec::new());
        let has_fim = self.session.tokenizer().fim().is_some();
        let mut told = progress("complete", "{human_pos} of {human_len} places");
        for place in places {
            if time.is_over(begin) {
                break;
            }
            let (line, two_lines) = self.lines(place)?;
            let fim = if has_fim { Some(self.fill(place)?) } else { None };
            hits.push(Hit { line, two_lines, fim });
            told(hits.len(), places.len());
        }
        Ok(hits)
    }

    /// Whether the rest of the line is right, and the next line too.
    fn lines(&mut self, place: &Place) -> Done<(bool, bool)> {
        let request = self.ask(place, |session, prefix, _| session.request(prefix))?;
        let want = format!("{}\n{}\n", place.rest, place.next);
        let (n_right, _) = self.write(request, &want)?;
        Ok((n_right > place.rest.len(), n_right == want.len()))
    }

    fn fill(&mut self, place: &Place) -> Done<bool> {
        let request = self.ask(place, Session::infill)?;
        let want = format!("{}\n", place.rest);
        let (n_right, has_ended) = self.write(request, &want)?;
        Ok(n_right == want.len() || n_right == place.rest.len() && has_ended)
    }

    /// A request with as much of what is around a place as the window holds.
    fn ask(
        &mut self,
        place: &Place,
        request: impl Fn(&mut Session, &str, &str) -> elapid::Result<Request>,
    ) -> Done<Request> {
        let context = self.settings.context;
        let n_fit = context.saturating_sub(N_ANSWER).max(context / 2);
        let (mut prefix, mut suffix) = (&*place.prefix, &*place.suffix);
        loop {
            let request = request(&mut self.session, prefix, suffix)?;
            if request.prompt.len() <= n_fit || prefix.len() < 2 {
                return Ok(request);
            }
            prefix = &prefix[prefix.ceil_char_boundary(prefix.len() / 2)..];
            suffix = &suffix[..suffix.floor_char_boundary(suffix.len() / 2)];
        }
    }

    /// Bytes of a greedy answer that are right, and whether it ended by itself there. As soon as a
    /// byte is wrong the rest does not matter.
    fn write(&mut self, request: Request, want: &str) -> Done<(usize, bool)> {
        let n_left = self.settings.context.saturating_sub(request.prompt.len());
        let request = request.max_tokens(N_ANSWER.min(n_left)).temperature(0.0);
        let mut text = String::new();
        for token in self.session.tokens(request)? {
            text.push_str(&token?.text);
            let n_right =
                text.bytes().zip(want.bytes()).take_while(|pair| pair.0 == pair.1).count();
            if n_right < text.len() || n_right == want.len() {
                return Ok((n_right, false));
            }
        }
        Ok((text.len(), true))
    }
}

/// Without what is behind the last new line: it costs time and changes nothing.
fn to_last_new(document: &Document) -> Document {
    let mut document = document.clone();
    document.parts.pop_if(|last| !last.learned);
    document
}

/// Places that were completed exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Completed {
    pub n_places: usize,
    /// The rest of the line.
    pub line: usize,
    /// That and the next line.
    pub two_lines: usize,
    /// The rest of the line with what is behind in sight, where the model can.
    pub fim: Option<usize>,
}

/// What was exact at one place.
#[derive(Clone, Copy, Debug)]
pub struct Hit {
    line: bool,
    two_lines: bool,
    fim: Option<bool>,
}

impl Completed {
    pub fn of(hits: &[Hit]) -> Completed {
        let count = |is_so: fn(&Hit) -> bool| hits.iter().filter(|hit| is_so(hit)).count();
        let has_fim = hits.iter().any(|hit| hit.fim.is_some());
        Completed {
            n_places: hits.len(),
            line: count(|hit| hit.line),
            two_lines: count(|hit| hit.two_lines),
            fim: has_fim.then(|| count(|hit| hit.fim == Some(true))),
        }
    }
}

/// A place inside of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    prefix: String,
    /// Of its line.
    rest: String,
    next: String,
    suffix: String,
}

/// A number that stays the same for ever.
fn draw(seed: u64, what: &str) -> u64 {
    elapid::name_hash(&format!("{seed} {what}"))
}

/// Places in new lines of these documents.
pub fn places(documents: &[Document], seed: u64) -> Vec<Place> {
    let mut list: Vec<(u64, Place)> = Vec::new();
    for document in documents {
        let mut own = places_of(document, seed);
        own.sort_by_key(|pair| pair.0);
        list.extend(own.into_iter().take(N_PLACES_EACH));
    }
    list.sort_by_key(|pair| pair.0);
    list.into_iter().take(N_PLACES).map(|pair| pair.1).collect()
}

fn places_of(document: &Document, seed: u64) -> Vec<(u64, Place)> {
    let (text, mut list, mut start) = (document.text(), Vec::new(), 0);
    for part in &document.parts {
        let mut at = start;
        start += part.text.len();
        for line in part.text.split_inclusive('\n').filter(|_| part.learned) {
            let begin = at;
            at += line.len();
            let number = draw(seed, &format!("{} {begin}", document.name));
            list.extend(place(&text, begin, line, number).map(|place| (number, place)));
        }
    }
    list
}

/// The place in the line at `begin` that a number chooses, if the line is worth it.
fn place(text: &str, begin: usize, line: &str, number: u64) -> Option<Place> {
    let content = line.strip_suffix('\n')?.trim_end();
    let n_letters = content.chars().filter(|letter| letter.is_alphanumeric()).count();
    if n_letters < N_LETTERS_MIN || content.len() > LINE_BYTES_MAX {
        return None;
    }
    let behind = &text[begin + line.len()..];
    let next = behind.split_once('\n')?.0;
    let first = content.len() - content.trim_start().len();
    let inside = content.char_indices().map(|pair| pair.0).filter(|at| *at > first);
    let inside: Vec<usize> = inside.collect();
    let cut = *inside.get((number >> 32) as usize % inside.len().max(1))?;
    let from = text.floor_char_boundary((begin + cut).saturating_sub(PREFIX_BYTES));
    let to = behind.floor_char_boundary(SUFFIX_BYTES);
    Some(Place {
        prefix: text[from..begin + cut].to_string(),
        rest: content[cut..].to_string(),
        next: next.to_string(),
        suffix: format!("\n{}", &behind[..to]),
    })
}

/// In an order that a seed chooses.
pub fn shuffled(mut held_out: Vec<New>, seed: u64) -> Vec<New> {
    held_out.sort_by_cached_key(|new| draw(seed, &new.document.name));
    held_out
}

/// Without the documents of one file in ten, which come second: a tenth for other decisions.
pub fn set_aside(held_out: Vec<New>, seed: u64) -> (Vec<New>, Vec<New>) {
    let mut files: Vec<&str> = held_out.iter().map(|new| &*new.file).collect();
    files.sort_unstable();
    files.dedup();
    files.sort_by_cached_key(|file| draw(seed, file));
    // Of a few files none can be spared.
    let n_aside = if files.len() < 8 { 0 } else { files.len().div_ceil(10) };
    let aside: Vec<String> =
        files.iter().rev().take(n_aside).map(|file| file.to_string()).collect();
    held_out.into_iter().partition(|new| !aside.contains(&new.file))
}

/// Scores of documents as scores of their files, by name: the changes of one file are alike.
pub fn by_file(files: &[String], scores: &[DocScore]) -> Vec<DocScore> {
    let mut map: BTreeMap<&str, DocScore> = BTreeMap::new();
    for (file, score) in files.iter().zip(scores) {
        let Some(sum) = map.get_mut(&**file) else {
            map.insert(file, DocScore { name: file.clone(), ..score.clone() });
            continue;
        };
        sum.n_tok += score.n_tok;
        sum.n_bytes += score.n_bytes;
        sum.nll += score.nll;
        sum.n_top1 += score.n_top1;
        sum.blocks.extend(&score.blocks);
    }
    map.into_values().collect()
}

/// Bits per byte of all.
pub fn bits_per_byte(scores: &[DocScore]) -> f64 {
    elapid::Score::of(&scores.iter().collect::<Vec<_>>()).bits_per_byte()
}
