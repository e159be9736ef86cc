// libcublasLt of the software CUDA device: D = epilogue(alpha op(A) op(B) + beta C + bias).
//
// Types f32, f16 and bf16, sums in f32, matrices in columns or rows, with or without transposition,
// in strided batches. The epilogues are RELU, GELU (the tanh form), BIAS, GELU_AUX, DGELU, BGRADA,
// BGRADB and their combinations. Where the compute type allows it (FAST_TF32, FAST_16F, FAST_16BF),
// f32 operands are rounded as a real device would. Matrices are checked against the allocations
// that hold them. What real hardware refuses in types and shapes is mostly refused.
//
// Not here: integers, f64, f8 and their scales, complex numbers, RELU_AUX and DRELU (bit masks),
// tiled orders, device-side vectors of alpha, grouped products, matrix transforms. The one
// algorithm needs no workspace.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "runtime.h"

#define API extern "C" EMU_EXPORT

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
enum Type { F32 = 0, F16 = 2, BF16 = 14 };
enum Compute { C32F = 68, C32F_PEDANTIC = 69, FAST_16F = 74, FAST_16BF = 75, FAST_TF32 = 77 };
enum Epilogue { RELU = 2, BIAS = 4, DRELU = 8, BGRAD = 16, GELU = 32, DGELU = 64, AUX = 128,
                BGRADA = 256, BGRADB = 512 };
const uint32_t VECTOR = BIAS | BGRAD | BGRADA | BGRADB; // those that read or write `bias`
const uint64_t ALGORITHM = 0x454C41504944;

// The three descriptors must fit into the caller's opaque structs: 256, 112 and 96 bytes.
struct Desc {
    int32_t compute, scale_type, pointer_mode = 0, trans_a = 0, trans_b = 0, trans_c = 0, fill = 3;
    uint32_t epilogue = 1;
    void *bias = nullptr;
    int64_t bias_stride = 0;
    void *aux = nullptr;
    int64_t aux_ld = 0, aux_stride = 0;
    int32_t bias_type = -1, aux_type = -1;
};

struct Layout {
    int32_t type, order = 0; // 0 columns, 1 rows
    uint64_t rows, cols;
    int64_t ld, stride = 0;
    int32_t n_batches = 1;
};

struct Preference {
    uint64_t workspace_bytes;
};

static_assert(sizeof(Desc) <= 256 && sizeof(Layout) <= 112 && sizeof(Preference) <= 96);

struct Heuristic {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};

struct Field {
    void *at;
    size_t bytes;
};

// Where an attribute is held; {null, n} takes n bytes and forgets them; {null, 0} is unknown.
Field field(Desc &d, int attribute) {
    switch (attribute) {
    case 0: return {&d.compute, 4};
    case 1: return {&d.scale_type, 4};
    case 2: return {&d.pointer_mode, 4};
    case 3: return {&d.trans_a, 4};
    case 4: return {&d.trans_b, 4};
    case 5: return {&d.trans_c, 4};
    case 6: return {&d.fill, 4};
    case 7: return {&d.epilogue, 4};
    case 8: return {&d.bias, 8};
    case 10: return {&d.bias_stride, 8};
    case 11: return {&d.aux, 8};
    case 12: return {&d.aux_ld, 8};
    case 13: return {&d.aux_stride, 8};
    case 15: return {nullptr, 4};                                    // processors to use
    case 17: case 18: case 19: case 20: case 21: return {nullptr, 8}; // scales of f8
    case 22: return {&d.aux_type, 4};
    case 25: return {nullptr, 1};                                    // fast accumulation of f8
    case 26: return {&d.bias_type, 4};
    default: return {nullptr, 0};
    }
}

