//! Fill in the middle: pieces of documents with a hole, for a model that is to fill it.
//!
//! A piece is cut in three at two characters chosen evenly, and the middle goes last (Bavarian et
//! al., 2022), laid out as `fim.rs` lays out prompts, so that training and asking agree:
//!
//! ```text
//! PSM   [begin] PRE prefix SUF suffix MID middle [end]
//! SPM   [begin] SUF suffix PRE prefix MID middle [end]
//! ```
//!
//! SPM is the paper's plain order, which llama.cpp asks for too, and not its variant `PRE SUF
//! suffix MID prefix middle`. A family without MID (Codestral) has SPM only. `end` is the family's
//! own end of a middle where it has one.
//!
//! In half of the changed pieces the second cut is where the line of the first ends, or one to
//! three lines further: what an editor asks for is a few lines at most.
//!
//! Cuts are between characters, not tokens: the cursor of a person stands anywhere, and a model
//! that saw only ends of tokens cannot continue half a word. So prefix, middle and suffix are
//! encoded anew, each for itself, without the space that some tokenizers put before a text.
//!
//! Everything is learned as in the paper, prefix and suffix too, but for PRE, SUF and MID: no
//! model should write them of itself.
//!
//! Pieces come first: a document is cut into runs of about half a row, at ends of lines where
//! there are some, and each run is changed or not on its own. Had the whole document been changed,
//! rows would cut off the prefix and suffix of most middles, and the model would learn to fill
//! holes it cannot see (context-level FIM, as SantaCoder does it). Half a row, since rows are cut
//! without regard to pieces: then more than half of the pieces lie in one row.
//!
//! The randomness is a function of (seed, epoch, document, piece).
//!
//! Not here: documents with parts that are only read, and conversations; they stay as they are.

use super::{Encoded, Ends, adds_space, encode_after};
use crate::error::{Error, Result};
use crate::tensor::rng::Rng;
use crate::text::fim::{FimStyle, FimTokens};
use crate::text::tokenizer::{Special, Tokenizer};
use std::ops::Range;

/// How much is turned into fill in the middle, and with what.
#[derive(Clone, Debug, PartialEq)]
pub struct FimTraining {
    /// Share of pieces that are changed, 0 to 1.
    pub rate: f64,
    /// Share of changed pieces that have the suffix first, 0 to 1.
    pub spm: f64,
    /// The base model's tokens, or ours.
    pub tokens: FimTokens,
}

/// Tokens with what is to be predicted; the first never is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sequence {
    pub(super) ids: Vec<u32>,
    pub(super) learned: Vec<bool>,
}

/// A run of a document's tokens as it is to be learned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Run {
    /// As it stands: these tokens, the first of them only as context.
    Plain(Range<usize>),
    Filled(Sequence),
}

/// Turns documents into runs.
pub(super) struct Transform<'a> {
    pub(super) settings: &'a FimTraining,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) ends: Ends,
}

/// The random numbers of one piece.
struct Draw {
    rng: Rng,
    piece: u64,
}

/// What a random number decides.
#[derive(Clone, Copy)]
enum Choice {
    Change,
    FirstCut,
    SecondCut,
    Style,
    Lines,
}

impl Draw {
    fn uniform(&self, choice: Choice) -> f64 {
        self.rng.uniform(5 * self.piece + choice as u64)
    }

    fn below(&self, choice: Choice, bound: usize) -> usize {
        self.rng.below(5 * self.piece + choice as u64, bound as u64) as usize
    }
}

/// Refuses shares outside of 0 to 1, tokens that are not there, and tokenizers whose tokens do not
/// spell a text one by one: there pieces cannot be cut out.
pub(super) fn check(settings: &FimTraining, tokenizer: &Tokenizer) -> Result<()> {
    for (name, share) in [("rate", settings.rate), ("spm", settings.spm)] {
        if !(0.0..=1.0).contains(&share) {
            let problem = format!("fill in the middle: `{name}` is {share}");
            return Err(Error::input(problem, "give a share from 0 to 1"));
        }
    }
    let tokens = &settings.tokens;
    for id in [Some(tokens.prefix), Some(tokens.suffix), tokens.middle].into_iter().flatten() {
        if tokenizer.token(id).is_none() {
            let problem = format!("fill in the middle: the tokenizer has no token {id}");
            return Err(Error::input(problem, "use the tokens of the model's own tokenizer"));
        }
    }
    const SAMPLE: &str = "a b  c\n\td ä";
    let ids = tokenizer.encode(SAMPLE, Special::Plain)?;
    let spelled = spell(tokenizer, &ids);
    if spelled.strip_prefix(b" ").unwrap_or(&spelled) != SAMPLE.as_bytes() {
        let problem = "fill in the middle: this tokenizer's tokens do not spell a text one by one";
        return Err(Error::input(problem, "train without fill in the middle"));
    }
    Ok(())
}

