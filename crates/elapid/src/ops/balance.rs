//! Balance loss of experts: one number that grows as a router favours some of them.
//!
//! Over the tokens of one layer, with p the softmax of a token's logits over all experts:
//!
//! ```text
//! loss = n_expert * sum over e of f[e] P[e]
//! f[e] = choices of expert e / n_tok      a constant; sums to n_used
//! P[e] = mean over tokens of p[e]
//! ```
//!
//! Backward, for each token: `dlogits = dloss n_expert / n_tok p (f - sum of f p)`.
//!
//! The loss is `n_used` when the choices are even or the probabilities are. It is the number that
//! transformers' `load_balancing_loss_func` gives for the logits of one layer. Of several layers
//! that function averages f and P before the product, so that one layer may make up for another,
//! where the mean of our losses asks every layer to be even. Where f is a share of all choices and
//! sums to one, the loss is `n_used` times smaller.
//!
//! | name     | shape             |
//! |----------|-------------------|
//! | `logits` | (n_tok, n_expert) |
//! | loss     | (1)               |
//!
//! Kept for backward: the logits and f. Not here: the choice (`router`); the factor on the loss.

use crate::ops::router::{Routing, rows_per_task};
use crate::ops::softmax::{Softmax, SoftmaxBackward, row_threads};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Kernel, Work, bind};

/// How unevenly tokens are spread over experts, one number: `n_used` when even.
pub fn balance_loss(tape: &Tape, logits: &Var, routing: &Routing) -> Var {
    let (n_tok, n_expert) = (routing.n_tok(), routing.n_expert());
    logits.value().expect_shape("balance loss: logits", &[n_tok, n_expert]);
    // Choices of each expert per token.
    let f: Vec<f32> = (0..n_expert)
        .map(|expert| routing.rows_of(expert).len() as f32 / n_tok.max(1) as f32)
        .collect();
    let loss = forward(logits.value(), &f);
    let logits_value = logits.value().clone();
    tape.record("balance loss", &[logits], loss, move |dloss| {
        vec![Some(backward(&logits_value, &f, &dloss))]
    })
}

static ROWS: Kernel =
    Kernel::new("balance_rows", include_str!("balance.wgsl"), include_str!("balance.cu"));
static SUM: Kernel = Kernel { entry: "balance_sum", ..ROWS };
static BACKWARD: Kernel = Kernel { entry: "balance_backward", ..ROWS };

/// The list on the device, and the factor of the loss.
fn operands(logits: &Tensor, f: &[f32]) -> (Tensor, f32) {
    let (n_tok, n_expert) = logits.dims2();
    let f = Tensor::from_f32(logits.device(), &[n_expert], f);
    (f, n_expert as f32 / n_tok.max(1) as f32)
}

fn forward(logits: &Tensor, f: &[f32]) -> Tensor {
    let (n_tok, n_expert) = logits.dims2();
    let device = logits.device();
    let cpu = match device {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => {
            // A number for each token, then their sum.
            let ((f, factor), consts) = (operands(logits, f), [("N_EXPERT", n_expert)]);
            let [mut parts, mut loss] = [n_tok, 1].map(|n| Tensor::uninit(device, &[n]));
            let params = [n_tok.into(), factor.into()];
            let work = Work::groups(n_tok, row_threads(n_expert));
            gpu.launch(&ROWS, work, &consts, &mut bind([logits, &f], [&mut parts]), &params);
            let work = Work::groups(1, 256);
            gpu.launch(&SUM, work, &consts, &mut bind([&parts], [&mut loss]), &params);
            return loss;
        }
    };
    let pieces = logits.f32().chunks(rows_per_task(n_expert) * n_expert).collect();
    let partial_sums = cpu.map(pieces, |x: &[f32]| {
        let mut sums = vec![0.0f32; n_expert];
        let mut p = vec![0.0f32; n_expert];
        for x in x.chunks_exact(n_expert) {
            cpu.simd(Softmax { x, y: &mut p });
            sums.iter_mut().zip(&p).for_each(|(sum, p)| *sum += p);
        }
        sums
    });
    let mut sum = 0.0f64;
    for (expert, f) in f.iter().enumerate() {
        let p_sum: f64 = partial_sums.iter().map(|sums| sums[expert] as f64).sum();
        sum += *f as f64 * p_sum;
    }
    let loss = sum * n_expert as f64 / n_tok.max(1) as f64;
    Tensor::from_f32(device, &[1], &[loss as f32])
}

