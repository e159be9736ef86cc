//! `elapid serve`: a model behind HTTP, for editors, scripts and a page in the browser.

use crate::compute::Compute;
use crate::files;
use crate::report::{Done, Failure, between, line};
use crate::server::{Guard, Settings, listen};
use crate::talk::flags::cache_type;
use crate::talk::load::{AdapterPath, LoadSettings, load};
use elapid::CacheType;
use elapid::{Generator, GeneratorSettings};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Tokens of context when nobody says and the model could hold more.
const CONTEXT_MAX: usize = 8192;

/// Serve a model to editors, scripts and a page in the browser.
///
/// Speaks the languages of OpenAI (`/v1/completions`, `/v1/chat/completions`, `/v1/embeddings`) and
/// of llama.cpp (`/infill`, `/completion`), so that llama.vim, llama.vscode and OpenAI's clients
/// work as they are. Open the address in a browser to try it.
///
/// Listens on this machine alone unless told; other machines need a key.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid serve model.gguf\n  \
    elapid serve SmolLM2-135M --adapter runs/a1 --adapter runs/a2=0.5\n  \
    elapid serve model.gguf --host 0.0.0.0 --api-key-file keys.txt --parallel 8\n\n\
    SIGINT or SIGTERM ends it: answers under way may finish, a second one ends them too.\n\n\
    Exit codes: 0 after a signal, 130 after a second one, 1 if it cannot start, 69 if the engine \
    cannot answer any more (a lost GPU, for example): start it again.")]
pub struct Serve {
    /// Directory, .gguf or .elapid file, or a run of `elapid train`
    model: PathBuf,
    /// Address to listen on; any but this machine's own needs a key
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8012)]
    port: u16,
    /// Adapter to load, and how strongly it acts where a request does not say; may be repeated
    #[arg(long, value_name = "PATH[=SCALE]")]
    adapter: Vec<AdapterPath>,
    /// Key that clients must send
    #[arg(long, value_name = "KEY", conflicts_with = "api_key_file")]
    api_key: Option<String>,
    /// File of keys, one in a line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Answers side by side
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = between(1, 256))]
    parallel: usize,
    /// Maximum queued requests; further ones get 503
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = between(0, 65536))]
    queue: usize,
    /// Tokens of prompt and answer together [default: what the model was made for, at most 8192]
    #[arg(long, short = 'c', value_name = "N", value_parser = between(16, 1 << 24))]
    context: Option<usize>,
    /// Memory for what was read of prompts, kept for the next ones
    #[arg(long, value_name = "MIB", default_value_t = 512, value_parser = between(0, 1 << 20))]
    snapshot_mib: usize,
    /// Tokens of an answer, at most [default: what the context holds]
    #[arg(long, value_name = "N", value_parser = between(1, 1 << 24))]
    max_tokens: Option<usize>,
    /// Guess up to N tokens from the prompt and check them in one pass: faster, same answer
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = between(0, 64))]
    lookup: usize,
    /// Seconds for a request from its coming to its end
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = between(1, 1 << 20))]
    timeout_s: usize,
    /// Size of a request, at most
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = between(1, 1024))]
    max_body_mib: usize,
    /// Model name reported to clients [default: its own]
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    /// Numbers of the key-value cache: f32, f16 or q8_0, the smaller the less memory
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = cache_type)]
    cache_type: CacheType,
    /// Origin of another web page that may ask, such as `https://editor.example`; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    allow_origin: Vec<String>,
    #[command(flatten)]
    compute: Compute,
    /// Print where it listens as one JSON object on stdout
    #[arg(long)]
    json: bool,
}

impl Serve {
    pub fn run(&self) -> Done<ExitCode> {
        let keys = self.keys()?;
        self.check_origins()?;
        let listener = self.bind(&keys)?;
        let address = listener.local_addr().map_err(|error| self.cannot_listen(&error))?;
        let loaded = load(&self.model, &self.load_settings())?;
        let about = self.about(&loaded, address);
        let sentence = self.sentence(&loaded, address);
        let context = loaded.engine.settings().context;
        let settings = Settings {
            body_bytes_max: self.max_body_mib << 20,
            n_tok_max: self.max_tokens.unwrap_or(context),
            time_max: Duration::from_secs(self.timeout_s as u64),
            guard: Guard::new(address, &self.host, &keys, &self.allow_origin),
            alias: self.alias.clone(),
            n_lookup: self.lookup,
        };
        listen::serve(listener, loaded, settings, || {
            eprintln!("{sentence}");
            if self.json {
                line(about);
            }
        })
    }

