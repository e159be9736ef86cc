//! The optimizer: what it remembers of every trained parameter, and one step of all of them.
//!
//! | kind    | matrices                    | everything else            |
//! |---------|-----------------------------|----------------------------|
//! | `AdamW` | two moments                 | two moments                |
//! | `Muon`  | one momentum (`ops/muon.rs`)| two moments, as with AdamW |
//!
//! With Muon the head goes with everything else: its rows are tokens, as those of an embedding. A
//! matrix whose rows are several maps, such as the input of a Mamba block, is taken whole.
//!
//! A trust region, if there is one, bounds the root mean square of a parameter's update by
//! `trust * max(rms(p), floor)`: the rate of that parameter, and with it its decay, is scaled down
//! for this one step. Moments do not feel it. The floor lets what starts at zero move.
//!
//! What is remembered of experts may lie in the memory of the CPU while a GPU computes. It is then
//! brought over for the update, some experts at a time, and back. No number changes by that.
//!
//! Not here: the schedule of the rate (`schedule.rs`), which parameter decays.

use crate::error::{Error, Result};
use crate::model::HEAD;
use crate::model::weights::{ParamId, Role, Weights};
use crate::ops::adamw::{AdamW, Steps, adamw_sizes};
use crate::ops::grad_norm::{Squares, grad_norm, squares};
use crate::ops::muon::{Matrix, muon};
use crate::tape::Gradients;
use crate::tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The size that a parameter is taken to have at least in a trust region, as in Adafactor (Shazeer
/// and Stern, 2018). Theirs is 1e-3; with that the upper half of an adapter, which starts at zero,
/// would take some sixty steps to reach the usual rates.
pub const TRUST_FLOOR: f64 = 1e-2;

impl AdamW {
    /// What the rate is multiplied by, for an update and a parameter of these sizes (root mean
    /// square). Exactly one without a trust region, or inside it.
    pub fn trust_factor(&self, update: f64, p: f64) -> f64 {
        let Some(trust) = self.trust else { return 1.0 };
        let largest = trust * p.max(TRUST_FLOOR);
        if update > largest { largest / update } else { 1.0 }
    }
}

/// Which optimizer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// AdamW for everything.
    #[default]
    AdamW,
    /// Muon for matrices, AdamW for everything else.
    Muon,
}

/// What is remembered of one parameter.
enum State {
    AdamW { m: Tensor, v: Tensor },
    Muon { mu: Tensor },
}

impl State {
    fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            State::AdamW { m, v } => vec![("m", m), ("v", v)],
            State::Muon { mu } => vec![("mu", mu)],
        }
    }

    fn tensors_mut(&mut self) -> Vec<(&'static str, &mut Tensor)> {
        match self {
            State::AdamW { m, v } => vec![("m", m), ("v", v)],
            State::Muon { mu } => vec![("mu", mu)],
        }
    }
}

/// An optimizer with what it remembers.
pub struct Optimizer {
    states: BTreeMap<ParamId, (String, State)>,
    n_steps: u64,
    /// Bytes of moments that are brought over at once, of those that lie elsewhere.
    bytes_over_max: usize,
}

/// AdamW of one parameter.
struct Update<'a> {
    p: &'a mut Tensor,
    grad: &'a Tensor,
    moments: [&'a mut Tensor; 2],
    config: AdamW,
}

impl<'a> Update<'a> {
    /// Adds it to `steps`, bounded by the trust region if there is one.
    fn add(self, steps: &mut Steps<'a>, n_steps: u64) {
        let Update { p, grad, moments: [m, v], mut config } = self;
        if config.trust.is_some() {
            let (update, size) = adamw_sizes(p, grad, [m, v], n_steps, &config);
            config.lr *= config.trust_factor(update, size);
        }
        steps.add(p, grad, m, v, &config);
    }

    fn is_over(&self) -> bool {
        self.moments[0].device().is_same(self.p.device())
    }
}

