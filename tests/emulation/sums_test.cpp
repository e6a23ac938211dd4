// Row statistics and the sums of partials, against plain loops that add in the promised order: equal bit for bit.
#include "cuda/sums.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "calls.hpp"
#include "engine.hpp"
#include "support/cases.hpp"

namespace openmsa::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

class SumsTest : public testing::TestWithParam<DType> {
 protected:
  void TearDown() override { emulation::options() = {}; }
};
INSTANTIATE_TEST_SUITE_P(Storage, SumsTest, testing::Values(DType::kBF16, DType::kF16), dtype_param_name);

Tensor random_tensor(DType dtype, std::vector<std::int64_t> shape, Rng& rng, std::int64_t padding = 0) {
  std::normal_distribution<double> normal;
  Tensor tensor(dtype, std::move(shape), padding);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, normal(rng));
  return tensor;
}

std::vector<float> random_floats(std::int64_t count, Rng& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& x : values) x = normal(rng);
  return values;
}

TEST_P(SumsTest, RowsOfTheBackwardPass) {
  Rng rng(1);
  for (const std::int32_t dim : {64, 96, 128}) {
    for (const std::int32_t group_size : {1, 3, 8, 16}) {
      SCOPED_TRACE("D " + std::to_string(dim) + " G " + std::to_string(group_size));
      const std::int32_t groups = 2, tokens = 21, begin = 4, chunk = 13;
      const int log_group = group_size == 1 ? 0 : group_size == 3 ? 2 : group_size == 8 ? 3 : 4, heads = 1 << log_group;
      Tensor out = random_tensor(GetParam(), {tokens, groups * group_size, dim}, rng, 8);
      Tensor d_out = random_tensor(GetParam(), {tokens, groups * group_size, dim}, rng, 24);
      Tensor lse = random_tensor(DType::kF32, {tokens, groups * group_size}, rng, 3);
      // A row without keys: whatever lies in out and d_out, it has no delta.
      lse.set(lse.at(begin + 2, 0), -INFINITY);
      d_out.set(d_out.at(begin + 2, 0, 5), kNaN);
      for (const bool with_delta : {true, false}) {
        std::vector<float> rows(static_cast<std::size_t>(cuda::num_row_values(chunk, groups, log_group)), kNaN);
        cuda::launch_backward_rows(
            {static_cast<const float*>(lse.view().data), lse.view().stride[0], with_delta ? out.view().data : nullptr,
             with_delta ? d_out.view().data : nullptr, out.view().stride[0], out.view().stride[1], d_out.view().stride[0],
             d_out.view().stride[1], rows.data(), begin, chunk, groups, group_size, log_group},
            GetParam(), dim, nullptr);
        for (std::int32_t t = 0; t <= chunk; ++t) {
          for (std::int32_t g = 0; g < groups; ++g) {
            for (std::int32_t h = 0; h < heads; ++h) {
              const auto* row = rows.data() + (((t * groups + g) * 2) << log_group);
              const bool live = t < chunk && h < group_size && !(t == 2 && g == 0 && h == 0);
              double delta = 0.0;
              for (std::int32_t d = 0; live && with_delta && d < dim; ++d) {
                delta += out(begin + t, g * group_size + h, d) * d_out(begin + t, g * group_size + h, d);
              }
              if (live) {
                ASSERT_NEAR(row[h], lse(begin + t, g * group_size + h) * M_LOG2E, 1e-6);
              } else {
                ASSERT_EQ(row[h], INFINITY) << t << " " << g << " " << h;
              }
              ASSERT_NEAR(row[heads + h], delta, 2e-5);
            }
          }
        }
      }
    }
  }
}

