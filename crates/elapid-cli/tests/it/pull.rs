//! `elapid pull` against a local server that speaks the hub's API and fails on demand, and what
//! other commands do with what was pulled.

#![cfg(feature = "pull")]

use crate::common::tiny::{Kind, Tiny};
use crate::common::{Scratch, refusal};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const LATER: &str = "89abcdef0123456789abcdef0123456789abcdef";
const REPO: &str = "models--some--tiny";

/// What goes wrong, once, with the next request that fits.
enum Fault {
    /// This status and header.
    Answer(u16, &'static str),
    /// The transfer breaks after so many bytes.
    Cut(usize),
    /// The first byte of the contents is another one.
    Wrong,
    /// Ranges are ignored.
    Whole,
}

/// A hub with one repository. Large files are on another host, which is another port here.
struct Hub {
    endpoint: String,
    state: Arc<State>,
}

struct State {
    files: Vec<(String, Vec<u8>)>,
    commit: Mutex<&'static str>,
    /// The part of `METHOD path` that it waits for, and what happens then.
    faults: Mutex<Vec<(&'static str, Fault)>>,
    /// Method, path, range and token of every request.
    log: Mutex<Vec<String>>,
    large_host: String,
}

struct Request {
    /// `METHOD path`.
    line: String,
    range: Option<usize>,
    token: String,
}

impl Hub {
    fn new(files: &[(&str, &[u8])]) -> Hub {
        let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let [endpoint, large_host] =
            [0, 1].map(|n: usize| format!("http://{}", listeners[n].local_addr().unwrap()));
        let files = files.iter().map(|(name, bytes)| (name.to_string(), bytes.to_vec())).collect();
        let state = Arc::new(State {
            files,
            commit: Mutex::new(COMMIT),
            faults: Mutex::default(),
            log: Mutex::default(),
            large_host,
        });
        for listener in listeners {
            let state = state.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().flatten() {
                    let _ = state.answer(stream);
                }
            });
        }
        Hub { endpoint, state }
    }

    fn fault(&self, at: &'static str, fault: Fault) {
        self.state.faults.lock().unwrap().push((at, fault));
    }

    /// What was asked since the last call.
    fn log(&self) -> Vec<String> {
        std::mem::take(&mut *self.state.log.lock().unwrap())
    }

    fn command(&self, dir: &Scratch, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
        for name in ["HF_TOKEN", "HF_HUB_OFFLINE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"] {
            command.env_remove(name);
        }
        command.args(args).current_dir(&dir.0).env("HF_HOME", dir.0.join("home"));
        command.env("HF_HUB_CACHE", dir.0.join("cache")).env("HF_ENDPOINT", &self.endpoint);
        command.env("ELAPID_PULL_WAIT_MS", "0").env("NO_PROXY", "*");
        command
    }

    fn run(&self, dir: &Scratch, args: &[&str]) -> Output {
        self.command(dir, args).output().unwrap()
    }

    /// Pulls and returns the path of the model and what was said.
    fn pull(&self, dir: &Scratch, name: &str) -> (PathBuf, String) {
        let output = self.run(dir, &["pull", name]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{said}");
        (String::from_utf8(output.stdout).unwrap().trim_end().into(), said)
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn is_large(name: &str) -> bool {
    name.ends_with(".gguf") || name.ends_with(".safetensors")
}

/// The name of the contents of a file.
fn etag(name: &str, bytes: &[u8]) -> String {
    if is_large(name) {
        return hex(digest(&SHA256, bytes).as_ref());
    }
    let blob = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
    hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &blob).as_ref())
}

impl State {
    fn answer(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(stream.try_clone()?).lines();
        let first = lines.next().unwrap_or(Ok(String::new()))?;
        let line = first.rsplit_once(' ').map_or("", |pair| pair.0).to_string();
        let mut request = Request { line, range: None, token: "-".into() };
        for header in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
            let (key, value) = header.split_once(": ").unwrap();
            match key.to_ascii_lowercase().as_str() {
                "range" => {
                    let first = value.trim_start_matches("bytes=").trim_end_matches('-');
                    request.range = first.parse().ok();
                }
                "authorization" => request.token = value.into(),
                _ => {}
            }
        }
        let Request { line, range, token } = &request;
        self.log.lock().unwrap().push(format!("{line} {} {token}", range.unwrap_or(0)));
        let mut faults = self.faults.lock().unwrap();
        let at = faults.iter().position(|(at, _)| line.contains(at));
        let fault = at.map(|at| faults.remove(at).1);
        drop(faults);
        self.respond(stream, &request, fault)
    }

