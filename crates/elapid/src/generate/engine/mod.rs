//! Requests to a model, several at once: what a server, a chat and a command line have in common.
//!
//! An `Engine` belongs to one thread. `submit` takes a request, `step` advances everything that
//! runs by a little and says what happened, `cancel` ends a request early. There is no clock and
//! no channel here: whoever owns the engine decides when to step and where events go.
//!
//! A step is one piece of one prompt, or one pass of all answers, in turn where there are both:
//! answers flow on while prompts are read. The prompt with the least left to read comes first, and
//! now and then the oldest, so that none waits for ever. Answers with the same adapters advance in
//! one pass, which reads the weights once for all of them.
//!
//! A failure belongs to the requests of the pass that it happened in: they end with it, and
//! everything else stays as it was. Where the memory of a GPU runs out, snapshots are dropped and a
//! prompt is read once more, without keeping any.
//!
//! What an answer becomes depends on its request alone: the draw of a token is a function of the
//! seed and of its place in the answer, and pieces of prompts are the same whatever was kept.

mod adapters;
mod constraint;
mod lookup;
mod request;
mod slot;
mod snapshots;
mod stops;
#[cfg(test)]
mod tests;

pub use self::request::{
    Constraint, EngineSettings, Event, Finish, Reason, Refusal, Request, RequestId, Running, Stats,
    Token,
};
pub use self::snapshots::PIECE;

use self::adapters::Adapters;
use self::constraint::Grammars;
use self::slot::Slot;
use self::snapshots::Snapshots;
use crate::tensor::batch::Batch;

use crate::error::{Error, Result};
use crate::generate::decoder::Decoder;
use crate::generate::sample::Row;
use crate::model::lora::Lora;
use crate::model::state::{CacheType, State};
use crate::model::weights::{Arithmetic, Weights};
use crate::model::{ForwardOptions, Model};
use crate::ops::largest::{can_find, largest};
use crate::tape::Tape;
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::failpoint;
use crate::tensor::gpu::later::block_on;
use crate::text::tokenizer::Tokenizer;
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A model that answers requests.
pub struct Engine {
    model: Arc<Model>,
    adapters: Adapters,
    tokenizer: Arc<Tokenizer>,
    /// Made when the first constraint comes.
    grammars: Option<Grammars>,
    settings: EngineSettings,
    /// How keys and values are stored.
    cache: CacheType,
    snapshots: Snapshots,
    decoder: Decoder,
    running: Vec<Slot>,
    waiting: VecDeque<Slot>,
    n_taken: u64,
    /// Whether the last step read a prompt.
    has_read: bool,
    /// Pieces that were read since the start.
    n_pieces: u64,
    /// The counters of it.
    totals: Stats,
}

/// Tokens in a pass whose tasks are short, and sequences that are answered in one: as many as
/// linear maps take each by itself, so that no answer depends on those beside it.
const N_SHORT: usize = 16;
/// One piece in so many goes to the oldest prompt.
const OLDEST_EVERY: u64 = 4;

impl Engine {
    /// An engine for a model whose weights are loaded.
    pub(crate) fn new(
        model: Model,
        mut weights: Weights,
        tokenizer: Arc<Tokenizer>,
        settings: EngineSettings,
    ) -> Result<Engine> {
        weights.set_arithmetic(Arithmetic::Quick);
        let EngineSettings { n_slots, context, snapshot_bytes_max, .. } = settings;
        if n_slots == 0 || context < 2 {
            let problem = format!("{n_slots} sequences of {context} tokens");
            return Err(Error::input(problem, "give at least 1 sequence and 2 tokens"));
        }
        Ok(Engine {
            model: Arc::new(model),
            adapters: Adapters::new(weights),
            tokenizer,
            grammars: None,
            settings,
            cache: CacheType::F32,
            snapshots: Snapshots::new(snapshot_bytes_max),
            decoder: Decoder::new(),
            running: Vec::new(),
            waiting: VecDeque::new(),
            n_taken: 0,
            has_read: false,
            n_pieces: 0,
            totals: Stats::default(),
        })
    }

