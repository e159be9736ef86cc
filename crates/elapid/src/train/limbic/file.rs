//! One file: safetensors with the configuration and a checksum in its metadata.
//!
//! | metadata | value                                                            |
//! |----------|------------------------------------------------------------------|
//! | `format` | `elapid limbic`                                                  |
//! | `config` | `{"d_in": .., "d_hidden": .., "reward_weight": ..}`              |
//! | `blake3` | BLAKE3 of the whole file, with 64 zeros in the place of this sum |

use super::{Limbic, Shape};
use crate::error::{Error, Result};
use crate::files::Outgoing;
use crate::files::safetensors::{self, SafeTensors};
use crate::model::place::Place;
use crate::model::weights::Weights;
use crate::tensor::device::Device;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::sync::Arc;

const FORMAT: &str = "elapid limbic";
const N_HEX: usize = 64;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    d_in: usize,
    d_hidden: usize,
    reward_weight: f32,
}

impl Limbic {
    /// The bytes of its file, which [`Limbic::from_bytes`] reads.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let Shape { d_in, d_hidden } = self.shape;
        let config = Config { d_in, d_hidden, reward_weight: self.reward_weight };
        let config = serde_json::to_string(&config)
            .map_err(|error| Error::input(format!("the configuration: {error}"), ""))?;
        let host = self.weights.device().host_device();
        let tensors: Vec<_> =
            self.weights.ids().map(|id| self.weights.tensor(id).to(&host)).collect();
        self.weights.device().check()?;
        let outgoing = |(id, tensor)| {
            let tensor: &crate::tensor::Tensor = tensor;
            Outgoing {
                name: self.weights.name(id).to_string(),
                shape: tensor.shape().to_vec(),
                dtype: tensor.dtype(),
                bytes: Box::new(move || Ok(Cow::Borrowed(tensor.bytes()))),
            }
        };
        let list: Vec<Outgoing> = self.weights.ids().zip(&tensors).map(outgoing).collect();
        let empty = "0".repeat(N_HEX);
        let metadata = [("format", FORMAT), ("config", &config), ("blake3", &empty)];
        let mut bytes = Vec::new();
        safetensors::write(&metadata, &list, &mut |part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        let sum = blake3::hash(&bytes).to_hex();
        let at = find(&bytes, &empty).expect("the checksum has its place");
        bytes[at..at + N_HEX].copy_from_slice(sum.as_bytes());
        Ok(bytes)
    }

    /// Reads the bytes of a file, of this name in messages. A file that was changed or cut is
    /// refused.
    pub fn from_bytes(file: &str, bytes: &[u8], device: &Device) -> Result<Limbic> {
        let bad = |problem: String| Error::format(file, problem, "train the head anew");
        let tensors = SafeTensors::parse(file, Arc::new(bytes.to_vec()))?;
        let metadata = |key: &str| {
            let found = tensors.metadata(key);
            found.ok_or_else(|| bad(format!("it is no limbic head: no `{key}` in its metadata")))
        };
        let format = metadata("format")?;
        if format != FORMAT {
            return Err(bad(format!("it is no limbic head: its format is `{format}`")));
        }
        verify(bytes, metadata("blake3")?).map_err(bad)?;
        let config: Config = serde_json::from_str(metadata("config")?)
            .map_err(|error| bad(format!("its configuration: {error}")))?;
        let Config { d_in, d_hidden, reward_weight } = config;
        let shape = Shape { d_in, d_hidden }.check()?;
        let specs = shape.specs();
        let places: Vec<Place> = specs.iter().map(|spec| spec.place()).collect();
        let weights = Weights::load(device, &specs, &places, &[&tensors], &[])?;
        Ok(Limbic { shape, reward_weight, weights })
    }
}

/// Compares the checksum of a file with the one in it.
fn verify(bytes: &[u8], sum: &str) -> std::result::Result<(), String> {
    let mut bytes = bytes.to_vec();
    match find(&bytes, sum) {
        Some(at) if sum.len() == N_HEX => bytes[at..at + N_HEX].fill(b'0'),
        _ => return Err(format!("its checksum `{sum}` is none")),
    }
    match blake3::hash(&bytes).to_hex().as_str() == sum {
        true => Ok(()),
        false => Err("its checksum is wrong: the file was changed or damaged".into()),
    }
}

fn find(bytes: &[u8], text: &str) -> Option<usize> {
    bytes.windows(text.len().max(1)).position(|part| part == text.as_bytes())
}
