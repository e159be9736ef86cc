//! The recurrence of a Mamba-3 block: a state space with angles, a second-order rule of
//! integration and, with a rank above one, several inputs and outputs for each head (MIMO).
//!
//! For each token, head h of group g and rank r, with a state `h` of (d_state, d_head) numbers:
//!
//! ```text
//! delta = softplus(raw_delta + delta_bias),  a = -max(f(raw_a), a_floor),  lam = sigmoid(raw_trap)
//! theta[t] = theta[t-1] + pi tanh(raw_angle) delta            one for each pair that is turned
//! k[r] = turn(b_norm b[r,g] / rms(b[r,g]) + b_bias[r], theta),     q[r] the same of c
//! v[r] = x mimo_x[r]                                               or x, where the rank is 1
//! gamma = lam delta,   w = (1 - lam) delta
//! h[t] = exp(a delta) (h[t-1] + w sum_r k[t-1,r] v[t-1,r]^T) + gamma sum_r k[r] v[r]^T
//! y[r] = h[t]^T q[r] + skip v[r]
//! ```
//!
//! `f(x)` is `1 + x` above zero and `1 / (1 - x)` below, or softplus. `turn` takes the pair (a, b)
//! to `(a cos - b sin, a sin + b cos)`; pairs are neighbours, or `d_state / 2` apart.
//!
//! | name               | shape                                     |                            |
//! |--------------------|-------------------------------------------|----------------------------|
//! | `xbc`              | (n_tok, d_inner + 2 rank n_group d_state) | columns x, b, c; of b and  |
//! |                    |                                           | c rank, then group         |
//! | `raw`              | (n_tok, 3 n_head + n_angle)               | delta, a, trap, angle      |
//! | `delta_bias`       | (n_head)                                  |                            |
//! | `b_norm`, `c_norm` | (d_state)                                 |                            |
//! | `b_bias`, `c_bias` | (n_head, rank, d_state)                   |                            |
//! | `mimo_x`           | (n_head, rank, d_head)                    | where the rank is above 1  |
//! | `skip`             | (n_head)                                  |                            |
//! | `y`                | (n_tok, n_head rank d_head)               | d_inner = n_head d_head    |
//! | state `angle`      | (n_head, n_angle)                         | radians, modulo 2 pi       |
//! | state `h`          | (n_head, d_state, d_head)                 | of one segment, as are all |
//! | state `k`          | (rank, n_head, d_state)                   | of its last token, turned  |
//! | state `v`          | (n_head, d_head)                          | its x                      |
//!
//! # One weight for each token
//!
//! With `s[t] = gamma[t] + w[t+1]`, where w behind the last token of a segment is zero, what the
//! next token will see of the state is `S[t] = exp(a delta) S[t-1] + s[t] sum_r k v^T`: the state
//! of Mamba-2 with log decay `a delta` and input weight s. A token reads the decayed old state and
//! itself, with gamma instead of s. So the products in chunks are those of `ssd` (`ssd/chunk.rs`),
//! with `input` s, `own` gamma and `rank` rows for a token: b is k, c is q, x is v. A given state
//! starts with `w[0] sum_r k v^T` of the token before added; s of the last token is gamma, which
//! leaves h itself. Gamma on the diagonal of `mix`, never s less w, keeps a token from depending on
//! the next one by rounding.
//!
//! Scores are per head. k and q of all heads are `2 rank n_head d_state` numbers a token: on the
//! CPU they are made inside the chunk, from rows that are normed once for all heads of a group.
//!
//! With N = d_state, P = d_head and chunks of C rows, a row of a head takes `2 C (N + P) + 4 N P`
//! flops forward and `2 C (3 N + 2 P) + 10 N P` backward; in Mamba-2, where heads share scores, all
//! terms with C N are spread over the heads of a group.
//!
//! Angles are summed in turns of 2 pi, where reducing them after every token is exact.
//!
//! # Backward
//!
//! `ssd/chunk.rs` gives gradients by k, q, v, s, gamma and the log decay `g`. Then, with `dth` the
//! gradient by a token's angle and Th the sum of it over this token and later ones:
//!
//! ```text
//! dgamma += ds,    dw[t] = ds[t-1], of the first token w_0: dh . sum_r k v^T of the token before
//! draw_trap  = delta (dgamma - dw) lam (1 - lam)
//! draw_a     = delta dg da/draw_a                                  0 at the floor
//! dth        = sum over r, of k and q, of (db a - da b)            (a, b) turned, (da, db) by it
//! draw_angle = pi (1 - tanh^2) sum over heads of delta Th
//! ddelta     = lam dgamma + (1 - lam) dw + a dg + pi sum over angles of tanh Th
//! draw_delta = ddelta sigmoid(raw_delta + delta_bias)
//! ```
//!
//! Gradients by k and q, turned back, are summed over tokens for the biases and over the heads of a
//! group for the norm, whose backward gives b and c.
//!
//! Only the inputs are kept. Not here: the gate, the norm and `mimo_o` after, gradients by a state.

