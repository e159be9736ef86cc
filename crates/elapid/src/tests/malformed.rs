//! Damaged and hostile models, larger than seeds: files of the golden sets changed at every place
//! of their headers, and files made by hand, each with the end it should have.
//!
//! Not here: seeded changes by the thousand (`hostile.rs`); what containers and tokenizers alone
//! say of such files, which is tested beside their readers.

use super::{mutate, seeds};
use crate::fuzz_targets as targets;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::Result;
use crate::files::gguf::{Entry, Gguf};
use crate::files::safetensors::SafeTensors;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::Config;
use crate::model::export::{Export, Mix, OutFile};
use crate::model::peft;
use crate::model::{ForwardOptions, Model};
use crate::tape::Tape;
use crate::tensor::SharedBytes;
use crate::tensor::batch::Batch;
use crate::tensor::device::Device;
use crate::tensor::rng::Rng;
use crate::text::tokenizer::Special;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What a model is made of: name and shape of every parameter.
type Table = Vec<(String, Vec<usize>)>;

fn table(checkpoint: Result<Checkpoint>) -> Result<Table> {
    let checkpoint = checkpoint?;
    let weights = checkpoint.weights(&Device::cpu(1)?)?;
    let row = |id| (weights.name(id).to_string(), weights.tensor(id).shape().to_vec());
    Ok(weights.ids().map(row).collect())
}

/// A golden set: its config and weights, and how a changed file of either form is opened.
struct Golden {
    config: Vec<u8>,
    safetensors: Vec<u8>,
    gguf: Vec<u8>,
    table: Table,
}

impl Golden {
    fn open(set: &str) -> Golden {
        let dir = root().join("golden/sets").join(set);
        let read = |file: &str| std::fs::read(dir.join(file)).unwrap();
        let (config, safetensors) = (read("config.json"), read("model.safetensors"));
        let mut golden = Golden { config, safetensors, gguf: Vec::new(), table: Vec::new() };
        golden.gguf = golden.write(None);
        golden.table = golden.directory(golden.safetensors.clone()).unwrap();
        assert_eq!(golden.one_file(golden.gguf.clone()).unwrap(), golden.table);
        golden
    }

    fn checkpoint(&self, weights: Vec<u8>) -> Result<Checkpoint> {
        let weights: SharedBytes = Arc::new(weights);
        Checkpoint::from_files("set", &|name| {
            Ok(match name {
                "config.json" => Some(Arc::new(self.config.clone())),
                "model.safetensors" => Some(weights.clone()),
                _ => None,
            })
        })
    }

    fn directory(&self, weights: Vec<u8>) -> Result<Table> {
        table(self.checkpoint(weights))
    }

    fn one_file(&self, data: Vec<u8>) -> Result<Table> {
        table(Checkpoint::from_gguf("set.gguf", Arc::new(data)))
    }

    /// As GGUF, written by us.
    fn write(&self, mix: Option<Mix>) -> Vec<u8> {
        let checkpoint = self.checkpoint(self.safetensors.clone()).unwrap();
        let weights = checkpoint.weights(&Device::cpu(1).unwrap()).unwrap();
        let export = Export::gguf(&checkpoint, &weights).unwrap();
        let out = OutFile { name: String::new(), content: export.gguf_content(mix).unwrap() };
        out.to_vec().unwrap()
    }

    /// A changed file is refused with a hint, or is the same model.
    fn expect_harmless(&self, what: &str, got: Result<Table>) {
        match got {
            Ok(table) => assert!(table == self.table, "{what}: another model was read"),
            Err(error) => assert!(!error.hint().is_empty(), "{what}: {error}"),
        }
    }
}

const SETS: [&str; 3] = ["llama_gqa_untied", "mamba", "jamba"];

/// Bytes before the first tensor.
fn n_header(gguf: &[u8]) -> usize {
    let file = Gguf::parse("f", Arc::new(gguf.to_vec())).unwrap();
    file.tensors().iter().map(|entry| entry.offset).min().unwrap()
}

fn n_header_of_safetensors(data: &[u8]) -> usize {
    8 + u64::from_le_bytes(data[..8].try_into().unwrap()) as usize
}

