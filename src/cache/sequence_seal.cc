// Seal: how tokens leave the exact window.
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/threads.h"
#include "cache/sequence.h"
#include "kernels/kernels.h"

namespace palu {
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

// x[d][t] of 32 tokens less the group's mean at their positions.
void Sequence::TakeMeans(const GroupCodec& group, int64_t first, float* x) const {
  for (size_t d = 0; d < group.mean.size(); ++d) {
    for (int t = 0; t < kBlockTokens; ++t) x[d * kBlockTokens + t] -= group.mean[d];
  }
  if (group.rotated_mean.empty()) return;
  thread_local std::vector<float> means;  // [32][D]
  means.assign(static_cast<size_t>(kBlockTokens) * group.dim, 0.0f);
  group.rotated_mean.Add(position_of(first), kBlockTokens, 1.0f, means.data(), group.dim);
  for (int d = 0; d < group.dim; ++d) {
    for (int t = 0; t < kBlockTokens; ++t) {
      x[d * kBlockTokens + t] -= means[static_cast<size_t>(t) * group.dim + d];
    }
  }
}

// Packs the first tokens of the window as one side of one head: to `page`, as page `index`.
Sequence::Energy Sequence::EncodeSide(int64_t from, int64_t index, int head, bool is_v,
                                      uint8_t* page) const {
  const KernelTable& kernels = Active();
  const PageLayout& layout = codec_->layout;
  const PageLayout& raw = context_->window.layout;
  const GroupCodec& group = (is_v ? codec_->v : codec_->k).head(head);
  const int tokens = layout.page_tokens, dim = group.dim, rank = group.rank();
  thread_local std::vector<float> scratch;
  scratch.resize(static_cast<size_t>(dim) * (kBlockTokens + tokens) +
                 static_cast<size_t>(rank) * (dim + tokens));
  float* const block = scratch.data();                // [D][32]
  float* const centred = block + dim * kBlockTokens;  // [D][T]
  float* const encoder = centred + dim * tokens;      // [rank][D]
  float* const latent = encoder + rank * dim;         // [rank][T]
  const PagePlan& plan = is_v ? context_->window.v : context_->window.k;
  Energy energy;
  for (int i = 0; i < tokens / kBlockTokens; ++i) {
    kernels.decode_block(plan, window_.page(from + i) + (is_v ? raw.v_offset : raw.k_offset)[head],
                         0, block);
    TakeMeans(group, config_sinks() + index * tokens + i * kBlockTokens, block);
    for (int d = 0; d < dim; ++d) {
      for (int t = 0; t < kBlockTokens; ++t) {
        const float x = block[d * kBlockTokens + t];
        centred[d * tokens + i * kBlockTokens + t] = x;
        energy.all += static_cast<double>(x) * x;
      }
    }
  }
  if (group.basis.empty()) {
    std::copy_n(centred, static_cast<int64_t>(dim) * tokens, latent);
  } else {
    kernels.f16_to_f32((group.encoder.empty() ? group.basis : group.encoder).data(), encoder,
                       static_cast<int64_t>(rank) * dim);
    kernels.gemm({.a = encoder,
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
  // Latents of a weighted fit are no lengths; their share cannot be told.
  if (!group.encoder.empty()) energy.kept = energy.all;
  kernels.encode_page(group.plan, latent, tokens,
                      page + (is_v ? layout.v_offset : layout.k_offset)[head]);
  return energy;
}

void Sequence::EncodePages(int64_t n) {
  const int heads = context_->shape.kv_heads;
  const int blocks = codec_->layout.page_tokens / kBlockTokens;
  const int64_t first = encoded_->pages();
  encoded_->Extend(n);
  std::vector<uint8_t*> pages;
  for (int64_t p = 0; p < n; ++p) pages.push_back(encoded_->MutablePage(first + p));
  std::vector<Energy> energies(static_cast<size_t>(n) * heads * 2);
  ParallelFor(context_->threads, n * heads * 2, [&](int64_t task) {
    const int64_t p = task / (heads * 2);
    energies[static_cast<size_t>(task)] =
        EncodeSide(p * blocks, first + p, static_cast<int>(task / 2 % heads), task % 2, pages[p]);
  });
  for (size_t i = 0; i < energies.size(); ++i) {
    (i % 2 ? energy_v_ : energy_k_) += energies[i].all;
    (i % 2 ? kept_v_ : kept_k_) += std::min(energies[i].kept, energies[i].all);
  }
  window_.PopFront(n * blocks);
}

}  // namespace palu
