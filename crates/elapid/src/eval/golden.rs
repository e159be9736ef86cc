//! Compares a model with reference values that another implementation computed.
//!
//! A golden file holds `input_ids` and `labels` (n_seq, n_tok), `logits`, `loss` (the mean
//! cross-entropy of each next label, -100 ignored), perhaps `hidden.N`, and `grad.<name>` for every
//! parameter that is trained. A second file may hold parameters after some AdamW steps on the same
//! batch.

use crate::error::{Error, Result};
use crate::files::TensorFile;
use crate::files::disk::{exists, read_text};
use crate::files::safetensors::SafeTensors;
use crate::model::adapter::Adapter;
use crate::model::checkpoint::Checkpoint;
use crate::model::config::Config;
use crate::model::open::safetensors as open_safetensors;
use crate::model::weights::{ParamId, Weights};
use crate::model::{ForwardOptions, Model};
use crate::ops::adamw::AdamW;
use crate::tape::{Gradients, Tape};
use crate::tensor::Tensor;
use crate::tensor::batch::{Batch, Targets};
use crate::tensor::device::Device;
#[cfg(not(target_family = "wasm"))]
use crate::tensor::gpu::later::wait;
use crate::train::optim::{Optimizer, OptimizerKind};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Largest difference of a logit or hidden number.
const LOGITS_TOLERANCE: f64 = 1e-4;
/// Hidden numbers above this are compared by their share of it: the spacing of f32 grows with them,
/// and the residual stream of Mamba-3 sets reaches several hundred.
const HIDDEN_LARGE: f32 = 32.0;
/// Largest difference of the loss.
const LOSS_TOLERANCE: f64 = 1e-5;
/// Largest relative difference of a gradient, by the norms of whole tensors.
const GRAD_TOLERANCE: f64 = 1e-4;
/// Largest mean difference of a parameter after the steps of AdamW.
const ADAMW_MEAN_TOLERANCE: f64 = 1e-6;
/// After AdamW, at most this share of entries may differ by more than 1e-5. Never the maximum:
/// where a gradient is almost zero its sign is noise, and AdamW steps by the sign.
const ADAMW_SHARE_TOLERANCE: f64 = 1e-3;

/// One comparison.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// What was compared.
    pub quantity: String,
    /// How far apart.
    pub error: f64,
    /// How far apart they may be.
    pub tolerance: f64,
    /// How the error is measured, and where it is largest.
    pub note: String,
}

impl Comparison {
    fn new(quantity: &str, error: f64, tolerance: f64, note: impl Into<String>) -> Comparison {
        Comparison { quantity: quantity.into(), error, tolerance, note: note.into() }
    }

    /// Whether the error is within the tolerance; what is not a number is not.
    pub fn holds(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// Parameters after AdamW, its settings in every step (every parameter decays), and the steps.
type AfterAdamW = (SafeTensors, AdamW, usize);

/// A model and the reference values of its set, with their fixed batch.
struct Case<'a> {
    model: &'a Model,
    golden: &'a SafeTensors,
    batch: Batch,
    target_ids: Vec<u32>,
    target_weights: Vec<f32>,
}

impl Case<'_> {
    fn read<'a>(model: &'a Model, golden: &'a SafeTensors) -> Result<Case<'a>> {
        let fail = |problem: &str| {
            Err(Error::format(golden.file(), problem, "golden/README.md says what a set holds"))
        };
        let Some(&[n_seq, n_tok]) = golden.shape("input_ids") else {
            return fail("`input_ids` is not a matrix");
        };
        if golden.shape("labels") != Some(&[n_seq, n_tok]) {
            return fail("`labels` does not have the shape of `input_ids`");
        }
        if let Some(name) = ["logits", "loss"].iter().find(|name| golden.shape(name).is_none()) {
            return fail(&format!("there is no `{name}`"));
        }
        let ids = golden.integers("input_ids")?.unwrap_or_default();
        let labels = golden.integers("labels")?.unwrap_or_default();
        let ids: Vec<u32> = ids.iter().filter_map(|id| u32::try_from(*id).ok()).collect();
        if ids.len() != labels.len() {
            return fail("`input_ids` holds a negative number");
        }
        let sequences: Vec<&[u32]> = ids.chunks(n_tok.max(1)).collect();
        let batch = Batch::from_sequences(&sequences);
        let mut target_ids = vec![0; ids.len()];
        let mut target_weights = vec![0.0; ids.len()];
        let n_vocab = model.config().n_vocab as u32;
        for at in (0..ids.len()).filter(|at| (at + 1) % n_tok != 0) {
            let Ok(label) = u32::try_from(labels[at + 1]) else { continue };
            if label >= n_vocab {
                let problem = format!("label {label} is outside the vocabulary of {n_vocab}");
                return Err(Error::input(problem, "the golden file belongs to another model"));
            }
            (target_ids[at], target_weights[at]) = (label, 1.0);
        }
        Ok(Case { model, golden, batch, target_ids, target_weights })
    }

