//! `elapid serve`: a model behind HTTP, for editors, scripts and a page in the browser.

use super::{Chosen, here};
use crate::base;
use crate::compute::Compute;
use crate::files;
use crate::hub;
use crate::machine;
use crate::project::Loadable;
use crate::project::Project;
use crate::report::text::bytes;
use crate::report::{Done, Failure, between, line, metrics, size};
use crate::run;
use crate::server::models::{Entry, Held, Models};
use crate::server::watch::Watched;
use crate::server::{Guard, Named, Settings, Shared, Studio, listen};
use crate::talk::flags::{AdapterPath, cache_type, load_on, number_from_zero};
use elapid::{CacheType, Device, Generator, GeneratorSettings, Model};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
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
/// Of several models a request chooses one by its name; they are loaded when they are asked for,
/// within --memory. Adapters are loaded, unloaded and scaled by `/lora-adapters`.
///
/// Listens on localhost only by default; any other address needs an API key.
#[derive(clap::Args, Clone)]
#[command(
    after_help = "Examples:\n  elapid serve --watch .\n  elapid serve model.gguf --project .\n  \
    elapid serve small.gguf large.gguf models/ --memory 4G --idle 10\n  \
    elapid serve SmolLM2-135M --adapter runs/a1 --adapter runs/a2=0.5\n  \
    elapid serve model.gguf --host 0.0.0.0 --api-key-file keys.txt --parallel 8\n\n\
    SIGINT or SIGTERM stops the server: running requests may finish. \
    A second signal cancels them.\n\n\
    Exit codes: 0 after a signal, 130 after a second one, 1 if it cannot start, 69 if the engine \
    can no longer answer (a lost GPU, for example): restart it."
)]
pub struct Serve {
    /// Models: directory, .gguf or .elapid file, owner/repo, a run of `elapid train`, elapid-code,
    /// or a directory of such; the first answers requests that name none [default: the newest
    /// adapter of the project with its base, or elapid-code]
    #[arg(value_name = "MODEL")]
    models: Vec<PathBuf>,
    /// Memory for loaded models, such as 4G: the one used least recently makes room for another
    /// [default: what is free at the start]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    memory: Option<u64>,
    /// Unload a model after this many minutes without a request [default: never]
    #[arg(long, value_name = "MINUTES", value_parser = number_from_zero)]
    idle: Option<f32>,
    /// Directory that clients may load adapters from (`POST /lora-adapters`); may be repeated
    #[arg(long, value_name = "DIR")]
    adapter_dir: Vec<PathBuf>,
    /// Serve what `elapid adapt` and `elapid train` make in this project or directory of runs
    /// while the server runs; may be repeated
    #[arg(long, value_name = "DIR")]
    watch: Vec<PathBuf>,
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
    /// Adapter to load onto the first model, with its default scale; may be repeated
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
    /// Name of the first model for clients [default: that of its file, run or project]
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
        let device = self.compute.open()?;
        let entries = self.entries()?;
        let memory = self.memory_max(&entries, &device)?;
        let (flags, on) = (self.clone(), device.clone());
        let settings = Settings {
            body_bytes_max: self.max_body_mib << 20,
            n_tok_max: self.max_tokens.unwrap_or(usize::MAX),
            n_slots: self.parallel,
            memory,
            idle: self.idle.map(|minutes| Duration::from_secs_f32(60.0 * minutes)),
            adapter_dirs: self.directories("--adapter-dir", &self.adapter_dir)?,
            time_max: Duration::from_secs(self.timeout_s as u64),
            guard: Guard::new(address, &self.host, &keys, &self.allow_origin),
            strict: self.strict_model,
            logs: self.log,
            n_lookup: self.lookup,
            project: project.clone(),
            studio,
        };
        let load = move |entry: &Entry| flags.load(entry, &on);
        let watched = self.watched()?;
        let models = Models::new(Arc::new(Shared::new(settings)), entries, Box::new(load));
        let (sentence, about) = self.describe(&models, address, project.as_ref())?;
        listen::serve(listener, Arc::new(models), watched, || {
            eprintln!("{sentence}");
            if self.json {
                line(about);
            }
        })
    }

    /// The models that were named, or the one of the project.
    fn entries(&self) -> Done<Vec<Entry>> {
        if self.models.is_empty() {
            let chosen = Chosen::new(None, &self.adapter, &here())?;
            chosen.say();
            return Ok(vec![self.entry(&chosen, self.alias.clone())?]);
        }
        let mut entries: Vec<Entry> = Vec::new();
        for path in &self.models {
            let inside = inside(path)?;
            for path in inside.as_deref().unwrap_or(std::slice::from_ref(path)) {
                let is_first = entries.is_empty();
                let adapters = if is_first { &self.adapter[..] } else { &[] };
                let chosen = Chosen::new(Some(path), adapters, &here())?;
                let alias = self.alias.clone().filter(|_| is_first);
                match self.entry(&chosen, alias) {
                    Ok(entry) => entries.push(entry),
                    Err(failure) if inside.is_some() => {
                        let why = failure.to_string();
                        let why = why.lines().next().unwrap_or_default();
                        eprintln!("note    {} is left out: {why}", path.display());
                    }
                    Err(failure) => return Err(failure),
                }
            }
        }
        for idx in 1..entries.len() {
            let is_taken = |name: &str| entries[..idx].iter().any(|entry| entry.name == name);
            let name = entries[idx].name.clone();
            let mut names =
                std::iter::once(name.clone()).chain((2..).map(|n| format!("{name}-{n}")));
            entries[idx].name = names.find(|name| !is_taken(name)).unwrap_or(name);
        }
        match entries.is_empty() {
            false => Ok(entries),
            true => {
                Err(Failure::new("there is no model in these directories", "name a model file"))
            }
        }
    }

    /// A model to be served.
    fn entry(&self, chosen: &Chosen, alias: Option<String>) -> Done<Entry> {
        let info = Model::open(&chosen.model)?.info()?;
        let context = info.n_ctx.map_or(CONTEXT_MAX, |n| n.min(CONTEXT_MAX));
        let pulled = || hub::cache::name_of(&chosen.model);
        let own = || name(&info.name, chosen, self.adapter.len());
        let name = alias.or_else(pulled).unwrap_or_else(own);
        let named = if chosen.why.is_some() { Named::WithAdapters } else { Named::Alone };
        let held = |it: &AdapterPath| {
            let (path, name) = (it.path.clone(), it.path.display().to_string());
            Held { name, path, own: it.scale, scale: it.scale, is_own: false }
        };
        let adapters = chosen.adapters.iter().map(held).collect();
        let facts = (info, self.context.unwrap_or(context));
        Ok(Entry::new(name, chosen.model.clone(), facts, (named, adapters)))
    }

    /// Bytes that models may take, if each of them fits.
    fn memory_max(&self, entries: &[Entry], device: &Device) -> Done<Option<u64>> {
        let free = || (device.kind() == "cpu").then(machine::free_bytes).flatten();
        let Some(memory) = self.memory else {
            return Ok(if entries.len() > 1 { free() } else { None });
        };
        match entries.iter().find(|entry| entry.n_bytes() > memory) {
            None => Ok(Some(memory)),
            Some(entry) => {
                let (needs, has) = (bytes(entry.n_bytes() as f64), bytes(memory as f64));
                let problem = format!("{} needs {needs}, --memory allows {has}", entry.name);
                Err(Failure::new(problem, "give more, or a shorter --context"))
            }
        }
    }

    fn directories(&self, flag: &str, list: &[PathBuf]) -> Done<Vec<PathBuf>> {
        let full = |dir: &PathBuf| match dir.canonicalize() {
            Ok(full) if full.is_dir() => Ok(full),
            _ => {
                let problem = format!("{flag} {}: there is no such directory", dir.display());
                Err(Failure::new(problem, "give a directory that is there"))
            }
        };
        list.iter().map(full).collect()
    }

    fn watched(&self) -> Done<Vec<Watched>> {
        let dirs = self.directories("--watch", &self.watch)?;
        let watched = |dir: PathBuf| {
            let flags = self.clone();
            let make = move |load: &Loadable, name: String| {
                let of_load = |(path, scale): &(PathBuf, f32)| AdapterPath {
                    path: path.clone(),
                    scale: *scale,
                };
                let adapters = load.adapter.iter().map(of_load).collect();
                let why = Some(String::new());
                flags.entry(&Chosen { model: load.model.clone(), adapters, why }, Some(name))
            };
            Watched::new(&dir, self.models.is_empty(), Box::new(make))
        };
        Ok(dirs.into_iter().map(watched).collect())
    }

    /// The project whose files are shown, if any is.
    fn project(&self) -> Done<Option<Project>> {
        match &self.project {
            Some(dir) if !dir.is_dir() => {
                let problem = format!("--project {}: there is no such directory", dir.display());
                Err(Failure::new(problem, "give the directory of the project"))
            }
            Some(dir) => Ok(Some(Project::of(dir))),
            None => Ok((self.models.is_empty() && !self.no_project_context).then(here)),
        }
    }

    fn load(&self, entry: &Entry, device: &Device) -> Done<Generator> {
        let settings = GeneratorSettings {
            context: Some(entry.context),
            n_slots: self.parallel,
            n_waiting_max: self.queue,
            snapshot_bytes_max: self.snapshot_mib << 20,
            cache: self.cache_type,
            expert_bytes_max: self.expert_memory.map(|n_bytes| n_bytes as usize),
        };
        let path = |held: &Held| AdapterPath { path: held.path.clone(), scale: held.scale };
        let adapters = entry.adapters();
        let given = adapters.iter().flatten().filter(|held| !held.is_own);
        let adapters: Vec<AdapterPath> = given.map(path).collect();
        load_on(Model::open(&entry.path)?, device, &settings, &adapters)
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

    /// Loads the first model: what is served and where, for people and for programs.
    fn describe(
        &self,
        models: &Models,
        address: SocketAddr,
        project: Option<&Project>,
    ) -> Done<(String, Value)> {
        let list = models.list();
        let app = models.load(&list[0])?;
        let mut about = app.about();
        let has_fim = about["fim"] == true;
        let with = match about["adapters"].as_array().map_or(0, Vec::len) {
            0 => String::new(),
            n => format!(", {n} adapter{}", if n == 1 { "" } else { "s" }),
        };
        let others = match list.len() - 1 {
            0 => String::new(),
            n => format!(", {n} more model{}", if n == 1 { "" } else { "s" }),
        };
        let fim = if has_fim { "yes" } else { "no" };
        let project = project.filter(|_| has_fim).map(|project| &project.root);
        let shown = project.map_or(String::new(), |root| format!(", files of {}", root.display()));
        let (name, context) = (&list[0].name, list[0].context);
        let sentence = format!(
            "serve   http://{address}  {name}{with}{others}, {} slots, context {context}, \
             fill-in-the-middle: {fim}{shown}",
            self.parallel
        );
        about["url"] = json!(format!("http://{address}"));
        about["host"] = json!(address.ip().to_string());
        about["port"] = json!(address.port());
        about["project"] = json!(project);
        about["models"] = list.iter().map(|entry| entry.name.clone()).collect();
        Ok((sentence, about))
    }
}

/// The models in a directory that is none itself.
fn inside(path: &Path) -> Done<Option<Vec<PathBuf>>> {
    if !path.is_dir() || Model::open(run::usable(path)?).is_ok() {
        return Ok(None);
    }
    let is_model = |path: &PathBuf| {
        let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        ["gguf", "elapid"].contains(&ending) || path.join("config.json").is_file()
    };
    let children = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = children.map(|it| it.path()).filter(is_model).collect();
    found.sort();
    Ok((!found.is_empty()).then_some(found))
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
