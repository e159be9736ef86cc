// libcuda of the software CUDA device: devices, contexts, memory, modules and launches.
// (tidy: allow long, a list of functions of one kind)
//
// The names and arguments are those of NVIDIA's cuda.h, version 13.0, as far as a program in Rust
// through cudarc and a plain engine need them. One device, one primary context. Device memory is
// memory of the process (memory.cpp) and kernels are functions of shared libraries that nvrtc.cpp
// made (scheduler.cpp); streams and graphs are in stream.cpp.
//
// Environment: ELAPID_EMULATOR_SM (89), ELAPID_EMULATOR_MEMORY_MIB (8192).
//
// Not here: real PTX and CUBIN, peers, arrays, textures, virtual memory, IPC, linking, profiling.
#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "device.h"

#define API extern "C" EMU_EXPORT

namespace {

struct Function {
    struct Loaded *module;
    const EmuKernel *kernel;
    int max_dynamic_bytes = SHARED_BYTES;
};

// A module: its library and the functions that were asked for.
struct Loaded {
    Module module;
    std::string path;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

struct Driver {
    std::mutex lock;
    bool started = false;
    int n_retained = 0;
    std::map<Loaded *, std::string> modules; // with the path, to load a second copy apart
    uint64_t n_modules = 0;
    std::map<int, uint64_t> pool_attributes;
};

Driver &driver() {
    static Driver *d = new Driver;
    return *d;
}

char primary; // its address is the handle of the primary context
char pool;    // and of the memory pool
thread_local std::vector<void *> contexts;

using Hold = std::lock_guard<std::mutex>;

int device_ready(int device) {
    if (!driver().started) return NOT_INITIALIZED;
    return device == 0 ? SUCCESS : INVALID_DEVICE;
}

int architecture() { return (int)env_number("ELAPID_EMULATOR_SM", 89); }

} // namespace

void *current_context() { return contexts.empty() ? nullptr : contexts.back(); }

int ready() {
    if (!driver().started) return NOT_INITIALIZED;
    if (!current_context()) {
        say("no context is current on this thread");
        return INVALID_CONTEXT;
    }
    return sticky_error();
}

// ---- Start and devices --------------------------------------------------------------------------

API int cuInit(unsigned) {
    driver().started = true;
    return SUCCESS;
}

API int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

API int cuDeviceGetCount(int *n) {
    *n = 1;
    return driver().started ? SUCCESS : NOT_INITIALIZED;
}

API int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return device_ready(ordinal);
}

API int cuDeviceGetName(char *name, int bytes, int device) {
    snprintf(name, bytes, "Elapid CUDA emulator");
    return device_ready(device);
}

API int cuDeviceGetUuid(char *uuid, int device) {
    memcpy(uuid, "Elapid emulator.", 16);
    return device_ready(device);
}

API int cuDeviceGetUuid_v2(char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }

API int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = region_total();
    return device_ready(device);
}

API int cuDeviceGetPCIBusId(char *id, int bytes, int device) {
    snprintf(id, bytes, "0000:00:00.0");
    return device_ready(device);
}

API int cuDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return SUCCESS;
}

API int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const std::map<int, int> values = {
        {1, MAX_THREADS}, {2, 1024}, {3, 1024}, {4, 64}, // threads per block, block x y z
        {5, 2147483647}, {6, 65535}, {7, 65535},         // grid x y z
        {8, SHARED_BYTES}, {9, 65536}, {10, 32},         // shared, constant, warp
        {11, 2147483647}, {12, 65536}, {13, 1000000},    // pitch, registers, clock
        {14, 512}, {15, 1}, {16, N_PROCESSORS},          // texture alignment, overlap, processors
        {19, 1}, {31, 1}, {36, 1000000}, {37, 64},       // map host, concurrent kernels, memory
        {38, 4 << 20}, {39, 1536}, {40, 1}, {41, 1},     // L2, threads per processor, unified
        {75, architecture() / 10}, {76, architecture() % 10},
        {78, 1}, {79, 1}, {80, 1}, {81, 102400}, {82, 65536}, // shared and registers per processor
        {83, 0}, {87, 64}, {97, SHARED_BYTES_OPTIN}, {99, 0}, {106, 24}, {111, 1024},
        {115, 1}, // memory pools
    };
    auto at = values.find(attribute);
    *value = at == values.end() ? 0 : at->second;
    return device_ready(device);
}

