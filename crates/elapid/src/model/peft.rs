//! LoRA adapters as PEFT writes them: `adapter_config.json` and `adapter_model.safetensors`.
//!
//! Keys are `base_model.model.<module>.lora_A.weight` (rank, d_in) and `.lora_B.weight` (d_out,
//! rank), and of DoRA adapters `.lora_magnitude_vector` (d_out). `rank_pattern` and `alpha_pattern`
//! set rank and alpha for modules whose name ends in a key. What is adapted is what the tensors
//! say; `target_modules` must name it where it is a list. What we cannot honour is refused by name.

use super::lora::{Lora, MAGNITUDE, Module, PREFIX, WEIGHT, most_common, outgoing};
use crate::error::{Error, Result};
use crate::files::safetensors::SafeTensors;
use crate::files::{Outgoing, TensorFile};
use crate::model::config::keys::Keys;
use crate::tensor::device::Device;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Files of an adapter.
pub const CONFIG: &str = "adapter_config.json";
pub const TENSORS: &str = "adapter_model.safetensors";
/// Longer names are no names of tensors; it also bounds the work of looking up their tails.
const NAME_BYTES_MAX: usize = 1024;

const HINT: &str = "an adapter directory is written by PEFT's `save_pretrained`";
const HINT_MERGE: &str = "merge the adapter with PEFT and convert the result";

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
    "lora_ga_config",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
];

/// Signs of a regular expression. A dot is one too, but stands for itself in names of modules.
const REGEX: [char; 13] = ['*', '+', '?', '[', ']', '(', ')', '{', '}', '|', '^', '$', '\\'];

