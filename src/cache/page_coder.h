// File: page_coder.h - moves the tokens of a layer between exact pages and packed ones, and fits
// the codec that packs them. What sequences and cells share.
#ifndef PALU_SRC_CACHE_PAGE_CODER_H_
#define PALU_SRC_CACHE_PAGE_CODER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache/layer_context.h"
#include "cache/token_view.h"
#include "palu/tensor.h"

namespace palu {

// "layer 3: "
std::string Where(const LayerShape& shape);
// Throws InputError for the first value of a side that an exact page cannot hold. `side`: "K" or
// "V"; b: batch element.
void CheckValues(const LayerContext& context, const ConstTensor& x, int64_t b, const char* side);
// Throws InputError unless keys of this layer can be rotated like this.
void CheckRope(const LayerShape& shape, const RopeParams& rope);

// Puts one row of [dim] into column t of one head's side of an exact page.
void WriteExactRow(const PagePlan& plan, const float* row, int64_t dim, int t, uint8_t* side);
// Rows that one task writes.
inline constexpr int64_t kRowsAtOnce = 64;

// Decoded rows of tokens [begin, end) of a segment, one side of one head: out [end - begin][D].
void DecodeRows(const TokenView& view, const Segment& segment, int head, bool is_v, int64_t begin,
                int64_t end, float* out);

// Sums of squares of encoded tokens less their means, and of their latents; and what is lost of
// them, as far as the bits tell: 4^-b of a latent of b bits, nothing of one in fp16, and all that
// lies outside the subspace.
struct Energy {
  double all = 0, kept = 0, lost = 0;
};

// Packs page_tokens tokens, given as exact pages of 32, as one side of one unit. page: the packed
// page of all units. Cost: rank * D multiply-adds per token.
Energy EncodeSide(const LayerContext& context, const LayerCodec& codec, const uint8_t* const* exact,
                  const BlockPositions* positions, int unit, bool is_v, uint8_t* page);

// The tokens that a codec is fitted on.
struct FitRows {
  std::vector<int64_t> positions;  // of each of them
  // Rows [first, first + n) of one side of one head: out [n][D].
  std::function<void(int head, bool is_v, int64_t first, int64_t n, float* out)> read;
};

// Moments of rows that come bit by bit, for a fit on all of them.
class FitSample {
 public:
  // account: counts it, for a sample that is kept; or null. `context` must outlive it. Errors:
  // MemoryError.
  FitSample(const LayerContext& context, const RopeParams& rope, const MemoryAccountPtr& account);
  // Cost: dim^2 / 2 multiply-adds in double per row of a unit and side.
  void Add(const FitRows& rows);
  int64_t rows() const { return rows_; }
  int64_t nbytes() const { return charge_.bytes(); }
  // The codec that is fitted on them; nothing of them is left. Errors: MemoryError, ConfigError.
  std::shared_ptr<const LayerCodec> Fit();

 private:
  bool averaged() const;

  const LayerContext& context_;
  RopeParams rope_;
  LayerMoments layer_;            // units and groups; the rest at the end
  std::vector<Moments> moments_;  // K and V of every group; keys un-rotated if averaged()
  int64_t rows_ = 0;
  MemoryCharge charge_;
};

// The codec of a layer: from its basis file, or fitted on `rows`. rope: how their keys were
// rotated; empty where they were not, or where nobody needs to know. Errors: MemoryError,
// ConfigError.
std::shared_ptr<const LayerCodec> FitCodec(const LayerContext& context, const RopeParams& rope,
                                           const FitRows& rows);

}  // namespace palu

#endif  // PALU_SRC_CACHE_PAGE_CODER_H_
