// How the software CUDA device runs a kernel.
//
// Blocks go to a few OS threads (workers), in an order shuffled by the number of the launch, so
// that a dependence of one block on another shows. The threads of a block are fibers of one worker:
// each runs until it ends or waits for its warp or its block. Which lane and which warp goes first
// changes from sweep to sweep, so that a missing barrier shows too. Shared memory holds NaN when a
// block begins. Copies of cp.async land when they are waited for, not before.
//
// Errors end the launch: a touch of closed memory, a barrier that can never be passed, a trap, a
// misaligned or out-of-range index. They are told on stderr with kernel, block and thread.
//
// Not here: threads of one warp in lock step, preemption (a thread that spins for another thread of
// its block hangs unless it calls __nanosleep), clusters, cooperative launches, time.
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "device.h"
#include "fiber.h"

extern "C" {
EMU_EXPORT __attribute__((tls_model("initial-exec"))) __thread EmuNow emu_now;
}

namespace {

const int WARP = 32;

// ---- Fibers -------------------------------------------------------------------------------------

enum class State { New, Ready, Yielded, AtWarp, AtBlock, Done };

struct Copy {
    void *shared;
    const void *global;
    unsigned copied, total;
    int group;
};

struct Fiber {
    Context context;
    char *stack;
    State state;
    uint3 idx;
    void *args;
    int line; // where it waits
    std::vector<Copy> copies;
    int group; // of cp.async, the one being filled
};

// Lanes of a warp that wait for the same operation with the same mask.
struct Group {
    EmuWarpFn fn;
    unsigned mask, arrived;
};

struct Warp {
    unsigned ready, live;
    int n_groups;
    Group groups[WARP];
};

struct Tls {
    uint64_t module_id;
    char *begin;
    size_t bytes;
};

// ---- Launches -----------------------------------------------------------------------------------

struct Job {
    const Launch *launch;
    uint64_t n_blocks, stride, offset;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    int result = SUCCESS;
};

struct Worker {
    int index;
    Context home;
    sigjmp_buf escape;
    volatile bool in_kernel = false;
    Job *job = nullptr;
    std::vector<Fiber> fibers = std::vector<Fiber>(MAX_THREADS);
    std::vector<Warp> warps = std::vector<Warp>(MAX_THREADS / WARP);
    std::vector<char *> stacks, free_stacks;
    int n_threads = 0, n_done = 0, n_at_block = 0;
    int predicates = 0, predicates_last = 0;
    Fiber *fiber = nullptr;
    char *dynamic_map = nullptr; // SHARED_BYTES_OPTIN rounded to pages, then a closed page
    Tls tls = {};
};

struct Pool {
    std::mutex launch_lock; // one kernel at a time
    std::mutex lock;
    std::condition_variable start, finish;
    std::vector<Worker *> workers;
    Job *job = nullptr;
    uint64_t generation = 0;
    int n_running = 0;
    uint64_t n_launches = 0;
    std::mutex report_lock;
};

Pool &pool() {
    static Pool *p = new Pool;
    return *p;
}

__thread Worker *me = nullptr;

size_t page() { return sysconf(_SC_PAGESIZE); }

size_t dynamic_bytes() { return (SHARED_BYTES_OPTIN + page() - 1) / page() * page(); }

char *map_closed_below(size_t bytes) {
    char *map = (char *)mmap(nullptr, bytes + page(), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED || mprotect(map + page(), bytes, PROT_READ | PROT_WRITE)) {
        say("no memory for the stack of a thread");
        abort();
    }
    return map + page();
}

// ---- Faults -------------------------------------------------------------------------------------

// Tells of a fault in the running thread and leaves the kernel. Only a launch's first one is told.
[[noreturn]] void fault(int code, const char *text) {
    Worker &w = *me;
    w.in_kernel = false;
    {
        std::lock_guard<std::mutex> hold(pool().report_lock);
        if (!w.job->failed.exchange(true)) {
            const EmuNow &n = emu_now;
            say("kernel %s, block (%u, %u, %u), thread (%u, %u, %u): %s",
                w.job->launch->kernel->name, n.block_idx.x, n.block_idx.y, n.block_idx.z,
                n.thread_idx.x, n.thread_idx.y, n.thread_idx.z, text);
            w.job->result = code;
            set_sticky_error(code);
        }
    }
    siglongjmp(w.escape, 1);
}

struct sigaction old_actions[NSIG];

void on_signal(int number, siginfo_t *info, void *context) {
    if (!me || !me->in_kernel) {
        struct sigaction &old = old_actions[number];
        if (old.sa_flags & SA_SIGINFO && old.sa_sigaction) {
            old.sa_sigaction(number, info, context);
        } else {
            signal(number, SIG_DFL); // the instruction runs again and ends the process
        }
        return;
    }
    uintptr_t at = (uintptr_t)info->si_addr;
    char text[320];
    if (number == SIGFPE) fault(ILLEGAL_INSTRUCTION, "division by zero");
    if (number == SIGILL) fault(ILLEGAL_INSTRUCTION, "illegal instruction or unreachable code");
    if (info->si_code == SI_KERNEL) fault(MISALIGNED_ADDRESS, "misaligned or impossible address");
    Worker &w = *me;
    for (char *stack : w.stacks)
        if (at >= (uintptr_t)stack - page() && at < (uintptr_t)stack)
            fault(LAUNCH_FAILED, "stack overflow: too much in local arrays");
    if (at - (uintptr_t)w.dynamic_map < dynamic_bytes() + page()) {
        snprintf(text, sizeof text, "access past the %u bytes of dynamic shared memory",
                 w.job->launch->shared_bytes);
    } else {
        snprintf(text, sizeof text, "illegal address %p, %s", (void *)at,
                 region_describe(at).c_str());
    }
    fault(ILLEGAL_ADDRESS, text);
}

void catch_signals() {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE})
        sigaction(number, &action, &old_actions[number]);
}

