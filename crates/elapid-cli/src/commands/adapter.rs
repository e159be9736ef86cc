//! Adapters on disk: what `elapid convert` and `elapid info` do with them.
//!
//! A PEFT directory or a GGUF file, in either form out. What was written is read again and
//! compared with the original, both on the base model.

use super::convert::check_output;
use crate::files;
use crate::report::{Done, Failure, count, line, mebibytes};
use elapid::eval::parity::{self, Parity};
use elapid::files::gguf::{self, Gguf};
use elapid::files::safetensors::{self, SafeTensors};
use elapid::model::checkpoint::Checkpoint;
use elapid::model::lora::{self, Lora};
use elapid::model::{gguf_lora, peft};
use elapid::tensor::device::Device;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

const CONFIG: &str = "adapter_config.json";
const TENSORS: &str = "adapter_model.safetensors";

/// An open adapter.
pub struct Adapter {
    path: PathBuf,
    form: Form,
}

enum Form {
    Peft { config: String, tensors: SafeTensors },
    Gguf(Gguf),
}

impl Form {
    fn name(&self) -> &'static str {
        match self {
            Form::Peft { .. } => "peft",
            Form::Gguf(_) => "gguf",
        }
    }
}

/// Where and how to write.
pub struct Output<'a> {
    pub path: &'a Path,
    /// A GGUF file, not a PEFT directory.
    pub gguf: bool,
    /// Whether what is there may be replaced.
    pub force: bool,
    pub json: bool,
}

/// The adapter at this path, if it is one.
pub fn detect(path: &Path) -> Done<Option<Adapter>> {
    let is_gguf = path.extension().is_some_and(|extension| extension == "gguf");
    if path.join(CONFIG).is_file() {
        return open_peft(path).map(Some);
    }
    if !is_gguf || !path.is_file() {
        return Ok(None);
    }
    let gguf = Gguf::parse(&path.display().to_string(), files::map(path)?)?;
    let is_adapter = gguf_lora::is_adapter(&gguf);
    Ok(is_adapter.then(|| Adapter { path: path.to_path_buf(), form: Form::Gguf(gguf) }))
}

fn open_peft(dir: &Path) -> Done<Adapter> {
    let config = files::read_text(&dir.join(CONFIG))?;
    let tensors = dir.join(TENSORS);
    if !tensors.exists() && dir.join("adapter_model.bin").exists() {
        let problem = format!("{} holds its tensors as a pickle", dir.display());
        let hint = "load the adapter with PEFT and save it again: that writes safetensors";
        return Err(Failure::new(problem, hint));
    }
    let tensors = files::open_safetensors(&tensors)?;
    Ok(Adapter { path: dir.to_path_buf(), form: Form::Peft { config, tensors } })
}

impl Adapter {
    /// Its numbers; for a GGUF adapter the base says what they belong to.
    pub(crate) fn read(&self, base: Option<&Checkpoint>, device: &Device) -> Done<Lora> {
        match (&self.form, base) {
            (Form::Peft { config, tensors }, _) => {
                let name = self.path.join(CONFIG).display().to_string();
                Ok(peft::read(device, (&name, config), tensors)?)
            }
            (Form::Gguf(gguf), Some(base)) => Ok(gguf_lora::read(device, gguf, base.model())?),
            (Form::Gguf(_), None) => Err(needs_base(&self.path)),
        }
    }
}

fn needs_base(path: &Path) -> Failure {
    let problem = format!("{}: a GGUF adapter is read and written by its base", path.display());
    Failure::new(problem, "name the model it belongs to: --base MODEL")
}

