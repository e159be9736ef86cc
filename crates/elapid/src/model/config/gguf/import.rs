//! The config.json of a model in a GGUF file.
//!
//! A file of our own holds it whole; of any other it is put together from the metadata and, where
//! that is silent, from the tensors that are there.

use super::{Arch, FREQUENCIES};
use crate::files::TensorFile;
use crate::files::gguf::{Gguf, Value as GgufValue};
use crate::model::config::*;
use crate::ops::rope::RopeScaling;
use crate::tensor::device::Device;
use serde_json::{Map, Value, json};

/// The key under which we keep the config.json a file was made from.
pub const CONFIG_KEY: &str = "elapid.config";

/// The config.json of a file.
pub fn config_json(gguf: &Gguf) -> Result<String> {
    let arch = architecture(gguf)?;
    if let Some(json) = gguf.str(CONFIG_KEY)? {
        return Ok(json.to_string());
    }
    let reader = Reader { gguf, arch };
    let map = reader.config()?;
    serde_json::to_string_pretty(&Value::Object(map))
        .map_err(|error| reader.wrong("general.architecture", error.to_string()))
}

fn architecture(gguf: &Gguf) -> Result<Arch> {
    const KEY: &str = "general.architecture";
    let known = || Arch::ALL.map(Arch::name).join(", ");
    let fail = |problem: String| {
        Error::config(gguf.file(), KEY, problem, &format!("supported are {}", known()))
    };
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

struct Reader<'a> {
    gguf: &'a Gguf,
    arch: Arch,
}

