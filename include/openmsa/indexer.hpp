// The index branch: score key blocks, select the k best per (query token, GQA group).
#pragma once

#include <cstddef>
#include <cstdint>

#include "openmsa/batch.hpp"
#include "openmsa/config.hpp"
#include "openmsa/tensor.hpp"
#include "openmsa/workspace.hpp"

namespace openmsa {

// scores[t,g,b] = max over the keys j of block b that query t sees of <q_idx[t,g], k_idx[j]>  (raw dot product, fp32 sums);
// -inf where t sees no key of b, and for b past the sequence's last block. A NaN product makes its block's score NaN.
struct BlockScoresArgs {
  MsaConfig config{};
  Batch batch{};
  TensorView q_idx{};   // in:  [T, Hkv, Di] f32 | bf16 | f16
  TensorView k_idx{};   // in:  [S, Di], or paged [num_pages, Bk, Di]; dtype of q_idx
  TensorView scores{};  // out: [T, Hkv, num_blocks] f32, num_blocks >= max over sequences of ceil(seqlen_k / Bk)
  RunOptions options{};
};
void block_scores(const BlockScoresArgs& args);
std::size_t workspace_bytes(const BlockScoresArgs& args);

// block_ids[t,g,:] = the top_k blocks by (score descending, id ascending), forced blocks always in, strictly ascending, -1 in
// the tail. NaN ranks below -inf. A block without a visible key is never selected, whatever its score says.
struct SelectBlocksArgs {
  MsaConfig config{};
  Batch batch{};
  TensorView scores{};     // in:  [T, Hkv, num_blocks] f32
  TensorView block_ids{};  // out: [T, Hkv, k] int32
  RunOptions options{};
};
void select_blocks(const SelectBlocksArgs& args);
std::size_t workspace_bytes(const SelectBlocksArgs& args);

// block_scores and select_blocks in one call, queries taken in chunks so that memory stays bounded: the scratch does not grow
// with T. block_ids equal those of the two single calls.
struct IndexSelectArgs {
  MsaConfig config{};
  Batch batch{};
  TensorView q_idx{};      // in:  [T, Hkv, Di] f32 | bf16 | f16
  TensorView k_idx{};      // in:  [S, Di], or paged [num_pages, Bk, Di]; dtype of q_idx
  TensorView block_ids{};  // out: [T, Hkv, k] int32
  RunOptions options{};
};
void index_select(const IndexSelectArgs& args);
std::size_t workspace_bytes(const IndexSelectArgs& args);

}  // namespace openmsa
