//! `elapid train` as a person uses it: the real binary, killed and resumed, on real directories.

use crate::common::Scratch;
use crate::common::training::{SMALL, elapid, losses, model, ok, run, sources, stderr, train};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

#[test]
fn a_run_learns_measures_and_leaves_everything_that_is_promised() {
    let dir = Scratch::new("train-whole");
    sources(&dir.0);
    let output = ok(&train("run", "--steps 30 --save-every 10"), &dir.0);
    let text = stderr(&output);
    for kind in [
        "data", "model", "method", "device", "memory", "plan", "step", "eval", "save", "result",
        "verdict", "report",
    ] {
        assert!(text.lines().any(|line| line.starts_with(&format!("{kind} "))), "{kind}: {text}");
    }
    let at = dir.0.join("run");
    let names = [
        "config.json",
        "data.elapid",
        "tokens.bin",
        "plan.json",
        "metrics.jsonl",
        "samples.jsonl",
        "report.html",
        "summary.json",
        "tokenizer.json",
        "model/config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
    ];
    for name in names {
        assert!(at.join(name).is_file(), "{name}");
    }
    let summary: Value =
        serde_json::from_slice(&std::fs::read(at.join("summary.json")).unwrap()).unwrap();
    let (before, after) = (&summary["held_out"]["before"], &summary["held_out"]["after"]);
    assert!(after.as_f64().unwrap() < before.as_f64().unwrap(), "{before} {after}");
    assert_eq!(losses(&at).len(), 30);
    let report = std::fs::read_to_string(at.join("report.html")).unwrap();
    assert!(report.contains("</html>") && !report.contains("http-equiv=\"refresh\""));
    // What was written can be used.
    let score = ok(&["eval", "run/model", "src/part_3.rs", "--json"], &dir.0);
    let score: Value = serde_json::from_slice(&score.stdout).unwrap();
    assert!(score.to_string().contains("bits_per_byte"), "{score}");
    // The run is not learned from, and is not begun again by mistake.
    let again = run(&train("run", "--steps 3"), &dir.0);
    assert!(!again.status.success() && stderr(&again).contains("--resume run"));
    // Nor is anything else overwritten.
    let other = run(&train("src", "--steps 3"), &dir.0);
    assert!(!other.status.success() && stderr(&other).contains("not empty"));
}

