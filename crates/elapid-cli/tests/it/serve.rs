//! The real binary as a server: every route, and who may ask.

use crate::common::http::{raw, with_headers, words, world, world_of};
use crate::common::server::{Client, Server};
use crate::common::tiny::{Kind, Tiny};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

fn text_of(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

#[test]
fn what_the_server_is_can_be_asked() {
    let w = world("serve-about");
    let server = Server::start(&w.model, "--alias small --parallel 3 --context 512");
    let client = Client::new(&server);
    assert_eq!(client.get("/health").json()["status"], "ok");
    let models = client.get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "small");
    assert_eq!(models["data"][0]["meta"]["n_ctx"], 512);
    assert_eq!(client.get("/v1/models/small").json(), models["data"][0]);
    assert_eq!(client.get("/v1/models/large").status, 404);
    let props = client.get("/props").json();
    assert_eq!((&props["total_slots"], &props["infill"]), (&json!(3), &json!(true)));
    assert_eq!(props["default_generation_settings"]["n_ctx"], 512);
    assert_eq!(props["eos_token"], "<|endoftext|>");
    assert!(props["chat_template"].as_str().unwrap().contains("im_start"));
    assert_eq!(client.get("/slots").json().as_array().unwrap().len(), 3);
    assert_eq!(client.get("/v1/health").json()["model"], "small");
    let events =
        with_headers(&server, "POST /v1/events", &["Host: localhost", "Content-Length: 0"]);
    assert_eq!(events.0, 204);
    let (status, head, page) = with_headers(&server, "GET /", &["Host: localhost"]);
    assert!(status == 200 && head.contains("content-security-policy") && page.contains("<html"));
    let (_, head, text) = with_headers(&server, "GET /metrics", &["Host: localhost"]);
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    for name in ["llamacpp:prompt_tokens_total", "elapid_cached_tokens_total", "elapid_snapshots"] {
        assert!(text.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}");
    }
}

#[test]
fn prompts_come_as_texts_and_tokens_alone_and_together() {
    let w = world("serve-prompts");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let ask = |prompt: Value| {
        let body = json!({"prompt": prompt, "max_tokens": 6, "temperature": 0});
        let answer = client.post("/v1/completions", &body);
        assert_eq!(answer.status, 200);
        answer.json()
    };
    let alone = ask(json!("let mut count"));
    assert_eq!(alone["choices"][0]["finish_reason"], "length");
    assert_eq!(alone["usage"]["completion_tokens"], 6);
    let ids = client.post("/tokenize", &json!({"content": "let mut count"})).json();
    let ids = ids["tokens"].clone();
    assert_eq!(alone["usage"]["prompt_tokens"], ids.as_array().unwrap().len());
    assert_eq!(text_of(&ask(ids.clone())), text_of(&alone));
    let other = ask(json!("for x in"));
    for both in [json!(["let mut count", "for x in"]), json!([ids, "for x in"])] {
        let both = ask(both);
        assert_eq!(both["choices"][0]["text"], alone["choices"][0]["text"]);
        assert_eq!(both["choices"][1]["text"], other["choices"][0]["text"]);
        assert_eq!(both["choices"][1]["index"], 1);
    }
    assert_eq!(ask(json!(""))["usage"]["prompt_tokens"], 1, "the token that begins a text");
    // The same in the words of llama.cpp.
    let ask = |prompt: Value| {
        let body = json!({"prompt": prompt, "n_predict": 6, "temperature": 0});
        client.post("/completion", &body).json()
    };
    assert_eq!(ask(json!("let mut count"))["content"], text_of(&alone));
    assert_eq!(ask(json!(["let mut count", "for x in"]))[0]["content"], text_of(&alone));
    let mut mixed = client.post("/tokenize", &json!({"content": "let"})).json()["tokens"].clone();
    mixed.as_array_mut().unwrap().push(json!(" mut count"));
    assert_eq!(ask(mixed)["content"], text_of(&alone));
}

