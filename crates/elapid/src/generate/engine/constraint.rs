//! What an answer must look like: JSON of a schema, a regular expression, a grammar.
//!
//! llguidance keeps a parser beside each answer. Before a token is drawn it says which tokens may
//! follow, out of a trie of the vocabulary that is made once; the others get a logit of minus
//! infinity. A token that ends a text is allowed only where the grammar may end; where nothing else
//! may follow, the answer is over.
//!
//! Grammars come from strangers: their size and depth are bounded here, the work of a parser by
//! the limits of llguidance, and what it panics of becomes an error.

use super::Constraint;
use crate::error::{Error, Result};
use crate::text::tokenizer::Tokenizer;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, panic_utils};
use serde_json::Value;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// Bytes of a grammar, at most; schemas that people write are a tenth of it.
const N_BYTES_MAX: usize = 1 << 18;
/// Lists and objects within each other in a schema, at most: its reader descends into them.
const DEPTH_MAX: usize = 64;
/// Bytes of a token that can be part of a constrained answer: a trie is as deep as its longest.
const TOKEN_BYTES_MAX: usize = 512;
/// Bytes of all tokens together, so that nodes of the trie can be numbered.
const VOCAB_BYTES_MAX: usize = 1 << 22;

const HINT: &str = "llguidance's documentation says what schemas and grammars may contain";

pub(super) struct Grammars {
    factory: ParserFactory,
    ends: Arc<[u32]>,
}

/// What one answer must look like, and how far it is.
pub(super) struct Rule {
    matcher: Matcher,
    ends: Arc<[u32]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Open,
    Over,
}

impl Grammars {
    pub(super) fn new(tokenizer: &Tokenizer) -> Result<Grammars> {
        let (mut words, mut n_bytes) = (Vec::with_capacity(tokenizer.n_vocab() + 1), 0);
        for id in 0..tokenizer.n_vocab() as u32 {
            let mut word = tokenizer.bytes(id).unwrap_or_default();
            if word.len() > TOKEN_BYTES_MAX {
                word.clear();
            }
            if tokenizer.is_special(id) || tokenizer.eog().contains(&id) {
                word.insert(0, TokTrie::SPECIAL_TOKEN_MARKER);
            }
            n_bytes += word.len();
            words.push(word);
        }
        if n_bytes > VOCAB_BYTES_MAX || words.len() > VOCAB_BYTES_MAX {
            let problem = format!("the tokens of this model take {n_bytes} bytes");
            let hint = "answers of so large a vocabulary cannot be constrained";
            return Err(Error::input(problem, hint));
        }
        let mut ends = tokenizer.eog().to_vec();
        if ends.is_empty() {
            // There must be one: an id that no model draws.
            ends.push(words.len() as u32);
            words.push(b"\xff<end>".to_vec());
        }
        let info = TokRxInfo::new(words.len() as u32, ends[0]);
        let make = AssertUnwindSafe(|| {
            let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory = ParserFactory::new_simple(&env)?;
            factory.quiet();
            *factory.limits_mut() = ParserLimits {
                max_grammar_size: 100_000,
                max_lexer_states: 20_000,
                verbose_errors: false,
                ..ParserLimits::default()
            };
            Ok(factory)
        });
        let factory = panic_utils::catch_unwind(make).map_err(|error| {
            let problem = format!("this vocabulary cannot be constrained: {}", words_of(&error));
            Error::input(problem, "ask without a schema or grammar")
        })?;
        Ok(Grammars { factory, ends: ends.into() })
    }

    pub(super) fn rule(&self, constraint: &Constraint) -> Result<Rule> {
        check(constraint)?;
        let grammar = match constraint {
            Constraint::JsonSchema(schema) => TopLevelGrammar::from_json_schema(schema.clone()),
            Constraint::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Constraint::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
        };
        let make = AssertUnwindSafe(|| self.factory.create_parser(grammar));
        let matcher = Matcher::new(panic_utils::catch_unwind(make));
        match matcher.get_error() {
            None => Ok(Rule { matcher, ends: self.ends.clone() }),
            Some(words) => {
                let problem = format!("the {} cannot be used: {words}", name(constraint));
                Err(Error::input(words_of(&problem), HINT))
            }
        }
    }
}

impl Rule {
    /// Forbids the tokens that may not follow.
    pub(super) fn mask(&mut self, logits: &mut [f32]) -> Result<Progress> {
        if self.matcher.is_stopped() {
            return Ok(Progress::Over);
        }
        let mask = self.matcher.compute_mask().map_err(|error| failed(&error))?;
        let mut n_allowed = 0;
        let words = mask.as_slice().iter().copied().chain(std::iter::repeat(0));
        for (logits, word) in logits.chunks_mut(u32::BITS as usize).zip(words) {
            for (bit, logit) in logits.iter_mut().enumerate() {
                match word >> bit & 1 {
                    0 => *logit = f32::NEG_INFINITY,
                    _ => n_allowed += 1,
                }
            }
        }
        Ok(if n_allowed == 0 { Progress::Over } else { Progress::Open })
    }

    pub(super) fn is_end(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    pub(super) fn take(&mut self, id: u32) -> Result<Progress> {
        if self.is_end(id) {
            return Ok(Progress::Over);
        }
        self.matcher.consume_token(id).map_err(|error| failed(&error))?;
        Ok(if self.matcher.is_stopped() { Progress::Over } else { Progress::Open })
    }
}

fn name(constraint: &Constraint) -> &'static str {
    match constraint {
        Constraint::JsonSchema(_) => "JSON schema",
        Constraint::Regex(_) => "regular expression",
        Constraint::Lark(_) => "grammar",
    }
}

/// Size and depth, before anybody reads further; readers of text bound its depth themselves.
fn check(constraint: &Constraint) -> Result<()> {
    let (n_bytes, depth) = match constraint {
        Constraint::JsonSchema(schema) => (schema.to_string().len(), depth(schema)),
        Constraint::Regex(text) | Constraint::Lark(text) => (text.len(), 0),
    };
    let (name, hint) = (name(constraint), "give a simpler one");
    if n_bytes > N_BYTES_MAX {
        let problem = format!("the {name} has {n_bytes} bytes, at most {N_BYTES_MAX} are allowed");
        return Err(Error::input(problem, hint));
    }
    if depth > DEPTH_MAX {
        let problem = format!("the {name} is {depth} levels deep, at most {DEPTH_MAX} are allowed");
        return Err(Error::input(problem, hint));
    }
    Ok(())
}

fn depth(value: &Value) -> usize {
    match value {
        Value::Array(list) => 1 + list.iter().map(depth).max().unwrap_or(0),
        Value::Object(map) => 1 + map.values().map(depth).max().unwrap_or(0),
        _ => 0,
    }
}

fn failed(error: &impl std::fmt::Display) -> Error {
    Error::input(format!("the constraint failed: {}", words_of(error)), "give a simpler one")
}

/// Without the trace that a caught panic carries.
fn words_of(error: &impl std::fmt::Display) -> String {
    let text = error.to_string();
    text.split("\n<backtrace>").next().unwrap_or_default().trim().to_string()
}
