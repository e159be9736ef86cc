// Memory of the software CUDA device.
//
// An allocation lies in pages of its own, as far back as an alignment of 256 bytes allows, between
// two stretches of addresses that nobody may touch:
//
//     | no access | red zone | the allocation | red zone (< 256 bytes) | no access |
//
// A touch of a closed page is caught at once (scheduler.cpp); a write to a red zone at the end of
// the kernel. Fresh memory and red zones hold NaN in f32, f16 and bf16. Freed memory is closed.
//
// Not here: reuse of freed memory, pools with a limit of their own, managed memory that migrates.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

#include "device.h"

namespace {

const size_t ALIGNMENT = 256;
const size_t RED_ZONE_BEFORE = 128;
const size_t GUARD = 8 << 20; // addresses without memory behind them cost nothing
const size_t N_FREED_KEPT = 4096;

struct Region {
    size_t bytes;
    Kind kind;
    char *map;
    size_t map_bytes;
};

struct Freed {
    uintptr_t begin;
    Region region;
};

struct Memory {
    std::mutex lock;
    std::map<uintptr_t, Region> regions;
    std::deque<Freed> freed;
    size_t used = 0;
    std::mutex error_lock;
    int error = SUCCESS;
};

// Never destroyed: the workers outlive the statics of the program.
Memory &memory() {
    static Memory *m = new Memory;
    return *m;
}

size_t page() {
    static size_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
}

size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

// A signalling NaN in f32 and bf16: even x += y changes it. Fresh memory is 0xFF throughout.
unsigned char red(uintptr_t at) { return at % 2 ? 0xFF : 0x9D; }

void paint(uintptr_t from, uintptr_t to) {
    for (uintptr_t at = from; at < to; at++) *(unsigned char *)at = red(at);
}

// The first broken byte of a red zone, or 0.
uintptr_t broken(uintptr_t from, uintptr_t to) {
    for (uintptr_t at = from; at < to;) {
        bool whole = at % 8 == 0 && to - at >= 8;
        if (whole && *(const uint64_t *)at == 0xFF9DFF9DFF9DFF9D) {
            at += 8;
        } else {
            if (*(const unsigned char *)at != red(at)) return at;
            at++;
        }
    }
    return 0;
}

struct Zones {
    uintptr_t before, begin, end, after;
};

Zones zones(uintptr_t begin, const Region &r) {
    uintptr_t first = (uintptr_t)r.map + GUARD;
    uintptr_t before = begin - first < RED_ZONE_BEFORE ? first : begin - RED_ZONE_BEFORE;
    return {before, begin, begin + r.bytes, (uintptr_t)r.map + r.map_bytes - GUARD};
}

// Reports and repairs, so that one fault is told once. The lock is held.
bool check(uintptr_t begin, const Region &r, const char *after) {
    if (r.kind == Kind::Symbol) return true;
    Zones z = zones(begin, r);
    uintptr_t at = broken(z.before, z.begin);
    if (at) {
        say("out-of-bounds write %zu bytes before an allocation of %zu bytes, seen %s",
            (size_t)(z.begin - at), r.bytes, after);
    } else if ((at = broken(z.end, z.after))) {
        say("out-of-bounds write %zu bytes past the end of an allocation of %zu bytes, seen %s",
            (size_t)(at - z.end), r.bytes, after);
    }
    if (!at) return true;
    paint(z.before, z.begin);
    paint(z.end, z.after);
    return false;
}

} // namespace

void say(const char *format, ...) {
    char text[2048];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fprintf(stderr, "cuda emulator: %s\n", text);
}

long env_number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

int sticky_error() {
    std::lock_guard<std::mutex> hold(memory().error_lock);
    return memory().error;
}

void set_sticky_error(int code) {
    std::lock_guard<std::mutex> hold(memory().error_lock);
    if (memory().error == SUCCESS) memory().error = code;
}

size_t region_total() {
    static size_t bytes = (size_t)env_number("ELAPID_EMULATOR_MEMORY_MIB", 8192) << 20;
    return bytes;
}

size_t region_used() {
    std::lock_guard<std::mutex> hold(memory().lock);
    return memory().used;
}

