//! Mamba-1: projection, short convolution, selective scan, gate.

use super::*;
use crate::ops::scan::{Scan, selective_scan};

/// Most models have 16; no device has registers for more than this.
const D_STATE_MAX: usize = 256;

/// How the step size, B and C of Mamba-1 are normed before use.
#[derive(Clone, Debug, PartialEq)]
pub enum InnerNorm {
    None,
    Plain {
        eps: f32,
    },
    /// With weights of their own.
    Weighted {
        eps: f32,
    },
}

/// Range that fresh step sizes are drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaInit {
    pub min: f32,
    pub max: f32,
    pub floor: f32,
}

impl Default for DeltaInit {
    fn default() -> DeltaInit {
        DeltaInit { min: 1e-3, max: 0.1, floor: 1e-4 }
    }
}

impl DeltaInit {
    /// `keys`: of the smallest and the largest.
    pub(super) fn problems(&self, keys: [&'static str; 2]) -> Problems {
        let mut list = positive(&[(keys[0], self.min), (keys[1], self.max)]);
        if list.is_empty() && self.min > self.max {
            list.push((keys[0], format!("{} is above the largest, {}", self.min, self.max)));
        }
        if !(self.floor.is_finite() && self.floor >= 0.0) {
            list.push(("time_step_floor", format!("{} is not 0 or above", self.floor)));
        }
        list
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Mamba1Config {
    pub prefix: String,
    pub d_inner: usize,
    pub d_state: usize,
    pub d_conv: usize,
    pub delta_rank: usize,
    pub proj_bias: bool,
    pub conv_bias: bool,
    pub inner_norm: InnerNorm,
    pub delta_init: DeltaInit,
}

pub(super) const OWN: Own = Own {
    name: "mamba1",
    keys: &["d_state", "d_conv", "expand", "delta_rank", "delta_min", "delta_max"],
    read: |reader, _, at, config| reader.mamba1(at, config).map(MixerConfig::Mamba1),
};

impl MixerFacts for Mamba1Config {
    fn summary(&self) -> String {
        format!("mamba1 ({} x {})", self.d_inner, self.d_state)
    }

    fn problems(&self, d_model: usize) -> Problems {
        let mut list = sizes(&[
            ("mamba1.expand", self.d_inner, WIDTH_MAX),
            ("mamba1.d_state", self.d_state, D_STATE_MAX),
            ("mamba1.d_conv", self.d_conv, D_CONV_MAX),
            ("mamba1.delta_rank", self.delta_rank, WIDTH_MAX),
        ]);
        if list.is_empty() {
            let d_inner = self.d_inner;
            list.extend(shapes(&[
                ("mamba1.expand", &[2 * d_inner, d_model]),
                ("mamba1.d_conv", &[d_inner, self.d_conv]),
                ("mamba1.d_state", &[self.delta_rank + 2 * self.d_state, d_inner]),
            ]));
        }
        if let InnerNorm::Plain { eps } | InnerNorm::Weighted { eps } = self.inner_norm {
            list.extend(positive(&[("mixer_rms_eps", eps)]));
        }
        list.extend(self.delta_init.problems(["mamba1.delta_min", "mamba1.delta_max"]));
        list
    }

    fn build(&self, builder: &mut Builder, d_model: usize) -> Box<dyn Mixer> {
        let (std, out_std, [fresh, _]) = (builder.std, builder.out_std, builder.torch);
        let (d_inner, d_state, delta_rank) = (self.d_inner, self.d_state, self.delta_rank);
        let name = |part: &str| format!("{}.{part}", self.prefix);
        let in_proj = builder.linear(name("in_proj"), [2 * d_inner, d_model], std, self.proj_bias);
        let conv = builder.conv(&self.prefix, d_inner, self.d_conv, self.conv_bias);
        let x_width = delta_rank + 2 * d_state;
        let x_proj = builder.linear(name("x_proj"), [x_width, d_inner], std, false);
        let inner_norms = matches!(self.inner_norm, InnerNorm::Weighted { .. }).then(|| {
            [("dt", delta_rank), ("b", d_state), ("c", d_state)]
                .map(|(part, d)| builder.norm(name(&format!("{part}_layernorm.weight")), d))
        });
        let delta_proj = builder.linear(name("dt_proj"), [d_inner, delta_rank], fresh, false);
        let init = Init::Delta(self.delta_init);
        let delta_bias = builder.vector(name("dt_proj.bias"), &[d_inner], init);
        let a_log = builder.vector(name("A_log"), &[d_inner, d_state], Init::LogColumn);
        let skip = builder.vector(name("D"), &[d_inner], Init::Constant(1.0));
        let out_proj =
            builder.linear(name("out_proj"), [d_model, d_inner], out_std, self.proj_bias);
        Box::new(Mamba1 {
            state: builder.slot(Slot::Recurrent(vec![d_state, d_inner])),
            config: self.clone(),
            in_proj,
            conv,
            x_proj,
            inner_norms,
            delta_proj,
            delta_bias,
            a_log,
            skip,
            out_proj,
        })
    }

    fn bc_rows(&self) -> Option<(String, Range<usize>)> {
        let rows = self.delta_rank..self.delta_rank + 2 * self.d_state;
        Some((format!("{}.x_proj", self.prefix), rows))
    }

    fn gguf(&self, names: &mut LayerNames) {
        for (param, tensor) in [
            ("in_proj.weight", "ssm_in.weight"),
            ("conv1d.weight", "ssm_conv1d.weight"),
            ("conv1d.bias", "ssm_conv1d.bias"),
            ("x_proj.weight", "ssm_x.weight"),
            ("dt_proj.weight", "ssm_dt.weight"),
            ("dt_proj.bias", "ssm_dt.bias"),
            ("D", "ssm_d"),
            ("out_proj.weight", "ssm_out.weight"),
            ("dt_layernorm.weight", "ssm_dt_norm.weight"),
            ("b_layernorm.weight", "ssm_b_norm.weight"),
            ("c_layernorm.weight", "ssm_c_norm.weight"),
        ] {
            names.put(format!("{}.{param}", self.prefix), tensor, Map::Same);
        }
        names.put(format!("{}.A_log", self.prefix), "ssm_a", Map::NegExp);
    }
}

struct Mamba1 {
    config: Mamba1Config,
    in_proj: LinearIds,
    conv: ConvIds,
    x_proj: LinearIds,
    inner_norms: Option<[ParamId; 3]>,
    delta_proj: LinearIds,
    delta_bias: ParamId,
    a_log: ParamId,
    skip: ParamId,
    out_proj: LinearIds,
    state: SlotId,
}

impl Mixer for Mamba1 {
    fn forward(&self, pass: &Pass, x: &Var, mut states: States) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let [x, gate] = pass.split(x, &self.in_proj, [c.d_inner, c.d_inner]);
        let x = pass.conv(&x, &self.conv, Activation::Silu, states.as_deref_mut());
        let mut parts = pass.split(&x, &self.x_proj, [c.delta_rank, c.d_state, c.d_state]);
        if let InnerNorm::Plain { eps } | InnerNorm::Weighted { eps } = c.inner_norm {
            for (idx, part) in parts.iter_mut().enumerate() {
                let w = self.inner_norms.map(|norms| pass.var(norms[idx]));
                *part = rms_norm(tape, part, w.as_ref(), part.value().dims2().1, eps);
            }
        }
        let [delta, b, c] = &parts;
        let delta = pass.linear(delta, &self.delta_proj);
        let scan = Scan {
            x: &x,
            delta: &delta,
            delta_bias: Some(&pass.var(self.delta_bias)),
            a_log: &pass.var(self.a_log),
            b,
            c,
            skip: &pass.var(self.skip),
            gate: Some(&gate),
        };
        let mut states = tensors(states, self.state);
        let y = selective_scan(tape, &scan, pass.segments, states.as_deref_mut());
        pass.linear(&y, &self.out_proj)
    }
}
