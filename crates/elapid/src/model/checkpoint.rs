//! A model as it was found: a directory or package of files, or one GGUF file.
//!
//! Whatever it was, here it is the same: a config.json, a model, places of parameters, a tokenizer,
//! a chat template and the small files that belong to it. Files are asked for by plain names, so
//! that a directory, a package and a web page can all answer.

use crate::error::{Error, Result};
use crate::files::gguf::Gguf;
use crate::files::package::Unchecked;
use crate::files::safetensors::SafeTensors;
use crate::files::{Apart, Lookup, TensorFile, torch};
use crate::model::Model;
#[cfg(feature = "fs")]
use crate::model::adapter::Adapter;
use crate::model::config::Config;
use crate::model::config::gguf as gguf_config;
use crate::model::lora::Lora;
use crate::model::pages::Paging;
use crate::model::params;
use crate::model::place::Place;
use crate::model::weights::Weights;
use crate::tensor::SharedBytes;
use crate::tensor::device::Device;
use crate::text::tokenizer::Tokenizer;
use crate::text::vocab;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

/// Name of a GGUF file inside a package.
pub const GGUF_FILE: &str = "model.gguf";

/// Small files that travel with a model as they are.
pub const TEXTS: &[&str] = &[
    "README.md",
    "LICENSE",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
];

/// An open model; its weights are not read yet.
pub struct Checkpoint {
    name: String,
    dir: String,
    config_json: String,
    model: Model,
    places: Vec<Place>,
    container: Container,
    texts: BTreeMap<String, SharedBytes>,
    /// The files that its weights lie in, where they were opened by paths.
    pub(super) sources: Arc<Vec<Apart>>,
    /// Files with experts that are verified when they are loaded.
    pub(super) unchecked: Vec<Unchecked>,
    is_checked: OnceLock<()>,
    /// Where it was opened by the path of an adapter.
    #[cfg(feature = "fs")]
    pub(super) adapter: Option<std::path::PathBuf>,
}

enum Container {
    SafeTensors(Vec<SafeTensors>),
    Gguf(Box<Gguf>),
}

fn text<'a>(file: &str, bytes: &'a SharedBytes) -> Result<&'a str> {
    std::str::from_utf8((**bytes).as_ref()).map_err(|error| {
        let hint = "the file may be damaged, or of another kind";
        Error::format(file, format!("is not UTF-8: {error}"), hint)
    })
}

impl Checkpoint {
    /// A GGUF file; `file` is its name for messages.
    pub fn from_gguf(file: &str, bytes: SharedBytes) -> Result<Checkpoint> {
        let gguf = Gguf::parse(file, bytes)?;
        let (arch, config, json) = gguf_config::read(&gguf)?;
        check_parts(file, &config, gguf.tensors().iter().map(|entry| &entry.shape[..]))?;
        let model = Model::new(config);
        let places = gguf_config::names(model.config(), arch, model.specs())?.places;
        let name = gguf.str("general.name")?.unwrap_or(file).to_string();
        let container = Container::Gguf(Box::new(gguf));
        Ok(Checkpoint { places, dir: file.into(), ..Checkpoint::of(name, json, model, container) })
    }

    fn of(name: String, config_json: String, model: Model, container: Container) -> Checkpoint {
        Checkpoint {
            dir: name.clone(),
            name,
            config_json,
            places: model.places(),
            model,
            container,
            texts: BTreeMap::new(),
            sources: Arc::default(),
            unchecked: Vec::new(),
            is_checked: OnceLock::new(),
            #[cfg(feature = "fs")]
            adapter: None,
        }
    }

