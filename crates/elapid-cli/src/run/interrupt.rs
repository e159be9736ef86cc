//! Ctrl-C in a run.

use std::sync::atomic::{AtomicU32, Ordering};

/// How often Ctrl-C was pressed.
static N_INTERRUPTS: AtomicU32 = AtomicU32::new(0);

/// The first Ctrl-C asks the run to save and end, the second ends the process.
pub fn listen() {
    // A handler may be there already; then it is ours.
    let _ = ctrlc::set_handler(|| {
        if N_INTERRUPTS.fetch_add(1, Ordering::SeqCst) > 0 {
            std::process::exit(130);
        }
        eprintln!("\nstopping  finishing this step and saving; press Ctrl-C again to stop at once");
    });
}

pub fn is_interrupted() -> bool {
    N_INTERRUPTS.load(Ordering::SeqCst) > 0
}
