// What a linear map needs beside its products; see gpu.rs. Rows are D numbers wide.
// HAS_Z, HAS_NORMS, FIXED, ADDS: 0 or 1, by entry; another buffer stands for what is absent.

@group(0) @binding(0) var<storage, read> bias: array<f32>; // (d_out)
@group(0) @binding(1) var<storage, read_write> y: array<f32>; // (n_rows, D) from `lead` on
struct BiasParams { n: u32, first: u32, lead: u32 }
@group(0) @binding(2) var<uniform> p_bias: BiasParams;

// y = bias in each row; the first column has number `first` of the bias.
@compute @workgroup_size(THREADS)
fn linear_bias(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_bias.n; i += n_groups.x * THREADS) {
        y[p_bias.lead + i] = bias[p_bias.first + i % D];
    }
}

@group(0) @binding(0) var<storage, read> factors: array<f32>; // (D)
@group(0) @binding(1) var<storage, read> x_scaled: array<f32>; // (n_rows, D)
@group(0) @binding(2) var<storage, read_write> y_scaled: array<f32>; // (n_rows, D) from `lead` on
struct ScaleParams { n: u32, lead: u32 }
@group(0) @binding(3) var<uniform> p_scale: ScaleParams;

// y = factor x, or with ADDS y += factor x, with a factor for each column.
@compute @workgroup_size(THREADS)
fn linear_scale(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_scale.n; i += n_groups.x * THREADS) {
        var value = factors[i % D] * x_scaled[i];
        if ADDS == 1u { value += y_scaled[p_scale.lead + i]; }
        y_scaled[p_scale.lead + i] = value;
    }
}

@group(0) @binding(0) var<storage, read> minuend: array<f32>; // (n)
@group(0) @binding(1) var<storage, read> subtrahend: array<f32>; // (n)
@group(0) @binding(2) var<storage, read_write> difference: array<f32>; // (n) from `lead` on
struct Params { n: u32, lead: u32 }
@group(0) @binding(3) var<uniform> p: Params;

@compute @workgroup_size(THREADS)
fn linear_subtract(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p.n; i += n_groups.x * THREADS) {
        difference[p.lead + i] = minuend[i] - subtrahend[i];
    }
}

@group(0) @binding(0) var<storage, read> dy: array<f32>; // (n_rows, D)
@group(0) @binding(1) var<storage, read> z: array<f32>; // (n_rows, D)
@group(0) @binding(2) var<storage, read_write> parts: array<f32>; // (n_parts, D)

// Sums of dy, or of dy z, over N_ROWS rows for THREADS columns.
@compute @workgroup_size(THREADS)
fn linear_sum(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let col = group_id.x * THREADS + thread;
    if col >= D { return; }
    let first = group_id.y * N_ROWS;
    var total = 0.0;
    for (var row = first; row < min(first + N_ROWS, p.n); row++) {
        var value = dy[row * D + col];
        if HAS_Z == 1u { value *= z[row * D + col]; }
        total += value;
    }
    parts[group_id.y * D + col] = total;
}

@group(0) @binding(0) var<storage, read> parts_in: array<f32>; // (n_parts, D)
@group(0) @binding(1) var<storage, read> norms_in: array<f32>; // (D)
@group(0) @binding(2) var<storage, read_write> sums: array<f32>; // (d_out)
struct SumParams { n_parts: u32, first: u32 }
@group(0) @binding(3) var<uniform> p_sum: SumParams;

// sums[first + col] += the sum over the parts in order, divided by a norm where there are norms.
@compute @workgroup_size(THREADS)
fn linear_sum_into(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let col = group_id.x * THREADS + thread;
    if col >= D { return; }
    var total = 0.0;
    for (var part = 0u; part < p_sum.n_parts; part++) {
        total += parts_in[part * D + col];
    }
    if HAS_NORMS == 1u { total /= norms_in[col]; }
    sums[p_sum.first + col] += total;
}

