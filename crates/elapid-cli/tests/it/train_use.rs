//! What can be done with a run besides waiting for its end.

use crate::common::Scratch;
use crate::common::training::{elapid, losses, model, ok, sources, stderr, train};
use serde_json::Value;
use std::path::Path;

#[test]
fn a_run_that_was_killed_can_be_used_and_resumed() {
    let dir = Scratch::new("use-killed");
    sources(&dir.0);
    ok(&train("whole", "--steps 12 --save-every 2"), &dir.0);
    let mut command = elapid(&train("run", "--steps 12 --save-every 2"), &dir.0);
    let output = command.env("ELAPID_FAIL", "train.step#8=kill").output().unwrap();
    assert!(output.status.code().is_none(), "{}", stderr(&output));
    let text = ok(&["generate", "run", "-p", "pub fn", "-n", "4", "--temperature", "0"], &dir.0);
    assert!(stderr(&text).contains("run is not finished"), "{}", stderr(&text));
    let again = ok(&["generate", "run", "-p", "pub fn", "-n", "4", "--temperature", "0"], &dir.0);
    assert_eq!(text.stdout, again.stdout);
    ok(&["convert", "run", "now.gguf"], &dir.0);
    ok(&["watch", "run", "--once", "--json"], &dir.0);
    let page = std::fs::read_to_string(dir.0.join("run/report.html")).unwrap();
    assert!(page.contains("http-equiv=\"refresh\""));
    ok(&["train", "--resume", "run"], &dir.0);
    assert_eq!(losses(&dir.0.join("run")), losses(&dir.0.join("whole")));
    assert!(model(&dir.0.join("run")) == model(&dir.0.join("whole")));
}

#[test]
fn a_finished_run_is_resumed_for_longer_and_keeps_its_steps() {
    let dir = Scratch::new("use-longer");
    sources(&dir.0);
    ok(&train("run", "--steps 6"), &dir.0);
    let before = losses(&dir.0.join("run"));
    ok(&["train", "--resume", "run", "--steps", "10"], &dir.0);
    let after = losses(&dir.0.join("run"));
    assert_eq!((after.len(), &after[..6]), (10, &before[..]));
}

/// A copy of what a run records, without what it made.
fn record_of(run: &Path, copy: &Path) {
    std::fs::create_dir(copy).unwrap();
    let names = ["config.json", "data.elapid", "tokens.bin", "plan.json", "tokenizer.json"];
    for name in names.into_iter().chain(["tokenizer_config.json"]) {
        std::fs::copy(run.join(name), copy.join(name)).unwrap();
    }
}

#[test]
fn a_run_by_the_clock_is_made_again_from_its_record_to_the_bit() {
    let dir = Scratch::new("use-clock");
    sources(&dir.0);
    ok(&train("run", "--minutes 0.1"), &dir.0);
    let run = dir.0.join("run");
    let config: Value =
        serde_json::from_slice(&std::fs::read(run.join("config.json")).unwrap()).unwrap();
    assert!(!config["settings"]["turns"].as_array().unwrap().is_empty(), "{config}");
    record_of(&run, &dir.0.join("again"));
    ok(&["train", "--resume", "again"], &dir.0);
    assert_eq!(losses(&run), losses(&dir.0.join("again")));
    assert!(model(&run) == model(&dir.0.join("again")));
}

#[test]
fn a_merged_adapter_measures_as_the_adapter_on_its_base() {
    let dir = Scratch::new("use-merge");
    sources(&dir.0);
    ok(&train("run", "--steps 4"), &dir.0);
    for (out, more) in [("lora", ""), ("dora", "--dora")] {
        let lora = ["train", "src", "--out", out, "--model", "run/model", "--steps", "3"];
        let rest = "--context 24 --batch 2 --threads 2 --lr 1e-2";
        let more = more.split(' ').filter(|flag| !flag.is_empty());
        let args: Vec<&str> = lora.into_iter().chain(rest.split(' ')).chain(more).collect();
        ok(&args, &dir.0);
        let merged = format!("{out}.gguf");
        ok(&["merge", "run/model", out, &merged], &dir.0);
        let bits = |args: &[&str]| -> f64 {
            let all = [&["eval"], args, &["src/part_3.rs", "--json"]].concat();
            let found: Value = serde_json::from_slice(&ok(&all, &dir.0).stdout).unwrap();
            found["bits_per_byte"].as_f64().unwrap()
        };
        let of_base = bits(&["run/model"]);
        let (of_merged, of_both) = (bits(&[&merged]), bits(&["run/model", "--adapter", out]));
        assert!((of_merged - of_both).abs() < 1e-4, "{out}: {of_merged} {of_both}");
        assert!((of_both - of_base).abs() > 1e-3, "{out} does nothing: {of_both} {of_base}");
    }
}

