//! Compares a model with reference values that another implementation computed.
//!
//! A golden file holds `input_ids` and `labels` (n_seq, n_tok), `logits`, `loss` (the mean
//! cross-entropy of each next label, -100 ignored), perhaps `hidden.N`, and `grad.<name>` for every
//! parameter that is trained. A second file may hold parameters after some AdamW steps on the same
//! batch.

use crate::error::{Error, Result};
use crate::files::TensorFile;
use crate::files::disk::read_text;
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
use crate::train::optim::{Optimizer, OptimizerKind};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Largest difference of a logit or hidden number.
pub const LOGITS_TOLERANCE: f64 = 1e-4;
/// Largest difference of the loss.
pub const LOSS_TOLERANCE: f64 = 1e-5;
/// Largest relative difference of a gradient, by the norms of whole tensors.
pub const GRAD_TOLERANCE: f64 = 1e-4;
/// Largest mean difference of a parameter after the steps of AdamW.
pub const ADAMW_MEAN_TOLERANCE: f64 = 1e-6;
/// After AdamW, at most this share of entries may differ by more than 1e-5. Never the maximum:
/// where a gradient is almost zero its sign is noise, and AdamW steps by the sign.
pub const ADAMW_SHARE_TOLERANCE: f64 = 1e-3;

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
    /// Whether the error is within the tolerance; what is not a number is not.
    pub fn holds(&self) -> bool {
        self.error <= self.tolerance
    }
}

/// Parameters after AdamW, and how they came about.
pub struct AfterAdamW<'a> {
    pub file: &'a SafeTensors,
    /// Settings of every step; every parameter decays.
    pub settings: AdamW,
    pub n_steps: usize,
}

/// The fixed batch of a golden file.
struct Case {
    batch: Batch,
    target_ids: Vec<u32>,
    target_weights: Vec<f32>,
}

impl Case {
    fn read(golden: &SafeTensors) -> Result<Case> {
        let fail = |problem: &str| {
            Err(Error::format(golden.file(), problem, "golden/README.md says what a set holds"))
        };
        let Some(&[n_seq, n_tok]) = golden.shape("input_ids") else {
            return fail("`input_ids` is not a matrix");
        };
        if golden.shape("labels") != Some(&[n_seq, n_tok]) {
            return fail("`labels` has not the shape of `input_ids`");
        }
        let ids = golden.integers("input_ids")?.unwrap_or_default();
        let labels = golden.integers("labels")?.unwrap_or_default();
        let Ok(ids) =
            ids.into_iter().map(u32::try_from).collect::<std::result::Result<Vec<_>, _>>()
        else {
            return fail("`input_ids` holds a negative number");
        };
        let sequences: Vec<&[u32]> = ids.chunks(n_tok.max(1)).collect();
        let mut case = Case {
            batch: Batch::from_sequences(&sequences),
            target_ids: vec![0; ids.len()],
            target_weights: vec![0.0; ids.len()],
        };
        for at in 0..ids.len() {
            let is_last = (at + 1) % n_tok == 0;
            if let (false, Ok(label)) = (is_last, u32::try_from(labels[(at + 1) % labels.len()])) {
                case.target_ids[at] = label;
                case.target_weights[at] = 1.0;
            }
        }
        Ok(case)
    }

    fn targets(&self) -> Targets<'_> {
        let norm = self.target_weights.iter().sum();
        Targets { ids: &self.target_ids, weights: &self.target_weights, norm }
    }
}

/// Compares everything the files hold. The weights are stepped if there is an `after`.
pub fn check(
    device: &Device,
    model: &Model,
    weights: &mut Weights,
    golden: &SafeTensors,
    after: Option<AfterAdamW>,
) -> Result<Vec<Comparison>> {
    let case = Case::read(golden)?;
    let n_vocab = model.config().n_vocab as u32;
    if let Some(id) = case.target_ids.iter().find(|&&id| id >= n_vocab) {
        let problem = format!("label {id} is outside the vocabulary of {n_vocab}");
        return Err(Error::input(problem, "the golden file belongs to another model"));
    }
    for name in ["logits", "loss"] {
        if golden.shape(name).is_none() {
            let problem = format!("there is no `{name}`");
            return Err(Error::format(
                golden.file(),
                problem,
                "golden/README.md says what a set holds",
            ));
        }
    }
    train_what_has_gradients(model, weights, golden)?;
    let mut list = forward(device, model, weights, golden, &case)?;
    list.extend(backward(device, model, weights, golden, &case)?);
    if let Some(after) = after {
        list.extend(steps(device, model, weights, &case, &after)?);
    }
    Ok(list)
}

