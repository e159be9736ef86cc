//! Makes the corpus: small sound files of every kind, written by our own writers.
//!
//! Names that begin with `bad-` are refused, all others are accepted. Not here: files of others,
//! which the tests read where they lie beside the project.

#![allow(clippy::unwrap_used)] // our own files can be written

use crate::files::gguf;
use crate::files::package;
use crate::model::Model;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::Config;
use crate::model::export::{Content, Export, Mix, OutFile};
use crate::model::params;
use crate::model::weights::Weights;
use crate::tensor::device::Device;
use crate::tensor::{DType, SharedBytes};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::fuzz_targets as targets;

/// A file of the corpus: target, name, content.
pub type File = (&'static str, String, Vec<u8>);

type Files = BTreeMap<String, SharedBytes>;

/// Every file; `golden` is the folder of golden sets, whose configs are seeds.
pub fn all(golden: &Path) -> Vec<File> {
    let mut list = Vec::new();
    models(&mut list);
    safetensors(&mut list);
    configs(golden, &mut list);
    tokenizers(&mut list);
    adapters(&mut list);
    chats(&mut list);
    list
}

/// Fresh weights as safetensors.
pub fn weights_of(model: &Model) -> Vec<u8> {
    let device = Device::cpu(1).unwrap();
    let weights = Weights::init(&device, model.specs(), 7);
    let places: Vec<_> = weights.ids().zip(model.places()).collect();
    let targets = params::targets(&weights, &places);
    let tensors = targets.iter().map(|target| target.outgoing(&weights, DType::F32)).collect();
    OutFile { name: String::new(), content: Content::SafeTensors(tensors) }.to_vec().unwrap()
}

/// A directory with fresh weights.
fn directory(config: &Value, tokenizer: Option<&Value>) -> Files {
    let model = Model::new(Config::from_json("config.json", &config.to_string()).unwrap());
    let mut files = Files::new();
    files.insert("config.json".into(), Arc::new(config.to_string().into_bytes()));
    files.insert("model.safetensors".into(), Arc::new(weights_of(&model)));
    if let Some(tokenizer) = tokenizer {
        files.insert("tokenizer.json".into(), Arc::new(tokenizer.to_string().into_bytes()));
    }
    files
}

enum Keys {
    All,
    /// Without our own: what another tool writes.
    Foreign,
}

fn gguf_of(files: &Files, mix: Option<Mix>, keys: Keys) -> Vec<u8> {
    let device = Device::cpu(1).unwrap();
    let checkpoint = Checkpoint::from_files("tiny", &|name| Ok(files.get(name).cloned())).unwrap();
    let weights = checkpoint.weights(&device).unwrap();
    let export = Export::gguf(&checkpoint, &weights).unwrap();
    let Content::Gguf(mut metadata, tensors) = export.gguf_content(mix).unwrap() else {
        panic!("not GGUF");
    };
    if matches!(keys, Keys::Foreign) {
        metadata.retain(|(key, _)| !key.starts_with("elapid."));
    }
    let mut all = Vec::new();
    let mut sink = |bytes: &[u8]| {
        all.extend_from_slice(bytes);
        Ok(())
    };
    gguf::write(&metadata, &tensors, &mut sink).unwrap();
    all
}

fn own(n_vocab: usize, d_model: usize, more: Value) -> Value {
    let mut config = json!({"model_type": "elapid", "vocab_size": n_vocab, "d_model": d_model});
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

fn models(list: &mut Vec<File>) {
    let small = json!({"n_head": 2});
    let hybrid = json!({"layers": "jamba", "n_layer": 4, "mamba2": {"d_head": 8, "d_state": 4},
        "attention": small, "dense": {"d_ff": 8}});
    let experts = json!({"layers": ["mamba2", "attention"], "feed_forward": "experts",
        "mamba2": {"d_head": 8, "d_state": 4}, "attention": small,
        "experts": {"n_expert": 4, "n_used": 2, "d_ff": 4, "d_shared": 4}});
    let llama = json!({"layers": ["attention", "attention"], "attention": small,
        "dense": {"d_ff": 8}});
    let qwen3 = json!({"layers": ["attention"], "attention": {"n_head": 2, "qk_norm": true},
        "dense": {"d_ff": 8}});
    let mamba = json!({"layers": ["mamba1", "mamba1"], "feed_forward": "none",
        "mamba1": {"d_state": 4}});
    let mamba2 = json!({"layers": ["mamba2"], "feed_forward": "none",
        "mamba2": {"d_head": 8, "d_state": 4}});
    for (name, more) in [
        ("llama", &llama),
        ("qwen3", &qwen3),
        ("mamba", &mamba),
        ("mamba2", &mamba2),
        ("hybrid", &hybrid),
        ("experts", &experts),
    ] {
        let files = directory(&own(12, 8, more.clone()), None);
        list.push(("gguf", format!("{name}.gguf"), gguf_of(&files, None, Keys::Foreign)));
    }
    let mamba3 = json!({"layers": ["mamba3", "attention"], "attention": small,
        "mamba3": {"d_head": 8, "d_state": 4, "rank": 2, "out_norm": true}, "dense": {"d_ff": 8}});
    let files = directory(&own(12, 8, mamba3), None);
    list.push(("gguf", "mamba3.gguf".into(), gguf_of(&files, None, Keys::All)));
    let files = directory(&own(270, 8, llama.clone()), Some(&byte_level()));
    list.push(("gguf", "bytes.gguf".into(), gguf_of(&files, None, Keys::All)));
    list.push(("package", "directory.elapid".into(), packed(&files)));
    let files = directory(&own(280, 8, mamba), Some(&sentence_piece()));
    list.push(("gguf", "pieces.gguf".into(), gguf_of(&files, None, Keys::Foreign)));
    let files = directory(&own(12, 32, llama.clone()), None);
    let blocks = gguf_of(&files, Mix::from_name("q8_0"), Keys::Foreign);
    list.push(("gguf", "blocks.gguf".into(), blocks));
    let files = directory(&own(12, 8, llama), None);
    let mut inside = Files::new();
    inside.insert("model.gguf".into(), Arc::new(gguf_of(&files, None, Keys::All)));
    list.push(("package", "gguf.elapid".into(), packed(&inside)));
    list.push(("package", "bad-empty.elapid".into(), packed(&Files::new())));
    list.push(("gguf", "bad-no-model.gguf".into(), every_kind()));
}

/// A GGUF file with a value of every kind and no model.
fn every_kind() -> Vec<u8> {
    let string = |bytes: &[u8]| [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat();
    let array = |kind: u32, n_elem: u64, bytes: &[u8]| {
        (9, [&kind.to_le_bytes()[..], &n_elem.to_le_bytes(), bytes].concat())
    };
    let list: [(u32, Vec<u8>); 22] = [
        (0, vec![1]),
        (1, vec![0xff]),
        (2, 2u16.to_le_bytes().into()),
        (3, (-2i16).to_le_bytes().into()),
        (4, 3u32.to_le_bytes().into()),
        (5, (-3i32).to_le_bytes().into()),
        (10, 4u64.to_le_bytes().into()),
        (11, (-4i64).to_le_bytes().into()),
        (6, 0.5f32.to_le_bytes().into()),
        (12, 0.25f64.to_le_bytes().into()),
        (7, vec![1]),
        (8, string(b"text")),
        (8, string(&[0xff])),
        array(0, 2, &[1, 2]),
        array(4, 1, &1u32.to_le_bytes()),
        array(5, 1, &(-1i32).to_le_bytes()),
        array(10, 1, &1u64.to_le_bytes()),
        array(11, 1, &(-1i64).to_le_bytes()),
        array(6, 1, &0.5f32.to_le_bytes()),
        array(12, 1, &0.5f64.to_le_bytes()),
        array(7, 2, &[1, 0]),
        array(8, 2, &[string(b"a"), string(b"")].concat()),
    ];
    let mut all = [&b"GGUF\x03\0\0\0"[..], &0u64.to_le_bytes(), &22u64.to_le_bytes()].concat();
    for (idx, (kind, bytes)) in list.into_iter().enumerate() {
        all.extend(string(format!("key.{idx}").as_bytes()));
        all.extend(kind.to_le_bytes());
        all.extend(bytes);
    }
    all.resize(all.len().next_multiple_of(32), 0);
    all
}

fn packed(files: &Files) -> Vec<u8> {
    let list: Vec<(String, package::OutFile)> = files
        .iter()
        .map(|(name, bytes)| {
            let make: package::OutFile = Box::new(move |sink| sink((**bytes).as_ref()));
            (name.clone(), make)
        })
        .collect();
    let mut all = Vec::new();
    package::write("tiny", &list, &mut |bytes| {
        all.extend_from_slice(bytes);
        Ok(())
    })
    .unwrap();
    all
}

fn safetensors(list: &mut Vec<File>) {
    let file = |header: Value, n_data: usize| {
        let header = header.to_string();
        let length = (header.len() as u64).to_le_bytes();
        [&length[..], header.as_bytes(), &vec![1; n_data]].concat()
    };
    let entry = |dtype: &str, shape: Value, from: usize, to: usize| {
        let offsets = [from, to];
        json!({"dtype": dtype, "shape": shape, "data_offsets": offsets})
    };
    let kinds = json!({
        "__metadata__": {"format": "pt", "made": "here"},
        "a": entry("F32", json!([2, 3]), 0, 24), "b": entry("F64", json!([3]), 24, 48),
        "c": entry("F16", json!([2, 1]), 48, 52), "d": entry("BF16", json!([]), 52, 54),
        "e": entry("I64", json!([1]), 54, 62), "f": entry("I32", json!([2]), 62, 70),
        "g": entry("U8", json!([0, 9]), 70, 70), "h": entry("F4", json!([4]), 70, 72),
    });
    list.push(("safetensors", "kinds.safetensors".into(), file(kinds, 72)));
    list.push(("safetensors", "none.safetensors".into(), file(json!({}), 0)));
    let gap = json!({"a": entry("U8", json!([1]), 1, 2)});
    list.push(("safetensors", "bad-gap.safetensors".into(), file(gap, 2)));
    let shared = json!({"a": entry("U8", json!([2]), 0, 2), "b": entry("U8", json!([2]), 1, 3)});
    list.push(("safetensors", "bad-overlap.safetensors".into(), file(shared, 3)));
    let mamba = json!({"layers": ["mamba1"], "feed_forward": "none"});
    let files = directory(&own(6, 4, mamba), None);
    let model = (*files["model.safetensors"]).as_ref().to_vec();
    list.push(("safetensors", "model.safetensors".into(), model));
}

fn configs(golden: &Path, list: &mut Vec<File>) {
    for entry in std::fs::read_dir(golden).unwrap() {
        let path = entry.unwrap().path();
        let set = path.file_name().unwrap().to_str().unwrap().to_string();
        for (file, end) in [("config.json", ""), ("config.v5.json", ".v5")] {
            let is_alike = !end.is_empty() && !["llama_yarn", "mamba2", "jamba"].contains(&&*set);
            if let Ok(data) = std::fs::read(path.join(file))
                && !is_alike
            {
                list.push(("config", format!("{set}{end}.json"), data));
            }
        }
    }
    let more = json!({"layers": ["mamba1", "mamba2", "short_conv", "mamba3",
            {"mixer": "attention", "feed_forward": "experts"}],
        "mamba2": {"d_head": 8}, "mamba3": {"d_head": 8, "d_state": 6, "rank": 2},
        "attention": {"n_head": 2, "window": 4}, "dense": {"activation": "relu"}});
    list.push(("config", "own.json".into(), own(12, 16, more).to_string().into_bytes()));
    list.push(("config", "bad-family.json".into(), b"{\"model_type\": \"x\"}".to_vec()));
}

/// A letter for each byte, as GPT-2 spells them.
fn letters() -> Vec<String> {
    let is_plain = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    let plain = (0..=255u8).filter(is_plain).map(|byte| char::from(byte).to_string());
    let others = (0x100..0x144).map(|code| char::from_u32(code).unwrap().to_string());
    plain.chain(others).collect()
}

fn added(id: usize, content: &str, special: bool) -> Value {
    json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": special})
}

fn ids(texts: Vec<String>) -> Value {
    let pairs = texts.into_iter().enumerate().map(|(id, text)| (text, json!(id)));
    Value::Object(pairs.collect())
}

fn byte_level() -> Value {
    let mut texts = letters();
    texts.extend(["he", "ll", "hell", "\u{120}w", "or", "on", "12"].map(str::to_string));
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(263, "<|im_start|>", true), added(264, "if(", false)],
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": ids(texts),
            "merges": [["h", "e"], ["l", "l"], ["he", "ll"], ["\u{120}", "w"], ["o", "r"],
                ["o", "n"], ["1", "2"]]},
    })
}

