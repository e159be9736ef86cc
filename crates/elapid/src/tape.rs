//! Records operations and replays them backward.
//!
//! An op computes its outputs, then tells the tape its name, its inputs and a closure that turns
//! the gradients of the outputs into gradients of the inputs. `backward` walks the records in
//! reverse. Each closure owns what it needs and is dropped once it has run, so memory is freed as
//! the walk proceeds. Where gradients meet they are summed in the order of the walk: a fixed one.
//!
//! A `Var` whose gradient nobody wants has no slot, and an op all of whose inputs are such is not
//! recorded: what is frozen costs nothing. A value that is cheap to make again may say how
//! (`remade_by`): an op that needs it in the backward pass then holds the recipe. A span under
//! `checkpoint` keeps only its inputs and is run again when the walk reaches it.

use crate::tensor::Tensor;
use crate::tensor::add::add_into;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// A value in a computation.
#[derive(Clone)]
pub struct Var {
    value: Tensor,
    slot: Option<usize>,
    remake: Option<Arc<Remake>>,
}

/// Makes a value again, to the bit.
pub struct Remake {
    make: Box<dyn Fn() -> Tensor + Send + Sync>,
    /// The value, once it is made, until the last who needs it has come for it.
    made: Mutex<Option<Tensor>>,
}

/// A value that is needed in the backward pass.
pub enum Kept {
    Held(Tensor),
    /// What it is made of again.
    Remade(Arc<Remake>),
}

impl Kept {
    pub fn get(&self) -> Tensor {
        match self {
            Kept::Held(value) => value.clone(),
            Kept::Remade(remake) => {
                let mut made = remake.made.lock().unwrap_or_else(PoisonError::into_inner);
                let value = made.take().unwrap_or_else(|| (remake.make)());
                let is_last = Arc::strong_count(remake) == 1;
                *made = (!is_last).then(|| value.clone());
                value
            }
        }
    }
}

impl Var {
    /// A value without gradient.
    pub fn constant(value: Tensor) -> Var {
        Var { value, slot: None, remake: None }
    }

    /// Registers a closure that recomputes this value in the backward pass from what is held:
    /// cheaper than to hold it, on devices that compute much faster than they remember.
    pub fn remade_by(self, remake: impl Fn() -> Tensor + Send + Sync + 'static) -> Var {
        let remake = Remake { make: Box::new(remake), made: Mutex::default() };
        Var { remake: Some(Arc::new(remake)), ..self }
    }

    /// The value for the backward pass of an op.
    pub fn kept(&self) -> Kept {
        match &self.remake {
            Some(remake) => Kept::Remade(remake.clone()),
            None => Kept::Held(self.value.clone()),
        }
    }

    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// Whether somebody wants its gradient.
    pub fn needs_grad(&self) -> bool {
        self.slot.is_some()
    }
}

/// Gradients of leaves by their keys, in the order of the keys.
#[derive(Default)]
pub struct Gradients {
    by_key: BTreeMap<usize, Tensor>,
    on_final: Option<OnFinal>,
}

/// Takes a gradient that nothing more is added to, or gives it back.
pub type OnFinal = Box<dyn Fn(usize, Tensor) -> Option<Tensor> + Send + Sync>;

impl Gradients {
    /// From now on `on_final` is given each gradient as soon as the walk adds nothing more to it,
    /// while the rest of the backward pass still runs. No leaf may be used in two checkpointed
    /// spans: nobody knows of the second before it is run again.
    pub fn give_to(&mut self, on_final: Option<OnFinal>) {
        self.on_final = on_final;
    }

    /// The last was added to a leaf in this walk.
    fn settle(&mut self, key: usize) {
        if let Some(on_final) = &self.on_final
            && let Some(grad) = self.by_key.remove(&key)
            && let Some(grad) = on_final(key, grad)
        {
            self.by_key.insert(key, grad);
        }
    }

    /// Adds to the gradient of a leaf.
    pub fn add(&mut self, key: usize, grad: Tensor) {
        let sum = add_up(self.by_key.remove(&key), grad);
        self.by_key.insert(key, sum);
    }

    /// The gradient of a leaf, if the loss depends on it.
    pub fn get(&self, key: usize) -> Option<&Tensor> {
        self.by_key.get(&key)
    }

    /// The gradient of a leaf, taken out.
    pub fn take(&mut self, key: usize) -> Option<Tensor> {
        self.by_key.remove(&key)
    }

    pub fn iter(&self) -> impl Iterator<Item = (usize, &Tensor)> {
        self.by_key.iter().map(|(&key, grad)| (key, grad))
    }
}