/// Updates whose moments lie elsewhere, brought over together.
fn bring_over(mut list: Vec<Update>, n_steps: u64) {
    let over = |update: &Update| {
        let [m, v] = &update.moments;
        [m.to(update.p.device()), v.to(update.p.device())]
    };
    let mut moments: Vec<[Tensor; 2]> = list.iter().map(over).collect();
    let mut steps = Steps::new(n_steps);
    for (update, [m, v]) in list.iter_mut().zip(&mut moments) {
        let Update { p, grad, config, .. } = update;
        Update { p, grad, moments: [m, v], config: *config }.add(&mut steps, n_steps);
    }
    steps.finish();
    for (update, new) in list.into_iter().zip(&moments) {
        for (old, new) in update.moments.into_iter().zip(new) {
            *old = new.to(old.device());
        }
    }
}

impl Optimizer {
    /// Before the first step, with a state for all that is trained.
    ///
    /// States are made now and not when first needed: then they would take buffers that the next
    /// step's activations look for.
    pub fn new(weights: &Weights, kind: OptimizerKind) -> Optimizer {
        Optimizer::with_experts_over(weights, kind, None)
    }

    /// The same with the states of experts in the memory of the CPU, where there is a limit: so
    /// many bytes of them, and at least those of one matrix, are on a GPU during the update.
    pub fn with_experts_over(
        weights: &Weights,
        kind: OptimizerKind,
        bytes_max: Option<usize>,
    ) -> Optimizer {
        let state = |id: ParamId| {
            let tensor = weights.tensor(id);
            let device = match bytes_max.is_some() && weights.is_expert(id) {
                true => tensor.device().host_device(),
                false => tensor.device().clone(),
            };
            let zeros = || Tensor::zeros(&device, tensor.shape());
            let is_map = weights.role(id) == Role::Matrix && weights.name(id) != HEAD;
            let state = match kind {
                OptimizerKind::Muon if is_map && tensor.shape().len() == 2 => {
                    State::Muon { mu: zeros() }
                }
                _ => State::AdamW { m: zeros(), v: zeros() },
            };
            (id, (weights.name(id).to_string(), state))
        };
        let states = weights.trained().into_iter().map(state).collect();
        Optimizer { states, n_steps: 0, bytes_over_max: bytes_max.unwrap_or(usize::MAX) }
    }

    pub fn n_steps(&self) -> u64 {
        self.n_steps
    }

    /// Changes every trained parameter that has a gradient, with the settings `settings` gives it.
    /// What is trained is what was when the optimizer was made, or less.
    pub fn step(
        &mut self,
        weights: &mut Weights,
        grads: &Gradients,
        settings: impl Fn(&Weights, ParamId) -> AdamW,
    ) {
        self.n_steps += 1;
        let grad = |id: ParamId| grads.get(id.0).map(|grad| (id, grad));
        let (ids, grads): (Vec<_>, Vec<_>) = weights.trained().into_iter().filter_map(grad).unzip();
        let configs: Vec<AdamW> = ids.iter().map(|&id| settings(weights, id)).collect();
        let states = self.states.iter_mut().filter(|it| ids.binary_search(it.0).is_ok());
        let states: Vec<&mut State> = states.map(|(_, (_, state))| state).collect();
        assert_eq!(states.len(), ids.len(), "states of what is trained");
        let mut steps = Steps::new(self.n_steps);
        let mut matrices: Vec<(AdamW, Vec<Matrix>)> = Vec::new();
        let params = weights.tensors_mut(&ids).into_iter().zip(states);
        let mut elsewhere = Vec::new();
        for ((p, state), (grad, config)) in params.zip(grads.into_iter().zip(configs)) {
            match state {
                State::Muon { mu } => {
                    let is_alike = |(of, list): &(AdamW, Vec<Matrix>)| {
                        *of == config && list[0].p.shape() == p.shape()
                    };
                    let at = matrices.iter().position(is_alike).unwrap_or_else(|| {
                        matrices.push((config, Vec::new()));
                        matrices.len() - 1
                    });
                    matrices[at].1.push(Matrix { p, g: grad, mu });
                }
                State::AdamW { m, v } => {
                    let update = Update { p, grad, moments: [m, v], config };
                    match update.is_over() {
                        true => update.add(&mut steps, self.n_steps),
                        false => elsewhere.push(update),
                    }
                }
            }
        }
        steps.finish();
        let (mut some, mut n_bytes) = (Vec::new(), 0);
        for update in elsewhere {
            let more = 2 * update.moments[0].n_bytes();
            if n_bytes + more > self.bytes_over_max && !some.is_empty() {
                bring_over(std::mem::take(&mut some), self.n_steps);
                n_bytes = 0;
            }
            n_bytes += more;
            some.push(update);
        }
        bring_over(some, self.n_steps);
        matrices.iter_mut().for_each(|(config, list)| muon(list, config));
    }

