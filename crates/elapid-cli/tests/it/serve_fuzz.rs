//! A server against requests that are wrong in every way: fields of other kinds, numbers out of
//! range, texts cut in half, bytes turned, headers that nobody sends.
//!
//! Cases are made from good requests by a seed, so that a failure can be made again. All go over
//! connections that stay open, several at once. Whatever comes, there is an answer: a success, a
//! refusal in the error format, or the word that there is no room; never a failure of the server's.

use crate::common::Scratch;
use crate::common::rng::Rng;
use crate::common::server::{Client, Server};
use crate::common::tiny::{Kind, Tiny};
use crate::serve_clients::TEMPLATE;
use serde_json::{Map, Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Cases in all.
const N_CASES: u64 = 20_000;
const N_THREADS: u64 = 4;

/// Good requests: path and body.
fn seeds() -> Vec<(&'static str, Value)> {
    let sampling = json!({
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["x", "yy"],
        "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repeat_last_n": 8, "logit_bias": {"5": 1.0}, "ignore_eos": false, "stream": false,
        "n_lookup": 2, "lora": [], "model": "tiny",
    });
    let with = |more: Value| {
        let mut map = sampling.as_object().unwrap().clone();
        map.extend(more.as_object().unwrap().clone());
        Value::Object(map)
    };
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let messages = json!([
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    ]);
    vec![
        (
            "/v1/completions",
            with(json!({"prompt": "let a", "max_tokens": 3, "n": 2, "logprobs": 2, "suffix": "b"})),
        ),
        (
            "/v1/completions",
            with(json!({
                "prompt": ["a", [1, 2, 3]], "max_tokens": 2, "echo": true, "stream": true,
                "stream_options": {"include_usage": true}, "best_of": 1,
            })),
        ),
        (
            "/v1/completions",
            json!({"language": "c", "segments": {"prefix": "a", "suffix": "b", "filepath": "c"}}),
        ),
        (
            "/v1/chat/completions",
            with(json!({
                "messages": messages, "max_tokens": 3, "logprobs": true, "top_logprobs": 2,
                "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto",
                "chat_template_kwargs": {"k": 1}, "response_format": {"type": "text"},
            })),
        ),
        (
            "/v1/chat/completions",
            json!({
                "messages": messages, "max_completion_tokens": 4, "stream": true,
                "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
            }),
        ),
        (
            "/completion",
            with(json!({
                "prompt": [1, "let", 2], "n_predict": 3, "n_probs": 2, "return_tokens": true,
                "response_fields": ["content", "timings/prompt_ms"], "n_indent": 2,
                "t_max_predict_ms": 50, "json_schema": schema,
            })),
        ),
        ("/completion", json!({"prompt": "a", "regex": "[ab]+", "n_predict": 2})),
        (
            "/infill",
            with(json!({
                "input_prefix": "fn f() {\n    ", "input_suffix": "\n}\n", "prompt": "let",
                "input_extra": [{"filename": "a", "text": "b"}], "n_predict": 3, "id_slot": 0,
                "samplers": ["top_k"], "cache_prompt": true, "t_max_predict_ms": 100,
                "n_indent": 4, "project": "p", "filename": "f", "n_prefix": 10, "n_suffix": 9,
                "response_fields": ["content"],
            })),
        ),
        ("/v1/embeddings", json!({"input": ["a", "b"], "encoding_format": "base64"})),
        ("/completion", json!({"prompt": "a", "grammar": GRAMMAR, "n_cmpl": 2, "n_predict": 3})),
        ("/api/embed", json!({"model": "tiny", "input": ["a", "b"], "truncate": true})),
        ("/api/show", json!({"model": "tiny"})),
    ]
    .into_iter()
    .chain(dialects(&messages))
    .chain([
        ("/tokenize", json!({"content": "let é", "add_special": true, "with_pieces": true})),
        ("/detokenize", json!({"tokens": [1, 2, 3]})),
        ("/apply-template", json!({"messages": messages, "add_generation_prompt": false})),
        ("/lora-adapters", json!([{"id": 0, "scale": 1.0}])),
        ("/v1/events", json!({"type": "view"})),
    ])
    .collect()
}

const GRAMMAR: &str = "root ::= \"(\" (root | [a-c]{2,3}) \")\" # x\n";

/// The same in the words of other APIs.
fn dialects(messages: &Value) -> [(&'static str, Value); 5] {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let function = json!({"name": "f", "description": "d", "parameters": schema});
    let tools = json!([{"type": "function", "function": function}]);
    let options = json!({"num_predict": 3, "temperature": 0.5, "num_ctx": 128, "mirostat": 0});
    let call = json!({"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}});
    let result = json!({"type": "tool_result", "tool_use_id": "t", "content": "x"});
    [
        (
            "/api/chat",
            json!({
                "model": "tiny:latest", "messages": messages, "tools": tools, "options": options,
                "keep_alive": "5m", "stream": true, "think": false, "format": "",
            }),
        ),
        (
            "/api/generate",
            json!({"model": "tiny", "prompt": "a", "suffix": "b", "options": options, "raw": true}),
        ),
        (
            "/v1/messages",
            json!({
                "model": "m", "max_tokens": 3, "system": [{"type": "text", "text": "s"}],
                "stream": true, "stop_sequences": ["x"], "metadata": {"user_id": "u"},
                "messages": [
                    {"role": "user", "content": "a"}, {"role": "assistant", "content": [call]},
                    {"role": "user", "content": [result, {"type": "text", "text": "b"}]},
                ],
                "tools": [{"name": "f", "description": "d", "input_schema": schema}],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
            }),
        ),
        (
            "/v1/messages/count_tokens",
            json!({"model": "m", "messages": [{"role": "user", "content": "a"}]}),
        ),
        (
            "/v1/responses",
            json!({
                "model": "m", "instructions": "s", "max_output_tokens": 3, "stream": true,
                "tools": [{"type": "function", "name": "f", "parameters": schema}],
                "tool_choice": "required", "text": {"format": {"type": "text"}},
                "input": [
                    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "x"},
                ],
            }),
        ),
    ]
}

const METHODS: [&str; 8] = ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "POST", "BREW"];

const PATHS: [&str; 15] = [
    "/",
    "/health",
    "/props",
    "/slots",
    "/metrics",
    "/v1/models",
    "/models",
    "/v1/health",
    "/nope",
    "/v1/completions?x=%ff",
    "/infill/",
    "/favicon.ico",
    "/v1/models/tiny",
    "/v1/models/%ff",
    "/v1/models/a%2Fb/c",
];

/// Draws of one case, in order.
struct Dice {
    rng: Rng,
    n: u64,
}

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.n += 1;
        self.rng.below(self.n, n.max(1) as u64) as usize
    }

    fn pick<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// A number that somebody may have forgotten.
fn odd_number(dice: &mut Dice) -> Value {
    match dice.below(16) {
        0 => json!(-1),
        1 => json!(0),
        2 => json!(1e308),
        3 => json!(-1e-308),
        4 => json!(i64::MIN),
        5 => json!(u64::MAX),
        6 => json!(0.5),
        7 => json!(dice.below(1000) as i64 - 500),
        8 => json!(dice.below(1 << 20)),
        _ => json!(1 + dice.below(6)),
    }
}

fn odd_text(dice: &mut Dice) -> Value {
    match dice.below(7) {
        0 => json!(""),
        1 => json!("\u{0}\u{202e}é中🚀<|fim_middle|><|endoftext|>"),
        2 => json!("x".repeat(3000)),
        3 => json!("a b\n".repeat(dice.below(500))),
        4 => json!(dice.pick(&["%llguidance {}\nstart: \"a\"", GRAMMAR, "root ::= [a-"])),
        5 => json!("\n".repeat(1 + dice.below(40))),
        _ => json!(dice.pick(&["base64", "none", "(a+)+$", "tiny", "timings/x", "{}", " "])),
    }
}

/// Something to put where something else was: often of its kind.
fn odd_value(dice: &mut Dice, old: &Value) -> Value {
    match (dice.below(4), old) {
        (0..3, Value::Number(_)) => return odd_number(dice),
        (0..3, Value::String(_)) => return odd_text(dice),
        (0..3, Value::Bool(old)) => return json!(!old),
        _ => {}
    }
    match dice.below(12) {
        0 => Value::Null,
        1 => json!(true),
        2 => odd_text(dice),
        3 => json!([]),
        4 => json!({}),
        5 => json!([[[[1]]]]),
        6 => json!([1, "a", null, {"b": []}]),
        7 => json!({"type": "object", "$ref": "#"}),
        8 => json!(vec![7; 300]),
        9 => json!({"type": "string", "pattern": "(((a+)+)+)+$"}),
        _ => odd_number(dice),
    }
}

/// All places in a value that can be changed.
fn n_places(value: &Value) -> usize {
    1 + match value {
        Value::Array(list) => list.iter().map(n_places).sum(),
        Value::Object(map) => map.values().map(n_places).sum(),
        _ => 0,
    }
}

/// The place of this number.
fn place<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(list) => list.iter_mut().find_map(|item| place(item, at)),
        Value::Object(map) => map.values_mut().find_map(|item| place(item, at)),
        _ => None,
    }
}

