//! The families, and everything that tells one from another: a table entry each.
//!
//! A hyper-parameter has three names, listed once (`Row`): ours, that of config.json, that of GGUF.
//! Readers ask by ours; a family without a row for it does not have it. What an absent key means
//! differs between families, too: `defaults` holds what the classes of transformers say.

// tidy: allow long (a list of like units: one entry for each family)
use super::{DenseForm, ExpertForm, FreshKind, QkNorm};
use crate::ops::router::Score;
use Absent::*;
use Source::*;
use Trait::{HeadWidth, Normalised, OutBias, PairedRows, RopeFactors};

/// What we call a hyper-parameter, what config.json calls it, and where a GGUF file has it.
pub(super) struct Row(pub &'static str, pub &'static str, pub Source);

/// Where a GGUF file has a hyper-parameter. Keys are without the architecture before them.
pub(super) enum Source {
    No, // nowhere
    Size(&'static str, Absent),
    Each(&'static str, Absent), // a size, or a list with the same size for each layer
    Float(&'static str, Absent),
    Parts(&'static str), // under this key among others; `gguf/import.rs` puts it together
    Tensor(&'static str), // true if some layer has a tensor of this name
}

/// What it means that a GGUF file does not have a key.
#[derive(Clone, Copy)]
pub(super) enum Absent {
    Need,
    Unknown,
    Is(usize),
}

impl Row {
    pub(super) fn gguf_key(&self) -> Option<&'static str> {
        match self.2 {
            Size(key, _) | Each(key, _) | Float(key, _) | Parts(key) => Some(key),
            No | Tensor(_) => None,
        }
    }
}

const COMMON: &[Row] = &[
    Row("d_model", "hidden_size", Size("embedding_length", Need)),
    Row("layers", "num_hidden_layers", Size("block_count", Need)),
    Row("n_ctx", "max_position_embeddings", No),
    Row("tied", "tie_word_embeddings", No),
    Row("init_std", "initializer_range", No),
];

const BACKBONE: &[Row] = &[
    Row("eps", "layer_norm_epsilon", Float("attention.layer_norm_rms_epsilon", Need)),
    Row("mamba1.factor", "expand", No),
    Row("mamba2.factor", "expand", No),
    Row("mamba.bias", "use_bias", No),
    Row("mamba.conv_bias", "use_conv_bias", No),
    Row("mamba1.delta_min", "time_step_min", No),
    Row("mamba1.delta_max", "time_step_max", No),
    Row("mamba2.delta_min", "time_step_min", No),
    Row("mamba2.delta_max", "time_step_max", No),
    Row("mamba.delta_floor", "time_step_floor", No),
];

const MAMBA1: &[Row] = &[
    Row("mamba1.d_inner", "intermediate_size", Size("ssm.inner_size", Need)),
    Row("mamba1.expand", "intermediate_size", No),
    Row("mamba1.d_state", "state_size", Size("ssm.state_size", Need)),
    Row("mamba1.d_conv", "conv_kernel", Size("ssm.conv_kernel", Need)),
    Row("mamba1.delta_rank", "time_step_rank", Size("ssm.time_step_rank", Need)),
];

// Our own config says by `expand` how many heads there are.
const MAMBA2: &[Row] = &[
    Row("mamba2.expand", "num_heads", Size("ssm.time_step_rank", Need)),
    Row("mamba2.d_head", "head_dim", Parts("ssm.inner_size")),
    Row("mamba2.n_group", "n_groups", Size("ssm.group_count", Need)),
    Row("mamba2.d_state", "state_size", Size("ssm.state_size", Need)),
    Row("mamba2.d_conv", "conv_kernel", Size("ssm.conv_kernel", Need)),
];

const ATTENTION: &[Row] = &[
    Row("attention.n_head", "num_attention_heads", Each("attention.head_count", Need)),
    Row("attention.n_kv_head", "num_key_value_heads", Each("attention.head_count_kv", Unknown)),
    Row("attention.d_head", "head_dim", Size("attention.key_length", Unknown)),
    Row("attention.window", "sliding_window", No),
    Row("attention.rope_base", "rope_theta", Float("rope.freq_base", Is(10_000))),
    Row("eps", "rms_norm_eps", Float("attention.layer_norm_rms_epsilon", Need)),
    Row("n_ctx", "max_position_embeddings", Size("context_length", Unknown)),
];

const ATTENTION_BIAS: &[Row] = &[
    Row("attention.qkv_bias", "attention_bias", Tensor("attn_q.bias")),
    Row("attention.out_bias", "attention_bias", No),
];

const DENSE: &[Row] = &[Row("dense.d_ff", "intermediate_size", Each("feed_forward_length", Need))];
const DENSE_BIAS: &[Row] = &[Row("dense.bias", "mlp_bias", Tensor("ffn_gate.bias"))];

const EXPERTS: &[Row] = &[
    Row("experts.n_used", "num_experts_per_tok", Size("expert_used_count", Need)),
    Row("experts.n_expert", "num_experts", Size("expert_count", Need)),
    Row("experts.d_ff", "intermediate_size", Each("feed_forward_length", Need)),
    Row("balance_scale", "router_aux_loss_coef", No),
];

const LOCAL_EXPERTS: &[Row] =
    &[Row("experts.n_expert", "num_local_experts", Size("expert_count", Need))];
const CLIP: &[Row] = &[Row("attention.clip", "clip_qkv", No)];
const DELTA_NORM: &[Row] =
    &[Row("mamba1.norm_eps", "mixer_rms_eps", Float("attention.layer_norm_rms_epsilon", Need))];

const DOTS1: &[Row] = &[
    Row("experts.n_expert", "n_routed_experts", No),
    Row("experts.n_used", "num_experts_per_tok", No),
    Row("experts.d_ff", "moe_intermediate_size", No),
    Row("experts.d_shared", "n_shared_experts", No),
    Row("experts.scale", "routed_scaling_factor", No),
    Row("experts.n_group", "n_group", No),
    Row("experts.n_group_used", "topk_group", No),
];

const SLIDING: &[Row] = &[Row("attention.slides", "use_sliding_window", No)];

const HYBRID: &[Row] = &[
    Row("mamba2.factor", "mamba_expand", No),
    Row("mamba.bias", "mamba_proj_bias", No),
    Row("mamba.conv_bias", "mamba_conv_bias", Tensor("ssm_conv1d.bias")),
    Row("mamba2.expand", "mamba_n_heads", Size("ssm.time_step_rank", Need)),
    Row("mamba2.d_head", "mamba_d_head", Parts("ssm.inner_size")),
    Row("mamba2.n_group", "mamba_n_groups", Size("ssm.group_count", Need)),
    Row("mamba2.d_state", "mamba_d_state", Size("ssm.state_size", Need)),
    Row("mamba2.d_conv", "mamba_d_conv", Size("ssm.conv_kernel", Need)),
];

/// Mamba-3 as flash-linear-attention spells it.
const MAMBA3: &[Row] = &[
    Row("eps", "norm_eps", No),
    Row("mamba3.bias", "use_bias", No),
    Row("mamba3.d_state", "state_size", No),
    Row("mamba3.expand", "expand", No),
    Row("mamba3.d_head", "head_dim", No),
    Row("mamba3.n_group", "n_groups", No),
    Row("mamba3.mimo", "is_mimo", No),
    Row("mamba3.rank", "mimo_rank", No),
    Row("mamba3.rope_fraction", "rope_fraction", No),
    Row("mamba3.a_floor", "A_floor", No),
    Row("mamba3.out_norm", "is_outproj_norm", No),
    Row("mamba3.decay", "decay", No),
];

/// `MambaConfig` of mamba_ssm, with one object for its blocks and one for attention.
const MAMBA_SSM: &[Row] = &[
    Row("layers", "n_layer", No),
    Row("tied", "tie_embeddings", No),
    Row("vocab_multiple", "pad_vocab_size_multiple", No),
    Row("dense.d_ff", "d_intermediate", No),
    Row("attn_layer_indices", "attn_layer_idx", No),
    Row("mamba.bias", "ssm_cfg.bias", No),
    Row("mamba.conv_bias", "ssm_cfg.conv_bias", No),
    Row("mamba.delta_floor", "ssm_cfg.dt_init_floor", No),
    Row("mamba.norm", "ssm_cfg.rmsnorm", No),
    Row("mamba.norm_first", "ssm_cfg.norm_before_gate", No),
    Row("mamba1.factor", "ssm_cfg.expand", No),
    Row("mamba1.expand", "ssm_cfg.expand", No),
    Row("mamba1.d_state", "ssm_cfg.d_state", No),
    Row("mamba1.d_conv", "ssm_cfg.d_conv", No),
    Row("mamba1.delta_rank", "ssm_cfg.dt_rank", No),
    Row("mamba1.delta_min", "ssm_cfg.dt_min", No),
    Row("mamba1.delta_max", "ssm_cfg.dt_max", No),
    Row("mamba2.factor", "ssm_cfg.expand", No),
    Row("mamba2.expand", "ssm_cfg.expand", No),
    Row("mamba2.d_state", "ssm_cfg.d_state", No),
    Row("mamba2.d_conv", "ssm_cfg.d_conv", No),
    Row("mamba2.d_head", "ssm_cfg.headdim", No),
    Row("mamba2.n_group", "ssm_cfg.ngroups", No),
    Row("mamba2.delta_min", "ssm_cfg.dt_min", No),
    Row("mamba2.delta_max", "ssm_cfg.dt_max", No),
    Row("time_step_limit", "ssm_cfg.dt_limit", No),
    Row("mamba3.d_state", "ssm_cfg.d_state", No),
    Row("mamba3.expand", "ssm_cfg.expand", No),
    Row("mamba3.d_head", "ssm_cfg.headdim", No),
    Row("mamba3.n_group", "ssm_cfg.ngroups", No),
    Row("mamba3.mimo", "ssm_cfg.is_mimo", No),
    Row("mamba3.rank", "ssm_cfg.mimo_rank", No),
    Row("mamba3.rope_fraction", "ssm_cfg.rope_fraction", No),
    Row("mamba3.a_floor", "ssm_cfg.A_floor", No),
    Row("mamba3.out_norm", "ssm_cfg.is_outproj_norm", No),
    Row("mamba3.decay", "ssm_cfg.decay", No),
    Row("attention.n_head", "attn_cfg.num_heads", No),
    Row("attention.n_kv_head", "attn_cfg.num_heads_kv", No),
    Row("attention.d_head", "attn_cfg.head_dim", No),
    Row("attention.scale", "attn_cfg.softmax_scale", No),
    Row("attention.qkv_bias", "attn_cfg.qkv_proj_bias", No),
    Row("attention.out_bias", "attn_cfg.out_proj_bias", No),
    Row("attention.d_rotary", "attn_cfg.rotary_emb_dim", No),
    Row("attention.rope_base", "attn_cfg.rotary_emb_base", No),
];

/// Heads of keys are listed by layer, with zero for a recurrent one.
const KV_BY_LAYER: &[Row] =
    &[Row("attention.n_kv_head", "num_key_value_heads", Parts("attention.head_count_kv"))];

const JAMBA: &[Row] = &[
    Row("mamba1.factor", "mamba_expand", No),
    Row("mamba.bias", "mamba_proj_bias", No),
    Row("mamba.conv_bias", "mamba_conv_bias", No),
    Row("mamba1.expand", "mamba_expand", Parts("ssm.inner_size")),
    Row("mamba1.d_state", "mamba_d_state", Size("ssm.state_size", Need)),
    Row("mamba1.d_conv", "mamba_d_conv", Size("ssm.conv_kernel", Need)),
    Row("mamba1.delta_rank", "mamba_dt_rank", Size("ssm.time_step_rank", Need)),
    Row("mixer_rms_eps", "rms_norm_eps", No),
    Row("experts.n_used", "num_experts_per_tok", Size("expert_used_count", Is(1))),
    Row("experts.n_expert", "num_experts", Size("expert_count", Is(1))),
];

const QWEN2_MOE: &[Row] = &[
    Row("attention.qkv_bias", "qkv_bias", Tensor("attn_q.bias")),
    Row("experts.d_ff", "moe_intermediate_size", Size("expert_feed_forward_length", Unknown)),
    Row(
        "experts.d_shared",
        "shared_expert_intermediate_size",
        Size("expert_shared_feed_forward_length", Unknown),
    ),
];

const GRANITE: &[Row] = &[
    Row("embed_scale", "embedding_multiplier", Float("embedding_scale", Is(1))),
    Row("residual_scale", "residual_multiplier", Float("residual_scale", Is(1))),
    Row("logit_scale", "logits_scaling", Float("logit_scale", Is(1))),
    Row("attention.scale", "attention_multiplier", Float("attention.scale", Is(0))),
    Row("attention.position", "position_embedding_type", Parts("rope.scaling.finetuned")),
    Row("experts.n_expert", "num_local_experts", Size("expert_count", Is(0))),
    Row("experts.n_used", "num_experts_per_tok", Size("expert_used_count", Is(0))),
    Row("dense.d_ff", "shared_intermediate_size", Parts("feed_forward_length")),
    Row("experts.d_shared", "shared_intermediate_size", Parts("expert_shared_feed_forward_length")),
];

const FALCON_H1: &[Row] = &[
    Row("embed_scale", "embedding_multiplier", No),
    Row("logit_scale", "lm_head_multiplier", No),
    Row("attention.in_scale", "attention_in_multiplier", No),
    Row("attention.key_scale", "key_multiplier", No),
    Row("attention.out_scale", "attention_out_multiplier", No),
    Row("mamba2.scales", "ssm_multipliers", No),
    Row("mamba2.in_scale", "ssm_in_multiplier", No),
    Row("mamba2.out_scale", "ssm_out_multiplier", No),
    Row("dense.scales", "mlp_multipliers", No),
    Row("mamba2.d_inner", "mamba_d_ssm", Size("ssm.inner_size", Need)),
    Row("mamba.norm", "mamba_rms_norm", Tensor("ssm_norm.weight")),
    Row("mamba.norm_first", "mamba_norm_before_gate", No),
    Row("mamba.out_bias", "projectors_bias", No),
];

const OWN: &[Row] =
    &[Row("mamba1.factor", "mamba1.expand", No), Row("mamba2.factor", "mamba2.expand", No)];

/// Lists a set of names once: an enum with the facts of each.
macro_rules! table {
    ($(#[$doc:meta])* $kind:ident of $facts:ident { $($name:ident: $entry:expr,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)] // the facts name them
        pub enum $kind {
            $($name,)*
        }

        impl $kind {
            /// All of them.
            pub const ALL: &[$kind] = &[$($kind::$name,)*];
            /// Names of all.
            pub const NAMES: &[&str] = &[$($kind::$name.name(),)*];

            pub(super) const fn facts(self) -> &'static $facts {
                match self {
                    $($kind::$name => const { &$entry },)*
                }
            }

            /// What files call it.
            pub const fn name(self) -> &'static str {
                self.facts().name
            }

            /// The one of this name.
            pub fn from_name(name: &str) -> Option<$kind> {
                $kind::ALL.iter().copied().find(|one| one.name() == name)
            }

        }

        impl std::fmt::Display for $kind {
            fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

/// What is particular to an architecture of llama.cpp: its `general.architecture`, and more.
pub(super) struct ArchFacts {
    pub name: &'static str,
    pub traits: &'static [Trait],
}

/// In what an architecture may differ from the others.
#[derive(PartialEq)]
pub(crate) enum Trait {
    PairedRows,  // RoPE turns neighbours: rows of queries and keys are stored in pairs
    RopeFactors, // a tensor may hold a factor for each frequency of RoPE
    Hybrid,      // zero heads of keys mark layers without attention, and RoPE may be absent
    Normalised,  // weights of the chosen experts sum to one
    OutBias,     // the output of attention may have a bias
    HeadWidth,   // the width of a head is always written
}

table! {
    /// An architecture of llama.cpp that we read and write, and one of our own for what it lacks.
    Arch of ArchFacts {
        Llama: ArchFacts { name: "llama", traits: &[PairedRows, RopeFactors, Normalised, OutBias] },
        Qwen2: ArchFacts { name: "qwen2", traits: &[] },
        Qwen3: ArchFacts { name: "qwen3", traits: &[HeadWidth] },
        Qwen2Moe: ArchFacts { name: "qwen2moe", traits: &[] },
        Mamba: ArchFacts { name: "mamba", traits: &[] },
        Mamba2: ArchFacts { name: "mamba2", traits: &[] },
        Jamba: ArchFacts { name: "jamba", traits: &[Trait::Hybrid] },
        GraniteHybrid: ArchFacts {
            name: "granitehybrid",
            traits: &[PairedRows, RopeFactors, Trait::Hybrid, Normalised, OutBias],
        },
        FalconH1: ArchFacts { name: "falcon-h1", traits: &[OutBias, HeadWidth] },
        Elapid: ArchFacts { name: "elapid", traits: &[OutBias] },
    }
}

impl Arch {
    pub(crate) fn has(self, what: Trait) -> bool {
        self.facts().traits.contains(&what)
    }
}

pub(super) struct Names {
    pub embed: &'static str,
    pub norm: &'static str,
    pub layers: &'static str,
    pub mixer_norm: &'static str,
    pub feed_forward_norm: &'static str,
    pub mamba: &'static str,
    pub attention: &'static str,
    pub dense: &'static str,
}

const DECODER: Names = Names {
    embed: "model.embed_tokens.weight",
    norm: "model.norm.weight",
    layers: "model.layers",
    mixer_norm: "input_layernorm",
    feed_forward_norm: "post_attention_layernorm",
    mamba: "mamba",
    attention: "self_attn",
    dense: "mlp",
};

const HYBRID_NAMES: Names = Names {
    norm: "model.final_layernorm.weight",
    feed_forward_norm: "pre_ff_layernorm",
    dense: "feed_forward",
    ..DECODER
};

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Mixers {
    Mamba1,
    Mamba2,
    Mamba3,
    Attention,
    Periodic, // attention once in a period, Mamba-1 elsewhere
    Listed,   // attention at the layers of `attn_layer_indices`, Mamba-2 elsewhere
    Typed,    // attention or Mamba-2, as `layer_types` says
    Parallel, // both side by side
    Named,    // by `ssm_cfg.layer`, attention at the layers of `attn_layer_idx`
    Own,      // as our own config names them
}

/// The layers whose attention slides over a window.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Windows {
    None,
    All,
    Last,       // those of `layer_types`, else those from `max_window_layers` on
    EveryOther, // those of `layer_types`, else every other one before `max_window_layers`
}

pub(super) enum FeedForwards {
    None,
    Dense,
    Rounded, // dense, the width on a multiple of 128; none where it is 0
    Experts(Experts),
}

/// How a family chooses and stores experts.
pub(super) struct Experts {
    pub layers: ExpertLayers,
    pub prefix: &'static str,
    pub router: &'static str,
    pub score: Score,
    /// Whether weights of the chosen are made to sum to one, unless `norm_topk_prob` says it.
    pub normalise: Option<bool>,
    pub form: ExpertForm,
    pub shared: Shared,
    pub choice_bias: Option<&'static str>,
}

/// The layers that have experts; the others are dense.
pub(super) enum ExpertLayers {
    All,
    Any,        // all, if there are experts
    Sparse,     // by `decoder_sparse_step` and `mlp_only_layers`
    AfterDense, // from `first_k_dense_replace` on
    Periodic,   // once in a period
    Own,        // as our own config names them
}

/// The feed-forward, by its name, that every token takes beside the chosen experts.
pub(super) enum Shared {
    None,
    Gated(&'static str),    // weighed by the sigmoid of a matrix
    Multiple(&'static str), // as wide as some experts together
    Plain(&'static str),    // as it is
    Maybe(&'static str),    // as it is, none where its width is 0
}

const LLAMA_FF: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

const EXPERT_FACTS: Experts = Experts {
    layers: ExpertLayers::All,
    prefix: "mlp",
    router: "gate",
    score: Score::Softmax,
    normalise: None,
    form: ExpertForm::Each(LLAMA_FF),
    shared: Shared::None,
    choice_bias: None,
};

/// The lists of layers that an architecture of llama.cpp computes.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Shape {
    Mamba1,
    Mamba2,
    Dense(QkNorm), // attention with dense feed-forwards
    Experts,       // attention with experts
    GatedShared,   // attention with experts beside a gated shared one
    Jamba,         // Mamba-1, and attention without RoPE
    Hybrid,        // Mamba-2 and attention
    Parallel,
}

pub(super) struct Facts {
    pub name: &'static str,              // `model_type`
    pub class: &'static str,             // of transformers, without `ForCausalLM`
    pub gguf: Option<(Arch, Shape)>,     // the architecture for models of this shape
    pub rows: &'static [&'static [Row]], // the first row of a name counts
    /// What absent keys mean, by our names, where most families have nothing or something else.
    pub defaults: &'static [(&'static str, f64)],
    /// Keys of config.json that a model out of GGUF has against the defaults of the class.
    pub fixed: &'static [(&'static str, bool)],
    pub names: Names,
    pub mixers: Mixers,
    pub windows: Windows,
    pub feed_forwards: FeedForwards,
    pub dense_form: DenseForm,
    /// Names of one matrix for queries, keys and values together, and of the output.
    pub fused_attention: Option<[&'static str; 2]>,
    pub qk_norm: QkNorm,
    pub has_rope: bool,       // where no key says it
    pub divides_logits: bool, // whether logits are divided by their factor instead of multiplied
    /// Whether the gated norm of Mamba-2 takes all channels together, whatever the groups.
    pub norms_whole: bool,
    pub fresh: FreshKind,
}

impl Facts {
    pub(super) fn row(&self, own: &str) -> Option<&'static Row> {
        self.rows.iter().flat_map(|rows| rows.iter()).find(|row| row.0 == own)
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = &'static Row> {
        let counts = |row: &&Row| self.row(row.0).is_some_and(|first| std::ptr::eq(first, *row));
        self.rows.iter().flat_map(|rows| rows.iter()).filter(counts)
    }
}

const LLAMA: Facts = Facts {
    name: "llama",
    class: "Llama",
    gguf: Some((Arch::Llama, Shape::Dense(QkNorm::None))),
    rows: &[ATTENTION, ATTENTION_BIAS, DENSE, DENSE_BIAS, COMMON],
    defaults: &[],
    fixed: &[],
    names: DECODER,
    mixers: Mixers::Attention,
    windows: Windows::None,
    feed_forwards: FeedForwards::Dense,
    dense_form: DenseForm::Gated(LLAMA_FF),
    fused_attention: None,
    qk_norm: QkNorm::None,
    has_rope: true,
    divides_logits: false,
    norms_whole: false,
    fresh: FreshKind::Normal,
};

const MAMBA: Facts = Facts {
    name: "mamba",
    class: "Mamba",
    gguf: Some((Arch::Mamba, Shape::Mamba1)),
    rows: &[MAMBA1, BACKBONE, COMMON],
    defaults: &[("tied", 1.0), ("init_std", 0.1), ("eps", 1e-5)],
    names: Names {
        embed: "backbone.embeddings.weight",
        norm: "backbone.norm_f.weight",
        layers: "backbone.layers",
        mixer_norm: "norm",
        mamba: "mixer",
        ..DECODER
    },
    mixers: Mixers::Mamba1,
    feed_forwards: FeedForwards::None,
    ..LLAMA
};

table! {
    /// A family of models, by its `model_type`.
    Family of Facts {
        Mamba: MAMBA,
        Mamba2: Facts {
            name: "mamba2", class: "Mamba2", gguf: Some((Arch::Mamba2, Shape::Mamba2)),
            rows: &[MAMBA2, BACKBONE, COMMON],
            defaults: &[("init_std", 0.1), ("eps", 1e-5), ("mamba2.d_head", 64.0),
                        ("mamba2.n_group", 8.0), ("mamba2.d_state", 128.0)],
            mixers: Mixers::Mamba2, ..MAMBA
        },
        FalconMamba: Facts {
            name: "falcon_mamba", class: "FalconMamba",
            rows: &[DELTA_NORM, MAMBA1, BACKBONE, COMMON],
            defaults: &[("tied", 1.0), ("init_std", 0.1), ("eps", 1e-5), ("mamba1.norm_eps", 1e-6)],
            ..MAMBA
        },
        Mamba3: Facts {
            name: "mamba3", class: "Mamba3", gguf: None, rows: &[MAMBA3, COMMON],
            defaults: &[("eps", 1e-5), ("mamba3.mimo", 0.0), ("mamba3.rank", 4.0)],
            mixers: Mixers::Mamba3, ..MAMBA
        },
        // A config.json without `model_type`; `mamba_ssm.rs` refuses what is computed otherwise.
        MambaSsm: Facts {
            name: "mamba_ssm", class: "MambaLMHeadModel", gguf: None, rows: &[MAMBA_SSM],
            defaults: &[("tied", 1.0), ("eps", 1e-5), ("vocab_multiple", 8.0),
                        ("mamba2.d_head", 64.0), ("mamba2.d_state", 128.0),
                        ("mamba3.mimo", 0.0), ("mamba3.rank", 4.0), ("attention.d_rotary", 0.0),
                        ("attention.qkv_bias", 1.0), ("attention.out_bias", 1.0)],
            names: Names {
                embed: "backbone.embedding.weight", feed_forward_norm: "norm2",
                attention: "mixer", ..MAMBA.names
            },
            mixers: Mixers::Named, feed_forwards: FeedForwards::Rounded,
            dense_form: DenseForm::UpFirst(["fc1", "fc2"]),
            fused_attention: Some(["in_proj", "out_proj"]), fresh: FreshKind::Torch, ..MAMBA
        },
        Llama: LLAMA,
        Mistral: Facts {
            name: "mistral", class: "Mistral",
            rows: &[ATTENTION, ATTENTION_BIAS, DENSE, COMMON],
            defaults: &[("attention.n_kv_head", 8.0), ("attention.window", 4096.0)],
            windows: Windows::All, ..LLAMA
        },
        Qwen2: Facts {
            name: "qwen2", class: "Qwen2", gguf: Some((Arch::Qwen2, Shape::Dense(QkNorm::None))),
            rows: &[ATTENTION, SLIDING, DENSE, COMMON],
            defaults: &[("attention.n_kv_head", 32.0), ("attention.window", 4096.0),
                        ("attention.qkv_bias", 1.0)],
            windows: Windows::Last, ..LLAMA
        },
        Qwen3: Facts {
            name: "qwen3", class: "Qwen3", gguf: Some((Arch::Qwen3, Shape::Dense(QkNorm::Head))),
            rows: &[ATTENTION, ATTENTION_BIAS, SLIDING, DENSE, COMMON],
            defaults: &[("attention.n_kv_head", 32.0), ("attention.window", 4096.0),
                        ("attention.d_head", 128.0)],
            windows: Windows::Last, qk_norm: QkNorm::Head, ..LLAMA
        },
        Mixtral: Facts {
            name: "mixtral", class: "Mixtral", gguf: Some((Arch::Llama, Shape::Experts)),
            rows: &[LOCAL_EXPERTS, ATTENTION, ATTENTION_BIAS, EXPERTS, COMMON],
            defaults: &[("eps", 1e-5), ("attention.n_kv_head", 8.0), ("attention.rope_base", 1e6),
                        ("experts.n_expert", 8.0), ("experts.n_used", 2.0),
                        ("balance_scale", 0.001)],
            windows: Windows::All,
            feed_forwards: FeedForwards::Experts(Experts {
                prefix: "block_sparse_moe", normalise: Some(true),
                form: ExpertForm::Each(["w1", "w3", "w2"]), ..EXPERT_FACTS
            }),
            ..LLAMA
        },
        Qwen2Moe: Facts {
            name: "qwen2_moe", class: "Qwen2Moe", gguf: Some((Arch::Qwen2Moe, Shape::GatedShared)),
            rows: &[QWEN2_MOE, ATTENTION, SLIDING, DENSE, EXPERTS, COMMON],
            defaults: &[("attention.n_kv_head", 16.0), ("attention.window", 4096.0),
                        ("attention.qkv_bias", 1.0), ("experts.n_expert", 60.0),
                        ("experts.n_used", 4.0), ("balance_scale", 0.001)],
            windows: Windows::EveryOther,
            feed_forwards: FeedForwards::Experts(Experts {
                layers: ExpertLayers::Sparse, shared: Shared::Gated("mlp.shared_expert"),
                ..EXPERT_FACTS
            }),
            ..LLAMA
        },
        Olmoe: Facts {
            name: "olmoe", class: "Olmoe", gguf: None,
            rows: &[CLIP, ATTENTION, ATTENTION_BIAS, EXPERTS, COMMON],
            defaults: &[("eps", 1e-5), ("experts.n_expert", 64.0), ("experts.n_used", 8.0),
                        ("balance_scale", 0.01)],
            feed_forwards: FeedForwards::Experts(EXPERT_FACTS), qk_norm: QkNorm::Whole, ..LLAMA
        },
        Dots1: Facts {
            name: "dots1", class: "Dots1", gguf: None,
            rows: &[DOTS1, ATTENTION, ATTENTION_BIAS, DENSE, COMMON],
            defaults: &[("attention.n_kv_head", 32.0), ("attention.window", 4096.0),
                        ("attention.slides", 1.0), ("max_window_layers", 62.0)],
            windows: Windows::Last,
            feed_forwards: FeedForwards::Experts(Experts {
                layers: ExpertLayers::AfterDense, score: Score::Sigmoid,
                shared: Shared::Multiple("mlp.shared_experts"),
                choice_bias: Some("gate.e_score_correction_bias"), ..EXPERT_FACTS
            }),
            qk_norm: QkNorm::Head, ..LLAMA
        },
        Jamba: Facts {
            name: "jamba", class: "Jamba", gguf: Some((Arch::Jamba, Shape::Jamba)),
            rows: &[JAMBA, KV_BY_LAYER, ATTENTION, ATTENTION_BIAS, DENSE, EXPERTS, COMMON],
            defaults: &[("attention.n_kv_head", 8.0), ("experts.n_expert", 16.0),
                        ("experts.n_used", 2.0), ("balance_scale", 0.001)],
            fixed: &[("use_mamba_kernels", false)],
            names: HYBRID_NAMES, mixers: Mixers::Periodic,
            feed_forwards: FeedForwards::Experts(Experts {
                layers: ExpertLayers::Periodic, prefix: "feed_forward", router: "router",
                normalise: Some(false), ..EXPERT_FACTS
            }),
            has_rope: false, ..LLAMA
        },
        // Before Bamba, whose models are written to GGUF by the keys of this one.
        GraniteMoeHybrid: Facts {
            name: "granitemoehybrid", class: "GraniteMoeHybrid",
            gguf: Some((Arch::GraniteHybrid, Shape::Hybrid)),
            rows: &[GRANITE, HYBRID, KV_BY_LAYER, ATTENTION, ATTENTION_BIAS, EXPERTS, COMMON],
            defaults: &[("attention.scale", 1.0), ("dense.d_ff", 1024.0),
                        ("experts.d_shared", 1024.0), ("experts.n_expert", 8.0),
                        ("experts.n_used", 2.0), ("balance_scale", 0.001)],
            names: Names { dense: "shared_mlp", ..DECODER }, mixers: Mixers::Typed,
            feed_forwards: FeedForwards::Experts(Experts {
                layers: ExpertLayers::Any, prefix: "block_sparse_moe", router: "router.layer",
                score: Score::SoftmaxOfChosen, normalise: Some(false),
                form: ExpertForm::Stacked(["input_linear", "output_linear"]),
                shared: Shared::Plain("shared_mlp"), ..EXPERT_FACTS
            }),
            dense_form: DenseForm::Fused(["input_linear", "output_linear"]),
            has_rope: false, divides_logits: true, norms_whole: true, ..LLAMA
        },
        Bamba: Facts {
            name: "bamba", class: "Bamba", gguf: Some((Arch::GraniteHybrid, Shape::Hybrid)),
            rows: &[HYBRID, ATTENTION, ATTENTION_BIAS, DENSE, DENSE_BIAS, COMMON],
            defaults: &[("eps", 1e-5), ("attention.n_kv_head", 8.0),
                        ("partial_rotary_factor", 0.5)],
            names: HYBRID_NAMES, mixers: Mixers::Listed, norms_whole: true, ..LLAMA
        },
        FalconH1: Facts {
            name: "falcon_h1", class: "FalconH1", gguf: Some((Arch::FalconH1, Shape::Parallel)),
            rows: &[FALCON_H1, HYBRID, ATTENTION, ATTENTION_BIAS, DENSE, DENSE_BIAS, COMMON],
            // The RoPE base of transformers 4, which wrote the published files; 5 has 1e4.
            defaults: &[("eps", 1e-5), ("attention.n_kv_head", 8.0), ("attention.rope_base", 1e5),
                        ("mamba2.d_inner", 1024.0), ("mamba.norm", 0.0), ("mamba.norm_first", 1.0),
                        ("mamba.out_bias", 0.0)],
            fixed: &[("mamba_norm_before_gate", false)],
            names: HYBRID_NAMES, mixers: Mixers::Parallel, ..LLAMA
        },
        // Any list of layers; `own.rs` reads them.
        Elapid: Facts {
            name: "elapid", gguf: None, rows: &[OWN],
            defaults: &[("tied", 1.0), ("eps", 1e-5), ("balance_scale", 0.01),
                        ("mamba2.d_state", 64.0), ("experts.n_expert", 8.0),
                        ("experts.n_used", 2.0)],
            names: Names {
                embed: "embed.weight", norm: "norm.weight", layers: "layers",
                mixer_norm: "mixer_norm", feed_forward_norm: "feed_forward_norm",
                mamba: "mixer", attention: "mixer", dense: "feed_forward",
            },
            mixers: Mixers::Own, windows: Windows::All,
            feed_forwards: FeedForwards::Experts(Experts {
                layers: ExpertLayers::Own, prefix: "feed_forward", router: "router",
                score: Score::SoftmaxOfChosen, normalise: Some(false),
                form: ExpertForm::Each(["gate", "up", "down"]),
                shared: Shared::Maybe("feed_forward.shared"), ..EXPERT_FACTS
            }),
            dense_form: DenseForm::Gated(["gate", "up", "down"]), ..LLAMA
        },
    }
}
