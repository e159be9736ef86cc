//! The config of mamba_ssm (`MambaConfig`), which the checkpoints of its authors carry.
//!
//! ```json
//! {
//!   "d_model": 768, "d_intermediate": 1536, "n_layer": 12, "vocab_size": 128256,
//!   "ssm_cfg": {"layer": "Mamba3", "d_state": 128}, "attn_layer_idx": [], "attn_cfg": {},
//!   "rms_norm": true, "pad_vocab_size_multiple": 16, "tie_embeddings": true
//! }
//! ```
//!
//! It has no `model_type`: `ssm_cfg` tells it from others. `family.rs` has its keys.

use super::keys::Keys;
use super::*;

/// Options of blocks, and of attention, that change the mathematics, with what each must be.
const BLOCK: &[(&str, bool)] = &[("D_has_hdim", false)];
const ATTENTION: &[(&str, bool)] = &[("causal", true), ("rotary_emb_interleaved", false)];

/// Refuses what would be computed otherwise.
pub(super) fn check(keys: &Keys) -> Result<()> {
    expect(keys, "rms_norm", true, true)?;
    let none = |name: &str| keys.nested(name, serde_json::Map::new());
    let part = |name: &str| Ok(keys.object(name)?.unwrap_or_else(|| none(name)));
    let block = part("ssm_cfg")?;
    BLOCK.iter().try_for_each(|&(key, want)| expect(&block, key, want, want))?;
    if block.has("d_ssm") {
        return Err(block.wrong("d_ssm", "narrower state spaces are not supported"));
    }
    let attention: Keys = part("attn_cfg")?;
    let listed = keys.sizes("attn_layer_indices")?.unwrap_or_default();
    if listed.is_empty() {
        return Ok(());
    }
    // Absent means not causal.
    ATTENTION.iter().try_for_each(|&(key, want)| expect(&attention, key, false, want))?;
    for key in ["mlp_dim", "d_conv"] {
        if attention.size_or(key, 0)? > 0 {
            return Err(attention.wrong(key, "is not 0, which is not supported"));
        }
    }
    Ok(())
}

fn expect(keys: &Keys, key: &str, default: bool, want: bool) -> Result<()> {
    match keys.bool_or(key, default)? == want {
        true => Ok(()),
        false => Err(keys.wrong(key, format!("is not {want}, which is not supported"))),
    }
}

/// Our name of the mixer of layer `idx`.
pub(super) fn kind(keys: &Keys, idx: usize) -> Result<&'static str> {
    if keys.sizes("attn_layer_indices")?.unwrap_or_default().contains(&idx) {
        return Ok("attention");
    }
    match keys.str_or("ssm_cfg.layer", "Mamba1")? {
        "Mamba1" => Ok("mamba1"),
        "Mamba2" => Ok("mamba2"),
        "Mamba3" => Ok("mamba3"),
        other => {
            let problem = format!("is \"{other}\"; known are Mamba1, Mamba2, Mamba3");
            Err(keys.wrong("ssm_cfg.layer", problem))
        }
    }
}
