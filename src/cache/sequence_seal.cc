// Fit and encode: how tokens leave the exact window.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/threads.h"
#include "cache/sequence.h"
#include "kernels/kernels.h"

namespace palu {
namespace {

constexpr int kSlabTokens = 256;

}  // namespace

// True when the basis can be fitted, on tokens [sinks, rows_end). Sinks are left out: they stay
// exact and are unlike all other tokens.
bool Sequence::ReadyToFit(int64_t& rows_end) const {
  if (codec_ || !context_->method->encodes()) return false;
  const int64_t least = config_sinks() + 2;  // one token has no spread
  if (context_->fit_tokens == 0) {
    rows_end = size_;
    return size_ >= least;
  }
  rows_end = std::max(context_->fit_tokens, least);
  return size_ >= rows_end;
}

// Moments of both sides of tokens [first, last), by head group.
LayerMoments Sequence::CollectMoments(int64_t first, int64_t last) const {
  const LayerShape& shape = context_->shape;
  const bool averaged = context_->config.key_fit == KeyFit::kAveraged && !rope_->inv_freq.empty();
  // One task per (side, head); summed over heads in order afterwards.
  std::vector<Moments> moments;
  for (int i = 0; i < 2 * shape.kv_heads; ++i)
    moments.emplace_back(i % 2 ? shape.head_dim_v : shape.head_dim_k);
  ParallelFor(context_->threads, 2 * shape.kv_heads, [&](int64_t i) {
    const int head = static_cast<int>(i / 2), dim = moments[i].dim;
    const bool is_v = i % 2;
    constexpr int64_t kRows = 256;  // at a time
    std::vector<float> rows(static_cast<size_t>(kRows) * dim);
    for (int64_t t = first; t < last; t += kRows) {
      const int64_t count = std::min(kRows, last - t);
      Decode(head, t, count, is_v ? nullptr : rows.data(), is_v ? rows.data() : nullptr);
      if (!is_v && averaged) Unrotate(*rope_, first_position_ + t, rows.data(), count, dim);
      moments[i].Add(rows.data(), count, dim);
    }
  });
  LayerMoments layer;
  layer.groups = HeadGroups(shape.kv_heads, context_->config.n_head_groups);
  for (const HeadRange& range : layer.groups) {
    layer.k.emplace_back(shape.head_dim_k);
    layer.v.emplace_back(shape.head_dim_v);
    for (int h = range.first; h < range.last; ++h) {
      layer.k.back().Add(moments[2 * h]);
      layer.v.back().Add(moments[2 * h + 1]);
    }
    if (averaged)
      layer.k.back() = AverageOverPositions(layer.k.back(), *rope_, context_->positions);
  }
  return layer;
}

void Sequence::Fit(int64_t rows_end) {
  const LayerShape& shape = context_->shape;
  LayerMoments moments;
  if (context_->method->fits()) {
    moments = CollectMoments(config_sinks(), rows_end);
  } else {
    moments.groups = HeadGroups(shape.kv_heads, 1);
  }
  auto codec = FitLayer(context_->config, *context_->method, shape.head_dim_k, shape.head_dim_v,
                        moments, context_->account);
  encoded_.emplace(&codec->layout, std::max(1, kSlabTokens / codec->layout.page_tokens),
                   context_->account);
  codec_ = std::move(codec);
}

// Tokens in pages are to be floor(max(0, size - sinks - recent) / T) * T.
int64_t Sequence::PagesDue() const {
  const int64_t free = size_ - config_sinks() - context_->config.recent_tokens;
  return std::max<int64_t>(0, free) / codec_->layout.page_tokens - encoded_->pages();
}

bool Sequence::PrepareSeal() {
  int64_t rows_end = 0;
  const bool fits = ReadyToFit(rows_end);
  if (fits) Fit(rows_end);
  if (!codec_) return false;
  // One new slab is enough: a full slab of codes frees a window larger than the next slab, unless a
  // fork holds that window too.
  const int64_t per_slab = encoded_->pages_per_slab();
  const int64_t room = (per_slab - encoded_->pages() % per_slab) % per_slab;
  try {
    if (fits) {
      sinks_.Extend(PagesFor(config_sinks(), kBlockTokens));
      for (int64_t p = 0; p < window_.pages(); ++p) window_.MutablePage(p);
    }
    encoded_->Reserve(std::clamp<int64_t>(PagesDue(), 0, room + per_slab));
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

// One slab at a time, so that the window shrinks as the pages grow.
void Sequence::Seal() {
  if (codec_ && !split_) SplitSinks();
  while (codec_ && PagesDue() > 0) {
    const int64_t per_slab = encoded_->pages_per_slab();
    EncodePages(std::min(PagesDue(), per_slab - encoded_->pages() % per_slab));
  }
}

void Sequence::EncodePages(int64_t n) {
  const PageLayout& layout = codec_->layout;
  const PageLayout& raw = context_->window.layout;
  const int heads = context_->shape.kv_heads;
  const int blocks = layout.page_tokens / kBlockTokens;
  const int64_t first = encoded_->pages();
  encoded_->Extend(n);
  std::vector<uint8_t*> pages;
  for (int64_t p = 0; p < n; ++p) pages.push_back(encoded_->MutablePage(first + p));

  struct Energy {
    double all = 0, kept = 0;
  };
  std::vector<Energy> energies(static_cast<size_t>(n) * heads * 2);
  ParallelFor(context_->threads, n * heads * 2, [&](int64_t task) {
    const int64_t p = task / (heads * 2);
    const int head = static_cast<int>(task / 2 % heads);
    const bool is_v = task % 2;
    const KernelTable& kernels = Active();
    const GroupCodec& group = (is_v ? codec_->v : codec_->k).head(head);
    const int tokens = layout.page_tokens, dim = group.dim, rank = group.rank();
    thread_local std::vector<float> scratch;
    scratch.resize(static_cast<size_t>(dim) * (kBlockTokens + tokens) +
                   static_cast<size_t>(rank) * (dim + tokens));
    float* const block = scratch.data();                // [D][32]
    float* const centred = block + dim * kBlockTokens;  // [D][T]
    float* const basis = centred + dim * tokens;        // [rank][D]
    float* const latent = basis + rank * dim;           // [rank][T]
    const PagePlan& plan = is_v ? context_->window.v : context_->window.k;
    const size_t offset = is_v ? raw.v_offset[head] : raw.k_offset[head];
    Energy& energy = energies[static_cast<size_t>(task)];
    for (int i = 0; i < blocks; ++i) {
      kernels.decode_block(plan, window_.page(p * blocks + i) + offset, 0, block);
      for (int d = 0; d < dim; ++d) {
        const float mean = group.mean.empty() ? 0.0f : group.mean[d];
        for (int t = 0; t < kBlockTokens; ++t) {
          const float x = block[d * kBlockTokens + t] - mean;
          centred[d * tokens + i * kBlockTokens + t] = x;
          energy.all += static_cast<double>(x) * x;
        }
      }
    }
    if (group.basis.empty()) {
      std::copy_n(centred, static_cast<int64_t>(dim) * tokens, latent);
    } else {
      kernels.f16_to_f32(group.basis.data(), basis, static_cast<int64_t>(rank) * dim);
      kernels.gemm({.a = basis,
                    .lda = dim,
                    .b = centred,
                    .ldb = tokens,
                    .c = latent,
                    .ldc = tokens,
                    .m = rank,
                    .n = tokens,
                    .k = dim});
    }
    for (int64_t j = 0; j < static_cast<int64_t>(rank) * tokens; ++j) {
      energy.kept += static_cast<double>(latent[j]) * latent[j];
    }
    kernels.encode_page(group.plan, latent, tokens,
                        pages[p] + (is_v ? layout.v_offset : layout.k_offset)[head]);
  });
  for (size_t i = 0; i < energies.size(); ++i) {
    (i % 2 ? energy_v_ : energy_k_) += energies[i].all;
    (i % 2 ? kept_v_ : kept_k_) += std::min(energies[i].kept, energies[i].all);
  }
  window_.PopFront(n * blocks);
}

}  // namespace palu
