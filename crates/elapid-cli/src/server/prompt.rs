//! Prompts as clients write them: a text, a list of tokens, texts and tokens mixed, or several.

use super::App;
use super::body::at_most;
use super::error::{Answered, ApiError};
use elapid::Special;
use serde::Deserialize;

/// A prompt, or a list of them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a text, token ids, or a list of these")]
pub enum Prompt {
    Text(String),
    Id(u32),
    List(Vec<Prompt>),
}

impl Prompt {
    fn is_id(&self) -> bool {
        matches!(self, Prompt::Id(_))
    }

    /// Each prompt, and whether they came as a list. A list with a token in it is one prompt.
    pub fn split(self, name: &str, n_max: usize) -> Answered<(Vec<Prompt>, bool)> {
        match self {
            Prompt::List(list) if !list.is_empty() && !list.iter().any(Prompt::is_id) => {
                Ok((at_most(name, list, n_max)?, true))
            }
            Prompt::Id(_) => Err(ApiError::field(name, "is a number, not a text or a list")),
            one => Ok((vec![one], false)),
        }
    }

    /// Refuses what OpenAI does not have: nothing, and texts and tokens in one list.
    pub fn check(&self, name: &str) -> Answered<()> {
        match self {
            Prompt::List(list) if list.is_empty() => Err(ApiError::field(name, "is empty")),
            Prompt::List(list) if !list.iter().all(Prompt::is_id) => {
                Err(ApiError::field(name, "holds more than token ids in one list"))
            }
            _ => Ok(()),
        }
    }

    /// Its tokens; one that begins with a text begins as a text does.
    pub fn ids(&self, app: &App, name: &str) -> Answered<Vec<u32>> {
        let list = match self {
            Prompt::Text(text) => return app.encode_prompt(text),
            Prompt::Id(_) => std::slice::from_ref(self),
            Prompt::List(list) => list,
        };
        let begin = matches!(list.first(), Some(Prompt::Text(_)));
        let mut ids = if begin { app.tokenizer.begin().to_vec() } else { Vec::new() };
        for part in list {
            match part {
                Prompt::Text(text) => ids.extend(app.tokenizer.encode(text, Special::Parse)?),
                Prompt::Id(id) => ids.push(app.token_id(name, *id)?),
                Prompt::List(_) => return Err(ApiError::field(name, "is nested too deeply")),
            }
        }
        if ids.is_empty() { app.begin() } else { Ok(ids) }
    }
}
