// What the parts of the software CUDA device share.
//
// Kernels (through cuda_device.h), libcuda (scheduler.cpp, memory.cpp, driver.cpp) and libcublasLt
// (cublaslt.cpp) include this file. Everything declared here lives in libcuda.so.1.
//
// Not here: anything of the CUDA language (cuda_device.h) or of the driver API (driver.cpp).
#pragma once

#define EMU_EXPORT __attribute__((visibility("default")))

struct uint3 {
    unsigned x, y, z;
};

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

// The thread that runs now on this OS thread. The scheduler rewrites `thread_idx` and `lane` at
// every switch, the rest once per block.
struct EmuNow {
    uint3 thread_idx, block_idx, block_dim, grid_dim;
    unsigned lane;
    unsigned char *dynamic_shared;
};

// One warp-wide operation. `lanes[i]` is the argument of lane i, or null where there is none;
// `mask` is the mask that the lanes gave. It runs once, when the last lane has arrived.
typedef void (*EmuWarpFn)(void **lanes, unsigned mask);

// How a compiled program describes a kernel to cuModuleGetFunction.
struct EmuKernel {
    const char *name;
    void (*entry)(void **args);
    const unsigned long *param_sizes; // the count, then the bytes of each
    int max_threads;                  // from __launch_bounds__, or 1024
};

extern "C" {
#if defined(__GNUC__)
extern EMU_EXPORT __attribute__((tls_model("initial-exec"))) __thread EmuNow emu_now;
#endif

// For kernels.
EMU_EXPORT void emu_warp(EmuWarpFn fn, unsigned mask, void *args, int line);
EMU_EXPORT int emu_barrier(int predicate, int line);
EMU_EXPORT unsigned emu_live_lanes();
EMU_EXPORT int emu_is_shared(const void *p, unsigned long bytes);
EMU_EXPORT void emu_yield();
EMU_EXPORT void emu_cp_async(void *shared, const void *global, unsigned copied, unsigned total);
EMU_EXPORT void emu_cp_async_commit();
EMU_EXPORT void emu_cp_async_wait(int groups_left);
EMU_EXPORT void emu_fail(int code, const char *format, ...)
    __attribute__((noreturn, format(printf, 2, 3)));

// For libcublasLt: runs `work(data)` on a stream, or records it where the stream is capturing.
// Takes over `data`, which `drop` deletes. Returns a CUresult.
EMU_EXPORT int emu_stream_run(void *stream, int (*work)(void *), void *data, void (*drop)(void *));
// Is [p, p + bytes) inside one allocation? Says on stderr what is wrong where it is not.
EMU_EXPORT int emu_check_range(const void *p, unsigned long bytes, const char *what);
}
