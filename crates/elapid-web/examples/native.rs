//! What the tests of the package compare with: the same run and the same answers by the engine as
//! a program of its own, as JSON. `native MODEL.gguf TEXT`.

#[cfg(not(target_family = "wasm"))]
fn main() -> elapid::Result<()> {
    use elapid::{
        Arch, Batches, Device, Document, Method, Model, Outcome, Session, Settings, Shape, Size,
        Vocabulary,
    };
    let mut paths = std::env::args().skip(1);
    let (model, text) = (paths.next().unwrap_or_default(), paths.next().unwrap_or_default());
    let text = elapid::read_text(std::path::Path::new(&text))?;
    let device = Device::cpu(1)?;
    let mut runs = serde_json::Map::new();
    for arch in [Arch::Hybrid, Arch::Llama] {
        let shape = Shape { size: Size::Tiny, arch, context: 64 };
        let mut texts = std::iter::once(text.as_str());
        let made = Model::scratch(shape, Vocabulary::New(512, &mut texts))?;
        let mut session = Session::new(made, &device)?;
        session.adapt(&Method::Full, None, 7)?;
        let batches = Batches { context: 32, n_rows: 2, seed: 7, ..Batches::default() };
        let settings = Settings { n_steps: 20, n_warmup: 1, seed: 7, ..Settings::default() };
        let documents = [Document::whole("text 1", text.as_str())];
        let mut training = session.begin(&documents, &batches, &settings)?;
        let mut losses = Vec::new();
        while let (false, Outcome::Made { report, .. }) = (training.is_done(), training.step()?) {
            losses.push(report.loss);
            if training.is_done() {
                break;
            }
        }
        session.end(training);
        runs.insert(arch.to_string(), losses.into());
    }
    let mut session = Session::open(model, &device)?;
    let mut answers = Vec::new();
    for prompt in ["fn main() {\n", "def add(a, b):\n    return"] {
        let request = session.request(prompt)?.max_tokens(24).temperature(0.0);
        let tokens = session.tokens(request)?.collect::<elapid::Result<Vec<_>>>()?;
        answers.push(tokens.iter().map(|token| token.id).collect::<Vec<_>>());
    }
    println!("{}", serde_json::json!({ "losses": runs, "answers": answers }));
    Ok(())
}

/// Only a program of its own has something to compare with.
#[cfg(target_family = "wasm")]
fn main() {}
