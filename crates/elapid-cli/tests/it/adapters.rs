//! The real binary on adapters: from one form into the other and back, and what it refuses.

use crate::common::{elapid, refusal, root};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Output;

fn set(name: &str) -> PathBuf {
    root().join("golden/sets").join(name)
}

/// A fresh directory for one test.
fn scratch(name: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("adapters-{name}"));
    let _ = std::fs::remove_dir_all(&dir);
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

fn convert(input: &Path, output: &Path, base: Option<&Path>, more: &[&str]) -> Output {
    let mut args = vec![Path::new("convert"), input, output];
    if let Some(base) = base {
        args.extend([Path::new("--base"), base]);
    }
    args.extend(more.iter().map(Path::new));
    elapid(&args)
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Converts, and returns the receipt.
fn receipt(input: &Path, output: &Path, base: &Path) -> Value {
    let done = convert(input, output, Some(base), &["--json"]);
    assert!(done.status.success(), "{}: {}{}", input.display(), stdout(&done), stderr(&done));
    serde_json::from_str(&stdout(&done)).unwrap()
}

const PAIRS: [(&str, &str); 3] = [
    ("lora_llama_qv", "llama_gqa_untied"),
    ("lora_llama_all_rs", "llama_gqa_untied"),
    ("lora_mamba", "mamba"),
];

#[test]
fn adapters_of_peft_go_through_gguf_and_still_meet_the_reference() {
    let dir = scratch("through");
    for (name, base) in PAIRS {
        let (adapter, base) = (set(name).join("adapter"), set(base));
        let (file, back) = (dir.join(format!("{name}.gguf")), dir.join(name).join("adapter"));
        let to = receipt(&adapter, &file, &base);
        assert_ne!(to["parity"]["verdict"], "DIFFERENT", "{name}: {to}");
        std::fs::create_dir_all(dir.join(name)).unwrap();
        let from = receipt(&file, &back, &base);
        assert_ne!(from["parity"]["verdict"], "DIFFERENT", "{name}: {from}");
        for file in ["golden.safetensors", "golden.json"] {
            std::fs::copy(set(name).join(file), dir.join(name).join(file)).unwrap();
        }
        let beside = dir.join(base.file_name().unwrap());
        std::fs::create_dir_all(&beside).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(base.join(file), beside.join(file)).unwrap();
        }
        let check = elapid(&[Path::new("check"), &dir.join(name), Path::new("--json")]);
        let text = stdout(&check);
        let logits = text.lines().find(|line| line.contains("\"quantity\":\"logits\""));
        let logits = logits.unwrap_or_else(|| panic!("{name}: {text}{}", stderr(&check)));
        assert!(logits.contains("\"holds\":true"), "{name}: {logits}");
    }
    // Nothing was folded here, so that the very bytes come back.
    let read = |path: PathBuf| std::fs::read(path.join("adapter_model.safetensors")).unwrap();
    let was = read(set("lora_llama_qv").join("adapter"));
    assert!(numbers(&was) == numbers(&read(dir.join("lora_llama_qv/adapter"))));
}

/// The tensors of a safetensors file, by name.
fn numbers(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let entries = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let mut list: Vec<_> = entries
        .map(|(name, entry)| {
            let at = |idx: usize| 8 + n + entry["data_offsets"][idx].as_u64().unwrap() as usize;
            (name.clone(), bytes[at(0)..at(1)].to_vec())
        })
        .collect();
    list.sort();
    list
}

#[test]
fn a_directory_is_written_again_with_or_without_its_base() {
    let dir = scratch("again");
    let adapter = set("lora_llama_all_rs").join("adapter");
    for (name, base) in [("plain", None), ("known", Some(set("llama_gqa_untied")))] {
        let out = dir.join(name);
        let done = convert(&adapter, &out, base.as_deref(), &[]);
        assert!(done.status.success(), "{}", stderr(&done));
        assert!(stdout(&done).contains("parity  equal: "), "{}", stdout(&done));
        let config = std::fs::read_to_string(out.join("adapter_config.json")).unwrap();
        let config: Value = serde_json::from_str(&config).unwrap();
        let targets: Vec<&str> = config["target_modules"]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| name.as_str().unwrap())
            .collect();
        // Bare names are only safe where the base says that nothing else has them.
        assert_eq!(targets.contains(&"q_proj"), base.is_some(), "{targets:?}");
        assert_eq!(config["use_rslora"], true);
        let again = refusal(&convert(&adapter, &out, base.as_deref(), &[]));
        assert!(again.contains("already exists"), "{again}");
        assert!(convert(&adapter, &out, base.as_deref(), &["--force"]).status.success());
        let left = std::fs::read_dir(&out).unwrap().count();
        assert_eq!(left, 2, "files beside the adapter");
    }
}

