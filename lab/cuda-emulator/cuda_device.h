// The CUDA language for g++: what nvrtc.cpp puts before a program.
//
// Words that g++ does not know (__global__, __shared__, __device__, __launch_bounds__ ...) are
// rewritten by nvrtc.cpp; this file has the types, variables and functions. No standard header is
// included, so a program that needs one fails here as it does with NVRTC.
//
// Not here: cuda_fp16.h and cuda_bf16.h, textures, cooperative groups, clusters, PTX. A program
// puts its `asm` behind `#ifndef ELAPID_EMULATED` and calls the emu_ functions at the end of this
// file instead.
#pragma once
#include "runtime.h"

#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))

typedef decltype(sizeof(0)) size_t;
typedef decltype((char *)0 - (char *)0) ptrdiff_t;
typedef long clock_t;

extern "C" int printf(const char *format, ...);
extern "C" void *memcpy(void *to, const void *from, size_t bytes);
extern "C" void *memset(void *to, int value, size_t bytes);

// ---- Variables ----------------------------------------------------------------------------------

#define threadIdx (emu_now.thread_idx)
#define blockIdx (emu_now.block_idx)
#define blockDim (emu_now.block_dim)
#define gridDim (emu_now.grid_dim)
constexpr int warpSize = 32;

// `extern __shared__ T name[]` at file scope; inside a function it becomes a plain pointer.
template <class T> struct EmuDynamicShared {
    operator T *() const { return (T *)emu_now.dynamic_shared; }
    template <class U> explicit operator U *() const { return (U *)emu_now.dynamic_shared; }
    T &operator[](size_t i) const { return ((T *)emu_now.dynamic_shared)[i]; }
};

// ---- Vectors ------------------------------------------------------------------------------------

#define EMU_VECTORS(T, name, a2, a3, a4)                                                           \
    struct __align__(a2) name##2 { T x, y; };                                                      \
    struct __align__(a3) name##3 { T x, y, z; };                                                   \
    struct __align__(a4) name##4 { T x, y, z, w; };                                                \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                     \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                             \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

#define EMU_VECTORS_UINT(T, name)                                                                  \
    struct __align__(8) name##2 { T x, y; };                                                       \
    struct __align__(16) name##4 { T x, y, z, w; };                                                \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                     \
    inline uint3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                               \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

EMU_VECTORS(signed char, char, 2, 1, 4)
EMU_VECTORS(unsigned char, uchar, 2, 1, 4)
EMU_VECTORS(short, short, 4, 2, 8)
EMU_VECTORS(unsigned short, ushort, 4, 2, 8)
EMU_VECTORS(int, int, 8, 4, 16)
EMU_VECTORS_UINT(unsigned, uint)
EMU_VECTORS(long long, longlong, 16, 8, 16)
EMU_VECTORS(unsigned long long, ulonglong, 16, 8, 16)
EMU_VECTORS(float, float, 8, 4, 16)
EMU_VECTORS(double, double, 16, 8, 16)

// ---- Bits ---------------------------------------------------------------------------------------

template <class To, class From> inline To emu_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(int x) { return emu_bits<float>(x); }
inline int __float_as_int(float x) { return emu_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = s >> (4 * i);
        unsigned byte = both >> (8 * (pick & 7)) & 0xFF;
        if (pick & 8) byte = byte & 0x80 ? 0xFF : 0;
        out |= byte << (8 * i);
    }
    return out;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    return ((unsigned long long)hi << 32 | lo) << (n & 31) >> 32;
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    return ((unsigned long long)hi << 32 | lo) >> (n & 31);
}
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned long long)x * y >> 32; }
inline int __mulhi(int x, int y) { return (long long)x * y >> 32; }
inline int __mul24(int x, int y) { return (x << 8 >> 8) * (y << 8 >> 8); }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
    return c;
}

// ---- Numbers ------------------------------------------------------------------------------------

