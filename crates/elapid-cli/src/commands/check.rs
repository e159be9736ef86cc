//! `elapid check`: a model directory against the reference values beside it.

use crate::compute::Compute;
use crate::files;
use crate::report::{Done, Failure, line};
use elapid::eval::golden::{self, AfterAdamW, Comparison};
use elapid::model::Model;
use elapid::model::config::Config;
use elapid::model::peft;
use elapid::model::weights::Weights;
use elapid::ops::adamw::AdamW;
use elapid::tensor::device::Device;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Compare a model directory with the golden.safetensors beside it.
///
/// Logits, loss, hidden states, every gradient, and the weights after some AdamW steps are compared
/// with what a reference implementation computed. Where golden_grouped.safetensors is there too,
/// that is the one followed. A directory with an adapter/ is checked on its base model. Exits with
/// 1 when something is out of tolerance or cannot be read.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid check golden/sets/jamba\n  \
    elapid check golden/sets/lora_llama_qv --all\n  elapid check DIR --json")]
pub struct Check {
    /// Directory with config.json, model.safetensors and golden.safetensors
    model_dir: PathBuf,
    /// Take the model from this file or directory instead, to see whether it is the same
    #[arg(long, value_name = "MODEL")]
    model: Option<PathBuf>,
    #[command(flatten)]
    compute: Compute,
    /// Print every gradient, not only the worst
    #[arg(long)]
    all: bool,
    /// Print one JSON object per quantity
    #[arg(long)]
    json: bool,
}

impl Check {
    pub fn run(&self) -> Done<ExitCode> {
        let device = self.compute.open_exact()?;
        let (comparisons, skipped) = device.run(|| self.compare(&device))?;
        self.print(&comparisons, skipped);
        let all_hold = comparisons.iter().all(Comparison::holds);
        Ok(if all_hold { ExitCode::SUCCESS } else { ExitCode::from(1) })
    }

    fn compare(&self, device: &Device) -> Done<(Vec<Comparison>, Option<String>)> {
        let dir = self.model_dir.as_path();
        let (model, mut weights) = open_model(device, dir, self.model.as_deref())?;
        let grouped = dir.join("golden_grouped.safetensors");
        let is_grouped = grouped.exists();
        let path = if is_grouped { grouped } else { dir.join("golden.safetensors") };
        let golden = files::open_safetensors(&path)?;
        let name = if is_grouped { "after_adamw_grouped" } else { "after_adamw" };
        let after_path = dir.join(format!("{name}.safetensors"));
        if !after_path.exists() {
            let skipped = format!("there is no {name}.safetensors");
            return Ok((
                golden::check(device, &model, &mut weights, &golden, None)?,
                Some(skipped),
            ));
        }
        let after_file = files::open_safetensors(&after_path)?;
        let (settings, n_steps) = optimizer_settings(&dir.join("golden.json"))?;
        let after = AfterAdamW { file: &after_file, settings, n_steps };
        Ok((golden::check(device, &model, &mut weights, &golden, Some(after))?, None))
    }

    fn print(&self, comparisons: &[Comparison], skipped: Option<String>) {
        if self.json {
            for c in comparisons {
                let object = json!({
                    "quantity": c.quantity, "error": c.error, "tolerance": c.tolerance,
                    "holds": c.holds(), "note": c.note,
                });
                line(object);
            }
        } else {
            let (grads, others): (Vec<_>, Vec<_>) =
                comparisons.iter().partition(|c| c.quantity.starts_with("grad."));
            let worst = grads.iter().max_by(|a, b| a.error.total_cmp(&b.error)).copied();
            for c in others.iter().copied() {
                print_line(c, &c.quantity, &c.note);
            }
            if let Some(worst) = worst {
                let what = format!("gradients ({})", grads.len());
                print_line(worst, &what, &format!("worst is {}", worst.quantity));
            }
            for c in grads.iter().filter(|c| self.all || !c.holds()) {
                print_line(c, &c.quantity, &c.note);
            }
        }
        if let Some(skipped) = skipped {
            eprintln!("skip    weights after AdamW: {skipped}");
        }
    }
}

fn print_line(c: &Comparison, what: &str, note: &str) {
    let verdict = if c.holds() { "ok" } else { "FAIL" };
    line(format!("{verdict:<7} {what:<16} {:.2e}  of {:.0e}  {note}", c.error, c.tolerance));
}

/// The model of a directory, or, where it holds an adapter, its base with the adapter.
fn open_model(device: &Device, dir: &Path, model_path: Option<&Path>) -> Done<(Model, Weights)> {
    let adapter_dir = [dir.join("adapter"), dir.to_path_buf()]
        .into_iter()
        .find(|dir| dir.join("adapter_config.json").exists());
    let base = match &adapter_dir {
        Some(adapter_dir) => base_of(dir, adapter_dir)?,
        None => dir.to_path_buf(),
    };
    let checkpoint = files::open(model_path.unwrap_or(&base))?;
    // Reference losses are without the load balance.
    let config = Config { balance_scale: 0.0, ..checkpoint.model().config().clone() };
    let model = Model::new(config);
    let mut weights = checkpoint.weights(device)?;
    if let Some(adapter_dir) = adapter_dir {
        let config_path = adapter_dir.join("adapter_config.json");
        let file = files::open_safetensors(&adapter_dir.join("adapter_model.safetensors"))?;
        let config = (config_path.display().to_string(), files::read_text(&config_path)?);
        peft::apply(device, &mut weights, (&config.0, &config.1), &file)?;
    }
    Ok((model, weights))
}

/// The base of an adapter: what its config names, beside the set, else what golden.json names.
fn base_of(dir: &Path, adapter_dir: &Path) -> Done<PathBuf> {
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
        Failure::new(problem, &format!("put {name:?} where the adapter's config points"))
    })
}

/// `optimizer` of golden.json: settings and number of steps.
fn optimizer_settings(path: &Path) -> Done<(AdamW, usize)> {
    let json: Value = serde_json::from_str(&files::read_text(path)?).map_err(|error| {
        Failure::new(format!("{}: {error}", path.display()), "make the set again")
    })?;
    let read = |pointer: &str| {
        json.pointer(pointer).and_then(Value::as_f64).ok_or_else(|| {
            let problem = format!("{}: there is no number at {pointer}", path.display());
            Failure::new(problem, "golden.json says how the steps were made")
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
        return Err(Failure::new(problem, "between 1 and 10000 steps are made"));
    }
    Ok((settings, n_steps as usize))
}
