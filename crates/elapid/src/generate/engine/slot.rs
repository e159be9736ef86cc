//! One request on its way: what it has read, what it has said, and when it is over.
//!
//! `tokens` is the prompt and then the answer; the state has seen the first `n_seen` of them. While
//! that is less than the prompt the slot reads, piece by piece. Then it answers: each pass takes
//! the tokens that the state has not seen (usually one, the last) and perhaps guesses behind them,
//! and each row of logits behind the last of them gives a token, as long as guesses are right.
//!
//! After a wrong guess the state has seen tokens that are not there. A cache of keys is cut; a
//! recurrence cannot go back, so its state from before the pass is put back, and the next pass
//! takes again what was right: the weights are read once for all of it.

use super::constraint::{Progress, Rule};
use super::lookup::Lookup;
use super::snapshots::{Key, PIECE, Snapshots};
use super::stops::{Seen, Stops};
use super::{Event, Finish, Reason, Request, RequestId, Running, Token};
use crate::error::{Error, Result};
use crate::generate::sample::{self, Row};
use crate::model::state::State;
use crate::model::weights::Weights;
use crate::text::tokenizer::{Stream, Tokenizer};
use std::ops::Range;
use std::sync::Arc;

pub(super) struct Slot {
    pub(super) id: RequestId,
    request: Request,
    /// With the adapters of the request.
    pub(super) weights: Arc<Weights>,
    /// Of the prompt, behind each whole piece.
    pub(super) keys: Vec<Key>,
    /// There but while a pass has it.
    pub(super) state: Option<State>,
    pub(super) tokens: Vec<u32>,
    pub(super) n_prompt: usize,
    pub(super) n_cached: usize,
    n_max: usize,
    /// Text of the answer, and texts that end it.
    stream: Stream<Arc<Tokenizer>>,
    stops: Stops,
    rule: Option<Rule>,
    lookup: Lookup,
    /// Guesses of the pass under way, and the state before it where it cannot be cut.
    guesses: Vec<u32>,
    before: Option<State>,
    /// Why it is over, once it is.
    ended: Option<Reason>,
    /// Whether its prompt is read a second time, because there was no memory: no snapshot is kept.
    pub(super) is_second_try: bool,
}

impl Slot {
    /// A request that was checked; `context` bounds prompt and answer together.
    pub(super) fn new(
        (id, mut request): (RequestId, Request),
        (keys, weights): (Vec<Key>, Arc<Weights>),
        tokenizer: &Arc<Tokenizer>,
        rule: Option<Rule>,
        context: usize,
    ) -> Slot {
        let stream = Stream::new(tokenizer.clone()).showing(request.special);
        let tokens = std::mem::take(&mut request.prompt);
        Slot {
            id,
            weights,
            keys,
            state: None,
            n_prompt: tokens.len(),
            n_cached: 0,
            n_max: request.n_max.min(context - tokens.len()),
            stream: stream.after(&tokens),
            stops: Stops::new(&request.stop_texts),
            rule,
            lookup: Lookup::new(request.n_lookup),
            guesses: Vec::new(),
            before: None,
            ended: None,
            is_second_try: false,
            request,
            tokens,
        }
    }

    pub(super) fn n_seen(&self) -> usize {
        self.state.as_ref().map_or(0, |state| state.n_tok)
    }

    pub(super) fn n_tok(&self) -> usize {
        self.tokens.len() - self.n_prompt
    }

    /// How much of the prompt is to be read. Where no answer is wanted that is whole pieces: what
    /// is behind them leaves no snapshot.
    fn n_goal(&self) -> usize {
        let is_warmed = self.n_max == 0 && !self.request.scores_prompt;
        if is_warmed { self.keys.len() * PIECE } else { self.n_prompt }
    }

    /// Tokens of the prompt that are left to read; with none left it answers.
    pub(super) fn n_left(&self) -> usize {
        self.n_goal().saturating_sub(self.n_seen())
    }

    /// Tokens of the prompt that are behind it.
    fn n_read(&self) -> usize {
        if self.n_left() > 0 { self.n_seen() } else { self.n_prompt }
    }

    pub(super) fn running(&self) -> Running {
        let (n_prompt, n_read, n_tok) = (self.n_prompt, self.n_read(), self.n_tok());
        Running { id: self.id, n_prompt, n_read, n_tok, n_max: self.n_max }
    }

    /// Whether nothing is left to do; where no answer is wanted that is when the prompt is read.
    pub(super) fn is_over(&self) -> bool {
        self.ended.is_some() || self.n_max == 0 && self.n_left() == 0
    }

    pub(super) fn fail(&mut self, error: &Arc<Error>) {
        self.ended = Some(Reason::Failed(error.clone()));
    }

