//! The real binary as a server: what happens when clients go away, when there are too many of
//! them, when they take too long, and when the server is told to end.

use crate::common::http::{n_busy, raw, wait_until, with_headers, words, world};
use crate::common::server::{Client, Server};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

/// Connections that a server has at the same time.
#[cfg(target_os = "linux")]
const N_CONNECTIONS_MAX: usize = 512;

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.url.trim_start_matches("http://")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

/// Sends a request for an answer.
fn post(stream: &mut TcpStream, body: &Value) {
    let body = body.to_string();
    let head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n";
    write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
}

/// A request that takes long.
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
    wait_until(&client, "/slots", |slots| n_busy(slots) == 1);
    drop(events);
    wait_until(&client, "/slots", |slots| n_busy(slots) == 0);
    // One that waits for a whole answer.
    let mut body = long_body();
    body["stream"] = json!(false);
    let mut stream = connect(&server);
    post(&mut stream, &body);
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

#[test]
fn a_head_that_comes_byte_by_byte_is_cut_off() {
    let w = world("serve-head");
    let server = Server::start(&w.model, "--timeout-s 1");
    let mut stream = connect(&server);
    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nAccept: ").unwrap();
    let begin = Instant::now();
    // It never falls silent for long.
    let is_open = |stream: &mut TcpStream| {
        let is_sent = stream.write_all(b"x").is_ok();
        match stream.read(&mut [0; 64]) {
            Ok(n) => is_sent && n > 0,
            Err(error) => {
                is_sent && matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
            }
        }
    };
    while is_open(&mut stream) {
        assert!(begin.elapsed() < Duration::from_secs(30), "half a head is waited for");
    }
    assert!(begin.elapsed() > Duration::from_millis(800), "cut off after {:?}", begin.elapsed());
    assert_eq!(Client::new(&server).get("/health").status, 200);
}

// Elsewhere a process may not have as many files open.
#[cfg(target_os = "linux")]
#[test]
fn past_the_bound_on_connections_one_waits_for_another_to_end() {
    let w = world("serve-full");
    let server = Server::start(&w.model, "");
    let ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let answer = |stream: &mut TcpStream| {
        let mut bytes = [0; 15];
        stream.read_exact(&mut bytes).map(|()| String::from_utf8_lossy(&bytes).into_owned())
    };
    let mut held: Vec<TcpStream> = (0..N_CONNECTIONS_MAX).map(|_| connect(&server)).collect();
    let mut one_more = connect(&server);
    one_more.write_all(ask).unwrap();
    // All the others are served.
    for stream in &mut held {
        stream.write_all(ask).unwrap();
        assert_eq!(answer(stream).unwrap(), "HTTP/1.1 200 OK");
    }
    one_more.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let kind = answer(&mut one_more).unwrap_err().kind();
    assert!(matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{kind}");
    drop(held.pop());
    one_more.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(answer(&mut one_more).unwrap(), "HTTP/1.1 200 OK", "its turn came");
}

#[test]
fn a_stream_that_waits_says_that_it_is_there() {
    let w = world("serve-silence");
    let server = Server::start(&w.model, "--context 65536 --parallel 1");
    let client = Client::new(&server);
    let running: Vec<_> = (0..8).map(|_| client.post("/completion", &long_body())).collect();
    let mut waiting = connect(&server);
    post(&mut waiting, &long_body());
    let mut lines = BufReader::new(waiting).lines().map(Result::unwrap);
    let first = lines.find(|line| line.starts_with(':') || line.starts_with("data:"));
    assert_eq!(first.unwrap(), ": still here");
    drop(running);
    let mut events = lines.filter(|line| line.starts_with("data:"));
    assert!(events.next().unwrap().contains("\"stop\":false"), "its turn came");
}

fn signal(server: &Server, name: &str) {
    let id = server.id().to_string();
    assert!(Command::new("kill").args([name, &id]).status().unwrap().success());
}

#[test]
fn a_server_that_is_told_to_end_finishes_its_answers() {
    let w = world("serve-end");
    let release = w.model.join("release");
    let fail = format!("engine.answer#4=wait:{}", release.display());
    let mut server = Server::start_with(&w.model, "", &[("ELAPID_FAIL", &fail)]);
    let client = Client::new(&server);
    let mut body = long_body();
    body["n_predict"] = json!(40);
    let events = client.post("/completion", &body).events();
    server.wait_for("fail point engine.answer");
    signal(&server, "-TERM");
    server.wait_for("answers under way have 10 s");
    std::fs::write(&release, "").unwrap();
    let last = events.last().unwrap();
    assert_eq!((&last["stop"], &last["tokens_predicted"]), (&json!(true), &json!(40)));
    assert_eq!(server.exit_code(), Some(0));
}

#[test]
fn a_second_signal_does_not_wait() {
    let w = world("serve-twice");
    let fail = format!("engine.answer#4=wait:{}", w.model.join("never").display());
    let mut server = Server::start_with(&w.model, "", &[("ELAPID_FAIL", &fail)]);
    let client = Client::new(&server);
    let _events = client.post("/completion", &long_body()).events();
    server.wait_for("fail point engine.answer");
    signal(&server, "-INT");
    server.wait_for("answers under way have 10 s");
    signal(&server, "-INT");
    assert_eq!(server.exit_code(), Some(130));
    assert!(server.end().contains("stop    at once"));
}
