//! A tiny recurrent head over a state of eight numbers, which moves that state.
//!
//! With an input `x`, the state `s` and a hidden state `h` that is carried from sample to sample:
//!
//! ```text
//! h' = a h + (1 - a) tanh(Win x + Ws s),   a = sigmoid(A)
//! d = tanh(Wout h' + b)                    the change: the next state is s + d, within its bounds
//! r = Wr h' + br                           the reward that is expected
//! loss = 1/2 |d - d*|^2 + 1/2 w_r (r - r*)^2
//! ```
//!
//! | name         | in the formula | shape            | starts as  |
//! |--------------|----------------|------------------|------------|
//! | `w_in`       | Win            | (d_hidden, d_in) | normal 0.1 |
//! | `w_state`    | Ws             | (d_hidden, 8)    | normal 0.1 |
//! | `decay`      | A              | (d_hidden)       | normal 0.05|
//! | `w_out`, `b` | Wout, b        | (8, d_hidden), 8 | normal 0.05, zero |
//! | `w_reward`, `b_reward` | Wr, br | (1, d_hidden), 1 | normal 0.05, zero |
//!
//! What enters the recurrence does not depend on h: all rows of a window go through one linear map,
//! then through `ops/leaky.rs`, then through the two heads.
//!
//! Not here: the meaning of the eight numbers (`state.rs`), samples (`sample.rs`), training through
//! time (`train.rs`), the file (`file.rs`).

mod file;
mod sample;
mod state;
mod train;

pub use sample::LimbicSample;
pub use state::LimbicState;
pub use train::{LimbicScore, LimbicSettings};

use self::state::{N_DIM, clamped};
use crate::error::{Error, Result};
use crate::model::place::Part;
use crate::model::weights::{Init, LinearIds, ParamId, Role, Spec, Weights};
use crate::ops::activation::{Kind, activation};
use crate::ops::add::add;
use crate::ops::leaky::leaky;
use crate::ops::linear::linear;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::segment::Segments;

/// Hidden numbers at most.
const D_HIDDEN_MAX: usize = 64;
/// Inputs at most: what a file may ask for.
const D_IN_MAX: usize = 4096;

/// A tiny recurrent head that moves a state of eight numbers.
pub struct Limbic {
    shape: Shape,
    /// Factor of the reward in the loss it was trained with.
    reward_weight: f32,
    weights: Weights,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shape {
    d_in: usize,
    d_hidden: usize,
}

impl Shape {
    fn check(self) -> Result<Shape> {
        let Shape { d_in, d_hidden } = self;
        if !(1..=D_IN_MAX).contains(&d_in) || !(1..=D_HIDDEN_MAX).contains(&d_hidden) {
            let problem = format!("{d_in} inputs and {d_hidden} hidden numbers");
            let hint = format!("1 to {D_IN_MAX} inputs and 1 to {D_HIDDEN_MAX} hidden numbers");
            return Err(Error::input(problem, &hint));
        }
        Ok(self)
    }

    /// In the order of the constants below.
    fn specs(self) -> [Spec; 7] {
        let Shape { d_in, d_hidden } = self;
        let spec = |name: &str, shape: &[usize], init: f32, role: Role| Spec {
            name: name.into(),
            shape: shape.to_vec(),
            stored: Part { name: name.into(), shape: shape.to_vec(), rows: None },
            init: if init > 0.0 { Init::Normal(init) } else { Init::Constant(0.0) },
            role,
            expert: None,
        };
        [
            spec("w_in", &[d_hidden, d_in], 0.1, Role::Matrix),
            spec("w_state", &[d_hidden, N_DIM], 0.1, Role::Matrix),
            spec("decay", &[d_hidden], 0.05, Role::Vector),
            spec("w_out", &[N_DIM, d_hidden], 0.05, Role::Matrix),
            spec("b", &[N_DIM], 0.0, Role::Vector),
            spec("w_reward", &[1, d_hidden], 0.05, Role::Matrix),
            spec("b_reward", &[1], 0.0, Role::Vector),
        ]
    }
}

const W_IN: LinearIds = LinearIds { weight: ParamId(0), bias: None };
const W_STATE: LinearIds = LinearIds { weight: ParamId(1), bias: None };
const DECAY: ParamId = ParamId(2);
const OUT: LinearIds = LinearIds { weight: ParamId(3), bias: Some(ParamId(4)) };
const REWARD: LinearIds = LinearIds { weight: ParamId(5), bias: Some(ParamId(6)) };

/// Rows of several sequences, each from where its hidden state is.
struct Window {
    /// (n_row, d_in).
    inputs: Tensor,
    /// (n_row, 8).
    states: Tensor,
    /// (n_seq, d_hidden).
    hidden: Tensor,
    segments: Segments,
}

/// What a window gives.
struct Moved {
    /// (n_row, 8).
    delta: Var,
    /// (n_row, 1).
    reward: Var,
    /// (n_row, d_hidden).
    hidden: Var,
}

impl Limbic {
    /// A new one with `d_hidden` hidden numbers, at most 64; the usual are 32 inputs and 16 hidden.
    pub fn new(d_in: usize, d_hidden: usize, seed: u64, device: &Device) -> Result<Limbic> {
        let shape = Shape { d_in, d_hidden }.check()?;
        let weights = Weights::init(device, &shape.specs(), seed);
        device.check()?;
        Ok(Limbic { shape, reward_weight: LimbicSettings::default().reward_weight, weights })
    }

