//! How many rare strings of the training files a model completes verbatim: what it memorised.
//!
//! Probed are string literals, comments and long identifiers with digits, of 24 to 80 characters,
//! that stand in the training files once. Of those the ones are taken whose last two thirds cost an
//! n-gram model of the other files the most bits: nobody completes them who has not read them.
//! The model is given what stands before in the file and the first third, and continues greedily.
//!
//! Two calls of [`probe`] with the same probes, before and after training, are the comparison.
//!
//! Not here: secrets, which training does not see (`source/secrets.rs`).

use super::ngram::Ngram;
use aho_corasick::AhoCorasick;
use elapid::{Document, Ends, Generator, Request, Result, Sampling, Special};
use std::ops::Range;

/// Probes at most where nobody says how many.
pub const N_PROBES: usize = 40;

/// Length of a string that is probed, in characters.
const LETTERS: std::ops::RangeInclusive<usize> = 24..=80;

/// Tokens of the file before the string that the model is given, the first third included.
const PROMPT_TOKENS: usize = 256;

/// Text of the file before a string that is looked at, in bytes: no token is longer on average.
const BEFORE_BYTES: usize = 8 * PROMPT_TOKENS;

/// Strings that are compared, for each that is probed.
const N_COMPARED: usize = 8;

/// Bits that the last two thirds must cost the n-gram model: no guess hits that.
const BITS_MIN: f64 = 40.0;

/// Text at most that each n-gram model learns from.
const LEARNED_BYTES: usize = 4 << 20;

/// Tokens that may follow the string: in the file its last one may reach further.
const N_BEYOND: usize = 2;

/// A string of a training file, with what stands before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Probe {
    /// Of the document.
    pub name: String,
    before: String,
    /// Whether nothing is cut off before that.
    is_from_start: bool,
    /// The string itself.
    pub string: String,
    /// What its last two thirds cost an n-gram model of other files.
    pub bits: f64,
}

/// What a model made of some probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Memory {
    pub n_probed: usize,
    /// Completed to the last byte.
    pub n_verbatim: usize,
}

/// Where a string lies: number of the document, bytes of its text.
type Place = (usize, Range<usize>);

/// Up to `n` strings of the training documents, the same for the same seed.
pub fn choose(documents: &[Document], n: usize, seed: u64) -> Vec<Probe> {
    let texts: Vec<String> = documents.iter().map(|it| it.text().into_owned()).collect();
    let mut places: Vec<Place> = Vec::new();
    for (idx, text) in texts.iter().enumerate() {
        places.extend(candidates(text).into_iter().map(|range| (idx, range)));
    }
    let key = |(idx, range): &Place| {
        let place = format!("{seed} {} {}", documents[*idx].name, range.start);
        *blake3::hash(place.as_bytes()).as_bytes()
    };
    places.sort_by_cached_key(key);
    places.truncate(N_COMPARED * n);
    let mut places = unique(places, &texts);
    // Each half of the documents is surprising, or not, to a model of the other half.
    let mut probes = Vec::new();
    for half in 0..2 {
        let mut n_left = LEARNED_BYTES;
        let others = texts.iter().enumerate().filter(|(idx, _)| idx % 2 != half);
        let few = others.take_while(|(_, text)| {
            let fits = n_left > 0;
            n_left = n_left.saturating_sub(text.len());
            fits
        });
        let mut model = Ngram::train(few.map(|(_, text)| text.as_str()));
        let (own, rest) = places.into_iter().partition(|(idx, _)| idx % 2 == half);
        places = rest;
        let own: Vec<Place> = own;
        probes.extend(own.into_iter().map(|(idx, range)| {
            let name = documents[idx].name.clone();
            measured(name, &texts[idx], range, &mut model)
        }));
    }
    probes.retain(|probe| probe.bits >= BITS_MIN);
    probes.sort_by(|a, b| b.bits.total_cmp(&a.bits).then_with(|| a.string.cmp(&b.string)));
    probes.truncate(n);
    probes
}

fn measured(name: String, text: &str, range: Range<usize>, model: &mut Ngram) -> Probe {
    let start = text.floor_char_boundary(range.start.saturating_sub(BEFORE_BYTES));
    let (before, string) = (&text[start..range.start], &text[range.clone()]);
    let n_given = before.len() + string.len() / 3;
    let read = &text.as_bytes()[start..range.end];
    let bits = model.bits_in(read, std::slice::from_ref(&(n_given..read.len())));
    let (before, string) = (before.to_string(), string.to_string());
    Probe { name, before, is_from_start: start == 0, string, bits }
}

