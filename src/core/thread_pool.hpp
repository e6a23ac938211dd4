// A small thread pool. Own code rather than OpenMP, whose runtime clashes with the copies inside PyTorch and NumPy.
#pragma once

#include <cstdint>
#include <functional>

namespace openmsa::core {

// Processors this process may run on (affinity mask), at least 1.
std::int32_t hardware_threads();

// Runs body(task, worker) for task = 0 .. num_tasks-1 on up to num_threads threads, the caller being one of them; tasks are taken
// in ascending order as workers come free, worker is in [0, num_threads). Returns when all are done. The first exception thrown
// by a body is rethrown here after the running tasks have ended. Calls from inside a body run serially on that worker (0).
// Concurrent calls from different threads are safe. Survives fork(): a child starts its own workers.
void parallel_for(std::int32_t num_threads, std::int64_t num_tasks,
                  const std::function<void(std::int64_t task, std::int32_t worker)>& body);

}  // namespace openmsa::core
