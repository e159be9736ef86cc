//! `elapid adapt` and `elapid verify` in a repository that the test makes.

use super::common::tiny::{Kind, Tiny};
use super::common::training::{ok, run, stderr};
use super::common::{Scratch, refusal};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A repository whose commits are a day apart.
struct Repository {
    dir: PathBuf,
    n_commits: u32,
}

/// Lines that stand nowhere else.
fn code(name: &str, n: usize) -> String {
    let line = |k: usize| match k % 4 {
        0 => format!("pub fn {name}_{k}(value: u32) -> u32 {{\n"),
        1 => format!("    let {name}_sum_{k} = value * {} + {};\n", k * 7 + 3, name.len() + k),
        2 => format!("    {name}_sum_{} ^ {k}\n", k - 1),
        _ => "}\n".to_string(),
    };
    (0..n).map(line).collect()
}

impl Repository {
    fn new(dir: PathBuf) -> Repository {
        std::fs::create_dir_all(&dir).unwrap();
        let repository = Repository { dir, n_commits: 0 };
        repository.git(&["init", "-q", "-b", "main"]);
        repository
    }

    fn git(&self, args: &[&str]) -> String {
        let date = format!("2024-01-{:02}T12:00:00Z", self.n_commits + 1);
        let output = Command::new("git")
            .args(["-c", "user.name=t", "-c", "user.email=t@example.org", "-c"])
            .args(["commit.gpgsign=false"])
            .args(args)
            .current_dir(&self.dir)
            .envs([("GIT_AUTHOR_DATE", &date), ("GIT_COMMITTER_DATE", &date)])
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_string()
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.dir.join(name), text).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.dir.join(name)).unwrap()
    }

    fn commit(&mut self, text: &str) -> String {
        self.git(&["add", "-A"]);
        self.git(&["commit", "-q", "-m", text]);
        self.n_commits += 1;
        self.git(&["rev-parse", "HEAD"])
    }

    /// A dozen files in three commits.
    fn grow(&mut self, n_lines: usize) -> String {
        let mut last = String::new();
        for part in ["alpha", "beta", "gamma"] {
            for n in 0..4 {
                self.write(&format!("{part}_{n}.rs"), &code(&format!("{part}{n}"), n_lines));
            }
            last = self.commit(part);
        }
        last
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn base(dir: &Scratch) -> String {
    let path = dir.0.join("base");
    Tiny { chat: false, ..Tiny::new(Kind::Hybrid) }.write(&path);
    path.to_str().unwrap().to_string()
}

/// (name, scored text, read text) of every held-out document.
fn held_out(run: &Path) -> Vec<(String, String, String)> {
    let text = std::fs::read_to_string(run.join("held-out.jsonl")).unwrap();
    let document = |line: &str| {
        let value: Value = serde_json::from_str(line).unwrap();
        let parts = value["parts"].as_array().unwrap();
        let of = |scored: bool| -> String {
            let parts = parts.iter().filter(|part| part["scored"] == scored);
            parts.map(|part| part["text"].as_str().unwrap()).collect()
        };
        (value["file"].as_str().unwrap().to_string(), of(true), of(false))
    };
    text.lines().map(document).collect()
}

/// Lines of a text that are long enough to be known elsewhere.
fn long_lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| line.len() > 8)
}

