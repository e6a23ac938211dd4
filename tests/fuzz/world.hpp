// World: one batch and its tensors in buffers of exactly the size that the shapes tell, so that the address sanitizer sees any access
// beyond. Fields are open: a target bends them before it calls.
#pragma once

#include <random>
#include <vector>

#include "input.hpp"

namespace openmsa::fuzz {

// Owned memory of a view's size, filled with 0xff bytes: NaN, or -1.
struct Buffer {
  std::vector<std::byte> bytes;
  TensorView view;

  Buffer() = default;
  Buffer(DType dtype, std::initializer_list<std::int64_t> shape) {
    view = make_view(nullptr, dtype, shape);
    bytes.assign(static_cast<std::size_t>(view.numel() * dtype_bytes(dtype)), std::byte{0xff});
    view.data = bytes.data();
  }
  Buffer(Buffer&&) = default;
  Buffer& operator=(Buffer&&) = default;

  double get(std::int64_t i) const;
  void set(std::int64_t i, double value);
  bool untouched() const {
    for (const std::byte byte : bytes) {
      if (byte != std::byte{0xff}) return false;
    }
    return true;
  }
};

struct World {
  MsaConfig config;
  DType dtype = DType::kF32;
  bool paged = false;
  std::int64_t total_q = 0;    // T
  std::int64_t total_k = 0;    // S, packed
  std::int64_t num_pages = 0;  // paged
  std::int64_t max_pages = 0;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k, seqlens_k, page_table, q_start;
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;

  Buffer q, k, v, q_idx, k_idx, d_out;

  struct Results {
    Buffer scores, block_ids, out, lse, block_max;
    bool same_attention(const Results& other) const { return out.bytes == other.out.bytes && lse.bytes == other.lse.bytes; }
  };
  struct TrainingResults {
    Buffer d_q, d_k, d_v, loss, d_q_idx, d_k_idx;
  };

  // SIMD target, sizes and dtype within what the CPU engine takes.
  void choose_cpu_sizes(Input& input);
  // Lengths, positions and page numbers, all valid, up to the given numbers of sequences, and of keys and queries in each.
  void choose_lengths(Input& input, std::int32_t max_seqs, std::int32_t max_keys, std::int32_t max_queries);
  // Halves the queries of every sequence until query heads * head dim * (query, key) pairs are at most `most`: each factor may be
  // large, not all of them at once, since a slow input takes the time of thousands, and the fuzzer ends one of 20 s as hung.
  void limit_work(std::int64_t most);
  // Tensors for the sizes above, filled with -2 .. 2 (every dot product is exact and many tie).
  void allocate(std::uint64_t seed);

  // The plain reading of the contract for packed offsets: they start at 0, never decrease and end at T, and no hint is too small.
  bool offsets_hold() const;
  // Spoils some ids of lists that select_blocks has made for this valid batch. True if all lists are valid still.
  bool bend_block_ids(Input& input, Buffer& block_ids) const;

  Batch batch() const;
  std::int64_t score_width() const;
  Results results() const;
  TrainingResults training_results() const;

  bool block_scores(Results& results, const RunOptions& options) const;
  bool select_blocks(const Buffer& scores, Results& results, const RunOptions& options) const;
  bool index_select(Results& results, const RunOptions& options) const;
  bool sparse_attention(const Buffer& block_ids, Results& results, const RunOptions& options) const;
  bool sparse_decode(const Buffer& block_ids, Results& results, const RunOptions& options) const;
  bool msa_attention(Results& results, const RunOptions& options) const;
  bool dense_attention(Results& results, const RunOptions& options) const;
  bool sparse(void (*function)(const SparseAttentionArgs&), const Buffer& block_ids, Results& results,
              const RunOptions& options) const;

  // Training calls, packed keys. Null block_ids: every visible key.
  SparseAttentionBackwardArgs sparse_backward(const Buffer& block_ids, const Results& forward,
                                              const TrainingResults& results) const;
  DenseAttentionBackwardArgs dense_backward(const Results& forward, const TrainingResults& results) const;
  IndexKlLossArgs index_kl(const Buffer* block_ids, const Results& forward, const TrainingResults& results) const;
};

}  // namespace openmsa::fuzz
