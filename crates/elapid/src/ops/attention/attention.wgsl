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
const N_GROUP: u32 = N_HEAD / N_KV_HEAD;
const Q_WIDTH: u32 = N_HEAD * D;
const KV_WIDTH: u32 = N_KV_HEAD * D;
const N_RUN: u32 = (D + 63u) / 64u;
const N_SUM: u32 = 4u * N_RUN;
const SCORE_MIN: f32 = -1e30;

// (STEP, OWN / 4): of a column four own rows; or (16 others, 64 / 4): of a row four columns.
var<workgroup> tile: array<vec4<f32>, 256>;
var<workgroup> others: array<vec2<f32>, 256>; // (STEP, OTHER / 2): of a column two others
var<workgroup> s: array<vec4<f32>, 512>; // (OTHER, OWN / 4): of an other four own rows
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

// Numbers that a thread brings: from (row, col) of a head on, along rows or along columns. Nothing
// is at `end` and behind it.
struct Place {
    row: u32,
    end: u32,
    head: u32,
    col: u32,
    by_row: u32,
    by_col: u32,
}

// Of STEP columns from `col` on, four own rows of one.
fn own_place(thread: u32, row: u32, end: u32, head: u32, col: u32) -> Place {
    return Place(row + thread / 16u * 4u, end, head, col + thread % 16u, 1u, 0u);
}

// The same with two others.
fn other_place(thread: u32, row: u32, end: u32, head: u32, col: u32) -> Place {
    return Place(row + thread / 16u * 2u, end, head, col + thread % 16u, 1u, 0u);
}

// Of 16 rows, four columns of one.
fn wide_place(thread: u32, row: u32, end: u32, head: u32, col: u32) -> Place {
    return Place(row + thread / 16u, end, head, col + thread % 16u * 4u, 0u, 1u);
}

fn q_at(at: Place, i: u32) -> f32 {
    let row = at.row + i * at.by_row;
    let col = at.col + i * at.by_col;
    if row >= at.end || col >= D { return 0.0; }
    return q[row * Q_WIDTH + at.head * D + col];
}

fn k_at(at: Place, i: u32) -> f32 {
    let row = at.row + i * at.by_row;
    let col = at.col + i * at.by_col;
    if row >= at.end || col >= D { return 0.0; }
    return k[row * KV_WIDTH + at.head * D + col];
}

fn v_at(at: Place, i: u32) -> f32 {
    let row = at.row + i * at.by_row;
    let col = at.col + i * at.by_col;
    if row >= at.end || col >= D { return 0.0; }
    return v[row * KV_WIDTH + at.head * D + col];
}

fn q_two(at: Place) -> vec2<f32> {
    return vec2(q_at(at, 0u), q_at(at, 1u));
}

fn q_four(at: Place) -> vec4<f32> {
    return vec4(q_at(at, 0u), q_at(at, 1u), q_at(at, 2u), q_at(at, 3u));
}

fn k_two(at: Place) -> vec2<f32> {
    return vec2(k_at(at, 0u), k_at(at, 1u));
}

fn k_four(at: Place) -> vec4<f32> {
    return vec4(k_at(at, 0u), k_at(at, 1u), k_at(at, 2u), k_at(at, 3u));
}

fn v_two(at: Place) -> vec2<f32> {
    return vec2(v_at(at, 0u), v_at(at, 1u));
}

fn v_four(at: Place) -> vec4<f32> {
    return vec4(v_at(at, 0u), v_at(at, 1u), v_at(at, 2u), v_at(at, 3u));
}

// Where of column `c` (of an other) the numbers of row `y` lie: turned, so that neither those who
// write nor those who read meet in a bank.
fn turned(c: u32, y: u32) -> u32 {
    return c * 16u + (y ^ (c % 16u));
}

fn put_own(thread: u32, value: vec4<f32>) {
    tile[turned(thread % 16u, thread / 16u)] = value;
}

fn put_other(thread: u32, value: vec2<f32>) {
    others[turned(thread % 16u, thread / 16u)] = value;
}

fn put_wide(thread: u32, value: vec4<f32>) {
    tile[thread] = value;
}

// Adds STEP columns of the product of own rows and others.
fn multiply(thread: u32, sums: ptr<function, array<vec4<f32>, 2>>) {
    for (var c = 0u; c < STEP; c++) {
        let own = tile[turned(c, thread / 16u)];
        let other = others[turned(c, thread % 16u)];
        (*sums)[0] = fma(own, other.xxxx, (*sums)[0]);
        (*sums)[1] = fma(own, other.yyyy, (*sums)[1]);
    }
}