#[test]
fn only_text_that_was_written_later_is_held_out_and_a_certificate_stands_for_every_byte() {
    let dir = Scratch::new("adapt-proof");
    let model = base(&dir);
    let mut repository = Repository::new(dir.0.join("project"));
    let at = repository.grow(60);
    let old: Vec<String> = ["alpha", "beta", "gamma"]
        .iter()
        .flat_map(|part| (0..4).map(move |n| format!("{part}_{n}.rs")))
        .map(|name| repository.read(&name))
        .collect();
    // Lines in the middle of a file, a renamed file, moved text, a new file, a branch.
    let text = repository.read("alpha_0.rs");
    let (first, last) = text.split_at(text.find("pub fn alpha0_20").unwrap());
    repository.write("alpha_0.rs", &format!("{first}{}{last}", code("delta", 12)));
    repository.commit("lines in the middle");
    repository.git(&["mv", "beta_1.rs", "renamed.rs"]);
    // The first lines of another file.
    repository.write("renamed.rs", &(repository.read("renamed.rs") + &code("alpha1", 12)));
    repository.commit("a renamed file with text of another");
    repository.git(&["checkout", "-q", "-b", "side"]);
    for n in 0..12 {
        repository.write(&format!("epsilon_{n}.rs"), &code(&format!("epsilon{n}"), 12));
    }
    repository.commit("new files on a branch");
    repository.git(&["checkout", "-q", "main"]);
    repository.write("beta_2.rs", &(repository.read("beta_2.rs") + &code("zeta", 12)));
    repository.commit("lines at the end");
    repository.git(&["merge", "-q", "--no-ff", "-m", "merge", "side"]);
    repository.write("draft.rs", &code("draft", 12));
    let flags =
        ["adapt", ".", "--model", &model, "--steps", "12", "--lr", "0.01", "--threads", "2"];
    let output = run(&flags, &repository.dir);
    assert!(output.status.success(), "{}", stderr(&output));
    let out = String::from_utf8(output.stdout).unwrap();
    assert!(out.contains("verdict better"), "{out}");
    let place = repository.dir.join(".elapid/adapt/1");
    let certificate = json(&place.join("certificate.json"));
    assert_eq!(certificate["split"]["commit"], at);
    // Training saw the tree as it was.
    let learned = certificate["training"]["documents"].as_array().unwrap();
    let hashes: Vec<&str> = learned.iter().map(|it| it["hash"].as_str().unwrap()).collect();
    assert_eq!(hashes.len(), old.len());
    for text in &old {
        assert!(hashes.contains(&&*blake3::hash(text.as_bytes()).to_string()));
    }
    // Held out is what came later, where it was written.
    let documents = held_out(&place);
    let files: Vec<&str> = documents.iter().map(|document| &*document.0).collect();
    let expected = |file: &&str| {
        ["alpha_0.rs", "beta_2.rs", "draft.rs"].contains(file) || file.starts_with("epsilon_")
    };
    assert!(files.iter().all(expected), "{files:?}");
    // Of fifteen files two are set aside for the scale.
    assert_eq!(files.len(), 13, "{files:?}");
    for (file, scored, read) in &documents {
        let known = |line: &str| old.iter().any(|text| text.contains(line));
        assert!(!long_lines(scored).any(known), "{file}: {scored}");
        assert!(long_lines(read).all(known), "{file}: {read}");
    }
    check_certificate(&repository, &place, &model);
}

/// Accepted as it is, refused after each change.
fn check_certificate(repository: &Repository, place: &Path, model: &str) {
    let verify = || run(&["verify", ".elapid/adapt/1"], &repository.dir);
    let output = verify();
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && out.starts_with("equal "), "{out}{}", stderr(&output));
    let refused = |path: &Path, change: &dyn Fn(Vec<u8>) -> Vec<u8>, what: &str| {
        let bytes = std::fs::read(path).unwrap();
        let changed = change(bytes.clone());
        assert_ne!(bytes, changed);
        std::fs::write(path, changed).unwrap();
        let output = verify();
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.code(), Some(3), "{what}: {out}{}", stderr(&output));
        assert!(out.contains(what) && out.contains("refused"), "{what}: {out}");
        std::fs::write(path, bytes).unwrap();
    };
    let figure = |bytes: Vec<u8>| {
        let text = String::from_utf8(bytes).unwrap();
        let at = text.find("\"after\": ").unwrap() + "\"after\": ".len();
        format!("{}9{}", &text[..at], &text[at..]).into_bytes()
    };
    // Whoever changes a figure may make the seal anew: it is measured again.
    let sealed = |bytes: Vec<u8>| {
        let text = String::from_utf8(figure(bytes)).unwrap();
        let body = text.rsplit_once(",\n  \"hash\": \"").unwrap().0;
        let seal = blake3::hash(format!("{body}\n}}").as_bytes());
        format!("{body},\n  \"hash\": \"{seal}\"\n}}\n").into_bytes()
    };
    let byte = |mut bytes: Vec<u8>| {
        let at = bytes.iter().position(|byte| *byte == b'=').unwrap();
        bytes[at] = b'-';
        bytes
    };
    let weight = |mut bytes: Vec<u8>| {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        bytes
    };
    refused(&place.join("certificate.json"), &figure, "certificate.json: its hash");
    refused(&place.join("certificate.json"), &sealed, "in the certificate");
    refused(&place.join("held-out.jsonl"), &byte, "held_out");
    refused(&place.join("model/model.safetensors"), &weight, "adapter");
    refused(&Path::new(model).join("model.safetensors"), &weight, "base");
}

