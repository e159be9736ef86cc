//! A layer: norm, mixer, add; norm, feed-forward, add.
//!
//! Layers hold the ids of their parameters. What is frozen, stored in 16 bits or adapted, they do
//! not know: `Weights` hands them values. The residual addition of a branch is fused with the norm
//! that follows it, so a layer takes and returns a `Stream`: the sum so far and a branch to be added.

use crate::config::*;
use crate::ops::activation::{Kind, activation, gated};
use crate::ops::add::add;
use crate::ops::attention::{KvCache, attention};
use crate::ops::balance::balance_loss;
use crate::ops::clamp::clamp;
use crate::ops::conv::{Activation, Conv, causal_conv};
use crate::ops::dispatch::{combine, gather};
use crate::ops::gated_norm::{GatedNorm, gated_norm};
use crate::ops::linear::{Linear, linear, linear_grouped, linear_split};
use crate::ops::norm::{add_norm, rms_norm};
use crate::ops::rope::{RopeTable, rope};
use crate::ops::router::route;
use crate::ops::row_gate::row_gate;
use crate::ops::scale::{scale, scale_columns};
use crate::ops::scan::{Scan, selective_scan};
use crate::ops::ssd::{Ssd, SsdDims, ssd};
use crate::segment::Segments;
use crate::state::MixerState;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::weights::{Init, LinearIds, ParamId, Role, Spec, Weights};

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
    /// Deviation of a matrix that writes to the residual stream: smaller the more of them there are.
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

struct ConvIds {
    w: ParamId,
    bias: Option<ParamId>,
}

impl ConvIds {
    fn forward(
        &self,
        pass: &Pass,
        x: &Var,
        activation: Activation,
        windows: Option<&mut [&mut Tensor]>,
    ) -> Var {
        let (w, bias) = (pass.var(self.w), self.bias.map(|bias| pass.var(bias)));
        let conv = Conv { x, w: &w, bias: bias.as_ref(), activation };
        causal_conv(pass.tape, &conv, pass.segments, windows)
    }
}

/// One layer.
pub(crate) struct Layer {
    mixer_norm: ParamId,
    mixer: Mixer,
    feed_forward: Option<(ParamId, FeedForward)>,
    eps: f32,
    residual_scale: f32,
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
        Layer { mixer_norm, mixer, feed_forward, eps, residual_scale }
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

enum Mixer {
    Mamba1(Mamba1),
    Mamba2(Mamba2),
    Attention(AttentionBlock),
    ShortConv(ConvIds),
    Parallel(Mamba2, AttentionBlock),
}

/// Splits recurrent states into windows and states.
fn recurrent<'a>(states: &'a mut [&mut MixerState]) -> (Vec<&'a mut Tensor>, Vec<&'a mut Tensor>) {
    let both = states.iter_mut().map(|state| match &mut **state {
        MixerState::Recurrent { window, state } => (window, state),
        _ => panic!("a Mamba layer was given the state of another mixer"),
    });
    both.unzip()
}

impl Mixer {
    fn new(builder: &mut Builder, config: &MixerConfig, d_model: usize) -> Mixer {
        match config {
            MixerConfig::Mamba1(c) => Mixer::Mamba1(Mamba1::new(builder, c, d_model)),
            MixerConfig::Mamba2(c) => Mixer::Mamba2(Mamba2::new(builder, c, d_model)),
            MixerConfig::Attention(c) => Mixer::Attention(AttentionBlock::new(builder, c, d_model)),
            MixerConfig::ShortConv(c) => {
                Mixer::ShortConv(builder.conv(&c.prefix, d_model, c.d_conv, true))
            }
            MixerConfig::Parallel(mamba, attention) => Mixer::Parallel(
                Mamba2::new(builder, mamba, d_model),
                AttentionBlock::new(builder, attention, d_model),
            ),
        }
    }

