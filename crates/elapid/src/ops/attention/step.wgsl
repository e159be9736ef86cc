// A few new tokens of one sequence against its cache; see mod.rs. The keys are cut into splits of
// 64; a group takes one split, one token and the heads that share a key-value head, four at a time;
// what the splits give is merged in their order. Where the tokens are in their sequence is no
// parameter, see step.cu.

struct Params {
    first: u32, // row of the first new token
    n_new: u32,
    window: u32, // keys a query sees, itself included
    scale_log2: f32, // scale times log2(e)
    n_split: u32,
}

const SPLIT: u32 = 64u;
const STEP: u32 = 32u; // columns of keys at a time
const N_GROUP: u32 = N_HEAD / N_KV_HEAD;
const Q_WIDTH: u32 = N_HEAD * D;
const KV_WIDTH: u32 = N_KV_HEAD * D;
const SCORE_MIN: f32 = -1e30;

@group(0) @binding(0) var<storage, read> k_new: array<f32>; // (n_tok, KV_WIDTH)
@group(0) @binding(1) var<storage, read> v_new: array<f32>; // (n_tok, KV_WIDTH)
@group(0) @binding(2) var<storage, read> positions_append: array<u32>; // (n_tok)
@group(0) @binding(3) var<storage, read_write> keys_out: array<f32>; // (room, KV_WIDTH)
@group(0) @binding(4) var<storage, read_write> values_out: array<f32>; // (room, KV_WIDTH)
@group(0) @binding(5) var<uniform> p_append: Params;

// New keys and values go behind those of the past.
@compute @workgroup_size(THREADS)
fn attention_append(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n = p_append.n_new * KV_WIDTH;
    let to = positions_append[p_append.first] * KV_WIDTH;
    let n_threads = n_groups.x * n_groups.y * THREADS;
    for (var i = group_of(group_id, n_groups) * THREADS + thread; i < n; i += n_threads) {
        keys_out[to + i] = k_new[p_append.first * KV_WIDTH + i];
        values_out[to + i] = v_new[p_append.first * KV_WIDTH + i];
    }
}

@group(0) @binding(0) var<storage, read> q: array<f32>; // (n_tok, Q_WIDTH)
@group(0) @binding(1) var<storage, read> keys: array<f32>; // (room, KV_WIDTH)
@group(0) @binding(2) var<storage, read> values: array<f32>; // (room, KV_WIDTH)
@group(0) @binding(3) var<storage, read> positions: array<u32>; // (n_tok)
// (n_new, n_split, N_HEAD, D + 2): weighted sum of the values, largest score, sum of the weights
@group(0) @binding(4) var<storage, read_write> parts: array<f32>;
@group(0) @binding(5) var<uniform> p: Params;

var<workgroup> tile: array<f32, 2112>; // (SPLIT, STEP + 1)
var<workgroup> weights: array<f32, 256>; // (4 heads, SPLIT)
var<workgroup> sums: array<f32, 1024>; // (4 runs of keys, 4 heads, 64 columns)

@compute @workgroup_size(THREADS)
fn attention_step(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let kv_head = group_id.y;
    let n_past = positions[p.first];
    let pos = n_past + group_id.z;
    let first_split = (n_past + 1u - min(n_past + 1u, p.window)) / SPLIT;
    let j0 = (first_split + group_id.x) * SPLIT;
    let n_key = min(SPLIT, pos + 1u - min(pos + 1u, j0));
    let lane = thread % 64u; // a key, then a column
    let quarter = thread / 64u; // a head, then a run of keys
    let is_seen = lane < n_key && pos - (j0 + lane) < p.window;
    for (var h0 = 0u; h0 < N_GROUP; h0 += 4u) {
        let is_head = h0 + quarter < N_GROUP;
        let head = kv_head * N_GROUP + min(h0 + quarter, N_GROUP - 1u);
        let q_at = (p.first + group_id.z) * Q_WIDTH + head * D;
        var score = 0.0;
        for (var c0 = 0u; c0 < D; c0 += STEP) {
            workgroupBarrier();
            for (var i = thread; i < SPLIT * STEP; i += THREADS) {
                var x = 0.0;
                if i / STEP < n_key && c0 + i % STEP < D {
                    x = keys[(j0 + i / STEP) * KV_WIDTH + kv_head * D + c0 + i % STEP];
                }
                tile[i / STEP * (STEP + 1u) + i % STEP] = x;
            }
            workgroupBarrier();
            for (var c = 0u; c < min(STEP, D - c0); c++) {
                score += q[q_at + c0 + c] * tile[lane * (STEP + 1u) + c];
            }
        }
        score = select(SCORE_MIN, score * p.scale_log2, is_seen);
        weights[thread] = score;
        workgroupBarrier();
        var top = SCORE_MIN;
        for (var i = 0u; i < SPLIT; i++) { top = max(top, weights[quarter * SPLIT + i]); }
        workgroupBarrier();
        weights[thread] = select(0.0, exp2(score - top), is_seen);
        workgroupBarrier();
        var total = 0.0;
        for (var i = 0u; i < SPLIT; i++) { total += weights[quarter * SPLIT + i]; }
        let out = ((group_id.z * p.n_split + group_id.x) * N_HEAD + head) * (D + 2u);
        if is_head && lane == 0u {
            parts[out + D] = top;
            parts[out + D + 1u] = total;
        }
        for (var c0 = 0u; c0 < D; c0 += 64u) {
            var sum = vec4<f32>(0.0);
            if c0 + lane < D {
                for (var i = quarter * 16u; i < min(n_key, quarter * 16u + 16u); i++) {
                    let x = values[(j0 + i) * KV_WIDTH + kv_head * D + c0 + lane];
                    sum += x * vec4<f32>(weights[i], weights[SPLIT + i], weights[2u * SPLIT + i],
                                         weights[3u * SPLIT + i]);
                }
            }
            for (var h = 0u; h < 4u; h++) { sums[(quarter * 4u + h) * 64u + lane] = sum[h]; }
            workgroupBarrier();
            if is_head && c0 + lane < D {
                parts[out + c0 + lane] = sums[quarter * 64u + lane]
                    + sums[(4u + quarter) * 64u + lane]
                    + sums[(8u + quarter) * 64u + lane]
                    + sums[(12u + quarter) * 64u + lane];
            }
            workgroupBarrier();
        }
    }
}

@group(0) @binding(0) var<storage, read> parts_in: array<f32>; // (n_new, n_split, N_HEAD, D + 2)
@group(0) @binding(1) var<storage, read_write> y: array<f32>; // (n_tok, Q_WIDTH)
@group(0) @binding(2) var<uniform> p_merge: Params;

// A group for each head and token, a thread for each column.
@compute @workgroup_size(THREADS)
fn attention_merge(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let by = N_HEAD * (D + 2u);
    let at = group_id.y * p_merge.n_split * by + group_id.x * (D + 2u);
    var top = SCORE_MIN;
    for (var i = 0u; i < p_merge.n_split; i++) { top = max(top, parts_in[at + i * by + D]); }
    var total = 0.0;
    for (var i = 0u; i < p_merge.n_split; i++) {
        total += exp2(parts_in[at + i * by + D] - top) * parts_in[at + i * by + D + 1u];
    }
    for (var c = thread; c < D; c += THREADS) {
        var sum = 0.0;
        for (var i = 0u; i < p_merge.n_split; i++) {
            sum += exp2(parts_in[at + i * by + D] - top) * parts_in[at + i * by + c];
        }
        y[(p_merge.first + group_id.y) * Q_WIDTH + group_id.x * D + c] = sum / total;
    }
}
