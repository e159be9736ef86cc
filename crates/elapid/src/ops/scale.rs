//! Multiplication by constants: `y = factor * x`, one factor for all columns or one for each run of
//! columns, as Granite and Falcon-H1 do all over.
//!
//! Backward: `dx = factor * dy`.

use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Kernel, Work, bind};

/// Rows one task works on.
const N_ROWS: usize = 64;

/// `factor * x`; a factor of one is free.
pub fn scale(tape: &Tape, x: &Var, factor: f32) -> Var {
    scale_columns(tape, x, &[(x.value().dims2().1, factor)])
}

/// Runs of columns as (width, factor), each multiplied by its factor; all ones are free.
pub fn scale_columns(tape: &Tape, x: &Var, runs: &[(usize, f32)]) -> Var {
    if runs.iter().all(|run| run.1 == 1.0) {
        return x.clone();
    }
    let factors: Vec<f32> =
        runs.iter().flat_map(|&(width, factor)| std::iter::repeat_n(factor, width)).collect();
    let y = scaled(x.value(), &factors);
    tape.record("scale", &[x], y, move |dy| vec![Some(scaled(&dy, &factors))])
}

/// `factor * x`, without a record.
pub(crate) fn scaled_by(x: &Tensor, factor: f32) -> Tensor {
    scaled(x, &vec![factor; x.dims2().1])
}

fn scaled(x: &Tensor, factors: &[f32]) -> Tensor {
    let (n, (_, d)) = (x.n_elem(), x.dims2());
    assert_eq!(d, factors.len(), "scale: columns");
    let mut y = Tensor::uninit_as(x, x.shape());
    match x.device() {
        Device::Cpu(cpu) => cpu.each_piece(y.f32_mut(), N_ROWS * d, |idx, y| {
            let x = &x.f32()[idx * N_ROWS * d..];
            for (y, x) in y.chunks_exact_mut(d).zip(x.chunks_exact(d)) {
                for ((y, x), factor) in y.iter_mut().zip(x).zip(factors) {
                    *y = factor * x;
                }
            }
        }),
        Device::Gpu(gpu) => {
            let factors = Tensor::from_f32(x.device(), &[d], factors);
            let mut args = bind([x, &factors], [&mut y]);
            gpu.launch(&SCALE, Work::each(n), &[("D", d)], &mut args, &[n.into()]);
        }
    }
    y
}

static SCALE: Kernel =
    Kernel::new("scale_columns", include_str!("scale.wgsl"), include_str!("scale.cu"));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};

    #[test]
    fn gradients() {
        let inputs = [Input::normal(1, &[70, 7], 1.0)];
        check_gradients(&inputs, |tape, v| vec![scale(tape, &v[0], -1.7)]);
        check_gradients(&inputs, |tape, v| {
            vec![scale_columns(tape, &v[0], &[(2, 0.5), (4, 1.0), (1, -3.0)])]
        });
    }
}
