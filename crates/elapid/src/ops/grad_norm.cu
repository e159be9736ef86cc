// Sums of squares, one for each group; see grad_norm.rs. A thread takes eight numbers at a time.

struct Params { u32 n, first; };

KERNEL sum_squares(const T0* x, T1* sums, Params p) {
    size_t begin = (size_t)blockIdx.x * PIECE;
    u32 n = (u32)(begin + PIECE < p.n ? PIECE : p.n - begin);
    float sum = 0.0f;
#pragma unroll 4
    for (u32 i = 8 * threadIdx.x; i + 8 <= n; i += 8 * THREADS) {
        Eight eight = load8(x, begin + i);
#pragma unroll
        for (int k = 0; k < 8; k++) sum += eight.v[k] * eight.v[k];
    }
    u32 last = n / 8 * 8 + threadIdx.x;
    if (last < n) sum += load(x, begin + last) * load(x, begin + last);
    sum = group_sum(sum);
    if (threadIdx.x == 0) store(sums, p.first + blockIdx.x, sum);
}
