// The gradient of an embedding table; see embedding.rs. A group takes a row of the table.

// Groups take the ids from number `first` to `end`.
struct Params { u32 n_tok; u32 n_rows; u32 first; u32 end; u32 row0; u32 d; };

#ifdef ENTRY_embedding_backward
// words: tokens by id (n_tok), ids that occur (n_rows), where each begins among the tokens
// (n_rows + 1). Four rows are on their way at a time; they are added in the order of tokens.
KERNEL embedding_backward(const T0* words, const T1* dy, T2* dtable, Params p) {
    const u32* lists = (const u32*)words;
    size_t idx = p.first + group_of();
    if (idx >= p.end) return;
    size_t row = lists[p.n_tok + idx] - p.row0;
    const u32* begins = lists + p.n_tok + p.n_rows;
    u32 begin = begins[idx], end = begins[idx + 1];
    for (u32 col = threadIdx.x; col < p.d; col += THREADS) {
        float total = 0.0f;
        u32 at = begin;
        for (; at + 4 <= end; at += 4) {
            float next[4];
#pragma unroll
            for (int i = 0; i < 4; i++) next[i] = load(dy, (size_t)lists[at + i] * p.d + col);
#pragma unroll
            for (int i = 0; i < 4; i++) total += next[i];
        }
        for (; at < end; at++) total += load(dy, (size_t)lists[at] * p.d + col);
        store(dtable, row * p.d + col, total);
    }
}
#endif
