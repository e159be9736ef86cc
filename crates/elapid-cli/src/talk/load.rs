//! From a path to an engine: model, tokenizer, adapters, chat template, tokens of fill in the
//! middle, and the sampling that the model asks for.
//!
//! A path is a directory, a .gguf or .elapid file, or a run of `elapid train`; a run that made an
//! adapter is its base with the adapter on it.
//!
//! Not here: flags (`flags.rs`), requests (`answer.rs`, the server).

use crate::commands::adapter;
use crate::compute::Compute;
use crate::files;
use crate::report::{Done, Failure};
use crate::run::config::{Origin, RunConfig};
use elapid::generate::engine::{Engine, EngineSettings};
use elapid::model::Model;
use elapid::model::checkpoint::Checkpoint;
use elapid::model::state::CacheType;
use elapid::text::chat::{ChatOptions, ChatTemplate, Message, Moment};
use elapid::text::fim::FimTokens;
use elapid::text::tokenizer::{Special, Tokenizer};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Tokens of context where neither the model nor a person says.
const CONTEXT: usize = 1 << 17;

/// How a model is to be loaded.
#[derive(Clone, Debug)]
pub struct LoadSettings {
    /// Device and threads.
    pub compute: Compute,
    /// Tokens of prompt and answer; what the model was made for where there is none.
    pub context: Option<usize>,
    /// No more than this where nobody says.
    pub context_max: usize,
    /// Sequences side by side.
    pub n_slots: usize,
    /// Requests that may wait.
    pub n_waiting_max: usize,
    /// Bytes for snapshots of prompts.
    pub snapshot_bytes_max: usize,
    /// Numbers of the key-value cache.
    pub cache: CacheType,
    /// Adapters to load.
    pub adapters: Vec<AdapterPath>,
}

impl Default for LoadSettings {
    /// For one conversation.
    fn default() -> LoadSettings {
        LoadSettings {
            compute: Compute::default(),
            context: None,
            context_max: usize::MAX,
            n_slots: 1,
            n_waiting_max: 1,
            snapshot_bytes_max: 256 << 20,
            cache: CacheType::F32,
            adapters: Vec::new(),
        }
    }
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

/// An adapter that is loaded; its place in the list is its number.
#[derive(Clone, Debug)]
pub struct LoadedAdapter {
    /// What it is called: the last name of its path, made unique.
    pub name: String,
    /// Where it came from.
    pub path: PathBuf,
    /// Factor of its scale where a request does not say.
    pub scale: f32,
}

/// Sampling that comes with a model, where it does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Suggested {
    /// Temperature.
    pub temperature: Option<f32>,
    /// Top-k.
    pub top_k: Option<usize>,
    /// Top-p.
    pub top_p: Option<f32>,
    /// Min-p.
    pub min_p: Option<f32>,
    /// Penalty of repetition.
    pub repeat_penalty: Option<f32>,
}

/// How messages become a prompt.
pub struct Chat {
    /// The template of the model.
    pub template: ChatTemplate,
    /// What it is given; `prompt` adds the time.
    pub options: ChatOptions,
}

impl Chat {
    /// The text of these messages, up to where the assistant begins.
    pub fn render(&self, messages: &[Message]) -> Done<String> {
        let options = ChatOptions { now: Some(now()), ..self.options.clone() };
        Ok(self.template.render(messages, &options)?)
    }

    /// Its ids. The template says itself what goes first, as it does in transformers.
    pub fn prompt(&self, messages: &[Message], tokenizer: &Tokenizer) -> Done<Vec<u32>> {
        Ok(tokenizer.encode(&self.render(messages)?, Special::Parse)?)
    }
}

/// A model that is ready to answer.
pub struct Loaded {
    /// What it calls itself.
    pub name: String,
    /// Where it came from.
    pub path: PathBuf,
    /// Answers requests.
    pub engine: Engine,
    /// By number.
    pub adapters: Vec<LoadedAdapter>,
    /// Its chat template as it was found, and ready to use.
    pub chat_source: Option<String>,
    /// How messages become a prompt, if the model can chat.
    pub chat: Option<Chat>,
    /// Tokens of fill in the middle, if it has them.
    pub fim: Option<FimTokens>,
    /// The sampling it asks for.
    pub suggested: Suggested,
}

impl Loaded {
    /// Every adapter with the scale it was given.
    pub fn adapters_by_default(&self) -> Vec<(usize, f32)> {
        let scales = self.adapters.iter().map(|adapter| adapter.scale);
        scales.enumerate().filter(|(_, scale)| *scale != 0.0).collect()
    }

    /// What an empty prompt is: the tokens the model wants first, or the one that begins a text.
    pub fn begin(&self) -> Done<Vec<u32>> {
        begin(self.engine.tokenizer()).ok_or_else(|| {
            let problem = "the prompt is empty, and the model has no BOS token";
            Failure::new(problem, "give a prompt: -p TEXT")
        })
    }

    /// Tokens that end an answer.
    pub fn stops(&self) -> Vec<u32> {
        self.engine.tokenizer().eog().to_vec()
    }

