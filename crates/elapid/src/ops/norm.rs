//! RMSNorm, alone and fused with the residual addition before it.
//!
//! For each row of `d` numbers, with `r = 1 / sqrt(mean(x^2) + eps)`:
//!
//! ```text
//! y = w x r
//! dx = r (w dy - x r^2 mean(w dy x))          dw = sum over rows of dy x r
//! ```
//!
//! Fused: `sum = h + factor branch`, `y = norm(sum)`; both are outputs, because the residual stream
//! continues. Backward: the gradient of `sum` from both sides is that of `h`, and times `factor`
//! that of `branch`.
//!
//! | name         | shape                  |                                             |
//! |--------------|------------------------|---------------------------------------------|
//! | `x`, `h`     | (n_tok, n * d)         | rows of d: whole tokens, or heads of tokens |
//! | `w`          | (d)                    | absent for the norms of Falcon-Mamba        |
//!
//! Kept for backward: the normed input and one `r` per row. On a GPU `y` is computed again where it
//! is needed.

use super::scale::scaled_by;
use super::softmax::row_threads;
use super::{pieces_of, remade};
use crate::tape::{Tape, Var};
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::product::IN_BF16;
use crate::tensor::gpu::{Const, Gpu, Kernel, Work, bind};
use crate::tensor::{DType, Tensor};
use pulp::{Simd, WithSimd};

/// Rows one task works on; sums over rows are made per task, then over tasks in order.
const N_ROWS: usize = 64;

/// Columns of a task that sums rows.
const N_COLUMNS: usize = 1 << 10;

/// `norm(x)`, over rows of `d` numbers.
pub fn rms_norm(tape: &Tape, x: &Var, w: Option<&Var>, d: usize, eps: f32) -> Var {
    let (x_value, w_value) = (x.value().clone(), w.map(|w| w.value().clone()));
    let (_, y, r) = forward(&x_value, None, w_value.as_ref(), (d, eps));
    let inputs: Vec<&Var> = std::iter::once(x).chain(w).collect();
    let wants_dw = w.is_some_and(Var::needs_grad);
    let y = tape.record("norm", &inputs, y, move |dy| {
        let norm = Normed { x: &x_value, w: w_value.as_ref(), r: &r, d };
        let (dx, dw) = backward(&norm, &dy, None, wants_dw);
        if w_value.is_some() { vec![Some(dx), dw] } else { vec![Some(dx)] }
    });
    let Some(w) = w else { return y };
    let (x, w) = (x.value().clone(), w.value().clone());
    remade(y, move || forward(&x, None, Some(&w), (d, eps)).1)
}

/// `(h + factor * branch, norm of it)`, over rows of `d` numbers.
pub fn add_norm(tape: &Tape, h: &Var, branch: &Var, factor: f32, w: &Var, eps: f32) -> (Var, Var) {
    branch.value().expect_shape("add_norm: branch", h.value().shape());
    let (w_value, d) = (w.value().clone(), w.value().n_elem());
    let added = Some((branch.value(), factor));
    let (sum, y, r) = forward(h.value(), added, Some(&w_value), (d, eps));
    let sum = sum.expect("a sum");
    let sum_kept = sum.clone();
    let wants_dw = w.needs_grad();
    let backward = move |mut douts: Vec<Option<Tensor>>| {
        let (dy, dsum) = (douts.pop().flatten(), douts.pop().flatten());
        let norm = Normed { x: &sum_kept, w: Some(&w_value), r: &r, d };
        let (dh, dw) = match (dy, dsum) {
            (Some(dy), dsum) => backward(&norm, &dy, dsum.as_ref(), wants_dw),
            (None, Some(dsum)) => (dsum, None),
            (None, None) => return vec![None, None, None],
        };
        let dbranch = if factor == 1.0 { dh.clone() } else { scaled_by(&dh, factor) };
        vec![Some(dh), Some(dbranch), dw]
    };
    let mut outputs = tape.record_many("add norm", &[h, branch, w], vec![sum, y], backward);
    let y = outputs.pop().expect("two outputs");
    let sum = outputs.pop().expect("two outputs");
    let (x, w) = (sum.value().clone(), w.value().clone());
    (sum, remade(y, move || forward(&x, None, Some(&w), (d, eps)).1))
}

