//! Mamba-3: projection, state space with angles, gate. No convolution.
//!
//! With a rank above one (MIMO) a head has several inputs and outputs: `mimo_x` makes the inputs of
//! one x, `mimo_z` the gates of one z, and `mimo_o` weighs the outputs in their sum.
//!
//! Initial values are those of mamba_ssm. Vectors are not decayed in training: mamba_ssm marks the
//! bias of the step size and D so, and says nothing of the others.

use super::*;
use crate::ops::activation::{Kind, gated};
use crate::ops::gated_norm::{GatedNorm, Order, gated_norm};
use crate::ops::mamba3::{Mamba3, Mamba3Dims, mamba3};
use crate::ops::rank_gate::{RankGate, rank_gate};

/// Published models have 4.
const RANK_MAX: usize = 64;

#[derive(Clone, Debug, PartialEq)]
pub struct Mamba3Config {
    pub prefix: String,
    pub dims: Mamba3Dims,
    /// Of both projections.
    pub bias: bool,
    /// Whether it has `mimo_x`, `mimo_z` and `mimo_o`: mamba_ssm allows them with a rank of one.
    pub mimo: bool,
    /// Whether each head is normed before the gate.
    pub out_norm: bool,
}

impl Mamba3Config {
    fn d_inner(&self) -> usize {
        self.dims.n_head * self.dims.d_head
    }

    fn d_bc(&self) -> usize {
        self.dims.rank * self.dims.n_group * self.dims.d_state
    }

    /// Columns of the in projection: gate; x, B and C; step sizes, decays, weights and angles.
    fn widths(&self) -> [usize; 3] {
        let d_inner = self.d_inner();
        [d_inner, d_inner + 2 * self.d_bc(), 3 * self.dims.n_head + self.dims.n_angle]
    }
}

pub(super) const OWN: Own = Own {
    name: "mamba3",
    keys: &["d_state", "expand", "d_head", "n_group", "rank", "rope_fraction", "out_norm", "decay"],
    read: |reader, _, at, config| read(reader, at, config).map(MixerConfig::Mamba3),
};

fn read(reader: &Reader, at: &str, config: &Config) -> Result<Mamba3Config> {
    let keys = reader.keys;
    let d_inner = config.d_model.saturating_mul(keys.size_or("mamba3.expand", 2)?);
    let d_head = keys.size_or("mamba3.d_head", 64)?;
    let n_head = d_inner / d_head.max(1);
    if n_head.checked_mul(d_head) != Some(d_inner) {
        let problem = format!("heads of {d_head} do not fill {d_inner} channels");
        return Err(keys.wrong("mamba3.d_head", problem));
    }
    let d_state = keys.size_or("mamba3.d_state", 128)?;
    let n_turned = match keys.float_or("mamba3.rope_fraction", 0.5)? {
        0.5 => d_state / 2,
        1.0 => d_state,
        other => {
            let problem = format!("is {other}, neither 0.5 nor 1");
            return Err(keys.wrong("mamba3.rope_fraction", problem));
        }
    };
    let rank = keys.size_or("mamba3.rank", 1)?;
    let mimo = keys.bool_or("mamba3.mimo", rank != 1)?;
    let softplus_a = match keys.str_or("mamba3.decay", reader.usual_decay())? {
        "heavy_tail" => false,
        "softplus" => true,
        other => {
            let problem = format!("is \"{other}\"; known are heavy_tail, softplus");
            return Err(keys.wrong("mamba3.decay", problem));
        }
    };
    let dims = Mamba3Dims {
        n_head,
        d_head,
        n_group: keys.size_or("mamba3.n_group", 1)?,
        d_state,
        rank: if mimo { rank } else { 1 },
        n_angle: n_turned / 2,
        // The kernels of mamba_ssm pair them so, and its checkpoints follow.
        halves: mimo,
        a_floor: keys.float_or("mamba3.a_floor", 1e-4)?,
        softplus_a,
        eps: config.eps,
    };
    Ok(Mamba3Config {
        prefix: format!("{at}.mixer"),
        dims,
        bias: keys.bool_or("mamba3.bias", false)?,
        mimo,
        out_norm: keys.bool_or("mamba3.out_norm", false)?,
    })
}

