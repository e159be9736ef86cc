//! How much of what was learned is kept.
//!
//! An adapted model is `base + s (trained - base)`, with a scale `s` of 1. Along this line the loss
//! of a text is nearly a parabola: it is measured at 0, 1/2 and 1. Held-out text that the verdict
//! does not use says where its loss is least; neutral text says how far `s` may go before it is
//! predicted worse than by the base by more than `LOSS_MAX`. The smaller of both is taken.

use crate::files;
use crate::proof::measure::{Subject, Time, bits_per_byte};
use crate::report::{Done, Failure};
use crate::run::{TRAINED, export_name};
use elapid::{Device, Document, Method, Model, Saved, Session};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The most that bits per byte of neutral text may rise.
const LOSS_MAX: f64 = 0.02;

/// The smallest scale, and by how much less is tried where a parabola said too much.
const SCALE_MIN: f64 = 0.1;
const SMALLER: f64 = 0.8;

/// The result of a run, which can be written again with another scale.
pub struct Outcome<'a> {
    pub base: &'a Path,
    pub run: &'a Path,
    pub method: &'a Method,
    /// Tokens that it was trained on at once.
    pub context: usize,
    pub n_threads: usize,
}

/// The scale that was taken, why it is not 1, and bits per byte of neutral text with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Guarded {
    pub scale: f64,
    pub why: Option<String>,
    pub neutral: Option<f64>,
}

/// Documents, and bits per byte of the base on them.
#[derive(Clone, Copy)]
pub struct On<'a> {
    pub documents: &'a [Document],
    pub before: f64,
}

/// The parabola through the values at 0, 1/2 and 1: `at_0 + slope s + bend s^2`.
struct Parabola {
    at_0: f64,
    slope: f64,
    bend: f64,
}

impl Parabola {
    fn through([at_0, at_half, at_1]: [f64; 3]) -> Parabola {
        let bend = 2.0 * (at_1 - 2.0 * at_half + at_0);
        Parabola { at_0, slope: at_1 - at_0 - bend, bend }
    }

    fn at(&self, s: f64) -> f64 {
        self.at_0 + (self.slope + self.bend * s) * s
    }

    /// Where it is least, from 0 to 1.
    fn least(&self) -> f64 {
        match self.bend > 0.0 {
            true => (-self.slope / (2.0 * self.bend)).clamp(0.0, 1.0),
            false if self.at(1.0) < self.at_0 => 1.0,
            false => 0.0,
        }
    }

    /// The largest scale up to 1 before which it stays within `most`, in hundredths.
    fn within(&self, most: f64) -> f64 {
        let n = (1..=100).take_while(|n| self.at(f64::from(*n) / 100.0) <= most).count();
        n as f64 / 100.0
    }
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

    /// Scales the result to what is best on the text that was set aside, or less where neutral
    /// text is predicted worse than before.
    pub fn guard(&self, neutral: Option<On>, aside: Option<On>) -> Done<Guarded> {
        let measure = |on: Option<On>| -> Done<Option<f64>> {
            let Some(On { documents, .. }) = on else { return Ok(None) };
            Ok(Some(bits_per_byte(&self.open()?.score(documents, Time::Any)?)))
        };
        let [neutral_1, aside_1] = [measure(neutral)?, measure(aside)?];
        let most = neutral.map_or(f64::INFINITY, |on| on.before * (1.0 + LOSS_MAX));
        if neutral_1.is_none_or(|bits| bits <= most) && aside.is_none() {
            return Ok(Guarded { scale: 1.0, why: None, neutral: neutral_1 });
        }
        self.rescale(0.5, 1.0)?;
        let parabola = |on: Option<On>, at_1: Option<f64>| -> Done<Option<Parabola>> {
            let (Some(On { before, .. }), Some(at_1)) = (on, at_1) else { return Ok(None) };
            let at_half = measure(on)?.unwrap_or(before);
            Ok(Some(Parabola::through([before, at_half, at_1])))
        };
        let [of_neutral, of_aside] = [parabola(neutral, neutral_1)?, parabola(aside, aside_1)?];
        let allowed = of_neutral.map_or(1.0, |it| it.within(most));
        let best = of_aside.map_or(1.0, |it| it.least());
        let mut scale = (100.0 * allowed.min(best)).round().max(100.0 * SCALE_MIN) / 100.0;
        let mut now = 0.5;
        let neutral = loop {
            self.rescale(scale, now)?;
            now = scale;
            let bits = if scale == 1.0 { neutral_1 } else { measure(neutral)? };
            if bits.is_none_or(|bits| bits <= most) || scale * SMALLER < SCALE_MIN {
                break bits;
            }
            scale *= SMALLER;
        };
        let why = match best <= allowed {
            true => "text that was set aside is predicted best so".into(),
            false => {
                let percent = 100.0 * LOSS_MAX;
                format!("beyond it neutral text is predicted worse by more than {percent}%")
            }
        };
        Ok(Guarded { scale, why: (scale != 1.0).then_some(why), neutral })
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
        let capture = training.capture(Extent::Weights, &json!({})).unwrap();
        files::make_directory(run).unwrap();
        capture.save(run.join(TRAINED)).unwrap();
        session.end(training);
        session.save(run.join(export_name(method))).unwrap();
    }

    #[test]
    fn a_parabola_says_where_it_is_least_and_how_far_it_stays_low() {
        let of = |f: fn(f64) -> f64| Parabola::through([f(0.0), f(0.5), f(1.0)]);
        let gain = of(|s| 1.0 - 0.4 * s + 0.25 * s * s);
        assert!((gain.least() - 0.8).abs() < 1e-12 && (gain.at(0.3) - 0.9025).abs() < 1e-12);
        assert_eq!([gain.within(2.0), of(|s| 1.0 + s * s).within(1.0401)], [1.0, 0.2]);
        // A text that only gets worse, and one that only gets better, bent or not.
        assert_eq!([of(|s| 1.0 + s).least(), of(|s| 1.0 + s - 0.1 * s * s).least()], [0.0, 0.0]);
        assert_eq!([of(|s| 1.0 - s).least(), of(|s| 1.0 - s + 0.1 * s * s).least()], [1.0, 1.0]);
        assert_eq!(of(|s| 1.0 + s).within(1.0), 0.0);
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
        let of_aside = bits(Subject::open(&base, None, 2), &aside);
        for method in [Method::Full, Method::Lora(LoraSettings::default())] {
            let run = dir.join(method.to_string());
            train(Session::open(&base, &device).unwrap(), &method, &own, &run);
            let result =
                Outcome { base: &base, run: &run, method: &method, context: 64, n_threads: 2 };
            let full = bits(result.open(), &neutral);
            assert!(full > before * (1.0 + LOSS_MAX), "{method}: {before} {full}");
            let on = |documents, before| Some(On { documents, before });
            let guarded = result.guard(on(&neutral, before), on(&aside, of_aside)).unwrap();
            assert!(guarded.scale < 1.0, "{method}: {guarded:?}");
            // The files have the scale.
            let after = bits(result.open(), &neutral);
            assert!(
                (after - guarded.neutral.unwrap()).abs() < 1e-4,
                "{method}: {after} {guarded:?}"
            );
            assert!(after < full, "{method}: {before} {full} {after}");
            let holds = after <= before * (1.0 + LOSS_MAX);
            let is_least = guarded.scale * SMALLER < SCALE_MIN;
            assert!(holds || is_least, "{method}: {before} {after} {guarded:?}");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
