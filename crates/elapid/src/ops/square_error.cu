// loss = factor / 2 sum of (y - target)^2, and its gradient; see square_error.rs.

struct Params { u32 n; float factor; };

#ifdef ENTRY_square_error_forward
// One group.
KERNEL square_error_forward(const T0* y, const T1* target, T2* loss, Params p) {
    float part = 0.0f;
    for (u32 i = threadIdx.x; i < p.n; i += THREADS) {
        float off = load(y, i) - load(target, i);
        part += off * off;
    }
    float sum = group_sum(part);
    if (threadIdx.x == 0) store(loss, 0, 0.5f * p.factor * sum);
}
#endif

#ifdef ENTRY_square_error_backward
KERNEL square_error_backward(const T0* y, const T1* target, const T2* dloss, T3* dy, Params p) {
    float factor = p.factor * load(dloss, 0);
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        store(dy, i, factor * (load(y, i) - load(target, i)));
    }
}
#endif
