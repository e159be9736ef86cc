//! Backward of `ssd`: inverts `forward` of `mod.rs`, whose header has the mathematics.

use super::*;

/// A task of backward: some heads of one segment, all of one group.
struct BackwardTask<'a> {
    segment: Segment,
    heads: Range<usize>,
    /// The states of its heads before the segment.
    initial: Option<&'a [f32]>,
    /// Its columns of every token's `dx`.
    dx: Vec<&'a mut [f32]>,
    /// Gradient by the raw step sizes, (heads, n_tok).
    ddelta: &'a mut [f32],
    /// What its heads add up for their group, `partial_width` numbers per token.
    partial: &'a mut [f32],
}

/// Gradients that are sums over the tokens of a head: by delta_bias, a_log and skip.
type Sums = [f64; 3];

/// Numbers per token in what heads add up for their group: a row of `dscores`, `db` and `dc`.
fn partial_width(dims: &SsdDims) -> usize {
    CHUNK + 2 * dims.d_state
}

/// Lengths, within the numbers of a chunk, of `dscores` (n_tok, n_tok), a gap, `db`, and `dc`.
fn partial_lengths(dims: &SsdDims, n_tok: usize) -> [usize; 4] {
    [n_tok * n_tok, n_tok * (CHUNK - n_tok), n_tok * dims.d_state, n_tok * dims.d_state]
}

/// Inverts `forward`: gradients by xbc, delta, delta_bias, a_log and skip.
pub(super) fn backward(
    inputs: &Inputs,
    segments: &Segments,
    initial: Option<&[Tensor]>,
    dy: &Tensor,
) -> Vec<Option<Tensor>> {
    if let Device::Gpu(gpu) = inputs.xbc.device() {
        return gpu::backward(gpu, inputs, segments, initial, dy);
    }
    let (cpu, dims, device) = (inputs.cpu(), inputs.dims, inputs.xbc.device());
    let n_heads = heads_per_task((dims.n_head, dims.heads_per_group()), segments);
    let n_block = dims.n_head / n_heads;
    let mut dxbc = Tensor::uninit(device, inputs.xbc.shape());
    let mut by_head = inputs.scratch(segments.n_tok() * dims.n_head);
    let mut partial = inputs.scratch(segments.n_tok() * n_block * partial_width(&dims));
    let columns = (dims.width(), dims.d_inner());
    let dxs = deal_columns(dxbc.f32_mut(), segments, n_block, columns);
    let ddeltas = deal_pieces(by_head.f32_mut(), segments, n_block, n_heads);
    let partials = deal_pieces(partial.f32_mut(), segments, n_block, partial_width(&dims));
    let parts = dxs.into_iter().zip(ddeltas).zip(partials).enumerate();
    let tasks = parts.map(|(idx, ((dx, ddelta), partial))| {
        let heads = idx % n_block * n_heads..(idx % n_block + 1) * n_heads;
        let states = heads.start * dims.n_state()..heads.end * dims.n_state();
        let initial = initial.map(|initial| &initial[idx / n_block].f32()[states]);
        BackwardTask { segment: segments[idx / n_block], heads, initial, dx, ddelta, partial }
    });
    let scores = scores(inputs, segments);
    let sums = cpu.map(tasks.collect(), |task| backward_heads(inputs, scores.f32(), dy, task));
    sum_over_heads(inputs, segments, n_block, partial.f32(), &mut dxbc);
    let sums: Vec<Sums> = sums.into_iter().flatten().collect();
    let over_segments = |idx: usize| {
        let of_head = |head| sums.iter().skip(head).step_by(dims.n_head).map(|sums| sums[idx]);
        let sums: Vec<f32> =
            (0..dims.n_head).map(|head| of_head(head).sum::<f64>() as f32).collect();
        Some(Tensor::from_f32(device, &[dims.n_head], &sums))
    };
    let ddelta = Some(by_token(inputs, segments, by_head.f32()));
    vec![Some(dxbc), ddelta, over_segments(0), over_segments(1), over_segments(2)]
}