/// Cuts, flips and numbers in the header of one file.
fn expect_header(
    golden: &Golden,
    file: &[u8],
    n_header: usize,
    open: &dyn Fn(Vec<u8>) -> Result<Table>,
) {
    let rng = Rng::new(260, 0);
    let cuts = (0..4096.min(file.len())).step_by(3);
    for n in cuts.chain((0..200).map(|i| rng.below(i, file.len() as u64 - 64) as usize)) {
        assert!(open(file[..n].to_vec()).is_err(), "cut to {n}");
    }
    let n_bits = 8 * n_header as u64;
    let first = (0..512 * 8).step_by(3);
    for bit in first.chain((0..1000).map(|i| rng.below(1000 + i, n_bits) as usize)) {
        let mut data = file.to_vec();
        data[bit / 8] ^= 1 << (bit % 8);
        golden.expect_harmless(&format!("bit {bit}"), open(data));
    }
    let n_file = file.len() as u64;
    let numbers =
        [0, 1, 1 << 31, u32::MAX as u64, 1 << 32, i64::MAX as u64, 1 << 63, u64::MAX, n_file];
    for at in (0..n_header.min(2048) - 8).step_by(8) {
        for number in numbers.into_iter().chain([n_file + 1]) {
            let mut data = file.to_vec();
            data[at..at + 8].copy_from_slice(&u64::to_le_bytes(number));
            golden.expect_harmless(&format!("{number} at {at}"), open(data));
        }
    }
}

#[test]
fn a_golden_safetensors_file_changed_in_its_header_is_refused_or_the_same_model() {
    for set in SETS {
        let golden = Golden::open(set);
        let n_header = n_header_of_safetensors(&golden.safetensors);
        let open = |data| golden.directory(data);
        expect_header(&golden, &golden.safetensors, n_header, &open);
    }
}

#[test]
fn a_golden_gguf_file_changed_in_its_header_is_refused_or_the_same_model() {
    for set in SETS {
        let golden = Golden::open(set);
        let open = |data| golden.one_file(data);
        expect_header(&golden, &golden.gguf, n_header(&golden.gguf), &open);
    }
}

/// Where the record of each tensor lies in a GGUF file.
fn records(data: &[u8]) -> Vec<std::ops::Range<usize>> {
    let file = Gguf::parse("f", Arc::new(data.to_vec())).unwrap();
    let first = &file.tensors()[0].name;
    let head = [&(first.len() as u64).to_le_bytes()[..], first.as_bytes()].concat();
    let mut at = data.windows(head.len()).position(|window| window == head).unwrap();
    let record = |entry: &Entry| {
        let begin = at;
        at += 8 + entry.name.len() + 4 + 8 * entry.shape.len() + 4 + 8;
        begin..at
    };
    file.tensors().iter().map(record).collect()
}

#[test]
fn records_of_tensors_that_are_swapped_doubled_or_lost_are_seen() {
    let golden = Golden::open("mamba");
    let file = &golden.gguf;
    let records = records(file);
    let with = |list: &[std::ops::Range<usize>], n_tensors: usize| {
        let mut data = file[..records[0].start].to_vec();
        data[8..16].copy_from_slice(&(n_tensors as u64).to_le_bytes());
        list.iter().for_each(|range| data.extend(&file[range.clone()]));
        data.resize(data.len().next_multiple_of(32), 0);
        data.extend(&file[n_header(file)..]);
        data
    };
    let n = records.len();
    let mut swapped = records.clone();
    swapped.swap(0, n - 1);
    assert_eq!(golden.one_file(with(&swapped, n)).unwrap(), golden.table);
    // The last tensor may come first just as well.
    for idx in 0..n - 1 {
        let (mut doubled, mut lost) = (records.clone(), records.clone());
        doubled.insert(0, records[idx].clone());
        lost.remove(idx);
        for (list, n_tensors) in [(&doubled, n + 1), (&doubled, n), (&lost, n - 1), (&lost, n)] {
            let error = golden.one_file(with(list, n_tensors)).unwrap_err();
            assert!(!error.hint().is_empty(), "{idx}: {error}");
        }
        let text = golden.one_file(with(&doubled, n + 1)).unwrap_err().report();
        assert!(text.contains("comes twice"), "{idx}: {text}");
        let text = golden.one_file(with(&lost, n - 1)).unwrap_err().report();
        let is_seen = text.contains("hold no tensor `") || text.contains("a gap: tensor");
        assert!(is_seen, "{idx}: {text}");
    }
}

#[test]
fn the_header_of_one_file_with_the_data_of_another_is_refused_or_harmless() {
    let golden = Golden::open("llama_gqa_untied");
    let forms = ["f32", "f16", "bf16"].map(|name| golden.write(Mix::from_name(name)));
    for a in &forms {
        for b in &forms {
            let data = [&a[..n_header(a)], &b[n_header(b)..]].concat();
            let is_short = data.len() < a.len();
            assert_eq!(golden.one_file(data).is_err(), is_short);
        }
    }
}

