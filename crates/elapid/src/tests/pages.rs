//! Experts that are loaded when they are chosen: the same numbers as with all of them at hand.

use crate::error::Result;
use crate::generate::decoder::Decoder;
use crate::model::checkpoint::Checkpoint;
use crate::model::export::Mix;
use crate::model::pages::PageUse;
use crate::model::save::{Form, Save};
use crate::model::state::State;
use crate::model::weights::{Arithmetic, Weights};
use crate::ops::check::devices;
use crate::tensor::device::Device;
use serde_json::json;
use std::path::{Path, PathBuf};

const SETS: [&str; 6] = ["mixtral", "qwen2_moe", "olmoe", "dots1", "granitemoehybrid", "jamba"];

fn golden(set: &str) -> Checkpoint {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../golden/sets");
    Checkpoint::open(root.join(set)).unwrap()
}

/// A directory of its own, removed behind the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("elapid-pages-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir_all(&dir).unwrap();
        Dir(dir)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn save(checkpoint: &Checkpoint, path: &Path, mix: Option<&str>) {
    let weights = match checkpoint.is_stored() {
        true => checkpoint.weights(&Device::cpu(2).unwrap()).unwrap(),
        false => Weights::init(&Device::cpu(2).unwrap(), checkpoint.model().specs(), 7),
    };
    let mix = mix.map(|name| Mix::from_name(name).unwrap());
    let (form, on_bytes) = (Form::from(path), &mut |_, _| {});
    Save { path, form, mix, on_bytes }.write(checkpoint, &weights).unwrap();
}

/// The least that a limit may be, as the refusal of a smaller one says.
fn least(checkpoint: &Checkpoint, device: &Device) -> usize {
    let error = checkpoint.weights_paged(device, 1).err().unwrap().report();
    let end = error.rsplit("at least ").next().unwrap();
    end.split(' ').next().unwrap().parse().unwrap()
}

fn n_experts(checkpoint: &Checkpoint) -> usize {
    let specs = checkpoint.model().specs().iter();
    let names: std::collections::BTreeSet<_> = specs.filter_map(|it| it.expert.clone()).collect();
    names.len()
}

/// Logits of two sequences, both prompts at once and then token by token.
fn logits(checkpoint: &Checkpoint, weights: &Weights) -> Result<Vec<f32>> {
    let (model, device) = (checkpoint.model(), weights.device());
    let prompt: Vec<u32> = (0..40).map(|n| n * 7 % 90).collect();
    let mut states: Vec<State> = (0..2).map(|_| model.state(device)).collect();
    let mut decoder = Decoder::new();
    let next: [&[u32]; 2] = [&prompt, &prompt[5..17]];
    let mut all = decoder.advance_now(model, weights, &next, &mut states, &[3, 1])?;
    for n in 0..6 {
        let ids = [n * 11 % 90, n * 5 + 1];
        let next: Vec<&[u32]> = ids.chunks(1).collect();
        all.extend(decoder.advance_now(model, weights, &next, &mut states, &[1, 1])?);
    }
    Ok(all)
}

/// Compares limits of one expert, of a third of all and of all with no limit, bit by bit.
fn compare(what: &str, checkpoint: &Checkpoint, device: &Device, arithmetic: Arithmetic) {
    let mut weights = checkpoint.weights_as_stored(device).unwrap();
    weights.set_arithmetic(arithmetic);
    let want = logits(checkpoint, &weights).unwrap();
    let (one, n) = (least(checkpoint, device), n_experts(checkpoint));
    let mut n_loads = Vec::new();
    for limit in [one, one * n.div_ceil(3), one * n] {
        let mut weights = checkpoint.weights_paged(device, limit).unwrap();
        weights.set_arithmetic(arithmetic);
        let got = logits(checkpoint, &weights).unwrap();
        let bits = |list: &[f32]| list.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(&got) == bits(&want), "{what}, {limit} bytes on {device:?}");
        let PageUse { n_loads: n, bytes, .. } = weights.page_use().unwrap();
        assert!(bytes <= limit, "{what}: {bytes} of {limit} bytes");
        n_loads.push(n);
    }
    assert!(n_loads[0] >= n_loads[1] && n_loads[1] > n_loads[2], "{what}: {n_loads:?}");
    assert!(n_loads[2] <= n as u64, "{what}: all fit, {n_loads:?} of {n} were loaded");
}

#[test]
fn every_family_has_the_same_logits_within_any_limit() {
    let device = Device::cpu(2).unwrap();
    for set in SETS {
        for arithmetic in [Arithmetic::Exact, Arithmetic::Quick] {
            compare(set, &golden(set), &device, arithmetic);
        }
    }
}

#[test]
fn gpus_have_the_same_logits_within_any_limit() {
    for (device, _) in devices() {
        for set in ["mixtral", "granitemoehybrid"] {
            compare(set, &golden(set), device, Arithmetic::Quick);
        }
    }
}

