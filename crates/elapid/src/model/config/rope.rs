//! Rotary positions of the families that have them, in both spellings.

use super::families::Reader;
use super::keys::Keys;
use super::*;
use crate::ops::rope::RopeScaling;

impl Reader<'_> {
    /// Transformers 4 has `rope_theta` and `rope_scaling`, transformers 5 `rope_parameters`.
    pub(super) fn rope(&self, d_head: usize) -> Result<Option<Rope>> {
        let keys = self.keys;
        let default = if self.facts.has_rope { "rope" } else { "nope" };
        let d_rotary = keys.size_opt("attention.d_rotary")?;
        if d_rotary == Some(0) || keys.str_or("attention.position", default)? != "rope" {
            return Ok(None);
        }
        let parameters = keys.object("rope_parameters")?;
        let old = keys.object("rope_scaling")?;
        let scaling = parameters.as_ref().or(old.as_ref());
        let from = |key: &str, own: &str| -> Result<Option<f64>> {
            match parameters.as_ref().map(|p| p.float_opt(key)).transpose()?.flatten() {
                Some(value) => Ok(Some(value)),
                None => keys.float_opt(own),
            }
        };
        let base = from("rope_theta", "attention.rope_base")?.unwrap_or(1e4);
        let partial = from("partial_rotary_factor", "partial_rotary_factor")?.unwrap_or(1.0);
        let scaling = match scaling {
            Some(scaling) => self.rope_scaling(scaling)?,
            None => RopeScaling::None,
        };
        let d_rotary = d_rotary.unwrap_or((d_head as f64 * partial) as usize);
        if let RopeScaling::Factors(factors) = &scaling
            && factors.len() != d_rotary / 2
        {
            let problem = format!("holds {} numbers for {} pairs", factors.len(), d_rotary / 2);
            return Err(keys.wrong("rope_scaling.factors", problem));
        }
        Ok(Some(Rope { base, d_rotary, scaling }))
    }

    fn rope_scaling(&self, keys: &Keys) -> Result<RopeScaling> {
        let kind = if keys.has("rope_type") {
            keys.str("rope_type")?
        } else {
            keys.str_or("type", "default")?
        };
        let above_0 = |key: &str, value: f64| match value.is_finite() && value > 0.0 {
            true => Ok(value),
            false => Err(keys.wrong(key, format!("is {value}, not a finite number above 0"))),
        };
        let need = |key: &str| -> Result<f64> {
            above_0(key, keys.float_opt(key)?.ok_or_else(|| keys.wrong(key, "is missing"))?)
        };
        let or = |key: &str, default: f64| above_0(key, keys.float_opt(key)?.unwrap_or(default));
        let optional = |key: &str| match keys.float_opt(key)? {
            Some(value) if !value.is_finite() => {
                Err(keys.wrong(key, format!("is {value}, not finite")))
            }
            value => Ok(value),
        };
        let n_ctx_orig = || -> Result<usize> {
            const KEY: &str = "original_max_position_embeddings";
            let found = keys.size_opt(KEY)?.or(self.keys.size_opt(KEY)?);
            let found = found.or(self.keys.size_opt("max_position_embeddings")?);
            found.filter(|&n_ctx| n_ctx > 0).ok_or_else(|| keys.wrong(KEY, "is missing or 0"))
        };
        let scaling = match kind {
            "default" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: need("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq: need("low_freq_factor")?,
                high_freq: need("high_freq_factor")?,
                n_ctx_orig: n_ctx_orig()?,
            },
            "yarn" => RopeScaling::Yarn {
                factor: need("factor")?,
                n_ctx_orig: n_ctx_orig()?,
                beta_fast: or("beta_fast", 32.0)?,
                beta_slow: or("beta_slow", 1.0)?,
                attention_factor: optional("attention_factor")?,
                mscale: optional("mscale")?,
                mscale_all_dim: optional("mscale_all_dim")?,
                truncate: keys.bool_or("truncate", true)?,
            },
            // Ours alone: factors that a GGUF file gives and no rule explains.
            "factors" => {
                let factors = keys.floats("factors")?.unwrap_or_default();
                if let Some(bad) = factors.iter().find(|x| !(x.is_finite() && **x > 0.0)) {
                    return Err(keys.wrong("factors", format!("holds {bad}")));
                }
                RopeScaling::Factors(factors)
            }
            other => {
                let problem = format!("is \"{other}\"; known are default, linear, llama3, yarn");
                return Err(keys.wrong("rope_type", problem));
            }
        };
        if let RopeScaling::Llama3 { low_freq, high_freq, .. } = scaling
            && low_freq >= high_freq
        {
            let problem = format!("is {high_freq}, not above low_freq_factor, {low_freq}");
            return Err(keys.wrong("high_freq_factor", problem));
        }
        Ok(scaling)
    }
}