fn spell(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| tokenizer.bytes(*id).unwrap_or_default()).collect()
}

/// Where the text of a document lies between begin and end.
fn text_range(document: &Encoded, ends: Ends) -> Range<usize> {
    let ids = &document.ids;
    let start = usize::from(ends.begin.is_some() && ids.first() == ends.begin.as_ref());
    let has_end = ends.end.is_some() && ids.len() > start && ids.last() == ends.end.as_ref();
    start..ids.len() - usize::from(has_end)
}

/// Cuts a document into pieces of at most about `n_tok_piece` tokens, all alike in length. None
/// where the document is not plain text that is learned as a whole.
pub(super) fn pieces(
    document: &Encoded,
    tokenizer: &Tokenizer,
    ends: Ends,
    n_tok_piece: usize,
) -> Vec<Range<usize>> {
    let text = text_range(document, ends);
    let is_learned = document.learned.iter().skip(1).all(|learned| *learned);
    let is_plain = document.ids[text.clone()].iter().all(|id| !tokenizer.is_special(*id));
    if !is_learned || !is_plain || text.is_empty() {
        return Vec::new();
    }
    let n_pieces = text.len().div_ceil(n_tok_piece.max(1));
    let mut list = Vec::with_capacity(n_pieces);
    let mut start = text.start;
    for n_left in (1..=n_pieces).rev() {
        let n_tok = (text.end - start) / n_left;
        let end = match n_left {
            1 => text.end,
            _ => cut(&document.ids, start + n_tok - n_tok / 4..start + n_tok, tokenizer),
        };
        if end > start {
            list.push(start..end.min(text.end));
        }
        start = end.min(text.end);
    }
    list
}

/// Where to cut: after the last end of line in `window`, else at its end or as soon after as a
/// character begins.
fn cut(ids: &[u32], window: Range<usize>, tokenizer: &Tokenizer) -> usize {
    let bytes = |at: usize| tokenizer.bytes(ids[at]).unwrap_or_default();
    let after_line = window.clone().rev().find(|at| bytes(*at).ends_with(b"\n"));
    let is_inside = |at: &usize| bytes(*at).first().is_some_and(|byte| byte & 0xc0 == 0x80);
    let after_letter = || (window.end..ids.len()).find(|at| !is_inside(at)).unwrap_or(ids.len());
    after_line.map_or_else(after_letter, |at| at + 1)
}

