//! Collects what the layers of a model declare: their parameters, and the state they keep.

use crate::model::config::{Config, FreshKind};
use crate::model::place::Part;
use crate::model::state::{Slot, SlotId};
use crate::model::weights::{Init, LinearIds, ParamId, Role, Spec};
use crate::ops::rope::{Rope, RopeTable};

/// The parameters and the window of a causal convolution.
pub(crate) struct ConvIds {
    pub w: ParamId,
    pub bias: Option<ParamId>,
    pub window: SlotId,
}

pub(crate) struct Builder {
    pub specs: Vec<Spec>,
    pub slots: Vec<Slot>,
    /// How a fresh matrix is drawn.
    pub std: Fresh,
    /// The same of a matrix that writes to the residual stream: smaller the more there are.
    pub out_std: Fresh,
    /// Both as torch's `Linear` draws them.
    pub torch: [Fresh; 2],
    ropes: Vec<(Rope, RopeTable)>,
}

#[derive(Clone, Copy)]
pub(crate) enum Fresh {
    /// Of this deviation.
    Normal(f32),
    /// Uniform within the inverse root of the inputs, times this.
    Uniform(f32),
}

impl Fresh {
    pub fn init(self, d_in: usize) -> Init {
        match self {
            Fresh::Normal(std) => Init::Normal(std),
            Fresh::Uniform(factor) => Init::Uniform(factor / (d_in as f32).sqrt()),
        }
    }
}

impl Builder {
    pub fn new(config: &Config) -> Builder {
        let n_branches: usize = config.layers.iter().map(|layer| layer.n_branches()).sum();
        let root = |n: usize| (n.max(1) as f32).sqrt();
        // As mamba_ssm draws them, whose layers count once even with a feed-forward.
        let torch = [1.0, 1.0 / root(config.layers.len())].map(Fresh::Uniform);
        let [std, out_std] = match config.fresh {
            FreshKind::Normal => {
                [config.init_std, config.init_std / root(n_branches)].map(Fresh::Normal)
            }
            FreshKind::Torch => torch,
        };
        let (specs, slots, ropes) = (Vec::new(), Vec::new(), Vec::new());
        Builder { specs, slots, std, out_std, torch, ropes }
    }

    pub fn add(&mut self, name: String, shape: &[usize], init: Init, role: Role) -> ParamId {
        let stored = Part { name: name.clone(), shape: shape.to_vec(), rows: None };
        let (shape, expert) = (shape.to_vec(), None);
        self.specs.push(Spec { name, shape, stored, init, role, expert });
        ParamId(self.specs.len() - 1)
    }

    /// Declares state that every sequence carries.
    pub fn slot(&mut self, slot: Slot) -> SlotId {
        self.slots.push(slot);
        SlotId(self.slots.len() - 1)
    }

    pub fn norm(&mut self, name: String, d: usize) -> ParamId {
        self.add(name, &[d], Init::Constant(1.0), Role::Vector)
    }

    pub fn vector(&mut self, name: String, shape: &[usize], init: Init) -> ParamId {
        self.add(name, shape, init, Role::Vector)
    }

    /// `{name}.weight` and perhaps `{name}.bias`.
    pub fn linear(&mut self, name: String, shape: [usize; 2], std: Fresh, bias: bool) -> LinearIds {
        let init = std.init(shape[1]);
        let weight = self.add(format!("{name}.weight"), &shape, init, Role::Matrix);
        let bias =
            bias.then(|| self.vector(format!("{name}.bias"), &shape[..1], Init::Constant(0.0)));
        LinearIds { weight, bias }
    }

    /// A depthwise convolution; its weight is stored with an axis of one in the middle.
    pub fn conv(&mut self, prefix: &str, channels: usize, d_conv: usize, bias: bool) -> ConvIds {
        let bound = (d_conv as f32).powf(-0.5);
        let name = format!("{prefix}.conv1d");
        let w = self.vector(format!("{name}.weight"), &[channels, d_conv], Init::Uniform(bound));
        self.specs[w.0].stored.shape = vec![channels, 1, d_conv];
        let bias =
            bias.then(|| self.vector(format!("{name}.bias"), &[channels], Init::Uniform(bound)));
        ConvIds { w, bias, window: self.slot(Slot::Recurrent(vec![d_conv - 1, channels])) }
    }

    /// The cosines and sines of a rotary embedding: one table for all layers that have the same.
    pub fn rope(&mut self, rope: &Rope) -> RopeTable {
        if let Some((_, table)) = self.ropes.iter().find(|(known, _)| known == rope) {
            return table.clone();
        }
        let table = rope.table();
        self.ropes.push((rope.clone(), table.clone()));
        table
    }

    /// Rows of a larger stored tensor.
    pub fn part(
        &mut self,
        stored: &str,
        stored_shape: [usize; 3],
        first: usize,
        shape: [usize; 2],
        std: Fresh,
    ) -> LinearIds {
        let rows = first..first + shape[0];
        let name = format!("{stored}[{}..{}]", rows.start, rows.end);
        let weight = self.add(name, &shape, std.init(shape[1]), Role::Matrix);
        let (name, shape) = (stored.into(), stored_shape.to_vec());
        self.specs[weight.0].stored = Part { name, shape, rows: Some(rows) };
        LinearIds { weight, bias: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::rope::RopeScaling;

    #[test]
    fn layers_with_the_same_rope_share_a_table() {
        let config =
            r#"{"model_type": "elapid", "vocab_size": 1, "d_model": 1, "layers": ["short_conv"]}"#;
        let mut builder = Builder::new(&Config::from_json("config", config).unwrap());
        let rope = |base: f64| Rope { base, d_rotary: 8, scaling: RopeScaling::None };
        let tables = [1e4, 5e5, 1e4].map(|base| builder.rope(&rope(base)));
        let places = tables.each_ref().map(|table| table.frequencies().as_ptr());
        assert_eq!(places[0], places[2]);
        assert_ne!(places[0], places[1]);
    }
}
