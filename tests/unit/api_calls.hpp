// One valid call of every public function on shared small data, for tests that spoil one thing at a time.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "support/problem.hpp"
#include "support/run.hpp"

namespace openmsa::test {

// `call` must throw an Error with this code and argument whose text names the argument and holds every word.
inline void expect_refused(const std::function<void()>& call, ErrorCode code, const std::string& argument,
                           std::initializer_list<std::string> words) {
  try {
    call();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.code(), code) << text;
    EXPECT_EQ(error.argument(), argument) << text;
    EXPECT_NE(text.find(argument), std::string::npos) << text;
    for (const std::string& word : words) EXPECT_NE(text.find(word), std::string::npos) << "no '" << word << "' in: " << text;
    return;
  }
  ADD_FAILURE() << "accepted, though " << argument << " is wrong";
}

inline void expect_invalid(const std::function<void()>& call, const std::string& argument,
                           std::initializer_list<std::string> words) {
  expect_refused(call, ErrorCode::kInvalidArgument, argument, words);
}

inline Layout calls_layout(bool paged) {
  Layout layout;
  layout.seqlens_q = {5, 0, 20, 1};
  layout.seqlens_k = {40, 7, 20, 64};
  layout.paged = paged;
  return layout;
}

class Calls {
 public:
  explicit Calls(bool paged = false, const MsaConfig& config = make_config(2, 2, 16, 32, 16, 3), DType dtype = DType::kF32)
      : rng_(17), problem(config, calls_layout(paged), dtype, rng_) {
    const std::int64_t T = problem.total_q, Hq = config.num_q_heads, Hkv = config.num_kv_heads;
    const RunOptions reference = on(Backend::kReference);
    scores_in = run_block_scores(problem, reference);
    block_ids_in = run_select_blocks(problem, scores_in, reference);
    scores = Tensor(DType::kF32, {T, Hkv, problem.max_num_blocks});
    block_ids = Tensor(DType::kI32, {T, Hkv, config.top_k});
    out = Tensor(dtype, {T, Hq, config.head_dim});
    lse = Tensor(DType::kF32, {T, Hq});
    block_max = Tensor(DType::kF32, {T, Hq, problem.max_num_blocks});
    const Batch batch = problem.batch();
    block_scores = {config, batch, problem.q_idx.view(), problem.k_idx.view(), scores.view()};
    select_blocks = {config, batch, scores_in.view(), block_ids.view()};
    index_select = {config, batch, problem.q_idx.view(), problem.k_idx.view(), block_ids.view()};
    sparse = {config, batch, problem.q.view(), problem.k.view(), problem.v.view(), block_ids_in.view(), out.view(), lse.view()};
    decode = sparse;
    msa_attention = {
        config,     batch,      problem.q.view(), problem.k.view(), problem.v.view(), problem.q_idx.view(), problem.k_idx.view(),
        out.view(), lse.view(), block_ids.view()};
    dense = {config, batch, problem.q.view(), problem.k.view(), problem.v.view(), out.view(), lse.view(), block_max.view()};
  }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  // Every call, with the parts that tests spoil.
  struct Call {
    std::string name;
    MsaConfig* config;
    Batch* batch;
    RunOptions* options;
    std::function<void()> run;
    std::function<std::size_t()> workspace_bytes;
  };
  std::vector<Call> all() {
    const auto call = [](const char* name, auto& args, auto function) {
      return Call{name,
                  &args.config,
                  &args.batch,
                  &args.options,
                  [&args, function] { function(args); },
                  [&args] { return openmsa::workspace_bytes(args); }};
    };
    return {call("block_scores", block_scores, openmsa::block_scores), call("select_blocks", select_blocks, openmsa::select_blocks),
            call("index_select", index_select, openmsa::index_select), call("sparse_attention", sparse, openmsa::sparse_attention),
            call("sparse_decode", decode, openmsa::sparse_decode),     call("msa_attention", msa_attention, openmsa::msa_attention),
            call("dense_attention", dense, openmsa::dense_attention)};
  }

  // Every tensor of every call.
  struct Slot {
    std::string name;
    TensorView* view;
    bool is_output;
    std::string call;
    std::function<void()> run;
  };
  std::vector<Slot> slots() {
    std::vector<Slot> slots;
    for (const Call& call : all()) {
      const auto add = [&](const char* name, TensorView& view, bool is_output) {
        slots.push_back({name, &view, is_output, call.name, call.run});
      };
      Batch& batch = *call.batch;
      add("batch.cu_seqlens_q", batch.cu_seqlens_q, false);
      if (problem.layout.paged) {
        add("batch.seqlens_k", batch.seqlens_k, false);
        add("batch.page_table", batch.page_table, false);
      } else {
        add("batch.cu_seqlens_k", batch.cu_seqlens_k, false);
      }
      if (call.name == "block_scores") {
        add("q_idx", block_scores.q_idx, false);
        add("k_idx", block_scores.k_idx, false);
        add("scores", block_scores.scores, true);
      } else if (call.name == "select_blocks") {
        add("scores", select_blocks.scores, false);
        add("block_ids", select_blocks.block_ids, true);
      } else if (call.name == "index_select") {
        add("q_idx", index_select.q_idx, false);
        add("k_idx", index_select.k_idx, false);
        add("block_ids", index_select.block_ids, true);
      } else if (call.name == "msa_attention") {
        add("q", msa_attention.q, false);
        add("k", msa_attention.k, false);
        add("v", msa_attention.v, false);
        add("q_idx", msa_attention.q_idx, false);
        add("k_idx", msa_attention.k_idx, false);
        add("out", msa_attention.out, true);
        add("lse", msa_attention.lse, true);
        add("block_ids", msa_attention.block_ids, true);
      } else if (call.name == "dense_attention") {
        add("q", dense.q, false);
        add("k", dense.k, false);
        add("v", dense.v, false);
        add("out", dense.out, true);
        add("lse", dense.lse, true);
        add("block_max", dense.block_max, true);
      } else {
        SparseAttentionArgs& args = call.name == "sparse_decode" ? decode : sparse;
        add("q", args.q, false);
        add("k", args.k, false);
        add("v", args.v, false);
        add("block_ids", args.block_ids, false);
        add("out", args.out, true);
        add("lse", args.lse, true);
      }
    }
    return slots;
  }

  // Spoils each tensor that `applies` in turn and sees its call refused.
  void expect_each_refused(const std::function<bool(const Slot&)>& applies, const std::function<void(TensorView&)>& spoil,
                           std::initializer_list<std::string> words) {
    int num_tried = 0;
    for (const Slot& slot : slots()) {
      if (!applies(slot)) continue;
      SCOPED_TRACE(slot.call + ": " + slot.name);
      const TensorView saved = *slot.view;
      spoil(*slot.view);
      expect_invalid(slot.run, slot.name, words);
      *slot.view = saved;
      ++num_tried;
    }
    EXPECT_GT(num_tried, 0);
    expect_nothing_written();
  }

  void expect_nothing_written() const {
    for (const Tensor* output : {&scores, &block_ids, &out, &lse, &block_max}) EXPECT_TRUE(output->untouched());
  }

 private:
  Rng rng_;

 public:
  Problem problem;
  Tensor scores_in, block_ids_in;
  Tensor scores, block_ids, out, lse, block_max;
  BlockScoresArgs block_scores;
  SelectBlocksArgs select_blocks;
  IndexSelectArgs index_select;
  SparseAttentionArgs sparse, decode;
  MsaAttentionArgs msa_attention;
  DenseAttentionArgs dense;
};

}  // namespace openmsa::test
