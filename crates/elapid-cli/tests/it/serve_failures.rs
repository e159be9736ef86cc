//! The real binary as a server when something fails: what belongs to a request ends that request
//! alone, and what cannot be recovered is told to everybody before the process ends.

use crate::common::http::{with_headers, words, world, world_of};
use crate::common::server::{Client, Server};
use crate::common::tiny::{Kind, Tiny, lines};
use elapid::Device;
use elapid::Precision;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of a server whose engine is beyond help.
const UNAVAILABLE: i32 = 69;

fn ask(client: &Client, prompt: &str) -> (u16, Value) {
    let body = json!({"prompt": prompt, "n_predict": 6, "temperature": 0});
    let answer = client.post("/completion", &body);
    (answer.status, answer.json())
}

fn metric(server: &Server, name: &str) -> String {
    let (_, _, text) = with_headers(server, "GET /metrics", &["Host: localhost"]);
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in {text}")).to_string()
}

/// Does something while `/health` is asked again and again; it must be well every time.
fn healthy_while<T>(server: &Server, work: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let polls = scope.spawn(|| {
            let client = Client::new(server);
            let mut n = 0;
            while !is_over.load(Ordering::SeqCst) || n == 0 {
                let answer = client.get("/health");
                assert_eq!(answer.status, 200);
                assert_eq!(answer.json()["status"], "ok");
                n += 1;
            }
            n
        });
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        is_over.store(true, Ordering::SeqCst);
        println!("/health was well {} times", polls.join().unwrap());
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[test]
fn a_request_without_memory_is_told_so_and_the_next_one_is_answered() {
    let w = world("serve-oom");
    // The prompt of the second request fails twice, that of the fourth once, which nobody notices.
    let fail = "engine.read#2=oom,engine.read#3=oom,engine.read#5=oom";
    let server = Server::start_with(&w.model, "", &[("ELAPID_FAIL", fail)]);
    let client = Client::new(&server);
    healthy_while(&server, || {
        let (status, first) = ask(&client, "let mut count");
        assert_eq!(status, 200);
        let (status, answer) = ask(&client, "let mut count");
        assert_eq!((status, &answer["error"]["code"]), (500, &json!("out_of_memory")));
        let said = words(&answer);
        assert!(said.contains("out of memory") && said.contains("use a shorter prompt"), "{said}");
        for _ in 0..3 {
            let (status, answer) = ask(&client, "let mut count");
            assert_eq!((status, &answer["content"]), (200, &first["content"]));
        }
    });
    assert_eq!(metric(&server, "elapid_out_of_memory_total"), "1");
    assert_eq!(metric(&server, "elapid_requests_failed_total"), "1");
    assert_eq!(metric(&server, "elapid_healthy"), "1");
    assert!(server.end().contains("fail    out of memory"));
}

#[test]
fn a_panic_ends_its_request_and_leaves_cache_and_neighbours_alone() {
    let w = world("serve-panic");
    let prompt = lines(60, 3).join("\n");
    let server = Server::start(&w.model, "--context 4096");
    let client = Client::new(&server);
    let (_, first) = ask(&client, &prompt);
    let n_cached = |answer: &Value| answer["timings"]["cache_n"].as_u64().unwrap();
    let (_, warm) = ask(&client, &prompt);
    assert!(n_cached(&first) == 0 && n_cached(&warm) >= 256, "{first} {warm}");
    drop(server);
    let n_pieces = first["timings"]["prompt_n"].as_u64().unwrap().div_ceil(128);
    // One for the stream, all pieces of the first request, then one of the second.
    let fail = format!("engine.read#{}=panic", 1 + n_pieces + 1);
    let server = Server::start_with(&w.model, "--context 4096", &[("ELAPID_FAIL", &fail)]);
    let client = Client::new(&server);
    let body = json!({"prompt": "fn main", "n_predict": 3000, "ignore_eos": true, "stream": true});
    let mut stream = client.post("/completion", &body).events();
    stream.next().unwrap();
    healthy_while(&server, || {
        assert_eq!(ask(&client, &prompt).1["content"], first["content"]);
        let (status, answer) = ask(&client, &prompt);
        assert_eq!(status, 500);
        assert!(words(&answer).contains("fail point engine.read"), "{answer}");
        let (_, again) = ask(&client, &prompt);
        assert_eq!(again["content"], first["content"]);
        assert_eq!(n_cached(&again), n_cached(&warm), "the snapshots are still there");
    });
    assert_eq!(stream.last().unwrap()["tokens_predicted"], 3000, "the neighbour went its way");
}

/// A server that can answer nothing any more says so everywhere, and ends.
fn is_beyond_help(mut server: Server, client: &Client, why: &str) {
    let health = client.get("/health");
    assert_eq!(health.status, 503);
    assert!(words(&health.json()).contains(why));
    assert_eq!(metric(&server, "elapid_healthy"), "0");
    let (status, answer) = ask(client, "let");
    assert!(status == 503 && words(&answer).contains(why), "{answer}");
    assert_eq!(server.exit_code(), Some(UNAVAILABLE));
    let said = server.end();
    assert!(said.contains("stop    nothing can be answered any more") && said.contains(why));
}

#[test]
fn a_lost_device_is_told_to_everybody_and_ends_the_server() {
    let w = world("serve-lost");
    let fail = "engine.answer#5=lost";
    let server = Server::start_with(&w.model, "", &[("ELAPID_FAIL", fail)]);
    let client = Client::new(&server);
    let body = json!({"prompt": "fn main", "n_predict": 300, "stream": true});
    let last = client.post("/completion", &body).events().last().unwrap();
    assert!(words(&last).contains("is lost"), "{last}");
    assert_eq!(last["error"]["code"], "device_lost");
    is_beyond_help(server, &client, "is lost");
}

#[test]
fn panics_without_an_answer_in_between_end_the_server() {
    let w = world("serve-panics");
    let fail = "engine.read#1=panic,engine.read#2=panic,engine.read#4=panic,engine.read#5=panic,\
                engine.read#6=panic";
    let server = Server::start_with(&w.model, "", &[("ELAPID_FAIL", fail)]);
    let client = Client::new(&server);
    for status in [500, 500, 200, 500, 500, 500] {
        assert_eq!(client.get("/health").status, 200);
        assert_eq!(ask(&client, "fn main").0, status);
    }
    is_beyond_help(server, &client, "3 requests in a row failed");
}

/// Memory of the emulated GPU.
const MEMORY_MIB: &str = "12";

/// A model whose keys and values take 4 KiB a token, on a GPU with little memory.
#[test]
fn a_prompt_that_does_not_fit_a_gpu_is_told_so_and_the_next_one_is_answered() {
    let gpu = Device::by_name("cuda", Precision::F32, 1);
    if !gpu.is_ok_and(|gpu| gpu.describe().contains("emulator")) {
        return eprintln!("skip: no emulated CUDA is found");
    }
    let w = world_of("serve-gpu", &Tiny { n_head: 32, ..Tiny::new(Kind::Attention) });
    let memory = [("ELAPID_EMULATOR_MEMORY_MIB", MEMORY_MIB)];
    let server = Server::start_with(&w.model, "--device cuda --context 8192", &memory);
    let client = Client::new(&server);
    let device = client.get("/v1/health").json();
    assert_eq!(device["device"], "cuda");
    assert_eq!(device["cuda_devices"].as_array().unwrap().len(), 1);
    healthy_while(&server, || {
        let (status, first) = ask(&client, "let mut count");
        assert_eq!(status, 200, "{first}");
        let long = lines(300, 7).join("\n");
        let (status, answer) = ask(&client, &long);
        assert_eq!((status, &answer["error"]["code"]), (500, &json!("out_of_memory")));
        let said = words(&answer);
        assert!(said.contains("MiB were asked for"), "{said}");
        for _ in 0..2 {
            let (status, answer) = ask(&client, "let mut count");
            assert_eq!((status, &answer["content"]), (200, &first["content"]), "{answer}");
        }
    });
    assert_eq!(metric(&server, "elapid_out_of_memory_total"), "1");
}
