//! Models, tokenizers and adapters by their paths.

use super::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::files::disk::{find, map};
use crate::files::package::{self, Package};
use crate::files::safetensors::SafeTensors;
use crate::tensor::SharedBytes;
use crate::text::tokenizer::Tokenizer;
use crate::text::vocab;
use std::path::Path;

/// An open safetensors file.
pub fn safetensors(path: &Path) -> Result<SafeTensors> {
    SafeTensors::parse(&path.display().to_string(), map(path)?)
}

fn is_package(bytes: &SharedBytes) -> bool {
    (**bytes).as_ref().starts_with(b"ELAPID")
}

impl Checkpoint {
    /// Opens a model: a `.gguf` file, an `.elapid` package, a directory with `config.json` and
    /// `model.safetensors`, or the directory of a training run.
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
            if path.join(package::MANIFEST).exists() {
                check_directory(path)?;
            }
            return Checkpoint::from_files(&name, &|file| find(path, file));
        }
        let bytes = map(path)?;
        let extension = path.extension().and_then(|extension| extension.to_str());
        if is_package(&bytes) || extension == Some("elapid") {
            let package = Package::parse(&name, bytes)?;
            package.verify()?;
            return Checkpoint::from_files(&name, &|file| Ok(package.get(file)));
        }
        if extension == Some("safetensors") {
            let problem = format!("{name} holds weights alone");
            return Err(Error::input(problem, "give the directory with its config.json"));
        }
        Checkpoint::from_gguf(&name, bytes)
    }
}

impl Tokenizer {
    /// Opens a tokenizer: a `tokenizer.json`, a `vocab.json` with its `merges.txt`, or that of a
    /// model.
    pub fn open(path: impl AsRef<Path>) -> Result<Tokenizer> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let extension = path.extension().and_then(|extension| extension.to_str());
        let found = if path.is_dir() {
            vocab::from_files(&name, "tokenizer.json", &|file| find(path, file))?
        } else if extension == Some("json") {
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
