//! One forward pass, as the layers see it.

use crate::model::builder::ConvIds;
use crate::model::state::{States, tensors};
use crate::model::weights::{LinearIds, ParamId, Weights};
use crate::ops::conv::{Activation, Conv, causal_conv};
use crate::ops::linear::{Linear, linear, linear_each, linear_split};
use crate::tape::{Tape, Var};
use crate::tensor::segment::Segments;

pub(crate) struct Pass<'t, 'w> {
    pub tape: &'t Tape<'w>,
    pub weights: &'w Weights,
    pub segments: &'t Segments,
    /// Whether experts report their load balance.
    pub wants_balance: bool,
}

impl Pass<'_, '_> {
    pub fn var(&self, id: ParamId) -> Var {
        self.weights.var(self.tape, id)
    }

    pub fn linear(&self, x: &Var, ids: &LinearIds) -> Var {
        linear(self.tape, x, &self.weights.linear(self.tape, ids))
    }

    pub fn each<const N: usize>(&self, x: &Var, ids: [&LinearIds; N]) -> [Var; N] {
        let linears: Vec<Linear> =
            ids.iter().map(|ids| self.weights.linear(self.tape, ids)).collect();
        let list = linear_each(self.tape, x, &linears);
        list.try_into().unwrap_or_else(|_| panic!("as many results as maps"))
    }

    /// One map whose result is cut into columns of these widths.
    pub fn split<const N: usize>(&self, x: &Var, ids: &LinearIds, widths: [usize; N]) -> [Var; N] {
        let list = linear_split(self.tape, x, &self.weights.linear(self.tape, ids), &widths);
        list.try_into().unwrap_or_else(|_| panic!("as many results as widths"))
    }

    pub fn conv(&self, x: &Var, ids: &ConvIds, activation: Activation, states: States) -> Var {
        let (w, bias) = (self.var(ids.w), ids.bias.map(|bias| self.var(bias)));
        let conv = Conv { x, w: &w, bias: bias.as_ref(), activation };
        let mut windows = tensors(states, ids.window);
        causal_conv(self.tape, &conv, self.segments, windows.as_deref_mut())
    }
}
