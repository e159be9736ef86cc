//! Kernels of `scan`: what a task reads, and the walk over tokens of one tile of states.

use super::*;

/// The numbers of a job, all rows and channels.
#[derive(Clone, Copy)]
pub(super) struct Operands<'a> {
    pub x: &'a [f32],
    pub delta: &'a [f32],
    pub delta_bias: Option<&'a [f32]>,
    /// (d_state, d_inner): see `rates`.
    pub rates: &'a [f32],
    pub b: &'a [f32],
    pub c: &'a [f32],
    pub skip: &'a [f32],
    pub gate: Option<&'a [f32]>,
    pub d_inner: usize,
    pub d_state: usize,
    pub n_pad: usize,
}

/// What the task of one segment and one group of channels reads.
pub(super) struct Source<'a> {
    pub all: Operands<'a>,
    /// The whole state before the segment.
    pub entry: Option<&'a [f32]>,
    pub segment: Segment,
    pub channels: Range<usize>,
    /// Channels rounded up to whole vectors: the length of a row of scratch.
    pub width: usize,
}

impl Source<'_> {
    /// The group's piece of the row of token `tok` of the segment.
    #[inline(always)]
    pub fn row<'t>(&self, all: &'t [f32], tok: usize) -> &'t [f32] {
        let first = (self.segment.start + tok) * self.all.d_inner + self.channels.start;
        &all[first..first + self.channels.len()]
    }

    /// The group's piece of a number for each channel.
    #[inline(always)]
    pub fn own<'t>(&self, all: &'t [f32]) -> &'t [f32] {
        &all[self.channels.clone()]
    }

    /// States of the group: (n_pad, width).
    pub fn n_state(&self) -> usize {
        self.all.n_pad * self.width
    }

    /// Of the scratch of forward: rates and h, then `delta`, `u` and `out` of a chunk.
    pub fn forward_lengths(&self) -> [usize; 5] {
        let (states, wide) = (self.n_state(), CHUNK_FORWARD * self.width);
        [states, states, wide, wide, wide]
    }

    /// Of the scratch of backward: `Steps`, the states before the chunks, g, da and sums, `Held`.
    pub fn backward_lengths(&self) -> [usize; 17] {
        let (n_tok, states) = (self.segment.n_tok.min(CHUNK), self.n_state());
        let (wide, starts) = (n_tok * self.width, states * self.segment.n_tok.div_ceil(CHUNK));
        let (tile, sums) = (TILE * LANES_MAX, n_tok * self.all.n_pad * LANES_MAX);
        let (h, decay, pair) = (tile + n_tok * tile, n_tok * tile, 2 * self.width);
        [
            states, wide, wide, wide, starts, states, states, pair, wide, wide, wide, wide, wide,
            h, decay, sums, sums,
        ]
    }

    /// The group's piece of (d_state, d_inner) numbers, and zeros around it: (n_pad, width).
    pub fn piece(&self, from: Option<&[f32]>, to: &mut [f32]) {
        to.fill(0.0);
        if let Some(from) = from {
            let rows = to.chunks_exact_mut(self.width).zip(from.chunks_exact(self.all.d_inner));
            for (to, from) in rows {
                to[..self.channels.len()].copy_from_slice(self.own(from));
            }
        }
    }

    /// Where the vectors of a row of scratch begin.
    #[inline(always)]
    pub fn vectors<S: Simd>(&self) -> std::iter::StepBy<Range<usize>> {
        (0..self.width).step_by(F32s::<S>::LANES)
    }

    /// Where the tiles begin: first channel and first state.
    #[inline(always)]
    pub fn tiles<S: Simd>(&self) -> impl Iterator<Item = (usize, usize)> {
        let n_pad = self.all.n_pad;
        self.vectors::<S>().flat_map(move |ch| (0..n_pad).step_by(TILE).map(move |n| (ch, n)))
    }
}

/// A vector of scratch.
#[inline(always)]
pub(super) fn get<S: Simd>(simd: S, x: &[f32], at: usize) -> F32s<S> {
    F32s::load(simd, &x[at..at + F32s::<S>::LANES])
}

/// Writes a vector of scratch.
#[inline(always)]
pub(super) fn put<S: Simd>(y: &mut [f32], at: usize, v: F32s<S>) {
    v.store(&mut y[at..at + F32s::<S>::LANES]);
}

/// A vector of a row that ends where the channels end: zeros beyond.
#[inline(always)]
pub(super) fn get_row<S: Simd>(simd: S, row: &[f32], ch: usize) -> F32s<S> {
    F32s::load(simd, row.get(ch..).unwrap_or_default())
}

/// Writes what the row has room for.
#[inline(always)]
pub(super) fn put_row<S: Simd>(row: &mut [f32], ch: usize, v: F32s<S>) {
    v.store(row.get_mut(ch..).unwrap_or_default());
}

