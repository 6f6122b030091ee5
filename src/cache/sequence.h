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

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "cache/layer_context.h"
#include "cache/page_coder.h"
#include "cache/page_store.h"
#include "cache/token_view.h"
#include "palu/cache.h"

namespace palu {

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
  // What attention sees; valid until the next change.
  void FillView(TokenView& view) const;
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
  // Row i of both into one column of an exact page.
  void WriteToken(const ConstTensor& k, const ConstTensor& v, int64_t b, int64_t i, uint8_t* page,
                  int column) const;
  bool ReadyToFit(int64_t& rows_end) const;
  void Fit(int64_t rows_end);
  int64_t PagesDue() const;
  void SplitSinks();
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
