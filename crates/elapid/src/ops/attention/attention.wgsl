// Attention without its matrix, forward and backward; see mod.rs for the mathematics.
//
// A group owns OWN rows of one head (queries in forward and dq, keys in dkv) and walks over those
// it meets, OTHER at a time: a product of tiles gives scores, which lie in `s` with the own rows
// side by side, and a second product adds to sums in registers. Thread (y, x) of 16 by 16 has own
// rows 4y.. and, of scores, others 2x.., of sums, columns 4x.. of each run of 64.
//
// D: d_head. CACHED: keys and values are those of one sequence from its beginning on, and queries
// its last n_new tokens; otherwise `blocks` says where the groups are, and keys lie beside queries.
// Variables in a loop are given their zeros: naga would leave those of the turn before.

struct Params {
    n_tok: u32, // rows of q
    window: u32, // keys a query sees, itself included
    scale: f32,
    scale_log2: f32, // times log2(e)
    first: u32, // cached: row of the first new token
    n_new: u32,
    n_past: u32,
}

@group(0) @binding(0) var<storage, read> q: array<f32>; // (n_tok, N_HEAD * D)
@group(0) @binding(1) var<storage, read> k: array<f32>; // (keys, N_KV_HEAD * D)
@group(0) @binding(2) var<storage, read> v: array<f32>; // (keys, N_KV_HEAD * D)
@group(0) @binding(3) var<storage, read> blocks: array<u32>; // (n_block, 4), see `block_of`

const OWN: u32 = 64u;
const OTHER: u32 = 32u;
const STEP: u32 = 16u; // columns that a product takes at a time
const OWN_LINE: u32 = 68u; // OWN and a gap
const OTHER_LINE: u32 = 36u;
const N_GROUP: u32 = N_HEAD / N_KV_HEAD;
const Q_WIDTH: u32 = N_HEAD * D;
const KV_WIDTH: u32 = N_KV_HEAD * D;
const N_RUN: u32 = (D + 63u) / 64u;
const N_SUM: u32 = 4u * N_RUN;
const SCORE_MIN: f32 = -1e30;

// STEP columns of own rows and of others, or 16 others and 64 of their columns.
var<workgroup> tile: array<f32, 1664>;
var<workgroup> s: array<f32, 2176>; // (OTHER, OWN_LINE)
var<workgroup> row_top: array<f32, 64>;
var<workgroup> row_fix: array<f32, 64>;

struct Block {
    row: u32, // the first own row
    n: u32, // own rows
    pos: u32, // place of the first in its sequence
    n_tok: u32, // tokens of the sequence
    base: u32, // row of its first key
}

fn block_of(idx: u32) -> Block {
    let at = 4u * idx;
    return Block(blocks[at], blocks[at + 1u], blocks[at + 2u], blocks[at + 3u],
                 blocks[at] - blocks[at + 2u]);
}

// Whether the query at place i sees the key at place j.
fn sees(i: u32, j: u32, window: u32) -> bool {
    return j <= i && i - j < window;
}

// Some rows and columns of a matrix, and where they go in `tile`.
struct Load {
    row: u32,
    n_row: u32, // those that are there; others are zero
    col: u32, // of the head, and
    head: u32,
    rows: u32,
    cols: u32,
    at: u32,
    by_row: u32,
    by_col: u32,
}

fn own_load(row: u32, n: u32, head: u32, col: u32) -> Load {
    return Load(row, n, col, head, OWN, STEP, 0u, 1u, OWN_LINE);
}

fn other_load(row: u32, n: u32, head: u32, col: u32) -> Load {
    return Load(row, n, col, head, OTHER, STEP, STEP * OWN_LINE, 1u, OTHER_LINE);
}

fn wide_load(row: u32, n: u32, head: u32, col: u32) -> Load {
    return Load(row, n, col, head, STEP, 64u, 0u, 64u, 1u);
}

