//! What is done with a stranger's file, one function per kind: the bodies of the fuzz targets and
//! of the test on stable, which both include this file so that they cannot differ.
//!
//! Each takes bytes, goes as far as a person's command would go with them, and returns an error
//! where the engine does. A panic is a bug; so is a broken promise of what was accepted, which is
//! asserted here. Work on what was accepted is bounded by `N_PARAM_MAX` and its like, so that a
//! large but honest file does not stop the search.
//!
//! | function      | bytes are                                                        |
//! |---------------|------------------------------------------------------------------|
//! | `gguf`        | a GGUF file                                                      |
//! | `safetensors` | a safetensors file                                               |
//! | `torch`       | a pytorch_model.bin                                              |
//! | `config`      | a config.json                                                    |
//! | `tokenizer`   | a tokenizer.json; or vocab.json, a zero byte and merges.txt      |
//! | `adapter`     | an adapter_config.json; a zero byte and its safetensors may follow |
//! | `package`     | a package                                                        |
//! | `chat`        | a chat template                                                  |
//!
//! Not here: how bytes are changed (`mutate.rs`), what they begin as (`seeds.rs`).

#![allow(clippy::unwrap_used)] // an accepted file that breaks a promise must panic

use crate::error::Result;
use crate::files::TensorFile;
use crate::files::gguf::{Gguf, Value};
use crate::files::package::Package;
use crate::files::safetensors::SafeTensors;
use crate::files::torch as torch_file;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::{Config, FeedForwardConfig};
use crate::model::peft;
use crate::model::weights::Weights;
use crate::model::{ForwardOptions, Model};
use crate::tape::Tape;
use crate::tensor::SharedBytes;
use crate::tensor::batch::Batch;
use crate::tensor::device::Device;
use crate::text::chat::{ChatOptions, ChatTemplate};
use crate::text::tokenizer::{Special, Tokenizer};
use serde_json::json;
use std::sync::{Arc, LazyLock};

/// Models up to this size are run.
const N_PARAM_MAX: usize = 100_000;
/// States up to this size are made.
const STATE_BYTES_MAX: usize = 1 << 20;
/// Layers and experts up to this are built from a config alone.
const N_PARTS_MAX: usize = 64;

/// Text with what tokenizers trip over: runs, marks, other scripts, half of a special token.
pub const TEXT: &str = " Hello  world\n\t don't 1234 <|im_start|>a</s><s> \u{e9}e\u{301} \
    \u{4f60}\u{597d} \u{1f469}\u{200d}\u{1f4bb} \u{2581}x \u{0}\u{7f} <|im_ if(x){y+=1}  ";

static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::cpu(1).unwrap());

fn shared(data: &[u8]) -> SharedBytes {
    Arc::new(data.to_vec())
}

/// A file, its values and tensors, the model it holds and its tokenizer.
pub fn gguf(data: &[u8]) -> Result<()> {
    let file = Gguf::parse("m.gguf", shared(data))?;
    let keys: Vec<&str> = file.keys().collect();
    for key in keys {
        read_value(&file, key);
    }
    check_layout(&file, data.len());
    for name in file.names() {
        let _ = file.tensor(&DEVICE, name);
        let _ = file.corrections(name);
    }
    let checkpoint = Checkpoint::from_gguf("m.gguf", shared(data))?;
    let _ = checkpoint.chat_template();
    let tokenizer = checkpoint.tokenizer();
    if let Ok(Some(tokenizer)) = &tokenizer {
        use_tokenizer(tokenizer);
    }
    let weights = checkpoint.weights(&DEVICE)?;
    tokenizer?;
    run_model(checkpoint.model(), &weights)
}

/// Asks for the value as every type there is; each must give an answer.
fn read_value(file: &Gguf, key: &str) {
    if let Some(Value::Array(array)) = file.get(key) {
        assert_eq!(array.iter().count(), array.len(), "`{key}` is shorter than it says");
    }
    let _ = (file.str(key), file.size(key), file.float(key), file.bool(key));
    let _ = (file.sizes(key), file.ints(key), file.floats(key), file.strings(key));
}

/// Tensors lie inside the file and share no byte.
fn check_layout(file: &Gguf, n_file: usize) {
    let mut places: Vec<_> =
        file.tensors().iter().map(|entry| (entry.offset, entry.n_bytes, &entry.name)).collect();
    places.retain(|place| place.1 > 0);
    places.sort();
    for (begin, n_bytes, name) in &places {
        assert!(begin + n_bytes <= n_file, "`{name}` ends at {}", begin + n_bytes);
    }
    for pair in places.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "`{}` and `{}`", pair[0].2, pair[1].2);
    }
}

