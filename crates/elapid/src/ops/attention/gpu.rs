//! `attention` on GPUs: launches of the kernels beside.
//!
//! | kernels          | for                                                                     |
//! |------------------|-------------------------------------------------------------------------|
//! | `attention.wgsl` | whole sequences and their gradients, and many new tokens to a cache;    |
//! | `attention.cu`   | the same for any width, in f32                                          |
//! | `cores.cu`       | the same in bf16 by tensor cores, for heads of 64 and 128               |
//! | `step.*`         | a few new tokens to a cache                                             |
//!
//! Groups take blocks of rows that begin with their sequence, so that a sequence has the same bits
//! whatever is beside it. Longest first: what a group has to do grows with the place of its block.
//!
//! | name      | shape               |                                                      |
//! |-----------|---------------------|------------------------------------------------------|
//! | `log_sum` | (n_head, n_tok)     | as in `mod.rs`, but by heads                         |
//! | `stats`   | (2, n_head, n_tok)  | `log_sum`, and dy . y                                |
//! | `blocks`  | (n_block, 4)        | first row, rows, place in the sequence, its length   |

use super::*;
use crate::tensor::DType;
use crate::tensor::gpu::{Arg, Const, Gpu, Kernel, Word, Work, bind};
use crate::tensor::segment::Table;

static FORWARD: Kernel =
    Kernel::new("attention_forward", include_str!("attention.wgsl"), include_str!("attention.cu"));
static STATS: Kernel = Kernel { entry: "attention_stats", ..FORWARD };
static DQ: Kernel = Kernel { entry: "attention_dq", ..FORWARD };
static DKV: Kernel = Kernel { entry: "attention_dkv", ..FORWARD };
/// In place of those of the same name.
static FORWARD_CORES: Kernel =
    Kernel { entry: "attention_forward_cores", wgsl: "", cuda: include_str!("cores.cu") };
static DQ_CORES: Kernel = Kernel { entry: "attention_dq_cores", ..FORWARD_CORES };
static DKV_CORES: Kernel = Kernel { entry: "attention_dkv_cores", ..FORWARD_CORES };
static APPEND: Kernel =
    Kernel::new("attention_append", include_str!("step.wgsl"), include_str!("step.cu"));
static STEP: Kernel = Kernel { entry: "attention_step", ..APPEND };
static MERGE: Kernel = Kernel { entry: "attention_merge", ..APPEND };

/// Rows that a group owns.
const N_OWN: usize = 64;
/// Threads of a group, and of one with tensor cores.
const N_THREAD: usize = 256;
const N_THREAD_CORES: usize = 128;
/// Keys of one split of `step`.
const N_SPLIT: usize = 64;

/// How rows are dealt out to tensor cores; see `cores.cu`.
#[derive(Clone, Copy)]
struct Cores {
    d_head: usize,
    /// Own rows of a warp in forward and for dq, by 16; for dk and dv there are 16.
    m_tiles: usize,
    /// Rows met at a time, in forward and in backward: what registers hold.
    n_other: [usize; 2],
}

impl Cores {
    /// Where they can be used: heads of 64 or 128, all in bf16, on CUDA.
    fn new(gpu: &Gpu, config: &Attention, tensors: &[&Tensor]) -> Option<Cores> {
        let d_head = config.d_head;
        let (m_tiles, n_other) = match d_head {
            64 => (2, [64, 64]),
            128 => (1, [64, 32]),
            _ => return None,
        };
        let is_bf16 = tensors.iter().all(|x| x.dtype() == DType::BF16);
        let can = gpu.caps().tensor_cores && is_bf16;
        can.then_some(Cores { d_head, m_tiles, n_other })
    }

    fn n_own(&self) -> usize {
        N_OWN * self.m_tiles
    }

    /// In forward: two matrices of others, twice.
    fn forward_bytes(&self) -> usize {
        4 * self.n_other[0] * self.d_head * 2
    }

    /// In backward: two matrices of own rows, two of others, twice, and the stats of these.
    fn backward_bytes(&self, m_tiles: usize) -> usize {
        (2 * N_OWN * m_tiles + 4 * self.n_other[1]) * self.d_head * 2 + 4 * self.n_other[1] * 4
    }
}

