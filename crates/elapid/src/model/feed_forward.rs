//! What works on each token by itself: a dense feed-forward, or a few of many experts.

use crate::model::builder::Builder;
use crate::model::config::*;
use crate::model::pass::Pass;
use crate::model::weights::{Init, LinearIds, ParamId, Role};
use crate::ops::activation::{activation, gated};
use crate::ops::add::add;
use crate::ops::balance::balance_loss;
use crate::ops::dispatch::{combine, gather};
use crate::ops::linear::{fill_between, linear, linear_each, linear_grouped_some, linear_split};
use crate::ops::router::route;
use crate::ops::row_gate::row_gate;
use crate::ops::scale::scale;
use crate::tape::Var;
use crate::tensor::Tensor;
use std::ops::Range;
use std::sync::Arc;

pub(crate) enum FeedForward {
    Dense(Dense),
    Experts(Box<Experts>),
}

impl FeedForward {
    pub fn new(builder: &mut Builder, config: &FeedForwardConfig, d_model: usize) -> FeedForward {
        match config {
            FeedForwardConfig::None => panic!("no feed-forward to build"),
            FeedForwardConfig::Dense(c) => FeedForward::Dense(Dense::new(builder, c, d_model)),
            FeedForwardConfig::Experts(c) => {
                FeedForward::Experts(Box::new(Experts::new(builder, c, d_model)))
            }
        }
    }

    pub fn forward(&self, pass: &Pass, x: &Var) -> (Var, Option<Var>) {
        match self {
            FeedForward::Dense(dense) => (dense.forward(pass, x), None),
            FeedForward::Experts(experts) => experts.forward(pass, x),
        }
    }
}

pub(crate) struct Dense {
    config: DenseConfig,
    /// Everything but the last: gate and up, both in one, or up.
    first: Vec<LinearIds>,
    down: LinearIds,
}

impl Dense {
    fn new(builder: &mut Builder, c: &DenseConfig, d_model: usize) -> Dense {
        let (std, out_std) = (builder.std, builder.out_std);
        let mut linear = |part: &str, shape, std| {
            builder.linear(format!("{}.{part}", c.prefix), shape, std, c.bias)
        };
        let (first, down): (Vec<_>, _) = match &c.form {
            DenseForm::Gated([gate, up, down]) => {
                let first = [gate, up].map(|part| linear(part, [c.d_ff, d_model], std));
                (first.to_vec(), down)
            }
            DenseForm::Fused([input, down]) | DenseForm::UpFirst([input, down]) => {
                (vec![linear(input, [2 * c.d_ff, d_model], std)], down)
            }
            DenseForm::Plain([up, down]) => (vec![linear(up, [c.d_ff, d_model], std)], down),
        };
        let down = linear(down, [d_model, c.d_ff], out_std);
        Dense { config: c.clone(), first, down }
    }

    fn forward(&self, pass: &Pass, x: &Var) -> Var {
        let c = &self.config;
        let tape = pass.tape;
        let map = |ids: &LinearIds| pass.weights.linear(tape, ids);
        let (mut first, mut down): (Vec<_>, _) =
            (self.first.iter().map(map).collect(), map(&self.down));
        if matches!(c.form, DenseForm::Gated(_) | DenseForm::Plain(_)) {
            fill_between(x.value().dims2().0, &mut first, &mut down);
        }
        let mut parts = match &first[..] {
            [both] if !matches!(c.form, DenseForm::Plain(_)) => {
                linear_split(tape, x, both, &[c.d_ff, c.d_ff])
            }
            _ => linear_each(tape, x, &first),
        };
        if matches!(c.form, DenseForm::UpFirst(_)) {
            parts.reverse();
        }
        let inner = match &parts[..] {
            [up] => activation(tape, c.activation, up),
            [gate, up] => gated(tape, c.activation, &scale(tape, gate, c.gate_scale), up),
            _ => panic!("a feed-forward of {} matrices", self.first.len() + 1),
        };
        scale(tape, &linear(tape, &inner, &down), c.out_scale)
    }
}

pub(crate) struct Experts {
    config: ExpertsConfig,
    router: LinearIds,
    choice_bias: Option<ParamId>,
    gate: Vec<LinearIds>,
    up: Vec<LinearIds>,
    down: Vec<LinearIds>,
    shared: Option<Dense>,
    shared_gate: Option<LinearIds>,
}

