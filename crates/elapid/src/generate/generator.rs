//! A model that is ready to answer: engine, chat template, fill-in-the-middle tokens, and the
//! sampling that its files suggest.

#[cfg(feature = "fs")]
mod paths;

use super::engine::{Engine, EngineSettings, Request};
use super::sample::Sampling;
use crate::error::{Error, Result};
use crate::files::gguf::Gguf;
use crate::model::Model;
use crate::model::checkpoint::Checkpoint;
use crate::model::info::ModelInfo;
use crate::model::state::CacheType;
use crate::tensor::device::Device;
use crate::text::chat::{ChatOptions, ChatTemplate, Message};
use crate::text::fim::FimTokens;
use crate::text::tokenizer::{Special, Tokenizer};
use std::path::PathBuf;
use std::sync::Arc;

/// Tokens of context where neither the model nor the caller says.
const CONTEXT: usize = 1 << 17;

/// How a model is made ready.
#[derive(Clone, Debug)]
pub struct GeneratorSettings {
    /// Tokens of prompt and answer together; what the model was trained for where there is none.
    pub context: Option<usize>,
    /// Sequences that advance side by side.
    pub n_slots: usize,
    /// Requests that may wait for a slot.
    pub n_waiting_max: usize,
    /// Bytes of the prompt cache.
    pub snapshot_bytes_max: usize,
    /// Numbers of the key-value cache.
    pub cache: CacheType,
    /// Bytes of experts that may be resident; they are loaded when the router chooses them. All of
    /// them, from the start, where there is no limit.
    pub expert_bytes_max: Option<usize>,
}

impl Default for GeneratorSettings {
    fn default() -> GeneratorSettings {
        GeneratorSettings {
            context: None,
            n_slots: 1,
            n_waiting_max: 1,
            snapshot_bytes_max: 256 << 20,
            cache: CacheType::F32,
            expert_bytes_max: None,
        }
    }
}

/// An adapter that is loaded; its place in the list is its number.
#[derive(Clone, Debug)]
pub struct LoadedAdapter {
    /// The last name of its path, made unique.
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
    /// What it is given besides the messages.
    pub options: ChatOptions,
}

impl Chat {
    /// The prompt for these messages, up to where the assistant begins. The template itself says
    /// what goes first, as it does in transformers.
    pub(crate) fn prompt(&self, messages: &[Message], tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        tokenizer.encode(&self.template.render(messages, &self.options)?, Special::Parse)
    }
}

/// A model that is ready to answer.
pub struct Generator {
    /// What it calls itself.
    pub name: String,
    /// Where it was opened.
    pub path: PathBuf,
    /// Answers requests.
    pub engine: Engine,
    /// By number.
    pub adapters: Vec<LoadedAdapter>,
    /// The source of its chat template.
    pub chat_source: Option<String>,
    /// How messages become a prompt, if the model can chat.
    pub chat: Option<Chat>,
    /// Tokens of fill-in-the-middle, if it has them.
    pub fim: Option<FimTokens>,
    /// The sampling that its files suggest.
    pub suggested: Suggested,
    /// What can be said of the model.
    pub info: ModelInfo,
    base: Arc<Checkpoint>,
}

impl Generator {
    /// Loads the weights of a model as they are stored, and its adapter if it was opened as one.
    pub fn new(
        base: Arc<Checkpoint>,
        device: &Device,
        settings: &GeneratorSettings,
    ) -> Result<Generator> {
        let weights = match settings.expert_bytes_max {
            Some(bytes_max) => base.weights_paged(device, bytes_max)?,
            None => base.weights_as_stored(device)?,
        };
        let generator = Generator::with_weights(base, weights, settings)?;
        #[cfg(feature = "fs")]
        let generator = generator.with_own_adapter()?;
        Ok(generator)
    }

    pub(crate) fn with_weights(
        base: Arc<Checkpoint>,
        weights: crate::model::weights::Weights,
        settings: &GeneratorSettings,
    ) -> Result<Generator> {
        let tokenizer = tokenizer(&base)?;
        let chat_source = base.chat_template()?;
        let chat = chat_source.as_deref().map(|source| chat(source, &tokenizer)).transpose()?;
        let fim = tokenizer.fim();
        let model = Model::new(base.model().config().clone());
        let made_for = model.config().n_ctx.unwrap_or(CONTEXT);
        let engine_settings = EngineSettings {
            n_slots: settings.n_slots,
            n_waiting_max: settings.n_waiting_max,
            context: settings.context.unwrap_or(made_for).max(2),
            snapshot_bytes_max: settings.snapshot_bytes_max,
        };
        let engine = Engine::new(model, weights, Arc::new(tokenizer), engine_settings)?;
        Ok(Generator {
            name: base.name().to_string(),
            path: base.dir().into(),
            engine: engine.with_cache(settings.cache)?,
            adapters: Vec::new(),
            chat_source,
            chat,
            fim,
            suggested: suggested(&base)?,
            info: base.info()?,
            base,
        })
    }

