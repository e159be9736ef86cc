//! The real binary inside a project: what it loads without being told, what it shows a model of
//! other files, `complete` and `list`.

use crate::common::http::{World, world, world_of};
use crate::common::server::{Client, Server};
use crate::common::tiny::{Kind, Tiny};
use crate::common::{Scratch, refusal, tensors};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

pub const PRICE: &str = "RATE = 0.2\n\n\ndef compute_discount(order, percent):\n    \
    \"\"\"What is taken off.\"\"\"\n    return order.total * percent / 100\n";
pub const ORDERS: &str = "from .price import compute_discount\n\n\ndef total_of(order):\n    \
    discount = compute_discount(order, 5)\n    return order.total - discount\n";

/// A project of two files that belong together and one that does not.
pub fn project(name: &str) -> Scratch {
    let dir = Scratch::new(name);
    std::fs::create_dir_all(dir.0.join(".git")).unwrap();
    std::fs::create_dir_all(dir.0.join("src")).unwrap();
    dir.file("src/price.py", PRICE.as_bytes());
    dir.file("src/orders.py", ORDERS.as_bytes());
    dir.file("src/other.py", b"def unrelated(): return 0\n");
    dir
}

/// Runs the binary in a directory, with a cache of its own.
pub fn run(dir: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
    command.current_dir(dir).env("XDG_CACHE_HOME", dir.join(".cache"));
    command.args(args).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The one JSON object that a command prints.
pub fn object(dir: &Path, args: &[&str]) -> Value {
    let output = run(dir, args);
    assert!(output.status.success(), "{args:?}: {}", said(&output));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A run of `elapid adapt` as it leaves one: an adapter on this base, and its certificate.
pub fn adapted(dir: &Scratch, number: u64, base: &World, verdict: &str) {
    let run = dir.0.join(format!(".elapid/adapt/{number}"));
    let b = (0..32).map(|n| (n as f32 - 15.0) * number as f32).collect();
    tensors::adapter(&run.join("adapter"), "layers.0.feed_forward.down", vec![1.0; 48], b);
    let certificate = json!({
        "verdict": verdict, "created": "2026-02-03T04:05:06Z", "model": "adapter",
        "base": {"name": "tiny", "path": base.model}, "adapter": {"kind": "lora"},
        "held_out": {"bits_per_byte": {"before": 1.25, "after": 1.0}},
    });
    std::fs::write(run.join("certificate.json"), certificate.to_string()).unwrap();
}

#[test]
fn without_a_model_the_newest_better_adapter_of_the_project_is_taken_and_said() {
    let (dir, base) = (project("project-newest"), world("project-newest-base"));
    adapted(&dir, 1, &base, "better");
    adapted(&dir, 2, &base, "better");
    adapted(&dir, 3, &base, "not better");
    std::fs::create_dir_all(dir.0.join(".elapid/adapt/4")).unwrap();
    let generate = |more: &[&str]| {
        let flags = ["-p", "let mut", "-n", "8", "--temperature", "0", "--json"];
        run(&dir.0.join("src"), &[&["generate"], more, &flags].concat())
    };
    let text = |output: &Output| {
        let value: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(output)));
        value["text"].as_str().unwrap().to_string()
    };
    let plain = generate(&[]);
    let first = said(&plain).lines().next().unwrap().to_string();
    let want = "model   .elapid/adapt/2 on tiny: the newest of";
    assert!(first.starts_with(want) && first.ends_with("1.250 to 1.000 bits per byte"), "{first}");
    let model = base.model.to_str().unwrap();
    let adapter = |n: u64| dir.path(&format!(".elapid/adapt/{n}/adapter"));
    let told = generate(&[model, "--adapter", &adapter(2)]);
    assert_eq!(text(&plain), text(&told));
    assert!(!said(&told).contains("model  "), "{}", said(&told));
    assert_ne!(text(&plain), text(&generate(&[model])));
    assert_ne!(text(&plain), text(&generate(&[model, "--adapter", &adapter(1)])));
    let list = object(&dir.0, &["list", "src", "--json"]);
    let used: Vec<bool> =
        list["runs"].as_array().unwrap().iter().map(|run| run["used"] == true).collect();
    assert_eq!(used, [false, true, false, false]);
    let table = String::from_utf8(run(&dir.0, &["list"]).stdout).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 5, "{table}");
    assert!(lines[0].starts_with("run  date"), "{table}");
    assert!(lines[2].starts_with("2*   2026-02-03 04:05  tiny"), "{table}");
    assert!(lines[2].contains("1.250   1.000  better"), "{table}");
    assert!(lines[4].contains("not finished"), "{table}");
}

