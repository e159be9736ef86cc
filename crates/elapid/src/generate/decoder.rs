//! The next tokens of sequences, and on CUDA one token after another as recorded work.
//!
//! A token takes a few hundred launches, each of which costs the host more than the device. So what
//! a step starts is recorded (`gpu::graph`) and from then on started as one. What changes from
//! token to token the kernels read from memory: ids of tokens and positions, written before each
//! start. Models and ops do not know of it; `Segments::repeated` tells them how far positions may
//! go, so that caches have room and tables are long enough.
//!
//! Recorded work is bound to the places of what it reads and writes. It is started only for the
//! weights and for the states that it was recorded with, as long as everything that it writes is
//! nobody else's: a state that was cloned takes the plain way, which copies, and is recorded anew.
//!
//! The host chooses experts, so a model with experts is not recorded.

use crate::error::Result;
use crate::model::config::FeedForwardConfig;
use crate::model::state::State;
use crate::model::weights::Weights;
use crate::model::{ForwardOptions, Model};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::batch::Batch;
use crate::tensor::gpu::Gpu;
use crate::tensor::gpu::graph::Graph;

/// Tokens that recorded work serves where there are caches.
const N_AHEAD: usize = 256;
/// Recordings kept, at most: of groups of sequences that take turns.
const N_KEPT: usize = 4;

/// Advances sequences of one model.
pub struct Decoder {
    /// The last used first.
    kept: Vec<Kept>,
    /// Tokens that recorded work serves where there are caches: they have room for as many.
    n_ahead: usize,
}

/// A step of some sequences, recorded or about to be.
struct Kept {
    graph: Graph<Option<Tensor>>,
    weights: Weights,
    /// Of the recording; nothing before there is one.
    batch: Option<Batch>,
    /// Of the states behind the last step.
    places: Vec<u64>,
    /// Of each sequence, the tokens up to which it may go.
    until: Vec<usize>,
}

impl Decoder {
    pub fn new() -> Decoder {
        Decoder { kept: Vec::new(), n_ahead: N_AHEAD }
    }

    /// Takes the next tokens of each sequence, at least one; the logits behind its last `n_wanted`
    /// tokens, sequence by sequence: (sum of n_wanted, n_vocab). They are to be read before the next
    /// call: recorded work writes the next ones into the same place.
    pub fn advance(
        &mut self,
        model: &Model,
        weights: &Weights,
        next: &[&[u32]],
        states: &mut [State],
        n_wanted: &[usize],
    ) -> Result<Option<Tensor>> {
        let is_single = next.iter().all(|ids| ids.len() == 1) && n_wanted.iter().all(|n| *n == 1);
        let done = match weights.device().gpu() {
            Some(gpu) if gpu.caps().graphs && is_single && can_record(model) => {
                let ids: Vec<u32> = next.concat();
                self.step(gpu, model, weights, &ids, states)
            }
            _ => {
                let parts: Vec<(&[u32], usize)> =
                    next.iter().zip(states.iter()).map(|(ids, it)| (*ids, it.n_tok)).collect();
                let batch = Batch::continuing(&parts);
                forward(model, weights, &batch, states, n_wanted)
            }
        };
        weights.device().check().and(done)
    }

    /// The same, read at once.
    pub fn advance_now(
        &mut self,
        model: &Model,
        weights: &Weights,
        next: &[&[u32]],
        states: &mut [State],
        n_wanted: &[usize],
    ) -> Result<Vec<f32>> {
        let logits = self.advance(model, weights, next, states, n_wanted)?;
        let numbers = logits.map_or_else(Vec::new, |logits| logits.to_vec());
        weights.device().check().inspect_err(|_| self.forget())?;
        Ok(numbers)
    }

    /// Forgets what is recorded, after a failure that was seen when its results were read.
    pub fn forget(&mut self) {
        self.kept.clear();
    }

