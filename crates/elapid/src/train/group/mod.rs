//! Ranks: processes that train one model together, each on its part of every step's batches.
//!
//! ```text
//! backward    the gradients of a bucket go to their owners, who add them up      (ZeRO stage 2)
//! update      each owner changes its parameters; only it has their moments       (ZeRO stage 1)
//! after it    owners send their parameters to everybody
//! ```
//!
//! A parameter belongs to one rank as a whole: Muon and the trust region need all of it. Its owner
//! adds what the ranks found in the order of the ranks, whatever carries it: n ranks that make one
//! pass each have the bits of one rank that makes n passes, on every run. Nothing but whole
//! messages between two ranks is asked of MPI or NCCL, so that no algorithm of theirs adds.
//!
//! A rank sends each gradient at most once and each of its parameters to n - 1 others: of G bytes
//! of gradients `2 (n - 1) / n G` on the average, the least possible.
//!
//! A bucket is complete when the walk of the last pass adds nothing more to its gradients. It is
//! then sent by a thread of its own while the walk continues, in an order that all ranks share. On
//! a GPU without NCCL they are sent when the walk is over: reading them would stop it.
//!
//! Not here: what starts ranks and carries bytes between them (the caller), the share of the
//! batches (`run.rs`).

mod courier;
mod gpus;

use crate::error::{Error, Result};
use crate::model::weights::{ParamId, Weights};
use crate::ops::grad_norm::sums_of_squares;
use crate::tape::{Gradients, OnFinal};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::train::optim::Optimizer;
use courier::{Courier, Job, Parcel};
use gpus::{Flight, Gpus};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// As [`Group::exchange`].
pub type Exchange = Box<dyn FnMut(&[&[u8]], &mut [&mut [u8]]) -> Result<()> + Send>;

/// This process among those that train together.
pub struct Group {
    /// From 0.
    pub rank: usize,
    /// Processes in all.
    pub n_ranks: usize,
    /// Sends `outgoing[r]` to rank `r` and fills `incoming[r]` with what rank `r` sent here;
    /// nothing goes where a slice is empty. All ranks call it in the same order, and the lengths
    /// agree.
    pub exchange: Exchange,
}

/// Bytes of gradients that are sent together, for each rank.
const BUCKET_BYTES: usize = 1 << 20;

/// Who owns what, the same on all ranks.
struct Layout {
    rank: usize,
    n_ranks: usize,
    /// Parameters by key: owner and numbers.
    params: BTreeMap<usize, (usize, usize)>,
    /// Keys in the order in which they are sent.
    buckets: Vec<Vec<usize>>,
}

impl Layout {
    /// The largest parameters first, each to the rank that has least; buckets from the last layer
    /// to the first, as the backward pass goes.
    fn new(rank: usize, n_ranks: usize, weights: &Weights) -> Layout {
        let trained = weights.trained().into_iter();
        let sizes: Vec<(usize, usize)> =
            trained.map(|id| (id.0, weights.tensor(id).n_elem())).collect();
        let mut order = sizes.clone();
        order.sort_by_key(|(key, n)| (std::cmp::Reverse(*n), *key));
        let mut loads = vec![0; n_ranks];
        let mut params = BTreeMap::new();
        for (key, n) in order {
            let owner = (0..n_ranks).min_by_key(|rank| loads[*rank]).expect("there are ranks");
            loads[owner] += n;
            params.insert(key, (owner, n));
        }
        let mut buckets: Vec<Vec<usize>> = Vec::new();
        let mut n_left = 0;
        for (key, n) in sizes.into_iter().rev() {
            if n_left == 0 {
                buckets.push(Vec::new());
                n_left = n_ranks * BUCKET_BYTES / 4;
            }
            buckets.last_mut().expect("one was pushed").push(key);
            n_left = n_left.saturating_sub(n);
        }
        Layout { rank, n_ranks, params, buckets }
    }

    fn is_mine(&self, key: usize) -> bool {
        self.params.get(&key).is_some_and(|(owner, _)| *owner == self.rank)
    }

    /// Keys of a bucket that a rank owns.
    fn of(&self, bucket: usize, rank: usize) -> impl Iterator<Item = usize> {
        let keys = self.buckets[bucket].iter().copied();
        keys.filter(move |key| self.params[key].0 == rank)
    }

    /// Numbers of them.
    fn n_elem(&self, keys: impl Iterator<Item = usize>) -> usize {
        keys.map(|key| self.params[&key].1).sum()
    }
}