#[test]
fn a_second_run_on_the_same_files_takes_the_tokens_of_the_first() {
    let dir = Scratch::new("train-again");
    sources(&dir.0);
    let first = ok(&train("first", "--steps 6"), &dir.0);
    assert!(!stderr(&first).contains("taken from there"));
    let second = ok(&train("second", "--steps 6"), &dir.0);
    assert!(stderr(&second).contains("the same files as in first"), "{}", stderr(&second));
    assert_eq!(losses(&dir.0.join("second")), losses(&dir.0.join("first")));
    assert!(model(&dir.0.join("second")) == model(&dir.0.join("first")));
    // It needs neither the first run nor the files from then on.
    std::fs::remove_dir_all(dir.0.join("first")).unwrap();
    std::fs::rename(dir.0.join("src"), dir.0.join("gone")).unwrap();
    ok(&["train", "--resume", "second"], &dir.0);
    std::fs::rename(dir.0.join("gone"), dir.0.join("src")).unwrap();
    // Another vocabulary, another file: read anew.
    let mut args = train("third", "--steps 2");
    let at = args.iter().position(|arg| *arg == "--vocab").unwrap();
    args[at + 1] = "350";
    assert!(!stderr(&ok(&args, &dir.0)).contains("the same files"));
    std::fs::write(dir.0.join("src/more.rs"), "pub fn more() {}\n").unwrap();
    assert!(!stderr(&ok(&train("fourth", "--steps 2"), &dir.0)).contains("the same files"));
    // Changed tokens are seen.
    let path = dir.0.join("second/tokens.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[9] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let output = run(&["train", "--resume", "second"], &dir.0);
    assert!(!output.status.success() && stderr(&output).contains("tokens.bin was changed"));
}

#[test]
fn sources_are_drawn_by_their_weights() {
    let dir = Scratch::new("train-weights");
    sources(&dir.0);
    std::fs::create_dir(dir.0.join("more")).unwrap();
    std::fs::rename(dir.0.join("src/part_7.rs"), dir.0.join("more/part_7.rs")).unwrap();
    let tokens = |data: &str, out: &str| {
        let args = ["train", "--out", out, "--steps", "2", "--data", data, "--data", "src"];
        let args: Vec<&str> = args.into_iter().chain(SMALL.split(' ')).collect();
        let text = stderr(&ok(&args, &dir.0));
        let line = text.lines().find(|line| line.starts_with("data ")).unwrap().to_string();
        let mut words = line.split(", ").nth(2).unwrap().split(' ');
        let number: f64 = words.next().unwrap().parse().unwrap();
        if words.next() == Some("k") { 1e3 * number } else { number }
    };
    let (once, thrice) = (tokens("more", "once"), tokens("more=3", "thrice"));
    assert!(thrice > once + 200.0, "{once} {thrice}");
    let output = run(&["train", "--data", "src=none"], &dir.0);
    assert!(!output.status.success() && stderr(&output).contains("not a positive number"));
}

/// Resumes the run `killed`, or begins it where there is none yet.
fn resume_or_begin(dir: &Path, flags: &str) -> Command {
    if dir.join("killed/config.json").exists() {
        return elapid(&["train", "--resume", "killed", "--threads", "1"], dir);
    }
    let _ = std::fs::remove_dir_all(dir.join("killed"));
    elapid(&train("killed", flags), dir)
}

#[test]
fn a_run_killed_at_any_moment_goes_on_to_the_bit() {
    let dir = Scratch::new("train-kill");
    sources(&dir.0);
    let flags = "--steps 60 --save-every 3 --fim 0.5";
    ok(&train("whole", flags), &dir.0);
    let killed = dir.0.join("killed");
    // Moments of everything a run does: in the middle of a file, before and after it is moved to
    // its place, before a step and behind it.
    let moments = ["file.part", "file.rename", "file.moved", "train.step", "train.made"];
    let rounds = [1, 2, 3, 1, 2].into_iter().flat_map(|n| moments.map(|moment| (moment, n)));
    for (moment, n) in rounds {
        let mut command = resume_or_begin(&dir.0, flags);
        let output = command.env("ELAPID_FAIL", format!("{moment}#{n}=kill")).output().unwrap();
        let is_killed = output.status.code().is_none();
        assert!(is_killed, "{moment}#{n} does not come: {}", stderr(&output));
    }
    let output = resume_or_begin(&dir.0, flags).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(losses(&killed), losses(&dir.0.join("whole")));
    assert!(model(&killed) == model(&dir.0.join("whole")), "the models differ");
}

#[test]
fn a_checkpoint_that_was_cut_short_loses_no_earlier_one() {
    let dir = Scratch::new("train-cut");
    sources(&dir.0);
    ok(&train("whole", "--steps 12 --save-every 4"), &dir.0);
    ok(&train("cut", "--steps 12 --save-every 4"), &dir.0);
    let checkpoints = dir.0.join("cut/checkpoints");
    let newest = checkpoints.join("step-0000000012.elapid");
    let bytes = std::fs::read(&newest).unwrap();
    std::fs::write(&newest, &bytes[..bytes.len() / 2]).unwrap();
    std::fs::write(checkpoints.join("step-0000000012.elapid.77.part"), b"half").unwrap();
    std::fs::remove_dir_all(dir.0.join("cut/model")).unwrap();
    let output = ok(&["train", "--resume", "cut"], &dir.0);
    let text = stderr(&output);
    assert!(text.contains("step-0000000012") && text.contains("at step 8"), "{text}");
    assert_eq!(losses(&dir.0.join("cut")), losses(&dir.0.join("whole")));
    assert!(model(&dir.0.join("cut")) == model(&dir.0.join("whole")));
}

#[test]
fn threads_change_nothing() {
    let dir = Scratch::new("train-threads");
    sources(&dir.0);
    ok(&train("two", "--steps 8"), &dir.0);
    let mut args = train("one", "--steps 8");
    let at = args.iter().position(|arg| *arg == "--threads").unwrap();
    args[at + 1] = "1";
    ok(&args, &dir.0);
    assert_eq!(losses(&dir.0.join("one")), losses(&dir.0.join("two")));
    assert!(model(&dir.0.join("one")) == model(&dir.0.join("two")));
}

#[test]
fn a_run_that_diverges_goes_back_halves_the_rate_and_says_so() {
    let dir = Scratch::new("train-diverge");
    sources(&dir.0);
    let flags = "--steps 40 --save-every 5 --lr 30 --clip 0 --warmup 30 --weight-decay 0";
    let output = run(&train("run", flags), &dir.0);
    let text = stderr(&output);
    assert!(text.contains("learning rate halved"), "{text}");
    // What comes of it is no worse than what was there before, and is there.
    assert!(dir.0.join("run/model/model.safetensors").is_file(), "{text}");
    let summary: Value =
        serde_json::from_slice(&std::fs::read(dir.0.join("run/summary.json")).unwrap()).unwrap();
    let bits = |key: &str| summary["held_out"][key].as_f64().unwrap();
    assert!(bits("after") <= bits("before"), "{} {}", bits("after"), bits("before"));
}

/// One file of noise among many that are alike: a batch that no rate makes easy.
#[test]
fn a_batch_that_diverges_again_and_again_is_left_out() {
    let dir = Scratch::new("train-noise");
    let src = sources(&dir.0);
    let noise = |n: u32| char::from_u32(33 + n.wrapping_mul(2654435761) % 90).unwrap();
    let text: String = (0..3000).map(noise).collect();
    std::fs::write(src.join("noise.txt"), text).unwrap();
    let flags = "--steps 150 --save-every 1 --lr 3e-3 --patience 0 --spike 1.05";
    ok(&train("run", flags), &dir.0);
    assert_eq!(losses(&dir.0.join("run")).len(), 150);
}

#[test]
fn what_cannot_fit_is_refused_with_what_to_change() {
    let dir = Scratch::new("train-memory");
    sources(&dir.0);
    let mut args = vec!["plan", "src", "--memory", "30M"];
    args.extend(SMALL.split(' '));
    let output = run(&args, &dir.0);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("hint: ") && text.contains("--memory"), "{text}");
    // With a little more the rows are divided.
    let plan = |memory: &str| -> Value {
        let args = [
            "plan",
            "src",
            "--vocab",
            "400",
            "--context",
            "64",
            "--batch",
            "64",
            "--json",
            "--memory",
            memory,
            "--steps",
            "5",
            "--threads",
            "2",
        ];
        let output = ok(&args, &dir.0);
        let text = String::from_utf8(output.stdout).unwrap();
        let last = text.lines().last().unwrap().to_string();
        serde_json::from_str::<Value>(&last).unwrap()["plan"].clone()
    };
    let (wide, narrow) = (plan("8G"), plan("250M"));
    assert_eq!(wide["n_accumulate"], 1, "{wide}");
    assert!(narrow["n_accumulate"].as_u64().unwrap() > 1, "{narrow}");
    assert_eq!(wide["n_tok"], narrow["n_tok"]);
    assert!(narrow["peak"].as_u64() < wide["peak"].as_u64());
}