fn load_q(thread: u32, to: Load) {
    for (var i = thread; i < to.rows * to.cols; i += THREADS) {
        let row = i / to.cols;
        let col = i % to.cols;
        var x = 0.0;
        if row < to.n_row && to.col + col < D {
            x = q[(to.row + row) * Q_WIDTH + to.head * D + to.col + col];
        }
        tile[to.at + row * to.by_row + col * to.by_col] = x;
    }
}

fn load_k(thread: u32, to: Load) {
    for (var i = thread; i < to.rows * to.cols; i += THREADS) {
        let row = i / to.cols;
        let col = i % to.cols;
        var x = 0.0;
        if row < to.n_row && to.col + col < D {
            x = k[(to.row + row) * KV_WIDTH + to.head * D + to.col + col];
        }
        tile[to.at + row * to.by_row + col * to.by_col] = x;
    }
}

fn load_v(thread: u32, to: Load) {
    for (var i = thread; i < to.rows * to.cols; i += THREADS) {
        let row = i / to.cols;
        let col = i % to.cols;
        var x = 0.0;
        if row < to.n_row && to.col + col < D {
            x = v[(to.row + row) * KV_WIDTH + to.head * D + to.col + col];
        }
        tile[to.at + row * to.by_row + col * to.by_col] = x;
    }
}

// Adds STEP columns of the product of own rows and others.
fn multiply(thread: u32, sums: ptr<function, array<vec4<f32>, 2>>) {
    let y = thread / 16u * 4u;
    let x = STEP * OWN_LINE + thread % 16u * 2u;
    for (var c = 0u; c < STEP; c++) {
        let at = c * OWN_LINE + y;
        let own = vec4<f32>(tile[at], tile[at + 1u], tile[at + 2u], tile[at + 3u]);
        (*sums)[0] += own * tile[c * OTHER_LINE + x];
        (*sums)[1] += own * tile[c * OTHER_LINE + x + 1u];
    }
}

// Puts the scores of a thread into `s`.
fn put(thread: u32, scores: array<vec4<f32>, 2>) {
    let at = thread % 16u * 2u * OWN_LINE + thread / 16u * 4u;
    for (var i = 0u; i < 4u; i++) {
        s[at + i] = scores[0][i];
        s[at + OWN_LINE + i] = scores[1][i];
    }
}

// Adds the product of `s` and the 16 others from `half` on in the tile, for one run of columns.
fn accumulate(thread: u32, half: u32, run: u32, sums: ptr<function, array<vec4<f32>, N_SUM>>) {
    let y = thread / 16u * 4u;
    let x = thread % 16u * 4u;
    for (var i = 0u; i < STEP; i++) {
        let at = i * 64u + x;
        let other = vec4<f32>(tile[at], tile[at + 1u], tile[at + 2u], tile[at + 3u]);
        let row = (half + i) * OWN_LINE + y;
        (*sums)[run] += s[row] * other;
        (*sums)[N_RUN + run] += s[row + 1u] * other;
        (*sums)[2u * N_RUN + run] += s[row + 2u] * other;
        (*sums)[3u * N_RUN + run] += s[row + 3u] * other;
    }
}