// ---- Contexts -----------------------------------------------------------------------------------

API int cuDevicePrimaryCtxRetain(void **context, int device) {
    if (int e = device_ready(device)) return e;
    Hold hold(driver().lock);
    driver().n_retained++;
    *context = &primary;
    return SUCCESS;
}

API int cuDevicePrimaryCtxRelease_v2(int device) {
    if (int e = device_ready(device)) return e;
    Hold hold(driver().lock);
    if (driver().n_retained == 0) return INVALID_CONTEXT;
    driver().n_retained--;
    return SUCCESS;
}

API int cuDevicePrimaryCtxReset_v2(int device) { return device_ready(device); }

API int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned) { return device_ready(device); }

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = driver().n_retained > 0;
    return device_ready(device);
}

API int cuCtxCreate_v4(void **context, void *, unsigned, int device) {
    if (int e = device_ready(device)) return e;
    *context = &primary;
    contexts.push_back(&primary);
    return SUCCESS;
}

API int cuCtxDestroy_v2(void *) { return SUCCESS; }

API int cuCtxSetCurrent(void *context) {
    if (!contexts.empty()) contexts.pop_back();
    if (context) contexts.push_back(context);
    return SUCCESS;
}

API int cuCtxGetCurrent(void **context) {
    *context = current_context();
    return driver().started ? SUCCESS : NOT_INITIALIZED;
}

API int cuCtxPushCurrent_v2(void *context) {
    contexts.push_back(context);
    return SUCCESS;
}

API int cuCtxPopCurrent_v2(void **context) {
    if (contexts.empty()) return INVALID_CONTEXT;
    if (context) *context = contexts.back();
    contexts.pop_back();
    return SUCCESS;
}

API int cuCtxGetDevice(int *device) {
    *device = 0;
    return current_context() ? SUCCESS : INVALID_CONTEXT;
}

API int cuCtxGetFlags(unsigned *flags) {
    *flags = 0;
    return SUCCESS;
}

API int cuCtxSetFlags(unsigned) { return SUCCESS; }

API int cuCtxGetApiVersion(void *, unsigned *version) {
    *version = 13000;
    return SUCCESS;
}

API int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

API int cuCtxGetLimit(size_t *value, int) {
    *value = 0;
    return SUCCESS;
}

API int cuCtxSetLimit(int, size_t) { return SUCCESS; }

API int cuCtxGetCacheConfig(int *config) {
    *config = 0;
    return SUCCESS;
}

API int cuCtxSetCacheConfig(int) { return SUCCESS; }

API int cuCtxSynchronize() {
    if (int e = ready()) return e;
    if (int e = outside_capture()) return e;
    region_check_all("at a synchronisation");
    return sticky_error();
}

// ---- Memory -------------------------------------------------------------------------------------

API int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (int e = ready()) return e;
    *total = region_total();
    *free_bytes = *total - region_used();
    return SUCCESS;
}

API int cuMemAlloc_v2(void **p, size_t bytes) {
    if (int e = ready()) return e;
    if (int e = outside_capture()) return e;
    return region_new(bytes, Kind::Device, p);
}

API int cuMemAllocManaged(void **p, size_t bytes, unsigned) { return cuMemAlloc_v2(p, bytes); }

API int cuMemAllocAsync(void **p, size_t bytes, void *stream) {
    return alloc_on_stream(stream, bytes, p);
}

API int cuMemAllocFromPoolAsync(void **p, size_t bytes, void *, void *stream) {
    return alloc_on_stream(stream, bytes, p);
}

