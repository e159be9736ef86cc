//! The real binary converts, quantises and tokenizes; its receipts and its refusals.

use crate::common::{self, Scratch, elapid, root};
use serde_json::Value;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// The one JSON object that a command prints.
fn json(args: &[&str]) -> Value {
    let output = elapid(args);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn refusal(args: &[&str]) -> String {
    common::refusal(&elapid(args))
}

fn set(name: &str) -> String {
    root().join("golden/sets").join(name).to_str().unwrap().to_string()
}

fn same(a: &str, b: &str) -> bool {
    std::fs::read(a).unwrap() == std::fs::read(b).unwrap()
}

#[test]
fn a_model_goes_through_every_form_and_back_and_each_step_has_a_receipt() {
    let dir = Scratch::new("forms");
    let source = set("jamba");
    let (gguf, package) = (dir.path("m.gguf"), dir.path("m.elapid"));
    let (unpacked, back) = (dir.path("package"), dir.path("back"));
    let steps: [(&str, &str, &[&str]); 4] = [
        (&source, &gguf, &[]),
        (&gguf, &package, &[]),
        (&package, &unpacked, &["--to", "package"]),
        (&unpacked, &back, &[]),
    ];
    for (from, to, more) in steps {
        let receipt = json(&[&["convert", from, to, "--json"], more].concat());
        let parity = &receipt["parity"];
        assert!(parity["logit_difference"].as_f64().unwrap() < 1e-4, "{receipt}");
        assert_eq!(parity["top1"], 1.0, "{receipt}");
    }
    assert!(same(&format!("{source}/model.safetensors"), &format!("{back}/model.safetensors")));
    assert!(Path::new(&unpacked).join("manifest.json").exists());
    assert!(!Path::new(&back).join("manifest.json").exists());
    for path in [&gguf, &package, &unpacked, &back] {
        assert_eq!(json(&["info", path, "--json"])["family"], "jamba");
    }
}

#[test]
fn a_gguf_file_that_llama_cpp_does_not_load_is_said_to_be_one() {
    let dir = Scratch::new("own-gguf");
    for (name, is_ours) in [("mamba3_siso", true), ("zamba", true), ("jamba", false)] {
        let output = elapid(&["convert", &set(name), &dir.path(&format!("{name}.gguf"))]);
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{told}");
        assert_eq!(told.contains("llama.cpp does not load this file"), is_ours, "{name}: {told}");
    }
}

#[test]
fn quantising_says_how_far_apart_the_two_are() {
    let dir = Scratch::new("quantize");
    let out = dir.path("small.gguf");
    let output = elapid(&["quantize", &set("llama_gqa_untied"), &out, "--type", "q8_0"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("parity  close: 4 prompts, 192 tokens"), "{text}");
    assert!(text.contains("write   ") && text.contains("gguf"), "{text}");
    let hint = refusal(&["quantize", &set("llama_gqa_untied"), &out, "--type", "q9", "--force"]);
    assert!(hint.contains("q4_k_m"), "{hint}");
    assert!(refusal(&["quantize", &out, &dir.path("d"), "--type", "q8_0"]).contains("name a file"));
}

#[test]
fn what_is_there_is_replaced_only_by_force_and_then_wholly() {
    let dir = Scratch::new("force");
    let out = dir.path("m");
    json(&["convert", &set("mamba"), &out, "--json"]);
    std::fs::write(format!("{out}/tokenizer.json"), "{}").unwrap();
    std::fs::write(format!("{out}/notes.txt"), "mine").unwrap();
    let text = refusal(&["convert", &set("llama_gqa_untied"), &out]);
    assert!(text.contains("already exists") && text.contains("--force"), "{text}");
    json(&["convert", &set("llama_gqa_untied"), &out, "--force", "--json"]);
    assert!(!Path::new(&out).join("tokenizer.json").exists(), "of the old model");
    assert!(Path::new(&out).join("notes.txt").exists(), "of nobody's model");
    assert!(
        refusal(&["convert", &set("mamba"), &dir.path("none/m.gguf")]).contains("no directory")
    );
    assert!(refusal(&["convert", &set("mamba"), &dir.path("m.bin")]).contains("output format"));
}

fn tokenize(args: &[&str], input: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
    command.arg("tokenize").args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_trained_tokenizer_gives_text_back_byte_for_byte() {
    let dir = Scratch::new("tokenizer");
    let (corpus, out) = (dir.path("corpus.txt"), dir.path("tokenizer.json"));
    std::fs::write(&corpus, "fn main() { let x = 1; }\n".repeat(50)).unwrap();
    let receipt = json(&["train-tokenizer", &corpus, "--vocab", "270", "--out", &out, "--json"]);
    assert_eq!(receipt["n_vocab"], 270, "{receipt}");
    for text in ["", " ", "fn main() {\r\n\t¿qué? 你好 🚀<|endoftext|>", "\n\n x "] {
        for special in [&[][..], &["--special"]] {
            let ids = tokenize(&[&[out.as_str()], special].concat(), text);
            assert_eq!(ids.lines().count(), 1, "one line of ids");
            assert_eq!(tokenize(&[&out, "--decode"], &ids), text);
        }
    }
    let plain = tokenize(&[&out], "<|endoftext|>");
    assert!(plain.split_whitespace().count() > 1, "{plain}");
    assert_eq!(tokenize(&[&out, "--special"], "<|endoftext|>").trim(), "0");
}