/// Fields that some route reads, to be put where they do not belong.
const NAMES: [&str; 14] = [
    "tools",
    "tool_choice",
    "system",
    "options",
    "grammar",
    "json_schema",
    "regex",
    "response_format",
    "suffix",
    "prompt",
    "messages",
    "stream",
    "logit_bias",
    "segments",
];

fn mutate_json(dice: &mut Dice, value: &mut Value) {
    for _ in 0..1 + dice.below(6) / 4 {
        match (dice.below(6), &mut *value) {
            (0, Value::Object(map)) if !map.is_empty() => {
                let keys: Vec<String> = map.keys().cloned().collect();
                map.remove(dice.pick(&keys));
            }
            (1, Value::Object(map)) => {
                let name = dice.pick(&NAMES).to_string();
                let new = odd_value(dice, &Value::Null);
                map.insert(name, new);
            }
            _ => {
                let mut at = dice.below(n_places(value));
                let place = place(value, &mut at).unwrap();
                *place = odd_value(dice, place);
            }
        }
    }
}

fn mutate_bytes(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..1 + dice.below(4) {
        let (at, n) = (dice.below(bytes.len().max(1)), bytes.len());
        match dice.below(5) {
            0 => bytes.truncate(at),
            1 if n > 0 => bytes[at] ^= 1 << dice.below(8),
            2 => bytes.insert(at.min(n), *dice.pick(b"{}[]\",:\\0\x00\xff\xed")),
            3 if n > 0 => drop(bytes.remove(at)),
            _ => {
                let piece = bytes[at.min(n)..].iter().take(20).copied().collect::<Vec<_>>();
                bytes.splice(at.min(n)..at.min(n), piece);
            }
        }
    }
}