@group(0) @binding(4) var<storage, read_write> y: array<f32>; // (n_tok, N_HEAD * D)
@group(0) @binding(5) var<storage, read_write> log_sum: array<f32>; // (N_HEAD, n_tok)
@group(0) @binding(6) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn attention_forward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.y;
    let kv_head = head / N_GROUP;
    var block: Block;
    if CACHED == 1u {
        let at = group_id.x * OWN;
        block = Block(p.first + at, min(OWN, p.n_new - at), p.n_past + at, p.n_past + p.n_new, 0u);
    } else {
        block = block_of(group_id.x);
    }
    let i0 = block.pos + thread / 16u * 4u;
    var sums: array<vec4<f32>, N_SUM>;
    // Of the own row of this thread, for the first 64 of them.
    var top = SCORE_MIN;
    var weight = 0.0;
    let end = block.pos + block.n;
    let start = block.pos - min(block.pos, p.window - 1u);
    for (var j0 = start - start % OTHER; j0 < end; j0 += OTHER) {
        let row = block.base + j0;
        let n = min(OTHER, end - j0);
        var scores = array<vec4<f32>, 2>();
        for (var c = 0u; c < D; c += STEP) {
            workgroupBarrier();
            load_q(thread, own_load(block.row, block.n, head, c));
            load_k(thread, other_load(row, n, kv_head, c));
            workgroupBarrier();
            multiply(thread, &scores);
        }
        let j = j0 + thread % 16u * 2u;
        for (var i = 0u; i < 4u; i++) {
            for (var o = 0u; o < 2u; o++) {
                scores[o][i] = select(SCORE_MIN, scores[o][i] * p.scale_log2,
                                      sees(i0 + i, j + o, p.window));
            }
        }
        put(thread, scores);
        workgroupBarrier();
        if thread < OWN {
            var next = top;
            for (var o = 0u; o < OTHER; o++) { next = max(next, s[o * OWN_LINE + thread]); }
            row_top[thread] = next;
            row_fix[thread] = exp2(top - next);
            top = next;
        }
        workgroupBarrier();
        for (var i = 0u; i < 4u; i++) {
            let row_max = row_top[thread / 16u * 4u + i];
            let fix = row_fix[thread / 16u * 4u + i];
            for (var o = 0u; o < 2u; o++) {
                scores[o][i] = select(0.0, exp2(scores[o][i] - row_max),
                                      sees(i0 + i, j + o, p.window));
            }
            for (var run = 0u; run < N_RUN; run++) { sums[i * N_RUN + run] *= fix; }
        }
        put(thread, scores);
        workgroupBarrier();
        if thread < OWN {
            weight *= row_fix[thread];
            for (var o = 0u; o < OTHER; o++) { weight += s[o * OWN_LINE + thread]; }
        }
        for (var run = 0u; run < N_RUN; run++) {
            for (var half = 0u; half < OTHER; half += STEP) {
                workgroupBarrier();
                load_v(thread, wide_load(row + half, n - min(n, half), kv_head, run * 64u));
                workgroupBarrier();
                accumulate(thread, half, run, &sums);
            }
        }
    }
    workgroupBarrier();
    if thread < OWN {
        row_fix[thread] = 1.0 / weight;
        if thread < block.n {
            log_sum[head * p.n_tok + block.row + thread] = top + log2(weight);
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        let own = thread / 16u * 4u + i;
        if own >= block.n { break; }
        for (var run = 0u; run < N_RUN; run++) {
            let out = sums[i * N_RUN + run] * row_fix[own];
            let col = run * 64u + thread % 16u * 4u;
            let at = (block.row + own) * Q_WIDTH + head * D + col;
            for (var c = 0u; c < 4u; c++) {
                if col + c < D { y[at + c] = out[c]; }
            }
        }
    }
}

@group(0) @binding(0) var<storage, read> dy_in: array<f32>; // (n_tok, N_HEAD * D)
@group(0) @binding(1) var<storage, read> y_in: array<f32>; // (n_tok, N_HEAD * D)
@group(0) @binding(2) var<storage, read> log_sum_in: array<f32>; // (N_HEAD, n_tok)
@group(0) @binding(3) var<storage, read_write> stats_out: array<f32>; // (2, N_HEAD, n_tok)
@group(0) @binding(4) var<uniform> p_stats: Params;

