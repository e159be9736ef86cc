// Balance loss of experts and its gradient; see balance.rs. A group takes a row of N_EXPERT logits.

@group(0) @binding(0) var<storage, read> logits: array<f32>; // (n_tok, N_EXPERT)
@group(0) @binding(1) var<storage, read> f: array<f32>; // (N_EXPERT)
@group(0) @binding(2) var<storage, read_write> parts: array<f32>; // (n_tok)
struct Params { n_tok: u32, scale: f32 }
@group(0) @binding(3) var<uniform> p: Params;

// The largest logit of a row, and 1 / the sum of e^(logit - largest).
fn softmax_row(thread: u32, row: u32) -> vec2<f32> {
    var top = -3.4e38;
    for (var e = thread; e < N_EXPERT; e += THREADS) {
        top = max(top, logits[row * N_EXPERT + e]);
    }
    let largest = group_max(thread, top);
    var sum = 0.0;
    for (var e = thread; e < N_EXPERT; e += THREADS) {
        sum += exp(logits[row * N_EXPERT + e] - largest);
    }
    return vec2(largest, 1.0 / group_sum(thread, sum));
}

// parts[row] = sum of f p
@compute @workgroup_size(THREADS)
fn balance_rows(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p.n_tok { return; }
    let softmax = softmax_row(thread, row);
    var sum = 0.0;
    for (var e = thread; e < N_EXPERT; e += THREADS) {
        sum += f[e] * (exp(logits[row * N_EXPERT + e] - softmax.x) * softmax.y);
    }
    let mean = group_sum(thread, sum);
    if thread == 0u { parts[row] = mean; }
}

@group(0) @binding(0) var<storage, read> rows: array<f32>; // (n_tok)
@group(0) @binding(1) var<storage, read_write> loss: array<f32>; // (1)
@group(0) @binding(2) var<uniform> p_sum: Params;

// loss = scale times the sum of all rows; one group.
@compute @workgroup_size(THREADS)
fn balance_sum(@builtin(local_invocation_index) thread: u32) {
    var sum = 0.0;
    for (var row = thread; row < p_sum.n_tok; row += THREADS) { sum += rows[row]; }
    let total = group_sum(thread, sum);
    if thread == 0u { loss[0] = p_sum.scale * total; }
}

@group(0) @binding(2) var<storage, read> dloss: array<f32>; // (1)
@group(0) @binding(3) var<storage, read_write> dlogits: array<f32>; // (n_tok, N_EXPERT)
@group(0) @binding(4) var<uniform> p_back: Params;

@compute @workgroup_size(THREADS)
fn balance_backward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let row = group_of(group_id, n_groups);
    if row >= p_back.n_tok { return; }
    let softmax = softmax_row(thread, row);
    var sum = 0.0;
    for (var e = thread; e < N_EXPERT; e += THREADS) {
        sum += f[e] * (exp(logits[row * N_EXPERT + e] - softmax.x) * softmax.y);
    }
    let mean = group_sum(thread, sum);
    let scale = p_back.scale * dloss[0];
    for (var e = thread; e < N_EXPERT; e += THREADS) {
        let prob = exp(logits[row * N_EXPERT + e] - softmax.x) * softmax.y;
        dlogits[row * N_EXPERT + e] = scale * prob * (f[e] - mean);
    }
}