int region_new(size_t bytes, Kind kind, void **out) {
    if (bytes == 0) return INVALID_VALUE;
    Memory &m = memory();
    std::lock_guard<std::mutex> hold(m.lock);
    if (kind == Kind::Device && (bytes > region_total() || m.used > region_total() - bytes))
        return OUT_OF_MEMORY;
    size_t data_bytes = round_up(bytes, ALIGNMENT);
    size_t map_bytes = round_up(data_bytes, page()) + 2 * GUARD;
    char *map = (char *)mmap(nullptr, map_bytes, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) return OUT_OF_MEMORY;
    if (mprotect(map + GUARD, map_bytes - 2 * GUARD, PROT_READ | PROT_WRITE)) {
        munmap(map, map_bytes);
        return OUT_OF_MEMORY;
    }
    uintptr_t begin = (uintptr_t)map + map_bytes - GUARD - data_bytes;
    Region r = {bytes, kind, map, map_bytes};
    memset((void *)begin, 0xFF, bytes);
    Zones z = zones(begin, r);
    paint(z.before, z.begin);
    paint(z.end, z.after);
    m.regions[begin] = r;
    if (kind == Kind::Device) m.used += bytes;
    *out = (void *)begin;
    return SUCCESS;
}

int region_free(uintptr_t p, Kind kind) {
    Memory &m = memory();
    std::lock_guard<std::mutex> hold(m.lock);
    auto at = m.regions.find(p);
    if (at == m.regions.end() || at->second.kind != kind) {
        say("free of %p, which is not the start of a live allocation", (void *)p);
        return INVALID_VALUE;
    }
    Region r = at->second;
    if (!check(p, r, "when it was freed")) set_sticky_error(ILLEGAL_ADDRESS);
    if (kind == Kind::Device) m.used -= r.bytes;
    m.regions.erase(at);
    // The pages go back, the addresses stay closed for a while.
    mmap(r.map, r.map_bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    m.freed.push_back({p, r});
    if (m.freed.size() > N_FREED_KEPT) {
        munmap(m.freed.front().region.map, m.freed.front().region.map_bytes);
        m.freed.pop_front();
    }
    return SUCCESS;
}

void region_adopt(void *p, size_t bytes) {
    std::lock_guard<std::mutex> hold(memory().lock);
    memory().regions[(uintptr_t)p] = {bytes, Kind::Symbol, nullptr, 0};
}

bool region_find(uintptr_t p, uintptr_t *begin, size_t *bytes, Kind *kind) {
    Memory &m = memory();
    std::lock_guard<std::mutex> hold(m.lock);
    auto at = m.regions.upper_bound(p);
    if (at == m.regions.begin()) return false;
    --at;
    if (p >= at->first + at->second.bytes) return false;
    *begin = at->first;
    *bytes = at->second.bytes;
    *kind = at->second.kind;
    return true;
}

void region_check_all(const char *after) {
    Memory &m = memory();
    std::lock_guard<std::mutex> hold(m.lock);
    for (auto &[begin, region] : m.regions)
        if (!check(begin, region, after)) set_sticky_error(ILLEGAL_ADDRESS);
}

std::string region_describe(uintptr_t p) {
    Memory &m = memory();
    std::lock_guard<std::mutex> hold(m.lock);
    char text[160] = "which is in no allocation";
    for (auto at = m.freed.rbegin(); at != m.freed.rend(); ++at)
        if (p >= at->begin && p < at->begin + at->region.bytes) {
            snprintf(text, sizeof text, "byte %zu of a freed allocation of %zu bytes",
                     (size_t)(p - at->begin), at->region.bytes);
            return text;
        }
    for (auto &[begin, r] : m.regions) {
        if (r.kind == Kind::Symbol) continue;
        uintptr_t end = begin + r.bytes;
        if (p >= (uintptr_t)r.map && p < begin)
            snprintf(text, sizeof text, "%zu bytes before an allocation of %zu bytes",
                     (size_t)(begin - p), r.bytes);
        if (p >= end && p < (uintptr_t)r.map + r.map_bytes)
            snprintf(text, sizeof text, "%zu bytes past the end of an allocation of %zu bytes",
                     (size_t)(p - end), r.bytes);
    }
    return text;
}

extern "C" int emu_check_range(const void *p, unsigned long bytes, const char *what) {
    if (bytes == 0) return SUCCESS;
    uintptr_t begin;
    size_t size;
    Kind kind;
    uintptr_t at = (uintptr_t)p;
    if (!region_find(at, &begin, &size, &kind)) {
        say("%s: %p is %s", what, p, region_describe(at).c_str());
        return INVALID_VALUE;
    }
    if (bytes > begin + size - at) {
        say("%s: %lu bytes at byte %zu of an allocation of %zu bytes", what, bytes,
            (size_t)(at - begin), size);
        return INVALID_VALUE;
    }
    return SUCCESS;
}
