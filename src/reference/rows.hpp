// What the oracle's loops stand on: rows of any dtype as fp64, and the walk over the batch's queries.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/params.hpp"
#include "core/thread_pool.hpp"

namespace openmsa::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <typename T>
void widen(const void* data, std::int64_t n, double* values) {
  for (std::int64_t i = 0; i < n; ++i) {
    if constexpr (sizeof(T) == 2) {
      values[i] = static_cast<float>(static_cast<const T*>(data)[i]);
    } else {
      values[i] = static_cast<double>(static_cast<const T*>(data)[i]);
    }
  }
}

// The n contiguous elements at `data`; every storage dtype is exact in fp64.
inline void load_row(const std::byte* data, DType dtype, std::int64_t n, std::vector<double>& values) {
  values.resize(static_cast<std::size_t>(n));
  switch (dtype) {
    case DType::kF64: widen<double>(data, n, values.data()); break;
    case DType::kF32: widen<float>(data, n, values.data()); break;
    case DType::kBF16: widen<BFloat16>(data, n, values.data()); break;
    case DType::kF16: widen<Float16>(data, n, values.data()); break;
    case DType::kI32: widen<std::int32_t>(data, n, values.data()); break;
    case DType::kI64: widen<std::int64_t>(data, n, values.data()); break;
  }
}

inline std::vector<double> load_row(const std::byte* data, DType dtype, std::int64_t n) {
  std::vector<double> values;
  load_row(data, dtype, n, values);
  return values;
}

// A float that rounds to the 16-bit types as `value` itself would. Nearest-even twice (fp64 to fp32 to 16 bits) can land on the
// wrong side of a tie; truncating with the last bit set whenever something was lost ("round to odd") cannot.
inline float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (std::isnan(value) || static_cast<double>(nearest) == value) return nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  if (std::abs(static_cast<double>(nearest)) > std::abs(value)) --bits;
  return std::bit_cast<float>(bits | 1u);
}

// Writes element i of the row at `data`, rounded once to its dtype (nearest even).
inline void store(std::byte* data, DType dtype, std::int64_t i, double value) {
  switch (dtype) {
    case DType::kF64: reinterpret_cast<double*>(data)[i] = value; break;
    case DType::kF32: reinterpret_cast<float*>(data)[i] = static_cast<float>(value); break;
    case DType::kBF16: reinterpret_cast<BFloat16*>(data)[i] = BFloat16(round_to_odd(value)); break;
    case DType::kF16: reinterpret_cast<Float16*>(data)[i] = Float16(round_to_odd(value)); break;
    case DType::kI32: reinterpret_cast<std::int32_t*>(data)[i] = static_cast<std::int32_t>(value); break;
    case DType::kI64: reinterpret_cast<std::int64_t*>(data)[i] = static_cast<std::int64_t>(value); break;
  }
}

inline void store_row(std::byte* data, DType dtype, const std::vector<double>& values) {
  for (std::size_t i = 0; i < values.size(); ++i) store(data, dtype, static_cast<std::int64_t>(i), values[i]);
}

// Address of view[t, h, 0], or of view[t, h] for a view of rank 2.
inline std::byte* address(const TensorView& view, std::int64_t t, std::int64_t h) {
  return static_cast<std::byte*>(view.data) + (t * view.stride[0] + h * view.stride[1]) * dtype_bytes(view.dtype);
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// sum += factor * row
inline void add_scaled(std::vector<double>& sum, double factor, const std::vector<double>& row) {
  for (std::size_t i = 0; i < row.size(); ++i) sum[i] += factor * row[i];
}

// max, except that a NaN stays.
inline double max_or_nan(double a, double b) { return std::isnan(a) || a > b ? a : b; }

// Key j (or value j) of sequence seq, KV head g.
inline void load_key(const core::KeyBlocks& keys, const core::Geometry& geo, std::int32_t seq, std::int64_t j, std::int32_t g,
                     std::int64_t n, std::vector<double>& values) {
  const std::int64_t b = j / geo.block_size;
  load_row(keys.block(geo, seq, b, g) + (j - b * geo.block_size) * keys.stride_token, keys.dtype, n, values);
}

struct Query {
  std::int32_t seq;          // its sequence
  std::int64_t token;        // t, its row in the packed batch
  std::int64_t position;     // p
  std::int64_t num_visible;  // it sees keys 0 .. num_visible-1
  std::int64_t num_visible_blocks;
};

// Query number i of a sequence.
inline Query query_of(const core::Geometry& geo, std::int32_t seq, std::int64_t i) {
  const std::int64_t p = geo.position(seq, i);
  const std::int64_t num_visible = geo.num_visible(seq, p);
  return {seq, geo.query_begin(seq) + i, p, num_visible, (num_visible + geo.block_size - 1) / geo.block_size};
}

// Calls body(query, worker) for each query token of the batch. Queries are independent, hence threads change nothing.
template <typename Body>
void for_each_query(const core::Geometry& geo, const core::Context& context, const Body& body) {
  core::parallel_for(context.num_threads, geo.total_q, [&](std::int64_t t, std::int32_t worker) {
    const std::int32_t seq = geo.seq_of_token(t);
    body(query_of(geo, seq, t - geo.query_begin(seq)), worker);
  });
}

}  // namespace openmsa::reference
