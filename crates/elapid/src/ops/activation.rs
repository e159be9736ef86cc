//! Feed-forward activations: `y = f(gate) * up` and `y = f(x)`, f one of SiLU, GELU, ReLU and tanh.
//!
//! ```text
//! silu(x) = x s,  s = 1 / (1 + e^-x)            silu'(x) = s (1 + x (1 - s))
//! gelu(x) = x/2 (1 + tanh(u)),                  u = sqrt(2/pi) (x + 0.044715 x^3)
//! relu(x) = max(x, 0)                           tanh'(x) = 1 - tanh(x)^2
//! ```
//!
//! Backward of the gated form: `dup = f(gate) dy`, `dgate = f'(gate) up dy`.
//! `y` is not kept: backward recomputes f from its argument, and on a GPU the op that needs `y` in
//! the backward pass computes it again.
//!
//! Not here: the linear maps before and after; GELU by the error function, which no family uses
//! (`gelu_new`, `gelu_pytorch_tanh` are the form above).

use super::{pieces_of, remade};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Const, Kernel, bind};
use pulp::{Simd, WithSimd};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `x sigmoid(x)`, also called swish; gated it is SwiGLU.
    Silu,
    Gelu,
    /// `max(x, 0)`.
    Relu,
    Tanh,
}

const PIECE: usize = 1 << 14;

/// `f(gate) * up`.
pub fn gated(tape: &Tape, kind: Kind, gate: &Var, up: &Var) -> Var {
    up.value().expect_shape("activation: up", gate.value().shape());
    let y = forward(kind, gate.value(), Some(up.value()));
    let (gate_value, up_value) = (gate.value().clone(), up.value().clone());
    let y = tape.record("gated activation", &[gate, up], y, move |dy| {
        let (dgate, dup) = backward(kind, &gate_value, Some(&up_value), &dy);
        vec![Some(dgate), dup]
    });
    let (gate, up) = (gate.value().clone(), up.value().clone());
    remade(y, move || forward(kind, &gate, Some(&up)))
}

/// `f(x)`.
pub fn activation(tape: &Tape, kind: Kind, x: &Var) -> Var {
    let y = forward(kind, x.value(), None);
    let x_value = x.value().clone();
    tape.record("activation", &[x], y, move |dy| vec![Some(backward(kind, &x_value, None, &dy).0)])
}

static FORWARD: Kernel = Kernel::new(
    "activation_forward",
    include_str!("activation.wgsl"),
    include_str!("activation.cu"),
);
static BACKWARD: Kernel = Kernel { entry: "activation_backward", ..FORWARD };

fn consts(kind: Kind, up: Option<&Tensor>) -> [Const; 2] {
    let kind = match kind {
        Kind::Silu => 0,
        Kind::Gelu => 1,
        Kind::Relu => 2,
        Kind::Tanh => 3,
    };
    [("KIND", kind), ("GATED", usize::from(up.is_some()))]
}

fn forward(kind: Kind, gate: &Tensor, up: Option<&Tensor>) -> Tensor {
    let n = gate.n_elem();
    let mut y = Tensor::activation(gate.device(), gate.shape());
    match gate.device() {
        Device::Cpu(cpu) => cpu.each_piece(y.f32_mut(), PIECE, |idx, y| {
            let gate = &gate.f32()[idx * PIECE..][..y.len()];
            let up = up.map(|up| &up.f32()[idx * PIECE..][..gate.len()]);
            cpu.simd(Forward { kind, gate, up, y });
        }),
        Device::Gpu(gpu) => {
            let mut args = bind([gate, up.unwrap_or(gate)], [&mut y]);
            gpu.launch(&FORWARD, gpu.each_eight(n), &consts(kind, up), &mut args, &[n.into()]);
        }
    }
    y
}