    /// A directory or package; `dir` is its name for messages.
    pub fn from_files(dir: &str, lookup: &Lookup) -> Result<Checkpoint> {
        let at = |name: &str| format!("{dir}/{name}");
        let mut texts = BTreeMap::new();
        for name in TEXTS {
            if let Some(bytes) = lookup(name)? {
                texts.insert(name.to_string(), bytes);
            }
        }
        let mut shards = shards(dir, lookup, &SAFETENSORS)?;
        if shards.is_empty() {
            shards = self::shards(dir, lookup, &TORCH)?;
        }
        if shards.is_empty()
            && let Some(bytes) = lookup(GGUF_FILE)?
        {
            let checkpoint = Checkpoint::from_gguf(&at(GGUF_FILE), bytes)?;
            return Ok(Checkpoint { texts, dir: dir.into(), ..checkpoint });
        }
        let hint = "a model directory holds config.json and model.safetensors or pytorch_model.bin";
        let missing = |name: &str| Error::format(&at(name), "there is no such file", hint);
        let config = lookup("config.json")?.ok_or_else(|| missing("config.json"))?;
        let config_json = text(&at("config.json"), &config)?.to_string();
        let config = Config::from_json(&at("config.json"), &config_json)?;
        if shards.is_empty() {
            return Err(missing("model.safetensors"));
        }
        let open = |name: &String| {
            let bytes = lookup(name)?.ok_or_else(|| missing(name))?;
            match name.ends_with(TORCH.2) {
                true => torch::parse(&at(name), bytes),
                false => SafeTensors::parse(&at(name), bytes),
            }
        };
        let files = shards.iter().map(open).collect::<Result<Vec<_>>>()?;
        let shapes = files.iter().flat_map(SafeTensors::shapes);
        check_parts(&at("config.json"), &config, shapes)?;
        let name = dir.trim_end_matches('/').rsplit('/').next().unwrap_or(dir).to_string();
        let (model, container) = (Model::new(config), Container::SafeTensors(files));
        let checkpoint = Checkpoint::of(name, config_json, model, container);
        Ok(Checkpoint { dir: dir.into(), texts, ..checkpoint })
    }

    /// A model that no file holds yet: its config.json and the small files that belong to it.
    pub fn fresh(
        name: &str,
        config_json: String,
        texts: Vec<(&str, Vec<u8>)>,
    ) -> Result<Checkpoint> {
        let model = Model::new(Config::from_json("config.json", &config_json)?);
        let shared = |(name, bytes): (&str, Vec<u8>)| (name.to_string(), Arc::new(bytes) as _);
        let texts = texts.into_iter().map(shared).collect();
        let container = Container::SafeTensors(Vec::new());
        Ok(Checkpoint { texts, ..Checkpoint::of(name.into(), config_json, model, container) })
    }

    /// The same for texts of `n_ctx` tokens, where it is made for shorter ones: what is trained on
    /// them says so when it is saved.
    pub fn with_context(mut self, n_ctx: usize) -> Result<Checkpoint> {
        let made_for = self.model.config().n_ctx;
        let mut json: serde_json::Map<_, _> =
            serde_json::from_str(&self.config_json).map_err(|error| {
                Error::format(&self.dir, error.to_string(), "config.json may be damaged")
            })?;
        let key =
            ["n_ctx", "max_position_embeddings"].into_iter().find(|it| json.contains_key(*it));
        if let (Some(key), Some(_)) = (key, made_for.filter(|made_for| *made_for < n_ctx)) {
            json.insert(key.into(), n_ctx.into());
            self.config_json = serde_json::Value::Object(json).to_string();
            self.model = Model::new(Config::from_json(&self.dir, &self.config_json)?);
        }
        Ok(self)
    }

    /// Whether its weights lie in a file; those of a new model do not.
    pub(crate) fn is_stored(&self) -> bool {
        !matches!(&self.container, Container::SafeTensors(files) if files.is_empty())
    }

