// Causal depthwise convolution; see mod.rs. A thread takes LANES neighbouring channels of a piece:
// some rows of one segment. Pieces are five words: first row, last row + 1, segment, first
// row of the segment, last row of the segment + 1.
// LANES: 1 or 2, a divisor of CHANNELS.
// HAS_BIAS, HAS_WINDOW, SILU, WANTS_X, WANTS_SUMS: 1 or 0; another buffer takes the place of what
// is not there.
//
// Numbers that move, for each of x: forward 2 (x, y), backward 3 (x, dy, dx), so 4 and 6 bytes in
// bf16. Of every piece D_CONV - 1 rows move twice, and D_CONV + 1 rows of sums: at 128 rows and 4
// taps 2% each. Inputs stay in registers from row to row; some rows are loaded while those before
// them are used.

struct Params { u32 n_pieces; u32 first; u32 n_rows; };

#define BEHIND (D_CONV - 1)

// LANES neighbours as they lie in memory.
template <class T> struct __align__(LANES * sizeof(T)) Pack { T v[LANES]; };

template <class T> DEVICE Pack<T> pack_at(const T* x, size_t i) { return *(const Pack<T>*)(x + i); }

template <class T> DEVICE void unpack(const Pack<T>& pack, float* out) {
#pragma unroll
    for (int i = 0; i < LANES; i++) out[i] = load(pack.v, i);
}

template <class T> DEVICE void get(const T* x, size_t i, float* out) { unpack(pack_at(x, i), out); }

template <class T> DEVICE void put(T* y, size_t i, const float* v) {
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < LANES; k++) store(pack.v, k, v[k]);
    *(Pack<T>*)(y + i) = pack;
}

// ROWS rows of LANES channels from `row` on; the one before `end` stands for those past it. ROWS is
// a multiple of the usual four taps: inputs then change their names, not their registers.
template <class T, int ROWS> struct Rows { Pack<T> v[ROWS]; };

template <int ROWS, class T> DEVICE Rows<T, ROWS> rows_at(const T* x, u32 row, u32 end, u32 ch) {
    Rows<T, ROWS> rows;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        rows.v[r] = pack_at(x, (size_t)min(row + r, end - 1) * CHANNELS + ch);
    }
    return rows;
}

// Taps and bias of LANES channels.
struct Filter {
    float taps[D_CONV][LANES];
    float offset[LANES];
};

template <class W, class B> DEVICE Filter filter_of(const W* w, const B* bias, u32 ch) {
    Filter f;
#pragma unroll
    for (int i = 0; i < LANES; i++) {
        f.offset[i] = HAS_BIAS ? load(bias, ch + i) : 0.0f;
#pragma unroll
        for (int k = 0; k < D_CONV; k++) f.taps[k][i] = load(w, (size_t)(ch + i) * D_CONV + k);
    }
    return f;
}

// The last D_CONV inputs of LANES channels, newest last.
struct Inputs {
    float v[D_CONV][LANES];
};

DEVICE void push(Inputs& in, const float* x) {
#pragma unroll
    for (int i = 0; i < LANES; i++) {
#pragma unroll
        for (int k = 0; k < BEHIND; k++) in.v[k][i] = in.v[k + 1][i];
        in.v[BEHIND][i] = x[i];
    }
}

// Those before `row`, so that the next push is `row` itself; before the segment lies its window.
template <class X, class W>
DEVICE Inputs inputs_before(const X* x, const W* window, u32 segment, u32 start, u32 row, u32 ch) {
    Inputs in;
#pragma unroll
    for (int i = 0; i < LANES; i++) in.v[0][i] = 0.0f;
#pragma unroll
    for (int k = 1; k < D_CONV; k++) {
        u32 back = D_CONV - k; // rows before `row`
#pragma unroll
        for (int i = 0; i < LANES; i++) in.v[k][i] = 0.0f;
        if (row >= start + back) {
            get(x, (size_t)(row - back) * CHANNELS + ch, in.v[k]);
        } else if (HAS_WINDOW) {
            size_t from = (size_t)segment * BEHIND + BEHIND - (start + back - row);
            get(window, from * CHANNELS + ch, in.v[k]);
        }
    }
    return in;
}

