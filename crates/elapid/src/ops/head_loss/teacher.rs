//! What another model, the teacher, makes of the same tokens: the part of the loss that follows it.
//!
//! With its logits `t`, a temperature T and a share c of the loss:
//!
//! ```text
//! p = softmax(l / T)    q = softmax(t / T)    kl = sum_v q[v] (ln q[v] - ln p[v])
//!
//! loss  = sum_t s[t] ((1 - c) nll[t] + c T^2 kl[t]) / norm
//! dl[v] = s[t] / norm ((1 - c) (exp(l[v]) / sum_u exp(l[u]) - [v = k]) + c T (p[v] - q[v]))
//! ```
//!
//! T^2 keeps that gradient about as large at any temperature (Hinton, Vinyals, Dean 2015). The
//! sums of p and q run over the ids that both heads have: what one has more stands for no token.
//!
//! The teacher's logits are made in the same chunks as the student's, and no gradient of them.

use super::{Learned, TokenLoss};
use crate::ops::linear::{Linear, Operands, Way};
use crate::tensor::Tensor;
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Gpu, Kernel, Word, Work, bind};
use crate::tensor::product::Rows;
use pulp::{Simd, WithSimd};
use std::ops::Range;

/// A model to learn from beside the targets, and how.
pub struct Teacher {
    /// After its final norm, for the tokens of the student: (n_tok, its width).
    pub hidden: Tensor,
    pub head: Linear,
    /// Of its logits.
    pub factor: f32,
    /// Above zero.
    pub temperature: f32,
    /// From 0 to 1; the rest of the loss is the likelihood of the targets.
    pub share: f32,
}

/// A teacher while the chunks go through.
pub(super) struct Lesson<'a> {
    pub(super) teacher: &'a Teacher,
    operands: Operands,
    /// Of a chunk: (n_chunk, n_row).
    logits: Tensor,
    /// (n_tok).
    pub(super) kl: Tensor,
}

impl Lesson<'_> {
    pub(super) fn new(teacher: &Teacher, operands: Operands, n_chunk: usize) -> Lesson<'_> {
        let device = teacher.hidden.device();
        let logits = Tensor::uninit(device, &[n_chunk, operands.d_out()]);
        let kl = Tensor::zeros(device, &[teacher.hidden.dims2().0]);
        Lesson { teacher, operands, logits, kl }
    }

    /// `Learned::softmax` with both parts of the loss.
    pub(super) fn softmax(
        &mut self,
        learned: &Learned,
        chunk: &Range<usize>,
        (factor, wants_grads, n_vocab): (f32, bool, usize),
        buffers: [&mut Tensor; 2],
        tokens: &mut TokenLoss,
    ) {
        let input = self.operands.input(&learned.gather(&self.teacher.hidden, chunk), chunk.start);
        let out = Rows { tensor: &mut self.logits, rows: 0..chunk.len() };
        self.operands.forward(0..self.operands.d_out(), &input, out, Way::Many);
        let Teacher { temperature, share, .. } = *self.teacher;
        let factors = [factor, self.teacher.factor].map(|factor| factor / temperature);
        let scales = Scales { factor, factors, temperature, share };
        let n_common = n_vocab.min(self.teacher.head.d_out());
        let sizes = (n_vocab, n_common);
        match buffers[0].device().clone() {
            Device::Cpu(_) => self.rows(learned, chunk, scales, wants_grads, (buffers, tokens)),
            Device::Gpu(gpu) => {
                let out = (buffers, tokens);
                self.launch(&gpu, learned, chunk, (scales, sizes, wants_grads), out);
            }
        }
    }

    fn rows(
        &mut self,
        learned: &Learned,
        chunk: &Range<usize>,
        scales: Scales,
        wants_grads: bool,
        ([logits, _], tokens): ([&mut Tensor; 2], &mut TokenLoss),
    ) {
        let cpu = logits.device().host().clone();
        let (n_vocab, n_taught) = (logits.dims2().1, self.logits.dims2().1);
        let rows = logits.f32_mut().chunks_exact_mut(n_vocab);
        let taught = self.logits.f32().chunks_exact(n_taught);
        let rows = rows.zip(taught).zip(chunk.clone()).collect();
        let found = cpu.map(rows, |((logits, taught), at)| {
            let taught = &taught[..n_taught.min(n_vocab)];
            let dlogits = wants_grads.then(|| learned.factors[at]);
            let target = learned.targets[at] as usize;
            cpu.simd(TaughtRow { logits, taught, target, scales, dlogits })
        });
        for (&row, [nll, top1, kl]) in learned.rows[chunk.clone()].iter().zip(found) {
            tokens.nll.f32_mut()[row as usize] = nll;
            tokens.top1.f32_mut()[row as usize] = top1;
            self.kl.f32_mut()[row as usize] = kl;
        }
    }

    fn launch(
        &mut self,
        gpu: &Gpu,
        learned: &Learned,
        chunk: &Range<usize>,
        (scales, (n_vocab, n_common), wants_grads): (Scales, (usize, usize), bool),
        ([logits, dlogits], tokens): ([&mut Tensor; 2], &mut TokenLoss),
    ) {
        let in_place = gpu.activation_dtype() == logits.dtype();
        let (n_row, n_row_taught) = (logits.dims2().1, self.logits.dims2().1);
        let sizes = [chunk.len(), n_vocab, chunk.start, learned.rows.len(), n_row];
        let sizes = sizes.into_iter().chain([n_common, n_row_taught]).map(Word::from);
        let Scales { factor, factors: [of_student, of_teacher], temperature, share } = scales;
        let scales = [factor, of_student, of_teacher, temperature, share].map(Word::from);
        let params: Vec<Word> = sizes.chain(scales).collect();
        let written = [logits, dlogits, &mut tokens.nll, &mut tokens.top1, &mut self.kl];
        let mut args = bind([&learned.lists, &self.logits], written);
        let work = Work::groups(chunk.len(), if gpu.caps().warps { 1024 } else { 256 });
        let flags = [("HAS_GRADS", wants_grads), ("IN_PLACE", in_place)];
        let consts = flags.map(|(name, flag)| (name, usize::from(flag)));
        gpu.launch(&TAUGHT, work, &consts, &mut args, &params);
    }
}

