// y = x between -limit and limit, and its gradient; see clamp.rs.

struct Params { u32 n; float limit; };

#ifdef ENTRY_clamp_forward
KERNEL clamp_forward(const T0* x, T1* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        // By comparisons a NaN stays one.
        float value = load(x, i);
        if (value > p.limit) value = p.limit;
        if (value < -p.limit) value = -p.limit;
        store(y, i, value);
    }
}
#endif

#ifdef ENTRY_clamp_backward
KERNEL clamp_backward(const T0* x, const T1* dy, T2* dx, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        store(dx, i, fabsf(load(x, i)) <= p.limit ? load(dy, i) : 0.0f);
    }
}
#endif
