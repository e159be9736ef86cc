//! Backward kernels of `scan`: states of a chunk made again, then its tokens from the last.

use super::*;

/// What backward holds of one chunk.
pub(super) struct Held<'a> {
    /// (tokens, width): the gradient of `out`; `dy silu'(gate)`.
    pub dout: &'a mut [f32],
    pub dsilu: &'a mut [f32],
    /// (tokens, width), sums over states: `c . h`, `g . b` and `q . rate`.
    pub out: &'a mut [f32],
    pub g_b: &'a mut [f32],
    pub q_rate: &'a mut [f32],
    /// (tokens + 1, TILE, lanes): the states of a tile before and after each token.
    pub h: &'a mut [f32],
    /// (tokens, TILE, lanes)
    pub decay: &'a mut [f32],
    /// (n_pad / TILE, tokens, TILE, lanes): sums over channels, lane by lane.
    pub db: &'a mut [f32],
    pub dc: &'a mut [f32],
}

/// What one task writes.
pub(super) struct Grads<'a> {
    /// The group's piece of each row of the segment, as `ddelta` and `dgate`.
    pub dx: Vec<&'a mut [f32]>,
    pub ddelta: Vec<&'a mut [f32]>,
    pub dgate: Vec<&'a mut [f32]>,
    /// (tokens, 2 n_pad): the group's part of db, then of dc.
    pub shared: &'a mut [f32],
    /// (channels, d_state + 2): the segment's part of da_log, dskip and ddelta_bias.
    pub sums: &'a mut [f32],
}

pub(super) struct Backward<'a> {
    pub source: &'a Source<'a>,
    /// All rows and channels.
    pub dy: &'a [f32],
    pub grads: Grads<'a>,
    pub scratch: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Backward { source, dy, mut grads, scratch } = self;
        let (width, n_state) = (source.width, source.n_state());
        let n_tok = source.segment.n_tok;
        let pieces = split(scratch, source.backward_lengths());
        let [rates, delta, u, slope, starts, g, da, sums, held @ ..] = pieces;
        let [dout, dsilu, out, g_b, q_rate, h, decay, db, dc] = held;
        let steps = Steps { rates, delta, u, slope };
        let mut held = Held { dout, dsilu, out, g_b, q_rate, h, decay, db, dc };
        source.piece(Some(source.all.rates), steps.rates);
        source.piece(source.entry, &mut starts[..n_state]);
        for sum in [&mut *g, &mut *da, &mut *sums] {
            sum.fill(0.0);
        }
        for first in (0..n_tok.saturating_sub(CHUNK)).step_by(CHUNK) {
            let toks = first..first + CHUNK;
            open(simd, source, &toks, (steps.delta, steps.u, None));
            let (before, after) = starts[first / CHUNK * n_state..].split_at_mut(n_state);
            after[..n_state].copy_from_slice(before);
            for at in source.tiles::<S>() {
                let walk = steps.walk(source, &toks, at);
                walk.forward(simd, &mut after[..n_state], held.out);
            }
        }
        for first in (0..n_tok).step_by(CHUNK).rev() {
            let toks = first..n_tok.min(first + CHUNK);
            let start = &starts[first / CHUNK * n_state..][..n_state];
            open(simd, source, &toks, (steps.delta, steps.u, Some(steps.slope)));
            begin_chunk(simd, source, &toks, dy, &mut held);
            for at in source.tiles::<S>() {
                let walk = steps.walk(source, &toks, at);
                walk.replay(simd, start, &mut held);
                walk.backward(simd, g, da, &mut held);
            }
            finish_chunk(simd, source, &toks, (&steps, &held), (sums, &mut grads));
            add_lanes(simd, source, &toks, &held, grads.shared);
        }
        let (dskip, dbias) = sums.split_at(width);
        for (ch, sums) in grads.sums.chunks_exact_mut(source.all.d_state + 2).enumerate() {
            for n in 0..source.all.d_state {
                let at = n * width + ch;
                sums[n] = da[at] * steps.rates[at] * std::f32::consts::LN_2;
            }
            sums[source.all.d_state] = dskip[ch];
            sums[source.all.d_state + 1] = dbias[ch];
        }
    }
}

