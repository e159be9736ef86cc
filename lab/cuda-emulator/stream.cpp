// Streams, events, capture and graphs of the software CUDA device.
//
// Work runs inside of the call that asks for it, so every stream is always idle. A capturing stream
// records the work as a list, and a graph is such a list. Rules of capture that a real driver
// enforces are enforced: no synchronous allocation, no waiting, no event from before the capture.
//
// Not here: concurrency (no race between streams ever shows), nodes edited by hand, conditional
// nodes, updates of an instantiated graph.
#include <pthread.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "device.h"

#define API extern "C" EMU_EXPORT

namespace {

using Clock = std::chrono::steady_clock;

// What a graph does. It owns the memory that was both allocated and freed in its capture.
struct Body {
    std::vector<std::function<int()>> nodes;
    std::set<uintptr_t> allocated, owned;
    ~Body() {
        for (uintptr_t p : owned) region_free(p, Kind::Device);
    }
};

enum Mode { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };

struct Stream;

struct Capture {
    Mode mode;
    pthread_t thread;
    Stream *origin;
    std::shared_ptr<Body> body = std::make_shared<Body>();
    bool invalid = false;
    uint64_t id;
};

struct Stream {
    unsigned flags;
    int priority;
    std::shared_ptr<Capture> capture;
};

const unsigned STREAM_NON_BLOCKING = 1;
const unsigned EVENT_DISABLE_TIMING = 2;

struct Event {
    unsigned flags;
    bool recorded = false;
    Clock::time_point time;
    std::weak_ptr<Capture> capture;
    bool captured = false;
};

struct Graph {
    std::shared_ptr<Body> body;
};

struct Streams {
    std::recursive_mutex lock;
    std::set<Stream *> streams;
    std::set<Event *> events;
    std::set<Graph *> graphs, execs;
    std::set<std::shared_ptr<Capture>> captures; // those going on
    uint64_t n_captures = 0;
    Stream standard = {0, 0, nullptr};
};

Streams &all() {
    static Streams *s = new Streams;
    return *s;
}

using Hold = std::lock_guard<std::recursive_mutex>;

// 0, 1 and 2 are the default stream and its two names. Null where the handle is no stream.
Stream *stream_of(void *handle) {
    if ((uintptr_t)handle <= 2) return &all().standard;
    Stream *s = (Stream *)handle;
    if (all().streams.count(s)) return s;
    say("%p is not a live stream", handle);
    return nullptr;
}

int invalidate(Capture &c, int error, const char *why) {
    c.invalid = true;
    say("a capture is spoilt: %s", why);
    return error;
}

// The default stream waits for every blocking stream, which a capture does not allow.
int default_stream_allowed() {
    for (auto &c : all().captures)
        if (!(c->origin->flags & STREAM_NON_BLOCKING))
            return invalidate(*c, CAPTURE_IMPLICIT, "work on the default stream meanwhile");
    return SUCCESS;
}

template <class T> int forget(std::set<T *> &live, T *object, const char *what) {
    Hold hold(all().lock);
    if (!live.erase(object)) {
        say("%p is not a live %s", (void *)object, what);
        return INVALID_HANDLE;
    }
    delete object;
    return SUCCESS;
}

template <class T> bool is_live(const std::set<T *> &live, T *object, const char *what) {
    if (live.count(object)) return true;
    say("%p is not a live %s", (void *)object, what);
    return false;
}

int new_graph(std::shared_ptr<Body> body, Graph **out, std::set<Graph *> &live) {
    *out = new Graph{std::move(body)};
    live.insert(*out);
    return SUCCESS;
}

int synchronize() {
    region_check_all("at a synchronisation");
    return sticky_error();
}

} // namespace

// ---- For the rest of the library ----------------------------------------------------------------

int on_stream(void *handle, std::function<int()> work) {
    if (int e = ready()) return e;
    {
        Hold hold(all().lock);
        Stream *s = stream_of(handle);
        if (!s) return INVALID_HANDLE;
        if (s == &all().standard)
            if (int e = default_stream_allowed()) return e;
        if (s->capture) {
            if (s->capture->invalid) return CAPTURE_INVALIDATED;
            s->capture->body->nodes.push_back(std::move(work));
            return SUCCESS;
        }
    }
    return work();
}

int outside_capture() {
    Hold hold(all().lock);
    for (auto &c : all().captures) {
        bool own = pthread_equal(c->thread, pthread_self());
        if (c->mode == GLOBAL || (c->mode == THREAD_LOCAL && own))
            return invalidate(*c, CAPTURE_UNSUPPORTED, "a call that a capture does not allow");
    }
    return SUCCESS;
}

