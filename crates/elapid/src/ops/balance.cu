// Balance loss of experts and its gradient; see balance.rs. A group takes a row of N_EXPERT logits.

struct Params { u32 n_tok; float scale; };

// The largest logit of a row, and 1 / the sum of e^(logit - largest).
DEVICE float2 softmax_row(const T0* logits, size_t row) {
    float top = -3.4e38f;
    for (u32 e = threadIdx.x; e < N_EXPERT; e += THREADS) {
        top = fmaxf(top, load(logits, row * N_EXPERT + e));
    }
    float largest = group_max(top), sum = 0.0f;
    for (u32 e = threadIdx.x; e < N_EXPERT; e += THREADS) {
        sum += expf(load(logits, row * N_EXPERT + e) - largest);
    }
    return make_float2(largest, 1.0f / group_sum(sum));
}

// Sum of f p over a row.
DEVICE float mean_of_row(const T0* logits, const T1* f, size_t row, float2 softmax) {
    float sum = 0.0f;
    for (u32 e = threadIdx.x; e < N_EXPERT; e += THREADS) {
        sum += load(f, e) * (expf(load(logits, row * N_EXPERT + e) - softmax.x) * softmax.y);
    }
    return group_sum(sum);
}

#ifdef ENTRY_balance_rows
KERNEL balance_rows(const T0* logits, const T1* f, T2* parts, Params p) {
    size_t row = group_of();
    if (row >= p.n_tok) return;
    float mean = mean_of_row(logits, f, row, softmax_row(logits, row));
    if (threadIdx.x == 0) store(parts, row, mean);
}
#endif

#ifdef ENTRY_balance_sum
// loss = scale times the sum of all rows; one group.
KERNEL balance_sum(const T0* rows, T1* loss, Params p) {
    float sum = 0.0f;
    for (u32 row = threadIdx.x; row < p.n_tok; row += THREADS) sum += load(rows, row);
    float total = group_sum(sum);
    if (threadIdx.x == 0) store(loss, 0, p.scale * total);
}
#endif

#ifdef ENTRY_balance_backward
KERNEL balance_backward(const T0* logits, const T1* f, const T2* dloss, T3* dlogits, Params p) {
    size_t row = group_of();
    if (row >= p.n_tok) return;
    float2 softmax = softmax_row(logits, row);
    float mean = mean_of_row(logits, f, row, softmax);
    float scale = p.scale * load(dloss, 0);
    for (u32 e = threadIdx.x; e < N_EXPERT; e += THREADS) {
        float prob = expf(load(logits, row * N_EXPERT + e) - softmax.x) * softmax.y;
        store(dlogits, row * N_EXPERT + e, scale * prob * (load(f, e) - mean));
    }
}
#endif
