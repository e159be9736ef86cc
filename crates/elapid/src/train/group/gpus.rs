//! Parcels between GPUs by NCCL, without the host: the same messages, the same sums.
//!
//! NCCL is used where every rank has its library and a GPU of its own; it refuses ranks that share
//! one. Then parcels go through the host.

use super::{Layout, Team};
use crate::error::{Error, Result};
use crate::model::weights::{ParamId, Weights};
use crate::tape::Gradients;
use crate::tensor::Tensor;
use crate::tensor::add::add_into;
use crate::tensor::device::Device;
use crate::tensor::gpu::cuda::nccl::{self, ID_BYTES, Nccl};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The GPUs of all ranks.
pub struct Gpus {
    nccl: Arc<Nccl>,
    device: Device,
    /// Shapes of parameters by key.
    shapes: Arc<BTreeMap<usize, Vec<usize>>>,
}

fn failed(problem: String) -> Error {
    Error::input(problem, "see NCCL_DEBUG=INFO; without its library GPUs go through the host")
}

impl Gpus {
    /// None where some rank has none.
    pub fn open(team: &Team, weights: &Weights) -> Result<Option<Gpus>> {
        let device = weights.device();
        let cuda = device.gpu().and_then(|gpu| gpu.as_cuda());
        let all = |own: bool| -> Result<bool> {
            Ok(team.tell_all(vec![u32::from(own)])?.iter().all(|words| words == &[1]))
        };
        if !all(cuda.is_some() && nccl::is_there())? {
            return Ok(None);
        }
        let id = match team.rank() {
            0 => nccl::new_id().map_or(Vec::new(), |id| bytemuck::pod_collect_to_vec(&id)),
            _ => Vec::new(),
        };
        let id: Vec<u8> = bytemuck::cast_slice(&team.tell_all(id)?[0]).to_vec();
        let (Some(cuda), Ok(id)) = (cuda, <[u8; ID_BYTES]>::try_from(id)) else { return Ok(None) };
        let opened = cuda.join_ranks(id, team.rank(), team.n_ranks());
        if !all(opened.is_ok())? {
            return Ok(None);
        }
        let nccl = Arc::new(opened.map_err(failed)?);
        let shape = |id: ParamId| (id.0, weights.tensor(id).shape().to_vec());
        let shapes = Arc::new(weights.trained().into_iter().map(shape).collect());
        Ok(Some(Gpus { nccl, device: device.clone(), shapes }))
    }

    pub fn flight(&self) -> Flight {
        let Gpus { nccl, device, shapes } = self;
        Flight {
            nccl: nccl.clone(),
            device: device.clone(),
            shapes: shapes.clone(),
            sent: Vec::new(),
            sums: Vec::new(),
            failure: None,
        }
    }

    /// Owners send what they have changed to everybody.
    pub fn spread(
        &self,
        layout: &Layout,
        changed: &BTreeSet<usize>,
        weights: &mut Weights,
    ) -> Result<()> {
        for keys in &layout.buckets {
            let keys: Vec<usize> =
                keys.iter().copied().filter(|key| changed.contains(key)).collect();
            let mine = |key: &&usize| layout.is_mine(**key);
            let fresh = keys.iter().filter(|key| !mine(key));
            let mut fresh: Vec<(usize, Tensor)> =
                fresh.map(|key| (*key, Tensor::uninit(&self.device, &self.shapes[key]))).collect();
            let own: Vec<&Tensor> =
                keys.iter().filter(mine).map(|key| weights.tensor(ParamId(*key))).collect();
            let others = (0..layout.n_ranks).filter(|rank| *rank != layout.rank);
            let sends: Vec<(usize, &Tensor)> =
                others.flat_map(|rank| own.iter().map(move |x| (rank, *x))).collect();
            let mut receives: Vec<(usize, &mut Tensor)> =
                fresh.iter_mut().map(|(key, x)| (layout.params[key].0, x)).collect();
            self.nccl.exchange(&sends, &mut receives).map_err(failed)?;
            // The old numbers may be let go: what takes their memory waits for this.
            self.nccl.join().map_err(failed)?;
            for (key, x) in fresh {
                *weights.tensor_mut(ParamId(key)) = x;
            }
        }
        Ok(())
    }
}

/// Gradients on their way from GPU to GPU.
pub struct Flight {
    nccl: Arc<Nccl>,
    device: Device,
    shapes: Arc<BTreeMap<usize, Vec<usize>>>,
    /// Kept until they have arrived.
    sent: Vec<Tensor>,
    /// Own gradients by key, and those of all ranks but this, by rank.
    sums: Vec<(usize, Tensor, Vec<Tensor>)>,
    failure: Option<String>,
}

impl Flight {
    /// The gradients of a bucket that are there go to their owners; zeros where there are none.
    pub fn send(&mut self, layout: &Layout, bucket: usize, held: &mut BTreeMap<usize, Tensor>) {
        let (first_sent, first_sum) = (self.sent.len(), self.sums.len());
        let mut owners = Vec::new();
        for key in &layout.buckets[bucket] {
            let shape = &self.shapes[key];
            let grad = held.remove(key).unwrap_or_else(|| Tensor::zeros(&self.device, shape));
            match layout.params[key].0 {
                owner if owner == layout.rank => {
                    let other = |_| Tensor::uninit(&self.device, shape);
                    self.sums.push((*key, grad, (1..layout.n_ranks).map(other).collect()));
                }
                owner => {
                    owners.push(owner);
                    self.sent.push(grad);
                }
            }
        }
        let sends: Vec<(usize, &Tensor)> =
            owners.into_iter().zip(&self.sent[first_sent..]).collect();
        let others: Vec<usize> = (0..layout.n_ranks).filter(|rank| *rank != layout.rank).collect();
        let mut receives: Vec<(usize, &mut Tensor)> = self.sums[first_sum..]
            .iter_mut()
            .flat_map(|(_, _, list)| others.iter().copied().zip(list))
            .collect();
        if let Err(problem) = self.nccl.exchange(&sends, &mut receives) {
            self.failure.get_or_insert(problem);
        }
    }

    /// The sums, in the order of the ranks.
    pub fn land(self, rank: usize) -> Result<Gradients> {
        let Flight { nccl, sent, sums, failure, .. } = self;
        nccl.join().map_or_else(Some, |()| failure).map_or(Ok(()), |it| Err(failed(it)))?;
        drop(sent);
        let mut grads = Gradients::default();
        for (key, own, mut list) in sums {
            list.insert(rank, own);
            let sum = list.into_iter().reduce(|sum, x| add_into(sum, &x));
            grads.add(key, sum.expect("there are ranks"));
        }
        Ok(grads)
    }
}
