//! Adapters through both kinds of files and back, against merged models, and hostile ones.

use super::*;
use crate::files::TensorFile;
use crate::files::gguf::{self, Gguf, Item};
use crate::files::safetensors::{self, SafeTensors};
use crate::model::checkpoint::Checkpoint;
use crate::model::export::{Content, Export};
use crate::model::{gguf_lora, peft};
use crate::ops::linear::row_squares;
use crate::tensor::device::Device;
use crate::tensor::rng::Rng;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn set(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/sets").join(name)
}

fn device() -> Device {
    Device::cpu(1).unwrap()
}

fn open(name: &str) -> Checkpoint {
    let dir = set(name);
    let read = |file: &str| Ok(std::fs::read(dir.join(file)).ok().map(|b| Arc::new(b) as _));
    Checkpoint::from_files(name, &read).unwrap()
}

fn collect(make: impl FnOnce(&mut crate::files::Sink) -> Result<()>) -> Vec<u8> {
    let mut all = Vec::new();
    make(&mut |bytes: &[u8]| {
        all.extend_from_slice(bytes);
        Ok(())
    })
    .unwrap();
    all
}

type PeftFiles = (String, Vec<u8>);

fn to_peft(lora: &Lora, modules: Option<&[String]>) -> PeftFiles {
    let (config, tensors) = peft::write(lora, modules).unwrap();
    (config, collect(|sink| safetensors::write(&safetensors::FORMAT, &tensors, sink)))
}

fn from_peft(files: PeftFiles) -> Result<Lora> {
    let file = SafeTensors::parse("adapter_model.safetensors", Arc::new(files.1))?;
    peft::read(&device(), ("adapter_config.json", &files.0), &file)
}

fn to_gguf(lora: &Lora, model: &Model) -> Vec<u8> {
    let (metadata, tensors) = gguf_lora::write(lora, model).unwrap();
    collect(|sink| gguf::write(&metadata, &tensors, sink))
}

fn from_gguf(bytes: Vec<u8>, model: &Model) -> Result<Lora> {
    gguf_lora::read(&device(), &Gguf::parse("adapter.gguf", Arc::new(bytes))?, model)
}

fn golden_files(name: &str) -> PeftFiles {
    let dir = set(name).join("adapter");
    let config = std::fs::read_to_string(dir.join("adapter_config.json")).unwrap();
    (config, std::fs::read(dir.join("adapter_model.safetensors")).unwrap())
}

fn random(shape: &[usize], stream: u64) -> Tensor {
    let rng = Rng::new(11, stream);
    let numbers = (0..shape.iter().product::<usize>() as u64).map(|n| rng.normal(n) as f32 * 0.2);
    Tensor::from_f32(&device(), shape, &numbers.collect::<Vec<_>>())
}

/// An adapter with non-zero halves for every matrix of `model` that GGUF can adapt.
fn random_lora(model: &Model, ranks: &[usize], alphas: &[f64]) -> Lora {
    let is_whole = |name: &str| name.ends_with(WEIGHT) && !name.contains(".experts.");
    let specs = model.specs().iter().filter(|spec| spec.role == Role::Matrix);
    let specs = specs.filter(|spec| is_whole(&spec.name) && spec.shape[0] > 1);
    let modules = specs.enumerate().map(|(idx, spec)| {
        let rank = ranks[idx % ranks.len()];
        Module {
            param: spec.name.clone(),
            a: random(&[rank, spec.shape[1]], 2 * idx as u64),
            b: random(&[spec.shape[0], rank], 2 * idx as u64 + 1),
            magnitude: None,
            alpha: alphas[idx % alphas.len()],
        }
    });
    let mut modules: Vec<Module> = modules.collect();
    modules.sort_by(|a, b| a.param.cmp(&b.param));
    Lora { modules, rslora: false, base: Some("base/model".into()) }
}

