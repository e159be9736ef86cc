//! What `elapid adapt` and `elapid train` make while the server runs (`serve --watch DIR`).
//!
//! A directory is looked at every second. A run of `elapid adapt` counts once its certificate is
//! there, one of `elapid train` once its adapter is. An adapter whose base is served is loaded onto
//! it; a whole model, or an adapter on another base, becomes a model that is loaded when it is
//! asked for. In a server that was started with no model, a run that made its project's model
//! better answers from then on where a request names no model.

use super::Named;
use super::error::{Answered, ApiError};
use super::models::{Entry, Models};
use crate::project::{FOLDER, Loadable, Project};
use crate::report::Done;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const EVERY: Duration = Duration::from_secs(1);

/// How a model that was found becomes one of the server.
pub type Make = Box<dyn Fn(&Loadable, String) -> Done<Entry> + Send + Sync>;

/// A directory that is watched.
pub struct Watched {
    dir: PathBuf,
    /// Whether what is better answers where no model is named.
    takes_over: bool,
    seen: HashSet<PathBuf>,
    make: Make,
}

/// A run that is finished.
struct Found {
    dir: PathBuf,
    name: String,
    is_better: bool,
    load: Done<Result<Loadable, String>>,
}

impl Watched {
    /// What is there already is not new.
    pub fn new(dir: &Path, takes_over: bool, make: Make) -> Watched {
        let dir = dir.canonicalize().unwrap_or(dir.into());
        let mut watched = Watched { dir, takes_over, seen: HashSet::new(), make };
        watched.seen = watched.runs(None).into_iter().map(|found| found.dir).collect();
        watched
    }

    /// Looks until the server ends.
    pub async fn follow(mut self, models: Arc<Models>) {
        loop {
            tokio::time::sleep(EVERY).await;
            let first = models.list().first().map(|entry| entry.path.clone());
            let runs = tokio::task::block_in_place(|| self.runs(first.as_deref()));
            for found in runs {
                if self.seen.insert(found.dir.clone()) {
                    let place = found.dir.display().to_string();
                    match self.add(&models, found).await {
                        Ok(name) => eprintln!("new     {name}: {place}"),
                        Err(error) => eprintln!("note    {place}: {}", error.message),
                    }
                }
            }
        }
    }

    /// All runs that are finished; `base` is that of runs that name none.
    fn runs(&self, base: Option<&Path>) -> Vec<Found> {
        let of_project = self.dir.ends_with(Path::new(FOLDER).join("adapt"));
        let root = if of_project { self.dir.ancestors().nth(2) } else { None };
        let project = Project { root: root.unwrap_or(&self.dir).into() };
        let finished = project.runs().into_iter().filter(|run| run.certificate.is_some());
        let mut runs: Vec<Found> = finished
            .map(|run| Found {
                name: format!("{}-{}", project.name(), run.number),
                is_better: run.is_better(),
                load: run.loadable(),
                dir: run.dir,
            })
            .collect();
        let children = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        for dir in children.map(|child| child.path()).filter(|_| !of_project) {
            let adapter = dir.join("adapter");
            if adapter.join("adapter_config.json").is_file() {
                let model = base.map(PathBuf::from).unwrap_or_default();
                let load = Ok(Ok(Loadable { model, adapter: Some((adapter, 1.0)) }));
                runs.push(Found { name: String::new(), is_better: false, load, dir });
            }
        }
        runs
    }

    /// Adds a run to the models; its name there.
    async fn add(&self, models: &Arc<Models>, found: Found) -> Answered<String> {
        let failed = |error: String| ApiError::internal(error.lines().next().unwrap_or_default());
        let load = found.load.map_err(|failure| failed(failure.to_string()))?.map_err(failed)?;
        let full = |path: &Path| path.canonicalize().unwrap_or(path.into());
        let is_base = |entry: &&Arc<Entry>| full(&entry.path) == full(&load.model);
        let list = models.list();
        if let (Some((path, own)), Some(entry)) = (&load.adapter, list.iter().find(is_base)) {
            let app = models.open(Some(&entry.name)).await?;
            let acts = self.takes_over && found.is_better && entry.named == Named::WithAdapters;
            if acts {
                entry.adapters().iter_mut().flatten().for_each(|held| held.scale = 0.0);
            }
            return app.load_adapter(path.clone(), *own, if acts { *own } else { 0.0 }).await;
        }
        let made = (self.make)(&load, found.name.clone());
        let entry = made.map_err(|failure| failed(failure.to_string()))?;
        models.add(entry, self.takes_over && found.is_better);
        Ok(found.name)
    }
}
