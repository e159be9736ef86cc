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

/// Reads our own config.
pub(super) fn config(keys: &Keys) -> Result<Config> {
    let mixers = OWN.iter().map(|own| (own.name, own.keys));
    let parts: Vec<_> = mixers.chain(FEED_FORWARDS.iter().copied()).collect();
    let known: Vec<&str> = KNOWN.iter().copied().chain(parts.iter().map(|part| part.0)).collect();
    keys.only(&known)?;
    // Used or not: a slip in a part that no layer has is still a slip.
    for (name, known) in parts {
        part(keys, name)?.only(known)?;
    }
    let d_model = keys.size("d_model")?;
    let eps = keys.float_or("eps", 1e-5)?;
    let mut config = Config {
        family: Family::Elapid,
        n_vocab: keys.size("vocab_size")?,
        d_model,
        n_ctx: keys.size_opt("n_ctx")?,
        layers: Vec::new(),
        tied: keys.bool_or("tied", true)?,
        eps,
        embed_scale: 1.0,
        logit_scale: 1.0,
        balance_scale: keys.float_or("balance_scale", 0.01)?,
        init_std: keys.float_or("init_std", 0.02)?,
        embed_name: "embed.weight".into(),
        norm_name: "norm.weight".into(),
    };
    let default = keys.str_or("feed_forward", "dense")?;
    for (idx, (mixer, feed_forward)) in schedule(keys)?.into_iter().enumerate() {
        let at = format!("layers.{idx}");
        let feed_forward = feed_forward.as_deref().unwrap_or(default);
        config.layers.push(LayerConfig {
            mixer_norm: format!("{at}.mixer_norm.weight"),
            mixer: self::mixer(keys, &mixer, format!("{at}.mixer"), &config)?,
            feed_forward_norm: format!("{at}.feed_forward_norm.weight"),
            feed_forward: self::feed_forward(keys, feed_forward, format!("{at}.feed_forward"))?,
            eps,
            residual_scale: 1.0,
        });
    }
    Ok(config)
}

/// The mixer of each layer, and its feed-forward where it has one of its own.
fn schedule(keys: &Keys) -> Result<Vec<(String, Option<String>)>> {
    let every = |n: usize| -> Result<Vec<_>> {
        let n_layer = keys.size("n_layer")?;
        if n_layer > check::N_LAYER_MAX {
            return Err(keys.wrong("n_layer", format!("{n_layer} is out of range")));
        }
        let kind = |idx: usize| if idx % n == n - 1 { "attention" } else { "mamba2" };
        Ok((0..n_layer).map(|idx| (kind(idx).to_string(), None)).collect())
    };
    let wrong = || {
        let wanted = "a schedule (jamba, zamba) or a list of mixers";
        keys.wrong("layers", format!("is not {wanted}"))
    };
    match keys.get("layers") {
        Some(Value::String(name)) if name == "jamba" => every(4),
        Some(Value::String(name)) if name == "zamba" => every(6),
        Some(Value::Array(list)) if !keys.has("n_layer") => list
            .iter()
            .map(|item| match item {
                Value::String(mixer) => Ok((mixer.clone(), None)),
                Value::Object(map) => {
                    let layer = keys.nested("layers", map.clone());
                    layer.only(&["mixer", "feed_forward"])?;
                    let feed_forward = match layer.has("feed_forward") {
                        true => Some(layer.str("feed_forward")?.to_string()),
                        false => None,
                    };
                    Ok((layer.str("mixer")?.to_string(), feed_forward))
                }
                _ => Err(wrong()),
            })
            .collect(),
        Some(Value::Array(_)) => {
            Err(keys.wrong("n_layer", "goes with a schedule, not with a list"))
        }
        _ => Err(wrong()),
    }
}

/// The settings of one kind: an absent object is all defaults.
fn part(keys: &Keys, name: &str) -> Result<Keys> {
    Ok(match keys.object(name)? {
        Some(part) => part,
        None => keys.nested(name, serde_json::Map::new()),
    })
}

fn mixer(keys: &Keys, kind: &str, prefix: String, config: &Config) -> Result<MixerConfig> {
    match OWN.iter().find(|own| own.name == kind) {
        Some(own) => (own.read)(&part(keys, kind)?, prefix, config),
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

fn feed_forward(keys: &Keys, kind: &str, prefix: String) -> Result<FeedForwardConfig> {
    let d_model = keys.size("d_model")?;
    // Two thirds of four times the width, on a multiple of 64: as many weights as an ungated one.
    let usual = (d_model * 8 / 3).next_multiple_of(64);
    Ok(match kind {
        "none" => FeedForwardConfig::None,
        "dense" => {
            let part = part(keys, kind)?;
            let d_ff = part.size_or("d_ff", usual)?;
            FeedForwardConfig::Dense(dense(prefix, d_ff, activation(&part)?))
        }
        "experts" => {
            let part = part(keys, kind)?;
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
