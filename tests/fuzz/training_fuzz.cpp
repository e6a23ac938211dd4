// The training calls. Half of the inputs hold the CPU engine against the oracle on small random problems: data are small integers, so
// every dot product is exact and what fp32 may lose elsewhere has a bound. The other half spoils offsets, lists and tensors: a call
// runs exactly when nothing of its own is spoiled, and a refused one writes nothing.
#include <algorithm>
#include <cmath>

#include "world.hpp"

namespace openmsa::fuzz {
namespace {

constexpr double kUnit = 0x1p-24;     // of fp32, in which the engine computes
constexpr double kLargest = 2;        // |x| of q, k, v, d_out, q_idx, k_idx
constexpr double kUnderflow = 1e-30;  // what fp32 takes for 0 at the most

double unit_of(DType dtype) { return dtype == DType::kF32 ? kUnit : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8; }
// Both results are rounded to the dtype: relatively, and below f16's normal numbers absolutely.
double rounding(DType dtype, double value) {
  return 2.02 * unit_of(dtype) * std::abs(value) + (dtype == DType::kF16 ? 0x1p-24 : 0) + kUnderflow;
}

void require_close(double found, double expected, double bound, const char* rule) {
  if (std::abs(found - expected) <= bound) return;  // not for NaN
  char text[200];
  std::snprintf(text, sizeof(text), "%s: found %.9g, expected %.9g, bound %.3g", rule, found, expected, bound);
  require(false, text);
}

// Constant in its first element, so that the oracle's sums over queries of a weight times such a row tell the sum of the weights.
void set_first_of_rows(Buffer& rows, std::int64_t width) {
  for (std::int64_t i = 0; i < rows.view.numel(); i += width) rows.set(i, kLargest);
}

// The longest sequence's keys and a KV head's query rows: the most terms in a sum over keys and in one over rows.
struct Terms {
  double keys = 0, rows = 0;
  explicit Terms(const World& world) : rows(static_cast<double>(world.total_q) * world.config.group_size()) {
    for (const std::int32_t seqlen : world.seqlens_k) keys = std::max(keys, static_cast<double>(seqlen));
  }
};

// Relative error of exp(scale * score - lse): some roundings of terms up to `largest`, and the error of lse as a sum over keys.
double probability_error(double scale, double dim, double num_keys) {
  const double largest = scale * kLargest * kLargest * dim + std::log(num_keys + 1);
  return kUnit * (8 * largest + num_keys + 8);
}

void check_gradients(const World& world, const World::Results& forward, const World::TrainingResults& found,
                     const World::TrainingResults& expected) {
  const MsaConfig& config = world.config;
  const std::int64_t Hq = config.num_q_heads, Hkv = config.num_kv_heads, D = config.head_dim;
  const Terms terms(world);
  const double scale = config.effective_softmax_scale();
  const double error = probability_error(scale, static_cast<double>(D), terms.keys);
  const double unit = unit_of(world.dtype);

  double largest_score = 0, largest_delta_error = 0;
  for (std::int64_t row = 0; row < world.total_q * Hq; ++row) {
    // delta = <d_out, out> is worked out from the rounded `out`; |dP - delta| is at most twice the largest |<d_out, v>|.
    double delta = 0, score = 0;
    for (std::int64_t i = row * D; i < (row + 1) * D; ++i) {
      delta += std::abs(world.d_out.get(i) * forward.out.get(i));
      score += 2 * kLargest * std::abs(world.d_out.get(i));
    }
    const double delta_error =
        1.01 * (unit + error + static_cast<double>(D + 2) * kUnit) * delta + rounding(world.dtype, 0) * score;
    const double bound = scale * kLargest * ((error + (terms.keys + 4) * kUnit) * score + delta_error);
    const bool sees_nothing = std::isinf(forward.lse.get(row));
    for (std::int64_t i = row * D; i < (row + 1) * D; ++i) {
      const double value = expected.d_q.get(i);
      require_close(found.d_q.get(i), value, sees_nothing ? 0 : bound + rounding(world.dtype, value),
                    "d_q agrees with the reference");
    }
    largest_score = std::max(largest_score, score);
    largest_delta_error = std::max(largest_delta_error, delta_error);
  }

  const double row_error = error + (terms.rows + 4) * kUnit;
  for (std::int64_t row = 0; row < world.total_k * Hkv; ++row) {
    // The sum of the key's probabilities.
    const double first = expected.d_v.get(row * D);
    const double weight = (first + rounding(world.dtype, first)) / kLargest;
    const double d_k_bound = weight * scale * kLargest * (row_error * largest_score + largest_delta_error);
    const double d_v_bound = weight * kLargest * row_error;
    for (std::int64_t i = row * D; i < (row + 1) * D; ++i) {
      const double d_k = expected.d_k.get(i), d_v = expected.d_v.get(i);
      require_close(found.d_k.get(i), d_k, d_k_bound + rounding(world.dtype, d_k), "d_k agrees with the reference");
      require_close(found.d_v.get(i), d_v, d_v_bound + rounding(world.dtype, d_v), "d_v agrees with the reference");
    }
  }
}

// `gradients`: those of attention by the reference, whose d_v tells the teacher's weights.
void check_kl(const World& world, std::int64_t num_tokens, const World::TrainingResults& gradients,
              const World::TrainingResults& found, const World::TrainingResults& expected) {
  const MsaConfig& config = world.config;
  const std::int64_t Hkv = config.num_kv_heads, D = config.head_dim, Di = config.index_dim;
  const Terms terms(world);
  const double index_scale = config.effective_index_scale(), scale = config.effective_softmax_scale();
  const auto dim = static_cast<double>(D), index_dim = static_cast<double>(Di), num_rows = static_cast<double>(world.total_q * Hkv);
  const double weight =
      1 / (static_cast<double>(num_tokens > 0 ? num_tokens : std::max<std::int64_t>(world.total_q, 1)) * static_cast<double>(Hkv));
  const double factor = index_scale * weight;
  const double teacher_error = probability_error(scale, dim, terms.keys) + config.group_size() * kUnit;
  const double student_error = probability_error(index_scale, index_dim, terms.keys);

  // No probability is smaller than the exponential of minus the spread of its row's scores and the logarithm of their number.
  const double largest_log = 2 * kLargest * kLargest * (scale * dim + index_scale * index_dim) + 2 * std::log(terms.keys + 1);
  const double loss = expected.loss.get(0);
  require_close(found.loss.get(0), loss,
                weight * num_rows * ((teacher_error + (terms.keys + 8) * kUnit) * (largest_log + 1) + student_error) +
                    rounding(DType::kF32, loss),
                "the loss agrees with the reference");
  const double bound = factor * kLargest * (teacher_error + student_error + 2 * (terms.keys + 4) * kUnit);
  for (std::int64_t i = 0; i < expected.d_q_idx.view.numel(); ++i) {
    const double value = expected.d_q_idx.get(i);
    require_close(found.d_q_idx.get(i), value, bound + rounding(world.dtype, value), "d_q_idx agrees with the reference");
  }
  for (std::int64_t j = 0; j < world.total_k; ++j) {
    double teacher = 0;
    for (std::int64_t g = 0; g < Hkv; ++g) {
      const double sum = gradients.d_v.get((j * Hkv + g) * D);
      teacher += (sum + rounding(world.dtype, sum)) / kLargest / config.group_size();
    }
    // Its first element is factor * kLargest * (student - teacher).
    const double first = expected.d_k_idx.get(j * Di);
    const double student = std::max(0.0, (first + rounding(world.dtype, first)) / (factor * kLargest) + teacher);
    const double sum_error = (num_rows + 4) * kUnit;
    const double key_bound = factor * kLargest * (teacher * (teacher_error + sum_error) + student * (student_error + sum_error));
    for (std::int64_t i = j * Di; i < (j + 1) * Di; ++i) {
      const double value = expected.d_k_idx.get(i);
      require_close(found.d_k_idx.get(i), value, key_bound + rounding(world.dtype, value), "d_k_idx agrees with the reference");
    }
  }
}

World::TrainingResults train(const World& world, const Buffer* block_ids, const World::Results& forward, std::int64_t num_tokens,
                             bool deterministic, const RunOptions& options) {
  World::TrainingResults results = world.training_results();
  auto kl = world.index_kl(block_ids, forward, results);
  kl.num_tokens = num_tokens;
  kl.deterministic = deterministic;
  kl.options = options;
  if (block_ids != nullptr) {
    auto args = world.sparse_backward(*block_ids, forward, results);
    args.deterministic = deterministic;
    args.options = options;
    require(runs([&] { sparse_attention_backward(args); }), "every valid problem is taken");
  } else {
    auto args = world.dense_backward(forward, results);
    args.deterministic = deterministic;
    args.options = options;
    require(runs([&] { dense_attention_backward(args); }), "every valid problem is taken");
  }
  require(runs([&] { index_kl_loss(kl); }), "every valid problem is taken");
  return results;
}

void require_same(const World::TrainingResults& a, const World::TrainingResults& b) {
  require(a.d_q.bytes == b.d_q.bytes && a.d_k.bytes == b.d_k.bytes && a.d_v.bytes == b.d_v.bytes && a.loss.bytes == b.loss.bytes &&
              a.d_q_idx.bytes == b.d_q_idx.bytes && a.d_k_idx.bytes == b.d_k_idx.bytes,
          "threads do not change results");
}

void compare(Input& input, World& world) {
  world.choose_cpu_sizes(input);
  const MsaConfig& config = world.config;
  const std::int64_t num_tokens = input.flag() ? input.range(0, 255) : 0;
  const bool deterministic = input.flag(), sparse = input.flag();
  const bool large = input.byte() % 8 == 7;
  world.choose_lengths(input, large ? 4 : 2, large ? 255 : 130, large ? 70 : 12);
  world.limit_work(10'000'000);
  world.allocate(input.word());
  set_first_of_rows(world.d_out, config.head_dim);
  set_first_of_rows(world.q_idx, config.index_dim);

  const RunOptions reference{.backend = Backend::kReference};
  World::Results forward = world.results();
  const Buffer* const block_ids = sparse ? &forward.block_ids : nullptr;
  require(sparse ? world.index_select(forward, reference) && world.sparse_attention(forward.block_ids, forward, reference)
                 : world.dense_attention(forward, reference),
          "the reference takes every valid problem");
  const auto expected = train(world, block_ids, forward, num_tokens, false, reference);
  const auto one = train(world, block_ids, forward, num_tokens, false, {.backend = Backend::kCpu, .num_threads = 1});
  const auto three = train(world, block_ids, forward, num_tokens, deterministic, {.backend = Backend::kCpu, .num_threads = 3});
  check_gradients(world, forward, one, expected);
  check_kl(world, num_tokens, expected, one, expected);
  require_same(one, three);
}

// True if a call with this tensor must be refused now.
bool spoil(Input& input, TensorView& view) {
  const bool empty = view.numel() == 0;
  const int last = view.rank - 1;
  const int axis = input.byte() % view.rank;
  switch (input.byte() % 7) {
    case 0: view.dtype = view.dtype == DType::kF32 ? DType::kBF16 : DType::kF32; return true;
    case 1: view.rank += input.flag() && view.rank < kMaxRank ? 1 : -1; return true;
    case 2: view.shape[axis] += input.flag() ? 1 : -1; return true;
    case 3: view.data = nullptr; return !empty;
    case 4: view.data = static_cast<std::byte*>(view.data) + (empty ? 0 : 1); return !empty;
    case 5: view.stride[last] = 2; return !empty && view.shape[last] > 1;
    default: view.stride[axis] = -view.stride[axis]; return !empty && view.shape[axis] > 1;
  }
}

void refuse(Input& input, World& world) {
  MsaConfig& config = world.config;
  config.num_kv_heads = input.range(1, 2);
  config.num_q_heads = config.num_kv_heads * input.range(1, 2);
  config.head_dim = config.index_dim = 16;
  config.block_size = 16;
  config.top_k = input.range(1, 4);
  world.dtype = input.flag() ? DType::kF32 : DType::kF16;
  const RunOptions options{.backend = input.flag() ? Backend::kReference : Backend::kCpu, .num_threads = 1};
  world.choose_lengths(input, 5, 60, 20);
  if (input.flag()) {
    for (std::vector<std::int32_t>* values : {&world.cu_seqlens_q, &world.cu_seqlens_k, &world.q_start}) {
      for (std::int32_t& value : *values) value = input.int32_near(value);
    }
  }
  if (input.byte() % 4 == 0) world.max_seqlen_q = input.range(-1, 30);
  if (input.byte() % 4 == 0) world.max_seqlen_k = input.range(-1, 70);
  world.allocate(input.word());
  const bool valid = world.offsets_hold() && world.cu_seqlens_k.back() == world.total_k;

  // Without a forward pass out and lse are NaN.
  World::Results forward = world.results();
  bool lists_hold = valid;
  if (valid) {
    const RunOptions reference{.backend = Backend::kReference};
    require(world.index_select(forward, reference), "a valid batch runs");
    if (input.flag()) require(world.sparse_attention(forward.block_ids, forward, reference), "a valid batch runs");
    lists_hold = world.bend_block_ids(input, forward.block_ids);
  }

  World::TrainingResults results = world.training_results();
  auto sparse = world.sparse_backward(forward.block_ids, forward, results);
  auto dense = world.dense_backward(forward, results);
  auto kl = world.index_kl(input.flag() ? &forward.block_ids : nullptr, forward, results);
  sparse.options = dense.options = kl.options = options;
  const bool only_loss = input.byte() % 4 == 0, only_gradients = input.byte() % 4 == 0;
  if (only_loss) kl.d_q_idx = kl.d_k_idx = {};
  if (only_gradients) kl.loss = {};
  kl.num_tokens = input.byte() % 4 == 0 ? input.range(-1, 30) : 0;

  bool runs_sparse = lists_hold, runs_dense = valid;
  bool runs_kl = valid && (lists_hold || !kl.block_ids.given()) && !(only_loss && only_gradients) && kl.num_tokens >= 0;
  if (input.flag()) {
    TensorView* const of_sparse[] = {&sparse.q,   &sparse.k,     &sparse.v,   &sparse.block_ids, &sparse.out,
                                     &sparse.lse, &sparse.d_out, &sparse.d_q, &sparse.d_k,       &sparse.d_v};
    TensorView* const of_dense[] = {&dense.q,     &dense.k,   &dense.v,   &dense.out, &dense.lse,
                                    &dense.d_out, &dense.d_q, &dense.d_k, &dense.d_v};
    TensorView* const of_kl[] = {&kl.q, &kl.k, &kl.lse, &kl.q_idx, &kl.k_idx, &kl.block_ids, &kl.loss, &kl.d_q_idx, &kl.d_k_idx};
    if (spoil(input, *of_sparse[input.byte() % std::size(of_sparse)])) runs_sparse = false;
    if (spoil(input, *of_dense[input.byte() % std::size(of_dense)])) runs_dense = false;
    TensorView& optional = *of_kl[input.byte() % std::size(of_kl)];
    if (optional.given() && spoil(input, optional)) runs_kl = false;
  }
  if (input.byte() % 8 == 0) {  // paged keys, which training does not take
    sparse.batch.seqlens_k = dense.batch.seqlens_k = kl.batch.seqlens_k =
        make_view(world.seqlens_k.data(), {static_cast<std::int64_t>(world.seqlens_k.size())});
    runs_sparse = runs_dense = runs_kl = false;
  }

  const auto gradients_untouched = [&] { return results.d_q.untouched() && results.d_k.untouched() && results.d_v.untouched(); };
  const bool ran_sparse = runs([&] { sparse_attention_backward(sparse); });
  require(ran_sparse == runs_sparse, "sparse_attention_backward runs exactly on valid calls");
  require(ran_sparse || gradients_untouched(), "a refused call writes nothing");
  for (Buffer* buffer : {&results.d_q, &results.d_k, &results.d_v}) {
    std::fill(buffer->bytes.begin(), buffer->bytes.end(), std::byte{0xff});
  }
  const bool ran_dense = runs([&] { dense_attention_backward(dense); });
  require(ran_dense == runs_dense, "dense_attention_backward runs exactly on valid calls");
  require(ran_dense || gradients_untouched(), "a refused call writes nothing");
  const bool ran_kl = runs([&] { index_kl_loss(kl); });
  require(ran_kl == runs_kl, "index_kl_loss runs exactly on valid calls");
  require((ran_kl && !only_gradients) || results.loss.untouched(), "a loss that was not asked for is not written");
  require((ran_kl && !only_loss) || (results.d_q_idx.untouched() && results.d_k_idx.untouched()),
          "gradients that were not asked for are not written");
}

void run(Input input) {
  World world;
  if (input.flag()) {
    compare(input, world);
  } else {
    refuse(input, world);
  }
}

}  // namespace
}  // namespace openmsa::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  openmsa::fuzz::run({data, size});
  return 0;
}