    /// Stores keys and values in another type than f32, if the heads of the model allow it; before
    /// the first request.
    pub(crate) fn with_cache(mut self, cache: CacheType) -> Result<Engine> {
        assert!(self.n_taken == 0, "the cache of an engine with {} requests", self.n_taken);
        self.model.state_with(self.device(), cache)?;
        self.cache = cache;
        Ok(self)
    }

    /// The shape of its model.
    #[cfg(test)]
    pub(crate) fn model(&self) -> &Model {
        &self.model
    }

    /// Text to ids.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// How it works.
    pub fn settings(&self) -> &EngineSettings {
        &self.settings
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        self.adapters.base().device()
    }

    /// Loads an adapter; returns its number.
    pub(crate) fn add_adapter(&mut self, name: &str, lora: Lora) -> Result<usize> {
        self.adapters.add(name, lora)
    }

    /// Numbers and names of the adapters that are loaded.
    #[cfg(test)]
    pub(crate) fn adapters(&self) -> Vec<(usize, &str)> {
        self.adapters.names()
    }

    /// Takes a request.
    pub fn submit(&mut self, request: Request) -> std::result::Result<RequestId, Refusal> {
        self.check(&request).map_err(Refusal::Bad)?;
        let n_there = self.running.len() + self.waiting.len();
        if n_there >= self.settings.n_slots + self.settings.n_waiting_max {
            return Err(Refusal::Full);
        }
        let slot = contained(|| self.slot(request)).map_err(Refusal::Bad)?;
        let id = slot.id;
        self.waiting.push_back(slot);
        Ok(id)
    }

    fn slot(&mut self, request: Request) -> Result<Slot> {
        let rule = match &request.constraint {
            None => None,
            Some(constraint) => {
                let made = self.grammars.take().map_or_else(|| Grammars::new(&self.tokenizer), Ok);
                Some(self.grammars.insert(made?).rule(constraint)?)
            }
        };
        let (combination, weights) = self.adapters.weights(&request.adapters)?;
        let keys = snapshots::keys(&combination, &request.prompt);
        let id = RequestId(self.n_taken);
        self.n_taken += 1;
        let context = self.settings.context;
        Ok(Slot::new((id, request), (keys, weights), &self.tokenizer, rule, context))
    }

    /// Whether a request can be answered at all.
    fn check(&self, request: &Request) -> Result<()> {
        request.sampling.check()?;
        let (n_prompt, context) = (request.prompt.len(), self.settings.context);
        if n_prompt == 0 {
            let hint = "start with the BOS token";
            return Err(Error::input("the prompt has no tokens", hint));
        }
        if n_prompt + request.n_max.min(1) > context {
            let problem = format!("the prompt has {n_prompt} tokens, the context holds {context}");
            return Err(Error::input(problem, "shorten the prompt, or use a larger context"));
        }
        let n_vocab = self.model.config().n_vocab;
        let biased = request.logit_bias.iter().map(|bias| bias.0);
        if let Some(id) =
            request.prompt.iter().copied().chain(biased).find(|&id| id as usize >= n_vocab)
        {
            let problem = format!("token {id} is outside the vocabulary of {n_vocab}");
            return Err(Error::input(problem, "the tokenizer may belong to another model"));
        }
        let is_bad = |bias: f32| bias.is_nan() || bias == f32::INFINITY;
        if let Some((id, bias)) = request.logit_bias.iter().find(|it| is_bad(it.1)) {
            let problem = format!("the bias of token {id} is {bias}");
            return Err(Error::input(problem, "give a number, or minus infinity to forbid it"));
        }
        Ok(())
    }

    /// Ends a request, wherever it is; there is no event for it any more.
    pub fn cancel(&mut self, id: RequestId) {
        self.waiting.retain(|slot| slot.id != id);
        self.running.retain(|slot| slot.id != id);
    }

    /// Whether nothing runs or waits.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Advances everything that runs by a little.
    ///
    /// What fails belongs to a request and ends it with `Reason::Failed`; the engine continues.
    /// Awaited in a browser.
    #[cfg(not(target_family = "wasm"))]
    pub fn step(&mut self) -> Vec<(RequestId, Event)> {
        block_on(self.step_later()).expect("a program of its own waits")
    }

