//! The thread that carries parcels between ranks, one job after the other, in the order they were
//! given: the same on all ranks.

use super::Exchange;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

/// 32-bit words for one rank.
pub type Parcel = Arc<Vec<u32>>;

/// What is sent to each rank, and how many words come from each.
pub struct Job {
    parcels: Vec<Parcel>,
    lengths: Vec<usize>,
    is_sum: bool,
}

impl Job {
    /// What came is kept as it is, by rank; what goes to oneself is not sent.
    pub fn keep(parcels: Vec<Parcel>, lengths: Vec<usize>) -> Job {
        Job { parcels, lengths, is_sum: false }
    }

    /// From each rank come so many numbers, as many as the parcel for oneself has; they are added
    /// up in the order of the ranks.
    pub fn sum(parcels: Vec<Parcel>, length: usize) -> Job {
        Job { lengths: vec![length; parcels.len()], parcels, is_sum: true }
    }
}

/// The thread, as others see it. It ends when this is dropped.
pub struct Courier {
    jobs: Sender<Job>,
    done: Receiver<Result<Vec<Vec<u32>>>>,
}

impl Courier {
    pub fn start(rank: usize, mut exchange: Exchange) -> Courier {
        let (jobs, waiting) = channel::<Job>();
        let (told, done) = channel();
        std::thread::spawn(move || {
            for job in waiting {
                let carried = carry(rank, job, &mut exchange);
                let has_failed = carried.is_err();
                if told.send(carried).is_err() || has_failed {
                    return;
                }
            }
        });
        Courier { jobs, done }
    }

    /// Gives it a job; what comes of it is told by `take`.
    pub fn send(&self, job: Job) {
        // Where the thread has ended, `take` says why.
        let _ = self.jobs.send(job);
    }

    /// What came of the oldest job that was not asked for yet.
    pub fn take(&self) -> Result<Vec<Vec<u32>>> {
        self.done.recv().unwrap_or_else(|_| {
            let hint = "see what the first error says, and resume the run";
            Err(Error::input("the ranks no longer reach each other", hint))
        })
    }
}

fn carry(rank: usize, job: Job, exchange: &mut Exchange) -> Result<Vec<Vec<u32>>> {
    let Job { parcels, lengths, is_sum } = job;
    let mut found: Vec<Vec<u32>> = lengths.into_iter().map(|n| vec![0; n]).collect();
    found[rank] = Vec::new();
    let outgoing: Vec<&[u8]> = parcels
        .iter()
        .enumerate()
        .map(|(to, words)| if to == rank { &[] } else { bytemuck::cast_slice(&words[..]) })
        .collect();
    let mut incoming: Vec<&mut [u8]> =
        found.iter_mut().map(|words| bytemuck::cast_slice_mut(&mut words[..])).collect();
    exchange(&outgoing, &mut incoming)?;
    if !is_sum {
        return Ok(found);
    }
    found[rank] = Arc::unwrap_or_clone(parcels.into_iter().nth(rank).unwrap_or_default());
    let mut found = found.into_iter();
    let mut sum = found.next().unwrap_or_default();
    let numbers: &mut [f32] = bytemuck::cast_slice_mut(&mut sum);
    for other in found {
        let other: &[f32] = bytemuck::cast_slice(&other);
        numbers.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
    }
    Ok(vec![sum])
}
