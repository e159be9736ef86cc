//! The files of the project.

use crate::layers;
use crate::tree::Crate;
use std::path::{Path, PathBuf};

pub struct Source {
    /// Relative to the root, with forward slashes.
    pub path: String,
    pub text: String,
}

impl Source {
    /// Whether a comment of the file makes an exception: `tidy: allow RULE`.
    pub fn allows(&self, rule: &str) -> bool {
        self.text.contains(&format!("tidy: allow {rule}"))
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn walk(dir: &Path, list: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    for path in entries.map_while(Result::ok).map(|entry| entry.path()) {
        let name = path.file_name().and_then(|name| name.to_str());
        if matches!(name, Some("target" | ".git" | "sets")) {
            continue;
        }
        if path.is_dir() { walk(&path, list) } else { list.push(path) }
    }
}

/// Text files of the project with one of these extensions.
pub fn sources(extensions: &[&str]) -> Vec<Source> {
    let root = root();
    let mut paths = Vec::new();
    walk(&root, &mut paths);
    paths.retain(|path| {
        path.extension().is_some_and(|ext| extensions.iter().any(|want| ext == *want))
    });
    paths.sort();
    let name = |path: &Path| {
        let path = path.strip_prefix(&root).unwrap_or(path);
        path.to_string_lossy().replace('\\', "/")
    };
    paths
        .into_iter()
        .map(|path| name(&path))
        .map(|path| Source { text: text(&path), path })
        .collect()
}

/// A file of the project that must be there.
pub fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The modules of a crate of the project.
pub fn tree(name: &str) -> Crate {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).ok();
    let root = if name == "elapid" { "lib.rs" } else { "main.rs" };
    Crate::read(&format!("crates/{name}/src/{root}"), &read)
}

/// The layers that ARCHITECTURE.md draws of a crate.
pub fn layers(name: &str) -> Vec<Vec<String>> {
    layers::drawn(&text("ARCHITECTURE.md"), name)
}
