//! Writes GGUF version 3: the header at once, then each tensor when its bytes are made.
//!
//! Tensors lie in the order given, each padded with zeros to the alignment, the last one too:
//! llama.cpp wants it.

use super::{
    ALIGNMENT_DEFAULT, ALIGNMENT_KEY, ALIGNMENT_MAX, Checked, GgmlType, KEY_BYTES_MAX, Kind, MAGIC,
    N_AXES_MAX, NAME_BYTES_MAX, check_name, ggml_id, n_bytes,
};
use crate::error::{Error, Result};
use crate::files::{Outgoing, Sink};
use std::collections::BTreeSet;
use std::ops::Range;

const VERSION: u32 = 3;

#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Str(String),
    U8s(Vec<u8>),
    I32s(Vec<i32>),
    F32s(Vec<f32>),
    /// Strings that need not be UTF-8.
    Strings(Vec<Vec<u8>>),
}

fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

fn put_item(out: &mut Vec<u8>, item: &Item) {
    let (kind, n_elem, bytes) = match item {
        Item::U32(x) => (Kind::U32, None, x.to_le_bytes().to_vec()),
        Item::I32(x) => (Kind::I32, None, x.to_le_bytes().to_vec()),
        Item::F32(x) => (Kind::F32, None, x.to_le_bytes().to_vec()),
        Item::Bool(x) => (Kind::Bool, None, vec![u8::from(*x)]),
        Item::Str(text) => (Kind::Str, None, string(text.as_bytes())),
        Item::U8s(list) => (Kind::U8, Some(list.len()), list.clone()),
        Item::I32s(list) => {
            (Kind::I32, Some(list.len()), list.iter().flat_map(|x| x.to_le_bytes()).collect())
        }
        Item::F32s(list) => {
            (Kind::F32, Some(list.len()), list.iter().flat_map(|x| x.to_le_bytes()).collect())
        }
        Item::Strings(list) => {
            (Kind::Str, Some(list.len()), list.iter().flat_map(|bytes| string(bytes)).collect())
        }
    };
    if n_elem.is_some() {
        out.extend((Kind::Array as u32).to_le_bytes());
    }
    out.extend((kind as u32).to_le_bytes());
    out.extend(n_elem.iter().flat_map(|n| (*n as u64).to_le_bytes()));
    out.extend(bytes);
}

/// `general.alignment` where it is given. llama.cpp aborts on files with a smaller one than the
/// default, so none is written.
fn alignment_of(metadata: &[(String, Item)]) -> Checked<usize> {
    let range = ALIGNMENT_DEFAULT..=ALIGNMENT_MAX;
    let item = metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY).map(|(_, item)| item);
    let alignment = match item {
        None => Some(ALIGNMENT_DEFAULT),
        Some(Item::U32(n)) => usize::try_from(*n).ok(),
        Some(_) => None,
    };
    alignment.filter(|n| n.is_power_of_two() && range.contains(n)).ok_or_else(|| {
        format!("`{ALIGNMENT_KEY}` is {item:?}, not a u32 power of two in {range:?}")
    })
}

/// Bytes of a tensor, if files can hold one like it.
fn check_tensor(tensor: &Outgoing) -> Checked<usize> {
    // One byte less than may be read: llama.cpp keeps a zero at the end of a name.
    check_name("the name", tensor.name.as_bytes(), NAME_BYTES_MAX - 1)?;
    if tensor.shape.len() > N_AXES_MAX {
        return Err(format!("{} axes, at most {N_AXES_MAX} are allowed", tensor.shape.len()));
    }
    let axes: Vec<u64> = tensor.shape.iter().rev().map(|&axis| axis as u64).collect();
    n_bytes(GgmlType::from_id(ggml_id(tensor.dtype)?)?, &axes)
}

/// Everything before the data, and the bytes each tensor takes.
fn header(
    metadata: &[(String, Item)],
    tensors: &[Outgoing],
    alignment: usize,
) -> Checked<(Vec<u8>, Vec<usize>)> {
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    let mut seen = BTreeSet::new();
    for (key, item) in metadata {
        check_name("a key", key.as_bytes(), KEY_BYTES_MAX)?;
        if !seen.insert(key.as_str()) {
            return Err(format!("key `{key}` comes twice"));
        }
        out.extend(string(key.as_bytes()));
        put_item(&mut out, item);
    }
    let (mut seen, mut sizes, mut offset) = (BTreeSet::new(), Vec::new(), 0usize);
    for tensor in tensors {
        let name = &tensor.name;
        let n = check_tensor(tensor).map_err(|problem| format!("tensor `{name}`: {problem}"))?;
        if !seen.insert(name) {
            return Err(format!("tensor `{name}` comes twice"));
        }
        out.extend(string(name.as_bytes()));
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        out.extend(tensor.shape.iter().rev().flat_map(|&axis| (axis as u64).to_le_bytes()));
        out.extend(ggml_id(tensor.dtype)?.to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        sizes.push(n);
        let end = offset.checked_add(n).and_then(|end| end.checked_next_multiple_of(alignment));
        offset = end.ok_or_else(|| format!("tensor `{name}`: the file would be too large"))?;
    }
    out.resize(out.len().next_multiple_of(alignment), 0);
    Ok((out, sizes))
}

fn refuse(problem: String) -> Error {
    Error::input(format!("writing GGUF: {problem}"), "GGUF cannot hold this model as it is")
}

/// The bytes of each tensor in the file that `write` makes.
pub fn places<'a>(
    metadata: &[(String, Item)],
    tensors: &'a [Outgoing],
) -> Result<Vec<(&'a str, Range<u64>)>> {
    let alignment = alignment_of(metadata).map_err(refuse)?;
    let (header, sizes) = header(metadata, tensors, alignment).map_err(refuse)?;
    let mut at = header.len();
    let mut place = |(tensor, n_bytes): (&'a Outgoing, usize)| {
        let begin = at;
        at += n_bytes.next_multiple_of(alignment);
        (tensor.name.as_str(), begin as u64..(begin + n_bytes) as u64)
    };
    Ok(tensors.iter().zip(sizes).map(&mut place).collect())
}

/// Writes a whole file. What cannot be written is refused before the first byte.
pub fn write(metadata: &[(String, Item)], tensors: &[Outgoing], sink: &mut Sink) -> Result<()> {
    let alignment = alignment_of(metadata).map_err(refuse)?;
    let (header, sizes) = header(metadata, tensors, alignment).map_err(refuse)?;
    sink(&header)?;
    let zeros = vec![0; alignment];
    for (tensor, n_bytes) in tensors.iter().zip(sizes) {
        let bytes = (tensor.bytes)()?;
        if bytes.len() != n_bytes {
            let (name, got) = (&tensor.name, bytes.len());
            return Err(refuse(format!("tensor `{name}` takes {n_bytes} bytes, {got} were made")));
        }
        sink(&bytes)?;
        sink(&zeros[..n_bytes.next_multiple_of(alignment) - n_bytes])?;
    }
    Ok(())
}
