//! Low-rank adapters (LoRA), whatever file they come from.
//!
//! An adapter adds `factor * B A` to the matrix of a linear map:
//!
//! | name   | shape         |                                                               |
//! |--------|---------------|---------------------------------------------------------------|
//! | `a`    | (rank, d_in)  | takes the input down                                          |
//! | `b`    | (d_out, rank) | takes it up again                                             |
//! | factor |               | `alpha / rank`, or `alpha / sqrt(rank)` where it is `rslora`  |
//! | `m`    | (d_out)       | DoRA: lengths that the rows of the sum are brought to         |
//!
//! Not here: the files (`peft.rs`, `gguf_lora.rs`) and the product itself (`ops/linear.rs`).

use crate::error::{Error, Result};
use crate::files::Outgoing;
use crate::model::Model;
use crate::model::weights::{ParamId, Role, Weights};
use crate::tensor::{DType, Tensor};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

const HINT_BASE: &str = "the adapter may belong to another base model";

pub struct Lora {
    /// One for each matrix that is adapted, by name.
    pub modules: Vec<Module>,
    /// Whether factors are `alpha / sqrt(rank)`.
    pub rslora: bool,
    /// What the adapter calls its base model.
    pub base: Option<String>,
}

pub struct Module {
    /// The matrix, as the engine names it: `model.layers.0.self_attn.q_proj.weight`.
    pub param: String,
    /// (rank, d_in).
    pub a: Tensor,
    /// (d_out, rank).
    pub b: Tensor,
    /// (d_out), of a DoRA adapter.
    pub magnitude: Option<Tensor>,
    /// Its factor, but for the rank.
    pub alpha: f64,
}

impl Module {
    pub fn rank(&self) -> usize {
        self.a.shape().first().copied().unwrap_or(0)
    }

    /// The module whose weight is adapted, as PEFT names it.
    pub fn path(&self) -> Result<&str> {
        self.param.strip_suffix(WEIGHT).ok_or_else(|| {
            let problem = format!("`{}` is not the weight of a module of its own", self.param);
            Error::input(problem, "adapt linear maps outside stacked experts")
        })
    }

    /// Names that the halves have in PEFT, and as parameters.
    pub(super) fn half_names(&self) -> Result<[String; 2]> {
        let path = self.path()?;
        Ok(["A", "B"].map(|half| format!("{PREFIX}{path}.lora_{half}.weight")))
    }

    /// Name that the magnitude has in PEFT, and as a parameter.
    pub(crate) fn magnitude_name(&self) -> Result<String> {
        Ok(format!("{PREFIX}{}{MAGNITUDE}", self.path()?))
    }
}

/// Why these are not the halves of an adapter of a matrix of this shape.
pub(super) fn halves_problem(a: &Tensor, b: &Tensor, of: &[usize]) -> Option<String> {
    let (a, b) = (a.shape(), b.shape());
    let fits = match (a, b, of) {
        ([rank, a_in], [b_out, of_b], [d_out, d_in]) => {
            *rank > 0 && rank == of_b && (a_in, b_out) == (d_in, d_out)
        }
        _ => false,
    };
    (!fits).then(|| format!("halves of shapes {a:?} and {b:?} for a matrix of {of:?}"))
}

/// What PEFT puts before the name of a module.
pub(super) const PREFIX: &str = "base_model.model.";

pub(super) const WEIGHT: &str = ".weight";

pub(super) const MAGNITUDE: &str = ".lora_magnitude_vector";

