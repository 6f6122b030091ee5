// Seal: how tokens leave the exact window.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/threads.h"
#include "cache/sequence.h"
#include "kernels/kernels.h"

namespace palu {

// Tokens in pages, dropped ones too, are to be floor(max(0, size - sinks - recent) / T) * T.
int64_t Sequence::PagesDue() const {
  const int64_t page_tokens = codec_->layout.page_tokens;
  const int64_t free = size_ - config_sinks() - context_->config.recent_tokens;
  return std::max<int64_t>(0, free) / page_tokens - dropped_ / page_tokens - encoded_->pages();
}

// True when the basis can be fitted, on tokens [sinks, rows_end). Sinks are left out: they stay
// exact and are unlike all other tokens.
bool Sequence::ReadyToFit(int64_t& rows_end) const {
  if (codec_ || !context_->method->encodes()) return false;
  const int64_t due = context_->fit_due();
  rows_end = context_->fit_tokens == 0 ? size_ : due;
  return size_ >= due;
}

void Sequence::Fit(int64_t rows_end) {
  const int64_t first = config_sinks();
  FitRows rows;
  if (context_->method->fits()) {
    rows.positions.resize(static_cast<size_t>(rows_end - first));
    std::iota(rows.positions.begin(), rows.positions.end(), position_of(first));
    rows.read = [this, first](int head, bool is_v, int64_t t, int64_t n, float* out) {
      Decode(head, first + t, n, is_v ? nullptr : out, is_v ? out : nullptr);
    };
  }
  std::shared_ptr<const LayerCodec> codec = FitCodec(*context_, rope_.value_or(RopeParams()), rows);
  // A sliding window drops its pages one by one.
  const int64_t per_slab = context_->windowed() ? 1 : PagesAtOnce(codec->layout.page_tokens);
  encoded_.emplace(&codec->layout, static_cast<int>(per_slab), context_->account);
  codec_ = std::move(codec);
}

bool Sequence::PrepareSeal() {
  int64_t rows_end = 0;
  const bool fits = ReadyToFit(rows_end);
  if (fits) Fit(rows_end);
  if (!codec_) return false;
  // What is packed first and one slab more is enough: a full slab of codes frees a window larger
  // than the next slab, unless a fork holds that window too.
  const int64_t at_once = PagesAtOnce(codec_->layout.page_tokens);
  const int64_t room = (at_once - encoded_->pages() % at_once) % at_once;
  try {
    if (fits && config_sinks() > 0) {
      sinks_.Extend(PagesFor(config_sinks(), kBlockTokens));
      for (int64_t p = 0; p < window_.pages(); ++p) window_.MutablePage(p);
    }
    encoded_->Reserve(std::clamp<int64_t>(PagesDue(), 0, room + at_once));
  } catch (...) {
    AbandonSeal(fits);
    throw;
  }
  return fits;
}

void Sequence::AbandonSeal(bool fitted) {
  if (encoded_) encoded_->ReleaseReserve();
  if (!fitted) return;
  sinks_.PopBack(sinks_.pages());
  encoded_.reset();
  codec_.reset();
}

// Copies the first tokens to pages of their own and moves the others up in the window. PrepareSeal
// made the pages.
void Sequence::SplitSinks() {
  split_ = true;
  const int64_t sinks = config_sinks(), old_pages = window_.pages();
  if (sinks == 0) return;
  const size_t page_bytes = context_->window.layout.page_bytes;
  for (int64_t p = 0; p < sinks_.pages(); ++p) {
    std::memcpy(sinks_.MutablePage(p), window_.page(p), page_bytes);
  }
  // A page is rows of 32 halves, one column per token. Moving forwards only overwrites what has
  // moved.
  constexpr size_t kRow = kBlockTokens * sizeof(uint16_t);
  const int64_t skip = sinks / kBlockTokens;
  const size_t tail = static_cast<size_t>(sinks % kBlockTokens) * sizeof(uint16_t);
  const int64_t new_pages = PagesFor(size_ - sinks, kBlockTokens);
  for (int64_t p = 0; p < new_pages; ++p) {
    uint8_t* const to = window_.MutablePage(p);
    const uint8_t* const from = window_.page(p + skip);
    const uint8_t* const next = p + skip + 1 < old_pages ? window_.page(p + skip + 1) : nullptr;
    for (size_t at = 0; at < page_bytes; at += kRow) {
      std::memmove(to + at, from + at + tail, kRow - tail);
      if (next) std::memcpy(to + at + kRow - tail, next + at, tail);
    }
  }
  window_.PopBack(old_pages - new_pages);
}

// 256 tokens at a time, so that the window shrinks as the pages grow.
void Sequence::Seal() {
  if (codec_ && !split_) SplitSinks();
  while (codec_ && PagesDue() > 0) {
    const int64_t at_once = PagesAtOnce(codec_->layout.page_tokens);
    EncodePages(std::min(PagesDue(), at_once - encoded_->pages() % at_once));
  }
}

void Sequence::EncodePages(int64_t n) {
  const int64_t sides = 2 * static_cast<int64_t>(codec_->units.size());
  const int blocks = codec_->layout.page_tokens / kBlockTokens;
  const int64_t first = encoded_->pages();
  encoded_->Extend(n);
  std::vector<uint8_t*> pages;
  for (int64_t p = 0; p < n; ++p) pages.push_back(encoded_->MutablePage(first + p));
  std::vector<const uint8_t*> exact;
  std::vector<BlockPositions> positions;
  const int64_t first_token = encoded_first() + first * codec_->layout.page_tokens;
  for (int64_t i = 0; i < n * blocks; ++i) {
    exact.push_back(window_.page(i));
    positions.push_back({position_of(first_token + i * kBlockTokens)});
  }
  std::vector<Energy> energies(static_cast<size_t>(n * sides));
  ParallelFor(context_->threads, n * sides, [&](int64_t task) {
    const int64_t p = task / sides;
    energies[static_cast<size_t>(task)] =
        EncodeSide(*context_, *codec_, &exact[p * blocks], &positions[p * blocks],
                   static_cast<int>(task % sides / 2), task % 2, pages[p]);
  });
  for (size_t i = 0; i < energies.size(); ++i) {
    (i % 2 ? energy_v_ : energy_k_) += energies[i].all;
    (i % 2 ? kept_v_ : kept_k_) += std::min(energies[i].kept, energies[i].all);
  }
  window_.PopFront(n * blocks);
}

}  // namespace palu
