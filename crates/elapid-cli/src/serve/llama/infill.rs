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

use super::shape::{Answers, n_indent, n_predict, time_max};
use super::window;
use crate::serve::App;
use crate::serve::ending::Ending;
use crate::serve::error::{Answered, ApiError};
use crate::serve::fields::{Fields, kind};
use crate::serve::params::{INFILL, Params};
use crate::serve::respond::respond;
use axum::extract::State;
use axum::response::Response;
use elapid::Special;
use elapid::{FimContext, FimFile};
use serde_json::Value;
use std::sync::Arc;

/// Tokens of the suffix where nobody says: they are read anew with every key that is pressed.
const N_SUFFIX: i64 = 256;

/// Other files in one request.
const N_FILES_MAX: usize = 1024;

/// A hole, and what is known around it.
#[derive(Default)]
pub struct Hole {
    /// Before it, up to the cursor.
    pub prefix: String,
    /// After it.
    pub suffix: String,
    /// Other files: path and text.
    pub files: Vec<(String, String)>,
    /// Name of the repository.
    pub project: String,
    /// Path of the file.
    pub path: String,
    /// Tokens of prefix and suffix, at most.
    pub n_prefix_max: usize,
    pub n_suffix_max: usize,
}

impl Hole {
    /// A hole in a file, with nothing else known.
    pub fn new(prefix: &str, suffix: &str) -> Hole {
        Hole {
            prefix: prefix.into(),
            suffix: suffix.into(),
            project: "project".into(),
            path: "file".into(),
            n_prefix_max: usize::MAX,
            n_suffix_max: N_SUFFIX as usize,
            ..Hole::default()
        }
    }

    /// Reads a request of `/infill`.
    fn read(fields: &Fields) -> Answered<Hole> {
        let text = |name: &str| -> Answered<&str> { Ok(fields.text(name)?.unwrap_or("")) };
        let prefix = format!("{}{}", text("input_prefix")?, text("prompt")?);
        let mut hole = Hole::new(&prefix, text("input_suffix")?);
        if let Some(project) = fields.text("project")? {
            hole.project = project.into();
        }
        if let Some(path) = fields.text("filename")? {
            hole.path = path.into();
        }
        if let Some(n) = fields.whole("n_prefix", 0..=i64::from(u32::MAX))? {
            hole.n_prefix_max = n as usize;
        }
        if let Some(n) = fields.whole("n_suffix", 0..=i64::from(u32::MAX))? {
            hole.n_suffix_max = n as usize;
        }
        hole.files = files(fields)?;
        Ok(hole)
    }

    /// The prompt, and whether something was left out of the file.
    pub fn prompt(&self, app: &App) -> Answered<(Vec<u32>, bool)> {
        let Some(fim) = &app.fim else {
            let words = "this model has no tokens for filling in the middle; use /completion";
            return Err(ApiError::bad(words).with_code("no_fim"));
        };
        let tokenizer = &*app.tokenizer;
        let eighth = app.context / 8;
        let (suffix, suffix_is_cut) =
            window::after(tokenizer, &self.suffix, self.n_suffix_max.min(eighth))?;
        let (prefix, prefix_is_cut) =
            window::before(tokenizer, &self.prefix, self.n_prefix_max.min(5 * eighth))?;
        let begin = tokenizer.begin();
        // Marks, and what the parts above may take at most, so that nothing here depends on them.
        let n_kept = begin.len() + 3 + eighth;
        let n_window = self.n_suffix_max.min(eighth) + self.n_prefix_max.min(5 * eighth);
        let context = FimContext {
            repo: &self.project,
            path: &self.path,
            files: self.files.iter().map(|(path, text)| FimFile { path, text }).collect(),
            n_tok_max: app.context.saturating_sub(n_kept + n_window),
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
        Ending::between(&self.prefix, &self.suffix)
    }
}

pub async fn infill(State(app): State<Arc<App>>, fields: Fields) -> Answered<Response> {
    let mut params = Params::read(&app, &fields, &INFILL, app.default_adapters())?;
    let mut shape = Answers::new(&app, &fields, &mut params)?;
    let (wanted, time_max, n_indent) =
        (n_predict(&fields)?, time_max(&fields)?, n_indent(&fields)?);
    let hole = Hole::read(&fields)?;
    let (prompt, truncated) = app.prepare(|| hole.prompt(&app)).await?;
    params.stop_tokens.extend(app.fim.iter().flat_map(|fim| fim.stops()));
    let n_max = app.n_max(prompt.len(), wanted)?;
    shape.truncated = truncated;
    shape.prompts = vec![(prompt, n_max)];
    let feeds = app.submit(&params, &shape.prompts, 1).await?;
    let ending = || hole.ending().with_indent(n_indent).with_time(time_max);
    let feeds = feeds.into_iter().map(|feed| feed.ending(ending())).collect();
    respond(params.mode, feeds, shape).await
}

/// `input_extra`: `[{"filename", "text"}]`.
fn files(fields: &Fields) -> Answered<Vec<(String, String)>> {
    const NAME: &str = "input_extra";
    let Some(list) = fields.list(NAME)? else { return Ok(Vec::new()) };
    if list.len() > N_FILES_MAX {
        let words = format!("has {} files, at most {N_FILES_MAX} are taken", list.len());
        return Err(ApiError::field(NAME, words));
    }
    let file = |value: &Value| {
        let Value::Object(map) = value else {
            let words = format!("holds {}, not an object with `text`", kind(value));
            return Err(ApiError::field(NAME, words));
        };
        let text = |key: &str| match map.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(other) => Err(ApiError::field(NAME, format!("has {} as `{key}`", kind(other)))),
        };
        // As llama.cpp calls a file without a name.
        Ok((text("filename")?.unwrap_or("tmp".into()), text("text")?.unwrap_or_default()))
    };
    list.iter().map(file).collect()
}