    /// Compares everything the files hold. The weights are stepped if there is an `after`.
    async fn check(
        &self,
        weights: &mut Weights,
        after: Option<AfterAdamW>,
    ) -> Result<Vec<Comparison>> {
        self.train_what_has_gradients(weights)?;
        let mut list = self.forward(weights).await?;
        list.extend(self.backward(weights).await?);
        if let Some(after) = after {
            list.extend(self.steps(weights, &after).await?);
        }
        weights.device().check()?;
        Ok(list)
    }

    /// Exactly those parameters are trained whose gradients the file holds.
    fn train_what_has_gradients(&self, weights: &mut Weights) -> Result<()> {
        let has = |name: &str| self.golden.shape(&format!("grad.{name}")).is_some();
        let wanted: std::collections::HashSet<String> = weights
            .ids()
            .map(|id| weights.name(id).to_string())
            .zip(self.model.specs().iter().map(Some).chain(std::iter::repeat(None)))
            .filter(|(name, spec)| has(spec.map_or(name.as_str(), |spec| &spec.stored.name)))
            .map(|(name, _)| name)
            .collect();
        if weights.train(|name, _| wanted.contains(name)) == 0 {
            let example = self.golden.names().first().copied().unwrap_or_default().to_string();
            return Err(Error::NoMatch { pattern: "grad.<parameter>".into(), example });
        }
        Ok(())
    }

    async fn forward(&self, weights: &Weights) -> Result<Vec<Comparison>> {
        let mut list = Vec::new();
        let tape = Tape::off();
        let options = ForwardOptions { keep_hidden: true, ..ForwardOptions::default() };
        let forward = self.model.forward(&tape, weights, &self.batch, None, options)?;
        if let Some(want) = reference(weights, self.golden, "logits")? {
            let logits = self.model.logits(&tape, weights, &forward.hidden).value().read().await;
            let error = largest_difference(&logits, want.f32());
            list.push(Comparison::new("logits", error, LOGITS_TOLERANCE, "largest difference"));
        }
        // Before each layer, then after the norm; Mamba's reference begins behind the first layer.
        let n_layer = self.model.config().layers.len();
        let mut best: Option<f64> = None;
        for alignment in [0, 1].map(|first| (first..first + n_layer).chain([n_layer + 1])) {
            let mut worst: Option<f64> = None;
            for (idx, at) in alignment.enumerate() {
                if let Some(want) = reference(weights, self.golden, &format!("hidden.{idx}"))? {
                    let largest = want.f32().iter().fold(HIDDEN_LARGE, |most, x| most.max(x.abs()));
                    let error = largest_difference(&forward.stream[at].read().await, want.f32());
                    let error = error / f64::from(largest / HIDDEN_LARGE);
                    worst = Some(worst.unwrap_or(0.0).max(error));
                }
            }
            best = best.into_iter().chain(worst).reduce(f64::min);
        }
        let note = "largest difference, all layers";
        list.extend(best.map(|error| Comparison::new("hidden", error, LOGITS_TOLERANCE, note)));
        Ok(list)
    }

    async fn backward(&self, weights: &Weights) -> Result<Vec<Comparison>> {
        let (loss, grads) = self.loss_and_gradients(weights).await?;
        let mut list = Vec::new();
        if let Some(want) = reference(weights, self.golden, "loss")? {
            let error = largest_difference(&[loss], want.f32());
            list.push(Comparison::new("loss", error, LOSS_TOLERANCE, format!("{loss:.6}")));
        }
        for name in self.golden.names().into_iter().filter(|name| name.starts_with("grad.")) {
            let Some(want) = reference(weights, self.golden, name)? else { continue };
            let got = stored(self.model, weights, &name[5..], |id| grads.get(id.0).cloned()).await;
            let square = |x: f32| x as f64 * x as f64;
            let squares = got.iter().zip(want.f32()).map(|(a, b)| square(a - b));
            let distance = squares.sum::<f64>().sqrt();
            let length = want.f32().iter().map(|&x| square(x)).sum::<f64>().sqrt();
            let is_same_shape = got.len() == want.n_elem();
            let error = if is_same_shape { distance / length.max(1e-12) } else { f64::INFINITY };
            let note = format!("relative, norm {length:.2e}");
            list.push(Comparison::new(name, error, GRAD_TOLERANCE, note));
        }
        Ok(list)
    }

