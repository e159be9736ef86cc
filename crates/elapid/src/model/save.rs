//! Writes a model to disk: a Hugging Face directory, a GGUF file, or a package.

use super::checkpoint::{Checkpoint, GGUF_FILE, TEXTS};
use super::export::{Content, Export, Mix, OutFile};
use super::weights::Weights;
use crate::error::{Error, Result};
use crate::files::package::{self, Parts};
use crate::files::{Outgoing, Sink, disk, extension};
use crate::tensor::DType;
use std::collections::BTreeMap;
use std::path::Path;

/// What a model is written as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// One GGUF file, for llama.cpp.
    Gguf,
    /// A directory for transformers: `config.json`, `model.safetensors`, tokenizer.
    Directory,
    /// Our package: all files with their hashes, in one `.elapid` file or in a directory.
    Package,
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Form::Gguf => "gguf",
            Form::Directory => "hf",
            Form::Package => "package",
        })
    }
}

/// What the name of a path says: `.gguf`, `.elapid`, anything else is a directory.
impl From<&Path> for Form {
    fn from(path: &Path) -> Form {
        match extension(path).as_str() {
            "gguf" => Form::Gguf,
            "elapid" => Form::Package,
            _ => Form::Directory,
        }
    }
}

/// Bytes of weights by the name of their dtype.
pub fn dtype_bytes(weights: &Weights) -> BTreeMap<&'static str, usize> {
    let mut by_name = BTreeMap::new();
    for id in weights.ids() {
        let tensor = weights.tensor(id);
        *by_name.entry(tensor.dtype().name()).or_default() += tensor.n_bytes();
    }
    by_name
}

pub fn has_blocks(weights: &Weights) -> bool {
    weights.ids().any(|id| matches!(weights.tensor(id).dtype(), DType::Block(_)))
}

/// Where and how to write; `on_bytes` hears of bytes written and of all there will be, about.
pub struct Save<'a> {
    pub path: &'a Path,
    pub form: Form,
    /// How matrices are stored; as they are where there is none.
    pub mix: Option<Mix>,
    pub on_bytes: &'a mut (dyn FnMut(u64, u64) + Send),
}

impl Save<'_> {
    /// Writes the model; the bytes written.
    pub fn write(&mut self, checkpoint: &Checkpoint, weights: &Weights) -> Result<u64> {
        match self.form {
            Form::Directory => {
                let export = Export::directory(checkpoint, weights);
                let list = export.directory_files(self.plain()?)?;
                self.write_directory(&list, None)
            }
            Form::Gguf => {
                let export = Export::gguf(checkpoint, weights)?;
                let content = export.gguf_content(self.mix)?;
                let out = OutFile { name: String::new(), content };
                let (path, mut progress) = (self.path, Progress::new(self, content_bytes(&out)));
                disk::write(path, |sink| out.write(&mut progress.through(sink)))
            }
            Form::Package => {
                let keeps_blocks = self.mix.is_none() && has_blocks(weights);
                let plain = self.plain().ok().filter(|_| !keeps_blocks);
                let export = match plain {
                    Some(_) => Export::directory(checkpoint, weights),
                    None => Export::gguf(checkpoint, weights)?,
                };
                let mut list = match plain {
                    Some(dtype) => export.directory_files(dtype)?,
                    None => export.package_files(self.mix)?,
                };
                if !list.iter().any(|out| out.name == CARD) {
                    let content = Content::Bytes(card(checkpoint, weights).into_bytes());
                    list.insert(0, OutFile { name: CARD.into(), content });
                }
                let experts = list.iter().map(|out| export.experts(out));
                let experts = experts.collect::<Result<Vec<Parts>>>()?;
                self.write_package(checkpoint.name(), &list, &experts)
            }
        }
    }

    /// Matrices in a directory: one of three dtypes.
    fn plain(&self) -> Result<Option<DType>> {
        let Some(mix) = self.mix else { return Ok(None) };
        let dtypes = [DType::F32, DType::F16, DType::BF16];
        dtypes.into_iter().find(|dtype| dtype.name() == mix.name()).map(Some).ok_or_else(|| {
            let hint = "use f32, f16 or bf16, or write a .gguf or .elapid file";
            Error::input(format!("a directory cannot hold {}", mix.name()), hint)
        })
    }

    fn write_package(&mut self, name: &str, list: &[OutFile], experts: &[Parts]) -> Result<u64> {
        if self.is_directory() {
            return self.write_directory(list, Some((name, experts)));
        }
        let total = list.iter().map(content_bytes).sum();
        let mut entries: Vec<(String, package::OutFile)> = Vec::new();
        for out in list {
            entries.push((out.name.clone(), Box::new(move |sink| out.write(sink))));
        }
        let (path, mut progress) = (self.path, Progress::new(self, total));
        disk::write(path, |sink| {
            package::write_parts(name, &entries, experts, &mut progress.through(sink))
        })
    }

    /// Whether the output is a directory: a package is one where its name does not end in .elapid.
    pub fn is_directory(&self) -> bool {
        let is_file = extension(self.path) == "elapid";
        self.form == Form::Directory || (self.form == Form::Package && !is_file)
    }

    /// With a name, and the experts of each file, the directory becomes a package.
    fn write_directory(
        &mut self,
        list: &[OutFile],
        package: Option<(&str, &[Parts])>,
    ) -> Result<u64> {
        let dir = self.path;
        disk::make_directory(dir)?;
        let mut progress = Progress::new(self, list.iter().map(content_bytes).sum());
        let mut n_bytes = 0;
        for out in list {
            let path = dir.join(&out.name);
            n_bytes += disk::write(&path, |sink| out.write(&mut progress.through(sink)))?;
        }
        // Not before: the model that is converted may lie in the same directory.
        remove_others(dir, list)?;
        if let Some((name, experts)) = package {
            let map = |out: &OutFile| disk::map(&dir.join(&out.name));
            let bytes = list.iter().map(map).collect::<Result<Vec<_>>>()?;
            let names = list.iter().map(|out| out.name.as_str());
            let all: Vec<(&str, &[u8])> = names.zip(bytes.iter().map(|b| (**b).as_ref())).collect();
            let [manifest, hash] = package::manifest_of_directory(name, &all, experts)?;
            for (name, bytes) in [(package::MANIFEST, manifest), (package::MANIFEST_HASH, hash)] {
                n_bytes += disk::write(&dir.join(name), |sink| sink(&bytes))?;
            }
        }
        Ok(n_bytes)
    }
}

