#include "device_run.hpp"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace openmsa::test {
namespace {

std::size_t span_bytes(const TensorView& view) {
  if (view.numel() == 0) return 0;
  std::int64_t last = 0;
  for (int axis = 0; axis < view.rank; ++axis) last += (view.shape[axis] - 1) * view.stride[axis];
  return static_cast<std::size_t>((last + 1) * dtype_bytes(view.dtype));
}

std::shared_ptr<void> allocate(std::size_t bytes) {
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, std::max<std::size_t>(bytes, 1)));
  return {data, [](void* p) { cudaFree(p); }};
}

Tensor integers(const std::vector<std::int32_t>& values, std::vector<std::int64_t> shape) {
  Tensor tensor(DType::kI32, std::move(shape));
  for (std::size_t i = 0; i < values.size(); ++i) tensor.set(static_cast<std::int64_t>(i), values[i]);
  return tensor;
}

struct Output {
  Tensor* host;
  DeviceTensor* device;
};

template <typename Args>
void run_twice(void (*function)(const Args&), Args args, std::initializer_list<Output> outputs) {
  const std::size_t bytes = workspace_bytes(args);
  std::vector<Tensor> first;
  for (const int poison : {0xff, 0x01}) {
    for (const Output& output : outputs) {
      if (output.host->given()) output.device->upload(Tensor(*output.host));
    }
    Workspace workspace = poisoned_workspace(bytes, poison);
    args.options.workspace = &workspace;
    function(args);
    synchronize(kGpu);
    for (const Output& output : outputs) {
      if (!output.host->given()) continue;
      Tensor result = *output.host;
      output.device->download(result);
      EXPECT_TRUE(result.guards_intact()) << "wrote between the rows of an output";
      first.push_back(std::move(result));
    }
  }
  const std::size_t count = first.size() / 2;
  std::size_t i = 0;
  for (const Output& output : outputs) {
    if (!output.host->given()) continue;
    EXPECT_TRUE(first[i].same_bits(first[count + i])) << "output " << i << " depends on what the scratch held";
    *output.host = first[i++];
  }
}

}  // namespace

void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

DeviceTensor::DeviceTensor(const Tensor& host) : bytes_(span_bytes(host.view())), memory_(allocate(bytes_)), view_(host.view()) {
  view_.data = memory_.get();
  view_.device = kGpu;
  upload(host);
}

void DeviceTensor::upload(const Tensor& host) {
  check_cuda(cudaMemcpy(memory_.get(), host.view().data, bytes_, cudaMemcpyHostToDevice));
}

void DeviceTensor::download(Tensor& host) const {
  check_cuda(cudaMemcpy(host.view().data, memory_.get(), bytes_, cudaMemcpyDeviceToHost));
}

Workspace poisoned_workspace(std::size_t bytes, int poison) {
  static std::shared_ptr<void> memory;
  static std::size_t size = 0;
  const bool raw = std::getenv("OPENMSA_TEST_RAW_WORKSPACE") != nullptr;
  if (raw || size < bytes) {
    memory = allocate(bytes);
    size = bytes;
  }
  if (!raw) check_cuda(cudaMemset(memory.get(), poison, std::max<std::size_t>(bytes, 1)));
  return {memory.get(), bytes, kGpu};
}

DeviceProblem::DeviceProblem(const Problem& problem)
    : host(&problem), q(problem.q), k(problem.k), v(problem.v), q_idx(problem.q_idx), k_idx(problem.k_idx) {
  const std::int64_t B = problem.num_seqs();
  cu_seqlens_q = DeviceTensor(integers(problem.cu_seqlens_q, {B + 1}));
  if (problem.layout.paged) {
    lengths = DeviceTensor(integers(problem.layout.seqlens_k, {B}));
    page_table = DeviceTensor(integers(problem.page_table, {B, problem.max_pages}));
  } else {
    lengths = DeviceTensor(integers(problem.cu_seqlens_k, {B + 1}));
  }
  if (!problem.layout.q_start.empty()) q_start = DeviceTensor(integers(problem.layout.q_start, {B}));
}

