// sparse_attention for groups of 9 to 16 heads: blocks that neighbouring tokens share go to the tile kernel, the others to the attend
// kernel, and the results of both are merged.
#include <gtest/gtest.h>

#include <algorithm>

#include "calls.hpp"
#include "orders.hpp"
#include "support/cases.hpp"
#include "support/compare.hpp"
#include "tiles.hpp"

namespace openmsa::test {
namespace {

using emulation::tile_counts;

class EmulatedUnion : public emulation::InOrders {
 protected:
  void SetUp() override {
    InOrders::SetUp();
    tile_counts = {};
  }
};
OPENMSA_IN_ORDERS(EmulatedUnion);

constexpr int kTileTokens = cuda::kUnionTokens;

// Lists of which each differs from its neighbour's in at most `most_changes` blocks; one in eleven is empty, another cut short.
Tensor drifting_block_ids(const Problem& problem, Rng& rng, std::int64_t most_changes) {
  const std::int64_t top_k = problem.config.top_k, hkv = problem.config.num_kv_heads;
  Tensor block_ids(DType::kI32, {problem.total_q, hkv, top_k}, problem.layout.strided ? 16 : 0);
  for (std::int64_t g = 0; g < hkv; ++g) {
    std::vector<double> blocks;
    std::int32_t seq = -1;
    for (std::int64_t t = 0; t < problem.total_q; ++t) {
      const Problem::Query query = problem.query(t);
      if (query.seq != seq) blocks.clear();
      seq = query.seq;
      for (std::int64_t n = uniform(rng, 0, most_changes); n > 0 && !blocks.empty(); --n) {
        blocks.erase(blocks.begin() + uniform(rng, 0, std::ssize(blocks) - 1));
      }
      while (std::ssize(blocks) < std::min(top_k, query.num_visible_blocks)) {
        const auto block = static_cast<double>(uniform(rng, 0, query.num_visible_blocks - 1));
        if (std::ranges::find(blocks, block) == blocks.end()) blocks.push_back(block);
      }
      std::vector<double> row = blocks;
      if (t % 11 == 2) row.clear();
      if (t % 11 == 9) row.resize(static_cast<std::size_t>(uniform(rng, 0, std::ssize(row))));
      std::ranges::sort(row);
      row.resize(static_cast<std::size_t>(top_k), -1.0);
      block_ids.set_row(t * hkv + g, row.data());
    }
  }
  return block_ids;
}

void expect_right(const Problem& problem, const Tensor& block_ids) {
  SCOPED_TRACE(describe(problem));
  EXPECT_TRUE(attention_right(problem, emulated_sparse_attention(problem, block_ids), &block_ids));
}

// Tokens of tiles that reached the tile kernel: served by it alone, together with the attend kernel, and by the other one alone.
void expect_every_kind_of_token() {
  EXPECT_GT(tile_counts.alone, 0);
  EXPECT_GT(tile_counts.partly, 0);
  EXPECT_GT(tile_counts.unserved, 0);
}

TEST_P(EmulatedUnion, EveryShape) {
  Rng rng(1);
  const auto expect_shape_right = [&](std::int32_t group_size, std::int32_t dim, std::int32_t block_size, DType dtype) {
    const Problem problem(make_config(2, group_size, dim, 64, block_size, 5), single(28, 7 * block_size), dtype, rng);
    const int before = tile_counts.tiles;
    expect_right(problem, drifting_block_ids(problem, rng, 1));
    EXPECT_GT(tile_counts.tiles, before);
  };
  expect_shape_right(9, 64, 128, DType::kBF16);
  expect_shape_right(12, 64, 64, DType::kF16);
  expect_shape_right(16, 96, 64, DType::kBF16);
  expect_shape_right(9, 96, 128, DType::kF16);
  expect_shape_right(16, 128, 128, DType::kBF16);
  expect_shape_right(12, 128, 64, DType::kF16);
  expect_every_kind_of_token();
}

TEST_P(EmulatedUnion, ListsThatStayServeTheirTokensByTheUnionAlone) {
  Rng rng(2);
  const Problem problem(make_config(1, 16, 64, 64, 64, 16), single(24, 2000), DType::kBF16, rng);
  expect_right(problem, drifting_block_ids(problem, rng, 0));
  EXPECT_EQ(tile_counts.tiles, 2);
  EXPECT_GE(tile_counts.alone, 16);
}

TEST_P(EmulatedUnion, ListsThatDriftHaveTokensOfEveryKind) {
  Rng rng(3);
  const Problem problem(make_config(1, 16, 64, 64, 64, 16), single(32, 1800), DType::kF16, rng);
  expect_right(problem, drifting_block_ids(problem, rng, 1));
  expect_every_kind_of_token();
}

TEST_P(EmulatedUnion, ListsThatShareNothingGoElsewhere) {
  Rng rng(4);
  const Problem problem(make_config(1, 16, 64, 64, 64, 4), single(24, 6000), DType::kBF16, rng);
  expect_right(problem, random_block_ids(problem, rng));
  EXPECT_EQ(tile_counts.tiles, 0);
}

// Of 40 blocks every token chose 30 to 32, each block many tokens: none is left out because few chose it.
TEST_P(EmulatedUnion, BlocksThatDoNotFitATileGoElsewhere) {
  Rng rng(5);
  const Problem problem(make_config(1, 16, 64, 64, 64, 32), single(24, 40 * 64), DType::kBF16, rng);
  Tensor block_ids(DType::kI32, {24, 1, 32});
  for (std::int64_t t = 0; t < 24; ++t) {
    std::vector<double> row;
    for (std::int64_t b = 0; b < 40; ++b) {
      if ((b + 3 * t) % 5 != 0) row.push_back(static_cast<double>(b));  // 32 of them
    }
    if (t % 4 == 1) row.erase(row.begin() + 7, row.begin() + 9);
    row.resize(32, -1.0);
    block_ids.set_row(t, row.data());
  }
  expect_right(problem, block_ids);
  EXPECT_EQ(tile_counts.tiles, 2);
  EXPECT_EQ(tile_counts.full, 2);
  EXPECT_EQ(tile_counts.partly, 24);
}

// Token t shares six blocks with the others of its tile and has t % 8 of its own: 1 to 8 results to merge, in up to 13 slots.
TEST_P(EmulatedUnion, AnyNumberOfResultsOfATokenIsMerged) {
  Rng rng(15);
  for (const std::int32_t group_size : {9, 16}) {
    const Problem problem(make_config(1, group_size, 64, 64, 64, 16), single(kTileTokens, 40 * 64), DType::kBF16, rng);
    Tensor block_ids(DType::kI32, {kTileTokens, 1, 16});
    double next = 6.0;
    for (std::int64_t t = 0; t < kTileTokens; ++t) {
      std::vector<double> row{0, 1, 2, 3, 4, 5};
      for (std::int64_t own = 0; own < t % 8; ++own) row.push_back(next++);
      row.resize(16, -1.0);
      block_ids.set_row(t, row.data());
    }
    expect_right(problem, block_ids);
  }
  EXPECT_EQ(tile_counts.alone, 2 * 2);
  EXPECT_EQ(tile_counts.partly, 2 * (kTileTokens - 2));
}

// A warpgroup has four tokens of a tile. Here each has blocks that the others pass over, one after the other or in runs, beside two
// that all share, the last of them at the end of the sequence; one CTA goes through several tiles.
std::vector<double> blocks_of_warpgroup(int side, bool in_runs) {
  std::vector<double> row;
  for (int i = 0; i < 10; ++i) row.push_back(in_runs ? 10 * side + i : 3 * i + side);
  row.insert(row.end(), {31.0, 33.0});
  row.resize(16, -1.0);
  return row;
}

TEST_P(EmulatedUnion, WarpgroupsPassOverBlocksOfOthers) {
  Rng rng(16);
  emulation::options().num_multiprocessors = 1;
  for (const std::int32_t dim : {64, 128}) {
    const Problem problem(make_config(1, 16, dim, 64, 64, 16), single(3 * kTileTokens, 33 * 64 + 50), DType::kBF16, rng);
    Tensor block_ids(DType::kI32, {problem.total_q, 1, 16});
    for (std::int64_t t = 0; t < problem.total_q; ++t) {
      const int side = static_cast<int>(t % kTileTokens) / cuda::kUnionSideTokens;
      block_ids.set_row(t, blocks_of_warpgroup(side, t / kTileTokens == 1).data());
    }
    expect_right(problem, block_ids);
  }
  EXPECT_EQ(tile_counts.alone, 2 * 3 * kTileTokens);
  EXPECT_EQ(tile_counts.passed, 2 * 3 * 60);
  EXPECT_EQ(tile_counts.steps, 2 * 3 * 36);
}

TEST_P(EmulatedUnion, Layouts) {
  Rng rng(6);
  Layout layout;
  layout.seqlens_q = {5, 0, 17, 1, 20, 2};
  layout.seqlens_k = {650, 50, 17, 257, 500, 0};
  const MsaConfig config = make_config(2, 16, 64, 64, 64, 6);
  const auto expect_lists_right = [&](DType dtype) {
    const Problem problem(config, layout, dtype, rng);
    const int before = tile_counts.tiles;
    expect_right(problem, drifting_block_ids(problem, rng, 1));
    EXPECT_GT(tile_counts.tiles, before);
  };
  expect_lists_right(DType::kBF16);
  layout.q_start = {-2, 0, 0, 300, 5, 0};
  layout.strided = true;
  expect_lists_right(DType::kF16);
  layout.q_start = {};
  layout.paged = true;
  expect_lists_right(DType::kBF16);
  expect_every_kind_of_token();
}

TEST_P(EmulatedUnion, BlocksThatNobodyChoseDoNotMatter) {
  Rng rng(7);
  Problem problem(make_config(2, 12, 64, 64, 64, 6), single(40, 1500), DType::kBF16, rng);
  const Tensor block_ids = drifting_block_ids(problem, rng, 1);
  poison_unselected(problem, block_ids);
  expect_right(problem, block_ids);
  expect_every_kind_of_token();
}

// NaN and infinities in a block reach the tokens that chose it, and no others of their tile.
TEST_P(EmulatedUnion, SpecialsReachOnlyTheTokensThatChoseThem) {
  Rng rng(8);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Problem problem(make_config(1, 16, 64, 64, 64, 6), single(28, 500), dtype, rng);
    const Tensor block_ids = drifting_block_ids(problem, rng, 1);
    inject_specials(problem, rng);
    expect_right(problem, block_ids);
  }
  expect_every_kind_of_token();
}

// Rows all of whose scores are -inf, here, in the attend kernel's part, or in both.
TEST_P(EmulatedUnion, RowsAndBlocksOfNothingButMinusInfinity) {
  Rng rng(18);
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Problem problem(make_config(1, 12, 64, 64, 64, 3), single(36, 500), dtype, rng);
    inject_minus_infinities(problem, rng);
    expect_right(problem, drifting_block_ids(problem, rng, 1));
  }
  expect_every_kind_of_token();
}