mod backward;
mod forward;
mod gpu;
mod kernels;
#[cfg(test)]
mod tests;
mod tile;

use super::{columns, own, split};
use crate::tape::{Tape, Var};
use crate::tensor::Tensor;
use crate::tensor::cpu::Cpu;
use crate::tensor::device::Device;
use crate::tensor::segment::Segments;

use backward::backward;
use forward::forward;

/// Sizes of a Mamba-3 block, and which of its variants it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba3Dims {
    pub n_head: usize,
    /// Width of a head.
    pub d_head: usize,
    /// Groups of heads that share b and c.
    pub n_group: usize,
    /// Rows of a head's state; even.
    pub d_state: usize,
    /// Inputs and outputs of a head.
    pub rank: usize,
    /// Pairs of a row of b or c that are turned.
    pub n_angle: usize,
    /// Pairs (s, s + d_state / 2) instead of (2s, 2s + 1).
    pub halves: bool,
    /// Least decay rate.
    pub a_floor: f32,
    /// f is softplus instead of the heavy tail.
    pub softplus_a: bool,
    /// Of the norms of b and c.
    pub eps: f32,
}

/// What the op reads; shapes in the module's header.
pub struct Mamba3<'a> {
    /// x, b and c side by side.
    pub xbc: &'a Var,
    /// Step sizes, decay rates, weights of the rule and angles, as they are projected.
    pub raw: &'a Var,
    pub delta_bias: &'a Var,
    pub b_norm: &'a Var,
    pub c_norm: &'a Var,
    pub b_bias: &'a Var,
    pub c_bias: &'a Var,
    /// x of each rank; without it the rank is 1.
    pub mimo_x: Option<&'a Var>,
    /// Input passed around the state.
    pub skip: &'a Var,
    pub dims: Mamba3Dims,
}

/// Below so many tokens in every segment the recurrence is faster than the products.
const RECURRENT: usize = 8;

/// Runs the state space over every segment.
///
/// `states` holds lists of angle, h, k and v, one tensor per segment in each: before its first
/// token on entry, after its last on return; other handles keep the old numbers. Without, segments
/// start from zero. No gradient flows into or out of a state.
pub fn mamba3(
    tape: &Tape,
    op: &Mamba3,
    segments: &Segments,
    mut states: Option<[&mut [&mut Tensor]; 4]>,
) -> Var {
    let mut vars = vec![op.xbc, op.raw, op.delta_bias, op.b_norm, op.c_norm, op.b_bias, op.c_bias];
    vars.push(op.skip);
    vars.extend(op.mimo_x);
    let value = |var: &Var| var.value().clone();
    let mut inputs = Inputs {
        xbc: value(op.xbc),
        raw: value(op.raw),
        delta_bias: value(op.delta_bias),
        b_norm: value(op.b_norm),
        c_norm: value(op.c_norm),
        b_bias: value(op.b_bias),
        c_bias: value(op.c_bias),
        skip: value(op.skip),
        mimo_x: op.mimo_x.map(value),
        dims: op.dims,
    };
    inputs.expect_shapes(segments, states.as_ref());
    let recorded = tape.is_recording() && vars.iter().any(|var| var.needs_grad());
    let copies = |list: &[&mut Tensor]| list.iter().map(|state| (**state).clone()).collect();
    let initial: Option<[Vec<Tensor>; 4]> = match &states {
        Some(states) if recorded => Some(states.each_ref().map(|list| copies(list))),
        _ => None,
    };
    states.iter_mut().flatten().for_each(|list| own(list));
    let y = forward(&inputs, segments, states);
    let segments = segments.clone();
    // What can be made again is not held meanwhile.
    let xbc = op.xbc.kept();
    inputs.xbc = Tensor::uninit(y.device(), &[0]);
    tape.record("mamba3", &vars, y, move |dy| {
        inputs.xbc = xbc.get();
        backward(&inputs, &segments, initial.as_ref(), &dy)
    })
}

