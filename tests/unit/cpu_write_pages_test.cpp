// write_pages on the CPU, both backends, against plain loops over elements: bit for bit, and nothing else written.
#include <gtest/gtest.h>

#include <cstring>

#include "support/pages.hpp"
#include "support/run.hpp"

namespace openmsa::test {
namespace {

class CpuWritePages : public testing::TestWithParam<Backend> {};
INSTANTIATE_TEST_SUITE_P(Backends, CpuWritePages, testing::Values(Backend::kReference, Backend::kCpu),
                         [](const auto& info) { return backend_name(info.param); });

void write(const PageWrite& pages, Backend backend, std::int32_t num_threads = 0) {
  WritePagesArgs args = pages.args();
  args.options.backend = backend;
  args.options.num_threads = num_threads;
  write_pages(args);
}

TEST_P(CpuWritePages, RowsGoToTheirSlotsAndNowhereElse) {
  Rng rng(1);
  std::vector<PageShape> shapes = page_shapes();
  shapes.push_back({10, 2, 6, 5, 3, 4, DType::kF64, 1, 2, 3});
  for (const PageShape& shape : shapes) {
    SCOPED_TRACE(shape.text());
    const PageWrite pages(shape, rng);
    const PageWrite expected = pages.expected();
    write(pages, GetParam());
    EXPECT_TRUE(pages.same_pools(expected));
    EXPECT_FALSE(pages.k_idx_pages.untouched());
  }
}

TEST_P(CpuWritePages, PaddingAloneWritesNothing) {
  Rng rng(2);
  PageWrite pages({5, 2, 16, 16, 2, 16}, rng);
  for (std::int64_t t = 0; t < 5; ++t) pages.set_slot(t, -1 - t);
  write(pages, GetParam());
  const PageWrite none({0, 2, 16, 16, 2, 16}, rng), no_pool({0, 2, 16, 16, 0, 16}, rng);
  for (const PageWrite* call : {&none, &no_pool}) write(*call, GetParam());
  for (const PageWrite* call : std::initializer_list<const PageWrite*>{&pages, &none}) {
    EXPECT_TRUE(call->k_pages.untouched() && call->v_pages.untouched() && call->k_idx_pages.untouched());
  }
}

// Enough bytes for threads; rows fight for three slots, and the last of each stays.
TEST_P(CpuWritePages, OfRowsWithOneSlotTheLastStays) {
  Rng rng(3);
  const PageShape shape{600, 5, 64, 64, 2, 16};
  for (const std::int32_t num_threads : {1, 2, 7}) {
    PageWrite pages(shape, rng);
    for (std::int64_t t = 0; t < shape.num_tokens; ++t) {
      pages.set_slot(t, uniform(rng, 15, 17));
      for (std::int64_t i = 0; i < pages.rows.row_size(); ++i) pages.rows.set(pages.rows.at(t, i), static_cast<double>(t % 256));
    }
    const PageWrite expected = pages.expected();
    write(pages, GetParam(), num_threads);
    EXPECT_TRUE(pages.same_pools(expected)) << num_threads;
  }
}

// One buffer for keys and values, page beside page, as some serving engines lay them out, and index keys behind them.
TEST_P(CpuWritePages, PoolsMayInterleave) {
  Rng rng(4);
  const PageShape shape{9, 2, 16, 16, 3, 8};
  const PageWrite pages(shape, rng);
  const PageWrite expected = pages.expected();
  const std::int64_t page = shape.num_heads * shape.block_size * shape.head_dim, index_page = shape.block_size * shape.index_dim;
  const std::int64_t stride = 2 * page + index_page;
  std::vector<BFloat16> buffer(static_cast<std::size_t>(shape.num_pages * stride));
  std::memset(static_cast<void*>(buffer.data()), 0xff, buffer.size() * sizeof(BFloat16));
  WritePagesArgs args = pages.args();
  args.options.backend = GetParam();
  args.k_pages.data = buffer.data();
  args.v_pages.data = buffer.data() + page;
  args.k_idx_pages.data = buffer.data() + 2 * page;
  for (TensorView* pool : {&args.k_pages, &args.v_pages, &args.k_idx_pages}) pool->stride[0] = stride;
  write_pages(args);
  for (std::int64_t p = 0; p < shape.num_pages; ++p) {
    const auto same = [&](const Tensor& pool, std::int64_t first, std::int64_t size) {
      const auto* right = static_cast<const BFloat16*>(pool.view().data) + p * size;
      return std::memcmp(&buffer[static_cast<std::size_t>(p * stride + first)], right,
                         static_cast<std::size_t>(size) * sizeof(BFloat16)) == 0;
    };
    EXPECT_TRUE(same(expected.k_pages, 0, page) && same(expected.v_pages, page, page) &&
                same(expected.k_idx_pages, 2 * page, index_page))
        << "page " << p;
  }
}

}  // namespace
}  // namespace openmsa::test
