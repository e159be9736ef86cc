//! A layer: norm, mixer, add; norm, feed-forward, add.
//!
//! Layers hold the ids of their parameters. What is frozen, stored in 16 bits or adapted, they do
//! not know: `Weights` hands them values. The residual addition of a branch is fused with the norm
//! that follows it, so a layer takes and returns a `Stream`: the sum so far and what is to be
//! added.

mod feed_forward;
mod mixer;

use crate::model::config::{FeedForwardConfig, LayerConfig};
use crate::model::state::MixerState;
use crate::model::weights::{Init, LinearIds, ParamId, Role, Spec, Weights};
use crate::ops::linear::{Linear, linear, linear_each, linear_split};
use crate::ops::norm::{add_norm, rms_norm};
use crate::tape::{Tape, Var};
use crate::tensor::segment::Segments;
use feed_forward::FeedForward;
use mixer::{ConvIds, Mixer};
use std::ops::Range;

/// What every layer of one pass sees.
pub(crate) struct Pass<'t, 'w> {
    pub tape: &'t Tape<'w>,
    pub weights: &'w Weights,
    pub segments: &'t Segments,
    /// Whether experts report their load balance.
    pub wants_balance: bool,
}

impl Pass<'_, '_> {
    fn var(&self, id: ParamId) -> Var {
        self.weights.var(self.tape, id)
    }

    fn linear(&self, x: &Var, ids: &LinearIds) -> Var {
        linear(self.tape, x, &self.weights.linear(self.tape, ids))
    }

    /// Several maps of the same input.
    fn each<const N: usize>(&self, x: &Var, ids: [&LinearIds; N]) -> [Var; N] {
        let linears: Vec<Linear> =
            ids.iter().map(|ids| self.weights.linear(self.tape, ids)).collect();
        let list = linear_each(self.tape, x, &linears);
        list.try_into().unwrap_or_else(|_| panic!("as many results as maps"))
    }

    fn split(&self, x: &Var, ids: &LinearIds, widths: &[usize]) -> Vec<Var> {
        linear_split(self.tape, x, &self.weights.linear(self.tape, ids), widths)
    }
}

/// The residual stream between two blocks.
#[derive(Clone)]
pub(crate) struct Stream {
    /// The sum so far.
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

/// Collects what the model wants of its parameters.
pub(crate) struct Builder {
    pub specs: Vec<Spec>,
    /// Deviation of a fresh matrix.
    pub std: f32,
    /// Deviation of a matrix that writes to the residual stream: smaller the more there are.
    pub out_std: f32,
}

impl Builder {
    pub fn add(&mut self, name: String, shape: &[usize], init: Init, role: Role) -> ParamId {
        self.specs.push(Spec {
            stored_name: name.clone(),
            name,
            shape: shape.to_vec(),
            stored_shape: shape.to_vec(),
            stored_rows: None,
            init,
            role,
        });
        ParamId(self.specs.len() - 1)
    }

    pub fn norm(&mut self, name: String, d: usize) -> ParamId {
        self.add(name, &[d], Init::Constant(1.0), Role::Vector)
    }

    fn vector(&mut self, name: String, shape: &[usize], init: Init) -> ParamId {
        self.add(name, shape, init, Role::Vector)
    }

    /// `{name}.weight` and perhaps `{name}.bias`.
    fn linear(&mut self, name: String, shape: [usize; 2], std: f32, bias: bool) -> LinearIds {
        let init = Init::Normal(std);
        let weight = self.add(format!("{name}.weight"), &shape, init, Role::Matrix);
        let bias =
            bias.then(|| self.vector(format!("{name}.bias"), &shape[..1], Init::Constant(0.0)));
        LinearIds { weight, bias }
    }

    /// The weight of a depthwise convolution, stored with an axis of one in the middle.
    fn conv(&mut self, prefix: &str, channels: usize, d_conv: usize, bias: bool) -> ConvIds {
        let bound = (d_conv as f32).powf(-0.5);
        let name = format!("{prefix}.conv1d");
        let w = self.vector(format!("{name}.weight"), &[channels, d_conv], Init::Uniform(bound));
        self.specs[w.0].stored_shape = vec![channels, 1, d_conv];
        let bias =
            bias.then(|| self.vector(format!("{name}.bias"), &[channels], Init::Uniform(bound)));
        ConvIds { w, bias }
    }

    /// Rows of a larger stored tensor.
    fn part(
        &mut self,
        stored: &str,
        stored_shape: [usize; 3],
        first: usize,
        shape: [usize; 2],
        std: f32,
    ) -> LinearIds {
        let rows = first..first + shape[0];
        let name = format!("{stored}[{}..{}]", rows.start, rows.end);
        let weight = self.add(name, &shape, Init::Normal(std), Role::Matrix);
        let spec = &mut self.specs[weight.0];
        spec.stored_name = stored.into();
        spec.stored_shape = stored_shape.to_vec();
        spec.stored_rows = Some(rows);
        LinearIds { weight, bias: None }
    }
}

/// One layer.
pub(crate) struct Layer {
    mixer_norm: ParamId,
    mixer: Mixer,
    feed_forward: Option<(ParamId, FeedForward)>,
    eps: f32,
    residual_scale: f32,
    /// Ids of its parameters.
    params: Range<usize>,
}

/// What a layer gives back.
pub(crate) struct LayerOut {
    /// The stream behind it.
    pub stream: Stream,
    /// The stream before it, all branches added.
    pub entered: Var,
    /// The load-balance loss of its experts.
    pub balance: Option<Var>,
}

impl Layer {
    pub fn new(builder: &mut Builder, config: &LayerConfig, d_model: usize) -> Layer {
        let first = builder.specs.len();
        let mixer_norm = builder.norm(config.mixer_norm.clone(), d_model);
        let mixer = Mixer::new(builder, &config.mixer, d_model);
        let feed_forward = match &config.feed_forward {
            FeedForwardConfig::None => None,
            other => {
                let norm = builder.norm(config.feed_forward_norm.clone(), d_model);
                Some((norm, FeedForward::new(builder, other, d_model)))
            }
        };
        let (eps, residual_scale) = (config.eps, config.residual_scale);
        let params = first..builder.specs.len();
        Layer { mixer_norm, mixer, feed_forward, eps, residual_scale, params }
    }

    /// Ids of its parameters, without adapters.
    pub fn params(&self) -> Range<usize> {
        self.params.clone()
    }

    /// Factor of its branches.
    pub fn residual_scale(&self) -> f32 {
        self.residual_scale
    }

    pub fn forward(
        &self,
        pass: &Pass,
        stream: &Stream,
        states: Option<&mut [&mut MixerState]>,
    ) -> LayerOut {
        let (entered, normed) = stream.join(pass, self.mixer_norm, self.eps);
        let branch = self.mixer.forward(pass, &normed, states);
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
