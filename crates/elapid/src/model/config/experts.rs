//! Experts of the families that have them: names, sizes, and how each chooses.

use super::families::Reader;
use super::family::{ExpertLayers, Experts, Shared};
use super::*;

impl Reader<'_> {
    pub(super) fn has_experts(&self, idx: usize, layers: &ExpertLayers) -> Result<bool> {
        let keys = self.keys;
        Ok(match layers {
            ExpertLayers::All => true,
            ExpertLayers::Own => own::feed_forward(keys, idx)? == "experts",
            ExpertLayers::Any => keys.size("experts.n_expert")? > 0,
            ExpertLayers::Sparse => {
                let only_dense = keys.sizes("mlp_only_layers")?.unwrap_or_default();
                let every = keys.size_or("decoder_sparse_step", 1)?.max(1);
                let is_sparse = !only_dense.contains(&idx) && (idx + 1).is_multiple_of(every);
                keys.size("experts.n_expert")? > 0 && is_sparse
            }
            ExpertLayers::AfterDense => idx >= keys.size_or("first_k_dense_replace", 0)?,
            ExpertLayers::Periodic => {
                let is_marked = self.is_periodic(idx, "expert", [2, 1])?;
                is_marked && keys.size("experts.n_expert")? > 1
            }
        })
    }

    pub(super) fn experts(&self, at: &str, facts: &Experts) -> Result<ExpertsConfig> {
        let keys = self.keys;
        let prefix = format!("{at}.{}", facts.prefix);
        let d_ff = self.width("experts.d_ff")?;
        let shared = match facts.shared {
            Shared::None => None,
            Shared::Gated(name) | Shared::Plain(name) => {
                Some((name, keys.size("experts.d_shared")?))
            }
            Shared::Maybe(name) => {
                Some((name, self.width("experts.d_shared")?)).filter(|it| it.1 > 0)
            }
            Shared::Multiple(name) => {
                let n = keys.size_opt("experts.d_shared")?.filter(|&n| n > 0);
                n.map(|n| (name, d_ff.saturating_mul(n)))
            }
        };
        let dense = |(name, d_ff)| self.dense(format!("{at}.{name}"), d_ff, "experts");
        Ok(ExpertsConfig {
            router_name: format!("{prefix}.{}.weight", facts.router),
            choice_bias: facts.choice_bias.map(|name| format!("{prefix}.{name}")),
            prefix,
            n_expert: keys.size("experts.n_expert")?,
            d_ff,
            activation: self.activation("experts")?.0,
            router: Router {
                n_used: keys.size("experts.n_used")?,
                score: facts.score,
                normalise: match facts.normalise {
                    Some(normalise) => normalise,
                    None => keys.bool_or("norm_topk_prob", false)?,
                },
                scale: keys.float_or("experts.scale", 1.0)?,
                n_group: keys.size_or("experts.n_group", 1)?,
                n_group_used: keys.size_or("experts.n_group_used", 1)?,
            },
            form: facts.form.clone(),
            shared: shared.map(dense).transpose()?,
            shared_gate: match facts.shared {
                Shared::Gated(name) => Some(format!("{at}.{name}_gate.weight")),
                _ => None,
            },
        })
    }
}
