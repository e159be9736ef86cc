//! What no model can be, refused before a model is built.
//!
//! `Model::new` lists every parameter and every RoPE frequency, so that a config of a few lines
//! could take all memory before a weight file is opened; and it multiplies sizes without a care.
//! The limits here are far above every published model and far below the machine's.
//!
//! Problems name keys as our own config does; `Keys::wrong` turns them into those of the file.

use super::*;

/// Layers of a model.
pub(super) const N_LAYER_MAX: usize = 10_000;
/// Experts of a layer, and of all layers together.
const N_EXPERT_MAX: usize = 1 << 12;
const N_EXPERT_ALL_MAX: usize = 1 << 20;
/// Any width inside a layer.
const WIDTH_MAX: usize = 1 << 24;
/// Width of a head: RoPE has a frequency for every two.
const D_HEAD_MAX: usize = 1 << 14;
/// Taps of a convolution.
const D_CONV_MAX: usize = 1 << 10;
/// Of Mamba-1, which has 16: more than this no device has registers for.
const D_STATE_MAX: usize = 256;
/// Vocabulary and width of the residual stream.
const STREAM_MAX: usize = 1 << 28;
/// Numbers of one parameter, or of one recurrent state.
const NUMBERS_MAX: usize = 1 << 40;

/// A key and what is wrong with its value.
type Problems = Vec<(&'static str, String)>;

/// Each must lie in 1..=max.
fn sizes(list: &[(&'static str, usize, usize)]) -> Problems {
    let bad = list.iter().filter(|(_, size, max)| !(1..=*max).contains(size));
    let text = |size: usize, max: usize| match size {
        usize::MAX => format!("2^64 or more is out of range 1..={max}"),
        _ => format!("{size} is out of range 1..={max}"),
    };
    bad.map(|&(key, size, max)| (key, text(size, max))).collect()
}

/// The product of each shape must stay within `NUMBERS_MAX`.
fn shapes(list: &[(&'static str, &[usize])]) -> Problems {
    let n_numbers = |shape: &[usize]| shape.iter().fold(1usize, |n, &d| n.saturating_mul(d));
    let bad = list.iter().filter(|(_, shape)| n_numbers(shape) > NUMBERS_MAX);
    let text = |shape: &[usize]| format!("asks for a tensor of {shape:?}, above 2^40 numbers");
    bad.map(|(key, shape)| (*key, text(shape))).collect()
}

fn positive(list: &[(&'static str, f32)]) -> Problems {
    let bad = list.iter().filter(|(_, x)| !(x.is_finite() && *x > 0.0));
    bad.map(|(key, x)| (*key, format!("{x} is not a finite number above 0"))).collect()
}

fn finite(list: &[(&'static str, f32)]) -> Problems {
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
            ("logit_scale", self.logit_scale),
            ("balance_scale", self.balance_scale),
            ("init_std", self.init_std),
        ]));
        if self.init_std < 0.0 {
            list.push(("init_std", format!("{} is below 0", self.init_std)));
        }
        let n_expert = self.layers.iter().map(|layer| match &layer.feed_forward {
            FeedForwardConfig::Experts(c) => c.n_expert,
            _ => 0,
        });
        let n_expert = n_expert.fold(0, usize::saturating_add);
        if n_expert > N_EXPERT_ALL_MAX {
            let text = format!("{n_expert} in all layers together, above {N_EXPERT_ALL_MAX}");
            list.push(("experts.n_expert", text));
        }
        for layer in &self.layers {
            if !list.is_empty() {
                break;
            }
            list.extend(positive(&[("eps", layer.eps)]));
            list.extend(finite(&[("residual_scale", layer.residual_scale)]));
            list.extend(layer.mixer.problems(self.d_model));
            list.extend(layer.feed_forward.problems(self.d_model));
        }
        list
    }
}

impl MixerConfig {
    fn problems(&self, d_model: usize) -> Problems {
        match self {
            MixerConfig::Mamba1(c) => c.problems(d_model),
            MixerConfig::Mamba2(c) => c.problems(d_model),
            MixerConfig::Attention(c) => c.problems(d_model),
            MixerConfig::ShortConv(c) => {
                let mut list = sizes(&[("short_conv.d_conv", c.d_conv, D_CONV_MAX)]);
                list.extend(shapes(&[("short_conv.d_conv", &[d_model, c.d_conv])]));
                list
            }
            MixerConfig::Parallel(mamba, attention) => {
                let both = mamba.problems(d_model).into_iter();
                both.chain(attention.problems(d_model)).collect()
            }
        }
    }
}

impl DeltaInit {
    /// `keys`: of the smallest and the largest.
    fn problems(&self, keys: [&'static str; 2]) -> Problems {
        let mut list = positive(&[(keys[0], self.min), (keys[1], self.max)]);
        if list.is_empty() && self.min > self.max {
            list.push((keys[0], format!("{} is above the largest, {}", self.min, self.max)));
        }
        if !(self.floor.is_finite() && self.floor >= 0.0) {
            list.push(("time_step_floor", format!("{} is not 0 or above", self.floor)));
        }
        list
    }
}

impl Mamba1Config {
    fn problems(&self, d_model: usize) -> Problems {
        let mut list = sizes(&[
            ("mamba1.expand", self.d_inner, WIDTH_MAX),
            ("mamba1.d_state", self.d_state, D_STATE_MAX),
            ("mamba1.d_conv", self.d_conv, D_CONV_MAX),
            ("mamba1.delta_rank", self.delta_rank, WIDTH_MAX),
        ]);
        if list.is_empty() {
            let d_inner = self.d_inner;
            list.extend(shapes(&[
                ("mamba1.expand", &[2 * d_inner, d_model]),
                ("mamba1.d_conv", &[d_inner, self.d_conv]),
                ("mamba1.d_state", &[self.delta_rank + 2 * self.d_state, d_inner]),
            ]));
        }
        if let InnerNorm::Plain { eps } | InnerNorm::Weighted { eps } = self.inner_norm {
            list.extend(positive(&[("mixer_rms_eps", eps)]));
        }
        list.extend(self.delta_init.problems(["mamba1.delta_min", "mamba1.delta_max"]));
        list
    }
}

impl Mamba2Config {
    fn problems(&self, d_model: usize) -> Problems {
        let mut list = sizes(&[
            ("mamba2.d_head", self.d_head, D_HEAD_MAX),
            ("mamba2.expand", self.n_head, WIDTH_MAX),
            ("mamba2.n_group", self.n_group, WIDTH_MAX),
            ("mamba2.d_state", self.d_state, WIDTH_MAX),
            ("mamba2.d_conv", self.d_conv, D_CONV_MAX),
        ]);
        if list.is_empty() {
            let (d_inner, d_bc) = (self.d_inner(), self.n_group * self.d_state);
            let d_xbc = d_inner + 2 * d_bc;
            list.extend(shapes(&[
                ("mamba2.expand", &[d_inner + d_xbc + self.n_head, d_model]),
                ("mamba2.d_conv", &[d_xbc, self.d_conv]),
                ("mamba2.d_state", &[self.n_head, self.d_state, self.d_head]),
            ]));
            if !self.n_head.is_multiple_of(self.n_group) {
                let text = format!("{} do not divide {} heads", self.n_group, self.n_head);
                list.push(("mamba2.n_group", text));
            }
        }
        list.extend(self.norm.iter().flat_map(|norm| positive(&[("eps", norm.eps)])));
        let of_parts = self.scales.parts.map(|factor| ("ssm_multipliers", factor));
        list.extend(finite(&of_parts));
        list.extend(finite(&[
            ("ssm_in_multiplier", self.scales.input),
            ("ssm_out_multiplier", self.scales.output),
        ]));
        list.extend(self.delta_init.problems(["mamba2.delta_min", "mamba2.delta_max"]));
        list
    }
}

impl AttentionConfig {
    fn problems(&self, d_model: usize) -> Problems {
        let dims = &self.dims;
        let mut list = sizes(&[
            ("attention.n_head", dims.n_head, WIDTH_MAX),
            ("attention.n_kv_head", dims.n_kv_head, WIDTH_MAX),
            ("attention.d_head", dims.d_head, D_HEAD_MAX),
            ("attention.window", dims.window.unwrap_or(1), WIDTH_MAX),
        ]);
        if list.is_empty() {
            list.extend(shapes(&[
                ("attention.n_head", &[dims.n_head * dims.d_head, d_model]),
                ("attention.n_kv_head", &[dims.n_kv_head * dims.d_head, d_model]),
            ]));
            if !dims.n_head.is_multiple_of(dims.n_kv_head) {
                let text = format!("{} do not divide {} heads", dims.n_kv_head, dims.n_head);
                list.push(("attention.n_kv_head", text));
            }
        }
        list.extend(finite(&[
            ("attention_multiplier", dims.scale),
            ("attention_in_multiplier", self.in_scale),
            ("key_multiplier", self.key_scale),
            ("attention_out_multiplier", self.out_scale),
        ]));
        list.extend(positive(&[("eps", self.qk_eps), ("clip_qkv", self.clip.unwrap_or(1.0))]));
        if let Some(rope) = &self.rope {
            list.extend(rope_problems(rope, dims.d_head));
        }
        list
    }
}

fn rope_problems(rope: &Rope, d_head: usize) -> Problems {
    use crate::ops::rope::RopeScaling;
    let mut list = Vec::new();
    let d_rotary = rope.d_rotary;
    if d_rotary == 0 || d_rotary > d_head || !d_rotary.is_multiple_of(2) {
        let text = format!("{d_rotary} rotated numbers in heads of {d_head}");
        list.push(("attention.d_head", text));
    }
    list.extend(positive(&[("attention.rope_base", rope.base as f32)]));
    // The ramp of YaRN divides by the logarithm of the base.
    if rope.base == 1.0 && matches!(rope.scaling, RopeScaling::Yarn { .. }) {
        list.push(("attention.rope_base", "1 does not go with YaRN".into()));
    }
    list
}

impl DenseConfig {
    fn problems(&self, key: &'static str, d_model: usize) -> Problems {
        let mut list = sizes(&[(key, self.d_ff, WIDTH_MAX)]);
        list.extend(shapes(&[(key, &[self.d_ff.saturating_mul(2), d_model])]));
        let scales = [self.gate_scale, self.out_scale];
        list.extend(finite(&scales.map(|factor| ("mlp_multipliers", factor))));
        list
    }
}

impl FeedForwardConfig {
    fn problems(&self, d_model: usize) -> Problems {
        match self {
            FeedForwardConfig::None => Vec::new(),
            FeedForwardConfig::Dense(c) => c.problems("dense.d_ff", d_model),
            FeedForwardConfig::Experts(c) => c.problems(d_model),
        }
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
