//! The config.json of each Hugging Face family, as a list of layers: keys, defaults, schedules and
//! tensor names. Their experts are in `experts.rs`, their rotary positions in `rope.rs`.

use super::keys::Keys;
use super::*;
use crate::ops::gated_norm::Order;

pub(super) const LLAMA_FF: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Reads the config of one family.
pub(super) fn config(family: &str, keys: &Keys) -> Result<Config> {
    let reader = Reader { keys, family };
    match family {
        "mamba" | "falcon_mamba" => reader.mamba(),
        "mamba2" => reader.mamba2(),
        "llama" | "mistral" | "qwen2" | "qwen3" | "mixtral" | "qwen2_moe" | "olmoe" | "dots1" => {
            reader.llama()
        }
        "jamba" | "bamba" | "granitemoehybrid" | "falcon_h1" => reader.hybrid(),
        _ => Err(Error::UnknownFamily {
            file: keys.file().into(),
            family: family.into(),
            supported: super::FAMILIES.join(", "),
        }),
    }
}

/// The keys of one family's config.
pub(super) struct Reader<'a> {
    pub(super) keys: &'a Keys,
    pub(super) family: &'a str,
}

impl Reader<'_> {
    /// What all families share; `layers` and names are filled in by the caller.
    fn base(&self, tied_default: bool) -> Result<Config> {
        let keys = self.keys;
        Ok(Config {
            family: self.family.into(),
            n_vocab: keys.size("vocab_size")?,
            d_model: keys.size("hidden_size")?,
            n_ctx: keys.size_opt("max_position_embeddings")?,
            layers: Vec::new(),
            tied: keys.bool_or("tie_word_embeddings", tied_default)?,
            eps: 0.0,
            embed_scale: 1.0,
            logit_scale: 1.0,
            balance_scale: 0.0,
            init_std: keys.float_or("initializer_range", 0.02)?,
            embed_name: "model.embed_tokens.weight".into(),
            norm_name: "model.norm.weight".into(),
        })
    }

    fn n_layer(&self) -> Result<usize> {
        let n_layer = self.keys.size("num_hidden_layers")?;
        if n_layer > check::N_LAYER_MAX {
            return Err(self.keys.wrong("num_hidden_layers", format!("{n_layer} is out of range")));
        }
        Ok(n_layer)
    }

    fn delta_init(&self) -> Result<DeltaInit> {
        let default = DeltaInit::default();
        Ok(DeltaInit {
            min: self.keys.float_or("time_step_min", default.min)?,
            max: self.keys.float_or("time_step_max", default.max)?,
            floor: self.keys.float_or("time_step_floor", default.floor)?,
        })
    }

    /// Only SiLU is in use among these families, under two names.
    pub(super) fn activation(&self) -> Result<Kind> {
        match self.keys.str_or("hidden_act", "silu")? {
            "silu" | "swish" => Ok(Kind::Silu),
            "gelu_new" | "gelu_pytorch_tanh" => Ok(Kind::Gelu),
            "relu" => Ok(Kind::Relu),
            other => Err(self.keys.wrong(
                "hidden_act",
                format!("is \"{other}\"; known are silu, gelu_new, gelu_pytorch_tanh, relu"),
            )),
        }
    }

    fn mamba_act(&self) -> Result<()> {
        match self.activation()? {
            Kind::Silu => Ok(()),
            other => Err(self.keys.wrong("hidden_act", format!("{other:?} in a Mamba block"))),
        }
    }

    fn backbone(&self, tied_default: bool) -> Result<Config> {
        let mut config = self.base(tied_default)?;
        config.init_std = self.keys.float_or("initializer_range", 0.1)?;
        config.eps = self.keys.float_or("layer_norm_epsilon", 1e-5)?;
        config.embed_name = "backbone.embeddings.weight".into();
        config.norm_name = "backbone.norm_f.weight".into();
        Ok(config)
    }

    /// A layer of a pure Mamba model.
    fn backbone_layer(&self, idx: usize, eps: f32, mixer: MixerConfig) -> LayerConfig {
        LayerConfig {
            mixer_norm: format!("backbone.layers.{idx}.norm.weight"),
            mixer,
            feed_forward_norm: String::new(),
            feed_forward: FeedForwardConfig::None,
            eps,
            residual_scale: 1.0,
        }
    }

    fn mamba(&self) -> Result<Config> {
        let keys = self.keys;
        self.mamba_act()?;
        let mut config = self.backbone(true)?;
        let d_inner = match keys.size_opt("intermediate_size")? {
            Some(d_inner) => d_inner,
            None => config.d_model.saturating_mul(keys.size_or("expand", 2)?),
        };
        let inner_norm = match self.family {
            "falcon_mamba" => InnerNorm::Plain { eps: keys.float_or("mixer_rms_eps", 1e-6)? },
            _ => InnerNorm::None,
        };
        for idx in 0..self.n_layer()? {
            let mixer = MixerConfig::Mamba1(Mamba1Config {
                prefix: format!("backbone.layers.{idx}.mixer"),
                d_inner,
                d_state: keys.size_or("state_size", 16)?,
                d_conv: keys.size_or("conv_kernel", 4)?,
                delta_rank: self.delta_rank("time_step_rank", config.d_model)?,
                proj_bias: keys.bool_or("use_bias", false)?,
                conv_bias: keys.bool_or("use_conv_bias", true)?,
                inner_norm: inner_norm.clone(),
                delta_init: self.delta_init()?,
            });
            config.layers.push(self.backbone_layer(idx, config.eps, mixer));
        }
        Ok(config)
    }

    /// A number, or "auto" for a sixteenth of the width.
    fn delta_rank(&self, key: &str, d_model: usize) -> Result<usize> {
        if self.keys.get(key).is_some_and(|value| value == "auto") {
            return Ok(d_model.div_ceil(16));
        }
        self.keys.size_or(key, d_model.div_ceil(16))
    }

    fn delta_limit(&self) -> Result<(f32, f32)> {
        match self.keys.floats("time_step_limit")?.as_deref() {
            None => Ok((0.0, f32::INFINITY)),
            Some(&[low, high]) if low <= high => Ok((low, high)),
            Some(other) => {
                Err(self.keys.wrong("time_step_limit", format!("is {other:?}, not [low, high]")))
            }
        }
    }

    fn mamba2(&self) -> Result<Config> {
        let keys = self.keys;
        self.mamba_act()?;
        let mut config = self.backbone(false)?;
        let d_head = keys.size_or("head_dim", 64)?;
        let n_head = keys.size_or("num_heads", 128)?;
        let d_inner = config.d_model.saturating_mul(keys.size_or("expand", 2)?);
        if n_head.checked_mul(d_head) != Some(d_inner) {
            let problem = format!("{n_head} heads of {d_head} do not fill {d_inner} channels");
            return Err(keys.wrong("num_heads", problem));
        }
        let n_group = keys.size_or("n_groups", 8)?;
        for idx in 0..self.n_layer()? {
            let bias = keys.bool_or("use_bias", false)?;
            let mixer = MixerConfig::Mamba2(Mamba2Config {
                prefix: format!("backbone.layers.{idx}.mixer"),
                n_head,
                d_head,
                n_group,
                d_state: keys.size_or("state_size", 128)?,
                d_conv: keys.size_or("conv_kernel", 4)?,
                in_bias: bias,
                out_bias: bias,
                conv_bias: keys.bool_or("use_conv_bias", true)?,
                norm: Some(GatedNorm { n_group, eps: config.eps, order: Order::GateFirst }),
                delta_limit: self.delta_limit()?,
                scales: Mamba2Scales::default(),
                delta_init: self.delta_init()?,
            });
            config.layers.push(self.backbone_layer(idx, config.eps, mixer));
        }
        Ok(config)
    }

    fn llama(&self) -> Result<Config> {
        let keys = self.keys;
        let mut config = self.base(false)?;
        let eps_default = if matches!(self.family, "mixtral" | "olmoe") { 1e-5 } else { 1e-6 };
        config.eps = keys.float_or("rms_norm_eps", eps_default)?;
        if matches!(self.family, "mixtral" | "qwen2_moe" | "olmoe") {
            let default = if self.family == "olmoe" { 0.01 } else { 0.001 };
            config.balance_scale = keys.float_or("router_aux_loss_coef", default)?;
        }
        for idx in 0..self.n_layer()? {
            let at = format!("model.layers.{idx}");
            config.layers.push(LayerConfig {
                mixer_norm: format!("{at}.input_layernorm.weight"),
                mixer: MixerConfig::Attention(self.attention(idx, &config)?),
                feed_forward_norm: format!("{at}.post_attention_layernorm.weight"),
                feed_forward: self.llama_feed_forward(idx)?,
                eps: config.eps,
                residual_scale: 1.0,
            });
        }
        Ok(config)
    }

    /// Grouped heads of any family that has attention.
    fn attention(&self, idx: usize, config: &Config) -> Result<AttentionConfig> {
        let keys = self.keys;
        let n_head = keys.size("num_attention_heads")?;
        let n_kv_absent = match self.family {
            "mistral" | "mixtral" | "jamba" | "bamba" | "falcon_h1" => Some(8),
            "qwen2_moe" => Some(16),
            "qwen2" | "qwen3" | "dots1" => Some(32),
            _ => None,
        };
        let d_head = match keys.size_opt("head_dim")? {
            Some(d_head) => d_head,
            None if self.family == "qwen3" => 128,
            None if n_head > 0 && config.d_model.is_multiple_of(n_head) => config.d_model / n_head,
            None => {
                let problem = format!("{n_head} do not divide a width of {}", config.d_model);
                return Err(keys.wrong("num_attention_heads", problem));
            }
        };
        let bias = keys.bool_or("attention_bias", false)?;
        let qkv_bias = match self.family {
            "qwen2" => true,
            "qwen2_moe" => keys.bool_or("qkv_bias", true)?,
            _ => bias,
        };
        let qk_norm = match self.family {
            "qwen3" | "dots1" => QkNorm::Head,
            "olmoe" => QkNorm::Whole,
            _ => QkNorm::None,
        };
        let scale = match self.family {
            "granitemoehybrid" => keys.float_or("attention_multiplier", 1.0)?,
            _ => (d_head as f64).powf(-0.5) as f32,
        };
        // Null is as many as heads everywhere, absence only where the class says so.
        let n_kv_head = keys.size_or_null("num_key_value_heads", n_kv_absent)?.unwrap_or(n_head);
        let falcon = self.family == "falcon_h1";
        let factor = |key: &str| if falcon { keys.float_or(key, 1.0) } else { Ok(1.0) };
        Ok(AttentionConfig {
            prefix: format!("model.layers.{idx}.self_attn"),
            dims: Attention { n_head, n_kv_head, d_head, scale, window: self.window(idx)? },
            qkv_bias,
            out_bias: bias && !matches!(self.family, "qwen2" | "qwen2_moe"),
            qk_norm,
            qk_eps: config.eps,
            clip: match self.family {
                "olmoe" => keys.float_opt("clip_qkv")?.map(|clip| clip as f32),
                _ => None,
            },
            rope: self.rope(d_head)?,
            in_scale: factor("attention_in_multiplier")?,
            key_scale: factor("key_multiplier")?,
            out_scale: factor("attention_out_multiplier")?,
        })
    }

    /// The sliding window of layer `idx`, by the rules of each family.
    fn window(&self, idx: usize) -> Result<Option<usize>> {
        let keys = self.keys;
        let absent = match self.family {
            "mistral" | "qwen2" | "qwen3" | "qwen2_moe" | "dots1" => Some(4096),
            _ => None,
        };
        let window = keys.size_or_null("sliding_window", absent)?;
        let slides = match self.family {
            "mistral" | "mixtral" => true,
            "qwen2" | "qwen3" | "qwen2_moe" if !keys.bool_or("use_sliding_window", false)? => false,
            "qwen2" | "qwen3" | "qwen2_moe" | "dots1" => {
                match keys.string_at("layer_types", idx)? {
                    Some("sliding_attention") => true,
                    Some("full_attention") => false,
                    Some(other) => {
                        let known = "known are full_attention, sliding_attention";
                        return Err(
                            keys.wrong("layer_types", format!("holds \"{other}\"; {known}"))
                        );
                    }
                    None => self.slides_by_default(idx)?,
                }
            }
            _ => false,
        };
        Ok(window.filter(|_| slides))
    }

    /// Without `layer_types`: the last layers slide; in Qwen2-MoE every other one of the first.
    fn slides_by_default(&self, idx: usize) -> Result<bool> {
        let default = if self.family == "dots1" { 62 } else { 28 };
        let limit = self.keys.size_or("max_window_layers", default)?;
        Ok(match self.family {
            "qwen2_moe" => idx < limit && idx.is_multiple_of(2),
            _ => idx >= limit,
        })
    }

    pub(super) fn dense(&self, prefix: String, d_ff: usize, bias: bool) -> Result<DenseConfig> {
        Ok(DenseConfig {
            prefix,
            d_ff,
            activation: self.activation()?,
            form: DenseForm::Gated(LLAMA_FF),
            bias,
            gate_scale: 1.0,
            out_scale: 1.0,
        })
    }

    fn llama_feed_forward(&self, idx: usize) -> Result<FeedForwardConfig> {
        let keys = self.keys;
        let at = format!("model.layers.{idx}");
        let dense = |key: &str| {
            let bias = self.family == "llama" && keys.bool_or("mlp_bias", false)?;
            let dense = self.dense(format!("{at}.mlp"), keys.size(key)?, bias)?;
            Ok(FeedForwardConfig::Dense(dense))
        };
        let experts = match self.family {
            "mixtral" => self.mixtral_experts(&at)?,
            "qwen2_moe" => {
                let only_dense = keys.sizes("mlp_only_layers")?.unwrap_or_default();
                let every = keys.size_or("decoder_sparse_step", 1)?.max(1);
                let n_expert = keys.size_or("num_experts", 60)?;
                if only_dense.contains(&idx) || n_expert == 0 || !(idx + 1).is_multiple_of(every) {
                    return dense("intermediate_size");
                }
                self.qwen2_experts(&at, n_expert)?
            }
            "olmoe" => ExpertsConfig {
                d_ff: keys.size("intermediate_size")?,
                ..self.experts(
                    format!("{at}.mlp"),
                    keys.size_or("num_experts", 64)?,
                    keys.size_or("num_experts_per_tok", 8)?,
                )?
            },
            "dots1" if idx >= keys.size_or("first_k_dense_replace", 0)? => {
                self.dots1_experts(&at)?
            }
            _ => return dense("intermediate_size"),
        };
        Ok(FeedForwardConfig::Experts(experts))
    }

    fn hybrid(&self) -> Result<Config> {
        let keys = self.keys;
        self.mamba_act()?;
        let mut config = self.base(false)?;
        let granite = self.family == "granitemoehybrid";
        let eps_default = if matches!(self.family, "bamba" | "falcon_h1") { 1e-5 } else { 1e-6 };
        config.eps = keys.float_or("rms_norm_eps", eps_default)?;
        if !granite {
            config.norm_name = "model.final_layernorm.weight".into();
        }
        let mut residual_scale = 1.0;
        match self.family {
            "granitemoehybrid" => {
                config.embed_scale = keys.float_or("embedding_multiplier", 1.0)?;
                let scaling = keys.float_or("logits_scaling", 1.0)?;
                config.logit_scale = 1.0 / scaling;
                if !config.logit_scale.is_finite() || config.logit_scale == 0.0 {
                    return Err(keys.wrong("logits_scaling", format!("{scaling} is no divisor")));
                }
                config.balance_scale = keys.float_or("router_aux_loss_coef", 0.001)?;
                residual_scale = keys.float_or("residual_multiplier", 1.0)?;
            }
            "falcon_h1" => {
                config.embed_scale = keys.float_or("embedding_multiplier", 1.0)?;
                config.logit_scale = keys.float_or("lm_head_multiplier", 1.0)?;
            }
            "jamba" => config.balance_scale = keys.float_or("router_aux_loss_coef", 0.001)?,
            _ => {}
        }
        let second_norm = if granite { "post_attention_layernorm" } else { "pre_ff_layernorm" };
        for idx in 0..self.n_layer()? {
            let at = format!("model.layers.{idx}");
            config.layers.push(LayerConfig {
                mixer_norm: format!("{at}.input_layernorm.weight"),
                mixer: self.hybrid_mixer(idx, &config)?,
                feed_forward_norm: format!("{at}.{second_norm}.weight"),
                feed_forward: self.hybrid_feed_forward(idx)?,
                eps: config.eps,
                residual_scale,
            });
        }
        Ok(config)
    }

    fn hybrid_mixer(&self, idx: usize, config: &Config) -> Result<MixerConfig> {
        let keys = self.keys;
        let is_attention = match self.family {
            "jamba" => self.is_periodic(idx, "attn", 8, 4)?,
            "bamba" => keys.sizes("attn_layer_indices")?.unwrap_or_default().contains(&idx),
            "granitemoehybrid" => {
                // Transformers 5 renamed the kinds.
                match keys.string_at("layer_types", idx)? {
                    Some("attention" | "full_attention") => true,
                    Some("mamba" | "linear_attention") | None => false,
                    Some(other) => {
                        let problem = format!("holds \"{other}\"; known are mamba, attention");
                        return Err(keys.wrong("layer_types", problem));
                    }
                }
            }
            _ => {
                let mamba = self.hybrid_mamba2(idx, config)?;
                return Ok(MixerConfig::Parallel(mamba, self.attention(idx, config)?));
            }
        };
        if is_attention {
            return Ok(MixerConfig::Attention(self.attention(idx, config)?));
        }
        if self.family != "jamba" {
            return Ok(MixerConfig::Mamba2(self.hybrid_mamba2(idx, config)?));
        }
        Ok(MixerConfig::Mamba1(Mamba1Config {
            prefix: format!("model.layers.{idx}.mamba"),
            d_inner: config.d_model.saturating_mul(keys.size_or("mamba_expand", 2)?),
            d_state: keys.size_or("mamba_d_state", 16)?,
            d_conv: keys.size_or("mamba_d_conv", 4)?,
            delta_rank: self.delta_rank("mamba_dt_rank", config.d_model)?,
            proj_bias: keys.bool_or("mamba_proj_bias", false)?,
            conv_bias: keys.bool_or("mamba_conv_bias", true)?,
            inner_norm: InnerNorm::Weighted { eps: config.eps },
            delta_init: DeltaInit::default(),
        }))
    }

    /// Whether a layer of Jamba is one of those that come once in a period.
    fn is_periodic(&self, idx: usize, what: &str, period: usize, offset: usize) -> Result<bool> {
        let period = self.keys.size_or(&format!("{what}_layer_period"), period)?;
        let key = format!("{what}_layer_offset");
        let offset = self.keys.size_or(&key, offset)?;
        match offset < period {
            true => Ok(idx % period == offset),
            false => {
                Err(self.keys.wrong(&key, format!("{offset} is not below the period, {period}")))
            }
        }
    }

    fn hybrid_mamba2(&self, idx: usize, config: &Config) -> Result<Mamba2Config> {
        let keys = self.keys;
        let falcon = self.family == "falcon_h1";
        let expanded = config.d_model.saturating_mul(keys.size_or("mamba_expand", 2)?);
        let d_inner = match falcon {
            true => keys.size_or_null("mamba_d_ssm", Some(1024))?.unwrap_or(expanded),
            false => expanded,
        };
        let n_head = keys.size_or("mamba_n_heads", 128)?;
        let d_head = match keys.get("mamba_d_head") {
            Some(value) if value == "auto" => d_inner / n_head.max(1),
            None => d_inner / n_head.max(1),
            _ => keys.size("mamba_d_head")?,
        };
        if n_head.checked_mul(d_head) != Some(d_inner) {
            let problem = format!("{n_head} heads of {d_head} do not fill {d_inner} channels");
            return Err(keys.wrong("mamba_n_heads", problem));
        }
        let n_group = keys.size_or("mamba_n_groups", 1)?;
        let has_norm = !falcon || keys.bool_or("mamba_rms_norm", false)?;
        let norm_first = falcon && keys.bool_or("mamba_norm_before_gate", true)?;
        let norm = has_norm.then_some(GatedNorm {
            // The reference code of Bamba and Granite takes all of d_inner, whatever the groups.
            n_group: if falcon { n_group } else { 1 },
            eps: config.eps,
            order: if norm_first { Order::NormFirst } else { Order::GateFirst },
        });
        let proj_bias = keys.bool_or("mamba_proj_bias", false)?;
        let out_bias = if falcon { keys.bool_or("projectors_bias", false)? } else { proj_bias };
        Ok(Mamba2Config {
            prefix: format!("model.layers.{idx}.mamba"),
            n_head,
            d_head,
            n_group,
            d_state: keys.size_or("mamba_d_state", 256)?,
            d_conv: keys.size_or("mamba_d_conv", 4)?,
            in_bias: proj_bias,
            out_bias,
            conv_bias: keys.bool_or("mamba_conv_bias", true)?,
            norm,
            delta_limit: self.delta_limit()?,
            scales: if falcon { self.mamba2_scales()? } else { Mamba2Scales::default() },
            delta_init: DeltaInit::default(),
        })
    }

    fn mamba2_scales(&self) -> Result<Mamba2Scales> {
        let keys = self.keys;
        let parts = keys.floats("ssm_multipliers")?.unwrap_or_else(|| vec![1.0; 5]);
        let parts = <[f32; 5]>::try_from(parts.as_slice());
        let wrong = |_| keys.wrong("ssm_multipliers", "does not hold five numbers");
        Ok(Mamba2Scales {
            input: keys.float_or("ssm_in_multiplier", 1.0)?,
            parts: parts.map_err(wrong)?,
            output: keys.float_or("ssm_out_multiplier", 1.0)?,
        })
    }

    fn hybrid_feed_forward(&self, idx: usize) -> Result<FeedForwardConfig> {
        let keys = self.keys;
        let at = format!("model.layers.{idx}");
        let d_ff = keys.size("intermediate_size")?;
        if self.family == "granitemoehybrid" {
            return self.granite_feed_forward(&at);
        }
        let prefix = format!("{at}.feed_forward");
        if self.family == "jamba" {
            let n_expert = keys.size_or("num_experts", 16)?;
            if self.is_periodic(idx, "expert", 2, 1)? && n_expert > 1 {
                let router_name = format!("{prefix}.router.weight");
                let n_used = keys.size_or("num_experts_per_tok", 2)?;
                let base = self.experts(prefix, n_expert, n_used)?;
                let router = Router { normalise: false, ..base.router };
                return Ok(FeedForwardConfig::Experts(ExpertsConfig {
                    d_ff,
                    router,
                    router_name,
                    ..base
                }));
            }
            return Ok(FeedForwardConfig::Dense(self.dense(prefix, d_ff, false)?));
        }
        let mut dense = self.dense(prefix, d_ff, keys.bool_or("mlp_bias", false)?)?;
        if self.family == "falcon_h1" {
            let scales = keys.floats("mlp_multipliers")?.unwrap_or_else(|| vec![1.0, 1.0]);
            let &[gate, out] = scales.as_slice() else {
                return Err(keys.wrong("mlp_multipliers", "does not hold two numbers"));
            };
            (dense.gate_scale, dense.out_scale) = (gate, out);
        }
        Ok(FeedForwardConfig::Dense(dense))
    }
}
