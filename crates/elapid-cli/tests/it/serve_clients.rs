//! What clients of other servers expect: their names of models, their fields, tools, and the APIs
//! of Ollama and Anthropic beside OpenAI's.

use crate::common::http::{World, words, world};
use crate::common::server::{Answer, Client, Server};
use serde_json::{Value, json};

/// A template in the manner of Hermes and Qwen.
pub const TEMPLATE: &str = "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n\
    {{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}\
    {% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content + '' }}\
    {% for call in message.tool_calls or [] %}<tool_call>\n\
    {\"name\": \"{{ call.function.name }}\", \"arguments\": \
    {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n\
    {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A model whose template knows tools.
fn world_with_tools(name: &str) -> World {
    let world = world(name);
    std::fs::write(world.model.join("chat_template.jinja"), TEMPLATE).unwrap();
    world
}

/// The schema of the one tool that tests have.
fn schema() -> Value {
    json!({
        "type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"],
        "additionalProperties": false,
    })
}

fn tools() -> Value {
    let function = json!({"name": "weather", "description": "d", "parameters": schema()});
    json!([{"type": "function", "function": function}])
}

fn joined(mut body: Value, more: Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn good(answer: Answer) -> Value {
    let (status, body) = (answer.status, answer.json());
    assert_eq!(status, 200, "{body}");
    body
}

fn is_city(value: &Value) -> bool {
    value["city"] == "Oslo" || value["city"] == "Rome"
}

#[test]
fn a_request_for_a_model_of_another_name_is_answered_and_told_the_true_one() {
    let w = world("clients-name");
    let body = json!({"model": "google/gemini", "prompt": "let a", "max_tokens": 2});
    let chat = json!({"model": "gpt-4o", "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 2});
    let server = Server::start(&w.model, "--log");
    let client = Client::new(&server);
    for (path, body) in [("/v1/completions", &body), ("/v1/chat/completions", &chat)] {
        assert_eq!(good(client.post(path, body))["model"], "tiny");
    }
    let vectors = good(client.post("/v1/embeddings", &json!({"model": "x", "input": "a"})));
    assert_eq!(vectors["model"], "tiny");
    assert_eq!(good(client.post("/embedding", &json!({"content": "a"})))[0]["index"], 0);
    let mut stream = joined(chat.clone(), json!({"stream": true}));
    assert!(client.post("/v1/chat/completions", &stream).events().count() > 2);
    stream["n"] = json!("x");
    assert_eq!(client.post("/v1/chat/completions", &stream).status, 400);
    server.wait_for("request POST /v1/chat/completions 400 ");
    server.wait_for("request POST /embedding 200 ");
    let n_lines = server.end().lines().filter(|line| line.starts_with("request ")).count();
    assert_eq!(n_lines, 6);
    let server = Server::start(&w.model, "--strict-model");
    let client = Client::new(&server);
    let answer = client.post("/v1/completions", &body);
    assert_eq!(answer.status, 404);
    assert!(words(&answer.json()).contains("this server has `tiny`"));
    assert_eq!(client.post("/v1/completions", &joined(body, json!({"model": "tiny"}))).status, 200);
}

#[test]
fn a_run_is_served_under_its_own_name() {
    let w = world("clients-run");
    let run = w.model.parent().unwrap().join("runs/a1");
    std::fs::create_dir_all(&run).unwrap();
    std::fs::rename(&w.model, run.join("model")).unwrap();
    std::fs::write(run.join("metrics.jsonl"), "").unwrap();
    let server = Server::start(&run.join("model"), "");
    let models = Client::new(&server).get("/v1/models").json();
    assert_eq!(models["data"][0]["id"], "runs/a1");
    assert_eq!(Client::new(&server).get("/v1/models/runs/a1").json(), models["data"][0]);
}

#[test]
fn a_field_is_honoured_or_refused_by_its_name() {
    let w = world("clients-fields");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let plain = json!({"prompt": "let a", "n_predict": 2, "seed": 1});
    let neutral = json!({
        "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dry_multiplier": 0.0,
        "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["\n"], "xtc_probability": 0, "xtc_threshold": 0.1,
        "typical_p": 1.0, "top_n_sigma": -1.0, "dynatemp_range": 0, "dynatemp_exponent": 1,
        "cache_prompt": true, "id_slot": -1, "n_keep": 0, "timings_per_token": true,
    });
    good(client.post("/completion", &joined(plain.clone(), neutral)));
    for (path, field, value) in [
        ("/completion", "mirostat", json!(2)),
        ("/completion", "dry_base", json!(0.5)),
        ("/completion", "xtc_probability", json!(1.5)),
        ("/completion", "typical_p", json!(0.5)),
        ("/completion", "samplers", json!(["min_p", "top_k", "min_p"])),
        ("/completion", "samplers", json!(["magic"])),
        ("/infill", "mirostat", json!(1)),
        ("/infill", "n_cmpl", json!(99)),
        ("/v1/completions", "temprature", json!(0.5)),
        ("/v1/chat/completions", "functions", json!([{"name": "f"}])),
        ("/v1/embeddings", "truncate", json!(true)),
    ] {
        let mut body = json!({"min_p": 0.1, "top_k": 5, field: value});
        let key = match path {
            "/v1/embeddings" => "input",
            "/infill" => "input_prefix",
            _ => "prompt",
        };
        body[key] = json!("let a");
        if path.contains("chat") {
            body = json!({"messages": [{"role": "user", "content": "a"}], field: value});
        }
        if path == "/v1/embeddings" {
            body = json!({"input": "a", field: value});
        }
        let answer = client.post(path, &body);
        let (status, answer) = (answer.status, answer.json());
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{path} {answer}");
    }
    // Samplers that are not named are off: with all of them off the model's own distribution.
    let ask = |more: Value| {
        let sampling = json!({"temperature": 0.4, "top_k": 3, "top_p": 0.5, "n_predict": 12});
        good(client.post("/completion", &joined(joined(plain.clone(), sampling), more)))["content"]
            .clone()
    };
    let own = json!({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0});
    assert_eq!(ask(json!({"samplers": []})), ask(own));
    let all = json!({"samplers": ["penalties", "dry", "temperature", "top_k", "top_p", "min_p"]});
    assert_eq!(ask(all), ask(json!({})));
    let last = [
        "penalties",
        "dry",
        "top_n_sigma",
        "top_k",
        "typ_p",
        "top_p",
        "min_p",
        "xtc",
        "temperature",
    ];
    assert_eq!(ask(json!({"samplers": last})), ask(json!({"samplers": "edskypmxt"})));
    // An order of one's own; DRY and XTC change what is said.
    ask(json!({"samplers": ["min_p", "temperature", "top_k", "penalties"], "repeat_penalty": 1.5}));
    let wide = json!({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0});
    let dry = json!({"dry_multiplier": 50.0, "dry_allowed_length": 0, "dry_sequence_breakers": []});
    let xtc = json!({"xtc_probability": 1.0, "xtc_threshold": 0.001});
    for more in [dry, xtc] {
        assert_ne!(ask(joined(wide.clone(), more.clone())), ask(wide.clone()), "{more}");
        let told = good(client.post("/completion", &joined(plain.clone(), more.clone())));
        for (field, value) in more.as_object().unwrap() {
            let number = |value: &Value| value.as_f64().map(|x| x as f32);
            let told = &told["generation_settings"][field];
            assert!(told == value || number(told).is_some() && number(told) == number(value));
        }
    }
    // What llama.vscode asks to have a prompt read, and of a chat.
    let warm = json!({"messages": [{"role": "user", "content": "a"}], "n_predict": 0,
        "samplers": [], "cache_prompt": true, "t_max_prompt_ms": 500, "t_max_predict_ms": 1});
    assert_eq!(good(client.post("/v1/chat/completions", &warm))["usage"]["completion_tokens"], 0);
    let edit = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": -1,
        "samplers": "edkypmxt", "t_max_predict_ms": 1000, "typical_p": 1, "stop": ["a", "e"]});
    good(client.post("/v1/chat/completions", &edit));
    let three = json!({"input_prefix": "let a", "n_predict": 2, "n_cmpl": 3, "temperature": 1.0});
    assert_eq!(good(client.post("/infill", &three)).as_array().unwrap().len(), 3);
}

#[test]
fn a_tool_is_called_as_an_object_whole_and_streamed() {
    let w = world_with_tools("clients-tools");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let body = json!({
        "messages": [{"role": "user", "content": "Is it warm?"}], "tools": tools(), "seed": 1,
        "max_tokens": 120,
    });
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for choice in [json!("required"), named] {
        let body = joined(body.clone(), json!({"tool_choice": choice}));
        let whole = good(client.post("/v1/chat/completions", &body));
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
        assert_eq!(choice["message"]["content"], Value::Null);
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!(
            (&call["type"], &call["function"]["name"]),
            (&json!("function"), &json!("weather"))
        );
        assert_eq!(call["id"].as_str().unwrap().len(), 9);
        let arguments = call["function"]["arguments"].as_str().unwrap();
        assert!(is_city(&serde_json::from_str(arguments).unwrap()), "{whole}");
        let body = joined(body, json!({"stream": true, "logprobs": true}));
        let events: Vec<Value> = client.post("/v1/chat/completions", &body).events().collect();
        let deltas = events.iter().map(|event| &event["choices"][0]["delta"]);
        let calls: Vec<&Value> = deltas.filter_map(|delta| delta.get("tool_calls")).collect();
        assert_eq!((calls.len(), &calls[0][0]["index"]), (1, &json!(0)));
        assert_eq!(calls[0][0]["function"], call["function"]);
        assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
    // The conversation continues with what the client did; arguments are shown as an object.
    let call = json!({"id": "c", "type": "function", "function": {"name": "weather",
        "arguments": "{\"city\": \"Oslo\"}"}});
    let turns = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "cold"},
    ]);
    let text = good(client.post("/apply-template", &json!({"messages": turns})));
    assert!(text["prompt"].as_str().unwrap().contains("\"arguments\": {\"city\": \"Oslo\"}}"));
    let again = joined(body.clone(), json!({"messages": turns, "tool_choice": "auto"}));
    let again = good(client.post("/v1/chat/completions", &again));
    assert_eq!(again["choices"][0]["finish_reason"], "length");
    for (more, param) in [
        (json!({"tool_choice": "maybe"}), "tool_choice"),
        (json!({"tool_choice": {"function": {"name": "other"}}}), "tool_choice"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": [{"type": "web_search"}]}), "tools"),
        (json!({"response_format": {"type": "json_object"}}), "tools"),
    ] {
        let answer = client.post("/v1/chat/completions", &joined(body.clone(), more));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)));
    }
}