/// Largest difference of `factor * B` and of A, relative to the largest number of each.
fn difference(one: &Lora, two: &Lora) -> f64 {
    let names = |lora: &Lora| lora.modules.iter().map(|m| m.param.clone()).collect::<Vec<_>>();
    assert_eq!(names(one), names(two));
    let mut worst: f64 = 0.0;
    for (a, b) in one.modules.iter().zip(&two.modules) {
        let scales = [[1.0, 1.0], [one.factor(a), two.factor(b)]];
        for ((x, y), [of_x, of_y]) in [(&a.a, &b.a), (&a.b, &b.b)].into_iter().zip(scales) {
            assert_eq!(x.shape(), y.shape(), "{}", a.param);
            let (x, y) = (x.to_f32(), y.to_f32());
            let pairs = x.f32().iter().zip(y.f32());
            let pairs = pairs.map(|(x, y)| (f64::from(*x) * of_x, f64::from(*y) * of_y));
            let top = pairs.clone().fold(0.0, |top: f64, (x, _)| top.max(x.abs()));
            assert!(top > 0.0, "{}: zeros would hide everything", a.param);
            worst = pairs.fold(worst, |worst, (x, y)| worst.max((x - y).abs() / top));
        }
    }
    worst
}

#[test]
fn what_peft_wrote_is_written_again_with_the_same_numbers() {
    for name in ["lora_llama_qv", "lora_llama_all_rs", "lora_mamba"] {
        let lora = from_peft(golden_files(name)).unwrap();
        let base = open(if name == "lora_mamba" { "mamba" } else { "llama_gqa_untied" });
        let modules = modules_of(base.model());
        for known in [None, Some(&modules[..])] {
            let again = from_peft(to_peft(&lora, known)).unwrap();
            assert_eq!(difference(&lora, &again), 0.0, "{name}");
            assert_eq!((lora.rslora, &lora.base), (again.rslora, &again.base));
            let alphas = |lora: &Lora| lora.modules.iter().map(|m| m.alpha).collect::<Vec<_>>();
            assert_eq!(alphas(&lora), alphas(&again));
        }
    }
}

#[test]
fn the_config_names_whole_kinds_of_modules_bare_and_exceptions_by_their_path() {
    let base = open("llama_gqa_untied");
    let mut lora = random_lora(base.model(), &[4], &[8.0]);
    lora.modules.retain(|m| m.param.contains("q_proj") || m.param.contains("layers.0.mlp.up"));
    let last = lora.modules.last_mut().unwrap();
    (last.alpha, last.a, last.b) =
        (3.5, random(&[2, last.a.shape()[1]], 0), random(&[last.b.shape()[0], 2], 1));
    let path = last.path().unwrap().to_string();
    let modules = modules_of(base.model());
    let config = to_peft(&lora, Some(&modules)).0;
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert_eq!(
        config["target_modules"],
        serde_json::json!(["model.layers.0.mlp.up_proj", "q_proj"])
    );
    assert_eq!(config["rank_pattern"], serde_json::json!({ path.as_str(): 2 }));
    assert_eq!(config["alpha_pattern"], serde_json::json!({ path.as_str(): 3.5 }));
    assert_eq!((&config["r"], &config["lora_alpha"]), (&4.into(), &8.into()));
    let mut keys: Vec<&String> = config.as_object().unwrap().keys().collect();
    keys.sort();
    let wanted = [
        "alpha_pattern",
        "base_model_name_or_path",
        "bias",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "lora_alpha",
        "lora_dropout",
        "modules_to_save",
        "peft_type",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
    ];
    assert_eq!(keys, wanted);
}

#[test]
fn halves_keep_their_dtype_in_a_directory() {
    let base = open("llama_gqa_untied");
    let mut lora = random_lora(base.model(), &[4], &[8.0]);
    for module in &mut lora.modules {
        for half in [&mut module.a, &mut module.b] {
            let mut bytes = vec![0; half.n_elem() * 2];
            DType::BF16.encode(half.f32(), &mut bytes);
            let shape = half.shape().to_vec();
            *half = Tensor::from_shared(&device(), &shape, DType::BF16, Arc::new(bytes), 0);
        }
    }
    let again = from_peft(to_peft(&lora, None)).unwrap();
    assert!(again.modules.iter().all(|module| module.b.dtype() == DType::BF16));
    assert_eq!(difference(&lora, &again), 0.0);
    // In GGUF they are f32: llama.cpp would round the input of a shorter A.
    let again = from_gguf(to_gguf(&lora, base.model()), base.model()).unwrap();
    assert_eq!(difference(&lora, &again), 0.0);
}