    /// One token for each sequence. What fails is not kept: its recording is not whole.
    fn step(
        &mut self,
        gpu: &Gpu,
        model: &Model,
        weights: &Weights,
        ids: &[u32],
        states: &mut [State],
    ) -> Result<Option<Tensor>> {
        let can_step = states.iter_mut().all(State::can_step);
        let places = places(states);
        let is_this = |kept: &Kept| {
            let mut pairs = kept.until.iter().zip(states.iter());
            kept.places == places
                && pairs.all(|(until, state)| state.n_tok < *until)
                && kept.weights.is_same(weights)
        };
        let found = self.kept.iter().position(is_this).filter(|_| can_step);
        let mut kept = match found {
            Some(idx) => self.kept.remove(idx),
            None => {
                // As far as one likes where nothing grows.
                let until = |state: &State| match state.has_cache() {
                    true => state.n_tok + self.n_ahead,
                    false => usize::MAX,
                };
                let until = states.iter().map(until).collect();
                let (graph, weights) = (Graph::new(gpu), weights.share());
                Kept { graph, weights, batch: None, places, until }
            }
        };
        let logits = kept.step(model, weights, ids, states)?;
        weights.device().check()?;
        self.kept.truncate(N_KEPT - 1);
        self.kept.insert(0, kept);
        Ok(logits)
    }
}

impl Kept {
    fn step(
        &mut self,
        model: &Model,
        weights: &Weights,
        ids: &[u32],
        states: &mut [State],
    ) -> Result<Option<Tensor>> {
        model.check_tokens(ids)?;
        if let Some(batch) = &self.batch {
            batch.tokens.step_on(ids);
            let positions: Vec<u32> = states.iter().map(|state| state.n_tok as u32).collect();
            batch.segments.step_on(&positions);
            states.iter_mut().for_each(State::step_on);
            return Ok(self.graph.run(|| None).clone());
        }
        let parts: Vec<(&[u32], usize)> =
            ids.chunks(1).zip(states.iter()).map(|(id, state)| (id, state.n_tok)).collect();
        let left = self.until.iter().zip(&parts).map(|(until, part)| until - part.1 - 1);
        let n_ahead = left.min().unwrap_or(0);
        self.until = parts.iter().map(|part| part.1 + 1 + n_ahead).collect();
        let batch = Batch::repeated(&parts, n_ahead);
        // Written before each start, and not by what is recorded.
        let device = weights.device();
        drop((batch.tokens.on(device), batch.segments.positions(device)));
        let mut failed = None;
        let n_wanted = vec![1; ids.len()];
        let logits = self.graph.run(|| {
            let got = forward(model, weights, &batch, states, &n_wanted);
            got.unwrap_or_else(|error| {
                failed = Some(error);
                None
            })
        });
        let logits = logits.clone();
        if let Some(error) = failed {
            return Err(error);
        }
        weights.device().check()?;
        let places = places(states);
        if self.graph.is_recorded() {
            assert_eq!(self.places, places, "a recorded step changes states where they are");
            self.batch = Some(batch);
        }
        self.places = places;
        Ok(logits)
    }
}

/// Whether the host has no say in the middle of a pass.
fn can_record(model: &Model) -> bool {
    let layers = &model.config().layers;
    !layers.iter().any(|layer| matches!(layer.feed_forward, FeedForwardConfig::Experts(_)))
}

fn places(states: &[State]) -> Vec<u64> {
    states.iter().flat_map(State::places).collect()
}

