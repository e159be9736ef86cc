//! What answers of `/completion` and `/infill` look like.
//!
//! `response_fields` chooses from them: `timings/prompt_ms` is a field of a field, and comes back
//! under this name.

use crate::serve::App;
use crate::serve::error::{Answered, ApiError};
use crate::serve::feed::{Answer, End, Piece};
use crate::serve::fields::Fields;
use crate::serve::params::{N_TOP_MAX, Params};
use crate::serve::respond::Shape;
use elapid::Special;
use elapid::Token;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Names in `response_fields`.
const N_FIELDS_MAX: usize = 128;

/// The answers of one request.
pub struct Answers {
    pub app: Arc<App>,
    pub model: String,
    pub params: Params,
    /// By number, with the tokens that may follow.
    pub prompts: Vec<(Vec<u32>, usize)>,
    /// Whether a list is answered, however short.
    pub is_list: bool,
    /// Whether something before the prompt was left out.
    pub truncated: bool,
    wanted: Vec<String>,
    n_probs: usize,
    with_tokens: bool,
}

impl Answers {
    /// Reads what a request says about the form of its answer.
    pub fn new(app: &Arc<App>, fields: &Fields, params: &mut Params) -> Answered<Answers> {
        let n_probs = fields.whole("n_probs", 0..=N_TOP_MAX)?.unwrap_or(0) as usize;
        params.n_top = n_probs;
        Ok(Answers {
            app: app.clone(),
            model: app.name.clone(),
            params: params.clone(),
            prompts: Vec::new(),
            is_list: false,
            truncated: false,
            wanted: fields.texts("response_fields", N_FIELDS_MAX)?,
            n_probs,
            with_tokens: fields.flag("return_tokens")?.unwrap_or(false),
        })
    }

    fn ended(&self, idx: usize, end: &End) -> Value {
        let (stop_type, word) = end.stop.stop_type();
        let (prompt, n_max) = &self.prompts[idx];
        json!({
            "index": idx, "id_slot": -1, "stop": true, "model": self.model,
            "tokens_predicted": end.n_tok, "tokens_evaluated": end.n_prompt,
            "tokens_cached": end.n_cached, "truncated": self.truncated,
            "generation_settings": self.params.settings(*n_max),
            "prompt": self.app.tokenizer.decode(prompt, Special::Parse),
            "stop_type": stop_type, "stopping_word": word, "timings": end.timings(),
        })
    }

    fn one(&self, idx: usize, answer: &Answer) -> Value {
        let mut value = self.ended(idx, &answer.end);
        value["content"] = json!(answer.text);
        value["tokens"] = self.ids(&answer.tokens);
        value["has_new_line"] = json!(answer.text.contains('\n'));
        if self.n_probs > 0 {
            value["completion_probabilities"] = self.probabilities(&answer.tokens);
        }
        self.choose(value)
    }

    fn ids(&self, tokens: &[Token]) -> Value {
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        if self.with_tokens { json!(ids) } else { json!([]) }
    }

    fn probabilities(&self, tokens: &[Token]) -> Value {
        let entry = |id: u32, logprob: f32| {
            let bytes = self.app.tokenizer.bytes(id).unwrap_or_default();
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let logprob = if logprob.is_finite() { logprob } else { f32::MIN };
            json!({"id": id, "token": text, "bytes": bytes, "logprob": logprob})
        };
        let item = |token: &Token| {
            let mut item = entry(token.id, token.logprob);
            let top = token.top.iter().map(|&(id, logprob)| entry(id, logprob));
            item["top_logprobs"] = top.collect();
            item
        };
        tokens.iter().map(item).collect()
    }

    /// The fields that were asked for.
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
    fn whole(&self, answers: &[Answer]) -> Value {
        match (answers, self.is_list) {
            ([answer], false) => self.one(0, answer),
            _ => answers.iter().enumerate().map(|(idx, answer)| self.one(idx, answer)).collect(),
        }
    }

    fn piece(&self, idx: usize, piece: &Piece) -> Value {
        let mut value = json!({
            "index": idx, "content": piece.text, "tokens": self.ids(&piece.tokens),
            "stop": false, "id_slot": -1,
        });
        if self.n_probs > 0 {
            value["completion_probabilities"] = self.probabilities(&piece.tokens);
        }
        value
    }

    fn last(&self, idx: usize, end: &End) -> Value {
        let mut value = self.ended(idx, end);
        value["content"] = json!("");
        value["tokens"] = json!([]);
        self.choose(value)
    }

    fn done(&self) -> Option<&'static str> {
        None
    }

    fn shows_tokens(&self) -> bool {
        self.n_probs > 0 || self.with_tokens
    }
}

/// `n_predict`: none and -1 are to the end of the context.
pub fn n_predict(fields: &Fields) -> Answered<Option<usize>> {
    let name = match fields.get("n_predict").is_some() {
        true => "n_predict",
        false => "max_tokens",
    };
    let n = fields.whole(name, -2..=i64::from(u32::MAX))?;
    Ok(n.and_then(|n| usize::try_from(n).ok()))
}

/// `t_max_predict_ms`: zero is none.
pub fn time_max(fields: &Fields) -> Answered<Option<std::time::Duration>> {
    let ms = fields.number("t_max_predict_ms", -1.0..=1e9)?.filter(|ms| *ms > 0.0);
    Ok(ms.map(|ms| std::time::Duration::from_secs_f64(ms / 1e3)))
}

/// `n_indent`.
pub fn n_indent(fields: &Fields) -> Answered<usize> {
    let n = fields.whole("n_indent", 0..=4096)?.unwrap_or(0);
    usize::try_from(n).map_err(|_| ApiError::field("n_indent", "is below 0"))
}
