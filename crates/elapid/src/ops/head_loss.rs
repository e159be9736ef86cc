//! The head and the cross-entropy in one: the matrix of all logits never exists.
//!
//! For each token t with target k, weight s and logits `l = factor head(x)`:
//!
//! ```text
//! nll[t] = ln sum_v exp(l[v]) - l[k]            loss = sum_t s[t] nll[t] / norm
//! dl[v]  = s[t] / norm (exp(l[v]) / sum_u exp(l[u]) - [v = k])
//! ```
//!
//! | name      | shape              |                                                   |
//! |-----------|--------------------|---------------------------------------------------|
//! | `x`       | (n_tok, d_model)   | after the final norm                              |
//! | `head`    | (n_vocab, d_model) | a `Linear`: any dtype, tied or not, adapted or not|
//!
//! Tokens go through in chunks: logits, loss, the gradient of the logits in their place, then its
//! products into `dx` and the gradients of the head. So the logits are computed once, where a
//! separate backward would have to compute them again. Backward proper only scales what is there.
//! Tokens of weight zero are skipped: a masked prompt costs nothing.
//!
//! On a GPU everything stays there, the loss too; a group takes a row of logits. Where products
//! want rows of even length, the head and the rows of logits are filled up: the gradient of what
//! is more is zero, and nothing of it is seen outside.
//!
//! A teacher adds a part to the loss that follows its distribution: `teacher.rs`.

mod teacher;

use super::linear::{Fill, Linear, Operands, Way};
use super::scale::scaled_by;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::add::sum;
use crate::tensor::batch::Targets;
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Arg, Caps, Const, Gpu, Kernel, Word, Work, bind};
use crate::tensor::product::Rows;
use pulp::{Simd, WithSimd};
use std::ops::Range;
use teacher::Lesson;
pub use teacher::Teacher;

/// The loss and what each token added to it.
pub struct Loss {
    pub loss: Var,
    /// With a teacher: the weighted means of likelihood and divergence that it is made of.
    pub parts: Option<[Tensor; 2]>,
    pub tokens: TokenLoss,
}

/// What each token added to a loss: brought over when it is asked for.
pub struct TokenLoss {
    /// (n_tok).
    nll: Tensor,
    /// (n_tok), one or zero.
    top1: Tensor,
}

impl TokenLoss {
    #[cfg(test)]
    pub fn top1(&self) -> Vec<bool> {
        self.top1.to_vec().into_iter().map(|top1| top1 != 0.0).collect()
    }

    #[cfg(test)]
    pub fn nll(&self) -> Vec<f32> {
        self.nll.to_vec()
    }

    /// Negative log-likelihood of each target in nats, zero where the weight is zero, and whether
    /// each target had the largest logit; never where the weight is zero.
    pub async fn read(&self) -> (Vec<f32>, Vec<bool>) {
        let flat = [&self.nll, &self.top1].map(|it| it.reshape(&[it.n_elem(), 1]));
        let mut nll = Tensor::stack(&flat).read().await;
        let top1 = nll.split_off(nll.len() / 2).into_iter().map(|top1| top1 != 0.0).collect();
        (nll, top1)
    }
}

/// Numbers of a chunk of logits: on the CPU 16 MiB, which keeps the products large; on GPUs more,
/// since products of many tokens read the head seldom.
const CHUNK: usize = 1 << 22;
const CHUNK_GPU: usize = 1 << 24;
const CHUNK_CORES: usize = 9 << 24;

/// The weighted mean negative log-likelihood of the targets, under a head whose logits are
/// multiplied by a factor; with a teacher its share of that and of the divergence from the teacher.
pub fn head_loss(
    tape: &Tape,
    x: &Var,
    head: (&Linear, f32),
    targets: &Targets,
    teacher: Option<&Teacher>,
) -> Loss {
    let (n_tok, _) = x.value().dims2();
    assert_eq!((targets.ids.len(), targets.weights.len()), (n_tok, n_tok), "loss: targets");
    let mut inputs = head.0.inputs();
    inputs.insert(0, x);
    let wants_grads = tape.is_recording() && inputs.iter().any(|input| input.needs_grad());
    let Found { loss, parts, tokens, grads } = forward(x, head, targets, teacher, wants_grads);
    let loss = tape.record("head loss", &inputs, loss, move |dloss| backward(grads, &dloss));
    Loss { loss, parts, tokens }
}

