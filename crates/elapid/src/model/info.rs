//! What can be said of a model without loading its weights.

use super::Model;
use super::checkpoint::Checkpoint;
use super::config::{Config, FeedForwardConfig, LayerConfig};
use super::weights::{ParamId, Role};
use crate::error::Result;
use std::collections::BTreeMap;

/// What can be said of a model without loading its weights.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// What it calls itself.
    pub name: String,
    /// `model_type` of its config.json.
    pub family: String,
    /// The architecture that its GGUF file names.
    pub architecture: Option<String>,
    /// Kinds of layers in order of appearance, and how many there are of each.
    pub layers: Vec<(String, usize)>,
    /// Layers in all.
    pub n_layer: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Rows of the embedding.
    pub n_vocab: usize,
    /// Tokens it was trained to read at once, where the model says.
    pub n_ctx: Option<usize>,
    /// Tokens that a prediction can depend on, itself and those before it, where layers bound them:
    /// convolutions and windows of attention.
    pub n_seen: Option<usize>,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Parameters in all.
    pub n_params: usize,
    /// Of which in matrices of linear layers.
    pub n_matrix: usize,
    /// Of which in the embedding.
    pub n_embedding: usize,
    /// Of which in vectors.
    pub n_vector: usize,
    /// Numbers that are stored and never trained.
    pub n_buffer: usize,
    /// Bytes of weights by the name of their dtype.
    pub dtype_bytes: BTreeMap<&'static str, usize>,
    /// Bytes of the state of a sequence before its first token.
    pub state_bytes: usize,
    /// Bytes that each token adds to it.
    pub state_bytes_per_token: usize,
    /// Bytes of activations of each token of a prompt that is read, in f32: an estimate from the
    /// widths of the layers.
    pub activation_bytes_per_token: usize,
}

impl Checkpoint {
    /// What can be said of the model without loading its weights; fails where they do not fit the
    /// configuration.
    pub fn info(&self) -> Result<ModelInfo> {
        let (config, specs) = (self.model().config(), self.model().specs());
        let n = |role: Role| {
            let of_role = specs.iter().filter(|spec| spec.role == role);
            of_role.map(|spec| spec.shape.iter().product::<usize>()).sum::<usize>()
        };
        let (n_matrix, n_embedding) = (n(Role::Matrix), n(Role::Embedding));
        let [state_bytes, state_bytes_per_token] = self.model().state_bytes();
        let (n_vector, n_buffer) = (n(Role::Vector), n(Role::Buffer));
        let architecture = match self.gguf() {
            Some(gguf) => gguf.str("general.architecture")?.map(str::to_string),
            None => None,
        };
        Ok(ModelInfo {
            name: self.name().to_string(),
            family: config.family.to_string(),
            architecture,
            layers: kinds(config),
            n_layer: config.layers.len(),
            d_model: config.d_model,
            n_vocab: config.n_vocab,
            n_ctx: config.n_ctx,
            n_seen: seen(config),
            tied: config.tied,
            n_params: n_matrix + n_embedding + n_vector + n_buffer,
            n_matrix,
            n_embedding,
            n_vector,
            n_buffer,
            dtype_bytes: match self.is_stored() {
                true => self.dtype_bytes()?,
                false => BTreeMap::from([("f32", 4 * self.n_params())]),
            },
            state_bytes,
            state_bytes_per_token,
            activation_bytes_per_token: 4 * activations(self.model()),
        })
    }
}

/// Numbers that are live for a token at a time, about: the stream, and of the widest layer either
/// what its mixer or what its feed-forward makes. A mixer holds twice the outputs of its maps,
/// which it convolves, rotates or gates.
fn activations(model: &Model) -> usize {
    let (config, specs) = (model.config(), model.specs());
    let width = |(idx, layer): (usize, &LayerConfig)| {
        let of_layer =
            specs.iter().enumerate().filter(|it| model.layer_of(ParamId(it.0)) == Some(idx));
        let of_mixer =
            of_layer.map(|it| it.1).take_while(|spec| spec.name != layer.feed_forward_norm);
        let maps = of_mixer.filter(|spec| spec.role == Role::Matrix);
        let mixer = 2 * maps.map(|spec| spec.shape[0]).sum::<usize>();
        let feed_forward = match &layer.feed_forward {
            FeedForwardConfig::None => 0,
            FeedForwardConfig::Dense(c) => 3 * c.d_ff + config.d_model,
            FeedForwardConfig::Experts(c) => {
                c.n_expert + c.router.n_used * (3 * c.d_ff + 2 * config.d_model) + config.d_model
            }
        };
        mixer.max(feed_forward)
    };
    3 * config.d_model + config.layers.iter().enumerate().map(width).max().unwrap_or(0)
}

/// Each layer sees its reach further back.
fn seen(config: &Config) -> Option<usize> {
    let reach = |sum: usize, layer: &LayerConfig| sum.checked_add(layer.mixer.reach()?);
    config.layers.iter().try_fold(1, reach)
}

/// Kinds of layers in order of appearance, with how many of each.
fn kinds(config: &Config) -> Vec<(String, usize)> {
    let mut list: Vec<(String, usize)> = Vec::new();
    for layer in &config.layers {
        let mixer = &layer.mixer;
        let kind = match &layer.feed_forward {
            FeedForwardConfig::None => mixer.to_string(),
            FeedForwardConfig::Dense(c) => format!("{mixer}, feed-forward {}", c.d_ff),
            FeedForwardConfig::Experts(c) => {
                format!("{mixer}, {} of {} experts of {}", c.router.n_used, c.n_expert, c.d_ff)
            }
        };
        match list.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, n)) => *n += 1,
            None => list.push((kind, 1)),
        }
    }
    list
}
