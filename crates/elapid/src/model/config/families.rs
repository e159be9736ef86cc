//! A config.json, or the metadata of a GGUF file, as a list of layers: by the facts of its family.
//! Experts are in `experts.rs`, rotary positions in `rope.rs`.

use super::family::{Facts, FeedForwards, Mixers, Windows};
use super::keys::Keys;
use super::*;
use crate::model::mixers::OWN;
use crate::ops::gated_norm::Order;

pub(super) fn config(family: Family, keys: &Keys) -> Result<Config> {
    let facts = family.facts();
    let (reader, names) = (Reader { keys, facts }, &facts.names);
    let is_mamba = !matches!(facts.mixers, Mixers::Attention | Mixers::Own);
    let (activation, _) = reader.activation("dense")?;
    if is_mamba && activation != Kind::Silu {
        return Err(keys.wrong("hidden_act", format!("{activation:?} in a Mamba block")));
    }
    let rounded = keys.size_or("vocab_multiple", 1)?.max(1);
    let n_vocab = keys.size("vocab_size")?.next_multiple_of(rounded);
    let n_layer = match facts.mixers {
        Mixers::Own => own::n_layer(keys)?,
        _ => keys.size("layers")?,
    };
    if n_layer > check::N_LAYER_MAX {
        return Err(keys.wrong("layers", format!("{n_layer} is out of range")));
    }
    let factor = keys.float_or("logit_scale", 1.0)?;
    let logit_scale = if facts.divides_logits { 1.0 / factor } else { factor };
    if facts.divides_logits && (!logit_scale.is_finite() || logit_scale == 0.0) {
        return Err(keys.wrong("logit_scale", format!("{factor} is no divisor")));
    }
    let mut config = Config {
        family,
        n_vocab,
        d_model: keys.size("d_model")?,
        n_ctx: keys.size_opt("n_ctx")?,
        layers: Vec::new(),
        tied: keys.bool_or("tied", false)?,
        eps: keys.float_or("eps", 1e-6)?,
        residual_scale: keys.float_or("residual_scale", 1.0)?,
        embed_scale: keys.float_or("embed_scale", 1.0)?,
        logit_scale,
        balance_scale: keys.float_or("balance_scale", 0.0)?,
        init_std: keys.float_or("init_std", 0.02)?,
        fresh: facts.fresh,
        embed_name: names.embed.into(),
        norm_name: names.norm.into(),
    };
    for idx in 0..n_layer {
        let at = format!("{}.{idx}", names.layers);
        let (mixer, feed_forward) = (reader.mixer(idx, &at, &config)?, reader.second(idx, &at)?);
        let feed_forward_norm = match feed_forward {
            FeedForwardConfig::None => String::new(),
            _ => format!("{at}.{}.weight", names.feed_forward_norm),
        };
        let mixer_norm = format!("{at}.{}.weight", names.mixer_norm);
        let layer = LayerConfig { mixer_norm, mixer, feed_forward_norm, feed_forward };
        config.layers.push(layer);
    }
    Ok(config)
}

pub(crate) struct Reader<'a> {
    pub(crate) keys: &'a Keys,
    pub(super) facts: &'static Facts,
}

