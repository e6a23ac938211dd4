#include <algorithm>
#include <bit>

#include "core/page_rows.hpp"
#include "cuda/cuda.hpp"
#include "cuda/instances.hpp"
#include "cuda/launch.hpp"
#include "cuda/smxx_write_pages.cuh"

namespace openmsa::cuda {
namespace {

// The widest unit that every address and every row is a multiple of.
int unit_bytes(const std::array<core::PageRows, 3>& parts) {
  std::uint64_t bits = 16;
  for (const core::PageRows& part : parts) {
    bits |= reinterpret_cast<std::uintptr_t>(part.rows) | reinterpret_cast<std::uintptr_t>(part.pages);
    for (const std::int64_t bytes :
         {part.head_bytes, part.stride_token, part.stride_head, part.stride_page, part.stride_page_head, part.stride_page_token}) {
      bits |= static_cast<std::uint64_t>(bytes);
    }
  }
  return 1 << std::countr_zero(bits);
}

template <typename F>
void with_unit(int bytes, F&& f) {
  with_size<2, 4, 8, 16>(bytes, [&](auto size) {
    if constexpr (size.value == 2) f(std::uint16_t{});
    if constexpr (size.value == 4) f(std::uint32_t{});
    if constexpr (size.value == 8) f(uint2{});
    if constexpr (size.value == 16) f(uint4{});
  });
}

}  // namespace

void write_pages(const core::WritePagesParams& params) {
  const DeviceGuard guard(params.k_pages.device.index);
  constexpr std::int32_t kMaxGridY = 65535;
  const auto parts = core::PageRows::all(params);
  const int unit = unit_bytes(parts);
  WritePagesParams device{};
  std::int32_t num_chunks = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const core::PageRows& part = parts[i];
    device.parts[i] = {part.rows,
                       part.pages,
                       static_cast<std::int32_t>(part.heads),
                       static_cast<std::int32_t>(part.head_bytes / unit),
                       part.stride_token / unit,
                       part.stride_head / unit,
                       part.stride_page / unit,
                       part.stride_page_head / unit,
                       part.stride_page_token / unit};
    device.chunks[i] = static_cast<std::int32_t>(blocks_for(part.heads * (part.head_bytes / unit), 32));
    num_chunks += device.chunks[i];
  }
  if (num_chunks == 0) return;  // rows of no width
  device.slots = static_cast<const std::int64_t*>(params.slots.data);
  device.num_tokens = static_cast<std::int32_t>(params.slots.shape[0]);
  device.block_size = static_cast<std::int32_t>(params.k_pages.shape[2]);
  device.num_pages = static_cast<std::int32_t>(params.k_pages.shape[0]);
  device.fault = device_fault(params.k_pages.device.index);
  const dim3 grid(blocks_for(device.num_tokens, kWriteTokens), static_cast<unsigned>(std::min(num_chunks, kMaxGridY)));
  with_unit(unit, [&](auto element) {
    launch(smxx_write_pages_kernel<decltype(element)>, grid, kWriteThreads, 0, params.context.stream, Order::kAfter, device);
  });
}

}  // namespace openmsa::cuda
