//! A leaky average, `y[t] = a y[t - 1] + (1 - a) x[t]` in each channel: the smallest mixer with a
//! parameter and a state. It exists in tests alone, and shows what a mixer needs: this file, and
//! three lines in `mod.rs`.

use super::*;
use crate::model::config::gguf::Arch;
use crate::model::state::{CacheType, State};
use crate::model::weights::Weights;
use crate::model::{ForwardOptions, Model};
use crate::ops::check::{Input, check_gradients};
use crate::tape::{Gradients, Tape};
use crate::tensor::Tensor;
use crate::tensor::batch::{Batch, Targets};
use crate::tensor::device::Device;
use crate::tensor::segment::Segments;

/// A leaky average.
#[derive(Clone, Debug, PartialEq)]
pub struct LeakyConfig {
    prefix: String,
    /// What `a` is before training.
    decay: f32,
}

pub(super) const OWN: Own = Own {
    name: "leaky",
    keys: &["decay"],
    read: |reader, _, at, _| {
        let (prefix, decay) = (format!("{at}.mixer"), reader.keys.float_or("leaky.decay", 0.75)?);
        Ok(MixerConfig::Leaky(LeakyConfig { prefix, decay }))
    },
};

impl MixerFacts for LeakyConfig {
    fn summary(&self) -> String {
        format!("leaky average ({})", self.decay)
    }

    fn problems(&self, _d_model: usize) -> Problems {
        match (0.0..1.0).contains(&self.decay) {
            true => Vec::new(),
            false => vec![("leaky.decay", format!("{} is out of range 0..1", self.decay))],
        }
    }

    fn build(&self, builder: &mut Builder, d_model: usize) -> Box<dyn Mixer> {
        let (name, init) = (format!("{}.decay", self.prefix), Init::Constant(self.decay));
        let decay = builder.vector(name, &[d_model], init);
        Box::new(Leaky { decay, state: builder.slot(Slot::Recurrent(vec![d_model])) })
    }
}

struct Leaky {
    decay: ParamId,
    state: SlotId,
}

impl Mixer for Leaky {
    fn forward(&self, pass: &Pass, x: &Var, states: States) -> Var {
        let mut states = tensors(states, self.state);
        leaky(pass.tape, x, &pass.var(self.decay), pass.segments, states.as_deref_mut())
    }
}

/// The op, which a real mixer would have in `ops`.
fn leaky(
    tape: &Tape,
    x: &Var,
    decay: &Var,
    segments: &Segments,
    mut states: Option<&mut [&mut Tensor]>,
) -> Var {
    let (n_tok, d) = x.value().dims2();
    let (x_data, a) = (x.value().to_vec(), decay.value().to_vec());
    // What each token saw as the average before it.
    let mut before = vec![0.0; n_tok * d];
    let mut y = vec![0.0; n_tok * d];
    for (idx, segment) in segments.iter().enumerate() {
        let state = states.as_ref().map(|states| states[idx].to_vec());
        let mut last = state.unwrap_or_else(|| vec![0.0; d]);
        for at in segment.rows().flat_map(|row| (0..d).map(move |c| (row * d + c, c))) {
            let (n, c) = at;
            before[n] = last[c];
            y[n] = a[c] * last[c] + (1.0 - a[c]) * x_data[n];
            last[c] = y[n];
        }
        if let Some(states) = &mut states {
            *states[idx] = Tensor::from_f32(x.value().device(), &[d], &last);
        }
    }
    let y = Tensor::from_f32(x.value().device(), &[n_tok, d], &y);
    let segments = segments.clone();
    let backward = move |dy: Tensor| {
        let (mut dx, mut da, dy_data) = (vec![0.0; n_tok * d], vec![0.0; d], dy.to_vec());
        for segment in segments.iter() {
            let mut later = vec![0.0; d];
            for (row, c) in segment.rows().rev().flat_map(|row| (0..d).map(move |c| (row, c))) {
                let n = row * d + c;
                let g = dy_data[n] + a[c] * later[c];
                (dx[n], later[c]) = ((1.0 - a[c]) * g, g);
                da[c] += g * (before[n] - x_data[n]);
            }
        }
        let grad = |shape: &[usize], data: &[f32]| Some(Tensor::from_f32(dy.device(), shape, data));
        vec![grad(&[n_tok, d], &dx), grad(&[d], &da)]
    };
    tape.record("leaky", &[x, decay], y, backward)
}

const TOKENS: [u32; 12] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8];

fn config(decay: f32) -> crate::error::Result<Config> {
    let json = serde_json::json!({
        "model_type": "elapid", "vocab_size": 10, "d_model": 8, "init_std": 0.3,
        "layers": ["leaky", "attention", {"mixer": "leaky", "feed_forward": "none"}],
        "attention": {"n_head": 2}, "dense": {"d_ff": 8}, "leaky": {"decay": decay},
    });
    Config::from_json("config.json", &json.to_string())
}