// ---- One block ----------------------------------------------------------------------------------

int warp_of(const Worker &w, const Fiber &f) { return (int)(&f - w.fibers.data()) / WARP; }

void make_ready(Worker &w, Warp &warp, int warp_idx, unsigned lanes) {
    for (unsigned left = lanes; left; left &= left - 1)
        w.fibers[warp_idx * WARP + __builtin_ctz(left)].state = State::Ready;
    warp.ready |= lanes;
}

// Runs the operation of a group whose lanes are all there.
void complete(Worker &w, int warp_idx, int group_idx) {
    Warp &warp = w.warps[warp_idx];
    Group group = warp.groups[group_idx];
    warp.groups[group_idx] = warp.groups[--warp.n_groups];
    void *lanes[WARP] = {};
    for (unsigned left = group.arrived; left; left &= left - 1) {
        int lane = __builtin_ctz(left);
        lanes[lane] = w.fibers[warp_idx * WARP + lane].args;
    }
    if (group.fn) group.fn(lanes, group.mask);
    make_ready(w, warp, warp_idx, group.arrived);
}

void fiber_main() {
    Worker &w = *me;
    w.job->launch->kernel->entry(w.job->launch->args);
    w.fiber->state = State::Done;
    switch_to(w.fiber->context, w.home);
    __builtin_unreachable();
}

void pause(State state, int line) {
    Worker &w = *me;
    w.fiber->state = state;
    w.fiber->line = line;
    switch_to(w.fiber->context, w.home);
}

void after_done(Worker &w, int warp_idx, unsigned bit, Fiber &f) {
    w.n_done++;
    w.free_stacks.push_back(f.stack);
    Warp &warp = w.warps[warp_idx];
    warp.live &= ~bit;
    for (int g = 0; g < warp.n_groups; g++)
        if ((warp.groups[g].mask & warp.live & ~warp.groups[g].arrived) == 0) {
            complete(w, warp_idx, g);
            g = -1;
        }
}

void resume(Worker &w, int warp_idx, int lane) {
    Warp &warp = w.warps[warp_idx];
    unsigned bit = 1u << lane;
    Fiber &f = w.fibers[warp_idx * WARP + lane];
    warp.ready &= ~bit;
    if (f.state == State::New) {
        if (w.free_stacks.empty()) {
            w.stacks.push_back(map_closed_below(STACK_BYTES));
            w.free_stacks.push_back(w.stacks.back());
        }
        f.stack = w.free_stacks.back();
        w.free_stacks.pop_back();
        f.context.begin(f.stack, fiber_main);
    }
    w.fiber = &f;
    emu_now.thread_idx = f.idx;
    emu_now.lane = lane;
    switch_to(w.home, f.context);
    if (f.state == State::Done) after_done(w, warp_idx, bit, f);
}

