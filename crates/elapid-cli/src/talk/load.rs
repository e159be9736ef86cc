//! From flags to a model that is ready to answer.

use super::flags::finite;
use crate::compute::Compute;
use crate::report::Done;
use elapid::{ChatOptions, DateTime, Generator, GeneratorSettings, Message, Model, Special};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// Makes a model ready, with its adapters.
pub fn load(
    model: Model,
    compute: &Compute,
    settings: &GeneratorSettings,
    adapters: &[AdapterPath],
) -> Done<Generator> {
    let mut generator = Generator::new(Arc::new(model), &compute.open()?, settings)?;
    for AdapterPath { path, scale } in adapters {
        generator.add_adapter(path, *scale)?;
    }
    Ok(generator)
}

/// The prompt of these messages at this time: templates print the date.
pub fn chat_prompt(generator: &Generator, messages: &[Message]) -> Done<Vec<u32>> {
    let chat = generator.chat()?;
    let options = ChatOptions { now: Some(now()), ..chat.options.clone() };
    let text = chat.template.render(messages, &options)?;
    Ok(generator.engine.tokenizer().encode(&text, Special::Parse)?)
}

/// An adapter on disk, and how strongly it is to act: `PATH` or `PATH=SCALE`.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterPath {
    /// A PEFT directory, a GGUF adapter, or a run.
    pub path: PathBuf,
    pub scale: f32,
}

impl FromStr for AdapterPath {
    type Err = String;

    fn from_str(text: &str) -> Result<AdapterPath, String> {
        // A path may hold an equals sign of its own.
        let (path, scale) = match text.rsplit_once('=') {
            Some((path, scale)) if !Path::new(text).exists() => {
                let wrong = |_| format!("`{scale}` is not a number; write PATH or PATH=0.5");
                (path, finite(scale).map_err(wrong)?)
            }
            _ => (text, 1.0),
        };
        Ok(AdapterPath { path: path.into(), scale })
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
        assert!(parse("runs/a1=much").unwrap_err().contains("`much` is not a number"));
        assert!(parse("runs/a1=inf").is_err());
    }
}