Field field(Layout &l, int attribute) {
    switch (attribute) {
    case 0: return {&l.type, 4};
    case 1: return {&l.order, 4};
    case 2: return {&l.rows, 8};
    case 3: return {&l.cols, 8};
    case 4: return {&l.ld, 8};
    case 5: return {&l.n_batches, 4};
    case 6: return {&l.stride, 8};
    default: return {nullptr, 0};
    }
}

Field field(Preference &p, int attribute) {
    if (attribute == 1) return {&p.workspace_bytes, 8};
    return {nullptr, attribute == 12 ? 8u : 4u}; // a mask of implementations; limits and modes
}

template <class T> int set(T *object, int attribute, const void *from, size_t bytes) {
    if (!object || !from) return INVALID_VALUE;
    Field f = field(*object, attribute);
    if (f.bytes == 0) return NOT_SUPPORTED;
    if (f.bytes != bytes) return INVALID_VALUE;
    if (f.at) memcpy(f.at, from, bytes);
    return SUCCESS;
}

template <class T> int get(T *object, int attribute, void *to, size_t bytes, size_t *written) {
    if (!object) return INVALID_VALUE;
    Field f = field(*object, attribute);
    if (!f.at) return NOT_SUPPORTED;
    if (written) *written = f.bytes;
    if (bytes == 0) return SUCCESS;
    if (f.bytes != bytes || !to) return INVALID_VALUE;
    memcpy(to, f.at, bytes);
    return SUCCESS;
}

// ---- Numbers ------------------------------------------------------------------------------------

size_t bytes_of(int type) { return type == F32 ? 4 : 2; }

uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Keeps all but the last `n` bits of the fraction, to the nearest, ties to even.
uint32_t rounded(uint32_t bits, int n) {
    if ((bits & 0x7F800000) == 0x7F800000) return bits;
    return (bits + (1u << (n - 1)) - 1 + (bits >> n & 1)) >> n << n;
}

uint16_t bf16_of(float x) {
    if (x != x) return 0x7FFF;
    return rounded(bits_of(x), 16) >> 16;
}

float of_f16(uint16_t h) {
    int exponent = h >> 10 & 31, fraction = h & 1023;
    float x = exponent == 0    ? std::ldexp((float)fraction, -24)
              : exponent == 31 ? (fraction ? NAN : INFINITY)
                               : std::ldexp((float)(fraction + 1024), exponent - 25);
    return h & 0x8000 ? -x : x;
}

uint16_t f16_of(float x) {
    uint16_t sign = bits_of(x) >> 16 & 0x8000;
    float a = std::fabs(x);
    if (x != x) return 0x7FFF;
    if (a >= 65520) return sign | 0x7C00;
    if (a < 6.103515625e-05f) return sign | (uint16_t)std::nearbyint(std::ldexp(a, 24));
    uint32_t bits = rounded(bits_of(a), 13);
    return sign | (uint16_t)((bits >> 13) - ((127 - 15) << 10));
}

