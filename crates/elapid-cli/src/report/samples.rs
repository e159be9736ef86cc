//! `samples.jsonl`: what the model wrote, one JSON object per line.
//!
//!     {"step":0,"name":"src/lib.rs","prompt":"fn main() {","text":"...","truth":"..."}
//!
//! The file is small and written as a whole each time, so that a kill leaves the old or the new.

use crate::files;
use crate::report::{Done, metrics};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Its name in a run directory.
pub const FILE: &str = "samples.jsonl";

/// A completion of a held-out text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Updates before it; 0 is the model as it was.
    pub step: u64,
    pub name: String,
    pub prompt: String,
    pub text: String,
    /// What stands there in truth.
    pub truth: String,
}

/// Puts these in place of those that were there.
pub fn write(dir: &Path, samples: &[Sample]) -> Done<()> {
    let line = |sample| serde_json::to_string(sample).expect("samples hold numbers and text only");
    let text: String = samples.iter().map(|sample| line(sample) + "\n").collect();
    files::write_bytes(&dir.join(FILE), text.as_bytes())?;
    Ok(())
}

/// Those of a run directory; none where there is no such file.
pub fn read(dir: &Path) -> Done<Vec<Sample>> {
    Ok(metrics::read_lines(&dir.join(FILE))?.into_iter().map(|(sample, _)| sample).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_come_back_as_they_were() {
        let dir = crate::report::scratch("samples");
        assert_eq!(read(&dir).unwrap(), []);
        let sample = Sample {
            step: 0,
            name: "a b.rs".to_string(),
            prompt: "fn \"f\"\r\n\u{2028}".to_string(),
            text: "\u{0}\u{1b}[31m\n".to_string(),
            truth: "é </script>".to_string(),
        };
        write(&dir, &[sample.clone(), sample.clone()]).unwrap();
        assert_eq!(read(&dir).unwrap(), [sample.clone(), sample]);
    }
}