/// Writes an adapter in another form, reads it again and compares.
pub fn convert(
    adapter: Adapter,
    base: Option<&Path>,
    output: &Output,
    device: &Device,
) -> Done<ExitCode> {
    check_output(output.path, output.force)?;
    if base.is_none() && output.gguf {
        return Err(needs_base(output.path));
    }
    let base = base.map(files::open).transpose()?;
    let lora = adapter.read(base.as_ref(), device)?;
    if !output.json {
        let (path, form) = (adapter.path.display(), adapter.form.name());
        let (n, n_elem) = (lora.modules.len(), count(lora.n_elem() as f64));
        line(format!("read    {path}  {form} adapter, {n} modules, {n_elem} parameters"));
    }
    let n_bytes = write(&lora, base.as_ref(), output)?;
    let Some(written) = detect(output.path)? else {
        let problem = format!("{} was written, and is no adapter", output.path.display());
        return Err(Failure::new(problem, "give a GGUF adapter a name that ends in .gguf"));
    };
    let again = written.read(base.as_ref(), device)?;
    let parity = match &base {
        Some(base) => Some(device.run(|| compare(base, [&lora, &again], device))?),
        None => None,
    };
    let receipt = Receipt { output, n_bytes, difference: difference(&lora, &again), parity };
    Ok(receipt.print())
}

fn write(lora: &Lora, base: Option<&Checkpoint>, output: &Output) -> Done<u64> {
    if output.gguf {
        let base = base.ok_or_else(|| needs_base(output.path))?;
        let (metadata, tensors) = gguf_lora::write(lora, base.model())?;
        return files::write(output.path, |sink| gguf::write(&metadata, &tensors, sink));
    }
    let modules = base.map(|base| lora::modules_of(base.model()));
    let (config, tensors) = peft::write(lora, modules.as_deref())?;
    let family = base.map_or("", |base| base.model().config().family.name());
    for caveat in caveats(lora, family) {
        eprintln!("note    {caveat}");
    }
    std::fs::create_dir_all(output.path).map_err(|error| {
        let hint = "look at the rights of the directory above";
        Failure::new(format!("cannot make {}: {error}", output.path.display()), hint)
    })?;
    let n_bytes = files::write(&output.path.join(TENSORS), |sink| {
        safetensors::write(&[("format", "pt")], &tensors, sink)
    })?;
    Ok(n_bytes + files::write(&output.path.join(CONFIG), |sink| sink(config.as_bytes()))?)
}

/// Families on which PEFT 0.21 refuses some modules, and these modules.
const REFUSING: [&str; 5] = ["falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"];
const REFUSED: [&str; 2] = ["out_proj", "conv1d"];

/// Families whose forward pass in transformers 5 takes the weight of `dt_proj` past its adapter.
const BYPASSING: [&str; 3] = ["mamba", "falcon_mamba", "jamba"];