    fn respond(
        &self,
        to: TcpStream,
        request: &Request,
        fault: Option<Fault>,
    ) -> std::io::Result<()> {
        let (method, path) = request.line.split_once(' ').unwrap_or(("", ""));
        let commit = *self.commit.lock().unwrap();
        if let Some(Fault::Answer(status, header)) = fault {
            return send(to, status, header, b"", 0);
        }
        if path == "/api/models/some/tiny/revision/main" {
            let names = self.files.iter().map(|(name, _)| json!({"rfilename": name}));
            let list = json!({"sha": commit, "siblings": names.collect::<Vec<_>>()}).to_string();
            return send(to, 200, "", list.as_bytes(), list.len());
        }
        let name = path.rsplit('/').next().unwrap();
        let Some((_, bytes)) = self.files.iter().find(|file| file.0 == name) else {
            return send(to, 404, "X-Error-Code: RepoNotFound\r\n", b"", 0);
        };
        let (tag, n) = (etag(name, bytes), bytes.len());
        if path.starts_with("/some/tiny/resolve/") {
            let place = match is_large(name) {
                true => format!("{}/large/{name}", self.large_host),
                false => format!("/api/resolve-cache/{name}"),
            };
            let linked = format!("X-Linked-Etag: \"{tag}\"\r\nX-Linked-Size: {n}\r\n");
            let linked = if is_large(name) { linked } else { String::new() };
            let head = format!("X-Repo-Commit: {commit}\r\nLocation: {place}\r\n{linked}");
            return send(to, 302, &head, b"", 0);
        }
        let mut bytes = bytes.clone();
        let mut first = request.range.unwrap_or(0);
        let mut end = n;
        match fault {
            Some(Fault::Cut(n)) => end = n,
            Some(Fault::Wrong) => bytes[0] ^= 1,
            Some(Fault::Whole) => first = 0,
            _ => {}
        }
        let range = format!("Content-Range: bytes {first}-{}/{n}\r\n", n - 1);
        let head = format!("ETag: \"{tag}\"\r\n{}", if first > 0 { &range } else { "" });
        let body = if method == "HEAD" { &[] } else { &bytes[first..end.max(first)] };
        send(to, if first > 0 { 206 } else { 200 }, &head, body, n - first)
    }
}

/// `n` is the length that is told.
fn send(mut to: TcpStream, status: u16, head: &str, body: &[u8], n: usize) -> std::io::Result<()> {
    write!(to, "HTTP/1.1 {status} x\r\nConnection: close\r\nContent-Length: {n}\r\n{head}\r\n")?;
    to.write_all(body)
}

/// A repository with a small file and a large one.
fn small() -> Hub {
    Hub::new(&[("config.json", b"{}"), ("model.safetensors", &[7; 300_000]), ("x.onnx", b"no")])
}

/// The error of a pull, without what it said before.
fn refused(hub: &Hub, dir: &Scratch, name: &str) -> String {
    let mut output = hub.run(dir, &["pull", name]);
    let text = String::from_utf8(output.stderr).unwrap();
    output.stderr = text[text.find("error: ").expect(&text)..].into();
    refusal(&output)
}

#[test]
fn a_model_lies_in_the_cache_as_python_lays_it_out_and_is_not_downloaded_twice() {
    let (hub, dir) = (small(), Scratch::new("pull-layout"));
    let (path, said) = hub.pull(&dir, "some/tiny");
    let folder = dir.0.join("cache").join(REPO);
    assert_eq!(path, folder.join("snapshots").join(COMMIT));
    assert_eq!(std::fs::read_to_string(folder.join("refs/main")).unwrap(), COMMIT);
    assert!(said.contains("293.0 KiB to download, 2 files in all"), "{said}");
    for (name, bytes) in &hub.state.files[..2] {
        assert_eq!(&std::fs::read(path.join(name)).unwrap(), bytes);
        #[cfg(unix)]
        {
            let link = std::fs::read_link(path.join(name)).unwrap();
            assert_eq!(link, PathBuf::from("../../blobs").join(etag(name, bytes)));
        }
    }
    assert!(!path.join("x.onnx").exists());
    hub.log();
    hub.pull(&dir, "some/tiny");
    assert_eq!(hub.log(), ["GET /api/models/some/tiny/revision/main 0 -"]);
    // A later commit with the same contents: links alone.
    *hub.state.commit.lock().unwrap() = LATER;
    let (path, said) = hub.pull(&dir, "some/tiny");
    assert!(path.ends_with(LATER) && said.contains("done    0 B downloaded"), "{said}");
    assert!(hub.log().iter().skip(1).all(|line| line.starts_with("HEAD ")));
}

