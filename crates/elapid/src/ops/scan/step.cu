// A few tokens of one sequence, in generation; see step.rs. The state changes where it is. A group
// takes 32 channels; each of its warps some of their states. What the warps give is added in their
// order. Behind scan.cu, whose functions it uses.

#define N_WARP (THREADS / 32)
#define OWN ((D_STATE + N_WARP - 1) / N_WARP) // states of a thread

#ifdef ENTRY_scan_rates
// a_log: (D_INNER, D_STATE); rates: (D_STATE, D_INNER)
KERNEL scan_rates(const T0* a_log, T1* rates, Params p) {
    for (size_t i = thread_of(); i < (size_t)BIAS; i += n_threads()) {
        size_t ch = i % D_INNER;
        store(rates, i, -LOG2_E * expf(load(a_log, ch * D_STATE + i / D_INNER)));
    }
}
#endif

#ifdef ENTRY_scan_step
KERNEL scan_step(const T0* x, const T1* delta, const T2* rates, const T3* b, const T4* c,
                 const T5* gate, const T6* bias, const T7* skip, T8* state, T9* y, Params p) {
    __shared__ float parts[N_WARP][32];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, ch = blockIdx.x * 32 + lane;
    bool is_there = ch < D_INNER;
    float h[OWN], rate[OWN];
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        u32 n = warp * OWN + k;
        bool is_own = is_there && n < D_STATE;
        h[k] = is_own ? load(state, state_at(0, n, ch)) : 0.0f;
        rate[k] = is_own ? load(rates, state_at(0, n, ch)) : 0.0f;
    }
    float offset = HAS_BIAS && is_there ? load(bias, ch) : 0.0f;
    float around = is_there ? load(skip, ch) : 0.0f;
    await_input();
    for (u32 row = p.first; row < p.first + p.n_rows; row++) {
        size_t at = (size_t)row * D_INNER + ch;
        float input = is_there ? load(x, at) : 0.0f;
        float step = is_there ? softplus(load(delta, at) + offset) : 0.0f;
        float out = 0.0f;
#pragma unroll
        for (int k = 0; k < OWN; k++) {
            u32 n = warp * OWN + k;
            if (n >= D_STATE) break;
            size_t of_row = (size_t)row * D_STATE + n;
            h[k] = exp2_fast(step * rate[k]) * h[k] + step * input * load(b, of_row);
            out += h[k] * load(c, of_row);
        }
        parts[warp][lane] = out;
        __syncthreads();
        if (warp == 0 && is_there) {
            float total = around * input;
#pragma unroll
            for (int w = 0; w < N_WARP; w++) total += parts[w][lane];
            if (HAS_GATE) total *= silu(load(gate, at));
            store(y, at, total);
        }
        __syncthreads();
    }
#pragma unroll
    for (int k = 0; k < OWN; k++) {
        u32 n = warp * OWN + k;
        if (is_there && n < D_STATE) store(state, state_at(0, n, ch), h[k]);
    }
}
#endif
