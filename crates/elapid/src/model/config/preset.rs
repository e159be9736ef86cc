//! Shapes for training from scratch: four sizes of eight architectures.
//!
//! | size   | parameters, about | width | vocabulary |
//! |--------|-------------------|-------|------------|
//! | tiny   | 3 M               | 192   | 4096       |
//! | small  | 12 M              | 384   | 8192       |
//! | base   | 30 M              | 512   | 16384      |
//! | medium | 130 M             | 768   | 32768      |
//!
//! Most are those of a Hugging Face family, so that other tools load what we train: mamba, mamba2,
//! llama; `hybrid` is bamba (Mamba-2 with attention at every fourth layer and a feed-forward in
//! each); `moe` is qwen2_moe (attention, eight experts of which two are taken, one shared).
//! `mamba3` has the config and the names of mamba_ssm, feed-forwards as in its published models.
//! `zamba` is a config of our own: Mamba-3 with attention at every sixth layer, four experts of
//! which two are taken and one shared in each. `evermind` is one too: short convolutions alone,
//! with eight experts of which two are taken and one shared; each layer sees two tokens further
//! back, and nothing else does. Embedding and head are one matrix: at these sizes it is a quarter
//! of the parameters.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Size {
    /// About 3 M parameters.
    Tiny,
    /// About 12 M.
    Small,
    /// About 30 M.
    Base,
    /// About 130 M.
    Medium,
}

/// An architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arch {
    /// Selective scans.
    Mamba1,
    /// State-space duality.
    Mamba2,
    /// Mamba-2 and attention, with feed-forwards.
    Hybrid,
    /// Attention and feed-forwards.
    Llama,
    /// Attention and experts.
    Moe,
    /// State spaces with angles, and feed-forwards.
    Mamba3,
    /// Mamba-3 and attention, with experts.
    Zamba,
    /// Short convolutions, with experts: sees some tens of tokens.
    Evermind,
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Size {
    /// Every size, smallest first.
    pub const ALL: [Size; 4] = [Size::Tiny, Size::Small, Size::Base, Size::Medium];

    /// Name, tokens of the vocabulary, width, and layers of each architecture.
    fn facts(self) -> (&'static str, usize, usize, [usize; 8]) {
        match self {
            Size::Tiny => ("tiny", 4096, 192, [9, 9, 4, 5, 3, 5, 6, 8]),
            Size::Small => ("small", 8192, 384, [9, 9, 4, 5, 3, 5, 6, 8]),
            Size::Base => ("base", 16384, 512, [12, 12, 6, 7, 5, 7, 8, 11]),
            Size::Medium => ("medium", 32768, 768, [28, 28, 12, 16, 10, 14, 18, 24]),
        }
    }

    /// As people write it.
    pub(crate) fn name(self) -> &'static str {
        self.facts().0
    }

    /// Tokens of the vocabulary that is made for it.
    pub fn n_vocab(self) -> usize {
        self.facts().1
    }
}

impl std::fmt::Display for Arch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Arch {
    /// Every architecture, in the order of `Size::facts`.
    pub const ALL: [Arch; 8] = [
        Arch::Mamba1,
        Arch::Mamba2,
        Arch::Hybrid,
        Arch::Llama,
        Arch::Moe,
        Arch::Mamba3,
        Arch::Zamba,
        Arch::Evermind,
    ];

    /// Name, family and class.
    fn facts(self) -> [&'static str; 3] {
        match self {
            Arch::Mamba1 => ["mamba1", "mamba", "MambaForCausalLM"],
            Arch::Mamba2 => ["mamba2", "mamba2", "Mamba2ForCausalLM"],
            Arch::Hybrid => ["hybrid", "bamba", "BambaForCausalLM"],
            Arch::Llama => ["llama", "llama", "LlamaForCausalLM"],
            Arch::Moe => ["moe", "qwen2_moe", "Qwen2MoeForCausalLM"],
            Arch::Mamba3 => ["mamba3", "", ""],
            Arch::Zamba => ["zamba", "elapid", ""],
            Arch::Evermind => ["evermind", "elapid", ""],
        }
    }

