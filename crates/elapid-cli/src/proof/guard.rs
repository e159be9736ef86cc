//! What a model lost of its general ability, and how far it is taken back for that.
//!
//! An adapted model is `base + s (trained - base)` with a scale `s` of 1. Where it is worse than
//! the base on neutral text by more than `LOSS_MAX`, smaller scales are tried. Of those that stay
//! within the limit the one is taken that is best on held-out text which the verdict does not use;
//! without such text the largest.

use crate::files;
use crate::proof::measure::{Subject, Time, bits_per_byte};
use crate::report::{Done, Failure};
use crate::run::{TRAINED, export_name};
use elapid::{Device, Document, Method, Model, Saved, Session};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The most that bits per byte of neutral text may rise.
pub const LOSS_MAX: f64 = 0.02;

const SCALES: [f64; 6] = [1.0, 0.85, 0.7, 0.5, 0.35, 0.25];

/// The result of a run, which can be written again with another scale.
pub struct Outcome<'a> {
    pub base: &'a Path,
    pub run: &'a Path,
    pub method: &'a Method,
    /// Tokens that it was trained on at once.
    pub context: usize,
    pub n_threads: usize,
}

/// The scale that was taken, and bits per byte of neutral text with it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guarded {
    pub scale: f64,
    pub neutral: Option<f64>,
}

impl Outcome<'_> {
    /// Where it lies.
    pub fn place(&self) -> PathBuf {
        self.run.join(export_name(self.method))
    }

    fn is_adapter(&self) -> bool {
        export_name(self.method) == "adapter"
    }

    pub fn open(&self) -> Done<Subject> {
        match self.is_adapter() {
            true => Subject::open(self.base, Some(&self.place()), self.n_threads),
            false => Subject::open(&self.place(), None, self.n_threads),
        }
    }

    /// Writes it with a scale in place of `now`: into the alpha of an adapter, or the weights.
    fn rescale(&self, scale: f64, now: f64) -> Done<()> {
        if self.is_adapter() {
            return scale_adapter(&self.place().join("adapter_config.json"), scale / now);
        }
        let device = Device::cpu(self.n_threads)?;
        let opened = Model::open(self.base)?.with_context(self.context)?;
        let mut session = Session::new(opened, &device)?;
        // Toward the base, also where the run began at the result of an earlier one.
        session.adapt(self.method, None, 0)?;
        session.restore(&Saved::open(self.run.join(TRAINED))?, scale as f32)?;
        session.save(self.place())?;
        Ok(())
    }

    /// Scales the result down until neutral text is predicted nearly as well as `before`.
    pub fn guard(&self, neutral: &[Document], before: f64, aside: &[Document]) -> Done<Guarded> {
        if neutral.is_empty() {
            return Ok(Guarded { scale: 1.0, neutral: None });
        }
        let (mut now, mut tried) = (1.0, Vec::new());
        for scale in SCALES {
            if scale != now {
                self.rescale(scale, now)?;
                now = scale;
            }
            let mut subject = self.open()?;
            let bits = bits_per_byte(&subject.score(neutral, Time::Any)?);
            let holds = bits <= before * (1.0 + LOSS_MAX);
            if scale == 1.0 && holds {
                return Ok(Guarded { scale, neutral: Some(bits) });
            }
            let on_aside = match holds && !aside.is_empty() {
                true => bits_per_byte(&subject.score(aside, Time::Any)?),
                false => 0.0,
            };
            tried.push((scale, bits, holds, on_aside));
        }
        let held = tried.iter().filter(|one| one.2);
        // Of equals the first, which is the largest.
        let best = held.reduce(|best, one| if one.3 < best.3 { one } else { best });
        let (scale, bits, ..) = *best.or(tried.last()).unwrap_or(&(now, before, true, 0.0));
        self.rescale(scale, now)?;
        Ok(Guarded { scale, neutral: Some(bits) })
    }
}