static FORWARD: Kernel =
    Kernel::new("norm_forward", include_str!("norm.wgsl"), include_str!("norm.cu"));
static BACKWARD: Kernel = Kernel { entry: "norm_backward", ..FORWARD };
static BACKWARD_ROWS: Kernel = Kernel { entry: "norm_backward_rows", wgsl: "", ..FORWARD };
static DW: Kernel = Kernel { entry: "norm_dw", ..FORWARD };
static SUM_ROWS: Kernel = Kernel { entry: "norm_sum_rows", ..FORWARD };

/// Whether a warp takes a row: rows that fit its registers.
fn is_warped(gpu: &Gpu, d: usize) -> bool {
    gpu.caps().warps && d.is_multiple_of(8) && d <= 2048
}

/// Groups for rows of `d` numbers: one each, or one for four rows of warps.
fn row_work(gpu: &Gpu, n_rows: usize, d: usize) -> Work {
    match is_warped(gpu, d) {
        true => Work::groups(n_rows.div_ceil(4), 128),
        false => Work::groups(n_rows, row_threads(d)),
    }
}

/// Constants of all entries: the width of rows, whether there is a weight, and whether something is
/// added: a branch in forward, another gradient in backward.
fn consts(gpu: &Gpu, d: usize, w: Option<&Tensor>, added: Option<&Tensor>) -> [Const; 5] {
    let has = |it: Option<&Tensor>| usize::from(it.is_some());
    let warped = usize::from(is_warped(gpu, d));
    [("D", d), ("HAS_W", has(w)), ("HAS_ADDED", has(added)), ("N_ROWS", N_ROWS), ("WARPED", warped)]
}

/// The sum, if there is a branch with its factor, the norm and the ratios, in one pass.
fn forward(
    x: &Tensor,
    branch: Option<(&Tensor, f32)>,
    w: Option<&Tensor>,
    (d, eps): (usize, f32),
) -> (Option<Tensor>, Tensor, Tensor) {
    let n_rows = x.n_elem() / d;
    assert_eq!(n_rows * d, x.n_elem(), "norm: rows of {d} in {:?}", x.shape());
    if let Some(w) = w {
        w.expect_shape("norm: w", &[d]);
    }
    let mut y = Tensor::activation(x.device(), x.shape());
    let mut r = Tensor::uninit(x.device(), &[n_rows]);
    let mut sum = branch.map(|_| Tensor::uninit_as(x, x.shape()));
    match x.device() {
        Device::Cpu(cpu) => {
            let len = N_ROWS * d;
            let pieces = y.f32_mut().chunks_mut(len).zip(r.f32_mut().chunks_mut(N_ROWS));
            let pieces = pieces.zip(pieces_of(sum.as_mut(), len)).enumerate().collect();
            cpu.map(pieces, |(idx, ((y, r), sum))| {
                let range = idx * len..idx * len + y.len();
                let added = branch.zip(sum).map(|((branch, factor), sum)| {
                    let branch = &branch.f32()[range.clone()];
                    Added { branch, factor, sum }
                });
                let (x, w) = (&x.f32()[range], w.map(Tensor::f32));
                cpu.simd(Forward { x, added, w, d, eps, y, r });
            });
        }
        Device::Gpu(gpu) => {
            // A kernel wants something to bind.
            let mut nothing = Tensor::uninit_as(x, &[1]);
            let (branch_or_x, factor) = branch.unwrap_or((x, 0.0));
            let outs = [sum.as_mut().unwrap_or(&mut nothing), &mut y, &mut r];
            let mut args = bind([x, branch_or_x, w.unwrap_or(x)], outs);
            let consts = consts(gpu, d, w, branch.map(|it| it.0));
            let params = [n_rows.into(), eps.into(), factor.into()];
            gpu.launch(&FORWARD, row_work(gpu, n_rows, d).early(), &consts, &mut args, &params);
        }
    }
    (sum, y, r)
}

