//! This process among those that a launcher started to work together: `mpirun`, Slurm, torchrun.
//!
//! What a launcher leaves in the environment decides; without it a process is alone and nothing of
//! this is opened. Bytes go by MPI, found at run time, or by TCP between the addresses that
//! `MASTER_ADDR` and `MASTER_PORT` lead to. Rank 0 decides what depends on the clock or on the free
//! memory, prints and writes; the others follow what it says.
//!
//! A rank that dies ends the others: the launcher of MPI sees to it, and over TCP its connections
//! break. One that hangs is noticed during training after `ELAPID_RANK_TIMEOUT` seconds.

mod launcher;
#[cfg(unix)]
mod mpi;
mod tcp;

use crate::report::{Done, Failure, n_threads_default};
use elapid::{Error, Group, Result};
use launcher::Launcher;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// What carries bytes between ranks.
enum Link {
    #[cfg(unix)]
    Mpi(mpi::Mpi),
    Tcp(tcp::Mesh),
}

impl Link {
    /// As [`Group::exchange`]; a rank that says nothing for so long is an error.
    fn exchange(
        &mut self,
        outgoing: &[&[u8]],
        incoming: &mut [&mut [u8]],
        timeout: Option<Duration>,
    ) -> Result<()> {
        match self {
            #[cfg(unix)]
            Link::Mpi(mpi) => mpi.exchange(outgoing, incoming, timeout),
            Link::Tcp(mesh) => mesh.exchange(outgoing, incoming, timeout),
        }
    }
}

/// A rank that does not answer, in words.
fn silent(ranks: &[usize], timeout: Duration) -> Error {
    let list: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    let seconds = timeout.as_secs();
    Error::input(
        format!("no answer from {noun} {} for {seconds} s", list.join(", ")),
        "look at that process: it hangs, or its machine is far slower; ELAPID_RANK_TIMEOUT=N waits \
         N seconds; resume the run afterwards",
    )
}

/// A rank that has gone, in words.
fn gone(rank: usize, why: &str) -> Error {
    let problem = format!("rank {rank} has ended: {why}");
    Error::input(problem, "see what it said last; resume the run from its last checkpoint")
}

/// First the turn of others, then sleeps that become longer.
fn pause(n_idle: &mut u32) {
    *n_idle = n_idle.saturating_add(1);
    match *n_idle {
        0..64 => std::thread::yield_now(),
        64..512 => std::thread::sleep(Duration::from_micros(20)),
        _ => std::thread::sleep(Duration::from_micros(500)),
    }
}

/// Seconds that a rank may say nothing during training.
const TIMEOUT_S: u64 = 300;

fn timeout() -> Duration {
    let given = std::env::var("ELAPID_RANK_TIMEOUT").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(given.unwrap_or(TIMEOUT_S).max(1))
}

/// This process among others.
pub struct Ranks {
    /// From 0.
    pub rank: usize,
    pub n_ranks: usize,
    /// Among those on this machine, from 0, and how many these are.
    pub local: usize,
    pub n_local: usize,
    /// Ranks that may use the same cores as this one.
    n_on_cores: usize,
    link: Option<Arc<Mutex<Link>>>,
    /// Bytes that this rank has sent for the engine.
    n_sent: Arc<AtomicU64>,
}

static HERE: OnceLock<Ranks> = OnceLock::new();
static IS_TRAINING: AtomicBool = AtomicBool::new(false);
static ONE: LazyLock<Ranks> = LazyLock::new(Ranks::alone);

/// This process; alone unless it joined others.
pub fn here() -> &'static Ranks {
    HERE.get().unwrap_or_else(|| &ONE)
}

/// What ranks tell each other when they meet.
#[derive(Serialize, Deserialize)]
struct Card {
    version: String,
    /// BLAKE3 of the program.
    program: String,
    /// As it was called, without what may differ.
    arguments: Vec<String>,
    machine: String,
    cores: String,
}

impl Card {
    fn own() -> Card {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let program = std::env::current_exe().and_then(std::fs::read).unwrap_or_default();
        let status = read("/proc/self/status");
        let cores = status.lines().find(|line| line.starts_with("Cpus_allowed_list"));
        Card {
            version: env!("CARGO_PKG_VERSION").into(),
            program: blake3::hash(&program).to_string(),
            arguments: arguments(std::env::args().skip(1)),
            machine: read("/proc/sys/kernel/random/boot_id"),
            cores: cores.unwrap_or_default().into(),
        }
    }

    /// What of two ranks must not differ, and does.
    fn difference(&self, first: &Card) -> Option<String> {
        if self.version != first.version {
            return Some(format!("version {} of Elapid, not {}", self.version, first.version));
        }
        if self.program != first.program {
            return Some("another build of Elapid".into());
        }
        let (own, other) = (self.arguments.join(" "), first.arguments.join(" "));
        (own != other).then(|| format!("`elapid {own}`, not `elapid {other}`"))
    }
}

