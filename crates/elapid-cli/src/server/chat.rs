//! A conversation in OpenAI's words, whatever API it came by: messages, tools, how to answer. The
//! other APIs translate theirs into this one.

use super::App;
use super::answer::{Shape, respond};
use super::body::{Body, Limit, Ms};
use super::error::{Answered, ApiError};
use super::fields::names;
use super::params::{Common, Defaults, Params};
use super::tools::{Choice, Parser, Syntax, forced, functions};
use crate::talk::ending::Ending;
use crate::talk::flags::now;
use axum::response::Response;
use elapid::{Chat, ChatOptions, Message, Special};
use serde::Deserialize;
use serde_json::{Map, Value};

const N_MESSAGES_MAX: usize = 4096;

#[derive(Deserialize)]
struct Fields {
    model: Option<String>,
    max_completion_tokens: Option<Limit>,
    max_tokens: Option<Limit>,
    /// As llama.cpp calls it, and how long an answer may take.
    n_predict: Option<Limit>,
    t_max_predict_ms: Option<Ms>,
}

/// A request of any API, ready for the engine.
pub struct Ready {
    /// The name of the model that answers.
    pub model: String,
    pub params: Params,
    pub prompt: Vec<u32>,
    pub n_max: usize,
    pub parser: Parser,
    pub ending: Ending,
}

impl Ready {
    /// That of a conversation; `known` are the fields that its route reads besides.
    pub async fn chat(
        app: &App,
        body: &Body,
        defaults: Defaults,
        known: &[&str],
    ) -> Answered<Ready> {
        let fields: Fields = body.read()?;
        let (model, adapters) = app.choose(fields.model.as_deref());
        let mut params = Params::new(app, body.read()?, defaults, adapters)?;
        let template: Template = body.read()?;
        let known = [names::<Fields>(), names::<Common>(), names::<Template>(), known];
        body.refuse_others(&known)?;
        let parser = template.parser(app, &mut params)?;
        let prompt = app.prepare(|| {
            // The template says itself what goes first.
            Ok(app.tokenizer.encode(&template.render(app)?, Special::Parse)?)
        });
        let prompt = prompt.await?;
        if prompt.is_empty() {
            return Err(ApiError::field("messages", "the template makes an empty prompt of them"));
        }
        let wanted = fields.max_completion_tokens.or(fields.max_tokens).or(fields.n_predict);
        let n_max = app.n_max(prompt.len(), wanted.and_then(Limit::limit))?;
        let mut ending = Ending::default();
        ending.time_max = fields.t_max_predict_ms.and_then(Ms::time);
        Ok(Ready { model, params, prompt, n_max, parser, ending })
    }

    /// Hands it in, and responds with its one answer.
    pub async fn respond(self, app: &App, shape: impl Shape) -> Answered<Response> {
        let request = self.params.request(self.prompt, self.n_max, 0);
        let growing = app.worker.submit(vec![(request, self.ending)]).await?;
        respond(self.params.mode, growing, shape).await
    }
}

/// Messages, and what else a template is given.
#[derive(Deserialize)]
pub struct Template {
    messages: Option<Vec<Map<String, Value>>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    add_generation_prompt: Option<bool>,
    /// Whether the answer continues the last message, as transformers calls it.
    continue_final_message: Option<bool>,
}

impl Template {
    /// Whether the model is shown tools, and may call them.
    fn shows_tools(&self) -> bool {
        let is_off = self.tool_choice.as_ref().is_some_and(|choice| choice == "none");
        self.tools.as_ref().is_some_and(|list| !list.is_empty()) && !is_off
    }

