//! Several models in one server, and adapters that come and go while it runs.

use crate::common::Scratch;
use crate::common::http::{n_busy, wait_until, words, world};
use crate::common::server::{Answer, Client, Server};
use crate::common::tensors;
use crate::common::tiny::{Kind, Tiny};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Models `one`, `two` and `three` in a directory.
fn three(name: &str) -> (Scratch, [PathBuf; 3]) {
    let dir = Scratch::new(name);
    let kinds = [("one", Kind::Attention), ("two", Kind::Mamba), ("three", Kind::Hybrid)];
    let paths = kinds.map(|(name, kind)| {
        let path = dir.0.join("models").join(name);
        Tiny { n_ctx: 256, ..Tiny::new(kind) }.write(&path);
        path
    });
    (dir, paths)
}

fn good(answer: Answer) -> Value {
    let (status, body) = (answer.status, answer.json());
    assert_eq!(status, 200, "{body}");
    body
}

fn ask(client: &Client, model: &str) -> Value {
    let body = json!({"model": model, "prompt": "let a", "max_tokens": 8, "temperature": 0});
    good(client.post("/v1/completions", &body))
}

/// Which models are loaded, by `/health`; other routes say the same.
fn loaded(client: &Client) -> Vec<String> {
    let names = |list: &Value, key: &str, is_it: &dyn Fn(&Value) -> bool| -> Vec<String> {
        let list = list.as_array().unwrap().iter().filter(|it| is_it(it));
        list.map(|it| it[key].as_str().unwrap().to_string()).collect()
    };
    let health = good(client.get("/health"));
    let told = names(&health["models"], "id", &|it| it["loaded"] == true);
    let models = good(client.get("/v1/models"));
    let is_loaded = |it: &Value| it["status"]["value"] == "loaded";
    assert_eq!(names(&models["data"], "id", &is_loaded), told);
    let ps = good(client.get("/api/ps"));
    assert_eq!(names(&ps["models"], "name", &|_| true), told);
    told
}

#[test]
fn models_are_chosen_by_name_loaded_when_asked_for_and_make_room() {
    let (_dir, paths) = three("models-room");
    let flags = format!("{} {}", paths[1].display(), paths[2].display());
    let server = Server::start(&paths[0], &flags);
    let client = Client::new(&server);
    assert_eq!(loaded(&client), ["one"]);
    let names = ["one", "two", "three"];
    let all = names.map(|name| ask(&client, name));
    assert_eq!(loaded(&client), names);
    for (name, answer) in names.iter().zip(&all) {
        assert_eq!(answer["model"], **name);
    }
    assert_ne!(all[0]["choices"], all[1]["choices"]);
    assert_eq!(ask(&client, "unknown")["model"], "one");
    let tags = good(client.get("/api/tags"));
    assert_eq!(tags["models"].as_array().unwrap().len(), 3);
    let chat = json!({"model": "two:latest", "stream": false, "options": {"num_predict": 2},
        "messages": [{"role": "user", "content": "a"}]});
    assert_eq!(good(client.post("/api/chat", &chat))["model"], "two");
    drop(server);

    // Room for two of them: the one that was used least recently goes, and answers stay the same.
    let server = Server::start(&paths[0], &format!("{flags} --memory 600K --strict-model"));
    let client = Client::new(&server);
    for (name, left) in [
        ("two", ["one", "two"]),
        ("one", ["one", "two"]),
        ("three", ["one", "three"]),
        ("two", ["two", "three"]),
    ] {
        let answer = ask(&client, name);
        let idx = names.iter().position(|it| *it == name).unwrap();
        assert_eq!(answer["choices"], all[idx]["choices"]);
        assert_eq!(loaded(&client), left, "{}", server.said());
    }
    let answer = client.post("/v1/completions", &json!({"model": "x", "prompt": "a"}));
    assert_eq!(answer.status, 404);
    assert!(words(&answer.json()).contains("this server has `one`, `two`, `three`"));
}