    /// A request with the sampling that the model's files suggest, its end tokens, and its
    /// adapters.
    pub fn request(&self, prompt: Vec<u32>) -> Request {
        let Suggested { temperature, top_k, top_p, min_p, repeat_penalty } = self.suggested;
        let plain = Sampling::default();
        let sampling = Sampling {
            temperature: temperature.unwrap_or(plain.temperature),
            top_k: top_k.or(plain.top_k),
            top_p: top_p.unwrap_or(plain.top_p),
            min_p: min_p.unwrap_or(plain.min_p),
            repeat_penalty: repeat_penalty.unwrap_or(plain.repeat_penalty),
            ..plain
        };
        let scales = self.adapters.iter().map(|adapter| adapter.scale);
        let adapters = scales.enumerate().filter(|(_, scale)| *scale != 0.0).collect();
        Request { prompt, sampling, stop_tokens: self.stops(), adapters, ..Request::default() }
    }

    /// The ids of a text with the tokens that the model wants first; those alone, or the BOS token,
    /// where the text is empty.
    pub fn prompt(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        let tokenizer = self.engine.tokenizer();
        if !text.is_empty() {
            return tokenizer.encode_with_begin(text, special);
        }
        empty_prompt(tokenizer).ok_or_else(|| {
            let problem = "the prompt is empty, and the model has no BOS token";
            Error::input(problem, "give a prompt")
        })
    }

    /// Tokens that end an answer.
    pub fn stops(&self) -> Vec<u32> {
        self.engine.tokenizer().eog().to_vec()
    }

    /// The chat of the model, or why it has none.
    pub fn chat(&self) -> Result<&Chat> {
        self.chat.as_ref().ok_or_else(|| {
            let problem = format!("{} has no chat template", self.name);
            let hint = "it completes text: generate without chat, or put a chat_template.jinja \
                beside it";
            Error::input(problem, hint)
        })
    }

    /// The prompt for what stands between two texts, and the tokens that end it.
    pub fn infill(&self, prefix: &str, suffix: &str) -> Result<(Vec<u32>, Vec<u32>)> {
        let fim = self.fim.as_ref().ok_or_else(|| {
            let problem = format!("{} has no fill-in-the-middle tokens", self.name);
            Error::input(problem, "omit the suffix, or use a model for code")
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
pub fn empty_prompt(tokenizer: &Tokenizer) -> Option<Vec<u32>> {
    let first = || tokenizer.bos().or(tokenizer.eos()).map(|id| vec![id]);
    Some(tokenizer.begin().to_vec()).filter(|ids| !ids.is_empty()).or_else(first)
}

/// The tokenizer of a model with every token that ends an answer: chat models name several.
fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    let mut tokenizer = checkpoint.tokenizer()?.ok_or_else(|| {
        let problem = format!("{} holds no tokenizer", checkpoint.name());
        Error::input(problem, "put its tokenizer.json into the directory")
    })?;
    let generation = checkpoint.json("generation_config.json")?;
    let list = generation.get("eos_token_id").and_then(|ids| ids.as_array());
    let ids = list.into_iter().flatten().filter_map(|id| id.as_u64()?.try_into().ok());
    ids.for_each(|id| tokenizer.add_eog(id));
    Ok(tokenizer)
}

fn chat(source: &str, tokenizer: &Tokenizer) -> Result<Chat> {
    let template = ChatTemplate::new("the chat template", source)?;
    let text = |id: Option<u32>| id.and_then(|id| tokenizer.token(id));
    let options = ChatOptions {
        add_generation_prompt: true,
        bos_token: text(tokenizer.bos()),
        eos_token: text(tokenizer.eos()),
        ..ChatOptions::default()
    };
    Ok(Chat { template, options })
}

/// generation_config.json of a directory, `general.sampling.*` of a GGUF file.
fn suggested(checkpoint: &Checkpoint) -> Result<Suggested> {
    let json = checkpoint.json("generation_config.json")?;
    let number = |key: &str, gguf_key: &str| {
        let of_gguf = |gguf: &Gguf| gguf.float(&format!("general.sampling.{gguf_key}")).ok()?;
        let number = json.get(key).and_then(|value| value.as_f64());
        let number = number.or_else(|| of_gguf(checkpoint.gguf()?));
        number.filter(|number| number.is_finite()).map(|number| number as f32)
    };
    let share = |key: &str| number(key, key).filter(|share| (0.0..=1.0).contains(share));
    let top_k = json.get("top_k").and_then(|k| k.as_u64()).map(|k| k as usize);
    let of_gguf = || checkpoint.gguf()?.size("general.sampling.top_k").ok()?;
    Ok(Suggested {
        temperature: number("temperature", "temp").filter(|number| *number >= 0.0),
        // Both use zero for "all".
        top_k: top_k.or_else(of_gguf).filter(|k| *k > 0),
        top_p: share("top_p").filter(|share| *share > 0.0),
        min_p: share("min_p"),
        repeat_penalty: number("repetition_penalty", "penalty_repeat").filter(|x| *x > 0.0),
    })
}
