//! What people read: every `--help` and the errors they meet most, as snapshots. A change of words
//! is a change of a file in `snapshots/`, and reviewed like code. To accept one:
//!
//!     INSTA_UPDATE=always cargo nextest run -p elapid-cli words::

use crate::common::tiny::{Kind, Tiny};
use crate::common::{Scratch, elapid, root};
use std::fmt::Write;
use std::process::Command;

const COMMANDS: [&str; 25] = [
    "adapt",
    "verify",
    "train",
    "plan",
    "info",
    "doctor",
    "convert",
    "quantize",
    "merge",
    "watch",
    "tokenize",
    "train-tokenizer",
    "generate",
    "chat",
    "complete",
    "serve",
    "pull",
    "lsp",
    "list",
    "rm",
    "eval",
    "check",
    "bench",
    "kernels",
    "limbic",
];

/// Compares with the snapshot of this name.
fn compare(name: &str, text: &str) {
    insta::with_settings!({prepend_module_to_snapshot => false, omit_expression => true}, {
        insta::assert_snapshot!(name, text);
    });
}

fn help(args: &[&str]) -> String {
    let output = elapid(args);
    assert!(output.status.success(), "{args:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn help_of_the_program() {
    let text = help(&["--help"]);
    for command in COMMANDS {
        assert!(text.contains(&format!("\n  {command} ")), "{command} is missing:\n{text}");
    }
    compare("help", &text);
}

#[test]
fn help_of_every_command() {
    for command in COMMANDS {
        compare(&format!("help-{command}"), &help(&[command, "--help"]));
    }
    for command in ["train", "step", "eval"] {
        compare(&format!("help-limbic-{command}"), &help(&["limbic", command, "--help"]));
    }
}

/// A directory with things that are wrong.
fn things() -> Scratch {
    let dir = Scratch::new("words");
    for name in ["empty", "unknown", "weights", "taken", "notes"] {
        std::fs::create_dir(dir.0.join(name)).unwrap();
    }
    dir.file("notes.txt", b"These are notes and not a model.\n");
    dir.file("notes/picture.png", b"\x89PNG\r\n\x1a\n\0\0");
    dir.file("short.gguf", b"GGUF\x03\0\0\0\x05\0\0\0\0\0\0\0");
    dir.file("unknown/config.json", br#"{"model_type": "resnet"}"#);
    dir.file("weights/model.safetensors", b"");
    dir.file("taken/report.html", b"mine");
    Tiny { fim: false, chat: false, ..Tiny::new(Kind::Mamba) }.write(&dir.0.join("plain"));
    dir
}

/// Mistakes by their command lines; `ROOT` is the root of the project.
const MISTAKES: [&str; 49] = [
    "info missing.gguf",
    "info notes.txt",
    "info short.gguf",
    "info empty",
    "info unknown",
    "generate weights/model.safetensors -p x",
    "generate plain --prompt",
    "generate plain --temprature 0",
    "generate plain --temperature cold",
    "generate plain -p x --suffix y",
    "generate plain -p x --device tpu",
    "generate plain -p x --json-schema {",
    "generate plain -p x --adapter empty",
    "chat plain",
    "complete",
    "complete notes.txt",
    "complete missing.rs:1",
    "complete notes.txt:9 --model plain",
    "complete notes.txt:1:99 --model plain",
    "tokenize plain --file missing.txt",
    "train",
    "train empty",
    "train notes",
    "train . --out taken",
    "train . --rank 8",
    "train . --method lora",
    "train . --held-out 1",
    "train --resume empty",
    "convert plain taken",
    "convert ROOT/golden/sets/lora_llama_qv/adapter out.gguf",
    "quantize plain out.gguf --type q9",
    "quantize plain out --type q8_0",
    "serve plain --host 0.0.0.0",
    "serve plain --allow-origin editor",
    "serve plain --project missing",
    "serve plain missing.gguf",
    "serve plain --adapter missing",
    "serve plain --memory 1K",
    "serve plain --watch missing",
    "train . --config missing.json",
    "adapt missing",
    "verify missing",
    "list missing",
    "generate some/model -p x",
    "pull model",
    "limbic train notes.txt --out head.safetensors",
    "limbic step weights/model.safetensors --input 1",
    "limbic step missing.safetensors",
    "limbic step plain/model.safetensors --state valence",
];

#[test]
fn errors_that_people_meet() {
    let dir = things();
    let mut text = String::new();
    for line in MISTAKES {
        let line_here = line.replace("ROOT", root().to_str().unwrap());
        let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
        let output = command.args(line_here.split(' ')).current_dir(&dir.0).output().unwrap();
        let code = output.status.code().unwrap();
        assert!(code == 1 || code == 2, "{line} ended with {code}");
        let words = String::from_utf8(output.stderr).unwrap();
        write!(text, "$ elapid {line}\n{}\n\n", words.trim_end()).unwrap();
    }
    compare("errors", &text.replace(root().to_str().unwrap(), "ROOT"));
}