API int cuMemFree_v2(uintptr_t p) {
    if (int e = ready()) return e;
    if (int e = outside_capture()) return e;
    return p ? region_free(p, Kind::Device) : SUCCESS;
}

API int cuMemFreeAsync(uintptr_t p, void *stream) { return free_on_stream(stream, p); }

API int cuMemHostAlloc(void **p, size_t bytes, unsigned) {
    if (int e = ready()) return e;
    if (int e = outside_capture()) return e;
    return region_new(bytes, Kind::Host, p);
}

API int cuMemAllocHost_v2(void **p, size_t bytes) { return cuMemHostAlloc(p, bytes, 0); }

API int cuMemFreeHost(uintptr_t p) {
    if (int e = ready()) return e;
    return region_free(p, Kind::Host);
}

API int cuMemHostGetDevicePointer_v2(uintptr_t *device, void *host, unsigned) {
    *device = (uintptr_t)host;
    return emu_check_range(host, 1, "cuMemHostGetDevicePointer");
}

API int cuMemGetAddressRange_v2(uintptr_t *begin, size_t *bytes, uintptr_t p) {
    uintptr_t at;
    size_t n;
    Kind kind;
    if (!region_find(p, &at, &n, &kind)) return NOT_FOUND;
    if (begin) *begin = at;
    if (bytes) *bytes = n;
    return SUCCESS;
}

API int cuPointerGetAttribute(void *data, int attribute, uintptr_t p) {
    uintptr_t begin;
    size_t bytes;
    Kind kind;
    if (!region_find(p, &begin, &bytes, &kind)) return INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)data = &primary; return SUCCESS;
    case 2: *(unsigned *)data = kind == Kind::Host ? 1 : 2; return SUCCESS;
    case 3:
    case 4: *(uintptr_t *)data = p; return SUCCESS;
    case 9: *(int *)data = 0; return SUCCESS;
    case 11: *(uintptr_t *)data = begin; return SUCCESS;
    case 12: *(size_t *)data = bytes; return SUCCESS;
    default: return NOT_SUPPORTED;
    }
}

// Pools: one, which never keeps anything.
API int cuDeviceGetDefaultMemPool(void **out, int device) {
    *out = &pool;
    return device_ready(device);
}

API int cuDeviceGetMemPool(void **out, int device) {
    return cuDeviceGetDefaultMemPool(out, device);
}

API int cuDeviceSetMemPool(int device, void *) { return device_ready(device); }

API int cuMemPoolCreate(void **out, const void *) {
    *out = &pool;
    return ready();
}

API int cuMemPoolDestroy(void *) { return SUCCESS; }

API int cuMemPoolTrimTo(void *, size_t) { return SUCCESS; }

API int cuMemPoolSetAttribute(void *, int attribute, void *value) {
    Hold hold(driver().lock);
    driver().pool_attributes[attribute] = attribute <= 3 ? *(int *)value : *(uint64_t *)value;
    return SUCCESS;
}

API int cuMemPoolGetAttribute(void *, int attribute, void *value) {
    Hold hold(driver().lock);
    uint64_t held = driver().pool_attributes[attribute];
    if (attribute == 5 || attribute == 7) held = region_used();
    if (attribute <= 3) *(int *)value = (int)held;
    else *(uint64_t *)value = held;
    return SUCCESS;
}

// ---- Copies -------------------------------------------------------------------------------------