    /// What it calls itself.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn dir(&self) -> &str {
        &self.dir
    }

    /// Its config.json, found or put together.
    pub(crate) fn config_json(&self) -> &str {
        &self.config_json
    }

    /// Parameters in all.
    pub fn n_params(&self) -> usize {
        self.model.specs().iter().map(|spec| spec.shape.iter().product::<usize>()).sum()
    }

    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// The GGUF file it came from, if it did.
    pub(crate) fn gguf(&self) -> Option<&Gguf> {
        match &self.container {
            Container::Gguf(gguf) => Some(gguf),
            Container::SafeTensors(_) => None,
        }
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&str>> {
        self.texts.get(name).map(|bytes| text(name, bytes)).transpose()
    }

    /// The small files that came with it.
    pub fn texts(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.texts.iter().map(|(name, bytes)| (name.as_str(), (**bytes).as_ref()))
    }

    /// A small file that is a JSON object; absent is empty.
    pub(crate) fn json(&self, name: &str) -> Result<serde_json::Map<String, Value>> {
        match self.texts.get(name) {
            Some(bytes) => vocab::object(name, (**bytes).as_ref()),
            None => Ok(serde_json::Map::new()),
        }
    }

    /// The adapter that it was opened by.
    #[cfg_attr(not(feature = "fs"), expect(unused_variables))]
    pub(crate) fn own_adapter(&self, device: &Device) -> Result<Option<Lora>> {
        #[cfg(feature = "fs")]
        if let Some(path) = &self.adapter {
            return Adapter::open(path)?.read(Some(self), device).map(Some);
        }
        Ok(None)
    }

    /// Its weights, for training: where they are and as they are stored, rows in their places.
    pub(crate) fn weights(&self, device: &Device) -> Result<Weights> {
        Ok(self.weights_as_stored(device)?.in_order())
    }

    /// The same for generation: nothing is copied that is stored as a matrix.
    pub(crate) fn weights_as_stored(&self, device: &Device) -> Result<Weights> {
        if self.is_checked.get().is_none() {
            self.unchecked.iter().try_for_each(Unchecked::check)?;
            let _ = self.is_checked.set(());
        }
        self.load(device)
    }

    /// The same with experts that are loaded when they are chosen: at most `bytes_max` of them are
    /// resident on the device.
    pub(crate) fn weights_paged(&self, device: &Device, bytes_max: usize) -> Result<Weights> {
        let (sources, unchecked) = (&self.sources, &self.unchecked);
        let paging = Paging { bytes_max, specs: self.model.specs(), sources, unchecked };
        self.load(&device.host_device())?.paged(device, &paging)
    }

    fn load(&self, device: &Device) -> Result<Weights> {
        let specs = self.model.specs();
        Weights::load(device, specs, &self.places, &self.files(), &self.ignored())
    }

    /// How many bytes are stored in each dtype. Fails where `weights` would, and copies nothing.
    pub(crate) fn dtype_bytes(&self) -> Result<BTreeMap<&'static str, usize>> {
        params::survey(&Device::cpu(1)?, &self.places, &self.files(), &self.ignored())
    }

    fn files(&self) -> Vec<&dyn TensorFile> {
        match &self.container {
            Container::SafeTensors(files) => files.iter().map(|file| file as _).collect(),
            Container::Gguf(gguf) => vec![&**gguf],
        }
    }

    /// Tensors that may be there although no parameter lies in them.
    fn ignored(&self) -> Vec<&'static str> {
        // A tied head is often stored all the same.
        match (self.gguf(), self.model.config().tied) {
            (None, true) => vec![crate::model::HEAD],
            (None, false) => Vec::new(),
            (Some(_), true) => vec![gguf_config::FREQUENCIES, "output.weight"],
            (Some(_), false) => vec![gguf_config::FREQUENCIES],
        }
    }

    /// Its tokenizer, if it has one.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        match &self.container {
            Container::Gguf(gguf) if !self.texts.contains_key("tokenizer.json") => {
                let Some(vocab) = vocab::from_gguf(gguf)? else { return Ok(None) };
                let (n, n_vocab) = (vocab.tokens.len(), self.model.config().n_vocab);
                if n != n_vocab {
                    let problem = format!("has {n} tokens, the model {n_vocab}");
                    let hint = "convert the original again";
                    return Err(Error::config(gguf.file(), "tokenizer.ggml.tokens", problem, hint));
                }
                Tokenizer::from_gguf(gguf.file(), vocab).map(Some)
            }
            _ => vocab::from_files(&self.dir, "tokenizer.json", &|name| match name {
                "config.json" => Ok(Some(Arc::new(self.config_json.clone().into_bytes()))),
                _ => Ok(self.texts.get(name).cloned()),
            }),
        }
    }

    /// The template of its chats, if it has one.
    pub fn chat_template(&self) -> Result<Option<String>> {
        if let Some(template) = self.text("chat_template.jinja")? {
            return Ok(Some(template.to_string()));
        }
        let config = self.json("tokenizer_config.json")?;
        let named = |list: &Vec<Value>| {
            let default =
                list.iter().find(|item| item.get("name") == Some(&Value::from("default")));
            let template = default.or(list.first())?.get("template")?;
            template.as_str().map(str::to_string)
        };
        let template = match config.get("chat_template") {
            Some(Value::String(template)) => Some(template.clone()),
            Some(Value::Array(list)) => named(list),
            _ => None,
        };
        match (template, self.gguf()) {
            (None, Some(gguf)) => Ok(gguf.str("tokenizer.chat_template")?.map(str::to_string)),
            (template, _) => Ok(template),
        }
    }
}

