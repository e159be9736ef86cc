//! Row gate: `y[t] = sigmoid(gate[t]) x[t]`, how Qwen2-MoE weighs its shared expert.
//!
//! ```text
//! dx[t] = s dy[t]            dgate[t] = s (1 - s) (dy[t] . x[t]),   s = sigmoid(gate[t])
//! ```
//!
//! | name   | shape        |
//! |--------|--------------|
//! | `x`    | (n_tok, d)   |
//! | `gate` | (n_tok, 1)   |

use crate::ops::softmax::{row_threads, sigmoid};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Kernel, Work, bind};

/// Rows one task works on.
const N_ROWS: usize = 32;

/// `sigmoid(gate) * x`, row by row.
pub fn row_gate(tape: &Tape, x: &Var, gate: &Var) -> Var {
    gate.value().expect_shape("row_gate: gate", &[x.value().dims2().0, 1]);
    let y = forward(x.value(), gate.value());
    let (x_value, gate_value) = (x.value().clone(), gate.value().clone());
    tape.record("row gate", &[x, gate], y, move |dy| {
        let dx = forward(&dy, &gate_value);
        vec![Some(dx), Some(backward_gate(&x_value, &gate_value, &dy))]
    })
}

fn forward(x: &Tensor, gate: &Tensor) -> Tensor {
    let (n, (_, d)) = (x.n_elem(), x.dims2());
    let mut y = Tensor::uninit_as(x, x.shape());
    match x.device() {
        Device::Cpu(cpu) => cpu.each_piece(y.f32_mut(), N_ROWS * d, |idx, y| {
            let x = &x.f32()[idx * N_ROWS * d..];
            for (row, (y, x)) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)).enumerate() {
                let s = sigmoid(gate.f32()[idx * N_ROWS + row]);
                y.iter_mut().zip(x).for_each(|(y, x)| *y = s * x);
            }
        }),
        Device::Gpu(gpu) => {
            let mut args = bind([x, gate], [&mut y]);
            gpu.launch(&FORWARD, Work::each(n), &[("D", d)], &mut args, &[n.into()]);
        }
    }
    y
}

/// Inverts `forward` for the gate; for x it is `forward` itself.
fn backward_gate(x: &Tensor, gate: &Tensor, dy: &Tensor) -> Tensor {
    let (n_rows, d) = x.dims2();
    let mut dgate = Tensor::uninit_as(gate, gate.shape());
    match x.device() {
        Device::Cpu(cpu) => cpu.each_piece(dgate.f32_mut(), N_ROWS, |idx, dgate| {
            for (tok, dgate) in (idx * N_ROWS..).zip(dgate) {
                let s = sigmoid(gate.f32()[tok]);
                let (x, dy) = (&x.f32()[tok * d..][..d], &dy.f32()[tok * d..][..d]);
                let dot: f32 = x.iter().zip(dy).map(|(x, dy)| x * dy).sum();
                *dgate = s * (1.0 - s) * dot;
            }
        }),
        Device::Gpu(gpu) => {
            let mut args = bind([x, gate, dy], [&mut dgate]);
            let work = Work::groups(n_rows, row_threads(d));
            gpu.launch(&BACKWARD, work, &[("D", d)], &mut args, &[n_rows.into()]);
        }
    }
    dgate
}

static FORWARD: Kernel =
    Kernel::new("row_gate_forward", include_str!("row_gate.wgsl"), include_str!("row_gate.cu"));
static BACKWARD: Kernel = Kernel { entry: "row_gate_backward", ..FORWARD };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients, compare_devices, devices};

    #[test]
    fn gradients() {
        for (n_tok, d) in [(1, 1), (70, 5), (3, 257)] {
            let inputs = [Input::normal(1, &[n_tok, d], 1.0), Input::normal(2, &[n_tok, 1], 1.0)];
            check_gradients(&inputs, |tape, v| vec![row_gate(tape, &v[0], &v[1])]);
        }
    }

    /// Numbers from 1e-6 to 1e6 in size.
    #[test]
    fn numbers_of_any_size_are_the_same_on_every_device() {
        let wide = |x: f32| 10f32.powf((3.0 * x).clamp(-6.0, 6.0)).copysign((x * 1e3).sin());
        let (x, dy) = (Input::map(1, &[9, 70], wide), Input::map(2, &[9, 70], wide));
        let gate = Input::map(3, &[9, 1], |x| 20.0 * x);
        let run = |device: &Device| {
            let [x, dy, gate] = [&x, &dy, &gate].map(|input| input.tensor(device));
            [forward(&x, &gate).to_vec(), backward_gate(&x, &gate, &dy).to_vec()]
        };
        let want = run(&Device::cpu(1).unwrap());
        for (device, tolerance) in devices() {
            for (want, got) in want.iter().zip(run(device)) {
                compare_devices(&format!("{device:?}"), want, &got, *tolerance);
            }
        }
    }
}
