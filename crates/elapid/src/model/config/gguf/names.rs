//! Each parameter's place among the tensors of a GGUF file.

use super::Arch;
use crate::model::config::family::Trait;
use crate::model::config::*;
use crate::model::place::{Map, Part, Place};
use crate::model::weights::Spec;
use std::collections::HashMap;

/// Factors of the rotary frequencies (those of Llama 3), which belong to no parameter.
pub const FREQUENCIES: &str = "rope_freqs.weight";

/// Where everything is.
pub struct Names {
    /// In the order of the specs.
    pub places: Vec<Place>,
    /// Where a head that is the embedding lies again, with other factors.
    pub head: Option<Place>,
}

/// Places of all parameters; one that the architecture has no name for is refused.
pub fn names(config: &Config, arch: Arch, specs: &[Spec]) -> Result<Names> {
    let mut walk = Walk { arch, config, places: HashMap::new() };
    walk.model();
    let place = |spec: &Spec| {
        walk.places.get(&spec.name).cloned().ok_or_else(|| {
            let problem = format!("`{}` has no place in the architecture {arch}", spec.name);
            let hint = "convert it to a directory or to a package, which keep every model";
            Error::input(format!("this model cannot be written as GGUF: {problem}"), hint)
        })
    };
    let places = specs.iter().map(place).collect::<Result<Vec<_>>>()?;
    let [of_embed, of_logits] = walk.stream_scales();
    let head = (config.tied && of_embed != of_logits).then(|| {
        let shape = [config.n_vocab, config.d_model];
        Place::whole("output.weight".into(), &shape, Map::scale(config.n_vocab, of_logits))
    });
    Ok(Names { places, head })
}

struct Walk<'a> {
    arch: Arch,
    config: &'a Config,
    places: HashMap<String, Place>,
}