// log_sum, and dy . y: what backward needs of each query. A thread for each row and head.
@compute @workgroup_size(THREADS)
fn attention_stats(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n = p_stats.n_tok * N_HEAD;
    let n_threads = n_groups.x * n_groups.y * THREADS;
    for (var i = group_of(group_id, n_groups) * THREADS + thread; i < n; i += n_threads) {
        var dot = 0.0;
        for (var c = i * D; c < i * D + D; c++) { dot += dy_in[c] * y_in[c]; }
        let at = i % N_HEAD * p_stats.n_tok + i / N_HEAD;
        stats_out[at] = log_sum_in[at];
        stats_out[n + at] = dot;
    }
}

@group(0) @binding(4) var<storage, read> dy: array<f32>; // (n_tok, N_HEAD * D)
@group(0) @binding(5) var<storage, read> stats: array<f32>; // (2, N_HEAD, n_tok)
@group(0) @binding(6) var<storage, read_write> dq: array<f32>; // (n_tok, N_HEAD * D)
@group(0) @binding(7) var<uniform> p_dq: Params;

fn load_dy(thread: u32, to: Load) {
    for (var i = thread; i < to.rows * to.cols; i += THREADS) {
        let row = i / to.cols;
        let col = i % to.cols;
        var x = 0.0;
        if row < to.n_row && to.col + col < D {
            x = dy[(to.row + row) * Q_WIDTH + to.head * D + to.col + col];
        }
        tile[to.at + row * to.by_row + col * to.by_col] = x;
    }
}

@compute @workgroup_size(THREADS)
fn attention_dq(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.y;
    let kv_head = head / N_GROUP;
    let block = block_of(group_id.x);
    let y0 = thread / 16u * 4u;
    var sums: array<vec4<f32>, N_SUM>;
    var top: vec4<f32>;
    var dot: vec4<f32>;
    for (var i = 0u; i < min(4u, block.n - min(block.n, y0)); i++) {
        let at = head * p_dq.n_tok + block.row + y0 + i;
        top[i] = stats[at];
        dot[i] = stats[N_HEAD * p_dq.n_tok + at];
    }
    let end = block.pos + block.n;
    let start = block.pos - min(block.pos, p_dq.window - 1u);
    for (var j0 = start - start % OTHER; j0 < end; j0 += OTHER) {
        let row = block.base + j0;
        let n = min(OTHER, end - j0);
        var scores = array<vec4<f32>, 2>();
        var dp = array<vec4<f32>, 2>();
        for (var c = 0u; c < D; c += STEP) {
            workgroupBarrier();
            load_q(thread, own_load(block.row, block.n, head, c));
            load_k(thread, other_load(row, n, kv_head, c));
            workgroupBarrier();
            multiply(thread, &scores);
        }
        for (var c = 0u; c < D; c += STEP) {
            workgroupBarrier();
            load_dy(thread, own_load(block.row, block.n, head, c));
            load_v(thread, other_load(row, n, kv_head, c));
            workgroupBarrier();
            multiply(thread, &dp);
        }
        let j = j0 + thread % 16u * 2u;
        for (var o = 0u; o < 2u; o++) {
            for (var i = 0u; i < 4u; i++) {
                let weight = select(0.0, exp2(scores[o][i] * p_dq.scale_log2 - top[i]),
                                    sees(block.pos + y0 + i, j + o, p_dq.window));
                scores[o][i] = weight * (dp[o][i] - dot[i]);
            }
        }
        put(thread, scores);
        for (var run = 0u; run < N_RUN; run++) {
            for (var half = 0u; half < OTHER; half += STEP) {
                workgroupBarrier();
                load_k(thread, wide_load(row + half, n - min(n, half), kv_head, run * 64u));
                workgroupBarrier();
                accumulate(thread, half, run, &sums);
            }
        }
    }
    for (var i = 0u; i < 4u; i++) {
        if y0 + i >= block.n { break; }
        for (var run = 0u; run < N_RUN; run++) {
            let out = sums[i * N_RUN + run] * p_dq.scale;
            let col = run * 64u + thread % 16u * 4u;
            let at = (block.row + y0 + i) * Q_WIDTH + head * D + col;
            for (var c = 0u; c < 4u; c++) {
                if col + c < D { dq[at + c] = out[c]; }
            }
        }
    }
}

