// The registry: what the tables promise, the texts made from them, and Geometry's arithmetic.
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "core/registry.hpp"
#include "openmsa/info.hpp"

namespace openmsa::core {
namespace {

TEST(Registry, RangesStepFromTheirMinimum) {
  constexpr Range kDims{16, 256, 16};
  EXPECT_TRUE(kDims.contains(16) && kDims.contains(80) && kDims.contains(256));
  EXPECT_FALSE(kDims.contains(8) || kDims.contains(72) || kDims.contains(272) || kDims.contains(0));
  constexpr Range kAnything{};
  EXPECT_TRUE(kAnything.contains(1) && kAnything.contains(1'000'000'007));
  EXPECT_FALSE(kAnything.contains(0));
}

TEST(Registry, NamesTheFirstRuleBroken) {
  const Limits limits{.dtypes = kStorageDTypes, .head_dim = {16, 256, 16}, .top_k = {1, 64, 1}};
  EXPECT_EQ(why_unsupported(limits, {.dtype = DType::kBF16, .head_dim = 128, .top_k = 16}), "");
  EXPECT_EQ(why_unsupported(limits, {.head_dim = 72}), "head_dim 72 is not in 16..256 step 16");
  EXPECT_EQ(why_unsupported(limits, {.head_dim = 128, .top_k = 65}), "top_k 65 is not in 1..64");
  EXPECT_EQ(why_unsupported(limits, {.dtype = DType::kF64}), "dtype float64 is not one of float32|bfloat16|float16");
  EXPECT_EQ(why_unsupported(limits, {}), "") << "sizes at 0 are not involved";
  EXPECT_EQ(describe(limits), "float32|bfloat16|float16, head_dim 16..256 step 16, top_k 1..64");
}

template <typename Table>
void check_table(const Table& table, const Request& largest) {
  std::set<Backend> backends;
  std::set<std::string> names;
  for (const auto& kernel : table) {
    SCOPED_TRACE(kernel.name);
    EXPECT_NE(kernel.run, nullptr);
    EXPECT_NE(kernel.backend, Backend::kAuto);
    EXPECT_TRUE(names.insert(kernel.name).second) << "listed twice";
    backends.insert(kernel.backend);
    // The GPU takes fewer sizes; what it promises in common with the others is the reference shape.
    Request request = largest;
    if (kernel.backend == Backend::kCuda) {
      if (request.dtype != DType::kF32) request.dtype = DType::kBF16;
      if (request.head_dim != 0) request.head_dim = 128;
      if (request.index_dim != 0) request.index_dim = 128;
      if (request.block_size != 0) request.block_size = 128;
      if (request.top_k != 0) request.top_k = 16;
      if (request.group_size != 0) request.group_size = 16;
    }
    EXPECT_EQ(why_unsupported(kernel.limits, request), "");
  }
  EXPECT_TRUE(backends.count(Backend::kCpu) == 1 && backends.count(Backend::kReference) == 1);
}

TEST(Registry, EveryStageHasTheCpuAndTheReferenceUpToThePromisedSizes) {
  check_table(kernels<BlockScoresParams>(), {.dtype = DType::kF16, .index_dim = 256, .block_size = 256});
  check_table(kernels<SelectBlocksParams>(), {.dtype = DType::kF32, .block_size = 256, .top_k = 64});
  check_table(kernels<IndexSelectParams>(), {.dtype = DType::kBF16, .index_dim = 256, .block_size = 256, .top_k = 64});
  const Request sparse{.dtype = DType::kBF16, .head_dim = 256, .block_size = 256, .top_k = 64, .group_size = 97};
  check_table(kernels<SparseAttentionParams>(), sparse);
  check_table(decode_kernels(), sparse);
  check_table(kernels<MsaAttentionParams>(),
              {.dtype = DType::kBF16, .head_dim = 256, .index_dim = 256, .block_size = 256, .top_k = 64, .group_size = 97});
  check_table(kernels<DenseAttentionParams>(), {.dtype = DType::kF16, .head_dim = 256, .block_size = 256, .group_size = 97});
  check_table(kernels<AttentionBackwardParams>(), sparse);
  check_table(dense_backward_kernels(), {.dtype = DType::kF16, .head_dim = 256, .block_size = 256, .group_size = 97});
  check_table(kernels<IndexKlParams>(),
              {.dtype = DType::kBF16, .head_dim = 256, .index_dim = 256, .block_size = 256, .top_k = 64, .group_size = 97});
  check_table(kernels<WritePagesParams>(), {.dtype = DType::kF32});
}

TEST(Registry, ListKernelsShowsEveryRow) {
  std::set<std::pair<std::string, Backend>> rows;
  for (const KernelInfo& kernel : list_kernels()) {
    EXPECT_FALSE(kernel.name.empty());
    const char* dtype = kernel.backend == Backend::kCuda && kernel.stage != "select_blocks" ? "bfloat16|float16" : "float32";
    EXPECT_NE(kernel.supports.find(dtype), std::string::npos) << kernel.name << ": " << kernel.supports;
    rows.insert({kernel.stage, kernel.backend});
  }
  for (const char* stage :
       {"block_scores", "select_blocks", "index_select", "sparse_attention", "sparse_decode", "msa_attention", "dense_attention",
        "sparse_attention_backward", "dense_attention_backward", "index_kl_loss", "write_pages"}) {
    for (const Backend backend : {Backend::kCpu, Backend::kReference}) {
      EXPECT_TRUE(rows.count({stage, backend})) << stage << " " << backend_name(backend);
    }
  }
}

// Sequences of 0, 3, 0, 2 queries with 5, 4, 0, 300 keys.
TEST(Geometry, FindsTheSequenceOfAToken) {
  const std::vector<std::int32_t> cu_seqlens_q{0, 0, 3, 3, 5}, cu_seqlens_k{0, 5, 9, 9, 309}, q_start{0, -1, 0, 298};
  Geometry geo;
  geo.num_seqs = 4;
  geo.cu_seqlens_q = cu_seqlens_q.data();
  geo.cu_seqlens_k = cu_seqlens_k.data();
  geo.total_q = 5;
  geo.max_seqlen_k = 300;
  geo.block_size = 128;
  for (const auto& [token, seq] : std::vector<std::pair<std::int64_t, std::int32_t>>{{0, 1}, {2, 1}, {3, 3}, {4, 3}}) {
    EXPECT_EQ(geo.seq_of_token(token), seq) << "token " << token;
  }
  EXPECT_EQ(geo.num_blocks(0), 1);
  EXPECT_EQ(geo.num_blocks(2), 0);
  EXPECT_EQ(geo.num_blocks(3), 3);
  EXPECT_EQ(geo.max_num_blocks(), 3);
  EXPECT_EQ(geo.position(1, 0), 1) << "three queries end at the last of four keys";
  geo.q_start = q_start.data();
  EXPECT_EQ(geo.position(1, 0), -1);
  EXPECT_EQ(geo.num_visible(1, -1), 0);
  EXPECT_EQ(geo.num_visible(1, 0), 1);
  EXPECT_EQ(geo.num_visible(3, 298), 299);
  EXPECT_EQ(geo.num_visible(3, 1000), 300);
}

// Page 131,072 of 16,384 elements each: the product passes 2^31.
TEST(Geometry, PageOffsetsAre64Bit) {
  const std::vector<std::int32_t> cu_seqlens_q{0, 1}, seqlens_k{200}, page_table{7, 131072};
  Geometry geo;
  geo.num_seqs = 1;
  geo.cu_seqlens_q = cu_seqlens_q.data();
  geo.seqlens_k = seqlens_k.data();
  geo.page_table = page_table.data();
  geo.stride_page_table = 2;
  geo.block_size = 128;
  const auto* base = reinterpret_cast<const std::byte*>(std::uintptr_t{1} << 40);  // an address to count from; nothing is read
  const KeyBlocks keys = KeyBlocks::of(make_view(base, DType::kBF16, {131073, 1, 128, 128}), true);
  EXPECT_EQ(keys.block(geo, 0, 1, 0) - base, std::int64_t{131072} * 16384 * 2);
  EXPECT_EQ(keys.block(geo, 0, 0, 0) - base, std::int64_t{7} * 16384 * 2);
}

}  // namespace
}  // namespace openmsa::core