#[test]
fn a_model_that_was_not_taught_tools_says_so() {
    let w = world("clients-no-tools");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let messages = json!([{"role": "user", "content": "a"}]);
    let body = json!({"messages": messages, "tools": tools(), "max_tokens": 2});
    let answer = client.post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 400);
    let answer = answer.json();
    assert_eq!(
        (&answer["error"]["param"], &answer["error"]["code"]),
        (&json!("tools"), &json!("no_tools"))
    );
    assert!(words(&answer).contains("use a model that was taught tools"));
    good(client.post("/v1/chat/completions", &joined(body, json!({"tool_choice": "none"}))));
}

/// One request of Ollama's, whole and as a stream: the whole answer, and what its pieces say.
fn of_ollama(client: &Client, path: &str, body: &Value) -> (Value, String) {
    let whole = good(client.post(path, &joined(body.clone(), json!({"stream": false}))));
    assert_eq!((&whole["done"], &whole["model"]), (&json!(true), &json!("tiny")));
    let lines = client.post(path, body).lines();
    let text = |line: &Value| {
        let text = line["response"].as_str().or(line["message"]["content"].as_str());
        text.unwrap().to_string()
    };
    let (last, before) = lines.split_last().unwrap();
    assert!(before.iter().all(|line| line["done"] == false));
    for key in ["done", "done_reason", "eval_count", "prompt_eval_count"] {
        assert_eq!(last[key], whole[key], "{key}");
    }
    let said = lines.iter().map(text).collect::<String>();
    assert_eq!(said, text(&whole));
    (whole, said)
}