impl Reader<'_> {
    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.arch.name())
    }

    fn wrong(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::config(self.gguf.file(), key, problem, "convert the original again")
    }

    fn size_opt(&self, key: &str) -> Result<Option<usize>> {
        self.gguf.size(&self.key(key))
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.size_opt(key)?.ok_or_else(|| self.wrong(&self.key(key), "is missing"))
    }

    /// One number for all layers, or a list with the same number for each.
    fn size_of_all(&self, key: &str) -> Result<Option<usize>> {
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
    fn float_opt(&self, key: &str) -> Result<Option<f64>> {
        let key = self.key(key);
        match self.gguf.float(&key)? {
            Some(x) if !(x as f32).is_finite() => Err(self.wrong(&key, format!("is {x}"))),
            x => Ok(x),
        }
    }

    fn shape(&self, tensor: &str) -> Option<Vec<usize>> {
        let entry = self.gguf.tensors().iter().find(|entry| entry.name == tensor);
        entry.map(|entry| entry.shape.clone())
    }

    fn has(&self, tensor: &str) -> bool {
        self.shape(tensor).is_some()
    }

    fn rows(&self, tensor: &str) -> Result<usize> {
        let shape = self.shape(tensor);
        let rows = shape.and_then(|shape| shape.first().copied());
        rows.ok_or_else(|| self.wrong(tensor, "there is no such tensor"))
    }

    fn config(&self) -> Result<Map<String, Value>> {
        let mut map = match self.arch {
            Arch::Mamba => self.mamba()?,
            Arch::Mamba2 => self.mamba2()?,
            Arch::Llama | Arch::Qwen2 | Arch::Qwen3 | Arch::Qwen2Moe => self.transformer()?,
            Arch::Jamba => self.jamba()?,
            Arch::GraniteHybrid => self.granite()?,
            Arch::FalconH1 => self.falcon()?,
        };
        let n_vocab = self.rows("token_embd.weight")?;
        map.insert("vocab_size".into(), json!(n_vocab));
        map.insert("hidden_size".into(), json!(self.size("embedding_length")?));
        map.insert("num_hidden_layers".into(), json!(self.n_layer()?));
        map.insert("tie_word_embeddings".into(), json!(!self.has("output.weight")));
        for (key, name) in [("bos", "bos_token_id"), ("eos", "eos_token_id")] {
            let id = self.gguf.size(&format!("tokenizer.ggml.{key}_token_id"))?;
            // An id beyond the vocabulary is a slip that llama.cpp passes over, too.
            if let Some(id) = id.filter(|&id| id < n_vocab) {
                map.insert(name.into(), json!(id));
            }
        }
        Ok(map)
    }

    fn n_layer(&self) -> Result<usize> {
        let n_layer = self.size("block_count")?;
        match (1..=check::N_LAYER_MAX).contains(&n_layer) {
            true => Ok(n_layer),
            false => Err(self.wrong(&self.key("block_count"), format!("is {n_layer}"))),
        }
    }

    fn start(&self, family: &str, class: &str) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("architectures".into(), json!([format!("{class}ForCausalLM")]));
        map.insert("model_type".into(), json!(family));
        map.insert("hidden_act".into(), json!("silu"));
        map
    }

    fn eps(&self) -> Result<Value> {
        const KEY: &str = "attention.layer_norm_rms_epsilon";
        let eps = self.float_opt(KEY)?;
        eps.map(number).ok_or_else(|| self.wrong(&self.key(KEY), "is missing"))
    }

    fn mamba(&self) -> Result<Map<String, Value>> {
        let normed = self.gguf.bool(&self.key("ssm.dt_b_c_rms"))?.unwrap_or(false);
        let mut map = match normed {
            true => self.start("falcon_mamba", "FalconMamba"),
            false => self.start("mamba", "Mamba"),
        };
        if normed {
            map.insert("mixer_rms_eps".into(), self.eps()?);
        }
        map.insert("layer_norm_epsilon".into(), self.eps()?);
        map.insert("intermediate_size".into(), json!(self.size("ssm.inner_size")?));
        map.insert("state_size".into(), json!(self.size("ssm.state_size")?));
        map.insert("conv_kernel".into(), json!(self.size("ssm.conv_kernel")?));
        map.insert("time_step_rank".into(), json!(self.size("ssm.time_step_rank")?));
        map.insert("expand".into(), json!(2));
        map.insert("use_bias".into(), json!(false));
        map.insert("use_conv_bias".into(), json!(true));
        Ok(map)
    }

    /// Heads, width of a head and width over the model's, of Mamba-2.
    fn heads(&self) -> Result<(usize, usize, usize)> {
        let (n_head, d_inner) = (self.size("ssm.time_step_rank")?, self.size("ssm.inner_size")?);
        let d_model = self.size("embedding_length")?;
        let whole = |n: usize, by: usize, what: &str| match by > 0 && n.is_multiple_of(by) {
            true => Ok(n / by),
            false => {
                let problem = format!("{n} is not a multiple of {what}, {by}");
                Err(self.wrong(&self.key("ssm.inner_size"), problem))
            }
        };
        let d_head = whole(d_inner, n_head, "ssm.time_step_rank")?;
        let expand = match self.arch {
            Arch::FalconH1 => 2,
            _ => whole(d_inner, d_model, "embedding_length")?,
        };
        Ok((n_head, d_head, expand))
    }

    fn mamba2(&self) -> Result<Map<String, Value>> {
        let mut map = self.start("mamba2", "Mamba2");
        let (n_head, d_head, expand) = self.heads()?;
        map.insert("layer_norm_epsilon".into(), self.eps()?);
        map.insert("num_heads".into(), json!(n_head));
        map.insert("head_dim".into(), json!(d_head));
        map.insert("expand".into(), json!(expand));
        map.insert("n_groups".into(), json!(self.size("ssm.group_count")?));
        map.insert("state_size".into(), json!(self.size("ssm.state_size")?));
        map.insert("conv_kernel".into(), json!(self.size("ssm.conv_kernel")?));
        map.insert("use_bias".into(), json!(false));
        map.insert("use_conv_bias".into(), json!(true));
        Ok(map)
    }

    /// Keys of attention and norms that all families with attention share.
    fn attention(&self, map: &mut Map<String, Value>) -> Result<()> {
        let n_head = self.size_of_all("attention.head_count")?;
        let n_head =
            n_head.ok_or_else(|| self.wrong(&self.key("attention.head_count"), "is missing"))?;
        map.insert("num_attention_heads".into(), json!(n_head));
        let d_head = match self.size_opt("attention.key_length")? {
            Some(d_head) => d_head,
            None => {
                let d_model = self.size("embedding_length")?;
                if n_head == 0 || !d_model.is_multiple_of(n_head) {
                    let problem = format!("{n_head} do not divide a width of {d_model}");
                    return Err(self.wrong(&self.key("attention.head_count"), problem));
                }
                d_model / n_head
            }
        };
        map.insert("head_dim".into(), json!(d_head));
        map.insert("rms_norm_eps".into(), self.eps()?);
        if let Some(n_ctx) = self.size_opt("context_length")?.filter(|&n_ctx| n_ctx > 0) {
            map.insert("max_position_embeddings".into(), json!(n_ctx));
        }
        if let Some(d_rotary) = self.size_opt("rope.dimension_count")?.filter(|&d| d > 0) {
            let is_part = self.arch == Arch::GraniteHybrid && d_rotary.is_multiple_of(2);
            if d_rotary > d_head || (d_rotary != d_head && !is_part) {
                let problem = format!("is {d_rotary}, heads have {d_head}");
                return Err(self.wrong(&self.key("rope.dimension_count"), problem));
            }
            if d_rotary != d_head {
                let part = d_rotary as f64 / d_head as f64;
                map.insert("partial_rotary_factor".into(), json!(part));
            }
        }
        let base = self.float_opt("rope.freq_base")?.unwrap_or(10_000.0);
        map.insert("rope_theta".into(), number(base));
        if let Some(scaling) = self.rope_scaling(d_head, base)? {
            map.insert("rope_scaling".into(), scaling);
        }
        Ok(())
    }

    fn rope_scaling(&self, d_head: usize, base: f64) -> Result<Option<Value>> {
        let kind = self.gguf.str(&self.key("rope.scaling.type"))?;
        let factor = match self.float_opt("rope.scaling.factor")? {
            None => self.float_opt("rope.scale_linear")?, // as it was called in old files
            factor => factor,
        };
        match (kind, factor) {
            (Some("yarn"), Some(factor)) => {
                let mut map = Map::new();
                map.insert("rope_type".into(), json!("yarn"));
                map.insert("factor".into(), number(factor));
                let n_ctx = self.size_opt("rope.scaling.original_context_length")?;
                let n_ctx = n_ctx.or(self.size_opt("context_length")?);
                map.insert("original_max_position_embeddings".into(), json!(n_ctx));
                for key in ["beta_fast", "beta_slow"] {
                    if let Some(value) = self.float_opt(&format!("rope.scaling.yarn_{key}"))? {
                        map.insert(key.into(), number(value));
                    }
                }
                Ok(Some(Value::Object(map)))
            }
            (Some("linear") | None, Some(factor)) if factor != 0.0 && factor != 1.0 => {
                Ok(Some(json!({"rope_type": "linear", "factor": number(factor)})))
            }
            (Some("linear" | "none" | "yarn") | None, _) => self.rope_factors(d_head, base),
            (Some(other), _) => {
                let problem = format!("is \"{other}\"; known are none, linear, yarn");
                Err(self.wrong(&self.key("rope.scaling.type"), problem))
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

    fn transformer(&self) -> Result<Map<String, Value>> {
        let n_expert = self.size_opt("expert_count")?.unwrap_or(0);
        let mut map = match (self.arch, n_expert) {
            (Arch::Qwen2, _) => self.start("qwen2", "Qwen2"),
            (Arch::Qwen3, _) => self.start("qwen3", "Qwen3"),
            (Arch::Qwen2Moe, _) => self.start("qwen2_moe", "Qwen2Moe"),
            (_, 0) => self.start("llama", "Llama"),
            _ => self.start("mixtral", "Mixtral"),
        };
        self.attention(&mut map)?;
        let n_head = map.get("num_attention_heads").and_then(Value::as_u64).unwrap_or(0) as usize;
        let n_kv_head = self.size_of_all("attention.head_count_kv")?.unwrap_or(n_head);
        map.insert("num_key_value_heads".into(), json!(n_kv_head));
        let d_ff = self.size_of_all("feed_forward_length")?;
        let d_ff =
            d_ff.ok_or_else(|| self.wrong(&self.key("feed_forward_length"), "is missing"))?;
        map.insert("intermediate_size".into(), json!(d_ff));
        match self.arch {
            Arch::Llama => {
                map.insert("attention_bias".into(), json!(self.has("blk.0.attn_q.bias")));
                map.insert("mlp_bias".into(), json!(self.has("blk.0.ffn_gate.bias")));
            }
            Arch::Qwen3 => {
                map.insert("attention_bias".into(), json!(self.has("blk.0.attn_q.bias")));
            }
            _ => {}
        }
        if n_expert == 0 {
            return Ok(map);
        }
        let n_used = self.size("expert_used_count")?;
        map.insert("num_experts_per_tok".into(), json!(n_used));
        if self.arch == Arch::Llama {
            map.insert("num_local_experts".into(), json!(n_expert));
            // Absent means one in a window of 4096.
            map.insert("sliding_window".into(), Value::Null);
        } else {
            let of_expert = self.size_opt("expert_feed_forward_length")?;
            let of_expert = of_expert.unwrap_or(d_ff / n_used.max(1));
            let of_shared = self.size_opt("expert_shared_feed_forward_length")?.unwrap_or(d_ff);
            map.insert("num_experts".into(), json!(n_expert));
            map.insert("moe_intermediate_size".into(), json!(of_expert));
            map.insert("shared_expert_intermediate_size".into(), json!(of_shared));
            map.insert("norm_topk_prob".into(), json!(false));
            map.insert("qkv_bias".into(), json!(self.has("blk.0.attn_q.bias")));
        }
        Ok(map)
    }

    /// Heads of keys for each layer; zero marks a recurrent one.
    fn kv_heads(&self) -> Result<Vec<usize>> {
        let (key, n_layer) = (self.key("attention.head_count_kv"), self.n_layer()?);
        let list = self.gguf.sizes(&key)?.ok_or_else(|| self.wrong(&key, "is missing"))?;
        match list.len() == n_layer {
            true => Ok(list),
            false => {
                Err(self.wrong(&key, format!("holds {} numbers for {n_layer} layers", list.len())))
            }
        }
    }

    /// The one number of heads that layers with attention have.
    fn kv_head(&self, list: &[usize]) -> Result<usize> {
        let mut some = list.iter().copied().filter(|&n| n > 0);
        let first = some.next().unwrap_or(1);
        match some.all(|n| n == first) {
            true => Ok(first),
            false => {
                let problem = format!("differs between layers: {list:?}");
                Err(self.wrong(&self.key("attention.head_count_kv"), problem))
            }
        }
    }

    /// Period and offset that mark these layers and no others.
    fn period(&self, what: &str, marked: &[bool]) -> Result<[usize; 2]> {
        let places: Vec<usize> = (0..marked.len()).filter(|&idx| marked[idx]).collect();
        let [period, offset] = match places[..] {
            [] => [marked.len() + 1, marked.len()],
            [only] => [marked.len(), only],
            [first, second, ..] => [second - first, first],
        };
        let same = |idx: usize| (idx % period == offset) == marked[idx];
        match offset < period && (0..marked.len()).all(same) {
            true => Ok([period, offset]),
            false => {
                let problem = format!("layers with {what} have no period: {places:?}");
                Err(self.wrong(&self.key("block_count"), problem))
            }
        }
    }

    fn jamba(&self) -> Result<Map<String, Value>> {
        let mut map = self.start("jamba", "Jamba");
        self.attention(&mut map)?;
        let kv_heads = self.kv_heads()?;
        map.insert("num_key_value_heads".into(), json!(self.kv_head(&kv_heads)?));
        let marked: Vec<bool> = kv_heads.iter().map(|&n| n > 0).collect();
        let [period, offset] = self.period("attention", &marked)?;
        map.insert("attn_layer_period".into(), json!(period));
        map.insert("attn_layer_offset".into(), json!(offset));
        let has_router = |idx: usize| self.has(&format!("blk.{idx}.ffn_gate_inp.weight"));
        let marked: Vec<bool> = (0..kv_heads.len()).map(has_router).collect();
        let [period, offset] = self.period("experts", &marked)?;
        map.insert("expert_layer_period".into(), json!(period));
        map.insert("expert_layer_offset".into(), json!(offset));
        let n_expert = self.size_opt("expert_count")?.filter(|_| marked.contains(&true));
        map.insert("num_experts".into(), json!(n_expert.unwrap_or(1)));
        map.insert(
            "num_experts_per_tok".into(),
            json!(self.size_opt("expert_used_count")?.unwrap_or(1)),
        );
        map.insert("intermediate_size".into(), json!(self.size("feed_forward_length")?));
        let (d_inner, d_model) = (self.size("ssm.inner_size")?, self.size("embedding_length")?);
        map.insert("mamba_expand".into(), json!(d_inner.checked_div(d_model).unwrap_or(0)));
        map.insert("mamba_d_state".into(), json!(self.size("ssm.state_size")?));
        map.insert("mamba_d_conv".into(), json!(self.size("ssm.conv_kernel")?));
        map.insert("mamba_dt_rank".into(), json!(self.size("ssm.time_step_rank")?));
        map.insert("use_mamba_kernels".into(), json!(false));
        Ok(map)
    }

    /// Keys of Mamba-2 inside a hybrid.
    fn hybrid_mamba2(&self, map: &mut Map<String, Value>) -> Result<()> {
        let (n_head, d_head, expand) = self.heads()?;
        map.insert("mamba_n_heads".into(), json!(n_head));
        map.insert("mamba_d_head".into(), json!(d_head));
        map.insert("mamba_expand".into(), json!(expand));
        map.insert("mamba_n_groups".into(), json!(self.size("ssm.group_count")?));
        map.insert("mamba_d_state".into(), json!(self.size("ssm.state_size")?));
        map.insert("mamba_d_conv".into(), json!(self.size("ssm.conv_kernel")?));
        map.insert("mamba_proj_bias".into(), json!(false));
        let conv_bias = |idx: usize| self.has(&format!("blk.{idx}.ssm_conv1d.bias"));
        let has_bias = (0..self.n_layer()?).any(conv_bias);
        map.insert("mamba_conv_bias".into(), json!(has_bias));
        Ok(())
    }

    fn granite(&self) -> Result<Map<String, Value>> {
        let mut map = self.start("granitemoehybrid", "GraniteMoeHybrid");
        self.attention(&mut map)?;
        self.hybrid_mamba2(&mut map)?;
        let kv_heads = self.kv_heads()?;
        map.insert("num_key_value_heads".into(), json!(self.kv_head(&kv_heads)?));
        let kind = |n: &usize| if *n > 0 { "attention" } else { "mamba" };
        map.insert("layer_types".into(), json!(kv_heads.iter().map(kind).collect::<Vec<_>>()));
        let rope = self.gguf.bool(&self.key("rope.scaling.finetuned"))?.unwrap_or(true);
        let kind = if rope { "rope" } else { "nope" };
        map.insert("position_embedding_type".into(), json!(kind));
        for (key, name) in [
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
            ("logit_scale", "logits_scaling"),
        ] {
            let value = self.float_opt(key)?.filter(|&x| x != 0.0).unwrap_or(1.0);
            map.insert(name.into(), number(value));
        }
        let d_head = map.get("head_dim").and_then(Value::as_f64).unwrap_or(1.0);
        let scale = self.float_opt("attention.scale")?.filter(|&x| x != 0.0);
        map.insert("attention_multiplier".into(), number(scale.unwrap_or(d_head.powf(-0.5))));
        let attention = kv_heads.iter().position(|&n| n > 0).unwrap_or(0);
        let bias = self.has(&format!("blk.{attention}.attn_q.bias"));
        map.insert("attention_bias".into(), json!(bias));
        let n_expert = self.size_opt("expert_count")?.unwrap_or(0);
        let d_ff = self.size("feed_forward_length")?;
        map.insert("num_local_experts".into(), json!(n_expert));
        map.insert(
            "num_experts_per_tok".into(),
            json!(self.size_opt("expert_used_count")?.unwrap_or(0)),
        );
        map.insert("intermediate_size".into(), json!(d_ff));
        let shared = match n_expert {
            0 => d_ff,
            _ => self.size("expert_shared_feed_forward_length")?,
        };
        map.insert("shared_intermediate_size".into(), json!(shared));
        Ok(map)
    }

    fn falcon(&self) -> Result<Map<String, Value>> {
        let mut map = self.start("falcon_h1", "FalconH1");
        self.attention(&mut map)?;
        self.hybrid_mamba2(&mut map)?;
        let n_kv_head = self.size("attention.head_count_kv")?;
        map.insert("num_key_value_heads".into(), json!(n_kv_head));
        map.insert("mamba_d_ssm".into(), json!(self.size("ssm.inner_size")?));
        map.insert("intermediate_size".into(), json!(self.size("feed_forward_length")?));
        map.insert("mamba_rms_norm".into(), json!(self.has("blk.0.ssm_norm.weight")));
        map.insert("mamba_norm_before_gate".into(), json!(false));
        map.insert("attention_bias".into(), json!(self.has("blk.0.attn_q.bias")));
        map.insert("mlp_bias".into(), json!(self.has("blk.0.ffn_gate.bias")));
        map.insert("projectors_bias".into(), json!(false));
        Ok(map)
    }
}
