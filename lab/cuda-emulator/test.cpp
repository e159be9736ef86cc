// The self-test of the software CUDA device, through dlopen and the interfaces of the real
// libraries. Each test runs in a process of its own, because an error of a kernel is for the life
// of a process.
//
// Not here: a check against a real device; speed.
// (tidy: allow long, a list of tests)
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static const char *KERNELS = R"cuda(
#ifndef SCALE
#error SCALE comes from an option
#endif
#define KERNEL extern "C" __global__ void

KERNEL add(const float* __restrict__ x, const float* __restrict__ y, float* z, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) z[i] = x[i] + y[i];
}

struct Shape { int n; float factor; unsigned short small[3]; double big; };

extern "C" __global__ void __launch_bounds__(256, 2) scale(float* x, const Shape shape) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < shape.n) x[i] = x[i] * shape.factor * SCALE + shape.small[2] + (float)shape.big;
}

__device__ __forceinline__ float warp_sum(float x) {
    #pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xffffffff, x, offset);
    return x;
}

// One block: a sum in a loop, so that every barrier is passed many times.
KERNEL sum_rows(const float* x, float* out, int n_cols) {
    __shared__ float part[32];
    __shared__ float total;
    for (int row = blockIdx.x; row < 10; row += gridDim.x) {
        float s = 0;
        for (int i = threadIdx.x; i < n_cols; i += blockDim.x) s += x[row * n_cols + i];
        s = warp_sum(s);
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
        __syncthreads();
        if (threadIdx.x < 32) {
            s = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0.0f;
            s = warp_sum(s);
            if (threadIdx.x == 0) total = s;
        }
        __syncthreads();
        if (threadIdx.x == blockDim.x - 1) out[row] = total;
        __syncthreads();
    }
}

KERNEL reverse(int* x) {
    extern __shared__ __align__(16) int held[];
    held[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];
}

// What a kernel reads of shared memory that nobody wrote.
KERNEL unwritten(float* out) {
    __shared__ float tile[64];
    extern __shared__ float held[];
    out[0] = tile[5];
    out[1] = held[5];
}

KERNEL missing_barrier(int* out) {
    __shared__ int x;
    if (threadIdx.x == 0) x = 7;
    out[threadIdx.x] = x;
}

__constant__ float table[4];
__device__ unsigned counter;

KERNEL votes(unsigned* out) {
    unsigned lane = threadIdx.x % 32;
    if (lane >= 16) {
        out[0 + lane] = __ballot_sync(0xffff0000, lane & 1);
    } else {
        out[lane] = __ballot_sync(0x0000ffff, lane < 4);
    }
    out[32 + lane] = __shfl_up_sync(~0u, lane, 3, 8);
    out[64 + lane] = __shfl_down_sync(~0u, lane, 3, 8);
    out[96 + lane] = __reduce_max_sync(~0u, lane * 3);
    out[128 + lane] = (unsigned)(__shfl_sync(~0u, (unsigned long long)lane << 40, 9) >> 40);
    out[160 + lane] = __syncthreads_count(lane < 5);
    out[192 + lane] = (unsigned)table[lane % 4];
    atomicAdd(&counter, 1u);
}

KERNEL mma_bf16(const unsigned short* a, const unsigned short* b, float* d) {
    __shared__ __align__(16) unsigned short sa[16 * 16], sb[16 * 8];
    int lane = threadIdx.x;
    emu_cp_async16(sa + lane * 8, a + lane * 8);
    if (lane < 16) emu_cp_async16(sb + lane * 8, b + lane * 8);
    emu_cp_async_commit();
    emu_cp_async_wait(0);
    __syncwarp();
    unsigned ra[4], rb[2];
    emu_ldmatrix_x4(ra, sa + (lane % 16) * 16 + lane / 16 * 8);
    emu_ldmatrix_x2_trans(rb, sb + (lane % 16) * 8);
    float c[4] = {1, 1, 1, 1};
    emu_mma_m16n8k16_bf16(c, ra, rb);
    for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
}