/// What PEFT would do to this adapter on a model of this family: refuse it, or ignore a part. It is
/// written all the same, for other readers.
fn caveats(lora: &Lora, family: &str) -> Vec<String> {
    let find = |names: &[&str]| {
        let mut paths = lora.modules.iter().filter_map(|module| module.path().ok());
        paths.find(|path| path.rsplit('.').next().is_some_and(|last| names.contains(&last)))
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

/// The base with each of two adapters.
fn compare(base: &Checkpoint, pair: [&Lora; 2], device: &Device) -> Done<Parity> {
    let mut both = Vec::new();
    for lora in pair {
        let mut weights = base.weights(device)?;
        lora.attach(&mut weights)?;
        both.push(weights);
    }
    let tokenizer = base.tokenizer()?;
    let prompts = parity::prompts(tokenizer.as_ref(), base.model().config().n_vocab)?;
    let model = base.model();
    Ok(parity::compare([(model, &both[0]), (model, &both[1])], &prompts)?)
}

/// Largest difference of a number of A, `factor * B` or m, relative to the largest of its tensor;
/// infinite where modules or shapes differ.
fn difference(one: &Lora, two: &Lora) -> f64 {
    let scaled = |lora: &Lora| {
        let list = lora.modules.iter().map(|module| {
            let magnitude = module.magnitude.as_ref().map(|m| (m, 1.0));
            let halves = [(&module.a, 1.0), (&module.b, lora.factor(module))];
            let tensors = halves.into_iter().chain(magnitude).map(|(tensor, factor)| {
                let x = tensor.to_f32();
                let x: Vec<f64> = x.f32().iter().map(|x| f64::from(*x) * factor).collect();
                (tensor.shape().to_vec(), x)
            });
            (module.param.clone(), tensors.collect::<Vec<_>>())
        });
        list.collect::<BTreeMap<_, _>>()
    };
    let (one, two) = (scaled(one), scaled(two));
    let shape = |(name, tensors): (&String, &Vec<_>)| (name.clone(), tensors.len());
    if !one.iter().map(shape).eq(two.iter().map(shape)) {
        return f64::INFINITY;
    }
    let mut worst: f64 = 0.0;
    for (a, b) in one.values().flatten().zip(two.values().flatten()) {
        if a.0 != b.0 {
            return f64::INFINITY;
        }
        let top = a.1.iter().fold(f64::MIN_POSITIVE, |top, x| top.max(x.abs()));
        for (a, b) in a.1.iter().zip(&b.1) {
            let difference = (a - b).abs() / top;
            worst = worst.max(if difference.is_nan() { f64::INFINITY } else { difference });
        }
    }
    worst
}

struct Receipt<'a> {
    output: &'a Output<'a>,
    n_bytes: u64,
    difference: f64,
    /// Of logits, where there is a base.
    parity: Option<Parity>,
}

impl Receipt<'_> {
    fn verdict(&self) -> &'static str {
        let logits = self.parity.map_or(0.0, |parity| parity.logit_difference);
        match (self.difference == 0.0 && logits == 0.0, self.difference <= 1e-5, logits <= 1e-3) {
            (true, _, _) => "equal",
            (_, true, true) => "same",
            _ => "DIFFERENT",
        }
    }

    fn print(&self) -> ExitCode {
        let verdict = self.verdict();
        let (path, form) = (self.output.path, if self.output.gguf { "gguf" } else { "peft" });
        if self.output.json {
            let mut parity = json!({"verdict": verdict, "adapter_difference": self.difference});
            if let Some(of_logits) = &self.parity {
                parity["prompts"] = json!(of_logits.n_prompts);
                parity["tokens"] = json!(of_logits.n_tok);
                parity["logit_difference"] = json!(of_logits.logit_difference);
                parity["top1"] = json!(of_logits.top1());
                parity["divergence"] = json!(of_logits.divergence);
            }
            line(json!({
                "output": path.display().to_string(), "form": form, "bytes": self.n_bytes,
                "parity": parity,
            }));
        } else {
            let size = mebibytes(self.n_bytes as f64);
            line(format!("write   {}  {form} adapter, {size}", path.display()));
            let of_halves = format!("largest difference of the adapter {:.2e}", self.difference);
            let of_logits = match &self.parity {
                Some(parity) => format!(
                    "{} prompts, {} tokens, largest logit difference {:.2e}, top-1 {}/{}, \
                     {of_halves}",
                    parity.n_prompts,
                    parity.n_tok,
                    parity.logit_difference,
                    parity.n_top1,
                    parity.n_tok
                ),
                None => format!("{of_halves}; with --base MODEL logits are compared too"),
            };
            line(format!("parity  {verdict}: {of_logits}"));
        }
        if verdict == "DIFFERENT" { ExitCode::from(1) } else { ExitCode::SUCCESS }
    }
}

/// What can be said of an adapter without its base.
struct Facts {
    /// Name of the adapted matrix, rank.
    modules: Vec<(String, usize)>,
    n_elem: usize,
    /// Distinct values.
    alphas: Vec<f64>,
    rslora: bool,
    base: Option<String>,
    architecture: Option<String>,
}

impl Facts {
    fn of(adapter: &Adapter) -> Done<Facts> {
        match &adapter.form {
            Form::Peft { .. } => {
                let lora = adapter.read(None, &Device::cpu(1)?)?;
                let modules = lora.modules.iter();
                let bits: BTreeSet<u64> = modules.clone().map(|m| m.alpha.to_bits()).collect();
                Ok(Facts {
                    modules: modules.map(|m| (m.param.clone(), m.rank())).collect(),
                    n_elem: lora.n_elem(),
                    alphas: bits.into_iter().map(f64::from_bits).collect(),
                    rslora: lora.rslora,
                    base: lora.base.clone(),
                    architecture: None,
                })
            }
            Form::Gguf(gguf) => {
                let mut modules = Vec::new();
                for entry in gguf.tensors() {
                    if let Some(name) = entry.name.strip_suffix(".lora_b") {
                        let rank = entry.shape.last().copied().unwrap_or(0);
                        modules.push((name.to_string(), rank));
                    }
                }
                let n_elem = |entry: &gguf::Entry| entry.shape.iter().product::<usize>();
                Ok(Facts {
                    modules,
                    n_elem: gguf.tensors().iter().map(n_elem).sum(),
                    alphas: gguf.float("adapter.lora.alpha")?.into_iter().collect(),
                    rslora: false,
                    base: gguf.str("general.base_model.0.name")?.map(str::to_string),
                    architecture: gguf.str("general.architecture")?.map(str::to_string),
                })
            }
        }
    }