/// Sets of every architecture, with how much may be lost by the factors of their maps.
const SETS: [(&str, f64); 10] = [
    ("llama_gqa_untied", 0.0),
    ("llama_headdim", 0.0),
    ("qwen2", 0.0),
    ("qwen3", 0.0),
    ("mixtral", 0.0),
    ("mamba", 0.0),
    ("mamba2", 0.0),
    ("jamba", 0.0),
    ("granitemoehybrid_dense", 0.0),
    ("falcon_h1", 1e-6),
];

#[test]
fn through_gguf_and_back_nothing_is_lost_where_factors_are_powers_of_two() {
    for (name, tolerance) in SETS {
        let base = open(name);
        let lora = random_lora(base.model(), &[2, 4, 8], &[4.0, 16.0]);
        assert!(lora.modules.len() >= 4, "{name}: {} modules", lora.modules.len());
        let again = from_gguf(to_gguf(&lora, base.model()), base.model()).unwrap();
        let worst = difference(&lora, &again);
        assert!(worst <= tolerance, "{name}: {worst:e}");
        assert_eq!(again.base.as_deref(), Some("base/model"));
        // Other factors are rounded once into B, and once out of it.
        let rslora = Lora { rslora: true, ..random_lora(base.model(), &[3, 5], &[7.0, 0.3]) };
        let again = from_gguf(to_gguf(&rslora, base.model()), base.model()).unwrap();
        let worst = difference(&rslora, &again);
        assert!(worst <= 1e-6, "{name}: {worst:e}");
    }
}

/// The tensors of the base as a GGUF file, in f32.
fn base_gguf(base: &Checkpoint, weights: &Weights) -> Gguf {
    let export = Export::gguf(base, weights).unwrap();
    let Content::Gguf(metadata, tensors) = export.gguf_content(None).unwrap() else {
        panic!("not GGUF");
    };
    let bytes = collect(|sink| gguf::write(&metadata, &tensors, sink));
    Gguf::parse("base.gguf", Arc::new(bytes)).unwrap()
}

/// `factor * B A`.
fn product(a: &Tensor, b: &Tensor, factor: f64) -> Vec<f64> {
    let (a, b) = (a.to_f32(), b.to_f32());
    let ((rank, d_in), (d_out, _)) = (a.dims2(), b.dims2());
    let at = |row: usize, col: usize| -> f64 {
        let terms = (0..rank)
            .map(|k| f64::from(b.f32()[row * rank + k]) * f64::from(a.f32()[k * d_in + col]));
        terms.sum::<f64>() * factor
    };
    (0..d_out * d_in).map(|n| at(n / d_in, n % d_in)).collect()
}

#[test]
fn base_file_plus_adapter_file_is_the_file_of_the_merged_model() {
    for (name, _) in SETS {
        let base = open(name);
        let lora = Lora { rslora: true, ..random_lora(base.model(), &[2, 3, 4], &[4.0, 2.0, 5.0]) };
        let plain = base_gguf(&base, &base.weights(&device()).unwrap());
        let mut merged = base.weights(&device()).unwrap();
        merged.train(|_, _| true);
        for module in &lora.modules {
            // By hand, so that a wrong `factor` is seen here too.
            let factor = module.alpha / (module.rank() as f64).sqrt();
            let id = merged.find(&module.param).unwrap();
            let numbers = merged.tensor_mut(id).f32_mut().iter_mut();
            let product = product(&module.a, &module.b, factor);
            numbers.zip(product).for_each(|(x, more)| *x = (f64::from(*x) + more) as f32);
        }
        let merged = base_gguf(&base, &merged);
        let adapter = Gguf::parse("adapter.gguf", Arc::new(to_gguf(&lora, base.model()))).unwrap();
        let alpha = adapter.float("adapter.lora.alpha").unwrap().unwrap();
        let tensor = |file: &Gguf, name: &str| file.tensor(&device(), name).unwrap();
        let mut n_adapted = 0;
        for entry in plain.tensors() {
            let was = tensor(&plain, &entry.name).unwrap().to_f32();
            let want = tensor(&merged, &entry.name).unwrap().to_f32();
            let halves =
                ["a", "b"].map(|half| tensor(&adapter, &format!("{}.lora_{half}", entry.name)));
            let added = match halves {
                [Some(a), Some(b)] => {
                    n_adapted += 1;
                    product(&a, &b, alpha / b.dims2().1 as f64)
                }
                _ => vec![0.0; was.n_elem()],
            };
            for ((was, added), want) in was.f32().iter().zip(added).zip(want.f32()) {
                let off = (f64::from(*was) + added - f64::from(*want)).abs();
                assert!(off < 2e-6, "{name}: `{}` is off by {off:e}", entry.name);
            }
        }
        assert!(n_adapted >= lora.modules.len(), "{name}: {n_adapted} tensors were adapted");
        assert_eq!(adapter.tensors().len(), 2 * n_adapted, "{name}: tensors that adapt nothing");
    }
}

