//! Small files that commands read and write.

pub use elapid::{read_text, write};
use std::path::Path;

/// Makes a directory and those above it.
pub fn make_directory(path: &Path) -> elapid::Result<()> {
    let fail = |source| elapid::Error::Write { path: path.into(), source };
    std::fs::create_dir_all(path).map_err(fail)
}

/// Writes a small file beside its place, syncs it, and moves it there.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> elapid::Result<()> {
    write(path, |sink| sink(bytes))?;
    Ok(())
}

/// Bytes of the files under a directory; links count as what they are themselves.
pub fn n_bytes_in(dir: &Path) -> u64 {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let of_entry = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(facts) if facts.is_dir() => n_bytes_in(&entry.path()),
        Ok(facts) => facts.len(),
        Err(_) => 0,
    };
    entries.map(of_entry).sum()
}
