//! The loop of training: it overfits, it continues from any checkpoint to the bit, parts of a batch
//! are the batch, every setting is alive, and what is frozen costs nothing.

use crate::data::corpus::Corpus;
use crate::data::fim_training::FimTraining;
use crate::data::pack::{LoadSettings, Loader, Order, PackedBatch};
use crate::data::{Document, Ends, encode};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::preset::{Arch, Size};
use crate::model::weights::{ParamId, Role, Weights};
use crate::model::{ForwardOptions, Model};
use crate::ops::adamw::AdamW;
use crate::tape::Tape;
use crate::tensor::Tensor;
use crate::tensor::batch::{Batch, Targets};
use crate::tensor::device::Device;
use crate::tensor::rng::Rng;
use crate::train::lens::{Lens, PROJECTION};
use crate::train::method::{self, Form, LoraSettings, Method, Scaling};
use crate::train::optim::OptimizerKind;
use crate::train::plan::{Fixed, random_batch};
use crate::train::schedule::Schedule;
use crate::train::scratch::{self, Shape};
use crate::train::state::{Extent, Saved};
use crate::train::{Outcome, Settings, StepSettings, Trainer, Training};
use serde_json::json;
use std::sync::Arc;
const TEXT: &str = include_str!("train.rs");

/// A tiny model of an architecture, with a vocabulary of the text.
pub(super) fn checkpoint(arch: Arch) -> Checkpoint {
    let texts = scratch::vocabulary(400, 32, &mut [TEXT].into_iter()).unwrap();
    scratch::checkpoint(Shape { size: Size::Tiny, arch, context: 32 }, texts, None).unwrap()
}

/// A model of every mixer and of experts, small enough for many steps.
fn small_config() -> String {
    json!({
        "model_type": "elapid", "vocab_size": 400, "d_model": 32,
        "layers": ["mamba1", "mamba2", "mamba3",
                   {"mixer": "attention", "feed_forward": "experts"}],
        "mamba2": {"d_head": 16, "d_state": 8}, "mamba3": {"d_head": 16, "d_state": 8, "rank": 2},
        "attention": {"n_head": 2},
        "feed_forward": "dense", "dense": {"d_ff": 48},
        "experts": {"n_expert": 4, "d_ff": 16},
    })
    .to_string()
}

pub(super) struct Setup {
    pub(super) method: Method,
    pub(super) settings: Settings,
    pub(super) load: LoadSettings,
    pub(super) weights_seed: u64,
    pub(super) checkpointing: bool,
}

fn loader(load: &LoadSettings, checkpoint: &Checkpoint) -> Loader {
    let tokenizer = Arc::new(checkpoint.tokenizer().unwrap().unwrap());
    let documents: Vec<_> = TEXT
        .split("\n#[test]\n")
        .map(|text| encode(&Document::whole("a.rs", text), &tokenizer, load.ends).unwrap())
        .collect();
    Loader::new(Arc::new(Corpus::of(&documents)), load.clone(), tokenizer).unwrap()
}

impl Setup {
    pub(super) fn new() -> Setup {
        let checkpoint = checkpoint(Arch::Llama);
        let ends = Ends::of(&checkpoint.tokenizer().unwrap().unwrap());
        Setup {
            method: Method::Full,
            settings: Settings { n_steps: 12, n_warmup: 2, ..Settings::default() },
            load: LoadSettings {
                context: 24,
                n_rows: 2,
                seed: 0,
                fim: None,
                project: None,
                ends,
                shuffle: Order::Shuffled,
            },
            weights_seed: 0,
            checkpointing: false,
        }
    }

    pub(super) fn training(&self, device: &Device) -> Training {
        let texts = checkpoint(Arch::Llama)
            .texts()
            .map(|(name, bytes)| {
                let is_tokenizer = name == "tokenizer.json";
                let name = if is_tokenizer { "tokenizer.json" } else { "tokenizer_config.json" };
                (name, bytes.to_vec())
            })
            .collect();
        let checkpoint = Checkpoint::fresh("small", small_config(), texts).unwrap();
        let model = Model::new(checkpoint.model().config().clone());
        let mut weights = Weights::init(device, model.specs(), self.weights_seed);
        method::apply(&self.method, &model, &mut weights, self.settings.seed).unwrap();
        let mut trainer = Trainer::with(model, weights, self.settings.optimizer);
        trainer.options.checkpoint = self.checkpointing;
        let loader = loader(&self.load, &checkpoint);
        Training::new(trainer, loader, self.settings.clone()).unwrap()
    }
}