    fn forward(&self, pass: &Pass, x: &Var, states: Option<&mut [&mut MixerState]>) -> Var {
        match self {
            Mixer::Mamba1(mixer) => mixer.forward(pass, x, states),
            Mixer::Mamba2(mixer) => mixer.forward(pass, x, states),
            Mixer::Attention(mixer) => mixer.forward(pass, x, states),
            Mixer::ShortConv(conv) => {
                let mut windows = states.map(|states| {
                    let window = states.iter_mut().map(|state| match &mut **state {
                        MixerState::Window(window) => window,
                        _ => panic!("a short convolution was given the state of another mixer"),
                    });
                    window.collect::<Vec<_>>()
                });
                conv.forward(pass, x, Activation::None, windows.as_deref_mut())
            }
            Mixer::Parallel(mamba, attention) => {
                let mut pairs = states.map(|states| {
                    let pair = states.iter_mut().map(|state| match &mut **state {
                        MixerState::Parallel(a, b) => (&mut **a, &mut **b),
                        _ => panic!("parallel mixers were given the state of another mixer"),
                    });
                    pair.unzip::<_, _, Vec<_>, Vec<_>>()
                });
                let (a, b) = match &mut pairs {
                    Some((a, b)) => (Some(a.as_mut_slice()), Some(b.as_mut_slice())),
                    None => (None, None),
                };
                let from_mamba = mamba.forward(pass, x, a);
                add(pass.tape, &from_mamba, &attention.forward(pass, x, b))
            }
        }
    }
}

struct Mamba1 {
    config: Mamba1Config,
    in_proj: LinearIds,
    conv: ConvIds,
    x_proj: LinearIds,
    /// Weights of the norms of delta, B and C.
    inner_norms: Option<[ParamId; 3]>,
    delta_proj: LinearIds,
    a_log: ParamId,
    skip: ParamId,
    out_proj: LinearIds,
}

impl Mamba1 {
    fn new(builder: &mut Builder, c: &Mamba1Config, d_model: usize) -> Mamba1 {
        let (std, out_std) = (builder.std, builder.out_std);
        let name = |part: &str| format!("{}.{part}", c.prefix);
        let in_proj = builder.linear(name("in_proj"), [2 * c.d_inner, d_model], std, c.proj_bias);
        let conv = builder.conv(&c.prefix, c.d_inner, c.d_conv, c.conv_bias);
        let x_width = c.delta_rank + 2 * c.d_state;
        let x_proj = builder.linear(name("x_proj"), [x_width, c.d_inner], std, false);
        let inner_norms = matches!(c.inner_norm, InnerNorm::Weighted { .. }).then(|| {
            [("dt", c.delta_rank), ("b", c.d_state), ("c", c.d_state)]
                .map(|(part, d)| builder.norm(name(&format!("{part}_layernorm.weight")), d))
        });
        let mut delta_proj = builder.linear(name("dt_proj"), [c.d_inner, c.delta_rank], 0.0, true);
        builder.specs[delta_proj.weight.0].init = Init::Uniform((c.delta_rank as f32).powf(-0.5));
        let bias = delta_proj.bias.expect("dt_proj has a bias");
        builder.specs[bias.0].init = Init::Delta(c.delta_init);
        delta_proj.bias = Some(bias);
        let a_log = builder.vector(name("A_log"), &[c.d_inner, c.d_state], Init::LogColumn);
        let skip = builder.vector(name("D"), &[c.d_inner], Init::Constant(1.0));
        let out_proj = builder.linear(name("out_proj"), [d_model, c.d_inner], out_std, c.proj_bias);
        let config = c.clone();
        Mamba1 { config, in_proj, conv, x_proj, inner_norms, delta_proj, a_log, skip, out_proj }
    }

    fn forward(&self, pass: &Pass, x: &Var, mut states: Option<&mut [&mut MixerState]>) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let mut both = states.as_deref_mut().map(recurrent);
        let (windows, scan_states) = match &mut both {
            Some((windows, states)) => (Some(windows.as_mut_slice()), Some(states.as_mut_slice())),
            None => (None, None),
        };
        let mut parts = pass.split(x, &self.in_proj, &[c.d_inner, c.d_inner]);
        let (gate, x) = (parts.pop().expect("gate"), parts.pop().expect("x"));
        let x = self.conv.forward(pass, &x, Activation::Silu, windows);
        let mut parts = pass.split(&x, &self.x_proj, &[c.delta_rank, c.d_state, c.d_state]);
        for (idx, part) in parts.iter_mut().enumerate() {
            let d = part.value().dims2().1;
            *part = match c.inner_norm {
                InnerNorm::None => continue,
                InnerNorm::Plain { eps } => rms_norm(tape, part, None, d, eps),
                InnerNorm::Weighted { eps } => {
                    let w = self.inner_norms.map(|norms| pass.var(norms[idx]));
                    rms_norm(tape, part, w.as_ref(), d, eps)
                }
            };
        }
        let [delta, b, c] = &parts[..] else { panic!("x_proj gives three parts") };
        let weight = LinearIds { bias: None, ..self.delta_proj };
        let delta = pass.linear(delta, &weight);
        let delta_bias = self.delta_proj.bias.map(|bias| pass.var(bias));
        let scan = Scan {
            x: &x,
            delta: &delta,
            delta_bias: delta_bias.as_ref(),
            a_log: &pass.var(self.a_log),
            b,
            c,
            skip: &pass.var(self.skip),
            gate: Some(&gate),
        };
        let y = selective_scan(tape, &scan, pass.segments, scan_states);
        pass.linear(&y, &self.out_proj)
    }
}

