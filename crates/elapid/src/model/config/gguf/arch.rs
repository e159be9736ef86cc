//! Which architecture of llama.cpp computes what a config says.
//!
//! The choice looks at layers, not at the name of the family, so that a model of our own that is
//! built like a known one is written as that one.

use crate::model::config::*;
use crate::ops::gated_norm::Order;
use crate::ops::rope::RopeScaling;
use crate::ops::router::Score;

/// An architecture we read and write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // named as llama.cpp names them
pub enum Arch {
    Llama,
    Qwen2,
    Qwen3,
    Qwen2Moe,
    Mamba,
    Mamba2,
    Jamba,
    GraniteHybrid,
    FalconH1,
}

impl Arch {
    pub const ALL: [Arch; 9] = [
        Arch::Llama,
        Arch::Qwen2,
        Arch::Qwen3,
        Arch::Qwen2Moe,
        Arch::Mamba,
        Arch::Mamba2,
        Arch::Jamba,
        Arch::GraniteHybrid,
        Arch::FalconH1,
    ];

    /// `general.architecture`.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
            Arch::Qwen2Moe => "qwen2moe",
            Arch::Mamba => "mamba",
            Arch::Mamba2 => "mamba2",
            Arch::Jamba => "jamba",
            Arch::GraniteHybrid => "granitehybrid",
            Arch::FalconH1 => "falcon-h1",
        }
    }

    /// The one of this name.
    pub fn from_name(name: &str) -> Option<Arch> {
        Arch::ALL.into_iter().find(|arch| arch.name() == name)
    }

    /// Whether RoPE turns neighbours, so that rows of queries and keys are stored in pairs.
    pub(crate) fn pairs_rows(self) -> bool {
        matches!(self, Arch::Llama | Arch::GraniteHybrid)
    }

    /// The architecture of a config.
    pub fn of(config: &Config) -> Result<Arch> {
        let refuse = |problem: String| {
            let hint = "convert it to a directory or to a package, which keep every model";
            Error::input(format!("this model cannot be written as GGUF: {problem}"), hint)
        };
        let arch = choose(config).ok_or_else(|| {
            refuse("llama.cpp has no architecture with this list of layers".into())
        })?;
        match arch.problem(config) {
            Some(problem) => Err(refuse(format!("{problem} (as {})", arch.name()))),
            None => Ok(arch),
        }
    }

    /// What llama.cpp would compute otherwise.
    fn problem(self, config: &Config) -> Option<String> {
        let list = config.layers.iter().enumerate();
        list.flat_map(|(idx, layer)| {
            let mut problems = self.mixer_problems(config, &layer.mixer);
            problems.extend(self.feed_forward_problems(&layer.feed_forward));
            problems.into_iter().map(move |problem| format!("layer {idx}: {problem}"))
        })
        .chain(self.scale_problems(config))
        .next()
    }

    fn scale_problems(self, config: &Config) -> Option<String> {
        let scaled = config.embed_scale != 1.0
            || config.logit_scale != 1.0
            || config.layers.iter().any(|layer| layer.residual_scale != 1.0);
        let keeps = matches!(self, Arch::GraniteHybrid | Arch::FalconH1);
        (scaled && !keeps).then(|| "it has factors of embeddings, logits or residuals".into())
    }

    fn mixer_problems(self, config: &Config, mixer: &MixerConfig) -> Vec<String> {
        match mixer {
            MixerConfig::Attention(c) => self.attention_problems(c),
            MixerConfig::Mamba1(c) => {
                let mut list = double_width(config.d_model, c.d_inner);
                match c.inner_norm {
                    InnerNorm::Plain { eps } | InnerNorm::Weighted { eps } if eps != config.eps => {
                        let problem = format!("delta, B and C are normed with eps {eps}");
                        list.push(format!("{problem}, the layers with {}", config.eps));
                    }
                    _ => {}
                }
                list.extend(conv_problem(c.conv_bias));
                list
            }
            MixerConfig::Mamba2(c) => {
                let mut list = mamba2_problems(c);
                list.extend(double_width(config.d_model, c.d_inner()));
                list.extend(conv_problem(c.conv_bias || self == Arch::GraniteHybrid));
                list
            }
            MixerConfig::Parallel(m, a) => {
                let mut list = mamba2_problems(m);
                list.extend(self.attention_problems(a));
                list
            }
            _ => vec![format!("llama.cpp has no {mixer}")],
        }
    }

    fn attention_problems(self, c: &AttentionConfig) -> Vec<String> {
        let mut list = Vec::new();
        if let Some(window) = c.dims.window {
            list.push(format!("attention slides over {window} tokens"));
        }
        if c.clip.is_some() || c.qk_norm == QkNorm::Whole {
            list.push("queries and keys are clipped, or normed over all heads".into());
        }
        let usual = (c.dims.d_head as f64).powf(-0.5) as f32;
        // llama.cpp reads the key of another factor in Granite alone.
        if c.dims.scale != usual && self != Arch::GraniteHybrid {
            list.push(format!("attention has the factor {}", c.dims.scale));
        }
        let by_pair = c.rope.as_ref().is_some_and(|rope| {
            matches!(rope.scaling, RopeScaling::Llama3 { .. } | RopeScaling::Factors(_))
        });
        if by_pair && !matches!(self, Arch::Llama | Arch::GraniteHybrid) {
            list.push("RoPE has a factor for each pair".into());
        }
        if let Some(RopeScaling::Yarn { attention_factor, mscale, truncate, .. }) =
            c.rope.as_ref().map(|rope| &rope.scaling)
            && (attention_factor.is_some() || mscale.is_some() || !truncate)
        {
            list.push("YaRN has an amplitude or a ramp of its own".into());
        }
        match &c.rope {
            Some(rope) if rope.d_rotary != c.dims.d_head && self != Arch::GraniteHybrid => {
                list.push(format!("RoPE turns {} of {}", rope.d_rotary, c.dims.d_head));
            }
            None if !matches!(self, Arch::Jamba | Arch::GraniteHybrid) => {
                list.push("attention has no RoPE".into());
            }
            _ => {}
        }
        list
    }

    fn feed_forward_problems(self, feed_forward: &FeedForwardConfig) -> Vec<String> {
        let dense = |c: &DenseConfig| {
            let mut list = Vec::new();
            if c.activation != Kind::Silu || matches!(c.form, DenseForm::Plain(_)) {
                list.push("the feed-forward is not a gated SiLU".into());
            }
            if (c.gate_scale, c.out_scale) != (1.0, 1.0) && self != Arch::FalconH1 {
                list.push("the feed-forward has factors".into());
            }
            list
        };
        match feed_forward {
            FeedForwardConfig::None => Vec::new(),
            FeedForwardConfig::Dense(c) => dense(c),
            FeedForwardConfig::Experts(c) => {
                let mut list = c.shared.as_ref().map(dense).unwrap_or_default();
                // Weights of the chosen sum to one in Llama and Granite, and not in the others.
                let sums_to_one = match c.router.score {
                    Score::Softmax => Some(c.router.normalise),
                    Score::SoftmaxOfChosen => Some(true),
                    Score::Sigmoid => None,
                };
                let wanted = matches!(self, Arch::Llama | Arch::GraniteHybrid);
                let alone = c.router.n_group == 1 && c.router.scale == 1.0;
                if sums_to_one != Some(wanted) || !alone || c.choice_bias.is_some() {
                    list.push("the experts are chosen in another way".into());
                }
                if c.activation != Kind::Silu {
                    list.push("the experts are not gated SiLUs".into());
                }
                list
            }
        }
    }
}