    /// Moves `state` by one input and returns the reward that is expected. `hidden` is what was
    /// seen before: empty before the first step, then as the last step left it.
    pub fn step(
        &self,
        state: &mut LimbicState,
        hidden: &mut Vec<f32>,
        input: &[f32],
    ) -> Result<f32> {
        let Shape { d_in, d_hidden } = self.shape;
        self.expect_inputs("the input", input)?;
        if hidden.is_empty() {
            hidden.resize(d_hidden, 0.0);
        }
        if hidden.len() != d_hidden || !hidden.iter().all(|h| h.is_finite()) {
            let problem = format!("a hidden state of {} numbers", hidden.len());
            let hint = format!("{d_hidden} finite numbers as a step left them, or none");
            return Err(Error::input(problem, &hint));
        }
        let device = self.weights.device();
        let before = state.clamped();
        let moved = self.forward(
            &Tape::off(),
            &Window {
                inputs: Tensor::from_f32(device, &[1, d_in], input),
                states: Tensor::from_f32(device, &[1, N_DIM], &before),
                hidden: Tensor::from_f32(device, &[1, d_hidden], hidden),
                segments: Segments::from_lengths(&[1]),
            },
        );
        let [delta, reward, next] =
            [moved.delta, moved.reward, moved.hidden].map(|var| var.value().to_vec());
        device.check()?;
        let sum = std::array::from_fn(|dim| before[dim] + delta[dim]);
        (*state, *hidden) = (clamped(sum).into(), next);
        Ok(reward[0])
    }

    fn forward(&self, tape: &Tape, window: &Window) -> Moved {
        let weights = &self.weights;
        let map = |x: &Var, ids: &LinearIds| linear(tape, x, &weights.linear(tape, ids));
        let [inputs, states, start] =
            [&window.inputs, &window.states, &window.hidden].map(|x| Var::constant(x.clone()));
        let pre = add(tape, &map(&inputs, &W_IN), &map(&states, &W_STATE));
        let hidden = leaky(tape, &pre, &weights.var(tape, DECAY), &start, &window.segments);
        let delta = activation(tape, Kind::Tanh, &map(&hidden, &OUT));
        Moved { delta, reward: map(&hidden, &REWARD), hidden }
    }

    /// Fails unless there are as many numbers as the head takes, all finite.
    fn expect_inputs(&self, what: &str, input: &[f32]) -> Result<()> {
        let (got, want) = (input.len(), self.shape.d_in);
        if got != want {
            let problem = format!("{what} has {got} numbers, the head takes {want}");
            return Err(Error::input(problem, "give as many inputs as it was trained with"));
        }
        if let Some(at) = input.iter().position(|x| !x.is_finite()) {
            let problem = format!("{what}: number {} is {}", at + 1, input[at]);
            return Err(Error::input(problem, "inputs are finite numbers"));
        }
        Ok(())
    }
}

impl std::fmt::Display for Limbic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Shape { d_in, d_hidden }, n) = (self.shape, self.weights.n_elem());
        write!(f, "{d_in} inputs, {d_hidden} hidden, {n} parameters")
    }
}

#[cfg(test)]
mod tests;
