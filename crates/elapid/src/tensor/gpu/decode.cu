
// Rows of a stored matrix in f32 or bf16; see decode.rs. A thread makes four numbers.
// GATHER is 0 where the rows follow each other and `ids` is some other buffer.

// Rows `first` to `end` of the matrix are in `x`, the first of them at byte `lead`.
struct Params { u32 n_rows; u32 d; u32 first; u32 end; u32 lead; };

KERNEL decode(const T0* matrix, const T1* ids, T2* y, Params p) {
    Bytes x = (Bytes)matrix + p.lead;
    size_t n_quads = (p.d + 3) / 4, row_bytes = (size_t)(p.d / BLOCK) * BYTES;
    bool is_even = p.d % 4 == 0;
    // Rows of f32 at whole vectors.
    bool is_wide = is_even && KIND == 0 && (size_t)x % 16 == 0;
    for (size_t at = thread_of(); at < p.n_rows * n_quads; at += n_threads()) {
        size_t row = at / n_quads, from = row;
        u32 col = (u32)(at % n_quads) * 4;
        if (GATHER) from = ((const u32*)ids)[row];
        if (from < p.first || from >= p.end) continue;
        Bytes begin = x + (from - p.first) * row_bytes;
        size_t to = row * p.d + col;
        if (is_wide) {
            store4(y, to, *(const float4*)(begin + 4 * (size_t)col));
        } else if (is_even) {
            store4(y, to, four(begin, col));
        } else {
            for (u32 i = 0; i < 4 && col + i < p.d; i++) store(y, to + i, number(begin, col + i));
        }
    }
}
