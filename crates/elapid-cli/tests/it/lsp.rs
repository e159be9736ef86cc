//! `elapid lsp` as an editor sees it: the real binary, messages on its stdin and stdout.

use crate::common::http::{World, world};
use crate::common::rng::Rng;
use crate::common::{Scratch, elapid};
use crate::project::{ORDERS, PRICE, adapted, object, project};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// Where a test is at all to fail.
const TIME_MAX: Duration = Duration::from_secs(120);

struct Editor {
    child: Child,
    stdin: Option<ChildStdin>,
    messages: Receiver<Value>,
    said: Receiver<String>,
    n_asked: u64,
}

fn message(out: &mut impl BufRead) -> Option<Value> {
    let mut line = String::new();
    out.read_line(&mut line).ok().filter(|n| *n > 0)?;
    let n: usize = line.strip_prefix("Content-Length: ").unwrap().trim_end().parse().unwrap();
    let mut body = vec![0; n + 2];
    out.read_exact(&mut body).unwrap();
    assert!(body.starts_with(b"\r\n"), "{body:?}");
    Some(serde_json::from_slice(&body[2..]).unwrap())
}

impl Editor {
    /// A server in a directory, with these flags.
    fn start(dir: &Path, flags: &[&str]) -> Editor {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
        command.current_dir(dir).env("XDG_CACHE_HOME", dir.join(".cache")).arg("lsp").args(flags);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (sender, messages) = channel();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            while let Some(message) = message(&mut out) {
                let _ = sender.send(message);
            }
        });
        let (sender, said) = channel();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|it| sender.send(it)));
        let stdin = child.stdin.take();
        Editor { child, stdin, messages, said, n_asked: 0 }
    }

    /// The same, greeted by an editor that knows these encodings and inline completion.
    fn open(dir: &Path, flags: &[&str], encodings: &[&str]) -> Editor {
        let mut editor = Editor::start(dir, flags);
        let got = editor.ask("initialize", hello(dir, encodings));
        assert!(got["result"]["capabilities"]["inlineCompletionProvider"].is_object(), "{got}");
        editor.tell("initialized", json!({}));
        editor
    }

    /// Bytes as they are. A server that has ended does not take them.
    fn raw(&mut self, bytes: &[u8]) {
        let stdin = self.stdin.as_mut().unwrap();
        stdin.write_all(bytes).and_then(|()| stdin.flush()).unwrap();
    }

    fn send(&mut self, message: &Value) {
        let body = message.to_string();
        self.raw(format!("Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes());
    }

    fn tell(&mut self, method: &str, params: Value) {
        self.send(&json!({"jsonrpc": "2.0", "method": method, "params": params}));
    }

    /// Sends a request; its id.
    fn request(&mut self, method: &str, params: Value) -> u64 {
        self.n_asked += 1;
        let id = self.n_asked;
        self.send(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        id
    }

    fn receive(&self) -> Value {
        self.messages.recv_timeout(TIME_MAX).expect("the server says something")
    }

    /// Sends a request and waits for its answer, which is the next message.
    fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.request(method, params);
        let got = self.receive();
        assert_eq!(got["id"], id, "{got}");
        got
    }

    fn show(&mut self, uri: &str, text: &str) {
        let document = json!({"uri": uri, "languageId": "python", "version": 1, "text": text});
        self.tell("textDocument/didOpen", json!({"textDocument": document}));
    }

    /// The text that an inline completion inserts.
    fn inline(&mut self, uri: &str, place: [usize; 2]) -> String {
        let got = self.ask("textDocument/inlineCompletion", at(uri, place));
        let item = &got["result"]["items"][0];
        item["insertText"].as_str().unwrap_or_else(|| panic!("{got}")).to_string()
    }

    /// Waits for a line of stderr that has these words.
    fn wait_for(&self, words: &str) -> String {
        loop {
            let line = self.said.recv_timeout(TIME_MAX);
            let line = line.unwrap_or_else(|_| panic!("`{words}` is not said"));
            if line.contains(words) {
                return line;
            }
        }
    }

    fn exit_code(mut self) -> Option<i32> {
        drop(self.stdin.take());
        self.child.wait().unwrap().code()
    }
}

impl Drop for Editor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hello(dir: &Path, encodings: &[&str]) -> Value {
    json!({
        "processId": null, "rootUri": null,
        "capabilities": {
            "general": {"positionEncodings": encodings}, "textDocument": {"inlineCompletion": {}},
        },
        "workspaceFolders": [{"uri": uri(dir, ""), "name": "project"}],
    })
}

fn uri(dir: &Path, file: &str) -> String {
    format!("file://{}/{file}", dir.display())
}

/// The parameters of a request at line and column.
fn at(uri: &str, [line, character]: [usize; 2]) -> Value {
    json!({
        "textDocument": {"uri": uri}, "position": {"line": line, "character": character},
        "context": {"triggerKind": 2},
    })
}

/// What `elapid complete` inserts at a place that is counted as it does.
fn completed(dir: &Path, model: &str, place: &str) -> String {
    let flags = ["--model", model, "--lines", "1", "--json"];
    let got = object(dir, &[&["complete", place], &flags[..]].concat());
    got["text"].as_str().unwrap().to_string()
}

fn model(world: &World) -> &str {
    world.model.to_str().unwrap()
}

fn code(message: &Value) -> Option<i64> {
    message["error"]["code"].as_i64()
}

#[test]
fn an_editor_is_told_what_there_is_and_lists_are_for_those_that_show_nothing_in_the_text() {
    let (dir, base) = (project("lsp-hello"), world("lsp-hello-base"));
    let mut editor = Editor::start(&dir.0, &["-m", model(&base), "--stdio"]);
    let got = editor.ask("initialize", hello(&dir.0, &["utf-32", "utf-8"]));
    let can = &got["result"]["capabilities"];
    assert_eq!(can["positionEncoding"], "utf-8");
    assert_eq!(can["textDocumentSync"]["change"], 2);
    assert_eq!(can["workspace"]["workspaceFolders"]["changeNotifications"], true);
    assert!(can["completionProvider"].is_null(), "{got}");
    assert_eq!(got["result"]["serverInfo"]["name"], "elapid");
    let mut plain = Editor::start(&dir.0, &["-m", model(&base)]);
    let got = plain.ask("initialize", json!({"capabilities": {}, "rootUri": uri(&dir.0, "")}));
    let can = &got["result"]["capabilities"];
    assert_eq!(can["positionEncoding"], "utf-16");
    assert!(can["completionProvider"].is_object(), "{got}");
}

#[test]
fn what_is_inserted_is_what_complete_says_with_files_of_the_project_and_in_either_encoding() {
    let (dir, base) = (project("lsp-same"), world("lsp-same-base"));
    let model = model(&base);
    let text = ORDERS.replace("    discount =", "    crab = \"🦀é\"; discount =");
    assert_ne!(text, ORDERS);
    dir.file("src/orders.py", text.as_bytes());
    let line = text.lines().nth(4).unwrap();
    let before = &line[..line.find("(order").unwrap() + 1];
    let n_chars = before.chars().count();
    let want = completed(&dir.0, model, &format!("src/orders.py:5:{}", n_chars + 1));
    let alone = ["src/orders.py:5:28", "--model", model, "--lines", "1", "--json", "--no-context"];
    let alone = object(&dir.0, &[&["complete"], &alone[..]].concat());
    assert_ne!(want, alone["text"], "files of the project change what this model says");
    let uri = uri(&dir.0, "src/orders.py");
    let flags = ["-m", model, "--lines", "1"];
    let n_utf16 = before.encode_utf16().count();
    assert!(n_chars < n_utf16 && n_utf16 < before.len());
    for (encoding, column) in [("utf-16", n_utf16), ("utf-8", before.len())] {
        let mut editor = Editor::open(&dir.0, &flags, &[encoding]);
        // Opened without the end of the file, which is typed by two changes.
        let (head, tail) = text.split_at(text.find("\n    return").unwrap());
        editor.show(&uri, &format!("{head} x"));
        let n_units = |text: &str| match encoding {
            "utf-8" => text.len(),
            _ => text.encode_utf16().count(),
        };
        let end = n_units(line);
        let place = |line: usize, character: usize| json!({"line": line, "character": character});
        let range = |from, to| json!({"start": from, "end": to});
        let changes = json!([
            {"range": range(place(4, end), place(4, end + 2)), "text": ""},
            {"range": range(place(4, end), place(4, end)), "text": tail},
        ]);
        let document = json!({"uri": uri, "version": 2});
        let changed = json!({"textDocument": document, "contentChanges": changes});
        editor.tell("textDocument/didChange", changed);
        assert_eq!(editor.inline(&uri, [4, column]), want, "{encoding}");
        let got = editor.ask("textDocument/completion", at(&uri, [4, column]));
        let item = &got["result"]["items"][0];
        assert_eq!(item["textEdit"]["newText"], want, "{got}");
    }
}

#[test]
fn a_cancelled_completion_ends_while_it_runs_and_the_next_is_answered() {
    let (dir, base) = (project("lsp-cancel"), world("lsp-cancel-base"));
    let flags = ["-m", model(&base), "--lines", "1000", "--context", "16384", "--log"];
    let mut editor = Editor::open(&dir.0, &flags, &[]);
    let uri = uri(&dir.0, "src/orders.py");
    editor.show(&uri, ORDERS);
    let id = editor.request("textDocument/inlineCompletion", at(&uri, [4, 15]));
    editor.wait_for("prompt  ");
    editor.tell("$/cancelRequest", json!({"id": id}));
    let got = editor.receive();
    assert_eq!((&got["id"], code(&got)), (&json!(id), Some(-32800)), "{got}");
    // One that is not there, or over, is no error.
    editor.tell("$/cancelRequest", json!({"id": id}));
    editor.tell("$/cancelRequest", json!({"id": "other"}));
    let first = editor.request("textDocument/inlineCompletion", at(&uri, [4, 15]));
    editor.wait_for("prompt  ");
    let other = uri.replace("orders", "price");
    editor.show(&other, PRICE);
    let waiting = editor.request("textDocument/completion", at(&other, [3, 4]));
    // A newer one for a document ends the one before it.
    let newest = editor.request("textDocument/inlineCompletion", at(&uri, [4, 16]));
    let got = editor.receive();
    assert_eq!((&got["id"], code(&got)), (&json!(first), Some(-32801)), "{got}");
    editor.tell("$/cancelRequest", json!({"id": waiting}));
    let got = editor.receive();
    assert_eq!((&got["id"], code(&got)), (&json!(waiting), Some(-32800)), "{got}");
    editor.wait_for("prompt  ");
    editor.tell("textDocument/didClose", json!({"textDocument": {"uri": uri}}));
    let got = editor.receive();
    assert_eq!((&got["id"], code(&got)), (&json!(newest), Some(-32801)), "{got}");
    let got = editor.ask("textDocument/inlineCompletion", at(&uri, [4, 16]));
    assert_eq!(code(&got), Some(-32602), "it is closed: {got}");
    assert_eq!(editor.ask("shutdown", Value::Null)["result"], Value::Null);
    editor.tell("exit", Value::Null);
    assert_eq!(editor.exit_code(), Some(0));
}

#[test]
fn after_a_key_the_prompt_is_read_from_the_last_cached_point() {
    let (dir, base) = (project("lsp-cache"), world("lsp-cache-base"));
    let line = |n: usize| format!("    # {n}: the discount of an order, in percent of its total\n");
    let long = format!("{PRICE}{}", (0..20).map(line).collect::<String>());
    dir.file("src/price.py", long.as_bytes());
    let flags = ["-m", model(&base), "--lines", "1", "--context", "8192", "--log"];
    let mut editor = Editor::open(&dir.0, &flags, &[]);
    let uri = uri(&dir.0, "src/orders.py");
    let mut n_cached = Vec::new();
    editor.show(&uri, ORDERS);
    for n in 0..3 {
        editor.inline(&uri, [4, 15 + n]);
        let said = editor.wait_for("prompt  ");
        let words: Vec<&str> = said.split_whitespace().collect();
        n_cached.push(words[4].parse::<usize>().unwrap());
        let place = json!({"line": 4, "character": 15 + n});
        let change = json!({"range": {"start": place, "end": place}, "text": "x"});
        let document = json!({"uri": uri, "version": n + 2});
        let changed = json!({"textDocument": document, "contentChanges": [change]});
        editor.tell("textDocument/didChange", changed);
    }
    assert!(n_cached[0] == 0 && n_cached[1] >= 256 && n_cached[2] >= 256, "{n_cached:?}");
}

#[test]
fn the_newest_adapter_of_the_project_is_taken_also_one_that_is_made_meanwhile() {
    let (dir, base) = (project("lsp-adapter"), world("lsp-adapter-base"));
    adapted(&dir, 1, &base, "better");
    let mut editor = Editor::open(&dir.0, &["--lines", "1"], &[]);
    let uri = uri(&dir.0, "src/orders.py");
    editor.show(&uri, ORDERS);
    let place = ["complete", "src/orders.py:6:5", "--lines", "1", "--json"];
    let first = editor.inline(&uri, [5, 4]);
    editor.wait_for("model   .elapid/adapt/1 on tiny");
    assert_eq!(object(&dir.0, &place)["text"], first);
    adapted(&dir, 2, &base, "better");
    // At full strength both say the same at this place.
    let path = dir.0.join(".elapid/adapt/2/certificate.json");
    let certificate = std::fs::read_to_string(&path).unwrap();
    let weak = certificate.replace("\"lora\"", "\"lora\",\"scale\":0.001");
    std::fs::write(&path, weak).unwrap();
    let second = editor.inline(&uri, [5, 4]);
    editor.wait_for("model   .elapid/adapt/2 on tiny");
    assert_eq!(object(&dir.0, &place)["text"], second);
    assert_ne!(first, second);
}

#[test]
fn a_folder_that_is_opened_later_is_a_project_where_nothing_else_marks_one() {
    let (dir, base) = (Scratch::new("lsp-folders"), world("lsp-folders-base"));
    for (name, text) in [("a/price.py", PRICE), ("a/deep/orders.py", ORDERS)] {
        std::fs::create_dir_all(dir.0.join("a/deep")).unwrap();
        dir.file(name, text.as_bytes());
    }
    let mut editor = Editor::start(&dir.0, &["-m", model(&base), "--lines", "1"]);
    editor.ask("initialize", json!({"capabilities": {}}));
    let uri = uri(&dir.0, "a/deep/orders.py");
    editor.show(&uri, ORDERS);
    let alone = editor.inline(&uri, [4, 33]);
    let folder = json!([{"uri": format!("file://{}", dir.path("a")), "name": "a"}]);
    let method = "workspace/didChangeWorkspaceFolders";
    editor.tell(method, json!({"event": {"added": folder, "removed": []}}));
    assert_ne!(editor.inline(&uri, [4, 33]), alone, "price.py is shown now");
    editor.tell(method, json!({"event": {"added": [], "removed": folder}}));
    assert_eq!(editor.inline(&uri, [4, 33]), alone);
    // A text that was never saved is no error.
    editor.show("untitled:Untitled-1", "def f(");
    assert!(!editor.inline("untitled:Untitled-1", [0, 6]).is_empty());
}

#[test]
fn what_is_no_message_is_answered_as_such_and_nothing_ends_but_by_exit() {
    let (dir, base) = (project("lsp-hostile"), world("lsp-hostile-base"));
    let mut editor = Editor::start(&dir.0, &["-m", model(&base), "--lines", "1"]);
    let got = editor.ask("textDocument/inlineCompletion", json!({}));
    assert_eq!(code(&got), Some(-32002), "{got}");
    editor.ask("initialize", hello(&dir.0, &[]));
    let body = |text: &str| format!("Content-Length: {}\r\n\r\n{text}", text.len());
    let list = [
        ("\r\n".to_string(), -32700),
        ("GET / HTTP/1.1\r\nHost: x\r\n\r\n".into(), -32700),
        ("Content-Length: 18446744073709551616\r\n\r\n".into(), -32700),
        ("Content-Length: -5\r\n\r\n".into(), -32700),
        (format!("{}\r\n\r\n", "x".repeat(100_000)), -32700),
        (body("{"), -32700),
        (body(""), -32700),
        (body("\u{0}\u{1}"), -32700),
        (body(&"[".repeat(200_000)), -32700),
        (body("[]"), -32600),
        (body("7"), -32600),
        (body("{\"id\": 7}"), -32600),
        (body("{\"id\": 8, \"method\": \"workspace/symbol\"}"), -32601),
        (body("{\"id\": 9, \"method\": \"initialize\"}"), -32600),
        (body("{\"id\": 10, \"method\": \"textDocument/inlineCompletion\"}"), -32602),
    ];
    for (bytes, want) in list {
        editor.raw(bytes.as_bytes());
        let got = editor.receive();
        assert_eq!(code(&got), Some(want), "{:?}: {got}", &bytes[..bytes.len().min(80)]);
    }
    editor.raw(b"Content-Length: 3\r\n\r\n\xff\xfe\"");
    assert_eq!(code(&editor.receive()), Some(-32700));
    editor.tell("$/unknown", json!([1]));
    editor.send(&json!({"jsonrpc": "2.0", "id": 99, "result": null}));
    let uri = uri(&dir.0, "src/orders.py");
    editor.show(&uri, ORDERS);
    assert!(!editor.inline(&uri, [4, 15]).is_empty());
    let far = editor.inline(&uri, [4_000_000_000, 4_000_000_000]);
    assert!(!far.is_empty(), "a place behind the end is the end");
    editor.ask("shutdown", Value::Null);
    assert_eq!(code(&editor.ask("textDocument/completion", at(&uri, [0, 0]))), Some(-32600));
    editor.tell("exit", Value::Null);
    assert_eq!(editor.exit_code(), Some(0));
}

#[test]
fn a_length_that_nobody_has_bytes_for_is_refused_and_the_end_of_the_stream_ends_the_server() {
    let (dir, base) = (project("lsp-huge"), world("lsp-huge-base"));
    let mut editor = Editor::open(&dir.0, &["-m", model(&base)], &[]);
    editor.raw(b"Content-Length: 9000000000000000000\r\n\r\n{}");
    assert_eq!(code(&editor.receive()), Some(-32600));
    assert_eq!(editor.exit_code(), Some(1));
    let mut editor = Editor::start(&dir.0, &["-m", model(&base)]);
    editor.tell("exit", Value::Null);
    assert_eq!(editor.exit_code(), Some(1), "nobody said shutdown");
}

#[test]
fn messages_with_bytes_changed_do_not_end_the_server() {
    let (dir, base) = (project("lsp-fuzz"), world("lsp-fuzz-base"));
    let mut editor = Editor::open(&dir.0, &["-m", model(&base), "--lines", "1"], &[]);
    let uri = uri(&dir.0, "src/orders.py");
    editor.show(&uri, ORDERS);
    let place = json!({"line": 4, "character": 15});
    let change = json!({"range": {"start": place, "end": place}, "text": "🦀"});
    let document = json!({"uri": uri, "version": 2});
    let messages = [
        json!({"method": "textDocument/didChange",
            "params": {"textDocument": document, "contentChanges": [change]}}),
        json!({"id": "x", "method": "textDocument/completion", "params": at(&uri, [4, 15])}),
        json!({"method": "textDocument/didOpen",
            "params": {"textDocument": {"uri": uri, "text": ORDERS}}}),
        json!({"method": "$/cancelRequest", "params": {"id": "x"}}),
        json!({"method": "workspace/didChangeWorkspaceFolders",
            "params": {"event": {"added": [{"uri": uri, "name": ""}], "removed": []}}}),
    ];
    let rng = Rng::new(20, 0);
    for n in 0..400 {
        let mut body = messages[n as usize % messages.len()].to_string().into_bytes();
        for change in 0..1 + rng.below(8 * n, 4) {
            let at = rng.below(8 * n + 1 + change, body.len() as u64) as usize;
            let bytes = b"\"{}[]:,0-9e\\x\xff\x80\n";
            body[at] = bytes[rng.below(8 * n + 4 + change, bytes.len() as u64) as usize];
        }
        let header = format!("Content-Length: {}\r\n\r\n", body.len());
        editor.raw(&[header.as_bytes(), &body].concat());
    }
    editor.show(&uri, ORDERS);
    let id = editor.request("textDocument/inlineCompletion", at(&uri, [4, 15]));
    let got = std::iter::repeat_with(|| editor.receive()).find(|got| got["id"] == id).unwrap();
    assert!(got["result"]["items"][0]["insertText"].is_string(), "{got}");
}

#[test]
fn doctor_says_what_the_machine_has_and_what_is_used() {
    let dir = Scratch::new("doctor");
    let found = object(&dir.0, &["doctor", "--json"]);
    assert!(found["memory"].as_u64() > found["memory_free"].as_u64(), "{found}");
    assert!(found["disk_free"].as_u64().is_some_and(|n| n > 0), "{found}");
    assert!(found["use"].as_str().is_some_and(|text| !text.is_empty()), "{found}");
    assert!(found["model"].as_str().unwrap().starts_with("elapid-code: "), "{found}");
    // Each kind of GPU is listed or missed.
    for kind in ["cuda", "wgpu"] {
        let is_kind = |one: &Value| one["device"].as_str().unwrap().starts_with(kind);
        let has = |name: &str| found[name].as_array().unwrap().iter().any(is_kind);
        assert!(has("gpus") || has("missing"), "{kind}: {found}");
    }
    let text = String::from_utf8(elapid(&["doctor"]).stdout).unwrap();
    for word in ["cpu", "memory", "disk", "git", "use", "model", "more"] {
        assert!(text.lines().any(|line| line.starts_with(word)), "{word}: {text}");
    }
}