#[test]
fn clients_of_ollama_find_its_routes() {
    let w = world_with_tools("clients-ollama");
    let server = Server::start(&w.model, "--context 512");
    let client = Client::new(&server);
    assert!(good(client.get("/api/version"))["version"].is_string());
    let tags = good(client.get("/api/tags"));
    assert_eq!(
        (&tags["models"][0]["name"], &tags["models"][0]["details"]["format"]),
        (&json!("tiny"), &json!("safetensors"))
    );
    assert_eq!(good(client.get("/api/ps"))["models"][0]["context_length"], 512);
    let show = good(client.post("/api/show", &json!({"model": "tiny:latest"})));
    assert_eq!(show["capabilities"], json!(["completion", "tools", "insert"]));
    let options = json!({"temperature": 0, "num_predict": 6, "num_ctx": 4096, "repeat_penalty": 1});
    let message = json!({"role": "user", "content": "let a"});
    let chat = json!({"model": "tiny:latest", "messages": [message], "options": options});
    let (whole, said) = of_ollama(&client, "/api/chat", &chat);
    assert_eq!((&whole["eval_count"], &whole["done_reason"]), (&json!(6), &json!("length")));
    let openai = json!({"messages": [message], "temperature": 0, "max_tokens": 6});
    let openai = good(client.post("/v1/chat/completions", &openai));
    assert_eq!(openai["choices"][0]["message"]["content"], said);
    let prompt = json!({"model": "tiny", "prompt": "let a", "options": options});
    assert_eq!(of_ollama(&client, "/api/generate", &prompt).1, said, "a message of a chat");
    let raw = of_ollama(&client, "/api/generate", &joined(prompt.clone(), json!({"raw": true}))).1;
    let plain = json!({"prompt": "let a", "temperature": 0, "max_tokens": 6});
    assert_eq!(good(client.post("/v1/completions", &plain))["choices"][0]["text"], raw);
    let hole = of_ollama(&client, "/api/generate", &joined(prompt, json!({"suffix": "\n}\n"}))).1;
    assert!(hole != raw && hole != said);
    assert_eq!(good(client.post("/api/generate", &json!({"model": "x"})))["done_reason"], "load");
    let format = json!({"format": schema(), "options": {"num_predict": 120}});
    let (_, city) = of_ollama(
        &client,
        "/api/chat",
        &joined(chat.clone(), joined(format, json!({"options": {"temperature": 0}}))),
    );
    assert!(is_city(&serde_json::from_str(&city).unwrap()), "{city}");
    let vectors = good(client.post("/api/embed", &json!({"model": "m", "input": ["a", "b"]})));
    let one = good(client.post("/api/embeddings", &json!({"model": "m", "prompt": "b"})));
    assert_eq!(vectors["embeddings"][1], one["embedding"]);
    for (more, word) in [
        (json!({"options": {"mirostat": 1}}), "`mirostat`"),
        (json!({"format": "yaml"}), "`format`"),
        (json!({"think": true}), "`think`"),
        (json!({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}), "`messages`"),
        (json!({"options": 5}), "`options`"),
    ] {
        let answer = client.post("/api/chat", &joined(chat.clone(), more));
        assert_eq!(answer.status, 400);
        let answer = answer.json();
        assert!(answer["error"].as_str().unwrap().contains(word), "{answer}");
    }
}

