// What Muon does besides products; see muon.rs.

struct Params { u32 n; float a, b; };

#ifdef ENTRY_muon_combine
// y = a y + b x
KERNEL muon_combine(const T0* x, T1* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        store(y, i, p.a * load(y, i) + p.b * load(x, i));
    }
}
#endif

#ifdef ENTRY_muon_look_ahead
// Moves the momentum by `a` towards b x, and says where it would be one step later.
KERNEL muon_look_ahead(const T0* x, T1* mu, T2* ahead, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        float g = p.b * load(x, i);
        float moved = load(mu, i) + p.a * (g - load(mu, i));
        store(mu, i, moved);
        store(ahead, i, moved + p.a * (g - moved));
    }
}
#endif

#ifdef ENTRY_muon_unit
// Matrices of n numbers behind each other, a group to each: x over its norm, which is `a` or more.
KERNEL muon_unit(T0* x, Params p) {
    size_t begin = (size_t)group_of() * p.n;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < p.n; i += THREADS) {
        float v = load(x, begin + i);
        sum += v * v;
    }
    float over = 1.0f / fmaxf(sqrtf(group_sum(sum)), p.a);
    for (u32 i = threadIdx.x; i < p.n; i += THREADS) store(x, begin + i, over * load(x, begin + i));
}
#endif
