//! The real binary as a server: what happens when clients go away, when there are too many of
//! them, when they take too long, and when the server is told to end.

#![allow(clippy::unwrap_used)] // a test may panic

mod common;

use common::http::{n_busy, raw, wait_until, with_headers, words, world};
use common::server::{Client, Server};
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

/// A request that goes on for long.
fn long_body() -> Value {
    json!({"prompt": "fn main", "n_predict": 60000, "ignore_eos": true, "stream": true, "seed": 1})
}

#[test]
fn a_client_that_goes_away_stops_its_answer() {
    let w = world("serve-gone");
    let server = Server::start(&w.model, "--context 65536");
    let client = Client::new(&server);
    let mut events = client.post("/completion", &long_body()).events();
    assert_eq!(events.next().unwrap()["stop"], false);
    assert_eq!(n_busy(&client.get("/slots").json()), 1);
    drop(events);
    wait_until(&client, "/slots", |slots| n_busy(slots) == 0);
    // One that waits for a whole answer.
    let mut body = long_body();
    body["stream"] = json!(false);
    let body = body.to_string();
    let mut stream = TcpStream::connect(server.url.trim_start_matches("http://")).unwrap();
    let head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    wait_until(&client, "/slots", |slots| n_busy(slots) == 1);
    drop(stream);
    wait_until(&client, "/slots", |slots| n_busy(slots) == 0);
    let (_, _, text) = with_headers(&server, "GET /metrics", &["Host: localhost"]);
    assert!(text.contains("\nelapid_requests_gone_total 2\n"), "{text}");
}

#[test]
fn past_its_queue_a_server_asks_to_come_again() {
    let w = world("serve-queue");
    let server = Server::start(&w.model, "--context 65536 --parallel 1 --queue 1");
    let client = Client::new(&server);
    let mut running = client.post("/completion", &long_body()).events();
    running.next().unwrap();
    let waiting = client.post("/completion", &long_body());
    assert_eq!(waiting.status, 200);
    let body = long_body().to_string();
    let head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    let length = format!("Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let (status, head, text) = raw(&server, format!("{head}{length}{body}").as_bytes());
    assert!(status == 503 && head.contains("retry-after: "), "{head}");
    assert!(words(&serde_json::from_str(&text).unwrap()).contains("too many requests"));
    drop(running);
    assert_eq!(waiting.events().next().unwrap()["stop"], false, "its turn came");
}

#[test]
fn a_request_has_a_time() {
    let w = world("serve-late");
    let server = Server::start(&w.model, "--context 65536 --timeout-s 1");
    let client = Client::new(&server);
    let mut body = long_body();
    let last = client.post("/completion", &body).events().last().unwrap();
    assert!(words(&last).contains("--timeout-s"));
    body["stream"] = json!(false);
    let answer = client.post("/completion", &body);
    assert_eq!(answer.status, 408);
    words(&answer.json());
}

fn signal(server: &Server, name: &str) {
    let id = server.id().to_string();
    assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
}

fn wait_for_end(server: &mut Server) {
    for _ in 0..400 {
        if !server.is_alive() {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("the server does not end");
}

#[test]
fn a_server_that_is_told_to_end_finishes_its_answers() {
    let w = world("serve-end");
    let mut server = Server::start(&w.model, "--context 65536");
    let client = Client::new(&server);
    let mut body = long_body();
    body["n_predict"] = json!(3000);
    let mut events = client.post("/completion", &body).events();
    events.next().unwrap();
    signal(&server, "-TERM");
    let last = events.last().unwrap();
    assert_eq!((&last["stop"], &last["tokens_predicted"]), (&json!(true), &json!(3000)));
    wait_for_end(&mut server);
    assert!(server.end().contains("answers under way have 10 s"));
    // A second signal does not wait.
    let mut server = Server::start(&w.model, "--context 65536");
    let client = Client::new(&server);
    let mut events = client.post("/completion", &long_body()).events();
    events.next().unwrap();
    signal(&server, "-INT");
    std::thread::sleep(Duration::from_millis(200));
    signal(&server, "-INT");
    wait_for_end(&mut server);
    assert!(server.end().contains("stop    at once"));
}
