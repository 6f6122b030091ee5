// File: sequence.h - the tokens of one (layer, sequence): sinks, packed pages, exact window.
//
//   token order:  [ sinks, exact ][ dropped by a sliding window ][ encoded pages ][ window, exact ]
//
// Until the fit there are no sinks: all tokens sit in the window, which takes what fp16 would.
// Only one of "sinks" and "dropped" is ever non-empty: layers with a sliding window have no sinks.
// The exact parts are pages of 32 tokens in the raw format, so attention reads all three parts with
// the same kernels.
#ifndef PALU_SRC_CACHE_SEQUENCE_H_
#define PALU_SRC_CACHE_SEQUENCE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cache/page_store.h"
#include "fit/calibration_file.h"
#include "methods/layer_codec.h"
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

// A run of tokens with one layout, as attention walks it.
struct Segment {
  const PageStore* store = nullptr;
  bool encoded = false;
  int64_t first = 0;  // index of its first token in the sequence
  int64_t count = 0;  // tokens; the last page may be partly filled
};

class Sequence {
 public:
  explicit Sequence(std::shared_ptr<const LayerContext> context);
  // Copies share pages and the codec.
  Sequence(const Sequence&) = default;
  Sequence(Sequence&&) noexcept = default;
  Sequence& operator=(Sequence&&) noexcept = default;

  // Throws without a change unless batch element b of k and v may follow. Run for all b before any
  // Append.
  void CheckAppend(const ConstTensor& k, const ConstTensor& v, int64_t b,
                   const AppendArgs& args) const;
  // Frees the pages that no query to come can see; before Seal, which then need not pack them.
  void DropOutsideWindow();
  void Append(const ConstTensor& k, const ConstTensor& v, int64_t b, const AppendArgs& args);
  // Seal and Trim in two steps, so that a batch changes as a whole or not at all. The first step
  // makes what has to be allocated and throws MemoryError without a change; the second only uses
  // it. PrepareSeal returns whether it fitted the basis; AbandonSeal takes that back.
  bool PrepareSeal();
  void AbandonSeal(bool fitted);
  void Seal();
  void CheckTrim(int64_t n) const;
  // The window after a trim that cuts an encoded page, otherwise nothing.
  std::optional<PageStore> PrepareTrim(int64_t n) const;
  void Trim(int64_t n, std::optional<PageStore> window);
  void Clear();

  int64_t size() const { return size_; }
  int64_t position_of(int64_t token) const { return first_position_ + token; }
  const LayerContext& context() const { return *context_; }
  const LayerCodec* codec() const { return codec_.get(); }
  std::vector<Segment> Segments() const;  // non-empty ones, in token order
  int64_t encoded_tokens() const;
  void AddTo(CacheStats& stats) const;  // bytes and token counts
  int64_t nbytes() const;

  // Decoded rows of tokens [first, first + n), one head: k_out [n][Dk], v_out [n][Dv]; either may
  // be null. Tokens that a sliding window dropped read as zeros.
  void Decode(int head, int64_t first, int64_t n, float* k_out, float* v_out) const;

 private:
  int64_t sink_tokens() const { return split_ ? std::min(size_, config_sinks()) : 0; }
  int64_t config_sinks() const { return context_->config.sink_tokens; }
  int64_t encoded_first() const;  // index of the first token behind the dropped ones
  int64_t window_first() const;   // index of the window's first token
  void WriteRows(const ConstTensor& k, const ConstTensor& v, int64_t b);
  bool ReadyToFit(int64_t& rows_end) const;
  Moments UnitMoments(const HeadUnit& unit, bool is_v, bool unrotate, int64_t first,
                      int64_t last) const;
  LayerMoments CollectMoments(int64_t first, int64_t last) const;
  void Fit(int64_t rows_end);
  int64_t PagesDue() const;
  void SplitSinks();
  struct Energy {
    double all = 0, kept = 0;
  };
  void FromLatents(const GroupCodec& group, int head, int dim, int64_t t, int64_t count,
                   const float* basis, const float* latents, float* rows) const;
  void DecodeSegment(const Segment& segment, int head, bool is_v, int64_t begin, int64_t end,
                     float* out, int64_t first) const;
  void TakeMeans(const GroupCodec& group, int64_t first, int head, int dim, float* x) const;
  Energy EncodeSide(int64_t from, int64_t index, int unit, bool is_v, uint8_t* page) const;
  void EncodePages(int64_t n);
  PageStore Reopen(int64_t page, int64_t keep) const;

  std::shared_ptr<const LayerContext> context_;
  std::shared_ptr<const LayerCodec> codec_;  // null until the fit
  std::optional<RopeParams> rope_;           // of the tokens before the fit
  int64_t first_position_ = 0;               // of token 0
  int64_t size_ = 0;
  int64_t dropped_ = 0;  // tokens in front of the pages, gone for good; a multiple of 32
  bool split_ = false;   // the sinks have left the window
  PageStore sinks_, window_;
  std::optional<PageStore> encoded_;
  double energy_k_ = 0, energy_v_ = 0;  // of encoded tokens, centred
  double kept_k_ = 0, kept_v_ = 0;      // the latents' share of it
};

}  // namespace palu

#endif  // PALU_SRC_CACHE_SEQUENCE_H_