/// The tensors of an adapter file, and its metadata, changed.
fn changed(
    lora: &Lora,
    model: &Model,
    change: impl Fn(&mut Vec<(String, Item)>, &mut Vec<Outgoing>),
) -> Result<Lora> {
    let (mut metadata, mut tensors) = gguf_lora::write(lora, model).unwrap();
    change(&mut metadata, &mut tensors);
    from_gguf(collect(|sink| gguf::write(&metadata, &tensors, sink)), model)
}

#[test]
fn an_alpha_of_zero_is_no_change_and_its_absence_a_factor_of_one() {
    let base = open("qwen2");
    let mut lora = random_lora(base.model(), &[4], &[0.0]);
    let again = from_gguf(to_gguf(&lora, base.model()), base.model()).unwrap();
    assert!(again.modules.iter().all(|m| again.factor(m) != 0.0), "llama.cpp takes zero for one");
    assert!(again.modules.iter().all(|m| m.b.f32().iter().all(|x| *x == 0.0)));
    lora.modules.iter_mut().for_each(|module| module.alpha = 4.0);
    for alpha in [None, Some(0.0)] {
        let plain = changed(&lora, base.model(), |metadata, _| {
            metadata.retain(|(key, _)| key != "adapter.lora.alpha");
            metadata.extend(alpha.map(|x| ("adapter.lora.alpha".to_string(), Item::F32(x))));
        });
        assert_eq!(difference(&lora, &plain.unwrap()), 0.0);
    }
}

#[test]
fn parts_that_were_adapted_apart_become_one_adapter() {
    let base = open("granitemoehybrid_dense");
    let mut lora = random_lora(base.model(), &[4], &[8.0]);
    lora.modules.retain(|module| module.param.ends_with("layers.0.shared_mlp.input_linear.weight"));
    let (d_out, d_in) = (lora.modules[0].b.shape()[0], lora.modules[0].a.shape()[1]);
    let up_a = random(&[3, d_in], 90);
    let up_b = random(&[d_out / 2, 3], 91);
    // Another A, of another rank, for the upper part alone.
    let joined = changed(&lora, base.model(), |_, tensors| {
        for (half, tensor) in [(".lora_a", &up_a), (".lora_b", &up_b)] {
            let name = format!("blk.0.ffn_up.weight{half}");
            let at = tensors.iter().position(|t| t.name == name).unwrap();
            let bytes = tensor.bytes().to_vec();
            let bytes = move || Ok(Cow::Owned(bytes.clone()));
            let shape = tensor.shape().to_vec();
            tensors[at] = Outgoing { name, shape, dtype: DType::F32, bytes: Box::new(bytes) };
        }
    })
    .unwrap();
    let [module] = &joined.modules[..] else { panic!("{} modules", joined.modules.len()) };
    assert_eq!(module.rank(), 7);
    let got = product(&module.a, &module.b, joined.factor(module));
    let gate = lora.modules[0].b.rows(0..d_out / 2);
    let mut want = product(&lora.modules[0].a, &gate, 8.0 / 4.0);
    want.extend(product(&up_a, &up_b, 8.0 / 3.0));
    assert!(got.iter().zip(&want).all(|(x, y)| (x - y).abs() < 1e-6));
    // A part alone leaves the other as it is.
    let alone = changed(&lora, base.model(), |_, tensors| {
        tensors.retain(|tensor| tensor.name.contains("ffn_up"));
    });
    let alone = alone.unwrap();
    assert!(alone.modules[0].b.rows(0..d_out / 2).f32().iter().all(|x| *x == 0.0));
    assert_eq!(
        alone.modules[0].b.rows(d_out / 2..d_out).f32(),
        lora.modules[0].b.rows(d_out / 2..d_out).f32()
    );
}

