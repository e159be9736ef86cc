//! What a run writes down of every step: metrics.jsonl, and the same for TensorBoard. Of several
//! ranks the first does.

use crate::ranks;
use crate::report::Done;
use crate::report::events::Events;
use crate::report::metrics::{Metrics, Record};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Both files; none where another rank has them.
pub struct Log(Option<(Metrics, Events)>);

/// Time as TensorBoard counts it.
fn wall() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl Log {
    /// Of a new run, or of one that continues after `step`.
    pub fn open(dir: &Path, step: Option<u64>) -> Done<Log> {
        if !ranks::here().is_first() {
            return Ok(Log(None));
        }
        let metrics = Metrics::open(dir, step)?;
        Ok(Log(Some((metrics, Events::create(dir, wall(), step.unwrap_or(0) + 1)?))))
    }

    pub fn append(&mut self, record: &Record) -> Done<()> {
        let Some((metrics, events)) = &mut self.0 else { return Ok(()) };
        metrics.append(record)?;
        match record {
            Record::Step(step) => {
                crate::failpoint::hit("train.made")?;
                events.step(wall(), step)
            }
            Record::Eval(eval) => events.eval(wall(), eval),
            // The line stands before the checkpoint is valid: a run resumed from it finds its mark.
            Record::Save(_) => metrics.sync(),
            Record::Note(_) => Ok(()),
        }
    }

    /// After going back to `step`.
    pub fn restart(&mut self, dir: &Path, step: u64) -> Done<()> {
        let Some((metrics, events)) = &mut self.0 else { return Ok(()) };
        *metrics = Metrics::open(dir, Some(step))?;
        events.restart(wall(), step + 1)
    }
}