/// Losses of the next steps, as bits.
pub(super) fn losses(training: &mut Training, n: u64) -> Vec<u32> {
    let step = |_| match training.step().unwrap() {
        Outcome::Made { report, .. } => report.loss.to_bits(),
        Outcome::Diverged(why) => panic!("{why}"),
    };
    (0..n).map(step).collect()
}

/// Everything that is trained, as bytes.
pub(super) fn trained(training: &Training) -> Vec<u8> {
    let weights = &training.trainer.weights;
    weights.trained().iter().flat_map(|&id| weights.tensor(id).bytes().to_vec()).collect()
}

#[test]
fn every_architecture_overfits_one_batch() {
    let device = Device::cpu(2).unwrap();
    for arch in Arch::ALL {
        let checkpoint = checkpoint(arch);
        let model = Model::new(checkpoint.model().config().clone());
        let n_vocab = model.config().n_vocab;
        let weights = Weights::init(&device, model.specs(), 1);
        let mut trainer = Trainer::new(model, weights);
        let PackedBatch { batch, targets, weights } = random_batch(n_vocab, 2, 24);
        let norm = targets.len() as f32;
        let adamw = AdamW { lr: 3e-3, beta2: 0.95, weight_decay: 0.0, ..AdamW::default() };
        let settings = StepSettings { adamw, clip_norm: Some(1.0) };
        let mut loss = f32::INFINITY;
        for _ in 0..150 {
            let targets = Targets { ids: &targets, weights: &weights, norm };
            // The load balance of experts has a floor of its own; what is asked is the likelihood.
            let nll = |trainer: &Trainer| {
                let (model, weights) = (&trainer.model, &trainer.weights);
                let options = ForwardOptions::default();
                model.loss(&Tape::off(), weights, &batch, &targets, options).unwrap().loss
            };
            device.run(|| trainer.step(&batch, &targets, &settings)).unwrap();
            loss = device.run(|| nll(&trainer).value().f32()[0]);
            if loss < 0.01 {
                break;
            }
        }
        assert!(loss < 0.01, "{}: {loss}", arch.name());
    }
}

#[test]
fn the_curve_is_the_same_on_one_and_two_threads() {
    for optimizer in [OptimizerKind::AdamW, OptimizerKind::Muon] {
        let run = |n_threads| {
            let mut setup = Setup::new();
            setup.settings.optimizer = optimizer;
            let mut training = setup.training(&Device::cpu(n_threads).unwrap());
            (losses(&mut training, 6), trained(&training))
        };
        assert!(run(1) == run(2), "{optimizer:?}");
    }
}

#[test]
fn a_run_goes_on_from_any_checkpoint_to_the_bit() {
    let device = Device::cpu(2).unwrap();
    let lora = LoraSettings { rank: 2, dropout: 0.2, form: Form::Dora, ..LoraSettings::default() };
    let methods = [Method::Full, Method::Lora(lora), Method::Bc, Method::Embeddings];
    for method in methods {
        for optimizer in [OptimizerKind::AdamW, OptimizerKind::Muon] {
            let mut setup = Setup::new();
            setup.method = method.clone();
            setup.settings.optimizer = optimizer;
            setup.settings.n_accumulate = 2;
            // Until step 6.
            (setup.settings.n_steps, setup.settings.short_rows) = (7, Some(5));
            let tokenizer = checkpoint(Arch::Llama).tokenizer().unwrap().unwrap();
            let tokens = tokenizer.fim().unwrap();
            setup.load.fim = Some(FimTraining { rate: 0.5, spm: 0.5, tokens });
            let mut whole = setup.training(&device);
            let want = losses(&mut whole, 8);
            let mut first = setup.training(&device);
            losses(&mut first, 3);
            let mut bytes = Vec::new();
            let extra = json!({"note": [1, 2.5]});
            let capture = first.capture(Extent::Run, &extra).unwrap();
            capture
                .write_to(&mut |part| {
                    bytes.extend_from_slice(part);
                    Ok(())
                })
                .unwrap();
            let saved = Saved::parse("a", Arc::new(bytes)).unwrap();
            assert_eq!((saved.step, &saved.extra), (3, &extra));
            let mut second = setup.training(&device);
            // It has been elsewhere before.
            losses(&mut second, 1);
            saved.restore(&mut second).unwrap();
            assert!(losses(&mut second, 5) == want[3..], "{method:?} {optimizer:?}");
            assert!(trained(&second) == trained(&whole), "{method:?} {optimizer:?}");
        }
    }
}

