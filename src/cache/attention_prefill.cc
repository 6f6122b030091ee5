// Attention of many queries: tiles of tokens are decoded once for a block of queries, with an
// online softmax.
#include <algorithm>
#include <cmath>
#include <vector>

#include "base/threads.h"
#include "cache/attention_common.h"

namespace palu {
namespace {

constexpr int64_t kTileTokens = 256;
constexpr int64_t kTileRows = 192;  // queries * heads of one task, about

// One block of queries of the heads of a unit over all tokens, tile by tile, with an online
// softmax. Rows are those of PreparedQueries: one head after the other.
class PrefillTask {
 public:
  PrefillTask(const AttendCall& call, int unit, int64_t first_query, int64_t queries)
      : call_(call),
        unit_(unit),
        heads_(call.units[unit]),
        first_row_(first_query * call.group),
        head_rows_(queries * call.group),
        rows_(head_rows_ * (heads_.last - heads_.first)) {
    int64_t unused;
    call.Visible(first_query, begin_, unused);
    call.Visible(first_query + queries - 1, unused, end_);
  }

  void Run() {
    queries_.Prepare(call_, unit_, first_row_, head_rows_);
    const int dim = call_.shape().head_dim_v;
    sums_.assign(static_cast<size_t>(rows_), RowSum());
    exact_.assign(static_cast<size_t>(rows_) * dim, 0.0f);
    latents_.resize(call_.view.codecs.size());
    for (size_t i = 0; i < latents_.size(); ++i) {
      latents_[i].Reset(rows_, call_.view.codecs[i]->v.unit(unit_).rank());
    }
    for (const Segment& segment : call_.view.segments) {
      const int64_t from =
          std::max<int64_t>(begin_ - segment.first, 0) / kBlockTokens * kBlockTokens;
      const int64_t to = std::min(end_ - segment.first, segment.count);
      for (int64_t t = from; t < to; t += kTileTokens) {
        const int64_t count = std::min(kTileTokens, to - t);
        if (call_.half_mask.Hides(first_row_ / call_.group, head_rows_ / call_.group,
                                  segment.first + t, count)) {
          continue;
        }
        Tile(segment, t, count);
      }
    }
    for (int h = heads_.first; h < heads_.last; ++h) {
      const int64_t row = (h - heads_.first) * head_rows_;
      FinishRows(call_, h, first_row_, head_rows_, &sums_[row], latents_, row,
                 exact_.data() + row * dim);
    }
  }

 private:
  // Tokens [at, at + count) of the segment; `at` is a multiple of 32.
  void Tile(const Segment& segment, int64_t at, int64_t count) {
    const int64_t blocks = (count + kBlockTokens - 1) / kBlockTokens;
    scores_.resize(static_cast<size_t>(rows_) * kTileTokens);
    const auto codec = static_cast<size_t>(segment.codec);
    if (segment.encoded()) {
      const LatentQueries& queries = queries_.latents[codec];
      Score(segment, at, blocks, unit_, 0, rows_, queries.latent.data());
      AddMeanScores(call_, unit_, queries, segment, at, blocks * kBlockTokens, scores_.data(),
                    kTileTokens);
    } else {
      for (int h = heads_.first; h < heads_.last; ++h) {
        Score(segment, at, blocks, h, (h - heads_.first) * head_rows_, head_rows_,
              queries_.exact.data());
      }
    }
    Softmax(segment, at, count);
    if (segment.encoded()) {
      Accumulate(segment, at, count, unit_, 0, rows_, latents_[codec].latent.data());
    } else {
      for (int h = heads_.first; h < heads_.last; ++h) {
        Accumulate(segment, at, count, h, (h - heads_.first) * head_rows_, head_rows_,
                   exact_.data());
      }
    }
  }

  const uint8_t* Side(const Segment& segment, int64_t token, int place, bool is_v,
                      int& block) const {
    const PageLayout& layout = *segment.layout;
    block = static_cast<int>(token % layout.page_tokens / kBlockTokens);
    return call_.view.pages[segment.page + token / layout.page_tokens] +
           (is_v ? layout.v_offset : layout.k_offset)[place];
  }

  // Raw scores of rows [row, row + rows) against one head or unit. q: of all rows.
  void Score(const Segment& segment, int64_t at, int64_t blocks, int place, int64_t row,
             int64_t rows, const float* q) {
    const KernelTable& kernels = Active();
    const PagePlan& plan = *segment.layout->k[place];
    tile_.resize(static_cast<size_t>(plan.rank) * kBlockTokens);
    for (int64_t i = 0; i < blocks; ++i) {
      int block;
      const uint8_t* side = Side(segment, at + i * kBlockTokens, place, false, block);
      kernels.decode_block(plan, side, block, tile_.data());
      kernels.gemm({.a = q + row * plan.rank,
                    .lda = plan.rank,
                    .b = tile_.data(),
                    .ldb = kBlockTokens,
                    .c = scores_.data() + row * kTileTokens + i * kBlockTokens,
                    .ldc = kTileTokens,
                    .m = static_cast<int>(rows),
                    .n = kBlockTokens,
                    .k = plan.rank});
    }
  }

