//! The page at `/studio`: which files are served, how, and to whom.

use crate::common::Scratch;
use crate::common::http::{with_headers, world};
use crate::common::server::Server;
use std::path::Path;
use std::process::Command;

const HOST: &str = "Host: localhost";

/// A folder with a page, its list, and files that are not in the list.
fn folder(name: &str, list: &str) -> Scratch {
    let dir = Scratch::new(name);
    let write = |name: &str, text: &str| std::fs::write(dir.0.join(name), text).unwrap();
    std::fs::create_dir_all(dir.0.join("studio/elapid")).unwrap();
    write("secret.txt", "not for the web");
    write("studio/files.json", list);
    write("studio/index.html", "<!doctype html><title>page</title>");
    write("studio/main.js", "export {};");
    write("studio/elapid/engine.wasm", "\0asm");
    write("studio/unlisted.txt", "not in the list");
    dir
}

const LIST: &str = r#"{"version": "1", "files":
    ["files.json", "index.html", "main.js", "elapid/engine.wasm", "gone.css"]}"#;

fn start(model: &Path, studio: &Path, flags: &str) -> Server {
    Server::start(model, &format!("{flags} --studio {}", studio.display()))
}

#[test]
fn the_page_and_its_files_are_served_with_their_types_and_a_strict_policy() {
    let (w, dir) = (world("studio-files"), folder("studio-files-page", LIST));
    let server = start(&w.model, &dir.0.join("studio"), "");
    let get = |path: &str| with_headers(&server, &format!("GET {path}"), &[HOST]);
    let (status, head, _) = get("/studio");
    assert!(status == 308 && head.contains("location: /studio/"), "{head}");
    for (path, kind, body) in [
        ("/studio/", "text/html; charset=utf-8", "<title>page"),
        ("/studio/index.html", "text/html; charset=utf-8", "<title>page"),
        ("/studio/main.js?version=1", "text/javascript; charset=utf-8", "export"),
        ("/studio/elapid/engine.wasm", "application/wasm", "\0asm"),
        ("/studio/files.json", "application/json", "main.js"),
    ] {
        let (status, head, text) = get(path);
        assert!(status == 200 && text.contains(body), "{path}: {status} {text}");
        assert!(head.contains(&format!("content-type: {kind}")), "{path}: {head}");
        assert!(head.contains("content-security-policy: default-src 'none'; "), "{head}");
        assert!(!head.contains("unsafe-inline") && !head.contains("'unsafe-eval'"), "{head}");
        assert!(head.contains("x-content-type-options: nosniff"), "{head}");
    }
    assert_eq!(with_headers(&server, "POST /studio/main.js", &[HOST]).0, 405);
    let (status, head, body) = with_headers(&server, "HEAD /studio/main.js", &[HOST]);
    assert!(status == 200 && head.contains("content-length: 10") && body.is_empty());
}

#[test]
fn a_file_that_a_client_has_is_not_sent_again() {
    let (w, dir) = (world("studio-tag"), folder("studio-tag-page", LIST));
    let server = start(&w.model, &dir.0.join("studio"), "");
    let (_, head, _) = with_headers(&server, "GET /studio/main.js", &[HOST]);
    assert!(head.contains("cache-control: no-cache"), "{head}");
    let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap();
    let ask = |tag: &str| {
        let header = format!("If-None-Match: {tag}");
        with_headers(&server, "GET /studio/main.js", &[HOST, &header])
    };
    for known in [tag.to_string(), format!("W/{tag}"), format!("\"other\", {tag}")] {
        let (status, head, body) = ask(&known);
        assert!(status == 304 && body.is_empty() && head.contains(tag), "{known}: {head}");
    }
    assert_eq!(ask("\"other\"").0, 200);
}

#[test]
fn nothing_outside_of_the_list_is_served() {
    let (w, dir) = (world("studio-outside"), folder("studio-outside-page", LIST));
    let server = start(&w.model, &dir.0.join("studio"), "");
    for path in [
        "/studio/../secret.txt",
        "/studio/%2e%2e/secret.txt",
        "/studio/..%2fsecret.txt",
        "/studio/..%5csecret.txt",
        "/studio/elapid/../../secret.txt",
        "/studio//etc/passwd",
        "/studio/%2fetc%2fpasswd",
        "/studio/main.js%00.html",
        "/studio/main.js/",
        "/studio/elapid",
        "/studio/elapid/",
        "/studio/./main.js",
        "/studio/unlisted.txt",
        "/studio/gone.css",
    ] {
        let (status, _, body) = with_headers(&server, &format!("GET {path}"), &[HOST]);
        assert!(status == 404 && !body.contains("not "), "{path}: {status} {body}");
    }
}

#[test]
fn the_page_needs_no_key_but_the_right_host() {
    let (w, dir) = (world("studio-key"), folder("studio-key-page", LIST));
    let server = start(&w.model, &dir.0.join("studio"), "--api-key k");
    let status = |line: &str, host: &str| with_headers(&server, line, &[host]).0;
    assert_eq!(status("GET /studio/", HOST), 200);
    assert_eq!(status("GET /studio/", "Host: evil.example"), 403);
    assert_eq!(status("GET /studiox", HOST), 401);
    assert_eq!(status("GET /slots", HOST), 401);
}

#[test]
fn without_the_folder_a_page_says_how_to_get_it() {
    let w = world("studio-none");
    // A binary of its own place: beside that of the build the folder may lie.
    let dir = Scratch::new("studio-none-bin");
    let binary = dir.0.join("elapid");
    std::fs::copy(env!("CARGO_BIN_EXE_elapid"), &binary).unwrap();
    let mut command = Command::new(&binary);
    command.arg("serve").arg(&w.model).args(["--port", "0", "--json", "--threads", "2"]);
    let server = Server::spawn(command);
    for path in ["/studio", "/studio/", "/studio/main.js"] {
        let (status, head, page) = with_headers(&server, &format!("GET {path}"), &[HOST]);
        assert!(status == 404 && head.contains("content-type: text/html"), "{path}: {head}");
        assert!(page.contains("web/build-studio") && page.contains("--studio DIR"), "{page}");
    }
}

#[test]
fn a_folder_that_is_none_or_names_files_elsewhere_is_refused_at_the_start() {
    let w = world("studio-refused");
    let refused = |dir: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
        command.arg("serve").arg(&w.model).args(["--port", "0", "--studio"]).arg(dir);
        let done = command.output().unwrap();
        assert_eq!(done.status.code(), Some(1));
        String::from_utf8(done.stderr).unwrap()
    };
    let none = refused(&w.model);
    assert!(none.contains("is no folder of Elapid Studio"), "{none}");
    assert!(none.contains("hint: make one with `web/build-studio DIR`"), "{none}");
    for (idx, name) in ["../secret.txt", "/etc/passwd", "a//b", ".hidden", "a\\\\b", "%2e", ""]
        .into_iter()
        .enumerate()
    {
        let list = format!(r#"{{"files": ["{name}"]}}"#);
        let dir = folder(&format!("studio-refused-{idx}"), &list);
        let words = refused(&dir.0.join("studio"));
        assert!(words.contains("files.json names"), "{name}: {words}");
    }
}