#[test]
fn a_model_with_a_request_in_flight_is_not_unloaded() {
    let (_dir, paths) = three("models-flight");
    // Room for one of them.
    let flags = format!("{} --memory 250K --context 256", paths[1].display());
    let server = Server::start(&paths[0], &flags);
    let client = Client::new(&server);
    let long = json!({"model": "one", "prompt": "let a", "max_tokens": 240, "stream": true,
        "temperature": 0});
    let mut events = client.post("/v1/completions", &long).events();
    events.next().unwrap();
    let other = Client::new(&server);
    let two = std::thread::spawn(move || ask(&other, "two"));
    let n_events = events.count();
    assert!(n_events > 200, "{n_events} events");
    assert_eq!(two.join().unwrap()["model"], "two");
    assert_eq!(loaded(&client), ["two"]);
}

#[test]
fn a_model_that_nobody_asks_is_unloaded_and_comes_back() {
    let w = world("models-idle");
    let server = Server::start(&w.model, "--idle 0.005 --context 256");
    let client = Client::new(&server);
    let first = ask(&client, "tiny");
    wait_until(&client, "/health", |health| health["models"][0]["loaded"] == false);
    assert_eq!(n_busy(&good(client.get("/slots"))), 0);
    assert_eq!(ask(&client, "tiny")["choices"], first["choices"]);
}

#[test]
fn a_directory_is_all_models_in_it_and_what_is_none_is_left_out() {
    let (dir, _) = three("models-directory");
    std::fs::write(dir.0.join("models/broken.gguf"), "GGUF").unwrap();
    let server = Server::start(&dir.0.join("models"), "");
    let client = Client::new(&server);
    let ids = good(client.get("/v1/models"))["data"].clone();
    let ids: Vec<&str> =
        ids.as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["one", "three", "two"]);
    assert_eq!(ask(&client, "three")["model"], "three");
    let metrics = client.get("/metrics").text();
    assert!(metrics.contains("elapid_model_loaded{model=\"two\"} 0"), "{metrics}");
    assert!(server.end().contains("broken.gguf is left out"));
}

#[test]
fn a_load_that_fails_is_told_and_disturbs_nobody() {
    let (_dir, paths) = three("models-broken");
    let server = Server::start(&paths[0], &paths[1].display().to_string());
    let client = Client::new(&server);
    std::fs::write(paths[1].join("model.safetensors"), "broken").unwrap();
    let body = json!({"model": "two", "prompt": "a"});
    let answer = client.post("/v1/completions", &body);
    assert_eq!(answer.status, 500);
    assert!(words(&answer.json()).contains("`two` cannot be loaded"));
    assert_eq!(ask(&client, "one")["model"], "one");
}

/// An adapter of one matrix that changes what the model says.
fn write_adapter(dir: &Path, sign: f32) {
    let b = (0..32).map(|n| sign * if n % 3 == 0 { 0.9 } else { -0.7 }).collect();
    tensors::adapter(dir, "layers.0.feed_forward.down", vec![1.0; 48], b);
}

