// Cases that the backends' tests share: the storage dtypes as a test parameter, random problems of bounded cost, random lists.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "support/problem.hpp"

namespace openmsa::test {

class PerDType : public testing::TestWithParam<DType> {};

inline std::string dtype_param_name(const testing::TestParamInfo<DType>& info) { return dtype_name(info.param); }

#define OPENMSA_FOR_EACH_STORAGE_DTYPE(suite) \
  INSTANTIATE_TEST_SUITE_P(Storage, suite, testing::Values(DType::kF32, DType::kBF16, DType::kF16), dtype_param_name)

inline constexpr std::int32_t kDims[] = {16, 32, 48, 64, 80, 96, 128, 192, 256};
inline constexpr std::int32_t kGroupSizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 16};
inline constexpr std::int32_t kBlockSizes[] = {16, 32, 48, 64, 128, 256};
inline constexpr std::int32_t kTopKs[] = {1, 4, 8, 16, 32, 64};

// A random config over a random layout, small enough that oracle and plain computation take some tens of milliseconds.
inline Problem random_problem(std::uint64_t seed, DType dtype, Values values = Values::kGaussian) {
  Rng rng(seed);
  const MsaConfig config = random_config(rng);
  const std::int64_t cost_per_pair = std::int64_t{config.num_q_heads} * config.head_dim;
  return Problem(config, random_layout(rng, std::clamp<std::int64_t>(20'000'000 / cost_per_pair, 3000, 40'000)), dtype, rng,
                 values);
}

inline std::string describe(const Problem& problem) {
  return std::string(dtype_name(problem.dtype)) + ", " + text(problem.config) + ", " + problem.layout.text();
}

// Lists that obey the contract and nothing more: any number of any visible blocks, the own block or none at all included.
inline Tensor random_block_ids(const Problem& problem, Rng& rng) {
  const std::int64_t top_k = problem.config.top_k, hkv = problem.config.num_kv_heads;
  Tensor block_ids(DType::kI32, {problem.total_q, hkv, top_k}, problem.layout.strided ? 16 : 0);
  for (std::int64_t t = 0; t < problem.total_q; ++t) {
    for (std::int64_t g = 0; g < hkv; ++g) {
      std::vector<double> row(static_cast<std::size_t>(problem.query(t).num_visible_blocks));
      for (std::size_t b = 0; b < row.size(); ++b) row[b] = static_cast<double>(b);
      std::shuffle(row.begin(), row.end(), rng);
      const std::int64_t most = std::min<std::int64_t>(top_k, static_cast<std::int64_t>(row.size()));
      row.resize(static_cast<std::size_t>(uniform(rng, 0, 4) == 0 ? uniform(rng, 0, most) : most));
      std::sort(row.begin(), row.end());
      row.resize(static_cast<std::size_t>(top_k), -1.0);
      block_ids.set_row(t * hkv + g, row.data());
    }
  }
  return block_ids;
}

}  // namespace openmsa::test