// Lanes in turn until none of the warp can continue, from the last to the first or the other way.
void run_warp(Worker &w, int warp_idx, bool downwards) {
    Warp &warp = w.warps[warp_idx];
    while (warp.ready) {
        unsigned sweep = warp.ready;
        while (sweep) {
            int lane = downwards ? 31 - __builtin_clz(sweep) : __builtin_ctz(sweep);
            sweep &= ~(1u << lane);
            resume(w, warp_idx, lane);
        }
        downwards = !downwards;
    }
}

[[noreturn]] void deadlock(Worker &w) {
    char text[1024];
    int n = snprintf(text, sizeof text, "deadlock: %d threads at __syncthreads, %d have ended",
                     w.n_at_block, w.n_done);
    const Fiber *stuck = nullptr;
    int lines[8], n_lines = 0, n_at_warp = 0;
    for (int i = 0; i < w.n_threads; i++) {
        const Fiber &f = w.fibers[i];
        if (f.state == State::Done) continue;
        n_at_warp += f.state == State::AtWarp;
        if (!stuck) stuck = &f;
        bool known = false;
        for (int k = 0; k < n_lines; k++) known |= lines[k] == f.line;
        if (!known && n_lines < 8) lines[n_lines++] = f.line;
    }
    n += snprintf(text + n, sizeof text - n, ", %d wait for others of their warp; waiting in line",
                  n_at_warp);
    for (int k = 0; k < n_lines; k++)
        n += snprintf(text + n, sizeof text - n, "%s %d", k ? "," : "", lines[k]);
    if (stuck) emu_now.thread_idx = stuck->idx;
    fault(LAUNCH_FAILED, text);
}

// Everybody waits: lets the block continue, or finds that it never can.
void next_phase(Worker &w) {
    int n_yielded = 0;
    for (int i = 0; i < w.n_threads; i++)
        if (w.fibers[i].state == State::Yielded) {
            make_ready(w, w.warps[i / WARP], i / WARP, 1u << (i % WARP));
            n_yielded++;
        }
    if (n_yielded) return;
    if (w.n_at_block != w.n_threads) deadlock(w);
    w.predicates_last = w.predicates;
    w.predicates = 0;
    w.n_at_block = 0;
    for (int i = 0; i < w.n_threads; i += WARP)
        make_ready(w, w.warps[i / WARP], i / WARP, w.warps[i / WARP].live);
}

void begin_block(Worker &w, const Launch &launch) {
    w.n_done = w.n_at_block = w.predicates = w.predicates_last = 0;
    for (int i = 0; i < w.n_threads; i++) {
        Fiber &f = w.fibers[i];
        f.state = State::New;
        f.group = 0;
        f.copies.clear();
    }
    for (int i = 0; i < w.n_threads; i += WARP) {
        int n = w.n_threads - i;
        Warp &warp = w.warps[i / WARP];
        warp.ready = warp.live = n >= WARP ? ~0u : (1u << n) - 1;
        warp.n_groups = 0;
    }
    if (w.tls.bytes) memset(w.tls.begin, 0xFF, w.tls.bytes);
    memset(emu_now.dynamic_shared, 0xFF, (launch.shared_bytes + 127) / 128 * 128);
}

// Past the end of dynamic shared memory there are up to 127 bytes before the closed page.
void check_dynamic_shared(const Launch &launch) {
    for (unsigned i = launch.shared_bytes; i % 128; i++)
        if (emu_now.dynamic_shared[i] != 0xFF)
            emu_fail(ILLEGAL_ADDRESS, "write past the %u bytes of dynamic shared memory",
                     launch.shared_bytes);
}

void run_block(Worker &w, uint64_t block) {
    const Launch &launch = *w.job->launch;
    emu_now.block_idx = {(unsigned)(block % launch.grid.x),
                         (unsigned)(block / launch.grid.x % launch.grid.y),
                         (unsigned)(block / launch.grid.x / launch.grid.y)};
    begin_block(w, launch);
    int n_warps = (w.n_threads + WARP - 1) / WARP;
    for (uint64_t sweep = block;; sweep++) {
        bool downwards = sweep % 2 == 0;
        for (int i = 0; i < n_warps; i++)
            run_warp(w, downwards ? n_warps - 1 - i : i, downwards);
        if (w.n_done == w.n_threads) break;
        next_phase(w);
    }
    check_dynamic_shared(launch);
}