#[test]
fn every_value_of_a_safetensors_header_is_looked_at() {
    let golden = Golden::open("mamba");
    let n_header = n_header_of_safetensors(&golden.safetensors);
    let (head, body) = golden.safetensors.split_at(n_header);
    let framed = |json: &[u8]| [&(json.len() as u64).to_le_bytes(), json, body].concat();
    let values = ["null", "true", "-1", "1.5", "1e308", "\"x\"", "[]", "{}"];
    let json = &head[8..];
    let pairs = mutate::pairs(json);
    assert!(pairs.len() > 40, "{} pairs", pairs.len());
    for (pair, value) in pairs {
        let place = String::from_utf8_lossy(&json[pair.clone()]).into_owned();
        let is_note = place.starts_with("\"__metadata__\"") || place.starts_with("\"format\"");
        let mut all = Vec::new();
        for new in values {
            all.push([&json[..value.start], new.as_bytes(), &json[value.end..]].concat());
        }
        let comma = usize::from(json.get(pair.end) == Some(&b','));
        all.push([&json[..pair.start], &json[pair.end + comma..]].concat());
        all.push([&json[..pair.end], b",", &json[pair.clone()], &json[pair.end..]].concat());
        for json in all {
            let got = golden.directory(framed(&json));
            assert!(is_note || got.is_err(), "{place} became {}", String::from_utf8_lossy(&json));
            golden.expect_harmless(&place, got);
        }
    }
}

// Hostile files made by hand, where they lie beside the project. Containers and tokenizers have
// theirs beside their readers.

fn malformed() -> Option<PathBuf> {
    let dir = root().join("../shared/realdata/malformed/files");
    if !dir.is_dir() {
        eprintln!("skipped: no hostile files at {}", dir.display());
        return None;
    }
    Some(dir)
}