static TAUGHT: Kernel =
    Kernel::new("head_loss_taught", include_str!("teacher.wgsl"), include_str!("teacher.cu"));

/// What logits are multiplied by, and how the parts of the loss are weighed.
#[derive(Clone, Copy)]
struct Scales {
    /// Of the student's logits at a temperature of one.
    factor: f32,
    /// Of the student's and the teacher's, over the temperature.
    factors: [f32; 2],
    temperature: f32,
    share: f32,
}

struct TaughtRow<'a> {
    /// (n_vocab).
    logits: &'a mut [f32],
    /// The teacher's, of the ids that both have.
    taught: &'a [f32],
    target: usize,
    scales: Scales,
    /// If given, logits are replaced by this times their gradient.
    dlogits: Option<f32>,
}

impl WithSimd for TaughtRow<'_> {
    /// Negative log-likelihood, whether the target is the largest, divergence.
    type Output = [f32; 3];
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> [f32; 3] {
        let TaughtRow { logits, taught, target, scales, dlogits } = self;
        let Scales { factor, factors: [fp, fq], temperature, share } = scales;
        let (lanes, n) = (F32s::<S>::LANES, taught.len());
        let whole = n / lanes * lanes;
        let [factor_v, fp_v, fq_v] = [factor, fp, fq].map(|x| F32s::splat(simd, x));
        let mut most = [F32s::splat(simd, f32::NEG_INFINITY); 3];
        for at in (0..whole).step_by(lanes) {
            let (l, t) = (F32s::load(simd, &logits[at..]), F32s::load(simd, &taught[at..]));
            most[0] = most[0].max(l * factor_v);
            most[1] = most[1].max(l * fp_v);
            most[2] = most[2].max(t * fq_v);
        }
        let mut tops = most.map(|most| most.max_lane());
        for at in whole..logits.len() {
            tops[0] = tops[0].max(logits[at] * factor);
            if at < n {
                tops[1] = tops[1].max(logits[at] * fp);
                tops[2] = tops[2].max(taught[at] * fq);
            }
        }
        let [top, top_p, top_q] = tops;
        let [top_v, top_p_v, top_q_v] = tops.map(|x| F32s::splat(simd, x));
        let mut sums_v = [F32s::zero(simd); 4];
        for at in (0..whole).step_by(lanes) {
            let (l, t) = (F32s::load(simd, &logits[at..]), F32s::load(simd, &taught[at..]));
            let (ln_p, ln_q) = (l * fp_v - top_p_v, t * fq_v - top_q_v);
            let q = ln_q.exp();
            sums_v[0] = sums_v[0] + (l * factor_v - top_v).exp();
            sums_v[1] = sums_v[1] + ln_p.exp();
            sums_v[2] = sums_v[2] + q;
            sums_v[3] = sums_v[3] + q * (ln_q - ln_p);
        }
        let mut sums = sums_v.map(|sum| sum.sum());
        for at in whole..logits.len() {
            sums[0] += (logits[at] * factor - top).exp();
            if at < n {
                let (ln_p, ln_q) = (logits[at] * fp - top_p, taught[at] * fq - top_q);
                let q = ln_q.exp();
                sums[1] += ln_p.exp();
                sums[2] += q;
                sums[3] += q * (ln_q - ln_p);
            }
        }
        let [sum, sum_p, sum_q, dot] = sums;
        let at_target = logits[target] * factor;
        if let Some(scale) = dlogits {
            let (of_targets, of_teacher) = (scale * (1.0 - share), scale * share * temperature);
            let [a, p, q] = [of_targets / sum, of_teacher / sum_p, of_teacher / sum_q];
            let [a_v, p_v, q_v] = [a, p, q].map(|x| F32s::splat(simd, x));
            for at in (0..whole).step_by(lanes) {
                let (l, t) = (F32s::load(simd, &logits[at..]), F32s::load(simd, &taught[at..]));
                let pulled = (l * fp_v - top_p_v).exp() * p_v - (t * fq_v - top_q_v).exp() * q_v;
                ((l * factor_v - top_v).exp() * a_v + pulled).store(&mut logits[at..]);
            }
            for at in whole..logits.len() {
                let l = logits[at];
                logits[at] = (l * factor - top).exp() * a;
                if at < n {
                    let pulled = (l * fp - top_p).exp() * p - (taught[at] * fq - top_q).exp() * q;
                    logits[at] += pulled;
                }
            }
            logits[target] -= of_targets;
        }
        let kl = dot / sum_q - sum_q.ln() + sum_p.ln();
        [top + sum.ln() - at_target, f32::from(at_target >= top), kl]
    }
}