/// Headers that are well-formed HTTP, and odd.
fn odd_headers(dice: &mut Dice) -> String {
    let list = [
        "Authorization: Bearer x\r\n",
        "Authorization: \r\n",
        "X-Api-Key: \t\r\n",
        "Origin: null\r\n",
        "Origin: http://localhost\r\n",
        "Origin: https://evil.example\r\n",
        "Accept: text/event-stream\r\n",
        "Accept-Encoding: gzip, br\r\n",
        "Cookie: a=b; c=d\r\n",
        "Range: bytes=0-1\r\n",
        "If-None-Match: *\r\n",
        "Content-Encoding: gzip\r\n",
        "X-Long: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n",
        "Forwarded: for=1.2.3.4;host=evil\r\n",
    ];
    (0..dice.below(3)).map(|_| *dice.pick(&list)).collect()
}

/// The bytes of a case, and its method, which says whether a body comes back.
fn case(seeds: &[(&'static str, Value)], number: u64) -> (Vec<u8>, &'static str) {
    let mut dice = Dice { rng: Rng::new(0x66757a7a, number), n: 0 };
    let (path, seed) = dice.pick(seeds).clone();
    let mut seed = seed;
    let mut method = "POST";
    let mut path = path.to_string();
    let kind = dice.below(10);
    let mut body = match kind {
        0 => {
            // A good body on a route of another.
            path = dice.pick(seeds).0.to_string();
            seed.to_string().into_bytes()
        }
        1 => {
            method = *dice.pick(&METHODS);
            path = dice.pick(&PATHS).to_string();
            Vec::new()
        }
        2 | 3 => {
            let mut bytes = seed.to_string().into_bytes();
            mutate_bytes(&mut dice, &mut bytes);
            bytes
        }
        _ => {
            mutate_json(&mut dice, &mut seed);
            seed.to_string().into_bytes()
        }
    };
    if dice.below(40) == 0 {
        body = vec![b'['; 1000 + dice.below(3000)];
    }
    let content_type = match dice.below(20) {
        0 => "Content-Type: text/plain\r\n",
        1 => "",
        2 => "Content-Type: application/json; charset=utf-8\r\n",
        _ => "Content-Type: application/json\r\n",
    };
    let host = match dice.below(30) {
        0 => "Host: evil.example\r\n",
        1 => "",
        _ => "Host: localhost\r\n",
    };
    let mut bytes = format!("{method} {path} HTTP/1.1\r\n{host}{content_type}").into_bytes();
    bytes.extend(odd_headers(&mut dice).into_bytes());
    match dice.below(4) {
        0 if !body.is_empty() => {
            bytes.extend(b"Transfer-Encoding: chunked\r\n\r\n");
            for chunk in body.chunks(1 + dice.below(200)) {
                bytes.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
                bytes.extend(chunk);
                bytes.extend(b"\r\n");
            }
            bytes.extend(b"0\r\n\r\n");
        }
        _ => {
            bytes.extend(format!("Content-Length: {}\r\n\r\n", body.len()).into_bytes());
            bytes.extend(body);
        }
    }
    (bytes, method)
}

/// A connection that is opened again only when the server said it would close it.
struct Connection<'a> {
    server: &'a Server,
    reader: Option<BufReader<TcpStream>>,
}

impl Connection<'_> {
    /// The status and the body of the answer.
    fn ask(&mut self, bytes: &[u8], method: &str) -> Result<(u16, Vec<u8>), String> {
        let address = self.server.url.trim_start_matches("http://");
        let reader = self.reader.get_or_insert_with(|| {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            stream.set_nodelay(true).unwrap();
            BufReader::new(stream)
        });
        reader.get_mut().write_all(bytes).map_err(|error| format!("cannot write: {error}"))?;
        let mut line = String::new();
        let mut next = |reader: &mut BufReader<TcpStream>| -> Result<String, String> {
            line.clear();
            let n = reader.read_line(&mut line).map_err(|error| format!("cannot read: {error}"))?;
            if n == 0 { Err("closed without an answer".into()) } else { Ok(line.clone()) }
        };
        let first = next(reader)?;
        let status = first.split(' ').nth(1).and_then(|status| status.parse().ok());
        let status: u16 = status.ok_or(format!("no status in {first:?}"))?;
        let (mut length, mut is_chunked, mut closes) = (None, false, false);
        loop {
            let header = next(reader)?.to_ascii_lowercase();
            match header.trim().split_once(": ") {
                None => break,
                Some(("content-length", n)) => length = n.parse::<usize>().ok(),
                Some(("transfer-encoding", "chunked")) => is_chunked = true,
                Some(("connection", "close")) => closes = true,
                _ => {}
            }
        }
        let mut body = Vec::new();
        let fail = |error: std::io::Error| format!("the body breaks off: {error}");
        if method == "HEAD" || status == 204 {
        } else if is_chunked {
            loop {
                let size = next(reader)?;
                let size = usize::from_str_radix(size.trim(), 16).map_err(|e| e.to_string())?;
                let mut chunk = vec![0; size + 2];
                reader.read_exact(&mut chunk).map_err(fail)?;
                body.extend(&chunk[..size]);
                if size == 0 {
                    break;
                }
            }
        } else {
            body = vec![0; length.ok_or("neither a length nor chunks")?];
            reader.read_exact(&mut body).map_err(fail)?;
        }
        if closes {
            self.reader = None;
        }
        Ok((status, body))
    }
}