#[test]
fn a_stream_is_the_same_answer_in_pieces() {
    let w = world("serve-stream");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let mut body = json!({
        "prompt": "fn main", "max_tokens": 12, "seed": 7, "n": 2, "logprobs": 2,
        "stop": ["zzzz", "qqqq"], "stream_options": {"include_usage": true},
    });
    let whole = client.post("/v1/completions", &body).json();
    body["stream"] = json!(true);
    let (mut texts, mut ends, mut usage) = ([String::new(), String::new()], 0, Value::Null);
    let mut n_logprobs = 0;
    for event in client.post("/v1/completions", &body).events() {
        assert_eq!(event["object"], "text_completion");
        if !event["usage"].is_null() {
            usage = event["usage"].clone();
        }
        for choice in event["choices"].as_array().unwrap() {
            texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
            ends += usize::from(!choice["finish_reason"].is_null());
            let tokens = choice["logprobs"]["token_logprobs"].as_array();
            n_logprobs += tokens.map_or(0, Vec::len);
        }
    }
    let n_tok = whole["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    assert_eq!((ends, n_logprobs), (2, n_tok));
    assert!(n_tok > 12, "two answers of {n_tok} tokens");
    for idx in 0..2 {
        assert_eq!(whole["choices"][idx]["text"], texts[idx]);
    }
    assert_ne!(texts[0], texts[1], "choices of one prompt draw differently");
    assert_eq!(usage["completion_tokens"], whole["usage"]["completion_tokens"]);
    let logprobs = &whole["choices"][0]["logprobs"];
    let n_first = logprobs["tokens"].as_array().unwrap().len();
    assert!((1..=12).contains(&n_first), "{n_first} tokens");
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    assert!(logprobs["token_logprobs"][0].as_f64().unwrap() < 0.0);
    let again = client.post(
        "/v1/completions",
        &json!({
            "prompt": "fn main", "max_tokens": 12, "seed": 7, "echo": true,
        }),
    );
    assert_eq!(text_of(&again.json()), format!("fn main{}", texts[0]), "same seed, same text");
}

#[test]
fn a_chat_goes_through_the_template() {
    let w = world("serve-chat");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let messages = json!([
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [
            {"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"},
        ]},
    ]);
    let prompt = client.post("/apply-template", &json!({"messages": messages})).json();
    let want = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n\
                <|im_start|>assistant\n";
    assert_eq!(prompt["prompt"], want);
    let mut body = json!({
        "messages": messages, "max_completion_tokens": 8, "temperature": 0, "logprobs": true,
        "top_logprobs": 3,
    });
    let whole = client.post("/v1/chat/completions", &body).json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert_eq!(choice["logprobs"]["content"][0]["top_logprobs"].as_array().unwrap().len(), 3);
    let plain =
        client.post("/v1/completions", &json!({"prompt": want, "max_tokens": 8, "temperature": 0}));
    assert_eq!(choice["message"]["content"], text_of(&plain.json()));
    body["stream"] = json!(true);
    let events: Vec<Value> = client.post("/v1/chat/completions", &body).events().collect();
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let deltas = events.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str());
    assert_eq!(choice["message"]["content"], deltas.collect::<String>());
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "length");
    let bare = world_of("serve-no-chat", &Tiny { chat: false, ..Tiny::new(Kind::Mamba) });
    let server = Server::start(&bare.model, "");
    let answer = Client::new(&server).post("/v1/chat/completions", &json!({"messages": messages}));
    assert_eq!(answer.status, 400);
    assert!(words(&answer.json()).contains("no chat template"));
}

