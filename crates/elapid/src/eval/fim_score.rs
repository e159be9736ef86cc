//! Fill in the middle: how often the very text that was cut out comes back.
//!
//! From each document holes are cut, one line each: a whole line, or a line's tail from a place
//! inside it, by turns. The model reads what is before and behind the hole in its own layout
//! (`fim.rs`), as much as its window holds, and writes greedily until a line ends or a token stops
//! it. It counts as exact when what it wrote up to there is the hole, byte by byte.
//!
//! ```text
//! prompt = [begin] layout(the end of what is before, the start of what is behind)
//! ```
//!
//! Of the tokens that fit, a quarter is for what is behind the hole, the rest for what is before;
//! what one side does not need the other may have. Lines are chosen by a seed and the name of the
//! document, so that two models of any tokenizer are given the same holes.
//!
//! As soon as a byte is wrong the rest does not matter, and the sequence ends: most of the time is
//! spent on prompts.

use super::n_together;
use crate::data::{Document, Ends, encode_after};
use crate::error::Result;
use crate::generate::sample::Sampling;
use crate::generate::{GenerateSettings, generate_many};
use crate::model::Model;
use crate::model::weights::Weights;
use crate::tensor::rng::Rng;
use crate::text::fim::FimTokens;
use crate::text::tokenizer::{Special, Tokenizer};
use std::ops::{ControlFlow, Range};

/// A model that can read and write text.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    pub model: &'a Model,
    pub weights: &'a Weights,
    pub tokenizer: &'a Tokenizer,
}

/// How to cut holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FimSettings {
    /// Holes of each document, at most.
    pub n_holes: usize,
    /// Tokens of prompt and answer.
    pub context: usize,
    /// Tokens of prompts that go through at once, about.
    pub n_tok_batch: usize,
    /// Chooses the holes.
    pub seed: u64,
}

impl FimSettings {
    /// This many holes of each document, in windows of this size.
    pub fn new(n_holes: usize, context: usize) -> FimSettings {
        FimSettings { n_holes, context, n_tok_batch: 4096, seed: 0 }
    }
}

/// The holes of one document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FimDoc {
    /// The document.
    pub name: String,
    /// Its language.
    pub language: &'static str,
    /// Holes cut.
    pub n_holes: usize,
    /// Holes filled with the very text.
    pub n_exact: usize,
}

/// What came back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FimReport {
    /// Documents with at least one hole.
    pub docs: Vec<FimDoc>,
    /// Documents without, and why.
    pub skipped: Vec<(String, &'static str)>,
}

/// Letters of a line that is worth a hole; `}` or `else {` alone would flatter.
const N_LETTERS_MIN: usize = 8;

/// Bytes of the longest hole.
const HOLE_BYTES_MAX: usize = 160;

/// Bytes of text per token that fits, before it is cut into tokens: more than any tokenizer needs,
/// so that a long file is not cut into tokens once for each hole.
const BYTES_PER_TOKEN: usize = 16;

/// Cuts holes into documents and lets the model fill them; `on_progress` hears of holes filled and
/// to be filled.
pub fn fim_exact_match(
    subject: Subject,
    docs: &[Document],
    settings: &FimSettings,
    on_progress: &mut dyn FnMut(usize, usize),
) -> Result<FimReport> {
    let mut report = FimReport::default();
    let Some(tokens) = subject.tokenizer.fim() else {
        let why = "the vocabulary has no tokens for fill in the middle";
        report.skipped = docs.iter().map(|doc| (doc.name.clone(), why)).collect();
        return Ok(report);
    };
    let asker = Asker { tokenizer: subject.tokenizer, tokens, context: settings.context };
    let mut questions = Vec::new();
    for doc in docs {
        let (name, language, doc_idx) = (doc.name.clone(), doc.language, report.docs.len());
        match holes_of(doc, settings) {
            Err(why) => report.skipped.push((name, why)),
            Ok((text, holes)) => {
                let n_holes = holes.len();
                report.docs.push(FimDoc { name, language, n_holes, n_exact: 0 });
                for hole in holes {
                    let prompt = asker.prompt(text, &hole)?;
                    questions.push(Question { doc_idx, prompt, hole: text[hole].into() });
                }
            }
        }
    }
    let (total, mut rest) = (questions.len(), &questions[..]);
    while !rest.is_empty() {
        let lens = rest.iter().map(|question| question.prompt.len());
        let (batch, after) = rest.split_at(n_together(lens, settings.n_tok_batch));
        for doc_idx in asker.exact(subject, batch)? {
            report.docs[doc_idx].n_exact += 1;
        }
        rest = after;
        on_progress(total - rest.len(), total);
    }
    Ok(report)
}

