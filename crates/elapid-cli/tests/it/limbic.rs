//! `elapid limbic`, and `elapid plan --generate`.

use crate::common::{Scratch, elapid, refusal, root};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::io::Write;
use std::process::{Command, Stdio};

fn answer(args: &[&str]) -> Value {
    let output = elapid(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Sequences of eight samples: the first input raises valence, by then and one sample later.
fn samples() -> String {
    let mut text = String::new();
    for at in 0..160 {
        let pulse = |at: usize| if at % 8 != 7 && (at * 7 % 5) < 2 { 1.0 } else { 0.0 };
        let before = if at % 8 == 0 { 0.0 } else { pulse(at - 1) };
        let sample = json!({
            "input": [pulse(at), 0.5], "state": {"arousal": 0.4}, "reward": pulse(at),
            "target": {"valence": 0.3 * pulse(at) + 0.2 * before}, "sequence": at / 8,
        });
        writeln!(text, "{sample}").unwrap();
    }
    text
}

#[test]
fn a_head_is_trained_measured_and_moves_a_state() {
    let dir = Scratch::new("limbic");
    let (data, head) = (dir.path("samples.jsonl"), dir.path("head.safetensors"));
    dir.file("samples.jsonl", samples().as_bytes());
    let train = ["limbic", "train", &data, "--out", &head, "--device", "cpu", "--json"];
    let told = answer(&train);
    assert_eq!((&told["n_samples"], &told["n_sequences"]), (&json!(160), &json!(20)));
    let held_out = &told["held_out"];
    let loss = |key: &str| held_out[key].as_f64().unwrap();
    assert!(loss("loss") < 0.2 * loss("loss_before"), "{told}");
    assert_eq!(held_out["n_samples"], 16);
    assert!(refusal(&elapid(&train[..7])).contains("already exists"));
    let first = std::fs::read(&head).unwrap();
    answer(&[&train[..], &["--force"]].concat());
    assert!(first == std::fs::read(&head).unwrap(), "the same samples give another head");
    let score = answer(&["limbic", "eval", &head, &data, "--json"]);
    assert!(score["loss"].as_f64().unwrap() < 0.2 * score["loss_still"].as_f64().unwrap());

    let step = ["limbic", "step", &head, "--json", "--input", "1,0.5"];
    let one = answer(&step);
    let valence = one["state"]["valence"].as_f64().unwrap();
    assert!((0.15..0.45).contains(&valence), "{one}");
    let hidden: Vec<String> =
        one["hidden"].as_array().unwrap().iter().map(Value::to_string).collect();
    let two = answer(&[&step[..5], &["0,0.5", "--hidden", &hidden.join(",")]].concat());

    // The same by lines, with one that is wrong between.
    let mut child = Command::new(env!("CARGO_BIN_EXE_elapid"))
        .args(["limbic", "step", &head, "--personality", "openness=90"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = "{\"input\": [1, 0.5], \"state\": {}}\n\n{\"input\": [1]}\n{\"inputs\": 1}\n\
        {\"input\": [0, 0.5], \"state\": {}}\n{\"input\": [1, 0.5], \"reset\": true}\n";
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let told: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!((&told[0], &told[3]), (&one, &two));
    let errors = [&told[1], &told[2]].map(|told| told["error"].as_str().unwrap());
    assert_eq!(errors[0], "line 3: the input has 1 numbers, the head takes 2");
    assert!(errors[1].starts_with("line 4: unknown field `inputs`"), "{}", errors[1]);
    // From the set-point of the personality: 0.5 + 0.35 * 0.8.
    assert!(told[4]["state"]["curiosity"].as_f64().unwrap() > 0.7, "{}", told[4]);
}

#[test]
fn what_is_wrong_with_samples_and_heads_is_told() {
    let dir = Scratch::new("limbic-wrong");
    let (data, head) = (dir.path("samples.jsonl"), dir.path("head.safetensors"));
    let train = ["limbic", "train", &data, "--out", &head, "--device", "cpu", "--epochs", "1"];
    let good = samples();
    for (text, part) in [
        (good.replacen("0.5]", "]", 1), "samples.jsonl:1: "),
        (good.clone() + "\n{\"input\": [1]}\n", "samples.jsonl:162: missing field `state`"),
        (
            good.clone() + &good.replace(",0.5]", ",0.5,1]"),
            ":161: 3 inputs, the first sample has 2",
        ),
        ("\n \n".into(), "holds no samples"),
    ] {
        dir.file("samples.jsonl", text.as_bytes());
        let words = refusal(&elapid(&train));
        assert!(words.contains(part), "{words}");
    }
    dir.file("samples.jsonl", good.as_bytes());
    assert!(elapid(&train).status.success());
    let mut bytes = std::fs::read(&head).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    dir.file("head.safetensors", &bytes);
    let words = refusal(&elapid(&["limbic", "eval", &head, &data]));
    assert!(words.contains("its checksum is wrong"), "{words}");
}

#[test]
fn the_memory_of_generation_is_told_by_context() {
    for (set, is_cache) in [("llama_gqa_untied", true), ("mamba2", false), ("jamba", true)] {
        let path = root().join("golden/sets").join(set);
        let model = path.to_str().unwrap();
        let args = ["plan", "--model", model, "--generate", "--json", "--device", "cpu"];
        let told = answer(&[&args[..], &["-c", "300"]].concat());
        let number = |value: &Value| value.as_u64().unwrap();
        let info = answer(&["info", model, "--json"]);
        assert_eq!(told["weight_bytes_stored"], info["weight_bytes"]);
        let asked = told["contexts"].as_array().unwrap().iter().find(|it| it["context"] == 300);
        let asked = asked.unwrap();
        // In whole pages.
        let cache = 384 * number(&info["state_bytes_per_token"]);
        assert_eq!(cache > 0, is_cache);
        assert_eq!(number(&asked["state_bytes"]), number(&info["state_bytes"]) + cache);
        let parts = [&told["weight_bytes"], &told["program_bytes"], &told["activation_bytes"]];
        let sum: u64 = parts.iter().map(|part| number(part)).sum();
        let of_context = number(&asked["state_bytes"]) + number(&asked["snapshot_bytes"]);
        assert_eq!(number(&asked["total_bytes"]), sum + of_context);
        let half = answer(&[&args[..], &["-c", "300", "--cache-type", "f16"]].concat());
        let half = half["contexts"].as_array().unwrap().iter().find(|it| it["context"] == 300);
        let half = number(&half.unwrap()["state_bytes"]);
        assert_eq!(half, number(&info["state_bytes"]) + cache / 2);
    }
    assert!(!elapid(&["plan", ".", "--generate"]).status.success());
}
