// y = f(gate) up, and its gradients; see activation.rs. KIND: 0 SiLU, 1 GELU, 2 ReLU, 3 tanh.
// A thread takes eight numbers at a time. GATED is 0 where there is no `up`, whose place another
// buffer then takes.

struct Params { u32 n; };

// f and f' at x.
DEVICE float2 value_and_slope(float x) {
    if (KIND == 0) {
        float s = sigmoid(x);
        return make_float2(x * s, s * (1.0f + x * (1.0f - s)));
    }
    if (KIND == 1) {
        const float root = 0.7978845608028654f;
        float u = root * x * (1.0f + 0.044715f * x * x);
        float du = root * (1.0f + 3.0f * 0.044715f * x * x);
        float t = tanhf(u);
        return make_float2(0.5f * x * (1.0f + t),
                           0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * du);
    }
    if (KIND == 3) {
        float t = tanhf(x);
        return make_float2(t, 1.0f - t * t);
    }
    // In this form a NaN stays one.
    return make_float2(x > 0.0f ? x : 0.0f * x, x > 0.0f ? 1.0f : 0.0f);
}

#ifdef ENTRY_activation_forward
KERNEL activation_forward(const T0* gate, const T1* up, T2* y, Params p) {
    size_t n8 = p.n / 8;
    for (size_t i = thread_of(); i < n8; i += n_threads()) {
        Eight g = load8(gate, 8 * i), u;
        if (GATED) u = load8(up, 8 * i);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            g.v[k] = value_and_slope(g.v[k]).x;
            if (GATED) g.v[k] *= u.v[k];
        }
        store8(y, 8 * i, g);
    }
    for (size_t i = 8 * n8 + thread_of(); i < p.n; i += n_threads()) {
        float value = value_and_slope(load(gate, i)).x;
        if (GATED) value *= load(up, i);
        store(y, i, value);
    }
}
#endif

#ifdef ENTRY_activation_backward
KERNEL activation_backward(const T0* gate, const T1* up, const T2* dy, T3* dgate, T4* dup,
                           Params p) {
    size_t n8 = p.n / 8;
    for (size_t i = thread_of(); i < n8; i += n_threads()) {
        Eight g = load8(gate, 8 * i), d = load8(dy, 8 * i), u;
        if (GATED) u = load8(up, 8 * i);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float2 f = value_and_slope(g.v[k]);
            g.v[k] = f.y * d.v[k];
            if (GATED) g.v[k] *= u.v[k];
            d.v[k] *= f.x;
        }
        store8(dgate, 8 * i, g);
        if (GATED) store8(dup, 8 * i, d);
    }
    for (size_t i = 8 * n8 + thread_of(); i < p.n; i += n_threads()) {
        float2 f = value_and_slope(load(gate, i));
        float d = load(dy, i);
        store(dgate, i, f.y * (GATED ? load(up, i) * d : d));
        if (GATED) store(dup, i, f.x * d);
    }
}
#endif
