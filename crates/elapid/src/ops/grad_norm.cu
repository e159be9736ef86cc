// Sums of squares, one for each group; see grad_norm.rs.

struct Params { u32 n, first; };

KERNEL sum_squares(const T0* x, T1* sums, Params p) {
    size_t begin = (size_t)blockIdx.x * PIECE;
    size_t end = begin + PIECE < p.n ? begin + PIECE : p.n;
    float sum = 0.0f;
    for (size_t i = begin + threadIdx.x; i < end; i += THREADS) {
        float value = load(x, i);
        sum += value * value;
    }
    sum = group_sum(sum);
    if (threadIdx.x == 0) store(sums, p.first + blockIdx.x, sum);
}
