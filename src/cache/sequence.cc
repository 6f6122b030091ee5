#include "cache/sequence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/fp16.h"
#include "base/tensor_io.h"
#include "base/threads.h"
#include "cache/page_coder.h"
#include "kernels/kernels.h"
#include "palu/errors.h"

namespace palu {
Sequence::Sequence(std::shared_ptr<const LayerContext> context)
    : context_(std::move(context)),
      sinks_(&context_->window.layout, 1, context_->account),
      window_(&context_->window.layout, 1, context_->account) {}

int64_t Sequence::encoded_tokens() const {
  return encoded_ ? encoded_->pages() * encoded_->layout().page_tokens : 0;
}

int64_t Sequence::encoded_first() const { return sink_tokens() + dropped_; }

int64_t Sequence::window_first() const { return encoded_first() + encoded_tokens(); }

void Sequence::FillView(TokenView& view) const {
  view.context = context_.get();
  view.codecs.clear();
  if (encoded_tokens() > 0) view.codecs.push_back(codec_.get());
  view.size = size_;
  view.window = context_->shape.window;
  view.segments.clear();
  view.pages.clear();
  auto add = [&](const PageStore& store, bool encoded, int64_t first, int64_t count) {
    if (count == 0) return;
    view.segments.push_back({.layout = &store.layout(),
                             .codec = encoded ? 0 : -1,
                             .first = first,
                             .count = count,
                             .page = view.pages.size(),
                             .position = position_of(first)});
    const int64_t pages = PagesFor(count, store.layout().page_tokens);
    for (int64_t p = 0; p < pages; ++p) view.pages.push_back(store.page(p));
  };
  add(sinks_, false, 0, sink_tokens());
  if (encoded_) add(*encoded_, true, encoded_first(), encoded_tokens());
  add(window_, false, window_first(), size_ - window_first());
}

void Sequence::CheckAppend(const ConstTensor& k, const ConstTensor& v, int64_t b,
                           const AppendArgs& args) const {
  const LayerShape& shape = context_->shape;
  const int64_t next = first_position_ + size_;
  if (args.position >= 0 && size_ > 0 && args.position != next) {
    throw StateError(Where(shape) + "tokens at position " + std::to_string(args.position) +
                     " do not continue the cache, whose next position is " + std::to_string(next));
  }
  if (args.position < -1) {
    throw InputError(Where(shape) + "position " + std::to_string(args.position) +
                     " is not allowed; it must be -1 or at least 0");
  }
  if (args.rope) CheckRope(shape, *args.rope);
  const bool averaged =
      context_->config.key_fit == KeyFit::kAveraged || context_->calibration != nullptr;
  if (context_->method->fits() && !codec_ && averaged && !args.rope) {
    throw StateError(
        Where(shape) +
        "key_fit=averaged and basis=FILE need AppendArgs::rope until the basis is fitted (empty "
        "RopeParams for keys "
        "without rotation), or use basis=fit,key_fit=prompt");
  }
  if (!codec_ && context_->calibration && args.rope && !context_->calibration->Fits(*args.rope)) {
    throw StateError(Where(shape) +
                     "rope differs from that of the sequences before; a cache with basis=FILE has "
                     "one rotation");
  }
  if (rope_ && args.rope && !codec_ && size_ > 0 && *rope_ != *args.rope) {
    throw StateError(Where(shape) +
                     "rope differs from that of the tokens before; one sequence has one rotation");
  }
  CheckValues(*context_, k, b, "K");
  CheckValues(*context_, v, b, "V");
}

void Sequence::Append(const ConstTensor& k, const ConstTensor& v, int64_t b,
                      const AppendArgs& args) {
  const bool first = size_ == 0;
  WriteRows(k, v, b);
  if (first && args.position >= 0) first_position_ = args.position;
  if (args.rope && !codec_) rope_ = *args.rope;
}

// A query at index q sees tokens above q - window; the next one is at size(). Encoded pages of such
// a layer have 32 tokens too.
void Sequence::DropOutsideWindow() {
  if (!context_->windowed()) return;
  const int64_t first_needed = size_ - context_->shape.window + 1;
  const int64_t unseen = std::max<int64_t>(0, first_needed - encoded_first()) / kBlockTokens;
  const int64_t packed = std::min(unseen, encoded_ ? encoded_->pages() : 0);
  const int64_t exact = std::min(unseen - packed, window_.pages());
  if (packed > 0) encoded_->PopFront(packed);
  window_.PopFront(exact);
  dropped_ += (packed + exact) * kBlockTokens;
}

void Sequence::WriteToken(const ConstTensor& k, const ConstTensor& v, int64_t b, int64_t i,
                          uint8_t* page, int column) const {
  const PageLayout& layout = context_->window.layout;
  thread_local std::vector<float> copy;
  for (const bool is_v : {false, true}) {
    const ConstTensor& x = is_v ? v : k;
    copy.resize(static_cast<size_t>(x.shape[3]));
    for (int h = 0; h < context_->shape.kv_heads; ++h) {
      const float* row = RowOrNull(x, b, h, i);
      if (!row) ReadRow(x, b, h, i, copy.data()), row = copy.data();
      WriteExactRow(is_v ? context_->window.v : context_->window.k, row, x.shape[3], column,
                    page + (is_v ? layout.v_offset : layout.k_offset)[h]);
    }
  }
}

void Sequence::WriteRows(const ConstTensor& k, const ConstTensor& v, int64_t b) {
  const int64_t n = k.shape[2], end = size_ + n;
  const int64_t sinks = split_ ? config_sinks() : 0;
  const int64_t first =
      sinks + encoded_tokens() + dropped_;  // of the window, once the sinks are full
  const int64_t old_sink_pages = sinks_.pages(), old_window_pages = window_.pages();
  try {
    sinks_.Extend(PagesFor(std::min(end, sinks), kBlockTokens) - old_sink_pages);
    window_.Extend(PagesFor(std::max<int64_t>(0, end - first), kBlockTokens) - old_window_pages);
    // Half-filled pages that a fork shares are cloned here, so that nothing below can fail.
    if (size_ < sinks && old_sink_pages > 0) sinks_.MutablePage(old_sink_pages - 1);
    if (old_window_pages > 0) window_.MutablePage(old_window_pages - 1);
  } catch (...) {
    sinks_.PopBack(sinks_.pages() - old_sink_pages);
    window_.PopBack(window_.pages() - old_window_pages);
    throw;
  }

  ParallelFor(context_->threads, PagesFor(n, kRowsAtOnce), [&](int64_t part) {
    const int64_t last = std::min(n, (part + 1) * kRowsAtOnce);
    for (int64_t i = part * kRowsAtOnce; i < last; ++i) {
      const int64_t token = size_ + i;
      const bool sink = token < sinks;
      const int64_t at = sink ? token : token - first;
      uint8_t* const page = (sink ? sinks_ : window_).MutablePage(at / kBlockTokens);
      WriteToken(k, v, b, i, page, static_cast<int>(at % kBlockTokens));
    }
  });
  size_ += n;
}

void Sequence::Decode(int head, int64_t first, int64_t n, float* k_out, float* v_out) const {
  const LayerShape& shape = context_->shape;
  if (k_out) std::fill_n(k_out, n * shape.head_dim_k, 0.0f);
  if (v_out) std::fill_n(v_out, n * shape.head_dim_v, 0.0f);
  TokenView view;
  FillView(view);
  for (const Segment& segment : view.segments) {
    const int64_t begin = std::max(first, segment.first);
    const int64_t end = std::min(first + n, segment.first + segment.count);
    if (begin >= end) continue;
    const int64_t row = begin - first;
    if (k_out) DecodeRows(view, segment, head, false, begin, end, k_out + row * shape.head_dim_k);
    if (v_out) DecodeRows(view, segment, head, true, begin, end, v_out + row * shape.head_dim_v);
  }
}

void Sequence::CheckTrim(int64_t n) const {
  if (n < 0 || n > size_) {
    throw StateError(Where(context_->shape) + "cannot trim " + std::to_string(n) +
                     " tokens; allowed are 0 to " + std::to_string(size_));
  }
  // The next query sees tokens above size - n - window.
  const int64_t oldest = size_ - n - context_->shape.window + 1;
  if (dropped_ > 0 && n < size_ && oldest < encoded_first()) {
    throw StateError(
        Where(context_->shape) + "cannot trim " + std::to_string(n) +
        " tokens: the sliding window of " + std::to_string(context_->shape.window) +
        " tokens has dropped tokens that would be visible again; allowed are 0 to " +
        std::to_string(std::max<int64_t>(0, size_ - context_->shape.window + 1 - encoded_first())) +
        " or all " + std::to_string(size_));
  }
}

// The first `keep` tokens of encoded page `page`, decoded, as a window.
PageStore Sequence::Reopen(int64_t page, int64_t keep) const {
  const LayerShape& shape = context_->shape;
  const PageLayout& raw = context_->window.layout;
  const int64_t first = encoded_first() + page * encoded_->layout().page_tokens;
  PageStore window(&raw, 1, context_->account);
  window.Extend(PagesFor(keep, kBlockTokens));
  std::vector<float> rows(static_cast<size_t>(keep) * std::max(shape.head_dim_k, shape.head_dim_v));
  for (int h = 0; h < shape.kv_heads; ++h) {
    for (const bool is_v : {false, true}) {
      const int dim = is_v ? shape.head_dim_v : shape.head_dim_k;
      Decode(h, first, keep, is_v ? nullptr : rows.data(), is_v ? rows.data() : nullptr);
      for (float& x : rows) x = std::clamp(x, -kMaxF16, kMaxF16);
      for (int64_t t = 0; t < keep; ++t) {
        uint8_t* side =
            window.MutablePage(t / kBlockTokens) + (is_v ? raw.v_offset : raw.k_offset)[h];
        WriteExactRow(is_v ? context_->window.v : context_->window.k, rows.data() + t * dim, dim,
                      static_cast<int>(t % kBlockTokens), side);
      }
    }
  }
  return window;
}

std::optional<PageStore> Sequence::PrepareTrim(int64_t n) const {
  CheckTrim(n);
  const int64_t size = size_ - n;
  if (!encoded_ || size >= window_first()) return std::nullopt;
  const int page_tokens = encoded_->layout().page_tokens;
  const int64_t kept = std::max<int64_t>(0, size - encoded_first());
  if (kept % page_tokens == 0) return PageStore(&context_->window.layout, 1, context_->account);
  return Reopen(kept / page_tokens, kept % page_tokens);
}

void Sequence::Trim(int64_t n, std::optional<PageStore> window) {
  const int64_t size = size_ - n;
  const int64_t sinks = split_ ? std::min(size, config_sinks()) : 0;
  if (window) {
    const int64_t kept = std::max<int64_t>(0, size - encoded_first());
    window_ = std::move(*window);
    encoded_->PopBack(encoded_->pages() - kept / encoded_->layout().page_tokens);
  } else {
    const int64_t in_window = std::max<int64_t>(0, size - window_first());
    window_.PopBack(window_.pages() - PagesFor(in_window, kBlockTokens));
  }
  sinks_.PopBack(sinks_.pages() - PagesFor(sinks, kBlockTokens));
  size_ = size;
  if (size_ == 0) dropped_ = 0;
}

void Sequence::Clear() {
  Sequence empty(context_);
  *this = std::move(empty);
}

int64_t Sequence::nbytes() const {
  CacheStats stats;
  AddTo(stats);
  return stats.nbytes;
}

void Sequence::AddTo(CacheStats& stats) const {
  const int64_t encoded = encoded_tokens();
  stats.encoded_tokens += encoded;
  stats.exact_tokens += size_ - encoded - dropped_;
  const int64_t window = sinks_.slab_bytes() + window_.slab_bytes();
  const int64_t tables =
      sinks_.table_bytes() + window_.table_bytes() + (encoded_ ? encoded_->table_bytes() : 0);
  // That of a file belongs to the cache, not to its sequences.
  const int64_t basis = codec_ && !context_->calibration ? codec_->basis_bytes() : 0;
  int64_t codes = 0, scales = 0;
  if (encoded_) {
    for (const SideCodec* side : {&codec_->k, &codec_->v}) {
      for (const GroupCodec& group : side->groups) {
        const int64_t sides = group.units * encoded_->pages();
        codes += sides * static_cast<int64_t>(group.plan.code_bytes());
        scales += sides * static_cast<int64_t>(group.plan.scale_bytes);
      }
    }
    stats.slack_bytes += encoded_->slab_bytes() - codes - scales;
  }
  stats.code_bytes += codes;
  stats.scale_bytes += scales;
  stats.window_bytes += window;
  stats.table_bytes += tables;
  stats.basis_bytes += basis;
  stats.nbytes += window + tables + basis + (encoded_ ? encoded_->slab_bytes() : 0);
  auto lost = [](double all, double kept) { return all > 0 ? 1.0 - kept / all : 0.0; };
  stats.residual_energy_k += lost(energy_k_, kept_k_);
  stats.residual_energy_v += lost(energy_v_, kept_v_);
}

}  // namespace palu
