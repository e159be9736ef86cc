//! `POST /completion`: what follows a prompt; how its answers and those of `/infill` look.
//!
//! A prompt is a text, a list of tokens, or texts and tokens mixed; a list of prompts is answered
//! by a list.
//!
//! `response_fields` chooses from them: `timings/prompt_ms` is a field of a field, and comes back
//! under this name.

use crate::server::answer::{End, Piece, Shape, probabilities, respond};
use crate::server::body::{Body, Int, Limit, Ms, Prompt, Texts};
use crate::server::error::{Answered, ApiError};
use crate::server::fields::names;
use crate::server::models::Models;
use crate::server::params::{Common, Defaults, Params, Top};
use crate::server::{App, N_PROMPTS_MAX};
use crate::talk::ending::Ending;
use axum::extract::State;
use axum::response::Response;
use elapid::{Reason, Special};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

const N_FIELDS_MAX: usize = 128;

/// What both routes have besides what all routes have.
#[derive(Deserialize)]
pub struct Fields {
    n_predict: Option<Limit>,
    max_tokens: Option<Limit>,
    t_max_predict_ms: Option<Ms>,
    n_indent: Option<Int<0, 4096>>,
    n_probs: Option<Top>,
    response_fields: Option<Texts>,
    return_tokens: Option<bool>,
    /// Answers to each prompt.
    n_cmpl: Option<Int<1, 8>>,
}

impl Fields {
    fn n_wanted(&self) -> Option<usize> {
        self.n_predict.or(self.max_tokens).and_then(Limit::limit)
    }

    /// An ending, with what the request says of it.
    pub fn ending(&self, mut ending: Ending) -> Ending {
        ending.time_max = self.t_max_predict_ms.and_then(Ms::time);
        ending.n_indent = self.n_indent.map_or(0, Int::size);
        ending
    }
}

pub struct Answers {
    app: Arc<App>,
    params: Params,
    /// By number, with the tokens that may follow.
    prompts: Vec<(Vec<u32>, usize)>,
    /// Answers to each prompt, one after the other.
    n_choices: usize,
    /// Whether a list is answered, however short.
    pub is_list: bool,
    /// Whether something before the prompt was left out.
    pub truncated: bool,
    wanted: Vec<String>,
    with_tokens: bool,
}

impl Answers {
    /// Answers to these prompts, in the form that the request asks for.
    pub fn new(
        app: &Arc<App>,
        mut params: Params,
        fields: &mut Fields,
        prompts: Vec<Vec<u32>>,
    ) -> Answered<Answers> {
        params.request.n_top = fields.n_probs.map_or(0, Top::size);
        let n_choices = fields.n_cmpl.map_or(1, Int::size);
        let with_n_max = |ids: Vec<u32>| {
            let n_max = app.n_max(ids.len(), fields.n_wanted())?;
            Ok(std::iter::repeat_n((ids, n_max), n_choices))
        };
        let prompts = prompts.into_iter().map(with_n_max).collect::<Answered<Vec<_>>>()?;
        Ok(Answers {
            app: app.clone(),
            params,
            prompts: prompts.into_iter().flatten().collect(),
            n_choices,
            is_list: n_choices > 1,
            truncated: false,
            wanted: Texts::list(fields.response_fields.take(), "response_fields", N_FIELDS_MAX)?,
            with_tokens: fields.return_tokens == Some(true),
        })
    }

    /// Hands the requests in, and responds.
    pub async fn respond(self, ending: impl Fn() -> Ending) -> Answered<Response> {
        let request = |(idx, (ids, n_max)): (usize, &(Vec<u32>, usize))| {
            (self.params.request(ids.clone(), *n_max, idx % self.n_choices), ending())
        };
        let requests = self.prompts.iter().enumerate().map(request).collect();
        let growing = self.app.worker.submit(requests).await?;
        respond(self.params.mode, growing, self).await
    }