    pub(crate) async fn step_later(&mut self) -> Vec<(RequestId, Event)> {
        while self.running.len() < self.settings.n_slots {
            let Some(mut slot) = self.waiting.pop_front() else { break };
            let mut state = new_state(&self.model, &slot, self.cache);
            if let Err(Error::OutOfMemory { .. }) = state {
                self.snapshots.clear();
                state = new_state(&self.model, &slot, self.cache);
            }
            slot.start(state);
            self.running.push(slot);
        }
        let mut events = Vec::new();
        let n_answering = self.running.iter().filter(|slot| slot.n_left() == 0).count();
        let n_reading = self.running.len() - n_answering;
        self.has_read = n_reading > 0 && (n_answering == 0 || !self.has_read);
        if self.has_read {
            self.read(&mut events).await;
        } else {
            self.answer(&mut events).await;
        }
        let n_tok = events.iter().filter(|event| matches!(event.1, Event::Token(_))).count();
        self.totals.n_answer_tok += n_tok as u64;
        self.sweep(&mut events);
        events
    }

    /// Reads one piece of one prompt.
    async fn read(&mut self, events: &mut Vec<(RequestId, Event)>) {
        let is_for_oldest = self.n_pieces % OLDEST_EVERY == OLDEST_EVERY - 1;
        self.n_pieces += 1;
        let Some(slot) = next_prompt(&mut self.running, is_for_oldest) else { return };
        let n_seen = slot.n_seen();
        // At every piece: another request may have come further since the last.
        let found = self.snapshots.find(slot.useful_keys());
        if let Some((n_pieces, state)) = found.filter(|it| it.0 * PIECE > n_seen) {
            slot.restore(n_pieces, state);
            self.totals.n_cached_tok += (slot.n_seen() - n_seen) as u64;
        }
        if slot.n_left() == 0 {
            return;
        }
        let (range, n_rows) = slot.piece();
        let begin = range.start;
        self.totals.n_prompt_tok += range.len() as u64;
        let next = [(slot.tokens[range].to_vec(), n_rows)];
        let rows = match pass(&self.model, &mut self.decoder, &mut [&mut *slot], &next).await {
            Ok(rows) => rows,
            Err(Error::OutOfMemory { .. }) if !slot.is_second_try => {
                self.snapshots.clear();
                slot.state = None;
                let state = new_state(&self.model, slot, self.cache);
                (slot.is_second_try, slot.n_cached) = (true, 0);
                return slot.start(state);
            }
            Err(error) => return slot.fail(&Arc::new(error)),
        };
        slot.keep(&mut self.snapshots);
        slot.tell_prompt(slot.scored(begin, rows.numbers.chunks_exact(rows.width)), events);
        if n_rows > 0 && slot.n_left() == 0 && !slot.is_over() {
            // The last row gives the first token of the answer.
            take(slot, rows.range(n_rows - 1..n_rows), events);
        }
    }

    /// Advances all answers, those with the same adapters together.
    async fn answer(&mut self, events: &mut Vec<(RequestId, Event)>) {
        let is_answering = |slot: &&mut Slot| slot.n_left() == 0 && !slot.is_over();
        let mut left: Vec<&mut Slot> = self.running.iter_mut().filter(is_answering).collect();
        while let Some(first) = left.first() {
            let weights = first.weights.clone();
            // Whose neighbour needs all logits would be told its probabilities by other sums.
            let is_short =
                |slot: &Slot| weights.device().gpu().is_some_and(|_| slot.n_enough().is_some());
            let is_first_short = is_short(first);
            let is_same = |slot: &&mut Slot| {
                Arc::ptr_eq(&slot.weights, &weights) && is_short(slot) == is_first_short
            };
            let (mut group, others): (Vec<_>, Vec<_>) = left.into_iter().partition(is_same);
            left = others;
            for some in group.chunks_mut(N_SHORT) {
                answer_together(&self.model, &mut self.decoder, some, events).await;
            }
        }
    }