/// What backward makes once for the whole segment.
pub(super) struct Steps<'a> {
    /// (n_pad, width)
    pub rates: &'a mut [f32],
    /// (tokens, width): the step, `delta x`, and the slope of the softplus.
    pub delta: &'a mut [f32],
    pub u: &'a mut [f32],
    pub slope: &'a mut [f32],
}

impl Steps<'_> {
    #[inline(always)]
    pub fn walk<'t>(
        &'t self,
        source: &Source<'t>,
        toks: &Range<usize>,
        at: (usize, usize),
    ) -> Walk<'t> {
        Walk::new(source, toks, (self.rates, self.delta, self.u), at)
    }
}

/// Makes `dout` and `dsilu` of a chunk.
#[inline(always)]
pub(super) fn begin_chunk<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    dy: &[f32],
    held: &mut Held,
) {
    for ch in source.vectors::<S>() {
        for (row, tok) in toks.clone().enumerate() {
            let at = row * source.width + ch;
            let dy = get_row(simd, source.row(dy, tok), ch);
            match source.all.gate {
                Some(gate) => {
                    let gate = get_row(simd, source.row(gate, tok), ch);
                    let one = gate.same(1.0);
                    let s = gate.sigmoid();
                    put(held.dout, at, dy * gate * s);
                    put(held.dsilu, at, dy * s * gate.mul_add(one - s, one));
                }
                None => put(held.dout, at, dy),
            }
        }
    }
}

/// The gradients of a chunk that belong to one token and one channel; `sums` are dskip and dbias.
#[inline(always)]
pub(super) fn finish_chunk<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    (steps, held): (&Steps, &Held),
    (sums, grads): (&mut [f32], &mut Grads),
) {
    let width = source.width;
    let (dskips, dbiases) = sums.split_at_mut(width);
    for ch in source.vectors::<S>() {
        let skip = get_row(simd, source.own(source.all.skip), ch);
        let (mut dskip, mut dbias) = (get(simd, dskips, ch), get(simd, dbiases, ch));
        for (row, tok) in toks.clone().enumerate() {
            let at = row * width + ch;
            let x = get_row(simd, source.row(source.all.x, tok), ch);
            let (dout, g_b) = (get(simd, held.dout, at), get(simd, held.g_b, at));
            let q_a = get(simd, held.q_rate, at) * x.same(std::f32::consts::LN_2);
            let ddelta = x.mul_add(g_b, q_a) * get(simd, steps.slope, at);
            let dx = get(simd, steps.delta, at).mul_add(g_b, dout * skip);
            put_row(grads.dx[tok], ch, dx);
            put_row(grads.ddelta[tok], ch, ddelta);
            if let Some(dgate) = grads.dgate.get_mut(tok) {
                let out = skip.mul_add(x, get(simd, held.out, at));
                put_row(dgate, ch, get(simd, held.dsilu, at) * out);
            }
            dskip = dout.mul_add(x, dskip);
            dbias = dbias + ddelta;
        }
        put(dskips, ch, dskip);
        put(dbiases, ch, dbias);
    }
}

/// Sums db and dc of a chunk over the lanes.
#[inline(always)]
pub(super) fn add_lanes<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    held: &Held,
    shared: &mut [f32],
) {
    let n_pad = source.all.n_pad;
    let rows = shared[toks.start * 2 * n_pad..toks.end * 2 * n_pad].chunks_exact_mut(2 * n_pad);
    for (row, shared) in rows.enumerate() {
        let (db, dc) = shared.split_at_mut(n_pad);
        for n in 0..n_pad {
            let at = (n / TILE * toks.len() + row) * TILE + n % TILE;
            db[n] = get(simd, held.db, at * F32s::<S>::LANES).sum();
            dc[n] = get(simd, held.dc, at * F32s::<S>::LANES).sum();
        }
    }
}