namespace {

enum Checked { TO = 1, FROM = 2, BOTH = 3 };

int copy(void *to, const void *from, size_t bytes, Checked checked, void *stream) {
    if (bytes == 0) return ready();
    if (int e = ready()) return e;
    if (checked & TO)
        if (int e = emu_check_range(to, bytes, "copy to the device")) return e;
    if (checked & FROM)
        if (int e = emu_check_range(from, bytes, "copy from the device")) return e;
    return on_stream(stream, [=] {
        memmove(to, from, bytes);
        return SUCCESS;
    });
}

// Unified addressing: what is not known as the device's is the host's.
Checked known(const void *to, const void *from) {
    uintptr_t begin;
    size_t bytes;
    Kind kind;
    int c = 0;
    if (region_find((uintptr_t)to, &begin, &bytes, &kind)) c |= TO;
    if (region_find((uintptr_t)from, &begin, &bytes, &kind)) c |= FROM;
    return (Checked)c;
}

template <class T> int fill(void *to, T value, size_t n, void *stream) {
    if (int e = ready()) return e;
    if ((uintptr_t)to % sizeof(T)) return INVALID_VALUE;
    if (int e = emu_check_range(to, n * sizeof(T), "memset")) return e;
    return on_stream(stream, [=] {
        for (size_t i = 0; i < n; i++) ((T *)to)[i] = value;
        return SUCCESS;
    });
}

} // namespace

API int cuMemcpyHtoD_v2(void *to, const void *from, size_t n) {
    return copy(to, from, n, TO, nullptr);
}
API int cuMemcpyHtoDAsync_v2(void *to, const void *from, size_t n, void *stream) {
    return copy(to, from, n, TO, stream);
}
API int cuMemcpyDtoH_v2(void *to, const void *from, size_t n) {
    return copy(to, from, n, FROM, nullptr);
}
API int cuMemcpyDtoHAsync_v2(void *to, const void *from, size_t n, void *stream) {
    return copy(to, from, n, FROM, stream);
}
API int cuMemcpyDtoD_v2(void *to, const void *from, size_t n) {
    return copy(to, from, n, BOTH, nullptr);
}
API int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t n, void *stream) {
    return copy(to, from, n, BOTH, stream);
}
API int cuMemcpyPeerAsync(void *to, void *, const void *from, void *, size_t n, void *stream) {
    return copy(to, from, n, BOTH, stream);
}
API int cuMemcpyAsync(void *to, const void *from, size_t n, void *stream) {
    return copy(to, from, n, known(to, from), stream);
}
API int cuMemcpy(void *to, const void *from, size_t n) {
    return copy(to, from, n, known(to, from), nullptr);
}

API int cuMemsetD8_v2(void *p, unsigned char x, size_t n) { return fill(p, x, n, nullptr); }
API int cuMemsetD16_v2(void *p, unsigned short x, size_t n) { return fill(p, x, n, nullptr); }
API int cuMemsetD32_v2(void *p, unsigned x, size_t n) { return fill(p, x, n, nullptr); }
API int cuMemsetD8Async(void *p, unsigned char x, size_t n, void *s) { return fill(p, x, n, s); }
API int cuMemsetD16Async(void *p, unsigned short x, size_t n, void *s) { return fill(p, x, n, s); }
API int cuMemsetD32Async(void *p, unsigned x, size_t n, void *s) { return fill(p, x, n, s); }

// ---- Modules ------------------------------------------------------------------------------------

namespace {

// The library that a text of nvrtc.cpp names, or nothing.
std::string library_in(const char *image) {
    const char *mark = ".emulated ";
    const char *at = strstr(image, mark);
    if (!at) return "";
    at += strlen(mark);
    return std::string(at, strcspn(at, "\n"));
}

// A module that is loaded twice has its __device__ variables twice: the second is another file.
std::string copy_apart(const std::string &path) {
    std::string other = path + "." + std::to_string(getpid()) + "-" +
                        std::to_string(driver().n_modules);
    std::ifstream in(path, std::ios::binary);
    std::ofstream(other, std::ios::binary) << in.rdbuf();
    return other;
}

size_t tls_bytes_of(void *library) {
    struct Search {
        ElfW(Addr) base;
        size_t bytes;
    } search = {((struct link_map *)library)->l_addr, 0};
    dl_iterate_phdr(
        [](struct dl_phdr_info *info, size_t, void *data) {
            Search &s = *(Search *)data;
            if (info->dlpi_addr != s.base) return 0;
            for (int i = 0; i < info->dlpi_phnum; i++)
                if (info->dlpi_phdr[i].p_type == PT_TLS) s.bytes = info->dlpi_phdr[i].p_memsz;
            return 1;
        },
        &search);
    return search.bytes;
}

Loaded *live_module(Loaded *m) {
    if (driver().modules.count(m)) return m;
    say("%p is not a live module", (void *)m);
    return nullptr;
}

} // namespace