    fn load_settings(&self) -> LoadSettings {
        LoadSettings {
            compute: self.compute.clone(),
            context_max: Some(CONTEXT_MAX),
            generator: GeneratorSettings {
                context: self.context,
                n_slots: self.parallel,
                n_waiting_max: self.queue,
                snapshot_bytes_max: self.snapshot_mib << 20,
                cache: self.cache_type,
            },
            adapters: self.adapter.clone(),
        }
    }

    fn keys(&self) -> Done<Vec<String>> {
        let (keys, from): (Vec<String>, _) = match (&self.api_key, &self.api_key_file) {
            (Some(key), _) => (vec![key.trim().to_string()], "--api-key".to_string()),
            (None, Some(path)) => {
                let text = files::read_text(path)?;
                (
                    text.lines().map(|line| line.trim().to_string()).collect(),
                    path.display().to_string(),
                )
            }
            (None, None) => return Ok(Vec::new()),
        };
        let keys: Vec<String> = keys.into_iter().filter(|key| !key.is_empty()).collect();
        match keys.is_empty() {
            true => Err(Failure::new(format!("{from} holds no key"), "give a text of some length")),
            false => Ok(keys),
        }
    }

    fn check_origins(&self) -> Done<()> {
        let is_origin = |origin: &String| {
            let rest = origin.split_once("://").map(|pair| pair.1.trim_end_matches('/'));
            rest.is_some_and(|host| !host.is_empty() && !host.contains(['/', '*', ' ', '?', '#']))
        };
        match self.allow_origin.iter().find(|origin| !is_origin(origin)) {
            None => Ok(()),
            Some(origin) => {
                let hint = "an origin is a scheme and a host: https://editor.example:8443";
                Err(Failure::new(format!("`{origin}` is no origin"), hint))
            }
        }
    }

    fn bind(&self, keys: &[String]) -> Done<TcpListener> {
        let addresses = (self.host.as_str(), self.port).to_socket_addrs();
        let addresses = addresses.map_err(|error| self.cannot_listen(&error))?;
        let addresses: Vec<SocketAddr> = addresses.collect();
        let is_local = addresses.iter().all(|address| address.ip().is_loopback());
        if !is_local && keys.is_empty() {
            let problem =
                format!("{} is within reach of other machines, and there is no key", self.host);
            let hint = "ask for a key with --api-key-file FILE, or leave --host out";
            return Err(Failure::new(problem, hint));
        }
        TcpListener::bind(&addresses[..]).map_err(|error| self.cannot_listen(&error))
    }

    fn cannot_listen(&self, error: &std::io::Error) -> Failure {
        let problem = format!("cannot listen on {}:{}: {error}", self.host, self.port);
        Failure::new(problem, "choose another port: --port N, or --port 0 for any that is free")
    }

    fn sentence(&self, loaded: &Generator, address: SocketAddr) -> String {
        let settings = loaded.engine.settings();
        let fim = if loaded.fim.is_some() { "yes" } else { "no" };
        let adapters = match loaded.adapters.len() {
            0 => String::new(),
            n => format!(", {n} adapter{}", if n == 1 { "" } else { "s" }),
        };
        let name = self.alias.as_deref().unwrap_or(&loaded.name);
        format!(
            "serve   http://{address}  {name}{adapters}, {} slots, context {}, fill in the \
             middle: {fim}",
            settings.n_slots, settings.context
        )
    }

    fn about(&self, loaded: &Generator, address: SocketAddr) -> Value {
        let settings = loaded.engine.settings();
        let adapters: Vec<&str> = loaded.adapters.iter().map(|a| a.name.as_str()).collect();
        json!({
            "url": format!("http://{address}"), "host": address.ip().to_string(),
            "port": address.port(), "model": self.alias.as_deref().unwrap_or(&loaded.name),
            "adapters": adapters, "slots": settings.n_slots, "context": settings.context,
            "fim": loaded.fim.is_some(), "chat": loaded.chat.is_some(),
        })
    }
}
