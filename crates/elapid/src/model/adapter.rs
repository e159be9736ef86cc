//! Adapters on disk: PEFT directories and GGUF files.

use super::checkpoint::Checkpoint;
use super::gguf_lora;
use super::lora::{self, Lora};
use super::peft::{self, CONFIG, TENSORS};
use crate::error::{Error, Result};
use crate::files::gguf::{self, Gguf};
use crate::files::safetensors::{self, SafeTensors};
use crate::files::{disk, extension};
use crate::tensor::device::Device;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A LoRA or DoRA adapter: a PEFT directory, or a GGUF adapter of llama.cpp.
pub struct Adapter {
    path: PathBuf,
    form: Form,
}

enum Form {
    Peft { config: String, tensors: SafeTensors },
    Gguf(Gguf),
}

/// What can be said of an adapter without its base model.
#[derive(Clone, Debug)]
pub struct AdapterInfo {
    /// `peft` or `gguf`.
    pub form: &'static str,
    /// Name of each adapted matrix, and the rank of its adapter.
    pub modules: Vec<(String, usize)>,
    /// Parameters in all.
    pub n_params: usize,
    /// Distinct values of alpha.
    pub alphas: Vec<f64>,
    /// Whether the scale is `alpha / sqrt(rank)`, not `alpha / rank`.
    pub rslora: bool,
    /// What it calls its base model.
    pub base: Option<String>,
    /// The architecture of its base, as GGUF names it.
    pub architecture: Option<String>,
}

impl Adapter {
    /// Opens an adapter: a PEFT directory, a GGUF adapter, or a run that trained one.
    pub fn open(path: impl AsRef<Path>) -> Result<Adapter> {
        let path = path.as_ref();
        Adapter::detect(path)?.ok_or_else(|| {
            let hint = "give a directory that PEFT or a training run wrote, or a GGUF adapter";
            Error::input(format!("there is no adapter at {}", path.display()), hint)
        })
    }