/// What is wrong with an answer, if something is.
fn fault(method: &str, status: u16, body: &[u8]) -> Option<String> {
    let is_error = |value: &Value| {
        let error = value["error"].as_object().cloned().unwrap_or_else(Map::new);
        let has = |keys: &[&str]| keys.iter().all(|key| error.contains_key(*key));
        // OpenAI's, Anthropic's, Ollama's.
        has(&["message", "type", "param", "code"])
            || value["type"] == "error" && has(&["message", "type"])
            || value["error"].is_string()
    };
    let text = String::from_utf8_lossy(body);
    match status {
        200 | 204 => {
            let failed = text.contains("\"type\":\"server_error\"");
            failed.then(|| format!("a failure in a stream: {text}"))
        }
        400..=499 | 503 if method == "HEAD" => None,
        400..=499 | 503 => match serde_json::from_str::<Value>(&text) {
            Ok(value) if is_error(&value) => None,
            _ => Some(format!("{status} without the error object: {text}")),
        },
        _ => Some(format!("{status}: {text}")),
    }
}

/// Runs every case of one thread; how many answers there were of each status.
fn run(server: &Server, thread: u64) -> Result<[u64; 6], String> {
    let seeds = seeds();
    let mut connection = Connection { server, reader: None };
    let mut counts = [0; 6];
    for number in (thread..N_CASES).step_by(N_THREADS as usize) {
        let (bytes, method) = case(&seeds, number);
        let shown = || format!("case {number}: {}", String::from_utf8_lossy(&bytes));
        let (status, body) =
            connection.ask(&bytes, method).map_err(|problem| format!("{problem}; {}", shown()))?;
        if let Some(problem) = fault(method, status, &body) {
            return Err(format!("{problem}; {}", shown()));
        }
        counts[usize::from(status / 100)] += 1;
    }
    Ok(counts)
}