impl Mamba3Dims {
    fn d_inner(&self) -> usize {
        self.n_head * self.d_head
    }

    /// Columns of b, and of c.
    fn d_bc(&self) -> usize {
        self.rank * self.n_group * self.d_state
    }

    /// Columns of `xbc`.
    fn width(&self) -> usize {
        self.d_inner() + 2 * self.d_bc()
    }

    /// Columns of `raw`.
    fn raw_width(&self) -> usize {
        3 * self.n_head + self.n_angle
    }

    /// Columns of `y`.
    fn y_width(&self) -> usize {
        self.d_inner() * self.rank
    }

    fn heads_per_group(&self) -> usize {
        self.n_head / self.n_group
    }

    /// Numbers in the state of a head.
    fn n_state(&self) -> usize {
        self.d_state * self.d_head
    }
}

#[derive(Clone)]
struct Inputs {
    xbc: Tensor,
    raw: Tensor,
    delta_bias: Tensor,
    b_norm: Tensor,
    c_norm: Tensor,
    b_bias: Tensor,
    c_bias: Tensor,
    skip: Tensor,
    mimo_x: Option<Tensor>,
    dims: Mamba3Dims,
}

impl Inputs {
    fn expect_shapes(&self, segments: &Segments, states: Option<&[&mut [&mut Tensor]; 4]>) {
        let dims = self.dims;
        let Mamba3Dims { n_head, d_head, n_group, d_state, rank, n_angle, .. } = dims;
        assert!(
            n_group > 0 && n_head.is_multiple_of(n_group),
            "mamba3: {n_head} heads in {n_group} groups"
        );
        assert!(
            d_state.is_multiple_of(2) && (1..=d_state / 2).contains(&n_angle),
            "mamba3: {n_angle} angles for {d_state} numbers"
        );
        let is_ranked = rank == 1 || self.mimo_x.is_some();
        assert!((1..=64).contains(&rank) && is_ranked, "mamba3: rank {rank} without mimo_x");
        let n_tok = segments.n_tok();
        self.xbc.expect_shape("mamba3: xbc", &[n_tok, dims.width()]);
        self.raw.expect_shape("mamba3: raw", &[n_tok, dims.raw_width()]);
        for per_head in [&self.delta_bias, &self.skip] {
            per_head.expect_shape("mamba3: a number of each head", &[n_head]);
        }
        for norm in [&self.b_norm, &self.c_norm] {
            norm.expect_shape("mamba3: norm", &[d_state]);
        }
        for bias in [&self.b_bias, &self.c_bias] {
            bias.expect_shape("mamba3: bias", &[n_head, rank, d_state]);
        }
        if let Some(mimo_x) = &self.mimo_x {
            mimo_x.expect_shape("mamba3: mimo_x", &[n_head, rank, d_head]);
        }
        let shapes: [(&str, &[usize]); 4] = [
            ("mamba3: state angle", &[n_head, n_angle]),
            ("mamba3: state h", &[n_head, d_state, d_head]),
            ("mamba3: state k", &[rank, n_head, d_state]),
            ("mamba3: state v", &[n_head, d_head]),
        ];
        for (list, (what, shape)) in states.into_iter().flatten().zip(shapes) {
            assert_eq!(list.len(), segments.len(), "mamba3: states and segments");
            list.iter().for_each(|state| state.expect_shape(what, shape));
        }
    }

    fn cpu(&self) -> &Cpu {
        self.xbc.device().expect_cpu()
    }

    fn scratch(&self, n_elem: usize) -> Tensor {
        Tensor::uninit(self.xbc.device(), &[n_elem])
    }
}
