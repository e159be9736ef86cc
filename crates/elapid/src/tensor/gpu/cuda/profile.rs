//! Time of kernels: an event before and one behind each of them.

use super::context::{Context, driver_has};
use crate::tensor::gpu::profile::{KernelTime, Sums, listed};
use cudarc::driver::{result, sys};
use std::sync::Arc;

use result::DriverError;

/// Launches whose events wait to be read.
const N_WAITING_MAX: usize = 4096;

pub(super) struct Profile {
    /// Name, first event, second event.
    waiting: Vec<(String, Event, Event)>,
    spare: Vec<Event>,
    sums: Sums,
    context: Arc<Context>,
}

/// An event, destroyed when dropped.
struct Event {
    handle: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Event {}

impl Drop for Event {
    fn drop(&mut self) {
        self.context.enter();
        // SAFETY: it is ours and destroyed once.
        let _ = unsafe { result::event::destroy(self.handle) };
    }
}

impl Profile {
    pub(super) fn new(context: Arc<Context>) -> Profile {
        Profile { waiting: Vec::new(), spare: Vec::new(), sums: Sums::new(), context }
    }

    /// Does `start` between two events.
    pub(super) fn measure(
        &mut self,
        name: String,
        start: impl FnOnce(),
    ) -> Result<(), DriverError> {
        let first = self.event()?;
        start();
        let second = self.event()?;
        self.waiting.push((name, first, second));
        if self.waiting.len() < N_WAITING_MAX { Ok(()) } else { self.collect() }
    }

    /// An event that has been put on the stream.
    fn event(&mut self) -> Result<Event, DriverError> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => Event {
                handle: result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?,
                context: self.context.clone(),
            },
        };
        // SAFETY: the event and the stream live.
        unsafe { result::event::record(event.handle, self.context.stream) }?;
        Ok(event)
    }

    /// Waits, and adds up.
    fn collect(&mut self) -> Result<(), DriverError> {
        // SAFETY: the stream is ours.
        unsafe { result::stream::synchronize(self.context.stream) }?;
        for (name, first, second) in self.waiting.drain(..) {
            // Younger than the drivers we take: without it there are counts and no times.
            let ms = if driver_has("cuEventElapsedTime_v2") {
                // SAFETY: both were put on the stream, which was waited for.
                unsafe { result::event::elapsed(first.handle, second.handle) }?
            } else {
                0.0
            };
            let sum = self.sums.entry(name).or_default();
            *sum = (sum.0 + 1, sum.1 + f64::from(ms));
            self.spare.extend([first, second]);
        }
        Ok(())
    }

    /// By name, the longest first.
    pub(super) fn finish(mut self) -> Result<Vec<KernelTime>, DriverError> {
        self.context.enter();
        self.collect()?;
        Ok(listed(std::mem::take(&mut self.sums)))
    }
}