#[test]
fn clients_of_ollama_get_calls_of_tools() {
    let w = world_with_tools("clients-ollama-tools");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let body = json!({
        "messages": [{"role": "user", "content": "a"}], "tools": tools(), "tool_choice": "required",
        "options": {"num_predict": 120},
    });
    let lines = client.post("/api/chat", &body).lines();
    let mut calls = lines.iter().filter_map(|line| line["message"].get("tool_calls"));
    let call = &calls.next().unwrap()[0]["function"];
    assert!(call["name"] == "weather" && is_city(&call["arguments"]), "{call}");
    assert!(calls.next().is_none());
    let turns = json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
        {"role": "tool", "tool_name": "weather", "content": "cold"},
    ]);
    let body = json!({"messages": turns, "stream": false, "options": {"num_predict": 2}});
    assert_eq!(good(client.post("/api/chat", &body))["message"]["role"], "assistant");
}

#[test]
fn clients_of_anthropic_get_messages_and_their_events() {
    let w = world_with_tools("clients-anthropic");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let body = json!({
        "model": "claude", "max_tokens": 6, "temperature": 0, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "let a"}]}],
    });
    let whole = good(client.post("/v1/messages", &body));
    let turns = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "let a"}]);
    let openai = json!({"messages": turns, "temperature": 0, "max_tokens": 6});
    let openai = good(client.post("/v1/chat/completions", &openai));
    let text = &openai["choices"][0]["message"]["content"];
    assert_eq!(whole["content"], json!([{"type": "text", "text": text}]));
    assert_eq!((&whole["stop_reason"], &whole["model"]), (&json!("max_tokens"), &json!("tiny")));
    let counted = good(client.post("/v1/messages/count_tokens", &body));
    assert_eq!(counted["input_tokens"], openai["usage"]["prompt_tokens"]);
    let stream = joined(body.clone(), json!({"stream": true}));
    let events: Vec<Value> = client.post("/v1/messages", &stream).events().collect();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(kinds[..2], ["message_start", "content_block_start"]);
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let said = events.iter().filter_map(|event| event["delta"]["text"].as_str());
    assert_eq!(*text, said.collect::<String>());
    // A message of the assistant's at the end is continued.
    let begun =
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "let b"}]);
    let begun =
        good(client.post("/v1/messages", &joined(body.clone(), json!({"messages": begun}))));
    let prompt = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n\
                  <|im_start|>assistant\nlet b";
    let plain = json!({"prompt": prompt, "temperature": 0, "max_tokens": 6});
    let plain = good(client.post("/v1/completions", &plain));
    assert_eq!(begun["content"][0]["text"], plain["choices"][0]["text"]);
    for more in [
        json!({"max_tokens": null}),
        json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        json!({"messages": [{"role": "system", "content": "a"}]}),
        json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        json!({"messages": 5}),
    ] {
        let mut body = joined(body.clone(), more.clone());
        if more.get("max_tokens").is_some() {
            body.as_object_mut().unwrap().remove("max_tokens");
        }
        let answer = client.post("/v1/messages", &body);
        assert_eq!(answer.status, 400, "{more}");
        let answer = answer.json();
        assert_eq!(
            (&answer["type"], &answer["error"]["type"]),
            (&json!("error"), &json!("invalid_request_error")),
            "{more}"
        );
    }
}

