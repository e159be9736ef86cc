//! The gate at the end of a Mamba-3 block whose heads have several outputs, and their sum.
//!
//! For each token, head h and channel of it, with `silu(x) = x s`, `s = 1 / (1 + e^-x)`:
//!
//! ```text
//! g[r] = z of_gate[h,r],    o = w sum over ranks r of of_out[h,r] y[h,r] silu(g[r])
//! ```
//!
//! Backward, with `silu'(g) = s (1 + g (1 - s))` and `u[r] = y[r] silu(g[r]) do`:
//!
//! ```text
//! dy[r] = w of_out[r] silu(g[r]) do         dof_out[r]  = sum over tokens of w u[r]
//! dg[r] = w of_out[r] y[r] silu'(g[r]) do   dof_gate[r] = sum over tokens of dg[r] z
//! dz    = sum_r dg[r] of_gate[r]            dw          = sum over tokens, r of of_out[r] u[r]
//! ```
//!
//! | name                | shape                         |                                |
//! |---------------------|-------------------------------|--------------------------------|
//! | `y`                 | (n_tok, n_head rank d_head)   | what the state space gave      |
//! | `z`                 | (n_tok, n_head d_head)        | the gate before the activation |
//! | `of_gate`, `of_out` | (n_head, rank, d_head)        |                                |
//! | `w`                 | (n_head d_head)               | of a norm of y; 1 where absent |
//! | `o`                 | (n_tok, n_head d_head)        |                                |
//!
//! The inputs are kept. Not here: the norm itself; a rank of one without `of_gate` and `of_out`,
//! which is `gated` or `gated_norm`.

use super::norm::sum_rows;
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::cpu::F32s;
use crate::tensor::device::Device;
use crate::tensor::gpu::{Const, Kernel, Work, bind};
use pulp::{Simd, WithSimd};

/// What the op reads; shapes in the module's header.
pub struct RankGate<'a> {
    pub y: &'a Var,
    pub z: &'a Var,
    pub of_gate: &'a Var,
    pub of_out: &'a Var,
    pub w: Option<&'a Var>,
    pub n_head: usize,
    pub rank: usize,
}

/// Tokens of a task: the partial sums then take 1/32 of the bytes of `y`.
const ROWS: usize = 32;

pub fn rank_gate(tape: &Tape, op: &RankGate) -> Var {
    let mut vars = vec![op.y, op.z, op.of_gate, op.of_out];
    vars.extend(op.w);
    let value = |var: &Var| var.value().clone();
    let inputs = Inputs {
        y: value(op.y),
        z: value(op.z),
        of_gate: value(op.of_gate),
        of_out: value(op.of_out),
        w: op.w.map(value),
        rank: op.rank,
        d_head: op.z.value().dims2().1 / op.n_head.max(1),
    };
    let (n_tok, d_inner) = inputs.z.dims2();
    let shape = [op.n_head, op.rank, inputs.d_head];
    inputs.y.expect_shape("rank gate: y", &[n_tok, shape.iter().product()]);
    inputs.of_gate.expect_shape("rank gate: of_gate", &shape);
    inputs.of_out.expect_shape("rank gate: of_out", &shape);
    inputs.w.iter().for_each(|w| w.expect_shape("rank gate: w", &[d_inner]));
    let wants = [vars[2].needs_grad(), vars[3].needs_grad() || op.w.is_some_and(Var::needs_grad)];
    tape.record("rank gate", &vars, forward(&inputs), move |dout| backward(&inputs, &dout, wants))
}

struct Inputs {
    y: Tensor,
    z: Tensor,
    of_gate: Tensor,
    of_out: Tensor,
    w: Option<Tensor>,
    rank: usize,
    d_head: usize,
}

impl Inputs {
    /// The tensors as kernels bind them; `of_out` stands in for a weight that is not there.
    fn args(&self) -> [&Tensor; 5] {
        let w = self.w.as_ref().unwrap_or(&self.of_out);
        [&self.y, &self.z, &self.of_gate, &self.of_out, w]
    }

    fn consts(&self) -> [Const; 5] {
        let d = self.z.dims2().1;
        let weighted = usize::from(self.w.is_some());
        let (rank, d_head) = (self.rank, self.d_head);
        [("D", d), ("D_HEAD", d_head), ("RANK", rank), ("WEIGHTED", weighted), ("N_ROWS", ROWS)]
    }

