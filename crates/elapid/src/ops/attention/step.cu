// A few new tokens of one sequence against its cache; see mod.rs. The keys are cut into splits of
// 64; a group takes one split, one token and the heads that share a key-value head, four at a time;
// what the splits give is merged in their order.
//
//     q, y: (n_tok, Q_WIDTH)   k_new, v_new: (n_tok, KV_WIDTH)   keys, values: (room, KV_WIDTH)
//     parts: (n_new, n_split, N_HEAD, D + 2): weighted sum of the values, largest score, sum of the
//     weights
//
// Where the tokens are in their sequence (positions: (n_tok), words) is no parameter, so that the
// launches of one token can be recorded and serve those that follow: `n_split` is enough for them,
// and splits behind the last key add nothing.

struct Params {
    u32 first; // row of the first new token
    u32 n_new;
    u32 window;       // keys a query sees, itself included
    float scale_log2; // scale times log2(e)
    u32 n_split;
};

#define SPLIT 64
#define STEP 32 // columns of keys at a time
#define N_GROUP (N_HEAD / N_KV_HEAD)
#define Q_WIDTH (N_HEAD * D)
#define KV_WIDTH (N_KV_HEAD * D)
#define SCORE_MIN -1e30f

#ifdef ENTRY_attention_append
// New keys and values go behind those of the past.
KERNEL attention_append(const T0* k_new, const T1* v_new, const T2* positions, T3* keys,
                        T4* values, Params p) {
    await_input();
    size_t n = (size_t)p.n_new * KV_WIDTH;
    size_t from = (size_t)p.first * KV_WIDTH;
    size_t to = (size_t)((const u32*)positions)[p.first] * KV_WIDTH;
    for (size_t i = thread_of(); i < n; i += n_threads()) {
        store(keys, to + i, load(k_new, from + i));
        store(values, to + i, load(v_new, from + i));
    }
}
#endif

#ifdef ENTRY_attention_step
KERNEL attention_step(const T0* q, const T1* keys, const T2* values, const T3* positions,
                      T4* parts, Params p) {
    __shared__ float tile[SPLIT * (STEP + 1)];
    __shared__ float weights[4 * SPLIT];
    __shared__ float sums[4 * 4 * 64]; // runs of keys, heads, columns
    u32 thread = threadIdx.x, kv_head = blockIdx.y;
    u32 n_past = ((const u32*)positions)[p.first], pos = n_past + blockIdx.z;
    u32 first_split = (n_past + 1 - min(n_past + 1, p.window)) / SPLIT;
    u32 j0 = (first_split + blockIdx.x) * SPLIT;
    u32 n_key = min((u32)SPLIT, pos + 1 - min(pos + 1, j0));
    u32 lane = thread % 64;    // a key, then a column
    u32 quarter = thread / 64; // a head, then a run of keys
    bool is_seen = lane < n_key && pos - (j0 + lane) < p.window;
    size_t row0 = (size_t)j0 * KV_WIDTH + kv_head * D;
    await_input();
    for (u32 h0 = 0; h0 < N_GROUP; h0 += 4) {
        bool is_head = h0 + quarter < N_GROUP;
        u32 head = kv_head * N_GROUP + min(h0 + quarter, (u32)N_GROUP - 1);
        size_t q_at = (size_t)(p.first + blockIdx.z) * Q_WIDTH + head * D;
        float score = 0.0f;
        for (u32 c0 = 0; c0 < D; c0 += STEP) {
            __syncthreads();
            for (u32 i = thread; i < SPLIT * STEP; i += THREADS) {
                u32 key = i / STEP, col = c0 + i % STEP;
                float x = 0.0f;
                if (key < n_key && col < D) x = load(keys, row0 + (size_t)key * KV_WIDTH + col);
                tile[key * (STEP + 1) + i % STEP] = x;
            }
            __syncthreads();
            u32 n_col = min((u32)STEP, D - c0);
#pragma unroll 8
            for (u32 c = 0; c < n_col; c++) {
                score += load(q, q_at + c0 + c) * tile[lane * (STEP + 1) + c];
            }
        }
        score = is_seen ? score * p.scale_log2 : SCORE_MIN;
        weights[thread] = score;
        __syncthreads();
        float top = SCORE_MIN;
        for (u32 i = 0; i < SPLIT; i++) top = fmaxf(top, weights[quarter * SPLIT + i]);
        __syncthreads();
        weights[thread] = is_seen ? exp2f(score - top) : 0.0f;
        __syncthreads();
        float total = 0.0f;
        for (u32 i = 0; i < SPLIT; i++) total += weights[quarter * SPLIT + i];
        size_t out = (((size_t)blockIdx.z * p.n_split + blockIdx.x) * N_HEAD + head) * (D + 2);
        if (is_head && lane == 0) {
            store(parts, out + D, top);
            store(parts, out + D + 1, total);
        }
        for (u32 c0 = 0; c0 < D; c0 += 64) {
            float sum[4] = {};
            if (c0 + lane < D) {
                u32 end = min(n_key, quarter * 16 + 16);
                for (u32 i = quarter * 16; i < end; i++) {
                    float x = load(values, row0 + (size_t)i * KV_WIDTH + c0 + lane);
#pragma unroll
                    for (u32 h = 0; h < 4; h++) sum[h] += x * weights[h * SPLIT + i];
                }
            }
#pragma unroll
            for (u32 h = 0; h < 4; h++) sums[(quarter * 4 + h) * 64 + lane] = sum[h];
            __syncthreads();
            if (is_head && c0 + lane < D) {
                store(parts, out + c0 + lane,
                      sums[quarter * 64 + lane] + sums[(4 + quarter) * 64 + lane]
                          + sums[(8 + quarter) * 64 + lane] + sums[(12 + quarter) * 64 + lane]);
            }
            __syncthreads();
        }
    }
}
#endif

#ifdef ENTRY_attention_merge
// A group for each head and token, a thread for each column.
KERNEL attention_merge(const T0* parts, T1* y, Params p) {
    await_input();
    size_t by = (size_t)N_HEAD * (D + 2);
    size_t at = blockIdx.y * p.n_split * by + blockIdx.x * (D + 2);
    float top = SCORE_MIN;
    for (u32 i = 0; i < p.n_split; i++) top = fmaxf(top, load(parts, at + i * by + D));
    float total = 0.0f;
    for (u32 i = 0; i < p.n_split; i++) {
        total += exp2f(load(parts, at + i * by + D) - top) * load(parts, at + i * by + D + 1);
    }
    for (u32 c = threadIdx.x; c < D; c += THREADS) {
        float sum = 0.0f;
        for (u32 i = 0; i < p.n_split; i++) {
            sum += exp2f(load(parts, at + i * by + D) - top) * load(parts, at + i * by + c);
        }
        store(y, (size_t)(p.first + blockIdx.y) * Q_WIDTH + blockIdx.x * D + c, sum / total);
    }
}
#endif
