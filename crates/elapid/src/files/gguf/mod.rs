//! GGUF, the container of llama.cpp: named values, then tensors. Versions 2 and 3 are read,
//! version 3 is written; both little-endian.
//!
//! ```text
//! "GGUF"  u32 version  u64 tensors  u64 values
//! value:  string key, u32 kind, value         (array: u32 kind, u64 count, elements)
//! tensor: string name, u32 axes, u64 per axis, u32 type, u64 offset
//! zeros up to a multiple of the alignment; data, each tensor at such a multiple
//! ```
//!
//! A string is a u64 length and bytes. Axes are stored fastest first; our shapes are row-major, so
//! the lists are turned around. Offsets count from the start of the data. The alignment is
//! `general.alignment`, a u32, or else 32. Where the format leaves room we decided:
//!
//! | case                                   | reading                                       |
//! |----------------------------------------|-----------------------------------------------|
//! | no values, no tensors                  | accepted: whether it is a model is not asked  |
//! | strings that are not UTF-8             | accepted: tokens are bytes                    |
//! | keys and names that are not UTF-8, are empty or hold control characters | refused      |
//! | keys over 65535, names over 64 bytes   | refused, as the specification says            |
//! | a bool that is neither 0 nor 1         | refused                                       |
//! | arrays of arrays                       | refused, as llama.cpp does: nobody writes them|
//! | alignment                              | a power of two from 1 to 2^20, of kind u32    |
//! | no axes                                | accepted: one number                          |
//! | an axis of length 0                    | accepted: no numbers                          |
//! | tensors in any order                   | accepted: each is found by its offset         |
//! | gaps between tensors                   | refused, as llama.cpp does: a changed type    |
//! |                                        | leaves one                                    |
//! | padding after the last tensor          | all or none of it; a part means a cut file    |
//! | bytes after that                       | accepted, as llama.cpp does                   |
//! | types we cannot decode (IQ, TQ, ...)   | accepted; refused by name when asked for      |
//! | types ggml has removed, or never had   | refused                                       |
//!
//! Not here: what keys and names mean; models split over several files; big-endian files.

mod read;
mod value;
mod write;

pub use self::read::{Entry, Gguf};
pub use self::value::{Kind, Value};
pub use self::write::{Item, places, write};

use crate::files::cursor::Checked;
use crate::tensor::DType;
use crate::tensor::quant::BlockType;

const MAGIC: &[u8; 4] = b"GGUF";
const ALIGNMENT_KEY: &str = "general.alignment";
const ALIGNMENT_DEFAULT: usize = 32;
const ALIGNMENT_MAX: usize = 1 << 20;
const N_AXES_MAX: usize = 4;
const KEY_BYTES_MAX: usize = 65_535;
/// The specification allows one byte more than llama.cpp reads.
const NAME_BYTES_MAX: usize = 64;

/// How a tensor is stored, by ggml's list: more than we decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgmlType {
    pub id: u32,
    pub name: &'static str,
    pub n_elem: usize,
    pub n_bytes: usize,
}

/// Number, name, numbers in a block, bytes of a block.
const TYPES: [(u32, &str, usize, usize); 34] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
];

/// Types that files held once.
const REMOVED: [(u32, &str); 8] = [
    (4, "Q4_2"),
    (5, "Q4_3"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

impl GgmlType {
    fn from_id(id: u32) -> Checked<GgmlType> {
        let found = TYPES.iter().find(|entry| entry.0 == id);
        if let Some(&(id, name, n_elem, n_bytes)) = found {
            return Ok(GgmlType { id, name, n_elem, n_bytes });
        }
        match REMOVED.iter().find(|entry| entry.0 == id) {
            Some((_, name)) => Err(format!("type {id} ({name}) has been removed from ggml")),
            None => Err(format!("unknown type {id}")),
        }
    }

    /// As the engine stores it, if it can.
    pub fn dtype(self) -> Option<DType> {
        match self.id {
            0 => Some(DType::F32),
            1 => Some(DType::F16),
            30 => Some(DType::BF16),
            id => BlockType::from_ggml_id(id).map(DType::Block),
        }
    }
}

/// The number of a type in files.
fn ggml_id(dtype: DType) -> Checked<u32> {
    let id = match dtype {
        DType::F32 => Some(0),
        DType::F16 => Some(1),
        DType::BF16 => Some(30),
        DType::U32 => None,
        DType::Block(block) => block.ggml_id(),
    };
    id.ok_or_else(|| format!("GGUF has no type {}", dtype.name()))
}

/// A key or the name of a tensor.
fn check_name(what: &str, name: &[u8], n_bytes_max: usize) -> Checked<String> {
    if name.is_empty() {
        return Err(format!("{what} is empty"));
    }
    if name.len() > n_bytes_max {
        return Err(format!("{what} has {} bytes, at most {n_bytes_max} are allowed", name.len()));
    }
    match str::from_utf8(name) {
        Ok(text) if !text.contains(char::is_control) => Ok(text.into()),
        _ => Err(format!("{what} `{}` is not plain text", name.escape_ascii())),
    }
}

/// Bytes of a tensor whose axes are given fastest first.
///
/// Overflow is judged with empty axes taken as 1, so that no product of axes overflows later.
fn n_bytes(ggml: GgmlType, axes: &[u64]) -> Checked<usize> {
    let GgmlType { name, n_elem: per_block, n_bytes: block_bytes, .. } = ggml;
    let n_row = axes.first().copied().unwrap_or(1);
    if !n_row.is_multiple_of(per_block as u64) {
        return Err(format!("rows of {n_row} numbers are no whole {name} blocks of {per_block}"));
    }
    let n_elem = axes.iter().try_fold(1u64, |n, &axis| n.checked_mul(axis.max(1)));
    let n_elem = n_elem.filter(|&n| isize::try_from(n).is_ok());
    let n_bytes = n_elem.and_then(|n| (n / per_block as u64).checked_mul(block_bytes as u64));
    let n_bytes = n_bytes.and_then(|n| isize::try_from(n).ok());
    match n_bytes {
        Some(_) if axes.contains(&0) => Ok(0),
        Some(n) => Ok(n.unsigned_abs()),
        None => Err(format!("axes {axes:?} of {name} are too large")),
    }
}

#[cfg(test)]
mod tests;
