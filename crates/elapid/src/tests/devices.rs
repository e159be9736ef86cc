//! The same training on every device, from one seed: loss curves side by side.
//!
//! Devices that must be there: `ELAPID_REQUIRE=wgpu` or `ELAPID_REQUIRE=wgpu,cuda`. Everything is
//! checked on every device that is found; without this a missing driver would make all of those
//! checks pass by doing nothing.

use crate::data::Document;
use crate::error::Error;
use crate::eval::golden::check_directory;
use crate::generate::sample::Sampling;
use crate::generate::{GenerateSettings, generate_many};
use crate::model::Model;
use crate::model::config::Config;
use crate::model::config::preset::{Arch, Size};
use crate::model::weights::Weights;
use crate::ops::adamw::AdamW;
use crate::session::{Batches, Session};
use crate::tensor::batch::Targets;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Gpu, Precision};
use crate::tensor::rng::Rng;
use crate::tensor::{DType, Tensor};
use crate::train::optim::{Optimizer, OptimizerKind};
use crate::train::plan::{Fixed, random_batch};
use crate::train::state::{Extent, Saved};
use crate::train::{Outcome, Settings, StepReport, StepSettings, Trainer, Training};
use serde_json::json;
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

/// GPUs that are found, with what a loss may differ by, as a share of it.
fn found() -> Vec<(Device, f32)> {
    let wanted = [
        ("wgpu", Precision::F32, 1e-3),
        ("cuda", Precision::F32, 1e-3),
        ("cuda", Precision::Bf16, 1e-2),
    ];
    let open =
        |(name, precision, tolerance)| Some((Device::by_name(name, precision, 2).ok()?, tolerance));
    wanted.into_iter().filter_map(open).collect()
}

/// Steps to compare: fewer where a GPU is emulated thread by thread.
fn n_steps(device: &Device) -> usize {
    if device.describe().contains("emulator") { 8 } else { 100 }
}

/// Layers of a small model.
const LLAMA: &[&str] = &["attention", "attention"];
const MAMBA_1: &[&str] = &["mamba1", "mamba1"];
const MAMBA_2: &[&str] = &["mamba2", "mamba2"];
const MAMBA_3: &[&str] = &["mamba3", "mamba3"];
const HYBRID: &[&str] = &["mamba1", "attention", "mamba2"];

fn config(layers: &[&str], feed_forward: &str) -> Config {
    let json = json!({
        "model_type": "elapid", "vocab_size": 400, "d_model": 64, "layers": layers,
        "mamba2": {"d_head": 16, "d_state": 16},
        "mamba3": {"d_head": 16, "d_state": 16, "rank": 2, "out_norm": true},
        "attention": {"n_head": 2, "n_kv_head": 1},
        "feed_forward": feed_forward, "dense": {"d_ff": 96},
        "experts": {"n_expert": 4, "d_ff": 32},
    });
    Config::from_json("small", &json.to_string()).unwrap()
}

fn trainer(device: &Device, config: &Config) -> Trainer {
    let model = Model::new(config.clone());
    let weights = Weights::init(device, model.specs(), 1);
    Trainer::new(model, weights)
}

fn losses(trainer: &mut Trainer, n_steps: usize) -> Vec<f32> {
    steps(trainer, n_steps).iter().map(|step| step.loss).collect()
}

/// The next steps.
fn steps(trainer: &mut Trainer, n_steps: usize) -> Vec<StepReport> {
    let packed = random_batch(trainer.model.config().n_vocab, 2, 24);
    let (ids, weights) = (&packed.targets, &packed.weights);
    let targets = Targets { ids, weights, norm: ids.len() as f32 };
    let adamw = AdamW { lr: 3e-4, ..AdamW::default() };
    let settings = StepSettings { adamw, clip_norm: Some(1.0) };
    let step = |_| trainer.step(&packed.batch, &targets, &settings).unwrap();
    (0..n_steps).map(step).collect()
}

fn compare(what: &str, want: &[f32], got: &[f32], tolerance: f32) {
    for (step, (want, got)) in want.iter().zip(got).enumerate() {
        let off = (got - want).abs() / want.abs().max(0.1);
        assert!(off <= tolerance, "{what}, step {step}: a loss of {got}, not {want}");
    }
}

