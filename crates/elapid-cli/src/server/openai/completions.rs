//! `POST /v1/completions`: what follows a prompt, or stands between it and a suffix.
//! `POST /v1/chat/completions`: messages in, a message out, through the model's own template.

use crate::server::answer::{End, Piece, Shape, probabilities, respond};
use crate::server::body::{Body, Int, Limit, Prompt};
use crate::server::chat::Ready;
use crate::server::error::{Answered, ApiError};
use crate::server::fields::names;
use crate::server::models::Models;
use crate::server::params::{Common, Defaults, Params, Top};
use crate::server::tools::{Call, Parser, Part};
use crate::server::{App, N_PROMPTS_MAX, now_s, tabby};
use crate::talk::ending::Ending;
use crate::talk::hole::{self, Others};
use axum::extract::State;
use axum::response::Response;
use elapid::{Special, Token, Tokenizer};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Tokens of a completion when nobody says, as OpenAI has it.
const N_TOK: usize = 16;

/// JSON has no minus infinity; OpenAI writes this.
const NEVER: f32 = -9999.0;

#[derive(Deserialize)]
struct CompletionFields {
    model: Option<String>,
    prompt: Option<Prompt>,
    suffix: Option<String>,
    max_tokens: Option<Limit>,
    logprobs: Option<Top>,
    echo: Option<bool>,
    /// Whether files of the project are shown where there is a suffix.
    project_context: Option<bool>,
}

pub async fn completions(State(models): State<Arc<Models>>, body: Body) -> Answered<Response> {
    let app = models.open(body.model()).await?;
    // Tabby's editors ask here too.
    if body.has("segments") {
        return tabby::complete(&app, &body).await;
    }
    let fields: CompletionFields = body.read()?;
    body.refuse_others(&[names::<CompletionFields>(), names::<Common>(), names::<Form>()])?;
    let (model, adapters) = app.choose(fields.model.as_deref());
    let mut params = Params::new(&app, body.read()?, Defaults::Openai, adapters)?;
    let echo = fields.echo == Some(true);
    if echo && fields.logprobs.is_some() {
        if fields.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            let words = "does not work with `logprobs` and `suffix`; omit one of them";
            return Err(ApiError::field("echo", words));
        }
        params.request.scores_prompt = true;
    }
    params.request.n_top = fields.logprobs.map_or(0, Top::size);
    let prompt = fields.prompt.ok_or_else(|| ApiError::missing("prompt"))?;
    let (prompts, _) = prompt.split("prompt", N_PROMPTS_MAX)?;
    let mut answers = Answers::new(&app, Kind::Completion, &body, prompts.len())?;
    (answers.model, answers.with_logprobs) = (model, fields.logprobs.is_some());
    let suffix = fields.suffix.filter(|suffix| !suffix.is_empty());
    let wanted = fields.max_tokens.map_or(Some(N_TOK), Limit::limit).unwrap_or(usize::MAX);
    let prepared = app.prepare(|| {
        let ids = prompts.iter().map(|prompt| {
            prompt.check("prompt")?;
            let ids = match &suffix {
                Some(suffix) => {
                    let ids = between(&app, prompt, suffix)?;
                    with_files(&app, prompt, suffix, (ids, wanted), fields.project_context)?
                }
                None => prompt.ids(&app, "prompt")?,
            };
            let n_max = app.n_max(ids.len(), Some(wanted))?;
            Ok((ids, n_max))
        });
        ids.collect::<Answered<Vec<_>>>()
    });
    let prepared = prepared.await?;
    if suffix.is_some() {
        params = params.with_fim_stops(&app);
    }
    if echo {
        let text = |prompt: Prompt| match prompt {
            Prompt::Text(text) => Ok(text),
            ids => Ok(app.tokenizer.decode(&ids.ids(&app, "prompt")?, Special::Parse)),
        };
        answers.echoes = prompts.into_iter().map(text).collect::<Answered<_>>()?;
    }
    answers.respond(&params, &prepared).await
}