/// The ranks of a run, as its trainer sees them.
pub struct Team {
    layout: Arc<Layout>,
    courier: Arc<Mutex<Courier>>,
    /// Where GPUs reach each other without the host.
    gpus: Option<Gpus>,
    /// Whether some rank found a gradient in this step, by key.
    changed: BTreeSet<usize>,
    /// Nothing is sent, as if the others had found nothing: for a plan.
    pub is_probe: bool,
}

/// What a rank found in its passes: loss and divergence of each, and bytes that a tape held.
pub struct Findings {
    pub losses: Vec<f64>,
    pub divergences: Option<Vec<f64>>,
    pub tape_bytes: usize,
}

fn lock(courier: &Mutex<Courier>) -> MutexGuard<'_, Courier> {
    courier.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Team {
    /// Fails where the ranks have not the same weights to train.
    pub fn new(group: Group, weights: &Weights) -> Result<Team> {
        let Group { rank, n_ranks, exchange } = group;
        assert!(rank < n_ranks, "rank {rank} of {n_ranks}");
        let layout = Arc::new(Layout::new(rank, n_ranks, weights));
        let courier = Arc::new(Mutex::new(Courier::start(rank, exchange)));
        let changed = BTreeSet::new();
        let mut team = Team { layout, courier, gpus: None, changed, is_probe: false };
        let mut hasher = blake3::Hasher::new();
        for id in weights.trained() {
            hasher.update(weights.name(id).as_bytes());
            hasher.update_rayon(&weights.tensor(id).to_bytes());
        }
        let hash = bytemuck::pod_collect_to_vec(hasher.finalize().as_bytes());
        let all = team.tell_all(hash)?;
        match all.iter().position(|hash| *hash != all[0]) {
            None => {
                team.gpus = Gpus::open(&team, weights)?;
                Ok(team)
            }
            Some(other) => {
                let problem = format!("rank {other} starts from other weights than rank 0");
                Err(Error::input(problem, "give all ranks the same model, method and seed"))
            }
        }
    }

    pub fn rank(&self) -> usize {
        self.layout.rank
    }

    pub fn n_ranks(&self) -> usize {
        self.layout.n_ranks
    }

    /// The part of so many batches that this rank takes.
    pub fn share(&self, n: usize) -> std::ops::Range<usize> {
        let Layout { rank, n_ranks, .. } = *self.layout;
        rank * n / n_ranks..(rank + 1) * n / n_ranks
    }

    pub fn is_mine(&self, id: ParamId) -> bool {
        self.layout.is_mine(id.0)
    }

    /// What takes the gradients of the last pass as they become final.
    pub fn outbox(&self, device: &Device) -> Outbox {
        let inner = Inner {
            layout: self.layout.clone(),
            courier: self.courier.clone(),
            is_probe: self.is_probe,
            waits: device.gpu().is_some() && self.gpus.is_none(),
            flight: self.gpus.as_ref().map(Gpus::flight),
            held: BTreeMap::new(),
            found: BTreeSet::new(),
            n_sent: 0,
        };
        Outbox(Arc::new(Mutex::new(inner)))
    }

    /// The sums of this rank's own gradients over all ranks.
    pub fn finish(
        &mut self,
        outbox: &Outbox,
        mut grads: Gradients,
        weights: &Weights,
    ) -> Result<Gradients> {
        grads.give_to(None);
        let mut inner = outbox.0.lock().unwrap_or_else(PoisonError::into_inner);
        for key in self.layout.params.keys() {
            if let Some(grad) = grads.take(*key) {
                inner.hold(*key, grad);
            }
        }
        let mut sums = Gradients::default();
        if self.is_probe {
            std::mem::take(&mut inner.held).into_iter().for_each(|(key, x)| sums.add(key, x));
            return Ok(sums);
        }
        while inner.n_sent < self.layout.buckets.len() {
            inner.send();
        }
        self.changed = std::mem::take(&mut inner.found);
        if let Some(flight) = inner.flight.take() {
            // A rank that is gone or hangs is noticed here; the device would wait for ever.
            self.tell_all(Vec::new())?;
            return flight.land(self.rank());
        }
        for bucket in 0..self.layout.buckets.len() {
            let found = lock(&self.courier).take()?.pop().unwrap_or_default();
            let mut numbers: &[f32] = bytemuck::cast_slice(&found);
            for key in self.layout.of(bucket, self.rank()) {
                let weight = weights.tensor(ParamId(key));
                let (of_key, rest) = numbers.split_at(weight.n_elem());
                sums.add(key, Tensor::from_f32(weight.device(), weight.shape(), of_key));
                numbers = rest;
            }
        }
        Ok(sums)
    }

    /// What all ranks found, in their order; the squared norm of all gradients; and the gradients
    /// that some rank has found at all.
    pub fn tally(
        &mut self,
        own: Findings,
        mut sums: Gradients,
    ) -> Result<(Findings, f64, Gradients)> {
        let squares = sums_of_squares(sums.iter().map(|(_, grad)| grad));
        let norm = squares.iter().sum();
        if self.is_probe {
            return Ok((own, norm, sums));
        }
        let Findings { losses, divergences, tape_bytes } = own;
        let n_parts = losses.len();
        let mut words = vec![n_parts as u32, u32::from(divergences.is_some())];
        words.extend(numbers_to_words(&[tape_bytes as f64]));
        words.extend(numbers_to_words(&losses));
        words.extend(numbers_to_words(&divergences.unwrap_or_else(|| vec![0.0; n_parts])));
        words.extend(self.layout.params.keys().map(|key| u32::from(self.changed.contains(key))));
        words.extend(numbers_to_words(&squares));
        let (mut all, mut by_key) = (Findings::none(), BTreeMap::new());
        self.changed.clear();
        for (rank, words) in self.tell_all(words)?.into_iter().enumerate() {
            let mut words = words.into_iter();
            let mut next = || words.next().unwrap_or_default();
            let (n_parts, has_divergence) = (next() as usize, next() == 1);
            let mut number = || f64::from_bits(u64::from(next()) | u64::from(next()) << 32);
            all.tape_bytes = all.tape_bytes.max(number() as usize);
            all.losses.extend((0..n_parts).map(|_| number()));
            let divergences: Vec<f64> = (0..n_parts).map(|_| number()).collect();
            if has_divergence {
                all.divergences.get_or_insert_default().extend(divergences);
            }
            let keys = self.layout.params.keys().copied();
            self.changed.extend(keys.filter(|_| words.next() == Some(1)));
            let mut next = || words.next().unwrap_or_default();
            let mut number = || f64::from_bits(u64::from(next()) | u64::from(next()) << 32);
            let owned = self.layout.params.iter().filter(|(_, (owner, _))| *owner == rank);
            by_key.extend(owned.map(|(key, _)| (*key, number())));
        }
        // What nobody found is no gradient, as on one rank: its parameter stays as it is.
        for key in self.layout.params.keys().filter(|key| !self.changed.contains(key)) {
            sums.take(*key);
            by_key.remove(key);
        }
        Ok((all, by_key.into_values().sum(), sums))
    }

    /// Words of every rank, by rank; how many there are is told first.
    fn tell_all(&self, words: Vec<u32>) -> Result<Vec<Vec<u32>>> {
        let n_ranks = self.layout.n_ranks;
        let courier = lock(&self.courier);
        let mine = Arc::new(words);
        let length = Arc::new(vec![mine.len() as u32]);
        courier.send(Job::keep(vec![length; n_ranks], vec![1; n_ranks]));
        let lengths = courier.take()?;
        let lengths = lengths.iter().map(|words| words.first().map_or(0, |n| *n as usize));
        let mut lengths: Vec<usize> = lengths.collect();
        lengths[self.rank()] = mine.len();
        courier.send(Job::keep(vec![mine.clone(); n_ranks], lengths));
        let mut all = courier.take()?;
        all[self.rank()] = mine.to_vec();
        Ok(all)
    }

    /// After the update: every rank gets what the others have changed.
    pub fn spread(&mut self, weights: &mut Weights) -> Result<()> {
        if self.is_probe {
            return Ok(());
        }
        let layout = self.layout.clone();
        if let Some(gpus) = &self.gpus {
            return gpus.spread(&layout, &self.changed, weights);
        }
        let is_changed = |key: &usize| self.changed.contains(key);
        let n_buckets = layout.buckets.len();
        // While one bucket is written the next is on its way.
        for turn in 0..=n_buckets {
            if turn < n_buckets {
                let mut words: Vec<u32> = Vec::new();
                for key in layout.of(turn, layout.rank).filter(is_changed) {
                    words.extend(bytemuck::cast_slice(&weights.tensor(ParamId(key)).to_bytes()));
                }
                let n_words = |rank| layout.n_elem(layout.of(turn, rank).filter(is_changed));
                let lengths = (0..layout.n_ranks).map(n_words).collect();
                let words = Arc::new(words);
                let parcels = vec![words; layout.n_ranks];
                lock(&self.courier).send(Job::keep(parcels, lengths));
            }
            let Some(bucket) = turn.checked_sub(1) else { continue };
            let parcels = lock(&self.courier).take()?;
            for (rank, words) in parcels.iter().enumerate().filter(|(rank, _)| *rank != layout.rank)
            {
                let mut words = &words[..];
                for key in layout.of(bucket, rank).filter(is_changed) {
                    let (of_key, rest) = words.split_at(layout.params[&key].1);
                    weights.tensor_mut(ParamId(key)).write_f32(bytemuck::cast_slice(of_key));
                    words = rest;
                }
            }
        }
        Ok(())
    }

    /// What the optimizers of all ranks remember, on rank 0; elsewhere nothing.
    pub fn collect(
        &self,
        optimizer: &Optimizer,
        take: &mut dyn FnMut(String, Vec<usize>, Vec<u8>),
    ) -> Result<()> {
        let Layout { rank: me, n_ranks, .. } = *self.layout;
        let mut own: BTreeMap<String, &Tensor> = optimizer.state().into_iter().collect();
        for (key, name, shape) in optimizer.names() {
            let owner = self.layout.params[&key.0].0;
            let tensor = own.remove(&name);
            let bytes = tensor.map(|tensor| tensor.to_bytes().into_owned());
            if owner != 0 {
                let n = shape.iter().product();
                let nothing = || Arc::new(Vec::new());
                let mut parcels = vec![nothing(); n_ranks];
                if let Some(bytes) = &bytes {
                    parcels[0] = Arc::new(bytemuck::pod_collect_to_vec(bytes));
                }
                let mut lengths = vec![0; n_ranks];
                lengths[owner] = if me == 0 { n } else { 0 };
                let courier = lock(&self.courier);
                courier.send(Job::keep(parcels, lengths));
                let mut found = courier.take()?;
                if me == 0 {
                    let found = std::mem::take(&mut found[owner]);
                    take(name, shape, bytemuck::cast_slice(&found).to_vec());
                }
            } else if let Some(bytes) = bytes.filter(|_| me == 0) {
                take(name, shape, bytes);
            }
        }
        Ok(())
    }
}

