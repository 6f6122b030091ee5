#include "cache/sequence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/fp16.h"
#include "base/tensor_io.h"
#include "kernels/kernels.h"
#include "palu/errors.h"

namespace palu {
namespace {

std::string Where(const LayerShape& shape) { return "layer " + std::to_string(shape.index) + ": "; }

// Throws for the first value of a side that cannot be stored.
void CheckValues(const LayerShape& shape, const ConstTensor& x, int64_t b, const char* side,
                 float limit) {
  const KernelTable& kernels = Active();
  const int64_t heads = x.shape[1], tokens = x.shape[2], dim = x.shape[3];
  std::vector<float> copy(static_cast<size_t>(dim));
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      const float* row = RowOrNull(x, b, h, t);
      if (!row) ReadRow(x, b, h, t, copy.data()), row = copy.data();
      const int64_t bad = kernels.find_bad(row, dim, limit);
      if (bad < 0) continue;
      const std::string value = std::isnan(row[bad])   ? "NaN"
                                : std::isinf(row[bad]) ? "an infinity"
                                                       : std::to_string(row[bad]);
      throw InputError(Where(shape) + side + " has " + value + " at sequence " + std::to_string(b) +
                       ", head " + std::to_string(h) + ", token " + std::to_string(t) +
                       " of the append, channel " + std::to_string(bad) +
                       "; allowed are finite values of at most " + std::to_string(limit));
    }
  }
}

void CheckRope(const LayerShape& shape, const RopeParams& rope) {
  if (2 * rope.inv_freq.size() > static_cast<size_t>(shape.head_dim_k)) {
    throw InputError(Where(shape) + "rope turns " + std::to_string(2 * rope.inv_freq.size()) +
                     " dims, the keys have " + std::to_string(shape.head_dim_k));
  }
  for (const float f : rope.inv_freq) {
    if (!std::isfinite(f))
      throw InputError(Where(shape) + "rope has a frequency that is not finite");
  }
}

// Puts one row into column t of a raw page side: value c goes to block position c * 32 + t.
void ScatterRow(const PagePlan& plan, const float* row, int64_t dim, int t, uint8_t* side) {
  if (plan.bits[0] == 32) {
    for (int64_t c = 0; c < dim; ++c)
      std::memcpy(side + (c * kBlockTokens + t) * sizeof(float), row + c, sizeof(float));
    return;
  }
  uint16_t half[kMaxRank];
  Active().f32_to_f16(row, half, dim);
  for (int64_t c = 0; c < dim; ++c) {
    std::memcpy(side + (c * kBlockTokens + t) * sizeof(uint16_t), half + c, sizeof(uint16_t));
  }
}

}  // namespace

Sequence::Sequence(std::shared_ptr<const LayerContext> context)
    : context_(std::move(context)),
      sinks_(&context_->window.layout, 1, context_->account),
      window_(&context_->window.layout, 1, context_->account) {}

int64_t Sequence::encoded_tokens() const {
  return encoded_ ? encoded_->pages() * encoded_->layout().page_tokens : 0;
}

int64_t Sequence::encoded_first() const { return sink_tokens() + dropped_; }

int64_t Sequence::window_first() const { return encoded_first() + encoded_tokens(); }

