// Seal: how tokens leave the exact window.
#include <algorithm>
#include <cstring>
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

// x[d][t] of head `head` of a unit, 32 tokens from `first` on, less its mean at their positions.
void Sequence::TakeMeans(const GroupCodec& group, int64_t first, int head, int dim,
                         float* x) const {
  for (int d = 0; d < dim && !group.mean.empty(); ++d) {
    for (int t = 0; t < kBlockTokens; ++t) x[d * kBlockTokens + t] -= group.mean[head * dim + d];
  }
  if (group.rotated_means.empty()) return;
  thread_local std::vector<float> means;  // [32][D]
  means.assign(static_cast<size_t>(kBlockTokens) * dim, 0.0f);
  group.rotated_means[head].Add(position_of(first), kBlockTokens, 1.0f, means.data(), dim);
  for (int d = 0; d < dim; ++d) {
    for (int t = 0; t < kBlockTokens; ++t) x[d * kBlockTokens + t] -= means[t * dim + d];
  }
}

// Packs tokens of the window, from its page `from` on, as one side of one unit of page `index`.
Sequence::Energy Sequence::EncodeSide(int64_t from, int64_t index, int unit, bool is_v,
                                      uint8_t* page) const {
  const KernelTable& kernels = Active();
  const PageLayout& layout = codec_->layout;
  const PageLayout& raw = context_->window.layout;
  const HeadUnit& heads = codec_->units[unit];
  const GroupCodec& group = (is_v ? codec_->v : codec_->k).unit(unit);
  const int tokens = layout.page_tokens, width = group.dim, rank = group.rank();
  const int dim = width / (heads.last - heads.first);
  thread_local std::vector<float> scratch;
  scratch.resize(static_cast<size_t>(dim) * kBlockTokens + static_cast<size_t>(width) * tokens +
                 static_cast<size_t>(rank) * (width + tokens));
  float* const block = scratch.data();                // [D][32] of one head
  float* const centred = block + dim * kBlockTokens;  // [unit's D][T]
  float* const encoder = centred + width * tokens;    // [rank][unit's D]
  float* const latent = encoder + rank * width;       // [rank][T]
  const PagePlan& plan = is_v ? context_->window.v : context_->window.k;
  Energy energy;
  for (int task = 0; task < tokens / kBlockTokens * (heads.last - heads.first); ++task) {
    const int i = task / (heads.last - heads.first), h = task % (heads.last - heads.first);
    kernels.decode_block(
        plan, window_.page(from + i) + (is_v ? raw.v_offset : raw.k_offset)[heads.first + h], 0,
        block);
    TakeMeans(group, encoded_first() + index * tokens + i * kBlockTokens, h, dim, block);
    for (int d = 0; d < dim; ++d) {
      for (int t = 0; t < kBlockTokens; ++t) {
        const float x = block[d * kBlockTokens + t];
        centred[(h * dim + d) * tokens + i * kBlockTokens + t] = x;
        energy.all += static_cast<double>(x) * x;
      }
    }
  }
  if (group.basis.empty()) {
    std::copy_n(centred, static_cast<int64_t>(width) * tokens, latent);
  } else {
    kernels.f16_to_f32((group.encoder.empty() ? group.basis : group.encoder).data(), encoder,
                       static_cast<int64_t>(rank) * width);
    kernels.gemm({.a = encoder,
                  .lda = width,
                  .b = centred,
                  .ldb = tokens,
                  .c = latent,
                  .ldc = tokens,
                  .m = rank,
                  .n = tokens,
                  .k = width});
  }
  for (int64_t j = 0; j < static_cast<int64_t>(rank) * tokens; ++j) {
    energy.kept += static_cast<double>(latent[j]) * latent[j];
  }
  // Latents of a weighted fit are no lengths; their share cannot be told.
  if (!group.encoder.empty()) energy.kept = energy.all;
  kernels.encode_page(group.plan, latent, tokens,
                      page + (is_v ? layout.v_offset : layout.k_offset)[unit]);
  return energy;
}

void Sequence::EncodePages(int64_t n) {
  const int64_t sides = 2 * static_cast<int64_t>(codec_->units.size());
  const int blocks = codec_->layout.page_tokens / kBlockTokens;
  const int64_t first = encoded_->pages();
  encoded_->Extend(n);
  std::vector<uint8_t*> pages;
  for (int64_t p = 0; p < n; ++p) pages.push_back(encoded_->MutablePage(first + p));
  std::vector<Energy> energies(static_cast<size_t>(n * sides));
  ParallelFor(context_->threads, n * sides, [&](int64_t task) {
    const int64_t p = task / sides;
    const int unit = static_cast<int>(task % sides / 2);
    energies[static_cast<size_t>(task)] =
        EncodeSide(p * blocks, first + p, unit, task % 2, pages[p]);
  });
  for (size_t i = 0; i < energies.size(); ++i) {
    (i % 2 ? energy_v_ : energy_k_) += energies[i].all;
    (i % 2 ? kept_v_ : kept_k_) += std::min(energies[i].kept, energies[i].all);
  }
  window_.PopFront(n * blocks);
}

}  // namespace palu
