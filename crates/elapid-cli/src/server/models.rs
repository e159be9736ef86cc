//! The models of a server: which there are, which are loaded, what makes room for another.
//!
//! A request names a model or one of its adapters; what is not loaded is loaded then. Where it
//! would not fit into the memory that models may take, those that were not used for the longest
//! time are unloaded first, and where all are busy the request waits. A model with a request in
//! flight is never unloaded: handlers hold its `App`, jobs hold a token of its worker.
//!
//! Loads happen one after the other. One that fails is told to the request that wanted it, and
//! changes nothing else.

use super::error::{Answered, ApiError};
use super::{App, Named, Shared};
use crate::report::text::bytes;
use crate::report::{Done, Failure};
use axum::http::StatusCode;
use elapid::{Generator, LoadedAdapter, ModelInfo};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// How long a request waits for others to end, so that their model can make room for its own.
const ROOM_TIME: Duration = Duration::from_secs(60);
/// How often it is seen whether they have.
const ROOM_EVERY: Duration = Duration::from_millis(20);

/// How a model is loaded, with its adapters; any thread may call it.
pub type Load = Box<dyn Fn(&Entry) -> Done<Generator> + Send + Sync>;

/// An adapter of a model.
#[derive(Clone, Debug)]
pub struct Held {
    pub name: String,
    pub path: PathBuf,
    /// As it was trained or certified: how it acts where it is asked for by name.
    pub own: f32,
    /// How it acts where a request does not say.
    pub scale: f32,
    /// Whether the model was opened by it.
    pub is_own: bool,
}

/// A model that can be asked for.
pub struct Entry {
    pub name: String,
    pub path: PathBuf,
    pub info: ModelInfo,
    pub named: Named,
    /// Tokens of prompt and answer together.
    pub context: usize,
    /// By number; none where one was unloaded: numbers stay while the model is loaded.
    adapters: Mutex<Vec<Option<Held>>>,
    loaded: Mutex<Option<Arc<App>>>,
    used: Mutex<Instant>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Entry {
    pub fn new(
        name: String,
        path: PathBuf,
        (info, context): (ModelInfo, usize),
        (named, adapters): (Named, Vec<Held>),
    ) -> Entry {
        let adapters = Mutex::new(adapters.into_iter().map(Some).collect());
        let (loaded, used) = (Mutex::new(None), Mutex::new(Instant::now()));
        Entry { name, path, info, named, context, adapters, loaded, used }
    }

    /// Bytes of its weights, and of the state of one sequence as long as the context.
    pub fn n_bytes(&self) -> u64 {
        let info = &self.info;
        let weights: usize = info.dtype_bytes.values().sum();
        let state = info.state_bytes_per_token.saturating_mul(self.context);
        weights.saturating_add(info.state_bytes).saturating_add(state) as u64
    }

    pub fn adapters(&self) -> MutexGuard<'_, Vec<Option<Held>>> {
        locked(&self.adapters)
    }

    /// Its own name, and those of its adapters.
    pub fn names(&self) -> Vec<String> {
        let adapters = self.adapters();
        let of_adapters = adapters.iter().flatten().map(|held| held.name.clone());
        std::iter::once(self.name.clone()).chain(of_adapters).collect()
    }

    /// The model, if it is loaded.
    pub fn loaded(&self) -> Option<Arc<App>> {
        locked(&self.loaded).clone()
    }

    pub fn is_loaded(&self) -> bool {
        locked(&self.loaded).is_some()
    }

    pub fn idle_time(&self) -> Duration {
        locked(&self.used).elapsed()
    }

    fn touch(&self) {
        *locked(&self.used) = Instant::now();
    }

    fn take_up(&self) -> Option<Arc<App>> {
        self.touch();
        self.loaded()
    }

    /// The model, taken away from everybody, unless somebody has a request for it.
    fn take_idle(&self) -> Option<Arc<App>> {
        let mut loaded = locked(&self.loaded);
        let is_busy = |app: &Arc<App>| Arc::strong_count(app) > 1 || app.worker.is_busy();
        match &*loaded {
            Some(app) if !is_busy(app) => loaded.take(),
            _ => None,
        }
    }
}

/// All models of a server.
pub struct Models {
    pub shared: Arc<Shared>,
    /// The first answers where a request names none.
    list: RwLock<Vec<Arc<Entry>>>,
    load: Load,
    /// Held while a model is loaded.
    loading: tokio::sync::Mutex<()>,
}

impl Models {
    pub fn new(shared: Arc<Shared>, list: Vec<Entry>, load: Load) -> Models {
        let list = RwLock::new(list.into_iter().map(Arc::new).collect());
        Models { shared, list, load, loading: tokio::sync::Mutex::new(()) }
    }