struct Mamba2 {
    config: Mamba2Config,
    in_proj: LinearIds,
    conv: ConvIds,
    delta_bias: ParamId,
    a_log: ParamId,
    skip: ParamId,
    norm: Option<ParamId>,
    out_proj: LinearIds,
}

impl Mamba2 {
    fn new(builder: &mut Builder, c: &Mamba2Config, d_model: usize) -> Mamba2 {
        let (std, out_std) = (builder.std, builder.out_std);
        let (d_inner, d_bc) = (c.d_inner(), c.n_group * c.d_state);
        let name = |part: &str| format!("{}.{part}", c.prefix);
        let width = 2 * d_inner + 2 * d_bc + c.n_head;
        let in_proj = builder.linear(name("in_proj"), [width, d_model], std, c.in_bias);
        let conv = builder.conv(&c.prefix, d_inner + 2 * d_bc, c.d_conv, c.conv_bias);
        let delta_bias = builder.vector(name("dt_bias"), &[c.n_head], Init::Delta(c.delta_init));
        let a_log = builder.vector(name("A_log"), &[c.n_head], Init::LogUniform);
        let skip = builder.vector(name("D"), &[c.n_head], Init::Constant(1.0));
        let norm = c.norm.map(|_| builder.norm(name("norm.weight"), d_inner));
        let out_proj = builder.linear(name("out_proj"), [d_model, d_inner], out_std, c.out_bias);
        let config = c.clone();
        Mamba2 { config, in_proj, conv, delta_bias, a_log, skip, norm, out_proj }
    }

    fn forward(&self, pass: &Pass, x: &Var, mut states: Option<&mut [&mut MixerState]>) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let (d_inner, d_bc) = (c.d_inner(), c.n_group * c.d_state);
        let mut both = states.as_deref_mut().map(recurrent);
        let (windows, ssd_states) = match &mut both {
            Some((windows, states)) => (Some(windows.as_mut_slice()), Some(states.as_mut_slice())),
            None => (None, None),
        };
        let x = scale(tape, x, c.scales.input);
        let parts = pass.split(&x, &self.in_proj, &[d_inner, d_inner + 2 * d_bc, c.n_head]);
        let [gate, xbc, delta] = &parts[..] else { panic!("in_proj gives three parts") };
        let [of_gate, of_x, of_b, of_c, of_delta] = c.scales.parts;
        let gate = scale(tape, gate, of_gate);
        let xbc = scale_columns(tape, xbc, &[(d_inner, of_x), (d_bc, of_b), (d_bc, of_c)]);
        let delta = scale(tape, delta, of_delta);
        let xbc = self.conv.forward(pass, &xbc, Activation::Silu, windows);
        let op = Ssd {
            xbc: &xbc,
            delta: &delta,
            delta_bias: &pass.var(self.delta_bias),
            a_log: &pass.var(self.a_log),
            skip: &pass.var(self.skip),
            dims: SsdDims {
                n_head: c.n_head,
                d_head: c.d_head,
                n_group: c.n_group,
                d_state: c.d_state,
                delta_min: c.delta_limit.0,
                delta_max: c.delta_limit.1,
            },
        };
        let y = ssd(tape, &op, pass.segments, ssd_states);
        let y = match (c.norm, self.norm) {
            (Some((order, eps)), Some(norm)) => {
                let config = GatedNorm { n_group: c.n_group, eps, order };
                gated_norm(tape, &y, &gate, &pass.var(norm), &config)
            }
            _ => gated(tape, Kind::Silu, &gate, &y),
        };
        scale(tape, &pass.linear(&y, &self.out_proj), c.scales.output)
    }
}

struct AttentionBlock {
    config: AttentionConfig,
    q: LinearIds,
    k: LinearIds,
    v: LinearIds,
    out: LinearIds,
    /// Weights of the norms of queries and keys.
    norms: Option<[ParamId; 2]>,
    rope: Option<RopeTable>,
}