#[test]
fn what_gguf_cannot_hold_is_refused_by_name() {
    let refusal = |set: &str, param: &str| {
        let base = open(set);
        let spec = base.model().specs().iter().find(|spec| spec.name.contains(param));
        let (name, shape) = match spec {
            Some(spec) => (spec.name.clone(), spec.shape.clone()),
            None => (param.to_string(), vec![2, 2]),
        };
        let width = shape.last().copied().unwrap();
        let (a, b) = (random(&[2, width], 0), random(&[shape[0], 2], 1));
        let modules = vec![Module { param: name, a, b, magnitude: None, alpha: 1.0 }];
        let lora = Lora { modules, rslora: false, base: None };
        gguf_lora::write(&lora, base.model()).err().unwrap().report()
    };
    for (set, param, problem) in [
        ("llama_gqa_untied", "model.embed_tokens.weight", "embeddings"),
        ("mixtral", "experts", "experts"),
        ("jamba", "experts", "experts"),
        ("granitemoehybrid", "block_sparse_moe.input_linear", "experts"),
        ("mamba", "conv1d.weight", "no matrix of a linear map"),
        ("mamba", "nothing.of.this.name.weight", "no such matrix"),
        ("olmoe", "q_proj", "cannot be written as GGUF"),
    ] {
        let text = refusal(set, param);
        assert!(text.contains(problem) && text.contains("hint: "), "{set} {param}: {text}");
    }
}

#[test]
fn a_gguf_adapter_that_is_not_for_this_base_is_refused_by_name() {
    let base = open("llama_gqa_untied");
    let model = base.model();
    let lora = random_lora(model, &[4], &[8.0]);
    let bytes = to_gguf(&lora, model);
    let other = open("qwen2");
    let text = from_gguf(bytes, other.model()).err().unwrap().report();
    assert!(text.contains("`general.architecture`: is \"llama\""), "{text}");
    let refusal = |key: &str, item: Item| {
        let result = changed(&lora, model, |metadata, _| {
            metadata.retain(|(known, _)| known != key);
            metadata.push((key.into(), item.clone()));
        });
        result.err().unwrap_or_else(|| panic!("{key} {item:?} was taken")).report()
    };
    for (key, item) in [
        ("general.type", Item::Str("model".into())),
        ("general.type", Item::U32(1)),
        ("adapter.type", Item::Str("control_vector".into())),
        ("adapter.lora.alpha", Item::F32(f32::NAN)),
        ("adapter.lora.alpha", Item::U32(8)),
        ("adapter.alora.invocation_tokens", Item::I32s(vec![1])),
    ] {
        let text = refusal(key, item);
        assert!(text.contains(key) && text.contains("hint: "), "{key}: {text}");
    }
    // An alpha of kind f64, which our writer does not write: four bytes more, which shift the data.
    const ALPHA: &[u8] = b"adapter.lora.alpha";
    let mut bytes = to_gguf(&lora, model);
    let at = bytes.windows(ALPHA.len()).position(|window| window == ALPHA).unwrap() + ALPHA.len();
    let double = [&12u32.to_le_bytes()[..], &1e300f64.to_le_bytes()].concat();
    bytes.splice(at..at + 8, double);
    bytes.extend([0; 60]);
    let text = from_gguf(bytes, model).err().unwrap().report();
    assert!(text.contains("`adapter.lora.alpha`") && text.contains("not a finite"), "{text}");
    let refusal = |change: &dyn Fn(&mut Vec<Outgoing>)| {
        changed(&lora, model, |_, tensors| change(tensors)).err().unwrap().report()
    };
    let text = refusal(&|list| list.retain(|t| t.name != "blk.0.attn_q.weight.lora_a"));
    assert!(text.contains("there is no `blk.0.attn_q.weight.lora_a`"), "{text}");
    for (name, problem) in [
        ("blk.99.attn_q.weight.lora_b", "no such matrix"),
        ("blk.0.attn_norm.weight", "not a half"),
        ("blk.0.attn_norm.weight.lora_b", "no matrix of a linear map"),
        ("token_embd.weight.lora_b", "embeddings"),
    ] {
        let text = refusal(&|list| list[1].name = name.into());
        assert!(text.contains(name) && text.contains(problem), "{name}: {text}");
    }
    let text = refusal(&|list| list.clear());
    assert!(text.contains("no tensors"), "{text}");
    // Halves of a wider model.
    let wide = open("llama_headdim");
    let text = from_gguf(to_gguf(&random_lora(wide.model(), &[4], &[8.0]), wide.model()), model);
    let text = text.err().unwrap().report();
    assert!(text.contains("halves of shapes"), "{text}");
}