/// Multiplies every alpha of an adapter.
fn scale_adapter(path: &Path, factor: f64) -> Done<()> {
    let broken = |error: &dyn std::fmt::Display| {
        Failure::new(format!("{}: {error}", path.display()), "this is a bug in Elapid")
    };
    let text = files::read_text(path)?;
    let mut config: Value = serde_json::from_str(&text).map_err(|error| broken(&error))?;
    let scale = |alpha: &mut Value| {
        let scaled = alpha.as_f64().map(|alpha| alpha * factor);
        *alpha = serde_json::json!(scaled);
    };
    scale(config.get_mut("lora_alpha").ok_or_else(|| broken(&"it has no lora_alpha"))?);
    if let Some(patterns) = config.get_mut("alpha_pattern").and_then(Value::as_object_mut) {
        patterns.values_mut().for_each(scale);
    }
    Ok(files::write_bytes(path, config.to_string().as_bytes())?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use elapid::{Arch, Batches, Extent, LoraSettings, Settings, Size};
    use serde_json::json;

    fn code(name: &str) -> String {
        let line = |n: usize| format!("let {name}_{n} = {name}({});\n", n * 7 % 10);
        (0..30).map(line).collect()
    }

    /// Trains on a text; what came of it is in `run`.
    fn train(mut session: Session, method: &Method, text: &str, run: &Path) {
        session.adapt(method, None, 0).unwrap();
        let settings = Settings { n_steps: 16, lr: 2e-2, n_warmup: 2, ..Settings::default() };
        let batches = Batches { context: 64, n_rows: 2, ..Batches::default() };
        let documents = [Document::whole("t.rs", text)];
        let mut training = session.begin(&documents, &batches, &settings).unwrap();
        while !training.is_done() {
            training.step().unwrap();
        }
        let capture = training.capture(Extent::Weights, &json!({}));
        files::make_directory(run).unwrap();
        capture.save(run.join(TRAINED)).unwrap();
        session.end(training);
        session.save(run.join(export_name(method))).unwrap();
    }

    #[test]
    fn what_forgets_neutral_text_is_taken_back_until_it_does_not() {
        let dir = std::env::temp_dir().join(format!("elapid-guard-{}", std::process::id()));
        let device = Device::cpu(2).unwrap();
        let (neutral, own) = (code("neutral"), code("own"));
        let all = [&*neutral, &*own].concat();
        let session = Session::scratch(Size::Tiny, Arch::Llama, &all, &device).unwrap();
        train(session, &Method::Full, &neutral, &dir);
        let base = dir.join("model");
        let neutral = [Document::whole("n.rs", neutral)];
        let aside = [Document::whole("o.rs", &*own)];
        let bits = |subject: Done<Subject>, on: &[Document]| {
            bits_per_byte(&subject.unwrap().score(on, Time::Any).unwrap())
        };
        let before = bits(Subject::open(&base, None, 2), &neutral);
        for method in [Method::Full, Method::Lora(LoraSettings::default())] {
            let run = dir.join(method.to_string());
            train(Session::open(&base, &device).unwrap(), &method, &own, &run);
            let result =
                Outcome { base: &base, run: &run, method: &method, context: 64, n_threads: 2 };
            let full = bits(result.open(), &neutral);
            assert!(full > before * (1.0 + LOSS_MAX), "{method}: {before} {full}");
            let guarded = result.guard(&neutral, before, &aside).unwrap();
            assert!(guarded.scale < 1.0, "{method}: {guarded:?}");
            // The files have the scale.
            let after = bits(result.open(), &neutral);
            assert!(
                (after - guarded.neutral.unwrap()).abs() < 1e-4,
                "{method}: {after} {guarded:?}"
            );
            assert!(after < full, "{method}: {before} {full} {after}");
            let holds = after <= before * (1.0 + LOSS_MAX);
            assert!(holds || guarded.scale == 0.25, "{method}: {before} {after} {guarded:?}");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
