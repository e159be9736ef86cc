//! Named moments at which a test makes something happen: a failure, a panic, a pause.
//!
//! A program installs what happens (`install`); the engine says where it is (`hit`). Without debug
//! assertions `hit` is nothing.

use crate::error::Result;
use std::sync::OnceLock;

/// What happens at the moment of this name.
pub type Hook = fn(&str) -> Result<()>;

static HOOK: OnceLock<Hook> = OnceLock::new();

/// Installs what happens; the first call counts.
pub fn install(hook: Hook) {
    HOOK.get_or_init(|| hook);
}

/// The moment of this name has come.
pub fn hit(name: &str) -> Result<()> {
    match HOOK.get() {
        Some(hook) if cfg!(debug_assertions) => hook(name),
        _ => Ok(()),
    }
}
