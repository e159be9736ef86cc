//! Many clients at once, some of which go away or do not know what they ask for.
//!
//! Every whole answer is the one that the same request gets alone, every malformed request is told
//! so, and the server is as large at the end as it was when all had asked once. `ELAPID_LOAD_S`
//! says for how many seconds.

use crate::common::Scratch;
use crate::common::rng::Rng;
use crate::common::server::{Answer, Client, Server};
use crate::common::tiny::{Kind, Tiny, lines};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const N_CLIENTS: u64 = 64;

/// A request that has an answer.
struct Good {
    path: &'static str,
    body: Value,
}

/// Requests of all kinds, over prompts that start alike and continue differently.
fn good() -> Vec<Good> {
    let mut list = Vec::new();
    for n in 0..6usize {
        let text = lines(10 + 7 * n, 9).join("\n");
        let tokens = 6 + 3 * n;
        let body = json!({"prompt": text, "max_tokens": tokens, "temperature": 0});
        list.push(Good { path: "/v1/completions", body });
        let body = json!({
            "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
            "temperature": 0,
        });
        list.push(Good { path: "/v1/chat/completions", body });
        let body = json!({
            "input_prefix": text, "input_suffix": lines(5, n as u64).join("\n"),
            "n_predict": tokens, "temperature": 0,
        });
        list.push(Good { path: "/infill", body });
        let body = json!({"prompt": text, "n_predict": tokens, "temperature": 1, "seed": n});
        list.push(Good { path: "/completion", body });
    }
    list
}

/// (path, type of the content, body) of requests that make no sense.
fn bad() -> Vec<(&'static str, &'static str, String)> {
    let json = "application/json";
    let deep = format!("{}1{}", "[".repeat(5000), "]".repeat(5000));
    let huge = json!({"prompt": "x", "max_tokens": 1e300}).to_string();
    let messages = json!({"messages": [{"role": "user"}]}).to_string();
    let token = json!({"prompt": [4_000_000_000u64]}).to_string();
    let schema = json!({
        "messages": [{"role": "user", "content": "x"}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}},
    });
    vec![
        ("/v1/completions", json, "{\"prompt\": ".into()),
        ("/v1/completions", json, "{\"prompt\": 7}".into()),
        ("/v1/completions", json, "[]".into()),
        ("/v1/completions", json, deep),
        ("/v1/completions", json, huge),
        ("/v1/completions", json, token),
        ("/v1/completions", json, "{\"prompt\": \"x\", \"temperature\": -3}".into()),
        ("/v1/completions", json, "{\"prompt\": \"x\", \"mirostat\": 2}".into()),
        ("/v1/completions", "text/plain", "{\"prompt\": \"x\"}".into()),
        ("/v1/chat/completions", json, messages),
        ("/v1/chat/completions", json, schema.to_string()),
        ("/v1/chat/completions", json, "{\"messages\": {}}".into()),
        ("/infill", json, "{\"input_prefix\": 1}".into()),
        ("/infill", json, "\u{0}\u{1}".into()),
        ("/completion", json, "{\"prompt\": {\"no\": 1}}".into()),
        ("/v1/embeddings", json, "{}".into()),
        ("/v1/nothing", json, "{}".into()),
    ]
}

/// What an answer says, streamed or not.
fn text_of(value: &Value) -> &str {
    let choice = &value["choices"][0];
    let places = [
        &value["content"],
        &choice["text"],
        &choice["message"]["content"],
        &choice["delta"]["content"],
    ];
    places.into_iter().find_map(Value::as_str).unwrap_or("")
}

fn whole(client: &Client, good: &Good) -> String {
    let answer = client.post(good.path, &good.body);
    let (status, value) = (answer.status, answer.json());
    assert_eq!(status, 200, "{}: {value}", good.path);
    text_of(&value).to_string()
}

fn streamed(client: &Client, good: &Good) -> Answer {
    let mut body = good.body.clone();
    body["stream"] = json!(true);
    let answer = client.post(good.path, &body);
    assert_eq!(answer.status, 200, "{}", good.path);
    answer
}

fn check_bad(client: &Client, (path, kind, body): &(&str, &str, String)) {
    let answer = client.post_text(path, kind, body);
    let (status, value) = (answer.status, answer.json());
    assert!((400..500).contains(&status), "{path} {status}: {value}");
    let error = &value["error"];
    assert!(error["message"].is_string() && error["type"].is_string(), "{path} {status}: {value}");
}

