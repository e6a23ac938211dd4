// MsaConfig: the sizes and constants of one MSA layer. Letters in comments are those of docs/guide.md: Hq, Hkv, G, D, Di, Bk, k.
#pragma once

#include <cstdint>
#include <optional>

namespace openmsa {

struct MsaConfig {
  std::int32_t num_q_heads = 0;           // Hq
  std::int32_t num_kv_heads = 0;          // Hkv, divides Hq; G = Hq / Hkv query heads form one GQA group
  std::int32_t head_dim = 0;              // D
  std::int32_t index_dim = 0;             // Di; may stay 0 where no index branch is involved (dense_attention, sparse_attention)
  std::int32_t block_size = 128;          // Bk, tokens per block, and the page size of paged keys
  std::int32_t top_k = 16;                // k, blocks kept per query token and group
  std::int32_t num_init_blocks = 0;       // the first blocks of a sequence, always kept
  std::int32_t num_local_blocks = 1;      // the last blocks up to the query's own, always kept
  std::optional<double> softmax_scale{};  // default 1/sqrt(D)
  std::optional<double> index_scale{};    // default 1/sqrt(Di); used by the index KL loss, never by the ranking

  std::int32_t group_size() const { return num_kv_heads > 0 ? num_q_heads / num_kv_heads : 0; }
  double effective_softmax_scale() const;
  double effective_index_scale() const;

  // Throws Error naming the field: heads and dims positive, Hq a multiple of Hkv, 1 <= top_k, forced blocks
  // (num_init_blocks + num_local_blocks) at most top_k, scales finite and positive. What a backend supports beyond
  // that (multiples of 16 and so on) is checked at the call, against that backend's registry rows.
  void validate() const;
};

}  // namespace openmsa
