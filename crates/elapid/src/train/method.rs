//! What of a model is trained, and how: policies over the list of parameters.
//!
//! | method       | trained                                                               |
//! |--------------|-----------------------------------------------------------------------|
//! | `full`       | everything; from scratch is the same, from fresh numbers              |
//! | `lora`       | two thin halves beside each matrix that a pattern names               |
//! | `qlora`      | the same, over a base whose matrices are in blocks                    |
//! | `bc`         | what produces B and C of state-space layers, and nothing else         |
//! | `embeddings` | the embedding, and the head where it is a matrix of its own           |
//!
//! `bc` is an adapter with a frozen upper half: the rows of `x_proj` (Mamba-1) or `in_proj`
//! (Mamba-2) that make B and C get an addition of their own,
//!
//! ```text
//! y = W x + S A x      S (d_out, r) has a one per row of B and C, and is frozen; A starts at 0
//! ```
//!
//! so `A` is exactly the change of these rows, the base is never touched, and the result is a LoRA
//! adapter of rank r with `alpha = r`, without any approximation.
//!
//! A pattern without `*` names a module by its last part or parts (`q_proj`, `mlp.up_proj`), as in
//! PEFT; with `*` it is matched against the whole name. A pattern that matches nothing is an error.

use crate::error::{Error, Result};
use crate::model::lora::{Lora, Module};
use crate::model::weights::{ParamId, Role, Weights};
use crate::model::{HEAD, Model};
use crate::tensor::quant::BlockType;
use crate::tensor::rng::Rng;
use crate::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ops::Range;

/// What is trained.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Every parameter.
    Full,
    /// Low-rank adapters beside frozen matrices.
    Lora(LoraSettings),
    /// What produces B and C.
    Bc,
    /// Embedding and head.
    Embeddings,
}

impl std::fmt::Display for Method {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Method::Full => "full",
            Method::Lora(_) => "lora",
            Method::Bc => "bc",
            Method::Embeddings => "embeddings",
        })
    }
}

/// Settings of low-rank adapters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoraSettings {
    /// Patterns of module names; none: all linear maps that adapters of other tools can hold.
    pub targets: Vec<String>,
    /// Inner width.
    pub rank: usize,
    /// The addition is multiplied by `alpha / rank`, or `alpha / sqrt(rank)`.
    pub alpha: f64,
    /// Share of the adapter's input that is dropped in training.
    pub dropout: f32,
    /// How rank and alpha make the factor.
    pub scaling: Scaling,
    /// Whether the length of each row is trained apart from its direction.
    pub form: Form,
}

/// How rank and alpha make the factor of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scaling {
    /// `alpha / rank`.
    Plain,
    /// `alpha / sqrt(rank)`: the size of the update does not fall with the rank.
    RsLora,
}

/// The form of an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// `W + factor B A`.
    Lora,
    /// The same with rows of trained length.
    Dora,
}

impl Default for LoraSettings {
    fn default() -> LoraSettings {
        LoraSettings {
            targets: Vec::new(),
            rank: 16,
            alpha: 32.0,
            dropout: 0.0,
            scaling: Scaling::Plain,
            form: Form::Lora,
        }
    }
}

/// What a method reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Coverage {
    /// Layers in which something is trained.
    pub n_layers: usize,
    /// Layers in all.
    pub n_layers_all: usize,
    /// Matrices that are trained or adapted.
    pub n_matrices: usize,
    /// Numbers that are trained.
    pub n_trained: usize,
    /// Numbers of the model, without adapters.
    pub n_all: usize,
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = 100.0 * self.n_trained as f64 / self.n_all.max(1) as f64;
        let digits = if percent >= 10.0 { 0 } else { 2 };
        write!(
            f,
            "adapts {}/{} layers, {} matrices, {percent:.digits$}% of parameters",
            self.n_layers, self.n_layers_all, self.n_matrices
        )
    }
}

/// Freezes and trains what the method says; adapters begin from `seed`.
pub fn apply(method: &Method, model: &Model, weights: &mut Weights, seed: u64) -> Result<Coverage> {
    match method {
        Method::Full => {
            weights.train(|_, _| true);
        }
        Method::Embeddings => {
            weights.train(|name, role| role == Role::Embedding || name == HEAD);
        }
        Method::Lora(settings) => lora(settings, model, weights, seed)?,
        Method::Bc => bc(model, weights)?,
    }
    Ok(coverage_of(model, weights))
}

