//! Which architecture of llama.cpp computes what a config says.
//!
//! The choice looks at layers, not at the name of the family, so that a model of our own that is
//! built like a known one is written as that one.

use crate::model::config::family::{Shape, Trait};
use crate::model::config::*;
use crate::ops::gated_norm::Order;
use crate::ops::rope::RopeScaling;
use crate::ops::router::Score;

pub(super) fn refuse(problem: &str) -> Error {
    let hint = "convert it to a directory or to a package, which keep every model";
    Error::input(format!("this model cannot be written as GGUF: {problem}"), hint)
}

impl Arch {
    pub fn of(config: &Config) -> Result<Arch> {
        // llama.cpp has no Mamba-3. A file of ours has its names where it has them, and our config.
        let is_mamba3 = |layer: &LayerConfig| matches!(layer.mixer, MixerConfig::Mamba3(_));
        if config.layers.iter().any(is_mamba3) {
            return Ok(Arch::Elapid);
        }
        let arch = family(config).and_then(|family| family.facts().gguf).map(|gguf| gguf.0);
        let none = "llama.cpp has no architecture with this list of layers";
        let arch = arch.ok_or_else(|| refuse(none))?;
        match arch.problem(config) {
            Some(problem) => Err(refuse(&format!("{problem} (as {arch})"))),
            None => Ok(arch),
        }
    }

    /// What llama.cpp would compute otherwise.
    fn problem(self, config: &Config) -> Option<String> {
        let (granite, falcon) = (self == Arch::GraniteHybrid, self == Arch::FalconH1);
        for (idx, layer) in config.layers.iter().enumerate() {
            let mut list = match &layer.mixer {
                MixerConfig::Mamba1(c) => mamba1_problems(config, c),
                MixerConfig::Mamba2(c) => {
                    let mut list = mamba2_problems(c);
                    list.extend(width_problems(config, c.d_inner(), c.conv_bias || granite));
                    list
                }
                MixerConfig::Attention(c) => self.attention_problems(c),
                MixerConfig::Parallel(m, a) => {
                    [mamba2_problems(m), self.attention_problems(a)].concat()
                }
                mixer => vec![(true, format!("llama.cpp has no {mixer}"))],
            };
            list.extend(self.feed_forward_problems(&layer.feed_forward));
            if let Some((_, problem)) = list.into_iter().find(|problem| problem.0) {
                return Some(format!("layer {idx}: {problem}"));
            }
        }
        let scales = [config.embed_scale, config.logit_scale, config.residual_scale];
        let is_lost = scales != [1.0; 3] && !granite && !falcon;
        is_lost.then(|| "it has factors of embeddings, logits or residuals".into())
    }

    fn attention_problems(self, c: &AttentionConfig) -> Problems {
        let (dims, granite) = (&c.dims, self == Arch::GraniteHybrid);
        let d_head = dims.d_head;
        let d_rotary = c.rope.as_ref().map_or(d_head, |rope| rope.d_rotary);
        let scaling = c.rope.as_ref().map(|rope| &rope.scaling);
        let by_pair = matches!(scaling, Some(RopeScaling::Llama3 { .. } | RopeScaling::Factors(_)));
        let by_itself = match scaling {
            Some(RopeScaling::Yarn { attention_factor, mscale, truncate, .. }) => {
                attention_factor.is_some() || mscale.is_some() || !truncate
            }
            _ => false,
        };
        let unusual = dims.scale != (d_head as f64).powf(-0.5) as f32;
        vec![
            (c.fused.is_some(), "queries, keys and values are one matrix".into()),
            (
                dims.window.is_some(),
                format!("attention slides over {} tokens", dims.window.unwrap_or(0)),
            ),
            (
                c.clip.is_some() || c.qk_norm == QkNorm::Whole,
                "queries and keys are clipped, or normed over all heads".into(),
            ),
            // llama.cpp reads the key of another factor in Granite alone.
            (unusual && !granite, format!("attention has the factor {}", dims.scale)),
            (by_pair && !self.has(Trait::RopeFactors), "RoPE has a factor for each pair".into()),
            (by_itself, "YaRN has an amplitude or a ramp of its own".into()),
            (d_rotary != d_head && !granite, format!("RoPE turns {d_rotary} of {d_head}")),
            (c.rope.is_none() && !self.has(Trait::Hybrid), "attention has no RoPE".into()),
        ]
    }

    fn feed_forward_problems(self, feed_forward: &FeedForwardConfig) -> Problems {
        let dense = |c: &DenseConfig| {
            let gated = c.activation == Kind::Silu && !matches!(c.form, DenseForm::Plain(_));
            let scaled = (c.gate_scale, c.out_scale) != (1.0, 1.0);
            vec![
                (!gated, "the feed-forward is not a gated SiLU".to_string()),
                (scaled && self != Arch::FalconH1, "the feed-forward has factors".into()),
            ]
        };
        match feed_forward {
            FeedForwardConfig::None => Vec::new(),
            FeedForwardConfig::Dense(c) => dense(c),
            FeedForwardConfig::Experts(c) => {
                let sums_to_one = match c.router.score {
                    Score::Softmax => Some(c.router.normalise),
                    Score::SoftmaxOfChosen => Some(true),
                    Score::Sigmoid => None,
                };
                let usual = sums_to_one == Some(self.has(Trait::Normalised))
                    && (c.router.n_group, c.router.scale) == (1, 1.0)
                    && c.choice_bias.is_none();
                let mut list = c.shared.as_ref().map(dense).unwrap_or_default();
                list.push((!usual, "the experts are chosen in another way".into()));
                list.push((c.activation != Kind::Silu, "the experts are not gated SiLUs".into()));
                list
            }
        }
    }
}

