//! Answers: requests in an engine, read step by step.

use crate::{Session, apart, read};
use elapid::{Constraint, Event, Reason, Refusal, Request, RequestId};
use pyo3::prelude::*;
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;

/// What a caller may say of an answer; what is left out is as the model's files suggest.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Vec<String>,
    json_schema: Option<Value>,
    regex: Option<String>,
    grammar: Option<String>,
}

impl Options {
    fn apply(self, mut request: Request) -> elapid::Result<Request> {
        let sampling = &mut request.sampling;
        let put = |place: &mut f32, value: Option<f32>| *place = value.unwrap_or(*place);
        put(&mut sampling.temperature, self.temperature);
        put(&mut sampling.top_p, self.top_p);
        put(&mut sampling.min_p, self.min_p);
        put(&mut sampling.repeat_penalty, self.repeat_penalty);
        put(&mut sampling.frequency_penalty, self.frequency_penalty);
        put(&mut sampling.presence_penalty, self.presence_penalty);
        sampling.top_k = self.top_k.or(sampling.top_k).filter(|k| *k > 0);
        sampling.seed = self.seed.unwrap_or(sampling.seed);
        request.n_max = self.max_tokens.unwrap_or(request.n_max);
        request.stop_texts.extend(self.stop);
        let mut constraints = [
            self.json_schema.map(Constraint::JsonSchema),
            self.regex.map(Constraint::Regex),
            self.grammar.map(Constraint::Lark),
        ]
        .into_iter()
        .flatten();
        request.constraint = constraints.next();
        match constraints.next() {
            None => Ok(request),
            Some(_) => Err(elapid::Error::input(
                "an answer can follow one constraint",
                "give one of `json_schema`, `regex` and `grammar`",
            )),
        }
    }
}

/// Answers that someone reads, and what they have to say.
#[derive(Default)]
pub struct Answers {
    by_id: HashMap<RequestId, Heard>,
    /// Counts the generators: the next one numbers its requests anew.
    n_forgotten: u64,
}

#[derive(Default)]
struct Heard {
    text: String,
    n_tok: usize,
    end: Option<Reason>,
}

impl Answers {
    /// The weights change: answers that are not finished end in an error.
    pub fn forget(&mut self) {
        self.by_id.clear();
        self.n_forgotten += 1;
    }

    fn hear(&mut self, id: RequestId, event: Event) {
        let Some(heard) = self.by_id.get_mut(&id) else { return };
        match event {
            Event::Prompt { .. } => {}
            Event::Token(token) => {
                heard.text.push_str(&token.text);
                heard.n_tok += 1;
            }
            Event::Done(finish) => {
                heard.text.push_str(&finish.text);
                heard.end = Some(finish.reason);
            }
        }
    }
}

/// An answer that is being written.
#[pyclass(module = "elapid._native", frozen)]
pub struct Answer {
    session: Py<Session>,
    id: RequestId,
    n_forgotten: u64,
}

impl Answer {
    pub(crate) fn new(
        session: Py<Session>,
        py: Python<'_>,
        options: &str,
        request: impl FnOnce(&mut elapid::Session) -> elapid::Result<Request> + Send,
    ) -> PyResult<Answer> {
        let (id, n_forgotten) = apart(py, || {
            let options: Options = read(options)?;
            let mut inner = session.get().lock()?;
            let request = options.apply(request(inner.idle()?)?)?;
            let id = inner.session.generator()?.engine.submit(request).map_err(|it| match it {
                Refusal::Bad(error) => error,
                Refusal::Full => elapid::Error::input(
                    "two answers of this model are not finished",
                    "read them to their end, or close them",
                ),
            })?;
            inner.answers.by_id.insert(id, Heard::default());
            Ok((id, inner.answers.n_forgotten))
        })?;
        Ok(Answer { session, id, n_forgotten })
    }

    fn cancel(&self) {
        let Ok(mut inner) = self.session.get().lock() else { return };
        if inner.answers.n_forgotten == self.n_forgotten
            && inner.answers.by_id.remove(&self.id).is_some_and(|heard| heard.end.is_none())
            && let Ok(generator) = inner.session.generator()
        {
            generator.engine.cancel(self.id);
        }
    }
}

/// Text that came, tokens so far, and why it ended if it did.
type Piece = (String, usize, Option<&'static str>);

#[pymethods]
impl Answer {
    /// One step of the engine; the text may be empty.
    fn step(&self, py: Python<'_>) -> PyResult<Piece> {
        apart(py, || {
            let mut inner = self.session.get().lock()?;
            if inner.answers.n_forgotten != self.n_forgotten {
                let problem = "the model was trained while it answered";
                return Err(elapid::Error::input(problem, "ask again"));
            }
            let is_over = |heard: &Heard| heard.end.is_some() || !heard.text.is_empty();
            if inner.answers.by_id.get(&self.id).is_some_and(|heard| !is_over(heard)) {
                for (id, event) in inner.session.generator()?.engine.step() {
                    inner.answers.hear(id, event);
                }
            }
            let Some(heard) = inner.answers.by_id.get_mut(&self.id) else {
                return Ok((String::new(), 0, Some("cancelled")));
            };
            let end = match &heard.end {
                None => None,
                Some(Reason::End | Reason::StopText(_)) => Some("stop"),
                Some(Reason::Length) => Some("length"),
                Some(Reason::Cancelled) => Some("cancelled"),
                Some(Reason::Failed(error)) => {
                    return Err(elapid::Error::input(error.to_string(), &error.hint()));
                }
            };
            Ok((std::mem::take(&mut heard.text), heard.n_tok, end))
        })
    }

    /// Ends it.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.cancel());
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.cancel();
    }
}
