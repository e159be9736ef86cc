//! Models from one form into another and back: nothing may be lost on the way.

use crate::error::Result;
use crate::eval::parity::{self, Parity};
use crate::files::gguf::{self, Item};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::gguf::CONFIG_KEY;
use crate::model::export::{Content, Export, Mix, OutFile};
use crate::model::weights::Weights;
use crate::tensor::device::Device;
use crate::tensor::{DType, SharedBytes};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn device() -> Device {
    Device::cpu(2).unwrap()
}

type Files = BTreeMap<String, SharedBytes>;

fn open_files(name: &str, files: &Files) -> Result<Checkpoint> {
    Checkpoint::from_files(name, &|file| Ok(files.get(file).cloned()))
}

fn open_dir(dir: &Path) -> Checkpoint {
    let read = |file: &str| Ok(std::fs::read(dir.join(file)).ok().map(|b| Arc::new(b) as _));
    Checkpoint::from_files(&dir.display().to_string(), &read).unwrap()
}

fn directory(checkpoint: &Checkpoint, weights: &Weights, dtype: Option<DType>) -> Files {
    let export = Export::directory(checkpoint, weights);
    let files = export.directory_files(dtype).unwrap();
    files
        .iter()
        .map(|out| (out.name.clone(), Arc::new(out.to_vec().unwrap()) as SharedBytes))
        .collect()
}

fn gguf_bytes(checkpoint: &Checkpoint, weights: &Weights, mix: Option<Mix>) -> Result<Vec<u8>> {
    let export = Export::gguf(checkpoint, weights)?;
    let content = export.gguf_content(mix)?;
    Ok(OutFile { name: "model.gguf".into(), content }.to_vec().unwrap())
}

/// The same file as another tool would write it: without our own keys.
fn foreign_gguf(checkpoint: &Checkpoint, weights: &Weights) -> Vec<u8> {
    let export = Export::gguf(checkpoint, weights).unwrap();
    let Content::Gguf(mut metadata, tensors) = export.gguf_content(None).unwrap() else {
        panic!("not GGUF");
    };
    metadata.retain(|(key, _)| !key.starts_with("elapid."));
    let mut all = Vec::new();
    let mut sink = |bytes: &[u8]| {
        all.extend_from_slice(bytes);
        Ok(())
    };
    gguf::write(&metadata, &tensors, &mut sink).unwrap();
    all
}

fn compare(a: (&Checkpoint, &Weights), b: (&Checkpoint, &Weights)) -> Parity {
    let prompts = parity::prompts(None, a.0.model().config().n_vocab).unwrap();
    parity::compare([(a.0.model(), a.1), (b.0.model(), b.1)], &prompts).unwrap()
}

/// Golden sets with a model, by name.
fn sets() -> Vec<(String, PathBuf)> {
    let mut list: Vec<_> = std::fs::read_dir(root().join("golden/sets"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("model.safetensors").exists())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_string(), path))
        .collect();
    list.sort();
    assert!(list.len() >= 24, "{} sets", list.len());
    list
}

/// Sets that have a form in GGUF, and what is said of the others.
const NOT_GGUF: &[(&str, &str)] = &[
    ("dots1", "no architecture with this list of layers"),
    ("evermind", "no architecture with this list of layers"),
    ("falcon_h1_norm_first", "the norm comes before the gate"),
    ("falcon_h1_plain", "`model.layers.0.mamba.in_proj.bias` has no place"),
    ("falcon_mamba", "delta, B and C are normed with eps"),
    ("mamba2_g1", "step sizes are limited to (0.01, 0.1)"),
    ("mamba_odd", "`backbone.layers.0.mixer.in_proj.bias` has no place"),
    ("mistral", "attention slides over 8 tokens"),
    ("olmoe", "no architecture with this list of layers"),
    ("qwen2_moe", "no architecture with this list of layers"),
    ("qwen2_window", "attention slides over 8 tokens"),
];

