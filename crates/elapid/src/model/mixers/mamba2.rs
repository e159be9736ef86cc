//! Mamba-2: projection, short convolution, state-space duality, gated norm.

use super::*;
use crate::ops::activation::{Kind, gated};
use crate::ops::gated_norm::{GatedNorm, gated_norm};
use crate::ops::ssd::{Ssd, SsdDims, ssd};

#[derive(Clone, Debug, PartialEq)]
pub struct Mamba2Config {
    pub prefix: String,
    pub n_head: usize,
    pub d_head: usize,
    /// Groups that share B and C.
    pub n_group: usize,
    pub d_state: usize,
    pub d_conv: usize,
    pub in_bias: bool,
    pub out_bias: bool,
    pub conv_bias: bool,
    /// The gated norm, whose groups need not be those of B and C; without it the gate alone.
    pub norm: Option<GatedNorm>,
    /// Step sizes are clamped to this range.
    pub delta_limit: (f32, f32),
    pub scales: Mamba2Scales,
    pub delta_init: DeltaInit,
}

/// The factors of Falcon-H1; one everywhere else.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba2Scales {
    pub input: f32,
    /// Of z, x, B, C, delta after the in projection.
    pub parts: [f32; 5],
    pub output: f32,
}

impl Default for Mamba2Scales {
    fn default() -> Self {
        Mamba2Scales { input: 1.0, parts: [1.0; 5], output: 1.0 }
    }
}

impl Mamba2Config {
    pub fn d_inner(&self) -> usize {
        self.n_head * self.d_head
    }

    fn d_bc(&self) -> usize {
        self.n_group * self.d_state
    }
}

pub(super) const OWN: Own = Own {
    name: "mamba2",
    keys: &["d_state", "d_conv", "expand", "d_head", "n_group", "delta_min", "delta_max"],
    read: |reader, _, at, config| reader.mamba2(at, config).map(MixerConfig::Mamba2),
};

impl MixerFacts for Mamba2Config {
    fn summary(&self) -> String {
        format!("mamba2 ({} heads of {})", self.n_head, self.d_head)
    }

    fn problems(&self, d_model: usize) -> Problems {
        let mut list = sizes(&[
            ("mamba2.d_head", self.d_head, D_HEAD_MAX),
            ("mamba2.expand", self.n_head, WIDTH_MAX),
            ("mamba2.n_group", self.n_group, WIDTH_MAX),
            ("mamba2.d_state", self.d_state, WIDTH_MAX),
            ("mamba2.d_conv", self.d_conv, D_CONV_MAX),
        ]);
        if list.is_empty() {
            let d_xbc = self.d_inner() + 2 * self.d_bc();
            list.extend(shapes(&[
                ("mamba2.expand", &[self.d_inner() + d_xbc + self.n_head, d_model]),
                ("mamba2.d_conv", &[d_xbc, self.d_conv]),
                ("mamba2.d_state", &[self.n_head, self.d_state, self.d_head]),
            ]));
            if !self.n_head.is_multiple_of(self.n_group) {
                let text = format!("{} do not divide {} heads", self.n_group, self.n_head);
                list.push(("mamba2.n_group", text));
            }
        }
        list.extend(self.norm.iter().flat_map(|norm| positive(&[("eps", norm.eps)])));
        let of_parts = self.scales.parts.map(|factor| ("ssm_multipliers", factor));
        list.extend(finite(&of_parts));
        list.extend(finite(&[
            ("ssm_in_multiplier", self.scales.input),
            ("ssm_out_multiplier", self.scales.output),
        ]));
        list.extend(self.delta_init.problems(["mamba2.delta_min", "mamba2.delta_max"]));
        list
    }

