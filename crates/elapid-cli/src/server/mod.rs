//! The server: a model behind HTTP, in the dialects of OpenAI, Anthropic, Ollama, llama.cpp, Tabby.
//!
//! | file          | is                                                                     |
//! |---------------|------------------------------------------------------------------------|
//! | `listen.rs`   | connections, signals, the end                                          |
//! | `security.rs` | who may ask                                                            |
//! | `body.rs`     | the body of a request; `params.rs`: fields that all routes share       |
//! | `gbnf.rs`     | grammars of llama.cpp                                                  |
//! | `fields.rs`   | fields that nobody reads are refused                                   |
//! | `chat.rs`     | the one request behind every chat; `tools.rs`: calls in its answer     |
//! | `models.rs`   | which models there are, which are loaded, what makes room              |
//! | `worker.rs`   | the thread that owns the engine of a model                             |
//! | `watch.rs`    | what `elapid adapt` makes while the server runs                        |
//! | `nearby.rs`   | other files of the project for the place of the cursor                 |
//! | `answer.rs`   | from answers that grow to a response, whole or streamed                |
//! | `openai/`     | `/v1/...`; `anthropic.rs`: `/v1/messages`; `ollama.rs`: `/api/...`     |
//! | `llama/`      | `/completion`, `/infill` and what watches and helps                    |
//! | `tabby.rs`    | what Tabby's editors ask besides                                       |
//! | `studio.rs`   | `/studio`: static files of a page that learns in the browser           |
//! | `error.rs`    | everything that is no success; `log.rs`: a line for each request       |
//!
//! A request goes from top to bottom: it is let in, read, handed to the worker, and its answer is
//! put into the shape its route has. The engine is reached through the worker alone.
//!
//! Not here: what a model computes; the page at `/`, which uses these routes as anybody would.

mod answer;
mod anthropic;
mod body;
mod chat;
mod error;
mod fields;
mod gbnf;
pub mod listen;
mod llama;
mod log;
pub mod models;
pub mod nearby;
mod ollama;
mod openai;
mod params;
mod security;
mod studio;
mod tabby;
mod tools;
pub mod watch;
mod worker;

use crate::project::Project;
use crate::talk::hole;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use elapid::{Chat, Device, FimTokens, Generator, ModelInfo, Special, Tokenizer};
use error::{Answered, ApiError, Dialect};
use models::{Entry, Models};
use nearby::{Nearby, Picked};
pub use security::Guard;
use serde_json::{Value, json};
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
pub use studio::Studio;
use tokio::sync::{Semaphore, watch as channel};
use tokio::task::JoinSet;
use worker::Worker;

/// The page and what it loads: nothing from elsewhere.
const PAGE: [(&str, &str, &str); 4] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/page.css", "text/css; charset=utf-8", include_str!("page/page.css")),
    ("/page.js", "text/javascript; charset=utf-8", include_str!("page/page.js")),
    ("/markdown.js", "text/javascript; charset=utf-8", include_str!("page/markdown.js")),
];

const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                           connect-src 'self'; img-src data:; frame-ancestors 'none'; \
                           base-uri 'none'; form-action 'none'";

/// Requests whose text is cut into tokens at the same time: the rest of the machine answers.
const N_PREPARING: usize = 2;

const N_PROMPTS_MAX: usize = 64;

/// What a server is made of besides the model.
pub struct Settings {
    pub guard: Guard,
    pub body_bytes_max: usize,
    /// Tokens of an answer; a request for more gets this many.
    pub n_tok_max: usize,
    /// Requests that a model answers at the same time.
    pub n_slots: usize,
    /// Bytes that loaded models may take.
    pub memory: Option<u64>,
    /// After so long without a request a model is unloaded.
    pub idle: Option<Duration>,
    /// Adapters may be loaded from below these; canonical paths.
    pub adapter_dirs: Vec<PathBuf>,
    /// From a request to the end of its answer.
    pub time_max: Duration,
    /// Whether a request for a model that is not here gets 404.
    pub strict: bool,
    /// Whether each request gets a line on stderr.
    pub logs: bool,
    /// Tokens guessed ahead where a request does not say.
    pub n_lookup: usize,
    /// The project whose files are shown to requests that bring none.
    pub project: Option<Project>,
    /// The page at `/studio`.
    pub studio: Option<Studio>,
}

