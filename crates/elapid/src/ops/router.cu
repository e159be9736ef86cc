// Weights of the chosen experts and their gradients; see router.rs. A group takes a token with
// N_EXPERT logits and N_USED choices. KIND: 0 softmax over all, 1 over the chosen, 2 sigmoid,
// 3 sigmoid by its sum.

struct Params { u32 n_tok; float scale; };

#define SUM_MIN 1e-20f

DEVICE float chosen_logit(const T0* logits, const u32* experts, size_t tok, u32 slot) {
    return load(logits, tok * N_EXPERT + experts[tok * N_USED + slot]);
}

// The i-th of those that a softmax is over.
DEVICE float one_logit(const T0* logits, const u32* experts, size_t tok, u32 i) {
    return KIND == 0 ? load(logits, tok * N_EXPERT + i) : chosen_logit(logits, experts, tok, i);
}

// What turns logits into weights: the logit to take off and the factor; the second alone for
// sigmoids.
DEVICE float2 row_of(const T0* logits, const u32* experts, size_t tok) {
    if (KIND == 2) return make_float2(0.0f, 1.0f);
    float sum = 0.0f, top = -3.4e38f;
    if (KIND == 3) {
        for (u32 slot = threadIdx.x; slot < N_USED; slot += THREADS) {
            sum += sigmoid(chosen_logit(logits, experts, tok, slot));
        }
        return make_float2(0.0f, 1.0f / (group_sum(sum) + SUM_MIN));
    }
    // Over all logits or over the chosen.
    const u32 n = KIND == 0 ? N_EXPERT : N_USED;
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        top = fmaxf(top, one_logit(logits, experts, tok, i));
    }
    float largest = group_max(top);
    for (u32 i = threadIdx.x; i < n; i += THREADS) {
        sum += expf(one_logit(logits, experts, tok, i) - largest);
    }
    return make_float2(largest, 1.0f / group_sum(sum));
}

// The weight of a logit before `scale`.
DEVICE float weight_of(float logit, float2 row) {
    return KIND >= 2 ? sigmoid(logit) * row.y : expf(logit - row.x) * row.y;
}

#ifdef ENTRY_router_forward
KERNEL router_forward(const T0* logits, const u32* experts, T2* weights, Params p) {
    size_t tok = group_of();
    if (tok >= p.n_tok) return;
    float2 row = row_of(logits, experts, tok);
    for (u32 slot = threadIdx.x; slot < N_USED; slot += THREADS) {
        float logit = chosen_logit(logits, experts, tok, slot);
        store(weights, tok * N_USED + slot, p.scale * weight_of(logit, row));
    }
}
#endif

#ifdef ENTRY_router_backward
KERNEL router_backward(const T0* logits, const u32* experts, const T2* dweights, T3* dlogits,
                       Params p) {
    size_t tok = group_of();
    if (tok >= p.n_tok) return;
    float2 row = row_of(logits, experts, tok);
    for (u32 e = threadIdx.x; e < N_EXPERT; e += THREADS) {
        float g = 0.0f;
        bool is_chosen = false;
        for (u32 slot = 0; slot < N_USED; slot++) {
            if (experts[tok * N_USED + slot] == e) {
                g = p.scale * load(dweights, tok * N_USED + slot);
                is_chosen = true;
            }
        }
        // g less the mean, by differences: where one expert takes all, nothing is left of it.
        float pull = 0.0f, rest = 1.0f;
        if (KIND != 2 && (KIND == 0 || is_chosen)) {
            for (u32 slot = 0; slot < N_USED; slot++) {
                float weight = weight_of(chosen_logit(logits, experts, tok, slot), row);
                pull += weight * (g - p.scale * load(dweights, tok * N_USED + slot));
                rest -= weight;
            }
        }
        float logit = load(logits, tok * N_EXPERT + e), d = 0.0f;
        if (KIND == 0) {
            if (N_EXPERT > N_USED) pull += g * rest;
            d = weight_of(logit, row) * pull;
        } else if (is_chosen) {
            if (KIND == 1) d = weight_of(logit, row) * pull;
            if (KIND == 2) d = g * (sigmoid(logit) * sigmoid(-logit));
            if (KIND == 3) d = pull * row.y * (sigmoid(logit) * sigmoid(-logit));
        }
        store(dlogits, tok * N_EXPERT + e, d);
    }
}
#endif
