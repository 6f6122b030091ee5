// File: layer_context.h - what all sequences, or all cells, of one layer share.
#ifndef PALU_SRC_CACHE_LAYER_CONTEXT_H_
#define PALU_SRC_CACHE_LAYER_CONTEXT_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "fit/calibration_file.h"
#include "methods/layer_codec.h"
#include "palu/builder.h"
#include "palu/cache.h"

namespace palu {

struct LayerContext;

// The statistics of one layer from a basis file, and the codec that they give: all sequences of the
// layer share it. Threads: safe.
class CalibratedCodec {
 public:
  explicit CalibratedCodec(LayerCalibration moments) : moments_(std::move(moments)) {}
  // Fits at the first call, and lets the statistics go. Errors: MemoryError.
  std::shared_ptr<const LayerCodec> Codec(const LayerContext& context, const RopeParams& rope);
  // Whether keys rotated like this are those of the codec; true before there is one.
  bool Fits(const RopeParams& rope) const;
  int64_t nbytes() const;  // of the codec, counted once for all sequences of a cache

 private:
  LayerCalibration moments_;
  mutable std::mutex mutex_;
  RopeParams rope_;
  std::shared_ptr<const LayerCodec> codec_;
};

// What all sequences of one layer share. Immutable.
struct LayerContext {
  LayerShape shape;
  KVCacheConfig config;
  const MethodRow* method =
      nullptr;  // of this layer: a windowed layer has one of its own, that of windowed_bits
  int64_t positions = 0;   // that the context can reach
  int64_t fit_tokens = 0;  // resolved; 0 = whatever the first append brings
  int threads = 1;
  MemoryAccountPtr account;
  std::shared_ptr<CalibratedCodec> calibration;  // null: fit on the sequence
  SideBits bits;                                 // budgets of bits=auto
  WindowFormat window;

  LayerContext(const LayerShape& s, const KVCacheConfig& c, const MethodRow* m)
      : shape(s),
        config(c),
        method(m),
        window(s.kv_heads, s.head_dim_k, s.head_dim_v, m->window_codec()) {}
  bool windowed() const { return shape.window > 0; }
  // Tokens from which on a sequence is encoded. The sinks are full then, and two more tokens have a
  // spread.
  int64_t fit_due() const {
    const int64_t wanted = calibration ? 0 : fit_tokens;
    return std::max<int64_t>(wanted, config.sink_tokens + 2);
  }
};

// Tokens of encoded pages that are packed, and in layers without a window allocated, together.
inline constexpr int kSlabTokens = 256;
inline int64_t PagesAtOnce(int64_t page_tokens) {
  return std::max<int64_t>(1, kSlabTokens / page_tokens);
}

// Bytes of one sequence of this layer after `tokens` tokens.
int64_t EstimateLayerBytes(const LayerContext& context, int64_t tokens);

}  // namespace palu

#endif  // PALU_SRC_CACHE_LAYER_CONTEXT_H_
