//! `elapid rm`: removes a pulled model.

use crate::hub::Name;
use crate::hub::cache::Cache;
use crate::report::text::bytes;
use crate::report::{Done, line};
use serde_json::json;
use std::process::ExitCode;

/// Remove a pulled model from the cache, without asking.
///
/// The cache is shared with Python's tools: the model is gone for them too. owner/repo removes all
/// revisions and files, owner/repo@revision one revision, owner/repo:file.gguf one file. Contents
/// that another revision shares stay.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid rm HuggingFaceTB/SmolLM2-135M\n  \
    elapid rm owner/repo:model-q8_0.gguf")]
pub struct Rm {
    /// The name, as `elapid list` shows it
    name: Name,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Rm {
    pub fn run(&self) -> Done<ExitCode> {
        let name = &self.name;
        let cache = Cache::of_user()?;
        let n_bytes = cache.remove(name)?;
        match self.json {
            true => line(json!({"name": name.to_string(), "bytes_freed": n_bytes})),
            false => line(format!("removed {name}, {} freed", bytes(n_bytes as f64))),
        }
        Ok(ExitCode::SUCCESS)
    }
}
