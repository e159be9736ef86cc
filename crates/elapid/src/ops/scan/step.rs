//! A few new tokens of each sequence, in generation: states change where they are, and nothing is
//! made but the result.
//!
//! `-exp(a_log)` does not change from token to token and would cost as much as the scan itself; it
//! is made once, as the scan reads it, and kept beside `a_log` (`Tensor::derived`).

use super::*;

/// Tokens of a segment up to which this is the faster way.
pub(super) const N_STEP_MAX: usize = 8;
/// State numbers of a task, about, where there are several.
const TASK: usize = 1 << 14;

/// As `forward`, with the states before the segments in `states`, and then those after.
pub(super) fn step(job: &Job, states: &mut [&mut Tensor]) -> Tensor {
    let device = job.x.device();
    let cpu = match device {
        Device::Cpu(cpu) => cpu,
        Device::Gpu(gpu) => return step_gpu(gpu, job, states),
    };
    let (d_inner, d_state) = (job.d_inner, job.d_state);
    let rates = job.a_log.derived(Derivation::Rates, rates);
    let mut y = Tensor::uninit(device, job.x.shape());
    // Cut by the shape alone; where it is cut changes no number.
    let is_wide = job.x.n_elem() * d_state >= PARALLEL_MIN;
    let n_ch = if is_wide { (TASK / d_state).next_multiple_of(GROUP) } else { d_inner };
    let operands = job.operands(rates.f32());
    own(states);
    let mut tasks = Vec::with_capacity(job.segments.len() * d_inner.div_ceil(n_ch));
    let mut ys = y.f32_mut();
    for (segment, state) in job.segments.iter().zip(states) {
        let y = ys.split_off_mut(..segment.n_tok * d_inner).expect("segments cover the rows");
        let ys = columns(y, (d_inner, d_inner), n_ch);
        let hs = columns(state.f32_mut(), (d_inner, d_inner), n_ch);
        for (idx, (y, h)) in ys.into_iter().zip(hs).enumerate() {
            let channels = idx * n_ch..d_inner.min((idx + 1) * n_ch);
            tasks.push(Step { operands, segment, channels, y, h });
        }
    }
    if is_wide {
        cpu.map(tasks, |task| cpu.simd(task));
    } else {
        tasks.into_iter().for_each(|task| cpu.simd(task));
    }
    y
}

/// Decay per unit of delta as a power of two, `-exp(a_log) / ln 2`: (d_state, d_inner).
pub(super) fn rates(a_log: &Tensor) -> Tensor {
    let cpu = a_log.device().expect_cpu();
    let (d_inner, d_state) = a_log.dims2();
    let mut rates = Tensor::uninit(a_log.device(), &[d_state, d_inner]);
    transpose(a_log.f32(), d_state, rates.f32_mut());
    cpu.simd(Rates(rates.f32_mut()));
    rates
}

/// From `a_log` to rates, in place.
struct Rates<'a>(&'a mut [f32]);

impl WithSimd for Rates<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let factor = F32s::splat(simd, -std::f32::consts::LOG2_E);
        for at in (0..self.0.len()).step_by(F32s::<S>::LANES) {
            (F32s::load(simd, &self.0[at..]).exp() * factor).store(&mut self.0[at..]);
        }
    }
}

/// Some channels of one segment.
struct Step<'a> {
    operands: Operands<'a>,
    segment: &'a Segment,
    channels: Range<usize>,
    /// Their piece of each row.
    y: Vec<&'a mut [f32]>,
    /// Their piece of each row of the state.
    h: Vec<&'a mut [f32]>,
}

impl Step<'_> {
    /// `V` runs of `len` channels from `ch` on, each at most a vector, of token `idx` of the
    /// segment. Rows of the state are far apart: several vectors of each are taken at once.
    ///
    /// A call in here would push every vector to memory. There is none where `len` is known to be
    /// that of a vector.
    #[inline(always)]
    fn vectors<S: Simd, const V: usize>(&mut self, simd: S, idx: usize, ch: usize, len: usize) {
        let Operands { x, delta, delta_bias, rates, b, c, skip, gate, d_inner, n_pad, .. } =
            self.operands;
        let (tok, first) = (self.segment.start + idx, self.channels.start + ch);
        let row = tok * d_inner + first..tok * d_inner + first + V * len;
        let (x, raw) = (&x[row.clone()], &delta[row.clone()]);
        let zero = F32s::zero(simd);
        let (mut delta, mut u, mut out) = ([zero; V], [zero; V], [zero; V]);
        for v in 0..V {
            let mut step = F32s::load(simd, &raw[v * len..][..len]);
            if let Some(bias) = delta_bias {
                step = step + F32s::load(simd, &bias[first + v * len..][..len]);
            }
            delta[v] = step.softplus();
            u[v] = delta[v] * F32s::load(simd, &x[v * len..][..len]);
        }
        let (b, c) = (&b[tok * n_pad..][..n_pad], &c[tok * n_pad..][..n_pad]);
        for (n, h) in self.h.iter_mut().enumerate() {
            let h = &mut h[ch..ch + V * len];
            let rates = &rates[n * d_inner + first..][..V * len];
            let (b, c) = (zero.same(b[n]), zero.same(c[n]));
            for v in 0..V {
                let rate = F32s::load(simd, &rates[v * len..][..len]);
                let decay = (delta[v] * rate).exp2_of_negative();
                let before = F32s::load(simd, &h[v * len..][..len]);
                let after = decay.mul_add(before, u[v] * b);
                after.store(&mut h[v * len..][..len]);
                out[v] = after.mul_add(c, out[v]);
            }
        }
        let y = &mut self.y[idx][ch..ch + V * len];
        for v in 0..V {
            let skip = F32s::load(simd, &skip[first + v * len..][..len]);
            let mut out = skip.mul_add(F32s::load(simd, &x[v * len..][..len]), out[v]);
            if let Some(gate) = gate {
                let gate = F32s::load(simd, &gate[row.start + v * len..][..len]);
                out = out * gate * gate.sigmoid();
            }
            out.store(&mut y[v * len..][..len]);
        }
    }
}

/// Vectors of channels taken at once.
const N_VECTOR: usize = 4;

impl WithSimd for Step<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        let (lanes, n_ch) = (F32s::<S>::LANES, self.channels.len());
        let n_whole = n_ch - n_ch % (N_VECTOR * lanes);
        for idx in 0..self.segment.n_tok {
            for ch in (0..n_whole).step_by(N_VECTOR * lanes) {
                self.vectors::<S, N_VECTOR>(simd, idx, ch, lanes);
            }
            for ch in (n_whole..n_ch).step_by(lanes) {
                self.vectors::<S, 1>(simd, idx, ch, lanes.min(n_ch - ch));
            }
        }
    }
}
