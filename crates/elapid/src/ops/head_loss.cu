// Cross-entropy on rows of logits, and what belongs to it; see head_loss.rs.
// HAS_GRADS: the gradient of the logits is wanted, IN_PLACE in their place, else in `dlogits`.

#if defined(ENTRY_head_loss_rows) || defined(ENTRY_head_loss_held)
// words: four lists of n_all: tokens that are learned, their targets, factors of gradients,
// weights. Row 0 of the logits is number `first` of them. Rows have `n_row` places, of which those
// from `n_vocab` on are no logits: their gradient is zero.
struct Params { u32 n_rows; u32 n_vocab; u32 first; u32 n_all; float factor; u32 n_row; };

// The largest number so far and the sum of exponentials under it.
struct Softmax { float largest, sum; };
#endif

#ifdef ENTRY_head_loss_rows
// Exponents are made by `fmaf` everywhere: were only some rounded on the way, a probability of one
// would be off by the last bits of a large logit.
DEVICE float power(float logit, float factor, float under) {
    return __expf(fmaf(logit, factor, -under));
}

DEVICE void raise(Softmax* s, float most) {
    if (most > s->largest) {
        s->sum *= __expf(s->largest - most);
        s->largest = most;
    }
}

DEVICE void put(Softmax* s, float logit, float factor) {
    raise(s, logit * factor);
    s->sum += power(logit, factor, s->largest);
}

// Loads of a thread that are under way at once.
#define BATCH 4

// Every THREADS-th four of a row from `i` on, as far as it goes.
template <class L>
DEVICE void load_batch(float4 batch[BATCH], const L* logits, size_t begin, u32 i, u32 n) {
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
        u32 at = i + 4 * k * THREADS;
        batch[k] = at < n ? load4(logits, begin + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

// A group takes a row: its largest number and the sum of exponentials in one pass.
KERNEL head_loss_rows(const T0* words, T1* logits, T2* dlogits, T3* nll, T4* top1, Params p) {
    size_t row = group_of();
    if (row >= p.n_rows) return;
    const u32* lists = (const u32*)words;
    u32 n = p.n_vocab;
    size_t begin = row * p.n_row, at = p.first + row;
    u32 token = lists[at], id = lists[p.n_all + at];
    float factor = p.factor, target = load(logits, begin + id);
    Softmax s = {-3.0e38f, 0.0f};
    bool is_even = n % 4 == 0 && p.n_row % 4 == 0;
    if (is_even) {
        for (u32 i = 4 * threadIdx.x; i < n; i += 4 * BATCH * THREADS) {
            float4 batch[BATCH];
            load_batch(batch, logits, begin, i, n);
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                if (i + 4 * k * THREADS >= n) continue;
                float4 l = batch[k];
                raise(&s, fmaxf(fmaxf(l.x * factor, l.y * factor),
                                fmaxf(l.z * factor, l.w * factor)));
                s.sum += (power(l.x, factor, s.largest) + power(l.y, factor, s.largest))
                       + (power(l.z, factor, s.largest) + power(l.w, factor, s.largest));
            }
        }
    } else {
        for (u32 i = threadIdx.x; i < n; i += THREADS) put(&s, load(logits, begin + i), factor);
    }
    float top = group_max(s.largest);
    float total = group_sum(s.sum * __expf(s.largest - top));
    if (threadIdx.x == 0) {
        store(nll, token, logf(total) - fmaf(target, factor, -top));
        store(top1, token, target * factor >= top ? 1.0f : 0.0f);
    }
    if (!HAS_GRADS) return;
    float scale = __uint_as_float(lists[2 * (size_t)p.n_all + at]);
    float over = scale / total;
    if (is_even) {
        for (u32 i0 = 4 * threadIdx.x; i0 < n; i0 += 4 * BATCH * THREADS) {
            float4 batch[BATCH];
            load_batch(batch, logits, begin, i0, n);
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                u32 i = i0 + 4 * k * THREADS;
                if (i >= n) continue;
                float4 l = batch[k];
                float4 dl = make_float4(
                    power(l.x, factor, top) * over, power(l.y, factor, top) * over,
                    power(l.z, factor, top) * over, power(l.w, factor, top) * over);
                if (id == i) dl.x -= scale;
                if (id == i + 1) dl.y -= scale;
                if (id == i + 2) dl.z -= scale;
                if (id == i + 3) dl.w -= scale;
                if (IN_PLACE) store4(logits, begin + i, dl);
                else store4(dlogits, begin + i, dl);
            }
        }
    } else {
        for (u32 i = threadIdx.x; i < n; i += THREADS) {
            float dl = power(load(logits, begin + i), factor, top) * over;
            if (id == i) dl -= scale;
            if (IN_PLACE) store(logits, begin + i, dl);
            else store(dlogits, begin + i, dl);
        }
    }
    for (u32 i = n + threadIdx.x; i < p.n_row; i += THREADS) {
        if (IN_PLACE) store(logits, begin + i, 0.0f);
        else store(dlogits, begin + i, 0.0f);
    }
}
#endif

#ifdef ENTRY_head_loss_held
// The same, always with gradients in `dlogits`, for rows that fit into shared memory: they are read
// once. A group takes row after row, STEPS times four numbers a thread. Every thread fetches, reads
// and replaces its own fours alone: the next row comes while the gradient of this one is written,
// and threads wait for each other once a row.
#define LOG2_E 1.44269504f
#define LN_2 0.693147181f

DEVICE void fetch(uint4* held, const float* logits, size_t begin, u32 i) {
    copy16(&held[i], (const bf16*)(logits + begin + 4 * i), true);
}

