//! Models, tokenizers and adapters by their paths.

use super::checkpoint::{Checkpoint, TEXTS};
use crate::error::{Error, Result};
use crate::files::disk::{self, exists, is_directory, is_file, map};
use crate::files::package::{self, Package, Unchecked};
use crate::files::safetensors::SafeTensors;
use crate::files::{Apart, extension};
use crate::tensor::SharedBytes;
use crate::text::tokenizer::Tokenizer;
use crate::text::vocab;
use serde_json::Value;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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
        if is_directory(path) {
            // The directory of a run holds the model that it trained.
            if is_directory(&path.join("checkpoints")) && is_directory(&path.join("model")) {
                return Checkpoint::open(path.join("model"));
            }
            if let Some(base) = base_of(path)? {
                return Ok(Checkpoint::open(base)?.with_adapter(path));
            }
            let (mut opened, mut unchecked) = (BTreeMap::new(), Vec::new());
            if exists(&path.join(package::MANIFEST)) {
                (opened, unchecked) = check_directory(path)?;
            }
            let opened = RefCell::new(opened);
            let checkpoint = Checkpoint::from_files(&name, &|file| {
                let mut opened = opened.borrow_mut();
                if !opened.contains_key(file)
                    && let Some(source) = disk::find(path, file)?
                {
                    opened.insert(file.to_string(), source);
                }
                Ok(opened.get(file).map(|source| source.whole.clone()))
            })?;
            let is_weights = |(name, _): &(String, Apart)| !TEXTS.contains(&name.as_str());
            let sources = opened.into_inner().into_iter().filter(is_weights);
            return Ok(checkpoint.lies_in(sources.map(|it| it.1).collect(), unchecked));
        }
        let source = disk::open(path)?;
        let bytes = source.whole.clone();
        let extension = extension(path);
        if is_package(&bytes) || extension == "elapid" {
            let package = Package::parse(&name, bytes)?;
            package.verify_rest()?;
            let checkpoint = Checkpoint::from_files(&name, &|file| Ok(package.get(file)))?;
            return Ok(checkpoint.lies_in(vec![source], package.unchecked()));
        }
        if extension == "safetensors" {
            let problem = format!("{name} holds weights alone");
            return Err(Error::input(problem, "give the directory with its config.json"));
        }
        Ok(Checkpoint::from_gguf(&name, bytes)?.lies_in(vec![source], Vec::new()))
    }

    /// The same with the files that its weights lie in, and those of them that are to be verified.
    fn lies_in(mut self, sources: Vec<Apart>, unchecked: Vec<Unchecked>) -> Checkpoint {
        (self.sources, self.unchecked) = (Arc::new(sources), unchecked);
        self
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
        let json: Value = serde_json::from_str(&disk::read_text(&path).ok()?).ok()?;
        json.pointer(pointer)?.as_str().map(PathBuf::from)
    };
    let of_run = dir.join("adapter");
    let adapter = if is_directory(&of_run) { &of_run } else { dir };
    if exists(&dir.join("model.safetensors")) || !exists(&adapter.join("adapter_config.json")) {
        return Ok(None);
    }
    let run = read(dir.join("config.json"), "/origin/base/model");
    let named = read(adapter.join("adapter_config.json"), "/base_model_name_or_path");
    let beside = named.as_ref().map(|name| adapter.join(name));
    let mut candidates = [run, beside, named].into_iter().flatten();
    candidates.find(|path| exists(path)).map(Some).ok_or_else(|| {
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
        let found = if is_directory(path) {
            vocab::from_files(&name, "tokenizer.json", &|file| found(path, file))?
        } else if extension(path) == "json" {
            map(path)?;
            let dir = path.parent().unwrap_or(Path::new(""));
            let file = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let main = if file == "vocab.json" { "tokenizer.json" } else { file };
            // Files beside it may name its special tokens.
            vocab::from_files(&dir.display().to_string(), main, &|name| found(dir, name))?
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

fn found(dir: &Path, name: &str) -> Result<Option<SharedBytes>> {
    Ok(disk::find(dir, name)?.map(|source| source.whole))
}

/// Every file of a package directory against its manifest, but for units; all of its files, and
/// those that have units.
fn check_directory(dir: &Path) -> Result<(BTreeMap<String, Apart>, Vec<Unchecked>)> {
    let mut files = BTreeMap::new();
    for path in disk::list(dir)? {
        let name = path.file_name().and_then(|name| name.to_str());
        if let Some(name) = name.filter(|_| is_file(&path)) {
            files.insert(name.to_string(), disk::open(&path)?);
        }
    }
    let bytes = |(name, source): (&String, &Apart)| (name.clone(), source.whole.clone());
    let list: Vec<_> = files.iter().map(bytes).collect();
    let unchecked = package::check_directory(&dir.display().to_string(), &list)?;
    Ok((files, unchecked))
}
