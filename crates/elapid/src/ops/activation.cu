// y = f(gate) up, and its gradients; see activation.rs. KIND: 0 SiLU, 1 GELU, 2 ReLU.
// GATED is 0 where there is no `up`, whose place another buffer then takes.

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
    // In this form a NaN stays one.
    return make_float2(x > 0.0f ? x : 0.0f * x, x > 0.0f ? 1.0f : 0.0f);
}

#ifdef ENTRY_activation_forward
KERNEL activation_forward(const T0* gate, const T1* up, T2* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        float value = value_and_slope(load(gate, i)).x;
        if (GATED) value *= load(up, i);
        store(y, i, value);
    }
}
#endif

#ifdef ENTRY_activation_backward
KERNEL activation_backward(const T0* gate, const T1* up, const T2* dy, T3* dgate, T4* dup,
                           Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        float2 f = value_and_slope(load(gate, i));
        float d = load(dy, i);
        if (GATED) {
            store(dgate, i, f.y * load(up, i) * d);
            store(dup, i, f.x * d);
        } else {
            store(dgate, i, f.y * d);
        }
    }
}
#endif
