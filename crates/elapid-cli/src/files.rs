//! Model directories on disk: finds the files, maps them into memory, hands bytes to the engine.

use crate::report::{Done, Failure};
use elapid::config::Config;
use elapid::device::Device;
use elapid::formats::safetensors::SafeTensors;
use elapid::model::Model;
use elapid::tensor::SharedBytes;
use elapid::weights::Weights;
use memmap2::Mmap;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A whole text file.
pub fn read_text(path: &Path) -> Done<String> {
    std::fs::read_to_string(path).map_err(|error| cannot_read(path, &error))
}

fn cannot_read(path: &Path, error: &std::io::Error) -> Failure {
    let hint = "a model directory holds config.json and model.safetensors";
    Failure::new(format!("cannot read {}: {error}", path.display()), hint)
}

/// A file mapped into memory.
pub fn map(path: &Path) -> Done<SharedBytes> {
    let file = File::open(path).map_err(|error| cannot_read(path, &error))?;
    // SAFETY: the map is read-only and private. If another program shortens the file while it is
    // in use, reading past its new end stops the process: the price every memory-mapped reader
    // pays; nothing is written through it.
    let map = unsafe { Mmap::map(&file) };
    Ok(Arc::new(map.map_err(|error| cannot_read(path, &error))?))
}

/// An open safetensors file.
pub fn open_safetensors(path: &Path) -> Done<SafeTensors> {
    Ok(SafeTensors::parse(&path.display().to_string(), map(path)?)?)
}

/// The configuration of a directory.
pub fn read_config(dir: &Path) -> Done<Config> {
    let path = dir.join("config.json");
    Ok(Config::from_json(&path.display().to_string(), &read_text(&path)?)?)
}

/// `model.safetensors`, or the shards that `model.safetensors.index.json` lists.
pub fn weight_files(dir: &Path) -> Done<Vec<PathBuf>> {
    let index = dir.join("model.safetensors.index.json");
    let single = dir.join("model.safetensors");
    if single.exists() || !index.exists() {
        return Ok(vec![single]);
    }
    let wrong = |problem: String| {
        let hint = "the index is written by the tool that made the shards";
        Failure::new(format!("{}: {problem}", index.display()), hint)
    };
    let json: serde_json::Value = serde_json::from_str(&read_text(&index)?)
        .map_err(|error| wrong(format!("not JSON: {error}")))?;
    let map = json.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| wrong("there is no object `weight_map`".into()))?;
    let mut names = BTreeSet::new();
    for (tensor, file) in map {
        let file = file.as_str().ok_or_else(|| wrong(format!("`{tensor}` has no file name")))?;
        // A shard lies beside its index: a name with a path in it points elsewhere.
        if Path::new(file).components().count() != 1 || file.starts_with('.') {
            return Err(wrong(format!(
                "`{tensor}` is in {file:?}, which is not a plain file name"
            )));
        }
        names.insert(file);
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

/// Weights of a directory, where they are and as they are stored.
pub fn load_weights(device: &Device, model: &Model, dir: &Path) -> Done<Weights> {
    let files = weight_files(dir)?;
    let files = files.iter().map(|path| open_safetensors(path)).collect::<Done<Vec<_>>>()?;
    Ok(Weights::load(device, model.specs(), &files, &model.ignored_names())?)
}
