// The last sums of the backward of the selective scan, in order; goes with scan.wgsl.

@group(0) @binding(0) var<storage, read> shared_in: array<f32>; // (N_GROUPS, n_tok, 2, D_STATE)
@group(0) @binding(1) var<storage, read_write> db: array<f32>; // (n_tok, D_STATE)
@group(0) @binding(2) var<storage, read_write> dc: array<f32>; // (n_tok, D_STATE)
@group(0) @binding(3) var<uniform> p_shared: Params;

// db and dc: over the groups of channels.
@compute @workgroup_size(THREADS)
fn scan_sum_shared(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
) {
    let len = p_shared.n_tok * 2u * D_STATE;
    for (var i = id.x; i < len; i += n_groups.x * THREADS) {
        var total = 0.0;
        for (var group = 0u; group < N_GROUPS; group++) { total += shared_in[group * len + i]; }
        let at = i / (2u * D_STATE) * D_STATE + i % D_STATE;
        if i / D_STATE % 2u == 0u { db[at] = total; } else { dc[at] = total; }
    }
}

@group(0) @binding(0) var<storage, read> held_in: array<f32>; // (n_subs + n_pieces), states
@group(0) @binding(1) var<storage, read> parts_in: array<f32>; // (n_parts, 2, D_INNER)
@group(0) @binding(3) var<storage, read_write> da_log: array<f32>; // (D_INNER, D_STATE)
@group(0) @binding(4) var<storage, read_write> dskip_out: array<f32>; // (D_INNER)
@group(0) @binding(5) var<storage, read_write> dbias_out: array<f32>; // (D_INNER)
@group(0) @binding(6) var<uniform> p_sums: Params;

// da_log over pieces, dskip and ddelta_bias over parts.
@compute @workgroup_size(THREADS)
fn scan_sums(@builtin(global_invocation_id) id: vec3<u32>) {
    let i = id.x;
    if i >= TABLE { return; }
    let ch = i % D_INNER;
    var total = 0.0;
    if i < BIAS {
        for (var piece = 0u; piece < p_sums.n_pieces; piece++) {
            total += held_in[(p_sums.n_subs + piece) * BIAS + i];
        }
        da_log[ch * D_STATE + i / D_INNER] = total * coef(i) * LN_2;
        return;
    }
    let row = (i - BIAS) / D_INNER; // 0 for skip, 1 for the bias
    for (var part = 0u; part < p_sums.n_parts; part++) {
        total += parts_in[(2u * part + row) * D_INNER + ch];
    }
    if row == 0u { dskip_out[ch] = total; } else { dbias_out[ch] = total; }
}
