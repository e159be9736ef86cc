//! LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Keys are `base_model.model.<module>.lora_A.weight` (rank, d_in) and `.lora_B.weight` (d_out,
//! rank). The factor of their product is alpha / rank, or alpha / sqrt(rank) with `use_rslora`;
//! `rank_pattern` and `alpha_pattern` set rank and alpha for modules whose name ends in a key.
//! What we cannot honour is refused by name.

use crate::device::Device;
use crate::error::{Error, Result};
use crate::formats::Pairs;
use crate::formats::safetensors::SafeTensors;
use crate::weights::{Role, Weights};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const PREFIX: &str = "base_model.model.";

#[derive(Deserialize)]
struct AdapterConfig {
    peft_type: Option<String>,
    r: u64,
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    bias: Option<String>,
    /// In the order of the file: the first that matches counts.
    #[serde(default)]
    rank_pattern: Option<Pairs<u64>>,
    #[serde(default)]
    alpha_pattern: Option<Pairs<f64>>,
    /// Everything else, to be refused where it would change the result.
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Settings that change the result and that we do not know; absent, null, false or empty is fine.
const REFUSED: &[&str] = &[
    "modules_to_save",
    "alora_invocation_tokens",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "trainable_token_indices",
    "target_parameters",
    "lora_bias",
    "exclude_modules",
    "corda_config",
    "eva_config",
    "loftq_config",
];

/// Whether a setting says nothing.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

impl AdapterConfig {
    /// Names the first setting that would change the result and that we do not know.
    fn refuse(&self, file: &str) -> Result<()> {
        let fail = |key: &str, problem: String| {
            Err(Error::config(
                file,
                key,
                problem,
                "merge the adapter with PEFT and convert the result",
            ))
        };
        match self.peft_type.as_deref() {
            Some("LORA") | None => {}
            Some(other) => return fail("peft_type", format!("is \"{other}\", not \"LORA\"")),
        }
        if self.use_dora {
            return fail("use_dora", "DoRA is not supported yet".into());
        }
        if self.fan_in_fan_out {
            return fail("fan_in_fan_out", "transposed weights are not supported".into());
        }
        match self.bias.as_deref() {
            Some("none") | None => {}
            Some(other) => return fail("bias", format!("is \"{other}\", not \"none\"")),
        }
        for key in REFUSED {
            if let Some(value) = self.others.get(*key).filter(|value| !is_off(value)) {
                return fail(key, format!("{value} is not supported"));
            }
        }
        // The other ways to begin an adapter change the base weights too.
        match self.others.get("init_lora_weights") {
            None | Some(Value::Bool(_) | Value::Null) => {}
            Some(Value::String(kind)) if kind == "gaussian" || kind == "orthogonal" => {}
            Some(other) => return fail("init_lora_weights", format!("{other} is not supported")),
        }
        let ranks = self.rank_pattern.iter().flat_map(|patterns| &patterns.0);
        if let Some((pattern, _)) = ranks.into_iter().find(|(_, rank)| *rank == 0) {
            return fail("rank_pattern", format!("`{pattern}` has rank 0"));
        }
        if self.r == 0 {
            return fail("r", "is 0".into());
        }
        if !self.lora_alpha.is_finite() {
            return fail("lora_alpha", format!("is {}", self.lora_alpha));
        }
        let of_ranks = self.rank_pattern.iter().flat_map(|patterns| &patterns.0).map(|p| &p.0);
        let of_alphas = self.alpha_pattern.iter().flat_map(|patterns| &patterns.0).map(|p| &p.0);
        let patterns = of_ranks.chain(of_alphas);
        for pattern in patterns {
            if pattern.contains(['*', '+', '?', '[', ']', '(', ')', '{', '}', '|', '^', '$', '\\'])
            {
                let problem = format!("`{pattern}` is a regular expression");
                return fail("rank_pattern or alpha_pattern", problem);
            }
        }
        Ok(())
    }

