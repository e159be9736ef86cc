//! A training that Python drives step by step.

use crate::{overlaid, read};
use elapid::{
    Batches, DocScore, Document, Encoded, Ends, EvalSettings, LoraSettings, Method, Outcome,
    Settings, Special, Tokenizer, Training,
};
use serde::Deserialize;
use std::path::PathBuf;

/// A training, until its weights are taken back.
pub struct Run {
    pub training: Training,
}

/// Number of the step, loss, gradient norm, learning rate, tokens so far.
pub type Step = (u64, f32, f64, f64, u64);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rows {
    context: usize,
    rows: usize,
    fim: f64,
    seed: u64,
}

/// What is trained, by its name; `lora` is a JSON object.
pub fn method(name: &str, lora: &str) -> elapid::Result<Method> {
    match name {
        "full" => Ok(Method::Full),
        "lora" => Ok(Method::Lora(overlaid(&LoraSettings::default(), lora)?)),
        "bc" => Ok(Method::Bc),
        "embeddings" => Ok(Method::Embeddings),
        _ => Err(elapid::Error::input(
            format!("there is no method `{name}`"),
            "there are full, lora, bc, embeddings",
        )),
    }
}

/// The training that there is.
pub fn running(run: &mut Option<Run>) -> elapid::Result<&mut Run> {
    let problem = "this training was closed";
    run.as_mut().ok_or_else(|| elapid::Error::input(problem, "make another Trainer"))
}

impl Run {
    pub fn begin(
        session: &mut elapid::Session,
        documents: &[Document],
        batches: &str,
        settings: &str,
    ) -> elapid::Result<Run> {
        let Rows { context, rows, fim, seed } = read(batches)?;
        let batches = Batches { context, n_rows: rows, fim, seed, ..Batches::default() };
        let settings = overlaid(&Settings::default(), settings)?;
        Ok(Run { training: session.begin(documents, &batches, &settings)? })
    }

    /// The next step, or none where all are made. One that diverges changes nothing.
    pub fn step(&mut self) -> elapid::Result<Option<Step>> {
        if self.training.is_done() {
            return Ok(None);
        }
        let lr = self.training.lr();
        match self.training.step()? {
            Outcome::Made { report, .. } => {
                let progress = self.training.progress();
                Ok(Some((progress.step, report.loss, report.grad_norm, lr, progress.n_tok)))
            }
            Outcome::Diverged(why) => {
                Err(elapid::Error::input(why, "use a smaller learning rate, or `spike=None`"))
            }
        }
    }

    pub fn resume(&mut self, path: PathBuf) -> elapid::Result<u64> {
        elapid::Saved::open(path)?.restore(&mut self.training)?;
        Ok(self.training.progress().step)
    }

    pub fn save(&self, path: PathBuf) -> elapid::Result<()> {
        self.training.capture(elapid::Extent::Run, &serde_json::Value::Null)?.save(path)
    }

    /// How well the model predicts these texts as it is now.
    pub fn score(
        &self,
        documents: &[Document],
        tokenizer: &Tokenizer,
        settings: &EvalSettings,
    ) -> elapid::Result<Vec<DocScore>> {
        let begin = Ends::of(tokenizer).begin;
        let encode = |document: &Document| -> elapid::Result<Encoded> {
            let text = document.text();
            let mut ids: Vec<u32> = begin.into_iter().collect();
            ids.extend(tokenizer.encode(&text, Special::Plain)?);
            // The first token is predicted from nothing.
            let learned = (0..ids.len()).map(|at| at > 0).collect();
            let (name, language) = (document.name.clone(), document.language);
            Ok(Encoded { name, language, n_bytes: text.len(), ids, learned })
        };
        let encoded = documents.iter().map(encode).collect::<elapid::Result<Vec<_>>>()?;
        self.training.score(&encoded, settings)
    }
}
