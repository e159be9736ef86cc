// y = factor x, a factor for each of D columns; see scale.rs.

struct Params { u32 n; };

KERNEL scale_columns(const T0* x, const T1* factors, T2* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        store(y, i, load(factors, i % D) * load(x, i));
    }
}
