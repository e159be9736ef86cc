//! Files made by others: bytes in, bytes out. Which paths they come from is not known here.

mod cursor;
#[cfg(all(feature = "fs", not(target_arch = "wasm32")))]
pub mod disk;
#[cfg(all(feature = "fs", target_arch = "wasm32"))]
#[path = "memory.rs"]
pub mod disk;
mod foreign;
pub mod gguf;
pub mod package;
pub mod safetensors;
pub mod torch;

use crate::error::Result;
use crate::tensor::device::Device;
use crate::tensor::{DType, SharedBytes, Tensor};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;
use std::path::Path;

/// Takes bytes as they are made; what it fails with is passed on.
pub type Sink<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

/// Answers with the bytes of a file, by its plain name, or with none.
pub type Lookup<'a> = dyn Fn(&str) -> Result<Option<SharedBytes>> + 'a;

/// The ending of a name in lower case, empty where there is none.
pub fn extension(path: &Path) -> String {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or("").to_lowercase()
}

/// Bytes in memory of which some can be had once more, apart from the rest: those of a file.
pub struct Apart {
    pub whole: SharedBytes,
    /// Bytes of this range, in memory of their own that is given back when they are dropped.
    pub take: Box<dyn Fn(Range<usize>) -> Result<SharedBytes> + Send + Sync>,
}

/// Where `part` lies in `whole`, if it does.
fn place_in(whole: &[u8], part: &[u8]) -> Option<Range<usize>> {
    let begin = (part.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
    Some(begin..begin.checked_add(part.len())?).filter(|range| range.end <= whole.len())
}

impl Apart {
    pub fn holds(&self, part: &[u8]) -> bool {
        place_in((*self.whole).as_ref(), part).is_some()
    }

    /// A part of the whole, apart from it.
    pub fn take(&self, part: &[u8]) -> Result<SharedBytes> {
        (self.take)(place_in((*self.whole).as_ref(), part).expect("a part of the whole"))
    }
}

/// A tensor to be written: what it is, known before; its bytes, made when their turn comes.
pub struct Outgoing<'a> {
    pub name: String,
    /// Row-major, slowest axis first.
    pub shape: Vec<usize>,
    pub dtype: DType,
    pub bytes: Box<dyn Fn() -> Result<Cow<'a, [u8]>> + 'a>,
}

/// What every container of tensors offers.
pub trait TensorFile {
    /// Its name, for messages.
    fn file(&self) -> &str;
    fn names(&self) -> Vec<&str>;
    /// One of them, sharing the bytes of the file.
    fn tensor(&self, device: &Device, name: &str) -> Result<Option<Tensor>>;
    /// What a map lost of a tensor (see `place.rs`), where the writer kept it.
    fn corrections(&self, _name: &str) -> Result<Option<Vec<i32>>> {
        Ok(None)
    }
}

/// The key of a GGUF file under which we keep what a map lost of a tensor: i8 as bytes, or i32.
pub(crate) fn corrections_key(tensor: &str) -> String {
    format!("elapid.exact.{tensor}")
}

/// A JSON object as a list: the order of the file is kept, and a key that comes twice is seen.
pub(crate) struct Pairs<T>(pub(crate) Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct List<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
            type Value = Pairs<T>;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Pairs<T>, A::Error> {
                let mut list = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    list.push(pair);
                }
                Ok(Pairs(list))
            }
        }
        deserializer.deserialize_map(List(PhantomData))
    }
}

#[cfg(test)]
mod memory;
#[cfg(test)]
mod tests;