// Dead slots hold NaN. `used` of `stored` rows.
void expect_slot_sums(const Problem& problem, const std::vector<std::int32_t>* ranks, std::int32_t slots, std::int32_t dim,
                      std::int32_t used, int log_group, std::int64_t begin, std::int64_t end, DType dtype, Rng& rng) {
  const core::Geometry geo = gpu_geometry(problem);
  const std::int32_t groups = problem.config.num_kv_heads, stored = 1 << log_group;
  const auto chunk = static_cast<std::int32_t>(end - begin);
  Tensor partial = random_tensor(dtype, {chunk * groups, slots, stored, dim}, rng);
  Tensor out(dtype, {geo.total_q, groups * used, dim}, 8);
  const cuda::SlotLists lists{
      cuda::batch_params(geo), ranks != nullptr ? ranks->data() : nullptr, static_cast<std::int32_t>(begin), chunk, groups, slots};
  const auto live = [&](std::int64_t pair, std::int32_t slot) {
    if (ranks != nullptr) return (*ranks)[static_cast<std::size_t>(pair * slots + slot)] >= 0;
    return slot < problem.query(begin + pair / groups).num_visible_blocks;
  };
  for (std::int64_t pair = 0; pair < std::int64_t{chunk} * groups; ++pair) {
    for (std::int32_t slot = 0; slot < slots; ++slot) {
      for (std::int64_t i = 0; !live(pair, slot) && i < stored * dim; ++i) partial.set(partial.at(pair, slot, 0, 0) + i, kNaN);
    }
  }
  const float scale = 0.37f;
  cuda::launch_slot_sum(
      {lists, partial.view().data, out.view().data, out.view().stride[0], out.view().stride[1], used, log_group, scale}, dtype, dim,
      nullptr);
  EXPECT_TRUE(out.guards_intact());
  Tensor expected(dtype, {geo.total_q, groups * used, dim});
  for (std::int64_t pair = 0; pair < std::int64_t{chunk} * groups; ++pair) {
    for (std::int32_t h = 0; h < used; ++h) {
      for (std::int32_t d = 0; d < dim; ++d) {
        float sum = 0.f;
        for (std::int32_t slot = 0; slot < slots; ++slot) {
          if (live(pair, slot)) sum += static_cast<float>(partial(pair, slot, h, d));
        }
        expected.set(expected.at(begin + pair / groups, pair % groups * used + h, d), sum * scale);
      }
    }
  }
  EXPECT_TRUE(out.same_bits(expected)) << "rows outside of the chunk included";
}

TEST_P(SumsTest, SlotsOfSparseLists) {
  Rng rng(2);
  for (const std::int32_t slots : {1, 4, 11, 32}) {
    const std::int32_t dim = slots == 1 ? 64 : slots == 4 ? 96 : 128, used = slots == 11 ? 5 : slots == 4 ? 1 : 2;
    const Problem problem(make_config(2, used, dim, 16, 64, slots), single(30, 300), GetParam(), rng);
    std::vector<std::int32_t> ranks(static_cast<std::size_t>(17 * 2 * slots));
    for (std::int32_t& rank : ranks) rank = static_cast<std::int32_t>(uniform(rng, -1, 1));
    std::fill_n(ranks.begin() + 3 * slots, slots, -1);  // a row without a visit
    expect_slot_sums(problem, &ranks, slots, dim, used, std::bit_width(static_cast<unsigned>(used - 1)), 6, 23, GetParam(), rng);
  }
}

TEST_P(SumsTest, SlotsOfEveryBlock) {
  Rng rng(3);
  Layout layout;
  layout.seqlens_q = {20, 3, 0, 9};
  layout.seqlens_k = {1000, 0, 64, 70};
  layout.q_start = {500, 0, 0, -4};
  const Problem problem(make_config(2, 3, 64, 16, 64, 1), layout, GetParam(), rng);
  expect_slot_sums(problem, nullptr, 16, 64, 3, 2, 0, 32, GetParam(), rng);
  expect_slot_sums(problem, nullptr, 16, 128, 1, 0, 10, 29, GetParam(), rng);
  // No keys at all: no slots.
  const Problem none(make_config(2, 3, 64, 16, 64, 1), single(5, 0), GetParam(), rng);
  expect_slot_sums(none, nullptr, 0, 64, 3, 2, 0, 5, GetParam(), rng);
}

TEST_P(SumsTest, KeysIntoTheResult) {
  Rng rng(4);
  for (const std::int32_t dim : {64, 96, 128}) {
    const std::int32_t keys = 37, groups = 3;
    const std::vector<float> sum = random_floats(std::int64_t{groups} * keys * dim, rng);
    const auto value = [&](std::int32_t g, std::int32_t s, std::int32_t d) { return sum.data()[(g * keys + s) * dim + d]; };
    Tensor each(GetParam(), {keys, groups, dim}, 8), over(GetParam(), {keys, dim}, 16);
    Tensor expected_each(GetParam(), {keys, groups, dim}), expected_over(GetParam(), {keys, dim});
    const float scale = 0.7f;
    cuda::launch_key_sum(
        {sum.data(), each.view().data, each.view().stride[0], each.view().stride[1], groups, keys, dim, false, scale}, GetParam(),
        nullptr);
    cuda::launch_key_sum({sum.data(), over.view().data, over.view().stride[0], 0, groups, keys, dim, true, scale}, GetParam(),
                         nullptr);
    for (std::int32_t s = 0; s < keys; ++s) {
      for (std::int32_t d = 0; d < dim; ++d) {
        float all = 0.f;
        for (std::int32_t g = 0; g < groups; ++g) {
          expected_each.set(expected_each.at(s, g, d), value(g, s, d) * scale);
          all += value(g, s, d);
        }
        expected_over.set(expected_over.at(s, d), all * scale);
      }
    }
    EXPECT_TRUE(each.same_bits(expected_each) && each.guards_intact());
    EXPECT_TRUE(over.same_bits(expected_over) && over.guards_intact());
  }
}