KERNEL mma_tf32(const float* a, const float* b, float* d) {
    int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned ra[4], rb[2];
    for (int i = 0; i < 4; i++) ra[i] = __float_as_uint(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
    for (int i = 0; i < 2; i++) rb[i] = __float_as_uint(b[(t + i * 4) * 8 + g]);
    float c[4] = {};
    emu_mma_m16n8k8_tf32(c, ra, rb);
    for (int i = 0; i < 4; i++) d[(g + i / 2 * 8) * 8 + t * 2 + i % 2] = c[i];
}

// Two matrices, plain and transposed, as they lie in registers.
KERNEL load_matrices(const unsigned short* x, unsigned* out) {
    __shared__ __align__(16) unsigned short m[4 * 64];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) m[i] = x[i];
    __syncwarp();
    unsigned r[4];
    emu_ldmatrix_x4(r, m + lane * 8);
    for (int i = 0; i < 4; i++) out[i * 32 + lane] = r[i];
    emu_ldmatrix_x4_trans(r, m + lane * 8);
    for (int i = 0; i < 4; i++) out[128 + i * 32 + lane] = r[i];
}

KERNEL copy_without_wait(const float4* x, float* out) {
    __shared__ float4 held[32];
    emu_cp_async16(&held[threadIdx.x], &x[threadIdx.x]);
    emu_cp_async_commit();
    out[threadIdx.x] = held[threadIdx.x].x;
}

KERNEL write_at(float* x, long long i) { x[i] = 1; }
KERNEL add_at(float* x, long long i) { x[i] += 1; }
KERNEL read_wide(const float* x, float4* out) { *out = *(const float4*)(x + 1); }
KERNEL shared_index(int i, int* out) { __shared__ int x[8]; x[i] = 1; *out = x[0]; }
KERNEL diverged(int* x) {
    if (threadIdx.x < 40) __syncthreads();
    x[threadIdx.x] = 1;
}
KERNEL half_warp(int* x) {
    if (threadIdx.x < 16) x[threadIdx.x] = __shfl_sync(0xffffffff, 1, 0);
    else __syncthreads();
}
KERNEL asserts(int* x) { assert(x == nullptr); }
)cuda";

// ---- The libraries ------------------------------------------------------------------------------

using Handle = void *;
using Pointer = uint64_t;

