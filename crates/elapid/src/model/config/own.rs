//! Our own config: any list of mixers and feed-forwards.
//!
//! ```json
//! {
//!   "model_type": "elapid", "vocab_size": 8192, "d_model": 384,
//!   "layers": ["mamba2", {"mixer": "attention", "feed_forward": "experts"}, "short_conv"],
//!   "feed_forward": "dense",
//!   "attention": {"n_head": 6, "n_kv_head": 2}, "dense": {"d_ff": 1024}
//! }
//! ```
//!
//! `layers` may be the name of a schedule, with `n_layer` beside it: `jamba` has attention at every
//! fourth layer, `zamba` at every sixth, Mamba-2 elsewhere (in `zamba` until there is Mamba-3).
//! A key that is not known is an error: in a file of our own it can only be a slip.

use super::keys::Keys;
use super::*;
use crate::model::mixers::OWN;
use crate::ops::router::Score;
use serde_json::Value;

const KNOWN: &[&str] = &[
    "model_type",
    "vocab_size",
    "d_model",
    "n_ctx",
    "n_layer",
    "layers",
    "feed_forward",
    "tied",
    "eps",
    "init_std",
    "balance_scale",
];

/// Objects with the settings of feed-forwards, and their keys.
const FEED_FORWARDS: &[(&str, &[&str])] = &[
    ("dense", &["d_ff", "activation"]),
    ("experts", &["n_expert", "n_used", "d_ff", "d_shared", "activation"]),
];

/// Refuses keys that nobody reads.
pub(super) fn check(keys: &Keys) -> Result<()> {
    let mixers = OWN.iter().map(|own| (own.name, own.keys));
    let parts: Vec<_> = mixers.chain(FEED_FORWARDS.iter().copied()).collect();
    let known: Vec<&str> = KNOWN.iter().copied().chain(parts.iter().map(|part| part.0)).collect();
    keys.only(&known)?;
    // Used or not: a slip in a part that no layer has is still a slip.
    parts.into_iter().try_for_each(|(name, known)| part(keys, name)?.only(known))
}

fn wrong_layers(keys: &Keys) -> Error {
    keys.wrong("layers", "is not a schedule (jamba, zamba) or a list of mixers")
}

/// How many layers there are.
pub(super) fn n_layer(keys: &Keys) -> Result<usize> {
    match keys.get("layers") {
        Some(Value::String(name)) if name == "jamba" || name == "zamba" => keys.size("n_layer"),
        Some(Value::Array(list)) if !keys.has("n_layer") => Ok(list.len()),
        Some(Value::Array(_)) => {
            Err(keys.wrong("n_layer", "goes with a schedule, not with a list"))
        }
        _ => Err(wrong_layers(keys)),
    }
}

/// Names of the mixer and of the feed-forward of layer `idx`.
fn kinds(keys: &Keys, idx: usize) -> Result<[String; 2]> {
    let default = keys.str_or("feed_forward", "dense")?;
    match keys.get("layers") {
        Some(Value::String(name)) => {
            let period = if name == "jamba" { 4 } else { 6 };
            let mixer = if idx % period == period - 1 { "attention" } else { "mamba2" };
            Ok([mixer.into(), default.into()])
        }
        Some(list) => match &list[idx] {
            Value::String(mixer) => Ok([mixer.clone(), default.into()]),
            Value::Object(map) => {
                let layer = keys.nested("layers", map.clone());
                layer.only(&["mixer", "feed_forward"])?;
                let feed_forward = layer.str_or("feed_forward", default)?;
                Ok([layer.str("mixer")?.into(), feed_forward.into()])
            }
            _ => Err(wrong_layers(keys)),
        },
        None => Err(wrong_layers(keys)),
    }
}

/// The settings of one kind: an absent object is all defaults.
fn part(keys: &Keys, name: &str) -> Result<Keys> {
    Ok(match keys.object(name)? {
        Some(part) => part,
        None => keys.nested(name, serde_json::Map::new()),
    })
}

pub(super) fn mixer(keys: &Keys, idx: usize, at: &str, config: &Config) -> Result<MixerConfig> {
    let [kind, _] = kinds(keys, idx)?;
    match OWN.iter().find(|own| own.name == kind) {
        Some(own) => (own.read)(&part(keys, &kind)?, format!("{at}.mixer"), config),
        None => {
            let known: Vec<&str> = OWN.iter().map(|own| own.name).collect();
            let problem = format!("holds a mixer \"{kind}\"; known are {}", known.join(", "));
            Err(keys.wrong("layers", problem))
        }
    }
}

/// The activation, and whether a second matrix gates it.
fn activation(part: &Keys) -> Result<(Kind, bool)> {
    Ok(match part.str_or("activation", "swiglu")? {
        "swiglu" => (Kind::Silu, true),
        "geglu" => (Kind::Gelu, true),
        "reglu" => (Kind::Relu, true),
        "gelu" => (Kind::Gelu, false),
        "relu" => (Kind::Relu, false),
        other => {
            let problem = format!("is \"{other}\"; known are swiglu, geglu, reglu, gelu, relu");
            return Err(part.wrong("activation", problem));
        }
    })
}

fn dense(prefix: String, d_ff: usize, activation: (Kind, bool)) -> DenseConfig {
    DenseConfig {
        prefix,
        d_ff,
        activation: activation.0,
        form: match activation.1 {
            true => DenseForm::Gated(["gate", "up", "down"]),
            false => DenseForm::Plain(["up", "down"]),
        },
        bias: false,
        gate_scale: 1.0,
        out_scale: 1.0,
    }
}

pub(super) fn feed_forward(keys: &Keys, idx: usize, at: &str) -> Result<FeedForwardConfig> {
    let [_, kind] = kinds(keys, idx)?;
    let (prefix, d_model) = (format!("{at}.feed_forward"), keys.size("d_model")?);
    // Two thirds of four times the width, on a multiple of 64: as many weights as an ungated one.
    let usual = (d_model * 8 / 3).next_multiple_of(64);
    Ok(match kind.as_str() {
        "none" => FeedForwardConfig::None,
        "dense" => {
            let part = part(keys, &kind)?;
            let d_ff = part.size_or("d_ff", usual)?;
            FeedForwardConfig::Dense(dense(prefix, d_ff, activation(&part)?))
        }
        "experts" => {
            let part = part(keys, &kind)?;
            let activation = activation(&part)?;
            if !activation.1 {
                return Err(part.wrong("activation", "experts are gated: swiglu, geglu or reglu"));
            }
            let d_shared = part.size_or("d_shared", usual / 2)?;
            let shared =
                (d_shared > 0).then(|| dense(format!("{prefix}.shared"), d_shared, activation));
            FeedForwardConfig::Experts(ExpertsConfig {
                n_expert: part.size_or("n_expert", 8)?,
                d_ff: part.size_or("d_ff", usual / 2)?,
                activation: activation.0,
                router: Router {
                    n_used: part.size_or("n_used", 2)?,
                    score: Score::SoftmaxOfChosen,
                    normalise: false,
                    scale: 1.0,
                    n_group: 1,
                    n_group_used: 1,
                },
                router_name: format!("{prefix}.router.weight"),
                choice_bias: None,
                form: ExpertForm::Each(["gate", "up", "down"]),
                shared,
                shared_gate: None,
                prefix,
            })
        }
        other => {
            let problem = format!("\"{other}\" is unknown; known are none, dense, experts");
            return Err(keys.wrong("feed_forward", problem));
        }
    })
}
