//! Ranks as threads of one process: what they compute together, and what one computes alone.

use super::train::{Setup, losses, trained};
use crate::error::{Error, Result};
use crate::files::Sink;
use crate::tensor::device::Device;
use crate::train::group::{Exchange, Group};
use crate::train::optim::OptimizerKind;
use crate::train::state::{Extent, Saved};
use crate::train::{Settings, Training};
use serde_json::json;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

/// Every message between every two of `n` ranks goes through a channel.
fn exchanges(n: usize) -> Vec<Exchange> {
    type Line = (Sender<Vec<u8>>, Receiver<Vec<u8>>);
    let line = |_| (0..n).map(|_| channel()).collect::<Vec<Line>>();
    let (mut senders, mut receivers): (Vec<Vec<_>>, Vec<Vec<_>>) =
        (0..n).map(line).map(|row| row.into_iter().unzip()).unzip();
    let mut list: Vec<Exchange> = Vec::new();
    for rank in 0..n {
        let to = std::mem::take(&mut senders[rank]);
        // The lines that end here, by where they come from.
        let from: Vec<Receiver<Vec<u8>>> = receivers
            .iter_mut()
            .map(|row| std::mem::replace(&mut row[rank], channel().1))
            .collect();
        let from = Mutex::new(from);
        list.push(Box::new(move |outgoing, incoming| {
            for (to, bytes) in to.iter().zip(outgoing).filter(|(_, bytes)| !bytes.is_empty()) {
                to.send(bytes.to_vec()).unwrap();
            }
            let from = from.lock().unwrap();
            for (from, bytes) in from.iter().zip(incoming).filter(|(_, bytes)| !bytes.is_empty()) {
                bytes.copy_from_slice(&from.recv().unwrap());
            }
            Ok(())
        }));
    }
    list
}

/// What each rank makes of the same run.
fn ranks<T: Send>(n: usize, work: impl Fn(usize, Group) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let start = |(rank, exchange)| {
            let group = Group { rank, n_ranks: n, exchange };
            scope.spawn(move || work(rank, group))
        };
        let all: Vec<_> = exchanges(n).into_iter().enumerate().map(start).collect();
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn setup(optimizer: OptimizerKind, n_accumulate: usize) -> Setup {
    let mut setup = Setup::new();
    setup.settings = Settings { optimizer, n_accumulate, ..setup.settings };
    setup
}

/// Losses of the first steps and the weights after them, of each rank.
fn together(n: usize, setup: &Setup) -> Vec<(Vec<u32>, Vec<u8>)> {
    ranks(n, |_, group| {
        let mut training = setup.training(&Device::cpu(1).unwrap());
        training.join(group).unwrap();
        (losses(&mut training, 4), trained(&training))
    })
}

#[test]
fn ranks_of_one_pass_each_have_the_bits_of_one_rank_that_makes_them_all() {
    for optimizer in [OptimizerKind::AdamW, OptimizerKind::Muon] {
        for n in [2, 3] {
            let mut setup = setup(optimizer, n);
            for checkpointing in [false, true] {
                setup.checkpointing = checkpointing;
                let mut alone = setup.training(&Device::cpu(1).unwrap());
                let want = (losses(&mut alone, 4), trained(&alone));
                for (rank, got) in together(n, &setup).into_iter().enumerate() {
                    assert!(got == want, "{optimizer:?}, rank {rank} of {n}, {checkpointing}");
                }
            }
        }
    }
}

#[test]
fn ranks_with_several_passes_are_close_to_one_rank_and_the_same_every_time() {
    let setup = setup(OptimizerKind::AdamW, 4);
    let mut alone = setup.training(&Device::cpu(1).unwrap());
    let want = losses(&mut alone, 4);
    let (first, again) = (together(2, &setup), together(2, &setup));
    assert!(first == again && first[0] == first[1]);
    for (got, want) in first[0].0.iter().zip(&want) {
        let (got, want) = (f32::from_bits(*got), f32::from_bits(*want));
        assert!((got - want).abs() < 1e-5, "{got}, not {want}");
    }
}

/// A checkpoint as bytes.
fn saved(training: &Training) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut sink = |piece: &[u8]| -> Result<()> {
        bytes.extend_from_slice(piece);
        Ok(())
    };
    let sink: &mut Sink = &mut sink;
    training.capture(Extent::Run, &json!(null)).unwrap().write_to(sink).unwrap();
    bytes
}

