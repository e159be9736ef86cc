//! Mixers: the part of a layer through which tokens see each other. One file each.
//!
//! The file of a mixer holds its configuration with its checks and its keys in our own config, its
//! parameters with their names here and in GGUF files, the state that a sequence keeps for it, and
//! its forward pass, made of ops. Everybody else asks through `MixerFacts` and walks over slots.
//!
//! A new mixer is its op, its file, and here its `mod` and a line in each of three lists:
//! `MixerConfig`, `parts` and `OWN`. The parameters of a mixer are named after its `prefix`.

mod attention;
mod mamba1;
mod mamba2;
mod mamba3;
mod short_conv;
#[cfg(test)]
mod tests;

// All of what mixers are made of; their files take it from here.
use crate::error::Result;
use crate::model::builder::{Builder, ConvIds};
use crate::model::config::Config;
use crate::model::config::check::*;
use crate::model::config::families::Reader;
use crate::model::config::gguf::LayerNames;
use crate::model::pass::Pass;
use crate::model::place::Map;
use crate::model::state::{Slot, SlotId, States, caches, tensors, tensors_of};
use crate::model::weights::{Init, LinearIds, ParamId};
use crate::ops::conv::Activation;
use crate::ops::norm::rms_norm;
use crate::ops::scale::{scale, scale_columns};
use crate::tape::Var;
use std::fmt;
use std::ops::Range;

pub use attention::{AttentionConfig, QkNorm};
pub use mamba1::{DeltaInit, InnerNorm, Mamba1Config};
pub use mamba2::{Mamba2Config, Mamba2Scales};
pub use mamba3::Mamba3Config;
pub use short_conv::ShortConvConfig;

#[derive(Clone, Debug, PartialEq)]
pub enum MixerConfig {
    Mamba1(Mamba1Config),
    Mamba2(Mamba2Config),
    Mamba3(Mamba3Config),
    Attention(AttentionConfig),
    ShortConv(ShortConvConfig),
    /// Mamba-2 and attention side by side on one input, their outputs added.
    Parallel(Mamba2Config, AttentionConfig),
    /// A mixer that shows what adding one takes.
    #[cfg(test)]
    Leaky(tests::LeakyConfig),
}

impl MixerConfig {
    /// The mixers that work side by side; nearly always one.
    pub(crate) fn parts(&self) -> Vec<&dyn MixerFacts> {
        match self {
            MixerConfig::Mamba1(c) => vec![c],
            MixerConfig::Mamba2(c) => vec![c],
            MixerConfig::Mamba3(c) => vec![c],
            MixerConfig::Attention(c) => vec![c],
            MixerConfig::ShortConv(c) => vec![c],
            MixerConfig::Parallel(mamba, attention) => vec![mamba, attention],
            #[cfg(test)]
            MixerConfig::Leaky(c) => vec![c],
        }
    }

    /// How many tokens before it a token sees, where that is bounded.
    pub(crate) fn reach(&self) -> Option<usize> {
        self.parts().iter().try_fold(0, |reach, part| Some(reach.max(part.reach()?)))
    }

    /// Its attention, alone or beside another mixer.
    pub fn attention(&self) -> Option<&AttentionConfig> {
        match self {
            MixerConfig::Attention(c) | MixerConfig::Parallel(_, c) => Some(c),
            _ => None,
        }
    }
}

pub(crate) const OWN: &[Own] = &[
    mamba1::OWN,
    mamba2::OWN,
    mamba3::OWN,
    attention::OWN,
    short_conv::OWN,
    #[cfg(test)]
    tests::OWN,
];

/// One line for people: `mamba2 (24 heads of 64)`.
impl fmt::Display for MixerConfig {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let parts: Vec<String> = self.parts().iter().map(|part| part.summary()).collect();
        f.write_str(&parts.join(" beside "))
    }
}

/// What the rest of the engine asks of the configuration of a mixer.
pub(crate) trait MixerFacts {
    fn summary(&self) -> String;

    /// What no model can be, by the keys of our own config.
    fn problems(&self, d_model: usize) -> Problems;

    /// Declares its parameters and its state.
    fn build(&self, builder: &mut Builder, d_model: usize) -> Box<dyn Mixer>;

    /// How many tokens before it a token sees, where that is bounded.
    fn reach(&self) -> Option<usize> {
        None
    }

    /// The rows of a linear map that make B and C, where it has them: (module, rows).
    fn bc_rows(&self) -> Option<(String, Range<usize>)> {
        None
    }

    /// Names its parameters as llama.cpp does, where it knows them.
    fn gguf(&self, _names: &mut LayerNames) {}
}

pub(crate) trait Mixer: Send + Sync {
    /// With `states`, one per segment, sequences continue from there.
    fn forward(&self, pass: &Pass, x: &Var, states: States) -> Var;
}

pub(crate) struct Own {
    /// In the list of layers, and the object with its settings.
    pub name: &'static str,
    pub keys: &'static [&'static str],
    /// Reads layer `idx`, whose parameters are named after the prefix.
    pub read: fn(&Reader, idx: usize, prefix: &str, &Config) -> Result<MixerConfig>,
}
