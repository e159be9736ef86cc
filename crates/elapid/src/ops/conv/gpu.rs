//! `conv` on GPUs: a thread takes a channel, or two, of a piece of some rows, and
//! holds the last inputs in registers. Sums over rows are made for each piece, then over pieces in
//! fixed order.

use super::*;
use crate::tensor::gpu::{Const, Gpu, Kernel, Word, Work, bind};
use crate::tensor::segment::{Segment, Table};

static FORWARD: Kernel =
    Kernel::new("conv_forward", include_str!("conv.wgsl"), include_str!("conv.cu"));
static BACKWARD: Kernel = Kernel { entry: "conv_backward", ..FORWARD };
static SUM: Kernel = Kernel { entry: "conv_sum", ..FORWARD };
static WINDOW: Kernel = Kernel { entry: "conv_window", ..FORWARD };
static STEP: Kernel = Kernel { entry: "conv_step", ..FORWARD };

/// Rows of a piece: few enough to fill it, or with many tokens
/// (`N_TOK_MANY`) many enough for little to be read twice.
pub(super) const N_ROWS: usize = 32;
const N_ROWS_MANY: usize = 128;
const N_TOK_MANY: usize = 8192;

/// `flags`: whether there are a bias, windows and an activation, and whether the gradients by x and
/// by w and bias are wanted.
fn consts(w: &Tensor, flags: [bool; 5]) -> [Const; 8] {
    let (channels, d_conv) = w.dims2();
    let [bias, windows, silu, dx, sums] = flags.map(usize::from);
    [
        ("CHANNELS", channels),
        ("D_CONV", d_conv),
        ("HAS_BIAS", bias),
        ("HAS_WINDOW", windows),
        ("SILU", silu),
        ("WANTS_X", dx),
        ("WANTS_SUMS", sums),
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
    consts: [Const; 8],
    params: [Word; 3],
}

impl Launch {
    fn new(gpu: &Gpu, job: &Job, wanted: &Wanted) -> Launch {
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
        let has_windows = !job.windows.is_empty() && job.w.dims2().1 > 1;
        let windows = match &job.windows[..] {
            _ if !has_windows => job.x.clone(),
            [one] => one.clone(),
            list => Tensor::stack(list),
        };
        let (groups, threads) = channel_groups(gpu, job.x.dims2().1);
        let silu = job.activation == Activation::Silu;
        let flags = [job.bias.is_some(), has_windows, silu, wanted.x, wanted.sums];
        let n_pieces = pieces.len();
        Launch {
            n_pieces,
            table,
            windows,
            work: Work::grid([groups, n_pieces, 1], threads),
            consts: consts(&job.w, flags),
            params: [n_pieces.into(), 0u32.into(), 0u32.into()],
        }
    }
}

pub(super) fn forward_gpu(gpu: &Gpu, job: &Job) -> Tensor {
    let mut y = Tensor::activation(job.x.device(), job.x.shape());
    if job.x.n_elem() > 0 {
        let Launch { table, windows, work, consts, params, .. } =
            Launch::new(gpu, job, &Wanted { x: false, sums: false });
        let bias = job.bias.as_ref().unwrap_or(&job.w);
        let mut args = bind([&job.x, &job.w, bias, &windows, &table], [&mut y]);
        gpu.launch(&FORWARD, work, &consts, &mut args, &params);
    }
    y
}

/// Inverts `forward_gpu`.
pub(super) fn backward_gpu(gpu: &Gpu, job: &Job, dy: &Tensor, wanted: &Wanted) -> Grads {
    let device = job.x.device();
    let (channels, d_conv) = job.w.dims2();
    let Launch { n_pieces, table, windows, work, consts, params } = Launch::new(gpu, job, wanted);
    // A kernel wants something to bind.
    let mut dx = Tensor::uninit_as(&job.x, if wanted.x { job.x.shape() } else { &[4] });
    let n_parts = if wanted.sums { n_pieces * (d_conv + 1) * channels } else { 4 };
    let mut parts = Tensor::uninit(device, &[n_parts]);
    let bias = job.bias.as_ref().unwrap_or(&job.w);
    let ins = [&job.x, &job.w, bias, &windows, &table, dy];
    gpu.launch(&BACKWARD, work, &consts, &mut bind(ins, [&mut dx, &mut parts]), &params);
    let sums = wanted.sums.then(|| {
        let mut dw = Tensor::uninit(device, job.w.shape());
        let mut dbias = Tensor::uninit(device, &[channels]);
        let work = Work::grid([((d_conv + 1) * channels).div_ceil(32), 1, 1], 256);
        let mut args = bind([&parts], [&mut dw, &mut dbias]);
        gpu.launch(&SUM, work, &consts, &mut args, &params);
        (dw, dbias)
    });
    (wanted.x.then_some(dx), sums)
}

impl Job {
    /// As `window_after`.
    pub(super) fn window_after_gpu(&self, gpu: &Gpu, segment: Segment, window: &Tensor) -> Tensor {
        let mut next = Tensor::uninit(window.device(), window.shape());
        if window.n_elem() > 0 {
            let mut args = bind([&self.x, window], [&mut next]);
            let params = [0u32.into(), segment.start.into(), segment.n_tok.into()];
            let consts = consts(&self.w, [false; 5]);
            gpu.launch(&WINDOW, Work::each(window.n_elem()), &consts, &mut args, &params);
        }
        next
    }
}

/// As `forward` for one token of each sequence: windows move on where they are.
pub(super) fn step_gpu(gpu: &Gpu, conv: &Conv, windows: &mut [&mut Tensor]) -> Tensor {
    let (x, w) = (conv.x.value(), conv.w.value());
    let work = Work::groups(w.dims2().0.div_ceil(64), 64).early();
    let mut y = Tensor::activation(x.device(), x.shape());
    let silu = conv.activation == Activation::Silu;
    let consts = consts(w, [conv.bias.is_some(), false, silu, false, false]);
    own(windows);
    for (row, window) in windows.iter_mut().enumerate() {
        let mut args = bind([x, w, conv.bias.map_or(w, Var::value)], [window, &mut y]);
        let params = [0u32.into(), row.into(), 1u32.into()];
        gpu.launch(&STEP, work, &consts, &mut args, &params);
    }
    y
}
