#include "openmsa/cache.hpp"

#include <limits>

#include "api/dispatch.hpp"
#include "core/checked.hpp"

namespace openmsa {
namespace {

using api::Checker;
using api::Role;

// Kernels count in 32 bits what memory could not hold more of anyway.
void check_count(const char* name, std::int64_t count, const char* what, const char* mend) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  if (count <= kMax) return;
  api::refuse(name,
              "has " + std::to_string(count) + " " + what + "; there may be at most " + std::to_string(kMax) + ". " + mend + ".");
}

void check_slots(const TensorView& slots, std::int64_t num_slots) {
  const auto* data = static_cast<const std::int64_t*>(slots.data);
  for (std::int64_t t = 0; t < slots.shape[0]; ++t) {
    if (data[t] < num_slots) continue;
    api::refuse("slots", "[" + std::to_string(t) + "] is " + std::to_string(data[t]) + ", but k_pages has " +
                             std::to_string(num_slots) +
                             " slots; a slot is page * block_size + place in the page, or negative for a row that is left out. "
                             "Correct it, or pass the pool that it belongs to.");
  }
}

api::Call<core::WritePagesParams> prepare(const WritePagesArgs& args) {
  Checker checker(args.options, api::Mode::kRun);
  core::WritePagesParams params;
  // The pool says what rows must be.
  params.k_pages =
      checker.tensor("k_pages", args.k_pages, api::kFloatDTypes, {{"num_pages"}, {"Hkv"}, {"Bk"}, {"D"}}, Role::kOutput);
  const api::Axis pages{"num_pages", params.k_pages.shape[0], "k_pages.shape[0]"};
  const api::Axis heads{"Hkv", params.k_pages.shape[1], "k_pages.shape[1]"};
  const api::Axis block{"Bk", params.k_pages.shape[2], "k_pages.shape[2]"};
  const api::Axis row{"D", params.k_pages.shape[3], "k_pages.shape[3]"};
  params.v_pages = checker.tensor("v_pages", args.v_pages, api::kFloatDTypes, {pages, heads, block, row}, Role::kOutput);
  params.k_idx_pages = checker.tensor("k_idx_pages", args.k_idx_pages, api::kFloatDTypes, {pages, block, {"Di"}}, Role::kOutput);
  const api::Axis index_row{"Di", params.k_idx_pages.shape[2], "k_idx_pages.shape[2]"};
  params.k = checker.tensor("k", args.k, api::kFloatDTypes, {api::tokens(), heads, row}, Role::kInput);
  const api::Axis tokens = api::tokens_of(params.k, "k.shape[0]");
  params.v = checker.tensor("v", args.v, api::kFloatDTypes, {tokens, heads, row}, Role::kInput);
  params.k_idx = checker.tensor("k_idx", args.k_idx, api::kFloatDTypes, {tokens, index_row}, Role::kInput);
  params.slots = checker.tensor("slots", args.slots, core::dtype_bit(DType::kI64), {tokens}, Role::kInput);
  const std::pair<const char*, const TensorView*> others[] = {{"v_pages", &params.v_pages},
                                                              {"k_idx_pages", &params.k_idx_pages},
                                                              {"k", &params.k},
                                                              {"v", &params.v},
                                                              {"k_idx", &params.k_idx}};
  for (const auto& [name, view] : others) api::check_same_dtype(name, *view, "k_pages", params.k_pages);
  const std::int64_t num_slots = core::checked_mul(params.k_pages.shape[0], params.k_pages.shape[2]);
  check_count("k", params.k.shape[0], "tokens", "Write them in several calls");
  check_count("k", core::checked_mul(params.k.shape[1], params.k.shape[2]), "elements a token", "Check its shape");
  check_count("k_idx", params.k_idx.shape[1], "elements a token", "Check its shape");
  check_count("k_pages", num_slots, "slots", "Cut the pool in several");
  const Backend backend = checker.device(/*any_alignment=*/true);
  const auto& kernel = api::require_kernel("write_pages", core::kernels<core::WritePagesParams>(), args.options.backend, backend,
                                           {.dtype = params.k.dtype});
  if (backend != Backend::kCuda && !args.options.trust_indices) check_slots(params.slots, num_slots);
  checker.overlap();
  params.context = checker.context();
  return {params, &kernel};
}

}  // namespace

void write_pages(const WritePagesArgs& args) { api::run(prepare(args), args.options); }

}  // namespace openmsa
