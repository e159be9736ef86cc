//! Experts of the families that have them: names, sizes, and how each chooses.

use super::families::{LLAMA_FF, Reader};
use super::*;
use crate::ops::router::Score;

impl Reader<'_> {
    /// Experts by the most common rules: softmax over all, weights as they are or normalised.
    pub(super) fn experts(
        &self,
        prefix: String,
        n_expert: usize,
        n_used: usize,
    ) -> Result<ExpertsConfig> {
        let keys = self.keys;
        Ok(ExpertsConfig {
            router_name: format!("{prefix}.gate.weight"),
            prefix,
            n_expert,
            d_ff: 0,
            activation: self.activation()?,
            router: Router {
                n_used,
                score: Score::Softmax,
                normalise: keys.bool_or("norm_topk_prob", false)?,
                scale: 1.0,
                n_group: 1,
                n_group_used: 1,
            },
            choice_bias: None,
            form: ExpertForm::Each(LLAMA_FF),
            shared: None,
            shared_gate: None,
        })
    }

    pub(super) fn mixtral_experts(&self, at: &str) -> Result<ExpertsConfig> {
        let prefix = format!("{at}.block_sparse_moe");
        let n_expert = self.keys.size_or("num_local_experts", 8)?;
        let n_used = self.keys.size_or("num_experts_per_tok", 2)?;
        let mut experts = self.experts(prefix, n_expert, n_used)?;
        experts.d_ff = self.keys.size("intermediate_size")?;
        experts.router.normalise = true;
        experts.form = ExpertForm::Each(["w1", "w3", "w2"]);
        Ok(experts)
    }

    pub(super) fn qwen2_experts(&self, at: &str, n_expert: usize) -> Result<ExpertsConfig> {
        let keys = self.keys;
        let prefix = format!("{at}.mlp");
        let d_shared = keys.size("shared_expert_intermediate_size")?;
        let shared = self.dense(format!("{prefix}.shared_expert"), d_shared, false)?;
        Ok(ExpertsConfig {
            d_ff: keys.size("moe_intermediate_size")?,
            shared: Some(shared),
            shared_gate: Some(format!("{prefix}.shared_expert_gate.weight")),
            ..self.experts(prefix, n_expert, keys.size_or("num_experts_per_tok", 4)?)?
        })
    }

    pub(super) fn dots1_experts(&self, at: &str) -> Result<ExpertsConfig> {
        let keys = self.keys;
        let prefix = format!("{at}.mlp");
        let d_ff = keys.size("moe_intermediate_size")?;
        let shared = match keys.size_opt("n_shared_experts")? {
            Some(n) if n > 0 => Some(self.dense(
                format!("{prefix}.shared_experts"),
                d_ff.saturating_mul(n),
                false,
            )?),
            _ => None,
        };
        let choice_bias = Some(format!("{prefix}.gate.e_score_correction_bias"));
        // The class has no defaults for these two.
        let (n_expert, n_used) =
            (keys.size("n_routed_experts")?, keys.size("num_experts_per_tok")?);
        let experts = self.experts(prefix, n_expert, n_used)?;
        let router = Router {
            score: Score::Sigmoid,
            scale: keys.float_or("routed_scaling_factor", 1.0)?,
            n_group: keys.size_or("n_group", 1)?,
            n_group_used: keys.size_or("topk_group", 1)?,
            ..experts.router
        };
        Ok(ExpertsConfig { d_ff, router, shared, choice_bias, ..experts })
    }

    pub(super) fn granite_feed_forward(&self, at: &str) -> Result<FeedForwardConfig> {
        let keys = self.keys;
        let d_shared = keys.size_or("shared_intermediate_size", 1024)?;
        let shared = DenseConfig {
            form: DenseForm::Fused(["input_linear", "output_linear"]),
            ..self.dense(format!("{at}.shared_mlp"), d_shared, false)?
        };
        let n_expert = keys.size_or("num_local_experts", 8)?;
        if n_expert == 0 {
            return Ok(FeedForwardConfig::Dense(shared));
        }
        let prefix = format!("{at}.block_sparse_moe");
        let router_name = format!("{prefix}.router.layer.weight");
        let base = self.experts(prefix, n_expert, keys.size_or("num_experts_per_tok", 2)?)?;
        Ok(FeedForwardConfig::Experts(ExpertsConfig {
            d_ff: keys.size("intermediate_size")?,
            router: Router { score: Score::SoftmaxOfChosen, normalise: false, ..base.router },
            router_name,
            form: ExpertForm::Stacked(["input_linear", "output_linear"]),
            shared: Some(shared),
            ..base
        }))
    }
}