fn n_param(model: &Model) -> usize {
    let n_elem = |shape: &[usize]| shape.iter().fold(1usize, |n, &axis| n.saturating_mul(axis));
    model.specs().iter().fold(0usize, |n, spec| n.saturating_add(n_elem(&spec.shape)))
}

/// Two tokens at once and one more, as generation does it.
fn run_model(model: &Model, weights: &Weights) -> Result<()> {
    let config = model.config();
    if n_param(model) > N_PARAM_MAX || model.state_bytes()[0] > STATE_BYTES_MAX {
        return Ok(());
    }
    let last = config.n_vocab as u32 - 1;
    let (tape, options) = (Tape::off(), ForwardOptions::default());
    let mut states = [model.state(&DEVICE)];
    let first = Batch::from_sequences(&[&[0, last]]);
    model.forward(&tape, weights, &first, Some(&mut states), options)?;
    let next = Batch::continuing(&[(&[last], 2)]);
    let out = model.forward(&tape, weights, &next, Some(&mut states), options)?;
    let logits = model.logits(&tape, weights, &out.hidden);
    assert_eq!(logits.value().shape(), [1, config.n_vocab]);
    Ok(())
}

/// A file and each of its tensors.
pub fn safetensors(data: &[u8]) -> Result<()> {
    let file = SafeTensors::parse("m.safetensors", shared(data))?;
    let mut n_bytes = 0;
    for name in file.names() {
        if let Ok(tensor) = file.tensor(&DEVICE, name) {
            let tensor = tensor.unwrap();
            assert_eq!(Some(tensor.shape()), file.shape(name));
            n_bytes += tensor.n_bytes();
        }
        let _ = file.integers(name);
    }
    assert!(n_bytes <= data.len(), "{n_bytes} bytes of tensors in {}", data.len());
    Ok(())
}

/// A file and each of its tensors, some of which may share their bytes.
pub fn torch(data: &[u8]) -> Result<()> {
    let file = torch_file::parse("pytorch_model.bin", shared(data))?;
    for name in file.names() {
        if let Ok(tensor) = file.tensor(&DEVICE, name) {
            let tensor = tensor.unwrap();
            assert_eq!(Some(tensor.shape()), file.shape(name));
            assert!(tensor.n_bytes() <= data.len(), "`{name}` is larger than the file");
        }
        let _ = file.integers(name);
    }
    Ok(())
}

fn text<'a>(file: &str, data: &'a [u8]) -> Result<&'a str> {
    let wrong = |_| crate::error::Error::format(file, "is not UTF-8", "download it again");
    std::str::from_utf8(data).map_err(wrong)
}

/// Layers and experts of all layers.
fn n_parts(config: &Config) -> usize {
    let n_expert = |layer: &crate::model::config::LayerConfig| match &layer.feed_forward {
        FeedForwardConfig::Experts(experts) => experts.n_expert,
        _ => 0,
    };
    config.layers.iter().map(|layer| 1 + n_expert(layer)).sum()
}

/// A config, the model it describes with fresh weights, and the form it has in GGUF.
pub fn config(data: &[u8]) -> Result<()> {
    let config = Config::from_json("config.json", text("config.json", data)?)?;
    let _ = crate::model::config::gguf::Arch::of(&config);
    if n_parts(&config) > N_PARTS_MAX {
        return Ok(());
    }
    let model = Model::new(config);
    for spec in model.specs() {
        assert!(spec.shape.iter().all(|&axis| axis > 0), "`{}`: {:?}", spec.name, spec.shape);
    }
    if let Ok(arch) = crate::model::config::gguf::Arch::of(model.config()) {
        let _ = crate::model::config::gguf::names(model.config(), arch, model.specs());
    }
    if n_param(&model) > N_PARAM_MAX {
        return Ok(());
    }
    let weights = Weights::init(&DEVICE, model.specs(), 0);
    run_model(&model, &weights)
}

