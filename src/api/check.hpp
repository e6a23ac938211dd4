// The argument checks that all public functions share. They finish before any kernel starts, so a call that throws wrote nothing.
// Text rule: "<argument>: <value found>; <rule>. <how to mend it>."
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "core/geometry.hpp"
#include "core/params.hpp"
#include "core/registry.hpp"
#include "openmsa/batch.hpp"
#include "openmsa/config.hpp"
#include "openmsa/error.hpp"
#include "openmsa/tensor.hpp"
#include "openmsa/workspace.hpp"

namespace openmsa::api {

[[noreturn]] void refuse(const std::string& argument, const std::string& text, ErrorCode code = ErrorCode::kInvalidArgument);

// One axis that a tensor must have. `source` tells where the size comes from ("config.head_dim").
inline constexpr std::int64_t kAnySize = -1;
struct Axis {
  const char* label;
  std::int64_t size = kAnySize;
  const char* source = "";
};

// The axes of the tensors, in SPEC's letters.
inline Axis tokens() { return {"T"}; }
inline Axis tokens_of(const TensorView& view, const char* source) { return {"T", view.shape[0], source}; }
inline Axis q_heads(const MsaConfig& config) { return {"Hq", config.num_q_heads, "config.num_q_heads"}; }
inline Axis kv_heads(const MsaConfig& config) { return {"Hkv", config.num_kv_heads, "config.num_kv_heads"}; }
inline Axis head_row(const MsaConfig& config) { return {"D", config.head_dim, "config.head_dim"}; }
inline Axis index_row(const MsaConfig& config) { return {"Di", config.index_dim, "config.index_dim"}; }
inline Axis slots(const MsaConfig& config) { return {"k", config.top_k, "config.top_k"}; }

// The config with its default scales filled in, as kernels get it.
MsaConfig with_defaults(const MsaConfig& config);
// Refuses a config without an index branch where the call needs one.
void require_index_dim(const MsaConfig& config);

inline constexpr std::uint32_t kFloatDTypes = core::kStorageDTypes | core::dtype_bit(DType::kF64);

enum class Role { kInput, kOutput };
// kSize answers workspace_bytes(): only batch lengths are read, so every other tensor may still lack memory.
enum class Mode { kRun, kSize };

// Gathers the tensors of one call while checking each, then checks what they must have in common.
class Checker {
 public:
  Checker(const RunOptions& options, Mode mode);

  // Checks dtype, rank, shape, strides, alignment and the null pointer without reading the memory. Returns the view with the strides
  // that no element needs replaced by harmless ones, since callers may leave anything there.
  TensorView tensor(const char* name, const TensorView& view, std::uint32_t dtypes, std::initializer_list<Axis> axes, Role role);
  // The same for one of the batch's int32 tensors, whose memory is read in either mode.
  TensorView lengths(const char* name, const TensorView& view, std::initializer_list<Axis> axes);
  // Absent (a default TensorView) passes; anything else is checked like tensor().
  TensorView optional_tensor(const char* name, const TensorView& view, std::uint32_t dtypes, std::initializer_list<Axis> axes,
                             Role role);

  // One device for all, and one that the backend serves. Returns the backend to use. Nothing may be read from memory before this.
  // `any_alignment`: the stage's GPU kernels do without the 16-byte pieces that the others read rows in.
  Backend device(bool any_alignment = false) const;
  // No output shares memory with another tensor or with the workspace.
  void overlap() const;

  Mode mode() const { return mode_; }
  const RunOptions& options() const { return options_; }
  // float32, and float64 where the reference backend was asked for by name.
  std::uint32_t result_dtypes() const;
  std::int32_t num_threads() const;
  // Threads and stream; the arena is added when the call runs.
  core::Context context() const { return {.num_threads = num_threads(), .stream = options_.cuda_stream}; }

 private:
  struct Entry {
    const char* name;
    TensorView view;
    Role role;
  };
  TensorView check(const char* name, const TensorView& view, std::uint32_t dtypes, std::initializer_list<Axis> axes, Role role,
                   bool needs_memory);

  const RunOptions& options_;
  Mode mode_;
  std::vector<Entry> entries_;
};

// `other` must have the dtype of `base`.
void check_same_dtype(const char* name, const TensorView& other, const char* base_name, const TensorView& base);

// The batch's structure (ranks, shapes, packed or paged), memory unread; strides as Checker::tensor() leaves them.
Batch check_batch_structure(Checker& checker, const Batch& batch);
// Reads the lengths and builds the geometry. `total_q` is T as `q_name` has it; `q_name` is the tensor that T comes from.
core::Geometry make_geometry(const Batch& batch, const MsaConfig& config, const char* q_name, std::int64_t total_q);

// k, v or k_idx: [S, ...] if packed, pages of block_size tokens if paged. `num_heads`: Hkv for k and v, 0 for the index keys.
TensorView check_keys(Checker& checker, const char* name, const TensorView& view, const Batch& batch, const MsaConfig& config,
                      std::int32_t num_heads, Axis row);
// S (packed) or page ids and num_pages (paged) against the batch; page ids are left alone when the caller vouches for them.
// Fills in what the geometry takes from the keys. Contents on a GPU are checked there, where they are used.
void check_key_extent(const Checker& checker, const char* name, const TensorView& keys, core::Geometry& geo);
// Every list strictly ascending, -1 only in its tail, every block holding a key its query sees.
void check_block_ids(const Checker& checker, const TensorView& block_ids, const core::Geometry& geo);
// scores, block_max: wide enough for the longest sequence.
void check_block_width(const char* name, const TensorView& view, const core::Geometry& geo);

std::string shape_text(const TensorView& view);

}  // namespace openmsa::api
