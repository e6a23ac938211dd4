#include "calls.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "cuda/cuda.hpp"
#include "cuda/device.hpp"
#include "support/cases.hpp"

namespace openmsa::test {
namespace {

const std::int32_t* ints(const TensorView& view) { return view.given() ? static_cast<const std::int32_t*>(view.data) : nullptr; }

std::vector<std::int64_t> head_shape(const Problem& problem, std::int64_t tokens, std::int64_t heads) {
  return {tokens, heads, problem.config.head_dim};
}

}  // namespace

OverlappingSequences overlapping_sequences(std::int32_t dim, Rng& rng) {
  Layout layout;
  layout.seqlens_q = layout.seqlens_k = std::vector<std::int32_t>(8, 100);
  OverlappingSequences result{Problem(make_config(2, 1, dim, dim, 64, 2), layout, DType::kBF16, rng),
                              Tensor(DType::kI32, {800, 2, 2})};
  for (std::size_t seq = 1; seq < 8; ++seq) result.problem.cu_seqlens_k[seq] = seq % 2 == 1 ? 800 : 0;
  for (std::int64_t row = 0; row < 1600; ++row) {
    const double ids[] = {static_cast<double>(row % 12), 12.0};
    result.block_ids.set_row(row, ids);
  }
  return result;
}

core::Geometry gpu_geometry(const Problem& problem) {
  const Batch batch = problem.batch();
  core::Geometry geo;
  geo.num_seqs = problem.num_seqs();
  geo.cu_seqlens_q = ints(batch.cu_seqlens_q);
  geo.q_start = ints(batch.q_start);
  geo.total_q = problem.total_q;
  geo.block_size = problem.config.block_size;
  geo.max_seqlen_q = problem.total_q;
  if (batch.page_table.given()) {
    geo.seqlens_k = ints(batch.seqlens_k);
    geo.page_table = ints(batch.page_table);
    geo.stride_page_table = batch.page_table.stride[0];
    geo.max_pages = batch.page_table.shape[1];
    geo.num_pages = problem.k.view().shape[0];
    geo.max_seqlen_k = geo.max_pages * geo.block_size;
  } else {
    geo.cu_seqlens_k = ints(batch.cu_seqlens_k);
    geo.total_k = geo.max_seqlen_k = problem.total_k;
  }
  return geo;
}

MsaConfig gpu_config(const Problem& problem) {
  MsaConfig config = problem.config;
  config.softmax_scale = config.effective_softmax_scale();
  if (config.index_dim > 0) config.index_scale = config.effective_index_scale();
  return config;
}

void run_emulated(const std::function<void(core::Context)>& run, const std::function<void(core::Context)>& reserve, bool exact) {
  core::Arena counting;
  core::Context context;
  context.arena = &counting;
  reserve(context);
  constexpr std::size_t kGuard = 4096;
  std::vector<std::byte> memory(counting.used() + 2 * kGuard + Workspace::kAlignment, std::byte{0xff});
  std::byte* scratch = memory.data() + kGuard;
  while (reinterpret_cast<std::uintptr_t>(scratch) % Workspace::kAlignment != 0) ++scratch;
  core::Arena arena(scratch, counting.used());
  context.arena = &arena;
  run(context);
  EXPECT_TRUE(exact ? arena.used() == counting.used() : arena.used() <= counting.used())
      << arena.used() << " bytes of scratch, " << counting.used() << " reserved";
  const auto untouched = [](std::byte x) { return x == std::byte{0xff}; };
  EXPECT_TRUE(std::all_of(memory.data(), scratch, untouched)) << "wrote before the scratch memory";
  EXPECT_TRUE(std::all_of(scratch + counting.used(), memory.data() + memory.size(), untouched)) << "wrote past the scratch memory";
  cuda::throw_device_fault(0);
}

Attention emulated_attention(const EmulatedKernel<core::SparseAttentionParams>& kernel, const core::Geometry& geo,
                             const Problem& problem, const Tensor& block_ids) {
  const MsaConfig config = gpu_config(problem);
  Attention result{Tensor(problem.dtype, head_shape(problem, problem.total_q, config.num_q_heads), output_padding(problem)),
                   Tensor(DType::kF32, {problem.total_q, config.num_q_heads}), Tensor()};
  const bool paged = problem.layout.paged;
  run_emulated<core::SparseAttentionParams>(kernel, {config,
                                                     geo,
                                                     problem.q.view(),
                                                     core::KeyBlocks::of(problem.k.view(), paged),
                                                     core::KeyBlocks::of(problem.v.view(), paged),
                                                     block_ids.view(),
                                                     result.out.view(),
                                                     result.lse.view(),
                                                     {}});
  EXPECT_TRUE(result.out.guards_intact() && result.lse.guards_intact()) << "wrote beside an output";
  return result;
}

Attention emulated_sparse_attention(const Problem& problem, const Tensor& block_ids) {
  return emulated_attention({cuda::sparse_attention, cuda::sparse_attention_reserve}, gpu_geometry(problem), problem, block_ids);
}

Attention emulated_dense_attention(const Problem& problem, bool with_block_max, bool with_lse) {
  const MsaConfig config = gpu_config(problem);
  const std::int64_t padding = output_padding(problem);
  Attention result;
  result.out = Tensor(problem.dtype, head_shape(problem, problem.total_q, config.num_q_heads), padding);
  if (with_lse) result.lse = Tensor(DType::kF32, {problem.total_q, config.num_q_heads}, padding);
  if (with_block_max) {
    result.block_max = Tensor(DType::kF32, {problem.total_q, config.num_q_heads, problem.max_num_blocks + 1}, padding);
  }
  const bool paged = problem.layout.paged;
  // Reserved are the smallest tiles of any mode.
  run_emulated<core::DenseAttentionParams>({cuda::dense_attention, cuda::dense_attention_reserve},
                                           {config,
                                            gpu_geometry(problem),
                                            problem.q.view(),
                                            core::KeyBlocks::of(problem.k.view(), paged),
                                            core::KeyBlocks::of(problem.v.view(), paged),
                                            result.out.view(),
                                            result.lse.view(),
                                            result.block_max.view(),
                                            {}},
                                           false);
  for (const Tensor* tensor : {&result.out, &result.lse, &result.block_max}) {
    EXPECT_TRUE(!tensor->given() || tensor->guards_intact()) << "wrote beside an output";
  }
  return result;
}

Gradients emulated_attention_backward(const EmulatedKernel<core::AttentionBackwardParams>& kernel, const Problem& problem,
                                      const Tensor* block_ids, const Attention& forward, const Tensor& d_out) {
  const MsaConfig config = gpu_config(problem);
  const std::int64_t padding = output_padding(problem);
  Gradients result{Tensor(problem.dtype, head_shape(problem, problem.total_q, config.num_q_heads), padding),
                   Tensor(problem.dtype, head_shape(problem, problem.total_k, config.num_kv_heads), padding),
                   Tensor(problem.dtype, head_shape(problem, problem.total_k, config.num_kv_heads), padding)};
  run_emulated<core::AttentionBackwardParams>(kernel, {config,
                                                       gpu_geometry(problem),
                                                       problem.q.view(),
                                                       core::KeyBlocks::of(problem.k.view(), false),
                                                       core::KeyBlocks::of(problem.v.view(), false),
                                                       block_ids != nullptr ? block_ids->view() : TensorView{},
                                                       forward.out.view(),
                                                       forward.lse.view(),
                                                       d_out.view(),
                                                       result.d_q.view(),
                                                       result.d_k.view(),
                                                       result.d_v.view(),
                                                       false,
                                                       {}});
  for (const Tensor* tensor : {&result.d_q, &result.d_k, &result.d_v}) {
    EXPECT_TRUE(tensor->guards_intact()) << "wrote beside an output";
  }
  return result;
}

IndexKl emulated_index_kl(const EmulatedKernel<core::IndexKlParams>& kernel, const Problem& problem, const Tensor* block_ids,
                          const Tensor& lse, const IndexKlOptions& options) {
  const MsaConfig config = gpu_config(problem);
  const std::int64_t padding = output_padding(problem);
  IndexKl result;
  if (options.with_loss) result.loss = Tensor(DType::kF32, {1});
  if (options.with_gradients) {
    result.d_q_idx = Tensor(problem.dtype, {problem.total_q, config.num_kv_heads, config.index_dim}, padding);
    result.d_k_idx = Tensor(problem.dtype, {problem.total_k, config.index_dim}, padding);
  }
  run_emulated<core::IndexKlParams>(kernel,
                                    {config,
                                     gpu_geometry(problem),
                                     problem.q.view(),
                                     core::KeyBlocks::of(problem.k.view(), false),
                                     lse.view(),
                                     problem.q_idx.view(),
                                     core::KeyBlocks::of(problem.k_idx.view(), false),
                                     block_ids != nullptr ? block_ids->view() : TensorView{},
                                     result.loss.view(),
                                     result.d_q_idx.view(),
                                     result.d_k_idx.view(),
                                     options.num_tokens > 0 ? options.num_tokens : std::max<std::int64_t>(problem.total_q, 1),
                                     options.deterministic,
                                     {}});
  for (const Tensor* tensor : {&result.loss, &result.d_q_idx, &result.d_k_idx}) {
    EXPECT_TRUE(!tensor->given() || tensor->guards_intact()) << "wrote beside an output";
  }
  return result;
}

}  // namespace openmsa::test