// Where in `s` the own rows 4y.. of an other lie.
fn score_at(other: u32, y: u32) -> u32 {
    return other * 16u + (y ^ (other / 2u));
}

fn score_of(other: u32, own: u32) -> f32 {
    return s[score_at(other, own / 4u)][own % 4u];
}

// Puts the scores of a thread into `s`.
fn put(thread: u32, scores: array<vec4<f32>, 2>) {
    let other = thread % 16u * 2u;
    s[score_at(other, thread / 16u)] = scores[0];
    s[score_at(other + 1u, thread / 16u)] = scores[1];
}

// Adds the product of `s` and the 16 others from `half` on in the tile, for one run of columns.
fn accumulate(thread: u32, half: u32, run: u32, sums: ptr<function, array<vec4<f32>, N_SUM>>) {
    for (var i = 0u; i < STEP; i++) {
        let other = tile[i * 16u + thread % 16u];
        let own = s[score_at(half + i, thread / 16u)];
        (*sums)[run] = fma(own.xxxx, other, (*sums)[run]);
        (*sums)[N_RUN + run] = fma(own.yyyy, other, (*sums)[N_RUN + run]);
        (*sums)[2u * N_RUN + run] = fma(own.zzzz, other, (*sums)[2u * N_RUN + run]);
        (*sums)[3u * N_RUN + run] = fma(own.wwww, other, (*sums)[3u * N_RUN + run]);
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
    let own_end = block.row + block.n;
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
            put_own(thread, q_four(own_place(thread, block.row, own_end, head, c)));
            put_other(thread, k_two(other_place(thread, row, row + n, kv_head, c)));
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
            for (var o = 0u; o < OTHER; o++) { next = max(next, score_of(o, thread)); }
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
            for (var o = 0u; o < OTHER; o++) { weight += score_of(o, thread); }
        }
        for (var run = 0u; run < N_RUN; run++) {
            for (var half = 0u; half < OTHER; half += STEP) {
                workgroupBarrier();
                let at = wide_place(thread, row + half, row + n, kv_head, run * 64u);
                put_wide(thread, v_four(at));
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

fn dy_at(at: Place, i: u32) -> f32 {
    let row = at.row + i * at.by_row;
    let col = at.col + i * at.by_col;
    if row >= at.end || col >= D { return 0.0; }
    return dy[row * Q_WIDTH + at.head * D + col];
}

fn dy_two(at: Place) -> vec2<f32> {
    return vec2(dy_at(at, 0u), dy_at(at, 1u));
}

fn dy_four(at: Place) -> vec4<f32> {
    return vec4(dy_at(at, 0u), dy_at(at, 1u), dy_at(at, 2u), dy_at(at, 3u));
}

@compute @workgroup_size(THREADS)
fn attention_dq(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let head = group_id.y;
    let kv_head = head / N_GROUP;
    let block = block_of(group_id.x);
    let own_end = block.row + block.n;
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
            put_own(thread, q_four(own_place(thread, block.row, own_end, head, c)));
            put_other(thread, k_two(other_place(thread, row, row + n, kv_head, c)));
            workgroupBarrier();
            multiply(thread, &scores);
        }
        for (var c = 0u; c < D; c += STEP) {
            workgroupBarrier();
            put_own(thread, dy_four(own_place(thread, block.row, own_end, head, c)));
            put_other(thread, v_two(other_place(thread, row, row + n, kv_head, c)));
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
                let at = wide_place(thread, row + half, row + n, kv_head, run * 64u);
                put_wide(thread, k_four(at));
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
    let own_end = block.row + block.n;
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
                put_own(thread, k_four(own_place(thread, block.row, own_end, kv_head, c)));
                put_other(thread, q_two(other_place(thread, row, row + n, head, c)));
                workgroupBarrier();
                multiply(thread, &scores);
            }
            for (var c = 0u; c < D; c += STEP) {
                workgroupBarrier();
                put_own(thread, v_four(own_place(thread, block.row, own_end, kv_head, c)));
                put_other(thread, dy_two(other_place(thread, row, row + n, head, c)));
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
                    let at = wide_place(thread, row + half, row + n, head, run * 64u);
                    put_wide(thread, dy_four(at));
                    workgroupBarrier();
                    accumulate(thread, half, run, &dv_sums);
                }
            }
            workgroupBarrier();
            put(thread, dp);
            for (var run = 0u; run < N_RUN; run++) {
                for (var half = 0u; half < OTHER; half += STEP) {
                    workgroupBarrier();
                    let at = wide_place(thread, row + half, row + n, head, run * 64u);
                    put_wide(thread, q_four(at));
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
