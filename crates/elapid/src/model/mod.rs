//! The one model: embed, layers, norm, head.
//!
//! `Model` is the shape: layers and what they want of their parameters. The numbers are in
//! `Weights`, what a sequence carries in `State`. The same functions train (a tape that records,
//! no states) and generate (a tape that does not, one state per segment).

#[cfg(feature = "fs")]
pub mod adapter;
mod builder;
pub mod checkpoint;
pub mod config;
pub mod export;
mod feed_forward;
pub mod gguf_lora;
pub mod info;
mod layer;
pub mod lora;
pub mod mixers;
#[cfg(feature = "fs")]
pub mod open;
pub mod pages;
pub mod params;
mod pass;
pub mod peft;
pub mod place;
#[cfg(feature = "fs")]
pub mod save;
pub mod state;
pub mod weights;

use crate::error::{Error, Result};
use crate::model::builder::Builder;
use crate::model::config::Config;
use crate::model::layer::{Layer, LayerOut, Stream};
use crate::model::pass::Pass;
use crate::model::place::Place;
use crate::model::state::{CacheType, Slot, State};
use crate::model::weights::{Init, LinearIds, ParamId, Role, Spec, Weights};
use crate::ops::add::add;
use crate::ops::embedding::embedding;
use crate::ops::head_loss::{Teacher, TokenLoss, head_loss};
use crate::ops::linear::linear;
use crate::ops::scale::scale;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::batch::{Batch, Targets};
use crate::tensor::device::Device;

pub struct Model {
    config: Config,
    specs: Vec<Spec>,
    slots: Vec<Slot>,
    embed: ParamId,
    layers: Vec<Layer>,
    norm: ParamId,
    head: LinearIds,
}

/// Name of a head that is not the embedding.
pub(crate) const HEAD: &str = "lm_head.weight";

#[derive(Clone, Copy)]
pub struct ForwardOptions<'a> {
    /// Keep only the input of each layer and compute the rest again in backward.
    pub checkpoint: bool,
    /// Return the residual stream at every layer.
    pub keep_hidden: bool,
    /// Share of this batch in a step, by which the load balance is weighed.
    pub balance_share: f32,
    /// What the loss follows besides the targets.
    pub teacher: Option<&'a Teacher>,
}

impl Default for ForwardOptions<'_> {
    fn default() -> Self {
        let (checkpoint, keep_hidden, teacher) = (false, false, None);
        ForwardOptions { checkpoint, keep_hidden, balance_share: 1.0, teacher }
    }
}

pub struct Forward {
    /// After the final norm: (n_tok, d_model).
    pub hidden: Var,
    /// Mean load-balance loss of the layers with experts, if they are trained.
    pub balance: Option<Var>,
    /// With `keep_hidden`: the stream before each layer, after the last, and after the norm.
    pub stream: Vec<Tensor>,
}

pub struct ModelLoss {
    /// What is minimised: the mean negative log-likelihood, plus the load balance; with a teacher
    /// its share of the divergence too.
    pub loss: Var,
    /// Where there is a teacher: what `loss` would be without it, and the mean divergence.
    pub parts: Option<[Tensor; 2]>,
    /// The mean negative log-likelihood, token by token.
    pub tokens: TokenLoss,
}