// exp2(l * factor - under).
DEVICE float4 powers(float4 l, float factor, float under) {
    return make_float4(
        exp2_fast(fmaf(l.x, factor, -under)), exp2_fast(fmaf(l.y, factor, -under)),
        exp2_fast(fmaf(l.z, factor, -under)), exp2_fast(fmaf(l.w, factor, -under)));
}

DEVICE void put4(Softmax* s, float4 l, float factor) {
    float most = fmaxf(fmaxf(l.x * factor, l.y * factor), fmaxf(l.z * factor, l.w * factor));
    if (most > s->largest) {
        s->sum *= exp2_fast(s->largest - most);
        s->largest = most;
    }
    float4 e = powers(l, factor, s->largest);
    s->sum += (e.x + e.y) + (e.z + e.w);
}

DEVICE Softmax warp_merge(Softmax s) {
    float top = warp_max(s.largest);
    return {top, warp_sum(s.sum * exp2_fast(s.largest - top))};
}

// Over the threads of a group, the same in all of them; `parts` are others than the last time.
DEVICE Softmax group_merge(Softmax s, Softmax parts[THREADS / 32]) {
    s = warp_merge(s);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = s;
    __syncthreads();
    Softmax part = {-3.0e38f, 0.0f};
    if (threadIdx.x % 32 < THREADS / 32) part = parts[threadIdx.x % 32];
    return warp_merge(part);
}

// Numbers `4 i` to `4 i + 3` of a row; what is no logit adds nothing to a sum.
DEVICE float4 held4(const uint4* held, u32 i, Params p) {
    float4 l = *(const float4*)&held[i];
    if (4 * i + 4 > p.n_vocab) {
        float none = p.factor < 0.0f ? 3.0e38f : -3.0e38f;
        if (4 * i >= p.n_vocab) l.x = none;
        if (4 * i + 1 >= p.n_vocab) l.y = none;
        if (4 * i + 2 >= p.n_vocab) l.z = none;
        l.w = none;
    }
    return l;
}

KERNEL head_loss_held(const T0* words, const T1* logits, T2* dlogits, T3* nll, T4* top1, Params p) {
    extern __shared__ uint4 held[];
    __shared__ Softmax parts[2][THREADS / 32];
    const u32* lists = (const u32*)words;
    u32 n = p.n_row / 4;
    float factor = p.factor * LOG2_E;
    size_t row = group_of(), n_groups = (size_t)gridDim.x * gridDim.y;
    for (int k = 0; k < STEPS; k++) {
        u32 i = threadIdx.x + k * THREADS;
        if (row < p.n_rows && i < n) fetch(held, logits, row * p.n_row, i);
        copies_end();
    }
    for (int turn = 0; row < p.n_rows; row += n_groups, turn ^= 1) {
        size_t begin = row * p.n_row, next = (row + n_groups) * p.n_row, at = p.first + row;
        u32 token = lists[at], id = lists[p.n_all + at];
        float scale = __uint_as_float(lists[2 * (size_t)p.n_all + at]);
        Softmax s = {-3.0e38f, 0.0f};
        for (int k = 0; k < STEPS; k++) {
            u32 i = threadIdx.x + k * THREADS;
            copies_wait<STEPS - 1>();
            if (i < n) put4(&s, held4(held, i, p), factor);
            // Of nothing, so that always as many are behind the one that is waited for.
            copies_end();
        }
        s = group_merge(s, parts[turn]);
        bool is_mine = threadIdx.x == id / 4 % THREADS;
        float below = 0.0f;
        if (is_mine) {
            float target = ((const float*)held)[id];
            // Rounded as in the sum: a target of probability one has a loss of zero.
            below = fmaf(target, factor, -s.largest);
            store(nll, token, (log2f(s.sum) - below) * LN_2);
            store(top1, token, target * factor >= s.largest ? 1.0f : 0.0f);
        }
        float over = scale / s.sum;
        for (int k = 0; k < STEPS; k++) {
            u32 i = threadIdx.x + k * THREADS;
            if (i < n) {
                float4 e = powers(held4(held, i, p), factor, s.largest);
                e.x *= over, e.y *= over, e.z *= over, e.w *= over;
                store4(dlogits, begin + 4 * i, e);
                if (row + n_groups < p.n_rows) fetch(held, logits, next, i);
            }
            copies_end();
        }
        // By the thread that has just written this place.
        if (is_mine) store(dlogits, begin + id, (exp2_fast(below) / s.sum - 1.0f) * scale);
    }
}
#endif

#ifdef ENTRY_head_loss_sum
// The weighted mean of n tokens, by one group: each thread its own in order, then the threads.
struct Params { u32 n; float norm; };
KERNEL head_loss_sum(const T0* words, const T1* nll, T2* loss, Params p) {
    const u32* lists = (const u32*)words;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < p.n; i += THREADS) {
        sum += load(nll, lists[i]) * __uint_as_float(lists[3 * (size_t)p.n + i]);
    }
    float total = group_sum(sum);
    if (threadIdx.x == 0) store(loss, 0, total / p.norm);
}
#endif

#ifdef ENTRY_head_loss_scatter
// Rows to where their tokens are.
struct Params { u32 n; u32 d; u32 first; };
KERNEL head_loss_scatter(const T0* words, const T1* part, T2* dx, Params p) {
    const u32* lists = (const u32*)words;
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        store(dx, (size_t)lists[p.first + i / p.d] * p.d + i % p.d, load(part, i));
    }
}
#endif

#ifdef ENTRY_head_loss_scale
struct Params { u32 n; };
KERNEL head_loss_scale(const T0* dloss, T1* grad, Params p) {
    float factor = load(dloss, 0);
    if (factor == 1.0f) return;
    for (size_t i = thread_of(); i < p.n; i += n_threads()) {
        store(grad, i, load(grad, i) * factor);
    }
}
#endif