/// A tokenizer, used, and written in the forms it can have.
pub fn tokenizer(data: &[u8]) -> Result<()> {
    let tokenizer = match data.iter().position(|&byte| byte == 0) {
        Some(at) => {
            let files = ["vocab.json", "merges.txt"];
            Tokenizer::from_vocab_merges(files, &data[..at], &data[at + 1..], "gpt-2")?
        }
        None => Tokenizer::from_json("tokenizer.json", data)?,
    };
    use_tokenizer(&tokenizer);
    expect_round_trip(&tokenizer);
    if let Ok(vocab) = tokenizer.to_gguf() {
        assert_eq!(vocab.tokens.len(), tokenizer.n_vocab());
        let again = Tokenizer::from_gguf("m.gguf", vocab);
        again.inspect(use_tokenizer).expect("what we wrote for GGUF is read");
    }
    if let Ok(json) = tokenizer.to_json() {
        let again = Tokenizer::from_json("tokenizer.json", json.as_bytes());
        let again = again.expect("what we wrote as JSON is read");
        assert_eq!(again.n_vocab(), tokenizer.n_vocab());
    }
    Ok(())
}

/// Encodes, decodes and streams; what can be promised of the results is asserted.
fn use_tokenizer(tokenizer: &Tokenizer) {
    let is_own = tokenizer.kind() != "of another kind";
    for special in [Special::Parse, Special::Plain] {
        let Ok(ids) = tokenizer.encode_with_begin(TEXT, special) else { continue };
        let n_vocab = tokenizer.n_vocab();
        assert!(ids.iter().all(|&id| (id as usize) < n_vocab), "an id beyond {n_vocab}");
        for show in [Special::Parse, Special::Plain] {
            let decoded = tokenizer.decode(&ids, show);
            let mut stream = tokenizer.stream().showing(show);
            let mut streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
            streamed.push_str(&stream.finish());
            assert!(!is_own || streamed == decoded, "{decoded:?} came as {streamed:?}");
        }
    }
    // Ids from elsewhere: of no token, and each by itself.
    let n_vocab = tokenizer.n_vocab() as u32;
    let _ = tokenizer.decode(&[u32::MAX, n_vocab, 0], Special::Parse);
    for id in (0..n_vocab.min(8)).chain([n_vocab, u32::MAX]) {
        let _ = (tokenizer.bytes(id), tokenizer.token(id), tokenizer.is_special(id));
    }
    for role in ["bos", "eos", "unk", "pad", "eot", "fim_pre"] {
        assert!(tokenizer.role(role).is_none_or(|id| id < n_vocab), "`{role}` beyond {n_vocab}");
    }
    assert!(tokenizer.eog().iter().all(|&id| id < n_vocab), "an end beyond {n_vocab}");
}

/// Text comes back as it was, where the vocabulary can promise it. Not asked of a GGUF file: a
/// join whose result is no token loses text there, as it does in llama.cpp.
fn expect_round_trip(tokenizer: &Tokenizer) {
    if keeps_bytes(tokenizer)
        && let Ok(ids) = tokenizer.encode(TEXT, Special::Plain)
    {
        assert_eq!(tokenizer.decode(&ids, Special::Parse), TEXT);
    }
}

/// Whether every byte is a token of a byte-level vocabulary that changes no text.
fn keeps_bytes(tokenizer: &Tokenizer) -> bool {
    let is_plain = |json: String| {
        let changes = ["NFC", "\"lstrip\":true", "\"rstrip\":true"];
        let json: String = json.chars().filter(|c| !c.is_ascii_whitespace()).collect();
        !changes.iter().any(|change| json.contains(change))
    };
    let letter = |byte: u8| match byte {
        // GPT-2's alphabet: bytes that print stand for themselves, the others come after them.
        b'!'..=b'~' | 0xa1..=0xac | 0xae.. => char::from(byte),
        0..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap(),
        0x7f..=0xa0 => char::from_u32(0x121 + u32::from(byte) - 0x7f).unwrap(),
        0xad => '\u{143}',
    };
    let is_there = |byte: u8| {
        let letter = letter(byte).to_string();
        let id = tokenizer.id(&letter);
        id.is_some_and(|id| tokenizer.bytes(id) == Some(vec![byte]))
    };
    tokenizer.kind() == "byte-level BPE"
        && (0..=255).all(is_there)
        && tokenizer.to_json().is_ok_and(is_plain)
}

/// A small model for adapters.
static BASE: LazyLock<Model> = LazyLock::new(|| {
    let config = json!({"model_type": "elapid", "vocab_size": 5, "d_model": 8,
        "layers": ["attention"], "attention": {"n_head": 2}, "dense": {"d_ff": 8}});
    Model::new(Config::from_json("config.json", &config.to_string()).unwrap())
});

/// A matrix of `BASE`, 8 by 8.
pub const MODULE: &str = "layers.0.mixer.q_proj";