impl Findings {
    fn none() -> Findings {
        Findings { losses: Vec::new(), divergences: None, tape_bytes: 0 }
    }
}

fn numbers_to_words(numbers: &[f64]) -> impl Iterator<Item = u32> {
    let bits = numbers.iter().map(|x| x.to_bits());
    bits.flat_map(|bits| [bits as u32, (bits >> 32) as u32])
}

/// Gradients on their way to their owners.
#[derive(Clone)]
pub struct Outbox(Arc<Mutex<Inner>>);

struct Inner {
    layout: Arc<Layout>,
    courier: Arc<Mutex<Courier>>,
    is_probe: bool,
    /// Nothing is sent before the walk is over.
    waits: bool,
    /// Where they go from GPU to GPU.
    flight: Option<Flight>,
    /// Those of buckets that were not sent.
    held: BTreeMap<usize, Tensor>,
    /// All that this rank found.
    found: BTreeSet<usize>,
    n_sent: usize,
}

impl Outbox {
    pub fn on_final(&self) -> OnFinal {
        let inner = self.0.clone();
        Box::new(move |key, grad| {
            let mut inner = inner.lock().unwrap_or_else(PoisonError::into_inner);
            match inner.layout.params.contains_key(&key) {
                true => inner.take(key, grad),
                false => return Some(grad),
            }
            None
        })
    }
}

