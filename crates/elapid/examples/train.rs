//! A model from nothing that learns a string and goes on with it: `cargo run --release -p elapid
//! --example train`.

use elapid::generate::sample::Sampling;
use elapid::model::config::preset::{Arch, Size};
use elapid::session::Session;
use elapid::tensor::device::Device;
use elapid::train::Settings;
use std::ops::ControlFlow;

fn main() -> Result<(), elapid::error::Error> {
    let text = include_str!("train.rs").repeat(8);
    let device = Device::cpu(2)?;

    let mut session = Session::scratch(&device, Size::Tiny, Arch::Hybrid, &text)?;
    let settings = Settings { n_steps: 60, lr: 3e-3, ..Settings::default() };
    session.train(&text, 4, &settings, |step, loss| {
        if step % 10 == 0 {
            println!("step    {step}  loss {loss:.4}");
        }
        ControlFlow::Continue(())
    })?;

    println!("{:.3} bits per byte", session.measure(&text)?.bits_per_byte());
    println!("use elapid::{}", session.complete("use elapid::", 40, Sampling::greedy())?);
    Ok(())
}
