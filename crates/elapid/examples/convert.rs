//! Convert a model to GGUF, quantise it, and see how far it is from the original.

#[allow(dead_code)] // not every example uses all of it
mod tiny;

use elapid::{Device, Form, Model, Result};

/// Runs it.
pub fn main() -> Result<()> {
    let (model, out) = (tiny::folder("convert"), tiny::folder("converted"));
    tiny::session(10)?.save(&model)?;
    let model = Model::open(&model)?;
    for (name, mix) in [("model.gguf", None), ("small.gguf", Some("q8_0".parse()?))] {
        std::fs::create_dir_all(&out).expect("a folder for the result");
        let path = out.join(name);
        let done = model.convert(&path, Form::Gguf, mix, &Device::cpu(2)?, &mut |_, _| {})?;
        println!("{name}: {} bytes, {}", done.n_bytes, done.verdict);
    }
    println!("{:#?}", Model::open(out.join("small.gguf"))?.info()?);
    Ok(())
}
