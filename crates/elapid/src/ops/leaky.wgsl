// h = a h + (1 - a) tanh(x) along segments, and its gradients; see leaky.rs. A thread takes one of
// D channels of one segment; `n` counts both.

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n_tok, D)
@group(0) @binding(1) var<storage, read> decay: array<f32>; // (D)
@group(0) @binding(2) var<storage, read> start: array<f32>; // (n_seg, D)
@group(0) @binding(3) var<storage, read> begins: array<u32>; // (n_seg + 1)
@group(0) @binding(4) var<storage, read_write> h: array<f32>; // (n_tok, D)
struct Params { n: u32 }
@group(0) @binding(5) var<uniform> p: Params;

// Past this tanh is one; some drivers make a NaN of larger arguments.
fn tanh_of(x: f32) -> f32 {
    return tanh(clamp(x, -15.0, 15.0));
}

@compute @workgroup_size(THREADS)
fn leaky_forward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        let ch = i % D;
        let a = sigmoid(decay[ch]);
        var state = start[i];
        for (var tok = begins[i / D]; tok < begins[i / D + 1u]; tok++) {
            state = a * state + (1.0 - a) * tanh_of(x[tok * D + ch]);
            h[tok * D + ch] = state;
        }
    }
}

@group(0) @binding(3) var<storage, read> h_kept: array<f32>; // (n_tok, D)
@group(0) @binding(4) var<storage, read> dh: array<f32>; // (n_tok, D)
@group(0) @binding(5) var<storage, read> begins_back: array<u32>; // (n_seg + 1)
@group(0) @binding(6) var<storage, read_write> dx: array<f32>; // (n_tok, D)
// For each segment, the gradients of the decays (n_seg, D), then of the states (n_seg, D).
@group(0) @binding(7) var<storage, read_write> both: array<f32>;
@group(0) @binding(8) var<uniform> p_back: Params;

@compute @workgroup_size(THREADS)
fn leaky_backward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_back.n; i += n_groups.x * THREADS) {
        let ch = i % D;
        let a = sigmoid(decay[ch]);
        let first = begins_back[i / D];
        var g = 0.0;
        var sum = 0.0;
        for (var tok = begins_back[i / D + 1u]; tok > first; tok--) {
            let at = (tok - 1u) * D + ch;
            var before = start[i];
            if tok - 1u > first { before = h_kept[at - D]; }
            let t = tanh_of(x[at]);
            g = dh[at] + a * g;
            dx[at] = g * (1.0 - a) * (1.0 - t * t);
            sum += g * (before - t);
        }
        both[i] = sum * a * (1.0 - a);
        both[p_back.n + i] = a * g;
    }
}

@group(0) @binding(0) var<storage, read> parts: array<f32>; // (n_seg, D), and more
@group(0) @binding(1) var<storage, read_write> ddecay: array<f32>; // (D)
struct ParamsSum { n_seg: u32 }
@group(0) @binding(2) var<uniform> p_sum: ParamsSum;

@compute @workgroup_size(THREADS)
fn leaky_sum(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var ch = id.x; ch < D; ch += n_groups.x * THREADS) {
        var sum = 0.0;
        for (var segment = 0u; segment < p_sum.n_seg; segment++) { sum += parts[segment * D + ch]; }
        ddecay[ch] = sum;
    }
}