#define EMU_MATH1(name)                                                                            \
    extern "C" double name(double) noexcept;                                                       \
    extern "C" float name##f(float) noexcept;                                                      \
    inline float name(float x) { return name##f(x); }
#define EMU_MATH2(name)                                                                            \
    extern "C" double name(double, double) noexcept;                                               \
    extern "C" float name##f(float, float) noexcept;                                               \
    inline float name(float x, float y) { return name##f(x, y); }
EMU_MATH1(exp) EMU_MATH1(exp2) EMU_MATH1(exp10) EMU_MATH1(expm1) EMU_MATH1(log) EMU_MATH1(log2)
EMU_MATH1(log10) EMU_MATH1(log1p) EMU_MATH1(sqrt) EMU_MATH1(cbrt) EMU_MATH1(sin) EMU_MATH1(cos)
EMU_MATH1(tan) EMU_MATH1(asin) EMU_MATH1(acos) EMU_MATH1(atan) EMU_MATH1(sinh) EMU_MATH1(cosh)
EMU_MATH1(tanh) EMU_MATH1(asinh) EMU_MATH1(acosh) EMU_MATH1(atanh) EMU_MATH1(erf) EMU_MATH1(erfc)
EMU_MATH1(floor) EMU_MATH1(ceil) EMU_MATH1(trunc) EMU_MATH1(round) EMU_MATH1(rint)
EMU_MATH1(nearbyint) EMU_MATH1(fabs) EMU_MATH1(lgamma) EMU_MATH1(tgamma)
EMU_MATH2(pow) EMU_MATH2(fmod) EMU_MATH2(atan2) EMU_MATH2(hypot) EMU_MATH2(copysign)
EMU_MATH2(fmin) EMU_MATH2(fmax) EMU_MATH2(fdim) EMU_MATH2(remainder) EMU_MATH2(nextafter)
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double ldexp(double, int) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" double frexp(double, int *) noexcept;
extern "C" float frexpf(float, int *) noexcept;
extern "C" void sincosf(float, float *, float *) noexcept;
extern "C" void sincos(double, double *, double *) noexcept;
extern "C" long lrintf(float) noexcept;
extern "C" long lroundf(float) noexcept;
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline float ldexp(float x, int n) { return ldexpf(x, n); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float fdividef(float x, float y) { return x / y; }
inline float normcdff(float x) { return 0.5f * erfcf(-x * 0.70710678118654752f); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline void __sincosf(float x, float *s, float *c) { sincosf(x, s, c); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }

// The device clamps where C++ says nothing; NaN becomes zero.
inline int emu_to_int(float x) {
    return x != x ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1
                                                                            : (int)x;
}
inline unsigned emu_to_uint(float x) {
    return !(x > 0) ? 0 : x >= 4294967296.0f ? 4294967295u : (unsigned)x;
}
inline int __float2int_rn(float x) { return emu_to_int(rintf(x)); }
inline int __float2int_rz(float x) { return emu_to_int(truncf(x)); }
inline int __float2int_rd(float x) { return emu_to_int(floorf(x)); }
inline int __float2int_ru(float x) { return emu_to_int(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return emu_to_uint(rintf(x)); }
inline unsigned __float2uint_rz(float x) { return emu_to_uint(truncf(x)); }
inline unsigned __float2uint_rd(float x) { return emu_to_uint(floorf(x)); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }

inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }

inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }

#define EMU_MIN_MAX(A, B, R)                                                                       \
    inline R min(A x, B y) { return (R)x < (R)y ? (R)x : (R)y; }                                   \
    inline R max(A x, B y) { return (R)x > (R)y ? (R)x : (R)y; }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(int, unsigned, unsigned)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long, unsigned long, unsigned long)
EMU_MIN_MAX(unsigned long, long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
EMU_MIN_MAX(long long, unsigned long long, unsigned long long)
EMU_MIN_MAX(unsigned long long, long long, unsigned long long)
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
inline double min(double x, double y) { return fmin(x, y); }
inline double max(double x, double y) { return fmax(x, y); }
inline double min(float x, double y) { return fmin(x, y); }
inline double max(float x, double y) { return fmax(x, y); }
inline double min(double x, float y) { return fmin(x, y); }
inline double max(double x, float y) { return fmax(x, y); }

// ---- Memory -------------------------------------------------------------------------------------

template <class T> inline T __ldg(const T *p) { return *p; }
template <class T> inline T __ldca(const T *p) { return *p; }
template <class T> inline T __ldcg(const T *p) { return *p; }
template <class T> inline T __ldcs(const T *p) { return *p; }
template <class T> inline T __ldlu(const T *p) { return *p; }
template <class T> inline T __ldcv(const T *p) { return *(const volatile T *)p; }
template <class T> inline void __stwb(T *p, T x) { *p = x; }
template <class T> inline void __stcg(T *p, T x) { *p = x; }
template <class T> inline void __stcs(T *p, T x) { *p = x; }
template <class T> inline void __stwt(T *p, T x) { *p = x; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)p; }
inline void *__cvta_shared_to_generic(size_t p) { return (void *)p; }
inline unsigned __isShared(const void *p) { return emu_is_shared(p, 1); }

// Bits of a number, in the integer type of its size, changed by `f` until nobody was quicker.
template <class I, class T, class F> inline T emu_atomic(T *p, F f) {
    I old = __atomic_load_n((I *)p, __ATOMIC_RELAXED);
    while (true) {
        I next = emu_bits<I>(f(emu_bits<T>(old)));
        if (__atomic_compare_exchange_n((I *)p, &old, next, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
            return emu_bits<T>(old);
    }
}
#define EMU_ATOMIC(T, I, name, value)                                                              \
    inline T name(T *p, T x) {                                                                     \
        return emu_atomic<I>(p, [=](T old) -> T { return value; });                                \
    }
#define EMU_ATOMICS_INTEGER(T)                                                                     \
    EMU_ATOMIC(T, T, atomicAdd, old + x)                                                           \
    EMU_ATOMIC(T, T, atomicExch, (old, x))                                                         \
    EMU_ATOMIC(T, T, atomicMin, x < old ? x : old)                                                 \
    EMU_ATOMIC(T, T, atomicMax, x > old ? x : old)                                                 \
    EMU_ATOMIC(T, T, atomicAnd, old & x)                                                           \
    EMU_ATOMIC(T, T, atomicOr, old | x)                                                            \
    EMU_ATOMIC(T, T, atomicXor, old ^ x)                                                           \
    inline T atomicCAS(T *p, T compare, T x) {                                                     \
        __atomic_compare_exchange_n(p, &compare, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);    \
        return compare;                                                                            \
    }
EMU_ATOMICS_INTEGER(int)
EMU_ATOMICS_INTEGER(unsigned)
EMU_ATOMICS_INTEGER(unsigned long long)
EMU_ATOMIC(int, int, atomicSub, old - x)
EMU_ATOMIC(unsigned, unsigned, atomicSub, old - x)
EMU_ATOMIC(unsigned, unsigned, atomicInc, old >= x ? 0 : old + 1)
EMU_ATOMIC(unsigned, unsigned, atomicDec, old == 0 || old > x ? x : old - 1)
EMU_ATOMIC(long long, long long, atomicMin, x < old ? x : old)
EMU_ATOMIC(long long, long long, atomicMax, x > old ? x : old)
EMU_ATOMIC(float, unsigned, atomicAdd, old + x)
EMU_ATOMIC(float, unsigned, atomicExch, (old, x))
EMU_ATOMIC(double, unsigned long, atomicAdd, old + x)

// ---- Barriers and warps -------------------------------------------------------------------------
// Each function takes its line in the program, for the report of a deadlock.

inline void __syncthreads(int line = __builtin_LINE()) { emu_barrier(0, line); }
inline int __syncthreads_count(int p, int line = __builtin_LINE()) { return emu_barrier(p, line); }
inline int __syncthreads_or(int p, int line = __builtin_LINE()) { return emu_barrier(p, line) > 0; }
inline int __syncthreads_and(int p, int line = __builtin_LINE()) { return !emu_barrier(!p, line); }
inline void __syncwarp(unsigned mask = ~0u, int line = __builtin_LINE()) {
    emu_warp(nullptr, mask, nullptr, line);
}
inline unsigned __activemask() { return emu_live_lanes(); }
inline void __nanosleep(unsigned) { emu_yield(); }

// A lane's value and the lane it wants; a lane that is not there gives 0xFF bytes.
template <class T> struct EmuShuffle {
    T value, out;
    int source;
};
template <class T> void emu_shuffle(void **lanes, unsigned) {
    for (int lane = 0; lane < 32; lane++) {
        auto *to = (EmuShuffle<T> *)lanes[lane];
        if (!to) continue;
        auto *from = (EmuShuffle<T> *)lanes[to->source];
        if (from) to->out = from->value;
        else memset(&to->out, 0xFF, sizeof(T));
    }
}
template <class T> inline T emu_shuffle_from(unsigned mask, T x, int source, int line) {
    EmuShuffle<T> s = {x, x, source};
    emu_warp(emu_shuffle<T>, mask, &s, line);
    return s.out;
}
#define EMU_SHUFFLES(T)                                                                            \
    inline T __shfl_sync(unsigned mask, T x, int source, int width = 32,                           \
                         int line = __builtin_LINE()) {                                            \
        int first = emu_now.lane & ~(width - 1);                                                   \
        return emu_shuffle_from(mask, x, first + (source & (width - 1)), line);                    \
    }                                                                                              \
    inline T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32,                    \
                            int line = __builtin_LINE()) {                                         \
        int lane = emu_now.lane, from = lane - (int)delta;                                         \
        return emu_shuffle_from(mask, x, from < (lane & ~(width - 1)) ? lane : from, line);        \
    }                                                                                              \
    inline T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32,                  \
                              int line = __builtin_LINE()) {                                       \
        int lane = emu_now.lane, from = lane + (int)delta;                                         \
        return emu_shuffle_from(mask, x, from > (lane | (width - 1)) ? lane : from, line);         \
    }                                                                                              \
    inline T __shfl_xor_sync(unsigned mask, T x, int bits, int width = 32,                         \
                             int line = __builtin_LINE()) {                                        \
        int lane = emu_now.lane, from = lane ^ bits;                                               \
        return emu_shuffle_from(mask, x, from > (lane | (width - 1)) ? lane : from, line);         \
    }
EMU_SHUFFLES(int)
EMU_SHUFFLES(unsigned)
EMU_SHUFFLES(long)
EMU_SHUFFLES(unsigned long)
EMU_SHUFFLES(long long)
EMU_SHUFFLES(unsigned long long)
EMU_SHUFFLES(float)
EMU_SHUFFLES(double)

struct EmuVote {
    unsigned long long value;
    unsigned out;
};
inline void emu_vote(void **lanes, unsigned) {
    unsigned ballot = 0;
    for (int i = 0; i < 32; i++)
        if (lanes[i] && ((EmuVote *)lanes[i])->value) ballot |= 1u << i;
    for (int i = 0; i < 32; i++)
        if (lanes[i]) ((EmuVote *)lanes[i])->out = ballot;
}
inline void emu_match(void **lanes, unsigned) {
    for (int i = 0; i < 32; i++) {
        auto *me = (EmuVote *)lanes[i];
        if (!me) continue;
        me->out = 0;
        for (int k = 0; k < 32; k++)
            if (lanes[k] && ((EmuVote *)lanes[k])->value == me->value) me->out |= 1u << k;
    }
}
inline unsigned __ballot_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    EmuVote v = {p != 0, 0};
    emu_warp(emu_vote, mask, &v, line);
    return v.out;
}
inline int __any_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return __ballot_sync(mask, p, line) != 0;
}
inline int __all_sync(unsigned mask, int p, int line = __builtin_LINE()) {
    return __ballot_sync(mask, !p, line) == 0;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T x, int line = __builtin_LINE()) {
    EmuVote v = {0, 0};
    memcpy(&v.value, &x, sizeof x);
    emu_warp(emu_match, mask, &v, line);
    return v.out;
}