API int cuModuleLoadData(Loaded **out, const char *image) {
    if (int e = ready()) return e;
    std::string path = library_in(image);
    if (path.empty()) {
        say("this image was not made by the libnvrtc of the emulator");
        return INVALID_IMAGE;
    }
    Hold hold(driver().lock);
    bool again = false;
    for (auto &[module, loaded] : driver().modules) again |= loaded == path;
    driver().n_modules++;
    std::string file = again ? copy_apart(path) : path;
    void *library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (again) unlink(file.c_str());
    if (!library) {
        say("%s", dlerror());
        return INVALID_IMAGE;
    }
    auto anchor = (void *(*)())dlsym(library, "emu_tls_anchor");
    size_t tls = anchor ? tls_bytes_of(library) : 0;
    *out = new Loaded{{library, anchor, tls, driver().n_modules}, path, {}};
    driver().modules[*out] = path;
    return SUCCESS;
}

API int cuModuleLoadDataEx(Loaded **out, const char *image, unsigned, void *, void *) {
    return cuModuleLoadData(out, image);
}

API int cuModuleLoad(Loaded **out, const char *file) {
    std::ifstream in(file, std::ios::binary);
    if (!in) return FILE_NOT_FOUND;
    std::string image((std::istreambuf_iterator<char>(in)), {});
    return cuModuleLoadData(out, image.c_str());
}

API int cuModuleUnload(Loaded *m) {
    Hold hold(driver().lock);
    if (!live_module(m)) return INVALID_HANDLE;
    driver().modules.erase(m);
    dlclose(m->module.library);
    delete m;
    return SUCCESS;
}

API int cuModuleGetLoadingMode(int *mode) {
    *mode = 1;
    return SUCCESS;
}

API int cuModuleGetFunction(Function **out, Loaded *m, const char *name) {
    if (int e = ready()) return e;
    Hold hold(driver().lock);
    if (!live_module(m)) return INVALID_HANDLE;
    auto &held = m->functions[name];
    if (!held) {
        auto *k = (const EmuKernel *)dlsym(m->module.library, "emu_kernels");
        while (k && k->name && strcmp(k->name, name)) k++;
        if (!k || !k->name) {
            m->functions.erase(name);
            say("the module has no kernel %s (extern \"C\" __global__)", name);
            return NOT_FOUND;
        }
        held.reset(new Function{m, k});
    }
    *out = held.get();
    return SUCCESS;
}

