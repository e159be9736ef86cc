//! Flags that say which model answers and how tokens are chosen, and the model made ready by them.
//!
//! Defaults are what the model's own files suggest, and else what llama.cpp does.

use crate::compute::Compute;
use crate::files;
use crate::report::{Done, Failure, between, beyond_trained, size};
use elapid::{
    CacheType, ChatOptions, Constraint, DateTime, Device, Error, Generator, GeneratorSettings,
    Message, Model, Request, Sampling, Special,
};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Which model, where, and how much it may hold.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelFlags {
    /// Adapter to apply: PEFT directory, GGUF adapter or run; may be repeated
    #[arg(long, value_name = "PATH[=SCALE]")]
    pub adapter: Vec<AdapterPath>,
    /// Context size: tokens of prompt and answer together [default: the model's]
    #[arg(long, short = 'c', value_name = "N", value_parser = between(2, 1 << 24))]
    pub context: Option<usize>,
    /// Data type of the KV cache: f32, f16 or q8_0
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = cache_type)]
    pub cache_type: CacheType,
    /// Memory for experts, such as 500M: they are loaded when the router chooses them, and those
    /// used least make room (same answer) [default: all are loaded]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub expert_memory: Option<u64>,
    #[command(flatten)]
    pub compute: Compute,
}

impl ModelFlags {
    /// The model at `path` with these adapters, ready for one conversation.
    pub fn load(&self, path: &Path, adapters: &[AdapterPath]) -> Done<Generator> {
        let (context, cache) = (self.context, self.cache_type);
        let expert_bytes_max = self.expert_memory.map(|n_bytes| n_bytes as usize);
        let settings =
            GeneratorSettings { context, cache, expert_bytes_max, ..GeneratorSettings::default() };
        load(Model::open(path)?, &self.compute, &settings, adapters)
    }
}

/// How tokens are chosen.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingFlags {
    /// Sampling temperature; 0 is greedy [default: the model's, or 0.8]
    #[arg(long, value_name = "X", value_parser = number_from_zero)]
    pub temperature: Option<f32>,
    /// Sample from the N most likely tokens (0: all) [default: the model's, or 40]
    #[arg(long, value_name = "N", value_parser = between(0, 1 << 24))]
    pub top_k: Option<usize>,
    /// Sample from the most likely tokens that sum to probability X [default: the model's, or
    /// 0.95]
    #[arg(long, value_name = "X", value_parser = share)]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than X times the most likely one [default: the model's, or 0.05]
    #[arg(long, value_name = "X", value_parser = share)]
    pub min_p: Option<f32>,
    /// Penalty on tokens that occurred before; 1 is off [default: the model's, or 1]
    #[arg(long, value_name = "X", value_parser = number_from_zero)]
    pub repeat_penalty: Option<f32>,
    /// Subtracted once from the logit of a token that occurred before
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it occurred before
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Random seed: the same seed gives the same answer [default: random]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Stop before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Prompt lookup decoding: guess up to N tokens and verify them in one pass (same answer)
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = between(0, 64))]
    pub lookup: usize,
    /// Constrain the answer to this JSON schema: a file, or the schema itself
    #[arg(long, value_name = "FILE|JSON", group = "constraint")]
    pub json_schema: Option<String>,
    /// Constrain the answer to this grammar: a file in llguidance's dialect of Lark
    #[arg(long, value_name = "FILE", group = "constraint")]
    pub grammar: Option<PathBuf>,
    /// Constrain the answer to this regular expression
    #[arg(long, value_name = "REGEX", group = "constraint")]
    pub regex: Option<String>,
}

/// A type of numbers in the key-value cache, for a flag.
pub fn cache_type(text: &str) -> Result<CacheType, String> {
    text.parse().map_err(|error: Error| error.hint().into_owned())
}

/// A number, for a flag.
pub fn finite(text: &str) -> Result<f32, String> {
    text.parse().ok().filter(|number: &f32| number.is_finite()).ok_or("give a number".into())
}

/// A number from zero on, for a flag.
pub fn number_from_zero(text: &str) -> Result<f32, String> {
    finite(text).ok().filter(|number| *number >= 0.0).ok_or("give a number of at least 0".into())
}

/// A number from zero to one, for a flag.
pub fn share(text: &str) -> Result<f32, String> {
    let number = finite(text).ok().filter(|number| (0.0..=1.0).contains(number));
    number.ok_or("give a number from 0 to 1".into())
}