impl Experts {
    fn new(builder: &mut Builder, c: &ExpertsConfig, d_model: usize) -> Experts {
        let (std, out_std) = (builder.std, builder.out_std);
        let matrix = |builder: &mut Builder, name: &str, n_rows: usize| {
            let init = std.init(d_model);
            let weight = builder.add(name.into(), &[n_rows, d_model], init, Role::Matrix);
            LinearIds { weight, bias: None }
        };
        let router = matrix(builder, &c.router_name, c.n_expert);
        let choice_bias = c.choice_bias.as_ref().map(|name| {
            builder.add(name.clone(), &[c.n_expert], Init::Constant(0.0), Role::Buffer)
        });
        let [mut gate, mut up, mut down] = [Vec::new(), Vec::new(), Vec::new()];
        for expert in 0..c.n_expert {
            let first_spec = builder.specs.len();
            match &c.form {
                ExpertForm::Each(names) => {
                    let mut linear = |part: &str, shape, std| {
                        let name = format!("{}.experts.{expert}.{part}", c.prefix);
                        builder.linear(name, shape, std, false)
                    };
                    gate.push(linear(names[0], [c.d_ff, d_model], std));
                    up.push(linear(names[1], [c.d_ff, d_model], std));
                    down.push(linear(names[2], [d_model, c.d_ff], out_std));
                }
                ExpertForm::Stacked([input, output]) => {
                    let name = format!("{}.{input}.weight", c.prefix);
                    let stored = [c.n_expert, 2 * c.d_ff, d_model];
                    let first = expert * 2 * c.d_ff;
                    gate.push(builder.part(&name, stored, first, [c.d_ff, d_model], std));
                    up.push(builder.part(&name, stored, first + c.d_ff, [c.d_ff, d_model], std));
                    let name = format!("{}.{output}.weight", c.prefix);
                    let stored = [c.n_expert, d_model, c.d_ff];
                    let first = expert * d_model;
                    down.push(builder.part(&name, stored, first, [d_model, c.d_ff], out_std));
                }
            }
            let name: Arc<str> = format!("{}.experts.{expert}", c.prefix).into();
            let specs = &mut builder.specs[first_spec..];
            specs.iter_mut().for_each(|spec| spec.expert = Some(name.clone()));
        }
        let shared = c.shared.as_ref().map(|shared| Dense::new(builder, shared, d_model));
        let shared_gate = c.shared_gate.as_ref().map(|name| matrix(builder, name, 1));
        let config = c.clone();
        Experts { config, router, choice_bias, gate, up, down, shared, shared_gate }
    }

    fn forward(&self, pass: &Pass, x: &Var) -> (Var, Option<Var>) {
        let tape = pass.tape;
        let c = &self.config;
        let logits = pass.linear(x, &self.router);
        let bias = self.choice_bias.map(|id| pass.weights.tensor(id));
        let routing = route(tape, &logits, &c.router, bias);
        let sorted = gather(tape, x, &routing);
        let turns = pass.weights.turns(&self.gate, &routing.offsets);
        let y_sorted = match &turns[..] {
            [all] => self.some(pass, &sorted, &routing.offsets, all.clone()),
            _ => {
                // Nothing is recorded here: only weights that are not trained take turns.
                let rows =
                    |turn: &Range<usize>| routing.offsets[turn.start]..routing.offsets[turn.end];
                let part = |turn: &Range<usize>| {
                    let x = Var::constant(sorted.value().rows(rows(turn)));
                    self.some(pass, &x, &routing.offsets, turn.clone()).value().clone()
                };
                Var::constant(Tensor::stack(&turns.iter().map(part).collect::<Vec<_>>()))
            }
        };
        let mut y = combine(tape, &y_sorted, &routing);
        if let Some(shared) = &self.shared {
            let mut from_shared = shared.forward(pass, x);
            if let Some(gate) = &self.shared_gate {
                from_shared = row_gate(tape, &from_shared, &pass.linear(x, gate));
            }
            y = add(tape, &y, &from_shared);
        }
        let balance = pass.wants_balance.then(|| balance_loss(tape, &logits, &routing));
        (y, balance)
    }

    /// What the experts of `turn` make of their rows, which are those of `x`.
    fn some(&self, pass: &Pass, x: &Var, offsets: &[usize], turn: Range<usize>) -> Var {
        let (tape, maps) = (pass.tape, [&self.gate[..], &self.up, &self.down]);
        let [gate, up, down] = pass.weights.experts(tape, maps, offsets, turn.clone());
        let grouped =
            |x: &Var, experts| linear_grouped_some(tape, x, offsets, experts, turn.clone());
        let (gate, up) = (grouped(x, &gate), grouped(x, &up));
        grouped(&gated(tape, self.config.activation, &gate, &up), &down)
    }
}
