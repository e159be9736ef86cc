//! Reads a GGUF file in place: opening walks the header once and copies names only.

use super::value::stored;
use super::{
    ALIGNMENT_DEFAULT, ALIGNMENT_KEY, ALIGNMENT_MAX, Checked, GgmlType, KEY_BYTES_MAX, Kind, MAGIC,
    N_AXES_MAX, NAME_BYTES_MAX, Value, check_name, n_bytes,
};
use crate::error::{Error, Result};
use crate::files::cursor::Cursor;
use crate::files::foreign::{self, Wanted};
use crate::files::{TensorFile, corrections_key};
use crate::tensor::device::Device;
use crate::tensor::{SharedBytes, Tensor};
use std::collections::BTreeMap;
use std::ops::Range;

/// Far more than any model has; what we keep of each is larger than its least size in the file.
const N_VALUES_MAX: u64 = 1 << 16;
const N_TENSORS_MAX: u64 = 1 << 20;

/// The least a value takes (key of one byte, kind, one byte) and a tensor (no axes).
const VALUE_BYTES_MIN: u64 = 8 + 1 + 4 + 1;
const TENSOR_BYTES_MIN: u64 = 8 + 1 + 4 + 4 + 8;

const HINT_CUT: &str = "the file may be cut short or damaged: download or convert it again";
const HINT_TYPE: &str =
    "quantise the model again; F32, F16, BF16, Q4_0 to Q8_0 and Q2_K to Q6_K can be read";

pub struct Gguf {
    file: String,
    bytes: SharedBytes,
    /// In the order of the file.
    values: Vec<Stored>,
    value_idx: BTreeMap<String, usize>,
    entries: Vec<Entry>,
    entry_idx: BTreeMap<String, usize>,
}

/// A value, by its place in the file.
struct Stored {
    key: String,
    kind: Kind,
    range: Range<usize>,
}

/// A tensor, by its place in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub name: String,
    /// Row-major, slowest axis first.
    pub shape: Vec<usize>,
    pub ggml: GgmlType,
    pub offset: usize,
    pub n_bytes: usize,
}

impl Gguf {
    /// Reads the header; `file` is the name for messages.
    pub fn parse(file: &str, bytes: SharedBytes) -> Result<Gguf> {
        let data = (*bytes).as_ref();
        let fail = |problem: String| Error::format(file, problem, HINT_CUT);
        let Some(rest) = data.strip_prefix(MAGIC) else {
            let problem = format!("begins with `{}`, not with `GGUF`", head(data));
            return Err(foreign::explain(file, data, Wanted::Gguf).unwrap_or_else(|| fail(problem)));
        };
        let Some(&version) = rest.first_chunk() else {
            return Err(fail(format!("{} bytes are too few for a header", data.len())));
        };
        check_version(file, version)?;
        let mut gguf = Gguf {
            file: file.into(),
            bytes: bytes.clone(),
            values: Vec::new(),
            value_idx: BTreeMap::new(),
            entries: Vec::new(),
            entry_idx: BTreeMap::new(),
        };
        gguf.read(Cursor { data, at: 8 }).map_err(fail)?;
        Ok(gguf)
    }

    fn read(&mut self, mut cursor: Cursor) -> Checked<()> {
        let cut = |_| format!("{} bytes are too few for a header", cursor.data.len());
        let (n_tensors, n_values) = (cursor.u64().map_err(cut)?, cursor.u64().map_err(cut)?);
        let left = cursor.left() as u64;
        if n_values > N_VALUES_MAX || n_values > left / VALUE_BYTES_MIN {
            return Err(format!("{n_values} metadata values, {left} bytes follow"));
        }
        if n_tensors > N_TENSORS_MAX || n_tensors > left / TENSOR_BYTES_MIN {
            return Err(format!("{n_tensors} tensors, {left} bytes follow"));
        }
        for idx in 0..n_values {
            self.read_value(&mut cursor, &format!("metadata value {idx} of {n_values}"))?;
        }
        let alignment = self.alignment()?;
        for idx in 0..n_tensors {
            self.read_entry(&mut cursor, &format!("tensor {idx} of {n_tensors}"), alignment)?;
        }
        let data_begin = cursor.at.next_multiple_of(alignment);
        self.place(data_begin)?;
        self.check_layout(alignment)
    }

    fn read_value(&mut self, cursor: &mut Cursor, which: &str) -> Checked<()> {
        let key = cursor.string().map_err(|problem| format!("{which}: key: {problem}"))?;
        let key = check_name("the key", key, KEY_BYTES_MAX)
            .map_err(|problem| format!("{which}: {problem}"))?;
        let value = |problem: String| format!("metadata `{key}`: {problem}");
        let kind = cursor.kind().map_err(value)?;
        let begin = cursor.at;
        cursor.value(kind).map_err(value)?;
        if self.value_idx.insert(key.clone(), self.values.len()).is_some() {
            return Err(format!("metadata `{key}` comes twice"));
        }
        self.values.push(Stored { key, kind, range: begin..cursor.at });
        Ok(())
    }

