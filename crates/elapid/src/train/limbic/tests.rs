//! A head against torch and finite differences, on every device; what it learns, and its file.

use super::*;
use crate::files::TensorFile;
use crate::files::safetensors::SafeTensors;
use crate::ops::check::{Input, check_gradients, devices};
use std::ops::ControlFlow;
use std::sync::Arc;

fn golden() -> SafeTensors {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/limbic.safetensors");
    SafeTensors::parse("limbic", Arc::new(std::fs::read(path).unwrap())).unwrap()
}

fn cpu(n_threads: usize) -> Device {
    Device::cpu(n_threads).unwrap()
}

/// The head of the golden values as it was before training.
fn head(device: &Device) -> Limbic {
    let (golden, mut limbic) = (golden(), Limbic::new(5, 7, 0, device).unwrap());
    limbic.weights.train(|_, _| true);
    for id in limbic.weights.ids().collect::<Vec<_>>() {
        let name = format!("p.{}", limbic.weights.name(id));
        let start = golden.tensor(&cpu(1), &name).unwrap().unwrap();
        limbic.weights.tensor_mut(id).write_f32(start.f32());
    }
    limbic
}

fn golden_samples() -> Vec<LimbicSample> {
    let (golden, device) = (golden(), cpu(1));
    let rows = |name: &str| golden.tensor(&device, name).unwrap().unwrap();
    let (inputs, states, targets, rewards) =
        (rows("inputs"), rows("states"), rows("targets"), rows("rewards"));
    let lengths = golden.integers("lengths").unwrap().unwrap();
    let names = lengths.iter().enumerate().flat_map(|(idx, n)| vec![idx; *n as usize]);
    let sample = |(row, sequence): (usize, usize)| {
        let eight = |x: &Tensor| -> [f32; 8] { x.rows(row..row + 1).f32().try_into().unwrap() };
        LimbicSample {
            input: inputs.rows(row..row + 1).f32().to_vec(),
            state: eight(&states).into(),
            target: eight(&targets),
            reward: rewards.f32()[row],
            sequence: sequence.to_string(),
        }
    };
    names.enumerate().map(sample).collect()
}