/// Exactly those parameters are trained whose gradients the file holds.
fn train_what_has_gradients(
    model: &Model,
    weights: &mut Weights,
    golden: &SafeTensors,
) -> Result<()> {
    let has = |name: &str| golden.shape(&format!("grad.{name}")).is_some();
    let wanted: std::collections::HashSet<String> = weights
        .ids()
        .map(|id| weights.name(id).to_string())
        .zip(model.specs().iter().map(Some).chain(std::iter::repeat(None)))
        .filter(|(name, spec)| has(spec.map_or(name.as_str(), |spec| &spec.stored.name)))
        .map(|(name, _)| name)
        .collect();
    if weights.train(|name, _| wanted.contains(name)) == 0 {
        let example = golden.names().first().copied().unwrap_or_default().to_string();
        return Err(Error::NoMatch { pattern: "grad.<parameter>".into(), example });
    }
    Ok(())
}

fn reference(device: &Device, file: &SafeTensors, name: &str) -> Result<Option<Tensor>> {
    Ok(file.tensor(&device.host_device(), name)?.map(|tensor| tensor.to_f32()))
}

fn largest_difference(got: &[f32], want: &[f32]) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let differences = got.iter().zip(want).map(|(a, b)| (*a as f64 - *b as f64).abs());
    // A number that is not one must not vanish in a maximum.
    differences.fold(0.0, |worst, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) })
}

fn forward(
    device: &Device,
    model: &Model,
    weights: &Weights,
    golden: &SafeTensors,
    case: &Case,
) -> Result<Vec<Comparison>> {
    let mut list = Vec::new();
    let tape = Tape::off();
    let options = ForwardOptions { keep_hidden: true, ..ForwardOptions::default() };
    let forward = model.forward(&tape, weights, &case.batch, None, options)?;
    if let Some(want) = reference(device, golden, "logits")? {
        let logits = model.logits(&tape, weights, &forward.hidden);
        list.push(Comparison {
            quantity: "logits".into(),
            error: largest_difference(&logits.value().to_vec(), want.f32()),
            tolerance: LOGITS_TOLERANCE,
            note: "largest difference".into(),
        });
    }
    // Before each layer, then after the norm; Mamba's reference begins behind the first layer.
    let n_layer = model.config().layers.len();
    let normed = n_layer + 1;
    let alignments =
        [0, 1].map(|first| (first..first + n_layer).chain([normed]).collect::<Vec<_>>());
    let mut best: Option<f64> = None;
    for alignment in alignments {
        let mut worst = 0.0f64;
        let mut n_found = 0;
        for (idx, at) in alignment.into_iter().enumerate() {
            if let Some(want) = reference(device, golden, &format!("hidden.{idx}"))? {
                worst = worst.max(largest_difference(&forward.stream[at].to_vec(), want.f32()));
                n_found += 1;
            }
        }
        if n_found > 0 {
            best = Some(best.map_or(worst, |best| best.min(worst)));
        }
    }
    if let Some(error) = best {
        list.push(Comparison {
            quantity: "hidden".into(),
            error,
            tolerance: LOGITS_TOLERANCE,
            note: "largest difference, all layers".into(),
        });
    }
    Ok(list)
}

fn backward(
    device: &Device,
    model: &Model,
    weights: &Weights,
    golden: &SafeTensors,
    case: &Case,
) -> Result<Vec<Comparison>> {
    let (loss, grads) = loss_and_gradients(model, weights, case)?;
    let mut list = Vec::new();
    if let Some(want) = reference(device, golden, "loss")? {
        list.push(Comparison {
            quantity: "loss".into(),
            error: largest_difference(&[loss], want.f32()),
            tolerance: LOSS_TOLERANCE,
            note: format!("{loss:.6}"),
        });
    }
    for name in golden.names().into_iter().filter_map(|name| name.strip_prefix("grad.")) {
        let want = reference(device, golden, &format!("grad.{name}"))?;
        let want = want.expect("the name comes from the file");
        let got = stored(model, weights, name, |id| grads.get(id.0).cloned());
        let square = |x: f32| x as f64 * x as f64;
        let distance = got.iter().zip(want.f32()).map(|(a, b)| square(a - b)).sum::<f64>().sqrt();
        let length = want.f32().iter().map(|&x| square(x)).sum::<f64>().sqrt();
        let is_same_shape = got.len() == want.n_elem();
        list.push(Comparison {
            quantity: format!("grad.{name}"),
            error: if is_same_shape { distance / length.max(1e-12) } else { f64::INFINITY },
            tolerance: GRAD_TOLERANCE,
            note: format!("relative, norm {length:.2e}"),
        });
    }
    Ok(list)
}

fn loss_and_gradients(model: &Model, weights: &Weights, case: &Case) -> Result<(f32, Gradients)> {
    let tape = Tape::new();
    let options = ForwardOptions::default();
    let loss = model.loss(&tape, weights, &case.batch, &case.targets(), options)?.loss;
    let mut grads = Gradients::default();
    let value = loss.value().to_vec()[0];
    tape.backward(&loss, 1.0, &mut grads);
    Ok((value, grads))
}