type Gradients = Vec<Option<Tensor>>;

struct Found {
    loss: Tensor,
    parts: Option<[Tensor; 2]>,
    tokens: TokenLoss,
    grads: Gradients,
}

/// The loss, what each token added to it, and the gradients for a loss gradient of one, in the
/// order of the inputs.
fn forward(
    x: &Var,
    (head, factor): (&Linear, f32),
    targets: &Targets,
    teacher: Option<&Teacher>,
    wants_grads: bool,
) -> Found {
    let device = x.value().device();
    let (n_tok, n_vocab) = (x.value().dims2().0, head.d_out());
    let learned = Learned::new(device, targets, factor, n_vocab);
    let filled = |head: &Linear| Operands::new(head.filled(Fill::Rows).as_ref().unwrap_or(head));
    let operands = filled(head);
    let n_row = operands.d_out();
    let taught = teacher.map(|teacher| (teacher, filled(&teacher.head)));
    let n_widest = taught.as_ref().map_or(n_row, |(_, operands)| operands.d_out().max(n_row));
    let n_chunk = n_chunk(device, n_tok, n_widest).clamp(1, n_tok.max(1));
    let mut lesson = taught.map(|(teacher, operands)| Lesson::new(teacher, operands, n_chunk));
    let mut grads = wants_grads.then(|| operands.grads());
    let mut dx = (wants_grads && x.needs_grad()).then(|| {
        let mut dx = Tensor::uninit_as(x.value(), x.value().shape());
        if learned.rows.len() < n_tok {
            dx.fill_zero();
        }
        dx
    });
    let [nll, top1] = [(); 2].map(|()| Tensor::zeros(device, &[n_tok]));
    let mut tokens = TokenLoss { nll, top1 };
    // One size whatever is learned: buffers of many sizes would lie beside each other in the pool.
    let mut logits = Tensor::uninit(device, &[n_chunk, n_row]);
    // Products take what they are computed in; f32 logits become their gradient in place.
    let in_place = device.activation_dtype() == logits.dtype();
    let shape = if in_place || !wants_grads { &[1, 1] } else { logits.shape() };
    let mut dlogits = Tensor::activation(device, shape);
    for first in (0..learned.rows.len()).step_by(n_chunk) {
        let chunk = first..learned.rows.len().min(first + n_chunk);
        let n = chunk.len();
        let input = operands.input(&learned.gather(x.value(), &chunk), first);
        let out = Rows { tensor: &mut logits, rows: 0..n };
        let pass = operands.forward(0..n_row, &input, out, Way::Many);
        let buffers = [&mut logits, &mut dlogits];
        let how = (factor, wants_grads, n_vocab);
        match &mut lesson {
            Some(lesson) => lesson.softmax(&learned, &chunk, how, buffers, &mut tokens),
            None => learned.softmax(&chunk, how, buffers, &mut tokens),
        }
        if let Some(grads) = &mut grads {
            let dy = if in_place { logits.rows(0..n) } else { dlogits.rows(0..n) };
            learned.each_dx(dx.as_mut(), &chunk, |dx| {
                operands.backward(&input, &pass, &dy, dx, grads);
            });
        }
    }
    let mut loss = learned.sum(&tokens.nll, targets.norm);
    let parts = lesson.map(|lesson| {
        let parts = [loss.clone(), learned.sum(&lesson.kl, targets.norm)];
        let Teacher { temperature, share, .. } = *lesson.teacher;
        let factors = [1.0 - share, share * temperature * temperature];
        loss = sum(&scaled_by(&parts[0], factors[0]), &scaled_by(&parts[1], factors[1]));
        parts
    });
    let mut list = vec![dx];
    list.extend(grads.map(|grads| grads.into_list()).unwrap_or_default());
    Found { loss, parts, tokens, grads: list }
}

