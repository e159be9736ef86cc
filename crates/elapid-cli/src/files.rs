//! Small files that commands read and write.

pub use elapid::{make_directory, read_text, write};
use std::path::Path;

/// Writes a small file beside its place, syncs it, and moves it there.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> elapid::Result<()> {
    write(path, |sink| sink(bytes))?;
    Ok(())
}
