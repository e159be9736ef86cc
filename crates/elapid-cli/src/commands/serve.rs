//! `elapid serve`: a model behind HTTP, for editors, scripts and a page in the browser.

use super::{Chosen, here};
use crate::base;
use crate::compute::Compute;
use crate::files;
use crate::hub;
use crate::project::Project;
use crate::report::{Done, Failure, between, line, metrics, size};
use crate::server::{Guard, Named, Settings, Studio, listen};
use crate::talk::flags::{AdapterPath, cache_type, load};
use elapid::{CacheType, Generator, GeneratorSettings, Model};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Default context size, if the model could hold more.
const CONTEXT_MAX: usize = 8192;

/// Serve a model over HTTP to editors, scripts and the browser.
///
/// Implements the APIs of OpenAI (`/v1/chat/completions`, `/v1/responses`, `/v1/completions`,
/// `/v1/embeddings`), Anthropic (`/v1/messages`), Ollama (`/api/...`) and llama.cpp (`/infill`,
/// `/completion`), so that their clients, llama.vim and llama.vscode work unchanged. Open the
/// address in a browser to try it, or `/studio` to have a model learn a folder in the browser.
///
/// Completion requests (`/infill`, or `suffix` in `/v1/completions`) are shown the pieces of the
/// project that matter at the cursor, unless they bring `input_extra` or `project_context: false`.
///
/// Listens on localhost only by default; any other address needs an API key.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid serve\n  elapid serve model.gguf --project .\n  \
    elapid serve SmolLM2-135M --adapter runs/a1 --adapter runs/a2=0.5\n  \
    elapid serve model.gguf --host 0.0.0.0 --api-key-file keys.txt --parallel 8\n\n\
    SIGINT or SIGTERM stops the server: running requests may finish. \
    A second signal cancels them.\n\n\
    Exit codes: 0 after a signal, 130 after a second one, 1 if it cannot start, 69 if the engine \
    can no longer answer (a lost GPU, for example): restart it.")]
pub struct Serve {
    /// Model: directory, .gguf or .elapid file, a run of `elapid train`, or elapid-code
    /// [default: the newest adapter of the project with its base, or elapid-code]
    model: Option<PathBuf>,
    /// Project whose files are shown to completion requests that bring no other files [default:
    /// that of the current directory if no model is given]
    #[arg(long, value_name = "DIR")]
    project: Option<PathBuf>,
    /// Do not add files of the project to requests
    #[arg(long, conflicts_with = "project")]
    no_project_context: bool,
    /// Address to listen on; any but localhost needs an API key
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 picks a free one
    #[arg(long, default_value_t = 8012)]
    port: u16,
    /// Adapter to load, with its default scale; may be repeated
    #[arg(long, value_name = "PATH[=SCALE]")]
    adapter: Vec<AdapterPath>,
    /// API key that clients must send
    #[arg(long, value_name = "KEY", conflicts_with = "api_key_file")]
    api_key: Option<String>,
    /// File of API keys, one per line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Requests answered at the same time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = between(1, 256))]
    parallel: usize,
    /// Maximum queued requests; further ones get 503
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = between(0, 65536))]
    queue: usize,
    /// Context size: tokens of prompt and answer together [default: the model's, at most 8192]
    #[arg(long, short = 'c', value_name = "N", value_parser = between(16, 1 << 24))]
    context: Option<usize>,
    /// Memory for the prompt cache
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = between(0, 1 << 20))]
    snapshot_mib: usize,
    /// Maximum tokens per answer [default: what the context leaves]
    #[arg(long, value_name = "N", value_parser = between(1, 1 << 24))]
    max_tokens: Option<usize>,
    /// Prompt lookup decoding: guess up to N tokens and verify them in one pass (same answer)
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = between(0, 64))]
    lookup: usize,
    /// Timeout of a request in seconds
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = between(1, 1 << 20))]
    timeout_s: usize,
    /// Maximum size of a request body
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = between(1, 1024))]
    max_body_mib: usize,
    /// Model name reported to clients [default: that of its file, run or project]
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    /// Answer requests for a model of another name with 404 [default: the loaded model answers]
    #[arg(long)]
    strict_model: bool,
    /// Write a line for each request to stderr: path, status, time
    #[arg(long)]
    log: bool,
    /// Data type of the KV cache: f32, f16 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = cache_type)]
    cache_type: CacheType,
    /// Memory for experts, such as 500M: they are loaded when the router chooses them, and those
    /// used least make room (same answers) [default: all are loaded]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    expert_memory: Option<u64>,
    /// Web origin that may send requests (CORS), as `https://editor.example`; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    /// Folder of the page at `/studio`, as made by `web/build-studio` [default:
    /// ../share/elapid/studio beside the binary, if it is there]
    #[arg(long, value_name = "DIR")]
    studio: Option<PathBuf>,
    #[command(flatten)]
    compute: Compute,
    /// Print the address as one JSON object on stdout
    #[arg(long)]
    json: bool,
}

