//! Whether the model that the program brings along is there: the registry's crate is without it.

use std::path::Path;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(has_model)");
    let models = Path::new("../../models");
    let files = ["elapid-code.gguf", "replay.txt"].map(|name| models.join(name));
    for file in &files {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    if files.iter().all(|file| file.exists()) {
        println!("cargo::rustc-cfg=has_model");
    }
}