    /// The chat of the model, or why it has none.
    pub fn chat(&self) -> Done<&Chat> {
        self.chat.as_ref().ok_or_else(|| {
            let problem = format!("{} has no chat template", self.path.display());
            let hint = "it goes on with text: use `elapid generate`, or put a \
                chat_template.jinja beside it";
            Failure::new(problem, hint)
        })
    }

    /// The prompt for what is to stand between two texts, and the tokens that end it.
    pub fn infill(&self, prefix: &str, suffix: &str) -> Done<(Vec<u32>, Vec<u32>)> {
        let fim = self.fim.as_ref().ok_or_else(|| {
            let problem =
                format!("{} has no tokens for filling in the middle", self.path.display());
            Failure::new(problem, "leave --suffix out, or use a model for code")
        })?;
        let tokenizer = self.engine.tokenizer();
        let encode = |text: &str| tokenizer.encode(text, Special::Plain);
        let laid_out = fim.layout(fim.style, &encode(prefix)?, &encode(suffix)?);
        let prompt = [tokenizer.begin(), &laid_out].concat();
        Ok((prompt, [self.stops(), fim.stops()].concat()))
    }
}

/// What an empty prompt is: the tokens the model wants first, or BOS, or the one token that
/// GPT-like vocabularies have for both ends.
pub fn begin(tokenizer: &Tokenizer) -> Option<Vec<u32>> {
    let first = || tokenizer.bos().or(tokenizer.eos()).map(|id| vec![id]);
    Some(tokenizer.begin().to_vec()).filter(|ids| !ids.is_empty()).or_else(first)
}

/// Opens a model and makes it ready.
pub fn load(path: &Path, settings: &LoadSettings) -> Done<Loaded> {
    let (base, of_run) = resolve(path)?;
    let checkpoint = files::open(&base)?;
    let device = settings.compute.open()?;
    let tokenizer = tokenizer(&base, &checkpoint)?;
    let chat_source = checkpoint.chat_template()?;
    let chat = chat_source.as_deref().map(|source| chat(source, &tokenizer)).transpose()?;
    let fim = tokenizer.fim();
    let model = Model::new(checkpoint.model().config().clone());
    let weights = checkpoint.weights_as_stored(&device)?;
    let made_for = model.config().n_ctx.unwrap_or(CONTEXT);
    let context = settings.context.unwrap_or(made_for.min(settings.context_max));
    let engine_settings = EngineSettings {
        n_slots: settings.n_slots,
        n_waiting_max: settings.n_waiting_max,
        context: context.max(2),
        snapshot_bytes_max: settings.snapshot_bytes_max,
    };
    let engine = Engine::new(model, weights, Arc::new(tokenizer), engine_settings)?;
    let engine = engine.with_cache(settings.cache)?;
    let mut loaded = Loaded {
        name: checkpoint.name().to_string(),
        path: path.to_path_buf(),
        engine,
        adapters: Vec::new(),
        chat_source,
        chat,
        fim,
        suggested: suggested(&checkpoint)?,
    };
    for adapter in of_run.iter().chain(&settings.adapters) {
        add_adapter(&mut loaded, &checkpoint, adapter)?;
    }
    drop(checkpoint);
    files::release_pages();
    Ok(loaded)
}

/// The model at a path, and the adapter of the run that it is.
fn resolve(path: &Path) -> Done<(PathBuf, Option<AdapterPath>)> {
    let is_run = path.join("checkpoints").is_dir();
    if !is_run || path.join("model").is_dir() || !path.join("adapter").is_dir() {
        return Ok((path.to_path_buf(), None));
    }
    match RunConfig::read(path)?.origin {
        Origin::Base { model, .. } => {
            Ok((model, Some(AdapterPath { path: path.to_path_buf(), scale: 1.0 })))
        }
        Origin::Scratch { .. } => Ok((path.to_path_buf(), None)),
    }
}

fn tokenizer(path: &Path, checkpoint: &Checkpoint) -> Done<Tokenizer> {
    let mut tokenizer = checkpoint.tokenizer()?.ok_or_else(|| {
        let problem = format!("{} holds no tokenizer", path.display());
        Failure::new(problem, "put its tokenizer.json into the directory")
    })?;
    // Chat models name several tokens that end an answer.
    let generation = checkpoint.json("generation_config.json")?;
    let list = generation.get("eos_token_id").and_then(|ids| ids.as_array());
    for id in list.into_iter().flatten().filter_map(|id| id.as_u64()) {
        if let Ok(id) = u32::try_from(id) {
            tokenizer.add_eog(id);
        }
    }
    Ok(tokenizer)
}

fn chat(source: &str, tokenizer: &Tokenizer) -> Done<Chat> {
    let template = ChatTemplate::new("the chat template", source)?;
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.token(id));
    let (bos_token, eos_token) = (text(tokenizer.bos()), text(tokenizer.eos()));
    let add_generation_prompt = true;
    let options =
        ChatOptions { add_generation_prompt, bos_token, eos_token, ..ChatOptions::default() };
    Ok(Chat { template, options })
}

