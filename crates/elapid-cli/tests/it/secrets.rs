//! Keys, passwords and addresses in a project: told by place, and in no token that is trained on.

use crate::common::Scratch;
use crate::common::training::{ok, sources, stderr, train};
use elapid::{Model, Special};
use serde_json::Value;
use std::path::Path;

/// Written in two pieces, so that this file has none.
const KEY: [&str; 2] = ["AKIA", "4QZT7BNVW2LKXM5P"];
const EMAIL: [&str; 2] = ["first.last@", "somewhere.de"];
const PASSWORD: [&str; 2] = ["Tr0ub", "4dor&3!x"];

/// All that the tokens of a run say.
fn tokens_as_text(run: &Path) -> String {
    let bytes = std::fs::read(run.join("tokens.bin")).unwrap();
    let ids: Vec<u32> = bytes
        .chunks_exact(2) // a small vocabulary
        .map(|pair| u16::from_le_bytes([pair[0], pair[1]]).into())
        .collect();
    let tokenizer = Model::open(run.join("model")).unwrap().tokenizer().unwrap().unwrap();
    tokenizer.decode(&ids, Special::Parse)
}

#[test]
fn a_planted_key_and_address_do_not_reach_the_tokens_and_are_told_by_place() {
    let dir = Scratch::new("secrets-planted");
    let src = sources(&dir.0);
    let [key, email, password] = [KEY, EMAIL, PASSWORD].map(|pieces| pieces.concat());
    let config = format!("\"\"\"Settings.\"\"\"\n\nregion = 'north'\n  id = '{key}'\n");
    std::fs::write(src.join("config.py"), config).unwrap();
    let about = format!("Write to {email}.\n\nThe old password = \"{password}\" is gone.\n");
    std::fs::write(src.join("ABOUT.md"), about).unwrap();
    let told = String::from_utf8(ok(&train("run", "--steps 1 --json"), &dir.0).stdout).unwrap();
    let lines = told.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let lines: Vec<Value> = lines.filter(|line| line["kind"] == "secret").collect();
    let texts: Vec<&str> = lines.iter().map(|line| line["text"].as_str().unwrap()).collect();
    let wanted = [
        "ABOUT.md:3:21  password",
        "config.py:4:9  AWS access key",
        "ABOUT.md:1:10  e-mail address",
    ];
    assert_eq!(texts, wanted, "{told}");
    let text = tokens_as_text(&dir.0.join("run"));
    assert!(text.contains("region = 'north'\n  id = '<secret>'\n"), "{text}");
    assert!(text.contains("Write to user@example.com.\n\nThe old password = \"<secret>\" is gone"));
    for secret in [&key, &email, &password] {
        assert!(!text.contains(secret.as_str()) && !told.contains(secret.as_str()), "{secret}");
    }
    // The vocabulary is made from the same text.
    let vocabulary = std::fs::read_to_string(dir.0.join("run/tokenizer.json")).unwrap();
    assert!(!vocabulary.contains("QZT7") && !vocabulary.contains("first.last"));
    // They are learned if that is asked for; tokens of the first run are not taken for it.
    let kept = stderr(&ok(&train("kept", "--steps 1 --keep-secrets"), &dir.0));
    assert!(!kept.contains("taken from there") && !kept.contains("\nsecret "), "{kept}");
    let text = tokens_as_text(&dir.0.join("kept"));
    assert!(text.contains(&key) && text.contains(&email) && text.contains(&password));
}

#[test]
fn records_are_cleaned_too_and_of_many_places_the_first_are_told() {
    let dir = Scratch::new("secrets-records");
    let email = EMAIL.concat();
    let record = |n: usize| {
        let text = format!("Record {n}: number {} is near {}.", n * n, 7919 * n);
        format!("{{\"prompt\": \"{text} Who?\", \"completion\": \"{email} {n}\"}}\n")
    };
    let records: String = (0..40).map(record).collect();
    std::fs::create_dir(dir.0.join("src")).unwrap();
    std::fs::write(dir.0.join("chats.jsonl"), records).unwrap();
    let mut args = train("run", "--steps 1");
    args[1] = "chats.jsonl";
    let told = stderr(&ok(&args, &dir.0));
    let lines: Vec<&str> = told.lines().filter(|line| line.starts_with("secret ")).collect();
    assert_eq!(lines.len(), 11, "{told}");
    assert_eq!(lines[0], "secret  chats.jsonl:1  e-mail address");
    let rest = "secret  and 30 more, 30 of them e-mail addresses; --verbose lists all";
    assert_eq!(lines[10], rest);
    let text = tokens_as_text(&dir.0.join("run"));
    assert!(text.contains("user@example.com 3") && !text.contains(&email), "{text}");
    let mut args = train("all", "--steps 1 --verbose --seed 1 --held-out 0.2");
    args[1] = "chats.jsonl";
    let told = stderr(&ok(&args, &dir.0));
    assert_eq!(told.lines().filter(|line| line.starts_with("secret ")).count(), 40, "{told}");
}
