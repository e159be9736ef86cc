//! A layer: norm, mixer, add; norm, feed-forward, add.
//!
//! Layers hold the ids of their parameters. What is frozen, stored in 16 bits or adapted, they do
//! not know: `Weights` hands them values. The residual addition of a branch is fused with the norm
//! that follows it, so a layer takes and returns a `Stream`: the sum so far and what is to be
//! added.

use crate::model::builder::Builder;
use crate::model::config::{Config, FeedForwardConfig, LayerConfig};
use crate::model::feed_forward::FeedForward;
use crate::model::mixers::Mixer;
use crate::model::pass::Pass;
use crate::model::state::States;
use crate::model::weights::ParamId;
use crate::ops::add::add;
use crate::ops::norm::{add_norm, rms_norm};
use crate::tape::Var;
use std::ops::Range;

/// The residual stream between two blocks.
#[derive(Clone)]
pub(crate) struct Stream {
    pub h: Var,
    /// What is still to be added, and its factor.
    pub branch: Option<(Var, f32)>,
}

impl Stream {
    pub fn needs_grad(&self) -> bool {
        self.h.needs_grad() || self.branch.as_ref().is_some_and(|branch| branch.0.needs_grad())
    }

    /// Adds the branch; returns the sum and its norm.
    pub fn join(&self, pass: &Pass, norm: ParamId, eps: f32) -> (Var, Var) {
        let w = pass.var(norm);
        match &self.branch {
            Some((branch, factor)) => add_norm(pass.tape, &self.h, branch, *factor, &w, eps),
            None => {
                let d = w.value().n_elem();
                (self.h.clone(), rms_norm(pass.tape, &self.h, Some(&w), d, eps))
            }
        }
    }
}

pub(crate) struct Layer {
    mixer_norm: ParamId,
    /// Side by side on one input, their outputs added; nearly always one.
    mixers: Vec<Box<dyn Mixer>>,
    feed_forward: Option<(ParamId, FeedForward)>,
    eps: f32,
    pub residual_scale: f32,
    /// Ids of its parameters, without adapters.
    pub params: Range<usize>,
}

pub(crate) struct LayerOut {
    pub stream: Stream,
    /// The stream before it, all branches added.
    pub entered: Var,
    /// The load-balance loss of its experts.
    pub balance: Option<Var>,
}

impl Layer {
    pub fn new(builder: &mut Builder, model: &Config, config: &LayerConfig) -> Layer {
        let d_model = model.d_model;
        let first = builder.specs.len();
        let mixer_norm = builder.norm(config.mixer_norm.clone(), d_model);
        let mixers = config.mixer.parts().iter().map(|part| part.build(builder, d_model)).collect();
        let feed_forward = match &config.feed_forward {
            FeedForwardConfig::None => None,
            other => {
                let norm = builder.norm(config.feed_forward_norm.clone(), d_model);
                Some((norm, FeedForward::new(builder, other, d_model)))
            }
        };
        let (eps, residual_scale) = (model.eps, model.residual_scale);
        let params = first..builder.specs.len();
        Layer { mixer_norm, mixers, feed_forward, eps, residual_scale, params }
    }

    pub fn forward(&self, pass: &Pass, stream: &Stream, mut states: States) -> LayerOut {
        let (entered, normed) = stream.join(pass, self.mixer_norm, self.eps);
        let mixed = self.mixers.iter();
        let mixed = mixed.map(|mixer| mixer.forward(pass, &normed, states.as_deref_mut()));
        let branch = mixed.reduce(|sum, next| add(pass.tape, &sum, &next));
        let branch = branch.expect("a layer has a mixer");
        let stream = Stream { h: entered.clone(), branch: Some((branch, self.residual_scale)) };
        let Some((norm, feed_forward)) = &self.feed_forward else {
            return LayerOut { stream, entered, balance: None };
        };
        let (h, normed) = stream.join(pass, *norm, self.eps);
        let (branch, balance) = feed_forward.forward(pass, &normed);
        let stream = Stream { h, branch: Some((branch, self.residual_scale)) };
        LayerOut { stream, entered, balance }
    }
}