impl Model {
    /// The shape that `config` describes.
    pub fn new(config: Config) -> Model {
        let mut builder = Builder::new(&config);
        let shape = [config.n_vocab, config.d_model];
        let init = Init::Normal(config.init_std);
        let embed = builder.add(config.embed_name.clone(), &shape, init, Role::Embedding);
        let layers = config.layers.iter();
        let layers = layers.map(|layer| Layer::new(&mut builder, &config, layer)).collect();
        let norm = builder.norm(config.norm_name.clone(), config.d_model);
        let weight = match config.tied {
            true => embed,
            false => {
                let init = builder.std.init(config.d_model);
                builder.add(HEAD.into(), &shape, init, Role::Matrix)
            }
        };
        let head = LinearIds { weight, bias: None };
        let (specs, slots) = (builder.specs, builder.slots);
        Model { specs, slots, embed, layers, norm, head, config }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What it wants of its parameters, in the order of their ids.
    pub fn specs(&self) -> &[Spec] {
        &self.specs
    }

    /// The layer that a parameter belongs to, if it does.
    pub fn layer_of(&self, id: ParamId) -> Option<usize> {
        self.layers.iter().position(|layer| layer.params.contains(&id.0))
    }

    /// Where its parameters are in a directory of its own family, in the order of their ids.
    pub fn places(&self) -> Vec<Place> {
        self.specs.iter().map(Spec::place).collect()
    }

    /// A state before the first token.
    pub fn state(&self, device: &Device) -> State {
        self.state_with(device, CacheType::F32).expect("f32 takes rows of any width")
    }

    /// A state before the first token, its keys and values stored as `kind`.
    pub fn state_with(&self, device: &Device, kind: CacheType) -> Result<State> {
        State::new(device, &self.slots, kind)
    }

    /// Bytes of a state before the first token, and what each token adds to caches in f32.
    pub fn state_bytes(&self) -> [usize; 2] {
        let add = |sum: [usize; 2], more: [usize; 2]| [sum[0] + more[0], sum[1] + more[1]];
        self.slots.iter().map(Slot::n_bytes).fold([0; 2], add)
    }

    pub(crate) fn check_tokens(&self, ids: &[u32]) -> Result<()> {
        let n_vocab = self.config.n_vocab;
        match ids.iter().find(|&&id| id as usize >= n_vocab) {
            Some(id) => Err(Error::input(
                format!("token {id} is outside the vocabulary of {n_vocab}"),
                "the tokenizer may belong to another model",
            )),
            None => Ok(()),
        }
    }

    /// One state per segment, each where its segment continues.
    fn check_states(&self, batch: &Batch, states: &[State]) -> Result<()> {
        let (n_states, n_segments) = (states.len(), batch.segments.len());
        let mut pairs = states.iter().zip(batch.segments.iter());
        let wrong = pairs.find(|(state, segment)| state.n_tok != segment.offset);
        let problem = match wrong {
            _ if n_states != n_segments => format!("{n_states} states for {n_segments} sequences"),
            Some((State { n_tok, .. }, segment)) => {
                format!("a state has seen {n_tok} tokens, its sequence is at {}", segment.offset)
            }
            None => return Ok(()),
        };
        let hint = "give one state per sequence, and each sequence at least one token";
        Err(Error::input(problem, hint))
    }

    fn check_targets(&self, batch: &Batch, targets: &Targets) -> Result<()> {
        let (n_tok, n_vocab) = (batch.tokens.len(), self.config.n_vocab);
        let (n_ids, n_weights) = (targets.ids.len(), targets.weights.len());
        let mut weighed = targets.ids.iter().zip(targets.weights).filter(|pair| *pair.1 != 0.0);
        let problem = if (n_ids, n_weights) != (n_tok, n_tok) {
            format!("{n_ids} targets and {n_weights} weights for {n_tok} tokens")
        } else if let Some((id, _)) = weighed.find(|pair| *pair.0 as usize >= n_vocab) {
            format!("target {id} is outside the vocabulary of {n_vocab}")
        } else if !(targets.norm.is_finite() && targets.norm > 0.0) {
            format!("the weights of the targets sum to {}", targets.norm)
        } else {
            return Ok(());
        };
        let hint = "targets are what follows each token, with a weight of zero where there is none";
        Err(Error::input(problem, hint))
    }

    /// The hidden rows of a batch. With `states`, one per segment, sequences continue from there.
    pub fn forward<'w>(
        &'w self,
        tape: &Tape<'w>,
        weights: &'w Weights,
        batch: &Batch,
        mut states: Option<&mut [State]>,
        options: ForwardOptions,
    ) -> Result<Forward> {
        assert_eq!(batch.tokens.len(), batch.segments.n_tok(), "a batch's segments cover its rows");
        self.check_tokens(&batch.tokens)?;
        if let Some(states) = states.as_deref() {
            self.check_states(batch, states)?;
        }
        let segments = &batch.segments;
        let wants_balance = tape.is_recording() && self.config.balance_scale != 0.0;
        let pass = Pass { tape, weights, segments, wants_balance };
        let h = embedding(tape, &weights.var(tape, self.embed), &batch.tokens);
        let h = scale(tape, &h, self.config.embed_scale);
        let mut stream = Stream { h, branch: None };
        let (mut kept, mut balances) = (Vec::new(), Vec::new());
        for layer in &self.layers {
            // A frozen layer on frozen input records nothing that a checkpoint could save.
            let is_trained = stream.needs_grad() || weights.any_trained(layer.params.clone());
            let out = match options.checkpoint && states.is_none() && is_trained {
                true => checkpointed(&pass, layer, stream),
                false => layer.forward(&pass, &stream, states.as_deref_mut()),
            };
            if options.keep_hidden {
                kept.push(out.entered.value().clone());
            }
            stream = out.stream;
            balances.extend(out.balance);
        }
        let (last, hidden) = stream.join(&pass, self.norm, self.config.eps);
        if options.keep_hidden {
            kept.extend([last.value().clone(), hidden.value().clone()]);
        }
        if let Some(states) = states {
            for (state, segment) in states.iter_mut().zip(segments.iter()) {
                state.n_tok += segment.n_tok;
            }
        }
        weights.check()?;
        Ok(Forward { hidden, balance: mean(tape, balances), stream: kept })
    }

