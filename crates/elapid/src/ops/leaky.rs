//! Leaky average: a recurrence with a learnt rate for each channel.
//!
//! For each segment and channel, from the state `start` before its first row:
//!
//! ```text
//! h[t] = a h[t-1] + (1 - a) tanh(x[t]),   a = sigmoid(decay)
//! ```
//!
//! Backward, from the last row to the first:
//!
//! ```text
//! g[t] = dh[t] + a g[t+1]                 dx[t] = g[t] (1 - a) (1 - tanh(x[t])^2)
//! ddecay = sum over t of g[t] (h[t-1] - tanh(x[t])) a (1 - a)
//! dstart = a g[first]
//! ```
//!
//! | name     | shape      |          | name    | shape      |
//! |----------|------------|----------|---------|------------|
//! | `x`, `h` | (n_tok, d) |          | `decay` | (d)        |
//! |          |            |          | `start` | (n_seg, d) |
//!
//! Kept: x and h. A thread of a GPU takes one channel of one segment, so that segments of more rows
//! than `N_ROUNDS_MAX` are not for it. Not here: the linear map that makes x.

use crate::ops::softmax::sigmoid;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Kernel, Work, bind};
use crate::tensor::segment::Segments;

/// Every state of a leaky average of `tanh(x)`.
pub fn leaky(tape: &Tape, x: &Var, decay: &Var, start: &Var, segments: &Segments) -> Var {
    let d = x.value().dims2().1;
    x.value().expect_shape("leaky: x", &[segments.n_tok(), d]);
    decay.value().expect_shape("leaky: decay", &[d]);
    start.value().expect_shape("leaky: start", &[segments.len(), d]);
    let h = forward(x.value(), decay.value(), start.value(), segments);
    let kept = [x, decay, start].map(|var| var.value().clone());
    let (h_kept, segments) = (h.clone(), segments.clone());
    tape.record("leaky", &[x, decay, start], h, move |dh| {
        let [x, decay, start] = &kept;
        backward([x, decay, start, &h_kept, &dh], &segments).map(Some).to_vec()
    })
}

fn forward(x: &Tensor, decay: &Tensor, start: &Tensor, segments: &Segments) -> Tensor {
    let d = x.dims2().1;
    let mut h = Tensor::activation(x.device(), x.shape());
    match x.device() {
        Device::Cpu(_) => {
            let (x, h, start) = (x.f32(), h.f32_mut(), start.f32());
            for (idx, segment) in segments.iter().enumerate() {
                for ch in 0..d {
                    let a = sigmoid(decay.f32()[ch]);
                    let mut state = start[idx * d + ch];
                    for at in segment.rows().map(|tok| tok * d + ch) {
                        state = a * state + (1.0 - a) * x[at].tanh();
                        h[at] = state;
                    }
                }
            }
        }
        Device::Gpu(gpu) => {
            let n = segments.len() * d;
            let begins = begins(x.device(), segments);
            let mut args = bind([x, decay, start, &begins], [&mut h]);
            gpu.launch(&FORWARD, Work::each(n), &[("D", d)], &mut args, &[n.into()]);
        }
    }
    h
}

