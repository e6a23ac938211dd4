#include "openmsa/config.hpp"

#include <cmath>
#include <string>

#include "api/check.hpp"

namespace openmsa {
namespace {

void require_at_least(const char* field, std::int32_t value, std::int32_t minimum, const char* meaning) {
  if (value >= minimum) return;
  api::refuse(std::string("config.") + field, "is " + std::to_string(value) + "; " + meaning + " must be at least " +
                                                  std::to_string(minimum) + ". Set config." + field + " to the layer's value.");
}

void require_scale(const char* field, const std::optional<double>& value) {
  if (!value || (std::isfinite(*value) && *value > 0)) return;
  api::refuse(
      std::string("config.") + field,
      "is " + std::to_string(*value) + "; a scale must be finite and positive. Leave it empty for the default 1/sqrt(dim).");
}

}  // namespace

double MsaConfig::effective_softmax_scale() const { return softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim))); }
double MsaConfig::effective_index_scale() const { return index_scale.value_or(1.0 / std::sqrt(static_cast<double>(index_dim))); }

void MsaConfig::validate() const {
  require_at_least("num_q_heads", num_q_heads, 1, "the number of query heads");
  require_at_least("num_kv_heads", num_kv_heads, 1, "the number of KV heads");
  if (num_q_heads % num_kv_heads != 0) {
    api::refuse("config.num_q_heads", "is " + std::to_string(num_q_heads) +
                                          ", which is not a multiple of config.num_kv_heads = " + std::to_string(num_kv_heads) +
                                          "; every KV head serves the same number of query heads. Change one of the two.");
  }
  require_at_least("head_dim", head_dim, 1, "the head dim");
  require_at_least("index_dim", index_dim, 0, "the index dim");
  require_at_least("block_size", block_size, 1, "the block size in tokens");
  require_at_least("top_k", top_k, 1, "the number of blocks kept per query");
  require_at_least("num_init_blocks", num_init_blocks, 0, "the number of forced first blocks");
  require_at_least("num_local_blocks", num_local_blocks, 0, "the number of forced local blocks");
  const std::int64_t num_forced = std::int64_t{num_init_blocks} + num_local_blocks;
  if (num_forced > top_k) {
    api::refuse("config.top_k",
                "is " + std::to_string(top_k) + ", but config.num_init_blocks = " + std::to_string(num_init_blocks) +
                    " and config.num_local_blocks = " + std::to_string(num_local_blocks) + " force " + std::to_string(num_forced) +
                    " blocks; forced blocks use slots of top_k. Raise top_k or force fewer blocks.");
  }
  require_scale("softmax_scale", softmax_scale);
  require_scale("index_scale", index_scale);
}

MsaConfig api::with_defaults(const MsaConfig& config) {
  MsaConfig result = config;
  result.softmax_scale = config.effective_softmax_scale();
  if (config.index_dim > 0) result.index_scale = config.effective_index_scale();
  return result;
}

void api::require_index_dim(const MsaConfig& config) {
  if (config.index_dim >= 1) return;
  refuse("config.index_dim",
         "is " + std::to_string(config.index_dim) + "; the index branch needs at least 1. Set it to the width of the index keys.");
}

}  // namespace openmsa