    pub(super) fn is_out_of_memory(&self) -> bool {
        let Some(Reason::Failed(error)) = &self.ended else { return false };
        matches!(**error, Error::OutOfMemory { .. })
    }

    /// Begins to read its prompt, or fails because there is no state for it.
    pub(super) fn start(&mut self, state: Result<State>) {
        match state {
            Ok(state) => self.state = Some(state),
            Err(error) => self.fail(&Arc::new(error)),
        }
    }

    /// Keeps a snapshot, where there is a place for one.
    pub(super) fn keep(&self, snapshots: &mut Snapshots) {
        let n_seen = self.n_seen();
        let is_place = n_seen.is_multiple_of(PIECE) && !self.is_second_try;
        if let Some(state) = self.state.as_ref().filter(|_| is_place) {
            snapshots.keep(&self.keys[..n_seen / PIECE], state);
        }
    }

    pub(super) fn tell_prompt(&self, scored: Vec<Token>, events: &mut Vec<(RequestId, Event)>) {
        let (n_done, n_cached) = (self.n_read(), self.n_cached);
        events.push((self.id, Event::Prompt { n_done, n_cached, scored }));
    }

    /// The scores of a piece of the prompt that begins here, from the logits behind each token of
    /// it: they belong to the next.
    pub(super) fn scored(&self, begin: usize, rows: std::slice::ChunksExact<f32>) -> Vec<Token> {
        if !self.request.scores_prompt {
            return Vec::new();
        }
        let unknown = |&id: &u32| Token { id, text: String::new(), logprob: f32::NAN, top: vec![] };
        let first = self.tokens.first().filter(|_| begin == 0).map(unknown);
        let next = self.tokens[begin + 1..self.n_prompt].iter();
        first.into_iter().chain(rows.zip(next).map(|(row, &id)| self.token(id, row))).collect()
    }

    /// How many of the largest logits are enough for its next token; none where it needs them all.
    pub(super) fn n_enough(&self) -> Option<usize> {
        let Request { sampling, logit_bias, n_top, scores_prompt, .. } = &self.request;
        let is_plain = !sampling.penalizes() && self.rule.is_none() && logit_bias.is_empty();
        let is_enough = is_plain && *n_top == 0 && !(*scores_prompt && self.n_left() > 0);
        sample::n_enough(sampling).filter(|_| is_enough)
    }

    /// A token with its probability and those of the likeliest, without text.
    fn token(&self, id: u32, logits: &[f32]) -> Token {
        let log_sum = sample::log_sum(logits);
        let logprob = |id: u32| logits[id as usize] - log_sum;
        let top = sample::largest(logits, self.request.n_top);
        let top = top.into_iter().map(|id| (id, logprob(id))).collect();
        Token { id, text: String::new(), logprob: logprob(id), top }
    }

    /// Pieces of the prompt whose snapshots would spare it work.
    pub(super) fn useful_keys(&self) -> &[Key] {
        // One token must be computed: its logits give the first of the answer.
        let n_useful = match self.n_max {
            _ if self.request.scores_prompt => 0,
            0 => self.n_prompt,
            _ => self.n_prompt - 1,
        };
        &self.keys[..n_useful / PIECE]
    }

    /// The next piece of the prompt, and how many rows of logits are wanted.
    pub(super) fn piece(&self) -> (Range<usize>, usize) {
        let begin = self.n_seen();
        let end = ((begin / PIECE + 1) * PIECE).min(self.n_goal());
        let n_rows = match self.request.scores_prompt {
            true => end - begin,
            false => usize::from(self.n_max > 0 && end == self.n_prompt),
        };
        (begin..end, n_rows)
    }

    /// Continues from a snapshot behind this many pieces.
    pub(super) fn restore(&mut self, n_pieces: usize, state: State) {
        self.n_cached += n_pieces * PIECE - self.n_seen();
        self.state = Some(state);
    }

    /// The tokens of the next pass, guesses behind, and how many rows of logits are wanted.
    pub(super) fn next_tokens(&mut self) -> (Vec<u32>, usize) {
        let mut next = self.tokens[self.n_seen()..].to_vec();
        let n_room = (self.request.n_lookup + 1).saturating_sub(next.len());
        let n_room = n_room.min(self.n_max - self.n_tok() - 1);
        self.guesses = self.lookup.guess(&self.tokens, n_room);
        self.before = match (&self.guesses[..], &self.state) {
            ([], _) | (_, None) => None,
            (_, Some(state)) => (!state.can_truncate()).then(|| state.clone()),
        };
        next.extend(&self.guesses);
        (next, self.guesses.len() + 1)
    }

