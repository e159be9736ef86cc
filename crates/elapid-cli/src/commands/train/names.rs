//! What flags of a run may be.

use crate::files;
use crate::report::{Done, Failure, scaled};
use clap::ValueEnum;
use elapid::{Arch, Size};
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MethodName {
    /// A new model
    Scratch,
    /// Every parameter of an existing model
    Full,
    /// Low-rank adapters beside frozen matrices
    Lora,
    /// LoRA over a quantized base
    Qlora,
    /// Only the projections that produce B and C of Mamba layers
    Bc,
    /// Embedding and output head
    Embeddings,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum SizeName {
    Tiny,
    Small,
    Base,
    Medium,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ArchName {
    /// Selective scans
    Mamba1,
    /// State-space duality
    Mamba2,
    /// Mamba-2 and attention, with feed-forwards
    Hybrid,
    /// Attention and feed-forwards
    Llama,
    /// Attention and experts
    Moe,
    /// State spaces with angles, and feed-forwards; stored as mamba_ssm does
    Mamba3,
    /// Mamba-3 and attention, with experts; for Elapid alone
    Zamba,
    /// Short convolutions, with experts: sees some tens of tokens; for Elapid alone
    Evermind,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ScheduleName {
    Cosine,
    Constant,
    Wsd,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum OptimizerName {
    Adamw,
    Muon,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum QuantName {
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_0")]
    Q4_0,
    #[value(name = "q4_k")]
    Q4K,
    Nf4,
}

impl QuantName {
    pub fn name(self) -> &'static str {
        ["q8_0", "q4_0", "q4_k", "nf4"][self as usize]
    }
}

impl From<SizeName> for Size {
    fn from(name: SizeName) -> Size {
        match name {
            SizeName::Tiny => Size::Tiny,
            SizeName::Small => Size::Small,
            SizeName::Base => Size::Base,
            SizeName::Medium => Size::Medium,
        }
    }
}

impl From<ArchName> for Arch {
    fn from(name: ArchName) -> Arch {
        Arch::ALL[name as usize]
    }
}

pub fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|x| x.is_finite() && *x > 0.0);
    number.ok_or_else(|| format!("{text} is not a positive number"))
}

/// A path, and after the last `=` how often it is drawn in an epoch.
pub fn weighted(text: &str) -> Result<(PathBuf, f64), String> {
    match text.rsplit_once('=') {
        Some((path, weight)) if !Path::new(text).exists() => {
            Ok((path.into(), positive(weight).map_err(|problem| format!("weight: {problem}"))?))
        }
        _ => Ok((text.into(), 1.0)),
    }
}

/// A set to measure on: its name and where it is.
pub fn named(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !name.contains('/') => {
            Ok((name.into(), path.into()))
        }
        _ => Err("write NAME=PATH, with a NAME without `/`".into()),
    }
}

/// Tokens: 500M, 1.5G, 30000.
pub fn amount(text: &str) -> Result<u64, String> {
    scaled(text, |unit| {
        let place = ["", "k", "m", "g"].iter().position(|name| *name == unit);
        place.map(|n| 1e3f64.powi(n as i32))
    })
}

/// The config.json of a new model.
pub fn read_config(path: &Path) -> Done<serde_json::Value> {
    Failure::unless_there(path, "the config.json of a model")?;
    let value = serde_json::from_str(&files::read_text(path)?);
    value.ok().filter(serde_json::Value::is_object).ok_or_else(|| {
        let problem = format!("{} is not a JSON object", path.display());
        Failure::new(problem, "give the config.json of a model")
    })
}

/// Fraction of the text of a new model that is rearranged for fill-in-the-middle.
pub const DEFAULT_FIM: f64 = 0.25;
/// Fraction of it that is shown after other files of its project.
pub const DEFAULT_PROJECT: f64 = 0.5;