impl Lora {
    /// What the product of a module's halves is multiplied by.
    pub fn factor(&self, module: &Module) -> f64 {
        let rank = module.rank() as f64;
        module.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Numbers in all halves and magnitudes.
    pub fn n_elem(&self) -> usize {
        let of = |module: &Module| {
            let m = module.magnitude.as_ref().map_or(0, Tensor::n_elem);
            module.a.n_elem() + module.b.n_elem() + m
        };
        self.modules.iter().map(of).sum()
    }

    /// Adds the adapter to the matrices it names; returns how many. All of it, or none.
    pub fn attach(&self, weights: &mut Weights) -> Result<usize> {
        let ids = self.find_all(weights)?;
        for (id, module) in ids.iter().zip(&self.modules) {
            let halves = [module.a.to_f32(), module.b.to_f32()];
            weights.adapt(*id, module.half_names()?, halves, self.factor(module) as f32);
            if let Some(m) = &module.magnitude {
                weights.add_magnitude(*id, module.magnitude_name()?, Some(m.to_f32()));
            }
        }
        Ok(ids.len())
    }

    /// Puts the adapter into the matrices it names, which become f32; returns how many. All of it,
    /// or none. They should carry no adapter of their own: it would be counted twice.
    pub fn merge_into(&self, weights: &mut Weights) -> Result<usize> {
        let ids = self.find_all(weights)?;
        for (id, module) in ids.iter().zip(&self.modules) {
            let (a, b) = (module.a.to_f32(), module.b.to_f32());
            let m = module.magnitude.as_ref().map(Tensor::to_f32);
            let factor = self.factor(module) as f32;
            let tensor = weights.tensor_mut(*id);
            *tensor = crate::ops::linear::merge(tensor, &a, &b, factor, m.as_ref());
        }
        Ok(ids.len())
    }

    /// The matrices of all modules, if each fits its own.
    fn find_all(&self, weights: &Weights) -> Result<Vec<ParamId>> {
        let ids = self.modules.iter().map(|module| self.find(module, weights));
        let ids = ids.collect::<Result<Vec<_>>>()?;
        let unique: BTreeSet<ParamId> = ids.iter().copied().collect();
        if unique.len() != ids.len() {
            return Err(Error::input("the adapter names a matrix twice", HINT_BASE));
        }
        Ok(ids)
    }

    /// The matrix of a module, if the halves fit it.
    fn find(&self, module: &Module, weights: &Weights) -> Result<ParamId> {
        // Embeddings and convolutions are no linear maps: an adapter there would do nothing.
        let is_matrix = |id: &_| weights.role(*id) == Role::Matrix;
        let Some(id) = weights.find(&module.param).filter(is_matrix) else {
            let example = weights.ids().find(is_matrix).map(|id| weights.name(id).to_string());
            let (pattern, example) = (module.param.clone(), example.unwrap_or_default());
            return Err(Error::NoMatch { pattern, example });
        };
        let name = module.magnitude_name()?;
        let (param, shape) = (&module.param, weights.tensor(id).shape());
        let m = module.magnitude.as_ref().filter(|m| m.shape() != &shape[..1]);
        let m = m.map(|m| format!("`{name}` has shape {:?} for {} rows", m.shape(), shape[0]));
        if let Some(problem) = halves_problem(&module.a, &module.b, shape).or(m) {
            return Err(Error::input(format!("`{param}`: {problem}"), HINT_BASE));
        }
        if !(self.factor(module) as f32).is_finite() {
            let problem = format!("`{param}`: alpha {} is too large", module.alpha);
            return Err(Error::input(problem, "the adapter may be damaged"));
        }
        Ok(id)
    }
}

/// Every module of a model that has a weight, adapted or not, as PEFT names them.
pub fn modules_of(model: &Model) -> Vec<String> {
    let stored = model.specs().iter().map(|spec| spec.stored.name.as_str());
    let paths: BTreeSet<&str> = stored.filter_map(|name| name.strip_suffix(WEIGHT)).collect();
    paths.into_iter().map(str::to_string).collect()
}

/// The key that comes most often; of several the smallest.
pub(super) fn most_common<K: Ord + Copy>(keys: impl Iterator<Item = K>) -> Option<K> {
    let mut counts: BTreeMap<K, usize> = BTreeMap::new();
    keys.for_each(|key| *counts.entry(key).or_default() += 1);
    counts.into_iter().rev().max_by_key(|(_, n)| *n).map(|(key, _)| key)
}

/// A half to be written: as it is stored, blocks as f32.
pub(super) fn outgoing(name: String, half: &Tensor) -> Outgoing<'_> {
    let dtype = match half.dtype() {
        DType::Block(_) => DType::F32,
        dtype => dtype,
    };
    let bytes = move || match half.dtype() == dtype {
        true => Ok(Cow::Borrowed(half.bytes())),
        false => Ok(Cow::Owned(half.to_f32().bytes().to_vec())),
    };
    Outgoing { name, shape: half.shape().to_vec(), dtype, bytes: Box::new(bytes) }
}

#[cfg(test)]
mod tests;