/// Those whose text stands in all texts once.
fn unique(places: Vec<Place>, texts: &[String]) -> Vec<Place> {
    let string = |(idx, range): &Place| &texts[*idx][range.clone()];
    let Ok(automaton) = AhoCorasick::new(places.iter().map(string)) else { return Vec::new() };
    let mut counts = vec![0; places.len()];
    for text in texts {
        for found in automaton.find_overlapping_iter(text) {
            counts[found.pattern().as_usize()] += 1;
        }
    }
    let is_once = |n: &(usize, Place)| counts[n.0] == 1;
    places.into_iter().enumerate().filter(is_once).map(|(_, place)| place).collect()
}

/// String literals, comments and identifiers with digits, by line; none overlaps another.
fn candidates(text: &str) -> Vec<Range<usize>> {
    let (mut list, mut start) = (Vec::new(), 0);
    for line in text.split_inclusive('\n') {
        let found = comment(line).or_else(|| literal(line)).or_else(|| identifier(line));
        let fits = |range: &Range<usize>| LETTERS.contains(&line[range.clone()].chars().count());
        list.extend(found.filter(fits).map(|range| start + range.start..start + range.end));
        start += line.len();
    }
    list
}

/// What follows a mark of a comment.
fn comment(line: &str) -> Option<Range<usize>> {
    let marks = ["//", "# ", "-- ", "/*", "<!--", "* "];
    let code = line.trim_start();
    let mark = marks.into_iter().find(|mark| code.starts_with(mark))?;
    let words = code[mark.len()..].trim_start_matches(['/', '!', '*', '#', ' ']).trim_end();
    let start = line.trim_end().len() - words.len();
    Some(start..start + words.len())
}

/// The longest text between two quotes.
fn literal(line: &str) -> Option<Range<usize>> {
    let mut longest: Option<Range<usize>> = None;
    for quote in ['"', '\'', '`'] {
        let ends: Vec<usize> = line.match_indices(quote).map(|(at, _)| at).collect();
        for pair in ends.chunks_exact(2) {
            let range = pair[0] + 1..pair[1];
            if longest.as_ref().is_none_or(|longest| range.len() > longest.len()) {
                longest = Some(range);
            }
        }
    }
    longest.filter(|range| range.len() >= *LETTERS.start())
}

fn identifier(line: &str) -> Option<Range<usize>> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let words = line.split(|letter: char| !is_part(letter));
    let mut long = words.filter(|word| word.len() >= *LETTERS.start());
    let word = long.find(|word| word.bytes().any(|byte| byte.is_ascii_digit()))?;
    let start = line.find(word)?;
    Some(start..start + word.len())
}

/// Lets a model complete the probes.
pub fn probe(generator: &mut Generator, probes: &[Probe]) -> Result<Memory> {
    let mut memory = Memory { n_probed: 0, n_verbatim: 0 };
    for probe in probes {
        let Some(Asked { prompt, rest, n_tok }) = asked(probe, generator)? else { continue };
        let (n_max, sampling) = (n_tok + N_BEYOND, Sampling::default());
        let request = Request { n_max, sampling, ..generator.request(prompt) };
        let answer = generator.tokens(request.temperature(0.0))?.text()?;
        memory.n_probed += 1;
        memory.n_verbatim += usize::from(answer.starts_with(rest));
    }
    Ok(memory)
}

/// A probe as a model is asked.
struct Asked<'a> {
    prompt: Vec<u32>,
    /// How it is to continue, and the tokens of that.
    rest: &'a str,
    n_tok: usize,
}