#[test]
fn a_second_time_continues_with_what_changed_and_without_a_change_ends_at_once() {
    let dir = Scratch::new("adapt-again");
    let model = base(&dir);
    let mut repository = Repository::new(dir.0.join("project"));
    repository.grow(40);
    for n in 0..4 {
        let name = format!("gamma_{n}.rs");
        repository.write(&name, &(repository.read(&name) + &code(&format!("later{n}"), 12)));
        repository.commit("more");
    }
    let mut flags = vec!["adapt", "--model", &model, "--steps", "20", "--lr", "0.01"];
    flags.extend(["--method", "lora", "--rank", "4", "--threads", "2"]);
    ok(&flags, &repository.dir);
    let output = ok(&flags, &repository.dir);
    assert!(stderr(&output).contains("nothing to learn is new"), "{}", stderr(&output));
    assert!(!repository.dir.join(".elapid/adapt/2").exists());
    for n in 0..3 {
        repository.write(&format!("new_{n}.rs"), &code(&format!("new{n}"), 40));
        repository.commit("a file");
    }
    repository.write("alpha_0.rs", &(repository.read("alpha_0.rs") + &code("last", 40)));
    repository.commit("lines");
    let output = ok(&flags, &repository.dir);
    assert!(stderr(&output).contains("continues "), "{}", stderr(&output));
    let certificate = json(&repository.dir.join(".elapid/adapt/2/certificate.json"));
    let [first, second] =
        [1, 2].map(|n| json(&repository.dir.join(format!(".elapid/adapt/{n}/certificate.json"))));
    let earlier = second["adapter"]["continues"].as_str().unwrap();
    assert!(earlier.ends_with(".elapid/adapt/1"), "{earlier}");
    assert_ne!(first["split"]["commit"], second["split"]["commit"]);
    assert!(certificate["times"]["n_steps"].as_u64().unwrap() < 20, "{certificate}");
    ok(&["verify", ".elapid/adapt/2"], &repository.dir);
}

#[test]
fn without_history_files_are_held_out_and_that_is_said() {
    let dir = Scratch::new("adapt-plain");
    let model = base(&dir);
    let project = dir.0.join("project");
    std::fs::create_dir_all(&project).unwrap();
    for n in 0..12 {
        std::fs::write(project.join(format!("a{n}.rs")), code(&format!("a{n}"), 40)).unwrap();
    }
    let output = run(&["adapt", "--model", &model, "--minutes", "0.05"], &project);
    assert!([Some(0), Some(3)].contains(&output.status.code()), "{}", stderr(&output));
    assert!(stderr(&output).contains("too little history"), "{}", stderr(&output));
    let certificate = json(&project.join(".elapid/adapt/1/certificate.json"));
    assert_eq!(certificate["split"]["commit"], Value::Null);
    let names = |value: &Value, key: &str| -> Vec<String> {
        let list = value.as_array().unwrap().iter();
        list.map(|one| one[key].as_str().unwrap().to_string()).collect()
    };
    let learned = names(&certificate["training"]["documents"], "name");
    let measured = names(&certificate["held_out"]["files"], "name");
    assert!(!measured.is_empty() && measured.iter().all(|name| !learned.contains(name)));
    assert!(project.join(".elapid/.gitignore").exists());
    let none = Scratch::new("adapt-empty");
    refusal(&run(&["adapt", "--model", &model], &none.0));
    assert!(!none.0.join(".elapid/adapt/1").exists());
}
