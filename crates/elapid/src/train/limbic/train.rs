//! Training through time.
//!
//! Sequences are cut into windows of `length` samples, in order. Several sequences go together; the
//! hidden state at the end of a window is where the next one starts, and gradients flow through all
//! samples of a window, not into the one before. Each window is a step of AdamW on the mean loss of
//! its samples. What follows what is a function of the seed.

use super::sample::{LimbicSample, sequences};
use super::state::N_DIM;
use super::{Limbic, Window};
use crate::error::{Error, Result};
use crate::model::weights::{Role, Weights};
use crate::ops::adamw::AdamW;
use crate::ops::add::add;
use crate::ops::square_error::square_error;
use crate::tape::{Gradients, Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::rng::Rng;
use crate::tensor::segment::Segments;
use crate::train::optim::{Optimizer, OptimizerKind, global_norm};
use std::cmp::Reverse;
use std::ops::ControlFlow;

/// The streams of what is held out and of the order of sequences, apart from those of weights.
const HELD_OUT: u64 = 0x6c69_6d62;
const ORDER: u64 = 0x6f72_6465;

/// Samples of a window where nothing is trained.
const N_SCORED: usize = 256;

/// How to train a [`Limbic`](crate::Limbic).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimbicSettings {
    /// Passes over the samples.
    pub n_epochs: usize,
    /// Samples that gradients flow back through.
    pub length: usize,
    /// Sequences that go together.
    pub n_batch: usize,
    /// Rate of AdamW.
    pub lr: f64,
    /// Gradients are scaled down to this norm.
    pub clip_norm: f64,
    /// Factor of the reward in the loss.
    pub reward_weight: f32,
    /// Share of the sequences that is held out, or of the samples at the end of a single one.
    pub held_out: f64,
    /// Decides what is held out, and the order.
    pub seed: u64,
}

impl Default for LimbicSettings {
    fn default() -> LimbicSettings {
        LimbicSettings {
            n_epochs: 50,
            length: 16,
            n_batch: 32,
            lr: 0.05,
            clip_norm: 1.0,
            reward_weight: 0.5,
            held_out: 0.1,
            seed: 0,
        }
    }
}

impl LimbicSettings {
    fn check(&self) -> Result<()> {
        let LimbicSettings { length, n_batch, lr, clip_norm, reward_weight, held_out, .. } = *self;
        let is_size = |x: f64| x.is_finite() && x > 0.0;
        let problem = match () {
            _ if !(1..=1024).contains(&length) => format!("a length of {length}, not 1 to 1024"),
            _ if !(1..=4096).contains(&n_batch) => {
                format!("a batch of {n_batch} sequences, not 1 to 4096")
            }
            _ if !is_size(lr) || !is_size(clip_norm) => {
                format!("a rate of {lr} and a norm of {clip_norm}, not above zero")
            }
            _ if !(reward_weight >= 0.0 && reward_weight.is_finite()) => {
                format!("a reward weight of {reward_weight}, not zero or more")
            }
            _ if !(0.0..1.0).contains(&held_out) => {
                format!("a held-out share of {held_out}, not 0 to below 1")
            }
            _ => return Ok(()),
        };
        Err(Error::input(problem, "the defaults are a good start"))
    }
}

/// How near a head comes to samples: means over all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LimbicScore {
    /// Sequences.
    pub n_sequences: usize,
    /// Samples.
    pub n_samples: usize,
    /// `delta + reward_weight * reward`.
    pub loss: f64,
    /// Half the squared error of the change.
    pub delta: f64,
    /// Half the squared error of the reward.
    pub reward: f64,
    /// The loss of a head that never moves the state and expects no reward.
    pub loss_still: f64,
}

type Sequence<'a> = Vec<&'a LimbicSample>;

