//! The head and the cross-entropy in one: the matrix of all logits never exists.
//!
//! For each token t with target k, weight s and logits `l = factor head(x)`:
//!
//!     nll[t] = ln sum_v exp(l[v]) - l[k]            loss = sum_t s[t] nll[t] / norm
//!     dl[v]  = s[t] / norm (exp(l[v]) / sum_u exp(l[u]) - [v = k])
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

use super::linear::Linear;
use crate::batch::Targets;
use crate::cpu::F32s;
use crate::device::Device;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use pulp::{Simd, WithSimd};

/// The loss and what each token added to it.
pub struct Loss {
    /// One number.
    pub loss: Var,
    /// Negative log-likelihood of each target in nats; zero where the weight is zero.
    pub nll: Vec<f32>,
    /// Whether each target had the largest logit; never where the weight is zero.
    pub top1: Vec<bool>,
}

/// Numbers of a chunk of logits: 16 MiB, which keeps the products large.
const CHUNK: usize = 1 << 22;

/// The weighted mean negative log-likelihood of the targets.
pub fn head_loss(tape: &Tape, x: &Var, head: &Linear, factor: f32, targets: &Targets) -> Loss {
    let (n_tok, _) = x.value().dims2();
    assert_eq!((targets.ids.len(), targets.weights.len()), (n_tok, n_tok), "loss: targets");
    let mut inputs = head.inputs();
    inputs.insert(0, x);
    let wants_grads = tape.is_recording() && inputs.iter().any(|input| input.needs_grad());
    let pass = forward(x, head, factor, targets, wants_grads);
    let mut loss = Tensor::uninit(x.value().device(), &[1]);
    loss.f32_mut()[0] = pass.loss;
    let grads = pass.grads;
    let loss =
        tape.record("head loss", &inputs, loss, move |dloss| backward(grads, dloss.f32()[0]));
    Loss { loss, nll: pass.nll, top1: pass.top1 }
}

struct Pass {
    loss: f32,
    nll: Vec<f32>,
    top1: Vec<bool>,
    /// Gradients for a loss gradient of one, in the order of the inputs.
    grads: Vec<Option<Tensor>>,
}

fn forward(x: &Var, head: &Linear, factor: f32, targets: &Targets, wants_grads: bool) -> Pass {
    let device = x.value().device();
    let (n_tok, d_model) = x.value().dims2();
    let n_vocab = head.d_out();
    let rows: Vec<usize> = (0..n_tok).filter(|&tok| targets.weights[tok] != 0.0).collect();
    let n_chunk = (CHUNK / n_vocab.max(1)).clamp(16, 4096);
    let operands = head.operands();
    let mut grads = wants_grads.then(|| operands.grads());
    let mut dx = (wants_grads && x.needs_grad()).then(|| Tensor::zeros(device, &[n_tok, d_model]));
    let (mut nll, mut top1) = (vec![0.0; n_tok], vec![false; n_tok]);
    // One size whatever is learned: buffers of many sizes would lie beside each other in the pool.
    let mut chunk_logits = Tensor::uninit(device, &[n_chunk.min(n_tok), n_vocab]);
    for (chunk, rows) in rows.chunks(n_chunk).enumerate() {
        let input = operands.input(&gather(x.value(), rows), chunk * n_chunk);
        let logits = &mut chunk_logits.f32_mut()[..rows.len() * n_vocab];
        let pass = operands.forward_into(0..n_vocab, &input, logits);
        let found = SoftmaxRows { rows, factor, targets, wants_grads }.run(device, logits);
        for (&row, found) in rows.iter().zip(found) {
            (nll[row], top1[row]) = found;
        }
        if let Some(grads) = &mut grads {
            let mut dx_rows = dx.is_some().then(|| Tensor::uninit(device, &[rows.len(), d_model]));
            let into = dx_rows.as_mut().map(|dx| (dx.f32_mut(), 0.0));
            operands.backward(&input, &pass, logits, into, grads);
            if let (Some(dx), Some(dx_rows)) = (&mut dx, dx_rows) {
                for (&row, from) in rows.iter().zip(dx_rows.f32().chunks_exact(d_model)) {
                    dx.f32_mut()[row * d_model..][..d_model].copy_from_slice(from);
                }
            }
        }
    }
    let sum: f64 = nll.iter().zip(targets.weights).map(|(&n, &w)| n as f64 * w as f64).sum();
    let loss = (sum / targets.norm as f64) as f32;
    let mut list = vec![dx];
    list.extend(grads.map(|grads| grads.into_list(&operands)).unwrap_or_default());
    Pass { loss, nll, top1, grads: list }
}