    async fn loss_and_gradients(&self, weights: &Weights) -> Result<(f32, Gradients)> {
        let norm = self.target_weights.iter().sum();
        let targets = Targets { ids: &self.target_ids, weights: &self.target_weights, norm };
        let (tape, options) = (Tape::new(), ForwardOptions::default());
        let loss = self.model.loss(&tape, weights, &self.batch, &targets, options)?.loss;
        let mut grads = Gradients::default();
        let value = loss.value().read().await[0];
        tape.backward(&loss, 1.0, &mut grads);
        Ok((value, grads))
    }

    async fn steps(
        &self,
        weights: &mut Weights,
        (file, settings, n_steps): &AfterAdamW,
    ) -> Result<Vec<Comparison>> {
        let mut optimizer = Optimizer::new(weights, OptimizerKind::AdamW);
        for _ in 0..*n_steps {
            let (_, grads) = self.loss_and_gradients(weights).await?;
            optimizer.step(weights, &grads, |_, _| *settings);
        }
        let (mut sum, mut n_far, mut n) = (0.0f64, 0usize, 0usize);
        for name in file.names() {
            let Some(want) = reference(weights, file, name)? else { continue };
            let tensor = |id| Some(weights.tensor(id).to_f32());
            let got = stored(self.model, weights, name, tensor).await;
            if got.len() != want.n_elem() {
                let shape = want.shape().to_vec();
                return Err(Error::MissingTensor { name: name.into(), shape });
            }
            for (a, b) in got.iter().zip(want.f32()) {
                let d = (*a as f64 - *b as f64).abs();
                sum += d;
                n_far += (d > 1e-5 || d.is_nan()) as usize;
                n += 1;
            }
        }
        let n = n.max(1) as f64;
        let mean = if sum.is_nan() { f64::INFINITY } else { sum / n };
        let share = n_far as f64 / n;
        let note = |what: &str| format!("{what}, after {n_steps} steps");
        let far = note("share of entries off by more than 1e-5");
        Ok(vec![
            Comparison::new("adamw mean", mean, ADAMW_MEAN_TOLERANCE, note("mean difference")),
            Comparison::new("adamw far", share, ADAMW_SHARE_TOLERANCE, far),
        ])
    }
}

/// A tensor of a reference file on the host.
fn reference(weights: &Weights, file: &SafeTensors, name: &str) -> Result<Option<Tensor>> {
    let host = weights.device().host_device();
    Ok(file.tensor(&host, name)?.map(|tensor| tensor.to_f32()))
}

fn largest_difference(got: &[f32], want: &[f32]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let differences = got.iter().zip(want).map(|(a, b)| (*a as f64 - *b as f64).abs());
    // A number that is not one must not vanish in a maximum.
    differences.fold(0.0, |worst, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) })
}

/// The numbers of a stored tensor, put together from the parameters that are parts of it.
async fn stored(
    model: &Model,
    weights: &Weights,
    name: &str,
    tensor_of: impl Fn(ParamId) -> Option<Tensor>,
) -> Vec<f32> {
    let specs = model.specs().iter().enumerate();
    let parts: Vec<_> = specs.filter(|(_, spec)| spec.stored.name == name).collect();
    let Some((_, first)) = parts.first() else {
        let Some(tensor) = weights.find(name).and_then(tensor_of) else { return Vec::new() };
        return tensor.read().await;
    };
    let n_cols = first.stored.shape.last().copied().unwrap_or(1);
    let mut whole = vec![0.0; first.stored.shape.iter().product()];
    for (idx, spec) in parts {
        if let Some(tensor) = tensor_of(ParamId(idx)) {
            let begin = spec.stored.rows.as_ref().map_or(0, |rows| rows.start * n_cols);
            whole[begin..begin + tensor.n_elem()].copy_from_slice(&tensor.read().await);
        }
    }
    whole
}

/// Compares the model of a directory with the reference values beside it (`golden.safetensors`,
/// `after_adamw.safetensors`, `golden.json`); `model` takes the model from elsewhere.
///
/// Also says what was not compared, and why. Awaited in a browser.
#[cfg(not(target_family = "wasm"))]
pub fn check_directory(
    dir: &Path,
    model: Option<&Path>,
    device: &Device,
) -> Result<(Vec<Comparison>, Option<String>)> {
    device.run(|| wait(compare_directory(dir, model, device)))
}

