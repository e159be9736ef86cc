//! Safetensors, read from bytes and written.
//!
//! Eight bytes of header length (little-endian), a JSON header, then the data. Every length is
//! checked against the bytes that are there before it is used; tensors stay where they are. The
//! tensors fill the data without gap or overlap. Where the format leaves room we decided:
//!
//! | case                                     | reading                                      |
//! |------------------------------------------|----------------------------------------------|
//! | white space around the header            | accepted                                     |
//! | a name or a metadata key that comes twice| refused                                      |
//! | an empty name                            | refused                                      |
//! | `__metadata__` that is null              | accepted                                     |
//! | over 64 axes                             | refused, as NumPy does                       |
//! | an axis of length 0                      | accepted, if the product of the others fits  |
//! | dtypes that are no weights               | accepted; refused by name when asked for     |
//! | F64                                      | handed out as f32                            |
//!
//! Files are laid out as the Rust crate `safetensors` lays them out: the header padded with spaces
//! to a multiple of 8; tensors by dtype, the widest first, then by name, so that all are aligned.

use crate::error::{Error, Result};
use crate::files::foreign::{self, Wanted};
use crate::files::{Outgoing, Pairs, Sink, TensorFile};
use crate::tensor::device::Device;
use crate::tensor::{DType, SharedBytes, Tensor};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

const METADATA: &str = "__metadata__";
/// The metadata of weights for PyTorch, which transformers asks for.
pub const FORMAT: [(&str, &str); 1] = [("format", "pt")];
const N_AXES_MAX: usize = 64;

/// The format allows no longer header.
const HEADER_MAX: u64 = 100_000_000;

pub struct SafeTensors {
    file: String,
    bytes: SharedBytes,
    entries: BTreeMap<String, Entry>,
    metadata: BTreeMap<String, String>,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    /// As the file says it: F32, I64, ...
    pub dtype: String,
    pub shape: Vec<usize>,
    /// Bytes of the whole file.
    pub begin: usize,
    pub end: usize,
}

#[derive(serde::Deserialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

fn n_bits_of(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F64" | "I64" | "U64" | "C64" => 64,
        "F32" | "I32" | "U32" => 32,
        "F16" | "BF16" | "I16" | "U16" => 16,
        "BOOL" | "U8" | "I8" => 8,
        "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => 8,
        "F6_E2M3" | "F6_E3M2" => 6,
        "F4" => 4,
        _ => return None,
    })
}

impl SafeTensors {
    /// Tensors that were found in a file of another format.
    pub(super) fn of(
        file: &str,
        bytes: SharedBytes,
        entries: BTreeMap<String, Entry>,
    ) -> SafeTensors {
        SafeTensors { file: file.into(), bytes, entries, metadata: BTreeMap::new() }
    }

    /// Reads the header; `file` is the name for messages.
    pub fn parse(file: &str, bytes: SharedBytes) -> Result<SafeTensors> {
        let data = (*bytes).as_ref();
        let fail = |problem: String| {
            Error::format(file, problem, "the file may be cut short or of another format")
        };
        // A file that does not even begin well may be something else we can name.
        let strange = |problem: String| {
            foreign::explain(file, data, Wanted::SafeTensors).unwrap_or_else(|| fail(problem))
        };
        let Some((length, rest)) = data.split_first_chunk::<8>() else {
            return Err(strange(format!("{} bytes are too few for a header", data.len())));
        };
        let length = u64::from_le_bytes(*length);
        if length > HEADER_MAX || length > rest.len() as u64 {
            let there = rest.len();
            return Err(strange(format!("a header of {length} bytes, {there} bytes follow")));
        }
        let (header, body) = rest.split_at(length as usize);
        if header.trim_ascii_start().first() != Some(&b'{') {
            return Err(strange("the header does not begin with `{`".into()));
        }
        let bad = |error: serde_json::Error| fail(format!("header: {error}"));
        let Pairs(fields) = serde_json::from_slice::<Pairs<&RawValue>>(header).map_err(bad)?;
        let (mut entries, mut metadata) = (BTreeMap::new(), BTreeMap::new());
        let mut seen = BTreeSet::new();
        for (name, json) in fields {
            if name.is_empty() || !seen.insert(name.clone()) {
                return Err(fail(format!("tensor `{name}`: the name is empty, or comes twice")));
            }
            let bad = |error: serde_json::Error| fail(format!("header: `{name}`: {error}"));
            if name == METADATA {
                let pairs: Option<Pairs<String>> = serde_json::from_str(json.get()).map_err(bad)?;
                for (key, value) in pairs.map_or(Vec::new(), |pairs| pairs.0) {
                    let twice = format!("metadata `{key}` comes twice");
                    if metadata.insert(key, value).is_some() {
                        return Err(fail(twice));
                    }
                }
                continue;
            }
            let entry = serde_json::from_str(json.get()).map_err(bad)?;
            let entry = read_entry(entry, data.len() - body.len(), body.len())
                .map_err(|problem| fail(format!("tensor `{name}`: {problem}")))?;
            entries.insert(name, entry);
        }
        let this = SafeTensors { file: file.into(), bytes: bytes.clone(), entries, metadata };
        this.check_layout(data.len() - body.len(), data.len()).map_err(fail)?;
        Ok(this)
    }