    fn alignment(&self) -> Checked<usize> {
        let Some(value) = self.get(ALIGNMENT_KEY) else { return Ok(ALIGNMENT_DEFAULT) };
        let kind = self.values[self.value_idx[ALIGNMENT_KEY]].kind;
        let n = value
            .integer()
            .filter(|_| kind == Kind::U32)
            .ok_or_else(|| format!("`{ALIGNMENT_KEY}` is {}, not a u32", value.describe()))?;
        let good = usize::try_from(n).ok().filter(|n| n.is_power_of_two() && *n <= ALIGNMENT_MAX);
        good.ok_or_else(|| {
            format!("`{ALIGNMENT_KEY}` is {n}, not a power of two up to {ALIGNMENT_MAX}")
        })
    }

    /// One tensor, with its offset as the file says it: from the start of the data.
    fn read_entry(&mut self, cursor: &mut Cursor, which: &str, alignment: usize) -> Checked<()> {
        let name = cursor.string().map_err(|problem| format!("{which}: name: {problem}"))?;
        let name = check_name("the name", name, NAME_BYTES_MAX)
            .map_err(|problem| format!("{which}: {problem}"))?;
        let entry = read_entry(cursor, &name, alignment)
            .map_err(|problem| format!("tensor `{name}`: {problem}"))?;
        if self.entry_idx.insert(name.clone(), self.entries.len()).is_some() {
            return Err(format!("tensor `{name}` comes twice"));
        }
        self.entries.push(entry);
        Ok(())
    }

    /// Makes offsets count from the start of the file; each tensor must lie inside it.
    fn place(&mut self, data_begin: usize) -> Checked<()> {
        let n_file = (*self.bytes).as_ref().len();
        for entry in &mut self.entries {
            let Entry { name, offset, n_bytes, .. } = &entry;
            let begin = offset.checked_add(data_begin);
            let end = begin.and_then(|begin| begin.checked_add(*n_bytes));
            match (begin, end) {
                (Some(begin), Some(end)) if end <= n_file => entry.offset = begin,
                _ => {
                    return Err(format!(
                        "tensor `{name}`: {n_bytes} bytes at {offset} of the data, which begins \
                         at byte {data_begin} of {n_file}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// No tensor may overlap another, and the file may not end inside the last padding.
    fn check_layout(&self, alignment: usize) -> Checked<()> {
        let mut places: Vec<&Entry> = self.entries.iter().filter(|e| e.n_bytes > 0).collect();
        places.sort_by_key(|entry| entry.offset);
        for pair in places.windows(2) {
            let (a, b) = (pair[0], pair[1]);
            let a_end = a.offset + a.n_bytes;
            let next = a_end.checked_next_multiple_of(alignment);
            if b.offset < a_end || next.is_none_or(|next| b.offset > next) {
                let what = if b.offset < a_end { "an overlap" } else { "a gap" };
                let (first, second, begin) = (&a.name, &b.name, b.offset);
                return Err(format!(
                    "{what}: tensor `{second}` begins at byte {begin}, `{first}` ends at {a_end}"
                ));
            }
        }
        let Some(last) = places.last() else { return Ok(()) };
        let (end, n_file) = (last.offset + last.n_bytes, (*self.bytes).as_ref().len());
        let padded = end.checked_next_multiple_of(alignment);
        if n_file > end && padded.is_none_or(|padded| n_file < padded) {
            let name = &last.name;
            return Err(format!(
                "the file ends at byte {n_file}, inside the padding after `{name}`"
            ));
        }
        Ok(())
    }

    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.iter().map(|value| value.key.as_str())
    }

    pub fn tensors(&self) -> &[Entry] {
        &self.entries
    }

    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let value = &self.values[*self.value_idx.get(key)?];
        stored(value.kind, &(*self.bytes).as_ref()[value.range.clone()])
    }

    fn wrong(&self, key: &str, problem: String) -> Error {
        Error::config(&self.file, key, problem, "convert the model again")
    }

    /// The value as `pick` takes it, or an error that says what it is and what was wanted.
    fn typed<'a, T>(
        &'a self,
        key: &str,
        want: &str,
        pick: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong = || self.wrong(key, format!("is {}, not {want}", value.describe()));
        pick(value).map(Some).ok_or_else(wrong)
    }

    fn list<'a, T>(
        &'a self,
        key: &str,
        want: &str,
        pick: impl Fn(Value<'a>) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let array = self.typed(key, want, |value| match value {
            Value::Array(array) => Some(array),
            _ => None,
        })?;
        let element = |(idx, value): (usize, Value<'a>)| {
            let what = || format!("element {idx} is {}; wanted is {want}", value.describe());
            pick(value).ok_or_else(|| self.wrong(key, what()))
        };
        array.map(|array| array.iter().enumerate().map(element).collect()).transpose()
    }

    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "UTF-8 text", |value| match value {
            Value::Str(bytes) => str::from_utf8(bytes).ok(),
            _ => None,
        })
    }

    /// A count or length: an integer of any kind, not negative.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number from 0 on", |value| value.integer()?.try_into().ok())
    }

    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a float", Value::float)
    }

    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a bool", |value| match value {
            Value::Bool(x) => Some(x),
            _ => None,
        })
    }

    /// Counts or lengths: an array of integers of any kind, none negative.
    pub fn sizes(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let want = "an array of whole numbers from 0 on";
        self.list(key, want, |value| value.integer()?.try_into().ok())
    }

    pub fn ints(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.list(key, "an array of integers", |value| value.integer()?.try_into().ok())
    }

    pub fn floats(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.list(key, "an array of floats", |value| value.float().map(|x| x as f32))
    }

    /// An array of strings, which need not be UTF-8.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&[u8]>>> {
        self.list(key, "an array of strings", |value| match value {
            Value::Str(bytes) => Some(bytes),
            _ => None,
        })
    }
}