/// The numbers of a stored tensor, put together from the parameters that are parts of it.
fn stored(
    model: &Model,
    weights: &Weights,
    name: &str,
    tensor_of: impl Fn(ParamId) -> Option<Tensor>,
) -> Vec<f32> {
    let specs = model.specs().iter().enumerate();
    let parts: Vec<_> = specs.filter(|(_, spec)| spec.stored.name == name).collect();
    let Some((_, first)) = parts.first() else {
        let id = weights.find(name);
        return id.and_then(tensor_of).map(|tensor| tensor.to_vec()).unwrap_or_default();
    };
    let n_cols = first.stored.shape.last().copied().unwrap_or(1);
    let mut whole = vec![0.0; first.stored.shape.iter().product()];
    for (idx, spec) in parts {
        if let Some(tensor) = tensor_of(ParamId(idx)) {
            let begin = spec.stored.rows.as_ref().map_or(0, |rows| rows.start * n_cols);
            whole[begin..begin + tensor.n_elem()].copy_from_slice(&tensor.to_vec());
        }
    }
    whole
}

fn steps(
    device: &Device,
    model: &Model,
    weights: &mut Weights,
    case: &Case,
    after: &AfterAdamW,
) -> Result<Vec<Comparison>> {
    let mut optimizer = Optimizer::new(weights, OptimizerKind::AdamW);
    for _ in 0..after.n_steps {
        let (_, grads) = loss_and_gradients(model, weights, case)?;
        optimizer.step(weights, &grads, |_, _| after.settings);
    }
    let (mut sum, mut n_far, mut n) = (0.0f64, 0usize, 0usize);
    for name in after.file.names() {
        let Some(want) = reference(device, after.file, name)? else { continue };
        let whole = |id: ParamId| weights.tensor(id).to_f32();
        let got = stored(model, weights, name, |id| Some(whole(id)));
        if got.len() != want.n_elem() {
            return Err(Error::MissingTensor { name: name.into(), shape: want.shape().to_vec() });
        }
        for (a, b) in got.iter().zip(want.f32()) {
            let d = (*a as f64 - *b as f64).abs();
            sum += d;
            n_far += (d > 1e-5 || d.is_nan()) as usize;
            n += 1;
        }
    }
    let n = n.max(1) as f64;
    let note = |what: &str| format!("{what}, after {} steps", after.n_steps);
    Ok(vec![
        Comparison {
            quantity: "adamw mean".into(),
            error: if sum.is_nan() { f64::INFINITY } else { sum / n },
            tolerance: ADAMW_MEAN_TOLERANCE,
            note: note("mean difference"),
        },
        Comparison {
            quantity: "adamw far".into(),
            error: n_far as f64 / n,
            tolerance: ADAMW_SHARE_TOLERANCE,
            note: note("share of entries off by more than 1e-5"),
        },
    ])
}

/// Compares the model of a directory with the reference values beside it (`golden.safetensors`,
/// `after_adamw.safetensors`, `golden.json`); `model` takes the model from elsewhere.
///
/// Also says what was not compared, and why.
pub fn check_directory(
    dir: &Path,
    model: Option<&Path>,
    device: &Device,
) -> Result<(Vec<Comparison>, Option<String>)> {
    let (model, mut weights) = open_model(device, dir, model)?;
    let grouped = dir.join("golden_grouped.safetensors");
    let is_grouped = grouped.exists();
    let path = if is_grouped { grouped } else { dir.join("golden.safetensors") };
    let golden = open_safetensors(&path)?;
    let name = if is_grouped { "after_adamw_grouped" } else { "after_adamw" };
    let after_path = dir.join(format!("{name}.safetensors"));
    if !after_path.exists() {
        let skipped = Some(format!("there is no {name}.safetensors"));
        let found = device.run(|| check(device, &model, &mut weights, &golden, None))?;
        return Ok((found, skipped));
    }
    let file = open_safetensors(&after_path)?;
    let (settings, n_steps) = optimizer_settings(&dir.join("golden.json"))?;
    let after = AfterAdamW { file: &file, settings, n_steps };
    Ok((device.run(|| check(device, &model, &mut weights, &golden, Some(after)))?, None))
}

/// The model of a directory, or, where it holds an adapter, its base with the adapter.
fn open_model(device: &Device, dir: &Path, model_path: Option<&Path>) -> Result<(Model, Weights)> {
    let adapter_dir = [dir.join("adapter"), dir.to_path_buf()]
        .into_iter()
        .find(|dir| dir.join("adapter_config.json").exists());
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
        let json: Value = serde_json::from_str(&std::fs::read_to_string(path).ok()?).ok()?;
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
    candidates.find(|path| path.join("config.json").exists()).ok_or_else(|| {
        let problem = format!("the base model of {} is not there", adapter_dir.display());
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
