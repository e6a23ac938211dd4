// The paged cache: storing new keys, values and index keys in it.
#pragma once

#include "openmsa/tensor.hpp"
#include "openmsa/workspace.hpp"

namespace openmsa {

// For every token t with slots[t] >= 0, page p = slots[t] / Bk and place i = slots[t] % Bk in it:
//   k_pages[p,:,i] = k[t],  v_pages[p,:,i] = v[t],  k_idx_pages[p,i] = k_idx[t]
// A negative slot marks a row of padding, which is left out whatever it holds. A slot beyond the pool is an error. On the CPU nothing
// has been written then; a GPU leaves that row out and reports it as it does other broken index data (cuda.hpp).
// Give a slot once: of rows that share one the CPU keeps the last, a GPU any.
//
// One launch on a GPU; no scratch anywhere. Unlike elsewhere rows and pools may have any strides and addresses on a GPU: copies go by
// 16 bytes where all of them are multiples of that, else by 8, 4 or 2.
struct WritePagesArgs {
  TensorView k{};            // in:  [T, Hkv, D] f32 | bf16 | f16
  TensorView v{};            // in:  [T, Hkv, D], dtype of k
  TensorView k_idx{};        // in:  [T, Di], dtype of k
  TensorView slots{};        // in:  [T] int64
  TensorView k_pages{};      // out: [num_pages, Hkv, Bk, D], dtype of k; slots that no row goes to keep what they hold
  TensorView v_pages{};      // out: like k_pages
  TensorView k_idx_pages{};  // out: [num_pages, Bk, Di], dtype of k
  RunOptions options{};      // trust_indices: the CPU does not check slots either
};
void write_pages(const WritePagesArgs& args);

}  // namespace openmsa