    /// Tensors must fill the data one after the other: no gap, no overlap.
    fn check_layout(&self, begin: usize, end: usize) -> std::result::Result<(), String> {
        let mut places: Vec<_> =
            self.entries.iter().map(|(name, e)| (e.begin, e.end, name)).collect();
        places.sort();
        let mut at = begin;
        for (begin, end, name) in places {
            if begin != at {
                let what = if begin < at { "overlaps" } else { "leaves a gap after" };
                return Err(format!("tensor `{name}` at byte {begin} {what} byte {at}"));
            }
            at = end;
        }
        if at != end {
            return Err(format!("the tensors end at byte {at}, the file at byte {end}"));
        }
        Ok(())
    }

    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.metadata.get(key).map(String::as_str)
    }

    fn data(&self, entry: &Entry) -> &[u8] {
        &(*self.bytes).as_ref()[entry.begin..entry.end]
    }

    pub fn shapes(&self) -> impl Iterator<Item = &[usize]> {
        self.entries.values().map(|entry| entry.shape.as_slice())
    }

    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| entry.shape.as_slice())
    }

    /// A tensor of doubles, which weights never are.
    #[cfg(test)]
    pub fn doubles(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        assert_eq!(entry.dtype, "F64", "{name}");
        Ok(Some(
            self.data(entry).as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect(),
        ))
    }

    pub fn integers(&self, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let data = self.data(entry);
        let numbers = match entry.dtype.as_str() {
            "I64" => data.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
            "I32" => data.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
            other => {
                let problem = format!("tensor `{name}` is {other}");
                return Err(Error::format(&self.file, problem, "token ids are I64 or I32"));
            }
        };
        Ok(Some(numbers))
    }
}

impl TensorFile for SafeTensors {
    fn file(&self) -> &str {
        &self.file
    }

    fn names(&self) -> Vec<&str> {
        self.entries.keys().map(String::as_str).collect()
    }

    /// A tensor of floats, sharing the bytes of the file; F64 is rounded to f32.
    fn tensor(&self, device: &Device, name: &str) -> Result<Option<Tensor>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let dtype = match entry.dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            "F64" => {
                let mut tensor = Tensor::uninit(device, &entry.shape);
                for (y, x) in tensor.f32_mut().iter_mut().zip(self.data(entry).as_chunks().0) {
                    *y = f64::from_le_bytes(*x) as f32;
                }
                return Ok(Some(tensor));
            }
            other => {
                let problem = format!("tensor `{name}` is {other}");
                return Err(Error::format(&self.file, problem, "weights are F32, F16 or BF16"));
            }
        };
        let (shape, begin) = (&entry.shape, entry.begin);
        Ok(Some(Tensor::from_shared(device, shape, dtype, self.bytes.clone(), begin)))
    }
}

fn read_entry(
    entry: HeaderEntry,
    body_begin: usize,
    n_body: usize,
) -> std::result::Result<Entry, String> {
    let HeaderEntry { dtype, shape, data_offsets: [begin, end] } = entry;
    let width = n_bits_of(&dtype).ok_or_else(|| format!("unknown dtype {dtype}"))?;
    if shape.len() > N_AXES_MAX {
        return Err(format!("{} axes, at most {N_AXES_MAX} are allowed", shape.len()));
    }
    // Empty axes count as 1 here, so that no product of axes overflows later.
    let n_bits = shape.iter().try_fold(width, |n, &axis| n.checked_mul(axis.max(1)));
    let n_bits = n_bits.filter(|n| isize::try_from(n / width.min(8)).is_ok());
    let n_bits = n_bits.ok_or_else(|| format!("shape {shape:?} is too large"))?;
    let n_bits = if shape.contains(&0) { 0 } else { n_bits };
    if !n_bits.is_multiple_of(8) {
        return Err(format!("shape {shape:?} of {dtype} does not fill whole bytes"));
    }
    if begin > end || end > n_body as u64 {
        return Err(format!("bytes {begin}..{end} of {n_body}"));
    }
    let (n_bytes, held) = (n_bits / 8, end - begin);
    if held != n_bytes {
        return Err(format!("shape {shape:?} takes {n_bytes} bytes, data_offsets hold {held}"));
    }
    Ok(Entry {
        dtype,
        shape: shape.iter().map(|&axis| axis as usize).collect(),
        begin: body_begin + begin as usize,
        end: body_begin + end as usize,
    })
}