#[test]
fn flags_that_mean_nothing_together_are_errors() {
    let dir = Scratch::new("train-flags");
    sources(&dir.0);
    let cases: &[&[&str]] = &[
        &["--rank", "4"],
        &["--quant", "q4_0"],
        &["--method", "lora"],
        &["--fim", "2"],
        &["--held-out", "-1"],
        &["--lr", "-1"],
        &["--batch", "6", "--accumulate", "4"],
        &["--resume", "nowhere"],
        &["--held-out", "0"],
    ];
    for flags in cases {
        let mut args = vec!["train", "src", "--steps", "1", "--vocab", "400"];
        args.extend(*flags);
        let output = run(&args, &dir.0);
        assert!(!output.status.success(), "{flags:?}");
        assert!(!stderr(&output).is_empty(), "{flags:?}");
    }
    let output = run(&["train", "--resume", "nowhere"], &dir.0);
    assert!(stderr(&output).contains("is not a run"), "{}", stderr(&output));
}

#[cfg(unix)]
#[test]
fn an_interrupt_saves_and_the_run_goes_on() {
    let dir = Scratch::new("train-interrupt");
    sources(&dir.0);
    ok(&train("whole", "--steps 40 --save-every 1000"), &dir.0);
    let args = train("run", "--steps 40 --save-every 1000");
    let child = elapid(&args, &dir.0).stderr(Stdio::piped()).spawn().unwrap();
    let metrics = dir.0.join("run/metrics.jsonl");
    let has_steps = || std::fs::read_to_string(&metrics).is_ok_and(|text| text.contains("step"));
    while !has_steps() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let output = child.wait_with_output().unwrap();
    match output.status.code() {
        // It may have been at its last step already.
        Some(0) => {}
        code => {
            assert_eq!(code, Some(130), "{}", stderr(&output));
            assert!(stderr(&output).contains("--resume run"), "{}", stderr(&output));
            ok(&["train", "--resume", "run"], &dir.0);
        }
    }
    assert_eq!(losses(&dir.0.join("run")), losses(&dir.0.join("whole")));
    assert!(model(&dir.0.join("run")) == model(&dir.0.join("whole")));
}