#[test]
fn whatever_comes_there_is_an_answer_and_no_failure() {
    let dir = Scratch::new("serve-fuzz");
    let model = dir.0.join("tiny");
    Tiny { n_ctx: 256, ..Tiny::new(Kind::Hybrid) }.write(&model);
    std::fs::write(model.join("chat_template.jinja"), TEMPLATE).unwrap();
    let mut server = Server::start(&model, "--max-tokens 4 --alias tiny --snapshot-mib 8");
    let counts = std::thread::scope(|scope| {
        let server = &server;
        let threads: Vec<_> =
            (0..N_THREADS).map(|thread| scope.spawn(move || run(server, thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let mut sums = [0; 6];
    for count in counts {
        let count = count.unwrap_or_else(|problem| panic!("{problem}"));
        sums.iter_mut().zip(count).for_each(|(sum, n)| *sum += n);
    }
    assert!(server.is_alive());
    let client = Client::new(&server);
    // The last client may have hung up before its answer was over.
    let is_idle = || client.get("/health").json()["slots_processing"] == 0;
    let pause = std::time::Duration::from_millis(50);
    let idle = (0..200).any(|_| is_idle() || (std::thread::sleep(pause), false).1);
    assert!(idle, "a slot still works after ten seconds");
    // Both kinds of answers came, or nothing was tested.
    let [_, _, n_good, _, n_bad, n_full] = sums;
    println!("{n_good} answered, {n_bad} refused, {n_full} turned away");
    assert!(n_good > N_CASES / 10 && n_bad > N_CASES / 4, "{sums:?}");
    let said = server.end();
    assert!(!said.contains("panicked"), "{said}");
}