/// A gradient for each output or input; `None` where there is none or none is wanted.
type Grads = Vec<Option<Tensor>>;

/// Gradients of outputs in, gradients of inputs out. Also given are the gradient that the first
/// input has so far, which may be taken and added to, and those of leaves.
type Backward<'a> = Box<dyn FnOnce(Grads, &mut Option<Tensor>, &mut Gradients) -> Grads + 'a>;

struct Record<'a> {
    op: &'static str,
    inputs: Vec<Option<usize>>,
    outputs: Range<usize>,
    backward: Backward<'a>,
}

#[derive(Default)]
struct Recording<'a> {
    records: Vec<Record<'a>>,
    n_slots: usize,
    leaves: BTreeMap<usize, usize>,
    /// Bytes live on the device at the start and after the last record.
    bytes_start: usize,
    bytes_last: usize,
}

impl<'a> Recording<'a> {
    fn push(
        &mut self,
        op: &'static str,
        inputs: &[&Var],
        outputs: Vec<Tensor>,
        backward: Backward<'a>,
    ) -> Vec<Var> {
        let live = outputs.first().map_or(0, |output| output.device().memory().live);
        if self.records.is_empty() {
            self.bytes_start = live.saturating_sub(outputs.iter().map(Tensor::n_bytes).sum());
        }
        self.bytes_last = live;
        let slots = self.n_slots..self.n_slots + outputs.len();
        self.n_slots = slots.end;
        let inputs = inputs.iter().map(|input| input.slot).collect();
        self.records.push(Record { op, inputs, outputs: slots.clone(), backward });
        let pairs = outputs.into_iter().zip(slots);
        pairs.map(|(value, slot)| Var { slot: Some(slot), ..Var::constant(value) }).collect()
    }
}

impl Recording<'_> {
    /// Keys and slots of leaves by the first record that uses them: the last of the walk.
    fn final_after(&self) -> BTreeMap<Option<usize>, Vec<(usize, usize)>> {
        let mut first_use: Vec<Option<usize>> = vec![None; self.n_slots];
        for (idx, record) in self.records.iter().enumerate().rev() {
            record.inputs.iter().flatten().for_each(|slot| first_use[*slot] = Some(idx));
        }
        let mut leaves: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (&key, &slot) in &self.leaves {
            leaves.entry(first_use[slot]).or_default().push((key, slot));
        }
        leaves
    }
}

/// The name of a span that is run again.
const CHECKPOINT: &str = "checkpoint";

/// The record of one computation.
pub struct Tape<'a> {
    /// `None`: nothing is recorded.
    recording: Option<RefCell<Recording<'a>>>,
}

