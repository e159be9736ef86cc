//! `pytorch_model.bin`, as `torch.save` has written state dicts since PyTorch 1.6: a zip archive.
//!
//! ```text
//! NAME/data.pkl    a pickle: names, dtypes, shapes, and the key of the storage of each tensor
//! NAME/data/KEY    the bytes of a storage, uncompressed
//! NAME/byteorder   "little" or "big"; absent in older files
//! ```
//!
//! A pickle is a program. Ours is read by an interpreter that can build dicts, tuples and tensors
//! and nothing else (`pickle.rs`): a file that asks for any other name is refused by that name.
//! Tensors stay where they are in the archive (`zip.rs`). Where the formats leave room we decided:
//!
//! | case                                     | reading                                      |
//! |------------------------------------------|----------------------------------------------|
//! | compressed, encrypted or split archives  | refused                                      |
//! | checksums of the archive                 | not compared, as for other formats           |
//! | several tensors in one storage           | accepted                                     |
//! | strides other than those of rows         | refused                                      |
//! | `nn.Parameter` in place of a tensor      | accepted                                     |
//! | attributes of the dict (`_metadata`)     | passed over                                  |
//! | anything in the dict but tensors         | refused                                      |
//! | storages that are no weights             | accepted; refused by name when asked for     |
//! | big-endian numbers                       | refused                                      |
//! | the format before 1.6, not an archive    | refused                                      |

mod pickle;
#[cfg(test)]
mod tests;
mod zip;

use crate::error::{Error, Result};
use crate::files::cursor::Checked;
use crate::files::foreign::{self, Wanted};
use crate::files::safetensors::{Entry, SafeTensors};
use crate::tensor::SharedBytes;
use std::collections::BTreeMap;

const PICKLE: &str = "data.pkl";
const HINT: &str = "download it again; a file of another kind can be saved as safetensors with \
    `safetensors.torch.save_file`";

/// Finds the tensors; `file` is the name for messages. They are handed out as those of a
/// safetensors file are.
pub fn parse(file: &str, bytes: SharedBytes) -> Result<SafeTensors> {
    let data = (*bytes).as_ref();
    if !data.starts_with(zip::MAGIC) {
        let strange = || Error::format(file, "is not a zip archive", HINT);
        return Err(foreign::explain(file, data, Wanted::Torch).unwrap_or_else(strange));
    }
    let entries = entries(data).map_err(|problem| Error::format(file, problem, HINT))?;
    Ok(SafeTensors::of(file, bytes, entries))
}

fn entries(data: &[u8]) -> Checked<BTreeMap<String, Entry>> {
    let archive = zip::read(data)?;
    let mut pickles = archive.iter().filter_map(|(name, range)| {
        let dir = name.strip_suffix(PICKLE)?;
        (dir.is_empty() || dir.ends_with('/')).then_some((dir, range))
    });
    let (dir, range) = match (pickles.next(), pickles.next()) {
        (Some(one), None) => one,
        (None, _) => return Err(format!("the archive holds no `{PICKLE}`")),
        _ => return Err(format!("the archive holds more than one `{PICKLE}`")),
    };
    let part = |name: &str| archive.get(format!("{dir}{name}").as_str());
    let order = part("byteorder").map(|range| data[range.clone()].trim_ascii());
    if let Some(order) = order.filter(|order| *order != b"little") {
        let order = String::from_utf8_lossy(order).into_owned();
        return Err(format!("its numbers are {order}-endian; only little-endian ones are read"));
    }
    let mut entries = BTreeMap::new();
    for (name, tensor) in pickle::read(&data[range.clone()])? {
        let wrong = |problem: String| format!("tensor `{name}`: {problem}");
        let key = tensor.storage.key;
        let storage = part(&format!("data/{key}"));
        let storage = storage.ok_or_else(|| wrong(format!("there is no storage `{key}`")))?;
        let place = tensor.place(storage.len()).map_err(wrong)?;
        let (begin, end) = (storage.start + place.start, storage.start + place.end);
        let (dtype, shape) = (tensor.storage.dtype.into(), tensor.shape);
        let is_new = entries.insert(name.into(), Entry { dtype, shape, begin, end }).is_none();
        if name.is_empty() || !is_new {
            return Err(format!("tensor `{name}`: the name is empty, or comes twice"));
        }
    }
    Ok(entries)
}