TEST_P(EmulatedUnion, ListsThatBreakTheRulesAreReported) {
  Rng rng(9);
  const Problem problem(make_config(1, 16, 64, 64, 64, 4), single(20, 900), DType::kBF16, rng);
  const Tensor good = drifting_block_ids(problem, rng, 0);
  for (const std::vector<double>& row : std::vector<std::vector<double>>{{0, 99, -1, -1},
                                                                         {3, 1, 2, 5},
                                                                         {0, 1, 1, 5},
                                                                         {-7, 0, 1, 2},
                                                                         {0, 1, 3, -9},
                                                                         {1e9, -1, -1, -1},
                                                                         {0, -1, 3, 4},
                                                                         {0, -1, -1, 3},
                                                                         {0, -1, 99, -1}}) {
    Tensor broken = good;
    // In all lists of a tile, so that the union would take it.
    for (std::int64_t t = 0; t < kTileTokens; ++t) broken.set_row(t, row.data());
    EXPECT_THROW(emulated_sparse_attention(problem, broken), Error) << testing::PrintToString(row);
  }
  EXPECT_GT(tile_counts.tiles, 0);
}

TEST_P(EmulatedUnion, PagesOutsideThePoolAreReported) {
  Rng rng(10);
  Problem problem(make_config(1, 16, 64, 64, 64, 4), single(16, 256, true), DType::kBF16, rng);
  const Tensor block_ids = drifting_block_ids(problem, rng, 0);
  problem.page_table[0] = 1 << 20;
  EXPECT_THROW(emulated_sparse_attention(problem, block_ids), Error);
  EXPECT_GT(tile_counts.tiles, 0);
}

