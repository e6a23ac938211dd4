// score + select with scratch that does not grow with T: query tokens are taken in chunks whose scores fit a fixed budget. Inside
// a chunk the work is cut into pieces (some tokens of one sequence x a range of its blocks), so that one long sequence and many
// short ones keep all threads busy alike; then the chunk's rows are selected.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/thread_pool.hpp"
#include "cpu/cpu.hpp"
#include "cpu/score.hpp"
#include "cpu/score_decode.hpp"
#include "cpu/select.hpp"
#include "cpu/tiles.hpp"

namespace openmsa::cpu {
namespace {

// Scores of a chunk. Small enough to stay in a last-level cache, large enough that each key block read serves many queries.
constexpr std::int64_t kScoreBudgetBytes = std::int64_t{16} << 20;
// Bounds the list of pieces where sequences are short.
constexpr std::int64_t kMaxChunkTokens = 16384;
// Keys per piece: with few queries a piece of 4096 bf16 keys is 1 MB, some 30 us of memory traffic.
constexpr std::int64_t kPieceKeysFew = 4096;
constexpr std::int64_t kPieceKeysTile = 8192;

struct Piece {
  std::int32_t seq;
  bool few;
  std::int64_t token_begin, token_end;
  std::int64_t block_begin, block_end;
};

class IndexSelect {
 public:
  // Takes the scratch from the arena; with a counting arena that is all that may be done with the object.
  explicit IndexSelect(const core::IndexSelectParams& params)
      : params_(params),
        geo_(params.geo),
        inputs_{params.geo, params.q_idx, params.k_idx, params.config.num_kv_heads, params.config.index_dim} {
    const std::int64_t num_heads = params.config.num_kv_heads;
    max_blocks_ = std::max<std::int64_t>(1, geo_.max_num_blocks());
    tile_tokens_ = std::max<std::int64_t>(1, score_tile_tokens(inputs_));
    const std::int64_t token_bytes = core::checked_mul<std::int64_t>(max_blocks_ * num_heads, sizeof(float));
    chunk_tokens_ = std::max(tile_tokens_, kScoreBudgetBytes / token_bytes / tile_tokens_ * tile_tokens_);
    chunk_tokens_ = std::min({chunk_tokens_, std::max(tile_tokens_, kMaxChunkTokens), std::max<std::int64_t>(1, geo_.total_q)});
    few_tokens_ = std::min(std::max<std::int64_t>(1, kMaxFewRows / num_heads), std::max<std::int64_t>(1, geo_.max_seqlen_q));

    core::Arena& arena = *params.context.arena;
    scores_ = arena.take<float>(static_cast<std::size_t>(chunk_tokens_ * num_heads * max_blocks_));
    // Each piece has a token of its own per range of blocks, and the two kinds of pieces differ in their ranges only.
    pieces_ = arena.take<Piece>(static_cast<std::size_t>(chunk_tokens_ * ceil_div(max_blocks_, piece_blocks(true))));
    worker_floats_ = std::max(score_tile_scratch(inputs_), score_few_scratch(inputs_, few_tokens_));
    worker_floats_ = (worker_floats_ + 15) / 16 * 16;
    worker_scratch_ = arena.take<float>(core::checked_mul(worker_floats_, static_cast<std::size_t>(params.context.num_threads)));
  }

  void run() {
    for (std::int64_t begin = 0; begin < geo_.total_q; begin += chunk_tokens_) {
      const std::int64_t end = std::min(begin + chunk_tokens_, geo_.total_q);
      score_chunk(begin, end);
      const ScoreRows rows{.data = scores_,
                           .token_begin = begin,
                           .stride_token = params_.config.num_kv_heads * max_blocks_,
                           .stride_head = max_blocks_};
      select_rows(params_.config, geo_, rows, end, params_.block_ids, params_.context.num_threads);
    }
  }

 private:
  std::int64_t piece_blocks(bool few) const {
    return std::max<std::int64_t>(1, (few ? kPieceKeysFew : kPieceKeysTile) / geo_.block_size);
  }

  void score_chunk(std::int64_t begin, std::int64_t end) {
    std::int64_t num_pieces = 0;
    for (std::int32_t seq = geo_.seq_of_token(begin); seq < geo_.num_seqs && geo_.query_begin(seq) < end; ++seq) {
      const bool few = geo_.seqlen_q(seq) <= few_tokens_ && geo_.seqlen_q(seq) * params_.config.num_kv_heads <= kMaxFewRows;
      const std::int64_t token_end = std::min(end, geo_.query_begin(seq) + geo_.seqlen_q(seq));
      const std::int64_t step = few ? few_tokens_ : tile_tokens_;
      for (std::int64_t t = std::max(begin, geo_.query_begin(seq)); t < token_end; t += step) {
        num_pieces = add_pieces(seq, few, t, std::min(t + step, token_end), num_pieces);
      }
    }
    core::parallel_for(params_.context.num_threads, num_pieces, [&](std::int64_t task, std::int32_t worker) {
      const Piece& piece = pieces_[task];
      const std::int64_t num_heads = params_.config.num_kv_heads;
      float* const scores = scores_ + (piece.token_begin - begin) * num_heads * max_blocks_ + piece.block_begin;
      float* const scratch = worker_scratch_ + static_cast<std::size_t>(worker) * worker_floats_;
      const auto score = piece.few ? score_few : score_tile;
      score(inputs_, piece.seq, piece.token_begin, piece.token_end, piece.block_begin, piece.block_end, scores,
            num_heads * max_blocks_, max_blocks_, scratch);
    });
  }

  // The pieces of tokens [begin, end) of seq: the blocks that the last of them sees. Blocks beyond are never looked at.
  std::int64_t add_pieces(std::int32_t seq, bool few, std::int64_t begin, std::int64_t end, std::int64_t num_pieces) {
    const std::int64_t num_visible = geo_.num_visible(seq, geo_.position(seq, end - 1 - geo_.query_begin(seq)));
    const std::int64_t num_blocks = ceil_div(num_visible, geo_.block_size);
    for (std::int64_t b = 0; b < num_blocks; b += piece_blocks(few)) {
      pieces_[num_pieces++] = {seq, few, begin, end, b, std::min(b + piece_blocks(few), num_blocks)};
    }
    return num_pieces;
  }

  const core::IndexSelectParams& params_;
  const core::Geometry& geo_;
  ScoreInputs inputs_;
  std::int64_t max_blocks_, tile_tokens_, chunk_tokens_, few_tokens_;
  float* scores_;  // [chunk_tokens, Hkv, max_blocks]
  Piece* pieces_;
  std::size_t worker_floats_;
  float* worker_scratch_;  // [num_threads, worker_floats]
};

}  // namespace

void index_select(const core::IndexSelectParams& params) { IndexSelect(params).run(); }
void index_select_reserve(const core::IndexSelectParams& params) { IndexSelect{params}; }

}  // namespace openmsa::cpu