/// Scales what `forward` has prepared.
fn backward(mut grads: Gradients, dloss: &Tensor) -> Gradients {
    for grad in grads.iter_mut().flatten() {
        match dloss.device() {
            Device::Gpu(gpu) => scale_gpu(gpu, grad, dloss),
            Device::Cpu(_) if dloss.f32()[0] == 1.0 => {}
            Device::Cpu(cpu) => cpu.each_piece(grad.f32_mut(), 1 << 15, |_, piece| {
                piece.iter_mut().for_each(|g| *g *= dloss.f32()[0]);
            }),
        }
    }
    grads
}

struct SoftmaxRow<'a> {
    logits: &'a mut [f32],
    factor: f32,
    target: usize,
    /// If given, logits are replaced by this times (probability - target).
    dlogits: Option<f32>,
}

impl WithSimd for SoftmaxRow<'_> {
    type Output = (f32, bool);
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> (f32, bool) {
        let SoftmaxRow { logits, factor, target, dlogits } = self;
        let lanes = F32s::<S>::LANES;
        let whole = logits.len() / lanes * lanes;
        let factor_v = F32s::splat(simd, factor);
        let mut max_v = F32s::splat(simd, f32::NEG_INFINITY);
        for at in (0..whole).step_by(lanes) {
            max_v = max_v.max(F32s::load(simd, &logits[at..]) * factor_v);
        }
        let tail_max = logits[whole..].iter().fold(f32::NEG_INFINITY, |m, &l| m.max(l * factor));
        let max = max_v.max_lane().max(tail_max);
        let at_target = logits[target] * factor;
        let max_v = F32s::splat(simd, max);
        let mut sum_v = F32s::zero(simd);
        let mut tail_sum = 0.0;
        for at in (0..whole).step_by(lanes) {
            let e = (F32s::load(simd, &logits[at..]) * factor_v - max_v).exp();
            sum_v = sum_v + e;
            if dlogits.is_some() {
                e.store(&mut logits[at..]);
            }
        }
        for l in &mut logits[whole..] {
            let e = (*l * factor - max).exp();
            tail_sum += e;
            if dlogits.is_some() {
                *l = e;
            }
        }
        let sum = sum_v.sum() + tail_sum;
        if let Some(scale) = dlogits {
            let over = F32s::splat(simd, scale / sum);
            for at in (0..logits.len()).step_by(lanes) {
                (F32s::load(simd, &logits[at..]) * over).store(&mut logits[at..]);
            }
            logits[target] -= scale;
        }
        (max + sum.ln() - at_target, at_target >= max)
    }
}

static ROWS: Kernel =
    Kernel::new("head_loss_rows", include_str!("head_loss.wgsl"), include_str!("head_loss.cu"));
static HELD: Kernel = Kernel { entry: "head_loss_held", ..ROWS };
static SUM: Kernel = Kernel { entry: "head_loss_sum", ..ROWS };
static SCATTER: Kernel = Kernel { entry: "head_loss_scatter", ..ROWS };
static SCALE: Kernel = Kernel { entry: "head_loss_scale", ..ROWS };

/// Constants of all entries, where they matter: whether there are gradients, and in which place.
const CONSTS: [Const; 2] = [("HAS_GRADS", 0), ("IN_PLACE", 0)];

/// Tokens of a chunk of logits, in chunks of about the same size.
fn n_chunk(device: &Device, n_tok: usize, n_vocab: usize) -> usize {
    let Device::Gpu(gpu) = device else {
        return (CHUNK / n_vocab.max(1)).clamp(16, 4096);
    };
    let most = if gpu.caps().tensor_cores { CHUNK_CORES } else { CHUNK_GPU };
    let fits = gpu.binding_bytes_max() / 4 / n_vocab.max(1);
    let most = (most / n_vocab.max(1)).clamp(16, 8192).min(fits.max(1));
    if most < 128 {
        return most;
    }
    // Whole tiles of products.
    let most = most / 128 * 128;
    n_tok.div_ceil(n_tok.div_ceil(most).max(1)).next_multiple_of(128)
}