DEVICE float sum_taps(const Filter& f, const Inputs& in, int i) {
    float pre = f.offset[i];
#pragma unroll
    for (int k = 0; k < D_CONV; k++) pre += f.taps[k][i] * in.v[k][i];
    return pre;
}

DEVICE float activated(float pre) { return SILU ? pre * sigmoid(pre) : pre; }

#ifdef ENTRY_conv_forward
KERNEL conv_forward(const T0* x, const T1* w, const T2* bias, const T3* window, const T4* table,
                    T5* y, Params p) {
    u32 ch = (blockIdx.x * THREADS + threadIdx.x) * LANES;
    if (ch >= CHANNELS) return;
    const u32* piece = (const u32*)table + (size_t)blockIdx.y * 5;
    u32 first = piece[0], end = piece[1];
    Filter f = filter_of(w, bias, ch);
    Inputs in = inputs_before(x, window, piece[2], piece[3], first, ch);
    const u32 n = 8; // rows ahead
    auto next = rows_at<n>(x, first, end, ch);
    for (u32 row = first; row < end; row += n) {
        auto xs = next;
        next = rows_at<n>(x, row + n, end, ch);
#pragma unroll
        for (u32 r = 0; r < n; r++) {
            float newest[LANES], out[LANES];
            unpack(xs.v[r], newest);
            push(in, newest);
#pragma unroll
            for (int i = 0; i < LANES; i++) out[i] = activated(sum_taps(f, in, i));
            if (row + r < end) put(y, (size_t)(row + r) * CHANNELS + ch, out);
        }
    }
}
#endif

#ifdef ENTRY_conv_backward
// parts: of each piece a row for each tap and one for the bias: (n_pieces, D_CONV + 1, CHANNELS).
KERNEL conv_backward(const T0* x, const T1* w, const T2* bias, const T3* window, const T4* table,
                     const T5* dy, T6* dx, T7* parts, Params p) {
    u32 ch = (blockIdx.x * THREADS + threadIdx.x) * LANES;
    if (ch >= CHANNELS) return;
    const u32* piece = (const u32*)table + (size_t)blockIdx.y * 5;
    u32 first = piece[0], end = piece[1], segment_end = piece[4];
    Filter f = filter_of(w, bias, ch);
    Inputs in = inputs_before(x, window, piece[2], piece[3], first, ch);
    Inputs dpre;
    float sums[D_CONV + 1][LANES];
#pragma unroll
    for (int k = 0; k <= D_CONV; k++) {
#pragma unroll
        for (int i = 0; i < LANES; i++) {
            sums[k][i] = 0.0f;
            if (k < D_CONV) dpre.v[k][i] = 0.0f;
        }
    }
    // dx of the last rows needs dpre of the rows after this piece: they are made twice.
    u32 last = end + BEHIND, there = min(last, segment_end);
    const u32 n = 4; // rows ahead
    auto next_x = rows_at<n>(x, first, there, ch);
    auto next_dy = rows_at<n>(dy, first, there, ch);
    for (u32 row0 = first; row0 < last; row0 += n) {
        auto xs = next_x;
        auto dys = next_dy;
        next_x = rows_at<n>(x, row0 + n, there, ch);
        next_dy = rows_at<n>(dy, row0 + n, there, ch);
#pragma unroll
        for (u32 r = 0; r < n; r++) {
            u32 row = row0 + r;
            float newest[LANES], d[LANES];
            unpack(xs.v[r], newest);
            unpack(dys.v[r], d);
            push(in, newest);
#pragma unroll
            for (int i = 0; i < LANES; i++) {
                if (SILU) {
                    float pre = sum_taps(f, in, i), s = sigmoid(pre);
                    d[i] *= s * (1.0f + pre * (1.0f - s));
                }
                if (row >= there) d[i] = 0.0f;
            }
            push(dpre, d);
            if (row < end) {
#pragma unroll
                for (int i = 0; i < LANES; i++) {
                    sums[D_CONV][i] += d[i];
#pragma unroll
                    for (int k = 0; k < D_CONV; k++) sums[k][i] += d[i] * in.v[k][i];
                }
            }
            if (WANTS_X && row >= first + BEHIND && row < last) {
                // Tap k meets the dpre that lies k rows before the newest.
                float total[LANES];
#pragma unroll
                for (int i = 0; i < LANES; i++) {
                    total[i] = 0.0f;
#pragma unroll
                    for (int k = 0; k < D_CONV; k++) {
                        total[i] += f.taps[k][i] * dpre.v[BEHIND - k][i];
                    }
                }
                put(dx, (size_t)(row - BEHIND) * CHANNELS + ch, total);
            }
        }
    }
    if (WANTS_SUMS) {
#pragma unroll
        for (int k = 0; k <= D_CONV; k++) {
            put(parts, ((size_t)blockIdx.y * (D_CONV + 1) + k) * CHANNELS + ch, sums[k]);
        }
    }
}
#endif