fn sentence_piece() -> Value {
    let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_string).to_vec();
    texts.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    texts.extend(["\u{2581}", "h", "e", "l", "o", "he", "ll", "\u{2581}he"].map(str::to_string));
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [added(0, "<unk>", true), added(1, "<s>", true), added(2, "</s>", true)],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u{2581}"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}]},
        "pre_tokenizer": null,
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>",
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
            "byte_fallback": true, "ignore_merges": false, "vocab": ids(texts),
            "merges": ["h e", "l l", "\u{2581} he"]},
    })
}

fn tokenizers(list: &mut Vec<File>) {
    let mut split = byte_level();
    split["normalizer"] = json!({"type": "NFC"});
    split["model"]["ignore_merges"] = json!(true);
    split["added_tokens"][1]["lstrip"] = json!(true);
    split["added_tokens"][1]["rstrip"] = json!(true);
    split["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "(?i:'s|'t)|\\p{L}+|\\p{N}{1,3}|\\s+(?!\\S)|."},
            "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": false}]});
    let mut meta = sentence_piece();
    meta["normalizer"] = Value::Null;
    meta["pre_tokenizer"] = json!({"type": "Metaspace", "replacement": "\u{2581}",
        "prepend_scheme": "first", "split": false});
    let word_piece = json!({"version": "1.0", "added_tokens": [added(0, "[UNK]", true)],
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "post_processor": null,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "hello": 1, "wor": 2,
                "##ld": 3, "x": 4}}});
    let unigram = json!({"version": "1.0", "added_tokens": [], "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u{2581}",
            "prepend_scheme": "always", "split": true},
        "post_processor": null,
        "decoder": {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always",
            "split": true},
        "model": {"type": "Unigram", "unk_id": 0, "byte_fallback": false,
            "vocab": [["<unk>", 0.0], ["\u{2581}", -1.0], ["he", -2.0], ["llo", -3.0]]}});
    for (name, json) in [
        ("bytes.json", byte_level()),
        ("split.json", split),
        ("pieces.json", sentence_piece()),
        ("metaspace.json", meta),
        ("word_piece.json", word_piece),
        ("unigram.json", unigram),
    ] {
        list.push(("tokenizer", name.into(), json.to_string().into_bytes()));
    }
    let vocab = byte_level()["model"]["vocab"].to_string();
    let merges = "#version: 0.2\nh e\nl l\nhe ll\n\u{120} w\no r\no n\n1 2\n";
    let both = [vocab.as_bytes(), b"\0", merges.as_bytes()].concat();
    list.push(("tokenizer", "merges.bin".into(), both));
    list.push(("tokenizer", "bad-none.json".into(), b"{}".to_vec()));
}