/// Arguments without those that say where a rank computes.
fn arguments(list: impl Iterator<Item = String>) -> Vec<String> {
    let (mut kept, mut is_value) = (Vec::new(), false);
    for argument in list {
        let is_place = |name: &str| argument == name || argument.starts_with(&format!("{name}="));
        let is_flag = ["--device", "--threads", "-t"].into_iter().any(is_place);
        if !is_flag && !is_value {
            kept.push(argument.clone());
        }
        is_value = is_flag && !argument.contains('=');
    }
    kept
}

/// Joins the processes that a launcher started with this one, if one did.
pub fn join() -> Done<()> {
    let (rank, n_ranks, link) = match Launcher::found()? {
        Launcher::None => return Ok(()),
        #[cfg(unix)]
        Launcher::Mpi(names) => {
            let mpi = mpi::Mpi::open(&names)?;
            (mpi.rank, mpi.n_ranks, Link::Mpi(mpi))
        }
        Launcher::Tcp(place) => {
            let (rank, n_ranks) = (place.rank, place.n_ranks);
            (rank, n_ranks, Link::Tcp(tcp::Mesh::open(&place)?))
        }
    };
    if n_ranks == 1 {
        return Ok(());
    }
    let link = Some(Arc::new(Mutex::new(link)));
    let ranks = Ranks { rank, n_ranks, link, ..Ranks::alone() };
    let cards: Vec<Card> = ranks.gather(&Card::own())?;
    for (other, card) in cards.iter().enumerate() {
        if let Some(what) = card.difference(&cards[0]) {
            let problem = format!("rank {other} runs {what} as rank 0 does");
            return Err(Failure::new(problem, "start the same program in the same way everywhere"));
        }
    }
    let (own, before) = (&cards[rank], &cards[..rank]);
    let is_near = |card: &&Card| card.machine == own.machine;
    let is_bound_alike = |card: &&Card| is_near(card) && card.cores == own.cores;
    let ranks = Ranks {
        local: before.iter().filter(is_near).count(),
        n_local: cards.iter().filter(is_near).count(),
        n_on_cores: cards.iter().filter(is_bound_alike).count(),
        ..ranks
    };
    let _ = HERE.set(ranks);
    Ok(())
}

/// Ends what `join` began, after success alone: launchers take a rank that ends without it for one
/// that failed, and end the others.
pub fn leave() {
    #[cfg(unix)]
    if let Some(link) = &here().link
        && let Link::Mpi(mpi) = &*link.lock().unwrap_or_else(PoisonError::into_inner)
    {
        mpi.finalize();
    }
}

/// Refuses to be started several times for work that is not shared.
pub fn expect_alone(command: &str) -> Done<()> {
    match Launcher::found() {
        Ok(Launcher::None) | Err(_) => Ok(()),
        Ok(_) => {
            let problem = format!("`elapid {command}` does not share its work among ranks");
            Err(Failure::new(problem, "start it without mpirun, srun or torchrun"))
        }
    }
}

impl Ranks {
    fn alone() -> Ranks {
        let n_sent = Arc::default();
        Ranks { rank: 0, n_ranks: 1, local: 0, n_local: 1, n_on_cores: 1, link: None, n_sent }
    }

    /// Bytes that this rank has sent for steps and checkpoints; those of NCCL are not known.
    pub fn n_sent(&self) -> u64 {
        self.n_sent.load(Ordering::Relaxed)
    }

