//! The commands, one file each: its flags, its help, what it does. Here is what those share that
//! can be given no model: which one they take.

pub mod adapt;
pub mod bench;
pub mod chat;
pub mod check;
pub mod complete;
pub mod convert;
pub mod doctor;
pub mod eval;
pub mod generate;
pub mod info;
pub mod kernels;
pub mod limbic;
pub mod list;
pub mod lsp;
pub mod manual;
#[cfg(feature = "pull")]
pub mod pull;
pub mod rm;
pub mod serve;
pub mod tokenize;
pub mod train;
pub mod train_tokenizer;
pub mod verify;
pub mod watch;

use crate::project::{self, Choice, Loadable, Project};
use crate::report::Done;
use crate::run;
use crate::talk::flags::AdapterPath;
use std::path::{Path, PathBuf};

/// The project of the current directory.
fn here() -> Project {
    Project::of(Path::new("."))
}

/// What a command loads.
struct Chosen {
    model: PathBuf,
    adapters: Vec<AdapterPath>,
    /// What it is and why, where no model was given.
    why: Option<String>,
}

impl Chosen {
    /// The model that was given; else the newest adapter of the project with its base, else the
    /// shipped model. Adapters that were given take the place of the project's.
    fn new(model: Option<&Path>, given: &[AdapterPath], project: &Project) -> Done<Chosen> {
        let Choice { load, why } = match model {
            Some(model) => {
                let model = run::usable(model)?;
                return Ok(Chosen { model, adapters: given.to_vec(), why: None });
            }
            None if given.is_empty() => project::choose(project)?,
            None => project::shipped("no model was given to put the adapter on")?,
        };
        let Loadable { model, adapter } = load;
        let own = adapter.map(|(path, scale)| AdapterPath { path, scale });
        let adapters = own.into_iter().chain(given.iter().cloned()).collect();
        Ok(Chosen { model, adapters, why: Some(why) })
    }

    fn say(&self) {
        if let Some(why) = &self.why {
            eprintln!("model   {why}");
        }
    }
}