/// Name in files, and the place in the order of the data.
fn out_dtype(tensor: &Outgoing) -> std::result::Result<(&'static str, u8), String> {
    match tensor.dtype {
        DType::F32 => Ok(("F32", 0)),
        DType::BF16 => Ok(("BF16", 1)),
        DType::F16 => Ok(("F16", 2)),
        DType::U32 | DType::Block(_) => {
            let (name, dtype) = (&tensor.name, tensor.dtype.name());
            Err(format!("tensor `{name}` is {dtype}, which only GGUF holds"))
        }
    }
}

/// The header with its length before it; tensors come in the order of the data.
fn header(
    metadata: &[(&str, &str)],
    tensors: &[&Outgoing],
) -> std::result::Result<Vec<u8>, String> {
    let (mut fields, mut at) = (Map::new(), 0u64);
    let pairs = metadata.iter().map(|(key, value)| (key.to_string(), json!(value)));
    fields.insert(METADATA.into(), Value::Object(pairs.collect()));
    for tensor in tensors {
        let (name, shape) = (&tensor.name, &tensor.shape);
        let end = out_n_bytes(tensor).and_then(|n| at.checked_add(n));
        let end = end.ok_or_else(|| format!("tensor `{name}`: shape {shape:?} is too large"))?;
        let dtype = out_dtype(tensor)?.0;
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]});
        if name.is_empty() || fields.insert(name.clone(), entry).is_some() {
            return Err(format!("tensor `{name}`: the name is empty, taken or comes twice"));
        }
        at = end;
    }
    let mut json = Value::Object(fields).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    if json.len() as u64 > HEADER_MAX {
        return Err(format!("a header of {} bytes, at most {HEADER_MAX} are allowed", json.len()));
    }
    Ok([&(json.len() as u64).to_le_bytes()[..], &json].concat())
}

fn out_n_bytes(tensor: &Outgoing) -> Option<u64> {
    let n_elem = tensor.shape.iter().try_fold(1usize, |n, &axis| n.checked_mul(axis.max(1)));
    let n_bytes = tensor.dtype.n_bytes(n_elem?)?;
    Some(if tensor.shape.contains(&0) { 0 } else { n_bytes as u64 })
}

fn refuse(problem: String) -> Error {
    let problem = format!("writing safetensors: {problem}");
    Error::input(problem, "safetensors hold F32, F16 and BF16 under names that differ")
}

/// Tensors in the order of the data.
fn ordered<'a, 'b>(tensors: &'a [Outgoing<'b>]) -> Vec<&'a Outgoing<'b>> {
    let mut ordered: Vec<&Outgoing> = tensors.iter().collect();
    ordered.sort_by_key(|tensor| (out_dtype(tensor).map_or(0, |dtype| dtype.1), &tensor.name));
    ordered
}

/// The bytes of each tensor in the file that `write` makes.
pub fn places<'a>(
    metadata: &[(&str, &str)],
    tensors: &'a [Outgoing],
) -> Result<Vec<(&'a str, Range<u64>)>> {
    let ordered = ordered(tensors);
    let mut at = header(metadata, &ordered).map_err(refuse)?.len() as u64;
    let mut place = |tensor: &&'a Outgoing| {
        let begin = at;
        at += out_n_bytes(tensor).unwrap_or_default();
        (tensor.name.as_str(), begin..at)
    };
    Ok(ordered.iter().map(&mut place).collect())
}