#[test]
fn a_directory_through_gguf_and_back_is_the_same_bytes() {
    let device = device();
    let mut n_converted = 0;
    for (name, dir) in sets() {
        let checkpoint = open_dir(&dir);
        let weights = checkpoint.weights(&device).unwrap();
        let bytes = match (gguf_bytes(&checkpoint, &weights, None), expected_refusal(&name)) {
            (Ok(bytes), None) => bytes,
            (Err(error), Some(reason)) => {
                assert!(error.report().contains(reason), "{name}: {error}");
                continue;
            }
            (Ok(_), Some(reason)) => panic!("{name} was written although {reason}"),
            (Err(error), None) => panic!("{name}: {error}"),
        };
        let through = Checkpoint::from_gguf("model.gguf", Arc::new(bytes)).unwrap();
        let through_weights = through.weights(&device).unwrap();
        let files = directory(&through, &through_weights, None);
        for file in ["model.safetensors", "config.json"] {
            let was = std::fs::read(dir.join(file)).unwrap();
            assert!((*files[file]).as_ref() == was, "{name}: {file} differs");
        }
        n_converted += 1;
    }
    assert!(n_converted >= 15, "{n_converted} sets went through GGUF");
}

fn expected_refusal(set: &str) -> Option<&'static str> {
    NOT_GGUF.iter().find(|(name, _)| *name == set).map(|(_, reason)| *reason)
}

#[test]
fn a_file_without_our_keys_gives_the_same_model_from_its_metadata() {
    let device = device();
    for (name, dir) in sets() {
        if expected_refusal(&name).is_some() {
            continue;
        }
        let checkpoint = open_dir(&dir);
        let weights = checkpoint.weights(&device).unwrap();
        let bytes = foreign_gguf(&checkpoint, &weights);
        let foreign = Checkpoint::from_gguf("model.gguf", Arc::new(bytes));
        if name.starts_with("mamba3") || name == "zamba" {
            // An architecture of our own, which has nothing but our keys.
            let error = foreign.err().unwrap().report();
            assert!(error.contains("`elapid.config`: is missing"), "{error}");
            continue;
        }
        let foreign = foreign.unwrap();
        assert!(
            !foreign.config_json().contains("transformers_version"),
            "{name}: our key was used"
        );
        let foreign_weights = foreign.weights(&device).unwrap();
        let parity = compare((&checkpoint, &weights), (&foreign, &foreign_weights));
        assert!(parity.logit_difference < 1e-4, "{name}: {parity:?}");
        assert_eq!(parity.n_top1, parity.n_tok, "{name}: {parity:?}");
        // And a directory of it says the same again.
        let files = directory(&foreign, &foreign_weights, None);
        let again = open_files("again", &files).unwrap();
        let again_weights = again.weights(&device).unwrap();
        let parity = compare((&foreign, &foreign_weights), (&again, &again_weights));
        assert_eq!(parity.logit_difference, 0.0, "{name}: {parity:?}");
    }
}

#[test]
fn experts_beside_a_gated_shared_one_go_through_gguf() {
    // The golden set mixes dense layers in, which llama.cpp does not have.
    let device = device();
    let dir = root().join("golden/sets/qwen2_moe");
    let json = std::fs::read_to_string(dir.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&json).unwrap();
    config["mlp_only_layers"] = serde_json::json!([]);
    config["decoder_sparse_step"] = serde_json::json!(1);
    config["norm_topk_prob"] = serde_json::json!(false);
    let made = fresh(&config.to_string());
    let checkpoint = open_files("made", &made).unwrap();
    let weights = checkpoint.weights(&device).unwrap();
    for bytes in
        [gguf_bytes(&checkpoint, &weights, None).unwrap(), foreign_gguf(&checkpoint, &weights)]
    {
        let through = Checkpoint::from_gguf("model.gguf", Arc::new(bytes)).unwrap();
        assert_eq!(through.gguf().unwrap().str("general.architecture").unwrap(), Some("qwen2moe"));
        let through_weights = through.weights(&device).unwrap();
        let files = directory(&through, &through_weights, None);
        assert!((*files["model.safetensors"]).as_ref() == (*made["model.safetensors"]).as_ref());
    }
}