API int cuModuleGetGlobal_v2(void **p, size_t *bytes, Loaded *m, const char *name) {
    if (int e = ready()) return e;
    Hold hold(driver().lock);
    if (!live_module(m)) return INVALID_HANDLE;
    void *at = dlsym(m->module.library, name);
    Dl_info info;
    ElfW(Sym) *symbol = nullptr;
    if (!at || !dladdr1(at, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol) return NOT_FOUND;
    region_adopt(at, symbol->st_size);
    if (p) *p = at;
    if (bytes) *bytes = symbol->st_size;
    return SUCCESS;
}

// ---- Functions and launches ---------------------------------------------------------------------

API int cuFuncGetAttribute(int *value, int attribute, Function *f) {
    switch (attribute) {
    case 0: *value = f->kernel->max_threads; return SUCCESS;
    // Of the whole module: an upper bound for the kernel.
    case 1: *value = std::min((int)f->module->module.tls_bytes, SHARED_BYTES); return SUCCESS;
    case 4: *value = 32; return SUCCESS;
    case 5:
    case 6: *value = architecture(); return SUCCESS;
    case 8: *value = f->max_dynamic_bytes; return SUCCESS;
    default: *value = 0; return SUCCESS;
    }
}

API int cuFuncSetAttribute(Function *f, int attribute, int value) {
    if (int e = ready()) return e;
    if (attribute == 8 && (value < 0 || value > SHARED_BYTES_OPTIN)) {
        say("kernel %s: %d bytes of shared memory, at most %d", f->kernel->name, value,
            SHARED_BYTES_OPTIN);
        return INVALID_VALUE;
    }
    if (attribute == 8) f->max_dynamic_bytes = value;
    return SUCCESS;
}

API int cuFuncSetCacheConfig(Function *, int) { return SUCCESS; }

API int cuFuncGetName(const char **name, Function *f) {
    *name = f->kernel->name;
    return SUCCESS;
}

API int cuFuncGetModule(Loaded **m, Function *f) {
    *m = f->module;
    return SUCCESS;
}

API int cuFuncGetParamInfo(Function *f, size_t index, size_t *offset, size_t *bytes) {
    if (index >= f->kernel->param_sizes[0]) return INVALID_VALUE;
    if (offset) *offset = 0; // not known: parameters do not lie in one buffer
    if (bytes) *bytes = f->kernel->param_sizes[1 + index];
    return SUCCESS;
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, Function *f, int threads,
                                                             size_t dynamic_bytes, unsigned) {
    if (threads < 1 || threads > f->kernel->max_threads) return INVALID_VALUE;
    int by_threads = 1536 / ((threads + 31) / 32 * 32);
    int by_shared = (int)(102400 / (dynamic_bytes + 1024));
    *n = std::min({24, by_threads, by_shared});
    return SUCCESS;
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, Function *f, int threads,
                                                    size_t dynamic_bytes) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, threads, dynamic_bytes, 0);
}

API int cuOccupancyMaxPotentialBlockSize(int *grid, int *block, Function *f, size_t (*)(int),
                                         size_t, int limit) {
    *block = limit > 0 ? std::min(limit, f->kernel->max_threads) : f->kernel->max_threads;
    *grid = N_PROCESSORS;
    return SUCCESS;
}

API int cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, Function *f,
                                                  size_t (*bytes)(int), size_t fixed, int limit,
                                                  unsigned) {
    return cuOccupancyMaxPotentialBlockSize(grid, block, f, bytes, fixed, limit);
}

API int cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, Function *, int n_blocks, int) {
    *bytes = 102400 / std::max(n_blocks, 1) - 1024;
    return SUCCESS;
}

namespace {

struct LaunchConfig {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void *stream;
    const struct LaunchAttribute *attributes;
    unsigned n_attributes;
};

struct LaunchAttribute {
    int id, pad;
    unsigned value[16];
};

// The parameters of a launch, copied: a recorded launch outlives those of its caller.
struct Arguments {
    std::vector<std::unique_ptr<long double[]>> values;
    std::vector<void *> pointers;
};

std::shared_ptr<Arguments> copied(const unsigned long *sizes, void **params) {
    auto a = std::make_shared<Arguments>();
    for (unsigned long i = 0; i < sizes[0]; i++) {
        size_t bytes = sizes[1 + i];
        a->values.emplace_back(new long double[bytes / sizeof(long double) + 1]);
        a->pointers.push_back(a->values.back().get());
        memcpy(a->pointers.back(), params[i], bytes);
    }
    a->pointers.push_back(nullptr);
    return a;
}

int refuse(const Function *f, int error, const char *why) {
    say("kernel %s is not launched: %s", f->kernel->name, why);
    return error;
}

int check_launch(const Function *f, const LaunchConfig &c) {
    uint64_t threads = (uint64_t)c.block_x * c.block_y * c.block_z;
    if (c.grid_x == 0 || c.grid_y == 0 || c.grid_z == 0)
        return refuse(f, INVALID_VALUE, "no blocks");
    if (c.grid_x > 2147483647u || c.grid_y > 65535 || c.grid_z > 65535)
        return refuse(f, INVALID_VALUE, "the grid is too large");
    if (threads == 0 || threads > MAX_THREADS || c.block_z > 64)
        return refuse(f, INVALID_VALUE, "a block has 1 to 1024 threads");
    if (threads > (uint64_t)f->kernel->max_threads)
        return refuse(f, LAUNCH_OUT_OF_RESOURCES, "more threads than __launch_bounds__ says");
    if (c.shared_bytes > (unsigned)f->max_dynamic_bytes)
        return refuse(f, INVALID_VALUE, "more dynamic shared memory than cuFuncSetAttribute set");
    for (unsigned i = 0; i < c.n_attributes; i++) {
        const LaunchAttribute &a = c.attributes[i];
        if (a.id == 4 && a.value[0] * a.value[1] * a.value[2] > 1)
            return refuse(f, NOT_SUPPORTED, "clusters are not emulated");
    }
    return SUCCESS;
}

} // namespace

