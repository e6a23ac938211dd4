#include "support.hpp"

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <string>
#include <thread>

#include "cpu/cpu.hpp"

namespace openmsa::bench {
namespace {

std::int32_t threads_flag = static_cast<std::int32_t>(std::max(1u, std::thread::hardware_concurrency()));

std::int64_t product(std::initializer_list<std::int64_t> shape) {
  std::int64_t n = 1;
  for (const std::int64_t size : shape) n *= size;
  return n;
}

Tensor prefix_sums(std::int64_t length) {
  Tensor tensor(DType::kI32, {2});
  tensor.data<std::int32_t>()[0] = 0;
  tensor.data<std::int32_t>()[1] = static_cast<std::int32_t>(length);
  return tensor;
}

}  // namespace

Tensor::Tensor(DType dtype, std::initializer_list<std::int64_t> shape)
    : storage_(static_cast<std::size_t>(product(shape) * dtype_bytes(dtype))), view_(make_view(storage_.data(), dtype, shape)) {}

Tensor random_tensor(DType dtype, std::initializer_list<std::int64_t> shape, std::uint32_t seed) {
  Tensor tensor(dtype, shape);
  std::minstd_rand generator(seed);
  std::normal_distribution<float> normal;
  const std::int64_t count = tensor.view().numel();
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = normal(generator);
    if (dtype == DType::kF32) tensor.data<float>()[i] = value;
    if (dtype == DType::kBF16) tensor.data<BFloat16>()[i] = BFloat16(value);
    if (dtype == DType::kF16) tensor.data<Float16>()[i] = Float16(value);
  }
  return tensor;
}

SingleSequence::SingleSequence(std::int64_t num_queries, std::int64_t num_keys)
    : cu_seqlens_q(prefix_sums(num_queries)), cu_seqlens_k(prefix_sums(num_keys)) {}

Batch SingleSequence::batch() const { return {.cu_seqlens_q = cu_seqlens_q.view(), .cu_seqlens_k = cu_seqlens_k.view()}; }

double visible_pairs(std::int64_t num_queries, std::int64_t num_keys) {
  const double first = static_cast<double>(num_keys - num_queries + 1), last = static_cast<double>(num_keys);
  return (first + last) / 2 * static_cast<double>(num_queries);
}

std::int32_t num_threads() { return threads_flag; }

}  // namespace openmsa::bench

int main(int argc, char** argv) {
  std::string simd = "best";
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--simd=", 0) == 0) {
      simd = arg.substr(7);
    } else if (arg.rfind("--threads=", 0) == 0) {
      openmsa::bench::threads_flag = std::max(1, std::atoi(arg.c_str() + 10));
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  try {
    openmsa::cpu::limit_simd_target(simd);
  } catch (const openmsa::Error& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
  benchmark::AddCustomContext("simd", openmsa::cpu::simd_target());
  benchmark::AddCustomContext("threads", std::to_string(openmsa::bench::num_threads()));
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