/// What `forward` leaves for `backward`.
struct Normed<'a> {
    x: &'a Tensor,
    w: Option<&'a Tensor>,
    r: &'a Tensor,
    d: usize,
}

/// Inverts `forward`; `dsum`, the gradient that reaches x on another way, is added.
fn backward(
    norm: &Normed,
    dy: &Tensor,
    dsum: Option<&Tensor>,
    wants_dw: bool,
) -> (Tensor, Option<Tensor>) {
    let Normed { x, w, r, d } = *norm;
    let n_parts = (x.n_elem() / d).div_ceil(N_ROWS);
    let mut dx = Tensor::uninit_as(x, x.shape());
    let mut parts = Tensor::uninit(x.device(), &if wants_dw { [n_parts, d] } else { [1, 1] });
    match x.device() {
        Device::Cpu(cpu) => {
            let dws = pieces_of(wants_dw.then_some(&mut parts), d);
            let pieces = dx.f32_mut().chunks_mut(N_ROWS * d).zip(dws).enumerate().collect();
            cpu.map(pieces, |(idx, (dx, dw))| {
                let range = idx * N_ROWS * d..idx * N_ROWS * d + dx.len();
                let (w, r) = (w.map(Tensor::f32), &r.f32()[idx * N_ROWS..]);
                let dsum = dsum.map(|dsum| &dsum.f32()[range.clone()]);
                let (x, dy) = (&x.f32()[range.clone()], &dy.f32()[range]);
                cpu.simd(Backward { x, w, r, dy, dsum, d, dx, dw });
            });
        }
        Device::Gpu(gpu) => {
            backward_gpu(gpu, norm, (dy, dsum), &mut dx, wants_dw.then_some(&mut parts));
        }
    }
    (dx, wants_dw.then(|| sum_rows(&parts)))
}

/// Where a warp takes a row, one pass does all; it also makes the copy of an f32 `dx` in the format
/// of products, which the linear map before wants.
fn backward_gpu(
    gpu: &Gpu,
    norm: &Normed,
    (dy, dsum): (&Tensor, Option<&Tensor>),
    dx: &mut Tensor,
    parts: Option<&mut Tensor>,
) {
    let Normed { x, w, r, d } = *norm;
    let n_rows = x.n_elem() / d;
    let n_parts = n_rows.div_ceil(N_ROWS);
    let params = [n_rows.into()];
    let mut consts = consts(gpu, d, w, dsum).to_vec();
    let ins = [x, w.unwrap_or(x), r, dy, dsum.unwrap_or(dy)];
    if is_warped(gpu, d) {
        let has_copy = x.dtype() == DType::F32 && gpu.activation_dtype() == DType::BF16;
        let wanted = [("WANTS_DW", parts.is_some()), ("HAS_COPY", has_copy)];
        consts.extend(wanted.map(|(name, flag)| (name, usize::from(flag))));
        let mut copy = Tensor::activation(x.device(), if has_copy { x.shape() } else { &[1] });
        let mut nothing = Tensor::uninit(x.device(), &[1]);
        let mut args = bind(ins, [dx, &mut copy, parts.unwrap_or(&mut nothing)]);
        gpu.launch(&BACKWARD_ROWS, Work::groups(n_parts, 128), &consts, &mut args, &params);
        if has_copy {
            dx.keep_derived(IN_BF16, copy);
        }
        return;
    }
    gpu.launch(&BACKWARD, row_work(gpu, n_rows, d), &consts, &mut bind(ins, [dx]), &params);
    if let Some(parts) = parts {
        let work = Work::grid([d.div_ceil(256), n_parts, 1], 256);
        gpu.launch(&DW, work, &consts, &mut bind([x, r, dy], [parts]), &params);
    }
}