impl Serve {
    pub fn run(&self) -> Done<ExitCode> {
        let keys = self.keys()?;
        self.check_origins()?;
        let project = self.project()?;
        let studio = Studio::find(self.studio.as_deref())?;
        let listener = self.bind(&keys)?;
        let address = listener.local_addr().map_err(|error| self.cannot_listen(&error))?;
        let chosen = Chosen::new(self.model.as_deref(), &self.adapter, &here())?;
        chosen.say();
        let loaded = self.load(&chosen)?;
        let pulled = || hub::cache::name_of(&chosen.model);
        let own = || name(&loaded.name, &chosen, self.adapter.len());
        let name = self.alias.clone().or_else(pulled).unwrap_or_else(own);
        let (sentence, about) = self.describe(&loaded, &name, address, project.as_ref());
        let context = loaded.engine.settings().context;
        let settings = Settings {
            body_bytes_max: self.max_body_mib << 20,
            n_tok_max: self.max_tokens.unwrap_or(context),
            time_max: Duration::from_secs(self.timeout_s as u64),
            guard: Guard::new(address, &self.host, &keys, &self.allow_origin),
            name,
            strict: self.strict_model,
            logs: self.log,
            n_lookup: self.lookup,
            project,
            named: match chosen.why {
                Some(_) => Named::WithAdapters,
                None => Named::Alone,
            },
            studio,
        };
        listen::serve(listener, loaded, settings, || {
            eprintln!("{sentence}");
            if self.json {
                line(about);
            }
        })
    }

    /// The project whose files are shown, if any is.
    fn project(&self) -> Done<Option<Project>> {
        match &self.project {
            Some(dir) if !dir.is_dir() => {
                let problem = format!("--project {}: there is no such directory", dir.display());
                Err(Failure::new(problem, "give the directory of the project"))
            }
            Some(dir) => Ok(Some(Project::of(dir))),
            None => Ok((self.model.is_none() && !self.no_project_context).then(here)),
        }
    }

    fn load(&self, chosen: &Chosen) -> Done<Generator> {
        let model = Model::open(&chosen.model)?;
        let context = model.info()?.n_ctx.map_or(CONTEXT_MAX, |n| n.min(CONTEXT_MAX));
        let settings = GeneratorSettings {
            context: Some(self.context.unwrap_or(context)),
            n_slots: self.parallel,
            n_waiting_max: self.queue,
            snapshot_bytes_max: self.snapshot_mib << 20,
            cache: self.cache_type,
            expert_bytes_max: self.expert_memory.map(|n_bytes| n_bytes as usize),
        };
        load(model, &self.compute, &settings, &chosen.adapters)
    }

    fn keys(&self) -> Done<Vec<String>> {
        let (text, from) = match (&self.api_key, &self.api_key_file) {
            (Some(key), _) => (key.clone(), "--api-key".to_string()),
            (None, Some(path)) => (files::read_text(path)?, path.display().to_string()),
            (None, None) => return Ok(Vec::new()),
        };
        let lines = text.lines().map(str::trim).filter(|key| !key.is_empty());
        let keys: Vec<String> = lines.map(str::to_string).collect();
        if keys.is_empty() {
            let problem = format!("{from} holds no API key");
            return Err(Failure::new(problem, "give a key that is not empty"));
        }
        Ok(keys)
    }

