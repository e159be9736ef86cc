//! `POST /infill`: what stands between two texts, for editors.
//!
//!     REPO project  SEP path  other file ...  SEP path of this file
//!     PRE prefix SUF suffix MID           or as the family of the model has it
//!
//! Tokens of the context are dealt out as follows, whatever a request asks for: a budget that
//! depended on `n_predict` would give a warm-up (`n_predict: 0`) another prompt than the request
//! that it warms up for.
//!
//! | part    | tokens at most                                                         |
//! |---------|------------------------------------------------------------------------|
//! | answer  | an eighth is kept free                                                 |
//! | suffix  | an eighth, and `n_suffix` (256 where nobody says)                      |
//! | prefix  | five eighths, and `n_prefix`                                           |
//! | others  | what is left                                                           |
//!
//! Better than llama.cpp: `project` and `filename` name the repository and the file, and the
//! prompt is part of the prefix when it is cut into tokens.

use super::completion::{Answers, Fields};
use super::window;
use crate::server::App;
use crate::server::body::{Body, Size, at_most};
use crate::server::ending::Ending;
use crate::server::error::{Answered, ApiError};
use crate::server::params::{Defaults, Params};
use axum::extract::State;
use axum::response::Response;
use elapid::{FimContext, FimFile, Special};
use serde::Deserialize;
use std::sync::Arc;

/// Tokens of the suffix where nobody says: they are read anew with every key that is pressed.
const N_SUFFIX: usize = 256;

const N_FILES_MAX: usize = 1024;

/// A hole, and what is known around it, as `/infill` and Tabby (by the other names) are told.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct Hole {
    #[serde(alias = "prefix")]
    input_prefix: Option<String>,
    /// The part of the prefix in the line of the cursor.
    prompt: Option<String>,
    #[serde(alias = "suffix")]
    input_suffix: Option<String>,
    input_extra: Option<Vec<File>>,
    project: Option<String>,
    #[serde(alias = "filepath")]
    filename: Option<String>,
    /// Tokens of prefix and suffix, at most.
    n_prefix: Option<Size>,
    n_suffix: Option<Size>,
}

#[derive(Deserialize)]
struct File {
    filename: Option<String>,
    text: Option<String>,
}

fn shown(file: &File) -> FimFile<'_> {
    // As llama.cpp calls a file without a name.
    let path = file.filename.as_deref().unwrap_or("tmp");
    FimFile { path, text: file.text.as_deref().unwrap_or_default() }
}

impl Hole {
    /// Before it, up to the cursor.
    pub fn prefix(&self) -> String {
        [&self.input_prefix, &self.prompt].into_iter().flatten().map(String::as_str).collect()
    }

    fn suffix(&self) -> &str {
        self.input_suffix.as_deref().unwrap_or_default()
    }

    /// The prompt, and whether something was left out of the file.
    pub fn prompt(&self, app: &App) -> Answered<(Vec<u32>, bool)> {
        let Some(fim) = &app.fim else {
            let words = "this model has no tokens for filling in the middle; use /completion";
            return Err(ApiError::bad(words).with_code("no_fim"));
        };
        let tokenizer = &*app.tokenizer;
        let eighth = app.context / 8;
        let n_suffix = self.n_suffix.map_or(N_SUFFIX, Size::size).min(eighth);
        let n_prefix = self.n_prefix.map_or(usize::MAX, Size::size).min(5 * eighth);
        let (suffix, suffix_is_cut) = window::after(tokenizer, self.suffix(), n_suffix)?;
        let (prefix, prefix_is_cut) = window::before(tokenizer, &self.prefix(), n_prefix)?;
        let begin = tokenizer.begin();
        // Marks, and what the parts above may take at most, so that nothing here depends on them.
        let n_kept = begin.len() + 3 + eighth;
        let context = FimContext {
            repo: self.project.as_deref().unwrap_or("project"),
            path: self.filename.as_deref().unwrap_or("file"),
            files: self.input_extra.iter().flatten().map(shown).collect(),
            n_tok_max: app.context.saturating_sub(n_kept + n_suffix + n_prefix),
        };
        let mut error = None;
        let mut encode = |text: &str| {
            tokenizer.encode(text, Special::Plain).unwrap_or_else(|problem| {
                error = Some(problem);
                Vec::new()
            })
        };
        let context = fim.context(&context, &mut encode);
        if let Some(error) = error {
            return Err(error.into());
        }
        let laid_out = fim.layout(fim.style, &prefix, &suffix);
        let ids = [begin, &context, &laid_out].concat();
        Ok((ids, prefix_is_cut || suffix_is_cut))
    }

    /// Where the answer ends besides where the model ends it.
    pub fn ending(&self) -> Ending {
        Ending::between(&self.prefix(), self.suffix())
    }
}

pub async fn infill(State(app): State<Arc<App>>, body: Body) -> Answered<Response> {
    let params = Params::new(&app, body.read()?, Defaults::Infill, app.default_adapters())?;
    let mut fields: Fields = body.read()?;
    let mut hole: Hole = body.read()?;
    let files = hole.input_extra.take().unwrap_or_default();
    hole.input_extra = Some(at_most("input_extra", files, N_FILES_MAX)?);
    let (prompt, truncated) = app.prepare(|| hole.prompt(&app)).await?;
    let mut answers = Answers::new(&app, params.with_fim_stops(&app), &mut fields, vec![prompt])?;
    answers.truncated = truncated;
    answers.respond(|| fields.ending(hole.ending())).await
}
