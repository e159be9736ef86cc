//! The projection lens: a new model sees with the embedding of another, a donor.
//!
//! ```text
//! embed = donor @ w^T          dw = dembed^T @ donor
//! ```
//!
//! | name    | shape              |                                                       |
//! |---------|--------------------|-------------------------------------------------------|
//! | `donor` | (n_vocab, d_donor) | frozen                                                |
//! | `w`     | (d_model, d_donor) | trained; begins as the principal components of `donor` |
//! | `embed` | (n_vocab, d_model) | what the model reads, and its head where that is tied  |
//!
//! The product is made once a step and is the model's embedding, so that layers, gradients and
//! exports know nothing of it: what is written is folded already, exactly.

use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::weights::{ParamId, Role, Weights};
use crate::ops::linear::{Linear, linear};
use crate::ops::scale::scaled_by;
use crate::tape::{Gradients, Tape, Var};
use crate::tensor::Tensor;
use crate::train::pca::principal_components;

/// Name of the projection.
pub const PROJECTION: &str = "lens.projection";

/// An embedding made of a donor's.
pub struct Lens {
    donor: Tensor,
    projection: ParamId,
    embed: ParamId,
}

impl Lens {
    /// Puts a lens before the embedding of a model: `donor` is (n_vocab, d_donor), any dtype.
    ///
    /// The projection begins as principal components, scaled so that the embedding has the size
    /// a fresh one would have.
    pub fn attach(model: &Model, weights: &mut Weights, donor: &Tensor, seed: u64) -> Result<Lens> {
        let config = model.config();
        let (n_rows, d_donor) = donor.dims2();
        if n_rows < config.n_vocab {
            let n_vocab = config.n_vocab;
            let problem = format!("the donor embeds {n_rows} tokens, the model knows {n_vocab}");
            return Err(Error::input(problem, "take the donor's own tokenizer"));
        }
        let device = weights.device().clone();
        let donor = donor.rows(0..config.n_vocab).to_f32().to(&device.host_device());
        let mut w = principal_components(&donor, config.d_model, seed)?;
        let embed = weights.find(&config.embed_name).expect("a model has an embedding");
        let made = product(&donor, &w);
        let square: f64 = made.to_vec().iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let rms = (square / made.n_elem() as f64).sqrt();
        if !(rms.is_finite() && rms > 0.0) {
            let problem = format!("the donor's embedding has a mean square of {rms}");
            return Err(Error::input(problem, "choose another donor"));
        }
        let factor = (f64::from(config.init_std) / rms) as f32;
        w = scaled_by(&w, factor);
        w.expect_shape("lens: projection", &[config.d_model, d_donor]);
        let projection = weights.push(PROJECTION, Role::Matrix, w);
        weights.derive(embed);
        let lens = Lens { donor: donor.to(&device), projection, embed };
        lens.forward(weights);
        Ok(lens)
    }

    /// A hash of the donor's part.
    pub(super) fn hash(&self) -> String {
        blake3::Hasher::new().update_rayon(&self.donor.to_bytes()).finalize().to_hex().to_string()
    }

    /// Makes the embedding anew.
    pub fn forward(&self, weights: &mut Weights) {
        let embed = product(&self.donor, weights.tensor(self.projection));
        *weights.tensor_mut(self.embed) = embed;
    }

    /// Inverts `forward`: the gradient of the embedding becomes one of the projection.
    pub(super) fn backward(&self, weights: &Weights, mut grads: Gradients) -> Gradients {
        if let Some(dembed) = grads.take(self.embed.0) {
            let tape = Tape::new();
            let w = tape.leaf(self.projection.0, weights.tensor(self.projection));
            let embed = linear(&tape, &Var::constant(self.donor.clone()), &Linear::from(w));
            tape.walk(vec![(embed, dembed)], &mut grads);
        }
        grads
    }
}

fn product(donor: &Tensor, w: &Tensor) -> Tensor {
    let linear_map = Linear::from(Var::constant(w.clone()));
    linear(&Tape::off(), &Var::constant(donor.clone()), &linear_map).value().clone()
}
