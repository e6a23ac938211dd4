// Workspace: sizes asked for beforehand are enough, smaller ones are refused, and no memory but it is used.
#include <cstring>
#include <memory>

#include "api_calls.hpp"

namespace openmsa::test {
namespace {

TEST(ApiWorkspace, OwnsAlignedMemory) {
  const Workspace workspace(1000);
  EXPECT_EQ(workspace.bytes(), 1000u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(workspace.data()) % Workspace::kAlignment, 0u);
  std::memset(workspace.data(), 0x5a, workspace.bytes());
}

TEST(ApiWorkspace, MovesItsMemory) {
  Workspace a(512);
  void* const data = a.data();
  Workspace b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(a.data(), nullptr);  // NOLINT(bugprone-use-after-move): the moved-from state is what is tested
  Workspace c;
  c = std::move(b);
  EXPECT_EQ(c.data(), data);
  EXPECT_EQ(c.bytes(), 512u);
}

TEST(ApiWorkspace, RefusesMisalignedMemory) {
  alignas(Workspace::kAlignment) std::byte memory[1024];
  expect_invalid([&] { Workspace(memory + 64, 512, Device{}); }, "workspace", {"aligned", "256"});
}

class ApiWorkspaceSizes : public testing::TestWithParam<Backend> {};
INSTANTIATE_TEST_SUITE_P(, ApiWorkspaceSizes, testing::Values(Backend::kReference, Backend::kCpu),
                         [](const auto& info) { return backend_name(info.param); });

// A borrowed workspace of exactly the size asked for, dirty and with guards, gives what a call without one gives.
TEST_P(ApiWorkspaceSizes, ExactlyTheSizeAskedForIsEnough) {
  Calls calls, plain;
  bool any_scratch = false;
  for (std::size_t i = 0; i < calls.all().size(); ++i) {
    const Calls::Call call = calls.all()[i], plain_call = plain.all()[i];
    SCOPED_TRACE(call.name);
    call.options->backend = plain_call.options->backend = GetParam();
    plain_call.run();
    const std::size_t bytes = call.workspace_bytes();
    any_scratch = any_scratch || bytes > 0;
    const std::size_t guard = Workspace::kAlignment;
    Workspace memory(bytes + 2 * guard);
    auto* begin = static_cast<std::byte*>(memory.data());
    std::memset(begin, 0xff, memory.bytes());
    Workspace borrowed(begin + guard, bytes, Device{});
    call.options->workspace = &borrowed;
    call.run();
    for (std::size_t j = 0; j < guard; ++j) {
      ASSERT_EQ(begin[j], std::byte{0xff});
      ASSERT_EQ(begin[guard + bytes + j], std::byte{0xff});
    }
  }
  EXPECT_TRUE(any_scratch);
  EXPECT_TRUE(calls.scores.same_bits(plain.scores));
  EXPECT_TRUE(calls.block_ids.same_bits(plain.block_ids));
  EXPECT_TRUE(calls.out.same_bits(plain.out));
  EXPECT_TRUE(calls.lse.same_bits(plain.lse));
}

TEST_P(ApiWorkspaceSizes, RefusesLess) {
  int num_tried = 0;
  for (const Calls::Call& call : Calls().all()) {
    Calls calls;
    const auto all = calls.all();
    const Calls::Call& same = *std::find_if(all.begin(), all.end(), [&](const auto& c) { return c.name == call.name; });
    SCOPED_TRACE(same.name);
    same.options->backend = GetParam();
    // sparse_attention and sparse_decode share one answer, which the smaller of the two does not need in full.
    if (same.name == "sparse_attention" || same.name == "sparse_decode" || same.workspace_bytes() == 0) continue;
    Workspace small(same.workspace_bytes() - 1);
    same.options->workspace = &small;
    expect_refused(
        same.run, ErrorCode::kOutOfWorkspace, "options.workspace",
        {"holds " + std::to_string(small.bytes()) + " bytes", "needs " + std::to_string(small.bytes() + 1), "workspace_bytes"});
    Workspace none;
    same.options->workspace = &none;
    expect_refused(same.run, ErrorCode::kOutOfWorkspace, "options.workspace", {"holds 0 bytes"});
    calls.expect_nothing_written();
    ++num_tried;
  }
  EXPECT_GT(num_tried, 0);
}

// Sizes can be asked for before the tensors exist.
TEST_P(ApiWorkspaceSizes, NeedOnlyShapesAndLengths) {
  for (const bool paged : {false, true}) {
    Calls calls(paged);
    std::vector<std::size_t> with_memory, without;
    for (const Calls::Call& call : calls.all()) {
      call.options->backend = GetParam();
      with_memory.push_back(call.workspace_bytes());
    }
    for (const Calls::Slot& slot : calls.slots()) {
      if (slot.name.rfind("batch.", 0) != 0 || slot.name == "batch.page_table") slot.view->data = nullptr;
    }
    for (const Calls::Call& call : calls.all()) without.push_back(call.workspace_bytes());
    EXPECT_EQ(with_memory, without);
  }
}

TEST(ApiWorkspaceUse, RefusesScratchInsideATensor) {
  Calls calls;
  calls.index_select.options.backend = Backend::kReference;
  ASSERT_GT(workspace_bytes(calls.index_select), 0u);
  Workspace memory(std::size_t{1} << 16);  // holds either tensor whole, so that it overlaps nothing else
  calls.index_select.options.workspace = &memory;
  calls.index_select.block_ids.data = memory.data();
  expect_invalid([&] { index_select(calls.index_select); }, "options.workspace", {"shares memory with block_ids"});
  calls.index_select.block_ids = calls.block_ids.view();
  calls.index_select.q_idx.data = memory.data();
  expect_invalid([&] { index_select(calls.index_select); }, "options.workspace", {"shares memory with q_idx"});
  calls.expect_nothing_written();
}

TEST(ApiWorkspaceUse, RefusesGpuMemory) {
  Calls calls;
  Workspace gpu(reinterpret_cast<void*>(std::uintptr_t{1} << 20), std::size_t{1} << 30, {DeviceType::kCuda, 0});
  for (const Calls::Call& call : calls.all()) {
    call.options->backend = Backend::kReference;
    call.options->workspace = &gpu;
    expect_invalid(call.run, "options.workspace", {"GPU memory"});
  }
  calls.expect_nothing_written();
}

}  // namespace
}  // namespace openmsa::test