/// Starts a kernel, or the one for tensor cores with these tiles, others and bytes, with a group
/// for each block and head.
fn launch(
    gpu: &Gpu,
    kernels: [&'static Kernel; 2],
    cores: Option<[usize; 3]>,
    (groups, mut consts, params): ([usize; 3], Vec<Const>, &[Word]),
    mut args: Vec<Arg>,
) {
    let (kernel, work) = match cores {
        Some([m_tiles, n_other, shared]) => {
            consts.extend([("M_TILES", m_tiles), ("OTHER", n_other)]);
            let work = Work::grid(groups, N_THREAD_CORES);
            (kernels[1], Work { shared: shared as u32, ..work })
        }
        None => (kernels[0], Work::grid(groups, N_THREAD)),
    };
    gpu.launch(kernel, work, &consts, &mut args, params);
}

/// `y` and `log_sum` of whole sequences.
pub(super) fn forward(
    gpu: &Gpu,
    qkv: [&Tensor; 3],
    config: &Attention,
    segments: &Segments,
) -> (Tensor, Tensor) {
    let (device, n_tok) = (qkv[0].device(), segments.n_tok());
    gpu.expect_rounds(&FORWARD, n_rounds(config, longest(segments)).0);
    let mut y = Tensor::uninit_as(qkv[0], qkv[0].shape());
    let mut log_sum = Tensor::uninit(device, &[config.n_head, n_tok]);
    if n_tok > 0 {
        let n_own = Cores::new(gpu, config, &qkv).map_or(N_OWN, |cores| cores.n_own());
        let blocks = block_table(device, segments, n_own);
        let (n_block, params) = (blocks.n_elem() / 4, params(config, n_tok, [0; 3]));
        let groups = (Some(&blocks), n_block, params);
        launch_forward(gpu, config, qkv, groups, [&mut y, &mut log_sum]);
    }
    (y, log_sum)
}

fn longest(segments: &Segments) -> usize {
    segments.iter().map(|segment| segment.n_tok).max().unwrap_or(0)
}

/// Rounds of loops of a thread in forward and in backward, over sequences of at most `n_tok`: for
/// every 32 tokens met, those of products along the head and back, and of the softmax.
fn n_rounds(config: &Attention, n_tok: usize) -> (usize, usize) {
    let n_met = n_tok.min(config.window.unwrap_or(usize::MAX).saturating_add(N_OWN));
    let (n_blocks, n_group) = (n_met.div_ceil(32), config.n_head / config.n_kv_head);
    let (along, runs) = (config.d_head * 17 / 16, config.d_head.div_ceil(64));
    let forward = n_blocks * (along + 38 * runs + 90);
    (forward, n_blocks * n_group * (2 * along + 68 * runs + 12))
}

/// `blocks`: none with a cache.
fn launch_forward(
    gpu: &Gpu,
    config: &Attention,
    [q, k, v]: [&Tensor; 3],
    (blocks, n_block, params): (Option<&Tensor>, usize, [Word; 7]),
    [y, log_sum]: [&mut Tensor; 2],
) {
    let cores = Cores::new(gpu, config, &[q, k, v]);
    let cores = cores.map(|it| [it.m_tiles, it.n_other[0], it.forward_bytes()]);
    let consts = consts(config, usize::from(blocks.is_none()));
    let task = ([n_block, config.n_head, 1], consts, &params[..]);
    // Where there are no blocks to look up anything may stand in their place.
    let args = bind([q, k, v, blocks.unwrap_or(q)], [y, log_sum]);
    launch(gpu, [&FORWARD, &FORWARD_CORES], cores, task, args);
}

/// Inverts `forward`.
pub(super) fn backward(
    gpu: &Gpu,
    saved: &Saved,
    config: &Attention,
    segments: &Segments,
    (dy, wanted): (&Tensor, [bool; 3]),
) -> [Option<Tensor>; 3] {
    let Saved { q, k, v, y, log_sum } = saved;
    gpu.expect_rounds(&DKV, n_rounds(config, longest(segments)).1);
    let n_tok = segments.n_tok();
    let (plain, params) = (consts(config, 0), params(config, n_tok, [0; 3]));
    let cores = Cores::new(gpu, config, &[q, k, v, dy]);
    let mut stats = Tensor::uninit(q.device(), &[2, config.n_head, n_tok]);
    let mut args = bind([dy, y, log_sum], [&mut stats]);
    // Up to a warp takes each.
    let lanes = match (gpu.caps().warps, config.d_head) {
        (false, _) => 1,
        (true, 64 | 128 | 256) => config.d_head / 8,
        (true, _) => 32,
    };
    let n = n_tok * config.n_head * lanes;
    gpu.launch(&STATS, Work::each(n), &plain, &mut args, &params);
    let start = |kernels: [&'static Kernel; 2], m_tiles: usize, n_head: usize, outs: Vec<Arg>| {
        let blocks = block_table(q.device(), segments, N_OWN * m_tiles);
        let mut args = bind([q, k, v, &blocks, dy, &stats], []);
        args.extend(outs);
        let cores = cores.map(|it| [m_tiles, it.n_other[1], it.backward_bytes(m_tiles)]);
        let task = ([blocks.n_elem() / 4, n_head, 1], plain.clone(), &params[..]);
        launch(gpu, kernels, cores, task, args);
    };
    let [wants_dq, wants_dk, wants_dv] = wanted;
    let dq = wants_dq.then(|| {
        let mut dq = Tensor::uninit_as(q, q.shape());
        let m_tiles = cores.map_or(1, |cores| cores.m_tiles);
        start([&DQ, &DQ_CORES], m_tiles, config.n_head, vec![Arg::Out(&mut dq)]);
        dq
    });
    if !wants_dk && !wants_dv {
        return [dq, None, None];
    }
    let (mut dk, mut dv) = (Tensor::uninit_as(k, k.shape()), Tensor::uninit_as(v, v.shape()));
    let outs = vec![Arg::Out(&mut dk), Arg::Out(&mut dv)];
    start([&DKV, &DKV_CORES], 1, config.n_kv_head, outs);
    [dq, wants_dk.then_some(dk), wants_dv.then_some(dv)]
}

/// `forward` after the new keys and values have gone to the caches, one sequence after the other.
pub(super) fn forward_cached(
    gpu: &Gpu,
    [q, k, v]: [&Tensor; 3],
    config: &Attention,
    segments: &Segments,
    caches: &mut [&mut KvCache],
) -> Tensor {
    let mut y = Tensor::uninit_as(q, q.shape());
    // Nobody reads it.
    let mut log_sum = Tensor::uninit(q.device(), &[config.n_head, segments.n_tok()]);
    let positions = positions(q.device(), segments, caches);
    for (&segment, cache) in segments.iter().zip(caches) {
        let n_past = cache.n_tok();
        let new = New { k, v, rows: segment.rows(), positions: &positions };
        cache.append_rows(&new, segments.n_ahead());
        let Some([keys, values]) = cache.on_gpu() else { continue };
        let qkv = [q, &keys, &values];
        if segment.n_tok <= N_STEP_MAX {
            let past = n_past..n_past + segments.n_ahead() + 1;
            step(gpu, config, (segment, past), (qkv, &positions), &mut y);
            continue;
        }
        gpu.expect_rounds(&FORWARD, n_rounds(config, n_past + segment.n_tok).0);
        let params = params(config, segments.n_tok(), [segment.start, segment.n_tok, n_past]);
        let n_own = Cores::new(gpu, config, &qkv).map_or(N_OWN, |cores| cores.n_own());
        let n_block = segment.n_tok.div_ceil(n_own);
        launch_forward(gpu, config, qkv, (None, n_block, params), [&mut y, &mut log_sum]);
    }
    y
}

/// Where every row is in its sequence: behind what its cache holds.
fn positions(device: &Device, segments: &Segments, caches: &[&mut KvCache]) -> Tensor {
    let pairs = || segments.iter().zip(caches);
    if pairs().all(|(segment, cache)| segment.offset == cache.n_tok()) {
        return segments.positions(device);
    }
    let rows = pairs().flat_map(|(segment, cache)| cache.n_tok()..cache.n_tok() + segment.n_tok);
    Tensor::from_u32(device, &rows.map(|pos| pos as u32).collect::<Vec<_>>())
}

/// A few new tokens of one sequence, whose keys and values are in the cache already; `past` is how
/// many came before, now and when the same launch is done again.
fn step(
    gpu: &Gpu,
    config: &Attention,
    (segment, past): (Segment, Range<usize>),
    ([q, keys, values], positions): ([&Tensor; 3], &Tensor),
    y: &mut Tensor,
) {
    let n_new = segment.n_tok;
    let n_split = past.map(|n_past| {
        let seen = config.seen(&(n_past..n_past + n_new));
        seen.end.div_ceil(N_SPLIT) - seen.start / N_SPLIT
    });
    let n_split = n_split.max().expect("at least now");
    let Attention { n_head, n_kv_head, d_head, .. } = *config;
    let mut parts = Tensor::uninit(q.device(), &[n_new * n_split, n_head, d_head + 2]);
    let scale = (config.scale * LOG2_E).into();
    let params = [segment.start.into(), n_new.into(), window(config), scale, n_split.into()];
    let consts = step_consts(n_head, n_kv_head, d_head);
    let mut args = bind([q, keys, values, positions], [&mut parts]);
    let work = Work::grid([n_split, n_kv_head, n_new], 256).early();
    gpu.launch(&STEP, work, &consts, &mut args, &params);
    let work = Work::grid([n_head, n_new, 1], 64).early();
    gpu.launch(&MERGE, work, &consts, &mut bind([&parts], [y]), &params);
}

/// Rows of keys and of values that go to a cache.
pub(super) struct New<'a> {
    pub k: &'a Tensor,
    pub v: &'a Tensor,
    pub rows: Range<usize>,
    /// Of all rows of `k`; those of `rows` follow each other.
    pub positions: &'a Tensor,
}

