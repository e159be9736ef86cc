//! Small files that commands read and write.

use crate::report::Done;
pub use elapid::{make_directory, map, read_text, write};
use std::path::Path;

/// Writes a small file beside its place, syncs it, and moves it there.
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Done<()> {
    write(path, |sink| sink(bytes))?;
    Ok(())
}
