// write_pages with arbitrary slots and strides: it runs exactly when no slot is beyond the pool, and then the pool holds what plain loops
// say; refused, it has written nothing.
#include <cstring>
#include <vector>

#include "world.hpp"

namespace openmsa::fuzz {
namespace {

std::int64_t slot_near(Input& input, std::int64_t num_slots) {
  switch (input.byte() % 16) {
    case 0: return static_cast<std::int64_t>(input.word());
    case 1: return std::numeric_limits<std::int64_t>::max() - input.byte();
    case 2: return std::numeric_limits<std::int64_t>::min() + input.byte();
    case 3: return num_slots + input.range(-2, 2);
    case 4: return (std::int64_t{1} << 32) + input.byte();
    case 5: return -1;
    default: return num_slots > 0 ? input.byte() % num_slots : -1;
  }
}

void run(Input input) {
  const std::int64_t tokens = input.range(0, 40), heads = input.range(1, 4), dim = input.range(0, 20),
                     index_dim = input.range(0, 20);
  const std::int64_t pages = input.range(0, 5), block = input.range(1, 17), lead = input.range(0, 3);
  const DType dtype = input.flag() ? DType::kBF16 : DType::kF32;
  const std::int64_t size = dtype_bytes(dtype), width = lead + 2 * heads * dim + index_dim;
  Buffer rows(dtype, {tokens, width}), slots(DType::kI64, {tokens});
  Buffer pools[] = {{dtype, {pages, heads, block, dim}}, {dtype, {pages, heads, block, dim}}, {dtype, {pages, block, index_dim}}};
  std::vector<std::byte> right[] = {pools[0].bytes, pools[1].bytes, pools[2].bytes};
  for (std::size_t i = 0; i < rows.bytes.size(); ++i) rows.bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
  bool valid = true;
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t slot = slot_near(input, pages * block);
    std::memcpy(slots.bytes.data() + t * 8, &slot, 8);
    valid = valid && slot < pages * block;
  }
  const auto part = [&](std::int64_t first, std::int64_t num_heads, std::int64_t row, int rank) {
    TensorView view = rows.view;
    if (tokens > 0) view.data = rows.bytes.data() + first * size;
    view.rank = rank;
    view.shape =
        rank == 3 ? std::array{tokens, num_heads, row, std::int64_t{0}} : std::array{tokens, row, std::int64_t{0}, std::int64_t{0}};
    view.stride = rank == 3 ? std::array{width, row, std::int64_t{1}, std::int64_t{0}}
                            : std::array{width, std::int64_t{1}, std::int64_t{0}, std::int64_t{0}};
    return view;
  };
  const std::int64_t firsts[] = {lead, lead + heads * dim, lead + 2 * heads * dim}, dims[] = {dim, dim, index_dim};
  for (int i = 0; i < 3; ++i) {
    const std::int64_t num_heads = i < 2 ? heads : 1, bytes = dims[i] * size;
    for (std::int64_t t = 0; valid && t < tokens; ++t) {
      std::int64_t slot = 0;
      std::memcpy(&slot, slots.bytes.data() + t * 8, 8);
      for (std::int64_t h = 0; slot >= 0 && bytes > 0 && h < num_heads; ++h) {
        std::memcpy(right[i].data() + ((slot / block * num_heads + h) * block + slot % block) * bytes,
                    rows.bytes.data() + (t * width + firsts[i]) * size + h * bytes, static_cast<std::size_t>(bytes));
      }
    }
  }
  const bool ran = runs([&] {
    write_pages({.k = part(firsts[0], heads, dim, 3),
                 .v = part(firsts[1], heads, dim, 3),
                 .k_idx = part(firsts[2], 1, index_dim, 2),
                 .slots = slots.view,
                 .k_pages = pools[0].view,
                 .v_pages = pools[1].view,
                 .k_idx_pages = pools[2].view,
                 .options = {.backend = input.flag() ? Backend::kReference : Backend::kCpu, .num_threads = input.range(0, 3)}});
  });
  require(ran == valid, "write_pages runs exactly when every slot is in the pool or negative");
  for (int i = 0; i < 3; ++i) require(pools[i].bytes == right[i], "a pool holds the rows of its slots and nothing else");
}

}  // namespace
}  // namespace openmsa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  openmsa::fuzz::run({data, size});
  return 0;
}
