//! Adapters that are loaded, and the weights of each combination that is asked for.
//!
//! A combination is a list of adapters, each with a factor for its scale. Its weights share every
//! tensor of the base: switching costs a list of names, and adds the halves. Several adapters of
//! one matrix become one of the ranks together:
//!
//! ```text
//! s1 B1 A1 + s2 B2 A2 = (s1 B1, s2 B2) (A1 ; A2)
//! ```
//!
//! An adapter that trains the lengths of rows (DoRA) is not a sum, and goes alone; a factor of zero
//! leaves an adapter out.

use crate::error::{Error, Result};
use crate::model::lora::{Lora, Module};
use crate::model::weights::Weights;
use crate::tensor::{DType, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Combinations kept ready, at most.
const N_READY_MAX: usize = 8;

/// A combination: (number of the adapter, bits of its factor), in order.
pub(super) type Combination = Vec<(usize, u32)>;

/// Adapters by number, and combinations that are ready.
pub(super) struct Adapters {
    base: Arc<Weights>,
    /// None for one that was removed: numbers are not given twice, as snapshots know them.
    list: Vec<Option<Loaded>>,
    /// The last used is the last.
    ready: Vec<(Combination, Arc<Weights>)>,
}

struct Loaded {
    name: String,
    lora: Lora,
}

impl Adapters {
    pub(super) fn new(base: Weights) -> Adapters {
        Adapters { base: Arc::new(base), list: Vec::new(), ready: Vec::new() }
    }

    pub(super) fn base(&self) -> &Weights {
        &self.base
    }

    /// Adds one, if it fits the base; returns its number.
    pub(super) fn add(&mut self, name: &str, mut lora: Lora) -> Result<usize> {
        let mut trial = self.base.share();
        lora.attach(&mut trial)?;
        let is_adapted = |module: &Module| {
            let id = self.base.find(&module.param);
            id.is_some_and(|id| self.base.adapter_of(id).is_some())
        };
        if let Some(module) = lora.modules.iter().find(|module| is_adapted(module)) {
            let problem = format!("`{}` of the base has an adapter already", module.param);
            return Err(Error::input(problem, "merge that adapter into the base first"));
        }
        for module in &mut lora.modules {
            let halves = [&mut module.a, &mut module.b].into_iter().chain(&mut module.magnitude);
            halves.filter(|half| half.dtype() != DType::F32).for_each(|half| *half = half.to_f32());
        }
        self.list.push(Some(Loaded { name: name.into(), lora }));
        Ok(self.list.len() - 1)
    }

    /// Removes one; weights that are in use keep it.
    pub(super) fn remove(&mut self, idx: usize) -> Result<()> {
        self.get(idx)?;
        self.list[idx] = None;
        self.ready.retain(|(combination, _)| combination.iter().all(|part| part.0 != idx));
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn names(&self) -> Vec<(usize, &str)> {
        let all = self.list.iter().enumerate();
        all.filter_map(|(idx, it)| Some((idx, it.as_ref()?.name.as_str()))).collect()
    }

    fn get(&self, idx: usize) -> Result<&Loaded> {
        self.list.get(idx).and_then(Option::as_ref).ok_or_else(|| {
            let all = self.list.iter().enumerate();
            let all = all.filter_map(|(idx, it)| Some(format!("{idx} {}", it.as_ref()?.name)));
            let list: Vec<String> = all.collect();
            let hint = match list.is_empty() {
                true => "none is loaded".to_string(),
                false => format!("these are loaded: {}", list.join(", ")),
            };
            Error::input(format!("there is no adapter {idx}"), &hint)
        })
    }

    /// The weights with these adapters, and what tells the combination from others.
    pub(super) fn weights(
        &mut self,
        wanted: &[(usize, f32)],
    ) -> Result<(Combination, Arc<Weights>)> {
        let parts = self.check(wanted)?;
        let key: Combination = parts.iter().map(|(idx, f)| (*idx, f.to_bits())).collect();
        if key.is_empty() {
            return Ok((key, self.base.clone()));
        }
        let ready = match self.ready.iter().position(|(other, _)| *other == key) {
            Some(at) => self.ready.remove(at),
            None => {
                let made = self.combine(&parts);
                self.base.device().check()?;
                (key, Arc::new(made))
            }
        };
        if self.ready.len() == N_READY_MAX {
            self.ready.remove(0);
        }
        self.ready.push(ready.clone());
        Ok(ready)
    }

    /// The adapters that count, with their factors, in the order they were loaded in.
    fn check(&self, wanted: &[(usize, f32)]) -> Result<Vec<(usize, f32)>> {
        let mut parts: Vec<(usize, f32)> = Vec::new();
        for &(idx, factor) in wanted {
            self.get(idx)?;
            if !factor.is_finite() {
                let problem = format!("adapter {idx} has the scale {factor}");
                return Err(Error::input(problem, "give a number; 1 is as it was trained"));
            }
            if parts.iter().any(|(other, _)| *other == idx) {
                let problem = format!("adapter {idx} is asked for twice");
                return Err(Error::input(problem, "give each adapter one scale"));
            }
            parts.push((idx, factor));
        }
        parts.retain(|(_, factor)| *factor != 0.0);
        parts.sort_by_key(|part| part.0);
        let is_dora = |it: &&Loaded| it.lora.modules.iter().any(|it| it.magnitude.is_some());
        let dora = parts.iter().filter_map(|part| self.list[part.0].as_ref()).find(is_dora);
        match dora {
            Some(dora) if parts.len() > 1 => {
                let problem = format!(
                    "`{}` is a DoRA adapter, which cannot be combined with others",
                    dora.name
                );
                Err(Error::input(problem, "ask for it alone, or merge it into the base"))
            }
            _ => Ok(parts),
        }
    }

    fn combine(&self, parts: &[(usize, f32)]) -> Weights {
        let mut by_param: BTreeMap<&str, Vec<(&Module, f32)>> = BTreeMap::new();
        for (idx, factor) in parts {
            let Some(Loaded { lora, .. }) = &self.list[*idx] else { continue };
            for module in &lora.modules {
                let factor = lora.factor(module) as f32 * factor;
                by_param.entry(&module.param).or_default().push((module, factor));
            }
        }
        let mut weights = self.base.share();
        for (param, modules) in by_param {
            let id = weights.find(param).expect("an adapter is checked when it is added");
            let names = ["a", "b"].map(|half| format!("{param}.adapter.{half}"));
            match &modules[..] {
                [(module, factor)] => {
                    weights.adapt(id, names, [module.a.clone(), module.b.clone()], *factor);
                    if let Some(m) = &module.magnitude {
                        weights.add_magnitude(id, format!("{param}.adapter.m"), Some(m.clone()));
                    }
                }
                many => weights.adapt(id, names, stack(many), 1.0),
            }
        }
        weights
    }
}

/// The halves of several adapters of one matrix as those of one, factors in the upper half.
fn stack(modules: &[(&Module, f32)]) -> [Tensor; 2] {
    let lower: Vec<Tensor> = modules.iter().map(|(module, _)| module.a.clone()).collect();
    let a = Tensor::stack(&lower);
    let (d_out, rank) = (modules[0].0.b.shape()[0], a.shape()[0]);
    let mut b = Tensor::uninit(a.device(), &[d_out, rank]);
    for (row, to) in b.f32_mut().chunks_exact_mut(rank).enumerate() {
        let mut to = to.iter_mut();
        for (module, factor) in modules {
            let n = module.rank();
            let from = &module.b.f32()[row * n..(row + 1) * n];
            from.iter().zip(&mut to).for_each(|(from, to)| *to = from * factor);
        }
    }
    [a, b]
}