template <class T> struct EmuReduce {
    T value;
};
#define EMU_REDUCE(T, op, expression)                                                              \
    inline void emu_reduce_##op(T, void **lanes, unsigned) {                                       \
        bool first = true;                                                                         \
        T x = 0;                                                                                   \
        for (int i = 0; i < 32; i++) {                                                             \
            if (!lanes[i]) continue;                                                               \
            T y = ((EmuReduce<T> *)lanes[i])->value;                                               \
            x = first ? y : (expression);                                                          \
            first = false;                                                                         \
        }                                                                                          \
        for (int i = 0; i < 32; i++)                                                               \
            if (lanes[i]) ((EmuReduce<T> *)lanes[i])->value = x;                                   \
    }                                                                                              \
    inline T __reduce_##op##_sync(unsigned mask, T x, int line = __builtin_LINE()) {               \
        EmuReduce<T> r = {x};                                                                      \
        EmuWarpFn fn = [](void **lanes, unsigned m) { emu_reduce_##op(T(), lanes, m); };           \
        emu_warp(fn, mask, &r, line);                                                              \
        return r.value;                                                                            \
    }
EMU_REDUCE(int, add, x + y)
EMU_REDUCE(unsigned, add, x + y)
EMU_REDUCE(int, min, y < x ? y : x)
EMU_REDUCE(unsigned, min, y < x ? y : x)
EMU_REDUCE(int, max, y > x ? y : x)
EMU_REDUCE(unsigned, max, y > x ? y : x)
EMU_REDUCE(unsigned, and, x & y)
EMU_REDUCE(unsigned, or, x | y)
EMU_REDUCE(unsigned, xor, x ^ y)