float load(const void *p, int type, int64_t i) {
    if (type == F32) return ((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return type == BF16 ? float_of((uint32_t)h << 16) : of_f16(h);
}

void store(void *p, int type, int64_t i, float x) {
    if (type == F32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = type == BF16 ? bf16_of(x) : f16_of(x);
}

float operand(float x, int compute) {
    if (compute == FAST_TF32) return float_of(rounded(bits_of(x), 13));
    if (compute == FAST_16BF) return float_of(rounded(bits_of(x), 16));
    if (compute == FAST_16F) return of_f16(f16_of(x));
    return x;
}

const float ROOT = 0.7978845608028654f, CUBE = 0.044715f;

float gelu(float x) { return 0.5f * x * (1 + std::tanh(ROOT * (x + CUBE * x * x * x))); }

float gelu_slope(float x) {
    float t = std::tanh(ROOT * (x + CUBE * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * ROOT * (1 + 3 * CUBE * x * x);
}

// ---- The product --------------------------------------------------------------------------------

struct Product {
    Desc desc;
    Layout a, b, c, d;
    const void *a_at, *b_at, *c_at;
    void *d_at;
    float alpha, beta;
    const float *alpha_at, *beta_at; // on the device, where the pointer mode says so
    int64_t m, n, k;

    int bias_type() const { return desc.bias_type >= 0 ? desc.bias_type : d.type; }
    int aux_type() const { return desc.aux_type >= 0 ? desc.aux_type : d.type; }
};

int64_t place(const Layout &l, int64_t row, int64_t col) {
    return l.order == 1 ? row * l.ld + col : col * l.ld + row;
}

// Elements from the first to the last of one matrix.
int64_t extent(const Layout &l) {
    if (l.rows == 0 || l.cols == 0) return 0;
    return place(l, l.rows - 1, l.cols - 1) + 1;
}

// op(X) as f32: `out[inner * n_outer + outer]`, where `outer` is the index that stays.
std::vector<float> packed(const Product &p, bool is_a, int64_t batch) {
    const Layout &l = is_a ? p.a : p.b;
    const void *at = is_a ? p.a_at : p.b_at;
    bool transposed = is_a ? p.desc.trans_a : p.desc.trans_b;
    bool outer_is_row = is_a != transposed;
    int64_t n_outer = is_a ? p.m : p.n;
    std::vector<float> out(n_outer * p.k);
    for (int64_t inner = 0; inner < p.k; inner++)
        for (int64_t outer = 0; outer < n_outer; outer++) {
            int64_t row = outer_is_row ? outer : inner, col = outer_is_row ? inner : outer;
            float x = load(at, l.type, batch * l.stride + place(l, row, col));
            out[inner * n_outer + outer] = l.type == F32 ? operand(x, p.desc.compute) : x;
        }
    return out;
}

// sum[j][i] over columns [from, to) of D; rows in strips that stay in the cache.
void multiply(const Product &p, const std::vector<float> &a, const std::vector<float> &b,
              std::vector<float> &sum, int64_t from, int64_t to) {
    const int64_t STRIP = 512;
    for (int64_t i0 = 0; i0 < p.m; i0 += STRIP) {
        int64_t n_rows = std::min(STRIP, p.m - i0);
        for (int64_t j = from; j < to; j++) {
            float *out = &sum[j * p.m + i0];
            for (int64_t k = 0; k < p.k; k++) {
                float x = b[k * p.n + j];
                const float *column = &a[k * p.m + i0];
                for (int64_t i = 0; i < n_rows; i++) out[i] += column[i] * x;
            }
        }
    }
}

// The value of D at (row, col), and what the epilogue leaves beside it.
float finish(const Product &p, float x, int64_t batch, int64_t row, int64_t col) {
    const Desc &d = p.desc;
    x *= p.alpha;
    if (p.beta != 0)
        x += p.beta * load(p.c_at, p.c.type, batch * p.c.stride + place(p.c, row, col));
    if (d.epilogue & BIAS) x += load(d.bias, p.bias_type(), batch * d.bias_stride + row);
    int64_t aux = batch * d.aux_stride + col * d.aux_ld + row;
    if (d.epilogue & DGELU) return x * gelu_slope(load(d.aux, p.aux_type(), aux));
    if (d.epilogue & AUX) store(d.aux, p.aux_type(), aux, x);
    if (d.epilogue & RELU) x = x > 0 ? x : (x != x ? x : 0);
    if (d.epilogue & GELU) x = gelu(x);
    return x;
}

// Gradients of a bias: sums of D over columns, of op(A) over k, of op(B) over k.
void bias_gradient(const Product &p, const std::vector<float> &a, const std::vector<float> &b,
                   const std::vector<float> &result, int64_t batch) {
    uint32_t e = p.desc.epilogue;
    if (!(e & (BGRAD | BGRADA | BGRADB))) return;
    const std::vector<float> &from = e & BGRAD ? result : e & BGRADA ? a : b;
    int64_t n = e & BGRADB ? p.n : p.m, n_summed = e & BGRAD ? p.n : p.k;
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int64_t s = 0; s < n_summed; s++) sum += from[s * n + i];
        store(p.desc.bias, p.bias_type(), batch * p.desc.bias_stride + i, sum);
    }
}

int run_product(void *data) {
    Product &p = *(Product *)data;
    if (p.alpha_at) p.alpha = *p.alpha_at;
    if (p.beta_at) p.beta = *p.beta_at;
    for (int64_t batch = 0; batch < p.d.n_batches; batch++) {
        std::vector<float> a = packed(p, true, batch), b = packed(p, false, batch);
        std::vector<float> sum(p.m * p.n, 0.0f);
        int64_t half = p.m * p.n * p.k > 1000000 ? p.n / 2 : p.n;
        std::thread second([&] { multiply(p, a, b, sum, half, p.n); });
        multiply(p, a, b, sum, 0, half);
        second.join();
        for (int64_t col = 0; col < p.n; col++)
            for (int64_t row = 0; row < p.m; row++) {
                float &x = sum[col * p.m + row];
                x = finish(p, x, batch, row, col);
                store(p.d_at, p.d.type, batch * p.d.stride + place(p.d, row, col), x);
            }
        bias_gradient(p, a, b, sum, batch);
    }
    return 0;
}

// ---- Checks -------------------------------------------------------------------------------------

bool good_layout(const Layout &l) {
    int64_t line = l.order == 1 ? l.cols : l.rows;
    return l.ld >= line && l.n_batches >= 1 && (l.order == 0 || l.order == 1);
}

// The epilogues of the interface, less those with bit masks.
bool known(uint32_t epilogue) {
    switch (epilogue) {
    case 1: case RELU: case BIAS: case RELU | BIAS: case GELU: case GELU | BIAS:
    case GELU | AUX: case GELU | AUX | BIAS: case DGELU | AUX: case DGELU | AUX | BGRAD:
    case BGRADA: case BGRADB: return true;
    default: return false;
    }
}

int check_types(const Product &p) {
    const Desc &d = p.desc;
    bool in = p.a.type == F32 || p.a.type == BF16 || p.a.type == F16;
    bool out = p.d.type == F32 || (p.d.type == p.a.type);
    bool compute = d.compute == C32F || d.compute == C32F_PEDANTIC ||
                   (p.a.type == F32 && d.compute >= FAST_16F && d.compute <= FAST_TF32);
    bool epilogue = known(d.epilogue);
    if (d.epilogue & VECTOR && p.bias_type() != p.d.type) return INVALID_VALUE;
    if (p.a.type != p.b.type || p.c.type != p.d.type || !in || !out || !compute || !epilogue ||
        d.scale_type != F32 || d.pointer_mode > 1 || d.trans_c != 0)
        return NOT_SUPPORTED;
    return SUCCESS;
}

int check_shapes(Product &p) {
    p.m = p.d.rows;
    p.n = p.d.cols;
    p.k = p.desc.trans_a ? p.a.rows : p.a.cols;
    int64_t a_outer = p.desc.trans_a ? p.a.cols : p.a.rows;
    int64_t b_outer = p.desc.trans_b ? p.b.rows : p.b.cols;
    int64_t b_inner = p.desc.trans_b ? p.b.cols : p.b.rows;
    if (a_outer != p.m || b_outer != p.n || b_inner != p.k || p.c.rows != p.d.rows ||
        p.c.cols != p.d.cols || p.m * p.n * p.k == 0)
        return INVALID_VALUE;
    for (const Layout *l : {&p.a, &p.b, &p.c, &p.d})
        if (!good_layout(*l) || l->n_batches != p.d.n_batches) return INVALID_VALUE;
    return SUCCESS;
}

int check_description(Product &p) {
    int types = check_types(p);
    return types ? types : check_shapes(p);
}

bool inside(const void *at, const Layout &l, const char *what) {
    if (emu_check_range(at, bytes_of(l.type) * (extent(l) + (l.n_batches - 1) * l.stride), what))
        return false;
    return (uintptr_t)at % bytes_of(l.type) == 0;
}

int check_memory(const Product &p) {
    const Desc &d = p.desc;
    bool good = inside(p.a_at, p.a, "cublasLtMatmul, A") &&
                inside(p.b_at, p.b, "cublasLtMatmul, B") &&
                inside(p.d_at, p.d, "cublasLtMatmul, D");
    if (p.beta != 0 || p.beta_at) good = good && inside(p.c_at, p.c, "cublasLtMatmul, C");
    if (d.epilogue & VECTOR) {
        int64_t n = (d.epilogue & BGRADB ? p.n : p.m) + (p.d.n_batches - 1) * d.bias_stride;
        size_t bytes = n * bytes_of(p.bias_type());
        good = good && !emu_check_range(d.bias, bytes, "cublasLtMatmul, bias");
        // An H200 faults there.
        if (d.epilogue & (BGRADA | BGRADB)) good = good && (uintptr_t)d.bias % 16 == 0;
    }
    if (d.epilogue & AUX) {
        int64_t n = (p.n - 1) * d.aux_ld + p.m + (p.d.n_batches - 1) * d.aux_stride;
        good = good && d.aux_ld >= p.m && d.aux_ld % 8 == 0 &&
               !emu_check_range(d.aux, n * bytes_of(p.aux_type()), "cublasLtMatmul, aux");
    }
    return good ? SUCCESS : INVALID_VALUE;
}

int offer(Product &p, int n_wanted, Heuristic *results, int *n_found) {
    if (n_wanted < 1 || !results || !n_found) return INVALID_VALUE;
    *n_found = 0;
    if (int status = check_description(p)) return status;
    results[0] = {};
    results[0].algorithm[0] = ALGORITHM;
    results[0].waves = 1;
    *n_found = 1;
    return SUCCESS;
}

} // namespace

// ---- The interface ------------------------------------------------------------------------------

API size_t cublasLtGetVersion() { return 130000; }

API size_t cublasLtGetCudartVersion() { return 13000; }

API const char *cublasLtGetStatusName(int status) {
    switch (status) {
    case SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    case NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    default: return "CUBLAS_STATUS_INTERNAL_ERROR";
    }
}

API const char *cublasLtGetStatusString(int status) { return cublasLtGetStatusName(status); }

API int cublasLtCreate(void **handle) {
    *handle = new char;
    return SUCCESS;
}

API int cublasLtDestroy(void *handle) {
    delete (char *)handle;
    return SUCCESS;
}

API int cublasLtLoggerSetLevel(int) { return SUCCESS; }
API int cublasLtLoggerOpenFile(const char *) { return SUCCESS; }

API int cublasLtMatmulDescInit_internal(Desc *d, size_t bytes, int compute, int scale_type) {
    if (bytes < sizeof(Desc)) return INVALID_VALUE;
    *d = Desc{compute, scale_type};
    return SUCCESS;
}

API int cublasLtMatmulDescCreate(Desc **d, int compute, int scale_type) {
    *d = new Desc{compute, scale_type};
    return SUCCESS;
}

API int cublasLtMatmulDescDestroy(Desc *d) {
    delete d;
    return SUCCESS;
}

API int cublasLtMatmulDescSetAttribute(Desc *d, int attribute, const void *from, size_t bytes) {
    return set(d, attribute, from, bytes);
}

API int cublasLtMatmulDescGetAttribute(Desc *d, int attribute, void *to, size_t bytes,
                                       size_t *written) {
    return get(d, attribute, to, bytes, written);
}

API int cublasLtMatrixLayoutInit_internal(Layout *l, size_t bytes, int type, uint64_t rows,
                                          uint64_t cols, int64_t ld) {
    if (bytes < sizeof(Layout)) return INVALID_VALUE;
    *l = Layout{type, 0, rows, cols, ld};
    return SUCCESS;
}

API int cublasLtMatrixLayoutCreate(Layout **l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    *l = new Layout{type, 0, rows, cols, ld};
    return SUCCESS;
}

API int cublasLtMatrixLayoutDestroy(Layout *l) {
    delete l;
    return SUCCESS;
}

API int cublasLtMatrixLayoutSetAttribute(Layout *l, int attribute, const void *from, size_t bytes) {
    return set(l, attribute, from, bytes);
}

API int cublasLtMatrixLayoutGetAttribute(Layout *l, int attribute, void *to, size_t bytes,
                                         size_t *written) {
    return get(l, attribute, to, bytes, written);
}

API int cublasLtMatmulPreferenceInit_internal(Preference *p, size_t bytes) {
    if (bytes < sizeof(Preference)) return INVALID_VALUE;
    *p = Preference{0};
    return SUCCESS;
}

API int cublasLtMatmulPreferenceCreate(Preference **p) {
    *p = new Preference{0};
    return SUCCESS;
}

API int cublasLtMatmulPreferenceDestroy(Preference *p) {
    delete p;
    return SUCCESS;
}

API int cublasLtMatmulPreferenceSetAttribute(Preference *p, int attribute, const void *from,
                                             size_t bytes) {
    return set(p, attribute, from, bytes);
}

API int cublasLtMatmulPreferenceGetAttribute(Preference *p, int attribute, void *to, size_t bytes,
                                             size_t *written) {
    return get(p, attribute, to, bytes, written);
}

API int cublasLtMatmulAlgoGetHeuristic(void *, const Desc *desc, const Layout *a, const Layout *b,
                                       const Layout *c, const Layout *d, const Preference *,
                                       int n_wanted, Heuristic *results, int *n_found) {
    if (!desc || !a || !b || !c || !d) return INVALID_VALUE;
    Product p = {};
    p.desc = *desc;
    p.a = *a;
    p.b = *b;
    p.c = *c;
    p.d = *d;
    return offer(p, n_wanted, results, n_found);
}

API int cublasLtMatmulAlgoCheck(void *handle, const Desc *desc, const Layout *a, const Layout *b,
                                const Layout *c, const Layout *d, const uint64_t *,
                                Heuristic *result) {
    int n_found;
    return cublasLtMatmulAlgoGetHeuristic(handle, desc, a, b, c, d, nullptr, 1, result, &n_found);
}

API int cublasLtMatmul(void *, const Desc *desc, const float *alpha, const void *a_at,
                       const Layout *a, const void *b_at, const Layout *b, const float *beta,
                       const void *c_at, const Layout *c, void *d_at, const Layout *d,
                       const uint64_t *algorithm, void *workspace, size_t workspace_bytes,
                       void *stream) {
    if (!desc || !a || !b || !c || !d || !alpha || !beta) return INVALID_VALUE;
    if (algorithm && algorithm[0] != ALGORITHM) return INVALID_VALUE;
    Product p = {*desc, *a, *b, *c, *d, a_at, b_at, c_at, d_at, 0, 0, nullptr, nullptr, 0, 0, 0};
    if (desc->pointer_mode == 1) {
        p.alpha_at = alpha;
        p.beta_at = beta;
    } else {
        p.alpha = *alpha;
        p.beta = *beta;
    }
    if (int status = check_description(p)) return status;
    if (int status = check_memory(p)) return status;
    if (workspace && emu_check_range(workspace, workspace_bytes, "cublasLtMatmul, workspace"))
        return INVALID_VALUE;
    auto drop = [](void *data) { delete (Product *)data; };
    int error = emu_stream_run(stream, run_product, new Product(p), drop);
    return error ? EXECUTION_FAILED : SUCCESS;
}