/// Sum over the first axis, in order: (n, d) to (d).
pub(super) fn sum_rows(parts: &Tensor) -> Tensor {
    let (n_rows, d) = parts.dims2();
    let mut sum = Tensor::uninit(parts.device(), &[d]);
    match parts.device() {
        Device::Cpu(cpu) => cpu.each_piece(sum.f32_mut(), N_COLUMNS, |idx, sum| {
            sum.fill(0.0);
            for row in parts.f32().chunks_exact(d) {
                let row = &row[idx * N_COLUMNS..];
                sum.iter_mut().zip(row).for_each(|(sum, part)| *sum += part);
            }
        }),
        Device::Gpu(gpu) => {
            let (work, consts) = (Work::groups(d.div_ceil(256), 256), consts(gpu, d, None, None));
            let mut args = bind([parts], [&mut sum]);
            gpu.launch(&SUM_ROWS, work, &consts, &mut args, &[n_rows.into()]);
        }
    }
    sum
}

/// What is added to x before its norm, and where the sum goes.
struct Added<'a> {
    branch: &'a [f32],
    factor: f32,
    sum: &'a mut [f32],
}

struct Forward<'a> {
    x: &'a [f32],
    added: Option<Added<'a>>,
    w: Option<&'a [f32]>,
    d: usize,
    eps: f32,
    y: &'a mut [f32],
    r: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { x, mut added, w, d, eps, y, r } = self;
        let rows = x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(r);
        for (row, ((x, y), r)) in rows.enumerate() {
            let (x, squares) = match &mut added {
                Some(Added { branch, factor, sum }) => {
                    let sum = &mut sum[row * d..][..d];
                    let squares = add_row(simd, x, &branch[row * d..][..d], *factor, sum);
                    (&*sum, squares)
                }
                None => {
                    let mut squares = F32s::zero(simd);
                    for at in (0..d).step_by(F32s::<S>::LANES) {
                        let x = F32s::load(simd, &x[at..]);
                        squares = x.mul_add(x, squares);
                    }
                    (x, squares)
                }
            };
            *r = 1.0 / (squares.sum() / d as f32 + eps).sqrt();
            scale_row(simd, x, w, *r, y);
        }
    }
}

/// `sum = h + factor * branch`; returns its squares, by lanes.
#[inline(always)]
fn add_row<S: Simd>(simd: S, h: &[f32], branch: &[f32], factor: f32, sum: &mut [f32]) -> F32s<S> {
    let (factor, mut squares) = (F32s::splat(simd, factor), F32s::zero(simd));
    for at in (0..h.len()).step_by(F32s::<S>::LANES) {
        let branch = F32s::load(simd, &branch[at..]);
        let x = branch.mul_add(factor, F32s::load(simd, &h[at..]));
        squares = x.mul_add(x, squares);
        x.store(&mut sum[at..]);
    }
    squares
}

/// `y = w x r`
#[inline(always)]
fn scale_row<S: Simd>(simd: S, x: &[f32], w: Option<&[f32]>, r: f32, y: &mut [f32]) {
    let r = F32s::splat(simd, r);
    for at in (0..x.len()).step_by(F32s::<S>::LANES) {
        weighted(simd, F32s::load(simd, &x[at..]) * r, w, at).store(&mut y[at..]);
    }
}

/// `x w` from number `at` of `w` on.
#[inline(always)]
fn weighted<S: Simd>(simd: S, x: F32s<S>, w: Option<&[f32]>, at: usize) -> F32s<S> {
    match w {
        Some(w) => x * F32s::load(simd, &w[at..]),
        None => x,
    }
}

struct Backward<'a> {
    x: &'a [f32],
    w: Option<&'a [f32]>,
    r: &'a [f32],
    dy: &'a [f32],
    dsum: Option<&'a [f32]>,
    d: usize,
    dx: &'a mut [f32],
    dw: Option<&'a mut [f32]>,
}