Batch DeviceProblem::batch() const {
  const auto longest = [](const std::vector<std::int32_t>& values) {
    return values.empty() ? 0 : *std::max_element(values.begin(), values.end());
  };
  Batch batch;
  batch.cu_seqlens_q = cu_seqlens_q.view();
  (host->layout.paged ? batch.seqlens_k : batch.cu_seqlens_k) = lengths.view();
  batch.page_table = page_table.view();
  batch.q_start = q_start.view();
  batch.max_seqlen_q = longest(host->layout.seqlens_q);
  batch.max_seqlen_k = longest(host->layout.seqlens_k);
  return batch;
}

Tensor gpu_block_scores(const DeviceProblem& problem) {
  const MsaConfig& config = problem.host->config;
  Tensor scores(DType::kF32, {problem.host->total_q, config.num_kv_heads, problem.host->max_num_blocks + 1},
                output_padding(*problem.host));
  DeviceTensor device(scores);
  run_twice<BlockScoresArgs>(block_scores,
                             {.config = config,
                              .batch = problem.batch(),
                              .q_idx = problem.q_idx.view(),
                              .k_idx = problem.k_idx.view(),
                              .scores = device.view(),
                              .options = {}},
                             {{&scores, &device}});
  return scores;
}

Tensor gpu_select_blocks(const DeviceProblem& problem, const Tensor& scores) {
  const MsaConfig& config = problem.host->config;
  Tensor block_ids(DType::kI32, {problem.host->total_q, config.num_kv_heads, config.top_k}, output_padding(*problem.host));
  const DeviceTensor input(scores);
  DeviceTensor device(block_ids);
  run_twice<SelectBlocksArgs>(
      select_blocks,
      {.config = config, .batch = problem.batch(), .scores = input.view(), .block_ids = device.view(), .options = {}},
      {{&block_ids, &device}});
  return block_ids;
}

Tensor gpu_index_select(const DeviceProblem& problem) {
  const MsaConfig& config = problem.host->config;
  Tensor block_ids(DType::kI32, {problem.host->total_q, config.num_kv_heads, config.top_k}, output_padding(*problem.host));
  DeviceTensor device(block_ids);
  run_twice<IndexSelectArgs>(index_select,
                             {.config = config,
                              .batch = problem.batch(),
                              .q_idx = problem.q_idx.view(),
                              .k_idx = problem.k_idx.view(),
                              .block_ids = device.view(),
                              .options = {}},
                             {{&block_ids, &device}});
  return block_ids;
}

Attention gpu_attention(void (*function)(const SparseAttentionArgs&), const DeviceProblem& problem, const Tensor& block_ids) {
  const Problem& host = *problem.host;
  Attention result{Tensor(host.dtype, {host.total_q, host.config.num_q_heads, host.config.head_dim}, output_padding(host)),
                   Tensor(DType::kF32, {host.total_q, host.config.num_q_heads}), Tensor()};
  const DeviceTensor ids(block_ids);
  DeviceTensor out(result.out), lse(result.lse);
  run_twice<SparseAttentionArgs>(function,
                                 {.config = host.config,
                                  .batch = problem.batch(),
                                  .q = problem.q.view(),
                                  .k = problem.k.view(),
                                  .v = problem.v.view(),
                                  .block_ids = ids.view(),
                                  .out = out.view(),
                                  .lse = lse.view(),
                                  .options = {}},
                                 {{&result.out, &out}, {&result.lse, &lse}});
  return result;
}

MsaResult gpu_msa_attention(const DeviceProblem& problem) {
  const Problem& host = *problem.host;
  const MsaConfig& config = host.config;
  const std::int64_t T = host.total_q, padding = output_padding(host);
  MsaResult result{{Tensor(host.dtype, {T, config.num_q_heads, config.head_dim}, padding),
                    Tensor(DType::kF32, {T, config.num_q_heads}), Tensor()},
                   Tensor(DType::kI32, {T, config.num_kv_heads, config.top_k}, padding)};
  DeviceTensor out(result.attention.out), lse(result.attention.lse), block_ids(result.block_ids);
  run_twice<MsaAttentionArgs>(msa_attention,
                              {.config = config,
                               .batch = problem.batch(),
                               .q = problem.q.view(),
                               .k = problem.k.view(),
                               .v = problem.v.view(),
                               .q_idx = problem.q_idx.view(),
                               .k_idx = problem.k_idx.view(),
                               .out = out.view(),
                               .lse = lse.view(),
                               .block_ids = block_ids.view(),
                               .options = {}},
                              {{&result.attention.out, &out}, {&result.attention.lse, &lse}, {&result.block_ids, &block_ids}});
  return result;
}