#[test]
fn clients_of_anthropic_get_calls_of_tools() {
    let w = world_with_tools("clients-anthropic-tools");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let call =
        json!({"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}});
    let result = json!({"type": "tool_result", "tool_use_id": "t1",
        "content": [{"type": "text", "text": "cold"}]});
    let body = json!({
        "max_tokens": 120, "tool_choice": {"type": "any"},
        "tools": [{"name": "weather", "description": "d", "input_schema": schema()}],
        "messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ],
    });
    let whole = good(client.post("/v1/messages", &body));
    assert_eq!(
        (&whole["stop_reason"], &whole["content"][0]["type"]),
        (&json!("tool_use"), &json!("tool_use"))
    );
    assert!(is_city(&whole["content"][0]["input"]), "{whole}");
    let named = json!({"type": "tool", "name": "weather", "disable_parallel_tool_use": true});
    let stream = joined(body, json!({"stream": true, "tool_choice": named}));
    let events: Vec<Value> = client.post("/v1/messages", &stream).events().collect();
    let start = events.iter().find(|event| event["type"] == "content_block_start").unwrap();
    assert_eq!(
        (&start["content_block"]["name"], &start["content_block"]["input"]),
        (&json!("weather"), &json!({}))
    );
    let input = events.iter().find_map(|event| event["delta"]["partial_json"].as_str()).unwrap();
    assert!(is_city(&serde_json::from_str(input).unwrap()), "{input}");
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "tool_use");
}

#[test]
fn a_response_of_openai_has_items_whole_and_as_events() {
    let w = world_with_tools("clients-responses");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let body = json!({
        "model": "gpt", "instructions": "s", "input": "let a", "temperature": 0,
        "max_output_tokens": 6, "store": true,
    });
    let whole = good(client.post("/v1/responses", &body));
    assert_eq!(
        (&whole["status"], &whole["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
    let text = &whole["output"][0]["content"][0]["text"];
    let turns = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "let a"}]);
    let chat = json!({"messages": turns, "temperature": 0, "max_tokens": 6});
    let chat = good(client.post("/v1/chat/completions", &chat));
    assert_eq!(*text, chat["choices"][0]["message"]["content"]);
    assert_eq!(whole["usage"]["input_tokens"], chat["usage"]["prompt_tokens"]);
    let stream = joined(body.clone(), json!({"stream": true}));
    let events: Vec<Value> = client.post("/v1/responses", &stream).events().collect();
    let said = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    assert_eq!(*text, said.map(|event| event["delta"].as_str().unwrap()).collect::<String>());
    for (idx, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], idx);
    }
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["output"][0]["content"]),
        (&json!("response.incomplete"), &whole["output"][0]["content"])
    );
    let tool = joined(tools()[0]["function"].clone(), json!({"type": "function"}));
    let items = json!([
        {"role": "developer", "content": "s"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "cold"},
    ]);
    let body = json!({"input": items, "tools": [tool], "tool_choice": "required"});
    let called = good(client.post("/v1/responses", &body));
    let call = &called["output"][0];
    assert_eq!((&call["type"], &called["status"]), (&json!("function_call"), &json!("completed")));
    assert!(is_city(&serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap()));
    let format = json!({"type": "json_schema", "name": "n", "schema": schema()});
    let body = json!({"input": "a", "text": {"format": format}});
    let fits = good(client.post("/v1/responses", &body));
    let text = fits["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(is_city(&serde_json::from_str(text).unwrap()), "{text}");
    for (more, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"input": [{"type": "item_reference", "id": "i"}]}), "input"),
        (json!({"tools": [{"type": "web_search"}]}), "tools"),
    ] {
        let answer = client.post("/v1/responses", &joined(json!({"input": "a"}), more));
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (400, &json!(param)));
    }
}