    fn ended(&self, idx: usize, end: &End) -> Value {
        let (stop_type, word) = match &end.finish.reason {
            Reason::End => ("eos", ""),
            Reason::StopText(word) => ("word", &word[..]),
            _ => ("limit", ""),
        };
        let (prompt, n_max) = &self.prompts[idx];
        json!({
            "index": idx, "id_slot": -1, "stop": true, "model": self.app.name,
            "tokens_predicted": end.finish.n_tok, "tokens_evaluated": end.finish.n_prompt,
            "tokens_cached": end.finish.n_cached, "truncated": self.truncated,
            "generation_settings": self.params.settings(*n_max),
            "prompt": self.app.tokenizer.decode(prompt, Special::Parse),
            "stop_type": stop_type, "stopping_word": word, "timings": end.timings(),
        })
    }

    fn one(&self, idx: usize, (answer, end): &(Piece, End)) -> Value {
        let mut value = self.ended(idx, end);
        value["has_new_line"] = json!(answer.text.contains('\n'));
        self.add(&mut value, answer);
        self.choose(value)
    }

    fn add(&self, value: &mut Value, piece: &Piece) {
        let tokens = piece.tokens.iter().filter(|_| self.with_tokens);
        value["content"] = json!(piece.text);
        value["tokens"] = tokens.map(|token| token.id).collect();
        if self.params.request.n_top > 0 {
            value["completion_probabilities"] =
                probabilities(&self.app.tokenizer, &piece.tokens, f32::MIN);
        }
    }

    fn choose(&self, value: Value) -> Value {
        if self.wanted.is_empty() {
            return value;
        }
        let mut chosen = Map::new();
        for path in &self.wanted {
            let found = path.split('/').try_fold(&value, |value, key| value.as_object()?.get(key));
            if let Some(found) = found {
                chosen.insert(path.clone(), found.clone());
            }
        }
        Value::Object(chosen)
    }
}

impl Shape for Answers {
    fn whole(&mut self, answers: &[(Piece, End)]) -> Value {
        match (answers, self.is_list) {
            ([answer], false) => self.one(0, answer),
            _ => answers.iter().enumerate().map(|(idx, answer)| self.one(idx, answer)).collect(),
        }
    }

    fn piece(&mut self, idx: usize, piece: &Piece) -> Vec<Value> {
        let mut value = json!({"index": idx, "stop": false, "id_slot": -1});
        self.add(&mut value, piece);
        vec![value]
    }

    fn last(&mut self, idx: usize, end: &End) -> Vec<Value> {
        let mut value = self.ended(idx, end);
        value["content"] = json!("");
        value["tokens"] = json!([]);
        vec![self.choose(value)]
    }

    fn shows_tokens(&self) -> bool {
        self.params.request.n_top > 0 || self.with_tokens
    }
}

#[derive(Deserialize)]
struct PromptField {
    prompt: Option<Prompt>,
}

pub async fn completion(State(models): State<Arc<Models>>, body: Body) -> Answered<Response> {
    let app = models.open(body.model()).await?;
    let params = Params::new(&app, body.read()?, Defaults::Llama, app.choose(body.model()).1)?;
    let mut fields: Fields = body.read()?;
    body.refuse_others(&[names::<Common>(), names::<Fields>(), names::<PromptField>()])?;
    let prompt = body.read::<PromptField>()?.prompt.ok_or_else(|| ApiError::missing("prompt"))?;
    let (prompts, is_list) = prompt.split("prompt", N_PROMPTS_MAX)?;
    let ids = app.prepare(|| prompts.iter().map(|prompt| prompt.ids(&app, "prompt")).collect());
    let ids: Vec<Vec<u32>> = ids.await?;
    let mut answers = Answers::new(&app, params, &mut fields, ids)?;
    answers.is_list |= is_list;
    answers.respond(|| fields.ending(Ending::default())).await
}
