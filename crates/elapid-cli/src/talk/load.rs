//! From flags to a model that is ready to answer.

use crate::compute::Compute;
use crate::report::Done;
use elapid::Model;
use elapid::{DateTime, Message};
use elapid::{Generator, GeneratorSettings};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// How a model is to be loaded.
#[derive(Clone, Debug, Default)]
pub struct LoadSettings {
    /// Device and threads.
    pub compute: Compute,
    /// No more than this context where no flag says.
    pub context_max: Option<usize>,
    /// Slots, caches, context.
    pub generator: GeneratorSettings,
    /// Adapters to load.
    pub adapters: Vec<AdapterPath>,
}

/// Opens a model and makes it ready.
pub fn load(path: &Path, settings: &LoadSettings) -> Done<Generator> {
    let model = Model::open(path)?;
    let device = settings.compute.open()?;
    let mut of_engine = settings.generator.clone();
    if let (None, Some(most)) = (of_engine.context, settings.context_max) {
        of_engine.context = Some(model.info()?.n_ctx.map_or(most, |n| n.min(most)));
    }
    let mut generator = Generator::new(Arc::new(model), &device, &of_engine)?;
    for AdapterPath { path, scale } in &settings.adapters {
        generator.add_adapter(path, *scale)?;
    }
    Ok(generator)
}

/// The prompt of these messages at this time: templates print the date.
pub fn chat_prompt(generator: &Generator, messages: &[Message]) -> Done<Vec<u32>> {
    let chat = generator.chat()?;
    let options = elapid::ChatOptions { now: Some(now()), ..chat.options.clone() };
    let text = chat.template.render(messages, &options)?;
    Ok(generator.engine.tokenizer().encode(&text, elapid::Special::Parse)?)
}

/// An adapter on disk, and how strongly it is to act: `PATH` or `PATH=SCALE`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterPath {
    /// A PEFT directory, a GGUF adapter, or a run.
    pub path: PathBuf,
    /// Factor of its scale.
    pub scale: f32,
}

impl FromStr for AdapterPath {
    type Err = String;

    fn from_str(text: &str) -> Result<AdapterPath, String> {
        let plain = |path: &str| AdapterPath { path: PathBuf::from(path), scale: 1.0 };
        // A path may hold an equals sign of its own.
        if Path::new(text).exists() {
            return Ok(plain(text));
        }
        match text.rsplit_once('=') {
            None => Ok(plain(text)),
            Some((path, scale)) => match scale.parse::<f32>() {
                Ok(scale) if scale.is_finite() => Ok(AdapterPath { scale, ..plain(path) }),
                _ => Err(format!("`{scale}` is no scale; write PATH or PATH=0.5")),
            },
        }
    }
}

/// The time, in UTC: templates print the date.
pub fn now() -> DateTime {
    jiff::tz::Offset::UTC.to_datetime(jiff::Timestamp::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_follows_the_path_of_an_adapter() {
        let parse = |text: &str| text.parse::<AdapterPath>();
        let path = |path: &str, scale| Ok(AdapterPath { path: path.into(), scale });
        assert_eq!(parse("runs/a1"), path("runs/a1", 1.0));
        assert_eq!(parse("runs/a=1/a1=0.25"), path("runs/a=1/a1", 0.25));
        assert!(parse("runs/a1=much").unwrap_err().contains("`much` is no scale"));
        assert!(parse("runs/a1=inf").is_err());
    }
}
