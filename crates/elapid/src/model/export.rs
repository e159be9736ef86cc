//! A model to be written: as a Hugging Face directory, a GGUF file, or the files of a package.
//!
//! Everything is a list of `OutFile`s whose bytes are made when their turn comes, one tensor at a
//! time: a model larger than memory can be converted.

use super::checkpoint::{Checkpoint, GGUF_FILE};
use super::params::{Target, targets};
use crate::error::{Error, Result};
use crate::files::gguf::{self, Item};
use crate::files::package::Parts;
use crate::files::{Outgoing, Sink, safetensors};
use crate::model::config::gguf::{self as gguf_config, Arch, FREQUENCIES};
use crate::model::weights::{ParamId, Role, Weights};
use crate::tensor::DType;
use crate::tensor::quant::mix::ArchFacts;
pub use crate::tensor::quant::mix::Mix;
use crate::text::vocab;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

pub struct OutFile<'a> {
    pub name: String,
    pub content: Content<'a>,
}

pub enum Content<'a> {
    Bytes(Vec<u8>),
    SafeTensors(Vec<Outgoing<'a>>),
    /// Metadata and tensors, as GGUF.
    Gguf(Vec<(String, Item)>, Vec<Outgoing<'a>>),
}

impl std::str::FromStr for Mix {
    type Err = Error;

    /// As people write it: `q4_k_m`.
    fn from_str(name: &str) -> Result<Mix> {
        Mix::from_name(&name.to_lowercase()).ok_or_else(|| {
            let hint = format!("the types are {}", Mix::ALL.map(|entry| entry.1).join(", "));
            Error::input(format!("unknown type {name:?}"), &hint)
        })
    }
}

impl OutFile<'_> {
    /// The bytes of each of its tensors, by name.
    fn tensors(&self) -> Result<HashMap<&str, Range<u64>>> {
        let list = match &self.content {
            Content::Bytes(_) => Vec::new(),
            Content::SafeTensors(tensors) => safetensors::places(&safetensors::FORMAT, tensors)?,
            Content::Gguf(metadata, tensors) => gguf::places(metadata, tensors)?,
        };
        Ok(list.into_iter().collect())
    }

    pub fn write(&self, sink: &mut Sink) -> Result<()> {
        match &self.content {
            Content::Bytes(bytes) => sink(bytes),
            Content::SafeTensors(tensors) => {
                safetensors::write(&safetensors::FORMAT, tensors, sink)
            }
            Content::Gguf(metadata, tensors) => gguf::write(metadata, tensors, sink),
        }
    }

    /// All of it in memory.
    #[cfg(test)]
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        self.write(&mut |bytes| {
            all.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(all)
    }
}

/// The model, its weights, and the tensors of a form of it.
pub struct Export<'a> {
    checkpoint: &'a Checkpoint,
    weights: &'a Weights,
    /// Of llama.cpp, where it is for GGUF.
    arch: Option<Arch>,
    targets: Vec<Target>,
    shard_bytes_max: u64,
}

/// Bytes of tensors in one shard of a directory.
pub const SHARD_BYTES_MAX: u64 = 5_000_000_000;

