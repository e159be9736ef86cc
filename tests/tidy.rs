//! House rules that the compiler cannot check.
//!
//! An exception is a comment in the file, `tidy: allow RULE`, with its reason;
//! `grep -rn 'tidy: allow'` lists them all.

#![allow(clippy::unwrap_used)] // a test may panic

use std::path::{Path, PathBuf};

struct Source {
    /// Relative to the root, with forward slashes.
    path: String,
    text: String,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn walk(dir: &Path, list: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name == "target" || name == ".git" || name == "sets" {
            continue;
        }
        if path.is_dir() { walk(&path, list) } else { list.push(path) }
    }
}

/// Text files of the project with one of these extensions.
fn sources(extensions: &[&str]) -> Vec<Source> {
    let root = root();
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    paths.retain(|path| {
        path.extension().is_some_and(|ext| extensions.iter().any(|want| ext == *want))
    });
    paths.sort();
    let read = |path: PathBuf| Source {
        text: std::fs::read_to_string(&path).unwrap(),
        path: path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/"),
    };
    paths.into_iter().map(read).collect()
}

impl Source {
    fn allows(&self, rule: &str) -> bool {
        self.text.contains(&format!("tidy: allow {rule}"))
    }

    /// Without the tests at its end.
    fn code(&self) -> &str {
        if self.path.ends_with("/tests.rs") {
            return "";
        }
        self.text.split("#[cfg(test)]\nmod tests").next().unwrap()
    }

    /// Code lines without comments.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        let lines = self.code().lines().enumerate().map(|(idx, line)| (idx + 1, line.trim()));
        lines.filter(|(_, line)| !line.starts_with("//"))
    }
}

/// Fails with every offence, one per line.
fn assert_none(rule: &str, offences: Vec<String>) {
    assert!(offences.is_empty(), "{rule}:\n{}", offences.join("\n"));
}

/// Lines of `sources` that contain one of `words`.
fn find(sources: &[Source], words: &[&str]) -> Vec<String> {
    let mut list = Vec::new();
    for source in sources {
        for (number, line) in source.lines() {
            if let Some(word) = words.iter().find(|word| line.contains(**word)) {
                list.push(format!("{}:{number}: {word}", source.path));
            }
        }
    }
    list
}

fn under(prefix: &str) -> Vec<Source> {
    let mut list = sources(&["rs"]);
    list.retain(|source| source.path.starts_with(prefix));
    assert!(!list.is_empty(), "no sources under {prefix}");
    list
}

#[test]
fn each_file_says_what_it_is_for() {
    let silent = sources(&["rs"]).into_iter().filter(|source| !source.text.starts_with("//! "));
    assert_none("begins with `//!`", silent.map(|source| source.path).collect());
}

#[test]
fn the_engine_sees_no_terminal_network_environment_clock_or_files() {
    let words = [
        "std::env",
        "std::fs",
        "std::net",
        "std::process",
        "std::time",
        "std::io",
        "println!",
        "eprintln!",
        "print!(",
        "Instant::",
        "SystemTime",
        "tokio",
        "clap",
        "memmap2",
    ];
    let mut found = find(&under("crates/elapid/src"), &words);
    // Maps without a file: memory that goes back to the system whole.
    found.retain(|place| !place.contains("cpu/pool.rs") || !place.ends_with("memmap2"));
    assert_none("outside the engine", found);
}

#[test]
fn commands_and_page_see_no_ops_and_no_kernels() {
    let words = [
        "elapid::ops",
        "elapid::tensor::cpu",
        "elapid::tensor::quant",
        "pulp::",
        "rayon::",
        "gemm::",
    ];
    assert_none("inside the engine", find(&under("crates/elapid-cli/src"), &words));
    assert_none("inside the engine", find(&under("crates/elapid-web/src"), &words));
}

#[test]
fn ops_know_nothing_of_models() {
    let words = [
        "crate::config",
        "crate::layer",
        "crate::model",
        "crate::weights",
        "crate::train",
        "crate::golden",
        "crate::formats",
        "crate::state",
    ];
    assert_none("above the ops", find(&under("crates/elapid/src/ops"), &words));
    let mut list = under("crates/elapid/src/cpu");
    list.extend(under("crates/elapid/src/quant"));
    let words = [&words[..], &["crate::ops", "crate::tape", "crate::tensor"]].concat();
    assert_none("above the kernels", find(&list, &words));
    let words = [&words[..8], &["crate::ops", "crate::tape"]].concat();
    assert_none("above the devices", find(&under("crates/elapid/src/gpu"), &words));
}