/// A prompt and what should come back.
struct Question {
    doc_idx: usize,
    prompt: Vec<u32>,
    hole: Vec<u8>,
}

/// The text of a document with its holes, or why there are none.
fn holes_of<'d>(
    doc: &'d Document,
    settings: &FimSettings,
) -> std::result::Result<(&'d str, Vec<Range<usize>>), &'static str> {
    let [part] = &doc.parts[..] else { return Err("it is in parts") };
    if part.special || !part.learned {
        return Err("it is a conversation");
    }
    let holes = holes(&doc.name, &part.text, settings);
    if holes.is_empty() {
        return Err("no line in its middle is long enough for a hole");
    }
    Ok((&part.text, holes))
}

/// Places of holes in a text, in order.
fn holes(name: &str, text: &str, settings: &FimSettings) -> Vec<Range<usize>> {
    let mut lines = Vec::new();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let content = line.trim_end_matches(['\n', '\r']);
        lines.push(start..start + content.len());
        start += line.len();
    }
    // There must be something before and behind.
    let n_inner = lines.len().saturating_sub(2);
    let is_worth = |line: &Range<usize>| {
        let n_letters = text[line.clone()].chars().filter(|c| c.is_alphanumeric()).count();
        n_letters >= N_LETTERS_MIN && line.len() <= HOLE_BYTES_MAX
    };
    let mut left: Vec<Range<usize>> =
        lines.into_iter().skip(1).take(n_inner).filter(is_worth).collect();
    let hash = blake3::hash(name.as_bytes());
    let stream = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("eight of 32 bytes"));
    let rng = Rng::new(settings.seed, stream);
    let mut list = Vec::new();
    while list.len() < settings.n_holes && !left.is_empty() {
        let n = 2 * list.len() as u64;
        let line = left.swap_remove(rng.below(n, left.len() as u64) as usize);
        let is_tail = list.len() % 2 == 1;
        list.push(if is_tail { tail(text, line, &rng, n + 1) } else { line });
    }
    list.sort_by_key(|hole| hole.start);
    list
}

/// What is behind a place inside a line, with letters on both sides of it.
fn tail(text: &str, line: Range<usize>, rng: &Rng, n: u64) -> Range<usize> {
    let content = &text[line.clone()];
    let first = content.len() - content.trim_start().len();
    let last = content.trim_end().len();
    let inside = content.char_indices().map(|(at, _)| at).filter(|at| first < *at && *at < last);
    let places: Vec<usize> = inside.collect();
    match places.len() {
        0 => line,
        n_places => line.start + places[rng.below(n, n_places as u64) as usize]..line.end,
    }
}

struct Asker<'a> {
    tokenizer: &'a Tokenizer,
    tokens: FimTokens,
    context: usize,
}