#[test]
fn the_token_goes_to_the_endpoint_and_to_no_other_host() {
    let (hub, dir) = (small(), Scratch::new("pull-token"));
    std::fs::create_dir_all(dir.0.join("home")).unwrap();
    dir.file("home/token", b"of-the-file\n");
    let output = hub.command(&dir, &["pull", "some/tiny"]).env("HF_TOKEN", "secret").output();
    assert!(output.unwrap().status.success());
    let log = hub.log();
    assert!(log.iter().any(|line| line.contains("/large/")), "{log:?}");
    for line in &log {
        let token = if line.contains("/large/") { " -" } else { " Bearer secret" };
        assert!(line.ends_with(token), "{line}");
    }
    hub.pull(&dir, "some/tiny");
    assert!(hub.log()[0].ends_with(" Bearer of-the-file"));
}

#[test]
fn a_transfer_that_breaks_is_continued_where_it_broke() {
    let (hub, dir) = (small(), Scratch::new("pull-broken"));
    hub.fault("GET /large/", Fault::Cut(100_000));
    hub.fault("GET /large/", Fault::Answer(503, ""));
    hub.fault("GET /large/", Fault::Cut(200_000));
    let (path, said) = hub.pull(&dir, "some/tiny");
    assert_eq!(std::fs::read(path.join("model.safetensors")).unwrap(), [7; 300_000]);
    assert!(said.contains("broke off at 97.7 KiB of 293.0 KiB"), "{said}");
    let log = hub.log();
    let large = log.iter().filter_map(|line| line.strip_prefix("GET /large/model.safetensors "));
    assert_eq!(large.collect::<Vec<_>>(), ["0 -", "100000 -", "100000 -", "200000 -"]);
}

#[test]
fn what_an_earlier_command_left_is_resumed_or_replaced_where_ranges_are_not_known() {
    for ranges in [true, false] {
        let (hub, dir) = (small(), Scratch::new(&format!("pull-resume-{ranges}")));
        for n in 0..8 {
            let fault = if n == 0 { Fault::Cut(123_456) } else { Fault::Cut(0) };
            hub.fault("GET /large/", fault);
        }
        let words = refused(&hub, &dir, "some/tiny");
        assert!(words.contains("broke off at 120.6 KiB") && words.contains("resumes"), "{words}");
        let unknown = refusal(&hub.run(&dir, &["info", "some/tiny"]));
        assert!(unknown.contains("elapid pull some/tiny"), "{unknown}");
        hub.state.faults.lock().unwrap().clear();
        hub.log();
        if !ranges {
            hub.fault("GET /large/", Fault::Whole);
        }
        let (path, _) = hub.pull(&dir, "some/tiny");
        assert_eq!(std::fs::read(path.join("model.safetensors")).unwrap(), [7; 300_000]);
        assert_eq!(hub.log().last().unwrap(), "GET /large/model.safetensors 123456 -");
    }
}

#[test]
fn contents_with_another_hash_are_refused_and_removed() {
    for (at, name) in [("GET /large/", "model.safetensors"), ("GET /api/resolve", "config.json")] {
        let (hub, dir) = (small(), Scratch::new(&format!("pull-hash-{name}")));
        hub.fault(at, Fault::Wrong);
        let words = refused(&hub, &dir, "some/tiny");
        assert!(words.contains(&format!("{name} came with another hash")), "{words}");
        let blobs = std::fs::read_dir(dir.0.join("cache").join(REPO).join("blobs")).unwrap();
        let names = blobs.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let bytes = &hub.state.files.iter().find(|file| file.0 == name).unwrap().1;
        assert!(names.into_iter().all(|blob| !blob.contains(&etag(name, bytes))));
        hub.pull(&dir, "some/tiny");
    }
}

