//! `samples.jsonl`: what the model wrote, one JSON object per line.
//!
//!     {"step":0,"name":"src/lib.rs","prompt":"fn main() {","text":"...","truth":"..."}
//!
//! The file is small and written as a whole each time, so that a kill leaves the old or the new.

use crate::files;
use crate::report::{Done, Failure};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Its name in a run directory.
pub const FILE: &str = "samples.jsonl";

/// A completion of a held-out text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Updates before it; 0 is the model as it was.
    pub step: u64,
    /// The document.
    pub name: String,
    /// What the model was given.
    pub prompt: String,
    /// What it wrote.
    pub text: String,
    /// What stands there in truth.
    pub truth: String,
}

/// Puts these in place of those that were there.
pub fn write(dir: &Path, samples: &[Sample]) -> Done<()> {
    files::write(&dir.join(FILE), |sink| {
        for sample in samples {
            let line = serde_json::to_string(sample).expect("samples hold numbers and text only");
            sink(line.as_bytes())?;
            sink(b"\n")?;
        }
        Ok(())
    })?;
    Ok(())
}

/// Those of a run directory; none where there is no such file.
pub fn read(dir: &Path) -> Done<Vec<Sample>> {
    let path = dir.join(FILE);
    let text = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            let problem = format!("cannot read {}: {error}", path.display());
            return Err(Failure::new(problem, "look at the rights of the run directory"));
        }
        Ok(text) => text,
    };
    let parse = |(idx, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|error| {
            let problem = format!("{}: line {}: {error}", path.display(), idx + 1);
            Failure::new(problem, "remove that line, or the file if the samples may be lost")
        })
    };
    text.lines().enumerate().map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_come_back_as_they_were() {
        let dir = crate::run_report::scratch("samples");
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