static Handle open_library(const char *name) {
    Handle library = dlopen(name, RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return library;
}

template <class... A> static int call(Handle library, const char *name, A... args) {
    auto f = (int (*)(A...))dlsym(library, name);
    if (!f) {
        fprintf(stderr, "missing symbol %s\n", name);
        exit(1);
    }
    return f(args...);
}

static Handle cuda, nvrtc, lt;

template <class... A> static int cu(const char *name, A... args) {
    return call(cuda, name, args...);
}

template <class... A> static int blas(const char *name, A... args) {
    return call(lt, name, args...);
}

#define CHECK(x)                                                                                   \
    do {                                                                                           \
        if (!(x)) {                                                                                \
            fprintf(stderr, "test.cpp:%d: %s\n", __LINE__, #x);                                    \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static std::string compile(const char *source, std::vector<const char *> options, int expected) {
    Handle program = nullptr;
    CHECK(call(nvrtc, "nvrtcCreateProgram", &program, source, "test.cu", 0, (char **)nullptr,
               (char **)nullptr) == 0);
    int status = call(nvrtc, "nvrtcCompileProgram", program, (int)options.size(), options.data());
    size_t bytes = 0;
    bool good = status == 0;
    CHECK(call(nvrtc, good ? "nvrtcGetPTXSize" : "nvrtcGetProgramLogSize", program, &bytes) == 0);
    std::string text(bytes, '\0');
    CHECK(call(nvrtc, good ? "nvrtcGetPTX" : "nvrtcGetProgramLog", program, &text[0]) == 0);
    if (status != expected) fprintf(stderr, "%s\n", text.c_str());
    CHECK(status == expected);
    CHECK(call(nvrtc, "nvrtcDestroyProgram", &program) == 0);
    return text;
}

static Handle module;

static void start() {
    cuda = open_library("libcuda.so.1");
    nvrtc = open_library("libnvrtc.so.13");
    lt = open_library("libcublasLt.so.13");
    Handle context;
    CHECK(cu("cuInit", 0u) == 0);
    CHECK(cu("cuDevicePrimaryCtxRetain", &context, 0) == 0);
    CHECK(cu("cuCtxSetCurrent", context) == 0);
    std::string ptx = compile(KERNELS, {"--gpu-architecture=compute_89", "-DSCALE=2"}, 0);
    CHECK(cu("cuModuleLoadData", &module, ptx.c_str()) == 0);
}

static Pointer device(size_t bytes) {
    Pointer p = 0;
    CHECK(cu("cuMemAlloc_v2", &p, bytes) == 0);
    return p;
}

template <class T> static Pointer to_device(const std::vector<T> &x) {
    Pointer p = device(x.size() * sizeof(T));
    CHECK(cu("cuMemcpyHtoD_v2", p, (const void *)x.data(), x.size() * sizeof(T)) == 0);
    return p;
}

template <class T> static std::vector<T> to_host(Pointer p, size_t n) {
    std::vector<T> x(n);
    CHECK(cu("cuMemcpyDtoH_v2", (void *)x.data(), p, n * sizeof(T)) == 0);
    return x;
}

static Handle function(const char *name) {
    Handle f;
    CHECK(cu("cuModuleGetFunction", &f, module, name) == 0);
    return f;
}

static Handle stream = nullptr;

template <class... A>
static int launch_shared(const char *name, unsigned grid, unsigned block, unsigned shared,
                         A... args) {
    void *params[] = {&args..., nullptr};
    return cu("cuLaunchKernel", function(name), grid, 1u, 1u, block, 1u, 1u, shared, stream,
              (void **)params, (void **)nullptr);
}

template <class... A>
static int launch(const char *name, unsigned grid, unsigned block, A... args) {
    return launch_shared(name, grid, block, 0, args...);
}

static uint16_t bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static float of_bf16(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Small numbers, different everywhere, exact in bf16.
static float number(int i) { return (float)((i * 37 + 11) % 29 - 14) / 8; }

// ---- Tests --------------------------------------------------------------------------------------

static void vector_add() {
    int n = 1000;
    std::vector<float> x(n), y(n);
    for (int i = 0; i < n; i++) x[i] = number(i), y[i] = number(3 * i);
    Pointer z = device(4 * n);
    CHECK(std::isnan(to_host<float>(z, n)[n - 1])); // fresh memory is NaN
    CHECK(launch("add", 8, 128, to_device(x), to_device(y), z, n) == 0);
    auto out = to_host<float>(z, n);
    for (int i = 0; i < n; i++) CHECK(out[i] == x[i] + y[i]);
    CHECK(cu("cuCtxSynchronize") == 0);
    CHECK(cu("cuMemFree_v2", z) == 0);
}

static void block_reduction() {
    int n = 777;
    std::vector<float> x(10 * n);
    for (size_t i = 0; i < x.size(); i++) x[i] = number(i);
    Pointer out = device(40);
    CHECK(launch("sum_rows", 3, 256, to_device(x), out, n) == 0);
    auto sums = to_host<float>(out, 10);
    for (int row = 0; row < 10; row++) {
        float expected = 0;
        for (int i = 0; i < n; i++) expected += x[row * n + i];
        CHECK(sums[row] == expected);
    }
}

static void struct_parameter() {
    struct {
        int n;
        float factor;
        uint16_t small[3];
        double big;
    } shape = {50, 3, {1, 2, 5}, 0.5};
    Pointer x = to_device(std::vector<float>(64, 1.0f));
    CHECK(launch("scale", 1, 64, x, shape) == 0);
    auto out = to_host<float>(x, 64);
    CHECK(out[0] == 11.5f && out[49] == 11.5f && out[50] == 1);
    CHECK(launch("scale", 1, 512, x, shape) == 701); // more than __launch_bounds__
}

static void dynamic_shared_memory() {
    std::vector<int> x(100);
    for (int i = 0; i < 100; i++) x[i] = i;
    Pointer p = to_device(x);
    CHECK(launch_shared("reverse", 1, 100, 400, p) == 0);
    auto out = to_host<int>(p, 100);
    for (int i = 0; i < 100; i++) CHECK(out[i] == 99 - i);
    CHECK(launch_shared("reverse", 1, 100, 60000, p) == 1);
    CHECK(cu("cuFuncSetAttribute", function("reverse"), 8, 60000) == 0);
    CHECK(launch_shared("reverse", 1, 100, 60000, p) == 0);
}

static void dynamic_shared_memory_too_small() {
    Pointer p = to_device(std::vector<int>(100));
    CHECK(launch_shared("reverse", 1, 100, 384, p) != 0);
    CHECK(cu("cuCtxSynchronize") == 700);
}

static void unwritten_memory_is_nan() {
    Pointer out = device(8);
    CHECK(launch_shared("unwritten", 1, 1, 64, out) == 0);
    auto x = to_host<float>(out, 2);
    CHECK(std::isnan(x[0]) && std::isnan(x[1]));
    CHECK(launch("missing_barrier", 1, 64, out = device(256)) == 0);
    auto y = to_host<int>(out, 64);
    CHECK(y[0] == 7 && y[63] == -1); // one order of the warps is a wrong one
}

static void warps_and_variables() {
    Handle m = module;
    Pointer table, counter, out = device(4 * 224);
    size_t bytes;
    CHECK(cu("cuModuleGetGlobal_v2", &table, &bytes, m, "table") == 0 && bytes == 16);
    CHECK(cu("cuModuleGetGlobal_v2", &counter, &bytes, m, "counter") == 0 && bytes == 4);
    std::vector<float> values = {5, 6, 7, 8};
    CHECK(cu("cuMemcpyHtoD_v2", table, (const void *)values.data(), (size_t)16) == 0);
    CHECK(launch("votes", 1, 32, out) == 0);
    auto x = to_host<unsigned>(out, 224);
    CHECK(to_host<unsigned>(counter, 1)[0] == 32);
    for (unsigned i = 0; i < 32; i++) {
        CHECK(x[i] == (i < 16 ? 0xFu : 0xAAAA0000u));
        CHECK(x[32 + i] == (i % 8 < 3 ? i : i - 3));
        CHECK(x[64 + i] == (i % 8 > 4 ? i : i + 3));
        CHECK(x[96 + i] == 93 && x[128 + i] == 9 && x[160 + i] == 5 && x[192 + i] == 5 + i % 4);
    }
}

static void tensor_cores() {
    std::vector<uint16_t> a(256), b(128);
    for (int i = 0; i < 256; i++) a[i] = bf16(number(i));
    for (int i = 0; i < 128; i++) b[i] = bf16(number(5 * i + 2));
    Pointer d = device(4 * 128);
    CHECK(launch("mma_bf16", 1, 32, to_device(a), to_device(b), d) == 0);
    auto out = to_host<float>(d, 128);
    for (int row = 0; row < 16; row++)
        for (int col = 0; col < 8; col++) {
            float expected = 1;
            for (int k = 0; k < 16; k++)
                expected += of_bf16(a[row * 16 + k]) * of_bf16(b[k * 8 + col]);
            CHECK(out[row * 8 + col] == expected);
        }
    std::vector<float> fa(128), fb(64);
    for (int i = 0; i < 128; i++) fa[i] = number(i);
    for (int i = 0; i < 64; i++) fb[i] = number(7 * i);
    CHECK(launch("mma_tf32", 1, 32, to_device(fa), to_device(fb), d) == 0);
    out = to_host<float>(d, 128);
    for (int row = 0; row < 16; row++)
        for (int col = 0; col < 8; col++) {
            float expected = 0;
            for (int k = 0; k < 8; k++) expected += fa[row * 8 + k] * fb[k * 8 + col];
            CHECK(out[row * 8 + col] == expected);
        }
}

static void ldmatrix() {
    std::vector<uint16_t> x(256);
    for (int i = 0; i < 256; i++) x[i] = i;
    Pointer out = device(4 * 256);
    CHECK(launch("load_matrices", 1, 32, to_device(x), out) == 0);
    auto r = to_host<unsigned>(out, 256);
    for (unsigned m = 0; m < 4; m++)
        for (unsigned lane = 0; lane < 32; lane++) {
            unsigned plain = m * 64 + lane / 4 * 8 + lane % 4 * 2;
            unsigned across = m * 64 + lane % 4 * 16 + lane / 4;
            CHECK(r[m * 32 + lane] == ((plain + 1) << 16 | plain));
            CHECK(r[128 + m * 32 + lane] == ((across + 8) << 16 | across));
        }
}

static void copies_land_when_waited_for() {
    Pointer out = device(128);
    CHECK(launch("copy_without_wait", 1, 32, to_device(std::vector<float>(128, 1.0f)), out) == 0);
    CHECK(std::isnan(to_host<float>(out, 32)[0]));
}

static void graphs() {
    int n = 64;
    Pointer x = to_device(std::vector<float>(n, 1.0f)), y = device(4 * n), z = device(4 * n);
    Pointer inner = 0;
    CHECK(cu("cuStreamCreate", &stream, 1u) == 0);
    CHECK(cu("cuStreamBeginCapture_v2", stream, 0) == 0);
    CHECK(cu("cuMemsetD32Async", y, 0x40000000u, (size_t)n, stream) == 0); // 2.0
    CHECK(cu("cuMemAllocAsync", &inner, (size_t)(4 * n), stream) == 0);
    CHECK(launch("add", 1, 64, x, y, inner, n) == 0);
    CHECK(launch("add", 1, 64, inner, x, z, n) == 0);
    CHECK(cu("cuMemFreeAsync", inner, stream) == 0);
    CHECK(cu("cuMemcpyDtoDAsync_v2", x, z, (size_t)(4 * n), stream) == 0);
    int status = 0;
    CHECK(cu("cuStreamIsCapturing", stream, &status) == 0 && status == 1);
    Handle graph, exec;
    CHECK(cu("cuStreamEndCapture", stream, &graph) == 0);
    CHECK(to_host<float>(x, n)[0] == 1); // nothing has run yet
    CHECK(cu("cuGraphInstantiateWithFlags", &exec, graph, 0ull) == 0);
    CHECK(cu("cuGraphLaunch", exec, stream) == 0);
    CHECK(to_host<float>(x, n)[n - 1] == 4);
    CHECK(cu("cuGraphLaunch", exec, stream) == 0);
    CHECK(to_host<float>(x, n)[n - 1] == 10);
    CHECK(cu("cuGraphExecDestroy", exec) == 0 && cu("cuGraphDestroy", graph) == 0);
    CHECK(cu("cuStreamBeginCapture_v2", stream, 0) == 0);
    CHECK(cu("cuStreamSynchronize", stream) == 900); // spoils the capture
    CHECK(cu("cuStreamEndCapture", stream, &graph) == 901);
}

static void writes_out_of_bounds() {
    Pointer x = device(40);
    CHECK(launch("write_at", 1, 1, x, 10ll) == 700); // into the red zone behind
    CHECK(cu("cuCtxSynchronize") == 700);
    CHECK(cu("cuMemAlloc_v2", &x, (size_t)4) == 700);
}

static void sums_out_of_bounds() {
    Pointer x = device(40);
    CHECK(launch("add_at", 1, 1, x, 10ll) == 700); // NaN + 1 is another NaN
}

static void writes_far_out_of_bounds() {
    Pointer x = device(40);
    CHECK(launch("write_at", 4, 64, x, 5000ll) == 700); // a closed page, in many threads at once
}

static void writes_before_memory() {
    Pointer x = device(40);
    CHECK(launch("write_at", 1, 1, x, -1ll) == 700);
}

static void use_after_free() {
    Pointer x = device(400);
    CHECK(cu("cuMemFree_v2", x) == 0);
    CHECK(cu("cuMemFree_v2", x) == 1);
    CHECK(launch("write_at", 1, 1, x, 0ll) == 700);
}

static void misaligned_read() {
    Pointer x = device(64), out = device(16);
    CHECK(launch("read_wide", 1, 1, x, out) == 716);
}

static void index_outside_of_shared_array() {
    Pointer out = device(4);
    CHECK(launch("shared_index", 1, 1, 7, out) == 0);
    CHECK(launch("shared_index", 1, 1, 8, out) == 700);
}

static void deadlocks() {
    CHECK(launch("diverged", 2, 64, device(256)) == 719);
    CHECK(cu("cuCtxSynchronize") == 719);
}

static void deadlock_within_a_warp() { CHECK(launch("half_warp", 1, 32, device(256)) == 719); }

static void asserts() { CHECK(launch("asserts", 1, 32, device(4)) == 710); }

static void errors_of_the_compiler() {
    std::string log = compile("extern \"C\" __global__ void f() {\n  int x = y;\n}", {}, 6);
    CHECK(log.find("test.cu:2") != std::string::npos);
    compile("extern \"C\" __global__ void f() {}", {"--no-such-option"}, 5);
    Handle f;
    CHECK(cu("cuModuleGetFunction", &f, module, "nobody") == 500);
    CHECK(cu("cuModuleLoadData", &f, ".version 8.0") == 200);
}

static void copies_are_checked() {
    std::vector<float> x(20);
    Pointer p = device(40);
    CHECK(cu("cuMemcpyHtoD_v2", p, (const void *)x.data(), (size_t)44) == 1);
    CHECK(cu("cuMemcpyDtoH_v2", (void *)x.data(), p + 4, (size_t)40) == 1);
    CHECK(cu("cuMemAlloc_v2", &p, (size_t)0) == 1);
    CHECK(cu("cuMemAlloc_v2", &p, (size_t)9 << 30) == 2);
}

// One product by cublasLt against a loop. Everything is bf16, in columns, with sums in f32.
static void product(int trans_a, int trans_b, float beta, bool bias) {
    const int m = 24, n = 17, k = 40, n_batches = 2;
    std::vector<uint16_t> a(n_batches * m * k), b(n_batches * k * n), c(n_batches * m * n), v(m);
    for (size_t i = 0; i < a.size(); i++) a[i] = bf16(number(i));
    for (size_t i = 0; i < b.size(); i++) b[i] = bf16(number(3 * i));
    for (size_t i = 0; i < c.size(); i++) c[i] = bf16(number(7 * i));
    for (int i = 0; i < m; i++) v[i] = bf16(number(i + 5));
    Pointer da = to_device(a), db = to_device(b), dc = to_device(c), dv = to_device(v);
    Handle handle, desc, la, lb, lc;
    CHECK(blas("cublasLtCreate", &handle) == 0);
    CHECK(blas("cublasLtMatmulDescCreate", &desc, 68, 0) == 0);
    CHECK(blas("cublasLtMatmulDescSetAttribute", desc, 3, (void *)&trans_a, (size_t)4) == 0);
    CHECK(blas("cublasLtMatmulDescSetAttribute", desc, 4, (void *)&trans_b, (size_t)4) == 0);
    unsigned epilogue = bias ? 4 : 1;
    CHECK(blas("cublasLtMatmulDescSetAttribute", desc, 7, (void *)&epilogue, (size_t)4) == 0);
    CHECK(blas("cublasLtMatmulDescSetAttribute", desc, 8, (void *)&dv, (size_t)8) == 0);
    auto layout = [&](Handle *l, int64_t rows, int64_t cols) {
        int64_t stride = rows * cols;
        CHECK(blas("cublasLtMatrixLayoutCreate", l, 14, (uint64_t)rows, (uint64_t)cols, rows) == 0);
        CHECK(blas("cublasLtMatrixLayoutSetAttribute", *l, 5, (void *)&n_batches, (size_t)4) == 0);
        CHECK(blas("cublasLtMatrixLayoutSetAttribute", *l, 6, (void *)&stride, (size_t)8) == 0);
    };
    layout(&la, trans_a ? k : m, trans_a ? m : k);
    layout(&lb, trans_b ? n : k, trans_b ? k : n);
    layout(&lc, m, n);
    char results[256];
    int n_found = 0;
    CHECK(blas("cublasLtMatmulAlgoGetHeuristic", handle, desc, la, lb, lc, lc, (Handle) nullptr, 1,
               (void *)results, &n_found) == 0);
    float alpha = 0.5f;
    CHECK(n_found == 1);
    CHECK(blas("cublasLtMatmul", handle, desc, (void *)&alpha, da, la, db, lb, (void *)&beta, dc,
               lc, dc, lc, (void *)results, (Handle) nullptr, (size_t)0, (Handle) nullptr) == 0);
    auto out = to_host<uint16_t>(dc, c.size());
    for (int z = 0; z < n_batches; z++)
        for (int row = 0; row < m; row++)
            for (int col = 0; col < n; col++) {
                float sum = 0;
                for (int i = 0; i < k; i++)
                    sum += of_bf16(a[z * m * k + (trans_a ? row * k + i : i * m + row)]) *
                           of_bf16(b[z * k * n + (trans_b ? i * n + col : col * k + i)]);
                float x = alpha * sum + (bias ? of_bf16(v[row]) : 0);
                if (beta != 0) x += beta * of_bf16(c[z * m * n + col * m + row]);
                CHECK(out[z * m * n + col * m + row] == bf16(x));
            }
}

static void cublaslt_products() {
    for (int i = 0; i < 4; i++) product(i & 1, i / 2, 0, false);
    product(1, 0, 0.25f, true);
}

// f32 products in rows with the epilogues of a layer with a bias, there and back.
static void epilogue_product(unsigned epilogue, Pointer bias, Pointer aux, Pointer d,
                             int status = 0) {
    const int64_t m = 16, n = 9, k = 20;
    std::vector<float> a(m * k), b(k * n);
    for (size_t i = 0; i < a.size(); i++) a[i] = number(i);
    for (size_t i = 0; i < b.size(); i++) b[i] = number(3 * i) / 4;
    Handle handle, desc, la, lb, ld;
    CHECK(blas("cublasLtCreate", &handle) == 0);
    CHECK(blas("cublasLtMatmulDescCreate", &desc, 68, 0) == 0);
    int64_t aux_ld = m;
    CHECK(blas("cublasLtMatmulDescSetAttribute", desc, 7, (void *)&epilogue, (size_t)4) == 0);
    CHECK(blas("cublasLtMatmulDescSetAttribute", desc, 8, (void *)&bias, (size_t)8) == 0);
    CHECK(blas("cublasLtMatmulDescSetAttribute", desc, 11, (void *)&aux, (size_t)8) == 0);
    CHECK(blas("cublasLtMatmulDescSetAttribute", desc, 12, (void *)&aux_ld, (size_t)8) == 0);
    CHECK(blas("cublasLtMatrixLayoutCreate", &la, 0, (uint64_t)m, (uint64_t)k, k) == 0);
    CHECK(blas("cublasLtMatrixLayoutCreate", &lb, 0, (uint64_t)k, (uint64_t)n, n) == 0);
    CHECK(blas("cublasLtMatrixLayoutCreate", &ld, 0, (uint64_t)m, (uint64_t)n, n) == 0);
    int rows = 1;
    for (Handle l : {la, lb, ld})
        CHECK(blas("cublasLtMatrixLayoutSetAttribute", l, 1, (void *)&rows, (size_t)4) == 0);
    float alpha = 1, beta = 0;
    CHECK(blas("cublasLtMatmul", handle, desc, (void *)&alpha, to_device(a), la, to_device(b), lb,
               (void *)&beta, d, ld, d, ld, (Handle) nullptr, (Handle) nullptr, (size_t)0,
               (Handle) nullptr) == status);
}

static void cublaslt_epilogues() {
    const int m = 16, n = 9, k = 20;
    auto gelu = [](double x) {
        return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
    };
    Pointer bias = to_device(std::vector<float>(m, 0.25f)), aux = device(4 * m * n);
    Pointer d = device(4 * m * n), sums = device(4 * m);
    epilogue_product(164, bias, aux, d); // GELU_AUX_BIAS
    auto y = to_host<float>(d, m * n), before = to_host<float>(aux, m * n);
    epilogue_product(208, sums, aux, d); // DGELU_BGRAD
    auto dx = to_host<float>(d, m * n), dbias = to_host<float>(sums, m);
    epilogue_product(512, sums, aux, d); // BGRADB
    auto sums_b = to_host<float>(sums, n);
    epilogue_product(130, bias, aux, d, 15);     // RELU_AUX: not here
    epilogue_product(20, bias, aux, d, 15);      // BIAS and BGRAD: not there either
    epilogue_product(512, sums + 4, aux, d, 7);  // misaligned
    epilogue_product(4, sums + 4, aux, d, 7);    // past its end
    for (int row = 0; row < m; row++) {
        double total = 0;
        for (int col = 0; col < n; col++) {
            double x = 0, column = 0;
            for (int i = 0; i < k; i++) {
                x += number(row * k + i) * number(3 * (i * n + col)) / 4;
                column += number(3 * (i * n + col)) / 4;
            }
            double slope = (gelu(x + 0.25 + 1e-4) - gelu(x + 0.25 - 1e-4)) / 2e-4;
            CHECK(fabs(before[col * m + row] - (x + 0.25)) < 1e-4);
            CHECK(fabs(y[row * n + col] - gelu(x + 0.25)) < 1e-4);
            CHECK(fabs(dx[row * n + col] - x * slope) < 1e-3);
            CHECK(fabs(sums_b[col] - column) < 1e-4);
            total += x * slope;
        }
        CHECK(fabs(dbias[row] - total) < 1e-2);
    }
}

struct Test {
    const char *name;
    void (*run)();
};

static const Test TESTS[] = {
    {"vector add", vector_add},
    {"block reduction with shuffles and shared memory", block_reduction},
    {"struct as a parameter, launch bounds", struct_parameter},
    {"dynamic shared memory", dynamic_shared_memory},
    {"dynamic shared memory, too small", dynamic_shared_memory_too_small},
    {"unwritten memory is NaN, a missing barrier shows", unwritten_memory_is_nan},
    {"votes, shuffles, __constant__ and __device__ variables", warps_and_variables},
    {"mma against a plain product", tensor_cores},
    {"ldmatrix, plain and transposed", ldmatrix},
    {"cp.async lands when it is waited for", copies_land_when_waited_for},
    {"graph: capture and replay", graphs},
    {"write just past memory", writes_out_of_bounds},
    {"sum just past memory", sums_out_of_bounds},
    {"write far past memory", writes_far_out_of_bounds},
    {"write before memory", writes_before_memory},
    {"use after free", use_after_free},
    {"misaligned read", misaligned_read},
    {"index outside of a shared array", index_outside_of_shared_array},
    {"deadlock at __syncthreads", deadlocks},
    {"deadlock within a warp", deadlock_within_a_warp},
    {"assert in a kernel", asserts},
    {"errors of the compiler and of modules", errors_of_the_compiler},
    {"copies are checked", copies_are_checked},
    {"cublasLt, bf16, both transposes, beta, bias, batches", cublaslt_products},
    {"cublasLt, f32 in rows, epilogues", cublaslt_epilogues},
};

int main() {
    int n_failed = 0;
    for (const Test &test : TESTS) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            start();
            test.run();
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        n_failed += status != 0;
        printf("%s  %s\n", status == 0 ? "ok    " : "FAILED", test.name);
    }
    printf("%zu tests, %d failed\n", sizeof TESTS / sizeof *TESTS, n_failed);
    return n_failed != 0;
}