    fn check_origins(&self) -> Done<()> {
        let is_origin = |origin: &String| {
            let rest = origin.split_once("://").map(|pair| pair.1.trim_end_matches('/'));
            rest.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*', ' ', '?', '#']))
        };
        let wrong = self.allow_origin.iter().find(|origin| !is_origin(origin));
        wrong.map_or(Ok(()), |origin| {
            let hint = "an origin is a scheme and a host: https://editor.example:8443";
            Err(Failure::new(format!("`{origin}` is not an origin"), hint))
        })
    }

    fn bind(&self, keys: &[String]) -> Done<TcpListener> {
        let addresses = (self.host.as_str(), self.port).to_socket_addrs();
        let addresses = addresses.map_err(|error| self.cannot_listen(&error))?;
        let addresses: Vec<SocketAddr> = addresses.collect();
        let is_local = addresses.iter().all(|address| address.ip().is_loopback());
        if !is_local && keys.is_empty() {
            let problem =
                format!("{} is reachable from other machines, and no API key is set", self.host);
            let hint = "add --api-key-file FILE, or remove --host";
            return Err(Failure::new(problem, hint));
        }
        TcpListener::bind(&addresses[..]).map_err(|error| self.cannot_listen(&error))
    }

    fn cannot_listen(&self, error: &std::io::Error) -> Failure {
        let problem = format!("cannot listen on {}:{}: {error}", self.host, self.port);
        Failure::new(problem, "choose another port: --port N, or --port 0 for a free one")
    }

    /// What is served and where, for people and for programs.
    fn describe(
        &self,
        loaded: &Generator,
        name: &str,
        address: SocketAddr,
        project: Option<&Project>,
    ) -> (String, Value) {
        let (settings, has_fim) = (loaded.engine.settings(), loaded.fim.is_some());
        let (n_slots, context) = (settings.n_slots, settings.context);
        let adapters: Vec<&str> = loaded.adapters.iter().map(|a| a.name.as_str()).collect();
        let with = match adapters.len() {
            0 => String::new(),
            n => format!(", {n} adapter{}", if n == 1 { "" } else { "s" }),
        };
        let fim = if has_fim { "yes" } else { "no" };
        let project = project.filter(|_| has_fim).map(|project| &project.root);
        let shown = project.map_or(String::new(), |root| format!(", files of {}", root.display()));
        let sentence = format!(
            "serve   http://{address}  {name}{with}, {n_slots} slots, context {context}, \
             fill-in-the-middle: {fim}{shown}"
        );
        let about = json!({
            "url": format!("http://{address}"), "host": address.ip().to_string(),
            "port": address.port(), "model": name, "adapters": adapters, "slots": n_slots,
            "context": context, "fim": has_fim, "chat": loaded.chat.is_some(), "project": project,
        });
        (sentence, about)
    }
}

/// What clients call a model that calls itself `own`: the project that it was adapted to, the run
/// that made it, or its file.
fn name(own: &str, chosen: &Chosen, n_given: usize) -> String {
    let last = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let full = chosen.model.canonicalize().unwrap_or_else(|_| chosen.model.clone());
    let is_shipped = last(&full).is_some_and(|name| *name == *base::file_name());
    if chosen.why.is_some() && (chosen.adapters.len() > n_given || !is_shipped) {
        return here().name();
    }
    if is_shipped {
        return base::NAME.into();
    }
    if full.is_file() {
        return full.file_stem().map_or(own.into(), |name| name.to_string_lossy().into_owned());
    }
    // `runs/1`, and `runs/1/model` in it.
    let is_run = |dir: &Path| dir.join(metrics::FILE).is_file();
    let mut dirs = [Some(&*full), full.parent()].into_iter().flatten();
    let run = dirs.find(|dir| is_run(dir)).and_then(|dir| Some((last(dir.parent()?)?, last(dir)?)));
    run.map_or(own.into(), |(parent, run)| format!("{parent}/{run}"))
}
