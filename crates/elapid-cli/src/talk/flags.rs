//! Flags that say which model answers and how tokens are chosen.
//!
//! What a person does not say is what the model's own files suggest, and else what llama.cpp does:
//! a temperature of 0.8 among the likeliest tokens.

use super::load::{AdapterPath, LoadSettings};
use crate::compute::Compute;
use crate::files;
use crate::report::{Done, Failure, between};
use elapid::CacheType;
use elapid::Sampling;
use elapid::{Constraint, Request};
use elapid::{Generator, GeneratorSettings, Suggested};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Sampling where neither a person nor the model says.
const DEFAULT: Suggested = Suggested {
    temperature: Some(0.8),
    top_k: Some(40),
    top_p: Some(0.95),
    min_p: Some(0.05),
    repeat_penalty: Some(1.0),
};

/// Which model, where, and how much it may hold.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub struct ModelFlags {
    /// Adapter to put on the model: a PEFT directory, a GGUF adapter or a run; may be repeated
    #[arg(long, value_name = "PATH[=SCALE]")]
    pub adapter: Vec<AdapterPath>,
    /// Tokens of prompt and answer together [default: what the model was made for]
    #[arg(long, short = 'c', value_name = "N", value_parser = between(2, 1 << 24))]
    pub context: Option<usize>,
    /// Numbers of the key-value cache: f32, f16 or q8_0, the smaller the less memory
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = cache_type)]
    pub cache_type: CacheType,
    #[command(flatten)]
    pub compute: Compute,
}

impl ModelFlags {
    /// How to load for one conversation.
    pub fn settings(&self) -> LoadSettings {
        LoadSettings {
            compute: self.compute.clone(),
            adapters: self.adapter.clone(),
            generator: GeneratorSettings {
                context: self.context,
                cache: self.cache_type,
                ..GeneratorSettings::default()
            },
            ..LoadSettings::default()
        }
    }
}

/// How tokens are chosen.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingFlags {
    /// Below 1 prefers what is likely; 0 always takes the likeliest [default: the model's, or 0.8]
    #[arg(long, value_name = "X", value_parser = number_from_zero)]
    pub temperature: Option<f32>,
    /// Only the N likeliest tokens; 0 for all [default: the model's, or 40]
    #[arg(long, value_name = "N", value_parser = between(0, 1 << 24))]
    pub top_k: Option<usize>,
    /// Only the likeliest tokens that together reach this share [default: the model's, or 0.95]
    #[arg(long, value_name = "X", value_parser = share)]
    pub top_p: Option<f32>,
    /// Only tokens at least this likely, as a share of the likeliest [default: the model's, or
    /// 0.05]
    #[arg(long, value_name = "X", value_parser = share)]
    pub min_p: Option<f32>,
    /// Above 1 makes tokens that came before less likely [default: the model's, or 1]
    #[arg(long, value_name = "X", value_parser = number_from_zero)]
    pub repeat_penalty: Option<f32>,
    /// Taken once from the logit of a token that came before
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Taken from the logit of a token for each time that it came before
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Same seed, same answer [default: another each time]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// End the answer before this text; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Guess up to N tokens from the prompt and check them in one pass: faster, same answer
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = between(0, 64))]
    pub lookup: usize,
    /// The answer is JSON of this schema: a file, or the schema itself
    #[arg(long, value_name = "FILE|JSON", group = "constraint")]
    pub json_schema: Option<String>,
    /// The answer follows this grammar, a file in the dialect of Lark that llguidance reads
    #[arg(long, value_name = "FILE", group = "constraint")]
    pub grammar: Option<PathBuf>,
    /// The whole answer matches this regular expression
    #[arg(long, value_name = "REGEX", group = "constraint")]
    pub regex: Option<String>,
}

/// A type of numbers in the key-value cache, for a flag.
pub fn cache_type(text: &str) -> Result<CacheType, String> {
    CacheType::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = CacheType::ALL.into_iter().map(CacheType::name).collect();
        format!("give one of {}", names.join(", "))
    })
}

/// A number from zero on, for a flag.
pub fn number_from_zero(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("give a number from 0 on".into()),
    }
}

/// A number from zero to one, for a flag.
pub fn share(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(number) if (0.0..=1.0).contains(&number) => Ok(number),
        _ => Err("give a number from 0 to 1".into()),
    }
}

impl SamplingFlags {
    /// The sampling, with a seed in any case.
    pub fn sampling(&self, of_model: &Suggested) -> Sampling {
        let temperature = self.temperature.or(of_model.temperature).or(DEFAULT.temperature);
        // Zero asks for all, as everywhere else.
        let top_k = self.top_k.or(of_model.top_k).or(DEFAULT.top_k).filter(|k| *k > 0);
        let top_p = self.top_p.or(of_model.top_p).or(DEFAULT.top_p);
        let min_p = self.min_p.or(of_model.min_p).or(DEFAULT.min_p);
        let repeat = self.repeat_penalty.or(of_model.repeat_penalty).or(DEFAULT.repeat_penalty);
        Sampling {
            temperature: temperature.unwrap_or(0.0),
            top_k,
            top_p: top_p.unwrap_or(1.0),
            min_p: min_p.unwrap_or(0.0),
            repeat_penalty: repeat.unwrap_or(1.0),
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            seed: self.seed.unwrap_or_else(fresh_seed),
            ..Sampling::greedy()
        }
    }

    /// What the answer must look like.
    pub fn constraint(&self) -> Done<Option<Constraint>> {
        if let Some(schema) = &self.json_schema {
            return json_schema(schema).map(Some);
        }
        if let Some(path) = &self.grammar {
            return Ok(Some(Constraint::Lark(files::read_text(path)?)));
        }
        Ok(self.regex.clone().map(Constraint::Regex))
    }

    /// A request that goes on from `prompt`.
    pub fn request(&self, loaded: &Generator, prompt: Vec<u32>, n_max: usize) -> Done<Request> {
        Ok(Request {
            n_max,
            sampling: self.sampling(&loaded.suggested),
            stop_texts: self.stop.clone(),
            constraint: self.constraint()?,
            n_lookup: self.lookup,
            ..loaded.request(prompt)
        })
    }
}

fn json_schema(text: &str) -> Done<Constraint> {
    let is_inline = text.trim_start().starts_with('{');
    let (name, text) = match is_inline {
        true => ("--json-schema", text.to_string()),
        false => (text, files::read_text(Path::new(text))?),
    };
    let schema = serde_json::from_str(&text).map_err(|error| {
        let hint = "give a JSON schema, such as '{\"type\": \"object\"}', or a file of one";
        Failure::new(format!("{name}: not JSON: {error}"), hint)
    })?;
    Ok(Constraint::JsonSchema(schema))
}

/// A seed from the clock; small enough to be typed again.
fn fresh_seed() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs() ^ (u64::from(since.subsec_nanos()) << 4)) % 1_000_000_000
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
        let of_model =
            Suggested { temperature: Some(0.2), top_k: Some(20), ..Suggested::default() };
        let got = flags("--top-k 7 --seed 3").sampling(&of_model);
        assert_eq!((got.temperature, got.top_k, got.top_p), (0.2, Some(7), 0.95));
        assert_eq!(got.seed, 3);
        let greedy = flags("--temperature 0 --top-k 0").sampling(&of_model);
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
}
