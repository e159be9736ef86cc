//! `POST /infill`: what stands between two texts, for editors.
//!
//! Its layout and its limits are in `talk/hole.rs`. Better than llama.cpp: `project` and `filename`
//! name the repository and the file, and the prompt is part of the prefix when it is cut into
//! tokens. A request without `input_extra` is shown files of the server's project (`nearby.rs`),
//! unless it says `"project_context": false`.

use super::completion::{Answers, Fields};
use crate::server::App;
use crate::server::body::{Body, Size, at_most};
use crate::server::error::{Answered, ApiError};
use crate::server::fields::names;
use crate::server::models::Models;
use crate::server::params::{Common, Defaults, Params};
use crate::talk::ending::Ending;
use crate::talk::hole::{self, Others};
use axum::extract::State;
use axum::response::Response;
use elapid::FimFile;
use serde::Deserialize;
use std::sync::Arc;

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
    /// Whether files of the project are shown where `input_extra` has none.
    project_context: Option<bool>,
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
    /// One of which only the two texts are known.
    pub fn between(prefix: &str, suffix: &str) -> Hole {
        let [input_prefix, input_suffix] = [prefix, suffix].map(|text| Some(text.to_string()));
        Hole { input_prefix, input_suffix, ..Hole::default() }
    }

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
        let (prefix, suffix) = (self.prefix(), self.suffix());
        let is_alone = self.input_extra.as_ref().is_none_or(Vec::is_empty);
        let picked = match is_alone {
            true => app.picked(self.filename.as_deref(), [&prefix, suffix], self.project_context),
            false => None,
        };
        let path = picked.as_ref().map(|picked| &picked.path[..]).filter(|path| !path.is_empty());
        let repo = picked.as_ref().and(app.nearby.as_ref()).map(|nearby| &nearby.repo[..]);
        let hole = hole::Hole {
            prefix: &prefix,
            suffix,
            n_prefix: self.n_prefix.map(Size::size),
            n_suffix: self.n_suffix.map(Size::size),
            repo: self.project.as_deref().or(repo).unwrap_or("project"),
            path: path.or(self.filename.as_deref()).unwrap_or("file"),
            files: match &picked {
                Some(picked) => picked.shown(),
                None => self.input_extra.iter().flatten().map(shown).collect(),
            },
            others: if picked.is_some() { Others::Picked } else { Others::Sent },
        };
        let laid = hole.prompt(&app.tokenizer, fim, app.context)?;
        Ok((laid.ids, laid.is_cut))
    }

    /// Where the answer ends besides where the model ends it.
    pub fn ending(&self) -> Ending {
        Ending::between(&self.prefix(), self.suffix())
    }
}

pub async fn infill(State(models): State<Arc<Models>>, body: Body) -> Answered<Response> {
    let app = models.open(body.model()).await?;
    let params = Params::new(&app, body.read()?, Defaults::Infill, app.choose(body.model()).1)?;
    let mut fields: Fields = body.read()?;
    let mut hole: Hole = body.read()?;
    body.refuse_others(&[names::<Common>(), names::<Fields>(), names::<Hole>()])?;
    let files = hole.input_extra.take().unwrap_or_default();
    hole.input_extra = Some(at_most("input_extra", files, N_FILES_MAX)?);
    let (prompt, truncated) = app.prepare(|| hole.prompt(&app)).await?;
    let mut answers = Answers::new(&app, params.with_fim_stops(&app), &mut fields, vec![prompt])?;
    answers.truncated = truncated;
    answers.respond(|| fields.ending(hole.ending())).await
}