/// Copies rows of `k` and `v` to their places in a cache, in its dtype.
pub(super) fn append(gpu: &Gpu, new: &New, [keys, values]: [&mut Tensor; 2]) {
    let (width, rows) = (new.k.shape()[1], &new.rows);
    let params = [rows.start.into(), rows.len().into(), Word(0), Word(0), Word(0)];
    let mut args = bind([new.k, new.v, new.positions], [keys, values]);
    let work = Work::each(rows.len() * width).early();
    gpu.launch(&APPEND, work, &step_consts(1, 1, width), &mut args, &params);
}

fn step_consts(n_head: usize, n_kv_head: usize, d_head: usize) -> [Const; 3] {
    [("D", d_head), ("N_HEAD", n_head), ("N_KV_HEAD", n_kv_head)]
}

fn consts(config: &Attention, cached: usize) -> Vec<Const> {
    let mut list = step_consts(config.n_head, config.n_kv_head, config.d_head).to_vec();
    list.push(("CACHED", cached));
    list
}

fn window(config: &Attention) -> Word {
    config.window.unwrap_or(usize::MAX).min(u32::MAX as usize).into()
}

/// With a cache, `at` is the first new row, how many there are, and how many came before.
fn params(config: &Attention, n_tok: usize, at: [usize; 3]) -> [Word; 7] {
    let [first, n_new, n_past] = at.map(Word::from);
    let scale = config.scale;
    [n_tok.into(), window(config), scale.into(), (scale * LOG2_E).into(), first, n_new, n_past]
}

fn block_table(device: &Device, segments: &Segments, n_own: usize) -> Tensor {
    segments.table(Table::Blocks(n_own), device, |segments| {
        let block = |segment: &Segment, pos: usize| {
            let n = n_own.min(segment.n_tok - pos);
            [segment.start + pos, n, pos, segment.n_tok].map(|x| x as u32)
        };
        let mut list: Vec<[u32; 4]> = segments
            .iter()
            .flat_map(|segment| (0..segment.n_tok).step_by(n_own).map(|pos| block(segment, pos)))
            .collect();
        list.sort_by_key(|block| std::cmp::Reverse(block[2]));
        list.concat()
    })
}