impl<'a> Export<'a> {
    /// For a directory, by the names of the model's family.
    pub fn directory(checkpoint: &'a Checkpoint, weights: &'a Weights) -> Export<'a> {
        let places = checkpoint.model().places();
        let places: Vec<_> = (0..).map(ParamId).zip(places).collect();
        let (targets, shard_bytes_max) = (targets(weights, &places), SHARD_BYTES_MAX);
        Export { checkpoint, weights, arch: None, targets, shard_bytes_max }
    }

    /// For a GGUF file, if llama.cpp has an architecture that computes the same.
    pub fn gguf(checkpoint: &'a Checkpoint, weights: &'a Weights) -> Result<Export<'a>> {
        let config = checkpoint.model().config();
        let arch = Arch::of(config)?;
        let names = gguf_config::names(config, arch, checkpoint.model().specs())?;
        let mut places: Vec<_> = (0..).map(ParamId).zip(names.places).collect();
        if let Some(place) = names.head {
            let embed = weights.find(&config.embed_name).expect("a model has an embedding");
            places.push((embed, place));
        }
        let (targets, shard_bytes_max) = (targets(weights, &places), SHARD_BYTES_MAX);
        Ok(Export { checkpoint, weights, arch: Some(arch), targets, shard_bytes_max })
    }

    /// The experts that lie in a file, and their bytes there, for a package.
    pub fn experts(&self, out: &OutFile) -> Result<Parts> {
        let (tensors, specs) = (out.tensors()?, self.checkpoint.model().specs());
        let mut ranges: BTreeMap<&str, Vec<Range<u64>>> = BTreeMap::new();
        for target in &self.targets {
            let Some(place) = tensors.get(target.name.as_str()) else { continue };
            for (param, rows) in target.params() {
                let expert = specs.get(param.0).and_then(|spec| spec.expert.as_ref());
                let Some(expert) = expert.filter(|_| !rows.is_empty()) else { continue };
                let per_row = (place.end - place.start) / target.n_rows() as u64;
                let at = |row: usize| place.start + row as u64 * per_row;
                ranges.entry(expert).or_default().push(at(rows.start)..at(rows.end));
            }
        }
        let sorted = |(name, mut ranges): (&str, Vec<Range<u64>>)| {
            ranges.sort_by_key(|range| range.start);
            (name.to_string(), ranges)
        };
        Ok(ranges.into_iter().map(sorted).collect())
    }

    /// The same with shards of another size.
    #[cfg(test)]
    pub fn with_shard_bytes(self, shard_bytes_max: u64) -> Export<'a> {
        Export { shard_bytes_max, ..self }
    }

    /// The files of a directory. `dtype` for the matrices, or as they are stored (blocks as f32).
    pub fn directory_files(&'a self, dtype: Option<DType>) -> Result<Vec<OutFile<'a>>> {
        assert!(self.arch.is_none(), "an export for a directory");
        let of = |target: &Target| match (target.role, dtype, target.dtype) {
            (Role::Matrix | Role::Embedding, Some(dtype), _) => dtype,
            (_, None, Some(dtype @ (DType::F16 | DType::BF16))) => dtype,
            _ => DType::F32,
        };
        let size = |target: &&Target| target.shape.iter().product::<usize>();
        let mut files = self.small_files(self.targets.iter().max_by_key(size).map(of))?;
        let tensors = self.targets.iter().map(|target| target.outgoing(self.weights, of(target)));
        files.extend(shard(tensors.collect(), self.shard_bytes_max)?);
        Ok(files)
    }

    /// The files of a package with weights in blocks.
    pub fn package_files(&'a self, mix: Option<Mix>) -> Result<Vec<OutFile<'a>>> {
        let mut files = self.small_files(None)?;
        let content = self.gguf_content(mix)?;
        files.push(OutFile { name: GGUF_FILE.into(), content });
        Ok(files)
    }

    /// Config, tokenizer and what else is small.
    fn small_files(&self, dtype: Option<DType>) -> Result<Vec<OutFile<'a>>> {
        let checkpoint = self.checkpoint;
        let mut list = vec![("config.json", config_bytes(checkpoint, dtype))];
        list.extend(checkpoint.texts().map(|(name, bytes)| (name, bytes.to_vec())));
        let has = |name: &str| checkpoint.texts().any(|text| text.0 == name);
        if checkpoint.gguf().is_some() && !has("tokenizer.json") {
            if let Some(tokenizer) = checkpoint.tokenizer()? {
                list.push(("tokenizer.json", tokenizer.to_json()?.into_bytes()));
                if !has("tokenizer_config.json") {
                    let config = tokenizer_config(checkpoint, &tokenizer)?;
                    list.push(("tokenizer_config.json", pretty(&config)));
                }
            }
            if !has("generation_config.json") {
                list.push(("generation_config.json", pretty(&generation_config(checkpoint)?)));
            }
        }
        let file = |(name, bytes): (&str, _)| OutFile {
            name: name.into(),
            content: Content::Bytes(bytes),
        };
        Ok(list.into_iter().map(file).collect())
    }

    /// A GGUF file: by a mix, or with every matrix as it is stored.
    pub fn gguf_content(&'a self, mix: Option<Mix>) -> Result<Content<'a>> {
        let arch = self.arch.expect("an export for GGUF");
        let config = self.checkpoint.model().config();
        let dtypes = match mix {
            Some(mix) => self.mixed(arch, mix),
            None => self.targets.iter().map(kept).collect(),
        };
        let mut metadata = self.general(arch, mix, &dtypes)?;
        let description = gguf_config::describe(config, arch);
        metadata.extend(description.metadata);
        let tokenizer = self.checkpoint.tokenizer()?;
        metadata.extend(vocab::to_gguf(tokenizer.as_ref(), config.n_vocab)?);
        if let Some(template) = self.checkpoint.chat_template()? {
            metadata.push(("tokenizer.chat_template".into(), Item::Str(template)));
        }
        metadata.extend(sampling(self.checkpoint)?);
        let json = self.checkpoint.config_json().to_string();
        metadata.push((gguf_config::CONFIG_KEY.into(), Item::Str(json)));
        let mut tensors = Vec::with_capacity(self.targets.len());
        for (target, dtype) in self.targets.iter().zip(dtypes) {
            metadata.extend(self.corrections(target, dtype));
            tensors.push(target.outgoing(self.weights, dtype));
        }
        if let Some(factors) = description.frequencies {
            let bytes: Vec<u8> = factors.iter().flat_map(|x| x.to_le_bytes()).collect();
            tensors.push(Outgoing {
                name: FREQUENCIES.into(),
                shape: vec![factors.len()],
                dtype: DType::F32,
                bytes: Box::new(move || Ok(Cow::Owned(bytes.clone()))),
            });
        }
        Ok(Content::Gguf(metadata, tensors))
    }

    fn mixed(&self, arch: Arch, mix: Mix) -> Vec<DType> {
        let layers = &self.checkpoint.model().config().layers;
        let experts = layers.iter().find_map(|layer| layer.feed_forward.experts());
        let n_expert = experts.map(|c| c.n_expert);
        let attention = layers.first().and_then(|layer| layer.mixer.attention());
        let n_gqa = attention.map(|c| c.dims.n_head / c.dims.n_kv_head.max(1));
        let grouped = n_gqa.is_some_and(|n| n > 1) && n_expert != Some(8);
        let is_70b =
            layers.len() == 80 && (arch == Arch::Qwen2 || (arch == Arch::Llama && grouped));
        let facts =
            ArchFacts { n_layer: layers.len(), n_expert: n_expert.unwrap_or(0), n_gqa, is_70b };
        let tensors = self.targets.iter();
        let tensors: Vec<_> = tensors.map(|t| (t.name.clone(), t.shape.clone())).collect();
        mix.choose(&tensors, &facts)
    }

    fn general(
        &self,
        arch: Arch,
        mix: Option<Mix>,
        dtypes: &[DType],
    ) -> Result<Vec<(String, Item)>> {
        let text = |key: &str, value: &str| (format!("general.{key}"), Item::Str(value.into()));
        let mut list = vec![
            text("architecture", arch.name()),
            text("type", "model"),
            text("name", self.checkpoint.name()),
        ];
        let mix = mix.or_else(|| {
            let largest = self.targets.iter().zip(dtypes);
            let largest = largest.filter(|(target, _)| target.role == Role::Matrix);
            let size = |target: &Target| target.shape.iter().product::<usize>();
            let (_, dtype) = largest.max_by_key(|(target, _)| size(target))?;
            Mix::from_name(dtype.name()).or_else(|| Mix::from_name(&format!("{}_m", dtype.name())))
        });
        if let Some(mix) = mix {
            list.push(("general.file_type".into(), Item::U32(mix.file_type())));
        }
        if dtypes.iter().any(|dtype| matches!(dtype, DType::Block(_))) {
            list.push(("general.quantization_version".into(), Item::U32(2)));
        }
        if let Some(gguf) = self.checkpoint.gguf() {
            for key in ["license", "author", "source.huggingface.repository", "basename"] {
                if let Some(value) = gguf.str(&format!("general.{key}"))? {
                    list.push(text(key, value));
                }
            }
        }
        Ok(list)
    }

    /// What a map loses of a tensor, for a key beside it.
    fn corrections(&self, target: &Target, dtype: DType) -> Option<(String, Item)> {
        let (param, map) = target.lossy().filter(|_| dtype == DType::F32)?;
        let tensor = self.weights.tensor(param).to_f32();
        let n_cols = target.shape.last().copied().filter(|_| target.shape.len() > 1);
        let steps = map.corrections(tensor.f32(), n_cols.unwrap_or(1))?;
        let narrow: Option<Vec<u8>> =
            steps.iter().map(|&step| i8::try_from(step).ok().map(|step| step as u8)).collect();
        let item = narrow.map_or(Item::I32s(steps), Item::U8s);
        Some((crate::files::corrections_key(&target.name), item))
    }
}

/// A matrix as it is stored; vectors and routers as f32, which is what llama.cpp reads.
fn kept(target: &Target) -> DType {
    let is_small = target.shape.len() == 1
        || matches!(target.role, Role::Vector | Role::Buffer)
        || target.name.contains("ffn_gate_inp");
    target.dtype.filter(|_| !is_small).unwrap_or(DType::F32)
}

fn pretty(map: &Map<String, Value>) -> Vec<u8> {
    format!("{:#}\n", Value::Object(map.clone())).into_bytes()
}

/// The config.json as it came, but for the dtype where it names another than is written:
/// transformers would round the weights to it.
fn config_bytes(checkpoint: &Checkpoint, dtype: Option<DType>) -> Vec<u8> {
    let text = checkpoint.config_json();
    let name = match dtype {
        Some(DType::F32) => "float32",
        Some(DType::F16) => "float16",
        Some(DType::BF16) => "bfloat16",
        Some(DType::U32 | DType::Block(_)) | None => return text.as_bytes().to_vec(),
    };
    // The text is changed in place: a file with a bare Infinity is not JSON and must pass, too.
    for key in ["\"torch_dtype\"", "\"dtype\""] {
        let Some(at) = text.find(key).map(|at| at + key.len()) else { continue };
        let Some(begin) = text[at..].find('"').map(|n| at + n + 1) else { continue };
        let Some(end) = text[begin..].find('"').map(|n| begin + n) else { continue };
        if text[at..begin - 1].trim() == ":" {
            return [&text[..begin], name, &text[end..]].concat().into_bytes();
        }
    }
    text.as_bytes().to_vec()
}

fn tokenizer_config(
    checkpoint: &Checkpoint,
    tokenizer: &crate::text::tokenizer::Tokenizer,
) -> Result<Map<String, Value>> {
    let mut map = Map::new();
    map.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    map.insert("clean_up_tokenization_spaces".into(), json!(false));
    for (key, id) in [("bos_token", tokenizer.bos()), ("eos_token", tokenizer.eos())] {
        if let Some(token) = id.and_then(|id| tokenizer.token(id)) {
            map.insert(key.into(), json!(token));
        }
    }
    if let Some(template) = checkpoint.chat_template()? {
        map.insert("chat_template".into(), json!(template));
    }
    Ok(map)
}

/// Names of sampling settings: ours from GGUF, theirs in generation_config.json.
const SAMPLING: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
    ("top_k", "top_k"),
];

