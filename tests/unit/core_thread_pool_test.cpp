// parallel_for: every task once, exceptions, nesting, concurrent callers, fork.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/thread_pool.hpp"

namespace openmsa::core {
namespace {

TEST(ThreadPool, RunsEveryTaskOnceWithAWorkerInRange) {
  for (const std::int32_t num_threads : {1, 2, 3, 7, 16}) {
    for (const std::int64_t num_tasks : {0, 1, 2, 5, 1000}) {
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(num_tasks));
      std::atomic<int> out_of_range = 0;
      parallel_for(num_threads, num_tasks, [&](std::int64_t task, std::int32_t worker) {
        ++runs[static_cast<std::size_t>(task)];
        if (worker < 0 || worker >= num_threads) ++out_of_range;
      });
      EXPECT_EQ(out_of_range, 0);
      for (const auto& count : runs) ASSERT_EQ(count, 1) << num_threads << " threads, " << num_tasks << " tasks";
    }
  }
}

TEST(ThreadPool, NoTwoTasksShareAWorkerAtOnce) {
  constexpr std::int32_t kThreads = 4;
  std::atomic<int> busy[kThreads] = {};
  std::atomic<int> clashes = 0;
  parallel_for(kThreads, 2000, [&](std::int64_t, std::int32_t worker) {
    if (busy[worker]++ != 0) ++clashes;
    for (int i = 0; i < 50; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
    --busy[worker];
  });
  EXPECT_EQ(clashes, 0);
}

TEST(ThreadPool, OneThreadRunsInOrderOnTheCaller) {
  std::vector<std::int64_t> order;
  const auto caller = std::this_thread::get_id();
  bool elsewhere = false;
  parallel_for(1, 100, [&](std::int64_t task, std::int32_t worker) {
    order.push_back(task);
    elsewhere |= std::this_thread::get_id() != caller || worker != 0;
  });
  std::vector<std::int64_t> expected(100);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(order, expected);
  EXPECT_FALSE(elsewhere);
}

TEST(ThreadPool, UsesMoreThanOneThread) {
  // Two tasks that wait for each other end only if two threads take them.
  std::atomic<int> arrived = 0;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  parallel_for(2, 2, [&](std::int64_t, std::int32_t) {
    ++arrived;
    while (arrived < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  });
  EXPECT_LT(std::chrono::steady_clock::now(), deadline);
}

TEST(ThreadPool, RethrowsTheFirstExceptionAndStaysUsable) {
  for (const std::int32_t num_threads : {1, 2, 5}) {
    std::atomic<std::int64_t> running = 0;
    try {
      parallel_for(num_threads, 100000, [&](std::int64_t task, std::int32_t) {
        ++running;
        if (task == 3) {
          --running;
          throw std::runtime_error("task 3");
        }
        --running;
      });
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(std::string(error.what()), "task 3");
    }
    EXPECT_EQ(running, 0) << "a task was still running when the call returned";
    std::atomic<int> count = 0;
    parallel_for(num_threads, 10, [&](std::int64_t, std::int32_t) { ++count; });
    EXPECT_EQ(count, 10);
  }
}

TEST(ThreadPool, NestedCallsRunSeriallyOnTheirWorker) {
  std::atomic<int> inner = 0, wrong = 0;
  parallel_for(3, 20, [&](std::int64_t, std::int32_t) {
    const auto outer = std::this_thread::get_id();
    std::int64_t next = 0;
    parallel_for(3, 30, [&](std::int64_t task, std::int32_t worker) {
      ++inner;
      if (std::this_thread::get_id() != outer || worker != 0 || task != next++) ++wrong;
    });
  });
  EXPECT_EQ(inner, 600);
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, NestedExceptionsReachTheOuterCaller) {
  EXPECT_THROW(parallel_for(2, 4,
                            [](std::int64_t, std::int32_t) {
                              parallel_for(2, 4, [](std::int64_t task, std::int32_t) {
                                if (task == 1) throw std::logic_error("inner");
                              });
                            }),
               std::logic_error);
}

TEST(ThreadPool, ConcurrentCallersDoNotMix) {
  std::vector<std::thread> callers;
  std::atomic<int> wrong = 0;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&wrong, c] {
      for (int round = 0; round < 50; ++round) {
        const std::int64_t n = 50 + c;
        std::vector<std::atomic<int>> runs(static_cast<std::size_t>(n));
        parallel_for(1 + c % 4, n, [&](std::int64_t task, std::int32_t) { ++runs[static_cast<std::size_t>(task)]; });
        for (const auto& count : runs) wrong += count != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, AForkedChildHasWorkersOfItsOwn) {
  parallel_for(4, 100, [](std::int64_t, std::int32_t) {});  // the parent's workers exist before the fork
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a child that waits for workers it does not have is killed
    std::atomic<int> count = 0;
    parallel_for(4, 100, [&](std::int64_t, std::int32_t) { ++count; });
    _exit(count == 100 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

TEST(ThreadPool, CountsAtLeastOneProcessor) { EXPECT_GE(hardware_threads(), 1); }

}  // namespace
}  // namespace openmsa::core
