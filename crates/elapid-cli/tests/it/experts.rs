//! `--expert-memory`, as a person uses it: the same answers, what was loaded is told, damage is
//! named.

use crate::common::http::with_headers;
use crate::common::server::{Client, Server};
use crate::common::tiny::{Kind, Tiny, lines};
use crate::common::{Scratch, elapid, refusal};
use serde_json::{Value, json};
use std::path::Path;

/// Bytes of one expert of the tiny model: three matrices of 32 x 32 numbers.
const ONE: usize = 3 * 32 * 32 * 4;

fn world(name: &str) -> Scratch {
    let dir = Scratch::new(&format!("experts-{name}"));
    Tiny::new(Kind::Experts).write(&dir.0.join("model"));
    dir
}

fn generate(model: &str, flags: &str) -> Value {
    let prompt = lines(12, 5).join("\n");
    let head = ["generate", model, "-p", &prompt, "-n", "30", "--temperature", "0", "--json"];
    let args: Vec<&str> = head.into_iter().chain(flags.split_whitespace()).collect();
    let output = elapid(&args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn an_answer_is_the_same_within_any_limit_and_what_was_loaded_is_told() {
    let dir = world("generate");
    let model = dir.path("model");
    let want = generate(&model, "");
    assert_eq!(want["experts"], Value::Null);
    for n in [1, 5, 16] {
        let got = generate(&model, &format!("--expert-memory {}", n * ONE));
        assert_eq!(got["ids"], want["ids"], "{n} experts");
        let experts = &got["experts"];
        let number = |key: &str| experts[key].as_u64().unwrap();
        assert_eq!(number("bytes_read"), number("n_loads") * ONE as u64);
        assert!(number("bytes_resident") <= (n * ONE) as u64, "{experts}");
        assert!(n < 16 || number("n_loads") <= 16, "{experts}");
    }
    let args = ["generate", &model, "-p", "fn", "-n", "4", "--expert-memory", "1M"];
    let said = String::from_utf8(elapid(&args).stderr).unwrap();
    assert!(said.contains("; experts ") && said.contains("% hits, "), "{said}");
    let args = ["generate", &model, "-p", "fn", "--expert-memory", "2k"];
    let said = refusal(&elapid(&args));
    assert!(said.contains(&format!("at least {ONE} bytes")), "{said}");
}

#[test]
fn a_server_tells_what_was_loaded() {
    let dir = world("serve");
    let ask = |flags: &str| {
        let server = Server::start(Path::new(&dir.path("model")), flags);
        let body = json!({"prompt": "let mut count", "max_tokens": 12, "temperature": 0});
        let answer = Client::new(&server).post("/v1/completions", &body).json();
        let text = answer["choices"][0]["text"].as_str().unwrap().to_string();
        (text, with_headers(&server, "GET /metrics", &["Host: localhost"]).2)
    };
    let (want, metrics) = ask("");
    assert!(metrics.contains("\nelapid_expert_loads_total 0\n"), "{metrics}");
    let (got, metrics) = ask(&format!("--expert-memory {}", 6 * ONE));
    assert_eq!(got, want);
    let number = |name: &str| {
        let mut lines = metrics.lines().filter_map(|line| line.strip_prefix(name));
        lines.next().unwrap().trim().parse::<usize>().unwrap()
    };
    assert!(number("elapid_expert_hits_total ") > 0, "{metrics}");
    assert_eq!(
        number("elapid_expert_read_bytes_total "),
        number("elapid_expert_loads_total ") * ONE
    );
    assert_eq!(number("elapid_expert_bytes "), 6 * ONE);
}

#[test]
fn a_damaged_expert_of_a_package_is_named_when_it_is_chosen() {
    let dir = world("package");
    let (model, package) = (dir.path("model"), dir.path("model.elapid"));
    assert!(elapid(&["convert", &model, &package]).status.success());
    let want = generate(&model, "")["ids"].clone();
    let flags = format!("--expert-memory {}", 3 * ONE);
    assert_eq!(generate(&package, &flags)["ids"], want);
    let mut bytes = std::fs::read(&package).unwrap();
    let weights = std::fs::read(dir.0.join("model/model.safetensors")).unwrap();
    let begin = bytes.windows(64).position(|window| window == &weights[..64]).unwrap();
    let text = String::from_utf8_lossy(&bytes[begin + weights.len()..]).into_owned();
    let (_, ranges) = text.split_once("\"ranges\":[[").unwrap();
    let at: usize = ranges.split(',').next().unwrap().parse().unwrap();
    bytes[begin + at] ^= 1;
    std::fs::write(&package, bytes).unwrap();
    let said = refusal(&elapid(&["generate", &package, "-p", "fn"]));
    assert!(said.contains("`model.safetensors` was changed"), "{said}");
    let prompt = lines(12, 5).join("\n");
    let limit = (3 * ONE).to_string();
    let args = ["generate", &package, "-p", &prompt, "--expert-memory", &limit];
    let said = refusal(&elapid(&args));
    assert!(said.contains(".experts.") && said.contains("was changed"), "{said}");
}
