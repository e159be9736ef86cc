// h = a h + (1 - a) tanh(x) along segments, and its gradients; see leaky.rs. A thread takes one of
// D channels of one segment; `n` counts both.

struct Params { u32 n; };

#ifdef ENTRY_leaky_forward
KERNEL leaky_forward(const T0* x, const T1* decay, const T2* start, const T3* begins, T4* h,
                     Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        size_t ch = i % D;
        float a = sigmoid(load(decay, ch)), state = load(start, i);
        for (size_t tok = begins[i / D]; tok < begins[i / D + 1]; tok++) {
            state = a * state + (1.0f - a) * tanhf(load(x, tok * D + ch));
            store(h, tok * D + ch, state);
        }
    }
}
#endif

#ifdef ENTRY_leaky_backward
// both: for each segment, the gradients of the decays (n_seg, D), then of the states (n_seg, D).
KERNEL leaky_backward(const T0* x, const T1* decay, const T2* start, const T3* h, const T4* dh,
                      const T5* begins, T6* dx, T7* both, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        size_t ch = i % D, first = begins[i / D];
        float a = sigmoid(load(decay, ch)), g = 0.0f, sum = 0.0f;
        for (size_t tok = begins[i / D + 1]; tok > first; tok--) {
            size_t at = (tok - 1) * D + ch;
            float before = tok - 1 > first ? load(h, at - D) : load(start, i);
            float t = tanhf(load(x, at));
            g = load(dh, at) + a * g;
            store(dx, at, g * (1.0f - a) * (1.0f - t * t));
            sum += g * (before - t);
        }
        store(both, i, sum * a * (1.0f - a));
        store(both, p.n + i, a * g);
    }
}
#endif

#ifdef ENTRY_leaky_sum
// `n` counts segments.
KERNEL leaky_sum(const T0* parts, T1* ddecay, Params p) {
    for (size_t ch = thread_of(); ch < D; ch += n_threads()) {
        float sum = 0.0f;
        for (u32 segment = 0; segment < p.n; segment++) sum += load(parts, segment * D + ch);
        store(ddecay, ch, sum);
    }
}
#endif