/// A model whose rows are whole blocks.
fn wide(n: usize) -> Checkpoint {
    let config = json!({
        "model_type": "qwen2_moe", "vocab_size": 96, "hidden_size": n, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": n,
        "moe_intermediate_size": n, "shared_expert_intermediate_size": n, "num_experts": 6,
        "num_experts_per_tok": 2, "norm_topk_prob": false, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": 256, "tie_word_embeddings": false, "initializer_range": 0.2,
    });
    Checkpoint::fresh("wide", config.to_string(), Vec::new()).unwrap()
}

#[test]
fn every_dtype_and_container_has_the_same_logits_within_any_limit() {
    let (dir, device) = (Dir::new("dtypes"), Device::cpu(2).unwrap());
    let files = [
        (32, "f32", "a.gguf"),
        (32, "q8_0", "b.gguf"),
        (32, "bf16", "c"),
        (32, "f16", "d.elapid"),
        (32, "q4_0", "e.elapid"),
        (256, "q4_k_m", "f.gguf"),
        (256, "q6_k", "g.elapid"),
    ];
    for (n, mix, name) in files {
        let path = dir.0.join(name);
        save(&wide(n), &path, Some(mix));
        let checkpoint = Checkpoint::open(&path).unwrap();
        compare(mix, &checkpoint, &device, Arithmetic::Quick);
        for (device, _) in devices().iter().filter(|_| n == 32) {
            compare(mix, &checkpoint, device, Arithmetic::Quick);
        }
    }
}

#[test]
fn a_limit_below_one_expert_and_a_model_without_experts_are_refused() {
    let device = Device::cpu(1).unwrap();
    let problem = |set: &str| golden(set).weights_paged(&device, 100).err().unwrap().report();
    let text = problem("mixtral");
    assert!(text.contains("100 are allowed") && text.contains("allow at least"), "{text}");
    assert!(problem("llama_gqa_untied").contains("has no experts"));
}

/// Flips a byte of an expert of `path`, once for each of its matrices; tells the offsets.
fn flips(checkpoint: &Checkpoint, bytes: &[u8], expert: &str) -> Vec<usize> {
    let weights = checkpoint.weights(&Device::cpu(1).unwrap()).unwrap();
    let ids = weights.ids().filter(|id| {
        let spec = &checkpoint.model().specs()[id.0];
        spec.expert.as_deref() == Some(expert)
    });
    let place = |part: &[u8]| bytes.windows(part.len()).position(|window| window == part).unwrap();
    ids.map(|id| place(weights.tensor(id).bytes()) + 5).collect()
}

#[test]
fn a_changed_byte_of_an_expert_is_refused_when_it_is_first_needed_and_named() {
    let (dir, device) = (Dir::new("flips"), Device::cpu(2).unwrap());
    for (set, name, mix) in [
        ("mixtral", "a.elapid", None),
        ("granitemoehybrid", "b.elapid", Some("bf16")),
        ("qwen2_moe", "c.elapid", None),
    ] {
        let path = dir.0.join(name);
        save(&golden(set), &path, mix);
        let whole = Checkpoint::open(&path).unwrap();
        let expert = whole.model().specs().iter().find_map(|it| it.expert.clone()).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let places = flips(&whole, &bytes, &expert);
        assert_eq!(places.len(), 3);
        drop(whole);
        for at in places {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            std::fs::write(&path, bad).unwrap();
            let checkpoint = Checkpoint::open(&path).unwrap();
            let error = checkpoint.weights(&device).err().unwrap().report();
            assert!(error.contains("model.safetensors` was changed"), "{error}");
            let limit = least(&checkpoint, &device);
            let weights = checkpoint.weights_paged(&device, limit).unwrap();
            let error = logits(&checkpoint, &weights).unwrap_err().report();
            let want = format!("`{expert}` was changed");
            assert!(error.contains(&want) && error.contains("damaged"), "{error}");
        }
        // What is no expert is refused at once.
        let mut bad = bytes.clone();
        let at = bytes.windows(7).position(|window| window == b"\"dtype\"").unwrap();
        bad[at + 1] ^= 1;
        std::fs::write(&path, bad).unwrap();
        let error = Checkpoint::open(&path).err().unwrap().report();
        assert!(error.contains("was changed"), "{error}");
    }
}

#[test]
fn a_package_in_a_directory_has_a_hash_of_every_expert_too() {
    let (dir, device) = (Dir::new("directory"), Device::cpu(2).unwrap());
    let checkpoint = golden("olmoe");
    let weights = checkpoint.weights(&device).unwrap();
    let (path, form, on_bytes) = (&dir.0, Form::Package, &mut |_, _| {});
    Save { path, form, mix: None, on_bytes }.write(&checkpoint, &weights).unwrap();
    let open = || Checkpoint::open(path).unwrap();
    compare("olmoe", &open(), &device, Arithmetic::Quick);
    let file = path.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let expert = open().model().specs().iter().find_map(|it| it.expert.clone()).unwrap();
    let mut bad = bytes.clone();
    bad[flips(&open(), &bytes, &expert)[1]] ^= 1;
    std::fs::write(&file, bad).unwrap();
    let weights = open().weights_paged(&device, 1 << 30).unwrap();
    let error = logits(&checkpoint, &weights).unwrap_err().report();
    assert!(error.contains(&format!("`{expert}` was changed")), "{error}");
}