int alloc_on_stream(void *handle, size_t bytes, void **out) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    if (s->capture && s->capture->invalid) return CAPTURE_INVALIDATED;
    if (int e = region_new(bytes, Kind::Device, out)) return e;
    if (s->capture) {
        void *p = *out;
        s->capture->body->allocated.insert((uintptr_t)p);
        s->capture->body->nodes.push_back([=] {
            __builtin_memset(p, 0xFF, bytes);
            return SUCCESS;
        });
    }
    return SUCCESS;
}

int free_on_stream(void *handle, uintptr_t p) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    if (!s->capture) return p ? region_free(p, Kind::Device) : SUCCESS;
    Body &body = *s->capture->body;
    if (!body.allocated.count(p))
        return invalidate(*s->capture, INVALID_VALUE, "memory from before it was freed");
    body.owned.insert(p);
    return SUCCESS;
}

extern "C" int emu_stream_run(void *stream, int (*work)(void *), void *data, void (*drop)(void *)) {
    std::shared_ptr<void> kept(data, drop);
    return on_stream(stream, [=] { return work(kept.get()); });
}

// ---- Streams ------------------------------------------------------------------------------------

API int cuStreamCreateWithPriority(Stream **out, unsigned flags, int priority) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    *out = new Stream{flags, priority, nullptr};
    all().streams.insert(*out);
    return SUCCESS;
}

API int cuStreamCreate(Stream **out, unsigned flags) {
    return cuStreamCreateWithPriority(out, flags, 0);
}

API int cuStreamDestroy_v2(Stream *s) { return forget(all().streams, s, "stream"); }

API int cuStreamSynchronize(void *handle) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    if (s->capture)
        return invalidate(*s->capture, CAPTURE_UNSUPPORTED, "its stream was synchronised");
    return synchronize();
}

API int cuStreamQuery(void *handle) { return cuStreamSynchronize(handle); }

API int cuStreamGetFlags(void *handle, unsigned *flags) {
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    *flags = s->flags;
    return SUCCESS;
}

API int cuStreamGetPriority(void *handle, int *priority) {
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    *priority = s->priority;
    return SUCCESS;
}

API int cuStreamGetCtx(void *, void **context) {
    *context = current_context();
    return SUCCESS;
}

API int cuStreamAttachMemAsync(void *, uintptr_t, size_t, unsigned) { return ready(); }

API int cuLaunchHostFunc(void *stream, void (*f)(void *), void *data) {
    return on_stream(stream, [=] {
        f(data);
        return SUCCESS;
    });
}

// ---- Events -------------------------------------------------------------------------------------

API int cuEventCreate(Event **out, unsigned flags) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    *out = new Event;
    (*out)->flags = flags;
    all().events.insert(*out);
    return SUCCESS;
}

API int cuEventDestroy_v2(Event *event) { return forget(all().events, event, "event"); }

API int cuEventRecord(Event *event, void *handle) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s || !is_live(all().events, event, "event")) return INVALID_HANDLE;
    if (s == &all().standard)
        if (int e = default_stream_allowed()) return e;
    if (s->capture && s->capture->invalid) return CAPTURE_INVALIDATED;
    event->captured = s->capture != nullptr;
    event->capture = s->capture;
    event->recorded = true;
    event->time = Clock::now();
    return SUCCESS;
}

API int cuEventRecordWithFlags(Event *event, void *handle, unsigned) {
    return cuEventRecord(event, handle);
}

// A wait for a captured event draws the stream into that capture.
API int cuStreamWaitEvent(void *handle, Event *event, unsigned) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s || !is_live(all().events, event, "event")) return INVALID_HANDLE;
    if (!event->recorded) return SUCCESS;
    std::shared_ptr<Capture> other = event->capture.lock();
    if (s->capture && s->capture->invalid) return CAPTURE_INVALIDATED;
    if (s->capture && !event->captured)
        return invalidate(*s->capture, CAPTURE_ISOLATION, "it waits for an event from before it");
    if (!event->captured) return SUCCESS;
    if (!other || !all().captures.count(other)) {
        say("a stream waits for an event of a capture that has ended");
        return CAPTURED_EVENT;
    }
    if (s == &all().standard) return CAPTURE_IMPLICIT;
    if (s->capture && s->capture != other)
        return invalidate(*s->capture, CAPTURE_MERGE, "two captures meet");
    s->capture = other;
    return SUCCESS;
}

API int cuEventSynchronize(Event *event) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    if (!is_live(all().events, event, "event")) return INVALID_HANDLE;
    std::shared_ptr<Capture> capture = event->capture.lock();
    if (event->captured && capture)
        return invalidate(*capture, CAPTURED_EVENT, "the host waits for one of its events");
    return synchronize();
}

API int cuEventQuery(Event *event) { return cuEventSynchronize(event); }

