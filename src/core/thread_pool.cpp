#include "core/thread_pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define OPENMSA_HAVE_FORK 1
#endif

namespace openmsa::core {
namespace {

// How long a worker without work, or a caller whose last tasks run elsewhere, polls before it sleeps. Waking a sleeping thread
// costs 5 to 50 us, about as much as a decode step's smallest stage; stages of one step follow each other within this time.
constexpr std::chrono::microseconds kSpinTime{50};

thread_local bool inside_body = false;

struct InsideBody {
  const bool before = inside_body;
  InsideBody() { inside_body = true; }
  ~InsideBody() { inside_body = before; }
};

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// Polls `done` for kSpinTime; true if it came true.
template <typename Condition>
bool spin_until(const Condition& done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// One parallel_for call. It lives on the caller's stack: nobody touches it after num_running fell to zero.
struct Job {
  TaskBody body;
  std::int64_t num_tasks;
  std::int32_t max_workers;
  std::atomic<std::int64_t> next_task{0};
  std::atomic<std::int32_t> num_running{0};  // pool workers inside; changed under the pool's mutex
  std::int32_t num_joined = 1;               // the caller is worker 0; under the pool's mutex
  std::exception_ptr error{};                // the first one; under the pool's mutex

  bool open() const { return num_joined < max_workers && next_task.load(std::memory_order_relaxed) < num_tasks; }

  void work(std::int32_t worker, std::mutex& mutex) {
    const InsideBody inside;
    try {
      for (std::int64_t task; (task = next_task.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) body(task, worker);
    } catch (...) {
      next_task.store(num_tasks, std::memory_order_relaxed);  // starts no further task
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  }
};

class Pool {
 public:
  void run(Job& job) {
    {
      const std::lock_guard lock(mutex_);
      grow(job.max_workers - 1);
      jobs_.push_back(&job);
      epoch_.fetch_add(1, std::memory_order_release);
      for (std::int32_t i = std::min(num_sleeping_, job.max_workers - 1); i > 0; --i) work_cv_.notify_one();
    }
    job.work(0, mutex_);
    std::unique_lock lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));  // nobody joins from here on
    const auto done = [&job] { return job.num_running.load(std::memory_order_acquire) == 0; };
    if (!done()) {
      lock.unlock();
      const bool finished = spin_until(done);
      lock.lock();
      if (!finished) done_cv_.wait(lock, done);
    }
  }

 private:
  // Workers are started on demand and kept. If the system refuses a thread, the job runs on those there are.
  void grow(std::int32_t num_workers) {
    try {
      for (; num_workers_ < num_workers; ++num_workers_) std::thread([this] { worker_loop(); }).detach();
    } catch (const std::system_error&) {
    }
  }

  Job* find_open_job() {
    for (Job* job : jobs_) {
      if (job->open()) return job;
    }
    return nullptr;
  }

  void worker_loop() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (Job* job = find_open_job()) {
        const std::int32_t worker = job->num_joined++;
        job->num_running.fetch_add(1, std::memory_order_relaxed);
        lock.unlock();
        job->work(worker, mutex_);
        lock.lock();
        // Under the mutex, so that a caller about to wait on done_cv_ cannot miss it.
        if (job->num_running.fetch_sub(1, std::memory_order_release) == 1) done_cv_.notify_all();
        continue;
      }
      const std::uint64_t seen = epoch_.load(std::memory_order_relaxed);
      lock.unlock();
      const bool news = spin_until([&] { return epoch_.load(std::memory_order_acquire) != seen; });
      lock.lock();
      if (!news && epoch_.load(std::memory_order_relaxed) == seen) {
        ++num_sleeping_;
        work_cv_.wait(lock);
        --num_sleeping_;
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable work_cv_, done_cv_;
  std::vector<Job*> jobs_;               // running calls, oldest first
  std::atomic<std::uint64_t> epoch_{0};  // counts jobs ever added
  std::int32_t num_workers_ = 0;
  std::int32_t num_sleeping_ = 0;
};

// The pool is never destroyed: its workers may outlive static destructors. A forked child has none of the parent's threads and may
// find the pool's mutex locked for ever, so it forgets the pool and makes its own.
std::atomic<Pool*> current_pool{nullptr};

Pool& pool() {
  Pool* found = current_pool.load(std::memory_order_acquire);
  if (found) return *found;
#ifdef OPENMSA_HAVE_FORK
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr, std::memory_order_relaxed); });
  static_cast<void>(registered);
#endif
  Pool* fresh = new Pool;
  if (current_pool.compare_exchange_strong(found, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;  // another thread was first; ours has started no worker yet
  return *found;
}

}  // namespace

std::int32_t hardware_threads() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void parallel_for(std::int32_t num_threads, std::int64_t num_tasks, TaskBody body) {
  const auto max_workers = static_cast<std::int32_t>(std::min<std::int64_t>(num_threads, num_tasks));
  if (max_workers <= 1 || inside_body) {
    const InsideBody inside;
    for (std::int64_t task = 0; task < num_tasks; ++task) body(task, 0);
    return;
  }
  Pool& p = pool();
  Job job{.body = body, .num_tasks = num_tasks, .max_workers = max_workers};
  p.run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace openmsa::core
