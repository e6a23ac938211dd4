#include "world.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "cpu/cpu.hpp"

namespace openmsa::fuzz {
namespace {

template <typename T>
T load(const std::byte* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

void store(std::byte* address, const auto& value) { std::memcpy(address, &value, sizeof(value)); }

}  // namespace

double Buffer::get(std::int64_t i) const {
  const std::byte* address = bytes.data() + i * dtype_bytes(view.dtype);
  switch (view.dtype) {
    case DType::kF64: return load<double>(address);
    case DType::kF32: return load<float>(address);
    case DType::kBF16: return static_cast<float>(load<BFloat16>(address));
    case DType::kF16: return static_cast<float>(load<Float16>(address));
    case DType::kI32: return load<std::int32_t>(address);
    case DType::kI64: return static_cast<double>(load<std::int64_t>(address));
  }
  return 0;
}

void Buffer::set(std::int64_t i, double value) {
  std::byte* address = bytes.data() + i * dtype_bytes(view.dtype);
  switch (view.dtype) {
    case DType::kF64: return store(address, value);
    case DType::kF32: return store(address, static_cast<float>(value));
    case DType::kBF16: return store(address, BFloat16(static_cast<float>(value)));
    case DType::kF16: return store(address, Float16(static_cast<float>(value)));
    case DType::kI32: return store(address, static_cast<std::int32_t>(value));
    case DType::kI64: return store(address, static_cast<std::int64_t>(value));
  }
}

void World::choose_cpu_sizes(Input& input) {
  // The widest instructions of this machine, or AVX2 where it has that.
  const char* const simd = input.flag() ? "best" : "avx2";
  if (!runs([&] { cpu::limit_simd_target(simd); })) cpu::limit_simd_target("best");

  config.num_kv_heads = input.range(1, 3);
  config.num_q_heads = config.num_kv_heads * (input.flag() ? input.range(1, 9) : 1);
  config.head_dim = 16 * input.range(1, 5);
  config.index_dim = 16 * input.range(1, 5);
  config.block_size = 16 * input.range(1, 4);
  config.top_k = input.range(1, 20);
  config.num_local_blocks = input.range(0, std::min(config.top_k, 3));
  config.num_init_blocks = input.range(0, std::min(config.top_k - config.num_local_blocks, 2));
  dtype = input.flag() ? DType::kF32 : input.flag() ? DType::kBF16 : DType::kF16;
}

void World::choose_lengths(Input& input, std::int32_t max_seqs, std::int32_t max_keys, std::int32_t max_queries) {
  const std::int32_t num_seqs = input.range(0, max_seqs);
  const bool with_starts = input.flag();
  cu_seqlens_q = cu_seqlens_k = {0};
  for (std::int32_t s = 0; s < num_seqs; ++s) {
    const std::int32_t seqlen_k = input.range(0, max_keys), seqlen_q = input.range(0, max_queries);
    seqlens_k.push_back(seqlen_k);
    cu_seqlens_q.push_back(cu_seqlens_q.back() + seqlen_q);
    cu_seqlens_k.push_back(cu_seqlens_k.back() + seqlen_k);
    if (with_starts) q_start.push_back(input.range(0, max_keys) - 10 + input.range(0, 20));
  }
  total_q = cu_seqlens_q.back();
  total_k = cu_seqlens_k.back();
  if (!paged) return;
  const auto blocks = [&](std::int32_t tokens) { return (tokens + config.block_size - 1) / config.block_size; };
  for (const std::int32_t seqlen : seqlens_k) max_pages = std::max<std::int64_t>(max_pages, blocks(seqlen));
  max_pages += input.range(0, 1);
  std::int32_t next = input.range(0, 2);
  for (const std::int32_t seqlen : seqlens_k) {
    for (std::int32_t b = 0; b < max_pages; ++b) page_table.push_back(b < blocks(seqlen) ? next++ : -7);
  }
  num_pages = next;
  // Pages in any order: mirror the ids.
  if (input.flag()) {
    for (std::int32_t& page : page_table) page = page >= 0 ? next - 1 - page : page;
  }
}

void World::limit_work(std::int64_t most) {
  const std::int64_t width = std::int64_t{config.num_q_heads} * std::max(config.head_dim, config.index_dim);
  for (;;) {
    std::int64_t pairs = 0;
    std::int32_t longest = 0;
    for (std::size_t s = 0; s < seqlens_k.size(); ++s) {
      const std::int32_t seqlen_q = cu_seqlens_q[s + 1] - cu_seqlens_q[s];
      pairs += std::int64_t{seqlen_q} * seqlens_k[s];
      longest = std::max(longest, seqlen_q);
    }
    if (pairs * width <= most || longest <= 1) break;
    std::int32_t begin = 0;  // of the sequence before it was shortened
    for (std::size_t s = 0; s < seqlens_k.size(); ++s) {
      const std::int32_t seqlen_q = cu_seqlens_q[s + 1] - begin;
      begin = cu_seqlens_q[s + 1];
      cu_seqlens_q[s + 1] = cu_seqlens_q[s] + (seqlen_q + 1) / 2;
    }
  }
  total_q = cu_seqlens_q.back();
}

void World::allocate(std::uint64_t seed) {
  const std::int64_t Hkv = config.num_kv_heads, D = config.head_dim, Di = config.index_dim, Bk = config.block_size;
  q = Buffer(dtype, {total_q, config.num_q_heads, D});
  q_idx = Buffer(dtype, {total_q, Hkv, Di});
  k = paged ? Buffer(dtype, {num_pages, Hkv, Bk, D}) : Buffer(dtype, {total_k, Hkv, D});
  v = paged ? Buffer(dtype, {num_pages, Hkv, Bk, D}) : Buffer(dtype, {total_k, Hkv, D});
  d_out = Buffer(dtype, {total_q, config.num_q_heads, D});
  k_idx = paged ? Buffer(dtype, {num_pages, Bk, Di}) : Buffer(dtype, {total_k, Di});
  std::minstd_rand random(static_cast<std::uint32_t>(seed % 2147483646 + 1));
  for (Buffer* buffer : {&q, &k, &v, &q_idx, &k_idx, &d_out}) {
    for (std::int64_t i = 0; i < buffer->view.numel(); ++i) buffer->set(i, static_cast<double>((random() >> 8) % 5) - 2);
  }
}

bool World::offsets_hold() const {
  const auto holds = [](const std::vector<std::int32_t>& offsets, std::int64_t hint) {
    std::int64_t longest = 0;
    for (std::size_t s = 0; s + 1 < offsets.size(); ++s) {
      if (offsets[s + 1] < offsets[s]) return false;
      longest = std::max<std::int64_t>(longest, std::int64_t{offsets[s + 1]} - offsets[s]);
    }
    return offsets.front() == 0 && (hint == 0 || (hint > 0 && hint >= longest));
  };
  return holds(cu_seqlens_q, max_seqlen_q) && cu_seqlens_q.back() == total_q && holds(cu_seqlens_k, max_seqlen_k);
}

bool World::bend_block_ids(Input& input, Buffer& block_ids) const {
  // A rate of bent ids that leaves many inputs valid.
  const std::int32_t one_in = 1 << input.range(0, 6);
  const std::int64_t block_size = config.block_size;
  bool valid = true;
  for (std::size_t s = 0; s + 1 < cu_seqlens_q.size(); ++s) {
    const std::int64_t seqlen_q = cu_seqlens_q[s + 1] - cu_seqlens_q[s];
    const std::int64_t seqlen_k = paged ? seqlens_k[s] : cu_seqlens_k[s + 1] - cu_seqlens_k[s];
    for (std::int64_t i = 0; i < seqlen_q; ++i) {
      const std::int64_t position = (q_start.empty() ? seqlen_k - seqlen_q : q_start[s]) + i;
      const std::int64_t num_visible = std::clamp<std::int64_t>(position + 1, 0, seqlen_k);
      for (std::int64_t g = 0; g < config.num_kv_heads; ++g) {
        const std::int64_t row = ((cu_seqlens_q[s] + i) * config.num_kv_heads + g) * config.top_k;
        std::int64_t last = -1;
        bool ended = false;
        for (std::int32_t slot = 0; slot < config.top_k; ++slot) {
          auto id = static_cast<std::int32_t>(block_ids.get(row + slot));
          if (input.byte() % one_in == 1 % one_in) id = input.flag() ? input.range(-2, 8) : input.int32_near(id);
          block_ids.set(row + slot, id);
          if (id == -1) {
            ended = true;
          } else {
            valid = valid && !ended && id > last && std::int64_t{id} * block_size < num_visible;
            last = id;
          }
        }
      }
    }
  }
  return valid;
}

Batch World::batch() const {
  const auto num_seqs = static_cast<std::int64_t>(cu_seqlens_q.size()) - 1;
  Batch batch;
  batch.cu_seqlens_q = make_view(cu_seqlens_q.data(), {num_seqs + 1});
  if (paged) {
    batch.seqlens_k = make_view(seqlens_k.data(), {num_seqs});
    batch.page_table = make_view(page_table.data(), {num_seqs, max_pages});
  } else {
    batch.cu_seqlens_k = make_view(cu_seqlens_k.data(), {num_seqs + 1});
  }
  if (!q_start.empty()) batch.q_start = make_view(q_start.data(), {num_seqs});
  batch.max_seqlen_q = max_seqlen_q;
  batch.max_seqlen_k = max_seqlen_k;
  return batch;
}

std::int64_t World::score_width() const { return paged ? max_pages : (total_k + config.block_size - 1) / config.block_size; }

World::Results World::results() const {
  const std::int64_t Hq = config.num_q_heads, Hkv = config.num_kv_heads;
  return {Buffer(DType::kF32, {total_q, Hkv, score_width()}), Buffer(DType::kI32, {total_q, Hkv, config.top_k}),
          Buffer(dtype, {total_q, Hq, config.head_dim}), Buffer(DType::kF32, {total_q, Hq}),
          Buffer(DType::kF32, {total_q, Hq, score_width()})};
}

World::TrainingResults World::training_results() const {
  const std::int64_t Hkv = config.num_kv_heads, D = config.head_dim, Di = config.index_dim;
  return {Buffer(dtype, {total_q, config.num_q_heads, D}),
          Buffer(dtype, {total_k, Hkv, D}),
          Buffer(dtype, {total_k, Hkv, D}),
          Buffer(DType::kF32, {1}),
          Buffer(dtype, {total_q, Hkv, Di}),
          Buffer(dtype, {total_k, Di})};
}

// Outputs of a refused call must be as they were: still poison.
bool World::block_scores(Results& results, const RunOptions& options) const {
  const bool ran = runs([&] { openmsa::block_scores({config, batch(), q_idx.view, k_idx.view, results.scores.view, options}); });
  require(ran || results.scores.untouched(), "a refused call writes nothing");
  return ran;
}

bool World::select_blocks(const Buffer& scores, Results& results, const RunOptions& options) const {
  const bool ran = runs([&] { openmsa::select_blocks({config, batch(), scores.view, results.block_ids.view, options}); });
  require(ran || results.block_ids.untouched(), "a refused call writes nothing");
  return ran;
}

bool World::index_select(Results& results, const RunOptions& options) const {
  const bool ran = runs([&] { openmsa::index_select({config, batch(), q_idx.view, k_idx.view, results.block_ids.view, options}); });
  require(ran || results.block_ids.untouched(), "a refused call writes nothing");
  return ran;
}

bool World::sparse(void (*function)(const SparseAttentionArgs&), const Buffer& block_ids, Results& results,
                   const RunOptions& options) const {
  const bool ran = runs([&] {
    function({config, batch(), q.view, k.view, v.view, block_ids.view, results.out.view, results.lse.view, options});
  });
  require(ran || (results.out.untouched() && results.lse.untouched()), "a refused call writes nothing");
  return ran;
}

bool World::sparse_attention(const Buffer& block_ids, Results& results, const RunOptions& options) const {
  return sparse(openmsa::sparse_attention, block_ids, results, options);
}

bool World::sparse_decode(const Buffer& block_ids, Results& results, const RunOptions& options) const {
  return sparse(openmsa::sparse_decode, block_ids, results, options);
}

bool World::msa_attention(Results& results, const RunOptions& options) const {
  const bool ran = runs([&] {
    openmsa::msa_attention({config, batch(), q.view, k.view, v.view, q_idx.view, k_idx.view, results.out.view, results.lse.view,
                            results.block_ids.view, options});
  });
  require(ran || (results.out.untouched() && results.lse.untouched() && results.block_ids.untouched()),
          "a refused call writes nothing");
  return ran;
}

bool World::dense_attention(Results& results, const RunOptions& options) const {
  const bool ran = runs([&] {
    openmsa::dense_attention(
        {config, batch(), q.view, k.view, v.view, results.out.view, results.lse.view, results.block_max.view, options});
  });
  require(ran || (results.out.untouched() && results.lse.untouched() && results.block_max.untouched()),
          "a refused call writes nothing");
  return ran;
}

namespace {

template <typename Args>
Args backward_args(const World& world, const World::Results& forward, const World::TrainingResults& results) {
  Args args;
  args.config = world.config;
  args.batch = world.batch();
  args.q = world.q.view;
  args.k = world.k.view;
  args.v = world.v.view;
  args.out = forward.out.view;
  args.lse = forward.lse.view;
  args.d_out = world.d_out.view;
  args.d_q = results.d_q.view;
  args.d_k = results.d_k.view;
  args.d_v = results.d_v.view;
  return args;
}

}  // namespace

SparseAttentionBackwardArgs World::sparse_backward(const Buffer& block_ids, const Results& forward,
                                                   const TrainingResults& results) const {
  auto args = backward_args<SparseAttentionBackwardArgs>(*this, forward, results);
  args.block_ids = block_ids.view;
  return args;
}

DenseAttentionBackwardArgs World::dense_backward(const Results& forward, const TrainingResults& results) const {
  return backward_args<DenseAttentionBackwardArgs>(*this, forward, results);
}

IndexKlLossArgs World::index_kl(const Buffer* block_ids, const Results& forward, const TrainingResults& results) const {
  IndexKlLossArgs args;
  args.config = config;
  args.batch = batch();
  args.q = q.view;
  args.k = k.view;
  args.lse = forward.lse.view;
  args.q_idx = q_idx.view;
  args.k_idx = k_idx.view;
  if (block_ids != nullptr) args.block_ids = block_ids->view;
  args.loss = results.loss.view;
  args.d_q_idx = results.d_q_idx.view;
  args.d_k_idx = results.d_k_idx.view;
  return args;
}

}  // namespace openmsa::fuzz
