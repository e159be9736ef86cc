//! `elapid train --teacher`: probabilities of a teacher, or texts that it writes.

use crate::common::Scratch;
use crate::common::training::{elapid, losses, model, ok, run, sources, stderr, train};
use serde_json::Value;
use std::path::Path;

/// Flags of a student that has the vocabulary of its teacher.
const STUDENT: &str = "--context 24 --batch 2 --threads 2 --eval-every 5 --optimizer adamw";

fn student<'a>(out: &'a str, more: &'a str) -> Vec<&'a str> {
    let head = ["train", "src", "--out", out, "--teacher", "teacher"];
    head.into_iter().chain(STUDENT.split(' ')).chain(more.split(' ')).collect()
}

/// Sources, and a run on them to learn from.
fn with_teacher(name: &str) -> Scratch {
    let dir = Scratch::new(name);
    sources(&dir.0);
    ok(&train("teacher", "--steps 20 --seed 5"), &dir.0);
    dir
}

fn config(dir: &Path, run: &str) -> Value {
    serde_json::from_slice(&std::fs::read(dir.join(run).join("config.json")).unwrap()).unwrap()
}

#[test]
fn a_student_takes_the_vocabulary_and_learns_the_probabilities_of_its_teacher() {
    let dir = with_teacher("teacher-whole");
    let flags = "--steps 16 --save-every 3 --teacher-share 0.7 --teacher-temperature 3";
    let text = stderr(&ok(&student("whole", flags), &dir.0));
    let said = ["teacher teacher", "temperature 3, share 0.7", ", teacher ", "  kl "];
    said.iter().for_each(|said| assert!(text.contains(said), "{said}: {text}"));
    let written = config(&dir.0, "whole");
    assert_eq!(written["teacher"]["hash"].as_str().unwrap().len(), 64);
    assert_eq!(written["settings"]["teacher_share"], 0.7);
    let [ours, theirs] = ["whole", "teacher"]
        .map(|run| std::fs::read(dir.0.join(run).join("tokenizer.json")).unwrap());
    assert!(ours == theirs);
    let metrics = std::fs::read_to_string(dir.0.join("whole/metrics.jsonl")).unwrap();
    assert_eq!(metrics.matches("\"divergence\":").count(), 16);
    // A run that is killed and resumed is the same to the bit.
    for moment in ["train.made#5", "train.step#4", "file.moved#2"] {
        let args = match dir.0.join("killed/config.json").exists() {
            true => vec!["train", "--resume", "killed"],
            false => student("killed", flags),
        };
        let mut command = elapid(&args, &dir.0);
        let output = command.env("ELAPID_FAIL", format!("{moment}=kill")).output().unwrap();
        assert!(output.status.code().is_none(), "{moment}: {}", stderr(&output));
    }
    ok(&["train", "--resume", "killed"], &dir.0);
    assert_eq!(losses(&dir.0.join("killed")), losses(&dir.0.join("whole")));
    assert!(model(&dir.0.join("killed")) == model(&dir.0.join("whole")));
    // The model is used without its teacher, but the run does not continue with another one.
    let path = dir.0.join("teacher/model/model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let output = run(&["train", "--resume", "whole", "--steps", "20"], &dir.0);
    let text = stderr(&output);
    assert!(!output.status.success() && text.contains("teacher is not the one"), "{text}");
    std::fs::remove_dir_all(dir.0.join("teacher")).unwrap();
    ok(&["generate", "whole", "-p", "pub fn", "--max-tokens", "4"], &dir.0);
}

#[test]
fn a_teacher_of_another_vocabulary_writes_texts() {
    let dir = with_teacher("teacher-texts");
    let flags = "--vocab 330 --steps 8 --save-every 3 --teacher-tokens 900";
    let text = stderr(&ok(&student("whole", flags), &dir.0));
    assert!(text.contains("writes up to 900 tokens") && !text.contains("  kl "), "{text}");
    let written = std::fs::read_to_string(dir.0.join("whole/teacher.jsonl")).unwrap();
    assert!(written.lines().count() >= 3, "{written}");
    // Every text begins as a document does that is learned.
    for line in written.lines() {
        let text = serde_json::from_str::<Value>(line).unwrap()["text"].clone();
        assert!(text.as_str().unwrap().starts_with("/// Adds "), "{text}");
    }
    assert_eq!(config(&dir.0, "whole")["teacher"]["hash"], Value::Null);
    // The same texts another time; and the run needs the teacher no more.
    let args = student("killed", flags);
    let mut command = elapid(&args, &dir.0);
    let output = command.env("ELAPID_FAIL", "train.made#5=kill").output().unwrap();
    assert!(output.status.code().is_none(), "{}", stderr(&output));
    std::fs::remove_dir_all(dir.0.join("teacher")).unwrap();
    ok(&["train", "--resume", "killed"], &dir.0);
    assert_eq!(losses(&dir.0.join("killed")), losses(&dir.0.join("whole")));
    assert!(model(&dir.0.join("killed")) == model(&dir.0.join("whole")));
}

#[test]
fn a_plan_says_what_a_teacher_takes() {
    let dir = with_teacher("teacher-plan");
    let plan = |flags: &str| {
        let head = ["plan", "src", "--teacher", "teacher"].into_iter();
        let args: Vec<&str> = head.chain(STUDENT.split(' ')).chain(flags.split(' ')).collect();
        stderr(&ok(&args, &dir.0))
    };
    assert!(plan("--steps 9").contains(", teacher "));
    let text = plan("--vocab 330 --steps 9");
    assert!(text.contains("writes 32.0 k tokens before training"), "{text}");
    assert!(!dir.0.join("teacher.jsonl").exists());
}

#[test]
fn flags_of_a_teacher_are_checked() {
    let dir = Scratch::new("teacher-flags");
    sources(&dir.0);
    for (flags, said) in [
        ("--teacher src --teacher-share 1.5", "out of range"),
        ("--teacher src --teacher-temperature 0", "not a positive number"),
        ("--teacher-share 0.5", "--teacher <M>"),
        ("--teacher src", "config.json"),
    ] {
        let args: Vec<&str> = ["train", "src"].into_iter().chain(flags.split(' ')).collect();
        let output = run(&args, &dir.0);
        let text = stderr(&output);
        assert!(!output.status.success() && text.contains(said), "{flags}: {text}");
    }
}