fn all_in_one(limbic: &Limbic, samples: &[LimbicSample]) -> (Window, Vec<LimbicSample>) {
    let sequences = sample::sequences(samples);
    let list: Vec<_> = sequences.iter().collect();
    let (window, rows) = train::Walk::new(limbic, &list).next(1000).unwrap();
    (window, rows.into_iter().cloned().collect())
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

const QUIET: fn(usize, f64) -> ControlFlow<()> = |_, _| ControlFlow::Continue(());

fn golden_settings() -> LimbicSettings {
    let hyper = golden().doubles("hyper").unwrap().unwrap();
    LimbicSettings {
        n_epochs: 3,
        length: 3,
        lr: hyper[0],
        clip_norm: hyper[1],
        reward_weight: hyper[2] as f32,
        held_out: 0.0,
        ..LimbicSettings::default()
    }
}

#[test]
fn loss_gradients_and_trained_weights_equal_torch() {
    let (golden, device) = (golden(), cpu(2));
    let want = |kind: &str, name: &str| {
        golden.tensor(&device, &format!("{kind}.{name}")).unwrap().unwrap().f32().to_vec()
    };
    let (mut limbic, samples) = (head(&device), golden_samples());
    let (window, rows) = all_in_one(&limbic, &samples);
    let (loss, grads, _) = limbic.gradients(&window, &rows.iter().collect::<Vec<_>>(), 0.5);
    let want_loss = golden.tensor(&device, "loss").unwrap().unwrap().f32()[0];
    assert!((loss.value().f32()[0] - want_loss).abs() < 1e-6, "{want_loss}");
    for id in limbic.weights.ids() {
        let name = limbic.weights.name(id);
        let worst = largest_difference(grads.get(id.0).unwrap().f32(), &want("g", name));
        assert!(worst < 1e-6, "the gradient of {name} is off by {worst}");
    }
    limbic.train(&samples, &golden_settings(), QUIET).unwrap();
    for id in limbic.weights.ids() {
        let name = limbic.weights.name(id);
        let worst = largest_difference(limbic.weights.tensor(id).f32(), &want("a", name));
        assert!(worst < 1e-5, "{name} is off by {worst} after training");
    }
}

/// Through two sequences at once, by every parameter, on every device.
#[test]
fn gradients_through_a_sequence_agree_with_finite_differences() {
    let samples = golden_samples();
    let shapes = Shape { d_in: 5, d_hidden: 7 }.specs();
    let inputs: Vec<Input> = shapes
        .iter()
        .enumerate()
        .map(|(idx, spec)| Input::normal(idx as u64, &spec.shape, 0.4))
        .collect();
    check_gradients(&inputs, |tape, vars| {
        let mut limbic = Limbic::new(5, 7, 0, vars[0].value().device()).unwrap();
        // Leaves of the same keys: the gradients of the check's own.
        limbic.weights.train(|_, _| true);
        for (id, var) in limbic.weights.ids().zip(vars) {
            *limbic.weights.tensor_mut(id) = var.value().clone();
        }
        let (window, _) = all_in_one(&limbic, &samples);
        let moved = limbic.forward(tape, &window);
        vec![moved.delta, moved.reward, moved.hidden]
    });
}

#[test]
fn devices_train_the_same_head() {
    let samples = golden_samples();
    let train = |device: &Device, n_epochs: usize| {
        let mut limbic = head(device);
        let settings = LimbicSettings { n_epochs, ..golden_settings() };
        limbic.train(&samples, &settings, QUIET).unwrap();
        let loss = limbic.score(&samples).unwrap().loss;
        let weights = limbic.weights.ids().flat_map(|id| limbic.weights.tensor(id).to_vec());
        (loss, weights.collect::<Vec<_>>())
    };
    // Twelve steps; and a hundred, after which weights in bf16 have gone their own ways.
    for (n_epochs, share) in [(3, 0.1), (25, 1.0)] {
        let (want_loss, want) = train(&cpu(1), n_epochs);
        for (device, tolerance) in devices() {
            let (loss, weights) = train(device, n_epochs);
            let off = (loss - want_loss).abs();
            assert!(off < f64::from(*tolerance), "{device:?}: {loss} {want_loss}");
            let off = weights.iter().zip(&want).map(|(a, b)| (a - b).abs()).sum::<f32>();
            let mean = off / want.len() as f32;
            assert!(mean < share * tolerance, "{device:?}: weights off by {mean} on the mean");
        }
    }
}

#[test]
fn training_is_the_same_to_the_bit_and_every_setting_changes_it() {
    let samples = golden_samples();
    let usual = LimbicSettings { n_epochs: 3, length: 4, ..LimbicSettings::default() };
    let train = |n_threads: usize, settings: &LimbicSettings| {
        let mut limbic = head(&cpu(n_threads));
        limbic.train(&samples, settings, QUIET).unwrap();
        limbic.to_bytes().unwrap()
    };
    let want = train(1, &usual);
    assert!(want == train(1, &usual) && want == train(3, &usual));
    for other in [
        LimbicSettings { n_epochs: 4, ..usual },
        LimbicSettings { length: 5, ..usual },
        LimbicSettings { lr: 0.04, ..usual },
        LimbicSettings { clip_norm: 0.05, ..usual },
        LimbicSettings { reward_weight: 0.4, ..usual },
        LimbicSettings { held_out: 0.0, ..usual },
    ] {
        assert!(want != train(1, &other), "{other:?}");
    }
    let both = LimbicSettings { held_out: 0.0, ..usual };
    assert!(train(1, &both) != train(1, &LimbicSettings { n_batch: 1, ..both }));
    // What is held out of two sequences has two outcomes.
    let seeds = (1..9).map(|seed| train(1, &LimbicSettings { seed, ..usual }));
    assert!(seeds.into_iter().any(|bytes| bytes != want));
}

/// Pulses, and a target that tells of the one `lag` samples before.
fn pulses(lag: usize, seed: u64, n_sequences: usize) -> Vec<LimbicSample> {
    let rng = crate::tensor::rng::Rng::new(seed, 1);
    let (mut samples, n_rows) = (Vec::new(), 24);
    for sequence in 0..n_sequences {
        let pulse = |row: usize| f32::from(rng.uniform((sequence * n_rows + row) as u64) < 0.2);
        for row in 0..n_rows {
            let mut target = [0.0; 8];
            target[0] = if row >= lag { 0.8 * pulse(row - lag) } else { 0.0 };
            samples.push(LimbicSample {
                input: vec![pulse(row), 1.0],
                state: LimbicState::default(),
                target,
                reward: 0.0,
                sequence: sequence.to_string(),
            });
        }
    }
    samples
}

/// The input is of no use when it comes: only gradients through time can tell that it is kept for
/// later. Without, no head does better than the mean of all targets.
#[test]
fn what_came_samples_before_is_learnt_through_time_and_not_without() {
    let device = cpu(1);
    for (lag, share) in [(1, 0.3), (3, 0.9)] {
        let (samples, fresh) = (pulses(lag, 1, 64), pulses(lag, 2, 32));
        let n = fresh.len() as f64;
        let targets = || fresh.iter().map(|sample| f64::from(sample.target[0]));
        let mean = targets().sum::<f64>() / n;
        let without = targets().map(|target| 0.5 * (target - mean).powi(2)).sum::<f64>() / n;
        let loss = |length: usize| {
            let settings = LimbicSettings { length, ..LimbicSettings::default() };
            let mut limbic = Limbic::new(2, 16, 0, &device).unwrap();
            limbic.train(&samples, &settings, QUIET).unwrap();
            limbic.score(&fresh).unwrap().loss
        };
        let (through, alone) = (loss(16), loss(1));
        assert!(through < share * without, "lag {lag}: {through} with time, {without} by the mean");
        assert!(alone > 0.95 * without, "lag {lag}: {alone} without time, {without} by the mean");
    }
}

#[test]
fn steps_one_by_one_give_what_a_sequence_gives() {
    let (limbic, samples) = (head(&cpu(1)), golden_samples());
    let (window, rows) = all_in_one(&limbic, &samples);
    let moved = limbic.forward(&Tape::off(), &window);
    let (deltas, rewards) = (moved.delta.value().f32(), moved.reward.value().f32());
    let mut hidden = Vec::new();
    for (row, sample) in rows.iter().enumerate().filter(|it| it.1.sequence == "0") {
        let mut state = sample.state;
        let reward = limbic.step(&mut state, &mut hidden, &sample.input).unwrap();
        let sum = std::array::from_fn(|dim| sample.state.clamped()[dim] + deltas[row * 8 + dim]);
        assert_eq!((state.clamped(), reward), (clamped(sum), rewards[row]));
    }
    let mut state = LimbicState { valence: f32::NAN, arousal: 9.0, ..LimbicState::default() };
    limbic.step(&mut state, &mut hidden, &[1e30; 5]).unwrap();
    assert_eq!(state, state.clamped().into());
    for (hidden, input) in [
        (vec![0.0; 6], vec![0.0; 5]),
        (vec![f32::NAN; 7], vec![0.0; 5]),
        (vec![], vec![0.0; 4]),
        (vec![], vec![f32::INFINITY; 5]),
    ] {
        let before = state;
        assert!(limbic.step(&mut state, &mut hidden.clone(), &input).is_err());
        assert_eq!(state, before);
    }
}

#[test]
fn a_share_is_held_out_and_its_loss_told_before_and_after() {
    let samples = pulses(0, 1, 20);
    let settings = LimbicSettings { held_out: 0.25, n_batch: 4, ..LimbicSettings::default() };
    let mut limbic = Limbic::new(2, 16, 0, &cpu(1)).unwrap();
    let mut told = Vec::new();
    let scores = limbic.train(&samples, &settings, |epoch, loss| {
        told.push((epoch, loss));
        if epoch == 20 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    let [before, after] = scores.unwrap().unwrap();
    assert_eq!((after.n_sequences, after.n_samples, told.len()), (5, 120, 20));
    assert!(after.loss < 0.5 * before.loss && told[19].1 < 0.5 * told[0].1, "{after:?}");
    let squares = samples.iter().map(|sample| f64::from(sample.target[0]).powi(2));
    let want = 0.5 * squares.sum::<f64>() / samples.len() as f64;
    assert!((limbic.score(&samples).unwrap().loss_still - want).abs() < 1e-9, "{want}");
    // The end of a single sequence.
    let one: Vec<LimbicSample> =
        samples.iter().map(|it| LimbicSample { sequence: "a".into(), ..it.clone() }).collect();
    let mut fresh = Limbic::new(2, 4, 0, &cpu(1)).unwrap();
    let [_, after] = fresh.train(&one, &settings, QUIET).unwrap().unwrap();
    assert_eq!((after.n_sequences, after.n_samples), (1, 120));
    let none = LimbicSettings { held_out: 0.0, n_epochs: 1, ..settings };
    assert!(fresh.train(&one, &none, QUIET).unwrap().is_none());
    assert!(fresh.train(&one[..1], &LimbicSettings { n_epochs: 1, ..settings }, QUIET).is_ok());
}

#[test]
fn a_file_gives_the_same_head_and_a_flipped_byte_is_refused() {
    let device = cpu(1);
    let mut limbic = Limbic::new(2, 3, 7, &device).unwrap();
    let settings = LimbicSettings { n_epochs: 1, reward_weight: 0.25, ..LimbicSettings::default() };
    limbic.train(&pulses(1, 1, 2), &settings, QUIET).unwrap();
    let bytes = limbic.to_bytes().unwrap();
    let again = Limbic::from_bytes("head", &bytes, &device).unwrap();
    assert_eq!(again.to_bytes().unwrap(), bytes);
    assert_eq!((again.to_string(), again.reward_weight), (limbic.to_string(), 0.25));
    for at in 0..bytes.len() {
        for flip in [0x01, 0x20, 0xff] {
            let mut bytes = bytes.clone();
            bytes[at] ^= flip;
            assert!(Limbic::from_bytes("head", &bytes, &device).is_err(), "byte {at} ^ {flip}");
        }
    }
    for n in 0..bytes.len() {
        assert!(Limbic::from_bytes("head", &bytes[..n], &device).is_err(), "{n} bytes");
    }
    let other =
        std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/limbic.safetensors"));
    let error = Limbic::from_bytes("head", &other.unwrap(), &device).err().unwrap().to_string();
    assert!(error.contains("it is no limbic head"), "{error}");
}

#[test]
fn what_cannot_be_is_refused_with_numbers() {
    let device = cpu(1);
    for (d_in, d_hidden) in [(0, 16), (32, 0), (32, 65), (1 << 40, 16)] {
        assert!(Limbic::new(d_in, d_hidden, 0, &device).is_err());
    }
    let (mut limbic, good) = (Limbic::new(2, 4, 0, &device).unwrap(), pulses(1, 1, 2));
    let usual = LimbicSettings::default();
    for settings in [
        LimbicSettings { length: 0, ..usual },
        LimbicSettings { n_batch: 0, ..usual },
        LimbicSettings { lr: f64::NAN, ..usual },
        LimbicSettings { clip_norm: 0.0, ..usual },
        LimbicSettings { reward_weight: -1.0, ..usual },
        LimbicSettings { held_out: 1.0, ..usual },
    ] {
        assert!(limbic.train(&good, &settings, QUIET).is_err(), "{settings:?}");
    }
    let mut bad = good.clone();
    bad[5].input.pop();
    let error = limbic.train(&bad, &usual, QUIET).err().unwrap().to_string();
    assert_eq!(error, "sample 6 has 1 numbers, the head takes 2");
    assert!(limbic.score(&[]).is_err());
    // A rate that no head survives.
    let settings = LimbicSettings { lr: 1e38, ..usual };
    let mut wild = good.clone();
    wild.iter_mut().for_each(|sample| sample.reward = 1e30);
    let error = limbic.train(&wild, &settings, QUIET).err().unwrap();
    assert!(matches!(error, Error::Diverged { .. }), "{error}");
}

#[test]
fn a_line_is_read_or_says_what_is_wrong_with_it() {
    let line = r#"{"input": [1], "state": [0,0,0,0,0,0,0,0], "target": {"effort": -0.5},
        "reward": 2, "sequence": 7, "more": "left alone"}"#;
    let sample: LimbicSample = line.parse().unwrap();
    assert_eq!((sample.target[4], sample.sequence.as_str()), (-0.5, "7"));
    let with = |from: &str, to: &str| line.replace(from, to).parse::<LimbicSample>();
    assert_eq!(with(", \"sequence\": 7", "").unwrap().sequence, "");
    for (from, to, part) in [
        ("\"input\": [1], ", "", "missing field `input`"),
        ("[1]", "[1e300]", "input: inf is not finite"),
        ("[1]", "[\"a\"]", "invalid type: string"),
        ("[0,0,", "[0,", "7 numbers, not 8"),
        ("-0.5", "-1.5", "target: -1.5 is not between -1 and 1"),
        ("-0.5", "null", "target: NaN is not between"),
        ("effort", "efort", "target: `efort` is none of valence"),
        ("\"reward\": 2,", "", "missing field `reward`"),
        ("7, ", "[7], ", "sequence: [7] is neither text nor a number"),
        ("{\"input", "input", "expected value, at column 1"),
    ] {
        let error = with(from, to).unwrap_err();
        assert!(error.to_string().contains(part), "{part}: {error}");
        assert!(error.hint().contains("a sample is"));
    }
}
