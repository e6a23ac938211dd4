// What the stage benchmarks share: random tensors, batches of one sequence, and the flags --simd and --threads.
#pragma once

#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "openmsa/openmsa.hpp"

namespace openmsa::bench {

// Owned memory of a dense tensor.
class Tensor {
 public:
  Tensor(DType dtype, std::initializer_list<std::int64_t> shape);
  TensorView view() const { return view_; }
  template <typename T>
  T* data() {
    return reinterpret_cast<T*>(storage_.data());
  }

 private:
  std::vector<std::byte> storage_;
  TensorView view_;
};

// Standard normal values, rounded to dtype.
Tensor random_tensor(DType dtype, std::initializer_list<std::int64_t> shape, std::uint32_t seed);

// One sequence whose last num_queries of num_keys tokens are the queries.
struct SingleSequence {
  SingleSequence(std::int64_t num_queries, std::int64_t num_keys);
  Batch batch() const;

  Tensor cu_seqlens_q, cu_seqlens_k;
};

// Pairs (query token, key) that causality allows.
double visible_pairs(std::int64_t num_queries, std::int64_t num_keys);

// Threads asked for by --threads; default: all.
std::int32_t num_threads();

// Runs `call` under the benchmark's loop, and reports GF/s from `flops` per call.
template <typename Call>
void run(benchmark::State& state, double flops, const Call& call) {
  call();  // touches the memory, wakes the threads
  for (auto _ : state) call();
  state.counters["GF/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

}  // namespace openmsa::bench