/// The same where nobody can wait.
#[cfg(target_family = "wasm")]
pub async fn check_directory(
    dir: &Path,
    model: Option<&Path>,
    device: &Device,
) -> Result<(Vec<Comparison>, Option<String>)> {
    compare_directory(dir, model, device).await
}

async fn compare_directory(
    dir: &Path,
    model: Option<&Path>,
    device: &Device,
) -> Result<(Vec<Comparison>, Option<String>)> {
    let (model, mut weights) = open_model(device, dir, model)?;
    let is_grouped = exists(&dir.join("golden_grouped.safetensors"));
    let suffix = if is_grouped { "_grouped.safetensors" } else { ".safetensors" };
    let golden = open_safetensors(&dir.join(format!("golden{suffix}")))?;
    let after_path = dir.join(format!("after_adamw{suffix}"));
    let (mut after, mut skipped) = (None, None);
    if exists(&after_path) {
        let (settings, n_steps) = optimizer_settings(&dir.join("golden.json"))?;
        after = Some((open_safetensors(&after_path)?, settings, n_steps));
    } else {
        skipped = Some(format!("there is no after_adamw{suffix}"));
    }
    let found = Case::read(&model, &golden)?.check(&mut weights, after).await?;
    Ok((found, skipped))
}

/// The model of a directory, or, where it holds an adapter, its base with the adapter.
fn open_model(device: &Device, dir: &Path, model_path: Option<&Path>) -> Result<(Model, Weights)> {
    let adapter_dir = [dir.join("adapter"), dir.to_path_buf()]
        .into_iter()
        .find(|dir| exists(&dir.join("adapter_config.json")));
    let base = match &adapter_dir {
        Some(adapter_dir) => base_of(dir, adapter_dir)?,
        None => dir.to_path_buf(),
    };
    let checkpoint = Checkpoint::open(model_path.unwrap_or(&base))?;
    // Reference losses are without the load balance.
    let config = Config { balance_scale: 0.0, ..checkpoint.model().config().clone() };
    let model = Model::new(config);
    let mut weights = checkpoint.weights(device)?;
    if let Some(adapter_dir) = adapter_dir {
        Adapter::open(adapter_dir)?.read(None, device)?.attach(&mut weights)?;
    }
    Ok((model, weights))
}

/// The base of an adapter: what its config names, beside the set, else what golden.json names.
fn base_of(dir: &Path, adapter_dir: &Path) -> Result<PathBuf> {
    let read = |path: PathBuf, key: &str| -> Option<String> {
        let json: Value = serde_json::from_str(&read_text(&path).ok()?).ok()?;
        json.get(key)?.as_str().map(str::to_string)
    };
    let named = read(adapter_dir.join("adapter_config.json"), "base_model_name_or_path");
    let golden = read(dir.join("golden.json"), "base");
    let candidates = [
        named.as_ref().map(|name| dir.join(name)),
        named.as_ref().map(PathBuf::from),
        golden.as_ref().map(|name| dir.join("..").join(name)),
    ];
    let mut candidates = candidates.into_iter().flatten();
    candidates.find(|path| exists(&path.join("config.json"))).ok_or_else(|| {
        let problem = format!("the base model of {} was not found", adapter_dir.display());
        let name = named.or(golden).unwrap_or_default();
        Error::input(problem, &format!("put {name:?} where the adapter's config points"))
    })
}

/// `optimizer` of golden.json: settings and number of steps.
fn optimizer_settings(path: &Path) -> Result<(AdamW, usize)> {
    let json: Value = serde_json::from_str(&read_text(path)?).map_err(|error| {
        Error::input(format!("{}: {error}", path.display()), "make the set again")
    })?;
    let read = |pointer: &str| {
        json.pointer(pointer).and_then(Value::as_f64).ok_or_else(|| {
            let problem = format!("{}: there is no number at {pointer}", path.display());
            Error::input(problem, "golden.json says how the steps were made")
        })
    };
    let settings = AdamW {
        lr: read("/optimizer/lr")?,
        beta1: read("/optimizer/betas/0")?,
        beta2: read("/optimizer/betas/1")?,
        eps: read("/optimizer/eps")?,
        weight_decay: read("/optimizer/weight_decay")?,
        grad_scale: 1.0,
        trust: None,
    };
    let n_steps = read("/optimizer/steps")?;
    if !(1.0..=1e4).contains(&n_steps) {
        let problem = format!("{}: {n_steps} optimizer steps", path.display());
        return Err(Error::input(problem, "between 1 and 10000 steps are made"));
    }
    Ok((settings, n_steps as usize))
}