impl<'a> Tape<'a> {
    /// A tape that records.
    pub fn new() -> Tape<'a> {
        Tape { recording: Some(RefCell::default()) }
    }

    /// A tape that records nothing: for generation and evaluation.
    pub fn off() -> Tape<'a> {
        Tape { recording: None }
    }

    /// Whether ops are recorded.
    pub fn is_recording(&self) -> bool {
        self.recording.is_some()
    }

    /// A value whose gradient is wanted. The same key gives the same leaf: a tied weight has one.
    pub fn leaf(&self, key: usize, value: &Tensor) -> Var {
        let Some(recording) = &self.recording else { return Var::constant(value.clone()) };
        let mut recording = recording.borrow_mut();
        let fresh = recording.n_slots;
        let slot = *recording.leaves.entry(key).or_insert(fresh);
        if slot == fresh {
            recording.n_slots += 1;
        }
        Var { slot: Some(slot), ..Var::constant(value.clone()) }
    }

    /// Records an op with one output.
    pub fn record(
        &self,
        op: &'static str,
        inputs: &[&Var],
        output: Tensor,
        backward: impl FnOnce(Tensor) -> Vec<Option<Tensor>> + 'a,
    ) -> Var {
        let one = move |mut douts: Grads| match douts.pop().flatten() {
            Some(dout) => backward(dout),
            None => Vec::new(),
        };
        self.record_many(op, inputs, vec![output], one).pop().expect("one output")
    }

    /// Records an op with several outputs; those that nobody used have no gradient.
    pub fn record_many(
        &self,
        op: &'static str,
        inputs: &[&Var],
        outputs: Vec<Tensor>,
        backward: impl FnOnce(Grads) -> Grads + 'a,
    ) -> Vec<Var> {
        self.push(op, inputs, outputs, move |douts, _, _| backward(douts))
    }

    /// The same for an op that adds to the gradient which its first input has so far, if it has
    /// one, and returns the sum: it need not be added afterwards.
    pub fn record_adding(
        &self,
        op: &'static str,
        inputs: &[&Var],
        outputs: Vec<Tensor>,
        backward: impl FnOnce(Grads, Option<Tensor>) -> Grads + 'a,
    ) -> Vec<Var> {
        self.push(op, inputs, outputs, move |douts, so_far, _| backward(douts, so_far.take()))
    }

    fn push(
        &self,
        op: &'static str,
        inputs: &[&Var],
        outputs: Vec<Tensor>,
        backward: impl FnOnce(Grads, &mut Option<Tensor>, &mut Gradients) -> Grads + 'a,
    ) -> Vec<Var> {
        // Parameters inside a checkpoint may be trained where the embedding, and with it the input
        // of the first layer, is frozen.
        let is_wanted = op == CHECKPOINT || inputs.iter().any(|input| input.needs_grad());
        match self.recording.as_ref().filter(|_| is_wanted) {
            Some(it) => it.borrow_mut().push(op, inputs, outputs, Box::new(backward)),
            None => outputs.into_iter().map(Var::constant).collect(),
        }
    }

    /// Runs `span`, which trains something, without keeping what is inside; it is run again in
    /// backward.
    ///
    /// Costs one more forward of the span, saves everything it would have kept but its inputs.
    pub fn checkpoint(
        &self,
        inputs: &[&Var],
        span: impl Fn(&Tape<'a>, &[Var]) -> Vec<Var> + 'a,
    ) -> Vec<Var> {
        let values: Vec<Tensor> = inputs.iter().map(|input| input.value.clone()).collect();
        let wanted: Vec<bool> = inputs.iter().map(|input| input.needs_grad()).collect();
        let constants: Vec<Var> = values.iter().cloned().map(Var::constant).collect();
        let outputs = span(&Tape::off(), &constants);
        let outputs = outputs.into_iter().map(|output| output.value).collect();
        let backward = move |douts: Grads, _: &mut Option<Tensor>, grads: &mut Gradients| {
            let inner = Tape::new();
            // Keys from the top, which no parameter has.
            let key = |idx: usize| usize::MAX - idx;
            let input = |(idx, value): (usize, Tensor)| {
                if wanted[idx] { inner.leaf(key(idx), &value) } else { Var::constant(value) }
            };
            let vars: Vec<Var> = values.into_iter().enumerate().map(input).collect();
            let outputs = span(&inner, &vars);
            drop(vars);
            let seeds = outputs.into_iter().zip(douts);
            inner.walk(seeds.filter_map(|(var, dout)| Some((var, dout?))).collect(), grads);
            (0..wanted.len()).map(|idx| grads.take(key(idx))).collect()
        };
        self.push(CHECKPOINT, inputs, outputs, backward)
    }

    /// Bytes that became live since the first record: what the tape and its outputs hold.
    pub fn bytes_held(&self) -> usize {
        self.recording.as_ref().map_or(0, |recording| {
            let recording = recording.borrow();
            recording.bytes_last.saturating_sub(recording.bytes_start)
        })
    }

    /// Adds to `grads` the gradients of `scale * loss` by every leaf.
    pub fn backward(self, loss: &Var, scale: f32, grads: &mut Gradients) {
        let mut seed = Tensor::uninit(loss.value.device(), loss.value.shape());
        assert_eq!(seed.n_elem(), 1, "the loss is one number, not {:?}", loss.value.shape());
        seed.write_f32(&[scale]);
        self.walk(vec![(loss.clone(), seed)], grads);
    }

    /// Replays the records backward from the given gradients of some outputs.
    pub(crate) fn walk(self, seeds: Vec<(Var, Tensor)>, grads: &mut Gradients) {
        let Some(recording) = self.recording else { return };
        let recording = recording.into_inner();
        let mut slots: Grads = vec![None; recording.n_slots];
        for (var, seed) in seeds {
            if let Some(slot) = var.slot {
                slots[slot] = Some(add_up(slots[slot].take(), seed));
            }
        }
        let mut final_after = recording.final_after();
        for (idx, record) in recording.records.into_iter().enumerate().rev() {
            let douts: Grads = record.outputs.map(|slot| slots[slot].take()).collect();
            if douts.iter().any(Option::is_some) {
                let mut nothing = None;
                let so_far = match record.inputs.first() {
                    Some(Some(slot)) => &mut slots[*slot],
                    _ => &mut nothing,
                };
                let dinputs = (record.backward)(douts, so_far, grads);
                assert_eq!(dinputs.len(), record.inputs.len(), "gradients of {}", record.op);
                for (slot, grad) in record.inputs.iter().zip(dinputs) {
                    if let (Some(slot), Some(grad)) = (slot, grad) {
                        slots[*slot] = Some(add_up(slots[*slot].take(), grad));
                    }
                }
            }
            for (key, slot) in final_after.remove(&Some(idx)).unwrap_or_default() {
                if let Some(grad) = slots[slot].take() {
                    grads.add(key, grad);
                    grads.settle(key);
                }
            }
        }
        // Leaves that are outputs themselves.
        for (key, slot) in final_after.into_values().flatten() {
            if let Some(grad) = slots[slot].take() {
                grads.add(key, grad);
                grads.settle(key);
            }
        }
    }
}