impl AttentionBlock {
    fn new(builder: &mut Builder, c: &AttentionConfig, d_model: usize) -> AttentionBlock {
        let (std, out_std) = (builder.std, builder.out_std);
        let name = |part: &str| format!("{}.{part}", c.prefix);
        let (d_q, d_kv) = (c.dims.n_head * c.dims.d_head, c.dims.n_kv_head * c.dims.d_head);
        let q = builder.linear(name("q_proj"), [d_q, d_model], std, c.qkv_bias);
        let k = builder.linear(name("k_proj"), [d_kv, d_model], std, c.qkv_bias);
        let v = builder.linear(name("v_proj"), [d_kv, d_model], std, c.qkv_bias);
        let out = builder.linear(name("o_proj"), [d_model, d_q], out_std, c.out_bias);
        let widths = match c.qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some([c.dims.d_head; 2]),
            QkNorm::Whole => Some([d_q, d_kv]),
        };
        let norms = widths.map(|[of_q, of_k]| {
            [("q_norm.weight", of_q), ("k_norm.weight", of_k)]
                .map(|(part, d)| builder.norm(name(part), d))
        });
        let rope = c.rope.as_ref().map(|rope| rope.table());
        AttentionBlock { config: c.clone(), q, k, v, out, norms, rope }
    }

    fn forward(&self, pass: &Pass, x: &Var, states: Option<&mut [&mut MixerState]>) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let x = scale(tape, x, c.in_scale);
        let mut q = pass.linear(&x, &self.q);
        let mut k = scale(tape, &pass.linear(&x, &self.k), c.key_scale);
        let mut v = pass.linear(&x, &self.v);
        if let Some([of_q, of_k]) = self.norms {
            let norm = |x: &Var, id: ParamId| {
                let w = pass.var(id);
                let d = w.value().n_elem();
                rms_norm(tape, x, Some(&w), d, c.qk_eps)
            };
            (q, k) = (norm(&q, of_q), norm(&k, of_k));
        }
        if let Some(limit) = c.clip {
            [q, k, v] = [q, k, v].map(|x| clamp(tape, &x, limit));
        }
        if let Some(table) = &self.rope {
            let d_head = c.dims.d_head;
            [q, k] = [q, k].map(|x| rope(tape, &x, table, d_head, pass.segments));
        }
        let mut caches = states.map(|states| {
            let cache = states.iter_mut().map(|state| match &mut **state {
                MixerState::Attention(cache) => cache,
                _ => panic!("attention was given the state of another mixer"),
            });
            cache.collect::<Vec<&mut KvCache>>()
        });
        let y = attention(tape, &q, &k, &v, &c.dims, pass.segments, caches.as_deref_mut());
        scale(tape, &pass.linear(&y, &self.out), c.out_scale)
    }
}

enum FeedForward {
    Dense(Dense),
    Experts(Box<Experts>),
}

impl FeedForward {
    fn new(builder: &mut Builder, config: &FeedForwardConfig, d_model: usize) -> FeedForward {
        match config {
            FeedForwardConfig::None => panic!("no feed-forward to build"),
            FeedForwardConfig::Dense(c) => FeedForward::Dense(Dense::new(builder, c, d_model)),
            FeedForwardConfig::Experts(c) => {
                FeedForward::Experts(Box::new(Experts::new(builder, c, d_model)))
            }
        }
    }

    fn forward(&self, pass: &Pass, x: &Var) -> (Var, Option<Var>) {
        match self {
            FeedForward::Dense(dense) => (dense.forward(pass, x), None),
            FeedForward::Experts(experts) => experts.forward(pass, x),
        }
    }
}

struct Dense {
    config: DenseConfig,
    /// Everything but the last: gate and up, both in one, or up.
    first: Vec<LinearIds>,
    down: LinearIds,
}

impl Dense {
    fn new(builder: &mut Builder, c: &DenseConfig, d_model: usize) -> Dense {
        let (std, out_std) = (builder.std, builder.out_std);
        let mut linear = |part: &str, shape, std| {
            builder.linear(format!("{}.{part}", c.prefix), shape, std, c.bias)
        };
        let (first, down): (Vec<_>, _) = match &c.form {
            DenseForm::Gated([gate, up, down]) => {
                let first = [gate, up].map(|part| linear(part, [c.d_ff, d_model], std));
                (first.to_vec(), down)
            }
            DenseForm::Fused([input, down]) => {
                (vec![linear(input, [2 * c.d_ff, d_model], std)], down)
            }
            DenseForm::Plain([up, down]) => (vec![linear(up, [c.d_ff, d_model], std)], down),
        };
        let down = linear(down, [d_model, c.d_ff], out_std);
        Dense { config: c.clone(), first, down }
    }

