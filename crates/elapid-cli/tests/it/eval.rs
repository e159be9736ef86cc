//! The real binary measures, compares and says by its exit code which model is better.

use crate::common::rng::Rng;
use crate::common::{self, Scratch, elapid, root, tensors};
use elapid::{
    Batches, BpeTrainer, Device, Document, Method, Model, Outcome, Session, Settings, Tokenizer,
};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

fn stdout(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{stderr}");
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The one JSON object that a command prints, and its exit code.
fn json(args: &[&str]) -> (Value, i32) {
    let output = elapid(&[args, &["--json"]].concat());
    (serde_json::from_str(&stdout(&output)).unwrap(), output.status.code().unwrap())
}

fn refusal(args: &[&str]) -> String {
    common::refusal(&elapid(args))
}

/// A made-up word.
fn word(file: usize, n: usize) -> String {
    let rng = Rng::new(file as u64, 0);
    (0..6).map(|k| char::from(b'a' + rng.below((6 * n + k) as u64, 26) as u8)).collect()
}

/// Twelve files of code and three of prose, alike in nothing but their form.
fn texts() -> Vec<(String, String)> {
    let code = |n: usize| {
        let line = |k| format!("    let {} = {}({k});\n", word(n, 2 * k), word(n, 2 * k + 1));
        let body: String = (0..8 + 3 * n).map(line).collect();
        (format!("code{n}.rs"), format!("fn {}() {{\n{body}}}\n", word(n, 999)))
    };
    let prose = |n: usize| {
        let sentence = |k| format!("The {} went to the {}. ", word(n, k), word(n, 100 + k));
        let body: String = (0..9).map(sentence).collect();
        (format!("notes{n}.md"), format!("# Notes {n}\n\n{body}\n"))
    };
    (0..12).map(code).chain((20..23).map(prose)).collect()
}

const SPECIALS: [&str; 4] = ["<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];

struct World {
    dir: Scratch,
    /// A directory of texts.
    data: String,
    /// A model that has learned nothing.
    old: String,
    /// The same after a few steps.
    new: String,
}

fn world(name: &str) -> World {
    let dir = Scratch::new(name);
    std::fs::create_dir_all(dir.path("data")).unwrap();
    let texts = texts();
    for (name, text) in &texts {
        dir.file(&format!("data/{name}"), text.as_bytes());
    }
    let trainer = BpeTrainer {
        n_vocab: 320,
        min_count: 2,
        specials: SPECIALS.iter().map(|token| token.to_string()).collect(),
    };
    let mut list = texts.iter().map(|(_, text)| text.as_str());
    let tokenizer = Tokenizer::train(&trainer, "gpt-2", &mut list, &mut |_, _| {}).unwrap();
    let config = json!({
        "model_type": "elapid", "vocab_size": tokenizer.n_vocab(), "d_model": 16,
        "layers": ["attention"], "attention": {"n_head": 2, "n_kv_head": 1, "d_head": 8},
        "dense": {"d_ff": 32}, "tied": true, "n_ctx": 128,
    });
    let files = vec![("tokenizer.json", tokenizer.to_json().unwrap().into_bytes())];
    let model = Model::fresh("small", config.to_string(), files).unwrap();
    let mut session = Session::new(model, &Device::cpu(1).unwrap()).unwrap();
    session.adapt(&Method::Full, None, 1).unwrap();
    let (old, new) = (dir.path("old"), dir.path("new"));
    session.save(&old).unwrap();
    learn(&mut session, &texts);
    session.save(&new).unwrap();
    World { data: dir.path("data"), dir, old, new }
}

fn learn(session: &mut Session, texts: &[(String, String)]) {
    let documents: Vec<Document> =
        texts.iter().map(|(name, text)| Document::whole(name.as_str(), text.as_str())).collect();
    let batches = Batches { context: 64, n_rows: 4, ..Batches::default() };
    let settings = Settings { n_steps: 30, lr: 0.01, spike: None, ..Settings::default() };
    let mut training = session.begin(&documents, &batches, &settings).unwrap();
    while !training.is_done() {
        assert!(matches!(training.step().unwrap(), Outcome::Made { .. }));
    }
    session.end(training);
}

/// An adapter of one matrix of the world's models; all its numbers are `b` and 1.
fn adapter(world: &World, name: &str, b: f32) -> String {
    let path = world.dir.path(name);
    let up = (0..16).map(|n| b * n as f32).collect();
    tensors::adapter(Path::new(&path), "layers.0.feed_forward.down", vec![1.0; 32], up);
    path
}

#[test]
fn the_exit_code_says_whether_the_model_is_better() {
    let w = world("eval-compare");
    let better = elapid(&["eval", &w.new, &w.data, "--compare", &w.old]);
    assert_eq!(better.status.code(), Some(0), "{}", String::from_utf8_lossy(&better.stderr));
    let text = stdout(&better);
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("compare better: "), "{text}");
    assert!(last.contains(&format!("fewer bits per byte than {} (95% interval ", w.old)));
    assert!(last.ends_with(" for documents like these 15)"), "{last}");
    let (worse, code) = json(&["eval", &w.old, &w.data, "--compare", &w.new]);
    assert_eq!((code, &worse["compare"]["verdict"]), (3, &json!("worse")));
    assert!(worse["compare"]["gain"].as_f64().unwrap() < 0.0);
    let (same, code) = json(&["eval", &w.new, &w.data, "--compare", &w.new]);
    assert_eq!((code, &same["compare"]["verdict"]), (3, &json!("no difference")));
    assert_eq!(same["compare"]["gain"], 0.0);
}

#[test]
fn adapters_are_put_on_and_compared() {
    let w = world("eval-adapter");
    let (nothing, harm) = (adapter(&w, "nothing", 0.0), adapter(&w, "harm", 3.0));
    let (found, code) = json(&["eval", &w.new, &w.data, "--compare", &nothing]);
    assert_eq!((code, &found["compare"]["verdict"]), (3, &json!("no difference")));
    let (found, code) = json(&["eval", &w.new, &w.data, "--compare", &harm]);
    assert_eq!((code, &found["compare"]["verdict"]), (0, &json!("better")));
    let of_other = found["compare"]["bits_per_byte"].as_f64().unwrap();
    let (alone, _) = json(&["eval", &w.new, &w.data, "--adapter", &harm]);
    assert_eq!(alone["bits_per_byte"].as_f64().unwrap(), of_other);
    let (back, code) = json(&["eval", &w.new, &w.data, "--adapter", &harm, "--compare", &w.new]);
    assert_eq!((code, &back["compare"]["verdict"]), (3, &json!("worse")));
    assert!(
        refusal(&["eval", &w.new, &w.data, "--adapter", &w.old]).contains("there is no adapter at")
    );
}

#[test]
fn languages_files_and_the_total_agree() {
    let w = world("eval-figures");
    let (found, _) = json(&["eval", &w.new, &w.data, "--context", "32", "--threads", "1"]);
    let sum = |list: &str, key: &str| -> f64 {
        found[list].as_array().unwrap().iter().map(|item| item[key].as_f64().unwrap()).sum()
    };
    for key in ["n_tok", "n_bytes"] {
        let total = found[key].as_f64().unwrap();
        assert_eq!((sum("languages", key), sum("files", key)), (total, total));
    }
    assert_eq!((&found["n_files"], found["files"].as_array().unwrap().len()), (&json!(15), 15));
    assert_eq!(found["languages"][0]["language"], "Rust");
    assert_eq!((&found["context"], &found["overlap"]), (&json!(32), &json!(16)));
    let n_bytes: usize = texts().iter().map(|(_, text)| text.len()).sum();
    assert_eq!(found["n_bytes"].as_u64().unwrap() as usize, n_bytes);
    let (low, high) = (found["interval"][0].as_f64().unwrap(), found["interval"][1].as_f64());
    let bits = found["bits_per_byte"].as_f64().unwrap();
    assert!(low < bits && bits < high.unwrap());
    // The same bits on two threads.
    let (again, _) = json(&["eval", &w.new, &w.data, "--context", "32", "--threads", "2"]);
    assert_eq!(again, found);
    // No window reaches farther back than it may: less context, more bits.
    let (short, _) = json(&["eval", &w.new, &w.data, "--context", "2", "--overlap", "0"]);
    assert_eq!(short["n_tok"], found["n_tok"]);
    assert_ne!(short["bits_per_byte"], found["bits_per_byte"]);
    let list = stdout(&elapid(&["eval", &w.new, &w.data, "--files"]));
    let bits: Vec<f64> = list
        .lines()
        .filter(|line| line.starts_with("file    "))
        .map(|line| line.split(" bits per byte").next().unwrap())
        .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(bits.len() == 15 && bits.windows(2).all(|pair| pair[0] >= pair[1]), "{bits:?}");
    assert_eq!(list.lines().filter(|line| line.starts_with("eval    ")).count(), 3);
}

#[test]
fn one_file_records_and_what_is_held_out_are_measured() {
    let w = world("eval-sources");
    let file = format!("{}/code11.rs", w.data);
    let (one, _) = json(&["eval", &w.new, &file]);
    assert_eq!((&one["n_files"], &one["files"][0]["name"]), (&json!(1), &json!("code11.rs")));
    assert_eq!((&one["resampled"], &one["interval"]), (&Value::Null, &Value::Null));
    let (compared, code) = json(&["eval", &w.new, &file, "--compare", &w.old]);
    assert_eq!((code, &compared["compare"]["verdict"]), (3, &json!("too little to tell")));
    assert!(compared["compare"]["gain"].as_f64().unwrap() > 0.0);
    let long: String = texts().into_iter().map(|(_, text)| text).collect();
    let long = w.dir.file("long.rs", long.as_bytes());
    let (whole, _) = json(&["eval", &w.new, long.to_str().unwrap()]);
    assert_eq!(whole["resampled"], "blocks");
    assert!(whole["interval"][0].as_f64().unwrap() > 0.0);
    let (held, _) = json(&["eval", &w.new, &w.data, "--held-out"]);
    let n_held = held["n_files"].as_u64().unwrap();
    assert!((3..=5).contains(&n_held), "{n_held}");
    let languages = held["languages"].as_array().unwrap();
    assert_eq!(languages.len(), 2, "each language gives its share");
    let (tail, _) = json(&["eval", &w.new, &file, "--held-out"]);
    assert!(tail["n_bytes"].as_u64().unwrap() < one["n_bytes"].as_u64().unwrap() / 4);
    let lines =
        "{\"prompt\": \"fn \", \"completion\": \"main() {}\"}\n{\"text\": \"let x = 1;\"}\n";
    let records = w.dir.file("r.jsonl", lines.as_bytes());
    let (found, _) = json(&["eval", &w.new, records.to_str().unwrap()]);
    assert_eq!(found["n_files"], 2);
    assert_eq!(found["files"][0]["n_bytes"], 9, "only the completion counts");
    let text = stdout(&elapid(&["eval", &w.new, records.to_str().unwrap()]));
    assert!(text.contains("2 records"), "{text}");
}

#[test]
fn holes_are_cut_and_counted() {
    let w = world("eval-fim");
    let (found, _) = json(&["eval", &w.new, &w.data, "--fim", "2", "--context", "64"]);
    let fim = &found["fim"];
    assert_eq!(fim["n_holes"], 24, "two in each file of code, none in two lines of prose");
    assert_eq!(fim["skipped"].as_array().unwrap().len(), 3);
    let text = stdout(&elapid(&["eval", &w.new, &w.data, "--fim", "2", "--context", "64"]));
    assert!(text.contains(" of 24 holes filled exactly"), "{text}");
}

#[test]
fn what_cannot_be_measured_is_refused_with_a_hint() {
    let w = world("eval-refusals");
    let bare = root().join("golden/sets/mamba");
    assert!(refusal(&["eval", bare.to_str().unwrap(), &w.data]).contains("holds no tokenizer"));
    refusal(&["eval", &w.new, &w.dir.path("nowhere")]);
    refusal(&["eval", &w.dir.path("nowhere"), &w.data]);
    refusal(&["eval", &w.new, &w.data, "--compare", &w.dir.path("nowhere")]);
    let text = refusal(&["eval", &w.new, &w.data, "--context", "8", "--overlap", "8"]);
    assert!(text.contains("overlap by 8"), "{text}");
}

#[test]
fn a_trained_model_of_others_predicts_its_own_kind_of_text() {
    let model = root().join("../shared/realdata/models/stories260K/hf");
    if !model.exists() {
        return;
    }
    let dir = Scratch::new("eval-stories");
    let story = std::fs::read(model.join("../expected_stdout.txt")).unwrap();
    let file = dir.file("story.txt", &story);
    let (found, _) = json(&["eval", model.to_str().unwrap(), file.to_str().unwrap()]);
    let loss = found["loss"].as_f64().unwrap();
    assert!((0.3..0.8).contains(&loss), "{loss}");
    let gguf = model.join("stories260K-f32.gguf");
    let (same, code) = json(&[
        "eval",
        gguf.to_str().unwrap(),
        file.to_str().unwrap(),
        "--compare",
        model.to_str().unwrap(),
    ]);
    assert_eq!(code, 3);
    assert!(same["compare"]["gain"].as_f64().unwrap().abs() < 1e-5, "{}", same["compare"]);
}