/// The prompt of a hole between two texts.
fn between(app: &App, prompt: &Prompt, suffix: &str) -> Answered<Vec<u32>> {
    let Some(fim) = &app.fim else {
        let words = "this model has no tokens for filling in the middle; omit `suffix`";
        return Err(ApiError::field("suffix", words).with_code("no_fim"));
    };
    // Marks of the middle in a file are text of this file.
    let encode = |text: &str| app.tokenizer.encode(text, Special::Plain);
    let prefix = match prompt {
        Prompt::Text(text) => encode(text)?,
        ids => ids.ids(app, "prompt")?,
    };
    let laid_out = fim.layout(fim.style, &prefix, &encode(suffix)?);
    Ok([app.tokenizer.begin(), &laid_out].concat())
}

/// The prompt of a hole with files of the project before it, as far as `n_max` tokens of an answer
/// leave room for them.
fn with_files(
    app: &App,
    prompt: &Prompt,
    suffix: &str,
    (ids, n_max): (Vec<u32>, usize),
    wanted: Option<bool>,
) -> Answered<Vec<u32>> {
    let (Some(fim), Some(nearby), Prompt::Text(prefix)) = (&app.fim, &app.nearby, prompt) else {
        return Ok(ids);
    };
    let Some(picked) = app.picked(None, [prefix, suffix], wanted) else { return Ok(ids) };
    let hole = hole::Hole {
        prefix,
        suffix,
        n_prefix: None,
        n_suffix: None,
        repo: &nearby.repo,
        path: if picked.path.is_empty() { "file" } else { &picked.path },
        files: picked.shown(),
        others: Others::Picked,
    };
    let n_left = app.context.saturating_sub(ids.len() + n_max.min(app.context / 8));
    let (files, _) = hole.picked(&app.tokenizer, fim, n_left.min(hole::n_picked(app.context)))?;
    let begin = app.tokenizer.begin();
    Ok([begin, &files, &ids[begin.len()..]].concat())
}

#[derive(Deserialize)]
struct ChatFields {
    logprobs: Option<bool>,
    top_logprobs: Option<Top>,
}

pub async fn chat(State(models): State<Arc<Models>>, body: Body) -> Answered<Response> {
    let app = models.open(body.model()).await?;
    let fields: ChatFields = body.read()?;
    let mut answers = Answers::new(&app, Kind::Chat, &body, 1)?;
    let known = [names::<ChatFields>(), names::<Form>()].concat();
    let mut ready = Ready::chat(&app, &body, Defaults::Openai, &known).await?;
    (answers.model, answers.with_logprobs) = (ready.model, fields.logprobs == Some(true));
    if fields.top_logprobs.is_some() && !answers.with_logprobs {
        return Err(ApiError::field("top_logprobs", "needs `logprobs: true`"));
    }
    ready.params.request.n_top = fields.top_logprobs.map_or(0, Top::size);
    answers.parsers.fill(ready.parser);
    answers.time_max = ready.ending.time_max;
    answers.respond(&ready.params, &[(ready.prompt, ready.n_max)]).await
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Completion,
    Chat,
}

/// Fields of a body about the form of its answers.
#[derive(Deserialize)]
struct Form {
    n: Option<Int<1, 8>>,
    best_of: Option<Int<1, 8>>,
    stream_options: Option<StreamOptions>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

struct Answers {
    app: Arc<App>,
    kind: Kind,
    id: String,
    created_s: u64,
    model: String,
    /// Answers to each prompt.
    n_choices: usize,
    with_logprobs: bool,
    with_usage: bool,
    /// Prompts that are given back, by number; empty where they are not.
    echoes: Vec<String>,
    /// Characters of each answer that were streamed.
    offsets: Vec<usize>,
    parsers: Vec<Parser>,
    time_max: Option<Duration>,
}

impl Answers {
    /// Reads what a request says about the form of its answers to so many prompts.
    fn new(app: &Arc<App>, kind: Kind, body: &Body, n_prompts: usize) -> Answered<Answers> {
        let form: Form = body.read()?;
        let n = form.n.map_or(1, |n| n.0);
        if form.best_of.is_some_and(|best_of| best_of.0 != n) {
            let words = "is not `n`; every answer that is made is given out: ask for `n` of them";
            return Err(ApiError::field("best_of", words));
        }
        let usage = form.stream_options.and_then(|options| options.include_usage);
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        Ok(Answers {
            app: app.clone(),
            kind,
            id: app.answer_id(prefix),
            created_s: now_s(),
            model: String::new(),
            n_choices: n as usize,
            with_logprobs: false,
            with_usage: usage == Some(true),
            echoes: Vec::new(),
            offsets: vec![0; n_prompts * n as usize],
            parsers: vec![Parser::new(None, 0); n_prompts * n as usize],
            time_max: None,
        })
    }