fn double_width(d_model: usize, d_inner: usize) -> Vec<String> {
    match d_inner == 2 * d_model {
        true => Vec::new(),
        false => vec![format!("{d_inner} channels are not twice the width of {d_model}")],
    }
}

fn conv_problem(has_bias: bool) -> Option<String> {
    (!has_bias).then(|| "the convolution has no bias".into())
}

fn mamba2_problems(c: &Mamba2Config) -> Vec<String> {
    let mut list = Vec::new();
    if c.delta_limit != (0.0, f32::INFINITY) {
        list.push(format!("step sizes are limited to {:?}", c.delta_limit));
    }
    if let Some(norm) = &c.norm {
        if norm.order != Order::GateFirst {
            list.push("the norm comes before the gate".into());
        }
        if norm.n_group != c.n_group {
            list.push(format!("the norm has {} groups, B and C {}", norm.n_group, c.n_group));
        }
    }
    list
}

fn choose(config: &Config) -> Option<Arch> {
    let all = |f: &dyn Fn(&LayerConfig) -> bool| config.layers.iter().all(f);
    let no_ff = all(&|layer| layer.feed_forward == FeedForwardConfig::None);
    if no_ff {
        let plain = |layer: &LayerConfig| match &layer.mixer {
            MixerConfig::Mamba1(c) => !matches!(c.inner_norm, InnerNorm::Weighted { .. }),
            _ => false,
        };
        let second = |layer: &LayerConfig| match &layer.mixer {
            MixerConfig::Mamba2(c) => c.norm.is_some(),
            _ => false,
        };
        return match (all(&plain), all(&second)) {
            (true, _) => Some(Arch::Mamba),
            (_, true) => Some(Arch::Mamba2),
            _ => None,
        };
    }
    if !all(&|layer| layer.feed_forward != FeedForwardConfig::None) {
        return None;
    }
    let attention = |layer: &LayerConfig| matches!(layer.mixer, MixerConfig::Attention(_));
    if all(&attention) {
        return choose_transformer(config);
    }
    let jamba = |layer: &LayerConfig| match &layer.mixer {
        MixerConfig::Mamba1(c) => matches!(c.inner_norm, InnerNorm::Weighted { .. }),
        MixerConfig::Attention(c) => c.rope.is_none() && c.qk_norm == QkNorm::None,
        _ => false,
    };
    let granite = |layer: &LayerConfig| match &layer.mixer {
        MixerConfig::Mamba2(c) => c.norm.is_some(),
        MixerConfig::Attention(c) => c.qk_norm == QkNorm::None,
        _ => false,
    };
    let experts = |layer: &LayerConfig| matches!(layer.feed_forward, FeedForwardConfig::Experts(_));
    // Granite has experts in every layer or in none.
    let uniform = all(&experts) || all(&|layer| !experts(layer));
    if all(&jamba) {
        Some(Arch::Jamba)
    } else if all(&granite) && uniform {
        Some(Arch::GraniteHybrid)
    } else if all(&|layer| matches!(layer.mixer, MixerConfig::Parallel(..))) {
        Some(Arch::FalconH1)
    } else {
        None
    }
}

