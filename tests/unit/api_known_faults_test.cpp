// Faults that other engines running this attention had (public issue trackers, 2026), as small inputs that show each kind, on every
// backend. Numbers missing here belong to the page size (api_batch_test.cpp), the cache and the model (tests/python).
// Expected values are worked out by hand: where K is zero, attention is the plain mean of V over what is seen.
#include <sys/mman.h>

#include <cmath>
#include <limits>

#include "api_calls.hpp"

namespace openmsa::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class KnownFaults : public testing::TestWithParam<Backend> {
 protected:
  RunOptions options() const { return on(GetParam()); }

  // V[j, g, :] = value(j, g) and K = 0 for every live key of the one sequence.
  static void set_values(Problem& problem, const std::function<double(std::int64_t, std::int64_t)>& value, std::int32_t seq = 0) {
    const std::int64_t D = problem.config.head_dim;
    for (std::int64_t j = 0; j < problem.layout.seqlens_k[static_cast<std::size_t>(seq)]; ++j) {
      for (std::int32_t g = 0; g < problem.config.num_kv_heads; ++g) {
        for (std::int64_t d = 0; d < D; ++d) {
          problem.k.set(problem.key_row(seq, j, g) * D + d, 0);
          problem.v.set(problem.key_row(seq, j, g) * D + d, value(j, g));
        }
      }
    }
  }
  static void fill(Tensor& tensor, double value) {
    for (std::int64_t i = 0; i < tensor.numel(); ++i) tensor.set(i, value);
  }
  static Tensor lists(const Problem& problem, const std::vector<std::vector<std::int32_t>>& by_token) {
    const std::int64_t Hkv = problem.config.num_kv_heads, k = problem.config.top_k;
    Tensor block_ids(DType::kI32, {problem.total_q, Hkv, k});
    for (std::int64_t i = 0; i < block_ids.numel(); ++i) {
      const auto& list = by_token.at(static_cast<std::size_t>(i / k));
      const auto slot = static_cast<std::size_t>(i % k);
      block_ids.set(i, slot < list.size() ? list[slot] : -1);
    }
    return block_ids;
  }
  // Prefill and decode, which must agree with what is expected of both.
  std::vector<Attention> attend(const Problem& problem, const Tensor& block_ids) const {
    return {run_sparse_attention(problem, block_ids, options()), run_sparse_decode(problem, block_ids, options())};
  }
};
INSTANTIATE_TEST_SUITE_P(, KnownFaults, testing::Values(Backend::kReference, Backend::kCpu),
                         [](const auto& info) { return backend_name(info.param); });

// 1. T = 4 with Hkv = 4, where no shape check can tell a token-major list from a head-major one; and T = 5.
TEST_P(KnownFaults, ListsAreTokenMajor) {
  for (const std::int32_t T : {4, 5}) {
    Rng rng(1);
    Problem problem(make_config(4, 2, 16, 16, 16, 2), single(T, 512), DType::kF32, rng);
    set_values(problem, [](std::int64_t j, std::int64_t g) { return static_cast<double>(1000 * g + j / 16); });
    std::vector<std::vector<std::int32_t>> by_row;
    for (std::int32_t t = 0; t < T; ++t) {
      for (std::int32_t g = 0; g < 4; ++g) by_row.push_back({4 * t + g, 4 * t + g + 9});
    }
    for (const Attention& result : attend(problem, lists(problem, by_row))) {
      for (std::int64_t t = 0; t < T; ++t) {
        for (std::int64_t h = 0; h < 8; ++h) {
          const std::int64_t g = h / 2;
          EXPECT_NEAR(result.out(t, h, 3), static_cast<double>(1000 * g + 4 * t + g) + 4.5, 2e-3) << t << " " << h;
          EXPECT_NEAR(result.lse(t, h), std::log(32.0), 1e-5);
        }
      }
    }
  }
}