impl Asker<'_> {
    /// The prompt for a hole in a text, cut to fit the window with room for the hole.
    fn prompt(&self, text: &str, hole: &Range<usize>) -> Result<Vec<u32>> {
        let encode = |text: &str| encode_after(self.tokenizer, text, Special::Plain);
        let begin = Ends::of(self.tokenizer).begin;
        let n_answer = encode(&text[hole.clone()])?.len() + 1;
        // Three marks and the beginning.
        let n_fit = self.context.saturating_sub(n_answer + 4);
        let n_bytes = n_fit.saturating_mul(BYTES_PER_TOKEN);
        let from = text.floor_char_boundary(hole.start.saturating_sub(n_bytes));
        let to = text.floor_char_boundary(hole.end.saturating_add(n_bytes).min(text.len()));
        let (before, behind) = (encode(&text[from..hole.start])?, encode(&text[hole.end..to])?);
        let n_behind = behind.len().min((n_fit / 4).max(n_fit.saturating_sub(before.len())));
        let n_before = before.len().min(n_fit - n_behind);
        let (before, behind) = (&before[before.len() - n_before..], &behind[..n_behind]);
        let mut prompt: Vec<u32> = begin.into_iter().collect();
        prompt.extend(self.tokens.layout(self.tokens.style, before, behind));
        Ok(prompt)
    }

    /// The documents of those questions that were answered exactly.
    fn exact(&self, subject: Subject, questions: &[Question]) -> Result<Vec<usize>> {
        let Subject { model, weights, tokenizer } = subject;
        let mut stops = self.tokens.stops();
        stops.extend(tokenizer.eog());
        stops.extend(Ends::of(tokenizer).end);
        // Every token but an empty one takes a byte, so that only nonsense gets this far.
        let n_max = HOLE_BYTES_MAX + 2;
        let settings = GenerateSettings { n_max, sampling: Sampling::greedy(), stops };
        let prompts: Vec<&[u32]> = questions.iter().map(|question| &question.prompt[..]).collect();
        let mut answers: Vec<Answer> = questions.iter().map(|_| Answer::default()).collect();
        let out = generate_many(model, weights, &prompts, &settings, |idx, id| {
            let bytes = tokenizer.bytes(id).unwrap_or_default();
            answers[idx].add(&bytes, &questions[idx].hole)
        })?;
        let is_exact = |idx: &usize| {
            let is_ended = out[*idx].len() < n_max;
            answers[*idx].is_exact(&questions[*idx].hole, is_ended)
        };
        let exact = (0..questions.len()).filter(is_exact);
        Ok(exact.map(|idx| questions[idx].doc_idx).collect())
    }
}

/// What the model has written.
#[derive(Default)]
struct Answer {
    bytes: Vec<u8>,
    /// Whether a line ended.
    is_line: bool,
}

