// y = f(gate) up, and its gradients; see activation.rs. KIND: 0 SiLU, 1 GELU, 2 ReLU, 3 tanh.
// GATED is 0 where there is no `up`, whose place another buffer then takes.

@group(0) @binding(0) var<storage, read> gate: array<f32>; // (n)
@group(0) @binding(1) var<storage, read> up: array<f32>; // (n)
@group(0) @binding(2) var<storage, read_write> y: array<f32>; // (n)
struct Params { n: u32 }
@group(0) @binding(3) var<uniform> p: Params;

// Past this tanh is one; some drivers make a NaN of larger arguments.
fn tanh_of(x: f32) -> f32 {
    return tanh(clamp(x, -15.0, 15.0));
}

// f and f' at x.
fn value_and_slope(x: f32) -> vec2<f32> {
    if KIND == 0u {
        let s = sigmoid(x);
        return vec2(x * s, s * (1.0 + x * (1.0 - s)));
    }
    if KIND == 1u {
        let root = 0.7978845608028654;
        let u = root * x * (1.0 + 0.044715 * x * x);
        let du = root * (1.0 + 3.0 * 0.044715 * x * x);
        let t = tanh_of(u);
        return vec2(0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * du);
    }
    if KIND == 3u {
        let t = tanh_of(x);
        return vec2(t, 1.0 - t * t);
    }
    return vec2(max(x, 0.0), select(0.0, 1.0, x > 0.0));
}

@compute @workgroup_size(THREADS)
fn activation_forward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        var value = value_and_slope(gate[i]).x;
        if GATED == 1u { value *= up[i]; }
        y[i] = value;
    }
}

@group(0) @binding(2) var<storage, read> dy: array<f32>; // (n)
@group(0) @binding(3) var<storage, read_write> dgate: array<f32>; // (n)
@group(0) @binding(4) var<storage, read_write> dup: array<f32>; // (n), or (1)
@group(0) @binding(5) var<uniform> p_back: Params;

@compute @workgroup_size(THREADS)
fn activation_backward(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_back.n; i += n_groups.x * THREADS) {
        let f = value_and_slope(gate[i]);
        if GATED == 1u {
            dgate[i] = f.y * up[i] * dy[i];
            dup[i] = f.x * dy[i];
        } else {
            dgate[i] = f.y * dy[i];
        }
    }
}
