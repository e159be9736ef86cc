//! Files made by others: bytes in, bytes out. Which paths they come from is not known here.

pub mod peft;
pub mod safetensors;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use std::marker::PhantomData;

/// A JSON object as a list: the order of the file is kept, and a key that comes twice is seen.
struct Pairs<T>(Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
            type Value = Pairs<T>;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Pairs<T>, A::Error> {
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
