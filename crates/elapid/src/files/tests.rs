//! Files made by others, and hostile ones, where they lie beside the project.
//!
//! What each hostile file is to end in stands in `cases.jsonl`. A refusal must also be for the
//! reason the file was made for, so messages are looked at too.

use super::TensorFile;
use super::gguf::{Gguf, Value};
use super::safetensors::SafeTensors;
use crate::error::Result;
use crate::tensor::SharedBytes;
use crate::tensor::device::Device;
use crate::tensor::rng::Rng;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where real files lie beside the project; `None`, said aloud, where they do not.
fn realdata() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/realdata");
    if !root.is_dir() {
        eprintln!("skipped: no real files at {}", root.display());
        return None;
    }
    Some(root)
}

fn read(path: &Path) -> SharedBytes {
    Arc::new(std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
}

fn open(path: &Path) -> Result<Box<dyn TensorFile>> {
    let name = path.file_name().unwrap().to_str().unwrap();
    if name.ends_with(".safetensors") {
        Ok(Box::new(SafeTensors::parse(name, read(path))?))
    } else {
        Ok(Box::new(Gguf::parse(name, read(path))?))
    }
}

/// File name and wanted outcome of every hostile file of a kind.
fn cases(root: &Path, kind: &str) -> BTreeMap<String, String> {
    let list = std::fs::read_to_string(root.join("malformed/files/cases.jsonl")).unwrap();
    let cases = list.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let cases = cases.filter(|case| case["kind"] == kind);
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_string();
    cases.map(|case| (text(&case["file"]), text(&case["expect"]))).collect()
}

/// Every file of a kind ends as it should; `decided` says how those end that may end either way,
/// and `reasons` what some of the messages must say.
fn expect_outcomes(kind: &str, decided: &[(&str, &str)], reasons: &[(&str, &str)]) {
    let Some(root) = realdata() else { return };
    let device = Device::cpu(1).unwrap();
    let cases = cases(&root, kind);
    assert!(cases.len() > 40, "{} cases of {kind}", cases.len());
    let named = |list: &[(&str, &str)], file: &str| {
        let stem = Path::new(file).file_stem().unwrap().to_str().unwrap();
        list.iter().find(|pair| pair.0 == stem).map(|pair| pair.1.to_string())
    };
    for (file, expect) in &cases {
        let expect = match expect.as_str() {
            "either" => named(decided, file).unwrap_or_else(|| panic!("{file}: undecided")),
            other => other.to_string(),
        };
        let opened = open(&root.join("malformed/files").join(file));
        let got = match &opened {
            Ok(opened) => {
                for name in opened.names() {
                    let _ = opened.tensor(&device, name);
                }
                "accept".to_string()
            }
            Err(error) => error.report(),
        };
        println!("{file}: {}", got.lines().next().unwrap());
        match expect.as_str() {
            "accept" => assert_eq!(got, "accept", "{file}"),
            _ => assert!(got.contains("\n\nhint: "), "{file}: wanted an error, got {got}"),
        }
        if let Some(reason) = named(reasons, file) {
            assert!(got.contains(&reason), "{file}: wanted `{reason}`, got {got}");
        }
    }
}

#[test]
fn hostile_gguf_files_end_as_they_should() {
    let decided = [
        ("valid_min", "accept"),
        ("header_empty", "accept"),
        ("key_nonutf8", "reject"),
        ("key_nul", "reject"),
        ("key_64k", "reject"),
        ("bool_2", "reject"),
        ("str_nonutf8", "accept"),
        ("arr_nested", "reject"),
        ("align_1", "accept"),
        ("align_1073741824", "reject"),
        ("align_2147483648", "reject"),
        ("align_i32", "reject"),
        ("tensor_name_64", "accept"),
        ("tensor_name_empty", "reject"),
        ("tensor_ndims_0", "accept"),
        ("tensor_dim_0", "accept"),
        ("tensor_gap", "reject"),
        ("tensor_unordered", "accept"),
    ];
    let reasons = [
        ("empty", "is empty"),
        ("fugg", "reversed"),
        ("version_bigendian", "big-endian"),
        ("n_tensors_1e9", "1000000000 tensors"),
        ("key_dup", "comes twice"),
        ("str_len_2p40", "a string of 1099511627776 bytes"),
        ("arr_wrap_u64", "2305843009213693953 u64 values"),
        ("arr_nested_deep", "array of arrays"),
        ("align_33", "`general.alignment` is 33"),
        ("tensor_ndims_5", "5 axes"),
        ("tensor_ne_wrap_small", "too large"),
        ("tensor_type_31", "Q4_0_4_4"),
        ("tensor_q4_k_row32", "no whole Q4_K blocks"),
        ("tensor_off_unaligned", "not a multiple of 32"),
        ("tensor_off_wrap", "of the data"),
        ("tensor_overlap", "begins at byte"),
        ("trunc_223", "inside the padding"),
    ];
    expect_outcomes("gguf", &decided, &reasons);
}

#[test]
fn hostile_safetensors_files_end_as_they_should() {
    let decided = [
        ("dup_key", "reject"),
        ("shape_huge_rank", "reject"),
        ("zero_size_max", "reject"),
        ("dtype_I64", "accept"),
        ("dtype_U8", "accept"),
        ("dtype_BOOL", "accept"),
        ("dtype_F8_E4M3", "accept"),
        ("dtype_F8_E5M2", "accept"),
        ("meta_null", "accept"),
        ("name_empty", "reject"),
        ("many_100k", "accept"),
    ];
    let reasons = [
        ("hlen_0", "the header does not begin with"),
        ("hlen_gt_file", "a header of"),
        ("lfs_pointer", "git-lfs pointer"),
        ("html_404", "a web page"),
        ("pickle", "Python pickle"),
        ("zip_pt", "zip archive"),
        ("symlink_text", "the text of a link"),
        ("dup_key", "comes twice"),
        ("hole", "leaves a gap"),
        ("overlap", "overlaps"),
        ("f4_odd", "whole bytes"),
        ("dtype_unknown", "unknown dtype F128"),
        ("shape_wrap_zero", "too large"),
        ("trailing", "the tensors end at byte"),
    ];
    expect_outcomes("safetensors", &decided, &reasons);
}

#[test]
fn hostile_models_in_sound_containers_can_be_opened() {
    let Some(root) = realdata() else { return };
    let device = Device::cpu(1).unwrap();
    for file in cases(&root, "gguf_model").keys() {
        let opened = open(&root.join("malformed/files").join(file)).unwrap();
        for name in opened.names() {
            opened.tensor(&device, name).unwrap().unwrap();
        }
    }
}

#[test]
fn odd_files_of_others_are_read_or_refused_with_the_reason() {
    let Some(root) = realdata() else { return };
    let mut n_files = 0;
    for (file, want) in [
        ("fugg-magic-v1-llama.gguf", "reversed (`FUGG`)"),
        ("gguf-v1-llama-467382.gguf", "GGUF version 1,"),
        ("gguf-v1-llama-595423.gguf", "GGUF version 1,"),
        ("gguf-v2-falcon.gguf", "0 tensors"),
        ("gguf-v3-bigendian-gpt-2.gguf", "a big-endian GGUF file, version 3"),
        ("gguf-v3-bigendian-llama-spm.gguf", "a big-endian GGUF file, version 3"),
        ("git-lfs-pointer.gguf", "a git-lfs pointer"),
        ("hf2q-tiny_model.safetensors", "5 tensors"),
        ("johnscheuer-146.safetensors", "the text of a link to `/"),
        ("pre-gguf-ggml-vocab.bin", "a `ggjt` file, from before GGUF"),
        ("ratchet-dummy.gguf", "10 tensors"),
        ("ratchet-test.gguf", "1 tensors"),
        ("tensorhawk-leaky.safetensors", "1 tensors"),
        ("tensorhawk-model.gguf", "0 tensors"),
        ("weight-inspect-empty.gguf", "0 tensors"),
        ("weight-inspect-tiny.gguf", "tensor `test.weight.0`: 32768 bytes at 0 of the data"),
        (
            "weight-inspect-tiny.safetensors",
            "the tensors end at byte 32851, the file at byte 32856",
        ),
    ] {
        let got = match open(&root.join("gguf-odd").join(file)) {
            Ok(opened) => format!("{} tensors", opened.names().len()),
            Err(error) => error.report(),
        };
        assert!(got.contains(want), "{file}: wanted `{want}`, got {got}");
        n_files += 1;
    }
    assert_eq!(n_files, std::fs::read_dir(root.join("gguf-odd")).unwrap().count());
}

#[test]
fn values_of_every_kind_written_by_others_are_read() {
    let Some(root) = realdata() else { return };
    let bytes = read(&root.join("gguf-odd/ratchet-dummy.gguf"));
    let gguf = Gguf::parse("ratchet-dummy.gguf", bytes).unwrap();
    let get = |kind: &str| gguf.get(&format!("some.parameter.{kind}")).unwrap();
    assert_eq!(get("uint8"), Value::Int(0x12));
    assert_eq!(get("int8"), Value::Int(-0x13));
    assert_eq!(get("uint16"), Value::Int(0x1234));
    assert_eq!(get("int16"), Value::Int(-0x1235));
    assert_eq!(get("uint32"), Value::Int(0x12345678));
    assert_eq!(get("int32"), Value::Int(-0x12345679));
    assert_eq!(get("uint64"), Value::Int(0x123456789abcdef0));
    assert_eq!(get("int64"), Value::Int(-0x123456789abcdef1));
    assert_eq!(get("float32"), Value::F32(0.123_456_79));
    assert_eq!(get("float64"), Value::F64(0.123_456_789_012_345_68));
    assert_eq!(get("bool"), Value::Bool(true));
    assert_eq!(get("string"), Value::Str(b"hello world"));
    assert_eq!(gguf.ints("some.parameter.arr.i16").unwrap().unwrap(), [1, 2, 3, 4]);
    let floats = gguf.floats("some.parameter.arr.f32").unwrap().unwrap();
    assert_eq!((floats.len(), floats[0]), (3, 3.145));
    let strings = gguf.strings("some.parameter.arr.str").unwrap().unwrap();
    assert_eq!(strings[0], b"hello");
    assert_eq!(gguf.tensors()[0].shape, [9, 4, 10]);
}

#[test]
fn a_vocabulary_of_150_thousand_tokens_is_walked() {
    let Some(root) = realdata() else { return };
    let bytes = read(&root.join("gguf-vocab/ggml-vocab-qwen2.gguf"));
    let gguf = Gguf::parse("qwen2", bytes).unwrap();
    let tokens = gguf.strings("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!(tokens.len(), 151_936);
    assert_eq!(tokens[0], b"!");
    let types = gguf.ints("tokenizer.ggml.token_type").unwrap().unwrap();
    assert_eq!(types.len(), tokens.len());
    assert_eq!(gguf.str("tokenizer.ggml.model").unwrap(), Some("gpt2"));
}

#[test]
fn the_same_weights_come_from_both_containers() {
    let Some(root) = realdata() else { return };
    let dir = root.join("models/stories260K/hf");
    let device = Device::cpu(1).unwrap();
    let gguf = open(&dir.join("stories260K-f32.gguf")).unwrap();
    let st = open(&dir.join("model.safetensors")).unwrap();
    for (ours, theirs) in [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.4.ffn_down.weight", "model.layers.4.mlp.down_proj.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ] {
        let ours = gguf.tensor(&device, ours).unwrap().unwrap();
        let theirs = st.tensor(&device, theirs).unwrap().unwrap();
        assert_eq!(ours.shape(), theirs.shape());
        assert!(ours.to_f32().f32() == theirs.to_f32().f32());
    }
}

/// The first bytes of a file.
struct Cut(Arc<Vec<u8>>, usize);

impl AsRef<[u8]> for Cut {
    fn as_ref(&self) -> &[u8] {
        &self.0[..self.1]
    }
}

/// Opens changed bytes and looks at all they claim to hold; gives them back to be mended.
fn look(bytes: Vec<u8>, device: &Device) -> Vec<u8> {
    let bytes = Arc::new(bytes);
    if let Ok(gguf) = Gguf::parse("m", bytes.clone()) {
        for key in gguf.keys() {
            if let Some(Value::Array(array)) = gguf.get(key) {
                assert_eq!(array.iter().count(), array.len());
            }
        }
        for name in gguf.names() {
            let _ = gguf.tensor(device, name);
        }
    }
    Arc::into_inner(bytes).expect("nobody keeps them")
}

#[test]
fn a_real_gguf_file_that_was_cut_or_changed_is_refused_or_read_without_panic() {
    let Some(root) = realdata() else { return };
    let path = root.join("models/mamba-code-tiny/mamba-code-tiny-f32.gguf");
    let mut bytes = std::fs::read(path).unwrap();
    let device = Device::cpu(1).unwrap();
    let gguf = Gguf::parse("m", Arc::new(bytes.clone())).unwrap();
    let n_header = gguf.tensors().iter().map(|entry| entry.offset).min().unwrap();
    let end = gguf.tensors().iter().map(|entry| entry.offset + entry.n_bytes).max().unwrap();
    let shared = Arc::new(bytes.clone());
    let rng = Rng::new(260, 0);
    let places = (0..4096).chain((0..200).map(|i| rng.below(i, end as u64) as usize));
    for n in places {
        let cut = Gguf::parse("m", Arc::new(Cut(shared.clone(), n)));
        assert!(cut.is_err(), "cut to {n}");
    }
    let flips = (0..512 * 8).chain((0..2000).map(|i| rng.below(i, n_header as u64 * 8) as usize));
    for bit in flips {
        bytes[bit / 8] ^= 1 << (bit % 8);
        bytes = look(bytes, &device);
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
    let n_file = bytes.len() as u64;
    let numbers = [0, 1, 1 << 31, u32::MAX as u64, 1 << 32, i64::MAX as u64, 1 << 63, u64::MAX];
    for at in (0..n_header.min(4096)).step_by(4) {
        let old: [u8; 8] = bytes[at..at + 8].try_into().unwrap();
        for number in numbers.into_iter().chain([n_file, n_file + 1]) {
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            bytes = look(bytes, &device);
        }
        bytes[at..at + 8].copy_from_slice(&old);
    }
}

/// Every place in a JSON value, as pointers.
fn pointers(value: &serde_json::Value, at: &str, list: &mut Vec<String>) {
    let inner: Vec<(String, &serde_json::Value)> = match value {
        serde_json::Value::Object(map) => map.iter().map(|(k, v)| (k.clone(), v)).collect(),
        serde_json::Value::Array(values) => {
            values.iter().enumerate().map(|(idx, v)| (idx.to_string(), v)).collect()
        }
        _ => return,
    };
    for (key, value) in inner {
        let key = key.replace('~', "~0").replace('/', "~1");
        list.push(format!("{at}/{key}"));
        pointers(value, &format!("{at}/{key}"), list);
    }
}

#[test]
fn a_real_safetensors_header_with_any_value_replaced_is_refused() {
    let Some(root) = realdata() else { return };
    let bytes = std::fs::read(root.join("models/mamba-code-tiny/model.safetensors")).unwrap();
    let n_header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let (header, body) = bytes[8..].split_at(n_header);
    let header: serde_json::Value = serde_json::from_slice(header).unwrap();
    let mut places = Vec::new();
    pointers(&header, "", &mut places);
    assert!(places.len() > 100);
    let values = ["null", "true", "-1", "1.5", "1e308", "\"x\"", "[]", "{}"];
    for place in &places {
        for value in values {
            let mut changed = header.clone();
            *changed.pointer_mut(place).unwrap() = serde_json::from_str(value).unwrap();
            let json = changed.to_string();
            let file = [&(json.len() as u64).to_le_bytes(), json.as_bytes(), body].concat();
            let is_metadata = place.starts_with("/__metadata__");
            let opened = SafeTensors::parse("m", Arc::new(file));
            assert!(opened.is_err() || is_metadata, "{place} replaced by {value}");
        }
    }
    let shared = Arc::new(bytes.clone());
    for n in (0..4096).chain([bytes.len() - 1]) {
        assert!(SafeTensors::parse("m", Arc::new(Cut(shared.clone(), n))).is_err(), "cut to {n}");
    }
}