    /// As people write it.
    pub(crate) fn name(self) -> &'static str {
        self.facts()[0]
    }
}

/// What the vocabulary of a new model is like.
#[derive(Clone, Copy, Debug)]
pub struct Vocabulary {
    pub n_vocab: usize,
    /// The token before a text.
    pub begin: Option<u32>,
    /// The token behind it.
    pub end: Option<u32>,
}

/// The config.json of a preset, for texts of `n_ctx` tokens.
pub fn config_json(size: Size, arch: Arch, vocabulary: Vocabulary, n_ctx: usize) -> String {
    let (_, _, d_model, n_layer) = size.facts();
    let n_layer = n_layer[arch as usize];
    let [_, family, class] = arch.facts();
    let mut config = json!({
        "architectures": [class], "model_type": family, "torch_dtype": "float32",
        "vocab_size": vocabulary.n_vocab, "hidden_size": d_model, "num_hidden_layers": n_layer,
        "tie_word_embeddings": true, "initializer_range": 0.02, "hidden_act": "silu",
        "bos_token_id": vocabulary.begin, "eos_token_id": vocabulary.end, "use_cache": true,
    });
    let more = match arch {
        Arch::Mamba1 => json!({
            "state_size": 16, "conv_kernel": 4, "expand": 2, "intermediate_size": 2 * d_model,
            "time_step_rank": d_model.div_ceil(16), "layer_norm_epsilon": 1e-5,
            "use_bias": false, "use_conv_bias": true, "residual_in_fp32": true,
        }),
        Arch::Mamba2 => json!({
            "state_size": 64, "conv_kernel": 4, "expand": 2, "head_dim": 64,
            "num_heads": 2 * d_model / 64, "n_groups": 1, "chunk_size": 64,
            "layer_norm_epsilon": 1e-5, "use_bias": false, "use_conv_bias": true,
            "residual_in_fp32": true, "rms_norm": true,
        }),
        Arch::Hybrid => hybrid(d_model, n_layer),
        Arch::Llama => json!({ "intermediate_size": d_ff(d_model) }),
        Arch::Moe => json!({
            "intermediate_size": d_ff(d_model), "moe_intermediate_size": d_model / 2,
            "shared_expert_intermediate_size": d_model, "num_experts": 8,
            "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "norm_topk_prob": true, "router_aux_loss_coef": 0.01, "qkv_bias": false,
            "use_sliding_window": false,
        }),
        Arch::Mamba3 => return format!("{:#}\n", mamba3(d_model, n_layer, vocabulary)),
        Arch::Zamba => return format!("{:#}\n", zamba(d_model, n_layer, vocabulary, n_ctx)),
        Arch::Evermind => return format!("{:#}\n", evermind(d_model, n_layer, vocabulary, n_ctx)),
    };
    extend(&mut config, more);
    if matches!(arch, Arch::Hybrid | Arch::Llama | Arch::Moe) {
        let [n_head, n_kv_head] = heads(d_model);
        let attention = json!({
            "num_attention_heads": n_head, "num_key_value_heads": n_kv_head,
            "max_position_embeddings": n_ctx, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
        });
        extend(&mut config, attention);
    }
    format!("{config:#}\n")
}

/// Heads of attention, of queries and of keys.
fn heads(d_model: usize) -> [usize; 2] {
    let n_head = d_model / 64;
    [n_head, if n_head.is_multiple_of(3) { n_head / 3 } else { n_head / 4 }]
}

