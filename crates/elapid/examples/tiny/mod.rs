//! A model of some thousand parameters for the other examples, made in a second.

use elapid::{Arch, Batches, Device, Result, Session, Settings, Size};
use std::ops::ControlFlow;

/// What it learns.
pub const TEXT: &str = "fn add(a: i32, b: i32) -> i32 {\n    a + b\n}\n\n\
    fn sub(a: i32, b: i32) -> i32 {\n    a - b\n}\n\n";

/// A new model after `n_steps` steps on `TEXT`.
pub fn session(n_steps: u64) -> Result<Session> {
    let text = TEXT.repeat(20);
    let device = Device::cpu(2)?;
    let mut session = Session::scratch(Size::Tiny, Arch::Hybrid, &text, &device)?;
    let settings = Settings { n_steps, lr: 3e-3, spike: None, ..Settings::default() };
    let batches = Batches { context: 64, n_rows: 2, ..Batches::default() };
    session.train(&text, &batches, &settings, |_, _| ControlFlow::Continue(()))?;
    Ok(session)
}

/// A directory for what an example writes.
pub fn folder(name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("elapid-example-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    dir
}