API int cuEventElapsedTime_v2(float *ms, Event *from, Event *to) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    if (!is_live(all().events, from, "event") || !is_live(all().events, to, "event"))
        return INVALID_HANDLE;
    if (!from->recorded || !to->recorded || (from->flags | to->flags) & EVENT_DISABLE_TIMING) {
        say("elapsed time of an event that was not recorded or has no timing");
        return INVALID_HANDLE;
    }
    *ms = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return SUCCESS;
}

API int cuEventElapsedTime(float *ms, Event *from, Event *to) {
    return cuEventElapsedTime_v2(ms, from, to);
}

// ---- Capture ------------------------------------------------------------------------------------

API int cuStreamBeginCapture_v2(void *handle, int mode) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    if (s == &all().standard) {
        say("the default stream cannot be captured");
        return CAPTURE_UNSUPPORTED;
    }
    if (s->capture) return invalidate(*s->capture, INVALID_VALUE, "it was begun twice");
    s->capture = std::make_shared<Capture>();
    s->capture->mode = (Mode)mode;
    s->capture->thread = pthread_self();
    s->capture->origin = s;
    s->capture->id = ++all().n_captures;
    all().captures.insert(s->capture);
    return SUCCESS;
}

API int cuStreamEndCapture(void *handle, Graph **out) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    *out = nullptr;
    std::shared_ptr<Capture> c = s->capture;
    if (!c) return INVALID_VALUE;
    if (c->origin != s) return CAPTURE_UNMATCHED;
    all().captures.erase(c);
    for (Stream *other : all().streams)
        if (other->capture == c) other->capture = nullptr;
    if (c->invalid) return CAPTURE_INVALIDATED;
    return new_graph(c->body, out, all().graphs);
}

API int cuStreamIsCapturing(void *handle, int *status) {
    if (int e = ready()) return e;
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (!s) return INVALID_HANDLE;
    *status = !s->capture ? 0 : s->capture->invalid ? 2 : 1;
    return SUCCESS;
}

API int cuStreamGetCaptureInfo_v3(void *handle, int *status, uint64_t *id, Graph **graph,
                                  const void **nodes, const void **edges, size_t *n_nodes) {
    if (int e = cuStreamIsCapturing(handle, status)) return e;
    Hold hold(all().lock);
    Stream *s = stream_of(handle);
    if (id && s->capture) *id = s->capture->id;
    if (graph) *graph = nullptr;
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (n_nodes) *n_nodes = 0;
    return SUCCESS;
}

API int cuStreamGetCaptureInfo_v2(void *handle, int *status, uint64_t *id, Graph **graph,
                                  const void **nodes, size_t *n_nodes) {
    return cuStreamGetCaptureInfo_v3(handle, status, id, graph, nodes, nullptr, n_nodes);
}

API int cuThreadExchangeStreamCaptureMode(int *mode) {
    static thread_local int held = GLOBAL;
    std::swap(*mode, held);
    return SUCCESS;
}

// ---- Graphs -------------------------------------------------------------------------------------

API int cuGraphCreate(Graph **out, unsigned) {
    Hold hold(all().lock);
    return new_graph(std::make_shared<Body>(), out, all().graphs);
}

API int cuGraphInstantiateWithFlags(Graph **out, Graph *graph, unsigned long long flags) {
    if (int e = ready()) return e;
    const unsigned long long AUTO_FREE = 1, DEVICE_LAUNCH = 4;
    if (flags & AUTO_FREE && flags & DEVICE_LAUNCH) return INVALID_VALUE;
    Hold hold(all().lock);
    if (!is_live(all().graphs, graph, "graph")) return INVALID_HANDLE;
    return new_graph(graph->body, out, all().execs);
}

API int cuGraphInstantiate(Graph **out, Graph *graph, unsigned long long flags) {
    return cuGraphInstantiateWithFlags(out, graph, flags);
}

API int cuGraphInstantiateWithParams(Graph **out, Graph *graph, void *) {
    return cuGraphInstantiateWithFlags(out, graph, 0);
}

API int cuGraphLaunch(Graph *exec, void *stream) {
    std::shared_ptr<Body> body;
    {
        Hold hold(all().lock);
        if (!is_live(all().execs, exec, "instantiated graph")) return INVALID_HANDLE;
        body = exec->body;
    }
    return on_stream(stream, [body] {
        for (auto &node : body->nodes)
            if (int e = node()) return e;
        return (int)SUCCESS;
    });
}

API int cuGraphUpload(Graph *, void *) { return ready(); }

API int cuGraphGetNodes(Graph *graph, void *, size_t *n) {
    Hold hold(all().lock);
    if (!is_live(all().graphs, graph, "graph")) return INVALID_HANDLE;
    *n = graph->body->nodes.size();
    return SUCCESS;
}

API int cuGraphExecDestroy(Graph *exec) { return forget(all().execs, exec, "instantiated graph"); }

API int cuGraphDestroy(Graph *graph) { return forget(all().graphs, graph, "graph"); }