    /// The parameters of one head: `of_gate`, `of_out`, `w`, which is empty where it is absent.
    fn head(&self, head: usize) -> [&[f32]; 3] {
        let (d, n) = (self.d_head, self.rank * self.d_head);
        let w = self.w.as_ref().map_or(&[][..], |w| &w.f32()[head * d..][..d]);
        let [of_gate, of_out] = [&self.of_gate, &self.of_out].map(|x| &x.f32()[head * n..][..n]);
        [of_gate, of_out, w]
    }
}

static FORWARD: Kernel =
    Kernel::new("rank_gate_forward", include_str!("rank_gate.wgsl"), include_str!("rank_gate.cu"));
static BACKWARD: Kernel = Kernel { entry: "rank_gate_backward", ..FORWARD };
static OF_GATE: Kernel = Kernel { entry: "rank_gate_of_gate", ..FORWARD };
static OF_OUT: Kernel = Kernel { entry: "rank_gate_of_out", ..FORWARD };

fn forward(inputs: &Inputs) -> Tensor {
    let Inputs { y, z, d_head, rank, .. } = inputs;
    let (n, d) = (z.n_elem(), z.dims2().1);
    let mut out = Tensor::activation(z.device(), z.shape());
    match z.device() {
        Device::Cpu(cpu) => cpu.each_piece(out.f32_mut(), ROWS * d, |task, out| {
            for (idx, out) in out.chunks_mut(*d_head).enumerate() {
                let at = task * ROWS * d / d_head + idx;
                let z = &z.f32()[at * d_head..][..*d_head];
                let y = &y.f32()[at * d_head * rank..][..d_head * rank];
                cpu.simd(Forward { y, z, head: inputs.head(at % (d / d_head)), out });
            }
        }),
        Device::Gpu(gpu) => {
            let mut args = bind(inputs.args(), [&mut out]);
            gpu.launch(&FORWARD, Work::each(n), &inputs.consts(), &mut args, &[n.into()]);
        }
    }
    out
}

/// Inverts `forward`. `wants`: the gradient of `of_gate`, and that of `of_out` or `w`.
fn backward(inputs: &Inputs, dout: &Tensor, wants: [bool; 2]) -> Vec<Option<Tensor>> {
    let Inputs { y, z, of_gate, of_out, w, d_head, rank } = inputs;
    let (n, (n_tok, d)) = (z.n_elem(), z.dims2());
    let (n_parts, n_ranks) = (n_tok.div_ceil(ROWS), d * rank);
    let device = z.device();
    let (mut dy, mut dz) = (Tensor::uninit_as(y, y.shape()), Tensor::uninit_as(z, z.shape()));
    // The sums over the tokens of each task: of `of_gate`, of `of_out`, of `w`.
    let mut parts = [n_ranks, n_ranks, d].map(|d| Tensor::uninit(device, &[n_parts, d]));
    match device {
        Device::Cpu(cpu) => {
            let [gates, outs, ws] = &mut parts;
            let tasks = dy.f32_mut().chunks_mut(ROWS * n_ranks);
            let tasks = tasks.zip(dz.f32_mut().chunks_mut(ROWS * d));
            let sums = gates.f32_mut().chunks_mut(n_ranks).zip(outs.f32_mut().chunks_mut(n_ranks));
            let sums = sums.zip(ws.f32_mut().chunks_mut(d));
            cpu.map(tasks.zip(sums).enumerate().collect(), |(task, ((dy, dz), sums))| {
                let ((dgate, dof_out), dw) = sums;
                [&mut *dgate, dof_out, dw].into_iter().for_each(|sum| sum.fill(0.0));
                let rows = dy.chunks_mut(d_head * rank).zip(dz.chunks_mut(*d_head));
                for (idx, (dy, dz)) in rows.enumerate() {
                    let at = task * ROWS * d / d_head + idx;
                    let head = at % (d / d_head);
                    let of_head = head * d_head * rank;
                    cpu.simd(Backward {
                        y: &y.f32()[at * d_head * rank..][..d_head * rank],
                        z: &z.f32()[at * d_head..][..*d_head],
                        dout: &dout.f32()[at * d_head..][..*d_head],
                        head: inputs.head(head),
                        dy,
                        dz,
                        dgate: &mut dgate[of_head..][..d_head * rank],
                        dof_out: &mut dof_out[of_head..][..d_head * rank],
                        dw: &mut dw[head * d_head..][..*d_head],
                    });
                }
            });
        }
        Device::Gpu(gpu) => {
            let (consts, [y, z, of_gate, of_out, w]) = (inputs.consts(), inputs.args());
            let mut args = bind([y, z, of_gate, of_out, w, dout], [&mut dy, &mut dz]);
            gpu.launch(&BACKWARD, Work::each(n), &consts, &mut args, &[n.into()]);
            let work = Work::grid([d.div_ceil(256), n_parts, 1], 256);
            let [gates, outs, ws] = &mut parts;
            if wants[0] {
                let mut args = bind([y, z, of_gate, of_out, w, dout], [gates]);
                gpu.launch(&OF_GATE, work, &consts, &mut args, &[n_tok.into()]);
            }
            if wants[1] {
                let mut args = bind([y, z, of_gate, of_out, w, dout], [outs, ws]);
                gpu.launch(&OF_OUT, work, &consts, &mut args, &[n_tok.into()]);
            }
        }
    }
    let [gates, outs, ws] = &parts;
    let dof_gate = wants[0].then(|| sum_rows(gates).reshape(of_gate.shape()));
    let dof_out = wants[1].then(|| sum_rows(outs).reshape(of_out.shape()));
    let mut list = vec![Some(dy), Some(dz), dof_gate, dof_out];
    if w.is_some() {
        list.push(wants[1].then(|| sum_rows(ws)));
    }
    list
}

