// The CPU engine reads nothing beside its inputs, and its offsets are 64-bit.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "support/cases.hpp"
#include "support/compare.hpp"

namespace openmsa::test {
namespace {

const RunOptions kCpu = on(Backend::kCpu, 2);

class CpuBounds : public PerDType {};
OPENMSA_FOR_EACH_STORAGE_DTYPE(CpuBounds);

// A read past either end of an input hits an inaccessible page and ends the process. The shifted inputs are also aligned to
// nothing but their element size, and the results must not show it.
TEST_P(CpuBounds, NothingIsReadBesideTheInputs) {
  for (std::uint64_t seed = 600; seed < 630; ++seed) {
    const Problem problem = random_problem(seed, GetParam());
    SCOPED_TRACE(describe(problem));
    for (const Tensor::Fence side : {Tensor::Fence::kBefore, Tensor::Fence::kAfter}) {
      Problem fenced = problem;
      for (Tensor* tensor : {&fenced.q, &fenced.k, &fenced.v, &fenced.q_idx, &fenced.k_idx}) tensor->fence(side);
      Tensor scores = run_block_scores(problem, kCpu);
      EXPECT_TRUE(run_block_scores(fenced, kCpu).same_bits(scores)) << "block_scores";
      Tensor block_ids = run_index_select(problem, kCpu);
      EXPECT_TRUE(run_index_select(fenced, kCpu).same_bits(block_ids)) << "index_select";
      scores.fence(side);
      EXPECT_TRUE(run_select_blocks(fenced, scores, kCpu).same_bits(block_ids)) << "select_blocks";
      const Attention sparse = run_sparse_attention(problem, block_ids, kCpu);
      const Attention decode = run_sparse_decode(problem, block_ids, kCpu);
      EXPECT_TRUE(run_msa_attention(fenced, kCpu).attention.out.same_bits(run_msa_attention(problem, kCpu).attention.out))
          << "msa_attention";
      block_ids.fence(side);
      EXPECT_TRUE(run_sparse_attention(fenced, block_ids, kCpu).out.same_bits(sparse.out)) << "sparse_attention";
      EXPECT_TRUE(run_sparse_decode(fenced, block_ids, kCpu).out.same_bits(decode.out)) << "sparse_decode";
      if (problem.total_q * problem.max_num_blocks < 3000) {
        const Attention dense = run_dense_attention(problem, kCpu);
        EXPECT_TRUE(run_dense_attention(fenced, kCpu).out.same_bits(dense.out)) << "dense_attention";
      }
    }
  }
}

// A pool of 131,073 pages of 16,384 elements; the sequence lives in the first pages and the last, whose offset is past 2^31
// elements and 2^32 bytes. The pool is address space: only the pages used get memory.
class Pool {
 public:
  Pool(std::int64_t num_pages, std::int64_t page_elements) : bytes_(static_cast<std::size_t>(num_pages * page_elements) * 2) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~Pool() {
    if (mapped()) munmap(data_, bytes_);
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  bool mapped() const { return data_ != MAP_FAILED; }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  std::size_t bytes_;
  void* data_;
};

TEST(CpuBoundsLarge, PagesPastFourGigabytes) {
  constexpr std::int64_t kPages = 131'073, kPageElements = 128 * 128;
  Pool k(kPages, kPageElements), v(kPages, kPageElements), k_idx(kPages, kPageElements);
  if (!k.mapped() || !v.mapped() || !k_idx.mapped()) GTEST_SKIP() << "12 GiB of address space are not to be had here";

  Rng rng(1);
  Problem problem(make_config(1, 4, 128, 128, 128, 2), single(2, 300, true), DType::kBF16, rng);
  const std::vector<std::int32_t> far_table{131'072, 3, 131'071, -1, -1};
  for (const auto& [small, large] : {std::pair{&problem.k, &k}, std::pair{&problem.v, &v}, std::pair{&problem.k_idx, &k_idx}}) {
    for (std::size_t b = 0; b < 3; ++b) {
      std::memcpy(large->data() + std::int64_t{far_table[b]} * kPageElements * 2,
                  static_cast<std::byte*>(small->view().data) + problem.page_table[b] * kPageElements * 2, kPageElements * 2);
    }
  }
  Batch batch = problem.batch();
  batch.page_table = make_view(far_table.data(), {1, 5});
  const TensorView k_view = make_view(k.data(), DType::kBF16, {kPages, 1, 128, 128});
  const TensorView v_view = make_view(v.data(), DType::kBF16, {kPages, 1, 128, 128});

  const Tensor block_ids = run_index_select(problem, kCpu);
  Tensor far_ids(DType::kI32, {2, 1, 2});
  index_select({.config = problem.config,
                .batch = batch,
                .q_idx = problem.q_idx.view(),
                .k_idx = make_view(k_idx.data(), DType::kBF16, {kPages, 128, 128}),
                .block_ids = far_ids.view(),
                .options = kCpu});
  EXPECT_TRUE(far_ids.same_bits(block_ids));
  for (auto* function : {&sparse_attention, &sparse_decode}) {
    Tensor near(DType::kBF16, {2, 4, 128}), far(DType::kBF16, {2, 4, 128});
    SparseAttentionArgs args{.config = problem.config,
                             .batch = problem.batch(),
                             .q = problem.q.view(),
                             .k = problem.k.view(),
                             .v = problem.v.view(),
                             .block_ids = block_ids.view(),
                             .out = near.view(),
                             .lse = {},
                             .options = kCpu};
    function(args);
    args.batch = batch;
    args.k = k_view;
    args.v = v_view;
    args.out = far.view();
    function(args);
    EXPECT_TRUE(far.same_bits(near));
  }
  Tensor far(DType::kBF16, {2, 4, 128});
  dense_attention({.config = problem.config,
                   .batch = batch,
                   .q = problem.q.view(),
                   .k = k_view,
                   .v = v_view,
                   .out = far.view(),
                   .lse = {},
                   .block_max = {},
                   .options = kCpu});
  EXPECT_TRUE(far.same_bits(run_dense_attention(problem, kCpu).out));
}

}  // namespace
}  // namespace openmsa::test
