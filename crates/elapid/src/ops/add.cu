// y = a + b, and y += x; see add.rs.

struct Params { u32 n; };

#ifdef ENTRY_add_forward
KERNEL add_forward(const T0* a, const T1* b, T2* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) store(y, i, load(a, i) + load(b, i));
}
#endif

#ifdef ENTRY_add_into
KERNEL add_into(const T0* x, T1* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) store(y, i, load(y, i) + load(x, i));
}
#endif
