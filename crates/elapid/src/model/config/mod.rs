//! What a model is: a list of layers, each a mixer and a feed-forward.
//!
//! `family.rs` is the table of families: to add one like Llama, add its entry. `families.rs` turns
//! the config.json of any of them into this, `own.rs` has what our own config says otherwise;
//! `check.rs` refuses what no model can be. Outside this folder nothing knows families. Parameters
//! keep the names of the family's files, which adapters, patterns and exports speak too.

pub(crate) mod check;
mod experts;
pub(crate) mod families;
mod family;
pub mod gguf;
pub(crate) mod keys;
mod mamba_ssm;
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

pub use crate::model::mixers::*;

/// Families that `Config::from_json` reads.
pub const FAMILIES: &[&str] = Family::NAMES;

#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub family: Family,
    pub n_vocab: usize,
    pub d_model: usize,
    /// Longest sequence the model was made for, where the family has a limit.
    pub n_ctx: Option<usize>,
    pub layers: Vec<LayerConfig>,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// `eps` of the norms between blocks.
    pub eps: f32,
    /// Factor of every branch of a layer.
    pub residual_scale: f32,
    pub embed_scale: f32,
    pub logit_scale: f32,
    /// Factor of the load-balance loss in training.
    pub balance_scale: f32,
    /// Deviation of fresh weights.
    pub init_std: f32,
    /// How fresh matrices are drawn; the embedding is normal in any case.
    pub fresh: FreshKind,
    pub embed_name: String,
    pub norm_name: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FreshKind {
    /// Normal with `init_std`, smaller where it adds to the residual stream.
    Normal,
    /// As torch's `Linear`: uniform within the inverse root of the inputs.
    Torch,
}

/// One layer: `h += residual_scale * mixer(norm(h))`, then the same with the feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    pub mixer_norm: String,
    pub mixer: MixerConfig,
    pub feed_forward_norm: String,
    pub feed_forward: FeedForwardConfig,
}

impl LayerConfig {
    /// How often it adds to the residual stream.
    pub fn n_branches(&self) -> usize {
        1 + (self.feed_forward != FeedForwardConfig::None) as usize
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardConfig {
    /// Nothing; there is no second norm either.
    None,
    Dense(DenseConfig),
    Experts(ExpertsConfig),
}

impl FeedForwardConfig {
    pub fn dense(&self) -> Option<&DenseConfig> {
        if let FeedForwardConfig::Dense(c) = self { Some(c) } else { None }
    }

    pub fn experts(&self) -> Option<&ExpertsConfig> {
        if let FeedForwardConfig::Experts(c) = self { Some(c) } else { None }
    }
}

/// How the matrices of a feed-forward are stored.
#[derive(Clone, Debug, PartialEq)]
pub enum DenseForm {
    /// `down(act(gate(x)) * up(x))` with three matrices of these names.
    Gated([&'static str; 3]),
    /// The same, gate above up in one matrix: (input, output).
    Fused([&'static str; 2]),
    /// The same, up above gate.
    UpFirst([&'static str; 2]),
    /// `down(act(up(x)))`: (up, down).
    Plain([&'static str; 2]),
}

#[derive(Clone, Debug, PartialEq)]
pub struct DenseConfig {
    pub prefix: String,
    pub d_ff: usize,
    pub activation: Kind,
    pub form: DenseForm,
    pub bias: bool,
    /// Factor of the gate before the activation.
    pub gate_scale: f32,
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

#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    pub prefix: String,
    pub n_expert: usize,
    pub d_ff: usize,
    pub activation: Kind,
    pub router: Router,
    pub router_name: String,
    /// Name of a bias that takes part in the choice only, and is not trained.
    pub choice_bias: Option<String>,
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
        // Only mamba_ssm does not say what its files are.
        let is_bare = !keys.has("model_type") && keys.has("ssm_cfg");
        let name = if is_bare { Family::MambaSsm.name() } else { keys.str("model_type")? };
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
        match family {
            Family::Elapid => own::check(&keys)?,
            Family::MambaSsm => mamba_ssm::check(&keys)?,
            _ => {}
        }
        let config = families::config(family, &keys)?;
        match config.problems().into_iter().next() {
            Some((key, text)) => Err(keys.wrong(key, text)),
            None => Ok(config),
        }
    }
}