// 2. -1 as a page number: NaN lies in the page that index -1 would hit.
TEST_P(KnownFaults, MinusOneIsNoPage) {
  Rng rng(2);
  Problem problem(make_config(1, 1, 16, 16, 128, 4), single(1, 130, true), DType::kF32, rng);
  set_values(problem, [](std::int64_t j, std::int64_t) { return static_cast<double>(j); });
  const std::int64_t page = 128 * 16;
  Tensor k(DType::kF32, {5, 1, 128, 16}), v(DType::kF32, {5, 1, 128, 16});  // page 0 of these is index -1, all NaN
  for (std::int64_t i = 0; i < 4 * page; ++i) {
    k.set(page + i, i < problem.k.numel() ? problem.k.get(i) : kNaN);
    v.set(page + i, i < problem.v.numel() ? problem.v.get(i) : kNaN);
  }
  Tensor out(DType::kF32, {1, 1, 16}), lse(DType::kF32, {1, 1});
  Tensor block_ids = lists(problem, {{0, 1}});
  SparseAttentionArgs args{problem.config,   problem.batch(), problem.q.view(), k.view(), v.view(),
                           block_ids.view(), out.view(),      lse.view(),       options()};
  for (TensorView* view : {&args.k, &args.v}) {
    view->data = static_cast<float*>(view->data) + page;
    view->shape[0] = 4;
  }
  for (const auto function : {sparse_attention, sparse_decode}) {
    function(args);
    EXPECT_NEAR(out(0, 0, 0), 64.5, 1e-4);  // mean of 0 .. 129
    EXPECT_NEAR(lse(0, 0), std::log(130.0), 1e-5);
  }
  const Tensor bad = lists(problem, {{1, -1, 0, -1}});
  args.block_ids = bad.view();
  expect_invalid([&] { sparse_decode(args); }, "block_ids", {"[0][0][2] is 0", "-1"});
}

// 3 and 8. Padded requests, and rows that pad a batch to a fixed size: 3 real ones of 8.
TEST_P(KnownFaults, PaddedRequestsGiveZeros) {
  Layout layout;
  layout.seqlens_q = {1, 1, 1, 1, 1, 1, 1, 1};
  layout.seqlens_k = {129, 64, 1, 0, 0, 0, 0, 0};
  for (const bool paged : {false, true}) {
    layout.paged = paged;
    Rng rng(3);
    const Problem problem(make_config(2, 2, 16, 16, 16, 4), layout, DType::kF32, rng);
    const Tensor block_ids = run_index_select(problem, options());
    std::vector<Attention> results = attend(problem, block_ids);
    results.push_back(run_dense_attention(problem, options()));
    for (const Attention& result : results) {
      for (std::int64_t t = 0; t < 8; ++t) {
        for (std::int64_t h = 0; h < 4; ++h) {
          const bool is_real = t < 3;
          for (std::int64_t d = 0; d < 16; ++d) {
            const double x = result.out(t, h, d);
            EXPECT_TRUE(is_real ? std::isfinite(x) && x != 0 : x == 0) << x;
          }
          EXPECT_EQ(std::isinf(result.lse(t, h)), !is_real);
          EXPECT_FALSE(result.lse(t, h) == kInf);
        }
      }
    }
  }
}

// 4 and 18. Slots past the end of the last page, and pages nobody selected, hold NaN in K and 1e4 or NaN in V.
TEST_P(KnownFaults, StaleSlotsDoNotLeak) {
  for (const double stale : {1e4, kNaN}) {
    Rng rng(4);
    Problem problem(make_config(1, 2, 16, 16, 128, 4), single(1, 1023, true), DType::kF32, rng);
    // Unwritten slots and spare pages are NaN already; V gets the value asked for.
    for (std::int64_t i = 0; i < problem.v.numel(); ++i) problem.v.set(i, stale);
    set_values(problem, [](std::int64_t j, std::int64_t) { return static_cast<double>(j / 128); });
    const Tensor block_ids = lists(problem, {{0, 2, 5, 7}});
    for (std::int64_t j = 0; j < 1023; ++j) {
      const std::int64_t b = j / 128;
      if (b == 0 || b == 2 || b == 5 || b == 7) continue;
      for (std::int64_t d = 0; d < 16; ++d) {
        problem.k.set(problem.key_row(0, j, 0) * 16 + d, kNaN);
        problem.v.set(problem.key_row(0, j, 0) * 16 + d, stale);
      }
    }
    for (const Attention& result : attend(problem, block_ids)) {
      EXPECT_NEAR(result.out(0, 1, 5), (128.0 * (0 + 2 + 5) + 127.0 * 7) / 511, 1e-4);
      EXPECT_NEAR(result.lse(0, 1), std::log(511.0), 1e-4);
    }
    const Tensor own = run_index_select(problem, options());
    for (std::int64_t slot = 0; slot < 4; ++slot) EXPECT_GE(own(0, 0, slot), 0);
    EXPECT_EQ(own(0, 0, 3), 7);
  }
}