// Items as the inversion cuts them: of some blocks one, of others several; the last block of a sequence is partly filled.
TEST(SumsShareTest, PartialsOfSharedBlocks) {
  Rng rng(5);
  Layout layout;
  layout.seqlens_q = {9, 9};
  layout.seqlens_k = {200, 70};
  const Problem problem(make_config(2, 1, 64, 16, 64, 4), layout, DType::kBF16, rng);
  const core::Geometry geo = gpu_geometry(problem);
  const std::int32_t max_item = 8, keys = 270;
  for (const std::int32_t num_sums : {1, 2}) {
    for (const std::int32_t dim : {64, 128}) {
      std::vector<cuda::AttendItem> items;
      std::int32_t begin = 0;
      for (std::int32_t g = 0; g < 2; ++g) {
        for (std::int32_t seq = 0; seq < 2; ++seq) {
          for (std::int32_t b = 0; b < (seq == 0 ? 4 : 2 - g); ++b) {
            for (std::int32_t left = static_cast<std::int32_t>(uniform(rng, 1, 60)); left > 0; left -= max_item) {
              items.push_back({seq, b, g, begin, std::min(left, max_item)});
              begin += items.back().count;
            }
          }
        }
      }
      // More than one CTA looks at the items, and the last block begins at the border.
      while (items.size() < 255) items.push_back({0, static_cast<std::int32_t>(items.size() % 2), 0, begin++, 1});
      const auto num_shared = 2 * ((begin + max_item - 1) / max_item);
      for (const std::int32_t count : {8, 8, 8, 3}) {
        items.push_back({1, 1, 1, begin, count});
        begin += count;
      }
      const auto num_items = static_cast<std::int32_t>(items.size());
      const std::int64_t block_values = std::int64_t{64} * dim;
      const std::int64_t slots = num_shared + 2 * 4;
      const std::vector<float> shared = random_floats(slots * num_sums * block_values, rng);
      std::vector<float> sums[2] = {random_floats(std::int64_t{2} * keys * dim, rng),
                                    random_floats(std::int64_t{2} * keys * dim, rng)};
      std::vector<float> expected[2] = {sums[0], sums[1]};
      for (std::int32_t i = 0; i < num_items; ++i) {
        if (!cuda::item_shared(items.data(), i, num_items)) continue;
        const cuda::AttendItem& item = items[static_cast<std::size_t>(i)];
        const std::int64_t slot = cuda::shared_slot(item.begin, max_item, !cuda::item_continues(items.data(), i));
        ASSERT_LT(slot, slots);
        for (std::int32_t n = 0; n < num_sums; ++n) {
          for (std::int32_t row = 0; row < 64 && item.block * 64 + row < layout.seqlens_k[static_cast<std::size_t>(item.seq)];
               ++row) {
            for (std::int32_t d = 0; d < dim; ++d) {
              const std::int64_t key =
                  item.group * keys + problem.cu_seqlens_k[static_cast<std::size_t>(item.seq)] + item.block * 64 + row;
              expected[n][static_cast<std::size_t>(key * dim + d)] +=
                  shared[static_cast<std::size_t>((slot * num_sums + n) * block_values + row * dim + d)];
            }
          }
        }
      }
      for (const std::uint32_t seed : {0u, 1u}) {
        emulation::options().seed = seed;
        std::vector<float> result[2] = {sums[0], sums[1]};
        cuda::launch_key_share({cuda::batch_params(geo),
                                items.data(),
                                &num_items,
                                shared.data(),
                                {result[0].data(), result[1].data()},
                                num_sums,
                                max_item,
                                keys,
                                dim},
                               num_items + 300, slots, nullptr);
        for (std::int32_t n = 0; n < 2; ++n) EXPECT_EQ(result[n], expected[n]) << "sum " << n << " of " << num_sums;
      }
      emulation::options() = {};
    }
  }
}

}  // namespace
}  // namespace openmsa::test