TEST_P(EmulatedUnion, SequencesThatAreBrokenReachNoTile) {
  Rng rng(11);
  Layout layout;
  layout.seqlens_q = {16, 16, 16};
  layout.seqlens_k = {256, 256, 256};
  Problem problem(make_config(1, 16, 64, 64, 64, 4), layout, DType::kBF16, rng);
  const Tensor block_ids = drifting_block_ids(problem, rng, 0);
  problem.cu_seqlens_k[1] = 600;  // the second one would end before it begins
  EXPECT_THROW(emulated_sparse_attention(problem, block_ids), Error);
  EXPECT_GT(tile_counts.tiles, 0);
}

// Chunks are of 16,384 tokens; nearly all of these see no key, so that they cost little.
TEST(EmulatedUnionChunks, TheSecondChunkIsRoutedToo) {
  tile_counts = {};
  Rng rng(12);
  Layout layout;
  layout.seqlens_q = {16360, 36};
  layout.seqlens_k = {0, 600};
  const Problem problem(make_config(1, 9, 64, 64, 64, 4), layout, DType::kBF16, rng);
  Tensor block_ids(DType::kI32, {problem.total_q, 1, 4});
  for (std::int64_t t = 0; t < problem.total_q; ++t) {
    const double none[] = {-1, -1, -1, -1}, row[] = {0, 1, 2, static_cast<double>(3 + t % 6)};
    block_ids.set_row(t, t < 16360 ? none : row);
  }
  expect_right(problem, block_ids);
  EXPECT_EQ(tile_counts.tiles, 3);
  EXPECT_EQ(tile_counts.partly, 36);
}