impl Limbic {
    /// Trains on samples; `tell` hears after each epoch its number and its mean loss, and may stop.
    /// Returns the scores before and after on what is held out, if anything is. Fails where the
    /// loss or a gradient is not finite, without that step.
    pub fn train(
        &mut self,
        samples: &[LimbicSample],
        settings: &LimbicSettings,
        mut tell: impl FnMut(usize, f64) -> ControlFlow<()>,
    ) -> Result<Option<[LimbicScore; 2]>> {
        settings.check()?;
        self.check_samples(samples)?;
        let (trained, held) = divide(sequences(samples), settings);
        self.reward_weight = settings.reward_weight;
        self.weights.train(|_, _| true);
        let mut optimizer = Optimizer::new(&self.weights, OptimizerKind::AdamW);
        let before = self.score_sequences(&held)?;
        for epoch in 0..settings.n_epochs {
            let rng = Rng::new(settings.seed, ORDER + epoch as u64);
            let order = shuffled(&trained, &rng);
            let mut sum = 0.0;
            for batch in order.chunks(settings.n_batch) {
                let mut walk = Walk::new(self, batch);
                while let Some((window, rows)) = walk.next(settings.length) {
                    let (loss, hidden) =
                        self.train_window(&window, &rows, &mut optimizer, settings)?;
                    sum += loss * rows.len() as f64;
                    walk.carry(&hidden, &window.segments);
                }
            }
            let n_samples: usize = trained.iter().map(Vec::len).sum();
            if tell(epoch + 1, sum / n_samples as f64).is_break() {
                break;
            }
        }
        let after = self.score_sequences(&held)?;
        Ok((!held.is_empty()).then_some([before, after]))
    }

    /// How near it comes to samples; every sequence starts without a hidden state.
    pub fn score(&self, samples: &[LimbicSample]) -> Result<LimbicScore> {
        self.check_samples(samples)?;
        self.score_sequences(&sequences(samples))
    }

    fn check_samples(&self, samples: &[LimbicSample]) -> Result<()> {
        if samples.is_empty() {
            return Err(Error::input("there are no samples", "give at least one"));
        }
        for (idx, sample) in samples.iter().enumerate() {
            let what = format!("sample {}", idx + 1);
            self.expect_inputs(&what, &sample.input)?;
            sample.check().map_err(|it| Error::input(format!("{what}: {it}"), "correct it"))?;
        }
        Ok(())
    }

    fn score_sequences(&self, list: &[Sequence]) -> Result<LimbicScore> {
        let n_samples: usize = list.iter().map(Vec::len).sum();
        let (mut delta, mut reward, mut still) = (0.0, 0.0, 0.0);
        let list: Vec<&Sequence> = list.iter().collect();
        for batch in list.chunks(LimbicSettings::default().n_batch) {
            let mut walk = Walk::new(self, batch);
            while let Some((window, rows)) = walk.next(N_SCORED) {
                let moved = self.forward(&Tape::off(), &window);
                let [deltas, rewards] = [moved.delta, moved.reward].map(|it| it.value().to_vec());
                self.weights.device().check()?;
                for ((row, d), r) in rows.iter().zip(deltas.chunks_exact(N_DIM)).zip(rewards) {
                    delta += half_square(d, &row.target);
                    reward += half_square(&[r], &[row.reward]);
                    still += half_square(&[0.0; N_DIM], &row.target)
                        + f64::from(self.reward_weight) * half_square(&[0.0], &[row.reward]);
                }
                walk.carry(moved.hidden.value(), &window.segments);
            }
        }
        let [delta, reward, loss_still] =
            [delta, reward, still].map(|sum| sum / n_samples.max(1) as f64);
        let loss = delta + f64::from(self.reward_weight) * reward;
        Ok(LimbicScore { n_sequences: list.len(), n_samples, loss, delta, reward, loss_still })
    }

    /// Mean loss of the rows of a window, gradients, and the hidden states.
    pub(super) fn gradients(
        &self,
        window: &Window,
        rows: &[&LimbicSample],
        reward_weight: f32,
    ) -> (Var, Gradients, Tensor) {
        let (tape, device, share) = (Tape::new(), self.weights.device(), 1.0 / rows.len() as f32);
        let moved = self.forward(&tape, window);
        let targets: Vec<f32> = rows.iter().flat_map(|row| row.target).collect();
        let targets = Tensor::from_f32(device, &[rows.len(), N_DIM], &targets);
        let rewards: Vec<f32> = rows.iter().map(|row| row.reward).collect();
        let rewards = Tensor::from_f32(device, &[rows.len(), 1], &rewards);
        let of_delta = square_error(&tape, &moved.delta, &targets, share);
        let of_reward = square_error(&tape, &moved.reward, &rewards, reward_weight * share);
        let loss = add(&tape, &of_delta, &of_reward);
        let mut grads = Gradients::default();
        tape.backward(&loss, 1.0, &mut grads);
        (loss, grads, moved.hidden.value().clone())
    }