#[test]
fn a_changed_checkpoint_is_refused_and_one_of_another_run_too() {
    let device = Device::cpu(1).unwrap();
    let setup = Setup::new();
    let training = setup.training(&device);
    let mut bytes = Vec::new();
    let mut sink = |part: &[u8]| {
        bytes.extend_from_slice(part);
        Ok(())
    };
    training.capture(Extent::Run, &json!(null)).unwrap().write_to(&mut sink).unwrap();
    for at in [70, bytes.len() / 2, bytes.len() - 100] {
        let mut changed = bytes.clone();
        changed[at] ^= 1;
        assert!(Saved::parse("a", Arc::new(changed)).is_err(), "byte {at}");
        assert!(Saved::parse("a", Arc::new(bytes[..at].to_vec())).is_err(), "cut at {at}");
    }
    let saved = Saved::parse("a", Arc::new(bytes)).unwrap();
    let mut other = Setup::new();
    other.settings.optimizer = OptimizerKind::Muon;
    assert!(saved.restore(&mut other.training(&device)).is_err());
    other.method = Method::Embeddings;
    assert!(saved.restore(&mut other.training(&device)).is_err());
}

#[test]
fn gradients_of_parts_are_those_of_the_whole_batch() {
    let device = Device::cpu(2).unwrap();
    // Without experts: their load balance is a mean over a batch, not a sum over tokens.
    for arch in [Arch::Mamba1, Arch::Mamba2, Arch::Mamba3, Arch::Hybrid, Arch::Llama] {
        let checkpoint = checkpoint(arch);
        let model = Model::new(checkpoint.model().config().clone());
        let weights = Weights::init(&device, model.specs(), 1);
        let mut trainer = Trainer::new(model, weights);
        let n_vocab = checkpoint.model().config().n_vocab;
        let mut whole = random_batch(n_vocab, 4, 16);
        // Parts of different weight.
        whole.weights[..11].fill(0.0);
        let part = |rows: std::ops::Range<usize>| {
            let at = rows.start * 16..rows.end * 16;
            let tokens = &whole.batch.tokens[at.clone()];
            let sequences: Vec<&[u32]> = tokens.chunks(16).collect();
            PackedBatch {
                batch: Batch::from_sequences(&sequences),
                targets: whole.targets[at.clone()].to_vec(),
                weights: whole.weights[at].to_vec(),
            }
        };
        let parts = [part(0..1), part(1..3), part(3..4)];
        let (of_whole, grads) = trainer.gradients_of(&[whole.clone()], None, || ()).unwrap();
        let (of_parts, summed) = trainer.gradients_of(&parts, None, || ()).unwrap();
        let name = arch.name();
        assert!((of_whole.loss - of_parts.loss).abs() < 1e-6, "{name}: loss");
        for (key, grad) in grads.iter() {
            let other = summed.get(key).unwrap();
            let pairs = grad.f32().iter().zip(other.f32());
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
            let param = trainer.weights.name(ParamId(key));
            assert!(worst <= 1e-6, "{name}: {param}: {worst}");
        }
    }
}

