//! Adapt a model with LoRA, write the adapter for PEFT and llama.cpp, and use it.

#[allow(dead_code)] // not every example uses all of it
mod tiny;

use elapid::{Batches, Device, LoraSettings, Method, Result, Session, Settings};
use std::ops::ControlFlow;

/// Runs it.
pub fn main() -> Result<()> {
    let (base, adapter) = (tiny::folder("base"), tiny::folder("adapter"));
    tiny::session(4)?.save(&base)?;

    let mut session = Session::open(&base, &Device::cpu(2)?)?;
    let lora = LoraSettings { rank: 4, alpha: 8.0, ..LoraSettings::default() };
    println!("{}", session.adapt(&Method::Lora(lora), None, 0)?);
    let batches = Batches { context: 64, n_rows: 2, ..Batches::default() };
    let settings = Settings { n_steps: 4, lr: 1e-3, spike: None, ..Settings::default() };
    session.train(&tiny::TEXT.repeat(20), &batches, &settings, |step, loss| {
        println!("step {step} loss {loss:.4}");
        ControlFlow::Continue(())
    })?;
    session.save(&adapter)?; // a PEFT directory; a name that ends in .gguf is for llama.cpp

    let mut session = Session::open(&base, &Device::cpu(2)?)?;
    session.generator()?.add_adapter(&adapter, 1.0)?;
    println!("{}", session.generate("fn add(")?);
    Ok(())
}