pub(super) struct Forward<'a> {
    pub source: &'a Source<'a>,
    pub y: Vec<&'a mut [f32]>,
    pub exit: Vec<&'a mut [f32]>,
    pub scratch: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Forward { source, mut y, exit, scratch } = self;
        let width = source.width;
        let [rates, h, delta, u, out] = split(scratch, source.forward_lengths());
        source.piece(Some(source.all.rates), rates);
        source.piece(source.entry, h);
        for first in (0..source.segment.n_tok).step_by(CHUNK_FORWARD) {
            let toks = first..source.segment.n_tok.min(first + CHUNK_FORWARD);
            open(simd, source, &toks, (delta, u, None));
            for at in source.tiles::<S>() {
                Walk::new(source, &toks, (rates, delta, u), at).forward(simd, h, out);
            }
            close_forward(simd, source, &toks, out, &mut y[toks.clone()]);
        }
        for (exit, h) in exit.into_iter().zip(h.chunks_exact(width)) {
            exit.copy_from_slice(&h[..exit.len()]);
        }
    }
}

/// `delta`, `u = delta x` and the slope of the softplus, of some tokens.
///
/// Down the columns, as all loops over rows here: a fixed stride is what the prefetcher finds.
#[inline(always)]
pub(super) fn open<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    (delta, u, mut slope): (&mut [f32], &mut [f32], Option<&mut [f32]>),
) {
    for ch in source.vectors::<S>() {
        let bias = get_row(simd, source.all.delta_bias.map_or(&[], |it| source.own(it)), ch);
        for (row, tok) in toks.clone().enumerate() {
            let at = row * source.width + ch;
            let raw = get_row(simd, source.row(source.all.delta, tok), ch);
            let (step, step_slope) = (raw + bias).softplus_and_slope();
            put(delta, at, step);
            put(u, at, step * get_row(simd, source.row(source.all.x, tok), ch));
            if let Some(slope) = &mut slope {
                put(slope, at, step_slope);
            }
        }
    }
}

/// `y = (out + skip x) silu(gate)`, where `out` is `c . h`.
#[inline(always)]
pub(super) fn close_forward<S: Simd>(
    simd: S,
    source: &Source,
    toks: &Range<usize>,
    out: &[f32],
    y: &mut [&mut [f32]],
) {
    for ch in source.vectors::<S>() {
        let skip = get_row(simd, source.own(source.all.skip), ch);
        for (row, tok) in toks.clone().enumerate() {
            let x = get_row(simd, source.row(source.all.x, tok), ch);
            let out = skip.mul_add(x, get(simd, out, row * source.width + ch));
            let out = match source.all.gate {
                Some(gate) => {
                    let gate = get_row(simd, source.row(gate, tok), ch);
                    out * gate * gate.sigmoid()
                }
                None => out,
            };
            put_row(y[row], ch, out);
        }
    }
}

/// One vector of channels and one tile of states, on their way over some tokens.
pub(super) struct Walk<'a> {
    /// (n_pad, width)
    pub rates: &'a [f32],
    /// (tokens, width), as `u`
    pub delta: &'a [f32],
    pub u: &'a [f32],
    /// (tokens, n_pad), as `c`
    pub b: &'a [f32],
    pub c: &'a [f32],
    pub n_tok: usize,
    pub n_pad: usize,
    pub width: usize,
    pub ch: usize,
    pub state: usize,
}

impl<'a> Walk<'a> {
    #[inline(always)]
    pub fn new(
        source: &Source<'a>,
        toks: &Range<usize>,
        (rates, delta, u): (&'a [f32], &'a [f32], &'a [f32]),
        (ch, state): (usize, usize),
    ) -> Walk<'a> {
        let (width, Operands { b, c, n_pad, .. }) = (source.width, source.all);
        let first = source.segment.start * n_pad;
        let rows = first + toks.start * n_pad..first + toks.end * n_pad;
        let (b, c) = (&b[rows.clone()], &c[rows]);
        Walk { rates, delta, u, b, c, n_tok: toks.len(), n_pad, width, ch, state }
    }

    /// The tile of an array (n_pad, width).
    #[inline(always)]
    pub fn load<S: Simd>(&self, simd: S, from: &[f32]) -> [F32s<S>; TILE] {
        let mut tile = [F32s::zero(simd); TILE];
        for n in 0..TILE {
            tile[n] = get(simd, from, (self.state + n) * self.width + self.ch);
        }
        tile
    }

    #[inline(always)]
    pub fn save<S: Simd>(&self, tile: &[F32s<S>; TILE], to: &mut [f32]) {
        for n in 0..TILE {
            put(to, (self.state + n) * self.width + self.ch, tile[n]);
        }
    }

