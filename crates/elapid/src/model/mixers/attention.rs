//! Causal attention with rotary positions.

use super::*;
use crate::model::config::gguf::Trait;
use crate::ops::attention::{Attention, attention};
use crate::ops::clamp::clamp;
use crate::ops::rope::{Rope, RopeScaling, RopeTable, rope};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkNorm {
    None,
    /// Each head by itself, with one weight for all heads.
    Head,
    Whole,
}

#[derive(Clone, Debug, PartialEq)]
pub struct AttentionConfig {
    pub prefix: String,
    pub dims: Attention,
    pub qkv_bias: bool,
    pub out_bias: bool,
    pub qk_norm: QkNorm,
    pub qk_eps: f32,
    /// Names of one matrix for queries, keys and values together, and of the output.
    pub fused: Option<[&'static str; 2]>,
    /// Queries, keys and values are clamped to plus and minus this.
    pub clip: Option<f32>,
    pub rope: Option<Rope>,
    pub in_scale: f32,
    pub key_scale: f32,
    pub out_scale: f32,
}

pub(super) const OWN: Own = Own {
    name: "attention",
    keys: &["n_head", "n_kv_head", "d_head", "window", "rope_base", "qk_norm"],
    read: |reader, idx, at, config| reader.attention(idx, at, config).map(MixerConfig::Attention),
};

impl AttentionConfig {
    /// Widths of queries, and of keys or values.
    fn widths(&self) -> [usize; 2] {
        [self.dims.n_head, self.dims.n_kv_head].map(|n| n * self.dims.d_head)
    }
}

fn rope_problems(rope: &Rope, d_head: usize) -> Problems {
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

impl MixerFacts for AttentionConfig {
    fn summary(&self) -> String {
        format!("attention ({} heads, {} kv)", self.dims.n_head, self.dims.n_kv_head)
    }

    fn problems(&self, d_model: usize) -> Problems {
        let dims = &self.dims;
        let mut list = sizes(&[
            ("attention.n_head", dims.n_head, WIDTH_MAX),
            ("attention.n_kv_head", dims.n_kv_head, WIDTH_MAX),
            ("attention.d_head", dims.d_head, D_HEAD_MAX),
            ("attention.window", dims.window.unwrap_or(1), WIDTH_MAX),
        ]);
        if list.is_empty() {
            let [d_q, d_kv] = self.widths();
            list.extend(shapes(&[
                ("attention.n_head", &[d_q, d_model]),
                ("attention.n_kv_head", &[d_q + 2 * d_kv, d_model]),
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

    fn reach(&self) -> Option<usize> {
        self.dims.window.map(|window| window.saturating_sub(1))
    }

    fn build(&self, builder: &mut Builder, d_model: usize) -> Box<dyn Mixer> {
        let (std, out_std) = (builder.std, builder.out_std);
        let name = |part: &str| format!("{}.{part}", self.prefix);
        let (d_head, [d_q, d_kv]) = (self.dims.d_head, self.widths());
        let mut input =
            |part: &str, d: usize| builder.linear(name(part), [d, d_model], std, self.qkv_bias);
        let (qkv, out) = match self.fused {
            Some([all, out]) => (vec![input(all, d_q + 2 * d_kv)], out),
            None => {
                let each = [("q_proj", d_q), ("k_proj", d_kv), ("v_proj", d_kv)];
                (each.map(|(part, d)| input(part, d)).to_vec(), "o_proj")
            }
        };
        let out = builder.linear(name(out), [d_model, d_q], out_std, self.out_bias);
        let widths = match self.qk_norm {
            QkNorm::None => None,
            QkNorm::Head => Some([d_head; 2]),
            QkNorm::Whole => Some([d_q, d_kv]),
        };
        let norms = widths.map(|[of_q, of_k]| {
            [("q_norm.weight", of_q), ("k_norm.weight", of_k)]
                .map(|(part, d)| builder.norm(name(part), d))
        });
        let rope = self.rope.as_ref().map(|rope| builder.rope(rope));
        let cache = builder.slot(Slot::Cache { n_kv_head: self.dims.n_kv_head, d_head });
        Box::new(AttentionBlock { config: self.clone(), qkv, out, norms, rope, cache })
    }

    fn gguf(&self, names: &mut LayerNames) {
        let name = |part: &str| format!("{}.{part}", self.prefix);
        if let Some([all, out]) = self.fused {
            for part in ["weight", "bias"] {
                for (from, to) in [(all, "attn_qkv"), (out, "attn_output")] {
                    let param = name(&format!("{from}.{part}"));
                    names.put(param, &format!("{to}.{part}"), Map::Same);
                }
            }
            return;
        }
        let (d_head, [d_q, d_kv]) = (self.dims.d_head, self.widths());
        let pairs = match names.arch.has(Trait::PairedRows) {
            // Without RoPE any order will do; llama.cpp's own converter pairs all the same.
            true => {
                let d_rotary = self.rope.as_ref().map_or(d_head, |rope| rope.d_rotary);
                Map::PairRows { d_head, d_rotary }
            }
            false => Map::Same,
        };
        let turned = |n_rows: usize, factor: f32| match factor == 1.0 {
            true => pairs.clone(),
            false => Map::scale(n_rows, factor),
        };
        let q_map = turned(d_q, self.in_scale);
        let k_map = turned(d_kv, self.in_scale * self.key_scale);
        let v_map = Map::scale(d_kv, self.in_scale);
        for (from, to, map, bias) in [
            ("q_proj", "attn_q", q_map, pairs.clone()),
            ("k_proj", "attn_k", k_map, turned(d_kv, self.key_scale)),
            ("v_proj", "attn_v", v_map, Map::Same),
        ] {
            names.put(name(&format!("{from}.weight")), &format!("{to}.weight"), map);
            names.put(name(&format!("{from}.bias")), &format!("{to}.bias"), bias);
        }
        let map = Map::scale(names.d_model, self.out_scale);
        names.put(name("o_proj.weight"), "attn_output.weight", map.clone());
        if names.arch.has(Trait::OutBias) {
            names.put(name("o_proj.bias"), "attn_output.bias", map);
        }
        names.put(name("q_norm.weight"), "attn_q_norm.weight", Map::Same);
        names.put(name("k_norm.weight"), "attn_k_norm.weight", Map::Same);
    }
}

struct AttentionBlock {
    config: AttentionConfig,
    /// Each by itself, or one for all.
    qkv: Vec<LinearIds>,
    out: LinearIds,
    norms: Option<[ParamId; 2]>,
    rope: Option<RopeTable>,
    cache: SlotId,
}

impl Mixer for AttentionBlock {
    fn forward(&self, pass: &Pass, x: &Var, states: States) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let x = scale(tape, x, c.in_scale);
        let [mut q, k, mut v] = match &self.qkv[..] {
            [q, k, v] => pass.each(&x, [q, k, v]),
            [all] => {
                let [d_q, d_kv] = c.widths();
                pass.split(&x, all, [d_q, d_kv, d_kv])
            }
            list => panic!("queries, keys and values of {} matrices", list.len()),
        };
        let mut k = scale(tape, &k, c.key_scale);
        if let Some([of_q, of_k]) = self.norms {
            let norm = |x: &Var, id: ParamId| {
                let w = pass.var(id);
                let d = w.value().n_elem();
                rms_norm(tape, x, Some(&w), d, c.qk_eps)
            };
            (q, k) = (norm(&q, of_q), norm(&k, of_k));
        }
        if let Some(limit) = c.clip {
            [q, k, v] = [q, k, v].map(|x| clamp(tape, &x, limit));
        }
        if let Some(table) = &self.rope {
            let d_head = c.dims.d_head;
            [q, k] = [q, k].map(|x| rope(tape, &x, table, d_head, pass.segments));
        }
        let mut caches = caches(states, self.cache);
        let y = attention(tape, &q, &k, &v, &c.dims, pass.segments, caches.as_deref_mut());
        scale(tape, &pass.linear(&y, &self.out), c.out_scale)
    }
}