    /// The adapter at this path, if it is one.
    pub fn detect(path: impl AsRef<Path>) -> Result<Option<Adapter>> {
        let path = path.as_ref();
        // The directory of a run holds the adapter that it trained.
        let of_run = path.join("adapter");
        let dir = if disk::is_directory(&of_run) { &of_run } else { path };
        if disk::is_file(&dir.join(CONFIG)) {
            return open_peft(dir).map(Some);
        }
        if extension(path) != "gguf" || !disk::is_file(path) {
            return Ok(None);
        }
        let gguf = Gguf::parse(&path.display().to_string(), disk::map(path)?)?;
        let is_adapter = gguf_lora::is_adapter(&gguf);
        Ok(is_adapter.then(|| Adapter { path: path.to_path_buf(), form: Form::Gguf(gguf) }))
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its numbers; for a GGUF adapter the base says what they belong to.
    pub(crate) fn read(&self, base: Option<&Checkpoint>, device: &Device) -> Result<Lora> {
        match (&self.form, base) {
            (Form::Peft { config, tensors }, _) => {
                let name = self.path.join(CONFIG).display().to_string();
                peft::read(device, (&name, config), tensors)
            }
            (Form::Gguf(gguf), Some(base)) => gguf_lora::read(device, gguf, base.model()),
            (Form::Gguf(_), None) => Err(needs_base(&self.path)),
        }
    }

    /// What can be said of it without its base.
    pub fn info(&self) -> Result<AdapterInfo> {
        match &self.form {
            Form::Peft { .. } => {
                let lora = self.read(None, &Device::cpu(1)?)?;
                let modules = lora.modules.iter();
                let bits: BTreeSet<u64> = modules.clone().map(|m| m.alpha.to_bits()).collect();
                Ok(AdapterInfo {
                    form: "peft",
                    modules: modules.map(|m| (m.param.clone(), m.rank())).collect(),
                    n_params: lora.n_elem(),
                    alphas: bits.into_iter().map(f64::from_bits).collect(),
                    rslora: lora.rslora,
                    base: lora.base.clone(),
                    architecture: None,
                })
            }
            Form::Gguf(gguf) => {
                let module = |entry: &gguf::Entry| {
                    let name = entry.name.strip_suffix(".lora_b")?;
                    Some((name.to_string(), entry.shape.last().copied().unwrap_or(0)))
                };
                let n_elem = |entry: &gguf::Entry| entry.shape.iter().product::<usize>();
                Ok(AdapterInfo {
                    form: "gguf",
                    modules: gguf.tensors().iter().filter_map(module).collect(),
                    n_params: gguf.tensors().iter().map(n_elem).sum(),
                    alphas: gguf.float("adapter.lora.alpha")?.into_iter().collect(),
                    rslora: false,
                    base: gguf.str("general.base_model.0.name")?.map(str::to_string),
                    architecture: gguf.str("general.architecture")?.map(str::to_string),
                })
            }
        }
    }

    /// What PEFT would do to this adapter on `base`: refuse it, or ignore a part of it.
    pub fn caveats(&self, base: &Checkpoint) -> Result<Vec<String>> {
        let info = self.info()?;
        let names: Vec<&str> = info.modules.iter().map(|module| module.0.as_str()).collect();
        Ok(caveats(&names, &base.model().config().family.to_string()))
    }
}

fn open_peft(dir: &Path) -> Result<Adapter> {
    let config = disk::read_text(&dir.join(CONFIG))?;
    let tensors = dir.join(TENSORS);
    if !disk::exists(&tensors) && disk::exists(&dir.join("adapter_model.bin")) {
        let problem = format!("{} holds its tensors as a pickle", dir.display());
        let hint = "load the adapter with PEFT and save it again: that writes safetensors";
        return Err(Error::input(problem, hint));
    }
    let tensors = super::open::safetensors(&tensors)?;
    Ok(Adapter { path: dir.to_path_buf(), form: Form::Peft { config, tensors } })
}

fn needs_base(path: &Path) -> Error {
    let problem = format!("{}: a GGUF adapter is read and written by its base", path.display());
    Error::input(problem, "name the base model that it belongs to")
}

impl Lora {
    /// Writes it as a PEFT directory or, with a name that ends in `.gguf`, for llama.cpp; the bytes
    /// written.
    pub(crate) fn save(&self, path: &Path, base: Option<&Checkpoint>) -> Result<u64> {
        if extension(path) == "gguf" {
            let base = base.ok_or_else(|| needs_base(path))?;
            let (metadata, tensors) = gguf_lora::write(self, base.model())?;
            return disk::write(path, |sink| gguf::write(&metadata, &tensors, sink));
        }
        let modules = base.map(|base| lora::modules_of(base.model()));
        let (config, tensors) = peft::write(self, modules.as_deref())?;
        disk::make_directory(path)?;
        let n_bytes = disk::write(&path.join(TENSORS), |sink| {
            safetensors::write(&safetensors::FORMAT, &tensors, sink)
        })?;
        Ok(n_bytes + disk::write(&path.join(CONFIG), |sink| sink(config.as_bytes()))?)
    }

