//! Open a model and continue a text: `cargo run --release --example generate model.gguf`.

#[allow(dead_code)] // not every example uses all of it
mod tiny;

use elapid::{Device, Result, Session};

/// Runs it.
pub fn main() -> Result<()> {
    let path = std::env::args().nth(1).filter(|path| std::path::Path::new(path).exists());
    let mut session = match path {
        Some(path) => Session::open(path, &Device::cpu(2)?)?,
        None => tiny::session(10)?,
    };
    println!("{}", session.generate("fn add(")?);

    // The same with settings, token by token.
    let request = session.request("fn sub(")?.max_tokens(16).temperature(0.0).stop("}");
    for token in session.tokens(request)? {
        let token = token?;
        println!("{:>6} {:?}", token.id, token.text);
    }
    Ok(())
}