fn adapters(list: &mut Vec<File>) {
    let config = |more: Value| {
        let mut config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4,
            "target_modules": ["q_proj"], "lora_dropout": 0.0, "bias": "none",
            "fan_in_fan_out": false, "use_rslora": false, "use_dora": false,
            "modules_to_save": null, "rank_pattern": {}, "alpha_pattern": {},
            "task_type": "CAUSAL_LM", "init_lora_weights": true});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config.to_string().into_bytes()
    };
    list.push(("adapter", "plain.json".into(), config(json!({}))));
    let patterns = json!({"r": 8, "use_rslora": true, "rank_pattern": {"q_proj": 2, "k_proj": 4},
        "alpha_pattern": {"mixer.q_proj": 1.5}});
    list.push(("adapter", "patterns.json".into(), config(patterns)));
    let both =
        [config(json!({})), vec![0], targets::adapter_tensors(targets::MODULE, 8, 2)].concat();
    list.push(("adapter", "tensors.bin".into(), both));
    for (name, module, width, rank) in [
        ("bad-width.bin", targets::MODULE, 9, 2),
        ("bad-rank.bin", targets::MODULE, 8, 3),
        ("bad-module.bin", "layers.0.mixer.x_proj", 8, 2),
        ("bad-vector.bin", "layers.0.mixer_norm", 8, 2),
    ] {
        let tensors = targets::adapter_tensors(module, width, rank);
        list.push(("adapter", name.into(), [config(json!({})), vec![0], tensors].concat()));
    }
    list.push(("adapter", "bad-dora.json".into(), config(json!({"use_dora": true}))));
}

