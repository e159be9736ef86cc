//! `conv` on graphics processors: a thread takes a channel, or two, of a piece of some rows, and
//! holds the last inputs in registers. Sums over rows are made for each piece, then over pieces in
//! fixed order.

use super::*;
use crate::tensor::gpu::{Arg, Const, Gpu, Kernel, Word, Work};
use crate::tensor::segment::{Segment, Table};

static FORWARD: Kernel = Kernel {
    entry: "conv_forward",
    wgsl: include_str!("conv.wgsl"),
    cuda: include_str!("conv.cu"),
};
static BACKWARD: Kernel = Kernel { entry: "conv_backward", ..FORWARD };
static SUM: Kernel = Kernel { entry: "conv_sum", ..FORWARD };
static WINDOW: Kernel = Kernel { entry: "conv_window", ..FORWARD };
static STEP: Kernel = Kernel { entry: "conv_step", ..FORWARD };

/// Rows of a piece on a graphics processor: few enough to fill it, or with many tokens
/// (`N_TOK_MANY`) many enough for little to be read twice.
pub(super) const N_ROWS: usize = 32;
const N_ROWS_MANY: usize = 128;
const N_TOK_MANY: usize = 8192;

/// What is there and what is wanted, for the constants of the kernels.
#[derive(Clone, Copy, Default)]
struct Has {
    bias: bool,
    windows: bool,
    silu: bool,
    dx: bool,
    sums: bool,
}

fn consts(w: &Tensor, has: Has) -> [Const; 8] {
    let (channels, d_conv) = w.dims2();
    [
        ("CHANNELS", channels),
        ("D_CONV", d_conv),
        ("HAS_BIAS", usize::from(has.bias)),
        ("HAS_WINDOW", usize::from(has.windows)),
        ("SILU", usize::from(has.silu)),
        ("WANTS_X", usize::from(has.dx)),
        ("WANTS_SUMS", usize::from(has.sums)),
        ("LANES", lanes(channels)),
    ]
}

/// Channels of a thread that has wide loads.
fn lanes(channels: usize) -> usize {
    if channels.is_multiple_of(2) { 2 } else { 1 }
}

/// Groups of threads for all channels.
fn channel_groups(gpu: &Gpu, channels: usize) -> (usize, usize) {
    let is_wide = gpu.caps().wide_loads;
    let n_threads = if is_wide { channels / lanes(channels) } else { channels };
    let threads = n_threads.next_power_of_two().clamp(32, if is_wide { 64 } else { 128 });
    (n_threads.div_ceil(threads), threads)
}

/// What forward and backward share: pieces, their table, the windows one below the other, the work.
struct Launch {
    n_pieces: usize,
    table: Tensor,
    windows: Tensor,
    work: Work,
    has: Has,
}

impl Launch {
    fn new(gpu: &Gpu, job: &Job) -> Launch {
        let device = job.x.device();
        let is_many = job.x.dims2().0 >= N_TOK_MANY;
        let n_rows = if is_many { N_ROWS_MANY } else { N_ROWS };
        let pieces = job.pieces(n_rows);
        let table = job.segments.table(Table::Pieces(n_rows), device, |segments| {
            let words = |Piece { segment_idx, rows }: &Piece| {
                let segment = segments[*segment_idx].rows();
                [rows.start, rows.end, *segment_idx, segment.start, segment.end].map(|n| n as u32)
            };
            pieces.iter().flat_map(words).collect()
        });
        let has = Has {
            bias: job.bias.is_some(),
            windows: !job.windows.is_empty() && job.w.dims2().1 > 1,
            silu: job.activation == Activation::Silu,
            ..Has::default()
        };
        let windows = match &job.windows[..] {
            _ if !has.windows => job.x.clone(),
            [one] => one.clone(),
            list => Tensor::stack(list),
        };
        let (groups, threads) = channel_groups(gpu, job.x.dims2().1);
        let work = Work::grid([groups, pieces.len(), 1], threads);
        Launch { n_pieces: pieces.len(), table, windows, work, has }
    }

    fn params(&self) -> [Word; 3] {
        [self.n_pieces.into(), 0u32.into(), 0u32.into()]
    }
}