fn generation_config(checkpoint: &Checkpoint) -> Result<Map<String, Value>> {
    let mut map = Map::new();
    let config: Value = serde_json::from_str(checkpoint.config_json()).unwrap_or(Value::Null);
    for key in ["bos_token_id", "eos_token_id"] {
        if let Some(id) = config.get(key) {
            map.insert(key.into(), id.clone());
        }
    }
    let Some(gguf) = checkpoint.gguf() else { return Ok(map) };
    for (from, to) in SAMPLING {
        let key = format!("general.sampling.{from}");
        let value = match from {
            "top_k" => gguf.size(&key)?.map(|k| json!(k)),
            _ => gguf.float(&key)?.map(|x| json!((x * 1e6).round() / 1e6)),
        };
        if let Some(value) = value {
            map.insert(to.into(), value);
        }
    }
    Ok(map)
}

fn sampling(checkpoint: &Checkpoint) -> Result<Vec<(String, Item)>> {
    let map = match checkpoint.text("generation_config.json")? {
        Some(_) => checkpoint.json("generation_config.json")?,
        None => generation_config(checkpoint)?,
    };
    let mut list = Vec::new();
    for (to, from) in SAMPLING {
        let Some(value) = map.get(from).and_then(Value::as_f64) else { continue };
        let item = match to {
            "top_k" => Item::I32(value as i32),
            _ => Item::F32(value as f32),
        };
        list.push((format!("general.sampling.{to}"), item));
    }
    Ok(list)
}