/// Resident bytes of a process, where the system tells.
fn resident(id: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:"))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
}

/// How often what was done.
#[derive(Default)]
struct Counts {
    whole: AtomicUsize,
    streamed: AtomicUsize,
    left: AtomicUsize,
    bad: AtomicUsize,
}

/// One client until the time is over.
fn client(server: &Server, n: u64, wants: &[(Good, String)], counts: &Counts, until: Instant) {
    let (client, rng, bad) = (Client::new(server), Rng::new(n, 5), bad());
    let add = |count: &AtomicUsize| count.fetch_add(1, Ordering::SeqCst);
    for step in 0.. {
        if Instant::now() >= until {
            return;
        }
        let draw = |idx: u64, n: usize| rng.below(4 * step + idx, n as u64) as usize;
        let (good, want) = &wants[draw(0, wants.len())];
        match draw(1, 10) {
            0..2 => {
                check_bad(&client, &bad[draw(2, bad.len())]);
                add(&counts.bad);
            }
            2..4 => {
                // Goes away after a few events; what it has heard until then is right.
                let heard = streamed(&client, good).events().take(draw(2, 4));
                let heard: String = heard.map(|event| text_of(&event).to_string()).collect();
                assert!(want.starts_with(&heard), "{heard:?} begins {want:?}");
                add(&counts.left);
            }
            4..5 => {
                assert_eq!(&whole(&client, good), want, "{}", good.path);
                add(&counts.whole);
            }
            _ => {
                let events = streamed(&client, good).events();
                let heard: String = events.map(|event| text_of(&event).to_string()).collect();
                assert_eq!(&heard, want, "{} {}", good.path, good.body);
                add(&counts.streamed);
            }
        }
    }
}

#[test]
fn every_answer_under_load_is_the_one_that_is_given_alone() {
    let seconds = std::env::var("ELAPID_LOAD_S").ok().and_then(|text| text.parse().ok());
    let time = Duration::from_secs_f64(seconds.unwrap_or(4.0));
    let dir = Scratch::new("load");
    Tiny::new(Kind::Hybrid).write(&dir.0.join("model"));
    let flags = "--parallel 8 --queue 64 --context 4096 --snapshot-mib 8";
    let mut server = Server::start(&dir.0.join("model"), flags);
    let alone = Client::new(&server);
    let wants: Vec<(Good, String)> = good()
        .into_iter()
        .map(|good| {
            let want = whole(&alone, &good);
            assert!(!want.is_empty(), "{}", good.path);
            (good, want)
        })
        .collect();
    bad().iter().for_each(|bad| check_bad(&alone, bad));
    let counts = Counts::default();
    let run = |time: Duration| {
        let until = Instant::now() + time;
        std::thread::scope(|scope| {
            for n in 0..N_CLIENTS {
                let (server, wants, counts) = (&server, &wants, &counts);
                scope.spawn(move || client(server, n, wants, counts, until));
            }
        });
    };
    // Buffers, connections and snapshots are made once.
    run(time / 3);
    let before = resident(server.id());
    run(time - time / 3);
    let after = resident(server.id());
    if let (Some(before), Some(after)) = (before, after) {
        let room = before / 8 + (8 << 20);
        assert!(after <= before + room, "{before} bytes grew to {after}");
    }
    let Counts { whole: n_whole, streamed: n_streamed, left, bad } = counts;
    let counts = [n_whole, n_streamed, left, bad].map(AtomicUsize::into_inner);
    assert!(counts.iter().all(|n| *n > 0), "{counts:?}");
    println!("[whole, streamed, left, bad] {counts:?}; resident {before:?}, then {after:?}");
    // Nobody is left behind.
    let idle = (0..100).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        let slots = alone.get("/slots").json();
        slots.as_array().unwrap().iter().all(|slot| slot["is_processing"] == false)
    });
    assert!(idle, "{}", alone.get("/slots").json());
    for (good, want) in &wants {
        assert_eq!(&whole(&alone, good), want, "after all that: {}", good.path);
    }
    assert!(server.is_alive());
    let said = server.end();
    assert!(!said.contains("panicked") && !said.contains("error"), "{said}");
}
