// Problem: one MSA call's inputs over some layout of sequences, with NaN wherever no kernel may look.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "openmsa/openmsa.hpp"
#include "support/tensor.hpp"

namespace openmsa::test {

using Rng = std::mt19937_64;

// Uniform in [low, high].
std::int64_t uniform(Rng& rng, std::int64_t low, std::int64_t high);
template <typename T>
T pick(Rng& rng, std::initializer_list<T> choices) {
  return choices.begin()[uniform(rng, 0, static_cast<std::int64_t>(choices.size()) - 1)];
}

// Which sequences, where their queries stand, and how their keys are stored.
struct Layout {
  std::vector<std::int32_t> seqlens_q, seqlens_k;
  std::vector<std::int32_t> q_start;  // empty: the default
  bool paged = false;                 // shuffled page table, spare pages, wild entries past each sequence's end
  bool strided = false;               // padded rows in every input

  std::string text() const;
};

// Lengths that catch bugs, mixed with random ones: empty sequences, sequences without queries, whole prefills, chunks behind a
// prefix, decode rows, explicit starts (negative ones and such beyond the last key included). The sum over the sequences of
// seqlen_q * seqlen_k stays within max_pairs, that of seqlen_k within 6,000.
Layout random_layout(Rng& rng, std::int64_t max_pairs);
// One sequence, or several of any lengths; q_start as by default.
Layout single(std::int32_t seqlen_q, std::int32_t seqlen_k, bool paged = false);
Layout ragged(std::vector<std::int32_t> seqlens_q, std::vector<std::int32_t> seqlens_k, bool paged = false);

enum class Values {
  kGaussian,  // bell-shaped with variance 1 and |x| < 3.5, rounded to the dtype
  kIntegers,  // -2 .. 2: every dot product is exact in fp32 and many scores tie
};

struct Problem {
  Problem(const MsaConfig& config, const Layout& layout, DType dtype, Rng& rng, Values values = Values::kGaussian);

  MsaConfig config;
  Layout layout;
  DType dtype;
  std::int64_t total_q = 0, total_k = 0, max_pages = 0;
  std::int64_t max_num_blocks = 0;  // over the sequences
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k, page_table;
  Tensor q, k, v, q_idx, k_idx;

  Batch batch() const;
  std::int32_t num_seqs() const { return static_cast<std::int32_t>(layout.seqlens_q.size()); }

  // Query tokens, as SPEC.md places them.
  struct Query {
    std::int32_t seq;
    std::int64_t position, num_visible, num_visible_blocks, own_block;
  };
  Query query(std::int64_t t) const;
  // The row (all but the last axis, flattened) of key j of sequence seq: in k and v for KV head g, and in k_idx.
  std::int64_t key_row(std::int32_t seq, std::int64_t j, std::int32_t g) const;
  std::int64_t index_key_row(std::int32_t seq, std::int64_t j) const;

  // The same inputs, bit for bit, in float64: what the oracle is run on.
  Problem widened() const;
  // The same keys; of the queries only number first .. first + count - 1 of each sequence, standing where they stood.
  Problem query_chunk(std::int64_t first, std::int64_t count) const;
  // Packed token of this problem that token t of query_chunk(first, count) is.
  std::int64_t chunk_token(std::int64_t first, std::int64_t count, std::int64_t t) const;
};

// NaN into the keys and values of every block that no query of its sequence selected.
void poison_unselected(Problem& problem, const Tensor& block_ids);

// NaN and infinities into a few elements of every input, at most one in each sequence's keys and values and in some query rows.
void inject_specials(Problem& problem, Rng& rng);

// Scores of -inf: of every key for some query rows; of some keys for every query, whole blocks among them, and always the first
// block of every other sequence.
void inject_minus_infinities(Problem& problem, Rng& rng);

// A config with every field that matters set.
MsaConfig make_config(std::int32_t num_kv_heads, std::int32_t group_size, std::int32_t head_dim, std::int32_t index_dim,
                      std::int32_t block_size, std::int32_t top_k, std::int32_t num_init_blocks = 0,
                      std::int32_t num_local_blocks = 1);
MsaConfig random_config(Rng& rng);
std::string text(const MsaConfig& config);

}  // namespace openmsa::test