fn chats(list: &mut Vec<File>) {
    for (name, text) in [
        ("chatml.jinja", CHATML),
        ("turns.jinja", TURNS),
        ("tools.jinja", TOOLS),
        ("language.jinja", LANGUAGE),
        ("bad-cut.jinja", "{% for message in messages %}{{ message"),
    ] {
        list.push(("chat", name.into(), text.as_bytes().to_vec()));
    }
}

const CHATML: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + \
    message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\\n' }}{% endif %}";

const TURNS: &str = "{{ bos_token }}{%- if messages[0].role == 'system' -%}\n  \
    {%- set system = messages[0].content | trim -%}\n  {%- set rest = messages[1:] -%}\n\
    {%- else -%}{%- set system = '' -%}{%- set rest = messages -%}{%- endif -%}\n\
    {%- for m in rest -%}\n  {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}\n    \
    {{- '' if tools else '' -}}\n  {%- endif -%}\n  \
    {{- '[INST] ' ~ system ~ m.content ~ ' [/INST]' \
    if m.role == 'user' else ' ' + (m.content or '') + eos_token -}}\n{%- endfor -%}";

const TOOLS: &str = "{%- macro call(c) -%}{{ c.function.name }}(\
    {{ c.function.arguments | tojson }})\
    {%- endmacro -%}\n{%- set ns = namespace(n=0, seen=[]) -%}\n\
    {%- if tools is defined and tools -%}\n\
    # Tools\n{% for tool in tools %}{{ tool | tojson(indent=2) }}\n{% endfor %}{%- endif -%}\n\
    {%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}\n<{{ m.role }}>\
    {%- if m.content is string -%}\
    {{ m.content }}{%- elif m.content is iterable -%}{%- for part in m.content -%}\
    {{ part.text | default('') }}{%- endfor -%}{%- endif -%}\n{%- if m.tool_calls -%}\
    {%- for c in m.tool_calls -%}{{ call(c) }}{{ ', ' if not loop.last }}{%- endfor -%}\
    {%- endif -%}\
    </{{ m['role'] }}>{%- endfor -%}{{ ns.n }}";

