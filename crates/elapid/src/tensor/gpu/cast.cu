// Numbers in another format, four to a thread; see decode.rs.

struct Params { u32 n; };

KERNEL cast(const T0* x, T1* y, Params p) {
    for (size_t i = 4 * thread_of(); i < p.n; i += 4 * n_threads()) {
        if (i + 4 <= p.n) {
            store4(y, i, load4(x, i));
        } else {
            for (size_t j = i; j < p.n; j++) store(y, j, load(x, j));
        }
    }
}
