//! The same training on every device, from one seed: loss curves side by side.
//!
//! Devices that must be there: `ELAPID_REQUIRE=wgpu` or `ELAPID_REQUIRE=wgpu,cuda`. Everything is
//! checked on every device that is found; without this a missing driver would make all of those
//! checks pass by doing nothing.

#![allow(clippy::unwrap_used)] // a test may panic

use elapid::batch::Targets;
use elapid::config::preset::{Arch, Size};
use elapid::device::Device;
use elapid::generate::{GenerateSettings, generate_many};
use elapid::gpu::Precision;
use elapid::model::Model;
use elapid::optim::{AdamW, Optimizer, OptimizerKind};
use elapid::plan::random_batch;
use elapid::sample::Sampling;
use elapid::scratch::{self, Shape};
use elapid::train::{StepSettings, Trainer};
use elapid::weights::Weights;
use std::ops::ControlFlow;

const TEXT: &str = include_str!("train.rs");
const N_STEPS: usize = 100;

/// Graphics processors that are found, with what a loss may differ by, as a share of it.
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

fn trainer(device: &Device, arch: Arch) -> Trainer {
    let texts = scratch::vocabulary(400, 32, &mut [TEXT].into_iter()).unwrap();
    let shape = Shape { size: Size::Tiny, arch, context: 32 };
    let checkpoint = scratch::checkpoint(shape, texts, None).unwrap();
    let model = Model::new(checkpoint.model().config().clone());
    let weights = Weights::init(device, model.specs(), 1);
    Trainer::new(model, weights)
}

/// Losses of the next steps.
fn losses(trainer: &mut Trainer, n_steps: usize) -> Vec<f32> {
    let packed = random_batch(trainer.model.config().n_vocab, 2, 24);
    let (ids, weights) = (&packed.targets, &packed.weights);
    let targets = Targets { ids, weights, norm: ids.len() as f32 };
    let adamw = AdamW { lr: 1e-3, ..AdamW::default() };
    let settings = StepSettings { adamw, clip_norm: Some(1.0) };
    let step = |_| trainer.step(&packed.batch, &targets, &settings).unwrap().loss;
    (0..n_steps).map(step).collect()
}

fn compare(what: &str, want: &[f32], got: &[f32], tolerance: f32) {
    for (step, (want, got)) in want.iter().zip(got).enumerate() {
        let off = (got - want).abs() / want.abs().max(0.1);
        assert!(off <= tolerance, "{what}, step {step}: a loss of {got}, not {want}");
    }
}

fn trains_alike(arch: Arch) {
    let devices = found();
    if devices.is_empty() {
        eprintln!("skip: no graphics processor is found");
        return;
    }
    let want = losses(&mut trainer(&Device::cpu(2).unwrap(), arch), N_STEPS);
    assert!(want[N_STEPS - 1] < 0.8 * want[0], "{arch:?} learns: {want:?}");
    for (device, tolerance) in devices {
        let got = losses(&mut trainer(&device, arch), N_STEPS);
        compare(&format!("{arch:?} on {device:?}"), &want, &got, tolerance);
    }
}

#[test]
fn llama_trains_alike_on_every_device() {
    trains_alike(Arch::Llama);
}

#[test]
fn mamba_1_trains_alike_on_every_device() {
    trains_alike(Arch::Mamba1);
}

#[test]
fn mamba_2_trains_alike_on_every_device() {
    trains_alike(Arch::Mamba2);
}

#[test]
fn hybrids_train_alike_on_every_device() {
    trains_alike(Arch::Hybrid);
}

#[test]
fn experts_train_alike_on_every_device() {
    trains_alike(Arch::Moe);
}

#[test]
fn training_goes_on_from_one_device_to_another() {
    let cpu = Device::cpu(2).unwrap();
    for (device, tolerance) in found() {
        let mut here = trainer(&cpu, Arch::Hybrid);
        losses(&mut here, 5);
        let mut there = trainer(&device, Arch::Hybrid);
        there.weights = here.weights.moved(&device);
        there.optimizer = Optimizer::new(&there.weights, OptimizerKind::AdamW);
        let kept = here.optimizer.state();
        let get = &mut |name: &str| Ok(kept.iter().find(|(it, _)| it == name).unwrap().1.clone());
        there.optimizer.restore(5, get).unwrap();
        drop(kept);
        let (want, got) = (losses(&mut here, 5), losses(&mut there, 5));
        compare(&format!("{device:?}"), &want, &got, tolerance);
        // And back again.
        let mut back = trainer(&cpu, Arch::Hybrid);
        back.weights = there.weights.moved(&cpu);
        let (want, got) = (losses(&mut there, 1), losses(&mut back, 1));
        compare(&format!("{device:?} to the processor"), &want, &got, tolerance);
    }
}

#[test]
fn every_device_generates_the_same_text() {
    for arch in Arch::ALL {
        let cpu = trainer(&Device::cpu(2).unwrap(), arch);
        let prompt: Vec<u32> = (0..40).map(|n| n * 7 % 300).collect();
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let settings = GenerateSettings { n_max: 12, sampling, stops: Vec::new() };
        let run = |trainer: &Trainer| {
            let prompts = [&prompt[..], &prompt[..3]];
            let on = |_, _| ControlFlow::Continue(());
            generate_many(&trainer.model, &trainer.weights, &prompts, &settings, on).unwrap()
        };
        let want = run(&cpu);
        for (device, tolerance) in found() {
            if tolerance < 1e-2 {
                assert_eq!(run(&trainer(&device, arch)), want, "{arch:?} on {device:?}");
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