/// A head of a token.
struct Forward<'a> {
    y: &'a [f32],
    z: &'a [f32],
    head: [&'a [f32]; 3],
    out: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { y, z, head: [of_gate, of_out, w], out } = self;
        let d_head = z.len();
        for at in (0..d_head).step_by(F32s::<S>::LANES) {
            let z = F32s::load(simd, &z[at..]);
            let mut sum = F32s::zero(simd);
            for first in (0..y.len()).step_by(d_head) {
                let rank = first + at..first + d_head;
                let g = z * F32s::load(simd, &of_gate[rank.clone()]);
                let of_out = F32s::load(simd, &of_out[rank.clone()]);
                sum = (of_out * F32s::load(simd, &y[rank])).mul_add(g * g.sigmoid(), sum);
            }
            let w = if w.is_empty() { F32s::splat(simd, 1.0) } else { F32s::load(simd, &w[at..]) };
            (w * sum).store(&mut out[at..]);
        }
    }
}

/// The same head of the gradients; parameters add to their sums.
struct Backward<'a> {
    y: &'a [f32],
    z: &'a [f32],
    dout: &'a [f32],
    head: [&'a [f32]; 3],
    dy: &'a mut [f32],
    dz: &'a mut [f32],
    dgate: &'a mut [f32],
    dof_out: &'a mut [f32],
    dw: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Backward { y, z, dout, head: [of_gate, of_out, w], dy, dz, dgate, dof_out, dw } = self;
        let d_head = z.len();
        let one = F32s::splat(simd, 1.0);
        for at in (0..d_head).step_by(F32s::<S>::LANES) {
            let (z, dout) = (F32s::load(simd, &z[at..]), F32s::load(simd, &dout[at..]));
            let w = if w.is_empty() { one } else { F32s::load(simd, &w[at..]) };
            let mut dz_sum = F32s::zero(simd);
            let mut dw_sum = F32s::load(simd, &dw[at..]);
            for first in (0..y.len()).step_by(d_head) {
                let rank = first + at..first + d_head;
                let y = F32s::load(simd, &y[rank.clone()]);
                let of_gate = F32s::load(simd, &of_gate[rank.clone()]);
                let of_out = F32s::load(simd, &of_out[rank.clone()]);
                let g = z * of_gate;
                let s = g.sigmoid();
                let (silu, slope) = (g * s, s * g.mul_add(one - s, one));
                let pull = w * of_out * dout;
                let dg = pull * y * slope;
                let u = y * silu * dout;
                (pull * silu).store(&mut dy[rank.clone()]);
                dz_sum = dg.mul_add(of_gate, dz_sum);
                dw_sum = u.mul_add(of_out, dw_sum);
                let dgate = &mut dgate[rank.clone()];
                dg.mul_add(z, F32s::load(simd, dgate)).store(dgate);
                let dof_out = &mut dof_out[rank];
                u.mul_add(w, F32s::load(simd, dof_out)).store(dof_out);
            }
            dz_sum.store(&mut dz[at..]);
            dw_sum.store(&mut dw[at..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::check::{Input, check_gradients};
    use crate::tape::Gradients;

    fn random(n_tok: usize, [n_head, rank, d_head]: [usize; 3]) -> [Input; 5] {
        [
            Input::normal(1, &[n_tok, n_head * rank * d_head], 1.0),
            Input::normal(2, &[n_tok, n_head * d_head], 1.0),
            Input::map(3, &[n_head, rank, d_head], |x| 1.0 + 0.5 * x),
            Input::map(4, &[n_head, rank, d_head], |x| 0.5 + 0.5 * x),
            Input::map(5, &[n_head * d_head], |x| 1.0 + 0.3 * x),
        ]
    }

    fn op<'a>(vars: &'a [Var], [n_head, rank, _]: [usize; 3]) -> RankGate<'a> {
        let [y, z, of_gate, of_out] = [0, 1, 2, 3].map(|idx| &vars[idx]);
        RankGate { y, z, of_gate, of_out, w: vars.get(4), n_head, rank }
    }

    #[test]
    fn gradients() {
        for (n_tok, dims) in
            [(1, [1, 1, 1]), (3, [2, 4, 5]), (70, [2, 2, 3]), (2, [3, 2, 40]), (33, [1, 3, 16])]
        {
            let inputs = random(n_tok, dims);
            for n_inputs in [4, 5] {
                check_gradients(&inputs[..n_inputs], |tape, v| vec![rank_gate(tape, &op(v, dims))]);
            }
        }
    }

    #[test]
    fn it_is_the_sum_over_ranks_of_gated_outputs() {
        let dims @ [n_head, rank, d_head] = [2, 3, 4];
        let device = Device::cpu(1).unwrap();
        let inputs = random(5, dims).map(|input| input.tensor(&device));
        let tape = Tape::off();
        let vars = [0, 1, 2, 3, 4].map(|key| tape.leaf(key, &inputs[key]));
        let got = rank_gate(&tape, &op(&vars, dims)).value().to_vec();
        let [y, z, of_gate, of_out, w] = inputs.each_ref().map(|x| x.f32());
        let mut want = Vec::new();
        for at in 0..5 * n_head * d_head {
            let (head, ch) = (at / d_head % n_head, at % d_head);
            let mut sum = 0.0;
            for r in 0..rank {
                let param = (head * rank + r) * d_head + ch;
                let g = (z[at] * of_gate[param]) as f64;
                let y = y[(at / d_head * rank + r) * d_head + ch] as f64;
                sum += of_out[param] as f64 * y * g / (1.0 + (-g).exp());
            }
            want.push(sum * w[head * d_head + ch] as f64);
        }
        let close = |(got, want): (&f32, &f64)| (*got as f64 - want).abs() < 1e-5;
        assert!(got.iter().zip(&want).all(close), "{got:?} {want:?}");
    }

    #[test]
    fn numbers_of_any_size_are_the_same_on_every_device() {
        let dims = [2, 3, 20];
        let run = |device: &Device, inputs: &[Input; 5]| {
            let tape = Tape::new();
            let vars = [0, 1, 2, 3, 4].map(|key| tape.leaf(key, &inputs[key].tensor(device)));
            let out = rank_gate(&tape, &op(&vars, dims));
            let mut all = vec![out.value().to_vec()];
            let mut grads = Gradients::default();
            tape.walk(vec![(out, inputs[1].tensor(device))], &mut grads);
            (0..5).for_each(|key| all.push(grads.get(key).unwrap().to_vec()));
            all
        };
        let cpu = Device::cpu(1).unwrap();
        for (y_size, z_size) in [(1e-6, 1.0), (1.0, 60.0), (1e6, 1.0)] {
            let mut inputs = random(37, dims);
            inputs[0] = Input::normal(1, &[37, 120], y_size);
            inputs[1] = Input::normal(2, &[37, 40], z_size);
            let want = run(&cpu, &inputs);
            for (device, tolerance) in crate::ops::check::devices() {
                for (want, got) in want.iter().zip(run(device, &inputs)) {
                    let what = format!("{device:?}: {y_size} {z_size}");
                    crate::ops::check::compare_devices(&what, want, &got, *tolerance);
                }
            }
        }
    }
}
