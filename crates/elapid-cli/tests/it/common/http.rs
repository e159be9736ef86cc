//! Requests byte for byte, and what tests of the server have in common.

use super::Scratch;
use super::server::{Client, Server};
use super::tiny::{Kind, Tiny};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::Duration;

/// A model in a directory that goes away with this.
pub struct World {
    _dir: Scratch,
    pub model: PathBuf,
}

/// A model with everything.
pub fn world(name: &str) -> World {
    world_of(name, &Tiny::new(Kind::Attention))
}

/// A model of this kind.
pub fn world_of(name: &str, tiny: &Tiny) -> World {
    let dir = Scratch::new(name);
    let model = dir.0.join("tiny");
    tiny.write(&model);
    World { _dir: dir, model }
}

/// A whole answer to raw bytes: its status, its head in lower case, its body.
pub fn raw(server: &Server, bytes: &[u8]) -> (u16, String, String) {
    let mut stream = TcpStream::connect(server.url.trim_start_matches("http://")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(bytes).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let status = head.split(' ').nth(1).unwrap_or("0").parse().unwrap();
    (status, head.to_ascii_lowercase(), body.to_string())
}

/// A request with these headers, on a connection of its own.
pub fn with_headers(server: &Server, line: &str, headers: &[&str]) -> (u16, String, String) {
    let mut text = format!("{line} HTTP/1.1\r\nConnection: close\r\n");
    for header in headers {
        text += &format!("{header}\r\n");
    }
    raw(server, (text + "\r\n").as_bytes())
}

/// Checks that a body is an error as OpenAI writes it, and returns its words.
pub fn words(body: &Value) -> String {
    let error = body["error"].as_object().unwrap_or_else(|| panic!("no error: {body}"));
    for key in ["message", "type", "param", "code"] {
        assert!(error.contains_key(key), "{body}");
    }
    error["message"].as_str().unwrap().to_string()
}

/// Asks until the answer is so.
pub fn wait_until(client: &Client, path: &str, is_so: impl Fn(&Value) -> bool) {
    for _ in 0..600 {
        if is_so(&client.get(path).json()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("{path} never came to be so: {}", client.get(path).json());
}

/// Slots in use.
pub fn n_busy(slots: &Value) -> usize {
    slots.as_array().unwrap().iter().filter(|slot| slot["is_processing"] == true).count()
}