impl SamplingFlags {
    /// The sampling, with a seed in any case.
    pub fn sampling(&self, of_model: Sampling) -> Sampling {
        Sampling {
            temperature: self.temperature.unwrap_or(of_model.temperature),
            // Zero asks for all, as everywhere else.
            top_k: self.top_k.or(of_model.top_k).filter(|k| *k > 0),
            top_p: self.top_p.unwrap_or(of_model.top_p),
            min_p: self.min_p.unwrap_or(of_model.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(of_model.repeat_penalty),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            seed: self.seed.unwrap_or_else(fresh_seed),
            ..of_model
        }
    }

    pub fn constraint(&self) -> Done<Option<Constraint>> {
        if let Some(schema) = &self.json_schema {
            return json_schema(schema).map(Some);
        }
        if let Some(path) = &self.grammar {
            return Ok(Some(Constraint::Lark(files::read_text(path)?)));
        }
        Ok(self.regex.clone().map(Constraint::Regex))
    }

    /// A request that continues `prompt`.
    pub fn request(&self, loaded: &Generator, prompt: Vec<u32>, n_max: usize) -> Done<Request> {
        let request = loaded.request(prompt);
        Ok(Request {
            n_max,
            sampling: self.sampling(request.sampling),
            stop_texts: self.stop.clone(),
            constraint: self.constraint()?,
            n_lookup: self.lookup,
            ..request
        })
    }
}

fn json_schema(text: &str) -> Done<Constraint> {
    let (name, text) = match text.trim_start().starts_with('{') {
        true => ("--json-schema", text.to_string()),
        false => (text, files::read_text(Path::new(text))?),
    };
    let schema = serde_json::from_str(&text).map_err(|error| {
        let hint = "give a JSON schema, such as '{\"type\": \"object\"}', or a file that holds one";
        Failure::new(format!("{name}: not JSON: {error}"), hint)
    })?;
    Ok(Constraint::JsonSchema(schema))
}

/// A seed from the clock; small enough to be typed again.
fn fresh_seed() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs() ^ (u64::from(since.subsec_nanos()) << 4)) % 1_000_000_000
}

/// Makes a model ready, with its adapters.
pub fn load(
    model: Model,
    compute: &Compute,
    settings: &GeneratorSettings,
    adapters: &[AdapterPath],
) -> Done<Generator> {
    load_on(model, &compute.open()?, settings, adapters)
}

/// The same on a device that is open.
pub fn load_on(
    model: Model,
    device: &Device,
    settings: &GeneratorSettings,
    adapters: &[AdapterPath],
) -> Done<Generator> {
    let n_ctx = model.info()?.n_ctx;
    if let Some(note) = settings.context.and_then(|context| beyond_trained(context, n_ctx)) {
        eprintln!("note    {note}");
    }
    let mut generator = Generator::new(Arc::new(model), device, settings)?;
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
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        sampling: SamplingFlags,
    }

    fn flags(line: &str) -> SamplingFlags {
        Cli::try_parse_from(["x"].into_iter().chain(line.split_whitespace())).unwrap().sampling
    }

    #[test]
    fn a_flag_goes_before_the_model_and_the_model_before_the_default() {
        let of_model = Sampling { temperature: 0.2, top_k: Some(20), ..Sampling::default() };
        let got = flags("--top-k 7 --seed 3").sampling(of_model);
        assert_eq!((got.temperature, got.top_k, got.top_p), (0.2, Some(7), 0.95));
        assert_eq!(got.seed, 3);
        let greedy = flags("--temperature 0 --top-k 0").sampling(of_model);
        assert_eq!((greedy.temperature, greedy.top_k), (0.0, None));
    }

    #[test]
    fn senseless_flags_are_refused() {
        let lines = [
            "--temperature -1",
            "--temperature nan",
            "--top-p 1.1",
            "--min-p x",
            "--regex a --json-schema {}",
        ];
        for line in lines {
            let args = ["x"].into_iter().chain(line.split_whitespace());
            assert!(Cli::try_parse_from(args).is_err(), "{line}");
        }
    }

    #[test]
    fn a_schema_may_be_typed() {
        let got = flags("--json-schema {\"type\":\"object\"}").constraint().unwrap();
        let want = Constraint::JsonSchema(serde_json::json!({"type": "object"}));
        assert_eq!(got, Some(want));
        let error = flags("--json-schema {").constraint().unwrap_err().to_string();
        assert!(error.contains("not JSON") && error.contains("hint: "), "{error}");
    }

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