#[test]
fn a_busy_server_is_asked_again_and_one_that_wants_hours_is_not() {
    let (hub, dir) = (small(), Scratch::new("pull-busy"));
    hub.fault("GET /api/models", Fault::Answer(429, "Retry-After: 0\r\n"));
    hub.fault("HEAD /some", Fault::Answer(502, ""));
    let (_, said) = hub.pull(&dir, "some/tiny");
    assert!(said.contains("answers 429; trying again") && said.contains("answers 502"), "{said}");
    hub.fault("GET /api/models", Fault::Answer(429, "Retry-After: 7200\r\n"));
    assert!(refused(&hub, &dir, "some/tiny").contains("answers 429"));
    hub.log();
    (0..9).for_each(|_| hub.fault("GET /api/models", Fault::Answer(500, "")));
    refused(&hub, &dir, "some/tiny");
    assert_eq!(hub.log().len(), 6);
}

#[test]
fn what_the_hub_refuses_is_said_with_what_to_do() {
    let (hub, dir) = (small(), Scratch::new("pull-refused"));
    let at = "GET /api/models";
    hub.fault(at, Fault::Answer(401, ""));
    let words = refused(&hub, &dir, "some/tiny");
    assert!(words.contains("wants a token") && words.contains("set HF_TOKEN"), "{words}");
    hub.fault(at, Fault::Answer(401, ""));
    let mut command = hub.command(&dir, &["pull", "some/tiny"]);
    let words = refusal(&command.env("HF_TOKEN", "t0ken").output().unwrap());
    assert!(words.contains("does not accept the token") && !words.contains("t0ken"), "{words}");
    hub.fault("HEAD /some", Fault::Answer(403, "X-Error-Message: it is gated\r\n"));
    let words = refused(&hub, &dir, "some/tiny");
    assert!(words.contains("no access to some/tiny: it is gated"), "{words}");
    assert!(words.contains(&format!("{}/some/tiny", hub.endpoint)), "{words}");
    assert!(refused(&hub, &dir, "no/such").contains("has no no/such"));
    hub.fault(at, Fault::Answer(404, "X-Error-Code: RevisionNotFound\r\n"));
    assert!(refused(&hub, &dir, "some/tiny@v9").contains("some/tiny has no revision v9"));
    let words = refused(&hub, &dir, "some/tiny:other.gguf");
    assert!(words.contains("no file other.gguf; it has config.json, model"), "{words}");
    // More than any disk has.
    let head = "X-Linked-Etag: \"abc\"\r\nX-Linked-Size: 4611686018427387904\r\n";
    hub.fault("HEAD /some", Fault::Answer(200, head));
    let words = refused(&hub, &dir, "some/tiny");
    assert!(words.contains("4294967296.00 GiB are to be downloaded"), "{words}");
}

#[test]
fn answers_that_would_leave_the_cache_are_refused() {
    let (hub, dir) = (Hub::new(&[("../../config.json", b"{}")]), Scratch::new("pull-outside"));
    assert!(refused(&hub, &dir, "some/tiny").contains("not as the hub does"));
    let hub = small();
    let head = "X-Linked-Etag: \"../../../abc\"\r\nX-Linked-Size: 2\r\n";
    hub.fault("HEAD /some", Fault::Answer(200, head));
    assert!(refused(&hub, &dir, "some/tiny").contains("not as the hub does"));
    hub.fault("HEAD /some", Fault::Answer(302, "Location: /some\r\n"));
    assert!(refused(&hub, &dir, "some/tiny").contains("has no some/tiny"));
}

#[test]
fn of_many_gguf_files_one_is_to_be_named() {
    let files: [(&str, &[u8]); 3] = [("config.json", b"{}"), ("a.gguf", b"AA"), ("b.gguf", b"BB")];
    let (hub, dir) = (Hub::new(&files), Scratch::new("pull-gguf"));
    let words = refused(&hub, &dir, "some/tiny");
    assert!(words.contains("has 2 GGUF files:\n  some/tiny:a.gguf\n  some/tiny:b.gguf"), "{words}");
    let (path, _) = hub.pull(&dir, "some/tiny:b.gguf");
    assert_eq!(std::fs::read(&path).unwrap(), b"BB");
    assert!(!path.with_file_name("a.gguf").exists());
    let (hub, dir) = (Hub::new(&files[..2]), Scratch::new("pull-one-gguf"));
    assert!(hub.pull(&dir, "some/tiny").0.ends_with("a.gguf"));
}

