//! Is a model better than another? Bits per byte on held-out documents, with an interval.

#[allow(dead_code)] // not every example uses all of it
mod tiny;

use elapid::{Document, EvalSettings, Result, Summary, compare};

/// Runs it.
pub fn main() -> Result<()> {
    let held_out: Vec<Document> = (0..6)
        .map(|n| {
            let text = format!("fn mul{n}(a: i32, b: i32) -> i32 {{\n    a * b + {n}\n}}\n");
            Document::whole(format!("mul{n}.rs"), text)
        })
        .collect();
    let settings = EvalSettings::new(64);
    let before = tiny::session(1)?.score(&held_out, &settings, &mut |_, _| {})?;
    let after = tiny::session(30)?.score(&held_out, &settings, &mut |_, _| {})?;
    let found = compare(&after, &before)?;
    println!("{:.3} bits per byte", Summary::of(&after)?.total.bits_per_byte());
    println!("{}", found.describe("before"));
    Ok(())
}
