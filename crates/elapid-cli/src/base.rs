//! The base model that the program brings along: `elapid-code`, wherever a model is named.
//!
//! Weights are mapped into memory from a file, so the embedded bytes are written once to the cache
//! directory of the user, under a name with their hash: another version of the program finds
//! another file. A file that is found there is compared byte for byte before it is used.

use crate::files;
use crate::hub;
use crate::report::{Done, Failure};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// What it is called on the command line.
pub const NAME: &str = "elapid-code";

/// Empty where the crate was built without the folder `models`: a registry takes no crate of its
/// size.
#[cfg(has_model)]
static BYTES: &[u8] = include_bytes!("../../../models/elapid-code.gguf");
#[cfg(not(has_model))]
static BYTES: &[u8] = &[];

/// Texts that the shipped model wrote by itself (`lab/base/replay`), each behind `SEP path \n`.
#[cfg(has_model)]
static REPLAY: &str = include_str!("../../../models/replay.txt");
#[cfg(not(has_model))]
static REPLAY: &str = "";
const SEP: &str = "<|file_sep|>";

/// The model at a path. Where nothing is there, the word `elapid-code` is the shipped one, and
/// `owner/repo` a model of the hub that was pulled.
pub fn resolve(path: &Path) -> Done<Cow<'_, Path>> {
    match path {
        path if path.exists() => Ok(Cow::from(path)),
        path if path == Path::new(NAME) => Ok(Cow::from(self::path()?)),
        path => Ok(hub::resolve(path)?.map_or(Cow::from(path), Cow::from)),
    }
}

/// The file name of the shipped model in any cache directory.
pub fn file_name() -> String {
    format!("{NAME}-{}.gguf", &blake3::hash(BYTES).to_hex()[..12])
}

/// What the shipped model writes when nobody asks for anything, by path: read again in training,
/// it keeps what the model knew.
pub fn replay() -> Vec<(String, String)> {
    let texts = REPLAY.split(SEP).filter_map(|text| text.split_once('\n'));
    texts.map(|(path, text)| (path.to_string(), text.to_string())).collect()
}

/// The shipped model as a file, written where it is not there yet.
pub fn path() -> Done<PathBuf> {
    if BYTES.is_empty() {
        let hint = "name another model: a path, or `owner/repo` after `elapid pull`; releases and \
            builds from a checkout have it";
        return Err(Failure::new(format!("this build is without {NAME}"), hint));
    }
    let name = file_name();
    let folder = cache_directory(|variable| std::env::var_os(variable).map(PathBuf::from));
    let fallback = std::env::temp_dir().join("elapid");
    let Some(folder) = folder else { return Ok(place(&fallback, &name)?) };
    // A home that cannot be written to is no reason to give up.
    place(&folder, &name).or_else(|error| place(&fallback, &name).map_err(|_| error.into()))
}

/// Puts the bytes into this folder, unless they are there.
fn place(folder: &Path, name: &str) -> elapid::Result<PathBuf> {
    let path = folder.join(name);
    let has_length = path.metadata().is_ok_and(|facts| facts.len() == BYTES.len() as u64);
    if has_length && std::fs::read(&path).is_ok_and(|bytes| bytes == BYTES) {
        return Ok(path);
    }
    files::make_directory(folder)?;
    files::write_bytes(&path, BYTES)?;
    Ok(path)
}

/// The folder of this program among those that may be deleted at any time.
fn cache_directory(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).filter(|path| path.is_absolute());
    let of_system = || match std::env::consts::OS {
        "macos" => Some(absolute("HOME")?.join("Library/Caches")),
        "windows" => absolute("LOCALAPPDATA"),
        _ => Some(absolute("HOME")?.join(".cache")),
    };
    absolute("XDG_CACHE_HOME").or_else(of_system).map(|folder| folder.join("elapid"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::scratch;

    #[test]
    fn the_replayed_texts_are_of_many_languages_and_none_is_a_secret() {
        let texts = replay();
        let languages: std::collections::BTreeSet<&str> =
            texts.iter().map(|(path, _)| elapid::language_of_path(path)).collect();
        assert!(texts.len() > 100 && languages.len() >= 15, "{} {languages:?}", texts.len());
        for (path, text) in texts {
            assert!(text.len() > 100 && !text.contains("<|"), "{path}");
            let found = crate::source::secrets::find(&text);
            assert!(found.is_empty(), "{path}: {found:?}");
        }
    }

    #[test]
    fn the_file_is_written_once_and_again_where_a_byte_of_it_changed() {
        let (folder, name) = (scratch("base-place"), file_name());
        let path = place(&folder.join("deep"), &name).unwrap();
        let written = path.metadata().unwrap().modified().unwrap();
        assert_eq!(place(&folder.join("deep"), &name).unwrap(), path);
        assert_eq!(path.metadata().unwrap().modified().unwrap(), written, "it was not rewritten");
        let mut bytes = BYTES.to_vec();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        place(&folder.join("deep"), &name).unwrap();
        assert!(std::fs::read(&path).unwrap() == BYTES);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_cache_directory_follows_the_environment_and_ignores_relative_paths() {
        let of = |list: &'static [(&str, &str)]| {
            let find = |name: &str| list.iter().find(|pair| pair.0 == name).map(|pair| pair.1);
            cache_directory(|name| find(name).map(PathBuf::from))
        };
        assert_eq!(of(&[("XDG_CACHE_HOME", "/c"), ("HOME", "/h")]), Some("/c/elapid".into()));
        assert_eq!(of(&[]), None);
        if cfg!(target_os = "linux") {
            let relative = of(&[("XDG_CACHE_HOME", "c"), ("HOME", "/h")]);
            assert_eq!(relative, Some("/h/.cache/elapid".into()));
        }
    }

    #[test]
    fn another_path_than_the_word_is_left_as_it_is() {
        for path in ["elapid-code.gguf", "models/elapid-code.gguf", "./models/elapid-code", "m"] {
            assert_eq!(resolve(Path::new(path)).unwrap(), Path::new(path));
        }
        assert!(resolve(Path::new(NAME)).unwrap().is_file());
    }
}
