//! Whole models of every family: what must hold whatever the layers are.
//! (tidy: allow long: a list of tests, and of keys that mean nothing)

use crate::eval::golden::check_directory;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::{Config, FAMILIES, FreshKind, MixerConfig};
use crate::model::state::{CacheType, PAGE, State};
use crate::model::weights::{Role, Weights};
use crate::model::{ForwardOptions, Model};
use crate::tape::Tape;
use crate::tensor::batch::{Batch, Targets};
use crate::tensor::device::Device;
use crate::tensor::rng::Rng;
use crate::tensor::{DType, Tensor};
use crate::train::{StepSettings, Trainer};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Name and config of every golden set.
fn set_configs() -> Vec<(String, Value)> {
    let sets = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden/sets");
    let mut list = Vec::new();
    for entry in std::fs::read_dir(sets).unwrap() {
        let path = entry.unwrap().path();
        if let Ok(text) = std::fs::read_to_string(path.join("config.json")) {
            // The one thing in them that is not JSON.
            let text = text.replace("Infinity", "{\"__float__\": \"Infinity\"}");
            let name = path.file_name().unwrap().to_str().unwrap().to_string();
            list.push((name, serde_json::from_str(&text).unwrap()));
        }
    }
    list
}

/// Name and config of every golden set, and of our own kinds of models.
fn configs() -> Vec<(String, Value)> {
    let mut list = set_configs();
    let own = |layers: Value| {
        json!({
            "model_type": "elapid", "vocab_size": 40, "d_model": 16, "layers": layers,
            "tied": true, "eps": 1e-3, "init_std": 0.1, "balance_scale": 0.02, "n_ctx": 64,
            "mamba1": {"d_state": 4, "d_conv": 3, "expand": 2, "delta_rank": 2,
                       "delta_min": 0.002, "delta_max": 0.2},
            "mamba2": {"d_state": 8, "d_head": 8, "n_group": 2, "d_conv": 4, "expand": 2,
                       "delta_min": 0.002, "delta_max": 0.2},
            "mamba3": {"d_state": 8, "d_head": 8, "n_group": 2, "expand": 2, "rank": 2,
                       "rope_fraction": 1.0, "out_norm": true, "decay": "softplus"},
            "attention": {"n_head": 4, "n_kv_head": 2, "d_head": 6, "window": 6,
                          "rope_base": 5000.0, "qk_norm": true},
            "dense": {"d_ff": 24, "activation": "gelu"},
            "experts": {"n_expert": 4, "n_used": 2, "d_ff": 8, "d_shared": 12},
        })
    };
    list.push((
        "elapid_mixed".into(),
        own(json!([
            "mamba1",
            {"mixer": "short_conv", "feed_forward": "experts"},
            {"mixer": "mamba2", "feed_forward": "none"},
            "mamba3",
            "attention"
        ])),
    ));
    for schedule in ["jamba", "zamba"] {
        let mut config = own(json!(schedule));
        config["n_layer"] = json!(6);
        list.push((format!("elapid_{schedule}"), config));
    }
    list.sort_by(|a, b| a.0.cmp(&b.0));
    list
}

/// A model with weights large enough that every part shows in the logits.
struct Fixture {
    name: String,
    model: Model,
    weights: Weights,
    n_vocab: usize,
}

fn fixture(device: &Device, name: &str, config: &Value) -> Fixture {
    let mut config = Config::from_json(name, &config.to_string()).unwrap();
    config.init_std = 0.2;
    let n_vocab = config.n_vocab;
    let model = Model::new(config);
    let weights = Weights::init(device, model.specs(), 7);
    Fixture { name: name.into(), model, weights, n_vocab }
}

fn fixtures(device: &Device) -> Vec<Fixture> {
    configs().iter().map(|(name, config)| fixture(device, name, config)).collect()
}

impl Fixture {
    fn tokens(&self, n_tok: usize, seed: u64) -> Vec<u32> {
        let rng = Rng::new(seed, 1);
        (0..n_tok as u64).map(|n| rng.below(n, self.n_vocab as u64) as u32).collect()
    }

