//! What a linear map needs beside its products, on any device: each works on rows, with a number
//! for each column.

use crate::ops::norm::sum_rows;
use crate::tensor::Tensor;
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Arg, Const, Gpu, Kernel, Work, bind};
use crate::tensor::product::Rows;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// Rows of a task; sums over rows are made per task, then over tasks in order.
pub(super) const N_ROWS: usize = 64;
/// Numbers of an element-wise task.
const PIECE: usize = 1 << 14;

pub(super) static BIAS: Kernel =
    Kernel::new("linear_bias", include_str!("linear.wgsl"), include_str!("linear.cu"));
static SCALE: Kernel = Kernel { entry: "linear_scale", ..BIAS };
static SUBTRACT: Kernel = Kernel { entry: "linear_subtract", ..BIAS };
static SUM: Kernel = Kernel { entry: "linear_sum", ..BIAS };
static SUM_INTO: Kernel = Kernel { entry: "linear_sum_into", ..BIAS };

/// What happens to a result that is there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Put {
    /// It is not read.
    Set,
    /// It is added to.
    Add,
}

/// Constants of all entries: the width of rows, and what is there.
pub(super) fn consts(d: usize, has: &[&'static str]) -> [Const; 6] {
    let flag = |name: &'static str| (name, usize::from(has.contains(&name)));
    let [z, norms, fixed, adds] = ["HAS_Z", "HAS_NORMS", "FIXED", "ADDS"].map(flag);
    [("D", d), ("N_ROWS", N_ROWS), z, norms, fixed, adds]
}

impl Put {
    /// Constants of an entry that sets or adds.
    pub(super) fn consts(self, d: usize) -> [Const; 6] {
        consts(d, if self == Put::Add { &["ADDS"] } else { &[] })
    }
}

/// Runs a kernel over the numbers of `out`, in windows that fit into a binding: `launch` gets the
/// rows among those of `out`, and the bytes and the place of the first number in them.
pub(super) fn each_window(
    gpu: &Gpu,
    out: &mut Rows,
    mut launch: impl FnMut(&mut Tensor, Range<usize>, Range<usize>, usize),
) {
    let (_, d) = out.tensor.dims2();
    let row_bytes = out.tensor.dtype().n_bytes(d).expect("whole numbers");
    let size = row_bytes.checked_div(d).unwrap_or(4).max(1);
    let align = gpu.offset_align();
    let n = (gpu.binding_bytes_max() - align) / row_bytes.max(1);
    for start in out.rows.clone().step_by(n.max(1)) {
        let rows = start..out.rows.end.min(start.saturating_add(n.max(1)));
        let first = rows.start * row_bytes;
        let lead = first % align;
        let bytes = first - lead..rows.end * row_bytes;
        let own = rows.start - out.rows.start..rows.end - out.rows.start;
        launch(out.tensor, own, bytes, lead / size);
    }
}

/// `y = bias` in each row; the first column has number `first` of the bias.
pub(super) fn fill_rows(bias: &Tensor, first: usize, y: &mut Rows) {
    let d = y.tensor.dims2().1;
    match bias.device() {
        Device::Cpu(cpu) => {
            let bias = &bias.f32()[first..first + d];
            cpu.each_piece(y.f32_mut(), N_ROWS * d, |_, y| {
                y.chunks_exact_mut(d.max(1)).for_each(|y| y.copy_from_slice(bias));
            });
        }
        Device::Gpu(gpu) => each_window(gpu, y, |y, rows, bytes, lead| {
            let n = rows.len() * d;
            let mut args = [Arg::In(bias), Arg::Window(y, bytes)];
            let params = [n.into(), first.into(), lead.into()];
            gpu.launch(&BIAS, Work::each(n), &consts(d, &[]), &mut args, &params);
        }),
    }
}

/// `a - b`.
pub(super) fn subtract(a: &Tensor, b: &Tensor) -> Tensor {
    let mut y = Tensor::uninit_as(a, a.shape());
    let d = a.dims2().1;
    match a.device() {
        Device::Cpu(cpu) => cpu.each_piece(y.f32_mut(), PIECE, |idx, y| {
            let (a, b) = (&a.f32()[idx * PIECE..], &b.f32()[idx * PIECE..]);
            y.iter_mut().zip(a).zip(b).for_each(|((y, a), b)| *y = a - b);
        }),
        Device::Gpu(gpu) => each_window(gpu, &mut (&mut y).into(), |y, rows, bytes, lead| {
            let n = rows.len() * d;
            let (a, b) = (a.rows(rows.clone()), b.rows(rows));
            let mut args = [Arg::In(&a), Arg::In(&b), Arg::Window(y, bytes)];
            let params = [n.into(), lead.into()];
            gpu.launch(&SUBTRACT, Work::each(n), &consts(d, &[]), &mut args, &params);
        }),
    }
    y
}

/// `y = factor x` or `y += factor x`, with a factor for each column.
pub(super) fn scale_columns(factors: &Tensor, x: &Tensor, mut y: Rows, put: Put) {
    let d = x.dims2().1;
    match x.device() {
        Device::Cpu(cpu) => cpu.each_piece(y.f32_mut(), N_ROWS * d, |idx, y| {
            let x = &x.f32()[idx * N_ROWS * d..][..y.len()];
            cpu.simd(Scale { factors: factors.f32(), x, y, put });
        }),
        Device::Gpu(gpu) => each_window(gpu, &mut y, |y, rows, bytes, lead| {
            let n = rows.len() * d;
            let x = x.rows(rows);
            let mut args = [Arg::In(factors), Arg::In(&x), Arg::Window(y, bytes)];
            let params = [n.into(), lead.into()];
            gpu.launch(&SCALE, Work::each(n), &put.consts(d), &mut args, &params);
        }),
    }
}

/// Adds the sums over the rows of dy to `out` from a number on; with z and norms the sums of dy z,
/// divided by the norms. Per piece of rows, then over the pieces in order.
pub(super) fn add_column_sums(
    dy: &Tensor,
    scaled: Option<(&Tensor, &Tensor)>,
    (out, first): (&mut Tensor, usize),
) {
    let (n_rows, d) = dy.dims2();
    let gpu = match dy.device() {
        Device::Gpu(gpu) => gpu,
        Device::Cpu(_) => {
            let sums = column_sums(dy, scaled.map(|(z, _)| z));
            let sums = out.f32_mut()[first..first + d].iter_mut().zip(sums.f32());
            match scaled {
                Some((_, norms)) => {
                    sums.zip(norms.f32()).for_each(|((out, sum), norm)| *out += sum / norm)
                }
                None => sums.for_each(|(out, sum)| *out += sum),
            }
            return;
        }
    };
    let has: &[&'static str] = if scaled.is_some() { &["HAS_Z", "HAS_NORMS"] } else { &[] };
    let consts = consts(d, has);
    for rows in gpu.windows(n_rows, 4 * d) {
        let part = dy.rows(rows.clone());
        let z = scaled.map_or_else(|| part.clone(), |(z, _)| z.rows(rows.clone()));
        let n_parts = rows.len().div_ceil(N_ROWS);
        let mut parts = Tensor::uninit(dy.device(), &[n_parts, d]);
        let work = Work::grid([d.div_ceil(256), n_parts, 1], 256);
        gpu.launch(&SUM, work, &consts, &mut bind([&part, &z], [&mut parts]), &[rows.len().into()]);
        let norms = scaled.map_or(&parts, |(_, norms)| norms);
        let mut args = bind([&parts, norms], [out]);
        let work = Work::groups(d.div_ceil(256), 256);
        gpu.launch(&SUM_INTO, work, &consts, &mut args, &[n_parts.into(), first.into()]);
    }
}

/// Sums over the rows of dy, or of dy z, on the CPU.
fn column_sums(dy: &Tensor, z: Option<&Tensor>) -> Tensor {
    let cpu = dy.device().expect_cpu();
    let (n_rows, d) = dy.dims2();
    let (dy_numbers, z) = (dy.f32(), z.map(Tensor::f32));
    let mut parts = Tensor::zeros(dy.device(), &[n_rows.div_ceil(N_ROWS), d]);
    cpu.each_piece(parts.f32_mut(), d, |idx, part| {
        for row in idx * N_ROWS..n_rows.min((idx + 1) * N_ROWS) {
            let at = row * d..(row + 1) * d;
            let sums = part.iter_mut().zip(&dy_numbers[at.clone()]);
            match z {
                Some(z) => sums.zip(&z[at]).for_each(|((sum, dy), z)| *sum += dy * z),
                None => sums.for_each(|(sum, dy)| *sum += dy),
            }
        }
    });
    sum_rows(&parts)
}

/// `y = factor x` or `y += factor x`, with a factor for each column.
struct Scale<'a> {
    factors: &'a [f32],
    x: &'a [f32],
    y: &'a mut [f32],
    put: Put,
}

impl WithSimd for Scale<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Scale { factors, x, y, put } = self;
        let d = factors.len().max(1);
        for (x, y) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)) {
            for at in (0..d).step_by(F32s::<S>::LANES) {
                let (x, factor) = (F32s::load(simd, &x[at..]), F32s::load(simd, &factors[at..]));
                let scaled = match put {
                    Put::Set => x * factor,
                    Put::Add => x.mul_add(factor, F32s::load(simd, &y[at..])),
                };
                scaled.store(&mut y[at..]);
            }
        }
    }
}
