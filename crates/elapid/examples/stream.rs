//! Print an answer while it is made, and stop it early.

#[allow(dead_code)] // not every example uses all of it
mod tiny;

use elapid::Result;
use std::ops::ControlFlow;

/// Runs it.
pub fn main() -> Result<()> {
    let mut session = tiny::session(10)?;
    let mut n_pieces = 0;
    session.stream("fn add(", |text| {
        print!("{text}");
        n_pieces += 1;
        if n_pieces < 32 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    println!();

    // A prompt that is read once and continued twice.
    let snapshot = session.snapshot("fn add(a: i32, ")?;
    for more in ["b: i32)", "c: i32)"] {
        let request = session.fork(&snapshot, more)?.max_tokens(8).temperature(0.0);
        println!("{more} {}", session.tokens(request)?.text()?);
    }
    Ok(())
}