fn trains_alike(layers: &[&str], feed_forward: &str) {
    let devices = found();
    if devices.is_empty() {
        eprintln!("skip: no GPU is found");
        return;
    }
    let config = config(layers, feed_forward);
    let want = losses(&mut trainer(&Device::cpu(2).unwrap(), &config), 100);
    assert!(want[99] < 0.9 * want[0], "{layers:?} learn: {want:?}");
    for (device, tolerance) in devices {
        let got = losses(&mut trainer(&device, &config), n_steps(&device));
        compare(&format!("{layers:?} on {device:?}"), &want, &got, tolerance);
    }
}

#[test]
fn llama_trains_alike_on_every_device() {
    trains_alike(LLAMA, "dense");
}

#[test]
fn mamba_1_trains_alike_on_every_device() {
    trains_alike(MAMBA_1, "none");
}

#[test]
fn mamba_2_trains_alike_on_every_device() {
    trains_alike(MAMBA_2, "none");
}

#[test]
fn mamba_3_trains_alike_on_every_device() {
    trains_alike(MAMBA_3, "none");
}

#[test]
fn hybrids_train_alike_on_every_device() {
    trains_alike(HYBRID, "dense");
}

#[test]
fn experts_train_alike_on_every_device() {
    trains_alike(LLAMA, "experts");
}

/// Everything that training has changed, in bytes.
fn trained(trainer: &Trainer) -> Vec<Vec<u8>> {
    let weights = &trainer.weights;
    let tensors = weights.ids().map(|id| weights.tensor(id));
    let state = trainer.optimizer.state();
    let tensors = tensors.chain(state.iter().map(|(_, tensor)| *tensor));
    tensors.map(|tensor| tensor.to_bytes().into_owned()).collect()
}

#[test]
fn moments_of_experts_on_the_host_train_the_same_bits_and_resume() {
    let config = config(LLAMA, "experts");
    let devices = found().into_iter().map(|it| it.0).chain([Device::cpu(2).unwrap()]);
    for device in devices {
        for kind in [OptimizerKind::AdamW, OptimizerKind::Muon] {
            let new = |limit: Option<usize>| {
                let mut trainer = trainer(&device, &config);
                trainer.optimizer = Optimizer::with_experts_over(&trainer.weights, kind, limit);
                trainer
            };
            let mut plain = new(None);
            steps(&mut plain, 2);
            let half: BTreeMap<String, Vec<u8>> = {
                let state = plain.optimizer.state().into_iter();
                state.map(|(name, tensor)| (name, tensor.to_bytes().into_owned())).collect()
            };
            let half_weights = plain.weights.ids().map(|id| plain.weights.tensor(id).to_vec());
            let half_weights: Vec<Vec<f32>> = half_weights.collect();
            steps(&mut plain, 2);
            let want = trained(&plain);
            // One matrix at a time, some, all.
            for limit in [1, 40_000, usize::MAX] {
                let mut paged = new(Some(limit));
                let fixed = Fixed::of(&paged);
                let is_gpu = device.gpu().is_some();
                assert_eq!(fixed.moments_on_host > 0, is_gpu, "{fixed:?}");
                steps(&mut paged, 4);
                assert!(trained(&paged) == want, "{kind:?}, {limit} bytes on {device:?}");
            }
            let mut resumed = new(Some(40_000));
            for (id, numbers) in resumed.weights.ids().zip(&half_weights) {
                resumed.weights.tensor_mut(id).write_f32(numbers);
            }
            let mut get = |name: &str| {
                let shape = resumed
                    .weights
                    .tensor(resumed.weights.find(name.split_once('.').unwrap().1).unwrap())
                    .shape();
                let bytes = Arc::new(half[name].clone());
                Ok(Tensor::from_shared(&device, shape, DType::F32, bytes, 0))
            };
            resumed.optimizer.restore(2, &mut get).unwrap();
            steps(&mut resumed, 2);
            assert!(trained(&resumed) == want, "{kind:?} resumed on {device:?}");
        }
    }
}