/// Every case of a kind ends as it should; `decided` says how those end that may end either way:
/// a word that the message must hold, or nothing where the file is accepted.
fn expect_cases(kind: &str, decided: &[(&str, &str)], open: &dyn Fn(&Path) -> Result<()>) {
    let Some(dir) = malformed() else { return };
    let list = std::fs::read_to_string(dir.join("cases.jsonl")).unwrap();
    let mut wrong = Vec::new();
    let mut n_cases = 0;
    for line in list.lines() {
        let case: serde_json::Value = serde_json::from_str(line).unwrap();
        if case["kind"] != kind {
            continue;
        }
        n_cases += 1;
        let path = dir.join(case["file"].as_str().unwrap());
        let is_alone = path.parent().unwrap().ends_with(kind);
        let stem = if is_alone { path.file_stem() } else { path.parent().unwrap().file_name() };
        let stem = stem.unwrap().to_str().unwrap();
        let word = decided.iter().find(|pair| pair.0 == stem).map(|pair| pair.1);
        let got = open(&path).map_err(|error| error.report());
        println!("{kind}/{stem}: {}", got.as_ref().err().map_or("accepted", |text| text));
        let is_right = match (case["expect"].as_str().unwrap(), &got, word) {
            ("accept", Ok(()), None) | ("either", Ok(()), Some("")) => true,
            ("reject" | "either", Err(text), Some(word)) => {
                !word.is_empty() && text.contains(word) && !text.ends_with("hint: ")
            }
            _ => false,
        };
        if !is_right {
            wrong.push(format!("{stem}: wanted {} {word:?}, got {got:?}", case["expect"]));
        }
    }
    assert!(n_cases > 0, "no cases of {kind}");
    assert!(wrong.is_empty(), "{} of {n_cases}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn hostile_models_in_gguf_end_as_they_should() {
    let decided = [
        ("no_arch", "`general.architecture`: is missing"),
        ("arch_unknown", "is \"banana\""),
        ("arch_u32", "is the integer 7"),
        ("block_count_0", "`llama.block_count`: 0 is out of range"),
        ("block_count_2", "no tensor `blk.1."),
        ("block_count_2147483648", "2147483648 is out of range"),
        ("block_count_4294967295", "4294967295 is out of range"),
        ("attention_head_count_0", "`llama.attention.head_count`: 0"),
        ("attention_head_count_3", "`llama.attention.head_count`: 3"),
        ("attention_head_count_4294967295", "4294967295 do not divide"),
        ("attention_head_count_kv_0", "`llama.attention.head_count_kv`: 0"),
        ("attention_head_count_kv_3", "3 do not divide 4 heads"),
        ("attention_head_count_kv_8", "8 do not divide 4 heads"),
        ("embedding_length_0", "heads have 0"),
        ("embedding_length_31", "a width of 31"),
        ("embedding_length_64", "heads have 16"),
        ("embedding_length_4294967295", "a width of 4294967295"),
        ("feed_forward_length_0", "`llama.feed_forward_length`: 0"),
        ("feed_forward_length_63", "asks for [63, 32]"),
        ("context_length_0", ""),
        ("context_length_4294967295", ""),
        ("rope_dimension_count_0", ""),
        ("rope_dimension_count_7", "`llama.rope.dimension_count`: is 7"),
        ("rope_dimension_count_64", "is 64, heads have 8"),
        ("vocab_size_0", ""),
        ("vocab_size_299", ""),
        ("vocab_size_4294967295", ""),
        ("heads_missing", "`llama.attention.head_count`: is missing"),
        ("kv_heads_missing", "`blk.0.attn_k.weight`"),
        ("head_count_array", ""),
        ("embedding_u64", ""),
        ("embedding_str", "is the string"),
        ("embedding_f32", "is the f32 32"),
        ("eps_0", "`llama.attention.layer_norm_rms_epsilon`: 0"),
        ("eps_neg", "`llama.attention.layer_norm_rms_epsilon`: -1"),
        ("eps_nan", "epsilon`: is NaN"),
        ("eps_inf", "epsilon`: is inf"),
        ("rope_base_0", "`llama.rope.freq_base`: 0"),
        ("rope_base_neg", "`llama.rope.freq_base`: -10000"),
        ("rope_base_nan", "freq_base`: is NaN"),
        ("tensor_missing", "`blk.0.attn_v.weight`"),
        ("tensor_extra", "`blk.0.mystery.weight`"),
        ("tensor_transposed", "has shape [64, 32]"),
        ("tensor_1d", "has shape [1024]"),
        ("nan_weight", ""),
        ("inf_weight", ""),
        ("no_tokenizer", ""),
        ("tokens_fewer", "has 299 tokens"),
        ("scores_short", "`tokenizer.ggml.scores`"),
        ("types_short", "`tokenizer.ggml.token_type`"),
        ("types_bad", ""),
        ("eos_range", ""),
        ("bos_300", ""),
        ("tokens_dup", ""),
        ("tokens_nonutf8", ""),
        ("tok_model_unknown", "\"zzz\""),
        ("bpe_no_merges", "`tokenizer.ggml.merges`"),
        ("bpe_merges_bad", ""),
        ("bpe_merges_unknown", ""),
        ("token_1mb", ""),
    ];
    expect_cases("gguf_model", &decided, &|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        let data: SharedBytes = Arc::new(std::fs::read(path).unwrap());
        let checkpoint = Checkpoint::from_gguf(name, data)?;
        let device = Device::cpu(1)?;
        let weights = checkpoint.weights(&device)?;
        let tokenizer = checkpoint.tokenizer()?;
        if let Some(tokenizer) = tokenizer {
            let ids = tokenizer.encode_with_begin("a b", Special::Parse)?;
            let n_vocab = checkpoint.model().config().n_vocab;
            assert!(ids.iter().all(|&id| (id as usize) < n_vocab), "{name}: {ids:?}");
        }
        let batch = Batch::from_sequences(&[&[1, 2, 3]]);
        let (tape, options) = (Tape::off(), ForwardOptions::default());
        checkpoint.model().forward(&tape, &weights, &batch, None, options).map(|_| ())
    });
}

/// The directory of a small model with one file exchanged.
fn small(config: &[u8], others: &dyn Fn(&str) -> Option<Vec<u8>>) -> Result<Checkpoint> {
    let ok = std::fs::read(malformed().unwrap().join("config/ok.json")).unwrap();
    let model = Config::from_json("ok.json", str::from_utf8(&ok).unwrap())?;
    let data = seeds::weights_of(&Model::new(model));
    Checkpoint::from_files("dir", &|name| {
        let data = match name {
            "config.json" => Some(config.to_vec()),
            _ => others(name).or_else(|| (name == "model.safetensors").then(|| data.clone())),
        };
        Ok(data.map(|data| Arc::new(data) as SharedBytes))
    })
}