pub(super) fn forward_gpu(gpu: &Gpu, job: &Job) -> Tensor {
    let mut y = Tensor::activation(job.x.device(), job.x.shape());
    if job.x.n_elem() == 0 {
        return y;
    }
    let launch = Launch::new(gpu, job);
    let mut args = [
        Arg::In(&job.x),
        Arg::In(&job.w),
        Arg::In(job.bias.as_ref().unwrap_or(&job.w)),
        Arg::In(&launch.windows),
        Arg::In(&launch.table),
        Arg::Out(&mut y),
    ];
    let consts = consts(&job.w, launch.has);
    gpu.launch(&FORWARD, launch.work, &consts, &mut args, &launch.params());
    y
}

/// Inverts `forward_gpu`.
pub(super) fn backward_gpu(
    gpu: &Gpu,
    job: &Job,
    dy: &Tensor,
    wanted: &Wanted,
) -> Vec<Option<Tensor>> {
    let device = job.x.device();
    let (channels, d_conv) = job.w.dims2();
    let launch = Launch::new(gpu, job);
    let has = Has { dx: wanted.x, sums: wanted.sums, ..launch.has };
    // A kernel wants something to bind.
    let shape = if wanted.x { job.x.shape() } else { &[4] };
    let mut dx = Tensor::uninit_as(&job.x, shape);
    let n_parts = if wanted.sums { launch.n_pieces * (d_conv + 1) * channels } else { 4 };
    let mut parts = Tensor::uninit(device, &[n_parts]);
    let mut args = [
        Arg::In(&job.x),
        Arg::In(&job.w),
        Arg::In(job.bias.as_ref().unwrap_or(&job.w)),
        Arg::In(&launch.windows),
        Arg::In(&launch.table),
        Arg::In(dy),
        Arg::Out(&mut dx),
        Arg::Out(&mut parts),
    ];
    let consts = consts(&job.w, has);
    gpu.launch(&BACKWARD, launch.work, &consts, &mut args, &launch.params());
    let mut grads = vec![wanted.x.then_some(dx)];
    let mut sums = wanted.sums.then(|| {
        let mut dw = Tensor::uninit(device, job.w.shape());
        let mut dbias = Tensor::uninit(device, &[channels]);
        let mut args = [Arg::In(&parts), Arg::Out(&mut dw), Arg::Out(&mut dbias)];
        let work = Work::grid([((d_conv + 1) * channels).div_ceil(32), 1, 1], 256);
        gpu.launch(&SUM, work, &consts, &mut args, &launch.params());
        [dbias, dw].to_vec()
    });
    let n_sums = if job.bias.is_some() { 2 } else { 1 };
    grads.extend((0..n_sums).map(|_| sums.as_mut().and_then(Vec::pop)));
    grads
}

impl Job {
    /// As `window_after`.
    pub(super) fn window_after_gpu(&self, gpu: &Gpu, segment: Segment, window: &Tensor) -> Tensor {
        let mut next = Tensor::uninit(window.device(), window.shape());
        if window.n_elem() > 0 {
            let mut args = [Arg::In(&self.x), Arg::In(window), Arg::Out(&mut next)];
            let params = [0u32.into(), segment.start.into(), segment.n_tok.into()];
            let consts = consts(&self.w, Has::default());
            gpu.launch(&WINDOW, Work::each(window.n_elem()), &consts, &mut args, &params);
        }
        next
    }
}

/// As `step`: one launch for each sequence, whose window is a tensor of its own.
pub(super) fn step_gpu(gpu: &Gpu, conv: &Conv, windows: &mut [&mut Tensor]) -> Tensor {
    let (x, w) = (conv.x.value(), conv.w.value());
    let channels = w.dims2().0;
    let mut y = Tensor::activation(x.device(), x.shape());
    let silu = conv.activation == Activation::Silu;
    let consts = consts(w, Has { bias: conv.bias.is_some(), silu, ..Has::default() });
    for (row, window) in windows.iter_mut().enumerate() {
        // Other handles keep the old numbers.
        if !window.is_unique() {
            **window = window.copied();
        }
        let mut args = [
            Arg::In(x),
            Arg::In(w),
            Arg::In(conv.bias.map_or(w, Var::value)),
            Arg::Out(window),
            Arg::Out(&mut y),
        ];
        let params = [0u32.into(), row.into(), 1u32.into()];
        gpu.launch(
            &STEP,
            Work::groups(channels.div_ceil(64), 64).early(),
            &consts,
            &mut args,
            &params,
        );
    }
    y
}