/// A model that nobody would build: widths of no tile, heads and states beyond all kernels' sizes.
fn odd(seed: u64) -> Config {
    let (rng, mut n) = (Rng::new(seed, 0), 0);
    let mut pick = |from: &[usize]| {
        n += 1;
        from[rng.below(n, from.len() as u64) as usize]
    };
    let (n_head, n_kv_head) = [(1, 1), (2, 1), (3, 3), (6, 2)][pick(&[0, 1, 2, 3])];
    let mixers = ["mamba1", "mamba2", "attention", "short_conv"];
    let layers: Vec<&str> = (0..2).map(|_| mixers[pick(&[0, 1, 2, 3])]).collect();
    let d_model = pick(&[3, 5, 7, 20, 33, 63, 66, 130]);
    let (expand, n_group) = [(1, 1), (2, 2), (6, 3)][pick(&[0, 1, 2])];
    let d_head = [1, d_model, expand * d_model / n_group][pick(&[0, 1, 2])];
    let (d_conv, n_expert) = (pick(&[1, 2, 3, 4, 5, 9, 33]), pick(&[1, 2, 5, 70]));
    let feed_forward = ["none", "dense", "experts"][pick(&[0, 1, 2])];
    let activation = ["swiglu", "geglu", "reglu", "gelu", "relu"][pick(&[0, 1, 2, 3, 4])];
    let json = json!({
        "model_type": "elapid", "vocab_size": pick(&[2, 5, 257, 1000, 70_001]), "d_model": d_model,
        "layers": layers,
        "mamba1": {"d_state": pick(&[1, 2, 5, 16, 17, 64, 65, 129, 256]), "d_conv": d_conv,
            "delta_rank": pick(&[1, 2, 9, 70])},
        "mamba2": {"d_head": d_head, "d_state": pick(&[1, 3, 16, 70, 128, 130, 300]),
            "expand": expand, "n_group": n_group, "d_conv": d_conv},
        "attention": {"n_head": n_head, "n_kv_head": n_kv_head,
            "d_head": pick(&[2, 6, 34, 64, 80, 128, 130, 256, 258, 514]),
            "window": pick(&[1, 2, 33, 1000]), "qk_norm": pick(&[0, 1]) == 1},
        "short_conv": {"d_conv": d_conv},
        "feed_forward": feed_forward,
        "dense": {"d_ff": pick(&[1, 5, 67, 130]),
            "activation": activation},
        "experts": {"n_expert": n_expert, "n_used": pick(&[1, n_expert.min(3)]),
            "d_ff": pick(&[1, 5, 67])},
    });
    Config::from_json("odd", &json.to_string()).unwrap()
}

/// `ELAPID_ODD` says from which number to which: `7..8` is the one that failed.
#[test]
fn models_of_odd_shapes_train_alike_on_every_device() {
    let range = std::env::var("ELAPID_ODD").unwrap_or("0..4".into());
    let (first, end) = range.split_once("..").unwrap();
    for seed in first.parse().unwrap()..end.parse().unwrap() {
        let config = odd(seed);
        let want = steps(&mut trainer(&Device::cpu(2).unwrap(), &config), 2);
        for (device, tolerance) in found() {
            let what = format!("{seed} on {device:?}: {config:?}");
            let got = steps(&mut trainer(&device, &config), 2);
            device.check().unwrap();
            for (want, got) in want.iter().zip(&got) {
                compare(&what, &[want.loss], &[got.loss], tolerance);
                compare(&what, &[want.grad_norm as f32], &[got.grad_norm as f32], 5.0 * tolerance);
            }
        }
    }
}

#[test]
fn training_goes_on_from_one_device_to_another() {
    let cpu = Device::cpu(2).unwrap();
    let config = config(HYBRID, "dense");
    for (device, tolerance) in found() {
        let mut here = trainer(&cpu, &config);
        losses(&mut here, 3);
        let mut there = trainer(&device, &config);
        there.weights = here.weights.to(&device);
        there.optimizer = Optimizer::new(&there.weights, OptimizerKind::AdamW);
        let kept = here.optimizer.state();
        let get = &mut |name: &str| Ok(kept.iter().find(|(it, _)| it == name).unwrap().1.clone());
        there.optimizer.restore(3, get).unwrap();
        drop(kept);
        let (want, got) = (losses(&mut here, 3), losses(&mut there, 3));
        compare(&format!("{device:?}"), &want, &got, tolerance);
        // And back again.
        let mut back = trainer(&cpu, &config);
        back.weights = there.weights.to(&cpu);
        let (want, got) = (losses(&mut there, 1), losses(&mut back, 1));
        compare(&format!("{device:?} to the CPU"), &want, &got, tolerance);
    }
}