impl MixerFacts for Mamba3Config {
    fn summary(&self) -> String {
        let Mamba3Dims { n_head, d_head, rank, .. } = self.dims;
        match self.mimo {
            true => format!("mamba3 ({n_head} heads of {d_head}, rank {rank})"),
            false => format!("mamba3 ({n_head} heads of {d_head})"),
        }
    }

    fn problems(&self, d_model: usize) -> Problems {
        let c = &self.dims;
        let mut list = sizes(&[
            ("mamba3.d_head", c.d_head, D_HEAD_MAX),
            ("mamba3.expand", c.n_head, WIDTH_MAX),
            ("mamba3.n_group", c.n_group, WIDTH_MAX),
            ("mamba3.d_state", c.d_state, WIDTH_MAX),
            ("mamba3.d_state", c.n_angle, WIDTH_MAX),
            ("mamba3.rank", c.rank, RANK_MAX),
        ]);
        if list.is_empty() {
            let n_rows = self.widths().into_iter().fold(0, usize::saturating_add);
            list.extend(shapes(&[
                ("mamba3.expand", &[n_rows, d_model]),
                ("mamba3.d_state", &[c.n_head, c.d_state, c.d_head.max(c.rank)]),
                ("mamba3.rank", &[c.n_head, c.rank, c.d_head]),
            ]));
            if !c.n_head.is_multiple_of(c.n_group) {
                let text = format!("{} do not divide {} heads", c.n_group, c.n_head);
                list.push(("mamba3.n_group", text));
            }
            if !c.d_state.is_multiple_of(2) {
                list.push(("mamba3.d_state", format!("{} is not even", c.d_state)));
            }
        }
        list.extend(positive(&[("mamba3.a_floor", c.a_floor), ("eps", c.eps)]));
        list
    }

    fn build(&self, builder: &mut Builder, d_model: usize) -> Box<dyn Mixer> {
        let Mamba3Dims { n_head, d_head, d_state, rank, n_angle, .. } = self.dims;
        let [fresh, fresh_out] = builder.torch;
        let d_inner = self.d_inner();
        let name = |part: &str| format!("{}.{part}", self.prefix);
        let width = self.widths().iter().sum();
        let in_proj = builder.linear(name("in_proj"), [width, d_model], fresh, self.bias);
        let init = Init::Delta(DeltaInit::default());
        let delta_bias = builder.vector(name("dt_bias"), &[n_head], init);
        let one = Init::Constant(1.0);
        let biases = ["B_bias", "C_bias"]
            .map(|part| builder.vector(name(part), &[n_head, rank, d_state], one));
        let norms =
            ["B_norm.weight", "C_norm.weight"].map(|part| builder.norm(name(part), d_state));
        let share = Init::Constant(1.0 / rank as f32);
        let mimo = self.mimo.then(|| {
            [("mimo_x", share), ("mimo_z", one), ("mimo_o", share)]
                .map(|(part, init)| builder.vector(name(part), &[n_head, rank, d_head], init))
        });
        let skip = builder.vector(name("D"), &[n_head], one);
        let norm = self.out_norm.then(|| builder.norm(name("norm.weight"), d_inner));
        let out_proj = builder.linear(name("out_proj"), [d_model, d_inner], fresh_out, self.bias);
        let states = [
            vec![n_head, n_angle],
            vec![n_head, d_state, d_head],
            vec![rank, n_head, d_state],
            vec![n_head, d_head],
        ]
        .map(|shape| builder.slot(Slot::Recurrent(shape)));
        let config = self.clone();
        Box::new(Block {
            config,
            in_proj,
            delta_bias,
            biases,
            norms,
            mimo,
            skip,
            norm,
            out_proj,
            states,
        })
    }

    fn bc_rows(&self) -> Option<(String, Range<usize>)> {
        let start = 2 * self.d_inner();
        Some((format!("{}.in_proj", self.prefix), start..start + 2 * self.d_bc()))
    }

