// block_ids: index data decides which memory is read, so every list is checked before the first read.
#include "api_calls.hpp"

namespace openmsa::test {
namespace {

class ApiBlockIds : public testing::TestWithParam<bool> {
 protected:
  // Queries 5..24 are sequence 2 (20 keys, positions 0..19), query 25 is sequence 3 (64 keys, position 63: blocks 0..3).
  void set(std::int64_t t, std::int64_t g, std::initializer_list<std::int32_t> ids) {
    std::int64_t slot = 0;
    for (const std::int32_t id : ids) calls.block_ids_in.set(calls.block_ids_in.at(t, g, slot++), id);
  }
  void expect_list_refused(std::int64_t t, std::int64_t g, std::initializer_list<std::int32_t> ids,
                           std::initializer_list<std::string> words) {
    const Tensor saved = calls.block_ids_in;
    set(t, g, ids);
    calls.sparse.block_ids = calls.block_ids_in.view();
    for (const Backend backend : {Backend::kAuto, Backend::kCpu, Backend::kReference}) {
      calls.sparse.options.backend = backend;
      expect_invalid([&] { sparse_attention(calls.sparse); }, "block_ids", words);
      expect_invalid([&] { sparse_decode(calls.sparse); }, "block_ids", words);
    }
    calls.expect_nothing_written();
    for (std::int64_t i = 0; i < saved.numel(); ++i) calls.block_ids_in.set(i, saved.get(i));
  }
  void expect_list_accepted(std::int64_t t, std::int64_t g, std::initializer_list<std::int32_t> ids) {
    set(t, g, ids);
    calls.sparse.block_ids = calls.block_ids_in.view();
    calls.sparse.options.backend = Backend::kReference;
    EXPECT_NO_THROW(sparse_attention(calls.sparse));
  }

  Calls calls{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(, ApiBlockIds, testing::Bool(), [](const auto& info) { return info.param ? "paged" : "packed"; });

TEST_P(ApiBlockIds, RefusesOutOfRange) {
  expect_list_refused(25, 1, {0, 1, 4}, {"block_ids[25][1][2] is 4", "sequence 3", "64 keys", "4 blocks", "in range"});
  expect_list_refused(25, 0, {0, 2147483647, -1}, {"block_ids[25][0][1] is 2147483647", "in range"});
  expect_list_refused(25, 0, {-2, -1, -1}, {"block_ids[25][0][0] is -2", "0 or more"});
  expect_list_refused(25, 0, {0, -2147483647 - 1, -1}, {"block_ids[25][0][1] is -2147483648"});
}

TEST_P(ApiBlockIds, RefusesBeyondTheCausalLimit) {
  expect_list_refused(7, 0, {0, 1, -1}, {"block_ids[7][0][1] is 1", "query 7", "position 2", "1 blocks", "causally"});
  expect_list_refused(20, 1, {0, 1, -1}, {"block_ids[20][1][1] is 1", "position 15"});
  expect_list_accepted(21, 1, {0, 1, -1});  // position 16 sees the first key of block 1
}

TEST_P(ApiBlockIds, RefusesUnsorted) {
  expect_list_refused(25, 0, {2, 1, 3}, {"block_ids[25][0][1] is 1 after 2", "strictly ascending"});
}

TEST_P(ApiBlockIds, RefusesDuplicates) { expect_list_refused(25, 0, {1, 1, 3}, {"block_ids[25][0][1] is 1 twice", "unique"}); }

TEST_P(ApiBlockIds, RefusesMinusOneBeforeAnId) {
  expect_list_refused(25, 0, {-1, 1, 3}, {"block_ids[25][0][1] is 1 after a -1", "only in the tail"});
  expect_list_refused(25, 0, {1, -1, 3}, {"block_ids[25][0][2] is 3 after a -1"});
  expect_list_refused(25, 0, {1, -1, 0}, {"block_ids[25][0][2] is 0"});
}

TEST_P(ApiBlockIds, RefusesAnIdForAQueryThatSeesNothing) {
  const std::int32_t q_start[] = {0, 0, 0, -1};
  calls.sparse.batch.q_start = make_view(q_start, {4});
  expect_list_refused(25, 0, {0, -1, -1},
                      {"block_ids[0][0]"});  // by now all earlier lists, made for other positions, are wrong too
  for (std::int64_t i = 0; i < calls.block_ids_in.numel(); ++i) calls.block_ids_in.set(i, -1);
  expect_list_refused(25, 0, {0, -1, -1}, {"block_ids[25][0][0] is 0", "position -1", "0 blocks"});
  expect_list_accepted(25, 0, {-1, -1, -1});
}

TEST_P(ApiBlockIds, AcceptsShortAndEmptyLists) {
  expect_list_accepted(25, 0, {3, -1, -1});
  expect_list_accepted(25, 1, {-1, -1, -1});
}

TEST_P(ApiBlockIds, TrustSkipsTheCheck) {
  // A harmless lie: block 0 stands twice, which the reference follows without leaving its memory.
  set(25, 0, {0, 0, -1});
  calls.sparse.block_ids = calls.block_ids_in.view();
  calls.sparse.options.backend = Backend::kReference;
  EXPECT_THROW(sparse_attention(calls.sparse), Error);
  calls.sparse.options.trust_indices = true;
  EXPECT_NO_THROW(sparse_attention(calls.sparse));
}

}  // namespace
}  // namespace openmsa::test