    /// Takes rows of logits, one before the guesses and one behind each; what they say goes to
    /// `events`.
    pub(super) fn take<'a>(
        &mut self,
        rows: impl Iterator<Item = Row<'a>>,
        events: &mut Vec<(RequestId, Event)>,
    ) {
        let guesses = std::mem::take(&mut self.guesses);
        let mut n_accepted = 0;
        for (idx, row) in rows.enumerate() {
            let said = match row {
                Row::Whole(logits) => self.say(logits),
                Row::Top(top) => self.say_top(top),
            };
            let said = said.unwrap_or_else(|error| {
                self.fail(&Arc::new(error));
                None
            });
            let id = said.as_ref().map(|token| token.id);
            events.extend(said.map(|token| (self.id, Event::Token(token))));
            let is_right = id.is_some() && id == guesses.get(idx).copied();
            n_accepted += usize::from(is_right);
            if !is_right || self.ended.is_some() {
                break;
            }
        }
        self.lookup.learn(guesses.len(), n_accepted);
        if self.ended.is_none() {
            self.rewind();
        }
    }

    /// Puts the state back to where it saw only tokens that are there.
    fn rewind(&mut self) {
        let (before, n_there) = (self.before.take(), self.tokens.len() - 1);
        let Some(state) = self.state.as_mut().filter(|state| state.n_tok > n_there) else { return };
        match before {
            Some(before) => self.state = Some(before),
            None => state.truncate(n_there),
        }
    }

    /// Draws a token from logits, unless the answer is over without one.
    fn say(&mut self, logits: &[f32]) -> Result<Option<Token>> {
        let sampling = &self.request.sampling;
        let is_adjusted =
            sampling.penalizes() || self.rule.is_some() || !self.request.logit_bias.is_empty();
        // Probabilities are told of the logits as the model gave them.
        let mut adjusted = if is_adjusted { logits.to_vec() } else { Vec::new() };
        if is_adjusted {
            sample::penalize(&mut adjusted, &self.tokens, sampling);
            for (id, bias) in &self.request.logit_bias {
                adjusted[*id as usize] += bias;
            }
        }
        if let Some(rule) = &mut self.rule
            && rule.mask(&mut adjusted)? == Progress::Over
        {
            self.ended = Some(Reason::End);
            return Ok(None);
        }
        let choice = if is_adjusted { &adjusted[..] } else { logits };
        let id = sample::pick(choice, sampling, self.n_tok() as u64)?;
        let progress = self.rule.as_mut().map(|rule| rule.take(id)).transpose()?;
        let is_over = progress == Some(Progress::Over);
        if self.request.stop_tokens.contains(&id) || is_over && self.is_end(id) {
            self.ended = Some(Reason::End);
            return Ok(None);
        }
        Ok(Some(self.push(self.token(id, logits), is_over)))
    }

    /// The same from the largest logits, for a request that needs no others.
    fn say_top(&mut self, top: &[f32]) -> Result<Option<Token>> {
        let id = sample::pick_top(top, &self.request.sampling, self.n_tok() as u64)?;
        if self.request.stop_tokens.contains(&id) {
            self.ended = Some(Reason::End);
            return Ok(None);
        }
        let logit = top[2..].as_chunks::<2>().0.iter().find(|pair| pair[0] == id as f32);
        let logprob = logit.map_or(f32::NAN, |pair| pair[1] - top[0]);
        let token = Token { id, text: String::new(), logprob, top: Vec::new() };
        Ok(Some(self.push(token, false)))
    }

    /// Takes a token into the answer, with the text that it completes.
    fn push(&mut self, token: Token, is_over: bool) -> Token {
        let id = token.id;
        self.tokens.push(id);
        let (text, stop) = match self.stops.push(&self.stream.push(id)) {
            Seen::Text(text) => (text, None),
            Seen::Stop(text, stop) => (text, Some(Reason::StopText(stop))),
        };
        let is_full = self.n_tok() == self.n_max;
        let end = is_over.then_some(Reason::End).or(is_full.then_some(Reason::Length));
        self.ended = stop.or(end);
        Token { text, ..token }
    }

    fn is_end(&self, id: u32) -> bool {
        self.rule.as_ref().is_some_and(|rule| rule.is_end(id))
    }

    /// The end, with what was held back.
    pub(super) fn finish(self) -> Finish {
        let n_tok = self.n_tok();
        let mut finish = Finish {
            reason: self.ended.unwrap_or(Reason::Length),
            text: String::new(),
            n_prompt: self.n_prompt,
            n_cached: self.n_cached,
            n_tok,
            n_guessed: self.lookup.n_guessed,
            n_accepted: self.lookup.n_accepted,
        };
        if !matches!(finish.reason, Reason::End | Reason::Length) {
            return finish;
        }
        // What half characters become may complete a stop as any text.
        let mut stops = self.stops;
        match stops.push(&self.stream.finish()) {
            Seen::Text(text) => finish.text = text + &stops.finish(),
            Seen::Stop(text, stop) => (finish.text, finish.reason) = (text, Reason::StopText(stop)),
        }
        finish
    }
}
