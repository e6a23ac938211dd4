// A small thread pool. Own code rather than OpenMP, whose runtime clashes with the copies inside PyTorch and NumPy.
#pragma once

#include <cstdint>

namespace openmsa::core {

// Processors this process may run on (affinity mask), at least 1.
std::int32_t hardware_threads();

// A borrowed void(task, worker) callable. Not std::function, which allocates for a closure of more than two words: a run of the
// engine allocates nothing.
class TaskBody {
 public:
  template <typename Body>
  TaskBody(const Body& body)  // NOLINT(google-explicit-constructor): made where a lambda is passed
      : body_(&body),
        call_([](const void* b, std::int64_t task, std::int32_t worker) { (*static_cast<const Body*>(b))(task, worker); }) {}

  void operator()(std::int64_t task, std::int32_t worker) const { call_(body_, task, worker); }

 private:
  const void* body_;
  void (*call_)(const void*, std::int64_t, std::int32_t);
};

// Runs body(task, worker) for task = 0 .. num_tasks-1 on up to num_threads threads, the caller being one of them; tasks are taken
// in ascending order as workers come free, worker is in [0, num_threads). Returns when all are done. The first exception thrown
// by a body is rethrown here after the running tasks have ended. Calls from inside a body run serially on that worker (0).
// Concurrent calls from different threads are safe. Survives fork(): a child starts its own workers.
void parallel_for(std::int32_t num_threads, std::int64_t num_tasks, TaskBody body);

}  // namespace openmsa::core
