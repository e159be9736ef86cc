
// out = alpha x @ w^T + beta out for M rows of x, at most eight; see vector.rs. A warp takes a row
// of w as it is stored. A row of the result does not depend on how many there are.

struct Params {
    u32 n;
    u32 k;
    u32 lead;
    u32 x_first;
    u32 out_first;
    u32 out_stride;
    float alpha;
    float beta;
};

// Numbers in sixteen bytes, and how many times sixteen bytes of a row a lane asks for at once.
#define WIDE (KIND == 0 ? 4 : 8)
#define AHEAD 6

DEVICE void wide(uint4 v, float* w) {
    u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        if (KIND == 0) {
            w[j] = __uint_as_float(words[j]);
        } else if (KIND == 1) {
            w[2 * j] = f16_to_float((u16)words[j]);
            w[2 * j + 1] = f16_to_float((u16)(words[j] >> 16));
        } else {
            w[2 * j] = __uint_as_float(words[j] << 16);
            w[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
        }
    }
}

DEVICE float dot4(float4 a, const float* b) {
    return a.x * b[0] + a.y * b[1] + a.z * b[2] + a.w * b[3];
}

KERNEL vector(const T0* matrix, const T1* xs, T2* out, Params p) {
    size_t col = group_of() * (THREADS / 32) + threadIdx.x / 32;
    if (col >= p.n) return;
    u32 lane = threadIdx.x % 32;
    Bytes row = (Bytes)matrix + p.lead + col * ((size_t)(p.k / BLOCK) * BYTES);
    const T1* x = xs + p.x_first;
    float sums[M];
#pragma unroll
    for (int m = 0; m < M; m++) sums[m] = 0.0f;
    bool is_even = p.k % 4 == 0 && (size_t)x % (4 * sizeof(T1)) == 0;
    bool is_wide = is_even && KIND <= 2 && p.k % WIDE == 0 && (size_t)row % 16 == 0;
    if (is_wide) {
        // The first of them come while the kernel before is not done.
        uint4 next[AHEAD];
        for (u32 i0 = lane * WIDE; i0 < p.k; i0 += AHEAD * 32 * WIDE) {
#pragma unroll
            for (u32 n = 0; n < AHEAD; n++) {
                u32 i = i0 + n * 32 * WIDE;
                if (i < p.k) next[n] = *(const uint4*)(row + (16 / WIDE) * (size_t)i);
            }
            if (i0 == lane * WIDE) await_input();
#pragma unroll
            for (u32 n = 0; n < AHEAD; n++) {
                u32 i = i0 + n * 32 * WIDE;
                if (i >= p.k) break;
                float w[WIDE];
                wide(next[n], w);
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int j = 0; j < WIDE; j += 4) {
                        sums[m] += dot4(load4(x, (size_t)m * p.k + i + j), w + j);
                    }
                }
            }
        }
    } else if (is_even) {
        await_input();
        for (u32 i = lane * 4; i < p.k; i += 128) {
            float4 w = four(row, i);
            float flat[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int m = 0; m < M; m++) sums[m] += dot4(load4(x, (size_t)m * p.k + i), flat);
        }
    } else {
        await_input();
        for (u32 i = lane; i < p.k; i += 32) {
            // Whole blocks are a multiple of four: what comes here has none.
            float w = number(row, i);
            for (int m = 0; m < M; m++) sums[m] += load(x, (size_t)m * p.k + i) * w;
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        float sum = p.alpha * warp_sum(sums[m]);
        if (lane == 0) {
            size_t at = p.out_first + (size_t)m * p.out_stride + col;
            if (p.beta != 0.0f) sum += p.beta * load(out, at);
            store(out, at, sum);
        }
    }
}