impl Transform<'_> {
    /// The runs of a document: plain ones and, by chance, such with a hole. Every token of the
    /// text is in one piece, and each piece in one run; a document whose last piece has a hole
    /// ends there.
    pub(super) fn runs(&self, document: &Encoded, pieces: &[Range<usize>], rng: &Rng) -> Vec<Run> {
        let text = text_range(document, self.ends);
        let mut runs = Vec::new();
        // Where the plain run that is being gathered begins.
        let mut plain = 0;
        for (n, piece) in pieces.iter().enumerate() {
            let draw = Draw { rng: *rng, piece: n as u64 };
            if draw.uniform(Choice::Change) >= self.settings.rate {
                continue;
            }
            let Some(sequence) = self.filled(document, piece, &draw) else { continue };
            runs.push(Run::Plain(plain..piece.start));
            runs.push(Run::Filled(sequence));
            // What follows continues from the last token of the piece.
            plain = if piece.end == text.end { document.ids.len() } else { piece.end - 1 };
        }
        runs.push(Run::Plain(plain..document.ids.len()));
        runs.retain(|run| !matches!(run, Run::Plain(range) if range.len() < 2));
        runs
    }

    /// A piece with a hole; `None` where its tokens are no text, which then stays as it is.
    fn filled(&self, document: &Encoded, piece: &Range<usize>, draw: &Draw) -> Option<Sequence> {
        let text = String::from_utf8(spell(self.tokenizer, &document.ids[piece.clone()])).ok()?;
        let is_first = piece.start == text_range(document, self.ends).start;
        let text = match is_first && adds_space(self.tokenizer).ok()? {
            true => text.strip_prefix(' ').unwrap_or(&text),
            false => &text,
        };
        (!text.is_empty()).then(|| self.fill(text, draw).ok())?
    }

    /// Lays out a text with a hole.
    fn fill(&self, text: &str, draw: &Draw) -> Result<Sequence> {
        let n_char = text.chars().count();
        let at = |choice| {
            let n = draw.below(choice, n_char + 1);
            text.char_indices().nth(n).map_or(text.len(), |pair| pair.0)
        };
        let first = at(Choice::FirstCut);
        let second = match draw.below(Choice::Lines, 8) {
            n @ 0..4 => {
                text[first..].match_indices('\n').nth(n).map_or(text.len(), |end| first + end.0)
            }
            _ => at(Choice::SecondCut),
        };
        let (start, end) = (first.min(second), first.max(second));
        let encode = |part: &str| encode_after(self.tokenizer, part, Special::Plain);
        let (prefix, suffix) = (encode(&text[..start])?, encode(&text[end..])?);
        let style = match draw.uniform(Choice::Style) < self.settings.spm {
            true => FimStyle::Spm,
            false => FimStyle::Psm,
        };
        let tokens = &self.settings.tokens;
        let mut ids: Vec<u32> = self.ends.begin.into_iter().collect();
        ids.extend(tokens.layout(style, &prefix, &suffix));
        ids.extend(encode(&text[start..end])?);
        ids.extend(tokens.end.or(self.ends.end));
        let marks = [Some(tokens.prefix), Some(tokens.suffix), tokens.middle];
        let mut learned: Vec<bool> = ids.iter().map(|id| !marks.contains(&Some(*id))).collect();
        learned[0] = false;
        Ok(Sequence { ids, learned })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{TEXT, spaced_tokenizer, tokenizer};
    use super::super::{Document, encode};
    use super::*;

    const TOKENS: FimTokens = FimTokens {
        prefix: 1,
        suffix: 2,
        middle: Some(3),
        pad: None,
        repo: None,
        sep: None,
        end: None,
        style: FimStyle::Psm,
    };

    fn settings(rate: f64, spm: f64) -> FimTraining {
        FimTraining { rate, spm, tokens: TOKENS }
    }

    /// Prefix, middle and suffix of a filled sequence, and what order they came in.
    fn parts(sequence: &Sequence, tokens: &FimTokens, ends: Ends) -> ([Vec<u32>; 3], FimStyle) {
        let begin = usize::from(ends.begin.is_some());
        let n_end = usize::from(tokens.end.or(ends.end).is_some());
        let ids = &sequence.ids[begin..sequence.ids.len() - n_end];
        let style = if ids[0] == tokens.suffix { FimStyle::Spm } else { FimStyle::Psm };
        let other = if style == FimStyle::Spm { tokens.prefix } else { tokens.suffix };
        let at = ids.iter().position(|id| *id == other).unwrap();
        let middle = ids.iter().position(|id| Some(*id) == tokens.middle);
        let last = middle.unwrap_or(ids.len());
        let first = ids[1..at].to_vec();
        let second = ids[at + 1..last].to_vec();
        let middle = middle.map_or(Vec::new(), |middle| ids[middle + 1..].to_vec());
        match style {
            FimStyle::Psm => ([first, middle, second], style),
            // Without a middle token the second is prefix and middle in one.
            FimStyle::Spm => ([second, middle, first], style),
        }
    }

    /// The text that runs stand for: a plain run without the token it continues from.
    fn reassembled(document: &Encoded, runs: &[Run], transform: &Transform<'_>) -> String {
        let mut bytes = Vec::new();
        let text = text_range(document, transform.ends);
        for run in runs {
            let ids = match run {
                Run::Plain(range) => {
                    let start = if range.start == 0 { text.start } else { range.start + 1 };
                    document.ids[start..range.end.min(text.end)].to_vec()
                }
                Run::Filled(sequence) => {
                    parts(sequence, &transform.settings.tokens, transform.ends).0.concat()
                }
            };
            bytes.extend(spell(transform.tokenizer, &ids));
        }
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn with_the_marks_taken_out_the_text_is_whole_again() {
        let text = TEXT.repeat(5);
        let bytes = (tokenizer(), TOKENS, Ends { begin: Some(0), end: Some(0) });
        let bare = (tokenizer(), TOKENS, Ends { begin: None, end: None });
        let codestral = FimTokens { middle: None, ..TOKENS };
        let codestral = (tokenizer(), codestral, Ends { begin: Some(4), end: Some(5) });
        let spaced = spaced_tokenizer();
        let special: Vec<u32> = (0..9).filter(|id| spaced.is_special(*id)).collect();
        let marks = FimTokens {
            prefix: special[0],
            suffix: special[1],
            middle: Some(special[2]),
            end: Some(7),
            ..TOKENS
        };
        let spaced = (spaced, marks, Ends { begin: None, end: None });
        for (n, (tokenizer, tokens, ends)) in [bytes, bare, codestral, spaced].iter().enumerate() {
            let document =
                encode(&Document::whole("a.rs", text.clone()), tokenizer, *ends).unwrap();
            let mut seen = [0, 0, 0];
            for seed in 0..60 {
                let settings = FimTraining { rate: 0.6, spm: 0.5, tokens: tokens.clone() };
                check(&settings, tokenizer).unwrap();
                let transform = Transform { settings: &settings, tokenizer, ends: *ends };
                let pieces = pieces(&document, tokenizer, *ends, 30);
                let runs = transform.runs(&document, &pieces, &Rng::new(seed, 0));
                let whole = reassembled(&document, &runs, &transform);
                // The space that a tokenizer puts before a text stays only in a plain run.
                let is_plain = matches!(runs[0], Run::Plain(_));
                let has_space = is_plain && adds_space(tokenizer).unwrap();
                let want = if has_space { format!(" {text}") } else { text.clone() };
                assert_eq!(whole, want, "tokenizer {n}");
                for run in &runs {
                    match run {
                        Run::Plain(_) => seen[2] += 1,
                        Run::Filled(sequence) => {
                            seen[parts(sequence, tokens, *ends).1 as usize] += 1;
                        }
                    }
                }
            }
            let want_psm = tokens.middle.is_some();
            assert!((seen[0] > 20) == want_psm && seen[1] > 20 && seen[2] > 20, "{n} {seen:?}");
        }
    }

    #[test]
    fn everything_is_learned_but_the_marks_and_the_order_is_that_of_a_prompt() {
        let tokenizer = tokenizer();
        let ends = Ends { begin: Some(0), end: Some(0) };
        for (spm, want) in [(0.0, FimStyle::Psm), (1.0, FimStyle::Spm)] {
            let settings = settings(1.0, spm);
            let transform = Transform { settings: &settings, tokenizer: &tokenizer, ends };
            let draw = Draw { rng: Rng::new(1, 1), piece: 3 };
            let sequence = transform.fill(TEXT, &draw).unwrap();
            let ([prefix, middle, suffix], style) = parts(&sequence, &TOKENS, ends);
            assert_eq!(style, want);
            let prompt = TOKENS.layout(style, &prefix, &suffix);
            assert_eq!(sequence.ids, [vec![0], prompt, middle, vec![0]].concat());
            for (at, id) in sequence.ids.iter().enumerate() {
                let is_mark = [1, 2, 3].contains(id);
                assert_eq!(sequence.learned[at], at > 0 && !is_mark, "token {at}");
            }
        }
        // CodeLlama ends a middle with a token of its own.
        let tokens = FimTokens { end: Some(5), ..TOKENS };
        let settings = FimTraining { tokens, ..settings(1.0, 0.0) };
        let transform = Transform { settings: &settings, tokenizer: &tokenizer, ends };
        let sequence = transform.fill("ab", &Draw { rng: Rng::new(1, 1), piece: 0 }).unwrap();
        assert_eq!(sequence.ids.last(), Some(&5));
    }

    #[test]
    fn cuts_fall_between_all_characters_alike_or_at_ends_of_lines_and_the_rate_is_kept() {
        let tokenizer = tokenizer();
        let ends = Ends { begin: Some(0), end: Some(0) };
        let settings = settings(0.3, 0.0);
        let transform = Transform { settings: &settings, tokenizer: &tokenizer, ends };
        let document = encode(&Document::whole("a", "äß数🦀"), &tokenizer, ends).unwrap();
        let pieces = pieces(&document, &tokenizer, ends, 1000);
        let (mut n_changed, mut n_whole) = (0, 0);
        let mut counts = [0; 5];
        const N: u64 = 4000;
        for seed in 0..N {
            let runs = transform.runs(&document, &pieces, &Rng::new(5, seed));
            let [Run::Filled(sequence)] = runs.as_slice() else { continue };
            n_changed += 1;
            let ([prefix, middle, suffix], _) = parts(sequence, &TOKENS, ends);
            // Half of the holes end with the line, which is the text here.
            let n_ends = if suffix.is_empty() { 1 } else { 2 };
            for ids in [prefix.clone(), [prefix, middle].concat()].iter().take(n_ends) {
                let text = String::from_utf8(spell(&tokenizer, ids)).unwrap();
                counts[text.chars().count()] += 1;
            }
            n_whole += u32::from(n_ends == 1);
        }
        let share = f64::from(n_changed) / N as f64;
        assert!((share - 0.3).abs() < 0.03, "{share}");
        // Of five places two are drawn: in 9 of 25 cases one of them is the last.
        let share = f64::from(n_whole) / f64::from(n_changed);
        assert!((share - (0.5 + 0.5 * 0.36)).abs() < 0.04, "{share}");
        let most = counts[..4].iter().max().unwrap() - counts[..4].iter().min().unwrap();
        assert!(most < counts[0] / 4, "{counts:?}");
    }

    #[test]
    fn pieces_are_alike_in_length_and_end_with_lines_where_they_can() {
        let tokenizer = tokenizer();
        let ends = Ends { begin: Some(0), end: Some(0) };
        let text = "one word\n".repeat(120);
        let document = encode(&Document::whole("a", text), &tokenizer, ends).unwrap();
        let list = pieces(&document, &tokenizer, ends, 50);
        assert!(list.len() > 3);
        assert_eq!((list[0].start, list[list.len() - 1].end), (1, document.ids.len() - 1));
        assert!(list.windows(2).all(|pair| pair[0].end == pair[1].start));
        for piece in &list {
            assert!((20..=60).contains(&piece.len()), "{list:?}");
            let text = spell(&tokenizer, &document.ids[piece.clone()]);
            assert!(text.ends_with(b"\n"), "{list:?}");
        }
        // Signs of several tokens each, and no line: no sign is cut in two.
        let signs = encode(&Document::whole("a", "🦊".repeat(100)), &tokenizer, ends).unwrap();
        assert!(signs.ids.len() > 200, "the tokenizer knows the sign");
        for piece in pieces(&signs, &tokenizer, ends, 17) {
            assert!(String::from_utf8(spell(&tokenizer, &signs.ids[piece])).is_ok());
        }
        // Longer pieces than the document, pieces of nothing, no document.
        assert_eq!(pieces(&document, &tokenizer, ends, 1 << 40).len(), 1);
        assert!(pieces(&document, &tokenizer, ends, 0).len() > 100);
        let nothing = encode(&Document::whole("a", ""), &tokenizer, ends).unwrap();
        assert!(pieces(&nothing, &tokenizer, ends, 9).is_empty());
    }

    #[test]
    fn prompts_and_conversations_stay_as_they_are() {
        let tokenizer = tokenizer();
        let ends = Ends { begin: Some(0), end: Some(0) };
        let part = |learned, special| super::super::Part { text: "word".into(), learned, special };
        for parts in [vec![part(false, false), part(true, false)], vec![part(true, true); 2]] {
            let mut document = Document { name: "a".into(), language: "text", parts };
            if document.parts[0].special {
                document.parts[1].text = "word<|im_end|>".into();
            }
            let encoded = encode(&document, &tokenizer, ends).unwrap();
            assert!(pieces(&encoded, &tokenizer, ends, 9).is_empty());
        }
    }

    #[test]
    fn settings_that_cannot_be_are_refused() {
        let tokenizer = tokenizer();
        let with = |rate, spm| check(&settings(rate, spm), &tokenizer).map_err(|e| e.report());
        assert!(with(1.5, 0.0).unwrap_err().contains("`rate` is 1.5"));
        assert!(with(0.5, f64::NAN).unwrap_err().contains("`spm` is NaN"));
        let tokens = FimTokens { suffix: 1 << 20, ..TOKENS };
        let error = check(&FimTraining { rate: 0.5, spm: 0.5, tokens }, &tokenizer).unwrap_err();
        assert!(error.report().contains("no token 1048576"), "{error}");
    }
}