#[cfg(unix)]
#[test]
fn a_prompt_comes_through_a_pipe() {
    use std::io::Write;
    use std::process::Stdio;
    let dir = Scratch::new("use-pipe");
    sources(&dir.0);
    ok(&train("run", "--steps 2"), &dir.0);
    let flags = ["generate", "run", "-n", "6", "--temperature", "0"];
    let named = ok(&[&flags[..], &["-p", "pub fn"]].concat(), &dir.0);
    let mut command = elapid(&flags, &dir.0);
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"pub fn").unwrap();
    let piped = child.wait_with_output().unwrap();
    assert!(piped.status.success(), "{}", stderr(&piped));
    assert_eq!(piped.stdout, named.stdout);
}

#[test]
fn other_sets_are_measured_by_name_and_do_not_change_the_run() {
    let dir = Scratch::new("use-sets");
    sources(&dir.0);
    ok(&train("plain", "--steps 6"), &dir.0);
    std::fs::create_dir(dir.0.join("other")).unwrap();
    std::fs::write(dir.0.join("other/a.py"), "def add(a, b):\n    return a + b\n".repeat(40))
        .unwrap();
    let output = ok(&train("run", "--steps 6 --eval py=other"), &dir.0);
    assert!(stderr(&output).contains("bits per byte on py"), "{}", stderr(&output));
    assert_eq!(losses(&dir.0.join("run")), losses(&dir.0.join("plain")));
    assert!(model(&dir.0.join("run")) == model(&dir.0.join("plain")));
    let summary = |run: &str| -> Value {
        let bytes = std::fs::read(dir.0.join(run).join("summary.json")).unwrap();
        serde_json::from_slice(&bytes).unwrap()
    };
    let (of_run, of_plain) = (summary("run"), summary("plain"));
    assert_eq!(of_run["held_out"]["after"], of_plain["held_out"]["after"]);
    let set = &of_run["sets"][0];
    assert_eq!((set["language"].as_str(), set["n_files"].as_u64()), (Some("py"), Some(1)));
    assert!(set["before"].as_f64().unwrap() > 0.0 && set["before"] != set["after"], "{set}");
    let page = std::fs::read_to_string(dir.0.join("run/report.html")).unwrap();
    assert!(page.contains("Other sets"));
}

#[test]
fn training_continues_from_the_weights_of_a_model_at_a_longer_context() {
    let dir = Scratch::new("use-init");
    sources(&dir.0);
    ok(&train("run", "--steps 6"), &dir.0);
    let more = "--out next --init run --steps 3 --context 48 --batch 2 --threads 2";
    let args: Vec<&str> = ["train", "src"].into_iter().chain(more.split(' ')).collect();
    ok(&args, &dir.0);
    let score = |run: &str, key: &str| -> f64 {
        let bytes = std::fs::read(dir.0.join(run).join("summary.json")).unwrap();
        let summary: Value = serde_json::from_slice(&bytes).unwrap();
        summary["held_out"][key].as_f64().unwrap()
    };
    // Windows are longer, so that the same weights measure nearly as they did.
    let (left, found) = (score("run", "after"), score("next", "before"));
    assert!((left - found).abs() < 0.25, "{left} {found}");
    let info = ok(&["info", "next", "--json"], &dir.0);
    let info: Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!(info["n_ctx"], 48, "{info}");
}

#[test]
fn errors_are_objects_where_json_is_asked_for() {
    let dir = Scratch::new("use-errors");
    for (args, code) in [("train nothing --json", 1), ("train . --nonsense --json", 2)] {
        let args: Vec<&str> = args.split(' ').collect();
        let output = elapid(&args, &dir.0).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(found["kind"], "error");
        assert!(!found["error"].as_str().unwrap().is_empty(), "{found}");
        assert!(!found["hint"].as_str().unwrap().is_empty(), "{found}");
    }
}

#[test]
fn a_context_beyond_what_a_model_was_trained_on_is_told() {
    let dir = Scratch::new("use-context");
    sources(&dir.0);
    ok(&train("run", "--steps 2"), &dir.0);
    let flags = ["generate", "run", "-p", "pub fn", "-n", "2", "-c"];
    let told = |context: &str| {
        let output = ok(&[&flags[..], &[context]].concat(), &dir.0);
        stderr(&output).contains("was trained on")
    };
    assert!(told("512") && !told("16"));
}