#[cfg(unix)]
#[test]
fn a_second_interrupt_ends_at_once_and_the_run_goes_on() {
    let dir = Scratch::new("train-twice");
    sources(&dir.0);
    let flags = "--steps 3 --save-every 1 --context 24 --batch 2 --vocab 400 --threads 2";
    let args = |out| ["train", "src", "--out", out].into_iter().chain(flags.split(' ')).collect();
    let (whole, twice): (Vec<&str>, Vec<&str>) = (args("whole"), args("run"));
    ok(&whole, &dir.0);
    let errors = dir.0.join("errors");
    let file = std::fs::File::create(&errors).unwrap();
    // The second step waits for a file that never comes.
    let mut command = elapid(&twice, &dir.0);
    let command = command.env("ELAPID_FAIL", "train.step#2=wait:never").stderr(file);
    let mut child = command.spawn().unwrap();
    let wait_for = |text: &str| {
        let begin = Instant::now();
        while !std::fs::read_to_string(&errors).unwrap().contains(text) {
            assert!(begin.elapsed() < Duration::from_secs(120), "`{text}` is not said");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let interrupt = || {
        let id = child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    };
    wait_for("fail point train.step");
    interrupt();
    wait_for("press Ctrl-C again");
    interrupt();
    let code = child.wait().unwrap().code();
    let said = std::fs::read_to_string(&errors).unwrap();
    assert_eq!(code, Some(130), "{said}");
    assert!(!said.contains("--resume run") && !said.contains("step-0000000002"), "{said}");
    let resumed = stderr(&ok(&["train", "--resume", "run"], &dir.0));
    // The checkpoint of the first step may have been under way.
    assert!(resumed.contains("run at step "), "{resumed}");
    assert_eq!(losses(&dir.0.join("run")), losses(&dir.0.join("whole")));
    assert!(model(&dir.0.join("run")) == model(&dir.0.join("whole")));
}