// More blocks than fit in shared memory have their tokens counted by another kernel.
TEST(EmulatedUnionBlocks, ListsAmongVeryManyBlocksAreRoutedToo) {
  tile_counts = {};
  Rng rng(13);
  Layout layout;
  layout.seqlens_q.resize(12400);
  layout.seqlens_k.resize(12400);
  layout.seqlens_q[70] = layout.seqlens_q[12390] = 24;
  layout.seqlens_k[70] = layout.seqlens_k[12390] = 500;
  const Problem problem(make_config(2, 16, 64, 64, 64, 6), layout, DType::kBF16, rng);
  expect_right(problem, drifting_block_ids(problem, rng, 1));
  expect_every_kind_of_token();
}

// Which CTA takes a tile, and when, is nothing to the result.
TEST(EmulatedUnionOrder, ResultsRepeatBitwise) {
  tile_counts = {};
  Rng rng(17);
  const Problem problem(make_config(2, 16, 64, 64, 64, 6), single(40, 1500), DType::kBF16, rng);
  const Tensor block_ids = drifting_block_ids(problem, rng, 1);
  const Attention once = emulated_sparse_attention(problem, block_ids);
  for (const int num_multiprocessors : {1, 7}) {
    emulation::options() = {emulation::Timing::kLate, static_cast<std::uint32_t>(num_multiprocessors), num_multiprocessors};
    const Attention again = emulated_sparse_attention(problem, block_ids);
    EXPECT_TRUE(once.out.same_bits(again.out) && once.lse.same_bits(again.lse)) << num_multiprocessors;
  }
  emulation::options() = {};
  expect_every_kind_of_token();
}

// The map of a tile's blocks has 1,024 bits; blocks that share one are told apart all the same.
TEST(EmulatedUnionMap, BlocksThatShareABitAreToldApart) {
  tile_counts = {};
  Rng rng(14);
  const Problem problem(make_config(1, 16, 64, 64, 64, 4), single(kTileTokens, 1030 * 64), DType::kBF16, rng);
  Tensor block_ids(DType::kI32, {kTileTokens, 1, 4});
  for (std::int64_t t = 0; t < kTileTokens; ++t) {
    const double low = t % 2 == 0 ? 2.0 : 3.0;
    const double row[] = {low, 5.0, 1024.0 + low, 1029.0};
    block_ids.set_row(t, row);
  }
  expect_right(problem, block_ids);
  EXPECT_EQ(tile_counts.alone, kTileTokens);
}

}  // namespace
}  // namespace openmsa::test
