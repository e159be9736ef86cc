//! What no model can be, refused before a model is built.
//!
//! `Model::new` lists every parameter and every RoPE frequency, so that a config of a few lines
//! could take all memory before a weight file is opened; and it multiplies sizes without a care.
//! The limits here are far above every published model and far below the machine's.
//!
//! Problems name keys as our own config does; `Keys::wrong` turns them into those of the file.

use super::*;

pub(super) const N_LAYER_MAX: usize = 10_000;
/// Experts of a layer, and of all layers together.
const N_EXPERT_MAX: usize = 1 << 12;
const N_EXPERT_ALL_MAX: usize = 1 << 20;
/// Any width inside a layer.
pub(crate) const WIDTH_MAX: usize = 1 << 24;
/// Width of a head: RoPE has a frequency for every two.
pub(crate) const D_HEAD_MAX: usize = 1 << 14;
pub(crate) const D_CONV_MAX: usize = 1 << 10;
/// Vocabulary and width of the residual stream.
const STREAM_MAX: usize = 1 << 28;
/// Numbers of one parameter, or of one recurrent state.
const NUMBERS_MAX: usize = 1 << if usize::BITS > 40 { 40 } else { 30 };

/// A key and what is wrong with its value.
pub(crate) type Problems = Vec<(&'static str, String)>;

/// Each must lie in 1..=max.
pub(crate) fn sizes(list: &[(&'static str, usize, usize)]) -> Problems {
    let bad = list.iter().filter(|(_, size, max)| !(1..=*max).contains(size));
    let shown = |size: usize| match size {
        usize::MAX => "2^64 or more".to_string(),
        _ => size.to_string(),
    };
    bad.map(|(key, n, max)| (*key, format!("{} is out of range 1..={max}", shown(*n)))).collect()
}

/// The product of each shape must stay within `NUMBERS_MAX`.
pub(crate) fn shapes(list: &[(&'static str, &[usize])]) -> Problems {
    let n_numbers = |shape: &[usize]| shape.iter().fold(1usize, |n, &d| n.saturating_mul(d));
    let bad = list.iter().filter(|(_, shape)| n_numbers(shape) > NUMBERS_MAX);
    let text = |shape: &[usize]| format!("asks for a tensor of {shape:?}, above 2^40 numbers");
    bad.map(|(key, shape)| (*key, text(shape))).collect()
}

pub(crate) fn positive(list: &[(&'static str, f32)]) -> Problems {
    let bad = list.iter().filter(|(_, x)| !(x.is_finite() && *x > 0.0));
    bad.map(|(key, x)| (*key, format!("{x} is not a finite number above 0"))).collect()
}

pub(crate) fn finite(list: &[(&'static str, f32)]) -> Problems {
    let bad = list.iter().filter(|(_, x)| !x.is_finite());
    bad.map(|(key, x)| (*key, format!("{x} is not finite"))).collect()
}

impl Config {
    /// Sizes of zero or beyond reason, heads that do not divide, numbers that make NaNs.
    pub(super) fn problems(&self) -> Problems {
        let mut list = sizes(&[
            ("vocab_size", self.n_vocab, STREAM_MAX),
            ("d_model", self.d_model, STREAM_MAX),
            ("layers", self.layers.len(), N_LAYER_MAX),
        ]);
        list.extend(shapes(&[("vocab_size", &[self.n_vocab, self.d_model])]));
        list.extend(positive(&[("eps", self.eps)]));
        list.extend(finite(&[
            ("embed_scale", self.embed_scale),
            ("residual_scale", self.residual_scale),
            ("logit_scale", self.logit_scale),
            ("balance_scale", self.balance_scale),
            ("init_std", self.init_std),
        ]));
        if self.init_std < 0.0 {
            list.push(("init_std", format!("{} is below 0", self.init_std)));
        }
        let experts = self.layers.iter().filter_map(|layer| layer.feed_forward.experts());
        let n_expert = experts.map(|c| c.n_expert).fold(0, usize::saturating_add);
        if n_expert > N_EXPERT_ALL_MAX {
            let text = format!("{n_expert} in all layers together, above {N_EXPERT_ALL_MAX}");
            list.push(("experts.n_expert", text));
        }
        for layer in &self.layers {
            if !list.is_empty() {
                break;
            }
            let parts = layer.mixer.parts().into_iter();
            list.extend(parts.flat_map(|part| part.problems(self.d_model)));
            list.extend(match &layer.feed_forward {
                FeedForwardConfig::None => Vec::new(),
                FeedForwardConfig::Dense(c) => c.problems("dense.d_ff", self.d_model),
                FeedForwardConfig::Experts(c) => c.problems(self.d_model),
            });
        }
        list
    }
}

impl DenseConfig {
    fn problems(&self, key: &'static str, d_model: usize) -> Problems {
        let scales = [self.gate_scale, self.out_scale].map(|factor| ("mlp_multipliers", factor));
        let shape = [self.d_ff.saturating_mul(2), d_model];
        [sizes(&[(key, self.d_ff, WIDTH_MAX)]), shapes(&[(key, &shape)]), finite(&scales)].concat()
    }
}

impl ExpertsConfig {
    fn problems(&self, d_model: usize) -> Problems {
        let router = &self.router;
        let mut list = sizes(&[
            ("experts.n_expert", self.n_expert, N_EXPERT_MAX),
            ("experts.d_ff", self.d_ff, WIDTH_MAX),
            ("experts.n_used", router.n_used, N_EXPERT_MAX),
            ("n_group", router.n_group, N_EXPERT_MAX),
        ]);
        // Some families store the matrices of all experts as one.
        let n_stored = match self.form {
            ExpertForm::Each(_) => 1,
            ExpertForm::Stacked(_) => self.n_expert,
        };
        list.extend(shapes(&[
            ("experts.n_expert", &[self.n_expert, d_model]),
            ("experts.d_ff", &[n_stored, 2, self.d_ff, d_model]),
        ]));
        list.extend(finite(&[("routed_scaling_factor", router.scale)]));
        if let Some(shared) = &self.shared {
            list.extend(shared.problems("experts.d_shared", d_model));
        }
        let (n_group, n_used) = (router.n_group, router.n_group_used);
        if !self.n_expert.is_multiple_of(n_group.max(1)) {
            list.push(("n_group", format!("{n_group} do not divide {} experts", self.n_expert)));
        }
        if n_used == 0 || n_used > n_group {
            list.push(("topk_group", format!("{n_used} of {n_group} groups")));
        }
        if list.is_empty() && router.n_used > self.n_expert / n_group * n_used {
            let reachable = self.n_expert / n_group * n_used;
            let text = format!("{} of {reachable} experts", router.n_used);
            list.push(("experts.n_used", text));
        }
        list
    }
}