Attention gpu_dense_attention(const DeviceProblem& problem, bool with_block_max) {
  const Problem& host = *problem.host;
  Attention result{Tensor(host.dtype, {host.total_q, host.config.num_q_heads, host.config.head_dim}, output_padding(host)),
                   Tensor(DType::kF32, {host.total_q, host.config.num_q_heads}), Tensor()};
  DeviceTensor out(result.out), lse(result.lse), block_max;
  if (with_block_max) {
    result.block_max = Tensor(DType::kF32, {host.total_q, host.config.num_q_heads, host.max_num_blocks + 1}, output_padding(host));
    block_max = DeviceTensor(result.block_max);
  }
  run_twice<DenseAttentionArgs>(dense_attention,
                                {.config = host.config,
                                 .batch = problem.batch(),
                                 .q = problem.q.view(),
                                 .k = problem.k.view(),
                                 .v = problem.v.view(),
                                 .out = out.view(),
                                 .lse = lse.view(),
                                 .block_max = block_max.view(),
                                 .options = {}},
                                {{&result.out, &out}, {&result.lse, &lse}, {&result.block_max, &block_max}});
  return result;
}

Gradients gpu_attention_backward(const DeviceProblem& problem, const Tensor* block_ids, const Attention& forward,
                                 const Tensor& d_out) {
  const Problem& host = *problem.host;
  const std::int64_t padding = output_padding(host);
  const std::vector<std::int64_t> key_shape{host.total_k, host.config.num_kv_heads, host.config.head_dim};
  Gradients result{Tensor(host.dtype, {host.total_q, host.config.num_q_heads, host.config.head_dim}, padding),
                   Tensor(host.dtype, key_shape, padding), Tensor(host.dtype, key_shape, padding)};
  const DeviceTensor out(forward.out), lse(forward.lse), d_out_on_gpu(d_out);
  DeviceTensor d_q(result.d_q), d_k(result.d_k), d_v(result.d_v);
  const auto run = [&]<typename Args>(void (*function)(const Args&), Args args) {
    args.config = host.config;
    args.batch = problem.batch();
    args.q = problem.q.view();
    args.k = problem.k.view();
    args.v = problem.v.view();
    args.out = out.view();
    args.lse = lse.view();
    args.d_out = d_out_on_gpu.view();
    args.d_q = d_q.view();
    args.d_k = d_k.view();
    args.d_v = d_v.view();
    run_twice<Args>(function, args, {{&result.d_q, &d_q}, {&result.d_k, &d_k}, {&result.d_v, &d_v}});
  };
  if (block_ids != nullptr) {
    const DeviceTensor ids(*block_ids);
    SparseAttentionBackwardArgs args;
    args.block_ids = ids.view();
    run(sparse_attention_backward, args);
  } else {
    run(dense_attention_backward, DenseAttentionBackwardArgs{});
  }
  return result;
}

IndexKl gpu_index_kl(const DeviceProblem& problem, const Tensor* block_ids, const Tensor& lse) {
  const Problem& host = *problem.host;
  const std::int64_t padding = output_padding(host);
  IndexKl result{Tensor(DType::kF32, {1}),
                 Tensor(host.dtype, {host.total_q, host.config.num_kv_heads, host.config.index_dim}, padding),
                 Tensor(host.dtype, {host.total_k, host.config.index_dim}, padding)};
  const DeviceTensor ids = block_ids != nullptr ? DeviceTensor(*block_ids) : DeviceTensor(), lse_on_gpu(lse);
  DeviceTensor loss(result.loss), d_q_idx(result.d_q_idx), d_k_idx(result.d_k_idx);
  IndexKlLossArgs args;
  args.config = host.config;
  args.batch = problem.batch();
  args.q = problem.q.view();
  args.k = problem.k.view();
  args.lse = lse_on_gpu.view();
  args.q_idx = problem.q_idx.view();
  args.k_idx = problem.k_idx.view();
  args.block_ids = ids.view();
  args.loss = loss.view();
  args.d_q_idx = d_q_idx.view();
  args.d_k_idx = d_k_idx.view();
  run_twice<IndexKlLossArgs>(index_kl_loss, args,
                             {{&result.loss, &loss}, {&result.d_q_idx, &d_q_idx}, {&result.d_k_idx, &d_k_idx}});
  return result;
}

}  // namespace openmsa::test
