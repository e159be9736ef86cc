//! `elapid train` on a directory of sources, and what it leaves.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub fn elapid(args: &[&str], dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elapid"));
    command.args(args).current_dir(dir).stdin(Stdio::null());
    command
}

pub fn run(args: &[&str], dir: &Path) -> Output {
    elapid(args, dir).output().unwrap()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

pub fn ok(args: &[&str], dir: &Path) -> Output {
    let output = run(args, dir);
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    output
}

/// A directory of small sources: functions that differ and are alike.
pub fn sources(dir: &Path) -> PathBuf {
    let src = dir.join("src");
    std::fs::create_dir_all(&src).unwrap();
    for n in 0..24 {
        let body: String = (0..12)
            .map(|k| {
                let head = format!("/// Adds {k} to the value of {n}.\npub fn add_{n}_{k}(");
                let body = format!("value + {k} * {}", n * k + 7);
                format!("{head}value: u32) -> u32 {{\n    {body}\n}}\n\n")
            })
            .collect();
        std::fs::write(src.join(format!("part_{n}.rs")), body).unwrap();
    }
    src
}

/// Flags of a run that takes a second.
pub const SMALL: &str =
    "--vocab 400 --context 24 --batch 2 --threads 2 --eval-every 5 --optimizer adamw";

pub fn train<'a>(out: &'a str, more: &'a str) -> Vec<&'a str> {
    let head = ["train", "src", "--out", out];
    head.into_iter().chain(SMALL.split(' ')).chain(more.split(' ')).collect()
}

/// (step, loss) of every step, as they are written.
pub fn losses(run: &Path) -> Vec<(u64, String)> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let records = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let steps = records.filter(|record| record["kind"] == "step");
    steps.map(|step| (step["step"].as_u64().unwrap(), step["loss"].to_string())).collect()
}

pub fn model(run: &Path) -> Vec<u8> {
    std::fs::read(run.join("model/model.safetensors")).unwrap()
}