    /// Logits of hidden rows: (n, n_vocab).
    pub fn logits(&self, tape: &Tape, weights: &Weights, hidden: &Var) -> Var {
        let logits = linear(tape, hidden, &weights.linear(tape, &self.head));
        scale(tape, &logits, self.config.logit_scale)
    }

    /// The loss of a batch. `targets` are aligned with the tokens: what follows each.
    pub fn loss<'w>(
        &'w self,
        tape: &Tape<'w>,
        weights: &'w Weights,
        batch: &Batch,
        targets: &Targets,
        options: ForwardOptions,
    ) -> Result<ModelLoss> {
        self.check_targets(batch, targets)?;
        let forward = self.forward(tape, weights, batch, None, options)?;
        let head = weights.linear(tape, &self.head);
        let head = (&head, self.config.logit_scale);
        let out = head_loss(tape, &forward.hidden, head, targets, options.teacher);
        let balance = forward.balance.filter(|_| self.config.balance_scale != 0.0);
        let factor = self.config.balance_scale * options.balance_share;
        let balanced = |tape: &Tape, loss: Var| match &balance {
            Some(balance) => add(tape, &loss, &scale(tape, balance, factor)),
            None => loss,
        };
        let parts = out.parts.map(|[likelihood, divergence]| {
            let likelihood = balanced(&Tape::off(), Var::constant(likelihood));
            [likelihood.value().clone(), divergence]
        });
        Ok(ModelLoss { loss: balanced(tape, out.loss), parts, tokens: out.tokens })
    }

    /// Hidden rows and head for another model to learn from, at this temperature and share.
    pub fn teach(
        &self,
        weights: &Weights,
        batch: &Batch,
        (temperature, share): (f32, f32),
    ) -> Result<Teacher> {
        let tape = Tape::off();
        let forward = self.forward(&tape, weights, batch, None, ForwardOptions::default())?;
        let (hidden, head) = (forward.hidden.value().clone(), weights.linear(&tape, &self.head));
        Ok(Teacher { hidden, head, factor: self.config.logit_scale, temperature, share })
    }
}

fn checkpointed<'w>(pass: &Pass<'_, 'w>, layer: &'w Layer, stream: Stream) -> LayerOut {
    let (weights, segments) = (pass.weights, pass.segments.clone());
    let wants_balance = pass.wants_balance;
    let factor = stream.branch.as_ref().map(|branch| branch.1);
    let branch = stream.branch.as_ref().map(|branch| &branch.0);
    let inputs: Vec<&Var> = std::iter::once(&stream.h).chain(branch).collect();
    let span = move |tape: &Tape<'w>, vars: &[Var]| {
        let pass = Pass { tape, weights, segments: &segments, wants_balance };
        let branch = vars.get(1).zip(factor).map(|(branch, factor)| (branch.clone(), factor));
        let out = layer.forward(&pass, &Stream { h: vars[0].clone(), branch }, None);
        let branch = out.stream.branch.expect("a layer leaves a branch").0;
        let mut list = vec![out.stream.h, branch, out.entered];
        list.extend(out.balance);
        list
    };
    let mut outputs = pass.tape.checkpoint(&inputs, span).into_iter();
    let mut next = || outputs.next().expect("a layer has three outputs");
    let (h, branch, entered) = (next(), next(), next());
    let stream = Stream { h, branch: Some((branch, layer.residual_scale)) };
    LayerOut { stream, entered, balance: outputs.next() }
}

fn mean(tape: &Tape, balances: Vec<Var>) -> Option<Var> {
    let n = balances.len() as f32;
    let sum = balances.into_iter().reduce(|sum, next| add(tape, &sum, &next))?;
    Some(scale(tape, &sum, 1.0 / n))
}