/// A directory with fresh weights of a config.
fn fresh(json: &str) -> Files {
    let config = crate::model::config::Config::from_json("config.json", json).unwrap();
    let model = crate::model::Model::new(config);
    let weights = Weights::init(&device(), model.specs(), 7);
    let places: Vec<_> = weights.ids().zip(model.places()).collect();
    let targets = crate::model::params::targets(&weights, &places);
    let tensors = targets.iter().map(|target| target.outgoing(&weights, DType::F32)).collect();
    let out = OutFile { name: String::new(), content: Content::SafeTensors(tensors) };
    let mut files = Files::new();
    files.insert("config.json".into(), Arc::new(json.as_bytes().to_vec()));
    files.insert("model.safetensors".into(), Arc::new(out.to_vec().unwrap()));
    files
}

#[test]
fn a_model_of_our_own_goes_through_gguf_as_what_it_is_built_like() {
    let device = device();
    let own = |more: &str| {
        format!(r#"{{"model_type": "elapid", "vocab_size": 96, "d_model": 64, {more}}}"#)
    };
    for (arch, json) in [
        ("mamba", own(r#""layers": ["mamba1", "mamba1"], "feed_forward": "none""#)),
        ("mamba2", own(r#""layers": ["mamba2", "mamba2"], "feed_forward": "none""#)),
        ("llama", own(r#""layers": ["attention", "attention"]"#)),
        ("qwen3", own(r#""layers": ["attention"], "attention": {"qk_norm": true}"#)),
        ("granitehybrid", own(r#""layers": "jamba", "n_layer": 4"#)),
        ("granitehybrid", own(r#""layers": "jamba", "n_layer": 4, "feed_forward": "experts""#)),
    ] {
        let made = fresh(&json);
        let checkpoint = open_files("made", &made).unwrap();
        let weights = checkpoint.weights(&device).unwrap();
        let bytes = gguf_bytes(&checkpoint, &weights, None).unwrap();
        let through = Checkpoint::from_gguf("model.gguf", Arc::new(bytes)).unwrap();
        assert_eq!(through.gguf().unwrap().str("general.architecture").unwrap(), Some(arch));
        let through_weights = through.weights(&device).unwrap();
        let files = directory(&through, &through_weights, None);
        assert!((*files["model.safetensors"]).as_ref() == (*made["model.safetensors"]).as_ref());
        let foreign = foreign_gguf(&checkpoint, &weights);
        let foreign = Checkpoint::from_gguf("model.gguf", Arc::new(foreign)).unwrap();
        let foreign_weights = foreign.weights(&device).unwrap();
        let parity = compare((&checkpoint, &weights), (&foreign, &foreign_weights));
        assert!(parity.logit_difference < 1e-5, "{arch}: {parity:?}");
    }
}

#[test]
fn shorter_floats_and_blocks_are_as_close_as_they_can_be() {
    let device = device();
    let json = r#"{"model_type": "elapid", "vocab_size": 96, "d_model": 256,
        "layers": ["attention", "mamba2"], "attention": {"n_head": 4}}"#;
    let made = fresh(json);
    let checkpoint = open_files("made", &made).unwrap();
    let weights = checkpoint.weights(&device).unwrap();
    let mut last = 0.0;
    for (name, most) in [
        ("f32", 0.0),
        ("f16", 2e-3),
        ("bf16", 1e-2),
        ("q8_0", 2e-2),
        ("q6_k", 0.1),
        ("q5_k_m", 0.2),
        ("q4_k_m", 0.4),
        ("q4_0", 0.5),
    ] {
        let bytes = gguf_bytes(&checkpoint, &weights, Mix::from_name(name)).unwrap();
        let through = Checkpoint::from_gguf("model.gguf", Arc::new(bytes)).unwrap();
        let through_weights = through.weights(&device).unwrap();
        let parity = compare((&checkpoint, &weights), (&through, &through_weights));
        let difference = parity.logit_difference;
        println!("{name}: {parity:?}");
        assert!(difference <= most && difference >= last, "{name}: {difference} after {last}");
        last = difference / 3.0;
        // Blocks that are there are kept, byte for byte.
        let kept = gguf_bytes(&through, &through_weights, None).unwrap();
        let kept = Checkpoint::from_gguf("kept.gguf", Arc::new(kept)).unwrap();
        let kept_weights = kept.weights(&device).unwrap();
        for id in kept_weights.ids() {
            let (a, b) = (kept_weights.tensor(id), through_weights.tensor(id));
            assert!(a.dtype() == b.dtype() && a.bytes() == b.bytes(), "{name}");
        }
    }
}

#[test]
fn a_directory_in_shards_is_read_like_one_file() {
    let device = device();
    let (_, dir) = sets().into_iter().find(|(name, _)| name == "jamba").unwrap();
    let checkpoint = open_dir(&dir);
    let weights = checkpoint.weights(&device).unwrap();
    let export = Export::directory(&checkpoint, &weights).with_shard_bytes(20_000);
    let files = export.directory_files(None).unwrap();
    let files: Files = files
        .iter()
        .map(|out| (out.name.clone(), Arc::new(out.to_vec().unwrap()) as SharedBytes))
        .collect();
    assert!(files.contains_key("model.safetensors.index.json"));
    let n_shards = files.keys().filter(|name| name.ends_with(".safetensors")).count();
    assert!(n_shards >= 3, "{n_shards} shards");
    let again = open_files("again", &files).unwrap();
    let again_weights = again.weights(&device).unwrap();
    let parity = compare((&checkpoint, &weights), (&again, &again_weights));
    assert_eq!(parity.logit_difference, 0.0);
    // A shard that is not there is named.
    let mut short = files.clone();
    short.remove("model-00002-of-00004.safetensors");
    short.remove("model-00002-of-00005.safetensors");
    if short.len() < files.len() {
        let error = open_files("short", &short).err().unwrap().report();
        assert!(error.contains("model-00002-of-"), "{error}");
    }
}

#[test]
fn metadata_says_what_llama_cpp_looks_for() {
    let device = device();
    let (_, dir) = sets().into_iter().find(|(name, _)| name == "jamba").unwrap();
    let checkpoint = open_dir(&dir);
    let weights = checkpoint.weights(&device).unwrap();
    let export = Export::gguf(&checkpoint, &weights).unwrap();
    let Content::Gguf(metadata, tensors) = export.gguf_content(None).unwrap() else {
        panic!("not GGUF");
    };
    let get = |key: &str| metadata.iter().find(|item| item.0 == key).map(|item| &item.1);
    assert_eq!(get("general.architecture"), Some(&Item::Str("jamba".into())));
    let Some(Item::I32s(kv_heads)) = get("jamba.attention.head_count_kv") else {
        panic!("no list of heads");
    };
    assert!(kv_heads.contains(&0) && kv_heads.iter().any(|&n| n > 0), "{kv_heads:?}");
    assert!(get(CONFIG_KEY).is_some());
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert!(names.contains(&"blk.0.ssm_a") && names.contains(&"blk.0.ssm_dt_norm.weight"));
    assert!(names.iter().any(|name| name.ends_with("ffn_gate_exps.weight")));
}

#[test]
fn a_directory_may_hold_its_weights_as_torch_saves_them() {
    let device = device();
    let config = r#"{"model_type": "elapid", "vocab_size": 6, "d_model": 4,
        "layers": ["short_conv"], "feed_forward": "none"}"#;
    let bin = std::fs::read(root().join("lab/fuzz/corpus/torch/model.bin")).unwrap();
    let index = r#"{"weight_map": {"embed.weight": "pytorch_model-00001-of-00001.bin"}}"#;
    let mut files = Files::new();
    files.insert("config.json".into(), Arc::new(config.as_bytes().to_vec()));
    for (name, more) in [
        ("pytorch_model.bin", None),
        ("pytorch_model-00001-of-00001.bin", Some("pytorch_model.bin.index.json")),
    ] {
        let mut files = files.clone();
        files.insert(name.into(), Arc::new(bin.clone()));
        if let Some(more) = more {
            files.insert(more.into(), Arc::new(index.as_bytes().to_vec()));
        }
        let checkpoint = open_files("made", &files).unwrap();
        let weights = checkpoint.weights(&device).unwrap();
        let again = open_files("again", &directory(&checkpoint, &weights, None)).unwrap();
        let again_weights = again.weights(&device).unwrap();
        let parity = compare((&checkpoint, &weights), (&again, &again_weights));
        assert_eq!(parity.logit_difference, 0.0, "{name}: {parity:?}");
    }
}

/// A golden config with some keys changed, and fresh weights.
fn changed(set: &str, changes: &[(&str, serde_json::Value)]) -> Files {
    let json = std::fs::read_to_string(root().join("golden/sets").join(set).join("config.json"));
    // A bare Infinity is not JSON.
    let json = json.unwrap().replace("Infinity", r#"{"__float__": "Infinity"}"#);
    let mut config: serde_json::Value = serde_json::from_str(&json).unwrap();
    for (key, value) in changes {
        config[*key] = value.clone();
    }
    fresh(&config.to_string())
}

#[test]
fn what_llama_cpp_would_compute_otherwise_is_refused_with_the_reason() {
    use serde_json::json;
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    let attention = json!(["attention", "attention", "attention", "attention"]);
    let device = device();
    for (set, changes, reason) in [
        ("granitemoehybrid_dense", vec![("layer_types", attention)], "has the factor"),
        ("qwen2", vec![("rope_scaling", llama3.clone())], "a factor for each pair"),
        ("qwen3", vec![("rope_scaling", llama3.clone())], "a factor for each pair"),
        ("falcon_h1", vec![("rope_scaling", llama3)], "a factor for each pair"),
        ("mamba", vec![("use_conv_bias", json!(false))], "the convolution has no bias"),
        ("mamba2", vec![("use_conv_bias", json!(false))], "the convolution has no bias"),
        ("jamba", vec![("mamba_conv_bias", json!(false))], "the convolution has no bias"),
    ] {
        let files = changed(set, &changes);
        let checkpoint = open_files(set, &files).unwrap();
        let weights = checkpoint.weights(&device).unwrap();
        let error = gguf_bytes(&checkpoint, &weights, None).expect_err(set).report();
        assert!(error.contains(reason), "{set}: {error}");
    }
}

#[test]
fn a_vector_in_blocks_is_read_and_written_like_any_other() {
    let device = device();
    let json = r#"{"model_type": "llama", "vocab_size": 96, "hidden_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
        "attention_bias": true}"#;
    let files = fresh(json);
    let checkpoint = open_files("made", &files).unwrap();
    let weights = checkpoint.weights(&device).unwrap();
    let export = Export::gguf(&checkpoint, &weights).unwrap();
    let Content::Gguf(metadata, mut tensors) = export.gguf_content(None).unwrap() else {
        panic!("not GGUF");
    };
    let q8_0 = DType::Block(crate::tensor::quant::BlockType::Q8_0);
    let bias = tensors.iter_mut().find(|tensor| tensor.name.ends_with("attn_q.bias")).unwrap();
    let n_bytes = q8_0.n_bytes(bias.shape[0]).unwrap();
    bias.dtype = q8_0;
    bias.bytes = Box::new(move || Ok(vec![0; n_bytes].into()));
    let mut all = Vec::new();
    let mut sink = |bytes: &[u8]| {
        all.extend_from_slice(bytes);
        Ok(())
    };
    gguf::write(&metadata, &tensors, &mut sink).unwrap();
    let through = Checkpoint::from_gguf("m.gguf", Arc::new(all)).unwrap();
    let through_weights = through.weights(&device).unwrap();
    gguf_bytes(&through, &through_weights, None).unwrap();
    directory(&through, &through_weights, None);
}

#[test]
fn the_config_names_the_dtype_that_is_written() {
    let device = device();
    let files = changed("llama_gqa_untied", &[("torch_dtype", serde_json::json!("bfloat16"))]);
    let checkpoint = open_files("made", &files).unwrap();
    let weights = checkpoint.weights(&device).unwrap();
    for (dtype, name) in
        [(None, "float32"), (Some(DType::BF16), "bfloat16"), (Some(DType::F16), "float16")]
    {
        let out = directory(&checkpoint, &weights, dtype);
        let config: serde_json::Value =
            serde_json::from_slice((*out["config.json"]).as_ref()).unwrap();
        assert_eq!(config["torch_dtype"], name);
        let again = open_files("again", &out).unwrap();
        assert!(again.dtype_bytes().unwrap().contains_key(dtype.unwrap_or(DType::F32).name()));
    }
}