impl Answer {
    /// Continues as long as the hole may still come.
    fn add(&mut self, bytes: &[u8], hole: &[u8]) -> ControlFlow<()> {
        // A line may end with a carriage return, which is not in the hole.
        let end = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
        self.bytes.extend_from_slice(&bytes[..end.unwrap_or(bytes.len())]);
        self.is_line = end.is_some();
        match !self.is_line && hole.starts_with(&self.bytes) {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    }

    /// Whether it is the hole, and was ended: by its line, or by a token that stops.
    fn is_exact(&self, hole: &[u8], is_ended: bool) -> bool {
        self.bytes == hole && (self.is_line || is_ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::BpeTrainer;

    const TEXT: &str = "first line here\n    let value = compute(1);\n}\n  naïve_ünïcödé_nàmé\r\n\
        short\n    let another = compute(2);\nlast line here\n";

    fn settings(n_holes: usize) -> FimSettings {
        FimSettings::new(n_holes, 64)
    }

    #[test]
    fn holes_are_lines_or_tails_in_the_middle_and_always_the_same() {
        let list = holes("a.rs", TEXT, &settings(10));
        assert_eq!(list, holes("a.rs", TEXT, &settings(10)));
        assert_eq!(list.len(), 3, "lines that are short, first or last are no holes");
        for hole in &list {
            let text = &TEXT[hole.clone()];
            assert!(!text.contains(['\n', '\r']) && !text.is_empty());
            assert!(TEXT[hole.end..].starts_with(['\n', '\r']), "{text:?} ends with its line");
            assert!(hole.start > 0 && !text.contains("first") && !text.contains("last"));
        }
        assert!(list.windows(2).all(|pair| pair[0].end < pair[1].start));
        let whole = list.iter().filter(|hole| TEXT[..hole.start].ends_with('\n')).count();
        assert_eq!(whole, 2, "the second of three is a tail");
        assert_eq!(holes("a.rs", TEXT, &settings(1)).len(), 1);
        assert!(holes("a.rs", TEXT, &settings(0)).is_empty());
        let starts = |name: &str, seed| {
            let settings = FimSettings { seed, ..settings(2) };
            let text = "some_line_of(code);\n".repeat(50);
            holes(name, &text, &settings).iter().map(|hole| hole.start).collect::<Vec<_>>()
        };
        assert_ne!(starts("a.rs", 0), starts("b.rs", 0));
        assert_ne!(starts("a.rs", 0), starts("a.rs", 1));
    }

    #[test]
    fn tails_are_cut_at_characters() {
        let text = "x\n  éàüöäñçøåœéàüöäñçøåœ  \ny\n";
        let line = 2..text.rfind("\ny").unwrap();
        for n in 0..200 {
            let hole = tail(text, line.clone(), &Rng::new(n, 0), 0);
            assert!(text.is_char_boundary(hole.start) && hole.end == line.end);
            assert!(!text[2..hole.start].trim().is_empty(), "something is before it");
            assert!(!text[hole].trim().is_empty(), "something is in it");
        }
        for text in ["", "\n", "a", "\n\n\n", "x\ny"] {
            assert!(holes("a", text, &settings(3)).is_empty());
        }
    }

    /// One token for each byte, after the four special ones.
    fn bytes_tokenizer() -> Tokenizer {
        let specials = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
        let specials = specials.iter().map(|token| token.to_string()).collect();
        let trainer = BpeTrainer { n_vocab: 260, min_count: 2, specials };
        Tokenizer::train(&trainer, "gpt-2", &mut [""].into_iter(), &mut |_, _| {}).unwrap()
    }

    #[test]
    fn a_prompt_is_what_is_nearest_to_the_hole_in_the_layout_of_the_model() {
        let tokenizer = bytes_tokenizer();
        let tokens = tokenizer.fim().unwrap();
        let text = "abcdefgh HOLE ijklmnop";
        let hole = 9..13;
        // What is before and behind, in windows of this many tokens.
        let sides = |context: usize| {
            let asker = Asker { tokenizer: &tokenizer, tokens: tokens.clone(), context };
            let ids = asker.prompt(text, &hole).unwrap();
            assert!(ids.len() + "HOLE".len() < context.max(10), "room is left for the hole");
            tokenizer.decode(&ids, Special::Parse)
        };
        let want = |before: &str, behind: &str| {
            format!("<|endoftext|><|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|>")
        };
        assert_eq!(sides(64), want("abcdefgh ", " ijklmnop"));
        // Eight tokens fit: two are for what is behind.
        assert_eq!(sides(17), want("defgh ", " i"));
        // What the short side before does not need, the other has.
        assert_eq!(sides(24), want("abcdefgh ", " ijklm"));
        assert_eq!(sides(9), want("", ""));
        assert_eq!(sides(2), want("", ""));
    }

    #[test]
    fn an_answer_is_exact_when_the_line_or_the_model_ends_behind_it() {
        let run = |parts: &[&str], is_ended: bool| {
            let mut answer = Answer::default();
            for part in parts {
                if answer.add(part.as_bytes(), b"a + b;").is_break() {
                    return answer.is_exact(b"a + b;", true);
                }
            }
            answer.is_exact(b"a + b;", is_ended)
        };
        assert!(run(&["a +", " b;"], true), "ended by a token");
        assert!(run(&["a +", " b;\n  c"], false), "ended by its line");
        assert!(run(&["a + b;", "\r\n"], false));
        assert!(!run(&["a +", " b;"], false), "it would have gone on");
        assert!(!run(&["a +"], true), "too short");
        assert!(!run(&["a +\n", " b;"], true), "a line too early");
        assert!(!run(&["a + b;", " // so"], true), "too long");
        assert!(!run(&["a - b;"], true));
        assert!(!run(&[], true));
    }
}
