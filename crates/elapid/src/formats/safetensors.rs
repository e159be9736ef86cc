//! Reads a safetensors file from its bytes.
//!
//! Eight bytes of header length (little-endian), a JSON header, then the data. Every length is
//! checked against the bytes that are there before it is used; tensors stay where they are.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::formats::Pairs;
use crate::tensor::{DType, SharedBytes, Tensor};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The format allows no longer header.
const HEADER_MAX: u64 = 100_000_000;

/// An open file.
pub struct SafeTensors {
    file: String,
    bytes: SharedBytes,
    entries: BTreeMap<String, Entry>,
}

/// One tensor, by its place in the file.
#[derive(Clone, Debug)]
struct Entry {
    /// As the file says it: F32, I64, ...
    dtype: String,
    shape: Vec<usize>,
    /// Bytes of the whole file.
    begin: usize,
    end: usize,
}

#[derive(Deserialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

fn n_bytes_of(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F64" | "I64" | "U64" => 8,
        "F32" | "I32" | "U32" => 4,
        "F16" | "BF16" | "I16" | "U16" => 2,
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => 1,
        _ => return None,
    })
}

impl SafeTensors {
    /// Reads the header; `file` is the name for messages.
    pub fn parse(file: &str, bytes: SharedBytes) -> Result<SafeTensors> {
        let data = (*bytes).as_ref();
        let fail = |problem: String| {
            Error::format(file, problem, "the file may be cut short or of another format")
        };
        let Some((length, rest)) = data.split_first_chunk::<8>() else {
            return Err(fail(format!("{} bytes are too few for a header", data.len())));
        };
        let length = u64::from_le_bytes(*length);
        if length > HEADER_MAX || length > rest.len() as u64 {
            let there = rest.len();
            return Err(fail(format!("a header of {length} bytes, {there} bytes follow")));
        }
        let (header, body) = rest.split_at(length as usize);
        if header.first() != Some(&b'{') {
            return Err(fail("the header does not begin with `{`".into()));
        }
        let Pairs::<serde_json::Value>(pairs) =
            serde_json::from_slice(header).map_err(|error| fail(format!("header: {error}")))?;
        let mut entries = BTreeMap::new();
        for (name, value) in pairs {
            if name == "__metadata__" {
                let strings = value.as_object().is_some_and(|m| m.values().all(|v| v.is_string()));
                if !strings {
                    return Err(fail("`__metadata__` holds something that is not a string".into()));
                }
                continue;
            }
            let entry = read_entry(value, data.len() - body.len(), body.len())
                .map_err(|problem| fail(format!("tensor `{name}`: {problem}")))?;
            if entries.insert(name.clone(), entry).is_some() {
                return Err(fail(format!("tensor `{name}` comes twice")));
            }
        }
        let this = SafeTensors { file: file.into(), bytes: bytes.clone(), entries };
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

    /// The name given to `parse`.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Names in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The shape of a tensor.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|entry| entry.shape.as_slice())
    }

    /// A tensor of floats, sharing the bytes of the file.
    pub fn tensor(&self, device: &Device, name: &str) -> Result<Option<Tensor>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let dtype = match entry.dtype.as_str() {
            "F32" => DType::F32,
            "F16" => DType::F16,
            "BF16" => DType::BF16,
            other => {
                let problem = format!("tensor `{name}` is {other}");
                return Err(Error::format(&self.file, problem, "weights are F32, F16 or BF16"));
            }
        };
        let (shape, begin) = (&entry.shape, entry.begin);
        Ok(Some(Tensor::from_shared(device, shape, dtype, self.bytes.clone(), begin)))
    }

    /// A tensor of doubles, which weights never are.
    #[cfg(test)]
    pub fn doubles(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        assert_eq!(entry.dtype, "F64", "{name}");
        let data = &(*self.bytes).as_ref()[entry.begin..entry.end];
        Ok(Some(data.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()))
    }

    /// A tensor of whole numbers.
    pub fn integers(&self, name: &str) -> Result<Option<Vec<i64>>> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let data = &(*self.bytes).as_ref()[entry.begin..entry.end];
        match entry.dtype.as_str() {
            "I64" => {
                Ok(Some(data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect()))
            }
            "I32" => {
                let numbers = data.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b) as i64);
                Ok(Some(numbers.collect()))
            }
            other => {
                let problem = format!("tensor `{name}` is {other}");
                Err(Error::format(&self.file, problem, "token ids are I64 or I32"))
            }
        }
    }
}

fn read_entry(
    value: serde_json::Value,
    body_begin: usize,
    n_body: usize,
) -> std::result::Result<Entry, String> {
    let entry: HeaderEntry = serde_json::from_value(value).map_err(|error| error.to_string())?;
    let width = n_bytes_of(&entry.dtype).ok_or_else(|| format!("unknown dtype {}", entry.dtype))?;
    let n_bytes = entry.shape.iter().try_fold(width, |n, &axis| n.checked_mul(axis));
    let n_bytes = n_bytes.ok_or_else(|| format!("shape {:?} is too large", entry.shape))?;
    let [begin, end] = entry.data_offsets;
    if begin > end || end > n_body as u64 {
        return Err(format!("bytes {begin}..{end} of {n_body}"));
    }
    if end - begin != n_bytes {
        let (shape, held) = (&entry.shape, end - begin);
        return Err(format!("shape {shape:?} takes {n_bytes} bytes, data_offsets hold {held}"));
    }
    Ok(Entry {
        dtype: entry.dtype,
        shape: entry.shape.iter().map(|&axis| axis as usize).collect(),
        begin: body_begin + begin as usize,
        end: body_begin + end as usize,
    })
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
        file(header, n_data).err().unwrap().to_string()
    }

    #[test]
    fn a_good_file_is_read_in_place() {
        let header = r#"{"__metadata__":{"format":"pt"},
            "a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},
            "b":{"dtype":"I64","shape":[1],"data_offsets":[8,16]}}"#;
        let st = file(header, 16).unwrap();
        assert_eq!(st.names().collect::<Vec<_>>(), ["a", "b"]);
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
        assert!(problem(twice, 2).contains("tensor `a` comes twice"));
        let overlap = r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},
                          "b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#;
        assert!(problem(overlap, 3).contains("tensor `b`"));
        assert!(problem("[]", 0).contains("does not begin with"));
        let huge = SafeTensors::parse("m", Arc::new(u64::MAX.to_le_bytes().to_vec()));
        assert!(huge.err().unwrap().to_string().contains("a header of 18446744073709551615 bytes"));
    }
}
