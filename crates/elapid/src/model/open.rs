//! Models, tokenizers and adapters by their paths.

use super::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::files::disk::{self, find, map};
use crate::files::package::{self, Package};
use crate::files::safetensors::SafeTensors;
use crate::tensor::SharedBytes;
use crate::text::tokenizer::Tokenizer;
use crate::text::vocab;
use serde_json::Value;
use std::path::{Path, PathBuf};

pub fn safetensors(path: &Path) -> Result<SafeTensors> {
    SafeTensors::parse(&path.display().to_string(), map(path)?)
}

fn is_package(bytes: &SharedBytes) -> bool {
    (**bytes).as_ref().starts_with(b"ELAPID")
}

impl Checkpoint {
    /// Opens a model: a `.gguf` file, an `.elapid` package, a directory with `config.json` and
    /// `model.safetensors` or `pytorch_model.bin`, the directory of a training run, or an adapter
    /// that names its base.
    ///
    /// Files are mapped into memory; nothing is copied before it is needed.
    pub fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
        let path = path.as_ref();
        let name = path.display().to_string();
        if path.is_dir() {
            // The directory of a run holds the model that it trained.
            if path.join("checkpoints").is_dir() && path.join("model").is_dir() {
                return Checkpoint::open(path.join("model"));
            }
            if let Some(base) = base_of(path)? {
                return Ok(Checkpoint::open(base)?.with_adapter(path));
            }
            if path.join(package::MANIFEST).exists() {
                check_directory(path)?;
            }
            return Checkpoint::from_files(&name, &|file| find(path, file));
        }
        let bytes = map(path)?;
        let extension = disk::extension(path);
        if is_package(&bytes) || extension == "elapid" {
            let package = Package::parse(&name, bytes)?;
            package.verify()?;
            return Checkpoint::from_files(&name, &|file| Ok(package.get(file)));
        }
        if extension == "safetensors" {
            let problem = format!("{name} holds weights alone");
            return Err(Error::input(problem, "give the directory with its config.json"));
        }
        Checkpoint::from_gguf(&name, bytes)
    }

    /// The same model with the adapter at `path` on it, in sessions and generators.
    pub fn with_adapter(mut self, path: impl AsRef<Path>) -> Checkpoint {
        self.adapter = Some(path.as_ref().into());
        self
    }

    /// The adapter that it was opened by: `open` then gave its base model.
    pub(crate) fn adapter_path(&self) -> Option<&Path> {
        self.adapter.as_deref()
    }
}

/// The base model of the adapter in a directory: what its run trained it on, or what its config
/// names, beside it or as a path.
fn base_of(dir: &Path) -> Result<Option<PathBuf>> {
    let read = |path: PathBuf, pointer: &str| -> Option<PathBuf> {
        let json: Value = serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()?;
        json.pointer(pointer)?.as_str().map(PathBuf::from)
    };
    let of_run = dir.join("adapter");
    let adapter = if of_run.is_dir() { &of_run } else { dir };
    if dir.join("model.safetensors").exists() || !adapter.join("adapter_config.json").exists() {
        return Ok(None);
    }
    let run = read(dir.join("config.json"), "/origin/base/model");
    let named = read(adapter.join("adapter_config.json"), "/base_model_name_or_path");
    let beside = named.as_ref().map(|name| adapter.join(name));
    let mut candidates = [run, beside, named].into_iter().flatten();
    candidates.find(|path| path.exists()).map(Some).ok_or_else(|| {
        let problem = format!("the base model of {} is not there", dir.display());
        Error::input(problem, "open the base model, and add the adapter to it")
    })
}

impl Tokenizer {
    /// Opens a tokenizer: a `tokenizer.json`, a `vocab.json` with its `merges.txt`, or that of a
    /// model.
    pub fn open(path: impl AsRef<Path>) -> Result<Tokenizer> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let found = if path.is_dir() {
            vocab::from_files(&name, "tokenizer.json", &|file| find(path, file))?
        } else if disk::extension(path) == "json" {
            map(path)?;
            let dir = path.parent().unwrap_or(Path::new(""));
            let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let main = if file == "vocab.json" { "tokenizer.json" } else { file };
            // Files beside it may name its special tokens.
            vocab::from_files(&dir.display().to_string(), main, &|name| find(dir, name))?
        } else {
            let bytes = map(path)?;
            match is_package(&bytes) {
                true => Checkpoint::open(path)?.tokenizer()?,
                false => vocab::from_gguf_file(&name, bytes)?,
            }
        };
        found.ok_or_else(|| {
            let hint =
                "a tokenizer is a tokenizer.json, vocab.json with merges.txt, or inside a .gguf";
            Error::input(format!("{name} holds no tokenizer"), hint)
        })
    }
}

/// Every file of a package directory against its manifest.
fn check_directory(dir: &Path) -> Result<()> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|error| Error::read(dir, error))? {
        let path = entry.map_err(|error| Error::read(dir, error))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some(name) = name.filter(|_| path.is_file()) {
            files.push((name.to_string(), map(&path)?));
        }
    }
    let list: Vec<(&str, &[u8])> =
        files.iter().map(|(name, bytes)| (name.as_str(), (**bytes).as_ref())).collect();
    package::check_directory(&dir.display().to_string(), &list)
}
