//! `elapid generate` and `elapid chat` as a person or a script uses them: the real binary.

use crate::common::tiny::{Kind, Tiny, lines};
use crate::common::{self, Scratch};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn elapid(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
    command.args(args).stdin(Stdio::null()).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// Runs with this on stdin.
fn piped(args: &[&str], input: &str) -> Output {
    let mut command = elapid(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What goes to stdout.
fn ok(args: &[&str]) -> String {
    let output = elapid(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn refusal(args: &[&str]) -> String {
    common::refusal(&elapid(args).output().unwrap())
}

/// A model, and prompts that it can continue.
struct World {
    _dir: Scratch,
    model: String,
    plain: String,
    prompt: String,
}

fn world(name: &str, kind: Kind) -> World {
    let dir = Scratch::new(&format!("generate-{name}"));
    let (model, plain) = (dir.path("model"), dir.path("plain"));
    Tiny::new(kind).write(model.as_ref());
    Tiny { fim: false, chat: false, n_ctx: 96, ..Tiny::new(kind) }.write(plain.as_ref());
    World { _dir: dir, model, plain, prompt: lines(12, 5).join("\n") }
}

impl World {
    /// `generate` on the prompt, with flags.
    fn args<'a>(&'a self, flags: &'a str) -> Vec<&'a str> {
        let head = ["generate", &self.model, "-p", &self.prompt];
        head.into_iter().chain(flags.split_whitespace()).collect()
    }

    fn text(&self, flags: &str) -> String {
        ok(&self.args(flags))
    }

    fn json(&self, flags: &str) -> Value {
        serde_json::from_str(&ok(&[&self.args(flags)[..], &["--json"]].concat())).unwrap()
    }
}

#[test]
fn greedy_text_is_the_same_each_time_and_in_every_form() {
    for kind in Kind::ALL {
        let w = world(&format!("greedy-{kind:?}"), kind);
        let flags = "-n 40 --temperature 0 --threads 2";
        let text = w.text(flags);
        assert!(!text.is_empty());
        assert_eq!(w.text("-n 40 --temperature 0 --threads 1"), text, "{kind:?}");
        let json = w.json(flags);
        assert_eq!(json["text"], text);
        assert_eq!(json["ids"].as_array().unwrap().len(), 40);
        assert_eq!(json["finish"], "length");
        let timings = &json["timings"];
        assert_eq!(timings["n_prompt"], json["prompt_ids"].as_array().unwrap().len());
        assert!(timings["first_ms"].as_f64().unwrap() > 0.0, "{timings}");
        let lines = w.text("-n 40 --temperature 0 --json --stream");
        let lines: Vec<Value> =
            lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (last, tokens) = lines.split_last().unwrap();
        let pieces: String = tokens.iter().map(|line| line["text"].as_str().unwrap()).collect();
        assert!(text.starts_with(&pieces), "{pieces:?} begins {text:?}");
        let ids: Vec<Value> = tokens.iter().map(|line| line["id"].clone()).collect();
        assert_eq!(json!(ids), json["ids"]);
        assert_eq!(last["text"], text);
    }
}

#[test]
fn a_seed_is_an_answer() {
    let w = world("seeds", Kind::Hybrid);
    let drawn = |seed: u64| w.json(&format!("-n 30 --temperature 1 --seed {seed}"));
    assert_eq!(drawn(1)["ids"], drawn(1)["ids"]);
    assert_ne!(drawn(1)["ids"], drawn(2)["ids"]);
    // Nobody gave one: it is told, and does the same again.
    let free = w.json("-n 30 --temperature 1");
    assert_eq!(drawn(free["seed"].as_u64().unwrap())["ids"], free["ids"]);
}

#[test]
fn no_part_of_a_stop_is_given_out() {
    let w = world("stops", Kind::Attention);
    let flags = "-n 60 --temperature 1 --seed 4";
    let whole = w.text(flags);
    let starts: Vec<usize> = whole.char_indices().map(|pair| pair.0).collect();
    let mut n_tried = 0;
    for (at, n_chars) in [(0, 1), (5, 1), (9, 3), (17, 8), (23, 2)] {
        let Some(&begin) = starts.get(at) else { continue };
        let end = starts.get(at + n_chars).copied().unwrap_or(whole.len());
        let stop = &whole[begin..end];
        if stop.contains('\u{fffd}') {
            continue; // half a character: no text can stop it
        }
        let mut args = w.args(flags);
        args.extend(["--stop", "never to be said", "--stop", stop]);
        let want = &whole[..whole.find(stop).unwrap()];
        assert_eq!(ok(&args), want, "{stop:?}");
        args.push("--json");
        let json: Value = serde_json::from_str(&ok(&args)).unwrap();
        assert_eq!((&json["finish"], &json["stop"]), (&json!("stop"), &json!(stop)));
        n_tried += 1;
    }
    assert!(n_tried >= 3, "{whole:?}");
}

#[test]
fn prompts_come_from_the_line_a_file_or_stdin() {
    let w = world("prompts", Kind::Mamba);
    let text = w.text("-n 10 --temperature 0");
    let file = w._dir.file("prompt.txt", w.prompt.as_bytes());
    let (model, file) = (w.model.as_str(), file.to_str().unwrap());
    let rest = ["-n", "10", "--temperature", "0"];
    assert_eq!(ok(&[&["generate", model, "-f", file][..], &rest].concat()), text);
    let from_stdin = piped(&[&["generate", model, "-p", "-"][..], &rest].concat(), &w.prompt);
    assert_eq!(self::text(&from_stdin.stdout), text);
    // Speeds are for people: on stderr, and not with --quiet.
    let words = self::text(&from_stdin.stderr);
    assert!(words.starts_with("speed   prompt ") && words.contains("first token after"), "{words}");
    let args = [&["generate", model, "-p", "-", "-q"][..], &rest].concat();
    assert_eq!(self::text(&piped(&args, &w.prompt).stderr), "");
    // Nothing at all is the token that begins a text.
    for args in [&["generate", model][..], &["generate", model, "-p", ""]] {
        let args = [args, &rest, &["--json"]].concat();
        let json: Value = serde_json::from_str(&ok(&args)).unwrap();
        assert_eq!(json["prompt_ids"], json!([0]), "<|endoftext|>");
        assert_eq!(json["ids"].as_array().unwrap().len(), 10);
    }
    let nothing = w.json("-n 0");
    assert_eq!((&nothing["text"], &nothing["finish"]), (&json!(""), &json!("length")));
}

#[test]
fn the_context_bounds_prompt_and_answer() {
    let w = world("context", Kind::Attention);
    let json = w.json("-n 1000 --temperature 0 --context 200");
    let n = |key: &str| json[key].as_array().unwrap().len();
    assert_eq!(json["finish"], "length");
    assert_eq!(n("prompt_ids") + n("ids"), 200);
    let words = refusal(&w.args("--context 20"));
    assert!(words.contains("20"), "{words}");
}

#[test]
fn a_suffix_is_laid_out_with_the_tokens_of_the_model() {
    let w = world("infill", Kind::Hybrid);
    let args = ["generate", &w.model, "-p", "let ", "--suffix", ";", "-n", "8", "--json"];
    let json: Value = serde_json::from_str(&ok(&args)).unwrap();
    let ids: Vec<u64> =
        json["prompt_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    assert_eq!((ids[0], *ids.last().unwrap()), (1, 3), "{ids:?}");
    assert!(ids.contains(&2));
    let words = refusal(&["generate", &w.plain, "-p", "let ", "--suffix", ";"]);
    assert!(words.contains("no fill-in-the-middle tokens"), "{words}");
}

#[test]
fn a_message_is_put_into_the_chat_template() {
    let w = world("template", Kind::Mamba);
    let rest = ["-n", "12", "--temperature", "0", "--json"];
    let json = |args: &[&str]| -> Value {
        serde_json::from_str(&ok(&[&["generate", &w.model], args, &rest].concat())).unwrap()
    };
    let by_template = json(&["--chat", "--system", "be brief", "-p", "hello"]);
    let by_hand = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n\
        <|im_start|>assistant\n";
    let by_hand = json(&["--raw", "--special", "-p", by_hand]);
    assert_eq!(by_template["prompt_ids"], by_hand["prompt_ids"]);
    assert_eq!(by_template["ids"], by_hand["ids"]);
    let words = refusal(&["generate", &w.plain, "--chat", "-p", "hello"]);
    assert!(words.contains("has no chat template"), "{words}");
}

#[test]
fn an_answer_can_be_held_to_a_form() {
    let w = world("form", Kind::Attention);
    let text = w.text("-n 60 --seed 1 --regex [a-c]{3}-[0-9]{4}");
    let (left, right) = text.split_once('-').unwrap();
    assert!(left.len() == 3 && left.bytes().all(|b| b"abc".contains(&b)), "{text:?}");
    assert!(right.len() == 4 && right.bytes().all(|b| b.is_ascii_digit()), "{text:?}");
    let schema = json!({
        "type": "object", "properties": {"n": {"type": "integer"}, "is": {"type": "boolean"}},
        "required": ["n", "is"], "additionalProperties": false,
    });
    let schema = schema.to_string();
    let mut args = w.args("-n 300 --seed 3");
    args.extend(["--json-schema", &schema]);
    let text = ok(&args);
    let value: Value = serde_json::from_str(&text).unwrap();
    // An integer of any length, which need not fit 64 bits.
    let is_integer = value["n"].is_number() && !text.contains('.');
    assert!(is_integer && value["is"].is_boolean(), "{text}");
    let words = refusal(&[&w.args("")[..], &["--json-schema", "{\"type\": 7}"]].concat());
    assert!(words.contains("hint: "), "{words}");
}

/// An adapter of the first feed-forward of a tiny model.
fn adapter(dir: &Path) {
    let numbers = |n: usize| (0..n).map(|k| (k % 7) as f32 - 3.0).collect::<Vec<f32>>();
    let module = "layers.0.feed_forward.down";
    crate::common::tensors::adapter(dir, module, numbers(48), numbers(32));
}

#[test]
fn an_adapter_acts_as_strongly_as_it_is_told() {
    let w = world("adapter", Kind::Hybrid);
    let dir = w._dir.path("soft");
    adapter(dir.as_ref());
    let ids = |flags: &str| w.json(&format!("-n 20 --temperature 0 {flags}"))["ids"].clone();
    let plain = ids("");
    let whole = ids(&format!("--adapter {dir}"));
    assert_ne!(whole, plain);
    assert_eq!(ids(&format!("--adapter {dir}=1.0")), whole);
    assert_eq!(ids(&format!("--adapter {dir}=0")), plain);
    // The same file once more, against itself.
    assert_eq!(ids(&format!("--adapter {dir}=1 --adapter {dir}=-1")), plain);
    // In a chat it can be turned off and on again.
    let typed = "hello\n/reset\n/adapter soft 0\nhello\n/reset\n/adapter soft 1\nhello\n/adapter\n";
    let (answers, words) = chat(&w, &format!("--adapter {dir}"), typed);
    let (without, _) = chat(&w, "", "hello\n");
    assert_eq!((&answers[1], &answers[2]), (&without[0], &answers[0]));
    assert_ne!(answers[0], answers[1]);
    assert!(words.contains("soft  scale 1  "), "{words}");
}

#[test]
fn the_cache_may_hold_smaller_numbers() {
    let w = world("cache", Kind::Attention);
    let ids =
        |kind: &str| w.json(&format!("-n 20 --temperature 0 --cache-type {kind}"))["ids"].clone();
    let whole = ids("f32");
    // Rounded to half, the first tokens are the same; which later ones are hangs on the numbers.
    assert_eq!(ids("f16")[0], whole[0]);
    // Rows of this model are half a block long.
    let words = refusal(&w.args("--cache-type q8_0"));
    assert!(words.contains("q8_0"), "{words}");
    let usage = elapid(&w.args("--cache-type f8")).output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
}

#[test]
fn look_up_changes_speed_and_nothing_else() {
    for kind in Kind::ALL {
        let w = world(&format!("lookup-{kind:?}"), kind);
        for flags in ["-n 50 --temperature 0", "-n 50 --temperature 0.3 --seed 5"] {
            let plain = w.json(flags);
            let guessed = w.json(&format!("{flags} --lookup 4"));
            assert_eq!(plain["ids"], guessed["ids"], "{kind:?} {flags}");
        }
    }
}

#[test]
fn what_cannot_be_done_is_said() {
    let w = world("errors", Kind::Mamba);
    let missing = w._dir.path("missing");
    let (model, missing) = (w.model.as_str(), missing.as_str());
    for (args, word) in [
        (&["generate", missing][..], "cannot read"),
        (&["generate", model, "-f", missing], "cannot read"),
        (&["generate", model, "--adapter", missing], "there is no adapter at"),
        (&["generate", model, "--device", "abacus"], "no device `abacus`"),
        (&["generate", model, "--grammar", missing], "cannot read"),
        (&["chat", &w.plain], "has no chat template"),
    ] {
        let words = refusal(args);
        assert!(words.contains(word), "{args:?}: {words}");
    }
    let usage = elapid(&["generate", model, "--temperature", "warm"]).output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
}

#[test]
fn a_reader_that_goes_away_ends_it_quietly() {
    let w = world("pipe", Kind::Mamba);
    let mut command = elapid(&w.args("-n 1000000 --temperature 0"));
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut some = [0; 64];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(text(&output.stderr), "");
}

#[cfg(unix)]
#[test]
fn an_interrupt_keeps_what_was_written_and_says_130() {
    let w = world("interrupt", Kind::Mamba);
    for flags in ["", " --json"] {
        let args = format!("-n 1000000 --temperature 0 --context 2000000{flags}");
        let mut command = elapid(&w.args(&args));
        let release = Path::new(&w.model).join("release");
        if !flags.is_empty() {
            // Nothing is printed until the end: it waits in the middle.
            command.env("ELAPID_FAIL", format!("engine.answer#20=wait:{}", release.display()));
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut out = child.stdout.take().unwrap();
        let mut written = Vec::new();
        if flags.is_empty() {
            written.resize(64, 0);
            out.read_exact(&mut written).unwrap();
        } else {
            let said = BufReader::new(child.stderr.as_mut().unwrap()).lines();
            assert!(said.map_while(Result::ok).any(|line| line == "fail point engine.answer"));
        }
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
        std::fs::write(&release, "").unwrap();
        out.read_to_end(&mut written).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
        if flags.is_empty() {
            assert!(text(&output.stderr).contains("speed   prompt "), "{}", text(&output.stderr));
            let all = w.text(&format!("-n {} --temperature 0", written.len()));
            let written = text(&written);
            assert!(all.starts_with(&written), "{written:?} is the beginning of {all:?}");
        } else {
            let json: Value = serde_json::from_slice(&written).unwrap();
            assert_eq!(json["finish"], "interrupted");
        }
    }
}

/// Answers of a chat in which these lines are typed.
fn chat(w: &World, flags: &str, input: &str) -> (Vec<String>, String) {
    let head = ["chat", &w.model, "-n", "6", "--temperature", "0", "--stop", "\n"];
    let args: Vec<&str> = head.into_iter().chain(flags.split_whitespace()).collect();
    let output = piped(&args, input);
    let words = text(&output.stderr);
    assert!(output.status.success(), "{words}");
    (text(&output.stdout).lines().map(str::to_string).collect(), words)
}

#[test]
fn a_chat_over_a_pipe_answers_each_line() {
    let w = world("chat", Kind::Hybrid);
    let (answers, words) = chat(&w, "", "hello\nagain\n\n/undo\nagain\n");
    assert_eq!(answers.len(), 3, "{answers:?}");
    assert_eq!(answers[1], answers[2], "what was taken back was never said");
    assert!(words.contains("removed: again"), "{words}");
    assert_eq!(words.matches("speed   ").count(), 3, "{words}");
    let first = ok(&[
        "generate",
        &w.model,
        "--chat",
        "-p",
        "hello",
        "-n",
        "6",
        "--temperature",
        "0",
        "--stop",
        "\n",
    ]);
    assert_eq!(answers[0], first);
    let (quiet, words) = chat(&w, "--quiet", "hello\n");
    assert_eq!((quiet, words), (answers[..1].to_vec(), String::new()));
}

#[test]
fn a_chat_can_be_saved_and_gone_on_with() {
    let w = world("chat-save", Kind::Mamba);
    let file = w._dir.path("talk.json");
    let (whole, _) = chat(&w, "", "one\ntwo\nthree\n");
    let (first, _) = chat(&w, "", &format!("one\ntwo\n/save {file}\n"));
    let (rest, words) = chat(&w, "", &format!("/load {file}\nthree\n/retry\n/quit\nnever\n"));
    assert_eq!([&first[..], &rest[..1]].concat(), whole);
    assert!(words.contains("2 questions"), "{words}");
    assert_eq!(rest[0], rest[1], "greedy says it again");
    let saved: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let messages = saved["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 4);
    assert_eq!(messages[1], json!({"role": "assistant", "content": whole[0]}));
}

#[test]
fn a_chat_takes_commands_and_says_what_it_does_not_know() {
    let w = world("chat-commands", Kind::Attention);
    let typed = "/system be brief\nhello\n/system\n/reset\nhello\n/set temperature 2\n\
        /set seed 9\n/reset\nhello\n/set\n/set depth 3\n/dance\n/load nowhere.json\n/stats\n/help\n\
        /adapter\n/adapter x 1\n\"\"\"\n/not a command\n\"\"\"\n";
    let (answers, words) = chat(&w, "", typed);
    assert_eq!(answers.len(), 4, "{answers:?} {words}");
    let (plain, _) = chat(&w, "", "hello\n");
    let (briefed, _) = chat(&w, "", "/system be brief\nhello\n");
    assert_eq!((&answers[0], &answers[1]), (&briefed[0], &plain[0]));
    for part in [
        "temperature 2\n",
        "error: /set depth: unknown setting",
        "error: unknown command /dance",
        "cannot read nowhere.json",
        "context ",
        "/retry ",
        "no adapters",
        "error: no adapter \"x\" is loaded",
    ] {
        assert!(words.contains(part), "{part}: {words}");
    }
}

#[test]
fn a_long_chat_forgets_its_oldest_turns_and_says_so() {
    let w = world("chat-long", Kind::Attention);
    let typed: String = (0..12).map(|n| format!("say {}\n", lines(8, n).join(" "))).collect();
    let (answers, words) = chat(&w, "--context 512", &typed);
    assert_eq!(answers.len(), 12);
    assert!(words.contains("the context is full: dropped the oldest 1 question"), "{words}");
    let long = format!("say {}\nhello\n", lines(60, 1).join(" "));
    let (answers, words) = chat(&w, "--context 512", &long);
    assert_eq!(answers.len(), 1, "the second is answered");
    assert!(words.contains("error: the message takes "), "{words}");
}