    fn sweep(&mut self, events: &mut Vec<(RequestId, Event)>) {
        let over: Vec<Slot> = self.running.extract_if(.., |slot| slot.is_over()).collect();
        if over.iter().any(Slot::is_out_of_memory) {
            self.snapshots.clear();
        }
        events.extend(over.into_iter().map(|slot| (slot.id, Event::Done(slot.finish()))));
    }

    /// One vector of length one for a text: the mean of the hidden rows behind its tokens. Awaited
    /// in a browser.
    #[cfg(not(target_family = "wasm"))]
    pub fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        crate::tensor::gpu::later::wait(self.embed_later(ids))
    }

    pub(crate) async fn embed_later(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        match self.embedded(ids).await {
            Err(Error::OutOfMemory { .. }) => {
                self.snapshots.clear();
                self.embedded(ids).await
            }
            done => done,
        }
    }

    async fn embedded(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let (n_tok, context) = (ids.len(), self.settings.context);
        if n_tok == 0 || n_tok > context {
            let problem = format!("the text has {n_tok} tokens; it may have 1 to {context}");
            return Err(Error::input(problem, "embed something, in parts where it is long"));
        }
        let (model, weights, device) = (&*self.model, self.adapters.base(), self.device());
        let mut sum = vec![0.0f64; model.config().d_model];
        let mut states = [model.state_with(device, self.cache)?];
        for piece in ids.chunks(PIECE) {
            let batch = Batch::continuing(&[(piece, states[0].n_tok)]);
            let hidden = contained(|| {
                failpoint::hit("engine.embed")?;
                device.run(|| {
                    let (tape, options) = (Tape::off(), ForwardOptions::default());
                    let out = model.forward(&tape, weights, &batch, Some(&mut states), options)?;
                    Ok(out.hidden.value().clone())
                })
            });
            let hidden = device.check().and(hidden)?.read().await;
            device.check()?;
            for row in hidden.chunks_exact(sum.len()) {
                sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
            }
        }
        let length = sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        if !(length > 0.0 && length.is_finite()) {
            let problem = format!("the hidden rows of {n_tok} tokens sum to a length of {length}");
            return Err(Error::input(problem, "the weights may be damaged"));
        }
        Ok(sum.into_iter().map(|x| (x / length) as f32).collect())
    }

    /// What it holds.
    pub fn stats(&self) -> Stats {
        let (n_snapshots, snapshot_bytes) = self.snapshots.usage();
        let states = self.running.iter().filter_map(|slot| slot.state.as_ref());
        let experts = self.adapters.base().page_use().unwrap_or_default();
        Stats {
            running: self.running.iter().map(Slot::running).collect(),
            n_waiting: self.waiting.len(),
            n_snapshots,
            snapshot_bytes,
            state_bytes: states.map(State::n_bytes).sum(),
            n_expert_hits: experts.n_hits,
            n_expert_loads: experts.n_loads,
            expert_bytes_read: experts.bytes_read,
            expert_bytes: experts.bytes,
            ..self.totals.clone()
        }
    }
}

fn new_state(model: &Model, slot: &Slot, cache: CacheType) -> Result<State> {
    let device = slot.weights.device();
    let state = model.state_with(device, cache);
    device.check().and(state)
}

/// The prompt to read next: the one with the least left, or the oldest.
fn next_prompt(running: &mut [Slot], is_for_oldest: bool) -> Option<&mut Slot> {
    let n_pieces = |slot: &Slot| if is_for_oldest { 0 } else { slot.n_left().div_ceil(PIECE) };
    let reading = running.iter_mut().filter(|slot| !slot.is_over() && slot.n_left() > 0);
    reading.min_by_key(|slot| (n_pieces(slot), slot.id))
}

/// What `work` gives; a panic in it is an error of the request that it is for.
fn contained<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(Error::Panic { problem: text.unwrap_or_else(|| "a panic without a message".into()) })
    })
}

/// What a pass found: rows of logits, or of the largest alone.
struct Rows {
    numbers: Vec<f32>,
    width: usize,
    is_top: bool,
}

