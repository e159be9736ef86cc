//! Collects what the layers of a model declare: their parameters, and the state they keep.

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
    /// Standard deviation of a fresh matrix.
    pub std: f32,
    /// The same of a matrix that writes to the residual stream: smaller the more there are.
    pub out_std: f32,
    ropes: Vec<(Rope, RopeTable)>,
}

impl Builder {
    /// For a model whose layers add `n_branches` times to the residual stream.
    pub fn new(std: f32, n_branches: usize) -> Builder {
        let out_std = std / (n_branches.max(1) as f32).sqrt();
        Builder { specs: Vec::new(), slots: Vec::new(), std, out_std, ropes: Vec::new() }
    }

    pub fn add(&mut self, name: String, shape: &[usize], init: Init, role: Role) -> ParamId {
        let stored = Part { name: name.clone(), shape: shape.to_vec(), rows: None };
        self.specs.push(Spec { name, shape: shape.to_vec(), stored, init, role });
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
    pub fn linear(&mut self, name: String, shape: [usize; 2], std: f32, bias: bool) -> LinearIds {
        let init = Init::Normal(std);
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
        std: f32,
    ) -> LinearIds {
        let rows = first..first + shape[0];
        let name = format!("{stored}[{}..{}]", rows.start, rows.end);
        let weight = self.add(name, &shape, Init::Normal(std), Role::Matrix);
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
        let mut builder = Builder::new(0.02, 1);
        let rope = |base: f64| Rope { base, d_rotary: 8, scaling: RopeScaling::None };
        let tables = [1e4, 5e5, 1e4].map(|base| builder.rope(&rope(base)));
        let places = tables.each_ref().map(|table| table.frequencies().as_ptr());
        assert_eq!(places[0], places[2]);
        assert_ne!(places[0], places[1]);
    }
}