impl Reader<'_> {
    fn mixer(&self, idx: usize, at: &str, config: &Config) -> Result<MixerConfig> {
        let keys = self.keys;
        let or = |is_attention: bool, other| if is_attention { "attention" } else { other };
        let kind = match self.facts.mixers {
            Mixers::Mamba1 => "mamba1",
            Mixers::Mamba2 => "mamba2",
            Mixers::Mamba3 => "mamba3",
            Mixers::Attention => "attention",
            Mixers::Periodic => or(self.is_periodic(idx, "attn", [8, 4])?, "mamba1"),
            Mixers::Listed => {
                let list = keys.sizes("attn_layer_indices")?.unwrap_or_default();
                or(list.contains(&idx), "mamba2")
            }
            // Transformers 5 renamed the kinds.
            Mixers::Typed => match keys.string_at("layer_types", idx)? {
                Some("attention" | "full_attention") => "attention",
                Some("mamba" | "linear_attention") | None => "mamba2",
                Some(other) => {
                    let problem = format!("holds \"{other}\"; known are mamba, attention");
                    return Err(keys.wrong("layer_types", problem));
                }
            },
            Mixers::Named => mamba_ssm::kind(keys, idx)?,
            Mixers::Own => &own::kinds(keys, idx)?[0],
            Mixers::Parallel => {
                let mamba = self.mamba2(at, config)?;
                return Ok(MixerConfig::Parallel(mamba, self.attention(idx, at, config)?));
            }
        };
        let found = OWN.iter().find(|own| own.name == kind).ok_or_else(|| {
            let known: Vec<&str> = OWN.iter().map(|own| own.name).collect();
            let problem = format!("holds a mixer \"{kind}\"; known are {}", known.join(", "));
            keys.wrong("layers", problem)
        });
        (found?.read)(self, idx, at, config)
    }

    /// Whether a layer is one of those that come once in a period.
    pub(super) fn is_periodic(&self, idx: usize, what: &str, default: [usize; 2]) -> Result<bool> {
        let period = self.keys.size_or(&format!("{what}_layer_period"), default[0])?;
        let key = format!("{what}_layer_offset");
        let offset = self.keys.size_or(&key, default[1])?;
        match offset < period {
            true => Ok(idx % period == offset),
            false => {
                Err(self.keys.wrong(&key, format!("{offset} is not below the period, {period}")))
            }
        }
    }

    /// The rate of decay of Mamba-3: mamba_ssm has changed it since others took it over.
    pub(crate) fn usual_decay(&self) -> &'static str {
        if self.facts.mixers == Mixers::Mamba3 { "softplus" } else { "heavy_tail" }
    }

    fn delta_init(&self, part: &str) -> Result<DeltaInit> {
        let default = DeltaInit::default();
        Ok(DeltaInit {
            min: self.keys.float_or(&format!("{part}.delta_min"), default.min)?,
            max: self.keys.float_or(&format!("{part}.delta_max"), default.max)?,
            floor: self.keys.float_or("mamba.delta_floor", default.floor)?,
        })
    }

    pub(crate) fn mamba1(&self, at: &str, config: &Config) -> Result<Mamba1Config> {
        let (keys, d_model) = (self.keys, config.d_model);
        let d_inner = match keys.size_opt("mamba1.d_inner")? {
            Some(d_inner) => d_inner,
            None => d_model.saturating_mul(keys.size_or("mamba1.factor", 2)?),
        };
        let inner_norm = match (self.facts.mixers, keys.float_opt("mamba1.norm_eps")?) {
            (Mixers::Periodic, _) => InnerNorm::Weighted { eps: config.eps },
            (_, Some(eps)) => InnerNorm::Plain { eps: eps as f32 },
            (_, None) => InnerNorm::None,
        };
        Ok(Mamba1Config {
            prefix: format!("{at}.{}", self.facts.names.mamba),
            d_inner,
            d_state: keys.size_or("mamba1.d_state", 16)?,
            d_conv: keys.size_or("mamba1.d_conv", 4)?,
            delta_rank: keys.size_or_auto("mamba1.delta_rank")?.unwrap_or(d_model.div_ceil(16)),
            proj_bias: keys.bool_or("mamba.bias", false)?,
            conv_bias: keys.bool_or("mamba.conv_bias", true)?,
            inner_norm,
            delta_init: self.delta_init("mamba1")?,
        })
    }

    pub(crate) fn mamba2(&self, at: &str, config: &Config) -> Result<Mamba2Config> {
        let keys = self.keys;
        let expanded = config.d_model.saturating_mul(keys.size_or("mamba2.factor", 2)?);
        let d_inner = keys.size_or_null("mamba2.d_inner")?.unwrap_or(expanded);
        // Most families say how many heads there are, the others how wide they are.
        let (n_head, d_head) = if keys.has_parts() {
            let d_head = keys.size_or("mamba2.d_head", 64)?;
            (d_inner / d_head.max(1), d_head)
        } else {
            let n_head = keys.size_or("mamba2.expand", 128)?;
            (n_head, keys.size_or_auto("mamba2.d_head")?.unwrap_or(d_inner / n_head.max(1)))
        };
        if n_head.checked_mul(d_head) != Some(d_inner) {
            let problem = format!("{n_head} heads of {d_head} do not fill {d_inner} channels");
            return Err(keys.wrong("mamba2.expand", problem));
        }
        let n_group = keys.size_or("mamba2.n_group", 1)?;
        let norm_first = keys.bool_or("mamba.norm_first", false)?;
        let norm = keys.bool_or("mamba.norm", true)?.then_some(GatedNorm {
            n_group: if self.facts.norms_whole { 1 } else { n_group },
            eps: config.eps,
            order: if norm_first { Order::NormFirst } else { Order::GateFirst },
        });
        let delta_limit = match keys.floats("time_step_limit")?.as_deref() {
            None => (0.0, f32::INFINITY),
            Some(&[low, high]) if low <= high => (low, high),
            Some(other) => {
                let problem = format!("is {other:?}, not [low, high]");
                return Err(keys.wrong("time_step_limit", problem));
            }
        };
        let in_bias = keys.bool_or("mamba.bias", false)?;
        Ok(Mamba2Config {
            prefix: format!("{at}.{}", self.facts.names.mamba),
            n_head,
            d_head,
            n_group,
            d_state: keys.size_or("mamba2.d_state", 256)?,
            d_conv: keys.size_or("mamba2.d_conv", 4)?,
            in_bias,
            out_bias: keys.bool_or("mamba.out_bias", in_bias)?,
            conv_bias: keys.bool_or("mamba.conv_bias", true)?,
            norm,
            delta_limit,
            scales: Mamba2Scales {
                input: keys.float_or("mamba2.in_scale", 1.0)?,
                parts: self.factors("mamba2.scales")?,
                output: keys.float_or("mamba2.out_scale", 1.0)?,
            },
            delta_init: self.delta_init("mamba2")?,
        })
    }

    /// A list of `N` factors, which are 1 where it is absent.
    fn factors<const N: usize>(&self, key: &str) -> Result<[f32; N]> {
        let list = self.keys.floats(key)?.unwrap_or_else(|| vec![1.0; N]);
        let wrong = |_| self.keys.wrong(key, format!("does not hold {N} numbers"));
        list.try_into().map_err(wrong)
    }

    /// Grouped heads of any family that has attention.
    pub(crate) fn attention(
        &self,
        idx: usize,
        at: &str,
        config: &Config,
    ) -> Result<AttentionConfig> {
        let (keys, d_model) = (self.keys, config.d_model);
        let n_head = match keys.size_opt("attention.n_head")? {
            None if keys.is_own() => (d_model / 64).max(1),
            _ => keys.size("attention.n_head")?,
        };
        let d_head = match keys.size_opt("attention.d_head")? {
            Some(d_head) => d_head,
            None if keys.is_own() => d_model / n_head.max(1),
            None if n_head > 0 && d_model.is_multiple_of(n_head) => d_model / n_head,
            None => {
                let problem = format!("{n_head} do not divide a width of {d_model}");
                return Err(keys.wrong("attention.n_head", problem));
            }
        };
        let scale = keys.float_opt("attention.scale")?.unwrap_or((d_head as f64).powf(-0.5));
        // Null is as many as heads everywhere, absence only where the class says so.
        let n_kv_head = keys.size_or_null("attention.n_kv_head")?.unwrap_or(n_head);
        let (scale, window) = (scale as f32, self.window(idx)?);
        Ok(AttentionConfig {
            prefix: format!("{at}.{}", self.facts.names.attention),
            dims: Attention { n_head, n_kv_head, d_head, scale, window },
            qkv_bias: keys.bool_or("attention.qkv_bias", false)?,
            out_bias: keys.bool_or("attention.out_bias", false)?,
            qk_norm: match keys.bool_or("attention.qk_norm", false)? {
                true => QkNorm::Head,
                false => self.facts.qk_norm,
            },
            qk_eps: config.eps,
            fused: self.facts.fused_attention,
            clip: keys.float_opt("attention.clip")?.map(|clip| clip as f32),
            rope: self.rope(d_head)?,
            in_scale: keys.float_or("attention.in_scale", 1.0)?,
            key_scale: keys.float_or("attention.key_scale", 1.0)?,
            out_scale: keys.float_or("attention.out_scale", 1.0)?,
        })
    }

    fn window(&self, idx: usize) -> Result<Option<usize>> {
        let (keys, windows) = (self.keys, self.facts.windows);
        let window = keys.size_or_null("attention.window")?;
        let slides = match windows {
            Windows::None => false,
            Windows::All => true,
            _ if !keys.bool_or("attention.slides", false)? => false,
            _ => match keys.string_at("layer_types", idx)? {
                Some("sliding_attention") => true,
                Some("full_attention") => false,
                Some(other) => {
                    let known = "known are full_attention, sliding_attention";
                    return Err(keys.wrong("layer_types", format!("holds \"{other}\"; {known}")));
                }
                None => {
                    let limit = keys.size_or("max_window_layers", 28)?;
                    let is_last = windows == Windows::Last;
                    if is_last { idx >= limit } else { idx < limit && idx.is_multiple_of(2) }
                }
            },
        };
        Ok(window.filter(|_| slides))
    }

    /// The feed-forward of layer `idx`.
    fn second(&self, idx: usize, at: &str) -> Result<FeedForwardConfig> {
        match &self.facts.feed_forwards {
            FeedForwards::None => Ok(FeedForwardConfig::None),
            FeedForwards::Rounded if self.keys.size_or("dense.d_ff", 0)? == 0 => {
                Ok(FeedForwardConfig::None)
            }
            FeedForwards::Experts(facts) if self.has_experts(idx, &facts.layers)? => {
                self.experts(at, facts).map(FeedForwardConfig::Experts)
            }
            _ if self.keys.is_own() && own::feed_forward(self.keys, idx)? == "none" => {
                Ok(FeedForwardConfig::None)
            }
            _ => {
                let prefix = format!("{at}.{}", self.facts.names.dense);
                let mut d_ff = self.width("dense.d_ff")?;
                if let FeedForwards::Rounded = self.facts.feed_forwards {
                    d_ff = d_ff.next_multiple_of(128);
                }
                Ok(FeedForwardConfig::Dense(self.dense(prefix, d_ff, "dense")?))
            }
        }
    }

    /// An inner width, which our own config may omit.
    pub(super) fn width(&self, key: &str) -> Result<usize> {
        match self.keys.size_opt(key)? {
            None if self.keys.is_own() => own::d_ff(self.keys, key),
            _ => self.keys.size(key),
        }
    }

    /// `part` is `dense` or `experts`.
    pub(super) fn activation(&self, part: &str) -> Result<(Kind, DenseForm)> {
        let form = self.facts.dense_form.clone();
        if self.keys.is_own() {
            let (kind, is_gated) = own::activation(self.keys, part)?;
            return Ok((kind, if is_gated { form } else { DenseForm::Plain(["up", "down"]) }));
        }
        let kind = match self.keys.str_or("hidden_act", "silu")? {
            "silu" | "swish" => Kind::Silu,
            "gelu_new" | "gelu_pytorch_tanh" => Kind::Gelu,
            "relu" => Kind::Relu,
            other => {
                let known = "known are silu, gelu_new, gelu_pytorch_tanh, relu";
                return Err(self.keys.wrong("hidden_act", format!("is \"{other}\"; {known}")));
            }
        };
        Ok((kind, form))
    }

    pub(super) fn dense(&self, prefix: String, d_ff: usize, part: &str) -> Result<DenseConfig> {
        let [gate_scale, out_scale] = self.factors("dense.scales")?;
        let (activation, form) = self.activation(part)?;
        let bias = self.keys.bool_or("dense.bias", false)?;
        Ok(DenseConfig { prefix, d_ff, activation, form, bias, gate_scale, out_scale })
    }
}