#[test]
fn grammars_of_llama_cpp_are_kept_to() {
    let w = world("clients-gbnf");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let ask = |grammar: &str, seed: u64| {
        let body = json!({"prompt": "let a", "grammar": grammar, "n_predict": 400, "seed": seed});
        good(client.post("/completion", &body))
    };
    let said = |grammar: &str, seed: u64| {
        let answer = ask(grammar, seed);
        assert_eq!(answer["stop_type"], "eos", "{grammar} {answer}");
        answer["content"].as_str().unwrap().to_string()
    };
    let json = r#"
        # Objects, lists and short words.
        root ::= object
        value ::= object | list | word | ("true" | "false") ws
        object ::= "{" ws (word ":" ws value){0,1} "}" ws
        list ::= "[" ws ( value ("," ws value)? )? "]" ws
        word ::= "\"" [a-z]{1,3} "\"" ws
        ws ::= | " "
    "#;
    for seed in 0..8 {
        assert!(["yes", "no"].contains(&&said("root ::= \"yes\" | \"no\"", seed)[..]));
        let list = said("root ::= item item\nitem ::= \"- \" [a-z]{1,4} \"\\n\"", seed);
        assert!(list.lines().count() == 2 && list.lines().all(|line| line.starts_with("- ")));
        let date = said("root ::= [0-9]{4} \"-\" [01] [0-9] (\"T\" [0-9]{2})?", seed);
        assert!(date.len() >= 7 && date.as_bytes()[4] == b'-', "{date}");
        let nested = said("root ::= \"(\" (root | [a-c]) \")\"", seed);
        let n_open = nested.matches('(').count();
        assert_eq!(nested.matches(')').count(), n_open);
        let text = ask(json, seed);
        if text["stop_type"] == "eos" {
            let text = text["content"].as_str().unwrap();
            assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text}");
        }
    }
    let answer = client.post("/completion", &json!({"prompt": "a", "grammar": "root ::= nobody"}));
    assert_eq!(answer.status, 400);
    let answer = answer.json();
    assert_eq!(answer["error"]["param"], "grammar");
    assert!(words(&answer).contains("there is no rule `nobody`"));
}