/// Inverts `forward`: of x, decay, start, h and dh the gradients of the first three.
fn backward([x, decay, start, h, dh]: [&Tensor; 5], segments: &Segments) -> [Tensor; 3] {
    let (device, d) = (x.device(), x.dims2().1);
    let mut dx = Tensor::uninit_as(x, x.shape());
    let mut ddecay = Tensor::uninit(device, &[d]);
    let mut dstart = Tensor::uninit(device, start.shape());
    match device {
        Device::Cpu(_) => {
            let (x, h, dh, start) = (x.f32(), h.f32(), dh.f32(), start.f32());
            let (dx, dstart, ddecay) = (dx.f32_mut(), dstart.f32_mut(), ddecay.f32_mut());
            ddecay.fill(0.0);
            for (idx, segment) in segments.iter().enumerate() {
                for ch in 0..d {
                    let a = sigmoid(decay.f32()[ch]);
                    let (mut g, mut sum) = (0.0, 0.0);
                    for tok in segment.rows().rev() {
                        let at = tok * d + ch;
                        let is_first = tok == segment.start;
                        let before = if is_first { start[idx * d + ch] } else { h[at - d] };
                        let t = x[at].tanh();
                        g = dh[at] + a * g;
                        dx[at] = g * (1.0 - a) * (1.0 - t * t);
                        sum += g * (before - t);
                    }
                    ddecay[ch] += sum * a * (1.0 - a);
                    dstart[idx * d + ch] = a * g;
                }
            }
        }
        Device::Gpu(gpu) => {
            let (n, consts) = (segments.len() * d, [("D", d)]);
            let begins = begins(device, segments);
            // Gradients of the decays by segment, and of the states: eight buffers are promised.
            let mut both = Tensor::uninit(device, &[2 * n]);
            let mut args = bind([x, decay, start, h, dh, &begins], [&mut dx, &mut both]);
            gpu.launch(&BACKWARD, Work::each(n), &consts, &mut args, &[n.into()]);
            dstart = both.rows(n..2 * n).reshape(start.shape()).copied();
            let mut args = bind([&both], [&mut ddecay]);
            gpu.launch(&SUM, Work::each(d), &consts, &mut args, &[segments.len().into()]);
        }
    }
    [dx, ddecay, dstart]
}

/// Where each segment begins, and where the last one ends.
fn begins(device: &Device, segments: &Segments) -> Tensor {
    let begins = segments.iter().map(|segment| segment.start).chain([segments.n_tok()]);
    Tensor::from_u32(device, &begins.map(|at| at as u32).collect::<Vec<_>>())
}

static FORWARD: Kernel =
    Kernel::new("leaky_forward", include_str!("leaky.wgsl"), include_str!("leaky.cu"));
static BACKWARD: Kernel = Kernel { entry: "leaky_backward", ..FORWARD };
static SUM: Kernel = Kernel { entry: "leaky_sum", ..FORWARD };

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};

    #[test]
    fn gradients() {
        for (lengths, d) in [(&[1][..], 1), (&[7], 1), (&[1, 1, 1], 5), (&[4, 9, 1], 37)] {
            let (segments, n_tok) = (Segments::from_lengths(lengths), lengths.iter().sum());
            let inputs = [
                Input::normal(1, &[n_tok, d], 1.0),
                Input::normal(2, &[d], 1.0),
                Input::normal(3, &[lengths.len(), d], 0.5),
            ];
            check_gradients(&inputs, |tape, v| vec![leaky(tape, &v[0], &v[1], &v[2], &segments)]);
        }
    }

    #[test]
    fn a_sequence_in_pieces_is_the_whole() {
        let device = Device::cpu(1).unwrap();
        let [x, decay] = [(1, &[9, 3][..]), (2, &[3])]
            .map(|(seed, shape)| Var::constant(Input::normal(seed, shape, 1.0).tensor(&device)));
        let run = |x: &Var, start: &Tensor| {
            let (start, rows) = (Var::constant(start.clone()), [x.value().shape()[0]]);
            leaky(&Tape::off(), x, &decay, &start, &Segments::from_lengths(&rows))
        };
        let whole = run(&x, &Tensor::zeros(&device, &[1, 3]));
        let mut state = Tensor::zeros(&device, &[1, 3]);
        for tok in 0..9 {
            let row = Var::constant(x.value().rows(tok..tok + 1));
            state = run(&row, &state).value().clone();
            assert_eq!(state.f32(), whole.value().rows(tok..tok + 1).f32());
        }
    }

    #[test]
    fn inputs_and_decays_of_any_size_give_finite_states() {
        let device = Device::cpu(1).unwrap();
        let var =
            |data: &[f32], shape: &[usize]| Var::constant(Tensor::from_f32(&device, shape, data));
        let (x, decay) = (var(&[1e30, -1e30, 1e6], &[1, 3]), var(&[-1e6, 1e6, 0.0], &[3]));
        let (start, one) = (var(&[0.5; 3], &[1, 3]), Segments::from_lengths(&[1]));
        let h = leaky(&Tape::off(), &x, &decay, &start, &one);
        assert_eq!(h.value().f32(), [1.0, 0.5, 0.75]);
    }
}
