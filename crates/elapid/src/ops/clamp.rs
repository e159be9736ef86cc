//! Clamp: `y = min(max(x, -limit), limit)`, as OLMoE does with queries, keys and values.
//!
//! Backward: `dx = dy` where `-limit <= x <= limit`, else 0. Kept: x.

use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Kernel, Work, bind};

const PIECE: usize = 1 << 15;

/// `x` between minus and plus `limit`.
pub fn clamp(tape: &Tape, x: &Var, limit: f32) -> Var {
    let y = forward(x.value(), limit);
    let x_value = x.value().clone();
    tape.record("clamp", &[x], y, move |dy| vec![Some(backward(&x_value, &dy, limit))])
}

fn forward(x: &Tensor, limit: f32) -> Tensor {
    each(&FORWARD, [x], limit, |x, _| x.clamp(-limit, limit))
}

/// Inverts `forward`.
fn backward(x: &Tensor, dy: &Tensor, limit: f32) -> Tensor {
    each(&BACKWARD, [x, dy], limit, |x, dy| if x.abs() <= limit { dy } else { 0.0 })
}

static FORWARD: Kernel =
    Kernel::new("clamp_forward", include_str!("clamp.wgsl"), include_str!("clamp.cu"));
static BACKWARD: Kernel = Kernel { entry: "clamp_backward", ..FORWARD };

/// By the kernel on a GPU; on the CPU `f` of the numbers of the first and the last input.
fn each<const N: usize>(
    kernel: &'static Kernel,
    ins: [&Tensor; N],
    limit: f32,
    f: impl Fn(f32, f32) -> f32 + Send + Sync,
) -> Tensor {
    let (a, b, n) = (ins[0], ins[N - 1], ins[0].n_elem());
    let mut y = Tensor::uninit_as(a, a.shape());
    match a.device() {
        Device::Cpu(cpu) => cpu.each_piece(y.f32_mut(), PIECE, |idx, y| {
            let (a, b) = (&a.f32()[idx * PIECE..], &b.f32()[idx * PIECE..]);
            for ((y, &a), &b) in y.iter_mut().zip(a).zip(b) {
                *y = f(a, b);
            }
        }),
        Device::Gpu(gpu) => {
            let params = [n.into(), limit.into()];
            gpu.launch(kernel, Work::each(n), &[], &mut bind(ins, [&mut y]), &params);
        }
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients, devices};

    #[test]
    fn gradients() {
        // Away from the edges at 0.8, which finite differences would straddle.
        let away = |x: f32| if (x.abs() - 0.8).abs() < 0.1 { x * 1.5 } else { x };
        for n in [9, 700] {
            let inputs = [Input::map(1, &[5, n], away)];
            check_gradients(&inputs, |tape, v| vec![clamp(tape, &v[0], 0.8)]);
        }
    }

    /// Numbers from 1e-6 to 1e6 in size.
    #[test]
    fn numbers_of_any_size_are_the_same_on_every_device() {
        let wide = |x: f32| 10f32.powf((3.0 * x).clamp(-6.0, 6.0)).copysign((x * 1e3).sin());
        let (x, dy) = (Input::map(1, &[900], wide), Input::map(2, &[900], wide));
        for limit in [1e-3, 1.0, 1e5] {
            let run = |device: &Device| {
                let [x, dy] = [&x, &dy].map(|input| input.tensor(device));
                [forward(&x, limit).to_vec(), backward(&x, &dy, limit).to_vec()]
            };
            let want = run(&Device::cpu(1).unwrap());
            for (device, _) in devices() {
                assert!(run(device) == want, "{device:?}");
            }
        }
    }
}