/// What is trained as the weights stand.
pub fn coverage_of(model: &Model, weights: &Weights) -> Coverage {
    let of_model = || (0..model.specs().len()).map(ParamId);
    let is_touched = |id: &ParamId| weights.any_trained(id.0..id.0 + 1);
    let layers: BTreeSet<usize> =
        of_model().filter(is_touched).filter_map(|id| model.layer_of(id)).collect();
    let is_matrix = |id: &ParamId| weights.role(*id) == Role::Matrix;
    let n_elem = |id: ParamId| weights.tensor(id).n_elem();
    Coverage {
        n_layers: layers.len(),
        n_layers_all: model.config().layers.len(),
        n_matrices: of_model().filter(|id| is_touched(id) && is_matrix(id)).count(),
        n_trained: weights.trained().into_iter().map(n_elem).sum(),
        n_all: of_model().map(n_elem).sum(),
    }
}

/// Whether a pattern names this module.
pub fn matches(pattern: &str, module: &str) -> bool {
    if !pattern.contains('*') {
        let tail = module.strip_suffix(pattern);
        return tail.is_some_and(|before| before.is_empty() || before.ends_with('.'));
    }
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = module.strip_prefix(first) else { return false };
    let mut parts: Vec<&str> = parts.collect();
    let last = parts.pop().unwrap_or_default();
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// Matrices that the patterns name; without patterns all that adapters of other tools can hold.
fn targets(settings: &LoraSettings, model: &Model, weights: &Weights) -> Result<Vec<ParamId>> {
    let patterns = &settings.targets[..];
    let modules = model.specs().iter().enumerate().filter_map(|(idx, spec)| {
        let module = spec.name.strip_suffix(".weight")?;
        (spec.role == Role::Matrix).then_some((ParamId(idx), module))
    });
    let modules: Vec<(ParamId, &str)> = modules.collect();
    let example = modules.first().map_or("", |module| module.1);
    for pattern in patterns {
        if !modules.iter().any(|(_, module)| matches(pattern, module)) {
            return Err(Error::NoMatch { pattern: pattern.clone(), example: example.into() });
        }
    }
    // Transformers multiplies the weight of `dt_proj` itself, so that PEFT drops an adapter there;
    // on the `out_proj` of Mamba layers PEFT refuses one.
    // What is no wider than the rank, as a router may be, has nothing to gain.
    let by_default = |id: ParamId, name: &str| {
        let (d_out, d_in) = weights.tensor(id).dims2();
        let is_left_out = [".dt_proj", ".out_proj"].iter().any(|tail| name.ends_with(tail));
        name != "lm_head" && !is_left_out && d_out.min(d_in) > settings.rank
    };
    let wanted = |&(id, name): &(ParamId, &str)| match patterns {
        [] => by_default(id, name),
        patterns => patterns.iter().any(|pattern| matches(pattern, name)),
    };
    let ids: Vec<ParamId> =
        modules.iter().filter(|module| wanted(module)).map(|module| module.0).collect();
    if ids.is_empty() {
        let problem = format!("no matrix of {} parameters can be adapted", weights.ids().count());
        return Err(Error::input(problem, "train all parameters instead"));
    }
    Ok(ids)
}

/// Streams of random numbers of adapters lie apart from those of fresh models.
const STREAM: u64 = 1 << 40;

fn lora(settings: &LoraSettings, model: &Model, weights: &mut Weights, seed: u64) -> Result<()> {
    let factors: Vec<f32> = weights.ids().filter_map(|id| weights.adapter_factor(id)).collect();
    if !factors.is_empty() {
        return continue_lora(settings, weights, &factors);
    }
    let ids = targets(settings, model, weights)?;
    let mut modules = Vec::with_capacity(ids.len());
    for &id in &ids {
        let base = weights.tensor(id);
        let (d_out, d_in) = base.dims2();
        let (rank, device) = (settings.rank, base.device().host_device());
        if rank == 0 || rank > d_in.min(d_out) {
            let problem = format!("rank {rank} for `{}` of {d_out} x {d_in}", weights.name(id));
            return Err(Error::input(problem, "choose a rank between 1 and the smaller side"));
        }
        // As PEFT begins: `a` uniform as a linear layer of torch, `b` zero.
        let (bound, rng) = ((d_in as f64).powf(-0.5), Rng::new(seed, STREAM + id.0 as u64));
        let number = |n: usize| ((2.0 * rng.uniform(n as u64) - 1.0) * bound) as f32;
        let a: Vec<f32> = (0..rank * d_in).map(number).collect();
        modules.push(Module {
            param: weights.name(id).to_string(),
            a: Tensor::from_f32(&device, &[rank, d_in], &a),
            b: Tensor::zeros(&device, &[d_out, rank]),
            alpha: settings.alpha,
            magnitude: None,
        });
    }
    let lora = Lora { modules, rslora: settings.scaling == Scaling::RsLora, base: None };
    lora.attach(weights)?;
    if settings.form == Form::Dora {
        for (&id, module) in ids.iter().zip(&lora.modules) {
            weights.add_magnitude(id, module.magnitude_name()?, None);
        }
    }
    weights.set_dropout(settings.dropout);
    train_adapters(weights, |_| true);
    Ok(())
}

/// Trains the adapter that the model was opened with. It is written with these settings again: they
/// must be its own.
fn continue_lora(settings: &LoraSettings, weights: &mut Weights, factors: &[f32]) -> Result<()> {
    let rank = settings.rank as f64;
    let root = if settings.scaling == Scaling::RsLora { rank.sqrt() } else { rank };
    let factor = (settings.alpha / root) as f32;
    if let Some(other) = factors.iter().find(|other| **other != factor) {
        let problem = format!("the adapter has a factor of {other}, the settings say {factor}");
        return Err(Error::input(problem, "continue it with the rank and alpha that it has"));
    }
    weights.set_dropout(settings.dropout);
    train_adapters(weights, |_| true);
    Ok(())
}

/// Trains adapter parameters that `wanted` says yes to, by the last part of their names.
fn train_adapters(weights: &mut Weights, wanted: impl Fn(&str) -> bool) {
    weights.train(|name, _| name.contains(".lora_") && wanted(name));
}

/// Puts the matrices of a frozen base into blocks of this name, before anything is adapted. `auto`:
/// as they are stored, or q8_0 where none is in blocks.
pub fn quantize(weights: &mut Weights, name: &str) -> Result<()> {
    let in_blocks = |id: ParamId| matches!(weights.tensor(id).dtype(), DType::Block(_));
    let block = match name {
        "auto" if weights.ids().any(in_blocks) => return Ok(()),
        "auto" => BlockType::Q8_0,
        name => BlockType::from_name(name).ok_or_else(|| {
            let problem = format!("there is no block format `{name}`");
            Error::input(problem, "use q8_0, q4_0, q4_k or nf4")
        })?,
    };
    let counts = weights.quantize(block, |_, role| role == Role::Matrix);
    if counts.n_encoded > 0 {
        return Ok(());
    }
    let problem = match counts.n_already {
        0 => format!("no matrix of this model fits blocks of {}", block.name()),
        _ => "the matrices of this model are in blocks already".to_string(),
    };
    Err(Error::input(problem, "omit the quantization, or train with LoRA"))
}

/// The rows of linear maps that make B and C: (module, rows).
fn bc_rows(model: &Model) -> Vec<(String, Range<usize>)> {
    let mixers = model.config().layers.iter().flat_map(|layer| layer.mixer.parts());
    mixers.filter_map(|mixer| mixer.bc_rows()).collect()
}

fn bc(model: &Model, weights: &mut Weights) -> Result<()> {
    let mut modules = Vec::new();
    for (module, rows) in bc_rows(model) {
        let param = format!("{module}.weight");
        let id = weights.find(&param).expect("a state-space layer has its projection");
        let base = weights.tensor(id);
        let (device, rank) = (base.device().host_device(), rows.len());
        let (d_out, d_in) = base.dims2();
        let mut b = Tensor::zeros(&device, &[d_out, rank]);
        for (idx, row) in rows.enumerate() {
            b.f32_mut()[row * rank + idx] = 1.0;
        }
        let a = Tensor::zeros(&device, &[rank, d_in]);
        modules.push(Module { param, a, b, alpha: rank as f64, magnitude: None });
    }
    if modules.is_empty() {
        let family = &model.config().family;
        let problem = format!("no layer of this {family} model has B and C");
        return Err(Error::input(problem, "training B and C alone is for Mamba layers; use LoRA"));
    }
    let lora = Lora { modules, rslora: false, base: None };
    lora.attach(weights)?;
    train_adapters(weights, |name| name.contains(".lora_A."));
    Ok(())
}

/// The adapter as it stands, with the settings it was made with; `None` where there is none.
pub fn adapter(method: &Method, weights: &Weights) -> Option<Lora> {
    let (alpha, rslora) = match method {
        Method::Lora(settings) => (Some(settings.alpha), settings.scaling == Scaling::RsLora),
        Method::Bc => (None, false),
        Method::Full | Method::Embeddings => return None,
    };
    let modules = weights.ids().filter_map(|id| {
        let halves = weights.adapter_of(id)?;
        let rank = halves.a.shape()[0];
        Some(Module {
            param: weights.name(id).to_string(),
            a: halves.a,
            b: halves.b,
            alpha: alpha.unwrap_or(rank as f64),
            magnitude: halves.magnitude,
        })
    });
    Some(Lora { modules: modules.collect(), rslora, base: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_name_modules_by_their_tail_or_with_stars_by_the_whole_name() {
        let module = "model.layers.3.self_attn.q_proj";
        for pattern in ["q_proj", "self_attn.q_proj", "*.q_proj", "*layers.3.*", "*", "model.*"] {
            assert!(matches(pattern, module), "{pattern}");
        }
        for pattern in ["_proj", "k_proj", "*.k_proj", "layers.3", "*layers.3", "q_proj*x"] {
            assert!(!matches(pattern, module), "{pattern}");
        }
    }
}
