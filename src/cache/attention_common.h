// File: attention_common.h - what the decode and the prefill path share: queries of one KV head,
// visibility, finish.
#ifndef PALU_SRC_CACHE_ATTENTION_COMMON_H_
#define PALU_SRC_CACHE_ATTENTION_COMMON_H_

#include <cmath>
#include <limits>
#include <vector>

#include "cache/token_view.h"
#include "kernels/kernels.h"
#include "palu/cache.h"

namespace palu {

inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

// Throws InputError unless q is [batch, Hq, n, Dk] and out [batch, Hq, n, Dv], Hq a multiple of the
// layer's KV heads.
void CheckQueries(const LayerShape& shape, int64_t batch, const ConstTensor& q,
                  const MutableTensor& out);

// A mask as ggml has it: fp16, row i for query i, added to the scaled logits; -inf hides.
struct HalfMask {
  const uint16_t* data = nullptr;
  int64_t stride = 0;  // halves from one query's row to the next

  // Whether tokens [first, first + count) are hidden from queries [query, query + queries).
  bool Hides(int64_t query, int64_t queries, int64_t first, int64_t count) const;
};

// One Attend call on one sequence, or one stream of cells. Row r of a KV head is query r / group of
// head (kv_head * group + r % group). Encoded tokens belong to units of heads, exact ones to heads;
// where nothing is encoded every head is a unit.
struct AttendCall {
  const TokenView& view;
  const AttendArgs& args;
  int64_t b;  // batch element of q and out
  const MutableTensor& out;
  HalfMask half_mask;  // instead of args.mask
  std::vector<HeadUnit> units;
  int64_t n = 0;  // queries
  int group = 1;  // query heads per KV head
  float scale = 1;

  AttendCall(const TokenView& v, const AttendArgs& a, int64_t batch, const MutableTensor& o,
             HalfMask mask = {});

  const LayerShape& shape() const { return view.context->shape; }
  int64_t query_index(int64_t i) const { return view.size - n + i; }  // its place in the sequence
  int unit_of_head(int kv_head) const {
    return view.codecs.empty() ? kv_head : view.codecs[0]->unit_of_head[kv_head];
  }
  int head_of_row(int kv_head, int64_t row) const {
    return kv_head * group + static_cast<int>(row % group);
  }
  // Tokens [begin, end) that query i may see, before the mask.
  void Visible(int64_t i, int64_t& begin, int64_t& end) const {
    const int64_t at = query_index(i);
    end = args.causal ? at + 1 : view.size;
    begin = view.window > 0 ? std::max<int64_t>(0, at - view.window + 1) : 0;
  }
};

// The queries of a unit as one codec sees them, scaled.
struct LatentQueries {
  std::vector<float> latent;      // [heads][rows][rank_k]
  std::vector<float> mean_dot;    // [heads][rows] q . mu
  std::vector<float> mean_waves;  // [heads][rows][2 planes] of the rotated means; or empty

  // q: [heads][rows][dim].
  void Prepare(const GroupCodec& codec, const float* q, int heads, int64_t rows, int dim);

 private:
  void PrepareHead(const GroupCodec& codec, const float* q, int head, int64_t rows, int dim);
};

// The queries of rows [first, first + rows) of every head of a unit, one head after the other,
// scaled, as they are and in the latent space of every codec of the view.
struct PreparedQueries {
  int64_t rows = 0;          // of one head
  std::vector<float> exact;  // [heads][rows][Dk]
  std::vector<LatentQueries> latents;

  void Prepare(const AttendCall& call, int unit, int64_t first, int64_t rows);
};

// scores[r][t] += q_r . (rotated mean at the position of token `at` + t of the segment), t <
// tokens, both multiples of 32 and the second at most 1024, for all rows of the unit. Nothing if it
// has no rotated means.
void AddMeanScores(const AttendCall& call, int unit, const LatentQueries& queries,
                   const Segment& segment, int64_t at, int64_t tokens, float* scores,
                   int64_t stride);

// Turns raw scores of one row into logits: adds the mean's share, caps, masks, hides what is not
// visible. scores: tokens [first, first + count) of the sequence.
void FinishScores(const AttendCall& call, int64_t query, float mean_dot, int64_t first,
                  int64_t count, float* scores);

struct RowSum {
  float max = kMinusInf;  // running maximum of the logits of one row
  double sum = 0;         // of exp(logit - max), all tokens
};

// Unnormalised output of some rows over the tokens of one codec, in its latent space.
struct LatentSums {
  std::vector<float> latent;   // [rows][rank_v]
  std::vector<double> weight;  // [rows] sum of exp(logit - max)

  void Reset(int64_t rows, int rank) {
    latent.assign(static_cast<size_t>(rows) * rank, 0.0f);
    weight.assign(static_cast<size_t>(rows), 0.0);
  }
};

// out row = (sum over codecs of (latent . B + mu * weight) + exact) / sum, with the sink logit in
// the denominator, for rows [first, first + rows) of the KV head. latents: one per codec of the
// view; `row` is the first of these rows in them. exact: [rows][Dv], overwritten.
void FinishRows(const AttendCall& call, int kv_head, int64_t first, int64_t rows,
                const RowSum* sums, const std::vector<LatentSums>& latents, int64_t row,
                float* exact);

// One call on few rows, and on many; Attend takes the one that suits. Both see the same tokens and
// give the same result up to rounding.
void AttendDecode(const AttendCall& call);
void AttendPrefill(const AttendCall& call);
void Attend(const AttendCall& call);

}  // namespace palu

#endif  // PALU_SRC_CACHE_ATTENTION_COMMON_H_
