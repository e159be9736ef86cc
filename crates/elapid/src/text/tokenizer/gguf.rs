//! The vocabulary inside a GGUF file, read as llama.cpp reads it.
//!
//! | `tokenizer.ggml.model` | is                                                           |
//! |------------------------|--------------------------------------------------------------|
//! | `gpt2`                 | bytes, merges by rank, a pre-tokenizer by name               |
//! | `llama`                | SentencePiece: scores, bytes as `<0x0A>`, a space first        |
//!
//! Kinds of tokens decide what is found in text. Files get kinds wrong, so llama.cpp corrects
//! tokens that end a turn or mark a gap to fill by their names, and so do we: `roles`.
//!
//! Not here: the container; WordPiece (`bert`), Unigram (`t5`), `rwkv`, `plamo2`.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};

use super::bpe::Merges;
use super::encoder::{Encoder, Prefix, Words};
use super::names::{self, Named};
use super::special::{AddedToken, Finder, Order};
use super::spm;
use super::tokens::{Alphabet, Kind, Tokens, alphabet_bytes, byte_char};
use super::{Codec, Tokenizer};
use crate::error::{Error, Result};
use crate::text::fim::FAMILIES;

/// The vocabulary as GGUF files describe it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocab {
    /// `tokenizer.ggml.model`: `gpt2`, `llama`, ...
    pub model: String,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<String>,
    /// `tokenizer.ggml.tokens`.
    pub tokens: Vec<Vec<u8>>,
    /// `tokenizer.ggml.token_type`.
    pub token_types: Option<Vec<i32>>,
    /// `tokenizer.ggml.scores`.
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.merges`.
    pub merges: Option<Vec<Vec<u8>>>,
    /// `tokenizer.ggml.*_token_id` by the first part of the name: `bos`, `eos`, `unknown`,
    /// `padding`, `eot`, `eom`, `seperator`, `fim_pre`, `fim_suf`, `fim_mid`, `fim_pad`, ...
    pub ids: BTreeMap<String, u32>,
    /// `tokenizer.ggml.add_bos_token` and the like by the last part of their names:
    /// `add_bos_token`, `add_eos_token`, `add_space_prefix`, `remove_extra_whitespaces`.
    pub flags: BTreeMap<String, bool>,
}

/// Roles as files spell them, and as we do.
pub(super) const ALIASES: [(&str, &str); 6] = [
    ("unknown", "unk"),
    ("padding", "pad"),
    ("seperator", "sep"),
    ("prefix", "fim_pre"),
    ("suffix", "fim_suf"),
    ("middle", "fim_mid"),
];

/// Tokens that end a generation, a space between two.
const ENDS: &str = "\
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> \
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> \
    <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[";

/// Tokens that end a turn, a message, or surround a gap in the middle, by their names.
const BY_NAME: [(&str, &str); 5] = [
    (
        "eot",
        "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> \
        [EOT] <｜end▁of▁sentence｜> <end_of_utterance>",
    ),
    ("eom", "<|eom_id|>"),
    ("fim_pad", "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    ("fim_rep", "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    ("fim_sep", "<|file_sep|>"),
];

/// Families of `FAMILIES` whose tokens for a gap llama.cpp knows.
const N_FAMILIES: usize = 8;

/// Tokens that are text to show although files call them control tokens.
const SHOWN: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// Which names count: any, or only those that the file calls special or added.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Names {
    Any,
    /// For files that are right about their tokens.
    Added,
}

/// Finds special tokens by name; `ids` gets those it lacks. Returns the ids that end a generation,
/// ascending. With `Names::Any`, tokens get the kinds that files should give them.
pub(super) fn roles(
    tokens: &mut Tokens,
    ids: &mut BTreeMap<String, u32>,
    names: Names,
) -> Vec<u32> {
    let is_added = |id: &u32| names == Names::Any || tokens.kind(*id) != Kind::Normal;
    let find = |name: &str| tokens.find(name.as_bytes()).filter(is_added);
    let mut kinds = Vec::new();
    let gaps = ["fim_pre", "fim_suf", "fim_mid"].into_iter().enumerate();
    let gaps = gaps.map(|(part, role)| {
        (role, FAMILIES[..N_FAMILIES].iter().find_map(|family| find(family[part])))
    });
    let others = BY_NAME.iter().map(|(role, names)| (*role, names.split(' ').find_map(find)));
    for (role, id) in gaps.chain(others) {
        if let Some(id) = id.filter(|_| !ids.contains_key(role)) {
            ids.insert(role.into(), id);
            kinds.push((id, Kind::Control));
        }
    }
    let known = ["fim_pad", "fim_rep", "fim_sep", "eos", "eot", "eom"];
    let mut eog: Vec<u32> = known.iter().filter_map(|role| ids.get(*role).copied()).collect();
    for id in ENDS.split(' ').filter_map(find) {
        eog.push(id);
        kinds.push((id, Kind::Control));
    }
    kinds.extend(SHOWN.iter().filter_map(|name| find(name)).map(|id| (id, Kind::UserDefined)));
    let has = |name: &str| find(name).filter(|id| eog.contains(id));
    // In the harmony format `<|end|>` ends a message, not the generation.
    let has_calls = has("<|call|>").or(has("<|calls|>")).is_some();
    let is_harmony = has_calls && has("<|return|>").or(has("<|flush|>")).is_some();
    let end = has("<|end|>").filter(|_| is_harmony);
    let is_text = has("<|tool_response>").or(has("<|plamo:eos|>")).is_some();
    let text = has("</s>").filter(|_| is_text);
    kinds.extend(end.map(|id| (id, Kind::UserDefined)));
    kinds.extend(text.map(|id| (id, Kind::Normal)));
    eog.retain(|id| Some(*id) != end && Some(*id) != text);
    eog.sort_unstable();
    eog.dedup();
    if names == Names::Any {
        kinds.into_iter().for_each(|(id, kind)| tokens.set_kind(id, kind));
    }
    eog
}

fn kind(number: i32) -> Kind {
    use Kind::*;
    let all = [Normal, Unknown, Control, UserDefined, Byte];
    all.into_iter().find(|kind| *kind as i32 == number).unwrap_or(Unused)
}

const DAMAGED: &str = "the file is damaged; download or convert it again";

/// Checks lengths and makes the list of tokens.
fn tokens(file: &str, vocab: &GgufVocab, alphabet: Alphabet) -> Result<Tokens> {
    let n = vocab.tokens.len();
    let lens = [
        ("token_type", vocab.token_types.as_ref().map(Vec::len)),
        ("scores", vocab.scores.as_ref().map(Vec::len)),
    ];
    for (key, len) in lens {
        if let Some(len) = len.filter(|len| *len < n) {
            let problem = format!("has {len} entries for {n} tokens");
            return Err(Error::config(file, &format!("tokenizer.ggml.{key}"), problem, DAMAGED));
        }
    }
    if n == 0 || n > (u32::MAX / 4) as usize {
        let problem = format!("has {n} tokens");
        return Err(Error::config(file, "tokenizer.ggml.tokens", problem, DAMAGED));
    }
    let kind = |id: usize| vocab.token_types.as_ref().map_or(Kind::Normal, |list| kind(list[id]));
    let list: Vec<(&[u8], Kind)> =
        vocab.tokens.iter().enumerate().map(|(id, text)| (&text[..], kind(id))).collect();
    Ok(Tokens::new(alphabet, &list))
}

/// Symbols for texts, virtual ones for those that are no tokens, and how they join.
pub(super) struct Symbols<'t> {
    tokens: &'t Tokens,
    pub(super) merges: Merges,
    virtuals: HashMap<Vec<u8>, u32>,
    outputs: Vec<Vec<u32>>,
}

impl<'t> Symbols<'t> {
    pub(super) fn new(tokens: &'t Tokens, n_merges: usize) -> Symbols<'t> {
        let merges = Merges::with_capacity(n_merges);
        Symbols { tokens, merges, virtuals: HashMap::new(), outputs: Vec::new() }
    }

    fn symbol(&mut self, text: &[u8]) -> u32 {
        if let Some(id) = self.tokens.find(text).or_else(|| self.virtuals.get(text).copied()) {
            return id;
        }
        let id = (self.tokens.len() + self.outputs.len()) as u32;
        self.virtuals.insert(text.to_vec(), id);
        // What is no token comes out as its letters, where these are tokens.
        let letters = text.iter().filter_map(|byte| self.tokens.find(&[*byte]));
        self.outputs.push(letters.collect());
        id
    }

    /// The encoder of these symbols; each byte is one, in GPT-2's alphabet.
    pub(super) fn encoder(mut self, file: &str, named: &Named) -> Result<Encoder> {
        let mut symbols = Box::new([0; 256]);
        for byte in 0..=255 {
            let letter = byte_char(byte);
            symbols[usize::from(byte)] = self.symbol(letter.encode_utf8(&mut [0; 4]).as_bytes());
        }
        Ok(Encoder {
            raw: finder(file, self.tokens)?,
            normalized: None,
            nfc: false,
            words: Words::Bytes { stages: named.stages(file)?, symbols },
            merges: self.merges,
            whole: named.ignores_merges().then(|| whole(self.tokens)),
            n_vocab: self.tokens.len() as u32,
            virtuals: self.outputs,
        })
    }
}

/// The tokens to look for in text.
pub(super) fn finder(file: &str, tokens: &Tokens) -> Result<Option<Finder>> {
    let added = |id: u32| {
        let kind = tokens.kind(id);
        let is_special = matches!(kind, Kind::Control | Kind::Unknown);
        // Text is UTF-8: a token that is not cannot be found in it.
        let text = std::str::from_utf8(tokens.text(id)).ok()?;
        (is_special || kind == Kind::UserDefined).then(|| AddedToken {
            id,
            text: text.into(),
            is_special,
            ..AddedToken::default()
        })
    };
    Finder::new(file, Order::Longest, (0..tokens.len() as u32).filter_map(added).collect())
}

fn bytes_encoder(file: &str, tokens: &Tokens, vocab: &GgufVocab) -> Result<Encoder> {
    let Some(list) = &vocab.merges else {
        return Err(Error::config(
            file,
            "tokenizer.ggml.merges",
            "is missing, which a `gpt2` tokenizer needs",
            "convert the model again, or use its tokenizer.json",
        ));
    };
    let named = names::find(file, vocab.pre.as_deref().unwrap_or("default"))?;
    let mut known = Symbols::new(tokens, list.len());
    for (rank, merge) in list.iter().enumerate().take(u32::MAX as usize - 1) {
        // The first letter may be a space, so the separator is looked for after it.
        let at = merge.iter().skip(1).position(|byte| *byte == b' ').map(|at| at + 1);
        if let Some(at) = at {
            let (left, right) = (&merge[..at], &merge[at + 1..]);
            let result = known.symbol(&[left, right].concat());
            let (left, right) = (known.symbol(left), known.symbol(right));
            known.merges.insert_first(left, right, rank as u32, result);
        }
    }
    known.encoder(file, named)
}

/// Every token by the bytes that are its word.
pub(super) fn whole(tokens: &Tokens) -> super::bpe::FoldMap<Vec<u8>, u32> {
    let mut whole = super::bpe::FoldMap::default();
    for id in 0..tokens.len() as u32 {
        let bytes = alphabet_bytes(tokens.text(id));
        whole.extend(bytes.filter(|_| tokens.kind(id) != Kind::Absent).map(|bytes| (bytes, id)));
    }
    whole
}

fn spaces_encoder(file: &str, tokens: &Tokens, vocab: &GgufVocab) -> Result<Encoder> {
    let zeros = || vec![0.0; tokens.len()];
    let scores = vocab.scores.as_ref().map_or_else(|| Cow::Owned(zeros()), Cow::Borrowed);
    let (mut spaces, merges, virtuals) = spm::from_scores(tokens, &scores);
    if vocab.flags.get("add_space_prefix") == Some(&false) {
        spaces.prefix = Prefix::Never;
    }
    spaces.unknown = vocab.ids.get("unk").copied();
    Ok(Encoder {
        raw: finder(file, tokens)?,
        normalized: None,
        nfc: false,
        words: Words::Spaces(spaces),
        merges,
        whole: None,
        n_vocab: tokens.len() as u32,
        virtuals,
    })
}

impl Tokenizer {
    /// Reads the vocabulary of a GGUF file.
    pub(crate) fn from_gguf(file: &str, mut vocab: GgufVocab) -> Result<Tokenizer> {
        let alphabet = match vocab.model.as_str() {
            "gpt2" => Alphabet::Bytes,
            "llama" => Alphabet::Spaces,
            other => {
                return Err(Error::config(
                    file,
                    "tokenizer.ggml.model",
                    format!("tokenizers of the kind {other:?} are not supported"),
                    "supported are gpt2 and llama; use the model's tokenizer.json",
                ));
            }
        };
        let mut tokens = tokens(file, &vocab, alphabet)?;
        let n = tokens.len() as u32;
        for (theirs, ours) in ALIASES {
            if let Some(id) = vocab.ids.remove(theirs) {
                vocab.ids.entry(ours.into()).or_insert(id);
            }
        }
        vocab.ids.retain(|_, id| *id < n);
        let adds_bos = if alphabet == Alphabet::Spaces {
            for (role, id) in [("unk", 0), ("bos", 1), ("eos", 2)] {
                if id < n {
                    vocab.ids.entry(role.into()).or_insert(id);
                }
            }
            true
        } else {
            names::find(file, vocab.pre.as_deref().unwrap_or("default"))?.adds_bos()
        };
        let eog = roles(&mut tokens, &mut vocab.ids, Names::Any);
        let encoder = match alphabet {
            Alphabet::Bytes => bytes_encoder(file, &tokens, &vocab)?,
            _ => spaces_encoder(file, &tokens, &vocab)?,
        };
        let flag = |name: &str, default: bool| vocab.flags.get(name).copied().unwrap_or(default);
        let one = |role: &str, wanted: bool| {
            vocab.ids.get(role).copied().filter(|_| wanted).into_iter().collect::<Vec<u32>>()
        };
        let strips_space = alphabet == Alphabet::Spaces && flag("add_space_prefix", true);
        let codec = Codec::Own(Box::new(encoder));
        Ok(Tokenizer {
            begin: one("bos", flag("add_bos_token", adds_bos)),
            end: one("eos", flag("add_eos_token", false)),
            strips_space,
            scores: vocab.scores,
            pre: vocab.pre,
            ..Tokenizer::new(tokens, codec, vocab.ids, eog)
        })
    }
}