#[test]
fn offline_nothing_is_asked_and_only_the_cache_is_used() {
    let (hub, dir) = (small(), Scratch::new("pull-offline"));
    let offline =
        |args: &[&str]| hub.command(&dir, args).env("HF_HUB_OFFLINE", "1").output().unwrap();
    assert!(refusal(&offline(&["pull", "some/tiny"])).contains("some/tiny is not in"));
    refusal(&hub.run(&dir, &["pull", "some/tiny", "--offline"]));
    refusal(&hub.run(&dir, &["info", "some/tiny"]));
    assert_eq!(hub.log(), Vec::<String>::new());
    let (path, _) = hub.pull(&dir, "some/tiny");
    hub.log();
    let output = offline(&["pull", "some/tiny"]);
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim_end(), path.to_str().unwrap());
    assert_eq!(hub.log(), Vec::<String>::new());
}

#[test]
fn a_pulled_model_is_loaded_listed_and_removed_by_its_name() {
    let dir = Scratch::new("pull-use");
    Tiny::new(Kind::Hybrid).write(&dir.0.join("source"));
    let entries = std::fs::read_dir(dir.0.join("source")).unwrap().map(Result::unwrap);
    let read = |entry: std::fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
    };
    let files: Vec<(String, Vec<u8>)> = entries.map(read).collect();
    let files: Vec<(&str, &[u8])> = files.iter().map(|file| (&*file.0, &*file.1)).collect();
    let hub = Hub::new(&files);
    let (path, _) = hub.pull(&dir, "some/tiny");
    hub.log();
    let generate = |model: &str| {
        let args = ["generate", model, "-p", "fn", "-n", "4", "--temperature", "0"];
        let output = hub.run(&dir, &args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    assert_eq!(generate("some/tiny"), generate("source"));
    assert_eq!(generate(&format!("some/tiny@{COMMIT}")), generate("source"));
    assert!(
        hub.run(&dir, &["tokenize", "some/tiny", "--file", "source/config.json"]).status.success()
    );
    let list = hub.run(&dir, &["list", "--json"]).stdout;
    let list: Value = serde_json::from_slice(&list).unwrap();
    let n_bytes: usize = files.iter().map(|file| file.1.len()).sum();
    let want = json!([{"name": "some/tiny", "path": path, "bytes": n_bytes}]);
    assert_eq!(list["pulled"], want);
    // A path that exists wins.
    std::fs::create_dir_all(dir.0.join("some/tiny")).unwrap();
    refusal(&hub.run(&dir, &["info", "some/tiny"]));
    std::fs::remove_dir_all(dir.0.join("some")).unwrap();
    refusal(&hub.run(&dir, &["rm", "some/tin"]));
    let output = hub.run(&dir, &["rm", "some/tiny", "--json"]);
    let freed: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(freed["bytes_freed"].as_u64().unwrap() >= n_bytes as u64, "{freed}");
    assert!(!dir.0.join("cache").join(REPO).exists());
    refusal(&hub.run(&dir, &["rm", "some/tiny"]));
    assert_eq!(hub.log(), Vec::<String>::new(), "no command but pull asks the hub");
}

#[test]
fn removing_a_revision_or_a_file_keeps_what_others_share() {
    let files: [(&str, &[u8]); 2] = [("a.gguf", &[1; 1000]), ("b.gguf", &[2; 3000])];
    let (hub, dir) = (Hub::new(&files), Scratch::new("pull-rm"));
    let (old, _) = hub.pull(&dir, "some/tiny:a.gguf");
    hub.pull(&dir, "some/tiny:b.gguf");
    *hub.state.commit.lock().unwrap() = LATER;
    let (new, _) = hub.pull(&dir, "some/tiny:a.gguf");
    let listed = String::from_utf8(hub.run(&dir, &["list"]).stdout).unwrap();
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split(' ').next()).collect();
    let of_old = ["a", "b"].map(|name| format!("some/tiny:{name}.gguf@{COMMIT}"));
    assert_eq!(names, ["pulled", "some/tiny:a.gguf", &of_old[0], &of_old[1]]);
    let freed = |name: &str| {
        let output = hub.run(&dir, &["rm", name, "--json"]);
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        value["bytes_freed"].as_u64().unwrap()
    };
    // Links have some bytes of their own.
    assert!((3000..3300).contains(&freed(&of_old[1])));
    assert!(freed(&format!("some/tiny@{COMMIT}")) < 300);
    assert!(!old.exists() && new.exists());
    assert!((1000..1300).contains(&freed("some/tiny:a.gguf")));
    assert!(!dir.0.join("cache").join(REPO).exists());
}