/// One file, or as many as it takes, with an index.
fn shard(tensors: Vec<Outgoing<'_>>, shard_bytes_max: u64) -> Result<Vec<OutFile<'_>>> {
    let n_bytes = |tensor: &Outgoing| -> Result<usize> {
        let n_elem = tensor.shape.iter().product();
        tensor.dtype.n_bytes(n_elem).ok_or_else(|| {
            let problem = format!("`{}` does not fill whole blocks", tensor.name);
            Error::input(problem, "choose another dtype")
        })
    };
    let mut shards: Vec<Vec<Outgoing>> = vec![Vec::new()];
    let (mut in_shard, mut total) = (0, 0);
    for tensor in tensors {
        let n = n_bytes(&tensor)?;
        total += n;
        if in_shard > 0 && (in_shard + n) as u64 > shard_bytes_max {
            shards.push(Vec::new());
            in_shard = 0;
        }
        in_shard += n;
        shards.last_mut().expect("one shard").push(tensor);
    }
    let n_shards = shards.len();
    if n_shards == 1 {
        let content = Content::SafeTensors(shards.remove(0));
        return Ok(vec![OutFile { name: "model.safetensors".into(), content }]);
    }
    let (mut files, mut weight_map) = (Vec::new(), Map::new());
    for (idx, tensors) in shards.into_iter().enumerate() {
        let name = format!("model-{:05}-of-{n_shards:05}.safetensors", idx + 1);
        for tensor in &tensors {
            weight_map.insert(tensor.name.clone(), json!(name));
        }
        files.push(OutFile { name, content: Content::SafeTensors(tensors) });
    }
    let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
    let content = Content::Bytes(format!("{index:#}\n").into_bytes());
    files.push(OutFile { name: "model.safetensors.index.json".into(), content });
    Ok(files)
}
