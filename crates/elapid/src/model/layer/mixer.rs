//! What mixes tokens: Mamba-1, Mamba-2, attention, a short convolution, or two side by side.

use super::{Builder, Pass};
use crate::model::config::*;
use crate::model::state::MixerState;
use crate::model::weights::{Init, LinearIds, ParamId};
use crate::ops::activation::{Kind, gated};
use crate::ops::add::add;
use crate::ops::attention::{KvCache, attention};
use crate::ops::clamp::clamp;
use crate::ops::conv::{Activation, Conv, causal_conv};
use crate::ops::gated_norm::gated_norm;
use crate::ops::norm::rms_norm;
use crate::ops::rope::{RopeTable, rope};
use crate::ops::scale::{scale, scale_columns};
use crate::ops::scan::{Scan, selective_scan};
use crate::ops::ssd::{Ssd, SsdDims, ssd};
use crate::tape::Var;
use crate::tensor::Tensor;

pub(super) enum Mixer {
    Mamba1(Box<Mamba1>),
    Mamba2(Box<Mamba2>),
    Attention(Box<AttentionBlock>),
    ShortConv(ConvIds),
    Parallel(Box<(Mamba2, AttentionBlock)>),
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
    pub fn new(builder: &mut Builder, config: &MixerConfig, d_model: usize) -> Mixer {
        match config {
            MixerConfig::Mamba1(c) => Mixer::Mamba1(Box::new(Mamba1::new(builder, c, d_model))),
            MixerConfig::Mamba2(c) => Mixer::Mamba2(Box::new(Mamba2::new(builder, c, d_model))),
            MixerConfig::Attention(c) => {
                Mixer::Attention(Box::new(AttentionBlock::new(builder, c, d_model)))
            }
            MixerConfig::ShortConv(c) => {
                Mixer::ShortConv(builder.conv(&c.prefix, d_model, c.d_conv, true))
            }
            MixerConfig::Parallel(mamba, attention) => Mixer::Parallel(Box::new((
                Mamba2::new(builder, mamba, d_model),
                AttentionBlock::new(builder, attention, d_model),
            ))),
        }
    }

    pub fn forward(&self, pass: &Pass, x: &Var, states: Option<&mut [&mut MixerState]>) -> Var {
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
            Mixer::Parallel(both) => {
                let (mamba, attention) = &**both;
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

pub(super) struct Mamba1 {
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

    fn forward(&self, pass: &Pass, x: &Var, states: Option<&mut [&mut MixerState]>) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let mut both = states.map(recurrent);
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

pub(super) struct Mamba2 {
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

    fn forward(&self, pass: &Pass, x: &Var, states: Option<&mut [&mut MixerState]>) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let (d_inner, d_bc) = (c.d_inner(), c.n_group * c.d_state);
        let mut both = states.map(recurrent);
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
        let y = match (&c.norm, self.norm) {
            (Some(config), Some(norm)) => gated_norm(tape, &y, &gate, &pass.var(norm), config),
            _ => gated(tape, Kind::Silu, &gate, &y),
        };
        scale(tape, &pass.linear(&y, &self.out_proj), c.scales.output)
    }
}

pub(super) struct AttentionBlock {
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
        let [mut q, k, mut v] = pass.each(&x, [&self.q, &self.k, &self.v]);
        let mut k = scale(tape, &k, c.key_scale);
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

/// The parameters of a convolution.
pub(super) struct ConvIds {
    pub w: ParamId,
    pub bias: Option<ParamId>,
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