fn choose_transformer(config: &Config) -> Option<Arch> {
    let all = |f: &dyn Fn(&AttentionConfig, &FeedForwardConfig) -> bool| {
        config.layers.iter().all(|layer| match &layer.mixer {
            MixerConfig::Attention(c) => f(c, &layer.feed_forward),
            _ => false,
        })
    };
    let is_dense = |ff: &FeedForwardConfig| matches!(ff, FeedForwardConfig::Dense(_));
    let gated_shared = |ff: &FeedForwardConfig| match ff {
        FeedForwardConfig::Experts(c) => c.shared.is_some() && c.shared_gate.is_some(),
        _ => false,
    };
    let alone = |ff: &FeedForwardConfig| match ff {
        FeedForwardConfig::Experts(c) => c.shared.is_none(),
        _ => false,
    };
    let plain = |c: &AttentionConfig| c.qk_norm == QkNorm::None;
    if all(&|c, ff| c.qk_norm == QkNorm::Head && is_dense(ff)) {
        Some(Arch::Qwen3)
    } else if config.family == "qwen2" && all(&|c, ff| plain(c) && is_dense(ff)) {
        Some(Arch::Qwen2)
    } else if all(&|c, ff| plain(c) && gated_shared(ff)) {
        Some(Arch::Qwen2Moe)
    } else if all(&|c, ff| plain(c) && is_dense(ff)) || all(&|c, ff| plain(c) && alone(ff)) {
        Some(Arch::Llama)
    } else {
        None
    }
}