    fn logits(&self, batch: &Batch, states: Option<&mut [State]>) -> Vec<f32> {
        let tape = Tape::off();
        let options = ForwardOptions::default();
        let forward = self.model.forward(&tape, &self.weights, batch, states, options).unwrap();
        self.model.logits(&tape, &self.weights, &forward.hidden).value().f32().to_vec()
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    // A maximum would drop what is not a number.
    differences.fold(0.0, |worst, d| if d.is_nan() { f32::INFINITY } else { worst.max(d) })
}

#[test]
fn every_family_has_a_golden_set() {
    let sets = set_configs();
    // Our own family has no reference implementation that could make one.
    for family in FAMILIES.iter().filter(|family| **family != "elapid") {
        // The config of mamba_ssm does not say what it is.
        let is_it = |c: &Value| c["model_type"].as_str().unwrap_or("mamba_ssm") == *family;
        assert!(sets.iter().any(|(_, c)| is_it(c)), "{family} has no set");
    }
}

#[test]
fn every_golden_set_holds() {
    let device = Device::cpu(2).unwrap();
    let sets = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden/sets");
    let mut n_sets = 0;
    for entry in std::fs::read_dir(sets).unwrap() {
        let dir = entry.unwrap().path();
        let (found, _) = check_directory(&dir, None, &device).unwrap();
        for one in &found {
            let (what, error) = (&one.quantity, one.error);
            assert!(one.holds(), "{}: {what} is off by {error}", dir.display());
        }
        assert!(found.iter().any(|one| one.quantity == "logits"), "{}", dir.display());
        n_sets += 1;
    }
    assert!(n_sets >= 25, "{n_sets} sets");
}

#[test]
fn step_by_step_equals_whole_sequence_from_any_snapshot() {
    let device = Device::cpu(2).unwrap();
    for f in fixtures(&device) {
        let tokens = f.tokens(19, 1);
        let whole = f.logits(&Batch::from_sequences(&[&tokens]), None);
        let mut states = [f.model.state(&device)];
        let mut snapshots = vec![states[0].clone()];
        for at in 0..tokens.len() {
            let batch = Batch::continuing(&[(&tokens[at..at + 1], at)]);
            let step = f.logits(&batch, Some(&mut states));
            let want = &whole[at * f.n_vocab..(at + 1) * f.n_vocab];
            let worst = largest_difference(&step, want);
            assert!(worst < 2e-4, "{}: token {at} is off by {worst}", f.name);
            snapshots.push(states[0].clone());
        }
        for at in [0, 1, 3, 8, 18] {
            let mut states = [snapshots[at].clone()];
            let rest = f.logits(&Batch::continuing(&[(&tokens[at..], at)]), Some(&mut states));
            let worst = largest_difference(&rest, &whole[at * f.n_vocab..]);
            assert!(worst < 2e-4, "{}: from snapshot {at} off by {worst}", f.name);
            assert_eq!(states[0].n_tok, tokens.len());
        }
    }
}

#[test]
fn a_snapshot_of_any_family_continues_with_the_same_bits() {
    let device = Device::cpu(2).unwrap();
    let mut n_states = 0;
    for f in fixtures(&device) {
        let tokens = f.tokens(30, 4);
        for kind in CacheType::ALL {
            // Blocks of 8 bits do not fit the heads of every small model.
            let Ok(mut state) = f.model.state_with(&device, kind) else { continue };
            let go_on = |range: std::ops::Range<usize>, state: &mut State| {
                let batch = Batch::continuing(&[(&tokens[range], state.n_tok)]);
                f.logits(&batch, Some(std::slice::from_mut(state)))
            };
            go_on(0..20, &mut state);
            let mut snapshot = state.clone();
            let ranges = [20..21, 21..30];
            let want = ranges.clone().map(|range| go_on(range, &mut state));
            // What the first wrote meanwhile must not be seen.
            let got = ranges.map(|range| go_on(range, &mut snapshot));
            assert!(got == want, "{} in {}", f.name, kind.name());
            n_states += 1;
        }
    }
    assert!(n_states > 2 * FAMILIES.len(), "{n_states} states");
}

#[test]
fn several_sequences_step_side_by_side() {
    let device = Device::cpu(2).unwrap();
    for f in fixtures(&device) {
        let (a, b) = (f.tokens(9, 1), f.tokens(5, 2));
        let mut states = [f.model.state(&device), f.model.state(&device)];
        f.logits(&Batch::from_sequences(&[&a, &b]), Some(&mut states));
        let parts: [(&[u32], usize); 2] = [(&[1, 2, 3], a.len()), (&[4], b.len())];
        let both = f.logits(&Batch::continuing(&parts), Some(&mut states));
        let alone = f.logits(&Batch::from_sequences(&[&[&b[..], &[4]].concat()]), None);
        let worst = largest_difference(&both[3 * f.n_vocab..], &alone[b.len() * f.n_vocab..]);
        assert!(worst < 2e-4, "{}: {worst}", f.name);
    }
}

#[test]
fn changing_a_token_leaves_logits_before_it_bit_equal_and_changes_its_own() {
    let device = Device::cpu(2).unwrap();
    for f in fixtures(&device) {
        let tokens = f.tokens(17, 3);
        let before = f.logits(&Batch::from_sequences(&[&tokens]), None);
        for j in [1, 7, 16] {
            let mut changed = tokens.clone();
            changed[j] = (changed[j] + 1) % f.n_vocab as u32;
            let after = f.logits(&Batch::from_sequences(&[&changed]), None);
            let cut = j * f.n_vocab;
            assert!(before[..cut] == after[..cut], "{}: token {j} is seen before it", f.name);
            assert!(before[cut..] != after[cut..], "{}: token {j} is not seen", f.name);
        }
    }
}

#[test]
fn packed_documents_do_not_see_each_other() {
    let device = Device::cpu(2).unwrap();
    for f in fixtures(&device) {
        let (a, b, c) = (f.tokens(7, 1), f.tokens(12, 2), f.tokens(7, 3));
        let with_a = f.logits(&Batch::from_sequences(&[&a, &b]), None);
        let with_c = f.logits(&Batch::from_sequences(&[&c, &b]), None);
        let cut = a.len() * f.n_vocab;
        assert!(with_a[cut..] == with_c[cut..], "{}: the second sees the first", f.name);
        assert!(with_a[..cut] != with_c[..cut], "{}: the first is not seen at all", f.name);
        let alone = f.logits(&Batch::from_sequences(&[&b]), None);
        let worst = largest_difference(&with_a[cut..], &alone);
        assert!(worst < 1e-4, "{}: packed and alone differ by {worst}", f.name);
    }
}

/// Loss and gradients of one batch, by parameter name.
fn gradients(f: Fixture, checkpoint: bool) -> (f32, usize, Vec<(String, Vec<f32>)>) {
    let tokens = f.tokens(30, 5);
    let targets = f.tokens(30, 6);
    let weights: Vec<f32> = (0..30).map(|n| [1.0, 1.0, 0.5, 0.0][n % 4]).collect();
    let mut trainer = Trainer::new(f.model, f.weights);
    trainer.options.checkpoint = checkpoint;
    let batch = Batch::from_sequences(&[&tokens[..11], &tokens[11..]]);
    let targets = Targets { ids: &targets, weights: &weights, norm: 20.0 };
    let (report, grads) = trainer.gradients(&batch, &targets).unwrap();
    let named = grads.iter().map(|(key, grad)| {
        let id = crate::model::weights::ParamId(key);
        (trainer.weights.name(id).to_string(), grad.f32().to_vec())
    });
    (report.loss, report.tape_bytes, named.collect())
}

#[test]
fn checkpointed_layers_keep_less_and_give_the_same_bits() {
    let device = Device::cpu(2).unwrap();
    for (name, config) in configs() {
        let plain = gradients(fixture(&device, &name, &config), false);
        let again = gradients(fixture(&device, &name, &config), true);
        assert!(plain.0 == again.0 && plain.2 == again.2, "{name}: bits differ");
        assert!(again.1 < plain.1, "{name}: {} bytes against {}", again.1, plain.1);
    }
}

#[test]
fn training_has_the_same_bits_on_any_number_of_threads() {
    for (name, config) in configs() {
        let run = |n_threads| {
            let device = Device::cpu(n_threads).unwrap();
            let f = fixture(&device, &name, &config);
            let (tokens, targets) = (f.tokens(40, 1), f.tokens(40, 2));
            let mut trainer = Trainer::new(f.model, f.weights);
            let batch = Batch::from_sequences(&[&tokens[..13], &tokens[13..]]);
            let targets = Targets { ids: &targets, weights: &[1.0; 40], norm: 40.0 };
            let settings = StepSettings::default();
            let step = |trainer: &mut Trainer| {
                let report = trainer.step(&batch, &targets, &settings).unwrap();
                (report.loss.to_bits(), report.grad_norm.to_bits())
            };
            let reports = [step(&mut trainer), step(&mut trainer), step(&mut trainer)];
            let last = trainer.weights.ids().last().unwrap();
            (reports, trainer.weights.tensor(last).f32().to_vec())
        };
        let one = run(1);
        assert!(one == run(2), "{name}: 2 threads");
        assert!(one == run(3), "{name}: 3 threads");
    }
}

#[test]
fn a_step_after_the_first_asks_the_system_for_no_memory() {
    for (name, config) in configs() {
        // One thread: with more, how many tasks hold scratch at once is a matter of timing.
        let device = Device::cpu(1).unwrap();
        let f = fixture(&device, &name, &config);
        let (tokens, targets) = (f.tokens(64, 1), f.tokens(64, 2));
        let mut trainer = Trainer::new(f.model, f.weights);
        let batch = Batch::from_sequences(&[&tokens[..20], &tokens[20..]]);
        let targets = Targets { ids: &targets, weights: &[1.0; 64], norm: 64.0 };
        // No rate: as a router learns, experts get other numbers of tokens.
        let mut settings = StepSettings::default();
        settings.adamw.lr = 0.0;
        trainer.step(&batch, &targets, &settings).unwrap();
        let n_alloc = device.memory().n_alloc;
        for _ in 0..3 {
            trainer.step(&batch, &targets, &settings).unwrap();
        }
        assert_eq!(device.memory().n_alloc, n_alloc, "{name}");
    }
}

#[test]
fn what_is_frozen_stays_bit_equal_and_what_is_trained_moves() {
    let device = Device::cpu(2).unwrap();
    for (name, config) in configs() {
        let f = fixture(&device, &name, &config);
        let tokens = f.tokens(20, 1);
        let mut trainer = Trainer::new(f.model, f.weights);
        trainer.weights.train(|_, role| role == Role::Vector);
        let before: Vec<Vec<u8>> =
            trainer.weights.ids().map(|id| trainer.weights.tensor(id).bytes().to_vec()).collect();
        let batch = Batch::from_sequences(&[&tokens]);
        let targets = Targets { ids: &tokens, weights: &[1.0; 20], norm: 20.0 };
        trainer.step(&batch, &targets, &StepSettings::default()).unwrap();
        for id in trainer.weights.ids() {
            let moved = trainer.weights.tensor(id).bytes() != before[id.0];
            let trained = trainer.weights.role(id) == Role::Vector;
            assert_eq!(moved, trained, "{name}: {}", trainer.weights.name(id));
        }
    }
}

#[test]
fn weights_in_bf16_give_the_logits_of_their_rounded_values() {
    let device = Device::cpu(2).unwrap();
    for (name, config) in configs() {
        let mut f = fixture(&device, &name, &config);
        let tokens = f.tokens(9, 1);
        let batch = Batch::from_sequences(&[&tokens]);
        let set = |f: &mut Fixture, stored: bool| {
            for id in f.weights.ids() {
                if matches!(f.weights.role(id), Role::Matrix | Role::Embedding) {
                    let tensor = f.weights.tensor(id).to_f32();
                    let halves = tensor.f32().iter();
                    let bytes: Vec<u8> =
                        halves.flat_map(|&x| half::bf16::from_f32(x).to_le_bytes()).collect();
                    let bytes = std::sync::Arc::new(bytes);
                    let shape = tensor.shape();
                    let half = Tensor::from_shared(&device, shape, DType::BF16, bytes, 0);
                    *f.weights.tensor_mut(id) = if stored { half } else { half.to_f32() };
                }
            }
        };
        set(&mut f, true);
        let stored = f.logits(&batch, None);
        set(&mut f, false);
        let worst = largest_difference(&stored, &f.logits(&batch, None));
        assert!(worst < 1e-4, "{name}: {worst}");
    }
}

#[test]
fn seeds_give_sane_and_distinct_initialisations() {
    let device = Device::cpu(2).unwrap();
    for (name, config) in configs() {
        let config = Config::from_json(&name, &config.to_string()).unwrap();
        let std = config.init_std;
        let model = Model::new(config);
        let mut seen: Vec<Vec<u8>> = Vec::new();
        for seed in [0, 1, 1 << 63] {
            let weights = Weights::init(&device, model.specs(), seed);
            for id in weights.ids() {
                let tensor = weights.tensor(id);
                let x = tensor.f32();
                assert!(x.iter().all(|x| x.is_finite()), "{name}: {}", weights.name(id));
                let (n_rows, n_cols) = tensor.dims2();
                let is_normal = matches!(weights.role(id), Role::Embedding);
                if is_normal {
                    let n = x.len() as f64;
                    let mean = x.iter().map(|&x| x as f64).sum::<f64>() / n;
                    let square = x.iter().map(|&x| x as f64 * x as f64).sum::<f64>() / n;
                    assert!(mean.abs() < 5.0 * std as f64 / n.sqrt(), "{name}: mean {mean}");
                    assert!((square.sqrt() / std as f64 - 1.0).abs() < 0.2, "{name}: {square}");
                }
                if weights.role(id) == Role::Matrix && n_rows > 1 && n_cols > 1 {
                    let rows: std::collections::HashSet<&[u8]> =
                        tensor.bytes().chunks(n_cols * 4).collect();
                    assert_eq!(rows.len(), n_rows, "{name}: rows of {}", weights.name(id));
                }
                if matches!(weights.role(id), Role::Matrix | Role::Embedding) {
                    let first = tensor.bytes()[..tensor.n_bytes().min(64)].to_vec();
                    assert!(!seen.contains(&first), "{name}: {} comes twice", weights.name(id));
                    seen.push(first);
                }
            }
        }
    }
}

fn deviation(x: &[f32]) -> f64 {
    (x.iter().map(|&x| (x as f64).powi(2)).sum::<f64>() / x.len() as f64).sqrt()
}

/// Uniform between minus and plus `bound`: within it, and reaching for both ends.
fn assert_uniform(what: &str, x: &[f32], bound: f64) {
    let (low, high) = x.iter().fold((0.0f64, 0.0f64), |(low, high), &x| {
        assert!((x as f64).abs() <= bound * 1.000_001, "{what}: {x} is beyond {bound}");
        (low.min(x as f64), high.max(x as f64))
    });
    assert!(low < -0.9 * bound && high > 0.9 * bound, "{what}: {low} to {high} of {bound}");
}

/// Step sizes whose inverse softplus is `x`: in their range, and even in their logarithm.
fn assert_delta(what: &str, x: &[f32], min: f64, max: f64) {
    let delta: Vec<f64> = x.iter().map(|&x| (x as f64).exp().ln_1p()).collect();
    let inside = |d: &f64| (min * 0.999..=max * 1.001).contains(d);
    assert!(delta.iter().all(inside), "{what}: {delta:?} from {min} to {max}");
    let (low, high) = delta.iter().fold((max, min), |(l, h), &d| (l.min(d), h.max(d)));
    assert!(low < 2.0 * min && high > max / 2.0, "{what}: {low} to {high}");
    let mean = delta.iter().map(|d| d.ln()).sum::<f64>() / delta.len() as f64;
    // Five deviations of the mean of uniform numbers.
    let room = 5.0 * (max / min).ln() / (12.0 * delta.len() as f64).sqrt();
    assert!((mean - (min * max).ln() / 2.0).abs() < room, "{what}: the mean is e^{mean}");
}

#[test]
fn each_kind_of_parameter_begins_as_published() {
    let json = json!({
        "model_type": "elapid", "vocab_size": 40, "d_model": 64, "init_std": 0.05,
        "layers": ["mamba1", {"mixer": "mamba2", "feed_forward": "none"}, "attention",
                   {"mixer": "short_conv", "feed_forward": "experts"}, "mamba3"],
        "mamba3": {"d_state": 8, "d_head": 4, "rank": 2, "out_norm": true},
        "mamba1": {"d_state": 5, "d_conv": 3, "delta_rank": 7,
                   "delta_min": 0.002, "delta_max": 0.2},
        "mamba2": {"d_state": 8, "d_head": 2, "expand": 4, "d_conv": 6,
                   "delta_min": 0.01, "delta_max": 0.5},
        "attention": {"n_head": 4, "qk_norm": true}, "short_conv": {"d_conv": 2},
        "dense": {"d_ff": 96}, "experts": {"n_expert": 3, "d_ff": 32, "d_shared": 32},
    });
    let device = Device::cpu(2).unwrap();
    let model = Model::new(Config::from_json("config.json", &json.to_string()).unwrap());
    let weights = Weights::init(&device, model.specs(), 3);
    let of = |name: &str| {
        let id = weights.find(name).unwrap_or_else(|| panic!("there is no {name}"));
        weights.tensor(id).f32()
    };
    assert_delta("Mamba-1", of("layers.0.mixer.dt_proj.bias"), 0.002, 0.2);
    assert_delta("Mamba-2", of("layers.1.mixer.dt_bias"), 0.01, 0.5);
    assert_delta("Mamba-3", of("layers.4.mixer.dt_bias"), 0.001, 0.1);
    assert_uniform("in_proj", of("layers.4.mixer.in_proj.weight"), 64f64.powf(-0.5));
    assert_uniform("out_proj", of("layers.4.mixer.out_proj.weight"), (128.0 * 5f64).powf(-0.5));
    for (part, want) in [("B_bias", 1.0), ("C_bias", 1.0), ("D", 1.0), ("mimo_z", 1.0)]
        .into_iter()
        .chain([("mimo_x", 0.5), ("mimo_o", 0.5), ("norm.weight", 1.0), ("B_norm.weight", 1.0)])
    {
        assert!(of(&format!("layers.4.mixer.{part}")).iter().all(|&x| x == want), "{part}");
    }
    assert_uniform("dt_proj", of("layers.0.mixer.dt_proj.weight"), 7f64.powf(-0.5));
    for (layer, d_conv) in [(0, 3.0f64), (1, 6.0), (3, 2.0)] {
        for part in ["weight", "bias"] {
            let name = format!("layers.{layer}.mixer.conv1d.{part}");
            assert_uniform(&name, of(&name), d_conv.powf(-0.5));
        }
    }
    for (at, &a) in of("layers.0.mixer.A_log").iter().enumerate() {
        assert!((a as f64 - ((at % 5 + 1) as f64).ln()).abs() < 1e-6, "number {at} is {a}");
    }
    let rates: Vec<f64> = of("layers.1.mixer.A_log").iter().map(|&a| (a as f64).exp()).collect();
    assert!(rates.iter().all(|a| (0.999_999..=16.000_01).contains(a)), "{rates:?}");
    assert!(rates.iter().any(|a| *a < 2.0) && rates.iter().any(|a| *a > 15.0), "{rates:?}");
    let mean = rates.iter().sum::<f64>() / rates.len() as f64;
    assert!((mean - 8.5).abs() < 5.0 * 15.0 / (12.0 * rates.len() as f64).sqrt(), "{mean}");
    for name in ["layers.0.mixer.D", "layers.1.mixer.D"] {
        assert!(of(name).iter().all(|&x| x == 1.0), "{name}");
    }
}

#[test]
fn matrices_that_write_to_the_stream_begin_smaller_the_more_there_are() {
    let device = Device::cpu(2).unwrap();
    for (name, config) in configs() {
        let family = config["model_type"].as_str().unwrap_or("mamba_ssm");
        let config = Config::from_json(&name, &config.to_string()).unwrap();
        let (std, n_layer) = (config.init_std as f64, config.layers.len() as f64);
        let is_torch = config.fresh == FreshKind::Torch;
        let n_branches = match family {
            "mamba" | "mamba2" | "falcon_mamba" => n_layer,
            _ if name == "elapid_mixed" => 2.0 * n_layer - 1.0,
            _ => 2.0 * n_layer,
        };
        let model = Model::new(config);
        let weights = Weights::init(&device, model.specs(), 3);
        let mut n_out = 0;
        for id in weights.ids() {
            let (param, x) = (weights.name(id), weights.tensor(id).f32());
            let is_one_of = |list: &[&str]| {
                let part = param.trim_end_matches(".weight");
                let part = part.split(".weight[").next().unwrap();
                list.contains(&part.rsplit('.').next().unwrap())
            };
            if weights.role(id) == Role::Vector && param.contains("norm") {
                assert!(x.iter().all(|&x| x == 1.0), "{name}: {param}");
            } else if param.ends_with("_proj.bias") && !param.ends_with("dt_proj.bias") {
                assert!(x.iter().all(|&x| x == 0.0), "{name}: {param}");
            }
            // Fewer numbers tell little of their deviation.
            if weights.role(id) != Role::Matrix || x.len() < 200 || is_one_of(&["dt_proj"]) {
                continue;
            }
            let out = ["out_proj", "o_proj", "down_proj", "down", "w2", "output_linear", "fc2"];
            let mixer = model.layer_of(id).map(|layer| &model.config().layers[layer].mixer);
            let is_mamba3 = matches!(mixer, Some(MixerConfig::Mamba3(_)));
            let (std, n_branches) = match is_torch || is_mamba3 && param.contains(".mixer.") {
                true => ((3.0 * weights.tensor(id).dims2().1 as f64).powf(-0.5), n_layer),
                false => (std, n_branches),
            };
            let want = if is_one_of(&out) { std / n_branches.sqrt() } else { std };
            n_out += is_one_of(&out) as usize;
            let ratio = deviation(x) / want;
            assert!((ratio - 1.0).abs() < 0.2, "{name}: {param} by {ratio}");
        }
        assert!(n_out > 0, "{name}: no matrix is large enough");
    }
}

#[test]
fn fresh_models_begin_near_the_uniform_loss() {
    let device = Device::cpu(2).unwrap();
    for (name, config) in configs() {
        let mut spread = 0.0;
        let f = {
            let mut config = Config::from_json(&name, &config.to_string()).unwrap();
            config.init_std = 0.02;
            // A head as torch draws it gives logits of variance 1/3; the loss is above by half.
            if config.fresh == FreshKind::Torch && !config.tied {
                spread = 1.0 / 6.0;
            }
            let n_vocab = config.n_vocab;
            let model = Model::new(config);
            let weights = Weights::init(&device, model.specs(), 0);
            Fixture { name: name.clone(), model, weights, n_vocab }
        };
        let tokens = f.tokens(30, 1);
        let tape = Tape::off();
        let batch = Batch::from_sequences(&[&tokens]);
        let targets = f.tokens(30, 2);
        let targets = Targets { ids: &targets, weights: &[1.0; 30], norm: 30.0 };
        let options = ForwardOptions::default();
        let loss = f.model.loss(&tape, &f.weights, &batch, &targets, options).unwrap();
        let (got, want) = (loss.loss.value().f32()[0], (f.n_vocab as f32).ln() + spread);
        assert!((got - want).abs() < 0.3, "{name}: {got} against {want}");
    }
}

/// Keys of config.json that change nothing in the mathematics: set (a `*` at the end stands for
/// any ending), key with all that is under it, and why.
const INERT: &[(&str, &str)] = &[
    // For the tokenizer and the sampler.
    ("*", "bos_token_id"),
    ("*", "eos_token_id"),
    ("*", "pad_token_id"),
    // Names a class of a reference implementation; `model_type` is what counts.
    ("*", "architectures"),
    // The weight file says for itself how it is stored.
    ("*", "torch_dtype"),
    // What a reference implementation returns, keeps, or which kernel it takes.
    ("*", "use_cache"),
    ("*", "num_logits_to_keep"),
    ("*", "output_router_logits"),
    ("*", "use_associative_scan"),
    ("*", "use_mamba_kernels"),
    ("*", "use_mambapy"),
    ("*", "residual_in_fp32"),
    ("*", "pretraining_tp"),
    ("mamba2*", "chunk_size"),
    ("mamba3*", "ssm_cfg.chunk_size"),
    ("*", "fused_add_norm"),
    ("*", "mamba_chunk_size"),
    // Training settings of a reference implementation, none of the model.
    ("*", "attention_dropout"),
    ("*", "rescale_prenorm_residual"),
    ("*", "time_step_scale"),
    ("*", "time_step_init_scheme"),
    ("mixtral", "router_jitter_noise"),
    ("bamba", "z_loss_coefficient"),
    // A limit that nothing is computed from.
    ("*", "max_position_embeddings"),
    ("elapid*", "n_ctx"),
    // Overruled by another key, or about a part that the set does not have.
    ("mamba", "expand"),                             // intermediate_size
    ("mamba_odd", "expand"),                         // intermediate_size
    ("falcon_mamba", "expand"),                      // intermediate_size
    ("falcon_h1", "mamba_expand"),                   // mamba_d_ssm
    ("falcon_h1_norm_first", "mamba_expand"),        // mamba_d_ssm
    ("falcon_h1_plain", "mamba_norm_before_gate"),   // mamba_rms_norm is false
    ("mamba2*", "time_step_rank"),                   // belongs to Mamba-1
    ("qwen2", "max_window_layers"),                  // layer_types
    ("qwen2_window", "max_window_layers"),           // layer_types
    ("qwen2_moe", "max_window_layers"),              // layer_types
    ("qwen3", "max_window_layers"),                  // layer_types
    ("dots1", "max_window_layers"),                  // layer_types
    ("qwen2", "layer_types"),                        // no window
    ("qwen2_moe", "layer_types"),                    // use_sliding_window is false
    ("qwen3", "layer_types"),                        // no window
    ("dots1", "layer_types"),                        // no window
    ("qwen2", "use_sliding_window"),                 // no window
    ("qwen2_moe", "use_sliding_window"),             // no layer of that type
    ("qwen3", "use_sliding_window"),                 // no window
    ("qwen2", "sliding_window"),                     // use_sliding_window is false
    ("qwen2_moe", "sliding_window"),                 // use_sliding_window is false
    ("qwen3", "sliding_window"),                     // use_sliding_window is false
    ("dots1", "sliding_window"),                     // no layer of that type
    ("granitemoehybrid", "rope_theta"),              // position_embedding_type is nope
    ("granitemoehybrid", "rope_scaling"),            // position_embedding_type is nope
    ("granitemoehybrid_dense", "intermediate_size"), // no experts
    ("granitemoehybrid_dense", "num_experts_per_tok"),
    ("granitemoehybrid_dense", "router_aux_loss_coef"),
    ("mamba3_siso*", "attn_layer_idx"), // an empty list
    ("mamba3_mimo", "attn_layer_idx"),  // an empty list
    ("elapid_jamba", "balance_scale"),  // no experts in the schedules, and no Mamba-1
    ("elapid_jamba", "experts"),
    ("elapid_jamba", "mamba1"),
    ("elapid_jamba", "mamba3"),
    ("elapid_zamba", "balance_scale"),
    ("elapid_zamba", "experts"),
    ("elapid_zamba", "mamba1"),
    ("elapid_zamba", "mamba2"),
];

fn is_inert(entry: &(&str, &str), name: &str, path: &str) -> bool {
    let is_set = match entry.0.strip_suffix('*') {
        Some(prefix) => name.starts_with(prefix),
        None => name == entry.0,
    };
    let rest = path.strip_prefix(entry.1);
    is_set && rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Everything that a config determines: parameters, their beginning, and the bits of logits and
/// training loss; `None` for a config that is refused.
fn trajectory(device: &Device, name: &str, config: &Value) -> Option<(String, Vec<u8>, Vec<u32>)> {
    let config = Config::from_json(name, &config.to_string()).ok()?;
    let n_vocab = config.n_vocab;
    let model = Model::new(config);
    let weights = Weights::init(device, model.specs(), 0);
    let shapes =
        format!("{:?}", model.specs().iter().map(|s| (&s.name, &s.shape)).collect::<Vec<_>>());
    let start = weights.ids().flat_map(|id| weights.tensor(id).bytes().to_vec()).collect();
    let f = Fixture { name: name.into(), model, weights, n_vocab };
    let tokens: Vec<u32> = (0..24).map(|n| n * 5 % 19).collect();
    let batch = Batch::from_sequences(&[&tokens]);
    let mut numbers = f.logits(&batch, None);
    let trainer = Trainer::new(f.model, f.weights);
    let targets = Targets { ids: &tokens, weights: &[1.0; 24], norm: 24.0 };
    numbers.push(trainer.gradients(&batch, &targets).unwrap().0.loss);
    assert!(numbers.iter().all(|x| x.is_finite()), "{name}: not finite");
    Some((shapes, start, numbers.into_iter().map(f32::to_bits).collect()))
}

/// Words that a key may have, or the items of its list.
fn words(key: &str) -> &'static [&'static str] {
    match key {
        "model_type" => &["llama", "qwen2", "falcon_mamba"],
        "hidden_act" => &["relu", "gelu_new"],
        "position_embedding_type" => &["rope", "nope"],
        "rope_type" => &["default", "linear"],
        "layer_types" => &["attention", "mamba", "sliding_attention"],
        "layers" => &["jamba", "zamba", "mamba2", "attention"],
        "layer" => &["Mamba1", "Mamba2"],
        "decay" => &["heavy_tail"],
        "mixer" => &["mamba2", "attention"],
        "feed_forward" => &["dense", "none"],
        "activation" => &["relu", "swiglu"],
        "architectures" => &["LlamaForCausalLM", "MambaForCausalLM"],
        "torch_dtype" => &["float16", "bfloat16"],
        "time_step_init_scheme" => &["constant"],
        _ => &[],
    }
}

/// Other values that a key might have.
fn others(key: &str, value: &Value) -> Vec<Value> {
    match value {
        Value::Bool(b) => vec![json!(!b)],
        Value::Number(n) if n.is_u64() => {
            let n = n.as_u64().unwrap();
            let list = [n + 1, n + 4, n * 2, n / 2].into_iter().filter(|other| *other != n);
            list.map(|other| json!(other)).collect()
        }
        Value::Number(n) => {
            let x = n.as_f64().unwrap();
            vec![json!(x * 1.5 + 0.01), json!(x / 2.0 + 0.001)]
        }
        Value::String(word) => {
            words(key).iter().filter(|other| *other != word).map(|other| json!(other)).collect()
        }
        Value::Null if key == "rope_scaling" => vec![json!({"rope_type": "linear", "factor": 3})],
        Value::Null => vec![json!(5), json!(2.5)],
        // Infinity.
        Value::Object(_) => vec![json!(0.02)],
        Value::Array(_) => Vec::new(),
    }
}

/// Every place in a value, by its path, with what the value is when that place is changed.
fn changes(path: &str, key: &str, value: &Value) -> Vec<(String, Vec<Value>)> {
    let inner = |at: String, key: &str, item: &Value, put: &dyn Fn(&mut Value, Value)| {
        let with = |other: Value| {
            let mut whole = value.clone();
            put(&mut whole, other);
            whole
        };
        let places = changes(&format!("{path}{at}"), key, item).into_iter();
        places
            .map(|(path, others)| (path, others.into_iter().map(with).collect()))
            .collect::<Vec<_>>()
    };
    match value {
        Value::Array(list) if !list.is_empty() => {
            let items = list.iter().enumerate();
            items
                .flat_map(|(idx, item)| {
                    inner(format!("[{idx}]"), key, item, &|whole, other| whole[idx] = other)
                })
                .collect()
        }
        Value::Object(map) if !map.contains_key("__float__") => map
            .iter()
            .flat_map(|(key, item)| {
                let dot = if path.is_empty() { "" } else { "." };
                inner(format!("{dot}{key}"), key, item, &|whole, other| whole[key] = other)
            })
            .collect(),
        _ => vec![(path.into(), others(key, value))],
    }
}

#[test]
fn every_config_key_is_live() {
    let device = Device::cpu(2).unwrap();
    let mut wrong = Vec::new();
    let mut is_needed = vec![false; INERT.len()];
    for (name, config) in configs() {
        let base = trajectory(&device, &name, &config);
        assert!(base.is_some(), "{name}");
        for (path, others) in changes("", "", &config) {
            // Another value may be refused: where all are, the key is read too.
            let mut results = others.iter().map(|other| trajectory(&device, &name, other));
            let mut is_dead = others.is_empty();
            let is_changed = results.any(|result| {
                is_dead |= result == base;
                result.is_some() && result != base
            });
            let is_live = is_changed || !is_dead;
            let entry = INERT.iter().position(|entry| is_inert(entry, &name, &path));
            match (is_live, entry) {
                (true, None) => {}
                (false, Some(idx)) => is_needed[idx] = true,
                (true, Some(_)) => wrong.push(format!("{name}: {path} is live, not inert")),
                (false, None) => wrong.push(format!("{name}: {path} changes nothing")),
            }
        }
    }
    let stale = INERT.iter().zip(is_needed).filter(|pair| !pair.1);
    wrong.extend(stale.map(|(entry, _)| format!("{entry:?} is in no set")));
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn wrong_configs_get_errors_that_name_the_key_and_the_value() {
    let good = configs().into_iter().find(|(name, _)| name == "llama_gqa_untied").unwrap().1;
    let error = |key: &str, value: Value| {
        let mut config = good.clone();
        config[key] = value;
        Config::from_json("config.json", &config.to_string()).unwrap_err().report()
    };
    for (key, value, part) in [
        ("model_type", json!("xyz"), "supported are mamba, mamba2"),
        ("hidden_size", json!("a"), "`hidden_size`: is \"a\", not a whole number"),
        ("num_key_value_heads", json!(3), "3 do not divide"),
        ("num_hidden_layers", json!(0), "0 is out of range"),
        ("vocab_size", json!(null), "`vocab_size`: is missing"),
        ("hidden_act", json!("quick_gelu"), "known are silu"),
        (
            "rope_scaling",
            json!({"rope_type": "longrope"}),
            "`rope_scaling.rope_type`: is \"longrope\"",
        ),
    ] {
        let text = error(key, value);
        assert!(text.contains(part), "{text}");
        assert!(text.contains("hint: "), "{text}");
    }
}

#[test]
fn both_spellings_of_a_config_mean_the_same() {
    let sets = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden/sets");
    let mut n_pairs = 0;
    for entry in std::fs::read_dir(sets).unwrap() {
        let path = entry.unwrap().path();
        let read = |name: &str| std::fs::read_to_string(path.join(name)).ok();
        if let (Some(v4), Some(v5)) = (read("config.json"), read("config.v5.json")) {
            let [v4, v5] = [v4, v5].map(|json| Config::from_json("config.json", &json).unwrap());
            assert_eq!(v4, v5, "{}", path.display());
            n_pairs += 1;
        }
    }
    assert!(n_pairs >= 20, "{n_pairs}");
}

#[test]
fn schedules_place_attention_where_they_say() {
    for (schedule, period) in [("jamba", 4), ("zamba", 6)] {
        let json = json!({"model_type": "elapid", "vocab_size": 8, "d_model": 64,
                          "layers": schedule, "n_layer": 13});
        let config = Config::from_json("config.json", &json.to_string()).unwrap();
        for (idx, layer) in config.layers.iter().enumerate() {
            let is_attention =
                matches!(layer.mixer, crate::model::config::MixerConfig::Attention(_));
            assert_eq!(is_attention, idx % period == period - 1, "{schedule}, layer {idx}");
        }
    }
}

/// The last token of what is said to be seen changes the logits, the one before it does not.
#[test]
fn a_model_of_convolutions_sees_as_far_as_it_is_said_to() {
    let device = Device::cpu(1).unwrap();
    let (_, config) = configs().into_iter().find(|(name, _)| name == "evermind").unwrap();
    let f = fixture(&device, "evermind", &config);
    let checkpoint = Checkpoint::fresh("evermind", config.to_string(), Vec::new()).unwrap();
    let n_seen = checkpoint.info().unwrap().n_seen.unwrap();
    assert_eq!(n_seen, f.model.config().layers.len() * 2 + 1);
    let (n_tok, n_vocab) = (2 * n_seen, f.n_vocab);
    let logits = |tokens: &[u32]| {
        f.logits(&Batch::from_sequences(&[tokens]), None)[(n_tok - 1) * n_vocab..].to_vec()
    };
    let tokens = f.tokens(n_tok, 3);
    let want = logits(&tokens);
    for (back, is_seen) in [(n_seen - 1, true), (n_seen, false)] {
        let mut other = tokens.clone();
        other[n_tok - 1 - back] = (other[n_tok - 1 - back] + 1) % n_vocab as u32;
        assert_eq!(logits(&other) != want, is_seen, "{back} tokens back");
    }
}

#[test]
fn the_state_of_every_family_is_as_large_as_is_said() {
    let device = Device::cpu(2).unwrap();
    for f in fixtures(&device) {
        let [n_bytes, per_token] = f.model.state_bytes();
        let mut state = f.model.state(&device);
        assert_eq!(state.n_bytes(), n_bytes, "{}", f.name);
        for n_tok in [PAGE, 2 * PAGE] {
            let tokens = f.tokens(PAGE, 3);
            let batch = Batch::continuing(&[(&tokens, state.n_tok)]);
            f.logits(&batch, Some(std::slice::from_mut(&mut state)));
            assert_eq!(state.n_bytes(), n_bytes + n_tok * per_token, "{}", f.name);
        }
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_an_error() {
    let device = Device::cpu(1).unwrap();
    let f = fixtures(&device).remove(0);
    let batch = Batch::from_sequences(&[&[f.n_vocab as u32]]);
    let tape = Tape::off();
    let options = ForwardOptions::default();
    let result = f.model.forward(&tape, &f.weights, &batch, None, options);
    assert!(result.err().unwrap().report().contains("is outside the vocabulary"));
}