// ---- The rest -----------------------------------------------------------------------------------

#if defined(__x86_64__)
inline long long clock64() { return __builtin_ia32_rdtsc(); }
#else
inline long long clock64() { return 0; }
#endif
inline clock_t clock() { return clock64(); }
inline unsigned long long __globaltimer() { return clock64(); }
inline void __trap(int line = __builtin_LINE()) { emu_fail(719, "line %d: __trap", line); }
#define assert(x) ((x) ? (void)0 : emu_fail(710, "line %d: assert(%s)", __LINE__, #x))
#define __builtin_assume(x) ((void)0)
#define alignas(n) __attribute__((aligned(n)))

// ---- Instructions of tensor cores ---------------------------------------------------------------
// Layouts as the PTX manual draws them. With g = lane / 4 and t = lane % 4:
//
//     m16n8k16, 16 bits: a[0] (g, 2t) (g, 2t+1)     a[1] the same in row g + 8
//                        a[2] (g, 2t+8) (g, 2t+9)   a[3] the same in row g + 8
//                        b[0] (2t, g) (2t+1, g)     b[1] (2t+8, g) (2t+9, g)
//     m16n8k8, tf32:     a[0] (g, t)  a[1] (g+8, t)  a[2] (g, t+4)  a[3] (g+8, t+4)
//                        b[0] (t, g)  b[1] (t+4, g)
//     d of both:         d[0] (g, 2t)  d[1] (g, 2t+1)  d[2] (g+8, 2t)  d[3] (g+8, 2t+1)
//
// Products are exact and are summed in f64, which is rounded once; the device cuts off a little
// more.

