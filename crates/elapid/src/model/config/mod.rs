//! What a model is: a list of layers, each a mixer and a feed-forward.
//!
//! `family.rs` is the table of families: to add one like Llama, add its entry. `families.rs` turns
//! the config.json of any of them into this, and `own.rs` our own config; `check.rs` refuses what
//! no model can be. Outside this folder nothing knows families. Parameters
//! keep the names of the family's files, so that adapters, patterns and exports speak the names
//! people know.

mod check;
mod experts;
mod families;
mod family;
pub mod gguf;
mod keys;
mod own;
pub mod preset;
mod rope;

use crate::error::{Error, Result};
use crate::ops::activation::Kind;
use crate::ops::attention::Attention;
use crate::ops::gated_norm::GatedNorm;
use crate::ops::rope::Rope;
use crate::ops::router::Router;
pub use family::{Arch, Family};
use keys::Keys;

/// Families that `Config::from_json` reads.
pub const FAMILIES: &[&str] = Family::NAMES;

/// A whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `model_type`.
    pub family: Family,
    /// Tokens in the vocabulary.
    pub n_vocab: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Longest sequence the model was made for, where the family has a limit.
    pub n_ctx: Option<usize>,
    /// The layers, first to last.
    pub layers: Vec<LayerConfig>,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// `eps` of the final norm.
    pub eps: f32,
    /// Factor of the embeddings.
    pub embed_scale: f32,
    /// Factor of the logits.
    pub logit_scale: f32,
    /// Factor of the load-balance loss in training.
    pub balance_scale: f32,
    /// Deviation of fresh weights.
    pub init_std: f32,
    /// Name of the embedding.
    pub embed_name: String,
    /// Name of the final norm.
    pub norm_name: String,
}

/// One layer: `h += residual_scale * mixer(norm(h))`, then the same with the feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Name of the norm before the mixer.
    pub mixer_norm: String,
    /// What mixes tokens.
    pub mixer: MixerConfig,
    /// Name of the norm before the feed-forward.
    pub feed_forward_norm: String,
    /// What works on each token.
    pub feed_forward: FeedForwardConfig,
    /// `eps` of both norms.
    pub eps: f32,
    /// Factor of both branches.
    pub residual_scale: f32,
}

impl LayerConfig {
    /// How often it adds to the residual stream.
    pub fn n_branches(&self) -> usize {
        1 + (self.feed_forward != FeedForwardConfig::None) as usize
    }
}

/// What mixes tokens. Mamba-3 will be one more line here.
#[derive(Clone, Debug, PartialEq)]
pub enum MixerConfig {
    /// Selective scan.
    Mamba1(Mamba1Config),
    /// State-space duality.
    Mamba2(Mamba2Config),
    /// Causal attention.
    Attention(AttentionConfig),
    /// A causal depthwise convolution and nothing else.
    ShortConv(ShortConvConfig),
    /// Mamba-2 and attention side by side on one input, their outputs added.
    Parallel(Mamba2Config, AttentionConfig),
}

/// How the step size, B and C of Mamba-1 are normed before use.
#[derive(Clone, Debug, PartialEq)]
pub enum InnerNorm {
    /// Not at all.
    None,
    /// Without weights.
    Plain {
        /// `eps`.
        eps: f32,
    },
    /// With weights of their own.
    Weighted {
        /// `eps`.
        eps: f32,
    },
}

/// Range that fresh step sizes are drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaInit {
    /// Smallest.
    pub min: f32,
    /// Largest.
    pub max: f32,
    /// Nothing below this.
    pub floor: f32,
}

impl Default for DeltaInit {
    fn default() -> DeltaInit {
        DeltaInit { min: 1e-3, max: 0.1, floor: 1e-4 }
    }
}

/// A Mamba-1 block.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba1Config {
    /// Where its parameters are.
    pub prefix: String,
    /// Channels.
    pub d_inner: usize,
    /// State numbers per channel.
    pub d_state: usize,
    /// Taps of the convolution.
    pub d_conv: usize,
    /// Rank of the step size.
    pub delta_rank: usize,
    /// Whether in and out projections have biases.
    pub proj_bias: bool,
    /// Whether the convolution has a bias.
    pub conv_bias: bool,
    /// Norms of step size, B and C.
    pub inner_norm: InnerNorm,
    /// Fresh step sizes.
    pub delta_init: DeltaInit,
}

/// A Mamba-2 block.
#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Config {
    /// Where its parameters are.
    pub prefix: String,
    /// Heads.
    pub n_head: usize,
    /// Width of a head.
    pub d_head: usize,
    /// Groups that share B and C.
    pub n_group: usize,
    /// State numbers per head channel.
    pub d_state: usize,
    /// Taps of the convolution.
    pub d_conv: usize,
    /// Whether the in projection has a bias.
    pub in_bias: bool,
    /// Whether the out projection has one.
    pub out_bias: bool,
    /// Whether the convolution has one.
    pub conv_bias: bool,
    /// The gated norm, whose groups need not be those of B and C; without it the gate alone.
    pub norm: Option<GatedNorm>,
    /// Step sizes are clamped to this range.
    pub delta_limit: (f32, f32),
    /// Factors of input, of (z, x, B, C, delta) and of the output.
    pub scales: Mamba2Scales,
    /// Fresh step sizes.
    pub delta_init: DeltaInit,
}