    /// As before the first step.
    pub fn reset(&mut self) {
        for (_, state) in self.states.values_mut() {
            state.tensors_mut().into_iter().for_each(|(_, x)| x.fill_zero());
        }
        self.n_steps = 0;
    }

    /// What a checkpoint keeps, by name: `m.` and `v.` or `mu.` before that of the parameter.
    pub fn state(&self) -> Vec<(String, &Tensor)> {
        let mut list = Vec::new();
        for (name, state) in self.states.values() {
            list.extend(state.tensors().into_iter().map(|(kind, x)| (format!("{kind}.{name}"), x)));
        }
        list
    }

    /// Goes back to a state kept by `state`, after `n_steps` steps: all of it, or none.
    pub fn restore(
        &mut self,
        n_steps: u64,
        get: &mut dyn FnMut(&str) -> Result<Tensor>,
    ) -> Result<()> {
        let mut kept = Vec::new();
        for (name, x) in self.state() {
            let found = get(&name)?;
            if found.shape() != x.shape() || found.dtype() != DType::F32 {
                let problem = format!(
                    "the optimizer's `{name}` is {} of shape {:?}, not f32 of shape {:?}",
                    found.dtype().name(),
                    found.shape(),
                    x.shape()
                );
                let hint = "resume with the model, method and optimizer of the run itself";
                return Err(Error::input(problem, hint));
            }
            kept.push(found);
        }
        let places = self.states.values_mut().flat_map(|(_, state)| state.tensors_mut());
        for ((_, place), found) in places.zip(kept) {
            place.write_f32(&found.to_vec());
        }
        self.n_steps = n_steps;
        Ok(())
    }
}

/// Norm of all gradients together.
pub fn global_norm(grads: &Gradients) -> f64 {
    grad_norm(grads.iter().map(|(_, grad)| grad))
}