// ---- Workers ------------------------------------------------------------------------------------

void begin_job(Worker &w, const Launch &launch) {
    dim3 b = launch.block;
    w.n_threads = b.x * b.y * b.z;
    for (int i = 0; i < w.n_threads; i++)
        w.fibers[i].idx = {i % b.x, i / b.x % b.y, i / b.x / b.y};
    emu_now.block_dim = b;
    emu_now.grid_dim = launch.grid;
    // The end of the buffer lies against the closed page; its start keeps an alignment of 128.
    size_t bytes = (launch.shared_bytes + 127) / 128 * 128;
    emu_now.dynamic_shared = (unsigned char *)w.dynamic_map + dynamic_bytes() - bytes;
    if (w.tls.module_id != launch.module->id) {
        w.tls = {launch.module->id, nullptr, 0};
        if (launch.module->tls_anchor) {
            launch.module->tls_anchor(); // makes this thread's copy exist
            void *begin = nullptr;
            dlinfo(launch.module->library, RTLD_DI_TLS_DATA, &begin);
            if (begin) w.tls = {launch.module->id, (char *)begin, launch.module->tls_bytes};
        }
    }
}

void run_job(Worker &w, Job &job) {
    w.job = &job;
    begin_job(w, *job.launch);
    if (sigsetjmp(w.escape, 1)) {
        w.free_stacks = w.stacks;
        return;
    }
    w.in_kernel = true;
    while (!job.failed.load(std::memory_order_relaxed)) {
        uint64_t i = job.next.fetch_add(1);
        if (i >= job.n_blocks) break;
        run_block(w, (uint64_t)(((__uint128_t)i * job.stride + job.offset) % job.n_blocks));
    }
    w.in_kernel = false;
}

void worker_main(Worker *w) {
    me = w;
    stack_t stack = {};
    stack.ss_size = 64 << 10;
    stack.ss_sp = malloc(stack.ss_size);
    sigaltstack(&stack, nullptr);
    // The last page stays closed.
    w->dynamic_map = (char *)mmap(nullptr, dynamic_bytes() + page(), PROT_NONE,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(w->dynamic_map, dynamic_bytes(), PROT_READ | PROT_WRITE);
    Pool &p = pool();
    uint64_t seen = 0;
    std::unique_lock<std::mutex> hold(p.lock);
    while (true) {
        p.start.wait(hold, [&] { return p.generation != seen; });
        seen = p.generation;
        Job *job = p.job;
        hold.unlock();
        run_job(*w, *job);
        hold.lock();
        if (--p.n_running == 0) p.finish.notify_all();
    }
}

void start_workers(Pool &p) {
    if (!p.workers.empty()) return;
    catch_signals();
    int n = (int)env_number("ELAPID_EMULATOR_THREADS", 2);
    for (int i = 0; i < (n < 1 ? 1 : n); i++) {
        p.workers.push_back(new Worker);
        p.workers.back()->index = i;
        std::thread(worker_main, p.workers.back()).detach();
    }
}

} // namespace

int run_kernel(const Launch &launch) {
    Pool &p = pool();
    std::lock_guard<std::mutex> one(p.launch_lock);
    start_workers(p);
    Job job;
    job.launch = &launch;
    job.n_blocks = (uint64_t)launch.grid.x * launch.grid.y * launch.grid.z;
    // A permutation of the blocks: i * stride + offset, with a stride that shares no factor.
    uint64_t seed = ++p.n_launches * 0x9E3779B97F4A7C15 + env_number("ELAPID_EMULATOR_SEED", 0);
    job.stride = (seed >> 20) % job.n_blocks + 1;
    while (std::gcd(job.stride, job.n_blocks) != 1) job.stride++;
    job.offset = (seed >> 7) % job.n_blocks;
    std::unique_lock<std::mutex> hold(p.lock);
    p.job = &job;
    p.n_running = (int)p.workers.size();
    p.generation++;
    p.start.notify_all();
    int n_minutes = 0;
    while (!p.finish.wait_for(hold, std::chrono::minutes(1), [&] { return p.n_running == 0; }))
        say("kernel %s runs for %d minutes (a thread that spins?)", launch.kernel->name,
            ++n_minutes);
    hold.unlock();
    char after[256];
    snprintf(after, sizeof after, "after kernel %s", launch.kernel->name);
    region_check_all(after);
    return job.failed ? job.result : sticky_error();
}