#[test]
fn answers_keep_to_a_schema_and_to_stops() {
    let w = world("serve-schema");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let schema = json!({
        "type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let answer = client.post(
        "/v1/chat/completions",
        &json!({
            "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 1,
            "response_format": format,
        }),
    );
    let answer = answer.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(content).unwrap();
    assert!(value["a"] == "x" || value["a"] == "yy", "{value}");
    let whole = client.post(
        "/completion",
        &json!({
            "prompt": "fn main", "n_predict": 24, "temperature": 0, "n_probs": 1,
        }),
    );
    let whole = whole.json();
    let content = whole["content"].as_str().unwrap();
    assert_eq!(whole["completion_probabilities"].as_array().unwrap().len(), 24);
    let stop: String = content.chars().skip(10).take(3).collect();
    let cut = client.post(
        "/completion",
        &json!({
            "prompt": "fn main", "n_predict": 24, "temperature": 0, "stop": [stop],
        }),
    );
    let cut = cut.json();
    assert_eq!((&cut["stop_type"], &cut["stopping_word"]), (&json!("word"), &json!(stop)));
    let end = content.find(&stop).unwrap();
    assert_eq!(cut["content"], content[..end]);
}

#[test]
fn a_hole_is_filled_for_editors() {
    let w = world("serve-infill");
    let server = Server::start(&w.model, "--context 1024");
    let client = Client::new(&server);
    let body = json!({
        "id_slot": 0, "input_prefix": "fn main() {\n", "input_suffix": "\n}\n",
        "input_extra": [{"filename": "a.rs", "text": "let a = 1;\n"}], "prompt": "    let x",
        "n_predict": 16, "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": false,
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": true, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 3000, "project": "demo", "filename": "main.rs",
        "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated"],
    });
    let answer = client.post("/infill", &body).json();
    let mut keys: Vec<&String> = answer.as_object().unwrap().keys().collect();
    keys.sort();
    assert_eq!(keys, ["content", "timings/predicted_n", "timings/prompt_n", "truncated"]);
    assert_eq!((&answer["timings/predicted_n"], &answer["truncated"]), (&json!(16), &json!(false)));
    assert!(!answer["content"].as_str().unwrap().is_empty());
    let mut warm = body.clone();
    warm["n_predict"] = json!(0);
    let warm = client.post("/infill", &warm).json();
    assert_eq!((&warm["content"], &warm["timings/predicted_n"]), (&json!(""), &json!(0)));
    let mut full = body.clone();
    full.as_object_mut().unwrap().remove("response_fields");
    let full = client.post("/infill", &full).json();
    assert_eq!(full["content"], answer["content"], "the likeliest text, each time the same");
    let prompt = full["prompt"].as_str().unwrap();
    let hole = "<|fim_prefix|>fn main() {\n    let x<|fim_suffix|>\n}\n<|fim_middle|>";
    assert!(prompt.ends_with(hole) && prompt.contains("let a = 1;"), "{prompt}");
    // A file longer than the context is shown in part.
    let long =
        json!({"input_prefix": "let a = 1;\n".repeat(5000), "input_suffix": "b\n".repeat(5000)});
    let long = client.post("/infill", &long).json();
    assert_eq!(long["truncated"], true);
    assert!(long["tokens_evaluated"].as_u64().unwrap() < 1024);
    // The same hole in the words of OpenAI and of Tabby.
    let suffix = client.post("/v1/completions", &json!({
        "prompt": "fn main() {\n    let x", "suffix": "\n}\n", "max_tokens": 8, "temperature": 0,
    }));
    let tabby = client.post(
        "/v1/completions",
        &json!({
            "language": "rust", "segments": {"prefix": "fn main() {\n    let x", "suffix": "\n}\n"},
        }),
    );
    let (suffix, tabby) = (suffix.json(), tabby.json());
    assert!(text_of(&tabby).starts_with(text_of(&suffix)), "{suffix} {tabby}");
    let bare = world_of("serve-no-fim", &Tiny { fim: false, ..Tiny::new(Kind::Hybrid) });
    let server = Server::start(&bare.model, "");
    let client = Client::new(&server);
    for (path, body) in
        [("/infill", body), ("/v1/completions", json!({"prompt": "", "suffix": "x"}))]
    {
        let answer = client.post(path, &body);
        assert_eq!(answer.status, 400);
        assert!(words(&answer.json()).contains("no tokens for filling in the middle"));
    }
}