/// The logits behind the last tokens of each sequence; nothing where none are wanted.
fn forward(
    model: &Model,
    weights: &Weights,
    batch: &Batch,
    states: &mut [State],
    n_wanted: &[usize],
) -> Result<Option<Tensor>> {
    let (tape, options) = (Tape::off(), ForwardOptions::default());
    let hidden = model.forward(&tape, weights, batch, Some(states), options)?.hidden;
    let rows = batch.segments.iter().zip(n_wanted);
    let rows: Vec<usize> =
        rows.flat_map(|(part, n)| part.rows().end - n..part.rows().end).collect();
    if rows.is_empty() {
        return Ok(None);
    }
    let hidden = match rows.len() == batch.tokens.len() {
        true => hidden,
        false => Var::constant(hidden.value().gather(&rows)),
    };
    Ok(Some(model.logits(&tape, weights, &hidden).value().clone()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::Config;
    use crate::tensor::device::Device;
    use crate::tensor::rng::Rng;

    /// A small model with a layer of every kind that is recorded.
    fn fixture(device: &Device) -> (Model, Weights) {
        let config = serde_json::json!({
            "model_type": "elapid", "vocab_size": 40, "d_model": 16,
            "layers": ["mamba1", {"mixer": "short_conv", "feed_forward": "dense"}, "mamba2",
                       "mamba3", "attention"],
            "tied": true, "eps": 1e-3, "init_std": 0.2, "n_ctx": 64,
            "mamba1": {"d_state": 4, "d_conv": 3, "expand": 2, "delta_rank": 2},
            "mamba2": {"d_state": 8, "d_head": 8, "n_group": 2, "d_conv": 4, "expand": 2},
            "mamba3": {"d_state": 8, "d_head": 8, "n_group": 2, "rank": 2, "out_norm": true},
            "attention": {"n_head": 4, "n_kv_head": 2, "d_head": 16, "window": 70},
            "dense": {"d_ff": 24, "activation": "gelu"},
        });
        let config = Config::from_json("config", &config.to_string()).unwrap();
        let model = Model::new(config);
        let weights = Weights::init(device, model.specs(), 3);
        (model, weights)
    }

    fn cuda() -> impl Iterator<Item = &'static Device> {
        let devices = crate::ops::check::devices().iter().map(|it| &it.0);
        devices.filter(|device| device.gpu().unwrap().caps().graphs)
    }

    fn token(n: usize) -> u32 {
        Rng::new(5, 1).below(n as u64, 40) as u32
    }

    /// The way without recordings.
    fn plain(model: &Model, weights: &Weights, ids: &[u32], states: &mut [State]) -> Vec<f32> {
        let parts = ids.chunks(ids.len() / states.len()).zip(states.iter());
        let parts: Vec<(&[u32], usize)> = parts.map(|(ids, it)| (ids, it.n_tok)).collect();
        let n_wanted = vec![1; states.len()];
        let batch = Batch::continuing(&parts);
        forward(model, weights, &batch, states, &n_wanted).unwrap().unwrap().to_vec()
    }

    fn step(
        decoder: &mut Decoder,
        (model, weights): (&Model, &Weights),
        ids: &[u32],
        states: &mut [State],
    ) -> Vec<f32> {
        let next: Vec<&[u32]> = ids.chunks(1).collect();
        let n_wanted = vec![1; ids.len()];
        decoder.advance_now(model, weights, &next, states, &n_wanted).unwrap()
    }

    #[test]
    fn recorded_steps_have_the_bits_of_plain_ones_across_every_recording() {
        for device in cuda() {
            let (model, weights) = fixture(device);
            let mut decoder = Decoder { n_ahead: 30, ..Decoder::new() };
            let (mut state, mut want_state) = ([model.state(device)], [model.state(device)]);
            let mut n_recorded = 0;
            // Past splits of keys, the first room of a cache, and the window.
            for n in 0..150 {
                let want = plain(&model, &weights, &[token(n)], &mut want_state);
                let got = step(&mut decoder, (&model, &weights), &[token(n)], &mut state);
                assert!(got == want, "token {n} on {device:?}");
                assert_eq!(state[0].n_tok, want_state[0].n_tok);
                let is_recorded = |kept: &Kept| kept.graph.is_recorded();
                n_recorded += usize::from(decoder.kept.first().is_some_and(is_recorded));
            }
            assert!(n_recorded >= 130, "{n_recorded} of 150 were recorded");
            // Some tokens at once, and on again.
            let ids = [1, 2, 3];
            let want = plain(&model, &weights, &ids, &mut want_state);
            let got = decoder.advance_now(&model, &weights, &[&ids], &mut state, &[1]).unwrap();
            assert!(got == want, "three tokens on {device:?}");
            for n in 0..5 {
                let want = plain(&model, &weights, &[token(n)], &mut want_state);
                let got = step(&mut decoder, (&model, &weights), &[token(n)], &mut state);
                assert!(got == want, "token {n} after three on {device:?}");
            }
            let error = decoder.advance(&model, &weights, &[&[40]], &mut state, &[1]).unwrap_err();
            assert!(error.report().contains("token 40 is outside"), "{error}");
        }
    }

    #[test]
    fn a_fork_goes_on_beside_what_it_was_taken_from() {
        for device in cuda() {
            let (model, weights) = fixture(device);
            let mut decoder = Decoder::new();
            let (mut trunk, mut want_trunk) = ([model.state(device)], [model.state(device)]);
            for n in 0..6 {
                plain(&model, &weights, &[token(n)], &mut want_trunk);
                step(&mut decoder, (&model, &weights), &[token(n)], &mut trunk);
            }
            let (mut fork, mut want_fork) = (trunk.clone(), want_trunk.clone());
            let snapshot = trunk.clone();
            for n in 6..14 {
                let ids = [token(n), token(n + 50)];
                let want = plain(&model, &weights, &ids[..1], &mut want_trunk);
                let got = step(&mut decoder, (&model, &weights), &ids[..1], &mut trunk);
                assert!(got == want, "trunk, token {n} on {device:?}");
                let want = plain(&model, &weights, &ids[1..], &mut want_fork);
                let got = step(&mut decoder, (&model, &weights), &ids[1..], &mut fork);
                assert!(got == want, "fork, token {n} on {device:?}");
            }
            assert!(decoder.kept[..2].iter().all(|kept| kept.graph.is_recorded()));
            // Nobody wrote into the snapshot.
            let mut late = snapshot;
            let mut want_late = [model.state(device)];
            plain(&model, &weights, &(0..6).map(token).collect::<Vec<_>>(), &mut want_late);
            for n in 6..10 {
                let want = plain(&model, &weights, &[token(n)], &mut want_late);
                let got = step(&mut decoder, (&model, &weights), &[token(n)], &mut late);
                let off = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(off < 0.05, "snapshot, token {n} on {device:?}: {off}");
            }
        }
    }

    #[test]
    fn sequences_go_on_together_and_alone() {
        for device in cuda() {
            let (model, weights) = fixture(device);
            let mut decoder = Decoder::new();
            let states = || vec![model.state(device), model.state(device)];
            let (mut both, mut want_both) = (states(), states());
            // One is ahead of the other.
            plain(&model, &weights, &[7, 8, 9], &mut both[1..]);
            plain(&model, &weights, &[7, 8, 9], &mut want_both[1..]);
            for n in 0..8 {
                let ids = [token(n), token(n + 70)];
                let want = plain(&model, &weights, &ids, &mut want_both);
                let got = step(&mut decoder, (&model, &weights), &ids, &mut both);
                assert!(got == want, "both, token {n} on {device:?}");
            }
            for n in 8..13 {
                let want = plain(&model, &weights, &[token(n)], &mut want_both[1..]);
                let got = step(&mut decoder, (&model, &weights), &[token(n)], &mut both[1..]);
                assert!(got == want, "one, token {n} on {device:?}");
            }
            for n in 13..16 {
                let ids = [token(n), token(n + 70)];
                let want = plain(&model, &weights, &ids, &mut want_both);
                let got = step(&mut decoder, (&model, &weights), &ids, &mut both);
                assert!(got == want, "both again, token {n} on {device:?}");
            }
        }
    }

    #[test]
    fn weights_that_are_not_those_of_the_recording_are_seen() {
        for device in cuda() {
            let (model, weights) = fixture(device);
            let others = Weights::init(device, model.specs(), 4);
            let mut decoder = Decoder { n_ahead: 10, ..Decoder::new() };
            let (mut state, mut want_state) = ([model.state(device)], [model.state(device)]);
            for n in 0..30 {
                let weights = if n % 6 < 4 { &weights } else { &others };
                let want = plain(&model, weights, &[token(n)], &mut want_state);
                let got = step(&mut decoder, (&model, weights), &[token(n)], &mut state);
                assert!(got == want, "token {n} on {device:?}");
            }
        }
    }
}
