//! Train a small model from scratch on a text, save it, resume the training.

#[allow(dead_code)] // not every example uses all of it
mod tiny;

use elapid::{
    Arch, Batches, Device, Document, Extent, Outcome, Result, Saved, Session, Settings, Size,
};

/// Runs it.
pub fn main() -> Result<()> {
    let text = tiny::TEXT.repeat(20);
    let device = Device::cpu(2)?;
    let documents = [Document::whole("math.rs", text.as_str())];
    let batches = Batches { context: 64, n_rows: 2, ..Batches::default() };
    let settings = Settings { n_steps: 8, lr: 3e-3, ..Settings::default() };

    let mut session = Session::scratch(Size::Tiny, Arch::Mamba2, &text, &device)?;
    let mut training = session.begin(&documents, &batches, &settings)?;
    let checkpoint = tiny::folder("train").with_extension("elapid");
    while !training.is_done() {
        match training.step()? {
            Outcome::Made { report, .. } => println!("loss {:.4}", report.loss),
            Outcome::Diverged(why) => println!("took nothing of this step: {why}"),
        }
        if training.progress().step == 4 {
            training.capture(Extent::Run, &serde_json::Value::Null)?.save(&checkpoint)?;
        }
    }
    session.end(training);
    session.save(tiny::folder("trained"))?; // for transformers; `model.gguf` for llama.cpp

    // Another process goes back to step 4 and makes the same four steps, to the bit.
    let mut again = Session::scratch(Size::Tiny, Arch::Mamba2, &text, &device)?;
    let mut training = again.begin(&documents, &batches, &settings)?;
    Saved::open(&checkpoint)?.restore(&mut training)?;
    while !training.is_done() {
        training.step()?;
    }
    again.end(training);
    assert_eq!(again.embed("fn add(")?, session.embed("fn add(")?);
    Ok(())
}