    /// Largest difference of a number of A, `factor * B` or m, relative to its tensor's largest;
    /// infinite where modules or shapes differ.
    pub(crate) fn difference(&self, other: &Lora) -> f64 {
        let scaled = |lora: &Lora| {
            let mut list = BTreeMap::new();
            for module in &lora.modules {
                let halves = [(&module.a, 1.0), (&module.b, lora.factor(module))];
                let magnitude = module.magnitude.as_ref().map(|m| (m, 1.0));
                for (idx, (tensor, factor)) in halves.into_iter().chain(magnitude).enumerate() {
                    let x = tensor.to_f32();
                    let x: Vec<f64> = x.f32().iter().map(|x| f64::from(*x) * factor).collect();
                    list.insert((module.param.clone(), idx, tensor.shape().to_vec()), x);
                }
            }
            list
        };
        let (one, two) = (scaled(self), scaled(other));
        if !one.keys().eq(two.keys()) {
            return f64::INFINITY;
        }
        let mut worst: f64 = 0.0;
        for (a, b) in one.values().zip(two.values()) {
            let top = a.iter().fold(f64::MIN_POSITIVE, |top, x| top.max(x.abs()));
            for (a, b) in a.iter().zip(b) {
                let difference = (a - b).abs() / top;
                worst = worst.max(if difference.is_nan() { f64::INFINITY } else { difference });
            }
        }
        worst
    }
}

/// Families on which PEFT 0.21 refuses some modules, and these modules.
const REFUSING: [&str; 5] = ["falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"];
const REFUSED: [&str; 2] = ["out_proj", "conv1d"];

/// Families whose forward pass in transformers 5 takes the weight of `dt_proj` past its adapter.
const BYPASSING: [&str; 3] = ["mamba", "falcon_mamba", "jamba"];

/// What PEFT would do to this adapter on a model of this family: refuse it, or ignore a part. It is
/// written all the same, for other readers.
fn caveats(names: &[&str], family: &str) -> Vec<String> {
    let find = |lasts: &[&str]| {
        let mut paths = names.iter().filter_map(|name| name.strip_suffix(lora::WEIGHT));
        paths.find(|path| path.rsplit('.').next().is_some_and(|last| lasts.contains(&last)))
    };
    let mut list = Vec::new();
    if let Some(path) = find(&REFUSED).filter(|_| REFUSING.contains(&family)) {
        list.push(format!("PEFT refuses `{path}` on {family} models; other readers take it"));
    }
    if let Some(path) = find(&["dt_proj"]).filter(|_| BYPASSING.contains(&family)) {
        list.push(format!("transformers ignores the adapter of `{path}` until it is merged"));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lora::Module;
    use crate::tensor::Tensor;

    fn lora(names: &[&str], b: f32) -> Lora {
        let device = Device::cpu(1).unwrap();
        let module = |name: &&str| Module {
            param: format!("layers.0.{name}.weight"),
            a: Tensor::from_f32(&device, &[2, 1], &[1.0, -3.0]),
            b: Tensor::from_f32(&device, &[1, 2], &[b, 0.5]),
            magnitude: None,
            alpha: 4.0,
        };
        Lora { modules: names.iter().map(module).collect(), rslora: false, base: None }
    }

    #[test]
    fn what_peft_makes_of_a_mamba_adapter_is_said() {
        let names =
            ["in_proj", "out_proj", "dt_proj"].map(|name| format!("layers.0.{name}.weight"));
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let n_caveats = |family| caveats(&names, family).len();
        assert_eq!(["mamba", "mamba2", "jamba", "bamba"].map(n_caveats), [2, 1, 1, 0]);
    }

    #[test]
    fn a_difference_is_seen_in_numbers_names_factors_and_nan() {
        let one = lora(&["q"], 1.0);
        assert_eq!(one.difference(&lora(&["q"], 1.0)), 0.0);
        assert_eq!(one.difference(&lora(&["q"], 1.5)), 0.5);
        assert_eq!(one.difference(&lora(&["v"], 1.0)), f64::INFINITY);
        assert_eq!(one.difference(&lora(&["q"], f32::NAN)), f64::INFINITY);
        let rslora = Lora { rslora: true, ..lora(&["q"], 1.0) };
        assert!(one.difference(&rslora) > 0.4);
        let mut dora = lora(&["q"], 1.0);
        let device = Device::cpu(1).unwrap();
        dora.modules[0].magnitude = Some(Tensor::from_f32(&device, &[1], &[2.0]));
        assert_eq!(one.difference(&dora), f64::INFINITY);
    }
}