impl WithSimd for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Backward { x, w, r, dy, dsum, d, dx, mut dw } = self;
        if let Some(dw) = &mut dw {
            dw.fill(0.0);
        }
        for (row, dx) in dx.chunks_exact_mut(d).enumerate() {
            let (x, dy) = (&x[row * d..][..d], &dy[row * d..][..d]);
            let dsum = dsum.map(|dsum| &dsum[row * d..][..d]);
            let r = F32s::splat(simd, r[row]);
            let mut dot = F32s::zero(simd);
            for at in (0..d).step_by(F32s::<S>::LANES) {
                let (x, dy) = (F32s::load(simd, &x[at..]), F32s::load(simd, &dy[at..]));
                dot = weighted(simd, dy, w, at).mul_add(x, dot);
                if let Some(dw) = &mut dw {
                    (dy * x).mul_add(r, F32s::load(simd, &dw[at..])).store(&mut dw[at..]);
                }
            }
            let pull = r * r * F32s::splat(simd, -dot.sum() / d as f32);
            for at in (0..d).step_by(F32s::<S>::LANES) {
                let (x, dy) = (F32s::load(simd, &x[at..]), F32s::load(simd, &dy[at..]));
                let through = x.mul_add(pull, weighted(simd, dy, w, at));
                let out = match dsum {
                    Some(dsum) => through.mul_add(r, F32s::load(simd, &dsum[at..])),
                    None => through * r,
                };
                out.store(&mut dx[at..]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};

    #[test]
    fn gradients() {
        // One row; rows per head; widths off the vector; more rows than a task takes.
        for (rows, n, d) in [(1, 1, 1), (3, 2, 19), (2, 4, 16), (130, 1, 33)] {
            let x = Input::normal(1, &[rows, n * d], 1.0);
            let w = Input::normal(2, &[d], 1.0);
            check_gradients(&[x.clone(), w.clone()], |tape, v| {
                vec![rms_norm(tape, &v[0], Some(&v[1]), d, 1e-2)]
            });
            check_gradients(&[x], |tape, v| vec![rms_norm(tape, &v[0], None, d, 1e-2)]);
        }
        for factor in [1.0, 0.22] {
            let inputs = [
                Input::normal(1, &[70, 19], 1.0),
                Input::normal(2, &[70, 19], 1.0),
                Input::normal(3, &[19], 1.0),
            ];
            check_gradients(&inputs, |tape, v| {
                let (sum, y) = add_norm(tape, &v[0], &v[1], factor, &v[2], 1e-2);
                vec![sum, y]
            });
            check_gradients(&inputs, |tape, v| {
                vec![add_norm(tape, &v[0], &v[1], factor, &v[2], 1e-2).1]
            });
        }
    }

    #[test]
    fn without_a_backward_pass_the_bits_are_the_same() {
        let device = Device::cpu(2).unwrap();
        for (rows, n, d) in [(1, 1, 1), (3, 2, 19), (1, 1, 576), (2 * N_ROWS + 3, 1, 33)] {
            let tensor = |seed, shape: &[usize]| Input::normal(seed, shape, 1.0).tensor(&device);
            let (x, w) = (tensor(1, &[rows, n * d]), tensor(2, &[d]));
            let both = |tape: &Tape, x: &Var, branch: &Var, w: &Var| {
                let mut list = vec![rms_norm(tape, x, Some(w), d, 1e-2)];
                list.push(rms_norm(tape, x, None, d, 1e-2));
                if n == 1 {
                    let (sum, y) = add_norm(tape, x, branch, 0.3, w, 1e-2);
                    list.extend([sum, y]);
                }
                list.iter().map(|y| y.value().f32().to_vec()).collect::<Vec<_>>()
            };
            let branch = Var::constant(tensor(3, &[rows, n * d]));
            let [plain_x, plain_w] = [&x, &w].map(|x| Var::constant(x.clone()));
            let tape = Tape::new();
            let want = both(&tape, &tape.leaf(0, &x), &branch, &tape.leaf(1, &w));
            assert!(both(&Tape::off(), &plain_x, &branch, &plain_w) == want, "{rows} {n} {d}");
            assert!(both(&tape, &plain_x, &branch, &plain_w) == want, "{rows} {n} {d}");
        }
    }

    #[test]
    fn eps_is_inside_the_root() {
        let device = Device::cpu(1).unwrap();
        let x = Tensor::from_f32(&device, &[1, 2], &[1e-3, -1e-3]);
        let (_, y, _) = forward(&x, None, None, (2, 1e-6));
        assert!((y.f32()[0] - 1e-3 / 2e-6f32.sqrt()).abs() < 1e-6);
    }
}