/// As mamba_ssm writes it: `ssm_cfg` stands in for a `model_type`.
fn mamba3(d_model: usize, n_layer: usize, vocabulary: Vocabulary) -> Value {
    json!({
        "d_model": d_model, "d_intermediate": 2 * d_model, "n_layer": n_layer,
        "vocab_size": vocabulary.n_vocab, "ssm_cfg": {
            "layer": "Mamba3", "d_state": 64, "expand": 2, "headdim": 64, "ngroups": 1,
            "rope_fraction": 0.5, "chunk_size": 64, "is_mimo": false, "is_outproj_norm": false,
        },
        "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": true, "residual_in_fp32": true,
        "fused_add_norm": true, "pad_vocab_size_multiple": 1, "tie_embeddings": true,
        "bos_token_id": vocabulary.begin, "eos_token_id": vocabulary.end,
    })
}

fn zamba(d_model: usize, n_layer: usize, vocabulary: Vocabulary, n_ctx: usize) -> Value {
    let [n_head, n_kv_head] = heads(d_model);
    json!({
        "model_type": "elapid", "vocab_size": vocabulary.n_vocab, "d_model": d_model,
        "n_ctx": n_ctx, "n_layer": n_layer, "layers": "zamba", "feed_forward": "experts",
        "mamba3": {"d_state": 64},
        "attention": {"n_head": n_head, "n_kv_head": n_kv_head},
        "experts": {"n_expert": 4, "n_used": 2, "d_ff": d_model / 4, "d_shared": d_model / 4},
        "bos_token_id": vocabulary.begin, "eos_token_id": vocabulary.end,
    })
}

fn evermind(d_model: usize, n_layer: usize, vocabulary: Vocabulary, n_ctx: usize) -> Value {
    json!({
        "model_type": "elapid", "vocab_size": vocabulary.n_vocab, "d_model": d_model,
        "n_ctx": n_ctx, "layers": vec!["short_conv"; n_layer], "feed_forward": "experts",
        "short_conv": {"d_conv": 3},
        "experts": {"n_expert": 8, "n_used": 2, "d_ff": d_model / 4, "d_shared": d_model / 2},
        "bos_token_id": vocabulary.begin, "eos_token_id": vocabulary.end,
    })
}

/// Inner width of a gated feed-forward: 8/3 of the model, in steps of 64.
fn d_ff(d_model: usize) -> usize {
    (d_model * 8 / 3).next_multiple_of(64)
}

fn hybrid(d_model: usize, n_layer: usize) -> Value {
    let attention: Vec<usize> = (0..n_layer).filter(|idx| idx % 4 == 3).collect();
    json!({
        "intermediate_size": d_ff(d_model), "attn_layer_indices": attention,
        "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_head": 64,
        "mamba_n_heads": 2 * d_model / 64, "mamba_n_groups": 1, "mamba_chunk_size": 64,
        "mamba_conv_bias": true, "mamba_proj_bias": false, "attention_bias": false,
        "mlp_bias": false, "partial_rotary_factor": 1.0,
        // Transformers 5 turns half of each head unless it is told here.
        "rope_parameters": {
            "rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 1.0,
        },
    })
}

fn extend(config: &mut Value, more: Value) {
    if let (Value::Object(config), Value::Object(more)) = (config, more) {
        config.extend(more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use crate::model::config::Config;

    #[test]
    fn sizes_are_what_their_names_promise() {
        let promised = [3e6, 12e6, 30e6, 130e6];
        for (size, want) in Size::ALL.into_iter().zip(promised) {
            for arch in Arch::ALL {
                let n_vocab = size.n_vocab();
                let vocabulary = Vocabulary { n_vocab, begin: Some(0), end: Some(0) };
                let json = config_json(size, arch, vocabulary, 512);
                let model = Model::new(Config::from_json("preset", &json).unwrap());
                let n_elem = |shape: &Vec<usize>| shape.iter().product::<usize>();
                let n: usize = model.specs().iter().map(|spec| n_elem(&spec.shape)).sum();
                let ratio = n as f64 / want;
                let (size, arch) = (size.name(), arch.name());
                assert!((0.8..1.2).contains(&ratio), "{size} {arch}: {n} parameters");
            }
        }
    }
}