fn fixture() -> (Device, Model, Weights) {
    let device = Device::cpu(2).unwrap();
    let model = Model::new(config(0.75).unwrap());
    let weights = Weights::init(&device, model.specs(), 3);
    (device, model, weights)
}

fn hidden(model: &Model, weights: &Weights, batch: &Batch, states: States) -> Vec<f32> {
    let options = ForwardOptions::default();
    let out = model.forward(&Tape::off(), weights, batch, states, options).unwrap();
    out.hidden.value().to_vec()
}

fn step(model: &Model, weights: &Weights, tokens: &[u32], state: &mut State) -> Vec<f32> {
    let batch = Batch::continuing(&[(tokens, state.n_tok)]);
    hidden(model, weights, &batch, Some(std::slice::from_mut(state)))
}

fn expect_near(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() < 1e-5, "{what}: {got}, not {want}");
    }
}

#[test]
fn the_config_knows_it_by_name_and_refuses_what_it_refuses() {
    let config = config(0.75).unwrap();
    assert_eq!(config.layers[0].mixer.to_string(), "leaky average (0.75)");
    assert!(Arch::of(&config).is_err(), "llama.cpp has none");
    let error = self::config(1.5).unwrap_err().report();
    assert!(error.contains("`leaky.decay`: 1.5 is out of range 0..1"), "{error}");
}

#[test]
fn its_op_has_the_right_gradients() {
    let segments = Segments::from_lengths(&[5, 1, 3]);
    let decay = Input::map(2, &[4], |x| 1.0 / (1.0 + (-x).exp()));
    check_gradients(&[Input::normal(1, &[9, 4], 1.0), decay], |tape, vars| {
        vec![leaky(tape, &vars[0], &vars[1], &segments, None)]
    });
}

/// The loss, and the gradients of both decays.
fn gradients(model: &Model, weights: &Weights, checkpoint: bool) -> (f32, Vec<Vec<f32>>) {
    let (tape, mut grads) = (Tape::new(), Gradients::default());
    let targets = Targets { ids: &TOKENS[1..], weights: &[1.0; 11], norm: 11.0 };
    let batch = Batch::from_sequences(&[&TOKENS[..6], &TOKENS[6..11]]);
    let options = ForwardOptions { checkpoint, ..ForwardOptions::default() };
    let loss = model.loss(&tape, weights, &batch, &targets, options).unwrap().loss;
    let value = loss.value().to_vec()[0];
    tape.backward(&loss, 1.0, &mut grads);
    let list = grads.iter().map(|(_, grad)| grad.to_vec()).collect();
    (value, list)
}

#[test]
fn a_model_trains_it_as_any_parameter() {
    let (_, model, mut weights) = fixture();
    assert_eq!(weights.train(|name, _| name.ends_with("mixer.decay")), 2);
    let (_, grads) = gradients(&model, &weights, false);
    assert_eq!(gradients(&model, &weights, true).1, grads, "recomputed");
    let id = weights.find("layers.0.mixer.decay").unwrap();
    for c in 0..8 {
        let mut moved = |by: f32| {
            weights.tensor_mut(id).f32_mut()[c] = 0.75 + by;
            gradients(&model, &weights, false).0
        };
        let slope = (moved(0.02) - moved(-0.02)) / 0.04;
        moved(0.0);
        assert!((slope - grads[0][c]).abs() < 1e-3, "{c}: {slope}, not {}", grads[0][c]);
    }
}

#[test]
fn steps_snapshots_and_forks_continue_like_the_whole_sequence() {
    let (device, model, weights) = fixture();
    let whole = hidden(&model, &weights, &Batch::from_sequences(&[&TOKENS]), None);
    let mut state = model.state_with(&device, CacheType::F32).unwrap();
    assert_eq!(model.state_bytes(), [2 * 8 * 4, 2 * 8 * 4]);
    assert!(!state.can_truncate() && state.has_cache());
    let mut snapshots = Vec::new();
    for (at, token) in TOKENS.iter().enumerate() {
        snapshots.push(state.clone());
        let got = step(&model, &weights, &[*token], &mut state);
        expect_near(&got, &whole[at * 8..(at + 1) * 8], &format!("token {at}"));
    }
    for at in [0, 1, 7, 11] {
        let mut fork = snapshots[at].clone();
        let got = step(&model, &weights, &TOKENS[at..], &mut fork);
        expect_near(&got, &whole[at * 8..], &format!("from snapshot {at}"));
        let again = step(&model, &weights, &TOKENS[at..], &mut snapshots[at].clone());
        assert_eq!(again, got, "a fork changed the snapshot at {at}");
    }
}