// 5. Strided lists, big[:, ::2], at query counts of 1 and 5.
TEST_P(KnownFaults, StridedListsAreRead) {
  for (const std::int32_t T : {1, 5}) {
    Rng rng(5);
    const Problem problem(make_config(2, 2, 16, 16, 16, 3), single(T, 200), DType::kF32, rng);
    const Tensor block_ids = run_index_select(problem, options());
    Tensor big(DType::kI32, {T, 4, 3});
    fill(big, 1 << 30);
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::int64_t g = 0; g < 2; ++g) {
        for (std::int64_t slot = 0; slot < 3; ++slot) big.set(big.at(t, 2 * g, slot), block_ids(t, g, slot));
      }
    }
    TensorView every_second = big.view();
    every_second.shape[1] = 2;
    every_second.stride[1] *= 2;
    const std::vector<Attention> expected = attend(problem, block_ids);
    int i = 0;
    for (const auto function : {sparse_attention, sparse_decode}) {
      Tensor out(DType::kF32, {T, 4, 16}), lse(DType::kF32, {T, 4});
      function({problem.config, problem.batch(), problem.q.view(), problem.k.view(), problem.v.view(), every_second, out.view(),
                lse.view(), options()});
      EXPECT_TRUE(out.same_bits(expected[static_cast<std::size_t>(i)].out));
      EXPECT_TRUE(lse.same_bits(expected[static_cast<std::size_t>(i)].lse));
      ++i;
    }
    const Tensor fresh(DType::kI32, {T, 4, 3});
    Tensor selected = fresh;
    TensorView out_view = selected.view();
    out_view.shape[1] = 2;
    out_view.stride[1] *= 2;
    index_select({problem.config, problem.batch(), problem.q_idx.view(), problem.k_idx.view(), out_view, options()});
    for (std::int64_t i4 = 0; i4 < T * 4 * 3; ++i4) {
      const std::int64_t t = i4 / 12, row = i4 / 3 % 4, slot = i4 % 3;
      EXPECT_EQ(selected.get(i4), row % 2 == 0 ? block_ids(t, row / 2, slot) : fresh.get(i4));
    }
  }
}

// 7. An unsorted list, of which only the last entry would get the causal mask.
TEST_P(KnownFaults, UnsortedListsAreRefused) {
  Rng rng(7);
  const Problem problem(make_config(1, 1, 16, 16, 128, 4), single(1, 1023), DType::kF32, rng);
  const Tensor block_ids = lists(problem, {{7, 2, 0, 5}});
  Tensor out(DType::kF32, {1, 1, 16});
  const SparseAttentionArgs args{problem.config,   problem.batch(),  problem.q.view(), problem.k.view(),
                                 problem.v.view(), block_ids.view(), out.view(),       {},
                                 options()};
  expect_invalid([&] { sparse_attention(args); }, "block_ids", {"is 2 after 7", "Sort"});
  expect_invalid([&] { sparse_decode(args); }, "block_ids", {"is 2 after 7"});
  EXPECT_TRUE(out.untouched());
}

// 10. 8,192 blocks, the best one is 8,000.
TEST_P(KnownFaults, AllBlocksAreSearched) {
  Rng rng(10);
  Problem problem(make_config(1, 1, 16, 16, 16, 2), single(1, 8192 * 16), DType::kF32, rng);
  fill(problem.q_idx, 1);
  fill(problem.k_idx, 0);
  problem.k_idx.set(problem.k_idx.at(8000 * 16 + 3, 5), 2.5);
  const Tensor scores = run_block_scores(problem, options());
  EXPECT_EQ(scores(0, 0, 8000), 2.5);
  EXPECT_EQ(scores(0, 0, 8191), 0);
  for (const Tensor& block_ids : {run_index_select(problem, options()), run_select_blocks(problem, scores, options())}) {
    EXPECT_EQ(block_ids(0, 0, 0), 8000);
    EXPECT_EQ(block_ids(0, 0, 1), 8191);
  }
}