fn is_off(value: &Value) -> bool {
    match value {
        Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

fn rank(keys: &Keys, key: &str, value: &Value) -> Result<u64> {
    let rank = value.as_u64().filter(|rank| *rank > 0);
    rank.ok_or_else(|| keys.wrong(key, format!("{value} is not a rank from 1 on")))
}

fn alpha(keys: &Keys, key: &str, value: &Value) -> Result<f64> {
    let alpha = value.as_f64().filter(|alpha| (*alpha as f32).is_finite());
    alpha.ok_or_else(|| keys.wrong(key, format!("{value} is not a finite number")))
}

/// The names of `target_modules`; a pattern or `all-linear` says nothing that the tensors do not.
fn target_modules(keys: &Keys) -> Result<Option<HashSet<String>>> {
    if keys.get("target_modules").is_some_and(Value::is_string) {
        return Ok(None);
    }
    let name = |value: &Value| value.as_str().map(str::to_string);
    keys.typed("target_modules", "a list of names or a pattern", |value| {
        value.as_array()?.iter().map(name).collect()
    })
}

/// Names the first setting that would change the result and that we do not know.
fn refuse(keys: &Keys) -> Result<()> {
    for (key, known) in [("peft_type", "LORA"), ("bias", "none")] {
        let got = keys.str_or(key, known)?;
        if got != known {
            return Err(keys.wrong(key, format!("is \"{got}\", not \"{known}\"")));
        }
    }
    if keys.bool_or("fan_in_fan_out", false)? {
        return Err(keys.wrong("fan_in_fan_out", "transposed weights are not supported"));
    }
    for key in REFUSED {
        if let Some(value) = keys.get(key).filter(|value| !is_off(value)) {
            return Err(keys.wrong(key, format!("{value} is not supported")));
        }
    }
    // The other ways to begin an adapter change the base weights too.
    match keys.get("init_lora_weights") {
        None | Some(Value::Bool(_)) => Ok(()),
        Some(Value::String(kind)) if kind == "gaussian" || kind == "orthogonal" => Ok(()),
        Some(other) => Err(keys.wrong("init_lora_weights", format!("{other} is not supported"))),
    }
}

/// Values by the end of a module's name, each with its place in the file: the first counts.
struct Patterns<T>(HashMap<String, (usize, T)>);

impl<T: Copy> Patterns<T> {
    fn read(keys: &Keys, key: &str, one: fn(&Keys, &str, &Value) -> Result<T>) -> Result<Self> {
        let mut patterns = HashMap::new();
        let object = keys.typed(key, "an object", Value::as_object)?;
        for (idx, (pattern, value)) in object.into_iter().flatten().enumerate() {
            if pattern.contains(REGEX) {
                return Err(keys.wrong(key, format!("`{pattern}` is a regular expression")));
            }
            patterns.insert(pattern.clone(), (idx, one(keys, key, value)?));
        }
        Ok(Patterns(patterns))
    }

    fn of(&self, module: &str) -> Option<T> {
        let found = tails(module).filter_map(|tail| self.0.get(tail));
        found.min_by_key(|(idx, _)| *idx).map(|(_, value)| *value)
    }
}

/// The name itself, and what is behind each of its dots.
fn tails(module: &str) -> impl Iterator<Item = &str> {
    let behind = module.match_indices('.').map(|(at, _)| &module[at + 1..]);
    std::iter::once(module).chain(behind)
}

/// What an adapter_config.json says of the numbers.
struct Settings {
    file: String,
    r: u64,
    alpha: f64,
    rslora: bool,
    dora: bool,
    ranks: Patterns<u64>,
    alphas: Patterns<f64>,
    targets: Option<HashSet<String>>,
    base: Option<String>,
}

impl Settings {
    fn parse(file: &str, json: &str) -> Result<Settings> {
        let keys = &Keys::parse(file, json)?.with_hint(HINT_MERGE);
        refuse(keys)?;
        let base = keys.typed("base_model_name_or_path", "a string", Value::as_str)?;
        Ok(Settings {
            file: file.to_string(),
            r: rank(keys, "r", keys.need("r", keys.get("r"))?)?,
            alpha: alpha(keys, "lora_alpha", keys.need("lora_alpha", keys.get("lora_alpha"))?)?,
            rslora: keys.bool_or("use_rslora", false)?,
            dora: keys.bool_or("use_dora", false)?,
            ranks: Patterns::read(keys, "rank_pattern", rank)?,
            alphas: Patterns::read(keys, "alpha_pattern", alpha)?,
            targets: target_modules(keys)?,
            base: base.map(str::to_string),
        })
    }

    fn of(&self, module: &str) -> (u64, f64) {
        let rank = self.ranks.of(module).unwrap_or(self.r);
        (rank, self.alphas.of(module).unwrap_or(self.alpha))
    }

    /// Whether PEFT would look for this module.
    fn is_target(&self, module: &str) -> bool {
        let targets = self.targets.as_ref();
        targets.is_none_or(|names| tails(module).any(|tail| names.contains(tail)))
    }
}

/// Reads an adapter; `config` is the name and the text of its adapter_config.json.
pub fn read(device: &Device, config: (&str, &str), file: &SafeTensors) -> Result<Lora> {
    // At hand, wherever the model is: it moves when it is attached.
    let device = &device.host_device();
    let (config_file, json) = config;
    let settings = Settings::parse(config_file, json)?;
    let mut paths = BTreeSet::new();
    for name in file.names() {
        let path = name.strip_prefix(PREFIX).filter(|_| name.len() <= NAME_BYTES_MAX);
        let path = path.and_then(|name| {
            let half = name.strip_suffix(".lora_A.weight");
            let half = half.or_else(|| name.strip_suffix(".lora_B.weight"));
            half.or_else(|| name.strip_suffix(MAGNITUDE).filter(|_| settings.dora))
        });
        let Some(path) = path else {
            let short: String = name.chars().take(200).collect();
            let problem = format!("tensor `{short}` is not a half of an adapter we know");
            return Err(Error::format(file.file(), problem, HINT));
        };
        if !settings.is_target(path) {
            let problem = format!("no name matches `{path}`, which {} adapts", file.file());
            return Err(Error::config(config_file, "target_modules", problem, HINT));
        }
        paths.insert(path);
    }
    if paths.is_empty() {
        return Err(Error::format(file.file(), "the adapter holds no tensors", HINT));
    }
    let modules = paths.into_iter().map(|path| read_one(device, &settings, file, path));
    let modules = modules.collect::<Result<Vec<_>>>()?;
    Ok(Lora { modules, rslora: settings.rslora, base: settings.base })
}

fn read_one(
    device: &Device,
    settings: &Settings,
    file: &SafeTensors,
    path: &str,
) -> Result<Module> {
    let (rank, alpha) = settings.of(path);
    let half = |half: &str, axis: usize| -> Result<_> {
        let name = format!("{PREFIX}{path}.lora_{half}.weight");
        let Some(shape) = file.shape(&name) else {
            let problem = format!("there is no `{name}`, the other half of `{path}`");
            return Err(Error::format(file.file(), problem, HINT));
        };
        if shape.len() != 2 || shape[axis] as u64 != rank {
            let problem = format!("`{name}` has shape {shape:?}, its rank should be {rank}");
            let hint = "adapter_config.json and the tensors may belong to different adapters";
            return Err(Error::format(file.file(), problem, hint));
        }
        Ok(file.tensor(device, &name)?.expect("it has a shape"))
    };
    let (a, b) = (half("A", 0)?, half("B", 1)?);
    let name = format!("{PREFIX}{path}{MAGNITUDE}");
    let magnitude = if settings.dora { file.tensor(device, &name)? } else { None };
    // Every module has magnitudes, or none.
    if settings.dora && magnitude.is_none() {
        let problem = format!("is true, but {} holds no `{name}`", file.file());
        return Err(Error::config(&settings.file, "use_dora", problem, HINT));
    }
    Ok(Module { param: format!("{path}{WEIGHT}"), a, b, magnitude, alpha })
}

/// A number as people write it: whole ones without a point.
fn number(x: f64) -> Value {
    let whole = x as i64;
    if whole as f64 == x && whole.abs() < 1 << 53 { json!(whole) } else { json!(x) }
}

/// The adapter_config.json of an adapter, and the tensors of its adapter_model.safetensors.
///
/// With the modules of the base model (`lora::modules_of`) `target_modules` holds bare names where
/// all modules of a name are adapted; everything else is named by its full path.
pub fn write<'a>(
    lora: &'a Lora,
    modules_of_model: Option<&[String]>,
) -> Result<(String, Vec<Outgoing<'a>>)> {
    let paths = lora.modules.iter().map(Module::path).collect::<Result<Vec<_>>>()?;
    let r = most_common(lora.modules.iter().map(Module::rank));
    let alpha = most_common(lora.modules.iter().map(|module| module.alpha.to_bits()));
    let (Some(r), Some(alpha)) = (r, alpha.map(f64::from_bits)) else {
        return Err(Error::input("the adapter adapts nothing", "name modules to adapt"));
    };
    let (mut ranks, mut alphas, mut tensors) = (Map::new(), Map::new(), Vec::new());
    for (module, path) in lora.modules.iter().zip(&paths) {
        if module.rank() != r {
            ranks.insert(path.to_string(), json!(module.rank()));
        }
        if module.alpha != alpha {
            alphas.insert(path.to_string(), number(module.alpha));
        }
        let halves = [&module.a, &module.b];
        let named = module.half_names()?.into_iter().zip(halves);
        tensors.extend(named.map(|(name, half)| outgoing(name, half)));
        if let Some(m) = &module.magnitude {
            tensors.push(outgoing(module.magnitude_name()?, m));
        }
    }
    let n_magnitudes = lora.modules.iter().filter(|module| module.magnitude.is_some()).count();
    if ![0, lora.modules.len()].contains(&n_magnitudes) {
        let n = lora.modules.len();
        let problem = format!("{n_magnitudes} of {n} modules have magnitudes (DoRA)");
        return Err(Error::input(problem, "PEFT has them on all modules or on none"));
    }
    let config = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lora.base,
        "revision": null,
        "r": r,
        "lora_alpha": number(alpha),
        "lora_dropout": 0.0,
        "target_modules": targets(&paths, modules_of_model.unwrap_or_default()),
        "bias": "none",
        "fan_in_fan_out": false,
        "use_rslora": lora.rslora,
        "use_dora": n_magnitudes > 0,
        "modules_to_save": null,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "init_lora_weights": true,
        "inference_mode": true,
    });
    Ok((format!("{config:#}\n"), tensors))
}

fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// Names for `target_modules`, which match these modules and no others.
fn targets(paths: &[&str], modules_of_model: &[String]) -> Vec<String> {
    let adapted: HashSet<&str> = paths.iter().copied().collect();
    let mut is_whole: BTreeMap<&str, bool> = BTreeMap::new();
    for module in modules_of_model {
        let all_so_far = is_whole.entry(last(module)).or_insert(true);
        *all_so_far &= adapted.contains(module.as_str());
    }
    let name = |path: &&str| match is_whole.get(last(path)) {
        Some(true) => last(path).to_string(),
        _ => path.to_string(),
    };
    let names: BTreeSet<String> = paths.iter().map(name).collect();
    names.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(more: &str) -> Result<Settings> {
        let json = format!(r#"{{"r": 4, "lora_alpha": 8 {more}}}"#);
        Settings::parse("adapter_config.json", &json)
    }

    #[test]
    fn patterns_match_the_tail_of_a_module_after_a_dot() {
        let c = parse(r#", "rank_pattern": {"down_proj": 16, "0.q": 1, "q": 64}"#).unwrap();
        assert_eq!(c.of("model.layers.1.mlp.down_proj"), (16, 8.0));
        assert_eq!(c.of("model.layers.1.mlp.updown_proj"), (4, 8.0));
        assert_eq!(c.of("x.0.q"), (1, 8.0));
        assert_eq!(c.of("x.10.q"), (64, 8.0));
        // The first in the file counts, whatever the alphabet and the length say.
        let c = parse(r#", "alpha_pattern": {"q": 32, "a.q": 4}"#).unwrap();
        assert_eq!(c.of("a.q"), (4, 32.0));
    }

    #[test]
    fn targets_are_names_of_tails_and_patterns_are_left_to_the_tensors() {
        let c = parse(r#", "target_modules": ["q_proj", "layers.1.mlp.up"]"#).unwrap();
        assert!(c.is_target("model.layers.0.self_attn.q_proj") && c.is_target("q_proj"));
        assert!(c.is_target("model.layers.1.mlp.up") && !c.is_target("model.layers.11.mlp.up"));
        assert!(!c.is_target("model.layers.0.self_attn.eq_proj"));
        for more in ["", r#", "target_modules": "all-linear""#, r#", "target_modules": ".*q""#] {
            assert!(parse(more).unwrap().is_target("anything"), "{more}");
        }
    }

    #[test]
    fn what_cannot_be_honoured_is_refused_by_name() {
        for (more, name) in [
            (r#", "use_dora": 1"#, "use_dora"),
            (r#", "bias": "all""#, "bias"),
            (r#", "modules_to_save": ["lm_head"]"#, "modules_to_save"),
            (r#", "fan_in_fan_out": true"#, "fan_in_fan_out"),
            (r#", "peft_type": "IA3""#, "peft_type"),
            (r#", "init_lora_weights": "pissa""#, "init_lora_weights"),
            (r#", "layer_replication": [[0, 2]]"#, "layer_replication"),
            (r#", "arrow_config": {"top_k": 1}"#, "arrow_config"),
            (r#", "rank_pattern": {"q_proj": 0}"#, "rank_pattern"),
            (r#", "rank_pattern": {"q_proj": -1}"#, "rank_pattern"),
            (r#", "rank_pattern": [4]"#, "rank_pattern"),
            (r#", "alpha_pattern": {"q_proj": "8"}"#, "alpha_pattern"),
            (r#", "alpha_pattern": {"q_proj": 1e300}"#, "alpha_pattern"),
            (r#", "alpha_pattern": {".*q_proj": 2}"#, "alpha_pattern"),
            (r#", "r": 0"#, "`r`"),
            (r#", "r": 1.5"#, "`r`"),
            (r#", "lora_alpha": "NaN""#, "`lora_alpha`"),
            (r#", "lora_alpha": null"#, "`lora_alpha`"),
            (r#", "target_modules": [1]"#, "target_modules"),
            (r#", "target_modules": {}"#, "target_modules"),
        ] {
            let text = parse(more).err().unwrap().report();
            assert!(text.contains(name) && text.contains("hint: "), "{name}: {text}");
        }
    }

    #[test]
    fn a_bare_name_is_a_target_only_where_all_of_that_name_are_adapted() {
        let model = ["a.q", "b.q", "a.v", "b.v", "head"].map(str::to_string);
        assert_eq!(targets(&["a.q", "b.q", "a.v", "head"], &model), ["a.v", "head", "q"]);
        assert_eq!(targets(&["a.q", "b.q"], &[]), ["a.q", "b.q"]);
    }

    #[test]
    fn numbers_are_written_whole_where_they_are() {
        assert_eq!(number(8.0).to_string(), "8");
        assert_eq!(number(-0.5).to_string(), "-0.5");
        assert_eq!(number(1e30).as_f64(), Some(1e30));
    }
}
