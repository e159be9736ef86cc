// Sums of squares, one for each group; see grad_norm.rs. A thread takes eight numbers at a time.

template <class X> DEVICE float piece_of(const X* x, size_t begin, size_t n_all) {
    u32 n = (u32)(begin + PIECE < n_all ? PIECE : n_all - begin);
    float sum = 0.0f;
#pragma unroll 4
    for (u32 i = 8 * threadIdx.x; i + 8 <= n; i += 8 * THREADS) {
        Eight eight = load8(x, begin + i);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += eight.v[k] * eight.v[k];
    }
    u32 last = n / 8 * 8 + threadIdx.x;
    if (last < n) sum += load(x, begin + last) * load(x, begin + last);
    return group_sum(sum);
}

#ifdef ENTRY_sum_squares
struct Params { u32 n, first; };

KERNEL sum_squares(const T0* x, T1* sums, Params p) {
    float sum = piece_of(x, (size_t)blockIdx.x * PIECE, p.n);
    if (threadIdx.x == 0) store(sums, p.first + blockIdx.x, sum);
}
#endif

#ifdef ENTRY_sum_squares_all
// A row of the table; see gpu/many.rs.
struct Row {
    const float* x;
    u32 n, first;
};

struct Table { u32 rows, n_groups; };

KERNEL sum_squares_all(const T0* table, T1* sums, Table t) {
    u32 group = (u32)group_of();
    if (group >= t.n_groups) return;
    uint2 place = ((const uint2*)table)[group];
    Row row = ((const Row*)(table + t.rows))[place.x];
    float sum = piece_of(row.x, (size_t)place.y * PIECE, row.n);
    if (threadIdx.x == 0) store(sums, row.first + place.y, sum);
}
#endif