#[test]
fn only_config_knows_families() {
    let families =
        ["\"falcon", "\"granite", "\"jamba\"", "\"bamba\"", "\"qwen", "\"mixtral\"", "\"olmoe\""];
    let mut list = under("crates/elapid/src");
    list.retain(|source| !source.path.starts_with("crates/elapid/src/config/"));
    assert_none("only in config/", find(&list, &families));
}

#[test]
fn every_op_is_checked_against_finite_differences() {
    // An op is a file, or a folder whose files are taken together.
    let mut ops: std::collections::BTreeMap<String, bool> = Default::default();
    for source in under("crates/elapid/src/ops/") {
        let op = source.path.trim_start_matches("crates/elapid/src/ops/").split('/').next();
        let is_checked = source.text.contains("check_gradients(") || source.allows("unchecked");
        *ops.entry(op.unwrap().to_string()).or_default() |= is_checked;
    }
    ops.remove("mod.rs");
    let unchecked = ops.into_iter().filter(|op| !op.1).map(|op| op.0).collect();
    assert_none("calls check_gradients", unchecked);
}

#[test]
fn unsafe_code_is_where_it_must_be() {
    let allowed = ["crates/elapid/src/cpu/gemm.rs", "crates/elapid-cli/src/files.rs"];
    // Instructions of particular machines.
    let is_simd = |source: &Source| source.path.starts_with("crates/elapid/src/quant/dot/");
    // Calls of the driver.
    let is_cuda = |source: &Source| source.path.starts_with("crates/elapid/src/gpu/cuda/");
    let mut list = under("crates/");
    list.retain(|source| !allowed.contains(&source.path.as_str()) && !source.allows("unsafe"));
    list.retain(|source| !is_simd(source) && !is_cuda(source));
    assert_none("unsafe", find(&list, &["unsafe ", "unsafe{"]));
}

#[test]
fn lines_and_files_fit() {
    let mut offences = Vec::new();
    for source in sources(&["rs", "wgsl", "cu", "cpp", "h"]) {
        for (idx, line) in source.text.lines().enumerate() {
            if line.chars().count() > 100 && !line.contains("http") {
                offences.push(format!("{}:{}: over 100 columns", source.path, idx + 1));
            }
        }
        let n_lines = source.code().lines().count();
        if n_lines > 600 && !source.allows("long") {
            offences.push(format!("{}: {n_lines} lines", source.path));
        }
    }
    assert_none("100 columns, 600 lines", offences);
}

#[test]
fn nothing_is_left_unfinished_or_skipped() {
    // Put together here so that this file does not find itself.
    let words = [
        ["todo", "!("].concat(),
        ["unimplemented", "!("].concat(),
        ["dbg", "!("].concat(),
        ["#[ign", "ore"].concat(),
        ["FIX", "ME"].concat(),
        ["XX", "X"].concat(),
    ];
    let mut offences = Vec::new();
    for source in sources(&["rs", "py", "toml", "yml"]) {
        for (idx, line) in source.text.lines().enumerate() {
            if let Some(word) = words.iter().find(|word| line.contains(word.as_str())) {
                offences.push(format!("{}:{}: {word}", source.path, idx + 1));
            }
        }
    }
    assert_none("finished", offences);
}

#[test]
fn every_dependency_is_explained() {
    let root = root();
    let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
    let contributing = std::fs::read_to_string(root.join("CONTRIBUTING.md")).unwrap();
    let list = manifest.split("[workspace.dependencies]").nth(1).unwrap();
    let list = list.split("\n[").next().unwrap();
    let names = list.lines().filter_map(|line| line.split_once(" = ")).map(|pair| pair.0);
    let silent = names
        .filter(|name| !name.starts_with('#') && *name != "elapid")
        .filter(|name| !contributing.contains(&format!("`{name}`")));
    assert_none("CONTRIBUTING.md says what it is for", silent.map(str::to_string).collect());
}

#[test]
fn no_machine_is_named() {
    let words = [
        ["/ro", "ot/"].concat(),
        ["/ho", "me/"].concat(),
        ["/wo", "rk/"].concat(),
        ["/op", "t/"].concat(),
        ["crates", ".io"].concat(),
        ["pypi", ".org"].concat(),
    ];
    let mut offences = Vec::new();
    for source in sources(&["rs", "md", "py", "toml", "json", "sh"]) {
        for (idx, line) in source.text.lines().enumerate() {
            if let Some(word) = words.iter().find(|word| line.contains(word.as_str())) {
                offences.push(format!("{}:{}: {word}", source.path, idx + 1));
            }
        }
    }
    assert_none("names of machines and registries", offences);
}