/// Removes files of the model that was there before, which the new one does not have.
fn remove_others(dir: &Path, list: &[OutFile]) -> Result<()> {
    let stays = |name: &str| list.iter().any(|out| out.name == name);
    let is_ours = |name: &str| {
        TEXTS.contains(&name)
            || ["config.json", GGUF_FILE, package::MANIFEST, package::MANIFEST_HASH].contains(&name)
            || (name.starts_with("model") && name.contains(".safetensors"))
    };
    for path in disk::list(dir).unwrap_or_default() {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if is_ours(name) && !stays(name) {
            disk::remove(&path)?;
        }
    }
    Ok(())
}

/// Counts bytes on their way to a file.
struct Progress<'a> {
    on_bytes: &'a mut (dyn FnMut(u64, u64) + Send),
    n_done: u64,
    n_all: u64,
}

impl<'a> Progress<'a> {
    fn new(save: &'a mut Save, n_all: u64) -> Progress<'a> {
        Progress { on_bytes: save.on_bytes, n_done: 0, n_all }
    }

    fn through<'b>(&'b mut self, sink: &'b mut Sink) -> impl FnMut(&[u8]) -> Result<()> + 'b {
        move |bytes| {
            self.n_done += bytes.len() as u64;
            (self.on_bytes)(self.n_done, self.n_all.max(self.n_done));
            sink(bytes)
        }
    }
}

/// Bytes that will be written, about: for the progress alone.
fn content_bytes(out: &OutFile) -> u64 {
    let n_bytes = |t: &Outgoing| t.dtype.n_bytes(t.shape.iter().product());
    match &out.content {
        Content::Bytes(bytes) => bytes.len() as u64,
        Content::SafeTensors(tensors) | Content::Gguf(_, tensors) => {
            tensors.iter().filter_map(n_bytes).sum::<usize>() as u64
        }
    }
}

const CARD: &str = "README.md";

/// A card for a model that came without one: what is known for certain.
fn card(checkpoint: &Checkpoint, weights: &Weights) -> String {
    let config = checkpoint.model().config();
    let dtypes: Vec<&str> = dtype_bytes(weights).into_keys().collect();
    let context = config.n_ctx.map_or("not known".into(), |n| format!("{n} tokens"));
    format!(
        "# {}\n\nA {} model of {} layers.\n\n| | |\n|---|---|\n| parameters | {} |\n\
         | width | {} |\n| vocabulary | {} |\n| stored as | {} |\n| context | {context} |\n\n\
         Training data, intended use and licence are for its author to state here.\n",
        checkpoint.name(),
        config.family,
        config.layers.len(),
        weights.n_elem(),
        config.d_model,
        config.n_vocab,
        dtypes.join(", "),
    )
}