#[cfg(test)]
mod tests {
    use super::super::head_loss;
    use super::*;
    use crate::files::TensorFile;
    use crate::files::safetensors::SafeTensors;
    use crate::ops::check::{Input, check_gradients, compare_devices, devices, small_bindings};
    use crate::tape::{Gradients, Tape, Var};
    use crate::tensor::DType;
    use crate::tensor::batch::Targets;

    /// A teacher of its own width.
    fn teacher(device: &Device, n_tok: usize, n_vocab: usize, how: (f32, f32)) -> Teacher {
        let (temperature, share) = how;
        let hidden = Input::normal(8, &[n_tok, 5], 1.0).tensor(device);
        let head = Var::constant(Input::normal(9, &[n_vocab, 5], 0.6).tensor(device)).into();
        Teacher { hidden, head, factor: 0.8, temperature, share }
    }

    #[test]
    fn gradients() {
        // As many tokens as the student, more, fewer.
        for (n_tok, n_vocab, n_taught) in [(1, 3, 3), (7, 35, 40), (20, 64, 50)] {
            let ids: Vec<u32> = (0..n_tok as u32).map(|t| t * 7 % n_vocab as u32).collect();
            // Every third token is left out, the others weigh differently.
            let weights: Vec<f32> = (0..n_tok).map(|t| [1.0, 0.0, 0.5][t % 3]).collect();
            let targets = Targets { ids: &ids, weights: &weights, norm: 3.0 };
            let inputs = [Input::normal(1, &[n_tok, 4], 1.0), Input::normal(2, &[n_vocab, 4], 0.5)];
            for how in [(2.0, 0.4), (0.7, 1.0)] {
                check_gradients(&inputs, |tape, v| {
                    let teacher = teacher(v[0].value().device(), n_tok, n_taught, how);
                    let head = v[1].clone().into();
                    vec![head_loss(tape, &v[0], (&head, 1.3), &targets, Some(&teacher)).loss]
                });
            }
        }
    }

