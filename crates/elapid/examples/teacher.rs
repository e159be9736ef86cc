//! Distillation: a new model learns the token probabilities of another one beside a text.

#[allow(dead_code)] // not every example uses all of it
mod tiny;

use elapid::{Arch, Batches, Device, Document, Model, Outcome, Result, Session, Settings, Shape};
use elapid::{Size, Vocabulary};
use std::ops::ControlFlow;

/// Runs it.
pub fn main() -> Result<()> {
    let text = tiny::TEXT.repeat(20);
    let device = Device::cpu(2)?;
    let batches = Batches { context: 64, n_rows: 2, ..Batches::default() };
    let settings = Settings { n_steps: 8, lr: 3e-3, ..Settings::default() };
    let folder = tiny::folder("teacher");
    let mut teacher = Session::scratch(Size::Tiny, Arch::Llama, &text, &device)?;
    teacher.train(&text, &batches, &settings, |_, _| ControlFlow::Continue(()))?;
    teacher.save(&folder)?;

    let teacher = Model::open(&folder)?;
    let shape = Shape { size: Size::Tiny, arch: Arch::Mamba2, context: 64 };
    let mut student = Session::new(Model::scratch(shape, Vocabulary::Of(&teacher))?, &device)?;
    let documents = [Document::whole("math.rs", text.as_str())];
    // 0.7 of the loss follows the teacher, at a temperature of 2.
    let settings = Settings { teacher_share: 0.7, teacher_temperature: 2.0, ..settings };
    let mut training = student.begin(&documents, &batches, &settings)?;
    training.set_teacher(&teacher)?;
    while !training.is_done() {
        if let Outcome::Made { report, .. } = training.step()? {
            let divergence = report.divergence.unwrap_or_default();
            println!("loss {:.4}, {divergence:.4} from the teacher", report.loss);
        }
    }
    student.end(training);
    println!("{}", student.generate("fn add(")?);
    Ok(())
}
