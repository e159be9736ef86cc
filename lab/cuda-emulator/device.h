// Inside of libcuda: memory.cpp and scheduler.cpp as driver.cpp sees them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "runtime.h"

// The CUresult values in use; the numbers are NVIDIA's.
enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    FILE_NOT_FOUND = 301,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_OUT_OF_RESOURCES = 701,
    ASSERT = 710,
    ILLEGAL_INSTRUCTION = 715,
    MISALIGNED_ADDRESS = 716,
    LAUNCH_FAILED = 719,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    UNKNOWN = 999,
};

const int SHARED_BYTES = 49152;
const int SHARED_BYTES_OPTIN = 101376;
const int MAX_THREADS = 1024;
const int N_PROCESSORS = 2;

// One line on stderr, "cuda emulator: ...".
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
long env_number(const char *name, long otherwise);

// The error that every call returns once a kernel has gone wrong, as on a real device.
int sticky_error();
void set_sticky_error(int code);

// memory.cpp
enum class Kind { Device, Host, Symbol };
int region_new(size_t bytes, Kind kind, void **out);
int region_free(uintptr_t p, Kind kind);
void region_adopt(void *p, size_t bytes); // a __device__ variable of a module
bool region_find(uintptr_t p, uintptr_t *begin, size_t *bytes, Kind *kind);
void region_check_all(const char *after); // sets the sticky error where a red zone is broken
std::string region_describe(uintptr_t p);
size_t region_used();
size_t region_total();

// scheduler.cpp
struct Module {
    void *library;
    void *(*tls_anchor)(); // null where the program has no __shared__ variable
    size_t tls_bytes;
    uint64_t id;
};

struct Launch {
    const EmuKernel *kernel;
    const Module *module;
    dim3 grid, block;
    unsigned shared_bytes;
    void **args;
};

// Runs every block and returns a CUresult; a failure is also sticky.
int run_kernel(const Launch &launch);

// stream.cpp. Runs `work` now, or records it where the stream is capturing.
int on_stream(void *stream, std::function<int()> work);
// A call that may not be made while a stream is capturing: returns a CUresult.
int outside_capture();
int alloc_on_stream(void *stream, size_t bytes, void **out);
int free_on_stream(void *stream, uintptr_t p);
int ready(); // is there a device, a context and no sticky error? (driver.cpp)
void *current_context();