/// Its squares, before anything is read from a GPU.
pub fn global_squares(grads: &Gradients) -> Squares {
    squares(grads.iter().map(|(_, grad)| grad))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::place::Part;
    use crate::model::weights::{Init, Spec};
    use crate::ops::check::Input;
    use crate::tensor::device::Device;

    fn weights(device: &Device) -> Weights {
        let spec = |name: &str, shape: &[usize], role: Role| Spec {
            name: name.into(),
            shape: shape.to_vec(),
            stored: Part { name: name.into(), shape: shape.to_vec(), rows: None },
            init: Init::Normal(0.1),
            role,
            expert: None,
        };
        let specs = [
            spec("map", &[6, 10], Role::Matrix),
            spec("embed", &[8, 6], Role::Embedding),
            spec(HEAD, &[8, 6], Role::Matrix),
            spec("norm", &[6], Role::Vector),
        ];
        let mut weights = Weights::init(device, &specs, 1);
        weights.train(|_, _| true);
        weights
    }

    fn grads(weights: &Weights, step: u64) -> Gradients {
        let mut grads = Gradients::default();
        for id in weights.trained() {
            let tensor = weights.tensor(id);
            let grad = Input::normal(step * 100 + id.0 as u64, tensor.shape(), 1.0);
            grads.add(id.0, grad.tensor(tensor.device()));
        }
        grads
    }

    fn numbers(weights: &Weights) -> Vec<Vec<f32>> {
        weights.ids().map(|id| weights.tensor(id).f32().to_vec()).collect()
    }

    fn names(optimizer: &Optimizer) -> Vec<String> {
        optimizer.state().into_iter().map(|(name, _)| name).collect()
    }

    const KINDS: [OptimizerKind; 2] = [OptimizerKind::AdamW, OptimizerKind::Muon];

    #[test]
    fn muon_is_for_matrices_that_are_maps_and_all_else_has_two_moments() {
        let weights = weights(&Device::cpu(1).unwrap());
        let optimizer = Optimizer::new(&weights, OptimizerKind::Muon);
        let head = ["m", "v"].map(|kind| format!("{kind}.{HEAD}"));
        let mut want = ["mu.map", "m.embed", "v.embed"].map(String::from).to_vec();
        want.extend(head);
        want.extend(["m.norm", "v.norm"].map(String::from));
        assert_eq!(names(&optimizer), want);
        let optimizer = Optimizer::new(&weights, OptimizerKind::AdamW);
        assert_eq!(names(&optimizer).len(), 8);
    }

    #[test]
    fn a_restored_optimizer_goes_on_as_if_nothing_had_happened() {
        let device = Device::cpu(2).unwrap();
        for kind in KINDS {
            let mut weights_one = weights(&device);
            let mut one = Optimizer::new(&weights_one, kind);
            let settings = |_: &Weights, _: ParamId| AdamW::default();
            for step in 0..3 {
                let grads = grads(&weights_one, step);
                one.step(&mut weights_one, &grads, settings);
            }
            let mut weights_two = weights(&device);
            let mut two = Optimizer::new(&weights_two, kind);
            let kept: BTreeMap<String, Tensor> =
                one.state().into_iter().map(|(name, x)| (name, x.to_f32())).collect();
            two.restore(one.n_steps(), &mut |name| Ok(kept[name].clone())).unwrap();
            assert_eq!((two.n_steps(), kept.len()), (3, one.state().len()));
            for id in weights_two.trained() {
                let from = weights_one.tensor(id).f32();
                weights_two.tensor_mut(id).f32_mut().copy_from_slice(from);
            }
            for step in 3..5 {
                let grads = grads(&weights_one, step);
                one.step(&mut weights_one, &grads, settings);
                two.step(&mut weights_two, &grads, settings);
            }
            assert!(numbers(&weights_one) == numbers(&weights_two), "{kind:?}");
        }
    }

    #[test]
    fn a_state_of_another_shape_is_refused_and_changes_nothing() {
        let device = Device::cpu(1).unwrap();
        let weights = weights(&device);
        let mut optimizer = Optimizer::new(&weights, OptimizerKind::AdamW);
        let mut get = |name: &str| match name {
            "v.norm" => Ok(Tensor::zeros(&device, &[7])),
            _ => {
                let id = weights.find(name.split_once('.').unwrap().1).unwrap();
                let mut ones = weights.tensor(id).to_f32();
                ones.f32_mut().fill(1.0);
                Ok(ones)
            }
        };
        let error = optimizer.restore(5, &mut get).unwrap_err().report();
        assert!(error.contains("`v.norm`") && error.contains("[7]"), "{error}");
        assert_eq!(optimizer.n_steps(), 0);
        assert!(optimizer.state().iter().all(|(_, x)| x.f32().iter().all(|x| *x == 0.0)));
    }

    fn rms(x: impl Iterator<Item = f32>) -> f64 {
        let x: Vec<f64> = x.map(f64::from).collect();
        (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt()
    }

    #[test]
    fn a_trust_region_bounds_every_update_and_a_wide_one_changes_no_bit() {
        let device = Device::cpu(2).unwrap();
        for kind in KINDS {
            let run = |trust: Option<f64>| {
                let mut weights = weights(&device);
                let before = numbers(&weights);
                let mut optimizer = Optimizer::new(&weights, kind);
                let grads = grads(&weights, 1);
                let config = AdamW { lr: 0.1, weight_decay: 0.0, trust, ..AdamW::default() };
                optimizer.step(&mut weights, &grads, |_, _| config);
                let after = numbers(&weights);
                let sizes: Vec<(f64, f64)> = before
                    .iter()
                    .zip(&after)
                    .map(|(p, q)| {
                        (rms(p.iter().zip(q).map(|(p, q)| q - p)), rms(p.iter().copied()))
                    })
                    .collect();
                (after, sizes)
            };
            let (free, sizes) = run(None);
            assert!(sizes.iter().all(|(update, p)| update > &(0.1 * p)), "{sizes:?}");
            assert!(run(Some(1e3)).0 == free);
            for (update, p) in run(Some(0.05)).1 {
                assert!((update / (0.05 * p) - 1.0).abs() < 1e-3, "{kind:?}: {update} of {p}");
            }
        }
    }

    #[test]
    fn what_is_zero_may_still_move_in_a_trust_region() {
        let config = AdamW { trust: Some(0.5), ..AdamW::default() };
        assert_eq!(config.trust_factor(1.0, 0.0), 0.5 * TRUST_FLOOR);
        assert_eq!(config.trust_factor(0.0, 0.0), 1.0);
    }
}
