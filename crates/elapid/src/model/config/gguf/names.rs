//! Each parameter's place among the tensors of a GGUF file.

use super::Arch;
use super::arch::refuse;
use crate::model::config::*;
use crate::model::place::{Map, Part, Place};
use crate::model::weights::Spec;
use std::collections::HashMap;

/// Factors of the rotary frequencies (those of Llama 3), which belong to no parameter.
pub const FREQUENCIES: &str = "rope_freqs.weight";

pub struct Names {
    /// In the order of the specs.
    pub places: Vec<Place>,
    /// Where a head that is the embedding lies again, with other factors.
    pub head: Option<Place>,
}

/// Places of all parameters; one that the architecture has no name for is refused.
pub fn names(config: &Config, arch: Arch, specs: &[Spec]) -> Result<Names> {
    let specs_by_name = specs.iter().map(|spec| (spec.name.as_str(), spec)).collect();
    let mut layer = LayerNames {
        arch,
        d_model: config.d_model,
        at: String::new(),
        specs: specs_by_name,
        places: HashMap::new(),
    };
    // Factors that are multiplied into embedding and head: only where no key says them.
    let [of_embed, of_logits] = match arch {
        Arch::FalconH1 => [config.embed_scale, config.logit_scale],
        _ => [1.0; 2],
    };
    let head_map = Map::scale(config.n_vocab, of_logits);
    let map = Map::scale(config.n_vocab, of_embed);
    layer.put(config.embed_name.clone(), "token_embd.weight", map);
    layer.put(config.norm_name.clone(), "output_norm.weight", Map::Same);
    layer.put(crate::model::HEAD.into(), "output.weight", head_map.clone());
    for (idx, config) in config.layers.iter().enumerate() {
        layer.at = format!("blk.{idx}.");
        layer.layer(config);
    }
    let place = |spec: &Spec| {
        layer.places.get(&spec.name).cloned().ok_or_else(|| {
            refuse(&format!("`{}` has no place in the architecture {arch}", spec.name))
        })
    };
    let places = specs.iter().map(place).collect::<Result<Vec<_>>>()?;
    let head = (config.tied && of_embed != of_logits).then(|| {
        let shape = [config.n_vocab, config.d_model];
        Place::whole("output.weight".into(), &shape, head_map)
    });
    Ok(Names { places, head })
}

/// Gives names to the parameters of a layer.
pub(crate) struct LayerNames<'a> {
    pub arch: Arch,
    pub d_model: usize,
    /// What its tensors begin with: `blk.N.`.
    at: String,
    specs: HashMap<&'a str, &'a Spec>,
    places: HashMap<String, Place>,
}

impl LayerNames<'_> {
    /// A tensor of the shape that the parameter has; nothing where the model lacks it.
    pub fn put(&mut self, param: String, tensor: &str, map: Map) {
        if let Some(spec) = self.specs.get(param.as_str()) {
            self.put_as(param, tensor, &spec.shape, map);
        }
    }

    pub fn put_as(&mut self, param: String, tensor: &str, shape: &[usize], map: Map) {
        self.places.insert(param, Place::whole(format!("{}{tensor}", self.at), shape, map));
    }

    fn put_linear(&mut self, param: String, tensor: &str, map: Map) {
        for part in ["weight", "bias"] {
            self.put(format!("{param}.{part}"), &format!("{tensor}.{part}"), map.clone());
        }
    }

    fn layer(&mut self, config: &LayerConfig) {
        self.put(config.mixer_norm.clone(), "attn_norm.weight", Map::Same);
        // llama.cpp looks for this one without its suffix in Falcon-H1.
        let norm = if self.arch == Arch::FalconH1 { "ffn_norm" } else { "ffn_norm.weight" };
        self.put(config.feed_forward_norm.clone(), norm, Map::Same);
        config.mixer.parts().iter().for_each(|part| part.gguf(self));
        match &config.feed_forward {
            FeedForwardConfig::None => {}
            FeedForwardConfig::Dense(c) => self.dense(c, ""),
            FeedForwardConfig::Experts(c) => self.experts(c),
        }
    }

    /// `kind` is `_shexp` for what every token takes beside the experts.
    fn dense(&mut self, c: &DenseConfig, kind: &str) {
        let param = |part: &str| format!("{}.{part}", c.prefix);
        let [gate, up, down] = ["gate", "up", "down"].map(|part| format!("ffn_{part}{kind}"));
        let last = match &c.form {
            DenseForm::Gated([gate_name, up_name, last]) => {
                self.put_linear(param(gate_name), &gate, Map::scale(c.d_ff, c.gate_scale));
                self.put_linear(param(up_name), &up, Map::Same);
                last
            }
            DenseForm::Fused([both, last]) | DenseForm::UpFirst([both, last]) => {
                let order = match c.form {
                    DenseForm::UpFirst(_) => [up, gate],
                    _ => [gate, up],
                };
                let shape = [c.d_ff, self.d_model];
                let part = |name: String| {
                    let name = format!("{}{name}.weight", self.at);
                    Part { name, shape: shape.to_vec(), rows: None }
                };
                let place = Place { parts: order.map(part).to_vec(), map: Map::Same };
                self.places.insert(param(&format!("{both}.weight")), place);
                last
            }
            DenseForm::Plain(_) => return,
        };
        self.put_linear(param(last), &down, Map::scale(self.d_model, c.out_scale));
    }

    fn experts(&mut self, c: &ExpertsConfig) {
        self.put(c.router_name.clone(), "ffn_gate_inp.weight", Map::Same);
        let (d_model, d_ff) = (self.d_model, c.d_ff);
        for expert in 0..c.n_expert {
            let params = match &c.form {
                ExpertForm::Each(names) => {
                    names.map(|name| format!("{}.experts.{expert}.{name}.weight", c.prefix))
                }
                ExpertForm::Stacked([input, output]) => {
                    let gate = expert * 2 * d_ff;
                    [
                        (input, gate, d_ff),
                        (input, gate + d_ff, d_ff),
                        (output, expert * d_model, d_model),
                    ]
                    .map(|(name, first, n)| {
                        format!("{}.{name}.weight[{first}..{}]", c.prefix, first + n)
                    })
                }
            };
            let shapes = [[d_ff, d_model], [d_ff, d_model], [d_model, d_ff]];
            for ((param, part), [n_rows, n_cols]) in
                params.into_iter().zip(["gate", "up", "down"]).zip(shapes)
            {
                let part = Part {
                    name: format!("{}ffn_{part}_exps.weight", self.at),
                    shape: vec![c.n_expert, n_rows, n_cols],
                    rows: Some(expert * n_rows..(expert + 1) * n_rows),
                };
                self.places.insert(param, Place { parts: vec![part], map: Map::Same });
            }
        }
        if let Some(shared) = &c.shared {
            self.dense(shared, "_shexp");
        }
        if let Some(gate) = &c.shared_gate {
            self.put_as(gate.clone(), "ffn_gate_inp_shexp.weight", &[d_model], Map::Same);
        }
    }
}