#[test]
fn hostile_configs_end_as_they_should() {
    let decided = [
        ("nan", "config.json: not JSON"),
        ("rope_unknown", "is \"warp\""),
        ("heads_0", "`num_attention_heads`: 0"),
        ("heads_indivisible", "`num_attention_heads`: 5"),
        ("layers_1e9", "`num_hidden_layers`: 1000000000"),
        ("hidden_neg", "`hidden_size`: is -32"),
        ("hidden_str", "`hidden_size`: is \"32\""),
        ("hidden_float", "`hidden_size`: is 32.0"),
        ("vocab_small", "asks for [10, 32]"),
        ("act_unknown", "`hidden_act`: is \"banana\""),
        ("act_gelu", "`hidden_act`: is \"gelu\""),
        ("arch_null", ""),
        ("model_type_missing", "`model_type`: is missing"),
        ("quantized", "`quantization_config`"),
        ("sliding", ""),
        ("bom", "not JSON"),
        ("comment", "not JSON"),
        ("dup", "`vocab_size`: is missing"),
    ];
    expect_cases("config", &decided, &|path| {
        let config = std::fs::read(path).unwrap();
        let text = str::from_utf8(&config).unwrap();
        Config::from_json("config.json", text)?;
        // What only the weights can show.
        match path.ends_with("vocab_small.json") {
            true => small(&config, &|_| None)?.weights(&Device::cpu(1)?).map(|_| ()),
            false => Ok(()),
        }
    });
}

#[test]
fn hostile_lists_of_shards_end_as_they_should() {
    let decided = [
        ("traversal", "not a plain file name"),
        ("absolute", "not a plain file name"),
        ("missing", "model-00001-of-00002.safetensors"),
        ("self", "not a plain file name"),
        ("nonstring", "`a` has no file name"),
        ("no_map", "`weight_map` is empty"),
        ("device", "not a plain file name"),
    ];
    expect_cases("safetensors_index", &decided, &|path| {
        let dir = path.parent().unwrap();
        let config = std::fs::read(malformed().unwrap().join("config/ok.json")).unwrap();
        let lookup = |name: &str| -> Result<Option<SharedBytes>> {
            // A name with a path in it must not come this far.
            assert!(!name.contains('/'), "{name} was asked for");
            Ok(match name {
                "config.json" => Some(Arc::new(config.clone())),
                _ => std::fs::read(dir.join(name)).ok().map(|data| Arc::new(data) as _),
            })
        };
        Checkpoint::from_files("dir", &lookup)?.weights(&Device::cpu(1)?).map(|_| ())
    });
}

#[test]
fn hostile_adapters_end_as_they_should() {
    let decided = [
        ("r_0", "`r`: "),
        ("r_neg", "-1"),
        ("r_1e9", "1000000000"),
        ("type_ia3", "`peft_type`: is \"IA3\""),
        ("dora", "`use_dora`"),
        ("fan", "`fan_in_fan_out`"),
        ("bias_all", "`bias`: is \"all\""),
        ("save", "`modules_to_save`"),
        ("alpha_nan", "NaN"),
        ("no_match", "self_attn.nope.weight"),
        ("init_pissa", "`init_lora_weights`"),
    ];
    expect_cases("adapter", &decided, &|path| {
        let json = std::fs::read_to_string(path).unwrap();
        let config: serde_json::Value = serde_json::from_str(&json).unwrap();
        // As PEFT would have written it: a pair of halves for each module that was named.
        let module = config["target_modules"][0].as_str().unwrap_or("q_proj").to_string();
        let module = format!("model.layers.0.self_attn.{module}");
        let data = Arc::new(targets::adapter_tensors(&module, 32, 4));
        let file = SafeTensors::parse("adapter_model.safetensors", data)?;
        let device = Device::cpu(1)?;
        let ok = std::fs::read(malformed().unwrap().join("config/ok.json")).unwrap();
        let mut weights = small(&ok, &|_| None)?.weights(&device)?;
        let lora = peft::read(&device, ("adapter_config.json", &json), &file)?;
        lora.attach(&mut weights).map(|_| ())
    });
}

#[test]
fn weights_of_llama2_c_are_refused() {
    let decided = [
        ("short", "short.bin: begins with"),
        ("neg_dim", "neg_dim.bin: begins with"),
        ("huge", "huge.bin: begins with"),
        ("heads0", "heads0.bin: begins with"),
        ("magic_v1", "magic_v1.bin: begins with"),
    ];
    expect_cases("llama2c", &decided, &|path| {
        let name = path.file_name().unwrap().to_str().unwrap();
        let data: SharedBytes = Arc::new(std::fs::read(path).unwrap());
        Checkpoint::from_gguf(name, data).map(|_| ())
    });
}
