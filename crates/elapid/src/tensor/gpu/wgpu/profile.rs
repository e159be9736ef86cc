//! Time of kernels: the adapter writes down when each begins and ends.

use super::*;
use crate::tensor::gpu::profile::{KernelTime, Sums, listed};

/// Launches whose times wait to be read: a set of queries has no room for more.
const N_WAITING_MAX: usize = 2048;

pub(super) struct Profile {
    queries: wgpu::QuerySet,
    /// Of launches whose times wait to be read.
    pub names: Vec<String>,
    sums: Sums,
}

impl Profile {
    pub(super) fn is_full(&self) -> bool {
        self.names.len() == N_WAITING_MAX
    }

    /// Where the pass of the last launch writes its times.
    pub(super) fn writes(&self) -> wgpu::ComputePassTimestampWrites<'_> {
        let at = 2 * (self.names.len() as u32).saturating_sub(1);
        wgpu::ComputePassTimestampWrites {
            query_set: &self.queries,
            beginning_of_pass_write_index: Some(at),
            end_of_pass_write_index: Some(at + 1),
        }
    }
}

/// The kernel, of a product its sizes too.
pub(super) fn name_of(launch: &Launch) -> String {
    let entry = launch.kernel.entry;
    match (entry, launch.params) {
        ("product", [m, n, k, ..]) => format!("{entry} {}x{}x{}", m.0, n.0, k.0),
        _ => entry.into(),
    }
}

impl Wgpu {
    pub(in crate::tensor::gpu) fn profile_start(&self) {
        // Times are read in the middle of a pass, which a browser does not wait for.
        let has = self.device.features().contains(wgpu::Features::TIMESTAMP_QUERY);
        if has && !cfg!(target_family = "wasm") {
            self.flush();
            let queries = self.device.create_query_set(&wgpu::QuerySetDescriptor {
                label: None,
                ty: wgpu::QueryType::Timestamp,
                count: 2 * N_WAITING_MAX as u32,
            });
            let (names, sums) = (Vec::new(), Sums::new());
            self.pending().profile = Some(Profile { queries, names, sums });
        }
    }

    /// Waits, and adds up.
    pub(super) fn profile_collect(&self) {
        let mut guard = self.pending();
        let pending = &mut *guard;
        pending.encoder(&self.device);
        let (Some(profile), Some(encoder)) = (&mut pending.profile, &mut pending.encoder) else {
            return;
        };
        let names = std::mem::take(&mut profile.names);
        let n_queries = 2 * names.len();
        if n_queries == 0 {
            return;
        }
        let usage = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
        let buffer = buffer(&self.device, 8 * n_queries, usage);
        encoder.resolve_query_set(&profile.queries, 0..n_queries as u32, &buffer, 0);
        drop(guard);
        let Some(times) = block_on(self.read(&buffer, 0, 8 * n_queries)) else { return };
        let times: Vec<u64> = bytemuck::pod_collect_to_vec(&times);
        let to_ms = f64::from(self.queue.get_timestamp_period()) / 1e6;
        if let Some(profile) = &mut self.pending().profile {
            for (name, time) in names.into_iter().zip(times.chunks_exact(2)) {
                let sum = profile.sums.entry(name).or_default();
                *sum = (sum.0 + 1, sum.1 + time[1].saturating_sub(time[0]) as f64 * to_ms);
            }
        }
    }

    pub(in crate::tensor::gpu) fn profile_stop(&self) -> Vec<KernelTime> {
        self.profile_collect();
        let profile = self.pending().profile.take();
        profile.map_or(Vec::new(), |profile| listed(profile.sums))
    }
}