/// Threads of a group that holds a row of logits in shared memory.
const N_THREAD_HELD: usize = 512;
/// Shared memory that a group takes beside the row.
const SHARED_MORE: usize = 2 << 10;

/// How groups that hold a row take `n` rows, and in how many steps; none where it does not fit.
fn work_held(gpu: &Gpu, n: usize, n_row: usize) -> Option<(Work, usize)> {
    let Caps { warps, shared_bytes_max: most, n_multiprocessors, .. } = *gpu.caps();
    let row_bytes = 4 * n_row;
    if !warps || !n_row.is_multiple_of(4) || row_bytes + SHARED_MORE > most {
        return None;
    }
    // As many groups as are there at once.
    let n_each = (most / (row_bytes + SHARED_MORE)).min(1024 / N_THREAD_HELD);
    let work = Work::groups(n.min(n_each * n_multiprocessors), N_THREAD_HELD);
    let n_step = n_row.div_ceil(4 * N_THREAD_HELD);
    Some((Work { shared: row_bytes as u32, ..work }, n_step))
}

/// Tokens whose weight is not zero.
struct Learned {
    rows: Vec<u32>,
    targets: Vec<u32>,
    /// Of the gradients of their logits.
    factors: Vec<f32>,
    weights: Vec<f32>,
    /// All four on the device, one after the other.
    lists: Tensor,
}