/// generation_config.json of a directory, `general.sampling.*` of a GGUF file.
fn suggested(checkpoint: &Checkpoint) -> Done<Suggested> {
    let json = checkpoint.json("generation_config.json")?;
    let number = |key: &str, gguf_key: &str| -> Done<Option<f64>> {
        let of_gguf = match checkpoint.gguf() {
            Some(gguf) => gguf.float(&format!("general.sampling.{gguf_key}")).unwrap_or(None),
            None => None,
        };
        let found = json.get(key).and_then(|value| value.as_f64()).or(of_gguf);
        Ok(found.filter(|number| number.is_finite()))
    };
    let narrow = |number: Option<f64>| number.map(|number| number as f32);
    let share = |number: Option<f64>| narrow(number).filter(|share| (0.0..=1.0).contains(share));
    let top_k = match checkpoint.gguf() {
        Some(gguf) => gguf.size("general.sampling.top_k").unwrap_or(None),
        None => None,
    };
    let top_k = json.get("top_k").and_then(|k| k.as_u64()).map(|k| k as usize).or(top_k);
    Ok(Suggested {
        temperature: narrow(number("temperature", "temp")?).filter(|number| *number >= 0.0),
        // Both use zero for "all".
        top_k: top_k.filter(|k| *k > 0),
        top_p: share(number("top_p", "top_p")?).filter(|share| *share > 0.0),
        min_p: share(number("min_p", "min_p")?),
        repeat_penalty: narrow(number("repetition_penalty", "penalty_repeat")?)
            .filter(|number| *number > 0.0),
    })
}

/// Loads an adapter beside those that are there.
pub fn add_adapter(loaded: &mut Loaded, base: &Checkpoint, wanted: &AdapterPath) -> Done<()> {
    // The directory of a run holds what came of it.
    let of_run = wanted.path.join("adapter");
    let dir = if of_run.is_dir() { &of_run } else { &wanted.path };
    let Some(found) = adapter::detect(dir)? else {
        let problem = format!("{} is no adapter", wanted.path.display());
        let hint = "give a directory that PEFT or `elapid train` wrote, or a GGUF adapter";
        return Err(Failure::new(problem, hint));
    };
    let lora = found.read(Some(base), loaded.engine.device())?;
    let name = unique_name(&wanted.path, &loaded.adapters);
    let number = loaded.engine.add_adapter(&name, lora)?;
    assert_eq!(number, loaded.adapters.len(), "adapters are numbered as they come");
    let (path, scale) = (wanted.path.clone(), wanted.scale);
    loaded.adapters.push(LoadedAdapter { name, path, scale });
    Ok(())
}

/// `a1` of `runs/a1`, of `runs/a1/adapter` and of `a1.gguf`; `a1-2` where `a1` is taken.
fn unique_name(path: &Path, taken: &[LoadedAdapter]) -> String {
    let last = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let full = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    let mut name = last(&full).unwrap_or_else(|| "adapter".into());
    if name == "adapter" {
        name = full.parent().and_then(last).unwrap_or(name);
    }
    let name = name.strip_suffix(".gguf").unwrap_or(&name).to_string();
    let is_taken = |name: &str| taken.iter().any(|adapter| adapter.name == name);
    let mut candidates = (2..).map(|n| format!("{name}-{n}"));
    match is_taken(&name) {
        false => name,
        true => candidates.find(|name| !is_taken(name)).expect("names do not run out"),
    }
}

/// The time, in UTC: templates print the date.
pub fn now() -> Moment {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    moment(seconds)
}

/// Seconds since 1970 as a date (proleptic Gregorian; years that begin in March, Hinnant's way).
fn moment(seconds: u64) -> Moment {
    let (days, second) = (seconds / 86_400, (seconds % 86_400) as u32);
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let leaps = day_of_era / 1_460 + day_of_era / 146_096 - day_of_era / 36_524;
    let year_of_era = (day_of_era - leaps) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = (day_of_year - (153 * from_march + 2) / 5 + 1) as u32;
    let month = (if from_march < 10 { from_march + 3 } else { from_march - 9 }) as u32;
    let year = (era * 400 + year_of_era) as i32 + i32::from(month <= 2);
    Moment { year, month, day, hour: second / 3600, minute: second / 60 % 60, second: second % 60 }
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

    #[test]
    fn names_of_adapters_are_unique() {
        let named = |name: &str| LoadedAdapter { name: name.into(), path: "x".into(), scale: 1.0 };
        assert_eq!(unique_name(Path::new("runs/a1/adapter"), &[]), "a1");
        assert_eq!(unique_name(Path::new("a1.gguf"), &[named("a1"), named("a1-2")]), "a1-3");
    }

    #[test]
    fn seconds_become_dates() {
        let date = |seconds| {
            let Moment { year, month, day, hour, minute, second } = moment(seconds);
            format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
        };
        assert_eq!(date(0), "1970-01-01 00:00:00");
        assert_eq!(date(951_827_696), "2000-02-29 12:34:56");
        assert_eq!(date(4_107_542_399), "2100-02-28 23:59:59");
        assert_eq!(date(4_107_542_400), "2100-03-01 00:00:00");
    }
}
