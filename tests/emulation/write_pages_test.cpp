// write_pages against plain loops over elements: bit for bit, by copies of every width, and slots that lead nowhere.
#include <limits>

#include "calls.hpp"
#include "cuda/cuda.hpp"
#include "orders.hpp"
#include "support/pages.hpp"

namespace openmsa::test {
namespace {

class EmulatedWritePages : public emulation::InOrders {};
OPENMSA_IN_ORDERS(EmulatedWritePages);

void write(const PageWrite& pages) {
  const WritePagesArgs args = pages.args();
  run_emulated<core::WritePagesParams>({cuda::write_pages, nullptr}, {.k = args.k,
                                                                      .v = args.v,
                                                                      .k_idx = args.k_idx,
                                                                      .slots = args.slots,
                                                                      .k_pages = args.k_pages,
                                                                      .v_pages = args.v_pages,
                                                                      .k_idx_pages = args.k_idx_pages,
                                                                      .context = {}});
}

// Copies wider than an address or a stride allows would fault here, as they do on a GPU.
TEST_P(EmulatedWritePages, RowsGoToTheirSlotsAndNowhereElse) {
  Rng rng(1);
  for (const PageShape& shape : page_shapes()) {
    SCOPED_TRACE(shape.text());
    const PageWrite pages(shape, rng);
    const PageWrite expected = pages.expected();
    write(pages);
    EXPECT_TRUE(pages.same_pools(expected));
    EXPECT_FALSE(pages.k_idx_pages.untouched());
  }
}

// Rows before and behind them are written as ever.
TEST_P(EmulatedWritePages, SlotsBeyondThePoolAreReportedAndNotWritten) {
  Rng rng(2);
  for (const std::int64_t slot : {std::int64_t{48}, std::int64_t{1} << 31, std::int64_t{1} << 32, (std::int64_t{1} << 32) + 5,
                                  std::numeric_limits<std::int64_t>::max()}) {
    PageWrite pages({21, 2, 64, 64, 3, 16}, rng);
    pages.set_slot(9, slot);
    const PageWrite expected = pages.expected();
    try {
      write(pages);
      ADD_FAILURE() << "slot " << slot << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), "slots");
      const std::string text = error.what();
      EXPECT_NE(text.find("slots: [9] is " + std::to_string(slot) + ", beyond the 3 pages"), std::string::npos) << text;
    }
    EXPECT_TRUE(pages.same_pools(expected));
    pages.set_slot(9, -1);
    EXPECT_NO_THROW(write(pages));
  }
}

}  // namespace
}  // namespace openmsa::test
