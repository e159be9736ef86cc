//! What can be said of a model without loading its weights.

use super::checkpoint::Checkpoint;
use super::config::{Config, FeedForwardConfig};
use super::weights::Role;
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
        })
    }
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