struct EmuMma {
    float *d;
    const unsigned *a, *b;
};

inline float emu_bf16(unsigned bits) { return __uint_as_float(bits << 16); }
inline float emu_tf32(unsigned bits) { return __uint_as_float(bits & 0xFFFFE000u); }

inline void emu_need_warp(void **lanes, unsigned mask, const char *what) {
    for (int i = 0; i < 32; i++)
        if (!lanes[i] || mask != ~0u) emu_fail(719, "%s needs all 32 lanes of the warp", what);
}

template <int K>
inline void emu_mma_finish(void **lanes, const float (*a)[K], const float (*b)[8]) {
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + (i / 2) * 8, col = lane % 4 * 2 + i % 2;
            float *d = ((EmuMma *)lanes[lane])->d + i;
            double sum = *d;
            for (int k = 0; k < K; k++) sum += (double)a[row][k] * b[k][col];
            *d = (float)sum;
        }
}
inline void emu_mma_bf16_all(void **lanes, unsigned mask) {
    emu_need_warp(lanes, mask, "mma");
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        auto *m = (EmuMma *)lanes[lane];
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++)
            for (int half = 0; half < 2; half++)
                a[g + i % 2 * 8][2 * t + half + i / 2 * 8] =
                    emu_bf16(m->a[i] >> 16 * half & 0xFFFF);
        for (int i = 0; i < 2; i++)
            for (int half = 0; half < 2; half++)
                b[2 * t + half + i * 8][g] = emu_bf16(m->b[i] >> 16 * half & 0xFFFF);
    }
    emu_mma_finish<16>(lanes, a, b);
}
inline void emu_mma_tf32_all(void **lanes, unsigned mask) {
    emu_need_warp(lanes, mask, "mma");
    float a[16][8], b[8][8];
    for (int lane = 0; lane < 32; lane++) {
        auto *m = (EmuMma *)lanes[lane];
        int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) a[g + i % 2 * 8][t + i / 2 * 4] = emu_tf32(m->a[i]);
        for (int i = 0; i < 2; i++) b[t + i * 4][g] = emu_tf32(m->b[i]);
    }
    emu_mma_finish<8>(lanes, a, b);
}
// d += a * b. mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
inline void emu_mma_m16n8k16_bf16(float d[4], const unsigned a[4], const unsigned b[2],
                                  int line = __builtin_LINE()) {
    EmuMma m = {d, a, b};
    emu_warp(emu_mma_bf16_all, ~0u, &m, line);
}
// d += a * b. mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
inline void emu_mma_m16n8k8_tf32(float d[4], const unsigned a[4], const unsigned b[2],
                                 int line = __builtin_LINE()) {
    EmuMma m = {d, a, b};
    emu_warp(emu_mma_tf32_all, ~0u, &m, line);
}

