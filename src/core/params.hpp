// What a backend gets for each stage once the api layer has checked everything: sizes are consistent, pointers are on the right
// device, defaults are filled in. Backends report nothing and validate nothing.
#pragma once

#include "core/arena.hpp"
#include "core/geometry.hpp"
#include "openmsa/config.hpp"
#include "openmsa/tensor.hpp"

namespace openmsa::core {

struct Context {
  std::int32_t num_threads = 1;  // resolved, at least 1
  void* stream = nullptr;        // CUDA only
  Arena* arena = nullptr;        // scratch; counting only while workspace_bytes() asks for a size
};

struct BlockScoresParams {
  MsaConfig config;
  Geometry geo;
  TensorView q_idx;   // [T, Hkv, Di]
  KeyBlocks k_idx;    // [S, Di] or [num_pages, Bk, Di]
  TensorView scores;  // [T, Hkv, num_blocks] f32 (f64 on the reference backend)
  Context context;
};

struct SelectBlocksParams {
  MsaConfig config;
  Geometry geo;
  TensorView scores;     // [T, Hkv, num_blocks] f32 (f64 on the reference backend)
  TensorView block_ids;  // [T, Hkv, k] int32
  Context context;
};

struct IndexSelectParams {
  MsaConfig config;
  Geometry geo;
  TensorView q_idx;      // [T, Hkv, Di]
  KeyBlocks k_idx;       // [S, Di] or [num_pages, Bk, Di]
  TensorView block_ids;  // [T, Hkv, k] int32
  Context context;
};

struct SparseAttentionParams {
  MsaConfig config;
  Geometry geo;
  TensorView q;          // [T, Hq, D]
  KeyBlocks k, v;        // [S, Hkv, D] or [num_pages, Hkv, Bk, D]
  TensorView block_ids;  // [T, Hkv, k] int32, checked (or trusted by the caller's word)
  TensorView out;        // [T, Hq, D]
  TensorView lse;        // [T, Hq] f32 (f64 on the reference backend), may be absent
  Context context;
};

struct MsaAttentionParams {
  MsaConfig config;
  Geometry geo;
  TensorView q;          // [T, Hq, D]
  KeyBlocks k, v;        // [S, Hkv, D] or [num_pages, Hkv, Bk, D]
  TensorView q_idx;      // [T, Hkv, Di]
  KeyBlocks k_idx;       // [S, Di] or [num_pages, Bk, Di]
  TensorView out;        // [T, Hq, D]
  TensorView lse;        // [T, Hq] f32 (f64 on the reference backend), may be absent
  TensorView block_ids;  // [T, Hkv, k] int32, may be absent
  Context context;
};

struct DenseAttentionParams {
  MsaConfig config;
  Geometry geo;
  TensorView q;          // [T, Hq, D]
  KeyBlocks k, v;        // [S, Hkv, D] or [num_pages, Hkv, Bk, D]
  TensorView out;        // [T, Hq, D]
  TensorView lse;        // [T, Hq] f32, may be absent
  TensorView block_max;  // [T, Hq, num_blocks] f32, may be absent
  Context context;
};

// Gradients of attention, packed keys. Of sparse_attention where block_ids is given, else of dense_attention. Unlike every call
// above this one and the next come with T = 0 too: the gradients of the keys are zeros then.
struct AttentionBackwardParams {
  MsaConfig config;
  Geometry geo;
  TensorView q;              // [T, Hq, D]
  KeyBlocks k, v;            // [S, Hkv, D]
  TensorView block_ids;      // [T, Hkv, k] int32, checked; absent: all visible keys
  TensorView out;            // [T, Hq, D]
  TensorView lse;            // [T, Hq] f32 (f64 on the reference backend)
  TensorView d_out;          // [T, Hq, D]
  TensorView d_q, d_k, d_v;  // [T, Hq, D], [S, Hkv, D], [S, Hkv, D]
  bool deterministic;
  Context context;
};

struct IndexKlParams {
  MsaConfig config;
  Geometry geo;
  TensorView q;             // [T, Hq, D]
  KeyBlocks k;              // [S, Hkv, D]
  TensorView lse;           // [T, Hq] f32 (f64 on the reference backend)
  TensorView q_idx;         // [T, Hkv, Di]
  KeyBlocks k_idx;          // [S, Di]
  TensorView block_ids;     // [T, Hkv, k] int32, checked; absent: all visible keys
  TensorView loss;          // [1] f32 (f64 on the reference backend), may be absent
  TensorView d_q_idx;       // [T, Hkv, Di], may be absent together with d_k_idx
  TensorView d_k_idx;       // [S, Di]
  std::int64_t num_tokens;  // T of the mean, at least 1
  bool deterministic;
  Context context;
};

// Sizes fit 32 bits: tokens, slots of the pool, elements of a token's row.
struct WritePagesParams {
  TensorView k, v;              // [T, Hkv, D]
  TensorView k_idx;             // [T, Di]
  TensorView slots;             // [T] int64, checked where the host can read them
  TensorView k_pages, v_pages;  // [num_pages, Hkv, Bk, D]
  TensorView k_idx_pages;       // [num_pages, Bk, Di]
  Context context;
};

}  // namespace openmsa::core