    /// How many modules of each last name: `q_proj` of `model.layers.0.self_attn.q_proj.weight`.
    fn targets(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for (param, _) in &self.modules {
            let path = param.strip_suffix(".weight").unwrap_or(param);
            *counts.entry(path.rsplit('.').next().unwrap_or(path)).or_default() += 1;
        }
        counts
    }

    fn ranks(&self) -> BTreeSet<usize> {
        self.modules.iter().map(|(_, rank)| *rank).collect()
    }
}

/// An adapter in lines for people, and as JSON.
pub fn describe(adapter: &Adapter) -> Done<(Vec<String>, Value)> {
    let facts = Facts::of(adapter)?;
    let form = adapter.form.name();
    let list = |numbers: Vec<String>| numbers.join(", ");
    let ranks = list(facts.ranks().iter().map(usize::to_string).collect());
    let alphas = list(facts.alphas.iter().map(f64::to_string).collect());
    let per_root = if facts.rslora { " per square root of the rank" } else { "" };
    let targets = facts.targets();
    let texts = targets.iter().map(|(name, n)| format!("{n} x {name}")).collect();
    let mut lines = vec![
        format!(
            "adapter {}: lora ({form}), {} modules",
            adapter.path.display(),
            facts.modules.len()
        ),
        format!("ranks   {ranks}; alpha {alphas}{per_root}"),
        format!("targets {}", list(texts)),
        format!("params  {}", count(facts.n_elem as f64)),
    ];
    let of = facts.architecture.iter().map(|name| format!("architecture {name}"));
    let of: Vec<String> = facts.base.iter().cloned().chain(of).collect();
    if !of.is_empty() {
        lines.push(format!("base    {}", list(of)));
    }
    let json = json!({
        "adapter": adapter.path.display().to_string(), "form": form,
        "n_modules": facts.modules.len(), "n_params": facts.n_elem,
        "ranks": facts.ranks(), "alphas": facts.alphas, "rslora": facts.rslora,
        "targets": targets, "base": facts.base, "architecture": facts.architecture,
    });
    Ok((lines, json))
}

#[cfg(test)]
mod tests {
    use super::*;
    use elapid::model::lora::Module;
    use elapid::tensor::Tensor;

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
        let lora = lora(&["in_proj", "out_proj", "dt_proj"], 1.0);
        let n_caveats = |family| caveats(&lora, family).len();
        assert_eq!(["mamba", "mamba2", "jamba", "bamba"].map(n_caveats), [2, 1, 1, 0]);
    }

    #[test]
    fn a_difference_is_seen_in_numbers_names_factors_and_nan() {
        let one = lora(&["q"], 1.0);
        assert_eq!(difference(&one, &lora(&["q"], 1.0)), 0.0);
        assert_eq!(difference(&one, &lora(&["q"], 1.5)), 0.5);
        assert_eq!(difference(&one, &lora(&["v"], 1.0)), f64::INFINITY);
        assert_eq!(difference(&one, &lora(&["q"], f32::NAN)), f64::INFINITY);
        let rslora = Lora { rslora: true, ..lora(&["q"], 1.0) };
        assert!(difference(&one, &rslora) > 0.4);
        let mut dora = lora(&["q"], 1.0);
        let device = Device::cpu(1).unwrap();
        dora.modules[0].magnitude = Some(Tensor::from_f32(&device, &[1], &[2.0]));
        assert_eq!(difference(&one, &dora), f64::INFINITY);
    }
}
