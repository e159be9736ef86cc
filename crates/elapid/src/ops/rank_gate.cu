// The gate of several outputs of a head, and their sum; see rank_gate.rs.
// D: channels of all heads. D_HEAD, RANK: of a head. WEIGHTED: 1 or 0. N_ROWS: rows of a sum.

struct Params { u32 n; }; // numbers, or rows where sums are made

// Place of rank 0 of a channel, in a row of y or in a parameter.
DEVICE u32 first_of(u32 col) { return col / D_HEAD * D_HEAD * RANK + col % D_HEAD; }

template <class T> DEVICE float weight_of(const T* w, u32 col) {
    return WEIGHTED ? load(w, col) : 1.0f;
}

#ifdef ENTRY_rank_gate_forward
KERNEL rank_gate_forward(
    const T0* y, const T1* z, const T2* of_gate, const T3* of_out, const T4* w, T5* o, Params p
) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        u32 col = (u32)(i % D), first = first_of(col);
        size_t row = i / D * D * RANK;
        float z_i = load(z, i), sum = 0.0f;
        for (u32 r = 0; r < RANK; r++) {
            u32 at = first + r * D_HEAD;
            float g = z_i * load(of_gate, at);
            sum += load(of_out, at) * load(y, row + at) * g * sigmoid(g);
        }
        store(o, i, weight_of(w, col) * sum);
    }
}
#endif

#ifdef ENTRY_rank_gate_backward
KERNEL rank_gate_backward(
    const T0* y, const T1* z, const T2* of_gate, const T3* of_out, const T4* w, const T5* dout,
    T6* dy, T7* dz, Params p
) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        u32 col = (u32)(i % D), first = first_of(col);
        size_t row = i / D * D * RANK;
        float z_i = load(z, i), pull = weight_of(w, col) * load(dout, i), sum = 0.0f;
        for (u32 r = 0; r < RANK; r++) {
            u32 at = first + r * D_HEAD;
            float gate = load(of_gate, at), out = pull * load(of_out, at);
            float g = z_i * gate, s = sigmoid(g);
            store(dy, row + at, out * g * s);
            sum += out * load(y, row + at) * s * (1.0f + g * (1.0f - s)) * gate;
        }
        store(dz, i, sum);
    }
}
#endif

#ifdef ENTRY_rank_gate_of_gate
// A block sums N_ROWS rows for THREADS channels and all their ranks.
KERNEL rank_gate_of_gate(
    const T0* y, const T1* z, const T2* of_gate, const T3* of_out, const T4* w, const T5* dout,
    T6* parts, Params p
) {
    u32 col = blockIdx.x * THREADS + threadIdx.x;
    if (col >= D) return;
    u32 begin = blockIdx.y * N_ROWS, end = min(begin + N_ROWS, p.n);
    float weight = weight_of(w, col);
    for (u32 r = 0; r < RANK; r++) {
        u32 at = first_of(col) + r * D_HEAD;
        float gate = load(of_gate, at), out = weight * load(of_out, at), sum = 0.0f;
        for (u32 row = begin; row < end; row++) {
            size_t i = (size_t)row * D + col;
            float z_i = load(z, i), g = z_i * gate, s = sigmoid(g);
            float pull = out * load(dout, i) * load(y, (size_t)row * D * RANK + at);
            sum += pull * s * (1.0f + g * (1.0f - s)) * z_i;
        }
        store(parts, (size_t)blockIdx.y * D * RANK + at, sum);
    }
}
#endif

#ifdef ENTRY_rank_gate_of_out
KERNEL rank_gate_of_out(
    const T0* y, const T1* z, const T2* of_gate, const T3* of_out, const T4* w, const T5* dout,
    T6* out_parts, T7* w_parts, Params p
) {
    u32 col = blockIdx.x * THREADS + threadIdx.x;
    if (col >= D) return;
    u32 begin = blockIdx.y * N_ROWS, end = min(begin + N_ROWS, p.n);
    float weight = weight_of(w, col), of_weight = 0.0f;
    for (u32 r = 0; r < RANK; r++) {
        u32 at = first_of(col) + r * D_HEAD;
        float gate = load(of_gate, at), sum = 0.0f;
        for (u32 row = begin; row < end; row++) {
            size_t i = (size_t)row * D + col;
            float g = load(z, i) * gate;
            sum += load(dout, i) * load(y, (size_t)row * D * RANK + at) * g * sigmoid(g);
        }
        store(out_parts, (size_t)blockIdx.y * D * RANK + at, weight * sum);
        of_weight += load(of_out, at) * sum;
    }
    store(w_parts, (size_t)blockIdx.y * D + col, of_weight);
}
#endif