/// Writes a whole file. What cannot be written is refused before the first byte.
pub fn write(metadata: &[(&str, &str)], tensors: &[Outgoing], sink: &mut Sink) -> Result<()> {
    let ordered = ordered(tensors);
    sink(&header(metadata, &ordered).map_err(refuse)?)?;
    for tensor in ordered {
        let bytes = (tensor.bytes)()?;
        let (name, want) = (&tensor.name, out_n_bytes(tensor).unwrap_or_default());
        if bytes.len() as u64 != want {
            let got = bytes.len();
            return Err(refuse(format!("tensor `{name}` takes {want} bytes, {got} were made")));
        }
        sink(&bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn file(header: &str, n_data: usize) -> Result<SafeTensors> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend((0..n_data).map(|i| i as u8));
        SafeTensors::parse("m.safetensors", Arc::new(bytes))
    }

    fn problem(header: &str, n_data: usize) -> String {
        file(header, n_data).err().unwrap().report()
    }

    #[test]
    fn a_good_file_is_read_in_place() {
        let header = r#"{"__metadata__":{"format":"pt"},
            "a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},
            "b":{"dtype":"I64","shape":[1],"data_offsets":[8,16]}}"#;
        let st = file(header, 16).unwrap();
        assert_eq!(st.names(), ["a", "b"]);
        let device = Device::cpu(1).unwrap();
        let a = st.tensor(&device, "a").unwrap().unwrap();
        assert_eq!(a.f32()[0].to_le_bytes(), [0, 1, 2, 3]);
        assert_eq!(st.integers("b").unwrap().unwrap()[0].to_le_bytes()[0], 8);
        assert!(st.tensor(&device, "b").is_err());
    }

    #[test]
    fn hostile_headers_get_errors_that_name_the_tensor_and_the_numbers() {
        let entry = |shape: &str, offsets: &str| {
            format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        assert!(problem(&entry("[3]", "[0,8]"), 8).contains("takes 12 bytes, data_offsets hold 8"));
        assert!(problem(&entry("[2]", "[0,8]"), 4).contains("tensor `a`: bytes 0..8 of 4"));
        assert!(problem(&entry("[2]", "[8,0]"), 8).contains("bytes 8..0 of 8"));
        assert!(problem(&entry("[2]", "[0,8]"), 9).contains("end at byte"));
        assert!(problem(&entry("[4611686018427387904]", "[0,8]"), 8).contains("too large"));
        let twice = r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
                        "a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#;
        assert!(problem(twice, 2).contains("tensor `a`: the name is empty, or comes twice"));
        let overlap = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
                          "b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
        assert!(problem(overlap, 3).contains("tensor `b`"));
        let gap = overlap.replace("[1,3]", "[3,5]");
        assert!(problem(&gap, 5).contains("leaves a gap after"));
        assert!(problem(&entry("[1]", "[4,8]"), 8).contains("leaves a gap after"));
        assert!(problem("[]", 0).contains("does not begin with"));
        let huge = SafeTensors::parse("m", Arc::new(u64::MAX.to_le_bytes().to_vec()));
        assert!(huge.err().unwrap().report().contains("a header of 18446744073709551615 bytes"));
    }

    fn outgoing<'a>(name: &str, shape: &[usize], dtype: DType, fill: u8) -> Outgoing<'a> {
        let n_bytes = dtype.n_bytes(shape.iter().product()).unwrap();
        let make = move || Ok(vec![fill; n_bytes].into());
        Outgoing { name: name.into(), shape: shape.into(), dtype, bytes: Box::new(make) }
    }

    fn written(tensors: &[Outgoing]) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        write(&FORMAT, tensors, &mut |bytes| {
            out.extend(bytes);
            Ok(())
        })?;
        Ok(out)
    }

    #[test]
    fn a_file_is_laid_out_as_the_crate_does() {
        let tensors = [
            outgoing("c", &[3], DType::F16, 1),
            outgoing("b\n\"", &[], DType::BF16, 2),
            outgoing("z", &[2, 1], DType::F32, 3),
            outgoing("a", &[1], DType::F32, 4),
            outgoing("e", &[0, 5], DType::BF16, 5),
        ];
        let bytes = written(&tensors).unwrap();
        let want = concat!(
            r#"{"__metadata__":{"format":"pt"},"#,
            r#""a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"#,
            r#""z":{"dtype":"F32","shape":[2,1],"data_offsets":[4,12]},"#,
            r#""b\n\"":{"dtype":"BF16","shape":[],"data_offsets":[12,14]},"#,
            r#""e":{"dtype":"BF16","shape":[0,5],"data_offsets":[14,14]},"#,
            r#""c":{"dtype":"F16","shape":[3],"data_offsets":[14,20]}}"#
        );
        let n_header = want.len().next_multiple_of(8);
        assert_eq!(bytes[..8], (n_header as u64).to_le_bytes());
        assert_eq!(str::from_utf8(&bytes[8..8 + n_header]).unwrap(), format!("{want:n_header$}"));
        assert_eq!(
            bytes[8 + n_header..],
            [4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1]
        );
        let st = SafeTensors::parse("m", Arc::new(bytes)).unwrap();
        assert_eq!(st.names(), ["a", "b\n\"", "c", "e", "z"]);
        let empty = written(&[]).unwrap();
        assert_eq!(empty, b"\x20\0\0\0\0\0\0\0{\"__metadata__\":{\"format\":\"pt\"}}");
    }

    #[test]
    fn what_safetensors_cannot_hold_is_refused_before_the_first_byte() {
        let refused = |tensors: &[Outgoing]| {
            let result = write(&FORMAT, tensors, &mut |_| panic!("nothing is written"));
            result.unwrap_err().report()
        };
        let q4k = DType::Block(crate::tensor::quant::BlockType::Q4K);
        let one = |name: &str| outgoing(name, &[1], DType::F32, 0);
        assert!(refused(&[outgoing("q", &[256], q4k, 0)]).contains("tensor `q` is q4_k"));
        assert!(refused(&[one("a"), one("a")]).contains("tensor `a`: the name is"));
        assert!(refused(&[one("")]).contains("the name is empty"));
        assert!(refused(&[one("__metadata__")]).contains("`__metadata__`"));
        let huge = Outgoing { shape: vec![usize::MAX, 2], ..one("h") };
        assert!(refused(&[huge]).contains("is too large"));
        let short = Outgoing { shape: vec![2], ..one("s") };
        let text = written(&[short]).unwrap_err().report();
        assert!(text.contains("`s` takes 8 bytes, 4 were made"), "{text}");
    }

    #[test]
    fn doubles_are_handed_out_as_f32() {
        let mut bytes = SHORT_F64.len().to_le_bytes().to_vec();
        bytes.extend(SHORT_F64.as_bytes());
        bytes.extend([0.1f64, -2.5].map(f64::to_le_bytes).concat());
        let st = SafeTensors::parse("m", Arc::new(bytes)).unwrap();
        let tensor = st.tensor(&Device::cpu(1).unwrap(), "a").unwrap().unwrap();
        assert_eq!((tensor.shape(), tensor.f32()), (&[2][..], &[0.1, -2.5][..]));
    }

    const SHORT_F64: &str = r#" {"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}"#;

    #[test]
    fn odd_headers_are_read_as_the_table_says() {
        let one = |dtype: &str, shape: &str, end: usize| {
            let entry =
                format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}"#);
            file(&format!(r#"{{"a":{entry}}}"#), end)
        };
        for (dtype, end) in [("F4", 4), ("F6_E2M3", 6), ("F8_E8M0", 8), ("C64", 64), ("U16", 16)] {
            let st = one(dtype, "[2,4]", end).unwrap();
            let text = st.tensor(&Device::cpu(1).unwrap(), "a").unwrap_err().report();
            assert!(text.contains(&format!("tensor `a` is {dtype}")), "{text}");
        }
        let text = |result: Result<SafeTensors>| result.err().unwrap().report();
        assert!(text(one("F4", "[3]", 1)).contains("[3] of F4 does not fill whole bytes"));
        assert!(text(one("F32", &format!("{:?}", [1; 65]), 4)).contains("65 axes, at most 64"));
        let max = usize::MAX;
        assert!(text(one("F32", &format!("[{max},{max},0]"), 0)).contains("too large"));
        assert!(text(one("F32", &format!("[0,{max},{max}]"), 0)).contains("too large"));
        one("F32", "[3,0]", 0).unwrap();
        file("\n {} ", 0).unwrap();
        file(r#"{"__metadata__":null}"#, 0).unwrap();
        let twice = r#"{"__metadata__":{"a":"1"},"__metadata__":{"b":"1"}}"#;
        assert!(problem(twice, 0).contains("`__metadata__`: the name is empty, or comes twice"));
        assert!(problem(r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0).contains("`a` comes twice"));
        assert!(problem(r#"{"__metadata__":{"a":1}}"#, 0).contains("`__metadata__`: invalid type"));
        assert!(problem(r#"{"w":{"dtype":"F32","shape":[-1]}}"#, 0).contains("`w`: invalid value"));
        let pickle = SafeTensors::parse("m", Arc::new(b"\x80\x02}q\x00.".to_vec()));
        assert!(text(pickle).contains("a Python pickle"));
        // 640 bytes of header: the length begins like a pickle and is none.
        file(&format!("{:640}", "{}"), 0).unwrap();
    }
}