#[test]
fn the_shipped_model_answers_where_nothing_is_adapted_and_under_its_name() {
    let dir = project("project-shipped");
    let output = run(&dir.0, &["complete", "src/orders.py:5:16", "--lines", "1", "--json"]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).starts_with("model   elapid-code: nothing is adapted in"));
    let found: Vec<String> = std::fs::read_dir(dir.0.join(".cache/elapid"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("elapid-code-") && found[0].ends_with(".gguf"), "{found:?}");
    let info = object(&dir.0, &["info", "elapid-code", "--json"]);
    assert!(info["n_params"].as_u64().unwrap() > 0, "{info}");
    // A file of that name is meant where there is one.
    dir.file("elapid-code", b"no model");
    let words = refusal(&run(&dir.0, &["info", "elapid-code"]));
    assert!(words.contains("elapid-code"), "{words}");
    let nothing = run(&dir.0, &["list"]);
    assert!(nothing.stdout.is_empty() && said(&nothing).contains("elapid adapt"));
}

#[test]
fn complete_shows_the_model_what_the_place_needs_and_says_what_it_showed() {
    let (dir, base) = (project("project-complete"), world("project-complete-base"));
    let model = base.model.to_str().unwrap();
    let complete = |more: &[&str]| {
        let flags = ["--model", model, "--lines", "1", "--json"];
        object(&dir.0, &[&["complete"], more, &flags].concat())
    };
    let with = complete(&["src/orders.py:5:33"]);
    let files = with["context"].as_array().unwrap();
    assert_eq!(files.last().unwrap()["path"], "src/price.py");
    assert!(files.last().unwrap()["n_tok"].as_u64().unwrap() > 20);
    assert!(files.iter().all(|file| file["path"] != "src/orders.py"));
    assert!(!with["text"].as_str().unwrap().is_empty());
    assert_eq!(complete(&["src/orders.py:5:33"])["text"], with["text"], "greedy");
    let without = complete(&["src/orders.py:5:33", "--no-context"]);
    assert_eq!(without["context"], json!([]));
    assert_ne!(with["text"], without["text"], "this model says something else after other text");
    let elsewhere = complete(&["src/orders.py:6", "--no-context"]);
    assert_ne!(without["text"], elsewhere["text"]);
    assert_eq!(std::fs::read_to_string(dir.0.join("src/orders.py")).unwrap(), ORDERS);
}

#[test]
fn complete_without_fim_tokens_continues_the_text_before_and_says_so() {
    let dir = project("project-plain");
    let base = world_of("project-plain-base", &Tiny { fim: false, ..Tiny::new(Kind::Mamba) });
    let model = base.model.to_str().unwrap();
    let output = run(&dir.0, &["complete", "src/price.py:5", "-m", model, "--lines", "1"]);
    assert!(said(&output).contains("has no fill-in-the-middle tokens"), "{}", said(&output));
    let prefix = &PRICE[..PRICE.find("\n    return").unwrap()];
    let flags = ["-p", prefix, "-n", "64", "--temperature", "0"];
    let generated = run(&dir.0, &[&["generate", model], &flags[..]].concat());
    assert_eq!(output.stdout, generated.stdout);
}

/// What the server made of a request, as text.
fn prompt_of(client: &Client, body: &Value) -> (String, u64) {
    let answer = client.post("/infill", body);
    assert_eq!(answer.status, 200);
    let answer = answer.json();
    (answer["prompt"].as_str().unwrap().into(), answer["tokens_cached"].as_u64().unwrap())
}

