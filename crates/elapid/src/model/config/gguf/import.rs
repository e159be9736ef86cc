//! The config of a model in a GGUF file.
//!
//! A file of our own holds its config.json; of any other the keys of the family are looked up in
//! the metadata, by the rows of `family.rs`, and, where that is silent, among the tensors.

use super::{Arch, FREQUENCIES};
use crate::files::TensorFile;
use crate::files::gguf::{Gguf, Value as GgufValue};
use crate::model::config::family::{Absent, Facts, Row, Source};
use crate::model::config::*;
use crate::ops::rope::RopeScaling;
use crate::tensor::device::Device;
use serde_json::{Map, Value, json};

/// The key under which we keep the config.json a file was made from.
pub const CONFIG_KEY: &str = "elapid.config";

/// The architecture of a file, the config of its model, and the same as config.json.
pub fn read(gguf: &Gguf) -> Result<(Arch, Config, String)> {
    let arch = architecture(gguf)?;
    if let Some(json) = gguf.str(CONFIG_KEY)? {
        return Ok((arch, Config::from_json(gguf.file(), json)?, json.to_string()));
    }
    if arch == Arch::Elapid {
        let hint = "convert the original again";
        return Err(Error::config(gguf.file(), CONFIG_KEY, "is missing", hint));
    }
    let has_experts = gguf.size(&format!("{arch}.expert_count"))?.is_some_and(|n| n > 0);
    let has_norms = gguf.bool(&format!("{arch}.ssm.dt_b_c_rms"))?.unwrap_or(false);
    let of_arch = |family: &Family| family.facts().gguf.is_some_and(|gguf| gguf.0 == arch);
    let family = match arch {
        Arch::Llama if has_experts => Some(Family::Mixtral),
        Arch::Mamba if has_norms => Some(Family::FalconMamba),
        _ => Family::ALL.iter().copied().find(of_arch),
    };
    let facts = family.expect("an architecture belongs to a family").facts();
    let mut import = Import { gguf, arch, facts, map: Map::new() };
    import.fill()?;
    let text = format!("{:#}", Value::Object(import.map.clone()));
    Ok((arch, Config::from_keys(Keys::new(gguf.file(), import.map, Some(arch)))?, text))
}

fn architecture(gguf: &Gguf) -> Result<Arch> {
    const KEY: &str = "general.architecture";
    let hint = format!("supported are {}", Arch::NAMES.join(", "));
    let fail = |problem: String| Error::config(gguf.file(), KEY, problem, &hint);
    if gguf.str("general.type")?.is_some_and(|kind| kind == "adapter") {
        let hint = "give the model, and the adapter beside it";
        return Err(Error::config(gguf.file(), "general.type", "is \"adapter\", no model", hint));
    }
    let name = gguf.str(KEY)?.ok_or_else(|| fail("is missing".into()))?;
    Arch::from_name(name).ok_or_else(|| fail(format!("is \"{name}\"")))
}

/// A float as people write it: 1e-5, not 9.99999974e-6.
fn number(x: f64) -> Value {
    json!((x as f32).to_string().parse::<f64>().unwrap_or(x))
}

struct Import<'a> {
    gguf: &'a Gguf,
    arch: Arch,
    facts: &'static Facts,
    /// By the keys of config.json.
    map: Map<String, Value>,
}

