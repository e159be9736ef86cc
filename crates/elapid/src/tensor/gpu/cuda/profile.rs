//! Time of kernels: an event before and one behind each of them.

use super::context::{Context, driver_has};
use crate::tensor::gpu::profile::{KernelTime, Sums, listed};
use cudarc::driver::{CudaEvent, result, sys};
use std::sync::Arc;

use result::DriverError;

/// Launches whose events wait to be read.
const N_WAITING_MAX: usize = 4096;

pub(super) struct Profile {
    /// Name, first event, second event.
    waiting: Vec<(String, CudaEvent, CudaEvent)>,
    sums: Sums,
    context: Arc<Context>,
}

impl Profile {
    pub(super) fn new(context: Arc<Context>) -> Profile {
        Profile { waiting: Vec::new(), sums: Sums::new(), context }
    }

    /// Does `start` between two events.
    pub(super) fn measure(
        &mut self,
        name: String,
        start: impl FnOnce(),
    ) -> Result<(), DriverError> {
        let event = || self.context.stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT));
        let first = event()?;
        start();
        let second = event()?;
        self.waiting.push((name, first, second));
        if self.waiting.len() < N_WAITING_MAX { Ok(()) } else { self.collect() }
    }

    /// Waits, and adds up.
    fn collect(&mut self) -> Result<(), DriverError> {
        // Younger than the drivers we take: without it there are counts and no times.
        let tells_times = driver_has("cuEventElapsedTime_v2");
        for (name, first, second) in self.waiting.drain(..) {
            let ms = if tells_times { first.elapsed_ms(&second)? } else { 0.0 };
            let sum = self.sums.entry(name).or_default();
            *sum = (sum.0 + 1, sum.1 + f64::from(ms));
        }
        Ok(())
    }

    /// By name, the longest first.
    pub(super) fn finish(mut self) -> Result<Vec<KernelTime>, DriverError> {
        self.collect()?;
        Ok(listed(self.sums))
    }
}
