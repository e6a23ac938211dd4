// What write_pages refuses before anything is written.
#include <limits>

#include "api_calls.hpp"
#include "core/page_rows.hpp"
#include "support/pages.hpp"

namespace openmsa::test {
namespace {

constexpr std::int64_t kFar = std::numeric_limits<std::int64_t>::max();

// A sound call; `spoil` changes it, and it must be refused.
class ApiCache : public testing::TestWithParam<Backend> {
 protected:
  void expect_refusal(const std::function<void(WritePagesArgs&)>& spoil, const std::string& argument,
                      std::initializer_list<std::string> words, ErrorCode code = ErrorCode::kInvalidArgument) {
    WritePagesArgs args = pages_.args();
    args.options.backend = GetParam();
    spoil(args);
    expect_refused([&] { write_pages(args); }, code, argument, words);
    EXPECT_TRUE(pages_.k_pages.untouched() && pages_.v_pages.untouched() && pages_.k_idx_pages.untouched());
  }

  Rng rng_{7};
  PageWrite pages_{{6, 2, 16, 32, 4, 16, DType::kF32}, rng_};
};
INSTANTIATE_TEST_SUITE_P(Backends, ApiCache, testing::Values(Backend::kAuto, Backend::kReference),
                         [](const auto& info) { return backend_name(info.param); });

TEST_P(ApiCache, RefusesTensorsThatDoNotFitThePool) {
  using Args = WritePagesArgs;
  TensorView Args::*const tensors[] = {&Args::k,       &Args::v,       &Args::k_idx,      &Args::slots,
                                       &Args::k_pages, &Args::v_pages, &Args::k_idx_pages};
  const char* const names[] = {"k", "v", "k_idx", "slots", "k_pages", "v_pages", "k_idx_pages"};
  for (std::size_t i = 0; i < std::size(tensors); ++i) {
    SCOPED_TRACE(names[i]);
    const auto spoiled = [&, i](const std::function<void(TensorView&)>& spoil) {
      return [&, i, spoil](Args& args) { spoil(args.*tensors[i]); };
    };
    expect_refusal(spoiled([](TensorView& view) { view = {}; }), names[i], {"is not given"});
    expect_refusal(spoiled([](TensorView& view) { view.dtype = DType::kI32; }), names[i], {"has dtype int32"});
    expect_refusal(spoiled([](TensorView& view) { view.rank = view.rank == 1 ? 2 : view.rank - 1; }), names[i], {"has rank"});
    expect_refusal(spoiled([](TensorView& view) { view.data = nullptr; }), names[i], {"null"});
    expect_refusal(spoiled([](TensorView& view) { view.stride[view.rank - 1] = 2; }), names[i], {"stride 2 on its last axis"});
    expect_refusal(spoiled([](TensorView& view) { view.stride[0] = -1; }), names[i], {"must not be negative"});
    expect_refusal(spoiled([](TensorView& view) { view.device.type = DeviceType::kCuda; }), i == 4 ? "v_pages" : names[i],
                   {"is on"});
    if (i == 3 || i == 4) continue;
    expect_refusal(spoiled([](TensorView& view) { view.dtype = DType::kBF16; }), names[i],
                   {"has dtype bfloat16, but k_pages has float32"});
    expect_refusal(spoiled([](TensorView& view) { --view.shape[view.rank - 1]; }), i == 6 ? "k_idx" : names[i], {"but must be"});
  }
  expect_refusal([](Args& args) { --args.v.shape[0]; }, "v", {"is 5 but must be 6 = k.shape[0]"});
  expect_refusal([](Args& args) { --args.slots.shape[0]; }, "slots", {"is 5 but must be 6 = k.shape[0]"});
  expect_refusal([](Args& args) { --args.k_idx_pages.shape[1]; }, "k_idx_pages", {"is 15 but must be 16 = k_pages.shape[2]"});
  expect_refusal([](Args& args) { --args.v_pages.shape[0]; }, "v_pages", {"is 3 but must be 4 = k_pages.shape[0]"});
}

TEST_P(ApiCache, RefusesSlotsBeyondThePool) {
  for (const std::int64_t slot : {std::int64_t{64}, std::int64_t{1} << 31, std::int64_t{1} << 32, kFar}) {
    pages_.set_slot(3, slot);
    expect_refusal([](WritePagesArgs&) {}, "slots",
                   {"slots[3] is " + std::to_string(slot), "k_pages has 64 slots", "negative for a row that is left out"});
  }
  pages_.set_slot(3, 63);
  pages_.set_slot(0, std::numeric_limits<std::int64_t>::min());
  WritePagesArgs args = pages_.args();
  const PageWrite expected = pages_.expected();
  write_pages(args);
  EXPECT_TRUE(pages_.same_pools(expected));
}

TEST_P(ApiCache, RefusesMemoryThatOverlaps) {
  expect_refusal([](WritePagesArgs& args) { args.v_pages.data = args.k_pages.data; }, "k_pages", {"shares memory with v_pages"});
  expect_refusal([](WritePagesArgs& args) { args.k.data = args.v_pages.data; }, "v_pages", {"shares memory with k"});
  // Pages that reach into one another, though the first rows of both interleave.
  expect_refusal(
      [](WritePagesArgs& args) {
        args.v_pages.data = static_cast<float*>(args.k_pages.data) + 16 * 16;
        args.k_pages.shape[0] = args.v_pages.shape[0] = args.k_idx_pages.shape[0] = 1;
        for (std::int64_t t = 0; t < 6; ++t) static_cast<std::int64_t*>(args.slots.data)[t] = -1;
      },
      "k_pages", {"shares memory with v_pages"});
  expect_refusal([](WritePagesArgs& args) { args.k_pages.stride[0] = 16; }, "k_pages", {"must not overlap itself"});
}

TEST_P(ApiCache, RefusesCountsBeyond32Bits) {
  constexpr std::int64_t kMany = std::int64_t{1} << 31;
  expect_refusal(
      [](WritePagesArgs& args) {
        for (TensorView* pool : {&args.k_pages, &args.v_pages, &args.k_idx_pages}) pool->shape[0] = kMany / 16;
      },
      "k_pages", {"has 2147483648 slots; there may be at most 2147483647"});
  expect_refusal(
      [](WritePagesArgs& args) {
        for (TensorView* rows : {&args.k, &args.v, &args.k_idx, &args.slots}) rows->shape[0] = kMany;
        for (TensorView* rows : {&args.k, &args.v, &args.k_idx}) rows->stride[0] = 0;
      },
      "k", {"has 2147483648 tokens", "several calls"});
}

TEST(ApiCacheOptions, TrustedSlotsAreStillWrittenAndOptionsAreChecked) {
  Rng rng(8);
  const PageWrite pages({6, 2, 16, 32, 4, 16}, rng);
  const PageWrite expected = pages.expected();
  WritePagesArgs args = pages.args();
  args.options.trust_indices = true;
  args.options.backend = Backend::kCuda;
  expect_invalid([&] { write_pages(args); }, "options.backend", {"is cuda", "on the CPU"});
  args.options.backend = Backend::kAuto;
  args.options.num_threads = -1;
  expect_invalid([&] { write_pages(args); }, "options.num_threads", {"is -1"});
  args.options.num_threads = 2;
  write_pages(args);
  EXPECT_TRUE(pages.same_pools(expected));
}

// Page 131,072 of 16,384 elements each: the product passes 2^31.
TEST(ApiCacheOffsets, Are64Bit) {
  const auto* base = reinterpret_cast<const std::byte*>(std::uintptr_t{1} << 40);  // an address to count from; nothing is read
  const core::PageRows part =
      core::PageRows::of(make_view(base, DType::kBF16, {1 << 20, 1, 16384}), make_view(base, DType::kBF16, {131073, 1, 128, 128}));
  EXPECT_EQ(part.target(131072, 3, 0) - base, (std::int64_t{131072} * 16384 + 3 * 128) * 2);
  EXPECT_EQ(part.source((1 << 20) - 1, 0) - base, ((std::int64_t{1} << 20) - 1) * 16384 * 2);
}

}  // namespace
}  // namespace openmsa::test