impl Default for Tape<'_> {
    fn default() -> Self {
        Tape::new()
    }
}

fn add_up(sum: Option<Tensor>, grad: Tensor) -> Tensor {
    match sum {
        Some(sum) => add_into(sum, &grad),
        None => grad,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{add::add, scale::scale};
    use crate::tensor::device::Device;

    fn vector(device: &Device, data: &[f32]) -> Tensor {
        Tensor::from_f32(device, &[data.len()], data)
    }

    #[test]
    fn gradients_meet_where_a_value_is_used_twice() {
        let device = Device::cpu(1).unwrap();
        let tape = Tape::new();
        let x = tape.leaf(7, &vector(&device, &[3.0]));
        let tied = tape.leaf(7, &vector(&device, &[3.0]));
        let y = add(&tape, &scale(&tape, &x, 2.0), &add(&tape, &x, &tied));
        let mut grads = Gradients::default();
        tape.backward(&y, 10.0, &mut grads);
        assert_eq!(grads.get(7).unwrap().f32(), [40.0]);
    }

    #[test]
    fn what_is_made_again_is_made_once_for_all_who_need_it() {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let n_made = Arc::new(AtomicUsize::new(0));
        let (value, count) = (vector(&Device::cpu(1).unwrap(), &[3.0]), n_made.clone());
        let again = value.clone();
        let var = Var::constant(value).remade_by(move || {
            count.fetch_add(1, Ordering::Relaxed);
            again.clone()
        });
        let (first, last) = (var.kept(), var.kept());
        drop(var);
        assert_eq!(first.get().to_vec(), [3.0]);
        drop(first);
        assert_eq!(last.get().to_vec(), [3.0]);
        assert_eq!(n_made.load(Ordering::Relaxed), 1);
        // Nobody else comes: it was not held any longer.
        let Kept::Remade(remake) = last else { panic!("a recipe") };
        assert!(remake.made.lock().unwrap().is_none());
    }

    #[test]
    fn what_is_frozen_is_not_recorded() {
        let device = Device::cpu(1).unwrap();
        let tape = Tape::new();
        let x = Var::constant(vector(&device, &[3.0]));
        assert!(!scale(&tape, &x, 2.0).needs_grad());
        assert_eq!(tape.bytes_held(), 0);
    }

    #[test]
    fn a_checkpoint_keeps_less_and_gives_the_same_gradients() {
        let device = Device::cpu(1).unwrap();
        let chain = |tape: &Tape, x: &Var, w: &Var| {
            let mut y = x.clone();
            for _ in 0..4 {
                y = crate::ops::activation::gated(tape, crate::ops::activation::Kind::Silu, &y, w);
            }
            y
        };
        let n = 1 << 10;
        let x_value = vector(&device, &vec![0.3; n]);
        let w_value = vector(&device, &vec![0.7; n]);
        let run = |checkpointed: bool| {
            let tape = Tape::new();
            let x = tape.leaf(0, &x_value);
            let w_value = &w_value;
            let y = if checkpointed {
                let span = move |tape: &Tape, vars: &[Var]| {
                    vec![chain(tape, &vars[0], &tape.leaf(1, w_value))]
                };
                tape.checkpoint(&[&x], span).pop().unwrap()
            } else {
                chain(&tape, &x, &tape.leaf(1, w_value))
            };
            let held = tape.bytes_held();
            let mut grads = Gradients::default();
            tape.walk(vec![(y, vector(&device, &vec![1.0; n]))], &mut grads);
            let bits = |key| grads.get(key).unwrap().f32().to_vec();
            (held, bits(0), bits(1))
        };
        let (plain, checkpointed) = (run(false), run(true));
        assert!(checkpointed.0 < plain.0, "{} < {}", checkpointed.0, plain.0);
        assert_eq!((plain.1, plain.2), (checkpointed.1, checkpointed.2));
    }
}
