//! What flags of a run may be.

use clap::ValueEnum;
use elapid::{Arch, Size};

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
    Mamba1,
    Mamba2,
    Hybrid,
    Llama,
    Moe,
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
        match name {
            ArchName::Mamba1 => Arch::Mamba1,
            ArchName::Mamba2 => Arch::Mamba2,
            ArchName::Hybrid => Arch::Hybrid,
            ArchName::Llama => Arch::Llama,
            ArchName::Moe => Arch::Moe,
        }
    }
}
