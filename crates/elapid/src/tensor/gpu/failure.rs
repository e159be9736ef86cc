//! What went wrong on a GPU, until somebody asks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a failure means for the work after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// There is no memory for this; for less there may be.
    Memory,
    /// This cannot be done.
    Refused,
    /// Nothing can be done any more.
    Lost,
}

/// The first thing that went wrong since the last `check`, and the loss of the device for good.
#[derive(Clone, Default)]
pub(crate) struct Failure(Arc<Kept>);

#[derive(Default)]
struct Kept {
    problem: Mutex<Option<(Fault, String)>>,
    /// Whether there is one: every launch asks.
    is_set: AtomicBool,
}

impl Failure {
    fn lock(&self) -> MutexGuard<'_, Option<(Fault, String)>> {
        self.0.problem.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, problem: String) {
        self.set_as(Fault::Refused, problem);
    }

    pub(crate) fn set_as(&self, fault: Fault, problem: String) {
        let mut kept = self.lock();
        match &mut *kept {
            Some(first) if fault == Fault::Lost => first.0 = Fault::Lost,
            Some(_) => {}
            None => *kept = Some((fault, problem)),
        }
        self.0.is_set.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.is_set.load(Ordering::SeqCst)
    }

    /// Forgets what went wrong with something that was only tried.
    pub(crate) fn clear(&self) {
        self.lock().take();
        self.0.is_set.store(false, Ordering::SeqCst);
    }

    /// What went wrong; it is over then, unless the device is lost.
    pub(super) fn take(&self) -> Option<(Fault, String)> {
        let problem = self.lock().clone();
        if !matches!(problem, Some((Fault::Lost, _))) {
            self.clear();
        }
        problem
    }
}