    fn forward(&self, pass: &Pass, x: &Var) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let inner = match (&c.form, &self.first[..]) {
            (DenseForm::Plain(_), [up]) => activation(tape, c.activation, &pass.linear(x, up)),
            (DenseForm::Fused(_), [both]) => {
                let parts = pass.split(x, both, &[c.d_ff, c.d_ff]);
                gated(tape, c.activation, &scale(tape, &parts[0], c.gate_scale), &parts[1])
            }
            (_, [gate, up]) => {
                let gate = scale(tape, &pass.linear(x, gate), c.gate_scale);
                gated(tape, c.activation, &gate, &pass.linear(x, up))
            }
            _ => panic!("a feed-forward of {} matrices", self.first.len() + 1),
        };
        scale(tape, &pass.linear(&inner, &self.down), c.out_scale)
    }
}

struct Experts {
    config: ExpertsConfig,
    router: LinearIds,
    choice_bias: Option<ParamId>,
    gate: Vec<LinearIds>,
    up: Vec<LinearIds>,
    down: Vec<LinearIds>,
    shared: Option<Dense>,
    shared_gate: Option<LinearIds>,
}

impl Experts {
    fn new(builder: &mut Builder, c: &ExpertsConfig, d_model: usize) -> Experts {
        let (std, out_std) = (builder.std, builder.out_std);
        let matrix = |builder: &mut Builder, name: &str, n_rows: usize| {
            let init = Init::Normal(std);
            let weight = builder.add(name.into(), &[n_rows, d_model], init, Role::Matrix);
            LinearIds { weight, bias: None }
        };
        let router = matrix(builder, &c.router_name, c.n_expert);
        let choice_bias = c.choice_bias.as_ref().map(|name| {
            builder.add(name.clone(), &[c.n_expert], Init::Constant(0.0), Role::Buffer)
        });
        let [mut gate, mut up, mut down] = [Vec::new(), Vec::new(), Vec::new()];
        for expert in 0..c.n_expert {
            match &c.form {
                ExpertForm::Each(names) => {
                    let mut linear = |part: &str, shape, std| {
                        let name = format!("{}.experts.{expert}.{part}", c.prefix);
                        builder.linear(name, shape, std, false)
                    };
                    gate.push(linear(names[0], [c.d_ff, d_model], std));
                    up.push(linear(names[1], [c.d_ff, d_model], std));
                    down.push(linear(names[2], [d_model, c.d_ff], out_std));
                }
                ExpertForm::Stacked([input, output]) => {
                    let name = format!("{}.{input}.weight", c.prefix);
                    let stored = [c.n_expert, 2 * c.d_ff, d_model];
                    let first = expert * 2 * c.d_ff;
                    gate.push(builder.part(&name, stored, first, [c.d_ff, d_model], std));
                    up.push(builder.part(&name, stored, first + c.d_ff, [c.d_ff, d_model], std));
                    let name = format!("{}.{output}.weight", c.prefix);
                    let stored = [c.n_expert, d_model, c.d_ff];
                    let first = expert * d_model;
                    down.push(builder.part(&name, stored, first, [d_model, c.d_ff], out_std));
                }
            }
        }
        let shared = c.shared.as_ref().map(|shared| Dense::new(builder, shared, d_model));
        let shared_gate = c.shared_gate.as_ref().map(|name| matrix(builder, name, 1));
        let config = c.clone();
        Experts { config, router, choice_bias, gate, up, down, shared, shared_gate }
    }

    fn forward(&self, pass: &Pass, x: &Var) -> (Var, Option<Var>) {
        let tape = pass.tape;
        let c = &self.config;
        let logits = pass.linear(x, &self.router);
        let bias = self.choice_bias.map(|id| pass.weights.tensor(id));
        let routing = route(tape, &logits, &c.router, bias);
        let grouped = |x: &Var, experts: &[LinearIds]| {
            let experts: Vec<Linear> =
                experts.iter().map(|ids| pass.weights.linear(tape, ids)).collect();
            linear_grouped(tape, x, &routing.offsets, &experts)
        };
        let sorted = gather(tape, x, &routing);
        let gate = grouped(&sorted, &self.gate);
        let inner = gated(tape, c.activation, &gate, &grouped(&sorted, &self.up));
        let mut y = combine(tape, &grouped(&inner, &self.down), &routing);
        if let Some(shared) = &self.shared {
            let mut from_shared = shared.forward(pass, x);
            if let Some(gate) = &self.shared_gate {
                from_shared = row_gate(tape, &from_shared, &pass.linear(x, gate));
            }
            y = add(tape, &y, &from_shared);
        }
        let balance = pass.wants_balance.then(|| balance_loss(tape, &logits, &routing));
        (y, balance)
    }
}
