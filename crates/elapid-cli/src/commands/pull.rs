//! `elapid pull`: a model of the Hugging Face hub into its cache.

use crate::hub::Name;
use crate::hub::cache::Cache;
use crate::hub::download::{Fetched, fetch};
use crate::report::text::bytes;
use crate::report::{Done, Failure, line};
use serde_json::json;
use std::process::ExitCode;

/// Download a model from the Hugging Face hub.
///
/// Afterwards its name is accepted wherever a model is: elapid chat owner/repo. Files go to the
/// cache that Python's tools use too; what is there is not downloaded again. Hashes are checked.
/// After Ctrl-C the same command resumes. Prints the path of the model.
///
/// No other command opens a connection.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid pull HuggingFaceTB/SmolLM2-135M\n  \
    elapid pull bartowski/SmolLM2-135M-Instruct-GGUF:SmolLM2-135M-Instruct-Q4_K_M.gguf\n  \
    elapid pull state-spaces/mamba-130m-hf@main\n\n\
    Environment:\n  \
    HF_TOKEN        token for gated and private models [default: that of `hf auth login`]\n  \
    HF_HUB_CACHE    cache directory [default: $HF_HOME/hub, ~/.cache/huggingface/hub]\n  \
    HF_ENDPOINT     another server with the same API\n  \
    HF_HUB_OFFLINE  1: as --offline\n  \
    HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE as elsewhere")]
pub struct Pull {
    /// owner/repo, owner/repo:file.gguf, either with @revision
    name: Name,
    /// Open no connection; fail if the model is not in the cache
    #[arg(long)]
    offline: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Pull {
    pub fn run(&self) -> Done<ExitCode> {
        let name = &self.name;
        let cache = Cache::of_user()?;
        if self.offline || is_offline() {
            let path = cache.find(name)?.ok_or_else(|| {
                let problem = format!("{name} is not in {}", cache.root.display());
                Failure::new(problem, "download it without --offline and HF_HUB_OFFLINE")
            })?;
            match self.json {
                true => line(json!({"name": name.to_string(), "path": path})),
                false => line(path.display()),
            }
            return Ok(ExitCode::SUCCESS);
        }
        let Fetched { path, commit, n_files, n_bytes } = fetch(&cache, name)?;
        if self.json {
            line(json!({
                "name": name.to_string(), "path": path, "commit": commit, "n_files": n_files,
                "bytes_downloaded": n_bytes,
            }));
        } else {
            let size = bytes(n_bytes as f64);
            eprintln!("done    {size} downloaded; use it as {name}: elapid generate {name}");
            line(path.display());
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// As Python's tools read it.
fn is_offline() -> bool {
    let value = std::env::var("HF_HUB_OFFLINE").unwrap_or_default().to_ascii_uppercase();
    ["1", "ON", "YES", "TRUE"].contains(&value.as_str())
}
