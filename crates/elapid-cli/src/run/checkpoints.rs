//! Checkpoints of a run on disk. A write goes beside its place, is synced and then renamed, and the
//! manifest inside comes last: whatever moment the process dies at, the checkpoints that were there
//! are there. At start the newest that verifies is taken; the two newest are kept, and the best.
//!
//!     checkpoints/step-0000000400.elapid
//!     checkpoints/best-0000000360.elapid

use crate::files;
use crate::report::{Done, Failure};
use elapid::Saved;
use elapid::Training;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Checkpoints that are kept besides the best.
const N_KEPT: usize = 2;

/// The checkpoints of one run.
pub struct Checkpoints {
    dir: PathBuf,
    /// Steps between two that a run may go back to.
    every: u64,
}

impl Checkpoints {
    /// Those in `dir`, which is made if it is not there.
    pub fn open(dir: &Path, every: u64) -> Done<Checkpoints> {
        files::make_directory(dir)?;
        Ok(Checkpoints { dir: dir.into(), every: every.max(1) })
    }

    /// Where the checkpoint of a step is.
    pub fn path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("step-{step:010}.elapid"))
    }

    fn best_path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("best-{step:010}.elapid"))
    }

    /// Whether there is none to go on from.
    pub fn is_empty(&self) -> bool {
        self.steps("step-").is_empty()
    }

    /// Whether a run saves at this step without being asked.
    pub fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every)
    }

    /// Steps of the checkpoints of a kind that are there, newest first.
    fn steps(&self, kind: &str) -> Vec<u64> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut steps: Vec<u64> = entries
            .filter_map(|entry| {
                let name = entry.file_name();
                let digits = name.to_str()?.strip_prefix(kind)?.strip_suffix(".elapid")?;
                digits.parse().ok()
            })
            .collect();
        steps.sort_unstable_by(|a, b| b.cmp(a));
        steps
    }

    /// Saves the run as it is.
    pub fn save(&self, training: &Training, extra: &Value) -> Done<()> {
        let path = self.path(training.progress().step);
        training.save(&path, extra)?;
        self.prune();
        Ok(())
    }

    /// Saves the run as the best so far.
    pub fn save_best(&self, training: &Training, extra: &Value) -> Done<()> {
        Ok(training.save(self.best_path(training.progress().step), extra)?)
    }

    /// Removes the best ones before `step`: nobody who goes on will ask for them.
    pub fn prune_best(&self, step: u64) {
        for older in self.steps("best-").into_iter().filter(|older| *older < step) {
            let _ = std::fs::remove_file(self.best_path(older));
        }
    }

    /// Removes all but the newest. Those a run may go back to are counted apart from those that an
    /// interruption left.
    fn prune(&self) {
        let steps = self.steps("step-");
        let due = steps.iter().filter(|step| self.is_due(**step)).take(N_KEPT);
        let kept: Vec<u64> = due.chain(steps.iter().take(N_KEPT)).copied().collect();
        for step in steps.iter().filter(|step| !kept.contains(step)) {
            // What cannot be removed is in nobody's way.
            let _ = std::fs::remove_file(self.path(*step));
        }
        self.remove_parts();
    }

    /// Removes what an interrupted write left.
    fn remove_parts(&self) {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        for entry in entries {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "part") {
                let _ = std::fs::remove_file(path);
            }
        }
    }

    fn read(&self, path: &Path) -> Done<Saved> {
        Ok(Saved::open(path)?)
    }

    /// The newest that verifies; what does not is named to `note`.
    pub fn newest(&self, note: &mut dyn FnMut(String)) -> Done<Saved> {
        self.newest_of(self.steps("step-"), note)
    }

    /// The newest that verifies of those at regular steps: where a run goes back to must not
    /// depend on when it was interrupted.
    pub fn newest_regular(&self, note: &mut dyn FnMut(String)) -> Done<Saved> {
        let steps = self.steps("step-").into_iter().filter(|step| self.is_due(*step));
        self.newest_of(steps.collect(), note)
    }

    fn newest_of(&self, steps: Vec<u64>, note: &mut dyn FnMut(String)) -> Done<Saved> {
        for step in &steps {
            match self.read(&self.path(*step)) {
                Ok(saved) => return Ok(saved),
                Err(failure) => note(failure.to_string()),
            }
        }
        let problem = format!("{} holds no whole checkpoint", self.dir.display());
        Err(Failure::new(problem, "begin the run again with another --out"))
    }

    /// The best of this step, if it was saved and verifies.
    pub fn best(&self, step: u64) -> Option<Saved> {
        let path = self.best_path(step);
        path.exists().then(|| self.read(&path).ok()).flatten()
    }

    /// Removes those behind a step that the run went back to.
    pub fn forget_after(&self, step: u64) {
        for later in self.steps("step-").into_iter().filter(|later| *later > step) {
            let _ = std::fs::remove_file(self.path(later));
        }
    }
}