    fn build(&self, builder: &mut Builder, d_model: usize) -> Box<dyn Mixer> {
        let (std, out_std) = (builder.std, builder.out_std);
        let (d_inner, d_bc, n_head) = (self.d_inner(), self.d_bc(), self.n_head);
        let name = |part: &str| format!("{}.{part}", self.prefix);
        let width = 2 * d_inner + 2 * d_bc + n_head;
        let in_proj = builder.linear(name("in_proj"), [width, d_model], std, self.in_bias);
        let conv = builder.conv(&self.prefix, d_inner + 2 * d_bc, self.d_conv, self.conv_bias);
        let init = Init::Delta(self.delta_init);
        let delta_bias = builder.vector(name("dt_bias"), &[n_head], init);
        let a_log = builder.vector(name("A_log"), &[n_head], Init::LogUniform);
        let skip = builder.vector(name("D"), &[n_head], Init::Constant(1.0));
        let norm = self.norm.map(|_| builder.norm(name("norm.weight"), d_inner));
        let out_proj = builder.linear(name("out_proj"), [d_model, d_inner], out_std, self.out_bias);
        let state = builder.slot(Slot::Recurrent(vec![n_head, self.d_state, self.d_head]));
        let config = self.clone();
        Box::new(Mamba2 { config, in_proj, conv, delta_bias, a_log, skip, norm, out_proj, state })
    }

    fn bc_rows(&self) -> Option<(String, Range<usize>)> {
        let start = 2 * self.d_inner();
        Some((format!("{}.in_proj", self.prefix), start..start + 2 * self.d_bc()))
    }

    fn gguf(&self, names: &mut LayerNames) {
        let name = |part: &str| format!("{}.{part}", self.prefix);
        let (d_inner, d_bc, n_head) = (self.d_inner(), self.d_bc(), self.n_head);
        let widths = [d_inner, d_inner, d_bc, d_bc, n_head];
        let factors = self.scales.parts.map(|part| part * self.scales.input);
        let map = match factors.iter().all(|factor| *factor == 1.0) {
            true => Map::Same,
            false => Map::Scale(widths.into_iter().zip(factors).collect()),
        };
        names.put(name("in_proj.weight"), "ssm_in.weight", map);
        names.put(name("conv1d.weight"), "ssm_conv1d.weight", Map::Same);
        names.put(name("conv1d.bias"), "ssm_conv1d.bias", Map::Same);
        names.put(name("dt_bias"), "ssm_dt.bias", Map::Same);
        names.put_as(name("A_log"), "ssm_a", &[n_head, 1], Map::NegExp);
        names.put_as(name("D"), "ssm_d", &[n_head, 1], Map::Same);
        let shape = [self.n_group, d_inner / self.n_group];
        names.put_as(name("norm.weight"), "ssm_norm.weight", &shape, Map::Same);
        let map = Map::scale(names.d_model, self.scales.output);
        names.put(name("out_proj.weight"), "ssm_out.weight", map);
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
    state: SlotId,
}

impl Mixer for Mamba2 {
    fn forward(&self, pass: &Pass, x: &Var, mut states: States) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let (d_inner, d_bc) = (c.d_inner(), c.d_bc());
        let x = scale(tape, x, c.scales.input);
        let widths = [d_inner, d_inner + 2 * d_bc, c.n_head];
        let [gate, xbc, delta] = pass.split(&x, &self.in_proj, widths);
        let [of_gate, of_x, of_b, of_c, of_delta] = c.scales.parts;
        let gate = scale(tape, &gate, of_gate);
        let xbc = scale_columns(tape, &xbc, &[(d_inner, of_x), (d_bc, of_b), (d_bc, of_c)]);
        let delta = scale(tape, &delta, of_delta);
        let xbc = pass.conv(&xbc, &self.conv, Activation::Silu, states.as_deref_mut());
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
        let mut states = tensors(states, self.state);
        let y = ssd(tape, &op, pass.segments, states.as_deref_mut());
        let y = match (&c.norm, self.norm) {
            (Some(config), Some(norm)) => gated_norm(tape, &y, &gate, &pass.var(norm), config),
            _ => gated(tape, Kind::Silu, &gate, &y),
        };
        scale(tape, &pass.linear(&y, &self.out_proj), c.scales.output)
    }
}