    fn gguf(&self, names: &mut LayerNames) {
        for (from, to) in [
            ("in_proj.weight", "ssm_in.weight"),
            ("in_proj.bias", "ssm_in.bias"),
            ("dt_bias", "ssm_dt.bias"),
            ("B_bias", "ssm_b.bias"),
            ("C_bias", "ssm_c.bias"),
            ("B_norm.weight", "ssm_b_norm.weight"),
            ("C_norm.weight", "ssm_c_norm.weight"),
            ("mimo_x", "ssm_mimo_x"),
            ("mimo_z", "ssm_mimo_z"),
            ("mimo_o", "ssm_mimo_o"),
            ("D", "ssm_d"),
            ("norm.weight", "ssm_norm.weight"),
            ("out_proj.weight", "ssm_out.weight"),
            ("out_proj.bias", "ssm_out.bias"),
        ] {
            names.put(format!("{}.{from}", self.prefix), to, Map::Same);
        }
    }
}

struct Block {
    config: Mamba3Config,
    in_proj: LinearIds,
    delta_bias: ParamId,
    /// Of B and C, as the norms.
    biases: [ParamId; 2],
    norms: [ParamId; 2],
    /// `mimo_x`, `mimo_z`, `mimo_o`.
    mimo: Option<[ParamId; 3]>,
    skip: ParamId,
    norm: Option<ParamId>,
    out_proj: LinearIds,
    /// Angle, state, key and value.
    states: [SlotId; 4],
}

impl Mixer for Block {
    fn forward(&self, pass: &Pass, x: &Var, states: States) -> Var {
        let (c, tape) = (&self.config, pass.tape);
        let [gate, xbc, raw] = pass.split(x, &self.in_proj, c.widths());
        let [b_bias, c_bias] = self.biases.map(|id| pass.var(id));
        let [b_norm, c_norm] = self.norms.map(|id| pass.var(id));
        let mimo = self.mimo.map(|ids| ids.map(|id| pass.var(id)));
        let op = Mamba3 {
            xbc: &xbc,
            raw: &raw,
            delta_bias: &pass.var(self.delta_bias),
            b_norm: &b_norm,
            c_norm: &c_norm,
            b_bias: &b_bias,
            c_bias: &c_bias,
            mimo_x: mimo.as_ref().map(|[of_x, ..]| of_x),
            skip: &pass.var(self.skip),
            dims: c.dims,
        };
        let mut states = tensors_of(states, self.states);
        let states = states.as_mut().map(|lists| lists.each_mut().map(|list| &mut list[..]));
        let y = mamba3(tape, &op, pass.segments, states);
        let norm = self.norm.map(|id| pass.var(id));
        let Mamba3Dims { n_head, d_head, rank, eps, .. } = c.dims;
        let y = match (&mimo, &norm) {
            (Some([_, of_gate, of_out]), _) => {
                // Over each head and rank alone; the weight of a head is the same for its ranks.
                let y = if c.out_norm { rms_norm(tape, &y, None, d_head, eps) } else { y };
                let (w, y, z) = (norm.as_ref(), &y, &gate);
                rank_gate(tape, &RankGate { y, z, of_gate, of_out, w, n_head, rank })
            }
            (None, Some(w)) => {
                let config = GatedNorm { n_group: n_head, eps, order: Order::NormFirst };
                gated_norm(tape, &y, &gate, w, &config)
            }
            (None, None) => gated(tape, Kind::Silu, &gate, &y),
        };
        pass.linear(&y, &self.out_proj)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::TensorFile;
    use crate::files::safetensors::SafeTensors;
    use crate::model::open::safetensors;
    use crate::model::weights::Weights;
    use crate::model::{ForwardOptions, Model};
    use crate::tape::Tape;
    use crate::tensor::batch::Batch;
    use crate::tensor::device::Device;
    use std::f32::consts::TAU;
    use std::path::{Path, PathBuf};

    /// Of the largest number of a state. torch's f32 is off by 9.0e-5 in `mamba3_siso_long`, where
    /// the angles of 150 tokens add up their roundings.
    const TOLERANCE: f32 = 3e-4;

    fn ids(file: &SafeTensors, name: &str) -> Vec<u32> {
        file.integers(name).unwrap().unwrap().iter().map(|&id| id as u32).collect()
    }

    fn expect_close(what: &str, got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len(), "{what}");
        let largest = want.iter().fold(1f32, |largest, x| largest.max(x.abs()));
        let difference = |pair: (&f32, &f32)| (pair.0 - pair.1).abs() / largest;
        let worst = got.iter().zip(want).map(difference).fold(0.0, f32::max);
        assert!(worst < TOLERANCE, "{what} is off by {worst}");
    }