type Problems = Vec<(bool, String)>;

fn width_problems(config: &Config, d_inner: usize, conv_bias: bool) -> Problems {
    let d_model = config.d_model;
    let wide = format!("{d_inner} channels are not twice the width of {d_model}");
    vec![(d_inner != 2 * d_model, wide), (!conv_bias, "the convolution has no bias".into())]
}

fn mamba1_problems(config: &Config, c: &Mamba1Config) -> Problems {
    let eps = match c.inner_norm {
        InnerNorm::Plain { eps } | InnerNorm::Weighted { eps } => eps,
        InnerNorm::None => config.eps,
    };
    let text = format!("delta, B and C are normed with eps {eps}, the layers with {}", config.eps);
    let mut list = width_problems(config, c.d_inner, c.conv_bias);
    list.push((eps != config.eps, text));
    list
}

fn mamba2_problems(c: &Mamba2Config) -> Problems {
    let limits = c.delta_limit;
    let mut list =
        vec![(limits != (0.0, f32::INFINITY), format!("step sizes are limited to {limits:?}"))];
    if let Some(norm) = &c.norm {
        let groups = format!("the norm has {} groups, B and C {}", norm.n_group, c.n_group);
        list.push((norm.order != Order::GateFirst, "the norm comes before the gate".into()));
        list.push((norm.n_group != c.n_group, groups));
    }
    list
}

/// The first family whose architecture computes what the layers say; one of its own comes first.
pub(super) fn family(config: &Config) -> Option<Family> {
    let shape = shape(config)?;
    let own = config.family.facts().gguf.filter(|gguf| gguf.1 == shape);
    let fits = |family: &&Family| match family.facts().gguf {
        Some(gguf) => own.map_or(gguf.1 == shape, |own| gguf == own),
        None => false,
    };
    Family::ALL.iter().find(fits).copied()
}

fn shape(config: &Config) -> Option<Shape> {
    let all = |f: &dyn Fn(&LayerConfig) -> bool| config.layers.iter().all(f);
    let mamba1 = |layer: &LayerConfig, is_weighted: bool| match &layer.mixer {
        MixerConfig::Mamba1(c) => matches!(c.inner_norm, InnerNorm::Weighted { .. }) == is_weighted,
        _ => false,
    };
    let mamba2 = |layer: &LayerConfig| match &layer.mixer {
        MixerConfig::Mamba2(c) => c.norm.is_some(),
        _ => false,
    };
    let attention = |layer: &LayerConfig| match &layer.mixer {
        MixerConfig::Attention(c) => Some((c.qk_norm, c.rope.is_some())),
        _ => None,
    };
    let plain = |layer: &LayerConfig| attention(layer).is_some_and(|c| c.0 == QkNorm::None);
    let dense = |layer: &LayerConfig| layer.feed_forward.dense().is_some();
    let experts = |layer: &LayerConfig| {
        let c = layer.feed_forward.experts();
        c.map(|c| (c.shared.is_some(), c.shared_gate.is_some()))
    };
    let is_bare = |layer: &LayerConfig| layer.feed_forward == FeedForwardConfig::None;
    let headed = |layer: &LayerConfig| attention(layer).is_some_and(|c| c.0 == QkNorm::Head);
    let parallel = |layer: &LayerConfig| matches!(layer.mixer, MixerConfig::Parallel(..));
    let is_uniform = all(&|l| experts(l).is_some()) || all(&|l| experts(l).is_none());
    let shapes = if all(&is_bare) {
        vec![(Shape::Mamba1, all(&|l| mamba1(l, false))), (Shape::Mamba2, all(&mamba2))]
    } else if config.layers.iter().any(is_bare) {
        Vec::new()
    } else if all(&|l| attention(l).is_some()) {
        vec![
            (Shape::Dense(QkNorm::Head), all(&|l| headed(l) && dense(l))),
            (Shape::Dense(QkNorm::None), all(&|l| plain(l) && dense(l))),
            (Shape::GatedShared, all(&|l| plain(l) && experts(l) == Some((true, true)))),
            (Shape::Experts, all(&|l| plain(l) && experts(l).is_some_and(|shared| !shared.0))),
        ]
    } else {
        let jamba =
            |l: &LayerConfig| mamba1(l, true) || attention(l) == Some((QkNorm::None, false));
        vec![
            (Shape::Jamba, all(&jamba)),
            (Shape::Hybrid, is_uniform && all(&|l| mamba2(l) || plain(l))),
            (Shape::Parallel, all(&parallel)),
        ]
    };
    shapes.into_iter().find(|shape| shape.1).map(|shape| shape.0)
}