/// Inverts `forward`.
fn backward(
    kind: Kind,
    gate: &Tensor,
    up: Option<&Tensor>,
    dy: &Tensor,
) -> (Tensor, Option<Tensor>) {
    let n = gate.n_elem();
    let mut dgate = Tensor::uninit_as(gate, gate.shape());
    let mut dup = up.map(|up| Tensor::uninit_as(up, up.shape()));
    match gate.device() {
        Device::Cpu(cpu) => {
            let tasks = dgate.f32_mut().chunks_mut(PIECE).zip(pieces_of(dup.as_mut(), PIECE));
            cpu.map(tasks.enumerate().collect(), |(idx, (dgate, dup))| {
                let range = idx * PIECE..idx * PIECE + dgate.len();
                let up = up.map(|up| &up.f32()[range.clone()]);
                let (gate, dy) = (&gate.f32()[range.clone()], &dy.f32()[range]);
                cpu.simd(Backward { kind, gate, up, dy, dgate, dup });
            });
        }
        Device::Gpu(gpu) => {
            // A kernel wants something to bind.
            let mut nothing = Tensor::uninit(gate.device(), &[1]);
            let outs = [&mut dgate, dup.as_mut().unwrap_or(&mut nothing)];
            let mut args = bind([gate, up.unwrap_or(gate), dy], outs);
            gpu.launch(&BACKWARD, gpu.each_eight(n), &consts(kind, up), &mut args, &[n.into()]);
        }
    }
    (dgate, dup)
}

/// f and f' at x.
#[inline(always)]
fn value_and_slope<S: Simd>(kind: Kind, x: F32s<S>) -> (F32s<S>, F32s<S>) {
    let one = x.same(1.0);
    match kind {
        Kind::Silu => {
            let s = x.sigmoid();
            (x * s, s * x.mul_add(one - s, one))
        }
        Kind::Gelu => {
            let root = x.same((2.0 / std::f32::consts::PI).sqrt());
            let x2 = x * x;
            let u = root * x * x2.mul_add(x.same(0.044715), one);
            let du = root * x2.mul_add(x.same(3.0 * 0.044715), one);
            let t = u.tanh();
            let half = x.same(0.5);
            let slope = half * (one + t) + half * x * (one - t * t) * du;
            (half * x * (one + t), slope)
        }
        Kind::Relu => {
            let zero = x.same(0.0);
            // In this order a NaN stays one.
            (zero.max(x), zero.select_less(x, one, zero))
        }
        Kind::Tanh => {
            let t = x.tanh();
            (t, one - t * t)
        }
    }
}

struct Forward<'a> {
    kind: Kind,
    gate: &'a [f32],
    up: Option<&'a [f32]>,
    y: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { kind, gate, up, y } = self;
        for at in (0..y.len()).step_by(F32s::<S>::LANES) {
            let (value, _) = value_and_slope(kind, F32s::load(simd, &gate[at..]));
            let value = match up {
                Some(up) => value * F32s::load(simd, &up[at..]),
                None => value,
            };
            value.store(&mut y[at..]);
        }
    }
}

struct Backward<'a> {
    kind: Kind,
    gate: &'a [f32],
    up: Option<&'a [f32]>,
    dy: &'a [f32],
    dgate: &'a mut [f32],
    dup: Option<&'a mut [f32]>,
}

impl WithSimd for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Backward { kind, gate, up, dy, dgate, mut dup } = self;
        for at in (0..dy.len()).step_by(F32s::<S>::LANES) {
            let (value, slope) = value_and_slope(kind, F32s::load(simd, &gate[at..]));
            let dy = F32s::load(simd, &dy[at..]);
            let dvalue = match up {
                Some(up) => dy * F32s::load(simd, &up[at..]),
                None => dy,
            };
            (slope * dvalue).store(&mut dgate[at..]);
            if let Some(dup) = &mut dup {
                (value * dy).store(&mut dup[at..]);
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
        // ReLU away from its kink: finite differences would straddle it.
        let away = |x: f32| x + 0.2f32.copysign(x);
        for kind in [Kind::Silu, Kind::Gelu, Kind::Relu, Kind::Tanh] {
            for shape in [[1, 1], [3, 19], [40, 1000]] {
                let inputs = [Input::map(1, &shape, away), Input::normal(2, &shape, 1.0)];
                check_gradients(&inputs, |tape, v| vec![gated(tape, kind, &v[0], &v[1])]);
                check_gradients(&inputs[..1], |tape, v| vec![activation(tape, kind, &v[0])]);
            }
        }
    }

    #[test]
    fn silu_of_large_numbers_is_finite() {
        let device = Device::cpu(1).unwrap();
        let x = Tensor::from_f32(&device, &[4], &[-1e6, -100.0, 100.0, 1e6]);
        let y = forward(Kind::Silu, &x, None);
        assert_eq!(y.f32()[2..], [100.0, 1e6]);
        assert!(y.f32()[..2].iter().all(|y| y.abs() < 1e-30));
    }
}