// 11. Scores as wide as the model's limit: what lies past the live blocks is -inf, and never selected.
TEST_P(KnownFaults, WideScoresBeyondTheLiveBlocksAreEmpty) {
  Rng rng(11);
  const Problem problem(make_config(1, 1, 16, 16, 16, 4), single(3, 40), DType::kF32, rng);
  Tensor scores(DType::kF32, {3, 1, 8192});
  block_scores({problem.config, problem.batch(), problem.q_idx.view(), problem.k_idx.view(), scores.view(), options()});
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t b = 3; b < 8192; ++b) ASSERT_EQ(scores(t, 0, b), -kInf);
  }
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t b = 3; b < 8192; ++b) scores.set(scores.at(t, std::int64_t{0}, b), 1e9);  // a stale buffer
  }
  const Tensor block_ids = run_select_blocks(problem, scores, options());
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t slot = 0; slot < 4; ++slot) EXPECT_EQ(block_ids(t, 0, slot), slot < 3 ? slot : -1);
  }
}

// Address space without memory behind it: only the pages that are touched exist.
class Reservation {
 public:
  explicit Reservation(std::size_t bytes)
      : bytes_(bytes), data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Reservation() {
    if (ok()) munmap(data_, bytes_);
  }
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_;
};

// 12. Page id 131,072 times a page stride of 16,384 elements is 2^31.
TEST_P(KnownFaults, PageOffsetsAre64Bit) {
  constexpr std::int64_t kPage = 131072, kStride = 128 * 128;
  const Reservation k((kPage + 1) * kStride * 2), v((kPage + 1) * kStride * 2), k_idx((kPage + 1) * kStride * 2);
  if (!k.ok() || !v.ok() || !k_idx.ok()) GTEST_SKIP() << "cannot reserve 12 GiB of address space";
  MsaConfig config = make_config(1, 2, 128, 128, 128, 2);
  Rng rng(12);
  const Problem problem(config, single(1, 130), DType::kBF16, rng);
  const std::int32_t cu_seqlens_q[] = {0, 1}, seqlens_k[] = {130}, page_table[] = {1, kPage};
  Batch batch;
  batch.cu_seqlens_q = make_view(cu_seqlens_q, {2});
  batch.seqlens_k = make_view(seqlens_k, {1});
  batch.page_table = make_view(page_table, {1, 2});
  auto* values = static_cast<BFloat16*>(v.data());
  auto* index_keys = static_cast<BFloat16*>(k_idx.data());
  for (std::int64_t i = 0; i < 2 * 128; ++i) {  // the 2 live keys of the far page
    values[kPage * kStride + i] = BFloat16(65.0f);
    index_keys[kPage * kStride + i] = BFloat16(1.0f);
  }
  const auto pool = [](const Reservation& memory) {
    return make_view(static_cast<const BFloat16*>(memory.data()), {kPage + 1, 1, 128, 128});
  };
  const auto index_pool = make_view(static_cast<const BFloat16*>(k_idx.data()), {kPage + 1, 128, 128});
  Tensor q_idx(DType::kBF16, {1, 1, 128}), scores(DType::kF32, {1, 1, 2});
  fill(q_idx, 1);
  block_scores({config, batch, q_idx.view(), index_pool, scores.view(), options()});
  EXPECT_EQ(scores(0, 0, 0), 0);
  EXPECT_EQ(scores(0, 0, 1), 128);
  const Tensor block_ids = lists(problem, {{0, 1}});
  for (const auto function : {sparse_attention, sparse_decode}) {
    Tensor out(DType::kBF16, {1, 2, 128});
    function({config, batch, problem.q.view(), pool(k), pool(v), block_ids.view(), out.view(), {}, options()});
    EXPECT_EQ(out(0, 0, 0), 1);  // 2 keys of 130 hold 65
    EXPECT_EQ(out(0, 1, 127), 1);
  }
  Tensor dense(DType::kBF16, {1, 2, 128});
  dense_attention({config, batch, problem.q.view(), pool(k), pool(v), dense.view(), {}, {}, options()});
  EXPECT_EQ(dense(0, 1, 127), 1);
}

// 12. Scores whose rows lie 2^31 elements apart.
TEST_P(KnownFaults, ScoreOffsetsAre64Bit) {
  constexpr std::int64_t kRow = std::int64_t{1} << 31;
  const Reservation memory(static_cast<std::size_t>(kRow + 4096) * sizeof(float));
  if (!memory.ok()) GTEST_SKIP() << "cannot reserve 8 GiB of address space";
  Rng rng(12);
  const Problem problem(make_config(1, 1, 16, 16, 16, 2), single(2, 100), DType::kF32, rng);
  TensorView far = make_view(static_cast<const float*>(memory.data()), {2, 1, 7});
  far.stride[0] = kRow;
  block_scores({problem.config, problem.batch(), problem.q_idx.view(), problem.k_idx.view(), far, options()});
  const Tensor near = run_block_scores(problem, options());
  for (std::int64_t t = 0; t < 2; ++t) {
    for (std::int64_t b = 0; b < 7; ++b) EXPECT_EQ(static_cast<const float*>(memory.data())[t * kRow + b], near(t, 0, b));
  }
  Tensor block_ids(DType::kI32, {2, 1, 2});
  select_blocks({problem.config, problem.batch(), far, block_ids.view(), options()});
  EXPECT_TRUE(block_ids.same_bits(run_index_select(problem, options())));
}

