// MsaConfig: what no layer can be, refused by validate() and by every call.
#include <cmath>
#include <limits>

#include "api_calls.hpp"

namespace openmsa::test {
namespace {

struct Fault {
  const char* field;
  void (*spoil)(MsaConfig&);
  std::vector<std::string> words;
};

const Fault kFaults[] = {
    {"config.num_q_heads", [](MsaConfig& c) { c.num_q_heads = 0; }, {"is 0", "at least 1"}},
    {"config.num_q_heads", [](MsaConfig& c) { c.num_q_heads = 5; }, {"is 5", "not a multiple", "num_kv_heads = 2"}},
    {"config.num_kv_heads", [](MsaConfig& c) { c.num_kv_heads = -2; }, {"is -2", "at least 1"}},
    {"config.head_dim", [](MsaConfig& c) { c.head_dim = 0; }, {"is 0", "at least 1"}},
    {"config.index_dim", [](MsaConfig& c) { c.index_dim = -1; }, {"is -1", "at least 0"}},
    {"config.block_size", [](MsaConfig& c) { c.block_size = 0; }, {"is 0", "at least 1"}},
    {"config.top_k", [](MsaConfig& c) { c.top_k = 0; }, {"is 0", "at least 1"}},
    {"config.num_init_blocks", [](MsaConfig& c) { c.num_init_blocks = -1; }, {"is -1"}},
    {"config.num_local_blocks", [](MsaConfig& c) { c.num_local_blocks = -3; }, {"is -3"}},
    {"config.top_k", [](MsaConfig& c) { c.num_init_blocks = 2, c.num_local_blocks = 2; }, {"is 3", "force 4 blocks"}},
    {"config.top_k",
     [](MsaConfig& c) { c.num_init_blocks = c.num_local_blocks = std::numeric_limits<std::int32_t>::max(); },
     {"force 4294967294 blocks"}},
    {"config.softmax_scale", [](MsaConfig& c) { c.softmax_scale = 0.0; }, {"finite and positive"}},
    {"config.softmax_scale", [](MsaConfig& c) { c.softmax_scale = std::nan(""); }, {"nan", "finite and positive"}},
    {"config.index_scale", [](MsaConfig& c) { c.index_scale = -1.0; }, {"-1.0", "finite and positive"}},
    {"config.index_scale", [](MsaConfig& c) { c.index_scale = std::numeric_limits<double>::infinity(); }, {"inf"}},
};

TEST(ApiConfig, RefusesWhatNoLayerCanBe) {
  Calls calls;
  for (const Fault& fault : kFaults) {
    SCOPED_TRACE(fault.field);
    for (Calls::Call& call : calls.all()) {
      SCOPED_TRACE(call.name);
      const MsaConfig saved = *call.config;
      fault.spoil(*call.config);
      for (const std::string& word : fault.words) {
        expect_invalid([&] { call.config->validate(); }, fault.field, {word});
        expect_invalid(call.run, fault.field, {word});
        expect_invalid([&] { call.workspace_bytes(); }, fault.field, {word});
      }
      *call.config = saved;
    }
  }
  calls.expect_nothing_written();
}

TEST(ApiConfig, IndexDimIsNeededByTheIndexBranchAlone) {
  Calls calls;
  calls.block_scores.config.index_dim = calls.index_select.config.index_dim = calls.msa_attention.config.index_dim = 0;
  expect_invalid([&] { block_scores(calls.block_scores); }, "config.index_dim", {"is 0", "index branch"});
  expect_invalid([&] { index_select(calls.index_select); }, "config.index_dim", {"is 0", "index branch"});
  expect_invalid([&] { msa_attention(calls.msa_attention); }, "config.index_dim", {"is 0", "index branch"});
  calls.expect_nothing_written();
  for (MsaConfig* config : {&calls.select_blocks.config, &calls.sparse.config, &calls.dense.config}) config->index_dim = 0;
  calls.select_blocks.options = calls.sparse.options = calls.dense.options = on(Backend::kReference);
  EXPECT_NO_THROW(select_blocks(calls.select_blocks));
  EXPECT_NO_THROW(sparse_attention(calls.sparse));
  EXPECT_NO_THROW(dense_attention(calls.dense));
}

TEST(ApiConfig, ForcedBlocksMayFillTopK) {
  MsaConfig config = make_config(2, 2, 16, 16, 16, 3, 1, 2);
  EXPECT_NO_THROW(config.validate());
  config.num_local_blocks = 0;
  EXPECT_NO_THROW(config.validate());
}

TEST(ApiConfig, ScalesDefaultToTheInverseRootOfTheDim) {
  MsaConfig config = make_config(1, 1, 64, 16, 16, 1);
  EXPECT_DOUBLE_EQ(config.effective_softmax_scale(), 0.125);
  EXPECT_DOUBLE_EQ(config.effective_index_scale(), 0.25);
  config.softmax_scale = 3.0;
  config.index_scale = 5.0;
  EXPECT_DOUBLE_EQ(config.effective_softmax_scale(), 3.0);
  EXPECT_DOUBLE_EQ(config.effective_index_scale(), 5.0);
}

}  // namespace
}  // namespace openmsa::test
