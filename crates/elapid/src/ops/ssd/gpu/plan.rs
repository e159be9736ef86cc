//! How a batch is cut: chunks, runs and stretches, and what all kernels are told.

use super::*;

/// Most bytes of the states of a stretch.
const STATE_BYTES_MAX: usize = 1 << 29;
/// Most chunks of a stretch: groups along an axis.
pub const N_CHUNK_MAX: usize = 65_535;
/// Groups that `ssd_inside` and `ssd_outputs` should have, so that no multiprocessor waits.
const N_GROUP_MIN: usize = 512;
/// Most heads that they take one after the other: fewer parts of dscores to add later.
const N_HEADS_MAX: usize = 8;

/// Which way through time.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// States, from the first chunk.
    Forward,
    /// Gradients by states, from the last chunk.
    Backward,
}

/// Where states come from when a run begins.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Before {
    Zero,
    Given,
}

/// What the kernels compute.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    Mamba2,
    /// With so many rows for each token.
    Mamba3(usize),
}

/// What is cut, in rows, and how.
pub struct Cut<'a> {
    pub segments: &'a Segments,
    /// Most rows of a chunk.
    pub len: usize,
    pub has_initial: bool,
    pub n_chunk_max: usize,
}

/// What a segment has in a stretch.
pub struct Run {
    pub segment: usize,
    pub is_first: bool,
    pub is_last: bool,
}

/// Chunks whose states are there at the same time.
pub struct Stretch {
    pub chunks: Range<usize>,
    pub runs: Vec<Run>,
    /// In `table`.
    pub runs_at: usize,
}

/// How a batch is cut.
pub struct Plan {
    pub dims: SsdDims,
    pub form: Form,
    pub n_tok: usize,
    pub n_chunk: usize,
    pub n_heads: usize,
    pub stretches: Vec<Stretch>,
    pub table: Tensor,
    /// Where `cores.cu` does the work.
    pub cores: Option<Cores>,
}

impl Plan {
    /// `dy`: of backward.
    pub fn new(
        (dims, form): (SsdDims, Form),
        xbc: &Tensor,
        Cut { segments, len, has_initial, n_chunk_max }: Cut,
        dy: Option<&Tensor>,
    ) -> Plan {
        let mut table: Vec<u32> = Vec::new();
        let mut stretches: Vec<Stretch> = Vec::new();
        let mut runs: Vec<u32> = Vec::new();
        for (segment_idx, segment) in segments.iter().enumerate() {
            let n_chunk = chunks_of(segment.n_tok, len).len();
            for (idx, chunk) in chunks_of(segment.n_tok, len).enumerate() {
                let has_before = idx > 0 || has_initial;
                let has_after = idx + 1 < n_chunk;
                let at = table.len() / 4;
                let flags = u32::from(has_before) + 2 * u32::from(has_after);
                table.extend([(segment.start + chunk.start) as u32, chunk.len() as u32, flags, 0]);
                if stretches.last().is_none_or(|last| last.chunks.len() == n_chunk_max) {
                    stretches.push(Stretch { chunks: at..at, runs: vec![], runs_at: runs.len() });
                }
                let Some(stretch) = stretches.last_mut() else { continue };
                stretch.chunks.end += 1;
                if idx == 0 || stretch.runs.is_empty() {
                    let (is_first, is_last) = (idx == 0, false);
                    stretch.runs.push(Run { segment: segment_idx, is_first, is_last });
                    runs.extend([at as u32, 0]);
                }
                if let (Some(run), Some(count)) = (stretch.runs.last_mut(), runs.last_mut()) {
                    *count += 1;
                    run.is_last = !has_after;
                }
            }
        }
        let n_chunk = table.len() / 4;
        stretches.iter_mut().for_each(|stretch| stretch.runs_at += table.len());
        table.extend(runs);
        let n_heads = (n_chunk * dims.n_head / N_GROUP_MIN).clamp(1, N_HEADS_MAX);
        Plan {
            dims,
            form,
            n_tok: segments.n_tok(),
            n_chunk,
            n_heads: divisor_at_most(dims.heads_per_group(), n_heads),
            stretches,
            table: Tensor::from_u32(xbc.device(), &table),
            cores: Cores::new(&dims, form, xbc, dy),
        }
    }

    pub fn consts(&self, pass: Pass, before: Before) -> Vec<Const> {
        let mut list =
            consts(&self.dims, (self.n_heads, self.form), pass, before, self.table.device())
                .to_vec();
        if self.cores.is_some() {
            list[7] = ("MMA", 2);
        }
        list.push(("N_BUFFER", self.cores.map_or(1, |cores| cores.n_buffer)));
        list
    }

    /// For the chunks from `first` on, whose runs are at `runs_at` in the table.
    pub fn params(&self, first: usize, runs_at: usize) -> [Word; 6] {
        params(&self.dims, [self.n_tok, self.n_chunk, first, runs_at])
    }