API int cuLaunchKernelEx(const LaunchConfig *config, Function *f, void **params, void **extra) {
    if (int e = ready()) return e;
    if (!f) return INVALID_HANDLE;
    if (int e = check_launch(f, *config)) return e;
    if (extra) return refuse(f, NOT_SUPPORTED, "parameters in one buffer are not emulated");
    if (!params && f->kernel->param_sizes[0]) return refuse(f, INVALID_VALUE, "no parameters");
    auto arguments = copied(f->kernel->param_sizes, params);
    Launch launch = {f->kernel,
                     &f->module->module,
                     {config->grid_x, config->grid_y, config->grid_z},
                     {config->block_x, config->block_y, config->block_z},
                     config->shared_bytes,
                     arguments->pointers.data()};
    return on_stream(config->stream, [arguments, launch] { return run_kernel(launch); });
}

API int cuLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared_bytes, void *stream, void **params,
                       void **extra) {
    LaunchConfig c = {gx, gy, gz, bx, by, bz, shared_bytes, stream, nullptr, 0};
    return cuLaunchKernelEx(&c, f, params, extra);
}

API int cuLaunchCooperativeKernel(Function *f, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  unsigned, unsigned, void *, void **) {
    return refuse(f, NOT_SUPPORTED, "cooperative launches are not emulated");
}

API int cuProfilerStart() { return SUCCESS; }

API int cuProfilerStop() { return SUCCESS; }

// ---- Errors and symbols -------------------------------------------------------------------------

namespace {

struct Named {
    int code;
    const char *name, *text;
};

const Named ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES",
     "too many resources requested for launch"},
    {ASSERT, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {ILLEGAL_INSTRUCTION, "CUDA_ERROR_ILLEGAL_INSTRUCTION",
     "an illegal instruction was encountered"},
    {MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CAPTURE_MERGE, "CUDA_ERROR_STREAM_CAPTURE_MERGE", "two captures would merge"},
    {CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "capture was not initiated in this stream"},
    {CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Named *named(int code) {
    for (const Named &n : ERRORS)
        if (n.code == code) return &n;
    return nullptr;
}

} // namespace

API int cuGetErrorName(int code, const char **name) {
    const Named *n = named(code);
    *name = n ? n->name : nullptr;
    return n ? SUCCESS : INVALID_VALUE;
}

API int cuGetErrorString(int code, const char **text) {
    const Named *n = named(code);
    *text = n ? n->text : nullptr;
    return n ? SUCCESS : INVALID_VALUE;
}

// The newest version of a function there is here, as the header's macros would choose.
API int cuGetProcAddress_v2(const char *symbol, void **f, int, uint64_t, int *status) {
    Dl_info info;
    dladdr((void *)cuInit, &info);
    void *self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *f = nullptr;
    for (const char *version : {"_v4", "_v3", "_v2", ""})
        if (self && !*f) *f = dlsym(self, (std::string(symbol) + version).c_str());
    if (self) dlclose(self);
    if (status) *status = *f ? 0 : 1;
    return *f ? SUCCESS : NOT_FOUND;
}

API int cuGetProcAddress(const char *symbol, void **f, int version, uint64_t flags) {
    return cuGetProcAddress_v2(symbol, f, version, flags, nullptr);
}