/// What clients mean by the name of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Named {
    /// The model without its adapters.
    Alone,
    /// The model with them: nobody chose the two apart.
    WithAdapters,
}

/// What the models of a server share.
pub struct Shared {
    settings: Settings,
    nearby: Option<Nearby>,
    preparing: Semaphore,
    n_answers: AtomicU64,
    started: Instant,
    created_s: u64,
    /// Why nothing is answered any more.
    broken: channel::Sender<Option<ApiError>>,
}

impl Shared {
    pub fn new(settings: Settings) -> Shared {
        Shared {
            nearby: settings.project.as_ref().map(Nearby::new),
            settings,
            preparing: Semaphore::new(N_PREPARING),
            n_answers: AtomicU64::new(0),
            started: Instant::now(),
            created_s: now_s(),
            broken: channel::Sender::new(None),
        }
    }
}

/// A model that is loaded: what every route knows of it.
pub struct App {
    shared: Arc<Shared>,
    entry: Arc<Entry>,
    worker: Worker,
    tokenizer: Arc<Tokenizer>,
    /// What the model is called, and where it came from.
    name: String,
    path: String,
    chat: Option<Chat>,
    chat_source: Option<String>,
    fim: Option<FimTokens>,
    /// Tokens of prompt and answer together.
    context: usize,
    info: ModelInfo,
    device: Device,
}

impl Deref for App {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl App {
    /// What every route knows of a model, and the engine that answers for it.
    fn new(mut loaded: Generator, entry: Arc<Entry>, shared: Arc<Shared>) -> std::io::Result<App> {
        Ok(App {
            tokenizer: loaded.engine.tokenizer().clone(),
            name: entry.name.clone(),
            path: loaded.path.display().to_string(),
            chat: loaded.chat.take(),
            chat_source: loaded.chat_source.take(),
            fim: loaded.fim.clone(),
            context: loaded.engine.settings().context,
            info: loaded.info.clone(),
            device: loaded.engine.device().clone(),
            worker: Worker::start(loaded, shared.settings.time_max, shared.broken.clone())?,
            entry,
            shared,
        })
    }

    /// What is served, for programs.
    pub fn about(&self) -> Value {
        let names = self.entry.names();
        json!({
            "model": self.name, "adapters": names[1..], "slots": self.settings.n_slots,
            "context": self.context, "fim": self.fim.is_some(), "chat": self.chat.is_some(),
        })
    }

    /// Work that takes a while and has nothing to wait for.
    async fn prepare<T>(&self, f: impl FnOnce() -> Answered<T>) -> Answered<T> {
        let permit = self.preparing.acquire().await;
        let _permit = permit.map_err(|_| ApiError::internal("the server is ending"))?;
        tokio::task::block_in_place(f)
    }

    /// What the project says about a place, unless the request does not want it.
    fn picked(
        &self,
        named: Option<&str>,
        around: [&str; 2],
        wanted: Option<bool>,
    ) -> Option<Picked> {
        let nearby = self.nearby.as_ref().filter(|_| wanted != Some(false))?;
        Some(nearby.pick(named, around, hole::picked_bytes(self.context)))
    }

    /// Adapters that act where a request does not say.
    fn default_adapters(&self) -> Vec<(usize, f32)> {
        let adapters = self.entry.adapters();
        let scales = adapters.iter().map(|held| held.as_ref().map_or(0.0, |held| held.scale));
        scales.enumerate().filter(|(_, scale)| *scale != 0.0).collect()
    }