    fn echo(&self, idx: usize) -> &str {
        self.echoes.get(idx / self.n_choices).map_or("", String::as_str)
    }

    fn object(&self, suffix: &str, choices: Vec<Value>) -> Value {
        let object = match self.kind {
            Kind::Completion => "text_completion".to_string(),
            Kind::Chat => format!("chat.completion{suffix}"),
        };
        json!({
            "id": self.id, "object": object, "created": self.created_s, "model": self.model,
            "choices": choices,
        })
    }

    /// Of tokens of which the first begins at `offset`, where they are asked for.
    fn logprobs(&self, tokens: &[Token], offset: usize) -> Option<Value> {
        let tokenizer = &self.app.tokenizer;
        self.with_logprobs.then(|| match self.kind {
            Kind::Completion => of_completion(tokenizer, tokens, offset),
            Kind::Chat => {
                json!({"content": probabilities(tokenizer, tokens, NEVER), "refusal": null})
            }
        })
    }

    /// One choice: the text of a completion, or a message of a chat under its key.
    fn choice(
        &self,
        idx: usize,
        text: &str,
        (key, message): (&str, Value),
        (logprobs, reason): (Option<Value>, Option<&str>),
    ) -> Value {
        let (key, content) = match self.kind {
            Kind::Completion => ("text", json!(text)),
            Kind::Chat => (key, message),
        };
        json!({key: content, "index": idx, "logprobs": logprobs, "finish_reason": reason})
    }

    fn chunk(
        &self,
        idx: usize,
        text: &str,
        delta: Value,
        facts: (Option<Value>, Option<&str>),
    ) -> Value {
        let choice = self.choice(idx, text, ("delta", delta), facts);
        let mut chunk = self.object(".chunk", vec![choice]);
        if self.with_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn call(&self, call: &Call) -> Value {
        let arguments = call.arguments.to_string();
        let function = json!({"name": call.name, "arguments": arguments});
        json!({"id": self.app.call_id(), "type": "function", "function": function})
    }

    /// A chunk for each part; the first carries the log probabilities.
    fn parts(&self, idx: usize, parts: Vec<Part>, logprobs: &mut Option<Value>) -> Vec<Value> {
        let n_new = parts.iter().filter(|part| matches!(part, Part::Call(_))).count();
        let mut n_call = self.parsers[idx].n_calls - n_new;
        let chunk = |part: Part| match part {
            Part::Text(text) => {
                self.chunk(idx, &text, json!({"content": text}), (logprobs.take(), None))
            }
            Part::Call(call) => {
                let mut value = self.call(&call);
                value["index"] = json!(n_call);
                n_call += 1;
                self.chunk(idx, "", json!({"tool_calls": [value]}), (logprobs.take(), None))
            }
        };
        parts.into_iter().map(chunk).collect()
    }

    /// What the answers took. Answers to one prompt share its tokens.
    fn usage<'a>(&self, ends: impl Iterator<Item = &'a End> + Clone) -> Value {
        let first_of_each = || ends.clone().step_by(self.n_choices);
        let n_prompt: usize = first_of_each().map(|end| end.finish.n_prompt).sum();
        let n_cached: usize = first_of_each().map(|end| end.finish.n_cached).sum();
        let n_tok: usize = ends.clone().map(|end| end.finish.n_tok).sum();
        json!({
            "prompt_tokens": n_prompt, "completion_tokens": n_tok,
            "total_tokens": n_prompt + n_tok, "prompt_tokens_details": {"cached_tokens": n_cached},
        })
    }

