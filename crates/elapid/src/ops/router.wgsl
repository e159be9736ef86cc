// Weights of the chosen experts and their gradients; see router.rs. A group takes a token with
// N_EXPERT logits and N_USED choices. KIND: 0 softmax over all, 1 over the chosen, 2 sigmoid,
// 3 sigmoid by its sum.

struct Params { n_tok: u32, scale: f32 }

@group(0) @binding(0) var<storage, read> logits: array<f32>; // (n_tok, N_EXPERT)
@group(0) @binding(1) var<storage, read> experts: array<u32>; // (n_tok, N_USED)
@group(0) @binding(2) var<storage, read_write> weights: array<f32>; // (n_tok, N_USED)
@group(0) @binding(3) var<uniform> p: Params;

const SUM_MIN: f32 = 1e-20;

fn chosen_logit(tok: u32, slot: u32) -> f32 {
    return logits[tok * N_EXPERT + experts[tok * N_USED + slot]];
}

// What turns logits into weights: the logit to take off and the factor; the second alone for
// sigmoids.
fn row_of(thread: u32, tok: u32) -> vec2<f32> {
    if KIND == 2u { return vec2(0.0, 1.0); }
    if KIND == 3u {
        var sum = 0.0;
        for (var slot = thread; slot < N_USED; slot += THREADS) {
            sum += sigmoid(chosen_logit(tok, slot));
        }
        return vec2(0.0, 1.0 / (group_sum(thread, sum) + SUM_MIN));
    }
    var top = -3.4e38;
    if KIND == 0u {
        for (var e = thread; e < N_EXPERT; e += THREADS) {
            top = max(top, logits[tok * N_EXPERT + e]);
        }
    } else {
        for (var slot = thread; slot < N_USED; slot += THREADS) {
            top = max(top, chosen_logit(tok, slot));
        }
    }
    let largest = group_max(thread, top);
    var sum = 0.0;
    if KIND == 0u {
        for (var e = thread; e < N_EXPERT; e += THREADS) {
            sum += exp(logits[tok * N_EXPERT + e] - largest);
        }
    } else {
        for (var slot = thread; slot < N_USED; slot += THREADS) {
            sum += exp(chosen_logit(tok, slot) - largest);
        }
    }
    return vec2(largest, 1.0 / group_sum(thread, sum));
}

// The weight of a logit before `scale`.
fn weight_of(logit: f32, row: vec2<f32>) -> f32 {
    if KIND >= 2u { return sigmoid(logit) * row.y; }
    return exp(logit - row.x) * row.y;
}

@compute @workgroup_size(THREADS)
fn router_forward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let tok = group_of(group_id, n_groups);
    if tok >= p.n_tok { return; }
    let row = row_of(thread, tok);
    for (var slot = thread; slot < N_USED; slot += THREADS) {
        weights[tok * N_USED + slot] = p.scale * weight_of(chosen_logit(tok, slot), row);
    }
}

@group(0) @binding(2) var<storage, read> dweights: array<f32>; // (n_tok, N_USED)
@group(0) @binding(3) var<storage, read_write> dlogits: array<f32>; // (n_tok, N_EXPERT)
@group(0) @binding(4) var<uniform> p_back: Params;

@compute @workgroup_size(THREADS)
fn router_backward(
    @builtin(workgroup_id) group_id: vec3<u32>,
    @builtin(num_workgroups) n_groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let tok = group_of(group_id, n_groups);
    if tok >= p_back.n_tok { return; }
    let row = row_of(thread, tok);
    for (var e = thread; e < N_EXPERT; e += THREADS) {
        var g = 0.0;
        var is_chosen = false;
        for (var slot = 0u; slot < N_USED; slot++) {
            if experts[tok * N_USED + slot] == e {
                g = p_back.scale * dweights[tok * N_USED + slot];
                is_chosen = true;
            }
        }
        // g less the mean, by differences: where one expert takes all, nothing is left of it.
        var pull = 0.0;
        var rest = 1.0;
        if KIND != 2u && (KIND == 0u || is_chosen) {
            for (var slot = 0u; slot < N_USED; slot++) {
                let weight = weight_of(chosen_logit(tok, slot), row);
                pull += weight * (g - p_back.scale * dweights[tok * N_USED + slot]);
                rest -= weight;
            }
        }
        let logit = logits[tok * N_EXPERT + e];
        var d = 0.0;
        if KIND == 0u {
            if N_EXPERT > N_USED { pull += g * rest; }
            d = weight_of(logit, row) * pull;
        } else if is_chosen {
            if KIND == 1u { d = weight_of(logit, row) * pull; }
            if KIND == 2u { d = g * (sigmoid(logit) * sigmoid(-logit)); }
            if KIND == 3u { d = pull * row.y * (sigmoid(logit) * sigmoid(-logit)); }
        }
        dlogits[tok * N_EXPERT + e] = d;
    }
}