const LANGUAGE: &str = "{#- every corner -#}{% set x = [1, 2.5, 'a', none, true, {'k': (1, 2)}] %}\
    {{ x[1:] | length }} {{ x[::-1] }} {{ x[0] ** 3 // 2 % 5 }} {{ -1 }} {{ 'a' ~ 1 }}\
    {% for i in range(3) if i != 1 %}{{ loop.index }}/{{ loop.length }}{{ loop.cycle('a', 'b') }}\
    {% else %}none{% endfor %}{% filter upper %}abc{% endfilter %}\
    {{ 'abc'.split('b') | join('-') }}\
    {{ 'x' in 'xyz' and not false }}{{ messages | map(attribute='role') | list }}\
    {{ messages | selectattr('role', 'equalto', 'user') | list | length }}{% raw %}{{ }}\
    {% endraw %}\
    {{ '%s %d' % ('a', 3) }}{{ {'b': 1, 'a': 2} | dictsort }}{{ 3.14159 | round(2) }}\
    {% for k, v in {'k': 1}.items() %}{{ k }}={{ v }}{% endfor %}\
    {{ 'A b'.title() | replace('A', 'c') }}\
    {{ 'text'[1] }}{{ x is defined }}{{ (1 if x else 2) }}{% if messages | length > 99 %}\
    {{ raise_exception('too long') }}{% endif %}{{ 'a\\nb' | indent(2) }}{{ '<' | e }}";