@group(0) @binding(6) var<storage, read_write> dk: array<f32>; // (n_tok, N_KV_HEAD * D)
@group(0) @binding(7) var<storage, read_write> dv: array<f32>; // (n_tok, N_KV_HEAD * D)
@group(0) @binding(8) var<uniform> p_dkv: Params;

// The own rows are keys, the others queries of one head after the other.
@compute @workgroup_size(THREADS)
fn attention_dkv(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let kv_head = group_id.y;
    let block = block_of(group_id.x);
    let y0 = thread / 16u * 4u;
    var dk_sums: array<vec4<f32>, N_SUM>;
    var dv_sums: array<vec4<f32>, N_SUM>;
    let last = block.pos + block.n - 1u;
    let end = last + min(block.n_tok - last, p_dkv.window);
    for (var head = kv_head * N_GROUP; head < (kv_head + 1u) * N_GROUP; head++) {
        for (var i0 = block.pos; i0 < end; i0 += OTHER) {
            let row = block.base + i0;
            let n = min(OTHER, end - i0);
            var scores = array<vec4<f32>, 2>();
            var dp = array<vec4<f32>, 2>();
            for (var c = 0u; c < D; c += STEP) {
                workgroupBarrier();
                load_k(thread, own_load(block.row, block.n, kv_head, c));
                load_q(thread, other_load(row, n, head, c));
                workgroupBarrier();
                multiply(thread, &scores);
            }
            for (var c = 0u; c < D; c += STEP) {
                workgroupBarrier();
                load_v(thread, own_load(block.row, block.n, kv_head, c));
                load_dy(thread, other_load(row, n, head, c));
                workgroupBarrier();
                multiply(thread, &dp);
            }
            for (var o = 0u; o < 2u; o++) {
                let other = thread % 16u * 2u + o;
                let at = head * p_dkv.n_tok + row + min(other, n - 1u);
                let top = stats[at];
                let dot = stats[N_HEAD * p_dkv.n_tok + at];
                for (var i = 0u; i < 4u; i++) {
                    let weight = select(0.0, exp2(scores[o][i] * p_dkv.scale_log2 - top),
                                        other < n
                                            && sees(i0 + other, block.pos + y0 + i, p_dkv.window));
                    scores[o][i] = weight;
                    dp[o][i] = weight * (dp[o][i] - dot);
                }
            }
            put(thread, scores);
            for (var run = 0u; run < N_RUN; run++) {
                for (var half = 0u; half < OTHER; half += STEP) {
                    workgroupBarrier();
                    load_dy(thread, wide_load(row + half, n - min(n, half), head, run * 64u));
                    workgroupBarrier();
                    accumulate(thread, half, run, &dv_sums);
                }
            }
            workgroupBarrier();
            put(thread, dp);
            for (var run = 0u; run < N_RUN; run++) {
                for (var half = 0u; half < OTHER; half += STEP) {
                    workgroupBarrier();
                    load_q(thread, wide_load(row + half, n - min(n, half), head, run * 64u));
                    workgroupBarrier();
                    accumulate(thread, half, run, &dk_sums);
                }
            }
        }
    }
    for (var i = 0u; i < 4u; i++) {
        if y0 + i >= block.n { break; }
        for (var run = 0u; run < N_RUN; run++) {
            let col = run * 64u + thread % 16u * 4u;
            let at = (block.row + y0 + i) * KV_WIDTH + kv_head * D + col;
            for (var c = 0u; c < 4u; c++) {
                if col + c < D {
                    dk[at + c] = dk_sums[i * N_RUN + run][c] * p_dkv.scale;
                    dv[at + c] = dv_sums[i * N_RUN + run][c];
                }
            }
        }
    }
}
