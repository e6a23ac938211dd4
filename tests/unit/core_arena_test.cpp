// Arena, Workspace and the checked arithmetic below them.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "core/arena.hpp"

namespace openmsa::core {
namespace {

constexpr std::size_t kAlignment = Workspace::kAlignment;

template <typename Body>
Error error_of(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "nothing was thrown";
  return Error(ErrorCode::kDevice, "", "");
}

TEST(Arena, CountsWhatItWouldHandOut) {
  const auto allocate = [](Arena& arena) {
    arena.take<float>(3);
    arena.take<double>(1000);
    arena.take<char>(0);
    return arena.take<std::int32_t>(7);
  };
  Arena counting;
  EXPECT_EQ(allocate(counting), nullptr);
  Workspace workspace(counting.used());
  Arena arena(workspace.data(), workspace.bytes());
  std::int32_t* last = allocate(arena);
  ASSERT_NE(last, nullptr);
  EXPECT_EQ(arena.used(), counting.used());
  std::memset(last, 1, 7 * sizeof(std::int32_t));
  EXPECT_LE(reinterpret_cast<std::byte*>(last + 7), static_cast<std::byte*>(workspace.data()) + workspace.bytes());
}

TEST(Arena, PiecesAreAlignedAndApart) {
  Workspace workspace(16 * kAlignment);
  Arena arena(workspace.data(), workspace.bytes());
  char* previous_end = nullptr;
  for (const std::size_t count : {1, 255, 256, 257}) {
    char* piece = arena.take<char>(count);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece) % kAlignment, 0u);
    if (previous_end != nullptr) {
      EXPECT_GE(piece, previous_end);
    }
    previous_end = piece + count;
  }
}

TEST(Arena, RefusesMoreThanItHas) {
  Workspace workspace(2 * kAlignment);
  Arena arena(workspace.data(), workspace.bytes());
  arena.take<char>(kAlignment);
  const Error error = error_of([&] { arena.take<char>(kAlignment + 1); });
  EXPECT_EQ(error.code(), ErrorCode::kOutOfWorkspace);
  EXPECT_NE(std::string(error.what()).find(std::to_string(2 * kAlignment)), std::string::npos) << error.what();
}

TEST(Arena, RefusesSizesThatOverflow) {
  Arena counting;
  EXPECT_EQ(error_of([&] { counting.take<double>(std::numeric_limits<std::size_t>::max() / 4); }).code(),
            ErrorCode::kInvalidArgument);
  counting.take<char>(std::size_t{1} << 63);
  EXPECT_THROW(counting.take<char>(std::size_t{1} << 63), Error);
}

TEST(Workspace, OwnsAlignedMemoryAndMoves) {
  Workspace workspace(1000);
  void* data = workspace.data();
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % kAlignment, 0u);
  EXPECT_GE(workspace.bytes(), 1000u);
  std::memset(data, 7, 1000);
  Workspace moved(std::move(workspace));
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(workspace.data(), nullptr);
  EXPECT_EQ(workspace.bytes(), 0u);
  Workspace target(10);
  target = std::move(moved);
  EXPECT_EQ(static_cast<char*>(target.data())[999], 7);
}

TEST(Workspace, BorrowsWithoutOwning) {
  Workspace owner(4 * kAlignment);
  { Workspace borrowed(owner.data(), kAlignment, {}); }
  std::memset(owner.data(), 3, owner.bytes());  // still owner's
  EXPECT_THROW(Workspace(static_cast<char*>(owner.data()) + 8, kAlignment, {}), Error) << "not aligned";
}

TEST(Checked, MultipliesAndAddsUpToTheLimit) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(checked_mul<std::int64_t>(std::int64_t{1} << 31, std::int64_t{1} << 31), std::int64_t{1} << 62);
  EXPECT_EQ(checked_add<std::int64_t>(kMax - 5, 5), kMax);
  EXPECT_EQ(checked_mul<std::int64_t>(0, kMax), 0);
  EXPECT_THROW(checked_mul<std::int64_t>(std::int64_t{1} << 32, std::int64_t{1} << 31), Error);
  EXPECT_THROW(checked_add<std::int64_t>(kMax, 1), Error);
  EXPECT_THROW(checked_add<std::int64_t>(-kMax, -2), Error);
  EXPECT_THROW(checked_mul<std::int32_t>(65536, 32768), Error);
  EXPECT_THROW(checked_mul<std::size_t>(std::size_t{1} << 33, std::size_t{1} << 31), Error);
  const Error error = error_of([] { checked_mul<std::int32_t>(65536, 65536); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(std::string(error.what()).find("65536"), std::string::npos);
}

}  // namespace
}  // namespace openmsa::core