#[test]
fn a_checkpoint_of_ranks_is_that_of_one_rank_and_other_numbers_of_ranks_resume_it() {
    let setup = setup(OptimizerKind::Muon, 2);
    let mut alone = setup.training(&Device::cpu(1).unwrap());
    losses(&mut alone, 3);
    let checkpoint = saved(&alone);
    let of_ranks = ranks(2, |_, group| {
        let mut training = setup.training(&Device::cpu(1).unwrap());
        training.join(group).unwrap();
        losses(&mut training, 3);
        saved(&training)
    });
    assert!(of_ranks[0] == checkpoint, "rank 0 gathers what all remember");
    let want = (losses(&mut alone, 3), trained(&alone));
    let file: Arc<Vec<u8>> = Arc::new(checkpoint);
    let resumed = |training: &mut Training| {
        Saved::parse("checkpoint", file.clone()).unwrap().restore(training).unwrap();
        (losses(training, 3), trained(training))
    };
    let mut one = setup.training(&Device::cpu(2).unwrap());
    assert!(resumed(&mut one) == want);
    let two = ranks(2, |_, group| {
        let mut training = setup.training(&Device::cpu(1).unwrap());
        training.join(group).unwrap();
        resumed(&mut training)
    });
    assert!(two.iter().all(|got| *got == want));
}

#[test]
fn memory_of_moments_is_divided_and_a_probe_sends_nothing() {
    let setup = setup(OptimizerKind::AdamW, 4);
    let whole = setup.training(&Device::cpu(1).unwrap()).fixed();
    let parts = ranks(4, |_, group| {
        let mut training = setup.training(&Device::cpu(1).unwrap());
        training.join(group).unwrap();
        training.probe(1, 24, 1, &|| 0.0).unwrap();
        let fixed = training.fixed();
        assert_eq!(losses(&mut training, 1).len(), 1);
        fixed
    });
    assert_eq!(parts.iter().map(|part| part.moments).sum::<usize>(), whole.moments);
    assert_eq!(parts.iter().map(|part| part.gradients).sum::<usize>(), whole.gradients);
    let largest = parts.iter().map(|part| part.moments).max().unwrap();
    assert!(largest < whole.moments / 3, "{largest} of {}", whole.moments);
    assert!(parts.iter().all(|part| part.moments_of_all == whole.moments));
}

#[test]
fn a_rank_that_no_longer_answers_is_an_error_of_the_others() {
    let mut training = setup(OptimizerKind::AdamW, 2).training(&Device::cpu(1).unwrap());
    let exchange: Exchange = Box::new(|_, _| Err(Error::input("rank 1 has ended", "")));
    let error = training.join(Group { rank: 0, n_ranks: 2, exchange }).unwrap_err();
    assert!(error.to_string().contains("rank 1 has ended"), "{error}");
}

#[test]
fn ranks_of_other_weights_or_without_a_batch_are_refused() {
    let said = ranks(3, |rank, group| {
        let mut setup = setup(OptimizerKind::AdamW, 3);
        setup.weights_seed = u64::from(rank == 2);
        let mut training = setup.training(&Device::cpu(1).unwrap());
        training.join(group).unwrap_err().to_string()
    });
    assert!(said.iter().all(|said| said == "rank 2 starts from other weights than rank 0"));
    let setup = setup(OptimizerKind::AdamW, 1);
    let said = ranks(2, |_, group| {
        let mut training = setup.training(&Device::cpu(1).unwrap());
        training.join(group).unwrap();
        training.step().map(drop)
    });
    assert!(said.iter().all(std::result::Result::is_err));
}