  // Adds the weighted values of one head or unit to rows [row, row + rows). acc: of all rows.
  void Accumulate(const Segment& segment, int64_t at, int64_t count, int place, int64_t row,
                  int64_t rows, float* acc) {
    const KernelTable& kernels = Active();
    const PagePlan& plan = *segment.layout->v[place];
    const int64_t blocks = (count + kBlockTokens - 1) / kBlockTokens;
    tile_.resize(static_cast<size_t>(plan.rank) * kTileTokens);
    for (int64_t i = 0; i < blocks; ++i) {
      int block;
      const uint8_t* side = Side(segment, at + i * kBlockTokens, place, true, block);
      kernels.decode_block_tokens(plan, side, block, tile_.data() + i * kBlockTokens * plan.rank,
                                  plan.rank);
    }
    kernels.gemm({.a = scores_.data() + row * kTileTokens,
                  .lda = kTileTokens,
                  .b = tile_.data(),
                  .ldb = plan.rank,
                  .c = acc + row * plan.rank,
                  .ldc = plan.rank,
                  .m = static_cast<int>(rows),
                  .n = plan.rank,
                  .k = static_cast<int>(count),
                  .accumulate = true});
  }

  // Scores of the tile become weights; sums and outputs so far are rescaled to the new maxima.
  void Softmax(const Segment& segment, int64_t at, int64_t count) {
    const KernelTable& kernels = Active();
    const auto codec = static_cast<size_t>(segment.codec);
    for (int64_t r = 0; r < rows_; ++r) {
      float* const row = scores_.data() + r * kTileTokens;
      RowSum& sum = sums_[r];
      FinishScores(call_, (first_row_ + r % head_rows_) / call_.group,
                   segment.encoded() ? queries_.latents[codec].mean_dot[r] : 0.0f,
                   segment.first + at, count, row);
      const float max = std::max(sum.max, kernels.max(row, count));
      if (max == kMinusInf) {
        std::fill(row, row + count, 0.0f);
        continue;
      }
      if (max > sum.max && sum.sum > 0) Rescale(r, std::exp(sum.max - max));
      sum.max = max;
      const double added = kernels.exp_sum(row, count, max);
      sum.sum += added;
      if (segment.encoded()) latents_[codec].weight[r] += added;
    }
  }

  // What row r has summed so far, times a factor.
  void Rescale(int64_t r, float factor) {
    const int dim = call_.shape().head_dim_v;
    sums_[r].sum *= factor;
    for (int d = 0; d < dim; ++d) exact_[r * dim + d] *= factor;
    for (LatentSums& sums : latents_) {
      const int64_t rank = static_cast<int64_t>(sums.latent.size()) / rows_;
      sums.weight[r] *= factor;
      for (int64_t c = 0; c < rank; ++c) sums.latent[r * rank + c] *= factor;
    }
  }

  const AttendCall& call_;
  const int unit_;
  const HeadUnit heads_;
  const int64_t first_row_;         // of each head
  const int64_t head_rows_, rows_;  // of one head, of all
  int64_t begin_ = 0, end_ = 0;     // tokens that any of the queries may see
  PreparedQueries queries_;
  std::vector<RowSum> sums_;
  std::vector<float> exact_;         // [rows][Dv]
  std::vector<LatentSums> latents_;  // one per codec
  std::vector<float> scores_;        // [rows][kTileTokens]
  std::vector<float> tile_;          // K: [rank][32]; V: [tokens][rank]
};

}  // namespace

void AttendPrefill(const AttendCall& call) {
  int widest = 1;
  for (const HeadUnit& unit : call.units) widest = std::max(widest, unit.last - unit.first);
  const int64_t per_block = std::max<int64_t>(1, kTileRows / (call.group * widest));
  const int64_t blocks = (call.n + per_block - 1) / per_block;
  const auto units = static_cast<int64_t>(call.units.size());
  // The last queries see the most tokens: start with them.
  ParallelFor(call.view.context->threads, blocks * units, [&](int64_t task) {
    const int64_t block = blocks - 1 - task / units;
    PrefillTask(call, static_cast<int>(task % units), block * per_block,
                std::min(per_block, call.n - block * per_block))
        .Run();
  });
}

}  // namespace palu