// Lane i gives the address of row i % 8 of matrix i / 8; lanes past the last matrix give nothing.
struct EmuLdmatrix {
    unsigned *r;
    const void *row;
};
template <int N, bool TRANSPOSED> inline void emu_ldmatrix_all(void **lanes, unsigned mask) {
    emu_need_warp(lanes, mask, "ldmatrix");
    unsigned short m[N][8][8];
    for (int i = 0; i < 8 * N; i++) {
        const void *row = ((EmuLdmatrix *)lanes[i])->row;
        if ((size_t)row % 16) emu_fail(716, "ldmatrix: the row of lane %d is misaligned", i);
        if (!emu_is_shared(row, 16)) emu_fail(700, "ldmatrix: the row of lane %d is not shared", i);
        memcpy(m[i / 8][i % 8], row, 16);
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < N; i++) {
            int g = lane / 4, t = lane % 4;
            unsigned lo = TRANSPOSED ? m[i][2 * t][g] : m[i][g][2 * t];
            unsigned hi = TRANSPOSED ? m[i][2 * t + 1][g] : m[i][g][2 * t + 1];
            ((EmuLdmatrix *)lanes[lane])->r[i] = hi << 16 | lo;
        }
}
template <int N, bool TRANSPOSED>
inline void emu_ldmatrix(unsigned *r, const void *row, int line) {
    EmuLdmatrix m = {r, row};
    emu_warp(emu_ldmatrix_all<N, TRANSPOSED>, ~0u, &m, line);
}
inline void emu_ldmatrix_x4(unsigned r[4], const void *row, int line = __builtin_LINE()) {
    emu_ldmatrix<4, false>(r, row, line);
}
inline void emu_ldmatrix_x4_trans(unsigned r[4], const void *row, int line = __builtin_LINE()) {
    emu_ldmatrix<4, true>(r, row, line);
}
inline void emu_ldmatrix_x2(unsigned r[2], const void *row, int line = __builtin_LINE()) {
    emu_ldmatrix<2, false>(r, row, line);
}
inline void emu_ldmatrix_x2_trans(unsigned r[2], const void *row, int line = __builtin_LINE()) {
    emu_ldmatrix<2, true>(r, row, line);
}

// The copy lands at emu_cp_async_wait, so that a missing wait shows. cp.async.wait_all waits for
// copies that are not committed too: emu_cp_async_wait_all.
inline void emu_cp_async4(void *shared, const void *global) { emu_cp_async(shared, global, 4, 4); }
inline void emu_cp_async8(void *shared, const void *global) { emu_cp_async(shared, global, 8, 8); }
inline void emu_cp_async16(void *shared, const void *global) {
    emu_cp_async(shared, global, 16, 16);
}
// Copies the first `bytes` and fills the rest of the 16 with zeros.
inline void emu_cp_async16_zfill(void *shared, const void *global, unsigned bytes) {
    emu_cp_async(shared, global, bytes, 16);
}
inline void emu_cp_async_wait_all() {
    emu_cp_async_commit();
    emu_cp_async_wait(0);
}

// ---- Kernels as the driver calls them -----------------------------------------------------------

template <unsigned long... I> struct EmuIndices {};
template <class... P> struct EmuParams {
    static constexpr unsigned long sizes[] = {sizeof...(P), sizeof(P)...};
    template <unsigned long... I>
    static void call(void (*f)(P...), void **args, EmuIndices<I...>) {
        f(*(P *)args[I]...);
    }
};
template <class... P> EmuParams<P...> emu_params(void (*)(P...));
template <class... P> inline void emu_call(void (*f)(P...), void **args) {
    EmuParams<P...>::call(f, args, EmuIndices<__integer_pack(sizeof...(P))...>());
}
template <auto F> void emu_entry(void **args) { emu_call(F, args); }
constexpr int emu_bound(int max_threads, int = 0, int = 0) { return max_threads; }