    /// Rank and factor of one module.
    fn of(&self, module: &str) -> (u64, f64) {
        let rank = lookup(&self.rank_pattern, module).unwrap_or(self.r);
        let alpha = lookup(&self.alpha_pattern, module).unwrap_or(self.lora_alpha);
        let divisor = if self.use_rslora { (rank as f64).sqrt() } else { rank as f64 };
        (rank, alpha / divisor)
    }
}

/// The value of the first key that is the module or its tail after a dot.
fn lookup<T: Copy>(patterns: &Option<Pairs<T>>, module: &str) -> Option<T> {
    let is_tail = |key: &str| {
        module.strip_suffix(key).is_some_and(|head| head.is_empty() || head.ends_with('.'))
    };
    let mut pairs = patterns.iter().flat_map(|patterns| &patterns.0);
    pairs.find(|(key, _)| is_tail(key)).map(|(_, value)| *value)
}

/// Adds an adapter to the matrices it names; returns how many.
pub fn apply(
    device: &Device,
    weights: &mut Weights,
    config: (&str, &str),
    file: &SafeTensors,
) -> Result<usize> {
    let (config_file, json) = config;
    let hint = "an adapter directory is written by PEFT's `save_pretrained`";
    let config: AdapterConfig = serde_json::from_str(json)
        .map_err(|error| Error::format(config_file, error.to_string(), hint))?;
    config.refuse(config_file)?;
    let mut modules = BTreeSet::new();
    for name in file.names() {
        let module = name.strip_prefix(PREFIX).and_then(|name| {
            name.strip_suffix(".lora_A.weight").or_else(|| name.strip_suffix(".lora_B.weight"))
        });
        match module {
            Some(module) => modules.insert(module.to_string()),
            None => {
                let problem = format!("tensor `{name}` is not a half of an adapter we know");
                return Err(Error::format(file.file(), problem, hint));
            }
        };
    }
    if modules.is_empty() {
        return Err(Error::format(file.file(), "the adapter holds no tensors", hint));
    }
    for module in &modules {
        add_one(device, weights, &config, file, module)?;
    }
    Ok(modules.len())
}

fn add_one(
    device: &Device,
    weights: &mut Weights,
    config: &AdapterConfig,
    file: &SafeTensors,
    module: &str,
) -> Result<()> {
    let weight = format!("{module}.weight");
    // Embeddings and convolutions are no linear maps: an adapter there would do nothing.
    let is_matrix = |id: &_| weights.role(*id) == Role::Matrix;
    let Some(id) = weights.find(&weight).filter(is_matrix) else {
        let example = weights.ids().find(is_matrix).map(|id| weights.name(id).to_string());
        let example = example.unwrap_or_default();
        return Err(Error::NoMatch { pattern: weight, example });
    };
    let (rank, scale) = config.of(module);
    let (d_out, d_in) = weights.tensor(id).dims2();
    let names = ["A", "B"].map(|half| format!("{PREFIX}{module}.lora_{half}.weight"));
    let shapes = [vec![rank as usize, d_in], vec![d_out, rank as usize]];
    let mut halves = Vec::with_capacity(2);
    for (name, want) in names.iter().zip(shapes) {
        let Some(half) = file.tensor(device, name)? else {
            return Err(Error::MissingTensor { name: name.clone(), shape: want });
        };
        if half.shape() != want {
            return Err(Error::WrongShape {
                name: name.clone(),
                file: file.file().into(),
                got: half.shape().to_vec(),
                want,
            });
        }
        halves.push(half.to_f32());
    }
    let halves = <[_; 2]>::try_from(halves).expect("two halves");
    weights.adapt(id, names, halves, scale as f32);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(more: &str) -> AdapterConfig {
        serde_json::from_str(&format!(r#"{{"r": 4, "lora_alpha": 8 {more}}}"#)).unwrap()
    }

    #[test]
    fn patterns_match_the_tail_of_a_module_after_a_dot() {
        let c =
            config(r#", "use_rslora": true, "rank_pattern": {"down_proj": 16, "0.q": 1, "q": 64}"#);
        assert_eq!(c.of("model.layers.1.mlp.down_proj"), (16, 2.0));
        assert_eq!(c.of("model.layers.1.mlp.updown_proj"), (4, 4.0));
        assert_eq!(c.of("x.0.q"), (1, 8.0));
        assert_eq!(c.of("x.10.q"), (64, 1.0));
        // The first in the file counts, whatever the alphabet says.
        let c = config(r#", "alpha_pattern": {"q": 32, "a.q": 4}"#);
        assert_eq!(c.of("a.q"), (4, 8.0));
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (more, name) in [
            (r#", "use_dora": true"#, "use_dora"),
            (r#", "bias": "all""#, "bias"),
            (r#", "modules_to_save": ["lm_head"]"#, "modules_to_save"),
            (r#", "fan_in_fan_out": true"#, "fan_in_fan_out"),
            (r#", "peft_type": "IA3""#, "peft_type"),
            (r#", "init_lora_weights": "pissa""#, "init_lora_weights"),
            (r#", "layer_replication": [[0, 2]]"#, "layer_replication"),
            (r#", "rank_pattern": {"q_proj": 0}"#, "rank_pattern"),
            (r#", "alpha_pattern": {".*q_proj": 2}"#, "alpha_pattern"),
        ] {
            let text = config(more).refuse("adapter_config.json").unwrap_err().to_string();
            assert!(text.contains(name), "{name}: {text}");
        }
    }
}