impl TensorFile for Gguf {
    fn file(&self) -> &str {
        &self.file
    }

    fn names(&self) -> Vec<&str> {
        self.entries.iter().map(|entry| entry.name.as_str()).collect()
    }

    fn tensor(&self, device: &Device, name: &str) -> Result<Option<Tensor>> {
        let Some(&idx) = self.entry_idx.get(name) else { return Ok(None) };
        let Entry { shape, ggml, offset, .. } = &self.entries[idx];
        let Some(dtype) = ggml.dtype() else {
            let problem = format!("tensor `{name}` is {}", ggml.name);
            return Err(Error::format(&self.file, problem, HINT_TYPE));
        };
        Ok(Some(Tensor::from_shared(device, shape, dtype, self.bytes.clone(), *offset)))
    }

    fn corrections(&self, name: &str) -> Result<Option<Vec<i32>>> {
        let key = corrections_key(name);
        let Some(Value::Array(array)) = self.get(&key) else { return Ok(None) };
        let is_bytes = array.kind() == Kind::U8;
        let step = |n: i64| if is_bytes { n as u8 as i8 as i32 } else { n as i32 };
        let list = self.ints(&key)?.unwrap_or_default();
        Ok(Some(list.into_iter().map(step).collect()))
    }
}

fn head(data: &[u8]) -> String {
    data[..data.len().min(4)].escape_ascii().to_string()
}

fn check_version(file: &str, bytes: [u8; 4]) -> Result<()> {
    let (version, swapped) = (u32::from_le_bytes(bytes), u32::from_be_bytes(bytes));
    let (problem, hint) = match (version, swapped) {
        (2 | 3, _) => return Ok(()),
        (1, _) => {
            let problem = "GGUF version 1, of August 2023; versions 2 and 3 are read".into();
            (problem, "convert the original weights again")
        }
        // A version number is small: its bytes are the other way around.
        (_, 1..=0xffff) => {
            let problem = format!("a big-endian GGUF file, version {swapped}");
            (problem, "turn it around with `gguf-convert-endian` of the Python package gguf")
        }
        _ => {
            let problem = format!("GGUF version {version}; versions 2 and 3 are read");
            (problem, "a newer Elapid may read it; or convert the original weights again")
        }
    };
    Err(Error::format(file, problem, hint))
}

/// What follows the name of a tensor.
fn read_entry(cursor: &mut Cursor, name: &str, alignment: usize) -> Checked<Entry> {
    let n_axes = cursor.u32()? as usize;
    if n_axes > N_AXES_MAX {
        return Err(format!("{n_axes} axes, at most {N_AXES_MAX} are allowed"));
    }
    let axes = (0..n_axes).map(|_| cursor.u64()).collect::<Checked<Vec<u64>>>()?;
    let ggml = GgmlType::from_id(cursor.u32()?)?;
    let n_bytes = n_bytes(ggml, &axes)?;
    let offset = cursor.u64()?;
    if !offset.is_multiple_of(alignment as u64) {
        return Err(format!("offset {offset} is not a multiple of {alignment}"));
    }
    let too_large = |_| format!("offset {offset} is too large");
    let offset = usize::try_from(offset).map_err(too_large)?;
    // Each fits a usize: `n_bytes` has found that their product does.
    let shape = axes.iter().rev().map(|&axis| axis as usize).collect();
    Ok(Entry { name: name.into(), shape, ggml, offset, n_bytes })
}