    /// The name of the model that answers, and its adapters.
    ///
    /// The name of an adapter is the model with this adapter on it; the name of the model is the
    /// model alone, unless the adapter was found in a project; no name, and one that is not known,
    /// is whatever the server was started with.
    fn choose(&self, model: Option<&str>) -> (String, Vec<(usize, f32)>) {
        let name = model.map(|name| name.strip_suffix(":latest").unwrap_or(name));
        if name == Some(&self.name) && self.entry.named == Named::Alone {
            return (self.name.clone(), Vec::new());
        }
        let adapters = self.entry.adapters();
        let named = |held: &Option<models::Held>| {
            held.as_ref().filter(|held| Some(&held.name[..]) == name).map(|held| held.own)
        };
        let found = adapters.iter().enumerate().find_map(|(idx, held)| Some((idx, named(held)?)));
        drop(adapters);
        match (name, found) {
            // One that is off is wanted by name.
            (Some(name), Some((idx, own))) if name != self.name => {
                (name.into(), vec![(idx, if own == 0.0 { 1.0 } else { own })])
            }
            _ => (self.name.clone(), self.default_adapters()),
        }
    }

    /// Loads an adapter; `own` is how it acts by name, `scale` where a request does not say.
    async fn load_adapter(&self, path: PathBuf, own: f32, scale: f32) -> Answered<String> {
        let (number, name) = self.worker.load_adapter(path.clone(), own).await?;
        let mut adapters = self.entry.adapters();
        if adapters.len() <= number {
            adapters.resize(number + 1, None);
        }
        adapters[number] =
            Some(models::Held { name: name.clone(), path, own, scale, is_own: false });
        Ok(name)
    }

    fn token_id(&self, name: &str, id: u32) -> Answered<u32> {
        let n_vocab = self.info.n_vocab;
        let words = || format!("{id} is not a token id below {n_vocab}");
        Some(id).filter(|_| (id as usize) < n_vocab).ok_or_else(|| ApiError::field(name, words()))
    }

    /// What an empty prompt is.
    fn begin(&self) -> Answered<Vec<u32>> {
        let words = "is empty, and the model has no BOS token";
        elapid::empty_prompt(&self.tokenizer).ok_or_else(|| ApiError::field("prompt", words))
    }

    /// The ids of a text that a model continues.
    fn encode_prompt(&self, text: &str) -> Answered<Vec<u32>> {
        if text.is_empty() {
            return self.begin();
        }
        Ok(self.tokenizer.encode_with_begin(text, Special::Parse)?)
    }

    /// How many tokens may follow a prompt of `n_prompt` tokens when `wanted` are asked for.
    fn n_max(&self, n_prompt: usize, wanted: Option<usize>) -> Answered<usize> {
        let context = self.context;
        // A warm-up may fill the context.
        let n_needed = usize::from(wanted != Some(0));
        if n_prompt + n_needed > context {
            let words = format!(
                "the prompt has {n_prompt} tokens, and the context of this server holds {context} \
                 (--context)"
            );
            return Err(ApiError::field("prompt", words).with_code("context_length_exceeded"));
        }
        let n_max = wanted.unwrap_or(usize::MAX).min(context - n_prompt);
        Ok(n_max.min(self.settings.n_tok_max))
    }

    fn answer_id(&self, prefix: &str) -> String {
        let n = self.n_answers.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:x}-{n}", self.created_s)
    }

    /// Nine letters and digits: the templates of Mistral's models take no other.
    fn call_id(&self) -> String {
        format!("call{:05x}", self.n_answers.fetch_add(1, Ordering::Relaxed) & 0xf_ffff)
    }
}

