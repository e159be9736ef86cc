//! Conversion with a receipt: what was written is read again and compared with the original.

use super::parity::{self, Parity};
use crate::error::{Error, Result};
use crate::files::disk;
use crate::model::Model;
use crate::model::adapter::Adapter;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::gguf::Arch;
use crate::model::export::Mix;
use crate::model::lora::Lora;
use crate::model::save::{Form, Save, dtype_bytes, has_blocks};
use crate::model::weights::Weights;
use crate::tensor::device::Device;
use std::collections::BTreeMap;
use std::path::Path;

/// What a conversion wrote, and how far it is from the original.
pub struct Conversion {
    /// Bytes written.
    pub n_bytes: u64,
    /// Bytes of weights by dtype, of the new model.
    pub dtype_bytes: BTreeMap<&'static str, usize>,
    /// Logits of both on fixed prompts; none for an adapter that was converted without its base.
    pub parity: Option<Parity>,
    /// Largest difference of a number of an adapter, relative to the largest of its tensor.
    pub adapter_difference: Option<f64>,
    /// Whether both are the same.
    pub verdict: Same,
    /// Who cannot read what was written.
    pub note: Option<&'static str>,
}

/// How close two models are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Same {
    /// To the bit.
    Equal,
    /// Up to rounding.
    Same,
    /// As close as the new type allows.
    Close,
    /// Not the same model.
    Different,
}

impl std::fmt::Display for Same {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Same::Equal => "equal",
            Same::Same => "same",
            Same::Close => "close",
            Same::Different => "DIFFERENT",
        })
    }
}

/// Compares on the fixed prompts, in the tokens of `original`.
fn parity(original: &Checkpoint, pair: [(&Model, &Weights); 2]) -> Result<Parity> {
    let n_vocab = original.model().config().n_vocab;
    parity::compare(pair, &parity::prompts(original.tokenizer()?.as_ref(), n_vocab)?)
}

impl Checkpoint {
    /// Writes the model in another form or type, with its adapter folded in where it has one,
    /// reads it again and compares both on fixed prompts.
    ///
    /// `mix` names how matrices are stored (see [`Mix`]); `on_bytes` hears of bytes
    /// written and of all there will be, about.
    pub fn convert(
        &self,
        path: impl AsRef<Path>,
        form: Form,
        mix: Option<Mix>,
        device: &Device,
        on_bytes: &mut (dyn FnMut(u64, u64) + Send),
    ) -> Result<Conversion> {
        let mut save = Save { path: path.as_ref(), form, mix, on_bytes };
        if disk::exists(save.path) && disk::is_directory(save.path) != save.is_directory() {
            let kind = if save.is_directory() { "a file" } else { "a directory" };
            let problem = format!("{} is {kind}", save.path.display());
            return Err(Error::input(problem, "choose another name"));
        }
        let mut weights = self.weights(device)?;
        if let Some(adapter) = self.own_adapter(device)? {
            adapter.merge_into(&mut weights)?;
        }
        let n_bytes = device.run(|| save.write(self, &weights))?;
        let written = Checkpoint::open(save.path)?;
        let new_weights = written.weights(device)?;
        let pair = [(self.model(), &weights), (written.model(), &new_weights)];
        let parity = device.run(|| parity(self, pair))?;
        // Without blocks or shorter floats nothing but rounding may differ.
        let is_exact = !has_blocks(&new_weights) && mix.is_none_or(|mix| mix.name() == "f32");
        let difference = parity.logit_difference;
        let verdict = match (difference == 0.0, difference <= 1e-3, is_exact) {
            (true, _, _) => Same::Equal,
            (_, true, _) => Same::Same,
            (_, _, false) if difference.is_finite() => Same::Close,
            _ => Same::Different,
        };
        let dtype_bytes = dtype_bytes(&new_weights);
        let (parity, adapter_difference) = (Some(parity), None);
        let is_ours = matches!(Arch::of(self.model().config()), Ok(Arch::Elapid));
        let note = (form == Form::Gguf && is_ours)
            .then_some("llama.cpp does not load this file: it has no Mamba-3");
        Ok(Conversion { n_bytes, dtype_bytes, parity, adapter_difference, verdict, note })
    }
}

impl Adapter {
    /// Writes the adapter as a PEFT directory or, with a name that ends in `.gguf`, for llama.cpp;
    /// reads it again and compares. GGUF needs the base model.
    pub fn convert(
        &self,
        path: impl AsRef<Path>,
        base: Option<&Checkpoint>,
        device: &Device,
    ) -> Result<Conversion> {
        let path = path.as_ref();
        let lora = self.read(base, device)?;
        let n_bytes = lora.save(path, base)?;
        let again = Adapter::open(path)?.read(base, device)?;
        let parity = match base {
            None => None,
            Some(base) => Some(device.run(|| {
                let with = |lora: &Lora| {
                    let mut weights = base.weights(device)?;
                    lora.attach(&mut weights)?;
                    Ok(weights)
                };
                let (one, two) = (with(&lora)?, with(&again)?);
                parity(base, [(base.model(), &one), (base.model(), &two)])
            })?),
        };
        let difference = lora.difference(&again);
        let logits = parity.map_or(0.0, |parity| parity.logit_difference);
        let verdict = match (difference == 0.0 && logits == 0.0, difference <= 1e-5, logits <= 1e-3)
        {
            (true, _, _) => Same::Equal,
            (_, true, true) => Same::Same,
            _ => Same::Different,
        };
        let (dtype_bytes, adapter_difference) = (BTreeMap::new(), Some(difference));
        Ok(Conversion { n_bytes, dtype_bytes, parity, adapter_difference, verdict, note: None })
    }
}