impl Inner {
    fn hold(&mut self, key: usize, grad: Tensor) {
        assert!(self.found.insert(key), "the gradient of parameter {key} became final twice");
        // What others own is not kept, as it would not be in a step.
        if !self.is_probe || self.layout.is_mine(key) {
            self.held.insert(key, grad);
        }
    }

    fn take(&mut self, key: usize, grad: Tensor) {
        self.hold(key, grad);
        while !self.is_probe && !self.waits && self.is_complete() {
            self.send();
        }
    }

    /// Whether all of the next bucket was found.
    fn is_complete(&self) -> bool {
        let next = self.layout.buckets.get(self.n_sent);
        next.is_some_and(|keys| keys.iter().all(|key| self.found.contains(key)))
    }

    /// The next bucket; zeros where this rank found nothing.
    fn send(&mut self) {
        let (layout, bucket) = (self.layout.clone(), self.n_sent);
        self.n_sent += 1;
        if let Some(flight) = &mut self.flight {
            return flight.send(&layout, bucket, &mut self.held);
        }
        let parcel = |rank: usize| -> Parcel {
            let mut words = Vec::with_capacity(layout.n_elem(layout.of(bucket, rank)));
            for key in layout.of(bucket, rank) {
                match self.held.remove(&key) {
                    Some(grad) => words.extend(bytemuck::cast_slice(&grad.to_bytes())),
                    None => words.resize(words.len() + layout.params[&key].1, 0),
                }
            }
            Arc::new(words)
        };
        let parcels: Vec<Parcel> = (0..layout.n_ranks).map(parcel).collect();
        let length = parcels[layout.rank].len();
        lock(&self.courier).send(Job::sum(parcels, length));
    }
}