    /// The tile's numbers of a row of `b` or `c`.
    #[inline(always)]
    pub fn shared(&self, all: &'a [f32], tok: usize) -> &'a [f32; TILE] {
        all[tok * self.n_pad + self.state..].first_chunk().expect("tiles fill the row")
    }

    /// A sum over states so far: nothing before the first tile.
    #[inline(always)]
    pub fn state_sum<S: Simd>(&self, simd: S, sums: &[f32], at: usize) -> F32s<S> {
        if self.state == 0 { F32s::zero(simd) } else { get(simd, sums, at) }
    }

    /// A sum over channels so far: nothing before the first vector.
    #[inline(always)]
    pub fn channel_sum<S: Simd>(&self, simd: S, sums: &[f32], at: usize) -> F32s<S> {
        if self.ch == 0 { F32s::zero(simd) } else { get(simd, sums, at) }
    }

    /// Moves `h` on and adds `c . h` to `out`.
    #[inline(always)]
    pub fn forward<S: Simd>(&self, simd: S, h_all: &mut [f32], outs: &mut [f32]) {
        let rates = self.load(simd, self.rates);
        let mut h = self.load(simd, h_all);
        for tok in 0..self.n_tok {
            let at = tok * self.width + self.ch;
            let (delta, u) = (get(simd, self.delta, at), get(simd, self.u, at));
            let (b, c) = (self.shared(self.b, tok), self.shared(self.c, tok));
            let mut out = self.state_sum(simd, outs, at);
            for n in 0..TILE {
                let decay = (delta * rates[n]).exp2_of_negative();
                h[n] = decay.mul_add(h[n], u * u.same(b[n]));
                out = h[n].mul_add(u.same(c[n]), out);
            }
            put(outs, at, out);
        }
        self.save(&h, h_all);
    }

    /// As `forward`, from `start`; keeps every state and decay, and adds to dc.
    #[inline(always)]
    pub fn replay<S: Simd>(&self, simd: S, start: &[f32], held: &mut Held) {
        let lanes = F32s::<S>::LANES;
        let rates = self.load(simd, self.rates);
        let mut h = self.load(simd, start);
        for n in 0..TILE {
            put(held.h, n * lanes, h[n]);
        }
        let dcs = &mut held.dc[self.state * self.n_tok * lanes..];
        for tok in 0..self.n_tok {
            let at = tok * self.width + self.ch;
            let (delta, u) = (get(simd, self.delta, at), get(simd, self.u, at));
            let (b, c) = (self.shared(self.b, tok), self.shared(self.c, tok));
            let dout = get(simd, held.dout, at);
            let h_after = &mut held.h[(tok + 1) * TILE * lanes..][..TILE * lanes];
            let decays = &mut held.decay[tok * TILE * lanes..][..TILE * lanes];
            let dcs = &mut dcs[tok * TILE * lanes..][..TILE * lanes];
            let mut out = self.state_sum(simd, held.out, at);
            for n in 0..TILE {
                let decay = (delta * rates[n]).exp2_of_negative();
                let after = decay.mul_add(h[n], u * u.same(b[n]));
                put(decays, n * lanes, decay);
                put(h_after, n * lanes, after);
                out = after.mul_add(u.same(c[n]), out);
                let dc = self.channel_sum(simd, dcs, n * lanes);
                put(dcs, n * lanes, after.mul_add(dout, dc));
                h[n] = after;
            }
            put(held.out, at, out);
        }
    }

    /// Inverts `replay`, from the last token to the first: moves `g` back and adds to the sums.
    #[inline(always)]
    pub fn backward<S: Simd>(
        &self,
        simd: S,
        g_all: &mut [f32],
        da_all: &mut [f32],
        held: &mut Held,
    ) {
        let lanes = F32s::<S>::LANES;
        let rates = self.load(simd, self.rates);
        let (mut g, mut da) = (self.load(simd, g_all), self.load(simd, da_all));
        let dbs = &mut held.db[self.state * self.n_tok * lanes..];
        for tok in (0..self.n_tok).rev() {
            let at = tok * self.width + self.ch;
            let (delta, u) = (get(simd, self.delta, at), get(simd, self.u, at));
            let (b, c) = (self.shared(self.b, tok), self.shared(self.c, tok));
            let dout = get(simd, held.dout, at);
            let h_before = &held.h[tok * TILE * lanes..][..TILE * lanes];
            let decays = &held.decay[tok * TILE * lanes..][..TILE * lanes];
            let dbs = &mut dbs[tok * TILE * lanes..][..TILE * lanes];
            let mut g_b = self.state_sum(simd, held.g_b, at);
            let mut q_rate = self.state_sum(simd, held.q_rate, at);
            for n in 0..TILE {
                let g_after = dout.mul_add(u.same(c[n]), g[n]);
                let db = self.channel_sum(simd, dbs, n * lanes);
                put(dbs, n * lanes, g_after.mul_add(u, db));
                g_b = g_after.mul_add(u.same(b[n]), g_b);
                g[n] = g_after * get(simd, decays, n * lanes);
                let q = g[n] * get(simd, h_before, n * lanes);
                q_rate = q.mul_add(rates[n], q_rate);
                da[n] = q.mul_add(delta, da[n]);
            }
            put(held.g_b, at, g_b);
            put(held.q_rate, at, q_rate);
        }
        self.save(&g, g_all);
        self.save(&da, da_all);
    }
}
