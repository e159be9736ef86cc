//! The metadata of a GGUF file, from a config: the rows of `family.rs` the other way.

use super::{Arch, arch};
use crate::files::gguf::Item;
use crate::model::config::family::Trait;
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

pub fn describe(config: &Config, arch: Arch) -> Description {
    let mut metadata: Vec<(&str, Item)> = vec![("vocab_size", size(config.n_vocab))];
    let named = |(key, item)| (format!("{arch}.{key}"), item);
    if arch == Arch::Elapid {
        metadata.push(("block_count", size(config.layers.len())));
        metadata.push(("embedding_length", size(config.d_model)));
        let metadata = metadata.into_iter().map(named).collect();
        return Description { metadata, frequencies: None };
    }
    for row in arch::family(config).into_iter().flat_map(|family| family.facts().rows()) {
        let Some(key) = row.gguf_key() else { continue };
        let is_new = metadata.iter().all(|item| item.0 != key);
        if let Some(item) = value(config, arch, row.0).filter(|_| is_new) {
            metadata.push((key, item));
            if key == "attention.key_length" {
                metadata.extend(value(config, arch, row.0).map(|d| ("attention.value_length", d)));
            }
        }
    }
    if metadata.iter().all(|item| item.0 != "attention.head_count") {
        metadata.push(("context_length", size(N_CTX_ENDLESS)));
        metadata.push(("attention.head_count", size(0)));
        metadata.push(("feed_forward_length", size(0)));
    }
    if arch == Arch::Mamba {
        let has_norm = |layer: &LayerConfig| match &layer.mixer {
            MixerConfig::Mamba1(c) => c.inner_norm != InnerNorm::None,
            _ => false,
        };
        metadata.push(("ssm.dt_b_c_rms", Item::Bool(config.layers.iter().any(has_norm))));
    }
    let rope = attention(config).and_then(|c| c.rope.as_ref());
    let frequencies = rope.and_then(|rope| describe_rope(rope, &mut metadata));
    Description { metadata: metadata.into_iter().map(named).collect(), frequencies }
}

/// A size; `Config` bounds every one far below.
fn size(size: usize) -> Item {
    Item::U32(u32::try_from(size).unwrap_or(u32::MAX))
}

fn attention(config: &Config) -> Option<&AttentionConfig> {
    config.layers.iter().find_map(|layer| layer.mixer.attention())
}

/// A hyper-parameter by our name of it, where the model has it.
fn value(config: &Config, arch: Arch, own: &str) -> Option<Item> {
    let (layers, dims) = (&config.layers, attention(config).map(|c| &c.dims));
    let rope = attention(config).and_then(|c| c.rope.as_ref());
    let mamba1 = layers.iter().find_map(|layer| match &layer.mixer {
        MixerConfig::Mamba1(c) => Some(c),
        _ => None,
    });
    let mamba2 = layers.iter().find_map(|layer| match &layer.mixer {
        MixerConfig::Mamba2(c) | MixerConfig::Parallel(c, _) => Some(c),
        _ => None,
    });
    let dense = layers.iter().find_map(|layer| layer.feed_forward.dense());
    let experts = layers.iter().find_map(|layer| layer.feed_forward.experts());
    let of_layer =
        |layer: &LayerConfig| layer.mixer.attention().map_or(0, |c| c.dims.n_kv_head as i32);
    Some(match own {
        "d_model" => size(config.d_model),
        "layers" => size(layers.len()),
        "eps" => Item::F32(config.eps),
        "embed_scale" => Item::F32(config.embed_scale),
        "residual_scale" => Item::F32(config.residual_scale),
        "logit_scale" => Item::F32(1.0 / config.logit_scale),
        "n_ctx" => {
            let n_ctx = config.n_ctx.filter(|_| rope.is_some() || arch == Arch::Jamba);
            size(n_ctx.unwrap_or(N_CTX_ENDLESS))
        }
        "attention.n_head" => size(dims?.n_head),
        "attention.n_kv_head" if arch.has(Trait::Hybrid) => {
            Item::I32s(layers.iter().map(of_layer).collect())
        }
        "attention.n_kv_head" => size(dims?.n_kv_head),
        "attention.d_head" => {
            let is_usual = dims?.n_head * dims?.d_head == config.d_model;
            size(dims.filter(|_| arch.has(Trait::HeadWidth) || !is_usual)?.d_head)
        }
        "attention.scale" => Item::F32(dims?.scale),
        "attention.position" => Item::Bool(rope.is_some()),
        "attention.rope_base" => Item::F32(rope?.base as f32),
        "dense.d_ff" => size(dense.map(|c| c.d_ff).or(experts.map(|c| c.d_ff))?),
        "experts.n_expert" => size(experts?.n_expert),
        "experts.n_used" => size(experts?.router.n_used),
        "experts.d_ff" => size(experts?.d_ff),
        "experts.d_shared" => size(experts?.shared.as_ref()?.d_ff),
        "mamba1.d_inner" | "mamba1.expand" => size(mamba1?.d_inner),
        "mamba1.d_state" => size(mamba1?.d_state),
        "mamba1.d_conv" => size(mamba1?.d_conv),
        "mamba1.delta_rank" => size(mamba1?.delta_rank),
        "mamba2.expand" => size(mamba2?.n_head),
        "mamba2.d_inner" | "mamba2.d_head" => size(mamba2?.d_inner()),
        "mamba2.n_group" => size(mamba2?.n_group),
        "mamba2.d_state" => size(mamba2?.d_state),
        "mamba2.d_conv" => size(mamba2?.d_conv),
        _ => return None,
    })
}

/// Returns the factors of rotary frequencies that only a tensor can say.
fn describe_rope(rope: &Rope, metadata: &mut Vec<(&str, Item)>) -> Option<Vec<f32>> {
    metadata.push(("rope.dimension_count", size(rope.d_rotary)));
    let (kind, factor) = match rope.scaling {
        RopeScaling::None => return None,
        RopeScaling::Linear { factor } => ("linear", factor),
        RopeScaling::Yarn { factor, n_ctx_orig, beta_fast, beta_slow, .. } => {
            metadata.extend([
                ("rope.scaling.original_context_length", size(n_ctx_orig)),
                ("rope.scaling.yarn_beta_fast", Item::F32(beta_fast as f32)),
                ("rope.scaling.yarn_beta_slow", Item::F32(beta_slow as f32)),
            ]);
            ("yarn", factor)
        }
        RopeScaling::Llama3 { .. } | RopeScaling::Factors(_) => {
            let plain = Rope { scaling: RopeScaling::None, ..rope.clone() }.table();
            let table = rope.table();
            let pairs = plain.frequencies().iter().zip(table.frequencies());
            return Some(pairs.map(|(plain, scaled)| plain / scaled).collect());
        }
    };
    metadata.push(("rope.scaling.type", Item::Str(kind.into())));
    metadata.push(("rope.scaling.factor", Item::F32(factor as f32)));
    None
}