/// (heads, n_tok) of every segment to (n_tok, n_head).
fn by_token(inputs: &Inputs, segments: &Segments, by_head: &[f32]) -> Tensor {
    let n_head = inputs.dims.n_head;
    let mut y = Tensor::uninit(inputs.xbc.device(), &[segments.n_tok(), n_head]);
    for segment in segments.iter() {
        let range = segment.start * n_head..(segment.start + segment.n_tok) * n_head;
        transpose(&by_head[range.clone()], segment.n_tok, &mut y.f32_mut()[range]);
    }
    y
}

fn backward_heads(inputs: &Inputs, scores: &[f32], dy: &Tensor, task: BackwardTask) -> Vec<Sums> {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let BackwardTask { segment, heads, initial, mut dx, ddelta, partial } = task;
    let (d_head, n_state) = (dims.d_head, dims.n_state());
    let n_states = segment.n_tok.div_ceil(CHUNK) * n_state;
    let n_work = Work::len(d_head, dims.d_state, CHUNK);
    let lengths = [CHUNK * SERIES, n_states, n_state, n_work, 2 * CHUNK];
    let mut scratch = inputs.scratch(lengths.iter().sum());
    let [buffer, states, dstate, work, terms] = split(scratch.f32_mut(), lengths);
    partial.fill(0.0);
    let mut all_sums = Vec::with_capacity(heads.len());
    for (idx, head_idx) in heads.enumerate() {
        let initial = initial.map(|initial| &initial[idx * n_state..][..n_state]);
        let x_chunk = &mut work[..CHUNK * d_head];
        recompute_states(inputs, (head_idx, &segment), initial, (buffer, x_chunk), states);
        let mut sums = Sums::default();
        for (chunk_idx, chunk) in chunks(segment.n_tok).enumerate().rev() {
            let (start, n_tok) = (segment.start + chunk.start, chunk.len());
            let dy = &dy.f32()[start * dims.d_inner() + head_idx * d_head..];
            let has_state = chunk_idx > 0 || initial.is_some();
            let scores_at = scores_at(&dims, start, n_tok, head_idx / dims.heads_per_group());
            let series = inputs.steps(head_idx, (start, n_tok), buffer);
            let chunk_backward = ChunkBackward {
                chunk: Chunk {
                    head: inputs.head(head_idx, start, n_tok),
                    steps: series.steps,
                    scores: &scores[scores_at],
                    state: has_state.then(|| &states[chunk_idx * n_state..][..n_state]),
                },
                dy: Rows { data: dy, n_row: n_tok, width: d_head, stride: dims.d_inner() },
                has_after: chunk.end < segment.n_tok,
                wants_before: chunk_idx > 0,
            };
            let mut work = Work::new(work, d_head, dims.d_state, n_tok);
            let partial = &mut partial[chunk.start * partial_width(&dims)..];
            let [dscores, _, db, dc] = split(partial, partial_lengths(&dims, n_tok));
            let ddelta = &mut ddelta[idx * segment.n_tok..][chunk.clone()];
            let [down, ddecay] = split(terms, [n_tok; 2]);
            let terms = Terms { dinput: ddelta, down, ddecay };
            let partial = [dscores, db, dc];
            sums[2] += chunk_backward.run(cpu, &mut work, partial, dstate, terms);
            finish(&series, [down, ddecay], ddelta, &mut sums);
            for (dx, from) in dx[chunk].iter_mut().zip(work.dx.chunks(d_head)) {
                dx[idx * d_head..][..d_head].copy_from_slice(from);
            }
        }
        all_sums.push(sums);
    }
    all_sums
}

