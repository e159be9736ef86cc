//! Learning from a teacher: the loop, whatever is trained and on whatever device.

use super::train::{Setup, checkpoint, losses, trained};
use crate::data::pack::PackedBatch;
use crate::model::Model;
use crate::model::config::Config;
use crate::model::config::preset::{Arch, Size};
use crate::model::weights::Weights;
use crate::ops::adamw::AdamW;
use crate::ops::check::devices;
use crate::tape::Gradients;
use crate::tensor::batch::{Batch, Targets};
use crate::tensor::device::Device;
use crate::text::tokenizer::Tokenizer;
use crate::train::method::{self, LoraSettings, Method};
use crate::train::optim::OptimizerKind;
use crate::train::plan::random_batch;
use crate::train::scratch::{self, Shape};
use crate::train::state::{Extent, Saved};
use crate::train::teacher::Teacher;
use crate::train::{StepSettings, Trainer, Training};
use serde_json::json;
use std::sync::Arc;

fn tokenizer() -> Tokenizer {
    checkpoint(Arch::Llama).tokenizer().unwrap().unwrap()
}

/// A teacher of another shape than the student, and surer of what it says.
fn teacher(device: &Device, quant: Option<&str>) -> (Model, Weights) {
    let json = json!({
        "model_type": "elapid", "vocab_size": 400, "d_model": 64, "layers": ["mamba2", "attention"],
        "mamba2": {"d_head": 16, "d_state": 8}, "attention": {"n_head": 2},
        "feed_forward": "dense", "dense": {"d_ff": 64}, "init_std": 0.2, "tied": false,
    });
    let model = Model::new(Config::from_json("teacher", &json.to_string()).unwrap());
    let mut weights = Weights::init(device, model.specs(), 7);
    if let Some(quant) = quant {
        method::quantize(&mut weights, quant).unwrap();
    }
    (model, weights)
}

fn taught(setup: &Setup, device: &Device, quant: Option<&str>) -> Training {
    let mut training = setup.training(device);
    let (tokenizer, of) = (tokenizer(), teacher(device, quant));
    let teacher = Teacher::new(of, &tokenizer, &training.loader, &training.settings).unwrap();
    training.trainer.teacher = Some(teacher);
    training
}

fn numbers(grads: &Gradients) -> Vec<(usize, Vec<f32>)> {
    grads.iter().map(|(key, grad)| (key, grad.to_vec())).collect()
}

#[test]
fn a_student_comes_nearer_to_its_teacher() {
    let device = Device::cpu(2).unwrap();
    let lora = LoraSettings { rank: 4, ..LoraSettings::default() };
    for (method, quant) in
        [(Method::Full, None), (Method::Lora(lora), Some("q8_0")), (Method::Embeddings, None)]
    {
        let mut setup = Setup::new();
        setup.settings.teacher_share = 1.0;
        let mut trainer = plain(&device, &method);
        trainer.teacher = taught(&setup, &device, quant).trainer.teacher;
        let hash = |trainer: &Trainer| trainer.teacher.as_ref().unwrap().weights.frozen_hash();
        let frozen = hash(&trainer);
        let packed = random_batch(400, 2, 24);
        let (ids, weights) = (&packed.targets, &packed.weights);
        let targets = Targets { ids, weights, norm: ids.len() as f32 };
        let adamw = AdamW { lr: 5e-3, weight_decay: 0.0, ..AdamW::default() };
        let settings = StepSettings { adamw, clip_norm: Some(1.0) };
        let step = |_| trainer.step(&packed.batch, &targets, &settings).unwrap().divergence;
        let found: Vec<f32> = (0..60).map(step).map(Option::unwrap).collect();
        let (first, last) = (found[0], found[59]);
        assert!(last < 0.7 * first, "{method:?}: {first} to {last}");
        assert_eq!(hash(&trainer), frozen, "the teacher does not change");
    }
}