#[test]
fn attaching_is_all_or_nothing_and_says_what_does_not_fit() {
    let base = open("llama_gqa_untied");
    let mut weights = base.weights(&device()).unwrap();
    let n_params = weights.ids().count();
    let mut lora = random_lora(base.model(), &[4], &[8.0]);
    let refusal = |lora: &Lora, weights: &mut Weights| {
        let text = lora.attach(weights).err().unwrap().report();
        assert_eq!(weights.ids().count(), n_params, "something was attached: {text}");
        text
    };
    let last = lora.modules.len() - 1;
    let name = std::mem::replace(&mut lora.modules[last].param, "model.nope.weight".into());
    let text = refusal(&lora, &mut weights);
    assert!(text.contains("model.nope.weight") && text.contains("names look like"), "{text}");
    lora.modules[last].param = lora.modules[0].param.clone();
    let text = refusal(&lora, &mut weights);
    assert!(text.contains("twice") || text.contains("halves of shapes"), "{text}");
    lora.modules[last].param = name;
    let b = std::mem::replace(&mut lora.modules[last].b, random(&[3, 4], 0));
    let text = refusal(&lora, &mut weights);
    assert!(text.contains(" and [3, 4] for a matrix"), "{text}");
    lora.modules[last].b = random(&[b.shape()[0], 5], 0);
    assert!(refusal(&lora, &mut weights).contains("halves of shapes"));
    lora.modules[last].b = b;
    lora.modules[last].alpha = 1e300;
    assert!(refusal(&lora, &mut weights).contains("too large"));
    lora.modules[last].alpha = 1.0;
    assert_eq!(lora.attach(&mut weights).unwrap(), last + 1);
}

#[test]
fn ranks_and_targets_of_the_config_must_be_those_of_the_tensors() {
    let (config, tensors) = golden_files("lora_llama_qv");
    let refusal = |from: &str, to: &str| {
        assert!(config.contains(from), "{from}");
        let result = from_peft((config.replace(from, to), tensors.clone()));
        result.err().unwrap_or_else(|| panic!("{to} was taken")).to_string()
    };
    for rank in ["8", "1000000000", "18446744073709551615"] {
        let text = refusal("\"r\": 4", &format!("\"r\": {rank}"));
        assert!(text.contains(&format!("its rank should be {rank}")), "{text}");
    }
    let text = refusal("\"v_proj\"", "\"k_proj\"");
    assert!(
        text.contains("`target_modules`: no name matches") && text.contains("v_proj"),
        "{text}"
    );
    assert!(
        refusal("\"rank_pattern\": {}", "\"rank_pattern\": {\"0.self_attn.v_proj\": 2}")
            .contains("rank should be 2")
    );
}

#[test]
fn damaged_files_end_in_errors() {
    let base = open("llama_gqa_untied");
    let lora = random_lora(base.model(), &[4], &[8.0]);
    let gguf = to_gguf(&lora, base.model());
    let (config, tensors) = to_peft(&lora, None);
    let rng = Rng::new(3, 0);
    let mut draw = 0;
    let mut below = |bound: usize| {
        draw += 1;
        rng.below(draw, bound as u64) as usize
    };
    let mut mangle = |bytes: &[u8], n_head: usize| {
        let mut bytes = bytes.to_vec();
        for _ in 0..1 + below(3) {
            let at = below(n_head.min(bytes.len()));
            bytes[at] = match below(3) {
                0 => below(256) as u8,
                1 => bytes[at] ^ (1 << below(8)),
                _ => b'0' + below(10) as u8,
            };
        }
        bytes
    };
    let (mut n_refused, n_rounds) = (0, 2000);
    for _ in 0..n_rounds {
        n_refused += from_gguf(mangle(&gguf, 6000), base.model()).is_err() as usize;
        n_refused += from_peft((config.clone(), mangle(&tensors, 6000))).is_err() as usize;
        let text = String::from_utf8_lossy(&mangle(config.as_bytes(), usize::MAX)).into_owned();
        n_refused += from_peft((text, tensors.clone())).is_err() as usize;
    }
    assert!(n_refused > n_rounds, "{n_refused} of {} were refused", 3 * n_rounds);
}