    pub fn list(&self) -> Vec<Arc<Entry>> {
        self.list.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a model; `is_first` makes it the one that answers where a request names none.
    pub fn add(&self, entry: Entry, is_first: bool) {
        let mut list = self.list.write().unwrap_or_else(PoisonError::into_inner);
        let at = if is_first { 0 } else { list.len() };
        list.insert(at, Arc::new(entry));
    }

    /// The model of this name, or with an adapter of this name. No name, and one that is not known
    /// unless the server is strict, is the first model.
    pub fn find(&self, name: Option<&str>) -> Answered<Arc<Entry>> {
        let list = self.list();
        // Ollama's clients add a tag.
        let name = name.map(|name| name.strip_suffix(":latest").unwrap_or(name));
        let first = || list.first().cloned().ok_or_else(|| ApiError::internal("there is no model"));
        let Some(name) = name.filter(|name| !["", "default"].contains(name)) else {
            return first();
        };
        let has_adapter =
            |entry: &&Arc<Entry>| entry.adapters().iter().flatten().any(|it| it.name == name);
        let found = list.iter().find(|entry| entry.name == name);
        match found.or_else(|| list.iter().find(has_adapter)) {
            Some(entry) => Ok(entry.clone()),
            None if self.shared.settings.strict => Err(self.unknown(name)),
            None => first(),
        }
    }

    pub fn unknown(&self, name: &str) -> ApiError {
        let known = self.list().into_iter().flat_map(|entry| entry.names());
        let known: Vec<String> = known.map(|name| format!("`{name}`")).collect();
        let words = format!("unknown model `{name}`; this server has {}", known.join(", "));
        let (status, param) = (StatusCode::NOT_FOUND, Some("model".into()));
        ApiError { param, ..ApiError::new(status, words).with_code("model_not_found") }
    }

    /// The model of this name, loaded.
    pub async fn open(self: &Arc<Models>, name: Option<&str>) -> Answered<Arc<App>> {
        let entry = self.find(name)?;
        if let Some(app) = entry.take_up() {
            return Ok(app);
        }
        // A task of its own: a client that goes away does not end a load halfway.
        let models = self.clone();
        let loading = tokio::spawn(async move {
            let one = models.clone();
            let _turn = one.loading.lock().await;
            if let Some(app) = entry.take_up() {
                return Ok(app);
            }
            models.make_room(&entry).await?;
            let loaded = tokio::task::spawn_blocking(move || {
                models.load(&entry).map_err(|Failure { problem, hint }| {
                    eprintln!("fail    {}: {problem}", entry.name);
                    let words = format!("`{}` cannot be loaded: {problem}; {hint}", entry.name);
                    ApiError::internal(words).with_code("load_failed")
                })
            });
            loaded.await.map_err(panicked)?
        });
        loading.await.map_err(panicked)?
    }

    /// Loads a model that is not.
    pub fn load(&self, entry: &Arc<Entry>) -> Done<Arc<App>> {
        entry.adapters().retain(Option::is_some);
        let begin = Instant::now();
        let generator = (self.load)(entry)?;
        let mut adapters = entry.adapters();
        let were = std::mem::take(&mut *adapters);
        // The one that the model was opened by comes first, and is not known before.
        let n = generator.adapters.len();
        let n_own = n - were.iter().flatten().filter(|held| !held.is_own).count();
        let held = |(idx, it): (usize, &LoadedAdapter)| {
            let was = (idx + were.len()).checked_sub(n).and_then(|at| were[at].as_ref());
            let (own, scale) = was.map_or((it.scale, it.scale), |held| (held.own, held.scale));
            let (name, path) = (it.name.clone(), it.path.clone());
            Some(Held { name, path, own, scale, is_own: idx < n_own })
        };
        *adapters = generator.adapters.iter().enumerate().map(held).collect();
        drop(adapters);
        let app = App::new(generator, entry.clone(), self.shared.clone());
        let no_thread =
            |error: std::io::Error| Failure::new(error, "look at the limits of the shell");
        let app = Arc::new(app.map_err(no_thread)?);
        if self.list().len() > 1 {
            eprintln!("load    {} in {} ms", entry.name, begin.elapsed().as_millis());
        }
        *locked(&entry.loaded) = Some(app.clone());
        entry.touch();
        Ok(app)
    }

    /// Unloads models until this one fits.
    async fn make_room(&self, entry: &Entry) -> Answered<()> {
        let Some(memory) = self.shared.settings.memory else { return Ok(()) };
        let begin = Instant::now();
        loop {
            let mut loaded: Vec<_> =
                self.list().into_iter().filter(|entry| entry.is_loaded()).collect();
            let n_held: u64 = loaded.iter().map(|entry| entry.n_bytes()).sum();
            if n_held + entry.n_bytes() <= memory {
                return Ok(());
            }
            loaded.sort_by_key(|entry| std::cmp::Reverse(entry.idle_time()));
            if let Some((app, old)) = loaded.iter().find_map(|it| Some((it.take_idle()?, it))) {
                unload(app, old).await;
            } else if begin.elapsed() > ROOM_TIME.min(self.shared.settings.time_max) {
                let words = format!(
                    "`{}` needs {}, and models that are busy leave less of --memory {}; try again",
                    entry.name,
                    bytes(entry.n_bytes() as f64),
                    bytes(memory as f64),
                );
                return Err(ApiError::unavailable(words).with_code("no_room"));
            } else {
                tokio::time::sleep(ROOM_EVERY).await;
            }
        }
    }

    /// Unloads what was not used for so long.
    pub async fn unload_idle(&self, idle: Duration) {
        for entry in self.list() {
            if entry.loaded().is_some_and(|app| app.worker.is_busy()) {
                entry.touch();
            } else if entry.idle_time() >= idle
                && let Some(app) = entry.take_idle()
            {
                unload(app, &entry).await;
            }
        }
    }

    /// Ends all engines; whatever still runs is cut off.
    pub fn stop(&self) {
        for app in self.list().iter().filter_map(|entry| locked(&entry.loaded).take()) {
            app.worker.stop();
        }
    }
}

/// Ends the engine of a model that nobody has any more, and waits until its memory is free.
async fn unload(app: Arc<App>, entry: &Entry) {
    // One that panicked has said so on stderr.
    let _ = tokio::task::spawn_blocking(move || app.worker.stop()).await;
    eprintln!("unload  {}", entry.name);
}

fn panicked(_: tokio::task::JoinError) -> ApiError {
    ApiError::internal("the load of the model failed")
}