/// Seconds since 1970.
fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn router(models: Arc<Models>) -> Router {
    let page = |router: Router<_>, (path, kind, text)| {
        let headers = [
            (header::CONTENT_TYPE, kind),
            (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        router.route(path, get(async move || (headers, text)))
    };
    PAGE.into_iter()
        .fold(Router::new(), page)
        .route("/favicon.ico", get(async || StatusCode::NO_CONTENT))
        .route("/studio", get(studio::answer))
        .route("/studio/", get(studio::answer))
        .route("/studio/{*name}", get(studio::answer))
        // OpenAI
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*name}", get(openai::model))
        .route("/models", get(openai::models))
        .route("/v1/completions", post(openai::completions))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/chat/completions", post(openai::chat))
        .route("/v1/embeddings", post(openai::embeddings))
        .route("/embeddings", post(openai::embeddings))
        .route("/embedding", post(llama::embedding))
        .route("/v1/responses", post(openai::responses))
        // Anthropic
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        // Ollama
        .route("/api/version", get(ollama::version))
        .route("/api/tags", get(ollama::tags))
        .route("/api/ps", get(ollama::running))
        .route("/api/show", post(ollama::show))
        .route("/api/generate", post(ollama::generate))
        .route("/api/chat", post(ollama::chat))
        .route("/api/embed", post(ollama::embed_many))
        .route("/api/embeddings", post(ollama::embed_one))
        // llama.cpp
        .route("/completion", post(llama::completion))
        .route("/completions", post(llama::completion))
        .route("/infill", post(llama::infill))
        .route("/health", get(llama::health))
        .route("/props", get(llama::props))
        .route("/slots", get(llama::slots))
        .route("/metrics", get(llama::metrics))
        .route("/tokenize", post(llama::tokenize))
        .route("/detokenize", post(llama::detokenize))
        .route("/apply-template", post(llama::apply_template))
        .route("/lora-adapters", get(llama::adapters).post(llama::set_adapters))
        // Tabby
        .route("/v1/health", get(tabby::health).post(tabby::health))
        // What was shown and taken is accepted and forgotten.
        .route("/v1/events", post(async || StatusCode::NO_CONTENT))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(axum::middleware::from_fn_with_state(models.clone(), enter))
        .with_state(models)
}

/// Lets a request in, and answers for handlers that panic.
async fn enter(State(models): State<Arc<Models>>, request: Request, next: Next) -> Response {
    let settings = &models.shared.settings;
    let log = settings.logs.then(|| log::Line::new(request.method(), request.uri()));
    let dialect = Dialect::of(request.uri().path());
    let mut response = answered(settings, request, next).await;
    if let Some(error) = response.extensions_mut().remove::<ApiError>()
        && dialect != Dialect::Openai
    {
        let headers = std::mem::take(response.headers_mut());
        response = error.response(dialect);
        response.headers_mut().extend(headers);
    }
    match log {
        Some(line) => line.follow(response),
        None => response,
    }
}

async fn answered(settings: &Settings, request: Request, next: Next) -> Response {
    let checked = settings.guard.check(request.method(), request.uri(), request.headers());
    let origin = match checked {
        Ok(origin) if request.method() != Method::OPTIONS => origin,
        ended => {
            body::discard(request).await;
            return ended.map_or_else(ApiError::into_response, security::preflight);
        }
    };
    let request = match body::gather(request, settings.body_bytes_max).await {
        Ok(request) => request,
        Err(error) => return error.into_response(),
    };
    // A task of its own, which ends with this one: a panic in it is caught, and a client that goes
    // away still drops all it asked for.
    let mut tasks = JoinSet::new();
    tasks.spawn(next.run(request));
    let mut response = match tasks.join_next().await {
        Some(Ok(response)) => response,
        _ => ApiError::internal("the server failed on this request").into_response(),
    };
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Some(origin) = origin {
        security::allow(headers, origin);
    }
    response
}

async fn not_found(method: Method, uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, format!("there is no `{method} {}` here", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let words = format!("`{}` does not take {method}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, words)
}