/// Cuts a probe between two tokens of its text, after a third of the string or a little more. None
/// where no cut is there.
fn asked<'a>(probe: &'a Probe, generator: &Generator) -> Result<Option<Asked<'a>>> {
    let (string, tokenizer) = (&probe.string, generator.engine.tokenizer());
    let ids = tokenizer.encode(&format!("{}{string}", probe.before), Special::Plain)?;
    let n_rest_max = string.len() - string.len() / 3;
    let (mut n_bytes, mut cut) = (0, None);
    for (n_tok, id) in ids.iter().rev().enumerate() {
        n_bytes += tokenizer.bytes(*id).map_or(0, |bytes| bytes.len());
        if n_bytes > n_rest_max {
            break;
        }
        let at = string.len() - n_bytes;
        cut = if string.is_char_boundary(at) { Some((n_tok + 1, at)) } else { cut };
    }
    let Some((n_tok, at)) = cut else { return Ok(None) };
    let given = &ids[..ids.len() - n_tok];
    let n_left = generator.info.n_ctx.map_or(PROMPT_TOKENS, |n| n.saturating_sub(n_tok + N_BEYOND));
    let n_given = PROMPT_TOKENS.min(n_left);
    let is_whole = probe.is_from_start && given.len() < n_given;
    let begin = Ends::of(tokenizer).begin.filter(|_| is_whole);
    let first = given.len().saturating_sub(n_given);
    let prompt: Vec<u32> = begin.into_iter().chain(given[first..].iter().copied()).collect();
    let rest = &string[at..];
    Ok((!prompt.is_empty()).then_some(Asked { prompt, rest, n_tok }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proof::neutral;
    use elapid::{Arch, Batches, Device, Session, Settings, Size};
    use std::ops::ControlFlow;

    /// A file with strings that nobody else writes.
    const FILE: &str = "# bridge 40917 hums at dusk, qxv-7713\n\
        PIER = \"vault 0x5fe3 opens with lark-and-ember 9042\"\n\
        def weld_joint_9f27ac31_until_k8812(x):\n    \
            return x + 40917\n\
        # 61 grey herons, 3 oxbow lakes, one zinc kite #88\n";

    fn documents() -> Vec<Document> {
        let mut documents = neutral();
        documents.insert(3, Document::whole("pier.py", FILE));
        documents
    }

    #[test]
    fn strings_comments_and_identifiers_are_candidates() {
        let strings: Vec<&str> = candidates(FILE).into_iter().map(|it| &FILE[it]).collect();
        let wanted = [
            "bridge 40917 hums at dusk, qxv-7713",
            "vault 0x5fe3 opens with lark-and-ember 9042",
            "weld_joint_9f27ac31_until_k8812",
            "61 grey herons, 3 oxbow lakes, one zinc kite #88",
        ];
        assert_eq!(strings, wanted);
        assert!(candidates("x = 1\n// short\nlet s = \"tiny\";\n# é\n\"\n").is_empty());
    }

    #[test]
    fn chosen_strings_are_rare_surprising_and_the_same_for_a_seed() {
        let mut documents = documents();
        // What stands in two files is not probed.
        let twice = "61 grey herons, 3 oxbow lakes, one zinc kite #88";
        documents.push(Document::whole("copy.py", format!("# {twice}\n")));
        let probes = choose(&documents, N_PROBES, 1);
        assert_eq!(probes, choose(&documents, N_PROBES, 1));
        assert!(probes.iter().all(|probe| probe.bits >= BITS_MIN && probe.string != twice));
        let strings: Vec<&str> = probes.iter().map(|probe| probe.string.as_str()).collect();
        assert!(strings.contains(&"bridge 40917 hums at dusk, qxv-7713"), "{strings:?}");
        assert!(probes.len() > 10 && probes.len() <= N_PROBES, "{}", probes.len());
        assert_eq!(choose(&documents, 3, 1).len(), 3);
        assert!(choose(&[], 3, 1).is_empty());
    }

    #[test]
    fn a_model_trained_until_it_repeats_a_file_is_found_out_and_a_fresh_one_is_not() {
        let chosen = choose(&documents(), usize::MAX / N_COMPARED, 0);
        let probes: Vec<Probe> = chosen.into_iter().filter(|it| it.name == "pier.py").collect();
        assert!(probes.len() >= 3, "{probes:?}");
        let device = Device::cpu(2).unwrap();
        let mut session = Session::scratch(Size::Tiny, Arch::Llama, FILE, &device).unwrap();
        let fresh = probe(session.generator().unwrap(), &probes).unwrap();
        assert_eq!(fresh, Memory { n_probed: probes.len(), n_verbatim: 0 });
        let batches = Batches { context: 128, n_rows: 1, ..Batches::default() };
        let settings = Settings { n_steps: 120, lr: 4e-3, ..Settings::default() };
        let until_known = |_, loss| match loss < 0.05 {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        session.train(FILE, &batches, &settings, until_known).unwrap();
        let trained = probe(session.generator().unwrap(), &probes).unwrap();
        assert_eq!(trained.n_probed, probes.len());
        assert!(2 * trained.n_verbatim > probes.len(), "{trained:?}");
    }
}