/// The same adapter with magnitudes, away from where they start.
fn with_magnitudes(mut lora: Lora, weights: &Weights) -> Lora {
    for (idx, module) in lora.modules.iter_mut().enumerate() {
        let id = weights.find(&module.param).unwrap();
        let mut m = row_squares(weights.tensor(id));
        let noise = random(m.shape(), 1000 + idx as u64);
        for (m, noise) in m.f32_mut().iter_mut().zip(noise.f32()) {
            *m = m.sqrt() * (1.0 + noise);
        }
        module.magnitude = Some(m);
    }
    lora
}

#[test]
fn an_adapter_with_magnitudes_is_written_and_read_back() {
    let base = open("qwen2");
    let lora = random_lora(base.model(), &[4, 2], &[8.0]);
    let lora = with_magnitudes(lora, &base.weights(&device()).unwrap());
    let (config, bytes) = to_peft(&lora, None);
    assert!(config.contains("\"use_dora\": true"));
    let again = from_peft((config.clone(), bytes.clone())).unwrap();
    assert_eq!(difference(&lora, &again), 0.0);
    for (one, two) in lora.modules.iter().zip(&again.modules) {
        let [one, two] = [one, two].map(|module| module.magnitude.as_ref().unwrap());
        assert_eq!(one.f32(), two.f32());
    }
    assert_eq!(lora.n_elem(), again.n_elem());
    // Without the setting the magnitudes have no meaning; with it they must be there.
    let plain = config.replace("\"use_dora\": true", "\"use_dora\": false");
    let error = from_peft((plain, bytes)).err().unwrap().report();
    assert!(error.contains("lora_magnitude_vector"), "{error}");
    let without = to_peft(&random_lora(base.model(), &[4, 2], &[8.0]), None).1;
    let error = from_peft((config, without)).err().unwrap().report();
    assert!(error.contains("`use_dora`") && error.contains("hint: "), "{error}");
    let error = gguf_lora::write(&lora, base.model()).err().unwrap().report();
    assert!(error.contains("DoRA") && error.contains("hint: "), "{error}");
    let mut mixed = lora;
    mixed.modules[0].magnitude = None;
    let error = peft::write(&mixed, None).err().unwrap().report();
    assert!(error.contains("DoRA") && error.contains("hint: "), "{error}");
    mixed.modules[0].magnitude = Some(random(&[3], 0));
    let mut weights = base.weights(&device()).unwrap();
    let error = mixed.attach(&mut weights).unwrap_err().report();
    assert!(error.contains("lora_magnitude_vector") && error.contains("[3]"), "{error}");
}

#[test]
fn a_merged_adapter_gives_the_logits_of_one_that_is_not() {
    for name in ["llama_gqa_untied", "mamba", "mamba2", "falcon_h1"] {
        let base = open(name);
        let (device, model) = (device(), base.model());
        let ids: Vec<u32> = (0..24).map(|n| n * 7 % 96).collect();
        for with_m in [false, true] {
            let mut lora = random_lora(model, &[4, 2], &[2.0, 1.0]);
            if with_m {
                lora = with_magnitudes(lora, &base.weights(&device).unwrap());
            }
            let (mut apart, mut merged) =
                (base.weights(&device).unwrap(), base.weights(&device).unwrap());
            let plain = base.weights(&device).unwrap();
            assert_eq!(lora.attach(&mut apart).unwrap(), lora.modules.len());
            assert_eq!(lora.merge_into(&mut merged).unwrap(), lora.modules.len());
            let pair = [(model, &apart), (model, &merged)];
            let parity = crate::eval::parity::compare(pair, std::slice::from_ref(&ids)).unwrap();
            assert!(parity.logit_difference < 1e-4, "{name}: {}", parity.logit_difference);
            let pair = [(model, &plain), (model, &merged)];
            let effect = crate::eval::parity::compare(pair, std::slice::from_ref(&ids)).unwrap();
            assert!(effect.logit_difference > 1e-2, "{name}: {}", effect.logit_difference);
        }
    }
}
