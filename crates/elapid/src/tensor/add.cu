// y = a + b, and y += x; see add.rs. A thread takes eight numbers at a time.

struct Params { u32 n; };

#ifdef ENTRY_add_forward
KERNEL add_forward(const T0* a, const T1* b, T2* y, Params p) {
    size_t n8 = p.n / 8;
    for (size_t i = thread_of(); i < n8; i += n_threads()) {
        Eight left = load8(a, 8 * i), right = load8(b, 8 * i);
#pragma unroll
        for (int k = 0; k < 8; k++) left.v[k] += right.v[k];
        store8(y, 8 * i, left);
    }
    for (size_t i = 8 * n8 + thread_of(); i < p.n; i += n_threads()) {
        store(y, i, load(a, i) + load(b, i));
    }
}
#endif

#ifdef ENTRY_add_into
KERNEL add_into(const T0* x, T1* y, Params p) {
    size_t n8 = p.n / 8;
    for (size_t i = thread_of(); i < n8; i += n_threads()) {
        Eight sum = load8(y, 8 * i), more = load8(x, 8 * i);
#pragma unroll
        for (int k = 0; k < 8; k++) sum.v[k] += more.v[k];
        store8(y, 8 * i, sum);
    }
    for (size_t i = 8 * n8 + thread_of(); i < p.n; i += n_threads()) {
        store(y, i, load(y, i) + load(x, i));
    }
}
#endif
