//! `metrics.jsonl`: what happened, one JSON object per line, only ever appended to.
//!
//!     {"kind":"step","step":100,"loss":3.2134,"lr":0.00015,"grad_norm":0.91,"ms":412.0,...}
//!     {"kind":"eval","step":100,"loss":3.4418,"bits_per_byte":1.313,"elapsed_s":41.2}
//!     {"kind":"note","step":130,"text":"loss 41.2: back to step 120, rate halved"}
//!     {"kind":"save","step":100,"path":"checkpoints/step-100"}
//!
//! A run that is resumed from the checkpoint of step N drops what came after it, so that the file
//! reads as if nothing had happened. Steps alone do not say what came after: a rollback counts
//! them again. So the `save` line is the mark. It is written, and the file synced, just before the
//! checkpoint becomes valid; whoever finds the checkpoint then finds its line and all before it.
//!
//! Losses of training are f32 and written in the fewest digits that read back to the same bits.
//! What is not finite is written as `null`, as JSON has no other word, and reads back as NaN.
//!
//! Not here: what is shown of it.

use crate::report::{Done, Failure, cannot_write};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Its name in a run directory.
pub const FILE: &str = "metrics.jsonl";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Record {
    Step(StepRecord),
    Eval(EvalRecord),
    Note(NoteRecord),
    Save(SaveRecord),
}

/// One update of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Counted from 1.
    pub step: u64,
    /// Mean over the batch, before the update, in nats per token.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f32,
    /// With a teacher: mean KL divergence from it, in nats per token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub divergence: Option<f32>,
    #[serde(deserialize_with = "or_nan")]
    pub lr: f64,
    /// Norm of all gradients before clipping.
    #[serde(deserialize_with = "or_nan")]
    pub grad_norm: f64,
    #[serde(deserialize_with = "or_nan")]
    pub ms: f64,
    #[serde(deserialize_with = "or_nan")]
    pub tok_per_s: f64,
    /// Tokens learned from since the run began.
    pub n_tok: u64,
    /// Seconds of training since the run began, without the time it lay stopped.
    #[serde(deserialize_with = "or_nan")]
    pub elapsed_s: f64,
}

/// A measurement on the held-out files, or on another set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EvalRecord {
    /// The name of a set that was asked for besides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<String>,
    /// Updates before it; 0 is the model as it was.
    pub step: u64,
    /// Nats per token.
    #[serde(deserialize_with = "or_nan")]
    pub loss: f64,
    #[serde(deserialize_with = "or_nan")]
    pub bits_per_byte: f64,
    /// Seconds of training since the run began.
    #[serde(deserialize_with = "or_nan")]
    pub elapsed_s: f64,
}

/// Something that a person should know, such as a rollback.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NoteRecord {
    /// The step at which it happened, not the one gone back to.
    pub step: u64,
    pub text: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SaveRecord {
    /// Updates in it.
    pub step: u64,
    /// Where, relative to the run directory.
    pub path: String,
}

fn or_nan<'de, D, T>(from: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + From<f32>,
{
    Ok(Option::deserialize(from)?.unwrap_or(T::from(f32::NAN)))
}

impl Record {
    pub fn step(&self) -> u64 {
        match self {
            Record::Step(record) => record.step,
            Record::Eval(record) => record.step,
            Record::Note(record) => record.step,
            Record::Save(record) => record.step,
        }
    }

    /// Its line, without the line's end.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("records hold numbers and text only")
    }
}

pub struct Metrics {
    path: PathBuf,
    file: File,
}

impl Metrics {
    /// Opens `metrics.jsonl` in a run directory. `None` begins a new run with an empty file;
    /// `Some(step)` resumes after the checkpoint of that step and drops what came after it.
    pub fn open(dir: &Path, keep_to_step: Option<u64>) -> Done<Metrics> {
        let path = dir.join(FILE);
        let kept = match keep_to_step {
            None => 0,
            Some(step) => cut(&read_lines(&path)?, step),
        };
        let open = || {
            let mut file = File::options().write(true).create(true).truncate(false).open(&path)?;
            file.set_len(kept)?;
            file.seek(SeekFrom::End(0))?;
            Ok(file)
        };
        let file = open().map_err(|error| cannot_write(&path, error))?;
        Ok(Metrics { path, file })
    }