    /// One step; the loss before it, and the hidden states.
    fn train_window(
        &mut self,
        window: &Window,
        rows: &[&LimbicSample],
        optimizer: &mut Optimizer,
        settings: &LimbicSettings,
    ) -> Result<(f64, Tensor)> {
        let (loss, grads, hidden) = self.gradients(window, rows, settings.reward_weight);
        let (loss, grad_norm) = (loss.value().to_vec()[0], global_norm(&grads));
        self.weights.device().check()?;
        if !loss.is_finite() || !grad_norm.is_finite() {
            return Err(Error::Diverged { loss, grad_norm });
        }
        let grad_scale = (settings.clip_norm / (grad_norm + 1e-6)).min(1.0);
        let adamw = AdamW { lr: settings.lr, grad_scale, ..AdamW::default() };
        optimizer.step(&mut self.weights, &grads, |weights: &Weights, id| {
            let decays = weights.role(id) == Role::Matrix;
            AdamW { weight_decay: if decays { adamw.weight_decay } else { 0.0 }, ..adamw }
        });
        Ok((f64::from(loss), hidden))
    }
}

fn half_square(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(x, y)| 0.5 * f64::from(x - y).powi(2)).sum()
}

/// Several sequences on their way, the longest first.
pub(super) struct Walk<'a> {
    sequences: Vec<&'a Sequence<'a>>,
    d_in: usize,
    /// Samples of each that are behind.
    n_done: usize,
    /// Where they are: (n_seq, d_hidden).
    hidden: Tensor,
}

impl<'a> Walk<'a> {
    pub(super) fn new(limbic: &Limbic, batch: &[&'a Sequence<'a>]) -> Walk<'a> {
        let mut sequences = batch.to_vec();
        sequences.sort_by_key(|sequence| Reverse(sequence.len()));
        let shape = [sequences.len(), limbic.shape.d_hidden];
        let hidden = Tensor::zeros(limbic.weights.device(), &shape);
        Walk { sequences, d_in: limbic.shape.d_in, n_done: 0, hidden }
    }

    /// The next samples, up to `length` of each sequence that has more.
    pub(super) fn next(&mut self, length: usize) -> Option<(Window, Vec<&'a LimbicSample>)> {
        self.sequences.retain(|sequence| sequence.len() > self.n_done);
        let n_seq = self.sequences.len();
        if n_seq == 0 {
            return None;
        }
        let part = |sequence: &&'a Sequence<'a>| {
            &sequence[self.n_done..sequence.len().min(self.n_done + length)]
        };
        let parts: Vec<&[&LimbicSample]> = self.sequences.iter().map(part).collect();
        let lengths: Vec<usize> = parts.iter().map(|part| part.len()).collect();
        let rows = parts.concat();
        self.n_done += length;
        let inputs: Vec<f32> = rows.iter().flat_map(|row| row.input.iter().copied()).collect();
        let states: Vec<f32> = rows.iter().flat_map(|row| row.state.clamped()).collect();
        let device = self.hidden.device();
        let window = Window {
            inputs: Tensor::from_f32(device, &[rows.len(), self.d_in], &inputs),
            states: Tensor::from_f32(device, &[rows.len(), N_DIM], &states),
            hidden: self.hidden.rows(0..n_seq),
            segments: Segments::from_lengths(&lengths),
        };
        Some((window, rows))
    }

    /// Sequences are now where their last row of `hidden` says.
    fn carry(&mut self, hidden: &Tensor, segments: &Segments) {
        let ends: Vec<usize> = segments.iter().map(|segment| segment.rows().end - 1).collect();
        self.hidden = hidden.gather(&ends);
    }
}

/// What is trained on, and what is held out.
fn divide<'a>(
    list: Vec<Sequence<'a>>,
    settings: &LimbicSettings,
) -> (Vec<Sequence<'a>>, Vec<Sequence<'a>>) {
    let n_held = |n: usize| match settings.held_out > 0.0 {
        true => ((settings.held_out * n as f64).round() as usize).max(1).min(n - 1),
        false => 0,
    };
    if let [only] = &list[..] {
        let (train, held) = only.split_at(only.len() - n_held(only.len()));
        let held = if held.is_empty() { vec![] } else { vec![held.to_vec()] };
        return (vec![train.to_vec()], held);
    }
    let n_held = n_held(list.len());
    let order = shuffled(&list, &Rng::new(settings.seed, HELD_OUT));
    let mut parts = order.into_iter().cloned();
    let held: Vec<Sequence> = parts.by_ref().take(n_held).collect();
    (parts.collect(), held)
}

fn shuffled<'a, T>(list: &'a [T], rng: &Rng) -> Vec<&'a T> {
    let mut order: Vec<&T> = list.iter().collect();
    for idx in (1..order.len()).rev() {
        order.swap(idx, rng.below(idx as u64, idx as u64 + 1) as usize);
    }
    order
}