#[test]
fn a_gguf_adapter_asks_for_its_base_and_refuses_another() {
    let dir = scratch("base");
    let (adapter, base) = (set("lora_llama_qv").join("adapter"), set("llama_gqa_untied"));
    let file = dir.join("a.gguf");
    let text = refusal(&convert(&adapter, &file, None, &[]));
    assert!(text.contains("--base MODEL") && !file.exists(), "{text}");
    receipt(&adapter, &file, &base);
    let text = refusal(&convert(&file, &dir.join("back"), None, &[]));
    assert!(text.contains("--base MODEL"), "{text}");
    let text = refusal(&convert(&file, &dir.join("back"), Some(&set("mamba")), &[]));
    assert!(text.contains("general.architecture"), "{text}");
    let text = refusal(&convert(&adapter, &dir.join("b.gguf"), Some(&set("mamba")), &[]));
    assert!(text.contains("q_proj"), "{text}");
    assert!(!dir.join("back").exists() && !dir.join("b.gguf").exists(), "something was written");
}

#[test]
fn info_says_what_an_adapter_is() {
    let dir = scratch("info");
    let adapter = set("lora_llama_all_rs").join("adapter");
    let file = dir.join("a.gguf");
    receipt(&adapter, &file, &set("llama_gqa_untied"));
    for (path, form) in [(&adapter, "peft"), (&file, "gguf")] {
        let done = elapid(&[Path::new("info"), path]);
        let text = stdout(&done);
        assert!(done.status.success() && text.contains(&format!("lora ({form})")), "{text}");
        assert!(text.contains("ranks   2, 4"), "{text}");
        let json = stdout(&elapid(&[Path::new("info"), path, Path::new("--json")]));
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["n_modules"], 28, "{json}");
        assert_eq!(json["form"], form);
    }
}

#[test]
fn tensors_in_a_pickle_are_refused_with_what_to_do() {
    let dir = scratch("pickle");
    let config = set("lora_llama_qv").join("adapter/adapter_config.json");
    std::fs::copy(config, dir.join("adapter_config.json")).unwrap();
    std::fs::write(dir.join("adapter_model.bin"), b"PK").unwrap();
    let text = refusal(&convert(&dir, &dir.join("out"), None, &[]));
    assert!(text.contains("pickle") && text.contains("save it again"), "{text}");
}

/// How configs end that may end either way.
const DECIDED: [(&str, &str); 4] =
    [("fan", "reject"), ("bias_all", "reject"), ("save", "reject"), ("init_pissa", "reject")];

#[test]
fn hostile_configs_end_as_they_should() {
    let cases = root().join("../shared/realdata/malformed/files");
    let Ok(list) = std::fs::read_to_string(cases.join("cases.jsonl")) else {
        eprintln!("skipped: no hostile files at {}", cases.display());
        return;
    };
    let dir = scratch("hostile");
    let tensors = set("lora_llama_qv").join("adapter/adapter_model.safetensors");
    let mut n_cases = 0;
    for case in list.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        if case["kind"] != "adapter" {
            continue;
        }
        n_cases += 1;
        let config = cases.join(case["file"].as_str().unwrap());
        let name = config.parent().unwrap().file_name().unwrap().to_str().unwrap().to_string();
        let adapter = dir.join(&name);
        std::fs::create_dir_all(&adapter).unwrap();
        std::fs::copy(&config, adapter.join("adapter_config.json")).unwrap();
        std::fs::copy(&tensors, adapter.join("adapter_model.safetensors")).unwrap();
        let out = dir.join(format!("{name}.gguf"));
        let done = convert(&adapter, &out, Some(&set("llama_gqa_untied")), &[]);
        let expect = match case["expect"].as_str().unwrap() {
            "either" => DECIDED.iter().find(|pair| pair.0 == name).unwrap().1,
            other => other,
        };
        match expect {
            "accept" => assert!(done.status.success(), "{name}: {}", stderr(&done)),
            _ => println!("{name}: {}", refusal(&done).lines().next().unwrap()),
        }
    }
    assert!(n_cases >= 16, "{n_cases} cases");
}