/// Refuses a config of more parts than the weights can be of. `Model::new` lists every part, so
/// that a few lines of config beside a small file could ask for gigabytes.
fn check_parts<'a>(
    file: &str,
    config: &Config,
    shapes: impl Iterator<Item = &'a [usize]>,
) -> Result<()> {
    let (mut n_tensors, mut n_stored) = (0, 0usize);
    for shape in shapes {
        n_tensors += 1;
        let n_elem = shape.iter().fold(1usize, |n, &axis| n.saturating_mul(axis));
        n_stored = n_stored.saturating_add(n_elem);
    }
    let n_layers = config.layers.len();
    let experts = config.layers.iter().filter_map(|layer| layer.feed_forward.experts());
    let numbers = experts.map(|c| {
        [c.n_expert, 3, c.d_ff, config.d_model].into_iter().fold(1, usize::saturating_mul)
    });
    let n_wanted = numbers.fold(0, usize::saturating_add);
    let problem = if n_layers > n_tensors {
        format!("asks for {n_layers} layers, the weights hold {n_tensors} tensors")
    } else if n_wanted > n_stored {
        format!("asks for {n_wanted} numbers in experts, the weights hold {n_stored} in all")
    } else {
        return Ok(());
    };
    Err(Error::format(file, problem, "config and weights may belong to different models"))
}

/// One file, the index of many, and how they end.
type WeightFiles = (&'static str, &'static str, &'static str);
const SAFETENSORS: WeightFiles =
    ("model.safetensors", "model.safetensors.index.json", ".safetensors");
const TORCH: WeightFiles = ("pytorch_model.bin", "pytorch_model.bin.index.json", ".bin");

/// The one file, or the shards that the index lists.
fn shards(dir: &str, lookup: &Lookup, names: &WeightFiles) -> Result<Vec<String>> {
    let (single, index, end) = *names;
    if lookup(single)?.is_some() {
        return Ok(vec![single.into()]);
    }
    let Some(bytes) = lookup(index)? else { return Ok(Vec::new()) };
    let file = format!("{dir}/{index}");
    let hint = "the index is written by the tool that made the shards";
    let wrong = |problem: String| Error::format(&file, problem, hint);
    let json: Value = serde_json::from_str(text(&file, &bytes)?)
        .map_err(|error| wrong(format!("not JSON: {error}")))?;
    let map = json.get("weight_map").and_then(|map| map.as_object());
    let map = map.ok_or_else(|| wrong("there is no object `weight_map`".into()))?;
    let mut names = BTreeSet::new();
    for (tensor, name) in map {
        let name = name.as_str();
        let name = name.ok_or_else(|| wrong(format!("`{tensor}` has no file name")))?;
        // A shard lies beside its index: a name with a path in it points elsewhere.
        let plain = !name.contains(['/', '\\', '\0', ':']) && !name.starts_with('.');
        if !plain || !name.ends_with(end) {
            let problem = format!("`{tensor}` is in {name:?}, which is not a plain file name");
            return Err(wrong(problem));
        }
        names.insert(name.to_string());
    }
    if names.is_empty() {
        return Err(wrong("`weight_map` is empty".into()));
    }
    Ok(names.into_iter().collect())
}