/// The states of one head before every chunk of the segment.
fn recompute_states(
    inputs: &Inputs,
    (head_idx, segment): (usize, &Segment),
    initial: Option<&[f32]>,
    (buffer, x_chunk): (&mut [f32], &mut [f32]),
    states: &mut [f32],
) {
    let (d_head, n_state) = (inputs.dims.d_head, inputs.dims.n_state());
    match initial {
        Some(initial) => states[..n_state].copy_from_slice(initial),
        None => states[..n_state].fill(0.0),
    }
    for (idx, chunk) in chunks(segment.n_tok).enumerate().take(segment.n_tok.div_ceil(CHUNK) - 1) {
        let [before, after] = split(&mut states[idx * n_state..], [n_state; 2]);
        after.copy_from_slice(before);
        let rows = (segment.start + chunk.start, chunk.len());
        let steps = inputs.steps(head_idx, rows, buffer).steps;
        let head = inputs.head(head_idx, rows.0, rows.1);
        let x_chunk = &mut x_chunk[..chunk.len() * d_head];
        advance(inputs.cpu(), &head, &steps, x_chunk, (steps.total(), after));
    }
}

/// From the gradient by the weights, in `ddelta` and `down`, and by the decays to that by the raw
/// step sizes.
fn finish(
    series: &StepSeries,
    [down, ddecay]: [&mut [f32]; 2],
    ddelta: &mut [f32],
    sums: &mut Sums,
) {
    let StepSeries { a, delta, slope, .. } = *series;
    for k in 0..delta.len() {
        let ddecay = a * ddecay[k];
        ddelta[k] = (ddelta[k] + down[k] + ddecay) * slope[k];
        sums[0] += ddelta[k] as f64;
        sums[1] += (ddecay * delta[k]) as f64;
    }
}

/// Columns b and c of `dxbc`: adds what the tasks of a group found, then what `dscores` gives.
fn sum_over_heads(
    inputs: &Inputs,
    segments: &Segments,
    n_block: usize,
    partial: &[f32],
    dxbc: &mut Tensor,
) {
    let (cpu, dims) = (inputs.cpu(), inputs.dims);
    let (stride, d_state) = (dims.width(), dims.d_state);
    let width = partial_width(&dims);
    let per_group = n_block / dims.n_group;
    let mut rest = dxbc.f32_mut();
    let mut tasks = Vec::new();
    for segment in segments.iter() {
        for chunk in chunks(segment.n_tok) {
            let rows = rest.split_off_mut(..chunk.len() * stride).expect("rows of a chunk");
            tasks.push((segment, chunk, rows));
        }
    }
    cpu.map(tasks, |(segment, chunk, rows)| {
        let n_tok = chunk.len();
        let mut dscores_sum = inputs.scratch(n_tok * n_tok);
        let dscores_sum = dscores_sum.f32_mut();
        for group in 0..dims.n_group {
            let (b, c) = dims.columns(group);
            dscores_sum.fill(0.0);
            for row in rows.chunks_mut(stride) {
                row[b..b + d_state].fill(0.0);
                row[c..c + d_state].fill(0.0);
            }
            for block in group * per_group..(group + 1) * per_group {
                let first = segment.start * n_block + block * segment.n_tok + chunk.start;
                let part = &partial[first * width..(first + n_tok) * width];
                let (dscores, part) = part.split_at(n_tok * CHUNK);
                let (db, dc) = part.split_at(n_tok * d_state);
                cpu.simd(AddInto { x: &dscores[..n_tok * n_tok], y: dscores_sum });
                for (tok, row) in rows.chunks_mut(stride).enumerate() {
                    let range = tok * d_state..(tok + 1) * d_state;
                    cpu.simd(AddInto { x: &db[range.clone()], y: &mut row[b..b + d_state] });
                    cpu.simd(AddInto { x: &dc[range], y: &mut row[c..c + d_state] });
                }
            }
            let head =
                inputs.head(group * dims.heads_per_group(), segment.start + chunk.start, n_tok);
            let dscores = Mat::new(dscores_sum, n_tok, n_tok);
            let db = MatMut::strided(&mut rows[b..], n_tok, d_state, stride);
            cpu.gemm(db, 1.0, 1.0, dscores.t(), head.c.mat(), Scope::Thread);
            let dc = MatMut::strided(&mut rows[c..], n_tok, d_state, stride);
            cpu.gemm(dc, 1.0, 1.0, dscores, head.b.mat(), Scope::Thread);
        }
    });
}