#[test]
fn every_setting_changes_the_trajectory() {
    let device = Device::cpu(2).unwrap();
    let run = |change: &dyn Fn(&mut Setup), method: &Method| {
        let mut setup = Setup::new();
        setup.method = method.clone();
        // So that clipping, trust and the floor of the rate have something to do.
        setup.settings.lr = 5e-3;
        setup.settings.lr_min = 0.2;
        setup.settings.n_steps = 6;
        change(&mut setup);
        let mut training = setup.training(&device);
        let losses = losses(&mut training, 6);
        (losses, trained(&training))
    };
    type Change = (&'static str, Box<dyn Fn(&mut Setup)>);
    let tokenizer = checkpoint(Arch::Llama).tokenizer().unwrap().unwrap();
    let tokens = tokenizer.fim().unwrap();
    let fim = move |rate, spm| Some(FimTraining { rate, spm, tokens: tokens.clone() });
    let fim_too = fim.clone();
    let of_all: Vec<Change> = vec![
        ("lr", Box::new(|s| s.settings.lr = 4e-3)),
        ("lr_min", Box::new(|s| s.settings.lr_min = 0.5)),
        ("n_warmup", Box::new(|s| s.settings.n_warmup = 4)),
        ("n_steps", Box::new(|s| s.settings.n_steps = 20)),
        ("constant", Box::new(|s| s.settings.schedule = Schedule::Constant)),
        ("wsd", Box::new(|s| s.settings.schedule = Schedule::Wsd { decay: 0.5 })),
        ("wsd decay", Box::new(|s| s.settings.schedule = Schedule::Wsd { decay: 0.9 })),
        ("muon", Box::new(|s| s.settings.optimizer = OptimizerKind::Muon)),
        ("beta1", Box::new(|s| s.settings.beta1 = 0.8)),
        ("beta2", Box::new(|s| s.settings.beta2 = 0.9)),
        ("eps", Box::new(|s| s.settings.eps = 1e-4)),
        ("weight_decay", Box::new(|s| s.settings.weight_decay = 0.5)),
        ("clip_norm", Box::new(|s| s.settings.clip_norm = Some(1e-3))),
        ("no clipping", Box::new(|s| s.settings.clip_norm = None)),
        ("trust", Box::new(|s| s.settings.trust = Some(1e-3))),
        ("n_accumulate", Box::new(|s| s.settings.n_accumulate = 2)),
        ("context", Box::new(|s| s.load.context = 16)),
        ("n_rows", Box::new(|s| s.load.n_rows = 3)),
        ("short_rows", Box::new(|s| s.settings.short_rows = Some(8))),
        ("seed of data", Box::new(|s| s.load.seed = 1)),
        ("order", Box::new(|s| s.load.shuffle = Order::AsGiven)),
        ("fim", Box::new(move |s| s.load.fim = fim(1.0, 0.0))),
        ("spm", Box::new(move |s| s.load.fim = fim_too(1.0, 1.0))),
        ("seed of weights", Box::new(|s| s.weights_seed = 1)),
    ];
    let mut seen = vec![("default", run(&|_| {}, &Method::Full))];
    for (name, change) in &of_all {
        let got = run(change, &Method::Full);
        for (other, want) in &seen {
            assert!(got != *want, "{name} does what {other} does");
        }
        seen.push((name, got));
    }
    let lora = LoraSettings { rank: 2, alpha: 4.0, ..LoraSettings::default() };
    let of_lora: Vec<(&str, LoraSettings)> = vec![
        ("lora", lora.clone()),
        ("targets", LoraSettings { targets: vec!["q_proj".into()], ..lora.clone() }),
        ("rank", LoraSettings { rank: 3, ..lora.clone() }),
        ("alpha", LoraSettings { alpha: 8.0, ..lora.clone() }),
        ("dropout", LoraSettings { dropout: 0.3, ..lora.clone() }),
        ("rslora", LoraSettings { scaling: Scaling::RsLora, ..lora.clone() }),
        ("dora", LoraSettings { form: Form::Dora, ..lora.clone() }),
    ];
    for (name, settings) in of_lora {
        let got = run(&|_| {}, &Method::Lora(settings));
        assert!(seen.iter().all(|(_, other)| got != *other), "{name} changes nothing");
        seen.push((name, got));
    }
    for (name, method) in [("bc", Method::Bc), ("embeddings", Method::Embeddings)] {
        let got = run(&|_| {}, &method);
        assert!(seen.iter().all(|(_, other)| got != *other), "{name} changes nothing");
        seen.push((name, got));
    }
    // Rows that are short enough stay whole.
    assert!(run(&|s| s.settings.short_rows = Some(24), &Method::Full) == seen[0].1, "short_rows");
    // What only saves memory changes nothing.
    assert!(run(&|s| s.checkpointing = true, &Method::Full) == seen[0].1, "checkpointing");
    // The seed of a run is that of its adapters and of its dropout.
    let seed = |s: &mut Setup| s.settings.seed = 1;
    let plain = Method::Lora(lora.clone());
    assert!(run(&seed, &plain) != run(&|_| {}, &plain), "seed of adapters");
}

#[test]
fn dropout_is_drawn_from_the_seed_and_only_in_training() {
    let device = Device::cpu(2).unwrap();
    let lora = LoraSettings { rank: 2, dropout: 0.5, ..LoraSettings::default() };
    let mut setup = Setup::new();
    setup.method = Method::Lora(lora);
    let mut training = setup.training(&device);
    losses(&mut training, 3);
    let batch = Batch::from_sequences(&[&[5, 6, 7, 8]]);
    let targets = Targets { ids: &[6, 7, 8, 9], weights: &[1.0; 4], norm: 4.0 };
    let loss = |training: &Training| training.trainer.gradients(&batch, &targets).unwrap().0.loss;
    let with = loss(&training);
    training.trainer.weights.set_dropout(0.0);
    assert_eq!(with.to_bits(), loss(&training).to_bits());
}

#[test]
fn what_is_frozen_has_no_gradient_no_moment_and_keeps_less_on_the_tape() {
    let device = Device::cpu(2).unwrap();
    let lora = LoraSettings { rank: 2, ..LoraSettings::default() };
    let tape_bytes = |method: &Method| {
        let mut setup = Setup::new();
        setup.method = method.clone();
        let mut training = setup.training(&device);
        let part = random_batch(400, 2, 24);
        let (report, grads) = training.trainer.gradients_of(&[part], None, || ()).unwrap();
        let weights = &training.trainer.weights;
        let trained = weights.trained();
        let with_gradient: Vec<ParamId> = grads.iter().map(|(key, _)| ParamId(key)).collect();
        assert!(with_gradient.iter().all(|id| trained.contains(id)), "{method:?}");
        let n_trained: usize = trained.iter().map(|&id| weights.tensor(id).n_bytes()).sum();
        let fixed = Fixed::of(&training.trainer);
        assert_eq!(fixed.gradients, n_trained, "{method:?}");
        assert_eq!(fixed.moments, 2 * n_trained, "{method:?}");
        let frozen = weights.frozen_hash();
        losses(&mut training, 3);
        assert_eq!(training.trainer.weights.frozen_hash(), frozen, "{method:?}");
        (report.tape_bytes, n_trained)
    };
    let full = tape_bytes(&Method::Full);
    for method in [Method::Lora(lora), Method::Bc] {
        let some = tape_bytes(&method);
        assert!(some.0 < full.0 && some.1 < full.1 / 4, "{method:?}: {some:?} of {full:?}");
    }
}

#[test]
fn bc_changes_the_rows_of_b_and_c_and_nothing_else() {
    let device = Device::cpu(2).unwrap();
    let mut setup = Setup::new();
    setup.method = Method::Bc;
    let mut training = setup.training(&device);
    losses(&mut training, 4);
    let weights = &training.trainer.weights;
    let lora = method::adapter(&Method::Bc, weights).unwrap();
    assert_eq!(lora.modules.len(), 3, "one for each Mamba layer");
    for module in &lora.modules {
        let (d_out, rank) = module.b.dims2();
        assert_eq!(lora.factor(module), 1.0);
        let rows: Vec<usize> =
            (0..d_out).filter(|row| module.b.f32()[row * rank..][..rank].contains(&1.0)).collect();
        assert_eq!(rows.len(), rank);
        // Mamba-1: delta before; Mamba-2 and 3: gate and x before, delta and more behind.
        let (first, last) = (rows[0], rows[rank - 1]);
        assert_eq!(last - first + 1, rank, "{}: {rows:?}", module.param);
        match module.param.strip_prefix("layers.").map(|name| &name[..1]) {
            Some("0") => assert_eq!((first, last + 1), (2, d_out)),
            Some("1") => assert_eq!((first, rank, last + 1 + 4), (128, 16, d_out)),
            _ => assert_eq!((first, rank, last + 1 + 3 * 4 + 2), (128, 32, d_out)),
        }
        assert!(module.a.f32().iter().any(|x| *x != 0.0), "{} did not move", module.param);
    }
    // On a fresh base the adapter gives the same numbers: it is exact.
    let setup = Setup { method: Method::Embeddings, ..Setup::new() };
    let mut fresh = setup.training(&device);
    lora.attach(&mut fresh.trainer.weights).unwrap();
    let batch = Batch::from_sequences(&[&[5, 6, 7, 8]]);
    let hidden = |training: &Training| {
        let (model, weights) = (&training.trainer.model, &training.trainer.weights);
        let tape = Tape::off();
        let out = model.forward(&tape, weights, &batch, None, ForwardOptions::default());
        out.unwrap().hidden.value().f32().to_vec()
    };
    assert_eq!(hidden(&fresh), hidden(&training));
}

#[test]
fn a_pattern_that_matches_nothing_is_an_error_and_coverage_counts() {
    let device = Device::cpu(1).unwrap();
    let checkpoint = checkpoint(Arch::Hybrid);
    let model = Model::new(checkpoint.model().config().clone());
    let fresh = || Weights::init(&device, model.specs(), 0);
    let lora = |targets: &[&str]| {
        let targets = targets.iter().map(|target| target.to_string()).collect();
        Method::Lora(LoraSettings { targets, rank: 4, ..LoraSettings::default() })
    };
    for pattern in ["q_prog", "layers.9.*", "norm"] {
        let error = method::apply(&lora(&["q_proj", pattern]), &model, &mut fresh(), 0);
        let text = error.err().unwrap().report();
        assert!(text.contains(pattern) && text.contains("hint"), "{text}");
    }
    let coverage = method::apply(&lora(&["q_proj"]), &model, &mut fresh(), 0).unwrap();
    assert_eq!((coverage.n_layers, coverage.n_layers_all, coverage.n_matrices), (1, 4, 1));
    assert_eq!(coverage.n_trained, 4 * (192 + 192));
    let coverage = method::apply(&lora(&[]), &model, &mut fresh(), 0).unwrap();
    assert_eq!((coverage.n_layers, coverage.n_matrices), (4, 3 * 4 + 7));
    let all = method::apply(&Method::Full, &model, &mut fresh(), 0).unwrap();
    assert_eq!(all.n_trained, all.n_all);
    let llama = self::checkpoint(Arch::Llama);
    let model = Model::new(llama.model().config().clone());
    let mut weights = Weights::init(&device, model.specs(), 0);
    let text = method::apply(&Method::Bc, &model, &mut weights, 0).err().unwrap().report();
    assert!(text.contains("B and C"), "{text}");
}

#[test]
fn a_step_that_diverges_changes_nothing_and_the_next_is_the_same_step() {
    let device = Device::cpu(2).unwrap();
    let setup = Setup::new();
    let mut training = setup.training(&device);
    losses(&mut training, 2);
    let before = (trained(&training), training.progress().clone());
    let id = training.trainer.weights.find("embed.weight").unwrap();
    assert_eq!(training.trainer.weights.role(id), Role::Embedding);
    let kept = training.trainer.weights.tensor(id).to_f32();
    training.trainer.weights.tensor_mut(id).f32_mut().fill(f32::NAN);
    assert!(matches!(training.step().unwrap(), Outcome::Diverged(_)));
    training.trainer.weights.tensor_mut(id).f32_mut().copy_from_slice(kept.f32());
    assert!(before == (trained(&training), training.progress().clone()));
    let mut other = setup.training(&device);
    losses(&mut other, 2);
    assert_eq!(losses(&mut training, 2), losses(&mut other, 2));
    // Going back halves the rate and leaves the batch out that it went wrong on.
    let (rate, later) = (training.lr(), training.progress().clone());
    let mut again = setup.training(&device);
    losses(&mut again, 4);
    assert_eq!(again.progress().cursor, later.cursor);
    again.retreat(&later);
    assert_eq!(again.lr(), 0.5 * rate);
    let next = |training: &mut Training| losses(training, 1)[0];
    let (with, without) = (next(&mut training), next(&mut again));
    assert_ne!(with, without);
    assert_ne!(training.progress().cursor, again.progress().cursor);
}

#[test]
fn a_jump_of_the_loss_is_seen() {
    let device = Device::cpu(2).unwrap();
    let mut setup = Setup::new();
    setup.settings.n_steps = 60;
    let mut training = setup.training(&device);
    losses(&mut training, 30);
    let head = training.trainer.weights.find("norm.weight").unwrap();
    training.trainer.weights.tensor_mut(head).f32_mut().iter_mut().for_each(|x| *x *= -40.0);
    match training.step().unwrap() {
        Outcome::Diverged(why) => assert!(why.contains("usual"), "{why}"),
        Outcome::Made { report, .. } => panic!("a loss of {}", report.loss),
    }
}

/// A run whose embedding is made of another model's, wider than its own.
fn with_lens(device: &Device, setup: &Setup) -> Training {
    let mut training = setup.training(device);
    let rng = Rng::new(3, 3);
    let donor: Vec<f32> = (0..400 * 40).map(|n| rng.normal(n) as f32).collect();
    let donor = Tensor::from_f32(device, &[400, 40], &donor);
    let Trainer { model, mut weights, .. } = training.trainer;
    let lens = Lens::attach(&model, &mut weights, &donor, 0).unwrap();
    training.trainer = Trainer::with(model, weights, setup.settings.optimizer);
    training.trainer.lens = Some(lens);
    training
}

#[test]
fn the_projection_of_a_lens_has_the_gradient_of_finite_differences() {
    let device = Device::cpu(2).unwrap();
    let mut trainer = with_lens(&device, &Setup::new()).trainer;
    let id = trainer.weights.find(PROJECTION).unwrap();
    let embed = trainer.weights.find("embed.weight").unwrap();
    assert!(trainer.weights.trained().contains(&id) && !trainer.weights.trained().contains(&embed));
    let part = random_batch(400, 2, 12);
    let (_, grads) = trainer.gradients_of(std::slice::from_ref(&part), None, || ()).unwrap();
    assert!(grads.get(embed.0).is_none(), "the embedding is made, not trained");
    let grad = grads.get(id.0).unwrap().f32().to_vec();
    // The steepest entries: there a difference of f32 losses says most.
    let mut order: Vec<usize> = (0..grad.len()).collect();
    order.sort_by(|&i, &j| grad[j].abs().total_cmp(&grad[i].abs()));
    for &at in &order[..8] {
        let mut loss = |by: f32| {
            trainer.weights.tensor_mut(id).f32_mut()[at] += by;
            let still = AdamW { lr: 0.0, weight_decay: 0.0, ..AdamW::default() };
            // A step of no rate makes the embedding anew and changes nothing else.
            trainer.update(&grads, 1.0, &StepSettings { adamw: still, clip_norm: None }).unwrap();
            let loss =
                trainer.gradients_of(std::slice::from_ref(&part), None, || ()).unwrap().0.loss;
            trainer.weights.tensor_mut(id).f32_mut()[at] -= by;
            f64::from(loss)
        };
        let by = 1e-3;
        let slope = (loss(by) - loss(-by)) / (2.0 * f64::from(by));
        let want = f64::from(grad[at]);
        assert!((slope - want).abs() < 0.02 * want.abs() + 2e-4, "{at}: {slope} {want}");
    }
}

#[test]
fn a_lens_learns_folds_into_the_embedding_and_goes_on_to_the_bit() {
    let device = Device::cpu(2).unwrap();
    let setup = Setup::new();
    let mut whole = with_lens(&device, &setup);
    let start = trained(&whole);
    let want = losses(&mut whole, 6);
    assert!(trained(&whole) != start);
    let mut first = with_lens(&device, &setup);
    losses(&mut first, 3);
    let mut bytes = Vec::new();
    let mut sink = |part: &[u8]| {
        bytes.extend_from_slice(part);
        Ok(())
    };
    first.capture(Extent::Run, &json!(null)).unwrap().write_to(&mut sink).unwrap();
    let saved = Saved::parse("a", Arc::new(bytes)).unwrap();
    let mut second = with_lens(&device, &setup);
    saved.restore(&mut second).unwrap();
    assert!(losses(&mut second, 3) == want[3..]);
    // What a model without the lens computes from the embedding alone is the same.
    let mut plain = setup.training(&device);
    for spec in whole.trainer.model.specs() {
        let from = whole.trainer.weights.find(&spec.name).unwrap();
        let to = plain.trainer.weights.find(&spec.name).unwrap();
        let numbers = whole.trainer.weights.tensor(from).f32().to_vec();
        plain.trainer.weights.tensor_mut(to).f32_mut().copy_from_slice(&numbers);
    }
    let batch = random_batch(400, 1, 12);
    let loss = |training: &mut Training| {
        training
            .trainer
            .gradients_of(std::slice::from_ref(&batch), None, || ())
            .unwrap()
            .0
            .loss
            .to_bits()
    };
    assert_eq!(loss(&mut plain), loss(&mut whole));
}