/// Inverts `forward`.
fn backward(logits: &Tensor, f: &[f32], dloss: &Tensor) -> Tensor {
    let (n_tok, n_expert) = logits.dims2();
    let mut dlogits = Tensor::uninit_as(logits, logits.shape());
    match logits.device() {
        Device::Cpu(cpu) => {
            let scale = dloss.f32()[0] * n_expert as f32 / n_tok.max(1) as f32;
            let len = rows_per_task(n_expert) * n_expert;
            cpu.each_piece(dlogits.f32_mut(), len, |idx, dlogits| {
                let rows = logits.f32()[idx * len..].chunks_exact(n_expert);
                for (x, dx) in rows.zip(dlogits.chunks_exact_mut(n_expert)) {
                    cpu.simd(SoftmaxBackward { x, g: f, scale, dx });
                }
            });
        }
        Device::Gpu(gpu) => {
            let (f, factor) = operands(logits, f);
            let mut args = bind([logits, &f, dloss], [&mut dlogits]);
            let params = [n_tok.into(), factor.into()];
            let work = Work::groups(n_tok, row_threads(n_expert));
            gpu.launch(&BACKWARD, work, &[("N_EXPERT", n_expert)], &mut args, &params);
        }
    }
    dlogits
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};
    use crate::ops::router::{Router, Score, route};
    use crate::tape::Gradients;

    fn router(n_used: usize) -> Router {
        let (score, normalise, scale) = (Score::Softmax, false, 1.0);
        Router { n_used, score, normalise, scale, n_group: 1, n_group_used: 1 }
    }

    #[test]
    fn gradients() {
        for (n_tok, n_expert, n_used) in [(1, 1, 1), (3, 5, 2), (9, 37, 3), (3, 300, 4)] {
            // The choice is made from other logits: f stays constant while these move.
            let choosing = Input::normal(2, &[n_tok, n_expert], 1.0);
            check_gradients(&[Input::normal(1, &[n_tok, n_expert], 2.0)], |tape, v| {
                let choosing = Var::constant(choosing.tensor(v[0].value().device()));
                let routing = route(&Tape::off(), &choosing, &router(n_used), None);
                vec![balance_loss(tape, &v[0], &routing)]
            });
        }
    }

    /// Differences of a loss over many tokens drown in its rounding: f64 is the judge.
    #[test]
    fn many_tokens_agree_with_f64_on_any_number_of_threads() {
        let (n_tok, n_expert) = (301, 64);
        let run = |n_threads| {
            let device = Device::cpu(n_threads).unwrap();
            let logits = Input::normal(1, &[n_tok, n_expert], 2.0).tensor(&device);
            let tape = Tape::new();
            let logits_var = tape.leaf(0, &logits);
            let routing = route(&tape, &logits_var, &router(8), None);
            let loss = balance_loss(&tape, &logits_var, &routing);
            let mut grads = Gradients::default();
            tape.backward(&loss, 3.0, &mut grads);
            (logits, routing, loss.value().f32()[0], grads.get(0).unwrap().f32().to_vec())
        };
        let (logits, routing, loss, grad) = run(1);
        let again = run(3);
        assert!((loss, &grad) == (again.2, &again.3), "bits differ on 3 threads");
        let mut f = vec![0.0; n_expert];
        routing.experts.iter().for_each(|&e| f[e as usize] += 1.0 / n_tok as f64);
        let factor = n_expert as f64 / n_tok as f64;
        let mut want = 0.0;
        for tok in 0..n_tok {
            let row = tok * n_expert..(tok + 1) * n_expert;
            let e: Vec<f64> = logits.f32()[row.clone()].iter().map(|l| (*l as f64).exp()).collect();
            let sum: f64 = e.iter().sum();
            let mean: f64 = e.iter().zip(&f).map(|(e, f)| e / sum * f).sum();
            want += factor * mean;
            for ((got, e), f) in grad[row].iter().zip(&e).zip(&f) {
                let want = 3.0 * factor * e / sum * (f - mean);
                assert!((*got as f64 - want).abs() < 5e-8, "{got} {want}");
            }
        }
        assert!((loss as f64 - want).abs() < 2e-6, "{loss} {want}");
    }

    #[test]
    fn the_loss_is_that_of_transformers() {
        let device = Device::cpu(1).unwrap();
        let l: Vec<f32> = (0..24).map(|i| ((i * 37 + 11) % 64) as f32 / 8.0 - 4.0).collect();
        let logits = Var::constant(Tensor::from_f32(&device, &[3, 8], &l));
        let routing = route(&Tape::off(), &logits, &router(3), None);
        let loss = balance_loss(&Tape::off(), &logits, &routing).value().f32()[0];
        assert!((loss - 3.826_808_5).abs() < 1e-6, "{loss}");
    }

    #[test]
    fn even_probabilities_give_the_number_of_choices() {
        let device = Device::cpu(2).unwrap();
        let logits = Var::constant(Tensor::zeros(&device, &[1000, 16]));
        let routing = route(&Tape::off(), &logits, &router(4), None);
        let loss = balance_loss(&Tape::off(), &logits, &routing).value().f32()[0];
        assert!((loss - 4.0).abs() < 1e-6, "{loss}");
    }
}