impl Rows {
    fn range(&self, rows: Range<usize>) -> impl Iterator<Item = Row<'_>> {
        let rows = &self.numbers[rows.start * self.width..rows.end * self.width];
        let row = |row| if self.is_top { Row::Top(row) } else { Row::Whole(row) };
        rows.chunks_exact(self.width).map(row)
    }
}

/// Gives sequences their next tokens, and reads of each the rows that are wanted of it.
async fn pass(
    model: &Model,
    decoder: &mut Decoder,
    slots: &mut [&mut Slot],
    next: &[(Vec<u32>, usize)],
) -> Result<Rows> {
    let width = model.config().n_vocab;
    let Some(first) = slots.first() else {
        return Ok(Rows { numbers: Vec::new(), width, is_top: false });
    };
    let device = first.weights.device().clone();
    let (found, is_top) = launch(model, decoder, slots, next)?;
    let Some(found) = found else { return Ok(Rows { numbers: Vec::new(), width, is_top }) };
    let (numbers, width) = (found.read().await, found.dims2().1);
    device.check().inspect_err(|_| decoder.forget())?;
    Ok(Rows { numbers, width, is_top })
}

/// Gives the device the work of a pass. Where a GPU can look for the few logits that are needed,
/// they alone are what it is to give back.
fn launch(
    model: &Model,
    decoder: &mut Decoder,
    slots: &mut [&mut Slot],
    next: &[(Vec<u32>, usize)],
) -> Result<(Option<Tensor>, bool)> {
    let n_enough = slots.iter().map(|slot| slot.n_enough());
    let n_enough = n_enough.collect::<Option<Vec<_>>>().and_then(|all| all.into_iter().max());
    let weights = slots[0].weights.clone();
    let state = |slot: &mut &mut Slot| slot.state.take().expect("a slot has a state but in a pass");
    let mut states: Vec<State> = slots.iter_mut().map(state).collect();
    let parts: Vec<&[u32]> = next.iter().map(|part| &part.0[..]).collect();
    let n_wanted: Vec<usize> = next.iter().map(|part| part.1).collect();
    let device = weights.device();
    let is_single = parts.iter().all(|part| part.len() == 1);
    let work = || {
        failpoint::hit(if is_single { "engine.answer" } else { "engine.read" })?;
        let logits = decoder.advance(model, &weights, &parts, &mut states, &n_wanted)?;
        let n_vocab = model.config().n_vocab;
        Ok(match (device.gpu(), n_enough, logits) {
            (Some(gpu), Some(k), Some(logits)) if can_find(gpu, n_vocab, k) => {
                (Some(largest(gpu, &logits, k)), true)
            }
            (_, _, logits) => (logits, false),
        })
    };
    // A token takes a few hundred short tasks.
    let is_short = parts.iter().all(|part| part.len() <= N_SHORT);
    let done = contained(|| if is_short { device.run_awake(work) } else { device.run(work) });
    slots.iter_mut().zip(states).for_each(|(slot, state)| slot.state = Some(state));
    // After a panic the device may still have something to report.
    device.check().and(done)
}

fn take<'a>(
    slot: &mut Slot,
    rows: impl Iterator<Item = Row<'a>>,
    events: &mut Vec<(RequestId, Event)>,
) {
    if let Err(error) = contained(|| {
        slot.take(rows, events);
        Ok(())
    }) {
        slot.fail(&Arc::new(error));
    }
}

/// Advances answers with the same adapters by one pass.
async fn answer_together(
    model: &Model,
    decoder: &mut Decoder,
    slots: &mut [&mut Slot],
    events: &mut Vec<(RequestId, Event)>,
) {
    let next: Vec<(Vec<u32>, usize)> = slots.iter_mut().map(|slot| slot.next_tokens()).collect();
    let rows = match pass(model, decoder, slots, &next).await.map_err(Arc::new) {
        Ok(rows) => rows,
        Err(error) => return slots.iter_mut().for_each(|slot| slot.fail(&error)),
    };
    let mut first = 0;
    for (slot, (_, n_rows)) in slots.iter_mut().zip(&next) {
        take(slot, rows.range(first..first + n_rows), events);
        first += n_rows;
    }
}
