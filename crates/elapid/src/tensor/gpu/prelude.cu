// Before every kernel: number formats, places in the grid, sums over a group in a fixed order.
// THREADS stands above; the constants of the kernel and the types of its arguments (T0, T1, ...:
// one of float, bf16, f16, u32; unsigned char for blocks) stand between this and the op's own file.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ __launch_bounds__(THREADS) void

DEVICE float bf16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

// To the nearest, ties to even; not a number stays one.
DEVICE u16 float_to_bf16(float x) {
#ifdef ELAPID_EMULATED
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#else
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#endif
}

// Two at once: `low` in the lower half.
DEVICE u32 floats_to_bf16x2(float low, float high) {
#ifdef ELAPID_EMULATED
    return (u32)float_to_bf16(low) | ((u32)float_to_bf16(high) << 16);
#else
    u32 bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
#endif
}

DEVICE float f16_to_float(u16 bits) {
#ifdef ELAPID_EMULATED
    u32 sign = (u32)(bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, mantissa = bits & 1023u;
    if (exponent == 31u) return __uint_as_float(sign | 0x7f800000u | (mantissa << 13));
    if (exponent == 0u) {
        float x = (float)mantissa * 5.9604644775390625e-08f;
        return sign ? -x : x;
    }
    return __uint_as_float(sign | ((exponent + 112u) << 23) | (mantissa << 13));
#else
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
#endif
}

DEVICE float load(const float* x, size_t i) { return x[i]; }
DEVICE float load(const bf16* x, size_t i) { return bf16_to_float(x[i].bits); }
DEVICE float load(const f16* x, size_t i) { return f16_to_float(x[i].bits); }
DEVICE void store(float* y, size_t i, float v) { y[i] = v; }
DEVICE void store(bf16* y, size_t i, float v) { y[i].bits = float_to_bf16(v); }

// Two at once; `i` is even, and so is every place of the tensor (8 or 4 bytes).
DEVICE float2 load2(const float* x, size_t i) { return *(const float2*)(x + i); }
DEVICE float2 load2(const bf16* x, size_t i) {
    u32 v = *(const u32*)(x + i);
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
DEVICE void store2(float* y, size_t i, float2 v) { *(float2*)(y + i) = v; }
DEVICE void store2(bf16* y, size_t i, float2 v) { *(u32*)(y + i) = floats_to_bf16x2(v.x, v.y); }

// Four at once; `i` is a multiple of four, and so is every place of the tensor (16 or 8 bytes).
DEVICE float4 load4(const float* x, size_t i) { return *(const float4*)(x + i); }
DEVICE float4 load4(const bf16* x, size_t i) {
    uint2 v = *(const uint2*)(x + i);
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                       __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
}
DEVICE float4 load4(const f16* x, size_t i) {
    uint2 v = *(const uint2*)(x + i);
    return make_float4(f16_to_float((u16)v.x), f16_to_float((u16)(v.x >> 16)),
                       f16_to_float((u16)v.y), f16_to_float((u16)(v.y >> 16)));
}
DEVICE void store4(float* y, size_t i, float4 v) { *(float4*)(y + i) = v; }
DEVICE void store4(bf16* y, size_t i, float4 v) {
    *(uint2*)(y + i) = make_uint2(floats_to_bf16x2(v.x, v.y), floats_to_bf16x2(v.z, v.w));
}

// Eight at once, likewise: 16 bytes of bf16, 32 of f32.
struct Eight { float v[8]; };
DEVICE Eight load8(const float* x, size_t i) {
    float4 a = load4(x, i), b = load4(x, i + 4);
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
DEVICE Eight load8(const bf16* x, size_t i) {
    uint4 u = *(const uint4*)(x + i);
    Eight y;
    u32 words[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        y.v[2 * k] = __uint_as_float(words[k] << 16);
        y.v[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
    return y;
}
DEVICE void store8(float* y, size_t i, const Eight& x) {
    store4(y, i, make_float4(x.v[0], x.v[1], x.v[2], x.v[3]));
    store4(y, i + 4, make_float4(x.v[4], x.v[5], x.v[6], x.v[7]));
}
DEVICE void store8(bf16* y, size_t i, const Eight& x) {
    *(uint4*)(y + i) = make_uint4(
        floats_to_bf16x2(x.v[0], x.v[1]), floats_to_bf16x2(x.v[2], x.v[3]),
        floats_to_bf16x2(x.v[4], x.v[5]), floats_to_bf16x2(x.v[6], x.v[7]));
}

// The group, where groups are laid in a plane.
DEVICE size_t group_of() { return (size_t)blockIdx.y * gridDim.x + blockIdx.x; }
// This thread among all, and how many there are: `for (i = thread_of(); i < n; i += n_threads())`.
DEVICE size_t thread_of() { return group_of() * THREADS + threadIdx.x; }
DEVICE size_t n_threads() { return (size_t)gridDim.x * gridDim.y * THREADS; }

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) x += __shfl_xor_sync(0xffffffffu, x, half);
    return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
    for (int half = 16; half > 0; half /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, half));
    return x;
}

// Sum of `x` over the threads of a group, the same in all of them. All threads must come here.
// Whole warps: THREADS is a multiple of 32.
DEVICE float group_sum(float x) {
    __shared__ float parts[32];
    x = warp_sum(x);
    if (THREADS == 32) return x;
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) sum += parts[warp];
    __syncthreads();
    return sum;
}

// Largest `x` in a group, likewise.
DEVICE float group_max(float x) {
    __shared__ float parts[32];
    x = warp_max(x);
    if (THREADS == 32) return x;
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float top = parts[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; warp++) top = fmaxf(top, parts[warp]);
    __syncthreads();
    return top;
}

DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// In recorded work, kernels that may be (`Work::early`) are started while the kernel before is not
// done. Here they wait until it is, with all that came before it. What comes first runs beside it,
// and may read only what nothing recorded writes before: weights, and a state that is their own.
// Everywhere else this does nothing.
DEVICE void await_input() {
#if !defined(ELAPID_EMULATED) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Asks for the 32 bytes at an address, for a read after `await_input`.
DEVICE void prefetch(const void* at) {
#ifndef ELAPID_EMULATED
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
}

// ---- Instructions that C++ has no words for ----------------------------------------------------

DEVICE float exp2_fast(float x) {
#ifdef ELAPID_EMULATED
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// d += a @ b: (16, 8) of (16, 16) and (16, 8).
DEVICE void mma(float d[4], const u32 a[4], const u32 b[2]) {
#ifdef ELAPID_EMULATED
    emu_mma_m16n8k16_bf16(d, a, b);
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Copies 16 bytes, or sets them to zero, while other work continues.
DEVICE void copy16(uint4* to, const bf16* from, bool is_there) {
#ifdef ELAPID_EMULATED
    emu_cp_async16_zfill(to, from, is_there ? 16 : 0);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
#endif
}

DEVICE void copy4(float* to, const float* from) {
#ifdef ELAPID_EMULATED
    emu_cp_async4(to, from);
#else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
                 :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
#endif
}

// The copies since the last call belong together.
DEVICE void copies_end() {
#ifdef ELAPID_EMULATED
    emu_cp_async_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all copies but those of the last N groups.
template <int N> DEVICE void copies_wait() {
#ifdef ELAPID_EMULATED
    emu_cp_async_wait(N);
#else
    asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
#endif
}