#[test]
fn texts_become_vectors_and_tokens_and_texts_again() {
    let w = world("serve-embed");
    let server = Server::start(&w.model, "--context 64");
    let client = Client::new(&server);
    let ask = |body: Value| client.post("/v1/embeddings", &body).json();
    let two = ask(json!({"input": ["let a", "for b"]}));
    let vector = |value: &Value| -> Vec<f64> {
        value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    let (a, b) = (vector(&two["data"][0]["embedding"]), vector(&two["data"][1]["embedding"]));
    assert!((a.iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-5 && a != b);
    assert_eq!(vector(&ask(json!({"input": "let a"}))["data"][0]["embedding"]), a);
    let coded = ask(json!({"input": "let a", "encoding_format": "base64"}));
    let n_digits = coded["data"][0]["embedding"].as_str().unwrap().len();
    assert_eq!(n_digits, (4 * a.len()).div_ceil(3) * 4);
    for body in [json!({}), json!({"input": []}), json!({"input": "let a ".repeat(99)})] {
        let answer = client.post("/v1/embeddings", &body);
        assert_eq!(answer.status, 400, "{body}");
        words(&answer.json());
    }
    let text = "let é = \"中🚀\";\n";
    let tokens = client.post("/tokenize", &json!({"content": text, "with_pieces": true})).json();
    let ids: Vec<&Value> = tokens["tokens"].as_array().unwrap().iter().map(|t| &t["id"]).collect();
    assert_eq!(client.post("/detokenize", &json!({"tokens": ids})).json()["content"], text);
}

/// An adapter of one matrix that changes what the model says.
fn write_adapter(dir: &Path) {
    let b = (0..32).map(|n| if n % 3 == 0 { 2.0 } else { -1.0 }).collect();
    crate::common::tensors::adapter(dir, "layers.0.feed_forward.down", vec![1.0; 48], b);
}

#[test]
fn adapters_are_models_of_their_own_and_have_scales() {
    let w = world("serve-adapters");
    let dir = w.model.join("../style");
    write_adapter(&dir);
    let flags = format!("--alias base --strict-model --adapter {}=0.5", dir.display());
    let server = Server::start(&w.model, &flags);
    let client = Client::new(&server);
    let ids: Vec<Value> = client.get("/v1/models").json()["data"].as_array().unwrap().clone();
    assert_eq!((&ids[0]["id"], &ids[1]["id"]), (&json!("base"), &json!("style")));
    let ask = |more: Value| {
        let mut body = json!({"prompt": "let mut", "max_tokens": 12, "temperature": 0});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        text_of(&client.post("/v1/completions", &body).json()).to_string()
    };
    let (base, style) = (ask(json!({"model": "base"})), ask(json!({"model": "style"})));
    assert_ne!(base, style);
    assert_eq!(ask(json!({})), style, "as the server was started");
    assert_eq!(ask(json!({"lora": []})), base);
    assert_eq!(ask(json!({"model": "base", "lora": [{"id": 0, "scale": 0.5}]})), style);
    assert_eq!(client.get("/lora-adapters").json()[0]["scale"], 0.5);
    let set = client.post("/lora-adapters", &json!([{"id": 0, "scale": 0.0}])).json();
    assert_eq!(set[0]["scale"], 0.0);
    assert_eq!(ask(json!({})), base);
    let answer = client.post("/v1/completions", &json!({"prompt": "a", "model": "other"}));
    assert_eq!(answer.status, 404);
    assert!(words(&answer.json()).contains("this server has `base`, `style`"));
    assert_eq!(client.post("/lora-adapters", &json!([{"id": 1, "scale": 1}])).status, 400);
}

#[test]
fn every_mistake_gets_its_status_and_the_error_object() {
    let w = world("serve-mistakes");
    let server = Server::start(&w.model, "--context 64 --max-body-mib 1");
    let client = Client::new(&server);
    let cases = [
        ("/v1/completions", json!({}), "prompt"),
        ("/v1/completions", json!({"prompt": 5}), "prompt"),
        ("/v1/completions", json!({"prompt": [1, "a"]}), "prompt"),
        ("/v1/completions", json!({"prompt": [99999]}), "prompt"),
        ("/v1/completions", json!({"prompt": "let a ".repeat(99)}), "prompt"),
        ("/v1/completions", json!({"prompt": "a", "n": 9}), "n"),
        ("/v1/completions", json!({"prompt": "a", "best_of": 3}), "best_of"),
        ("/v1/completions", json!({"prompt": "a", "temperature": "hot"}), "temperature"),
        ("/v1/completions", json!({"prompt": "a", "temperature": -1}), "temperature"),
        ("/v1/completions", json!({"prompt": "a", "top_p": 1.5}), "top_p"),
        ("/v1/completions", json!({"prompt": "a", "stop": vec!["x"; 17]}), "stop"),
        ("/v1/completions", json!({"prompt": "a", "logit_bias": {"99999": 1}}), "logit_bias"),
        ("/v1/completions", json!({"prompt": "a", "lora": [{"id": 0}]}), "lora"),
        ("/v1/completions", json!({"prompt": "a", "stream": "yes"}), "stream"),
        ("/v1/chat/completions", json!({"messages": []}), "messages"),
        ("/v1/chat/completions", json!({"messages": [{"content": "a"}]}), "messages"),
        ("/completion", json!({"prompt": {}}), "prompt"),
        ("/infill", json!({"input_prefix": 1}), "input_prefix"),
        ("/infill", json!({"input_extra": [1]}), "input_extra"),
        ("/detokenize", json!({"tokens": ["a"]}), "tokens"),
        ("/v1/embeddings", json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
    ];
    for (path, body, param) in cases {
        let answer = client.post(path, &body);
        let (status, answer) = (answer.status, answer.json());
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{path} {body}");
        words(&answer);
    }
    for body in ["", "{", "[1]", "{\"prompt\": \"a\"} x", "\"\\ud800\"", &"[".repeat(500)] {
        let answer = client.post_text("/completion", "application/json", body);
        assert_eq!(answer.status, 400, "{body}");
        words(&answer.json());
    }
    let status = |path: &str, kind: &str, body: &str| {
        let answer = client.post_text(path, kind, body);
        let status = answer.status;
        words(&answer.json());
        status
    };
    assert_eq!(status("/completion", "text/plain", "{}"), 415);
    // None at all, as some clients of Ollama send it.
    let untold = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
        Content-Length: 2\r\n\r\n{}";
    assert_eq!(raw(&server, untold).0, 200);
    assert_eq!(status("/nowhere", "application/json", "{}"), 404);
    assert_eq!(status("/health", "application/json", "{}"), 405);
    let long = format!("{{\"prompt\": \"{}\"}}", "a".repeat(2 << 20));
    assert_eq!(status("/completion", "application/json", &long), 413);
    let get = client.get("/infill");
    assert_eq!(get.status, 405);
    words(&get.json());
}

#[test]
fn keys_hosts_and_origins_are_checked() {
    let w = world("serve-keys");
    let keys = w.model.join("keys");
    std::fs::write(&keys, "first\n\nsecond\n").unwrap();
    let flags = format!("--api-key-file {} --allow-origin https://editor.example", keys.display());
    let server = Server::start(&w.model, &flags);
    let status = |line: &str, headers: &[&str]| with_headers(&server, line, headers).0;
    let get = |headers: &[&str]| status("GET /slots", headers);
    assert_eq!(get(&["Host: localhost"]), 401);
    assert_eq!(get(&["Host: localhost", "Authorization: Bearer wrong"]), 401);
    assert_eq!(get(&["Host: localhost", "Authorization: Bearer second"]), 200);
    assert_eq!(get(&["Host: localhost", "X-API-Key: first"]), 200);
    assert_eq!(get(&["Host: evil.example", "X-API-Key: first"]), 403);
    assert_eq!(get(&["X-API-Key: first"]), 400);
    assert_eq!(status("GET /health", &["Host: localhost"]), 200);
    let page = ["Host: localhost", "X-API-Key: first", "Origin: https://evil.example"];
    assert_eq!(get(&page), 403);
    let page = ["Host: localhost", "X-API-Key: first", "Origin: https://editor.example"];
    let (code, head, _) = with_headers(&server, "GET /slots", &page);
    assert!(code == 200 && head.contains("access-control-allow-origin: https://editor.example"));
    let (code, head, _) = with_headers(&server, "OPTIONS /infill", &[page[0], page[2]]);
    assert!(code == 204 && head.contains("access-control-allow-headers: authorization"), "{head}");
    let elsewhere = ["Host: localhost", "Origin: https://evil.example"];
    let (code, head, body) = with_headers(&server, "OPTIONS /infill", &elsewhere);
    assert!(code == 403 && !head.contains("access-control"), "{head}");
    words(&serde_json::from_str(&body).unwrap());
    // Other machines need a key.
    let model = w.model.to_str().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_elapid"))
        .args(["serve", model, "--host", "0.0.0.0", "--port", "0"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("no API key is set") && text.contains("\n\nhint: "), "{text}");
}
