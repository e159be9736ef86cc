//! The real binary on hostile files: it says what is wrong and what to do, exits with 1, and takes
//! no more memory than the address space of 1 GiB it is given.

use crate::common::{Scratch, root};
use std::path::Path;
use std::process::{Command, Output};

/// Runs the binary with little address space, where the system has such a limit.
fn elapid(args: &[&str]) -> Output {
    let binary = env!("CARGO_BIN_EXE_elapid");
    if !cfg!(target_os = "linux") {
        return Command::new(binary).args(args).output().unwrap();
    }
    let script = "ulimit -v 1048576 && exec \"$0\" \"$@\"";
    Command::new("sh").args(["-c", script, binary]).args(args).output().unwrap()
}

/// Exit code 1 (101 would be a panic, none a signal), an error in words that holds `word`, a hint.
fn expect_refusal(args: &[&str], word: &str) {
    let output = elapid(args);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{args:?}: {:?}: {text}", output.status);
    assert!(text.starts_with("error: "), "{args:?}: {text}");
    assert!(text.contains("\n\nhint: "), "{args:?}: {text}");
    assert!(text.contains(word), "{args:?}: wanted `{word}`, got {text}");
    assert!(output.stdout.is_empty(), "{args:?}: {}", String::from_utf8_lossy(&output.stdout));
}

fn seed(name: &str) -> Vec<u8> {
    std::fs::read(root().join("lab/fuzz/corpus").join(name)).unwrap()
}

/// What every command that opens a model must say of a file.
fn expect_refused_by_all(path: &Path, word: &str) {
    let path = path.to_str().unwrap();
    let out = std::env::temp_dir().join(format!("elapid-{}-out.gguf", std::process::id()));
    expect_refusal(&["info", path], word);
    expect_refusal(&["convert", path, out.to_str().unwrap()], word);
    assert!(!out.exists(), "{path}: a file was written");
}

#[test]
fn the_limit_leaves_room_for_a_sound_file() {
    let dir = Scratch::new("sound");
    let path = dir.file("m.gguf", &seed("gguf/llama.gguf"));
    let output = elapid(&["info", path.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn files_that_are_no_models_are_called_by_their_names() {
    let dir = Scratch::new("names");
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n";
    for (name, data, word) in [
        ("empty.gguf", &b""[..], "is empty"),
        ("pointer.gguf", pointer, "git-lfs pointer"),
        ("page.gguf", b"<!doctype html><title>404</title>", "a web page"),
        ("noise.gguf", &[7; 300], "begins with"),
        ("text.gguf", b"\xff\xfe\0\0", "begins with"),
    ] {
        let path = dir.file(name, data);
        expect_refused_by_all(&path, word);
        expect_refused_by_all(&path, name);
    }
}

#[test]
fn a_cut_gguf_file_is_refused_wherever_it_was_cut() {
    let (dir, data) = (Scratch::new("cut"), seed("gguf/bytes.gguf"));
    for n in [4, 8, 23, 24, 60, data.len() / 3, data.len() - 1] {
        let path = dir.file("cut.gguf", &data[..n]);
        expect_refusal(&["info", path.to_str().unwrap()], "cut.gguf: ");
    }
}

#[test]
fn counts_beyond_the_file_take_no_memory() {
    let dir = Scratch::new("counts");
    let data = seed("gguf/llama.gguf");
    for (at, word) in [(8, "1000000000 tensors"), (16, "1000000000 metadata values")] {
        let mut data = data.clone();
        data[at..at + 8].copy_from_slice(&1_000_000_000u64.to_le_bytes());
        expect_refused_by_all(&dir.file("count.gguf", &data), word);
    }
    let mut data = seed("safetensors/model.safetensors");
    data[..8].copy_from_slice(&1_000_000_000u64.to_le_bytes());
    dir.file("model.safetensors", &data);
    dir.file("config.json", &seed("config/mamba.json"));
    expect_refused_by_all(&dir.0, "a header of 1000000000 bytes");
    let layers = String::from_utf8(seed("config/mamba.json")).unwrap();
    let key = "\"num_hidden_layers\": ";
    let (head, tail) = layers.split_once(key).unwrap();
    let layers = format!("{head}{key}1000000000{}", tail.trim_start_matches(char::is_numeric));
    dir.file("config.json", layers.as_bytes());
    expect_refused_by_all(&dir.0, "`num_hidden_layers`: 1000000000 is out of range");
}

#[test]
fn a_config_of_a_million_experts_beside_a_small_file_takes_no_memory() {
    let dir = Scratch::new("experts");
    let json = seed("config/mixtral.json");
    let mut config: serde_json::Value = serde_json::from_slice(&json).unwrap();
    for (key, value) in [("num_hidden_layers", 256), ("num_local_experts", 4096)] {
        config[key] = value.into();
    }
    dir.file("config.json", config.to_string().as_bytes());
    dir.file("model.safetensors", &seed("safetensors/model.safetensors"));
    expect_refused_by_all(&dir.0, "config.json: asks for 256 layers");
    config["num_hidden_layers"] = 8.into();
    dir.file("config.json", config.to_string().as_bytes());
    expect_refused_by_all(&dir.0, "numbers in experts");
}

#[test]
fn a_directory_without_its_files_says_which_is_missing() {
    let dir = Scratch::new("bare");
    expect_refused_by_all(&dir.0, "config.json");
    dir.file("config.json", &seed("config/mamba.json"));
    expect_refused_by_all(&dir.0, "model.safetensors");
    dir.file("config.json", b"{\"model_type\": ");
    expect_refused_by_all(&dir.0, "config.json: not JSON");
    expect_refused_by_all(&dir.0.join("nowhere"), "nowhere");
}

#[test]
fn a_package_with_a_changed_byte_names_the_file() {
    let (dir, data) = (Scratch::new("package"), seed("package/directory.elapid"));
    let find = |word: &[u8]| data.windows(word.len()).position(|part| part == word).unwrap();
    let places = [
        (find(b"vocab_size"), "`config.json` was changed"),
        (find(b"data_offsets"), "`model.safetensors` was changed"),
        (find(b"pre_tokenizer"), "`tokenizer.json` was changed"),
        (find(b"\"created_by\""), "the manifest was changed"),
        (3, "begin"),
        (data.len() - 1, "does not end with the mark"),
    ];
    for (at, word) in places {
        let mut data = data.clone();
        data[at] ^= 1;
        expect_refused_by_all(&dir.file("m.elapid", &data), word);
    }
}

#[cfg(unix)]
#[test]
fn devices_and_links_to_nowhere_are_not_read() {
    let dir = Scratch::new("device");
    expect_refused_by_all(Path::new("/dev/zero"), "/dev/zero is not a plain file");
    let inside = dir.0.join("model.safetensors");
    std::os::unix::fs::symlink("/dev/zero", &inside).unwrap();
    dir.file("config.json", &seed("config/mamba.json"));
    expect_refused_by_all(&dir.0, "not a plain file");
    std::fs::remove_file(&inside).unwrap();
    std::os::unix::fs::symlink("nowhere", &inside).unwrap();
    expect_refused_by_all(&dir.0, "model.safetensors");
}

#[test]
fn a_broken_tokenizer_is_refused() {
    let dir = Scratch::new("tokenizer");
    for (data, word) in
        [(&b"{}"[..], "tokenizer.json"), (b"\xff", "UTF-8"), (b"", "tokenizer.json")]
    {
        let path = dir.file("tokenizer.json", data);
        expect_refusal(&["tokenize", path.to_str().unwrap()], word);
    }
}
