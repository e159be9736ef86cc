//! What a file is that is not what its name says: people download pointers, web pages and links.
//!
//! Asked only when a reader has already failed. The first bytes of a good file may look like one
//! of these: a safetensors header of 640 bytes begins with the two bytes of a pickle.

use crate::error::Error;

/// Links hold paths, which are no longer than this.
const LINK_BYTES_MAX: usize = 4096;

/// Magic numbers of the years before GGUF, as they lie in a file.
const PRE_GGUF: [(&[u8], &str); 5] =
    [(b"lmgg", "ggml"), (b"fmgg", "ggmf"), (b"tjgg", "ggjt"), (b"algg", "ggla"), (b"nsgg", "ggsn")];

/// What was to be read: a broken file of this kind is not one "under another name".
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Wanted {
    Gguf,
    SafeTensors,
    Torch,
    Package,
}

/// An error that says what the file is and what to do, if it is something we recognise.
pub(super) fn explain(file: &str, data: &[u8], wanted: Wanted) -> Option<Error> {
    let text = data.trim_ascii_start();
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let begins = |head: &str| {
        text.get(..head.len()).is_some_and(|start| start.eq_ignore_ascii_case(head.as_bytes()))
    };
    let old = PRE_GGUF.iter().find(|(magic, _)| data.starts_with(magic));
    let (problem, hint) = if data.is_empty() {
        ("the file is empty".into(), "download it again")
    } else if data.starts_with(b"version https://git-lfs") {
        ("a git-lfs pointer, not the file it points to".into(), "run `git lfs pull` beside it")
    } else if begins("<!doctype html") || begins("<html") || begins("<?xml") {
        ("a web page, not a model".into(), "the download failed: open the file to read why")
    } else if let Some((_, name)) = old {
        let problem = format!("a `{name}` file, from before GGUF");
        (problem, "convert the original weights with llama.cpp's `convert_hf_to_gguf.py`")
    } else if data.starts_with(b"FUGG") {
        let problem = "GGUF with its magic number reversed (`FUGG`), as one early version wrote";
        (problem.into(), "convert the original weights again")
    } else if data.starts_with(b"GGUF") && wanted != Wanted::Gguf {
        ("a GGUF file under another name".into(), "give it the ending `.gguf`")
    } else if data.starts_with(b"ELAPID") && wanted != Wanted::Package {
        ("an Elapid package under another name".into(), "give it the ending `.elapid`")
    } else if data.starts_with(b"PK\x03\x04") {
        let problem = "a zip archive, as PyTorch writes its checkpoints";
        (problem.into(), "give a directory with it as `pytorch_model.bin` and its config.json")
    } else if matches!(data, [0x80, 2..=5, ..]) {
        let problem = "a Python pickle, as PyTorch used to write its checkpoints";
        (problem.into(), "load and save it again with PyTorch 1.6 or newer, or as safetensors")
    } else if let Some(target) = link(data) {
        let problem = format!("the text of a link to `{target}`, not the file itself");
        (problem, "copy the file the link points to, not the link")
    } else if is_safetensors(data) && wanted != Wanted::SafeTensors {
        ("a safetensors file under another name".into(), "give it the ending `.safetensors`")
    } else if begins("{") {
        ("JSON text, not a model".into(), "if it was downloaded, open it: it may say what failed")
    } else {
        return None;
    };
    Some(Error::format(file, problem, hint))
}

/// A header length below 4 GiB and the start of JSON.
fn is_safetensors(data: &[u8]) -> bool {
    matches!(data, [_, _, _, _, 0, 0, 0, 0, b'{', ..])
}

/// The path, if this is one line of text that looks like one.
fn link(data: &[u8]) -> Option<&str> {
    if data.len() > LINK_BYTES_MAX {
        return None;
    }
    let line = str::from_utf8(data).ok()?.trim_end_matches(['\r', '\n']);
    let is_model = [".safetensors", ".gguf", ".bin"].iter().any(|end| line.ends_with(end));
    let is_path = line.contains(['/', '\\']) || is_model;
    (is_path && !line.contains(char::is_control) && !line.starts_with('{')).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_download_by_mistake_is_said_by_name() {
        for (data, want) in [
            (&b""[..], "is empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git-lfs pointer"),
            (b"\n <!DOCTYPE HTML><html>", "a web page"),
            (b"<html lang=en>", "a web page"),
            (b"tjgg\x01\0\0\0", "a `ggjt` file, from before GGUF"),
            (b"lmgg\x01\0\0\0", "a `ggml` file"),
            (b"FUGG\x01\0\0\0", "reversed (`FUGG`)"),
            (b"PK\x03\x04\0\0", "a zip archive"),
            (b"\x80\x02}q\x00.", "a Python pickle"),
            (b"../../blobs/3a7e\n", "a link to `../../blobs/3a7e`"),
            (b"model.gguf", "a link to `model.gguf`"),
            (b"{\"error\": \"not/found\"}", "JSON text"),
        ] {
            let text = explain("f", data, Wanted::Gguf).unwrap().to_string();
            assert!(text.contains(want), "{want}: {text}");
        }
    }

    #[test]
    fn a_file_of_another_kind_is_said_and_a_broken_one_of_this_kind_is_not() {
        let files = [
            (Wanted::Gguf, &b"GGUF\x03\0\0\0"[..], "a GGUF file under another name"),
            (Wanted::Package, b"ELAPID\r\n", "an Elapid package under another name"),
            (Wanted::SafeTensors, b"\x02\0\0\0\0\0\0\0{}", "a safetensors file under another"),
        ];
        for (own, data, want) in files {
            for wanted in [Wanted::Gguf, Wanted::SafeTensors, Wanted::Package] {
                match explain("f", data, wanted) {
                    Some(error) => assert!(wanted != own && error.report().contains(want)),
                    None => assert!(wanted == own, "{want}"),
                }
            }
        }
    }

    #[test]
    fn noise_is_not_given_a_name() {
        for data in [&b"\x01\x02\x03\x04"[..], b"hello", b"a/b\nc/d", &[b'/'; 5000], b"\x80\x01"] {
            assert!(explain("f", data, Wanted::Gguf).is_none(), "{data:?}");
        }
    }
}