std::vector<Segment> Sequence::Segments() const {
  std::vector<Segment> segments;
  auto add = [&](const PageStore* store, bool encoded, int64_t first, int64_t count) {
    if (count > 0) segments.push_back({store, encoded, first, count});
  };
  add(&sinks_, false, 0, sink_tokens());
  if (encoded_) add(&*encoded_, true, encoded_first(), encoded_tokens());
  add(&window_, false, window_first(), size_ - window_first());
  return segments;
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
  const float limit =
      context_->method->window_codec() == Codec::kF32 ? std::numeric_limits<float>::max() : kMaxF16;
  CheckValues(shape, k, b, "K", limit);
  CheckValues(shape, v, b, "V", limit);
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

void Sequence::WriteRows(const ConstTensor& k, const ConstTensor& v, int64_t b) {
  const LayerShape& shape = context_->shape;
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

  const PageLayout& layout = context_->window.layout;
  std::vector<float> copy(static_cast<size_t>(std::max(shape.head_dim_k, shape.head_dim_v)));
  auto write = [&](const ConstTensor& x, const PagePlan& plan, int64_t h, int64_t i, size_t offset,
                   uint8_t* page, int column) {
    const float* row = RowOrNull(x, b, h, i);
    if (!row) ReadRow(x, b, h, i, copy.data()), row = copy.data();
    ScatterRow(plan, row, x.shape[3], column, page + offset);
  };
  for (int64_t i = 0; i < n; ++i) {
    const int64_t token = size_ + i;
    const bool sink = token < sinks;
    const int64_t at = sink ? token : token - first;
    uint8_t* page = (sink ? sinks_ : window_).MutablePage(at / kBlockTokens);
    for (int h = 0; h < shape.kv_heads; ++h) {
      write(k, context_->window.k, h, i, layout.k_offset[h], page,
            static_cast<int>(at % kBlockTokens));
      write(v, context_->window.v, h, i, layout.v_offset[h], page,
            static_cast<int>(at % kBlockTokens));
    }
  }
  size_ += n;
}

// Rows of tokens [t, t + count) of one encoded block, one head of a unit: latents [count][rank] to
// x ~ basis^T latent + mean. basis: that of the group in f32.
void Sequence::FromLatents(const GroupCodec& group, int head, int dim, int64_t t, int64_t count,
                           const float* basis, const float* latents, float* rows) const {
  if (!group.mean.empty()) {
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(&group.mean[head * dim], dim, rows + i * dim);
    }
  }
  if (group.basis.empty()) {
    for (int64_t i = 0; i < count; ++i) {
      for (int d = 0; d < dim; ++d) rows[i * dim + d] += latents[i * group.dim + head * dim + d];
    }
  } else {
    Active().gemm({.a = latents,
                   .lda = group.rank(),
                   .b = basis + head * dim,
                   .ldb = group.dim,
                   .c = rows,
                   .ldc = dim,
                   .m = static_cast<int>(count),
                   .n = dim,
                   .k = group.rank(),
                   .accumulate = true});
  }
  if (!group.rotated_means.empty()) {
    group.rotated_means[head].Add(position_of(t), count, 1.0f, rows, dim);
  }
}

void Sequence::Decode(int head, int64_t first, int64_t n, float* k_out, float* v_out) const {
  const LayerShape& shape = context_->shape;
  if (k_out) std::fill_n(k_out, n * shape.head_dim_k, 0.0f);
  if (v_out) std::fill_n(v_out, n * shape.head_dim_v, 0.0f);
  for (const Segment& segment : Segments()) {
    const int64_t begin = std::max(first, segment.first);
    const int64_t end = std::min(first + n, segment.first + segment.count);
    if (begin >= end) continue;
    if (k_out) DecodeSegment(segment, head, false, begin, end, k_out, first);
    if (v_out) DecodeSegment(segment, head, true, begin, end, v_out, first);
  }
}

// Tokens [begin, end) of one side of a segment; out[0] is token `first`.
void Sequence::DecodeSegment(const Segment& segment, int head, bool is_v, int64_t begin,
                             int64_t end, float* out, int64_t first) const {
  const PageLayout& layout = segment.store->layout();
  const int unit = segment.encoded ? codec_->unit_of_head[head] : head;
  const PagePlan& plan = *(is_v ? layout.v : layout.k)[unit];
  const size_t offset = (is_v ? layout.v_offset : layout.k_offset)[unit];
  const int dim = is_v ? context_->shape.head_dim_v : context_->shape.head_dim_k;
  std::vector<float> tile(static_cast<size_t>(kBlockTokens) * plan.rank), basis;
  const GroupCodec* group = segment.encoded ? &(is_v ? codec_->v : codec_->k).unit(unit) : nullptr;
  if (group) {
    basis.resize(group->basis.size());
    Active().f16_to_f32(group->basis.data(), basis.data(), static_cast<int64_t>(basis.size()));
  }
  for (int64_t t = begin; t < end;) {
    const int64_t at = t - segment.first;
    const int block = static_cast<int>(at % layout.page_tokens / kBlockTokens);
    const int column = static_cast<int>(at % kBlockTokens);
    const int64_t count = std::min<int64_t>(kBlockTokens - column, end - t);
    Active().decode_block_tokens(plan, segment.store->page(at / layout.page_tokens) + offset, block,
                                 tile.data(), plan.rank);
    const float* const latents = tile.data() + static_cast<size_t>(column) * plan.rank;
    float* const rows = out + (t - first) * dim;
    if (group) {
      FromLatents(*group, head - codec_->units[unit].first, dim, t, count, basis.data(), latents,
                  rows);
    } else {
      std::copy_n(latents, count * dim, rows);
    }
    t += count;
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
        ScatterRow(is_v ? context_->window.v : context_->window.k, rows.data() + t * dim, dim,
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