// 13. The own block read whole: V[6] = 1e4 must not move the output of a query at 5, also behind a cached prefix of 128.
TEST_P(KnownFaults, TheOwnBlockIsMaskedByTokens) {
  for (const std::int32_t prefix : {0, 128}) {
    Rng rng(13);
    Layout layout = single(1, prefix + 8);
    layout.q_start = {prefix + 5};
    Problem problem(make_config(1, 2, 16, 16, 128, 2), layout, DType::kF32, rng);
    set_values(problem, [&](std::int64_t j, std::int64_t) { return j == prefix + 6 ? 1e4 : j == prefix + 7 ? kNaN : 1.0; });
    std::vector<Attention> results = attend(problem, run_index_select(problem, options()));
    results.push_back(run_dense_attention(problem, options()));
    for (const Attention& result : results) {
      EXPECT_NEAR(result.out(0, 1, 9), 1.0, 1e-6);
      EXPECT_NEAR(result.lse(0, 1), std::log(prefix + 6.0), 1e-5);
    }
    // The same for the scores: a future index key must not lift its block.
    fill(problem.q_idx, 1);
    for (std::int64_t j = 0; j < prefix + 8; ++j) {
      for (std::int64_t d = 0; d < 16; ++d) problem.k_idx.set(problem.k_idx.at(j, d), j > prefix + 5 ? 100 : -1);
    }
    const Tensor scores = run_block_scores(problem, options());
    EXPECT_EQ(scores(0, 0, prefix / 128), -16);
  }
}

// 14. Four groups that each strongly prefer another block keep their own lists.
TEST_P(KnownFaults, GroupsSelectForThemselves) {
  Rng rng(14);
  Problem problem(make_config(4, 2, 16, 16, 16, 2), single(1, 160), DType::kF32, rng);
  fill(problem.q_idx, 0);
  fill(problem.k_idx, 0);
  for (std::int64_t g = 0; g < 4; ++g) {
    problem.q_idx.set(problem.q_idx.at(0, g, g), 10);
    problem.k_idx.set(problem.k_idx.at((2 * g + 1) * 16 + 7, g), 10);  // group g's block is 2g + 1
  }
  for (const Tensor& block_ids :
       {run_index_select(problem, options()), run_select_blocks(problem, run_block_scores(problem, options()), options())}) {
    for (std::int64_t g = 0; g < 4; ++g) {
      EXPECT_EQ(block_ids(0, g, 0), 2 * g + 1);
      EXPECT_EQ(block_ids(0, g, 1), 9);
    }
  }
}

// 15. The tail of a key count that is not a multiple of the block.
TEST_P(KnownFaults, TheTailBlockCounts) {
  for (const std::int32_t S : {2049, 2050, 2111, 2175}) {
    for (const bool paged : {false, true}) {
      Rng rng(15);
      Problem problem(make_config(1, 1, 16, 16, 128, 16), single(1, S, paged), DType::kF32, rng);
      set_values(problem, [&](std::int64_t j, std::int64_t) { return j == S - 1 ? 1.0 : 0.0; });
      const Tensor block_ids = run_index_select(problem, options());
      EXPECT_EQ(block_ids(0, 0, 15), 16);
      const double seen = 15 * 128 + S - 2048;
      for (const Attention& result : attend(problem, block_ids)) {
        EXPECT_NEAR(result.out(0, 0, 0), 1 / seen, 1e-7);
        EXPECT_NEAR(result.lse(0, 0), std::log(seen), 1e-5);
      }
      EXPECT_NEAR(run_dense_attention(problem, options()).out(0, 0, 0), 1.0 / S, 1e-7);
    }
  }
}