    /// Whether some stretch begins within a segment.
    pub fn is_cut(&self) -> bool {
        self.stretches.iter().any(|stretch| stretch.runs.iter().any(|run| !run.is_first))
    }
}

/// What `cores.cu` wants: heads of 64, `d_state` of 64 or 128, all in bf16, ranks that divide 16,
/// CUDA.
#[derive(Clone, Copy)]
pub struct Cores {
    d_state: usize,
    /// In `Steps`.
    n_series: usize,
    /// Heads whose tiles `ssd_gradients` has at the same time.
    n_buffer: usize,
}

/// Bytes of 64 tokens of a head.
const HEAD_BYTES: usize = CHUNK * 64 * 2;
/// Bytes of the `Sums` of a head.
const SUMS_BYTES: usize = (19 * CHUNK + 16) * 4;

impl Cores {
    fn new(dims: &SsdDims, form: Form, xbc: &Tensor, dy: Option<&Tensor>) -> Option<Cores> {
        let caps = xbc.device().gpu()?.caps();
        let is_bf16 = [Some(xbc), dy].iter().flatten().all(|x| x.dtype() == DType::BF16);
        let is_plain = !matches!(form, Form::Mamba3(rank) if !16usize.is_multiple_of(rank));
        let fits = dims.d_head == 64 && matches!(dims.d_state, 64 | 128);
        let can = caps.tensor_cores && is_bf16 && is_plain && fits;
        let n_series = if form == Form::Mamba2 { 5 } else { 6 };
        let with = |n_buffer| Cores { d_state: dims.d_state, n_series, n_buffer };
        // With a head in a group there is no next one to fetch.
        let n_buffer_max = dims.heads_per_group().min(2);
        [with(n_buffer_max), with(1)]
            .into_iter()
            .find(|cores| can && cores.gradients_bytes() <= caps.shared_bytes_max)
    }

    /// Of a state, and of 64 tokens of b or c.
    fn state_bytes(&self) -> usize {
        self.d_state * 64 * 2
    }

    fn steps_bytes(&self) -> usize {
        self.n_series * CHUNK * 4
    }

    /// A group of `ssd_walk` takes a state with two threads a row.
    pub(super) fn walk_work(&self, n_head: usize, n_run: usize) -> Work {
        let shared = HEAD_BYTES + 3 * self.state_bytes() + 8;
        Work { shared: shared as u32, ..Work::grid([1, n_head, n_run], 2 * self.d_state) }
    }

    pub(super) fn outputs_work(&self, n_block: usize, n_chunk: usize) -> Work {
        let shared = 3 * (HEAD_BYTES + self.state_bytes()) + 2 * self.steps_bytes();
        Work { shared: shared as u32, ..Work::grid([n_block, n_chunk, 1], 256) }
    }

    pub(super) fn gradients_work(&self, n_group: usize, n_chunk: usize) -> Work {
        let shared = self.gradients_bytes() as u32;
        Work { shared, ..Work::grid([n_group, n_chunk, 1], 512) }
    }

    fn gradients_bytes(&self) -> usize {
        let tiles = 2 * (HEAD_BYTES + self.state_bytes());
        let once = 2 * self.state_bytes() + HEAD_BYTES + 2 * SUMS_BYTES;
        once + self.n_buffer * (tiles + self.steps_bytes())
    }
}

/// Of all entries. `MMA`: whether CUDA multiplies in bf16, 2 in `cores.cu`. `RANK`: rows of a token
/// of Mamba-3, or 0.
pub fn consts(
    dims: &SsdDims,
    (n_heads, form): (usize, Form),
    pass: Pass,
    before: Before,
    device: &Device,
) -> [Const; 9] {
    [
        ("N_HEAD", dims.n_head),
        ("D_HEAD", dims.d_head),
        ("N_GROUP", dims.n_group),
        ("D_STATE", dims.d_state),
        ("N_PER", n_heads),
        ("PASS", usize::from(pass == Pass::Backward)),
        ("HAS_BEFORE", usize::from(before == Before::Given)),
        ("MMA", usize::from(device.activation_dtype() == DType::BF16)),
        ("RANK", if let Form::Mamba3(rank) = form { rank } else { 0 }),
    ]
}

/// Of all entries: n_tok, n_chunk, first, runs_at, and limits. A kernel may not be given infinity.
pub fn params(dims: &SsdDims, counts: [usize; 4]) -> [Word; 6] {
    let [n_tok, n_chunk, first, runs_at] = counts.map(Word::from);
    let limits = [dims.delta_min, dims.delta_max.min(f32::MAX)].map(Word::from);
    [n_tok, n_chunk, first, runs_at, limits[0], limits[1]]
}

/// Chunks whose states fit into one argument of a kernel.
pub fn n_chunk_max(gpu: &Gpu, dims: &SsdDims) -> usize {
    let n_bytes = dims.n_head * dims.n_state() * 4;
    (gpu.binding_bytes_max().min(STATE_BYTES_MAX) / n_bytes.max(1)).clamp(1, N_CHUNK_MAX)
}
