// Runs functions at points in time, on a few worker threads.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <iostream>
#include <mutex>
#include <optional>
#include <queue>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

namespace timing {

using Clock = std::chrono::steady_clock;
using Job = std::function<void()>;

class Scheduler {
public:
    using Id = std::uint64_t;

    explicit Scheduler(unsigned n_workers = std::thread::hardware_concurrency())
    {
        workers_.reserve(std::max(1u, n_workers));
        for (unsigned i = 0; i < std::max(1u, n_workers); ++i) {
            workers_.emplace_back([this] { work(); });
        }
    }

    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    ~Scheduler()
    {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (auto& worker : workers_) {
            worker.join();
        }
    }

    Id at(Clock::time_point when, Job job)
    {
        return add({when, 0, std::nullopt, std::move(job)});
    }

    Id after(Clock::duration delay, Job job)
    {
        return at(Clock::now() + delay, std::move(job));
    }

    Id every(Clock::duration period, Job job)
    {
        return add({Clock::now() + period, 0, period, std::move(job)});
    }

    // Whether the job was still to come. A job that runs right now is not interrupted.
    bool cancel(Id id)
    {
        std::lock_guard lock(mutex_);
        if (pending_.erase(id) == 0) {
            return false;
        }
        wake_.notify_one();
        return true;
    }

    std::size_t pending() const
    {
        std::lock_guard lock(mutex_);
        return pending_.size();
    }

private:
    struct Entry {
        Clock::time_point when;
        Id id;
        std::optional<Clock::duration> period;
        Job job;

        // The earliest entry is the largest, as std::priority_queue wants it.
        bool operator<(const Entry& other) const
        {
            return when != other.when ? when > other.when : id > other.id;
        }
    };

    Id add(Entry entry)
    {
        std::lock_guard lock(mutex_);
        entry.id = ++last_id_;
        pending_.insert(entry.id);
        queue_.push(std::move(entry));
        wake_.notify_one();
        return last_id_;
    }

    void work()
    {
        std::unique_lock lock(mutex_);
        while (!stopping_) {
            if (queue_.empty()) {
                wake_.wait(lock);
                continue;
            }
            const auto when = queue_.top().when;
            if (Clock::now() < when) {
                wake_.wait_until(lock, when);
                continue;
            }
            Entry entry = queue_.top();
            queue_.pop();
            if (!pending_.contains(entry.id)) {
                continue;
            }
            if (!entry.period) {
                pending_.erase(entry.id);
            }
            lock.unlock();
            try {
                entry.job();
            } catch (const std::exception& error) {
                ++failures_;
                std::cerr << "job " << entry.id << " failed: " << error.what() << '\n';
            }
            lock.lock();
            if (entry.period && pending_.contains(entry.id)) {
                entry.when += *entry.period;
                queue_.push(std::move(entry));
                wake_.notify_one();
            }
        }
    }

    mutable std::mutex mutex_;
    std::condition_variable wake_;
    std::priority_queue<Entry> queue_;
    std::unordered_set<Id> pending_;
    std::vector<std::thread> workers_;
    std::atomic<std::size_t> failures_{0};
    Id last_id_ = 0;
    bool stopping_ = false;
};

} // namespace timing

int main()
{
    using namespace std::chrono_literals;

    timing::Scheduler scheduler(2);
    std::atomic<int> ticks{0};
    const auto ticker = scheduler.every(20ms, [&] { ++ticks; });
    scheduler.after(50ms, [] { std::cout << "once\n"; });
    std::this_thread::sleep_for(130ms);
    scheduler.cancel(ticker);
    std::cout << ticks << " ticks, " << scheduler.pending() << " left\n";
}
