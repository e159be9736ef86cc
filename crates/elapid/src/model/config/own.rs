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
//! fourth layer and Mamba-2 elsewhere, `zamba` attention at every sixth and Mamba-3 elsewhere.
//! A key that is not known is an error: in a file of our own it can only be a slip.

use super::keys::Keys;
use super::*;
use crate::model::mixers::OWN;
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
    "bos_token_id",
    "eos_token_id",
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
pub(super) fn kinds(keys: &Keys, idx: usize) -> Result<[String; 2]> {
    let default = keys.str_or("feed_forward", "dense")?;
    match keys.get("layers") {
        Some(Value::String(name)) => {
            let (period, other) = if name == "jamba" { (4, "mamba2") } else { (6, "mamba3") };
            let mixer = if idx % period == period - 1 { "attention" } else { other };
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

/// The feed-forward of layer `idx`: `none`, `dense` or `experts`.
pub(super) fn feed_forward(keys: &Keys, idx: usize) -> Result<String> {
    let [_, kind] = kinds(keys, idx)?;
    if !["none", "dense", "experts"].contains(&kind.as_str()) {
        let problem = format!("\"{kind}\" is unknown; known are none, dense, experts");
        return Err(keys.wrong("feed_forward", problem));
    }
    Ok(kind)
}

/// The activation of a feed-forward, and whether a second matrix gates it.
pub(super) fn activation(keys: &Keys, part: &str) -> Result<(Kind, bool)> {
    let key = format!("{part}.activation");
    let (kind, is_gated) = match keys.str_or(&key, "swiglu")? {
        "swiglu" => (Kind::Silu, true),
        "geglu" => (Kind::Gelu, true),
        "reglu" => (Kind::Relu, true),
        "gelu" => (Kind::Gelu, false),
        "relu" => (Kind::Relu, false),
        other => {
            let problem = format!("is \"{other}\"; known are swiglu, geglu, reglu, gelu, relu");
            return Err(keys.wrong(&key, problem));
        }
    };
    match is_gated || part == "dense" {
        true => Ok((kind, is_gated)),
        false => Err(keys.wrong(&key, "experts are gated: swiglu, geglu or reglu")),
    }
}

/// The inner width of a feed-forward that does not say it.
pub(super) fn d_ff(keys: &Keys, key: &str) -> Result<usize> {
    // Two thirds of four times the width, on a multiple of 64: as many weights as an ungated one.
    let usual = (keys.size("d_model")? * 8 / 3).next_multiple_of(64);
    Ok(if key == "dense.d_ff" { usual } else { usual / 2 })
}