#[test]
fn without_a_share_a_teacher_changes_no_bit_and_every_setting_of_it_changes_some() {
    let device = Device::cpu(2).unwrap();
    let run = |change: &dyn Fn(&mut Setup), quant| {
        let mut setup = Setup::new();
        change(&mut setup);
        let mut training = taught(&setup, &device, quant);
        (losses(&mut training, 5), trained(&training))
    };
    let mut plain = Setup::new().training(&device);
    let alone = (losses(&mut plain, 5), trained(&plain));
    assert!(run(&|s| s.settings.teacher_share = 0.0, None) == alone);
    let all = [
        alone,
        run(&|_| {}, None),
        run(&|_| {}, Some("q4_0")),
        run(&|s| s.settings.teacher_share = 0.75, None),
        run(&|s| s.settings.teacher_share = 1.0, None),
        run(&|s| s.settings.teacher_temperature = 1.0, None),
    ];
    for at in 0..all.len() {
        assert!(all[..at].iter().all(|other| *other != all[at]), "{at}");
    }
    // The loss of the first step is that of the targets, whatever the teacher's share.
    assert!(all.iter().all(|(losses, _)| losses[0] == all[0].0[0]));
}

/// A trainer without experts: their load balance is a mean over a batch, and no part of what a
/// teacher has a share in.
fn plain(device: &Device, method: &Method) -> Trainer {
    let (model, _) = teacher(device, None);
    let mut weights = Weights::init(device, model.specs(), 3);
    method::apply(method, &model, &mut weights, 0).unwrap();
    Trainer::with(model, weights, OptimizerKind::AdamW)
}

#[test]
fn who_is_its_own_teacher_learns_from_the_targets_alone() {
    let device = Device::cpu(2).unwrap();
    let training = Setup::new().training(&device);
    for method in [Method::Full, Method::Lora(LoraSettings::default())] {
        let mut trainer = plain(&device, &method);
        let part = [random_batch(400, 2, 24)];
        let (alone, want) = trainer.gradients_of(&part, None, || ()).unwrap();
        let model = Model::new(trainer.model.config().clone());
        let (of, tokenizer) = ((model, trainer.weights.share()), tokenizer());
        let teacher = Teacher::new(of, &tokenizer, &training.loader, &training.settings).unwrap();
        trainer.teacher = Some(teacher);
        let (report, got) = trainer.gradients_of(&part, None, || ()).unwrap();
        assert_eq!((report.divergence, alone.divergence), (Some(0.0), None));
        assert_eq!(report.loss, alone.loss);
        // Half of the loss is left.
        for ((key, want), (_, got)) in numbers(&want).iter().zip(numbers(&got)) {
            let size = want.iter().map(|x| x.abs()).fold(0.0, f32::max);
            let off = want.iter().zip(&got).map(|(want, got)| (0.5 * want - got).abs());
            let off = off.fold(0.0, f32::max);
            assert!(off <= 1e-5 * size, "{method:?}, parameter {key}: {off} of {size}");
        }
    }
}

#[test]
fn gradients_of_parts_are_those_of_the_whole_batch() {
    let device = Device::cpu(2).unwrap();
    let mut trainer = plain(&device, &Method::Full);
    trainer.teacher = taught(&Setup::new(), &device, None).trainer.teacher;
    let mut whole = random_batch(400, 4, 16);
    whole.weights[..11].fill(0.0);
    let part = |rows: std::ops::Range<usize>| {
        let at = rows.start * 16..rows.end * 16;
        let sequences: Vec<&[u32]> = whole.batch.tokens[at.clone()].chunks(16).collect();
        PackedBatch {
            batch: Batch::from_sequences(&sequences),
            targets: whole.targets[at.clone()].to_vec(),
            weights: whole.weights[at].to_vec(),
        }
    };
    let parts = [part(0..1), part(1..4)];
    let (of_whole, grads) = trainer.gradients_of(&[whole.clone()], None, || ()).unwrap();
    let (of_parts, summed) = trainer.gradients_of(&parts, None, || ()).unwrap();
    assert!((of_whole.loss - of_parts.loss).abs() < 1e-6);
    let [all, sum] = [of_whole, of_parts].map(|report| report.divergence.unwrap());
    assert!((all - sum).abs() < 1e-6 && all > 0.01, "{all} {sum}");
    for ((_, want), (key, got)) in numbers(&grads).iter().zip(numbers(&summed)) {
        let worst = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        assert!(worst <= 1e-6, "parameter {key}: {worst}");
    }
}

