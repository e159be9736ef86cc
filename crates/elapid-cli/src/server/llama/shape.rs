//! What answers of `/completion` and `/infill` look like.
//!
//! `response_fields` chooses from them: `timings/prompt_ms` is a field of a field, and comes back
//! under this name.

use crate::server::App;
use crate::server::answer::{Answer, End, Growing, Piece, Shape};
use crate::server::body::{Int, Num, Texts};
use crate::server::ending::Ending;
use crate::server::error::Answered;
use crate::server::params::{Params, Top};
use elapid::Special;
use elapid::Token;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Names in `response_fields`.
const N_FIELDS_MAX: usize = 128;

/// What both routes have besides what all routes have.
#[derive(Deserialize)]
pub struct Fields {
    /// Less than zero is to the end of the context.
    n_predict: Option<Int<-2, { u32::MAX as i64 }>>,
    max_tokens: Option<Int<-2, { u32::MAX as i64 }>>,
    /// Zero is none.
    t_max_predict_ms: Option<Num<-1, 1_000_000_000>>,
    n_indent: Option<Int<0, 4096>>,
    n_probs: Option<Top>,
    response_fields: Option<Texts>,
    return_tokens: Option<bool>,
}

impl Fields {
    fn n_wanted(&self) -> Option<usize> {
        self.n_predict.or(self.max_tokens).and_then(|n| usize::try_from(n.0).ok())
    }

    /// An ending, with what the request says of it.
    pub fn ending(&self, ending: Ending) -> Ending {
        let ms = self.t_max_predict_ms.map(|ms| ms.0).filter(|ms| *ms > 0.0);
        let time_max = ms.map(|ms| Duration::from_secs_f64(ms / 1e3));
        ending.with_indent(self.n_indent.map_or(0, Int::size)).with_time(time_max)
    }
}

/// The answers of one request.
pub struct Answers {
    app: Arc<App>,
    pub params: Params,
    /// By number, with the tokens that may follow.
    prompts: Vec<(Vec<u32>, usize)>,
    /// Whether a list is answered, however short.
    pub is_list: bool,
    /// Whether something before the prompt was left out.
    pub truncated: bool,
    wanted: Vec<String>,
    n_probs: usize,
    with_tokens: bool,
}

impl Answers {
    /// Answers to these prompts, in the form that the request asks for.
    pub fn new(
        app: &Arc<App>,
        params: Params,
        fields: &mut Fields,
        prompts: Vec<Vec<u32>>,
    ) -> Answered<Answers> {
        let n_probs = fields.n_probs.map_or(0, Top::size);
        let with_n_max =
            |ids: Vec<u32>| app.n_max(ids.len(), fields.n_wanted()).map(|n_max| (ids, n_max));
        Ok(Answers {
            app: app.clone(),
            params: params.with_top(n_probs),
            prompts: prompts.into_iter().map(with_n_max).collect::<Answered<_>>()?,
            is_list: false,
            truncated: false,
            wanted: Texts::list(fields.response_fields.take(), "response_fields", N_FIELDS_MAX)?,
            n_probs,
            with_tokens: fields.return_tokens == Some(true),
        })
    }

    /// Hands one request in for each prompt.
    pub async fn submit(&self, ending: impl Fn() -> Ending) -> Answered<Growing> {
        let requests = self.prompts.iter();
        let requests =
            requests.map(|(ids, n_max)| (self.params.request(ids.clone(), *n_max, 0), ending()));
        self.app.submit(requests.collect()).await
    }

    fn ended(&self, idx: usize, end: &End) -> Value {
        let (stop_type, word) = end.stop.stop_type();
        let (prompt, n_max) = &self.prompts[idx];
        json!({
            "index": idx, "id_slot": -1, "stop": true, "model": self.app.name,
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

    fn shows_tokens(&self) -> bool {
        self.n_probs > 0 || self.with_tokens
    }
}