/// Scales what `forward` has prepared.
fn backward(mut grads: Vec<Option<Tensor>>, dloss: f32) -> Vec<Option<Tensor>> {
    if dloss != 1.0 {
        for grad in grads.iter_mut().flatten() {
            let cpu = grad.device().expect_cpu().clone();
            cpu.each_piece(grad.f32_mut(), 1 << 15, |_, piece| {
                piece.iter_mut().for_each(|g| *g *= dloss);
            });
        }
    }
    grads
}

fn gather(x: &Tensor, rows: &[usize]) -> Tensor {
    let (_, d_model) = x.dims2();
    // Rows in a run need no copy.
    if rows.last().is_some_and(|last| last + 1 - rows[0] == rows.len()) {
        return x.rows(rows[0]..rows[0] + rows.len());
    }
    let mut out = Tensor::uninit(x.device(), &[rows.len(), d_model]);
    for (&row, out) in rows.iter().zip(out.f32_mut().chunks_exact_mut(d_model)) {
        out.copy_from_slice(&x.f32()[row * d_model..][..d_model]);
    }
    out
}

/// Per row: negative log-likelihood and whether the target is the largest; with `wants_grads` the
/// logits become their gradient.
struct SoftmaxRows<'a> {
    rows: &'a [usize],
    factor: f32,
    targets: &'a Targets<'a>,
    wants_grads: bool,
}

impl SoftmaxRows<'_> {
    fn run(&self, device: &Device, logits: &mut [f32]) -> Vec<(f32, bool)> {
        let cpu = device.expect_cpu();
        let SoftmaxRows { rows, factor, targets, wants_grads } = *self;
        let n_vocab = logits.len() / rows.len();
        let tasks = logits.chunks_exact_mut(n_vocab).zip(rows).collect();
        cpu.map(tasks, |(logits, &row)| {
            let target = targets.ids[row] as usize;
            assert!(target < n_vocab, "loss: target {target} of {n_vocab}");
            let scale = targets.weights[row] / targets.norm * factor;
            cpu.simd(SoftmaxRow { logits, factor, target, dlogits: wants_grads.then_some(scale) })
        })
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{Input, check_gradients};
    use crate::ops::linear::Adapter;

    fn head(v: &[Var]) -> Linear {
        let (a, b) = (v[3].clone(), v[4].clone());
        let adapter = Adapter { a, b, scale: 0.7, dropout: None, magnitude: None };
        Linear {
            weight: v[1].clone(),
            bias: Some(v[2].clone()),
            adapter: Some(adapter),
            arithmetic: Default::default(),
        }
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
                vec![head_loss(tape, &v[0], &head(v), 1.3, &targets).loss]
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
            let out = head_loss(&tape, &x, &w.into(), 1.0, &targets);
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

    #[test]
    fn huge_logits_give_a_finite_loss() {
        let device = Device::cpu(1).unwrap();
        let x = Var::constant(Tensor::from_f32(&device, &[1, 1], &[1e4]));
        let w = Var::constant(Tensor::from_f32(&device, &[3, 1], &[-1.0, 0.5, 1.0]));
        let targets = Targets { ids: &[1], weights: &[1.0], norm: 1.0 };
        let out = head_loss(&Tape::off(), &x, &w.into(), 1.0, &targets);
        assert_eq!(out.loss.value().f32(), [5000.0]);
        assert_eq!(out.top1, [false]);
    }

    #[test]
    fn each_row_says_whether_its_target_was_the_best() {
        let device = Device::cpu(1).unwrap();
        let x = Var::constant(Tensor::from_f32(&device, &[4, 1], &[1.0, -1.0, 1.0, 1.0]));
        let w = Var::constant(Tensor::from_f32(&device, &[3, 1], &[-1.0, 0.5, 1.0]));
        let targets = Targets { ids: &[2, 0, 2, 1], weights: &[1.0, 0.5, 0.0, 1.0], norm: 2.5 };
        let out = head_loss(&Tape::off(), &x, &w.into(), 1.0, &targets);
        assert_eq!(out.top1, [true, true, false, false]);
        assert!(out.nll[2] == 0.0 && out.nll[3] > out.nll[0]);
    }
}