    /// Adds a line. It goes to the system at once, so that a kill loses no line.
    pub fn append(&mut self, record: &Record) -> Done<()> {
        let mut text = record.to_json();
        text.push('\n');
        self.file.write_all(text.as_bytes()).map_err(|error| cannot_write(&self.path, error))
    }

    /// Makes the lines last through a loss of power. Call it after the `save` line and before the
    /// checkpoint becomes valid.
    pub fn sync(&mut self) -> Done<()> {
        self.file.sync_data().map_err(|error| cannot_write(&self.path, error))
    }
}

/// All records of a run directory, in the order they were written, for the report.
pub fn read(dir: &Path) -> Done<Vec<Record>> {
    Ok(read_lines(&dir.join(FILE))?.into_iter().map(|(record, _)| record).collect())
}

/// The objects of a file, each with the offset of its end; none where there is no file. A last
/// line without an end was torn by a kill and is omitted.
pub(super) fn read_lines<T: DeserializeOwned>(path: &Path) -> Done<Vec<(T, u64)>> {
    let bytes = match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            let problem = format!("cannot read {}: {error}", path.display());
            return Err(Failure::new(problem, "check the permissions of the run directory"));
        }
        Ok(bytes) => bytes,
    };
    let mut list = Vec::new();
    let mut end = 0;
    for line in bytes.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
        end += line.len() as u64;
        let object = serde_json::from_slice(line).map_err(|error| {
            let problem = format!("{}: line {}: {error}", path.display(), list.len() + 1);
            Failure::new(problem, "remove that line, or the file if what it holds may be lost")
        })?;
        list.push((object, end));
    }
    Ok(list)
}