    /// What finds calls in the answer; one that must come is asked for in `params`.
    fn parser(&self, app: &App, params: &mut Params) -> Answered<Parser> {
        let choice = Choice::read(self.tool_choice.as_ref())?;
        let functions = functions(self.tools.as_deref().unwrap_or_default())?;
        let is_forced = matches!(choice, Choice::Required | Choice::Named(_));
        if is_forced && functions.is_empty() {
            return Err(ApiError::field("tool_choice", "needs `tools`"));
        }
        let syntax = app.chat_source.as_deref().and_then(Syntax::of);
        let called = |message: &Map<String, Value>| {
            message.get("tool_calls").and_then(Value::as_array).is_some_and(|it| !it.is_empty())
        };
        let was_called = self.messages.iter().flatten().any(called);
        if app.chat.is_some() && syntax.is_none() && (self.shows_tools() || was_called) {
            let words = "the chat template of this model has no tools in a form that is known here \
                         (Qwen, Hermes, Llama 3, Mistral, gpt-oss); use a model that was taught \
                         tools, or omit them";
            let name = if self.shows_tools() { "tools" } else { "messages" };
            return Err(ApiError::field(name, words).with_code("no_tools"));
        }
        let Some(syntax) = syntax.filter(|_| self.shows_tools()) else {
            return Ok(Parser::new(None, 0));
        };
        if params.request.constraint.is_some() {
            let words = "cannot be called where the answer has to fit a schema or grammar; omit \
                         one of them, or give `tool_choice: \"none\"`";
            return Err(ApiError::field("tools", words));
        }
        if is_forced {
            params.request.constraint = Some(forced(syntax, &functions, &choice)?);
        }
        // Marks of calls are special tokens in some vocabularies.
        params.request.special = Special::Parse;
        let is_one = self.parallel_tool_calls == Some(false);
        Ok(Parser::new(Some(syntax), if is_one { 1 } else { usize::MAX }))
    }

    /// The text that the template makes of messages.
    pub fn render(mut self, app: &App) -> Answered<String> {
        let Some(chat) = &app.chat else {
            let words = "this model has no chat template; use /v1/completions";
            return Err(ApiError::bad(words).with_code("no_chat_template"));
        };
        let list = self.messages.take().ok_or_else(|| ApiError::missing("messages"))?;
        if list.is_empty() || list.len() > N_MESSAGES_MAX {
            let words = format!("has {} messages; give 1 to {N_MESSAGES_MAX}", list.len());
            return Err(ApiError::field("messages", words));
        }
        let messages = list.into_iter().enumerate().map(|(idx, it)| message(idx, it));
        let mut messages = messages.collect::<Answered<Vec<Message>>>()?;
        let begun = match self.continue_final_message {
            Some(true) => messages.pop(),
            _ => None,
        };
        let text = chat.template.render(&messages, &self.options(chat))?;
        let begun = begun.as_ref().and_then(|message| message["content"].as_str());
        Ok(text + begun.unwrap_or_default())
    }

    fn options(self, chat: &Chat) -> ChatOptions {
        let tools = self.tools.clone().filter(|_| self.shows_tools());
        let mut extra = chat.options.extra.clone();
        extra.extend(self.chat_template_kwargs.unwrap_or_default());
        ChatOptions {
            add_generation_prompt: self.add_generation_prompt.unwrap_or(true),
            tools: tools.map(Value::Array),
            extra,
            now: Some(now()),
            ..chat.options.clone()
        }
    }
}

/// A message; text in parts is put together, and arguments of calls are objects, as templates
/// expect them.
fn message(idx: usize, mut message: Map<String, Value>) -> Answered<Message> {
    let wrong = |words: &str| ApiError::field("messages", format!("message {idx} {words}"));
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(wrong("has no `role`"));
    }
    let text =
        match message.get("content") {
            Some(Value::String(_)) => None,
            // Many templates add it to a text.
            Some(Value::Null) => Some(String::new()),
            Some(Value::Array(parts)) => {
                let text: Option<String> = parts.iter().map(text_of).collect();
                Some(text.ok_or_else(|| {
                    wrong("has a part that is not text; this model reads only text")
                })?)
            }
            Some(_) => return Err(wrong("has a `content` that is not text")),
            None if message.contains_key("tool_calls") => Some(String::new()),
            None => return Err(wrong("has no `content`")),
        };
    if let Some(text) = text {
        message.insert("content".into(), Value::String(text));
    }
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let arguments = call.pointer_mut("/function/arguments");
        let arguments = arguments.ok_or_else(|| wrong("has a call without arguments"))?;
        if let Some(read) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()) {
            *arguments = read;
        }
    }
    Ok(message)
}

/// The text of `{"type": "text", "text": ...}`, or of a part as `/v1/responses` has it.
fn text_of(part: &Value) -> Option<&str> {
    match part.get("type").and_then(Value::as_str) {
        Some("text" | "input_text" | "output_text") => part.get("text").and_then(Value::as_str),
        Some(_) => None,
        None => part.as_str(),
    }
}
