//! `elapid info`: what this machine has, what a model is.

use super::convert::stored;
use crate::base;
use crate::report::{Done, count, line, mebibytes, n_threads_default};
use crate::run;
use elapid::{Adapter, Device, DeviceInfo, Error, Model, ModelInfo, Tokenizer};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Show this machine, or describe a model.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  elapid info\n  elapid info --devices\n  \
    elapid info golden/sets/jamba\n  elapid info model.gguf --json")]
pub struct Info {
    /// Model or adapter: directory, .gguf or .elapid file
    model: Option<PathBuf>,
    /// List the devices with their memory, limits and features
    #[arg(long, conflicts_with = "model")]
    devices: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Info {
    pub fn run(&self) -> Done<ExitCode> {
        match &self.model {
            Some(dir) => self.model(dir)?,
            None if self.devices => self.devices()?,
            None => self.machine()?,
        }
        Ok(ExitCode::SUCCESS)
    }

    fn machine(&self) -> Done<()> {
        let device = Device::cpu(n_threads_default())?;
        let version = env!("CARGO_PKG_VERSION");
        if self.json {
            line(json!({"version": version, "device": device.describe()}));
        } else {
            line(format!("elapid  {version}"));
            line(format!("device  {}", device.describe()));
            line(format!("models  {}", elapid::FAMILIES.join(", ")));
        }
        Ok(())
    }

    /// One line for each device, under the name that `--device` takes.
    fn devices(&self) -> Done<()> {
        let list = Device::list(n_threads_default())?;
        if self.json {
            line(json!({"devices": list.iter().map(device_json).collect::<Vec<_>>()}));
        } else {
            list.into_iter().for_each(|one| line(device_line(one)));
        }
        Ok(())
    }

    fn model(&self, path: &Path) -> Done<()> {
        let path = &*base::resolve(path)?;
        if let Some(adapter) = Adapter::detect(path)? {
            return self.adapter(&adapter);
        }
        let model = Model::open(run::usable(path)?)?;
        let info = model.info()?;
        // A tokenizer we cannot read does not hide the model.
        let tokenizer = model.tokenizer();
        let has_chat = model.chat_template().is_ok_and(|template| template.is_some());
        match self.json {
            true => print_json(path, &info, tokenizer.ok().flatten().as_ref(), has_chat),
            false => print(&info, &tokenizer, has_chat),
        }
        Ok(())
    }

    fn adapter(&self, adapter: &Adapter) -> Done<()> {
        let info = adapter.info()?;
        let (path, n) = (adapter.path().display(), info.modules.len());
        // How many modules of each last name: `q_proj` of `layers.0.self_attn.q_proj.weight`.
        let mut targets: BTreeMap<&str, usize> = BTreeMap::new();
        for (param, _) in &info.modules {
            let path = param.strip_suffix(".weight").unwrap_or(param);
            *targets.entry(path.rsplit('.').next().unwrap_or(path)).or_default() += 1;
        }
        let ranks: BTreeSet<usize> = info.modules.iter().map(|module| module.1).collect();
        if self.json {
            line(json!({
                "adapter": path.to_string(), "form": info.form, "n_modules": n,
                "n_params": info.n_params, "ranks": ranks, "alphas": info.alphas,
                "rslora": info.rslora, "targets": targets, "base": info.base,
                "architecture": info.architecture,
            }));
            return Ok(());
        }
        let list = |words: &mut dyn Iterator<Item = String>| words.collect::<Vec<_>>().join(", ");
        let per_root = if info.rslora { " / sqrt(rank)" } else { "" };
        line(format!("adapter {path}: lora ({}), {n} modules", info.form));
        let alphas = list(&mut info.alphas.iter().map(f64::to_string));
        let ranks = list(&mut ranks.iter().map(usize::to_string));
        let targets = list(&mut targets.iter().map(|(name, n)| format!("{n} x {name}")));
        line(format!("ranks   {ranks}; alpha {alphas}{per_root}"));
        line(format!("targets {targets}"));
        line(format!("params  {}", count(info.n_params as f64)));
        let architecture = info.architecture.map(|name| format!("architecture {name}"));
        let base = list(&mut info.base.into_iter().chain(architecture));
        if !base.is_empty() {
            line(format!("base    {base}"));
        }
        Ok(())
    }
}

/// A device for programs.
pub fn device_json(one: &DeviceInfo) -> Value {
    let names = one.features.iter().map(|it| it.0).collect::<Vec<_>>();
    let used = one.features.iter().filter(|it| it.1).map(|it| it.0);
    json!({
        "device": one.id, "name": one.name, "kind": one.kind, "backend": one.backend,
        "memory": one.memory, "memory_free": one.memory_free,
        "compute_capability": one.compute_capability, "driver": one.driver,
        "multiprocessors": one.n_multiprocessors,
        "buffer_max": one.buffer_bytes_max, "binding_max": one.binding_bytes_max,
        "features": names, "features_used": used.collect::<Vec<_>>(),
    })
}

/// A device as people read it, under the name that `--device` takes.
pub fn device_line(one: DeviceInfo) -> String {
    let size = |n: Option<u64>| n.map(|n| mebibytes(n as f64));
    let mut facts = vec![one.name];
    facts.extend(one.kind);
    facts.extend(one.backend);
    facts.extend(size(one.memory).map(|n| format!("{n} of memory")));
    facts.extend(size(one.memory_free).map(|n| format!("{n} free")));
    facts.extend(one.compute_capability.map(|it| format!("compute capability {it}")));
    facts.extend(one.driver.map(|it| format!("driver for CUDA {it}")));
    facts.extend(size(one.buffer_bytes_max).map(|n| format!("buffers up to {n}")));
    facts.extend(size(one.binding_bytes_max).map(|n| format!("bindings up to {n}")));
    facts.extend(one.features.into_iter().map(|(name, is_used)| match is_used {
        true => name.to_string(),
        false => format!("{name} (not used)"),
    }));
    format!("{:<8}{}", one.id, facts.join(", "))
}

fn print_json(path: &Path, info: &ModelInfo, tokenizer: Option<&Tokenizer>, has_chat: bool) {
    line(json!({
        "path": path, "name": info.name, "architecture": info.architecture,
        "family": info.family, "layers": info.layers, "n_layer": info.n_layer,
        "d_model": info.d_model, "n_vocab": info.n_vocab, "n_ctx": info.n_ctx,
        "n_seen": info.n_seen, "tied": info.tied,
        "n_params": info.n_params, "n_params_matrices": info.n_matrix,
        "n_params_embedding": info.n_embedding, "n_params_vectors": info.n_vector,
        "n_params_buffers": info.n_buffer, "dtype_bytes": info.dtype_bytes,
        "weight_bytes": info.dtype_bytes.values().sum::<usize>(),
        "state_bytes": info.state_bytes, "state_bytes_per_token": info.state_bytes_per_token,
        "tokenizer": tokenizer.map(|tokenizer| json!({
            "kind": tokenizer.kind(), "n_vocab": tokenizer.n_vocab(),
            "bos": tokenizer.bos(), "eos": tokenizer.eos(), "fim": tokenizer.fim().is_some(),
        })),
        "chat_template": has_chat,
    }));
}

fn print(info: &ModelInfo, tokenizer: &Result<Option<Tokenizer>, Error>, has_chat: bool) {
    let ModelInfo { name, family, n_layer, d_model, .. } = info;
    let architecture = info.architecture.as_ref().filter(|name| *name != family);
    let architecture = architecture.map_or(String::new(), |name| format!(" (gguf {name})"));
    line(format!("model   {name}: {family}{architecture}, {n_layer} layers, d_model {d_model}"));
    for (kind, n) in &info.layers {
        line(format!("layers  {n} x {kind}"));
    }
    let seen = info.n_seen.filter(|seen| info.n_ctx.is_none_or(|n_ctx| *seen < n_ctx));
    let context = match (info.n_ctx, seen) {
        (Some(n_ctx), Some(seen)) => Some(format!("{n_ctx} tokens, but sees the last {seen}")),
        (Some(n_ctx), None) => Some(format!("{n_ctx} tokens")),
        (None, Some(seen)) => Some(format!("sees the last {seen} tokens")),
        (None, None) => None,
    };
    if let Some(context) = context {
        line(format!("context {context}"));
    }
    let head = if info.tied { "tied" } else { "untied" };
    line(format!("vocab   {} tokens, head {head}", info.n_vocab));
    match tokenizer {
        Ok(Some(tokenizer)) => {
            let chat = if has_chat { ", with a chat template" } else { "" };
            let fim = tokenizer.fim().map_or("", |_| ", fill-in-the-middle");
            let (kind, n_vocab) = (tokenizer.kind(), tokenizer.n_vocab());
            line(format!("tokens  {kind}, {n_vocab} tokens{chat}{fim}"));
        }
        Ok(None) => line("tokens  no tokenizer"),
        Err(error) => line(format!("tokens  {error}; {}", error.hint())),
    }
    let counts = [info.n_params, info.n_matrix, info.n_embedding, info.n_vector, info.n_buffer];
    let [all, matrices, embedding, vectors, buffers] = counts.map(|n| count(n as f64));
    line(format!(
        "params  {all} total: matrices {matrices}, embedding {embedding}, vectors {vectors}, \
         buffers {buffers}"
    ));
    line(format!("stored  {}", stored(&info.dtype_bytes)));
    let per_token = match info.state_bytes_per_token {
        0 => String::new(),
        n => format!(", plus {:.1} KiB per token", n as f64 / 1024.0),
    };
    let weights = mebibytes(info.dtype_bytes.values().sum::<usize>() as f64);
    let state = mebibytes(info.state_bytes as f64);
    line(format!("memory  weights {weights}, state of an empty sequence {state}{per_token}"));
}