    /// The states after a batch, and one more step with them, against those of a golden set.
    fn expect_states(dir: &Path, device: &Device) {
        let cpu = Device::cpu(1).unwrap();
        let [golden, after, weights] = ["golden", "states", "model"]
            .map(|name| safetensors(&dir.join(format!("{name}.safetensors"))).unwrap());
        let json = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let model = Model::new(Config::from_json("config.json", &json).unwrap());
        let weights = Weights::load(&cpu, model.specs(), &model.places(), &[&weights], &[]);
        let weights = weights.unwrap().to(device);
        let [n_seq, n_tok] = *golden.shape("input_ids").unwrap() else { panic!("no matrix") };
        let tokens = ids(&golden, "input_ids");
        let mut states: Vec<_> = (0..n_seq).map(|_| model.state(device)).collect();
        let step = |batch: &Batch, states: &mut Vec<_>| {
            let (tape, options) = (Tape::off(), ForwardOptions::default());
            let out = model.forward(&tape, &weights, batch, Some(states), options).unwrap();
            model.logits(&tape, &weights, &out.hidden).value().to_vec()
        };
        let sequences: Vec<&[u32]> = tokens.chunks(n_tok).collect();
        step(&Batch::from_sequences(&sequences), &mut states);
        for (layer, config) in model.config().layers.iter().enumerate() {
            let MixerConfig::Mamba3(c) = &config.mixer else { panic!("another mixer") };
            for (part, name) in ["angle", "ssm", "k", "v"].into_iter().enumerate() {
                let name = format!("state.{layer}.{name}");
                let want = after.tensor(&cpu, &name).unwrap().unwrap().to_vec();
                let held = tensors(Some(&mut states), SlotId(4 * layer + part)).unwrap();
                let mut got: Vec<f32> = held.iter().flat_map(|tensor| tensor.to_vec()).collect();
                match part {
                    // The nearest turn.
                    0 => got.iter_mut().zip(&want).for_each(|(got, want)| {
                        *got -= ((*got - want) / TAU).round() * TAU;
                    }),
                    // The reference has rows of channels.
                    1 => {
                        let (d_state, d_head) = (c.dims.d_state, c.dims.d_head);
                        let heads = got.chunks(d_state * d_head);
                        let turned = heads.flat_map(|head| {
                            let at = move |ch: usize, n: usize| head[n * d_head + ch];
                            (0..d_head).flat_map(move |ch| (0..d_state).map(move |n| at(ch, n)))
                        });
                        got = turned.collect();
                    }
                    _ => {}
                }
                let what = format!("{}: {name} on {device:?}", dir.display());
                expect_close(&what, &got, &want);
            }
        }
        let next = ids(&after, "next_ids");
        let next: Vec<(&[u32], usize)> = next.chunks(1).map(|id| (id, n_tok)).collect();
        let got = step(&Batch::continuing(&next), &mut states);
        let want = after.tensor(&cpu, "next_logits").unwrap().unwrap().to_vec();
        let what = format!("{}: one more step on {device:?}", dir.display());
        expect_close(&what, &got, &want);
    }

    #[test]
    fn states_after_a_batch_and_the_next_step_are_those_of_the_reference() {
        let sets = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden/sets");
        let dirs = std::fs::read_dir(sets).unwrap().map(|entry| entry.unwrap().path());
        let dirs: Vec<_> = dirs.filter(|dir| dir.join("states.safetensors").exists()).collect();
        assert!(dirs.len() >= 5, "{} sets", dirs.len());
        for dir in dirs {
            expect_states(&dir, &Device::cpu(2).unwrap());
            // In bf16 angles are another matter: their sums keep every rounding.
            let exact = crate::ops::check::devices().iter().filter(|device| device.1 <= 1e-4);
            exact.for_each(|(device, _)| expect_states(&dir, device));
        }
    }
}