impl Mamba2Config {
    /// Channels.
    pub fn d_inner(&self) -> usize {
        self.n_head * self.d_head
    }
}

/// The factors of Falcon-H1; one everywhere else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba2Scales {
    /// Of the input.
    pub input: f32,
    /// Of z, x, B, C, delta after the in projection.
    pub parts: [f32; 5],
    /// Of the output.
    pub output: f32,
}

impl Default for Mamba2Scales {
    fn default() -> Self {
        Mamba2Scales { input: 1.0, parts: [1.0; 5], output: 1.0 }
    }
}

/// How queries and keys are normed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    /// Not at all.
    None,
    /// Each head by itself, with one weight for all heads.
    Head,
    /// All heads together.
    Whole,
}

/// An attention block.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Where its parameters are.
    pub prefix: String,
    /// Heads, scale, window.
    pub dims: Attention,
    /// Biases of queries, keys and values.
    pub qkv_bias: bool,
    /// Bias of the output.
    pub out_bias: bool,
    /// Norm of queries and keys.
    pub qk_norm: QkNorm,
    /// Its `eps`.
    pub qk_eps: f32,
    /// Queries, keys and values are clamped to plus and minus this.
    pub clip: Option<f32>,
    /// Rotary positions, or none.
    pub rope: Option<Rope>,
    /// Factor of the input.
    pub in_scale: f32,
    /// Factor of the keys.
    pub key_scale: f32,
    /// Factor of the output.
    pub out_scale: f32,
}

/// A short convolution.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConvConfig {
    /// Where its parameters are.
    pub prefix: String,
    /// Taps.
    pub d_conv: usize,
}

/// What works on each token.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardConfig {
    /// Nothing; there is no second norm either.
    None,
    /// One for all tokens.
    Dense(DenseConfig),
    /// A few of many for each token.
    Experts(ExpertsConfig),
}

/// How the matrices of a feed-forward are stored.
#[derive(Clone, Debug, PartialEq)]
pub enum DenseForm {
    /// `down(act(gate(x)) * up(x))` with three matrices of these names.
    Gated([&'static str; 3]),
    /// The same, gate above up in one matrix: (input, output).
    Fused([&'static str; 2]),
    /// `down(act(up(x)))`: (up, down).
    Plain([&'static str; 2]),
}

/// A dense feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseConfig {
    /// Where its parameters are.
    pub prefix: String,
    /// Inner width.
    pub d_ff: usize,
    /// Activation.
    pub activation: Kind,
    /// Names and shape of the matrices.
    pub form: DenseForm,
    /// Biases everywhere.
    pub bias: bool,
    /// Factor of the gate before the activation.
    pub gate_scale: f32,
    /// Factor of the output.
    pub out_scale: f32,
}

/// Where the matrices of experts are.
#[derive(Clone, Debug, PartialEq)]
pub enum ExpertForm {
    /// `{prefix}.experts.{e}.{name}` for gate, up, down.
    Each([&'static str; 3]),
    /// (n_expert, 2 d_ff, d_model), gate above up, and (n_expert, d_model, d_ff).
    Stacked([&'static str; 2]),
}

/// Experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Where its parameters are.
    pub prefix: String,
    /// Experts.
    pub n_expert: usize,
    /// Inner width of one.
    pub d_ff: usize,
    /// Activation.
    pub activation: Kind,
    /// Choice and weights.
    pub router: Router,
    /// Name of the router's matrix.
    pub router_name: String,
    /// Name of a bias that takes part in the choice only, and is not trained.
    pub choice_bias: Option<String>,
    /// Names of the experts' matrices.
    pub form: ExpertForm,
    /// A feed-forward that every token takes besides.
    pub shared: Option<DenseConfig>,
    /// Name of the matrix whose sigmoid weighs the shared one.
    pub shared_gate: Option<String>,
}

impl Config {
    /// Reads a config.json; `file` is its name for messages.
    pub fn from_json(file: &str, json: &str) -> Result<Config> {
        Config::from_keys(Keys::parse(file, json)?)
    }

    fn from_keys(mut keys: Keys) -> Result<Config> {
        let name = keys.str("model_type")?;
        if let Some(value) = keys.get("quantization_config") {
            let method = value.get("quant_method").unwrap_or(value);
            let problem = format!("weights quantised by {method} are not plain weights");
            let hint = "take the original weights, or a GGUF file of them";
            return Err(Error::config(keys.file(), "quantization_config", problem, hint));
        }
        let family = Family::from_name(name).ok_or_else(|| Error::UnknownFamily {
            file: keys.file().into(),
            family: name.into(),
            supported: FAMILIES.join(", "),
        })?;
        keys.set_family(family);
        let config = match family {
            Family::Elapid => own::config(&keys)?,
            _ => families::config(family, &keys)?,
        };
        match config.problems().into_iter().next() {
            Some((key, text)) => Err(keys.wrong(key, text)),
            None => Ok(config),
        }
    }
}