#[test]
fn a_prompt_that_is_given_back_has_its_log_probabilities() {
    let w = world("clients-echo");
    let server = Server::start(&w.model, "");
    let client = Client::new(&server);
    let prompt = "let mut count = buffer.find(7);\n".repeat(20);
    let ids = good(client.post("/tokenize", &json!({"content": prompt})))["tokens"].clone();
    assert!(ids.as_array().unwrap().len() > 128, "more than a piece");
    let body = json!({"prompt": ids, "n_predict": 8, "temperature": 0, "return_tokens": true,
        "n_probs": 2});
    let answer = good(client.post("/completion", &body));
    let all: Vec<Value> = [&ids, &answer["tokens"]]
        .into_iter()
        .flat_map(|it| it.as_array().unwrap().clone())
        .collect();
    let body = json!({"prompt": all, "max_tokens": 0, "echo": true, "logprobs": 2});
    for _ in 0..2 {
        // The second time a snapshot is there, which has no logits.
        let whole = good(client.post("/v1/completions", &body));
        let found = &whole["choices"][0]["logprobs"];
        let scores = found["token_logprobs"].as_array().unwrap();
        assert_eq!((scores.len(), &scores[0]), (all.len(), &Value::Null));
        assert_eq!(found["top_logprobs"][0], Value::Null);
        let want = answer["completion_probabilities"].as_array().unwrap();
        for (got, want) in scores[scores.len() - 8..].iter().zip(want) {
            let (got, want) = (got.as_f64().unwrap(), want["logprob"].as_f64().unwrap());
            assert!((got - want).abs() < 1e-3, "{got} {want}");
        }
        let text = whole["choices"][0]["text"].as_str().unwrap();
        let last = found["tokens"].as_array().unwrap().last().unwrap().as_str().unwrap();
        let offset = found["text_offset"].as_array().unwrap().last().unwrap();
        assert_eq!(*offset, text.chars().count() - last.chars().count());
        let stream = joined(body.clone(), json!({"stream": true, "max_tokens": 3}));
        let events: Vec<Value> = client.post("/v1/completions", &stream).events().collect();
        let parts = |key: &str| -> Vec<Value> {
            let lists = events.iter().filter_map(|it| it["choices"][0]["logprobs"][key].as_array());
            lists.flatten().cloned().collect()
        };
        assert_eq!(parts("token_logprobs").len(), all.len() + 3);
        assert_eq!(parts("token_logprobs")[..all.len()], scores[..]);
        assert_eq!(parts("text_offset")[..all.len()], found["text_offset"].as_array().unwrap()[..]);
        assert_eq!(parts("text_offset")[all.len()], text.chars().count());
    }
}
