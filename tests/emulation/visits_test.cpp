// Who meets which block, against a plain walk over the queries.
#include "cuda/visits.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <tuple>

#include "calls.hpp"
#include "cuda/device.hpp"
#include "engine.hpp"
#include "support/cases.hpp"

namespace openmsa::test {
namespace {

using cuda::AttendItem;
using cuda::VisitLimits;
using cuda::Visits;
using BlockKey = std::tuple<std::int32_t, std::int32_t, std::int32_t>;                    // group, sequence, block
using Visitors = std::map<BlockKey, std::vector<std::pair<std::int64_t, std::int32_t>>>;  // token of the chunk, slot; ascending

class VisitsTest : public testing::Test {
 protected:
  void TearDown() override {
    emulation::options() = {};
    EXPECT_NO_THROW(cuda::throw_device_fault(0)) << "a fault that the test did not expect";
  }
};

// The visits of packed tokens [begin, end), sparse or of every block.
Visitors plain_visits(const Problem& problem, const Tensor* block_ids, std::int64_t begin, std::int64_t end) {
  Visitors visitors;
  for (std::int64_t t = begin; t < end; ++t) {
    const Problem::Query query = problem.query(t);
    for (std::int32_t g = 0; g < problem.config.num_kv_heads; ++g) {
      const auto add = [&](std::int64_t block, std::int64_t slot) {
        visitors[{g, query.seq, static_cast<std::int32_t>(block)}].emplace_back(t - begin, static_cast<std::int32_t>(slot));
      };
      if (block_ids == nullptr) {
        for (std::int64_t b = 0; b < query.num_visible_blocks; ++b) add(b, b);
        continue;
      }
      for (std::int64_t i = 0; i < problem.config.top_k; ++i) {
        const auto id = static_cast<std::int64_t>((*block_ids)(t, g, i));
        if (id >= 0) add(id, i);
      }
    }
  }
  return visitors;
}

// What the items of a chunk say. Checks the rules that hold for any items.
Visitors listed_visits(const Visits& visits, std::int64_t chunk_tokens) {
  Visitors visitors;
  const int num_items = *visits.num_items;
  EXPECT_LE(num_items, visits.max_items);
  std::map<BlockKey, int> pieces;
  for (int i = 0; i < num_items; ++i) ++pieces[{visits.items[i].group, visits.items[i].seq, visits.items[i].block}];
  std::set<std::int32_t> shared_slots;
  for (int i = 0; i < num_items; ++i) {
    const AttendItem& item = visits.items[i];
    const BlockKey key{item.group, item.seq, item.block};
    EXPECT_GE(item.count, 1);
    EXPECT_LE(item.count, visits.max_item);
    const bool continues = cuda::item_continues(visits.items, i);
    EXPECT_EQ(continues, visitors.contains(key)) << "items of a block are neighbours";
    if (continues) {
      EXPECT_EQ(item.begin, visits.items[i - 1].begin + visits.items[i - 1].count);
      EXPECT_EQ(visits.items[i - 1].count, visits.max_item) << "only the last may be short";
    }
    EXPECT_EQ(cuda::item_shared(visits.items, i, num_items), pieces[key] > 1);
    if (pieces[key] > 1) {
      const std::int32_t slot = cuda::shared_slot(item.begin, visits.max_item, !continues);
      EXPECT_GE(slot, 0);
      EXPECT_LT(slot, visits.num_shared);
      EXPECT_TRUE(shared_slots.insert(slot).second) << "two items have partial " << slot;
    }
    for (std::int32_t j = item.begin; j < item.begin + item.count; ++j) {
      const std::int64_t token = visits.entries != nullptr ? visits.entries[j] >> cuda::kSlotBits : static_cast<std::uint32_t>(j);
      EXPECT_LT(token, chunk_tokens);
      const std::uint32_t slot =
          visits.entries != nullptr ? visits.entries[j] % (1u << cuda::kSlotBits) : static_cast<std::uint32_t>(item.block);
      EXPECT_LT(static_cast<std::int32_t>(slot), visits.slots);
      visitors[key].emplace_back(token, static_cast<std::int32_t>(slot));
    }
  }
  for (int i = 0; i < cuda::kVisitCounters; ++i) EXPECT_EQ(visits.next_item[i], 0);
  return visitors;
}

void expect_slots(const cuda::SlotLists& lists, const Visitors& visitors) {
  std::set<std::pair<std::int64_t, std::int32_t>> live;  // pair, slot
  for (const auto& [key, list] : visitors) {
    for (const auto& [token, slot] : list) live.emplace(token * lists.num_groups + std::get<0>(key), slot);
  }
  for (std::int64_t pair = 0; pair < std::int64_t{lists.chunk_tokens} * lists.num_groups; ++pair) {
    const int end = lists.slot_end(pair);
    ASSERT_LE(end, lists.slots);
    for (std::int32_t slot = 0; slot < lists.slots; ++slot) {
      ASSERT_EQ(slot < end && lists.has_visit(pair, slot), live.contains({pair, slot})) << "pair " << pair << " slot " << slot;
    }
  }
}

// Has body(visits) called with visits laid out in scratch of exactly their size. Throws what kernels reported.
template <typename Body>
void with_visits(const core::Geometry& geo, const MsaConfig& config, bool every_block, const VisitLimits& limits,
                 const Body& body) {
  const auto reserve = [&](const core::Context& context) {
    return cuda::reserve_visits(*context.arena, geo, config, every_block, 1, limits);
  };
  run_emulated([&](const core::Context& context) { body(reserve(context)); },
               [&](const core::Context& context) { reserve(context); });
}

TensorView ids_view(const Tensor* block_ids) { return block_ids != nullptr ? block_ids->view() : TensorView{}; }

// With the bounds of lengths that a caller gives who knows them.
core::Geometry exact_geometry(const Problem& problem) {
  core::Geometry geo = gpu_geometry(problem);
  geo.max_seqlen_q = std::ranges::max(problem.layout.seqlens_q);
  geo.max_seqlen_k = std::ranges::max(problem.layout.seqlens_k);
  return geo;
}

// Runs all chunks; returns their number.
int expect_right(const Problem& problem, const Tensor* block_ids, const VisitLimits& limits, bool exact_bounds = true) {
  SCOPED_TRACE(describe(problem) + (block_ids == nullptr ? ", every block" : ", sparse"));
  const core::Geometry geo = exact_bounds ? exact_geometry(problem) : gpu_geometry(problem);
  int num_chunks = 0;
  with_visits(geo, problem.config, block_ids == nullptr, limits, [&](const Visits& visits) {
    EXPECT_LE(visits.chunk, limits.chunk_tokens);
    for (std::int64_t begin = 0; begin < geo.total_q; begin += visits.chunk, ++num_chunks) {
      const std::int64_t end = std::min(begin + visits.chunk, geo.total_q);
      cuda::launch_visits(visits, geo, problem.config, ids_view(block_ids), begin, end, nullptr);
      const Visitors expected = plain_visits(problem, block_ids, begin, end);
      EXPECT_EQ(listed_visits(visits, end - begin), expected) << "tokens from " << begin;
      expect_slots(cuda::slot_lists(visits, geo, problem.config, begin, end), expected);
    }
  });
  return num_chunks;
}

Problem visits_problem(std::uint64_t seed) {
  Rng rng(seed);
  MsaConfig config = make_config(pick<std::int32_t>(rng, {1, 2, 3}), 1, 16, 16, pick<std::int32_t>(rng, {64, 128}),
                                 pick<std::int32_t>(rng, {1, 4, 8, 32}));
  Layout layout = random_layout(rng, 30'000);
  layout.paged = false;
  return {config, layout, DType::kBF16, rng};
}

TEST_F(VisitsTest, RandomLayouts) {
  for (std::uint64_t seed = 900; seed < 924; ++seed) {
    Rng rng(seed);
    const Problem problem = visits_problem(seed);
    const Tensor block_ids = random_block_ids(problem, rng);
    const VisitLimits limits{.chunk_tokens = pick<std::int64_t>(rng, {17, 128, 16384}),
                             .item_tokens = pick<std::int32_t>(rng, {8, 33, 1024})};
    expect_right(problem, &block_ids, limits, seed % 2 == 0);
    expect_right(problem, nullptr, limits, seed % 2 == 0);
  }
}

TEST_F(VisitsTest, PackedDocumentsAndEmptySequences) {
  Rng rng(1);
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = {0, 127, 129, 1, 0, 2, 3, 5, 128, 0};
  const Problem problem(make_config(2, 1, 16, 16, 64, 4), layout, DType::kBF16, rng);
  const Tensor block_ids = random_block_ids(problem, rng);
  for (const std::int64_t chunk : {13, 64, 100, 128, 395}) {
    EXPECT_EQ(expect_right(problem, &block_ids, {.chunk_tokens = chunk, .item_tokens = 48}), (395 + chunk - 1) / chunk);
    expect_right(problem, nullptr, {.chunk_tokens = chunk, .item_tokens = 48});
  }
}

TEST_F(VisitsTest, RowsWithoutKeysAndExplicitStarts) {
  Rng rng(2);
  Layout layout;
  layout.seqlens_q = {5, 3, 0, 2, 200};
  layout.seqlens_k = {300, 0, 20, 70, 129};
  layout.q_start = {-3, 0, 0, 100, -70};
  const Problem problem(make_config(2, 1, 16, 16, 64, 4), layout, DType::kBF16, rng);
  const Tensor block_ids = random_block_ids(problem, rng);
  for (const std::int64_t chunk : {7, 64, 16384}) {
    expect_right(problem, &block_ids, {.chunk_tokens = chunk});
    expect_right(problem, nullptr, {.chunk_tokens = chunk});
  }
}

// Everybody chooses block 0, and there are fewer blocks than k.
TEST_F(VisitsTest, HotBlockOfManyItems) {
  Rng rng(3);
  const Problem problem(make_config(2, 1, 16, 16, 64, 8), single(300, 300), DType::kBF16, rng);
  Tensor block_ids(DType::kI32, {300, 2, 8});
  for (std::int64_t t = 0; t < 300; ++t) {
    for (std::int64_t g = 0; g < 2; ++g) {
      std::vector<double> row(8, -1.0);
      for (std::int64_t b = 0, slot = 0; b <= t / 64; ++b) {
        if (b == 0 || (t + b + g) % 3 != 0) row[static_cast<std::size_t>(slot++)] = static_cast<double>(b);
      }
      block_ids.set_row(t * 2 + g, row.data());
    }
  }
  for (const std::int32_t item : {1, 7, 64, 299, 300}) expect_right(problem, &block_ids, {.item_tokens = item});
}

// A chunk of the most tokens: every bit of the sort is in use.
TEST_F(VisitsTest, FullChunk) {
  Rng rng(4);
  const Problem problem(make_config(1, 1, 16, 16, 128, 2), single(16400, 16400), DType::kBF16, rng);
  Tensor block_ids(DType::kI32, {16400, 1, 2});
  for (std::int64_t t = 0; t < 16400; ++t) {
    const double row[] = {0.0, t >= 128 ? static_cast<double>(uniform(rng, 1, t / 128)) : -1.0};
    block_ids.set_row(t, row);
  }
  EXPECT_EQ(expect_right(problem, &block_ids, {}), 2);
}

TEST_F(VisitsTest, ChunksFollowTheLimits) {
  Rng rng(5);
  const Problem longest(make_config(2, 1, 16, 16, 64, 4), single(700, 700), DType::kBF16, rng);
  const auto chunk = [](const Problem& problem, bool every_block, std::int64_t slot_bytes, const VisitLimits& limits = {}) {
    core::Arena counting;
    return cuda::reserve_visits(counting, exact_geometry(problem), problem.config, every_block, slot_bytes, limits).chunk;
  };
  EXPECT_EQ(chunk(longest, false, 4096), 700);
  EXPECT_EQ(chunk(longest, true, 4096), 700);
  EXPECT_EQ(chunk(longest, false, 4096, {.chunk_tokens = 500}), 500);
  EXPECT_EQ(chunk(longest, true, 4096, {.item_tokens = 300}), 300) << "no two items of every block share one";
  EXPECT_EQ(chunk(longest, false, 4096, {.item_tokens = 300}), 700);
  EXPECT_EQ(chunk(longest, false, std::int64_t{1} << 40), 64) << "never fewer";
  EXPECT_EQ(chunk(longest, true, std::int64_t{1} << 40), 64);
  EXPECT_EQ(chunk(longest, false, 1 << 20, {.slot_bytes_total = std::int64_t{8} * 200 << 20}), 192) << "whole multiples of 64";
  Layout pack;
  pack.seqlens_q = pack.seqlens_k = std::vector<std::int32_t>(7, 100);
  EXPECT_EQ(chunk(Problem(longest.config, pack, DType::kBF16, rng), true, 4096, {.item_tokens = 100}), 700)
      << "short sequences need no short chunks";
  EXPECT_EQ(chunk(Problem(longest.config, single(0, 5), DType::kBF16, rng), true, 4096), 0);
}

// The order of atomics differs from run to run; the lists do not.
TEST_F(VisitsTest, ListsDoNotDependOnTiming) {
  Rng rng(6);
  const Problem problem(make_config(2, 1, 16, 16, 64, 4), single(500, 500), DType::kBF16, rng);
  const Tensor block_ids = random_block_ids(problem, rng);
  for (const std::uint32_t seed : {0u, 1u, 2u, 3u}) {
    emulation::options().seed = seed;
    expect_right(problem, &block_ids, {.item_tokens = 40});
    expect_right(problem, nullptr, {.item_tokens = 40});
  }
}

void expect_fault(const char* argument, const std::function<void()>& run) {
  try {
    run();
    ADD_FAILURE() << "no fault was reported for " << argument;
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), argument) << error.what();
  }
}

TEST_F(VisitsTest, BrokenIdsAreReportedAndSkipped) {
  Rng rng(7);
  const Problem problem(make_config(2, 1, 16, 16, 64, 4), single(100, 300), DType::kBF16, rng);  // positions 200 .. 299
  const core::Geometry geo = gpu_geometry(problem);
  const Tensor good = random_block_ids(problem, rng);
  for (const double bad : {4.0, 1e9, -2.0, -2147483648.0}) {
    Tensor block_ids = good, repaired = good;
    const double row[] = {0.0, 1.0, bad, -1.0}, without[] = {0.0, 1.0, -1.0, -1.0};  // token 30 sees blocks 0 .. 3
    block_ids.set_row(30 * 2 + 1, row);
    repaired.set_row(30 * 2 + 1, without);
    expect_fault("block_ids", [&] {
      with_visits(geo, problem.config, false, {}, [&](const Visits& visits) {
        cuda::launch_visits(visits, geo, problem.config, block_ids.view(), 0, 100, nullptr);
        EXPECT_EQ(listed_visits(visits, 100), plain_visits(problem, &repaired, 0, 100)) << bad;
      });
    });
  }
}

// A list out of order may hold a block twice in slots that pass on their own. Every entry is still one of the block's.
TEST_F(VisitsTest, BlocksListedTwiceLeaveNoHole) {
  Rng rng(8);
  const Problem problem(make_config(1, 1, 16, 16, 64, 4), single(100, 300), DType::kBF16, rng);
  const core::Geometry geo = gpu_geometry(problem);
  Tensor block_ids = random_block_ids(problem, rng);
  const double row[] = {2.0, 0.0, 2.0, -1.0};
  for (std::int64_t t = 0; t < 100; t += 3) block_ids.set_row(t, row);
  expect_fault("block_ids", [&] {
    with_visits(geo, problem.config, false, {}, [&](const Visits& visits) {
      cuda::launch_visits(visits, geo, problem.config, block_ids.view(), 0, 100, nullptr);
      for (const auto& [key, list] : listed_visits(visits, 100)) {
        for (const auto& [token, slot] : list) EXPECT_EQ(block_ids(token, 0, slot), std::get<2>(key));
      }
    });
  });
}

TEST_F(VisitsTest, BrokenSequencesHaveNoVisits) {
  Rng rng(9);
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = {70, 90, 60};
  const Problem problem(make_config(2, 1, 16, 16, 64, 2), layout, DType::kBF16, rng);
  const Tensor lists = random_block_ids(problem, rng);
  core::Geometry geo = gpu_geometry(problem);
  geo.max_seqlen_k = 80;  // the middle one has more
  for (const Tensor* block_ids : {&lists, static_cast<const Tensor*>(nullptr)}) {
    expect_fault("batch.max_seqlen_k", [&] {
      with_visits(geo, problem.config, block_ids == nullptr, {.chunk_tokens = 100}, [&](const Visits& visits) {
        for (std::int64_t begin = 0; begin < geo.total_q; begin += visits.chunk) {
          const std::int64_t end = std::min(begin + visits.chunk, geo.total_q);
          cuda::launch_visits(visits, geo, problem.config, ids_view(block_ids), begin, end, nullptr);
          Visitors expected = plain_visits(problem, block_ids, begin, end);
          std::erase_if(expected, [](const auto& item) { return std::get<1>(item.first) == 1; });
          EXPECT_EQ(listed_visits(visits, end - begin), expected);
          expect_slots(cuda::slot_lists(visits, geo, problem.config, begin, end), expected);
        }
      });
    });
  }
}

// Sequences that overlap by broken offsets would have more blocks and items than there is room for.
TEST_F(VisitsTest, OverlappingSequencesStayInBounds) {
  Rng rng(10);
  const OverlappingSequences broken = overlapping_sequences(16, rng);
  const Problem& problem = broken.problem;
  const Tensor& block_ids = broken.block_ids;
  const core::Geometry geo = gpu_geometry(problem);
  for (const bool every_block : {true, false}) {
    expect_fault("batch.cu_seqlens_k", [&] {
      with_visits(geo, problem.config, every_block, {}, [&](const Visits& visits) {
        cuda::launch_visits(visits, geo, problem.config, every_block ? TensorView{} : block_ids.view(), 0, 800, nullptr);
        EXPECT_EQ(*visits.num_items, every_block ? visits.max_items : 0);
      });
    });
  }
}

}  // namespace
}  // namespace openmsa::test