#[test]
fn a_run_with_a_teacher_goes_on_from_a_checkpoint_to_the_bit() {
    let device = Device::cpu(2).unwrap();
    let mut setup = Setup::new();
    setup.settings.n_accumulate = 2;
    let mut whole = taught(&setup, &device, Some("q8_0"));
    let want = losses(&mut whole, 6);
    let mut first = taught(&setup, &device, Some("q8_0"));
    losses(&mut first, 3);
    let mut bytes = Vec::new();
    let mut sink = |part: &[u8]| {
        bytes.extend_from_slice(part);
        Ok(())
    };
    first.capture(Extent::Run, &json!(null)).unwrap().write_to(&mut sink).unwrap();
    let saved = Saved::parse("a", Arc::new(bytes)).unwrap();
    let mut second = taught(&setup, &device, Some("q8_0"));
    saved.restore(&mut second).unwrap();
    assert!(losses(&mut second, 3) == want[3..]);
    assert!(trained(&second) == trained(&whole));
}

#[test]
fn the_plan_counts_the_weights_and_products_of_a_teacher() {
    let device = Device::cpu(1).unwrap();
    let plain = Setup::new().training(&device);
    let with = taught(&Setup::new(), &device, None);
    let n_bytes = with.trainer.teacher.as_ref().unwrap().n_bytes();
    assert!(n_bytes > 4 * 400 * 64);
    assert_eq!((plain.fixed().teacher, with.fixed().teacher), (0, n_bytes));
    assert!(with.flops_per_token() > plain.flops_per_token() + 2.0 * 400.0 * 64.0);
}

#[test]
fn a_teacher_of_another_vocabulary_is_refused() {
    let device = Device::cpu(1).unwrap();
    let training = Setup::new().training(&device);
    let text = ["one two three four five six seven eight nine ten one two three"; 4].join("\n");
    let mut texts = [text.as_str()].into_iter();
    let texts = scratch::vocabulary(300, 32, &mut texts).unwrap();
    let shape = Shape { size: Size::Tiny, arch: Arch::Llama, context: 32 };
    let other = scratch::checkpoint(shape, texts, None).unwrap();
    let other = other.tokenizer().unwrap().unwrap();
    let of = teacher(&device, None);
    let result = Teacher::new(of, &other, &training.loader, &training.settings);
    let text = result.err().unwrap().report();
    assert!(text.contains("another vocabulary") && text.contains("hint"), "{text}");
}

/// Fewer steps where a GPU is emulated thread by thread.
#[test]
fn students_train_alike_on_every_device() {
    let (cpu, setup) = (Device::cpu(2).unwrap(), Setup::new());
    for quant in [None, Some("q8_0")] {
        let found = |device: &Device, n_steps: usize| -> Vec<[f32; 3]> {
            let mut trainer = taught(&setup, device, quant).trainer;
            let packed = random_batch(400, 2, 24);
            let (ids, weights) = (&packed.targets, &packed.weights);
            let targets = Targets { ids, weights, norm: ids.len() as f32 };
            let adamw = AdamW { lr: 3e-4, ..AdamW::default() };
            let settings = StepSettings { adamw, clip_norm: Some(1.0) };
            let step = |_| {
                let report = trainer.step(&packed.batch, &targets, &settings).unwrap();
                [report.loss, report.divergence.unwrap(), report.grad_norm as f32]
            };
            (0..n_steps).map(step).collect()
        };
        let want = found(&cpu, 12);
        assert!(want[11][0] < want[0][0] && want[11][1] < want[0][1], "{want:?}");
        for (device, tolerance) in devices() {
            let n_steps = if device.describe().contains("emulator") { 2 } else { 12 };
            for (step, (want, got)) in want.iter().zip(found(device, n_steps)).enumerate() {
                let bound = if step == 0 { 2.0 * tolerance } else { (2.0 * tolerance).max(1e-3) };
                for (want, got) in want.iter().zip(got) {
                    let off = (got - want).abs() / want.abs().max(0.1);
                    assert!(off <= bound, "{device:?}, step {step}: {got}, not {want}");
                }
            }
        }
    }
}