#[test]
fn requests_without_files_of_their_own_are_shown_those_of_the_project() {
    let (dir, base) = (project("project-serve"), world("project-serve-base"));
    let flags = format!("--context 4096 --project {}", dir.0.display());
    let server = Server::start(&base.model, &flags);
    let client = Client::new(&server);
    let (prefix, suffix) = ORDERS.split_at(ORDERS.find("order, 5").unwrap());
    let body = json!({"input_prefix": prefix, "input_suffix": suffix, "n_predict": 4});
    let with = |more: Value| {
        let mut body = body.clone();
        let more = more.as_object().unwrap();
        more.iter().for_each(|(key, value)| body[key] = value.clone());
        prompt_of(&client, &body).0
    };
    assert!(with(json!({})).contains("What is taken off."), "{}", with(json!({})));
    assert!(with(json!({"input_extra": []})).contains("What is taken off."));
    assert!(with(json!({"filename": "src/orders.py"})).contains("What is taken off."));
    // The file itself, whether named or known by its lines, is not shown twice.
    let n_own = with(json!({})).matches("def total_of").count();
    assert_eq!(n_own, 1);
    assert!(!with(json!({"project_context": false})).contains("What is taken off."));
    let extra = json!({"input_extra": [{"filename": "x", "text": "own words"}]});
    assert!(!with(extra.clone()).contains("What is taken off."));
    assert!(with(extra).contains("own words"));
    let openai = |more: Value| {
        let body = json!({"prompt": prefix, "suffix": suffix, "max_tokens": 4, "temperature": 0});
        let mut body = body.as_object().unwrap().clone();
        body.extend(more.as_object().unwrap().clone());
        let answer = client.post("/v1/completions", &Value::Object(body));
        assert_eq!(answer.status, 200);
        answer.json()["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    assert!(openai(json!({})) > openai(json!({"project_context": false})) + 20);
}

#[test]
fn files_that_are_shown_stay_the_same_while_somebody_types_so_that_they_are_cached() {
    let (dir, base) = (project("project-cache"), world("project-cache-base"));
    let line = |n: usize| format!("    # {n}: the discount of an order, in percent of its total\n");
    let long = format!("{PRICE}{}", (0..20).map(line).collect::<String>());
    dir.file("src/price.py", long.as_bytes());
    let flags = format!("--context 8192 --project {}", dir.0.display());
    let server = Server::start(&base.model, &flags);
    let client = Client::new(&server);
    let (prefix, suffix) = ORDERS.split_at(ORDERS.find("order, 5").unwrap());
    let ask = |typed: &str| {
        let prefix = format!("{prefix}{typed}");
        let body = json!({"input_prefix": prefix, "input_suffix": suffix, "n_predict": 1});
        prompt_of(&client, &body)
    };
    let (first, _) = ask("");
    let shown = first.split("from .price").next().unwrap().to_string();
    assert!(shown.contains("# 19: the discount"), "{shown}");
    // Something is saved that would be shown instead.
    dir.file("src/other.py", b"def unrelated(order, percent): return compute_discount(order)\n");
    for typed in ["unrel", "unrelated(", "unrelated(order)\n    unrelated("] {
        let (prompt, n_cached) = ask(typed);
        assert!(prompt.starts_with(&shown), "another context after {typed:?}:\n{prompt}");
        assert!(n_cached >= 256, "{n_cached} tokens of the prompt were cached");
    }
}

#[test]
fn inside_a_project_serve_needs_no_arguments() {
    let (dir, base) = (project("project-bare"), world("project-bare-base"));
    adapted(&dir, 1, &base, "better");
    let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
    command.current_dir(dir.0.join("src")).args(["serve", "--port", "0", "--json"]);
    let server = Server::spawn(command);
    server.wait_for("serve   http");
    let said = server.said();
    assert!(said.starts_with("model   .elapid/adapt/1 on tiny"), "{said}");
    assert!(said.contains("1 adapter") && said.contains("files of "), "{said}");
    let body = json!({"input_prefix": "def f(order):\n    compute_discount(", "n_predict": 2});
    let client = Client::new(&server);
    let (prompt, _) = prompt_of(&client, &body);
    assert!(prompt.contains("What is taken off."), "{prompt}");
    // Clients that send the name they were told get the adapted model too.
    let name = client.get("/v1/models").json()["data"][0]["id"].clone();
    let body = json!({"prompt": "let mut", "max_tokens": 8, "temperature": 0});
    let (mut named, mut alone) = (body.clone(), body.clone());
    (named["model"], alone["lora"]) = (name, json!([]));
    let text = |body: &Value| {
        client.post("/v1/completions", body).json()["choices"][0]["text"].to_string()
    };
    assert_eq!(text(&named), text(&body));
    assert_ne!(text(&alone), text(&body));
}