    /// Hands in as many requests for each prompt as choices are asked for, and responds.
    async fn respond(self, params: &Params, prompts: &[(Vec<u32>, usize)]) -> Answered<Response> {
        let requests = prompts.iter().flat_map(|(ids, n_max)| {
            let choice = |choice| {
                let mut ending = Ending::default();
                ending.time_max = self.time_max;
                (params.request(ids.clone(), *n_max, choice), ending)
            };
            (0..self.n_choices).map(choice)
        });
        let growing = self.app.worker.submit(requests.collect()).await?;
        respond(params.mode, growing, self).await
    }
}

impl Shape for Answers {
    fn whole(&mut self, answers: &[(Piece, End)]) -> Value {
        let of_answer = |(idx, (answer, end)): (usize, &(Piece, End))| {
            let text = format!("{}{}", self.echo(idx), answer.text);
            let (mut content, mut calls) = (None, Vec::new());
            for part in self.parsers[idx].clone().all(&answer.text) {
                match part {
                    Part::Text(more) => *content.get_or_insert(String::new()) += &more,
                    Part::Call(call) => calls.push(self.call(&call)),
                }
            }
            let reason = end.finish_reason(calls.len());
            let mut message = json!({"role": "assistant", "content": content, "refusal": null});
            match calls.is_empty() {
                true => message["content"] = json!(content.unwrap_or_default()),
                false => message["tool_calls"] = json!(calls),
            }
            let facts = (self.logprobs(&answer.tokens, 0), Some(reason));
            self.choice(idx, &text, ("message", message), facts)
        };
        let mut object = self.object("", answers.iter().enumerate().map(of_answer).collect());
        object["usage"] = self.usage(answers.iter().map(|(_, end)| end));
        if let [(_, end)] = answers {
            object["timings"] = end.timings();
        }
        object
    }

    fn first(&mut self, idx: usize) -> Vec<Value> {
        let text = self.echo(idx);
        let delta = json!({"role": "assistant", "content": ""});
        let is_empty = self.kind == Kind::Completion && text.is_empty();
        (!is_empty).then(|| self.chunk(idx, text, delta, (None, None))).into_iter().collect()
    }

    fn piece(&mut self, idx: usize, piece: &Piece) -> Vec<Value> {
        let offset = self.offsets[idx];
        // A prompt that is given back has tokens, and its text was sent before.
        self.offsets[idx] += match self.with_logprobs && !self.echoes.is_empty() {
            true => piece.tokens.iter().map(|it| spelled(&self.app.tokenizer, it.id).1).sum(),
            false => piece.text.chars().count(),
        };
        let parts = self.parsers[idx].push(&piece.text);
        let mut logprobs = self.logprobs(&piece.tokens, offset);
        let mut chunks = self.parts(idx, parts, &mut logprobs);
        if logprobs.is_some() {
            // Text that may become a call has tokens already.
            chunks.push(self.chunk(idx, "", json!({"content": ""}), (logprobs, None)));
        }
        chunks
    }

    fn last(&mut self, idx: usize, end: &End) -> Vec<Value> {
        let parts = self.parsers[idx].finish();
        let mut chunks = self.parts(idx, parts, &mut None);
        let reason = end.finish_reason(self.parsers[idx].n_calls);
        let mut chunk = self.chunk(idx, "", json!({}), (None, Some(reason)));
        chunk["timings"] = end.timings();
        chunks.push(chunk);
        chunks
    }

    fn after(&mut self, ends: &[End]) -> Vec<Value> {
        let mut values = Vec::new();
        if self.with_usage {
            let mut object = self.object(".chunk", Vec::new());
            object["usage"] = self.usage(ends.iter());
            values.push(object);
        }
        values.push(json!("[DONE]"));
        values
    }

    fn shows_tokens(&self) -> bool {
        self.with_logprobs
    }
}

/// A token as text, and its characters.
fn spelled(tokenizer: &Tokenizer, id: u32) -> (String, usize) {
    let text = String::from_utf8_lossy(&tokenizer.bytes(id).unwrap_or_default()).into_owned();
    let n_chars = text.chars().count();
    (text, n_chars)
}

/// `logprobs` of a completion; `offset` is where its first token begins, in characters. The first
/// token of a prompt that is given back has none.
fn of_completion(tokenizer: &Tokenizer, tokens: &[Token], mut offset: usize) -> Value {
    let finite = |logprob: f32| if logprob.is_finite() { logprob } else { NEVER };
    let (mut texts, mut own, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for token in tokens {
        let (text, n_chars) = spelled(tokenizer, token.id);
        offsets.push(offset);
        offset += n_chars;
        texts.push(text);
        let is_known = !token.logprob.is_nan();
        own.push(is_known.then(|| finite(token.logprob)));
        let top = token.top.iter();
        let top = top.map(|&(id, logprob)| (spelled(tokenizer, id).0, json!(finite(logprob))));
        tops.push(is_known.then(|| top.collect::<Map<_, _>>()));
    }
    json!({
        "tokens": texts, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets,
    })
}
