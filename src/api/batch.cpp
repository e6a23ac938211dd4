#include <algorithm>
#include <limits>

#include "api/check.hpp"

namespace openmsa::api {
namespace {

constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();  // cu_seqlens are int32

bool is_given(const TensorView& view) { return view.rank != 0 || view.data != nullptr; }

const std::int32_t* int32_data(const TensorView& view) { return static_cast<const std::int32_t*>(view.data); }

std::string subscript(std::int64_t i) { return "[" + std::to_string(i) + "]"; }

void check_cumulative(const char* name, const std::int32_t* cu_seqlens, std::int32_t num_seqs) {
  if (cu_seqlens[0] != 0) {
    refuse(name,
           "starts at " + std::to_string(cu_seqlens[0]) +
               "; it must start at 0, the offset of the first sequence. Build it as 0 followed by the running sum of lengths.");
  }
  for (std::int32_t s = 0; s < num_seqs; ++s) {
    if (cu_seqlens[s + 1] >= cu_seqlens[s]) continue;
    refuse(name, "decreases from " + std::to_string(cu_seqlens[s]) + " at entry " + std::to_string(s) + " to " +
                     std::to_string(cu_seqlens[s + 1]) +
                     "; it must never decrease, lengths being 0 or more. Build it as 0 followed by the running sum of lengths.");
  }
}

void check_cumulative_end(const char* name, std::int64_t end, const char* tensor_name, std::int64_t num_tokens,
                          const char* letter) {
  if (end == num_tokens) return;
  refuse(name, "ends at " + std::to_string(end) + ", but " + tensor_name + " holds " + std::to_string(num_tokens) +
                   " tokens; its last entry must be " + letter + " = " + tensor_name +
                   ".shape[0]. Pass exactly the batch's tokens.");
}

void check_token_count(const char* name, std::int64_t num_tokens) {
  if (num_tokens <= kMaxTokens) return;
  refuse(name, "holds " + std::to_string(num_tokens) + " tokens; a batch has at most " + std::to_string(kMaxTokens) +
                   ", because offsets are int32. Split the batch.");
}

void check_hint(const char* name, std::int64_t hint, std::int64_t longest, std::int32_t seq, const char* what) {
  if (hint < 0) refuse(name, "is " + std::to_string(hint) + "; it must be 0 (not given) or an upper bound on the lengths.");
  if (hint == 0 || longest <= hint) return;
  refuse(name, "is " + std::to_string(hint) + ", but sequence " + std::to_string(seq) + " has " + std::to_string(longest) + " " +
                   what + "; no sequence may be longer. Give the true maximum, or 0 to have it computed.");
}

}  // namespace

Batch check_batch_structure(Checker& checker, const Batch& batch) {
  const bool packed = is_given(batch.cu_seqlens_k);
  const bool paged = is_given(batch.seqlens_k) || is_given(batch.page_table);
  if (packed && paged) {
    refuse("batch.cu_seqlens_k",
           std::string("is given together with batch.") + (is_given(batch.page_table) ? "page_table" : "seqlens_k") +
               "; keys are either packed (cu_seqlens_k) or paged (seqlens_k and page_table). Drop one of the two.");
  }
  if (!packed && !paged) {
    refuse("batch.cu_seqlens_k",
           "is not given and neither is batch.page_table; keys must be either packed (cu_seqlens_k) or paged "
           "(seqlens_k and page_table). Give one of the two.");
  }
  if (paged && !is_given(batch.seqlens_k)) {
    refuse("batch.seqlens_k",
           "is not given, but batch.page_table is; paged keys need the live length of every sequence. Give both.");
  }
  if (paged && !is_given(batch.page_table)) {
    refuse("batch.page_table", "is not given, but batch.seqlens_k is; paged keys need the pages of every sequence. Give both.");
  }

  Batch checked = batch;
  checked.cu_seqlens_q = checker.lengths("batch.cu_seqlens_q", batch.cu_seqlens_q, {{"B+1"}});
  const std::int64_t num_offsets = checked.cu_seqlens_q.shape[0];
  if (num_offsets < 1) {
    refuse("batch.cu_seqlens_q",
           "has no entries; it must have B+1, hence one zero for an empty batch. Pass [0] for an empty batch.");
  }
  check_token_count("batch.cu_seqlens_q", num_offsets);
  const Axis num_seqs{"B", num_offsets - 1, "the number of sequences by batch.cu_seqlens_q"};
  if (packed) {
    checked.cu_seqlens_k = checker.lengths("batch.cu_seqlens_k", batch.cu_seqlens_k,
                                           {{"B+1", num_offsets, "the number of entries of batch.cu_seqlens_q"}});
  } else {
    checked.seqlens_k = checker.lengths("batch.seqlens_k", batch.seqlens_k, {num_seqs});
    checked.page_table =
        checker.tensor("batch.page_table", batch.page_table, core::dtype_bit(DType::kI32), {num_seqs, {"max_pages"}}, Role::kInput);
  }
  if (is_given(batch.q_start)) checked.q_start = checker.lengths("batch.q_start", batch.q_start, {num_seqs});
  return checked;
}

core::Geometry make_geometry(const Batch& batch, const MsaConfig& config, const char* q_name, std::int64_t total_q) {
  // Stands in for a page table without entries, whose pointer may be null while Geometry tells paged keys by a non-null one.
  static constexpr std::int32_t kNoPages[1] = {-1};

  check_token_count(q_name, total_q);
  core::Geometry geo;
  geo.num_seqs = static_cast<std::int32_t>(batch.cu_seqlens_q.shape[0] - 1);
  geo.cu_seqlens_q = int32_data(batch.cu_seqlens_q);
  geo.q_start = batch.q_start.given() ? int32_data(batch.q_start) : nullptr;
  geo.total_q = total_q;
  geo.block_size = config.block_size;
  if (batch.page_table.given()) geo.max_pages = batch.page_table.shape[1];
  if (batch.cu_seqlens_q.device.type == DeviceType::kCuda) {
    // Nothing is copied back to look: upper bounds stand in for the lengths, and kernels check what they read.
    if (batch.page_table.given()) {
      geo.seqlens_k = int32_data(batch.seqlens_k);
      geo.page_table = int32_data(batch.page_table);
      geo.stride_page_table = batch.page_table.stride[0];
    } else {
      geo.cu_seqlens_k = int32_data(batch.cu_seqlens_k);
    }
    check_hint("batch.max_seqlen_q", batch.max_seqlen_q, 0, 0, "queries");
    check_hint("batch.max_seqlen_k", batch.max_seqlen_k, 0, 0, "keys");
    geo.max_seqlen_q = batch.max_seqlen_q > 0 ? std::min(batch.max_seqlen_q, total_q) : total_q;
    // Packed: see check_key_extent. Lengths are int32, so a wider table or a larger hint says no more than that.
    const std::int64_t bound =
        batch.max_seqlen_k > 0 ? batch.max_seqlen_k : std::min(geo.max_pages, kMaxTokens) * std::int64_t{geo.block_size};
    geo.max_seqlen_k = std::min(bound, kMaxTokens);
    return geo;
  }
  check_cumulative("batch.cu_seqlens_q", geo.cu_seqlens_q, geo.num_seqs);
  check_cumulative_end("batch.cu_seqlens_q", geo.cu_seqlens_q[geo.num_seqs], q_name, total_q, "T");
  if (batch.page_table.given()) {
    geo.seqlens_k = int32_data(batch.seqlens_k);
    geo.page_table = batch.page_table.data != nullptr ? int32_data(batch.page_table) : kNoPages;
    geo.stride_page_table = batch.page_table.stride[0];
    for (std::int32_t s = 0; s < geo.num_seqs; ++s) {
      if (geo.seqlens_k[s] < 0) {
        refuse("batch.seqlens_k", "has " + std::to_string(geo.seqlens_k[s]) + " at entry " + std::to_string(s) +
                                      "; a length must be 0 or more. Use 0 for a sequence without keys.");
      }
      if (geo.num_blocks(s) > batch.page_table.shape[1]) {
        refuse("batch.page_table", "has " + std::to_string(batch.page_table.shape[1]) + " pages per sequence, but sequence " +
                                       std::to_string(s) + " has " + std::to_string(geo.seqlens_k[s]) + " keys, which need " +
                                       std::to_string(geo.num_blocks(s)) + " pages of " + std::to_string(config.block_size) +
                                       "; the table is too short. Pass a wider page_table or correct batch.seqlens_k.");
      }
    }
  } else {
    geo.cu_seqlens_k = int32_data(batch.cu_seqlens_k);
    check_cumulative("batch.cu_seqlens_k", geo.cu_seqlens_k, geo.num_seqs);
  }

  std::int32_t longest_q = 0, longest_k = 0;
  for (std::int32_t s = 0; s < geo.num_seqs; ++s) {
    if (geo.seqlen_q(s) > geo.seqlen_q(longest_q)) longest_q = s;
    if (geo.seqlen_k(s) > geo.seqlen_k(longest_k)) longest_k = s;
  }
  geo.max_seqlen_q = geo.num_seqs > 0 ? geo.seqlen_q(longest_q) : 0;
  geo.max_seqlen_k = geo.num_seqs > 0 ? geo.seqlen_k(longest_k) : 0;
  check_hint("batch.max_seqlen_q", batch.max_seqlen_q, geo.max_seqlen_q, longest_q, "queries");
  check_hint("batch.max_seqlen_k", batch.max_seqlen_k, geo.max_seqlen_k, longest_k, "keys");
  return geo;
}

TensorView check_keys(Checker& checker, const char* name, const TensorView& view, const Batch& batch, const MsaConfig& config,
                      std::int32_t num_heads, Axis row) {
  const bool paged = is_given(batch.page_table);
  const bool has_heads = num_heads > 0;
  const int packed_rank = has_heads ? 3 : 2;
  if (paged && view.rank == packed_rank) {
    refuse(name, "has rank " + std::to_string(view.rank) + ", shape " + shape_text(view) +
                     ", which is that of packed keys, but batch.page_table is given; paged keys have rank " +
                     std::to_string(packed_rank + 1) + ". Pass the page pool, or give batch.cu_seqlens_k instead.");
  }
  if (!paged && view.rank == packed_rank + 1) {
    refuse(name, "has rank " + std::to_string(view.rank) + ", shape " + shape_text(view) +
                     ", which is that of paged keys, but batch.cu_seqlens_k is given; packed keys have rank " +
                     std::to_string(packed_rank) + ". Pass packed keys, or give batch.seqlens_k and batch.page_table instead.");
  }
  if (paged && view.rank == packed_rank + 1 && view.shape[view.rank - 2] != config.block_size) {
    refuse(name, "has shape " + shape_text(view) + " with pages of " + std::to_string(view.shape[view.rank - 2]) +
                     " tokens, but config.block_size is " + std::to_string(config.block_size) +
                     "; a page holds exactly one block, so the page size must equal the block size. Change one of the two.");
  }
  const Axis heads{"Hkv", num_heads, "config.num_kv_heads"};
  const Axis block{"Bk", config.block_size, "config.block_size"};
  if (paged && has_heads) return checker.tensor(name, view, kFloatDTypes, {{"num_pages"}, heads, block, row}, Role::kInput);
  if (paged) return checker.tensor(name, view, kFloatDTypes, {{"num_pages"}, block, row}, Role::kInput);
  if (has_heads) return checker.tensor(name, view, kFloatDTypes, {{"S"}, heads, row}, Role::kInput);
  return checker.tensor(name, view, kFloatDTypes, {{"S"}, row}, Role::kInput);
}

void check_key_extent(const Checker& checker, const char* name, const TensorView& keys, core::Geometry& geo) {
  const bool on_gpu = keys.device.type == DeviceType::kCuda;
  if (!geo.paged()) {
    check_token_count(name, keys.shape[0]);
    geo.total_k = keys.shape[0];
    if (on_gpu) {
      geo.max_seqlen_k = geo.max_seqlen_k > 0 ? std::min(geo.max_seqlen_k, geo.total_k) : geo.total_k;
      return;
    }
    check_cumulative_end("batch.cu_seqlens_k", geo.cu_seqlens_k[geo.num_seqs], name, keys.shape[0], "S");
    return;
  }
  geo.num_pages = keys.shape[0];
  check_token_count(name, geo.num_pages);
  if (on_gpu || checker.mode() == Mode::kSize || checker.options().trust_indices) return;
  const std::int64_t num_pages = keys.shape[0];
  for (std::int32_t s = 0; s < geo.num_seqs; ++s) {
    const std::int32_t* pages = geo.page_table + s * geo.stride_page_table;
    const std::int64_t num_live = geo.num_blocks(s);
    for (std::int64_t b = 0; b < num_live; ++b) {
      if (pages[b] >= 0 && pages[b] < num_pages) continue;
      refuse("batch.page_table", subscript(s) + subscript(b) + " is " + std::to_string(pages[b]) + ", but " + name + " has " +
                                     std::to_string(num_pages) + " pages; the id of a live page (sequence " + std::to_string(s) +
                                     " has " + std::to_string(num_live) + ") must be at least 0 and less than " +
                                     std::to_string(num_pages) +
                                     ". Correct the table, or batch.seqlens_k if that page is not live.");
    }
  }
}

void check_block_ids(const Checker& checker, const TensorView& block_ids, const core::Geometry& geo) {
  if (block_ids.device.type == DeviceType::kCuda || checker.mode() == Mode::kSize || checker.options().trust_indices) return;
  const std::int64_t num_heads = block_ids.shape[1], top_k = block_ids.shape[2];
  const auto fail = [](std::int64_t t, std::int64_t g, std::int64_t slot, std::int32_t id, const std::string& rule) {
    refuse("block_ids", subscript(t) + subscript(g) + subscript(slot) + " is " + std::to_string(id) + rule);
  };
  for (std::int32_t s = 0; s < geo.num_seqs; ++s) {
    for (std::int64_t i = 0; i < geo.seqlen_q(s); ++i) {
      const std::int64_t t = geo.query_begin(s) + i;
      const std::int64_t position = geo.position(s, i);
      const std::int64_t num_blocks = (geo.num_visible(s, position) + geo.block_size - 1) / geo.block_size;
      for (std::int64_t g = 0; g < num_heads; ++g) {
        const std::int32_t* ids = int32_data(block_ids) + t * block_ids.stride[0] + g * block_ids.stride[1];
        std::int32_t previous = -1;
        for (std::int64_t slot = 0; slot < top_k; ++slot) {
          const std::int32_t id = ids[slot];
          if (id >= 0 && slot > 0 && ids[slot - 1] == -1) {
            fail(t, g, slot, id, " after a -1; -1 may stand only in the tail of a list. Move the valid ids to the front.");
          } else if (id > previous && id < num_blocks) {
            previous = id;
          } else if (id < -1) {
            fail(t, g, slot, id,
                 "; an id must be 0 or more, or -1 in the tail for an unused slot. Use the output of select_blocks.");
          } else if (id >= num_blocks) {
            fail(t, g, slot, id,
                 ", but query " + std::to_string(t) + " (sequence " + std::to_string(s) + ", position " + std::to_string(position) +
                     ", " + std::to_string(geo.seqlen_k(s)) + " keys) sees keys of " + std::to_string(num_blocks) +
                     " blocks; an id must be in range, less than " + std::to_string(num_blocks) +
                     ". Select causally, or check batch.q_start and that the list is [T, Hkv, k] and not head-major.");
          } else if (id != -1) {
            fail(t, g, slot, id,
                 id == previous
                     ? " twice; the ids of a list must be unique. Drop the duplicate."
                     : " after " + std::to_string(previous) + "; the ids of a list must be strictly ascending. Sort the list.");
          }
        }
      }
    }
  }
}

void check_block_width(const char* name, const TensorView& view, const core::Geometry& geo) {
  const std::int64_t width = view.shape[2];
  if (width >= geo.max_num_blocks()) return;
  refuse(name, "has shape " + shape_text(view) + ", room for " + std::to_string(width) + " blocks, but the longest sequence has " +
                   std::to_string(geo.max_seqlen_k) + " keys in " + std::to_string(geo.max_num_blocks()) +
                   " blocks; it is too narrow. Allocate at least that many columns.");
}

}  // namespace openmsa::api
