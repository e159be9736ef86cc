//! Embeddings, and the nearest neighbour of a text among others.

#[allow(dead_code)] // not every example uses all of it
mod tiny;

use elapid::Result;

fn similarity(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum() // vectors have length one
}

/// Runs it.
pub fn main() -> Result<()> {
    let mut session = tiny::session(10)?;
    let texts = ["fn add(a: i32, b: i32)", "fn sub(a: i32, b: i32)", "}\n\n"];
    let vectors = texts.map(|text| session.embed(text));
    let query = session.embed("fn add(x: i32, y: i32)")?;
    let mut ranked = Vec::new();
    for (text, vector) in texts.iter().zip(vectors) {
        ranked.push((similarity(&query, &vector?), text));
    }
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (similarity, text) in ranked {
        println!("{similarity:.3} {text:?}");
    }
    Ok(())
}
