// libnccl of the software device: messages between processes over sockets of the file system.
// Only what Elapid calls: an id, communicators, groups of sends and receives. Memory of the device
// is memory of the process, and work is done inside of the call that asks for it.
//
// ELAPID_EMULATOR_NCCL=refuse: communicators of several ranks are refused, as NVIDIA's library
// refuses ranks that share a GPU.

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <poll.h>
#include <string>
#include <sys/socket.h>
#include <sys/un.h>
#include <thread>
#include <unistd.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum { success = 0, system_error = 2, invalid_argument = 4, invalid_usage = 5 };

struct Id {
    char internal[128];
};

struct Comm {
    int rank, n_ranks;
    std::vector<int> sockets; // by rank; -1 for oneself
};

struct Message {
    char *at;
    size_t n_bytes;
    int peer;
    Comm *comm;
};

thread_local int depth = 0;
thread_local std::vector<Message> sends, receives;

sockaddr_un address(const Id &id, int rank) {
    sockaddr_un out{};
    out.sun_family = AF_UNIX;
    snprintf(out.sun_path, sizeof out.sun_path, "%.80s-%d", id.internal, rank);
    return out;
}

size_t size_of(int type) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < 12 ? sizes[type] : 0;
}

bool transfer(int socket, char *at, size_t n, bool is_send) {
    while (n > 0) {
        ssize_t done = is_send ? send(socket, at, n, MSG_NOSIGNAL) : recv(socket, at, n, 0);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return false;
        at += done, n -= done;
    }
    return true;
}

// Each direction of each connection has its messages in order; a thread sends while this receives.
int run() {
    bool sent = true, received = true;
    std::vector<Message> out = std::move(sends), in = std::move(receives);
    sends.clear(), receives.clear();
    std::vector<std::thread> senders;
    std::vector<char> is_fine(64, 1);
    for (int peer = 0; peer < 64; peer++) {
        std::vector<Message> list;
        for (auto &m : out)
            if (m.peer == peer) list.push_back(m);
        if (list.empty()) continue;
        senders.emplace_back([list, peer, &is_fine] {
            for (auto &m : list)
                is_fine[peer] &= transfer(m.comm->sockets[peer], m.at, m.n_bytes, true);
        });
    }
    for (auto &m : in) received &= transfer(m.comm->sockets[m.peer], m.at, m.n_bytes, false);
    for (auto &thread : senders) thread.join();
    for (char fine : is_fine) sent &= fine;
    return sent && received ? success : system_error;
}

int add(std::vector<Message> &list, void *at, size_t n, int type, int peer, Comm *comm) {
    if (!comm || peer < 0 || peer >= comm->n_ranks || peer == comm->rank || !size_of(type))
        return invalid_argument;
    list.push_back({static_cast<char *>(at), n * size_of(type), peer, comm});
    return depth ? success : run();
}

} // namespace

API int ncclGetVersion(int *version) {
    *version = 22809;
    return success;
}

API int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    const char *dir = getenv("TMPDIR");
    char name[128];
    snprintf(name, sizeof name, "%.60s/elapid-nccl-XXXXXX", dir ? dir : "/tmp");
    int file = mkstemp(name);
    if (file < 0) return system_error;
    close(file);
    unlink(name);
    memcpy(id->internal, name, strlen(name));
    return success;
}

API int ncclCommInitRank(Comm **out, int n_ranks, Id id, int rank) {
    const char *wish = getenv("ELAPID_EMULATOR_NCCL");
    if (wish && !strcmp(wish, "refuse") && n_ranks > 1) return invalid_usage;
    if (n_ranks > 64) return invalid_argument;
    auto *comm = new Comm{rank, n_ranks, std::vector<int>(n_ranks, -1)};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    auto own = address(id, rank);
    unlink(own.sun_path);
    if (bind(listener, reinterpret_cast<sockaddr *>(&own), sizeof own) || listen(listener, 64))
        return system_error;
    for (int peer = 0; peer < rank; peer++) {
        auto at = address(id, peer);
        int line = -1;
        for (int n = 0; n < 6000; n++) { // a minute
            line = socket(AF_UNIX, SOCK_STREAM, 0);
            if (!connect(line, reinterpret_cast<sockaddr *>(&at), sizeof at)) break;
            close(line), line = -1;
            usleep(10000);
        }
        if (line < 0 || !transfer(line, reinterpret_cast<char *>(&rank), sizeof rank, true))
            return system_error;
        comm->sockets[peer] = line;
    }
    for (int n = rank + 1; n < n_ranks; n++) {
        pollfd waiting{listener, POLLIN, 0};
        if (poll(&waiting, 1, 60000) != 1) return system_error;
        int line = accept(listener, nullptr, nullptr), peer = -1;
        if (!transfer(line, reinterpret_cast<char *>(&peer), sizeof peer, false))
            return system_error;
        if (peer <= rank || peer >= n_ranks) return invalid_argument;
        comm->sockets[peer] = line;
    }
    close(listener);
    unlink(own.sun_path);
    *out = comm;
    return success;
}

API int ncclCommAbort(Comm *comm) {
    for (int line : comm->sockets)
        if (line >= 0) close(line);
    delete comm;
    return success;
}

API int ncclCommDestroy(Comm *comm) { return ncclCommAbort(comm); }

API int ncclGroupStart() {
    depth++;
    return success;
}

API int ncclGroupEnd() {
    if (depth == 0) return invalid_usage;
    return --depth ? success : run();
}

API int ncclSend(const void *at, size_t n, int type, int peer, Comm *comm, void *) {
    return add(sends, const_cast<void *>(at), n, type, peer, comm);
}

API int ncclRecv(void *at, size_t n, int type, int peer, Comm *comm, void *) {
    return add(receives, at, n, type, peer, comm);
}