// ---- What kernels call --------------------------------------------------------------------------

extern "C" {

void emu_fail(int code, const char *format, ...) {
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fault(code, text);
}

void emu_warp(EmuWarpFn fn, unsigned mask, void *args, int line) {
    Worker &w = *me;
    Fiber &f = *w.fiber;
    int warp_idx = warp_of(w, f);
    Warp &warp = w.warps[warp_idx];
    unsigned bit = 1u << emu_now.lane;
    if (!(mask & bit))
        emu_fail(LAUNCH_FAILED, "line %d: the mask %08x leaves out the calling lane", line, mask);
    int g = 0;
    while (g < warp.n_groups && (warp.groups[g].fn != fn || warp.groups[g].mask != mask)) g++;
    if (g == warp.n_groups) warp.groups[warp.n_groups++] = {fn, mask, 0};
    f.args = args;
    warp.groups[g].arrived |= bit;
    if ((mask & warp.live & ~warp.groups[g].arrived) == 0) {
        complete(w, warp_idx, g);
        warp.ready &= ~bit; // the one that completes goes straight on
        return;
    }
    pause(State::AtWarp, line);
}

int emu_barrier(int predicate, int line) {
    me->predicates += predicate != 0;
    me->n_at_block++;
    pause(State::AtBlock, line);
    return me->predicates_last;
}

unsigned emu_live_lanes() { return me->warps[warp_of(*me, *me->fiber)].live; }

void emu_yield() { pause(State::Yielded, 0); }

int emu_is_shared(const void *p, unsigned long bytes) {
    const Worker &w = *me;
    uintptr_t at = (uintptr_t)p, tls = (uintptr_t)w.tls.begin;
    uintptr_t dynamic = (uintptr_t)emu_now.dynamic_shared;
    if (at >= tls && at + bytes <= tls + w.tls.bytes) return 1;
    return at >= dynamic && at + bytes <= dynamic + w.job->launch->shared_bytes;
}

void emu_cp_async(void *shared, const void *global, unsigned copied, unsigned total) {
    if ((uintptr_t)shared % total || (copied && (uintptr_t)global % total))
        emu_fail(MISALIGNED_ADDRESS, "cp.async of %u bytes from %p to %p: misaligned", total,
                 global, shared);
    if (!emu_is_shared(shared, total))
        emu_fail(ILLEGAL_ADDRESS, "cp.async to %p, which is not shared memory", shared);
    me->fiber->copies.push_back({shared, global, copied, total, me->fiber->group});
}

void emu_cp_async_commit() { me->fiber->group++; }

void emu_cp_async_wait(int groups_left) {
    Fiber &f = *me->fiber;
    size_t n = 0;
    while (n < f.copies.size() && f.copies[n].group < f.group - groups_left) {
        const Copy &c = f.copies[n++];
        memcpy(c.shared, c.global, c.copied);
        memset((char *)c.shared + c.copied, 0, c.total - c.copied);
    }
    f.copies.erase(f.copies.begin(), f.copies.begin() + n);
}

// g++ -fsanitize=alignment,bounds calls these; the layouts are those of libubsan.
struct SourceLocation {
    const char *file;
    unsigned line, column;
};

EMU_EXPORT void __ubsan_handle_type_mismatch_v1(void *data, void *p) {
    const SourceLocation &at = *(const SourceLocation *)data;
    if (!p) emu_fail(ILLEGAL_ADDRESS, "%s:%u: null pointer", at.file, at.line);
    emu_fail(MISALIGNED_ADDRESS, "%s:%u: misaligned address %p", at.file, at.line, p);
}

EMU_EXPORT void __ubsan_handle_out_of_bounds(void *data, void *index) {
    const SourceLocation &at = *(const SourceLocation *)data;
    emu_fail(ILLEGAL_ADDRESS, "%s:%u: index %ld is outside of the array", at.file, at.line,
             (long)index);
}

EMU_EXPORT void __ubsan_handle_type_mismatch_v1_abort(void *data, void *p) {
    __ubsan_handle_type_mismatch_v1(data, p);
}

EMU_EXPORT void __ubsan_handle_out_of_bounds_abort(void *data, void *index) {
    __ubsan_handle_out_of_bounds(data, index);
}
}