#[test]
fn adapters_are_loaded_scaled_and_unloaded_while_the_server_runs() {
    let w = world("models-adapters");
    let dir = w.model.parent().unwrap().join("allowed");
    write_adapter(&dir.join("up"), 1.0);
    write_adapter(&dir.join("down"), -1.0);
    write_adapter(&w.model.parent().unwrap().join("outside"), 1.0);
    let flags = format!("--context 512 --adapter-dir {}", dir.display());
    let server = Server::start(&w.model, &flags);
    let client = Client::new(&server);
    let plain = ask(&client, "tiny")["choices"].clone();
    for path in ["../outside", "/etc/passwd", "missing", dir.parent().unwrap().to_str().unwrap()] {
        let answer = client.post("/lora-adapters", &json!({"load": path}));
        assert_eq!(answer.status, 403, "{path}");
    }
    std::fs::create_dir(dir.join("empty")).unwrap();
    assert_eq!(client.post("/lora-adapters", &json!({"load": "empty"})).status, 400);
    // Off until it is asked for.
    let list = good(client.post("/lora-adapters", &json!({"load": "up"})));
    assert_eq!((&list[0]["name"], &list[0]["scale"]), (&json!("up"), &json!(0.0)));
    assert_eq!(ask(&client, "tiny")["choices"], plain);
    let up = ask(&client, "up");
    assert_eq!(up["model"], "up");
    assert_ne!(up["choices"], plain);
    let lora = json!({"prompt": "let a", "max_tokens": 8, "temperature": 0,
        "lora": [{"id": 0, "scale": 1.0}]});
    assert_eq!(good(client.post("/v1/completions", &lora))["choices"], up["choices"]);
    // A second one, and an answer under way that keeps the first after it was unloaded.
    let list = good(client.post("/lora-adapters", &json!({"load": "down", "scale": 1.0})));
    assert_eq!(list.as_array().unwrap().len(), 2);
    let long = json!({"model": "up", "prompt": "let a", "max_tokens": 400, "stream": true,
        "temperature": 0});
    let whole: String = client.post("/v1/completions", &long).events().map(text).collect();
    let mut events = client.post("/v1/completions", &long).events();
    let first = text(events.next().unwrap());
    let list = good(Client::new(&server).post("/lora-adapters", &json!({"unload": "up"})));
    assert_eq!(list.as_array().unwrap().len(), 1);
    assert_eq!(first + &events.map(text).collect::<String>(), whole);
    assert_eq!(client.post("/v1/completions", &lora).status, 400);
    assert_eq!(list[0]["id"], 1);
    good(client.post("/lora-adapters", &json!([{"id": 1, "scale": 0.5}])));
    assert_eq!(good(client.get("/lora-adapters"))[0]["scale"], 0.5);
    assert_eq!(client.post("/lora-adapters", &json!({"unload": 0})).status, 400);
    // Its name is free again, its number is not.
    let list = good(client.post("/lora-adapters", &json!({"load": "up"})));
    assert_eq!((&list[1]["id"], &list[1]["name"]), (&json!(2), &json!("up")));
    assert_eq!(ask(&client, "up")["choices"], up["choices"]);
}

fn text(event: Value) -> String {
    event["choices"][0]["text"].as_str().unwrap_or_default().to_string()
}

/// A run of `elapid adapt` as it leaves one: its files first, the certificate last.
fn finish(project: &Path, number: u64, certificate: Value, write: impl FnOnce(&Path)) {
    let dir = project.join(".elapid/adapt").join(number.to_string());
    std::fs::create_dir_all(&dir).unwrap();
    write(&dir);
    std::fs::write(dir.join("new.json"), certificate.to_string()).unwrap();
    std::fs::rename(dir.join("new.json"), dir.join("certificate.json")).unwrap();
}

#[test]
fn what_is_adapted_while_the_server_runs_appears() {
    let w = world("models-watch");
    let project = w.model.parent().unwrap().join("project");
    std::fs::create_dir_all(project.join(".elapid")).unwrap();
    let flags = format!("--context 256 --watch {}", project.display());
    let server = Server::start(&w.model, &flags);
    let client = Client::new(&server);
    let plain = ask(&client, "tiny");
    let base = json!({"name": "tiny", "path": w.model});
    let adapter = json!({"kind": "lora", "scale": 0.5});
    let certificate = json!({"verdict": "better", "base": base, "adapter": adapter});
    finish(&project, 1, certificate, |dir| write_adapter(&dir.join("adapter"), 1.0));
    let has = |name: &'static str| {
        move |models: &Value| models["data"].as_array().unwrap().iter().any(|it| it["id"] == name)
    };
    wait_until(&client, "/v1/models", has("adapt/1"));
    assert_eq!(ask(&client, "tiny")["choices"], plain["choices"]);
    let lora = json!({"prompt": "let a", "max_tokens": 8, "temperature": 0,
        "lora": [{"id": 0, "scale": 0.5}]});
    let half = good(client.post("/v1/completions", &lora));
    assert_ne!(half["choices"], plain["choices"]);
    // As strongly as the certificate says.
    assert_eq!(ask(&client, "adapt/1")["choices"], half["choices"]);
    // A whole model is one of its own; a run that cannot be used is said.
    let certificate = json!({"verdict": "better", "adapter": {"kind": "full"}});
    finish(&project, 2, certificate.clone(), |dir| {
        Tiny::new(Kind::Mamba).write(&dir.join("model"));
    });
    wait_until(&client, "/v1/models", has("project-2"));
    assert_ne!(ask(&client, "project-2")["choices"], plain["choices"]);
    finish(&project, 3, certificate, |_| ());
    server.wait_for("adapt/3");
    assert_eq!(ask(&client, "tiny")["choices"], plain["choices"]);
}
