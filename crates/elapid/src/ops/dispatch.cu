// Rows to experts and back; see dispatch.rs. A group takes a row of D numbers, four at a time where
// D allows it. N_USED rows to a token. HAS_W: 0 where rows are added plainly; HAS_Y: 0 where the
// weights want no gradient; another buffer then takes the place of what is not there.
//
// Bytes of activations: gather reads n_tok D (rows lie in the cache for further slots) and writes
// n_tok N_USED D; the sum the other way round; combine_backward reads one, two with HAS_Y, writes
// one of n_tok N_USED D.

struct Params { u32 n_rows; };

#define FOUR (D % 4 == 0)

#ifdef ENTRY_dispatch_gather
KERNEL dispatch_gather(const T0* x, const u32* choices, T2* y, Params p) {
    size_t row = group_of();
    if (row >= p.n_rows) return;
    size_t from = (size_t)(choices[row] / N_USED) * D, to = row * D;
    if (FOUR) {
        for (u32 i = threadIdx.x * 4; i < D; i += THREADS * 4) {
            store4(y, to + i, load4(x, from + i));
        }
    } else {
        for (u32 i = threadIdx.x; i < D; i += THREADS) store(y, to + i, load(x, from + i));
    }
}
#endif

#ifdef ENTRY_dispatch_sum
// The rows of a token, in order of choice.
KERNEL dispatch_sum(const T0* x, const u32* rows, const T2* weights, T3* y, Params p) {
    size_t tok = group_of();
    if (tok >= p.n_rows) return;
    size_t first = tok * N_USED;
    if (FOUR) {
        for (u32 i = threadIdx.x * 4; i < D; i += THREADS * 4) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (u32 slot = 0; slot < N_USED; slot++) {
                float w = HAS_W ? load(weights, first + slot) : 1.0f;
                float4 v = load4(x, (size_t)rows[first + slot] * D + i);
                sum.x += w * v.x;
                sum.y += w * v.y;
                sum.z += w * v.z;
                sum.w += w * v.w;
            }
            store4(y, tok * D + i, sum);
        }
    } else {
        for (u32 i = threadIdx.x; i < D; i += THREADS) {
            float sum = 0.0f;
            for (u32 slot = 0; slot < N_USED; slot++) {
                float w = HAS_W ? load(weights, first + slot) : 1.0f;
                sum += w * load(x, (size_t)rows[first + slot] * D + i);
            }
            store(y, tok * D + i, sum);
        }
    }
}
#endif

#ifdef ENTRY_dispatch_combine_backward
KERNEL dispatch_combine_backward(const T0* dy, const u32* choices, const T2* weights,
                                 const T3* y_sorted, T4* dy_sorted, T5* dweights, Params p) {
    size_t row = group_of();
    if (row >= p.n_rows) return;
    u32 choice = choices[row];
    size_t from = (size_t)(choice / N_USED) * D, to = row * D;
    float w = load(weights, choice), part = 0.0f;
    if (FOUR) {
        for (u32 i = threadIdx.x * 4; i < D; i += THREADS * 4) {
            float4 d = load4(dy, from + i);
            if (HAS_Y) {
                float4 v = load4(y_sorted, to + i);
                part += d.x * v.x + d.y * v.y + (d.z * v.z + d.w * v.w);
            }
            store4(dy_sorted, to + i, make_float4(w * d.x, w * d.y, w * d.z, w * d.w));
        }
    } else {
        for (u32 i = threadIdx.x; i < D; i += THREADS) {
            float d = load(dy, from + i);
            if (HAS_Y) part += d * load(y_sorted, to + i);
            store(dy_sorted, to + i, w * d);
        }
    }
    if (HAS_Y) {
        float dot = group_sum(part);
        if (threadIdx.x == 0) store(dweights, choice, dot);
    }
}
#endif