impl Walk<'_> {
    fn put(&mut self, param: String, tensor: String, shape: &[usize], map: Map) {
        self.places.insert(param, Place::whole(tensor, shape, map));
    }

    /// Factors that are multiplied into embedding and head: only where no key says them.
    fn stream_scales(&self) -> [f32; 2] {
        match self.arch {
            Arch::FalconH1 => [self.config.embed_scale, self.config.logit_scale],
            _ => [1.0; 2],
        }
    }

    fn model(&mut self) {
        let config = self.config;
        let (n_vocab, d_model) = (config.n_vocab, config.d_model);
        let [of_embed, of_logits] = self.stream_scales();
        let shape = [n_vocab, d_model];
        let map = Map::scale(n_vocab, of_embed);
        self.put(config.embed_name.clone(), "token_embd.weight".into(), &shape, map);
        self.put(config.norm_name.clone(), "output_norm.weight".into(), &[d_model], Map::Same);
        let map = Map::scale(n_vocab, of_logits);
        self.put(crate::model::HEAD.into(), "output.weight".into(), &shape, map);
        for (idx, layer) in config.layers.iter().enumerate() {
            let at = format!("blk.{idx}");
            let norm = format!("{at}.attn_norm.weight");
            self.put(layer.mixer_norm.clone(), norm, &[d_model], Map::Same);
            // llama.cpp looks for this one without its suffix in Falcon-H1.
            let suffix = if self.arch == Arch::FalconH1 { "" } else { ".weight" };
            let norm = format!("{at}.ffn_norm{suffix}");
            self.put(layer.feed_forward_norm.clone(), norm, &[d_model], Map::Same);
            match &layer.mixer {
                MixerConfig::Mamba1(c) => self.mamba1(&at, c),
                MixerConfig::Mamba2(c) => self.mamba2(&at, c),
                MixerConfig::Attention(c) => self.attention(&at, c),
                MixerConfig::Parallel(m, a) => {
                    self.mamba2(&at, m);
                    self.attention(&at, a);
                }
                MixerConfig::ShortConv(_) => {}
            }
            match &layer.feed_forward {
                FeedForwardConfig::None => {}
                FeedForwardConfig::Dense(c) => self.dense(&at, c, ""),
                FeedForwardConfig::Experts(c) => self.experts(&at, c),
            }
        }
    }

    fn attention(&mut self, at: &str, c: &AttentionConfig) {
        let (d_head, d_model) = (c.dims.d_head, self.config.d_model);
        let (d_q, d_kv) = (c.dims.n_head * d_head, c.dims.n_kv_head * d_head);
        let pairs = match self.arch.has(Trait::PairedRows) {
            // Without RoPE any order will do; llama.cpp's own converter pairs all the same.
            true => {
                let d_rotary = c.rope.as_ref().map_or(d_head, |rope| rope.d_rotary);
                Map::PairRows { d_head, d_rotary }
            }
            false => Map::Same,
        };
        let turned = |n_rows: usize, factor: f32| match factor == 1.0 {
            true => pairs.clone(),
            false => Map::scale(n_rows, factor),
        };
        let q_map = turned(d_q, c.in_scale);
        let k_map = turned(d_kv, c.in_scale * c.key_scale);
        let v_map = Map::scale(d_kv, c.in_scale);
        let prefix = &c.prefix;
        for (from, to, n_rows, map, bias) in [
            ("q_proj", "attn_q", d_q, q_map, pairs.clone()),
            ("k_proj", "attn_k", d_kv, k_map, turned(d_kv, c.key_scale)),
            ("v_proj", "attn_v", d_kv, v_map, Map::Same),
        ] {
            let shape = [n_rows, d_model];
            self.put(format!("{prefix}.{from}.weight"), format!("{at}.{to}.weight"), &shape, map);
            self.put(format!("{prefix}.{from}.bias"), format!("{at}.{to}.bias"), &[n_rows], bias);
        }
        let map = Map::scale(d_model, c.out_scale);
        let out = format!("{at}.attn_output");
        self.put(format!("{prefix}.o_proj.weight"), format!("{out}.weight"), &[d_model, d_q], map);
        if self.arch.has(Trait::OutBias) {
            let map = Map::scale(d_model, c.out_scale);
            self.put(format!("{prefix}.o_proj.bias"), format!("{out}.bias"), &[d_model], map);
        }
        for part in ["q", "k"] {
            let (from, to) =
                (format!("{prefix}.{part}_norm.weight"), format!("{at}.attn_{part}_norm.weight"));
            self.put(from, to, &[d_head], Map::Same);
        }
    }

    fn mamba1(&mut self, at: &str, c: &Mamba1Config) {
        let (d_model, d_inner, d_state) = (self.config.d_model, c.d_inner, c.d_state);
        let mut put = |from: &str, to: &str, shape: &[usize], map: Map| {
            self.put(format!("{}.{from}", c.prefix), format!("{at}.{to}"), shape, map);
        };
        put("in_proj.weight", "ssm_in.weight", &[2 * d_inner, d_model], Map::Same);
        put("conv1d.weight", "ssm_conv1d.weight", &[d_inner, c.d_conv], Map::Same);
        put("conv1d.bias", "ssm_conv1d.bias", &[d_inner], Map::Same);
        let x_width = c.delta_rank + 2 * d_state;
        put("x_proj.weight", "ssm_x.weight", &[x_width, d_inner], Map::Same);
        put("dt_proj.weight", "ssm_dt.weight", &[d_inner, c.delta_rank], Map::Same);
        put("dt_proj.bias", "ssm_dt.bias", &[d_inner], Map::Same);
        put("A_log", "ssm_a", &[d_inner, d_state], Map::NegExp);
        put("D", "ssm_d", &[d_inner], Map::Same);
        put("out_proj.weight", "ssm_out.weight", &[d_model, d_inner], Map::Same);
        put("dt_layernorm.weight", "ssm_dt_norm.weight", &[c.delta_rank], Map::Same);
        put("b_layernorm.weight", "ssm_b_norm.weight", &[d_state], Map::Same);
        put("c_layernorm.weight", "ssm_c_norm.weight", &[d_state], Map::Same);
    }

    fn mamba2(&mut self, at: &str, c: &Mamba2Config) {
        let (d_model, d_inner, n_head) = (self.config.d_model, c.d_inner(), c.n_head);
        let d_bc = c.n_group * c.d_state;
        let mut put = |from: &str, to: &str, shape: &[usize], map: Map| {
            self.put(format!("{}.{from}", c.prefix), format!("{at}.{to}"), shape, map);
        };
        let width = 2 * d_inner + 2 * d_bc + n_head;
        let widths = [d_inner, d_inner, d_bc, d_bc, n_head];
        let runs = widths.into_iter().zip(c.scales.parts.map(|part| part * c.scales.input));
        let runs: Vec<(usize, f32)> = runs.collect();
        let is_plain = runs.iter().all(|run| run.1 == 1.0);
        let map = if is_plain { Map::Same } else { Map::Scale(runs) };
        put("in_proj.weight", "ssm_in.weight", &[width, d_model], map);
        put("conv1d.weight", "ssm_conv1d.weight", &[d_inner + 2 * d_bc, c.d_conv], Map::Same);
        put("conv1d.bias", "ssm_conv1d.bias", &[d_inner + 2 * d_bc], Map::Same);
        put("dt_bias", "ssm_dt.bias", &[n_head], Map::Same);
        put("A_log", "ssm_a", &[n_head, 1], Map::NegExp);
        put("D", "ssm_d", &[n_head, 1], Map::Same);
        put("norm.weight", "ssm_norm.weight", &[c.n_group, d_inner / c.n_group], Map::Same);
        let map = Map::scale(d_model, c.scales.output);
        put("out_proj.weight", "ssm_out.weight", &[d_model, d_inner], map);
    }

    /// `kind` is `_shexp` for what every token takes beside the experts.
    fn dense(&mut self, at: &str, c: &DenseConfig, kind: &str) {
        let (d_model, d_ff) = (self.config.d_model, c.d_ff);
        let [gate, up, down] = ["gate", "up", "down"].map(|part| format!("{at}.ffn_{part}{kind}"));
        let last = match &c.form {
            DenseForm::Gated([gate_name, up_name, last]) => {
                let maps = [Map::scale(d_ff, c.gate_scale), Map::Same];
                for ((from, to), map) in [(gate_name, gate), (up_name, up)].into_iter().zip(maps) {
                    let from = format!("{}.{from}", c.prefix);
                    let weight = map.clone();
                    self.put(
                        format!("{from}.weight"),
                        format!("{to}.weight"),
                        &[d_ff, d_model],
                        weight,
                    );
                    self.put(format!("{from}.bias"), format!("{to}.bias"), &[d_ff], map);
                }
                last
            }
            DenseForm::Fused([both, last]) => {
                let part = |name: String| Part { name, shape: vec![d_ff, d_model], rows: None };
                let parts = [gate, up].map(|name| part(format!("{name}.weight"))).to_vec();
                let name = format!("{}.{both}.weight", c.prefix);
                self.places.insert(name, Place { parts, map: Map::Same });
                last
            }
            DenseForm::Plain(_) => return,
        };
        let from = format!("{}.{last}", c.prefix);
        let map = Map::scale(d_model, c.out_scale);
        let bias = map.clone();
        self.put(format!("{from}.weight"), format!("{down}.weight"), &[d_model, d_ff], map);
        self.put(format!("{from}.bias"), format!("{down}.bias"), &[d_model], bias);
    }

    fn experts(&mut self, at: &str, c: &ExpertsConfig) {
        let d_model = self.config.d_model;
        let router = format!("{at}.ffn_gate_inp.weight");
        self.put(c.router_name.clone(), router, &[c.n_expert, d_model], Map::Same);
        for expert in 0..c.n_expert {
            let (d_ff, gate) = (c.d_ff, expert * 2 * c.d_ff);
            let params = match &c.form {
                ExpertForm::Each(names) => {
                    names.map(|name| format!("{}.experts.{expert}.{name}.weight", c.prefix))
                }
                ExpertForm::Stacked([input, output]) => {
                    let rows = |name: &str, first: usize, n: usize| {
                        format!("{}.{name}.weight[{first}..{}]", c.prefix, first + n)
                    };
                    [
                        rows(input, gate, d_ff),
                        rows(input, gate + d_ff, d_ff),
                        rows(output, expert * d_model, d_model),
                    ]
                }
            };
            let shapes = [[d_ff, d_model], [d_ff, d_model], [d_model, d_ff]];
            for ((param, part), [n_rows, n_cols]) in
                params.into_iter().zip(["gate", "up", "down"]).zip(shapes)
            {
                let part = Part {
                    name: format!("{at}.ffn_{part}_exps.weight"),
                    shape: vec![c.n_expert, n_rows, n_cols],
                    rows: Some(expert * n_rows..(expert + 1) * n_rows),
                };
                self.places.insert(param, Place { parts: vec![part], map: Map::Same });
            }
        }
        if let Some(shared) = &c.shared {
            self.dense(at, shared, "_shexp");
        }
        if let Some(gate) = &c.shared_gate {
            let name = format!("{at}.ffn_gate_inp_shexp.weight");
            self.put(gate.clone(), name, &[d_model], Map::Same);
        }
    }
}