@group(0) @binding(0) var<storage, read> squares: array<f32>; // (d_out), the norms where FIXED
@group(0) @binding(1) var<storage, read> m: array<f32>; // (d_out)
@group(0) @binding(2) var<storage, read> b: array<f32>; // (d_out, D)
@group(0) @binding(3) var<storage, read> wa: array<f32>; // (n, D)
@group(0) @binding(4) var<storage, read> baa: array<f32>; // (n, D)
@group(0) @binding(5) var<storage, read_write> norms: array<f32>; // (n)
@group(0) @binding(6) var<storage, read_write> ratios: array<f32>; // (n)
struct NormParams { n: u32, first: u32, scale: f32 }
@group(0) @binding(7) var<uniform> p_norm: NormParams;

// Lengths of n rows of the adapted weight from `first` on, and m over them; D is the rank here.
@compute @workgroup_size(THREADS)
fn linear_norms(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    for (var i = id.x; i < p_norm.n; i += n_groups.x * THREADS) {
        let row = p_norm.first + i;
        var norm = squares[row];
        if FIXED == 0u {
            var more = 0.0;
            for (var r = 0u; r < D; r++) {
                more += b[row * D + r] * (2.0 * wa[i * D + r] + p_norm.scale * baa[i * D + r]);
            }
            norm = sqrt(max(norm + p_norm.scale * more, 1e-24));
        }
        norms[i] = norm;
        ratios[i] = m[row] / norm;
    }
}

@group(0) @binding(0) var<storage, read> x: array<f32>; // (n_rows, D)
@group(0) @binding(1) var<storage, read_write> kept: array<f32>; // (n_rows, D) from `lead` on
// Two words of a key and of a stream; numbers whose sixteen bits are below `dropped` are left out.
struct DropParams {
    key: vec2<u32>,
    stream: vec2<u32>,
    n_rows: u32,
    first_row: u32,
    lead: u32,
    dropped: u32,
    factor: f32,
}
@group(0) @binding(2) var<uniform> p_drop: DropParams;

// The upper and the lower word of a product.
fn wide_product(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 65535u) * (b & 65535u);
    let cross = (a >> 16u) * (b & 65535u) + (low >> 16u);
    let other = (a & 65535u) * (b >> 16u) + (cross & 65535u);
    return vec2((a >> 16u) * (b >> 16u) + (cross >> 16u) + (other >> 16u), a * b);
}

// Philox4x32-10, as in rng.rs.
fn random_block(counter: vec2<u32>) -> vec4<u32> {
    var v = vec4(counter, p_drop.stream);
    var key = p_drop.key;
    for (var i = 0u; i < 10u; i++) {
        let s = wide_product(0xD2511F53u, v.x);
        let t = wide_product(0xCD9E8D57u, v.z);
        v = vec4(t.x ^ v.y ^ key.x, t.y, s.x ^ v.w ^ key.y, s.y);
        key += vec2(0x9E3779B9u, 0xBB67AE85u);
    }
    return v;
}

// y = drop(x), or with ADDS y += drop(x): a thread makes one block, which decides eight numbers.
@compute @workgroup_size(THREADS)
fn linear_dropout(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    let n_runs = (D + 127u) / 128u;
    for (var at = id.x; at < p_drop.n_rows * n_runs * 16u; at += n_groups.x * THREADS) {
        let run = at / 16u;
        let lane = at % 16u;
        let row = run / n_runs;
        let begin = run % n_runs * 128u + lane;
        // The counter of the run, times sixteen: 64 bits.
        let counter = (p_drop.first_row + row) * n_runs + run % n_runs;
        let bits = random_block(vec2(counter * 16u + lane, counter >> 28u));
        for (var i = 0u; i < 8u; i++) {
            let col = begin + i * 16u;
            if col < D {
                let own = (bits[i / 2u] >> (i % 2u * 16u)) & 65535u;
                var value = x[row * D + col] * select(p_drop.factor, 0.0, own < p_drop.dropped);
                let to = p_drop.lead + row * D + col;
                if ADDS == 1u { value += kept[to]; }
                kept[to] = value;
            }
        }
    }
}
