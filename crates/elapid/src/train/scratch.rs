//! A new model before any training: a vocabulary made from texts, and a preset's shape around it.

use crate::data::Ends;
use crate::error::{Error, Result};
use crate::model::checkpoint::Checkpoint;
use crate::model::config::preset::{self, Arch, Size};
use crate::text::tokenizer::BpeTrainer;
use crate::text::tokenizer::Tokenizer;
use serde_json::json;

/// Ends every text, and begins it.
const END: &str = "<|endoftext|>";
/// For filling in the middle, and before projects and files, as Qwen-Coder spells them.
const FIM: [&str; 6] = [
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
];

/// Small files of a model, by name.
pub type Texts = Vec<(&'static str, Vec<u8>)>;

/// The shape of a new model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How large.
    pub size: Size,
    /// Built how.
    pub arch: Arch,
    /// Tokens in a row.
    pub context: usize,
}

/// A byte-level BPE of at most `n_vocab` tokens, as the files of a model's directory.
pub fn vocabulary(
    n_vocab: usize,
    context: usize,
    texts: &mut dyn Iterator<Item = &str>,
) -> Result<Texts> {
    let specials = [END].into_iter().chain(FIM).map(str::to_string).collect();
    let trainer = BpeTrainer { n_vocab, min_count: 2, specials };
    let tokenizer = Tokenizer::train(&trainer, "gpt-2", texts, &mut |_, _| {})?;
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": FIM[3],
        "clean_up_tokenization_spaces": false, "model_max_length": context,
    });
    Ok(vec![
        ("tokenizer.json", tokenizer.to_json()?.into_bytes()),
        ("tokenizer_config.json", format!("{config:#}\n").into_bytes()),
    ])
}

/// The tokenizer of another model, as the files of a directory.
pub fn vocabulary_of(other: &Checkpoint) -> Result<Texts> {
    let tokenizer = tokenizer_of(other)?;
    let token = |id: Option<u32>| id.and_then(|id| tokenizer.token(id));
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
        "bos_token": token(tokenizer.bos()), "eos_token": token(tokenizer.eos()),
    });
    let json = match other.text("tokenizer.json")? {
        Some(json) => json.to_string(),
        None => tokenizer.to_json()?,
    };
    let config = format!("{config:#}\n").into_bytes();
    Ok(vec![("tokenizer.json", json.into_bytes()), ("tokenizer_config.json", config)])
}

/// Where a new model gets its vocabulary.
pub enum Vocabulary<'a> {
    /// A new byte-level BPE of at most so many tokens, trained on these texts.
    New(usize, &'a mut dyn Iterator<Item = &'a str>),
    /// That of another model, with as many rows in the embedding.
    Of(&'a Checkpoint),
    /// These files, and the rows of the embedding where there are more of them than tokens.
    Files(Texts, Option<usize>),
}

impl Checkpoint {
    /// A new model of this shape; its weights are random.
    pub fn scratch(shape: Shape, vocabulary: Vocabulary) -> Result<Checkpoint> {
        let (texts, n_vocab) = match vocabulary {
            Vocabulary::New(n_vocab, texts) => {
                (self::vocabulary(n_vocab, shape.context, texts)?, None)
            }
            Vocabulary::Of(other) => (vocabulary_of(other)?, Some(other.model().config().n_vocab)),
            Vocabulary::Files(texts, n_vocab) => (texts, n_vocab),
        };
        checkpoint(shape, texts, n_vocab)
    }
}

/// The tokenizer of a model, which must have one.
pub fn tokenizer_of(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    checkpoint.tokenizer()?.ok_or_else(|| {
        let problem = format!("{} holds no tokenizer", checkpoint.name());
        Error::input(problem, "put its tokenizer.json beside the weights")
    })
}

/// A model of this shape with this vocabulary; where `n_vocab` is given, with so many tokens.
pub fn checkpoint(shape: Shape, texts: Texts, n_vocab: Option<usize>) -> Result<Checkpoint> {
    let Shape { size, arch, context } = shape;
    let config = |vocabulary| preset::config_json(size, arch, vocabulary, context);
    // The tokenizer is read from the files, as it will be from then on; any shape does for that.
    let any = preset::Vocabulary { n_vocab: 1 << 10, begin: None, end: None };
    let tokenizer = tokenizer_of(&Checkpoint::fresh("new", config(any), texts.clone())?)?;
    let ends = Ends::of(&tokenizer);
    let n_vocab = n_vocab.unwrap_or(tokenizer.n_vocab());
    let vocabulary = preset::Vocabulary { n_vocab, begin: ends.begin, end: ends.end };
    Checkpoint::fresh("new", config(vocabulary), texts)
}