/// An adapter on a square matrix, as PEFT writes it.
pub fn adapter_tensors(module: &str, width: usize, rank: usize) -> Vec<u8> {
    let n_bytes = 4 * width * rank;
    let entry = |shape: [usize; 2], begin: usize| {
        let offsets = [begin, begin + n_bytes];
        json!({"dtype": "F32", "shape": shape, "data_offsets": offsets})
    };
    let names = ["A", "B"].map(|half| format!("base_model.model.{module}.lora_{half}.weight"));
    let mut header = serde_json::Map::new();
    header.insert(names[0].clone(), entry([rank, width], 0));
    header.insert(names[1].clone(), entry([width, rank], n_bytes));
    let header = serde_json::Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    let data = 0.5f32.to_le_bytes().repeat(2 * width * rank);
    [&length[..], header.as_bytes(), &data].concat()
}

/// An adapter on a small model, which is run with it.
pub fn adapter(data: &[u8]) -> Result<()> {
    let (json, tensors) = match data.iter().position(|&byte| byte == 0) {
        Some(at) => (&data[..at], data[at + 1..].to_vec()),
        None => (data, adapter_tensors(MODULE, 8, 2)),
    };
    let json = text("adapter_config.json", json)?;
    let tensors = SafeTensors::parse("adapter_model.safetensors", Arc::new(tensors))?;
    let mut weights = Weights::init(&DEVICE, BASE.specs(), 1);
    let n_modules =
        peft::read(&DEVICE, ("adapter_config.json", json), &tensors)?.attach(&mut weights)?;
    assert!(n_modules > 0, "an adapter of nothing");
    run_model(&BASE, &weights)
}

/// A package, every byte of it, and every file in it; then the same with a manifest that fits.
pub fn package(data: &[u8]) -> Result<()> {
    let as_it_is = open_package(data);
    let resealed = open_package(&resealed(data));
    assert!(as_it_is.is_err() || resealed.is_ok(), "a seal that was right was made wrong");
    resealed
}

fn open_package(data: &[u8]) -> Result<()> {
    let package = Package::parse("m.elapid", shared(data))?;
    package.verify()?;
    let mut n_bytes = 0;
    for name in package.names() {
        n_bytes += (*package.get(name).expect("a name of the list")).as_ref().len();
    }
    assert!(n_bytes <= data.len(), "{n_bytes} bytes of files in {}", data.len());
    let _ = (package.name(), package.get("no such file"));
    let lookup = |name: &str| Ok(package.get(name));
    let checkpoint = Checkpoint::from_files("m.elapid", &lookup)?;
    let _ = (checkpoint.tokenizer(), checkpoint.chat_template());
    let weights = checkpoint.weights(&DEVICE)?;
    run_model(checkpoint.model(), &weights)
}

/// The bytes with the hash of their manifest made right: else no change to a manifest would ever
/// be read.
fn resealed(data: &[u8]) -> Vec<u8> {
    let mut data = data.to_vec();
    let Some(trailer) = data.len().checked_sub(64) else { return data };
    let number = |at: usize| {
        let bytes = data[trailer + at..trailer + at + 8].try_into().unwrap();
        usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX)
    };
    let (begin, n_bytes) = (number(0), number(8));
    let end = begin.checked_add(n_bytes).filter(|&end| end <= trailer);
    if let Some(end) = end {
        let hash = *blake3::hash(&data[begin..end]).as_bytes();
        data[trailer + 16..trailer + 48].copy_from_slice(&hash);
    }
    data
}

/// A template with the messages of a talk with tools.
pub fn chat(data: &[u8]) -> Result<()> {
    let template = ChatTemplate::new("chat_template.jinja", text("chat_template.jinja", data)?)?;
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <b>\u{e9}\u{4f60}</b>\n"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1.5}}}]},
        {"role": "tool", "name": "f", "content": "[1, 2]"},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ]);
    let messages: Vec<_> =
        messages.as_array().unwrap().iter().map(|m| m.as_object().unwrap().clone()).collect();
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "number"}}}}}]);
    let mut options = ChatOptions {
        add_generation_prompt: true,
        bos_token: Some("<s>".into()),
        eos_token: Some("</s>".into()),
        ..ChatOptions::default()
    };
    let plain = template.render(&messages[..2], &options);
    options.tools = Some(tools);
    let _ = template.render(&messages, &options);
    let _ = template.render(&[], &ChatOptions::default());
    plain.map(|_| ())
}