impl Import<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    fn wrong(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::config(self.gguf.file(), key, problem, "convert the original again")
    }

    fn need<T>(&self, key: &str, value: Option<T>) -> Result<T> {
        value.ok_or_else(|| self.wrong(&self.key(key), "is missing"))
    }

    fn put(&mut self, key: &str, value: impl Into<Value>) {
        self.map.insert(key.into(), value.into());
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        self.gguf.size(&self.key(key))
    }

    /// One number for all layers, or a list with the same number for each.
    fn size_of_each(&self, key: &str) -> Result<Option<usize>> {
        let key = self.key(key);
        if !matches!(self.gguf.get(&key), Some(GgufValue::Array(_))) {
            return self.gguf.size(&key);
        }
        let list = self.gguf.sizes(&key)?.unwrap_or_default();
        match list.iter().all(|size| Some(size) == list.first()) {
            true => Ok(list.first().copied()),
            false => Err(self.wrong(&key, format!("differs between layers: {list:?}"))),
        }
    }

    /// A finite float: JSON has no other, and a null would mean the default.
    fn float(&self, key: &str) -> Result<Option<f64>> {
        let key = self.key(key);
        match self.gguf.float(&key)? {
            Some(x) if !(x as f32).is_finite() => Err(self.wrong(&key, format!("is {x}"))),
            x => Ok(x),
        }
    }

    fn known(&self, key: &str) -> Option<usize> {
        self.map.get(key).and_then(Value::as_u64)?.try_into().ok()
    }

    fn shape(&self, tensor: &str) -> Option<&[usize]> {
        let entry = self.gguf.tensors().iter().find(|entry| entry.name == tensor);
        entry.map(|entry| &entry.shape[..])
    }

    fn fill(&mut self) -> Result<()> {
        let (gguf, facts) = (self.gguf, self.facts);
        self.put("architectures", json!([format!("{}ForCausalLM", facts.class)]));
        self.put("model_type", facts.name);
        for Row(_, name, source) in facts.rows() {
            let (value, key, absent) = match *source {
                Source::Size(key, absent) => (self.size(key)?.map(Value::from), key, absent),
                Source::Each(key, absent) => {
                    (self.size_of_each(key)?.map(Value::from), key, absent)
                }
                Source::Float(key, absent) => (self.float(key)?.map(number), key, absent),
                Source::Tensor(tensor) => {
                    let is_it = |entry: &str| entry.split('.').skip(2).eq(tensor.split('.'));
                    let is_there = gguf.tensors().iter().any(|entry| is_it(&entry.name));
                    (Some(is_there.into()), "", Absent::Unknown)
                }
                Source::No | Source::Parts(_) => continue,
            };
            match (value, absent) {
                (Some(value), _) => self.put(name, value),
                (None, Absent::Is(value)) => self.put(name, value),
                (None, Absent::Unknown) => {}
                (None, Absent::Need) => self.need(key, None)?,
            }
        }
        let embedding = self.shape("token_embd.weight").and_then(|shape| shape.first().copied());
        let n_vocab =
            embedding.ok_or_else(|| self.wrong("token_embd.weight", "there is no such tensor"))?;
        self.put("vocab_size", n_vocab);
        self.put("tie_word_embeddings", self.shape("output.weight").is_none());
        for (key, name) in [("bos", "bos_token_id"), ("eos", "eos_token_id")] {
            let id = gguf.size(&format!("tokenizer.ggml.{key}_token_id"))?;
            // An id beyond the vocabulary is a slip that llama.cpp passes over, too.
            if let Some(id) = id.filter(|&id| id < n_vocab) {
                self.put(name, id);
            }
        }
        for (key, value) in facts.fixed {
            self.put(key, *value);
        }
        self.widths()?;
        self.attention()?;
        match self.arch {
            Arch::Jamba => self.jamba(),
            Arch::GraniteHybrid => self.granite(),
            Arch::Qwen2Moe => {
                let d_ff = self.known("intermediate_size").unwrap_or(0);
                let of_expert = d_ff / self.known("num_experts_per_tok").unwrap_or(1).max(1);
                self.map.entry("moe_intermediate_size").or_insert(of_expert.into());
                self.map.entry("shared_expert_intermediate_size").or_insert(d_ff.into());
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Heads of Mamba-2, and how much wider Mamba is than the model.
    fn widths(&mut self) -> Result<()> {
        let row = |own: &str| self.facts.row(own).map(|row| row.1);
        let factor = row("mamba1.factor").or(row("mamba2.factor"));
        let d_head = row("mamba2.d_head");
        let Some(factor) = factor else { return Ok(()) };
        let d_inner = self.need("ssm.inner_size", self.size("ssm.inner_size")?)?;
        // These two have a key for it.
        let factor = (!matches!(self.arch, Arch::Mamba | Arch::FalconH1)).then_some(factor);
        for (name, by) in [(d_head, "ssm.time_step_rank"), (factor, "embedding_length")] {
            let Some(name) = name else { continue };
            let divisor = self.size(by)?.unwrap_or(0);
            if divisor == 0 || !d_inner.is_multiple_of(divisor) {
                let problem = format!("{d_inner} is not a multiple of {by}, {divisor}");
                return Err(self.wrong(&self.key("ssm.inner_size"), problem));
            }
            self.put(name, d_inner / divisor);
        }
        Ok(())
    }

    fn attention(&mut self) -> Result<()> {
        let Some(n_head) = self.known("num_attention_heads") else { return Ok(()) };
        let d_model = self.known("hidden_size").unwrap_or(0);
        if !self.map.contains_key("head_dim") {
            // `Config` refuses heads that do not divide.
            if n_head == 0 || !d_model.is_multiple_of(n_head) {
                return Ok(());
            }
            self.put("head_dim", d_model / n_head);
        }
        self.map.entry("num_key_value_heads").or_insert(n_head.into());
        if self.known("max_position_embeddings") == Some(0) {
            self.map.remove("max_position_embeddings");
        }
        let d_head = self.known("head_dim").unwrap_or(0);
        if let Some(d_rotary) = self.size("rope.dimension_count")?.filter(|&d| d > 0) {
            let is_part = self.arch == Arch::GraniteHybrid && d_rotary.is_multiple_of(2);
            if d_rotary > d_head || (d_rotary != d_head && !is_part) {
                let problem = format!("is {d_rotary}, heads have {d_head}");
                return Err(self.wrong(&self.key("rope.dimension_count"), problem));
            }
            if d_rotary != d_head {
                self.put("partial_rotary_factor", d_rotary as f64 / d_head as f64);
            }
        }
        let base = self.map.get("rope_theta").and_then(Value::as_f64).unwrap_or(1e4);
        if let Some(scaling) = self.rope_scaling(d_head, base)? {
            self.put("rope_scaling", scaling);
        }
        Ok(())
    }

    fn rope_scaling(&self, d_head: usize, base: f64) -> Result<Option<Value>> {
        let key = self.key("rope.scaling.type");
        let factor = match self.float("rope.scaling.factor")? {
            None => self.float("rope.scale_linear")?, // as it was called in old files
            factor => factor,
        };
        match (self.gguf.str(&key)?, factor) {
            (Some("yarn"), Some(factor)) => {
                let n_ctx = self.size("rope.scaling.original_context_length")?;
                let n_ctx = n_ctx.or(self.size("context_length")?);
                let mut scaling = json!({"rope_type": "yarn", "factor": number(factor),
                    "original_max_position_embeddings": n_ctx});
                for key in ["beta_fast", "beta_slow"] {
                    if let Some(value) = self.float(&format!("rope.scaling.yarn_{key}"))? {
                        scaling[key] = number(value);
                    }
                }
                Ok(Some(scaling))
            }
            (Some("linear") | None, Some(factor)) if factor != 0.0 && factor != 1.0 => {
                Ok(Some(json!({"rope_type": "linear", "factor": number(factor)})))
            }
            (Some("linear" | "none" | "yarn") | None, _) => self.rope_factors(d_head, base),
            (Some(other), _) => {
                let problem = format!("is \"{other}\"; known are none, linear, yarn");
                Err(self.wrong(&key, problem))
            }
        }
    }

    /// Factors that lie in a tensor: by the rule of Llama 3 if it gives them, else as they are.
    fn rope_factors(&self, d_head: usize, base: f64) -> Result<Option<Value>> {
        let Some(shape) = self.shape(FREQUENCIES) else { return Ok(None) };
        if shape != [d_head / 2] {
            let problem = format!("has shape {shape:?}, heads have {d_head}");
            return Err(self.wrong(FREQUENCIES, problem));
        }
        let device = Device::cpu(1)?;
        let Some(factors) = self.gguf.tensor(&device, FREQUENCIES)? else { return Ok(None) };
        let factors = factors.to_f32().f32().to_vec();
        if let Some(bad) = factors.iter().find(|x| !(x.is_finite() && **x > 0.0)) {
            return Err(self.wrong(FREQUENCIES, format!("holds {bad}")));
        }
        let plain = Rope { base, d_rotary: d_head, scaling: RopeScaling::None };
        let largest = factors.iter().fold(1.0f32, |a, b| a.max(*b)) as f64;
        for n_ctx_orig in [8192, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16384, 32768] {
            let (factor, low_freq, high_freq) = (largest, 1.0, 4.0);
            let scaling = RopeScaling::Llama3 { factor, low_freq, high_freq, n_ctx_orig };
            let rope = Rope { scaling, ..plain.clone() };
            let (plain, scaled) = (plain.table(), rope.table());
            let mut pairs = plain.frequencies().iter().zip(scaled.frequencies()).zip(&factors);
            if pairs.all(|((plain, scaled), factor)| (plain / scaled / factor - 1.0).abs() < 1e-5) {
                return Ok(Some(json!({
                    "rope_type": "llama3", "factor": number(largest), "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": n_ctx_orig,
                })));
            }
        }
        let factors: Vec<Value> = factors.into_iter().map(|x| number(x.into())).collect();
        Ok(Some(json!({"rope_type": "factors", "factors": factors})))
    }

    /// Puts the heads of keys that layers with attention have; which layers these are.
    fn attention_layers(&mut self) -> Result<Vec<bool>> {
        let key = self.key("attention.head_count_kv");
        let n_layer = self.known("num_hidden_layers").unwrap_or(0);
        let list = self.need("attention.head_count_kv", self.gguf.sizes(&key)?)?;
        if list.len() != n_layer {
            let problem = format!("holds {} numbers for {n_layer} layers", list.len());
            return Err(self.wrong(&key, problem));
        }
        let first = list.iter().copied().find(|&n| n > 0).unwrap_or(1);
        if list.iter().any(|&n| n > 0 && n != first) {
            return Err(self.wrong(&key, format!("differs between layers: {list:?}")));
        }
        self.put("num_key_value_heads", first);
        Ok(list.iter().map(|&n| n > 0).collect())
    }

    /// Puts the period and offset that mark these layers and no others.
    fn put_period(&mut self, what: &str, marked: &[bool]) -> Result<()> {
        let places: Vec<usize> = (0..marked.len()).filter(|&idx| marked[idx]).collect();
        let [period, offset] = match places[..] {
            [] => [marked.len() + 1, marked.len()],
            [only] => [marked.len(), only],
            [first, second, ..] => [second - first, first],
        };
        let same = |idx: usize| (idx % period == offset) == marked[idx];
        if offset >= period || !(0..marked.len()).all(same) {
            let problem = format!("layers with {what} have no period: {places:?}");
            return Err(self.wrong(&self.key("block_count"), problem));
        }
        self.put(&format!("{what}_layer_period"), period);
        self.put(&format!("{what}_layer_offset"), offset);
        Ok(())
    }

    fn jamba(&mut self) -> Result<()> {
        let attention = self.attention_layers()?;
        self.put_period("attn", &attention)?;
        let has_router = |idx| self.shape(&format!("blk.{idx}.ffn_gate_inp.weight")).is_some();
        let experts: Vec<bool> = (0..attention.len()).map(has_router).collect();
        self.put_period("expert", &experts)?;
        if !experts.contains(&true) {
            self.put("num_experts", 1);
        }
        Ok(())
    }

    fn granite(&mut self) -> Result<()> {
        let kind = |is_attention: &bool| if *is_attention { "attention" } else { "mamba" };
        let kinds: Vec<&str> = self.attention_layers()?.iter().map(kind).collect();
        self.put("layer_types", kinds);
        let has_rope = self.gguf.bool(&self.key("rope.scaling.finetuned"))?;
        let position = if has_rope.unwrap_or(true) { "rope" } else { "nope" };
        self.put("position_embedding_type", position);
        // A factor of 0 is one that is not set.
        let is_0 =
            |map: &Map<String, Value>, key| map.get(key).and_then(Value::as_f64) == Some(0.0);
        for key in ["embedding_multiplier", "residual_multiplier", "logits_scaling"] {
            if is_0(&self.map, key) {
                self.put(key, 1.0);
            }
        }
        if is_0(&self.map, "attention_multiplier") {
            let d_head = self.known("head_dim").unwrap_or(1) as f64;
            self.put("attention_multiplier", number(d_head.powf(-0.5)));
        }
        let shared = match self.known("num_local_experts") {
            Some(0) | None => self.known("intermediate_size"),
            _ => self.size("expert_shared_feed_forward_length")?,
        };
        let shared = self.need("expert_shared_feed_forward_length", shared)?;
        self.put("shared_intermediate_size", shared);
        Ok(())
    }
}