#[test]
fn every_device_generates_the_same_text() {
    for layers in [LLAMA, MAMBA_1, MAMBA_2, MAMBA_3, HYBRID] {
        let config = config(layers, "dense");
        let cpu = trainer(&Device::cpu(2).unwrap(), &config);
        let prompt: Vec<u32> = (0..40).map(|n| n * 7 % 300).collect();
        let sampling = Sampling::greedy();
        let settings = GenerateSettings { n_max: 6, sampling, stops: Vec::new() };
        let run = |trainer: &Trainer| {
            let prompts = [&prompt[..], &prompt[..3]];
            let on = |_, _| ControlFlow::Continue(());
            generate_many(&trainer.model, &trainer.weights, &prompts, &settings, on).unwrap()
        };
        let want = run(&cpu);
        for (device, tolerance) in found() {
            if tolerance < 1e-2 {
                assert_eq!(run(&trainer(&device, &config)), want, "{layers:?} on {device:?}");
            }
        }
    }
}

#[test]
fn devices_that_are_required_are_there() {
    let required = std::env::var("ELAPID_REQUIRE").unwrap_or_default();
    for name in required.split(',').filter(|name| !name.is_empty()) {
        if let Err(error) = Device::by_name(name, Precision::F32, 1) {
            panic!("`{name}` is required: {error}");
        }
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error_with_a_hint() {
    for name in ["wgpu:99", "cuda:99", "tpu", "cuda:x", "cpu:1"] {
        let error = Device::by_name(name, Precision::F32, 1).err();
        let text = error.unwrap_or_else(|| panic!("{name} was found")).to_string();
        assert!(text.contains("99") || text.contains(name) || text.contains("CUDA"), "{text}");
    }
}

/// Everything that WebGPU promises, and nothing more: 8 buffers in a kernel, 128 MiB in a binding,
/// 256 MiB in a buffer, no f16, no subgroups.
#[test]
fn golden_sets_hold_at_the_default_limits_of_webgpu() {
    let host = Device::cpu(2).unwrap().host().clone();
    let Ok(gpu) = Gpu::wgpu_plain(0, host, 128 << 20, &[]) else {
        return eprintln!("skip: no wgpu adapter is found");
    };
    assert_eq!((gpu.binding_bytes_max(), gpu.features().len()), (128 << 20, 0));
    let device = Device::Gpu(gpu);
    let sets = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../golden/sets");
    for set in ["mamba", "mamba2", "mamba3_siso", "llama_gqa_untied", "qwen3", "falcon_h1", "jamba"]
    {
        let (found, skipped) = check_directory(&sets.join(set), None, &device).unwrap();
        device.check().unwrap();
        for one in &found {
            assert!(one.holds(), "{set}: {} is off by {}", one.quantity, one.error);
        }
        let has = |what: &str| found.iter().any(|one| one.quantity.contains(what));
        assert!(has("logits") && has("grad"), "{set}: {found:?}");
        assert_eq!(skipped, None, "{set}: AdamW too");
    }
}

#[test]
fn a_lost_device_is_said_and_a_new_one_continues_from_the_last_checkpoint() {
    let open = || Device::by_name("wgpu", Precision::F32, 1);
    let Ok(lost) = open() else { return eprintln!("skip: no wgpu adapter is found") };
    let text = "fn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n".repeat(40);
    let begin = |device: &Device| {
        let mut session = Session::scratch(Size::Tiny, Arch::Hybrid, &text, device).unwrap();
        let settings = Settings { n_steps: 6, n_warmup: 1, ..Settings::default() };
        let batches = Batches { context: 32, n_rows: 2, ..Batches::default() };
        session.begin(&[Document::whole("text", &text)], &batches, &settings).unwrap()
    };
    let loss = |training: &mut Training| match training.step().unwrap() {
        Outcome::Made { report, .. } => report.loss,
        Outcome::Diverged(why) => panic!("{why}"),
    };
    let mut training = begin(&open().unwrap());
    let want: Vec<f32> = (0..6).map(|_| loss(&mut training)).collect();

    let mut training = begin(&lost);
    let mut got: Vec<f32> = (0..3).map(|_| loss(&mut training)).collect();
    let mut bytes = Vec::new();
    let capture = training.capture(Extent::Run, &json!(null)).unwrap();
    let write = capture.write_to(&mut |more| {
        bytes.extend_from_slice(more);
        Ok(())
    });
    write.unwrap();
    lost.gpu().unwrap().lose();
    for _ in 0..2 {
        let error = training.step().map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::DeviceLost { .. }), "{error:?}");
        assert!(error.hint().contains("last checkpoint"), "{}", error.hint());
    }

    let mut training = begin(&open().unwrap());
    Saved::parse("checkpoint", Arc::new(bytes)).unwrap().restore(&mut training).unwrap();
    got.extend((0..3).map(|_| loss(&mut training)));
    assert_eq!(got, want);
}