/// How many bytes to keep to resume after the checkpoint of `step`: up to its last `save` line,
/// or, where it has none, up to the last line that is no later than `step`.
fn cut(list: &[(Record, u64)], step: u64) -> u64 {
    let is_mark = |record: &Record| matches!(record, Record::Save(save) if save.step == step);
    let mark = list.iter().rfind(|(record, _)| is_mark(record));
    let mark = mark.or_else(|| list.iter().rfind(|(record, _)| record.step() <= step));
    mark.map_or(0, |(_, end)| *end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::scratch;

    fn step(step: u64) -> Record {
        Record::Step(StepRecord {
            step,
            loss: 4.0 / step as f32,
            divergence: None,
            lr: 1.5e-4,
            grad_norm: 0.91,
            ms: 412.5,
            tok_per_s: 4964.848,
            n_tok: 2048 * step,
            elapsed_s: 0.4125 * step as f64,
        })
    }

    fn save(step: u64) -> Record {
        Record::Save(SaveRecord { step, path: format!("checkpoints/step-{step}") })
    }

    fn note(step: u64, text: &str) -> Record {
        Record::Note(NoteRecord { step, text: text.to_string() })
    }

    fn write(dir: &Path, keep_to_step: Option<u64>, records: &[Record]) {
        let mut metrics = Metrics::open(dir, keep_to_step).unwrap();
        records.iter().for_each(|record| metrics.append(record).unwrap());
        metrics.sync().unwrap();
    }

    fn text(dir: &Path) -> String {
        std::fs::read_to_string(dir.join(FILE)).unwrap()
    }

    #[test]
    fn lines_have_the_documented_fields_in_order() {
        let eval =
            EvalRecord { set: None, step: 2, loss: 3.4418, bits_per_byte: 1.313, elapsed_s: 0.825 };
        let lines = [step(2), Record::Eval(eval), note(3, "a \"b\"\n"), save(2)];
        let lines: Vec<String> = lines.iter().map(Record::to_json).collect();
        let want = [
            "{\"kind\":\"step\",\"step\":2,\"loss\":2.0,\"lr\":0.00015,\"grad_norm\":0.91,\
             \"ms\":412.5,\"tok_per_s\":4964.848,\"n_tok\":4096,\"elapsed_s\":0.825}",
            "{\"kind\":\"eval\",\"step\":2,\"loss\":3.4418,\"bits_per_byte\":1.313,\
             \"elapsed_s\":0.825}",
            "{\"kind\":\"note\",\"step\":3,\"text\":\"a \\\"b\\\"\\n\"}",
            "{\"kind\":\"save\",\"step\":2,\"path\":\"checkpoints/step-2\"}",
        ];
        assert_eq!(lines, want);
    }

    #[test]
    fn losses_read_back_to_the_same_bits() {
        let mut bits = 0x3f80_0000u32;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let loss = f32::from_bits(bits & 0x7fff_ffff);
            let Record::Step(mut record) = step(1) else { unreachable!() };
            record.loss = loss;
            let line = Record::Step(record).to_json();
            let Record::Step(back) = serde_json::from_str(&line).unwrap() else { unreachable!() };
            let same = back.loss.to_bits() == loss.to_bits() || !loss.is_finite();
            assert!(same, "{loss:e} became {:e}", back.loss);
            assert_eq!(back.loss.is_nan(), !loss.is_finite());
        }
    }

    #[test]
    fn a_resumed_run_reads_as_if_nothing_had_happened() {
        let dir = scratch("resume");
        let all = [step(1), step(2), save(2), step(3), step(4), save(4), step(5)];
        write(&dir, None, &all);
        let want = text(&dir);
        // Killed in the middle of a line after step 5, resumed from step 2.
        let mut torn = want.clone();
        torn.push_str("{\"kind\":\"step\",\"st");
        std::fs::write(dir.join(FILE), &torn).unwrap();
        write(&dir, Some(2), &all[3..]);
        assert_eq!(text(&dir), want);
        // Resumed from the newest, with the torn line only to drop.
        std::fs::write(dir.join(FILE), &torn).unwrap();
        write(&dir, Some(4), &all[6..]);
        assert_eq!(text(&dir), want);
        assert_eq!(read(&dir).unwrap(), all);
    }

    #[test]
    fn steps_counted_again_after_a_rollback_are_kept() {
        let dir = scratch("rollback");
        let diverged = [step(1), step(2), step(3), note(3, "back to step 1"), step(2), save(2)];
        write(&dir, None, &diverged);
        let want = text(&dir);
        write(&dir, Some(2), &[]);
        assert_eq!(text(&dir), want);
        // No `save` line: what is later than the step is dropped, at the end only.
        write(&dir, None, &diverged[..5]);
        write(&dir, Some(1), &[]);
        assert_eq!(read(&dir).unwrap(), diverged[..1]);
    }

    #[test]
    fn the_line_of_a_checkpoint_is_the_mark_even_where_steps_repeat() {
        let dir = scratch("mark");
        let records = [step(1), save(1), step(2), note(2, "back to step 0"), step(1), step(2)];
        write(&dir, None, &records);
        write(&dir, Some(1), &[]);
        assert_eq!(read(&dir).unwrap(), records[..2]);
    }

    #[test]
    fn a_new_run_begins_empty_and_a_lost_file_is_no_reason_to_stop() {
        let dir = scratch("new");
        write(&dir, None, &[step(1)]);
        write(&dir, None, &[]);
        assert_eq!(text(&dir), "");
        std::fs::remove_file(dir.join(FILE)).unwrap();
        write(&dir, Some(7), &[step(8)]);
        assert_eq!(read(&dir).unwrap(), [step(8)]);
    }

    #[test]
    fn a_broken_line_is_named() {
        let dir = scratch("broken");
        std::fs::write(dir.join(FILE), "{\"kind\":\"note\",\"step\":1,\"text\":\"\"}\nhello\n")
            .unwrap();
        let failure = read(&dir).unwrap_err().to_string();
        assert!(failure.contains("metrics.jsonl: line 2"), "{failure}");
        assert!(failure.contains("hint: "), "{failure}");
    }
}