impl Learned {
    fn new(device: &Device, targets: &Targets, factor: f32, n_vocab: usize) -> Learned {
        let Targets { ids, weights, norm } = targets;
        let rows: Vec<u32> =
            (0..ids.len() as u32).filter(|&row| weights[row as usize] != 0.0).collect();
        let targets: Vec<u32> = rows.iter().map(|&row| ids[row as usize]).collect();
        let outside = targets.iter().find(|&&id| id as usize >= n_vocab);
        assert!(outside.is_none(), "loss: target {outside:?} of {n_vocab}");
        let weights: Vec<f32> = rows.iter().map(|&row| weights[row as usize]).collect();
        let factors: Vec<f32> = weights.iter().map(|weight| weight / norm * factor).collect();
        let [bits_of_factors, bits_of_weights] =
            [&factors, &weights].map(|list| list.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        let lists = [&rows[..], &targets, &bits_of_factors, &bits_of_weights].concat();
        Learned { lists: Tensor::from_u32(device, &lists), rows, targets, factors, weights }
    }

    /// Whether a chunk of them is a run of rows.
    fn run(&self, chunk: &Range<usize>) -> Option<Range<usize>> {
        let rows = &self.rows[chunk.clone()];
        let (first, last) = (*rows.first()? as usize, *rows.last()? as usize);
        (last + 1 - first == rows.len()).then_some(first..last + 1)
    }

    fn gather(&self, x: &Tensor, chunk: &Range<usize>) -> Tensor {
        // Rows in a run need no copy.
        if let Some(rows) = self.run(chunk) {
            return x.rows(rows);
        }
        match x.device() {
            Device::Cpu(_) => {
                let rows = self.rows[chunk.clone()].iter().map(|&row| row as usize);
                x.gather(&rows.collect::<Vec<_>>())
            }
            Device::Gpu(gpu) => gpu.gather_rows(x, &self.lists.rows(chunk.clone()), x.dtype()),
        }
    }

    /// Calls `f` with where the gradient of a chunk of rows goes, and puts it there.
    fn each_dx(
        &self,
        dx: Option<&mut Tensor>,
        chunk: &Range<usize>,
        f: impl FnOnce(Option<(Rows, f32)>),
    ) {
        let Some(dx) = dx else { return f(None) };
        if let Some(rows) = self.run(chunk) {
            return f(Some((Rows { tensor: dx, rows }, 0.0)));
        }
        let (_, d) = dx.dims2();
        let mut part = Tensor::uninit_as(dx, &[chunk.len(), d]);
        f(Some(((&mut part).into(), 0.0)));
        let Device::Gpu(gpu) = part.device() else {
            for (&row, from) in self.rows[chunk.clone()].iter().zip(part.f32().chunks_exact(d)) {
                dx.f32_mut()[row as usize * d..][..d].copy_from_slice(from);
            }
            return;
        };
        let n = chunk.len() * d;
        let mut args = bind([&self.lists, &part], [dx]);
        let params = [n.into(), d.into(), chunk.start.into()];
        gpu.launch(&SCATTER, Work::each(n), &CONSTS, &mut args, &params);
    }

    /// Per row of a chunk: negative log-likelihood and whether the target is the largest; with
    /// `wants_grads` the gradient of the logits, in place of f32 ones.
    fn softmax(
        &self,
        chunk: &Range<usize>,
        (factor, wants_grads, n_vocab): (f32, bool, usize),
        [logits, dlogits]: [&mut Tensor; 2],
        tokens: &mut TokenLoss,
    ) {
        let (n, n_row) = (chunk.len(), logits.dims2().1);
        let gpu = match logits.device().clone() {
            Device::Gpu(gpu) => gpu,
            Device::Cpu(cpu) => {
                let rows = logits.f32_mut().chunks_exact_mut(n_vocab).zip(chunk.clone()).collect();
                let found = cpu.map(rows, |(logits, at)| {
                    let dlogits = wants_grads.then(|| self.factors[at]);
                    let target = self.targets[at] as usize;
                    cpu.simd(SoftmaxRow { logits, factor, target, dlogits })
                });
                for (&row, (nll, top1)) in self.rows[chunk.clone()].iter().zip(found) {
                    tokens.nll.f32_mut()[row as usize] = nll;
                    tokens.top1.f32_mut()[row as usize] = f32::from(top1);
                }
                return;
            }
        };
        let in_place = gpu.activation_dtype() == logits.dtype();
        let mut args = bind([&self.lists], [logits, dlogits, &mut tokens.nll, &mut tokens.top1]);
        let sizes = [n, n_vocab, chunk.start, self.rows.len()].map(Word::from);
        let params = [sizes[0], sizes[1], sizes[2], sizes[3], factor.into(), n_row.into()];
        let held = (wants_grads && !in_place).then(|| work_held(&gpu, n, n_row)).flatten();
        if let Some((work, n_step)) = held {
            return gpu.launch(&HELD, work, &[("STEPS", n_step)], &mut args, &params);
        }
        let work = Work::groups(n, if gpu.caps().warps { 1024 } else { 256 });
        let flags = [("HAS_GRADS", wants_grads), ("IN_PLACE", in_place)];
        let consts = flags.map(|(name, flag)| (name, usize::from(flag)));
        gpu.launch(&ROWS, work, &consts, &mut args, &params);
    }

    fn sum(&self, nll: &Tensor, norm: f32) -> Tensor {
        let Device::Gpu(gpu) = nll.device() else {
            let terms = self.rows.iter().zip(&self.weights);
            let sum: f64 = terms.map(|(&row, &w)| nll.f32()[row as usize] as f64 * w as f64).sum();
            return Tensor::from_f32(nll.device(), &[1], &[(sum / norm as f64) as f32]);
        };
        let mut loss = Tensor::uninit(nll.device(), &[1]);
        let mut args = bind([&self.lists, nll], [&mut loss]);
        let params = [self.rows.len().into(), norm.into()];
        gpu.launch(&SUM, Work::groups(1, 256), &CONSTS, &mut args, &params);
        loss
    }
}

/// `grad *= dloss`; where that is one nothing is read.
fn scale_gpu(gpu: &Gpu, grad: &mut Tensor, dloss: &Tensor) {
    let (n_rows, d) = grad.dims2();
    let row_bytes = grad.n_bytes() / n_rows.max(1);
    for rows in gpu.windows(n_rows, row_bytes) {
        let n = rows.len() * d;
        let bytes = rows.start * row_bytes..rows.end * row_bytes;
        let mut args = [Arg::In(dloss), Arg::Window(grad, bytes)];
        gpu.launch(&SCALE, Work::each(n), &CONSTS, &mut args, &[n.into()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients, compare_devices, devices, small_bindings};
    use crate::ops::linear::Adapter;

    fn head(v: &[Var]) -> Linear {
        let (a, b) = (v[3].clone(), v[4].clone());
        let adapter = Adapter { a, b, scale: 0.7, dropout: None, magnitude: None };
        let (bias, adapter) = (Some(v[2].clone()), Some(adapter));
        Linear { bias, adapter, ..Linear::from(v[1].clone()) }
    }

    fn inputs(n_tok: usize, n_vocab: usize) -> Vec<Input> {
        vec![
            Input::normal(1, &[n_tok, 6], 1.0),
            Input::normal(2, &[n_vocab, 6], 0.7),
            Input::normal(3, &[n_vocab], 0.5),
            Input::normal(4, &[2, 6], 0.5),
            Input::normal(5, &[n_vocab, 2], 0.5),
        ]
    }

    #[test]
    fn gradients() {
        for (n_tok, n_vocab) in [(1, 3), (7, 35), (20, 64)] {
            let ids: Vec<u32> = (0..n_tok as u32).map(|t| t * 7 % n_vocab as u32).collect();
            // Every third token is left out, the others weigh differently.
            let weights: Vec<f32> = (0..n_tok).map(|t| [1.0, 0.0, 0.5][t % 3]).collect();
            let targets = Targets { ids: &ids, weights: &weights, norm: 3.0 };
            check_gradients(&inputs(n_tok, n_vocab), |tape, v| {
                vec![head_loss(tape, &v[0], (&head(v), 1.3), &targets, None).loss]
            });
        }
    }

    #[test]
    fn chunks_do_not_change_the_loss_or_its_gradient() {
        // A vocabulary so large that a chunk holds 16 tokens: 40 tokens take three.
        let (n_tok, n_vocab) = (40, CHUNK / 16);
        let device = Device::cpu(2).unwrap();
        let ids: Vec<u32> = (0..n_tok as u32).collect();
        let loss_of = |range: std::ops::Range<usize>| {
            let mut weights = vec![0.0; n_tok];
            weights[range].fill(1.0);
            let targets = Targets { ids: &ids, weights: &weights, norm: 40.0 };
            let tape = Tape::new();
            let x = tape.leaf(0, &Input::normal(1, &[n_tok, 2], 1.0).tensor(&device));
            let w = tape.leaf(1, &Input::normal(2, &[n_vocab, 2], 0.1).tensor(&device));
            let out = head_loss(&tape, &x, (&w.into(), 1.0), &targets, None);
            let loss = out.loss.value().f32()[0];
            let mut grads = crate::tape::Gradients::default();
            tape.backward(&out.loss, 1.0, &mut grads);
            let sum = grads.get(1).unwrap().f32()[..64].to_vec();
            (loss, sum)
        };
        let whole = loss_of(0..40);
        let parts = [loss_of(0..16), loss_of(16..32), loss_of(32..40)];
        assert!((whole.0 - parts.iter().map(|part| part.0).sum::<f32>()).abs() < 1e-5);
        for idx in 0..64 {
            let sum: f32 = parts.iter().map(|part| part.1[idx]).sum();
            assert!((whole.1[idx] - sum).abs() < 1e-6);
        }
    }

    /// The CPU and every other device.
    fn everywhere() -> Vec<Device> {
        let there = devices().iter().map(|it| it.0.clone());
        std::iter::once(Device::cpu(1).unwrap()).chain(there).collect()
    }

    #[test]
    fn huge_logits_give_a_finite_loss() {
        for device in everywhere() {
            let x = Var::constant(Tensor::from_f32(&device, &[1, 1], &[8192.0]));
            let w = Var::constant(Tensor::from_f32(&device, &[3, 1], &[-1.0, 0.5, 1.0]));
            let targets = Targets { ids: &[1], weights: &[1.0], norm: 1.0 };
            let out = head_loss(&Tape::off(), &x, (&w.into(), 1.0), &targets, None);
            assert_eq!(out.loss.value().to_vec(), [4096.0], "{device:?}");
            assert_eq!(out.tokens.top1(), [false], "{device:?}");
        }
    }

    /// Loss, whether the target is the best, and the gradient of a row of logits, in f64.
    fn row_in_f64(logits: &[f64], target: usize, scale: f64) -> (f64, bool, Vec<f64>) {
        let top = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = logits.iter().map(|l| (l - top).exp()).sum();
        let mut grad: Vec<f64> = logits.iter().map(|l| (l - top).exp() / sum * scale).collect();
        grad[target] -= scale;
        (top + sum.ln() - logits[target], logits[target] >= top, grad)
    }

    /// Tokens are unit vectors and weights few bits long: logits are weights, exact in every
    /// format, and gradients of weights those of logits.
    fn check_rows(device: &Device, n_vocab: usize, factor: f32, size: f32) {
        let n_tok = 3;
        let w: Vec<f32> = (0..n_vocab * n_tok)
            .map(|at| ((at / n_tok * 37 + at % n_tok * 11) % 255) as f32 - 127.0)
            .map(|steps| steps / 16.0 * size)
            .collect();
        let logits = |tok: usize| w.iter().skip(tok).step_by(n_tok).map(|&l| (l * factor) as f64);
        let best = (0..n_vocab)
            .max_by(|&a, &b| (w[a * n_tok] * factor).total_cmp(&(w[b * n_tok] * factor)));
        let ids = [best.unwrap() as u32, n_vocab as u32 - 1, n_vocab as u32 / 2];
        let (weights, norm) = ([1.0, 0.5, 2.0], 3.5);
        let tape = Tape::new();
        let unit = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
        let x = tape.leaf(0, &Tensor::from_f32(device, &[n_tok, n_tok], &unit));
        let w = tape.leaf(1, &Tensor::from_f32(device, &[n_vocab, n_tok], &w));
        let targets = Targets { ids: &ids, weights: &weights, norm };
        let out = head_loss(&tape, &x, (&w.into(), factor), &targets, None);
        let mut grads = crate::tape::Gradients::default();
        tape.backward(&out.loss, 1.0, &mut grads);
        let (nll, top1) = (out.tokens.nll(), out.tokens.top1());
        let dw = grads.get(1).unwrap().to_vec();
        // Rounding to bf16 alone is off by up to 2^-8.
        let is_bf16 = device.activation_dtype() == crate::tensor::DType::BF16;
        let tolerance = if is_bf16 { 4e-3 } else { 1e-4 };
        for tok in 0..n_tok {
            let what = format!("{device:?}, {n_vocab} by {factor}, token {tok}");
            let scale = (weights[tok] / norm * factor) as f64;
            let row: Vec<f64> = logits(tok).collect();
            let (want_nll, want_top1, want) = row_in_f64(&row, ids[tok] as usize, scale);
            assert!((nll[tok] as f64 - want_nll).abs() <= 1e-5 * (1.0 + want_nll), "{what}: loss");
            assert_eq!(top1[tok], want_top1, "{what}: top");
            for (id, want) in want.iter().enumerate() {
                let got = dw[id * n_tok + tok] as f64;
                let is_near = (got - want).abs() <= tolerance * want.abs() + 1e-9 * scale.abs();
                assert!(is_near, "{what}, id {id}: {got}, not {want}");
            }
        }
    }

    #[test]
    fn rows_of_every_length_are_right() {
        for device in everywhere() {
            check_rows(&device, 1001, 1.3, 1.0);
            check_rows(&device, 1000, -0.7, 1.0);
            check_rows(&device, 24, 1.3, 64.0); // huge
            // In shared memory: a part of a step, several; more than there is.
            for n_vocab in [4, 4100, 20_000, 70_000] {
                check_rows(&device, n_vocab, 1.3, 1.0);
            }
        }
    }

    #[test]
    fn what_is_no_number_is_not_hidden() {
        for device in everywhere() {
            for (n_vocab, bad) in [(8, f32::NAN), (1001, f32::NAN), (4100, f32::INFINITY)] {
                let mut w: Vec<f32> = (0..n_vocab).map(|id| (id % 7) as f32).collect();
                w[n_vocab - 1] = bad;
                let tape = Tape::new();
                let x = tape.leaf(0, &Tensor::from_f32(&device, &[1, 1], &[1.0]));
                let w = tape.leaf(1, &Tensor::from_f32(&device, &[n_vocab, 1], &w));
                let targets = Targets { ids: &[3], weights: &[1.0], norm: 1.0 };
                let out = head_loss(&tape, &x, (&w.into(), 1.0), &targets, None);
                let mut grads = crate::tape::Gradients::default();
                tape.backward(&out.loss, 1.0, &mut grads);
                let what = format!("{device:?}, {n_vocab}");
                assert!(out.loss.value().to_vec()[0].is_nan(), "{what}: loss");
                assert!(grads.get(1).unwrap().to_vec()[3].is_nan(), "{what}: gradient");
            }
        }
    }

    #[test]
    fn chunks_are_even_and_whole_tiles() {
        for (device, _) in devices().iter().filter(|it| it.0.kind() == "cuda") {
            assert_eq!(n_chunk(device, 16_384, 50_280), 2816);
            assert_eq!(n_chunk(device, 3000, 50_280), 1536);
            assert_eq!(n_chunk(device, 100, 1 << 27), 16);
        }
    }

    #[test]
    fn each_row_says_whether_its_target_was_the_best() {
        for device in everywhere() {
            let x = Var::constant(Tensor::from_f32(&device, &[4, 1], &[1.0, -1.0, 1.0, 1.0]));
            let w = Var::constant(Tensor::from_f32(&device, &[3, 1], &[-1.0, 0.5, 1.0]));
            let targets = Targets { ids: &[2, 0, 2, 1], weights: &[1.0, 0.5, 0.0, 1.0], norm: 2.5 };
            let out = head_loss(&Tape::off(), &x, (&w.into(), 1.0), &targets, None);
            let nll = out.tokens.nll();
            assert_eq!(out.tokens.top1(), [true, true, false, false], "{device:?}");
            assert!(nll[2] == 0.0 && nll[3] > nll[0], "{device:?}");
        }
    }

    #[test]
    fn chunks_and_a_head_larger_than_a_binding_change_nothing() {
        // 64 KiB to a binding: 16 tokens to a chunk, the head in two parts.
        let (n_tok, n_vocab, d_model) = (70, 1000, 20);
        let ids: Vec<u32> = (0..n_tok as u32).map(|tok| tok * 13 % n_vocab as u32).collect();
        let masks: [fn(usize) -> f32; 3] = [
            |_| 1.0,
            // A run in the middle; holes.
            |tok| if (20..50).contains(&tok) { 0.5 } else { 0.0 },
            |tok| [1.0, 0.0, 2.0, 0.25][tok % 4],
        ];
        let run = |device: &Device, mask: fn(usize) -> f32| {
            let weights: Vec<f32> = (0..n_tok).map(mask).collect();
            let targets = Targets { ids: &ids, weights: &weights, norm: 31.0 };
            let tape = Tape::new();
            let x = tape.leaf(0, &Input::normal(1, &[n_tok, d_model], 1.0).tensor(device));
            let w = tape.leaf(1, &Input::normal(2, &[n_vocab, d_model], 0.5).tensor(device));
            let out = head_loss(&tape, &x, (&w.into(), 1.3), &targets, None);
            let mut list = vec![out.loss.value().to_vec(), out.tokens.nll()];
            list.push(out.tokens.top1().into_iter().map(f32::from).collect());
            let mut grads = crate::tape::Gradients::default();
            tape.backward(&out.loss, 0.25, &mut grads);
            list.extend(grads.iter().map(|(_, grad)| grad.to_vec()));
            device.check().unwrap();
            list
        };
        let small = small_bindings().map(|device| (device.clone(), 1e-4));
        for mask in masks {
            let want = run(&Device::cpu(2).unwrap(), mask);
            for (device, tolerance) in devices().iter().cloned().chain(small.clone()) {
                let got = run(&device, mask);
                for (idx, (want, got)) in want.iter().zip(&got).enumerate() {
                    if idx == 2 && tolerance > 1e-3 {
                        continue; // two logits may be the same number there
                    }
                    compare_devices(&format!("{device:?}, {idx}"), want, got, tolerance);
                }
            }
        }
    }
}
