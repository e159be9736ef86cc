//! The metadata of a GGUF file, from a config.

use super::Arch;
use crate::files::gguf::Item;
use crate::model::config::*;
use crate::ops::rope::RopeScaling;

/// What a file says besides its tensors, tokenizer and name.
pub struct Description {
    pub metadata: Vec<(String, Item)>,
    /// Factors of the rotary frequencies, for a tensor of their own.
    pub frequencies: Option<Vec<f32>>,
}

/// Context length of models that have none, as llama.cpp's converter writes it.
const N_CTX_ENDLESS: usize = 1 << 20;

/// Describes a config of this architecture.
pub fn describe(config: &Config, arch: Arch) -> Description {
    let mut list = List { arch, metadata: Vec::new() };
    let layers = &config.layers;
    list.size("block_count", layers.len());
    list.size("vocab_size", config.n_vocab);
    list.size("embedding_length", config.d_model);
    list.float("attention.layer_norm_rms_epsilon", config.eps);
    let attention = layers.iter().find_map(|layer| layer.mixer.attention());
    let mut frequencies = None;
    match attention {
        Some(c) => frequencies = list.attention(config, c),
        None => {
            list.size("context_length", N_CTX_ENDLESS);
            list.size("attention.head_count", 0);
        }
    }
    list.feed_forward(config);
    list.recurrent(config);
    if arch == Arch::GraniteHybrid {
        list.float("embedding_scale", config.embed_scale);
        list.float("residual_scale", layers.first().map_or(1.0, |layer| layer.residual_scale));
        list.float("logit_scale", 1.0 / config.logit_scale);
    }
    Description { metadata: list.metadata, frequencies }
}

struct List {
    arch: Arch,
    metadata: Vec<(String, Item)>,
}

impl List {
    fn put(&mut self, key: &str, item: Item) {
        self.metadata.push((format!("{}.{key}", self.arch.name()), item));
    }

    fn size(&mut self, key: &str, size: usize) {
        // `Config::validate` bounds every size far below.
        self.put(key, Item::U32(u32::try_from(size).unwrap_or(u32::MAX)));
    }

    fn float(&mut self, key: &str, value: f32) {
        self.put(key, Item::F32(value));
    }

    /// Returns the factors of rotary frequencies that only a tensor can say.
    fn attention(&mut self, config: &Config, c: &AttentionConfig) -> Option<Vec<f32>> {
        let (n_head, n_kv_head, d_head) = (c.dims.n_head, c.dims.n_kv_head, c.dims.d_head);
        let has_rope = c.rope.is_some();
        let n_ctx = config.n_ctx.filter(|_| has_rope || self.arch == Arch::Jamba);
        self.size("context_length", n_ctx.unwrap_or(N_CTX_ENDLESS));
        self.size("attention.head_count", n_head);
        if matches!(self.arch, Arch::Jamba | Arch::GraniteHybrid) {
            let of_layer = |layer: &LayerConfig| match &layer.mixer {
                MixerConfig::Attention(c) => c.dims.n_kv_head as i32,
                _ => 0,
            };
            let list = config.layers.iter().map(of_layer).collect();
            self.put("attention.head_count_kv", Item::I32s(list));
        } else {
            self.size("attention.head_count_kv", n_kv_head);
        }
        if n_head * d_head != config.d_model || matches!(self.arch, Arch::Qwen3 | Arch::FalconH1) {
            self.size("attention.key_length", d_head);
            self.size("attention.value_length", d_head);
        }
        if self.arch == Arch::GraniteHybrid {
            self.put("rope.scaling.finetuned", Item::Bool(has_rope));
        }
        if c.dims.scale != (d_head as f64).powf(-0.5) as f32 || self.arch == Arch::GraniteHybrid {
            self.float("attention.scale", c.dims.scale);
        }
        c.rope.as_ref().and_then(|rope| self.rope(rope))
    }

    fn rope(&mut self, rope: &Rope) -> Option<Vec<f32>> {
        self.size("rope.dimension_count", rope.d_rotary);
        self.float("rope.freq_base", rope.base as f32);
        match rope.scaling {
            RopeScaling::None => None,
            RopeScaling::Linear { factor } => {
                self.put("rope.scaling.type", Item::Str("linear".into()));
                self.float("rope.scaling.factor", factor as f32);
                None
            }
            RopeScaling::Yarn { factor, n_ctx_orig, beta_fast, beta_slow, .. } => {
                self.put("rope.scaling.type", Item::Str("yarn".into()));
                self.float("rope.scaling.factor", factor as f32);
                self.size("rope.scaling.original_context_length", n_ctx_orig);
                self.float("rope.scaling.yarn_beta_fast", beta_fast as f32);
                self.float("rope.scaling.yarn_beta_slow", beta_slow as f32);
                None
            }
            RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => {
                let plain = Rope { scaling: RopeScaling::None, ..rope.clone() }.table();
                let table = rope.table();
                let pairs = plain.frequencies().iter().zip(table.frequencies());
                Some(pairs.map(|(plain, scaled)| plain / scaled).collect())
            }
        }
    }

    fn feed_forward(&mut self, config: &Config) {
        let layers = config.layers.iter().map(|layer| &layer.feed_forward);
        let experts = layers.clone().find_map(|ff| match ff {
            FeedForwardConfig::Experts(c) => Some(c),
            _ => None,
        });
        let mut layers = layers;
        let dense = layers.find_map(|ff| match ff {
            FeedForwardConfig::Dense(c) => Some(c.d_ff),
            _ => None,
        });
        let Some(c) = experts else {
            return self.size("feed_forward_length", dense.unwrap_or(0));
        };
        self.size("expert_count", c.n_expert);
        self.size("expert_used_count", c.router.n_used);
        self.size("feed_forward_length", dense.unwrap_or(c.d_ff));
        if self.arch == Arch::Qwen2Moe {
            self.size("expert_feed_forward_length", c.d_ff);
        }
        if let Some(shared) = &c.shared {
            self.size("expert_shared_feed_forward_length", shared.d_ff);
        }
    }

    fn recurrent(&mut self, config: &Config) {
        let found = config.layers.iter().find_map(|layer| match &layer.mixer {
            MixerConfig::Mamba1(c) => Some((c.d_conv, c.d_inner, c.d_state, c.delta_rank, None)),
            MixerConfig::Mamba2(c) | MixerConfig::Parallel(c, _) => {
                Some((c.d_conv, c.d_inner(), c.d_state, c.n_head, Some(c.n_group)))
            }
            _ => None,
        });
        let Some((d_conv, d_inner, d_state, rank, n_group)) = found else { return };
        self.size("ssm.conv_kernel", d_conv);
        self.size("ssm.inner_size", d_inner);
        self.size("ssm.state_size", d_state);
        self.size("ssm.time_step_rank", rank);
        if let Some(n_group) = n_group {
            self.size("ssm.group_count", n_group);
        }
        if self.arch == Arch::Mamba {
            let normed = config.layers.iter().any(|layer| match &layer.mixer {
                MixerConfig::Mamba1(c) => c.inner_norm != InnerNorm::None,
                _ => false,
            });
            self.put("ssm.dt_b_c_rms", Item::Bool(normed));
        }
    }
}