#ifdef ENTRY_conv_sum
// Sums over pieces: 32 columns to a block, eight threads to a column, each in order.
KERNEL conv_sum(const T0* parts, T1* dw, T2* dbias, Params p) {
    __shared__ float lanes[8][32];
    const u32 width = (D_CONV + 1) * CHANNELS;
    u32 col = blockIdx.x * 32 + threadIdx.x % 32, lane = threadIdx.x / 32;
    float total = 0.0f;
    if (col < width) {
#pragma unroll 4
        for (u32 piece = lane; piece < p.n_pieces; piece += 8) {
            total += load(parts, (size_t)piece * width + col);
        }
    }
    lanes[lane][threadIdx.x % 32] = total;
    __syncthreads();
    if (lane > 0 || col >= width) return;
    total = 0.0f;
    for (int i = 0; i < 8; i++) total += lanes[i][threadIdx.x];
    u32 ch = col % CHANNELS;
    if (col < D_CONV * CHANNELS) {
        store(dw, (size_t)ch * D_CONV + col / CHANNELS, total);
    } else {
        store(dbias, ch, total);
    }
}
#endif

#ifdef ENTRY_conv_window
// The window after a segment: the last BEHIND rows of the old one and rows `first`... of x.
KERNEL conv_window(const T0* x, const T1* window, T2* next, Params p) {
    u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= BEHIND * CHANNELS) return;
    u32 from = i / CHANNELS + p.n_rows, ch = i % CHANNELS; // row of both, one below the other
    if (from < BEHIND) {
        store(next, i, load(window, (size_t)from * CHANNELS + ch));
    } else {
        store(next, i, load(x, (size_t)(p.first + from - BEHIND) * CHANNELS + ch));
    }
}
#endif

#ifdef ENTRY_conv_step
// One token, row `first`; the window moves on where it is.
KERNEL conv_step(const T0* x, const T1* w, const T2* bias, T3* window, T4* y, Params p) {
    u32 ch = blockIdx.x * THREADS + threadIdx.x;
    if (ch >= CHANNELS) return;
    size_t at = (size_t)p.first * CHANNELS + ch;
    float pre = HAS_BIAS ? load(bias, ch) : 0.0f;
    float taps[D_CONV], inputs[D_CONV];
#pragma unroll
    for (u32 k = 0; k < D_CONV; k++) {
        taps[k] = load(w, (size_t)ch * D_CONV + k);
        if (k < BEHIND) inputs[k] = load(window, (size_t)k * CHANNELS + ch);
    }
    await_input();
    inputs[BEHIND] = load(x, at);
#pragma unroll
    for (u32 k = 0; k < D_CONV; k++) {
        pre += taps[k] * inputs[k];
        if (k > 0) store(window, (size_t)(k - 1) * CHANNELS + ch, inputs[k]);
    }
    store(y, at, activated(pre));
}
#endif