// 16. Blocks are anchored at each sequence's own first token, whatever lies before it in the pack.
TEST_P(KnownFaults, BlockBordersDoNotShiftWithThePack) {
  const MsaConfig config = make_config(2, 2, 16, 16, 128, 2);
  for (const std::int32_t before : {0, 1, 127, 128, 129}) {
    Layout layout;
    layout.seqlens_q = {before, 40};
    layout.seqlens_k = {before, 600};
    Rng rng(16);
    Problem problem(config, layout, DType::kF32, rng);
    Rng same(61);
    Problem alone(config, single(40, 600), DType::kF32, same);
    const auto copy_tail = [](const Tensor& from, Tensor& to) {
      for (std::int64_t i = 0; i < from.numel(); ++i) to.set(to.numel() - from.numel() + i, from.get(i));
    };
    copy_tail(alone.q, problem.q);
    copy_tail(alone.k, problem.k);
    copy_tail(alone.v, problem.v);
    copy_tail(alone.q_idx, problem.q_idx);
    copy_tail(alone.k_idx, problem.k_idx);
    const Tensor block_ids = run_index_select(problem, options()), expected_ids = run_index_select(alone, options());
    const Attention result = run_sparse_attention(problem, block_ids, options());
    const Attention expected = run_sparse_attention(alone, expected_ids, options());
    for (std::int64_t i = 0; i < expected_ids.numel(); ++i) {
      ASSERT_EQ(block_ids.get(block_ids.numel() - expected_ids.numel() + i), expected_ids.get(i));
    }
    for (std::int64_t i = 0; i < expected.out.numel(); ++i) {
      ASSERT_EQ(result.out.get(result.out.numel() - expected.out.numel() + i), expected.out.get(i))
          << "behind " << before << " tokens";
    }
  }
}

// 25. Four speculative rows in one step, and four single steps: same lists, same outputs.
TEST_P(KnownFaults, SpeculativeRowsEqualSingleSteps) {
  for (const bool paged : {false, true}) {
    Layout layout;
    layout.seqlens_q = {4, 4, 4};
    layout.seqlens_k = {2050, 130, 7};
    layout.paged = paged;
    Rng rng(25);
    const Problem problem(make_config(2, 4, 32, 32, 64, 4), layout, DType::kBF16, rng);
    const Tensor block_ids = run_index_select(problem, options());
    const std::vector<Attention> together = attend(problem, block_ids);
    for (std::int64_t i = 0; i < 4; ++i) {
      const Problem step = problem.query_chunk(i, 1);
      const Tensor step_ids = run_index_select(step, options());
      const std::vector<Attention> alone = attend(step, step_ids);
      for (std::int64_t t = 0; t < step.total_q; ++t) {
        const std::int64_t whole = problem.chunk_token(i, 1, t);
        for (std::int64_t n = 0; n < 2 * 4; ++n) ASSERT_EQ(step_ids.get(t * 8 + n), block_ids.get(whole * 8 + n));
        for (std::size_t kind = 0; kind < 2; ++kind) {
          for (std::int64_t n = 0; n < 8 * 32; ++n) {
            ASSERT_EQ(alone[kind].out.get(t * 8 * 32 + n), together[kind].out.get(whole * 8 * 32 + n));
          }
          for (std::int64_t h = 0; h < 8; ++h) ASSERT_EQ(alone[kind].lse(t, h), together[kind].lse(whole, h));
        }
      }
    }
  }
}

// NaN in data is not an error: it reaches the rows that see it, and only those.
TEST_P(KnownFaults, NaNPropagatesToTheRowsThatSeeIt) {
  Rng rng(30);
  Problem problem(make_config(1, 2, 16, 16, 16, 4), single(40, 40), DType::kF32, rng);
  problem.v.set(problem.v.at(20, 0, 3), kNaN);
  std::vector<Attention> results = attend(problem, run_index_select(problem, options()));
  results.push_back(run_dense_attention(problem, options()));
  for (const Attention& result : results) {
    for (std::int64_t t = 0; t < 40; ++t) {
      EXPECT_EQ(std::isnan(result.out(t, 0, 3)), t >= 20) << t;
      EXPECT_FALSE(std::isnan(result.out(t, 0, 4)));
      EXPECT_FALSE(std::isnan(result.lse(t, 0)));
    }
  }
  problem.k_idx.set(problem.k_idx.at(5, 0), kNaN);
  const Tensor scores = run_block_scores(problem, options());
  for (std::int64_t t = 0; t < 40; ++t) EXPECT_EQ(std::isnan(scores(t, 0, 0)), t >= 5);
}

}  // namespace
}  // namespace openmsa::test
