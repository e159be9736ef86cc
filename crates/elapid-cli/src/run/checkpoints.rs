//! Checkpoints of a run on disk. A step's state is copied at its end; another thread hashes and
//! writes it while training continues, never more than one behind. A write goes beside its place,
//! is synced and then renamed, and the manifest inside comes last: whatever moment the process dies
//! at, the checkpoints that were there are there. At start the newest that verifies is taken; the
//! two newest are kept, and the best weights.
//!
//!     checkpoints/step-0000000400.elapid
//!     checkpoints/best-0000000360.elapid
//!
//! The best weights wait in memory for the next checkpoint and are written before it: a run that is
//! resumed from it finds them.

use crate::files;
use crate::ranks;
use crate::report::{Done, Failure};
use elapid::{Capture, Extent, Saved, Training};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Instant;

/// Checkpoints that are kept besides the best.
const N_KEPT: usize = 2;

/// The checkpoints of one run.
pub struct Checkpoints {
    place: Place,
    /// The one being written; when done, the seconds that took.
    writer: Option<JoinHandle<elapid::Result<f64>>>,
    /// The best weights, where they are not written yet.
    best: Option<Capture>,
}

/// The directory, for both threads.
#[derive(Clone)]
struct Place {
    dir: PathBuf,
    /// Steps between two that a run may go back to.
    every: u64,
}

impl Checkpoints {
    /// Those in `dir`, which is made if it is not there.
    pub fn open(dir: &Path, every: u64) -> Done<Checkpoints> {
        files::make_directory(dir)?;
        let place = Place { dir: dir.into(), every: every.max(1) };
        Ok(Checkpoints { place, writer: None, best: None })
    }

    /// Steps between two, decided once the first was written.
    pub fn set_every(&mut self, every: u64) {
        self.place.every = every.max(1);
    }

    /// Where the checkpoint of a step is.
    pub fn path(&self, step: u64) -> PathBuf {
        self.place.path(step)
    }

    /// Whether there is none to resume from.
    pub fn is_empty(&self) -> bool {
        self.place.steps("step-").is_empty()
    }

    /// Whether a run saves at this step without being asked.
    pub fn is_due(&self, step: u64) -> bool {
        self.place.is_due(step)
    }

    /// Saves the run as it is, once the one before is written, and with it the best weights; of
    /// older ones it removes those before step `best_since`. The first rank writes what all have.
    pub fn save(&mut self, training: &Training, extra: &Value, best_since: u64) -> Done<()> {
        self.wait()?;
        let capture = training.capture(Extent::Run, extra)?;
        if !ranks::here().is_first() {
            return Ok(());
        }
        let (place, best) = (self.place.clone(), self.best.take());
        self.writer = Some(std::thread::spawn(move || {
            let begin = Instant::now();
            if let Some(best) = best {
                best.save(place.best_path(best.step))?;
            }
            capture.save(place.path(capture.step))?;
            place.prune(best_since);
            Ok(begin.elapsed().as_secs_f64())
        }));
        Ok(())
    }

    /// Waits until everything is written; the seconds that writing took, where something was.
    pub fn wait(&mut self) -> Done<Option<f64>> {
        let Some(writer) = self.writer.take() else { return Ok(None) };
        match writer.join() {
            Ok(written) => Ok(Some(written?)),
            Err(_) => Err(Failure::new("writing a checkpoint failed", "this is a bug in Elapid")),
        }
    }

    /// The same on every rank: what one has written all can read.
    fn wait_for_all(&mut self) -> Done<()> {
        self.wait()?;
        ranks::here().wait()
    }

    /// Keeps the weights as the best so far.
    pub fn keep_best(&mut self, training: &Training, extra: &Value) -> Done<()> {
        if ranks::here().is_first() {
            self.best = Some(training.capture(Extent::Weights, extra)?);
        }
        Ok(())
    }

    /// The newest that verifies; what does not is named to `note`.
    pub fn newest(&self, note: &mut dyn FnMut(String)) -> Done<Saved> {
        self.place.newest_of(self.place.steps("step-"), note)
    }

    /// The newest that verifies of those at regular steps: where a run goes back to must not
    /// depend on when it was interrupted.
    pub fn newest_regular(&mut self, note: &mut dyn FnMut(String)) -> Done<Saved> {
        self.wait_for_all()?;
        let steps = self.place.steps("step-").into_iter().filter(|step| self.is_due(*step));
        self.place.newest_of(steps.collect(), note)
    }

    /// The best weights, of this step, if they were kept and verify.
    pub fn best(&mut self, step: u64) -> Done<Option<Saved>> {
        let path = self.place.best_path(step);
        self.wait()?;
        if let Some(best) = self.best.take_if(|best| best.step == step) {
            best.save(&path)?;
        }
        self.wait_for_all()?;
        Ok(path.exists().then(|| Saved::open(&path).ok()).flatten())
    }

    /// Removes those behind a step that the run went back to.
    pub fn forget_after(&mut self, step: u64) -> Done<()> {
        // Every rank has read what it went back to.
        self.wait_for_all()?;
        if !ranks::here().is_first() {
            return Ok(());
        }
        for later in self.place.steps("step-").into_iter().filter(|later| *later > step) {
            let _ = std::fs::remove_file(self.path(later));
        }
        Ok(())
    }

    /// Leaves the newest checkpoints and the best weights: the run has ended.
    pub fn finish(&mut self, best: Option<u64>) -> Done<()> {
        self.wait()?;
        if !ranks::here().is_first() {
            return Ok(());
        }
        for step in self.place.steps("step-").into_iter().skip(N_KEPT) {
            let _ = std::fs::remove_file(self.path(step));
        }
        for step in self.place.steps("best-").into_iter().filter(|step| Some(*step) != best) {
            let _ = std::fs::remove_file(self.place.best_path(step));
        }
        Ok(())
    }
}

impl Drop for Checkpoints {
    fn drop(&mut self) {
        // What was begun is finished also when the run fails.
        let _ = self.wait();
    }
}

impl Place {
    fn path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("step-{step:010}.elapid"))
    }

    fn best_path(&self, step: u64) -> PathBuf {
        self.dir.join(format!("best-{step:010}.elapid"))
    }

    fn is_due(&self, step: u64) -> bool {
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

    /// Removes all but the newest, best weights of before `best_since`, and what an interrupted
    /// write left. Those a run may go back to are counted apart from those that an interruption
    /// left. What cannot be removed is in nobody's way.
    fn prune(&self, best_since: u64) {
        let steps = self.steps("step-");
        let due = steps.iter().filter(|step| self.is_due(**step)).take(N_KEPT);
        let kept: Vec<u64> = due.chain(steps.iter().take(N_KEPT)).copied().collect();
        for step in steps.iter().filter(|step| !kept.contains(step)) {
            let _ = std::fs::remove_file(self.path(*step));
        }
        for older in self.steps("best-").into_iter().filter(|older| *older < best_since) {
            let _ = std::fs::remove_file(self.best_path(older));
        }
        for entry in std::fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension == "part") {
                let _ = std::fs::remove_file(path);
            }
        }
    }

    fn newest_of(&self, steps: Vec<u64>, note: &mut dyn FnMut(String)) -> Done<Saved> {
        for step in &steps {
            match Saved::open(self.path(*step)) {
                Ok(saved) => return Ok(saved),
                Err(error) => note(Failure::from(error).to_string()),
            }
        }
        let problem = format!("{} contains no intact checkpoint", self.dir.display());
        Err(Failure::new(problem, "start a new run with another --out"))
    }
}
