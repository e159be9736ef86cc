//! The real binary on real model directories: golden values, and what it says of broken ones.

use crate::common::{elapid, refusal, root};
use std::path::{Path, PathBuf};
use std::process::Output;

fn check(dir: &Path) -> Output {
    elapid(&["check", dir.to_str().unwrap(), "--json"])
}

fn sets(of: &Path) -> Vec<PathBuf> {
    let mut list: Vec<PathBuf> = match std::fs::read_dir(of) {
        Ok(entries) => entries.map(|entry| entry.unwrap().path()).collect(),
        Err(_) => Vec::new(),
    };
    list.retain(|path| path.join("golden.safetensors").exists());
    list.sort();
    list
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// What a check of this set says; all of it holds.
fn assert_all_hold(dir: &Path) -> String {
    let output = check(dir);
    let text = stdout(&output);
    let failed: Vec<&str> = text.lines().filter(|line| !line.contains("\"holds\":true")).collect();
    assert!(output.status.success(), "{}: {failed:?} {}", dir.display(), stderr(&output));
    for quantity in ["\"logits\"", "\"loss\"", "\"grad."] {
        assert!(text.contains(quantity), "{}: {quantity} was not compared", dir.display());
    }
    text
}

#[test]
fn every_golden_set_of_the_project_is_met() {
    let sets = sets(&root().join("golden/sets"));
    assert!(sets.len() >= 25, "{} sets", sets.len());
    for dir in sets {
        let text = assert_all_hold(&dir);
        assert!(text.contains("adamw mean") && text.contains("adamw far"), "{}", dir.display());
        let n_grads = text.lines().filter(|line| line.contains("\"quantity\":\"grad.")).count();
        assert_eq!(n_grads, n_trainable(&dir), "{}: gradients", dir.display());
    }
}

#[test]
fn every_golden_set_of_the_project_is_met_on_a_graphics_processor() {
    if !stdout(&elapid(&["info", "--devices"])).contains("wgpu:0") {
        eprintln!("skip: wgpu finds no GPU");
        return;
    }
    let sets = sets(&root().join("golden/sets"));
    std::thread::scope(|scope| {
        for half in sets.chunks(sets.len().div_ceil(2)) {
            scope.spawn(move || {
                for dir in half {
                    let output = elapid(&["check", dir.to_str().unwrap(), "--device", "wgpu"]);
                    let (text, told) = (stdout(&output), stderr(&output));
                    assert!(output.status.success(), "{}: {text} {told}", dir.display());
                }
            });
        }
    });
}

/// Stored tensors of a set that can be trained: of its adapter where it has one.
fn n_trainable(dir: &Path) -> usize {
    let adapter = dir.join("adapter/adapter_model.safetensors");
    let path = if adapter.exists() { adapter } else { dir.join("model.safetensors") };
    let names = header(&std::fs::read(path).unwrap()).1;
    // The bias of the choice of experts is moved by the load, not by a gradient.
    names.iter().filter(|name| !name.ends_with("e_score_correction_bias")).count()
}

type Header = serde_json::Map<String, serde_json::Value>;

/// Header of a safetensors file, and the names of its tensors.
fn header(bytes: &[u8]) -> (Header, Vec<String>) {
    let n_header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Header = serde_json::from_slice(&bytes[8..8 + n_header]).unwrap();
    let names = header.keys().filter(|key| *key != "__metadata__").cloned().collect();
    (header, names)
}

#[test]
fn golden_sets_kept_outside_the_project_are_met_where_they_are_there() {
    let sets = sets(&root().join("../shared/golden/sets"));
    if sets.is_empty() {
        eprintln!("skipped: ../shared/golden/sets is not there");
    }
    for dir in sets {
        assert_all_hold(&dir);
    }
}

/// A copy of a set that a test may spoil.
fn copy_of(set: &str, name: &str) -> PathBuf {
    let to = std::env::temp_dir().join(format!("elapid-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&to).unwrap();
    for entry in std::fs::read_dir(root().join("golden/sets").join(set)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
    to
}

fn edit_config(dir: &Path, from: &str, to: &str) {
    let path = dir.join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{from} is in {text}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

#[test]
fn one_changed_weight_is_out_of_tolerance_and_exits_with_1() {
    let dir = copy_of("llama_gqa_untied", "weight");
    let path = dir.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 0x80;
    std::fs::write(&path, bytes).unwrap();
    let output = elapid(&["check", dir.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("FAIL    logits"), "{}", stdout(&output));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_wrong_eps_is_out_of_tolerance() {
    let dir = copy_of("llama_gqa_untied", "eps");
    edit_config(&dir, "\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": 3e-03");
    assert_eq!(check(&dir).status.code(), Some(1));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn errors_name_what_is_wrong_and_what_to_do() {
    let cases = [
        ("family", "\"model_type\": \"llama\"", "\"model_type\": \"xyz\"", "supported are mamba"),
        ("shape", "\"intermediate_size\": 32", "\"intermediate_size\": 33", "has shape [32, 24]"),
        (
            "missing",
            "\"mlp_bias\": false",
            "\"mlp_bias\": true",
            "hold no tensor `model.layers.0.mlp",
        ),
        ("extra", "\"num_hidden_layers\": 4", "\"num_hidden_layers\": 3", "belongs to no layer"),
        ("json", "\"model_type\"", "model_type", "not JSON"),
    ];
    for (name, from, to, part) in cases {
        let dir = copy_of("llama_gqa_untied", name);
        edit_config(&dir, from, to);
        let output = check(&dir);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{name}: {text}");
        assert!(text.starts_with("error: ") && text.contains("hint: "), "{name}: {text}");
        assert!(text.contains(part), "{name}: {text}");
        std::fs::remove_dir_all(dir).unwrap();
    }
}

#[test]
fn a_device_that_is_not_there_is_an_error_with_a_hint() {
    let dir = root().join("golden/sets/llama_gqa_untied");
    for (name, problem) in [("wgpu:99", "no wgpu adapter 99"), ("tpu", "no device `tpu`")] {
        let output = elapid(&["check", dir.to_str().unwrap(), "--device", name]);
        assert_eq!(output.status.code(), Some(1));
        let told = stderr(&output);
        assert!(told.contains(problem) && told.contains("hint: "), "{told}");
    }
}

#[test]
fn sharded_weights_load_and_a_missing_shard_is_named() {
    let dir = copy_of("mamba", "shards");
    let one = dir.join("model.safetensors");
    let (first, second) = split_in_two(&std::fs::read(&one).unwrap());
    std::fs::remove_file(&one).unwrap();
    let mut map = serde_json::Map::new();
    for (file, (bytes, names)) in [("model-1.safetensors", first), ("model-2.safetensors", second)]
    {
        std::fs::write(dir.join(file), bytes).unwrap();
        map.extend(names.into_iter().map(|name| (name, file.into())));
    }
    let index = serde_json::json!({"weight_map": map}).to_string();
    std::fs::write(dir.join("model.safetensors.index.json"), index).unwrap();
    assert_all_hold(&dir);
    std::fs::remove_file(dir.join("model-2.safetensors")).unwrap();
    assert!(stderr(&check(&dir)).contains("model-2.safetensors"));
    std::fs::remove_dir_all(dir).unwrap();
}

/// Two safetensors files that hold the tensors of one: (bytes, names) of each.
#[allow(clippy::type_complexity)]
fn split_in_two(bytes: &[u8]) -> ((Vec<u8>, Vec<String>), (Vec<u8>, Vec<String>)) {
    let n_header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (header, names) = header(bytes);
    let write = |names: &[String]| {
        let (mut new_header, mut data) = (serde_json::Map::new(), Vec::new());
        for name in names {
            let mut entry = header[name].clone();
            let at = |i: usize| entry["data_offsets"][i].as_u64().unwrap() as usize + 8 + n_header;
            let range = at(0)..at(1);
            let begin = data.len();
            data.extend_from_slice(&bytes[range]);
            entry["data_offsets"] = serde_json::json!([begin, data.len()]);
            new_header.insert(name.clone(), entry);
        }
        let text = serde_json::Value::Object(new_header).to_string();
        let mut out = (text.len() as u64).to_le_bytes().to_vec();
        out.extend_from_slice(text.as_bytes());
        out.extend(data);
        (out, names.to_vec())
    };
    let (a, b) = names.split_at(names.len() / 2);
    (write(a), write(b))
}

#[test]
fn info_tells_of_the_machine_and_of_a_model() {
    let machine = stdout(&elapid(&["info"]));
    assert!(machine.contains("device  cpu"), "{machine}");
    let dir = root().join("golden/sets/jamba");
    let model = stdout(&elapid(&["info", dir.to_str().unwrap()]));
    assert!(model.contains("model   jamba: jamba, 4 layers"), "{model}");
    let json = stdout(&elapid(&["info", dir.to_str().unwrap(), "--json"]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["family"], "jamba");
}

#[test]
fn kernels_are_listed_with_their_bindings_and_printed() {
    let list = elapid(&["kernels"]);
    let text = String::from_utf8(list.stdout).unwrap();
    assert!(list.status.success() && text.contains("ops/scale.wgsl"), "{text}");
    for name in [
        "scale_columns",
        "head_loss_rows",
        "ssd_walk",
        "@binding(1)<storage, read_write>",
        "Params p",
    ] {
        assert!(text.contains(name), "{name}");
    }
    let one = String::from_utf8(elapid(&["kernels", "ops/scale.cu"]).stdout).unwrap();
    assert!(one.contains("KERNEL scale_columns("), "{one}");
    assert!(refusal(&elapid(&["kernels", "nothing"])).contains("no kernel is called nothing"));
}
