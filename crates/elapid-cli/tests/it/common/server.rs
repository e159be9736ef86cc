//! A running `elapid serve`, and a client for it.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A server on a port of its own, ended with the test.
pub struct Server {
    pub url: String,
    child: Child,
    /// What it has said on stderr.
    said: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts one with these flags, separated by spaces.
    pub fn start(model: &Path, flags: &str) -> Server {
        Server::start_with(model, flags, &[])
    }

    /// The same with these variables of its environment.
    pub fn start_with(model: &Path, flags: &str, variables: &[(&str, &str)]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
        command.arg("serve").arg(model).args(["--port", "0", "--json", "--threads", "2"]);
        command.args(flags.split_whitespace()).env("RUST_BACKTRACE", "1");
        command.envs(variables.iter().copied());
        Server::spawn(command)
    }

    /// Starts one by its whole command line, which has `--json`.
    pub fn spawn(mut command: Command) -> Server {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let said = Arc::new(Mutex::new(String::new()));
        let (stderr, kept) = (child.stderr.take().unwrap(), said.clone());
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                kept.lock().unwrap().push_str(&format!("{line}\n"));
            }
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let about: Value = serde_json::from_str(&line)
            .unwrap_or_else(|_| panic!("{line:?} {}", said.lock().unwrap()));
        let url = about["url"].as_str().unwrap().to_string();
        Server { url, child, said, reader: Some(reader) }
    }

    /// What it has said on stderr until now.
    pub fn said(&self) -> String {
        self.said.lock().unwrap().clone()
    }

    /// Waits until it has said this on stderr.
    pub fn wait_for(&self, words: &str) {
        let begin = Instant::now();
        while !self.said().contains(words) {
            assert!(
                begin.elapsed() < Duration::from_secs(120),
                "`{words}` not in: {}",
                self.said()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for its end; its exit code.
    pub fn exit_code(&mut self) -> Option<i32> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "it does not end: {}", self.said());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it still runs.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Ends it; what it has said on stderr.
    pub fn end(mut self) -> String {
        let _ = self.child.kill();
        self.child.wait().unwrap();
        self.reader.take().unwrap().join().unwrap();
        self.said.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer of a server.
pub struct Answer {
    pub status: u16,
    body: ureq::Body,
}

impl Answer {
    /// The whole body, which is JSON.
    pub fn json(mut self) -> Value {
        let text = self.body.read_to_string().unwrap();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    pub fn text(mut self) -> String {
        self.body.read_to_string().unwrap()
    }

    /// The objects of a stream that has one in each line.
    pub fn lines(mut self) -> Vec<Value> {
        let text = self.body.read_to_string().unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The events of a stream, as they come; the last is `[DONE]` where there is one.
    pub fn events(self) -> impl Iterator<Item = Value> {
        let reader: Box<dyn Read> = Box::new(self.body.into_reader());
        let lines = BufReader::new(reader).lines().map(|line| line.unwrap());
        let data = lines.filter_map(|line| Some(line.strip_prefix("data:")?.trim().to_string()));
        data.take_while(|data| data != "[DONE]").map(|data| serde_json::from_str(&data).unwrap())
    }
}

/// A client with connections of its own.
pub struct Client {
    agent: ureq::Agent,
    url: String,
}

impl Client {
    pub fn new(server: &Server) -> Client {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(Duration::from_secs(120)));
        Client { agent: config.build().into(), url: server.url.clone() }
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.post_text(path, "application/json", &body.to_string())
    }

    pub fn post_text(&self, path: &str, kind: &str, body: &str) -> Answer {
        let request = self.agent.post(format!("{}{path}", self.url));
        let response = request.content_type(kind).send(body).unwrap();
        Answer { status: response.status().as_u16(), body: response.into_body() }
    }

    pub fn get(&self, path: &str) -> Answer {
        let response = self.agent.get(format!("{}{path}", self.url)).call().unwrap();
        Answer { status: response.status().as_u16(), body: response.into_body() }
    }
}