    #[test]
    fn losses_and_gradients_equal_torch() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/teacher.safetensors");
        let bytes = std::sync::Arc::new(std::fs::read(path).unwrap());
        let golden = SafeTensors::parse("teacher", bytes).unwrap();
        let device = Device::cpu(2).unwrap();
        for case in 0..3 {
            let of = |name: &str| {
                golden.tensor(&device, &format!("{case}.{name}")).unwrap().unwrap().to_f32()
            };
            let hyper = golden.doubles(&format!("{case}.hyper")).unwrap().unwrap();
            let [factor, factor_teacher, temperature, share] =
                [0, 1, 2, 3].map(|at| hyper[at] as f32);
            let ids = golden.integers(&format!("{case}.ids")).unwrap().unwrap();
            let ids: Vec<u32> = ids.into_iter().map(|id| id as u32).collect();
            let weights = of("weights").f32().to_vec();
            let norm = weights.iter().sum();
            let targets = Targets { ids: &ids, weights: &weights, norm };
            let (hidden, head) = (of("hidden"), Var::constant(of("head")).into());
            let teacher = Teacher { hidden, head, factor: factor_teacher, temperature, share };
            let tape = Tape::new();
            let (x, w) = (tape.leaf(0, &of("x")), tape.leaf(1, &of("w")));
            let out = head_loss(&tape, &x, (&w.into(), factor), &targets, Some(&teacher));
            let mut grads = Gradients::default();
            tape.backward(&out.loss, 1.0, &mut grads);
            let [nll, kl] = out.parts.unwrap();
            let found = [("nll", &nll), ("kl", &kl), ("loss", out.loss.value())];
            let grads = [("dx", grads.get(0).unwrap()), ("dw", grads.get(1).unwrap())];
            for (name, got) in found.into_iter().chain(grads) {
                compare_devices(&format!("{case}.{name}"), of(name).f32(), got.f32(), 2e-6);
            }
        }
    }

    /// The CPU and every other device.
    fn everywhere() -> Vec<Device> {
        let there = devices().iter().map(|it| it.0.clone());
        std::iter::once(Device::cpu(1).unwrap()).chain(there).collect()
    }

    /// Probabilities in f64.
    fn softmax(logits: &[f64]) -> Vec<f64> {
        let top = logits.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = logits.iter().map(|l| (l - top).exp()).sum();
        logits.iter().map(|l| (l - top).exp() / sum).collect()
    }

    /// Tokens are unit vectors and weights few bits long: logits are weights, exact in every
    /// format, and gradients of weights those of logits.
    fn check_rows(device: &Device, [n_vocab, n_taught]: [usize; 2], temperature: f32, size: f32) {
        let (n_tok, factor, share) = (3, 1.25, 0.25);
        let weights = |n: usize, by: usize, size: f32| -> Vec<f32> {
            let number = |at: usize| ((at / n_tok * by + at % n_tok * 11) % 255) as f32 - 127.0;
            (0..n * n_tok).map(|at| number(at) / 16.0 * size).collect()
        };
        let (w, v) = (weights(n_vocab, 37, size), weights(n_taught, 53, 0.5));
        let unit = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
        let unit = Tensor::from_f32(device, &[n_tok, n_tok], &unit);
        let head = Var::constant(Tensor::from_f32(device, &[n_taught, n_tok], &v)).into();
        let teacher = Teacher { hidden: unit.clone(), head, factor: 0.5, temperature, share };
        let ids = [0, n_vocab as u32 - 1, n_vocab as u32 / 2];
        let targets = Targets { ids: &ids, weights: &[1.0, 0.5, 2.0], norm: 3.5 };
        let tape = Tape::new();
        let x = tape.leaf(0, &unit);
        let head = tape.leaf(1, &Tensor::from_f32(device, &[n_vocab, n_tok], &w)).into();
        let out = head_loss(&tape, &x, (&head, factor), &targets, Some(&teacher));
        let mut grads = Gradients::default();
        tape.backward(&out.loss, 1.0, &mut grads);
        let dw = grads.get(1).unwrap().to_vec();
        // Rounding to bf16 alone is off by up to 2^-8.
        let is_bf16 = device.activation_dtype() == DType::BF16;
        let tolerance = if is_bf16 { 4e-3 } else { 1e-4 };
        let (mut divergence, mut likelihood) = (0.0, 0.0);
        for tok in 0..n_tok {
            let what = format!("{device:?}, {n_vocab} and {n_taught} at {temperature}, {tok}");
            let row = |w: &[f32], factor: f32| -> Vec<f64> {
                w.iter().skip(tok).step_by(n_tok).map(|&l| (l * factor) as f64).collect()
            };
            let over = |row: &[f64]| -> Vec<f64> {
                let n = n_vocab.min(n_taught);
                softmax(&row[..n].iter().map(|l| l / temperature as f64).collect::<Vec<_>>())
            };
            let (l, t) = (row(&w, factor), row(&v, 0.5));
            let (all, p, q) = (softmax(&l), over(&l), over(&t));
            let kl: f64 = p.iter().zip(&q).map(|(p, q)| q * (q.ln() - p.ln())).sum();
            let weight = (targets.weights[tok] / targets.norm) as f64;
            divergence += weight * kl;
            likelihood -= weight * all[ids[tok] as usize].ln();
            let scale = weight * factor as f64;
            for id in 0..n_vocab {
                let hit = if id as u32 == ids[tok] { 1.0 } else { 0.0 };
                let pulled = if id < p.len() { p[id] - q[id] } else { 0.0 };
                let want = scale * (0.75 * (all[id] - hit) + 0.25 * temperature as f64 * pulled);
                let got = dw[id * n_tok + tok] as f64;
                // Terms that cancel are each off by their own rounding.
                let terms = all[id] + if id < p.len() { p[id] + q[id] } else { 0.0 };
                let near = tolerance * want.abs() + scale * (1e-6 * terms + 1e-9);
                assert!((got - want).abs() <= near, "{what}, id {id}: {got}, not {want}");
            }
        }
        let parts = out.parts.unwrap().map(|part| part.to_vec()[0] as f64);
        let total = 0.75 * likelihood + 0.25 * (temperature as f64).powi(2) * divergence;
        let pairs = [(parts[0], likelihood), (parts[1], divergence)];
        for (got, want) in pairs.into_iter().chain([(out.loss.value().to_vec()[0] as f64, total)]) {
            assert!((got - want).abs() <= 2e-5 * (1.0 + want), "{device:?}: {got}, not {want}");
        }
        device.check().unwrap();
    }

    #[test]
    fn rows_of_every_length_are_right() {
        for device in everywhere() {
            check_rows(&device, [1001, 1001], 2.0, 1.0);
            check_rows(&device, [1000, 1003], 0.5, 1.0);
            check_rows(&device, [4100, 4097], 4.0, 1.0);
            check_rows(&device, [24, 24], 2.0, 64.0); // huge
            check_rows(&device, [4, 9], 1.0, 1.0);
            check_rows(&device, [20_000, 20_000], 2.0, 1.0);
        }
    }

    #[test]
    fn who_is_its_own_teacher_has_nothing_to_learn_from_it() {
        let (n_tok, n_vocab) = (9, 1001);
        let ids: Vec<u32> = (0..n_tok as u32).map(|tok| tok * 31).collect();
        let targets = Targets { ids: &ids, weights: &vec![1.0; n_tok], norm: 9.0 };
        for device in everywhere() {
            let x = Input::normal(1, &[n_tok, 8], 1.0).tensor(&device);
            let w = Input::normal(2, &[n_vocab, 8], 1.0).tensor(&device);
            let head = Var::constant(w.clone()).into();
            let teacher = |share| {
                let (hidden, head) = (x.clone(), Linear::clone(&head));
                Teacher { hidden, head, factor: 1.3, temperature: 2.0, share }
            };
            let grads = |teacher: Option<&Teacher>| {
                let tape = Tape::new();
                let (x, w) = (tape.leaf(0, &x), tape.leaf(1, &w));
                let out = head_loss(&tape, &x, (&w.into(), 1.3), &targets, teacher);
                let mut grads = Gradients::default();
                tape.backward(&out.loss, 1.0, &mut grads);
                let grads = grads.iter().flat_map(|(_, grad)| grad.to_vec()).collect::<Vec<_>>();
                (grads, out.parts.map(|parts| parts[1].to_vec()[0]))
            };
            let (dx, kl) = grads(Some(&teacher(1.0)));
            assert_eq!(kl, Some(0.0), "{device:?}");
            assert!(dx.iter().all(|dx| *dx == 0.0), "{device:?}");
            let (half, _) = grads(Some(&teacher(0.5)));
            let doubled: Vec<f32> = half.iter().map(|dx| 2.0 * dx).collect();
            let is_bf16 = device.activation_dtype() == DType::BF16;
            let tolerance = if is_bf16 { 2e-2 } else { 1e-4 };
            compare_devices(&format!("{device:?}"), &grads(None).0, &doubled, tolerance);
        }
    }

    #[test]
    fn what_is_no_number_is_not_hidden() {
        for device in everywhere() {
            for bad in [f32::NAN, f32::INFINITY] {
                let unit = Tensor::from_f32(&device, &[1, 1], &[1.0]);
                let row = |bad: f32| Tensor::from_f32(&device, &[4, 1], &[0.5, 1.0, -1.0, bad]);
                let head = Var::constant(row(bad)).into();
                let (hidden, factor) = (unit.clone(), 1.0);
                let teacher = Teacher { hidden, head, factor, temperature: 2.0, share: 0.5 };
                let tape = Tape::new();
                let w = tape.leaf(1, &row(0.0));
                let targets = Targets { ids: &[2], weights: &[1.0], norm: 1.0 };
                let x = Var::constant(unit);
                let out = head_loss(&tape, &x, (&w.into(), 1.0), &targets, Some(&teacher));
                let mut grads = Gradients::default();
                tape.backward(&out.loss, 1.0, &mut grads);
                assert!(out.loss.value().to_vec()[0].is_nan(), "{device:?}: loss");
                assert!(grads.get(1).unwrap().to_vec()[2].is_nan(), "{device:?}: gradient");
            }
        }
    }

    #[test]
    fn chunks_holes_and_small_bindings_change_nothing() {
        // 64 KiB to a binding: 16 tokens to a chunk, the teacher's head in several parts.
        let (n_tok, n_vocab, n_taught) = (70, 1000, 1010);
        let ids: Vec<u32> = (0..n_tok as u32).map(|tok| tok * 13 % n_vocab as u32).collect();
        let weights: Vec<f32> = (0..n_tok).map(|tok| [1.0, 0.0, 2.0, 0.25][tok % 4]).collect();
        // Exact in bf16: where p and q nearly cancel, rounded logits would say little.
        let short =
            |seed, n, d, size: f32| Input::map(seed, &[n, d], |x| (8.0 * x).round() / 8.0 * size);
        let run = |device: &Device, order: &dyn Fn(usize) -> bool| {
            let weights = weights.iter().enumerate();
            let weights: Vec<f32> =
                weights.map(|(tok, w)| if order(tok) { *w } else { 0.0 }).collect();
            let targets = Targets { ids: &ids, weights: &weights, norm: 31.0 };
            let tape = Tape::new();
            let x = tape.leaf(0, &short(1, n_tok, 20, 1.0).tensor(device));
            let w = tape.leaf(1, &short(2, n_vocab, 20, 0.5).tensor(device));
            let mut teacher = teacher(device, n_tok, n_taught, (2.0, 0.5));
            teacher.hidden = short(3, n_tok, 5, 1.0).tensor(device);
            teacher.head = Var::constant(short(4, n_taught, 5, 0.5).tensor(device)).into();
            let out = head_loss(&tape, &x, (&w.into(), 1.3), &targets, Some(&teacher));
            let mut list = vec![out.loss.value().to_vec(), out.tokens.nll()];
            list.extend(out.parts.unwrap().map(|part| part.to_vec()));
            let mut grads = Gradients::default();
            tape.backward(&out.loss, 0.25, &mut grads);
            list.extend(grads.iter().map(|(_, grad)| grad.to_vec()));
            device.check().unwrap();
            list
        };
        let cpu = Device::cpu(2).unwrap();
        let want = run(&cpu, &|_| true);
        let small = small_bindings().map(|device| (device.clone(), 1e-4));
        for (device, tolerance) in devices().iter().cloned().chain(small) {
            for (idx, (want, got)) in want.iter().zip(&run(&device, &|_| true)).enumerate() {
                compare_devices(&format!("{device:?}, {idx}"), want, got, tolerance);
            }
        }
        let parts = [run(&cpu, &|tok| tok < 30), run(&cpu, &|tok| tok >= 30)];
        for (idx, want) in want.iter().enumerate() {
            let sum: Vec<f32> =
                parts[0][idx].iter().zip(&parts[1][idx]).map(|(a, b)| a + b).collect();
            compare_devices(&format!("parts, {idx}"), want, &sum, 1e-5);
        }
    }
}