    /// Whether it is the one that prints and writes.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    pub fn is_alone(&self) -> bool {
        self.n_ranks == 1
    }

    /// Threads when nobody says: ranks that may use the same cores divide them.
    pub fn n_threads(&self) -> usize {
        (n_threads_default() / self.n_on_cores).max(1)
    }

    /// For the engine; none where this process is alone. A rank that hangs is noticed.
    pub fn group(&self) -> Option<Group> {
        let (link, timeout, n_sent) = (self.link.clone()?, timeout(), self.n_sent.clone());
        let exchange = move |outgoing: &[&[u8]], incoming: &mut [&mut [u8]]| {
            let n: usize = outgoing.iter().map(|bytes| bytes.len()).sum();
            n_sent.fetch_add(n as u64, Ordering::Relaxed);
            let mut link = link.lock().unwrap_or_else(PoisonError::into_inner);
            link.exchange(outgoing, incoming, Some(timeout))
        };
        Some(Group { rank: self.rank, n_ranks: self.n_ranks, exchange: Box::new(exchange) })
    }

    fn exchange(&self, outgoing: &[&[u8]], incoming: &mut [&mut [u8]]) -> Done<()> {
        let Some(link) = &self.link else { return Ok(()) };
        let mut link = link.lock().unwrap_or_else(PoisonError::into_inner);
        let timeout = IS_TRAINING.load(Ordering::Relaxed).then(timeout);
        Ok(link.exchange(outgoing, incoming, timeout)?)
    }

    /// From now on ranks are about as fast as each other: one that does not answer hangs. Before,
    /// others may wait for hours until the first has read its data.
    pub fn expect_answers(&self) {
        IS_TRAINING.store(true, Ordering::Relaxed);
    }

    /// What every rank gives, by rank.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, own: &T) -> Done<Vec<T>> {
        let own = serde_json::to_vec(own).map_err(bug)?;
        let length = (own.len() as u64).to_le_bytes();
        let mut lengths = vec![[0u8; 8]; self.n_ranks];
        let (rank, n_ranks) = (self.rank, self.n_ranks);
        fn to_all(bytes: &[u8], rank: usize, n_ranks: usize) -> Vec<&[u8]> {
            (0..n_ranks).map(|to| if to == rank { &[][..] } else { bytes }).collect()
        }
        let mut places: Vec<&mut [u8]> = lengths.iter_mut().map(|x| &mut x[..]).collect();
        places[self.rank] = &mut [];
        self.exchange(&to_all(&length, rank, n_ranks), &mut places)?;
        let n_bytes = |bytes: [u8; 8]| match usize::try_from(u64::from_le_bytes(bytes)) {
            Ok(n) if n <= MESSAGE_BYTES_MAX => Ok(n),
            _ => Err(bug("a rank announced a message beyond any size")),
        };
        let lengths = lengths.into_iter().map(n_bytes).collect::<Done<Vec<_>>>()?;
        let mut found: Vec<Vec<u8>> = lengths.into_iter().map(|n| vec![0; n]).collect();
        let mut places: Vec<&mut [u8]> = found.iter_mut().map(|x| &mut x[..]).collect();
        self.exchange(&to_all(&own, rank, n_ranks), &mut places)?;
        found[self.rank] = own;
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).map_err(bug);
        found.iter().map(read).collect()
    }

    /// What rank 0 makes, on every rank.
    pub fn tell<T: Serialize + DeserializeOwned>(&self, make: impl FnOnce() -> Done<T>) -> Done<T> {
        if self.is_alone() {
            return make();
        }
        // A list, because nothing at all may be what is told.
        let own = if self.is_first() { vec![make()?] } else { Vec::new() };
        let first = self.gather(&own)?.into_iter().next().and_then(|list| list.into_iter().next());
        first.ok_or_else(|| bug("rank 0 said nothing"))
    }

    /// Whether it is so on every rank.
    pub fn all(&self, own: bool) -> Done<bool> {
        Ok(self.is_alone() && own || !self.is_alone() && self.gather(&own)?.iter().all(|it| *it))
    }

    /// Returns once every rank has come here.
    pub fn wait(&self) -> Done<()> {
        self.all(true).map(drop)
    }

    /// Which of items of these sizes this rank takes, ascending: the largest first, each to the
    /// rank that has least.
    pub fn deal(&self, sizes: &[usize]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|idx| std::cmp::Reverse(sizes[*idx]));
        let (mut loads, mut own) = (vec![0; self.n_ranks], Vec::new());
        for idx in order {
            let taker = (0..self.n_ranks).min_by_key(|rank| loads[*rank]).unwrap_or(0);
            loads[taker] += sizes[idx].max(1);
            own.extend((taker == self.rank).then_some(idx));
        }
        own.sort_unstable();
        own
    }
}

/// Bytes of a message between ranks at most.
const MESSAGE_BYTES_MAX: usize = 1 << 32;

fn bug(error: impl std::fmt::Display) -> Failure {
    Failure::new(format!("a message between ranks: {error}"), "this is a bug in Elapid")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_rank_computes_may_differ_and_nothing_else() {
        let list = |text: &str| arguments(text.split(' ').map(String::from));
        let want = ["train", ".", "--steps", "3"];
        assert_eq!(list("train . --device cuda:1 --steps 3"), want);
        assert_eq!(list("train . -t 2 --steps 3 --device=cpu"), want);
        assert_ne!(list("train . --steps 4"), want);
    }

    #[test]
    fn items_are_dealt_evenly_and_each_once() {
        let sizes = [5, 1, 9, 3, 3, 7, 0, 2];
        let of = |rank| Ranks { rank, n_ranks: 3, ..Ranks::alone() }.deal(&sizes);
        let mut all: Vec<usize> = (0..3).flat_map(of).collect();
        all.sort_unstable();
        assert_eq!(all, (0..8).collect::<Vec<_>>());
        let loads = (0..3).map(|rank| of(rank).iter().map(|idx| sizes[*idx]).sum::<usize>());
        assert!(loads.clone().max().unwrap() - loads.min().unwrap() <= 2);
        assert_eq!(Ranks::alone().deal(&sizes), (0..8).collect::<Vec<_>>());
    }

    #[test]
    fn a_process_alone_hears_itself() {
        let alone = Ranks::alone();
        assert_eq!(alone.gather(&7u32).unwrap(), [7]);
        assert_eq!(alone.tell(|| Ok("a".to_string())).unwrap(), "a");
        assert_eq!(alone.tell(|| Ok(None::<u32>)).unwrap(), None);
        assert!(alone.all(true).unwrap() && !alone.all(false).unwrap());
    }
}
