// What a linear map needs beside its products; see gpu.rs. Rows are D numbers wide.
// HAS_Z, HAS_NORMS, FIXED, ADDS: 0 or 1, by entry; another buffer stands for what is absent.

#ifdef ENTRY_linear_bias
// y = bias in each row; the first column has number `first` of the bias.
struct Params { u32 n; u32 first; u32 lead; };
KERNEL linear_bias(const T0* bias, T1* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        store(y, p.lead + i, load(bias, p.first + i % D));
    }
}
#endif

#ifdef ENTRY_linear_scale
// y = factor x, or with ADDS y += factor x, with a factor for each column.
struct Params { u32 n; u32 lead; };
KERNEL linear_scale(const T0* factors, const T1* x, T2* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        float value = load(factors, i % D) * load(x, i);
        if (ADDS) value += load(y, p.lead + i);
        store(y, p.lead + i, value);
    }
}
#endif

#ifdef ENTRY_linear_subtract
struct Params { u32 n; u32 lead; };
KERNEL linear_subtract(const T0* a, const T1* b, T2* y, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        store(y, p.lead + i, load(a, i) - load(b, i));
    }
}
#endif

#ifdef ENTRY_linear_sum
// Sums of dy, or of dy z, over N_ROWS rows for THREADS columns.
struct Params { u32 n; };
KERNEL linear_sum(const T0* dy, const T1* z, T2* parts, Params p) {
    u32 col = blockIdx.x * THREADS + threadIdx.x;
    if (col >= D) return;
    u32 first = blockIdx.y * N_ROWS;
    u32 end = min(first + N_ROWS, p.n);
    float total = 0.0f;
    for (u32 row = first; row < end; row++) {
        size_t at = (size_t)row * D + col;
        float value = load(dy, at);
        if (HAS_Z) value *= load(z, at);
        total += value;
    }
    store(parts, (size_t)blockIdx.y * D + col, total);
}
#endif

#ifdef ENTRY_linear_sum_into
// sums[first + col] += the sum over the parts in order, divided by a norm where there are norms.
struct Params { u32 n_parts; u32 first; };
KERNEL linear_sum_into(const T0* parts, const T1* norms, T2* sums, Params p) {
    u32 col = blockIdx.x * THREADS + threadIdx.x;
    if (col >= D) return;
    float total = 0.0f;
    for (u32 part = 0; part < p.n_parts; part++) total += load(parts, (size_t)part * D + col);
    if (HAS_NORMS) total /= load(norms, col);
    store(sums, p.first + col, load(sums, p.first + col) + total);
}
#endif

#ifdef ENTRY_linear_norms
// Lengths of n rows of the adapted weight from `first` on, and m over them; D is the rank here.
struct Params { u32 n; u32 first; float scale; };
KERNEL linear_norms(const T0* squares, const T1* m, const T2* b, const T3* wa, const T4* baa,
                    T5* norms, T6* ratios, Params p) {
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        size_t row = p.first + i;
        float norm = load(squares, row);
        if (!FIXED) {
            float more = 0.0f;
            for (u32 r = 0; r < D; r++) {
                float inner = 2.0f * load(wa, i * D + r) + p.scale * load(baa, i * D + r);
                more += load(b, row * D + r) * inner;
            }
            norm = sqrtf(fmaxf(norm + p.scale * more, 1e-24f));
        }
        store(norms, i, norm);
        store(ratios, i, load(m, row) / norm);
    }
}
#endif

#ifdef ENTRY_linear_dropout
// Two words of a key and of a stream; numbers whose sixteen bits are below `dropped` are left out.
struct Params {
    u32 key[2];
    u32 stream[2];
    u32 n_rows;
    u32 first_row;
    u32 lead;
    u32 dropped;
    float factor;
};

// Philox4x32-10, as in rng.rs.
DEVICE void random_block(u32* v, u32 key0, u32 key1) {
#pragma unroll
    for (int i = 0; i < 10; i++) {
        u64 s = (u64)0xD2511F53u * v[0], t = (u64)0xCD9E8D57u * v[2];
        u32 x = (u32)(t >> 32) ^ v[1] ^ key0, z = (u32)(s >> 32) ^ v[3] ^ key1;
        v[0] = x, v[1] = (u32)t, v[2] = z, v[3] = (u32)s;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
}

// y = drop(x), or with ADDS y += drop(x): a thread makes one block, which decides eight numbers.
KERNEL linear_dropout(const T0* x, T1* y, Params p) {
    u32 n_runs = (D + 127) / 128;
    for (size_t at = thread_of(); at < (size_t)p.n_rows * n_runs * 16; at += n_threads()) {
        size_t run = at / 16, row = run / n_runs;
        u32 lane = (u32)(at % 16), begin = (u32)(run % n_runs) * 128 + lane;
        u64 counter = ((p.first_row + row) * n_runs + run % n_runs) * 16 + lane;
        u32 bits[4] = {(u32)counter, (u32)(counter >> 32), p.stream[0], p.stream[1]};
        random_block(bits, p.key[0], p.key[1]);
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            u32 col = begin + i * 16;
            if (col < D) {
                u32 own = (bits[i / 2] >> (i % 2 * 16)) & 65535u;
                size_t from = row * D + col, to = p.lead + from;
                float value = load(x, from) * (own < p.dropped ? 0.0f : p.factor);
                if (ADDS) value += load(y, to);
                store(y, to, value);
            }
        }
    }
}
#endif

#if defined(ENTRY_linear_take) || defined(ENTRY_linear_put)
// Rows of D numbers, and their pieces of A, B and C; C may be 0, then another buffer is there.
// WIDE: how many move at once, four where all pieces are multiples of it, else one.
struct Params { u32 n; };

template <class X, class Y> DEVICE void move(const X* x, size_t from, Y* y, size_t to) {
    if (WIDE == 4) store4(y, to, load4(x, from));
    else store(y, to, load(x, from));
}
#endif

#ifdef ENTRY_linear_take
KERNEL linear_take(const T0* x, T1* a, T2* b, T3* c, Params p) {
    for (size_t i = thread_of() * WIDE; i < p.n; i += n_threads() * WIDE) {
        u32 row = (u32)i / D, col = (u32)i % D;
        if (col < A) move(x, i, a, (size_t)row * A + col);
        else if (col < A + B) move(x, i, b, (size_t)row * B + col - A);
        else move(x, i, c, (size_t)row * C + col - A - B);
    }
}
#endif

#ifdef ENTRY_linear_put
KERNEL linear_put(const T0* a, const T1* b, const T2* c, T3* x, Params p) {
    for (size_t i = thread_of() * WIDE; i < p.n; i += n_threads() * WIDE) {
        u32 row = (u32)i / D, col = (u32)i % D;
        if (col < A) move(a, (size_t)row * A + col, x, i);
        else if (col < A + B) move(b, (size_t)row * B + col - A, x, i);
        else move(c, (size_t)row * C + col - A - B, x, i);
    }
}
#endif
